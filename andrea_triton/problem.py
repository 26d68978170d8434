"""One attention call, checked: tensors and a spec become a Problem, or an error says why not."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from andrea_triton.errors import DTypeError, ShapeError, UnsupportedError
from andrea_triton.kinds import check_kind
from andrea_triton.spec import MAX_LENGTH, AttentionSpec, Mask, Score, default_scale

MAX_HEAD_DIM = 256
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)

Functor = TypeVar("Functor", Score, Mask)


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
    _check_qkv(q, k, v, 3 if packed else 4)
    HQ, HKV, M, N, D, DV = _checked_sizes(q.shape, k.shape, v.shape, 0 if packed else 2)
    if packed:
        _refuse_in_packed(bias, keep, key_lengths)
        longest_q, longest_k = _checked_longest("max_q", max_q), _checked_longest("max_k", max_k)
        cu_seqlens_q = _checked_starts("cu_seqlens_q", cu_seqlens_q, q, longest_q, validate)
        cu_seqlens_k = _checked_starts("cu_seqlens_k", cu_seqlens_k, k, longest_k, validate)
        B = cu_seqlens_q.shape[0] - 1
        if cu_seqlens_k.shape[0] - 1 != B:
            _fail_shape("cu_seqlens_k", cu_seqlens_k, f"({B + 1},), as cu_seqlens_q", "repeat an entry for no keys")
    else:
        if max_q is not None or max_k is not None:
            raise ShapeError("max_q or max_k came alone; wanted cu_seqlens_q and cu_seqlens_k too; or leave it out")
        B, longest_q, longest_k = q.shape[0], 0, 0
    full, wide = (B, HQ, M, N), (q.dtype, torch.float32, torch.float64)
    extras = Extras(
        None if bias is None else _checked_matrix("bias", bias, q, full, wide, "cast it; a bool mask goes to mask="),
        None if keep is None else _checked_matrix("mask", keep, q, full, (torch.bool,), "use mask != 0, or bias="),
        None if alibi is None else _checked_slopes(alibi, q, B, HQ),
        None if sinks is None else _checked_vector("sinks", sinks, q, HQ, wide, "query head"),
        None if key_lengths is None else _checked_key_lengths(key_lengths, q, B, N, validate),
        cu_seqlens_q,
        cu_seqlens_k,
        None if spec.dropout_p == 0.0 else _checked_seed(seed, q),
        None if score is None else _checked_functor("score", score, Score, q),
        None if mask is None else _checked_functor("mask", mask, Mask, q),
    )
    return Problem(B, HQ, HKV, M, N, D, DV, q.dtype, q.device, spec, extras, longest_q, longest_k)


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


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    """Fail unless q, k and v are strided float tensors of one dtype, device and rank."""
    _check_tensor("q", q, q, FLOAT_DTYPES)
    dtype, device = q.dtype, q.device
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_kind(name, tensor)
        if tensor.device != device:
            _check_tensor(name, tensor, q, FLOAT_DTYPES)
        if tensor.dtype != dtype:
            got = ", ".join(f"{name} is {getattr(x, 'dtype', type(x))}" for name, x in (("q", q), ("k", k), ("v", v)))
            way_out = "cast them to one float dtype, or call under torch.autocast"
            raise DTypeError(f"{got}; wanted one dtype, outside autocast; {way_out}")
        if tensor.dim() != rank:
            way_out = "pass all of q, k, v packed" if rank == 3 else "unsqueeze it, or use varlen_attention if packed"
            _fail_shape(name, tensor, "(total, H, D)" if rank == 3 else "(B, H, T, D)", way_out)


def _checked_sizes(q: Sequence[int], k: Sequence[int], v: Sequence[int], rows: int) -> tuple[int, int, int, int, int, int]:
    """HQ, HKV, M, N, D, DV of three shapes whose rows lie along the dim `rows`, checked against each other."""
    HQ, M, D, HKV, N, DV = q[1], q[rows], q[-1], k[1], k[rows], v[-1]
    if rows == 2 and (k[0] != q[0] or v[0] != q[0]):
        way_out = "broadcast with expand, which copies nothing"
        raise ShapeError(f"q, k, v have batch {q[0]}, {k[0]}, {v[0]}; wanted one batch; {way_out}")
    if v[rows] != N:
        raise ShapeError(f"v has {v[rows]} rows; wanted {N}, one per key, as k has; slice k and v alike")
    if v[1] != HKV:
        raise ShapeError(f"v has {v[1]} heads; wanted {HKV}, as k has; repeat or slice heads of k and v alike")
    if HQ % HKV != 0 if HKV else HQ != 0:
        raise ShapeError(f"k has {HKV} heads; q has {HQ}, which is not a multiple of {HKV}; repeat or slice heads")
    if k[-1] != D:
        raise ShapeError(f"k has head dim {k[-1]}; wanted {D}, as q has; project or pad q and k to one head dim")
    if not (1 <= D <= MAX_HEAD_DIM and 1 <= DV <= MAX_HEAD_DIM):
        way_out = "use more heads of fewer features"
        raise ShapeError(f"q has head dim {D} and v {DV}; wanted 1 to {MAX_HEAD_DIM} each; {way_out}")
    if not torch.compiler.is_compiling() and (M > MAX_LENGTH or N > MAX_LENGTH):
        raise ShapeError(f"q has {M} rows and k has {N}; wanted at most 2**28 each; split the keys and merge_attention")
    return HQ, HKV, M, N, D, DV


def _refuse_in_packed(bias: Tensor | None, keep: Tensor | None, key_lengths: Tensor | None) -> None:
    """Fail for the dense tensors that packed sequences have no place for."""
    if bias is not None:
        raise UnsupportedError("bias", "varlen", "packed sequences have no (B, H, M, N); use score=Score(...)")
    if keep is not None:
        raise UnsupportedError("mask", "varlen", "packed sequences have no (B, H, M, N); use mask=Mask(...)")
    if key_lengths is not None:
        raise UnsupportedError("key_lengths", "varlen", "cu_seqlens_k already gives each sequence's keys")


def _checked_longest(name: str, value: int | None) -> int:
    """The most rows of a packed sequence."""
    if value is None:
        raise ShapeError(f"{name} is missing; wanted the most rows of any sequence; pass an upper bound")
    _check_integer(name, value)
    if value < 0:
        raise ShapeError(f"{name} is {value}; wanted at least 0; pass the most rows of any sequence")
    return value


def _checked_starts(name: str, starts: Tensor | None, rows: Tensor, longest: int, validate: bool) -> Tensor:
    """The starts of packed sequences as int32; contents are checked where reading them is free or asked for."""
    if starts is None:
        raise ShapeError(f"{name} is missing; wanted both; pass one tensor twice for self-attention")
    _check_tensor(name, starts, rows, INDEX_DTYPES)
    if starts.dim() != 1 or starts.shape[0] == 0:
        _fail_shape(name, starts, "(sequences + 1,)", "start with 0 and append each sequence's end")
    if _may_read(starts, validate):
        values: list[int] = starts.tolist()
        if values[0] != 0:
            raise ShapeError(f"{name} starts at {values[0]}; wanted 0; put a 0 before the cumulated lengths")
        for start, end in pairwise(values):
            if end < start:
                raise ShapeError(f"{name} decreases from {start} to {end}; wanted it not to; use cumsum of the lengths")
            if end - start > longest:
                wanted = f"wanted at most {longest}, which max_{name[-1]} says; raise max_{name[-1]}"
                raise ShapeError(f"{name} has a sequence of {end - start} rows; {wanted}")
        if values[-1] > rows.shape[0]:
            wanted = f"wanted at most {rows.shape[0]}, the rows of {name[-1]}; clip the lengths"
            raise ShapeError(f"{name} ends at {values[-1]}; {wanted}")
    return starts.to(torch.int32)


def _checked_matrix(
    name: str, tensor: Tensor, q: Tensor, full: tuple[int, ...], dtypes: Sequence[torch.dtype], way_out: str
) -> Tensor:
    """A (B, HQ, M, N) view of the tensor."""
    _check_tensor(name, tensor, q, dtypes, way_out)
    shape = tensor.shape
    if len(shape) > 4 or any(a != 1 and a != b for a, b in zip(shape[::-1], full[::-1], strict=False)):
        _fail_shape(name, tensor, f"one that broadcasts to (B, HQ, M, N) = {full}", "slice it, or use dims of size 1")
    return tensor.expand(full)


def _checked_slopes(slopes: Tensor, q: Tensor, B: int, HQ: int) -> Tensor:
    """The ALiBi slopes as (B, HQ) float32."""
    _check_tensor("alibi", slopes, q, FLOAT_DTYPES)
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != HQ or (slopes.dim() == 2 and slopes.shape[0] != B):
        _fail_shape("alibi", slopes, f"({HQ},) or ({B}, {HQ}), a slope per query head", "slice or expand it")
    if slopes.requires_grad:
        raise UnsupportedError("alibi", "every backend", "slopes get no gradient; pass alibi.detach(), or train a bias")
    return slopes.to(torch.float32).expand(B, HQ)


def _checked_vector(name: str, tensor: Tensor, q: Tensor, size: int, dtypes: Sequence[torch.dtype], per: str) -> Tensor:
    """The tensor, (size,)."""
    _check_tensor(name, tensor, q, dtypes)
    if tensor.dim() != 1 or tensor.shape[0] != size:
        _fail_shape(name, tensor, f"({size},), one per {per}", "slice or expand it")
    return tensor


def _checked_key_lengths(key_lengths: Tensor, q: Tensor, B: int, N: int, validate: bool) -> Tensor:
    """The key lengths as (B,) int32."""
    _checked_vector("key_lengths", key_lengths, q, B, INDEX_DTYPES, "batch entry")
    if _may_read(key_lengths, validate):
        for i, length in enumerate(key_lengths.tolist()):
            if not 0 <= length <= N:
                raise ShapeError(f"key_lengths[{i}] is {length}; wanted 0 to {N}, the rows of k; clamp it")
    return key_lengths.to(torch.int32)


def _checked_seed(seed: int | Tensor | None, q: Tensor) -> int | Tensor:
    """The seed of a call that drops weights."""
    if seed is None:
        raise ShapeError("seed is None with dropout_p above 0; wanted a seed; pass an int or an int64 tensor")
    if isinstance(seed, Tensor):
        _check_tensor("seed", seed, q, (torch.int64,))
        if seed.numel() != 1:
            _fail_shape("seed", seed, "one element", "pass one element of it")
        return seed
    _check_integer("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ShapeError(f"seed is {seed}; wanted 64 bits, -2**63 to 2**64 - 1; pass seed % 2**64")
    return seed


def _checked_functor(name: str, functor: Functor, kind: type[Functor], q: Tensor) -> Functor:
    """The user's Score or Mask, its tensors on q's device."""
    if not isinstance(functor, kind):
        way_out = f"use {name}={kind.__name__}(fn, ...)"
        raise DTypeError(f"{name} is a {type(functor).__name__}; wanted a {kind.__name__}; {way_out}")
    for argument in functor.args:
        if isinstance(argument, Tensor):
            _check_tensor(f"a tensor of {name}.args", argument, q, (argument.dtype,))
    return functor


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DTypeError(f"{name} is a {type(value).__name__}; wanted an int; pass int({name})")


def _check_tensor(
    name: str, tensor: Tensor, q: Tensor, dtypes: Sequence[torch.dtype], way_out: str = "cast it with .to(dtype)"
) -> None:
    """Fail unless this is a tensor on q's device with one of these dtypes."""
    check_kind(name, tensor)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise DTypeError(f"{name} is {tensor.dtype}; wanted {wanted}; {way_out}")
    if tensor.device != q.device:
        raise DTypeError(f"{name} is on {tensor.device}; wanted {q.device}, as q; move it with {name}.to(q.device)")


def _may_read(tensor: Tensor, validate: bool) -> bool:
    """True when reading the contents is free (a plain CPU tensor, outside tracing) or asked for."""
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    return validate or tensor.is_cpu


def _fail_shape(name: str, tensor: Tensor, wanted: str, way_out: str) -> NoReturn:
    raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; wanted {wanted}; {way_out}")
