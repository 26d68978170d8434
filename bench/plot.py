"""Plots of results, for print and for dark pages. They read records only, never run anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.cases import MODE_TITLES, MODES, Mode
from bench.records import Kind, Record, growth, machine_title, series, timed_providers

BASELINE = "naive"
MARKS = ("s", "o", "^", "D", "v", "P")
DASHES = ("--", "-", "-.", ":")
SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Theme:
    """Colours of one rendering; `suffix` ends the file's name."""

    suffix: str
    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme("", "#ffffff", "#1b1f24", "#d4d9df", ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490"))
DARK = Theme("-dark", "#0d1117", "#e6edf3", "#30363d", ("#fb923c", "#60a5fa", "#4ade80", "#c084fc", "#facc15", "#22d3ee"))


@dataclass(frozen=True)
class Measure:
    """A figure that is drawn against length: which records, in which unit."""

    kind: Kind
    title: str
    axis: str
    unit: float
    ratio_title: str
    ratio_axis: str


TIME = Measure("time", "Time of a call against sequence length", "time of a call (ms)", 1e-3, "Time", "speed-up (1× = same time)")
MEMORY = Measure(
    "memory",
    "Peak memory against sequence length",
    "peak memory beyond the inputs (MiB)",
    2.0**20,
    "Peak memory",
    "memory saving (1× = same memory)",
)


def plain(value: float, _position: int = 0) -> str:
    """A tick's number without powers: 0.1, 1, 10, 1,000."""
    return f"{value:,.10g}"


def whole(value: float, _position: int = 0) -> str:
    """A length's tick: 4096."""
    return f"{value:.0f}"


def times(value: float, _position: int = 0) -> str:
    """A ratio's tick: 2×."""
    return f"{value:g}×"


def style(axes: Axes, theme: Theme, lengths: Sequence[int], title: str) -> None:
    """Log axes, ticks at the measured lengths, light grid."""
    axes.set_facecolor(theme.paper)
    axes.set_xscale("log", base=2)
    axes.set_title(title, loc="left", fontsize=10.5, color=theme.ink, pad=6)
    axes.set_xlabel("sequence length T (tokens)", color=theme.ink)
    axes.xaxis.set_major_locator(FixedLocator([float(length) for length in lengths]))
    axes.xaxis.set_major_formatter(FuncFormatter(whole))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True, which="major", color=theme.faint, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, which="both", labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.ink)


def key(axes: Axes, theme: Theme) -> None:
    """Legend in the upper left, the corner that rising lines leave free."""
    if axes.get_legend_handles_labels()[0]:
        legend = axes.legend(loc="upper left", fontsize=9, labelcolor=theme.ink, handlelength=2.8, borderaxespad=0)
        legend.set_zorder(2.4)
        legend.get_frame().set(facecolor=theme.paper, edgecolor="none", alpha=1.0)


def make_room(axes: Axes) -> None:
    """Raise the top of a log axis, so that the legend has a place over the lines."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.26)


def new_figure(theme: Theme, title: str, records: Sequence[Record]) -> Figure:
    """A titled figure with the case and the machine under the title."""
    figure = Figure(figsize=(9.6, 4.6), facecolor=theme.paper)
    figure.subplots_adjust(left=0.095, right=0.98, top=0.775, bottom=0.115)
    subtitle = f"{records[0].case.title()}\n{machine_title(records[0].environment)}"
    figure.text(0.012, 0.975, title, ha="left", va="top", fontsize=13, fontweight="bold", color=theme.ink)
    figure.text(0.012, 0.912, subtitle, ha="left", va="top", fontsize=8.5, color=theme.ink, linespacing=1.4)
    return figure


def lengths_of(records: Sequence[Record]) -> list[int]:
    """All lengths with a figure, rising."""
    return sorted({record.case.length for record in records if record.samples})


def draw_growth(records: Sequence[Record], measure: Measure, theme: Theme) -> Figure:
    """The measure against length, a panel per mode, a line per provider with its quartiles as a band."""
    figure = new_figure(theme, measure.title, records)
    panels = figure.subplots(1, len(MODES), sharey=True, gridspec_kw={"wspace": 0.05})
    for axes, mode in zip(panels, MODES, strict=True):
        for index, (name, label) in enumerate(timed_providers(records).items()):
            line = {t: r for t, r in series(records, measure.kind, name, mode).items() if r.median > 0}
            if line:
                draw_line(axes, line, label, measure.unit, index, theme)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
        style(axes, theme, lengths_of(records), MODE_TITLES[mode])
    panels[0].set_ylabel(measure.axis, color=theme.ink)
    make_room(panels[0])
    for axes in panels:
        key(axes, theme)
    return figure


def draw_line(axes: Axes, line: dict[int, Record], label: str, unit: float, index: int, theme: Theme) -> None:
    """Medians of one provider, in the unit, with quartiles and the fitted exponent."""
    fit = growth(line)
    lengths, colour = list(line), theme.lines[index % len(theme.lines)]
    low, middle, high = (
        [value / unit for value in values]
        for values in zip(*((r.quartiles[0], r.median, r.quartiles[1]) for r in line.values()), strict=True)
    )
    axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        lengths,
        middle,
        DASHES[index % len(DASHES)],
        marker=MARKS[index % len(MARKS)],
        color=colour,
        linewidth=1.8,
        label=label if fit is None else f"{label}: grows as $T^{{{fit.exponent:.2f}}}$",
    )


def ratios(records: Sequence[Record], kind: Kind, name: str, mode: Mode) -> dict[int, float]:
    """Baseline's median over the provider's, by length, where both are positive."""
    base, line = (series(records, kind, provider, mode) for provider in (BASELINE, name))
    return {t: base[t].median / r.median for t, r in line.items() if t in base and base[t].median > 0 and r.median > 0}


def draw_savings(records: Sequence[Record], theme: Theme) -> Figure:
    """How many times less time and memory than the baseline, a panel each, a line per provider and mode."""
    figure = new_figure(theme, "What fusion saves: naive / fused", records)
    names = {name: label for name, label in timed_providers(records).items() if name != BASELINE}
    for axes, measure in zip(figure.subplots(1, 2, gridspec_kw={"wspace": 0.2}), (TIME, MEMORY), strict=True):
        for index, (name, label) in enumerate(names.items(), start=1):
            for turn, mode in enumerate(MODES):
                points = ratios(records, measure.kind, name, mode)
                if not points:
                    continue
                title = MODE_TITLES[mode] if len(names) == 1 else f"{label}, {MODE_TITLES[mode]}"
                axes.plot(
                    list(points),
                    list(points.values()),
                    "-" if turn == 0 else "--",
                    marker="o" if turn == 0 else "s",
                    color=theme.lines[index % len(theme.lines)],
                    linewidth=1.8,
                    label=f"{title}: {list(points.values())[-1]:.3g}× at T = {list(points)[-1]}",
                )
        axes.axhline(1.0, color=theme.ink, linewidth=0.9)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(times))
        axes.set_ylabel(measure.ratio_axis, color=theme.ink)
        style(axes, theme, lengths_of(records), measure.ratio_title)
        make_room(axes)
        key(axes, theme)
    return figure


def draw_all(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every plot in both themes, as PNG and SVG.

    Args:
        records: results of one run; only its time and memory records are drawn.
        folder: where the files go; made where it is missing.

    Returns:
        The files written.

    Raises:
        ValueError: there is nothing to draw.
    """
    drawn = [record for record in records if record.kind in ("time", "memory") and record.samples]
    if not drawn:
        raise ValueError("the results hold no time and no memory figure: nothing to plot")
    plots: dict[str, Callable[[Theme], Figure]] = {
        "time": lambda theme: draw_growth(drawn, TIME, theme),
        "memory": lambda theme: draw_growth(drawn, MEMORY, theme),
        "speedup": lambda theme: draw_savings(drawn, theme),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context({"svg.hashsalt": "andrea_triton", "font.size": 10, "axes.unicode_minus": False}):
        for name, draw in plots.items():
            for theme in (LIGHT, DARK):
                figure = draw(theme)
                for suffix in SUFFIXES:
                    files.append(folder / f"{name}{theme.suffix}{suffix}")
                    figure.savefig(files[-1], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    return files
