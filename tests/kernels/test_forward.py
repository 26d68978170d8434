"""The forward kernel alone: every tile shape, what it writes and what it leaves."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from andrea_triton import dropout_mask
from andrea_triton.kernels.forward import Totals
from andrea_triton.launch.configs import Config
from andrea_triton.launch.interpreter import interpret
from andrea_triton.launch.plan import Saved, forward_plan, tiled
from andrea_triton.problem import Problem, accumulator, make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, assert_accurate, cast, guard_band, make_inputs

TILES = [
    Config(16, 16),
    Config(32, 16),
    Config(16, 64),
    Config(64, 32),
    Config(32, 16, ONE_LOOP=True),
    Config(16, 32, ONE_LOOP=True),
]
SHAPES = [
    Case("causal", HQ=1, M=70, D=20, causal=True),
    Case("window", HQ=1, M=70, N=50, D=16, window=(20, 3)),
    Case("grouped", HQ=4, HKV=2, M=20, N=45, D=16, DV=24, causal=True),
    Case("terms", HQ=2, M=33, D=16, softcap=2.0, bias=(33, 33), sinks=True, causal=True),
    Case("packed", HQ=2, lengths_q=(20, 0, 7), lengths_k=(33, 5, 7), slack=3, D=16, causal=True),
    Case("lengths", B=2, HQ=1, M=20, N=40, D=16, key_lengths=(0, 23)),
]


def problem_of(inputs: Inputs) -> Problem:
    return make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings), **inputs.extras)


def room(inputs: Inputs, problem: Problem) -> Saved:
    """NaN where a result belongs."""
    shape = (problem.HQ, problem.M) if problem.packed else (problem.B, problem.HQ, problem.M)
    out = inputs.q.new_full((*inputs.q.shape[:-1], problem.DV), float("nan"))
    return Saved(out, *(torch.full(shape, float("nan"), dtype=accumulator(problem.dtype)) for _ in range(3)))


def forward(inputs: Inputs, tile: Config) -> Saved:
    problem = problem_of(inputs)
    saved = room(inputs, problem)
    (launch,) = forward_plan(inputs.q, inputs.k, inputs.v, saved, problem, "interpreter", "ieee")
    interpret(tiled(launch, problem, tile))
    return saved


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_every_tile_shape_is_accurate(case: Case, tile: Config) -> None:
    inputs = make_inputs(case, torch.float32)
    saved, wide = forward(inputs, tile), cast(inputs, torch.float64)
    eager = reference(problem_of(inputs), inputs.q, inputs.k, inputs.v)
    exact = reference(problem_of(wide), wide.q, wide.k, wide.v)
    rows = 27 if case.lengths_q else case.M
    if case.lengths_q:
        assert saved.out[rows:].isnan().all() and saved.lse[:, rows:].isnan().all(), "slack rows are nobody's"
        pairs = zip(
            (saved.out[:rows], saved.lse[:, :rows]), *((x[0][:rows], x[1][:, :rows]) for x in (eager, exact)), strict=True
        )
    else:
        pairs = zip(saved[:2], eager, exact, strict=True)
    for name, (got, near, far) in zip(("out", "lse"), pairs, strict=True):
        assert_accurate(got, near, far, torch.float32, name)


@pytest.mark.parametrize("settings", [{}, {"softcap": 3.0}], ids=["bare products", "exact logits"])
def test_pivot_and_sum_make_lse(settings: dict[str, float]) -> None:
    """The pivot is in base 2 where bare products are left to the exponent, as in 16 bits, else natural."""
    case = Case("empty rows", HQ=1, M=40, N=20, D=16, causal=True, **settings)
    saved = forward(make_inputs(case, torch.float32 if settings else torch.bfloat16), Config(16, 16))
    pivot = saved.row_max.double() * (1.0 if settings else float(np.log(2)))
    assert torch.equal(saved.row_sum == 0, saved.lse == float("-inf")) and (saved.row_sum[..., :20] == 0).all()
    seen = saved.row_sum > 0
    lse = (pivot + saved.row_sum.double().log())[seen]
    assert_accurate(saved.lse[seen], lse.float(), lse, torch.float32, "lse")


def test_pivot_and_sum_may_be_left_out() -> None:
    inputs = make_inputs(Case("causal", M=20, D=16, causal=True), torch.float32)
    problem = problem_of(inputs)
    whole, saved = forward(inputs, Config(16, 16)), room(inputs, problem)
    (launch,) = forward_plan(inputs.q, inputs.k, inputs.v, saved, problem, "interpreter", "ieee")
    args = tuple(Totals(x.lse, None, None) if isinstance(x, Totals) else x for x in launch.args)
    interpret(tiled(replace(launch, args=args), problem, Config(16, 16)))
    assert torch.equal(saved.out, whole.out) and torch.equal(saved.lse, whole.lse)
    assert saved.row_max.isnan().all()


def test_nothing_is_written_beside_the_output() -> None:
    inputs = make_inputs(Case("causal", M=21, D=16, DV=11, causal=True), torch.float32)
    problem = problem_of(inputs)
    saved = room(inputs, problem)
    banded = guard_band(saved.out)
    (launch,) = forward_plan(inputs.q, inputs.k, inputs.v, saved._replace(out=banded), problem, "interpreter", "ieee")
    interpret(tiled(launch, problem, Config(16, 16)))
    assert banded.isfinite().all()
    assert int(banded._base.isfinite().sum()) == banded.numel()


def test_dropout_is_the_same_for_every_tile_shape() -> None:
    """v is the identity, so out holds the weights themselves."""
    q, k, v = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 24, 16), torch.eye(24).expand(1, 2, 24, 24)
    inputs = Inputs(q, k, v, torch.zeros(1, 2, 20, 24), None, {"dropout_p": 0.3, "q_start": 5}, {"seed": 9})
    keep = dropout_mask(9, 0.3, 1, 2, torch.arange(20) + 5, torch.arange(24), "cpu")
    for tile in TILES:
        assert torch.equal(forward(inputs, tile).out != 0, keep), tile


def test_c37_more_heads_than_a_grid_axis_used_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 65,537 programs the first and the last are run."""
    q = torch.randn(65537, 1, 1, 16).half()
    inputs = Inputs(q, q, q, q, None, {}, {})
    index: Any = np.ndindex

    def ends(*grid: int) -> Iterator[tuple[int, ...]]:
        assert grid == (65537, 1, 1)
        return iter([(0, 0, 0), (65536, 0, 0)])

    monkeypatch.setattr(np, "ndindex", ends)
    out = forward(inputs, Config(16, 16)).out
    monkeypatch.setattr(np, "ndindex", index)
    assert torch.equal(out[[0, -1]], q[[0, -1]]) and out[1:-1].isnan().all()
