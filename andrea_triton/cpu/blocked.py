"""Attention and its gradients by blocks of rows: every feature, any device, memory that grows with the length.

A block of rows makes its scores against all keys that it sees, and the softmax over them, in fp32 (fp64 for fp64). The backward
makes the weights once more rather than take them as exp(s - lse), which loses the digits of a large lse.
Weights so small that products with them are denormal numbers are 0, where a bound says that no result shows it.
Source: arXiv 2205.14135, section B.4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from andrea_triton.cpu.layout import room_like
from andrea_triton.cpu.tile import (
    INF,
    Block,
    closed,
    floor_of,
    four,
    grid,
    here,
    kept,
    keys_of,
    query_heads,
    reach,
    room_for,
    rows_of,
    scale_of,
    scores,
    shares,
    spans,
)  # fmt: skip
from andrea_triton.problem import Problem, accumulator
from andrea_triton.reference import one_segment, segments

Gradients = tuple[Tensor | None, ...]


class Part(NamedTuple):
    """A dense problem: the call itself, or one packed sequence of it, with the rows of it in packed tensors."""

    problem: Problem
    first_batch: int
    rows: slice
    keys: slice

    def of(self, t: Tensor, rows: slice) -> Tensor:
        """(B, H, T, any) view of this part of a tensor."""
        return t if rows.stop is None else one_segment(t, rows)

    def row_values(self, t: Tensor) -> Tensor:
        """(B, HQ, M, 1) view of numbers per row, (B, HQ, M) or packed (HQ, total)."""
        return (t if self.rows.stop is None else t[None, :, self.rows])[..., None]


def parts(problem: Problem) -> list[Part]:
    """The call as dense problems."""
    if not problem.packed:
        return [Part(problem, 0, slice(None), slice(None))]
    return [Part(own, batch, queries, keys) for batch, own, queries, keys in segments(problem)]


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse), no gradient: shapes and dtypes as reference(), out in the memory order of q.

    Weights too small to count are 0, unless they might make the result: then all is done once more with every weight.
    """
    floor = floor_of(problem)
    out, lse = forward_above(floor, problem, q, k, v)
    if negligible(floor, out, problem.N * reach(v)):
        return out, lse
    return forward_above(0.0, problem, q, k, v)


def negligible(floor: float, result: Tensor | None, count: float) -> bool:
    """Whether `count` weights at the floor, each times the magnitudes that it meets, are below the rounding of a result."""
    return floor == 0.0 or result is None or 8 * count * floor <= torch.finfo(torch.float64).eps * reach(result)


def forward_above(floor: float, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """forward() with weights at and below `floor` of a row's largest as 0."""
    out, rows = room_like(q, problem.DV, problem.packed), q.shape[:-1]
    shape = (rows[1], rows[0]) if problem.packed else rows
    lse = torch.full(shape, -INF, dtype=accumulator(problem.dtype), device=problem.device)
    out.zero_()
    for part in parts(problem):
        own = part.problem
        views = part.of(q, part.rows), part.of(k, part.keys), part.of(v, part.keys)
        dense_forward(own, part.first_batch, *views, part.of(out, part.rows), part.row_values(lse)[..., 0], floor)
    return out, lse


def dense_forward(problem: Problem, first: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, floor: float) -> None:
    """Write out (zero so far) and lse (-inf so far) of a dense problem."""
    acc, pieces, whole = lse.dtype, spans(problem), grid(problem, first)
    (room,) = room_for(problem, pieces, 1)
    for b, h in shares(problem, pieces):
        hq = query_heads(problem, h)
        k_all, v_all, shut = keys_of(k, b, h, acc), keys_of(v, b, h, acc), closed(problem, hq)
        for i, j in pieces:
            block = Block(b, h, hq, i, j)
            places = here(whole, block)
            tile, _ = scores(problem, rows_of(q, block, acc), k_all[:, j], block, room, places, False)
            pivot = tile.amax(-1, keepdim=True)
            pivot.masked_fill_(pivot == -INF, 0.0)
            p = above(floor, tile.sub_(pivot).exp_())
            if shut is not None:
                four(p, block).masked_fill_(shut[..., None], 0.0)
            total = p.sum(-1, keepdim=True)
            found = pivot + total.log()
            if shut is not None:
                four(found, block).masked_fill_(shut[..., None], INF)
            lse[b, hq, i] = four(found, block)[..., 0]
            p, keep = p[..., : j.stop - j.start], kept(problem, places)
            if keep is not None:
                four(p, block).mul_(keep)
                total *= 1.0 - problem.spec.dropout_p
            product = torch.bmm(p, v_all[:, j]).div_(total.masked_fill_(total == 0.0, 1.0))
            out[b, hq, i] = four(product, block).to(out.dtype)


def above(floor: float, p: Tensor) -> Tensor:
    """Weights, those at and below the floor made 0 in place; NaN stays."""
    return p if floor == 0.0 else torch.threshold_(p, floor, 0.0)


class Grads(NamedTuple):
    """What the backward writes; None where nobody asks. dq, dk, dv of a dense problem; dbias and dsinks of the whole call, the
    latter in fp64; which rows, (B, HQ, M, 1), no key has a part in; and at and below which floor weights are 0."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None
    empty: Tensor
    floor: float

    @property
    def of_scores(self) -> bool:
        """Whether anything needs the gradient of the scores."""
        return any(x is not None for x in (self.dq, self.dk, self.dbias, self.dsinks))


def backward(
    problem: Problem, inputs: tuple[Tensor | None, ...], lse: Tensor, dout: Tensor, dlse: Tensor | None, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients of q, k, v, bias and sinks, None where not needed.

    Maths:  p = softmax(s), dp = dout vᵀ, ds = p (dp - Σ p dp + dlse); dq = scale ds k, dk = scale dsᵀ q, dv = pᵀ dout; a sink is
            one more column of s with dp = 0
    Shapes: all of a block of rows of some heads at a time; the query heads of a key head lie among the rows.
    """
    floor = floor_of(problem)
    found = backward_above(floor, problem, inputs, lse, dout, dlse, needs)
    counts = counts_of(problem, inputs, dout, dlse)
    if all(negligible(floor, result, count) for result, count in zip(found, counts, strict=True)):
        return found
    return backward_above(0.0, problem, inputs, lse, dout, dlse, needs)


def counts_of(problem: Problem, inputs: tuple[Tensor | None, ...], dout: Tensor, dlse: Tensor | None) -> tuple[float, ...]:
    """The largest sums of magnitudes that weights are factors of, in the gradients of q, k, v, bias and sinks.

    Maths:  ds = p x with |x| <= 2 DV max|dout| max|v| + max|dlse|; dq = scale ds k, and so on
    """
    q, k, v, *_ = inputs
    share, rows, keys = 1.0 / (1.0 - problem.spec.dropout_p), problem.M * problem.group, problem.N
    pull = reach(dout) * share
    ds = 2.0 * problem.DV * pull * reach(v) + reach(dlse)
    every = float(problem.B * problem.HQ * problem.M)
    scaled = ds * abs(scale_of(problem))
    return scaled * keys * reach(k), scaled * rows * reach(q), rows * pull, ds * every * keys, ds * every


def backward_above(
    floor: float, problem: Problem, inputs: tuple[Tensor | None, ...], lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """backward() with weights at and below `floor` as 0."""
    q, k, v, bias, sinks = inputs
    assert q is not None and k is not None and v is not None
    acc, device = accumulator(problem.dtype), problem.device
    results = [room_like(t, t.shape[-1], problem.packed).zero_() if n else None for t, n in zip((q, k, v), needs, strict=False)]
    shape = None if bias is None or not needs[3] else (1,) * (4 - bias.dim()) + tuple(bias.shape)
    dbias = None if shape is None else torch.zeros(shape, dtype=acc, device=device)
    dsinks = None if sinks is None or not needs[4] else torch.zeros(sinks.shape, dtype=torch.float64, device=device)
    for part in parts(problem):
        own, of = part.problem, part.of
        empty, shut = part.row_values(lse) == -INF, closed(own, slice(None))
        empty = empty if shut is None else empty | shut[..., None]
        places = (part.rows, part.keys, part.keys)
        dq, dk, dv = (None if t is None else of(t, r) for t, r in zip(results, places, strict=True))
        grads = Grads(dq, dk, dv, dbias, dsinks, empty, floor)
        views = of(q, part.rows), of(k, part.keys), of(v, part.keys), of(dout, part.rows)
        dense_backward(own, part.first_batch, *views, None if dlse is None else part.row_values(dlse), grads)
    dbias = None if dbias is None or bias is None else dbias.view(bias.shape).to(bias.dtype)
    return (*results, dbias, None if dsinks is None or sinks is None else dsinks.to(sinks.dtype))


def dense_backward(
    problem: Problem, first: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, grads: Grads
) -> None:
    """Fill grads of a dense problem."""
    acc, pieces, whole, scale = accumulator(problem.dtype), spans(problem), grid(problem, first), scale_of(problem)
    some_empty, share = bool(grads.empty.any()), 1.0 / (1.0 - problem.spec.dropout_p)
    room, room_dp = room_for(problem, pieces, 2)
    for b, h in shares(problem, pieces):
        hq = query_heads(problem, h)
        k_all, v_all = keys_of(k, b, h, acc), keys_of(v, b, h, acc)
        dk_all = None if grads.dk is None else torch.zeros_like(k_all)
        dv_all = None if grads.dv is None else torch.zeros_like(v_all)
        for i, j in pieces:
            block = Block(b, h, hq, i, j)
            places, keys = here(whole, block), j.stop - j.start
            q_tile, do_tile = rows_of(q, block, acc), rows_of(dout, block, acc)
            tile, pull = scores(problem, q_tile, k_all[:, j], block, room, places, grads.of_scores)
            p = above(grads.floor, torch.softmax(tile, -1, out=tile))
            if some_empty:
                p.masked_fill_(rows_of(grads.empty, block, torch.bool), 0.0)
            keep = kept(problem, places)
            if dv_all is not None:
                used = p[..., :keys] if keep is None else (four(p[..., :keys], block) * keep).view(*p.shape[:-1], keys)
                add_product(dv_all[:, j], used, do_tile, problem.group, share)
            if not grads.of_scores:
                continue
            dp = room_dp[: p.numel()].view(p.shape)
            torch.bmm(do_tile, v_all[:, j].mT, out=dp[..., :keys])
            if keep is not None:
                four(dp[..., :keys], block).mul_(keep).mul_(share)
            ds = softmax_backward(p, dp, keys, None if dlse is None else rows_of(dlse, block, acc))
            add_terms(grads, block, four(ds, block), dlse)
            ds = ds[..., :keys]
            if pull is not None:
                pull(four(ds, block))
            ds.mul_(scale)
            if grads.dq is not None:
                grads.dq[b, hq, i] = four(torch.bmm(ds, k_all[:, j]), block)
            if dk_all is not None:
                add_product(dk_all[:, j], ds, q_tile, problem.group, 1.0)
        for result, summed in ((grads.dk, dk_all), (grads.dv, dv_all)):
            if result is not None and summed is not None:
                result[b, h] = summed.view(result[b, h].shape)


def softmax_backward(p: Tensor, dp: Tensor, keys: int, dlse: Tensor | None) -> Tensor:
    """p (dp - Σ p dp + dlse), written over dp; the column of a sink, after the keys, has dp = 0."""
    if keys < p.shape[-1]:
        dp[..., keys:] = 0.0
    ds: Tensor = torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)
    return ds if dlse is None else ds.addcmul_(p, dlse)


def add_product(result: Tensor, x: Tensor, y: Tensor, group: int, factor: float) -> None:
    """result += factor xᵀ y, of tiles (b · h, group · rows, any): the rows of each query head are summed by themselves, then the
    heads, for one long sum of all would round more than eager attention does."""
    if group == 1:
        result.baddbmm_(x.mT, y, alpha=factor)
        return
    heads = [t.unflatten(1, (group, -1)).flatten(0, 1) for t in (x, y)]
    result.add_(torch.bmm(heads[0].mT, heads[1]).unflatten(0, (-1, group)).sum(1), alpha=factor)


def add_terms(grads: Grads, block: Block, ds: Tensor, dlse: Tensor | None) -> None:
    """Add a block's ds, (b, query heads, rows, keys and a sink), to the gradients of bias and sinks."""
    b, _, hq, i, j = block
    keys = j.stop - j.start
    if grads.dsinks is not None:
        grads.dsinks[hq] += ds[..., keys].sum((0, 2), dtype=torch.float64)
    if grads.dbias is None:
        return
    places = tuple(slice(None) if size == 1 else place for size, place in zip(grads.dbias.shape, (b, hq, i, j), strict=True))
    if grads.dbias.shape[3] == 1:
        # Over the keys and the sink ds adds up to dlse: summing it over the keys would leave rounding of a gradient that is 0.
        found = ds.new_zeros((*ds.shape[:3], 1)) if dlse is None else dlse[b, hq, i].masked_fill(grads.empty[b, hq, i], 0.0)
        found = found if ds.shape[3] == keys else found - ds[..., keys:]
    else:
        found = ds[..., :keys]
    summed = [dim for dim, size in enumerate(grads.dbias.shape[:3]) if size == 1]
    grads.dbias[places] += found.sum(summed, keepdim=True) if summed else found


def statistics(problem: Problem, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """reference.statistics by blocks: the largest logit and the entropy of every row, (B, HQ, M) or packed (HQ, total_q)."""
    rows = q.shape[:-1]
    shape = (rows[1], rows[0]) if problem.packed else rows
    acc = accumulator(problem.dtype)
    peak, entropy = (torch.full(shape, value, dtype=acc, device=problem.device) for value in (-INF, 0.0))
    for part in parts(problem):
        own, results = part.problem, [part.row_values(t) for t in (peak, entropy)]
        q_part, k_part = part.of(q, part.rows), part.of(k, part.keys)
        pieces, whole = [(i, j) for i, j in spans(own) if j.start < j.stop], grid(own, part.first_batch)
        (room,) = room_for(own, pieces, 1)
        for b, h in shares(own, pieces):
            k_all, hq = keys_of(k_part, b, h, acc), query_heads(own, h)
            for i, j in pieces:
                block = Block(b, h, hq, i, j)
                tile, _ = scores(own, rows_of(q_part, block, acc), k_all[:, j], block, room, here(whole, block), False)
                top = tile[..., : j.stop - j.start].amax(-1, keepdim=True)
                p = torch.softmax(tile, -1, out=tile)[..., : j.stop - j.start]
                found = torch.special.entr(p).sum(-1, keepdim=True).masked_fill_(top == -INF, 0.0)
                if (shut := closed(own, hq)) is not None:
                    four(found, block).masked_fill_(shut[..., None], 0.0)
                for result, value in zip(results, (top, found), strict=True):
                    result[b, hq, i] = four(value, block)
    return peak, entropy
