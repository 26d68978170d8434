"""Memory of a call: on a GPU the allocator's peak above what was allocated before it; on a CPU the resident-set peak of a
fresh child process above its size once the inputs are there."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.cases import Case, Inputs, Mode, make_inputs
from bench.measure import one_call
from bench.providers import PROVIDERS, Provider

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

M_MMAP_THRESHOLD = -3


def free_bytes(device: str) -> float:
    """Memory that a run may take on a device; infinite where it cannot be told."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(sizes["MemAvailable"].split()[0]) * 1024


def peak_memory(case: Case, mode: Mode, provider: Provider, inputs: Inputs | None = None) -> int:
    """Peak memory in bytes that a call takes beyond its inputs (the backward: beyond what its forward keeps); its results are
    counted. On a GPU with inputs that are there already; on a CPU a child process makes its own.

    Raises:
        RuntimeError: the child process could not do it; the message says why.
    """
    if case.device == "cuda":
        with provider.context():
            call = one_call(provider.make(case), inputs or make_inputs(case), mode)
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
        provider = PROVIDERS[name]
        warm = case if provider.compiled else replace(case, length=32)
        _return_freed_memory()
        with provider.context():
            attend = provider.make(warm)
            one_call(attend, make_inputs(warm), mode)()
            _return_freed_memory()
            call = one_call(attend if provider.compiled else provider.make(case), make_inputs(case), mode)
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
