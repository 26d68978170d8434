"""What tensor parallelism leaves of an attention module on one rank. torch splits the projections over ranks, and with them the
heads; what else is there per head, and what meets a DTensor, has to follow.

The projections may return plain tensors, which then hold this rank's heads, or DTensors, which say that they hold all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ShapeError, UnsupportedError
from ..spec import Mask
from .attend import Call

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = (Tensor, nn.Parameter)
APART = 0x1D8E4E27C47D124F  # odd: multiples of it, by which the ranks' seeds differ, are all different


class Split(NamedTuple):
    """Over which dims of a mesh the heads are split."""

    mesh: DeviceMesh
    dims: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Among how many ranks the heads are divided."""
        return math.prod(self.mesh.size(dim) for dim in self.dims)

    @property
    def rank(self) -> int:
        """Which of them this is."""
        number = 0
        for dim in self.dims:
            number = number * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return number


def is_dtensor(t: Tensor) -> bool:
    """Whether this is a DTensor; where there is none, torch's part for them is not imported."""
    if type(t) in PLAIN or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


def split_of(W_O: nn.Linear) -> Split | None:
    """How the heads of a module are split, None for not at all. The features that W_O takes are those of the heads: tensor
    parallelism shards its weight's dim 1, and no other (FSDP shards dim 0)."""
    weight = W_O.weight
    if not is_dtensor(weight):
        return None
    placements = weight.placements  # type: ignore[attr-defined]
    dims = tuple(dim for dim, placement in enumerate(placements) if placement.is_shard(1))
    return Split(weight.device_mesh, dims) if dims else None  # type: ignore[attr-defined]


def kv_heads_here(n_kv_head: int, split: Split | None) -> int:
    """Key heads of this rank.

    Raises:
        ShapeError: the ranks do not divide them.
    """
    ranks = 1 if split is None else split.ranks
    if n_kv_head % ranks:
        raise ShapeError(
            f"n_kv_head is {n_kv_head}, which {ranks} ranks do not divide; wanted whole key heads on every rank; "
            "split over fewer ranks, or repeat the key heads"
        )
    return n_kv_head // ranks


def check_heads(q: Tensor, k: Tensor, n_head: int, n_kv_head: int) -> None:
    """Fail unless q and k (B, H, T, D) hold the same share of the query and key heads.

    Raises:
        ShapeError: they do not.
    """
    if q.shape[1] * n_kv_head != k.shape[1] * n_head:
        raise ShapeError(
            f"W_Q gives {q.shape[1]} of {n_head} heads and W_K {k.shape[1]} of {n_kv_head}; wanted the same share of both on a "
            "rank; split W_Q, W_K and W_V alike, as andrea_triton.distributed.tensor_parallel_plan does"
        )


def for_heads(
    call: Call, q: Tensor, split: Split | None, n_head: int, key_lengths: Tensor | None, mask: Mask | Tensor | None
) -> tuple[Call, Tensor | None, Mask | Tensor | None]:
    """A call's settings, lengths and mask for the heads that q has here.

    Args:
        call: for n_head heads; its sinks have a gradient that is whole on every rank.
        q: (B, H, T, D), plain or a DTensor.
        split: how the heads are split.
        n_head: query heads of the module.
        key_lengths: (B,) integers.
        mask: as in `attention`, for n_head heads.

    Returns:
        The three. Where weights are dropped, heads of several ranks get seeds of their own, and those of DTensors one seed.

    Raises:
        UnsupportedError: a Mask where q holds the heads of this rank only, or a dense backend where it is a DTensor.
    """
    sinks = call.sinks
    if is_dtensor(q):
        from .. import distributed  # tells DTensor about the operators

        assert distributed
        if call.backend in ("naive", "reference"):
            way_out = "use ColwiseParallel() with its local output"
            raise UnsupportedError(f"backend={call.backend!r}", "projections that return DTensors", way_out)
        sinks, key_lengths = (None if t is None else replicated(t, q) for t in (sinks, key_lengths))
        mask = replicated(mask, q) if isinstance(mask, Tensor) else mask
        seed = None if call.dropout_p == 0.0 else one_for_all(drawn(q), q)
        return call._replace(sinks=sinks, seed=seed), key_lengths, mask
    if split is None:
        return call, key_lengths, mask
    if isinstance(mask, Mask) and split.ranks > 1:
        raise UnsupportedError(
            "mask=Mask(...)", "heads split over ranks", "it would count this rank's heads from 0; pass a bool tensor"
        )
    if isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-3] == n_head:
        mask = share(mask, mask.dim() - 3, split)
    seed = None if call.dropout_p == 0.0 else drawn(q) + ((split.rank * APART + 2**63) % 2**64 - 2**63)
    return call._replace(sinks=None if sinks is None else share(sinks, 0, split), seed=seed), key_lengths, mask


def drawn(q: Tensor) -> Tensor:
    """A seed from torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


def replicated(t: Tensor, like: Tensor) -> Tensor:
    """t as a DTensor on the mesh of another, where that is one; t is the same on all ranks."""
    if not is_dtensor(like) or is_dtensor(t):
        return t
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def one_for_all(t: Tensor, like: Any) -> Tensor:
    """The first rank's t, as a DTensor."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(t, mesh, [Replicate()] * mesh.ndim)


def share(t: Tensor, dim: int, split: Split) -> Tensor:
    """This rank's part of what has n_head entries along `dim`, t itself the same on all ranks or a DTensor. Its gradient is
    gathered, so that it is the same on all ranks too."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Shard(dim) if d in split.dims else Replicate() for d in range(split.mesh.ndim)]
    if not is_dtensor(t):
        t = DTensor.from_local(t, split.mesh, [Replicate()] * split.mesh.ndim, run_check=False)
    return t.redistribute(split.mesh, placements).to_local()  # type: ignore[attr-defined]


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def gathered(t: Tensor) -> Tensor:
    """All of a DTensor, on every rank; another tensor as it is."""
    return t.full_tensor() if is_dtensor(t) else t  # type: ignore[attr-defined]


def placed(t: Tensor, like: Tensor) -> Tensor:
    """t placed like another tensor: parts that all ranks have become a DTensor, a DTensor changes its placement."""
    if not is_dtensor(like):
        return t
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if is_dtensor(t):
        return t.redistribute(mesh, placements)  # type: ignore[attr-defined]
    return DTensor.from_local(t, mesh, placements, run_check=False)
