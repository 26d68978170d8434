"""Products of warpgroups (sm_90): four warps multiply a tile of 64 rows, in their registers or in shared memory, by one in shared
memory, while they go on.

The result is computed at the issue; wgmma_registers.py shows that no instruction can see it before the product is waited for, and
SharedMemory that nobody touches what the product reads. Source: PTX ISA 8.8, chapters 9.7.15 (wgmma) and 8.6 (proxies).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.compiled import fragments
from tests.compiled.faults import Divergence, Unsupported
from tests.compiled.operands import Read, reader, writer
from tests.compiled.parse import Instruction, Operand, Program
from tests.compiled.state import State, Step, full
from tests.compiled.values import Array
from tests.compiled.warp_steps import gather, registers

U4, U8, F4, BOOL = np.dtype("u4"), np.dtype("u8"), np.dtype("f4"), np.dtype(bool)
GROUP = 128  # threads of a warpgroup
ROWS = 64  # of A and of the result
DEPTH = 32  # bytes of a row of A, or of a column of B, that one product takes
SWIZZLED = {1: 128, 2: 64, 3: 32}  # bytes of a row of each swizzle mode
PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(16|8)\.f32\.(f16|bf16|tf32)\.\3")
FENCE, COMMIT, WAIT = (f"wgmma.{name}.sync.aligned" for name in ("fence", "commit_group", "wait_group"))
Tile = Callable[[State], Array]
"""state -> matrices in fp32 [ctas, warpgroups, rows, columns]."""


def step(instruction: Instruction, program: Program) -> Step | None:
    """What an instruction of this kind does, None for one of another kind."""
    opcode = instruction.opcode
    if instruction.guard or program.threads % GROUP:
        return None
    if (match := PRODUCT.fullmatch(opcode)) and int(match[2]) * fragments.SIZES[match[3]] == DEPTH:
        return _product(instruction, int(match[1]), match[3], program)
    if opcode == "fence.proxy.async.shared":
        return lambda state: state.shared.fence_proxies()
    if opcode == FENCE:
        return lambda state: None  # it orders registers, see wgmma_registers.py
    if opcode == COMMIT:
        return lambda state: state.shared.commit_products()
    if opcode == WAIT:
        most = int(str(instruction.operands[0]), 0)
        return lambda state: state.shared.wait_for_products(most)
    return None


def places(descriptors: Array, rows: int, turned: bool) -> Array:
    """Byte addresses of a matrix of `rows` x 32 bytes in shared memory, by runs of 16 bytes.

    Args:
        descriptors: [..] uint64 of one swizzle mode.
        rows: of the matrix: M of A, N of B.
        turned: numbers of a column, not of a row, lie side by side; they are 16 bits wide.

    Returns:
        [.., rows, 2] of the halves of each row; turned [.., rows / 8, 16] of the parts of each column.

    Raises:
        Unsupported: no swizzle, or a base offset.
    """
    modes = descriptors >> np.uint64(62)
    mode = int(modes.flat[0])
    if mode not in SWIZZLED or (modes != mode).any() or (descriptors >> np.uint64(49) & np.uint64(7)).any():
        raise Unsupported(f"the matrix descriptor {int(descriptors.flat[0]):#x}")
    width = SWIZZLED[mode]
    fields = (descriptors >> np.uint64(at) & np.uint64(0x3FFF) for at in (0, 16, 32))
    start, leading, stride = ((field.astype(np.int64) << 4)[..., None, None] for field in fields)
    if turned:
        row, column = np.arange(0, rows, 8)[:, None], np.arange(16)
        across = width // 2
        offset = row % across * 2 + row // across * leading + column % 8 * width + column // 8 * stride
    else:
        row, half = np.arange(rows)[:, None], np.arange(2)
        offset = row % 8 * width + row // 8 * stride + half * 16
    address = start + offset
    return address ^ ((address >> 7 & width // 16 - 1) << 4)


def _product(instruction: Instruction, columns: int, kind: str, program: Program) -> Step:
    """D = A B + D, or A B where the predicate is false."""
    d, a, b, given, *flags = instruction.operands
    in_registers = isinstance(a, tuple)
    names = registers(d)
    turnable = [] if kind == "tf32" else [b] if in_registers else [a, b]
    if len(names) != columns // 2 or flags[:2] != ["1", "1"] or len(flags) != 2 + len(turnable):
        raise Unsupported(f"{instruction.opcode} {instruction.operands} at {instruction.place}")
    turned = [flag == "1" for flag in flags[2:]] or [False]
    left = _held(a, kind, program) if in_registers else _stored(a, ROWS, turned[0], kind, program)
    right = _stored(b, columns, turned[-1], kind, program)
    added, scale = [reader(name, F4, program) for name in names], reader(given, BOOL, program)
    writes = [writer(name, F4, program, "") for name in names]

    def step(state: State) -> None:
        keep, x = full(scale(state), state.shape), left(state)
        before = fragments.gathered(np.zeros((columns // 2, *state.shape), F4))
        if keep.any():
            before = fragments.gathered(np.where(keep, np.stack(gather(state, added)), F4.type(0)))
        tile = fragments.summed(before.reshape(*x.shape[:-1], columns), x, right(state).swapaxes(-1, -2), kind)
        for write, result in zip(writes, fragments.spread(tile.reshape(before.shape)), strict=True):
            write(state, result)

    return step


def _held(operand: Operand, kind: str, program: Program) -> Tile:
    """A in four registers: rows 16 w to 16 w + 15 in warp w."""
    sources = [reader(name, U4, program) for name in registers(operand)]

    def tile(state: State) -> Array:
        parts = fragments.left_tile(gather(state, sources), kind)
        return parts.reshape(len(parts), -1, ROWS, parts.shape[-1])

    return tile


def _stored(operand: Operand, rows: int, turned: bool, kind: str, program: Program) -> Tile:
    """A, or B with a row for each of its columns, in shared memory."""
    read = reader(operand, U8, program)

    def tile(state: State) -> Array:
        address = places(_of_groups(read, state), rows, turned)
        ctas = len(address)
        owner = np.broadcast_to(np.arange(ctas)[:, None, None, None], address.shape)
        numbers = fragments.widened(state.shared.lend(owner.reshape(-1), address.reshape(-1)), kind)
        matrix = numbers.reshape(*address.shape, -1)
        groups = address.shape[1]
        return (matrix.swapaxes(-1, -2) if turned else matrix).reshape(ctas, groups, rows, -1)

    return tile


def _of_groups(read: Read, state: State) -> Array:
    """The value [ctas, warpgroups] that the threads of each warpgroup agree on."""
    words = full(read(state), state.shape).reshape(len(state.ctas), -1, GROUP)
    if (words != words[..., :1]).any():
        raise Divergence("threads of a warpgroup give different matrix descriptors")
    return words[..., 0]
