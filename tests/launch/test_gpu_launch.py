"""The way to a GPU, walked without one: public call, plan, compiler, Triton's C launcher, and a driver that writes down what
arrives (stub_cuda.py). CPU tensors stand in for the device's; every call runs in one other process, which has that driver."""

import contextlib
import json
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.tools.tensor_descriptor import TensorDescriptor

from andrea_triton import attention, target, testing, varlen_attention
from andrea_triton.counting import launches, tune
from andrea_triton.errors import CompileError
from andrea_triton.launch import compile as compiler
from andrea_triton.launch import plan, run
from andrea_triton.launch.configs import Config, candidates
from andrea_triton.launch.plan import Launch
from andrea_triton.problem import Problem, make_problem
from andrea_triton.spec import make_spec
from tests.launch import stub_cuda
from tests.launch.stub_cuda import LIMITS, STREAM, Start

FP16, FP64 = torch.float16, torch.float64
PLAIN = testing.Case("plain causal", M=130, causal=True)
GROUPED = testing.Case("4 heads on 2", HQ=4, HKV=2, M=65, causal=True)
TERMS = testing.Case("every term", M=70, N=90, D=16, window=30, bias=(1, 70, 90), sinks=True, softcap=5.0, dropout_p=0.1)
DOUBLE = testing.Case("fp64 numbers", M=70, D=16, causal=True, softcap=5.0, dropout_p=0.1)
PACKED = testing.Case("packed", lengths_q=(5, 0, 61), lengths_k=(5, 9, 64), slack=5, causal=True)


class Wanted(NamedTuple):
    """What should arrive of a Launch."""

    name: str
    grid: tuple[int, ...]
    threads: int
    parameters: list[bytes]


class Outcome(NamedTuple):
    """What arrived of a call, what should have, how often Triton compiled, and what was warned of."""

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


def parameters_of(value: Any) -> list[bytes]:
    """The kernel's parameters for a run-time argument: one, and nine for a descriptor, with innermost dims first in its own."""
    if not isinstance(value, TensorDescriptor):
        return [packed(value)]
    t, (*strides, _), box = value.base, value.strides, value.block_shape
    sizes, steps = list(value.shape)[::-1], [stride * t.element_size() for stride in strides[::-1]]
    kind = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}[t.dtype]  # of CUtensorMapDataType
    made = struct.pack("<8Q4I2I40x", t.data_ptr(), *sizes, *steps, *box[::-1], kind, 4)
    return [made, *(struct.pack("<i", n) for n in value.shape), *(struct.pack("<q", n) for n in value.strides)]


def wanted(launch: Launch) -> Wanted:
    """Of a Launch with its best tiling: its arguments in order, then no scratch memory of Triton's, twice."""
    parameters = [y for x in compiler.flatten(launch.args) for y in parameters_of(x)] + [bytes(8)] * 2
    return Wanted(launch.name, (*launch.grid, 1), 32 * launch.config.num_warps, parameters)


def attend(inputs: testing.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the GPU's path."""
    settings = {**inputs.settings, **inputs.extras, "return_lse": True, "backend": "triton"}
    function = varlen_attention if "max_q" in settings else attention
    return function(inputs.q, inputs.k, inputs.v, **settings)


@contextlib.contextmanager
def on_device(index: int, small: bool, executed: list[Wanted]) -> Iterator[None]:
    """CPU tensors count as ones of a device. Launches also go to `executed`; `small` tiles compile fastest."""
    execute, card = run.execute, "sm_{}{}".format(*stub_cuda.CAPABILITIES[index])

    def execute_there(work: run.Work, given: Any, problem: Problem, backend: str, wishes: Any = ()) -> list[Any]:
        made = execute(work, given, replace(problem, device=torch.device("cuda", index)), backend, wishes)
        apart = run._apart(made, work.rooms(given, problem, wishes))
        executed.extend(map(wanted, work.plan(given, apart, problem, wishes, card, target.float32_precision())))
        return made

    def smallest(*args: Any) -> tuple[Config, ...]:
        return candidates(*args)[-1:]

    with pytest.MonkeyPatch.context() as patch:
        run._starts.clear()  # of tiles of the other kind
        patch.setattr(run, "execute", execute_there)
        patch.setattr(target, "target_of", lambda device: card)
        patch.setattr(target, "check_backend", lambda name, device: None)
        if small:
            patch.setattr(plan, "candidates", smallest)
        yield


def called(
    log: Path, case: testing.Case, dtype: torch.dtype = FP16, device: int = 0, small: bool = True, threads: int = 1,
    backward: bool | None = None, already: bool = False,
) -> Outcome:  # fmt: skip
    """Call the kernels, in the process that has the stub driver: forward and, with small tiles unless told otherwise, backward.
    Several threads do so at once, each with tensors of its own. already: they begin on the device, as where there is one."""
    import triton

    log.unlink(missing_ok=True)
    backward = small if backward is None else backward
    executed: list[Wanted] = []
    compiled: list[Any] = []
    compile_it, inputs = triton.compile, [testing.make_inputs(case, dtype, seed=i) for i in range(threads)]

    def counted(*args: Any, **keywords: Any) -> Any:
        compiled.append(args)
        return compile_it(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch, on_device(device, small, executed), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        patch.setattr(triton, "compile", counted)
        patch.setattr(stub_cuda, "first_device", device if already else 0)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda x: testing.run(x, attend) if backward else attend(x), inputs))
    warned = [str(warning.message) for warning in w if warning.category is RuntimeWarning]
    return Outcome(stub_cuda.starts(log), executed, len(compiled), warned)


def called_with_table(log: Path, table: Path) -> Outcome:
    """The same, before and after a table of tiles is taken: what the second call did."""
    called(log, PLAIN, FP16, 0, False)
    tune.use(table)
    try:
        return called(log, PLAIN, FP16, 0, False)
    finally:
        tune.use(None)


def timed(log: Path, config: Config) -> tuple[tune.Trial, list[Start]]:
    """A tiling as the search times it: one start instead of many."""
    log.unlink(missing_ok=True)
    q = torch.zeros(1, 2, 70, 32, dtype=FP16)
    problem = make_problem(q, q, q, make_spec(causal=True))
    launch = launches.planned(q, q, q, None, None, problem, "sm_80", "ieee")[0][0]

    def once(start: Callable[[], None], return_mode: str) -> float:
        start()
        return 0.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "do_bench", once)
        trial = tune.timed(launch, replace(problem, device=torch.device("cuda", 0)), config)
    return trial, stub_cuda.starts(log)


def at_one_address(log: Path, layouts: list[tuple[int, ...]]) -> tuple[Outcome, list[int]]:
    """Forwards of one memory seen as (1, H, T, D), layout (0, H, T, D), or as (1, T, H, D), layout (1, T, H, D); and, after each,
    how many tensor maps have been encoded."""
    from triton.backends.nvidia import driver

    log.unlink(missing_ok=True)
    memory, executed, encoded, counts = torch.zeros(2**16, dtype=FP16), [], [], []
    encode = driver.make_tensordesc_arg

    class Counted:
        """The function, with its number of arguments."""

        __code__ = encode.__code__

        def __call__(self, *args: Any) -> Any:
            encoded.append(args)
            return encode(*args)

    with pytest.MonkeyPatch.context() as patch, on_device(4, False, executed):
        patch.setattr(driver, "make_tensordesc_arg", Counted())
        for swapped, *shape in layouts:
            q = memory[: math.prod(shape)].view(1, *shape)
            q = q.transpose(1, 2) if swapped else q
            attention(q, q, q, causal=True, backend="triton")
            counts.append(len(encoded))
    return Outcome(stub_cuda.starts(log), executed, 0, []), counts


def stepped(log: Path, index: int, operators: bool) -> list[tuple[list[Start], set[str], int]]:
    """Three steps, forward and backward, the last two on another stream, as a capture makes its own the current one: the kernels
    started, torch's operators that were called, and kernels loaded. A dispatch mode has the call go by the library's operators,
    as in a compiled graph."""
    import triton

    utils = triton.runtime.driver.active.utils
    loaded, load, found = [], utils.load_binary, []
    q, k, v = (torch.randn(1, 2, 130, 64, dtype=FP16).requires_grad_() for _ in range(3))
    dout, seed = torch.randn(1, 2, 130, 64, dtype=FP16), torch.tensor([3])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor) -> Any:
        return attention(q, k, v, causal=True, dropout_p=0.1, seed=seed, backend="triton")

    with pytest.MonkeyPatch.context() as patch, on_device(index, index == 0, []):
        patch.setattr(utils, "load_binary", lambda *args: loaded.append(args) or load(*args))
        for stream in (STREAM + index, 77, 77):
            log.unlink(missing_ok=True)
            loaded.clear()
            patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=stream: stream)
            with torch.profiler.profile() as profile, FlopCounterMode(display=False) if operators else contextlib.nullcontext():
                torch.autograd.grad(attend(q, k, v, seed), (q, k, v), dout)
            called = {event.key for event in profile.key_averages() if event.key.startswith("aten::")}
            found.append((stub_cuda.starts(log), called, len(loaded)))
    return found


Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """call(case, dtype, device, small), or another function by name, in one new process."""
    if stub_cuda.compiler() is None:
        pytest.skip("no C compiler with Python's headers, so Triton cannot build its launcher")
    folder = tmp_path_factory.mktemp("driver")
    stub_cuda.build(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in stub_cuda.environment(folder).items():
            patch.setenv(name, value)
        process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), stub_cuda.pretend))

        def call(case: Any, *more: Any, by: Callable[..., Any] = called, **keywords: Any) -> Any:
            return process.submit(by, folder / "starts", case, *more, **keywords).result()

        yield call


def arrived(outcome: Outcome) -> list[Wanted]:
    """The starts in the form of what was wanted."""
    return [Wanted(s.name, s.grid, s.block[0] * s.block[1] * s.block[2], s.parameters) for s in outcome.starts]


@pytest.mark.parametrize(
    ("case", "dtype", "terms"),
    [
        (PLAIN, FP16, []),
        (GROUPED, FP16, []),
        (PACKED, FP16, []),
        pytest.param(TERMS, FP16, ["dbias", "dsinks"], marks=pytest.mark.slow),
        pytest.param(DOUBLE, FP64, [], marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_every_argument_arrives(call: Call, case: testing.Case, dtype: torch.dtype, terms: list[str]) -> None:
    outcome = call(case, dtype)
    assert [start.name for start in outcome.starts] == ["forward", "delta", "dkdv", "dq", *terms]
    assert arrived(outcome) == outcome.wanted
    assert {(start.device, start.stream) for start in outcome.starts} == {(0, STREAM)}
    assert outcome.warned == []


def test_a_new_length_compiles_nothing(call: Call) -> None:
    call(PLAIN)
    again = call(replace(PLAIN, B=3, M=77, N=201))
    assert again.compiled == 0
    assert len(again.starts) == 4 and arrived(again) == again.wanted


def test_each_device_has_its_own_kernels(call: Call) -> None:
    """The driver refuses a kernel where another device is current."""
    call(PLAIN)
    there = call(PLAIN, device=1)
    assert there.compiled == 4 and arrived(there) == there.wanted
    assert {(start.device, start.stream) for start in there.starts} == {(1, STREAM + 1)}
    assert call(PLAIN).compiled == call(PLAIN, device=1).compiled == 0


@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16], ids=["fp16", "bf16"])
def test_descriptors_arrive_at_a_card_that_has_them(call: Call, dtype: torch.dtype) -> None:
    """Of this call's tensors, in a call that plans and in one that only starts again."""
    outcome = call(replace(PLAIN, HKV=1, N=200, D=64), dtype, device=4, small=False)
    again = call(replace(PLAIN, HKV=1, N=200, D=64), dtype, device=4, small=False)
    for made in (outcome, again):
        (start,) = made.starts
        assert [len(x) for x in start.parameters].count(128) == 3 and arrived(made) == made.wanted


def test_what_is_encoded_of_an_address_is_for_the_tensor_that_is_there(call: Call) -> None:
    """Once for each argument of each kind of tensor, and again for none."""
    kinds = [(0, 2, 130, 64), (0, 4, 65, 64), (1, 130, 2, 64), (0, 2, 130, 32), (0, 2, 131, 64)]
    outcome, encoded = call(kinds * 2, by=at_one_address)
    assert arrived(outcome) == outcome.wanted
    assert encoded == [3, 6, 9, 12, 15] + [15] * 5


@pytest.mark.parametrize("operators", [False, True], ids=["eager", "operators"])
@pytest.mark.parametrize("device", [0, 4])
def test_a_second_step_can_be_captured(call: Call, device: int, operators: bool) -> None:
    """As a CUDA graph: all of it is started on the current stream, nothing is loaded, and no operator waits for the device or
    brings anything from the host."""
    first, *others = call(device, operators, by=stepped)
    assert {start.stream for start in first[0]} == {STREAM + device}
    for starts, called, loaded in others:
        assert [start.name for start in starts] == ["forward", "delta", "dkdv", "dq"] and loaded == 0
        assert {start.stream for start in starts} == {77}
        made, of_seed = {"aten::empty", "aten::empty_like", "aten::empty_strided"}, {"aten::clone", "aten::copy_"}
        views = {"aten::unbind", "aten::select", "aten::as_strided"}  # in which this test looks on
        assert "aten::empty_like" in called
        assert operators or called <= made | of_seed | views
        assert not called & {"aten::item", "aten::_local_scalar_dense", "aten::to", "aten::_to_copy", "aten::equal"}


def test_tensors_that_no_descriptor_can_describe_take_pointers(call: Call) -> None:
    for case in (replace(PLAIN, D=40), replace(PLAIN, D=64, layout="guarded"), replace(PLAIN, D=64, B=2, key_lengths=(9, 130))):
        outcome = call(case, device=4, backward=False)
        assert 128 not in [len(x) for x in outcome.starts[0].parameters] and arrived(outcome) == outcome.wanted


def test_little_shared_memory_takes_a_smaller_tile_and_warns_once(call: Call) -> None:
    outcome = call(PLAIN, device=2, small=False)
    first, _, taken = candidates("forward", "sm_80", PLAIN.D, FP16.itemsize, PLAIN.M, PLAIN.M)[:3]
    (start,), (best,) = outcome.starts, outcome.wanted
    assert outcome.compiled == 3 and start.shared <= LIMITS[2]
    assert start.grid == (2, -(-PLAIN.M // taken.BLOCK_M), 1) != best.grid
    assert (start.block[0], start.parameters) == (32 * taken.num_warps, best.parameters)
    (warning,) = outcome.warned
    assert str(first) in warning and str(taken) in warning and f"limit: {LIMITS[2]}" in warning
    again = call(replace(PLAIN, M=200), device=2, small=False)
    assert (again.compiled, again.warned, again.starts[0].grid) == (0, [], (2, -(-200 // taken.BLOCK_M), 1))


def test_a_table_of_tiles_is_taken_by_the_next_call(call: Call, tmp_path: Path) -> None:
    entry = {"kernel": "forward", "target": "sm_80", "D": PLAIN.D, "bytes": 2, "tile": [16, 32, 2, 1]}
    table = tmp_path / "tiles.json"
    table.write_text(json.dumps({"format": 1, "entries": [entry]}))
    outcome = call(table, by=called_with_table)
    (start,) = outcome.starts
    assert start.grid == (2, -(-PLAIN.M // 16), 1) and start.block[0] == 64 and arrived(outcome) == outcome.wanted


def test_the_search_times_the_tiling_that_it_names(call: Call) -> None:
    trial, (start,) = call(Config(16, 32, 2, 1), by=timed)
    assert trial == tune.Trial(Config(16, 32, 2, 1), 500.0)
    assert start.name == "forward" and start.grid == (2, 5, 1) and start.block[0] == 64


def test_a_card_too_small_for_every_tile_is_an_error(call: Call) -> None:
    with pytest.raises(CompileError, match="no tiling of forward fits 80 for head dims 32, 32"):
        call(PLAIN, device=3)


def test_threads_that_call_first_at_once(call: Call) -> None:
    """Each gets its own arguments, and what is compiled is compiled once."""
    outcome = call(replace(PLAIN, D=16), threads=8)
    assert outcome.compiled == 4 and len(outcome.starts) == 8 * 4
    assert sorted(arrived(outcome)) == sorted(outcome.wanted)


def test_tensor_maps_are_encoded_in_a_thread_that_has_no_context(call: Call) -> None:
    """A driver refuses that. The first thread gets its context as the kernels are loaded; the next ones, and autograd's, find
    them loaded."""
    call(PLAIN, device=4, already=True)
    outcome = call(PLAIN, device=4, already=True)
    assert [start.name for start in outcome.starts] == ["forward", "delta", "dkdv", "dq"]
    assert {start.device for start in outcome.starts} == {4}


@pytest.mark.slow
def test_threads_that_run_out_of_shared_memory_at_once_warn_once(call: Call) -> None:
    outcome = call(replace(PLAIN, D=48), device=2, small=False, threads=8)
    assert len(outcome.warned) == 1 and len(outcome.starts) == 8
    assert len({start.shared for start in outcome.starts}) == 1 and outcome.starts[0].shared <= LIMITS[2]
