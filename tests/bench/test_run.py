"""The main job on tiny shapes."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from tqdm import tqdm

from bench import run as job_module
from bench import runner as runner_module
from bench.cases import Case
from bench.jobs import Job, make_job
from bench.providers import NAIVE, PROVIDERS, Provider, naive_lse
from bench.records import environment, read, write
from bench.runner import Runner
from bench.table import summary

BASE = Case(length=16, heads=2, kv_heads=2, head_dim=16)


def run_tiny(monkeypatch: pytest.MonkeyPatch, fused: Provider) -> Runner:
    """Run a tiny job with naive and one other provider."""
    monkeypatch.setattr(runner_module, "PROVIDERS", {"naive": NAIVE, fused.name: fused})
    job = Job((BASE,), ("naive", fused.name), (replace(BASE, length=17),), rounds=(1, 1))
    with tqdm(total=job.weight, disable=True) as bar:
        runner = Runner(job, environment("cpu"), bar)
        runner.check()
        runner.measure()
    return runner


def test_a_run_checks_times_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = run_tiny(monkeypatch, PROVIDERS["andrea-torch"])
    assert [r.kind for r in runner.records].count("time") == [r.kind for r in runner.records].count("memory") == 2 * 2
    assert all(r.environment["versions"]["torch"] for r in runner.records)
    assert any("Growth with the length T" in line for line in summary(runner.records))
    write(tmp_path / "r.jsonl", runner.records)
    monkeypatch.setattr(job_module, "draw_all", lambda records, folder: [folder / "time.png"])
    assert read(tmp_path / "r.jsonl") == runner.records
    assert job_module.finish(runner, tmp_path / "r.jsonl", 1.0) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "r") in said and "time.png" in said and "passed the accuracy check: andrea_triton" in said


def test_who_fails_the_check_gets_no_time_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = naive_lse(q, k, v)
        return out * 1.01, lse

    runner = run_tiny(monkeypatch, replace(PROVIDERS["andrea-torch"], make_lse=lambda case: wrong))
    assert {r.provider for r in runner.records if r.kind in ("time", "memory")} == {"naive"}
    left_out = [r for r in runner.records if r.kind == "left out"]
    assert len(left_out) == 2 and all("no time" in str(r.reason) and "out: error" in str(r.reason) for r in left_out)
    monkeypatch.setattr(job_module, "draw_all", lambda records, folder: [folder / "time.png"])
    assert job_module.finish(runner, tmp_path / "r.jsonl", 1.0) == 1
    assert "FAILED after 1 s: andrea-torch" in capsys.readouterr().out


def test_a_case_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "free_bytes", lambda device: 1.0)
    runner = run_tiny(monkeypatch, PROVIDERS["andrea-torch"])
    assert {r.provider for r in runner.records if r.kind == "time"} == {"andrea-torch"}
    assert all("more than is free" in str(r.reason) for r in runner.records if r.kind == "left out")


def test_the_jobs() -> None:
    full, quick, smoke = (make_job(size, "cpu", ("naive",)) for size in ("full", "quick", "smoke"))  # type: ignore[arg-type]
    assert ([c.length for c in full.cases], full.checks[0].length) == ([128, 256, 512, 1024, 2048, 4096], 1024)
    assert (full.cases[0].heads, full.cases[0].head_dim, full.cases[0].dtype) == (12, 64, "float32")
    assert [c.length for c in quick.cases] == [512, 1024, 2048, 4096]
    assert smoke.weight < quick.weight < full.weight
    assert make_job("full", "cuda", ("naive",)).cases[0].dtype == "bfloat16"
    for sweep in ("T", "batch", "heads", "dim", "dtype", "window", "gqa"):
        job = make_job("smoke", "cpu", ("naive",), sweep=sweep)  # type: ignore[arg-type]
        assert all(job.check_of(case) is not None for case in job.cases)
