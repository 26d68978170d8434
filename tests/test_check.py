"""`python -m andrea_triton.check`: it ends with 0 where the contract is kept, and with 1 where a bug was planted."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_triton import check, cpu, functional
from andrea_triton.errors import CompileError
from andrea_triton.testing import Case

ROOT = Path(__file__).parents[1]
SMALL = (Case("C17 one of each", D=8, M=5, causal=True), Case("sinks", D=8, M=5, sinks=True))
attention, forward, backward = functional.attention, cpu.forward, cpu.backward


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)
    monkeypatch.setattr(check, "QUICK", Case("small home", HQ=2, M=33, D=16, causal=True))


def checked(backend: str, *more: str) -> int:
    return check.main(["--quick", "--device", "cpu", "--backend", backend, *more])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("backend", ["torch", "interpreter"])
def test_a_right_machine_passes(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    if backend == "interpreter":
        pytest.importorskip("triton")
    assert checked(backend) == 0
    printed = capsys.readouterr().out
    assert "accuracy: 4 of 4 calls within what is allowed" in printed and "the same bits every time" in printed
    assert printed.rstrip().endswith("All right: attention on this machine keeps its contract.")
    assert "\none of each " in printed and "C17" not in printed and "WRONG" not in printed


def noisy(*args: Any, **keywords: Any) -> Any:
    out, lse = forward(*args, **keywords)
    return out * (1 + torch.rand(()).item() * torch.finfo(out.dtype).eps), lse


def lse_of_base_2(*args: Any, **keywords: Any) -> Any:
    out, lse = forward(*args, **keywords)
    return out, lse / 0.6931471805599453


def halved_dk(*args: Any, **keywords: Any) -> Any:
    dq, dk, *others = backward(*args, **keywords)
    return dq, dk / 2, *others


def first_row_is_lost(*args: Any, **keywords: Any) -> Any:
    out, lse = forward(*args, **keywords)
    return out.index_fill(2, torch.tensor([0]), 0.0), lse


def cut_off(values: Any) -> Any:
    return (values.view("uint32") >> 16).astype("uint16")


def never_precise(*args: Any, precise: bool = False, **keywords: Any) -> Any:
    out = attention(*args, precise=precise, **keywords)
    return out * (1 + 2**-7) if precise else out


BUGS: dict[str, tuple[str, str, Callable[..., Any], str]] = {
    "lse in another unit": ("torch", "cpu.forward", lse_of_base_2, "accuracy: 0 of 4"),
    "dk halved": ("torch", "cpu.backward", halved_dk, "accuracy: 0 of 4"),
    "a row lost": ("torch", "cpu.forward", first_row_is_lost, "accuracy: 0 of 4"),
    "other bits every time": ("torch", "cpu.forward", noisy, "DIFFERENT BITS"),
    "weights cut off": ("interpreter", "launch.interpreter._to_bf16", cut_off, "(exactly 0)  WRONG"),
    "precise is not": ("torch", "functional.attention", never_precise, "(exactly 0)  WRONG"),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bug: str) -> None:
    backend, name, planted, found = BUGS[bug]
    if backend == "interpreter":
        pytest.importorskip("triton")
    monkeypatch.setattr(f"andrea_triton.{name}", planted)
    assert checked(backend) == 1
    printed = capsys.readouterr().out
    assert found in printed and "WRONG: attention on this machine breaks its contract" in printed


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


OPTIONS = ["--quick", "--device", "cpu", "--backend", "torch"]


def test_the_command_ends_with_0() -> None:
    done = child("-m", "andrea_triton.check", *OPTIONS)
    assert done.returncode == 0 and "All right" in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_the_command_ends_with_1_in_a_process_with_a_bug() -> None:
    code = f"""
import runpy, sys
from andrea_triton import cpu
backward = cpu.backward
cpu.backward = lambda *a: tuple(x if x is None else 2 * x for x in backward(*a))
sys.argv = ["check", *{OPTIONS!r}]
runpy.run_module("andrea_triton.check", run_name="__main__")
"""
    done = child("-c", code)
    assert done.returncode == 1 and " WRONG\n" in done.stdout, done.stderr


@pytest.mark.usefixtures("small")
def test_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "errors.png"
    assert checked("torch", "--plot", str(path)) == 0
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
    assert str(path) in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_a_call_that_fails_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*args: Any) -> Any:
        raise CompileError("no compiler")

    monkeypatch.setattr(check, "judge", fails)
    assert checked("torch") == 1
    assert "a call failed: no compiler" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cuda"], "torch sees no GPU here"),
        (["--device", "cpu", "--backend", "triton"], " is not supported by t"),
        (["--device", "cpu", "--backend", "fast"], "wanted one of triton, interpreter"),
    ],
)
def test_what_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.setattr("andrea_triton.target.has_gpu", lambda: False)
    with pytest.raises(SystemExit) as ended:
        check.main(options)
    assert ended.value.code == 2 and words in capsys.readouterr().err
