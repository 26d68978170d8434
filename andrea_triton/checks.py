"""What a call must be like before anything is launched: each check returns the value in its one form, or raises an error that
says what was got, what was wanted and the way out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from andrea_triton.errors import DTypeError, ShapeError, UnsupportedError
from andrea_triton.kinds import check_kind
from andrea_triton.spec import MAX_LENGTH, Mask, Score

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)

Functor = TypeVar("Functor", Score, Mask)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    """Fail unless q, k and v are strided float tensors of one dtype, device and rank."""
    check_tensor("q", q, q, FLOAT_DTYPES)
    dtype, device = q.dtype, q.device
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_kind(name, tensor)
        if tensor.device != device:
            check_tensor(name, tensor, q, FLOAT_DTYPES)
        if tensor.dtype != dtype:
            got = ", ".join(f"{name} is {getattr(x, 'dtype', type(x))}" for name, x in (("q", q), ("k", k), ("v", v)))
            way_out = "cast them to one float dtype, or call under torch.autocast"
            raise DTypeError(f"{got}; wanted one dtype, outside autocast; {way_out}")
        if tensor.dim() != rank:
            way_out = "pass all of q, k, v packed" if rank == 3 else "unsqueeze it, or use varlen_attention if packed"
            fail_shape(name, tensor, "(total, H, D)" if rank == 3 else "(B, H, T, D)", way_out)


def checked_sizes(q: Sequence[int], k: Sequence[int], v: Sequence[int], rows: int) -> tuple[int, int, int, int, int, int]:
    """HQ, HKV, M, N, D, DV of three shapes whose rows lie along the dim `rows`, checked against each other."""
    HQ, M, D, HKV, N, DV = q[1], q[rows], q[-1], k[1], k[rows], v[-1]
    if rows == 2 and (k[0] != q[0] or v[0] != q[0]):
        way_out = "broadcast with expand, which copies nothing"
        raise ShapeError(f"q, k, v have batch {q[0]}, {k[0]}, {v[0]}; wanted one batch; {way_out}")
    if v[rows] != N:
        raise ShapeError(f"v has {v[rows]} rows; wanted {N}, one per key, as k has; slice k and v alike")
    if v[1] != HKV:
        raise ShapeError(f"v has {v[1]} heads; wanted {HKV}, as k has; repeat or slice heads of k and v alike")
    if HQ % HKV != 0 if HKV else HQ != 0:
        raise ShapeError(f"k has {HKV} heads; q has {HQ}, which is not a multiple of {HKV}; repeat or slice heads")
    if k[-1] != D:
        raise ShapeError(f"k has head dim {k[-1]}; wanted {D}, as q has; project or pad q and k to one head dim")
    if not torch.compiler.is_compiling() and (M > MAX_LENGTH or N > MAX_LENGTH):
        raise ShapeError(f"q has {M} rows and k has {N}; wanted at most 2**28 each; split the keys and merge_attention")
    return HQ, HKV, M, N, D, DV


def refuse_in_packed(bias: Tensor | None, keep: Tensor | None, key_lengths: Tensor | None) -> None:
    """Fail for the dense tensors that packed sequences have no place for."""
    if bias is not None:
        raise UnsupportedError("bias", "varlen", "packed sequences have no (B, H, M, N); use score=Score(...)")
    if keep is not None:
        raise UnsupportedError("mask", "varlen", "packed sequences have no (B, H, M, N); use mask=Mask(...)")
    if key_lengths is not None:
        raise UnsupportedError("key_lengths", "varlen", "cu_seqlens_k already gives each sequence's keys")


def checked_longest(name: str, value: int | None) -> int:
    """The most rows of a packed sequence."""
    if value is None:
        raise ShapeError(f"{name} is missing; wanted the most rows of any sequence; pass an upper bound")
    value = checked_integer(name, value)
    if value < 0:
        raise ShapeError(f"{name} is {value}; wanted at least 0; pass the most rows of any sequence")
    return value


def checked_starts(name: str, starts: Tensor | None, rows: Tensor, longest: int, validate: bool) -> Tensor:
    """The starts of packed sequences as int32; contents are checked where reading them is free or asked for."""
    if starts is None:
        raise ShapeError(f"{name} is missing; wanted both; pass one tensor twice for self-attention")
    check_tensor(name, starts, rows, INDEX_DTYPES)
    if starts.dim() != 1 or starts.shape[0] == 0:
        fail_shape(name, starts, "(sequences + 1,)", "start with 0 and append each sequence's end")
    if may_read(starts, validate):
        values: list[int] = starts.tolist()
        if values[0] != 0:
            raise ShapeError(f"{name} starts at {values[0]}; wanted 0; put a 0 before the cumulated lengths")
        for start, end in pairwise(values):
            if end < start:
                raise ShapeError(f"{name} decreases from {start} to {end}; wanted it not to; use cumsum of the lengths")
            if end - start > longest:
                wanted = f"wanted at most {longest}, which max_{name[-1]} says; raise max_{name[-1]}"
                raise ShapeError(f"{name} has a sequence of {end - start} rows; {wanted}")
        if values[-1] > rows.shape[0]:
            wanted = f"wanted at most {rows.shape[0]}, the rows of {name[-1]}; clip the lengths"
            raise ShapeError(f"{name} ends at {values[-1]}; {wanted}")
    return starts.to(torch.int32).contiguous()


def checked_matrix(
    name: str, tensor: Tensor, q: Tensor, full: tuple[int, ...], dtypes: Sequence[torch.dtype], way_out: str
) -> Tensor:
    """A (B, HQ, M, N) view of the tensor."""
    check_tensor(name, tensor, q, dtypes, way_out)
    shape = tensor.shape
    if len(shape) > 4 or any(a != 1 and a != b for a, b in zip(shape[::-1], full[::-1], strict=False)):
        fail_shape(name, tensor, f"one that broadcasts to (B, HQ, M, N) = {full}", "slice it, or use dims of size 1")
    return tensor.expand(full)


def checked_slopes(slopes: Tensor, q: Tensor, B: int, HQ: int) -> Tensor:
    """The ALiBi slopes as (B, HQ) float32, heads side by side, a view of the caller's where they are so already."""
    check_tensor("alibi", slopes, q, FLOAT_DTYPES)
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != HQ or (slopes.dim() == 2 and slopes.shape[0] != B):
        fail_shape("alibi", slopes, f"({HQ},) or ({B}, {HQ}), a slope per query head", "slice or expand it")
    if slopes.requires_grad:
        raise UnsupportedError("alibi", "every backend", "slopes get no gradient; pass alibi.detach(), or train a bias")
    slopes = slopes.to(torch.float32)
    return (slopes if slopes.stride(-1) == 1 else slopes.contiguous()).expand(B, HQ)


def checked_vector(name: str, tensor: Tensor, q: Tensor, size: int, dtypes: Sequence[torch.dtype], per: str) -> Tensor:
    """The tensor, (size,), without gaps: the kernels read vectors by their first address alone."""
    check_tensor(name, tensor, q, dtypes)
    if tensor.dim() != 1 or tensor.shape[0] != size:
        fail_shape(name, tensor, f"({size},), one per {per}", "slice or expand it")
    return tensor.contiguous()


def checked_key_lengths(key_lengths: Tensor, q: Tensor, B: int, N: int, validate: bool) -> Tensor:
    """The key lengths as (B,) int32."""
    key_lengths = checked_vector("key_lengths", key_lengths, q, B, INDEX_DTYPES, "batch entry")
    if may_read(key_lengths, validate):
        for i, length in enumerate(key_lengths.tolist()):
            if not 0 <= length <= N:
                raise ShapeError(f"key_lengths[{i}] is {length}; wanted 0 to {N}, the rows of k; clamp it")
    return key_lengths.to(torch.int32)


def checked_seed(seed: int | Tensor | None, q: Tensor) -> int | Tensor:
    """The seed of a call that drops weights."""
    if seed is None:
        raise ShapeError("seed is None with dropout_p above 0; wanted a seed; pass an int or an int64 tensor")
    if isinstance(seed, Tensor):
        check_tensor("seed", seed, q, (torch.int64,))
        if seed.numel() != 1:
            fail_shape("seed", seed, "one element", "pass one element of it")
        return seed
    seed = checked_integer("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ShapeError(f"seed is {seed}; wanted 64 bits, -2**63 to 2**64 - 1; pass seed % 2**64")
    return seed if seed < 2**63 else seed - 2**64


def checked_functor(name: str, functor: Functor, kind: type[Functor], q: Tensor) -> Functor:
    """The user's Score or Mask, its tensors on q's device."""
    if not isinstance(functor, kind):
        way_out = f"use {name}={kind.__name__}(fn, ...)"
        raise DTypeError(f"{name} is a {type(functor).__name__}; wanted a {kind.__name__}; {way_out}")
    for argument in functor.args:
        if isinstance(argument, Tensor):
            check_tensor(f"a tensor of {name}.args", argument, q, (argument.dtype,))
            if kind is Score and argument.requires_grad and torch.is_grad_enabled():
                way_out = "pass it detached, or what it adds to the scores as a bias, which gets one"
                raise UnsupportedError(f"a tensor of {name}.args that requires a gradient", "every backend", way_out)
    return functor


def checked_integer(name: str, value: int) -> int:
    """The value as a Python int: also numpy's integers, and integer tensors of one element, which it waits for."""
    if type(value) in (int, torch.SymInt):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise DTypeError(f"{name} is a {type(value).__name__}; wanted an int; pass int({name})")


def check_tensor(
    name: str, tensor: Tensor, q: Tensor, dtypes: Sequence[torch.dtype], way_out: str = "cast it with .to(dtype)"
) -> None:
    """Fail unless this is a tensor on q's device with one of these dtypes."""
    check_kind(name, tensor)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise DTypeError(f"{name} is {tensor.dtype}; wanted {wanted}; {way_out}")
    if tensor.device != q.device:
        raise DTypeError(f"{name} is on {tensor.device}; wanted {q.device}, as q; move it with {name}.to(q.device)")


def may_read(tensor: Tensor, validate: bool) -> bool:
    """True when reading the contents is free (a plain CPU tensor, outside tracing and transforms) or asked for."""
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # under vmap; the operator checks each entry's
        return False
    return validate or tensor.is_cpu


def fail_shape(name: str, tensor: Tensor, wanted: str, way_out: str) -> NoReturn:
    raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; wanted {wanted}; {way_out}")
