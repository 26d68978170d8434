"""The GPU script on a CPU, and a step that breaks."""

import json
from pathlib import Path

import pytest
import torch

from andrea_triton import testing
from bench import gpu, gpu_steps


@pytest.mark.parametrize(
    "names", [["environment", "latency", "correctness"], pytest.param(list(gpu.STEPS), marks=pytest.mark.slow)]
)
def test_the_path_in_smoke_form(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks is told, and the next goes on."""

    def broken(setting: gpu.Setting) -> str:
        raise RuntimeError("planted")

    monkeypatch.setattr(gpu, "STEPS", {name: gpu.STEPS[name] for name in names} | {"latency": broken})
    assert gpu.run_gpu(tmp_path, smoke=True) == 1
    steps = {line["step"]: line for line in map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())}
    assert [name for name, line in steps.items() if not line["ok"]] == ["latency"]
    assert "planted" in steps["latency"]["error"] and list(steps) == names
    made = {step: (tmp_path / f"{step}.jsonl").exists() for step in ("correctness", "speed", "training")}
    assert made == {step: step in names for step in made}


def test_packed_cases_are_judged() -> None:
    case = next(case for case in testing.CASES if case.lengths_q is not None)
    assert gpu_steps.wrong(case, torch.float32, "cpu", "interpreter") is None
