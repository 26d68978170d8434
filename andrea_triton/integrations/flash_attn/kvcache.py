"""flash-attn's function for a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ShapeError, UnsupportedError
from ..lent_cache import attend, write
from .arguments import Integer, Number, Result, Sides, integer, settled
from .layers.rotary import turn


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: Integer | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: Number | None = None, causal: bool = False, window_size: Sides = (-1, -1), softcap: Number = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: Integer = 0,
    return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Attention to a cache, after new keys and values were written into it, in place. No gradient.

    With L keys in a sequence, the new ones included, query i sits at position L - M + i. A left pad gathers the keys.

    Args:
        q: queries (B, M, HQ, D).
        k_cache: keys (B or more, N, HKV, D), or pages (pages, page size, HKV, D) where block_table is given. Written to
            where k is given.
        v_cache: values, likewise.
        k: (B, new, HKV, D) to be written behind the keys of each sequence.
        v: (B, new, HKV, DV) likewise.
        rotary_cos: (positions, R / 2) float, turns the first R features of q and k by their positions; only with k.
        rotary_sin: likewise.
        cache_seqlens: keys in each sequence, before the new ones: (B,) int32, or one int; None means N, only without k.
        cache_batch_idx: (B,) int32, the row of the cache that is sequence b; not with block_table.
        cache_leftpad: (B,) int32, keys at the front of each sequence that are padding; positions count from the
            first of them for rotary_cos, from behind them for windows and slopes.
        block_table: (B, pages of a sequence) int32, the pages of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`, with L for N.
        rotary_interleaved: features 2i and 2i + 1 are a pair, not i and i + R / 2.
        num_splits: parts that the keys are split into; 0 means parts of 512. With 0 and 1 a row's bits depend neither on the
            batch nor on the capacity.
        return_softmax_lse: return (out, lse) with lse (B, HQ, M) fp32.

    Returns:
        out (B, M, HQ, DV), or (out, lse).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `andrea_triton.decode_attention`; also cache_batch_idx with
            block_table, which flash-attn refuses too.

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
        raise UnsupportedError("cache_batch_idx", "flash_attn with block_table", "index the block_table itself")
    pages = cache_batch_idx[:, None] if cache_batch_idx is not None else block_table
    if (k is None) != (v is None):
        raise ShapeError("of k and v only one was given; wanted both, to be written, or none; pass the other too")
    q, settings = settled(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    capacity = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    lengths = _lengths(cache_seqlens, q, capacity, k)
    if rotary_cos is not None:
        if k is None or rotary_sin is None:
            raise ShapeError("rotary_cos came without k or rotary_sin; wanted them too; turn q alone before the call")
        still = not settings.causal and settings.window == (None, None)
        places = (lengths[:, None] + torch.arange(x.shape[1], device=q.device) for x in (q, k))
        of_q, of_k = places
        q = turn(q, lengths[:, None].expand_as(of_q) if still else of_q, rotary_cos, rotary_sin, rotary_interleaved)
        k = turn(k, of_k, rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None and v is not None:
        at = lengths[:, None] + torch.arange(k.shape[1], device=q.device)
        write(k_cache, k, at, pages)
        write(v_cache, v, at, pages)
        lengths = lengths + k.shape[1]
    splits = max(integer("num_splits", num_splits), 0)
    out, lse = attend(q, k_cache, v_cache, lengths, pages, cache_leftpad, settings, splits)
    return (out.transpose(1, 2), lse) if return_softmax_lse else out.transpose(1, 2)


def _lengths(given: Integer | None, q: Tensor, capacity: int, k: Tensor | None) -> Tensor:
    """(B,) int32 keys that each sequence holds before the new ones."""
    new = 0 if k is None else k.shape[1]
    if given is None and k is not None:
        raise ShapeError("cache_seqlens is None with new keys; wanted how many there are before them; pass 0 for an empty cache")
    if not isinstance(given, Tensor):
        held = capacity if given is None else integer("cache_seqlens", given)
        given = torch.full((q.shape[0],), held, dtype=torch.int32, device=q.device)
    if given.dim() > 1 or given.numel() not in (1, q.shape[0]):
        got = f"cache_seqlens has shape {tuple(given.shape)}"
        raise ShapeError(f"{got}; wanted ({q.shape[0]},), one for each sequence; slice or expand it")
    if given.is_cpu and given.numel() and not 0 <= int(given.min()) <= int(given.max()) <= capacity - new:
        got = f"cache_seqlens has {int(given.min())} to {int(given.max())}, and there are {new} new keys"
        raise ShapeError(f"{got}; wanted 0 to {capacity - new}, what the cache has room for; make it longer")
    return given.to(q.device, torch.int32).expand(q.shape[0]).contiguous()
