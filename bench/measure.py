"""How it is measured: accuracy first, then time, then peak memory.

Time: providers take turns, in an order that flips every round, so that drift hits all alike; a sample is one clock
reading around as many calls as fill MIN_SAMPLE_S. A first call warms up; one over SLOW_S has nothing left to warm and
is the first sample. Memory: on a GPU, the allocator's peak above what was allocated before the call; on a CPU, the
resident-set peak of a fresh child process above its size once the inputs are there.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from andrea_triton.testing import assert_accurate
from bench.cases import Case, Inputs, Mode, make_inputs
from bench.providers import PROVIDERS, AttendLse, Provider, naive_lse

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

MIN_SAMPLE_S = 0.02
SLOW_S = 1.0
M_MMAP_THRESHOLD = -3
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
        self.inputs = make_inputs(case)
        self.exact = results(naive_lse, Inputs(*(x.double() for x in self.inputs)))
        self.eager = results(naive_lse, self.inputs)

    def check(self, provider: Provider) -> dict[str, Check]:
        """Errors of a provider, by tensor; whatever it raises comes through."""
        got = results(provider.attend_lse, self.inputs)
        return {name: self._judge(name, *tensors) for name, *tensors in zip(TENSORS, got, self.eager, self.exact, strict=True)}

    @staticmethod
    def _judge(name: str, got: Tensor, eager: Tensor, exact: Tensor) -> Check:
        reason = None
        try:
            assert_accurate(got, eager, exact, eager.dtype, name)
        except AssertionError as error:
            reason = str(error)
        return Check(error_of(got, exact), error_of(eager, exact), reason)


def one_call(provider: Provider, inputs: Inputs, mode: Mode) -> Callable[[], None]:
    """A call that does the mode's work once and drops the results."""
    if mode == "forward":

        def forward() -> None:
            with torch.no_grad():
                provider.attend(*inputs[:3])

        return forward

    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])

    def both() -> None:
        torch.autograd.grad(provider.attend(*leaves), leaves, inputs.dout)

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
    rounds: tuple[int, int],
    budget_s: float,
    most_s: float = 20.0,
) -> dict[str, list[float]]:
    """Time providers in turns.

    Args:
        case: the problem.
        mode: forward, or forward and backward.
        providers: who is timed.
        rounds: fewest and most samples of each provider.
        budget_s: after the fewest rounds, stop when this many seconds have gone.
        most_s: after the first round, stop when this many seconds have gone: a slow machine takes fewer samples.

    Returns:
        Samples in seconds per call, by provider name.
    """
    inputs = make_inputs(case)
    calls = {provider.name: one_call(provider, inputs, mode) for provider in providers}
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    begin = time.perf_counter()
    for name, call in calls.items():
        first = seconds(call, 1, case.device)
        samples[name] = [first] if first > SLOW_S else []
        once = first if first > SLOW_S else seconds(call, 1, case.device)
        counts[name] = max(1, math.ceil(MIN_SAMPLE_S / max(once, 1e-6)))
    for turn in range(rounds[1]):
        spent = time.perf_counter() - begin
        if spent > (budget_s if turn >= rounds[0] else most_s) and turn > 0:
            break
        for name in sorted(calls, reverse=bool(turn % 2)):
            if len(samples[name]) <= turn:
                samples[name].append(seconds(calls[name], counts[name], case.device))
    return samples


def free_bytes(device: str) -> float:
    """Memory that a run may take on a device; infinite where it cannot be told."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(sizes["MemAvailable"].split()[0]) * 1024


def peak_memory(case: Case, mode: Mode, provider: Provider) -> int:
    """Peak memory in bytes that a call takes beyond its inputs; its results are counted.

    Raises:
        RuntimeError: the child process could not do it; the message says why.
    """
    if case.device == "cuda":
        call = one_call(provider, make_inputs(case), mode)
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    receiver, sender = _processes().Pipe(duplex=False)
    child = _processes().Process(target=_child, args=(sender, case, mode, provider.name))
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the measuring process ended with code {child.exitcode}; is memory short?") from None
    child.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return int(answer)


def _processes() -> SpawnContext | ForkServerContext:
    """Processes forked from a clean server that has imported torch once and never computed."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _child(sender: Connection, case: Case, mode: Mode, name: str) -> None:
    """Measure one call in this process and send the bytes, or what went wrong."""
    try:
        warm = replace(case, length=32)
        one_call(PROVIDERS[name], make_inputs(warm), mode)()
        _return_freed_memory()
        call = one_call(PROVIDERS[name], make_inputs(case), mode)
        before = _restart_peak()
        call()
        sender.send(max(0, _peak_bytes() - before))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")
    finally:
        sender.close()


def _return_freed_memory() -> None:
    """Have glibc map every larger block on its own, so that a freed tensor leaves the resident set at once."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)


def _restart_peak() -> int:
    """Make the peak start anew from the present size, where the system can, and return it in bytes."""
    if os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    """Resident-set peak of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    if sys.platform == "win32":
        raise RuntimeError("peak memory of a process is not measured on Windows")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
