"""The attention of one layer, as transformers calls it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...functional import attention, varlen_attention
from .masks import BandMask, sequence_of
from .models import NAME

# What models hand down to attention and that changes nothing in it.
WITHOUT_EFFECT = {
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it.

    A mask says everything about who sees whom. Without one it is as in transformers' own "sdpa": a causal module's first query
    sees the first key, a single query sees all keys.

    Args:
        module: the layer; its is_causal counts where the keyword is absent.
        query: (B, HQ, M, D).
        key: (B, HKV, N, D).
        value: (B, HKV, N, DV).
        attention_mask: None, a mask of `make_mask`, or (B, 1 or HQ, M, N): bool, True where the query may see the key, or float,
            added to the scores.
        dropout: probability that a weight is dropped.
        scaling: factor of q·k; None means 1/sqrt(D).
        is_causal: whether a query sees no later key, where there is no mask.
        sliding_window: keys that a query sees, its own included, where there is no mask.
        softcap: bound of the scores, or None.
        s_aux: (HQ,) sinks, or None.
        position_bias: (1 or B, HQ, M, N) float, added to the scores, or None.
        cu_seq_lens_q: (sequences + 1,) int32 starts of the sequences packed in a batch of one; each of them sees itself alone,
            and of itself what the mask, its positions counted through the pack, lets be seen.
        cu_seq_lens_k: the same for the keys.
        max_length_q: rows of the longest sequence.
        max_length_k: the same for the keys.
        others: what models hand down beside that.

    Returns:
        out (B, M, HQ, DV) contiguous, and None: the weights are never made.

    Raises:
        UnsupportedError: a keyword or a form of mask that is not known here, it is named; or the weights are asked for.

    Source:
        AttentionInterface in the documentation of transformers.

    Example:
        >>> layer, x = torch.nn.Identity(), torch.randn(1, 2, 5, 8)
        >>> out, weights = attend(layer, x, x, x, None, is_causal=True)
        >>> out.shape, weights is None
        (torch.Size([1, 5, 2, 8]), True)
    """
    _refuse_unknown(others)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    sinks = None if s_aux is None else s_aux.to(torch.promote_types(s_aux.dtype, query.dtype))
    seen = _seen(attention_mask, causal, sliding_window, query.shape[2])
    bias = seen.bias if position_bias is None else position_bias if seen.bias is None else position_bias + seen.bias
    keep, packs = seen.keep, seen.packs
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is None or max_length_q is None or max_length_k is None or query.shape[0] != 1:
            wanted = "wanted also cu_seq_lens_k, max_length_q and max_length_k, and a batch of one; or pass attention_mask"
            raise UnsupportedError("cu_seq_lens_q", NAME, wanted)
        told = _Packs(cu_seq_lens_q, cu_seq_lens_k, int(max_length_q), int(max_length_k))
        packs = told if packs is None else told.cut_by(packs)
    if packs is not None and keep is None and bias is None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        packed = varlen_attention(
            q, k, v, *packs, causal=seen.causal, scale=scaling, window=seen.window, softcap=softcap, sinks=sinks,
            dropout_p=dropout,
        )  # fmt: skip
        assert isinstance(packed, Tensor)
        return packed.unflatten(0, (query.shape[0], query.shape[2])).contiguous(), None
    if packs is not None:
        rows, columns = (sequence_of(x, y.shape[0], y.shape[2]) for x, y in ((packs.q, query), (packs.k, key)))
        together = rows[:, None, :, None] == columns[:, None, None, :]
        _refuse_chunks(module, attention_mask, together)
        keep = together if keep is None else keep & together
    out = attention(
        query, key, value, causal=seen.causal, scale=scaling, window=seen.window, q_start=seen.q_start, softcap=softcap,
        bias=bias, sinks=sinks, mask=keep, dropout_p=dropout,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(others: dict[str, Any]) -> None:
    """Name what a model handed down and is not known here, and a request for the weights, however it was made."""
    if others.get("output_attentions") or (not torch.compiler.is_compiling() and _collects_weights()):
        raise UnsupportedError("output_attentions", NAME, "the weights are never made; use attn_implementation='eager'")
    for name, given in others.items():
        if name not in WITHOUT_EFFECT and given is not None and given is not False:
            raise UnsupportedError(name, NAME, "it is not known here; leave it out, or use attn_implementation='eager'")


def _collects_weights() -> bool:
    """Whether transformers is listening for the weights of the forward pass under way: many models don't hand that down."""
    if "transformers" not in sys.modules:
        return False
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    return collected is not None and any("attentions" in kind for kind in collected)


def _refuse_chunks(module: torch.nn.Module, mask: Tensor | None, together: Tensor) -> None:
    """A mask of chunks that run on through the sequences: in each of them they would not start at its first token."""
    chunked = getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None
    if chunked and mask is not None and mask.dtype == torch.bool and not torch.compiler.is_compiling():
        if bool((mask & ~together).any()):
            raise UnsupportedError(
                "cu_seq_lens_q", f"{NAME} with chunks", "pass also position_ids that start at 0 in each sequence"
            )


class _Packs(NamedTuple):
    """Where packed sequences start, as `varlen_attention` takes it."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int

    def cut_by(self, other: _Packs) -> _Packs:
        """The starts of both."""
        q, k = (torch.cat((a.to(b), b)).unique() for a, b in ((other.q, self.q), (other.k, self.k)))
        return _Packs(q, k, min(self.longest_q, other.longest_q), min(self.longest_k, other.longest_k))


class _Seen(NamedTuple):
    """Who sees whom, in the words of `attention`."""

    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    q_start: int | None = None
    keep: Tensor | None = None
    bias: Tensor | None = None
    packs: _Packs | None = None


def _seen(mask: Tensor | None, causal: bool, sliding_window: int | None, queries: int) -> _Seen:
    """What a mask, or the lack of one, lets be seen."""
    if mask is None:
        return _Seen(causal, sliding_window, 0 if queries > 1 else None)
    if isinstance(mask, BandMask):
        keep = None if mask.keys is None else mask.keys[:, None, None, :]
        window = None if mask.left is None and mask.right in (None, 0) else (mask.left, mask.right)
        packs = None if mask.starts is None else _Packs(mask.starts, mask.starts, mask.longest, mask.longest)
        return _Seen(causal=mask.right == 0, window=window, q_start=mask.start, keep=keep, packs=packs)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
        return _Seen(keep=mask)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.is_floating_point():
        return _Seen(bias=mask)
    got = f"{mask.dim()}-D {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError("attention_mask", NAME, f"got {got}; wanted None, or bool or float (B, 1 or H, M, N)")
