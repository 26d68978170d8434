"""The torch backend: PyTorch's fused attention where it is right, and the dense reference where it is not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from andrea_triton import Score, attention, cpu
from andrea_triton.problem import Problem, make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, assert_accurate, check, make_inputs

F32, F64 = torch.float32, torch.float64
INF = float("inf")
SETTINGS = ("causal", "window", "q_start", "scale", "softcap", "dropout_p")


def problem_of(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Problem:
    spec = make_spec(**{name: keywords.pop(name) for name in SETTINGS if name in keywords})
    return make_problem(q, k, v, spec, **keywords)


def qkv(M: int = 9, N: int = 12, D: int = 16, HKV: int = 2, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 2, M, D).to(dtype), *(torch.randn(2, HKV, N, D).to(dtype) for _ in range(2))


def visible(M: int, N: int, left: int | None, right: int | None, q_start: int) -> Tensor:
    q_pos, k_pos = q_start + torch.arange(M)[:, None], torch.arange(N)
    low = torch.ones(M, N, dtype=torch.bool) if left is None else k_pos >= q_pos - left
    return low if right is None else low & (k_pos <= q_pos + right)


FUSED: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "q_start": 0},
    {"window": (3, 1)},
    {"scale": 0.3},
    {"bias": torch.randn(9, 12)},
    {"keep": torch.arange(108).view(9, 12) % 3 != 0},
    {"causal": True, "bias": torch.randn(2, 1, 1, 12), "keep": torch.arange(12) != 4},
]
DENSE: list[dict[str, Any]] = [
    {"scale": 0.0},
    {"scale": -1.0},
    {"softcap": 1.0},
    {"dropout_p": 0.1, "seed": 1},
    {"alibi": torch.ones(2)},
    {"sinks": torch.ones(2)},
    {"key_lengths": torch.tensor([3, 12])},
    {"score": Score(None, torch_fn=lambda s, *_: s)},
    {"bias": torch.zeros(9, 12, requires_grad=True)},
    {"bias": torch.full((12,), torch.finfo(F32).min)},
    {"bias": torch.full((12,), float("nan"))},
]


@pytest.mark.parametrize("keywords", FUSED, ids=lambda x: " ".join(x) or "plain")
def test_taken_where_pytorch_says_the_same(keywords: dict[str, Any]) -> None:
    """Its results and gradients are PyTorch's own, to the bit."""
    q, k, v = qkv()
    problem = problem_of(q, k, v, **keywords)
    assert cpu.fused(problem, q, k)
    out, lse = cpu.forward(problem, q, k, v)
    mask = torch.where(visible(9, 12, *problem.band(), problem.q_start), 0.0, -INF)[None, None]
    if "keep" in keywords:
        mask = mask.masked_fill(~keywords["keep"], -INF)
    mask = mask + keywords.get("bias", 0.0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = scaled_dot_product_attention(*leaves, mask, scale=problem.scale)
    if keywords.keys() & {"bias", "keep"}:
        assert torch.equal(out, wanted)
    torch.testing.assert_close(out, wanted)
    far = reference(problem_of(*(x.double() for x in (q, k, v)), **wide(keywords)), *(x.double() for x in (q, k, v)))
    near = reference(problem, q, k, v)
    for got, eager, exact, name in zip((out, lse), near, far, ("out", "lse"), strict=True):
        assert_accurate(got, eager, exact, F32, name)
    dout = torch.randn_like(out)
    grads = cpu.backward(problem, q, k, v, out, lse, dout)
    for got, grad in zip(grads, torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(got, grad)


def wide(keywords: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in keywords.items()}


@pytest.mark.parametrize("keywords", DENSE, ids=lambda x: " ".join(x))
def test_not_taken_where_it_says_something_else(keywords: dict[str, Any]) -> None:
    q, k, v = qkv()
    problem = problem_of(q, k, v, **keywords)
    assert not cpu.fused(problem, q, k)
    for got, wanted in zip(cpu.forward(problem, q, k, v), reference(problem, q, k, v), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_not_taken_for_shapes_it_has_no_word_for() -> None:
    q, k, _ = qkv()
    assert not cpu.fused(problem_of(q, k, torch.randn(2, 2, 12, 24)), q, k)
    for M, N in ((0, 4), (4, 0)):
        q, k, v = qkv(M, N)
        assert not cpu.fused(problem_of(q, k, v), q, k)


@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_not_taken_for_numbers_that_it_spreads(poison: float) -> None:
    q, k, v = qkv(12)
    for dirty in (q, k):
        clean, dirty[0, 0, 11, 3] = dirty[0, 0, 11, 3].clone(), poison
        problem = problem_of(q, k, v, causal=True)
        assert not cpu.fused(problem, q, k)
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


def test_a_bias_near_the_end_of_the_range_goes_the_dense_way() -> None:
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
    for shape in ((12,), (9, 1), (2, 1, 1, 12), (1, 2, 9, 12), (1, 1, 1, 1)):
        mask, is_causal = cpu.mask_of(problem_of(q, k, v, bias=torch.randn(shape)))
        assert mask is not None and mask.shape[-2:] == (9, 12) and not is_causal
        assert mask.shape[:2] == (1,) * max(0, 4 - len(shape)) + shape[:-2][-2:] if len(shape) > 2 else (1, 1)
    assert cpu.mask_of(problem_of(q, k, v)) == (None, False)
    assert cpu.mask_of(problem_of(q, k, v, causal=True, q_start=0)) == (None, True)


def test_unexpanded_undoes_expand() -> None:
    x = torch.randn(1, 3, 1, 5)
    assert cpu.unexpanded(x.expand(2, 3, 4, 5)).shape == (1, 3, 1, 5)
    assert cpu.unexpanded(x.expand(2, 3, 4, 5)).data_ptr() == x.data_ptr()
    assert cpu.unexpanded(x) is not None and torch.equal(cpu.unexpanded(x), x)
