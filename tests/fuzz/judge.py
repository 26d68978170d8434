"""Run a drawn call and judge what it gives.

The accuracy rule takes eager PyTorch's error as its yardstick. Of one tiny call that error may be nothing by luck, and then the
rule asks for what no arithmetic gives. So a result that fails is measured again with the worst error of eager over more
draws of the same call: what the dtype costs on such inputs. For lse, a number near 1 whatever the inputs are, draws of
normal numbers count too: on zeros, say, eager's scores are exact, and all that is left is its logarithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import event
from torch import Tensor

import andrea_triton
from andrea_triton.launch import run as launcher
from andrea_triton.launch.configs import Config
from andrea_triton.launch.interpreter import interpret
from andrea_triton.launch.plan import tiled, unit_stride
from andrea_triton.problem import Problem
from andrea_triton.testing import Attend, Inputs, Results, attend_reference, cast, eager_errors, error_of, run
from tests.fuzz.calls import HALVES, Drawn, inputs_of

MORE_DRAWS = 16
SMALL = Config(16, 16)
TILED = ("forward", "dkdv", "dq", "dbias", "statistics")


@contextmanager
def small_tiles() -> Iterator[None]:
    """The interpreter takes tiles of 16 x 16, so that short lengths walk every loop; in memory that starts as NaN."""

    def execute(
        work: launcher.Work,
        given: launcher.Tensors,
        problem: Problem,
        backend: str,
        wanted: launcher.Wanted = (),
    ) -> list[Any]:
        given = tuple(None if t is None else unit_stride(t) for t in given)
        rooms = work.rooms(given, problem, wanted)
        made = launcher._allocated(rooms, given)
        for launch in work.plan(given, launcher._apart(made, rooms), problem, wanted, "interpreter", "ieee"):
            if 0 not in launch.grid:
                interpret(tiled(launch, problem, SMALL) if launch.name in TILED else launch)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "execute", execute)
        yield


def attend_by(backend: str) -> Attend:
    """(out, lse) of Inputs by the public functions."""

    def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
        call: Any = andrea_triton.varlen_attention if "cu_seqlens_q" in inputs.extras else andrea_triton.attention
        out, lse = call(inputs.q, inputs.k, inputs.v, **inputs.settings, **inputs.extras, return_lse=True, backend=backend)
        return out, lse

    return attend


def assert_accurate_call(drawn: Drawn, backend: str) -> Results:
    """Fail unless out, lse and every gradient of a call are as accurate as the rule asks."""
    inputs = inputs_of(drawn)
    exact, got = run(cast(inputs, torch.float64), attend_reference), run(inputs, attend_by(backend))
    errors = eager_errors(inputs, exact)
    failed = [field for field, *rest in zip(Results._fields, got, exact, errors, strict=True) if not _good(*rest)]
    if failed:
        event("measured again")
        worst = [a + b for a, b in zip(worst_of_eager(drawn), rounding_of_out(drawn, inputs, exact), strict=True)]
        for field, found, wanted, error in zip(Results._fields, got, exact, worst, strict=True):
            assert field not in failed or _good(found, wanted, error), _message(field, found, wanted, error, drawn, backend)
    for field, found, wanted in zip(Results._fields, got, exact, strict=True):
        assert (found is None) == (wanted is None), f"{field} of {drawn}"
        if found is not None and wanted is not None:
            assert found.shape == wanted.shape, f"{field} has shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}: {drawn}"
    assert got.out.dtype == drawn.dtype
    return got


def worst_of_eager(drawn: Drawn) -> list[float]:
    """Per result, the largest finite error of eager over more draws of the call."""
    usual, lse = replace(drawn, values=("normal",) * 4), Results._fields.index("lse")
    worst = [0.0] * len(Results._fields)
    for seed in range(drawn.seed, drawn.seed + MORE_DRAWS):
        inputs, others = inputs_of(drawn, seed), inputs_of(usual, seed)
        errors = eager_errors(inputs, run(cast(inputs, torch.float64), attend_reference))
        exact, eager = attend_reference(cast(others, torch.float64)), attend_reference(others)
        errors[lse] = max(errors[lse], error_of(eager[1], exact[1]))
        worst = [max(a, b) for a, b in zip(worst, errors, strict=True)]
    if drawn.precise and drawn.dtype in HALVES:
        worst[lse] += torch.finfo(drawn.dtype).eps / 4  # its weights are rounded, by half a unit each, and so is their sum
    return worst


def rounding_of_out(drawn: Drawn, inputs: Inputs, exact: Results) -> list[float]:
    """Per result, half of what the rounding of out may add where weights are dropped: delta is made of out as rounded. Without
    dropout a peaked row's out is a row of v, which rounding leaves alone; with it, it is v / (1 - p), which is rounded."""
    if not drawn.case.dropout_p or drawn.dtype not in HALVES or not exact.out.numel():
        return [0.0] * len(Results._fields)
    delta = torch.finfo(drawn.dtype).eps / 2 * float((exact.out * inputs.dout).double().abs().sum(-1).max()) / 2
    scale = abs(inputs.q.shape[-1] ** -0.5 if drawn.case.scale is None else drawn.case.scale)
    q, k = (float(x.double().abs().max()) if x.numel() else 0.0 for x in (inputs.q, inputs.k))
    pairs = exact.lse.numel()
    return [0.0, 0.0, delta * scale * k, delta * scale * q * pairs, 0.0, delta * pairs, delta * pairs]


def _good(got: Tensor | None, exact: Tensor | None, eager_error: float) -> bool:
    """Whether the rule holds; where the eager run is not finite it says nothing."""
    if got is None or exact is None or eager_error == float("inf"):
        return True
    finite = exact[exact.isfinite()].abs()
    rounding = torch.finfo(got.dtype).eps * float(finite.max()) if finite.numel() else 0.0
    return error_of(got, exact) <= 2 * eager_error + max(rounding, torch.finfo(got.dtype).tiny)


def _message(field: str, got: Tensor | None, exact: Tensor | None, eager_error: float, drawn: Drawn, backend: str) -> str:
    assert got is not None and exact is not None
    return f"{field}: error {error_of(got, exact):.2e}, eager's {eager_error:.2e} at most; backend {backend}, {drawn}"
