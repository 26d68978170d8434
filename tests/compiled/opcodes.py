"""What each arithmetic opcode computes, one lane at a time: OPERATIONS, by the opcode with all its suffixes.

An opcode that is not here is refused. tests/compiled/test_opcodes.py compares every one with an independent formula, and
the library's kernels, as they are or with a planted bug, use every one. Source: PTX ISA 8.8, chapter 9.7.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.compiled import values
from tests.compiled.values import Array

BOOL, I2, I4, I8 = np.dtype(bool), np.dtype("i2"), np.dtype("i4"), np.dtype("i8")
U2, U4, U8, F2, F4 = values.U2, values.U4, values.U8, values.F2, values.F4
TYPES = {
    "pred": BOOL,
    "b16": U2,
    "b32": U4,
    "b64": U8,
    "s16": I2,
    "s32": I4,
    "s64": I8,
    "u32": U4,
    "u64": U8,
    "u16": U2,
    "f32": F4,
}
TYPES |= {"f16": F2, "bf16": U2}


class Operation(NamedTuple):
    """compute(operands of these types) -> result."""

    result: np.dtype
    operands: tuple[np.dtype, ...]
    compute: Callable[..., Array]


def _same(opcodes: str, arity: int, compute: Callable[..., Array]) -> dict[str, Operation]:
    """Opcodes whose operands and result have the type that the name ends in."""
    types = {opcode: TYPES[opcode.rsplit(".", 1)[1]] for opcode in opcodes.split()}
    return {opcode: Operation(kind, (kind,) * arity, compute) for opcode, kind in types.items()}


def _compare(opcodes: str, compute: Callable[..., Array]) -> dict[str, Operation]:
    """Comparisons: operands of the type that the name ends in, a predicate as the result."""
    types = {opcode: TYPES[opcode.rsplit(".", 1)[1]] for opcode in opcodes.split()}
    return {opcode: Operation(BOOL, (kind, kind), compute) for opcode, kind in types.items()}


def _convert(opcode: str, compute: Callable[..., Array] | None = None) -> dict[str, Operation]:
    """A conversion: the name ends in the result's type and the operand's."""
    to, source = (TYPES[name] for name in opcode.split(".")[-2:])
    return {opcode: Operation(to, (source,), compute or (lambda x: x.astype(to)))}


def _wide(opcodes: str, compute: Callable[..., Array]) -> dict[str, Operation]:
    """Products of 32-bit numbers in 64 bits, and a 64-bit summand."""
    found = {}
    for opcode in opcodes.split():
        narrow, wide = (I4, I8) if opcode.endswith("s32") else (U4, U8)
        operands = (narrow, narrow, wide) if opcode.startswith("mad") else (narrow, narrow)
        found[opcode] = Operation(wide, operands, lambda x, y, *z, wide=wide: compute(x.astype(wide), y.astype(wide), *z))
    return found


def _select(opcodes: str) -> dict[str, Operation]:
    types = {opcode: TYPES[opcode.rsplit(".", 1)[1]] for opcode in opcodes.split()}
    return {opcode: Operation(kind, (kind, kind, BOOL), lambda x, y, p: np.where(p, x, y)) for opcode, kind in types.items()}


def _shift(opcodes: str, compute: Callable[..., Array]) -> dict[str, Operation]:
    types = {opcode: TYPES[opcode.rsplit(".", 1)[1]] for opcode in opcodes.split()}
    return {opcode: Operation(kind, (kind, U4), compute) for opcode, kind in types.items()}


def _exp2(x: Array) -> Array:
    return values.flushed(np.exp2(values.flushed(x)))


def _tanh(x: Array) -> Array:
    """To the relative error of 2^-11 that the manual allows, all of it on one side: the last 12 bits of the fraction are 0."""
    return (np.tanh(x).view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)


def _fused_flushed(x: Array, y: Array, z: Array) -> Array:
    return values.flushed(values.fused(*(values.flushed(part) for part in (x, y, z))))


OPERATIONS: dict[str, Operation] = {
    **_same("mov.pred mov.b16 mov.b32 mov.b64 mov.u16 mov.u32", 1, lambda x: x),
    **_same("add.s32 add.s64 add.f32 add.rn.f32", 2, np.add),
    **_same("sub.s32 sub.f32 sub.rn.f32", 2, np.subtract),
    **_same("mul.lo.s32 mul.lo.s64 mul.f32 mul.rn.f32", 2, np.multiply),
    **_same("mad.lo.s32 mad.lo.s64", 3, lambda x, y, z: x * y + z),
    **_same("fma.rn.f32", 3, values.fused),
    **_same("fma.rn.ftz.f32", 3, _fused_flushed),
    **_same("mul.hi.u32 mul.hi.s32", 2, values.high_product),
    **_wide("mul.wide.s32 mul.wide.u32", np.multiply),
    **_wide("mad.wide.s32 mad.wide.u32", lambda x, y, z: x * y + z),
    **_same("div.s32", 2, values.divided),
    **_same("rem.s32", 2, lambda x, y: x - y * values.divided(x, y)),
    **_same("div.full.f32 div.approx.f32", 2, np.divide),
    **_same("neg.f32 neg.s32", 1, np.negative),
    **_same("abs.f32", 1, np.abs),
    **_same("min.s32", 2, np.minimum),
    **_same("max.s32", 2, np.maximum),
    **_same("min.relu.s32", 2, lambda x, y: np.maximum(np.minimum(x, y), 0)),
    **_same("max.f32", 2, np.fmax),
    **_same("min.f32", 2, np.fmin),
    **_same("and.pred and.b16 and.b32 and.b64", 2, np.bitwise_and),
    **_same("or.b16 or.b32 or.b64", 2, np.bitwise_or),
    **_same("xor.b32 xor.b64", 2, np.bitwise_xor),
    **_same("not.b32", 1, np.bitwise_not),
    **_shift("shl.b16 shl.b32 shl.b64", values.shifted_left),
    **_shift("shr.u16 shr.u32 shr.u64 shr.s32 shr.s64", values.shifted_right),
    "bfe.u32": Operation(U4, (U4, U4, U4), values.bit_field),
    "bfe.s32": Operation(I4, (I4, U4, U4), values.bit_field),
    "prmt.b32": Operation(U4, (U4, U4, U4), values.permuted),
    **_select("selp.b16 selp.b32 selp.f32"),
    **_compare("setp.lt.s32 setp.lt.s64 setp.lt.u32 setp.lt.u64 setp.lt.f32", np.less),
    **_compare("setp.le.s32 setp.le.s64", np.less_equal),
    **_compare("setp.gt.s32 setp.gt.s64 setp.gt.u32 setp.gt.f32", np.greater),
    **_compare("setp.ge.s32 setp.ge.s64 setp.ge.u32", np.greater_equal),
    **_compare("setp.eq.b32 setp.eq.f32", np.equal),
    **_compare("setp.ne.b16 setp.ne.b32 setp.ne.b64 setp.neu.f32", np.not_equal),
    **_same("ex2.approx.ftz.f32", 1, _exp2),
    **_same("rsqrt.approx.ftz.f32", 1, lambda x: 1 / np.sqrt(values.flushed(x))),
    **_same("tanh.approx.f32", 1, _tanh),
    **_convert("cvt.s64.s32"),
    **_convert("cvt.u64.u32"),
    **_convert("cvt.u32.u64"),
    **_convert("cvt.u32.u16"),
    **_convert("cvt.u16.u32"),
    **_convert("cvt.rn.f32.s32"),
    **_convert("cvt.rn.f32.u32"),
    **_convert("cvt.f32.f16"),
    **_convert("cvt.f32.bf16", values.from_bf16),
    **_convert("cvt.rn.f16.f32"),
    **_convert("cvt.rn.bf16.f32", values.to_bf16),
    "cvt.rn.f16x2.f32": Operation(U4, (F4, F4), lambda x, y: values.packed(x.astype(F2), y.astype(F2))),
    "cvt.rn.bf16x2.f32": Operation(U4, (F4, F4), lambda x, y: values.packed(values.to_bf16(x), values.to_bf16(y))),
}
