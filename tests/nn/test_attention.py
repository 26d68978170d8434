"""The attention modules against plain PyTorch, and one pass against token by token."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import ShapeError, UnsupportedError, attention
from andrea_triton.cache import Cache, KVCache, PagedKVCache
from andrea_triton.nn import CausalSelfAttention, CrossAttention, SelfAttention
from andrea_triton.nn.attend import Call, attend_cache, naive_attention
from andrea_triton.nn.attention import rotate
from andrea_triton.testing import assert_accurate

sdpa = torch.nn.functional.scaled_dot_product_attention


def twin(layer: SelfAttention | CrossAttention, x: Tensor, context: Tensor, hidden: Tensor | None = None) -> Tensor:
    """The module again in plain PyTorch, in fp64: weights as they are, masked scores, softmax."""

    def heads(weight: Tensor, t: Tensor, count: int) -> Tensor:
        return (t.double() @ weight.double().T).unflatten(-1, (count, -1)).transpose(1, 2)

    q = heads(layer.W_Q.weight, x, layer.n_head)
    k, v = (heads(W.weight, context, layer.n_kv_head) for W in (layer.W_K, layer.W_V))
    group = layer.n_head // layer.n_kv_head
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    weights = (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1)
    out = (weights @ v.repeat_interleave(group, 1)).transpose(1, 2).flatten(2)
    return out @ layer.W_O.weight.double().T


def future(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def check(got: Tensor, exact: Tensor, eager: Tensor, name: str) -> None:
    assert_accurate(got.detach(), eager.detach(), exact.detach(), torch.float32, name)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_causal_equals_plain_pytorch(backend: str, device: str, kv_heads: int | None) -> None:
    layer = CausalSelfAttention(32, 4, kv_heads, backend=backend).to(device)
    naive = CausalSelfAttention(32, 4, kv_heads, backend="naive").to(device)
    naive.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 32, device=device)
    outs = [layer(x), naive(x), twin(layer, x, x, future(9).to(device))]
    check(outs[0], outs[2], outs[1], "out")
    names = ("W_Q", "W_K", "W_V", "W_O")
    grads = [
        torch.autograd.grad(out.square().sum(), [getattr(module, name).weight for name in names])
        for out, module in zip(outs, (layer, naive, layer), strict=True)
    ]
    for name, got, eager, exact in zip(names, *grads, strict=True):
        check(got, exact, eager, f"gradient of {name}")


def test_has_the_four_projections() -> None:
    layer = CausalSelfAttention()
    assert {name for name, _ in layer.named_parameters()} == {f"W_{c}.weight" for c in "QKVO"}
    assert layer.W_Q.weight.shape == (768, 768) and (layer.n_head, layer.head_dim) == (12, 64)
    grouped = CausalSelfAttention(64, 8, 2, bias=True)
    assert grouped.W_K.weight.shape == (16, 64) and grouped.W_O.bias is not None


def test_full_attention_with_lengths(backend: str, device: str) -> None:
    layer = SelfAttention(32, 4, backend=backend).to(device)
    naive = SelfAttention(32, 4, backend="naive").to(device)
    naive.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, 32, device=device)
    check(layer(x), twin(layer, x, x), naive(x), "full")
    lengths = torch.tensor([7, 4], device=device)
    hidden = torch.arange(7, device=device) >= lengths[:, None, None, None]
    check(layer(x, key_lengths=lengths), twin(layer, x, x, hidden), naive(x), "with lengths")
    assert torch.equal(layer(x, mask=~hidden), layer(x, mask=~hidden.expand(2, 4, 7, 7)))


def test_cross_attention(backend: str, device: str) -> None:
    layer = CrossAttention(32, 4, 2, d_context=24, backend=backend).to(device)
    x, context = torch.randn(2, 5, 32, device=device), torch.randn(2, 9, 24, device=device)
    lengths = torch.tensor([9, 3], device=device)
    hidden = torch.arange(9, device=device) >= lengths[:, None, None, None]
    naive = CrossAttention(32, 4, 2, d_context=24, backend="naive").to(device)
    naive.load_state_dict(layer.state_dict())
    check(layer(x, context), twin(layer, x, context), naive(x, context), "out")
    check(layer(x, context, context_lengths=lengths), twin(layer, x, context, hidden), naive(x, context), "with lengths")
    with pytest.raises(ShapeError, match=r"context has shape \(2, 9, 23\); wanted \(B, T, 24\)"):
        layer(x, context[..., 1:])


Make = Callable[[int, int, int, int], Cache]


def contiguous(batch: int, heads: int, capacity: int, features: int) -> Cache:
    return KVCache(batch, heads, capacity, features)


def paged(batch: int, heads: int, capacity: int, features: int) -> Cache:
    return PagedKVCache(batch, heads, capacity, features, page_size=16)


def layers(name: str, backend: str | None) -> CausalSelfAttention:
    """The same weights for every backend."""
    torch.manual_seed(1)
    layer = {
        "plain": lambda: CausalSelfAttention(16, 2, backend=backend),
        "grouped": lambda: CausalSelfAttention(16, 4, 2, backend=backend),
        "window": lambda: CausalSelfAttention(16, 2, window=3, backend=backend),
        "rotary and softcap": lambda: CausalSelfAttention(16, 4, 1, rotary=True, softcap=2.0, backend=backend),
        "sinks": lambda: CausalSelfAttention(16, 2, window=4, sinks=True, backend=backend),
    }[name]()
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    return layer.eval().requires_grad_(False)


NAMES = ("plain", "grouped", "window", "rotary and softcap", "sinks")
WAYS = [(b, name, make) for b in ("torch", "interpreter") for name in NAMES for make in (contiguous, paged)]


@pytest.mark.parametrize(
    ("backend", "name", "make"), [w for w in WAYS if w[0] == "torch" or (w[1] == "grouped") == (w[2] is paged)]
)
def test_one_pass_equals_prefill_and_decoding(backend: str, name: str, make: Make) -> None:
    """Sequences of 7, 5 and 3 tokens: a ragged prefill of all but the last two, then one at a time, some standing still."""
    pytest.importorskip("triton") if backend == "interpreter" else None
    layer, lengths, x = layers(name, backend), [7, 5, 3], torch.randn(3, 7, 16)
    exact, eager = layers(name, "reference").double()(x.double()), layers(name, "reference")(x)
    cache = make(3, layer.n_kv_head, 7, layer.head_dim)

    got = [torch.zeros(0, 16)] * 3
    pieces: list[tuple[int, list[int]]] = [(5, [5, 3, 1]), (1, [1, 1, 1]), (1, [1, 0, 1]), (1, [0, 1, 0])]
    for M, rows in pieces:
        tokens = torch.full((3, M, 16), 7.0)
        for b, row in enumerate(rows):
            tokens[b, M - row :] = x[b, cache.counts[b] : cache.counts[b] + row]
        out = layer(tokens, cache=cache, rows=rows)
        assert out.isfinite().all()
        got = [torch.cat((old, out[b, M - row :])) for b, (old, row) in enumerate(zip(got, rows, strict=True))]
    assert cache.counts == lengths
    for b, n in enumerate(lengths):
        assert_accurate(got[b], eager[b, :n], exact[b, :n], torch.float32, f"sequence {b}")


@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_long_ragged_prefill(backend: str) -> None:
    """More rows than one tile of decoding takes."""
    layer, x, lengths = layers("rotary and softcap", backend), torch.randn(2, 40, 16), [40, 23]
    cache = KVCache(2, 1, 40, 4)
    padded = torch.stack([x[0], torch.cat((torch.zeros(17, 16), x[1, :23]))])
    out = layer(padded, cache=cache, rows=lengths)
    exact, eager = layers("rotary and softcap", "reference").double()(x.double()), layers("rotary and softcap", "reference")(x)
    for b, n in enumerate(lengths):
        assert_accurate(out[b, 40 - n :], eager[b, :n], exact[b, :n], torch.float32, f"sequence {b}")


def test_work_follows_the_length_not_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of any capacity hands the same few rows to attention."""
    seen = []

    def watched(q: Tensor, k: Tensor, *rest: Any, **settings: Any) -> Any:
        seen.append(k.shape[2])
        return attention(q, k, *rest, **settings)

    monkeypatch.setattr("andrea_triton.decode.attention", watched)
    cache = KVCache(2, 2, 4096, 8)
    cache.append(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), [5, 3])
    attend_cache(torch.randn(2, 4, 1, 8), cache, Call())
    assert seen == [5, 3]


def test_dropout_is_on_in_training_only() -> None:
    layer, x = CausalSelfAttention(32, 4, dropout=0.5), torch.randn(1, 16, 32)
    plain = CausalSelfAttention(32, 4)
    plain.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x)) and torch.equal(layer(x), plain(x))


def test_naive_equals_pytorch() -> None:
    q, k, v = (torch.randn(2, 3, T, 8, dtype=torch.float64) for T in (5, 7, 7))
    keep = torch.ones(5, 7, dtype=torch.bool).tril(2) & torch.ones(5, 7, dtype=torch.bool).triu(0)
    got = naive_attention(q, k, v, True, Call(window=3))
    torch.testing.assert_close(got, sdpa(q, k, v, attn_mask=keep))
    assert naive_attention(q, k[:, :, :2], v[:, :, :2], True, Call())[:, :, :3].abs().max() == 0
    with pytest.raises(UnsupportedError, match="key_lengths is not supported by naive"):
        SelfAttention(16, 2, backend="naive")(torch.randn(1, 3, 16), key_lengths=torch.tensor([2]))


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    x, y = torch.randn(2, 1, 3, 6, 8, dtype=torch.float64)
    near, far = (rotate(x, torch.arange(6) + s) @ rotate(y, torch.arange(6) + s).mT for s in (0, 1000))
    torch.testing.assert_close(near, far)
    torch.testing.assert_close(rotate(x, torch.arange(6)).norm(dim=-1), x.norm(dim=-1))
    each = torch.stack([rotate(x, p)[0] for p in (torch.arange(6), torch.arange(6) + 4)])
    batched = rotate(x.expand(2, -1, -1, -1), torch.stack((torch.arange(6), torch.arange(6) + 4)))
    assert torch.equal(each, batched)


def test_bf16_autocast_goes_through_a_cache() -> None:
    layer, cache = CausalSelfAttention(16, 2).eval(), KVCache(1, 2, 4, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 3, 16), cache=cache).dtype == torch.bfloat16


def test_bad_settings_fail_when_made() -> None:
    for make, message in (
        (lambda: CausalSelfAttention(30, 4), "d_model is 30, which 4 heads do not divide"),
        (lambda: CausalSelfAttention(32, 4, 3), "n_kv_head is 3; n_head is 4"),
        (lambda: CausalSelfAttention(32, 0), "n_head is 0; wanted at least 1"),
        (lambda: SelfAttention(20, 4, rotary=True), "head dim is 5; rotary"),
        (lambda: SelfAttention(32, 4, dropout=1.0), "dropout_p is 1.0"),
        (lambda: CrossAttention(30, 4), "d_model is 30"),
        (lambda: CausalSelfAttention(32, 4, window=0), "window is 0"),
    ):
        with pytest.raises(ShapeError, match=message):
            make()
    layer = CausalSelfAttention(32, 4)
    with pytest.raises(ShapeError, match=r"x has shape \(1, 5, 31\); wanted \(B, T, 32\)"):
        layer(torch.randn(1, 5, 31))
    with pytest.raises(UnsupportedError, match="a gradient is not supported by a call with a cache"):
        layer(torch.randn(1, 2, 32), cache=KVCache(1, 4, 4, 8))
    with pytest.raises(UnsupportedError, match="key_lengths is not supported by a call with a cache"):
        layer(torch.randn(1, 2, 32), cache=KVCache(1, 4, 4, 8), key_lengths=torch.tensor([1]))
