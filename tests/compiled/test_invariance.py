"""The same bits from compiled code: a step of one token or several, alone and in a batch, over contiguous memory and pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from andrea_triton import decode_attention
from andrea_triton.cache import Cache, KVCache, PagedKVCache
from tests.compiled.emulated import emulated

LENGTH, NEW, HQ, HKV, D = 70, 3, 2, 1, 32


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("sm_80", torch.float16), *(pytest.param("sm_90", d, marks=pytest.mark.slow) for d in (torch.bfloat16, torch.float32))],
    ids=str,
)
def test_decode(target: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, heads, LENGTH, D).to(dtype) for heads in (HQ, HKV, HKV))

    def steps(cache: Cache, rows: int) -> tuple[Tensor, Tensor]:
        """The last three tokens, `rows` at a time, in parts of 32 keys."""
        batch, results = cache.batch, []
        cache.append(k[:batch, :, :-NEW], v[:batch, :, :-NEW])
        for at in range(LENGTH - NEW, LENGTH, rows):
            new = [x[:batch, :, at : at + rows] for x in (q, k, v)]
            cache.append(*new[1:])
            results.append(decode_attention(new[0], cache, window=50, split_size=32, return_lse=True, backend="interpreter"))
        out, lse = zip(*results, strict=True)
        return torch.cat(out, 2)[:1], torch.cat(lse, 2)[:1]

    with emulated(target):
        wanted = steps(KVCache(1, HKV, LENGTH, D, dtype=dtype), NEW)
        for cache, rows in (
            (KVCache(1, HKV, 200, D, dtype=dtype), 1),
            (PagedKVCache(1, HKV, LENGTH, D, page_size=16, dtype=dtype), NEW),
            (KVCache(2, HKV, LENGTH, D, dtype=dtype), NEW),
        ):
            got = steps(cache, rows)
            assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
    assert wanted[0].isfinite().all() and wanted[1].isfinite().all()
