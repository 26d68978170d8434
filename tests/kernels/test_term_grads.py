"""Gradients of bias and sinks: every way in which a bias broadcasts, every kind of row."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import attention, varlen_attention
from andrea_triton.launch import plan
from andrea_triton.launch.configs import DELTA, Config
from andrea_triton.testing import Case, Inputs, assert_accurate, attend_reference, cast, check, make_inputs, run

FULL = (2, 2, 20, 19)
BROADCASTS = [tuple(n if keep else 1 for n, keep in zip(FULL, kept, strict=True)) for kept in itertools.product([1, 0], repeat=4)]

# Every run sums over each dim alone, over none and over all; the rest is -m slow.
FIRST = [FULL, (1, 2, 20, 19), (2, 1, 20, 19), (2, 2, 1, 19), (2, 2, 20, 1), (1, 1, 1, 1)]


def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by the public function, in the interpreter."""
    settings: dict[str, Any] = {**inputs.settings, **inputs.extras, "return_lse": True, "backend": "interpreter"}
    function: Any = varlen_attention if "max_q" in settings else attention
    return function(inputs.q, inputs.k, inputs.v, **settings)


def use_tile(tile: Config, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "candidates", lambda name, *_: (DELTA if name in ("delta", "dsinks") else tile,))


def check_pooled(case: Case, field: str, dtype: torch.dtype = torch.float32) -> None:
    """A gradient of few numbers, judged over several draws: on one number the yardstick itself may be right by chance."""
    drawn: list[tuple[Tensor, ...]] = []
    for seed in range(4):
        inputs = make_inputs(case, dtype, seed=seed)
        runs = run(inputs, attend), run(inputs, attend_reference), run(cast(inputs, torch.float64), attend_reference)
        drawn.append(tuple(getattr(x, field) for x in runs))
    got, eager, exact = (torch.stack(column) for column in zip(*drawn, strict=True))
    assert_accurate(got, eager, exact, dtype, f"{case.name}: {field}")


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[pytest.mark.slow] * (s not in FIRST)) for s in BROADCASTS], ids=str)
def test_dbias_is_summed_over_broadcast_dims(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(Config(16, 16), monkeypatch)
    case = Case("bias", B=2, HQ=2, M=20, N=19, D=16, causal=True, window=10, bias=shape)
    if math.prod(shape) <= 4:
        check_pooled(case, "dbias")
    else:
        got = check(make_inputs(case, torch.float32), attend, str(shape))
        assert got.dbias is not None and got.dbias.shape == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(20, 37), (37,), (2, 1, 1)], ids=str)
def test_dbias_has_the_rank_and_dtype_of_the_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case("bias", B=1, HQ=2, M=20, N=37, D=16, bias=shape, softcap=2.0)
    got = check(make_inputs(case, dtype), attend, str(shape))
    assert got.dbias is not None and (got.dbias.shape, got.dbias.dtype) == (shape, dtype)


@pytest.mark.parametrize("tile", [Config(32, 16), Config(16, 32)], ids=lambda t: f"{t.BLOCK_M}x{t.BLOCK_N}")
def test_dbias_for_every_tile_shape(tile: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(tile, monkeypatch)
    for shape, settings in (((20, 37), {"window": (9, 5)}), ((1, 37), {"causal": True})):
        case = Case("bias", B=1, HQ=2, HKV=1, M=20, N=37, D=16, bias=shape, **settings)
        check(make_inputs(case, torch.float32), attend, str(shape))


def test_dbias_of_rows_that_see_nothing() -> None:
    case = Case("bias", B=1, HQ=2, M=37, N=20, D=16, bias=(37, 20), causal=True, hidden=0.4)
    got = check(make_inputs(case, torch.float32), attend, "empty rows")
    assert got.dbias is not None and (got.dbias[:17] == 0).all()


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16, torch.float32], ids=lambda x: str(x)[6:]
)
@pytest.mark.parametrize("shape", [(2, 1, 1), pytest.param((), marks=pytest.mark.slow)], ids=str)
def test_dbias_of_a_number_per_query_has_no_rounding_of_the_output_in_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """It moves no weight from key to key, so a sum of dS would leave nothing but the rounding of out."""
    case = Case("rows", B=1, HQ=2, M=23, N=12, D=16, bias=shape, causal=True)
    for seed in range(2):
        inputs = make_inputs(case, dtype, seed=seed)
        check(inputs, attend, "out and lse")
        got = check(inputs._replace(dlse=None), attend, "out")
        assert got.dbias is not None and (got.dbias == 0).all()


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({"key_lengths": (0, 11)}, torch.float32),
        *(pytest.param({}, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
        *(pytest.param({"dropout_p": 0.3}, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
        pytest.param({"key_lengths": (0, 11)}, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dbias_of_a_number_per_query_beside_sinks(more: dict[str, Any], dtype: torch.dtype) -> None:
    """It takes weight from the sink."""
    check_pooled(Case("rows", B=2, HQ=2, M=33, N=20, D=16, bias=(33, 1), sinks=True, causal=True, **more), "dbias", dtype)


SINKS = [
    Case("empty rows", B=2, HQ=8, M=37, N=20, D=16, sinks=True, causal=True),
    Case("with terms", HQ=8, M=20, D=16, sinks=True, softcap=2.0, bias=(20, 20)),
    Case("packed", HQ=8, lengths_q=(20, 0, 7), lengths_k=(33, 5, 0), slack=3, D=16, sinks=True, causal=True),
    Case("lengths", B=3, HQ=8, M=10, N=40, D=16, sinks=True, key_lengths=(0, 23, 40)),
    Case("dropout", HQ=8, M=20, D=16, sinks=True, dropout_p=0.3),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in SINKS),
        *(pytest.param(case, torch.bfloat16, marks=[pytest.mark.slow] * (case.name != "packed")) for case in SINKS),
    ],
    ids=lambda x: getattr(x, "name", str(x)[6:]),
)
def test_dsinks(case: Case, dtype: torch.dtype) -> None:
    got = check(make_inputs(case, dtype), attend, case.name)
    assert got.dsinks is not None and got.dsinks.dtype == dtype


def test_dsinks_over_more_than_one_block_of_padding() -> None:
    check_pooled(Case("long", HQ=1, M=270, N=20, D=16, sinks=True), "dsinks")


def test_sinks_may_be_wider_than_the_tensors() -> None:
    inputs = make_inputs(SINKS[0], torch.bfloat16)
    sinks = inputs.extras["sinks"].float()
    got = check(inputs._replace(extras={"sinks": sinks}), attend, "fp32 sinks")
    assert got.dsinks is not None and got.dsinks.dtype == torch.float32
