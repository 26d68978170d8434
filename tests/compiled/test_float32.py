"""fp32 in compiled kernels: by IEEE products and by three TF32 products it keeps the accuracy rule of fp32, on tensor cores that
cut their sums off as well, and what makes it so is needed.

Where one or two rows have two keys of nearly the same, large logit, and all others one, the rule measures these alone, by luck:
fp32 summed in an order that is none of the yardstick's misses it for one seed in twenty, and so do three products. Peaked rows
come in more heads here, where there are enough of such rows.
"""

import re

import pytest
import torch

from andrea_triton.kernels import numerics
from andrea_triton.launch.configs import Config
from andrea_triton.testing import Case, check, make_inputs, run
from tests.compiled import calls
from tests.compiled.emulated import Tiles, emulated
from tests.compiled.test_planted_bugs import Planted, planted

LEAST: Tiles = dict.fromkeys(("forward", "dkdv", "dq"), Config(16, 16, 1, 1))
WIDE: Tiles = {"forward": Config(64, 16, 4, 2), "dkdv": Config(16, 64, 4, 1), "dq": Config(64, 16, 4, 2)}
ROWS = (("ordinary", 1.0), ("peaked", 30.0))
# (target, how it is multiplied, head dim, queries): by the library's own tiles.
RUNS = (
    *(("sm_80", "tf32x3", D, 200) for D in (16, 32, 40, 64, 128)),
    *(("sm_90", "tf32x3", D, 200) for D in (16, 32, 64)),
    *(("sm_80", "ieee", D, 100) for D in (16, 64, 128, 256)),
    ("sm_80", "tf32x3", 64, 600),
)


FUSIBLE = re.compile(r"\b(add|sub|mul)\.f32")


def only_rounded(name: str, ptx: str) -> str:
    """The PTX, where the assembler may not make one instruction of a product and a sum. A logit would then differ from itself as
    the maximum of its row, which was rounded: by a unit of its size, which for peaked rows is a large part of 1."""
    assert not FUSIBLE.search(ptx), name
    return ptx


def attend_and_check(target: str, precision: str, D: int, M: int, gain: float, tiles: Tiles | None = None) -> None:
    case = Case(f"fp32 by {precision}, D = {D}", HQ=1 if gain == 1.0 else 4, M=M, D=D, causal=True, gain=gain)
    with emulated(target, precision=precision, tiles=tiles, rewrite=only_rounded):
        check(make_inputs(case, torch.float32), calls.attend, case.name)


def test_three_products_of_peaked_rows() -> None:
    attend_and_check("sm_80", "tf32x3", 16, 63, 30.0, LEAST)


@pytest.mark.slow
@pytest.mark.parametrize("gain", [pytest.param(gain, id=name) for name, gain in ROWS])
@pytest.mark.parametrize(("target", "precision", "D", "M"), RUNS)
def test_float32(target: str, precision: str, D: int, M: int, gain: float) -> None:
    attend_and_check(target, precision, D, M, gain)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_query_of_one_key_gives_no_gradient(target: str) -> None:
    """As in eager fp32, not a bit of it: dO O and dO v, and their transposes, are multiplied alike."""
    inputs = make_inputs(Case("one token", B=4, HQ=16, M=1, D=32, causal=True), torch.float32)._replace(dlse=None)
    with emulated(target, precision="tf32x3", tiles=WIDE):
        got = run(inputs, calls.attend)
    assert not got.dq.any() and not got.dk.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "M", "gain"),
    [
        ("acc + tl.dot(X, Y, small, input", "tl.dot(X, Y, acc + small, input", 600, 1.0),
        ("tl.dot(x - X, Y, input", "tl.dot(0 * X, Y, input", 63, 1.0),
        ("tl.dot(X, y - Y, tl", "tl.dot(X, 0 * Y, tl", 63, 1.0),
        ("+ 0x1000", "+ 0", 200, 1.0),
    ],
    ids=["summed in the tensor core", "left rest forgotten", "right rest forgotten", "cut off, not rounded"],
)
def test_bug_in_the_three_products(old: str, new: str, M: int, gain: float) -> None:
    function = numerics.near_tf32 if "0x1000" in old else numerics.product
    with planted(Planted(function, old, new)), pytest.raises(AssertionError, match="is over"):
        attend_and_check("sm_80", "tf32x3", 64, M, gain)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_decoding(target: str) -> None:
    with emulated(target, precision="tf32x3"):
        correct = calls.decode(torch.float32, paged=True)
    correct()
