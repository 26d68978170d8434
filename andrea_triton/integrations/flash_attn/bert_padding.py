"""flash-attn's module of this name: padded batches to packed rows, and back. Everything has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ShapeError


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask names, one after the other. Waits for a GPU.

    Args:
        hidden_states: (B, T, ...).
        attention_mask: (B, T) bool or integer, not 0 where a row is used.
        unused_mask: (B, T) likewise, rows that are kept though nobody uses them; None for none.

    Returns:
        rows (total, ...); indices (total,) int64, where they were in the flattened batch; cu_seqlens (B + 1,) int32; the number
        of rows of the longest sequence, an int; and (B,) int32 rows in use.

    Raises:
        ShapeError: a mask has another shape than the batch.

    Source:
        flash-attn 2.8, bert_padding.unpad_input.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> rows, indices, starts, longest, used = unpad_input(torch.randn(2, 3, 4), mask)
        >>> indices.tolist(), starts.tolist(), longest, used.tolist()
        ([0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            wanted = f"wanted (B, T) = {tuple(hidden_states.shape[:2])}, as hidden_states"
            raise ShapeError(f"{name} has shape {tuple(mask.shape)}; {wanted}; slice or expand it")
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, longest, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Rows back at their places in a padded batch, with zeros elsewhere.

    Args:
        hidden_states: (total, ...).
        indices: (total,) integers, the places in the flattened batch, each once.
        batch: B.
        seqlen: T.

    Returns:
        (B, T, ...).

    Raises:
        ShapeError: there are not as many indices as rows.

    Source:
        flash-attn 2.8, bert_padding.pad_input.

    Example:
        >>> pad_input(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 3]), 2, 2).flatten().tolist()
        [1.0, 0.0, 0.0, 2.0]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor by their numbers.

    Args:
        input: (rows, ...).
        indices: (n,) integers.

    Returns:
        (n, ...).

    Source:
        flash-attn 2.8, bert_padding.index_first_axis.

    Example:
        >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).flatten().tolist()
        [3.0, 1.0]
    """
    return input[indices.long()]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros with rows at their places: index_first_axis the other way.

    Args:
        values: (n, ...).
        indices: (n,) integers, each once.
        first_axis_dim: rows of the result.

    Returns:
        (first_axis_dim, ...).

    Raises:
        ShapeError: there are not as many indices as rows.

    Source:
        flash-attn 2.8, bert_padding.index_put_first_axis.

    Example:
        >>> index_put_first_axis(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), 3).flatten().tolist()
        [2.0, 0.0, 1.0]
    """
    if indices.shape != values.shape[:1]:
        wanted = f"wanted ({values.shape[0]},), one for each row"
        raise ShapeError(f"indices has shape {tuple(indices.shape)}; {wanted}; pass those that unpad_input gave")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices.long(),), values)
