"""The command line."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import run as job_module
from bench.__main__ import main
from bench.cases import Case
from bench.records import Record, environment, write

options: list[dict[str, Any]] = []


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have been run."""
    seen: list[tuple[Any, ...]] = []
    options.clear()

    def run(size: str, *, device: str | None, out: Path, **more: Any) -> int:
        seen.append((size, device, out))
        options.append(more)
        return 0

    monkeypatch.setattr(job_module, "run", run)
    return seen


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ("full", None, job_module.RESULTS)),
        (["--quick"], ("quick", None, job_module.RESULTS)),
        (["run"], ("full", None, job_module.RESULTS)),
        (["run", "--quick", "--device", "cpu"], ("quick", "cpu", job_module.RESULTS)),
        (["smoke", "--out", "here"], ("smoke", None, Path("here"))),
    ],
)
def test_commands(words: list[str], wanted: tuple[Any, ...], runs: list[tuple[Any, ...]]) -> None:
    assert main(words) == 0
    assert runs == [wanted]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert all(word in text for word in ("run", "plot", "gpu", "static", "smoke", "bench.host", "--quick", "bench/results/local"))


def test_plot_draws_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = environment("cpu")
    records = [Record("time", Case(length=t), "naive", "naive", "both", (t * 1e-6,), environment=where) for t in (64, 128)]
    write(tmp_path / "r.jsonl", records)
    assert main(["plot", str(tmp_path / "r.jsonl")]) == 0
    assert (tmp_path / "r" / "time.png").exists()
    assert "time.png" in capsys.readouterr().out


def test_options_of_a_run_arrive(runs: list[tuple[Any, ...]]) -> None:
    assert main(["run", "--sweep", "gqa", "--mode", "both,backward", "--providers", "sdpa-flash", "--compare", "old"]) == 0
    wanted = {"sweep": "gqa", "modes": ("backward", "both"), "providers": "sdpa-flash", "compare": Path("old")}
    assert options == [wanted] and len(runs) == 1


def test_an_unknown_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--mode", "sideways"])
    assert "no mode 'sideways'" in capsys.readouterr().err


def test_the_gpu_script_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["gpu", "--out", str(tmp_path)]) == 2
        assert "--smoke" in capsys.readouterr().out


def test_plot_of_no_file_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
