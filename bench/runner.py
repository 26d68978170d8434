"""Carries a job out: accuracy first, then time and memory of those who passed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from andrea_triton.errors import UnsupportedError
from bench.cases import Case, Inputs, Mode, make_inputs
from bench.jobs import Job, weight_of
from bench.measure import Judge, matmul_samples, time_in_turns
from bench.memory import free_bytes, peak_memory
from bench.providers import PROVIDERS, Provider
from bench.records import Record

ABSENT = "not available here: "


class Bar(Protocol):
    """The part of a progress bar that is used here."""

    def update(self, n: float) -> Any:
        """Count finished work."""

    def set_description_str(self, desc: str, refresh: bool) -> None:
        """Name what runs."""


def check(judge: Judge, case: Case, provider: Provider) -> Record:
    """The accuracy record of a provider; its reason says why it failed, if it did."""
    found = Record("accuracy", case, provider.name, provider.label, "both")
    missing = provider.missing(case, "forward")
    if missing is not None:
        return replace(found, reason=ABSENT + missing)
    try:
        checks = judge.check(provider)
    except UnsupportedError as error:
        return replace(found, reason=f"{ABSENT}{error}")
    except Exception as error:
        return replace(found, reason=in_one_line(error))
    wrong = [c.reason for c in checks.values() if c.reason is not None]
    errors = {name: {"error": c.error, "naive": c.naive} for name, c in checks.items()}
    return replace(found, errors=errors, reason="; ".join(wrong) or None)


def in_one_line(error: Exception) -> str:
    """Kind and first line of an error; compilers write pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def memory(case: Case, mode: Mode, provider: Provider, inputs: Inputs | None = None) -> Record:
    """The memory record of a provider, or why there is none."""
    try:
        peak = peak_memory(case, mode, provider, inputs)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return Record("left out", case, provider.name, provider.label, mode, reason=f"memory: {in_one_line(error)}")
    return Record("memory", case, provider.name, provider.label, mode, (float(peak),))


class Runner:
    """Carries a job out and gathers its records.

    Args:
        job: what to do.
        where: the environment that goes into every record.
        bar: progress bar, in the job's unit of work.
        keep: called with every record as it is made, to have it on disk.
        deadline: reading of time.monotonic() after which nothing new is begun.
    """

    def __init__(
        self,
        job: Job,
        where: dict[str, Any],
        bar: Bar,
        *,
        keep: Callable[[Record], None] = lambda record: None,
        deadline: float = math.inf,
    ) -> None:
        self.job = job
        self.where = where
        self.bar = bar
        self.keep = keep
        self.deadline = deadline
        self.records: list[Record] = []
        self.failed: dict[tuple[str, Case], str] = {}

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
        self.records.append(replace(record, environment=self.where, sweep=self.job.sweep))
        self.keep(self.records[-1])

    def check(self, only: Sequence[str] | None = None) -> None:
        """Judge each provider, or only some, on each check; remember who failed and why."""
        for case in self.job.checks:
            with self.step(f"accuracy: naive and fp64, {case.dtype}", case):
                judge = Judge(case)
            for name in (*self.job.checked_only, *self.job.providers):
                if name == "naive" or (only is not None and name not in only):
                    continue
                self.name(f"accuracy: {name}, {case.dtype}")
                record = check(judge, case, PROVIDERS[name])
                self.add(record)
                if record.reason is not None:
                    self.failed[name, case] = record.reason
            self.bar.update(weight_of(case))

    def rate(self) -> None:
        """The machine's matrix products per second, in each dtype that is timed. Taken before and after the times, lest a busy
        moment pass for the machine's best."""
        for case in {case.dtype: case for case in self.job.cases}.values():
            self.name(f"rate of matrix products, {case.dtype}")
            self.add(Record("rate", case, "matmul", "matrix product", "forward", tuple(matmul_samples(case))))

    def measure(self) -> None:
        """Time and peak memory of the providers that passed, case by case."""
        for case in self.job.cases:
            where = f"{self.job.sweep} = {case.at(self.job.sweep)}"
            inputs = make_inputs(case) if time.monotonic() < self.deadline else None
            for mode in self.job.modes:
                providers = self.ready(case, mode)
                with self.step(f"time: {where}, {mode}", case):
                    if inputs is not None:
                        self.time(case, mode, providers, inputs)
                with self.step(f"memory: {where}, {mode}", case):
                    for p in providers:
                        if time.monotonic() < self.deadline:
                            self.add(memory(case, mode, p, inputs))

    def time(self, case: Case, mode: Mode, providers: list[Provider], inputs: Inputs) -> None:
        """Times of the providers; one that breaks at this size is left out, and the others start again without it."""
        rounds, budget_s = self.job.rounds, self.job.budget_s
        taken: dict[str, list[float]] = {}
        reason = ""
        try:
            taken = time_in_turns(case, mode, providers, inputs=inputs, rounds=rounds, budget_s=budget_s)
        except Exception as error:  # which keeps the failed call's graph alive, until here
            reason = in_one_line(error)
        if reason and len(providers) > 1:
            for p in providers:
                self.time(case, mode, [p], inputs)
        elif reason:
            self.leave_out(case, mode, providers[0], reason)
        for p in providers if taken else ():
            self.add(Record("time", case, p.name, p.label, mode, tuple(taken[p.name])))

    def ready(self, case: Case, mode: Mode) -> list[Provider]:
        """Providers that passed the check and whose T x T matrices fit in memory; the others are left out, with why."""
        providers = []
        for provider in (PROVIDERS[name] for name in self.job.providers):
            reason = self.reason_against(provider, case, mode)
            if reason is None:
                providers.append(provider)
            else:
                self.leave_out(case, mode, provider, reason)
        return providers

    def reason_against(self, provider: Provider, case: Case, mode: Mode) -> str | None:
        """Why a provider gets no figure for a case and mode, or None."""
        checked = self.job.check_of(case)
        failed = None if checked is None else self.failed.get((provider.name, checked))
        missing = provider.missing(case, mode)
        if missing is not None:
            return missing
        if failed is not None:
            return failed.removeprefix(ABSENT) if failed.startswith(ABSENT) else f"no time, the accuracy check failed: {failed}"
        if time.monotonic() > self.deadline:
            return "out of time"
        need = provider.needs(case, mode)
        return f"it needs about {need / 2**30:.1f} GiB, more than is free" if 1.3 * need > free_bytes(case.device) else None

    def leave_out(self, case: Case, mode: Mode, provider: Provider, reason: str) -> None:
        """Record that a provider gets no figure, and why."""
        self.add(Record("left out", case, provider.name, provider.label, mode, reason=reason))
