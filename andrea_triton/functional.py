"""The public functions: validate, choose a backend, dispatch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import ops, target
from .errors import ShapeError
from .memory import Memory
from .problem import Problem, make_problem
from .reference import weights
from .spec import AttentionSpec, Mask, Score, Window, make_spec

# dropout_p is 0 by default, not 0.0: torch.compile makes a number of a default that is a float, and loses it between the
# subgraphs of two checkpointed calls.
Settings = tuple[bool, float | None, Window, int | None, float | None, float, bool]


class Explanation(NamedTuple):
    """The backend that a call takes, and why."""

    backend: str
    reason: str


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, window: Window = None,
    q_start: int | None = None, softcap: float | None = None, bias: Tensor | None = None, alibi: Tensor | None = None,
    sinks: Tensor | None = None, key_lengths: Tensor | None = None, score: Score | None = None,
    mask: Mask | Tensor | None = None, dropout_p: float = 0, seed: int | Tensor | None = None, precise: bool = False,
    return_lse: bool = False, return_stats: bool = False, validate: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Exact softmax attention, in tiles, without the M×N matrix.

    Args:
        q: queries (B, HQ, M, D), fp16, bf16, fp32 or fp64; any strides. (B, M, HQ, D) tensors come as `.transpose(1, 2)`
            views.
        k: keys (B, HKV, N, D), dtype and device of q; HQ is a multiple of HKV.
        v: values (B, HKV, N, DV). D and DV from 1 to 256; any for backends torch and reference.
        causal: a query sees no key after its own position.
        scale: factor of q·k, any finite number; None means 1/sqrt(D).
        window: W keys, the query's own position included, or inclusive distances (left, right), None for an open side.
        q_start: position of query 0, key 0 being at 0; None means N - M (the last query sees the last key), 0 is torch's
            top-left.
        softcap: c > 0 replaces a scaled score s by c·tanh(s / c).
        bias: float, broadcastable to (B, HQ, M, N), added after scale and softcap; differentiable.
        alibi: slopes (HQ,) or (B, HQ); -slope·|q_pos - k_pos| is added.
        sinks: (HQ,) logits of keys without a value; differentiable.
        key_lengths: (B,) integers; keys from there on are hidden.
        score: your own change to the scores, see `Score`.
        mask: bool, broadcastable to (B, HQ, M, N), True where the query may see the key; or your own function, see `Mask`.
        dropout_p: probability that a weight is dropped, in [0, 1).
        seed: of the dropout: int, or an int64 tensor of one element on the tensors' device; None draws one from torch's
            generator.
        precise: in fp16 and bf16, sum the weights as rounded for the product with v, so that v = 1 gives exactly 1. lse is
            then the logarithm of that sum, of the rounded weights: within half a unit of the dtype of the exact one. In
            fp32, multiply by IEEE's rules alone.
        return_lse: return (out, lse); lse (B, HQ, M) is the natural logarithm of the row sum, fp32 (fp64 for fp64),
            differentiable.
        return_stats: also return, last, the largest logit of every row and the entropy of its weights in nats, fp32 (B, HQ,
            M), without gradient: what shows logits that grow and attention that collapses. It makes the scores once more, in
            O(M) memory.
        validate: check the contents of index tensors on a GPU too, which waits for it.
        backend: triton, interpreter, torch, reference, or None to choose by the tensors' device.

    Returns:
        out (B, HQ, M, DV), dtype and memory order of q; a query that sees no key gets 0 (and lse -inf, or its sink).

    Raises:
        ShapeError: a shape or value is wrong; the message says what was got, wanted, and the way out.
        DTypeError: a dtype or device is wrong (it is a TypeError).
        UnsupportedError: the backend cannot do this; the message says which can.

    Source:
        arXiv 1706.03762 (attention), arXiv 2307.08691 (FlashAttention-2).

    Example:
        >>> q = torch.tensor([[[[2.0**0.5, 0.0]]]])
        >>> k = torch.tensor([[[[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]])
        >>> v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]]])
        >>> [round(x, 3) for x in attention(q, k, v).flatten().tolist()]
        [0.788, 0.212]
    """
    q, k, v = _autocast(q, k, v)
    seed = _drawn(seed, dropout_p, q)
    settings = (causal, scale, window, q_start, softcap, dropout_p, precise)
    plain = bias is alibi is sinks is key_lengths is seed is None and score is None and mask is None
    if not plain:
        bias, sinks = cast_alike(bias, q), cast_alike(sinks, q)
    captured = ops.traced(q)
    problem = _plain(q, k, v, settings) if plain and not captured else make_problem(
        q, k, v, _spec(settings), bias=bias, alibi=alibi, sinks=sinks, key_lengths=key_lengths, score=score, mask=mask,
        seed=seed, validate=validate,
    )  # fmt: skip
    chosen = _backend(backend, q)
    out, lse = ops.attend(problem, q, k, v, bias, sinks, chosen, with_lse=return_lse or return_stats, captured=captured)
    return _results(problem, q, k, v, out, lse, bias, (return_lse, return_stats), chosen)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: Window = None, q_start: int | None = None,
    softcap: float | None = None, bias: Tensor | None = None, alibi: Tensor | None = None, sinks: Tensor | None = None,
    key_lengths: Tensor | None = None, score: Score | None = None, mask: Mask | Tensor | None = None, dropout_p: float = 0,
    seed: int | Tensor | None = None, precise: bool = False, return_lse: bool = False, return_stats: bool = False,
    validate: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`attention` with causal=True: what a GPT block needs.

    Args:
        q: queries (B, HQ, M, D), fp16, bf16, fp32 or fp64.
        k: keys (B, HKV, N, D).
        v: values (B, HKV, N, DV).
        scale, window, q_start, softcap, bias, alibi, sinks, key_lengths, score, mask, dropout_p, seed, precise, return_lse,
            return_stats, validate, backend: as in `attention`.

    Returns:
        out (B, HQ, M, DV), or (out, lse), as `attention`.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`.

    Source:
        arXiv 1706.03762, section 3.2.3.

    Example:
        >>> x = torch.eye(3)[None, None]
        >>> causal_attention(x, x, x)[0, 0, 0].tolist()
        [1.0, 0.0, 0.0]
    """
    return attention(
        q, k, v, causal=True, scale=scale, window=window, q_start=q_start, softcap=softcap, bias=bias, alibi=alibi, sinks=sinks,
        key_lengths=key_lengths, score=score, mask=mask, dropout_p=dropout_p, seed=seed, precise=precise,
        return_lse=return_lse, return_stats=return_stats, validate=validate, backend=backend,
    )  # fmt: skip


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *, causal: bool = False,
    scale: float | None = None, window: Window = None, q_start: int | None = None, softcap: float | None = None,
    alibi: Tensor | None = None, sinks: Tensor | None = None, score: Score | None = None, mask: Mask | None = None,
    dropout_p: float = 0, seed: int | Tensor | None = None, precise: bool = False, return_lse: bool = False,
    return_stats: bool = False, validate: bool = False, backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Attention of sequences packed one after the other: sequence s owns the rows cu_seqlens[s] up to cu_seqlens[s + 1].

    Args:
        q: queries (total_q, HQ, D), fp16, bf16, fp32 or fp64.
        k: keys (total_k, HKV, D), dtype and device of q.
        v: values (total_k, HKV, DV).
        cu_seqlens_q: (sequences + 1,) int32, from 0, never decreasing; rows after the last are slack.
        cu_seqlens_k: (sequences + 1,) int32, the same for the keys.
        max_q: rows of the longest sequence, or more.
        max_k: the same for the keys.
        causal, scale, window, q_start, softcap, sinks, score, mask, dropout_p, seed, precise, return_lse, return_stats,
            validate, backend: as in `attention`; positions count from each sequence's start, and batch is the number of the
            sequence.
        alibi: slopes (HQ,) or (sequences, HQ).

    Returns:
        out (total_q, HQ, DV), or (out, lse) with lse (HQ, total_q). Slack rows get out 0 and lse -inf, and no gradient.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`.

    Source:
        arXiv 2205.14135 (FlashAttention) with the packed layout of its implementation.

    Example:
        >>> x, starts = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> packed = varlen_attention(x, x, x, starts, starts, 3, 3, causal=True)
        >>> alone = x[:2].transpose(0, 1)[None]
        >>> torch.allclose(packed[:2].transpose(0, 1)[None], attention(alone, alone, alone, causal=True), atol=1e-6)
        True
    """
    q, k, v = _autocast(q, k, v)
    sinks = cast_alike(sinks, q)
    spec = _spec((causal, scale, window, q_start, softcap, dropout_p, precise))
    problem = make_problem(
        q, k, v, spec, alibi=alibi, sinks=sinks, score=score, mask=mask, seed=_drawn(seed, dropout_p, q),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_q=max_q, max_k=max_k, validate=validate,
    )  # fmt: skip
    chosen = _backend(backend, q)
    out, lse = ops.attend(problem, q, k, v, None, sinks, chosen, with_lse=return_lse or return_stats)
    return _results(problem, q, k, v, out, lse, None, (return_lse, return_stats), chosen)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the union of two disjoint key sets, from the attention over each. Associative, commutative,
    differentiable.

    Args:
        out_a: (..., M, DV) output over the first keys.
        lse_a: (..., M) its natural log-sum-exp; -inf where no key was seen.
        out_b: (..., M, DV) output over the other keys.
        lse_b: (..., M).

    Returns:
        out (..., M, DV) in the dtype of out_a and lse (..., M).

    Raises:
        ShapeError: the shapes do not belong together.

    Source:
        arXiv 1805.02867 (online softmax), section 3.1.

    Example:
        >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
        >>> first = attention(q, k[:, :, :2], v[:, :, :2], return_lse=True)
        >>> rest = attention(q, k[:, :, 2:], v[:, :, 2:], return_lse=True)
        >>> torch.allclose(merge_attention(*first, *rest)[0], attention(q, k, v), atol=1e-6)
        True
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        got = f"out_a {tuple(out_a.shape)}, lse_a {tuple(lse_a.shape)}, out_b {tuple(out_b.shape)}, lse_b {tuple(lse_b.shape)}"
        raise ShapeError(f"{got}; wanted out (..., M, DV) and lse (..., M) of the same queries twice; slice or expand them")
    pivot = torch.maximum(lse_a, lse_b).detach()
    pivot = pivot.masked_fill(pivot == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - pivot), torch.exp(lse_b - pivot)
    total = weight_a + weight_b
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / total[..., None]
    return out.to(out_a.dtype), (pivot + total.log()).masked_fill(empty, float("-inf"))


def attention_weights(
    q: Tensor, k: Tensor, *, causal: bool = False, scale: float | None = None, window: Window = None, q_start: int | None = None,
    softcap: float | None = None, bias: Tensor | None = None, alibi: Tensor | None = None, sinks: Tensor | None = None,
    key_lengths: Tensor | None = None, score: Score | None = None, mask: Mask | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The coefficients that the values are summed with, to look at: O(M·N) memory, on purpose.

    Coefficients say where a head looked, not why the model answered as it did.

    Args:
        q: queries (B, HQ, M, D).
        k: keys (B, HKV, N, D).
        causal, scale, window, q_start, softcap, bias, alibi, sinks, key_lengths, score, mask: as in `attention`.

    Returns:
        (B, HQ, M, N) in the dtype of q: rows >= 0 that sum to 1, to less beside a sink, to 0 where no key is seen.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`.

    Source:
        arXiv 1706.03762, equation 1.

    Example:
        >>> q = torch.tensor([[[[2.0**0.5, 0.0]]]])
        >>> k = torch.tensor([[[[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]])
        >>> [round(x, 3) for x in attention_weights(q, k).flatten().tolist()]
        [0.665, 0.09, 0.245]
    """
    q, k, _ = _autocast(q, k, k)
    bias, sinks = cast_alike(bias, q), cast_alike(sinks, q)
    spec = make_spec(causal=causal, scale=scale, window=window, q_start=q_start, softcap=softcap)
    keep, user_mask = (mask, None) if isinstance(mask, Tensor) else (None, mask)
    problem = make_problem(
        q,
        k,
        k,
        spec,
        bias=bias,
        alibi=alibi,
        sinks=sinks,
        key_lengths=key_lengths,
        keep=keep,
        score=score,
        mask=user_mask,
    )
    return weights(problem, q, k)


def explain(q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = None) -> Explanation:
    """Which backend a call with these tensors takes, and why.

    Args:
        q: queries (B, HQ, M, D).
        k: keys (B, HKV, N, D).
        v: values (B, HKV, N, DV).
        backend: as in `attention`.

    Returns:
        Explanation(backend, reason).

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `attention`.

    Source:
        README, the table of backends: kernels where the device runs them, PyTorch's own attention on the CPU.

    Example:
        >>> x = torch.randn(1, 2, 4, 8)
        >>> explain(x, x, x).backend
        'torch'
    """
    make_problem(*_autocast(q, k, v), make_spec())
    chosen = _backend(backend, q)
    if backend is not None:
        return Explanation(chosen, "the call names it")
    return Explanation(chosen, target.reason(q.device))


_problems = Memory()


def _plain(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Problem:
    """The problem of a call that is not traced and has no further tensors, checked once for all calls like it."""
    if (
        type(k) not in ops.PLAIN or type(v) not in ops.PLAIN or q.is_neg() or k.is_neg() or v.is_neg()
        or q._is_zerotensor() or k._is_zerotensor() or v._is_zerotensor()
    ):  # fmt: skip
        return make_problem(q, k, v, _spec(settings))
    try:
        sizes = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout, q.device, k.device, v.device)
        key = (sizes, settings, tuple(map(type, settings)))  # True == 1 == 1.0
        problem: Problem | None = _problems.get(key)
    except (TypeError, RuntimeError):  # no hash: a list, or a setting of the wrong kind; no shape: a nested tensor
        return make_problem(q, k, v, _spec(settings))
    return problem or _problems.keep(key, make_problem(q, k, v, _spec(settings)))


def _spec(settings: Settings) -> AttentionSpec:
    """The spec of (causal, scale, window, q_start, softcap, dropout_p, precise)."""
    causal, scale, window, q_start, softcap, dropout_p, precise = settings
    return make_spec(
        causal=causal, scale=scale, window=window, q_start=q_start, softcap=softcap, dropout_p=dropout_p, precise=precise
    )  # fmt: skip


def _results(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, wanted: tuple[bool, bool],
    backend: str,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """out, then lse and the row statistics as wanted."""
    results = (out, lse) if wanted[0] else (out,)
    if wanted[1]:
        results = (*results, *ops.survey(problem, q, k, v, lse, bias, backend))
    return results if len(results) > 1 else out


def _backend(name: str | None, q: Tensor) -> str:
    """The backend of a call, checked."""
    if name is None:
        return target.default_backend(q.device)
    target.check_backend(name, q.device)
    return name


def _drawn(seed: int | Tensor | None, dropout_p: float, q: Tensor) -> int | Tensor | None:
    """The seed of a call: its own, or one from torch's generator on q's device, so that checkpointing replays it."""
    if seed is not None or dropout_p == 0.0 or not isinstance(q, Tensor):
        return seed
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where it is on, as torch's own attention has it."""
    dtype = target.autocast_dtype(q.device) if isinstance(q, Tensor) else None
    if dtype is None or not q.is_floating_point() or q.dtype == torch.float64:
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def cast_alike(t: Tensor | None, q: Tensor) -> Tensor | None:
    """bias or sinks: under autocast one of the other 16-bit dtype comes in q's, as torch's own attention has its mask."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.float16, torch.bfloat16) or t.dtype == q.dtype:
        return t
    return t if target.autocast_dtype(q.device) is None else t.to(q.dtype)
