"""The reference on the inputs that broke other attention kernels; the tests carry their ids."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.problem import Problem, make_problem
from andrea_triton.reference import reference, weights
from andrea_triton.spec import make_spec

INF = float("inf")
SETTINGS = ("causal", "window", "q_start", "scale", "softcap")


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def problem_of(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Problem:
    spec = make_spec(**{name: keywords.pop(name) for name in SETTINGS if name in keywords})
    return make_problem(q, k, v, spec, **keywords)


def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    return reference(problem_of(q, k, v, **keywords), q, k, v)


def gradients(x: tuple[Tensor, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of random sums of out and of the finite part of lse."""
    out, lse = x
    loss = (out * randn(*out.shape).to(out)).sum() + lse.masked_fill(lse.isinf(), 0.0).mul(1.5).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("rows", [8, 4])
@pytest.mark.parametrize("form", ["mask", "bias"])
def test_c01_rows_without_keys(form: str, rows: int) -> None:
    q, k, v = (randn(1, 1, 8, 8, dtype=torch.float32).requires_grad_() for _ in range(3))
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[:4, :4] = True
    hide = {"mask": keep} if form == "mask" else {"bias": torch.zeros(8, 8).masked_fill(~keep, -INF).requires_grad_()}
    out, lse = attend(q, k, v, **hide)
    assert (out[:, :, 4:] == 0).all()
    assert (lse[:, :, 4:] == -INF).all()
    assert lse[:, :, :4].isfinite().all()
    learned = (q, k, v, *(x for x in hide.values() if x.requires_grad))
    for grad in torch.autograd.grad(out[:, :, :rows].sum() + lse[:, :, :rows].sum(), learned):
        assert grad.isfinite().all()
        assert (grad[..., 4:, :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("N", [3, 32, 128, 1024])
def test_c02_a_row_of_lowest_floats_is_a_constant_row(N: int, dtype: torch.dtype) -> None:
    q, k, v = (randn(1, 1, N, 4, dtype=dtype).requires_grad_() for _ in range(3))
    bias = torch.zeros(N, N, dtype=dtype)
    bias[0] = torch.finfo(dtype).min
    out, lse = attend(q, k, v, bias=bias)
    tolerance = {"rtol": 0.0, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].double().mean(0).to(dtype), **tolerance)
    assert lse[0, 0, 0] == torch.finfo(dtype).min
    dq, dk, dv = torch.autograd.grad(out[0, 0, 0].sum(), (q, k, v))
    gain = (v[0, 0].double().sum(-1) - v[0, 0].double().sum(-1).mean()) / N / 2
    torch.testing.assert_close(dv, torch.full_like(v, 1 / N), **tolerance)
    torch.testing.assert_close(dq[0, 0, 0], (gain @ k[0, 0].double()).to(dtype), **tolerance)
    torch.testing.assert_close(dk[0, 0], gain[:, None].mul(q[0, 0, 0].double()).to(dtype), **tolerance)


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_c03_a_poisoned_key_behind_a_mask(poison: float, softcap: float | None) -> None:
    q, k, v = (randn(1, 1, 4, 8) for _ in range(3))
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[:, 1] = False
    dirty = k.clone()
    dirty[:, :, 1] = poison
    results = []
    for keys in (k, dirty):
        leaves = [x.clone().requires_grad_() for x in (q, keys, v)]
        out, lse = attend(*leaves, mask=keep, softcap=softcap)
        dk, dv = torch.autograd.grad(out.sum() + lse.sum(), leaves[1:])
        results.append((out, lse, dv, dk))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_c04_a_poisoned_future_key(poison: float) -> None:
    q, k, v = (randn(1, 1, 8, 8) for _ in range(3))
    dirty = k.clone()
    dirty[:, :, 7] = poison
    for clean, got in zip(attend(q, k, v, causal=True), attend(q, dirty, v, causal=True), strict=True):
        assert torch.equal(clean[:, :, :7], got[:, :, :7])


def test_a_poisoned_query_stays_in_its_row() -> None:
    q, k, v = (randn(1, 1, 8, 8) for _ in range(3))
    dirty = q.clone()
    dirty[:, :, 3] = float("nan")
    others = [0, 1, 2, 4, 5, 6, 7]
    for clean, got in zip(attend(q, k, v), attend(dirty, k, v), strict=True):
        assert torch.equal(clean[:, :, others], got[:, :, others])


@pytest.mark.parametrize("softcap", [None, 1.0])
def test_c29_changing_future_tokens_leaves_past_rows_bitwise_alone(softcap: float | None) -> None:
    q, k, v = (randn(1, 2, 16, 8, dtype=torch.float32) for _ in range(3))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 9:] += 100.0
    v2[:, :, 9:] -= 100.0
    for a, b in zip(attend(q, k, v, causal=True), attend(q, k2, v2, causal=True), strict=True):
        assert torch.equal(a[:, :, :9], b[:, :, :9])


def visible_keys(M: int, N: int, **keywords: Any) -> list[list[int]]:
    """The keys that each query sees."""
    q, k = torch.zeros(1, 1, M, 8), torch.zeros(1, 1, N, 8)
    matrix = weights(problem_of(q, k, k, **keywords), q, k)[0, 0]
    return [[j for j in range(N) if matrix[i, j] > 0] for i in range(M)]


def test_c05_one_query() -> None:
    assert visible_keys(1, 5, causal=True) == [[0, 1, 2, 3, 4]]
    assert visible_keys(1, 5, causal=True, q_start=0) == [[0]]


def test_c06_more_queries_than_keys() -> None:
    assert visible_keys(5, 2, causal=True) == [[], [], [], [0], [0, 1]]
    assert visible_keys(5, 2, causal=True, q_start=0) == [[0], [0, 1], [0, 1], [0, 1], [0, 1]]
    q, k = randn(1, 1, 5, 8), randn(1, 1, 2, 8)
    out, lse = attend(q, k, k, causal=True)
    assert (out[0, 0, :3] == 0).all()
    assert (lse[0, 0, :3] == -INF).all()
    torch.testing.assert_close(out[0, 0, 3], k[0, 0, 0])


def test_c09_only_the_last_keys_are_left() -> None:
    ones = torch.ones(1, 1, 640, 4)
    bias = torch.full((640,), -INF)
    bias[-10:] = 0.0
    out, _ = attend(ones, ones, ones, bias=bias)
    torch.testing.assert_close(out, ones)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 0, 4, 8), (1, 2, 0, 8)])
def test_c21_empty_sizes(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    out, lse = attend(q, k, v, causal=True)
    assert (out.shape, lse.shape) == (shape, shape[:3])
    assert [grad.shape for grad in gradients((out, lse), q, k, v)] == [shape] * 3


def test_c21_no_keys() -> None:
    q, k = torch.ones(1, 2, 3, 8, requires_grad=True), torch.ones(1, 2, 0, 8, requires_grad=True)
    out, lse = attend(q, k, k)
    assert torch.equal(out, torch.zeros(1, 2, 3, 8))
    assert (lse == -INF).all()
    dq, dk = gradients((out, lse), q, k)
    assert torch.equal(dq, torch.zeros(1, 2, 3, 8))
    assert dk.shape == k.shape


def test_c24_lse_is_the_natural_logarithm() -> None:
    q, k, v = (randn(2, 4, 6, 8) for _ in range(3))
    _, lse = attend(q, k, v, scale=0.3)
    scores = 0.3 * q @ k.transpose(-1, -2)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_c25_every_subset_of_gradients() -> None:
    tensors = dict(zip("qkv", (randn(1, 2, 4, 8) for _ in range(3)), strict=True)) | {"bias": randn(4, 4)}
    whole = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    attend(**whole)[0].square().sum().backward()
    for subset in itertools.product([False, True], repeat=4):
        leaves = {n: x.clone().requires_grad_(wants) for (n, x), wants in zip(tensors.items(), subset, strict=True)}
        if any(subset):
            attend(**leaves)[0].square().sum().backward()
        for name, leaf in leaves.items():
            assert leaf.grad is None if not leaf.requires_grad else torch.equal(leaf.grad, whole[name].grad)


@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (2, 1, 1, 6), (1, 3, 6, 6), (6, 6), (1, 3, 1, 1)])
def test_c26_bias_shapes(shape: tuple[int, ...]) -> None:
    q, k, v = (randn(2, 3, 6, 4) for _ in range(3))
    bias = randn(*shape).requires_grad_()
    full = bias.detach().expand(2, 3, 6, 6).clone().requires_grad_()
    got, wanted = attend(q, k, v, bias=bias), attend(q, k, v, bias=full)
    assert torch.equal(got[0], wanted[0])
    flow = [randn(2, 3, 6, 4), randn(2, 3, 6)]
    (dbias,), (dfull,) = torch.autograd.grad(got, [bias], flow), torch.autograd.grad(wanted, [full], flow)
    assert dbias.shape == shape
    torch.testing.assert_close(dbias, dfull.sum_to_size(shape))


def test_c27_the_scale_does_not_touch_the_bias() -> None:
    q, k, v, bias = *(randn(1, 1, 6, 4) for _ in range(3)), randn(6, 6)
    wanted = torch.softmax(0.3 * q @ k.transpose(-1, -2) + bias, -1) @ v
    torch.testing.assert_close(attend(q, k, v, scale=0.3, bias=bias)[0], wanted)


def test_c28_scales() -> None:
    q, k, v = (randn(1, 1, 6, 4) for _ in range(3))
    running_mean = v.cumsum(2) / torch.arange(1, 7).view(6, 1)
    torch.testing.assert_close(attend(q, k, v, scale=0.0, causal=True)[0], running_mean)
    wanted = torch.softmax(-0.35 * q @ k.transpose(-1, -2), -1) @ v
    torch.testing.assert_close(attend(q, k, v, scale=-0.35)[0], wanted)
    wanted = torch.softmax(30 * q @ (30 * k).transpose(-1, -2) / 2, -1) @ v
    torch.testing.assert_close(attend(30 * q, 30 * k, v)[0], wanted)


def test_c30_sinks() -> None:
    q, k, v = (randn(1, 2, 5, 4) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2] = False
    sinks = randn(2).requires_grad_()
    out, lse = attend(q, k, v, mask=keep, sinks=sinks)
    assert torch.equal(lse[0, :, 2], sinks)
    assert (out[0, :, 2] == 0).all()
    (got,) = torch.autograd.grad(out.sum() + lse.sum(), [sinks])
    column = sinks.detach().clone().requires_grad_()
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~keep, -INF)
    rows = torch.cat([scores, column.view(1, 2, 1, 1).expand(1, 2, 5, 1)], -1)
    loss = (torch.softmax(rows, -1)[..., :5] @ v).sum() + torch.logsumexp(rows, -1).sum()
    torch.testing.assert_close(got, torch.autograd.grad(loss, [column])[0])


def test_c31_a_window_of_four_holds_the_query_itself() -> None:
    assert visible_keys(8, 8, causal=True, window=4)[7] == [4, 5, 6, 7]
    assert visible_keys(8, 8, window=2)[3] == [2, 3, 4]


def test_c44_one_visible_key() -> None:
    q, k, v = (randn(1, 1, 4, 8).requires_grad_() for _ in range(3))
    out, _ = attend(q, k, v, causal=True)
    dq, dk, _ = torch.autograd.grad((out[:, :, 0] * randn(8)).sum(), (q, k, v))
    assert torch.equal(out[:, :, 0], v[:, :, 0])
    assert (dq == 0).all()
    assert (dk == 0).all()
