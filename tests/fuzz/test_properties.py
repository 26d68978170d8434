"""What the contract says beyond accuracy, on calls that nobody thought of. More of them by hand: see test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from torch import Tensor

import andrea_triton
from andrea_triton.errors import AndreaError
from andrea_triton.problem import make_problem
from andrea_triton.reference import _grid, _visible
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, attend_reference, cast, error_of, make_inputs
from tests.fuzz.calls import Drawn, drawn_calls, head_dims, inputs_of, lengths, often, windows
from tests.fuzz.judge import attend_by, small_tiles
from tests.fuzz.test_contract import fuzz

BACKENDS = st.sampled_from(["interpreter", "torch", "torch", "torch"])
POISON = st.sampled_from([float("nan"), float("inf"), float("-inf")])
DENSE = drawn_calls(st.just(False))


def visible(inputs: Inputs) -> Tensor:
    """(B, HQ, M, N) bool: who sees whom."""
    problem = make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings), **inputs.extras)
    return _visible(problem, _grid(problem, 0)).expand(problem.B, problem.HQ, problem.M, problem.N)


def attend(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    with small_tiles():
        return attend_by(backend)(inputs)


def as_near(got: Tensor, ways: tuple[Tensor, ...], exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether a result is as near the truth as those of two ways to make it, and not a number only where one of these is none."""
    finite = exact[exact.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    allowed = 2 * sum(error_of(way, exact) for way in ways) + 16 * torch.finfo(dtype).eps * size
    some = torch.stack([way.isfinite() for way in ways]).all(0)
    return error_of(got, exact) <= allowed and bool(got[some].isfinite().all())


# One NaN sends a call on the CPU the dense way, which rounds scores to fp16: elements near 0 lie far from those of the fused way.
DENSE_WAY = Drawn(Case("hidden key", HQ=1, HKV=1, M=2, N=3, D=63, hidden=0.3), dtype=torch.float16)


@fuzz
@given(drawn=DENSE, backend=BACKENDS, poison=POISON, pick=st.integers(0, 40))
@example(drawn=DENSE_WAY, backend="torch", poison=float("nan"), pick=0)
@example(drawn=Drawn(Case("rows of NaN", HQ=1, M=3, N=17, D=16)), backend="interpreter", poison=float("nan"), pick=0)
def test_what_a_query_does_not_see_does_not_reach_it(drawn: Drawn, backend: str, poison: float, pick: int) -> None:
    """A key that is not a number, and a query: out and lse of the queries that do not see the key, and are not it, stay."""
    inputs = inputs_of(drawn)
    if 0 in (*inputs.q.shape, *inputs.k.shape):
        return
    q, k = inputs.q.clone(), inputs.k.clone()
    key, query = pick % k.shape[2], pick % q.shape[2]
    clean, dense = attend(inputs._replace(q=q, k=k), backend), attend_reference(inputs)
    exact = attend_reference(cast(inputs, torch.float64))
    k[:, :, key], q[:, :, query] = poison, poison
    untouched = ~visible(inputs)[..., key]
    untouched[:, :, query] = False
    event(f"untouched rows: {bool(untouched.any())}")
    results = zip(attend(inputs._replace(q=q, k=k), backend), clean, dense, exact, strict=True)
    for got, *others in results:
        got, wanted, other, true = (t[untouched] for t in (got, *others))
        if backend == "interpreter":
            assert torch.equal(got, wanted)
        else:
            assert as_near(got, (wanted, other), true, drawn.dtype)


@fuzz
@given(drawn=DENSE, backend=BACKENDS, first=st.integers(0, 40))
def test_keys_that_a_query_does_not_see_may_change(drawn: Drawn, backend: str, first: int) -> None:
    """Later tokens, above all: out and lse keep every bit."""
    inputs = inputs_of(drawn)
    if 0 in (*inputs.q.shape, *inputs.k.shape):
        return
    k, v, first = inputs.k.clone(), inputs.v.clone(), first % inputs.k.shape[2]
    clean = attend(inputs._replace(k=k, v=v), backend)
    k[:, :, first:], v[:, :, first:] = k[:, :, first:] + 1, 2 - v[:, :, first:]
    if not (k.isfinite().all() and v.isfinite().all()):
        return
    untouched = ~visible(inputs)[..., first:].any(-1)
    for got, wanted in zip(attend(inputs._replace(k=k, v=v), backend), clean, strict=True):
        assert torch.equal(got[untouched], wanted[untouched])


@fuzz
@given(drawn=drawn_calls(st.just(False), dropout=False), backend=BACKENDS, first=st.integers(0, 40))
def test_two_parts_of_the_keys_make_the_whole(drawn: Drawn, backend: str, first: int) -> None:
    """merge_attention of the attention over the first keys and over the others."""
    inputs = inputs_of(drawn)
    if inputs.extras.keys() & {"bias", "mask", "sinks", "key_lengths", "alibi"} or inputs.settings["precise"]:
        return
    window, M, N = inputs.settings["window"], inputs.q.shape[2], inputs.k.shape[2]
    start = N - M if inputs.settings["q_start"] is None else inputs.settings["q_start"]
    first = min(first, N)
    parts = []
    for keys, moved in ((slice(0, first), 0), (slice(first, N), first)):
        part = inputs._replace(k=inputs.k[:, :, keys], v=inputs.v[:, :, keys])
        parts += attend(part._replace(settings={**inputs.settings, "q_start": start - moved, "window": window}), backend)
    out, lse = andrea_triton.merge_attention(*parts)
    exact, eager = attend_reference(cast(inputs, torch.float64)), attend_reference(inputs)
    if not eager[0].isfinite().all():
        return
    unit = torch.finfo(drawn.dtype).eps
    size = float(inputs.v.double().abs().max()) if inputs.v.numel() else 0.0
    error = float((out.double() - exact[0]).abs().max()) if out.numel() else 0.0
    eager_error = float((eager[0].double() - exact[0]).abs().max()) if out.numel() else 0.0
    assert error <= 2 * eager_error + 3 * unit * size, f"{error} against eager's {eager_error}, {drawn}"
    assert torch.equal(lse == float("-inf"), exact[1] == float("-inf"))


@st.composite
def caches(draw: Any) -> dict[str, Any]:
    """A cache, its lengths, and a call."""
    batch, capacity = draw(st.integers(1, 3)), draw(st.integers(1, 50))
    M = draw(st.integers(1, 4))
    return {
        "batch": batch, "HKV": draw(st.integers(1, 2)), "group": draw(st.integers(1, 3)), "M": M,
        "D": draw(head_dims()), "capacity": capacity, "rows": tuple(draw(st.integers(0, capacity)) for _ in range(batch)),
        "page": draw(st.sampled_from([None, 16, 32])), "split_size": draw(st.sampled_from([16, 32, 48, 512])),
        "window": draw(windows()), "causal": draw(often(True, False)), "softcap": draw(often(None, 2.0)),
        "sinks": draw(st.booleans()), "alibi": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])), "seed": draw(lengths()),
    }  # fmt: skip


@fuzz
@given(drawn=caches())
def test_decoding(drawn: dict[str, Any]) -> None:
    """The decode kernels over a cache give what the reference gives for each sequence alone."""
    d, dtype = drawn, drawn["dtype"]
    generator = torch.Generator().manual_seed(d["seed"])
    make: Any = andrea_triton.KVCache if d["page"] is None else andrea_triton.PagedKVCache
    cache = make(d["batch"], d["HKV"], d["capacity"], d["D"], dtype=dtype, **({"page_size": d["page"]} if d["page"] else {}))
    k, v = (torch.randn(d["batch"], d["HKV"], d["capacity"], d["D"], generator=generator, dtype=torch.float64).to(dtype)
            for _ in range(2))  # fmt: skip
    cache.append(k, v, rows=d["rows"])
    HQ = d["HKV"] * d["group"]
    q = torch.randn(d["batch"], HQ, d["M"], d["D"], generator=generator, dtype=torch.float64).to(dtype)
    terms: dict[str, Any] = {"sinks": torch.randn(HQ, generator=generator).to(dtype)} if d["sinks"] else {}
    if d["alibi"]:
        terms["alibi"] = torch.rand(HQ, generator=generator)
    settings = {name: d[name] for name in ("causal", "window", "softcap")}
    out, lse = andrea_triton.decode_attention(
        q, cache, **settings, **terms, split_size=d["split_size"], return_lse=True, backend="interpreter"
    )
    for b, n in enumerate(d["rows"]):
        own = slice(b, b + 1)
        # append keeps the last rows of what it is given
        one = Inputs(q[own], k[own, :, d["capacity"] - n :], v[own, :, d["capacity"] - n :], q, None, settings, terms)
        eager, exact = attend_reference(one), attend_reference(cast(one._replace(dout=q), torch.float64))
        usual = 4 * torch.finfo(dtype).eps  # the eager error of one row may be nothing by luck
        for got, a, b_, kind in ((out[own], eager[0], exact[0], dtype), (lse[own], eager[1], exact[1], torch.float32)):
            if a.numel() and not torch.equal(got.double(), b_):
                assert torch.equal(got.isfinite(), b_.isfinite())
                slack = usual if kind == dtype else 4 * torch.finfo(torch.float32).eps
                assert torch.allclose(
                    got.double(), b_, rtol=slack, atol=max(4 * float((a - b_).nan_to_num().abs().max()), slack)
                ), d


BREAKS: dict[str, Any] = {
    "a feature fewer in k": lambda x: x._replace(k=x.k[..., :-1]),
    "a key fewer in v": lambda x: x._replace(v=x.v[..., 1:, :] if x.q.dim() == 4 else x.v[1:]),
    "another dtype": lambda x: x._replace(v=x.v.to(torch.float64 if x.v.dtype == torch.float32 else torch.float32)),
    "integers": lambda x: x._replace(q=x.q.int()),
    "a dim fewer": lambda x: x._replace(q=x.q[0]) if x.q.shape[0] else x._replace(q=x.q.flatten()),
    "no number as scale": lambda x: x._replace(settings={**x.settings, "scale": float("nan")}),
    "dropout of all": lambda x: x._replace(settings={**x.settings, "dropout_p": 1.0}),
    "a negative cap": lambda x: x._replace(settings={**x.settings, "softcap": -1.0}),
    "an empty window": lambda x: x._replace(settings={**x.settings, "window": 0}),
    "sinks of no head": lambda x: x._replace(extras={**x.extras, "sinks": x.q.new_zeros(x.q.shape[-2] + 100)}),
    "a bias of another length": lambda x: x._replace(extras={**x.extras, "bias": x.q.new_zeros(x.k.shape[-2] + 2)}),
    "a mask of numbers": lambda x: x._replace(extras={**x.extras, "mask": x.q.new_zeros(())}),
    "lengths past the end": lambda x: x._replace(
        extras={**x.extras, "key_lengths": torch.full((x.q.shape[0] + 1,), 10**6, dtype=torch.int32)}
    ),
    "too many heads": lambda x: x._replace(q=torch.cat([x.q, x.q[:, :1]], 1) if x.k.shape[1] > 1 else x.q[..., :0]),
}


@fuzz
@given(drawn=DENSE, how=st.sampled_from(sorted(BREAKS)))
def test_a_call_that_is_wrong_in_one_way_is_refused(drawn: Drawn, how: str) -> None:
    """By an error of the library's own, before anything is started, in words that name a way out."""
    inputs = BREAKS[how](make_inputs(drawn.case, drawn.dtype))
    with pytest.raises(AndreaError) as error:
        attend(inputs, "interpreter")
    assert len(str(error.value)) > 20
