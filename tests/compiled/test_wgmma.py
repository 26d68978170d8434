"""Products of warpgroups: against numpy in every layout that kernels use, and each misuse in the smallest program that has it."""

import numpy as np
import pytest
import torch

from tests.compiled import snippets
from tests.compiled.faults import Divergence, Fault, MemoryFault, Race, Unsupported
from tests.compiled.values import Array

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
MODES = {128: 1, 64: 2, 32: 3}
THREADS, DEPTH = 128, 64
BEGIN, END = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
SEEN = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"


def image(matrix: Array, width: int, turned: bool) -> Array:
    """Bytes of a matrix [rows, k] of 16-bit numbers as it lies in shared memory: slabs of `width` bytes, along k or, turned,
    along the rows, line by line; the 16-byte parts of a line of 128 bytes change places with the number of the line."""
    lines = np.ascontiguousarray(matrix.T if turned else matrix).view(np.uint8)
    slabs = [lines[:, at : at + width] for at in range(0, lines.shape[1], width)]
    flat = np.concatenate([slab.reshape(-1) for slab in slabs])
    placed = np.empty_like(flat)
    for part in range(len(flat) // 16):
        other = part ^ (part // 8 % (width // 16))
        placed[16 * other : 16 * other + 16] = flat[16 * part : 16 * part + 16]
    return placed


def descriptor(start: int, width: int, leading: int = 0) -> int:
    """Of a matrix at byte `start`; `leading` bytes from one slab to the next."""
    return MODES[width] << 62 | (8 * width // 16) << 32 | leading // 16 << 16 | start // 16


def steps(base: int, rows: int, width: int, turned: bool) -> list[int]:
    """The descriptor of each 16 columns of a matrix [rows, DEPTH]."""
    if turned:
        return [descriptor(base + k * width, width, DEPTH * width) for k in range(0, DEPTH, 16)]
    places = [base + 2 * k // width * rows * width + 2 * k % width for k in range(0, DEPTH, 16)]
    return [descriptor(place, width) for place in places]


def copy_to_shared(size: int) -> str:
    """PTX that copies `size` bytes of the first array."""
    body = "shl.b32 %r2, %r0, 4;\n" + snippets.own(20, 0, 16)
    for at in range(0, size, 16 * THREADS):
        body += f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd20+{at}];\nst.shared.v4.b32 [%r2+{at}], {{%r4, %r5, %r6, %r7}};\n"
    return body + SEEN


def accumulators(columns: int) -> list[str]:
    return [f"%f{i}" for i in range(columns // 2)]


def store(columns: int, array: int) -> str:
    """PTX that stores each thread's accumulators side by side."""
    return snippets.own(21, array, 2 * columns) + "".join(
        f"st.global.b32 [%rd21+{4 * i}], {name};\n" for i, name in enumerate(accumulators(columns))
    )


def gathered(registers: Array, columns: int) -> Array:
    """The matrix [64, columns] whose numbers the threads hold."""
    result = np.empty((64, columns), np.float32)
    for thread in range(THREADS):
        for i in range(columns // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
            result[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = registers[thread, i]
    return result


@pytest.mark.parametrize(
    ("kind", "columns", "width", "turned_a", "turned_b"),
    [("f16", 32, 128, 0, 0), ("bf16", 128, 128, 0, 1), ("f16", 64, 64, 0, 1), ("bf16", 64, 64, 1, 0), ("f16", 64, 32, 1, 0),
     ("bf16", 32, 32, 0, 1), ("f16", 128, 128, 1, 1), ("tf32", 32, 128, 0, 0), ("tf32", 64, 64, 0, 0)],
)  # fmt: skip
def test_product_of_shared_matrices(kind: str, columns: int, width: int, turned_a: int, turned_b: int) -> None:
    """D starts as NaN, which the first product does not read, and is added to by the next three."""
    generator = torch.Generator().manual_seed(5)
    size = 4 if kind == "tf32" else 2
    dtype = torch.float32 if kind == "tf32" else DTYPES[kind]
    a, b = (torch.randn(rows, 2 * DEPTH // size, generator=generator).to(dtype) for rows in (64, columns))
    raw = [x.view(torch.int16 if size == 2 else torch.int32).numpy() for x in (a, b)]
    width_b = min(width, 2 * columns) if turned_b else width
    memory = np.concatenate([image(raw[0], width, bool(turned_a)), image(raw[1], width_b, bool(turned_b))])
    names = accumulators(columns)
    body = copy_to_shared(memory.size) + "".join(f"mov.b32 {name}, 0f7FC00000;\n" for name in names) + BEGIN
    pairs = zip(steps(0, 64, width, bool(turned_a)), steps(64 * DEPTH * 2, columns, width_b, bool(turned_b)), strict=True)
    for i, (left, right) in enumerate(pairs):
        body += f"mov.b64 %rd10, {left};\nmov.b64 %rd11, {right};\nsetp.ne.b32 %p1, {i}, 0;\n"
        body += f"wgmma.mma_async.sync.aligned.m64n{columns}k{32 // size}.f32.{kind}.{kind} {{{','.join(names)}}}, %rd10, %rd11, "
        body += f"{'%p1' if i % 2 else min(i, 1)}, 1, 1{f', {turned_a}, {turned_b}' if size == 2 else ''};\n"
    _, got = snippets.run(
        f".reg .b32 %f<{len(names)}>;\n{body}{END}{store(columns, 1)}",
        [memory, np.zeros((THREADS, columns // 2), np.float32)], threads=THREADS, shared=memory.size,
    )  # fmt: skip
    if kind == "tf32":  # the last 13 bits of a number are not read
        a, b = (torch.from_numpy(x // 2**13 * 2**13).view(torch.float32) for x in raw)
    np.testing.assert_allclose(gathered(got, columns), a.double().numpy() @ b.double().numpy().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", DTYPES)
def test_product_of_registers(kind: str) -> None:
    """Two warpgroups, each with its own A in registers, and one B in shared memory."""
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(rows, 16, generator=generator).to(DTYPES[kind]) for rows in (128, 8))
    raw = [x.view(torch.int16).numpy() for x in (a, b)]
    fragments = np.empty((256, 8), np.int16)
    for thread in range(256):
        for i in range(8):
            row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
            fragments[thread, i] = raw[0][row, thread % 4 * 2 + i % 2 + i // 4 * 8]
    body = "shl.b32 %r2, %r0, 2;\n" + snippets.own(20, 0, 4) + "setp.lt.s32 %p1, %r0, 64;\n@%p1 ld.global.b32 %r4, [%rd20];\n"
    body += "@%p1 st.shared.b32 [%r2], %r4;\n" + SEEN + snippets.own(22, 1, 16)
    body += f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd22];\nmov.b64 %rd11, {descriptor(0, 32)};\n{BEGIN}"
    body += f"wgmma.mma_async.sync.aligned.m64n8k16.f32.{kind}.{kind} {{%f0,%f1,%f2,%f3}}, {{%r4,%r5,%r6,%r7}}, %rd11, "
    body += "0, 1, 1, 0;\n"
    arrays = [image(raw[1], 32, False), fragments, np.zeros((256, 4), np.float32)]
    *_, got = snippets.run(f".reg .b32 %f<4>;\n{body}{END}{store(8, 2)}", arrays, threads=256, shared=256)
    want = a.double().numpy() @ b.double().numpy().T
    for group in range(2):
        matrix = gathered(got[THREADS * group : THREADS * (group + 1)], 8)
        np.testing.assert_allclose(matrix, want[64 * group : 64 * group + 64], rtol=1e-5, atol=1e-5)


# A of 64 x 16 numbers in 2048 bytes, B its first eight rows; %rd10 is the descriptor of both.
PUT = "mov.b32 %r3, 0;\nst.shared.v4.b32 [%r2], {%r3, %r3, %r3, %r3};\n"
FIRST = f"mov.b64 %rd10, {descriptor(0, 32)};\nshl.b32 %r2, %r0, 4;\n" + snippets.own(20, 0, 16)
ONE = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r10,%r11,%r12,%r13}, %rd10, %rd10, 0, 1, 1, 0, 0;\n"
NEXT = ONE.replace("0, 1, 1", "1, 1, 1")
HELD = ONE.replace("%rd10, %rd10, 0, 1, 1, 0,", "{%r20,%r21,%r22,%r23}, %rd10, 0, 1, 1,")
A = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(20, 24))
WIDER = ONE.replace("n8", "n16").replace("%r13}", "%r13,%r14,%r15,%r16,%r17}")
COMMIT, WAIT = END.splitlines(keepends=True)
COPY = "cp.async.cg.shared.global [%r2], [%rd20], 0x10;\ncp.async.commit_group;\n"
LANDED = "cp.async.wait_group 0;\n"
USE = "add.f32 %r14, %r10, %r11;\n"
SOUND = (
    PUT + SEEN + BEGIN + ONE + END + USE,
    PUT + "bar.sync 0;\nfence.proxy.async.shared::cta;\n" + BEGIN + ONE + NEXT + END + USE,
    PUT + SEEN + A + BEGIN + HELD + COMMIT + "mov.b32 %r30, %r20;\n" + WAIT + A,
    PUT + SEEN + BEGIN + ONE + COMMIT + WAIT.replace("0", "1") + WAIT + "bar.sync 0;\n" + PUT,
    COPY + LANDED + SEEN + BEGIN + ONE + END + "bar.sync 0;\n" + COPY + LANDED + SEEN + BEGIN + ONE + END + USE,
    PUT + SEEN + "mov.b32 %r5, 0;\n$L_again:\n" + BEGIN + ONE + END + USE
    + "add.s32 %r5, %r5, 1;\nsetp.lt.s32 %p1, %r5, 3;\n@%p1 bra $L_again;\n",
    PUT + SEEN + BEGIN + (ONE + COMMIT) * 12 + WAIT + USE,
)  # fmt: skip
FAULTS: tuple[tuple[str, type[Fault], str], ...] = (
    (SEEN + BEGIN + ONE + END, MemoryFault, "never written"),
    (PUT + BEGIN + ONE + END, Race, "since the last barrier"),
    (PUT + "bar.sync 0;\n" + BEGIN + ONE + END, Race, "no fence.proxy.async"),
    ("fence.proxy.async.shared::cta;\n" + PUT + "bar.sync 0;\n" + BEGIN + ONE + END, Race, "no fence.proxy.async"),
    (COPY + SEEN + BEGIN + ONE + END, Race, "copy is in flight"),
    (COPY + "fence.proxy.async.shared::cta;\n" + LANDED + "bar.sync 0;\n" + BEGIN + ONE + END, Race, "no fence.proxy.async"),
    (COPY + LANDED + "fence.proxy.async.shared::cta;\n" + BEGIN + ONE + END, Race, "since the last barrier"),
    (PUT + SEEN + ONE + END, Race, "no wgmma.fence since %r10"),
    (PUT + SEEN + BEGIN + ONE + END + USE + NEXT + END, Race, "no wgmma.fence since %r10"),
    (PUT + SEEN + BEGIN + A + HELD + END, Race, "no wgmma.fence since %r20"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + USE + WAIT, Race, "%r10 of a product that has not been waited for"),
    (PUT + SEEN + BEGIN + ONE + WAIT + USE, Race, "%r10 of a product that has not been waited for"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + WAIT.replace("0", "1") + USE, Race, "%r10 of a product"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + "mov.b32 %r12, 0;\n" + WAIT, Race, "%r12 of a product"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + "st.shared.b32 [%r2], %r13;\n" + WAIT, Race, "%r13 of a product"),
    (PUT + SEEN + A + BEGIN + HELD + COMMIT + "mov.b32 %r21, 1;\n" + WAIT, Race, "%r21 of a product"),
    (PUT + SEEN + BEGIN + ONE + WIDER + END, Race, "%r10 of a product"),
    (PUT + SEEN + A + BEGIN + ONE + HELD.replace("%r20", "%r10") + END, Race, "%r10 of a product"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + PUT + WAIT, Race, "a product reads that is under way"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + "bar.sync 0;\n" + PUT + WAIT, Race, "a product reads that is under way"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + "bar.sync 0;\n" + COPY + WAIT, Race, "a product reads that is under way"),
    (PUT + SEEN + BEGIN + ONE + COMMIT + WAIT.replace("0", "1") + "bar.sync 0;\n" + PUT, Race, "that is under way"),
    (PUT + SEEN + BEGIN + ONE + END + PUT, Race, "no barrier since it was waited for"),
    (PUT + SEEN + "mov.b32 %r5, 0;\n$L_again:\n" + BEGIN + ONE + COMMIT + "add.s32 %r5, %r5, 1;\nsetp.lt.s32 %p1, %r5, 3;\n"
     + "@%p1 bra $L_again;\n" + USE + WAIT, Race, "%r10 of a product"),
    (PUT + SEEN + BEGIN + ONE.replace("%rd10, 0", "%rd12, 0") + END, MemoryFault, "before it is written"),
    (PUT + SEEN + "cvt.u64.u32 %rd12, %r0;\nor.b64 %rd10, %rd10, %rd12;\n" + BEGIN + ONE + END, Divergence, "different matrix"),
    (PUT + SEEN + "mov.b64 %rd10, 0;\n" + BEGIN + ONE + END, Unsupported, "matrix descriptor 0x0"),
    (PUT + SEEN + f"mov.b64 %rd10, {descriptor(0, 32) | 1 << 49};\n" + BEGIN + ONE + END, Unsupported, "matrix descriptor"),
    (PUT + SEEN + f"mov.b64 %rd10, {descriptor(1024, 32)};\n" + BEGIN + ONE + END, MemoryFault, "outside or misaligned"),
    (PUT + SEEN + BEGIN + ONE.replace("1, 1, 0, 0", "-1, 1, 0, 0") + END, Unsupported, "'-1'"),
    (PUT + SEEN + "setp.lt.s32 %p1, %r0, 9;\n" + BEGIN + "@%p1 " + ONE + END, Unsupported, "mma_async"),
)  # fmt: skip


def execute(body: str) -> None:
    snippets.run(FIRST + body, [np.zeros((THREADS, 4), np.uint32)], threads=THREADS, shared=2048)


@pytest.mark.parametrize("body", SOUND)
def test_sound(body: str) -> None:
    execute(body)


@pytest.mark.parametrize(("body", "kind", "message"), FAULTS)
def test_fault(body: str, kind: type[Fault], message: str) -> None:
    with pytest.raises(kind, match=message):
        execute(body)
