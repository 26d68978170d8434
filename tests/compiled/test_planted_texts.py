"""Checks that are checked: bugs planted in the kernels' machine code must be caught, by a fault of the emulator or by the
accuracy rule. Run with -s to see the score. One kernel is tried by default, the others are -m slow."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from andrea_triton.launch.configs import Config
from andrea_triton.testing import Case
from tests.compiled.replay import Recording, attention, decoding, finding

CAUSAL = Case("causal", HQ=2, HKV=1, M=100, N=150, D=32, causal=True)
LONGER = Case("longer", HQ=2, HKV=1, M=140, N=230, D=32, causal=True)
ODD = Case("odd numbers of trips", HQ=2, HKV=1, M=140, N=190, D=32, causal=True)
TILES = {
    "sm_80": tuple((name, Config(32, 32, 2, 2)) for name in ("forward", "dkdv", "dq")),
    "sm_90": (("forward", Config(64, 32, 4, 2)), ("dkdv", Config(32, 64, 4, 2)), ("dq", Config(64, 32, 4, 2))),
}
KERNELS = [
    *[("sm_80", name) for name in ("forward", "delta", "dkdv", "dq", "decode", "combine")],
    *[("sm_90", name) for name in ("forward", "delta", "dkdv", "dq")],
]


def bits_changed(by: int) -> Callable[[re.Match[str]], str]:
    """A replacement that changes bits of the 64-bit number at the end of a match."""
    return lambda match: f"{match[1]}{int(match[2]) % 2**64 ^ by}"


Replacement = str | Callable[[re.Match[str]], str]
# What is done to one instruction, or to all that match: (pattern, replacement). A pattern with ^ and $ spans a line.
ONE_AT_A_TIME: dict[str, tuple[str, Replacement]] = {
    "barrier removed": (r"bar\.sync \t0;", ""),
    "wait removed": (r"cp\.async\.wait_group \t\d+;", ""),
    "products not committed": (r"wgmma\.commit_group\.sync\.aligned;", ""),
    "products not waited for": (r"wgmma\.wait_group\.sync\.aligned \d+;", ""),
    "registers not fenced": (r"wgmma\.fence\.sync\.aligned;", ""),
    "proxies not fenced": (r"fence\.proxy\.async\.shared::cta;", ""),
}
ALL_AT_ONCE: dict[str, tuple[str, Replacement]] = {
    "a wait for one group fewer": (r"cp\.async\.wait_group \t0;", "cp.async.wait_group \t1;"),
    "max replaced by min": (r"\bmax\.f32", "min.f32"),
    "masks dropped": (r"selp\.f32 (\t%r\d+, %r\d+), 0fFF800000, %p\d+;", r"selp.f32 \1, 0fFF800000, -1;"),
    "tail mask of loads dropped": (r"@%p\d+ (ld\.global)", r"\1"),
    "tail mask of copies dropped": (r"(cp\.async\.c[ag]\.shared\.global .*, 0x\w+), %r\d+;", r"\1;"),
    "tail mask of stores dropped": (r"@%p\d+ (st\.global)", r"\1"),
    "matrices not transposed": (r"x4\.trans", "x4"),
    "signed compare off by one": (r"setp\.lt\.s32", "setp.le.s32"),
    "shared offsets wrong": (r"(ldmatrix.*)\+(\d+)\]", r"\1+16]"),
    "a wait for one group of products fewer": (r"wgmma\.wait_group\.sync\.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
    "descriptors with another stride": (r"(or\.b64 \t%rd\d+, %rd\d+, )(-?\d{18,20})", bits_changed(0x60 << 32)),
    "descriptors with another swizzle": (r"(or\.b64 \t%rd\d+, %rd\d+, )(-?\d{18,20})", bits_changed(3 << 62)),
    "descriptors at another address": (r"(bfe\.u32 \t%r\d+, %r\d+), 4,", r"\1, 5,"),
    "products begun with the old sum": (r"(wgmma\.mma_async.*), 0, 1, 1", r"\1, -1, 1, 1"),
    "products not added up": (r"(wgmma\.mma_async.*), %p\d+, 1, 1", r"\1, 0, 1, 1"),
    "matrices of products not turned": (r"(wgmma\.mma_async.*), 1, 1, 1;", r"\1, 1, 1, 0;"),
    "matrices of products turned": (r"(wgmma\.mma_async.*), 0, 0;", r"\1, 0, 1;"),
}
DRAINED = (
    "after a loop: its last trip ends with a barrier behind the last read of shared memory, and from there to the next "
    "barrier each thread touches only what its own copies fill"
)
NO_TARGET = "the copies of the last trip bring nothing, and nothing after them touches the place they fill"
SAME_VALUE = (
    "the rows are padded, so that every store is in bounds; the mask only picks one of the threads that hold the same value"
)
ELSEWHERE = (
    "after a loop: the last product may be under way in another warp, but it reads a tile of its stage, and what is written next "
    "lies where q (dkdv: k) lay, which was last read before the last trip's barrier"
)
TAKEN_ALONG = "the next product is committed before any wait, and takes this one into its group"
FENCED = "all that the product reads was written before the fence ahead of an earlier product of the same trip"
FENCED_BEFORE = [
    f"sm_90 {kernel}: proxies not fenced, {i}"
    for kernel, places in (("forward", (1, 3)), ("dkdv", (1, 2, 3, 5, 6, 7)), ("dq", (1, 2, 4, 5)))
    for i in places
]
UNTOUCHED = "no other instruction touches the registers of this product between an earlier product's fence and this one"
UNTOUCHED_SINCE = [
    f"sm_90 {kernel}: registers not fenced, {i}" for kernel, places in (("dkdv", (2, 6)), ("dq", (1, 4))) for i in places
]
SURVIVORS: dict[str, str] = {
    **dict.fromkeys(FENCED_BEFORE, FENCED),
    **dict.fromkeys(UNTOUCHED_SINCE, UNTOUCHED),
    "sm_90 forward: barrier removed, 5": ELSEWHERE,
    "sm_90 forward: wait removed, 3": NO_TARGET,
    "sm_90 delta: tail mask of stores dropped": SAME_VALUE,
    "sm_90 dkdv: barrier removed, 6": ELSEWHERE,
    "sm_90 dkdv: products not committed, 1": TAKEN_ALONG,
    "sm_90 dkdv: products not committed, 5": TAKEN_ALONG,
    "sm_90 dq: barrier removed, 5": ELSEWHERE,
    "sm_90 dq: wait removed, 3": NO_TARGET,
    "sm_80 forward: barrier removed, 2": DRAINED,
    "sm_80 forward: barrier removed, 5": DRAINED,
    "sm_80 forward: wait removed, 3": NO_TARGET,
    "sm_80 delta: tail mask of stores dropped": SAME_VALUE,
    "sm_80 dkdv: barrier removed, 0": "before the loops: " + DRAINED,
    "sm_80 dkdv: barrier removed, 3": DRAINED,
    "sm_80 dkdv: barrier removed, 6": DRAINED,
    "sm_80 dq: barrier removed, 2": DRAINED,
    "sm_80 dq: barrier removed, 5": DRAINED,
    "sm_80 dq: wait removed, 3": NO_TARGET,
}
"""Why a planted change is no bug, by its name: the program computes the same in every order that its warps may take."""


def calls(target: str, kernel: str) -> list[Recording]:
    """The calls that have to show a bug of a kernel."""
    if kernel in ("decode", "combine"):
        return [decoding(target)]
    return [attention(case, target, TILES[target]) for case in (CAUSAL, LONGER, ODD)]


def mutants(text: str) -> dict[str, str]:
    """Every bug that a text has room for, by name."""
    found = {}
    for name, (pattern, replacement) in ALL_AT_ONCE.items():
        found[name] = replaced(text, pattern, replacement, -1)
    for name, (pattern, replacement) in ONE_AT_A_TIME.items():
        for i in range(len(re.findall(pattern, text))):
            found[f"{name}, {i}"] = replaced(text, pattern, replacement, i)
    return {name: mutant for name, mutant in found.items() if mutant != text}


def replaced(text: str, pattern: str, replacement: Replacement, which: int) -> str:
    """The text with one match, or all, replaced."""
    for i, match in reversed(list(enumerate(re.finditer(pattern, text)))):
        if which in (-1, i):
            new = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            text = text[: match.start()] + new + text[match.end() :]
    return text


@pytest.mark.parametrize(
    ("target", "kernel"), [pytest.param(*x, marks=[pytest.mark.slow] * (x != ("sm_80", "dq"))) for x in KERNELS]
)
def test_bugs_in_the_machine_code(target: str, kernel: str, score: dict[str, str]) -> None:
    first, *others = calls(target, kernel)
    found = {}
    for name, mutant in mutants(first.texts[kernel]).items():

        def rewrite(run: str, text: str, mutant: str = mutant) -> str:
            return mutant if run == kernel else text

        shown = (finding(call, kernel, rewrite) for call in (first, *others))
        found[f"{target} {kernel}: {name}"] = next(filter(None, shown), "")
    score.update(found)
    prefix = f"{target} {kernel}: "
    assert {name for name, text in found.items() if not text} == {name for name in SURVIVORS if name.startswith(prefix)}
