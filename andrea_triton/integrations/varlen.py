"""`torch.nn.attention.varlen` by this library: the same names, signatures and meanings, so that code changes one import.

    from andrea_triton.integrations.varlen import varlen_attn        # was: from torch.nn.attention.varlen import varlen_attn

Beyond torch's: any float dtype and head dim, values of another head dim, every device, and gradients through seqused_k and pages.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import ShapeError
from ..functional import varlen_attention
from .lent_cache import Settings, attend, gathered

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


class AuxRequest(NamedTuple):
    """What to return beside the output.

    Args:
        lse: the log-sum-exp of the scores.
    """

    lse: bool = False


class _Aux(Protocol):
    """An AuxRequest, this one or torch's."""

    @property
    def lse(self) -> bool: ...


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: _Aux | None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of sequences that lie one after the other, or whose keys lie in pages.

    Where every sequence has max_q queries and no gradient is asked for, pages are read in their place, the keys split over
    programs; else their rows, and those that seqused_k leaves of others, are gathered first.

    Args:
        query: (T_q, HQ, D).
        key: (T_k, HKV, D), or with block_table (pages, page size, HKV, D).
        value: (T_k, HKV, DV), or pages likewise.
        cu_seq_q: (sequences + 1,) int32, where each sequence's queries start, and the end of the last.
        cu_seq_k: the same for the keys; None where block_table says where they are.
        max_q: queries of the longest sequence.
        max_k: keys of the longest sequence.
        return_aux: AuxRequest(lse=True) asks for (out, lse).
        scale: factor of q·k; None means 1/sqrt(D).
        window_size: (left, right) keys that a query sees beside its own position, -1 for all; (-1, 0) is causal. The last query
            of a sequence sits at its last key.
        enable_gqa: HQ may be a multiple of HKV.
        seqused_k: (sequences,) int32, how many of its keys each sequence has; None means all.
        block_table: (sequences, pages of a sequence) int32; needs seqused_k.
        num_splits: parts that the keys are split into where pages are read in their place; None means parts
            of 512. With None and 1 a row's bits depend on its own sequence alone. Elsewhere nothing is split.

    Returns:
        out (T_q, HQ, DV), or (out, lse) with lse (HQ, T_q) in fp32 (fp64 for fp64).

    Raises:
        ValueError: as torch, where the heads do not fit (a ShapeError, which is a ValueError).
        ShapeError, DTypeError, UnsupportedError: as `varlen_attention`; block_table without seqused_k; no cu_seq_k without it.

    Source:
        torch.nn.attention.varlen of PyTorch 2.13.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> out, lse = varlen_attn(x, x, x, starts, starts, 3, 3, window_size=(-1, 0), return_aux=AuxRequest(lse=True))
        >>> out.shape, lse.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 5]))
    """
    _check(query, key, cu_seq_k, enable_gqa, seqused_k, block_table)
    left, right = (None if side < 0 else side for side in window_size)
    settings = Settings(False, scale, (left, right), None, None)
    if block_table is not None and seqused_k is not None:
        B, wants_gradient = block_table.shape[0], any(x.requires_grad for x in (query, key, value))
        if query.shape[0] == B * max_q and not (torch.is_grad_enabled() and wants_gradient):
            rows = query.unflatten(0, (B, max_q))
            out, lse = attend(rows, key, value, seqused_k, block_table, None, settings, num_splits or 0)
            out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
            return (out, lse) if return_aux is not None and return_aux.lse else out
        key, value, cu_seq_k = gathered(key, value, torch.zeros_like(seqused_k), seqused_k, block_table, max_k)
    elif seqused_k is not None and cu_seq_k is not None:
        one_page = torch.zeros_like(seqused_k)[:, None]
        lengths = torch.minimum(seqused_k, cu_seq_k.diff())
        key, value, cu_seq_k = gathered(key[None], value[None], cu_seq_k[:-1], lengths, one_page, max_k)
    assert cu_seq_k is not None
    out, lse = varlen_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **settings._asdict(), return_lse=True)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_attn_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    *, return_aux: _Aux | None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`varlen_attn` into a tensor that is given; no gradient.

    Args:
        out: (T_q, HQ, DV), written to.
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size, enable_gqa, seqused_k, block_table,
            num_splits: as in `varlen_attn`.

    Returns:
        out, or (out, lse).

    Raises:
        ValueError, ShapeError, DTypeError, UnsupportedError: as `varlen_attn`.

    Source:
        torch.nn.attention.varlen of PyTorch 2.13.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> out = torch.empty_like(x)
        >>> varlen_attn_out(out, x, x, x, starts, starts, 3, 3) is out
        True
    """
    with torch.no_grad():
        found, lse = varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=AuxRequest(lse=True), scale=scale,
            window_size=window_size, enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table, num_splits=num_splits,
        )  # fmt: skip
        if out.shape != found.shape or out.dtype != found.dtype:
            got = f"out is {tuple(out.shape)} of {out.dtype}"
            raise ShapeError(f"{got}; wanted {tuple(found.shape)} of {found.dtype}; make it with that shape and dtype")
        out.copy_(found)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def _check(
    query: Tensor, key: Tensor, cu_seq_k: Tensor | None, enable_gqa: bool, seqused_k: Tensor | None, table: Tensor | None
) -> None:
    """What `varlen_attention` does not refuse by itself."""
    wanted = 3 if table is None else 4
    if query.dim() != 3 or key.dim() != wanted:
        raise ShapeError(f"query has {query.dim()} dims and key {key.dim()}; wanted 3 and {wanted}; see the shapes in the text")
    heads, kv_heads = query.shape[1], key.shape[-2]
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        wanted_heads = "a multiple with enable_gqa=True, or as many"
        raise ShapeError(f"query has {heads} heads and key {kv_heads}; wanted {wanted_heads}; pass enable_gqa=True for groups")
    if table is not None and seqused_k is None:
        raise ShapeError(
            "block_table came without seqused_k; wanted the keys that each sequence has; pass them, (sequences,) int32"
        )
    if table is None and cu_seq_k is None:
        raise ShapeError("cu_seq_k is None without block_table; wanted where each sequence's keys start; pass it")
