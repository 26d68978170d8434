"""Whether what is appended to a cache fits, and the lengths after it: on the host, and as an operator in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError


def check_room(lengths: Sequence[int], capacity: int) -> None:
    """Fail where a sequence would have more rows than its cache holds."""
    for sequence, length in enumerate(lengths):
        if length > capacity:
            raise ShapeError(
                f"sequence {sequence} would have {length} rows; the cache holds {capacity} per sequence; "
                f"make it with capacity={length} or more, or reset it"
            )


@torch.library.custom_op("andrea_triton::cache_end", mutates_args=())
def end_op(
    lengths: Tensor, rows: Tensor | None, table: Tensor | None, page_size: int, none: int, M: int, capacity: int
) -> Tensor:
    """The lengths after an append, in a graph. Where reading them is free, that is on a CPU, what does not fit is refused.

    Args:
        lengths: (batch,) int32.
        rows: (batch,) int32 rows that are real, None for M.
        table: (batch, pages of a sequence), or None.
        page_size: rows of a page.
        none: what stands in the table in the place of a page.
        M: rows that are appended.
        capacity: most rows of a sequence.

    Raises:
        ShapeError: a number of rows is wrong, or the cache is too small.
    """
    end = lengths + (M if rows is None else rows)
    if lengths.is_cpu:
        if rows is not None and bool(((rows < 0) | (rows > M)).any()):
            raise ShapeError(f"rows is {rows.tolist()}; wanted numbers from 0 to {M}; None means all {M}")
        check_room(end.tolist(), capacity)
        if table is not None:
            held = (table != none).sum(1) * page_size
            if bool((end > held).any()):
                way_out = "call cache.reserve(lengths) before a compiled call: pages are given on the host"
                raise ShapeError(f"sequences would have {end.tolist()} rows; their pages hold {held.tolist()}; {way_out}")
    return end


@end_op.register_fake
def _(lengths: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(lengths)
