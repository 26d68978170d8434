"""Compile what a call would launch for any target, without that GPU, and say what the machine code will cost.

`compiled_launches` gives the launches of one call, for any executor to run. `python -m andrea_triton.counting.report` counts
them over head dims, dtypes and targets, prints a table, and writes JSON lines with --json; --help says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from andrea_triton import target as targets
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.machine_code import Loop, MachineCode, read
from andrea_triton.errors import CompileError, DTypeError, FitError, ShapeError
from andrea_triton.kernels.views import PAD
from andrea_triton.launch import run
from andrea_triton.launch.compile import compiled, flatten, gpu_target
from andrea_triton.launch.configs import Config
from andrea_triton.launch.descriptors import expanded, without_descriptors
from andrea_triton.launch.plan import Grads, Launch, Saved, backward_plan, forward_plan, products, row_blocks, tiled, unit_stride
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
    descriptors: bool = True, precision: str | None = None,
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
    plan = planned(q, k, v, dout, dlse, problem, target, precision or products(problem, target, targets.float32_precision()))
    if not descriptors:
        plan = [(replace(x, described=False, args=without_descriptors(x.args)), outputs) for x, outputs in plan]
    return [compile_launch(launch, problem, target, outputs) for launch, outputs in plan]


Planned = tuple[Launch, dict[str, Tensor]]


def planned(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, problem: Problem, target: str, precision: str
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


class Variant(NamedTuple):
    """What a counted call asks for beside q, k and v."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    group: int = 1
    bias: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0


VARIANTS = {
    "causal": Variant(),
    "full": Variant(causal=False),
    "window": Variant(window=256),
    "gqa": Variant(group=4),
    "softcap": Variant(softcap=30.0),
    "bias": Variant(bias=True),
    "alibi": Variant(alibi=True),
    "sinks": Variant(sinks=True),
    "dropout": Variant(dropout_p=0.1),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
HEADS = 4


class Count(NamedTuple):
    """One launch of a counted call: what was asked, and its machine code, or why there is none."""

    target: str
    D: int
    dtype: str
    variant: str
    kernel: str
    config: Config | None = None
    code: MachineCode | None = None
    error: str = ""

    def loops(self) -> tuple[Loop | None, Loop | None]:
        """The loops over full blocks and over edges: of the main loops, the shortest and the longest."""
        found = sorted(self.code.loops, key=lambda loop: loop.total) if self.code else []
        return (found[0], found[-1]) if found else (None, None)


def count(target: str, D: int, dtype: str, variant: str, length: int) -> list[Count]:
    """Compile the launches of one call, forward and backward, with HEADS heads and as many queries as keys, and read them.

    Args:
        target: a name in CARDS.
        D: head dim of q, k and v.
        dtype: a name in DTYPES; fp32 is multiplied by IEEE's rules, tf32 is fp32 multiplied in TF32.
        variant: a name in VARIANTS.
        length: queries and keys.

    Returns:
        A Count for each launch; a single one with an error where Triton cannot compile.
    """
    asked, cpu = VARIANTS[variant], torch.device("cpu")
    q = run.allocate((1, HEADS, length, D), DTYPES[dtype], cpu)
    k, v = (run.allocate((1, HEADS // asked.group, length, D), q.dtype, cpu) for _ in range(2))
    per_head = run.allocate((HEADS,), torch.float32, cpu)
    try:
        launches = compiled_launches(
            q, k, v, q, target=target, causal=asked.causal, window=asked.window, softcap=asked.softcap,
            bias=run.allocate((HEADS, length, length), q.dtype, cpu) if asked.bias else None,
            alibi=per_head if asked.alibi else None, sinks=per_head if asked.sinks else None,
            dropout_p=asked.dropout_p, seed=0, precision="tf32" if dtype == "tf32" else "ieee",
        )  # fmt: skip
        return [Count(target, D, dtype, variant, x.name, x.config, machine_code(x, target)) for x in launches]
    except CompileError as error:
        return [Count(target, D, dtype, variant, "-", error=str(error).splitlines()[0])]


def machine_code(launch: CompiledLaunch, target: str) -> MachineCode:
    """What the machine code of a compiled launch asks of its card."""
    warps = launch.config.num_warps
    return read(launch.kernel, CARDS[target], num_warps=warps, tile=launch.tile, matmul_dims=launch.matmul_dims)


def as_json(row: Count) -> str:
    """One JSON line: everything in a Count, with its loops as `full` and `edge`, and Triton's version. A nan is null."""
    full, edge = row.loops()
    record: dict[str, Any] = {
        "kernel": row.kernel, "target": row.target, "D": row.D, "dtype": row.dtype, "variant": row.variant,
        "triton": triton.__version__, "error": row.error,
    }  # fmt: skip
    if row.config and row.code:
        resources = dataclasses.asdict(row.code)
        del resources["loops"], resources["target"]
        record |= {"card": CARDS[row.target].name, **row.config._asdict(), **resources}
        record |= {"full": _plain(full), "edge": _plain(edge)}
    return json.dumps(record)


def _plain(loop: Loop | None) -> dict[str, Any] | None:
    if loop is None:
        return None
    return {name: None if value != value else value for name, value in dataclasses.asdict(loop).items() if name != "head"}


HEADER = (
    f"{'target':8}{'D':>4} {'dtype':6}{'variant':9}{'kernel':9}{'tile':>33}{'regs':>6}{'spills (in loops)':>19}"
    f"{'shared KB':>12}{'CTAs':>6}{'instructions':>14}{'TFLOP/s':>12}  matrix products"
)


def as_text(row: Count) -> str:
    """One line of the table."""
    start = f"{row.target:8}{row.D:4} {row.dtype:6}{row.variant:9}{row.kernel:9}"
    if not (row.config and row.code):
        return f"{start} {row.error}"
    code, (full, edge) = row.code, row.loops()
    spills = f"{code.spill_loads}/{code.spill_stores} ({code.spills_in_loops})"
    shared = f"{code.shared_memory / 1024:.0f}/{code.shared_limit // 1024}"
    instructions = f"{full.total}/{edge.total}" if full and edge else "-"
    speed = "-" if full is None else _speeds(full.overlap_tflops, full.serial_tflops)
    kinds = " ".join(code.mma_kinds) or "none"
    resources = f"{row.config!s:>33}{code.registers:6}{spills:>19}{shared:>12}{code.ctas_per_sm:6}"
    return f"{start}{resources}{instructions:>14}{speed:>12}  {kinds}"


def _speeds(overlap: float, serial: float) -> str:
    return "-" if overlap != overlap else f"{overlap:.0f}/{serial:.0f}"


def nominal_backward(rows: Sequence[Count]) -> tuple[float, float] | None:
    """(overlap, serial) TFLOP/s of dkdv and dq together in full blocks, counting the five products of the maths, 10 D FLOP per
    score element, and not the two that dq makes again. None where either has no matrix product."""
    found = {row.kernel: row.loops()[0] for row in rows}
    dkdv, dq = found.get("dkdv"), found.get("dq")
    if dkdv is None or dq is None or dkdv.overlap != dkdv.overlap or dq.overlap != dq.overlap:
        return None
    card = CARDS[rows[0].target]
    per_second = 10 * rows[0].D * card.sms * card.ghz / 1e3
    return per_second / (dkdv.overlap + dq.overlap), per_second / (dkdv.serial + dq.serial)


def _print_call(rows: Sequence[Count]) -> None:
    for row in rows:
        print(as_text(row))
    if nominal := nominal_backward(rows):
        print(f"{'':27}{'dkdv + dq, nominal':99}{_speeds(*nominal):>12}")


def _with_progress(calls: Iterable[Any], total: int) -> Iterable[Any]:
    """The calls, under a progress bar where tqdm is installed."""
    if find_spec("tqdm") is None:
        return calls
    from tqdm import tqdm

    return tqdm(calls, total=total, desc="compiling", unit="call", file=sys.stderr)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m andrea_triton.counting.report",
        description="Count the machine code of attention, forward and backward, for any target, without that GPU.",
        epilog="instructions: of one warp for one tile, in the loops over full blocks and over edges. TFLOP/s: of the card in "
        "full blocks, modelled: all pipes overlap / matrix products overlap with nothing.",
    )
    for name, known, default in (
        ("target", CARDS, list(CARDS)),
        ("dtype", DTYPES, ["fp16", "bf16"]),
        ("variant", VARIANTS, ["causal"]),
    ):
        text = f"any of {', '.join(known)}; default: {' '.join(default)}"
        parser.add_argument(f"--{name}", nargs="+", default=default, choices=list(known), metavar="NAME", help=text)
    parser.add_argument("--d", nargs="+", type=int, default=[32, 64, 128], metavar="D", help="head dims; default: 32 64 128")
    parser.add_argument("--length", type=int, default=1024, help="queries and keys (1024)")
    parser.add_argument("--json", metavar="FILE", help="also write one JSON line per kernel to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 when something did not compile, else 0."""
    asked = _arguments(argv)
    calls = list(itertools.product(asked.target, asked.d, asked.dtype, asked.variant))
    counted: list[list[Count]] = []
    with open(asked.json, "w", encoding="utf-8") if asked.json else nullcontext() as file:
        for target, D, dtype, variant in _with_progress(calls, len(calls)):
            counted.append(count(target, D, dtype, variant, asked.length))
            for row in counted[-1]:
                if file is not None:
                    print(as_json(row), file=file, flush=True)
    print(HEADER)
    for rows in counted:
        _print_call(rows)
    return int(any(row.error for rows in counted for row in rows))


if __name__ == "__main__":
    sys.exit(main())
