"""The way to a GPU, walked without one: public call, plan, compiler, Triton's C launcher, and a driver that writes down what
arrives (stub_cuda.py). CPU tensors stand in for the device's; every call runs in one other process, which has that driver."""

import contextlib
import struct
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from andrea_triton import attention, target, testing, varlen_attention
from andrea_triton.launch import compile as compiler
from andrea_triton.launch import run
from andrea_triton.launch.plan import Launch
from andrea_triton.problem import Problem
from tests.launch import stub_cuda
from tests.launch.stub_cuda import LIMITS, STREAM, Start

FP16, FP64 = torch.float16, torch.float64
PLAIN = testing.Case("plain causal", M=130, causal=True)
GROUPED = testing.Case("4 heads on 2", HQ=4, HKV=2, M=65, causal=True)
TERMS = testing.Case("every term", M=70, N=90, window=30, bias=(1, 70, 90), sinks=True, softcap=5.0, dropout_p=0.1)
PACKED = testing.Case("packed", lengths_q=(5, 0, 61), lengths_k=(5, 9, 64), slack=5, causal=True)
WORKER = "the stub driver's process"


class Wanted(NamedTuple):
    """What should arrive of a Launch."""

    name: str
    grid: tuple[int, ...]
    threads: int
    parameters: list[bytes]


class Outcome(NamedTuple):
    """One call, forward and backward: what arrived, what should have, how often Triton compiled, and what was warned of."""

    starts: list[Start]
    wanted: list[Wanted]
    compiled: int
    warned: list[str]


def packed(value: Any) -> bytes:
    """A run-time argument as the kernel's ABI has it."""
    if isinstance(value, torch.Tensor):
        return struct.pack("<Q", value.data_ptr())
    if isinstance(value, np.float64):
        return struct.pack("<d", value)
    if isinstance(value, float):
        return struct.pack("<f", value)
    return struct.pack("<q" if isinstance(value, np.int64) else "<i", value)


def wanted(launch: Launch) -> Wanted:
    """Of a Launch with its best tiling: its arguments in order, then no scratch memory of Triton's, twice."""
    parameters = [packed(x) for x in compiler.flatten(launch.args)] + [bytes(8)] * 2
    return Wanted(launch.name, (*launch.grid, 1), 32 * launch.config.num_warps, parameters)


def attend(inputs: testing.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the GPU's path."""
    settings = {**inputs.settings, **inputs.extras, "return_lse": True, "backend": "triton"}
    function = varlen_attention if "max_q" in settings else attention
    return function(inputs.q, inputs.k, inputs.v, **settings)


@contextlib.contextmanager
def on_device(index: int, plan: list[Wanted]) -> Iterator[None]:
    """CPU tensors count as ones of an sm_80 device; the launches that are executed go to `plan`, too."""
    execute = run.execute

    def execute_there(launches: list[Launch], problem: Problem, backend: str) -> None:
        plan.extend(wanted(launch) for launch in launches if 0 not in launch.grid)
        execute(launches, replace(problem, device=torch.device("cuda", index)), backend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "execute", execute_there)
        patch.setattr(target, "target_of", lambda device: "sm_80")
        patch.setattr(target, "check_backend", lambda name, device: None)
        yield


def called(log: Path, case: testing.Case, dtype: torch.dtype, device: int) -> Outcome:
    """Call the kernels forward and backward, in the process that has the stub driver."""
    import triton

    log.unlink(missing_ok=True)
    plan: list[Wanted] = []
    compilations: list[Any] = []
    compile_it = triton.compile
    with on_device(device, plan), warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(triton, "compile", lambda *args, **keywords: compilations.append(0) or compile_it(*args, **keywords))
        testing.run(testing.make_inputs(case, dtype), attend)
    return Outcome(stub_cuda.starts(log), plan, len(compilations), [str(w.message) for w in caught])


Call = Callable[..., Outcome]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """call(case, dtype, device) in one new process."""
    if stub_cuda.compiler() is None:
        pytest.skip("no C compiler with Python's headers: Triton cannot build its launcher")
    folder = tmp_path_factory.mktemp("driver")
    stub_cuda.build(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stub_cuda.environment(folder).items():
            patch.setenv(name, value)
        with ProcessPoolExecutor(1, get_context("spawn"), stub_cuda.pretend) as process:
            yield lambda case, dtype=FP16, device=0: process.submit(called, folder / "starts", case, dtype, device).result()


def arrived(outcome: Outcome) -> list[Wanted]:
    """The starts in the form of what was wanted."""
    return [Wanted(s.name, s.grid, s.block[0] * s.block[1] * s.block[2], s.parameters) for s in outcome.starts]


@pytest.mark.parametrize(
    ("case", "dtype", "names"),
    [
        (PLAIN, FP16, "forward delta dkdv dq"),
        (GROUPED, FP16, "forward delta dkdv dq"),
        (TERMS, FP16, "forward delta dkdv dq dbias dsinks"),
        (PACKED, FP16, "forward delta dkdv dq"),
        (TERMS, FP64, "forward delta dkdv dq dbias dsinks"),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_every_argument_arrives(call: Call, case: testing.Case, dtype: torch.dtype, names: str) -> None:
    outcome = call(case, dtype)
    assert [start.name for start in outcome.starts] == names.split()
    assert arrived(outcome) == outcome.wanted
    assert {(start.device, start.stream) for start in outcome.starts} == {(0, STREAM)}
    assert outcome.warned == []


def test_a_new_length_compiles_nothing(call: Call) -> None:
    call(PLAIN)
    again = call(replace(PLAIN, B=3, M=77, N=201))
    assert again.compiled == 0
    assert len(again.starts) == 4 and arrived(again) == again.wanted


def test_each_device_has_its_own_kernels(call: Call) -> None:
    """The driver refuses a kernel in another device's context."""
    call(PLAIN)
    there = call(PLAIN, device=1)
    assert there.compiled == 4 and arrived(there) == there.wanted
    assert {(start.device, start.stream) for start in there.starts} == {(1, STREAM + 1)}
    assert call(PLAIN, device=0).compiled == call(PLAIN, device=1).compiled == 0


def test_too_little_shared_memory_takes_a_smaller_tile(call: Call) -> None:
    case = replace(PLAIN, D=64)
    outcome = call(case, device=2)
    print(outcome.compiled, outcome.warned, [(s.name, s.grid, s.block, s.shared) for s in outcome.starts])
