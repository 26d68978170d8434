"""What a run does: which cases are checked and timed, who takes part, how many samples are taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from bench.cases import SWEEP_FIELDS, Case, Mode, Sweep

Size = Literal["full", "quick", "smoke"]
BOTH_WAYS: tuple[Mode, ...] = ("forward", "both")
POINTS: dict[Sweep, tuple[Any, ...]] = {
    "T": (128, 256, 512, 1024, 2048, 4096),
    "batch": (1, 2, 4, 8),
    "heads": (1, 3, 6, 12, 24),
    "dim": (16, 32, 64, 128, 256),
    "dtype": ("float32", "bfloat16", "float16"),
    "window": (64, 128, 256, 512, None),
    "gqa": (1, 2, 3, 4, 6, 12),
    "gain": (1, 30),
}
TINY_POINTS: dict[Sweep, tuple[Any, ...]] = {
    "T": (64, 128),
    "batch": (1, 2),
    "heads": (1, 2),
    "dim": (16, 32),
    "dtype": ("float32", "bfloat16"),
    "window": (16, None),
    "gqa": (1, 2),
    "gain": (1, 30),
}


@dataclass(frozen=True)
class Job:
    """What one run does.

    Args:
        cases: what is timed, in order.
        providers: names of those who are timed, the baseline first.
        checks: cases of the accuracy check; `check_of` finds the one that stands for a case.
        checked_only: names of those whose accuracy is checked and who get no time.
        modes: forward, backward, both.
        sweep: what the cases vary.
        rounds: fewest and most samples of a time.
        budget_s: seconds of sampling for a case and mode, once the fewest rounds are done.
    """

    cases: tuple[Case, ...]
    providers: tuple[str, ...]
    checks: tuple[Case, ...]
    checked_only: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = BOTH_WAYS
    sweep: Sweep = "T"
    rounds: tuple[int, int] = (3, 9)
    budget_s: float = 2.0

    def check_of(self, case: Case) -> Case | None:
        """The check that stands for a case: the same but for length and batch."""
        return next((c for c in self.checks if replace(case, length=c.length, batch=c.batch) == c), None)

    @property
    def weight(self) -> float:
        """Expected work of all steps, in the unit of the progress bar."""
        checks = sum(2 * weight_of(case) for case in self.checks)
        return checks + 2 * len(self.modes) * sum(weight_of(case) for case in self.cases)


def weight_of(case: Case) -> float:
    """Expected work of a step on a case: a fixed part, and one that follows the T x T comparisons."""
    return 0.5 + case.score_bytes / 2**26


def varied(base: Case, sweep: Sweep, value: Any) -> Case:
    """The base case with another value of what the sweep varies; heads vary together, query and key."""
    case: Case = replace(base, **{SWEEP_FIELDS[sweep]: value})
    return replace(case, kv_heads=value) if sweep == "heads" else case


def make_job(
    size: Size, device: str, providers: tuple[str, ...], *, modes: tuple[Mode, ...] = BOTH_WAYS, sweep: Sweep = "T"
) -> Job:
    """The whole job, a quick one with fewer samples, or a smoke test on tiny shapes.

    Args:
        size: which.
        device: "cpu" or "cuda".
        providers: names of those who are timed, the baseline first.
        modes: forward, backward, both.
        sweep: what is varied; the rest is T = 1024, batch 1, 12 heads of 64, fp32 on a CPU and bf16 on a GPU.

    Returns:
        The job. Over T, the kernels' accuracy is checked in a second dtype as well.
    """
    base = Case(length=1024, device=device, dtype="bfloat16" if device == "cuda" else "float32")
    points, checked_length, rounds, budget_s = POINTS[sweep], 1024 if sweep == "T" else 256, (3, 9), 2.0
    if size == "smoke":
        base, points = replace(base, length=64, heads=2, kv_heads=2), TINY_POINTS[sweep]
        checked_length, rounds, budget_s = 129 if sweep == "T" else 65, (1, 3), 0.1
    elif size == "quick":
        points = (512, 1024, 2048, 4096) if sweep == "T" else points
        checked_length, rounds, budget_s = 256, (1, 5), 0.5
    cases = tuple(varied(base, sweep, value) for value in points)
    other = "float16" if base.dtype == "bfloat16" else "bfloat16"
    judged = [*cases, replace(base, dtype=other)] if sweep == "T" else cases
    checks = dict.fromkeys(replace(case, length=checked_length, batch=1) for case in judged)
    only = ("andrea-interpreter",) if device == "cpu" else ()
    return Job(cases, providers, tuple(checks), only, modes, sweep, rounds, budget_s)
