"""Numbers as a GPU computes them, on numpy arrays: rounding to bfloat16, flushed subnormals, saturating shifts, wide products.

A bfloat16 number is a uint16, as in a register; fp16 and fp32 are numpy's own. Source: PTX ISA 8.8, chapter 9.7.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
U2, U4, U8 = np.dtype("u2"), np.dtype("u4"), np.dtype("u8")
F2, F4 = np.dtype("f2"), np.dtype("f4")
SMALLEST_NORMAL = np.float32(2.0**-126)


def from_bf16(x: Array) -> Array:
    """fp32 of the bfloat16 numbers in a uint16 array."""
    return (x.astype(U4) << np.uint32(16)).view(F4)


def to_bf16(x: Array) -> Array:
    """The nearest bfloat16 numbers, ties to even; every NaN becomes the one that the hardware makes."""
    bits = x.view(U4)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(U2)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def packed(high: Array, low: Array) -> Array:
    """Two 16-bit halves as one 32-bit register."""
    return (high.view(U2).astype(U4) << np.uint32(16)) | low.view(U2)


def flushed(x: Array) -> Array:
    """Subnormal fp32 numbers made zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x y + z in fp32: the product is exact in fp64, and the sum is rounded there before it is rounded to fp32."""
    return (x.astype(np.float64) * y + z).astype(F4)


def cut_off(x: Array) -> Array:
    """fp32 of fp64 numbers, toward zero."""
    near = x.astype(F4)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, F4.type(0)), near)


def divided(x: Array, y: Array) -> Array:
    """Signed division toward zero. Dividing by zero gives the all-ones that the hardware gives."""
    wide_x, wide_y = x.astype(np.int64), np.where(y == 0, 1, y).astype(np.int64)
    quotient = np.abs(wide_x) // np.abs(wide_y) * np.sign(wide_x) * np.sign(wide_y)
    return np.where(y == 0, -1, quotient).astype(x.dtype)


def high_product(x: Array, y: Array) -> Array:
    """Upper half of the product of 32-bit numbers, signed or not."""
    wide = np.dtype(f"{x.dtype.kind}8")
    return ((x.astype(wide) * y.astype(wide)) >> wide.type(32)).astype(x.dtype)


def shifted_left(x: Array, by: Array) -> Array:
    """x << by; zero from the width of x on."""
    bits = 8 * x.dtype.itemsize
    return np.where(by >= bits, x.dtype.type(0), x << np.minimum(by, bits - 1).astype(x.dtype))


def shifted_right(x: Array, by: Array) -> Array:
    """x >> by; zero, or the sign of a signed x, from the width of x on."""
    bits = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(by >= bits, x.dtype.type(0), shifted)


def bit_field(x: Array, position: Array, length: Array) -> Array:
    """`length` bits of x from `position` on, extended by zeros, or by their highest bit where x is signed; bits past the end of
    x are zeros, or its sign. A length of 0 gives 0."""
    wide, first, count = x.astype(np.int64), (position & 255).astype(np.int64), (length & 255).astype(np.int64)
    field = wide >> np.minimum(first, 63)
    up = 64 - np.clip(count, 1, 64)
    field = (field << up) >> up if x.dtype.kind == "i" else field & ((np.int64(1) << np.minimum(count, 62)) - 1)
    return np.where(count == 0, 0, field).astype(x.dtype)


def permuted(x: Array, y: Array, selector: Array) -> Array:
    """Four bytes out of the eight of x (0 to 3) and y (4 to 7), each named by a nibble of the selector; with the nibble's highest
    bit set it is the sign of that byte, spread over all its bits."""
    both = (y.astype(U8) << np.uint64(32)) | x.astype(U8)
    result = np.uint32(0)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((both >> (8 * (nibble & 7)).astype(U8)) & np.uint64(255)).astype(U4)
        sign = np.where(byte >= 128, np.uint32(255), np.uint32(0))
        result = result | np.where(nibble >= 8, sign, byte) << np.uint32(8 * place)
    return np.asarray(result)
