"""The ring against one process: out and gradients, on two and four ranks; and what happens when a rank fails."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist

from andrea_triton import ShapeError, UnsupportedError, backends, ops, testing
from andrea_triton.distributed import ring_attention, shard, unshard
from andrea_triton.distributed.layout import Layout
from andrea_triton.testing import Case
from tests.conftest import HAS_TRITON
from tests.distributed.ranks import Failed, Ranks, ranks_of

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
LAYOUTS = get_args(Layout)
T = 104  # 13 rows in a zig-zag chunk of four ranks, a multiple of no tile
CASES = [
    Case("full, 4 heads on 2", HQ=4, HKV=2, M=T, D=16),
    Case("causal, 4 heads on 1", B=2, HQ=4, HKV=1, M=T, D=16, causal=True),
    Case("causal window", M=T, D=16, causal=True, window=9),
    Case("window to both sides", M=T, D=16, window=(30, 5)),
    Case("softcap and DV", M=T, D=8, DV=24, causal=True, softcap=3.0),
    Case("(B, T, H, D) memory, fewer queries", B=2, HQ=2, M=T, N=2 * T, D=16, causal=True, layout="rows"),
    Case("packed with slack", HQ=4, HKV=2, lengths_q=(20, 0, 61, 16), lengths_k=(20, 0, 61, 16), slack=7, D=16, causal=True),
]


def attend(group: Any, case: Case, dtype: torch.dtype, layout: Layout, backend: str) -> list[np.ndarray]:
    """out, dq, dk, dv, put together from the ranks."""
    inputs, dim = testing.make_inputs(case, dtype), 0 if case.lengths_q else 2
    place: dict[str, Any] = {"group": group, "layout": layout}
    q, k, v = (shard(t, **place, dim=dim).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    settings = {name: inputs.settings[name] for name in ("causal", "window", "scale", "softcap")}
    out = ring_attention(q, k, v, **place, **settings, cu_seqlens=inputs.extras.get("cu_seqlens_q"), backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), shard(inputs.dout, **place, dim=dim))
    assert [t.dtype for t in (out, *grads)] == [dtype] * 4
    return [unshard(t.detach(), **place, dim=dim).double().numpy() for t in (out, *grads)]


def check(ranks: Ranks, size: int, case: Case, dtype: torch.dtype, layout: Layout, backend: str = "torch") -> None:
    """The accuracy rule, on out and every gradient, and the same answer on every rank."""
    inputs = testing.make_inputs(case, dtype)._replace(dlse=None)
    exact = testing.run(testing.cast(inputs, FP64), testing.attend_reference)
    # The oracle's own rounding is no yardstick for fp64: that has to be 2**26 times closer than fp32.
    yardstick = testing.cast(inputs, FP32) if dtype == FP64 else inputs
    eager = testing.run(yardstick, testing.attend_reference)
    got = ranks.run(attend, size, case, dtype, layout, backend)
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        want, near = getattr(exact, name), getattr(eager, name).double()
        if dtype == FP64:
            near = want + (near - want) * 2.0**-26
        testing.assert_accurate(torch.from_numpy(got[0][i]), near, want, dtype, f"{case.name}: {name}")
        assert all(np.array_equal(answer[i], got[0][i]) for answer in got)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_process(ranks: Ranks, size: int, layout: Layout, case: Case) -> None:
    # A query that sees one key has gradient 0, which fp32 eager gives exactly and a recomputed softmax to a few roundings: the
    # packed case, which has such rows, is judged in fp64.
    packed = case.lengths_q is not None
    check(ranks, size, case, FP64 if packed else FP32, layout, "reference" if packed else "torch")


@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
def test_other_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    check(ranks, 4, CASES[1], dtype, "zigzag")


def test_reference_backend(ranks: Ranks) -> None:
    check(ranks, 2, CASES[2], FP32, "zigzag", "reference")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_kernels(ranks: Ranks) -> None:
    check(ranks, 2, Case("causal", HQ=2, HKV=1, M=24, D=16, causal=True), FP32, "zigzag", "interpreter")


@pytest.mark.parametrize("case", [Case("no batch", B=0, M=8, D=8), Case("no rows", M=0, D=8)], ids=lambda case: case.name)
def test_nothing_to_do(ranks: Ranks, case: Case) -> None:
    out, dq, dk, dv = ranks.run(attend, 2, case, FP32, "zigzag", "torch")[0]
    assert out.shape == dq.shape == dk.shape == dv.shape == (case.B, case.HQ, case.M, case.D)


def on_a_mesh(group: Any, what: str) -> list[float]:
    """The ring on one dim of a mesh of 2 by 2 ranks, or on meshes that do not do."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    x = torch.arange(8.0).view(1, 1, 8, 1)
    if what == "two dims":
        shard(x, device_mesh=mesh, dim=2)
    if what == "group too":
        shard(x, device_mesh=mesh["context"], group=group, dim=2)
    here = shard(x, device_mesh=mesh["context"], dim=2)
    out = ring_attention(here, torch.zeros_like(here), here, device_mesh=mesh["context"], causal=True)
    return unshard(out, device_mesh=mesh["context"], dim=2).flatten().tolist()


def test_device_mesh(ranks: Ranks) -> None:
    means = [i / 2 for i in range(8)]
    for got in ranks.run(on_a_mesh, 4, ""):
        assert got == pytest.approx(means, rel=1e-6)
    with pytest.raises(Failed, match="device_mesh has 2 dims; wanted 1"):
        ranks.run(on_a_mesh, 4, "two dims")
    with pytest.raises(Failed, match="group and device_mesh are both given"):
        ranks.run(on_a_mesh, 4, "group too")


def refused(group: Any, what: str) -> str:
    """The message of a bad call, the same on every rank."""
    rank, x = dist.get_rank(group), torch.zeros(1, 2, 6, 8, requires_grad=True)
    odd, pairs = torch.zeros(1, 2, 5, 8), torch.tensor([0, 4, 12])
    bad = {
        "odd": lambda: ring_attention(odd, odd, odd, group=group),
        "length": lambda: shard(torch.zeros(10), group=group, dim=0),
        "ranks": lambda: ring_attention(*[x[:, :, 2 * rank :]] * 3, group=group),
        "settings": lambda: ring_attention(x, x, x, group=group, causal=rank == 0),
        "dtype": lambda: ring_attention(*[x.to((FP32, FP64)[rank])] * 3, group=group),
        "layout": lambda: ring_attention(x, x, x, group=group, layout="spiral"),  # type: ignore[arg-type]
        "heads": lambda: ring_attention(x, x[:, :1].expand(1, 4, 6, 8), x, group=group),
        "backend": lambda: ring_attention(x, x, x, group=group, backend="triton"),
        "cu end": lambda: ring_attention(x, x, x, group=group, cu_seqlens=pairs + 1),
        "cu type": lambda: ring_attention(x, x, x, group=group, cu_seqlens=pairs.float()),
        "cu keys": lambda: ring_attention(x, odd[:, :, :4], odd[:, :, :4], group=group, cu_seqlens=pairs),
        "gradient": lambda: unshard(x, group=group, dim=2),
        "double": lambda: torch.autograd.grad(ring_attention(x, x, x, group=group).sum(), x, create_graph=True),
    }
    with pytest.raises((ShapeError, TypeError, UnsupportedError)) as caught:
        bad[what]()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("odd", "ShapeError: q has 5 rows on this rank; wanted a multiple of 2 .* pad the sequence to a multiple of 4 rows"),
        ("length", "ShapeError: T is 10 over 2 ranks; wanted a multiple of 4 .* pad 2 rows"),
        ("ranks", r"ShapeError: q is \[1, 2, .* on rank .* on all ranks"),
        ("settings", "ShapeError: .* on all ranks"),
        ("dtype", "ShapeError: .* on all ranks"),
        ("layout", "ShapeError: layout is 'spiral'"),
        ("heads", "ShapeError: "),
        ("backend", "UnsupportedError: .*interpreter"),
        ("cu end", "ShapeError: cu_seqlens is .* wanted 0"),
        ("cu type", "DTypeError: cu_seqlens is .*int32 or int64"),
        ("cu keys", "ShapeError: q has 6 rows and k 4"),
        ("gradient", "UnsupportedError: .*make the loss from the shards"),
        ("double", "UnsupportedError: double backward"),
    ],
)
def test_bad_input(ranks: Ranks, what: str, message: str) -> None:
    for got in ranks.run(refused, 2, what):
        assert re.match(message, got), got


def fail(group: Any, how: str) -> float:
    """Seconds until rank 0 learns that rank 1 failed in the middle of a ring."""
    x = torch.randn(1, 1, 16, 8, requires_grad=True)
    out = ring_attention(x, x, x, group=group, causal=True)
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else time.sleep(8)
        return 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        out.sum().backward()
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["killed", pytest.param("stuck", marks=pytest.mark.slow)])
def test_a_rank_that_fails_makes_the_others_raise(how: str, tmp_path: Path) -> None:
    timeout = 5.0
    with ranks_of(2, tmp_path, timeout) as ranks:
        for pipe in ranks.pipes:
            pipe.send((fail, 2, (how,)))
        failed, seconds = ranks.answer(0)
        assert not failed, seconds
        assert seconds < timeout + 2.0


def backward_calls(group: Any) -> tuple[int, int]:
    """How many calls of attention a rank makes, forward and backward."""
    made = [0, 0]

    def counted(place: int, function: Any) -> Any:
        def call(*args: Any) -> Any:
            made[place] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attend", counted(0, ops.attend))
        patch.setattr(backends, "partial_backward", counted(1, backends.partial_backward))
        x = torch.randn(1, 1, 16, 8, requires_grad=True)
        ring_attention(x, x, x, group=group, causal=True).sum().backward()
    return made[0], made[1]


def test_calls_that_see_nothing_are_not_made(ranks: Ranks) -> None:
    """Three calls on the own keys (or one, where the two chunks are neighbours), one on those of each other rank."""
    assert ranks.run(backward_calls, 4) == [(6, 6), (6, 6), (6, 6), (4, 4)]


def compiled(group: Any) -> bool:
    """Whether a compiled function with a ring in its middle gives what it gives uncompiled, and the gradient too."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return ring_attention(2 * x, x, x, group=group, causal=True).square()

    x, y = (torch.linspace(-1, 1, 128).view(1, 1, 16, 8).requires_grad_() for _ in range(2))
    ours, theirs = torch.compile(model, backend="eager")(x), model(y)
    ours.sum().backward()
    theirs.sum().backward()
    return torch.equal(ours, theirs) and torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_in_a_compiled_model(ranks: Ranks) -> None:
    assert ranks.run(compiled, 2) == [True, True]
