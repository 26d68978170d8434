"""flash-attn 2's functions against their definition, written out here from flash-attn's documentation.

In fp64, where only a wrong meaning makes a difference: how accurate the backends are is asked of `attention` itself.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.errors import ShapeError, UnsupportedError
from andrea_triton.integrations import flash_attn
from andrea_triton.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tests.integrations.flash_definition import define

COMMON = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv {COMMON}",
    "flash_attn_kvpacked_func": f"q kv {COMMON}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {COMMON} block_table",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {COMMON}",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {COMMON}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"causal": True, "softmax_scale": 0.2},
    "window": {"window_size": (3, 1)},
    "causal window": {"causal": True, "window_size": (3, -1)},
    "open left": {"window_size": (-1, 2)},
    "softcap": {"causal": True, "softcap": 0.7},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi per row": {"alibi_slopes": torch.rand(2, 4)},
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, dout))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    defaults = {"window_size": (-1, -1), "softcap": 0.0, "causal": False, "rotary_interleaved": True, "num_splits": 0}
    assert {k: parameters[k].default for k in defaults if k in parameters} == {
        k: v for k, v in defaults.items() if k in parameters
    }


@pytest.mark.parametrize("sizes", [(7, 7), (3, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_func_is_its_definition(name: str, sizes: tuple[int, int]) -> None:
    M, N = sizes
    inputs = [x.requires_grad_() for x in (draw(2, M, 4, 8), draw(2, N, 2, 8), draw(2, N, 2, 8))]
    out, lse, weights = flash_attn_func(*inputs, **SETTINGS[name], return_attn_probs=True)
    wanted, wanted_lse = define(*inputs, **SETTINGS[name])
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    assert weights.numel() == 0
    dout = torch.randn_like(out)
    torch.testing.assert_close(gradients(out, inputs, dout), gradients(wanted, inputs, dout))


def test_packed_forms_are_the_plain_one() -> None:
    qkv, kv = draw(2, 7, 3, 4, 8).requires_grad_(), draw(2, 9, 2, 2, 8).requires_grad_()
    q, dout = draw(2, 7, 4, 8), draw(2, 7, 4, 8)
    for packed, plain, x in (
        (flash_attn_qkvpacked_func(qkv, causal=True), flash_attn_func(*qkv.unbind(2), causal=True), qkv),
        (flash_attn_kvpacked_func(q, kv, window_size=(2, 0)), flash_attn_func(q, *kv.unbind(2), window_size=(2, 0)), kv),
    ):
        assert torch.equal(packed, plain)
        assert torch.equal(*(gradients(out, [x], dout)[0] for out in (packed, plain)))
    with pytest.raises(ShapeError, match="qkv"):
        flash_attn_qkvpacked_func(kv)


@pytest.mark.parametrize("name", SETTINGS)
def test_varlen_is_each_sequence_alone(name: str) -> None:
    settings = SETTINGS[name]
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 10], [0, 8, 13]))
    q, k, v = draw(10, 4, 8), draw(13, 2, 8), draw(13, 2, 8)
    out, lse, _ = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 7, 8, **settings, return_attn_probs=True)
    kv = torch.stack([k, v], 1)
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, kv, starts_q, starts_k, 7, 8, **settings), out)
    assert lse.shape == (4, 10)
    for s, ((a, b), (c, d)) in enumerate(zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True)):
        own = {n: x[s] if n == "alibi_slopes" and x.dim() == 2 else x for n, x in settings.items()}
        alone = [x[None] for x in (q[a:b], k[c:d], v[c:d])]
        torch.testing.assert_close((out[None, a:b], lse[None, :, a:b]), define(*alone, **own))


def test_varlen_qkvpacked_is_varlen() -> None:
    qkv, starts = draw(10, 3, 4, 8), torch.tensor([0, 3, 10], dtype=torch.int32)
    wanted = flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 7, 7, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, starts, 7, causal=True), wanted)


def test_dropout_drops_and_scales() -> None:
    q, k = draw(1, 64, 2, 8), draw(1, 64, 2, 8)
    torch.manual_seed(1)
    first = flash_attn_func(q, k, torch.ones_like(k), dropout_p=0.3)
    torch.manual_seed(1)
    assert torch.equal(flash_attn_func(q, k, torch.ones_like(k), dropout_p=0.3), first)
    assert not torch.allclose(first, torch.ones_like(first), atol=0.01)
    torch.testing.assert_close(first.mean(), first.new_tensor(1.0), atol=0.05, rtol=0.0)


def test_what_cannot_be_done_is_named() -> None:
    x, table = draw(1, 4, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="cache_batch_idx"):
        flash_attn_with_kvcache(x, x, x, block_table=table, cache_batch_idx=table[0])
    for wrong in (-1, 1):
        with pytest.raises(ShapeError, match="pages"):
            flash_attn_with_kvcache(x, x, x, x[:, :1], x[:, :1], cache_seqlens=2, block_table=table + wrong)


@pytest.mark.parametrize("told", [{"k": 1, "v": 1}, {"k": 1, "cache_seqlens": 0}, {"k": 1, "v": 1, "cache_seqlens": 4}], ids=str)
def test_wrong_cache_is_explained(told: dict[str, Any]) -> None:
    memory, x = torch.zeros(2, 1, 4, 2, 8, dtype=torch.float64), draw(1, 1, 2, 8)
    with pytest.raises(ShapeError):
        flash_attn_with_kvcache(x, *memory, **{name: x if name in "kv" else value for name, value in told.items()})
    assert not memory.any()


HELD = torch.tensor([5, 0, 19], dtype=torch.int32)
ORDER = torch.tensor([2, 3, 0], dtype=torch.int32)
PAGES = torch.tensor([[4, 1], [3, 6], [0, 2]], dtype=torch.int32)
PLACES = ["rows", "cache_batch_idx", "block_table"]


def as_cache(rows: Tensor, place: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows (3, 32, H, D) of three sequences where flash-attn looks for them."""
    if place == "rows":
        return rows.clone(), {}
    if place == "cache_batch_idx":
        return rows.new_full((4, *rows.shape[1:]), 9.0).index_copy(0, ORDER.long(), rows), {place: ORDER}
    pages = rows.new_full((7, 16, *rows.shape[2:]), 9.0)
    return pages.index_copy(0, PAGES.flatten().long(), rows.reshape(6, 16, *rows.shape[2:])), {place: PAGES}


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["plain", "causal", "causal window", "softcap", "alibi"])
def test_cache_is_its_definition(name: str, place: str, new: int) -> None:
    settings, memory = SETTINGS[name], draw(2, 3, 32, 2, 8)
    (k_cache, where), (v_cache, _) = (as_cache(rows, place) for rows in memory)
    q, (k, v) = draw(3, 3, 4, 8), draw(2, 3, new, 2, 8)
    added = {"k": k, "v": v} if new else {}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=HELD, **added, **where, **settings, return_softmax_lse=True
    )
    for b, held in enumerate(HELD.tolist()):
        memory[:, b, held : held + new] = torch.stack([k[b], v[b]])
        alone = [q[b : b + 1], *memory[:, b : b + 1, : held + new]]
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), define(*alone, **settings))
    assert torch.equal(k_cache, as_cache(memory[0], place)[0]) and torch.equal(v_cache, as_cache(memory[1], place)[0])


@pytest.mark.parametrize("seqlens", [None, 7])
def test_one_length_for_all(seqlens: int | None) -> None:
    q, (k_cache, v_cache) = draw(3, 2, 4, 8), draw(2, 3, 16, 2, 8)
    got = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, causal=True)
    wanted = flash_attn_func(q, k_cache[:, :seqlens], v_cache[:, :seqlens], causal=True)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["causal", "window", "alibi", "alibi per row"])
@pytest.mark.parametrize("queries", [2, 90])
def test_left_pad_and_many_queries(name: str, queries: int) -> None:
    settings, pads = SETTINGS[name], torch.tensor([4, 0], dtype=torch.int32)
    q, memory, held = draw(2, queries, 4, 8), draw(2, 2, 100, 2, 8), torch.tensor([95, 60], dtype=torch.int32)
    for leftpad in [None] * (queries > 64) + [pads]:
        out, lse = flash_attn_with_kvcache(
            q, *memory, cache_seqlens=held, cache_leftpad=leftpad, **settings, return_softmax_lse=True
        )
        for b, end in enumerate(held.tolist()):
            start = 0 if leftpad is None else int(pads[b])
            own = {n: x[b] if n == "alibi_slopes" and x.dim() == 2 else x for n, x in settings.items()}
            alone = [q[b : b + 1], *memory[:, b : b + 1, start:end]]
            torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), define(*alone, **own))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_cache_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea_triton.target.default_backend", lambda device: "interpreter")
    for place in PLACES:
        test_cache_is_its_definition("causal window", place, 3)
    test_left_pad_and_many_queries("alibi per row", 90)


def turned(x: Tensor, position: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One row (H, D), pair by pair."""
    x, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i], sin[position, i]
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_queries_and_new_keys(interleaved: bool, causal: bool) -> None:
    memory, angles = draw(2, 3, 32, 2, 8), draw(32, 3)
    q, k, v = draw(3, 3, 4, 8), draw(3, 3, 2, 8), draw(3, 3, 2, 8)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    got_memory = memory.clone()
    got = flash_attn_with_kvcache(
        q, *got_memory, k, v, **rotary, cache_seqlens=HELD, rotary_interleaved=interleaved, causal=causal
    )
    for b, held in enumerate(HELD.tolist()):
        for i in range(3):
            q[b, i] = turned(q[b, i], held + (i if causal else 0), *rotary.values(), interleaved)
            k[b, i] = turned(k[b, i], held + i, *rotary.values(), interleaved)
    wanted = flash_attn_with_kvcache(q, *memory, k, v, cache_seqlens=HELD, causal=causal)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(got_memory, memory)


def test_cache_takes_no_gradient() -> None:
    x = draw(1, 1, 2, 8).requires_grad_()
    assert not flash_attn_with_kvcache(x, *draw(2, 1, 4, 2, 8)).requires_grad
