"""A KV cache with one block of memory per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Cache, Device


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
        with torch.inference_mode(False):
            self._make_room()

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

    def _make_room(self) -> None:
        rows = (self.batch, self.kv_heads, self.capacity + 1)  # the row behind the last takes the padding
        self._k = torch.zeros(*rows, self.head_dim, dtype=self.dtype, device=self.lengths.device)
        self._v = torch.zeros(*rows, self.v_head_dim, dtype=self.dtype, device=self.lengths.device)

    def _take(self, other: Cache, chosen: Sequence[int]) -> None:
        assert isinstance(other, KVCache)
        moved = [b for b, sequence in enumerate(chosen) if other is not self or b != sequence]
        if moved:
            source, rows = [chosen[b] for b in moved], max(other.counts)
            self._k[moved, :, :rows] = other._k[source, :, :rows]
            self._v[moved, :, :rows] = other._v[source, :, :rows]
