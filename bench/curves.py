"""The same small ANDREA, trained with fused and with naive attention from one seed: `python -m bench.curves`.

Two runs whose arithmetic rounds differently drift apart, whatever computes them. So a third run stands beside them: naive
attention again, with the sequences of every batch in reverse order, which changes nothing but the order of sums. Fused attention
trains the same model when it is no farther from naive attention than naive attention is from itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from andrea_triton.nn.data import ByteTokenizer, Corpus, read_corpus
from andrea_triton.train import Options, Run
from bench.records import environment
from bench.style import DARK, LIGHT, Theme

RUNS = ("naive", "fused", "naive, batch reversed")
DTYPES = {"float32": "fp32", "bfloat16": "bf16 (autocast)"}
Curves = dict[str, dict[str, list[float]]]  # dtype, run: the loss of every step in nats per token


class Backwards(Run):
    """A run that reads every batch from its last sequence to its first."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same mean, summed in another order."""
        return super().loss(inputs.flip(0), targets.flip(0))


def make_runs(options: Options, corpus: Corpus) -> dict[str, Run]:
    """The three runs, from the same weights."""
    fused = {**vars(options)}
    naive = {**fused, "backend": "naive"}
    return dict(
        zip(
            RUNS, (Run(Options(**naive), corpus), Run(Options(**fused), corpus), Backwards(Options(**naive), corpus)), strict=True
        )
    )


def train(options: Options, corpus: Corpus) -> Curves:
    """Every run in every dtype, step by step in turn.

    Args:
        options: of the fused run; its dtype is not read.
        corpus: what is learned.

    Returns:
        The losses, by dtype and run.
    """
    curves: Curves = {}
    for dtype in DTYPES:
        runs = make_runs(Options(**{**vars(options), "dtype": dtype}), corpus)
        curves[dtype] = {name: [] for name in runs}
        for _ in tqdm(range(options.steps), desc=f"training in {DTYPES[dtype]}", unit="step", dynamic_ncols=True):
            for name, run in runs.items():
                curves[dtype][name].append(run.advance()["loss"])
    return curves


def distance(curves: dict[str, list[float]], name: str) -> list[float]:
    """|loss - naive loss| of every step."""
    return [abs(a - b) for a, b in zip(curves[name], curves["naive"], strict=True)]


def report(curves: Curves) -> str:
    """How far the runs are from each other, in words."""
    lines = []
    for dtype, runs in curves.items():
        ours, own = (max(distance(runs, name)) for name in RUNS[1:])
        lines.append(
            f"{DTYPES[dtype]}: {len(runs['naive'])} steps, loss {runs['naive'][0]:.3f} to {runs['naive'][-1]:.3f}; fused against "
            f"naive at most {ours:.1e} apart, naive against itself in another order {own:.1e}"
        )
    return "\n".join(lines)


def draw(curves: Curves, theme: Theme) -> Figure:
    """The losses, and below them how far they are apart."""
    ink = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = dict.fromkeys(ink, theme.ink)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, 5.6), layout="constrained", facecolor=theme.paper)
        grid = figure.subplots(2, len(curves), sharex=True, sharey="row", height_ratios=(3, 2), squeeze=False)
        for (dtype, runs), (top, low) in zip(curves.items(), zip(*grid, strict=True), strict=True):
            steps = range(1, len(runs["naive"]) + 1)
            top.plot(steps, runs["naive"], color=theme.lines[0], linewidth=4, alpha=0.5, label="naive")
            top.plot(steps, runs["fused"], color=theme.own, linewidth=1.2, label="fused")
            top.set_title(f"Training loss, {DTYPES[dtype]}", loc="left", fontsize=11, color=theme.ink)
            low.semilogy(steps, distance(runs, RUNS[2]), color=theme.lines[0], linewidth=1, label="naive, batch reversed")
            low.semilogy(steps, distance(runs, "fused"), color=theme.own, linewidth=1, label="fused")
            low.set(xlabel="step")
            for axes in (top, low):
                axes.set_facecolor(theme.paper)
                axes.grid(True, linewidth=0.4, color=theme.faint)
                axes.legend(frameon=False, labelcolor=theme.ink)
                axes.spines[:].set_color(theme.faint)
        grid[0][0].set_ylabel("loss (nats per byte)")
        grid[1][0].set_ylabel("distance from naive\n(nats per byte)")
    return figure


def write(curves: Curves, options: Options, folder: Path) -> list[Path]:
    """loss_curves.jsonl and its plots; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "loss_curves.jsonl"
    about = {"environment": environment(options.device), "options": vars(options)}
    lines = [{"dtype": dtype, "run": name, "loss": loss} for dtype, runs in curves.items() for name, loss in runs.items()]
    results.write_text("".join(f"{json.dumps({**line, **about})}\n" for line in lines), encoding="utf-8")
    paths = [results]
    for theme in (LIGHT, DARK):
        for suffix in (".png", ".svg"):
            paths.append(folder / f"loss_curves{theme.suffix}{suffix}")
            draw(curves, theme).savefig(paths[-1], dpi=150)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m bench.curves", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--steps", type=int, default=16, help="default: 16; naive bf16 is slow on a CPU")
    parser.add_argument("--device", default="cpu", help="cpu, cuda ... (default: cpu)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/local"), metavar="DIR", help="folder of the results")
    words = parser.parse_args(arguments)
    options = Options(steps=words.steps, warmup=min(20, words.steps), device=words.device)
    curves = train(options, read_corpus(None, ByteTokenizer(), options.context))
    print(report(curves))
    print("results and plots: " + ", ".join(map(str, write(curves, options, words.out))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
