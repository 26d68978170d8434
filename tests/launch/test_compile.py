"""What the compiler is told: types, hints and constants; a new length changes none of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from andrea_triton.errors import CompileError
from andrea_triton.kernels.bands import Band
from andrea_triton.launch.compile import POINTERS, Argument, compiled, describe, flatten, gpu_target, rebuild, source
from andrea_triton.launch.configs import Config
from andrea_triton.launch.plan import Grads, Launch, Saved, attention, backward_plan, forward_plan, matrix, view
from andrea_triton.problem import Problem, make_problem
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, make_inputs


@triton.jit
def nothing(x, sizes, pair, SIZE: tl.constexpr):
    if SIZE < 0:
        tl.store(x, sizes)


@triton.jit
def broken(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0, "this kernel never compiles")


def plans(case: Case, dtype: torch.dtype, target: str = "sm_80") -> list[Launch]:
    """Every launch of a call with all its gradients; nothing is computed."""
    q, k, v, dout, dlse, settings, extras = make_inputs(case, dtype)
    problem: Problem = make_problem(q, k, v, make_spec(**settings), **extras)
    saved = Saved(dout, *(dlse.clone() for _ in range(3)))
    rows, grads = torch.zeros(3, 256), Grads(q, k, v, extras.get("bias"), extras.get("sinks"))
    backward = backward_plan(q, k, v, dout, dlse, saved, rows, grads, problem, target, "ieee")
    return forward_plan(q, k, v, saved, problem, target, "ieee") + backward


def told(launch: Launch) -> tuple[Any, ...]:
    """All that decides which kernel is compiled."""
    made = source(launch)
    return made.fn, made.signature, made.constants, made.attrs, launch.config


FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 5, "softcap": 2.0, "sinks": True, "dropout_p": 0.1},
    {"alibi": True, "HQ": 4, "HKV": 2, "window": (5, 3)},
    {"q_start": 3, "scale": -0.5},
]


@pytest.mark.parametrize("D", [64, 16, 40])
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: " ".join(f) or "plain")
def test_a_new_length_or_number_tells_nothing_new(features: dict[str, Any], D: int) -> None:
    """Lengths, batch, band, scale, cap and probability differ; odd and even, short, and over a block."""
    first = Case("first", M=64, N=64, D=D, causal="window" not in features, **features)
    changed: dict[str, Any] = {"window": 6, "softcap": 3.0, "dropout_p": 0.7, "q_start": 16, "scale": -1.0}
    if isinstance(features.get("window"), tuple):
        changed["window"] = (7, 1)
    told_first = [told(launch) for launch in plans(first, torch.bfloat16)]
    for M, N, B in ((33, 97, 1), (9, 32, 2), (1000, 1000, 16), (128, 77, 3), (1, 50, 2), (1, 1, 1)):
        other = replace(first, M=M, N=N, B=B, **{name: changed[name] for name in changed.keys() & features})
        assert [told(launch) for launch in plans(other, torch.bfloat16)] == told_first, other


def test_a_length_within_the_window_tells_nothing_new() -> None:
    windowed = Case("windowed", M=64, D=64, causal=True, window=100)
    told_first = [told(launch) for launch in plans(windowed, torch.bfloat16)]
    for M, N in ((99, 99), (101, 101), (1, 300), (1, 1)):
        assert [told(launch) for launch in plans(replace(windowed, M=M, N=N), torch.bfloat16)] == told_first


def test_a_new_length_of_packed_sequences_tells_nothing_new() -> None:
    first = Case("first", HQ=2, D=64, causal=True, lengths_q=(20, 7), lengths_k=(30, 7))
    other = Case("other", HQ=2, D=64, causal=True, lengths_q=(1, 300, 13), lengths_k=(1, 300, 14), slack=3)
    assert [told(x) for x in plans(first, torch.float16)] == [told(x) for x in plans(other, torch.float16)]


def test_a_new_length_of_a_biased_call_tells_nothing_new() -> None:
    first = Case("first", HQ=2, M=64, D=64, bias=(1, 1, 64, 64))
    for M in (48, 33):
        other = replace(first, M=M, bias=(1, 1, M, M))
        assert [told(x) for x in plans(first, torch.float16)] == [told(x) for x in plans(other, torch.float16)], M


def test_lengths_carry_no_hint_and_strides_do() -> None:
    q = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    problem = make_problem(q, q, q, make_spec(causal=True))
    told_sizes = describe(attention(problem, "ieee", "sm_90").sizes)
    assert all(x in (Argument("i32"), Argument("constexpr")) for x in told_sizes)
    assert describe(view(q, False)) == (
        Argument("*fp16", True),
        *[Argument("i64", True)] * 2,
        Argument("i32", True),
        Argument("constexpr"),
    )
    odd = torch.zeros(1, 2, 64, 63, dtype=torch.float16)
    assert [x.hint for x in describe(view(odd, False))] == [True, False, False, False, False]
    assert describe(Band(16, 0)) == (Argument("i32"), Argument("i32"))


def test_a_pointer_off_the_grid_of_16_bytes_has_no_hint() -> None:
    x = torch.zeros(64, dtype=torch.float16)
    assert describe(x).hint and not describe(x[1:]).hint and describe(x[8:]).hint


def test_c15_huge_strides_are_64_bit() -> None:
    buffer = torch.empty(2**33, dtype=torch.float16)
    x = buffer.as_strided((1, 2, 2, 16), (0, 2**32, 2**31, 1))
    assert [a.type for a in describe(view(x, False))] == ["*fp16", "i64", "i64", "i64", "constexpr"]
    assert [a.type for a in describe(matrix(x))] == ["*fp16", "i64", "i64", "i64", "i32"]
    near = buffer.as_strided((1, 2, 2, 16), (0, 2**23, 2**23 - 1, 1))
    assert [a.type for a in describe(view(near, False))] == ["*fp16", "i64", "i64", "i32", "constexpr"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, Argument("constexpr")),
        (tl.constexpr(3), Argument("constexpr", constant=3)),
        (tl.float32, Argument("constexpr", constant=tl.float32)),
        (nothing, Argument("constexpr", constant=nothing)),
        (0.5, Argument("fp32")),
        (np.float64(0.5), Argument("fp64")),
        (16, Argument("i32")),
        (1, Argument("i32")),
        (-(2**31), Argument("i32")),
        (2**31, Argument("i64")),
        (np.int64(1), Argument("i64")),
        ((1, (0.5,)), (Argument("i32"), (Argument("fp32"),))),
    ],
)
def test_describe(value: Any, told: Any) -> None:
    assert describe(value) == told


@pytest.mark.parametrize("dtype", POINTERS)
def test_describe_tensors(dtype: torch.dtype) -> None:
    assert describe(torch.zeros(4, dtype=dtype)).type == POINTERS[dtype]


def test_describe_refuses_what_no_kernel_takes() -> None:
    with pytest.raises(CompileError, match=r"a kernel argument is a str; wanted a tensor, a number"):
        describe(("x",))


def test_flatten_and_rebuild() -> None:
    x, band = torch.zeros(1), Band(2, None)
    assert flatten((x, band, tl.constexpr(4), (1.5, (nothing, 3)))) == [x, 2, 1.5, 3]
    assert rebuild((5, 6), band) == Band(5, 6) and isinstance(rebuild((5, 6), band), Band)
    assert rebuild((5, 6), (1, 2)) == (5, 6)


def test_source_puts_types_constants_and_hints_by_path() -> None:
    x, config = torch.zeros(4), Config(16, 16)
    launch = Launch("nothing", nothing, (x, 7, Band(None, 2)), {"SIZE": 4}, (1, 1), config, (config,))
    made = source(launch)
    assert made.signature == {"x": "*fp32", "sizes": "i32", "pair": Band("constexpr", "i32"), "SIZE": "constexpr"}
    assert made.constants == {(2, 0): None, (3,): 4}
    assert made.attrs == {(0,): [["tt.divisibility", 16]]}


def test_targets() -> None:
    assert (gpu_target("sm_90").backend, gpu_target("sm_90").arch, gpu_target("sm_90").warp_size) == ("cuda", 90, 32)
    assert (gpu_target("gfx942").arch, gpu_target("gfx942").warp_size) == ("gfx942", 64)
    assert gpu_target("gfx1100").warp_size == 32
    for name in ("sm90", "sm_9x", "hopper", ""):
        with pytest.raises(CompileError, match=f"target is '{name}'; wanted a compute capability such as sm_80"):
            gpu_target(name)


def test_compiled_takes_the_warps_and_stages_of_the_config() -> None:
    config = Config(16, 16, 2, 3)
    launch = Launch("nothing", nothing, (torch.zeros(4), 7, Band(None, 2)), {"SIZE": 4}, (1, 1), config, (config,))
    made = compiled(launch, gpu_target("sm_80"))
    assert (made.metadata.num_warps, made.metadata.num_stages) == (2, 3)
    assert made.metadata.enable_fp_fusion


def test_an_error_of_the_compiler_names_the_kernel_and_the_way_out() -> None:
    config = Config(16, 16)
    launch = Launch("broken", broken, (torch.zeros(4),), {"SIZE": 4}, (1, 1), config, (config,))
    with pytest.raises(CompileError, match=r"(?s)broken did not compile for cuda 80 with Triton .*backend='torch'") as info:
        compiled(launch, gpu_target("sm_80"))
    assert info.value.__cause__ is not None
