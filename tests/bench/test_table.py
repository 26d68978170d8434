"""Results as text."""

from bench.cases import MODES, Case
from bench.measure import TENSORS
from bench.records import Record
from bench.table import accuracy_table, growth_table, left_out_lines, measures_table


def results(*lengths: int) -> list[Record]:
    return [
        Record(kind, Case(length=t), name, name, mode, (figure,))
        for t in lengths
        for mode in MODES
        for kind, name, figure in (
            ("time", "naive", t**2 * 1e-8),
            ("time", "fused", t**2 * 1e-9),
            ("memory", "naive", t**2 * 16.0),
            ("memory", "fused", t * 256.0),
        )
    ]  # type: ignore[misc]


def test_a_failed_check_is_shown_with_its_reason() -> None:
    errors = {name: {"error": 1e-3, "naive": 1e-6} for name in TENSORS}
    checks = [
        Record("accuracy", Case(length=64), "good", "good", "both", errors=errors),
        Record("accuracy", Case(length=64), "bad", "bad", "both", errors=errors, reason="dq: error 1e-3 is over 1e-5"),
        Record("accuracy", Case(length=64), "gone", "gone", "both", reason="not available here"),
    ]
    text = "\n".join(accuracy_table(checks))
    assert text.count("FAILED") == 2
    assert "bad, float32: dq: error 1e-3 is over 1e-5" in text
    assert "1.0e-06" in text


def test_speed_up_and_saving() -> None:
    lines = measures_table(results(1024))
    assert len(lines) == 5
    assert "10.5 ms" in lines[1] and "16 MiB" in lines[1]
    assert lines[2].split()[-4:] == ["10.0×", "0.25", "MiB", "64.0×"]


def test_growth_in_words() -> None:
    text = "\n".join(growth_table(results(512, 1024, 2048)))
    assert text.count("T^2.00") == 6 and text.count("T^1.00") == 2
    assert "naive takes 4.0 times the memory, fused takes 2.0 times the memory" in text
    assert growth_table([]) == ["too few figures to fit"]


def test_what_was_left_out_says_why() -> None:
    record = Record("left out", Case(length=4096), "naive", "naive", "both", reason="it needs about 9.0 GiB")
    assert left_out_lines([record]) == ["naive, T = 4096, forward + backward: it needs about 9.0 GiB"]
