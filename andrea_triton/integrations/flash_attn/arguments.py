"""flash-attn's arguments, in the many forms that callers give them, as this library's."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError
from ..lent_cache import Settings

Result = Tensor | tuple[Tensor, ...]
Number = float | SupportsFloat | Tensor
Integer = int | SupportsIndex | Tensor
Sides = Sequence[Integer | None] | Tensor


def integer(name: str, value: Integer) -> int:
    """A Python, NumPy or tensor integer as an int."""
    try:
        number: Any = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return operator.index(number)
    except TypeError:
        got = f"{name} is {type(value).__name__}"
        raise DTypeError(f"{got}; wanted an integer or a tensor of one; pass int({name})") from None


def real(name: str, value: Number) -> float:
    """A Python, NumPy or tensor number as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        got = f"{name} is {type(value).__name__}"
        raise DTypeError(f"{got}; wanted a number or a tensor of one; pass float({name})") from None


def sides(size: Sides) -> tuple[int | None, int | None]:
    """flash-attn's window with its open sides, the negative ones, as None."""
    entries = len(size) if hasattr(size, "__len__") else 1
    if entries != 2:
        raise ShapeError(f"window_size has {entries} entries; wanted (left, right); write -1 for an open side")
    left, right = (None if side is None else integer("window_size", side) for side in size)
    return None if left is None or left < 0 else left, None if right is None or right < 0 else right


def settled(
    q: Tensor,
    softmax_scale: Number | None,
    causal: bool,
    window_size: Sides,
    softcap: Number | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Settings]:
    """(q, settings): q multiplied by a scale that wants a gradient."""
    if isinstance(softmax_scale, Tensor) and softmax_scale.requires_grad and torch.is_grad_enabled():
        if softmax_scale.numel() != 1:
            got = f"softmax_scale has shape {tuple(softmax_scale.shape)}"
            raise ShapeError(f"{got}; wanted one number; multiply q by a scale per head or feature before the call")
        wide = torch.promote_types(q.dtype, softmax_scale.dtype)
        q, softmax_scale = (q.to(wide) * softmax_scale.to(q.device).reshape(())).to(q.dtype), 1.0
    scale = None if softmax_scale is None else real("softmax_scale", softmax_scale)
    cap = 0.0 if softcap is None else real("softcap", softcap)
    return q, Settings(bool(causal), scale, sides(window_size), cap if cap > 0.0 else None, alibi_slopes)


def drawn(dropout_p: float, q: Tensor) -> Tensor | None:
    """A seed from torch's generator, as `attention` draws its own; None without dropout."""
    if dropout_p == 0.0:
        return None
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


def unpacked(name: str, packed: Tensor, parts: int, wanted: str) -> tuple[Tensor, ...]:
    """Views of q, k, v or k, v."""
    if packed.dim() < 3 or packed.shape[-3] != parts:
        raise ShapeError(f"{name} has shape {tuple(packed.shape)}; wanted {wanted}; stack its parts along the third last dim")
    return packed.unbind(-3)
