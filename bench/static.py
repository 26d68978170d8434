"""What the compiler made of the kernels, counted and simulated without a GPU: `python -m bench static` writes JSON lines and
draws them.

The committed table, results/static.jsonl, is what tests/counting/test_static.py holds later kernels against.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plot import save
from bench.style import THEMES, Theme, legend_below, log_axis, new_figure, plain, style

Row = dict[str, Any]
Call = tuple[str, int, str, str]  # target, head dim, dtype, variant
FILE = Path(__file__).parent / "results" / "static.jsonl"
KERNELS = {"forward": "forward", "dkdv": "backward: dk, dv", "dq": "backward: dq"}
BAR = 0.8 / len(KERNELS)
LENGTH = 1024  # queries and keys of a counted call

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
DIMS = (32, 64, 128)
WIDE_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")
VARIANT_TARGETS = ("sm_80", "sm_89", "sm_90")
VARIANTS = ("window", "gqa", "softcap", "bias", "alibi", "sinks", "dropout")
# What the committed table holds: the plain causal call in 16 bits everywhere; in fp32, by IEEE's rules and in TF32, where people
# train; and what else a call can ask for, at the home head dim.
CALLS: tuple[Call, ...] = (
    *itertools.product(TARGETS, DIMS, ("bf16", "fp16"), ("causal",)),
    *itertools.product(WIDE_TARGETS, (256,), ("bf16",), ("causal",)),
    *itertools.product(WIDE_TARGETS, DIMS, ("fp32", "tf32"), ("causal",)),
    *itertools.product(VARIANT_TARGETS, (64,), ("bf16",), VARIANTS),
)


def wanted(targets: Sequence[str], dims: Sequence[int], dtypes: Sequence[str], variants: Sequence[str]) -> list[Call]:
    """The calls of the table that have one of each. An empty sequence asks for all.

    Raises:
        ValueError: there is none.
    """
    asked = (targets, dims, dtypes, variants)
    found = [call for call in CALLS if all(not some or value in some for value, some in zip(call, asked, strict=True))]
    if not found:
        raise ValueError(f"the table has no call with all of {asked}; python -m andrea_triton.counting.report counts any call")
    return found


def call_of(row: Row) -> Call:
    """The call that a line is of."""
    return row["target"], row["D"], row["dtype"], row["variant"]


def counted(call: Call) -> list[Row]:
    """The lines of one call."""
    from andrea_triton.counting.report import as_json, count

    return [json.loads(as_json(row)) for row in count(*call, LENGTH)]


def count_all(calls: Sequence[Call], file: Path, processes: int | None = None) -> list[Row]:
    """Compile calls, forward and backward, count their machine code, and simulate it.

    Args:
        calls: what to count.
        processes: that share the work; None for one on each core.
        file: where a JSON line per kernel goes, in the place of the lines that it has of the same calls; others stay.

    Returns:
        All lines of the file.
    """
    from tqdm import tqdm

    kept = [row for row in read_rows(file) if call_of(row) not in set(calls)] if file.exists() else []
    count = processes or os.cpu_count() or 1
    with ProcessPoolExecutor(count, get_context("spawn")) if count > 1 else nullcontext() as pool:
        found = map(counted, calls) if pool is None else pool.map(counted, calls)
        for rows in tqdm(found, desc="compiling", total=len(calls), unit="call", ascii=" ="):
            kept += rows
            write_rows(kept, file)
    return read_rows(file)


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write a line per row, in the order of CALLS."""
    order = {call: place for place, call in enumerate(CALLS)}
    rows = sorted(rows, key=lambda row: order.get(call_of(row), len(order)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """The lines of a file that count_all, or `python -m andrea_triton.counting.report --json`, wrote."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def targets_of(rows: Iterable[Row]) -> list[str]:
    """Targets in the order of the file."""
    return list(dict.fromkeys(row["target"] for row in rows))


def pick(rows: Sequence[Row], kernel: str, target: str, value: Callable[[Row], Any]) -> float:
    """A value of one kernel on one target; 0 where there is none."""
    found = next((row for row in rows if (row["kernel"], row["target"]) == (kernel, target)), None)
    return float(value(found) or 0) if found is not None and not found["error"] else 0.0


def full(name: str) -> Callable[[Row], Any]:
    """A count of the loop over full blocks."""
    return lambda row: (row.get("full") or {}).get(name)


def simulated(place: int) -> Callable[[Row], Any]:
    """Simulated TFLOP/s at one of the lengths."""
    return lambda row: (row.get("simulated") or (0, 0))[place]


def bars(axes: Axes, rows: Sequence[Row], value: Callable[[Row], Any], theme: Theme, inner: Callable[[Row], Any] | None) -> None:
    """A bar per target and kernel; inside it, darker, a second value."""
    targets = targets_of(rows)
    for index, (kernel, label) in enumerate(KERNELS.items()):
        at = [x + (index - (len(KERNELS) - 1) / 2) * BAR for x in range(len(targets))]
        colour = (theme.own, theme.lines[0], theme.lines[3])[index]
        heights = [pick(rows, kernel, target, value) for target in targets]
        axes.bar(
            at, heights, 0.92 * BAR, color=colour, alpha=1.0 if inner is None else 0.4, label=label if inner is None else None
        )
        if inner is not None:
            axes.bar(at, [pick(rows, kernel, t, inner) for t in targets], 0.92 * BAR, color=colour)


def draw(rows: Sequence[Row], dim: int, dtype: str, theme: Theme) -> Figure:
    """Simulated and modelled speed, registers and shared memory of one head dim and dtype, by target."""
    rows = [row for row in rows if (row["D"], row["dtype"], row["variant"]) == (dim, dtype, "causal")]
    targets, version = targets_of(rows), rows[0]["triton"]
    said = f"causal, D = {dim}, {dtype}; counted in the machine code that Triton {version} makes, modelled, not timed"
    figure = new_figure(theme, "The kernels as compiled, by target", said, legend_rows=1, height=7.2)
    grid = figure.subplots(2, 2, gridspec_kw={"wspace": 0.2, "hspace": 0.42})
    panels: list[tuple[Axes, str, str, Callable[[Row], Any], Callable[[Row], Any] | None]] = [
        (grid[0][0], "Useful speed, simulated: T = 1k (pale: 8k)", "TFLOP/s", simulated(1), simulated(0)),
        (
            grid[0][1],
            "Full blocks, by counts (pale: all overlap)",
            "TFLOP/s",
            full("overlap_tflops"),
            full("serial_tflops"),
        ),
        (grid[1][0], "Registers per thread (number: spills in loops)", "registers", lambda row: row["registers"], None),
        (grid[1][1], "Shared memory of a program", "KiB", lambda row: row["shared_memory"] / 1024, None),
    ]
    for axes, title, unit, value, inner in panels:
        bars(axes, rows, value, theme, inner)
        style(axes, theme, title)
        axes.grid(False, axis="x")
        axes.set_xticks(range(len(targets)), targets)
        axes.tick_params(axis="x", labelsize=7, labelrotation=30)
        axes.set_ylabel(unit)
    for axes in grid[0]:  # plain arithmetic has no modelled speed
        if any(bar.get_height() > 0 for bar in axes.patches):
            log_axis(axes, plain)
    mark_spills(grid[1][0], rows, theme)
    legend_below(figure, [grid[0][1]], theme)
    return figure


def mark_spills(axes: Axes, rows: Sequence[Row], theme: Theme) -> None:
    """Write the number of spills inside loops over the bars that have any."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 1.08)
    for index, kernel in enumerate(KERNELS):
        for x, target in enumerate(targets_of(rows)):
            spills = pick(rows, kernel, target, lambda row: row["spills_in_loops"])
            if spills:
                top = pick(rows, kernel, target, lambda row: row["registers"])
                where = x + (index - (len(KERNELS) - 1) / 2) * BAR
                axes.text(where, top, f"{spills:.0f}", ha="center", va="bottom", fontsize=6, color=theme.ink)


def draw_home(rows: Sequence[Row], file: Path) -> None:
    """Draw the home shape alone (D = 64, bf16), for light pages."""
    with matplotlib.rc_context({"font.size": 10, "axes.unicode_minus": False}):
        draw([row for row in rows if not row["error"]], 64, "bf16", THEMES[0]).savefig(file, dpi=125)


def draw_static(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A figure per head dim and dtype, in every theme, as PNG and SVG.

    Raises:
        ValueError: no row holds machine code.
    """
    made = [row for row in rows if not row["error"] and row["variant"] == "causal"]
    if not made:
        raise ValueError("the results hold no counted kernel: nothing to plot")
    figures: dict[str, Callable[[Theme], Figure]] = {}
    for dim, dtype in dict.fromkeys((row["D"], row["dtype"]) for row in made):
        figures[f"static-d{dim}-{dtype}"] = lambda theme, dim=dim, dtype=dtype: draw(made, dim, dtype, theme)  # type: ignore[misc]
    return save(figures, folder)
