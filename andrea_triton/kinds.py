"""Kinds of tensors: a subclass, or a layout, whose memory is not what the kernels would read is refused by its name."""

from typing import Any

import torch
from torch import Tensor

from andrea_triton.errors import DTypeError

PLAIN = (Tensor, torch.nn.Parameter)
# torch's own wrappers, which an operator reaches as what it can work with.
WRAPPERS = ("AsyncCollectiveTensor", "DTensor", "FakeTensor", "FunctionalTensor")
NESTED = "use varlen_attention on its values() and offsets()"
WAYS = {
    "CausalBias": "give it to scaled_dot_product_attention as attn_mask, or use causal=True and q_start=",
    "MaskedTensor": "use get_data(), and what get_mask() hides as mask= or key_lengths=",
    "UninitializedParameter": "call the lazy module once, or materialize it",
}


def check_kind(name: str, tensor: Any) -> None:
    """Fail unless a tensor's memory holds what it stands for.

    Args:
        name: of the argument, for the message.
        tensor: what was passed.

    Raises:
        DTypeError: it is no tensor; of a subclass with meanings of its own, such as MaskedTensor, CausalBias or a nested tensor;
            sparse, or of another layout without strides; or numbers that torch has not yet written: a view that negates.
    """
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor; use torch.as_tensor({name})")
    kind = type(tensor)
    if tensor.is_nested:
        raise DTypeError(f"{name} is a nested tensor ({kind.__name__}); wanted a torch.Tensor; {NESTED}")
    if kind not in PLAIN and not plain_memory(kind):
        way = WAYS.get(kind.__name__, "pass what it stands for, by to_dense(), dequantize() or whatever its class has")
        raise DTypeError(f"{name} is a {kind.__module__}.{kind.__qualname__}; wanted a plain torch.Tensor; {way}")
    if tensor.layout is not torch.strided:
        way = f"use {name}.to_dense(), or varlen_attention for sequences of many lengths"
        raise DTypeError(f"{name} has layout {tensor.layout}; wanted torch.strided; {way}")
    if not torch.compiler.is_compiling() and (tensor.is_neg() or tensor._is_zerotensor()):
        raise DTypeError(f"{name} is a view that negates or has no memory; wanted the numbers themselves; use {name} + 0")


def plain_memory(kind: type[Tensor]) -> bool:
    """Whether a subclass is one of torch's wrappers, or gives torch's functions and operators no other meaning."""
    if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
        return True
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    ordinary = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
    return function in ordinary and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
