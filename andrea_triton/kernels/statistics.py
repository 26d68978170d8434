"""Row statistics to watch training by: the largest logit and the entropy of every query's weights."""

import triton
import triton.language as tl

from andrea_triton.kernels.bands import EDGES, FULL, block_at, bounds, key_span
from andrea_triton.kernels.numerics import LOG2E
from andrea_triton.kernels.tile import logits_tile
from andrea_triton.kernels.views import Head, load_tile, program, row_pointers, sequence


@triton.jit
def survey(top, entropy, q_tile, q_pos, k, lse, b, h, seq, span, attention, BLOCK_N: tl.constexpr, PART: tl.constexpr):
    """(largest logit, entropy) after a part of the span."""
    first, last = bounds(span, BLOCK_N, PART, attention.band.left is not None)
    for i in tl.range(first, last, BLOCK_N):
        n, edge = block_at(span, i, BLOCK_N, PART, attention.band.left is not None)
        k_pos = (n + tl.arange(0, BLOCK_N))[None, :]
        k_tile = load_tile(k, n, seq.N, BLOCK_N, q_tile.shape[1], attention.D, PART != FULL)
        s, _ = logits_tile(q_tile, k_tile, q_pos, k_pos, n, b, h, seq, attention, edge)
        if not attention.exact:
            s *= attention.scale if attention.terms.cap is None else attention.terms.cap
        log_p = s - lse
        p = tl.exp2(log_p * LOG2E)
        top = tl.maximum(top, tl.max(s, 1))
        entropy += tl.sum(tl.where(p > 0, -p * log_p, 0.0), 1)
    return top, entropy


@triton.jit
def statistics(q, k, lse, top_out, entropy_out, attention, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Largest visible logit, and entropy of the weights in nats, of one block of queries. Dropout does not count.

    Maths:  top = max s;  entropy = - sum p log p, p = exp(s - lse).
    Shapes: q [B,HQ,M,D]  k [B,HKV,N,D]  lse top_out entropy_out [B,HQ,M] fp32 (fp64)
    Grid:   (B HQ, cdiv(M, BLOCK_M)), the last queries first.
    Source: arXiv 2302.05442 (logits that grow in training), arXiv 2303.06296 (attention entropy)."""
    block, h, b = program(attention.sizes.heads)
    seq = sequence(attention.sizes, b)
    row = (tl.num_programs(1) - 1 - block) * BLOCK_M
    if attention.sizes.cu_q is not None:
        if row >= seq.M:
            return

    q_pos = (seq.q_start + row + tl.arange(0, BLOCK_M))[:, None]
    live = row + tl.arange(0, BLOCK_M) < seq.M
    kh = Head(k, seq.batch, h // attention.sizes.group, seq.first_k)
    span = key_span(attention.band, seq.q_start + row, seq.N, BLOCK_M, BLOCK_N)

    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.D))
    q_tile = load_tile(Head(q, seq.batch, h, seq.first_q), row, seq.M, BLOCK_M, COLS, attention.D, True)
    at = row_pointers(lse, h, row, attention.sizes, seq, BLOCK_M)
    total = tl.load(at, mask=live, other=0.0)[:, None]
    total = tl.where(total == float("-inf"), float("inf"), total)
    top, entropy = tl.full([BLOCK_M], float("-inf"), attention.acc), tl.zeros([BLOCK_M], attention.acc)

    top, entropy = survey(top, entropy, q_tile, q_pos, kh, total, b, h, seq, span, attention, BLOCK_N, FULL)
    top, entropy = survey(top, entropy, q_tile, q_pos, kh, total, b, h, seq, span, attention, BLOCK_N, EDGES)

    tl.store(row_pointers(top_out, h, row, attention.sizes, seq, BLOCK_M), top, mask=live)
    tl.store(row_pointers(entropy_out, h, row, attention.sizes, seq, BLOCK_M), entropy, mask=live)
