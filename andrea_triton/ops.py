"""From a checked problem to tensors with gradients: the autograd Function, and the opaque operators for graphs.

An eager call goes straight to the kernels through `Attend`. While torch.compile or torch.export traces, or a transform or
dispatch mode is active, the same work goes through the operators `andrea_triton::forward` and `andrea_triton::backward`,
which a graph keeps whole: Triton's own capture of kernels loses tensors inside NamedTuples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cpu, flops
from .backends import dense_backward, run_backward, run_forward, run_statistics
from .errors import UnsupportedError
from .problem import Problem, accumulator, make_problem, unexpanded
from .reference import reference, wide_reference
from .spec import AttentionSpec

PLAIN = (Tensor, torch.nn.Parameter)
ABSENT = (False, False)


class Attend(torch.autograd.Function):
    """out, or out and lse, of q, k, v, bias and sinks, with their gradients; lse is differentiable like out."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem, backend: str, with_lse: bool, *learned: Tensor | None
    ) -> Any:
        """Run the forward and keep what the backward reads, every tensor of the call in autograd's own keeping. learned: bias and
        sinks, where there is one of them, for autograd takes time over what is absent too."""
        saved = run_forward(problem, q, k, v, backend)
        emptied, sides = (problem, ()) if problem.plain else problem.emptied()
        ctx.save_for_backward(q, k, v, *saved, *learned, *sides)
        ctx.problem, ctx.backend, ctx.plain = emptied, backend, problem.plain
        if not with_lse:
            return saved[0]
        ctx.set_materialize_grads(False)
        return saved[0], saved[1]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Gradients by the kernels; through the dense reference when they are to be differentiated again."""
        kept, needs, problem, bias, sinks = ctx.saved_tensors, ctx.needs_input_grad, ctx.problem, None, None
        if dout is None and dlse is None:
            return (None,) * len(needs)
        if len(needs) > 6:
            bias, sinks = kept[7:9]
        if not ctx.plain:
            problem = problem.filled(kept[7 if len(needs) == 6 else 9 :], bias, sinks)
        inputs, saved, wanted = (*kept[:3], bias, sinks), kept[3:7], (*needs[:3], *(needs[6:] or ABSENT))
        if torch.is_grad_enabled() or batching(dout) or batching(dlse) or torch._C._len_torch_dispatch_stack() > 0:
            grads = indirect_backward(problem, inputs, saved, dout, dlse, wanted, ctx.backend)
        else:
            grads = run_backward(problem, inputs, saved, dout, dlse, wanted, ctx.backend)
        # A gradient that is wanted and has nothing to flow from, at batch 0 for instance, is zero, as torch's is.
        found = [
            None if not w else torch.zeros_like(t) if g is None else g for g, t, w in zip(grads, inputs, wanted, strict=True)
        ]
        return (*found[:3], None, None, None, *found[3 : len(needs) - 3])


# Function.apply without what it asks of every argument, in Python: whether it is left over from a transform that has ended.
_apply: Any = super(torch.autograd.Function, Attend).apply
leftover = torch._C._functorch.is_functorch_wrapped_tensor


def indirect_backward(
    problem: Problem, inputs: tuple[Tensor | None, ...], saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None,
    needs: tuple[bool, ...], backend: str,
) -> Any:  # fmt: skip
    """The gradients of a backward that is itself recorded, batched or watched by a dispatch mode."""
    own = problem.extras.score is not None or problem.extras.mask is not None
    batched, watched = batching(dout) or batching(dlse), torch._C._len_torch_dispatch_stack() > 0
    if torch.is_grad_enabled() or (batched and own):
        return dense_backward(problem, inputs, dout, dlse, torch.is_grad_enabled())
    if own and not batched:
        return run_backward(problem, inputs, saved, dout, dlse, needs, backend)
    if watched:
        flops.announce()  # the mode is to see one operator, also where the forward was none
    tensors, numbers = take_apart(problem, inputs[3], backend)
    call = TracedBackward.apply if batched == "func" else backward_op
    return call(dout, dlse, *saved, list(needs), *inputs[:3], *tensors, *numbers)


def batching(grad: Tensor | None) -> str:
    """By whom a gradient is many at once: "autograd" (is_grads_batched, jacobian(vectorize=True)), "func" (torch.vmap), or ""."""
    if grad is None:
        return ""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        return "autograd"
    return "func" if torch._C._functorch.is_functorch_wrapped_tensor(grad) else ""


# The operators. Their arguments are a problem taken apart: what a graph can carry, tensors and numbers.
TENSORS = 11  # q, k, v and the tensors of take_apart; the numbers follow


def take_apart(problem: Problem, bias: Tensor | None, backend: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(tensors, numbers) of a problem, beside q, k, v: the operators' arguments from `bias` and from `left` on."""
    x, spec = problem.extras, problem.spec
    seed = (
        x.seed
        if x.seed is None or isinstance(x.seed, Tensor)
        else torch.full((), x.seed, dtype=torch.int64, device=problem.device)
    )
    keep = None if x.keep is None else unexpanded(x.keep)
    tensors = (bias, x.sinks, keep, x.slopes, x.key_lengths, x.cu_seqlens_q, x.cu_seqlens_k, seed)
    band = (spec.left, spec.right, spec.q_start, spec.scale, spec.softcap, spec.dropout_p, spec.precise)
    return tensors, (*band, problem.max_q, problem.max_k, backend)


def put_together(q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Problem, str]:
    """(problem, backend) from the operators' arguments."""
    bias, sinks, keep, slopes, key_lengths, cu_q, cu_k, seed = tensors
    *spec, max_q, max_k, backend = numbers
    lengths = {} if cu_q is None else {"max_q": max_q, "max_k": max_k}
    problem = make_problem(
        q, k, v, AttentionSpec(*spec), bias=bias, sinks=sinks, keep=keep, alibi=slopes, key_lengths=key_lengths,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seed=seed, **lengths,
    )  # fmt: skip
    return problem, backend


@torch.library.custom_op("andrea_triton::forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, keep: Tensor | None, slopes: Tensor | None,
    key_lengths: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seed: Tensor | None,
    left: int | None, right: int | None, q_start: int | None, scale: float | None, softcap: float | None, dropout_p: float,
    precise: bool, max_q: int, max_k: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, row_max, row_sum: run_forward for graphs."""
    tensors = (bias, sinks, keep, slopes, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    numbers = (left, right, q_start, scale, softcap, dropout_p, precise, max_q, max_k, backend)
    problem, backend = put_together(q, k, v, tensors, numbers)
    out, lse, row_max, row_sum = run_forward(problem, q, k, v, backend)
    return out, lse, row_max, row_sum


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed, kernels = rest[5] is not None, rest[-1] != "torch"
    rows = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:3])
    lse = q.new_empty(rows, dtype=accumulator(q.dtype))
    parts = [torch.empty_like(lse) if kernels else lse.new_empty(0) for _ in range(2)]
    return cpu.room_like(q, v.shape[-1], packed), lse, parts[0], parts[1]


@torch.library.custom_op("andrea_triton::backward", mutates_args=())
def backward_op(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, row_max: Tensor, row_sum: Tensor, needs: list[bool],
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, keep: Tensor | None, slopes: Tensor | None,
    key_lengths: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seed: Tensor | None,
    left: int | None, right: int | None, q_start: int | None, scale: float | None, softcap: float | None, dropout_p: float,
    precise: bool, max_q: int, max_k: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dbias, dsinks, empty where not needed: run_backward for graphs."""
    tensors = (bias, sinks, keep, slopes, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    numbers = (left, right, q_start, scale, softcap, dropout_p, precise, max_q, max_k, backend)
    problem, backend = put_together(q, k, v, tensors, numbers)
    saved, inputs = (out, lse, row_max, row_sum), (q, k, v, bias, sinks)
    grads = run_backward(problem, inputs, saved, dout, dlse, tuple(needs), backend)
    return tuple(
        q.new_empty(0) if t is None or not need
        else torch.zeros_like(t) if grad is None
        else grad if i < 3
        else grad.contiguous()
        for i, (grad, t, need) in enumerate(zip(grads, inputs, needs, strict=True))
    )  # type: ignore[return-value]  # fmt: skip


@backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    needs, inputs, packed = args[6], args[7:12], args[16] is not None
    return tuple(
        inputs[0].new_empty(0) if t is None or not need
        else cpu.room_like(t, t.shape[-1], packed) if i < 3
        else t.new_empty(t.shape)
        for i, (t, need) in enumerate(zip(inputs, needs, strict=True))
    )  # fmt: skip


class TracedBackward(torch.autograd.Function):
    """The backward operator as a Function: a second derivative through it is an error, not a wrong number."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Call the operator."""
        return backward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Always an error."""
        raise UnsupportedError(
            "double backward",
            "a compiled or transformed call",
            "call it eagerly with create_graph=True, or use backend='reference'",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One call per batch entry."""
        return each_entry(TracedBackward.apply, info.batch_size, in_dims, args)


class Traced(torch.autograd.Function):
    """Attend through the operators, for graphs and function transforms. Results: out, lse, row_max, row_sum."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Call the operator."""
        return forward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the operator's tensors and numbers, and its results."""
        ctx.save_for_backward(*inputs[:TENSORS], *output)
        ctx.numbers = inputs[TENSORS:]
        ctx.mark_non_differentiable(output[2], output[3])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        """Call the backward operator."""
        kept = ctx.saved_tensors
        inputs, saved = kept[:TENSORS], kept[TENSORS:]
        rest = (None,) * (TENSORS - 5 + len(ctx.numbers))  # of 5 inputs there are gradients
        if dout is None and dlse is None:
            return (*(None,) * 5, *rest)
        needs = list(ctx.needs_input_grad[:5])
        call = backward_op if torch.compiler.is_compiling() else TracedBackward.apply
        grads = call(dout, dlse, *saved, needs, *inputs, *ctx.numbers)
        return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *rest)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One call per batch entry."""
        return each_entry(Traced.apply, info.batch_size, in_dims, args)


def each_entry(function: Any, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """vmap by a loop: the results of every batch entry, stacked."""
    entries = ([x if d is None or isinstance(d, list) else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
               for i in range(size))  # fmt: skip
    rows = [function(*entry) for entry in entries]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


forward_op.register_autograd(Traced.backward, setup_context=lambda ctx, inputs, output: Traced.setup_context(ctx, inputs, output))


def traced(q: Tensor) -> bool:
    """Whether the call is to be captured rather than run: tracing, a function transform, a dispatch mode, or no plain tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(q) not in PLAIN
        or q.device.type == "meta"
    )


@torch.library.custom_op("andrea_triton::statistics", mutates_args=())
def statistics_op(
    lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, keep: Tensor | None,
    slopes: Tensor | None, key_lengths: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seed: Tensor | None, left: int | None, right: int | None, q_start: int | None, scale: float | None, softcap: float | None,
    dropout_p: float, precise: bool, max_q: int, max_k: int, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Largest logit and entropy of every row: run_statistics for graphs."""
    tensors = (bias, sinks, keep, slopes, key_lengths, cu_seqlens_q, cu_seqlens_k, seed)
    numbers = (left, right, q_start, scale, softcap, dropout_p, precise, max_q, max_k, backend)
    problem, backend = put_together(q, k, v, tensors, numbers)
    return run_statistics(problem, q, k, lse, backend)


@statistics_op.register_fake
def _(lse: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return lse.new_empty(lse.shape, dtype=torch.float32), lse.new_empty(lse.shape, dtype=torch.float32)


def survey(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, bias: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """The row statistics of a call that gave lse: largest logit and entropy, without gradient."""
    q, k, v, lse = q.detach(), k.detach(), v.detach(), lse.detach()
    if traced(q) and problem.extras.score is None and problem.extras.mask is None:
        tensors, numbers = take_apart(problem, bias, backend)
        tensors = tuple(t.detach() if isinstance(t, Tensor) else t for t in tensors)
        return statistics_op(lse, q, k, v, *tensors, *numbers)
    return run_statistics(problem, q, k, lse, backend)


def distinct(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    """The tensors, with views in the place of repetitions: Dynamo wants every argument of a Function to be another tensor."""
    found: list[Any] = []
    for t in tensors:
        found.append(t.view_as(t) if t is not None and any(t is other for other in found) else t)
    return found


def attend(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, backend: str, *,
    with_lse: bool = True, captured: bool | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """out, lse of a problem by a backend. bias in the caller's own shape; problem.extras holds its broadcast view; without
    with_lse lse may be None, which spares autograd an output; captured: traced(q), where it is known. Forward-mode derivatives
    go through the dense reference: O(M N) memory."""
    if backend == "reference":
        return reference(problem, q, k, v)
    if torch.autograd.forward_ad._current_level >= 0:
        return wide_reference(problem, q, k, v)
    score, mask = problem.extras.score, problem.extras.mask
    learned = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any([t is not None and t.requires_grad for t in (bias, sinks)])
    )
    if score is None and mask is None and (traced(q) if captured is None else captured):
        if not torch.compiler.is_compiling():
            flops.announce()
        tensors, numbers = take_apart(problem, bias, backend)
        q, k, v, *others = distinct((q, k, v, *tensors))
        # Dynamo cannot trace a Function that nothing differentiates.
        call = Traced.apply if learned or not torch.compiler.is_compiling() else forward_op
        out, lse, _, _ = call(q, k, v, *others, *numbers)
        return out, lse
    if not learned:
        out, lse, *_ = run_forward(problem, q, k, v, backend, learning=False)
        return out, lse
    if score is not None and score.grad is None and score.torch_fn is None:
        way_out = "give it grad=, its derivative (1 where fn only adds), or torch_fn=, from which autograd finds it"
        raise UnsupportedError("a gradient", "a Score without grad and torch_fn", way_out)
    if problem.plain and not (leftover(q) or leftover(k) or leftover(v)):
        found: Any = _apply(q, k, v, problem, backend, with_lse)
    else:
        found = Attend.apply(q, k, v, problem, backend, with_lse, *(() if bias is None and sinks is None else (bias, sinks)))
    return found if with_lse else (found, None)
