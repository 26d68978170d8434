"""flash-attn's functions for sequences that lie one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional import varlen_attention
from ..lent_cache import gathered
from .arguments import Integer, Number, Result, Sides, drawn, integer, real, settled, unpacked
from .probabilities import signed_weights_packed


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Integer, max_seqlen_k: Integer,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False, window_size: Sides = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of sequences that lie one after the other.

    Args:
        q: queries (total_q, HQ, D).
        k: keys (total_k, HKV, D), or with block_table pages of them (pages, page size, HKV, D).
        v: values (total_k, HKV, DV), or pages.
        cu_seqlens_q: (sequences + 1,) int32, where each sequence's queries start, and the end of the last.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: queries of the longest sequence, or more.
        max_seqlen_k: the same for the keys.
        alibi_slopes: (HQ,) or (sequences, HQ).
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in `flash_attn_func`, with
            M and N of each sequence; lse is (HQ, total_q), and weights (sequences, HQ, max_seqlen_q, max_seqlen_k).
        block_table: (sequences, pages of a sequence) integers, the pages of each sequence, whose lengths cu_seqlens_k says. The
            keys are gathered, so that they have a gradient.

    Returns:
        out (total_q, HQ, DV), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `andrea_triton.varlen_attention`; also a page that is not there (on a CPU).

    Source:
        flash-attn 2.8, flash_attn_varlen_func.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, starts, starts, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])
    """
    q, settings = settled(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    longest = integer("max_seqlen_q", max_seqlen_q), integer("max_seqlen_k", max_seqlen_k)
    p = real("dropout_p", dropout_p)
    seed = drawn(p, q)
    starts = cu_seqlens_q, cu_seqlens_k
    if block_table is not None:
        k, v, _ = gathered(k, v, torch.zeros_like(cu_seqlens_k[1:]), cu_seqlens_k.diff(), block_table, longest[1])
    out, lse = varlen_attention(
        q, k, v, *starts, *longest, **settings._asdict(), dropout_p=p, seed=seed, return_lse=True
    )  # fmt: skip
    if not return_attn_probs:
        return out
    return out, lse, q.new_empty(0) if seed is None else signed_weights_packed(q, k, starts, longest, settings, p, seed)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Integer, dropout_p: Number = 0.0, softmax_scale: Number | None = None,
    causal: bool = False, window_size: Sides = (-1, -1), softcap: Number = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_varlen_func of q, k and v in one tensor.

    Args:
        qkv: (total, 3, H, D).
        cu_seqlens: (sequences + 1,) int32, where each sequence starts, and the end of the last.
        max_seqlen: rows of the longest sequence, or more.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_varlen_func`.

    Returns:
        out (total, H, D), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_varlen_func`.

    Source:
        flash-attn 2.8, flash_attn_varlen_qkvpacked_func.

    Example:
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(5, 3, 2, 8), starts, 3).shape
        torch.Size([5, 2, 8])
    """
    q, k, v = unpacked("qkv", qkv, 3, "(total, 3, H, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Integer, max_seqlen_k: Integer,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False, window_size: Sides = (-1, -1),
    softcap: Number = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_varlen_func of k and v in one tensor.

    Args:
        q: queries (total_q, HQ, D).
        kv: (total_k, 2, HKV, D).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
            alibi_slopes, deterministic, return_attn_probs: as in `flash_attn_varlen_func`.

    Returns:
        out (total_q, HQ, D), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `flash_attn_varlen_func`.

    Source:
        flash-attn 2.8, flash_attn_varlen_kvpacked_func.

    Example:
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(torch.randn(5, 4, 8), torch.randn(5, 2, 2, 8), starts, starts, 3, 3).shape
        torch.Size([5, 4, 8])
    """
    k, v = unpacked("kv", kv, 2, "(total_k, 2, HKV, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
