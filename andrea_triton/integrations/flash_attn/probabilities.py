"""The weights that flash-attn shows with dropout: negative where one was dropped."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...dropout import dropout_mask
from ...functional import attention_weights
from ..lent_cache import Settings


@torch.no_grad()
def signed_weights(q: Tensor, k: Tensor, settings: Settings, dropout_p: float, seed: Tensor, *, first_batch: int = 0) -> Tensor:
    """The matrix of weights before dropout, negative where the call with this seed dropped one: O(M·N) memory.

    Args:
        q: (B, M, HQ, D).
        k: (B, N, HKV, D).
        settings: of the scores.
        dropout_p: probability that a weight is dropped.
        seed: of the dropout, int64 (1,).
        first_batch: number of the first batch entry.

    Returns:
        (B, HQ, M, N) in the dtype of q.
    """
    (B, M, HQ), N = q.shape[:3], k.shape[1]
    weights = attention_weights(q.transpose(1, 2), k.transpose(1, 2), **settings._asdict())
    q_pos, k_pos = torch.arange(M, device=q.device) + N - M, torch.arange(N, device=q.device)
    kept = dropout_mask(seed, dropout_p, B, HQ, q_pos, k_pos, q.device, first_batch=first_batch)
    return torch.where(kept, weights, -weights)


@torch.no_grad()
def signed_weights_packed(
    q: Tensor, k: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int], settings: Settings, dropout_p: float,
    seed: Tensor,
) -> Tensor:  # fmt: skip
    """signed_weights of every packed sequence, each in the upper left corner of its matrix.

    Args:
        q: (total_q, HQ, D).
        k: (total_k, HKV, D).
        starts: cu_seqlens_q and cu_seqlens_k.
        longest: max_seqlen_q and max_seqlen_k.
        settings, dropout_p, seed: as in `signed_weights`.

    Returns:
        (sequences, HQ, max_seqlen_q, max_seqlen_k) in the dtype of q, 0 outside.
    """
    pairs = zip(*(pairwise(s.tolist()) for s in starts), strict=True)
    matrices = q.new_zeros(starts[0].shape[0] - 1, q.shape[1], *longest)
    for s, ((a, b), (c, d)) in enumerate(pairs):
        slopes = settings.alibi
        own = settings._replace(alibi=slopes[s : s + 1] if slopes is not None and slopes.dim() == 2 else slopes)
        found = signed_weights(q[None, a:b], k[None, c:d], own, dropout_p, seed, first_batch=s)
        matrices[s, :, : b - a, : d - c] = found[0]
    return matrices
