"""Which weights are kept: a counter-based generator over absolute positions, so that no tile size, backend or recomputation
changes the mask."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """keep a weight when its random 32-bit word is at least `threshold` = p 2^32; survivors are multiplied by `inverse` = 1
    / (1 - p)."""

    seed: Any  # int64, a number or a pointer to one
    threshold: Any  # int64
    inverse: Any


@triton.jit
def philox(c0, c1, key):
    """First word of Philox2x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC11)."""
    for _ in tl.static_range(10):
        # One product of 64 bits: a high and a low half, each by itself, would cost two.
        wide = c0.to(tl.uint64) * 0xD256D193
        c0 = (wide >> 32).to(tl.uint32) ^ key ^ c1
        c1 = wide.to(tl.uint32)
        key += 0x9E3779B9
    return c0


@triton.jit
def kept(dropout, b, h, heads, q_pos, k_pos):
    """True where the weight of (batch, head, query position, key position) survives; q_pos and k_pos broadcast."""
    seed = dropout.seed
    if dropout.seed.dtype.is_ptr():
        seed = tl.load(dropout.seed)
    key = philox((b * heads + h).to(tl.uint32), (seed >> 32).to(tl.uint32), seed.to(tl.uint32))
    zero = (q_pos + k_pos) * 0
    word = philox((q_pos + zero).to(tl.uint32), (k_pos + zero).to(tl.uint32), key)
    return word >= dropout.threshold.to(tl.uint32)
