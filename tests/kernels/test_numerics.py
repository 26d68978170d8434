"""Constants, the matrix product, tiles held in registers and tanh."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from andrea_triton.kernels.numerics import FP32, FP64, LN2, LOG2E, hold, lowest, near_tf32, product, tanh
from andrea_triton.testing import assert_accurate

Interpreted = Callable[..., None]


@triton.jit
def store_lowest(out, ACC: tl.constexpr):
    tl.store(out + tl.arange(0, 2), tl.full([2], lowest(ACC), ACC))


@triton.jit
def store_product(x, y, acc, out, ROWS: tl.constexpr, INNER: tl.constexpr, COLS: tl.constexpr,
                  PRECISION: tl.constexpr = "ieee", TURNED: tl.constexpr = False):  # fmt: skip
    r, i, c = tl.arange(0, ROWS), tl.arange(0, INNER), tl.arange(0, COLS)
    x_tile = tl.load(x + r[:, None] * INNER + i[None, :])
    y_tile = tl.load(y + i[:, None] * COLS + c[None, :])
    at = r[:, None] * COLS + c[None, :]
    tl.store(out + at, product(x_tile, y_tile, tl.load(acc + at), PRECISION, TURNED))


@triton.jit
def store_near(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, near_tf32(tl.load(x + at)))


@triton.jit
def store_tanh(x, out, unit, BY: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tanh(tl.load(x + at), unit, BY))


@triton.jit
def store_held(x, out, HELD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + at, hold(tl.load(x + at), HELD))


def test_constants() -> None:
    assert (LOG2E.value, LN2.value) == (math.log2(math.e), math.log(2))


@pytest.mark.parametrize(("acc", "dtype"), [(FP32, torch.float32), (FP64, torch.float64)])
def test_the_lowest_pivot_is_the_lowest_finite_number(acc: tl.dtype, dtype: torch.dtype, interpreted: Interpreted) -> None:
    out = torch.zeros(2, dtype=dtype)
    interpreted(store_lowest, out, ACC=acc)
    assert out.tolist() == [torch.finfo(dtype).min] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_product_sums_in_the_accumulator(dtype: torch.dtype, interpreted: Interpreted) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, y, acc = torch.randn(16, 32).to(dtype), torch.randn(32, 64).to(dtype), torch.randn(16, 64, dtype=wide)
    out = torch.empty(16, 64, dtype=wide)
    interpreted(store_product, x, y, acc, out, ROWS=16, INNER=32, COLS=64)
    exact, eager = acc.double() + x.double() @ y.double(), acc + x.to(wide) @ y.to(wide)
    assert_accurate(out, eager, exact, wide, "product")


@pytest.mark.parametrize("gain", [1.0, 1e-18, 1e17])
def test_three_products_are_as_good_as_one_in_fp32(gain: float, interpreted: Interpreted) -> None:
    x, y, acc = gain * torch.randn(16, 32), gain * torch.randn(32, 64), gain**2 * torch.randn(16, 64)
    out = torch.empty(16, 64)
    interpreted(store_product, x, y, acc, out, ROWS=16, INNER=32, COLS=64, PRECISION="tf32x3")
    assert_accurate(out, acc + x @ y, acc.double() + x.double() @ y.double(), torch.float32, "product")


def test_three_products_turned_have_the_same_bits(interpreted: Interpreted) -> None:
    x, y, acc = torch.randn(64, 64), torch.randn(64, 128), torch.zeros(64, 128)
    here, there, same = torch.empty(64, 128), torch.empty(128, 64), torch.empty(128, 64)
    sides = {"INNER": 64, "PRECISION": "tf32x3"}
    interpreted(store_product, x, y, acc, here, ROWS=64, COLS=128, **sides)
    turned = (y.mT.contiguous(), x.mT.contiguous(), acc.mT.contiguous())
    interpreted(store_product, *turned, same, ROWS=128, COLS=64, TURNED=True, **sides)
    interpreted(store_product, *turned, there, ROWS=128, COLS=64, **sides)
    assert torch.equal(here, same.mT) and not torch.equal(here, there.mT)


def test_numbers_of_eleven_bits(interpreted: Interpreted) -> None:
    x = torch.cat([torch.randn(57), torch.tensor([0.0, -0.0, 1.0, 1 + 2.0**-11, 1 + 2.0**-12, 1e-38, -3e38])])
    out = torch.empty_like(x)
    interpreted(store_near, x, out, SIZE=64)
    wide, exact = out.double(), x.double()
    unit = 2.0 ** (torch.frexp(exact)[1] - 11)
    assert torch.equal((wide / unit).round() * unit, wide) and ((wide - exact).abs() <= unit / 2).all()
    assert out[-4].item() == 1 + 2.0**-10 and out[-3].item() == 1.0  # halves go away from zero


def allowed(exact: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype) -> float:
    """Twice the error of fp32 torch, in the dtype's units, and one unit of 1."""
    eps = torch.finfo(dtype).eps
    return 2 * float((eager.double() - exact).abs().max()) * eps / torch.finfo(torch.float32).eps + eps


@pytest.mark.parametrize("cap", [1.0, 0.7, 30.0, 1e30])
@pytest.mark.parametrize(("by", "dtype"), [("fraction", torch.float32), ("fraction", torch.float64), ("exp2", torch.float32)])
def test_tanh_is_absolutely_accurate(by: str, dtype: torch.dtype, cap: float, interpreted: Interpreted) -> None:
    """By exp2 to the four units that its docstring names."""
    x = cap * torch.cat([torch.linspace(-12, 12, 2041), torch.tensor([0.0, 1e-30, 1e4, -1e4, 1e7, -1e7, 0.4999])])
    exact, eager, out = (x.double() / cap).tanh(), (x / cap).tanh(), torch.empty_like(x, dtype=dtype)
    unit = np.float64(1 / cap) if dtype == torch.float64 else 1 / cap
    interpreted(store_tanh, x.to(dtype), out, unit, BY=by, SIZE=2048)
    most = 4 * torch.finfo(dtype).eps if by == "exp2" else allowed(exact, eager, dtype)
    assert (out - exact).abs().max() <= most
    assert torch.equal(out[x.abs() > 100 * cap].float(), x[x.abs() > 100 * cap].sign())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_near_zero_is_relatively_accurate(dtype: torch.dtype, interpreted: Interpreted) -> None:
    x = torch.logspace(-12, -0.31, 256)
    exact, eager, out = x.double().tanh() / x, x.tanh() / x, torch.empty_like(x, dtype=dtype)
    interpreted(store_tanh, x.to(dtype), out, np.float64(1.0) if dtype == torch.float64 else 1.0, BY="fraction", SIZE=256)
    assert (out.double() / x - exact).abs().max() <= allowed(exact, eager, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("held", [True, False])
def test_a_held_tile_is_the_same_tile(held: bool, dtype: torch.dtype, interpreted: Interpreted) -> None:
    x = torch.randn(32, 16).to(dtype)
    x[0, :6] = torch.tensor([0.0, float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).tiny])
    out = torch.empty_like(x)
    interpreted(store_held, x, out, HELD=held, ROWS=32, COLS=16)
    assert torch.equal(out.nan_to_num(7.0), x.nan_to_num(7.0)) and out[0, 3].isnan()
