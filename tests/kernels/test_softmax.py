"""The online softmax, tile by tile, against the softmax of the whole row."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_triton.kernels.numerics import FP32, FP64, LOG2E
from andrea_triton.kernels.softmax import State, add_sum, exponent, finish, start, step
from andrea_triton.testing import assert_accurate

Interpreted = Callable[..., None]
M, N, DV, BLOCK = 16, 96, 16, 32
INF = float("inf")


class Row(NamedTuple):
    out: Tensor
    row_max: Tensor
    row_sum: Tensor
    lse: Tensor


@triton.jit
def online(s, v, sinks, out, row_max_out, row_sum_out, lse_out, scale_log2, M: tl.constexpr, N: tl.constexpr,
           DV: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    m, d = tl.arange(0, M), tl.arange(0, DV)
    state = start(M, DV, ACC)
    for n in range(0, N, BLOCK):
        k = n + tl.arange(0, BLOCK)
        p, row_max, alpha = step(state, tl.load(s + m[:, None] * N + k[None, :]), scale_log2, EXACT)
        row_sum = add_sum(state.row_sum, alpha, p)
        v_tile = tl.load(v + k[:, None] * DV + d[None, :])
        state = State(state.acc * alpha[:, None] + tl.dot(p, v_tile, out_dtype=ACC), row_max, row_sum)
    sink = None if sinks is None else tl.load(sinks)
    result, row_max, row_sum, lse = finish(state, sink, EXACT)
    tl.store(out + m[:, None] * DV + d[None, :], result)
    tl.store(row_max_out + m, row_max)
    tl.store(row_sum_out + m, row_sum)
    tl.store(lse_out + m, lse)


@triton.jit
def store_exponent(s, pivot, out, scale_log2, SIZE: tl.constexpr, EXACT: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, exponent(tl.load(s + at), tl.load(pivot + at), scale_log2, EXACT))


def run(s: Tensor, v: Tensor, interpreted: Interpreted, sink: Tensor | None = None, exact: bool = True) -> Row:
    """exact: s are logits in natural units; otherwise bare products, whose scale is 0.3."""
    row = Row(torch.empty_like(s[:, :DV]), *(torch.empty_like(s[:, 0]) for _ in range(3)))
    acc = FP64 if s.dtype == torch.float64 else FP32
    scale_log2 = LOG2E.value * 0.3
    interpreted(online, s, v, sink, *row, scale_log2, M=M, N=N, DV=DV, BLOCK=BLOCK, ACC=acc, EXACT=exact)
    return row


def dense(s: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    column = torch.full_like(s[:, :1], -INF) if sink is None else sink.to(s).expand(len(s), 1)
    rows = torch.cat([s, column], 1)
    lse = torch.logsumexp(rows, 1)
    return torch.softmax(rows, 1).nan_to_num(0.0)[:, :-1] @ v, lse


@pytest.mark.parametrize("gain", [1.0, 30.0])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("sink", [None, -2.0, 40.0])
def test_equals_the_softmax_of_the_whole_row(sink: float | None, exact: bool, gain: float, interpreted: Interpreted) -> None:
    s, v = torch.randn(M, N) * gain, torch.randn(N, DV)
    weight = None if sink is None else torch.tensor([sink])
    row, x = run(s, v, interpreted, weight, exact), s if exact else s * 0.3
    eager, wanted = dense(x, v, weight), dense(s.double() if exact else s.double() * 0.3, v.double(), weight)
    assert_accurate(row.out, eager[0], wanted[0], torch.float32, "out")
    assert_accurate(row.lse, eager[1], wanted[1], torch.float32, "lse")
    unit = 1.0 if exact else LOG2E.value
    pivot = row.row_max.double() / unit
    assert_accurate(pivot + row.row_sum.double().log(), eager[1], wanted[1], torch.float32, "pivot and sum")


def test_fp64_stays_fp64(interpreted: Interpreted) -> None:
    s, v = torch.randn(M, N, dtype=torch.float64), torch.randn(N, DV, dtype=torch.float64)
    row, wanted = run(s, v, interpreted), dense(s, v)
    assert (row.out - wanted[0]).abs().max() < 2.0**-48
    assert (row.lse - wanted[1]).abs().max() < 2.0**-48


@pytest.mark.parametrize("exact", [True, False])
def test_rows_that_see_nothing(exact: bool, interpreted: Interpreted) -> None:
    s, v = torch.randn(M, N), torch.randn(N, DV)
    s[3], s[5, :64], s[7, 32:] = -INF, -INF, -INF
    row = run(s, v, interpreted, exact=exact)
    assert (row.out[3] == 0).all() and row.row_sum[3] == 0 and row.lse[3] == -INF
    assert row.row_max.isfinite().all()
    assert row.out.isfinite().all() and row.lse[[i for i in range(M) if i != 3]].isfinite().all()
    row = run(s, v, interpreted, torch.tensor([0.7]), exact)
    assert (row.out[3] == 0).all() and row.row_sum[3] == 1
    assert_accurate(row.lse[3], torch.tensor(0.7), torch.tensor(0.7).double(), torch.float32, "lse is the sink")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_lowest_floats_are_constant_rows(dtype: torch.dtype, interpreted: Interpreted) -> None:
    lowest = torch.finfo(dtype).min
    s, v = torch.randn(M, N, dtype=dtype), torch.randn(N, DV, dtype=dtype)
    s[0], s[1, 1:], s[2, :-1] = lowest, lowest, lowest
    row = run(s, v, interpreted)
    assert row.row_sum[0] == N and row.lse[0] == lowest
    mean = v.double().mean(0)
    assert_accurate(row.out[0], v.mean(0), mean, dtype, "mean")
    assert torch.equal(row.out[1], v[0]) and torch.equal(row.out[2], v[-1])


def test_one_visible_key_gives_its_value_exactly(interpreted: Interpreted) -> None:
    s, v = torch.full((M, N), -INF), torch.randn(N, DV)
    s[torch.arange(M), torch.arange(M) * 6] = torch.randn(M) * 50
    row = run(s, v, interpreted)
    assert torch.equal(row.out, v[torch.arange(M) * 6]) and (row.row_sum == 1).all()


@pytest.mark.parametrize("exact", [True, False])
def test_exponent(exact: bool, interpreted: Interpreted) -> None:
    s, pivot, out = torch.randn(64), torch.randn(64), torch.empty(64)
    interpreted(store_exponent, s, pivot, out, 0.25, SIZE=64, EXACT=exact)
    x, y = s.double(), pivot.double()
    wanted, eager = ((x - y) * LOG2E.value, (s - pivot) * LOG2E.value) if exact else (x * 0.25 - y, s * 0.25 - pivot)
    assert_accurate(out, eager, wanted, torch.float32, "exponent")


def test_exponent_subtracts_before_it_scales(interpreted: Interpreted) -> None:
    """At the end of the range a pivot times log2 e would be infinite."""
    s, out = torch.full((64,), torch.finfo(torch.float32).min), torch.empty(64)
    interpreted(store_exponent, s, s, out, LOG2E.value, SIZE=64, EXACT=True)
    assert (out == 0).all()
