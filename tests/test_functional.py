"""The contract, line by line, through the public functions, by every backend of this machine."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import andrea_triton
from andrea_triton import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    attention,
    attention_weights,
    causal_attention,
    explain,
    merge_attention,
    varlen_attention,
)
from andrea_triton.testing import (
    CASES,
    Case,
    Inputs,
    assert_accurate,
    attend_reference,
    cast,
    check,
    make_inputs,
    pairwise_cases,
    run,
)
from tests.backends import BACKENDS, HAS_TRITON, KERNELS, there

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")


def by(backend: str, **more: Any) -> Any:
    """(out, lse) of Inputs, dense or packed, by a backend."""

    def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
        settings = {**inputs.settings, **inputs.extras, **more, "return_lse": True, "backend": backend}
        function: Any = varlen_attention if "max_q" in settings else attention
        return function(inputs.q, inputs.k, inputs.v, **settings)

    return attend


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def qkv(T: int = 40, H: int = 2, D: int = 16, dtype: torch.dtype = F32, N: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return randn(1, H, T, D, dtype=dtype), *(randn(1, H, T if N is None else N, D, dtype=dtype) for _ in range(2))


HALF = ["C11 T=63 causal", "C12 4 heads on 2", "empty rows", "C34 D=8 DV=16", "C29 softcap"]
BRAINS = [
    *HALF, "C05 one query, top-left", "C28 negative scale", "C28 zero scale", "C28 peaked rows", "C35 D=1", "C35 D=59", "D=256",
    "(B, T, H, D) memory", "bool mask", "key lengths",
]  # fmt: skip


def catalogue() -> Iterator[Any]:
    """Every case by each backend in fp32, some in fp16. In bf16, every case on the CPU, and by the interpreter what is not in
    test_every_pair_of_features, which has bf16 beside every band, term, grouping and length: those cases are slow here."""
    for backend, case, dtype in itertools.product(BACKENDS, CASES, (F32, BF16, F16)):
        if dtype != F16 or case.name in HALF:
            more = (backend, dtype) == ("interpreter", BF16) and case.name not in BRAINS
            yield pytest.param(
                backend, case, dtype, id=f"{backend}-{case.name}-{str(dtype)[6:]}", marks=[pytest.mark.slow] * more
            )


@pytest.mark.parametrize(("backend", "case", "dtype"), list(catalogue()))
def test_catalogue(backend: str, case: Case, dtype: torch.dtype) -> None:
    check(make_inputs(case, dtype), by(backend), case.name)


@pytest.mark.parametrize(("case", "dtype"), list(pairwise_cases()), ids=lambda x: getattr(x, "name", str(x)[6:]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_of_features(backend: str, case: Case, dtype: torch.dtype) -> None:
    check(make_inputs(case, dtype), by(backend), case.name)


def home_shape(dtype: torch.dtype, heads: int = 12) -> Inputs:
    """T = 1024, 12 heads x 64, causal."""
    return make_inputs(Case("ANDREA-120M", HQ=heads, M=1024, D=64, causal=True), dtype)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "heads"), [(BF16, 1), *(pytest.param(dtype, 12, marks=pytest.mark.slow) for dtype in (F32, BF16))], ids=str
)
def test_home_shape_is_right(dtype: torch.dtype, heads: int, backend: str) -> None:
    check(home_shape(dtype, heads), by(backend), "home shape")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="the kernels are Triton's")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_home_shape_takes_under_ten_seconds(dtype: torch.dtype) -> None:
    """Forward and backward, on one core of a machine that does nothing else."""
    inputs, start = home_shape(dtype), time.process_time()
    run(inputs, by("interpreter"))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_example(backend: str) -> None:
    q, k = torch.tensor([[[[2.0**0.5, 0.0]]]]), torch.tensor([[[[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]])
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]]])
    assert [round(x, 3) for x in attention(q, k, v, backend=backend).flatten().tolist()] == [0.788, 0.212]
    assert [round(x, 3) for x in attention_weights(q, k).flatten().tolist()] == [0.665, 0.09, 0.245]


def test_weights_are_a_distribution_over_the_past() -> None:
    q, k, _ = qkv(9)
    weights = attention_weights(q, k, causal=True)
    assert (weights >= 0).all() and (weights.triu(1) == 0).all()
    assert_accurate(weights.sum(-1), torch.softmax(q @ k.mT, -1).sum(-1), torch.ones(1, 2, 9), F32, "row sums")


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("settings", [{}, {"softcap": 1.0}, {"window": 9}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c04_a_poisoned_future_key_reaches_nobody_before_it(backend: str, settings: dict[str, Any], poison: float) -> None:
    q, k, v = qkv(40)
    dirty = k.clone()
    dirty[:, :, 37] = poison
    clean, got = (attention(q, x, v, causal=True, return_lse=True, backend=backend, **settings) for x in (k, dirty))
    for a, b in zip(clean, got, strict=True):
        assert b[:, :, :37].isfinite().all()
        if backend in KERNELS:
            assert torch.equal(a[:, :, :37], b[:, :, :37])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("settings", [{}, {"softcap": 1.0}, {"alibi": torch.tensor([0.5, 0.1])}], ids=["plain", "C29", "alibi"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_changing_future_tokens_leaves_past_rows_bitwise_alone(
    backend: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    q, k, v = qkv(60, dtype=dtype)
    settings = there(settings)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 21:], v2[:, :, 21:] = k2[:, :, 21:] * 5 + 1, v2[:, :, 21:] - 100.0
    results = (attention(q, *x, causal=True, return_lse=True, backend=backend, **settings) for x in ((k, v), (k2, v2)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[:, :, :21], b[:, :, :21]) and not torch.equal(a, b)


@pytest.mark.parametrize("poison", [float("nan"), INF])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c03_a_poisoned_key_behind_a_mask(backend: str, poison: float) -> None:
    q, k, v = qkv(20, 1)
    keep = torch.ones(20, 20, dtype=torch.bool)
    keep[:, 1] = False
    dirty = k.clone()
    dirty[:, :, 1] = poison
    results = []
    for keys in (k, dirty):
        leaves = [x.clone().requires_grad_() for x in (q, keys, v)]
        out, lse = attention(*leaves, mask=keep, return_lse=True, backend=backend)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves[1:])))
    exact = {"rtol": 0, "atol": 0} if backend in KERNELS else {}  # the CPU backend takes another way for NaN
    for (a, b), seen in zip(zip(*results, strict=True), (True, True, False, True), strict=True):
        others = [0, *range(2, 20)]
        a, b = (a, b) if seen else (a[:, :, others], b[:, :, others])
        torch.testing.assert_close(a, b, **exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_poisoned_query_stays_in_its_row(backend: str) -> None:
    q, k, v = qkv(20)
    dirty = q.clone()
    dirty[:, :, 3] = float("nan")
    others = [i for i in range(20) if i != 3]
    clean, got = (attention(x, k, v, return_lse=True, backend=backend) for x in (q, dirty))
    for a, b in zip(clean, got, strict=True):
        assert b[:, :, others].isfinite().all() and b[:, :, 3].isnan().all()
        assert torch.equal(a[:, :, others], b[:, :, others]) or backend == "torch"


@pytest.mark.parametrize("features", [{}, {"sinks": True, "bias": (40, 40)}, {"dropout_p": 0.2, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c32_the_same_inputs_give_the_same_bits(backend: str, features: dict[str, Any]) -> None:
    inputs = make_inputs(Case("twice", HQ=2, HKV=1, M=40, D=16, causal=True, **features), BF16)
    first = run(inputs, by(backend))
    for _ in range(1 if backend == "interpreter" else 20):
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, run(inputs, by(backend)), strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_leaves_earlier_rows_bitwise_alone(backend: str, dtype: torch.dtype) -> None:
    """Right padding of a causal sequence, gradients too where the padding gets none."""
    q, k, v = (x.requires_grad_() for x in qkv(40, dtype=dtype))
    wide = [torch.cat([x.detach(), randn(1, 2, 9, 16, dtype=dtype)], 2).requires_grad_() for x in (q, k, v)]
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    out2, lse2 = attention(*wide, causal=True, return_lse=True, backend=backend)
    if backend == "torch":  # PyTorch's products on a CPU may round another length otherwise: as accurate, not the same bits
        inputs = Inputs(q.detach(), k.detach(), v.detach(), out.detach(), None, {"causal": True}, {})
        exact, eager = attend_reference(cast(inputs, F64)), attend_reference(inputs)
        for got, near, far, name in zip((out2, lse2), eager, exact, ("out", "lse"), strict=True):
            assert_accurate(got[:, :, :40].detach(), near, far, got.dtype, f"padded {name}")
    else:
        assert torch.equal(out, out2[:, :, :40]) and torch.equal(lse, lse2[:, :, :40])
    dout = randn(1, 2, 40, 16, dtype=dtype)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    padded = torch.autograd.grad(out2, wide, torch.cat([dout, torch.zeros(1, 2, 9, 16, dtype=dtype)], 2))
    assert all((b[:, :, 40:] == 0).all() for b in padded[1:])
    if backend in KERNELS:
        assert all(torch.equal(a, b[:, :, :40]) for a, b in zip(grads, padded, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_the_batch_permutes_the_bits(backend: str) -> None:
    inputs = make_inputs(Case("batch", B=3, HQ=2, M=33, D=16, causal=True), BF16)
    order = torch.tensor([2, 0, 1])
    shuffled = Inputs(*(x[order] for x in inputs[:5]), inputs.settings, {})
    for a, b in zip(run(inputs, by(backend)), run(shuffled, by(backend)), strict=True):
        assert a is b or torch.equal(a[order], b)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 0, 4, 8), (1, 2, 0, 8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c21_empty_sizes(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == (shape, shape[:3])
    assert [g.shape for g in torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))] == [shape] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_c21_no_keys(backend: str) -> None:
    q, k = torch.ones(1, 2, 3, 8, requires_grad=True), torch.ones(1, 2, 0, 8, requires_grad=True)
    out, lse = attention(q, k, k, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == -INF).all()
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert (dq == 0).all() and dk.shape == k.shape


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "interpreter"])
def test_c37_more_heads_than_a_grid_axis_holds(backend: str) -> None:
    q = randn(65537, 1, 1, 16, dtype=F16)
    assert torch.equal(attention(q, q, q, backend=backend), q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c24_lse_is_the_natural_logarithm_in_fp32(backend: str) -> None:
    for dtype in (F16, F32, F64):
        q, k, v = qkv(12, dtype=dtype)
        _, lse = attention(q, k, v, scale=0.3, return_lse=True, backend=backend)
        assert lse.dtype == (F64 if dtype == F64 else F32) and lse.shape == (1, 2, 12)
        exact, eager = ((0.3 * (a @ b.mT)).logsumexp(-1) for a, b in ((q.double(), k.double()), (q, k)))
        if dtype == F64:
            assert torch.allclose(lse, exact, rtol=1e-14, atol=0)
        else:
            assert_accurate(lse, eager, exact, F32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c23_a_loss_of_lse_alone(backend: str) -> None:
    inputs = make_inputs(Case("grouped", B=2, HQ=4, HKV=2, M=32, D=16), F32)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    _, lse = attention(*leaves, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(lse.mean(), leaves, allow_unused=True)
    assert dv is None or (dv == 0).all()
    zero = inputs._replace(dout=torch.zeros_like(inputs.dout), dlse=torch.full_like(inputs.dlse, 1 / 256))
    exact, eager = run(cast(zero, F64), attend_reference), run(zero, attend_reference)
    assert_accurate(dq, eager.dq, exact.dq, F32, "dq")
    assert_accurate(dk, eager.dk, exact.dk, F32, "dk")
    assert (dq != 0).any() and (dk != 0).any()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(2, 5, 8)}, ShapeError, r"q has shape \(2, 5, 8\); wanted \(B, H, T, D\); unsqueeze it"),
    ({"k": torch.zeros(1, 3, 5, 8)}, ShapeError, r"v has 2 heads; wanted 3, as k has"),
    ({"k": torch.zeros(1, 2, 5, 9)}, ShapeError, "k has head dim 9; wanted 8, as q has"),
    ({"v": torch.zeros(1, 2, 6, 8)}, ShapeError, "v has 6 rows; wanted 5, one per key"),
    ({"k": torch.zeros(1, 2, 5, 8).half()}, DTypeError, r"q is torch.float32, k is torch.float16, v is torch.float32"),
    ({"q": torch.zeros(1, 2, 5, 8).int()}, DTypeError, "q is torch.int32; wanted torch.float16 or"),
    ({"k": torch.zeros(1, 2, 5, 8, device="meta")}, DTypeError, "k is on meta; wanted cpu, as q"),
    ({"q": [[1.0]]}, DTypeError, "q is a list; wanted a torch.Tensor"),
    ({"scale": INF}, ShapeError, "scale is inf; wanted a finite float32 number"),
    ({"window": 0}, ShapeError, "window is 0; wanted at least 1 key"),
    ({"softcap": 0.0}, ShapeError, "softcap is 0.0; wanted a finite float32 number above 0"),
    ({"dropout_p": 1.0}, ShapeError, "dropout_p is 1.0; wanted 0 <= dropout_p < 1"),
    ({"bias": torch.zeros(4, 5)}, ShapeError, r"bias has shape \(4, 5\); wanted one that broadcasts"),
    ({"mask": torch.ones(5, 6, dtype=torch.bool)}, ShapeError, r"mask has shape \(5, 6\); wanted one that"),
    ({"mask": torch.zeros(5, 5)}, DTypeError, "mask is torch.float32; wanted torch.bool"),
    ({"alibi": torch.zeros(3)}, ShapeError, r"alibi has shape \(3,\); wanted \(2,\) or \(1, 2\)"),
    ({"alibi": torch.zeros(2, requires_grad=True)}, UnsupportedError, "slopes get no gradient"),
    ({"sinks": torch.zeros(3)}, ShapeError, r"sinks has shape \(3,\); wanted \(2,\), one per query head"),
    ({"key_lengths": torch.tensor([6])}, ShapeError, r"key_lengths\[0\] is 6; wanted 0 to 5"),
    ({"backend": "cuda"}, UnsupportedError, "'cuda': wanted one of triton, interpreter, torch, reference"),
    ({"backend": "triton"}, UnsupportedError, "cpu tensors is not supported by triton: .*backend='interpreter'"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD, ids=[f"{k.__name__} {m[:24]}" for _, k, m in BAD])
def test_bad_input_is_an_error_that_says_the_way_out(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = dict(zip("qkv", qkv(5, D=8), strict=True)) | change
    with pytest.raises(kind, match=message) as info:
        attention(**arguments)
    assert isinstance(info.value, andrea_triton.AndreaError)


def test_explain_names_the_backend_and_why() -> None:
    q, k, v = qkv(5)
    assert explain(q, k, v) == ("torch", explain(q, k, v).reason) and "cpu tensors" in explain(q, k, v).reason
    assert explain(q, k, v, backend="reference") == ("reference", "the call names it")


def test_causal_attention_is_attention_with_causal() -> None:
    q, k, v = qkv(20)
    settings: dict[str, Any] = {"window": 5, "softcap": 2.0, "return_lse": True, "return_stats": True}
    for a, b in zip(causal_attention(q, k, v, **settings), attention(q, k, v, causal=True, **settings), strict=True):
        assert torch.equal(a, b)


def test_merge_refuses_what_does_not_belong_together() -> None:
    out, lse = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5)
    with pytest.raises(ShapeError, match=r"out_a \(1, 2, 5, 8\), lse_a \(1, 2, 5\), out_b \(1, 2, 4, 8\)"):
        merge_attention(out, lse, out[:, :, :4], lse[:, :, :4])


def test_a_call_checked_before_is_checked_again_where_it_differs() -> None:
    """True, 1 and 1.0 are one key of a dictionary, and so are shapes of other layouts."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    wanted = attention(q, k, v, causal=True, q_start=1, window=1, scale=1)
    assert torch.equal(attention(q, k, v, causal=True, q_start=1, window=1, scale=1.0), wanted)
    for wrong in ({"causal": 1}, {"q_start": True}, {"q_start": 1.0}, {"window": True}, {"scale": True}, {"precise": 0}):
        with pytest.raises(DTypeError, match=next(iter(wrong))):
            attention(q, k, v, **{"causal": True, "q_start": 1, "window": 1, "scale": 1, **wrong})
    with pytest.raises(DTypeError, match="layout"):
        attention(q, k.to_sparse(), v, causal=True, q_start=1, window=1, scale=1)
    with pytest.raises(DTypeError, match=r"v is torch.float64"):
        attention(q, k, v.double(), causal=True, q_start=1, window=1, scale=1)
    with pytest.raises(DTypeError, match="scale is Tensor"):
        attention(q, k, v, scale=torch.ones(()))
    with pytest.raises(DTypeError, match="scale is ndarray"):
        attention(q, k, v, scale=np.ones(1))
    pair: list[int | None] = [1, 0]
    first, second = attention(q, k, v, window=(1, 0)), attention(q, k, v, window=pair)
    pair[0] = None
    assert torch.equal(first, second) and torch.equal(attention(q, k, v, window=pair), attention(q, k, v, causal=True))


def test_a_result_is_memory_of_its_own(backend: str) -> None:
    """Whatever the order of memory: what a Function returns as a view, autograd lets nobody change in place."""
    q = torch.randn(1, 5, 2, 8).requires_grad_().transpose(1, 2)
    out = attention(q, q, q, causal=True, backend=backend)
    wanted = 2 * out.detach()
    out *= 2
    assert torch.equal(out, wanted)
    assert out.transpose(1, 2).is_contiguous() or backend == "reference"
