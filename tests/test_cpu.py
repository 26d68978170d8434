"""The torch backend: PyTorch's fused attention where it is right, and the dense reference where it is not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from andrea_triton import Score, attention, cpu
from andrea_triton.problem import Problem, make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing import CASES, Case, assert_accurate, check, make_inputs

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
    """Its results are PyTorch's own, to the bit, and the gradients the same but for rounding."""
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
    grads = cpu.backward(problem, q, k, v, lse, dout, None)
    for got, grad in zip(grads, torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("case", [case for case in CASES if case.lengths_q is None], ids=lambda c: c.name)
def test_gradients_of_out_alone_and_of_lse_alone(case: Case, dtype: torch.dtype) -> None:
    """What PyTorch's own fused backward misses: peaked rows, where exp(s - lse) has lost its digits, and rows of one key."""
    for seed in (0, 1, 2):
        inputs = make_inputs(case, dtype, seed=seed)
        check(inputs._replace(dlse=None), by_torch, f"{case.name}, out")
        check(inputs._replace(dout=torch.zeros_like(inputs.dout)), by_torch, f"{case.name}, lse")


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


@pytest.mark.parametrize(
    "band", [{}, {"causal": True}, {"window": (40, 3)}, {"causal": True, "window": 9, "q_start": 100}], ids=str
)
def test_the_blocks_of_the_backward_hold_every_pair_once(band: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE", 20_000)
    q, k, v = torch.zeros(3, 4, 300, 8), torch.zeros(3, 2, 200, 8), torch.zeros(3, 2, 200, 8)
    problem, seen = problem_of(q, k, v, **band), torch.zeros(3, 2, 300, 200, dtype=torch.int)
    for block in cpu.blocks(problem):
        seen[block] += 1
        assert seen[block].numel() * 2 <= max(20_000, 2 * 128 * 200)
    assert seen.max() == 1 and (seen[:, :, visible(300, 200, *problem.band(), problem.q_start)] == 1).all()


def test_memory_of_the_backward_is_not_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of it has more elements than the inputs or one block."""
    q, k, v = (torch.randn(1, 2, 3000, 8) for _ in range(3))
    problem = problem_of(q, k, v, causal=True)
    out, lse = cpu.forward(problem, q, k, v)
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor))
            return result

    with Watch():
        cpu.backward(problem, q, k, v, lse, out, None)
    assert max(sizes) <= max(q.numel(), 2 * cpu.ROWS * 3000, cpu.TILE)


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
