"""flash-attn 2's functions by this library: the same names, signatures and meanings, so that code changes one import.

    from andrea_triton.integrations.flash_attn import flash_attn_func        # was: from flash_attn import flash_attn_func

Beyond flash-attn: any float dtype, head dims from 1, values of another head dim, any device. Two things differ. A query that sees
no key has lse -inf, where flash-attn writes +inf. And `return_attn_probs` gives out and lse, but no weights: where there are none
in flash-attn either (no dropout) the third result is empty, and with dropout it is an UnsupportedError.

deterministic is taken and always true: the gradients are the same bits every time. num_splits is taken and has no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from ..functional import attention, varlen_attention
from .lent_cache import Settings, attend, turn, write

NAME = "flash_attn"
Result = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
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
        return_attn_probs: return (out, lse, weights) with lse (B, HQ, M) fp32 and weights empty.

    Returns:
        out (B, M, HQ, DV), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `andrea_triton.attention`; also weights that dropout was applied to.

    Source:
        flash-attn 2.8, flash_attn_func.

    Example:
        >>> x = torch.randn(1, 5, 2, 8)
        >>> flash_attn_func(x, x, x, causal=True, window_size=(2, 0)).shape
        torch.Size([1, 5, 2, 8])
    """
    out, lse = attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=softmax_scale, window=_window(window_size),
        softcap=softcap or None, alibi=alibi_slopes, dropout_p=dropout_p, return_lse=True,
    )  # fmt: skip
    return _results(out.transpose(1, 2), lse, dropout_p, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
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
        >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 3, 2, 8)).shape
        torch.Size([1, 5, 2, 8])
    """
    q, k, v = _unpacked("qkv", qkv, 3, "(B, T, 3, H, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
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
        >>> flash_attn_kvpacked_func(torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 2, 8)).shape
        torch.Size([1, 5, 4, 8])
    """
    k, v = _unpacked("kv", kv, 2, "(B, N, 2, HKV, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of sequences that lie one after the other.

    Args:
        q: queries (total_q, HQ, D).
        k: keys (total_k, HKV, D).
        v: values (total_k, HKV, DV).
        cu_seqlens_q: (sequences + 1,) int32, where each sequence's queries start, and the end of the last.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: queries of the longest sequence, or more.
        max_seqlen_k: the same for the keys.
        alibi_slopes: (HQ,) or (sequences, HQ).
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in `flash_attn_func`, with
            M and N of each sequence; lse is (HQ, total_q).
        block_table: not supported; None.

    Returns:
        out (total_q, HQ, DV), or (out, lse, weights).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `andrea_triton.varlen_attention`; also block_table.

    Source:
        flash-attn 2.8, flash_attn_varlen_func.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, starts, starts, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])
    """
    if block_table is not None:
        raise UnsupportedError("block_table", "flash_attn_varlen_func", "use flash_attn_with_kvcache, or keys without pages")
    out, lse = varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, scale=softmax_scale,
        window=_window(window_size), softcap=softcap or None, alibi=alibi_slopes, dropout_p=dropout_p, return_lse=True,
    )  # fmt: skip
    return _results(out, lse, dropout_p, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
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
    q, k, v = _unpacked("qkv", qkv, 3, "(total, 3, H, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
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
    k, v = _unpacked("kv", kv, 2, "(total_k, 2, HKV, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Attention to a cache, after new keys and values were written into it, in place. No gradient.

    With L keys in a sequence, the new ones included, query i sits at position L - M + i. Few queries (128 rows of M queries times
    query heads per key head) take the kernels that split the keys; more, or a left pad, the kernels for packed sequences, which
    copy a cache whose first two dims are not one block of memory.

    Args:
        q: queries (B, M, HQ, D).
        k_cache: keys (B, N, HKV, D), or pages (pages, page size, HKV, D) where block_table is given. Written to where k is given.
        v_cache: values, likewise.
        k: (B, new, HKV, D) to be written behind the keys of each sequence.
        v: (B, new, HKV, DV) likewise.
        rotary_cos: (positions, R / 2) float, turns the first R features of q and k by their positions; only with k.
        rotary_sin: likewise.
        cache_seqlens: keys in each sequence, before the new ones: (B,) int32, or one int; None means N, only without k.
        cache_batch_idx: (B,) int32, the row of the cache that is sequence b; the kernels want N to be a multiple of 16.
        cache_leftpad: (B,) int32, keys at the front of each sequence that are padding.
        block_table: (B, pages of a sequence) int32; the kernels want a page size that is a multiple of 16.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`, with L for N.
        rotary_interleaved: features 2i and 2i + 1 are a pair, not i and i + R / 2.
        num_splits: taken; the library chooses.
        return_softmax_lse: return (out, lse) with lse (B, HQ, M) fp32.

    Returns:
        out (B, M, HQ, DV), or (out, lse).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `andrea_triton.decode_attention`; also cache_leftpad together with
            cache_batch_idx, block_table or rotary_cos.

    Source:
        flash-attn 2.8, flash_attn_with_kvcache; arXiv 2104.09864 (rotary embedding).

    Example:
        >>> memory, new = torch.zeros(2, 1, 16, 2, 8), torch.randn(1, 1, 2, 8)
        >>> flash_attn_with_kvcache(new, *memory, new, new, cache_seqlens=3, causal=True).shape
        torch.Size([1, 1, 2, 8])
        >>> torch.equal(memory[0, 0, 3], new[0, 0])
        True
    """
    if block_table is not None and cache_batch_idx is not None:
        raise UnsupportedError("cache_batch_idx", f"{NAME} with block_table", "index the block_table itself")
    pages = cache_batch_idx[:, None] if cache_batch_idx is not None else block_table
    if cache_leftpad is not None and (pages is not None or rotary_cos is not None):
        reason = "cut the padding off, or pass a cache without pages and keys that are already turned"
        raise UnsupportedError("cache_leftpad", f"{NAME} with cache_batch_idx, block_table or rotary_cos", reason)
    if (k is None) != (v is None):
        raise ShapeError("of k and v only one was given; wanted both, to be written, or none; pass the other too")
    capacity = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    lengths = _lengths(cache_seqlens, q, capacity, k)
    if rotary_cos is not None:
        if k is None or rotary_sin is None:
            raise ShapeError("rotary_cos came without k or rotary_sin; wanted them too; turn q alone before the call")
        still = not causal and _window(window_size) == (None, None)
        q = turn(q, lengths, rotary_cos, rotary_sin, rotary_interleaved, still)
        k = turn(k, lengths, rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None and v is not None:
        places = lengths[:, None] + torch.arange(k.shape[1], device=q.device)
        write(k_cache, k, places, pages)
        write(v_cache, v, places, pages)
        lengths = lengths + k.shape[1]
    settings = Settings(causal, softmax_scale, _window(window_size), softcap or None, alibi_slopes)
    out, lse = attend(q, k_cache, v_cache, lengths, pages, cache_leftpad, settings)
    return (out.transpose(1, 2), lse) if return_softmax_lse else out.transpose(1, 2)


def _lengths(given: int | Tensor | None, q: Tensor, capacity: int, k: Tensor | None) -> Tensor:
    """(B,) int32 keys that each sequence holds before the new ones."""
    new = 0 if k is None else k.shape[1]
    if given is None and k is not None:
        raise ShapeError("cache_seqlens is None with new keys; wanted how many there are before them; pass 0 for an empty cache")
    if not isinstance(given, Tensor):
        given = torch.full((q.shape[0],), capacity if given is None else given, dtype=torch.int32, device=q.device)
    if given.is_cpu and given.numel() and int(given.max()) + new > capacity:
        raise ShapeError(f"cache_seqlens has {int(given.max())} + {new} new keys; the cache holds {capacity}; make it longer")
    return given.to(torch.int32)


def _window(size: tuple[int, int]) -> tuple[int | None, int | None]:
    """flash-attn's window with its open sides as None."""
    left, right = size
    return None if left < 0 else left, None if right < 0 else right


def _unpacked(name: str, packed: Tensor, parts: int, wanted: str) -> tuple[Tensor, ...]:
    """Views of q, k, v or k, v."""
    if packed.dim() < 3 or packed.shape[-3] != parts:
        raise ShapeError(f"{name} has shape {tuple(packed.shape)}; wanted {wanted}; stack its parts along the third last dim")
    return packed.unbind(-3)


def _results(out: Tensor, lse: Tensor, dropout_p: float, return_attn_probs: bool) -> Result:
    """What flash-attn returns."""
    if not return_attn_probs:
        return out
    if dropout_p > 0.0:
        raise UnsupportedError(
            "return_attn_probs", f"{NAME} with dropout_p", "use andrea_triton.attention_weights and dropout_mask"
        )
    return out, lse, out.new_empty(0)
