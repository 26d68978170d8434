"""One attention call, checked: tensors and a spec become a Problem, or an error says why not."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andrea_triton.checks import (
    check_qkv,
    checked_functor,
    checked_key_lengths,
    checked_longest,
    checked_matrix,
    checked_seed,
    checked_sizes,
    checked_slopes,
    checked_starts,
    checked_vector,
    fail_shape,
    refuse_in_packed,
)
from andrea_triton.errors import ShapeError
from andrea_triton.memory import Memory
from andrea_triton.spec import AttentionSpec, Mask, Score, default_scale


class Extras(NamedTuple):
    """The optional tensors and functions of a call, in the form that every backend reads; None means absent.

    Args:
        bias: (B, HQ, M, N) float, a view of the caller's tensor, stride 0 where it was broadcast.
        keep: (B, HQ, M, N) bool, True where the query may see the key; a view like bias.
        slopes: (B, HQ) float32 ALiBi slopes; the score gets -slope * |q_pos - k_pos|.
        sinks: (HQ,) float, one more logit per row that takes weight and has no value.
        key_lengths: (B,) int32; the keys from there on are hidden.
        cu_seqlens_q: (B + 1,) int32, where each packed sequence's queries start, and the end of the last.
        cu_seqlens_k: (B + 1,) int32, the same for the keys.
        seed: of the dropout, an int or an int64 tensor of one element; None when nothing is dropped.
        score: the user's score function.
        mask: the user's mask function.
    """

    bias: Tensor | None = None
    keep: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: int | Tensor | None = None
    score: Score | None = None
    mask: Mask | None = None


SIDES = ("keep", "slopes", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "seed")


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked attention call without its q, k and v.

    Args:
        B: batch, or the number of packed sequences.
        HQ: query heads, a multiple of HKV; query head h reads key head h // group.
        HKV: key and value heads.
        M: queries, over all sequences when packed.
        N: keys, over all sequences when packed.
        D: features of a query and a key.
        DV: features of a value.
        dtype: of q, k, v and the output.
        device: of every tensor.
        spec: the settings.
        extras: the optional tensors and functions.
        max_q: most queries of a packed sequence, 0 when dense.
        max_k: most keys of a packed sequence, 0 when dense.
    """

    B: int
    HQ: int
    HKV: int
    M: int
    N: int
    D: int
    DV: int
    dtype: torch.dtype
    device: torch.device
    spec: AttentionSpec
    extras: Extras
    max_q: int = 0
    max_k: int = 0

    @property
    def packed(self) -> bool:
        """True when the sequences lie one after the other in (total, H, D) tensors."""
        return self.extras.cu_seqlens_q is not None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.HQ // self.HKV if self.HKV else 1

    @property
    def scale(self) -> float:
        """The factor of q·k."""
        return default_scale(self.D) if self.spec.scale is None else self.spec.scale

    @property
    def q_start(self) -> int:
        """Position of query 0 of a dense call. Each packed sequence resolves spec.q_start by its own lengths."""
        return self.N - self.M if self.spec.q_start is None else self.spec.q_start

    @functools.cached_property
    def facts(self) -> object | None:
        """Stands for all that the launches of a call can depend on but q, k and v, one object for problems that differ in where
        their tensors lie and in an int seed alone. None where an argument of the caller's own function is of a kind that nothing
        is known of."""
        spec = (*self.spec.__dict__.values(), self.dtype, self.device)
        sizes = (self.B, self.HQ, self.HKV, self.M, self.N, self.D, self.DV, self.max_q, self.max_k, *spec)
        if self.plain:
            return _facts.get(sizes) or _facts.keep(sizes, object())
        *others, seed, score, mask = self.extras
        args = [a for x in (score, mask) if x is not None for a in x.args]
        if not all(x is None or isinstance(x, (int, float, Tensor)) for x in args):
            return None
        own = [None if x is None else (x.fn, getattr(x, "grad", None), len(x.args)) for x in (score, mask)]
        of_seed = _fact(seed) if isinstance(seed, Tensor) else seed is None
        found = (*sizes, *map(_fact, others), of_seed, *own, *map(_fact, args))
        return _facts.get(found) or _facts.keep(found, object())

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the extras, in one order."""
        own = [a for x in (self.extras.score, self.extras.mask) if x is not None for a in x.args]
        return tuple([x for x in (*self.extras, *own) if isinstance(x, Tensor)])

    @functools.cached_property
    def plain(self) -> bool:
        """True where the call has no extras."""
        return all([x is None for x in self.extras])

    def emptied(self) -> tuple["Problem", tuple[Tensor, ...]]:
        """The problem without a tensor in it, and its tensors but bias and sinks: what autograd is to keep, and `filled` takes.
        Kept by autograd, they are freed with the graph, seen by its hooks, and an error when changed in place."""
        tensors: list[Tensor] = []

        def taken(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            tensors.append(x)
            return HOLE

        extras = self.extras
        keep = None if extras.keep is None else unexpanded(extras.keep)
        # A copy of the seed, for it may be advanced in place for the next layer before the backward reads it.
        seed = extras.seed.clone() if isinstance(extras.seed, Tensor) else extras.seed
        extras = with_each(extras._replace(bias=None, sinks=None, keep=keep, seed=seed), taken)
        return replace(self, extras=extras), tuple(tensors)

    def filled(self, tensors: Iterable[Tensor], bias: Tensor | None, sinks: Tensor | None) -> "Problem":
        """An emptied problem with its tensors again; bias in the caller's own shape."""
        rest, full = iter(tensors), (self.B, self.HQ, self.M, self.N)
        extras = with_each(self.extras, lambda x: next(rest) if x is HOLE else x)
        return replace(self, extras=extras._replace(
            bias=None if bias is None else bias.expand(full),
            keep=None if extras.keep is None else extras.keep.expand(full),
            sinks=None if sinks is None else sinks.contiguous(),
        ))  # fmt: skip

    def band(self) -> tuple[int | None, int | None]:
        """spec.left and spec.right, no larger than hides no key at these lengths, so that both fit in 32 bits. An open side is
        None; one that hides nothing stays a number, for which side is open decides what is compiled, and lengths must not."""
        queries, keys = (self.max_q, self.max_k) if self.packed else (self.M, self.N)
        if self.spec.q_start is None:
            to_first_key, to_last_key = keys - 1, queries - 1
        else:
            to_first_key, to_last_key = self.spec.q_start + queries - 1, keys - 1 - self.spec.q_start
        left, right = self.spec.left, self.spec.right
        return (
            None if left is None else min(left, max(0, to_first_key)),
            None if right is None else min(right, max(0, to_last_key)),
        )


_facts = Memory()


def _fact(x: Any) -> Any:
    """What a launch can depend on in an optional argument: a number by its kind and bits, for 1, 1.0 and True are one key, as are
    0.0 and -0.0."""
    if isinstance(x, Tensor):
        return x.dtype, x.stride(), x.shape
    return x if x is None else (type(x), x.hex() if isinstance(x, float) else x)


HOLE: Any = object()  # where `emptied` took a tensor from


def with_each(extras: Extras, change: Callable[[Any], Any]) -> Extras:
    """The extras with every value but bias and sinks changed, the arguments of the user's functions one by one."""
    own = {name: change(getattr(extras, name)) for name in SIDES}
    score, mask = extras.score, extras.mask
    own["score"] = None if score is None else score._replace(args=tuple(map(change, score.args)))
    own["mask"] = None if mask is None else mask._replace(args=tuple(map(change, mask.args)))
    return extras._replace(**own)


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    keep: Tensor | None = None,
    score: Score | None = None,
    mask: Mask | Tensor | None = None,
    seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    validate: bool = False,
) -> Problem:
    """Check a call, once and completely, and describe it.

    Args:
        q: (B, HQ, M, D) fp16, bf16, fp32 or fp64; packed (total_q, HQ, D).
        k: (B, HKV, N, D), dtype and device of q; packed (total_k, HKV, D).
        v: (B, HKV, N, DV), dtype and device of q; packed (total_k, HKV, DV).
        spec: the settings, from make_spec.
        bias: float, broadcastable to (B, HQ, M, N), dtype of q or fp32 or fp64.
        alibi: (HQ,) or (B, HQ) float slopes, without gradient.
        sinks: (HQ,) float, dtype of q or fp32 or fp64.
        key_lengths: (B,) int32 or int64.
        keep: bool, broadcastable to (B, HQ, M, N), True where the query may see the key.
        score: a Score.
        mask: a Mask, or a bool tensor as keep.
        seed: int of 64 bits or an int64 tensor of one element; needed when spec.dropout_p > 0.
        cu_seqlens_q: (B + 1,) int32 or int64, packed only.
        cu_seqlens_k: (B + 1,) int32 or int64, packed only.
        max_q: most queries of a sequence, packed only.
        max_k: most keys of a sequence, packed only.
        validate: read key_lengths and cu_seqlens even where that waits for the device. On a CPU they are always read.

    Returns:
        The Problem.

    Raises:
        ShapeError: a shape or value is wrong.
        DTypeError: a type, dtype or device is wrong.
        UnsupportedError: two arguments that cannot be combined.

    Example:
        >>> q, k = torch.zeros(2, 8, 5, 16), torch.zeros(2, 4, 7, 16)
        >>> problem = make_problem(q, k, k, AttentionSpec(right=0))
        >>> problem.group, problem.scale, problem.q_start, problem.band()
        (2, 0.25, 2, (None, 0))
    """
    if isinstance(mask, Tensor):
        if keep is not None:
            raise ShapeError("mask and keep are both bool tensors; wanted one of them; combine them with mask & keep")
        keep, mask = mask, None
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    check_qkv(q, k, v, 3 if packed else 4)
    HQ, HKV, M, N, D, DV = checked_sizes(q.shape, k.shape, v.shape, 0 if packed else 2)
    if packed:
        refuse_in_packed(bias, keep, key_lengths)
        longest_q, longest_k = checked_longest("max_q", max_q), checked_longest("max_k", max_k)
        cu_seqlens_q = checked_starts("cu_seqlens_q", cu_seqlens_q, q, longest_q, validate)
        cu_seqlens_k = checked_starts("cu_seqlens_k", cu_seqlens_k, k, longest_k, validate)
        B = cu_seqlens_q.shape[0] - 1
        if cu_seqlens_k.shape[0] - 1 != B:
            fail_shape("cu_seqlens_k", cu_seqlens_k, f"({B + 1},), as cu_seqlens_q", "repeat an entry for no keys")
    else:
        if max_q is not None or max_k is not None:
            raise ShapeError("max_q or max_k came alone; wanted cu_seqlens_q and cu_seqlens_k too; or leave it out")
        B, longest_q, longest_k = q.shape[0], 0, 0
    full, wide = (B, HQ, M, N), (q.dtype, torch.float32, torch.float64)
    extras = Extras(
        None if bias is None else checked_matrix("bias", bias, q, full, wide, "cast it; a bool mask goes to mask="),
        None if keep is None else checked_matrix("mask", keep, q, full, (torch.bool,), "use mask != 0, or bias="),
        None if alibi is None else checked_slopes(alibi, q, B, HQ),
        None if sinks is None else checked_vector("sinks", sinks, q, HQ, wide, "query head"),
        None if key_lengths is None else checked_key_lengths(key_lengths, q, B, N, validate),
        cu_seqlens_q,
        cu_seqlens_k,
        None if spec.dropout_p == 0.0 else checked_seed(seed, q),
        None if score is None else checked_functor("score", score, Score, q),
        None if mask is None else checked_functor("mask", mask, Mask, q),
    )
    return Problem(B, HQ, HKV, M, N, D, DV, q.dtype, q.device, spec, extras, longest_q, longest_k)


def unexpanded(t: Tensor) -> Tensor:
    """A broadcast view without its repetitions."""
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(dim, 0, 1)
    return t


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and of lse: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def output_shape(t: Tensor, features: int, packed: bool) -> tuple[tuple[int, ...], bool]:
    """The memory of an output in t's order of dims: its shape, and whether its dims 1 and 2 are to be swapped to get
    (B, H, T, features). (B, T, H, D) memory gives (B, T, H, features) memory."""
    if packed:
        return (t.shape[0], t.shape[1], features), False
    batch, heads, rows, _ = t.shape
    if t.stride(1) < t.stride(2):
        return (batch, rows, heads, features), True
    return (batch, heads, rows, features), False
