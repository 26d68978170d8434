"""A plan is data: the launches that one attention call makes. A GPU runs them, the interpreter interprets them, report compiles
them; nothing here does either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from andrea_triton.errors import UnsupportedError
from andrea_triton.kernels import backward, decode, forward, statistics, term_grads
from andrea_triton.kernels.bands import Band
from andrea_triton.kernels.dropout import Dropout
from andrea_triton.kernels.numerics import FP32, FP64, constant
from andrea_triton.kernels.scores import Terms
from andrea_triton.kernels.tile import Attention
from andrea_triton.kernels.views import PAD, Matrix, Sizes, View
from andrea_triton.launch.configs import Config, candidates, three_products
from andrea_triton.launch.descriptors import described, with_descriptors
from andrea_triton.problem import Problem

MAX_HEAD_DIM = 256
MAX_BLOCKS = 65535  # of grid axis 1
LARGEST_CAP = 2.0**126  # of which the reciprocal is a normal fp32 number, and log2(e) times which is finite
WIDE_STRIDE = 2**31 // PAD.value  # strides from here on overflow int32 within a tile


@dataclass(frozen=True)
class Launch:
    """One kernel start: `args` are its run-time arguments in order, `constexprs` the rest by name, `configs` the tilings to fall
    back on, best first, `config` the one in use."""

    name: str
    kernel: Any
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    grid: tuple[int, int]
    config: Config
    configs: tuple[Config, ...]
    described: bool = False  # its tiles come by tensor descriptors
    fusible: bool = True  # a product and a sum may be rounded as one


class Saved(NamedTuple):
    """What the forward keeps for the backward beside its inputs: the output and, per query, lse, pivot and sum [B,HQ,M]; the last
    two are None where no backward follows."""

    out: Tensor
    lse: Tensor
    row_max: Tensor | None
    row_sum: Tensor | None


class Grads(NamedTuple):
    """Where the backward writes; None where no gradient is wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


def unit_stride(t: Tensor) -> Tensor:
    """t with unit stride along its last dim: t itself, or a copy when it has another."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _stride(stride: int) -> int | np.int64:
    return stride if stride < WIDE_STRIDE else np.int64(stride)


def view(t: Tensor, packed: bool) -> View:
    """The kernel's view of a (B, H, T, D) tensor, or of a packed (total, H, D) one. Strides that grow with the length
    are always 64 bits wide, the one within a tile only where it has to be."""
    if packed:
        return View(t, np.int64(0), np.int64(t.stride(1)), _stride(t.stride(0)))
    return View(t, np.int64(t.stride(0)), np.int64(t.stride(1)), _stride(t.stride(2)))


def matrix(t: Tensor) -> Matrix:
    """The kernel's view of a (B, H, M, N) tensor."""
    b, h, m, n = t.stride()
    return Matrix(t, np.int64(b), np.int64(h), np.int64(m), n if n * t.shape[3] < 2**31 else np.int64(n))


def number(x: float, problem: Problem) -> float:
    """A run-time number: fp32 in the kernel, fp64 for fp64 problems."""
    return np.float64(x) if problem.dtype == torch.float64 else float(x)


def terms(problem: Problem) -> Terms:
    """The parts of a logit that a problem has."""
    extras, cap = problem.extras, problem.spec.softcap
    score, mask, bias, keep = extras.score, extras.mask, extras.bias, extras.keep
    slopes = extras.slopes
    return Terms(
        cap=None if cap is None else number(min(cap, LARGEST_CAP), problem),
        score=None if score is None else score.fn,
        score_grad=None if score is None or score.grad == 1 else score.grad,
        score_args=() if score is None else _user_args(score.args, problem),
        slopes=slopes,
        slopes_stride=None if slopes is None else _stride(slopes.stride(0)),
        bias=None if bias is None else matrix(bias),
        keep=None if keep is None else matrix(keep if keep.dtype == torch.uint8 else keep.view(torch.uint8)),
        mask=None if mask is None else mask.fn,
        mask_args=() if mask is None else _user_args(mask.args, problem),
    )


def _user_args(args: tuple[Any, ...], problem: Problem) -> tuple[Any, ...]:
    return tuple(number(x, problem) if isinstance(x, float) else x for x in args)


def dropout(problem: Problem) -> Dropout | None:
    """The generator's settings, None where nothing is dropped."""
    p = problem.spec.dropout_p
    seed: Any = problem.extras.seed
    if p == 0.0 or seed is None:
        return None
    return Dropout(np.int64(seed) if type(seed) is int else seed, np.int64(int(p * 2**32)), number(1 / (1 - p), problem))


def products(problem: Problem, target: str, setting: str) -> str:
    """How a problem's fp32 is multiplied: ieee where it asks to be precise, else as the setting says: ieee, tf32x3, tf32 or
    fastest, which is the faster of ieee and tf32x3: they are equally accurate."""
    if problem.dtype != torch.float32 or problem.spec.precise:
        return "ieee"
    if setting != "fastest":
        return setting
    return "tf32x3" if three_products(target, max(problem.D, problem.DV)) else "ieee"


def attention(problem: Problem, precision: str, target: str) -> Attention:
    """What every launch of a problem has in common. precision: as in products."""
    if not (1 <= problem.D <= MAX_HEAD_DIM and 1 <= problem.DV <= MAX_HEAD_DIM):
        reason = f"their tiles hold 1 to {MAX_HEAD_DIM}; use more heads of fewer features, or backend='torch', which takes any"
        raise UnsupportedError(f"head dims {problem.D} (q, k) and {problem.DV} (v)", "the kernels", reason)
    extras, parts = problem.extras, terms(problem)
    made, cap = (parts.score, parts.bias, parts.keep, parts.mask), problem.spec.softcap
    scaled = problem.scale if cap is None else min(cap, LARGEST_CAP)
    bare = problem.dtype.itemsize == 2 and scaled > 0 and all(x is None for x in made)
    bare = bare and (cap is None or parts.slopes is None)
    sizes = Sizes(
        problem.M,
        problem.N,
        problem.spec.q_start if problem.packed else problem.q_start,
        problem.HQ,
        problem.group,
        problem.B,
        extras.cu_seqlens_q,
        extras.cu_seqlens_k,
        extras.key_lengths,
    )
    return Attention(
        sizes=sizes,
        band=Band(*problem.band()),
        terms=parts,
        dropout=dropout(problem),
        scale=number(problem.scale, problem),
        scale_log2=number((scaled if bare else problem.scale) * math.log2(math.e), problem),
        D=constant(problem.D),
        DV=constant(problem.DV),
        acc=FP64 if problem.dtype == torch.float64 else FP32,
        precision=constant(products(problem, target, precision)),
        exact=constant(not bare),
        rounded=constant(problem.spec.precise and problem.dtype.itemsize == 2),
        tanh=constant(tanh(problem, target)),
    )


def tanh(problem: Problem, target: str) -> str:
    """How a softcap's tanh is made: as exactly as the dtype can show it; in bf16 by the GPU's instruction, but where `precise` is
    asked for."""
    if problem.dtype.itemsize > 2:
        return "fraction"
    rough = problem.dtype == torch.bfloat16 and not problem.spec.precise and target.startswith("sm_")
    return "instruction" if rough else "exp2"


def launch(name: str, kernel: Any, args: tuple[Any, ...], problem: Problem, target: str, **constexprs: int) -> Launch:
    """A Launch of a kernel with the best tiling for a target. Raises UnsupportedError for more blocks than a grid can hold."""
    named = dict(zip(kernel.arg_names, args, strict=False))
    by_descriptor = described(name, named, problem, target)
    what = kind(problem, named["attention"].precision.value)
    configs = candidates(name, target, max(problem.D, problem.DV), problem.dtype.itemsize, *lengths(problem), what)
    one = Launch(name, kernel, args, constexprs, (0, 0), configs[0], configs, by_descriptor, problem.dtype.itemsize == 2)
    return tiled(one, problem, configs[0])


def kind(problem: Problem, precision: str) -> str:
    """Which of configs.KINDS a call is."""
    extras = problem.extras
    if problem.dtype == torch.float32:
        return precision
    if extras.bias is not None or extras.keep is not None:
        return "matrix"
    if problem.spec.softcap is not None or extras.score is not None or extras.mask is not None:
        others = (extras.score, extras.mask, extras.slopes, problem.spec.dropout_p or None)
        return "capped" if problem.dtype.itemsize == 2 and all(x is None for x in others) else "terms"
    if problem.spec.dropout_p:
        return "dropout"
    if extras.slopes is not None:
        return "slopes"
    left, right = problem.band()
    if left is not None:
        return "window"
    if problem.HQ != problem.HKV and problem.dtype.itemsize == 2:
        return "grouped"
    bare = extras.sinks is None and problem.dtype.itemsize == 2
    return "causal" if bare and right is not None else "plain"


def lengths(problem: Problem) -> tuple[int, int]:
    """The most queries and keys of one sequence."""
    return (problem.max_q, problem.max_k) if problem.packed else (problem.M, problem.N)


def grid(name: str, args: tuple[Any, ...], problem: Problem, config: Config) -> tuple[int, int]:
    """Programs of a kernel: as each kernel's docstring says under Grid."""
    (M, N), heads = lengths(problem), problem.B * problem.HQ
    m_blocks, n_blocks = -(-M // config.BLOCK_M), -(-N // config.BLOCK_N)
    if name == "delta":
        return heads, -(-M // PAD.value) * (PAD.value // config.BLOCK_M)
    if name == "dkdv":
        return problem.B * problem.HKV, n_blocks
    if name == "dsinks":
        return problem.HQ, 1
    if name == "decode":
        return problem.B * problem.HKV * -(-problem.group * problem.M // config.BLOCK_M), args[5].shape[0]
    if name == "dbias":
        batch, of_heads, rows, _ = args[5].ptr.shape
        return batch * of_heads * (m_blocks if rows == M else 1), n_blocks
    return heads, m_blocks


def tiled(launch: Launch, problem: Problem, config: Config) -> Launch:
    """The launch with another tiling."""
    programs, blocks = grid(launch.name, launch.args, problem, config)
    if blocks > MAX_BLOCKS:
        raise UnsupportedError(
            f"a sequence of {max(lengths(problem))}",
            launch.name,
            f"that is {blocks} blocks, a grid holds {MAX_BLOCKS}; split it",
        )
    own = {name: value for name, value in config._asdict().items() if name in launch.kernel.arg_names}
    constexprs = {**launch.constexprs, **own}
    args = launch.args
    if launch.described:
        named = dict(zip(launch.kernel.arg_names, args, strict=False))
        args = tuple(with_descriptors(launch.name, named, config).values())
    return replace(launch, args=args, constexprs=constexprs, grid=(programs, blocks), config=config)


def forward_plan(q: Tensor, k: Tensor, v: Tensor, saved: Saved, problem: Problem, target: str, precision: str) -> list[Launch]:
    """The launches that fill `saved`."""
    views = [view(t, problem.packed) for t in (q, k, v, saved.out)]
    totals = forward.Totals(saved.lse, saved.row_max, saved.row_sum)
    args = (*views, totals, problem.extras.sinks, attention(problem, precision, target))
    return [launch("forward", forward.forward, args, problem, target)]


class Pages(NamedTuple):
    """Where the rows of a paged cache lie: row r of sequence b in row r % size of page table[b, r // size]."""

    table: Tensor  # (B, pages of a sequence) int32
    size: int


def decode_plan(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages | None, tree: Tensor | None, parts: tuple[Tensor, Tensor], out: Tensor,
    lse: Tensor, split_size: int, problem: Problem, target: str, precision: str,
) -> list[Launch]:  # fmt: skip
    """The launches that fill out and lse over a cache; parts [parts, ...] hold the attention over each part of the keys."""
    common = attention(problem, precision, target)
    common = common._replace(sizes=common.sizes._replace(q_start=None))
    if tree is not None:
        common = common._replace(terms=common.terms._replace(tree=matrix(tree.view(torch.uint8))), exact=constant(True))
    table, size = (None, None) if pages is None else pages
    tilings = decode_tilings(problem, split_size)
    whole = size is None or size % tilings[0].BLOCK_N == 0
    args = (view(q, False), view(k, False), view(v, False), table, size, *parts, common, split_size)
    merged = (*parts, problem.extras.sinks, view(out, False), lse, common, split_size)
    few, fusible = (Config(16, 1),), problem.dtype.itemsize == 2
    launches = (Launch("decode", decode.decode, args, {"WHOLE": whole}, (0, 0), tilings[0], tilings, fusible=fusible),
                Launch("combine", decode.combine, merged, {}, (0, 0), few[0], few, fusible=fusible))  # fmt: skip
    return [tiled(launch, problem, launch.config) for launch in launches]


def decode_tilings(problem: Problem, split_size: int) -> tuple[Config, ...]:
    """Tilings of the decode kernel, best first: the rows of a key head in as few blocks as the card's memory lets. Rows give way
    before keys, so that the tile of keys, on which bits depend, is the same for one query and many."""
    rows, keys = max(16, min(128, 1 << (problem.group * problem.M - 1).bit_length())), min(64, split_size & -split_size)
    return tuple(Config(m, n, 4, 2) for n in (64, 32, 16) if n <= keys for m in (128, 64, 32, 16) if m <= rows)


def statistics_plan(
    q: Tensor, k: Tensor, lse: Tensor, top: Tensor, entropy: Tensor, problem: Problem, target: str, precision: str
) -> list[Launch]:
    """The launches that fill top and entropy [B,HQ,M]."""
    args = (view(q, problem.packed), view(k, problem.packed), lse, top, entropy, attention(problem, precision, target))
    return [launch("statistics", statistics.statistics, args, problem, target)]


def row_blocks(problem: Problem) -> int:
    """How many blocks of PAD rows the backward's per-query numbers take per head."""
    if problem.packed:
        return problem.M // PAD.value + problem.B + 1
    return -(-problem.M // PAD.value)


def backward_plan(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, saved: Saved, rows: Sequence[Tensor], grads: Grads,
    problem: Problem, target: str, precision: str,
) -> list[Launch]:  # fmt: skip
    """The launches that fill `grads`. rows, three of [B,HQ,row_blocks PAD], is room for the per-query numbers."""
    common = attention(problem, precision, target)
    qv, kv, vv, ov, dov = [view(t, problem.packed) for t in (q, k, v, saved.out, dout)]
    totals = forward.Totals(saved.lse, saved.row_max, saved.row_sum)
    folded = not common.exact.value and problem.dtype.itemsize == 2
    numbers = backward.Rows(
        rows[0], None if folded else rows[1], rows[2], row_blocks(problem), 1 if problem.packed else problem.B
    )
    inputs = (qv, kv, vv, dov, numbers)
    plan = [launch("delta", backward.delta, (ov, dov, totals, dlse, numbers, common), problem, target)]
    if grads.dk is not None and grads.dv is not None:
        outputs = (view(grads.dk, problem.packed), view(grads.dv, problem.packed))
        plan.append(launch("dkdv", backward.dkdv, (*inputs, *outputs, common), problem, target, GROUP=problem.group))
    if grads.dq is not None:
        plan.append(launch("dq", backward.dq, (*inputs, view(grads.dq, problem.packed), common), problem, target))
    if grads.dbias is not None:
        full = {f"REDUCE_{d}": n != m for d, n, m in zip("BHM", grads.dbias.shape, dense_shape(problem), strict=False)}
        plan.append(launch("dbias", term_grads.dbias, (*inputs, matrix(grads.dbias), common), problem, target, **full))
    if grads.dsinks is not None:
        plan.append(launch("dsinks", term_grads.dsinks, (problem.extras.sinks, numbers, grads.dsinks, common), problem, target))
    return plan


def dense_shape(problem: Problem) -> tuple[int, int, int, int]:
    """(B, HQ, M, N)."""
    return problem.B, problem.HQ, problem.M, problem.N
