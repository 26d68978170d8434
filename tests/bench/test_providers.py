"""The textbook formula, and the list of providers."""

import math

import pytest
import torch

from andrea_triton.problem import make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from bench.cases import Case, Inputs, make_inputs
from bench.providers import NAIVE, PROVIDERS, chosen, naive, naive_lse, possible, usual


def test_naive_on_two_tokens_by_hand() -> None:
    q = torch.tensor([[[[0.0], [1.0]]]])
    k = torch.tensor([[[[5.0], [5.0 + math.log(3.0)]]]])
    v = torch.tensor([[[[1.0], [5.0]]]])
    out, lse = naive_lse(q, k, v)
    torch.testing.assert_close(out, torch.tensor([[[[1.0], [4.0]]]]))
    torch.testing.assert_close(lse, torch.tensor([[[0.0, 5.0 + math.log(4.0)]]]))


def test_naive_equals_the_reference() -> None:
    inputs = Inputs(*(x.double() for x in make_inputs(Case(length=33, heads=4, kv_heads=2, head_dim=16))))
    problem = make_problem(*inputs[:3], make_spec(causal=True))
    for got, wanted in zip(naive_lse(*inputs[:3]), reference(problem, *inputs[:3]), strict=True):
        torch.testing.assert_close(got, wanted)


def test_every_provider_that_is_used_exists_and_the_baseline_comes_first() -> None:
    for device in ("cpu", "cuda"):
        assert usual(device)[0] == possible(device)[0] == NAIVE.name
        assert set(usual(device)) <= set(possible(device)) <= set(PROVIDERS)
    assert "andrea-torch" in usual("cpu") and "andrea-triton" in usual("cuda")


def test_only_naive_needs_squares() -> None:
    case = Case(length=1024)
    assert NAIVE.needs(case, "both") == 3 * case.score_bytes
    assert PROVIDERS["andrea-torch"].needs(case, "both") == 0


def test_a_window_hides_what_it_has_left_behind() -> None:
    inputs = Inputs(*(x.double() for x in make_inputs(Case(length=33, heads=2, kv_heads=2, head_dim=16))))
    wanted, _ = reference(make_problem(*inputs[:3], make_spec(causal=True, window=5)), *inputs[:3])
    torch.testing.assert_close(naive(*inputs[:3], window=5), wanted)


def test_providers_by_name() -> None:
    assert chosen("sdpa-math,naive", "cpu") == ("naive", "sdpa-math")
    assert chosen(None, "cpu") == usual("cpu")
    with pytest.raises(ValueError, match="no provider nobody; wanted some of naive"):
        chosen("nobody", "cpu")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(length=8)
    assert "no backward on a CPU" in str(PROVIDERS["flex"].missing(case, "both"))
    assert "no window" in str(PROVIDERS["sdpa-math"].missing(Case(length=8, window=2), "forward"))
    monkeypatch.setattr("bench.providers.COMPILERS", ("no-such-compiler",))
    assert "needs a C++ compiler" in str(PROVIDERS["naive-compiled"].missing(case, "forward"))
