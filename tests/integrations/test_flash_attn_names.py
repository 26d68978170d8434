"""What else of flash-attn people import and pass: numbers in every form, pages, dropout's pattern, the parts without autograd."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from andrea_triton.errors import DTypeError, ShapeError
from andrea_triton.integrations import flash_attn
from andrea_triton.integrations.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from andrea_triton.integrations.flash_attn.layers.rotary import apply_rotary_emb

STARTS_Q, STARTS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 10], [0, 8, 9, 13]))
CAUSAL = (0.0, None, True, -1, -1, 0.0, None)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def wide(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return torch.stack([x, x + 1], -1)[..., 0]


def test_names_are_where_flash_attn_has_them() -> None:
    assert tuple(map(int, re.findall(r"\d+", flash_attn.__version__))) >= (2, 8, 0)
    for name in flash_attn_interface.__all__:
        assert getattr(flash_attn_interface, name) is getattr(flash_attn, name)
    assert flash_attn.unpad_input is bert_padding.unpad_input and flash_attn.apply_rotary_emb is apply_rotary_emb


@pytest.mark.parametrize("form", [np.int64, torch.tensor, lambda x: torch.tensor([x])], ids=["numpy", "0-d", "1-d"])
def test_numbers_in_any_form(form: Any) -> None:
    q, k = draw(10, 4, 8), draw(13, 2, 8)
    wanted = flash_attn_varlen_func(
        q, k, k, STARTS_Q, STARTS_K, 7, 8, softmax_scale=2.0, window_size=(3, -1), softcap=3.0, causal=True
    )
    got = flash_attn_varlen_func(
        q, k, k, wide(STARTS_Q), wide(STARTS_K), form(7), form(8), softmax_scale=form(2), window_size=torch.tensor([3, -1]),
        softcap=form(3), causal=form(1),
    )  # fmt: skip
    assert torch.equal(got, wanted)
    with pytest.raises(DTypeError, match="max_seqlen_q"):
        flash_attn_varlen_func(q, k, k, STARTS_Q, STARTS_K, 7.5, 8)
    for window in ((1, 2, 3), 4):
        with pytest.raises(ShapeError, match="window_size"):
            flash_attn_func(q[None], k[None], k[None], window_size=window)
    everything = flash_attn_func(q[None], k[None], k[None])
    for window in ((-5, -7), (None, None), np.array([-1, 99])):
        assert torch.equal(flash_attn_func(q[None], k[None], k[None], window_size=window, softcap=None), everything)


def test_a_learned_scale_keeps_its_gradient() -> None:
    q, k, scale = draw(1, 5, 4, 8), draw(1, 7, 2, 8), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    out = flash_attn_func(q, k, k, softmax_scale=scale, causal=True)
    assert torch.equal(out, flash_attn_func(q * 0.3, k, k, softmax_scale=1.0, causal=True))
    step = 1e-6
    up, down = (flash_attn_func(q, k, k, softmax_scale=0.3 + s, causal=True).sum() for s in (step, -step))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), scale)[0], (up - down) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [3, 16])
def test_varlen_reads_pages(size: int) -> None:
    lengths, width = STARTS_K.diff().tolist(), -(-8 // size)
    q, k, v = (x.requires_grad_() for x in (draw(10, 4, 8), draw(13, 2, 8), draw(13, 2, 4)))
    table = wide(torch.randperm(3 * width).view(3, width).int())
    pages = [x.new_full((3 * width, size, *x.shape[1:]), 9.0) for x in (k, v)]
    for s, length in enumerate(lengths):
        for j in range(length):
            for x, own in zip(pages, (k, v), strict=True):
                x[table[s, j // size], j % size] = own[STARTS_K[s] + j]
    got = flash_attn_varlen_func(q, *pages, STARTS_Q, STARTS_K, 7, 8, causal=True, block_table=table)
    wanted = flash_attn_varlen_func(q, k, v, STARTS_Q, STARTS_K, 7, 8, causal=True)
    assert torch.equal(got, wanted)
    dout = torch.randn_like(got)
    grads = (torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for out in (got, wanted))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(ShapeError):
        flash_attn_varlen_func(q, *pages, STARTS_Q, STARTS_K + 200, 7, 8, block_table=table)


@pytest.mark.parametrize("place", ["rows", "cache_batch_idx", "block_table"])
def test_left_pad_with_rotary_is_the_cache_without_the_pad(place: str) -> None:
    held, pads = torch.tensor([9, 4], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    q, new, memory, angles = draw(2, 3, 4, 8), draw(2, 2, 3, 2, 8), draw(2, 2, 16, 2, 8), draw(16, 3)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    k_cache, v_cache = where = memory.clone()
    told: dict[str, Tensor] = {}
    if place == "cache_batch_idx":
        where, told = memory[:, [1, 0]].clone(), {place: torch.tensor([1, 0], dtype=torch.int32)}
    if place == "block_table":
        order = torch.tensor([2, 0, 3, 1])
        where, told = memory.reshape(2, 4, 8, 2, 8)[:, order.argsort()].clone(), {place: order.view(2, 2).int()}
    out, lse = flash_attn_with_kvcache(
        q, *where, *new, **rotary, cache_seqlens=held, cache_leftpad=pads, causal=True, return_softmax_lse=True, **told
    )
    turned = [apply_rotary_emb(x, *rotary.values(), interleaved=True, seqlen_offsets=held) for x in (q, new[0])]
    for b in range(2):
        end, start = int(held[b]), int(pads[b])
        k = torch.cat([k_cache[b, start:end], turned[1][b]])
        v = torch.cat([v_cache[b, start:end], new[1, b]])
        wanted = flash_attn_func(turned[0][b : b + 1], k[None], v[None], causal=True, return_attn_probs=True)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), wanted[:2])


def test_weights_show_what_dropout_dropped() -> None:
    q, k, v = draw(2, 6, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8)
    for settings in ({"causal": True}, {"window_size": (2, 1), "alibi_slopes": torch.rand(2, 4)}):
        out, lse, weights = flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True, **settings)
        _, plain_lse, none = flash_attn_func(q, k, v, return_attn_probs=True, **settings)
        kept = weights.clamp(min=0.0) / 0.6
        torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2)))
        torch.testing.assert_close(weights.abs().sum(-1), torch.ones_like(lse))
        assert torch.equal(lse, plain_lse) and none.numel() == 0 and (weights < 0).any()


def test_packed_weights_show_what_dropout_dropped() -> None:
    q, k, v = draw(10, 4, 8), draw(13, 4, 8), draw(13, 4, 8)
    out, lse, weights = flash_attn_varlen_func(
        q, k, v, STARTS_Q, STARTS_K, 7, 8, 0.4, causal=True, alibi_slopes=torch.rand(3, 4), return_attn_probs=True
    )
    assert weights.shape == (3, 4, 7, 8) and lse.shape == (4, 10)
    for s, ((a, b), (c, d)) in enumerate(zip(itertools.pairwise(STARTS_Q), itertools.pairwise(STARTS_K), strict=True)):
        kept = weights[s, :, : b - a, : d - c].clamp(min=0.0) / 0.6
        torch.testing.assert_close(out[a:b], torch.einsum("hij,jhd->ihd", kept, v[c:d]))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward_without_autograd(packed: bool, p: float) -> None:
    shapes = [(10, 4, 8), (13, 2, 8), (13, 2, 8)] if packed else [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]
    q, k, v = (draw(*shape).requires_grad_() for shape in shapes)
    lengths = (STARTS_Q, STARTS_K, 7, 8) if packed else ()
    settings = (p, 0.4, True, 3, -1, 2.0, torch.rand(4))
    forward = flash_attn._flash_attn_varlen_forward if packed else flash_attn._flash_attn_forward
    backward = flash_attn._flash_attn_varlen_backward if packed else flash_attn._flash_attn_backward
    public = flash_attn_varlen_func if packed else flash_attn_func
    torch.manual_seed(3)
    out, lse, _, state = forward(q, k, v, *lengths, *settings, False)
    torch.manual_seed(3)
    wanted = public(q, k, v, *lengths, p, 0.4, True, (3, -1), 2.0, settings[-1])
    assert torch.equal(out, wanted) and not out.requires_grad and state.shape == (2,)
    dout = torch.randn_like(out)
    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    sums = backward(dout, q, k, v, out, lse, *into, *lengths, *settings, False, rng_state=state)
    assert sums.shape == lse.shape
    torch.testing.assert_close(into, list(torch.autograd.grad(wanted, (q, k, v), dout)))
    if p:
        with pytest.raises(ShapeError, match="rng_state"):
            backward(dout, q, k, v, out, lse, *into, *lengths, *settings, False)


def test_backward_of_parts_of_the_keys_adds_up() -> None:
    """A ring: out and lse of all keys, the keys of one step."""
    q, k, v = (draw(*s).requires_grad_() for s in ((1, 4, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8)))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    dout, total = torch.randn_like(out), torch.zeros_like(q)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for part in (slice(0, 5), slice(5, 9)):
        dq = torch.empty_like(q)
        into = dq, dk[:, part], dv[:, part]
        flash_attn._flash_attn_backward(
            dout, q, k[:, part], v[:, part], out, lse, *into, 0.0, None, False, -1, -1, 0.0, None, False
        )
        total += dq
    torch.testing.assert_close([total, dk, dv], list(torch.autograd.grad(out, (q, k, v), dout)))


def test_varlen_forward_takes_pads_and_used_lengths() -> None:
    q, k = draw(10, 2, 8), draw(13, 2, 8)
    pads, used = torch.tensor([2, 0, 1]), torch.tensor([6, 1, 3])
    out, *_ = flash_attn._flash_attn_varlen_forward(q, k, k, STARTS_Q, STARTS_K, 7, 8, *CAUSAL, leftpad_k=pads, seqused_k=used)
    for s, (a, b) in enumerate(itertools.pairwise(STARTS_Q)):
        own = k[None, STARTS_K[s] + pads[s] : STARTS_K[s] + used[s]]
        torch.testing.assert_close(out[None, a:b], flash_attn_func(q[None, a:b], own, own, causal=True))


def test_padding_goes_and_comes_back() -> None:
    x, mask = draw(3, 4, 2, 5).requires_grad_(), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    for extra in (None, unused):
        kept = mask.bool() if extra is None else mask.bool() | extra
        rows, indices, starts, longest, used = bert_padding.unpad_input(x, mask, extra)
        assert torch.equal(rows, x[kept]) and longest == int(kept.sum(1).max()) and type(longest) is int
        assert starts.tolist() == [0, *kept.sum(1).cumsum(0).tolist()] and starts.dtype == torch.int32
        assert used.tolist() == [2, 0, 3] and torch.equal(bert_padding.index_first_axis(x.flatten(0, 1), indices), rows)
        back = bert_padding.pad_input(rows, indices, 3, 4)
        assert torch.equal(back, x * kept[..., None, None])
        assert torch.equal(torch.autograd.grad(back.sum(), x)[0], kept[..., None, None].expand_as(x).to(x.dtype))
    with pytest.raises(ShapeError, match="attention_mask"):
        bert_padding.unpad_input(x, mask[:, :2])
    empty = bert_padding.unpad_input(x[:0], mask[:0])
    assert empty[3] == 0 and bert_padding.pad_input(empty[0], empty[1], 0, 4).shape == (0, 4, 2, 5)


def test_nothing_to_do() -> None:
    none, x, z = draw(0, 4, 2, 8), draw(3, 4, 2, 8), torch.zeros(1, dtype=torch.int32)
    assert [t.numel() for t in flash_attn_func(none, none, none, 0.1, return_attn_probs=True)] == [0, 0, 0]
    assert not flash_attn_func(x, x[:, :0], x[:, :0]).any()
    table = torch.zeros(0, 2, dtype=torch.int32)
    assert flash_attn_varlen_func(none[:, 0], x, x, z, z, 0, 0, block_table=table).shape == (0, 2, 8)
    for told in ({}, {"cache_leftpad": z[:0]}, {"block_table": table}, {"block_table": table, "cache_leftpad": z[:0]}):
        memory = x if "block_table" in told else none
        assert flash_attn_with_kvcache(none, memory, memory, cache_seqlens=z[:0], **told).shape == none.shape


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_by_position(interleaved: bool, packed: bool) -> None:
    angles, offsets = draw(20, 3), torch.tensor([4, 0, 7])
    x = draw(*(11, 2, 8) if packed else (3, 5, 2, 8)).requires_grad_()
    told = {"cu_seqlens": STARTS_Q, "max_seqlen": 7} if packed else {}
    out = apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=offsets, **told)
    wanted = x.detach().clone()
    for s in range(3):
        rows = wanted[STARTS_Q[s] : STARTS_Q[s + 1]] if packed else wanted[s]
        for t in range(rows.shape[0]):
            for i, angle in enumerate(angles[offsets[s] + t]):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
                turned = torch.view_as_real(torch.complex(rows[t, :, a], rows[t, :, b]) * torch.exp(1j * angle))
                rows[t, :, a], rows[t, :, b] = turned.unbind(-1)
    torch.testing.assert_close(out, wanted)
    # A turn keeps lengths: its gradient turns back.
    (grad,) = torch.autograd.grad(out, x, out.detach())
    torch.testing.assert_close(grad, x.detach())
    place = x.detach().clone()
    assert apply_rotary_emb(place, angles.cos(), angles.sin(), interleaved, True, offsets, **told) is place
    assert torch.equal(place, out)


def test_rotary_says_what_does_not_fit() -> None:
    x, table = draw(1, 4, 2, 8), draw(5, 3)
    with pytest.raises(ShapeError, match="positions 2 to 5"):
        apply_rotary_emb(x, table, table, seqlen_offsets=2)
    with pytest.raises(ShapeError, match="seqlen_offsets"):
        apply_rotary_emb(x, table, table, seqlen_offsets=torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="at most 8"):
        apply_rotary_emb(x, draw(5, 5), draw(5, 5))
