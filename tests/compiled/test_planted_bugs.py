"""Checks that are checked: bugs planted in the kernels' source must be caught, by a fault of the emulator or by the accuracy
rule. Run with -s to see the score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from triton.runtime.jit import JITFunction

from andrea_triton.kernels import backward, bands, decode, dropout, forward, numerics, scores, softmax, tile, views
from andrea_triton.launch.configs import Config
from andrea_triton.testing import Case
from tests.compiled.replay import attention, decoding, finding

TILES = tuple((name, Config(32, 32, 2, 2, True)) for name in ("forward", "dkdv", "dq"))
ONE_LOOP = tuple((name, Config(32, 32, 2, 2, False, True)) for name in ("forward", "dkdv", "dq"))
CAUSAL = Case("causal", HQ=2, HKV=1, M=100, N=150, D=32, causal=True)
WINDOW = Case("window", HQ=1, M=130, D=32, causal=True, window=90)
GUARDED = Case("empty rows, inside NaN", HQ=1, M=130, N=100, D=24, causal=True, layout="guarded")
TERMS = Case("terms", HQ=2, M=40, D=16, softcap=1.5, dropout_p=0.3, sinks=True)
DECODE = Case("decode")  # stands for a decoding step
SURVIVORS: dict[str, str] = {}
"""Why a planted change is no bug, by its name."""
MODULES = (backward, bands, decode, dropout, forward, numerics, scores, softmax, tile, views)


class Planted(NamedTuple):
    """A text of a jit function replaced by another, and the case that shows it."""

    function: Any
    old: str
    new: str
    case: Case = CAUSAL
    tiles: tuple[tuple[str, Config], ...] = TILES


SOURCE: dict[str, Planted] = {
    "mask dropped": Planted(tile.logits_tile, "if edge:", "if False:"),
    "tail mask of loads dropped": Planted(views.load_tile, "if live is None:", "if True:"),
    "tail mask of loads off by one": Planted(views.tile_live, "end - row", "end - row + 1"),
    "mask of head dims dropped": Planted(views.tile_live, "elif COLS != D:", "elif False:", GUARDED),
    "store mask dropped": Planted(views.store_tile, ", mask=tile_live(row, end, ROWS, COLS, D, True)", ""),
    "causal band off by one": Planted(bands.visible, "q_pos + band.right", "q_pos + band.right + 1"),
    "window off by one": Planted(bands.visible, "q_pos - band.left", "q_pos - band.left - 1", WINDOW),
    "last key one too far": Planted(bands.visible, "N - 1 + 0 * q_pos", "N + 0 * q_pos", TERMS),
    "last key block left out": Planted(bands.key_span, "q_first + BLOCK_M + band.right", "q_first + band.right"),
    "full blocks one too many": Planted(bands.key_span, "q_first + band.right + 1, N", "q_first + band.right + BLOCK_N, N"),
    "first query block left out": Planted(bands.query_span, "Span(round_down(lo, BLOCK_M)", "Span(round_up(all_lo, BLOCK_M)"),
    "ragged query block left out": Planted(bands.query_span, "seq.M\n", "round_down(seq.M, BLOCK_M)\n"),
    "held tiles changed": Planted(numerics.hold, "(x + tl.dot(", "(tl.dot("),
    "jump over full blocks forgotten": Planted(bands.block_at, "end - first", "0", WINDOW),
    "last edge not checked": Planted(bands.block_at, "i + BLOCK > span.all_hi", "i > span.all_hi", CAUSAL, ONE_LOOP),
    "first edge not checked": Planted(bands.block_at, "(i < span.all_lo) | ", "", WINDOW, ONE_LOOP),
    "edge of queries not checked": Planted(bands.query_span, "lo + BLOCK_N - 1, seq.M", "lo, seq.M", CAUSAL, ONE_LOOP),
    "one loop that ends with the full blocks": Planted(bands.bounds, "span.lo, span.hi\n", "first, end\n", CAUSAL, ONE_LOOP),
    "sum of half the lanes": Planted(softmax.add_sum, "tl.sum(tl.reshape(sums", "tl.max(tl.reshape(sums", CAUSAL, ONE_LOOP),
    "max replaced by min": Planted(softmax.step, "tl.maximum", "tl.minimum"),
    "row sum not rescaled": Planted(softmax.add_sum, "* alpha[:, None]", ""),
    "output not rescaled": Planted(forward.attend, "state.acc * alpha[:, None]", "state.acc"),
    "lse without its pivot": Planted(softmax.finish, "row_max * unit +", ""),
    "empty row not zero": Planted(softmax.finish, "float(\"-inf\"))", "0.0)", GUARDED),
    "sink forgotten": Planted(softmax.finish, "row_sum * alpha + sink_weight", "row_sum * alpha + 0 * sink_weight", TERMS),
    "wrong head in GQA, forward": Planted(forward.forward, "h // attention.sizes.group", "h % attention.sizes.group"),
    "wrong head in GQA, dq": Planted(backward.dq, "h // sizes.group", "h % sizes.group"),
    "wrong head in GQA, dkdv": Planted(backward.dkdv, "kv_head * GROUP + g", "kv_head * GROUP"),
    "wrong stride": Planted(views.tile_pointers, "t[:, None] * v.stride_t", "t[:, None] * (v.stride_t - 1)"),
    "wrong batch and head": Planted(views.program, "head % heads, head // heads", "head // heads, head % heads"),
    "delta forgotten": Planted(backward.over_queries, "dpt - load_rows(rows.delta, base, m, BLOCK_M)[None, :]", "dpt"),
    "scale forgotten, dk": Planted(backward.dkdv, "dk * attention.scale", "dk"),
    "scale forgotten, dq": Planted(backward.dq, "acc * attention.scale", "acc"),
    "dlse forgotten": Planted(backward.delta, "if dlse is not None:", "if False:"),
    "derivative of the softcap": Planted(scores.cap_slope, "1 - t * t", "1 - t", TERMS),
    "dropout by another position": Planted(dropout.kept, "(q_pos + zero)", "(k_pos + zero)", TERMS),
    "dropout of gradients forgotten": Planted(
        backward.over_queries, "dpt = drop(dpt, q_pos, k_pos, b, h, attention)", "pass", TERMS
    ),
    "one round fewer of the generator": Planted(dropout.philox, "static_range(10)", "static_range(9)", TERMS),
    "a part of the keys left out": Planted(decode.decode, "(split + 1) * split_size", "split * split_size + 16", DECODE),
    "start of a window forgotten": Planted(decode.key_range, "- band.left", "- band.left + 16", DECODE),
    "another query's head": Planted(decode.decode, "+ r % sizes.group", "+ r // seq.M", DECODE),
    "parts not weighed": Planted(decode.combine, "acc += weight[:, None] * ", "acc += ", DECODE),
    "sink of the parts forgotten": Planted(decode.combine, "total += sink_weight", "total += 0 * sink_weight", DECODE),
    "page of another row": Planted(views.tile_pointers, "row // x.page_size", "row // x.page_size * 0", DECODE),
    "row within a page": Planted(views.tile_pointers, "row % x.page_size", "row % x.page_size * 0", DECODE),
    "table of another sequence": Planted(decode.decode, "pages + b * ", "pages + 0 * b * ", DECODE),
}  # fmt: skip


FIRST = (
    "mask dropped", "tail mask of loads dropped", "causal band off by one", "lse without its pivot", "output not rescaled",
    "held tiles changed", "last edge not checked", "wrong head in GQA, forward", "dlse forgotten", "a part of the keys left out",
    "page of another row", "another query's head", "parts not weighed",
)  # fmt: skip
"""Bugs that every run plants, some in each module; the others with -m slow."""
PLANTED = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in SOURCE]


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


@pytest.mark.parametrize("name", PLANTED)
def test_bug_in_the_source(name: str, score: dict[str, str]) -> None:
    case = SOURCE[name].case
    call = decoding("sm_80") if case is DECODE else attention(case, "sm_80", SOURCE[name].tiles)
    with planted(SOURCE[name]):
        score[name] = finding(call, call.launches[0].launch.name)
    assert score[name]
