"""A KV cache in tensors that the caller owns, as flash-attn has it: read, written in place, and asked by many queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import Cache, PagedKVCache
from ..decode import SPLIT_SIZE, decode_attention
from ..errors import ShapeError, UnsupportedError
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

    def _make_room(self) -> None:
        raise UnsupportedError("fork", "a cache that was lent", "copy the tensors themselves")

    def _take(self, other: Cache, chosen: Sequence[int]) -> None:
        raise UnsupportedError("reorder", "a cache that was lent", "write to the tensors themselves")


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
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, pages: Tensor | None, left_pad: Tensor | None, settings: Settings,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of (B, M, HQ, D) queries to what a cache holds: by the kernels for few queries, or those for packed sequences.

    Args:
        q: queries (B, M, HQ, D).
        k: keys (B, N, HKV, D), or pages of keys (pages, page size, HKV, D).
        v: values, likewise.
        lengths: (B,) int32 keys of each sequence; query i sits at position lengths[b] - M + i.
        pages: (B, pages of a sequence) int32, or None.
        left_pad: (B,) int32 keys at the front that nobody sees, or None.
        settings: of the scores.
        splits: parts that the keys are split into, where there is room for as many; 0 means parts of the library's size. A left
            pad has no parts.

    Returns:
        out (B, HQ, M, DV) and lse (B, HQ, M).
    """
    if left_pad is None:
        cache = LentCache(k[: q.shape[0]], v[: q.shape[0]], lengths) if pages is None else LentPages(k, v, lengths, pages)
        size = -(-cache.capacity // (16 * splits)) * 16 if splits and cache.capacity else SPLIT_SIZE
        out, lse = decode_attention(q.transpose(1, 2), cache, **settings._asdict(), return_lse=True, split_size=size)
        return out, lse
    return _attend_packed(q, k, v, left_pad, lengths, pages, settings)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, pages: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """attend() by packed sequences of the keys from starts to ends."""
    B, M = q.shape[:2]
    if pages is None:
        pages = torch.arange(B, device=q.device)[:, None]
    most = pages.shape[1] * k.shape[1]
    k, v, cu_k = gathered(k, v, starts, ends - starts, pages, most)
    cu_q = torch.arange(B + 1, dtype=torch.int32, device=q.device) * M
    out, lse = varlen_attention(q.flatten(0, 1), k, v, cu_q, cu_k, M, most, **settings._asdict(), return_lse=True)
    return out.unflatten(0, (B, M)).transpose(1, 2), lse.unflatten(1, (B, M)).transpose(0, 1)


def gathered(k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, pages: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of sequences out of their pages, one sequence after the other; differentiable. Waits for no GPU, where slack rows
    follow in its place.

    Args:
        k: pages of keys (pages, page size, HKV, D).
        v: pages of values (pages, page size, HKV, DV).
        starts: (B,) integers, the first row of each sequence that is wanted.
        lengths: (B,) integers, how many rows are wanted.
        pages: (B, pages of a sequence) integers.
        most: rows of the longest sequence, or more.

    Returns:
        k (rows, HKV, D), v (rows, HKV, DV) and cu_seqlens (B + 1,) int32.

    Raises:
        ShapeError: (on a CPU) rows or pages that are not there.
    """
    B, size = pages.shape[0], k.shape[1]
    capacity = pages.shape[1] * size
    lengths = lengths.clamp(min=0)
    if lengths.is_cpu and B and not int(starts.min()) >= 0 <= capacity - int((starts + lengths).max()):
        got = f"a sequence has rows up to {int((starts + lengths).max())}, one starts at {int(starts.min())}"
        raise ShapeError(f"{got}; wanted 0 to {capacity}, the rows of its pages; give it more pages")
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    row = torch.arange(int(cu[-1]) if cu.is_cpu else B * min(most, capacity), device=k.device)
    sequence = torch.searchsorted(cu[1:].contiguous(), row, right=True).clamp(max=max(B - 1, 0))
    at = (row - cu[sequence] + starts.long()[sequence]).clamp(0, max(capacity - 1, 0))
    page, place = pages.long()[sequence, at // max(size, 1)], at % max(size, 1)
    _check_pages(page, k.shape[0])
    return k[page, place], v[page, place], cu.to(torch.int32)


def _check_pages(page: Tensor, pages: int) -> None:
    """Fail where a page that is used is not there; a GPU is not asked."""
    if page.is_cpu and page.numel() and not 0 <= int(page.min()) <= int(page.max()) < pages:
        got = f"pages {int(page.min())} to {int(page.max())} are used"
        raise ShapeError(f"{got}; wanted 0 to {pages - 1}, the pages that there are; mend the table")


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
        sequence, places = pages.long()[sequence, places // max(cache.shape[1], 1)], places % max(cache.shape[1], 1)
        _check_pages(sequence, cache.shape[0])
    cache[sequence, places] = rows.to(cache.dtype)
