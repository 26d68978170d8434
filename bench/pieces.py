"""The pieces of the GPU script, in order of importance: each small enough that a broken one costs little."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from andrea_triton import testing
from bench import gpu_steps
from bench.cases import MODES, Case, make_inputs
from bench.jobs import Job
from bench.providers import PROVIDERS, own, possible
from bench.records import Record, environment, machine_title, read
from bench.runner import Runner

Line = dict[str, Any]
TOKENS, WIDTH = 16384, 2048  # of all batches; of a layer
LENGTHS = (1024, 4096, 16384, 2048, 512, 8192)  # the most telling first: time may run out
COMPILED_LENGTHS = (1024, 4096)  # of providers that compile for each shape, at head dim 64
SMALL_LENGTHS, SMALL_BATCHES = (128, 512, 1024, 2048), (1, 4)
STEPS = ("environment", "correctness", "speed", "latency", "training")
# Of the time budget, what may be used up when a piece of a step begins; and the seconds after which a piece is given up.
SHARES = {"environment": 1.0, "correctness": 0.3, "speed": 0.8, "latency": 0.88, "training": 0.97}
LIMITS = {"environment": 60.0, "correctness": 45.0, "speed": 120.0, "latency": 60.0, "training": 90.0}


@dataclass(frozen=True)
class Setting:
    """What all pieces share.

    Args:
        out: folder of the results.
        device: "cuda", or "cpu" for a smoke test.
        smoke: tiny shapes.
        start: reading of time.time() at the start.
        seconds: time budget.
    """

    out: Path
    device: str
    smoke: bool
    start: float
    seconds: float

    def deadline(self, step: str) -> float:
        """Reading of time.time() after which no piece of a step begins."""
        return self.start + SHARES[step] * self.seconds

    def write(self) -> None:
        """Leave the setting in its folder, for the worker."""
        fields = {**dataclasses.asdict(self), "out": None}
        (self.out / "setting.json").write_text(json.dumps(fields), encoding="utf-8")

    @staticmethod
    def of(out: Path) -> Setting:
        """The setting that lies in a folder."""
        return Setting(**{**json.loads((out / "setting.json").read_text(encoding="utf-8")), "out": out})


class Piece(NamedTuple):
    """A part of the work.

    Args:
        step: of STEPS.
        name: unlike any other's.
        run: does it, and says what was found; whatever is wrong it raises.
        compiled: the case and dtype whose kernels are to be compiled beforehand, or None.
    """

    step: str
    name: str
    run: Callable[[Setting], str]
    compiled: tuple[testing.Case, torch.dtype] | None = None


def append(file: Path, line: Line) -> None:
    """Add a JSON line to a file, so that it is on disk whatever comes next."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line, ensure_ascii=False) + "\n")


def lines(file: Path) -> list[Line]:
    """The JSON lines of a file; none where there is no file."""
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def pieces(setting: Setting) -> list[Piece]:
    """All pieces, the most important first within each step."""
    found = [Piece("environment", "environment", find_environment)]
    for case, dtype in correctness_cases(setting.smoke):
        name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
        found.append(Piece("correctness", name, partial(judge, case, dtype), (case, dtype)))
    for timed, names in speed_cases(setting):
        found.append(Piece("speed", f"D = {timed.head_dim}, T = {timed.length}", partial(time_all, timed, names)))
    lengths, heads, D = ((16,), 2, 16) if setting.smoke else (SMALL_LENGTHS, 12, 64)
    for batch in SMALL_BATCHES[:1] if setting.smoke else SMALL_BATCHES:
        for length in lengths:
            timed = Case(length, heads, heads, D, batch, "float32" if setting.smoke else "bfloat16", setting.device)
            found.append(Piece("latency", f"B = {batch}, T = {length}", partial(time_small, timed)))
    backends = ("torch" if setting.device == "cpu" else "triton", "naive")
    return found + [Piece("training", name, partial(train, name)) for name in backends]


def find_environment(setting: Setting) -> str:
    """Versions, machine, revision."""
    where = environment(setting.device)
    if setting.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        where["machine"] |= {"capability": f"{card.major}.{card.minor}", "sms": card.multi_processor_count}
        where["machine"]["memory"] = card.total_memory
    (setting.out / "environment.json").write_text(json.dumps(where, indent=1) + "\n", encoding="utf-8")
    return machine_title(where)


def correctness_cases(smoke: bool) -> Iterator[tuple[testing.Case, torch.dtype]]:
    """Home shapes in every dtype, then the catalogue of hard cases, then pairs of features; none twice."""
    if smoke:
        yield testing.Case("home, small", HQ=2, M=33, D=16, causal=True), torch.float32
        yield from ((case, torch.float32) for case in testing.CASES[1:4])
        return
    half = (torch.bfloat16, torch.float16)
    found = [
        (testing.Case(f"home, D={D}", B=2, HQ=12, M=1024, D=D, causal=True, layout="rows"), dtype)
        for D in (64, 128, 32)
        for dtype in (*half, torch.float32)
    ]
    found.append((testing.Case("home, 12 heads on 4", HQ=12, HKV=4, M=1024, D=64, causal=True), torch.bfloat16))
    found.append((testing.Case("long", B=1, HQ=4, M=4096, D=64, causal=True), torch.bfloat16))
    found += [(case, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16) for case in testing.CASES]
    yield from dict.fromkeys([*found, *testing.pairwise_cases()])


def judge(case: testing.Case, dtype: torch.dtype, setting: Setting) -> str:
    """A case against fp64: output, lse and all gradients, by the rule of accuracy."""
    backend = "triton" if setting.device == "cuda" else "interpreter"
    testing.check(testing.make_inputs(case, dtype, setting.device), gpu_steps.attend_with(backend), case.name)
    return "as exact as the rule asks"


def speed_cases(setting: Setting) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """(case, who is timed): B·T tokens throughout, at each length head dim 64 before 128."""
    if setting.smoke:
        for length in (16, 32):
            yield Case(length, 2, 2, 16, 64 // length, "float32", setting.device), ("naive", "sdpa-math", own(setting.device))
        return
    everyone = possible(setting.device)
    for length in LENGTHS:
        for D in (64, 128):
            names = tuple(n for n in everyone if (D == 64 and length in COMPILED_LENGTHS) or not PROVIDERS[n].compiled)
            yield Case(length, WIDTH // D, WIDTH // D, D, TOKENS // length, "bfloat16", setting.device), names


class QuietBar:
    """A progress bar in words: a line for each thing that begins."""

    def update(self, n: float) -> None:
        """Nothing to draw."""

    def set_description_str(self, desc: str, refresh: bool) -> None:
        """Say what begins."""
        print("  " + desc.strip(), flush=True)


def time_all(case: Case, names: tuple[str, ...], setting: Setting) -> str:
    """Time and memory of everyone who is exact, whose accuracy is checked once for a head dim."""
    file = setting.out / "speed.jsonl"
    check = replace(case, length=LENGTHS[0] if not setting.smoke else 16, batch=1)
    known: list[Record] = [r for r in read(file) if r.kind == "accuracy" and r.case == check] if file.exists() else []
    fresh = tuple(name for name in names if name != "naive" and name not in {r.provider for r in known})
    left = max(1.0, setting.deadline("speed") - time.time())
    job = Job((case,), names, (check,), modes=MODES, rounds=(3, 7), budget_s=0.5)
    runner = Runner(job, environment(setting.device), QuietBar(), keep=lambda r: append(file, json.loads(r.to_json())),
                    deadline=time.monotonic() + left)  # fmt: skip
    runner.failed = {(r.provider, r.case): r.reason for r in known if r.reason is not None}
    if fresh:
        runner.check(fresh)
    runner.rate()
    runner.measure()
    times = [r for r in runner.records if r.kind == "time"]
    return f"{len(times)} times of {min((len(r.samples) for r in times), default=0)} samples and more"


def time_small(case: Case, setting: Setting) -> str:
    """A small call made by Python, and the same call replayed from a CUDA graph."""
    inputs = make_inputs(case)
    for name in ("naive", "sdpa-math" if setting.device == "cpu" else "sdpa-flash", own(setting.device)):
        line = gpu_steps.latency(case, PROVIDERS[name], inputs)
        append(setting.out / "latency.jsonl", {"provider": name, "case": dataclasses.asdict(case), **line})
    return "3 rows"


def train(backend: str, setting: Setting) -> str:
    """Tokens per second of a training step."""
    left = min(LIMITS["training"] / 2, setting.start + setting.seconds - time.time())
    line = gpu_steps.training(backend, setting.device, setting.smoke, time.monotonic() + left)
    append(setting.out / "training.jsonl", line)
    return f"{line['tokens_per_second']:,.0f} tokens/s of {len(line['samples'])} steps, {line['peak_bytes'] / 2**30:.2f} GiB"
