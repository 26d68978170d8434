"""A compiled kernel played clock by clock on one multiprocessor (SM), from its machine code alone: what latency, occupancy and
fixed cost do, which counts of instructions cannot show.

Good for choosing among tiles and programs: trust differences over 5 %. Against measurements of causal calls of head dim 64, at
lengths 1k 2k 4k 8k 16k: Triton's forward on an A100 142 173 194 203 208 simulated, 115 152 172 183 187 TFLOP/s measured; the
backward of Triton's tutorial on an RTX 3090 38.7 43.2 45.5 46.2 against 33.5 40.9 45.6 47.4; its forward on an H100 at 1k 291 and
291. What is measured holds the launches and the small kernels beside.

Not seen: values, bank conflicts, the cache of instructions, misses of L2, and the lower clock of a hot card. The bandwidth of L2
is a guess (clocks.py): repeat a finding with another. AMD's cards and those after hopper are not simulated. The simulator itself
is C, compiled when it is first used.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from andrea_triton.counting.clocks import Clocks
from andrea_triton.counting.course import Course, ahead
from andrea_triton.counting.steps import UNITS, Control, Step
from andrea_triton.errors import CompileError


class _Step(ctypes.Structure):
    _fields_ = (
        ("unit", ctypes.c_int), ("interval", ctypes.c_double), ("latency", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("bytes", "extra", "stall", "writes", "reads", "waits", "ahead")),
    )  # fmt: skip


class _Rates(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("l2", "barrier", "wgmma", "bulk", "bulk_bytes", "launch")),
        *((name, ctypes.c_int) for name in ("joined", "seed")),
    )


class Played(NamedTuple):
    """Clocks until the last program is done, and how many of them a unit was busy: sums over the four schedulers of tensor,
    issue and special, and the port of shared memory."""

    clocks: float
    tensor: float
    issue: float
    special: float
    port: float


class Kernel(NamedTuple):
    """What is played.

    Args:
        route: the course of every warp.
        steps, controls: of every instruction of the listing.
        warps: of a program.
        resident: programs that a multiprocessor holds at once.
        tile_bytes: of a bulk copy in a loop.
        own_bytes: of a bulk copy of the program's own tile.
    """

    route: Course
    steps: Sequence[Step]
    controls: Sequence[Control]
    warps: int
    resident: int
    tile_bytes: int = 0
    own_bytes: int = 0


@functools.cache
def _library() -> Any:
    """The simulator's compiled code.

    Raises:
        CompileError: there is no C compiler, or it fails."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise CompileError("the simulator needs a C compiler: none of cc, gcc and clang is on PATH; install one of them")
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "simulator.so", Path(__file__).with_suffix(".c")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{compiler} cannot compile {source.name}: {done.stderr.strip()}")
        loaded = ctypes.CDLL(str(library))
    loaded.simulate.restype = ctypes.c_double
    return loaded


def play(kernel: Kernel, clocks: Clocks, programs: Sequence[Sequence[int]], seed: int = 1) -> Played:
    """Play the programs of one multiprocessor, in their order.

    Args:
        kernel: the kernel.
        clocks: the card.
        programs: for each program the trips of its loops.
        seed: of the chance by which a program begins a little later.

    Returns:
        A Played.

    Raises:
        CompileError: no C compiler; or every warp waits for ever, which says that the course is wrong.
    """
    route, (trips, own) = kernel.route, ahead(kernel.route, kernel.steps)
    places = [i for segment in route.segments for i in segment]
    steps = (_Step * len(places))()
    for n, (to, i) in enumerate(zip(steps, places, strict=True)):
        unit, interval, latency, size, extra = kernel.steps[i]
        if unit == "bulk" and own[n] and kernel.own_bytes:
            size = kernel.own_bytes
        to.unit, to.interval, to.latency, to.bytes, to.extra = UNITS.index(unit), interval, latency, size, extra
        to.stall, to.writes, to.reads, to.waits = kernel.controls[i]
        to.ahead = trips[n]
    count, loops = len(route.segments), len(route.segments) // 2
    lengths = (ctypes.c_int * count)(*map(len, route.segments))
    offsets = (ctypes.c_int * count)(*(sum(map(len, route.segments[:k])) for k in range(count)))
    flat = (ctypes.c_int * (loops * len(programs)))(*(t for p in programs for t in p))
    spent = (clocks.l2, clocks.barrier, clocks.wgmma, clocks.bulk, kernel.tile_bytes, clocks.launch)
    rates = _Rates(*spent, int(route.joined), seed)
    out = (ctypes.c_double * 5)()
    sizes = (kernel.warps, kernel.resident, len(programs), loops)
    if _library().simulate(count, lengths, offsets, steps, *sizes, flat, ctypes.byref(rates), out) < 0:
        raise CompileError("in the simulation every warp waits for ever: its course through the kernel is not the kernel's")
    return Played(*out)
