"""What a backend does with a checked problem: tensors in, tensors out, nothing recorded for a gradient."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import cpu
from .problem import Problem
from .reference import reference, row_bias_grad, statistics, wide_reference
from .target import blame_triton

Gradients = cpu.Gradients


@functools.cache
def launcher() -> Any:
    """launch/run.py, imported with Triton when it is first needed.

    Raises:
        UnsupportedError: the installed Triton is not one that this works with.
    """
    try:
        from .launch import run
    except (ImportError, AttributeError, TypeError) as error:
        blame_triton(error)
        raise
    return run


def with_terms(problem: Problem, bias: Tensor | None, sinks: Tensor | None) -> Problem:
    """The problem with other tensors for bias, in its own shape, and sinks."""
    full = (problem.B, problem.HQ, problem.M, problem.N)
    bias = None if bias is None else bias.expand(full)
    return replace(problem, extras=problem.extras._replace(bias=bias, sinks=sinks))


def dense_backward(
    problem: Problem, inputs: tuple[Tensor | None, ...], dout: Tensor | None, dlse: Tensor | None, create_graph: bool
) -> list[Tensor | None]:
    """Gradients of q, k, v, bias, sinks through the dense reference: O(M N) memory, and differentiable again if asked."""
    # Inside an operator autograd is switched off below; this switches it on again.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        # Views, for one tensor may be q, k and v at once and wants three gradients.
        leaves = [None if t is None else t.view_as(t) for t in inputs]
        q, k, v, bias, sinks = leaves
        assert q is not None and k is not None and v is not None
        results = wide_reference(with_terms(problem, bias, sinks), q, k, v)
        pairs = [(r, g) for r, g in zip(results, (dout, dlse), strict=True) if g is not None and r.requires_grad]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        if not pairs or not wanted:
            return [None] * 5
        outputs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph, allow_unused=True))
        return [next(found) if t is not None and t.requires_grad else None for t in leaves]


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Where autocast, that of a caller's forward or of a caller's backward, does not recast the products."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def run_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, backend: str, learning: bool = True) -> tuple[Tensor, ...]:
    """out, lse, and the row pivots and sums that the kernels' backward takes: empty for backend torch, None by kernels where no
    backward follows."""
    if backend == "torch":
        with outside_autocast(q.device.type):
            out, lse = cpu.forward(problem, q, k, v)
        return out, lse, lse.new_empty(0), lse.new_empty(0)
    results: tuple[Tensor, ...] = launcher().forward(q, k, v, problem, backend, learning)
    return results


def run_backward(
    problem: Problem, inputs: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None,
    needs: tuple[bool, ...], backend: str,
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, bias and sinks (None where not needed), by a backend."""
    q, k, v, bias, _ = inputs
    assert q is not None and k is not None and v is not None
    dout = torch.zeros_like(saved[0]) if dout is None else dout
    score = problem.extras.score
    if backend == "torch" or (score is not None and score.grad is None):  # whose derivative only autograd of torch_fn knows
        with outside_autocast(q.device.type):
            return cpu.backward(problem, inputs, saved[0], saved[1], dout, dlse, needs)
    backward, of_qkv = launcher().backward, (needs[0], needs[1] or needs[2])
    if bias is None or not needs[3]:
        found: Gradients = backward(q, k, v, dout, dlse, saved, problem, backend, of_qkv, None, needs[4])
        return found
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    by_rows = shape[-1] == 1
    grads = backward(q, k, v, dout, dlse, saved, problem, backend, of_qkv, None if by_rows else shape, needs[4])
    dbias = row_bias_grad(saved[0], saved[1], inputs[4], dout, dlse) if by_rows else grads.dbias
    dbias = None if dbias is None else dbias.sum_to_size(bias.shape).to(bias.dtype)
    return grads.dq, grads.dk, grads.dv, dbias, grads.dsinks


def partial_backward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, backend: str
) -> tuple[Tensor, ...]:
    """dq, dk, dv of attention over some keys of rows whose out and lse are of all their keys: over the parts they add up."""
    empty, dlse, cpu_kind = lse == float("-inf"), None, backend in ("torch", "reference")
    saved: tuple[Tensor, ...] = (out, lse)
    if cpu_kind:
        with torch.no_grad():
            part, part_lse = saved = cpu.forward(problem, q, k, v) if backend == "torch" else reference(problem, q, k, v)
        share = torch.exp(part_lse - lse.masked_fill(empty, 0.0))[..., None]
        share = share.transpose(0, 1) if problem.packed else share
        dlse = (share * dout * (part - out)).sum(-1)
        dlse = dlse.transpose(0, 1) if problem.packed else dlse
        dout = (share * dout).to(q.dtype)
    else:
        from .launch.plan import attention

        unit = 1.0 if attention(problem, "ieee", "interpreter").exact.value else 1.0 / math.log(2.0)
        saved = (out, lse, lse.masked_fill(empty, 0.0) * unit, (~empty).to(lse.dtype))
    needs = (True, True, True, False, False)
    grads = run_backward(problem, (q, k, v, None, None), saved, dout, dlse, needs, "torch" if cpu_kind else backend)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, (q, k, v), strict=False))


def run_decode(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, int] | None, tree: Tensor | None, split_size: int,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out, lse over a cache, by the decode kernels. pages: the page table and the rows of a page. tree: bool (B, HQ, M, M)."""
    run = launcher()
    return run.decode(q, k, v, None if pages is None else run.Pages(*pages), tree, split_size, problem, backend)


def run_statistics(problem: Problem, q: Tensor, k: Tensor, lse: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """(largest logit, entropy) fp32 of lse's shape, by a backend."""
    if backend == "torch":
        with torch.no_grad(), outside_autocast(q.device.type):
            top, entropy = cpu.statistics(problem, q, k)
    elif backend == "reference":
        top, entropy = statistics(problem, q, k)
    else:
        top, entropy = launcher().statistics(q, k, lse, problem, backend)
    return top.float(), entropy.float()
