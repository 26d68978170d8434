"""Results as text."""

from dataclasses import replace

from bench.cases import MODES, Case
from bench.measure import TENSORS
from bench.records import Record
from bench.table import accuracy_table, compared, growth_table, left_out_lines, measures_table


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
        Record("accuracy", Case(length=64), "gone", "gone", "both", reason="not available here: no GPU"),
    ]
    text = "\n".join(accuracy_table(checks))
    assert text.count("FAILED") == 1 and text.count("absent") == 1
    assert "bad, float32: dq: error 1e-3 is over 1e-5" in text
    assert "1.0e-06" in text


def test_speed_up_and_saving() -> None:
    lines = measures_table(results(1024))
    assert len(lines) == 7
    assert "10.5 ms" in lines[1] and "16 MiB" in lines[1]
    assert "10.0×" in lines[2].split() and lines[2].split()[-3:] == ["0.25", "MiB", "64.0×"]


def test_growth_in_words() -> None:
    text = "\n".join(growth_table(results(512, 1024, 2048)))
    assert text.count("T^2.00") == 9 and text.count("T^1.00") == 3
    assert "naive takes 4.0 times the memory, fused takes 2.0 times the memory" in text
    assert growth_table([]) == ["too few figures to fit"]


def test_what_was_left_out_says_why() -> None:
    record = Record("left out", Case(length=4096), "naive", "naive", "both", reason="it needs about 9.0 GiB")
    assert left_out_lines([record]) == ["naive: it needs about 9.0 GiB (4096 forward + backward)"]


def test_a_comparison_marks_what_left_the_spread() -> None:
    old, new = results(64), [replace(r, samples=(2 * r.median,)) for r in results(64)]
    lines = compared(old, new)
    assert len(lines) == 2 + len(old) and all(line.endswith("2.00  more") for line in lines[2:])
    assert all(line.endswith("1.00") for line in compared(old, old)[2:])
    assert "no case" in compared(old, results(32))[0]
