"""How the lanes of a warp hold matrices: registers [.., threads] to tiles [.., warps, rows, columns], and back.

Source: PTX ISA 8.8, chapter 9.7.14.5 (mma, ldmatrix).
"""

from collections.abc import Sequence

import numpy as np

from tests.compiled import values
from tests.compiled.values import Array

LANES = 32


def widened(numbers: Array, kind: str) -> Array:
    """fp32 of 16-bit numbers of the type f16 or bf16."""
    return numbers.view(np.float16).astype(np.float32) if kind == "f16" else values.from_bf16(numbers)


def left_tile(registers: Sequence[Array], kind: str) -> Array:
    """A [ctas, warps, 16, 16] in fp32, of four 32-bit registers [ctas, threads] of two 16-bit numbers each."""
    ctas, threads = registers[0].shape
    halves = np.stack(registers).view(np.uint16).reshape(2, 2, ctas, threads // LANES, 8, 4, 2)
    return widened(halves.transpose(2, 3, 1, 4, 0, 5, 6).reshape(ctas, -1, 16, 16), kind)


def right_tile(registers: Sequence[Array], kind: str) -> Array:
    """B [ctas, warps, 16, 8] in fp32, of two registers."""
    ctas, threads = registers[0].shape
    halves = np.stack(registers).view(np.uint16).reshape(2, ctas, threads // LANES, 8, 4, 2)
    return widened(halves.transpose(1, 2, 0, 4, 5, 3).reshape(ctas, -1, 16, 8), kind)


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


def shuffled(x: Array, source: Array) -> Array:
    """Each lane's value of the lane `source` of its warp; both [ctas, threads]."""
    warps = x.reshape(x.shape[0], -1, LANES)
    return np.take_along_axis(warps, source.reshape(warps.shape), -1).reshape(x.shape)
