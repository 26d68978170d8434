"""The textbook formula, and the list of providers."""

import math

import torch

from andrea_triton.problem import make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from bench.cases import Case, Inputs, make_inputs
from bench.providers import NAIVE, PROVIDERS, checked_on, naive_lse, timed_on


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
        assert set(checked_on(device)) | set(timed_on(device)) <= set(PROVIDERS)
        assert timed_on(device)[0] == NAIVE.name
        assert set(timed_on(device)) <= {NAIVE.name, *checked_on(device)}


def test_only_naive_needs_squares() -> None:
    case = Case(length=1024)
    assert NAIVE.needs(case, "both") == 3 * case.score_bytes
    assert PROVIDERS["andrea-torch"].needs(case, "both") == 0
