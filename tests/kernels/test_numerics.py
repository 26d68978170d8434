"""Constants, the matrix product and tanh."""

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from andrea_triton.kernels.numerics import FP32, FP64, LN2, LOG2E, lowest, product, tanh
from andrea_triton.testing import assert_accurate

Interpreted = Callable[..., None]


@triton.jit
def store_lowest(out, ACC: tl.constexpr):
    tl.store(out, tl.full([1], lowest(ACC), ACC) + tl.zeros([1], ACC))


@triton.jit
def store_product(x, y, acc, out, ROWS: tl.constexpr, INNER: tl.constexpr, COLS: tl.constexpr):
    r, i, c = tl.arange(0, ROWS), tl.arange(0, INNER), tl.arange(0, COLS)
    x_tile = tl.load(x + r[:, None] * INNER + i[None, :])
    y_tile = tl.load(y + i[:, None] * COLS + c[None, :])
    at = r[:, None] * COLS + c[None, :]
    tl.store(out + at, product(x_tile, y_tile, tl.load(acc + at), "ieee"))


@triton.jit
def store_tanh(x, out, FAST: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tanh(tl.load(x + at), FAST))


def test_constants() -> None:
    assert (LOG2E.value, LN2.value) == (math.log2(math.e), math.log(2))


@pytest.mark.parametrize(("acc", "dtype"), [(FP32, torch.float32), (FP64, torch.float64)])
def test_the_lowest_pivot_is_the_lowest_finite_number(
    acc: tl.dtype, dtype: torch.dtype, interpreted: Interpreted
) -> None:
    out = torch.zeros(1, dtype=dtype)
    interpreted(store_lowest, out[0:], ACC=acc)
    assert out.item() == torch.finfo(dtype).min


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_product_sums_in_the_accumulator(dtype: torch.dtype, interpreted: Interpreted) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, y, acc = torch.randn(16, 32).to(dtype), torch.randn(32, 64).to(dtype), torch.randn(16, 64, dtype=wide)
    out = torch.empty(16, 64, dtype=wide)
    interpreted(store_product, x, y, acc, out, ROWS=16, INNER=32, COLS=64)
    exact, eager = acc.double() + x.double() @ y.double(), acc + x.to(wide) @ y.to(wide)
    assert_accurate(out, eager, exact, wide, "product")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fast", [True, False])
def test_tanh_is_within_one_unit_of_the_type(fast: bool, dtype: torch.dtype, interpreted: Interpreted) -> None:
    x = torch.cat([torch.linspace(-12, 12, 2041), torch.tensor([0.0, 1e-30, 1e4, -1e4, 3e38, -3e38, 0.4999])])
    x = x.to(dtype)
    out = torch.empty_like(x)
    interpreted(store_tanh, x, out, FAST=fast, SIZE=2048)
    assert (out.double() - x.double().tanh()).abs().max() <= torch.finfo(dtype).eps
    assert torch.equal(out[x.abs() > 100], x[x.abs() > 100].sign())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_near_zero_is_relatively_accurate(dtype: torch.dtype, interpreted: Interpreted) -> None:
    x = torch.logspace(-12, -0.31, 256, dtype=torch.float64).to(dtype)
    out = torch.empty_like(x)
    interpreted(store_tanh, x, out, FAST=False, SIZE=256)
    exact = (x.double().tanh() / x.double()).clamp(max=1.0)
    error = (out.double() / x.double() - exact).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps
