"""The plots' files."""

from pathlib import Path

import pytest

from bench import plot
from bench.cases import MODES, Case, Mode
from bench.plot import draw_all, ratios
from bench.records import Kind, Record, environment

NAMES = {
    f"{plot}{theme}.{kind}"
    for plot in ("time", "memory", "speedup", "speed", "growth")
    for theme in ("", "-dark")
    for kind in ("png", "svg")
}


def record(kind: Kind, name: str, length: int, mode: Mode, *samples: float) -> Record:
    return Record(kind, Case(length=length), name, f"{name} label", mode, samples, environment=environment("cpu"))


@pytest.fixture(scope="module")
def results() -> list[Record]:
    return [
        record(kind, name, t, mode, *(scale * t**power * noise for noise in (1.0, 1.1, 1.3)))
        for kind, scale in (("time", 1e-8), ("memory", 1e2))
        for name, power in (("naive", 2.0), ("andrea-torch", 1.2))
        for t in (512, 1024, 2048)
        for mode in MODES
    ]  # type: ignore[misc]


def test_every_plot_is_written_in_both_themes(results: list[Record], tmp_path: Path) -> None:
    files = draw_all(results, tmp_path / "plots")
    assert {file.name for file in files} == NAMES
    assert all(file.stat().st_size > 5000 for file in files)


@pytest.mark.slow
def test_times_alone_and_a_memory_of_zero_are_drawn(
    results: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "THEMES", plot.THEMES[:1])
    times = [r for r in results if r.kind == "time"]
    assert draw_all([*times, record("memory", "andrea-torch", 256, "both", 0.0)], tmp_path)


def test_a_ratio_needs_both_figures_to_be_positive(results: list[Record]) -> None:
    records = [*results, record("memory", "andrea-torch", 256, "both", 0.0)]
    found = ratios(records, "memory", "andrea-torch", "both")
    assert list(found) == [512, 1024, 2048]
    assert found[1024] == pytest.approx(1024**0.8)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        draw_all([], tmp_path)
