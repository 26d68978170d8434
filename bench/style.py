"""How plots look: two themes, a fixed colour, mark and dash for each provider, axes, and one legend under the panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bench.providers import PROVIDERS

WIDTH, HEIGHT = 9.6, 4.9
LEGEND_COLUMNS = 3
MARKS = ("s", "D", "v", "^", "P", "X", "<", ">", "*", "o", "o", "o")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))


@dataclass(frozen=True)
class Theme:
    """Colours of one rendering; `suffix` ends the file's name; `lines` in the order of PROVIDERS."""

    suffix: str
    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]
    own: str


LIGHT = Theme(
    "", "#ffffff", "#1b1f24", "#d4d9df",
    ("#c2410c", "#a16207", "#6b7280", "#15803d", "#0e7490", "#7e22ce", "#be185d", "#4d7c0f", "#365314"), "#1d4ed8",
)  # fmt: skip
DARK = Theme(
    "-dark", "#0d1117", "#e6edf3", "#30363d",
    ("#fb923c", "#facc15", "#9ca3af", "#4ade80", "#22d3ee", "#c084fc", "#f472b6", "#a3e635", "#d9f99d"), "#60a5fa",
)  # fmt: skip
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Look:
    """Colour, mark and dash of a line."""

    colour: str
    mark: str
    dash: str | tuple[int, tuple[int, ...]]


def look(provider: str, theme: Theme) -> Look:
    """The look of a provider, the same in every plot: this library solid, the others dashed."""
    if provider.startswith("andrea"):
        return Look(theme.own, "o", "-")
    index = list(PROVIDERS).index(provider) if provider in PROVIDERS else len(provider)
    return Look(theme.lines[index % len(theme.lines)], MARKS[index % len(MARKS)], DASHES[index % len(DASHES)])


def plain(value: float, _position: int = 0) -> str:
    """A tick's number without powers: 0.1, 1, 10, 1,000."""
    return f"{value:,.10g}"


def times(value: float, _position: int = 0) -> str:
    """A ratio's tick: 2×."""
    return f"{value:g}×"


def new_figure(theme: Theme, title: str, subtitle: str, *, legend_rows: int, height: float = HEIGHT) -> Figure:
    """A titled figure that leaves room for the heading above and the legend below, whatever its rows."""
    height += 0.22 * legend_rows
    figure = Figure(figsize=(WIDTH, height), facecolor=theme.paper)
    figure.subplots_adjust(left=0.095, right=0.98, top=1 - 1.12 / height, bottom=(0.72 + 0.22 * legend_rows) / height)
    figure.text(0.012, 1 - 0.12 / height, title, ha="left", va="top", fontsize=13, fontweight="bold", color=theme.ink)
    figure.text(0.012, 1 - 0.42 / height, subtitle, ha="left", va="top", fontsize=8.5, color=theme.ink, linespacing=1.4)
    return figure


def style(axes: Axes, theme: Theme, title: str) -> None:
    """Colours, grid and title."""
    axes.set_facecolor(theme.paper)
    axes.set_title(title, loc="left", fontsize=10.5, color=theme.ink, pad=6)
    axes.grid(True, which="major", color=theme.faint, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, which="both", labelsize=9)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.ink)


def log_axis(axes: Axes, formatter: Callable[[float, int], str] = plain, *, base: int = 10) -> None:
    """A logarithmic y axis with plain numbers; one that spans little is marked at 1, 2 and 5 as well."""
    axes.set_yscale("log", base=base)
    low, high = axes.get_ylim()
    if base == 10 and high / low < 100:
        steps = [m * 10.0**e for e in range(-9, 15) for m in (1, 2, 5)]
        axes.yaxis.set_major_locator(FixedLocator([x for x in steps if low <= x <= high]))
        axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(FuncFormatter(formatter))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def point_axis(axes: Axes, points: Sequence[int | str], label: str, *, log: bool) -> None:
    """The x axis of a sweep: log2 with a tick at each length, or evenly spaced points with their names."""
    if log:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([float(x) for x in points] if log else list(range(len(points))), [str(x) for x in points])
    axes.set_xlabel(label)


def legend_below(figure: Figure, panels: Sequence[Axes], theme: Theme) -> None:
    """One legend for all panels, under them, each label once."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(
            list(found.values()), list(found), loc="lower center", ncol=LEGEND_COLUMNS, fontsize=9, frameon=False,
            labelcolor=theme.ink, handlelength=3.0, columnspacing=1.6,
        )  # fmt: skip


def rows_of(labels: int) -> int:
    """Rows that the legend takes."""
    return -(-labels // LEGEND_COLUMNS)


def legend_inside(axes: Axes, theme: Theme) -> None:
    """A legend in the upper left, the corner that rising lines leave free, with room made for it."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.3)
    legend = axes.legend(loc="upper left", fontsize=8, labelcolor=theme.ink, handlelength=2.4, borderaxespad=0.3)
    legend.get_frame().set(facecolor=theme.paper, edgecolor="none", alpha=1.0)
