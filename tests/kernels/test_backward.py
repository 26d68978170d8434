"""The backward kernels: numbers per query, and gradients for every tile shape."""

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import attention, testing, varlen_attention
from andrea_triton.kernels.views import PAD
from andrea_triton.launch import plan, run
from andrea_triton.launch.configs import DELTA, Config
from andrea_triton.launch.interpreter import interpret
from andrea_triton.launch.plan import Grads, Saved, backward_plan, row_blocks
from andrea_triton.problem import Problem, make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, assert_accurate, cast, check, make_inputs

TILES = [Config(32, 16), Config(16, 32), Config(32, 16, ONE_LOOP=True), Config(16, 32, ONE_LOOP=True)]
SHAPES = [
    Case("causal", HQ=1, M=40, D=20, causal=True),
    Case("window", HQ=1, M=50, N=40, D=16, window=(20, 3)),
    Case("grouped", HQ=4, HKV=2, M=20, N=35, D=16, DV=24, causal=True),
    Case("softcap", HQ=1, M=33, D=16, softcap=2.0, causal=True),
    Case("packed", HQ=1, lengths_q=(20, 0, 7), lengths_k=(33, 5, 7), slack=3, D=16, causal=True),
    Case("lengths", B=2, HQ=1, M=20, N=40, D=16, key_lengths=(0, 23)),
    Case("dropout", HQ=1, M=20, N=40, D=16, dropout_p=0.3),
]


def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by the public function, in the interpreter."""
    settings: dict[str, Any] = {**inputs.settings, **inputs.extras, "return_lse": True, "backend": "interpreter"}
    function: Any = varlen_attention if "max_q" in settings else attention
    return function(inputs.q, inputs.k, inputs.v, **settings)


def use_tile(tile: Config, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "candidates", lambda name, *_: (DELTA if name in ("delta", "dsinks") else tile,))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_every_tile_shape_is_accurate(case: Case, tile: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(tile, monkeypatch)
    check(make_inputs(case, torch.float32), attend, case.name)


class Numbers:
    """What delta makes of one call, beside what the reference says."""

    def __init__(self, case: Case, dtype: torch.dtype, with_dlse: bool) -> None:
        inputs = make_inputs(case, dtype)
        q, k, v = inputs.q, inputs.k, inputs.v
        problem: Problem = make_problem(q, k, v, make_spec(**inputs.settings), **inputs.extras)
        saved = run.forward(q, k, v, problem, "interpreter")
        shape = (3, problem.B * problem.HQ, row_blocks(problem) * PAD.value)
        rows = torch.full(shape, float("nan"), dtype=saved.lse.dtype)
        dlse = inputs.dlse if with_dlse else None
        nothing = Grads(None, None, None)
        (launch,) = backward_plan(q, k, v, inputs.dout, dlse, saved, rows, nothing, problem, "interpreter", "ieee")
        interpret(launch)
        self.pivot, self.norm, self.delta = rows.unflatten(1, (problem.B, problem.HQ))
        self.saved, self.inputs, self.dlse, self.problem = saved, inputs, dlse, problem


@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"softcap": 3.0}, {"softcap": 3.0, "alibi": True}], ids=["bare products", "capped", "exact logits"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_every_query(dtype: torch.dtype, settings: dict[str, Any], with_dlse: bool) -> None:
    M, N = 300, 40
    case = Case("empty rows", HQ=1, M=M, N=N, D=16, causal=True, **settings)
    x = Numbers(case, dtype, with_dlse)
    saved, empty = x.saved, x.saved.row_sum == 0
    assert empty.sum() == M - N and x.pivot.shape == (1, 1, 2 * PAD.value)
    dlse = 0.0 if x.dlse is None else x.dlse.double()
    exact = (saved.out.double() * x.inputs.dout.double()).sum(-1) - dlse
    eager = (saved.out.float() * x.inputs.dout.float()).sum(-1) - (0.0 if x.dlse is None else x.dlse)
    assert_accurate(x.delta[..., :M], eager.masked_fill(empty, 0.0), exact.masked_fill(empty, 0.0), torch.float32, "delta")
    folded = dtype == torch.bfloat16 and "alibi" not in settings
    if folded:
        pivot = (saved.row_max + saved.row_sum.log2()).masked_fill(empty, float("inf"))
        assert_accurate(x.pivot[..., :M], pivot, pivot.double(), torch.float32, "pivot")
        assert x.norm.isnan().all()
    else:
        assert torch.equal(x.pivot[..., :M], saved.row_max.masked_fill(empty, float("inf")))
        assert torch.equal(x.norm[..., :M], (1 / saved.row_sum).masked_fill(empty, 0.0))
        assert (x.norm[..., M:] == 0).all()
    assert (x.pivot[..., M:] == float("inf")).all() and (x.delta[..., M:] == 0).all()


def test_delta_cancels_exactly_where_a_query_sees_one_key() -> None:
    """dP is made by the same product, so p (dP - delta) is 0."""
    x = Numbers(Case("one key", HQ=1, M=40, N=40, D=16, window=1), torch.bfloat16, False)
    assert torch.equal(x.saved.out, x.inputs.v)
    dq, dk, dv = run.backward(
        x.inputs.q, x.inputs.k, x.inputs.v, x.inputs.dout, None, x.saved, x.problem, "interpreter", (True, True)
    )[:3]
    assert (dq == 0).all() and (dk == 0).all() and torch.equal(dv, x.inputs.dout)


def test_c44_a_query_with_one_visible_key_gets_no_gradient() -> None:
    inputs = make_inputs(Case("causal", M=40, D=16, causal=True), torch.float32)
    got = check(inputs._replace(dlse=None), attend, "causal")
    assert (got.dq[:, :, 0] == 0).all()


def test_c32_the_same_inputs_give_the_same_bits() -> None:
    inputs = make_inputs(Case("grouped", HQ=2, HKV=1, M=256, D=16, causal=True), torch.bfloat16)
    first = testing.run(inputs, attend)
    for _ in range(2):
        assert all(a is b or torch.equal(a, b) for a, b in zip(first, testing.run(inputs, attend), strict=True))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_is_wanted_is_computed(needs: tuple[bool, bool]) -> None:
    inputs = make_inputs(Case("causal", M=20, D=16, causal=True), torch.float32)
    q, k, v, dout, dlse = inputs[:5]
    problem = make_problem(q, k, v, make_spec(**inputs.settings))
    saved = run.forward(q, k, v, problem, "interpreter")
    whole = run.backward(q, k, v, dout, dlse, saved, problem, "interpreter", (True, True))
    part = run.backward(q, k, v, dout, dlse, saved, problem, "interpreter", needs)
    for got, wanted, asked in zip(part, whole, (needs[0], needs[1], needs[1], False, False), strict=True):
        assert torch.equal(got, wanted) if asked else got is None


def test_gradients_lie_in_memory_as_their_tensors() -> None:
    inputs = make_inputs(Case("rows", HQ=3, M=20, D=16, layout="rows"), torch.float32)
    q, k, v, dout, dlse = inputs[:5]
    problem = make_problem(q, k, v, make_spec())
    saved: Saved = run.forward(q, k, v, problem, "interpreter")
    grads = run.backward(q, k, v, dout, dlse, saved, problem, "interpreter", (True, True))
    assert saved.out.stride() == q.stride()
    assert all(grad.stride() == q.stride() for grad in grads[:3])
    out, lse = reference(problem, q, k, v)
    wide = reference(problem, *(t.double() for t in cast(inputs, torch.float64)[:3]))
    assert_accurate(saved.out, out, wide[0], torch.float32, "out")
    assert_accurate(saved.lse, lse, wide[1], torch.float32, "lse")
