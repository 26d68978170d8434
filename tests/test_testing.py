"""The measuring tools: inputs, catalogue, guard bands, and a rule that passes what is right and fails what is wrong."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec
from andrea_triton.testing import (
    AXES,
    CASES,
    Case,
    Inputs,
    assert_accurate,
    attend_reference,
    cast,
    check,
    eager_errors,
    eager_runs,
    error_of,
    guard_band,
    make_inputs,
    pairwise_cases,
    run,
)
from andrea_triton.testing.orders import Reordered, backwards, odd_first

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = float("nan"), float("inf")


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_catalogue_holds_the_awkward_sizes() -> None:
    assert {1, 63, 129} <= {case.M for case in CASES}
    assert 40 in {case.D for case in CASES}
    assert {case.layout for case in CASES} == {"heads", "rows", "guarded"}
    sizes = [(case.M, case.M if case.N is None else case.N) for case in CASES if case.lengths_q is None]
    assert any(M < N for M, N in sizes)
    assert any(M > N for M, N in sizes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_valid_call_that_the_reference_passes(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        got = check(make_inputs(case, dtype), attend_reference, case.name)
        assert all(x is None or not x.isnan().any() for x in got)


def test_inputs_repeat_and_follow_the_seed() -> None:
    case = Case("all", M=5, D=4, bias=(5, 5), sinks=True, hidden=0.5)
    first, again, other = (make_inputs(case, torch.float32, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.extras["mask"], again.extras["mask"])
    assert not torch.equal(first.q, other.q)


def test_layouts_hold_the_same_values() -> None:
    heads, rows, guarded = (
        make_inputs(Case("x", M=5, D=4, layout=layout), torch.float32) for layout in ("heads", "rows", "guarded")
    )
    assert torch.equal(heads.k, rows.k)
    assert torch.equal(heads.k, guarded.k)
    assert rows.k.transpose(1, 2).is_contiguous()
    assert guarded.k.untyped_storage().nbytes() > 4 * heads.k.numel()


def test_casting_to_a_wider_dtype_keeps_the_rounded_values() -> None:
    inputs = make_inputs(Case("x", M=5, D=4, bias=(5,), sinks=True), torch.bfloat16)
    wide = cast(inputs, torch.float64)
    assert (wide.q.dtype, wide.extras["bias"].dtype, wide.extras["sinks"].dtype) == (torch.float64,) * 3
    assert (inputs.dlse.dtype, wide.dlse.dtype) == (torch.float32, torch.float64)
    assert torch.equal(wide.q, inputs.q.double())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.bool])
def test_guard_band(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3, 4).to(dtype)
    banded = guard_band(tensor, width=2)
    assert torch.equal(banded, tensor)
    assert banded.dtype == dtype
    whole = torch.tensor([], dtype=dtype).set_(banded.untyped_storage())
    poison = whole.isnan() if dtype.is_floating_point else whole == (True if dtype == torch.bool else 2**31 - 1)
    assert poison.sum() == (6 * 7 * 8 if dtype == torch.bool else 6 * 7 * 8 - 24)
    assert banded.storage_offset() == 2 * 56 + 2 * 8 + 2


def test_guard_band_copies_and_drops_the_history() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    banded = guard_band(tensor)
    banded += 1.0
    assert not banded.requires_grad
    assert torch.equal(tensor, torch.zeros(3))


EXACT = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("off", "eager_off", "dtype", "passes"),
    [
        (0.0, 0.0, torch.float32, True),
        (4 * 2**-23, 0.0, torch.float32, True),
        (4.1 * 2**-23, 0.0, torch.float32, False),
        (0.02 + 4 * 2**-23, 0.01, torch.float32, True),
        (0.0201, 0.01, torch.float32, False),
        (4 * 2**-7, 0.0, torch.bfloat16, True),
        (4.1 * 2**-7, 0.0, torch.bfloat16, False),
    ],
)
def test_the_rule(off: float, eager_off: float, dtype: torch.dtype, passes: bool) -> None:
    got, eager = EXACT.clone(), EXACT.clone()
    got[0] += off
    eager[2] -= eager_off
    if passes:
        assert_accurate(got, eager, EXACT, dtype, "out")
    else:
        with pytest.raises(AssertionError, match=r"out: error .* is over .* at \(0,\)"):
            assert_accurate(got, eager, EXACT, dtype, "out")


@pytest.mark.parametrize(
    ("got", "exact"),
    [([NAN, 1.0], [1.0, 1.0]), ([INF, 1.0], [1.0, 1.0]), ([1.0, 1.0], [-INF, 1.0]), ([INF, 1.0], [-INF, 1.0])],
)
def test_what_is_not_finite_must_agree(got: list[float], exact: list[float]) -> None:
    wanted = torch.tensor(exact)
    with pytest.raises(AssertionError, match="error inf"):
        assert_accurate(torch.tensor(got), wanted, wanted, torch.float32, "lse")
    assert_accurate(wanted, wanted, wanted, torch.float32, "lse")


def test_an_infinite_yardstick_measures_nothing() -> None:
    with pytest.raises(AssertionError, match="eager run is not finite"):
        assert_accurate(EXACT, EXACT * INF, EXACT, torch.float16, "out")


def test_shapes_must_agree_and_nothing_is_accurate() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), wanted \(3,\)"):
        assert_accurate(EXACT[:2], EXACT, EXACT, torch.float32, "out")
    assert_accurate(EXACT[:0], EXACT[:0], EXACT[:0], torch.float32, "out")


def tiled(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Causal attention as a kernel does it: key tiles, base-2 exponents, fp32 sums, weights rounded for the product."""
    q, k, v = inputs.q, inputs.k, inputs.v
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = math.log2(math.e) / math.sqrt(q.shape[-1])
    M, N = q.shape[2], k.shape[2]
    peak, total = q.new_full((*q.shape[:3], 1), -1e30, dtype=wide), q.new_zeros((*q.shape[:3], 1), dtype=wide)
    acc = v.new_zeros((*q.shape[:3], v.shape[-1]), dtype=wide)
    for n in range(0, N, 16):
        s = q.to(wide) @ k[:, :, n : n + 16].to(wide).transpose(-1, -2) * scale
        hidden = torch.arange(n, min(n + 16, N)) > torch.arange(M)[:, None] + N - M
        s = s.masked_fill(hidden, -INF)
        top = torch.maximum(peak, s.detach().amax(-1, keepdim=True))
        p, alpha = torch.exp2(s - top), torch.exp2(peak - top)
        total, peak = total * alpha + p.sum(-1, keepdim=True), top
        acc = acc * alpha + p.to(q.dtype).to(wide) @ v[:, :, n : n + 16].to(wide)
    return (acc / total).to(q.dtype), ((peak + total.log2()) * math.log(2)).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.0, 5.0])
def test_an_online_softmax_passes_in_every_dtype(dtype: torch.dtype, gain: float) -> None:
    check(make_inputs(Case("online", B=2, M=65, D=64, causal=True, gain=gain), dtype), tiled, "online")


def planted(bug: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The reference with one small mistake."""
    settings = dict(inputs.settings)
    if bug == "scale":
        settings["scale"] = 0.26
    if bug == "mask":
        settings["q_start"] = 1
    out, lse = attend_reference(inputs._replace(settings=settings))
    if bug == "lse":
        return out, lse / math.log(2)
    if bug == "gradient":
        return out.detach() + (out - out.detach()) * 1.05, lse
    if bug == "last row":
        return out * torch.ones(33).index_fill(0, torch.tensor(32), NAN)[:, None].to(out.dtype), lse
    return (out.float() if bug == "dtype" else out), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bug", ["scale", "mask", "lse", "gradient", "last row"])
def test_a_planted_mistake_fails(bug: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("x", M=33, D=16, causal=True), dtype)
    with pytest.raises(AssertionError, match=f"planted: {'lse' if bug == 'lse' else 'd' if bug == 'gradient' else 'out'}"):
        check(inputs, lambda inputs: planted(bug, inputs), "planted")


FP16, BF16, F32 = DTYPES[:3]
CARELESS = {
    # products of 11 bits; weights of 11; of 8; the smallest dropped; sums in the dtype of out, or in bf16, a key at a time
    "tf32": (F32,), "weights of tf32": (F32,), "weights of bf16": (F32,), "weights cut off": (FP16, F32),
    "small weights dropped": (F32,), "sum in bf16": (FP16, F32), "sum in sixteen bits": (BF16,),
}  # fmt: skip


def shortened(x: Tensor, bits: int, rounded: bool = True) -> Tensor:
    """x with that many bits of its mantissa gone; its gradient passes as it is."""
    found = x.detach().float().view(torch.int32) + (1 << bits - 1) * rounded
    return x + (found.bitwise_and(-(1 << bits)).view(torch.float32) - x).detach()


def careless(fault: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Causal attention in fp32, rounded where a kernel must not."""
    q, k, v = (shortened(x.float(), 13) if fault == "tf32" else x.float() for x in (inputs.q, inputs.k, inputs.v))
    M, N = q.shape[2], k.shape[2]
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.arange(N) > torch.arange(M)[:, None] + N - M, -INF)
    p = s.softmax(-1)
    if fault.startswith("weights"):
        p = shortened(p, 13 if "tf32" in fault else 16, "cut" not in fault)
    if fault == "small weights dropped":
        p = p * (p > 2.0**-8 * p.amax(-1, keepdim=True))
    out = p @ v
    if fault.startswith("sum"):
        low, out = torch.bfloat16 if "bf16" in fault else inputs.q.dtype, 0.0
        for n in range(N):
            out = out + (p[..., n : n + 1] * v[:, :, n : n + 1]).to(low)
    return out.to(inputs.q.dtype), s.logsumexp(-1)


@pytest.mark.parametrize(("fault", "dtype"), [(fault, dtype) for fault, dtypes in CARELESS.items() for dtype in dtypes], ids=str)
def test_a_kernel_that_rounds_too_much_fails(fault: str, dtype: torch.dtype) -> None:
    """By the largest of several yardsticks too; and the same without the fault passes. Values of one sign: no sum ends near 0."""
    inputs = make_inputs(Case("x", M=129, D=64, causal=True), dtype)
    inputs = inputs._replace(v=inputs.v.abs())
    check(inputs, lambda inputs: careless("nothing", inputs), "careful")
    with pytest.raises(AssertionError, match="careless: out: error"):
        check(inputs, lambda inputs: careless(fault, inputs), "careless")


def test_the_yardstick_is_the_largest_of_several_runs_and_near_each() -> None:
    """Near: over the catalogue, a run is on the whole as right as another."""
    ratios = []
    for case in CASES[::3]:
        inputs = make_inputs(case, F32)
        exact = run(cast(inputs, torch.float64), attend_reference)
        runs = [[error_of(getattr(x, field), getattr(exact, field)) for field in ("out", "lse", "dq", "dk", "dv")]
                for x in eager_runs(inputs)]  # fmt: skip
        assert eager_errors(inputs, exact)[:5] == [max(of_runs) for of_runs in zip(*runs, strict=True)]
        ratios += [[error / first for error, first in zip(x, runs[0], strict=True) if first] for x in runs[1:]]
    for way in range(3):
        own = sorted(ratio for ratios_of_case in ratios[way::3] for ratio in ratios_of_case)
        assert 0.8 < own[len(own) // 2] < 1.25


def test_of_several_eager_results_the_worst_counts() -> None:
    """One of them may be luckily right; and one that is not finite measures nothing beside others."""
    near, far, lost = EXACT + 2**-20, EXACT + 2**-10, EXACT * NAN
    assert_accurate(EXACT + 2**-9, [EXACT, far, near], EXACT, F32, "out")
    for eager in (EXACT, near, [EXACT, near], [near, lost]):
        with pytest.raises(AssertionError, match="out: error"):
            assert_accurate(EXACT + 2**-9, eager, EXACT, F32, "out")


def test_no_more_runs_are_made_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that the first run allows asks for no second; one that none allows is held against all."""
    inputs, made = make_inputs(Case("x", M=5, D=4), F32), []

    def counted(given: Inputs, attend: Any) -> Any:
        made.append(given.q.dtype)
        return run(given, attend)

    monkeypatch.setattr("andrea_triton.testing.accuracy.run", counted)
    check(inputs, attend_reference, "right")
    assert made == [torch.float64, F32, F32]
    made.clear()
    with pytest.raises(AssertionError):
        check(inputs, lambda inputs: planted("lse", inputs), "planted")
    assert made == [torch.float64, *[F32] * 5]


@pytest.mark.parametrize("order", [backwards, odd_first])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_an_order_is_a_permutation(order: Any, n: int) -> None:
    assert order(n).sort().values.tolist() == list(range(n))
    assert n < 2 or order(n).tolist() != list(range(n))


@pytest.mark.parametrize("order", [backwards, odd_first])
def test_sums_are_taken_in_the_order_asked_for(order: Any) -> None:
    """Forward and backward: the bits of the same products and sums of permuted terms, and not those of the terms as they come."""
    x, y = torch.randn(5, 1000), torch.randn(1000, 4, requires_grad=True)
    flowing = torch.randn(5, 4)
    own, rows = order(1000), order(5)
    with Reordered(order):
        product, total = x @ y, x.sum(-1)
        (grad,) = torch.autograd.grad(product, y, flowing)
    assert torch.equal(product, x[:, own] @ y[own]) and not torch.equal(product, x @ y)
    assert torch.equal(total, x[:, own].sum(-1)) and not torch.equal(total, x.sum(-1))
    assert torch.equal(grad, x.T[:, rows] @ flowing[rows])


def test_a_result_of_another_dtype_fails() -> None:
    inputs = make_inputs(Case("x", M=33, D=16), torch.bfloat16)
    with pytest.raises(AssertionError, match=r"out is torch\.float32, wanted torch\.bfloat16"):
        check(inputs, lambda inputs: planted("dtype", inputs), "planted")


def test_run_uses_the_tensors_where_they_lie() -> None:
    inputs = make_inputs(Case("x", M=5, D=4, layout="guarded", bias=(5,), sinks=True), torch.float32)

    def look(given: Inputs) -> tuple[Tensor, Tensor]:
        assert given.q.data_ptr() == inputs.q.data_ptr()
        assert given.q.stride() == inputs.q.stride()
        assert given.extras["bias"].requires_grad
        return attend_reference(given)

    results = run(inputs, look)
    assert results.dbias.shape == (5,)
    assert results.dsinks.shape == (2,)
    assert run(inputs._replace(dlse=None), attend_reference).dv.shape == inputs.v.shape


def features(case: Case, dtype: torch.dtype) -> list[int]:
    """The entry of every axis that a case holds, found in its fields."""
    found = []
    for axis in AXES:
        fits = [i for i, entry in enumerate(axis) if all(has(case, dtype, *item) for item in entry.items())]
        found.append(max(fits, key=lambda i: (len(axis[i]), i)))
    return found


def has(case: Case, dtype: torch.dtype, field: str, value: Any) -> bool:
    if field == "dtype":
        return bool(dtype == value)
    return case.bias is not None if field == "bias" else getattr(case, field) == value


def test_pairwise_cases_hold_every_pair_and_are_valid_calls() -> None:
    held: set[tuple[int, int, int, int]] = set()
    for case, dtype in pairwise_cases():
        choice = features(case, dtype)
        held |= {(a, b, choice[a], choice[b]) for a, b in itertools.combinations(range(len(AXES)), 2)}
        inputs = make_inputs(case, dtype)
        make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings), **inputs.extras)
    wanted = {
        (a, b, i, j)
        for a, b in itertools.combinations(range(len(AXES)), 2)
        for i, j in itertools.product(range(len(AXES[a])), range(len(AXES[b])))
    }
    packed_bias = (1, 5, 1, 3)
    assert wanted - held == {packed_bias}
