"""Allocate, and execute a plan. No maths."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import triton
from torch import Tensor

from andrea_triton import target as targets
from andrea_triton.errors import CompileError
from andrea_triton.kernels.views import PAD
from andrea_triton.launch import compile as compiler
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
    tiled,
    unit_stride,
)
from andrea_triton.problem import Problem, accumulator, output_shape

_kernels: dict[Any, Any] = {}


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The library's one allocator: uninitialised memory."""
    return torch.empty(shape, dtype=dtype, device=device)


def allocate_like(t: Tensor, features: int, packed: bool) -> Tensor:
    """Room for (.., H, T, features) in the memory order of t. Packed tensors are zeroed: no kernel visits the rows after the last
    sequence."""
    shape, swapped = output_shape(t, features, packed)
    room = allocate(shape, t.dtype, t.device)
    return room.zero_() if packed else room.transpose(1, 2) if swapped else room


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, backend: str) -> Saved:
    """Run the forward kernels on the tensors' device (backend triton) or in the interpreter.

    Returns:
        out [B,HQ,M,DV], and lse, row_max, row_sum [B,HQ,M] (packed: [HQ,total_q]) in fp32, fp64 for fp64.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    shape = (problem.HQ, problem.M) if problem.packed else (problem.B, problem.HQ, problem.M)
    rows = [allocate(shape, accumulator(q.dtype), q.device) for _ in range(3)]
    if problem.packed:
        rows = [rows[0].fill_(float("-inf")), rows[1].zero_(), rows[2].zero_()]
    saved = Saved(allocate_like(q, problem.DV, problem.packed), *rows)
    execute(
        forward_plan(q, k, v, saved, problem, targets.target_of(q.device), targets.float32_precision()),
        problem,
        backend,
    )
    return saved


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
    target, precision = targets.target_of(q.device), targets.float32_precision()
    execute(backward_plan(q, k, v, dout, dlse, saved, rows, grads, problem, target, precision), problem, backend)
    return grads


def statistics(q: Tensor, k: Tensor, lse: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """Run the statistics kernel: largest logit and entropy of every query, of lse's shape and dtype."""
    q, k = unit_stride(q), unit_stride(k)
    top, entropy = (allocate(tuple(lse.shape), lse.dtype, lse.device) for _ in range(2))
    if problem.packed:
        top, entropy = top.fill_(float("-inf")), entropy.zero_()
    target, precision = targets.target_of(q.device), targets.float32_precision()
    execute(statistics_plan(q, k, lse, top, entropy, problem, target, precision), problem, backend)
    return top, entropy


def decode(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages | None, splits: int, problem: Problem, backend: str
) -> tuple[Tensor, Tensor]:
    """Run the decode kernels: out [B,HQ,M,DV] and lse [B,HQ,M] of few queries over a cache, its keys in `splits` parts."""
    q, acc = unit_stride(q), accumulator(q.dtype)
    shape = (problem.B, problem.HQ, problem.M)
    parts = allocate((splits, *shape, problem.DV), acc, q.device), allocate((splits, *shape), acc, q.device)
    out, lse = allocate_like(q, problem.DV, False), allocate(shape, acc, q.device)
    target, precision = targets.target_of(q.device), targets.float32_precision()
    execute(decode_plan(q, k, v, pages, parts, out, lse, problem, target, precision), problem, backend)
    return out, lse


def execute(plan: list[Launch], problem: Problem, backend: str) -> None:
    """Start every launch of a plan, in order, under the tensors' device."""
    for launch in plan:
        if 0 in launch.grid:
            continue
        if backend == "interpreter":
            interpret(launch)
        else:
            with targets.current(problem.device):
                _start(launch, problem)


def _start(launch: Launch, problem: Problem) -> None:
    """Start a launch on the current device, with the first of its tilings that fits there."""
    key = (launch.kernel, *launch.constexprs.values(), launch.configs, problem.device, compiler.describe(launch.args))
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _first_that_fits(launch, problem)
    config, start = kernel
    chosen = launch if config == launch.config else tiled(launch, problem, config)
    start[(*chosen.grid, 1)](*arguments(chosen))


def arguments(launch: Launch) -> list[Any]:
    """Every parameter of the kernel, constants included, as Triton's compiled kernels take them."""
    values = iter(launch.args)
    return [launch.constexprs[name] if name in launch.constexprs else next(values) for name in launch.kernel.arg_names]


def _first_that_fits(launch: Launch, problem: Problem) -> tuple[Any, Any]:
    target, reason = targets.gpu_target(), ""
    for config in launch.configs:
        kernel = compiler.compiled(tiled(launch, problem, config), target)
        try:
            kernel._init_handles()
        except triton.runtime.errors.OutOfResources as error:
            reason = reason or str(error)
            continue
        if reason:
            found = f"{launch.name}: {launch.config} does not fit this card ({reason}); it runs with {config}, more slowly"
            warnings.warn(found, RuntimeWarning, stacklevel=2)
        return config, kernel
    raise CompileError(
        f"no tiling of {launch.name} fits {target.arch} for head dims {problem.D}, {problem.DV} ({reason}); use backend='torch'"
    )
