"""The attention of one layer within continuous batching: packed queries, and the keys that transformers' paged cache gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...functional import varlen_attention
from .attend import attend
from .models import CONTINUOUS


def attend_continuous(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`attend`, and with a `read_index` among the keywords that of the requests which continuous batching has packed together:
    each sees its own keys, those before it in the cache included, and none after its own position.

    Args:
        module: the layer.
        query: (B, HQ, M, D); in continuous batching (1, HQ, tokens of all requests, D).
        key: (B, HKV, N, D), what the cache gave.
        value: (B, HKV, N, DV).
        attention_mask: as in `attend`; in continuous batching it is not needed.
        dropout, scaling, sliding_window, softcap, s_aux: as in `attend`.
        others: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of the requests; and as in `attend`.

    Returns:
        out (B, M, HQ, DV) contiguous, and None.

    Raises:
        UnsupportedError: as `attend`; also pages given in the place of keys.

    Source:
        arXiv 2309.06180 (paged caches); ContinuousMixin.generate_batch in the documentation of transformers.

    Example:
        >>> x, starts = torch.randn(1, 2, 5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 3, "max_length_k": 3, "read_index": []}
        >>> attend_continuous(torch.nn.Identity(), x, x, x, None, **packed)[0].shape
        torch.Size([1, 5, 2, 8])
    """
    settings: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    if "read_index" not in others:
        return attend(module, query, key, value, attention_mask, dropout, **settings, **others)
    if others.get("block_table") is not None or others.get("position_bias") is not None:
        what = "block_table" if others.get("block_table") is not None else "position_bias"
        raise UnsupportedError(what, f"{CONTINUOUS} in continuous batching", "set max_blocks_per_request=0, or use 'sdpa'")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attention(
        q, k, v, others["cu_seq_lens_q"], others["cu_seq_lens_k"], int(others["max_length_q"]), int(others["max_length_k"]),
        causal=True, scale=scaling, window=sliding_window, softcap=softcap, dropout_p=dropout,
        sinks=None if s_aux is None else s_aux.to(torch.promote_types(s_aux.dtype, q.dtype)),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None].contiguous(), None
