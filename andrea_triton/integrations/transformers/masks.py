"""The mask of a forward pass: a band of positions where it is one, in O(N), and what transformers makes where it is none."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .models import takes_bool_masks


class BandMask(Tensor):
    """A mask (B, 1, M, N) that is kept as what it means, in O(N): a band of positions, and the keys that are padding.

    `attend` reads the band. A model that changes its mask, or looks into it, gets the whole of it by that very operation.

    Args:
        shape: (B, 1, M, N).
        device: of the model's tensors.
        start: position of query 0, key 0 being at 0.
        left: keys seen before the query's position, None for all.
        right: keys seen after it, None for all.
        keys: (B, N) bool, False where the key is padding; None where no key is.
        dtype: bool, True where the query sees the key; or a float one, written out 0 there and the lowest number elsewhere.
        starts: (sequences + 1,) int32 starts of packed sequences, the rows of the batch laid end to end, each of which sees
            itself alone; None where nothing is packed.
        longest: rows of the longest of them.

    Example:
        >>> mask = BandMask((1, 1, 2, 3), torch.device("cpu"), start=1, left=None, right=0, keys=None)
        >>> mask.shape, (~mask).tolist()
        (torch.Size([1, 1, 2, 3]), [[[[False, False, True], [False, False, False]]]])
    """

    start: int
    left: int | None
    right: int | None
    keys: Tensor | None
    starts: Tensor | None
    longest: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, start: int, left: int | None, right: int | None,
        keys: Tensor | None, dtype: torch.dtype = torch.bool, starts: Tensor | None = None, longest: int = 0,
    ) -> BandMask:  # fmt: skip
        """A tensor without memory of its own."""
        mask: BandMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.start, mask.left, mask.right, mask.keys = start, left, right, keys
        mask.starts, mask.longest = starts, longest
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
        """The mask written out: (B, 1, M, N)."""
        q_pos = torch.arange(self.shape[2], device=self.device)[:, None] + self.start
        k_pos = torch.arange(self.shape[3], device=self.device)[None, :]
        seen = torch.ones((), dtype=torch.bool, device=self.device)
        if self.left is not None:
            seen = seen & (k_pos >= q_pos - self.left)
        if self.right is not None:
            seen = seen & (k_pos <= q_pos + self.right)
        if self.keys is not None:
            seen = seen & self.keys[:, None, None, :]
        if self.starts is not None:
            sequences = sequence_of(self.starts, self.shape[0], self.shape[3])
            seen = seen & (sequences[:, None, :, None] == sequences[:, None, None, :])
        if self.dtype != torch.bool:
            seen = torch.where(seen, torch.zeros((), dtype=self.dtype, device=self.device), torch.finfo(self.dtype).min)
        return seen.expand(self.shape).clone()


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
    makes for its own "sdpa" or "eager", written out. Rows packed by their position_ids stay in O(N).

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
        config: of the model; models that can do with the masks of "eager" alone get those: float, and never None.

    Returns:
        None, or a BandMask or (B, 1, M, N): bool, True where the query may see the key, or float, to be added to scores.

    Source:
        AttentionMaskInterface in the documentation of transformers.
    """
    from transformers import masking_utils

    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    plain = attention_mask is None or (type(attention_mask) is Tensor and attention_mask.dim() == 2)
    growing = type(q_offset) is int and type(kv_offset) is int and q_offset - kv_offset + q_length == kv_length
    written_out = torch.compiler.is_compiling() or q_length == 1 or not plain or not growing
    pattern, sequences = (None, None) if written_out else _unpacked(mask_function)
    band = None if pattern is None else _band(pattern, local_size)
    kind: type = type(config)
    eager = config is not None and not takes_bool_masks(kind)
    # Layers made for a prefix say that they are not causal; whether they are, the mask alone says.
    allow_is_causal_skip = allow_is_causal_skip and not eager and not getattr(config, "use_bidirectional_attention", None)
    allow_is_bidirectional_skip = allow_is_bidirectional_skip and not eager
    if band is None:
        written: Callable[..., Tensor | None] = masking_utils.eager_mask if eager else masking_utils.sdpa_mask
        return written(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap, device=device, dtype=dtype, config=config,
        )  # fmt: skip
    keys = None if attention_mask is None else _keys(attention_mask, int(kv_offset), kv_length)
    start = kv_length - q_length
    if keys is None and sequences is None and band == (None, None) and allow_is_bidirectional_skip:
        return None
    if keys is None and sequences is None and band == (None, 0) and start == 0 and allow_is_causal_skip:
        return None
    shape = (batch_size, 1, q_length, kv_length)
    starts, longest = (None, 0) if sequences is None else _starts(sequences.expand(batch_size, -1))
    return BandMask(shape, torch.device(device), start, *band, keys, dtype if eager else torch.bool, starts, longest)


def sequence_of(starts: Tensor, batch: int, rows: int) -> Tensor:
    """(B, rows) numbers of the sequences that the rows belong to, the batch laid end to end."""
    places = torch.arange(batch * rows, device=starts.device)
    return torch.bucketize(places, starts[1:].to(places.dtype), right=True).view(batch, rows)


def _starts(sequences: Tensor) -> tuple[Tensor, int]:
    """The starts of the sequences (B, N) numbers, the batch laid end to end, and the rows of the longest."""
    first = torch.ones_like(sequences, dtype=torch.bool)
    first[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = torch.nn.functional.pad(first.flatten().nonzero().flatten(), (0, 1), value=sequences.numel())
    return starts.to(torch.int32), int(starts.diff().max())


def _unpacked(mask_function: Any) -> tuple[Any, Tensor | None]:
    """What a pattern lets be seen inside each packed sequence, and the (B, N) numbers of the sequences; None if not packed.

    The positions of a sequence follow one another, so a band by its positions is a band by its places.
    """
    from transformers import masking_utils

    none = torch.empty(0)
    inside = masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, none)
    apart = masking_utils.packed_sequence_mask_function(none)
    if getattr(mask_function, "__code__", None) is masking_utils.and_masks(inside, apart).__code__:
        (parts,) = _closed_over(mask_function)
        if [getattr(part, "__code__", None) for part in parts] == [inside.__code__, apart.__code__]:
            (pattern,) = [x for x in _closed_over(parts[0]) if isinstance(x, FunctionType)]
            return pattern, _closed_over(parts[1])[0]
    return mask_function, None


def _closed_over(function: Any) -> list[Any]:
    """What a function has closed over."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _keys(padding: Tensor, first: int, keys: int) -> Tensor | None:
    """(B, N) bool of the keys from `first` on, False where the key is padding; None where no key is."""
    real = padding[:, first : first + keys].bool()
    real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))
    return None if bool(real.all()) else real


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
        return a.__code__ is b.__code__ and _same(tuple(_closed_over(a)), tuple(_closed_over(b)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
