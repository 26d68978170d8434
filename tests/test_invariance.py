"""The same bits, whatever is beside a row: decoding through the kernels, by batch, padding, chunks, pages and capacity. What ties
the tiles to batch or length is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import decode_attention
from andrea_triton.cache import Cache, KVCache, PagedKVCache
from tests.backends import KERNELS, here

pytestmark = pytest.mark.usefixtures("backend")

LENGTH, HQ, HKV, D = 75, 4, 2, 20
SETTINGS: list[dict[str, Any]] = [{}, {"window": 20}, {"softcap": 2.0, "window": (40, 0)}]
# By default one of each at a time; the whole matrix is slow.
PAIRS = [(SETTINGS[0], torch.bfloat16), (SETTINGS[1], torch.float32), (SETTINGS[2], torch.bfloat16)]
REST = [(settings, dtype) for settings in SETTINGS for dtype in (torch.float32, torch.bfloat16) if (settings, dtype) not in PAIRS]
EACH = pytest.mark.parametrize(
    ("settings", "dtype"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)], ids=str
)
Rows = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> str:
    """The kernels, in the interpreter and compiled."""
    return str(request.param)


def kernels() -> str:
    """The one that the test runs by."""
    return "interpreter" if here().type == "cpu" else "triton"


def rows_of(batch: int, length: int, dtype: torch.dtype) -> Rows:
    q, k, v = (torch.randn(batch, heads, length, D).to(dtype) for heads in (HQ, HKV, HKV))
    return q, k, v


def cache_of(batch: int, dtype: torch.dtype, page: int | None = None, capacity: int = LENGTH) -> Cache:
    if page is None:
        return KVCache(batch, HKV, capacity, D, dtype=dtype, device=here())
    return PagedKVCache(batch, HKV, capacity, D, page_size=page, dtype=dtype, device=here())


def read(cache: Cache, rows: Rows, chunk: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """out and lse of all rows, which come in chunks; parts of 32 keys, so that there are three."""
    results = []
    for start in range(0, rows[0].shape[2], chunk):
        q, k, v = (x[:, :, start : start + chunk] for x in rows)
        cache.append(k, v)
        results.append(decode_attention(q, cache, split_size=32, return_lse=True, backend=kernels(), **settings))
    out, lse = zip(*results, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_a_prompt_token_by_token() -> None:
    rows = rows_of(1, 40, torch.float32)
    at_once, one_by_one = (read(cache_of(1, torch.float32), rows, chunk, window=35) for chunk in (40, 1))
    assert same(at_once, one_by_one)


@EACH
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 16, 33])
def test_chunks(settings: dict[str, Any], dtype: torch.dtype, chunk: int) -> None:
    """A prompt at once, in chunks, and token by token."""
    rows = rows_of(1, LENGTH, dtype)
    assert same(read(cache_of(1, dtype), rows, chunk, **settings), read(cache_of(1, dtype), rows, 100, **settings))


@EACH
@pytest.mark.parametrize(("page", "capacity"), [(None, 300), (3, LENGTH), (16, 200), (128, LENGTH)], ids=str)
def test_memory(settings: dict[str, Any], dtype: torch.dtype, page: int | None, capacity: int) -> None:
    """Capacities, page sizes, and pages in another order."""
    rows, cache = rows_of(1, LENGTH, dtype), cache_of(2, dtype, page, capacity)
    both = tuple(torch.cat((x, torch.randn_like(x))) for x in rows)
    if isinstance(cache, PagedKVCache):
        cache._pool.free = cache._pool.free[1::2] + cache._pool.free[::2]
    out, lse = read(cache, (both[0], both[1], both[2]), 25, **settings)
    assert same((out[:1], lse[:1]), read(cache_of(1, dtype), rows, 100, **settings))


@EACH
def test_batch_and_padding(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """One sequence, and the same as any of seven of other lengths, padded on the left as decoding pads."""
    q, k, v = rows_of(7, LENGTH, dtype)
    lengths = [75, 1, 40, 64, 0, 33, 74]
    cache = cache_of(7, dtype, 16)
    cache.append(k, v, lengths)
    together = decode_attention(q, cache, split_size=32, return_lse=True, backend=kernels(), **settings)
    for b, n in enumerate(lengths):
        alone = tuple(x[b : b + 1, :, LENGTH - n :] for x in (q, k, v))
        wanted = read(cache_of(1, dtype), (alone[0], alone[1], alone[2]), 100, **settings) if n else None
        if wanted is not None:
            assert same((together[0][b : b + 1, :, LENGTH - n :], together[1][b : b + 1, :, LENGTH - n :]), wanted)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_heads_that_share_a_tile(heads: int) -> None:
    q, k, v = rows_of(1, LENGTH, torch.float32)
    some = q[:, : HKV * heads] if heads < 2 else torch.cat([q.repeat(1, 2, 1, 1)] * heads, 1)[:, : HKV * heads]
    got = read(cache_of(1, torch.float32), (some, k, v), 7)
    for h in range(some.shape[1]):
        key_head = h // heads
        one = KVCache(1, 1, LENGTH, D, device=here())
        wanted = read(one, (some[:, h : h + 1], *(x[:, key_head : key_head + 1] for x in (k, v))), 100)
        assert same((got[0][:, h : h + 1], got[1][:, h : h + 1]), wanted)


def tied_to(what: str) -> Any:
    """decode_tilings whose tile of keys depends on what it must not."""
    from andrea_triton.launch import plan

    honest = plan.decode_tilings

    def tilings(problem: Any, split_size: int) -> Any:
        many = {"batch": problem.B > 1, "capacity": problem.N > 100, "tokens": problem.M > 8}[what]
        return honest(problem, 16 if many else split_size)

    return tilings


@pytest.mark.parametrize("backend", KERNELS[:1], indirect=True)
@pytest.mark.parametrize("what", ["batch", "capacity", "tokens"])
def test_a_tile_tied_to_something_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from andrea_triton.launch import plan

    q, k, v = rows_of(1, 40, torch.float32)
    rows = (q, k, v)
    wanted = read(cache_of(1, torch.float32), rows, 8)
    monkeypatch.setattr(plan, "decode_tilings", tied_to(what))
    several = tuple(torch.cat((x, x)) for x in rows)
    got = {
        "batch": lambda: read(cache_of(2, torch.float32), (several[0], several[1], several[2]), 8),
        "capacity": lambda: read(cache_of(1, torch.float32, capacity=200), rows, 8),
        "tokens": lambda: read(cache_of(1, torch.float32), rows, 100),
    }[what]()
    assert not same((got[0][:1], got[1][:1]), wanted)
