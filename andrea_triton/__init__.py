"""andrea_triton: exact softmax attention in Triton, forward and backward, without the T×T matrix."""

from .cache import KVCache, PagedKVCache
from .decode import decode_attention
from .dropout import dropout_mask
from .errors import AndreaError, CompileError, DTypeError, ShapeError, UnsupportedError
from .functional import (
    Explanation,
    attention,
    attention_weights,
    causal_attention,
    explain,
    merge_attention,
    varlen_attention,
)
from .sdpa import scaled_dot_product_attention
from .spec import Mask, Score

__version__ = "0.1.0"

__all__ = [
    "AndreaError",
    "CompileError",
    "DTypeError",
    "Explanation",
    "KVCache",
    "Mask",
    "PagedKVCache",
    "Score",
    "ShapeError",
    "UnsupportedError",
    "attention",
    "attention_weights",
    "causal_attention",
    "decode_attention",
    "dropout_mask",
    "explain",
    "merge_attention",
    "scaled_dot_product_attention",
    "varlen_attention",
]
