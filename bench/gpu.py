"""All that is worth doing with ten minutes of one GPU, each step on disk as it ends: `python -m bench gpu --out DIR`.

The steps, in order: environment; correctness; speed (with the rate of matrix products, and memory); latency; training.
A step that fails is recorded with its error, and the next goes on. Needs torch and triton, nothing else: the plots are
drawn afterwards, anywhere, by `python -m bench plot DIR/speed.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import andrea_triton
from andrea_triton import testing
from bench import gpu_steps
from bench.cases import MODES, Case
from bench.jobs import Job
from bench.providers import PROVIDERS, own, possible
from bench.records import Record, environment, machine_title
from bench.runner import Runner, in_one_line
from bench.table import summary

Line = dict[str, Any]
TOKENS = 16384
WIDTH = 2048
# The most telling lengths first: time may run out.
LENGTHS = (1024, 4096, 16384, 2048, 512, 8192)
COMPILED_LENGTHS = (1024, 4096, 16384)
TINY_TOKENS = 64
# Of the time budget, what a step may have used up, counted from the start, when it begins its last piece.
SHARES = {"correctness": 0.25, "speed": 0.75, "latency": 0.85, "training": 1.0}


@dataclass(frozen=True)
class Setting:
    """What the steps share.

    Args:
        out: folder of the results.
        device: "cuda", or "cpu" for a smoke test.
        smoke: tiny shapes.
        start: reading of time.monotonic() at the start.
        seconds: time budget.
    """

    out: Path
    device: str
    smoke: bool
    start: float
    seconds: float

    def deadline(self, step: str) -> float:
        """Reading of time.monotonic() after which a step begins nothing new."""
        return self.start + SHARES[step] * self.seconds


class QuietBar:
    """A progress bar in words: a line for each thing that begins."""

    def update(self, n: float) -> None:
        """Nothing to draw."""

    def set_description_str(self, desc: str, refresh: bool) -> None:
        """Say what begins."""
        print("  " + desc.strip(), flush=True)


def append(file: Path, line: Line) -> None:
    """Add a JSON line to a file, so that it is on disk whatever comes next."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line, ensure_ascii=False) + "\n")


def step_environment(setting: Setting) -> str:
    """Versions, machine, revision."""
    where = environment(setting.device)
    if setting.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        where["machine"] |= {"capability": f"{card.major}.{card.minor}", "sms": card.multi_processor_count}
        where["machine"]["memory"] = card.total_memory
    (setting.out / "environment.json").write_text(json.dumps(where, indent=1) + "\n", encoding="utf-8")
    return machine_title(where)


def correctness_cases(setting: Setting) -> Iterator[tuple[testing.Case, torch.dtype]]:
    """Home shapes in every dtype, then the catalogue of hard cases, then pairs of features."""
    half = (torch.bfloat16, torch.float16)
    if setting.smoke:
        yield testing.Case("home, small", HQ=2, M=33, D=16, causal=True), torch.float32
        yield from ((case, torch.float32) for case in testing.CASES[1:4])
        return
    for D in (64, 128, 32):
        for dtype in (*half, torch.float32):
            yield testing.Case(f"home, D={D}", B=2, HQ=12, M=1024, D=D, causal=True, layout="rows"), dtype
    yield testing.Case("home, 12 heads on 4", HQ=12, HKV=4, M=1024, D=64, causal=True), torch.bfloat16
    yield testing.Case("long", B=1, HQ=4, M=4096, D=64, causal=True), torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        yield from ((case, dtype) for case in testing.CASES)
    yield from testing.pairwise_cases()


def step_correctness(setting: Setting) -> str:
    """Every kernel against fp64: output, lse and all gradients."""
    backend = "triton" if setting.device == "cuda" else "interpreter"
    passed = failed = skipped = 0
    for case, dtype in correctness_cases(setting):
        if time.monotonic() > setting.deadline("correctness"):
            skipped += 1
            continue
        reason = gpu_steps.wrong(case, dtype, setting.device, backend)
        passed, failed = passed + (reason is None), failed + (reason is not None)
        append(
            setting.out / "correctness.jsonl",
            {"case": case.name, "dtype": str(dtype).removeprefix("torch."), "ok": reason is None, "reason": reason},
        )
        if reason is not None:
            print(f"  FAILED {case.name}, {dtype}: {reason}", flush=True)
    return f"{passed} passed, {failed} failed, {skipped} left out for time"


def speed_jobs(setting: Setting) -> Iterator[Job]:
    """A job per head dim: B·T tokens throughout, forward, backward and both; compiled providers at some lengths only."""
    names = tuple(possible(setting.device))
    if setting.smoke:
        names = ("naive", "sdpa-math", own(setting.device))
    for D in (16,) if setting.smoke else (64, 128):
        tokens, width, lengths = (TINY_TOKENS, 32, (16, 32)) if setting.smoke else (TOKENS, WIDTH, LENGTHS)
        dtype = "float32" if setting.smoke else "bfloat16"
        cases = [Case(t, width // D, width // D, D, tokens // t, dtype, setting.device) for t in lengths]
        checks = (replace(cases[0], length=lengths[0], batch=1),)
        quick = tuple(name for name in names if not PROVIDERS[name].compiled)
        slow = tuple(case for case in cases if case.length in COMPILED_LENGTHS)
        for some, who in ((slow, names), (tuple(c for c in cases if c not in slow), quick)):
            if some:
                yield Job(some, who, checks, modes=MODES, rounds=(2, 7), budget_s=0.6)


def step_speed(setting: Setting) -> str:
    """Time, part of the matmul rate, and memory, against everyone who is here."""
    file, where = setting.out / "speed.jsonl", environment(setting.device)
    records: list[Record] = []

    def keep(record: Record) -> None:
        append(file, json.loads(record.to_json()))

    for job in speed_jobs(setting):
        runner = Runner(job, where, QuietBar(), keep=keep, deadline=setting.deadline("speed"))
        runner.check()
        runner.rate()
        runner.measure()
        records += runner.records
    for D in dict.fromkeys(r.case.head_dim for r in records):
        print("\n".join(summary([r for r in records if r.case.head_dim == D or r.kind == "rate"])), flush=True)
    return f"{sum(r.kind == 'time' for r in records)} times; draw them with: python -m bench plot {file}"


def step_latency(setting: Setting) -> str:
    """Small batches: a call made by Python, and the same call replayed from a CUDA graph."""
    lengths, heads, D = ((16,), 2, 16) if setting.smoke else ((128, 512, 1024, 2048), 12, 64)
    dtype = "float32" if setting.smoke else "bfloat16"
    rows = 0
    for batch in (1,) if setting.smoke else (1, 4):
        for length in lengths:
            case = Case(length, heads, heads, D, batch, dtype, setting.device)
            for name in ("naive", "sdpa-math" if setting.device == "cpu" else "sdpa-flash", own(setting.device)):
                if time.monotonic() < setting.deadline("latency"):
                    line = gpu_steps.latency(case, PROVIDERS[name])
                    append(setting.out / "latency.jsonl", {"provider": name, "case": dataclasses.asdict(case), **line})
                    rows += 1
    return f"{rows} rows"


def step_training(setting: Setting) -> str:
    """Tokens per second of a training step, naive attention against fused."""
    said = []
    for backend in ("naive", "torch" if setting.device == "cpu" else "triton"):
        line = gpu_steps.training(backend, setting.device, setting.smoke, setting.deadline("training"))
        append(setting.out / "training.jsonl", line)
        said.append(f"{backend} {line['tokens_per_second']:,.0f} tokens/s, {line['peak_bytes'] / 2**30:.2f} GiB")
    return "; ".join(said)


STEPS: dict[str, Callable[[Setting], str]] = {
    "environment": step_environment,
    "correctness": step_correctness,
    "speed": step_speed,
    "latency": step_latency,
    "training": step_training,
}


def run_gpu(out: Path, *, minutes: float = 10.0, smoke: bool = False) -> int:
    """Carry out all steps.

    Args:
        out: folder of the results, made where it is missing; what an earlier run left in its files is removed.
        minutes: time budget; a step that runs out of it leaves the rest of its work out, and says so.
        smoke: tiny shapes, on a CPU where there is no GPU.

    Returns:
        Exit code: 0; 1 when a step failed or a kernel was wrong; 2 without a GPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not smoke:
        print("python -m bench gpu: torch sees no GPU here; wanted one, or --smoke for tiny shapes on a CPU")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for name in ("environment.json", *(f"{step}.jsonl" for step in (*STEPS, "steps"))):
        (out / name).unlink(missing_ok=True)
    setting = Setting(out, device, smoke, time.monotonic(), 60 * minutes)
    print(f"andrea_triton {andrea_triton.__version__} on {device}, {minutes:g} minutes, results in {out}", flush=True)
    wrong = 0
    for name, step in STEPS.items():
        begin, failed = time.monotonic(), ""
        print(f"\n== {name}", flush=True)
        try:
            said = step(setting)
        except Exception as error:
            said, failed = in_one_line(error), traceback.format_exc(limit=-6)
            print(failed)
        wrong += bool(failed) or (name == "correctness" and " 0 failed" not in said)
        took = time.monotonic() - begin
        append(out / "steps.jsonl", {"step": name, "ok": not failed, "said": said, "seconds": took, "error": failed or None})
        print(f"{said} ({took:.0f} s)", flush=True)
    print(f"\n{'FAILED' if wrong else 'Done'} in {time.monotonic() - setting.start:.0f} s: {out}")
    return int(wrong > 0)
