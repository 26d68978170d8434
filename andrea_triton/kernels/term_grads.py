"""Gradients of the score's own tensors: bias and sinks. Fixed order of sums, no atomics."""

import triton
import triton.language as tl

from andrea_triton.kernels.backward import dlogits_tile, load_rows, rows_at
from andrea_triton.kernels.bands import key_span
from andrea_triton.kernels.numerics import LOG2E, lowest
from andrea_triton.kernels.softmax import exponent
from andrea_triton.kernels.views import PAD, Head, load_tile, matrix_pointers, sequence


@triton.jit
def dbias_tile(q, k, v, do, rows, b, h, m, n, seq, attention, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """d loss / d logits [BLOCK_M, BLOCK_N] of the queries from row m and the keys from n of one head."""
    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.D))
    COLS_V: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    kv_head = h // attention.sizes.group
    q_tile = load_tile(Head(q, b, h, 0), m, seq.M, BLOCK_M, COLS, attention.D, True)
    do_tile = load_tile(Head(do, b, h, 0), m, seq.M, BLOCK_M, COLS_V, attention.DV, True)
    k_tile = load_tile(Head(k, b, kv_head, 0), n, seq.N, BLOCK_N, COLS, attention.D, True)
    v_tile = load_tile(Head(v, b, kv_head, 0), n, seq.N, BLOCK_N, COLS_V, attention.DV, True)
    base = rows_at(rows, h, attention.sizes, seq)
    pivot, norm = load_rows(rows.pivot, base, m, BLOCK_M)[:, None], load_rows(rows.norm, base, m, BLOCK_M)[:, None]
    total = load_rows(rows.delta, base, m, BLOCK_M)[:, None]
    q_pos = (seq.q_start + m + tl.arange(0, BLOCK_M))[:, None]
    k_pos = (n + tl.arange(0, BLOCK_N))[None, :]
    ds, _ = dlogits_tile(q_tile, k_tile, v_tile, do_tile, q_pos, k_pos, n, pivot, norm, total, b, h, seq, attention, True, False)
    return ds


@triton.jit
def dbias(q, k, v, do, rows, dbias_out, attention, REDUCE_B: tl.constexpr, REDUCE_H: tl.constexpr, REDUCE_M: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Gradient of one tile of a bias per key, summed over the dims along which the bias was broadcast.

    Maths:  dbias = sum of dS = P (dP - delta) over the REDUCE_ dims, in order.
    Shapes: q [B,HQ,M,D]  k [B,HKV,N,D]  v [B,HKV,N,DV]  do [B,HQ,M,DV]  dbias_out [B or 1, HQ or 1, M or 1, N] fp32 (fp64)
    Grid:   (batches heads row-blocks of dbias_out, its column-blocks)
    Source: the derivative of softmax, as in arXiv 2307.08691, algorithm 2."""
    sizes = attention.sizes
    heads = 1 if REDUCE_H else sizes.heads
    m_blocks = 1 if REDUCE_M else tl.cdiv(sizes.M, BLOCK_M)
    tile = tl.program_id(0)
    head, batch = tile // m_blocks % heads, tile // m_blocks // heads
    row, col = tile % m_blocks * BLOCK_M, tl.program_id(1) * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_N], attention.acc)
    for b in range(batch, sizes.batch if REDUCE_B else batch + 1):
        seq = sequence(sizes, b)
        for h in range(head, sizes.heads if REDUCE_H else head + 1):
            for m in range(row, sizes.M if REDUCE_M else row + 1, BLOCK_M):
                span = key_span(attention.band, seq.q_start + m, seq.N, BLOCK_M, BLOCK_N)
                if col < span.hi:
                    acc += dbias_tile(q, k, v, do, rows, b, h, m, col, seq, attention, BLOCK_M, BLOCK_N)

    t, c = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    if REDUCE_M:
        acc, t = tl.sum(acc, 0)[None, :], tl.zeros([1, 1], tl.int32)
    live = (t < (1 if REDUCE_M else sizes.M)) & (c < sizes.N)
    tl.store(matrix_pointers(dbias_out, batch, head, t, c), acc, mask=live)


@triton.jit
def dsinks(sinks, rows, dsinks_out, attention, BLOCK_M: tl.constexpr):
    """Gradient of the sink of one head.

    Maths:  dsink = - sum over queries of p_sink delta, p_sink = exp(sink - lse); delta holds - dlse.
    Shapes: sinks dsinks_out [HQ]  rows [B,HQ,blocks PAD]
    Grid:   (HQ, 1)
    Source: the derivative of softmax with one more logit, arXiv 2309.17453 (attention sinks)."""
    h = tl.program_id(0)
    sink = tl.load(sinks + h).to(attention.acc)
    acc = tl.zeros([BLOCK_M], attention.acc)
    for b in range(0, rows.batch):
        base = (tl.cast(b, tl.int64) * attention.sizes.heads + h) * (rows.blocks * PAD)
        for m in range(0, rows.blocks * PAD, BLOCK_M):
            pivot = load_rows(rows.pivot, base, m, BLOCK_M)
            p = tl.exp2(exponent(sink, pivot, LOG2E, attention.exact))
            p = tl.where((sink == pivot) & (pivot > -lowest(attention.acc)), 1.0, p)  # both inf, where inf - inf would say NaN
            if rows.norm is not None:
                p *= load_rows(rows.norm, base, m, BLOCK_M)
            acc -= p * load_rows(rows.delta, base, m, BLOCK_M)
    tl.store(dsinks_out + h, tl.sum(acc, 0))
