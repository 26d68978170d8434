"""The state of a batch of CTAs that run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tests.compiled.global_memory import GlobalMemory
from tests.compiled.parse import Program
from tests.compiled.shared_memory import SharedMemory
from tests.compiled.values import Array

LANES = 32


class Copy(NamedTuple):
    """A copy by the threads for which `live`: numbers [ctas, threads, count] to shared addresses [ctas, threads]."""

    live: Array
    address: Array
    numbers: Array

    def part(self, keep: Array) -> Copy:
        return Copy(*(x[keep] for x in self))


Pending = list[Copy]


class State:
    """Registers, shared memory, copies under way, and the place in the program, of CTAs [ctas] by their block ids."""

    program: Program
    ctas: Array
    grid: tuple[int, int]
    threads: int
    parameters: Mapping[str, bytes]
    memory: GlobalMemory
    shared: SharedMemory
    registers: dict[str, Array]
    copies: Pending
    copy_groups: list[Pending]
    at: int

    @staticmethod
    def start(
        program: Program, ctas: Array, grid: tuple[int, int], parameters: Mapping[str, bytes], memory: GlobalMemory,
        shared_bytes: int, cell: int,
    ) -> State:  # fmt: skip
        """The state before the first instruction."""
        state = State()
        state.program, state.ctas, state.grid, state.parameters, state.memory = program, ctas, grid, parameters, memory
        state.threads, state.at = program.threads, 0
        state.shared, state.registers = SharedMemory(len(ctas), shared_bytes, cell), {}
        state.copies, state.copy_groups, state.parted = [], [], []
        return state

    def __init__(self) -> None:
        self.parted: list[State] = []

    @property
    def shape(self) -> tuple[int, int]:
        """(ctas, threads)."""
        return len(self.ctas), self.threads

    def part(self, keep: Array) -> State:
        """The state of the CTAs for which keep [ctas] is true."""
        other = State()
        vars(other).update(vars(self))
        other.ctas, other.shared, other.parted = self.ctas[keep], self.shared.part(keep), []
        other.registers = {name: x[keep] if len(x) > 1 else x for name, x in self.registers.items()}
        other.copies = [copy.part(keep) for copy in self.copies]
        other.copy_groups = [[copy.part(keep) for copy in group] for group in self.copy_groups]
        return other

    def branch(self, taken: Array, target: int) -> int | None:
        """Where CTAs go: to the target where taken [ctas], else on (None). When they part, those that go on leave the batch."""
        if taken.all() or not taken.any():
            return target if taken.all() else None
        leaving = self.part(~taken)
        leaving.at = self.at + 1
        vars(self).update(vars(self.part(taken)))
        self.parted = [leaving]
        return target

    def split_off(self) -> list[State]:
        """CTAs that left the batch at the last branch."""
        found, self.parted = self.parted, []
        return found

    def linear(self) -> Array:
        """Index of each CTA in the grid [ctas]."""
        return (self.ctas[:, 0] * self.grid[1] + self.ctas[:, 1]).astype(np.int32)

    def live(self, guard: Callable[[State], Array] | None) -> tuple[Array, Array]:
        """(row, thread) [lanes] of the threads for which the guard holds."""
        if guard is None:
            rows, threads = np.indices(self.shape)
            return rows.reshape(-1), threads.reshape(-1)
        rows, threads = np.nonzero(full(guard(self), self.shape))
        return rows, threads


def full(x: Array, shape: tuple[int, int]) -> Array:
    """x in full [ctas, threads]."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


Step = Callable[[State], "int | None"]
