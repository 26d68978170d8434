"""Allocate, and execute a plan, or again the one made before for a call like this. No maths."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
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
from andrea_triton.problem import Problem, accumulator, output_shape, with_each

Tensors = tuple[Any, ...]  # Tensor or None
Wanted = tuple[Any, ...]


class Room(NamedTuple):
    """Memory that a call makes.

    Args:
        shape, dtype: of the tensor.
        strides: None for a contiguous one.
        like: a tensor that has all of this already, which halves the cost of saying it, or its place among the given tensors.
        fill: what it holds at first; None where the kernels write all of it.
        parts: 1, or how many equal parts along dim 0 a plan takes it apart into, each a tensor to the kernels.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    like: int | Tensor | None = None
    fill: float | None = None
    parts: int = 1


class Work(NamedTuple):
    """A kind of call.

    Args:
        rooms: of (given, problem, wanted), what it makes, None for what it does without.
        plan: of (given, made, problem, wanted, target, precision), its launches.
        strided: how many of the given tensors, from the first on, may have any strides and dtype. What follows is made by another
            Work, contiguous and of a dtype that follows from the problem's.
    """

    rooms: Callable[[Tensors, Problem, Wanted], list[Room | None]]
    plan: Callable[[Tensors, Tensors, Problem, Wanted, str, str], list[Launch]]
    strided: int


class Known(NamedTuple):
    """What was worked out of a call, for the next one like it: what it makes, the kernel starts, and, of each tensor that is a
    part of another, that one's place and how far into it the part lies, in bytes."""

    rooms: list[Room | None]
    starts: list[Start]
    parts: tuple[tuple[int, int], ...]


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


def room_like(t: Tensor, features: int, packed: bool, place: int | None = None) -> Room:
    """Room for (.., H, T, features) in the memory order of t: never a view, which autograd would not let anyone change in place.
    Packed tensors are zeroed: no kernel visits the rows after the last sequence. place: that of t, for Room.like."""
    fill = 0.0 if packed else None
    if features == t.shape[-1] and (t.is_contiguous() or (not packed and t.transpose(1, 2).is_contiguous())):
        return Room(tuple(t.shape), t.dtype, tuple(t.stride()), place, fill)
    shape, swapped = output_shape(t, features, packed)
    if not swapped:
        return Room(shape, t.dtype, fill=fill)
    batch, rows, heads, _ = shape
    row = max(heads, 1) * features
    return Room((batch, heads, rows, features), t.dtype, (max(rows, 1) * row, features, row, 1), fill=fill)


def allocate_like(t: Tensor, features: int, packed: bool) -> Tensor:
    """The memory of room_like."""
    room = room_like(t, features, packed)
    memory = allocate(room.shape, room.dtype, t.device, room.strides)
    return memory if room.fill is None else memory.fill_(room.fill)


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, backend: str, learning: bool = True) -> Saved:
    """Run the forward kernels on the tensors' device (backend triton) or in the interpreter.

    Args:
        learning: whether a backward may follow, which takes row_max and row_sum.

    Returns:
        out [B,HQ,M,DV], and lse, row_max, row_sum [B,HQ,M] (packed: [HQ,total_q]) in fp32, fp64 for fp64.
    """
    return Saved(*execute(FORWARD, (q, k, v), problem, backend, (learning,)))


def _forward_rooms(given: Tensors, problem: Problem, wanted: Wanted) -> list[Room | None]:
    q = given[0]
    shape = (problem.HQ, problem.M) if problem.packed else (problem.B, problem.HQ, problem.M)
    lse = Room(shape, accumulator(q.dtype), fill=float("-inf") if problem.packed else None)
    other = Room(shape, lse.dtype, fill=0.0 if problem.packed else None) if wanted[0] else None
    return [room_like(q, problem.DV, problem.packed, 0), lse, other, other]


def _forward_plan(given: Tensors, made: Tensors, problem: Problem, wanted: Wanted, target: str, precision: str) -> list[Launch]:
    q, k, v = given
    return forward_plan(q, k, v, Saved(*made), problem, target, precision)


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, saved: Tensors, problem: Problem, backend: str,
    needs: tuple[bool, bool], bias_shape: tuple[int, ...] | None = None, sinks: bool = False,
) -> Grads:  # fmt: skip
    """Run the backward kernels. saved: what forward returned; needs: whether dq, and whether dk and dv are wanted; bias_shape:
    the bias's own four dims, when its gradient is wanted; sinks: whether theirs is."""
    dlse = None if dlse is None else dlse.contiguous()
    wanted = (*needs, bias_shape, sinks)
    return Grads(*execute(BACKWARD, (q, k, v, dout, dlse, *saved), problem, backend, wanted)[1:])


def _backward_rooms(given: Tensors, problem: Problem, wanted: Wanted) -> list[Room | None]:
    q, k, v, *_ = given
    dq, dkdv, bias_shape, sinks = wanted
    acc, packed = accumulator(q.dtype), problem.packed
    heads = problem.HQ if packed else problem.B * problem.HQ
    return [
        Room((3, heads, row_blocks(problem) * PAD.value), acc, fill=0.0 if packed else None, parts=3),
        room_like(q, problem.D, packed, 0) if dq else None,
        room_like(k, problem.D, packed, 1) if dkdv else None,
        room_like(v, problem.DV, packed, 2) if dkdv else None,
        None if bias_shape is None else Room(bias_shape, acc),
        Room((problem.HQ,), acc) if sinks else None,
    ]


def _backward_plan(given: Tensors, made: Tensors, problem: Problem, wanted: Wanted, target: str, precision: str) -> list[Launch]:
    q, k, v, dout, dlse, *saved = given
    rows, *grads = made
    return backward_plan(q, k, v, dout, dlse, Saved(*saved), rows, Grads(*grads), problem, target, precision)


def statistics(q: Tensor, k: Tensor, lse: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """Run the statistics kernel: largest logit and entropy of every query, of lse's shape and dtype."""
    top, entropy = execute(STATISTICS, (q, k, lse), problem, backend)
    return top, entropy


def _statistics_rooms(given: Tensors, problem: Problem, wanted: Wanted) -> list[Room | None]:
    shape, dtype = tuple(given[2].shape), given[2].dtype
    return [Room(shape, dtype, fill=fill if problem.packed else None) for fill in (float("-inf"), 0.0)]


def _statistics_plan(
    given: Tensors, made: Tensors, problem: Problem, wanted: Wanted, target: str, precision: str
) -> list[Launch]:
    (q, k, lse), (top, entropy) = given, made
    return statistics_plan(q, k, lse, top, entropy, problem, target, precision)


def decode(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages | None, tree: Tensor | None, split_size: int, problem: Problem, backend: str
) -> tuple[Tensor, Tensor]:
    """Run the decode kernels: out [B,HQ,M,DV] and lse [B,HQ,M] of queries over a cache, its keys in parts of `split_size`. tree:
    which of the newest rows sees which, bool [B,HQ,M,M]."""
    table, size = (None, None) if pages is None else pages
    *_, out, lse = execute(DECODE, (q, k, v, table, tree), problem, backend, (split_size, size))
    return out, lse


def _decode_rooms(given: Tensors, problem: Problem, wanted: Wanted) -> list[Room | None]:
    acc, shape, number = accumulator(problem.dtype), (problem.B, problem.HQ, problem.M), -(-problem.N // wanted[0])
    parts = [Room((number, *shape, problem.DV), acc), Room((number, *shape), acc)]
    return [*parts, room_like(given[0], problem.DV, False, 0), Room(shape, acc)]


def _decode_plan(given: Tensors, made: Tensors, problem: Problem, wanted: Wanted, target: str, precision: str) -> list[Launch]:
    (q, k, v, table, tree), (*parts, out, lse) = given, made
    pages = None if table is None else Pages(table, wanted[1])
    halves = parts[0], parts[1]
    return decode_plan(q, k, v, pages, tree, halves, out, lse, wanted[0], problem, target, precision)


FORWARD = Work(_forward_rooms, _forward_plan, strided=3)
BACKWARD = Work(_backward_rooms, _backward_plan, strided=6)
STATISTICS = Work(_statistics_rooms, _statistics_plan, strided=2)
DECODE = Work(_decode_rooms, _decode_plan, strided=5)

_starts = Memory()


def forget() -> None:
    """Make the next call of every kind plan anew, as after a change of the tiles."""
    _starts.clear()


def execute(work: Work, given: Tensors, problem: Problem, backend: str, wanted: Wanted = ()) -> list[Any]:
    """Allocate what a work makes, and start its kernels under the tensors' device. What that takes is found once for all calls
    that it is the same for.

    Args:
        work: what is to be done.
        given: tensors from outside, of any dtype and strides; None where absent. Those whose last dim has not unit stride are
            copied.
        problem: the call.
        backend: triton or interpreter.
        wanted: what else the work depends on.

    Returns:
        What was made, in the order of the work's rooms; None where there was none.
    """
    precision = targets.float32_precision() if problem.dtype == torch.float32 else "ieee"
    if backend == "interpreter":
        return _interpreted(work, given, problem, wanted, precision)
    facts = problem.facts
    key: Wanted = (work, wanted, precision, facts, *[None if t is None else (t.dtype, t.stride()) for t in given[: work.strided]])
    known: Known | None = _starts.get(key)
    if known is None:
        alike = [None if t is None else unit_stride(t) for t in given]
        if any([a is not b for a, b in zip(alike, given, strict=True)]):
            return execute(work, tuple(alike), problem, backend, wanted)
    rooms = work.rooms(given, problem, wanted) if known is None else known.rooms
    made = _allocated(rooms, given)
    addresses = [t.data_ptr() for t in (*given, *problem.tensors, *made) if t is not None]
    if reduce(operator.or_, addresses) % 16:
        key = (*key, *[address % 16 == 0 for address in addresses])
        known = _starts.get(key)
    if known is None:
        known = _learned(work, rooms, given, made, problem, wanted, precision)
        if facts is not None and all([start.lasting for start in known.starts]):
            _starts.keep(key, known)
    if known.parts:
        addresses += [addresses[place] + offset for place, offset in known.parts]
    if type(problem.extras.seed) is int:
        addresses.append(problem.extras.seed)
    go(known.starts, tuple(addresses), problem)
    return made


def _allocated(rooms: list[Room | None], given: Tensors) -> list[Any]:
    """The memory of rooms, where the given tensors are."""
    made: list[Any] = []
    device = given[0].device
    for room in rooms:
        if room is None:
            made.append(None)
            continue
        shape, dtype, strides, like, fill, _ = room
        memory = allocate(shape, dtype, device, strides, given[like] if isinstance(like, int) else like)
        made.append(memory if fill is None else memory.fill_(fill))
    return made


def _quick(room: Room | None, device: torch.device) -> Room | None:
    """The room with a tensor that says all of it, of one element."""
    if room is None or room.like is not None or room.strides is not None:
        return room
    return room._replace(like=allocate((1,) * len(room.shape), room.dtype, device).expand(room.shape))


def _apart(made: list[Any], rooms: list[Room | None]) -> Tensors:
    """What was made, as a plan takes it."""
    pairs = zip(made, rooms, strict=True)
    return tuple([t if room is None or room.parts == 1 else t.unbind(0) for t, room in pairs])


def _interpreted(work: Work, given: Tensors, problem: Problem, wanted: Wanted, precision: str) -> list[Any]:
    """execute, in the interpreter."""
    given = tuple([None if t is None else unit_stride(t) for t in given])
    rooms = work.rooms(given, problem, wanted)
    made = _allocated(rooms, given)
    target = targets.target_of(problem.device)
    for launch in work.plan(given, _apart(made, rooms), problem, wanted, target, precision):
        if 0 not in launch.grid:
            interpret(launch)
    return made


def _learned(
    work: Work, rooms: list[Room | None], given: Tensors, made: list[Any], problem: Problem, wanted: Wanted, precision: str
) -> Known:
    """What is to be known of a call. Each tensor is made an object of its own first, for one may be q, k and v at once."""
    given, problem = tuple(map(_own, given)), _with_own(problem)
    made = list(map(_own, made))
    apart = _apart(made, rooms)
    whole = [t for t in (*given, *problem.tensors, *made) if t is not None]
    places = {id(t): i for i, t in enumerate(whole)}
    parts = [(places[id(t)], part) for t, many in zip(made, apart, strict=True) if isinstance(many, tuple) for part in many]
    later = [part for _, part in parts] + [seed for seed in [problem.extras.seed] if isinstance(seed, np.int64)]
    places |= {id(x): i for i, x in enumerate(later, len(whole))}
    launches = work.plan(given, apart, problem, wanted, targets.target_of(problem.device), precision)
    with targets.current(problem.device):
        starts = [ready(launch, problem, places) for launch in launches if 0 not in launch.grid]
    quick = [_quick(room, given[0].device) for room in rooms]
    return Known(quick, starts, tuple([(place, part.data_ptr() - whole[place].data_ptr()) for place, part in parts]))


def _own(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _with_own(problem: Problem) -> Problem:
    """The problem with an object of its own for each tensor and for an int seed, by which it is found again among the arguments
    of a launch; a bool mask's are its bytes."""
    extras = problem.extras
    keep = None if extras.keep is None else extras.keep.view(torch.uint8)
    seed: Any = np.int64(extras.seed) if isinstance(extras.seed, int) else extras.seed
    extras = extras._replace(bias=_own(extras.bias), sinks=_own(extras.sinks), keep=keep, seed=seed)
    return replace(problem, extras=with_each(extras, _own))
