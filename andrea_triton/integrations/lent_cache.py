"""A KV cache in tensors that the caller owns, as flash-attn has it: read, written in place, and asked by many queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import Cache, PagedKVCache
from ..decode import decode_attention
from ..errors import UnsupportedError
from ..functional import varlen_attention


class Settings(NamedTuple):
    """What a call says about its scores, in this library's keywords."""

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None]
    softcap: float | None
    alibi: Tensor | None


class LentCache(Cache):
    """flash-attn's cache (B, N, H, D) as one to read from."""

    def __init__(self, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        self.k, self.v, self.lengths = k.transpose(1, 2), v.transpose(1, 2), lengths
        self.batch, self.kv_heads, self.capacity, self.head_dim = self.k.shape

    @property
    def counts(self) -> list[int]:
        """The lengths on the host: only backends without kernels ask."""
        return self.lengths.tolist()

    def keys_values(self, longest: int) -> tuple[Tensor, Tensor]:
        """As Cache has it."""
        return self.k[:, :, :longest], self.v[:, :, :longest]

    def _write(self, k: Tensor, v: Tensor, slots: Tensor, real: Tensor | None) -> None:
        raise UnsupportedError("append", "a cache that was lent", "write to the tensors themselves")


class LentPages(PagedKVCache):
    """flash-attn's pages (pages, page size, H, D) and table as a cache to read from."""

    def __init__(self, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> None:
        self.k_pages, self.v_pages, self.lengths = k.transpose(1, 2), v.transpose(1, 2), lengths
        self.page_table, self.page_size = table.to(torch.int32), k.shape[1]
        self.batch, self.capacity = table.shape[0], table.shape[1] * k.shape[1]

    @property
    def counts(self) -> list[int]:
        """The lengths on the host: only backends without kernels ask."""
        return self.lengths.tolist()


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, pages: Tensor | None, left_pad: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Attention of (B, M, HQ, D) queries to what a cache holds: by the kernels for few queries, or those for packed sequences.

    Args:
        q: queries (B, M, HQ, D).
        k: keys (B, N, HKV, D), or pages of keys (pages, page size, HKV, D).
        v: values, likewise.
        lengths: (B,) int32 keys of each sequence; query i sits at position lengths[b] - M + i.
        pages: (B, pages of a sequence) int32, or None.
        left_pad: (B,) int32 keys at the front that nobody sees, or None; not with pages.
        settings: of the scores.

    Returns:
        out (B, HQ, M, DV) and lse (B, HQ, M).
    """
    if left_pad is None:
        cache = LentCache(k, v, lengths) if pages is None else LentPages(k, v, lengths, pages)
        out, lse = decode_attention(q.transpose(1, 2), cache, **settings._asdict(), return_lse=True)
        return out, lse
    return _attend_packed(q, k, v, left_pad, lengths, settings)


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """attend() by packed sequences: the unused rows before and after each one's keys are sequences too, without queries."""
    B, M, N = *q.shape[:2], k.shape[1]
    row = torch.arange(B, device=q.device)
    cu_k = torch.stack([row * N + starts, row * N + ends], 1).flatten()
    cu_q = torch.stack([row * M, row * M + M], 1).flatten()
    cu_q, cu_k = (torch.nn.functional.pad(cu.to(torch.int32), (1, 0)) for cu in (cu_q, cu_k))
    if settings.alibi is not None and settings.alibi.dim() == 2:
        settings = settings._replace(alibi=settings.alibi.repeat_interleave(2, 0))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = varlen_attention(q, k, v, cu_q, cu_k, M, 2 * N, **settings._asdict(), return_lse=True)
    return out.unflatten(0, (B, M)).transpose(1, 2), lse.unflatten(1, (B, M)).transpose(0, 1)


def write(cache: Tensor, rows: Tensor, places: Tensor, pages: Tensor | None) -> None:
    """Store rows behind those that each sequence holds.

    Args:
        cache: (B, N, H, D), or pages (pages, page size, H, D); written to.
        rows: (B, new, H, D).
        places: (B, new) integer positions of the rows.
        pages: (B, pages of a sequence) integers, or None.
    """
    sequence = torch.arange(rows.shape[0], device=rows.device)[:, None]
    if pages is not None:
        sequence, places = pages[sequence, places // cache.shape[1]], places % cache.shape[1]
    cache[sequence, places] = rows.to(cache.dtype)


def turn(x: Tensor, first: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, still: bool = False) -> Tensor:
    """The rotary embedding of the first features of rows.

    Args:
        x: (B, T, H, D).
        first: (B,) integer positions of row 0.
        cos: (positions, R / 2) float.
        sin: likewise.
        interleaved: features 2i and 2i + 1 are a pair, not i and i + R / 2.
        still: every row is at the position of row 0, not at those after it.

    Returns:
        (B, T, H, D), dtype of x, turned in at least fp32.

    Source:
        arXiv 2104.09864, equation 34.
    """
    dtype, size = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[-1]
    places = first[:, None] + torch.arange(x.shape[1], device=x.device) * (not still)
    c, s = cos[places][:, :, None].to(dtype), sin[places][:, :, None].to(dtype)
    pairs = x[..., :size].to(dtype)
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * c - b * s, a * s + b * c], -1)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2).to(x.dtype), x[..., size:]], -1)
