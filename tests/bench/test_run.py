"""The main job on tiny shapes."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from tqdm import tqdm

from bench import run as job_module
from bench.cases import Case
from bench.providers import NAIVE, PROVIDERS, Provider, naive_lse
from bench.records import read, write
from bench.run import Job, Runner, make_job, summary

TINY = Job(
    Case(length=0, heads=2, kv_heads=2, head_dim=16),
    lengths=(16, 32),
    checked_length=17,
    checked_dtypes=("float32",),
    rounds=(1, 1),
)


def run_tiny(monkeypatch: pytest.MonkeyPatch, fused: Provider) -> Runner:
    """Run the tiny job with naive and one other provider."""
    monkeypatch.setattr(job_module, "PROVIDERS", {"naive": NAIVE, fused.name: fused})
    monkeypatch.setattr(job_module, "checked_on", lambda device: (fused.name,))
    monkeypatch.setattr(job_module, "timed_on", lambda device: ("naive", fused.name))
    with tqdm(total=TINY.weight, disable=True) as bar:
        runner = Runner(TINY, job_module.environment("cpu"), bar)
        runner.check()
        runner.measure()
    return runner


def test_a_run_checks_times_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = run_tiny(monkeypatch, PROVIDERS["andrea-torch"])
    assert [r.kind for r in runner.records].count("time") == 2 * 2 * 2
    assert [r.kind for r in runner.records].count("memory") == 2 * 2 * 2
    assert all(r.environment["versions"]["torch"] for r in runner.records)
    assert "Growth with the length T" in summary(runner.records, TINY)
    write(tmp_path / "r.jsonl", runner.records)
    assert read(tmp_path / "r.jsonl") == runner.records
    assert job_module.finish(runner, tmp_path / "r.jsonl", 1.0) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "r") in said and "time.png" in said and "passed the accuracy check: fused (CPU backend)" in said


def test_who_fails_the_check_gets_no_time_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = naive_lse(q, k, v)
        return out * 1.01, lse

    runner = run_tiny(monkeypatch, replace(PROVIDERS["andrea-torch"], attend_lse=wrong))
    assert {r.provider for r in runner.records if r.kind in ("time", "memory")} == {"naive"}
    left_out = [r for r in runner.records if r.kind == "left out"]
    assert len(left_out) == 4 and all("no time" in str(r.reason) and "out: error" in str(r.reason) for r in left_out)
    monkeypatch.setattr(job_module, "draw_all", lambda records, folder: [folder / "time.png"])
    assert job_module.finish(runner, tmp_path / "r.jsonl", 1.0) == 1
    assert "FAILED after 1 s: andrea-torch" in capsys.readouterr().out


def test_what_raises_is_a_failed_check_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such kernel")

    runner = run_tiny(monkeypatch, replace(PROVIDERS["andrea-torch"], attend_lse=broken))
    assert runner.failed == {"andrea-torch": "RuntimeError: no such kernel"}


def test_a_case_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "free_bytes", lambda device: 1.0)
    runner = run_tiny(monkeypatch, PROVIDERS["andrea-torch"])
    assert {r.provider for r in runner.records if r.kind == "time"} == {"andrea-torch"}
    assert all("more than is free" in str(r.reason) for r in runner.records if r.kind == "left out")


def test_the_jobs() -> None:
    full, quick, smoke = (make_job(size, "cpu") for size in ("full", "quick", "smoke"))  # type: ignore[arg-type]
    assert (full.lengths[0], full.lengths[-1], full.checked_length) == (128, 4096, 1024)
    assert (full.base.heads, full.base.head_dim, full.base.dtype) == (12, 64, "float32")
    assert (quick.lengths[0], quick.lengths[-1]) == (512, 4096)
    assert smoke.weight < quick.weight < full.weight
    assert make_job("full", "cuda").base.dtype == "bfloat16"
