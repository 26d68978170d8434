"""The GPU script on a CPU, and a step that breaks."""

import json
from pathlib import Path

import pytest
import torch

from andrea_triton import testing
from bench import gpu, gpu_steps


def test_the_whole_path_in_smoke_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setting: gpu.Setting) -> str:
        raise RuntimeError("planted")

    monkeypatch.setitem(gpu.STEPS, "latency", broken)
    assert gpu.run_gpu(tmp_path, smoke=True) == 1
    steps = {line["step"]: line for line in map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())}
    assert [name for name, line in steps.items() if not line["ok"]] == ["latency"]
    assert "planted" in steps["latency"]["error"] and list(steps) == list(gpu.STEPS)
    assert (tmp_path / "speed.jsonl").exists() and (tmp_path / "training.jsonl").exists()


def test_packed_cases_are_judged() -> None:
    case = next(case for case in testing.CASES if case.lengths_q is not None)
    assert gpu_steps.wrong(case, torch.float32, "cpu", "interpreter") is None
