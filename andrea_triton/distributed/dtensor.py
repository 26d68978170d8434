"""How DTensor may shard the operators: not at all, over heads, or over the batch. Heads and batch entries do not meet in
attention, so that no rule needs communication, but for the gradient of what the shards share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from ..ops import backward_op, forward_op

Placements = list[Placement | None]
Rule = tuple[Placements, Placements]

BATCH, HEADS = 0, 1
NUMBERS = 10  # arguments of the operators after the tensors: the problem's settings, and the backend


class Arguments(NamedTuple):
    """What the operators have in common, as DTensor's specs: the tensors, and of the numbers what decides about sharding."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sinks: Any
    keep: Any
    slopes: Any
    key_lengths: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seed: Any
    dropout_p: float
    backend: str


def arguments(args: tuple[Any, ...]) -> Arguments:
    """The common arguments, from q on."""
    return Arguments._make((*args[:11], args[16], args[-1]))


def ways(x: Arguments) -> list[int | None]:
    """The dims of q along which a call may be sharded; None is not at all.

    A kept weight depends on its batch entry's and head's number, which a shard does not know: dropout is not sharded. Packed
    sequences have no batch. Heads are sharded where every rank gets whole groups of them.
    """
    if x.dropout_p > 0.0:
        return [None]
    ranks = 1
    for dim in range(x.q.mesh.ndim):
        if any(t.placements[dim].is_shard(HEADS) for t in (x.q, x.k, x.v)):
            ranks *= x.q.mesh.size(dim)
    batch = [] if x.cu_seqlens_q is not None else [BATCH]
    return [None, *batch, *([HEADS] if x.k.shape[1] % ranks == 0 else [])]


def inputs(x: Arguments, way: int | None) -> Placements:
    """Of the tensors of a call that is sharded one way."""

    def place(t: Any, dims: dict[int, int]) -> Placement | None:
        return None if t is None else Shard(dims[way]) if way is not None and way in dims else Replicate()

    both = {BATCH: 0, HEADS: 1}
    return [
        *(place(t, both) for t in (x.q, x.k, x.v)),
        place(x.bias, matrix_dims(x.bias)),
        place(x.sinks, {HEADS: 0}),
        place(x.keep, matrix_dims(x.keep)),
        place(x.slopes, both),
        place(x.key_lengths, {BATCH: 0}),
        *(place(t, {}) for t in (x.cu_seqlens_q, x.cu_seqlens_k, x.seed)),
    ]


def matrix_dims(t: Any) -> dict[int, int]:
    """Where a tensor that broadcasts to (B, HQ, M, N) has a batch and heads of its own."""
    if t is None:
        return {}
    dims = {BATCH: t.ndim - 4, HEADS: t.ndim - 3}
    return {way: dim for way, dim in dims.items() if dim >= 0 and t.shape[dim] != 1}


def rows(x: Arguments, way: int | None) -> Placements:
    """Of lse, row_max and row_sum; the last two are empty where no kernel runs."""
    lse: Placement = Replicate() if way is None else Shard(0 if x.cu_seqlens_q is not None else way)
    return [lse, *[Replicate() if x.backend == "torch" else lse] * 2]


def forward_rules(*args: Any) -> list[Rule]:
    """Placements of out, lse, row_max, row_sum, and of the arguments."""
    x = arguments(args)
    return [([_sharded(way), *rows(x, way)], [*inputs(x, way), *[None] * NUMBERS]) for way in ways(x)]


def backward_rules(dout: Any, dlse: Any, out: Any, lse: Any, row_max: Any, row_sum: Any, needs: Any, *args: Any) -> list[Rule]:
    """Placements of dq, dk, dv, dbias, dsinks, and of the arguments. The gradient of what all shards read is a sum over them."""
    x, rules = arguments(args), []
    for way in ways(x):
        common, flowing = inputs(x, way), [None if dout is None else _sharded(way), None if dlse is None else rows(x, way)[0]]
        shared: Placement = Replicate() if way is None else Partial()
        terms = [shared if place is None or place.is_replicate() else place for place in (common[3], common[4])]
        grads = [g if need else Replicate() for g, need in zip((*common[:3], *terms), needs, strict=True)]
        rules.append((grads, [*flowing, _sharded(way), *rows(x, way), None, *common, *[None] * NUMBERS]))
    return rules


def _sharded(way: int | None) -> Placement:
    """Of a tensor with the dims of q."""
    return Replicate() if way is None else Shard(way)


register_sharding(forward_op._opoverload)(forward_rules)
register_sharding(backward_op._opoverload)(backward_rules)
