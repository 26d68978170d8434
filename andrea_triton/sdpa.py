"""torch's scaled_dot_product_attention, name, signature and semantics, by this library."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import DTypeError, ShapeError
from .functional import attention
from .kinds import check_kind


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0, is_causal: bool = False,
    scale: float | Tensor | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention, signature and semantics, by this library.

    Args:
        query: (..., HQ, L, E); leading dims broadcast, and may be missing.
        key: (..., HKV, S, E), dtype and device of query.
        value: (..., HKV, S, EV).
        attn_mask: broadcastable to (..., HQ, L, S): bool, True where the query may see the key, or float32 or query's dtype,
            added to the scores; or a torch.nn.attention.bias.CausalBias.
        dropout_p: probability that a weight is dropped; the seed comes from torch's generator.
        is_causal: query i sees keys 0 .. i (top-left alignment); not together with attn_mask.
        scale: factor of q·k, a number or a tensor of no dims; None means 1/sqrt(E).
        enable_gqa: let HQ be a multiple of HKV; key and value may then differ in their heads.

    Returns:
        (..., HQ, L, EV).

    Raises:
        ShapeError: also when attn_mask and is_causal come together, or the head counts differ without enable_gqa.
        DTypeError: a dtype or device is wrong, or an argument is a nested tensor (which varlen_attention takes, as its values
            and offsets), or sparse, or of another class that torch's operators do not see through.

    Source:
        The documentation of torch.nn.functional.scaled_dot_product_attention.

    Example:
        >>> x = torch.randn(2, 3, 5, 8)
        >>> wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> torch.allclose(scaled_dot_product_attention(x, x, x), wanted, atol=1e-5)
        True
    """
    if attn_mask is not None and is_causal:
        raise ShapeError("attn_mask and is_causal=True came together; wanted one of them; put the causal part into attn_mask")
    q_start: int | None = 0
    if type(attn_mask).__name__ == "CausalBias":  # by name: its module takes seconds to import
        is_causal, q_start, attn_mask = True, _first_position(attn_mask, query, key), None
    q, k, v, lead = _four_dims(query, key, value, enable_gqa)
    bias = keep = None
    if attn_mask is not None:
        attn_mask = _four_dim_mask(attn_mask, query, lead, (query.shape[-2], key.shape[-2]))
        keep, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    factor, dropout_p = _number("scale", scale), _number("dropout_p", dropout_p)
    if q.shape[-1] == 0:  # no features: all scores are 0, as with one feature that is 0
        q, k, factor = pad(q, (0, 1)), pad(k, (0, 1)), 1.0
    features = v.shape[-1]
    v = pad(v, (0, 1)) if features == 0 else v
    all_dropped = dropout_p == 1.0
    out = attention(
        q,
        k,
        v,
        causal=is_causal,
        q_start=q_start,
        scale=factor,
        bias=bias,
        mask=keep,
        dropout_p=0.0 if all_dropped else dropout_p,
    )
    assert isinstance(out, Tensor)
    out = out * 0.0 if all_dropped else out
    return out[..., :features].reshape(*lead, query.shape[-2], features)


def _first_position(bias: Any, query: Tensor, key: Tensor) -> int | None:
    """q_start of a torch.nn.attention.bias.CausalBias. Like torch, this reads its sizes only where they matter."""
    if bias.seq_len_q == bias.seq_len_kv or bias.variant.name == "UPPER_LEFT":
        return 0
    if (bias.seq_len_q, bias.seq_len_kv) != (query.shape[-2], key.shape[-2]):
        got = f"attn_mask is causal_lower_right({bias.seq_len_q}, {bias.seq_len_kv})"
        raise ShapeError(f"{got}; wanted {query.shape[-2]} queries and {key.shape[-2]} keys; make it with these")
    return None


def _number(name: str, value: Any) -> Any:
    """A number of numpy's, or a tensor of no dims, as the number that it is, for torch takes these too."""
    if isinstance(value, Tensor):
        if value.dim() != 0:
            got = f"{name} is a tensor of shape {tuple(value.shape)}"
            raise DTypeError(f"{got}; wanted a number or a tensor of no dims; pass one element")
        if value.requires_grad:
            raise DTypeError(f"{name} requires a gradient, and gets none here; fold it into query or value, and pass a number")
    return float(value) if isinstance(value, Tensor | Real) else value


def _four_dims(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """(B, H, T, D) views of tensors with any leading dims, and the leading dims of the result."""
    tensors: tuple[Tensor, ...] = (query, key, value)
    for name, t in zip(("query", "key", "value"), tensors, strict=True):
        check_kind(name, t)
        if t.dim() < 2:
            raise ShapeError(f"{name} has {t.dim()} dims; wanted (..., H, L, E); unsqueeze it")
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in tensors]
    if enable_gqa:
        tensors, heads = _as_many_values(tensors, heads)
    elif any(h not in (1, max(heads)) for h in heads):
        names = "query, key and value have {}, {} and {} heads".format(*heads)
        raise ShapeError(f"{names}; wanted as many, or 1; pass enable_gqa=True for groups of query heads")
    else:
        heads = [0 if 0 in heads else max(heads)] * 3
    outer = _broadcast(tensors)
    batch = math.prod(outer)
    q, k, v = (t.expand(*outer, h, *t.shape[-2:]).reshape(batch, h, *t.shape[-2:]) for t, h in zip(tensors, heads, strict=True))
    return q, k, v, (*outer, heads[0]) if max(t.dim() for t in tensors) > 2 else ()


def _as_many_values(tensors: tuple[Tensor, ...], heads: list[int]) -> tuple[tuple[Tensor, ...], list[int]]:
    """The tensors of grouped heads, and how many these are: where key and value differ, which torch allows, each repeated to the
    query's heads."""
    if heads[1] == heads[2]:
        return tensors, heads
    if 0 in heads or heads[0] % heads[1] or heads[0] % heads[2]:
        got = "query, key and value have {}, {} and {} heads".format(*heads)
        raise ShapeError(f"{got}; wanted divisors of the query's; repeat or slice heads")
    repeated = (t.repeat_interleave(heads[0] // h, -3) if t.dim() > 2 else t for t, h in zip(tensors, heads, strict=True))
    return tuple(repeated), [heads[0]] * 3


def _broadcast(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The dims before the heads, broadcast.

    Raises:
        ShapeError: they do not.
    """
    try:
        return tuple(torch.broadcast_shapes(*(t.shape[:-3] for t in tensors)))
    except RuntimeError as error:
        shapes = "query, key and value have shapes {}, {} and {}".format(*(tuple(t.shape) for t in tensors))
        raise ShapeError(f"{shapes}; wanted leading dims that broadcast; use dims of size 1, or expand") from error


def _four_dim_mask(mask: Tensor, query: Tensor, lead: tuple[int, ...], sizes: tuple[int, int]) -> Tensor:
    """The mask against (B, H, L, S), of torch's dtypes: a view where the leading dims are at most two."""
    check_kind("attn_mask", mask)
    cast = torch.is_autocast_enabled(query.device.type)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not (cast and mask.is_floating_point()):
        raise DTypeError(f"attn_mask is {mask.dtype}; wanted torch.bool, torch.float32 or {query.dtype}, as query; cast it")
    if len(lead) <= 2 or mask.dim() <= 3:
        return mask
    try:
        return mask.expand(*lead, *sizes).reshape(math.prod(lead[:-1]), lead[-1], *sizes)
    except RuntimeError as error:
        wanted = (*lead, *sizes)
        raise ShapeError(f"attn_mask has shape {tuple(mask.shape)}; wanted one that broadcasts to {wanted}; slice it") from error
