"""The one rule of when a result is accurate.

The rule has no tolerance to tune. The oracle is the reference in fp64 on the inputs as already rounded, the yardstick
the reference in the dtype of the inputs, and a result passes when its error is at most twice the yardstick's, plus the
rounding of the result itself.

One evaluation may be luckily near the truth where there are few numbers. So the yardstick is the largest error of several
that are as right as one another: as written, scaled before the product, and with every sum in two other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from andrea_triton.problem import make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing.inputs import Inputs, cast
from andrea_triton.testing.orders import Reordered, backwards, odd_first


class Results(NamedTuple):
    """What a call gives, and the gradients of sum(out · dout) + sum(lse · dlse); None where there is no such input."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


Attend = Callable[[Inputs], tuple[Tensor, Tensor]]


def attend_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by the reference, in the dtype of the inputs."""
    problem = make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings), **inputs.extras)
    return reference(problem, inputs.q, inputs.k, inputs.v)


def run(inputs: Inputs, attend: Attend) -> Results:
    """Call a function on the inputs, whose tensors stay where they lie in memory, and take every gradient."""
    extras = dict(inputs.extras)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    for name in ("bias", "sinks"):
        if name in extras:
            extras[name] = extras[name].detach().requires_grad_()
    out, lse = attend(inputs._replace(q=q, k=k, v=v, extras=extras))
    results, flowing = ([out], [inputs.dout]) if inputs.dlse is None else ([out, lse], [inputs.dout, inputs.dlse])
    learned = [q, k, v, *(extras[name] for name in ("bias", "sinks") if name in extras)]
    dq, dk, dv, *rest = torch.autograd.grad(results, learned, flowing, allow_unused=True, materialize_grads=True)
    found = iter(rest)
    dbias, dsinks = (next(found) if name in extras else None for name in ("bias", "sinks"))
    return Results(out.detach(), lse.detach(), dq, dk, dv, dbias, dsinks)


def check(inputs: Inputs, attend: Attend, name: str) -> Results:
    """Fail unless a function gives out, lse and every gradient as accurately as the rule asks.

    Args:
        inputs: the call; its dtype is the one that is judged.
        attend: the function that is judged.
        name: of the case, for the message.

    Returns:
        What the function gave.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, or not accurate.

    Example:
        >>> from andrea_triton.testing import Case, make_inputs
        >>> check(make_inputs(Case("small", M=5, D=8), torch.float32), attend_reference, "small").out.shape
        torch.Size([1, 2, 5, 8])
    """
    exact, got = run(cast(inputs, torch.float64), attend_reference), run(inputs, attend)
    assert got.out.dtype == inputs.q.dtype, f"{name}: out is {got.out.dtype}, wanted {inputs.q.dtype}"
    errors = eager_errors(inputs, exact, got)
    for field, tensor, wanted, eager_error in zip(Results._fields, got, exact, errors, strict=True):
        if tensor is not None and wanted is not None:
            _assert_within(tensor, wanted, eager_error, tensor.dtype, f"{name}: {field}")
    return got


def assert_accurate(got: Tensor, eager: Tensor | Sequence[Tensor], exact: Tensor, dtype: torch.dtype, name: str) -> None:
    """Fail unless err(got) <= 2 err(eager) + rounding of the result, err being max |x - exact| over the tensor.

    Args:
        got: the result to be judged.
        eager: the reference's result in the dtype of the run, or those of several evaluations, of which the worst counts.
        exact: the reference's result in fp64 on the same rounded inputs.
        dtype: of the result; its rounding is eps(dtype) · max |exact|.
        name: of the result, for the message.

    Raises:
        AssertionError: not accurate, not finite where exact is finite, or not equal where exact is infinite.

    Example:
        >>> one = torch.ones(3)
        >>> assert_accurate(one + 1e-7, one, one, torch.float32, "out")
        >>> assert_accurate(one + 1e-6, one, one, torch.float32, "out")
        Traceback (most recent call last):
        AssertionError: out: error 9.54e-07 is over 1.19e-07 = 2 · 0.00e+00 (eager) + 1.19e-07 (rounding), at (0,)
    """
    runs = [eager] if isinstance(eager, Tensor) else eager
    _assert_within(got, exact, _largest([error_of(x, exact) for x in runs]), dtype, name)


def _assert_within(got: Tensor, exact: Tensor, eager_error: float, dtype: torch.dtype, name: str) -> None:
    """assert_accurate for an eager error that is already known."""
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    assert eager_error < float("inf"), f"{name}: the eager run is not finite here, so it measures nothing"
    exact = exact.double()
    rounding = _rounding(exact, dtype)
    allowed, found = 2 * eager_error + rounding, error_of(got, exact)
    if found <= allowed:
        return
    worst = tuple(int(i) for i in torch.unravel_index(_distance(got, exact).argmax(), exact.shape))
    raise AssertionError(
        f"{name}: error {found:.2e} is over {allowed:.2e} = 2 · {eager_error:.2e} (eager) + {rounding:.2e} (rounding), at {worst}"
    )


def error_of(x: Tensor, exact: Tensor) -> float:
    """max |x - exact| over the tensor, 0 for a tensor without elements."""
    return float(_distance(x, exact).max()) if exact.numel() else 0.0


def _distance(x: Tensor, exact: Tensor) -> Tensor:
    """|x - exact| in fp64, 0 where both are the same or both NaN, inf where only one of them is finite."""
    x, exact = x.double(), exact.double()
    same = (x == exact) | (x.isnan() & exact.isnan())
    return (x - exact).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))


def eager_runs(inputs: Inputs) -> Iterator[Results]:
    """Results of equally valid eager evaluations of a call, in the dtype of its inputs.

    Args:
        inputs: the call.

    Returns:
        One by one, for the later are seldom needed: the reference as it is; with q scaled before the product in place of the
        scores after it; and with every sum, forward and backward, from its last term to its first, and odd terms first.

    Example:
        >>> from andrea_triton.testing import Case, make_inputs
        >>> first, *others = (x.dk for x in eager_runs(make_inputs(Case("small", M=5, D=8), torch.float32)))
        >>> any(torch.equal(first, other) for other in others), all(torch.allclose(first, other) for other in others)
        (False, True)
    """
    yield run(inputs, attend_reference)
    yield run(inputs, _scaled_first)
    for order in (backwards, odd_first):
        with Reordered(order):
            results = run(inputs, attend_reference)
        yield results


def _scaled_first(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """attend_reference with the scale in q."""
    scale = inputs.settings.get("scale")
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    return attend_reference(inputs._replace(q=inputs.q * scale, settings={**inputs.settings, "scale": 1.0}))


def eager_errors(inputs: Inputs, exact: Results, got: Results | None = None) -> list[float]:
    """The yardstick: the largest error of eager_runs, for every result.

    A run that is not finite where it should be measures nothing, and counts only where no other does. The eager fp64 run is
    the oracle itself: fp64 is asked to be 2**26 times closer than fp32 has to be, which nothing that passes through fp32 is.

    Args:
        inputs: the call.
        exact: the reference's results in fp64 on the same rounded inputs.
        got: results to be judged: no further run is made once they pass by those made so far, for more runs only allow more.

    Returns:
        One number for each field of Results, 0 where there is no such result.

    Example:
        >>> from andrea_triton.testing import Case, make_inputs
        >>> inputs = make_inputs(Case("small", M=5, D=8), torch.float32)
        >>> errors = eager_errors(inputs, run(cast(inputs, torch.float64), attend_reference))
        >>> all(0 < error < 1e-6 for error in errors[:5]), errors[5:]
        (True, [0.0, 0.0])
    """
    narrow, unit = inputs, 1.0
    if inputs.q.dtype == torch.float64:
        narrow, unit = cast(inputs, torch.float32), 2.0**-26
    wide = exact if narrow is inputs else run(cast(narrow, torch.float64), attend_reference)
    found: list[list[float]] = []
    for eager in eager_runs(narrow):
        found.append([0.0 if x is None or y is None else unit * error_of(x, y) for x, y in zip(eager, wide, strict=True)])
        errors = [_largest(of_runs) for of_runs in zip(*found, strict=True)]
        if got is not None and all(map(_passes, got, exact, errors)):
            break
    return errors


def _passes(got: Tensor | None, exact: Tensor | None, eager_error: float) -> bool:
    """Whether the rule holds by an eager error, or has nothing to judge."""
    if got is None or exact is None:
        return True
    return got.shape == exact.shape and error_of(got, exact) <= 2 * eager_error + _rounding(exact, got.dtype) < float("inf")


def _rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """eps(dtype) · max |exact| over what is finite."""
    finite = exact[exact.isfinite()].double().abs()
    return torch.finfo(dtype).eps * float(finite.max()) if finite.numel() else 0.0


def _largest(errors: Sequence[float]) -> float:
    """The largest finite one, inf where none is."""
    return max((error for error in errors if error < float("inf")), default=float("inf"))
