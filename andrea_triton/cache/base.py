"""What both caches do, in terms of a few steps of each: append, crop, reorder, fork, move, save and load.

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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
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
            check_size(name, getattr(self, name))
        with torch.inference_mode(False):  # what is made under it could not be written to outside
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self._slots = torch.arange(capacity, device=device)
            self._sequences = torch.arange(batch, device=device)[:, None]
        self._counts: list[int] | None = [0] * batch

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """A cache of its own memory, whichever mode it is copied under."""
        other = memo[id(self)] = self._moved(self.lengths.device, self.dtype)
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
            counts = [M] * self.batch if rows is None else integers("rows", rows, self.batch, M, f"; None means all {M}")
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

    def crop(self, lengths: int | Rows) -> None:
        """Forget the last rows of sequences: what a draft guessed wrong, say.

        Args:
            lengths: most rows that every sequence keeps, or those of each, (batch,); a shorter sequence stays as it is. A tensor
                on a GPU, or in a compiled call, is not read: the host waits for nothing, and pages are kept.

        Raises:
            ShapeError, DTypeError: lengths are no integers from 0 to capacity, one for each sequence.
        """
        if isinstance(lengths, Tensor) and (torch.compiler.is_compiling() or not lengths.is_cpu):
            self.lengths.copy_(torch.minimum(self.lengths, rows_tensor(lengths, self.lengths.device)))
            self._counts = None
            return
        if torch.compiler.is_compiling():
            raise ShapeError(f"lengths is {lengths!r}; wanted a tensor ({self.batch},) in a compiled call")
        most = [lengths] * self.batch if isinstance(lengths, int) else lengths
        most = integers("lengths", most, self.batch, self.capacity)
        self._set_counts([min(pair) for pair in zip(self.counts, most, strict=True)])

    def reorder(self, order: Rows) -> None:
        """Let sequence b become what sequence order[b] was; one may be taken often: how beams survive.

        Args:
            order: (batch,) integers, indices of sequences.

        Raises:
            ShapeError, DTypeError: order is no such thing.
        """
        chosen = integers("order", order, self.batch, self.batch - 1)
        counts = self.counts
        self._take(self, chosen)
        self._set_counts([counts[sequence] for sequence in chosen])

    def fork(self, sequences: Rows | None = None) -> Cache:
        """A further cache that begins with what sequences of this one hold; both grow on their own. Pages are shared, and copied
        when one of those who have them writes; contiguous memory is copied at once.

        Args:
            sequences: indices of sequences of this cache, one may be taken often; None means all, once.

        Returns:
            A cache of len(sequences) sequences, with the capacity of this one.

        Raises:
            ShapeError, DTypeError: sequences are no such thing.
        """
        given: Rows = list(range(self.batch)) if sequences is None else sequences
        chosen = integers("sequences", given, len(given), self.batch - 1)
        check_size("sequences", len(chosen))
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        with torch.inference_mode(False):
            other.batch, device = len(chosen), self.lengths.device
            other.lengths = torch.zeros(other.batch, dtype=torch.int32, device=device)
            other._sequences = torch.arange(other.batch, device=device)[:, None]
            other._make_room()
        other._take(self, chosen)
        other._set_counts([self.counts[sequence] for sequence in chosen])
        return other

    def to(self, device: Device | None = None, dtype: torch.dtype | None = None) -> Cache:
        """This cache on another device or in another dtype.

        Args:
            device: None means where it lies.
            dtype: of keys and values; None means as they are.

        Returns:
            A cache of its own memory, or this one where nothing changes.
        """
        device, dtype = torch.device(device or self.lengths.device), dtype or self.dtype
        return self if (device, dtype) == (self.lengths.device, self.dtype) else self._moved(device, dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """What is held, in memory of its own: "lengths" (batch,) int32, "k" and "v" (batch, kv_heads, longest, features)."""
        k, v = self.keys_values(max(self.counts))
        return {"lengths": self.lengths.clone(), "k": k.clone(), "v": v.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Hold what another cache held, of either kind and any capacity; device and dtype stay as they are.

        Args:
            state: from `state_dict`.

        Raises:
            ShapeError: it does not fit; nothing is changed.
        """
        if set(state) != {"lengths", "k", "v"}:
            raise ShapeError(f"the state has {sorted(state)}; wanted k, lengths and v; pass what state_dict gave")
        k, v = (state[name].to(self.lengths.device, self.dtype) for name in ("k", "v"))
        self._check_tensors(k, v)
        counts = integers("lengths", state["lengths"], self.batch, min(k.shape[2], self.capacity))
        self.reset()
        self.reserve(counts)
        slots = self._slots[: max(counts)].expand(self.batch, -1)
        lengths = torch.tensor(counts, device=slots.device)[:, None]
        k, v = (x[:, :, : max(counts)].transpose(1, 2) for x in (k, v))
        self._write(k, v, slots, slots < lengths)
        self._set_counts(counts)

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

    @abstractmethod
    def _make_room(self) -> None:
        """Memory for self.batch sequences, which hold nothing yet."""

    @abstractmethod
    def _take(self, other: Cache, chosen: Sequence[int]) -> None:
        """Let sequence b hold the rows of sequence chosen[b] of a cache of the same kind, which may be this one."""

    def _set_counts(self, counts: Sequence[int]) -> None:
        self.lengths.copy_(torch.tensor(counts, dtype=torch.int32))
        self._counts = list(counts)

    def _moved(self, device: torch.device, dtype: torch.dtype) -> Cache:
        """A copy of everything, elsewhere."""
        other = object.__new__(type(self))
        with torch.inference_mode(False):
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    value = value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
                setattr(other, name, copy.deepcopy(value) if isinstance(value, list) else value)
        other.dtype = dtype
        return other

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

    def _checked_sequence(self, sequence: int) -> int:
        if not 0 <= sequence < self.batch:
            raise ShapeError(f"sequence is {sequence}; the cache has {self.batch}; wanted 0 to {self.batch - 1}")
        return sequence


def rows_tensor(rows: Rows, device: torch.device) -> Tensor:
    """Rows of each sequence as (batch,) int32 on a device."""
    return (rows if isinstance(rows, Tensor) else torch.tensor(rows)).to(device, torch.int32)


def integers(name: str, given: Rows, number: int, most: int, way_out: str = "") -> list[int]:
    """That many integers from 0 to most, on the host; a tensor is read, which waits for its device.

    Raises:
        DTypeError: not integers.
        ShapeError: another number of them, or one out of range.
    """
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dtype == torch.bool or given.dim() != 1:
            got = f"{name} is a tensor {tuple(given.shape)} of {given.dtype}"
            raise DTypeError(f"{got}; wanted ({number},) of int32 or int64; pass {name}.long()")
        given = given.tolist()
    try:
        found = [operator.index(value) for value in given]
    except TypeError as error:
        raise DTypeError(f"{name} is {given!r}; wanted {number} integers from 0 to {most}{way_out}") from error
    if len(found) != number or not all(0 <= value <= most for value in found):
        raise ShapeError(f"{name} is {found}; wanted {number} numbers from 0 to {most}{way_out}")
    return found


def check_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise DTypeError(f"{name} is a {type(size).__name__}; wanted an int; pass int({name})")
    if size < 1:
        raise ShapeError(f"{name} is {size}; wanted at least 1")
