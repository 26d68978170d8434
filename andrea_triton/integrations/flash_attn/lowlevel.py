"""flash-attn's forward and backward without autograd, which rings and pipelines call and put together themselves.

rng_state is this library's seed in its first element. lse of a query without keys is -inf; the backward takes +inf too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import backends, target
from ...errors import ShapeError
from ...functional import attention, varlen_attention
from ...problem import make_problem
from ...spec import make_spec
from ..lent_cache import Settings, gathered
from .arguments import Integer, Number, drawn, integer, real, settled
from .probabilities import signed_weights, signed_weights_packed

Four = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: Number, softmax_scale: Number | None, causal: bool, window_size_left: Integer,
    window_size_right: Integer, softcap: Number, alibi_slopes: Tensor | None, return_softmax: bool,
) -> Four:  # fmt: skip
    """Attention of (B, T, H, D) tensors, without a gradient.

    Args:
        q, k, v, dropout_p, softmax_scale, causal, softcap, alibi_slopes: as in `flash_attn_func`.
        window_size_left, window_size_right: its window_size.
        return_softmax: give the weights, where there is dropout.

    Returns:
        out (B, M, HQ, DV); lse (B, HQ, M) fp32; the weights (B, HQ, M, N), negative where dropped, or an empty tensor;
        rng_state (2,) int64.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_func`.

    Source:
        flash-attn 2.8, _flash_attn_forward.

    Example:
        >>> x = torch.randn(1, 5, 2, 8)
        >>> _flash_attn_forward(x, x, x, 0.0, None, True, -1, -1, 0.0, None, False)[1].shape
        torch.Size([1, 2, 5])
    """
    q, settings = settled(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    p = real("dropout_p", dropout_p)
    seed = drawn(p, q)
    out, lse = attention(
        *(x.transpose(1, 2) for x in (q, k, v)), **settings._asdict(), dropout_p=p, seed=seed, return_lse=True
    )  # fmt: skip
    weights = signed_weights(q, k, settings, p, seed) if return_softmax and seed is not None else q.new_empty(0)
    return out.transpose(1, 2), lse, weights, _state(seed, q)


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Integer, max_seqlen_k: Integer,
    dropout_p: Number, softmax_scale: Number | None, causal: bool, window_size_left: Integer = -1,
    window_size_right: Integer = -1, softcap: Number = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
) -> Four:  # fmt: skip
    """Attention of sequences that lie one after the other, without a gradient.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, softcap, alibi_slopes,
            block_table: as in `flash_attn_varlen_func`.
        window_size_left, window_size_right: its window_size.
        return_softmax: give the weights, where there is dropout.
        leftpad_k: (sequences,) integers, keys at the front of each sequence that nobody sees.
        seqused_k: (sequences,) integers, the keys of each sequence that are in use; None for all.

    Returns:
        out (total_q, HQ, DV); lse (HQ, total_q) fp32; the weights (sequences, HQ, max_seqlen_q, max_seqlen_k), negative where
        dropped, or an empty tensor; rng_state (2,) int64.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_varlen_func`.

    Source:
        flash-attn 2.8, _flash_attn_varlen_forward.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> _flash_attn_varlen_forward(x, x, x, starts, starts, 3, 3, 0.0, None, True)[1].shape
        torch.Size([2, 5])
    """
    q, settings = settled(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    p, longest = real("dropout_p", dropout_p), (integer("max_seqlen_q", max_seqlen_q), integer("max_seqlen_k", max_seqlen_k))
    seed, cu_k = drawn(p, q), cu_seqlens_k
    if block_table is not None or leftpad_k is not None or seqused_k is not None:
        first = torch.zeros_like(cu_k[1:]) if leftpad_k is None else leftpad_k
        lengths = (cu_k.diff() if seqused_k is None else seqused_k) - first
        if block_table is None:  # one page, all that there is
            k, v, first = k[None], v[None], first + cu_k[:-1]
            block_table = torch.zeros(lengths.shape[0], 1, dtype=torch.int64, device=q.device)
        k, v, cu_k = gathered(k, v, first, lengths, block_table, longest[1])
    starts = cu_seqlens_q, cu_k
    out, lse = varlen_attention(
        q, k, v, *starts, *longest, **settings._asdict(), dropout_p=p, seed=seed, return_lse=True
    )  # fmt: skip
    shown = return_softmax and seed is not None
    weights = signed_weights_packed(q, k, starts, longest, settings, p, seed) if shown else q.new_empty(0)  # type: ignore[arg-type]
    return out, lse, weights, _state(seed, q)


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, dropout_p: Number, softmax_scale: Number | None, causal: bool, window_size_left: Integer,
    window_size_right: Integer, softcap: Number, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradients of _flash_attn_forward, written into dq, dk and dv.

    out and lse may be those of more keys than k holds: over the parts of the keys, the gradients add up.

    Args:
        dout: (B, M, HQ, DV) gradient of out.
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes: of the forward.
        out: what it gave.
        softmax_lse: likewise.
        dq, dk, dv: written to, in the shapes of q, k and v; None for one that nobody wants.
        deterministic: taken; the backward always is.
        rng_state: what the forward gave; needed with dropout.

    Returns:
        (B, HQ, M) fp32, the sums of dout · out.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_func`; also dropout without rng_state.

    Source:
        flash-attn 2.8, _flash_attn_backward; arXiv 2307.08691, algorithm 2.

    Example:
        >>> x, settings = torch.randn(1, 5, 2, 8), (0.0, None, True, -1, -1, 0.0, None)
        >>> out, lse, *_ = _flash_attn_forward(x, x, x, *settings, False)
        >>> dq, dk, dv = (torch.empty_like(x) for _ in range(3))
        >>> _flash_attn_backward(out, x, x, x, out, lse, dq, dk, dv, *settings, False).shape
        torch.Size([1, 2, 5])
    """
    _, settings = settled(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    rows = [x.transpose(1, 2) for x in (q, k, v, out, dout)]
    grads = _gradients(rows, softmax_lse, settings, dropout_p, rng_state, None, None)
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        if into is not None:
            into.copy_(grad.transpose(1, 2))
    return _products(dout, out).transpose(1, 2)


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None, dk: Tensor | None,
    dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Integer, max_seqlen_k: Integer,
    dropout_p: Number, softmax_scale: Number | None, causal: bool, window_size_left: Integer, window_size_right: Integer,
    softcap: Number, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradients of _flash_attn_varlen_forward, written into dq, dk and dv.

    Args:
        dout: (total_q, HQ, DV) gradient of out.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes: of the forward.
        out, softmax_lse, dq, dk, dv, deterministic, rng_state: as in `_flash_attn_backward`.

    Returns:
        (HQ, total_q) fp32, the sums of dout · out.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_varlen_func`; also dropout without rng_state.

    Source:
        flash-attn 2.8, _flash_attn_varlen_backward; arXiv 2307.08691, algorithm 2.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> lengths, settings = (starts, starts, 3, 3), (0.0, None, True, -1, -1, 0.0, None)
        >>> out, lse, *_ = _flash_attn_varlen_forward(x, x, x, *lengths, *settings)
        >>> dq, dk, dv = (torch.empty_like(x) for _ in range(3))
        >>> _flash_attn_varlen_backward(out, x, x, x, out, lse, dq, dk, dv, *lengths, *settings, False).shape
        torch.Size([2, 5])
    """
    _, settings = settled(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    longest = integer("max_seqlen_q", max_seqlen_q), integer("max_seqlen_k", max_seqlen_k)
    rows = [q, k, v, out, dout]
    grads = _gradients(rows, softmax_lse, settings, dropout_p, rng_state, (cu_seqlens_q, cu_seqlens_k), longest)
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        if into is not None:
            into.copy_(grad)
    return _products(dout, out).transpose(0, 1)


def _gradients(
    rows: list[Tensor], lse: Tensor, settings: Settings, dropout_p: Number, rng_state: Tensor | None,
    starts: tuple[Tensor, Tensor] | None, longest: tuple[int, int] | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv of rows q, k, v, out, dout in this library's layout."""
    q, k, v, out, dout = rows
    p = real("dropout_p", dropout_p)
    if p > 0.0 and rng_state is None:
        raise ShapeError("rng_state is None with dropout; wanted the forward's, which says what was dropped; pass it on")
    seed = None if p == 0.0 or rng_state is None else rng_state[:1]
    alibi, keywords = settings.alibi, settings._replace(alibi=None)._asdict()
    del keywords["alibi"]
    cu_q, cu_k = (None, None) if starts is None else starts
    max_q, max_k = (None, None) if longest is None else longest
    problem = make_problem(
        q, k, v, make_spec(**keywords, dropout_p=p), alibi=alibi, seed=seed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q=max_q,
        max_k=max_k,
    )  # fmt: skip
    lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    return backends.partial_backward(problem, q, k, v, out, lse, dout, target.default_backend(q.device))


def _products(dout: Tensor, out: Tensor) -> Tensor:
    """Sums of dout · out, (..., H)."""
    return (dout.float() * out.float()).sum(-1)


def _state(seed: Tensor | None, q: Tensor) -> Tensor:
    """rng_state (2,) of a seed."""
    return torch.zeros(2, dtype=torch.int64, device=q.device) if seed is None else torch.nn.functional.pad(seed, (0, 1))
