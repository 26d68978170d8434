"""What flash-attn's functions mean, written out from its documentation."""

import torch
from torch import Tensor


def define(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    kept: Tensor | None = None, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of (B, T, H, D) tensors, in their dtype. kept: (B, H, M, N) bool, the weights that dropout keeps."""
    M, N, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(M)[:, None] + N - M - torch.arange(N)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(q.dtype).expand(q.shape[0], -1)
        scores = scores - slopes[:, :, None, None] * distance.abs()
    left, right = window_size
    hidden = torch.zeros(M, N, dtype=torch.bool)
    hidden |= (distance < 0) & causal
    hidden |= (distance > left) & (left >= 0)
    hidden |= (-distance > right) & (right >= 0)
    lse = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).masked_fill(hidden, 0.0)
    if kept is not None:
        weights = weights * kept / (1.0 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse
