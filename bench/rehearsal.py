"""A GPU run by a model and a clock of its own: which pieces would run, when, and what would be left out.

Real are the pieces, their order, and which kernels they compile: the launches are planned for an H100, and kernels that a piece
before has compiled are not compiled again. Guessed are the seconds below, on the careful side: how long a kernel compiles
(measured on one core without a GPU: 0.5 to 3, mean 1.4), and how long a piece holds the GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

from bench.pieces import COMPILED_LENGTHS, LIMITS, SHARES, STEPS, Piece, Setting, pieces
from bench.precompile import planned

TARGET = "sm_90"
COMPILE_S = 2.0  # a kernel
START_S = 12.0  # the worker's imports and the device's context; the pool's imports go on beside
PIECE_S = {"environment": 2.0, "correctness": 0.45, "speed": 22.0, "latency": 4.0, "training": 25.0}
RUN_COMPILE_S = 45.0  # of one length, for the providers that compile for its shape
COMPILING = {f"D = 64, T = {length}" for length in COMPILED_LENGTHS}


class Model:
    """The clock, and the cores that compile.

    Args:
        todo: the pieces.
        cores: that compile, beside the one of the worker.
        seconds: the budget.
    """

    def __init__(self, todo: Sequence[Piece], cores: int, seconds: float) -> None:
        self.todo, self.seconds, self.clock = todo, seconds, START_S
        self.kernels = 0
        self.compiled = self._compile(max(1, cores - 1))

    def _compile(self, cores: int) -> dict[str, float]:
        """When the kernels of each piece are there: every core takes the next piece when it is free."""
        free, known, ready = [START_S] * cores, set[str](), dict[str, float]()
        for piece in self.todo:
            if piece.compiled is not None:
                fresh = kernels_of(piece) - known
                known |= fresh
                ready[piece.name] = heapq.heappop(free) + COMPILE_S * len(fresh)
                heapq.heappush(free, ready[piece.name])
        self.kernels = len(known)
        return ready

    def run(self) -> list[tuple[Piece, float | None]]:
        """(piece, when it ends; None for one that is left out)."""
        found: list[tuple[Piece, float | None]] = []
        for piece in self.todo:
            deadline = SHARES[piece.step] * self.seconds
            begin = max(self.clock, min(self.compiled.get(piece.name, 0.0), deadline))
            if begin >= deadline:
                found.append((piece, None))
                continue
            more = RUN_COMPILE_S if piece.name in COMPILING else 0.0
            self.clock = min(begin + min(PIECE_S[piece.step] + more, LIMITS[piece.step]), self.seconds)
            found.append((piece, self.clock))
        return found


def kernels_of(piece: Piece) -> set[str]:
    """The kernels of a piece's first tilings, by Triton's own name of a source and its options."""
    from andrea_triton.launch.compile import source

    assert piece.compiled is not None
    found = set()
    for launch, _, _ in planned(*piece.compiled, TARGET):
        found.add(f"{launch.name} {source(launch).hash()} {launch.config}")
    return found


def rehearse(cores: int, minutes: float) -> int:
    """Print what a run would do.

    Args:
        cores: of the machine.
        minutes: the budget.

    Returns:
        0 where every piece of correctness would run, else 1.
    """
    setting = Setting(Path(), "cuda", False, 0.0, 60 * minutes)
    model = Model(pieces(setting), cores, setting.seconds)
    found = model.run()
    print(f"modelled: {cores} cores, {minutes:g} minutes, {model.kernels} kernels compiled ahead, {COMPILE_S:g} s each")
    left_out = {step: [p.name for p, end in found if p.step == step and end is None] for step in STEPS}
    for step in STEPS:
        ends = [end for piece, end in found if piece.step == step and end is not None]
        last = max(ends, default=0.0)
        print(f"{step:12} {len(ends):4} pieces, the last ends after {last:5.0f} s, {len(left_out[step])} left out")
    for step, names in left_out.items():
        if names:
            print(f"left out of {step}: {'; '.join(names)}")
    return int(bool(left_out["correctness"]))
