"""The torch backend: PyTorch's own fused attention where it says what is asked, else the dense reference.

Fused attention is taken on the CPU for dense problems that a position band and masks describe. It reports lse = 0 on rows
that see
nothing and spreads a NaN of a masked key, and its gradients are wrong on rows of scores near the end of the float range: those go
the dense way, found by looking at the inputs, which costs no synchronisation on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Problem
from .reference import reference

LARGEST_BIAS = 2.0**14  # beyond it lse in fp32 no longer resolves the logarithm of the row sum


def fused(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Whether PyTorch's fused CPU attention gives this problem's answer, in every row."""
    extras, spec = problem.extras, problem.spec
    other = (
        spec.softcap,
        extras.slopes,
        extras.sinks,
        extras.key_lengths,
        extras.score,
        extras.mask,
        extras.cu_seqlens_q,
    )
    if problem.device.type != "cpu" or any(x is not None for x in other) or spec.dropout_p > 0.0 or problem.scale <= 0:
        return False
    if problem.D != problem.DV or 0 in (problem.B, problem.HQ, problem.M, problem.N):
        return False
    if extras.bias is not None:
        size = extras.bias.detach().abs()
        size = size.masked_fill(extras.bias == float("-inf"), 0.0)
        if extras.bias.requires_grad or not bool((size <= LARGEST_BIAS).all()):
            return False
    return bool(k.isfinite().all()) and bool(q.isfinite().all())


def mask_of(problem: Problem) -> tuple[Tensor | None, bool]:
    """(float mask or None, is_causal) for PyTorch's attention: 0 or -inf, plus the bias, in the shape that broadcasting
    leaves."""
    extras, (left, right) = problem.extras, problem.band()
    if left is None and right is None and extras.keep is None and extras.bias is None:
        return None, False
    if left is None and right == 0 and problem.q_start == 0 and extras.keep is None and extras.bias is None:
        return None, True
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
    mask = torch.zeros((), dtype=problem.dtype, device=problem.device)
    if extras.bias is not None:
        mask = unexpanded(extras.bias).to(problem.dtype)
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
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=problem.scale)
    empty = None if mask is None else (mask == float("-inf")).all(-1)
    return out, lse.contiguous() if empty is None else lse.masked_fill(empty, float("-inf")).contiguous()


def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> list[Tensor]:
    """dq, dk, dv of a problem that fused() accepts, for a gradient of out alone."""
    mask, is_causal = mask_of(problem)
    q, k, v, dout = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(dout)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    grads = op(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=problem.scale)
    return [grad.to(t.dtype) for grad, t in zip(grads, (q, k, v), strict=True)]
