"""A KV cache in pages of equal size, which sequences and caches share until one of them writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from .base import Cache, Device, Rows, check_size


class PagedKVCache(Cache):
    """Pages of equal size, handed to sequences as they grow: short sequences leave memory for long ones. A fork shares them, and
    gives back what it held when it is deleted or reset.

    Row r of sequence b is row r % page_size of page page_table[b, r // page_size].

    Args:
        batch: sequences.
        kv_heads: heads of keys and values.
        capacity: most rows of a sequence.
        head_dim: features of a key.
        page_size: rows of a page.
        pages: pages in all; None means enough for every sequence at full capacity.
        v_head_dim: features of a value; None means head_dim.
        dtype: of keys and values.
        device: where they lie.

    Raises:
        ShapeError: a size is wrong.

    Example:
        >>> cache = PagedKVCache(2, 4, 64, 8, page_size=16, pages=5)
        >>> cache.append(torch.randn(2, 4, 20, 8), torch.randn(2, 4, 20, 8), rows=[20, 3])
        >>> cache.free_pages, cache.page_table[:, :2].tolist()
        (2, [[0, 1], [2, 5]])
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        page_size: int = 16,
        pages: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
    ) -> None:
        super().__init__(batch, kv_heads, capacity, head_dim, v_head_dim, dtype, device)
        check_size("page_size", page_size)
        per_sequence = _pages_for(capacity, page_size)
        self.page_size = page_size
        self.pages = batch * per_sequence if pages is None else pages
        check_size("pages", self.pages)
        # The page behind the last takes the padding, and stands in the table where a sequence has no page yet.
        shape = (self.pages + 1, kv_heads, page_size)
        self._pool = Pool(self.pages)
        with torch.inference_mode(False):
            self.k_pages = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            self.v_pages = torch.zeros(*shape, self.v_head_dim, dtype=dtype, device=device)
            self._make_room()

    def __del__(self) -> None:
        for owned in getattr(self, "_owned", ()):
            self._pool.release(owned)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has, neither here nor in a fork."""
        return len(self._pool.free)

    def reserve(self, lengths: Sequence[int]) -> None:
        """Give each sequence the pages for this many rows in all, its own where others have one that it would write to. After a
        fork or a reorder, a compiled call needs it anew.

        Args:
            lengths: (batch,) rows, those that it holds included.

        Raises:
            ShapeError: the cache is too small; no page was given.
        """
        super().reserve(lengths)
        fresh = [max(0, _pages_for(length, self.page_size) - len(own)) for length, own in zip(lengths, self._owned, strict=True)]
        shared, free = self._shared(lengths), self.free_pages
        if sum(fresh) + len(shared) > free:
            raise ShapeError(
                f"{sum(fresh) + len(shared)} more pages of {self.page_size} rows are wanted; {free} of {self.pages} are free; "
                f"make the cache with more pages, or reset sequences that are done"
            )
        if shared:
            self._copy_pages(shared)
        for sequence, number in enumerate(fresh):
            if number:
                new, owned = self._pool.take(number), self._owned[sequence]
                ids = torch.tensor(new, dtype=torch.int32).to(self.page_table.device)
                self.page_table[sequence, len(owned) : len(owned) + number] = ids
                owned.extend(new)

    def _shared(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """(sequence, index in its table) of the pages that growing to these lengths writes to, and that others have too."""
        found: list[tuple[int, int]] = []
        if self._pool.surplus:
            holders = dict(enumerate(self._pool.holders))
            for sequence, (count, length) in enumerate(zip(self.counts, lengths, strict=True)):
                used = self._owned[sequence][: _pages_for(length, self.page_size)] if length > count else []
                for index in range(count // self.page_size, len(used)):
                    if holders[used[index]] > 1:
                        holders[used[index]] -= 1
                        found.append((sequence, index))
        return found

    def _copy_pages(self, places: Sequence[tuple[int, int]]) -> None:
        """Give sequences pages of their own in the place of shared ones."""
        old = [self._owned[sequence][index] for sequence, index in places]
        new = self._pool.take(len(old))
        for x in (self.k_pages, self.v_pages):
            x[new] = x[old]
        rows, columns = zip(*places, strict=True)
        self.page_table[list(rows), list(columns)] = torch.tensor(new, dtype=torch.int32).to(self.page_table.device)
        for (sequence, index), page in zip(places, new, strict=True):
            self._owned[sequence][index] = page
        self._pool.release(old)

    def reset(self, sequence: int | None = None) -> None:
        """Forget the rows of one sequence, or of all, and take its pages back.

        Args:
            sequence: its index, None for all.

        Raises:
            ShapeError: there is no such sequence.
        """
        super().reset(sequence)
        for index in range(self.batch) if sequence is None else [sequence]:
            self._keep(index, 0)

    def crop(self, lengths: int | Rows) -> None:
        """Forget the last rows of sequences, and take back the pages that they alone filled, where the host knows the lengths.

        Args:
            lengths: as in Cache.

        Raises:
            ShapeError, DTypeError: as in Cache.
        """
        super().crop(lengths)
        if self._counts is not None:
            for sequence, count in enumerate(self._counts):
                self._keep(sequence, _pages_for(count, self.page_size))

    def keys_values(self, longest: int) -> tuple[Tensor, Tensor]:
        """The first rows of every sequence, gathered into a copy.

        Args:
            longest: number of rows, at most capacity.

        Returns:
            k (batch, kv_heads, longest, head_dim), v (batch, kv_heads, longest, v_head_dim).
        """
        table = self.page_table[:, : _pages_for(longest, self.page_size)]
        k, v = (pages[table].transpose(1, 2).flatten(2, 3)[:, :, :longest] for pages in (self.k_pages, self.v_pages))
        return k, v

    def _write(self, k: Tensor, v: Tensor, slots: Tensor, real: Tensor | None) -> None:
        slots = slots if real is None else slots.clamp_min(0)  # padding may lie before the first row
        page = self.page_table[self._sequences, slots // self.page_size]
        if real is not None:
            page = torch.where(real, page, self.pages)
        self.k_pages[page, :, slots % self.page_size] = k
        self.v_pages[page, :, slots % self.page_size] = v

    def _pages(self) -> tuple[Tensor | None, int, int]:
        return self.page_table, self.page_size, self.pages

    def _make_room(self) -> None:
        self._owned: list[list[int]] = [[] for _ in range(self.batch)]
        per_sequence = _pages_for(self.capacity, self.page_size)
        self.page_table = torch.full((self.batch, per_sequence), self.pages, dtype=torch.int32, device=self.lengths.device)

    def _take(self, other: Cache, chosen: Sequence[int]) -> None:
        assert isinstance(other, PagedKVCache)
        used = [_pages_for(count, self.page_size) for count in other.counts]
        taken = [other._owned[sequence][: used[sequence]] for sequence in chosen]
        for owned in taken:
            self._pool.hold(owned)
        for owned in self._owned:
            self._pool.release(owned)
        self._owned = taken
        table = [owned + [self.pages] * (self.page_table.shape[1] - len(owned)) for owned in taken]
        self.page_table.copy_(torch.tensor(table, dtype=torch.int32))

    def _keep(self, sequence: int, pages: int) -> None:
        """Give back all pages of a sequence but the first."""
        owned = self._owned[sequence]
        if len(owned) > pages:
            self._pool.release(owned[pages:])
            del owned[pages:]
            self.page_table[sequence, pages:] = self.pages

    def _moved(self, device: torch.device, dtype: torch.dtype) -> Cache:
        other = super()._moved(device, dtype)
        assert isinstance(other, PagedKVCache)
        other._pool = Pool(self.pages)
        for owned in other._owned:
            other._pool.hold(owned)
        return other


class Pool:
    """Who has which page: how many sequences hold each, and which are free.

    Args:
        pages: pages in all.
    """

    def __init__(self, pages: int) -> None:
        self.holders = [0] * pages
        self.free = list(reversed(range(pages)))
        self.surplus = 0  # holders beside the first of each page

    def take(self, number: int) -> list[int]:
        """Free pages, as many as that, each with one holder."""
        taken = [self.free.pop() for _ in range(number)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """One holder more of each page."""
        for page in pages:
            if self.holders[page]:
                self.surplus += 1
            self.holders[page] += 1
        unheld = {page for page in pages if self.holders[page] == 1}
        if unheld and not unheld.isdisjoint(self.free):
            self.free = [page for page in self.free if page not in unheld]

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each page; the first of them is the next to be taken."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page]:
                self.surplus -= 1
            else:
                self.free.append(page)


def _pages_for(rows: int, page_size: int) -> int:
    return -(-rows // page_size)
