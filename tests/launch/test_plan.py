"""A plan is data: what is launched, with which arguments, on how many programs."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from andrea_triton.errors import UnsupportedError
from andrea_triton.kernels.numerics import FP32, FP64
from andrea_triton.kernels.views import PAD
from andrea_triton.launch import plan
from andrea_triton.launch.configs import Config
from andrea_triton.launch.plan import Grads, Launch, Saved, backward_plan, forward_plan, statistics_plan
from andrea_triton.problem import Problem, accumulator, make_problem
from andrea_triton.spec import Mask, Score, make_spec
from andrea_triton.testing import Case, make_inputs

ALL = Case("all", B=2, HQ=4, HKV=2, M=70, N=90, D=64, DV=32, causal=True, bias=(1, 4, 70, 90), sinks=True)


def made(case: Case, dtype: torch.dtype = torch.float16, wanted: str = "qkbs") -> tuple[list[Launch], Problem]:
    """Forward and backward of a case, with the gradients of the letters in `wanted`."""
    q, k, v, dout, dlse, settings, extras = make_inputs(case, dtype)
    problem = make_problem(q, k, v, make_spec(**settings), **extras)
    saved = Saved(dout, *(dlse.clone() for _ in range(3)))
    rows = torch.zeros(3, plan.row_blocks(problem) * PAD.value * max(1, problem.B * problem.HQ))
    bias, sinks = extras.get("bias"), extras.get("sinks")
    grads = Grads(
        q if "q" in wanted else None,
        *((k, v) if "k" in wanted else (None, None)),
        bias if "b" in wanted else None,
        sinks if "s" in wanted else None,
    )
    backward = backward_plan(q, k, v, dout, dlse, saved, rows, grads, problem, "sm_80", "ieee")
    return forward_plan(q, k, v, saved, problem, "sm_80", "ieee") + backward, problem


def test_the_launches_of_a_call_in_order() -> None:
    launches, _ = made(ALL)
    assert [x.name for x in launches] == ["forward", "delta", "dkdv", "dq", "dbias", "dsinks"]
    assert [x.kernel.fn.__name__ for x in launches] == [x.name for x in launches]
    for wanted in map("".join, itertools.product(*(("", c) for c in "qkbs"))):
        names = [name for name, letter in (("dkdv", "k"), ("dq", "q"), ("dbias", "b"), ("dsinks", "s")) if letter in wanted]
        assert [x.name for x in made(ALL, wanted=wanted)[0]] == ["forward", "delta", *names]


def test_every_parameter_of_a_kernel_has_one_value() -> None:
    for launch in made(ALL)[0]:
        names = [name for name in launch.kernel.arg_names if name not in launch.constexprs]
        assert len(names) == len(launch.args) and launch.constexprs.keys() <= set(launch.kernel.arg_names)


def test_grids_cover_every_block() -> None:
    for launch in made(ALL)[0]:
        m, n = launch.config[:2]
        assert (
            launch.grid
            == {
                "forward": (8, -(-70 // m)),
                "delta": (8, PAD.value // m),
                "dkdv": (4, -(-90 // n)),
                "dq": (8, -(-70 // m)),
                "dbias": (4 * -(-70 // m), -(-90 // n)),
                "dsinks": (4, 1),
            }[launch.name]
        )


@pytest.mark.parametrize("shape", [(1, 1, 70, 90), (2, 1, 1, 90), (1, 4, 1, 90), (1, 1, 1, 90)])
def test_a_bias_that_is_broadcast_has_fewer_programs(shape: tuple[int, ...]) -> None:
    launches, _problem = made(replace(ALL, bias=shape))
    dbias = next(x for x in launches if x.name == "dbias")
    assert [dbias.constexprs[f"REDUCE_{d}"] for d in "BHM"] == [a != b for a, b in zip(shape, (2, 4, 70), strict=False)]
    m, n = dbias.config[:2]
    assert dbias.grid == (shape[0] * shape[1] * -(-shape[2] // m), -(-shape[3] // n))


def test_c37_heads_are_on_the_axis_that_may_be_long() -> None:
    launches, _ = made(Case("many", B=65537, HQ=1, M=1, D=16))
    assert launches[0].grid[0] == 65537 and all(x.grid[1] <= plan.MAX_BLOCKS for x in launches)


def test_more_blocks_than_a_grid_holds_is_an_error() -> None:
    problem = make_problem(*(torch.empty(1, 1, 1, 16).expand(1, 1, 2**27, 16) for _ in range(3)), make_spec())
    (M, _), launch = plan.lengths(problem), made(Case("small", M=64, D=16))[0][0]
    assert plan.tiled(launch, problem, Config(4096, 64)).grid == (1, M // 4096)
    with pytest.raises(UnsupportedError, match=r"a sequence of 134217728 is not supported by forward: .*65535; split it"):
        plan.tiled(launch, problem, Config(128, 64))


def tiles_of(target: str, M: int, B: int = 1, **settings: Any) -> list[Config]:
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16).expand(B, 12, M, 64)
    rows = torch.empty(1, 1, 1).expand(B, 12, M)
    problem, saved = make_problem(q, q, q, make_spec(causal=True, **settings)), Saved(q, rows, rows, rows)
    launches = forward_plan(q, q, q, saved, problem, target, "ieee")
    launches += backward_plan(q, q, q, q, None, saved, torch.empty(3, 1, 1), Grads(q, q, q), problem, target, "ieee")
    return [launch.config for launch in launches if launch.name != "delta"]


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "gfx942"])
def test_neither_length_nor_batch_chooses_a_tile(target: str) -> None:
    found = [tiles_of(target, M, B) for M, B in ((1, 1), (63, 1), (1024, 1), (1024, 8), (10**6, 1))]
    assert all(tiles == found[0] for tiles in found)


@pytest.mark.parametrize(
    ("settings", "extras", "dtype", "kind"),
    [
        ({"causal": True}, {}, torch.float16, "causal"),
        ({"causal": True}, {"alibi": torch.zeros(2)}, torch.float16, "slopes"),
        ({"causal": True}, {"sinks": torch.zeros(2)}, torch.float16, "plain"),
        ({}, {}, torch.float16, "plain"),
        ({"causal": True, "dropout_p": 0.1}, {"seed": 1}, torch.float16, "dropout"),
        ({"causal": True}, {}, torch.float64, "plain"),
        ({"causal": True, "window": 9}, {"alibi": torch.zeros(2)}, torch.float16, "slopes"),
        ({"causal": True, "window": 9}, {"sinks": torch.zeros(2)}, torch.float16, "window"),
        ({"window": 9, "softcap": 1.0}, {}, torch.float16, "capped"),
        ({"softcap": 1.0}, {}, torch.float64, "terms"),
        ({"softcap": 1.0}, {"alibi": torch.zeros(2)}, torch.float16, "terms"),
        ({"softcap": 1.0, "dropout_p": 0.1}, {"seed": 1}, torch.float16, "terms"),
        ({}, {"score": Score(len)}, torch.float16, "terms"),
        ({}, {"mask": Mask(len)}, torch.float16, "terms"),
        ({"softcap": 1.0}, {"bias": torch.zeros(8, 8)}, torch.float16, "matrix"),
        ({}, {"keep": torch.ones(8, 8, dtype=torch.bool)}, torch.float16, "matrix"),
        ({"softcap": 1.0}, {}, torch.float32, "tf32"),
    ],
)
def test_kinds_of_calls(settings: Any, extras: Any, dtype: torch.dtype, kind: str) -> None:
    q = torch.zeros(1, 2, 8, 16, dtype=dtype)
    assert plan.kind(make_problem(q, q, q, make_spec(**settings), **extras), "tf32") == kind


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "grouped"), (torch.float32, "tf32"), (torch.float64, "plain")])
def test_fewer_key_heads_are_a_kind_in_two_bytes(dtype: torch.dtype, kind: str) -> None:
    q = torch.zeros(1, 4, 8, 16, dtype=dtype)
    k = q[:, :2]
    assert plan.kind(make_problem(q, k, k, make_spec(causal=True)), "tf32") == kind
    assert plan.kind(make_problem(q, k, k, make_spec(window=9)), "tf32") == ("window" if dtype != torch.float32 else "tf32")


def test_tiled_changes_tile_and_grid_only() -> None:
    launches, problem = made(ALL)
    for launch in launches:
        other = plan.tiled(launch, problem, Config(16, 16, 2, 1, True))
        changed = {"BLOCK_M", "BLOCK_N", "HELD"} & launch.constexprs.keys()
        assert {**other.constexprs, **{name: launch.constexprs[name] for name in changed}} == launch.constexprs
        assert all(other.constexprs[name] == getattr(Config(16, 16, 2, 1, True), name) for name in changed)
        assert ("HELD" in changed) == (launch.name in ("forward", "dkdv", "dq"))
        assert (other.args, other.configs, other.config) == (launch.args, launch.configs, Config(16, 16, 2, 1, True))


def attention_of(
    dtype: torch.dtype = torch.float16, extras: dict[str, Any] | None = None, target: str = "sm_90", **settings: Any
) -> Any:
    q = torch.zeros(1, 2, 8, 16, dtype=dtype)
    return plan.attention(make_problem(q, q, q, make_spec(**settings), **(extras or {})), "tf32", target)


@pytest.mark.parametrize(
    ("settings", "extras", "plain"),
    [
        ({}, {}, True),
        ({"causal": True, "window": 4, "dropout_p": 0.1}, {"seed": 1}, True),
        ({}, {"sinks": torch.zeros(2)}, True),
        ({"scale": 0.0}, {}, False),
        ({"scale": -1.0}, {}, False),
        ({"softcap": 1.0}, {}, True),
        ({"softcap": 1.0, "scale": -1.0}, {}, True),
        ({"softcap": 1.0}, {"bias": torch.zeros(8, 8)}, False),
        ({}, {"bias": torch.zeros(8, 8)}, False),
        ({}, {"keep": torch.ones(8, 8, dtype=torch.bool)}, False),
        ({}, {"alibi": torch.zeros(2)}, True),
        ({"softcap": 1.0}, {"alibi": torch.zeros(2)}, False),
        ({}, {"score": Score(None, torch_fn=None)}, True),
        ({}, {"score": Score(len)}, False),
        ({}, {"mask": Mask(len)}, False),
    ],
)
def test_bare_products_are_kept_where_nothing_changes_them(settings: Any, extras: Any, plain: bool) -> None:
    assert attention_of(extras=extras, **settings).exact.value is not plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_of_sums_numbers_and_products(dtype: torch.dtype) -> None:
    what = attention_of(dtype, scale=0.3, softcap=2.0)
    assert what.acc == (FP64 if dtype == torch.float64 else FP32)
    kind = np.float64 if dtype == torch.float64 else float
    assert [type(x) for x in (what.scale, what.scale_log2, what.terms.cap)] == [kind] * 3
    assert what.precision.value == ("tf32" if dtype == torch.float32 else "ieee")
    of_a_cap = 2.0 if dtype.itemsize == 2 else 0.3  # which two-byte calls scale in the exponent, and others in the logit
    assert what.scale_log2 == pytest.approx(of_a_cap * np.log2(np.e), rel=1e-15)
    assert attention_of(dtype, scale=0.3).scale_log2 == pytest.approx(0.3 * np.log2(np.e), rel=1e-15)
    assert accumulator(dtype) == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("target", "D", "setting", "precise", "how"),
    [
        ("sm_90", 64, "fastest", False, "tf32x3"),
        ("sm_80", 16, "fastest", False, "tf32x3"),
        ("sm_90", 65, "fastest", False, "ieee"),
        ("sm_89", 64, "fastest", False, "ieee"),
        ("gfx942", 64, "fastest", False, "ieee"),
        ("interpreter", 64, "fastest", False, "ieee"),
        ("sm_89", 256, "tf32x3", False, "tf32x3"),
        ("sm_90", 64, "ieee", False, "ieee"),
        ("sm_90", 64, "tf32", False, "tf32"),
        ("sm_90", 64, "tf32x3", True, "ieee"),
        ("sm_90", 64, "fastest", True, "ieee"),
    ],
)
def test_how_fp32_is_multiplied(target: str, D: int, setting: str, precise: bool, how: str) -> None:
    for dtype, wanted in ((torch.float32, how), (torch.bfloat16, "ieee"), (torch.float64, "ieee")):
        q = torch.zeros(1, 1, 8, D, dtype=dtype)
        assert plan.products(make_problem(q, q, q, make_spec(precise=precise)), target, setting) == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_half_precision_may_be_rounded_as_one(dtype: torch.dtype) -> None:
    q, rows = torch.zeros(1, 1, 8, 16, dtype=dtype), torch.zeros(3, 1, 1, 128)
    problem, saved = make_problem(q, q, q, make_spec()), Saved(q, *torch.zeros(3, 1, 1, 8))
    launches = plan.forward_plan(q, q, q, saved, problem, "sm_80", "ieee")
    launches += backward_plan(q, q, q, q, None, saved, rows, Grads(q, q, q), problem, "sm_80", "ieee")
    parts = (torch.zeros(2, 1, 1, 8, 16), torch.zeros(2, 1, 1, 8))
    launches += plan.decode_plan(q, q, q, None, None, parts, q, saved.lse, 512, problem, "sm_80", "ieee")
    assert [launch.fusible for launch in launches] == [dtype.itemsize == 2] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precise_is_for_half_precision(dtype: torch.dtype) -> None:
    assert attention_of(dtype, precise=True).rounded.value == (dtype.itemsize == 2)
    assert attention_of(dtype).rounded.value is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_caps_have_finite_multiples_and_reciprocals(dtype: torch.dtype) -> None:
    what = attention_of(dtype, softcap=3e38)
    assert what.scale_log2 < torch.finfo(torch.float32).max and 1 / what.terms.cap >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize(
    ("dtype", "target", "how"),
    [(torch.bfloat16, "sm_80", "instruction"), (torch.bfloat16, "gfx942", "exp2"), (torch.bfloat16, "interpreter", "exp2"),
     (torch.float16, "sm_90", "exp2"), (torch.float32, "sm_90", "fraction"), (torch.float64, "sm_90", "fraction")],
)  # fmt: skip
def test_how_tanh_is_made_follows_dtype_and_target(dtype: torch.dtype, target: str, how: str) -> None:
    assert attention_of(dtype, target=target, softcap=2.0).tanh.value == how
    if how == "instruction":
        assert attention_of(dtype, target=target, softcap=2.0, precise=True).tanh.value == "exp2"


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_an_int_seed_is_its_64_bits(seed: int) -> None:
    dropout = attention_of(extras={"seed": seed}, dropout_p=0.25).dropout
    assert type(dropout.seed) is np.int64 and int(dropout.seed) % 2**64 == seed % 2**64
    assert (int(dropout.threshold), dropout.inverse) == (2**30, 1 / 0.75)


def test_a_seed_tensor_is_not_read() -> None:
    seed = torch.tensor([5])
    assert attention_of(extras={"seed": seed}, dropout_p=0.25).dropout.seed is seed
    assert attention_of(dropout_p=0.0).dropout is None


def test_packed_positions_are_left_to_the_kernel() -> None:
    packed = Case("packed", HQ=2, D=16, lengths_q=(5, 9), lengths_k=(7, 2), causal=True)
    launches, problem = made(packed)
    sizes = launches[0].args[-1].sizes
    assert (sizes.q_start, sizes.batch, sizes.M, sizes.N) == (None, 2, 14, 9)
    assert sizes.cu_q is problem.extras.cu_seqlens_q and sizes.cu_k is problem.extras.cu_seqlens_k
    assert launches[0].grid == (4, 1) and plan.lengths(problem) == (9, 7)
    assert attention_of(q_start=3).sizes.q_start == 3 and attention_of().sizes.q_start == 0


def test_row_numbers_have_room_for_every_sequence() -> None:
    for lengths in ((1,) * 9, (256, 1, 255), (0, 0), (257, 0, 300)):
        _, problem = made(Case("packed", HQ=1, D=16, lengths_q=lengths, lengths_k=lengths, slack=2), wanted="q")
        needed = sum(-(-n // PAD.value) for n in lengths)
        assert needed <= plan.row_blocks(problem) <= needed + len(lengths) + 1
    assert plan.row_blocks(made(Case("dense", M=257, D=16))[1]) == 2


def test_statistics_run_over_the_tiles_of_dq() -> None:
    q = torch.zeros(1, 2, 200, 64, dtype=torch.float16)
    problem, rows = make_problem(q, q, q, make_spec(causal=True)), torch.zeros(1, 2, 200)
    (launch,) = statistics_plan(q, q, rows, rows, rows, problem, "sm_80", "ieee")
    assert launch.name == "statistics" and launch.grid == (2, -(-200 // launch.config.BLOCK_M))


def test_views_hold_the_strides() -> None:
    x = torch.zeros(2, 3, 5, 8)
    assert tuple(plan.view(x, False))[1:4] == (120, 40, 8)
    assert tuple(plan.view(x[0], True))[1:4] == (0, 8, 40)
    assert tuple(plan.matrix(x[:, :1].expand(2, 3, 5, 8)))[1:5] == (120, 0, 8, 1)
