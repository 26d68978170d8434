"""Running a launch on CPU tensors: right for every dtype, and nothing of Triton's left changed."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from andrea_triton import attention
from andrea_triton.launch import interpreter
from andrea_triton.launch.compile import compiled, gpu_target
from andrea_triton.launch.configs import Config
from andrea_triton.launch.interpreter import interpret
from andrea_triton.launch.plan import Launch
from andrea_triton.testing import Case, assert_accurate, attend_reference, check, make_inputs, run

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@triton.jit
def helper(x):
    return tl.maximum(x, 0.0)


@triton.jit
def scaled(x, out, factor, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, helper(tl.load(x + at)) * factor)


@triton.jit
def cast_copy(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def products(x, y, out, out_t, SIZE: tl.constexpr, ACC: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x_tile, y_tile, zero = tl.load(x + at), tl.load(y + at), tl.zeros([SIZE, SIZE], ACC)
    tl.store(out + at, tl.dot(x_tile, y_tile, zero, out_dtype=ACC, input_precision="ieee"))
    xy_t = tl.dot(tl.trans(y_tile), tl.trans(x_tile), zero, out_dtype=ACC, input_precision="ieee")
    tl.store(out_t + at, xy_t)


@triton.jit
def fails(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0)


@triton.jit
def kinds(out, i, wide, f, d):
    tl.store(out, i.dtype == tl.int32)
    tl.store(out + 1, wide.dtype == tl.int64)
    tl.store(out + 2, f.dtype == tl.float32)
    tl.store(out + 3, d.dtype == tl.float64)


def launch(kernel: Any, args: tuple[Any, ...], grid: tuple[int, int] = (1, 1), **constexprs: Any) -> Launch:
    config = Config(16, 16)
    return Launch("under test", kernel, args, constexprs, grid, config, (config,))


def world() -> dict[str, Any]:
    """What the interpreter replaces while it runs."""
    builder = stock.InterpreterBuilder
    language = {f"tl.{name}": getattr(tl, name) for name in dir(tl) if callable(getattr(tl, name))}
    methods = {f"tensor.{name}": getattr(tl.tensor, name) for name in dir(tl.tensor) if not name.startswith("__class")}
    return {
        "call": JITFunction.__call__,
        "dot": builder.create_dot,
        "cast": builder.cast_impl,
        "min_max": stock.ReduceOps.min_max,
        "tensor": stock._patch_lang_tensor,
        "options": stock.interpreter_builder.options,
        **language,
        **methods,
    }


@pytest.fixture
def unchanged() -> Iterator[None]:
    before = world()
    yield
    after = world()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name] and before[name] != after[name]] == []


@pytest.mark.usefixtures("unchanged")
def test_everything_patched_is_put_back() -> None:
    x, out = torch.randn(64), torch.empty(64)
    interpret(launch(scaled, (x, out, 2.0), (2, 1), SIZE=32))
    assert torch.equal(out, x.relu() * 2)


@pytest.mark.usefixtures("unchanged")
def test_everything_patched_is_put_back_after_an_error() -> None:
    with pytest.raises(Exception, match=r"(?s).*"):
        interpret(launch(fails, (torch.randn(4),), SIZE=4))


@pytest.mark.usefixtures("unchanged")
def test_works_beside_ahead_of_time_compilation() -> None:
    """Interpret, compile the same kernel, interpret again."""
    x, out = torch.randn(32), torch.empty(32)
    plan = launch(scaled, (x, out, 3.0), SIZE=32)
    for _ in range(2):
        interpret(plan)
        assert torch.equal(out, x.relu() * 3)
        assert "st.global" in compiled(plan, gpu_target("sm_80")).asm["ptx"]
        out.zero_()


@pytest.mark.usefixtures("unchanged")
def test_threads_take_turns() -> None:
    errors: list[str] = []

    def work(seed: int) -> None:
        case = Case("threaded", HQ=1, M=20, D=16, causal=True)
        inputs = make_inputs(case, torch.float32, seed=seed)
        try:
            check(inputs, attend, f"thread {seed}")
        except BaseException as error:
            errors.append(repr(error))

    def attend(inputs: Any) -> Any:
        return attention(inputs.q, inputs.k, inputs.v, **inputs.settings, return_lse=True, backend="interpreter")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_right_and_the_same_transposed(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, y = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    out, out_t = torch.empty(32, 32, dtype=wide), torch.empty(32, 32, dtype=wide)
    acc = tl.float64 if dtype == torch.float64 else tl.float32
    interpret(launch(products, (x, y, out, out_t), SIZE=32, ACC=acc))
    assert_accurate(out, x.to(wide) @ y.to(wide), x.double() @ y.double(), wide, "product")
    assert torch.equal(out, out_t.T)


SPECIAL = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 1e-40, -1e-45, 3.3895e38, 3.4e38, float("inf"), float("-inf"), 65504.0]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_casts_round_as_torch_does(source: torch.dtype, wanted: torch.dtype) -> None:
    """To nearest, ties to even; fp64 goes to bf16 by way of fp32."""
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    x = torch.cat([torch.randn(2048 - len(SPECIAL), dtype=torch.float64) * 3, special]).to(source)
    out = torch.empty(2048, dtype=wanted)
    interpret(launch(cast_copy, (x, out), SIZE=2048))
    assert torch.equal(out, (x.float() if wanted == torch.bfloat16 else x).to(wanted))


def test_nan_stays_nan_in_bf16() -> None:
    payload = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int64).to(torch.int32).view(torch.float32)
    out = torch.empty(4, dtype=torch.bfloat16)
    interpret(launch(cast_copy, (payload, out), SIZE=4))
    assert out.isnan().all()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_without_a_number_warn_of_nothing() -> None:
    q = torch.full((1, 1, 64, 16), float("nan"))  # whole tiles: past the end there is -inf
    out = attention(q, q, q, backend="interpreter")
    assert isinstance(out, torch.Tensor) and out.isnan().all()


def test_arguments_have_the_types_of_the_compiled_kernel() -> None:
    out = torch.zeros(4, dtype=torch.bool)
    interpret(launch(kinds, (out, 7, np.int64(7), 0.5, np.float64(0.5))))
    assert out.all()
    out.zero_()
    interpret(launch(kinds, (out, 7, 2**40, 0.5, np.float64(0.5))))
    assert out.all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_unbiased(dtype: torch.dtype) -> None:
    """With positive values, weights cut off instead of rounded would make every output too small."""
    inputs = make_inputs(Case("unbiased", HQ=2, M=64, D=32, causal=True), dtype)
    inputs = inputs._replace(v=inputs.v.abs() + 1, dlse=None)

    def attend(x: Any) -> Any:
        return attention(x.q, x.k, x.v, causal=True, return_lse=True, backend="interpreter")

    got = run(inputs, attend).out.double()
    wide = inputs._replace(q=inputs.q.double(), k=inputs.k.double(), v=inputs.v.double(), dout=inputs.dout.double())
    error = got / run(wide, attend_reference).out - 1
    spread = error.std() / error.numel() ** 0.5
    assert error.mean().abs() <= 4 * spread


Rewrite = Callable[..., Any]


def test_a_kernel_is_rewritten_once() -> None:
    x, out = torch.randn(32), torch.empty(32)
    interpret(launch(scaled, (x, out, 1.0), SIZE=32))
    body: Rewrite = interpreter._python[scaled.fn]
    interpret(launch(scaled, (x, out, 2.0), SIZE=32))
    assert interpreter._python[scaled.fn] is body
