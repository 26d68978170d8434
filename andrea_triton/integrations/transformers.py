"""Hugging Face transformers: attn_implementation="andrea_triton", through the library's own two registries."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import UnsupportedError
from ..functional import attention, varlen_attention

NAME = "andrea_triton"

# What models hand down to attention and that changes nothing in it.
WITHOUT_EFFECT = {
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


class BandMask(Tensor):
    """A bool mask (B, 1, M, N) that is kept as what it means, in O(N): a band of positions, and the keys that are padding.

    `attend` reads the band. A model that changes its mask, or looks into it, gets the whole of it by that very operation.

    Args:
        shape: (B, 1, M, N).
        device: of the model's tensors.
        start: position of query 0, key 0 being at 0.
        left: keys seen before the query's position, None for all.
        right: keys seen after it, None for all.
        keys: (B, N) bool, False where the key is padding; None where no key is.

    Example:
        >>> mask = BandMask((1, 1, 2, 3), torch.device("cpu"), start=1, left=None, right=0, keys=None)
        >>> mask.shape, (~mask).tolist()
        (torch.Size([1, 1, 2, 3]), [[[[False, False, True], [False, False, False]]]])
    """

    start: int
    left: int | None
    right: int | None
    keys: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, start: int, left: int | None, right: int | None, keys: Tensor | None
    ) -> BandMask:
        """A tensor without memory of its own."""
        mask: BandMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.start, mask.left, mask.right, mask.keys = start, left, right, keys
        return mask

    def __repr__(self) -> str:  # type: ignore[override]
        """The band, not the matrix."""
        return f"BandMask({tuple(self.shape)}, start={self.start}, left={self.left}, right={self.right}, keys={self.keys})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The operation on the mask written out."""
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, BandMask) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dense(self) -> Tensor:
        """The mask written out: (B, 1, M, N) bool."""
        q_pos = torch.arange(self.shape[2], device=self.device)[:, None] + self.start
        k_pos = torch.arange(self.shape[3], device=self.device)[None, :]
        seen = torch.ones((), dtype=torch.bool, device=self.device)
        if self.left is not None:
            seen = seen & (k_pos >= q_pos - self.left)
        if self.right is not None:
            seen = seen & (k_pos <= q_pos + self.right)
        if self.keys is not None:
            seen = seen & self.keys[:, None, None, :]
        return seen.expand(self.shape).clone()


def register() -> None:
    """Make "andrea_triton" an attention of transformers, for models made or switched to it afterwards.

    A model takes it by `from_pretrained(..., attn_implementation="andrea_triton")` or
    `model.set_attn_implementation("andrea_triton")`. Calling this again changes nothing.

    Raises:
        ModuleNotFoundError: transformers is missing: pip install 'andrea-triton[hf]'.

    Source:
        AttentionInterface and AttentionMaskInterface in the documentation of transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


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
        cu_seq_lens_q: (sequences + 1,) int32 starts of the sequences packed in a batch of one, where there is no mask.
        cu_seq_lens_k: the same for the keys.
        max_length_q: rows of the longest sequence.
        max_length_k: the same for the keys.
        others: what models hand down beside that.

    Returns:
        out (B, M, HQ, DV) contiguous, and None: the weights are never made.

    Raises:
        UnsupportedError: a keyword or a form of mask that is not known here; it is named.

    Source:
        AttentionInterface in the documentation of transformers.

    Example:
        >>> layer, x = torch.nn.Identity(), torch.randn(1, 2, 5, 8)
        >>> out, weights = attend(layer, x, x, x, None, is_causal=True)
        >>> out.shape, weights is None
        (torch.Size([1, 5, 2, 8]), True)
    """
    for name, given in others.items():
        if name not in WITHOUT_EFFECT and given is not None and given is not False:
            raise UnsupportedError(name, NAME, "it is not known here; leave it out, or use attn_implementation='eager'")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    sinks = None if s_aux is None else s_aux.to(torch.promote_types(s_aux.dtype, query.dtype))
    if attention_mask is None and cu_seq_lens_q is not None:
        if cu_seq_lens_k is None or max_length_q is None or max_length_k is None or query.shape[0] != 1:
            wanted = "wanted also cu_seq_lens_k, max_length_q and max_length_k, and a batch of one; or pass attention_mask"
            raise UnsupportedError("cu_seq_lens_q", NAME, wanted)
        if position_bias is not None:
            raise UnsupportedError("position_bias", f"{NAME} with cu_seq_lens_q", "pass a padded batch and attention_mask")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        packed = varlen_attention(
            q, k, v, cu_seq_lens_q, cu_seq_lens_k, int(max_length_q), int(max_length_k), causal=causal, scale=scaling,
            window=sliding_window, softcap=softcap, sinks=sinks, dropout_p=dropout,
        )  # fmt: skip
        assert isinstance(packed, Tensor)
        return packed[None].contiguous(), None
    seen = _seen(attention_mask, causal, sliding_window, query.shape[2])
    bias = seen.bias if position_bias is None else position_bias if seen.bias is None else position_bias + seen.bias
    out = attention(
        query, key, value, causal=seen.causal, scale=scaling, window=seen.window, q_start=seen.q_start, softcap=softcap,
        bias=bias, sinks=sinks, mask=seen.keep, dropout_p=dropout,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
) -> Tensor | None:
    """The mask of a forward pass, as transformers asks for it: in O(keys) where a band of positions and padded keys say it.

    Patterns that are no band, single queries, caches of a fixed size and graphs under construction get the mask that transformers
    makes for its own "sdpa", written out.

    Args:
        batch_size: B.
        q_length: M.
        kv_length: N, the places in the cache included.
        q_offset: position of query 0.
        kv_offset: position of key 0.
        mask_function: transformers' own description of the pattern; None means causal.
        attention_mask: (B, tokens so far) bool, False where the token is padding; None where none is.
        local_size: width of a sliding window or a chunk.
        allow_is_causal_skip: whether None may stand for a plain causal mask.
        allow_is_bidirectional_skip: whether None may stand for no mask at all.
        use_vmap: how transformers evaluates mask_function.
        device: of the mask.
        dtype: of the model.
        config: of the model.

    Returns:
        None, a BandMask, or (B, 1, M, N) bool, True where the query may see the key.

    Source:
        AttentionMaskInterface in the documentation of transformers.
    """
    from transformers import masking_utils

    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    plain = attention_mask is None or (type(attention_mask) is Tensor and attention_mask.dim() == 2)
    growing = type(q_offset) is int and type(kv_offset) is int and q_offset - kv_offset + q_length == kv_length
    written_out = torch.compiler.is_compiling() or q_length == 1 or not plain or not growing
    band = None if written_out else _band(mask_function, local_size)
    if band is None:
        mask: Tensor | None = masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap, device=device, dtype=dtype, config=config,
        )  # fmt: skip
        return mask
    keys = None if attention_mask is None else _keys(attention_mask, int(kv_offset), kv_length)
    start = kv_length - q_length
    if keys is None and band == (None, None) and allow_is_bidirectional_skip:
        return None
    if keys is None and band == (None, 0) and start == 0 and allow_is_causal_skip:
        return None
    return BandMask((batch_size, 1, q_length, kv_length), torch.device(device), start, *band, keys)


def _keys(padding: Tensor, first: int, keys: int) -> Tensor | None:
    """(B, N) bool of the keys from `first` on, False where the key is padding; None where no key is."""
    real = padding[:, first : first + keys].bool()
    real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))
    return None if bool(real.all()) else real


class _Seen(NamedTuple):
    """Who sees whom, in the words of `attention`."""

    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    q_start: int | None = None
    keep: Tensor | None = None
    bias: Tensor | None = None


def _seen(mask: Tensor | None, causal: bool, sliding_window: int | None, queries: int) -> _Seen:
    """What a mask, or the lack of one, lets be seen."""
    if mask is None:
        return _Seen(causal, sliding_window, 0 if queries > 1 else None)
    if isinstance(mask, BandMask):
        keep = None if mask.keys is None else mask.keys[:, None, None, :]
        return _Seen(window=(mask.left, mask.right), q_start=mask.start, keep=keep)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
        return _Seen(keep=mask)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.is_floating_point():
        return _Seen(bias=mask)
    got = f"{mask.dim()}-D {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError("attention_mask", NAME, f"got {got}; wanted None, or bool or float (B, 1 or H, M, N)")


def _band(mask_function: Any, width: int | None) -> tuple[int | None, int | None] | None:
    """The distances (left, right) that a pattern of transformers lets be seen; None where it is no band."""
    from transformers import masking_utils

    bands: list[tuple[Any, tuple[int | None, int | None]]] = [
        (masking_utils.causal_mask_function, (None, 0)),
        (masking_utils.bidirectional_mask_function, (None, None)),
    ]
    if width is not None:
        bands.append((masking_utils.sliding_window_causal_mask_function(width), (width - 1, 0)))
        bands.append((masking_utils.sliding_window_bidirectional_mask_function(width), (width, width)))
    return next((band for pattern, band in bands if _same(pattern, mask_function)), None)


def _same(a: Any, b: Any) -> bool:
    """Whether two functions have one code and closed over the same functions and numbers."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a.__code__ is b.__code__ and _same(tuple(cells[0]), tuple(cells[1]))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
