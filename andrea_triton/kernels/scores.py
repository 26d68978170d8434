"""From a scaled product to a logit, and back: softcap, the user's own score, ALiBi, bias, masks. Absent terms are None."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from andrea_triton.kernels.numerics import lowest, tanh
from andrea_triton.kernels.views import matrix_pointers


class Terms(NamedTuple):
    """logit = score(cap tanh(s / cap)) - slope |q_pos - k_pos| + bias, then -inf where keep, mask or tree says no."""

    cap: Any = None  # number
    score: Any = None  # jit function (s, batch, head, q_pos, k_pos, *score_args) -> s
    score_grad: Any = None  # jit function of the same arguments -> d score / d s; None is 1
    score_args: tuple = ()
    slopes: Any = None  # pointer to (batch, head) fp32, heads side by side
    slopes_stride: Any = None  # from one batch entry to the next; 0 where they share them
    bias: Any = None  # Matrix
    keep: Any = None  # Matrix of 0 (hidden) and 1
    mask: Any = None  # jit function (batch, head, q_pos, k_pos, *mask_args) -> true where visible
    mask_args: tuple = ()
    tree: Any = None  # Matrix (batch, head, M, M) of 0 and 1: which of the newest keys a query sees; before them it sees all


@triton.jit
def distance(q_pos, k_pos, first, COLS: tl.constexpr, dtype: tl.constexpr):
    """|q_pos - k_pos| [ROWS, COLS], the columns' positions from `first` on. Exact up to 2^24: 8 columns are subtracted as
    integers and made floats, the others are a constant away, which keeps no registers and costs one addition each."""
    rows = q_pos if q_pos.shape[1] == 1 else k_pos
    near = (rows - first - tl.arange(0, 8)[None, :]).to(dtype)
    far = 8 * tl.arange(0, COLS // 8)[None, :, None].to(dtype)
    return tl.abs(tl.reshape(near[:, None, :] - far, [rows.shape[0], COLS]))


@triton.jit
def sloped(s, q_pos, k_pos, first, scale, slope):
    """s - slope distance / scale: products to which ALiBi is added before anybody scales them."""
    least = lowest(s.dtype)
    slope = tl.minimum(tl.maximum(slope / scale, least), -least)  # so that 0 times it is 0
    return s - slope * distance(q_pos, k_pos, first, s.shape[1], s.dtype)


@triton.jit
def read_matrix(x, b, h, q_pos, k_pos, seq):
    """The elements of a bias or mask that a tile needs. Read them before the product that they join: Triton gives
    what follows two layouts that of the later one, and shared memory would carry the scores to that of the loads."""
    row, col = tl.minimum(q_pos - seq.q_start, seq.M - 1), tl.maximum(tl.minimum(k_pos, seq.N - 1), 0)
    return tl.load(matrix_pointers(x, b, h, row, col))


@triton.jit
def logits(s, bias, keep, b, h, q_pos, k_pos, first, seq, terms, TANH: tl.constexpr):
    """(logits, capped): natural-unit logits from scaled products, the elements of bias and keep, and so on, and the value that
    entered the user's score. The columns' positions begin at `first`. The user's functions get positions clamped to the sequence,
    so that what they load with them is in bounds."""
    if terms.cap is not None:
        s = terms.cap * tanh(s, 1 / terms.cap, TANH)
    capped = s
    row = tl.minimum(q_pos - seq.q_start, seq.M - 1)
    col = tl.maximum(tl.minimum(k_pos, seq.N - 1), 0)  # there may be no key; a program always has a query
    if terms.score is not None:
        s = terms.score(s, b, h, row + seq.q_start, col, *terms.score_args)
    if terms.slopes is not None:
        s -= tl.load(terms.slopes + b * terms.slopes_stride + h) * distance(q_pos, k_pos, first, s.shape[1], s.dtype)
    if bias is not None:
        s += bias.to(s.dtype)
    if keep is not None:
        s = tl.where(keep != 0, s, float("-inf"))
    if terms.mask is not None:
        s = tl.where(terms.mask(b, h, row + seq.q_start, col, *terms.mask_args), s, float("-inf"))
    if terms.tree is not None:
        new = tl.maximum(tl.minimum(col - seq.q_start, seq.M - 1), 0)
        sees = tl.load(matrix_pointers(terms.tree, b, h, row, new)) != 0
        s = tl.where(sees | (col < seq.q_start), s, float("-inf"))
    return s, capped


@triton.jit
def score_grad(dlogits, capped, b, h, q_pos, k_pos, seq, terms):
    """d loss / d score's argument from d loss / d logit: the derivative of the user's score. Where nothing flows, as from a
    hidden key, nothing is asked of it: its value there may be NaN."""
    if terms.score_grad is None:
        return dlogits
    else:
        row = tl.minimum(q_pos - seq.q_start, seq.M - 1)
        col = tl.maximum(tl.minimum(k_pos, seq.N - 1), 0)
        ds = dlogits * terms.score_grad(capped, b, h, row + seq.q_start, col, *terms.score_args)
        return tl.where(dlogits == 0, 0.0, ds)


@triton.jit
def cap_slope(capped, terms, EXACT: tl.constexpr):
    """Derivative of the softcap, 1 - tanh², from `capped`: cap tanh, or (not EXACT) tanh itself, which is -inf where the key is
    hidden. There, and where a hidden key made a NaN of it, it is 0."""
    t = capped * (1 / terms.cap) if EXACT else capped
    t = tl.where(t > -1.0, t, -1.0)  # of a NaN too
    return 1 - t * t
