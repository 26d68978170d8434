"""Caches: what is appended comes back at its place, sequences grow on their own, and a cache that is too small says so."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from andrea_triton import DTypeError, ShapeError
from andrea_triton.cache import Cache, KVCache, PagedKVCache

HEADS, D, DV = 2, 4, 6


def make(kind: str, batch: int, capacity: int) -> Cache:
    if kind == "contiguous":
        return KVCache(batch, HEADS, capacity, D, v_head_dim=DV, dtype=torch.float64)
    return PagedKVCache(batch, HEADS, capacity, D, page_size=3, v_head_dim=DV, dtype=torch.float64)


def rows_of(batch: int, M: int) -> tuple[Tensor, Tensor]:
    return (torch.randn(batch, HEADS, M, D, dtype=torch.float64), torch.randn(batch, HEADS, M, DV, dtype=torch.float64))


KINDS = pytest.mark.parametrize("kind", ["contiguous", "paged"])


@KINDS
def test_rows_come_back_in_order(kind: str) -> None:
    cache = make(kind, 3, 10)
    parts = [rows_of(3, M) for M in (4, 1, 0, 5)]
    for k, v in parts:
        cache.append(k, v)
    assert cache.counts == cache.lengths.tolist() == [10] * 3
    got_k, got_v = cache.keys_values(10)
    assert torch.equal(got_k, torch.cat([k for k, _ in parts], 2))
    assert torch.equal(got_v, torch.cat([v for _, v in parts], 2))


@KINDS
def test_sequences_grow_by_their_own_rows(kind: str) -> None:
    """Only the last `rows` of a sequence are kept, whatever NaN the padding in front of them holds."""
    cache, held = make(kind, 3, 8), [torch.zeros(HEADS, 0, D, dtype=torch.float64)] * 3
    for rows in ([4, 0, 2], [1, 3, 0], [2, 4, 4], [1, 1, 1]):
        k, v = rows_of(3, 4)
        for b, row in enumerate(rows):
            held[b] = torch.cat((held[b], k[b, :, 4 - row :]), 1)
            k[b, :, : 4 - row], v[b, :, : 4 - row] = float("nan"), float("nan")
        cache.append(k, v, rows)
    assert cache.counts == cache.lengths.tolist() == [8, 8, 7]
    got_k, got_v = cache.keys_values(8)
    assert got_v.isfinite().all()
    for b, wanted in enumerate(held):
        assert torch.equal(got_k[b, :, : cache.counts[b]], wanted)


@KINDS
@pytest.mark.parametrize("longest", [0, 1, 3, 7])
def test_any_number_of_rows_can_be_read(kind: str, longest: int) -> None:
    cache = make(kind, 2, 7)
    k, v = rows_of(2, 7)
    cache.append(k, v)
    got_k, got_v = cache.keys_values(longest)
    assert torch.equal(got_k, k[:, :, :longest]) and torch.equal(got_v, v[:, :, :longest])


@KINDS
def test_reset_of_one_sequence_and_of_all(kind: str) -> None:
    cache = make(kind, 2, 6)
    k, v = rows_of(2, 6)
    cache.append(k, v)
    cache.reset(1)
    assert cache.counts == cache.lengths.tolist() == [6, 0]
    cache.append(k[:, :, :2], v[:, :, :2], [0, 2])
    assert torch.equal(cache.keys_values(2)[0][1], k[1, :, :2])
    assert torch.equal(cache.keys_values(6)[0][0], k[0])
    cache.reset()
    assert cache.counts == cache.lengths.tolist() == [0, 0]
    with pytest.raises(ShapeError, match="sequence is 2; the cache has 2"):
        cache.reset(2)


@KINDS
def test_a_cache_that_is_too_small_says_so_and_keeps_what_it_has(kind: str) -> None:
    cache = make(kind, 2, 5)
    k, v = rows_of(2, 4)
    cache.append(k, v, [4, 1])
    before = [t.clone() for t in cache.keys_values(5)]
    with pytest.raises(ShapeError, match=r"sequence 0 would have 6 rows; the cache holds 5 per sequence; .*capacity=6"):
        cache.append(*rows_of(2, 2))
    assert cache.counts == cache.lengths.tolist() == [4, 1]
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys_values(5), strict=True))
    cache.append(k[:, :, :4], v[:, :, :4], [1, 4])
    assert cache.counts == [5, 5]


def test_pages_are_shared_given_back_and_run_out() -> None:
    cache = PagedKVCache(3, HEADS, 12, D, page_size=4, pages=4, dtype=torch.float64, v_head_dim=DV)
    k, v = rows_of(3, 9)
    cache.append(k, v, [9, 1, 0])
    assert cache.free_pages == 0
    assert sorted(cache.page_table[:2].flatten().tolist()) == [0, 1, 2, 3, 4, 4]
    with pytest.raises(ShapeError, match=r"1 more pages of 4 rows are wanted; 0 of 4 are free"):
        cache.append(k[:, :, :1], v[:, :, :1], [0, 0, 1])
    cache.append(k[:, :, :3], v[:, :, :3], [3, 3, 0])
    cache.reset(0)
    assert cache.free_pages == 3
    cache.append(k, v, [0, 0, 9])
    assert torch.equal(cache.keys_values(9)[0][2], k[2])
    assert cache.counts == [0, 4, 9]


def test_memory_and_shapes_never_change() -> None:
    """What a captured graph holds on to."""
    caches = [KVCache(2, HEADS, 8, D), PagedKVCache(2, HEADS, 8, D, page_size=4)]
    for cache in caches:
        held = [cache.lengths, *(t for t in vars(cache).values() if isinstance(t, Tensor))]
        before = [(t.data_ptr(), t.shape) for t in held]
        for _ in range(8):
            cache.append(torch.randn(2, HEADS, 1, D), torch.randn(2, HEADS, 1, D))
        cache.reset()
        now = [cache.lengths, *(t for t in vars(cache).values() if isinstance(t, Tensor))]
        assert [(t.data_ptr(), t.shape) for t in now] == before


def test_recount_reads_the_device() -> None:
    cache = KVCache(2, HEADS, 8, D)
    cache.lengths += 3
    cache.recount()
    assert cache.counts == [3, 3]


def test_no_gradient_is_kept() -> None:
    cache = KVCache(1, HEADS, 4, D)
    k = torch.randn(1, HEADS, 2, D, requires_grad=True)
    cache.append(k, k)
    assert not cache.k.requires_grad


@KINDS
def test_what_does_not_fit_is_named(kind: str) -> None:
    cache = make(kind, 2, 5)
    k, v = rows_of(2, 2)
    for bad_k, bad_v, message in (
        (k[:1], v, "k has shape"),
        (k[..., :3], v, "k has shape"),
        (k, v[:, :, :1], "v has shape"),
        (k[0], v, "k has shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            cache.append(bad_k, bad_v)
    with pytest.raises(DTypeError, match=r"k is torch.float32 on cpu; the cache is torch.float64"):
        cache.append(k.float(), v)
    for rows in ([1], [3, 0], [-1, 0]):
        with pytest.raises(ShapeError, match="wanted 2 numbers from 0 to 2"):
            cache.append(k, v, rows)
    assert cache.counts == [0, 0]


def test_sizes_are_checked() -> None:
    with pytest.raises(ShapeError, match="capacity is 0; wanted at least 1"):
        KVCache(1, 1, 0, 1)
    with pytest.raises(DTypeError, match="head_dim is a float"):
        KVCache(1, 1, 1, 8.0)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="page_size is 0"):
        PagedKVCache(1, 1, 1, 1, page_size=0)


@pytest.mark.parametrize("rows", [np.array([2, 1]), [np.int64(2), 1], [torch.tensor(2), torch.tensor(1)], (2, 1)], ids=repr)
def test_rows_of_every_kind_of_integer_are_counted_as_ints(rows: Any) -> None:
    """D26: and what is no integer is refused before anything is written."""
    for cache in (KVCache(2, 1, 8, 4), PagedKVCache(2, 1, 8, 4, page_size=4)):
        k = torch.randn(2, 1, 3, 4)
        cache.append(k, k, rows=rows)
        assert cache.counts == [2, 1] and all(type(count) is int for count in cache.counts)
        for wrong in ([2.5, 1], "ab"):
            with pytest.raises(DTypeError, match="wanted 2 integers from 0 to 3"):
                cache.append(k, k, rows=wrong)  # type: ignore[arg-type]
        assert cache.lengths.tolist() == [2, 1]
