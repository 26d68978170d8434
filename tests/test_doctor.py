"""`python -m andrea_triton.doctor`: what a machine is, what calls take there, and what is wrong with it."""

import sys
from typing import Any

import pytest
import torch

from andrea_triton import doctor, target
from andrea_triton.errors import CompileError
from andrea_triton.launch.configs import candidates


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(target, "has_gpu", lambda: False)
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line[:14].strip(): line[15:] for line in lines}
    assert said["torch"] == torch.__version__ and said["triton"].startswith(f"{target.triton_version()} (")
    assert said["device"] == "cpu" and said["backend"].startswith("torch (cpu tensors: ")
    assert said["kernels"] == "ran forward and backward"
    assert any("queries x" in line and "warps" not in line for line in lines)
    assert any(line.startswith("note: torch sees no GPU") and "check its driver" in line for line in lines)
    assert "python -m andrea_triton.check --quick" in said["next"]


def test_tiles_are_those_of_the_table() -> None:
    first = candidates("forward", "sm_80", 64, 2, 1024, 1024, "causal")[0]
    line = doctor.tiles("sm_80")[0]
    assert line.split() == ["forward", str(first.BLOCK_M), "queries", "x", str(first.BLOCK_N), "keys,", str(first.num_warps),
                            "warps,", str(first.num_stages), *(["stages,", "held"] if first.HELD else ["stages"])]  # fmt: skip


@pytest.mark.parametrize("error", [CompileError("no compiler; way out: gcc"), ZeroDivisionError("what")])
def test_kernels_that_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    pytest.importorskip("triton")

    def fails(*args: Any, **keywords: Any) -> Any:
        raise error

    monkeypatch.setattr("andrea_triton.functional.causal_attention", fails)
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "failed: " in printed and str(error) in printed and "way out" in printed.lower() and "\nnext" not in printed


def test_without_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(target, "has_triton", lambda: False)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "not tried: Triton is not installed" in printed and "pip install 'triton" in printed and "queries x" not in printed


def test_a_triton_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(target, "has_triton", lambda: True)
    said = target.triton_version()
    assert said.startswith("unusable (ModuleNotFoundError")
    (note,) = doctor.trouble(said, True, "sm_80")
    assert "unusable" in note and "pip install --force-reinstall" in note


@pytest.mark.parametrize(
    ("triton", "name", "words"),
    [
        ("3.2.0", "sm_80", "too old. Way out: pip install 'triton>=3.6,<3.10'"),
        ("3.10.0", "sm_80", "newer than what is tested (3.6 to 3.9). Way out, if a kernel fails: pip install 'triton<3"),
        ("3.9.0", "sm_61", "No tiles were counted for sm_61"),
    ],
)  # fmt: skip
def test_known_trouble(triton: str, name: str, words: str) -> None:
    (note,) = doctor.trouble(triton, True, name)
    assert words in note


def test_no_trouble() -> None:
    assert doctor.trouble("3.9.0", True, "sm_90") == doctor.trouble("3.6.0", True, "gfx942") == []


@pytest.mark.parametrize(
    ("triton", "required", "words"),
    [
        ("3.5.1", "triton==3.5.1", "too old. Way out: pip install 'torch>=2.10' (CUDA builds of torch bring Triton: 2.10 3.6,"),
        ("3.5.1", "triton==3.7.1", "too old. Way out: pip install 'triton==3.7.1' (as torch requires)"),
        ("3.9.0", "triton~=3.8.0", "torch requires triton~=3.8.0, and torch.compile may fail"),
        ("not installed", "pytorch-triton-rocm==3.2.0", "missing, so there are no kernels. Way out (Linux): pip install 'torch"),
    ],
)  # fmt: skip
def test_a_triton_beside_a_torch_that_requires_one(triton: str, required: str, words: str) -> None:
    (note,) = doctor.trouble(triton, True, "sm_80", required)
    assert words in note


def test_a_pair_that_belongs_together_is_no_trouble() -> None:
    assert doctor.trouble("3.7.0", True, "sm_90", "triton==3.7.1") == []


def test_the_pair_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(target, "triton_version", lambda: "not installed")
    monkeypatch.setattr(target, "required_triton", lambda: "triton==3.5.1")
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert f"(torch {torch.__version__} requires triton==3.5.1)" in printed and "pip install 'torch>=2.10'" in printed
