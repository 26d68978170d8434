"""The torch backend: PyTorch's fused attention where it is right, and blocks of rows where it is not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import Score, attention, cpu
from andrea_triton.cpu import fused
from andrea_triton.problem import Problem
from andrea_triton.reference import reference
from andrea_triton.testing import CASES, Case, Results, assert_accurate, attend_reference, cast, check, make_inputs, run
from tests.cpu_problems import problem_of, qkv, visible

F32, F64 = torch.float32, torch.float64
INF = float("inf")


FUSED: list[dict[str, Any]] = [
    {},
    {"causal": True, "q_start": 0},
    {"window": 40},
    {"scale": 0.3},
    {"bias": torch.randn(9, 12)},
    {"bias": torch.randn(9, 1)},
    {"keep": torch.arange(108).view(9, 12) % 3 != 0},
    {"causal": True, "q_start": 0, "bias": torch.randn(2, 1, 1, 12), "keep": torch.arange(12) != 0},
]
BY_BLOCKS: list[dict[str, Any]] = [
    {"causal": True},
    {"window": (3, 1)},
    {"scale": 0.0},
    {"scale": -1.0},
    {"softcap": 1.0},
    {"dropout_p": 0.1, "seed": 1},
    {"alibi": torch.ones(2)},
    {"sinks": torch.ones(2)},
    {"key_lengths": torch.tensor([3, 12])},
    {"score": Score(None, torch_fn=lambda s, *_: s * 2)},
    {"bias": torch.full((12,), torch.finfo(F32).min)},
]


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keywords", FUSED, ids=lambda x: " ".join(x) or "plain")
def test_taken_where_pytorch_says_the_same(keywords: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    problem = problem_of(q, k, v, **keywords)
    assert fused.fused(problem, q, k)
    judge_forward(problem, q, k, v, keywords)


@pytest.mark.parametrize("keywords", BY_BLOCKS, ids=lambda x: " ".join(x))
def test_not_taken_where_it_says_something_else(keywords: dict[str, Any]) -> None:
    q, k, v = qkv()
    problem = problem_of(q, k, v, **keywords)
    assert not fused.fused(problem, q, k)
    judge_forward(problem, q, k, v, keywords)


def judge_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> None:
    far = reference(problem_of(*(x.double() for x in (q, k, v)), **wide(keywords)), *(x.double() for x in (q, k, v)))
    near = reference(problem, q, k, v)
    for got, eager, exact, name in zip(cpu.forward(problem, q, k, v), near, far, ("out", "lse"), strict=True):
        assert_accurate(got, eager, exact, got.dtype, name)


def judge_backward(x: Any, name: str) -> None:
    """PyTorch's fused backward against the rule, and rows that see one key or none exactly."""
    problem = problem_of(x.q, x.k, x.v, **x.settings, **x.extras)
    out, lse = fused.forward(problem, x.q, x.k, x.v)
    exact, eager = run(cast(x, F64), attend_reference), run(x, attend_reference)
    for field, got in zip(("dq", "dk", "dv"), fused.backward(problem, x.q, x.k, x.v, out, lse, x.dout), strict=True):
        assert_accurate(got, getattr(eager, field), getattr(exact, field), F32, f"{name}: {field}")


@pytest.mark.parametrize("hidden", [None, 0.995], ids=["plain", "masked"])
def test_the_fused_backward_is_right_where_rows_see_one_key_or_none(hidden: float | None) -> None:
    x = make_inputs(Case("fused", HQ=4, HKV=2, M=256, D=64, causal=True, hidden=hidden), F32)._replace(dlse=None)
    judge_backward(x, "fused")
    problem = problem_of(x.q, x.k, x.v, **x.settings, **x.extras)
    out, lse = fused.forward(problem, x.q, x.k, x.v)
    dq, *_ = fused.backward(problem, x.q, x.k, x.v, out, lse, x.dout)
    seen = visible(256, 256, None, 0, 0) & (x.extras["mask"] if hidden else torch.tensor(True))
    assert (dq[(seen.sum(-1) <= 1).expand(1, 4, 256)] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("M", "D", "gain"), [(256, 64, 1.0), (256, 64, 1.6), (384, 64, 1.3), (512, 64, 1.6)])
def test_the_fused_backward_keeps_the_rule_up_to_its_bound(M: int, D: int, gain: float) -> None:
    """Many draws, the largest lse of some just below the bound."""
    taken = 0
    for seed in range(40):
        x = make_inputs(Case("near", HQ=2, M=M, D=D, causal=True, gain=gain), F32, seed=seed)._replace(dlse=None)
        problem = problem_of(x.q, x.k, x.v, causal=True)
        if fused.near(problem, fused.forward(problem, x.q, x.k, x.v)[1]):
            judge_backward(x, f"draw {seed}")
            taken += 1
    assert taken > 5


def test_the_fused_backward_is_taken_for_large_plain_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Problem] = []
    backward = fused.backward
    monkeypatch.setattr(fused, "backward", lambda problem, *rest: (calls.append(problem), backward(problem, *rest))[1])
    for M, gain, taken in ((256, 1.0, 1), (256, 8.0, 0), (128, 1.0, 0)):
        q, k, v = ((torch.randn(1, 1, M, 64) * g).requires_grad_() for g in (gain, gain, 1.0))
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        torch.autograd.grad(lse.sum(), (q, k))
        assert len(calls) == taken, (M, gain)
        calls.clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("case", [case for case in CASES if case.lengths_q is None], ids=lambda c: c.name)
def test_gradients_of_out_alone_and_of_lse_alone(case: Case, dtype: torch.dtype) -> None:
    """What PyTorch's own fused backward misses: peaked rows, where exp(s - lse) has lost its digits, and rows of one key. The
    draws are judged as one, for among a few numbers eager may be exact by luck."""
    for name in ("out", "lse"):
        results: list[tuple[Results, Results, Results]] = []
        for seed in (0, 1, 2):
            x = make_inputs(case, dtype, seed=seed)
            x = x._replace(dlse=None) if name == "out" else x._replace(dout=torch.zeros_like(x.dout))
            if dtype == F64:
                check(x, by_torch, f"{case.name}, {name}")
            else:
                results.append((run(x, by_torch), run(x, attend_reference), run(cast(x, F64), attend_reference)))
        for field in Results._fields if results else ():
            got, eager, exact = ([getattr(draw[i], field) for draw in results] for i in range(3))
            if got[0] is not None:
                together = (torch.stack(x) for x in (got, eager, exact))
                assert_accurate(*together, got[0].dtype, f"{case.name}, {name}: {field}")


def by_torch(x: Any) -> Any:
    return attention(x.q, x.k, x.v, **x.settings, **x.extras, return_lse=True, backend="torch")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda x: str(x)[6:])
def test_lse_of_sixteen_bits_has_the_digits_of_fp32(dtype: torch.dtype) -> None:
    q, k, v = torch.zeros(1, 1, 3, 8, dtype=dtype), torch.randn(1, 1, 8, 8).to(dtype), torch.randn(1, 1, 8, 8).to(dtype)
    _, lse = attention(q, k, v, return_lse=True, backend="torch")
    assert (lse - math.log(8)).abs().max() <= 2 * torch.finfo(F32).eps * math.log(8)


def test_a_query_of_one_key_has_exactly_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(12, 12))
    dq, _, dv = torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), torch.ones(2, 2, 12, 16))
    assert (dq[:, :, 0] == 0).all() and (dv[:, :, 0] > 1).all()


@pytest.mark.parametrize("more", [{}, {"softcap": 3.0}, {"sinks": torch.zeros(4)}, {"window": 5}], ids=str)
@pytest.mark.parametrize("order", ["heads", "rows"])
def test_results_take_the_memory_order_of_the_inputs(order: str, more: dict[str, Any]) -> None:
    def leaf(heads: int) -> Tensor:
        rows = torch.randn(2, 20, heads, 16).transpose(1, 2)
        return (rows if order == "rows" else rows.contiguous()).requires_grad_()

    q, k, v = leaf(4), leaf(2), leaf(2)
    out = attention(q, k, v, **more)
    for result, like in zip((out, *torch.autograd.grad(out.sum(), (q, k, v))), (q, q, k, v), strict=True):
        assert result.stride() == like.stride()


def wide(keywords: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in keywords.items()}


def test_not_taken_for_shapes_it_has_no_word_for() -> None:
    q, k, _ = qkv()
    assert not fused.fused(problem_of(q, k, torch.randn(2, 2, 12, 24)), q, k)
    for M, N in ((0, 4), (4, 0)):
        q, k, v = qkv(M, N)
        assert not fused.fused(problem_of(q, k, v), q, k)


@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_not_taken_for_numbers_that_it_spreads(poison: float) -> None:
    q, k, v = qkv(12)
    for dirty in (q, k):
        clean, dirty[0, 0, 11, 3] = dirty[0, 0, 11, 3].clone(), poison
        problem = problem_of(q, k, v, causal=True)
        assert not fused.fused(problem, q, k)
        out, lse = cpu.forward(problem, q, k, v)
        assert out[:, :, :11].isfinite().all() and lse[:, :, :11].isfinite().all()
        dirty[0, 0, 11, 3] = clean


def test_rows_without_keys_have_lse_minus_infinity_and_no_gradient() -> None:
    """PyTorch says 0 there."""
    q, k, v = (x.requires_grad_() for x in qkv(12, 9))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend="torch")
    assert (lse[:, :, :3] == -INF).all() and (out[:, :, :3] == 0).all() and lse[:, :, 3:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq[:, :, :3] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


def test_a_bias_near_the_end_of_the_range_goes_by_blocks() -> None:
    """PyTorch's gradients of a row of lowest floats are N times too large."""
    q, k, v = (x.requires_grad_() for x in qkv(12, 12))
    bias = torch.zeros(12, 12)
    bias[0] = torch.finfo(F32).min
    out = attention(q, k, v, bias=bias, backend="torch")
    (dv,) = torch.autograd.grad(out[:, :, 0].sum(), v)
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 12))


@pytest.mark.parametrize("form", ["features", "all"])
def test_tensors_without_unit_stride(form: str) -> None:
    """PyTorch's fused attention takes the last stride for 1, of the output's gradient too."""
    case = Case("strided", M=20, D=16, causal=True)
    inputs = make_inputs(case, torch.bfloat16)._replace(dlse=None)
    spread = [torch.stack([x, x * 3], -1)[..., 0] if form == "features" else x.mT.contiguous().mT for x in inputs[:4]]
    moved = inputs._replace(q=spread[0], k=spread[1], v=spread[2], dout=spread[3])

    def attend(x: Any) -> Any:
        return attention(x.q, x.k, x.v, **x.settings, return_lse=True, backend="torch")

    first, second = check(inputs, attend, form), check(moved, attend, form)
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_transposed_bias() -> None:
    q, k, v = qkv()
    bias = torch.randn(12, 9).T
    assert torch.equal(attention(q, k, v, bias=bias), attention(q, k, v, bias=bias.contiguous()))


def test_a_loss_of_sums_sends_an_expanded_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    got = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    ones = torch.ones(2, 2, 9, 16)
    wanted = torch.autograd.grad(attention(q, k, v), (q, k, v), ones)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_masks_keep_the_shape_that_broadcasting_leaves() -> None:
    q, k, v = qkv()
    for shape in ((1, 1, 1, 12), (1, 1, 9, 1), (2, 1, 1, 12), (1, 2, 9, 12), (1, 1, 1, 1)):
        mask = fused.mask_of(problem_of(q, k, v, bias=torch.randn(shape)))
        assert mask is not None and mask.shape == shape
    assert fused.mask_of(problem_of(q, k, v)) is None
    assert fused.causal(problem_of(q, k, v, causal=True, q_start=0)) is True
    assert fused.causal(problem_of(q, k, v, window=12)) is False and fused.causal(problem_of(q, k, v, window=3)) is None
