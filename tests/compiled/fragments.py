"""How the lanes of a warp hold matrices: registers [.., threads] to tiles [.., warps, rows, columns], and back.

Source: PTX ISA 8.8, chapter 9.7.14.5 (mma, ldmatrix, stmatrix).
"""

from collections.abc import Sequence

import numpy as np

from tests.compiled import values
from tests.compiled.values import Array

LANES = 32
SIZES = {"f16": 2, "bf16": 2, "tf32": 4}
"""Types of matrices, and the bytes of a number."""


def widened(raw: Array, kind: str) -> Array:
    """fp32 of registers, or of memory, that hold numbers of a type side by side. Of an fp32 number taken as tf32 the tensor core
    reads 19 bits."""
    if kind == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return raw.view(np.float16).astype(np.float32) if kind == "f16" else values.from_bf16(raw.view(np.uint16))


def left_tile(registers: Sequence[Array], kind: str) -> Array:
    """A [ctas, warps, 16, 16] in fp32, of four 32-bit registers [ctas, threads]; [ctas, warps, 16, 8] of 32-bit numbers."""
    ctas, threads = registers[0].shape
    numbers = widened(np.stack(registers), kind).reshape(2, 2, ctas, threads // LANES, 8, 4, -1)
    return numbers.transpose(2, 3, 1, 4, 0, 5, 6).reshape(ctas, threads // LANES, 16, -1)


def right_tile(registers: Sequence[Array], kind: str) -> Array:
    """B [ctas, warps, 16, 8] in fp32, of two registers; [ctas, warps, 8, 8] of 32-bit numbers."""
    ctas, threads = registers[0].shape
    numbers = widened(np.stack(registers), kind).reshape(2, ctas, threads // LANES, 8, 4, -1)
    return numbers.transpose(1, 2, 0, 4, 5, 3).reshape(ctas, threads // LANES, -1, 8)


def summed(added: Array, left: Array, right: Array, kind: str) -> Array:
    """added + left right, in fp32. Tensor cores align the terms of a sum and cut it off toward zero, not quite as late as here
    (arXiv 2203.03341; Fasi et al., PeerJ CS 7:e330): of 16-bit numbers nothing shows it, and numpy's own sum is faster."""
    if kind != "tf32":
        return added + left @ right
    with np.errstate(invalid="ignore", over="ignore"):
        return values.cut_off(left.astype(np.float64) @ right.astype(np.float64) + added)


def gathered(registers: Array) -> Array:
    """The tile whose `spread` is these registers."""
    pairs, ctas, threads = registers.shape
    parts = registers.reshape(pairs // 4, 2, 2, ctas, threads // LANES, 8, 4)
    return parts.transpose(3, 4, 1, 5, 0, 6, 2).reshape(ctas, threads // LANES, 16, pairs * 2)


def spread(tile: Array) -> Array:
    """Registers [columns / 2, ctas, threads] of a product [ctas, warps, 16, columns]: of every eight columns a pair of row g,
    then the pair of row g + 8."""
    ctas, warps, _, columns = tile.shape
    parts = tile.reshape(ctas, warps, 2, 8, columns // 8, 4, 2)
    return parts.transpose(4, 2, 6, 0, 1, 3, 5).reshape(columns // 2, ctas, warps * LANES)


def matrix_rows(rows: Array, transposed: bool) -> Array:
    """Registers [matrices, ctas, threads] that ldmatrix gives for rows [ctas, warps, matrices, 8, 8] of 16-bit numbers."""
    ctas, warps, matrices = rows.shape[:3]
    turned = np.ascontiguousarray(rows.swapaxes(-1, -2) if transposed else rows)
    return turned.view(np.uint32).reshape(ctas, warps, matrices, LANES).transpose(2, 0, 1, 3).reshape(matrices, ctas, -1)


def rows_of_matrices(registers: Array) -> Array:
    """Rows [ctas, warps, matrices, 8, 8] of 16-bit numbers that stmatrix stores of registers [matrices, ctas, threads]."""
    matrices, ctas, threads = registers.shape
    ordered = registers.reshape(matrices, ctas, threads // LANES, LANES).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(ordered).view(np.uint16).reshape(ctas, threads // LANES, matrices, 8, 8)


def shuffled(x: Array, source: Array) -> Array:
    """Each lane's value of the lane `source` of its warp; both [ctas, threads]."""
    warps = x.reshape(x.shape[0], -1, LANES)
    return np.take_along_axis(warps, source.reshape(warps.shape), -1).reshape(x.shape)
