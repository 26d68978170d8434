"""The library's kernels, compiled for sm_80 and run by the emulator, are as accurate as the rule asks, and do
nothing wrong in memory, or the emulator would have raised."""

import pytest
import torch

import andrea_triton
from andrea_triton.launch.configs import Config
from andrea_triton.problem import make_problem
from andrea_triton.reference import dropout_mask, statistics
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, assert_accurate, cast, check, make_inputs
from tests.compiled import calls
from tests.compiled.emulated import Tiles, emulated

HALVES, SINGLES = (torch.float16, torch.bfloat16), (torch.float16,)
SMALL = dict.fromkeys(("forward", "dkdv", "dq", "dbias", "statistics"), Config(32, 32, 4, 2))
TALL = {"forward": Config(64, 32, 4, 3), "dkdv": Config(32, 64, 4, 1), "dq": Config(64, 32, 4, 1)}
LEAST = dict.fromkeys(("forward", "dkdv", "dq"), Config(16, 16, 4, 1))
EVERY = ("forward", "delta", "dkdv", "dq")

# Case, dtypes, tiles: None for the library's own for sm_80.
RUNS: tuple[tuple[Case, tuple[torch.dtype, ...], Tiles | None], ...] = (
    (Case("causal", M=200, D=64, causal=True), HALVES, None),
    (Case("causal, 63", M=63, D=64, causal=True), HALVES, None),
    (Case("full, 128", M=128, D=64), HALVES, None),
    (Case("one token", M=1, D=64, causal=True), SINGLES, None),
    (Case("window", M=200, D=64, causal=True, window=70), HALVES, None),
    (Case("D = 128, 8 warps", HQ=1, M=200, D=128, causal=True), SINGLES, None),
    (Case("4 heads on 2", HQ=4, HKV=2, M=63, N=128, D=32, causal=True), HALVES, TALL),
    (Case("more queries than keys", HQ=1, M=128, N=63, D=32, causal=True), SINGLES, TALL),
    (Case("D = 40, DV = 24", HQ=1, M=63, D=40, DV=24, causal=True, layout="guarded"), HALVES, SMALL),
    (Case("window to both sides", HQ=1, M=63, N=128, D=32, window=(20, 40)), SINGLES, LEAST),
    (Case("softcap", HQ=1, M=63, D=32, causal=True, softcap=2.0), SINGLES, SMALL),
    (Case("bias", M=63, D=32, bias=(63, 63)), HALVES, SMALL),
    (Case("bias of a head", B=2, M=40, D=32, bias=(2, 1, 40), causal=True), SINGLES, SMALL),
    (Case("sinks", M=63, N=33, D=32, causal=True, sinks=True), SINGLES, SMALL),
    (Case("alibi, bool mask", M=63, D=32, alibi=True, hidden=0.3), SINGLES, SMALL),
    (Case("dropout", M=63, D=32, causal=True, dropout_p=0.2), SINGLES, SMALL),
    (Case("key lengths", B=3, M=63, D=32, key_lengths=(0, 17, 63)), SINGLES, SMALL),
    (Case("packed", lengths_q=(1, 63, 40), lengths_k=(33, 63, 0), D=32, causal=True), SINGLES, SMALL),
    (Case("(B, T, H, D) memory", HQ=2, M=63, D=32, layout="rows", causal=True, scale=-0.3), SINGLES, SMALL),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "tiles"),
    [pytest.param(c, d, t, id=f"{c.name}, {str(d)[6:]}") for c, dtypes, t in RUNS for d in dtypes],
)
def test_forward_and_backward(case: Case, dtype: torch.dtype, tiles: Tiles | None) -> None:
    with emulated(tiles=tiles) as names:
        check(make_inputs(case, dtype), calls.attend, case.name)
    expected = [*EVERY, *["dbias"] * (case.bias is not None), *["dsinks"] * case.sinks]
    assert sorted(names) == sorted(expected)


def test_the_dropout_mask_is_the_references() -> None:
    """With v the identity the output is the matrix of kept weights."""
    case = Case("mask", HQ=2, M=64, D=32, causal=True, dropout_p=0.4)
    inputs = make_inputs(case, torch.float16, seed=-5)
    with emulated(tiles=SMALL):
        out, _ = calls.attend(inputs._replace(v=torch.eye(64, dtype=torch.float16).expand(1, 2, 64, 64)))
    positions = torch.arange(64)
    kept = dropout_mask(inputs.extras["seed"], 0.4, 1, 2, positions, positions, torch.device("cpu"))
    assert torch.equal(out != 0, kept & (positions[:, None] >= positions))


@pytest.mark.parametrize("dtype", SINGLES, ids=str)
def test_statistics(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("statistics", HQ=2, HKV=1, M=63, D=32, causal=True), dtype)
    with emulated(tiles=SMALL) as names:
        *_, top, entropy = andrea_triton.attention(
            inputs.q, inputs.k, inputs.v, causal=True, return_stats=True, backend="interpreter"
        )
    assert names == ["forward", "statistics"]
    exact, eager = (_statistics(cast(inputs, kind)) for kind in (torch.float64, dtype))
    for name, got, one, other in zip(("largest logit", "entropy"), (top, entropy), eager, exact, strict=True):
        assert_accurate(got, one, other, torch.float32, name)


def _statistics(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    problem = make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings))
    return statistics(problem, inputs.q, inputs.k)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["one block", "pages"])
def test_decode(dtype: torch.dtype, paged: bool) -> None:
    with emulated() as names:
        correct = calls.decode(dtype, paged)
    assert names == ["decode", "combine"]
    correct()
