"""The operators on DTensors, sharded over heads and over the batch; models under tensor parallelism and FSDP, unchanged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import andrea_triton.distributed
from andrea_triton import attention, testing
from andrea_triton.testing import Case, Inputs
from tests.conftest import HAS_TRITON
from tests.distributed.ranks import Ranks

assert andrea_triton.distributed.dtensor
RESOLUTION = torch.finfo(torch.float32).eps  # everything runs in fp64 and agrees beyond what fp32 can tell
HEADS, BATCH, WHOLE = Shard(1), Shard(0), Replicate()
TERMS = Case("bias, sinks, window", B=2, HQ=4, HKV=2, M=9, D=8, bias=(4, 9, 9), sinks=True, causal=True, window=5)
ROWS = Case("bias of rows, key lengths", B=2, HQ=4, HKV=2, M=9, D=8, bias=(2, 1, 1, 9), key_lengths=(4, 9), alibi=True)
SMALL = Case("4 heads on 1", B=2, HQ=4, HKV=1, M=9, D=8, causal=True)
DROPPED = Case("dropout", B=2, HQ=4, HKV=2, M=9, D=8, dropout_p=0.3)
PACKED = Case("packed", HQ=4, HKV=2, lengths_q=(5, 7), lengths_k=(5, 7), D=8, causal=True)


def results(inputs: Inputs, backend: str) -> list[Tensor]:
    """out, lse and every gradient there is, whole."""
    got = testing.run(inputs, lambda x: call(x, backend))
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in got if t is not None]


def call(inputs: Inputs, backend: str) -> Any:
    """(out, lse) of the library."""
    settings = {**inputs.settings, **inputs.extras, "return_lse": True, "backend": backend}
    function = andrea_triton.varlen_attention if "max_q" in settings else attention
    return function(inputs.q, inputs.k, inputs.v, **settings)


def sharded(group: Any, case: Case, shape: tuple[int, ...], places: tuple[Any, ...], backend: str) -> tuple[float, str]:
    """(largest difference to one process, placements of out) of a call on a mesh with q, k, v, dout and dlse placed there."""
    # A new mesh makes groups, in which all processes take part; the first two have theirs.
    mesh = DeviceMesh.from_group(group, "cpu") if shape == (2,) else dist.init_device_mesh("cpu", shape)
    inputs = testing.make_inputs(case, torch.float64)
    on_rows = [Shard(0) if p == HEADS and case.lengths_q else p for p in places]
    q, k, v, dout = (distribute_tensor(t, mesh, places) for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
    extras = {
        n: distribute_tensor(t, mesh, [WHOLE] * len(shape)) if isinstance(t, Tensor) else t for n, t in inputs.extras.items()
    }
    assert inputs.dlse is not None
    there = Inputs(q, k, v, dout, distribute_tensor(inputs.dlse, mesh, on_rows), inputs.settings, extras)
    out = call(there, backend)[0]
    pairs = zip(results(there, backend), results(inputs, backend), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs), str(out.placements)


@pytest.mark.parametrize(
    ("case", "shape", "places", "kept"),
    [
        (TERMS, (2,), (HEADS,), True),
        (TERMS, (2,), (BATCH,), True),
        (TERMS, (2, 2), (BATCH, HEADS), True),
        (TERMS, (2,), (WHOLE,), True),
        (ROWS, (2,), (HEADS,), True),
        (ROWS, (2,), (BATCH,), True),
        (SMALL, (2,), (BATCH,), True),
        (DROPPED, (2,), (HEADS,), False),
        (PACKED, (2,), (HEADS,), True),
        (TERMS, (4,), (HEADS,), False),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_equals_one_process(ranks: Ranks, case: Case, shape: tuple[int, ...], places: tuple[Any, ...], kept: bool) -> None:
    for error, placements in ranks.run(sharded, 4 if shape != (2,) else 2, case, shape, places, "torch"):
        assert error < RESOLUTION
        assert (placements == str(places)) == kept


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_kernels(ranks: Ranks) -> None:
    """Their row numbers are sharded, too."""
    for error, placements in ranks.run(sharded, 2, Case("small", M=5, D=8), (2,), (HEADS,), "interpreter"):
        assert error < RESOLUTION
        assert placements == str((HEADS,))


class Layer(nn.Module):
    """Attention of 4 heads on 2 as anybody would write it: it has not heard of ranks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return self.out(out.transpose(1, 2).flatten(-2))


def parallel(group: Any, how: str) -> float:
    """Largest difference to one process of output and gradients of a Layer."""
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    alone, layer, x = Layer().double(), Layer().double(), torch.randn(2, 9, 32, dtype=torch.float64)
    layer.load_state_dict(alone.state_dict())
    if how == "fsdp":
        fully_shard(layer, mesh=mesh)
    else:
        into = ColwiseParallel(use_local_output=how == "tensor parallel, local")
        parallelize_module(layer, mesh, {"q": into, "k": into, "v": into, "out": RowwiseParallel()})
    ours, theirs = layer(x), alone(x)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    pairs = [(ours, theirs)]
    for mine, other in zip(layer.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        pairs.append((mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad, other.grad))
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("how", ["tensor parallel, local", "tensor parallel, DTensor", "fsdp"])
def test_a_model_runs_unchanged(ranks: Ranks, how: str) -> None:
    for error in ranks.run(parallel, 2, how):
        assert error < RESOLUTION
