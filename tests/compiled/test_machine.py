"""The emulator finds what it says it finds: each fault in the smallest program that has it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.compiled import snippets
from tests.compiled.faults import Divergence, Fault, MemoryFault, Race, Unsupported
from tests.compiled.global_memory import GlobalMemory
from tests.compiled.parse import parse
from tests.compiled.values import Array

OWN = snippets.own(20, 0, 4) + "shl.b32 %r2, %r0, 2;\n"
LOAD = "ld.global.b32 %r3, [%rd20];\n"
STORE = "st.global.b32 [%rd20], %r3;\n"
REVERSED = "sub.s32 %r4, 252, %r2;\n"
COPY = "cp.async.ca.shared.global [%r2], [%rd20], 0x4;\ncp.async.commit_group;\n"
WAIT = "cp.async.wait_group 0;\n"


def words(number: int = 64) -> Array:
    return np.arange(number, dtype=np.uint32)


def execute(body: str, arrays: Sequence[Array] | None = None, grid: tuple[int, int] = (1, 1)) -> list[Array]:
    return snippets.run(OWN + body, [words()] if arrays is None else arrays, threads=64, shared=512, grid=grid)


def test_a_warp_reads_what_another_wrote_before_the_barrier() -> None:
    body = f"{LOAD}st.shared.b32 [%r2], %r3;\nbar.sync 0;\n{REVERSED}ld.shared.b32 %r3, [%r4];\n{STORE}"
    (got,) = execute(body)
    np.testing.assert_array_equal(got, words()[::-1])


def test_asynchronous_copies_arrive_when_they_are_waited_for() -> None:
    (got,) = execute(f"{COPY}{WAIT}bar.sync 0;\n{REVERSED}ld.shared.b32 %r3, [%r4];\n{STORE}")
    np.testing.assert_array_equal(got, words()[::-1])


def test_an_asynchronous_copy_of_nothing_gives_zeros() -> None:
    body = "setp.lt.s32 %p1, %r0, 9;\nselp.b32 %r5, 4, 0, %p1;\ncp.async.ca.shared.global [%r2], [%rd20], 0x4, %r5;\n"
    (got,) = execute(f"{body}cp.async.commit_group;\n{WAIT}ld.shared.b32 %r3, [%r2];\n{STORE}")
    np.testing.assert_array_equal(got, np.where(words() < 9, words(), 0))


def test_ctas_part_at_a_branch_and_threads_keep_their_registers() -> None:
    """Four CTAs, of which each goes round a loop as often as its block id says."""
    body = "mov.b32 %r5, 0;\nmov.b32 %r6, 0;\n$L_again:\nadd.s32 %r5, %r5, %r0;\nadd.s32 %r6, %r6, 1;\n"
    body += "setp.le.s32 %p1, %r6, %r1;\n@%p1 bra $L_again;\nshl.b32 %r7, %r1, 6;\nadd.s32 %r7, %r7, %r0;\n"
    body += "mad.wide.u32 %rd21, %r7, 4, %rd0;\nst.global.b32 [%rd21], %r5;\n"
    (got,) = execute(body, [words(256)], grid=(4, 1))
    np.testing.assert_array_equal(got.reshape(4, 64), np.arange(64) * np.arange(1, 5)[:, None])


def test_a_guarded_load_leaves_the_other_lanes_alone() -> None:
    body = f"mov.b32 %r3, 7;\nsetp.lt.s32 %p1, %r0, 5;\n@!%p1 ld.global.b32 %r3, [%rd20];\n{STORE}"
    (got,) = execute(body)
    np.testing.assert_array_equal(got, np.where(words() < 5, 7, words()))


def test_threads_may_part_around_a_special_case() -> None:
    (got,) = execute(f"{LOAD}setp.lt.u32 %p1, %r0, 9;\n@%p1 bra $L_end;\nadd.s32 %r3, %r3, 100;\n$L_end:\n{STORE}")
    np.testing.assert_array_equal(got, np.where(words() < 9, words(), words() + 100))


FAULTS: tuple[tuple[str, type[Fault], str], ...] = (
    ("st.shared.b32 [%r2], %r0;\n" + REVERSED + "ld.shared.b32 %r3, [%r4];\n", Race, "reads what another wrote"),
    ("st.shared.b32 [%r2], %r0;\nbar.sync 0;\n" + REVERSED + "ld.shared.b32 %r3, [%r4];\nst.shared.b32 [%r2], %r0;\n", Race,
     "writes over what another read"),
    ("st.shared.b32 [global_smem], %r0;\n", Race, "different values"),
    ("and.b32 %r5, %r2, 127;\nst.shared.b32 [%r5], %r0;\n", Race, "different values"),
    ("st.shared.b32 [%r2], %r0;\n" + REVERSED + "add.s32 %r5, %r0, 1;\nst.shared.b32 [%r4], %r5;\n", Race, "different values"),
    ("ld.shared.b32 %r3, [%r2];\n", MemoryFault, "never written"),
    ("st.shared.b32 [%r2+512], %r0;\n", MemoryFault, "outside or misaligned"),
    ("st.shared.b32 [%r2+2], %r0;\n", MemoryFault, "outside or misaligned"),
    (COPY + "ld.shared.b32 %r3, [%r2];\n", Race, "copy is in flight"),
    (COPY + "cp.async.wait_group 1;\nld.shared.b32 %r3, [%r2];\n", Race, "copy is in flight"),
    (COPY + WAIT + REVERSED + "ld.shared.b32 %r3, [%r4];\n", Race, "reads what another wrote"),
    (COPY + "st.shared.b32 [%r2], %r0;\n", Race, "copy is in flight"),
    ("st.shared.b32 [%r2], %r0;\nbar.sync 0;\n" + REVERSED + "ld.shared.b32 %r3, [%r4];\n" + COPY, Race, "another read"),
    ("setp.lt.s32 %p1, %r0, 3;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:\n", Divergence, "both ways"),
    ("setp.lt.s32 %p1, %r0, 3;\n@%p1 bar.sync 0;\n", Divergence, "do not reach"),
    ("ld.global.b32 %r3, [%rd20+256];\n", MemoryFault, "outside every tensor"),
    ("ld.global.b32 %r3, [%rd20+-4];\n", MemoryFault, "outside every tensor"),
    ("ld.global.b32 %r3, [%rd20+2];\n", MemoryFault, "array 0"),
    ("st.global.b32 [%rd0], %r0;\n", Race, "different values"),
    ("add.s32 %r3, %r9, 1;\n", MemoryFault, "before it is written"),
    ("sin.approx.f32 %r3, %r2;\n", Unsupported, "sin.approx.f32"),
    ("add.s32 %r3, %rd0, 1;\n", Unsupported, "%rd0"),
    ("add.s32 %r3, %r2;\n", Unsupported, "2 operands"),
    ("ld.global.nc.b32 %r3, [%rd20];\n", Unsupported, "ld.global.nc"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "kind", "message"), FAULTS)
def test_fault(body: str, kind: type[Fault], message: str) -> None:
    with pytest.raises(kind, match=message):
        execute(body)


@pytest.mark.parametrize("first", ["ld.global.b32 %r3, [%rd20];\n", "st.global.b32 [%rd20], %r1;\n"])
def test_two_ctas_must_not_meet_where_one_writes(first: str) -> None:
    with pytest.raises(Race, match="another CTA"):
        execute(first + "st.global.b32 [%rd20], %r1;\n", grid=(2, 1))


def test_gaps_of_a_strided_tensor_are_out_of_bounds() -> None:
    buffer = torch.zeros(4, 8)
    memory = GlobalMemory({"x": buffer[:, :6]})
    ctas = np.zeros(1, np.int32)
    assert memory.read(np.array([buffer.data_ptr() + 32], np.uint64), 4, 1, ctas).shape == (1, 1)
    with pytest.raises(MemoryFault, match=r"x \+ 24 bytes: outside"):
        memory.read(np.array([buffer.data_ptr() + 24], np.uint64), 4, 1, ctas)


def test_a_fault_names_the_kernel_the_line_and_the_instruction() -> None:
    with pytest.raises(MemoryFault, match=r"snippet, PTX line \d+, : ld.shared.b32"):
        execute("ld.shared.b32 %r3, [%r2];\n")


def test_texts_that_are_no_kernel_are_refused() -> None:
    with pytest.raises(Unsupported, match="entry"):
        parse(".version 8.8")
    with pytest.raises(Unsupported, match="local"):
        parse(".visible .entry f() .reqntid 32 {\n.local .b32 x;\n}")
