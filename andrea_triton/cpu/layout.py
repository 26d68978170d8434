"""Where results lie in memory."""

from __future__ import annotations

from torch import Tensor

from andrea_triton.problem import output_shape


def unit_stride(t: Tensor) -> Tensor:
    """t, or a copy of it where its last dim has a stride that PyTorch's fused attention would take for 1."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def room_like(t: Tensor, features: int, packed: bool) -> Tensor:
    """Room for (.., features) in the memory order of t, as launch/run.py allocates it."""
    shape, swapped = output_shape(t, features, packed)
    return t.new_empty(shape).transpose(1, 2) if swapped else t.new_empty(shape)


def laid_out(value: Tensor, t: Tensor, features: int, packed: bool) -> Tensor:
    """value in the memory order and dtype of t, a copy where it has another."""
    _, swapped = output_shape(t, features, packed)
    if value.dtype == t.dtype and (value.transpose(1, 2) if swapped else value).is_contiguous():
        return value
    return room_like(t, features, packed).copy_(value)
