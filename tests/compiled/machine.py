"""Run a program: all threads of a batch of CTAs in lockstep, one numpy operation per instruction.

Registers are arrays that broadcast to [ctas, threads], unsigned and as wide as declared. A CTA whose branch goes another way than
its batch's leaves the batch, with a copy of its state; threads of one CTA part only around
a few operations between registers, as library functions do for special cases.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.compiled import memory_steps, warp_steps, wgmma, wgmma_registers
from tests.compiled.faults import Divergence, Fault, Unsupported
from tests.compiled.global_memory import GlobalMemory
from tests.compiled.opcodes import OPERATIONS
from tests.compiled.operands import reader, writer
from tests.compiled.parse import Instruction, Program
from tests.compiled.state import State, Step, full

BATCH = 16  # CTAs that run together
LONGEST_SPECIAL_CASE = 16  # instructions


class Number(NamedTuple):
    """A parameter of a launch as bytes."""

    value: Any

    def to_bytes(self, size: int) -> bytes:
        if isinstance(self.value, float):
            return struct.pack("<f" if size == 4 else "<d", self.value)
        return (int(self.value) % 2 ** (8 * size)).to_bytes(size, "little")


class Machine:
    """A program, ready to be launched.

    Args:
        program: the kernel.
        shared_bytes: shared memory of a CTA.

    Raises:
        Unsupported: it holds an instruction that the emulator does not know.
        Race: it touches registers of a product of warpgroups too early.
    """

    def __init__(self, program: Program, shared_bytes: int) -> None:
        self.program, self.shared_bytes = program, shared_bytes
        self.cell = min((memory_steps.smallest_access(i) for i in program.instructions), default=16)
        self.steps = [_step(program, index) for index in range(len(program.instructions))]
        wgmma_registers.check(program)

    def launch(self, grid: tuple[int, int], arguments: Sequence[Any], memory: GlobalMemory) -> None:
        """Run every CTA of a grid.

        Args:
            grid: programs along both axes.
            arguments: an address or a number for each parameter; those at the end that Triton adds may be missing.
            memory: what the addresses point to.

        Raises:
            Fault: at the first thing that goes wrong.
        """
        padded = [*arguments, *[0] * (len(self.program.parameters) - len(arguments))]
        sizes = self.program.parameters.items()
        parameters = {name: Number(x).to_bytes(size) for (name, size), x in zip(sizes, padded, strict=True)}
        with np.errstate(all="ignore"):
            every = np.array([(x, y) for y in range(grid[1]) for x in range(grid[0])])
            for ctas in np.array_split(every, -(-len(every) // BATCH)):
                self._run(State.start(self.program, ctas, grid, parameters, memory, self.shared_bytes, self.cell))

    def _run(self, first: State) -> None:
        waiting = [first]
        while waiting:
            state = waiting.pop()
            while 0 <= state.at < len(self.steps):
                at = state.at
                try:
                    target = self.steps[at](state)
                except Fault as fault:
                    instruction = self.program.instructions[at]
                    text = f"{instruction.guard and '@' + instruction.guard + ' '}{instruction.opcode}"
                    raise type(fault)(f"{fault}; {self.program.name}, {instruction.place}: {text}") from fault
                state.at = at + 1 if target is None else target
                waiting += state.split_off()


def _step(program: Program, index: int) -> Step:
    """What an instruction does to a state; its result, when not None, is where to go on."""
    instruction = program.instructions[index]
    opcode = instruction.opcode
    if opcode in ("bra", "bra.uni", "ret"):
        return _branch(program, index)
    if opcode in OPERATIONS:
        return _arithmetic(instruction, program)
    for room in (memory_steps, warp_steps, wgmma):
        if step := room.step(instruction, program):
            return step
    raise Unsupported(f"{opcode} {instruction.operands} at {instruction.place}")


def _arithmetic(instruction: Instruction, program: Program) -> Step:
    operation, operands = OPERATIONS[instruction.opcode], instruction.operands
    if len(operands) != len(operation.operands) + 1:
        raise Unsupported(f"{instruction.opcode} with {len(operands)} operands at {instruction.place}")
    low = instruction.opcode.startswith("cvt.")
    sources = [reader(x, kind, program, low) for x, kind in zip(operands[1:], operation.operands, strict=True)]
    write, compute = writer(operands[0], operation.result, program, instruction.guard), operation.compute

    def step(state: State) -> None:
        write(state, compute(*[source(state) for source in sources]))

    return step


def _branch(program: Program, index: int) -> Step:
    """A branch that the threads of a CTA take together; or one over a few sums that only some of them make."""
    instruction = program.instructions[index]
    target = len(program.instructions) if instruction.opcode == "ret" else program.labels[str(instruction.operands[0])]
    if not instruction.guard:
        return lambda state: target
    read, skipped = reader(instruction.guard, np.dtype(bool), program), _predicated(program, index, target)

    def step(state: State) -> int | None:
        taken = full(read(state), state.shape)
        if (taken == taken[:, :1]).all():
            return state.branch(taken[:, 0], target)
        if not skipped:
            raise Divergence("threads of one CTA take both ways of a branch")
        for one in skipped:
            one(state)
        return target

    return step


def _predicated(program: Program, index: int, target: int) -> list[Step]:
    """The instructions that a branch jumps over, for the threads that do not take it: special cases of library functions, a few
    operations between registers. Nothing where they are more than that."""
    branch, jumped = program.instructions[index], program.instructions[index + 1 : max(target, index)]
    changed = {instruction.operands[0] for instruction in jumped if instruction.operands}
    plain = all(instruction.opcode in OPERATIONS and not instruction.guard for instruction in jumped)
    if not plain or len(jumped) > LONGEST_SPECIAL_CASE or branch.guard.removeprefix("!") in changed:
        return []
    guard = branch.guard[1:] if branch.guard.startswith("!") else f"!{branch.guard}"
    return [_arithmetic(instruction._replace(guard=guard), program) for instruction in jumped]
