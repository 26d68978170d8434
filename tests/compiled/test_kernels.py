"""The library's kernels, compiled for sm_80 and sm_90 (there on pointers, without tensor descriptors) and run by the emulator,
are as accurate as the rule asks, and do nothing wrong in memory, or the emulator would have raised."""

import pytest
import torch

import andrea_triton
from andrea_triton.dropout import dropout_mask
from andrea_triton.launch.configs import Config
from andrea_triton.problem import make_problem
from andrea_triton.reference import statistics
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, assert_accurate, attend_reference, cast, check, make_inputs, run
from tests.compiled import calls
from tests.compiled.emulated import Tiles, emulated

HALVES, SINGLES, BRAINS, FULLS = (torch.float16, torch.bfloat16), (torch.float16,), (torch.bfloat16,), (torch.float32,)
SMALL = dict.fromkeys(("forward", "dkdv", "dq", "dbias", "statistics"), Config(32, 32, 4, 2))
TALL = {"forward": Config(64, 32, 4, 3), "dkdv": Config(32, 64, 4, 1), "dq": Config(64, 32, 4, 1)}
LEAST = dict.fromkeys(("forward", "dkdv", "dq"), Config(16, 16, 4, 1))
DEEP = {"forward": Config(64, 16, 4, 3), "dkdv": Config(16, 64, 4, 3), "dq": Config(64, 16, 2, 3)}
EVERY = ("forward", "delta", "dkdv", "dq")

# Case, dtypes, tiles: None for the library's own for sm_80. A kernel is compiled once for all lengths, heads and scales, which
# takes most of the time: features that change the kernel share a case where they do not hide each other, and the same tiles,
# dtype and features serve several shapes.
RUNS: tuple[tuple[Case, tuple[torch.dtype, ...], Tiles | None], ...] = (
    (Case("causal", M=200, D=64, causal=True), BRAINS, None),
    (Case("causal, 63", M=63, D=64, causal=True), BRAINS, None),
    (Case("causal, 128", M=128, D=64, causal=True), BRAINS, None),
    (Case("one token", M=1, D=64, causal=True), BRAINS, None),
    (Case("window, softcap", M=200, D=64, causal=True, window=70, softcap=2.0), SINGLES, None),
    (Case("D = 128, 8 warps", HQ=1, M=200, D=128, causal=True), SINGLES, None),
    (Case("4 heads on 2", HQ=4, HKV=2, M=63, N=128, D=32, causal=True), BRAINS, TALL),
    (Case("more queries than keys", HQ=1, M=128, N=63, D=32, causal=True), BRAINS, TALL),
    (Case("(B, T, H, D) memory", HQ=2, M=63, D=32, layout="rows", causal=True, scale=-0.3), BRAINS, TALL),
    (Case("D = 40, DV = 24", HQ=1, M=63, D=40, DV=24, causal=True, layout="guarded"), BRAINS, SMALL),
    (Case("bias", M=100, D=64, bias=(100, 100)), SINGLES, None),
    (Case("bias of a head, sinks", B=2, M=40, N=33, D=32, bias=(2, 1, 33), causal=True, sinks=True), SINGLES, SMALL),
    (Case("alibi, bool mask, dropout", M=63, D=32, alibi=True, hidden=0.3, dropout_p=0.2), SINGLES, SMALL),
    (Case("window to both sides, key lengths", B=3, M=63, N=99, D=32, window=(20, 40), key_lengths=(0, 17, 99)), SINGLES, LEAST),
    (Case("packed", lengths_q=(1, 63, 40), lengths_k=(33, 63, 0), D=32, causal=True), SINGLES, SMALL),
    (Case("full, D = 32", HQ=1, M=200, D=32), SINGLES, None),
    (Case("full, 128, D = 32", HQ=1, M=128, D=32), SINGLES, None),
    (Case("D = 256", HQ=1, M=63, D=256, causal=True), BRAINS, None),
    (Case("three stages", HQ=1, M=200, D=16, causal=True), BRAINS, DEEP),
    (Case("fp32, one token", HQ=2, HKV=1, M=1, D=16, causal=True), FULLS, None),
    (Case("fp32", HQ=2, HKV=1, M=63, N=100, D=16, causal=True), FULLS, None),
)  # fmt: skip
# What every run shows: cases that share their kernels, so that few are compiled. The others are -m slow.
FIRST = ("causal", "causal, 63", "causal, 128", "one token", "4 heads on 2", "more queries than keys", "packed")
# Each feature alone, and the other dtype: what the cases above show together, or by a neighbour.
MORE: tuple[tuple[Case, tuple[torch.dtype, ...], Tiles | None], ...] = (
    (Case("causal", M=200, D=64, causal=True), SINGLES, None),
    (Case("full, 128", M=128, D=64), BRAINS, None),
    (Case("window", M=200, D=64, causal=True, window=70), SINGLES, None),
    (Case("softcap", HQ=1, M=200, D=64, causal=True, softcap=2.0), (*SINGLES, *BRAINS), None),
    (Case("more queries than keys", HQ=1, M=128, N=63, D=32, causal=True), SINGLES, TALL),
    (Case("window to both sides", HQ=1, M=63, N=128, D=32, window=(20, 40)), SINGLES, LEAST),
    (Case("bias of a head", B=2, M=40, D=32, bias=(2, 1, 40), causal=True), SINGLES, SMALL),
    (Case("sinks", M=63, N=33, D=32, causal=True, sinks=True), SINGLES, SMALL),
    (Case("alibi, bool mask", M=63, D=32, alibi=True, hidden=0.3), SINGLES, SMALL),
    (Case("dropout", M=63, D=32, causal=True, dropout_p=0.2), SINGLES, SMALL),
    (Case("key lengths", B=3, M=63, D=32, key_lengths=(0, 17, 63)), SINGLES, SMALL),
    (Case("(B, T, H, D) memory", HQ=2, M=63, D=32, layout="rows", causal=True, scale=-0.3), SINGLES, SMALL),
    (Case("D = 32", HQ=1, M=200, D=32, causal=True), SINGLES, None),
)  # fmt: skip
# The same for other targets. D = 64: tiles of 64 x 128 and 64 x 64, D = 128: two warpgroups. Lengths 1 to 200 compile once.
LENGTHS = (1, 63, 128, 200)
OTHERS: tuple[tuple[str, Case, torch.dtype, Tiles | None], ...] = (
    *[("sm_90", Case(f"causal, {m}", HQ=1, M=m, D=64, causal=True), torch.bfloat16, None) for m in LENGTHS],
    ("sm_90", Case("4 heads on 2", HQ=4, HKV=2, M=63, N=200, D=64, causal=True), torch.bfloat16, None),
    ("sm_90", Case("more queries than keys", HQ=1, M=200, N=63, D=64), torch.float16, None),
    ("sm_90", Case("window, softcap", HQ=1, M=200, D=64, causal=True, window=70, softcap=2.0), torch.float16, None),
    ("sm_90", Case("softcap", HQ=1, M=200, D=64, causal=True, softcap=2.0), torch.bfloat16, None),
    ("sm_90", Case("D = 40, DV = 24", HQ=1, M=63, D=40, DV=24, causal=True, layout="guarded"), torch.float16, None),
    ("sm_90", Case("D = 128", HQ=1, M=200, D=128, causal=True), torch.bfloat16, None),
    ("sm_90", Case("D = 16", HQ=1, M=100, D=16, causal=True), torch.float16, None),
    ("sm_86", Case("D = 64", HQ=1, M=200, D=64, causal=True), torch.float16, None),
)  # fmt: skip


def attend_and_check(case: Case, dtype: torch.dtype, tiles: Tiles | None, target: str) -> None:
    """Forward and backward by the kernels that the case asks for."""
    with emulated(target, tiles=tiles) as names:
        check(make_inputs(case, dtype), calls.attend, case.name)
    expected = [*EVERY, *["dbias"] * (case.bias is not None), *["dsinks"] * case.sinks]
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize(
    ("case", "dtype", "tiles"),
    [
        pytest.param(c, d, t, id=f"{c.name}, {str(d)[6:]}", marks=[pytest.mark.slow] * (runs is MORE or c.name not in FIRST))
        for runs in (RUNS, MORE)
        for c, dtypes, t in runs
        for d in dtypes
    ],
)
def test_forward_and_backward(case: Case, dtype: torch.dtype, tiles: Tiles | None) -> None:
    attend_and_check(case, dtype, tiles, "sm_80")


@pytest.mark.parametrize(
    ("target", "case", "dtype", "tiles"),
    [
        pytest.param(*x, id=f"{x[0]}, {x[1].name}, {str(x[2])[6:]}", marks=[pytest.mark.slow] * (i >= len(LENGTHS)))
        for i, x in enumerate(OTHERS)
    ],
)
def test_forward_and_backward_on_others(target: str, case: Case, dtype: torch.dtype, tiles: Tiles | None) -> None:
    attend_and_check(case, dtype, tiles, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_tf32(target: str) -> None:
    """As accurate as eager fp16, whose numbers have as many bits: on numbers of fp16, so that q kᵀ is exact in both."""
    inputs = make_inputs(Case("tf32", HQ=1, M=100, D=16, causal=True), torch.float16)
    with emulated(target, precision="tf32", tiles=TALL) as names:
        got = run(cast(inputs, torch.float32), calls.attend)
    assert sorted(names) == sorted(EVERY)
    eager, exact = run(inputs, attend_reference), run(cast(inputs, torch.float64), attend_reference)
    for name in ("out", "lse", "dq", "dk", "dv"):
        one, two, three = (getattr(results, name) for results in (got, eager, exact))
        assert_accurate(one, two, three, two.dtype, name)


def test_the_dropout_mask_is_the_references() -> None:
    """With v the identity the output is the matrix of kept weights."""
    case = Case("mask", HQ=2, M=64, D=16, causal=True, dropout_p=0.4)
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


@pytest.mark.parametrize(
    ("target", "dtype", "paged"),
    [("sm_80", torch.float16, False), ("sm_90", torch.bfloat16, True),
     *(pytest.param("sm_80", dtype, paged, marks=pytest.mark.slow)
       for dtype, paged in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False), (torch.float16, True)))],
    ids=str,
)  # fmt: skip
def test_decode(target: str, dtype: torch.dtype, paged: bool) -> None:
    with emulated(target) as names:
        correct = calls.decode(dtype, paged)
    assert names == ["decode", "combine"]
    correct()
