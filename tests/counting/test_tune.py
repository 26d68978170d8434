"""The search for tilings, and the table that the library takes when told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_triton.counting import launches, tune
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.tune import Setting, Trial, entries, search, use, visited
from andrea_triton.errors import CompileError, FitError, ShapeError
from andrea_triton.launch import run
from andrea_triton.launch.configs import TUNED, Config, candidates

TINY = [
    "--target", "sm_80", "--kernel", "forward", "--d", "16", "--dtype", "fp16", "--rows", "32", "--cols", "32", "--warps", "4",
    "--stages", "1", "--held", "yes", "--length", "64",
]  # fmt: skip
OWN = candidates("forward", "sm_80", 16, 2, 64, 64)[0]
SETTING = Setting("sm_80", 16, "fp16", 1, 1, 64)


@pytest.fixture(autouse=True)
def own_tiles() -> Iterator[None]:
    yield
    use(None)


def planted(file: Path, **changes: Any) -> Path:
    """A table with one entry."""
    entry = {"kernel": "forward", "target": "sm_80", "D": 64, "bytes": 2, "tile": [64, 32, 8, 3], **changes}
    file.write_text(json.dumps({"format": 1, "entries": [entry]}))
    return file


def tile(kernel: str = "forward", target: str = "sm_80", D: int = 64, itemsize: int = 2) -> Config:
    return candidates(kernel, target, D, itemsize, 1024, 1024)[0]


def test_a_tiny_search_writes_a_table_that_the_library_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiles.json"
    assert tune.main([*TINY, "--out", str(file)]) == 0
    record = json.loads(file.read_text())
    made, (entry,) = record["made"], record["entries"]
    assert made["triton"] and made["torch"] == torch.__version__ and made["date"].startswith("20") and "revision" in made
    assert (made["ranked"], made["device"]) == ("model", None)
    assert (entry["kernel"], entry["target"], entry["D"], entry["bytes"], entry["tried"]) == ("forward", "sm_80", 16, 2, 2)
    assert entry["own"] == list(OWN) and 0 < entry["cost"] <= entry["own_cost"]
    shown = capsys.readouterr().out
    assert "the library's own" in shown and "2 tilings tried, 0 of them skipped" in shown and f"use({str(file)!r})" in shown
    use(file)
    assert list(tile(D=16)) == entry["tile"]


def test_a_planted_table_changes_the_tile_that_is_taken_and_nothing_else(tmp_path: Path) -> None:
    before = {(k, t, d, i): tile(k, t, d, i) for k in tune.KERNELS for t in ("sm_80", "sm_86") for d in (32, 64) for i in (2, 4)}
    use(planted(tmp_path / "t.json"))
    after = {key: tile(*key) for key in before}
    assert {key for key in before if before[key] != after[key]} == {("forward", "sm_80", 64, 2)}
    assert tile() == tile(D=40) == Config(64, 32, 8, 3)
    q = torch.zeros(1, 1, 64, 64, dtype=torch.float16)
    assert launches.compiled_launches(q, q, q, target="sm_80")[0].config == Config(64, 32, 8, 3)
    use(None)
    assert {key: tile(*key) for key in before} == before and not TUNED


def test_smaller_tiles_still_follow(tmp_path: Path) -> None:
    use(planted(tmp_path / "t.json"))
    found = candidates("forward", "sm_80", 64, 2, 1024, 1024)
    assert found[:2] == (Config(64, 32, 8, 3), Config(32, 32, 8, 3)) and found[-1] == Config(16, 16, 4, 1)


def test_taking_a_table_drops_the_plans_made_before(tmp_path: Path) -> None:
    run._starts.keep("a call", [])
    use(planted(tmp_path / "t.json"))
    assert not run._starts


@pytest.mark.parametrize(
    "changes", [{"tile": [64]}, {"tile": [64, 48, 8, 3]}, {"tile": [256, 32, 8, 3]}, {"tile": [64, 32, 3, 3]},
                {"tile": [64, 32, 8, 3, 2]},
                {"kernel": "backward"}, {"D": "64"}],
)  # fmt: skip
def test_a_wrong_table_is_refused_and_changes_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    use(planted(tmp_path / "right.json"))
    with pytest.raises(ShapeError, match=r"wrong\.json is no table of tiles .*write one with python -m"):
        use(planted(tmp_path / "wrong.json", **changes))
    assert tile() == Config(64, 32, 8, 3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "entries": []}'])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ShapeError, match="is no table of tiles"):
        use(tmp_path / "f.json")
    with pytest.raises(FileNotFoundError):
        use(tmp_path / "missing.json")


def test_what_does_not_compile_or_fit_is_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {Config(32, 32): CompileError("no"), Config(64, 64): FitError("no"), Config(64, 32): FitError("no")}

    def modelled(planned: launches.Planned, problem: Any, setting: Setting, config: Config) -> Trial:
        if config in wrong:
            raise wrong[config]
        return Trial(config, float(config.BLOCK_M), good=config.BLOCK_N == 16)

    ticks: list[int] = []
    bar = type("Bar", (), {"update": lambda self: ticks.append(1)})()
    monkeypatch.setattr(tune, "modelled", modelled)
    found = search(SETTING, ["forward", "dq"], [*wrong, Config(16, 32), Config(64, 16)], "model", bar)
    assert list(found) == ["forward", "dq"] and len(ticks) == 2 * 6
    assert [t.config for t in found["forward"][:3]] == [Config(64, 16), Config(16, 32), OWN]
    (line, _) = entries(SETTING, found, {name: trials[2].config for name, trials in found.items()})
    assert line["tile"] == [64, 16, 4, 2, False, False, 0, False] and line["skipped"] == {
        "does not compile": 1,
        "does not fit the card": 2,
    }


def test_a_card_without_room_fits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"sm_80": type(CARDS["sm_80"])(**{**vars(CARDS["sm_80"]), "shared_per_cta": 16})}
    monkeypatch.setattr(launches, "CARDS", small)
    found = search(SETTING, ["forward"], [Config(16, 16, 4, 1)], "model")
    assert {t.skipped for t in found["forward"]} == {"does not fit the card"}
    assert entries(SETTING, found, {"forward": OWN}) == []


def test_spills_and_few_warps_rank_behind() -> None:
    trials = [Trial(Config(16, 16), 1.0, good=False), Trial(Config(32, 16), 3.0), Trial(Config(64, 16), 2.0)]
    ranked = sorted(trials, key=tune.rank_of)
    assert [t.cost for t in ranked] == [2.0, 3.0, 1.0]


def test_tiles_visited_cover_what_is_visible() -> None:
    for config in (Config(16, 16), Config(64, 16), Config(16, 64), Config(128, 64)):
        full, edge = visited(128, config)
        area = config.BLOCK_M * config.BLOCK_N
        assert full * area <= 128 * 129 / 2 <= (full + edge) * area


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "there is no GPU here: name a --target"), (["--target", "sm_80", "--dtype", "fp16", "bf16"], "name one of them")],
)
def test_command_lines_that_ask_too_little_or_too_much(words: list[str], message: str, capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(tune.targets, "has_gpu", lambda: False)
    with pytest.raises(SystemExit):
        tune.main(words)
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        tune.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    assert "ranked by time" in text and "tune.use('tiles.json')" in text and "skipped and counted" in text
