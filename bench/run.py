"""The main job: accuracy first, then time and memory along a sweep, then tables and plots."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from tqdm import tqdm

from bench.cases import Mode, Sweep
from bench.jobs import BOTH_WAYS, make_job
from bench.jobs import Size as Size
from bench.plot import draw_all
from bench.providers import ON_REQUEST_ON_CPU, chosen
from bench.records import environment, machine_title, read, write
from bench.runner import ABSENT, Runner
from bench.table import compared, summary

RESULTS = Path(__file__).parent / "results" / "local"
BAR = "{desc} {percentage:3.0f}% |{bar}| {elapsed}"


def run(
    size: Size,
    *,
    device: str | None = None,
    out: Path = RESULTS,
    providers: str | None = None,
    modes: tuple[Mode, ...] = BOTH_WAYS,
    sweep: Sweep = "T",
    compare: Path | None = None,
) -> int:
    """Run a job, print its tables, write its results and plots.

    Args:
        size: "full", "quick" or "smoke".
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        out: folder of the results.
        providers: names with commas between them, "all", or None for the usual ones.
        modes: forward, backward, both.
        sweep: what is varied.
        compare: earlier results to compare with.

    Returns:
        Exit code: 0; 1 when this library failed an accuracy check or nothing fused could be timed.

    Raises:
        ValueError: an unknown provider, or a file to compare with that holds no results.
        OSError: the file to compare with cannot be read.
    """
    begin = time.perf_counter()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    earlier = None if compare is None else read(compare)
    job = make_job(size, device, chosen(providers, device), modes=modes, sweep=sweep)
    where = environment(device)
    print(f"andrea_triton bench: attention on Dante's Inferno, canto I, on {device}\n{machine_title(where)}\n", flush=True)
    interval = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=job.weight, bar_format=BAR, ascii=" =", mininterval=interval) as bar:
        runner = Runner(job, where, bar)
        runner.check()
        runner.rate()
        runner.measure()
        runner.rate()
        runner.name("done")
    print("\n" + "\n".join(summary(runner.records)))
    if earlier is not None:
        print("\n" + "\n".join(compared(earlier, runner.records)))
    if device == "cpu" and providers is None and size != "smoke":
        print(f"\nNot timed, as their code is compiled for each shape or repeats a line: {', '.join(ON_REQUEST_ON_CPU)}.")
        print("--providers all, or their names, times them too.")
    over = "" if sweep == "T" else f"-{sweep}"
    file = out / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{device}-{size}{over}.jsonl"
    write(file, runner.records)
    return finish(runner, file, time.perf_counter() - begin)


def finish(runner: Runner, file: Path, took: float) -> int:
    """Draw the plots, say where everything is, and give the exit code."""
    fused = {record.provider for record in runner.records if record.kind == "time"} - {"naive"}
    failed = [name for (name, _), why in runner.failed.items() if not why.startswith(ABSENT)]
    wrong = list(dict.fromkeys(name for name in failed if name.startswith("andrea")))
    print(f"\nResults: {shown(file)}")
    try:
        print(plots_message(draw_all(runner.records, file.with_suffix(""))))
    except ValueError as error:
        print(f"Plots:   none, {error}")
    if wrong or not fused:
        print(f"\nFAILED after {took:.0f} s: {', '.join(wrong) or 'nothing fused could be timed'} (see above).")
        return 1
    passed = {r.label: None for r in runner.records if r.kind == "accuracy" and r.reason is None}
    print(f"\nDone in {took:.0f} s; passed the accuracy check: {', '.join(passed)}.\nOpen the plots above.")
    return 0


def plots_message(files: Sequence[Path]) -> str:
    """Where the plots are."""
    names = [file.name for file in files if file.suffix == ".png"]
    return f"Plots:   {shown(files[0].parent)}/\n         {', '.join(names)}\n         (and the same as .svg)"


def shown(path: Path) -> Path:
    """A path as seen from the working folder where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
