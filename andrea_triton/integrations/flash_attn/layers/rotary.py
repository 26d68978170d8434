"""flash-attn's module of this name: the rotary embedding, with a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import ShapeError
from ..arguments import Integer, integer


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Integer = 0,
    cu_seqlens: Tensor | None = None, max_seqlen: Integer | None = None,
) -> Tensor:  # fmt: skip
    """Turn the first R features of every row by its position.

    Args:
        x: (B, T, H, D), or with cu_seqlens (total, H, D).
        cos: (positions, R / 2) float, R at most D.
        sin: likewise.
        interleaved: features 2i and 2i + 1 are a pair, not i and i + R / 2.
        inplace: write the result into x, and return x.
        seqlen_offsets: position of the first row: an int, or (B,) integers, one for each sequence.
        cu_seqlens: (B + 1,) integers, where each packed sequence starts, and the end of the last; rows after it stay.
        max_seqlen: taken; the library has no use for it.

    Returns:
        The shape and dtype of x, turned in at least fp32; differentiable by x, cos and sin.

    Raises:
        ShapeError: R is over D, cos and sin differ, seqlen_offsets fit no batch, or (on a CPU) a position lies outside of cos.

    Source:
        flash-attn 2.8, layers.rotary.apply_rotary_emb; arXiv 2104.09864, equation 34.

    Example:
        >>> angles = torch.tensor([[0.0], [torch.pi / 2]])
        >>> x = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> apply_rotary_emb(x, angles.cos(), angles.sin()).round().flatten().tolist()
        [1.0, 0.0, -0.0, 1.0]
    """
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor) and seqlen_offsets.numel() != 1:
        first = seqlen_offsets.long()
    else:
        first = torch.full((sequences,), integer("seqlen_offsets", seqlen_offsets), device=x.device)
    if first.shape != (sequences,):
        got = f"seqlen_offsets has shape {tuple(first.shape)}"
        raise ShapeError(f"{got}; wanted an int or ({sequences},), one for each sequence; slice or expand it")
    if cu_seqlens is None:
        at = first[:, None] + torch.arange(x.shape[1], device=x.device)
        turned = turn(x, at, cos, sin, interleaved)
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].to(rows.dtype).contiguous(), rows, right=True)
        real = sequence < sequences
        sequence = sequence.clamp(max=max(sequences - 1, 0))
        at = rows - cu_seqlens.long()[sequence] + first[sequence]
        turned = turn(x, torch.where(real, at, 0), cos, sin, interleaved)
        turned = torch.where(real[:, None, None], turned, x)
    return x.copy_(turned) if inplace else turned


def turn(x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotary embedding of the first features of rows at given positions.

    Args:
        x: (..., H, D).
        places: (...) integer positions.
        cos: (positions, R / 2) float.
        sin: likewise.
        interleaved: features 2i and 2i + 1 are a pair, not i and i + R / 2.

    Returns:
        (..., H, D), dtype of x, turned in at least fp32.

    Raises:
        ShapeError: as `apply_rotary_emb`.

    Source:
        arXiv 2104.09864, equation 34.
    """
    size = 2 * cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or size > x.shape[-1]:
        got = f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ShapeError(f"{got}; wanted (positions, R / 2) twice with R at most {x.shape[-1]}, the features; slice them")
    if places.is_cpu and places.numel() and not 0 <= int(places.min()) <= int(places.max()) < cos.shape[0]:
        got = f"the rows are at positions {int(places.min())} to {int(places.max())}"
        raise ShapeError(f"{got}; wanted 0 to {cos.shape[0] - 1}, the rows of cos and sin; make them longer")
    dtype = torch.promote_types(x.dtype, torch.float32)
    c, s = cos[places][..., None, :].to(dtype), sin[places][..., None, :].to(dtype)
    pairs = x[..., :size].to(dtype)
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    turned = [a * c - b * s, a * s + b * c]
    both = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([both.to(x.dtype), x[..., size:]], -1)
