"""Instructions of whole warps: shuffles, loads and stores of matrices, and their products.

Products are summed in numpy's order; a tensor core sums in its own. Source: PTX ISA 8.8, chapter 9.7.14.
"""

from __future__ import annotations

import re

import numpy as np

from tests.compiled import fragments
from tests.compiled.faults import Unsupported
from tests.compiled.fragments import LANES
from tests.compiled.operands import Read, address, reader, writer
from tests.compiled.parse import Instruction, Operand, Program
from tests.compiled.state import State, Step, full
from tests.compiled.values import Array

U4, F4 = np.dtype("u4"), np.dtype("f4")
_PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k(16|8)\.row\.col\.f32\.(f16|bf16|tf32)\.\2\.f32")
_ROWS = re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")


def step(instruction: Instruction, program: Program) -> Step | None:
    """What an instruction of this kind does, None for one of another kind."""
    if instruction.guard:
        return None
    if (match := _PRODUCT.fullmatch(instruction.opcode)) and int(match[1]) * fragments.SIZES[match[2]] == 32:
        return _product(instruction, match[2], program)
    if match := _ROWS.fullmatch(instruction.opcode):
        if match[1] == "ld":
            return _load_matrices(instruction, int(match[2]), match[3] is not None, program)
        return None if match[3] else _store_matrices(instruction, int(match[2]), program)
    if instruction.opcode in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32") and instruction.operands[3:] == ("31", "-1"):
        return _shuffle(instruction, ".bfly." in instruction.opcode, program)
    return None


def registers(operand: Operand) -> tuple[str, ...]:
    """The registers of {a, b, ..}."""
    if not isinstance(operand, tuple):
        raise Unsupported(f"operand {operand}")
    return tuple(str(name) for name in operand)


def gather(state: State, sources: list) -> list[Array]:
    """Values of operands, each in full [ctas, threads]."""
    return [full(source(state), state.shape) for source in sources]


def _product(instruction: Instruction, kind: str, program: Program) -> Step:
    d, a, b, c = (registers(operand) for operand in instruction.operands)
    left, right = ([reader(name, U4, program) for name in names] for names in (a, b))
    added = [reader(name, F4, program) for name in c]
    writes = [writer(name, F4, program, "") for name in d]

    def step(state: State) -> None:
        x, y = fragments.left_tile(gather(state, left), kind), fragments.right_tile(gather(state, right), kind)
        tile = fragments.summed(fragments.gathered(np.stack(gather(state, added))), x, y, kind)
        for write, result in zip(writes, fragments.spread(tile), strict=True):
            write(state, result)

    return step


def _load_matrices(instruction: Instruction, matrices: int, transposed: bool, program: Program) -> Step:
    """Lane 8 i + r gives the address of row r of matrix i."""
    writes = [writer(name, U4, program, "") for name in registers(instruction.operands[0])]
    find = address(instruction.operands[1], False, program)

    def step(state: State) -> None:
        ctas, threads = state.shape
        numbers = state.shared.load(*_rows(state, find, matrices), 2, 8)
        tiles = numbers.reshape(ctas, threads // LANES, matrices, 8, 8)
        for write, result in zip(writes, fragments.matrix_rows(tiles, transposed), strict=True):
            write(state, result)

    return step


def _store_matrices(instruction: Instruction, matrices: int, program: Program) -> Step:
    """The same lanes, the other way."""
    sources = [reader(name, U4, program) for name in registers(instruction.operands[1])]
    find = address(instruction.operands[0], False, program)

    def step(state: State) -> None:
        numbers = fragments.rows_of_matrices(np.stack(gather(state, sources))).reshape(-1, 8)
        state.shared.store(*_rows(state, find, matrices), numbers)

    return step


def _rows(state: State, find: Read, matrices: int) -> tuple[Array, Array, Array]:
    """(cta, warp, byte address) of each row of each matrix of each warp."""
    ctas, lanes = np.indices(state.shape)
    used = lanes % LANES < 8 * matrices
    return ctas[used], lanes[used] // LANES, full(find(state), state.shape)[used]


def _shuffle(instruction: Instruction, butterfly: bool, program: Program) -> Step:
    """Each lane takes the value of another of its warp: of the lane given, or (butterfly) of its own number xor the one given."""
    target, source, lane, *_ = instruction.operands
    read, given = reader(source, U4, program), reader(lane, U4, program)
    write = writer(target, U4, program, "")

    def step(state: State) -> None:
        own = np.arange(state.threads, dtype=np.int64)[None] % LANES
        other = full((own ^ given(state) if butterfly else 0 * own + given(state)) % LANES, state.shape)
        write(state, fragments.shuffled(full(read(state), state.shape), other))

    return step
