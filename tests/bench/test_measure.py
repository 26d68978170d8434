"""Accuracy, time and memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench import measure
from bench.cases import MODES, Case, make_inputs
from bench.measure import TENSORS, Judge, free_bytes, one_call, peak_memory, time_in_turns
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

    checks = Judge(SMALL).check(replace(NAIVE, name="doubled", attend_lse=doubled))
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
    one_call(replace(NAIVE, attend=spy), inputs, mode)()
    assert seen == [mode == "both"]
    assert all(x.grad is None and not x.requires_grad for x in inputs)


def test_providers_take_turns_and_the_order_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def named(name: str) -> measure.Provider:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            order.append(name)
            return q

        return replace(NAIVE, name=name, attend=attend)

    monkeypatch.setattr(measure, "MIN_SAMPLE_S", 0.0)
    taken = time_in_turns(SMALL, "forward", [named("a"), named("b")], rounds=(2, 4), budget_s=60.0)
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 4, "b": 4}
    assert order == [*"aabb", *"ab", *"ba", *"ab", *"ba"]


def test_a_first_call_that_is_slow_counts_and_a_spent_budget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SLOW_S", 0.0)
    calls: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return q

    provider = replace(NAIVE, attend=attend)
    assert len(time_in_turns(SMALL, "forward", [provider], rounds=(5, 9), budget_s=0.0, most_s=0.0)["naive"]) == 1
    assert len(calls) == 1


def test_memory_of_naive_holds_the_scores_and_fused_does_not() -> None:
    case = Case(length=768, heads=4, kv_heads=4)
    naive_peak = peak_memory(case, "forward", NAIVE)
    fused_peak = peak_memory(case, "forward", PROVIDERS["andrea-torch"])
    assert 1.5 * case.score_bytes < naive_peak < 4 * case.score_bytes
    assert 0 < fused_peak < 0.75 * case.score_bytes


def test_what_goes_wrong_in_the_child_comes_back() -> None:
    with pytest.raises(RuntimeError, match="TypeError: dtype is 'nn'"):
        peak_memory(replace(SMALL, dtype="nn"), "forward", NAIVE)


def test_free_memory_is_positive() -> None:
    assert free_bytes("cpu") > 0


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    case = Case(length=1024, dtype="bfloat16", device="cuda")
    assert torch.cuda.is_available()
    assert peak_memory(case, "forward", PROVIDERS["andrea-triton"]) < case.score_bytes
