"""All that is worth doing with ten minutes of one GPU, each piece on disk as it ends: `python -m bench gpu --out DIR`.

The steps, in order: environment; correctness; speed (with the rate of matrix products, and memory); latency; training. One
process holds the GPU (worker.py), as many as there are cores compile kernels ahead of it (precompile.py), and this one watches: a
piece that breaks the device or hangs costs itself alone, and at the end of the time everything stops. Then come a page of text
and, where matplotlib is there, plots; `python -m bench plot DIR/speed.jsonl` draws them anywhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import andrea_triton
from bench.gpu_summary import summarise
from bench.pieces import LIMITS, STEPS, Setting, append, lines, pieces
from bench.precompile import Pool, finished

FILES = ("environment.json", "setting.json", "begun.txt", "compiled.done", "summary.txt", *(f"{s}.jsonl" for s in STEPS),
         "pieces.jsonl", "compiled.jsonl")  # fmt: skip
GRACE = 5.0  # seconds after the end in which a piece may still end by itself
POLL = 0.2


def run_gpu(out: Path, *, minutes: float = 10.0, smoke: bool = False) -> int:
    """Carry out all pieces, and sum up.

    Args:
        out: folder of the results, made where it is missing; what an earlier run left in its files is removed.
        minutes: time budget; pieces that find it used up are left out, and say so.
        smoke: tiny shapes, on a CPU where there is no GPU.

    Returns:
        Exit code: 0; 1 when a piece failed; 2 without a GPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not smoke:
        print("python -m bench gpu: torch sees no GPU here; wanted one, or --smoke for tiny shapes on a CPU")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    setting = Setting(out, device, smoke, time.time(), 60 * minutes)
    setting.write()
    print(f"andrea_triton {andrea_triton.__version__} on {device}, {minutes:g} minutes, results in {out}", flush=True)
    watch(setting, lambda: subprocess.Popen([sys.executable, "-m", "bench", "gpu", "--worker", "--out", str(out)]))
    print("\n" + summarise(out), flush=True)
    wrong = [line for line in lines(out / "pieces.jsonl") if line["ok"] is False]
    print(f"{'FAILED' if wrong else 'Done'} in {time.time() - setting.start:.0f} s: {out}")
    return int(bool(wrong))


def watch(setting: Setting, start: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Start workers until nothing is left or the time is over; who ends early leaves a piece that is put down as failed."""
    pool, worker = None, start()
    try:
        while time.time() < setting.start + setting.seconds + GRACE:
            if pool is None and (setting.out / "environment.json").exists():
                pool = start_pool(setting)
            code = worker.poll()
            if code == 0:
                return
            reason = f"the process ended with code {code}" if code is not None else overtime(setting)
            if reason:
                stop(worker)
                blame(setting, reason)
                worker = start()
            time.sleep(POLL)
        stop(worker)
        blame(setting, "stopped at the end of the time")
    finally:
        stop(worker)
        if isinstance(pool, Pool):
            pool.close()


def start_pool(setting: Setting) -> Pool | bool:
    """Compile ahead for the card that the worker found; True where there is nothing to compile for."""
    machine = json.loads((setting.out / "environment.json").read_text(encoding="utf-8"))["machine"]
    if "capability" not in machine:
        finished(setting)
        return True
    target = "sm_" + machine["capability"].replace(".", "")
    return Pool(setting, [piece for piece in pieces(setting) if piece.compiled is not None], target)


def begun(setting: Setting) -> tuple[float, str, str] | None:
    """(reading of time.time(), step, name) of the piece that began last."""
    file = setting.out / "begun.txt"
    words = file.read_text(encoding="utf-8").split("\n", 2) if file.exists() else []
    return (float(words[0]), words[1], words[2]) if len(words) == 3 else None


def overtime(setting: Setting) -> str:
    """Why the piece that runs is given up; nothing while it may go on."""
    found = begun(setting)
    if found is None or found[2] in {line["piece"] for line in lines(setting.out / "pieces.jsonl")}:
        return ""
    limit = LIMITS[found[1]]
    return f"given up after {limit:.0f} s" if time.time() - found[0] > limit else ""


def blame(setting: Setting, reason: str) -> None:
    """Put the piece that was running down as failed."""
    found = begun(setting)
    if found is not None and found[2] not in {line["piece"] for line in lines(setting.out / "pieces.jsonl")}:
        print(f"FAILED {found[2]}: {reason}", flush=True)
        line = {"step": found[1], "piece": found[2], "ok": False, "said": reason, "seconds": time.time() - found[0]}
        append(setting.out / "pieces.jsonl", line)


def stop(worker: subprocess.Popen[bytes]) -> None:
    """End a worker that may hang."""
    if worker.poll() is None:
        worker.kill()
    worker.wait()
