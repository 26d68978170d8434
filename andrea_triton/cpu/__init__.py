"""The torch backend: attention on the CPU, or on any device, in PyTorch's own operations, in memory that grows with the length.

Whatever the way, sums and exponentials are in fp32 (fp64 for fp64). PyTorch's fused attention is taken where it says what is
asked (fused.py), and blocks of rows everywhere else (blocked.py). Its fused backward takes the weights as exp(s - lse), which
loses the digits of a large lse: it is taken in large calls in fp32 where lse is small; elsewhere the blocks make them anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from andrea_triton.cpu import blocked, fused
from andrea_triton.cpu.blocked import Gradients, statistics
from andrea_triton.cpu.layout import laid_out, room_like
from andrea_triton.problem import Problem

__all__ = ["Gradients", "backward", "forward", "laid_out", "room_like", "statistics"]


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse), no gradient: shapes and dtypes as reference(), out in the memory order of q."""
    with torch.no_grad():
        if fused.fused(problem, q, k):
            out, lse = fused.forward(problem, q, k, v)
            return laid_out(out, q, problem.DV, False), lse
        return blocked.forward(problem, q, k, v)


def backward(
    problem: Problem, inputs: tuple[Tensor | None, ...], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, bias and sinks, None where not needed, in the memory order and dtype of each.

    Args:
        problem: the checked call; its extras hold the values of bias and sinks.
        inputs: q, k, v, bias in the caller's own shape or None, sinks or None.
        out: of the forward.
        lse: of the forward, by any backend: the natural logarithm.
        dout: gradient of out.
        dlse: gradient of lse, or None.
        needs: which of the five are wanted.
    """
    q, k, v, *_ = inputs
    assert q is not None and k is not None and v is not None
    if dlse is not None and not dlse.any():
        dlse = None  # a graph fills in zeros where eager says None; both shall give the same bits
    plain = dlse is None and not (needs[3] or needs[4]) and any(needs)
    with torch.no_grad():
        if plain and fused.expressible(problem) and fused.near(problem, lse) and fused.fused(problem, q, k):
            found = list(fused.backward(problem, q, k, v, out, lse, dout))
            results: list[Tensor | None] = []
            for t, need in zip((q, k, v), needs, strict=False):
                grad = found.pop(0)  # its memory ends with it
                results.append(laid_out(grad, t, t.shape[-1], False) if need else None)
            return (*results, None, None)
        return blocked.backward(problem, inputs, lse, dout, dlse, needs)
