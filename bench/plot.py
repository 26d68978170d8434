"""Plots of results, for print and for dark pages. They read records only, never run anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.cases import MODE_TITLES, SWEEP_AXES, Mode, Sweep, title_of
from bench.providers import NAIVE
from bench.records import (
    FIT_FROM,
    Kind,
    Record,
    growth,
    machine_title,
    matmul_rate,
    modes_of,
    series,
    timed_providers,
)
from bench.style import (
    THEMES,
    Theme,
    legend_below,
    legend_inside,
    log_axis,
    look,
    new_figure,
    point_axis,
    rows_of,
    style,
    times,
)

SUFFIXES = (".png", ".svg")
Line = dict[int | str, Record]


@dataclass(frozen=True)
class Measure:
    """A figure that is drawn along the sweep: which records, in which unit."""

    kind: Kind
    title: str
    axis: str
    unit: float
    ratio_title: str
    ratio_axis: str


TIME = Measure("time", "Time of a call", "time of a call (ms)", 1e-3, "Time", "speed-up over naive")
MEMORY = Measure(
    "memory", "Peak memory", "peak memory beyond the inputs (MiB)", 2.0**20, "Peak memory", "naive memory / memory"
)  # fmt: skip
Draw = Callable[[Sequence[Record], Theme], Figure]


def points_of(records: Iterable[Record]) -> list[int | str]:
    """Where the sweep has a figure: numbers rising, then words."""
    found = dict.fromkeys(r.case.at(r.sweep) for r in records if r.kind in ("time", "memory"))
    return sorted(found, key=lambda x: (isinstance(x, str), x if isinstance(x, int) else 0))


def places(line: Iterable[int | str], points: Sequence[int | str], log: bool) -> list[float]:
    """x coordinates of a line: its own numbers on a log axis, else the order of the points."""
    return [float(x) if log else float(points.index(x)) for x in line]


def subtitle(records: Sequence[Record]) -> str:
    """The cases and the machine, in two lines."""
    drawn = [r for r in records if r.kind in ("time", "memory")]
    return f"{title_of([r.case for r in drawn], drawn[0].sweep)}\n{machine_title(drawn[0].environment)}"


def start(records: Sequence[Record], theme: Theme, title: str, labels: int) -> tuple[Figure, list[Axes], tuple[Mode, ...]]:
    """A figure with a panel per mode, all on one y axis."""
    modes = modes_of(records)
    figure = new_figure(theme, title, subtitle(records), legend_rows=rows_of(labels))
    grid = figure.subplots(1, len(modes), sharey=True, squeeze=False, gridspec_kw={"wspace": 0.06})
    return figure, list(grid[0]), modes


def draw_measure(records: Sequence[Record], theme: Theme, measure: Measure) -> Figure:
    """The measure along the sweep, a panel per mode, a line per provider with its quartiles as a band."""
    providers, points, sweep = timed_providers(records), points_of(records), sweep_of(records)
    figure, panels, modes = start(records, theme, f"{measure.title} against {SWEEP_AXES[sweep]}", len(providers))
    for axes, mode in zip(panels, modes, strict=True):
        for name, label in providers.items():
            line = {x: r for x, r in series(records, measure.kind, name, mode).items() if r.median > 0}
            if line:
                at = places(line, points, sweep == "T")
                low, middle, high = columns_of(line, measure.unit)
                axes.fill_between(at, low, high, color=look(name, theme).colour, alpha=0.2, linewidth=0)
                plot_line(axes, at, middle, name, label, theme)
        point_axis(axes, points, SWEEP_AXES[sweep], log=sweep == "T")
        style(axes, theme, MODE_TITLES[mode])
    log_axis(panels[0])
    panels[0].set_ylabel(measure.axis)
    legend_below(figure, panels, theme)
    return figure


def columns_of(line: Line, unit: float) -> tuple[list[float], list[float], list[float]]:
    """First quartiles, medians and third quartiles, in the unit."""
    rows = list(line.values())
    return (
        [r.quartiles[0] / unit for r in rows],
        [r.median / unit for r in rows],
        [r.quartiles[1] / unit for r in rows],
    )


def plot_line(axes: Axes, at: Sequence[float], values: Sequence[float], name: str, label: str, theme: Theme) -> None:
    """One line in the look of its provider."""
    seen = look(name, theme)
    axes.plot(at, values, linestyle=seen.dash, marker=seen.mark, markersize=5, color=seen.colour, linewidth=1.8, label=label)


def sweep_of(records: Sequence[Record]) -> Sweep:
    """What the run varied."""
    return next(r.sweep for r in records if r.kind in ("time", "memory"))


def ratios(records: Sequence[Record], kind: Kind, name: str, mode: Mode) -> dict[int | str, float]:
    """Baseline's median over the provider's, along the sweep, where both are positive."""
    base, line = (series(records, kind, provider, mode) for provider in (NAIVE.name, name))
    return {x: base[x].median / r.median for x, r in line.items() if x in base and base[x].median > 0 and r.median > 0}


def draw_savings(records: Sequence[Record], theme: Theme) -> Figure:
    """How many times less time and memory than naive: a row per measure, a panel per mode, a line per provider."""
    names = {name: label for name, label in timed_providers(records).items() if name != NAIVE.name}
    points, sweep, modes = points_of(records), sweep_of(records), modes_of(records)
    measures = [m for m in (TIME, MEMORY) if any(ratios(records, m.kind, n, mode) for n in names for mode in modes)]
    figure = new_figure(
        theme, "What is saved against naive attention", subtitle(records), legend_rows=rows_of(len(names)),
        height=4.9 + 2.6 * (len(measures) - 1),
    )  # fmt: skip
    grid = figure.subplots(len(measures), len(modes), sharey="row", squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.5})
    for row, measure in zip(grid, measures, strict=True):
        for axes, mode in zip(row, modes, strict=True):
            for name, label in names.items():
                found = ratios(records, measure.kind, name, mode)
                plot_line(axes, places(found, points, sweep == "T"), list(found.values()), name, label, theme)
            axes.axhline(1.0, color=theme.ink, linewidth=0.9)
            point_axis(axes, points, SWEEP_AXES[sweep], log=sweep == "T")
            style(axes, theme, f"{measure.ratio_title}, {MODE_TITLES[mode]}")
        log_axis(row[0], times, base=2)
        row[0].set_ylabel(measure.ratio_axis)
    legend_below(figure, list(grid[0]), theme)
    return figure


def draw_speed(records: Sequence[Record], theme: Theme) -> Figure:
    """Operations per second along the sweep, under the machine's measured rate of matrix products."""
    providers, points, sweep = timed_providers(records), points_of(records), sweep_of(records)
    timed = [r for r in records if r.kind == "time"]
    rates = {dtype: matmul_rate(records, dtype) for dtype in dict.fromkeys(r.case.dtype for r in timed)}
    top = max([r.flops_per_second for r in timed] + [rate for rate in rates.values() if rate])
    unit, word = (1e12, "TFLOP/s") if top >= 1e12 else (1e9, "GFLOP/s")
    figure, panels, modes = start(records, theme, f"Speed against {SWEEP_AXES[sweep]}", len(providers) + 1)
    for axes, mode in zip(panels, modes, strict=True):
        for name, label in providers.items():
            line = series(records, "time", name, mode)
            at = places(line, points, sweep == "T")
            if line:
                plot_line(axes, at, [r.flops_per_second / unit for r in line.values()], name, label, theme)
        for dtype, rate in rates.items():
            if rate is not None:
                label = f"roofline: matrix product, {dtype}, {rate / unit:.3g} {word}"
                axes.axhline(rate / unit, color=theme.ink, linewidth=1.1, linestyle=(0, (4, 3)), label=label)
        point_axis(axes, points, SWEEP_AXES[sweep], log=sweep == "T")
        style(axes, theme, MODE_TITLES[mode])
    panels[0].set_ylim(0, 1.06 * top / unit)
    panels[0].set_ylabel(f"operations that the maths asks for ({word})")
    legend_below(figure, panels, theme)
    return figure


def draw_growth(records: Sequence[Record], theme: Theme) -> Figure:
    """Time and memory relative to those of the shortest length that counts, beside the number of comparisons."""
    mode, own = modes_of(records)[-1], own_provider(records)
    names = {name: label for name, label in timed_providers(records).items() if name in (NAIVE.name, own)}
    first = next(x for x in points_of(records) if isinstance(x, int) and x >= min(FIT_FROM, int(points_of(records)[-2])))
    points = [x for x in points_of(records) if isinstance(x, int) and x >= first]
    figure = new_figure(
        theme, f"What doubling the length T costs, {MODE_TITLES[mode]}", subtitle(records), legend_rows=0, height=5.2
    )
    for axes, measure in zip(figure.subplots(1, 2, gridspec_kw={"wspace": 0.2}), (TIME, MEMORY), strict=True):
        pairs = [t * (t + 1) / (first * (first + 1)) for t in points]
        axes.plot(points, pairs, color=theme.ink, linewidth=5, alpha=0.25, label="comparisons: 4× per doubling of T")
        for name, label in names.items():
            line: Line = {x: r for x, r in series(records, measure.kind, name, mode).items() if x in points and r.median > 0}
            fit = growth(line)
            if fit is not None and first in line:
                text = f"{label}: $T^{{{fit.exponent:.2f}}}$, {2**fit.exponent:.1f}× per doubling"
                relative = [r.median / line[first].median for r in line.values()]
                plot_line(axes, places(line, points, True), relative, name, text, theme)
        log_axis(axes, times, base=2)
        axes.set_ylabel(f"{measure.ratio_title.lower()}, relative to T = {first}")
        point_axis(axes, points, SWEEP_AXES["T"], log=True)
        style(axes, theme, measure.ratio_title)
        legend_inside(axes, theme)
    return figure


def own_provider(records: Sequence[Record]) -> str:
    """This library's provider in the results, or else the last one."""
    names = list(timed_providers(records))
    return next((name for name in names if name.startswith("andrea")), names[-1])


def plots_for(records: Sequence[Record]) -> dict[str, Draw]:
    """The plots that the records have figures for, by name."""
    kinds = {r.kind for r in records}
    plots: dict[str, Draw] = {}
    if "time" in kinds:
        plots["time"] = lambda records, theme: draw_measure(records, theme, TIME)
    if "memory" in kinds:
        plots["memory"] = lambda records, theme: draw_measure(records, theme, MEMORY)
    names = [name for name in timed_providers(records) if name != NAIVE.name]
    if any(ratios(records, m.kind, n, mode) for m in (TIME, MEMORY) for n in names for mode in modes_of(records)):
        plots["speedup"] = draw_savings
    if "time" in kinds:
        plots["speed"] = draw_speed
    same_batch = len({r.case.batch for r in records if r.kind in ("time", "memory")}) == 1
    if sweep_of(records) == "T" and same_batch and len(points_of(records)) > 1:
        plots["growth"] = draw_growth
    return plots


def groups_of(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by what one plot can hold: where the head dim changes outside of its own sweep, one group per head dim."""
    drawn = [r for r in records if r.samples and r.kind in ("time", "memory")]
    if not drawn:
        raise ValueError("the results hold no time and no memory figure: nothing to plot")
    dims = list(dict.fromkeys(r.case.head_dim for r in drawn)) if sweep_of(drawn) != "dim" else []
    rates = [r for r in records if r.kind == "rate"]
    if len(dims) < 2:
        return {"": [*drawn, *rates]}
    return {f"-d{dim}": [*(r for r in drawn if r.case.head_dim == dim), *rates] for dim in dims}


def save(figures: dict[str, Callable[[Theme], Figure]], folder: Path) -> list[Path]:
    """Write figures in both themes, as PNG and SVG, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context({"svg.hashsalt": "andrea_triton", "font.size": 10, "axes.unicode_minus": False}):
        for name, draw in figures.items():
            for theme in THEMES:
                figure = draw(theme)
                for suffix in SUFFIXES:
                    files.append(folder / f"{name}{theme.suffix}{suffix}")
                    figure.savefig(files[-1], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    return files


def draw_all(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every plot in both themes, as PNG and SVG.

    Args:
        records: results of one run; only its time, memory and rate records are drawn.
        folder: where the files go; made where it is missing.

    Returns:
        The files written.

    Raises:
        ValueError: there is nothing to draw.
    """
    figures: dict[str, Callable[[Theme], Figure]] = {}
    for suffix, group in groups_of(records).items():
        for name, draw in plots_for(group).items():
            figures[f"{name}{suffix}"] = lambda theme, draw=draw, group=group: draw(group, theme)  # type: ignore[misc]
    return save(figures, folder)
