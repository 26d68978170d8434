"""Decode kernels: few queries against a long cache of keys. The keys are split over programs, and the parts combined.

Part s is the keys from s split_size on, whatever the lengths, the batch and the queries beside a row: so its bits are a matter of
its own keys alone. Tiles begin at multiples of BLOCK_N, which no page size changes; a tile that a row does not see leaves the
row's sums as they are, bit for bit, and so does a part in `combine`."""

import triton
import triton.language as tl

from andrea_triton.kernels.bands import EDGES, Span
from andrea_triton.kernels.forward import attend
from andrea_triton.kernels.numerics import LOG2E
from andrea_triton.kernels.softmax import finish, sink_weight, start
from andrea_triton.kernels.views import Head, sequence


@triton.jit
def key_range(band, seq, row, end_row):
    """First key and end of those that the queries row .. end_row - 1 may see; the first may be negative."""
    first, end = 0 * seq.N, seq.N
    if band.left is not None:
        first = seq.q_start + row - band.left
    if band.right is not None:
        end = tl.minimum(end, seq.q_start + end_row + band.right)
    return first, end


@triton.jit
def decode(q, k, v, pages, page_size, part_out, part_lse, attention, split_size, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """Output and log-sum-exp of a block of the queries of one key head, over one part of its keys.

    The query heads of a key head share tiles: row r is query r // group of head r % group of the group, so that a block is of
    neighbouring queries. WHOLE: no tile of keys crosses a page.

    Maths:  softmax(score(scale q k^T)) v over a part of the keys in the band.
    Shapes: q [B,HQ,M,D]  k [B,HKV,N,D]  v [B,HKV,N,DV], or with pages [B,N/page_size] k [pages,HKV,page_size,D];
            part_out [parts,B,HQ,M,DV]  part_lse [parts,B,HQ,M] fp32 (fp64); parts that no query sees stay unwritten
    Grid:   (B HKV cdiv(group M, BLOCK_M), parts)
    Source: the split of keys of FlashDecoding; arXiv 2305.13245 (grouped queries)."""
    sizes = attention.sizes
    kv_heads, blocks = sizes.heads // sizes.group, tl.cdiv(sizes.group * sizes.M, BLOCK_M)
    split, block, pair = tl.program_id(1), tl.program_id(0) % blocks, tl.program_id(0) // blocks
    kv_head, b = pair % kv_heads, pair // kv_heads
    seq = sequence(sizes, b)
    end_row = tl.minimum(tl.cdiv((block + 1) * BLOCK_M, sizes.group), seq.M)
    first, end = key_range(attention.band, seq, block * BLOCK_M // sizes.group, end_row)
    first, end = tl.maximum(first, split * split_size), tl.minimum(end, (split + 1) * split_size)
    if first >= end:
        return
    first = first // BLOCK_N * BLOCK_N

    COLS: tl.constexpr = max(16, triton.next_power_of_2(attention.D))
    COLS_V: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    r, d, dv = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, COLS)[None, :], tl.arange(0, COLS_V)[None, :]
    live = r < sizes.group * seq.M
    h, row = kv_head * sizes.group + r % sizes.group, tl.minimum(r // sizes.group, seq.M - 1)
    base = q.ptr + tl.cast(b, tl.int64) * q.stride_b
    at = tl.cast(h, tl.int64) * q.stride_h + tl.cast(row, tl.int64) * q.stride_t
    q_tile = tl.load(base + at[:, None] + d, mask=live[:, None] & (d < attention.D), other=0.0)

    table = None if pages is None else pages + b * tl.cdiv(sizes.N, page_size)
    last = None if WHOLE else seq.N - 1
    kh, vh = Head(k, b, kv_head, 0, table, page_size, last), Head(v, b, kv_head, 0, table, page_size, last)
    state = start(BLOCK_M, COLS_V, attention.acc)
    state = attend(
        state, q_tile, seq.q_start + row, kh, vh, b, h[:, None], seq, Span(first, end, first, first), attention, BLOCK_N, EDGES
    )
    out, _, _, lse = finish(state, None, attention.exact)

    to = ((tl.cast(split, tl.int64) * sizes.batch + b) * sizes.heads + h) * seq.M + row
    tl.store(part_out + to[:, None] * attention.DV + dv, out, mask=live[:, None] & (dv < attention.DV))
    tl.store(part_lse + to, lse, mask=live)


@triton.jit
def combine(part_out, part_lse, sinks, o, lse_out, attention, split_size, BLOCK_M: tl.constexpr):
    """The attention over all keys from the attention over each part.

    Maths:  lse = log sum exp(lse_s) and the sink;  o = sum exp(lse_s - lse) o_s.
    Shapes: part_out [parts,B,HQ,M,DV]  part_lse [parts,B,HQ,M]  sinks [HQ] or None  o [B,HQ,M,DV]  lse_out [B,HQ,M]
    Grid:   (B HQ, cdiv(M, BLOCK_M))
    Source: arXiv 1805.02867 (online softmax), section 3.1."""
    sizes = attention.sizes
    h, b = tl.program_id(0) % sizes.heads, tl.program_id(0) // sizes.heads
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    COLS_V: tl.constexpr = max(16, triton.next_power_of_2(attention.DV))
    d, live = tl.arange(0, COLS_V)[None, :], row < sizes.M
    at = tl.cast(tl.program_id(0), tl.int64) * sizes.M + row
    step = tl.cast(sizes.batch, tl.int64) * sizes.heads * sizes.M

    seq, row0 = sequence(sizes, b), tl.program_id(1) * BLOCK_M
    first, end = key_range(attention.band, seq, row0, tl.minimum(row0 + BLOCK_M, sizes.M))
    first, end = tl.maximum(first, 0) // split_size, tl.cdiv(tl.maximum(end, 0), split_size)
    nothing = tl.full([BLOCK_M], float("-inf"), attention.acc)
    pivot = nothing if sinks is None else tl.maximum(nothing, tl.load(sinks + h).to(attention.acc))
    for s in range(first, end):
        pivot = tl.maximum(pivot, tl.load(part_lse + s * step + at, mask=live, other=float("-inf")))
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)

    acc, total = tl.zeros([BLOCK_M, COLS_V], attention.acc), tl.zeros([BLOCK_M], attention.acc)
    if sinks is not None:
        total += sink_weight(tl.load(sinks + h).to(attention.acc), pivot, LOG2E)
    for s in range(first, end):
        weight = tl.exp2((tl.load(part_lse + s * step + at, mask=live, other=float("-inf")) - pivot) * LOG2E)
        part = part_out + (s * step + at)[:, None] * attention.DV + d
        acc += weight[:, None] * tl.load(part, mask=live[:, None] & (d < attention.DV), other=0.0)
        total += weight

    some = total != 0
    total = tl.where(some, total, 1.0)
    base = o.ptr + tl.cast(b, tl.int64) * o.stride_b + tl.cast(h, tl.int64) * o.stride_h
    to = base + tl.cast(row, tl.int64)[:, None] * o.stride_t + d
    tl.store(to, (acc / total[:, None]).to(o.ptr.dtype.element_ty), mask=live[:, None] & (d < attention.DV))
    tl.store(lse_out + at, tl.where(some, pivot + tl.log2(total) / LOG2E, float("-inf")), mask=live)
