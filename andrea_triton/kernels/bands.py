"""Who sees whom: key position k is visible to query position q when k in [q - left, q + right]. None = open side.

Causal attention is right = 0. To change the mask by position, change `visible` and, so that no block is missed, the spans; and,
for the same rule elsewhere, key_range in decode.py, reference.py (the definition) and cpu/tile.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Band(NamedTuple):
    """How far a query sees to either side of its own position."""

    left: Any
    right: Any


class Span(NamedTuple):
    """What a loop over blocks walks: all blocks of [lo, hi) hold visible pairs, and pairs in [all_lo, all_hi) are visible to the
    whole tile. Blocks inside the latter are full, the others are edges, to be checked. One loop walks them all (ALL), or one the
    FULL blocks and another the EDGES, which block_at joins end to end: with edges [0, 2) and [5, 6) around full blocks [2, 5), in
    units of a block, indices 0, 1, 2 stand for blocks 0, 1, 5."""

    lo: Any
    hi: Any
    all_lo: Any
    all_hi: Any


FULL, EDGES, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # parts of a span


@triton.jit
def visible(band, q_pos, k_pos, N):
    """Visibility of keys to queries (shapes broadcast). Both right limits are one number per query: one compare a side."""
    last = N - 1 + 0 * q_pos  # of the shape of q_pos
    if band.right is not None:
        last = tl.minimum(q_pos + band.right, N - 1)
    keep = k_pos <= last
    if band.left is not None:
        keep = keep & (k_pos >= q_pos - band.left)
    return keep


@triton.jit
def round_down(x, BLOCK: tl.constexpr):
    """The last multiple of BLOCK at or below x; 0 for negative x."""
    return tl.maximum(x, 0) // BLOCK * BLOCK


@triton.jit
def round_up(x, BLOCK: tl.constexpr):
    """The first multiple of BLOCK at or above x; 0 for negative x."""
    return (tl.maximum(x, 0) + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def key_span(band, q_first, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys seen by the queries at positions q_first .. q_first + BLOCK_M - 1: by some, and by all."""
    all_hi, hi = N, N
    if band.right is not None:
        all_hi = tl.minimum(q_first + band.right + 1, N)
        hi = tl.minimum(q_first + BLOCK_M + band.right, N)
    if band.left is None:
        return Span(0, hi, 0, all_hi)
    else:
        lo = q_first - band.left
        return Span(round_down(lo, BLOCK_N), hi, tl.minimum(lo + BLOCK_M - 1, N), all_hi)


@triton.jit
def query_span(band, k_first, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Query rows that see the keys k_first .. k_first + BLOCK_N - 1: the transpose of key_span."""
    all_hi, hi = seq.M, seq.M
    if band.left is not None:
        last = k_first + band.left - seq.q_start
        all_hi = tl.minimum(last + 1, seq.M)
        hi = tl.minimum(last + BLOCK_N, seq.M)
    lo, all_lo = 0, 0
    if band.right is not None:
        lo = tl.minimum(k_first - band.right - seq.q_start, seq.M)
        all_lo = tl.minimum(lo + BLOCK_N - 1, seq.M)
    return Span(round_down(lo, BLOCK_M), hi, all_lo, all_hi)


@triton.jit
def full_blocks(span, BLOCK: tl.constexpr):
    """[first, end) of the full blocks; where there is none, both are the block after the first edge."""
    first = round_up(span.all_lo, BLOCK)
    return first, tl.maximum(round_down(span.all_hi, BLOCK), first)


@triton.jit
def bounds(span, BLOCK: tl.constexpr, PART: tl.constexpr, BOTH: tl.constexpr):
    """Loop bounds of a part of the span. BOTH: edges may lie on both sides of the full blocks, not only after them."""
    first, end = full_blocks(span, BLOCK)
    if PART == ALL:
        return span.lo, span.hi
    elif PART == FULL:
        return first, end
    elif BOTH:
        return span.lo, span.hi - (end - first)
    else:
        return end, span.hi


@triton.jit
def block_at(span, i, BLOCK: tl.constexpr, PART: tl.constexpr, BOTH: tl.constexpr):
    """(the block that loop index i stands for, whether it is an edge): past the first of two edges, jump over the full blocks.
    Whether is known when compiling but for ALL."""
    if PART == ALL:
        return i, (i < span.all_lo) | (i + BLOCK > span.all_hi)
    elif PART == EDGES and BOTH:
        first, end = full_blocks(span, BLOCK)
        return i + tl.where(i >= first, end - first, 0), True
    else:
        return i, PART == EDGES
