"""The one rule of when a result is accurate.

The rule has no tolerance to tune. The oracle is the reference in fp64 on the inputs as already rounded, the yardstick
the reference in the dtype of the inputs, and a result passes when its error is at most twice the yardstick's, plus the
rounding of the result itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from andrea_triton.problem import make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing.inputs import Inputs, cast


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
    errors = eager_errors(inputs, exact)
    for field, tensor, wanted, eager_error in zip(Results._fields, got, exact, errors, strict=True):
        if tensor is not None and wanted is not None:
            _assert_within(tensor, wanted, eager_error, tensor.dtype, f"{name}: {field}")
    return got


def assert_accurate(got: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype, name: str) -> None:
    """Fail unless err(got) <= 2 err(eager) + rounding of the result, err being max |x - exact| over the tensor.

    Args:
        got: the result to be judged.
        eager: the reference's result in the dtype of the run.
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
    _assert_within(got, exact, error_of(eager, exact), dtype, name)


def _assert_within(got: Tensor, exact: Tensor, eager_error: float, dtype: torch.dtype, name: str) -> None:
    """assert_accurate for an eager error that is already known."""
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    assert eager_error < float("inf"), f"{name}: the eager run is not finite here, so it measures nothing"
    exact = exact.double()
    finite = exact.isfinite()
    rounding = torch.finfo(dtype).eps * float(exact[finite].abs().max()) if finite.any() else 0.0
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


def eager_errors(inputs: Inputs, exact: Results) -> list[float]:
    """err(eager) of every result. The eager fp64 run is the oracle itself: fp64 is asked to be 2**26 times
    closer than fp32 has to be, which nothing that passes through fp32 is."""
    if inputs.q.dtype == torch.float64:
        narrow = cast(inputs, torch.float32)
        errors = eager_errors(narrow, run(cast(narrow, torch.float64), attend_reference))
        return [error * 2.0**-26 for error in errors]
    eager = run(inputs, attend_reference)
    return [0.0 if x is None or y is None else error_of(x, y) for x, y in zip(eager, exact, strict=True)]
