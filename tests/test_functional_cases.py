"""Inputs that broke other attention kernels, through the public functions; the tests carry their ids. What is only a shape is in
the catalogue of testing/cases.py, which test_functional.py walks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import KVCache, ShapeError, UnsupportedError, attention, decode_attention, varlen_attention
from andrea_triton.testing import Case, Inputs, assert_accurate, attend_reference, cast, check, guard_band, make_inputs, run
from tests.backends import BACKENDS, KERNELS, here, room_for

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def leaves(*shape: int, dtype: torch.dtype = F32, count: int = 3) -> list[Tensor]:
    return [randn(*shape, dtype=dtype).requires_grad_() for _ in range(count)]


def by(backend: str, **more: Any) -> Any:
    """(out, lse) of dense Inputs by a backend."""
    return lambda x: attention(x.q, x.k, x.v, **x.settings, **x.extras, **more, return_lse=True, backend=backend)


def call(q: Tensor, k: Tensor, v: Tensor, with_lse: bool = True, **keywords: Any) -> Inputs:
    """Inputs of tensors that are given."""
    names = ("causal", "window", "q_start", "scale", "softcap", "dropout_p")
    settings = {name: keywords.pop(name) for name in names if name in keywords}
    dout = randn(*q.shape[:-1], v.shape[-1]).to(q.dtype)
    dlse = randn(*q.shape[:-1]).to(F64 if q.dtype == F64 else F32) if with_lse else None
    return Inputs(q, k, v, dout, dlse, settings, keywords)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that has its own way to the result."""
    return str(request.param)


@pytest.mark.parametrize("rows", [8, 4])
@pytest.mark.parametrize("form", ["mask", "bias"])
def test_c01_rows_without_keys(backend: str, form: str, rows: int) -> None:
    q, k, v = leaves(1, 1, 8, 8)
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[:4, :4] = True
    hide = {"mask": keep} if form == "mask" else {"bias": torch.zeros(8, 8).masked_fill(~keep, -INF).requires_grad_()}
    out, lse = attention(q, k, v, return_lse=True, backend=backend, **hide)
    assert (out[:, :, 4:] == 0).all() and (lse[:, :, 4:] == -INF).all() and lse[:, :, :4].isfinite().all()
    learned = (q, k, v, *(x for x in hide.values() if x.requires_grad))
    for grad in torch.autograd.grad(out[:, :, :rows].sum() + lse[:, :, :rows].sum(), learned):
        assert grad.isfinite().all() and (grad[..., 4:, :] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("N", [3, 32, 128])
def test_c02_a_row_of_lowest_floats_is_a_constant_row(backend: str, N: int, dtype: torch.dtype) -> None:
    q, k, v = leaves(1, 1, N, 4, dtype=dtype)
    bias = torch.zeros(N, N, dtype=dtype)
    bias[0] = torch.finfo(dtype).min
    out, lse = attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    assert lse[0, 0, 0] == torch.finfo(dtype).min
    loss = torch.autograd.grad(out[0, 0, 0].sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mean = wide[2][0, 0].mean(0)
    dv = torch.full((1, 1, N, 4), 1 / N, dtype=F64)
    gain = (wide[2][0, 0].sum(-1) - wide[2][0, 0].sum(-1).mean()).detach() / N / 2
    dq, dk = gain @ wide[1][0, 0].detach(), gain[:, None] * wide[0][0, 0, 0].detach()
    unit = torch.finfo(dtype).eps
    assert (out[0, 0, 0] - mean).abs().max() <= 4 * unit
    assert (loss[2] - dv).abs().max() <= unit
    assert (loss[0][0, 0, 0] - dq).abs().max() <= 4 * unit and (loss[1][0, 0] - dk).abs().max() <= 4 * unit


def test_c07_one_key_gives_its_value_and_no_gradient(backend: str) -> None:
    q, k, v = ((randn(1, 1, 1, 16, dtype=F16) * 3).requires_grad_() for _ in range(3))
    out = attention(q, k, v, backend=backend)
    assert torch.equal(out, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (dq == 0).all() and (dk == 0).all() and (dv == 1).all()


def test_c08_huge_equal_values(backend: str) -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=BF16).requires_grad_()
    out = attention(x, x, x, backend=backend)
    assert (out == 133120).all()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_c09_only_the_last_keys_are_left(backend: str) -> None:
    ones = torch.ones(1, 1, 640, 4)
    bias = torch.full((640,), -INF)
    bias[-10:] = 0.0
    out = attention(ones[:, :, :64], ones, ones, bias=bias, backend=backend)
    assert_accurate(out, out.round(), torch.ones(1, 1, 64, 4), F32, "mean of ones")


def test_c10_the_backward_of_full_attention(backend: str) -> None:
    check(make_inputs(Case("C10", HQ=2, M=128, D=64), F16), by(backend), "C10")


def test_c13_fp32_is_not_tf32(backend: str) -> None:
    q, k = (randn(1, 2, 128, 64) * 0.2 + 0.4 for _ in range(2))
    inputs = call(q, k, randn(1, 2, 128, 64))
    got, exact = check(inputs, by(backend), "C13"), run(cast(inputs, F64), attend_reference)
    for x, y in zip(got[:5], exact[:5], strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.parametrize("form", ["transposed", "expanded"])
def test_c14_any_strides_of_the_output_gradient(backend: str, form: str) -> None:
    q, k, v = leaves(2, 3, 20, 16)
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    dout = randn(2, 20, 3, 16).transpose(1, 2) if form == "transposed" else torch.ones(1).expand(2, 3, 20, 16)
    dlse = randn(20, 3, 2).permute(2, 1, 0)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    wanted = torch.autograd.grad((out, lse), (q, k, v), (dout.contiguous(), dlse.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_c15_huge_strides(backend: str, dim: int) -> None:
    """More than 2^31 elements apart, in memory that is never touched between them."""
    far = 2**31 + 64
    strides = [far if i == dim else stride for i, stride in enumerate((64, 32, 16, 1))]
    inputs = make_inputs(Case("C15", B=2, HQ=2, M=2, D=16, causal=True), F16)
    wanted = run(inputs, by(backend))
    with room_for(far * 2 / 2**30):
        view = torch.empty(far + 128, dtype=F16).as_strided((2, 2, 2, 16), strides)
        for name in ("q", "k", "v", "dout"):
            got = check(inputs._replace(**{name: view.copy_(getattr(inputs, name))}), by(backend), name)
            if backend == "interpreter":
                assert all(a is b or torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), name
        del view


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_c15_a_cache_with_huge_strides(backend: str, dim: int) -> None:
    cache, far = KVCache(2, 2, 3, 16, dtype=F16, device=here()), 2**31 + 64
    cache.append(randn(2, 2, 3, 16, dtype=F16), randn(2, 2, 3, 16, dtype=F16))
    q = randn(2, 4, 1, 16, dtype=F16)
    wanted = decode_attention(q, cache, backend=backend)
    strides = [far if i == dim else stride for i, stride in enumerate((128, 64, 16, 1))]
    with room_for(2 * 3 * far * 2 / 2**30):
        cache._k, cache._v = (
            torch.empty(3 * far + 256, dtype=F16).as_strided((2, 2, 4, 16), strides).copy_(t) for t in (cache._k, cache._v)
        )
        assert torch.equal(decode_attention(q, cache, backend=backend), wanted)
        del cache


def test_c15_a_bias_whose_columns_lie_far_apart(backend: str) -> None:
    """It starts 2^31 elements into the buffer, so that an offset of 32 bits reads a wrong number there and not beyond it."""
    inputs = make_inputs(Case("C15", HQ=1, M=2, N=600, D=16, bias=(2, 600)), F16)
    with room_for((2**31 + 600 * 2**22) * 2 / 2**30):
        buffer = torch.empty(2**31 + 600 * 2**22, dtype=F16)
        bias = buffer.as_strided((2, 600), (1, 2**22), 2**31).copy_(inputs.extras["bias"])
        got, wanted = run(inputs._replace(extras={"bias": bias}), by(backend)), run(inputs, by(backend))
        del buffer, bias
    assert all(a is b or torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_c16_expanded_heads(backend: str) -> None:
    base_k, base_v = (randn(1, 1, 33, 64, dtype=BF16).requires_grad_() for _ in range(2))
    q, mask = randn(1, 4, 33, 64, dtype=BF16).requires_grad_(), torch.rand(33, 33) > 0.3
    out = attention(q, base_k.expand(1, 4, 33, 64), base_v.expand(1, 4, 33, 64), mask=mask, backend=backend)
    k, v = (x.detach().expand(1, 4, 33, 64).contiguous().requires_grad_() for x in (base_k, base_v))
    compact, dout = attention(q, k, v, mask=mask, backend=backend), randn(1, 4, 33, 64, dtype=BF16)
    assert torch.equal(out, compact)
    got = torch.autograd.grad(out, (q, base_k, base_v), dout)
    wanted = torch.autograd.grad(compact, (q, k, v), dout)
    assert torch.equal(got[0], wanted[0])
    assert all(torch.equal(a, b.sum(1, keepdim=True)) for a, b in zip(got[1:], wanted[1:], strict=True))


def test_c17_odd_strides_of_size_one(backend: str) -> None:
    x = randn(1, 12, 1, 64)
    odd = x.as_strided((1, 12, 1, 64), (7, 64, 5, 1))
    assert torch.equal(attention(odd, odd, odd, causal=True, backend=backend), x)


def test_c18_a_bias_of_distances(backend: str) -> None:
    at = torch.arange(33.0)
    inputs = call(*(randn(1, 2, 33, 16, dtype=BF16) for _ in range(3)), bias=(at[:, None] - at).to(BF16))
    check(inputs, by(backend), "C18")


@pytest.mark.parametrize("scale", [0.0, -0.35])
def test_c28_scale_zero_is_the_running_mean(backend: str, scale: float) -> None:
    inputs = call(*(randn(1, 1, 20, 8) for _ in range(3)), causal=True, scale=scale)
    got = check(inputs, by(backend), "C28")
    if scale == 0.0:
        exact = inputs.v.double().cumsum(2) / torch.arange(1, 21).view(20, 1)
        assert_accurate(got.out, inputs.v.cumsum(2) / torch.arange(1, 21).view(20, 1), exact, F32, "mean")


def test_c30_sinks_of_an_empty_row(backend: str) -> None:
    keep = torch.ones(20, 20, dtype=torch.bool)
    keep[2] = False
    sinks = randn(8)
    inputs = call(*(randn(1, 8, 20, 16) for _ in range(3)), sinks=sinks, mask=keep)
    ones = inputs._replace(dout=torch.ones_like(inputs.dout), dlse=torch.ones_like(inputs.dlse))
    got = check(ones, by(backend), "C30")
    assert_accurate(got.lse[0, :, 2], sinks, sinks.double(), F32, "lse of the empty row")
    assert (got.out[0, :, 2] == 0).all()


@pytest.mark.parametrize("D", [8, 72, 80, 96, 104])
def test_c35_head_dims(backend: str, D: int) -> None:
    inputs = make_inputs(Case(f"C35 {D}", HQ=1, M=20, D=D, causal=True, layout="guarded"), F32)
    first = check(inputs, by(backend), f"D = {D}")
    again = run(inputs, by(backend))
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_c38_sequences_longer_than_the_keys() -> None:
    x, starts = randn(11, 2, 8), torch.tensor([0, 5, 12])
    with pytest.raises(ShapeError, match="cu_seqlens_q ends at 12; wanted at most 11, the rows of q; clip the lengths"):
        varlen_attention(x, x, x, starts, starts, 7, 7)
    for bad, message in (([1, 5], "starts at 1; wanted 0"), ([0, 6, 5], "decreases from 6 to 5"), ([0, 9], "sequence of 9 rows")):
        starts = torch.tensor(bad)
        with pytest.raises(ShapeError, match=message):
            varlen_attention(x, x, x, starts, starts, 7, 7)
    with pytest.raises(UnsupportedError, match="packed sequences have no"):
        varlen_attention(x, x, x, starts[:1] * 0, starts[:1] * 0, 7, 7, mask=torch.ones(7, 7, dtype=torch.bool))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_c39_ones_stay_ones_when_precise(dtype: torch.dtype, backend: str) -> None:
    """T = 1024, peaked rows with two equal maxima; without precise the weights' rounding shows."""
    q, k = (randn(1, 1, 1024, 16, dtype=dtype) * 3 for _ in range(2))
    k[:, :, 1::2] = k[:, :, ::2]
    v = torch.ones(1, 1, 1024, 16, dtype=dtype)
    assert (attention(q, k, v, causal=True, precise=True, backend=backend) == 1).all()


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("precise", [True, False])
def test_c39_errors_of_peaked_rows_are_unbiased(precise: bool, backend: str) -> None:
    q, k = (randn(1, 2, 256, 32, dtype=BF16) * 1.5 for _ in range(2))
    k[:, :, 1::2] = k[:, :, ::2]
    inputs = call(q, k, randn(1, 2, 256, 32, dtype=BF16).abs() + 1, with_lse=False, causal=True)
    got = run(inputs, by(backend, precise=precise)).out.double()
    error = (got / run(cast(inputs, F64), attend_reference).out - 1)[:, :, 16:]
    rows = error.mean(-1)
    assert rows.mean().abs() <= 4 * rows.std() / rows.numel() ** 0.5


@pytest.mark.parametrize("form", ["63 of 64", "every other"])
def test_c42_slices_of_wider_tensors(backend: str, form: str) -> None:
    wide = [guard_band(randn(1, 2, 33, 64, dtype=BF16)) for _ in range(3)]
    inputs = call(*(x[..., :63] if form == "63 of 64" else x[..., ::2] for x in wide), causal=True)
    check(inputs, by(backend), form)
