"""The one place where scores and weights are made: forward, backward and decode cannot disagree."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from andrea_triton.kernels.bands import visible
from andrea_triton.kernels.dropout import kept
from andrea_triton.kernels.numerics import product, tanh
from andrea_triton.kernels.scores import cap_slope, logits, read_matrix, sloped
from andrea_triton.kernels.softmax import exponent


class Attention(NamedTuple):
    """What every program of a launch has in common: what attention is here."""

    sizes: Any  # views.Sizes
    band: Any  # bands.Band: who sees whom
    terms: Any  # scores.Terms: logits from scaled products
    dropout: Any  # dropout.Dropout or None
    scale: Any
    scale_log2: Any  # scale log2(e), or of a bare cap cap log2(e), rounded once
    D: Any  # constexpr: head dim of q and k
    DV: Any  # constexpr: head dim of v and o
    acc: Any  # constexpr type of sums
    precision: Any  # constexpr: how fp32 is multiplied (ieee, tf32x3, tf32)
    exact: Any  # constexpr: logits are made before the maximum; False: bare products, or tanh of them, as right, that
    # softmax.exponent scales
    rounded: Any  # constexpr: the row sum adds the weights as rounded for the second product
    tanh: Any  # constexpr: how numerics.tanh makes that of a softcap


@triton.jit
def logits_tile(x, y, q_pos, k_pos, first, b, h, seq, attention, edge):
    """(logits, capped) of one tile: x y^T, terms, and at an edge the band. x, y = q, k gives [BLOCK_M, BLOCK_N]; k, q gives its
    transpose. The columns' positions begin at `first`. Where attention.exact is False there is no term but a cap or ALiBi, and
    both are products, or tanh of scaled ones, that nobody has multiplied by attention.scale_log2 yet."""
    terms = attention.terms
    bias = None if terms.bias is None else read_matrix(terms.bias, b, h, q_pos, k_pos, seq)
    keep = None if terms.keep is None else read_matrix(terms.keep, b, h, q_pos, k_pos, seq)
    s = product(x, tl.trans(y), tl.zeros([x.shape[0], y.shape[0]], attention.acc), attention.precision, q_pos.shape[0] == 1)
    if not attention.exact and attention.terms.cap is not None:
        s = tanh(s, attention.scale / attention.terms.cap, attention.tanh)
    if not attention.exact and attention.terms.slopes is not None:
        slope = tl.load(attention.terms.slopes + b * attention.terms.slopes_stride + h)
        s = sloped(s, q_pos, k_pos, first, attention.scale, slope)
    capped = s
    if attention.exact:
        s, capped = logits(s * attention.scale, bias, keep, b, h, q_pos, k_pos, first, seq, attention.terms, attention.tanh)
    if edge:
        s = tl.where(visible(attention.band, q_pos, k_pos, seq.N), s, float("-inf"))
    return s, capped if attention.exact else s


@triton.jit
def probs_tile(s, pivot, norm, attention):
    """Softmax weights from logits and the row's pivot and norm (None: folded into the pivot)."""
    p = tl.exp2(exponent(s, pivot, attention.scale_log2, attention.exact))
    return p if norm is None else p * norm


@triton.jit
def steep(p, capped, attention):
    """p times the derivative of the softcap: what weighs d loss / d product. Made along with p, so that no tile of logits waits
    for the product that makes dP."""
    return p if attention.terms.cap is None else p * cap_slope(capped, attention.terms, attention.exact)


@triton.jit
def drop(x, q_pos, k_pos, b, h, attention):
    """x where its weight is kept, scaled up; zero elsewhere. The weights, and in the backward the gradients that reach them."""
    if attention.dropout is None:
        return x
    else:
        keep = kept(attention.dropout, b, h, attention.sizes.heads, q_pos, k_pos)
        return tl.where(keep, x, 0.0) * attention.dropout.inverse
