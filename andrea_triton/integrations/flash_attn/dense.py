"""flash-attn's functions for (B, T, H, D) tensors."""

from __future__ import annotations

from torch import Tensor

from ...functional import attention
from .arguments import Number, Result, Sides, drawn, real, settled, unpacked
from .probabilities import signed_weights


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: Number = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of (B, T, H, D) tensors; the last query meets the last key.

    Args:
        q: queries (B, M, HQ, D).
        k: keys (B, N, HKV, D); HQ is a multiple of HKV.
        v: values (B, N, HKV, DV).
        dropout_p: probability that a weight is dropped.
        softmax_scale: factor of q·k; None means 1/sqrt(D).
        causal: query i sees keys up to i + N - M.
        window_size: (left, right): query i sees keys from i + N - M - left to i + N - M + right; a negative side is open.
        softcap: bound of the scores, 0.0 for none.
        alibi_slopes: (HQ,) or (B, HQ) float; -slope·|i + N - M - j| is added.
        deterministic: taken; the backward always is.
        return_attn_probs: return (out, lse, weights) with lse (B, HQ, M) fp32, and weights empty without dropout; with it
            (B, HQ, M, N), the matrix before dropout, negative where a weight was dropped, without gradient.

    Returns:
        out (B, M, HQ, DV), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `andrea_triton.attention`.

    Source:
        flash-attn 2.8, flash_attn_func.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 5, 2, 8)
        >>> flash_attn_func(x, x, x, causal=True, window_size=(2, 0)).shape
        torch.Size([1, 5, 2, 8])
    """
    q, settings = settled(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    p = real("dropout_p", dropout_p)
    seed = drawn(p, q)
    out, lse = attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **settings._asdict(), dropout_p=p, seed=seed, return_lse=True
    )  # fmt: skip
    if not return_attn_probs:
        return out.transpose(1, 2)
    return out.transpose(1, 2), lse, q.new_empty(0) if seed is None else signed_weights(q, k, settings, p, seed)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: Number = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_func of q, k and v in one tensor.

    Args:
        qkv: (B, T, 3, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns:
        out (B, T, H, D), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_func`.

    Source:
        flash-attn 2.8, flash_attn_qkvpacked_func.

    Example:
        >>> import torch
        >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 3, 2, 8)).shape
        torch.Size([1, 5, 2, 8])
    """
    q, k, v = unpacked("qkv", qkv, 3, "(B, T, 3, H, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: Number = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_func of k and v in one tensor.

    Args:
        q: queries (B, M, HQ, D).
        kv: (B, N, 2, HKV, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns:
        out (B, M, HQ, D), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_func`.

    Source:
        flash-attn 2.8, flash_attn_kvpacked_func.

    Example:
        >>> import torch
        >>> flash_attn_kvpacked_func(torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 2, 8)).shape
        torch.Size([1, 5, 4, 8])
    """
    k, v = unpacked("kv", kv, 2, "(B, N, 2, HKV, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
