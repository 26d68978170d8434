"""torch's varlen_attn under its own name and signature: each sequence by the definition, packed, in slots and in pages."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import ShapeError, attention
from andrea_triton.integrations.varlen import AuxRequest, varlen_attn, varlen_attn_out

HQ, D = 4, 8
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 1), (0, -1)]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def wanted(q: list[Tensor], k: list[Tensor], v: list[Tensor], window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Each sequence alone, by the reference, in fp64."""
    sides = tuple(None if side < 0 else side for side in window)
    pairs = [
        attention(
            *(x.double().transpose(0, 1)[None] for x in rows), window=sides, scale=0.3, return_lse=True, backend="reference"
        )
        for rows in zip(q, k, v, strict=True)
    ]
    return torch.cat([out[0].transpose(0, 1) for out, _ in pairs]), torch.cat([lse[0] for _, lse in pairs], 1)


def rows(lengths: list[int], heads: int) -> list[Tensor]:
    return [torch.randn(n, heads, D) for n in lengths]


def judge(got: Any, right: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, right, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-6, rtol=2e-6)


def test_signatures_are_torchs() -> None:
    theirs = pytest.importorskip("torch.nn.attention.varlen")
    for ours in (varlen_attn, varlen_attn_out):
        other = inspect.signature(getattr(theirs, ours.__name__)).parameters
        mine = inspect.signature(ours).parameters
        if "num_splits" not in other:
            pytest.skip("an older torch, with fewer arguments")
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [(p.name, p.kind, p.default) for p in other.values()]
    assert AuxRequest._fields == theirs.AuxRequest._fields


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("kv_heads", [HQ, 2])
def test_packed(window: tuple[int, int], kv_heads: int) -> None:
    M, N = [3, 0, 7, 1], [5, 2, 7, 9]
    q, k, v = rows(M, HQ), rows(N, kv_heads), rows(N, kv_heads)
    packed = [torch.cat(x).requires_grad_() for x in (q, k, v)]
    settings: dict[str, Any] = {"scale": 0.3, "window_size": window, "enable_gqa": kv_heads != HQ}
    got = varlen_attn(*packed, starts(M), starts(N), 7, 9, return_aux=AuxRequest(lse=True), **settings)
    right = wanted(q, k, v, window)
    judge([x.detach() for x in got], right)
    assert all(x is not None for x in torch.autograd.grad(got[0].sum(), packed))
    out = torch.empty_like(packed[0])
    assert varlen_attn_out(out, *packed, starts(M), starts(N), 7, 9, **settings) is out
    judge([out], right[:1])


def test_slots_longer_than_their_sequences() -> None:
    M, slots, used = [2, 1, 3], [8, 8, 8], [5, 8, 3]
    q, k, v = rows(M, HQ), rows(slots, HQ), rows(slots, HQ)
    right = wanted(q, [x[:n] for x, n in zip(k, used, strict=True)], [x[:n] for x, n in zip(v, used, strict=True)], (-1, 0))
    seqused, packed = torch.tensor(used, dtype=torch.int32), [torch.cat(x) for x in (q, k, v)]
    settings: dict[str, Any] = {"scale": 0.3, "window_size": (-1, 0), "seqused_k": seqused, "return_aux": AuxRequest(True)}
    judge(varlen_attn(*packed, starts(M), starts(slots), 3, 8, **settings), right)


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("M", [[1, 1, 1], [2, 2, 2], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("window", [(-1, 0), (2, 0)], ids=str)
def test_pages(M: list[int], splits: int | None, window: tuple[int, int]) -> None:
    """In their place where the queries are as many in each sequence, else gathered; nothing but the table says where rows are."""
    used, page, kv_heads = [5, 11, 3], 4, 2
    q, k, v = rows(M, HQ), rows(used, kv_heads), rows(used, kv_heads)
    order, table, pages = torch.randperm(12).tolist(), torch.full((3, 3), -1, dtype=torch.int32), []
    for _ in (k, v):
        pages.append(torch.full((12, page, kv_heads, D), float("nan")))
    for b, n in enumerate(used):
        for at in range(-(-n // page)):
            table[b, at] = order.pop()
            for memory, x in zip(pages, (k, v), strict=True):
                part = x[b][at * page : (at + 1) * page]
                memory[table[b, at]] = 0.0
                memory[table[b, at], : len(part)] = part
    settings: dict[str, Any] = {"scale": 0.3, "window_size": window, "enable_gqa": True, "return_aux": AuxRequest(True)}
    settings |= {"seqused_k": torch.tensor(used, dtype=torch.int32), "block_table": table.clamp(min=0), "num_splits": splits}
    got = varlen_attn(torch.cat(q), *pages, starts(M), None, max(M), 11, **settings)
    judge(got, wanted(q, k, v, window))


def test_what_does_not_fit_is_named() -> None:
    q, k, at = torch.randn(4, 4, 8), torch.randn(4, 2, 8), starts([4])
    for call, message in (
        (lambda: varlen_attn(q, k, k, at, at, 4, 4), "query has 4 heads and key 2; .*enable_gqa=True"),
        (lambda: varlen_attn(q[:, :3], k, k, at, at, 4, 4, enable_gqa=True), "query has 3 heads and key 2"),
        (lambda: varlen_attn(q, q, q, at, None, 4, 4), "cu_seq_k is None without block_table"),
        (lambda: varlen_attn(q, q, q, at, at, 4, 4, block_table=at[None]), "query has 3 dims and key 3"),
        (lambda: varlen_attn(q, q[None], q[None], at, at, 4, 4, block_table=at[None]), "block_table came without seqused_k"),
        (lambda: varlen_attn_out(q[:3], q, q, q, at, at, 4, 4), "out is"),
    ):
        with pytest.raises(ShapeError, match=message):
            call()
