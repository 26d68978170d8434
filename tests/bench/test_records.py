"""JSON lines, and the growth fitted to them."""

from pathlib import Path

import pytest

from bench.cases import Case
from bench.records import Record, environment, growth, machine_title, matmul_rate, read, series, timed_providers, write


def timed(length: int, *samples: float, provider: str = "naive") -> Record:
    return Record("time", Case(length=length), provider, provider, "both", samples)


def test_lines_come_back_as_they_went(tmp_path: Path) -> None:
    records = [
        Record("time", Case(length=128), "naive", "naïve", "both", (0.1, 0.2, 0.3), environment=environment("cpu")),
        Record("accuracy", Case(length=1), "x", "x", "both", errors={"out": {"error": 0.0, "naive": 1.0}}, reason="r"),
    ]
    write(tmp_path / "new" / "results.jsonl", records)
    assert read(tmp_path / "new" / "results.jsonl") == records


def test_median_and_quartiles() -> None:
    record = timed(128, 5.0, 1.0, 2.0, 3.0, 4.0)
    assert (record.median, record.quartiles) == (3.0, (2.0, 4.0))
    assert timed(128, 7.0).quartiles == (7.0, 7.0)


@pytest.mark.parametrize("line", ["[]", "{}", '{"schema": 99}', "no json"])
def test_a_foreign_line_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "f.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"not a result of schema|Expecting value"):
        read(tmp_path / "f.jsonl")


def test_the_environment_says_where_a_figure_comes_from() -> None:
    where = environment("cpu")
    assert set(where) == {"versions", "machine", "revision", "date"}
    assert set(where["versions"]) == {"python", "torch", "triton", "numpy", "andrea-triton"}
    assert where["machine"]["cores"] >= 1
    assert where["date"].endswith("+00:00")
    assert where["versions"]["torch"] in machine_title(where)


def test_growth_is_the_exponent_of_a_power_law() -> None:
    fit = growth({length: timed(length, 3e-9 * length**1.5) for length in (512, 1024, 2048)})
    assert fit is not None
    assert fit.exponent == pytest.approx(1.5)
    assert (fit.first, fit.last) == (512, 2048)


def test_growth_leaves_out_short_lengths_and_zeros() -> None:
    figures = {128: 1.0, 256: 1.0, 512: 1.0, 1024: 4.0, 2048: 16.0}
    fit = growth({length: timed(length, figure) for length, figure in figures.items()})
    assert fit is not None and fit.exponent == pytest.approx(2.0)
    assert growth({128: timed(128, 0.0), 256: timed(256, 1.0)}) is None


def test_a_series_rises_with_length() -> None:
    records = [timed(512, 2.0), timed(128, 1.0), timed(256, 9.0, provider="other")]
    assert list(series(records, "time", "naive", "both")) == [128, 512]
    assert timed_providers(records) == {"naive": "naive", "other": "other"}


def test_the_roofline_is_the_best_rate_of_a_dtype() -> None:
    case = Case(length=16)
    rates = [Record("rate", case, "matmul", "matrix product", "forward", samples) for samples in ((1.0, 3.0), (2.0,))]
    assert matmul_rate(rates, case.dtype) == 3.0
    assert matmul_rate(rates, "float64") is None
