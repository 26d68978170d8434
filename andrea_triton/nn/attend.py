"""One attention call of a module: with its settings, over a cache, or the naive way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache import Cache
from ..decode import decode_attention
from ..errors import UnsupportedError
from ..functional import attention
from ..spec import Mask, Window, default_scale, make_spec


class Call(NamedTuple):
    """The settings that a module gives to each attention call, named as in `attention`."""

    scale: float | None = None
    window: Window = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    backend: str | None = None
    seed: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    call: Call,
    key_lengths: Tensor | None = None,
    mask: Mask | Tensor | None = None,
) -> Tensor:
    """`attention` with a module's settings, or the naive way where they ask for it.

    Args:
        q, k, v, causal, key_lengths, mask: as in `attention`.
        call: the settings.

    Returns:
        out (B, HQ, M, DV).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`.
    """
    if call.backend == "naive":
        for name, value in (("sinks", call.sinks), ("key_lengths", key_lengths), ("mask", mask)):
            if value is not None:
                raise UnsupportedError(name, "naive", "it is only there to compare with; use backend='reference'")
        return naive_attention(q, k, v, causal, call)
    out = attention(
        q, k, v, causal=causal, scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks,
        key_lengths=key_lengths, mask=mask, dropout_p=call.dropout_p, seed=call.seed, backend=call.backend,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def attend_cache(q: Tensor, cache: Cache, call: Call) -> Tensor:
    """Causal attention of the newest tokens to all that a cache holds. Work grows with the lengths, not with the capacity.

    Args:
        q: (batch, HQ, M, head_dim); row i of sequence b sits at position lengths[b] - M + i. A row before position 0 is padding.
        cache: keys and values, those of the newest tokens included.
        call: the settings.

    Returns:
        out (batch, HQ, M, v_head_dim).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`.
    """
    if torch.is_grad_enabled() and q.requires_grad:
        raise UnsupportedError("a gradient", "a call with a cache", "a cache holds no graph; call it under torch.no_grad()")
    if call.backend != "naive":
        out = decode_attention(
            q, cache, scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks, backend=call.backend
        )
        assert isinstance(out, Tensor)
        return out
    counts = cache.counts
    k, v = cache.keys_values(max(counts))
    if min(counts) == max(counts):
        return attend(q, k, v, True, call)
    return torch.cat([attend(q[b, None], k[b, None, :, :n], v[b, None, :, :n], True, call) for b, n in enumerate(counts)])


def naive_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, call: Call) -> Tensor:
    """Attention as the textbook writes it, holding the M×N matrix: what the fused one is compared with.

    Args:
        q, k, v, causal: as in `attention`.
        call: the settings, without sinks.

    Returns:
        out (B, HQ, M, DV).

    Source:
        arXiv 1706.03762, equation 1.

    Example:
        >>> x = torch.randn(1, 2, 5, 8)
        >>> torch.allclose(naive_attention(x, x, x, True, Call()), attention(x, x, x, causal=True), atol=1e-6)
        True
    """
    spec = make_spec(causal=causal, scale=call.scale, window=call.window, softcap=call.softcap)
    group, M, N = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (default_scale(q.shape[3]) if spec.scale is None else spec.scale)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = torch.arange(N - M, N, device=q.device)[:, None] - torch.arange(N, device=q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if spec.left is not None:
        hidden |= distance > spec.left
    if spec.right is not None:
        hidden |= distance < -spec.right
    empty = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(hidden & ~empty, float("-inf")).softmax(-1).masked_fill(empty, 0.0)
    return nn.functional.dropout(weights, call.dropout_p).to(v.dtype) @ v
