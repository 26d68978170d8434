"""Caches cut back, reordered, forked, moved and saved: both kinds do the same, and pages are shared until one is written to."""

import copy
import gc
import io

import pytest
import torch
from torch import Tensor

from andrea_triton import DTypeError, ShapeError, decode_attention
from andrea_triton.cache import Cache, KVCache, PagedKVCache

HEADS, D, DV, CAPACITY = 2, 4, 6, 14


def rows_of(batch: int, M: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, M, D), torch.randn(batch, HEADS, M, DV)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
class TestBothKinds:
    """What a cache holds is compared with lists of rows, to which the same was done."""

    @pytest.fixture
    def filled(self, kind: str) -> tuple[Cache, list[Tensor]]:
        """A cache of sequences with 5, 9 and 3 rows (a page has 4), and the keys of each."""
        if kind == "contiguous":
            cache: Cache = KVCache(3, HEADS, CAPACITY, D, v_head_dim=DV)
        else:
            cache = PagedKVCache(3, HEADS, CAPACITY, D, page_size=4, pages=40, v_head_dim=DV)
        k, v = rows_of(3, 9)
        cache.append(k, v, [5, 9, 3])
        return cache, [k[b, :, 9 - n :] for b, n in enumerate([5, 9, 3])]

    def grow(self, cache: Cache, held: list[Tensor], rows: list[int]) -> list[Tensor]:
        k, v = rows_of(cache.batch, 4)
        cache.append(k, v, rows)
        return [torch.cat((old, k[b, :, 4 - n :]), 1) for b, (old, n) in enumerate(zip(held, rows, strict=True))]

    def judge(self, cache: Cache, held: list[Tensor]) -> None:
        lengths = [rows.shape[1] for rows in held]
        assert cache.counts == cache.lengths.tolist() == lengths and cache.batch == len(held)
        k, v = cache.keys_values(CAPACITY)
        assert v.isfinite().all()
        for b, rows in enumerate(held):
            assert torch.equal(k[b, :, : rows.shape[1]], rows)
        q = torch.randn(cache.batch, HEADS, 1, D)
        out = decode_attention(q, cache)
        for b, rows in enumerate(held):
            alone = KVCache(1, HEADS, CAPACITY, D, v_head_dim=DV)
            alone.append(rows[None], v[b, None, :, : rows.shape[1]])
            torch.testing.assert_close(out[b, None], decode_attention(q[b, None], alone))

    def test_crop(self, filled: tuple[Cache, list[Tensor]]) -> None:
        cache, held = filled
        cache.crop([5, 6, 0])
        self.judge(cache, held := [held[0], held[1][:, :6], held[2][:, :0]])
        self.judge(cache, held := self.grow(cache, held, [4, 1, 3]))
        cache.crop(4)
        self.judge(cache, held := [rows[:, :4] for rows in held])
        cache.crop(torch.tensor([9, 2, 1]))
        self.judge(cache, self.grow(cache, [held[0], held[1][:, :2], held[2][:, :1]], [2, 2, 2]))

    def test_crop_in_a_compiled_call(self, filled: tuple[Cache, list[Tensor]]) -> None:
        cache, held = filled
        torch._dynamo.reset()
        torch.compile(cache.crop, backend="eager", fullgraph=True)(torch.tensor([2, 20, 1]))
        self.judge(cache, held := [held[0][:, :2], held[1], held[2][:, :1]])
        self.judge(cache, self.grow(cache, held, [3, 1, 4]))

    def test_reorder(self, filled: tuple[Cache, list[Tensor]]) -> None:
        cache, held = filled
        for order in ([1, 0, 2], [2, 2, 0], torch.tensor([1, 1, 1])):
            cache.reorder(order)
            self.judge(cache, held := [held[b] for b in order])
            self.judge(cache, held := self.grow(cache, held, [1, 0, 2]))

    def test_fork(self, filled: tuple[Cache, list[Tensor]]) -> None:
        """Whoever grows, is cut or emptied, the others keep what they have."""
        cache, held = filled
        fork = cache.fork([1, 0, 0, 2])
        forked = [held[1], held[0], held[0], held[2]]
        self.judge(fork, forked)
        forked = self.grow(fork, forked, [1, 2, 3, 4])
        held = self.grow(cache, held, [4, 4, 1])
        self.judge(cache, held)
        self.judge(fork, forked)
        second = fork.fork()
        fork.crop(3)
        grown = self.grow(fork, [rows[:, :3] for rows in forked], [1, 1, 1, 1])
        self.judge(fork, grown)
        self.judge(second, forked)
        cache.reset()
        self.judge(fork, grown)
        self.judge(second, self.grow(second, forked, [0, 1, 1, 1]))

    def test_fork_and_reorder_leave_memory_that_a_graph_holds(self, filled: tuple[Cache, list[Tensor]]) -> None:
        cache, held = filled
        before = {name: t.data_ptr() for name, t in vars(cache).items() if isinstance(t, Tensor)}
        with torch.inference_mode():
            fork = cache.fork()
            cache.reorder([1, 0, 2])
        cache.crop(4)
        assert {name: t.data_ptr() for name, t in vars(cache).items() if isinstance(t, Tensor)} == before
        self.judge(fork, self.grow(fork, held, [1, 1, 1]))

    def test_to(self, filled: tuple[Cache, list[Tensor]]) -> None:
        cache, held = filled
        assert cache.to("cpu") is cache
        double = cache.to(dtype=torch.float64)
        assert double.dtype == torch.float64 and double.keys_values(1)[0].dtype == torch.float64
        assert torch.equal(double.keys_values(5)[0][0].float(), held[0])
        double.append(*(t.double() for t in rows_of(3, 1)))
        self.judge(cache, self.grow(cache, held, [1, 4, 2]))
        assert cache.to("meta").lengths.device.type == "meta"

    @pytest.mark.parametrize("page_size", [None, 3])
    def test_state(self, filled: tuple[Cache, list[Tensor]], page_size: int | None) -> None:
        """From either kind to either kind, through a file."""
        cache, held = filled
        file = io.BytesIO()
        torch.save(cache.state_dict(), file)
        file.seek(0)
        sizes = (3, HEADS, 10, D)
        other = KVCache(*sizes, v_head_dim=DV) if page_size is None else PagedKVCache(*sizes, page_size=page_size, v_head_dim=DV)
        other.append(*rows_of(3, 2))
        other.load_state_dict(torch.load(file))
        assert other.counts == [5, 9, 3]
        for mine, its in zip(cache.keys_values(9), other.keys_values(9), strict=True):
            assert all(torch.equal(mine[b, :, :n], its[b, :, :n]) for b, n in enumerate(other.counts))
        self.grow(other, held, [1, 1, 1])
        state = cache.state_dict()
        for wrong, message in (
            ({"k": state["k"]}, "the state has"),
            ({**state, "lengths": state["lengths"] + 1}, "lengths is"),
            ({**state, "k": state["k"][:2]}, "k has shape"),
        ):
            with pytest.raises(ShapeError, match=message):
                other.load_state_dict(wrong)
        assert other.counts == [6, 10, 4]

    def test_what_does_not_fit_is_named(self, filled: tuple[Cache, list[Tensor]]) -> None:
        cache, held = filled
        for call, wrong in (
            (cache.crop, -1),
            (cache.crop, [1, 2]),
            (cache.reorder, [0, 1, 3]),
            (cache.reorder, [0]),
            (cache.fork, [3]),
            (cache.fork, []),
        ):
            with pytest.raises(ShapeError, match="wanted"):
                call(wrong)  # type: ignore[operator]
        with pytest.raises(DTypeError, match="order is"):
            cache.reorder([0.5, 1, 2])  # type: ignore[list-item]
        self.judge(cache, held)


def test_pages_are_counted() -> None:
    """A prompt of 10 rows takes 3 pages for one sample and for four; each sample then copies the page that it writes to."""
    prompt = PagedKVCache(1, HEADS, CAPACITY, D, page_size=4, pages=7, v_head_dim=DV)
    prompt.append(*rows_of(1, 10))
    samples = prompt.fork([0] * 4)
    assert prompt.free_pages == samples.free_pages == 4
    samples.append(*rows_of(4, 1))
    assert samples.free_pages == 0, "the prompt keeps the page that the four copied"
    with pytest.raises(ShapeError, match=r"4 more pages of 4 rows are wanted; 0 of 7 are free"):
        samples.append(*rows_of(4, 2))
    samples.reorder([0, 0, 0, 0])
    assert samples.free_pages == 3
    samples.reset(3)
    assert samples.free_pages == 3, "another still holds what it had"
    del samples
    gc.collect()
    assert prompt.free_pages == 4
    prompt.append(*rows_of(1, 1))
    prompt.reset()
    assert prompt.free_pages == 7 and sorted(prompt._pool.free) == list(range(7)) and prompt._pool.surplus == 0


def test_pages_reserved_before_a_fork_are_not_shared() -> None:
    cache = PagedKVCache(1, HEADS, CAPACITY, D, page_size=4, pages=20, v_head_dim=DV)
    cache.append(*rows_of(1, 3))
    cache.reserve([12])
    assert cache.free_pages == 17
    fork = cache.fork([0, 0])
    assert cache.free_pages == 17
    fork.append(*rows_of(2, 6))
    assert cache.free_pages == 17 - 2 * 3
    cache.crop(2)
    assert cache.free_pages == 17 - 2 * 3 + 2


def test_a_copy_counts_its_own_pages() -> None:
    cache = PagedKVCache(1, HEADS, CAPACITY, D, page_size=4, pages=9, v_head_dim=DV)
    cache.append(*rows_of(1, 6))
    fork = cache.fork([0, 0])
    fork.append(*rows_of(2, 4))
    other = copy.deepcopy(fork)
    assert isinstance(other, PagedKVCache) and other.free_pages == 9 - 5 and cache.free_pages == 9 - 6
    assert torch.equal(other.keys_values(10)[0], fork.keys_values(10)[0])
    other.append(*rows_of(2, 1))
    assert fork.counts == [10, 10] and other.counts == [11, 11]
