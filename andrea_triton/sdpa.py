"""torch's scaled_dot_product_attention, name, signature and semantics, by this library."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ShapeError
from .functional import attention


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention, signature and semantics, by this library.

    Args:
        query: (..., HQ, L, E); leading dims broadcast, and may be missing.
        key: (..., HKV, S, E), dtype and device of query.
        value: (..., HKV, S, EV).
        attn_mask: broadcastable to (..., HQ, L, S): bool, True where the query may see the key, or float, added to the scores.
        dropout_p: probability that a weight is dropped; the seed comes from torch's generator.
        is_causal: query i sees keys 0 .. i (top-left alignment); not together with attn_mask.
        scale: factor of q·k; None means 1/sqrt(E).
        enable_gqa: let HQ be a multiple of HKV.

    Returns:
        (..., HQ, L, EV).

    Raises:
        ShapeError: also when attn_mask and is_causal come together, or the head counts differ without enable_gqa.
        DTypeError: a dtype or device is wrong.

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
    q, k, v, lead = _four_dims(query, key, value, enable_gqa)
    bias = keep = None
    if attn_mask is not None:
        attn_mask = _four_dim_mask(attn_mask, lead, (query.shape[-2], key.shape[-2]))
        keep, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    out = attention(q, k, v, causal=is_causal, q_start=0, scale=scale, bias=bias, mask=keep, dropout_p=dropout_p)
    assert isinstance(out, Tensor)
    return out.reshape(*lead, *out.shape[-2:])


def _four_dims(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """(B, H, T, D) views of tensors with any leading dims, and the leading dims of the result."""
    tensors = (query, key, value)
    for name, t in zip(("query", "key", "value"), tensors, strict=True):
        if t.dim() < 2:
            raise ShapeError(f"{name} has {t.dim()} dims; wanted (..., H, L, E); unsqueeze it")
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in tensors]
    if heads[0] != heads[1] and heads[1] != 1 and not enable_gqa:
        raise ShapeError(f"key has {heads[1]} heads; query has {heads[0]}; wanted as many, or pass enable_gqa=True")
    outer = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))
    if not enable_gqa:
        heads = [max(heads)] * 3
    q, k, v = (t.expand(*outer, h, *t.shape[-2:]).reshape(-1, h, *t.shape[-2:]) for t, h in zip(tensors, heads, strict=True))
    lead = (*outer, heads[0]) if max(t.dim() for t in tensors) > 2 else ()
    return q, k, v, lead


def _four_dim_mask(mask: Tensor, lead: tuple[int, ...], sizes: tuple[int, int]) -> Tensor:
    """The mask against (B, H, L, S): a view where the leading dims are at most two."""
    if len(lead) <= 2 or mask.dim() <= 3:
        return mask
    return mask.expand(*lead, *sizes).reshape(-1, lead[-1], *sizes)
