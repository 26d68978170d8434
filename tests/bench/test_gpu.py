"""The GPU script on a CPU; pieces that break, hang, or take the device with them; and the rehearsal."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_triton import testing
from bench import gpu, gpu_steps, pieces, precompile, rehearsal, worker
from bench.gpu_summary import summarise
from bench.pieces import LIMITS, STEPS, Piece, Setting, append, lines


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    made = Setting(tmp_path, "cpu", True, time.time(), 60.0)
    made.write()
    pieces_of(made)
    return made


def pieces_of(setting: Setting) -> None:
    """Nothing is compiled ahead."""
    precompile.finished(setting)


def piece(name: str, run: Callable[[Setting], str], step: str = "correctness") -> Piece:
    return Piece(step, name, run)


def fail(setting: Setting) -> str:
    raise RuntimeError("planted\nwith a page of text")


@pytest.mark.slow
def test_the_path_in_smoke_form(tmp_path: Path) -> None:
    assert gpu.run_gpu(tmp_path, smoke=True) == 0
    ended = lines(tmp_path / "pieces.jsonl")
    assert list(dict.fromkeys(line["step"] for line in ended)) == list(STEPS) and all(line["ok"] for line in ended)
    assert {line["piece"] for line in ended} == {p.name for p in pieces.pieces(Setting.of(tmp_path))}
    page = (tmp_path / "summary.txt").read_text()
    assert "nothing failed" in page and "fastest" in page and "(n = " in page
    assert all((tmp_path / f"{step}.jsonl").exists() for step in ("speed", "latency", "training"))


def test_a_piece_that_fails_is_told_and_the_next_goes_on(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = [piece("one", fail), piece("two", lambda s: "well")]
    monkeypatch.setattr(worker, "pieces", lambda s: todo)
    assert worker.work(setting.out) == 0
    first, second = lines(setting.out / "pieces.jsonl")
    assert (first["ok"], first["said"]) == (False, "RuntimeError: planted") and (second["ok"], second["said"]) == (True, "well")
    assert worker.work(setting.out) == 0 and len(lines(setting.out / "pieces.jsonl")) == 2, "what is done is not done again"


def test_a_broken_device_ends_the_process_behind_the_piece(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "pieces", lambda s: [piece("one", fail), piece("two", lambda s: "well")])
    monkeypatch.setattr(worker, "healthy", lambda device: False)
    assert worker.work(setting.out) == worker.BROKEN
    assert [line["piece"] for line in lines(setting.out / "pieces.jsonl")] == ["one"]
    assert worker.work(setting.out) == 0
    assert [line["piece"] for line in lines(setting.out / "pieces.jsonl")] == ["one", "two"]


def test_what_finds_the_time_used_up_is_left_out(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Setting(setting.out, "cpu", True, time.time() - 60.0, 60.0)
    late.write()
    monkeypatch.setattr(worker, "pieces", lambda s: [piece("one", fail), piece("two", fail, "training")])
    assert worker.work(setting.out) == 0
    assert [line["ok"] for line in lines(setting.out / "pieces.jsonl")] == [None, None]
    assert "0 done, 0 failed, 1 left out" in summarise(setting.out)


# What stands for the worker: notes that a piece has begun, as the worker does, and then does what it is told.
WORKER = """
import pathlib, sys, time
out, name, code = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(out / "begun.txt").write_text(f"{time.time()}\\ncorrectness\\n{name}")
exec(code)
"""


def started(setting: Setting, acts: list[tuple[str, str]]) -> Callable[[], Any]:
    """Starts processes that act, each once, the last one again and again."""
    left = list(acts)

    def start() -> Any:
        name, code = left.pop(0) if len(left) > 1 else left[0]
        return subprocess.Popen([sys.executable, "-c", WORKER, str(setting.out), name, code])

    return start


def test_processes_that_die_or_hang_cost_one_piece_each(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "correctness", 1.0)
    monkeypatch.setattr(gpu, "POLL", 0.05)
    gpu.watch(setting, started(setting, [("dies", "sys.exit(75)"), ("hangs", "time.sleep(60)"), ("last", "")]))
    found = {line["piece"]: line for line in lines(setting.out / "pieces.jsonl")}
    assert found["dies"]["said"] == "the process ended with code 75" and found["hangs"]["said"] == "given up after 1 s"
    assert not any(line["ok"] for line in found.values()) and "last" not in found


def test_at_the_end_of_the_time_everything_stops(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    short = Setting(setting.out, "cpu", True, time.time(), 1.0)
    begin = time.time()
    gpu.watch(short, started(setting, [("hangs", "time.sleep(60)")]))
    assert time.time() - begin < 10.0
    assert [line["said"] for line in lines(setting.out / "pieces.jsonl")] == ["stopped at the end of the time"]


def test_a_piece_waits_for_its_kernels(tmp_path: Path) -> None:
    waits = Setting(tmp_path, "cpu", True, time.time(), 1.0)
    case = (testing.CASES[0], torch.float32)
    begin = time.time()
    worker.await_kernels(Piece("correctness", "one", fail, case), waits)
    assert 0.2 < time.time() - begin < 2.0, "to the step's deadline, with no pool"
    append(tmp_path / "compiled.jsonl", {"piece": "two"})
    begin = time.time()
    worker.await_kernels(Piece("correctness", "two", fail, case), Setting(tmp_path, "cpu", True, time.time(), 600.0))
    assert time.time() - begin < 0.2


def test_kernels_are_compiled_as_the_call_will_ask_for_them() -> None:
    """Dense and packed, with gradients of bias and sinks."""
    dense = testing.Case("terms", HQ=2, M=40, D=16, bias=(40, 40), sinks=True, causal=True)
    names = [launch.name for launch, _, _ in precompile.planned(dense, torch.float16, "sm_80")]
    assert names == ["forward", "delta", "dkdv", "dq", "dbias", "dsinks"]
    packed = next(case for case in testing.CASES if case.lengths_q is not None)
    assert [launch.name for launch, _, _ in precompile.planned(packed, torch.float16, "sm_80")][:1] == ["forward"]


def test_no_two_pieces_have_one_name(tmp_path: Path) -> None:
    names = [p.name for p in pieces.pieces(Setting(tmp_path, "cuda", False, 0.0, 600.0))]
    assert len(names) == len(set(names)) > 150


def test_a_rehearsal_with_16_cores_runs_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearsal.rehearse(16, 10.0) == 0
    text = capsys.readouterr().out
    said = {line.split()[0]: line for line in text.splitlines()[1:6]}
    assert list(said) == list(STEPS) and all("0 left out" in said[step] for step in STEPS), text
    assert rehearsal.rehearse(2, 2.0) == 1 and "left out of correctness: " in capsys.readouterr().out


def test_packed_cases_are_judged() -> None:
    case = next(case for case in testing.CASES if case.lengths_q is not None)
    testing.check(testing.make_inputs(case, torch.float32), gpu_steps.attend_with("interpreter"), case.name)


def test_a_setting_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Setting(tmp_path, "cuda", False, 12.5, 600.0)
    made.write()
    assert Setting.of(tmp_path) == made and json.loads((tmp_path / "setting.json").read_text())["device"] == "cuda"
