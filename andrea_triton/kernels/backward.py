"""Backward kernels: numbers per query (delta), then dk and dv per key block, then dq per query block. No atomics."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from andrea_triton.kernels.bands import ALL, EDGES, FULL, block_at, bounds, key_span, query_span
from andrea_triton.kernels.numerics import hold, product
from andrea_triton.kernels.scores import score_grad
from andrea_triton.kernels.tile import drop, logits_tile, probs_tile, steep
from andrea_triton.kernels.views import PAD, Head, load_tile, program, row_pointers, sequence, store_tile


class Rows(NamedTuple):
    """Per-query numbers: p = exp2(exponent(s, pivot)) norm; norm is None when folded into the pivot. Contiguous
    [B,HQ,blocks * PAD]; padding rows hold pivot inf, norm 0, delta 0, so that they are read without masks and give p = 0."""

    pivot: Any
    norm: Any
    delta: Any
    blocks: Any  # of PAD rows, for each head
    batch: Any  # entries; packed sequences are one


@triton.jit
def rows_at(rows, head, sizes, seq):
    """Offset in Rows of the first query of a head."""
    return (tl.cast(seq.batch, tl.int64) * sizes.heads + head) * (rows.blocks * PAD) + seq.first_pad


@triton.jit
def load_rows(ptr, base, row, ROWS: tl.constexpr):
    """ROWS numbers from row `row` on."""
    return tl.load(ptr + base + row + tl.arange(0, ROWS))


@triton.jit
def delta(o, do, totals, dlse, rows, attention, BLOCK_M: tl.constexpr):
    """Pivot, norm and delta of one block of queries.

    Not sum(dO * O, 1) but the diagonal of dO O^T, by the matrix product that makes dP: a query that sees one key has O = v, and
    as both sums are then rounded alike, dP - delta is exactly 0.

    Maths:  delta = rowsum(dO O) - dlse; p = exp2(s - pivot) norm. A row with row_sum = 0 gets p = 0.
    Shapes: o do [B,HQ,M,DV]  totals dlse [B,HQ,M], dlse may be None  rows [B,HQ,blocks * PAD]
    Grid:   (B HQ, M rounded up to PAD / BLOCK_M)
    Source: arXiv 2307.08691 (FlashAttention-2), section 3.1.2."""
    block, h, b = program(attention.sizes.heads)
    seq = sequence(attention.sizes, b)
    row = block * BLOCK_M
    if attention.sizes.cu_q is not None:
        if row >= tl.cdiv(seq.M, PAD) * PAD:
            return

    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    live = row + tl.arange(0, BLOCK_M) < seq.M
    o_tile = load_tile(Head(o, seq.batch, h, seq.first_q), row, seq.M, BLOCK_M, COLS, attention.DV, True)
    do_tile = load_tile(Head(do, seq.batch, h, seq.first_q), row, seq.M, BLOCK_M, COLS, attention.DV, True)
    row_max = tl.load(row_pointers(totals.row_max, h, row, attention.sizes, seq, BLOCK_M), mask=live, other=0.0)
    row_sum = tl.load(row_pointers(totals.row_sum, h, row, attention.sizes, seq, BLOCK_M), mask=live, other=0.0)

    pairs = product(do_tile, tl.trans(o_tile), tl.zeros([BLOCK_M, BLOCK_M], attention.acc), attention.precision)
    own = tl.arange(0, BLOCK_M)[:, None] == tl.arange(0, BLOCK_M)[None, :]
    total = tl.sum(tl.where(own, pairs, 0.0), 1)
    if dlse is not None:
        total -= tl.load(row_pointers(dlse, h, row, attention.sizes, seq, BLOCK_M), mask=live, other=0.0)
    some = row_sum != 0
    row_sum = tl.where(some, row_sum, 1.0)

    at = rows_at(rows, h, attention.sizes, seq) + row + tl.arange(0, BLOCK_M)
    tl.store(rows.delta + at, tl.where(some, total, 0.0))
    if rows.norm is None:
        tl.store(rows.pivot + at, tl.where(some, row_max + tl.log2(row_sum), float("inf")))
    else:
        tl.store(rows.pivot + at, tl.where(some, row_max, float("inf")))
        tl.store(rows.norm + at, tl.where(some, 1.0 / row_sum, 0.0))


class Queries(NamedTuple):
    """What a block of keys reads of the queries of one head."""

    q: Any  # Head
    do: Any  # Head
    rows: Any  # Rows
    base: Any  # offset of the head in Rows


@triton.jit
def over_queries(dk, dv, k_tile, v_tile, n, queries, b, h, seq, span, attention,
                 BLOCK_M: tl.constexpr, PART: tl.constexpr, LEAN: tl.constexpr = False):  # fmt: skip
    """(dk, dv) after a part of the span. Tiles are transposed: P^T, dS^T stay in
    registers."""
    rows, base = queries.rows, queries.base
    BLOCK_N: tl.constexpr = k_tile.shape[0]
    CHECK: tl.constexpr = PART != FULL
    first, last = bounds(span, BLOCK_M, PART, True)
    for i in tl.range(first, last, BLOCK_M, disable_licm=LEAN):
        m, edge = block_at(span, i, BLOCK_M, PART, True)
        q_pos, k_pos = (seq.q_start + m + tl.arange(0, BLOCK_M))[None, :], (n + tl.arange(0, BLOCK_N))[:, None]
        q_tile = load_tile(queries.q, m, seq.M, BLOCK_M, k_tile.shape[1], attention.D, CHECK)
        pivot = load_rows(rows.pivot, base, m, BLOCK_M)[None, :]
        norm = None if rows.norm is None else load_rows(rows.norm, base, m, BLOCK_M)[None, :]
        st, capped = logits_tile(k_tile, q_tile, q_pos, k_pos, seq.q_start + m, b, h, seq, attention, edge)
        pt = probs_tile(st, pivot, norm, attention)
        weight = steep(pt, capped, attention)
        do_tile = load_tile(queries.do, m, seq.M, BLOCK_M, v_tile.shape[1], attention.DV, CHECK)
        dv = product(drop(pt, q_pos, k_pos, b, h, attention).to(do_tile.dtype), do_tile, dv, attention.precision)
        dpt = product(v_tile, tl.trans(do_tile), tl.zeros([BLOCK_N, BLOCK_M], attention.acc), attention.precision, True)
        dpt = drop(dpt, q_pos, k_pos, b, h, attention)
        dst = weight * (dpt - load_rows(rows.delta, base, m, BLOCK_M)[None, :])
        dst = score_grad(dst, capped, b, h, q_pos, k_pos, seq, attention.terms)
        dk = product(dst.to(q_tile.dtype), q_tile, dk, attention.precision)
    return dk, dv


@triton.jit
def dkdv(q, k, v, do, rows, dk_out, dv_out, attention, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
         BLOCK_N: tl.constexpr, HELD: tl.constexpr = False, ONE_LOOP: tl.constexpr = False,
         LEAN: tl.constexpr = False):  # fmt: skip
    """dk and dv of one block of keys.

    Maths:  dv = P^T dO; dS = P (dP - delta), dP = dO v^T; dk = scale dS^T q, summed over the GROUP query heads of a key head.
    Shapes: q [B,HQ,M,D]  do [B,HQ,M,DV]  k dk_out [B,HKV,N,D]  v dv_out [B,HKV,N,DV]  rows [B,HQ,blocks * PAD]
    Grid:   (B HKV, cdiv(N, BLOCK_N)); the first keys first: under a causal band the most queries see them.
    Source: arXiv 2307.08691 (FlashAttention-2), algorithm 2."""
    sizes, band = attention.sizes, attention.band
    block, kv_head, b = program(sizes.heads // GROUP)
    seq = sequence(sizes, b)
    n = block * BLOCK_N
    if sizes.cu_q is not None:
        if n >= seq.N:
            return

    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.D))
    COLS_V: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    span = query_span(band, n, seq, BLOCK_M, BLOCK_N)
    kh, vh = Head(k, seq.batch, kv_head, seq.first_k), Head(v, seq.batch, kv_head, seq.first_k)
    k_tile = hold(load_tile(kh, n, seq.N, BLOCK_N, COLS, attention.D, True), HELD)
    v_tile = hold(load_tile(vh, n, seq.N, BLOCK_N, COLS_V, attention.DV, True), HELD)
    dk, dv = tl.zeros([BLOCK_N, COLS], attention.acc), tl.zeros([BLOCK_N, COLS_V], attention.acc)

    for g in range(GROUP):
        h = kv_head * GROUP + g
        queries = Queries(Head(q, seq.batch, h, seq.first_q), Head(do, seq.batch, h, seq.first_q), rows,
                          rows_at(rows, h, sizes, seq))  # fmt: skip
        if ONE_LOOP:
            dk, dv = over_queries(dk, dv, k_tile, v_tile, n, queries, b, h, seq, span, attention, BLOCK_M, ALL, LEAN)
        else:
            dk, dv = over_queries(dk, dv, k_tile, v_tile, n, queries, b, h, seq, span, attention, BLOCK_M, EDGES)
            dk, dv = over_queries(dk, dv, k_tile, v_tile, n, queries, b, h, seq, span, attention, BLOCK_M, FULL)

    end = seq.N
    if sizes.key_lengths is not None:
        unseen = n + tl.arange(0, BLOCK_N)[:, None] >= seq.N
        dk, dv, end = tl.where(unseen, 0.0, dk), tl.where(unseen, 0.0, dv), sizes.N
    store_tile(Head(dk_out, seq.batch, kv_head, seq.first_k), n, end, dk * attention.scale, attention.D)
    store_tile(Head(dv_out, seq.batch, kv_head, seq.first_k), n, end, dv, attention.DV)


@triton.jit
def dlogits_tile(q_tile, k_tile, v_tile, do_tile, q_pos, k_pos, n, pivot, norm, total, b, h, seq, attention,
                 edge, CAP: tl.constexpr):  # fmt: skip
    """(d loss / d logits [BLOCK_M, BLOCK_N], capped) of one tile, queries along the rows. CAP: of what enters the softcap."""
    s, capped = logits_tile(q_tile, k_tile, q_pos, k_pos, n, b, h, seq, attention, edge)
    p = probs_tile(s, pivot, norm, attention)
    weight = steep(p, capped, attention) if CAP else p
    dp = product(do_tile, tl.trans(v_tile), tl.zeros(s.shape, attention.acc), attention.precision)
    return weight * (drop(dp, q_pos, k_pos, b, h, attention) - total), capped


@triton.jit
def over_keys(dq, q_tile, do_tile, q_pos, k, v, pivot, norm, total, b, h, seq, span, attention,
              BLOCK_N: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """dq after a part of the span."""
    CHECK: tl.constexpr = PART != FULL
    first, last = bounds(span, BLOCK_N, PART, attention.band.left is not None)
    for i in tl.range(first, last, BLOCK_N):
        n, edge = block_at(span, i, BLOCK_N, PART, attention.band.left is not None)
        k_pos = (n + tl.arange(0, BLOCK_N))[None, :]
        k_tile = load_tile(k, n, seq.N, BLOCK_N, q_tile.shape[1], attention.D, CHECK)
        v_tile = load_tile(v, n, seq.N, BLOCK_N, do_tile.shape[1], attention.DV, CHECK)
        ds, capped = dlogits_tile(
            q_tile, k_tile, v_tile, do_tile, q_pos, k_pos, n, pivot, norm, total, b, h, seq, attention, edge, True
        )
        ds = score_grad(ds, capped, b, h, q_pos, k_pos, seq, attention.terms)
        dq = product(ds.to(k_tile.dtype), k_tile, dq, attention.precision)
    return dq


@triton.jit
def dq(q, k, v, do, rows, dq_out, attention, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
       HELD: tl.constexpr = False, ONE_LOOP: tl.constexpr = False):  # fmt: skip
    """dq of one block of queries.

    Maths:  dq = scale dS k, dS = P (dP - delta), dP = dO v^T.
    Shapes: q dq_out [B,HQ,M,D]  do [B,HQ,M,DV]  k [B,HKV,N,D]  v [B,HKV,N,DV]  rows [B,HQ,blocks * PAD]
    Grid:   (B HQ, cdiv(M, BLOCK_M)), the last queries first.
    Source: arXiv 2307.08691 (FlashAttention-2), algorithm 2."""
    sizes = attention.sizes
    block, h, b = program(sizes.heads)
    seq = sequence(sizes, b)
    row = (tl.num_programs(1) - 1 - block) * BLOCK_M
    if sizes.cu_q is not None:
        if row >= seq.M:
            return

    q_pos = (seq.q_start + row + tl.arange(0, BLOCK_M))[:, None]
    kv_head = h // sizes.group
    kh, vh = Head(k, seq.batch, kv_head, seq.first_k), Head(v, seq.batch, kv_head, seq.first_k)
    span = key_span(attention.band, seq.q_start + row, seq.N, BLOCK_M, BLOCK_N)

    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.D))
    COLS_V: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    q_tile = load_tile(Head(q, seq.batch, h, seq.first_q), row, seq.M, BLOCK_M, COLS, attention.D, True)
    do_tile = load_tile(Head(do, seq.batch, h, seq.first_q), row, seq.M, BLOCK_M, COLS_V, attention.DV, True)
    q_tile, do_tile = hold(q_tile, HELD), hold(do_tile, HELD)
    base = rows_at(rows, h, sizes, seq)
    pivot = load_rows(rows.pivot, base, row, BLOCK_M)[:, None]
    norm = None if rows.norm is None else load_rows(rows.norm, base, row, BLOCK_M)[:, None]
    total = load_rows(rows.delta, base, row, BLOCK_M)[:, None]

    acc = tl.zeros([BLOCK_M, COLS], attention.acc)
    if ONE_LOOP:
        acc = over_keys(acc, q_tile, do_tile, q_pos, kh, vh, pivot, norm, total, b, h, seq, span, attention, BLOCK_N, ALL)
    else:
        acc = over_keys(acc, q_tile, do_tile, q_pos, kh, vh, pivot, norm, total, b, h, seq, span, attention, BLOCK_N, FULL)
        acc = over_keys(acc, q_tile, do_tile, q_pos, kh, vh, pivot, norm, total, b, h, seq, span, attention, BLOCK_N, EDGES)
    store_tile(Head(dq_out, seq.batch, h, seq.first_q), row, seq.M, acc * attention.scale, attention.D)
