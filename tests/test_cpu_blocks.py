"""The torch backend by blocks of rows: every feature in fp32, in memory that grows with the length."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from andrea_triton import Mask, Score, attention, attention_weights, cpu, varlen_attention
from andrea_triton.cpu import blocked, tile
from andrea_triton.testing import Case, assert_accurate, attend_reference, cast, check, make_inputs, run
from tests.cpu_problems import problem_of, qkv, visible

F32, F64 = torch.float32, torch.float64
INF = float("inf")


def wide(keywords: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in keywords.items()}


def by_torch(x: Any) -> Any:
    return attention(x.q, x.k, x.v, **x.settings, **x.extras, return_lse=True, backend="torch")


@pytest.mark.parametrize(
    "band", [{}, {"causal": True}, {"window": (40, 3)}, {"causal": True, "window": 9, "q_start": 100}], ids=str
)
def test_the_blocks_hold_every_pair_once(band: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "TILE", 20_000)
    q, k, v = torch.zeros(3, 4, 300, 8), torch.zeros(3, 2, 200, 8), torch.zeros(3, 2, 200, 8)
    problem, seen = problem_of(q, k, v, **band), torch.zeros(3, 2, 300, 200, dtype=torch.int)
    pieces = tile.spans(problem)
    for b, h in tile.shares(problem, pieces):
        for i, j in pieces:
            seen[b, h, i, j] += 1
            assert 2 * seen[b, h, i, j].numel() <= max(20_000, 2 * 32 * 200)
    assert seen.max() == 1 and (seen[:, :, visible(300, 200, *problem.band(), problem.q_start)] == 1).all()


TERMS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": 300},
    {"softcap": 2.0, "sinks": torch.zeros(2)},
    {"alibi": torch.ones(2), "key_lengths": torch.tensor([1200])},
    {"bias": torch.zeros(1500), "dropout_p": 0.1, "seed": 0},
    {"score": Score(None, torch_fn=lambda s, *_: s * 2), "mask": Mask(None, torch_fn=lambda b, h, i, j: i >= j)},
]


@pytest.mark.parametrize("more", TERMS, ids=lambda x: " ".join(x))
def test_memory_is_not_quadratic(more: dict[str, Any]) -> None:
    """No tensor of forward, backward and statistics has more elements than the inputs or one tile."""
    q, k, v = (torch.randn(1, 2, 1500, 8).requires_grad_() for _ in range(3))
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            found = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor)]
            sizes.extend(x.numel() for x in found if 0 not in x.stride())
            return result

    bias = more.get("bias")
    inputs = (q, k, v, bias, more.get("sinks"))
    problem = problem_of(q, k, v, **more)
    with Watch(), torch.no_grad():
        out, lse = cpu.forward(problem, q, k, v)
        cpu.backward(problem, inputs, out, lse, out, lse, tuple(x is not None for x in inputs))
        cpu.statistics(problem, q, k)
    assert max(sizes) <= tile.TILE


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=5)), ids=str)
def test_every_subset_of_the_gradients(needs: tuple[bool, ...]) -> None:
    x = make_inputs(Case("all", HQ=4, HKV=2, M=9, N=12, D=8, causal=True, bias=(9, 12), sinks=True), F64)
    problem, extras = problem_of(x.q, x.k, x.v, causal=True, **x.extras), x.extras
    out, lse = cpu.forward(problem, x.q, x.k, x.v)
    inputs = (x.q, x.k, x.v, extras["bias"], extras["sinks"])
    found = cpu.backward(problem, inputs, out, lse, x.dout, x.dlse, needs)
    for got, wanted, need in zip(found, run(x, attend_reference)[2:], needs, strict=True):
        assert (got is not None) == need
        if got is not None:
            torch.testing.assert_close(got, wanted)


def large(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q·k is about 1.4e5, over the largest fp16."""
    q = torch.full((1, 2, 8, 128), 33.0) + torch.randn(1, 2, 8, 128)
    return q.to(dtype), q.to(dtype), torch.randn(1, 2, 8, 128).to(dtype)


LARGE: list[dict[str, Any]] = [
    {"key_lengths": torch.tensor([7])},
    {"sinks": torch.zeros(2)},
    {"alibi": torch.full((2,), 0.5)},
    {"bias": torch.randn(8, 8), "causal": True},
    {"dropout_p": 0.2, "seed": 3},
    {"window": 3, "softcap": 5.0},
]


@pytest.mark.parametrize("more", LARGE, ids=lambda x: " ".join(x))
def test_d09_products_over_the_range_of_fp16(more: dict[str, Any]) -> None:
    leaves = [x.requires_grad_() for x in large(torch.float16)]
    out, lse, *statistics = attention(*leaves, **more, return_lse=True, return_stats=True)
    exact = attention(*(x.detach().float() for x in leaves), **more)
    assert_accurate(out.detach(), exact.half(), exact, torch.float16, "out")
    grads = torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
    assert all(x.isfinite().all() for x in (lse, *grads, *statistics[0]))
    assert attention_weights(*leaves[:2], causal=True).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("more", LARGE, ids=lambda x: " ".join(x))
def test_d10_sixteen_bits_lose_only_the_rounding_of_the_results(more: dict[str, Any], dtype: torch.dtype) -> None:
    """As exact as fp64, rounded once."""
    given = [torch.randn(1, 2, 8, 128).to(dtype) for _ in range(4)]
    leaves, wider = ([x.to(t).requires_grad_() for x in given[:3]] for t in (dtype, F64))
    got, exact = (attention(*x, **as_wide(more, x[0].dtype)) for x in (leaves, wider))
    grads, wanted = (torch.autograd.grad(r, x, given[3].to(r.dtype)) for r, x in ((got, leaves), (exact, wider)))
    for a, b in zip((got, *grads), (exact, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= torch.finfo(dtype).eps * b.abs().max()


def as_wide(keywords: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return wide(keywords) if dtype == F64 else keywords


def test_d09_packed_and_values_of_another_width() -> None:
    q, k, v = large(torch.float16)
    starts = torch.tensor([0, 3, 8])
    packed = varlen_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), starts, starts, 5, 5)
    assert packed.isfinite().all() and attention(q, k, v[..., :64]).isfinite().all()


def test_d11_distances_that_sixteen_bits_cannot_hold() -> None:
    x = make_inputs(Case("D11", M=128, N=5, D=16, alibi=True, q_start=120), torch.float16)
    exact = attend_reference(cast(x, F64))[0]
    assert (by_torch(x)[0].double() - exact).abs().max() <= torch.finfo(torch.float16).eps * exact.abs().max()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_d17_a_sink_of_infinity_takes_all(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    sinks = torch.tensor([INF, 0.0], requires_grad=True)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    assert (out[:, 0] == 0).all() and (lse[:, 0] == INF).all() and out[:, 1].isfinite().all()
    dq, dk, dv, dsinks = torch.autograd.grad(out.sum() + lse[:, 1].sum(), (q, k, v, sinks))
    assert all((x[:, 0] == 0).all() and x.isfinite().all() for x in (dq, dk, dv)) and dsinks[0] == 0 and dsinks[1].isfinite()


def test_d39_masks_that_are_constant_along_the_keys_get_no_gradient() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    for shape in ((9, 1), (1,), (2, 1, 1, 1)):
        bias = torch.randn(shape).requires_grad_()
        (grad,) = torch.autograd.grad(attention(q, k, v, bias=bias).float().sum(), bias)
        assert grad.shape == bias.shape and (grad == 0).all()


@pytest.mark.parametrize(("D", "DV"), [(320, 320), (512, 512), (0, 8), (8, 0)])
def test_d43_any_head_dim(D: int, DV: int) -> None:
    q, k, v = (torch.randn(1, 2, 7, n, dtype=F64) for n in (D, D, DV))
    small = problem_of(q[..., :1], q[..., :1], v[..., :1]) if D and DV else problem_of(*qkv(7, 7, 8, 2))
    problem = replace(small, B=1, HQ=2, HKV=2, D=D, DV=DV, dtype=F64)
    out, lse = cpu.forward(problem, q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = scaled_dot_product_attention(*leaves)
    torch.testing.assert_close(out, wanted)
    dout = torch.randn_like(out)
    grads = cpu.backward(problem, (q, k, v, None, None), out, lse, dout, None, (True,) * 3 + (False,) * 2)
    for got, leaf, grad in zip(grads, leaves, torch.autograd.grad(wanted, leaves, dout, allow_unused=True), strict=False):
        torch.testing.assert_close(got, torch.zeros_like(leaf) if grad is None else grad)


def test_d12_a_backward_under_autocast_is_that_outside() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = attention(q, k, v, softcap=2.0)
    wanted = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def sweep(seeds: range) -> None:
    """Every kind of call, peaked and not, in 16 bits and 32. Among thousands of results one may miss the rule because eager's
    error on the same numbers is luckily small; a fault shows on other numbers of the same case too, so these decide."""
    for seed in seeds:
        draw = random.Random(seed)
        M, N = draw.choice(((40, 40), (7, 33), (33, 7), (130, 150)))
        case = Case(
            f"sweep {seed}", B=draw.choice((1, 2)), HQ=4, HKV=draw.choice((1, 2, 4)), M=M, N=N, D=draw.choice((8, 64)),
            causal=draw.random() < 0.5, window=draw.choice((None, 9)), softcap=draw.choice((None, 3.0)),
            sinks=draw.random() < 0.5, bias=draw.choice((None, (M, N), (4, 1, N))), hidden=draw.choice((None, 0.3)),
            dropout_p=draw.choice((0.0, 0.2)), gain=draw.choice((1.0, 6.0)),
        )  # fmt: skip
        dtype = draw.choice((torch.float16, torch.bfloat16, F32))
        try:
            check(make_inputs(case, dtype, seed=seed), by_torch, f"{case}")
        except AssertionError:
            for other in (1000, 2000, 3000):
                check(make_inputs(case, dtype, seed=seed + other), by_torch, f"{case}, drawn anew")


def test_d45_a_sweep_of_calls_keeps_the_rule() -> None:
    sweep(range(40))


@pytest.mark.slow
def test_d45_a_long_sweep_of_calls_keeps_the_rule() -> None:
    sweep(range(40, 640))


ON_BLOCKS: list[dict[str, Any]] = [
    {"key_lengths": torch.tensor([256])},
    {"window": 200, "softcap": 200.0},
    {"sinks": torch.zeros(2)},
]


@pytest.mark.parametrize("more", ON_BLOCKS, ids=lambda x: " ".join(x))
def test_no_product_reads_a_denormal_number_and_nothing_is_done_twice(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor takes a hundred times longer over these, which peaked rows are full of."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 256, 16) * gain for gain in (5.0, 5.0, 1.0, 1.0))
    found: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm_):
                found.extend(args)
            return func(*args, **(kwargs or {}))

    floors: list[float] = []
    for name in ("forward_above", "backward_above"):
        once = getattr(blocked, name)
        monkeypatch.setattr(blocked, name, lambda floor, *rest, once=once: (floors.append(floor), once(floor, *rest))[1])
    inputs = (q, k, v, None, more.get("sinks"))
    problem = problem_of(q, k, v, causal=True, **more)
    with Watch(), torch.no_grad():
        out, lse = cpu.forward(problem, q, k, v)
        cpu.backward(problem, inputs, out, lse, dout, None, tuple(x is not None for x in inputs))
    assert floors == [2.0**-100] * 2
    assert found and not any(((x != 0) & (x.abs() < torch.finfo(F32).tiny)).any() for x in found)


def tiny_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries whose second key has weight exp(-72), 5e-32, and all of the values that count."""
    q, k = torch.ones(1, 1, 4, 1, dtype=dtype), torch.tensor([0.0, -72.0], dtype=dtype).view(1, 1, 2, 1)
    return q, k, torch.tensor([0.0, 1e30], dtype=dtype).view(1, 1, 2, 1)


def test_tiny_weights_count_where_they_make_the_result() -> None:
    results = []
    for dtype in (F32, F64):
        leaves = [x.requires_grad_() for x in tiny_weights(dtype)]
        out = attention(*leaves, key_lengths=torch.tensor([2]), backend="torch")
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, exact in zip(*results, strict=True):
        assert (exact != 0).any()
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=0.0)


def test_a_slope_of_a_score_may_make_any_weight_count() -> None:
    """Beside rows of slope 1, whose gradients are larger than a bound blind to slopes would say of the first row's."""
    steep = Score(None, torch_fn=lambda s, b, h, i, j: torch.where(i == i.min(), s * 1e30, s))
    q, k, _ = tiny_weights(F32)
    q, k, v = q.requires_grad_(), k * 1e-30, torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    (dq,) = torch.autograd.grad(attention(q, k, v, score=steep, backend="torch").sum(), q)
    assert dq[0, 0, 1].abs() > dq[0, 0, 0].abs()
    torch.testing.assert_close(dq[0, 0, 0].item(), -72.0 * math.exp(-72.0), rtol=1e-3, atol=0.0)
