"""PyTorch's own fused CPU attention, where it says what is asked.

It is taken for dense problems that plain, causal top-left attention and masks describe, the tensors finite. It reports lse = 0
on rows that see nothing and spreads a NaN of a masked key; such problems go by blocks, found by looking at the inputs, which
costs no synchronisation on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from andrea_triton.cpu.layout import room_like, unit_stride
from andrea_triton.problem import Extras, Problem, accumulator, unexpanded
from andrea_triton.spec import AttentionSpec

LARGEST_BIAS = 2.0**14  # beyond it lse in fp32 no longer resolves the logarithm of the row sum
LARGEST_LSE = 12.0  # up to which PyTorch's fused backward is as exact as the accuracy rule asks
CAST = 2**20  # elements of a tensor of 16 bits that are cast at a time
INF = float("inf")


def expressible(problem: Problem) -> bool:
    """Whether PyTorch's fused CPU attention has words for this problem: settings, shapes and the bias."""
    extras, spec = problem.extras, problem.spec
    # What it knows is named; a setting or tensor that is not, one made tomorrow too, goes by blocks.
    known_spec = AttentionSpec(left=spec.left, right=spec.right, q_start=spec.q_start, scale=spec.scale, precise=spec.precise)
    known_extras = Extras(bias=extras.bias, keep=extras.keep)
    if problem.device.type != "cpu" or spec != known_spec or any(x is not y for x, y in zip(extras, known_extras, strict=True)):
        return False
    if problem.D != problem.DV or 0 in (problem.B, problem.HQ, problem.M, problem.N, problem.D):
        return False
    if problem.scale <= 0 or causal(problem) is None:
        return False
    if extras.bias is not None:
        size = unexpanded(extras.bias.detach()).abs()
        size = size.masked_fill(unexpanded(extras.bias) == -INF, 0.0)
        return bool((size <= LARGEST_BIAS).all())
    return True


def fused(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Whether PyTorch's fused CPU attention gives this problem's answer, in every row."""
    return expressible(problem) and all_finite(k) and all_finite(q)


def all_finite(t: Tensor) -> bool:
    """Whether no element is inf or NaN. A sum is read several times faster than elements are looked at, and seldom overflows."""
    return math.isfinite(t.sum(dtype=accumulator(t.dtype)).item()) or bool(t.isfinite().all())


def causal(problem: Problem) -> bool | None:
    """PyTorch's is_causal for the band of a problem; None where that has no words for it."""
    left, right = problem.band()
    if left is not None and left < problem.q_start + problem.M - 1:
        return None
    if right is None or right >= problem.N - 1 - problem.q_start:
        return False
    return True if right == 0 and problem.q_start == 0 else None


def mask_of(problem: Problem) -> Tensor | None:
    """The float mask for PyTorch's attention, 0 or -inf, plus the bias, in the shape that broadcasting leaves."""
    keep, bias = problem.extras.keep, problem.extras.bias
    if keep is None and bias is None:
        return None
    mask = torch.zeros((), dtype=accumulator(problem.dtype), device=problem.device)
    if bias is not None:
        mask = unexpanded(bias).to(mask.dtype)
    if keep is not None:
        mask = torch.where(unexpanded(keep), mask, -INF)
    return mask.contiguous()


def seen_of(problem: Problem, mask: Tensor | None) -> Tensor | None:
    """(b, h, M, N) bool, dims of size 1 where broadcast: which keys the queries see; None where a mask hides none."""
    if mask is None:
        return None
    seen = mask != -INF
    if causal(problem):
        rows, keys = torch.arange(problem.M)[:, None], torch.arange(problem.N)
        seen = seen & (keys <= rows)
    return seen


def portions(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Batch entries and key heads whose tensors are cast at a time: all where nothing is to be cast."""
    whole = problem.dtype == accumulator(problem.dtype)
    heads = problem.HKV if whole else max(1, CAST // (max(problem.M, problem.N) * problem.D * problem.group))
    entries = problem.B if whole else max(1, heads // problem.HKV)
    for b in range(0, problem.B, entries):
        for h in range(0, problem.HKV, heads):
            yield slice(b, min(b + entries, problem.B)), slice(h, min(h + heads, problem.HKV))


def part_of(mask: Tensor | None, b: slice, hq: slice) -> Tensor | None:
    """The part of a mask (b, h, M, N), dims of size 1 where broadcast, for some batch entries and heads."""
    if mask is None:
        return None
    return mask[b if mask.shape[0] > 1 else slice(None), hq if mask.shape[1] > 1 else slice(None)]


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem that fused() accepts, in fp32: in 16 bits PyTorch's exponential has five digits, no faster."""
    mask, is_causal, acc = mask_of(problem), bool(causal(problem)), accumulator(q.dtype)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = room_like(q, problem.DV, False), q.new_empty(q.shape[:3], dtype=acc)
    for b, h in portions(problem):
        hq = slice(h.start * problem.group, h.stop * problem.group)
        tensors = (unit_stride(t[b, s]).to(acc) for t, s in ((q, hq), (k, h), (v, h)))
        found, found_lse = op(*tensors, 0.0, is_causal, attn_mask=part_of(mask, b, hq), scale=problem.scale)
        if found.shape == q.shape and found.dtype == q.dtype:
            out, lse = found, found_lse.contiguous()
        else:
            out[b, hq], lse[b, hq] = found, found_lse
    seen = seen_of(problem, mask)
    return out, lse if seen is None else lse.masked_fill(~seen.any(-1), -INF)


def near(problem: Problem, lse: Tensor) -> bool:
    """Whether weights taken as exp(s - lse), as PyTorch's fused backward does, are as exact as the accuracy rule asks.

    lse, of magnitude L, is off by up to half a unit, L eps / 2, and s by as much wherever a product of other blocks rounds it
    otherwise than the forward's did; all weights of a row are off by that factor, where a softmax made anew adds up to 1. Of the
    head dims 8 to 128 that were drawn at L up to the bound, only 64 kept the rule in every draw (tests/test_cpu.py, slow), and
    only in calls so large that no lucky draw makes eager look better. Rows without keys do not count.
    """
    if problem.dtype != torch.float32 or problem.D != 64 or min(problem.M, problem.N) < 256:
        return False
    low, high = torch.aminmax(lse.masked_fill(lse == -INF, 0.0))
    return max(-low.item(), high.item()) <= LARGEST_LSE


def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """dq, dk, dv, of a problem that fused() accepts and near() too.

    Rows of one key would get a gradient of rounding in the place of 0. With lse = inf their weights are 0; so are those of
    rows without keys; what a row of one key owes to dv is added by itself.
    """
    mask, is_causal = mask_of(problem), bool(causal(problem))
    seen = seen_of(problem, mask)
    if seen is None:
        first = torch.zeros(problem.M, dtype=torch.bool)
        first[0] = is_causal or problem.N == 1
        alone, lse = first, lse.masked_fill(first, INF)
    else:
        count = seen.sum(-1)
        alone, lse = count == 1, lse.masked_fill(count <= 1, INF)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = (unit_stride(t) for t in (dout, q, k, v, out))
    dq, dk, dv = op(*tensors, lse, 0.0, is_causal, attn_mask=mask, scale=problem.scale)
    if alone.any():
        b, h, i = alone.expand(lse.shape).nonzero(as_tuple=True)
        key = 0 if seen is None else seen.expand(problem.B, problem.HQ, -1, -1)[b, h, i].to(torch.uint8).argmax(-1)
        place = (b, h // problem.group, torch.zeros_like(b) + key)
        dv.index_put_(place, dout[b, h, i], accumulate=True)
    return dq, dk, dv
