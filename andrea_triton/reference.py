"""The definition of attention, dense and eager: what every other backend is measured against.

    logit  = score(cap tanh(scale q·k / cap)) - slope |q_pos - k_pos| + bias, or -inf where the key is hidden
    weight = exp(logit - lse), lse = log(sum of exp(logit) over the keys, and exp(sink))
    out    = sum of weight · v over the keys

It keeps the whole (B, HQ, M, N) matrix, runs on any dtype and device, and leaves the gradients to autograd. Scores,
weights and output are rounded to the dtype of q; the softmax between them is in fp32, as torch's own (fp64 for fp64).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andrea_triton.dropout import dropout_mask
from andrea_triton.errors import UnsupportedError
from andrea_triton.problem import Extras, Problem, accumulator


class Grid(NamedTuple):
    """Who meets whom in the dense matrix: four integer tensors that broadcast to (B, HQ, M, N)."""

    batch: Tensor
    head: Tensor
    q_pos: Tensor
    k_pos: Tensor


class Segment(NamedTuple):
    """Packed sequence number `batch` as a dense problem: rows `queries` of q, rows `keys` of k and v."""

    batch: int
    problem: Problem
    queries: slice
    keys: slice


def reference(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by its definition.

    Args:
        problem: the checked call.
        q: (B, HQ, M, D), any float dtype; packed (total_q, HQ, D).
        k: (B, HKV, N, D), dtype of q; packed (total_k, HKV, D).
        v: (B, HKV, N, DV), dtype of q; packed (total_k, HKV, DV).

    Returns:
        out (B, HQ, M, DV) in the dtype of q, packed (total_q, HQ, DV); and lse (B, HQ, M), packed (HQ, total_q), a
        natural logarithm in fp32 (fp64 for fp64). A query that sees no key has out 0 and lse -inf, or its sink; rows
        after the last packed sequence have out 0 and lse -inf. Both are differentiable by q, k, v, bias and sinks.

    Raises:
        UnsupportedError: a Score or Mask without its torch_fn.

    Source:
        arXiv 1706.03762 (attention), arXiv 2408.00118 (softcap), arXiv 2108.12409 (ALiBi), arXiv 2309.17453 (sinks).

    Example:
        >>> from andrea_triton.problem import make_problem
        >>> from andrea_triton.spec import make_spec
        >>> q = torch.tensor([[[[2.0**0.5, 0.0]]]])
        >>> k = torch.tensor([[[[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]])
        >>> v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]]])
        >>> out, lse = reference(make_problem(q, k, v, make_spec()), q, k, v)
        >>> [round(x, 3) for x in out.flatten().tolist()]
        [0.788, 0.212]
    """
    if not problem.packed:
        return _dense(problem, q, k, v, 0)
    nothing = q[:0, :, :1] + k[:0, :1, :1] + v[:0, :1, :1]  # no sequence is no reason to lose the graph
    outs, lses, end = [nothing.expand(0, problem.HQ, problem.DV)], [nothing[..., 0].transpose(0, 1).to(accumulator(q.dtype))], 0
    for batch, own, queries, keys in segments(problem):
        out, lse = _dense(own, one_segment(q, queries), one_segment(k, keys), one_segment(v, keys), batch)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
        end = queries.stop
    outs.append(q.new_zeros(problem.M - end, problem.HQ, problem.DV))
    lses.append(_row_values(problem, problem.M - end, float("-inf")))
    return torch.cat(outs), torch.cat(lses, 1)


def wide_reference(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """reference() computed in fp32 (fp64 for fp64) and rounded once, at the end: no product of 16 bits that overflows."""
    acc = accumulator(q.dtype)
    out, lse = reference(replace(problem, dtype=acc), q.to(acc), k.to(acc), v.to(acc))
    return out.to(q.dtype), lse


def weights(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
    """The matrix of coefficients that the values are summed with, before any dropout.

    Args:
        problem: a checked dense call.
        q: (B, HQ, M, D).
        k: (B, HKV, N, D), dtype of q.

    Returns:
        (B, HQ, M, N) in the dtype of q, all >= 0. A row sums to 1, to less beside a sink, to 0 where no key is seen.

    Raises:
        UnsupportedError: packed sequences, or a Score or Mask without its torch_fn.

    Example:
        >>> from andrea_triton.problem import make_problem
        >>> from andrea_triton.spec import make_spec
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> weights(make_problem(x, x, x, make_spec(causal=True)), x, x)[0, 0].tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """
    if problem.packed:
        raise UnsupportedError("attention_weights", "varlen", "sequences have matrices of many sizes; pass them one by one")
    acc = accumulator(q.dtype)
    probabilities, _ = _softmax(_logits(problem, q.to(acc), k.to(acc), _grid(problem, 0)), problem.extras.sinks)
    return probabilities.to(q.dtype)


def statistics(problem: Problem, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What one looks at to see whether attention is healthy: the largest logit and the entropy of every row.

    Args:
        problem: the checked call.
        q: (B, HQ, M, D); packed (total_q, HQ, D).
        k: (B, HKV, N, D), dtype of q; packed (total_k, HKV, D).

    Returns:
        The largest logit over the keys that the query sees, -inf where there is none; and the entropy in nats, the sum
        of -w log w over the keys, without dropout. Both (B, HQ, M) fp32, packed (HQ, total_q), without gradient.

    Raises:
        UnsupportedError: a Score or Mask without its torch_fn.

    Example:
        >>> from andrea_triton.problem import make_problem
        >>> from andrea_triton.spec import make_spec
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> peak, entropy = statistics(make_problem(x, x, x, make_spec(causal=True)), x, x)
        >>> [round(nats, 3) for nats in entropy.flatten().tolist()]
        [0.0, 0.693]
    """
    acc = accumulator(q.dtype)
    with torch.no_grad():
        q, k = q.to(acc), k.to(acc)
        if not problem.packed:
            return _dense_statistics(problem, q, k, 0)
        peak = _row_values(problem, problem.M, float("-inf")).float()
        entropy = torch.zeros_like(peak)
        for batch, own, queries, keys in segments(problem):
            rows = _dense_statistics(own, one_segment(q, queries), one_segment(k, keys), batch)
            peak[:, queries], entropy[:, queries] = rows[0][0], rows[1][0]
        return peak, entropy


def _dense(problem: Problem, q: Tensor, k: Tensor, v: Tensor, first_batch: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of (B, H, T, D) tensors; first_batch is the index of batch entry 0."""
    grid = _grid(problem, first_batch)
    probabilities, lse = _softmax(_logits(problem, q, k, grid), problem.extras.sinks)
    p, seed = problem.spec.dropout_p, problem.extras.seed
    if p > 0.0 and seed is not None:
        kept = dropout_mask(
            seed,
            p,
            problem.B,
            problem.HQ,
            grid.q_pos.flatten(),
            grid.k_pos.flatten(),
            q.device,
            first_batch=first_batch,
        )
        probabilities = probabilities * kept / (1.0 - p)
    return probabilities.to(q.dtype) @ _per_query_head(v, problem), lse


def _dense_statistics(problem: Problem, q: Tensor, k: Tensor, first_batch: int) -> tuple[Tensor, Tensor]:
    """(largest logit, entropy) of (B, H, T, D) tensors."""
    logits = _logits(problem, q, k, _grid(problem, first_batch))
    probabilities, _ = _softmax(logits, problem.extras.sinks)
    nothing = logits.new_full((*logits.shape[:-1], 1), float("-inf"))
    peak = torch.cat([logits, nothing], -1).amax(-1)
    return peak.float(), torch.special.entr(probabilities).sum(-1).float()


def _logits(problem: Problem, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """(B, HQ, M, N) logits, -inf where the query may not see the key.

    A hidden score is 0 before anything is made of it, so that a NaN in a hidden key goes nowhere.
    """
    extras, cap = problem.extras, problem.spec.softcap
    hidden = ~_visible(problem, grid)
    logits = (q @ _per_query_head(k, problem).transpose(-2, -1) * problem.scale).masked_fill(hidden, 0.0)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if extras.score is not None:
        logits = torch_twin("score", extras.score.torch_fn)(logits, *grid, *extras.score.args).to(q.dtype)
    if extras.slopes is not None:
        distance = (grid.q_pos - grid.k_pos).abs()
        logits = logits - (extras.slopes.to(accumulator(q.dtype))[:, :, None, None] * distance).to(q.dtype)
    if extras.bias is not None:
        logits = logits + extras.bias.to(q.dtype)
    return logits.masked_fill(hidden, float("-inf"))


def _visible(problem: Problem, grid: Grid) -> Tensor:
    """Bool, broadcastable to (B, HQ, M, N): True where the query may see the key."""
    extras, left, right = problem.extras, problem.spec.left, problem.spec.right
    visible = torch.ones_like(grid.q_pos + grid.k_pos, dtype=torch.bool)
    if left is not None:
        visible = visible & (grid.k_pos >= grid.q_pos - left)
    if right is not None:
        visible = visible & (grid.k_pos <= grid.q_pos + right)
    if extras.key_lengths is not None:
        visible = visible & (grid.k_pos < extras.key_lengths[:, None, None, None])
    if extras.keep is not None:
        visible = visible & extras.keep
    if extras.mask is not None:
        visible = visible & torch_twin("mask", extras.mask.torch_fn)(*grid, *extras.mask.args)
    return visible


def _softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, lse) of every row, in fp32 (fp64 for fp64).

    One more column, the sink or -inf, takes part and is cut off again: a row without keys is no special case. A sink of +inf
    takes all the weight, where inf - inf would say NaN.
    """
    batch, heads, queries, keys = logits.shape
    dtype = accumulator(logits.dtype)
    column = logits.new_full((heads,), float("-inf"), dtype=dtype) if sinks is None else sinks.to(dtype)
    rows = torch.cat([logits.to(dtype), column.view(1, heads, 1, 1).expand(batch, heads, queries, 1)], -1)
    shut = column.detach().isposinf().view(heads, 1, 1)
    rows = rows.masked_fill(shut, float("-inf"))
    pivot = rows.detach().amax(-1, keepdim=True)
    pivot = pivot.masked_fill(pivot == float("-inf"), 0.0)
    powers = torch.exp(rows - pivot)
    total = powers.sum(-1, keepdim=True)
    empty = total == 0.0
    total = total.masked_fill(empty, 1.0)
    lse = (pivot + total.log()).masked_fill(empty, float("-inf")).masked_fill(shut, float("inf"))
    return (powers / total)[..., :keys], lse.squeeze(-1)


def _grid(problem: Problem, first_batch: int) -> Grid:
    """The four indices of a dense problem."""
    device = problem.device
    return Grid(
        torch.arange(first_batch, first_batch + problem.B, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.HQ, device=device).view(1, -1, 1, 1),
        torch.arange(problem.M, device=device).view(1, 1, -1, 1) + problem.q_start,
        torch.arange(problem.N, device=device).view(1, 1, 1, -1),
    )


def segments(problem: Problem) -> Iterator[Segment]:
    """The packed sequences, one dense problem each. Reads cu_seqlens, so it waits for the device."""
    extras = problem.extras
    assert extras.cu_seqlens_q is not None and extras.cu_seqlens_k is not None
    starts_q, starts_k = extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist()
    for batch in range(problem.B):
        queries = slice(starts_q[batch], starts_q[batch + 1])
        keys = slice(starts_k[batch], starts_k[batch + 1])
        own = Extras(
            slopes=None if extras.slopes is None else extras.slopes[batch : batch + 1],
            sinks=extras.sinks,
            seed=extras.seed,
            score=extras.score,
            mask=extras.mask,
        )
        M, N = queries.stop - queries.start, keys.stop - keys.start
        yield Segment(batch, replace(problem, B=1, M=M, N=N, extras=own, max_q=0, max_k=0), queries, keys)


def one_segment(packed: Tensor, rows: slice) -> Tensor:
    """(1, H, T, D) view of the rows of a (total, H, D) tensor."""
    return packed[rows].transpose(0, 1).unsqueeze(0)


def _row_values(problem: Problem, queries: int, value: float) -> Tensor:
    """(HQ, queries) of one value, for rows of a packed lse."""
    return torch.full((problem.HQ, queries), value, dtype=accumulator(problem.dtype), device=problem.device)


def _per_query_head(x: Tensor, problem: Problem) -> Tensor:
    """(B, HQ, N, D): every key head once for each of the query heads that read it."""
    return x.unsqueeze(2).expand(-1, -1, problem.group, -1, -1).flatten(1, 2)


def torch_twin(name: str, torch_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    if torch_fn is None:
        reason = f"torch_fn is missing; give {name} its dense twin, torch_fn=, or use backend='triton'"
        raise UnsupportedError(name, "reference", reason)
    return torch_fn


def row_bias_grad(out: Tensor, lse: Tensor, sinks: Tensor | None, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Gradient of a number added to all logits of a query: it leaves the weights alone, and with a sink takes weight from that.

    Summing dS over the keys would leave only rounding here.

    Args:
        out: (B, HQ, M, DV).
        lse: (B, HQ, M).
        sinks: (HQ,) or None.
        dout: gradient of out.
        dlse: gradient of lse, or None.

    Returns:
        (B, HQ, M, 1), dtype of lse: P dlse + (1 - P) Σ dout out, P = 1 - exp(sink - lse) being the weight of the keys.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> row_bias_grad(one[..., None], one, None, one[..., None], 3 * one).item()
        3.0
    """
    grad = torch.zeros_like(lse) if dlse is None else dlse
    if sinks is not None:
        keys = -torch.expm1(sinks.to(lse.dtype)[:, None] - lse)
        grad = keys * grad + (1 - keys) * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return grad.masked_fill(lse.isinf(), 0.0)[..., None]
