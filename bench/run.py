"""The main job: accuracy first, then time and memory against length, then a table and plots."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from andrea_triton.errors import UnsupportedError
from bench.cases import MODES, Case, Mode
from bench.measure import Judge, free_bytes, peak_memory, time_in_turns
from bench.plot import draw_all
from bench.providers import PROVIDERS, Provider, checked_on, timed_on
from bench.records import Record, environment, machine_title, write
from bench.table import accuracy_table, growth_table, left_out_lines, measures_table

RESULTS = Path(__file__).parent / "results" / "local"
BAR = "{desc} {percentage:3.0f}% |{bar}| {elapsed}"
Size = Literal["full", "quick", "smoke"]


@dataclass(frozen=True)
class Job:
    """What one run does.

    Args:
        base: the case whose length is varied, and for the accuracy check its dtype.
        lengths: lengths T that are timed.
        checked_length: T of the accuracy check.
        checked_dtypes: dtypes of the accuracy check.
        rounds: fewest and most samples of a time.
        budget_s: seconds of sampling for a case and mode, once the fewest rounds are done.
    """

    base: Case
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    checked_length: int = 1024
    checked_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rounds: tuple[int, int] = (3, 9)
    budget_s: float = 2.0

    @property
    def checks(self) -> list[Case]:
        """Cases of the accuracy check."""
        return [replace(self.base, length=self.checked_length, dtype=dtype) for dtype in self.checked_dtypes]

    @property
    def cases(self) -> list[Case]:
        """Cases that are timed."""
        return [replace(self.base, length=length) for length in self.lengths]

    @property
    def weight(self) -> float:
        """Expected work of all steps, in the unit of the progress bar."""
        checks = sum(2 * weight_of(case) for case in self.checks)
        return checks + 2 * len(MODES) * sum(weight_of(case) for case in self.cases)


def weight_of(case: Case) -> float:
    """Expected work of a step on a case: a fixed part, and one that follows the T x T comparisons."""
    return 0.5 + case.score_bytes / 2**26


def make_job(size: Size, device: str) -> Job:
    """The whole job, a quick one with fewer samples, or a smoke test on tiny shapes."""
    base = Case(length=0, device=device, dtype="bfloat16" if device == "cuda" else "float32")
    if size == "smoke":
        tiny = replace(base, heads=2, kv_heads=2)
        return Job(tiny, lengths=(32, 64, 128), checked_length=129, rounds=(1, 3), budget_s=0.1)
    if size == "quick":
        return Job(base, lengths=(512, 1024, 2048, 4096), checked_length=256, rounds=(1, 5), budget_s=0.5)
    return Job(base)


def check(judge: Judge, case: Case, provider: Provider) -> Record:
    """The accuracy record of a provider; its reason says why it failed, if it did."""
    found = Record("accuracy", case, provider.name, provider.label, "both")
    try:
        checks = judge.check(provider)
    except UnsupportedError as error:
        return replace(found, reason=f"not available here: {error}")
    except Exception as error:
        return replace(found, reason=f"{type(error).__name__}: {error}")
    wrong = [c.reason for c in checks.values() if c.reason is not None]
    errors = {name: {"error": c.error, "naive": c.naive} for name, c in checks.items()}
    return replace(found, errors=errors, reason="; ".join(wrong) or None)


class Runner:
    """Carries a job out and gathers its records.

    Args:
        job: what to do.
        where: the environment that goes into every record.
        bar: progress bar, in the job's unit of work.
    """

    def __init__(self, job: Job, where: dict[str, Any], bar: tqdm[Any]) -> None:
        self.job = job
        self.where = where
        self.bar = bar
        self.records: list[Record] = []
        self.failed: dict[str, str] = {}

    def name(self, what: str) -> None:
        """Name what runs on the bar; in a log, the bar keeps to its own pace."""
        self.bar.set_description_str(f"{what:<40}", refresh=sys.stderr.isatty())

    @contextmanager
    def step(self, what: str, case: Case) -> Iterator[None]:
        """Name the step on the bar while it runs, and count it when it is done."""
        self.name(what)
        yield
        self.bar.update(weight_of(case))

    def add(self, record: Record) -> None:
        """Keep a record, with this run's environment in it."""
        self.records.append(replace(record, environment=self.where))

    def check(self) -> None:
        """Judge each provider in each dtype; remember who failed and why."""
        for case in self.job.checks:
            with self.step(f"accuracy: naive and fp64, {case.dtype}", case):
                judge = Judge(case)
            for name in checked_on(case.device):
                self.name(f"accuracy: {name}, {case.dtype}")
                record = check(judge, case, PROVIDERS[name])
                self.add(record)
                if record.reason is not None:
                    self.failed.setdefault(name, record.reason)
            self.bar.update(weight_of(case))

    def measure(self) -> None:
        """Time and peak memory of the providers that passed, length by length."""
        for case in self.job.cases:
            for mode in MODES:
                with self.step(f"time: T = {case.length}, {mode}", case):
                    providers = self.ready(case, mode)
                    taken = time_in_turns(case, mode, providers, rounds=self.job.rounds, budget_s=self.job.budget_s)
                    for p in providers:
                        self.add(Record("time", case, p.name, p.label, mode, tuple(taken[p.name])))
                with self.step(f"memory: T = {case.length}, {mode}", case):
                    for p in providers:
                        self.add(memory(case, mode, p))

    def ready(self, case: Case, mode: Mode) -> list[Provider]:
        """Providers that passed the check and whose T x T matrices fit in memory; the others are left out, with why."""
        providers = []
        for provider in (PROVIDERS[name] for name in timed_on(case.device)):
            need = provider.needs(case, mode)
            if provider.name in self.failed:
                reason = f"no time, as the accuracy check failed: {self.failed[provider.name]}"
            elif 1.3 * need > free_bytes(case.device):
                reason = f"it needs about {need / 2**30:.1f} GiB, more than is free"
            else:
                providers.append(provider)
                continue
            self.add(Record("left out", case, provider.name, provider.label, mode, reason=reason))
        return providers


def memory(case: Case, mode: Mode, provider: Provider) -> Record:
    """The memory record of a provider, or why there is none."""
    try:
        peak = peak_memory(case, mode, provider)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return Record("left out", case, provider.name, provider.label, mode, reason=f"memory: {error}")
    return Record("memory", case, provider.name, provider.label, mode, (float(peak),))


def summary(records: Sequence[Record], job: Job) -> str:
    """All tables of a run."""
    parts = [
        f"Accuracy: largest |x - fp64| at T = {job.checked_length}, {job.base.heads} heads × {job.base.head_dim}.",
        "Rule: at most 2 × the error of the naive run in the same dtype + the rounding of the result.",
        *accuracy_table(records),
        "",
        f"Time (median) and peak memory beyond the inputs: {job.base.title()}.",
        *measures_table(records),
        *left_out_lines(records),
        "",
        "Growth with the length T,",
        *growth_table(records),
    ]
    return "\n".join(parts)


def run(size: Size, *, device: str | None = None, out: Path = RESULTS) -> int:
    """Run a job, print its tables, write its results and plots.

    Args:
        size: "full", "quick" or "smoke".
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        out: folder of the results.

    Returns:
        Exit code: 0; 1 when a provider failed the accuracy check or nothing fused could be timed.
    """
    begin = time.perf_counter()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    job, where = make_job(size, device), environment(device)
    print(f"andrea_triton bench: attention on Dante's Inferno, canto I, on {device}\n{machine_title(where)}\n", flush=True)
    interval = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=job.weight, bar_format=BAR, ascii=" =", mininterval=interval) as bar:
        runner = Runner(job, where, bar)
        runner.check()
        runner.measure()
        runner.name("done")
    print("\n" + summary(runner.records, job))
    file = out / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{device}-{size}.jsonl"
    write(file, runner.records)
    return finish(runner, file, time.perf_counter() - begin)


def finish(runner: Runner, file: Path, took: float) -> int:
    """Draw the plots, say where everything is, and give the exit code."""
    fused = {record.provider for record in runner.records if record.kind == "time"} - {"naive"}
    wrong = [name for name, reason in runner.failed.items() if not reason.startswith("not available here")]
    print(f"\nResults: {shown(file)}")
    print(plots_message(draw_all(runner.records, file.with_suffix(""))))
    if wrong or not fused:
        print(f"\nFAILED after {took:.0f} s: {', '.join(wrong) or 'nothing fused could be timed'} (see above).")
        return 1
    passed = {r.label: None for r in runner.records if r.kind == "accuracy" and r.provider not in runner.failed}
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
