"""Checks that are checked: bugs planted in the kernels' source and in their machine code must be caught, by a fault of
the emulator or by the accuracy rule. Run with -s to see the score."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime.jit import JITFunction

from andrea_triton.kernels import backward, bands, decode, dropout, forward, numerics, scores, softmax, tile, views
from andrea_triton.launch.configs import Config
from andrea_triton.testing import Case, check, make_inputs
from tests.compiled.emulated import Rewrite, emulated
from tests.compiled.faults import Fault, Unsupported
from tests.compiled.test_kernels import attend, check_decode

TILES = dict.fromkeys(("forward", "dkdv", "dq"), Config(32, 32, 2, 2))
CAUSAL = Case("causal", HQ=2, HKV=1, M=100, N=150, D=32, causal=True)
LONGER = Case("longer", HQ=2, HKV=1, M=140, N=230, D=32, causal=True)
WINDOW = Case("window", HQ=1, M=130, D=32, causal=True, window=90)
EMPTY = Case("empty rows", HQ=1, M=63, N=33, D=16, causal=True)
FULL = Case("full", HQ=1, M=40, N=33, D=16)
GUARDED = Case("inside NaN", HQ=1, M=63, N=100, D=24, causal=True, layout="guarded")
TERMS = Case("terms", HQ=2, M=40, D=16, softcap=1.5, dropout_p=0.3, sinks=True)
DECODE = Case("decode")  # stands for check_decode, in pages
MODULES = (backward, bands, decode, dropout, forward, numerics, scores, softmax, tile, views)


class Planted(NamedTuple):
    """A text of a jit function replaced by another, and the case that shows it."""

    function: Any
    old: str
    new: str
    case: Case = CAUSAL


SOURCE: dict[str, Planted] = {
    "mask dropped": Planted(tile.logits_tile, "if CHECK:", "if False:"),
    "tail mask of loads dropped": Planted(views.load_tile, "if live is None:", "if True:"),
    "tail mask of loads off by one": Planted(views.tile_live, "end - row", "end - row + 1"),
    "mask of head dims dropped": Planted(views.tile_live, "elif COLS != D:", "elif False:", GUARDED),
    "store mask dropped": Planted(views.store_tile, ", mask=tile_live(row, end, ROWS, COLS, D, True)", ""),
    "causal band off by one": Planted(bands.visible, "q_pos + band.right", "q_pos + band.right + 1"),
    "window off by one": Planted(bands.visible, "q_pos - band.left", "q_pos - band.left - 1", WINDOW),
    "last key one too far": Planted(bands.visible, "N - 1 + 0 * q_pos", "N + 0 * q_pos", FULL),
    "last key block left out": Planted(bands.key_span, "q_first + BLOCK_M + band.right", "q_first + band.right"),
    "full blocks one too many": Planted(bands.key_span, "q_first + band.right + 1, N", "q_first + band.right + BLOCK_N, N"),
    "first query block left out": Planted(bands.query_span, "seq.M, round_down(lo, BLOCK_M), full_lo", "seq.M, full_lo, full_lo"),
    "jump over full blocks forgotten": Planted(bands.block_at, "span.full_hi - span.full_lo", "0", WINDOW),
    "max replaced by min": Planted(softmax.step, "tl.maximum", "tl.minimum"),
    "row sum not rescaled": Planted(softmax.add_sum, "* alpha[:, None]", ""),
    "output not rescaled": Planted(forward.attend, "state.acc * alpha[:, None]", "state.acc"),
    "lse without its pivot": Planted(softmax.finish, "row_max * unit +", ""),
    "empty row not zero": Planted(softmax.finish, "float(\"-inf\"))", "0.0)", EMPTY),
    "sink forgotten": Planted(softmax.finish, "row_sum * alpha + tl.exp2", "row_sum * alpha + 0 * tl.exp2", TERMS),
    "wrong head in GQA, forward": Planted(forward.forward, "h // attention.sizes.group", "h % attention.sizes.group"),
    "wrong head in GQA, dq": Planted(backward.dq, "h // sizes.group", "h % sizes.group"),
    "wrong head in GQA, dkdv": Planted(backward.dkdv, "kv_head * GROUP + g", "kv_head * GROUP"),
    "wrong stride": Planted(views.tile_pointers, "t[:, None] * v.stride_t", "t[:, None] * (v.stride_t - 1)"),
    "wrong batch and head": Planted(views.program, "head % heads, head // heads", "head // heads, head % heads"),
    "delta forgotten": Planted(backward.gather, "dpt - load_rows(rows.delta, base, m, BLOCK_M)[None, :]", "dpt"),
    "scale forgotten, dk": Planted(backward.dkdv, "dk * attention.scale", "dk"),
    "scale forgotten, dq": Planted(backward.dq, "acc * attention.scale", "acc"),
    "dlse forgotten": Planted(backward.delta, "if dlse is not None:", "if False:"),
    "derivative of the softcap": Planted(scores.product_grad, "1 - t * t", "1 - t", TERMS),
    "dropout by another position": Planted(dropout.kept, "(q_pos + zero)", "(k_pos + zero)", TERMS),
    "dropout of gradients forgotten": Planted(backward.gather, "dpt = drop(dpt, q_pos, k_pos, b, h, attention)", "pass", TERMS),
    "one round fewer of the generator": Planted(dropout.philox, "static_range(10)", "static_range(9)", TERMS),
    "a part of the keys left out": Planted(decode.key_range, "(split + 1) * part", "split * part + part // 2", DECODE),
    "start of a window forgotten": Planted(decode.key_range, "band.left, 0)", "band.left + BLOCK_N, 0)", DECODE),
    "another query's head": Planted(decode.decode, "r // seq.M", "r % seq.M", DECODE),
    "parts not weighed": Planted(decode.combine, "acc += weight[:, None] * ", "acc += ", DECODE),
    "sink of the parts forgotten": Planted(decode.combine, "total += tl.exp2", "total += 0 * tl.exp2", DECODE),
    "page of another row": Planted(views.tile_pointers, "row // x.page_size", "row // x.page_size * 0", DECODE),
    "row within a page": Planted(views.tile_pointers, "row % x.page_size", "row % x.page_size * 0", DECODE),
    "table of another sequence": Planted(decode.decode, "pages + b * ", "pages + 0 * b * ", DECODE),
}  # fmt: skip

KERNELS = ("forward", "delta", "dkdv", "dq", "decode", "combine")
# What is done to one instruction, or to all that match: (pattern, replacement). A pattern with ^ and $ spans a line.
ONE_AT_A_TIME = {
    "barrier removed": (r"bar\.sync \t0;", ""),
    "wait removed": (r"cp\.async\.wait_group \t\d+;", ""),
}
ALL_AT_ONCE = {
    "a wait for one group fewer": (r"cp\.async\.wait_group \t0;", "cp.async.wait_group \t1;"),
    "max replaced by min": (r"\bmax\.f32", "min.f32"),
    "masks dropped": (r"selp\.f32 (\t%r\d+, %r\d+), 0fFF800000, %p\d+;", r"selp.f32 \1, 0fFF800000, -1;"),
    "tail mask of loads dropped": (r"@%p\d+ (ld\.global)", r"\1"),
    "tail mask of copies dropped": (r"(cp\.async\.c[ag]\.shared\.global .*, 0x\w+), %r\d+;", r"\1;"),
    "tail mask of stores dropped": (r"@%p\d+ (st\.global)", r"\1"),
    "matrices not transposed": (r"x4\.trans", "x4"),
    "signed compare off by one": (r"setp\.lt\.s32", "setp.le.s32"),
    "shared offsets wrong": (r"(ldmatrix.*)\+(\d+)\]", r"\1+16]"),
}
DRAINED = (
    "after a loop: its last trip ends with a barrier behind the last read of shared memory, and from there to the next "
    "barrier each thread touches only what its own copies fill"
)
NO_TARGET = "the copies of the last trip bring nothing, and nothing after them touches the place they fill"
WANTED = 0.95  # the part of the planted bugs that must be caught
SURVIVORS: dict[str, str] = {
    "forward: barrier removed, 2": DRAINED,
    "forward: barrier removed, 5": DRAINED,
    "forward: wait removed, 3": NO_TARGET,
    "delta: tail mask of stores dropped": "the rows are padded, so that every store is in bounds; the mask only picks "
    "one of the threads that hold the same value",
    "dkdv: barrier removed, 0": "before the loops: " + DRAINED,
    "dkdv: barrier removed, 3": DRAINED,
    "dkdv: barrier removed, 6": DRAINED,
    "dq: barrier removed, 2": DRAINED,
    "dq: barrier removed, 5": DRAINED,
    "dq: wait removed, 3": NO_TARGET,
}
"""Why a planted change is no bug, by its name: the program computes the same in every order that its warps may take."""


def read_once(kernel: str) -> str:
    """PTX of a kernel as the cases of this file run it."""
    return _texts()[kernel]


@functools.cache
def _texts() -> dict[str, str]:
    texts: dict[str, str] = {}

    def keep(name: str, text: str) -> str:
        return texts.setdefault(name, text)

    with emulated(tiles=TILES, rewrite=keep):
        check(make_inputs(CAUSAL, torch.float16), attend, "before anything is planted")
    check_decode(torch.float16, True, keep)
    return texts


def mutants() -> list[tuple[str, str, str, str, int]]:
    """(name, kernel, pattern, replacement, which match; -1 for all) of every bug in machine code that a kernel has room for."""
    found = []
    for kernel in KERNELS:
        for name, (pattern, replacement) in ALL_AT_ONCE.items():
            found.append((f"{kernel}: {name}", kernel, pattern, replacement, -1))
        for name, (pattern, replacement) in ONE_AT_A_TIME.items():
            found += [(f"{kernel}: {name}, {i}", kernel, pattern, replacement, i) for i in range(14)]
    return found


def replaced(text: str, pattern: str, replacement: str, which: int) -> str:
    """The text with one match, or all, replaced; unchanged where there is no such match."""
    matches = list(re.finditer(pattern, text))
    for i, match in reversed(list(enumerate(matches))):
        if which in (-1, i):
            text = text[: match.start()] + match.expand(replacement) + text[match.end() :]
    return text


@contextmanager
def planted(bug: Planted) -> Iterator[None]:
    """The jit function with the bug, and every jit function that may have been compiled with it forgotten."""
    functions = [x for module in MODULES for x in vars(module).values() if isinstance(x, JITFunction)]
    source = bug.function.src
    assert bug.old in source, f"{bug.old!r} is not in {bug.function.__name__}"
    try:
        bug.function._unsafe_update_src(source.replace(bug.old, bug.new))
        for function in functions:
            function.hash = None
        yield
    finally:
        bug.function._unsafe_update_src(source)
        for function in functions:
            function.hash = None


def finding(case: Case, rewrite: Rewrite | None = None) -> str:
    """What gives a bug away; nothing for one that gets through."""
    try:
        if case is DECODE:
            check_decode(torch.float16, True, rewrite)
            return ""
        with emulated(tiles=TILES, rewrite=rewrite):
            check(make_inputs(case, torch.float16), attend, case.name)
    except Unsupported:
        raise
    except (Fault, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def score() -> Iterator[dict[str, str]]:
    """What gave each bug away; the score is printed at the end."""
    found: dict[str, str] = {}
    yield found
    bugs = {name: text for name, text in found.items() if name not in SURVIVORS}
    caught = sum(bool(text) for text in bugs.values())
    sys.stdout.write(
        f"\n{caught} of {len(bugs)} planted bugs caught, beside {len(found) - len(bugs)} changes that are harmless\n"
    )
    assert caught >= WANTED * len(bugs), f"only {caught} of {len(bugs)} planted bugs are caught"


@pytest.mark.parametrize("name", SOURCE)
def test_bug_in_the_source(name: str, score: dict[str, str]) -> None:
    with planted(SOURCE[name]):
        score[name] = finding(SOURCE[name].case)
    assert bool(score[name]) != (name in SURVIVORS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bugs_in_the_machine_code(kernel: str, score: dict[str, str]) -> None:
    original, found = read_once(kernel), {}
    for name, owner, pattern, replacement, which in mutants():
        text = replaced(original, pattern, replacement, which)
        if owner == kernel and text != original:
            rewrite: Rewrite = lambda run, ptx, text=text: text if run == kernel else ptx  # noqa: E731
            cases = [DECODE] if kernel in ("decode", "combine") else [CAUSAL, LONGER]
            found[name] = next(filter(None, (finding(case, rewrite) for case in cases)), "")
    score.update(found)
    assert {name for name, text in found.items() if not text} == {name for name in SURVIVORS if name.startswith(f"{kernel}: ")}
