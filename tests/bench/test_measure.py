"""Accuracy, time and memory."""

from dataclasses import replace

import pytest
from torch import Tensor

from bench import measure
from bench.cases import MODES, Case, make_inputs
from bench.measure import TENSORS, Judge, matmul_samples, one_call, time_in_turns
from bench.providers import NAIVE, PROVIDERS, library, naive, naive_lse

SMALL = Case(length=40, heads=2, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["reference", "torch", "interpreter"])
def test_the_library_passes(backend: str, dtype: str) -> None:
    checks = Judge(replace(SMALL, dtype=dtype)).check(library(backend, backend))
    assert tuple(checks) == TENSORS
    assert {name: check.reason for name, check in checks.items()} == dict.fromkeys(TENSORS)


def test_a_wrong_gradient_is_found_and_named() -> None:
    def doubled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return naive_lse(q, k, 2 * v - v.detach())

    checks = Judge(SMALL).check(replace(NAIVE, name="doubled", make_lse=lambda case: doubled))
    wrong = {name: check.reason for name, check in checks.items() if check.reason is not None}
    assert list(wrong) == ["dv"]
    assert "dv: error" in str(wrong["dv"])


@pytest.mark.parametrize("mode", MODES)
def test_a_call_does_its_mode_and_leaves_no_gradient(mode: measure.Mode) -> None:
    seen: list[bool] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = naive(q, k, v)
        seen.append(out.requires_grad)
        return out

    inputs = make_inputs(SMALL)
    one_call(spy, inputs, mode)()
    assert seen == [mode != "forward"]
    assert all(x.grad is None and not x.requires_grad for x in inputs)


def test_providers_take_turns_and_the_order_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def named(name: str) -> measure.Provider:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            order.append(name)
            return q

        return replace(NAIVE, name=name, make=lambda case: attend)

    monkeypatch.setattr(measure, "MIN_SAMPLE_S", 0.0)
    taken = time_in_turns(SMALL, "forward", [named("a"), named("b")], inputs=make_inputs(SMALL), rounds=(2, 4), budget_s=60.0)
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 4, "b": 4}
    assert order == [*"aabb", *"ab", *"ba", *"ab", *"ba"]


def test_a_first_call_that_is_slow_counts_and_a_spent_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SLOW_S", 0.0)
    calls: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return q

    provider = replace(NAIVE, make=lambda case: attend)
    inputs = make_inputs(SMALL)
    taken = time_in_turns(SMALL, "forward", [provider], inputs=inputs, rounds=(5, 9), budget_s=0.0, most_s=0.0)
    assert len(taken["naive"]) == 1
    assert len(calls) == 1


def test_a_provider_without_lse_is_judged_by_the_rest() -> None:
    assert tuple(Judge(SMALL).check(PROVIDERS["sdpa-math"])) == ("out", "dq", "dk", "dv")


def test_the_rate_of_matrix_products_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.RATE_SIZE, "cpu", 64)
    assert all(rate > 0 for rate in matmul_samples(SMALL, rounds=2))
