"""A page of text from the files of a GPU run: what is right, who wins where and by how much, what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.pieces import STEPS, Line, lines
from bench.providers import own
from bench.records import Record, read
from bench.table import summary

SHOWN = 20  # failures


def summarise(out: Path) -> str:
    """Write summary.txt, and plots where matplotlib is there.

    Args:
        out: folder of the results.

    Returns:
        The page.
    """
    found = lines(out / "pieces.jsonl")
    records = read(out / "speed.jsonl") if (out / "speed.jsonl").exists() else []
    page = [*counts(found), "", *winners(records)]
    for D in dict.fromkeys(r.case.head_dim for r in records if r.kind == "time"):
        page += ["", *summary([r for r in records if r.case.head_dim == D or r.kind == "rate"])]
    page += ["", *small(lines(out / "latency.jsonl")), *trained(lines(out / "training.jsonl")), "", *failures(found)]
    (out / "summary.txt").write_text("\n".join(page) + "\n", encoding="utf-8")
    if records and find_spec("matplotlib") is not None:
        from bench.plot import draw_all

        draw_all(records, out / "plots")
    return "\n".join(page)


def counts(found: Sequence[Line]) -> list[str]:
    """A line for each step."""
    text = []
    for step in STEPS:
        ended = Counter(line["ok"] for line in found if line["step"] == step)
        took = sum(line["seconds"] for line in found if line["step"] == step)
        text.append(f"{step:12} {ended[True]} done, {ended[False]} failed, {ended[None]} left out for time; {took:.0f} s")
    return text


def winners(records: Sequence[Record]) -> list[str]:
    """Of every case and mode the fastest, and how this library stands beside it and beside the next of the others."""
    times = [r for r in records if r.kind == "time" and r.samples]
    text = ["fastest (this library's speed beside the best of the others; number of samples):"] if times else []
    for case, mode in dict.fromkeys((r.case, r.mode) for r in times):
        group = {r.provider: r for r in times if (r.case, r.mode) == (case, mode)}
        ours = group.pop(own(case.device), None)
        best = min(group.values(), key=lambda r: r.median, default=None)
        first = min((r for r in (ours, best) if r is not None), key=lambda r: r.median)
        beside = f"{best.median / ours.median:.2f}" if ours is not None and best is not None else "-"
        samples = "/".join(str(len(r.samples)) for r in (ours, best) if r is not None)
        text.append(f"  D = {case.head_dim:3}, T = {case.length:5}, {mode:8} {first.label:32} {beside} (n = {samples})")
    return text


def small(rows: Sequence[Line]) -> list[str]:
    """Small calls: microseconds, made by Python and replayed from a graph."""

    def said(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e6:.0f}"

    return [
        f"small: B = {row['case']['batch']}, T = {row['case']['length']:4} {row['provider']:16} "
        f"{said(row['eager_s'])} µs called, {said(row['graph_s'])} µs from a graph (n = {row['samples']})"
        for row in rows
    ]


def trained(rows: Sequence[Line]) -> list[str]:
    """Training steps."""
    return [
        f"training {row['model']}, {row['backend']}: {row['tokens_per_second']:,.0f} tokens/s (n = {len(row['samples'])}), "
        f"{row['peak_bytes'] / 2**30:.2f} GiB"
        for row in rows
    ]


def failures(found: Sequence[Line]) -> list[str]:
    """What failed, the first of them."""
    failed = [f"FAILED {line['step']}, {line['piece']}: {line['said']}" for line in found if line["ok"] is False]
    more = [f"... and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
    return [*failed[:SHOWN], *more] or ["nothing failed"]
