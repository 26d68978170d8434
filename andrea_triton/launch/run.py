"""Allocate, and execute a plan, or again the one made before for a call like this. No maths."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from andrea_triton import target as targets
from andrea_triton.kernels.views import PAD
from andrea_triton.launch.interpreter import interpret
from andrea_triton.launch.plan import (
    Grads,
    Launch,
    Pages,
    Saved,
    backward_plan,
    decode_plan,
    forward_plan,
    row_blocks,
    statistics_plan,
    unit_stride,
)
from andrea_triton.launch.start import Start, go, ready
from andrea_triton.memory import Memory
from andrea_triton.problem import Extras, Problem, accumulator, output_shape

Tensors = tuple[Any, ...]  # Tensor or None
Wanted = tuple[Any, ...]
Plan = Callable[[Tensors, Wanted, Problem, str, str], list[Launch]]


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None,
    like: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The library's one allocator: uninitialised memory, without gaps whatever the strides. A tensor that has all of this already
    halves the cost of saying it."""
    if like is not None:
        return torch.empty_like(like)
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def allocate_like(t: Tensor, features: int, packed: bool) -> Tensor:
    """Room for (.., H, T, features) in the memory order of t: never a view, which autograd would not let anyone change in place.
    Packed tensors are zeroed: no kernel visits the rows after the last sequence."""
    if features == t.shape[-1] and not packed and (t.is_contiguous() or t.transpose(1, 2).is_contiguous()):
        return allocate(t.shape, t.dtype, t.device, None, t)
    shape, swapped = output_shape(t, features, packed)
    if not swapped:
        return allocate(shape, t.dtype, t.device).zero_() if packed else allocate(shape, t.dtype, t.device)
    batch, rows, heads, _ = shape
    row = max(heads, 1) * features
    return allocate((batch, heads, rows, features), t.dtype, t.device, (max(rows, 1) * row, features, row, 1))


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, backend: str) -> Saved:
    """Run the forward kernels on the tensors' device (backend triton) or in the interpreter.

    Returns:
        out [B,HQ,M,DV], and lse, row_max, row_sum [B,HQ,M] (packed: [HQ,total_q]) in fp32, fp64 for fp64.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    shape = (problem.HQ, problem.M) if problem.packed else (problem.B, problem.HQ, problem.M)
    lse = allocate(shape, accumulator(q.dtype), q.device)
    rows = [lse, *[allocate(shape, lse.dtype, lse.device, None, lse) for _ in range(2)]]
    if problem.packed:
        rows = [rows[0].fill_(float("-inf")), rows[1].zero_(), rows[2].zero_()]
    saved = Saved(allocate_like(q, problem.DV, problem.packed), *rows)
    execute(_forward, (q, k, v), saved, problem, backend)
    return saved


def _forward(tensors: Tensors, _: Wanted, problem: Problem, target: str, precision: str) -> list[Launch]:
    q, k, v, *saved = tensors
    return forward_plan(q, k, v, Saved(*saved), problem, target, precision)


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, backend: str,
    needs: tuple[bool, bool], bias_shape: tuple[int, ...] | None = None, sinks: bool = False,
) -> Grads:  # fmt: skip
    """Run the backward kernels. needs: whether dq, and whether dk and dv are wanted; bias_shape: the bias's own four dims,
    when its gradient is wanted; sinks: whether theirs is."""
    q, k, v, dout = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(dout)
    dlse = None if dlse is None else dlse.contiguous()
    grads = Grads(
        allocate_like(q, problem.D, problem.packed) if needs[0] else None,
        allocate_like(k, problem.D, problem.packed) if needs[1] else None,
        allocate_like(v, problem.DV, problem.packed) if needs[1] else None,
        None if bias_shape is None else allocate(bias_shape, accumulator(q.dtype), q.device),
        allocate((problem.HQ,), accumulator(q.dtype), q.device) if sinks else None,
    )
    heads = problem.HQ if problem.packed else problem.B * problem.HQ
    rows = allocate((3, heads, row_blocks(problem) * PAD.value), accumulator(q.dtype), q.device)
    if problem.packed:
        rows.zero_()
    execute(_backward, (q, k, v, dout, dlse, *saved), (*rows.unbind(0), *grads), problem, backend, (needs, bias_shape, sinks))
    return grads


def _backward(tensors: Tensors, _: Wanted, problem: Problem, target: str, precision: str) -> list[Launch]:
    q, k, v, dout, dlse, *rest = tensors
    saved, grads = Saved(*rest[:4]), Grads(*rest[7:])
    rows: Any = rest[4:7]
    return backward_plan(q, k, v, dout, dlse, saved, rows, grads, problem, target, precision)


def statistics(q: Tensor, k: Tensor, lse: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """Run the statistics kernel: largest logit and entropy of every query, of lse's shape and dtype."""
    q, k = unit_stride(q), unit_stride(k)
    top, entropy = (allocate(tuple(lse.shape), lse.dtype, lse.device) for _ in range(2))
    if problem.packed:
        top, entropy = top.fill_(float("-inf")), entropy.zero_()
    execute(_statistics, (q, k, lse), (top, entropy), problem, backend)
    return top, entropy


def _statistics(tensors: Tensors, _: Wanted, problem: Problem, target: str, precision: str) -> list[Launch]:
    q, k, lse, top, entropy = tensors
    return statistics_plan(q, k, lse, top, entropy, problem, target, precision)


def decode(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages | None, tree: Tensor | None, split_size: int, problem: Problem, backend: str
) -> tuple[Tensor, Tensor]:
    """Run the decode kernels: out [B,HQ,M,DV] and lse [B,HQ,M] of queries over a cache, its keys in parts of `split_size`. tree:
    which of the newest rows sees which, bool [B,HQ,M,M]."""
    q, k, v, acc = unit_stride(q), unit_stride(k), unit_stride(v), accumulator(q.dtype)
    shape = (problem.B, problem.HQ, problem.M)
    number = -(-problem.N // split_size)
    parts = allocate((number, *shape, problem.DV), acc, q.device), allocate((number, *shape), acc, q.device)
    out, lse = allocate_like(q, problem.DV, False), allocate(shape, acc, q.device)
    table, size = (None, None) if pages is None else pages
    execute(_decode, (q, k, v, table, tree), (*parts, out, lse), problem, backend, (split_size, size))
    return out, lse


def _decode(tensors: Tensors, wanted: Wanted, problem: Problem, target: str, precision: str) -> list[Launch]:
    q, k, v, table, tree, *rest = tensors
    pages = None if table is None else Pages(table, wanted[1])
    return decode_plan(q, k, v, pages, tree, (rest[0], rest[1]), rest[2], rest[3], wanted[0], problem, target, precision)


def execute(plan: Plan, given: Tensors, made: Tensors, problem: Problem, backend: str, wanted: Wanted = ()) -> None:
    """Start the kernels of a plan under the tensors' device. A plan is made once for all calls that it would be the same for,
    but anew for every call with the caller's own functions, whose arguments may be anything.

    Args:
        plan: makes the launches from (*given, *made), wanted, problem, target and precision; it asks nothing else.
        given: tensors from outside, of any dtype and strides; None where absent.
        made: tensors allocated for this call, whose presence, dtypes and shapes follow from the rest.
        problem: the call.
        backend: triton or interpreter.
        wanted: what else the plan depends on.
    """
    target, precision = targets.target_of(problem.device), targets.float32_precision()
    if backend == "interpreter":
        for launch in plan((*given, *made), wanted, problem, target, precision):
            if 0 not in launch.grid:
                interpret(launch)
        return
    extras = [x for x in problem.extras if x is not None]
    own = problem.extras.score is not None or problem.extras.mask is not None
    tensors = (*given, *made, *[x for x in extras if isinstance(x, Tensor)])
    addresses = tuple([t.data_ptr() for t in tensors if t is not None])
    key = (plan, wanted, target, precision, _traits(given, addresses), _facts(problem, extras))
    starts = None if own else _starts.get(key)
    if starts is None:
        starts = _ready(plan, (*given, *made), wanted, problem, target, precision)
        if not own and all(start.lasting for start in starts):
            _starts.keep(key, starts)
    go(starts, addresses, problem)


_starts = Memory()


def forget() -> None:
    """Make the next call of every kind plan anew, as after a change of the tiles."""
    _starts.clear()


def _traits(given: Tensors, addresses: tuple[int, ...]) -> tuple[Any, ...]:
    """Everything a plan can depend on in the tensors of a call, their sizes apart."""
    aligned = reduce(operator.or_, addresses) % 16 == 0 or tuple([address % 16 == 0 for address in addresses])
    return aligned, *[None if t is None else (t.dtype, t.stride()) for t in given]


def _facts(problem: Problem, extras: list[Any]) -> tuple[Any, ...]:
    """Everything a plan can depend on in a problem: its tensors' kind, strides and shape, an int seed as such."""
    p = problem
    sizes = (p.B, p.HQ, p.HKV, p.M, p.N, p.D, p.DV, p.max_q, p.max_k, p.dtype, p.device, p.spec)
    if not extras:
        return sizes
    return *sizes, *[(x.dtype, x.stride(), x.shape) if isinstance(x, Tensor) else x for x in p.extras]


def _ready(plan: Plan, tensors: Tensors, wanted: Wanted, problem: Problem, target: str, precision: str) -> list[Start]:
    """The starts of a plan. Each tensor is made an object of its own first, for one may be q, k and v at once."""
    tensors = tuple([None if t is None else t.detach() for t in tensors])
    own_extras: list[Any] = [x.detach() if isinstance(x, Tensor) else x for x in problem.extras]
    extras = Extras(*own_extras)
    launches = plan(tensors, wanted, replace(problem, extras=extras), target, precision)
    own = [t for t in (*tensors, *extras) if isinstance(t, Tensor)]
    places = {id(t): i for i, t in enumerate(own)}
    with targets.current(problem.device):
        return [ready(launch, problem, places) for launch in launches if 0 not in launch.grid]
