"""Results as text: the accuracy table, the time and memory table, the growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.cases import MODE_TITLES, Mode, title_of
from bench.measure import TENSORS
from bench.providers import NAIVE
from bench.records import Growth, Kind, Record, growth, matmul_rate, modes_of, series, timed_providers
from bench.runner import ABSENT

NONE = "-"


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
    rows: list[tuple[str, ...]] = [("provider", "case", *TENSORS, "verdict")]
    for case in dict.fromkeys(record.case for record in checks):
        same = [record for record in checks if record.case == case]
        where = case.dtype if checks[0].sweep in ("T", "dtype", "batch") else f"{checks[0].sweep} {case.at(checks[0].sweep)}"
        naive = {name: error["naive"] for record in same for name, error in record.errors.items()}
        rows.append((NAIVE.label, where, *(f"{naive[name]:.1e}" if name in naive else NONE for name in TENSORS), NONE))
        for record in same:
            errors = [f"{record.errors[name]['error']:.1e}" if name in record.errors else NONE for name in TENSORS]
            rows.append((record.label, where, *errors, verdict(record)))
    lines = columns(rows, left=2)
    reasons = {f"{r.label}, {r.case.dtype}: {r.reason}": None for r in checks if r.reason is not None}
    return [*lines, *reasons]


def verdict(check: Record) -> str:
    """An accuracy record in a word."""
    return "ok" if check.reason is None else "absent" if check.reason.startswith(ABSENT) else "FAILED"


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
        return NONE
    return f"{base.median / record.median:.1f}×"


def speed(record: Record) -> str:
    """Operations of the maths per second, three figures."""
    value = record.flops_per_second
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def measures_table(records: Sequence[Record]) -> list[str]:
    """Time and peak memory, a line per point of the sweep, mode and provider."""
    drawn = [record for record in records if record.kind in ("time", "memory")]
    if not drawn:
        return ["no figures"]
    head = ("mode", "provider", "time", "spread", "speed-up", "of SDPA's speed", "speed", "of matmul", "peak memory", "saving")
    rows: list[tuple[str, ...]] = [(drawn[0].sweep, *head)]
    for point in dict.fromkeys(record.case.at(record.sweep) for record in drawn):
        for mode in modes_of(drawn):
            rows += measures_rows(records, point, mode)
    return columns(rows, left=3)


def measures_rows(records: Sequence[Record], point: int | str, mode: Mode) -> list[tuple[str, ...]]:
    """Rows of one point of the sweep and mode."""
    rows: list[tuple[str, ...]] = []
    base_time, base_memory = (series(records, kind, NAIVE.name, mode).get(point) for kind in ("time", "memory"))
    sdpa = series(records, "time", "sdpa-flash", mode).get(point)
    for name, label in timed_providers(records).items():
        time, memory = (series(records, kind, name, mode).get(point) for kind in ("time", "memory"))
        if time is None and memory is None:
            continue
        rows.append(
            (
                "" if rows else str(point),
                "" if rows else MODE_TITLES[mode],
                label,
                *((NONE,) * 2 if time is None else (milliseconds(time), spread(time))),
                ratio(base_time, time),
                NONE if sdpa is None or time is None else f"{sdpa.median / time.median:.2f}",
                *((NONE,) * 2 if time is None else (speed(time), share(time, records))),
                NONE if memory is None else mebibytes(memory),
                ratio(base_memory, memory),
            )
        )
    return rows


def share(record: Record, records: Sequence[Record]) -> str:
    """Part of the measured rate of matrix products."""
    rate = matmul_rate(records, record.case.dtype)
    return NONE if rate is None else f"{record.flops_per_second / rate:.0%}"


def growth_table(records: Sequence[Record]) -> list[str]:
    """Fitted exponents of time and memory, and what memory does when the length doubles."""
    kinds: tuple[Kind, ...] = ("time", "memory")
    modes = modes_of(records)
    rows: list[tuple[str, ...]] = [("provider", *(f"{kind}, {MODE_TITLES[mode]}" for kind in kinds for mode in modes))]
    fits: list[Growth] = []
    doubling: list[str] = []
    for name, label in timed_providers(records).items():
        found = [growth(series(records, kind, name, mode)) for kind in kinds for mode in modes]
        fits += [fit for fit in found if fit is not None]
        rows.append((label, *(NONE if fit is None else f"T^{fit.exponent:.2f}" for fit in found)))
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
    """What got no figure, why, and where on the sweep."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for r in records:
        if r.kind == "left out":
            where.setdefault((r.label, str(r.reason)), {})[f"{r.case.at(r.sweep)} {MODE_TITLES[r.mode]}"] = None
    return [f"{label}: {reason} ({', '.join(points)})" for (label, reason), points in where.items()]


def summary(records: Sequence[Record]) -> list[str]:
    """All tables of a run."""
    checked = next((r.case for r in records if r.kind == "accuracy"), None)
    timed = [r for r in records if r.kind in ("time", "memory")]
    lines: list[str] = []
    if checked is not None:
        lines += [
            f"Accuracy: largest |x - fp64| at T = {checked.length}.",
            "Rule: at most 2 × the error of the naive run in the same dtype + the rounding of the result.",
            *accuracy_table(records),
            "",
        ]
    if timed:
        sweep = timed[0].sweep
        lines.append(f"Time (median) and peak memory beyond the inputs: {title_of([r.case for r in timed], sweep)}.")
    lines += [*measures_table(records), *left_out_lines(records)]
    if timed and sweep == "T":
        lines += ["", "Growth with the length T,", *growth_table(records)]
    return lines


def compared(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """What changed between two runs: ratios of medians, marked where the quartiles do not touch.

    Args:
        old: records of the earlier run.
        new: records of the later one; only cases that both measured are compared.

    Returns:
        A heading and a line per time and memory figure.
    """
    before = {(str(r.kind), r.case, r.provider, r.mode): r for r in old if r.kind in ("time", "memory")}
    rows: list[tuple[str, ...]] = [("case", "mode", "provider", "what", "before", "now", "now / before", "")]
    for r in new:
        was = before.get((r.kind, r.case, r.provider, r.mode))
        if was is None or not was.median or not r.median:
            continue
        show = milliseconds if r.kind == "time" else mebibytes
        change = r.median / was.median
        apart = r.quartiles[0] > was.quartiles[1] or r.quartiles[1] < was.quartiles[0]
        mark = "" if not apart or abs(change - 1) < 0.01 else "more" if change > 1 else "less"
        point = f"{r.sweep} {r.case.at(r.sweep)}"
        rows.append((point, MODE_TITLES[r.mode], r.label, r.kind, show(was), show(r), f"{change:.2f}", mark))
    if len(rows) == 1:
        return ["Compared with the earlier run: no case was measured in both."]
    head = "Compared with the earlier run: medians; less and more are said where the quartiles do not touch."
    return [head, *columns(rows, left=4)]
