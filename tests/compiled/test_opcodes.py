"""Every opcode of opcodes.py, run in a program, against a formula on Python's numbers, lane by lane."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.compiled import snippets
from tests.compiled.opcodes import OPERATIONS
from tests.compiled.values import Array

BITS = {"u2": "b16", "i2": "b16", "f2": "b16", "u4": "b32", "i4": "b32", "f4": "b32", "u8": "b64", "i8": "b64", "b1": "b32"}
PREFIX = {"b16": "rs", "b32": "r", "b64": "rd"}
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -2.5,
    3.3e38,
    1e-40,
    -1e-44,
    math.inf,
    -math.inf,
    math.nan,
    65504.0,
    1 / 3,
    6e-8,
    1.00390625,
    1.01171875,
)
EXTREMES = (0, 1, -1, 2, 31, 33, 63, 255, 2**15 - 1, -(2**15), 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
F32 = np.float32


def single(x: float) -> float:
    """x rounded to fp32."""
    return float(np.float64(x).astype(F32))


def flush(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def times(x: float, y: float, z: float) -> float:
    """x y + z, rounded once."""
    return single(float(np.longdouble(x) * np.longdouble(y) + np.longdouble(z)))


def quotient(x: float, y: float) -> float:
    return float(np.float64(x) / np.float64(y))


def truncated(x: int, y: int) -> int:
    return int(math.copysign(abs(x) // abs(y), x * y)) if y else -1


def exp2(x: float) -> float:
    return math.inf if x >= 128 else flush(2.0**x)


def rsqrt(x: float) -> float:
    x = flush(x)
    return math.copysign(math.inf, x) if x == 0 else x**-0.5 if x > 0 else math.nan


def field(x: int, position: int, length: int, bits: int, signed: bool) -> int:
    """The field bit by bit."""
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    top = (x >> min(position + length - 1, bits - 1)) & 1 if signed else 0
    inside = [(x >> (position + i)) & 1 if position + i < bits else top for i in range(min(length, bits))]
    return sum(bit << i for i, bit in enumerate(inside)) + sum(top << i for i in range(len(inside), bits))


def bf16_bits(x: float) -> int:
    """torch's own rounding."""
    return 0x7FFF if math.isnan(x) else int(torch.tensor(x, dtype=torch.float32).bfloat16().view(torch.int16)) & 0xFFFF


def f16_bits(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).half().view(torch.int16)) & 0xFFFF


def chosen(x: int, y: int, selector: int) -> int:
    """Bytes by numpy: index, then the sign where it is asked for."""
    source, wanted = list(x.to_bytes(4, "little") + y.to_bytes(4, "little")), [selector >> 4 * i & 15 for i in range(4)]
    picked = [source[n & 7] if n < 8 else 255 * (source[n & 7] >> 7) for n in wanted]
    return int.from_bytes(bytes(picked), "little")


def pick(low: float, high: float, want: Callable[[float, float], float]) -> float:
    """The smaller or larger number; the other one of a NaN."""
    return high if math.isnan(low) else low if math.isnan(high) else want(low, high)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mov": lambda x: x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul.lo": lambda x, y: x * y,
    "mul.wide": lambda x, y: x * y,
    "mul": lambda x, y: x * y,
    "add.rn": lambda x, y: x + y,
    "sub.rn": lambda x, y: x - y,
    "mul.rn": lambda x, y: x * y,
    "mad.lo": lambda x, y, z: x * y + z,
    "mad.wide": lambda x, y, z: x * y + z,
    "mul.hi": lambda x, y: (x * y) >> 32,
    "fma.rn": times,
    "fma.rn.ftz": lambda x, y, z: flush(times(flush(x), flush(y), flush(z))),
    "div": truncated,
    "rem": lambda x, y: x - y * truncated(x, y),
    "div.full": quotient,
    "div.approx": quotient,
    "min.relu": lambda x, y: max(min(x, y), 0),
    "neg": lambda x: -x,
    "abs": abs,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "selp": lambda x, y, p: x if p else y,
    "setp.lt": lambda x, y: x < y,
    "setp.le": lambda x, y: x <= y,
    "setp.gt": lambda x, y: x > y,
    "setp.ge": lambda x, y: x >= y,
    "setp.eq": lambda x, y: x == y,
    "setp.neu": lambda x, y: x != y,
    "ex2.approx.ftz": exp2,
    "rsqrt.approx.ftz": rsqrt,
    "tanh.approx": math.tanh,
}
ONE_BY_ONE: dict[str, Callable[..., Any]] = {
    "min.f32": lambda x, y: pick(x, y, min),
    "max.f32": lambda x, y: pick(x, y, max),
    "prmt.b32": chosen,
    "bfe.u32": lambda x, p, n: field(x, p, n, 32, False),
    "bfe.s32": lambda x, p, n: field(x, p, n, 32, True),
    "cvt.f32.bf16": lambda x: float(np.array([x << 16], np.uint32).view(F32)[0]),
    "cvt.rn.bf16.f32": bf16_bits,
    "cvt.rn.f16x2.f32": lambda high, low: f16_bits(high) << 16 | f16_bits(low),
    "cvt.rn.bf16x2.f32": lambda high, low: bf16_bits(high) << 16 | bf16_bits(low),
}


def formula(opcode: str) -> Callable[..., Any]:
    """What the opcode computes, on Python's numbers; the result is then wrapped or rounded to its type."""
    stem, kind = opcode.rsplit(".", 1)
    if opcode in ONE_BY_ONE:
        return ONE_BY_ONE[opcode]
    if stem in ARITHMETIC:
        return ARITHMETIC[stem]
    if stem in ("min", "max"):
        return min if stem == "min" else max
    bits = int(kind.lstrip("busf")) if kind != "pred" else 1
    others: dict[str, Callable[..., Any]] = {
        "shl": lambda x, n: x << n if n < bits else 0,
        "shr": lambda x, n: x >> min(n, bits),
        "setp.ne": lambda x, y: x != y,
        "not": lambda x: ~x,
    }
    return others.get(stem, lambda x: x)


def samples(kind: np.dtype, seed: int) -> Array:
    """Extremes and random numbers of a type."""
    generator = np.random.default_rng(seed)
    if kind.kind == "b":
        return generator.integers(0, 2, 64).astype(np.uint32)
    if kind.kind == "f":
        values = np.array([*FLOATS, *generator.normal(size=64 - len(FLOATS)) * 10], np.float64)
    else:
        bits = 8 * kind.itemsize
        numbers = [*EXTREMES, *(int(x) for x in generator.integers(-(2**62), 2**62, 64 - len(EXTREMES)))]
        values = np.array([x % 2**bits for x in numbers], np.uint64).astype(f"u{kind.itemsize}").view(kind)
    with np.errstate(over="ignore"):
        return generator.permutation(values.astype(kind))


def program(opcode: str, kinds: list[str], result: str) -> str:
    """Load each operand, compute, store."""
    body, names = "", []
    for i, kind in enumerate([*kinds, result]):
        bits = BITS[kind]
        body += snippets.own(20 + i, i, np.dtype("u4" if kind == "b1" else kind).itemsize)
        name = f"%{PREFIX[bits]}{10 + i}"
        if i < len(kinds):
            body += f"ld.global.{bits} {name}, [%rd{20 + i}];\n"
        if kind == "b1":
            body += f"setp.ne.b32 %p{i}, {name}, 0;\n" if i < len(kinds) else ""
            name = f"%p{i}"
        names.append(name)
    body += f"{opcode} {', '.join([names[-1], *names[:-1]])};\n"
    stored = names[-1]
    if result == "b1":
        body += f"selp.b32 %r9, 1, 0, {names[-1]};\n"
        stored = "%r9"
    return body + f"st.global.{BITS[result]} [%rd{20 + len(kinds)}], {stored};\n"


def wrapped(value: Any, kind: np.dtype) -> Any:
    """A Python number as the type holds it."""
    if kind.kind == "b":
        return np.uint32(bool(value))
    if kind.kind == "f":
        return np.float64(value).astype(kind)
    return np.array(int(value) % 2 ** (8 * kind.itemsize), np.uint64).astype(f"u{kind.itemsize}").view(kind)[()]


@pytest.mark.parametrize("opcode", sorted(OPERATIONS))
def test_opcode(opcode: str) -> None:
    operation = OPERATIONS[opcode]
    kinds, result = [kind.str[1:] for kind in operation.operands], operation.result.str[1:]
    inputs = [samples(kind, i) for i, kind in enumerate(operation.operands)]
    if opcode in ("div.s32", "rem.s32"):
        inputs[1] = np.where(inputs[1] == 0, 7, inputs[1]).astype(inputs[1].dtype)
    if opcode.startswith(("shl", "shr", "bfe")):
        inputs[1:] = [x % np.uint32(70) for x in inputs[1:]]
    room = np.zeros(64, np.uint32 if result == "b1" else result)
    *_, got = snippets.run(program(opcode, kinds, result), [*inputs, room], threads=64)
    compute = formula(opcode)
    with np.errstate(all="ignore"):
        want = np.array([wrapped(compute(*lane), operation.result) for lane in zip(*(x.tolist() for x in inputs), strict=True)])
    if opcode.startswith("tanh"):  # which the hardware does to 11 bits
        np.testing.assert_allclose(got, want, rtol=2**-11, atol=1e-38)
    elif ".approx" in opcode or ".full" in opcode:  # which the hardware does to two units in the last place
        np.testing.assert_allclose(got, want, rtol=3e-7)
    else:
        np.testing.assert_array_equal(got, want)


def test_shifts_and_floats_take_constants() -> None:
    body = snippets.own(20, 0, 4) + "shl.b32 %r2, %r0, 3;\nadd.s32 %r3, %r2, -5;\ncvt.rn.f32.s32 %r4, %r3;\n"
    body += "mul.f32 %r5, %r4, 0f3F000000;\nst.global.b32 [%rd20], %r5;\n"
    (got,) = snippets.run(body, [np.zeros(32, F32)])
    np.testing.assert_array_equal(got, (np.arange(32) * 8 - 5) * F32(0.5))


def test_a_conversion_reads_the_low_bits_of_a_wider_register() -> None:
    body = snippets.own(20, 0, 8) + "ld.global.b64 %rd2, [%rd20];\ncvt.s64.s32 %rd3, %rd2;\nst.global.b64 [%rd20], %rd3;\n"
    numbers = (np.arange(32) - 7) * (2**31 - 5)
    (got,) = snippets.run(body, [numbers])
    np.testing.assert_array_equal(got, numbers.astype(np.int32))


def test_halves_pack_and_unpack() -> None:
    body = snippets.own(20, 0, 4) + "ld.global.b32 %r2, [%rd20];\nmov.b32 {%rs1, %rs2}, %r2;\nmov.b32 %r3, {%rs2, %rs1};\n"
    numbers = np.arange(32, dtype=np.uint32) * 0x10003
    (got,) = snippets.run(body + "st.global.b32 [%rd20], %r3;\n", [numbers])
    np.testing.assert_array_equal(got, numbers << 16 | numbers >> 16)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_product(kind: str) -> None:
    """mma m16n8k16 on fragments that ldmatrix loads from shared memory, A by rows and B by columns."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (16, 8))
    body = snippets.own(20, 0, 16) + "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd20];\nshl.b32 %r6, %r0, 4;\n"
    body += "setp.lt.u32 %p1, %r0, 16;\n" + snippets.own(21, 1, 16)
    body += "st.shared.v4.b32 [%r6], {%r2, %r3, %r4, %r5};\n@%p1 ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd21];\n"
    body += "@%p1 st.shared.v4.b32 [%r6+512], {%r2, %r3, %r4, %r5};\nbar.sync 0;\n"
    body += "and.b32 %r7, %r0, 15;\nshl.b32 %r7, %r7, 5;\nand.b32 %r8, %r0, 16;\nadd.s32 %r7, %r7, %r8;\n"
    body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];\n"
    body += "and.b32 %r7, %r0, 7;\nshl.b32 %r7, %r7, 5;\nand.b32 %r8, %r0, 8;\nshl.b32 %r8, %r8, 1;\nadd.s32 %r7, %r7, %r8;\n"
    body += "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r14, %r15}, [%r7+512];\n"
    body += "mov.b32 %r16, 0f3F800000;\n"
    body += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, "
    body += "{%r14, %r15}, {%r16, %r16, %r16, %r16};\n" + snippets.own(22, 2, 16)
    body += "st.global.v4.b32 [%rd22], {%r20, %r21, %r22, %r23};\n"
    raw = [x.view(torch.int16).numpy() for x in (a, b)]
    *_, got = snippets.run(body, [*raw, np.zeros((32, 4), F32)], shared=1024)
    tile = np.zeros((16, 8), F32)
    for lane, i in itertools.product(range(32), range(4)):
        tile[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = got[lane, i]
    np.testing.assert_allclose(tile, 1 + a.double().numpy() @ b.double().numpy().T, rtol=1e-5, atol=1e-5)


def test_matrix_product_of_tf32() -> None:
    """mma m16n8k8: of each number the last 13 bits are not read, and the sum is cut off. Lane 4 g + t holds A[g, t],
    A[g + 8, t], A[g, t + 4], A[g + 8, t + 4]; B[t, g], B[t + 4, g]."""
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(rows, 8, generator=generator).numpy() for rows in (16, 8))
    held = np.zeros((32, 8), F32)
    for lane, i in itertools.product(range(32), range(6)):
        g, t = lane // 4, lane % 4
        held[lane, i] = a[g + i % 2 * 8, t + i // 2 * 4] if i < 4 else b[g, t + i % 2 * 4]
    body = snippets.own(20, 0, 32) + "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd20];\nmov.b32 %r8, 0f40000000;\n"
    body += "ld.global.v2.b32 {%r6, %r7}, [%rd20+16];\nmma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
    body += "{%r2, %r3, %r4, %r5}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%r8, %r8, %r8, %r8};\n" + snippets.own(21, 1, 16)
    _, got = snippets.run(body + "st.global.v4.b32 [%rd21], {%r2, %r3, %r4, %r5};\n", [held, np.zeros((32, 4), F32)])
    tile = np.zeros((16, 8), F32)
    for lane, i in itertools.product(range(32), range(4)):
        tile[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = got[lane, i]
    cut = [np.trunc(np.ldexp(x, 10 - np.frexp(x)[1] + 1)) * np.ldexp(1.0, np.frexp(x)[1] - 11) for x in (a, b)]
    exact = 2 + cut[0].astype(np.float64) @ cut[1].T
    np.testing.assert_allclose(tile, exact, rtol=1e-6, atol=1e-6)
    assert (np.abs(tile) <= np.abs(exact)).all()


def test_matrix_load_of_one() -> None:
    """Lanes 0 to 7 give the rows; lane l gets numbers 2 (l mod 4) and the next of row l / 4."""
    numbers = np.arange(64, dtype=np.uint16)
    body = snippets.own(20, 0, 4) + "ld.global.b32 %r2, [%rd20];\nshl.b32 %r3, %r0, 2;\nst.shared.b32 [%r3], %r2;\n"
    body += "and.b32 %r4, %r0, 7;\nshl.b32 %r4, %r4, 4;\nxor.b32 %r4, %r4, 16;\nbar.sync 0;\n"
    body += "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r4];\nst.global.b32 [%rd20], %r5;\n"
    (got,) = snippets.run(body, [numbers], shared=128)
    np.testing.assert_array_equal(got.reshape(8, 8), numbers.reshape(8, 8)[np.arange(8) ^ 1])


@pytest.mark.parametrize("number", [2, 4])
def test_matrix_store(number: int) -> None:
    """Lane 8 i + r gives the address of row r of matrix i; register i of lane l holds two numbers of its row l / 4."""
    numbers = np.arange(64 * number, dtype=np.uint16)
    body = "shl.b32 %r2, %r0, 4;\n" + snippets.own(20, 0, 4) + snippets.own(21, 0, 16)
    body += "".join(f"ld.global.b32 %r{4 + i}, [%rd20+{128 * i}];\n" for i in range(number))
    held = ", ".join(f"%r{4 + i}" for i in range(number))
    body += f"stmatrix.sync.aligned.m8n8.x{number}.shared::cta.b16 [%r2], {{{held}}};\nbar.sync 0;\n"
    body += f"setp.lt.u32 %p1, %r0, {8 * number};\n@%p1 ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2];\n"
    (got,) = snippets.run(body + "@%p1 st.global.v4.b32 [%rd21], {%r10, %r11, %r12, %r13};\n", [numbers], shared=128 * number)
    np.testing.assert_array_equal(got, numbers)


def test_matrix_load_transposed() -> None:
    """Register i of lane l holds rows 2 (l mod 4) and the next of column l / 4 of matrix i."""
    numbers = np.arange(256, dtype=np.uint16)
    body = snippets.own(20, 0, 16) + "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd20];\nshl.b32 %r6, %r0, 4;\n"
    body += "st.shared.v4.b32 [%r6], {%r2, %r3, %r4, %r5};\nbar.sync 0;\n"
    body += "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];\n" + snippets.own(21, 1, 16)
    body += "st.global.v4.b32 [%rd21], {%r10, %r11, %r12, %r13};\n"
    _, got = snippets.run(body, [numbers, np.zeros((32, 8), np.uint16)], shared=512)
    matrices = numbers.reshape(4, 8, 8)
    want = [[matrices[i, 2 * (lane % 4) + j, lane // 4] for i in range(4) for j in range(2)] for lane in range(32)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("mode", "want"), [("bfly", np.arange(64) ^ 5), ("idx", np.arange(64) // 32 * 32 + 5)])
def test_shuffle(mode: str, want: Array) -> None:
    body = snippets.own(20, 0, 4) + f"shfl.sync.{mode}.b32 %r2, %r0, 5, 31, -1;\nst.global.b32 [%rd20], %r2;\n"
    (got,) = snippets.run(body, [np.zeros(64, np.uint32)], threads=64)
    np.testing.assert_array_equal(got, want)
