"""Instructions that move data: parameters, loads, stores, asynchronous copies, and the barrier that orders them.

Source: PTX ISA 8.8, chapters 9.7.9 (data movement) and 9.7.13 (barriers).
"""

from __future__ import annotations

import re

import numpy as np

from tests.compiled.faults import Divergence, Unsupported
from tests.compiled.operands import address, reader, writer
from tests.compiled.parse import Address, Instruction, Program
from tests.compiled.state import Copy, State, Step, full
from tests.compiled.values import Array

_ACCESS = re.compile(r"(ld|st)\.(global|shared)(?:\.v([24]))?\.b(8|16|32|64)")
_PARAMETER = re.compile(r"ld\.param\.([bsu])(\d+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")


def smallest_access(instruction: Instruction) -> int:
    """Fewest bytes of shared memory that an instruction moves as one; 16 where it moves none."""
    if (match := _ACCESS.fullmatch(instruction.opcode)) and match[2] == "shared":
        return int(match[4]) // 8
    return int(str(instruction.operands[2]), 0) if _COPY.fullmatch(instruction.opcode) else 16


def step(instruction: Instruction, program: Program) -> Step | None:
    """What an instruction of this kind does, None for one of another kind."""
    opcode = instruction.opcode
    if match := _PARAMETER.fullmatch(opcode):
        return _load_parameter(instruction, match[1] == "s", int(match[2]) // 8, program)
    if match := _ACCESS.fullmatch(opcode):
        width, count = int(match[4]) // 8, int(match[3] or 1)
        make = _load if match[1] == "ld" else _store
        return make(instruction, match[2] == "global", width, count, program)
    if _COPY.fullmatch(opcode):
        return _copy(instruction, program)
    if opcode == "cp.async.commit_group":
        return _commit
    if opcode == "cp.async.wait_group":
        return _wait(int(str(instruction.operands[0]), 0))
    if opcode == "bar.warp.sync":
        return lambda state: None  # lanes of a warp are in step anyway
    if opcode == "bar.sync" and instruction.operands == ("0",):
        return _barrier(instruction, program)
    return None


def _load_parameter(instruction: Instruction, signed: bool, size: int, program: Program) -> Step:
    """A parameter, extended to the width of the register."""
    target, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(target, str) or source.base not in program.parameters:
        raise Unsupported(f"{instruction.opcode} {instruction.operands}")
    width = program.registers[target]
    write = writer(target, np.dtype(f"u{width}"), program, instruction.guard)

    def step(state: State) -> None:
        raw = state.parameters[source.base][source.offset : source.offset + size]
        number = int.from_bytes(raw, "little", signed=signed) % 2 ** (8 * width)
        write(state, np.frombuffer(number.to_bytes(width, "little"), f"u{width}").reshape(1, 1))

    return step


def _at(read: Array, state: State, rows: Array, threads: Array) -> Array:
    """Values of some lanes of something that broadcasts to [ctas, threads]."""
    return full(read, state.shape)[rows, threads]


def _registers(instruction: Instruction, position: int, count: int, width: int, program: Program) -> tuple[str, ...]:
    """The registers that a load fills, zeros above what it reads, or whose low bytes a store takes."""
    operand = instruction.operands[position]
    names = operand if isinstance(operand, tuple) else (operand,)
    if len(names) != count or any(program.registers.get(str(name), width) < max(width, 2) for name in names):
        raise Unsupported(f"{instruction.opcode} {instruction.operands} at {instruction.place}")
    return tuple(str(name) for name in names)


def _load(instruction: Instruction, in_global: bool, width: int, count: int, program: Program) -> Step:
    """A register of a thread that the guard leaves out keeps its value."""
    names = _registers(instruction, 0, count, width, program)
    find = address(instruction.operands[1], in_global, program)
    guard = reader(instruction.guard, np.dtype(bool), program) if instruction.guard else None
    raw = np.dtype(f"u{max(program.registers.get(names[0], width), 2)}")

    def step(state: State) -> None:
        rows, threads = state.live(guard)
        if not rows.size:
            values = np.empty((0, count), raw)
        elif in_global:
            values = state.memory.read(_at(find(state), state, rows, threads), width, count, state.linear()[rows])
        else:
            values = state.shared.load(rows, threads // 32, _at(find(state), state, rows, threads), width, count)
        for i, name in enumerate(names):
            old = state.registers.get(name) if guard else None
            filled = np.zeros(state.shape, raw) if old is None else np.array(full(old, state.shape))
            filled[rows, threads] = values[:, i]
            state.registers[name] = filled

    return step


def _store(instruction: Instruction, in_global: bool, width: int, count: int, program: Program) -> Step:
    names = _registers(instruction, 1, count, width, program)
    sources = [reader(name, np.dtype(f"u{max(program.registers.get(name, width), 2)}"), program) for name in names]
    find = address(instruction.operands[0], in_global, program)
    guard = reader(instruction.guard, np.dtype(bool), program) if instruction.guard else None

    def step(state: State) -> None:
        rows, threads = state.live(guard)
        if not rows.size:
            return
        numbers = np.stack([_at(source(state), state, rows, threads) for source in sources], 1).astype(f"u{width}")
        at = _at(find(state), state, rows, threads)
        if in_global:
            state.memory.write(at, numbers, state.linear()[rows])
        else:
            state.shared.store(rows, threads // 32, at, numbers)

    return step


def _copy(instruction: Instruction, program: Program) -> Step:
    """cp.async: the data are read at once and arrive when their group is waited for, the last moment at which they may. A source
    size of 0 copies zeros."""
    destination, source, size, *rest = instruction.operands
    count = int(str(size), 0) // 4
    find, origin = address(destination, False, program), address(source, True, program)
    given = reader(rest[0], np.dtype("u4"), program) if rest else None
    guard = reader(instruction.guard, np.dtype(bool), program) if instruction.guard else None

    def step(state: State) -> None:
        rows, threads = state.live(guard)
        if not rows.size:
            return
        numbers = np.zeros((*state.shape, count), np.uint32)
        taken = np.full(rows.shape, 4 * count) if given is None else _at(given(state), state, rows, threads)
        if ((taken != 0) & (taken != 4 * count)).any():
            raise Unsupported("cp.async of a part of its size")
        r, t = rows[taken != 0], threads[taken != 0]
        if r.size:
            numbers[r, t] = state.memory.read(_at(origin(state), state, r, t), 4, count, state.linear()[r])
        addresses = full(find(state), state.shape)
        state.shared.reserve(rows, threads // 32, addresses[rows, threads], 4 * count)
        live = np.zeros(state.shape, bool)
        live[rows, threads] = True
        state.copies.append(Copy(live, addresses, numbers))

    return step


def _commit(state: State) -> None:
    state.copy_groups.append(state.copies)
    state.copies = []


def _wait(most: int) -> Step:
    """Wait until at most so many groups are under way."""

    def step(state: State) -> None:
        done = len(state.copy_groups) - most
        for group in state.copy_groups[: max(done, 0)]:
            for copy in group:
                rows, threads = np.nonzero(copy.live)
                state.shared.land(rows, threads // 32, copy.address[rows, threads], copy.numbers[rows, threads])
        state.copy_groups = state.copy_groups[max(done, 0) :]

    return step


def _barrier(instruction: Instruction, program: Program) -> Step:
    guard = reader(instruction.guard, np.dtype(bool), program) if instruction.guard else None

    def step(state: State) -> None:
        if guard is not None and not guard(state).all():
            raise Divergence("a barrier that some threads do not reach")
        state.shared.barrier()

    return step
