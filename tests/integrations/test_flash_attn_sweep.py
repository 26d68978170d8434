"""flash-attn 2's functions over the settings that its own tests go through, drawn at random, by the rule of accuracy."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from andrea_triton.integrations.flash_attn.bert_padding import pad_input, unpad_input
from andrea_triton.integrations.flash_attn.layers.rotary import apply_rotary_emb
from andrea_triton.testing import assert_accurate
from tests.integrations.flash_definition import define

LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 128), (63, 1), (1, 239), (3, 799), (127, 339), (340, 341)]
TINY = [(1, 5), (9, 17), (18, 7)]
DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def drawn_settings(pick: random.Random, heads: int, most: int) -> dict[str, Any]:
    """Settings of the scores."""
    local = pick.random() < 0.4
    return {
        "causal": pick.random() < 0.5,
        "window_size": (pick.randint(-1, most), pick.randint(-1, most)) if local else (-1, -1),
        "softcap": pick.choice([0.0, 0.0, 50.0, 3.0]),
        "alibi_slopes": pick.choice([None, torch.rand(heads) * 0.3, torch.rand(2, heads) * 0.3]),
    }


def drawn_sizes(pick: random.Random, tiny: bool) -> tuple[int, int, int, int, int]:
    """(M, N, HQ, HKV, D)."""
    heads = 2 if tiny else pick.choice([4, 6])
    return *pick.choice(TINY if tiny else LENGTHS), heads, pick.choice([heads, 1, 2]), pick.choice([16] if tiny else DIMS)


def each(
    found: list[Tensor], inputs: list[Tensor], settings: dict[str, Any], dout: Tensor, dtype: torch.dtype, name: str
) -> None:
    """Judge out, lse and the gradients against the definition in fp64, by its error in the dtype."""
    judges = []
    for kind in (dtype, torch.float64):
        own = [x.detach().to(kind).requires_grad_() for x in inputs]
        out, lse = define(*own, **settings)
        judges.append([out, lse, *torch.autograd.grad(out, own, dout.to(kind))])
    for what, got, eager, exact in zip(("out", "lse", "dq", "dk", "dv"), found, *judges, strict=True):
        kind = torch.float32 if what == "lse" else dtype
        assert_accurate(got.detach(), eager.detach(), exact.detach(), kind, f"{name}: {what}")


def attend_as_drawn(number: int, tiny: bool = False) -> None:
    pick = random.Random(number)
    torch.manual_seed(number)
    M, N, HQ, HKV, D = drawn_sizes(pick, tiny)
    dtype, p = pick.choice(DTYPES), pick.choice([0.0, 0.0, 0.17])
    settings = drawn_settings(pick, HQ, max(M, N))
    inputs = [torch.randn(2, T, H, D).to(dtype).requires_grad_() for T, H in ((M, HQ), (N, HKV), (N, HKV))]
    out, lse, weights = flash_attn_func(
        *inputs, dropout_p=p, **settings, return_attn_probs=True, deterministic=pick.random() < 0.5
    )
    dout = torch.randn_like(out)
    found = [out, lse, *torch.autograd.grad(out, inputs, dout)]
    dropped = {"kept": ~torch.signbit(weights), "dropout_p": p} if p else {}
    each(found, inputs, settings | dropped, dout, dtype, f"draw {number}")


def attend_packed_as_drawn(number: int, tiny: bool = False) -> None:
    """Sequences of random lengths, of which some rows are allocated but not used."""
    pick = random.Random(number)
    torch.manual_seed(number)
    M, N, HQ, HKV, D = drawn_sizes(pick, tiny)
    dtype, settings = pick.choice(DTYPES), drawn_settings(pick, HQ, max(M, N))
    lengths = [[pick.randint(0, T), T] for T in (M, N)]
    full = [torch.randn(2, T, H, D).to(dtype) for T, H in ((M, HQ), (N, HKV), (N, HKV))]
    masks = [torch.arange(T) < torch.tensor(own)[:, None] for T, own in zip((M, N), lengths, strict=True)]
    (q, index_q, cu_q, max_q, _), (k, _, cu_k, max_k, _), (v, *_) = (
        unpad_input(x, mask) for x, mask in zip(full, (masks[0], masks[1], masks[1]), strict=True)
    )
    packed = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(*packed, cu_q, cu_k, max_q, max_k, **settings, return_attn_probs=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, packed, dout)
    assert torch.equal(pad_input(out, index_q, 2, M)[masks[0]], out)
    for s in range(2):
        rows, keys = slice(*cu_q[s : s + 2].tolist()), slice(*cu_k[s : s + 2].tolist())
        alone = [x.detach()[None, part] for x, part in zip(packed, (rows, keys, keys), strict=True)]
        slopes = settings["alibi_slopes"]
        own = settings | {"alibi_slopes": slopes[s] if slopes is not None and slopes.dim() == 2 else slopes}
        found = [out[None, rows], lse[None, :, rows], *(g[None, part] for g, part in zip(grads, (rows, keys, keys), strict=True))]
        if alone[0].numel() and alone[1].numel():
            each(found, alone, own, dout[None, rows], dtype, f"packed draw {number}")
        else:
            assert not any(g.any() for g in (found[0], *found[2:]))


def ask_cache_as_drawn(number: int, tiny: bool = False) -> None:
    pick = random.Random(number)
    torch.manual_seed(number)
    M, N, HQ, HKV, D = drawn_sizes(pick, tiny)
    M, new = min(M, 128), pick.choice([0, 1, 3, min(M, 128)])
    dtype, settings, page = pick.choice(DTYPES), drawn_settings(pick, HQ, N), pick.choice([None, 4, 16, 17, 256])
    rotary = pick.choice([0, 8, D // 16 * 16]) if new else 0
    capacity = N + new + pick.choice([0, 13])
    pages = 1 if page is None else -(-capacity // page)
    size = capacity if page is None else page
    table = torch.randperm(2 * pages + 2)[: 2 * pages].view(2, pages).int()
    held = torch.tensor([pick.randint(0, N), N], dtype=torch.int32)
    pads = torch.tensor([pick.randint(0, int(held[0])), pick.randint(0, 2) % (N + 1)], dtype=torch.int32)
    memory = [torch.randn(2 * pages + 2, size, HKV, D).to(dtype) for _ in range(2)]
    rows = [x[table.long()].flatten(1, 2) for x in memory]
    q, k, v = (torch.randn(2, T, H, D).to(dtype) for T, H in ((M, HQ), (new, HKV), (new, HKV)))
    where = {"cache_batch_idx": table[:, 0]} if page is None else {"block_table": table}
    if page is None and pick.random() < 0.5:
        where, memory = {}, [x.clone() for x in rows]
    told: dict[str, Any] = {"k": k, "v": v} if new else {}
    angles, interleaved = torch.rand(capacity + 128, rotary // 2) * 6, pick.random() < 0.5
    if rotary:
        told |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype), "rotary_interleaved": interleaved}
    pad = pick.random() < 0.3
    out, lse = flash_attn_with_kvcache(
        q, *memory, **told, **where, **settings, cache_seqlens=held, cache_leftpad=pads if pad else None,
        num_splits=pick.choice([0, 1, 3]), return_softmax_lse=True,
    )  # fmt: skip
    if rotary:
        table_of = told["rotary_cos"], told["rotary_sin"], interleaved
        k = apply_rotary_emb(k, *table_of, seqlen_offsets=held)
        if settings["causal"] or settings["window_size"] != (-1, -1):
            q = apply_rotary_emb(q, *table_of, seqlen_offsets=held)
        else:
            still = [apply_rotary_emb(q[:, i : i + 1], *table_of, seqlen_offsets=held) for i in range(M)]
            q = torch.cat(still, 1)
    for b, end in enumerate(held.tolist()):
        keys, values = (torch.cat([x[b, :end], y[b]])[int(pads[b]) * pad :][None] for x, y in zip(rows, (k, v), strict=True))
        slopes = settings["alibi_slopes"]
        own = settings | {"alibi_slopes": slopes[b] if slopes is not None and slopes.dim() == 2 else slopes}
        eager, exact = (define(*(x.to(kind) for x in (q[b : b + 1], keys, values)), **own) for kind in (dtype, torch.float64))
        assert_accurate(out[b : b + 1], eager[0], exact[0], dtype, f"cache draw {number}: out")
        assert_accurate(lse[b : b + 1], eager[1], exact[1], torch.float32, f"cache draw {number}: lse")
    after = [x[table.long()].flatten(1, 2) if where else x for x in memory]
    for x, before, written in zip(after, rows, (k, v), strict=True):
        for b, end in enumerate(held.tolist()):
            assert torch.equal(x[b], torch.cat([before[b, :end], written[b], before[b, end + new :]]))


WAYS = [attend_as_drawn, attend_packed_as_drawn, ask_cache_as_drawn]


@pytest.mark.parametrize("draw", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_a_few_draws(way: Any, draw: int) -> None:
    way(draw)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(4, 64))
@pytest.mark.parametrize("way", WAYS)
def test_many_draws(way: Any, draw: int) -> None:
    way(draw)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("draw", [1000, 1001])
@pytest.mark.parametrize("way", WAYS)
def test_draws_by_the_kernels(way: Any, draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea_triton.target.default_backend", lambda device: "interpreter")
    way(draw, tiny=True)
