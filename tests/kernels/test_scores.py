"""Logits from scaled products and the way back, against the formula and autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_triton.kernels.scores import Terms, cap_slope, logits, read_matrix, score_grad
from andrea_triton.kernels.views import Seq
from andrea_triton.launch.plan import matrix
from andrea_triton.testing import assert_accurate

Interpreted = Callable[..., None]
M, N, Q_START, H, B = 5, 12, 3, 2, 2
ROWS, COLS = 8, 16


@triton.jit
def far(score, b, h, q_pos, k_pos, table, factor):
    return score * factor + tl.load(table + q_pos) - tl.load(table + k_pos) + b * 10 + h


@triton.jit
def bent(score, b, h, q_pos, k_pos):
    return score * score


@triton.jit
def bent_grad(score, b, h, q_pos, k_pos):
    return 2 * score


@triton.jit
def infinite_grad(score, b, h, q_pos, k_pos):
    return score / 0.0


@triton.jit
def same_document(b, h, q_pos, k_pos, documents):
    return tl.load(documents + q_pos) == tl.load(documents + k_pos)


@triton.jit
def store_logits(s, out, capped_out, terms, b, h, M, N, q_start, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    q_pos, k_pos = q_start + tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    seq = Seq(M, N, q_start, b, 0, 0, 0)
    bias = None if terms.bias is None else read_matrix(terms.bias, b, h, q_pos, k_pos, seq)
    keep = None if terms.keep is None else read_matrix(terms.keep, b, h, q_pos, k_pos, seq)
    x, capped = logits(tl.load(s + at), bias, keep, b, h, q_pos, k_pos, 0, seq, terms, "fraction")
    tl.store(out + at, x + tl.zeros([ROWS, COLS], tl.float32))
    tl.store(capped_out + at, capped)


@triton.jit
def store_grad(ds, capped, out, terms, M, N, EXACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    q_pos, k_pos = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    seq = Seq(M, N, 0, 0, 0, 0, 0)
    d, x = tl.load(ds + at), tl.load(capped + at)
    if terms.cap is not None:
        d *= cap_slope(x, terms, EXACT)
    tl.store(out + at, score_grad(d, x, 0, 0, q_pos, k_pos, seq, terms))


def run(terms: Terms, s: Tensor, interpreted: Interpreted, b: int = 1, h: int = 1) -> tuple[Tensor, Tensor]:
    """(logits, capped) of the rows and keys that exist."""
    out, capped = torch.empty_like(s), torch.empty_like(s)
    interpreted(store_logits, s, out, capped, terms, b, h, M, N, Q_START, ROWS=ROWS, COLS=COLS)
    return out[:M, :N], capped[:M, :N]


@pytest.fixture
def s() -> Tensor:
    return torch.randn(ROWS, COLS) * 2


def positions() -> tuple[Tensor, Tensor]:
    return Q_START + torch.arange(M)[:, None], torch.arange(N)[None, :]


def test_nothing_is_added_where_nothing_is_asked(s: Tensor, interpreted: Interpreted) -> None:
    out, capped = run(Terms(), s, interpreted)
    assert torch.equal(out, s[:M, :N]) and torch.equal(capped, s[:M, :N])


def test_softcap(s: Tensor, interpreted: Interpreted) -> None:
    out, capped = run(Terms(cap=1.5), s, interpreted)
    x = s[:M, :N]
    assert_accurate(out, 1.5 * torch.tanh(x / 1.5), 1.5 * torch.tanh(x.double() / 1.5), torch.float32, "capped")
    assert torch.equal(out, capped)


@pytest.mark.parametrize("slopes", [torch.rand(B, H), torch.rand(H).expand(B, H), torch.rand(B, 2 * H)[:, :H]])
def test_alibi_takes_the_slope_of_its_batch_and_head(slopes: Tensor, s: Tensor, interpreted: Interpreted) -> None:
    q_pos, k_pos = positions()
    out, _ = run(Terms(slopes=slopes, slopes_stride=slopes.stride(0)), s, interpreted, b=1, h=0)
    assert torch.equal(out, s[:M, :N] - slopes[1, 0] * (q_pos - k_pos).abs())


@pytest.mark.parametrize("shape", [(B, H, M, N), (1, 1, 1, N), (1, H, M, 1), (B, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_of_any_broadcast(shape: tuple[int, ...], dtype: torch.dtype, s: Tensor, interpreted: Interpreted) -> None:
    bias = torch.randn(shape).to(dtype).expand(B, H, M, N)
    out, _ = run(Terms(bias=matrix(bias)), s, interpreted)
    assert torch.equal(out, s[:M, :N] + bias[1, 1].float())


def test_keep_and_mask_hide(s: Tensor, interpreted: Interpreted) -> None:
    keep, documents = torch.rand(B, 1, M, N).expand(B, H, M, N) > 0.4, torch.arange(12, dtype=torch.int32) // 4
    q_pos, k_pos = positions()
    same = documents[q_pos] == documents[k_pos]
    out, _ = run(Terms(keep=matrix(keep.to(torch.uint8))), s, interpreted)
    assert torch.equal(out, s[:M, :N].masked_fill(~keep[1, 1], float("-inf")))
    out, _ = run(Terms(mask=same_document, mask_args=(documents,)), s, interpreted)
    assert torch.equal(out, s[:M, :N].masked_fill(~same, float("-inf")))


def test_the_order_of_the_terms(s: Tensor, interpreted: Interpreted) -> None:
    """Cap, the user's score, slopes, bias, masks."""
    slopes, table, bias = torch.rand(B, H), torch.randn(12), torch.randn(B, H, M, N)
    keep = torch.rand(B, H, M, N) > 0.4
    terms = Terms(3.0, far, None, (table, 0.5), slopes, H, matrix(bias), matrix(keep.to(torch.uint8)))
    out, capped = run(terms, s, interpreted)

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        (q_pos, k_pos), cap = positions(), 3.0 * torch.tanh(x / 3.0)
        scored = cap * 0.5 + table.to(x)[q_pos] - table.to(x)[k_pos] + 11
        full = scored - slopes[1, 1].to(x) * (q_pos - k_pos).abs() + bias[1, 1].to(x)
        return full.masked_fill(~keep[1, 1], float("-inf")), cap

    eager, exact = formula(s[:M, :N]), formula(s[:M, :N].double())
    assert_accurate(out, eager[0], exact[0], torch.float32, "logits")
    assert_accurate(capped, eager[1], exact[1], torch.float32, "capped")


def test_user_functions_get_positions_inside_the_sequence(s: Tensor, interpreted: Interpreted) -> None:
    """What lies beyond the tables is NaN, and so would be the logits."""
    buffer = torch.full((40,), float("nan"))
    table = buffer[14:26].copy_(torch.zeros(12))
    out, capped = torch.empty_like(s), torch.empty_like(s)
    terms: Any = Terms(score=far, score_args=(table, 1.0))
    interpreted(store_logits, s, out, capped, terms, 0, 0, M, N, Q_START, ROWS=ROWS, COLS=COLS)
    assert torch.equal(out, s)


@pytest.mark.parametrize(("cap", "exact"), [(None, True), (1.5, True), (1.5, False)])
@pytest.mark.parametrize("score", [None, bent])
def test_the_way_back_is_the_derivative(score: Any, cap: float | None, exact: bool, s: Tensor, interpreted: Interpreted) -> None:
    def chain(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        capped = x if cap is None else (cap if exact else 1.0) * torch.tanh(x / (cap or 1.0))
        (grad,) = torch.autograd.grad(capped if score is None else capped * capped, x, ds.to(x))
        return grad, capped.detach()

    ds, out = torch.randn(ROWS, COLS), torch.empty(ROWS, COLS)
    eager, wide = chain(s), chain(s.double())
    terms = Terms(cap=cap, score=score, score_grad=None if score is None else bent_grad)
    interpreted(store_grad, ds, eager[1], out, terms, ROWS, COLS, EXACT=exact, ROWS=ROWS, COLS=COLS)
    slope = 1.0 if exact or cap is None else 1 / cap  # of x / cap, which whoever multiplies by the scale knows of
    assert_accurate(out * slope, eager[0], wide[0], torch.float32, "grad")


@pytest.mark.parametrize(
    ("terms", "exact", "capped"),
    [(Terms(score=bent, score_grad=infinite_grad), True, float("nan")), (Terms(cap=1.0), True, float("nan")),
     (Terms(cap=1.0), False, float("nan")), (Terms(cap=1.0), False, float("-inf"))],
    ids=["score", "cap, exact", "cap", "cap, hidden"],
)  # fmt: skip
def test_where_a_key_is_hidden_nothing_flows(terms: Terms, exact: bool, capped: float, interpreted: Interpreted) -> None:
    ds, x, out = torch.zeros(ROWS, COLS), torch.full((ROWS, COLS), capped), torch.empty(ROWS, COLS)
    interpreted(store_grad, ds, x, out, terms, ROWS, COLS, EXACT=exact, ROWS=ROWS, COLS=COLS)
    assert (out == 0).all()
