"""Results as text: the accuracy table, the time and memory table, the growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.cases import MODE_TITLES, MODES, Mode
from bench.measure import TENSORS
from bench.providers import NAIVE
from bench.records import Growth, Kind, Record, growth, series, timed_providers

ABSENT = "-"


def columns(rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Rows as aligned lines; the first `left` columns lean left, the others right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def accuracy_table(records: Iterable[Record]) -> list[str]:
    """Largest error by tensor, a line per provider and dtype, each dtype headed by the naive run."""
    checks = [record for record in records if record.kind == "accuracy"]
    rows: list[tuple[str, ...]] = [("provider", "dtype", *TENSORS, "verdict")]
    for dtype in dict.fromkeys(record.case.dtype for record in checks):
        same = [record for record in checks if record.case.dtype == dtype]
        judged = next((record.errors for record in same if record.errors), None)
        if judged is not None:
            rows.append((NAIVE.label, dtype, *(f"{judged[name]['naive']:.1e}" for name in TENSORS), ABSENT))
        for record in same:
            errors = [f"{record.errors[name]['error']:.1e}" if record.errors else ABSENT for name in TENSORS]
            rows.append((record.label, dtype, *errors, "ok" if record.reason is None else "FAILED"))
    lines = columns(rows, left=2)
    lines += [f"{r.label}, {r.case.dtype}: {r.reason}" for r in checks if r.reason is not None]
    return lines


def milliseconds(record: Record) -> str:
    """Median in milliseconds, three figures."""
    value = record.median * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def spread(record: Record) -> str:
    """Half the distance of the quartiles, as a share of the median, and the number of samples."""
    low, high = record.quartiles
    return f"n={len(record.samples)}" if low == high else f"±{(high - low) / 2 / record.median:.0%} n={len(record.samples)}"


def mebibytes(record: Record) -> str:
    """Median in MiB, three figures."""
    value = record.median / 2**20
    return f"{value:.0f} MiB" if value >= 100 else f"{value:.3g} MiB"


def ratio(base: Record | None, record: Record | None) -> str:
    """How many times less than the baseline."""
    if base is None or record is None or not base.median or not record.median:
        return ABSENT
    return f"{base.median / record.median:.1f}×"


def measures_table(records: Sequence[Record]) -> list[str]:
    """Time and peak memory, a line per length, mode and provider."""
    rows: list[tuple[str, ...]] = [("T", "mode", "provider", "time", "spread", "speed-up", "peak memory", "saving")]
    lengths = sorted({record.case.length for record in records if record.kind in ("time", "memory")})
    for length in lengths:
        for mode in MODES:
            rows += measures_rows(records, length, mode)
    return columns(rows, left=3)


def measures_rows(records: Sequence[Record], length: int, mode: Mode) -> list[tuple[str, ...]]:
    """Rows of one length and mode."""
    rows: list[tuple[str, ...]] = []
    base_time, base_memory = (series(records, kind, NAIVE.name, mode).get(length) for kind in ("time", "memory"))
    for name, label in timed_providers(records).items():
        time, memory = (series(records, kind, name, mode).get(length) for kind in ("time", "memory"))
        if time is None and memory is None:
            continue
        rows.append(
            (
                "" if rows else str(length),
                "" if rows else MODE_TITLES[mode],
                label,
                ABSENT if time is None else milliseconds(time),
                ABSENT if time is None else spread(time),
                ratio(base_time, time),
                ABSENT if memory is None else mebibytes(memory),
                ratio(base_memory, memory),
            )
        )
    return rows


def growth_table(records: Sequence[Record]) -> list[str]:
    """Fitted exponents of time and memory, and what memory does when the length doubles."""
    kinds: tuple[Kind, ...] = ("time", "memory")
    rows: list[tuple[str, ...]] = [("provider", *(f"{kind}, {MODE_TITLES[mode]}" for kind in kinds for mode in MODES))]
    fits: list[Growth] = []
    doubling: list[str] = []
    for name, label in timed_providers(records).items():
        found = [growth(series(records, kind, name, mode)) for kind in kinds for mode in MODES]
        fits += [fit for fit in found if fit is not None]
        rows.append((label, *(ABSENT if fit is None else f"T^{fit.exponent:.2f}" for fit in found)))
        if found[-1] is not None:
            doubling.append(f"{label} takes {2 ** found[-1].exponent:.1f} times the memory")
    if not fits:
        return ["too few figures to fit"]
    head = f"fitted over T = {min(fit.first for fit in fits)} to {max(fit.last for fit in fits)}"
    lines = [head, *columns(rows, left=1)]
    if doubling:
        lines.append(f"When T doubles, there are 4 times the comparisons; {', '.join(doubling)}.")
    return lines


def left_out_lines(records: Iterable[Record]) -> list[str]:
    """What got no figure, and why."""
    return [
        f"{record.label}, T = {record.case.length}, {MODE_TITLES[record.mode]}: {record.reason}"
        for record in records
        if record.kind == "left out"
    ]
