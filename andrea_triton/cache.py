"""Keys and values of tokens already seen: preallocated memory of static shape, and a length of its own for each sequence.

A cache belongs to one layer. `append` puts new rows behind those of each sequence. After it, row i of the M appended rows of
sequence b sits at position lengths[b] - M + i, and so does the query made from the same token. Where the sequences of a batch
grow by different amounts, the shorter ones bring padding in front: `rows` says how many of the last rows are real.

Device work has static shapes and waits for nothing, so that it can be captured in a graph. A replayed graph moves the lengths on
the device only: `reserve` before it what it will fill, and `recount` after it. A call under torch.compile moves them there too,
one compile for all lengths; it gives no pages, so `reserve` them before it; `counts` reads the device when it is next asked.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import DTypeError, ShapeError
from .growth import check_room, end_op

Rows = Sequence[int] | Tensor
Device = torch.device | str


class Cache(ABC):
    """What both caches share: the lengths, and the checks before anything is written.

    Attributes:
        lengths: (batch,) int32 on the device, rows that each sequence holds.
        batch, kv_heads, capacity, head_dim, v_head_dim: sizes; capacity is the most rows of a sequence.
        dtype: of keys and values.
    """

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, v_head_dim: int | None, dtype: torch.dtype, device: Device
    ) -> None:
        self.batch, self.kv_heads, self.capacity, self.head_dim = batch, kv_heads, capacity, head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.dtype = dtype
        for name in ("batch", "kv_heads", "capacity", "head_dim", "v_head_dim"):
            _check_size(name, getattr(self, name))
        with torch.inference_mode(False):  # what is made under it could not be written to outside
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self._slots = torch.arange(capacity, device=device)
            self._sequences = torch.arange(batch, device=device)[:, None]
        self._counts: list[int] | None = [0] * batch

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """A cache of its own memory, whichever mode it is copied under."""
        other = memo[id(self)] = object.__new__(type(self))
        with torch.inference_mode(False):
            for name, value in vars(self).items():
                setattr(other, name, copy.deepcopy(value, memo))
        return other

    @property
    def counts(self) -> list[int]:
        """The lengths on the host. After a compiled call it reads them from the device, which waits for it."""
        if self._counts is None:
            self.recount()
        assert self._counts is not None
        return self._counts

    def append(self, k: Tensor, v: Tensor, rows: Rows | None = None) -> None:
        """Put rows behind those that each sequence holds; nothing is written when a check fails.

        Args:
            k: keys (batch, kv_heads, M, head_dim), dtype and device of the cache; kept without gradient.
            v: values (batch, kv_heads, M, v_head_dim).
            rows: for each sequence, how many of its last rows are real, 0 to M; None means all M. As a tensor (batch,) of
                integers it is read, which waits for a GPU, but not under torch.compile.

        Raises:
            ShapeError: a shape does not fit, or the cache is too small; in a compiled call, where the lengths lie on a CPU.
            DTypeError: another dtype or device.
        """
        self._check_tensors(k, v)
        M = k.shape[2]
        k, v = k.detach().transpose(1, 2), v.detach().transpose(1, 2)
        if torch.compiler.is_compiling():
            new = None if rows is None else rows_tensor(rows, self.lengths.device)
            end = end_op(self.lengths, new, *self._pages(), M, self.capacity)
            grown = None  # unknown to the host, which a graph must not ask
        else:
            counts = self._checked_rows(rows, M)
            grown = [count + more for count, more in zip(self.counts, counts, strict=True)]
            self.reserve(grown)
            end = self.lengths + (M if rows is None else rows_tensor(counts, self.lengths.device))
        slots = end[:, None] - M + self._slots[:M]
        self._write(k, v, slots, None if rows is None else slots >= self.lengths[:, None])
        self.lengths.copy_(end)
        self._counts = grown

    def reserve(self, lengths: Sequence[int]) -> None:
        """Make sure that each sequence has memory for this many rows in all.

        Args:
            lengths: (batch,) rows, those that it holds included.

        Raises:
            ShapeError: the cache is too small.
        """
        check_room(lengths, self.capacity)

    def reset(self, sequence: int | None = None) -> None:
        """Forget the rows of one sequence, or of all.

        Args:
            sequence: its index, None for all.

        Raises:
            ShapeError: there is no such sequence.
        """
        for index in range(self.batch) if sequence is None else [self._checked_sequence(sequence)]:
            self.lengths[index] = 0
            if self._counts is not None:
                self._counts[index] = 0

    def recount(self) -> None:
        """Read the lengths back from the device, which waits for it. Needed only where a graph replayed appends."""
        self._counts = self.lengths.tolist()

    @abstractmethod
    def keys_values(self, longest: int) -> tuple[Tensor, Tensor]:
        """The first rows of every sequence; what lies behind a sequence's length is finite and means nothing.

        Args:
            longest: number of rows, at most capacity.

        Returns:
            k (batch, kv_heads, longest, head_dim), v (batch, kv_heads, longest, v_head_dim).
        """

    @abstractmethod
    def _write(self, k: Tensor, v: Tensor, slots: Tensor, real: Tensor | None) -> None:
        """Store k, v (batch, M, kv_heads, D) at slots (batch, M), where real or everywhere."""

    def _pages(self) -> tuple[Tensor | None, int, int]:
        """The page table, rows of a page, and what stands in the table in the place of a page."""
        return None, 1, 0

    def _check_tensors(self, k: Tensor, v: Tensor) -> None:
        for name, tensor, features in (("k", k, self.head_dim), ("v", v, self.v_head_dim)):
            if tensor.dtype != self.dtype or tensor.device != self.lengths.device:
                raise DTypeError(
                    f"{name} is {tensor.dtype} on {tensor.device}; the cache is {self.dtype} on {self.lengths.device}; "
                    f"move it with {name}.to(cache.lengths.device, cache.dtype)"
                )
            wanted = (self.batch, self.kv_heads, k.shape[2] if k.dim() == 4 else -1, features)
            if tuple(tensor.shape) != wanted:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}; wanted (batch, kv_heads, M, features) = {wanted}, M as in k; "
                    f"make the cache with these sizes"
                )

    def _checked_rows(self, rows: Rows | None, M: int) -> Sequence[int]:
        if rows is None:
            return [M] * self.batch
        if isinstance(rows, Tensor):
            if rows.is_floating_point() or rows.dtype == torch.bool or rows.dim() != 1:
                got = f"rows is a tensor {tuple(rows.shape)} of {rows.dtype}"
                raise DTypeError(f"{got}; wanted ({self.batch},) of int32 or int64; pass rows.long()")
            rows = rows.tolist()
        try:
            counts = [operator.index(row) for row in rows]
        except TypeError as error:
            raise DTypeError(f"rows is {rows!r}; wanted {self.batch} integers from 0 to {M}; None means all {M}") from error
        if len(counts) != self.batch or not all(0 <= row <= M for row in counts):
            raise ShapeError(f"rows is {counts}; wanted {self.batch} numbers from 0 to {M}; None means all {M}")
        return counts

    def _checked_sequence(self, sequence: int) -> int:
        if not 0 <= sequence < self.batch:
            raise ShapeError(f"sequence is {sequence}; the cache has {self.batch}; wanted 0 to {self.batch - 1}")
        return sequence


class KVCache(Cache):
    """One block of memory per sequence.

    Args:
        batch: sequences.
        kv_heads: heads of keys and values.
        capacity: most rows of a sequence.
        head_dim: features of a key.
        v_head_dim: features of a value; None means head_dim.
        dtype: of keys and values.
        device: where they lie.

    Raises:
        ShapeError: a size is wrong.

    Example:
        >>> cache = KVCache(2, 4, 16, 8)
        >>> cache.append(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), rows=[3, 1])
        >>> cache.counts, cache.k.shape
        ([3, 1], torch.Size([2, 4, 16, 8]))
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
    ) -> None:
        super().__init__(batch, kv_heads, capacity, head_dim, v_head_dim, dtype, device)
        # The row behind the last takes the padding.
        with torch.inference_mode(False):
            self._k = torch.zeros(batch, kv_heads, capacity + 1, head_dim, dtype=dtype, device=device)
            self._v = torch.zeros(batch, kv_heads, capacity + 1, self.v_head_dim, dtype=dtype, device=device)

    @property
    def k(self) -> Tensor:
        """Keys (batch, kv_heads, capacity, head_dim), a view."""
        return self._k[:, :, : self.capacity]

    @property
    def v(self) -> Tensor:
        """Values (batch, kv_heads, capacity, v_head_dim), a view."""
        return self._v[:, :, : self.capacity]

    def keys_values(self, longest: int) -> tuple[Tensor, Tensor]:
        """The first rows of every sequence, as views.

        Args:
            longest: number of rows, at most capacity.

        Returns:
            k (batch, kv_heads, longest, head_dim), v (batch, kv_heads, longest, v_head_dim).
        """
        return self._k[:, :, :longest], self._v[:, :, :longest]

    def _write(self, k: Tensor, v: Tensor, slots: Tensor, real: Tensor | None) -> None:
        if real is not None:
            slots = torch.where(real, slots, self.capacity)
        self._k[self._sequences, :, slots], self._v[self._sequences, :, slots] = k, v


class PagedKVCache(Cache):
    """Pages of equal size, handed to sequences as they grow: short sequences leave memory for long ones.

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
        _check_size("page_size", page_size)
        per_sequence = _pages_for(capacity, page_size)
        self.page_size = page_size
        self.pages = batch * per_sequence if pages is None else pages
        _check_size("pages", self.pages)
        # The page behind the last takes the padding, and stands in the table where a sequence has no page yet.
        shape = (self.pages + 1, kv_heads, page_size)
        with torch.inference_mode(False):
            self.k_pages = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            self.v_pages = torch.zeros(*shape, self.v_head_dim, dtype=dtype, device=device)
            self.page_table = torch.full((batch, per_sequence), self.pages, dtype=torch.int32, device=device)
        self._owned: list[list[int]] = [[] for _ in range(batch)]
        self._free = list(reversed(range(self.pages)))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def reserve(self, lengths: Sequence[int]) -> None:
        """Give each sequence the pages for this many rows in all.

        Args:
            lengths: (batch,) rows, those that it holds included.

        Raises:
            ShapeError: the cache is too small; no page was given.
        """
        super().reserve(lengths)
        wanted = [
            max(0, _pages_for(length, self.page_size) - len(owned)) for length, owned in zip(lengths, self._owned, strict=True)
        ]
        if sum(wanted) > len(self._free):
            raise ShapeError(
                f"{sum(wanted)} more pages of {self.page_size} rows are wanted; {len(self._free)} of {self.pages} are free; "
                f"make the cache with more pages, or reset sequences that are done"
            )
        for sequence, number in enumerate(wanted):
            if number:
                new, owned = [self._free.pop() for _ in range(number)], self._owned[sequence]
                ids = torch.tensor(new, dtype=torch.int32).to(self.page_table.device)
                self.page_table[sequence, len(owned) : len(owned) + number] = ids
                owned.extend(new)

    def reset(self, sequence: int | None = None) -> None:
        """Forget the rows of one sequence, or of all, and take its pages back.

        Args:
            sequence: its index, None for all.

        Raises:
            ShapeError: there is no such sequence.
        """
        super().reset(sequence)
        for index in range(self.batch) if sequence is None else [sequence]:
            self._free.extend(reversed(self._owned[index]))
            self._owned[index] = []
            self.page_table[index] = self.pages

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


def rows_tensor(rows: Rows, device: torch.device) -> Tensor:
    """Rows of each sequence as (batch,) int32 on a device."""
    return (rows if isinstance(rows, Tensor) else torch.tensor(rows)).to(device, torch.int32)


def _pages_for(rows: int, page_size: int) -> int:
    return -(-rows // page_size)


def _check_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise DTypeError(f"{name} is a {type(size).__name__}; wanted an int; pass int({name})")
    if size < 1:
        raise ShapeError(f"{name} is {size}; wanted at least 1")
