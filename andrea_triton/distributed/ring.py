"""Attention over a sequence that is longer than one machine: keys and values travel round a ring of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import backends, ops, target
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..functional import merge_attention
from ..problem import Problem, accumulator, make_problem, output_shape
from ..spec import AttentionSpec, Window, make_spec
from .layout import Call, Layout, chunks, members, schedule


@dataclass(frozen=True, eq=False)
class Ring:
    """Who takes part, and what this rank does in each step."""

    group: dist.ProcessGroup
    steps: tuple[tuple[Call, ...], ...]
    spec: AttentionSpec
    backend: str

    def peer(self, hop: int) -> int:
        """Global number of the rank `hop` places on."""
        ranks = dist.get_world_size(self.group)
        return dist.get_global_rank(self.group, (dist.get_rank(self.group) + hop) % ranks)

    def problem(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        """The Problem of a call, whose own rows these are."""
        return make_problem(q, k, v, replace(self.spec, left=call.left, right=call.right, q_start=call.q_start))


class Transfer(NamedTuple):
    """Tensors on their way: what arrives, and what must live until it has been sent."""

    arriving: list[Tensor]
    leaving: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        """What arrived. Raises when a rank is gone, or the group's timeout is over."""
        for work in self.works:
            work.wait()
        return self.arriving


def exchange(tensors: list[Tensor], ring: Ring, hop: int) -> Transfer:
    """Start to send contiguous tensors `hop` places on, and to receive the same from `hop` places back."""
    arriving = [torch.empty_like(t) for t in tensors]
    moves = []
    for there, here in zip(tensors, arriving, strict=True):
        if there.numel():
            moves.append(dist.P2POp(dist.isend, there, ring.peer(hop), ring.group))
            moves.append(dist.P2POp(dist.irecv, here, ring.peer(-hop), ring.group))
    return Transfer(arriving, tensors, dist.batch_isend_irecv(moves) if moves else [])


def visitors(k: Tensor, v: Tensor, ring: Ring) -> Iterator[list[Tensor]]:
    """k and v of each step: this rank's own, then the others'. The next are under way while the caller works on these."""
    here = [k.contiguous(), v.contiguous()]
    for _ in ring.steps[1:]:
        transfer = exchange(here, ring, 1)
        yield here
        here = transfer.wait()
    yield here


class RingAttend(torch.autograd.Function):
    """out of this rank's queries over the keys of all ranks, and the gradients of this rank's q, k, v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        """Merge what each step gives."""
        acc = accumulator(q.dtype)
        shape, swapped = output_shape(q, v.shape[-1], False)
        out = q.new_zeros(shape, dtype=acc)
        out = out.transpose(1, 2) if swapped else out
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=acc)
        for calls, (k_here, v_here) in zip(ring.steps, visitors(k, v, ring), strict=True):
            for call in calls:
                mine = slice(call.q_row, call.q_row + call.queries)
                keys = slice(call.k_row, call.k_row + call.keys)
                parts = q[:, :, mine], k_here[:, :, keys], v_here[:, :, keys]
                part, part_lse = ops.attend(ring.problem(call, *parts), *parts, None, None, ring.backend)
                merged = merge_attention(out[:, :, mine], lse[:, :, mine], part.to(acc), part_lse)
                out[:, :, mine], lse[:, :, mine] = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values round once more, each followed by its gradients, which end where they belong."""
        if torch.is_grad_enabled():
            raise UnsupportedError("double backward", "ring_attention", "gather the sequence on one rank and use attention")
        q, k, v, out, lse = ctx.saved_tensors
        ring, acc, transfer = ctx.ring, accumulator(q.dtype), None
        dq = torch.zeros_like(q, dtype=acc)
        grads: list[Tensor] = []
        for step, (k_here, v_here) in enumerate(visitors(k, v, ring)):
            grads = [t.new_zeros(t.shape, dtype=acc) for t in (k_here, v_here)]
            for call in ring.steps[step]:
                mine, keys = slice(call.q_row, call.q_row + call.queries), slice(call.k_row, call.k_row + call.keys)
                parts = q[:, :, mine], k_here[:, :, keys], v_here[:, :, keys]
                rows = out[:, :, mine], lse[:, :, mine], dout[:, :, mine]
                found = backends.partial_backward(ring.problem(call, *parts), *parts, *rows, ring.backend)
                for total, grad in zip((dq[:, :, mine], *(g[:, :, keys] for g in grads)), found, strict=True):
                    total.add_(grad)
            if transfer is not None:
                grads = [grad.add_(earlier) for grad, earlier in zip(grads, transfer.wait(), strict=True)]
            transfer = exchange(grads, ring, 1) if step + 1 < len(ring.steps) else None
        if len(ring.steps) > 1:
            grads = exchange(grads, ring, 1 - len(ring.steps)).wait()
        return dq.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), None


@torch.compiler.disable  # a graph cannot hold its transfers: a compiled model breaks here, and goes on after
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None = None, device_mesh: DeviceMesh | None = None,
    layout: Layout = "zigzag", causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, cu_seqlens: Tensor | None = None, validate: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`attention` of a sequence of which every rank holds a part. Each rank calls it with its own rows, see `shard`.

    Memory on a rank is O(T / ranks): k and v of one rank visit at a time, and the next ones arrive meanwhile. In backward they
    come by once more, followed by their gradients. Under a narrow window the ring stops as soon as no rank sees more, which
    layout="contiguous" makes early.

    Args:
        q: this rank's queries (B, HQ, M / ranks, D), or packed (rows, HQ, D), fp16, bf16, fp32 or fp64.
        k: this rank's keys (B, HKV, N / ranks, D), or packed; HQ is a multiple of HKV.
        v: this rank's values (B, HKV, N / ranks, DV), or packed.
        group: the process group of the ring (gloo, NCCL ...); None means the default group.
        device_mesh: instead of a group, a mesh of one dim.
        layout: "zigzag", the same work on every rank when causal; or "contiguous".
        causal, scale, window, softcap, backend: as in `attention`; the last query of all ranks sees the last key.
        cu_seqlens: (sequences + 1,) int32 or int64, where sequences start along the T of all ranks, and the end of the last; the
            same on every rank. Rows of one sequence see each other, rows after the last get 0. It is read on the host: a CPU
            tensor saves the wait for a GPU. Each sequence is a call of its own, so that many short ones are slow.
        validate: compare the ranks' shapes and settings on a GPU too, which waits for it; on a CPU they always are.

    Returns:
        This rank's rows of the output, (B, HQ, M / ranks, DV) or packed (rows, HQ, DV).

    Raises:
        ShapeError: rows that do not divide, or ranks that disagree; other wrong shapes and values as in `attention`.
        DTypeError: as in `attention`.
        UnsupportedError: torch.distributed is not running, or a backend that cannot do this.
        RuntimeError: from torch.distributed, when another rank is gone or the group's timeout is over.

    Source:
        arXiv 2310.01889 (ring attention), arXiv 1805.02867 (the merge).

    Example:
        >>> q = shard(whole_q, dim=2)  # doctest: +SKIP
        >>> out = unshard(ring_attention(q, q, q, causal=True), dim=2)  # doctest: +SKIP
    """
    spec = make_spec(causal=causal, scale=scale, window=window, softcap=softcap)
    packed = isinstance(q, Tensor) and q.dim() == 3
    if packed:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) if isinstance(t, Tensor) and t.dim() == 3 else t for t in (q, k, v))
    dtype = target.autocast_dtype(q.device) if isinstance(q, Tensor) else None
    if dtype is not None and q.is_floating_point() and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    make_problem(q, k, v, spec)
    if backend is None:
        backend = target.default_backend(q.device)
    target.check_backend(backend, q.device)
    group = members(group, device_mesh)
    rows = (q.shape[2], k.shape[2])
    ranks = dist.get_world_size(group)
    _check_local(rows, ranks, layout)
    starts = None if cu_seqlens is None else _starts(cu_seqlens, rows, ranks)
    if validate or q.device.type == "cpu":
        _check_alike(group, q, k, v, (q.dtype, layout, spec, starts))
    steps = schedule(dist.get_rank(group), ranks, rows, layout, (spec.left, spec.right), starts)
    out = RingAttend.apply(q, k, v, Ring(group, steps, spec, backend))
    return out[0].transpose(0, 1) if packed else out


def _check_local(rows: tuple[int, int], ranks: int, layout: Layout) -> None:
    """Fail unless a rank's rows divide into its chunks."""
    held = len(chunks(0, ranks, layout))
    for name, count in (("q", rows[0]), ("k", rows[1])):
        if count % held:
            raise ShapeError(
                f"{name} has {count} rows on this rank; wanted a multiple of {held} for {layout} chunks; pad the sequence to a "
                f"multiple of {held * ranks} rows before shard, and hide the padding with causal=True or cu_seqlens"
            )


def _starts(cu_seqlens: Tensor, rows: tuple[int, int], ranks: int) -> tuple[int, ...]:
    """The checked starts of packed sequences."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        got = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise DTypeError(f"cu_seqlens is {got}; wanted (sequences + 1,) int32 or int64; pass torch.tensor([0, T])")
    starts = tuple(cu_seqlens.tolist())
    if rows[0] != rows[1]:
        raise ShapeError(f"q has {rows[0]} rows and k {rows[1]}; wanted as many with cu_seqlens; leave cu_seqlens out")
    if not starts or starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ShapeError(f"cu_seqlens is {starts}; wanted 0, then each sequence's end; use cumsum of the lengths")
    if starts[-1] > rows[0] * ranks:
        raise ShapeError(f"cu_seqlens ends at {starts[-1]}; wanted at most {rows[0] * ranks}, the rows of all ranks; clip it")
    return starts


def _check_alike(group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...]) -> None:
    """Fail, on every rank, unless all have tensors of one shape and dtype, and the same settings."""
    ranks = dist.get_world_size(group)
    own = torch.tensor([*q.shape, *k.shape, v.shape[-1], zlib.crc32(repr(settings).encode())], device=q.device)
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own, group=group)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, own):
            shapes = f"q {theirs[:4].tolist()} and k {theirs[4:8].tolist()} on rank {rank}"
            raise ShapeError(
                f"q is {list(q.shape)} and k {list(k.shape)} here, {shapes}; wanted one shape, dtype and setting on all ranks; "
                "use shard, and the same arguments"
            )
