"""The launches of a call, compiled for an absent GPU: what they are, that an executor can run them, and their counts."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_triton.counting import calls, report
from andrea_triton.counting import launches as counting
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.launches import CompiledLaunch, compiled_launches
from andrea_triton.errors import AndreaError, CompileError, DTypeError, ShapeError
from andrea_triton.launch.configs import Config
from andrea_triton.problem import make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, assert_accurate, cast, make_inputs, run
from tests.compiled.global_memory import GlobalMemory
from tests.compiled.machine import Machine
from tests.compiled.parse import parse

CASE = Case("4 heads on 2", HQ=4, HKV=2, M=63, N=70, D=32, causal=True)
INPUTS = make_inputs(CASE, torch.float16)
NAMES = ["forward", "delta", "dkdv", "dq"]
counted = functools.cache(report.count)  # what several tests read is compiled and disassembled once
PTX_TYPES = {".u64": 8, ".s64": 8, ".b64": 8, ".f64": 8, ".u32": 4, ".s32": 4, ".b32": 4, ".f32": 4}


@pytest.fixture(scope="module")
def launches() -> list[CompiledLaunch]:
    q, k, v, dout, dlse, *_ = INPUTS
    return compiled_launches(q, k, v, dout, target="sm_80", dlse=dlse, causal=True)


def test_launches_of_a_call(launches: list[CompiledLaunch]) -> None:
    assert [launch.name for launch in launches] == NAMES
    assert [sorted(launch.outputs) for launch in launches] == [["lse", "out"], [], ["dk", "dv"], ["dq"]]
    outputs = {name: tensor for launch in launches for name, tensor in launch.outputs.items()}
    like = {"out": INPUTS.q, "dq": INPUTS.q, "dk": INPUTS.k, "dv": INPUTS.v, "lse": INPUTS.dlse}
    for name, tensor in outputs.items():
        assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
    for launch in launches:
        assert launch.tile == launch.config[:2]
        assert launch.kernel.metadata.target.arch == 80
    forward, _, dkdv, dq = launches
    assert forward.grid == (4, math.ceil(63 / forward.tile[0]))
    assert dkdv.grid == (2, math.ceil(70 / dkdv.tile[1]))
    assert dq.grid == (4, math.ceil(63 / dq.tile[0]))


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in a PTX text; Triton's two pointers to scratch memory at the end are left out."""
    header = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    return [PTX_TYPES[line.split()[1]] for line in header.splitlines() if line.strip().startswith(".param")][:-2]


def size(argument: Any) -> int:
    return 4 if isinstance(argument, float) or (type(argument) is int and abs(argument) < 2**31) else 8


def test_arguments_match_the_parameters_of_the_compiled_kernel(launches: list[CompiledLaunch]) -> None:
    for launch in launches:
        assert [size(argument) for argument in launch.args] == parameter_sizes(launch.kernel.asm["ptx"])


def storages(tensors: Sequence[Any]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)]


def test_tensors_go_from_launch_to_launch_and_none_shares_memory(launches: list[CompiledLaunch]) -> None:
    forward, delta, dkdv, dq = launches
    for launch in launches:
        assert len(set(storages(launch.args))) == len(storages(launch.args))
        assert set(storages(list(launch.outputs.values()))) <= set(storages(launch.args))
    assert len(set(storages(forward.args)) & set(storages(delta.args))) >= 3
    assert len((set(storages(delta.args)) & set(storages(dkdv.args))) - set(storages(forward.args))) >= 3
    assert set(storages(delta.args)) & set(storages(dkdv.args)) == set(storages(delta.args)) & set(storages(dq.args))


def execute(launch: CompiledLaunch) -> None:
    tensors = {f"{launch.name}.{i}": x for i, x in enumerate(launch.args) if isinstance(x, torch.Tensor)}
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in launch.args]
    machine = Machine(parse(launch.kernel.asm["ptx"]), launch.kernel.metadata.shared)
    machine.launch(launch.grid, values, GlobalMemory(tensors))


def test_an_executor_that_runs_them_in_order_gets_the_right_answer(launches: list[CompiledLaunch]) -> None:
    for launch in launches:
        execute(launch)
    got = {name: tensor for launch in launches for name, tensor in launch.outputs.items()}

    def dense(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(make_problem(inputs.q, inputs.k, inputs.v, make_spec(causal=True)), inputs.q, inputs.k, inputs.v)

    exact, eager = run(cast(INPUTS, torch.float64), dense), run(INPUTS, dense)
    for name, tensor in got.items():
        assert_accurate(tensor, getattr(eager, name), getattr(exact, name), tensor.dtype, name)


def planned(**extras: Any) -> list[str]:
    """Names of the launches of a call with more than q, k and v, which are not compiled."""
    q, k, v, dout, *_ = INPUTS
    problem = make_problem(q, k, v, make_spec(causal=True), **extras)
    return [launch.name for launch, _ in counting.planned(q, k, v, dout, None, problem, "sm_80", "ieee")]


def test_gradients_of_bias_and_sinks_are_made_where_they_are_wanted() -> None:
    bias, sinks = torch.zeros(4, 1, 70), torch.zeros(4)
    assert planned(bias=bias, sinks=sinks) == NAMES
    assert planned(bias=bias.requires_grad_(), sinks=sinks) == [*NAMES, "dbias"]
    assert planned(sinks=sinks.requires_grad_()) == [*NAMES, "dsinks"]


def test_a_broadcast_bias_gets_a_gradient_of_its_own_shape() -> None:
    q, k, v, dout, *_ = INPUTS
    problem = make_problem(q, k, v, make_spec(), bias=torch.zeros(4, 1, 70, requires_grad=True))
    *_, (launch, outputs) = counting.planned(q, k, v, dout, None, problem, "sm_80", "ieee")
    assert launch.name == "dbias"
    assert outputs["dbias"].shape == (1, 4, 1, 70)


def test_fp32_is_multiplied_as_asked() -> None:
    q = torch.zeros(1, 1, 64, 16)
    texts = [compiled_launches(q, q, q, precision=way)[0].kernel.asm["ptx"] for way in ("ieee", "tf32")]
    assert ["tf32" in text for text in texts] == [False, True]


def test_the_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "compile_launch", lambda launch, problem, target, outputs: (launch.name, target))
    assert compiled_launches(INPUTS.q, INPUTS.k, INPUTS.v, target="gfx942") == [("forward", "gfx942")]


def test_a_dropout_without_a_seed_draws_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "compile_launch", lambda launch, problem, target, outputs: problem.extras.seed)
    first, second = (compiled_launches(INPUTS.q, INPUTS.k, INPUTS.v, dropout_p=0.1)[0] for _ in range(2))
    assert isinstance(first, torch.Tensor) and first != second


def test_what_starts_no_program_is_left_out() -> None:
    empty, k, dout = INPUTS.q[:, :, :0], INPUTS.k, INPUTS.dout[:, :, :0]
    assert compiled_launches(empty, k, k) == []
    problem = make_problem(empty, k, k, make_spec())
    assert [launch.name for launch, _ in counting.planned(empty, k, k, dout, None, problem, "sm_80", "ieee")] == ["dkdv"]


WRONG: list[tuple[dict[str, Any], type[AndreaError], str]] = [
    ({"dout": INPUTS.dout[:, :, 1:]}, ShapeError, r"dout has shape \(1, 4, 62, 32\); wanted \(1, 4, 63, 32\)"),
    ({"dout": INPUTS.dout.float()}, DTypeError, "dout is torch.float32 on cpu; wanted torch.float16"),
    ({"dout": INPUTS.dout, "dlse": INPUTS.dout}, ShapeError, "dlse has shape"),
    ({"dlse": INPUTS.dlse}, ShapeError, "dlse came without dout"),
    ({"softcap": -1.0}, ShapeError, "softcap is -1.0"),
    ({"target": "h100"}, CompileError, "target is 'h100'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[", ".join(arguments) for arguments, _, _ in WRONG])
def test_wrong_arguments(arguments: dict[str, Any], error: type[AndreaError], message: str) -> None:
    with pytest.raises(error, match=message):
        compiled_launches(INPUTS.q, INPUTS.k, INPUTS.v, **arguments)


def forward_with(configs: tuple[Config, ...], limit: int, monkeypatch: pytest.MonkeyPatch) -> CompiledLaunch:
    """The forward for a card of `limit` bytes of shared memory."""
    card = dataclasses.replace(CARDS["sm_80"], shared_per_cta=limit)
    monkeypatch.setattr(counting, "CARDS", {"sm_80": card})
    problem = make_problem(INPUTS.q, INPUTS.k, INPUTS.v, make_spec(causal=True))
    ((launch, outputs),) = counting.planned(INPUTS.q, INPUTS.k, INPUTS.v, None, None, problem, "sm_80", "ieee")
    return counting.compile_launch(dataclasses.replace(launch, configs=configs), problem, "sm_80", outputs)


def test_a_tiling_that_does_not_fit_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = forward_with((Config(32, 64), Config(16, 16, 4, 1)), 8000, monkeypatch)
    assert launch.config == Config(16, 16, 4, 1)
    assert launch.grid == (4, 4)


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="no tiling of forward fits sm_80 for head dims 32, 32"):
        forward_with((Config(16, 16, 4, 1),), 0, monkeypatch)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "counts.jsonl"
    monkeypatch.setattr(report, "count", counted)
    assert report.main(["--target", "sm_80", "--d", "32", "--dtype", "fp16", "--json", str(file)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in table[1:5]] == NAMES
    assert all("HMMA.16816.F32" in line for line in table[1:5])
    assert table[5].split()[:4] == ["dkdv", "+", "dq,", "nominal"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["kernel"] for row in rows] == NAMES
    for row in rows:
        assert (row["target"], row["card"], row["D"], row["dtype"], row["variant"]) == ("sm_80", "A100", 32, "fp16", "causal")
        assert 0 < row["shared_memory"] <= row["shared_limit"] == CARDS["sm_80"].shared_per_cta
        assert row["ctas_per_sm"] >= 1
        assert row["error"] == ""
    for row in rows:
        if row["kernel"] != "delta":
            assert 0 < row["full"]["total"] < row["edge"]["total"]
            assert row["full"]["tiles"] == pytest.approx(1)
            assert 0 < row["full"]["serial_tflops"] <= row["full"]["overlap_tflops"]


def test_nominal_speed_of_the_backward_counts_ten_flop_per_score_and_feature() -> None:
    rows = counted("sm_80", 32, "fp16", "causal", 1024)
    loops = {row.kernel: row.loops()[0] for row in rows}
    seconds = [sum(getattr(loops[name], way) for name in ("dkdv", "dq")) / (108 * 1.41e9) for way in ("overlap", "serial")]
    assert report.nominal_backward(rows) == pytest.approx([10 * 32 / s / 1e12 for s in seconds])
    assert report.nominal_backward(rows[:3]) is None


def test_what_does_not_compile_is_a_row_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CompileError("no such instruction\nand more")

    monkeypatch.setattr(calls, "compiled_launches", fail)
    assert report.main(["--target", "gfx942", "--d", "64", "--dtype", "bf16", "--variant", "window", "gqa"]) == 1
    _, window, gqa = capsys.readouterr().out.splitlines()
    assert window.split() == ["gfx942", "64", "bf16", "window", "-", "no", "such", "instruction"]
    assert gqa.split()[3] == "gqa"


def test_json_has_null_where_there_is_no_number() -> None:
    row = counted("sm_80", 32, "fp16", "causal", 1024)[0]
    assert row.code is not None
    loops = tuple(dataclasses.replace(loop, overlap=math.nan) for loop in row.code.loops)
    text = report.as_json(row._replace(code=dataclasses.replace(row.code, loops=loops)))
    assert json.loads(text)["full"]["overlap"] is None


@pytest.mark.parametrize("variant", list(calls.VARIANTS))
def test_every_variant_is_a_call(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(counting, "compile_launch", lambda launch, *_: seen.append(launch.name))
    monkeypatch.setattr(report, "machine_code", lambda launch, target: None)
    with pytest.raises(AttributeError):
        report.count("sm_80", 64, "bf16", variant, 128)
    assert seen == NAMES


def test_no_progress_bar_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    calls = [1, 2]
    assert report._with_progress(calls, 2) is calls


@pytest.mark.parametrize(
    ("target", "D"),
    [
        ("sm_90", 64),
        pytest.param("sm_90", 32, marks=pytest.mark.slow),
        *(pytest.param(target, D, marks=pytest.mark.slow) for target in ("sm_80", "sm_86", "sm_89") for D in (32, 64)),
    ],
)
def test_no_spill_in_a_main_loop(target: str, D: int) -> None:
    rows = {row.kernel: row.code for row in counted(target, D, "bf16", "causal", 1024)}
    known = {"dkdv": 2} if (target, D) == ("sm_90", 32) else {}  # said where the table of tiles is
    assert {name: code.spills_in_loops for name, code in rows.items() if code} == dict.fromkeys(NAMES, 0) | known
    assert all(code and code.ctas_per_sm >= 2 for code in rows.values())


@pytest.mark.slow
def test_the_forward_at_home_shape_on_sm_80() -> None:
    row = counted("sm_80", 64, "bf16", "causal", 1024)[0]
    assert row.config == Config(128, 64, 4, 2) and row.code is not None
    assert (row.code.spill_loads, row.code.spill_stores) == (0, 0)
    full, _ = row.loops()
    assert full is not None and full.total <= 612 and full.overlap_tflops >= 311 and full.serial_tflops >= 173


@pytest.mark.parametrize(
    ("target", "overlap", "serial"),
    [("sm_90", 632, 394), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("sm_80", 191, 104), ("sm_89", 117, 87)))],
)
def test_the_backward_at_home_shape(target: str, overlap: float, serial: float) -> None:
    """What the tiles count, held against longer code. Others count better and are slower by the clock: pipes are blind to
    latency and to how many programs fit."""
    nominal = report.nominal_backward(counted(target, 64, "bf16", "causal", 1024))
    assert nominal is not None and nominal[0] >= overlap and nominal[1] >= serial


def test_the_forward_at_home_shape_on_sm_90() -> None:
    """By tensor descriptors and under a cap on registers, so three programs on a multiprocessor."""
    row = counted("sm_90", 64, "bf16", "causal", 1024)[0]
    assert row.config == Config(128, 64, 4, 3, False, True, 3, True) and row.code is not None
    assert (row.code.spill_loads, row.code.spill_stores) == (0, 0) and row.code.ctas_per_sm == 3
    full, _ = row.loops()
    assert full is not None and full.overlap_tflops >= 807 and full.serial_tflops >= 436


def test_descriptors_bring_their_sizes_and_strides() -> None:
    q = torch.empty(2, 12, 1024, 64, dtype=torch.bfloat16)
    (launch,) = compiled_launches(q, q, q, target="sm_90", causal=True)
    assert "cp.async.bulk.tensor" in launch.kernel.asm["ptx"]
    kinds = [type(x).__name__ for x in launch.args]
    assert kinds.count("TensorDescriptor") == 3
    first = kinds.index("TensorDescriptor")
    assert launch.args[first + 1 : first + 9] == (2, 12, 1024, 64, 786432, 65536, 64, 1)
    (pointers,) = compiled_launches(q, q, q, target="sm_90", causal=True, descriptors=False)
    assert "cp.async.bulk.tensor" not in pointers.kernel.asm["ptx"] and pointers.tile == launch.tile
    assert "TensorDescriptor" not in [type(x).__name__ for x in pointers.args]
