"""Tensors and a spec to a Problem: its fields, its band, and every refusal with its message."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from andrea_triton.errors import AndreaError, DTypeError, ShapeError, UnsupportedError
from andrea_triton.problem import Problem, make_problem, unexpanded
from andrea_triton.spec import AttentionSpec, Mask, Score, make_spec

FULL = AttentionSpec()
DROP = AttentionSpec(dropout_p=0.5)


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def dense(M: int = 5, N: int = 7, HQ: int = 4, HKV: int = 2, spec: AttentionSpec = FULL, **extras: Any) -> Problem:
    return make_problem(t(2, HQ, M, 8), t(2, HKV, N, 8), t(2, HKV, N, 6), spec, **extras)


def packed(q_starts: Any = (0, 3, 5), k_starts: Any = (0, 4, 7), spec: AttentionSpec = FULL, **changes: Any) -> Problem:
    """Two sequences, of 3 and 2 queries, and 4 and 3 keys."""
    starts = {"cu_seqlens_q": torch.tensor(q_starts), "cu_seqlens_k": torch.tensor(k_starts), "max_q": 3, "max_k": 4}
    return make_problem(t(5, 4, 8), t(7, 2, 8), t(7, 2, 6), spec, **{**starts, **changes})


def test_dense_fields() -> None:
    p = dense()
    assert (p.B, p.HQ, p.HKV, p.M, p.N, p.D, p.DV, p.max_q, p.max_k) == (2, 4, 2, 5, 7, 8, 6, 0, 0)
    assert (p.dtype, p.device, p.group, p.packed) == (torch.float32, torch.device("cpu"), 2, False)
    assert all(extra is None for extra in p.extras)


def test_packed_fields() -> None:
    p = packed()
    assert (p.B, p.HQ, p.HKV, p.M, p.N, p.D, p.DV, p.max_q, p.max_k) == (2, 4, 2, 5, 7, 8, 6, 3, 4)
    assert (p.packed, p.extras.cu_seqlens_q.dtype) == (True, torch.int32)


def test_scale_and_q_start_resolve() -> None:
    assert (dense().scale, dense().q_start) == (1 / 8**0.5, 2)
    given_both = dense(spec=AttentionSpec(scale=-0.5, q_start=-3))
    assert (given_both.scale, given_both.q_start) == (-0.5, -3)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 0, 4, 8), (1, 2, 0, 8)])
def test_c21_empty_sizes_are_problems(shape: tuple[int, ...]) -> None:
    p = make_problem(t(*shape), t(*shape), t(*shape), FULL)
    assert (p.B, p.HQ, p.M, p.group) == (shape[0], shape[1], shape[2], 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [(1, 256), (256, 1)])
def test_float_dtypes_and_head_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    k = t(1, 2, 3, dims[0], dtype=dtype)
    assert make_problem(k, k, t(1, 2, 3, dims[1], dtype=dtype), FULL).dtype == dtype


def seen(p: Problem, left: int | None, right: int | None) -> list[list[bool]]:
    """Who sees whom under a band, by its definition."""
    return [
        [(left is None or j >= q - left) and (right is None or j <= q + right) for j in range(p.N)]
        for q in range(p.q_start, p.q_start + p.M)
    ]


@given(
    M=st.integers(0, 6),
    N=st.integers(0, 6),
    left=st.none() | st.integers(0, 9),
    right=st.none() | st.integers(0, 9),
    q_start=st.none() | st.integers(-9, 9),
)
def test_band_is_no_larger_than_hides_nothing(M: int, N: int, left: int | None, right: int | None, q_start: int | None) -> None:
    p = dense(M, N, spec=AttentionSpec(left, right, q_start))
    assert seen(p, *p.band()) == seen(p, left, right)
    if M and N:
        assert [side is None for side in p.band()] == [left is None, right is None]
        assert all(side is None or 0 <= side < max(M + N, 1) + abs(q_start or 0) for side in p.band())


@given(left=st.integers(0, 6), right=st.integers(0, 6), q_start=st.none() | st.integers(-4, 4))
def test_band_of_packed_sequences_hides_what_each_alone_hides(left: int, right: int, q_start: int | None) -> None:
    spec = AttentionSpec(left, right, q_start)
    band = packed(spec=spec).band()
    for M, N in ((3, 4), (2, 3)):
        alone = dense(M, N, spec=spec)
        assert seen(alone, *band) == seen(alone, left, right)


@pytest.mark.parametrize("q_start", [None, 2**28, -(2**28)])
def test_band_fits_in_32_bits(q_start: int | None) -> None:
    long = make_problem(*[t(1, 1, 2**28, 1, device="meta")] * 3, AttentionSpec(10**30, 10**30, q_start))
    assert all(side is None or side < 2**30 for side in long.band())


def test_extras_are_views_of_what_the_caller_gave() -> None:
    bias, mask, slopes = t(1, 4, 1, 7), t(5, 7, dtype=torch.bool), t(4)
    extras = dense(bias=bias, mask=mask, alibi=slopes).extras
    assert (extras.bias.shape, extras.bias.stride()) == ((2, 4, 5, 7), (0, 7, 0, 1))
    assert (extras.keep.shape, extras.keep.stride()) == ((2, 4, 5, 7), (0, 0, 7, 1))
    assert (extras.slopes.shape, extras.slopes.stride()) == ((2, 4), (0, 1))
    for view, own in ((extras.bias, bias), (extras.keep, mask), (extras.slopes, slopes)):
        assert view.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1), (5, 7), (4, 1, 1), (1, 1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7)])
def test_c26_every_shape_that_broadcasts(shape: tuple[int, ...]) -> None:
    assert dense(bias=t(*shape)).extras.bias.shape == (2, 4, 5, 7)
    assert dense(keep=t(*shape, dtype=torch.bool)).extras.keep.shape == (2, 4, 5, 7)


def test_bias_keeps_its_gradient() -> None:
    bias = t(1, 4, 1, 7).requires_grad_()
    dense(bias=bias).extras.bias.sum().backward()
    assert torch.equal(bias.grad, torch.full((1, 4, 1, 7), 10.0))


def test_bias_and_sinks_may_be_wider_than_half_precision() -> None:
    q = t(2, 4, 5, 8, dtype=torch.bfloat16)
    extras = make_problem(q, q, q, FULL, bias=t(5, 5), sinks=t(4, dtype=torch.float64)).extras
    assert (extras.bias.dtype, extras.sinks.dtype) == (torch.float32, torch.float64)


def test_integers_become_int32() -> None:
    assert dense(key_lengths=torch.tensor([0, 7])).extras.key_lengths.dtype == torch.int32
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    assert packed(cu_seqlens_q=starts).extras.cu_seqlens_q is starts


def test_functors_pass_through() -> None:
    score, mask = Score(None, args=(t(3), 2.0)), Mask(None)
    extras = packed(score=score, mask=mask).extras
    assert extras.score is score
    assert extras.mask is mask


@pytest.mark.parametrize("seed", [0, -(2**63), 2**64 - 1, torch.tensor(5), torch.tensor([5])])
def test_seeds(seed: int | Tensor) -> None:
    kept = dense(spec=DROP, seed=seed).extras.seed
    assert kept is seed or (kept == seed - 2**64 and seed >= 2**63)  # the same 64 bits, in the range of an int64
    assert dense(seed=seed).extras.seed is None


def test_zero_length_sequences_and_slack() -> None:
    assert packed(q_starts=(0, 0, 2), k_starts=(0, 4, 4)).B == 2
    assert packed(q_starts=(0,), k_starts=(0,)).B == 0


def test_contents_are_not_read_where_there_are_none() -> None:
    q = t(2, 4, 5, 8, device="meta")
    lengths = t(2, dtype=torch.int32, device="meta")
    assert make_problem(q, q, q, FULL, key_lengths=lengths, validate=True).B == 2


def test_traces_once_for_all_lengths() -> None:
    graphs = []

    def remember(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=remember, dynamic=True)
    def scaled(q: Tensor, bias: Tensor, lengths: Tensor) -> Tensor:
        p = make_problem(q, q, q, make_spec(causal=True, window=8), bias=bias, key_lengths=lengths)
        assert p.extras.bias is not None
        return q.sum() * p.scale + p.extras.bias.sum() + p.N

    for T in (20, 33, 65):
        got = scaled(torch.ones(2, 4, T, 16), torch.ones(T, T), torch.ones(2, dtype=torch.int32))
        assert got.item() == 2 * 4 * T * 16 / 4 + 2 * 4 * T * T + T
    assert len(graphs) == 1


Q, K, V = t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 6)
REFUSED_QKV: list[tuple[type[AndreaError], tuple[Any, Any, Any], list[str]]] = [
    (DTypeError, ([1.0], K, V), ["q is a list", "torch.Tensor", "torch.as_tensor(q)"]),
    (DTypeError, (Q, K.numpy(), V), ["k is a ndarray", "torch.Tensor", "torch.as_tensor(k)"]),
    (DTypeError, (Q, K, None), ["v is a NoneType", "torch.Tensor", "torch.as_tensor(v)"]),
    (DTypeError, (Q.int(), K.int(), V.int()), ["q is torch.int32", "torch.float16", ".to(dtype)"]),
    (DTypeError, (Q.bool(), K, V), ["q is torch.bool", "torch.float32", ".to(dtype)"]),
    (DTypeError, (Q, K.to_sparse(), V), ["k has layout torch.sparse_coo", "torch.strided", "k.to_dense()"]),
    (DTypeError, (Q, K.to("meta"), V), ["k is on meta", "cpu", "k.to(q.device)"]),
    (DTypeError, (Q, K, V.to("meta")), ["v is on meta", "cpu", "v.to(q.device)"]),
    (ShapeError, (Q[0], K, V), ["q has shape (4, 5, 8)", "(B, H, T, D)", "varlen_attention"]),
    (ShapeError, (Q, K[None], V), ["k has shape (1, 2, 2, 7, 8)", "(B, H, T, D)", "unsqueeze"]),
    (ShapeError, (Q, K[:1], V), ["q, k, v have batch 2, 1, 2", "one batch", "expand"]),
    (ShapeError, (Q, K, V[:1]), ["q, k, v have batch 2, 2, 1", "one batch", "expand"]),
    (ShapeError, (Q, K, V[:, :, :6]), ["v has 6 rows", "wanted 7", "slice k and v"]),
    (ShapeError, (Q, K, V[:, :1]), ["v has 1 heads", "wanted 2", "repeat or slice"]),
    (ShapeError, (t(2, 8, 5, 8), t(2, 6, 7, 8), t(2, 6, 7, 8)), ["k has 6 heads; q has 8", "multiple of 6", "repeat"]),
    (ShapeError, (Q, K[:, :0], V[:, :0]), ["k has 0 heads; q has 4", "multiple of 0", "repeat"]),
    (ShapeError, (Q, t(2, 2, 7, 9), V), ["k has head dim 9", "wanted 8", "pad"]),
    (
        ShapeError,
        (t(1, 1, 2**28 + 1, 1, device="meta"),) * 3,
        ["q has 268435457 rows", "at most 2**28", "merge_attention"],
    ),
]
REFUSED_EXTRAS: list[tuple[type[AndreaError], dict[str, Any], list[str]]] = [
    (DTypeError, {"bias": t(5, 7, dtype=torch.bool)}, ["bias is torch.bool", "wanted torch.float32", "mask="]),
    (DTypeError, {"bias": t(5, 7, dtype=torch.float16)}, ["bias is torch.float16", "torch.float32", "cast it"]),
    (DTypeError, {"bias": 1.0}, ["bias is a float", "torch.Tensor", "torch.as_tensor(bias)"]),
    (DTypeError, {"bias": t(5, 7, device="meta")}, ["bias is on meta", "cpu", "bias.to(q.device)"]),
    (ShapeError, {"bias": t(5, 6)}, ["bias has shape (5, 6)", "(2, 4, 5, 7)", "slice"]),
    (ShapeError, {"bias": t(1, 2, 4, 5, 7)}, ["bias has shape (1, 2, 4, 5, 7)", "(2, 4, 5, 7)", "slice"]),
    (DTypeError, {"mask": t(5, 7)}, ["mask is torch.float32", "wanted torch.bool", "mask != 0", "bias="]),
    (ShapeError, {"mask": t(5, 8, dtype=torch.bool)}, ["mask has shape (5, 8)", "(2, 4, 5, 7)", "slice"]),
    (DTypeError, {"mask": "causal"}, ["mask is a str", "a Mask", "mask=Mask(fn"]),
    (ShapeError, {"mask": Q.bool(), "keep": Q.bool()}, ["mask and keep", "one of them", "mask & keep"]),
    (DTypeError, {"score": print}, ["score is a builtin_function_or_method", "a Score", "score=Score(fn"]),
    (DTypeError, {"score": Score(None, args=(t(1, device="meta"),))}, ["score.args is on meta", "cpu", "q.device"]),
    (ShapeError, {"alibi": t(3)}, ["alibi has shape (3,)", "(4,) or (2, 4)", "slice or expand"]),
    (ShapeError, {"alibi": t(3, 4)}, ["alibi has shape (3, 4)", "(4,) or (2, 4)", "slice or expand"]),
    (DTypeError, {"alibi": t(4, dtype=torch.int64)}, ["alibi is torch.int64", "torch.float32", ".to(dtype)"]),
    (UnsupportedError, {"alibi": t(4).requires_grad_()}, ["alibi", "no gradient", "alibi.detach()"]),
    (ShapeError, {"sinks": t(2)}, ["sinks has shape (2,)", "(4,)", "slice or expand"]),
    (
        DTypeError,
        {"sinks": t(4, dtype=torch.bfloat16)},
        ["sinks is torch.bfloat16", "torch.float32", ".to(dtype)"],
    ),
    (ShapeError, {"key_lengths": torch.tensor([1, 2, 3])}, ["key_lengths has shape (3,)", "(2,)", "slice or expand"]),
    (ShapeError, {"key_lengths": torch.tensor([1, 8])}, ["key_lengths[1] is 8", "0 to 7", "clamp"]),
    (ShapeError, {"key_lengths": torch.tensor([-1, 7])}, ["key_lengths[0] is -1", "0 to 7", "clamp"]),
    (DTypeError, {"key_lengths": t(2)}, ["key_lengths is torch.float32", "torch.int32", ".to(dtype)"]),
    (ShapeError, {"spec": DROP}, ["seed is None", "wanted a seed", "int64 tensor"]),
    (ShapeError, {"spec": DROP, "seed": 2**64}, ["seed is 18446744073709551616", "64 bits", "seed % 2**64"]),
    (DTypeError, {"spec": DROP, "seed": 1.5}, ["seed is a float", "an int", "int(seed)"]),
    (DTypeError, {"spec": DROP, "seed": t(1)}, ["seed is torch.float32", "torch.int64", ".to(dtype)"]),
    (ShapeError, {"spec": DROP, "seed": torch.tensor([1, 2])}, ["seed has shape (2,)", "one element", "pass one"]),
    (ShapeError, {"max_q": 5}, ["max_q or max_k", "cu_seqlens_q and cu_seqlens_k", "leave it out"]),
]
REFUSED_PACKED: list[tuple[type[AndreaError], dict[str, Any], list[str]]] = [
    (ShapeError, {"cu_seqlens_k": None}, ["cu_seqlens_k is missing", "both", "twice"]),
    (ShapeError, {"cu_seqlens_q": None}, ["cu_seqlens_q is missing", "both", "twice"]),
    (ShapeError, {"max_q": None}, ["max_q is missing", "most rows", "upper bound"]),
    (ShapeError, {"max_k": -1}, ["max_k is -1", "at least 0", "most rows"]),
    (DTypeError, {"max_k": 4.0}, ["max_k is a float", "an int", "int(max_k)"]),
    (DTypeError, {"cu_seqlens_q": [0, 3, 5]}, ["cu_seqlens_q is a list", "torch.Tensor", "torch.as_tensor"]),
    (DTypeError, {"cu_seqlens_q": t(3)}, ["cu_seqlens_q is torch.float32", "torch.int32", ".to(dtype)"]),
    (DTypeError, {"cu_seqlens_k": t(3, dtype=torch.int32, device="meta")}, ["cu_seqlens_k is on meta", "cpu", ".to("]),
    (ShapeError, {"cu_seqlens_q": torch.tensor([[0, 5]])}, ["cu_seqlens_q has shape (1, 2)", "(sequences + 1,)", "0"]),
    (ShapeError, {"k_starts": (0, 4)}, ["cu_seqlens_k has shape (2,)", "(3,), as cu_seqlens_q", "repeat"]),
    (ShapeError, {"q_starts": (1, 3, 5)}, ["cu_seqlens_q starts at 1", "wanted 0", "before"]),
    (ShapeError, {"q_starts": (0, 3, 2)}, ["cu_seqlens_q decreases from 3 to 2", "wanted it not to", "cumsum"]),
    (ShapeError, {"k_starts": (0, 5, 7)}, ["cu_seqlens_k has a sequence of 5 rows", "at most 4", "raise max_k"]),
    (ShapeError, {"k_starts": (0, 4, 8)}, ["cu_seqlens_k ends at 8", "at most 7, the rows of k", "clip"]),
    (UnsupportedError, {"bias": t(5, 7)}, ["bias", "varlen", "score=Score"]),
    (UnsupportedError, {"mask": t(5, 7).bool()}, ["mask", "varlen", "mask=Mask"]),
    (UnsupportedError, {"key_lengths": torch.tensor([1, 2])}, ["key_lengths", "varlen", "cu_seqlens_k"]),
    (ShapeError, {"alibi": t(3, 4)}, ["alibi has shape (3, 4)", "(2, 4)", "slice or expand"]),
]


def assert_says(caught: pytest.ExceptionInfo[AndreaError], parts: list[str]) -> None:
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(("kind", "tensors", "parts"), REFUSED_QKV)
def test_refused_q_k_v(kind: type[AndreaError], tensors: tuple[Any, Any, Any], parts: list[str]) -> None:
    with pytest.raises(kind) as caught:
        make_problem(*tensors, FULL)
    assert_says(caught, parts)


@pytest.mark.parametrize(("kind", "extras", "parts"), REFUSED_EXTRAS)
def test_refused_extras(kind: type[AndreaError], extras: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(kind) as caught:
        dense(**extras)
    assert_says(caught, parts)


@pytest.mark.parametrize(("kind", "changes", "parts"), REFUSED_PACKED)
def test_c38_refused_packed(kind: type[AndreaError], changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(kind) as caught:
        packed(**changes)
    assert_says(caught, parts)


def test_c36_mixed_dtypes_outside_autocast_name_each() -> None:
    with pytest.raises(DTypeError) as caught:
        make_problem(Q, K, V.bfloat16(), FULL)
    assert_says(caught, ["q is torch.float32, k is torch.float32, v is torch.bfloat16", "one dtype", "torch.autocast"])


def test_packed_tensors_of_the_dense_rank() -> None:
    starts = torch.tensor([0, 2])
    with pytest.raises(ShapeError, match=r"q has shape \(2, 4, 5, 8\); wanted \(total, H, D\); pass all of q, k, v packed"):
        make_problem(Q, K, V, FULL, cu_seqlens_q=starts, cu_seqlens_k=starts, max_q=2, max_k=2)


def test_unexpanded_undoes_expand() -> None:
    x = torch.randn(1, 3, 1, 5)
    assert unexpanded(x.expand(2, 3, 4, 5)).shape == (1, 3, 1, 5)
    assert unexpanded(x.expand(2, 3, 4, 5)).data_ptr() == x.data_ptr()
    assert torch.equal(unexpanded(x), x)
    assert unexpanded(x[:0].expand(0, 3, 4, 5)).shape == (0, 3, 1, 5)  # no repetition to take of nothing
