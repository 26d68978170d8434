"""Decoding with what changes scores: bias, masks, the caller's own functions, and trees of draft tokens. Each sequence by the
dense call over its own keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import DTypeError, Mask, Score, ShapeError, UnsupportedError, attention, decode_attention
from andrea_triton.cache import Cache
from tests.backends import KERNELS
from tests.test_decode import filled

LENGTHS, M, HQ, HKV = [21, 3, 9], 5, 4, 2
PAGES = pytest.mark.parametrize("page", [None, 4])


def judge(cache: Cache, q: Tensor, backend: str, given: dict[str, Any], alone: list[dict[str, Any]], **settings: Any) -> None:
    """The call against the reference in fp64 for each sequence, which gets its own part of what was given."""
    out, lse = decode_attention(q, cache, **given, **settings, split_size=16, return_lse=True, backend=backend)
    k, v = cache.keys_values(max(cache.counts))
    for b, (n, own) in enumerate(zip(cache.counts, alone, strict=True)):
        rows = (x.double() for x in (q[b, None], k[b, None, :, :n], v[b, None, :, :n]))
        wanted = attention(*rows, causal=True, **settings, **own, return_lse=True, backend="reference")
        torch.testing.assert_close(out[b, None].double(), wanted[0], atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(lse[b, None].double(), wanted[1], atol=2e-6, rtol=2e-5)


def queries() -> Tensor:
    return torch.randn(3, HQ, M, 8)


def branches() -> Tensor:
    """Tokens 1 and 2 continue token 0, 3 continues 1, 4 continues 2."""
    tree = torch.eye(M, dtype=torch.bool)
    for token, parents in ((1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 2])):
        tree[token, parents] = True
    return tree


def dense(tree: Tensor, n: int) -> Tensor:
    """The mask over all n keys that a tree stands for."""
    seen = torch.ones(M, n, dtype=torch.bool)
    for i in range(M):
        for j in range(M):
            if n - M + j >= 0:
                seen[i, n - M + j] = tree[i, j]
    return seen


@PAGES
@pytest.mark.parametrize("shape", [(3, HQ, M), (1, 1, M), (HQ, 1)], ids=str)
def test_bias_and_mask(backend: str, page: int | None, shape: tuple[int, ...]) -> None:
    cache, q = filled(LENGTHS, HKV, page), queries()
    bias, mask = torch.randn(*shape, cache.capacity), torch.rand(*shape, cache.capacity) < 0.7
    full = [x.expand(3, HQ, M, cache.capacity) for x in (bias, mask)]
    alone = [{"bias": full[0][b, None, ..., :n], "mask": full[1][b, None, ..., :n]} for b, n in enumerate(LENGTHS)]
    alone = [own | {"bias": own["bias"].double()} for own in alone]
    judge(cache, q, backend, {"bias": bias, "mask": mask}, alone, softcap=3.0)


@PAGES
@pytest.mark.parametrize("window", [None, 3])
def test_trees(backend: str, page: int | None, window: int | None) -> None:
    cache, q = filled(LENGTHS, HKV, page), queries()
    judge(cache, q, backend, {"tree": branches()}, [{"mask": dense(branches(), n)} for n in LENGTHS], window=window)
    each = torch.rand(3, M, M) < 0.5
    mask = torch.rand(M, cache.capacity) < 0.8
    alone = [{"mask": dense(each[b], n) & mask[:, :n]} for b, n in enumerate(LENGTHS)]
    judge(cache, q, backend, {"tree": each, "mask": mask}, alone, window=window)


def test_a_tree_is_its_branches_one_by_one(backend: str) -> None:
    """Each leaf's row equals that of a cache which holds nothing but its own branch."""
    cache, k, v, q = filled([6], HKV, None), *(torch.randn(1, h, M, 8) for h in (HKV, HKV, HQ))
    long = filled([6 + M], HKV, None)
    long.reset()
    for part in (cache.keys_values(6), (k, v)):
        long.append(*part)
    got = decode_attention(q, long, tree=branches(), backend=backend)
    for branch in ([0, 1, 3], [0, 2, 4]):
        alone = filled([6 + M], HKV, None)
        alone.reset()
        for part in (cache.keys_values(6), (k[:, :, branch], v[:, :, branch])):
            alone.append(*part)
        wanted = decode_attention(q[:, :, branch], alone, backend=backend)
        torch.testing.assert_close(got[:, :, branch], wanted, atol=2e-6, rtol=2e-5)


@PAGES
@pytest.mark.parametrize("with_tree", [False, True])
def test_functions_of_the_caller(backend: str, page: int | None, with_tree: bool) -> None:
    pytest.importorskip("triton")
    from andrea_triton.testing.functors import distance_penalty, same_document

    cache, q = filled(LENGTHS, HKV, page), queries()
    ids = torch.arange(cache.capacity) // 4 % 2
    mask = Mask(same_document, (ids,), lambda b, h, q_pos, k_pos, ids: ids[q_pos.clamp_min(0)] == ids[k_pos])
    score = Score(distance_penalty, args=(0.1,), torch_fn=lambda s, b, h, q_pos, k_pos, rate: s * (1 + rate * (q_pos - k_pos)))
    if not with_tree:
        judge(cache, q[:, :, :2], backend, {"mask": mask, "score": score}, [{"mask": mask, "score": score}] * 3)
        return
    at = [(n - M + torch.arange(M)).clamp_min(0) for n in LENGTHS]
    seen = [(ids[rows][:, None] == ids[:n]) & dense(branches(), n) for rows, n in zip(at, LENGTHS, strict=True)]
    judge(cache, q, backend, {"mask": mask, "score": score, "tree": branches()}, [{"mask": x, "score": score} for x in seen])


def test_functions_see_the_entry_of_the_batch(backend: str) -> None:
    """Where sequences of several lengths are taken one by one, they are still 0, 1 and 2."""
    if backend in KERNELS:
        pytest.skip("the twin on dense tensors is not asked there")
    cache, q = filled(LENGTHS, HKV, None), queries()
    score = Score(None, torch_fn=lambda s, b, h, q_pos, k_pos: s * (b + 1))
    alone = [Score(None, torch_fn=lambda s, b, h, q_pos, k_pos, t=b + 1: s * t) for b in range(3)]
    judge(cache, q, backend, {"score": score}, [{"score": own} for own in alone])


def test_operator(backend: str) -> None:
    if backend == "reference":
        pytest.skip("the operator takes any backend alike")
    cache, q = filled(LENGTHS, HKV, 4), queries()
    bias, mask = torch.randn(M, cache.capacity), torch.rand(3, 1, 1, cache.capacity) < 0.7

    def call(q: Tensor, bias: Tensor, mask: Tensor, tree: Tensor) -> Tensor:
        out = decode_attention(q, cache, bias=bias, mask=mask, tree=tree, backend=backend)
        assert isinstance(out, Tensor)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, bias, mask, branches()), call(q, bias, mask, branches()))


def test_what_does_not_fit_is_named() -> None:
    cache, q = filled(LENGTHS, HKV, None), queries()
    for wrong, error, message in (
        ({"tree": branches()[:3]}, ShapeError, r"tree has shape \(3, 5\); wanted \(5, 5\) or \(3, 5, 5\)"),
        ({"tree": branches().float()}, DTypeError, "tree is torch.float32"),
        ({"bias": torch.randn(M, 7)}, ShapeError, "bias has shape"),
        ({"bias": torch.randn(M, cache.capacity, requires_grad=True)}, UnsupportedError, "a gradient of bias"),
    ):
        with pytest.raises(error, match=message):
            decode_attention(q, cache, **wrong)
