"""One token at a time: attention of the newest tokens to all that a KV cache holds."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, target
from .cache import Cache, PagedKVCache
from .errors import ShapeError, UnsupportedError
from .functional import attention
from .problem import make_problem
from .spec import Window, make_spec

LARGEST_TILE = 128  # rows of query heads and queries that share a key head
KEYS_OF_A_PART = 256  # fewer are not worth a program
PROGRAMS = 256  # about two for each multiprocessor of a large GPU


def decode_attention(
    q: Tensor, cache: Cache, *, causal: bool = True, scale: float | None = None, window: Window = None, softcap: float | None
        = None,
    alibi: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False, splits: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of few queries to a cache that already holds their keys, each sequence at its own length. Inference only.

    The keys are split over programs, and the parts combined by their log-sum-exp; the query heads of a key head share a
    tile. Work grows with the lengths, not with the capacity, and shapes are static: nothing waits for the device, so that a
    graph can capture it.

    Args:
        q: queries (batch, HQ, M, D), dtype and device of the cache; row i of sequence b sits at position lengths[b] - M +
            i. A row before position 0 is padding.
        cache: a KVCache or PagedKVCache that the keys of the newest M tokens were appended to.
        causal: a query sees no key after its own position.
        scale, window, softcap, alibi, sinks: as in `attention`; windows count from each query's position.
        return_lse: return (out, lse).
        splits: parts that the keys are split into; None chooses by batch, heads and capacity.
        backend: as in `attention`.

    Returns:
        out (batch, HQ, M, DV), or (out, lse) with lse (batch, HQ, M) in fp32 (fp64 for fp64).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`; also where a gradient is asked for, and for the kernels where
            group·M is over 128 or a page has not a multiple of 16 rows.

    Source:
        FlashDecoding's split of keys; arXiv 2309.06180 (paged caches).

    Example:
        >>> from andrea_triton.cache import KVCache
        >>> cache, k = KVCache(1, 2, 8, 4), torch.randn(1, 2, 3, 4)
        >>> cache.append(k, k)
        >>> q = torch.randn(1, 2, 1, 4)
        >>> torch.allclose(decode_attention(q, cache), attention(q, k, k, causal=True), atol=1e-6)
        True
    """
    if torch.is_grad_enabled() and isinstance(q, Tensor) and q.requires_grad:
        raise UnsupportedError(
            "a gradient", "decode_attention", "a cache holds no graph; call it under torch.no_grad(), or attention()"
        )
    chosen = target.default_backend(q.device) if backend is None else backend
    target.check_backend(chosen, q.device)
    if chosen in ("torch", "reference"):
        return _each_length(q, cache, causal, scale, window, softcap, alibi, sinks, return_lse, chosen)
    k, v, pages = _memory(cache)
    k_shown, v_shown = (k, v) if pages is None else (_stand_in(k, cache, pages), _stand_in(v, cache, pages))
    spec = make_spec(causal=causal, scale=scale, window=window, softcap=softcap)
    problem = make_problem(q, k_shown, v_shown, spec, alibi=alibi, sinks=sinks, key_lengths=cache.lengths)
    if problem.group * problem.M > LARGEST_TILE:
        got = f"{problem.group} query heads to a key head x {problem.M} queries"
        raise UnsupportedError(
            got, "decode_attention", f"they share a tile of {LARGEST_TILE} rows; append and decode fewer at a time"
        )
    parts = _splits(problem.B * problem.HKV, problem.N) if splits is None else splits
    if parts < 1:
        raise ShapeError(f"splits is {splits}; wanted at least 1; pass None to let the library choose")
    if 0 in q.shape:
        empty = q.new_empty(*q.shape[:3], problem.DV)
        return (empty, empty.new_empty(q.shape[:3], dtype=torch.float32)) if return_lse else empty
    out, lse = backends.run_decode(problem, q, k, v, pages, parts, chosen)
    return (out, lse) if return_lse else out


def _splits(programs: int, capacity: int) -> int:
    """Parts of the keys: as many as fill a GPU, none of them tiny when the cache is full."""
    return max(1, min(-(-PROGRAMS // max(programs, 1)), -(-capacity // KEYS_OF_A_PART)))


def _memory(cache: Cache) -> tuple[Tensor, Tensor, tuple[Tensor, int] | None]:
    """(k, v, pages) as the kernels read them."""
    if not isinstance(cache, PagedKVCache):
        return *cache.keys_values(cache.capacity), None
    if cache.page_size % 16 != 0:
        raise UnsupportedError(
            f"pages of {cache.page_size} rows", "the kernels", "make the cache with page_size a multiple of 16"
        )
    return cache.k_pages, cache.v_pages, (cache.page_table, cache.page_size)


def _stand_in(memory: Tensor, cache: Cache, pages: tuple[Tensor, int]) -> Tensor:
    """A view over paged memory with the shape of the contiguous tensor, for checks of shape and dtype; its rows are all the
    same."""
    table, size = pages
    return memory[:1, :, :1].expand(cache.batch, -1, table.shape[1] * size, -1)


def _each_length(
    q: Tensor, cache: Cache, causal: bool, scale: float | None, window: Window, softcap: float | None, alibi: Tensor | None,
    sinks: Tensor | None, return_lse: bool, backend: str,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """decode_attention by the backends without kernels: sequences of one length together, else one by one."""
    counts = cache.counts
    k, v = cache.keys_values(max(counts, default=0))
    groups = [slice(None)] if len(set(counts)) <= 1 else [slice(b, b + 1) for b in range(len(counts))]
    outs, lses = [], []
    for rows in groups:
        n = counts[rows][0] if counts else 0
        slopes = alibi[rows] if alibi is not None and alibi.dim() == 2 else alibi
        result = attention(
            q[rows], k[rows, :, :n], v[rows, :, :n], causal=causal, scale=scale, window=window, softcap=softcap, alibi=slopes,
            sinks=sinks, return_lse=True, backend=backend,
        )  # fmt: skip
        outs.append(result[0])
        lses.append(result[1])
    out, lse = (torch.cat(outs), torch.cat(lses)) if len(groups) > 1 else (outs[0], lses[0])
    return (out, lse) if return_lse else out
