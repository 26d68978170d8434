"""Which rows of a sequence lie on which rank, and which of them meet in a step of the ring.

Contiguous: rank r of w holds chunk r of w. Zig-zag: the sequence has 2w chunks and rank r holds chunks r and 2w-1-r, an early
one and a late one, so that under a causal band every rank has the same work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ShapeError, UnsupportedError

Layout = Literal["zigzag", "contiguous"]
LAYOUTS = ("zigzag", "contiguous")


class Run(NamedTuple):
    """Rows that follow each other in a sequence and on a rank: `position` in the sequence, `row` on the rank, of the first."""

    position: int
    row: int
    length: int
    sequence: int = 0


class Call(NamedTuple):
    """One call of attention: `queries` rows of the rank from q_row on, `keys` visiting rows from k_row on, and their band; the
    first query sits at q_start, the first key at 0."""

    q_row: int
    queries: int
    k_row: int
    keys: int
    q_start: int
    left: int | None
    right: int | None

    @property
    def whole(self) -> bool:
        """Every query sees every key."""
        return self.left is None and self.right is None


def chunks(rank: int, ranks: int, layout: Layout) -> tuple[int, ...]:
    """The chunks that a rank holds, in order.

    Args:
        rank: from 0.
        ranks: how many there are.
        layout: "zigzag" (2 · ranks chunks in all) or "contiguous" (ranks chunks).

    Returns:
        Their numbers.

    Source:
        The zig-zag order is that of public context-parallel trainers; ring: arXiv 2310.01889.

    Example:
        >>> [chunks(rank, 2, "zigzag") for rank in range(2)]
        [(0, 3), (1, 2)]
    """
    if layout not in LAYOUTS:
        raise ShapeError(f"layout is {layout!r}; wanted one of {', '.join(LAYOUTS)}; pass layout='zigzag'")
    return (rank, 2 * ranks - 1 - rank) if layout == "zigzag" else (rank,)


def runs(rank: int, ranks: int, rows: int, layout: Layout, starts: tuple[int, ...] | None = None) -> list[Run]:
    """The runs of a rank that holds `rows` rows; starts: of packed sequences, and the end of the last; slack rows have no run.

    Example:
        >>> runs(0, 2, 8, "zigzag")
        [Run(position=0, row=0, length=4, sequence=0), Run(position=12, row=4, length=4, sequence=0)]
        >>> runs(1, 2, 8, "zigzag", (0, 6, 16))
        [Run(position=4, row=0, length=2, sequence=0), Run(position=6, row=2, length=6, sequence=1)]
    """
    held = chunks(rank, ranks, layout)
    size = rows // len(held)
    joined: list[Run] = []
    for i, chunk in enumerate(held):
        if joined and joined[-1].position + joined[-1].length == chunk * size:
            joined[-1] = joined[-1]._replace(length=joined[-1].length + size)
        else:
            joined.append(Run(chunk * size, i * size, size))
    if starts is None:
        return joined
    return [piece for run in joined for piece in _cut(run, starts)]


def _cut(run: Run, starts: tuple[int, ...]) -> Iterator[Run]:
    """The pieces of a run that lie in one sequence each."""
    for sequence in range(len(starts) - 1):
        first = max(run.position, starts[sequence])
        last = min(run.position + run.length, starts[sequence + 1])
        if first < last:
            yield Run(first, run.row + first - run.position, last - first, sequence)


def calls(q_runs: list[Run], k_runs: list[Run], left: int | None, right: int | None, offset: int = 0) -> list[Call]:
    """The calls in which these queries meet these keys; offset: how far query positions are ahead, N - M. Pairs of runs that see
    nothing of each other are left out, and neighbours without a band become one call.

    Example:
        >>> early, late = runs(0, 2, 8, "zigzag"), runs(1, 2, 8, "zigzag")
        >>> calls(early, late, None, 0)
        [Call(q_row=4, queries=4, k_row=0, keys=8, q_start=8, left=None, right=None)]
    """
    found = []
    for a in q_runs:
        for b in k_runs:
            start = a.position + offset - b.position
            unseen = (left is not None and start - left >= b.length) or (right is not None and start + a.length - 1 + right < 0)
            if a.sequence == b.sequence and not unseen:
                near = None if left is None or left >= start + a.length - 1 else left
                far = None if right is None or right >= b.length - 1 - start else right
                found.append(Call(a.row, a.length, b.row, b.length, start, near, far))
    wide = _joined(found, lambda x, y: (x.q_row, x.queries, x.k_row + x.keys) == (y.q_row, y.queries, y.k_row))
    wide.sort(key=lambda x: (x.k_row, x.q_row))
    return _joined(wide, lambda x, y: (x.k_row, x.keys, x.q_row + x.queries) == (y.k_row, y.keys, y.q_row))


def _joined(calls: list[Call], adjacent: Callable[[Call, Call], bool]) -> list[Call]:
    """The calls, of which neighbours without a band are one."""
    kept: list[Call] = []
    for call in calls:
        last = kept[-1] if kept else call
        if kept and last.whole and call.whole and adjacent(last, call):
            queries, keys = call.q_row + call.queries - last.q_row, call.k_row + call.keys - last.k_row
            kept[-1] = last._replace(queries=queries, keys=keys)
        else:
            kept.append(call)
    return kept


@functools.lru_cache(maxsize=256)
def schedule(
    rank: int, ranks: int, rows: tuple[int, int], layout: Layout, band: tuple[int | None, int | None],
    starts: tuple[int, ...] | None = None,
) -> tuple[tuple[Call, ...], ...]:  # fmt: skip
    """The calls of every step: in step s the keys of rank - s visit. Steps at the end in which no rank has a call are left out.

    Args:
        rank: whose calls.
        ranks: how many there are.
        rows: queries and keys that each rank holds.
        layout: as in `chunks`.
        band: (left, right) distances, None for an open side.
        starts: of packed sequences, and the end of the last, in rows of all ranks.

    Returns:
        One tuple of calls per step; the same number of steps on every rank.

    Example:
        >>> [len(step) for step in schedule(0, 4, (4, 4), "contiguous", (2, 0))]
        [1, 0]
    """
    offset = ranks * (rows[1] - rows[0])

    def meet(who: int, step: int) -> tuple[Call, ...]:
        q_runs = runs(who, ranks, rows[0], layout, starts)
        k_runs = runs((who - step) % ranks, ranks, rows[1], layout, starts)
        return tuple(calls(q_runs, k_runs, *band, offset))

    steps = ranks
    if starts is not None or None not in band:
        while steps > 1 and not any(meet(who, steps - 1) for who in range(ranks)):
            steps -= 1
    return tuple(meet(rank, step) for step in range(steps))


def check_rows(rows: int, ranks: int, layout: Layout, name: str = "T") -> None:
    """Raise ShapeError, with the way to pad, unless `rows` of all ranks together divide into the layout's chunks."""
    parts = len(chunks(0, ranks, layout)) * ranks
    if rows % parts:
        raise ShapeError(
            f"{name} is {rows} over {ranks} ranks; wanted a multiple of {parts} for {layout} chunks; "
            f"pad {-rows % parts} rows at the end, hide them with causal=True or cu_seqlens=[0, {rows}], and cut them off after"
        )


def members(group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The process group that a call names, the default group when it names none.

    Raises:
        ShapeError: group and device_mesh together, or a mesh of several dims.
        UnsupportedError: torch.distributed is not running, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError("a ring", "this process", "torch.distributed is not running; call init_process_group first")
    if device_mesh is not None:
        if group is not None:
            raise ShapeError("group and device_mesh are both given; wanted one; leave one out")
        if device_mesh.ndim != 1:
            raise ShapeError(f"device_mesh has {device_mesh.ndim} dims; wanted 1; pass one of them, device_mesh['name']")
        group = device_mesh.get_group()
    chosen = dist.group.WORLD if group is None else group
    if chosen is None or dist.get_rank(chosen) < 0:
        raise UnsupportedError("a ring", "this process", "it is not a member of the group; call it on the group's ranks only")
    return chosen


def shard(
    t: Tensor, *, group: dist.ProcessGroup | None = None, device_mesh: DeviceMesh | None = None, layout: Layout = "zigzag",
    dim: int = 1,
) -> Tensor:  # fmt: skip
    """This rank's rows of a tensor that every rank holds whole: tokens, labels, positions, or q, k, v. Differentiable.

    Args:
        t: any tensor with T along `dim`, the same on every rank; `torch.arange(T)` with dim=0 gives the rows' positions.
        group: the process group; None means the default group.
        device_mesh: instead of a group, a mesh of one dim.
        layout: "zigzag" or "contiguous", as the ring_attention that follows.
        dim: the dim of T: 1 for (B, T, ...), 2 for (B, H, T, D), 0 for packed (T, H, D).

    Returns:
        A contiguous tensor with T / ranks rows along `dim`.

    Raises:
        ShapeError: T does not divide; the message says how many rows to pad.
        UnsupportedError: torch.distributed is not running.

    Source:
        arXiv 2310.01889 (ring attention).

    Example:
        >>> shard(torch.arange(8), dim=0)  # doctest: +SKIP
        tensor([0, 1, 6, 7])
    """
    group = members(group, device_mesh)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    check_rows(t.shape[dim], ranks, layout)
    held = chunks(rank, ranks, layout)
    size = t.shape[dim] // (len(held) * ranks)
    return torch.cat([t.narrow(dim, chunk * size, size) for chunk in held], dim)


def unshard(
    t: Tensor, *, group: dist.ProcessGroup | None = None, device_mesh: DeviceMesh | None = None, layout: Layout = "zigzag",
    dim: int = 1,
) -> Tensor:  # fmt: skip
    """The whole tensor, on every rank, of which each holds its rows: the inverse of `shard`. To look at; it has no gradient.

    Args:
        t: this rank's rows along `dim`, as many on every rank.
        group: the process group; None means the default group.
        device_mesh: instead of a group, a mesh of one dim.
        layout: as in `shard`.
        dim: as in `shard`.

    Returns:
        A tensor with T = ranks · rows along `dim`.

    Raises:
        ShapeError: the rows do not divide into the layout's chunks.
        UnsupportedError: t wants a gradient, or torch.distributed is not running.

    Source:
        arXiv 2310.01889 (ring attention).

    Example:
        >>> unshard(shard(torch.arange(8), dim=0), dim=0)  # doctest: +SKIP
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if t.requires_grad:
        reason = "it has no gradient; make the loss from the shards and sum it over the ranks, or pass t.detach()"
        raise UnsupportedError("a tensor that wants a gradient", "unshard", reason)
    group = members(group, device_mesh)
    ranks = dist.get_world_size(group)
    check_rows(t.shape[dim] * ranks, ranks, layout)
    t = t.contiguous()
    parts = [t.new_empty(t.shape) for _ in range(ranks)]
    dist.all_gather(parts, t, group=group)
    placed = {}
    for rank, part in enumerate(parts):
        held = chunks(rank, ranks, layout)
        for i, chunk in enumerate(held):
            size = part.shape[dim] // len(held)
            placed[chunk] = part.narrow(dim, i * size, size)
    return torch.cat([placed[chunk] for chunk in sorted(placed)], dim)
