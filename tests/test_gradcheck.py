"""Derivatives by finite differences: the real kernels in fp64, through the public function, for every feature."""

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import Mask, Score, attention, merge_attention, varlen_attention
from tests.backends import KERNELS, there

F64 = torch.float64


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> str:
    """The kernels, in the interpreter and compiled."""
    return str(request.param)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64).requires_grad_()


def check(function: Any, inputs: tuple[Tensor, ...]) -> None:
    """gradcheck of both results; rows that see nothing have lse -inf, which has no difference quotient."""

    def finite(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(*tensors)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(finite, inputs, fast_mode=True)


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "positions": {"causal": True, "q_start": -2},
    "softcap": {"softcap": 1.5, "causal": True},
    "negative scale": {"scale": -0.7},
    "zero scale": {"scale": 0.0},
    "alibi": {"alibi": torch.tensor([0.25])},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "mask": {"mask": torch.arange(42).view(6, 7) % 3 != 0},
    "key lengths": {"key_lengths": torch.tensor([4])},
}


# Every term of the maths at once and those that bend it are checked in every run, the rest with -m slow.
FIRST = ("causal", "window", "softcap", "dropout", "mask")


@pytest.mark.parametrize("feature", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FIRST)) for x in FEATURES])
def test_q_k_and_v(feature: str, backend: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, **there(FEATURES[feature]), return_lse=True, backend=backend)

    check(function, (randn(1, 1, 6, 5), randn(1, 1, 7, 5), randn(1, 1, 7, 3)))


def test_grouped_heads_and_empty_rows(backend: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal=True, return_lse=True, backend=backend)

    check(function, (randn(1, 2, 7, 5), randn(1, 1, 4, 5), randn(1, 1, 4, 6)))


@pytest.mark.parametrize(
    "shape", [(6, 7), *(pytest.param(x, marks=pytest.mark.slow) for x in ((2, 1, 1), (1, 1, 6, 1)))], ids=str
)
def test_bias(shape: tuple[int, ...], backend: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return attention(q, k, v, bias=bias, softcap=2.0, causal=True, return_lse=True, backend=backend)

    check(function, (randn(1, 2, 6, 5), randn(1, 2, 7, 5), randn(1, 2, 7, 3), randn(*shape)))


def test_sinks(backend: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return attention(q, k, v, sinks=sinks, causal=True, return_lse=True, backend=backend)

    check(function, (randn(1, 2, 6, 5), randn(1, 2, 4, 5), randn(1, 2, 4, 3), randn(2)))


def test_everything_at_once(backend: str) -> None:
    slopes = torch.tensor([0.5, 0.25])

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return attention(
            q, k, v, bias=bias, sinks=sinks, softcap=2.0, window=(3, 1), alibi=slopes, dropout_p=0.3, seed=1,
            return_lse=True, backend=backend,
        )  # fmt: skip

    check(function, (randn(1, 2, 6, 5), randn(1, 1, 7, 5), randn(1, 1, 7, 3), randn(7), randn(2)))


@pytest.mark.parametrize(
    "settings", [{"causal": True}, pytest.param({"window": (1, 2), "softcap": 2.0}, marks=pytest.mark.slow)], ids=str
)
def test_packed(settings: dict[str, Any], backend: str) -> None:
    starts_q, starts_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 4, 6, 7])

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return varlen_attention(q, k, v, starts_q, starts_k, 4, 4, sinks=sinks, return_lse=True, backend=backend, **settings)

    check(function, (randn(8, 1, 5), randn(9, 1, 5), randn(9, 1, 3), randn(1)))


def test_score_and_mask_of_the_user(backend: str) -> None:
    from andrea_triton.testing.functors import distance_penalty, distance_penalty_grad, same_document

    documents = torch.tensor([0, 0, 1, 1, 1, 2, 2], dtype=torch.int32)
    score, mask = Score(distance_penalty, distance_penalty_grad, (0.3,)), Mask(same_document, (documents,))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, score=score, mask=mask, softcap=2.0, return_lse=True, backend=backend)

    check(function, (randn(1, 2, 6, 5), randn(1, 2, 7, 5), randn(1, 2, 7, 3)))


def test_merge(backend: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        parts = [attention(q, k[:, :, at], v[:, :, at], return_lse=True, backend=backend) for at in (slice(0, 3), slice(3, 7))]
        return merge_attention(*parts[0], *parts[1])

    check(function, (randn(1, 1, 4, 5), randn(1, 1, 7, 5), randn(1, 1, 7, 3)))
