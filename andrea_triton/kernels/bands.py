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
    """Block starts: in [full_lo, full_hi) all pairs are visible, in [edge_lo, edge_hi) they are to be checked.
    Where edges lie on both sides of the full blocks, [edge_lo, edge_hi) is both, joined end to end, and block_at jumps over the
    full blocks. With edges [0, 2) and [5, 6) around full blocks [2, 5), in units of a block: Span(2, 5, 0, 3), whose loop indices
    0, 1, 2 stand for the blocks 0, 1, 5. Keys have one edge where the band has no left limit; queries always have two."""

    full_lo: Any
    full_hi: Any
    edge_lo: Any
    edge_hi: Any


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
    """Keys seen by the queries at positions q_first .. q_first + BLOCK_M - 1: by all (full), by some (edges)."""
    full_hi, hi = round_down(N, BLOCK_N), N
    if band.right is not None:
        full_hi = round_down(tl.minimum(q_first + band.right + 1, N), BLOCK_N)
        hi = tl.minimum(q_first + BLOCK_M + band.right, N)
    if band.left is None:
        return Span(0, full_hi, full_hi, hi)
    else:
        lo = q_first - band.left
        full_lo = round_up(tl.minimum(lo + BLOCK_M - 1, N), BLOCK_N)
        full_hi = tl.maximum(full_hi, full_lo)
        return Span(full_lo, full_hi, round_down(lo, BLOCK_N), hi - (full_hi - full_lo))


@triton.jit
def query_span(band, k_first, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Query rows that see the keys k_first .. k_first + BLOCK_N - 1: the transpose of key_span."""
    full_hi, hi = round_down(seq.M, BLOCK_M), seq.M
    if band.left is not None:
        last = k_first + band.left - seq.q_start
        full_hi = round_down(tl.minimum(last + 1, seq.M), BLOCK_M)
        hi = tl.minimum(last + BLOCK_N, seq.M)
    lo, full_lo = 0, 0
    if band.right is not None:
        lo = tl.minimum(k_first - band.right - seq.q_start, seq.M)
        full_lo = round_up(tl.minimum(lo + BLOCK_N - 1, seq.M), BLOCK_M)
        full_hi = tl.maximum(full_hi, full_lo)
    return Span(full_lo, full_hi, round_down(lo, BLOCK_M), hi - (full_hi - full_lo))


@triton.jit
def bounds(span, CHECK: tl.constexpr):
    """Loop bounds of the full blocks, or (CHECK) of the edges."""
    if CHECK:
        return span.edge_lo, span.edge_hi
    else:
        return span.full_lo, span.full_hi


@triton.jit
def block_at(span, i, JUMP: tl.constexpr):
    """The block that loop index i stands for: past the first of two edges, jump over the full blocks."""
    return i + tl.where(i >= span.full_lo, span.full_hi - span.full_lo, 0) if JUMP else i
