"""Masks, scores and layouts through the public functions: one variant said in two ways gives one answer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import (
    Mask,
    Score,
    UnsupportedError,
    attention,
    causal_attention,
    dropout_mask,
    merge_attention,
    varlen_attention,
)
from andrea_triton.problem import make_problem
from andrea_triton.reference import statistics
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, assert_accurate, attend_reference, cast, check, make_inputs, run
from tests.backends import BACKENDS, EVERY, here

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
INF = float("inf")


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def by(backend: str, **more: Any) -> Any:
    """(out, lse) of Inputs, dense or packed, by a backend."""

    def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
        settings = {**inputs.settings, **inputs.extras, **more, "return_lse": True, "backend": backend}
        function: Any = varlen_attention if "max_q" in settings else attention
        return function(inputs.q, inputs.k, inputs.v, **settings)

    return attend


def judged(name: str, inputs: Inputs, backend: str, got: dict[str, Tensor], wide: Inputs | None = None) -> None:
    """Results of a call that was made in another way, by the rule of testing.check."""
    exact, eager = run(wide or cast(inputs, F64), attend_reference), run(inputs, attend_reference)
    for field, tensor in got.items():
        assert_accurate(tensor, getattr(eager, field), getattr(exact, field), tensor.dtype, f"{backend} {name}: {field}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_every_key_is_causal(backend: str) -> None:
    inputs = make_inputs(Case("causal", M=40, D=16, causal=True), F32)
    wanted = run(inputs, by(backend))
    for window in (40, 1000, (39, 5), (10**9, 0)):
        got = run(inputs, by(backend, window=window))
        assert all(a is b or torch.equal(a, b) for a, b in zip(wanted, got, strict=True)), window


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_say_the_same_in_both_forms(backend: str) -> None:
    q, k, v = (randn(1, 2, 20, 16) for _ in range(3))

    def out(**keywords: Any) -> Tensor:
        result = attention(q, k, v, backend=backend, **keywords)
        assert isinstance(result, Tensor)
        return result

    assert torch.equal(out(causal=True, window=4), out(window=(3, 0)))
    assert torch.equal(out(window=4), out(window=(3, 3)))
    assert torch.equal(out(causal=True, window=(3, 7)), out(window=(3, 0)))
    assert torch.equal(out(causal=True), out(window=(None, 0)))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gqa_is_repeated_heads_with_summed_gradients(backend: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("grouped", HQ=6, HKV=2, M=20, N=33, D=16, causal=True), dtype)
    wide = inputs._replace(k=inputs.k.repeat_interleave(3, 1), v=inputs.v.repeat_interleave(3, 1))
    got, apart = run(inputs, by(backend)), run(wide, by(backend))
    assert torch.equal(got.out, apart.out) and torch.equal(got.lse, apart.lse) and torch.equal(got.dq, apart.dq)
    sums = {name: getattr(apart, name).float().unflatten(1, (2, 3)).sum(2).to(dtype) for name in ("dk", "dv")}
    if dtype == F32:
        judged("summed", inputs, backend, sums)
    judged("grouped", inputs, backend, {"dk": got.dk, "dv": got.dv})


LENGTHS_Q, LENGTHS_K = (5, 0, 20, 1), (9, 4, 20, 0)


@pytest.mark.parametrize("features", [{}, {"window": (6, 2), "sinks": True}, {"alibi": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_each_sequence_alone(backend: str, features: dict[str, Any]) -> None:
    case = Case("packed", HQ=2, HKV=1, D=16, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, slack=3, **features)
    inputs = make_inputs(case, F32)
    got, extras = run(inputs, by(backend)), {n: x for n, x in inputs.extras.items() if n in ("sinks", "alibi")}
    dsinks = torch.zeros(2)
    at_q = at_k = 0
    for M, N in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        rows, keys = slice(at_q, at_q + M), slice(at_k, at_k + N)
        q, dout = (x[rows].transpose(0, 1)[None] for x in (inputs.q, inputs.dout))
        k, v = (x[keys].transpose(0, 1)[None] for x in (inputs.k, inputs.v))
        one = Inputs(q, k, v, dout, inputs.dlse[None, :, rows], inputs.settings, extras)
        alone = run(one, by(backend))
        fields = {name: getattr(got, name)[rows].transpose(0, 1)[None] for name in ("out", "dq")}
        fields |= {name: getattr(got, name)[keys].transpose(0, 1)[None] for name in ("dk", "dv")}
        fields["lse"] = got.lse[None, :, rows]
        if backend == "interpreter":
            assert all(torch.equal(x, getattr(alone, name)) for name, x in fields.items())
        judged("alone", one, backend, fields)
        dsinks += 0 if alone.dsinks is None else alone.dsinks
        at_q, at_k = at_q + M, at_k + N
    assert (got.out[at_q:] == 0).all() and (got.lse[:, at_q:] == -INF).all()
    assert all((x[at:] == 0).all() for x, at in ((got.dq, at_q), (got.dk, at_k), (got.dv, at_k)))
    if got.dsinks is not None:
        judged("alone", inputs, backend, {"dsinks": dsinks})


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_of_two_halves_is_the_whole(backend: str, dtype: torch.dtype) -> None:
    """Gradients too, and rows that one half, or both, hide."""
    inputs = make_inputs(Case("whole", M=40, N=37, D=16, causal=True), dtype)

    def halves(x: Inputs) -> tuple[Tensor, Tensor]:
        parts = []
        for keys, start in ((slice(0, 20), 0), (slice(20, 37), -20)):
            part = x._replace(k=x.k[:, :, keys], v=x.v[:, :, keys])
            parts.append(by(backend, q_start=37 - 40 + start)(part))
        return merge_attention(*parts[0], *parts[1])

    got, exact = run(inputs, halves), run(cast(inputs, F64), attend_reference)
    assert (got.out[:, :, :3] == 0).all() and (got.lse[:, :, :3] == -INF).all()
    if dtype == F64:
        assert all(a is b or torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(got, exact, strict=True))
    else:
        fields = {name: getattr(got, name) for name in ("out", "lse", "dq", "dk", "dv")}
        judged("halves", inputs, backend, fields)


def test_merge_is_commutative_and_has_an_identity() -> None:
    a, b = [(randn(1, 2, 5, 8), randn(1, 2, 5)) for _ in range(2)]
    for x, y in zip(merge_attention(*a, *b), merge_attention(*b, *a), strict=True):
        assert torch.equal(x, y)
    nothing = torch.zeros(1, 2, 5, 8), torch.full((1, 2, 5), -INF)
    assert all(torch.equal(x, y) for x, y in zip(merge_attention(*a, *nothing), a, strict=True))
    out, lse = merge_attention(*nothing, *nothing)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("features", [{}, {"window": 9}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_prefill_is_the_whole(backend: str, features: dict[str, Any]) -> None:
    inputs = make_inputs(Case("whole", M=40, D=16, causal=True, **features), F32)
    chunks = []
    for start in range(0, 40, 13):
        rows = slice(start, min(start + 13, 40))
        part = inputs._replace(q=inputs.q[:, :, rows], k=inputs.k[:, :, : rows.stop], v=inputs.v[:, :, : rows.stop])
        chunks.append(by(backend, q_start=start)(part))
        assert all(torch.equal(a, b) for a, b in zip(chunks[-1], by(backend)(part), strict=True)), "the default start"
    out, lse = (torch.cat(parts, 2) for parts in zip(*chunks, strict=True))
    judged("chunks", inputs, backend, {"out": out, "lse": lse})


@pytest.mark.parametrize("backend", BACKENDS)
def test_key_lengths_are_shorter_keys(backend: str) -> None:
    inputs = make_inputs(Case("lengths", B=3, HQ=2, M=12, N=40, D=16, key_lengths=(0, 17, 40)), F32)
    inputs.k[1, :, 17:], inputs.k[0] = float("nan"), float("inf")
    got = run(inputs, by(backend))
    for b, length in enumerate((0, 17, 40)):
        one = slice(b, b + 1)
        alone = Inputs(inputs.q[one], inputs.k[one, :, :length], inputs.v[one, :, :length], inputs.dout[one],
                       inputs.dlse[one], inputs.settings, {})  # fmt: skip
        wanted = run(alone, by(backend))
        fields = {"out": got.out[one], "lse": got.lse[one], "dv": got.dv[one, :, :length]}
        if backend == "interpreter":
            assert all(torch.equal(x, getattr(wanted, name)) for name, x in fields.items())
        judged("lengths", alone, backend, fields)
        assert (got.dk[b, :, length:] == 0).all() and (got.dv[b, :, length:] == 0).all()


@pytest.mark.parametrize("backend", EVERY)
def test_dropout_is_the_same_mask_everywhere(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """v is the identity, so out holds the dropped weights; forward and backward agree, whatever the tile."""
    q, k, v = randn(2, 3, 20, 16), randn(2, 3, 24, 16), torch.eye(24).expand(2, 3, 24, 24).requires_grad_()
    keep = dropout_mask(11, 0.4, 2, 3, torch.arange(20) + 4, torch.arange(24), here())
    tiles = [(16, 16), (32, 16), (16, 32)] if backend == "interpreter" else [(0, 0)]
    for m, n in tiles:
        if backend == "interpreter":
            from andrea_triton.launch import plan
            from andrea_triton.launch.configs import DELTA, Config

            tile = Config(m, n)
            monkeypatch.setattr(plan, "candidates", lambda name, *_, c=tile: (DELTA if name == "delta" else c,))
        out = attention(q, k, v, dropout_p=0.4, seed=11, backend=backend)
        assert torch.equal(out != 0, keep)
        (dv,) = torch.autograd.grad(out[..., 0].sum(), v)
        assert torch.equal(dv[..., 0] != 0, keep.any(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_seeds(backend: str) -> None:
    q, k, v = (randn(1, 2, 12, 16) for _ in range(3))

    def out(**keywords: Any) -> Tensor:
        result = attention(q, k, v, dropout_p=0.5, backend=backend, **keywords)
        assert isinstance(result, Tensor)
        return result

    assert torch.equal(out(seed=5), out(seed=torch.tensor([5])))
    assert torch.equal(out(seed=-1), out(seed=2**64 - 1))
    assert not torch.equal(out(seed=5), out(seed=6))
    torch.manual_seed(3)
    first, second = out(), out()
    torch.manual_seed(3)
    assert torch.equal(out(), first) and torch.equal(out(), second) and not torch.equal(first, second)
    assert torch.equal(attention(q, k, v, seed=5, backend=backend), attention(q, k, v, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_score_and_mask_of_the_user(backend: str) -> None:
    """The two documented examples: documents that do not see one another, and a penalty on distance."""
    pytest.importorskip("triton")
    from andrea_triton.testing.functors import distance_penalty, distance_penalty_grad, same_document

    documents, rate = torch.tensor([0] * 7 + [1] * 20 + [2] * 13, dtype=torch.int32), 0.3
    mask = Mask(
        same_document,
        (documents,),
        lambda b, h, q_pos, k_pos, ids: ids[q_pos.clamp(0, 39).long()] == ids[k_pos.long()],
    )
    score = Score(
        distance_penalty,
        distance_penalty_grad,
        (rate,),
        lambda s, b, h, q_pos, k_pos, rate: s * (1 + rate * (q_pos - k_pos)),
    )
    inputs = make_inputs(Case("user", HQ=2, HKV=1, M=40, D=16, causal=True, sinks=True), F32)
    inputs = inputs._replace(extras={**inputs.extras, "mask": mask, "score": score})
    got = check(inputs, by(backend), backend)
    late = inputs.k.clone()
    late[:, :, :7] += 1.0
    again = run(inputs._replace(k=late), by(backend))
    assert torch.equal(got.out[:, :, 7:], again.out[:, :, 7:]), "a document sees itself alone"


def test_a_functor_without_its_dense_twin_says_what_is_missing() -> None:
    q = randn(1, 1, 4, 8)
    for keywords in ({"score": Score(len)}, {"mask": Mask(len)}):
        with pytest.raises(UnsupportedError, match=r"torch_fn is missing; give .* its dense twin") as info:
            attention(q, q, q, backend="torch", **keywords)
        assert info.value.feature == next(iter(keywords))


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", HQ=2, M=40, D=16, causal=True, gain=3.0),
        Case("empty rows", HQ=4, HKV=2, M=40, N=20, D=16, causal=True, sinks=True, softcap=3.0),
        Case("masked", HQ=2, M=20, D=16, hidden=0.5, alibi=True, bias=(20, 20)),
        Case("packed", HQ=2, D=16, lengths_q=(5, 0, 20), lengths_k=(9, 3, 20), slack=3, window=(6, 2)),
        Case("lengths", B=2, HQ=1, M=20, N=33, D=16, key_lengths=(0, 17), scale=-0.3),
    ],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_row_statistics(backend: str, dtype: torch.dtype, case: Case) -> None:
    inputs = make_inputs(case, dtype)
    settings = {**inputs.settings, **inputs.extras, "return_lse": True, "return_stats": True, "backend": backend}
    function: Any = varlen_attention if "max_q" in settings else attention
    plain = by(backend)(inputs)
    out, lse, top, entropy = function(inputs.q, inputs.k, inputs.v, **settings)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    assert top.dtype == entropy.dtype == F32 and top.shape == entropy.shape == lse.shape
    found, totals = [], []
    for x in (inputs, cast(inputs, F64)):
        problem = make_problem(x.q, x.k, x.v, make_spec(**x.settings), **x.extras)
        found.append(statistics(problem, x.q, x.k))
        totals.append(attend_reference(x)[1])
    assert_accurate(top, found[0][0], found[1][0], F32, "largest logit")
    # The entropy is lse less the mean logit: eager's error of lse is part of the yardstick.
    of_lse = (totals[0].double() - totals[1]).abs().nan_to_num(0.0)
    assert_accurate(entropy, found[0][1] + of_lse.max().float(), found[1][1], F32, "entropy")


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_have_no_gradient_and_cost_none(backend: str) -> None:
    q, k, v = (randn(1, 1, 9, 8).requires_grad_() for _ in range(3))
    out, top, entropy = causal_attention(q, k, v, return_stats=True, backend=backend)
    assert out.requires_grad and not top.requires_grad and not entropy.requires_grad
