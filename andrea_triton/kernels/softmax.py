"""Online softmax over key tiles. The row sum is kept in partial columns, LANES of them, so that no step shuffles for it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from andrea_triton.kernels.numerics import LN2, LOG2E, lowest


class State(NamedTuple):
    """What a block of queries remembers of the keys that it has seen."""

    acc: Any  # [BLOCK_M, DV] sum of p v
    row_max: Any  # [BLOCK_M] pivot of the exponents, in the unit that exponent() subtracts
    row_sum: Any  # [BLOCK_M, LANES] partial sums of p


@triton.jit
def start(BLOCK_M: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr, LANES: tl.constexpr = 8):
    """Nothing seen."""
    row_max = tl.full([BLOCK_M], lowest(ACC), ACC)
    return State(tl.zeros([BLOCK_M, DV], ACC), row_max, tl.zeros([BLOCK_M, LANES], ACC))


@triton.jit
def exponent(s, pivot, scale_log2, EXACT: tl.constexpr):
    """Base-2 exponent of a weight. Bare products take one fused multiply-add (pivot in base 2, scale folded in); logits subtract
    first, which is exact at the ends of the range, where a pivot times log2 e would overflow."""
    return (s - pivot) * LOG2E if EXACT else s * scale_log2 - pivot


@triton.jit
def step(state, s, scale_log2, EXACT: tl.constexpr):
    """(weights, row_max, alpha): m' = max(m, max s), p = exp2(s - m'), alpha = exp2(m - m')."""
    top = tl.max(s, 1)
    row_max = tl.maximum(state.row_max, top if EXACT else top * scale_log2)
    p = tl.exp2(exponent(s, row_max[:, None], scale_log2, EXACT))
    alpha = tl.exp2((state.row_max - row_max) * LOG2E if EXACT else state.row_max - row_max)
    return p, row_max, alpha


@triton.jit
def add_sum(row_sum, alpha, p):
    """row_sum alpha + sum of p along the keys. In 8 columns no thread adds what it does not hold; in 4 each adds its two, in half
    the registers."""
    ROWS: tl.constexpr = p.shape[0]
    sums = tl.sum(tl.reshape(p, [ROWS, p.shape[1] // 8, 8]), 1)
    if row_sum.shape[1] == 8:
        return row_sum * alpha[:, None] + sums
    else:  # alpha by the same way, which leaves it where the sums are
        alphas = tl.max(tl.reshape(tl.broadcast_to(alpha[:, None], [ROWS, 8]), [ROWS, 4, 2]), 2)
        return row_sum * alphas + tl.sum(tl.reshape(sums, [ROWS, 4, 2]), 2)


@triton.jit
def sink_weight(sink, pivot, UNIT_LOG2: tl.constexpr):
    """Weight of a sink beside a pivot of at least its size, both in a unit of UNIT_LOG2. A sink of +inf takes all, where
    inf - inf would say NaN."""
    return tl.where((sink == pivot) & (pivot > 0), 1.0, tl.exp2((sink - pivot) * UNIT_LOG2))


@triton.jit
def finish(state, sink, EXACT: tl.constexpr):
    """(out, row_max, row_sum, lse) of the whole row; lse in natural units. `sink`, when not None, is the logit of a key without a
    value. An empty row has row_sum 0, out 0 and lse -inf (with a sink: the sink)."""
    acc, row_max, row_sum = state.acc, state.row_max, tl.sum(state.row_sum, 1)
    unit: tl.constexpr = 1.0 if EXACT else LN2
    if sink is not None:
        sink /= unit
        pivot = tl.maximum(row_max, sink)
        alpha = tl.exp2((row_max - pivot) * (unit * LOG2E))
        acc, row_sum = acc * alpha[:, None], row_sum * alpha + sink_weight(sink, pivot, unit * LOG2E)
        row_max = pivot
    some = row_sum != 0
    lse = tl.where(some, row_max * unit + tl.log2(tl.where(some, row_sum, 1.0)) * LN2, float("-inf"))
    return acc * (1 / tl.where(some, row_sum, 1.0))[:, None], row_max, row_sum, lse
