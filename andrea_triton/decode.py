"""One token at a time, or some: attention of the newest tokens to all that a KV cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, cpu, flops, target
from .cache import Cache, PagedKVCache
from .checks import may_read
from .errors import DTypeError, ShapeError, UnsupportedError
from .functional import attention, cast_alike
from .ops import each_entry, traced
from .problem import Problem, accumulator, make_problem
from .spec import AttentionSpec, Mask, Score, Window, make_spec

SPLIT_SIZE = 512  # keys of a part: 16 parts of 8k keys, and of a row of 512 keys one


def decode_attention(
    q: Tensor, cache: Cache, *, causal: bool = True, scale: float | None = None, window: Window = None, softcap: float | None
        = None,
    bias: Tensor | None = None, alibi: Tensor | None = None, sinks: Tensor | None = None, score: Score | None = None,
    mask: Mask | Tensor | None = None, tree: Tensor | None = None, return_lse: bool = False, split_size: int = SPLIT_SIZE,
    validate: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the newest queries to a cache that already holds their keys, each sequence at its own length. Inference only.

    The keys are split over programs, and the parts combined in order by their log-sum-exp; the query heads of a key head share
    tiles. On the kernels a row's bits depend on nothing but its own query and keys: not on the batch, the lengths beside it, the
    capacity, pages and their size, nor on how many tokens come at once. Work grows with the lengths, not with the capacity, and
    shapes are static: the kernels wait for nothing, so that a graph can capture them. Under torch.compile nothing depends on the
    lengths that the host knows: one compile serves all.

    Args:
        q: queries (batch, HQ, M, D), dtype and device of the cache; row i of sequence b sits at position lengths[b] - M +
            i. A row before position 0 is padding.
        cache: a KVCache or PagedKVCache that the keys of the newest M tokens were appended to.
        causal: a query sees no key after its own position.
        scale, window, softcap, alibi, sinks, score: as in `attention`; windows count from each query's position.
        bias, mask: as in `attention`, with the cache's capacity for N; column j is the key at position j.
        tree: bool (M, M) or (batch, M, M), which of the M newest tokens each of them sees: drafts that branch.
            What came before them is seen by all. It joins causal and window: give causal=False where a token sees a later one.
        return_lse: return (out, lse).
        split_size: keys of each part, a multiple of 16; the parts lie at its multiples, and a row's bits change with it. Smaller
            ones occupy a GPU better where there are few sequences, and cost a float of every output feature for each part.
        validate: read lengths and page table, and refuse what lies outside of the cache, even where that waits for the device.
            On a CPU they are always read.
        backend: as in `attention`.

    Returns:
        out (batch, HQ, M, DV), or (out, lse) with lse (batch, HQ, M) in fp32 (fp64 for fp64).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`; also where a gradient is asked for.

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
    for name, tensor in (("q", q), ("bias", bias), ("sinks", sinks)):
        if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
            way_out = "a cache holds no graph; call it under torch.no_grad(), or attention()"
            raise UnsupportedError(f"a gradient of {name}", "decode_attention", way_out)
    chosen = target.default_backend(q.device) if backend is None else backend
    target.check_backend(chosen, q.device)
    if split_size < 16 or split_size % 16:
        raise ShapeError(f"split_size is {split_size}; wanted a multiple of 16; the default is {SPLIT_SIZE}")
    memory, sinks, bias = _memory(cache), cast_alike(sinks, q), cast_alike(bias, q)
    spec = make_spec(causal=causal, scale=scale, window=window, softcap=softcap)
    own = isinstance(mask, Mask) or score is not None
    terms = Terms(alibi, sinks, bias, mask if isinstance(mask, Tensor) else None, _checked_tree(tree, q))
    problem = _problem(q, memory, spec, terms, validate, score, mask if isinstance(mask, Mask) else None)
    if traced(q) and not own:
        if not torch.compiler.is_compiling():
            flops.announce()
        numbers = (spec.left, spec.right, spec.scale, spec.softcap, split_size, chosen)
        out, lse = decode_op(q.detach(), *memory, *[None if x is None else x.detach() for x in terms], *numbers)
    else:
        out, lse = _decode(problem, q, memory, terms.tree, split_size, chosen)
    return (out, lse) if return_lse else out


class Memory(NamedTuple):
    """What a cache is to the backends: k and v (B, HKV, capacity, features), or, with a table (B, pages of a sequence) int32,
    pages (pages, HKV, page_size, features); the lengths (B,); and the most rows of a sequence."""

    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor | None
    capacity: int


class Terms(NamedTuple):
    """The tensors of a call beside queries and memory, as decode_attention takes them."""

    alibi: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    keep: Tensor | None
    tree: Tensor | None


def _checked_tree(tree: Tensor | None, q: Tensor) -> Tensor | None:
    """(B, HQ, M, M)."""
    if tree is None:
        return None
    wanted = f"({q.shape[2]}, {q.shape[2]}) or ({q.shape[0]}, {q.shape[2]}, {q.shape[2]})"
    if tree.dtype != torch.bool or tree.device != q.device:
        raise DTypeError(f"tree is {tree.dtype} on {tree.device}; wanted bool on {q.device}; say True where a token sees another")
    if tuple(tree.shape) not in ((q.shape[2], q.shape[2]), (q.shape[0], q.shape[2], q.shape[2])):
        raise ShapeError(f"tree has shape {tuple(tree.shape)}; wanted {wanted}; one row and column for each of the newest tokens")
    return (tree if tree.dim() == 3 else tree[None])[:, None].expand(*q.shape[:2], -1, -1)


def _memory(cache: Cache) -> Memory:
    if isinstance(cache, PagedKVCache):
        table = cache.page_table.to(torch.int32).contiguous()
        return Memory(cache.k_pages, cache.v_pages, cache.lengths, table, cache.capacity)
    return Memory(*cache.keys_values(cache.capacity), cache.lengths, None, cache.capacity)


def _problem(
    q: Tensor, memory: Memory, spec: AttentionSpec, terms: Terms, validate: bool, score: Score | None = None,
    mask: Mask | None = None,
) -> Problem:  # fmt: skip
    """The call, checked: as attention over contiguous keys, in the place of pages too."""
    k, v, lengths, table, _ = memory
    if table is not None:  # views of the right shape and dtype, whose rows are all the same
        k, v = (x.new_empty(()).expand(table.shape[0], x.shape[1], memory.capacity, x.shape[3]) for x in (k, v))
    problem = make_problem(
        q, k, v, spec, bias=terms.bias, alibi=terms.alibi, sinks=terms.sinks, keep=terms.keep, score=score, mask=mask,
        key_lengths=lengths, validate=validate,
    )  # fmt: skip
    if table is not None and table.numel() and may_read(table, validate):
        size, pages = memory.k.shape[2], memory.k.shape[0]
        used = torch.arange(table.shape[1], device=table.device) * size < lengths[:, None]
        wrong = used & ((table < 0) | (table >= pages))
        if wrong.any():
            b, at = wrong.nonzero()[0].tolist()
            got = f"the page table says page {int(table[b, at])} for rows {at * size} .. of sequence {b}"
            raise ShapeError(f"{got}; wanted 0 to {pages - 1}, the pages that there are; give the sequence its pages first")
    return problem


def _decode(
    problem: Problem, q: Tensor, memory: Memory, tree: Tensor | None, split_size: int, backend: str
) -> tuple[Tensor, Tensor]:
    """out, lse by a backend, with nothing of autograd."""
    if 0 in q.shape[:3]:
        return cpu.room_like(q, problem.DV, False), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))
    if backend in ("torch", "reference"):
        with torch.no_grad(), backends.outside_autocast(q.device.type):
            out, lse = _each_length(problem, q, memory, tree, backend)
        return cpu.laid_out(out, q, problem.DV, False), lse
    pages = None if memory.table is None else (memory.table, memory.k.shape[2])
    return backends.run_decode(problem, q, memory.k, memory.v, pages, tree, split_size, backend)


@torch.library.custom_op("andrea_triton::decode", mutates_args=())
def decode_op(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, capacity: int, alibi: Tensor | None,
    sinks: Tensor | None, bias: Tensor | None, keep: Tensor | None, tree: Tensor | None, left: int | None, right: int | None,
    scale: float | None, softcap: float | None, split_size: int, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out, lse over a cache's memory: decode_attention for graphs."""
    memory, spec = Memory(k, v, lengths, table, capacity), AttentionSpec(left, right, None, scale, softcap)
    problem = _problem(q, memory, spec, Terms(alibi, sinks, bias, keep, tree), False)
    return _decode(problem, q, memory, tree, split_size, backend)


@decode_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return cpu.room_like(q, v.shape[3], False), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@decode_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return each_entry(decode_op, info.batch_size, in_dims, args)


def _each_length(problem: Problem, q: Tensor, memory: Memory, tree: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    """By the backends without kernels: sequences of one length together, else one by one."""
    lengths, spec, x = memory.lengths.tolist(), problem.spec, problem.extras
    k, v, longest = memory.k, memory.v, max(lengths)
    if memory.table is not None:
        table = memory.table[:, : -(-longest // max(k.shape[2], 1))].clamp(0, max(k.shape[0] - 1, 0))
        k, v = (pages[table].transpose(1, 2).flatten(2, 3) for pages in (k, v))
    groups = [slice(None)] if len(set(lengths)) == 1 else [slice(b, b + 1) for b in range(len(lengths))]
    outs, lses = [], []
    for rows in groups:
        n, first = lengths[rows][0], rows.start or 0
        keep = None if x.keep is None else x.keep[rows, ..., :n]
        if tree is not None:
            seen = torch.nn.functional.pad(tree[rows, ..., max(problem.M - n, 0) :], (max(n - problem.M, 0), 0), value=True)
            keep = seen if keep is None else keep & seen
        own = None if x.mask is None else x.mask._replace(torch_fn=_from_batch(first, x.mask.torch_fn, 0))
        score = None if x.score is None else x.score._replace(torch_fn=_from_batch(first, x.score.torch_fn, 1))
        if own is not None and own.torch_fn is not None and keep is not None:
            b, h, i, j = (torch.arange(size, device=q.device) for size in (*q[rows].shape[:3], n))
            at = b[:, None, None, None], h[:, None, None], (i[:, None] + n - problem.M).clamp_min(0), j
            keep = keep & own.torch_fn(*at, *own.args)
        out, lse = attention(
            q[rows], k[rows, :, :n], v[rows, :, :n], window=(spec.left, spec.right), scale=spec.scale, softcap=spec.softcap,
            bias=None if x.bias is None else x.bias[rows, ..., :n], alibi=None if x.slopes is None else x.slopes[rows],
            sinks=x.sinks, score=score, mask=own if keep is None else keep, return_lse=True, backend=backend,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    return (torch.cat(outs), torch.cat(lses)) if len(groups) > 1 else (outs[0], lses[0])


def _from_batch(first: int, fn: Callable[..., Any] | None, at: int) -> Callable[..., Any] | None:
    """A user's function on dense tensors, argument `at` of which is the batch entry, for the entries from `first` on."""
    if fn is None or first == 0:
        return fn
    return lambda *args: fn(*args[:at], args[at] + first, *args[at + 1 :])
