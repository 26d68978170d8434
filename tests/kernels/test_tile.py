"""Scores and weights of one tile."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_triton import dropout_mask
from andrea_triton.kernels.tile import drop, logits_tile, probs_tile
from andrea_triton.kernels.views import Seq
from andrea_triton.launch import plan
from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec
from andrea_triton.testing import assert_accurate

Interpreted = Callable[..., None]
M, N, D = 32, 16, 16


@triton.jit
def store_logits(x, y, out, capped_out, attention, q_start, end, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr,
                 CHECK: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    r, c, d = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, D)
    x_tile, y_tile = tl.load(x + r[:, None] * D + d[None, :]), tl.load(y + c[:, None] * D + d[None, :])
    seq = Seq(ROWS, end, q_start, 0, 0, 0, 0)
    if TRANSPOSED:
        seq = Seq(COLS, end, q_start, 0, 0, 0, 0)
        s, capped = logits_tile(x_tile, y_tile, q_start + c[None, :], r[:, None], q_start, 0, 1, seq, attention, CHECK)
    else:
        s, capped = logits_tile(x_tile, y_tile, q_start + r[:, None], c[None, :], 0, 0, 1, seq, attention, CHECK)
    tl.store(out + r[:, None] * COLS + c[None, :], s)
    tl.store(capped_out + r[:, None] * COLS + c[None, :], capped)


@triton.jit
def store_probs(s, pivot, norm, out, attention, ROWS: tl.constexpr, COLS: tl.constexpr):
    r, at = tl.arange(0, ROWS), tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    norms = None if norm is None else tl.load(norm + r)[:, None]
    tl.store(out + at, probs_tile(tl.load(s + at), tl.load(pivot + r)[:, None], norms, attention))


@triton.jit
def store_dropped(x, out, attention, q_start, ROWS: tl.constexpr, COLS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(out + r * COLS + c, drop(tl.load(x + r * COLS + c), q_start + r, c, 1, 0, attention))


def attention(dtype: torch.dtype, extras: dict[str, Any] | None = None, **settings: Any) -> Any:
    """What the plan says of a call of two heads."""
    q, k = torch.zeros(2, 2, M, D, dtype=dtype), torch.zeros(2, 2, N, D, dtype=dtype)
    return plan.attention(make_problem(q, k, k, make_spec(**settings), **(extras or {})), "ieee", "interpreter")


def logits(x: Tensor, y: Tensor, what: Any, interpreted: Interpreted, q_start: int, check: bool, transposed: bool,
           end: int = N) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty(len(x), len(y), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    capped, sides = torch.empty_like(out), {"ROWS": len(x), "COLS": len(y), "D": D}
    interpreted(store_logits, x, y, out, capped, what, q_start, end, **sides, CHECK=check, TRANSPOSED=transposed)
    return out, capped


@pytest.mark.parametrize("settings", [{}, {"scale": -0.3}, {"softcap": 2.0}, {"scale": 0.0}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_both_orientations_give_the_same_bits(dtype: torch.dtype, settings: dict[str, float], interpreted: Interpreted) -> None:
    """Forward and dq score q by k, dk and dv score k by q."""
    q, k, what = torch.randn(M, D).to(dtype), torch.randn(N, D).to(dtype), attention(dtype, causal=True, **settings)
    s, capped = logits(q, k, what, interpreted, -9, True, False)
    st, capped_t = logits(k, q, what, interpreted, -9, True, True)
    assert torch.equal(s, st.T) and torch.equal(capped, capped_t.T)


def test_plain_logits_are_left_to_the_exponent(interpreted: Interpreted) -> None:
    q, k, what = torch.randn(M, D).half(), torch.randn(N, D).half(), attention(torch.float16, scale=0.3)
    assert what.exact.value is False
    s, capped = logits(q, k, what, interpreted, 0, False, False)
    assert_accurate(s, q.float() @ k.float().T, q.double() @ k.double().T, torch.float32, "bare products")
    assert torch.equal(s, capped)


def test_exact_logits_are_scaled_and_capped(interpreted: Interpreted) -> None:
    q, k, what = torch.randn(M, D), torch.randn(N, D), attention(torch.float32, scale=0.3, softcap=2.0)
    s, capped = logits(q, k, what, interpreted, 0, False, False)
    exact, eager = 0.3 * q.double() @ k.double().T, 0.3 * (q @ k.T)
    assert_accurate(s, 2 * torch.tanh(eager / 2), 2 * torch.tanh(exact / 2), torch.float32, "logits")
    assert torch.equal(s, capped)


@pytest.mark.parametrize("end", [0, 5, N])
@pytest.mark.parametrize("q_start", [-20, -9, 0, 3])
def test_the_band_hides(q_start: int, end: int, interpreted: Interpreted) -> None:
    q, k, what = torch.randn(M, D), torch.randn(N, D), attention(torch.float32, causal=True, window=5, q_start=q_start)
    s, _ = logits(q, k, what, interpreted, q_start, True, False, end)
    q_pos, k_pos = q_start + torch.arange(M)[:, None], torch.arange(N)[None, :]
    seen = (k_pos <= q_pos) & (k_pos >= q_pos - 4) & (k_pos < end)
    assert torch.equal(s > float("-inf"), seen)


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}])
def test_a_poisoned_hidden_key_reaches_nobody(settings: dict[str, float], interpreted: Interpreted) -> None:
    q, k, what = torch.randn(M, D), torch.randn(N, D), attention(torch.float32, causal=True, **settings)
    k[5], k[6, 0] = float("nan"), float("inf")
    s, _ = logits(q, k, what, interpreted, 0, True, False)
    assert (s[:5, 5:7] == float("-inf")).all() and not s[:5].isnan().any()


@pytest.mark.parametrize("folded", [True, False])
def test_weights(folded: bool, interpreted: Interpreted) -> None:
    what, s = attention(torch.bfloat16, scale=0.5), torch.randn(M, N) * 3
    products = s.double() * 0.5
    lse = torch.logsumexp(products, 1)
    top = products.amax(1)
    pivot, norm = (lse, None) if folded else (top, torch.exp(top - lse).float())
    out = torch.empty(M, N)
    pivot = (pivot / np.log(2)).float()
    interpreted(store_probs, s, pivot, norm, out, what, ROWS=M, COLS=N)
    wide = torch.exp2(products / np.log(2) - pivot.double()[:, None]) * (1.0 if norm is None else norm.double()[:, None])
    eager = torch.exp2(s * (0.5 / np.log(2)) - pivot[:, None]) * (1.0 if norm is None else norm[:, None])
    assert_accurate(out, eager, wide, torch.float32, "weights")
    assert_accurate(out.double().sum(1), eager.double().sum(1), torch.ones(M), torch.float32, "sum")


def test_padding_rows_weigh_nothing(interpreted: Interpreted) -> None:
    pivot, norm, out = torch.full((M,), float("inf")), torch.zeros(M), torch.empty(M, N)
    for exact in ({}, {"softcap": 2.0}):
        interpreted(store_probs, torch.randn(M, N), pivot, norm, out, attention(torch.float32, **exact), ROWS=M, COLS=N)
        assert (out == 0).all()


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_drop(p: float, interpreted: Interpreted) -> None:
    x, out = torch.randn(M, N), torch.empty(M, N)
    what = attention(torch.float32, {"seed": 11} if p else None, dropout_p=p)
    interpreted(store_dropped, x, out, what, -4, ROWS=M, COLS=N)
    keep = dropout_mask(11, p, 2, 2, torch.arange(M) - 4, torch.arange(N), "cpu")[1, 0]
    assert torch.equal(out, torch.where(keep, x * torch.tensor(1 / (1 - p)), 0.0))
