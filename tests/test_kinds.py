"""Tensors of other kinds, as every argument: what torch's operators see through works, everything else is refused by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from andrea_triton import DTypeError, attention, scaled_dot_product_attention, varlen_attention

STARTS = torch.tensor([0, 3, 6], dtype=torch.int32)
TERMS = {"alibi": torch.ones(2), "sinks": torch.ones(2), "seed": torch.tensor([1]), "dropout_p": 0.5}
DENSE: dict[str, Any] = {
    **{name: torch.randn(2, 2, 6, 8) for name in "qkv"}, "bias": torch.randn(6, 6), "key_lengths": torch.tensor([6, 6]),
    "mask": torch.ones(6, 6, dtype=torch.bool), **TERMS,
}  # fmt: skip
PACKED: dict[str, Any] = {
    **{name: torch.randn(6, 2, 8) for name in "qkv"}, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, **TERMS, "max_q": 3,
    "max_k": 3,
}  # fmt: skip
TORCHS: dict[str, Any] = {"query": DENSE["q"], "key": DENSE["k"], "value": DENSE["v"], "attn_mask": DENSE["bias"]}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (attention, DENSE), "varlen_attention": (varlen_attention, PACKED),
    "scaled_dot_product_attention": (scaled_dot_product_attention, TORCHS),
}  # fmt: skip


class Same(Tensor):
    """A name, and nothing that torch would do otherwise."""


class Other(Tensor):
    """What torch's functions do on it is its own affair."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def masked(t: Tensor) -> Any:
    from torch.masked import masked_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(t, torch.ones_like(t, dtype=torch.bool))


KINDS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "masked": (masked, r"is a .*MaskedTensor; wanted a plain torch.Tensor; use get_data"),
    "jagged": (lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), "is a nested tensor .* use varlen_attention"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "is a nested tensor .* use varlen_attention"),
    "sparse": (lambda t: t.to_sparse(), r"has layout torch\.sparse_coo; wanted torch.strided"),
    "a class of its own": (lambda t: t.as_subclass(Other), r"is a .*test_kinds\.Other; wanted a plain torch.Tensor; pass what"),
    "not made yet": (
        lambda t: torch.nn.UninitializedParameter(),
        "is a .*UninitializedParameter; wanted a plain torch.Tensor; call",
    ),
    "negated": (torch._neg_view, r"is a view that negates or has no memory; .* \+ 0"),
    "zeros without memory": (
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
        "is a view that negates or has no memory",
    ),
    "none at all": (lambda t: t.tolist(), "is a list; wanted a torch.Tensor"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
def test_refused_by_name(call: str, kind: str) -> None:
    function, given = CALLS[call]
    make, message = KINDS[kind]
    for name, value in given.items():
        if not isinstance(value, Tensor) or (kind == "negated" and not value.is_floating_point()):
            continue  # torch negates no integers in a view
        if kind == "none at all" and name in ("seed", "mask"):
            continue  # which may be other things than a tensor
        with pytest.raises(DTypeError, match=rf"{name}.* {message}"):
            function(**{**given, name: make(value)})


def test_d04_causal_bias_is_no_bias_of_attention() -> None:
    x = DENSE["q"]
    with pytest.raises(DTypeError, match=r"bias is a torch.nn.attention.bias.CausalBias; .* scaled_dot_product_attention"):
        attention(x, x, x, bias=causal_lower_right(6, 6))


def test_a_nested_tensor_of_a_plain_call() -> None:
    """Such a call's problem is kept by its shapes, and this has none."""
    x = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    with pytest.raises(DTypeError, match="q is a nested tensor"):
        attention(x, x, x)


@pytest.mark.parametrize("make", [lambda t: torch.nn.Parameter(t, False), torch.nn.Buffer, lambda t: t.as_subclass(Same)])
@pytest.mark.parametrize("call", CALLS)
def test_what_holds_its_numbers_works(call: str, make: Any) -> None:
    function, given = CALLS[call]
    wanted = function(**given)
    for name, value in given.items():
        if isinstance(value, Tensor):
            assert torch.equal(function(**{**given, name: make(value)}), wanted), name


def test_fake_tensors_work() -> None:
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in DENSE.items()}
        assert attention(**fake).shape == DENSE["q"].shape  # type: ignore[union-attr]
