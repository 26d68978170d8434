"""Compile what a call would launch for any target, without that GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from andrea_triton import target as targets
from andrea_triton.counting.cards import CARDS
from andrea_triton.errors import DTypeError, FitError, ShapeError
from andrea_triton.kernels.views import PAD
from andrea_triton.launch import run
from andrea_triton.launch.compile import compiled, flatten, gpu_target
from andrea_triton.launch.configs import Config
from andrea_triton.launch.descriptors import expanded, without_descriptors
from andrea_triton.launch.plan import Grads, Launch, Saved, backward_plan, forward_plan, row_blocks, tiled, unit_stride
from andrea_triton.problem import Problem, accumulator, make_problem
from andrea_triton.spec import Mask, Score, Window, make_spec


@dataclass(frozen=True)
class CompiledLaunch:
    """One kernel start, compiled.

    Args:
        name: forward, delta, dkdv, dq, dbias or dsinks.
        kernel: Triton's CompiledKernel.
        grid: programs along both axes.
        args: tensors and numbers, in the order of the compiled kernel's parameters.
        tile: (BLOCK_M, BLOCK_N).
        config: the tiling, with warps and stages.
        outputs: the tensors of the call that this launch fills, by name: out, lse, dq, dk, dv, dbias, dsinks.
        matmul_dims: for each product of a tile, its dim beside BLOCK_M and BLOCK_N, as padded.
    """

    name: str
    kernel: CompiledKernel
    grid: tuple[int, int]
    args: tuple[Any, ...]
    tile: tuple[int, int]
    config: Config
    outputs: dict[str, Tensor]
    matmul_dims: tuple[int, ...]


def compiled_launches(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, *, target: str = "sm_80", dlse: Tensor | None = None,
    causal: bool = False, scale: float | None = None, window: Window = None, q_start: int | None = None,
    softcap: float | None = None, bias: Tensor | None = None, alibi: Tensor | None = None, sinks: Tensor | None = None,
    key_lengths: Tensor | None = None, score: Score | None = None, mask: Mask | Tensor | None = None, dropout_p: float = 0.0,
    seed: int | Tensor | None = None, precise: bool = False, return_lse: bool = False, validate: bool = False,
    descriptors: bool = True, precision: str | None = None, only: str | None = None, config: Config | None = None,
) -> list[CompiledLaunch]:  # fmt: skip
    """The launches that `attention(q, k, v, ...)` makes, and with dout those of its backward, compiled and not started.

    Args:
        q: queries (B, HQ, M, D), on any device.
        k: keys (B, HKV, N, D).
        v: values (B, HKV, N, DV).
        dout: gradient of out (B, HQ, M, DV); None for the forward alone.
        target: sm_80, sm_90, gfx942 ...; the GPU need not be there.
        dlse: gradient of lse (B, HQ, M), or None.
        descriptors: False compiles bare pointers where the call would take tensor descriptors, as it does for tensors that have
            none.
        precision: how fp32 is multiplied, ieee, tf32x3 or tf32; None asks torch's own setting, as a call does.
        only: the name of one launch, to compile no other.
        config: a tiling in place of the table's; None takes the table's first that fits.
        causal, scale, window, q_start, softcap, bias, alibi, sinks, key_lengths, score, mask, dropout_p, seed, precise,
            return_lse, validate: as in `attention`; lse is among the outputs in any case.

    Returns:
        Launches in the order in which they are to run, for later ones read what earlier ones wrote: forward; with dout delta,
        dkdv and dq; then dbias and dsinks where bias and sinks require gradients. Their outputs are allocated and hold nothing
        yet. A launch that would start no program, as without queries or keys, is left out.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`; ShapeError also for a dout that is not shaped like out.
        CompileError: Triton cannot compile for the target, or nothing fits it.

    Example:
        >>> x = torch.zeros(1, 2, 100, 64, dtype=torch.float16)
        >>> (forward,) = compiled_launches(x, x, x, target="sm_80", causal=True)
        >>> forward.name, forward.tile, forward.grid, sorted(forward.outputs)
        ('forward', (128, 64), (2, 1), ['lse', 'out'])
    """
    spec = make_spec(
        causal=causal, scale=scale, window=window, q_start=q_start, softcap=softcap, dropout_p=dropout_p, precise=precise
    )
    keep, user_mask = (mask, None) if isinstance(mask, Tensor) else (None, mask)
    if seed is None and dropout_p > 0.0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    problem = make_problem(
        q, k, v, spec, bias=bias, alibi=alibi, sinks=sinks, key_lengths=key_lengths, keep=keep, score=score, mask=user_mask,
        seed=seed, validate=validate,
    )  # fmt: skip
    plan = planned(q, k, v, dout, dlse, problem, target, precision or targets.float32_precision())
    if not descriptors:
        plan = [(replace(x, described=False, args=without_descriptors(x.args)), outputs) for x, outputs in plan]
    if only is not None:
        plan = [(x, outputs) for x, outputs in plan if x.name == only]
    if config is not None:
        plan = [(replace(x, configs=(config,)), outputs) for x, outputs in plan]
    return [compile_launch(launch, problem, target, outputs) for launch, outputs in plan]


Planned = tuple[Launch, dict[str, Tensor]]


def planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    problem: Problem,
    target: str,
    precision: str,
) -> list[Planned]:
    """The launches of a problem that start any program, and the tensors that each of them fills."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    total = accumulator(q.dtype)
    shape = (problem.HQ, problem.M) if problem.packed else (problem.B, problem.HQ, problem.M)
    out = run.allocate_like(q, problem.DV, problem.packed)
    saved = Saved(out, *(run.allocate(shape, total, q.device) for _ in range(3)))
    plan = [(launch, {"out": out, "lse": saved.lse}) for launch in forward_plan(q, k, v, saved, problem, target, precision)]
    if dout is not None:
        _check_like("dout", dout, out)
        if dlse is not None:
            _check_like("dlse", dlse, saved.lse)
        plan += _planned_backward(q, k, v, unit_stride(dout), dlse, saved, problem, target, precision)
    elif dlse is not None:
        raise ShapeError("dlse came without dout; wanted both, or none for the forward alone; pass dout=torch.zeros(...) with it")
    return [(launch, outputs) for launch, outputs in plan if 0 not in launch.grid]


def _planned_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, target: str,
    precision: str,
) -> list[Planned]:  # fmt: skip
    total, bias, sinks = accumulator(q.dtype), problem.extras.bias, problem.extras.sinks
    grads = Grads(
        run.allocate_like(q, problem.D, problem.packed),
        run.allocate_like(k, problem.D, problem.packed),
        run.allocate_like(v, problem.DV, problem.packed),
        run.allocate(_unbroadcast(bias), total, q.device) if bias is not None and bias.requires_grad else None,
        run.allocate((problem.HQ,), total, q.device) if sinks is not None and sinks.requires_grad else None,
    )
    # Three tensors of their own rather than one: an executor that checks bounds sees where each of them ends.
    heads = problem.HQ if problem.packed else problem.B * problem.HQ
    rows: Any = [run.allocate((heads, row_blocks(problem) * PAD.value), total, q.device) for _ in range(3)]
    dlse = None if dlse is None else dlse.contiguous()
    plan = backward_plan(q, k, v, dout, dlse, saved, rows, grads, problem, target, precision)
    fills = {"delta": (), "dkdv": ("dk", "dv")}
    return [(launch, {name: getattr(grads, name) for name in fills.get(launch.name, (launch.name,))}) for launch in plan]


def _unbroadcast(t: Tensor) -> tuple[int, ...]:
    """The shape of a broadcast view with 1 for the dims that it repeats."""
    return tuple(1 if stride == 0 else size for size, stride in zip(t.shape, t.stride(), strict=True))


def _check_like(name: str, t: Tensor, like: Tensor) -> None:
    if t.shape != like.shape:
        raise ShapeError(
            f"{name} has shape {tuple(t.shape)}; wanted {tuple(like.shape)}; use torch.empty_like of what attention gives"
        )
    if t.dtype != like.dtype or t.device != like.device:
        raise DTypeError(f"{name} is {t.dtype} on {t.device}; wanted {like.dtype} on {like.device}; convert it with .to(...)")


def compile_launch(launch: Launch, problem: Problem, target: str, outputs: dict[str, Tensor]) -> CompiledLaunch:
    """Compile a launch with the first of its tilings that fits the shared memory of the target.

    Raises:
        CompileError: Triton cannot compile it. FitError: none fits.
    """
    card = CARDS.get(target)
    for config in launch.configs:
        chosen = tiled(launch, problem, config)
        kernel = compiled(chosen, gpu_target(target))
        if card is None or kernel.metadata.shared <= card.shared_per_cta:
            args, tile = expanded(flatten(chosen.args)), (config.BLOCK_M, config.BLOCK_N)
            return CompiledLaunch(
                launch.name, kernel, chosen.grid, args, tile, config, outputs, _matmul_dims(launch.name, problem)
            )
    raise FitError(f"no tiling of {launch.name} fits {target} for head dims {problem.D}, {problem.DV}; use backend='torch'")


def _matmul_dims(name: str, problem: Problem) -> tuple[int, ...]:
    D, DV = (max(16, 1 << (d - 1).bit_length()) for d in (problem.D, problem.DV))
    return {"forward": (D, DV), "dkdv": (D, DV, DV, D), "dq": (D, DV, D), "dbias": (D, DV)}.get(name, (DV,))
