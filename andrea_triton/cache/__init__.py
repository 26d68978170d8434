"""Keys and values of tokens already seen: preallocated memory of static shape, and a length of its own for each sequence.

base:       what both caches do: append, crop, reorder, fork, save and load, in terms of a few steps of each.
contiguous: KVCache, one block of memory per sequence.
paged:      PagedKVCache, pages that sequences share until one of them writes; a forked cache shares them too.
growth:     whether what is appended fits.
"""

from .base import Cache, Rows, rows_tensor
from .contiguous import KVCache
from .paged import PagedKVCache

__all__ = ["Cache", "KVCache", "PagedKVCache", "Rows", "rows_tensor"]
