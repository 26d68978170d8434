"""How it is measured: accuracy first, then time. Memory is in memory.py.

Providers take turns, in an order that flips every round, so that drift hits all alike; a sample is one clock reading
around as many calls as fill MIN_SAMPLE_S. A first call warms up; one over SLOW_S has nothing left to warm and is the
first sample, unless it compiled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea_triton.testing import assert_accurate
from bench.cases import Case, Inputs, Mode, make_inputs
from bench.providers import NAIVE, Attend, AttendLse, Provider

MIN_SAMPLE_S = 0.02
SLOW_S = 1.0
RATE_SIZE = {"cpu": 1536, "cuda": 8192}
TENSORS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Check:
    """max |x - fp64| of one tensor: of the provider, of the naive run in the same dtype; why it failed, if so."""

    error: float
    naive: float
    reason: str | None


def error_of(values: Tensor, exact: Tensor) -> float:
    """Largest distance from the exact values; NaN when there is a NaN."""
    return float((values.double() - exact.double()).abs().max())


def results(attend_lse: AttendLse, inputs: Inputs) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of one forward and backward pass."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    out, lse = attend_lse(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    return out.detach(), lse.detach(), *grads


class Judge:
    """The naive run in the case's dtype and in fp64, on the same rounded inputs; judges any provider by them."""

    def __init__(self, case: Case) -> None:
        assert NAIVE.make_lse is not None
        self.case = case
        self.inputs = make_inputs(case)
        naive_lse = NAIVE.make_lse(case)
        exact = results(naive_lse, Inputs(*(x.double() for x in self.inputs)))
        eager = results(naive_lse, self.inputs)
        self.wanted = dict(zip(TENSORS, zip(eager, exact, strict=True), strict=True))

    def check(self, provider: Provider) -> dict[str, Check]:
        """Errors of a provider, by tensor, of those that it gives; whatever it raises comes through."""
        with provider.context():
            found = self._results(provider)
        return {name: self._judge(name, got, *self.wanted[name]) for name, got in found.items()}

    def _results(self, provider: Provider) -> dict[str, Tensor]:
        if provider.missing(self.case, "both") is not None:
            with torch.no_grad():
                return {"out": provider.make(self.case)(*self.inputs[:3])}
        if provider.make_lse is not None:
            return dict(zip(TENSORS, results(provider.make_lse(self.case), self.inputs), strict=True))
        leaves = tuple(x.detach().requires_grad_() for x in self.inputs[:3])
        out = provider.make(self.case)(*leaves)
        grads = torch.autograd.grad(out, leaves, self.inputs.dout)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))

    @staticmethod
    def _judge(name: str, got: Tensor, eager: Tensor, exact: Tensor) -> Check:
        reason = None
        try:
            assert_accurate(got, eager, exact, eager.dtype, name)
        except AssertionError as error:
            reason = str(error)
        return Check(error_of(got, exact), error_of(eager, exact), reason)


def one_call(attend: Attend, inputs: Inputs, mode: Mode) -> Callable[[], None]:
    """A call that does the mode's work once and drops the results; for the backward, a forward is done here beforehand."""
    if mode == "forward":

        def forward() -> None:
            with torch.no_grad():
                attend(*inputs[:3])

        return forward

    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    if mode == "backward":
        out = attend(*leaves)

        def backward() -> None:
            torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

        return backward

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, inputs.dout)

    return both


def seconds(call: Callable[[], None], calls: int, device: str) -> float:
    """Mean time of a call over a run of calls, in seconds; device time on a GPU."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def time_in_turns(
    case: Case,
    mode: Mode,
    providers: Sequence[Provider],
    *,
    inputs: Inputs,
    rounds: tuple[int, int],
    budget_s: float,
    most_s: float = 20.0,
) -> dict[str, list[float]]:
    """Time providers in turns.

    Args:
        case: the problem.
        mode: forward, backward, or both.
        providers: who is timed.
        inputs: those of the case.
        rounds: fewest and most samples of each provider.
        budget_s: after the fewest rounds, stop when this many seconds have gone.
        most_s: after the first round, stop when this many seconds have gone: a slow machine takes fewer samples.

    Returns:
        Samples in seconds per call, by provider name.
    """
    calls: dict[str, Callable[[], None]] = {}
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    context = {provider.name: provider.context for provider in providers}
    for p in providers:
        with p.context():
            calls[p.name] = one_call(p.make(case), inputs, mode)
            first = seconds(calls[p.name], 1, case.device)
            counts_too = first > SLOW_S and not p.compiled
            samples[p.name] = [first] if counts_too else []
            once = first if counts_too else seconds(calls[p.name], 1, case.device)
        counts[p.name] = max(1, math.ceil(MIN_SAMPLE_S / max(once, 1e-6)))
    begin = time.perf_counter()  # who compiles or warms up takes no one's time
    for turn in range(rounds[1]):
        spent = time.perf_counter() - begin
        if spent > (budget_s if turn >= rounds[0] else most_s) and turn > 0:
            break
        for name in sorted(calls, reverse=bool(turn % 2)):
            if len(samples[name]) <= turn:
                with context[name]():
                    samples[name].append(seconds(calls[name], counts[name], case.device))
    return samples


def matmul_samples(case: Case, rounds: int = 5) -> list[float]:
    """Rates of a large square matrix product in the case's dtype on its device, in FLOP/s: what attention is held against."""
    size = RATE_SIZE[case.device]
    a, b = (torch.randn(size, size, device=case.device).to(case.torch_dtype) for _ in range(2))

    def call() -> None:
        a @ b

    once = min(seconds(call, 1, case.device) for _ in range(2))
    count = max(1, math.ceil(MIN_SAMPLE_S / max(once, 1e-6)))
    return [2 * size**3 / seconds(call, count, case.device) for _ in range(rounds)]
