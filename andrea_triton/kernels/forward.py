"""Forward kernel: one block of queries against the keys that it may see."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from andrea_triton.kernels.bands import ALL, EDGES, FULL, block_at, bounds, key_span
from andrea_triton.kernels.numerics import hold, product
from andrea_triton.kernels.softmax import State, add_sum, finish, start, step
from andrea_triton.kernels.tile import drop, logits_tile
from andrea_triton.kernels.views import Head, load_tile, program, row_pointers, sequence, store_tile


class Totals(NamedTuple):
    """Per-query results, contiguous [B,HQ,M]: the public log-sum-exp, and the pivot and sum it is made of, which the backward
    takes apart: a pivot near the end of the float range would swallow the logarithm of the sum."""

    lse: Any
    row_max: Any
    row_sum: Any


@triton.jit
def attend(state, q_tile, q_at, k, v, b, h, seq, span, attention, BLOCK_N: tl.constexpr,
           PART: tl.constexpr, LEAN: tl.constexpr = False):  # fmt: skip
    """Online-softmax state after a part of the span. q_at: the queries' positions, of ALL the first one. LEAN: what only edges
    need is made there, not kept in registers."""
    CHECK: tl.constexpr = PART != FULL
    first, last = bounds(span, BLOCK_N, PART, attention.band.left is not None)
    for i in tl.range(first, last, BLOCK_N, disable_licm=LEAN):
        n, edge = block_at(span, i, BLOCK_N, PART, attention.band.left is not None)
        k_pos = n + tl.arange(0, BLOCK_N)
        q_pos = q_at + tl.arange(0, q_tile.shape[0]) if PART == ALL else q_at
        k_tile = load_tile(k, n, seq.N, BLOCK_N, q_tile.shape[1], attention.D, CHECK)
        s, _ = logits_tile(q_tile, k_tile, q_pos[:, None], k_pos[None, :], n, b, h, seq, attention, edge)
        v_tile = load_tile(v, n, seq.N, BLOCK_N, state.acc.shape[1], attention.DV, CHECK)
        p, row_max, alpha = step(state, s, attention.scale_log2, attention.exact)
        w = drop(p, q_pos[:, None], k_pos[None, :], b, h, attention).to(v_tile.dtype)
        if attention.rounded:
            p = p.to(v_tile.dtype).to(p.dtype)
        row_sum = add_sum(state.row_sum, alpha, p)
        acc = product(w, v_tile, state.acc * alpha[:, None], attention.precision)
        state = State(acc, row_max, row_sum)
    return state


@triton.jit
def forward(q, k, v, o, totals, sinks, attention, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            HELD: tl.constexpr = False, ONE_LOOP: tl.constexpr = False, LEAN: tl.constexpr = False):  # fmt: skip
    """Output and log-sum-exp of one block of queries.

    Maths:  o = softmax(score(scale q k^T)) v over the keys in the band, with dropout of the weights; lse in natural units.
    Shapes: q [B,HQ,M,D]  k [B,HKV,N,D]  v [B,HKV,N,DV]  o [B,HQ,M,DV]  totals [B,HQ,M] fp32 (fp64)  sinks [HQ] or None
    Grid:   (B HQ, cdiv(M, BLOCK_M)); the last queries first: under a causal band they see the most keys.
    Source: arXiv 2307.08691 (FlashAttention-2), arXiv 1805.02867 (online softmax)."""
    block, h, b = program(attention.sizes.heads)
    seq = sequence(attention.sizes, b)
    row = (tl.num_programs(1) - 1 - block) * BLOCK_M
    if attention.sizes.cu_q is not None:
        if row >= seq.M:
            return

    q_pos = seq.q_start + row + tl.arange(0, BLOCK_M)
    kv_head = h // attention.sizes.group
    kh, vh = Head(k, seq.batch, kv_head, seq.first_k), Head(v, seq.batch, kv_head, seq.first_k)
    span = key_span(attention.band, seq.q_start + row, seq.N, BLOCK_M, BLOCK_N)

    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.D))
    COLS_V: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    q_tile = hold(load_tile(Head(q, seq.batch, h, seq.first_q), row, seq.M, BLOCK_M, COLS, attention.D, True), HELD)
    state = start(BLOCK_M, COLS_V, attention.acc, 4 if ONE_LOOP else 8)

    if ONE_LOOP:
        state = attend(state, q_tile, seq.q_start + row, kh, vh, b, h, seq, span, attention, BLOCK_N, ALL, LEAN)
    else:
        state = attend(state, q_tile, q_pos, kh, vh, b, h, seq, span, attention, BLOCK_N, FULL)
        state = attend(state, q_tile, q_pos, kh, vh, b, h, seq, span, attention, BLOCK_N, EDGES)

    sink = None if sinks is None else tl.load(sinks + h).to(attention.acc)
    out, row_max, row_sum, lse = finish(state, sink, attention.exact)

    live = row + tl.arange(0, BLOCK_M) < seq.M
    tl.store(row_pointers(totals.lse, h, row, attention.sizes, seq, BLOCK_M), lse, mask=live)
    if totals.row_max is not None:
        tl.store(row_pointers(totals.row_max, h, row, attention.sizes, seq, BLOCK_M), row_max, mask=live)
        tl.store(row_pointers(totals.row_sum, h, row, attention.sizes, seq, BLOCK_M), row_sum, mask=live)
    store_tile(Head(o, seq.batch, h, seq.first_q), row, seq.M, out, attention.DV)
