"""The torch backend: PyTorch's own fused attention where it says what is asked, else the dense reference.

Fused attention is taken on the CPU for dense problems that a position band and masks describe. It reports lse = 0 on rows that
see nothing and spreads a NaN of a masked key; such problems go the dense way, found by looking at the inputs, which costs no
synchronisation on a CPU. PyTorch's fused backward is not used: it takes the weights as exp(s - lse), which loses the digits
of a large lse, and so misses the accuracy rule on peaked rows. The backward here makes the weights of a block of rows once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .problem import Extras, Problem, accumulator, output_shape
from .reference import reference
from .spec import AttentionSpec

LARGEST_BIAS = 2.0**14  # beyond it lse in fp32 no longer resolves the logarithm of the row sum
ROWS = 128  # of a block of the backward
TILE = 2**20  # scores that the backward holds at a time, unless a single block of rows has more: few, long passes for the threads


def fused(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Whether PyTorch's fused CPU attention gives this problem's answer, in every row."""
    extras, spec = problem.extras, problem.spec
    # What it knows is named; a setting or tensor that is not, one made tomorrow too, goes the dense way.
    known_spec = AttentionSpec(left=spec.left, right=spec.right, q_start=spec.q_start, scale=spec.scale, precise=spec.precise)
    known_extras = Extras(bias=extras.bias, keep=extras.keep)
    if problem.device.type != "cpu" or spec != known_spec or any(x is not y for x, y in zip(extras, known_extras, strict=True)):
        return False
    if problem.scale <= 0:
        return False
    if problem.D != problem.DV or 0 in (problem.B, problem.HQ, problem.M, problem.N):
        return False
    if extras.bias is not None:
        size = extras.bias.detach().abs()
        size = size.masked_fill(extras.bias == float("-inf"), 0.0)
        if extras.bias.requires_grad or not bool((size <= LARGEST_BIAS).all()):
            return False
    return all_finite(k) and all_finite(q)


def all_finite(t: Tensor) -> bool:
    """Whether no element is inf or NaN. A sum is read several times faster than elements are looked at, and seldom overflows."""
    return math.isfinite(t.sum().item()) or bool(t.isfinite().all())


def mask_of(problem: Problem) -> tuple[Tensor | None, bool]:
    """(float mask or None, is_causal) for PyTorch's attention: 0 or -inf, plus the bias, in the shape that broadcasting
    leaves."""
    extras, (left, right) = problem.extras, problem.band()
    if extras.keep is None and extras.bias is None:
        if left is None and right == 0 and problem.q_start == 0:
            return None, True
        sees_first = left is None or left >= problem.q_start + problem.M - 1
        if sees_first and (right is None or right >= problem.N - 1 - problem.q_start):
            return None, False
    q_pos = torch.arange(problem.M, device=problem.device)[:, None] + problem.q_start
    k_pos = torch.arange(problem.N, device=problem.device)[None, :]
    seen = torch.ones(problem.M, problem.N, dtype=torch.bool, device=problem.device)
    if left is not None:
        seen &= k_pos >= q_pos - left
    if right is not None:
        seen &= k_pos <= q_pos + right
    seen = seen[None, None]
    if extras.keep is not None:
        seen = seen & unexpanded(extras.keep)
    mask = torch.zeros((), dtype=accumulator(problem.dtype), device=problem.device)
    if extras.bias is not None:
        mask = unexpanded(extras.bias).to(mask.dtype)
    return torch.where(seen, mask, float("-inf")).contiguous(), False


def unexpanded(t: Tensor) -> Tensor:
    """A broadcast view without its repetitions."""
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(dim, 0, 1)
    return t


def unit_stride(t: Tensor) -> Tensor:
    """t, or a copy of it where its last dim has a stride that PyTorch's fused attention would take for 1."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse), no gradient: shapes and dtypes as reference()."""
    if not fused(problem, q, k):
        with torch.no_grad():
            return reference(problem, q, k, v)
    mask, is_causal = mask_of(problem)
    acc, dtype = accumulator(q.dtype), q.dtype
    # In 16 bits PyTorch takes an exponential of five digits, no faster than this.
    q, k, v = unit_stride(q).to(acc), unit_stride(k).to(acc), unit_stride(v).to(acc)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=problem.scale)
    out = out.to(dtype)
    empty = None if mask is None else (mask == float("-inf")).all(-1)
    return out, lse.contiguous() if empty is None else lse.masked_fill(empty, float("-inf")).contiguous()


def backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a problem that fused() accepts, in memory that grows with the length.

    Maths:  p = softmax(s), dp = dout vᵀ, ds = p (dp - Σ p dp + dlse); dq = scale ds k, dk = scale dsᵀ q, dv = pᵀ dout
    Shapes: all of a block of rows of some heads at a time; the query heads of a key head lie among the rows.
    Source: arXiv 2205.14135, section B.4.
    """
    acc, G = accumulator(problem.dtype), problem.group
    grads = tuple(torch.zeros_like(t, dtype=acc, memory_format=torch.contiguous_format) for t in (q, k, v))
    dq, dk, dv = grads[0].unflatten(1, (-1, G)), *grads[1:]
    for block in blocks(problem):
        b, h, i, j = block
        q_tile, k_tile, v_tile = grouped(q, block, G).to(acc) * problem.scale, k[b, h, j].to(acc), v[b, h, j].to(acc)
        p = weights_tile(problem, q_tile @ k_tile.mT, lse, block)
        do_tile = grouped(dout, block, G).to(acc)
        dv[b, h, j] += p.mT @ do_tile
        dp = do_tile @ v_tile.mT
        delta = torch.linalg.vecdot(p, dp)[..., None]
        ds = dp.sub_(delta if dlse is None else delta - grouped(dlse[..., None], block, G)).mul_(p)
        dq[b, h, :, i] = (ds @ k_tile).mul_(problem.scale).unflatten(2, (G, -1))
        dk[b, h, j] += ds.mT @ q_tile
    return tuple(laid_out(grad, t, t.shape[-1], False) for grad, t in zip(grads, (q, k, v), strict=True))  # type: ignore[return-value]


def blocks(problem: Problem) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Batch entries, key heads, rows and the keys these see: all pairs of the problem, at most about TILE at a time."""
    left, right = problem.band()
    for first in range(0, problem.M, ROWS):
        end = min(first + ROWS, problem.M)
        low = 0 if left is None else max(0, problem.q_start + first - left)
        high = problem.N if right is None else min(problem.N, problem.q_start + end + right)
        if low >= high:
            continue
        heads = max(1, TILE // ((end - first) * (high - low) * problem.group))
        entries = max(1, heads // problem.HKV)
        for b in range(0, problem.B, entries):
            for h in range(0, problem.HKV, heads):
                yield slice(b, b + entries), slice(h, h + heads), slice(first, end), slice(low, high)


def grouped(t: Tensor, block: tuple[slice, ...], group: int) -> Tensor:
    """A block of a tensor (B, HQ, M, any): (b, h, group · rows, any)."""
    b, h, i, _ = block
    return t.unflatten(1, (-1, group))[b, h, :, i].flatten(2, 3)


def weights_tile(problem: Problem, s: Tensor, lse: Tensor, block: tuple[slice, slice, slice, slice]) -> Tensor:
    """The softmax over the visible scores of a block (b, h, group · rows, keys), which it overwrites; 0 in rows without keys."""
    extras, (left, right), (b, h, i, j) = problem.extras, problem.band(), block
    tile = s.unflatten(2, (problem.group, -1))
    here = (b, h, slice(None), i, j)
    if extras.bias is not None:
        tile += extras.bias.unflatten(1, (-1, problem.group))[here]
    if extras.keep is not None:
        tile.masked_fill_(~extras.keep.unflatten(1, (-1, problem.group))[here], float("-inf"))
    q_pos = torch.arange(i.start, i.stop)[:, None] + problem.q_start
    k_pos = torch.arange(j.start, j.stop)
    if left is not None:  # the last query hides most
        edge = max(0, problem.q_start + i.stop - 1 - left - j.start)
        tile[..., :edge].masked_fill_(k_pos[:edge] < q_pos - left, float("-inf"))
    if right is not None:  # the first does
        edge = max(0, problem.q_start + i.start + right + 1 - j.start)
        tile[..., edge:].masked_fill_(k_pos[edge:] > q_pos + right, float("-inf"))
    p, empty = torch.softmax(s, -1), grouped(lse[..., None], block, problem.group) == float("-inf")
    return p.masked_fill_(empty, 0.0) if empty.any() else p


def room_like(t: Tensor, features: int, packed: bool) -> Tensor:
    """Room for (.., features) in the memory order of t, as launch/run.py allocates it."""
    shape, swapped = output_shape(t, features, packed)
    return t.new_empty(shape).transpose(1, 2) if swapped else t.new_empty(shape)


def laid_out(value: Tensor, t: Tensor, features: int, packed: bool) -> Tensor:
    """value in the memory order and dtype of t, a copy where it has another."""
    _, swapped = output_shape(t, features, packed)
    if value.dtype == t.dtype and (value.transpose(1, 2) if swapped else value).is_contiguous():
        return value
    return room_like(t, features, packed).copy_(value)
