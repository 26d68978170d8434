"""The process that holds the GPU and does the pieces, one after the other. A CUDA error that sticks ends it; gpu.py starts
another, which goes on behind the piece that broke."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import torch

from bench.pieces import Piece, Setting, append, lines, pieces
from bench.runner import in_one_line

BROKEN = 75
"""Exit code of a process whose device takes no more calls."""


def work(out: Path) -> int:
    """Do what is left of the pieces in a folder.

    Returns:
        Exit code: 0; BROKEN where the device takes no more calls.
    """
    setting = Setting.of(out)
    done = {line["piece"] for line in lines(out / "pieces.jsonl")}
    step = ""
    for piece in pieces(setting):
        if piece.name in done:
            continue
        if piece.step != step:
            step = piece.step
            print(f"\n== {step} (after {time.time() - setting.start:.0f} s)", flush=True)
        await_kernels(piece, setting)
        if time.time() > setting.deadline(piece.step):
            note(piece, setting, None, "left out: out of time", 0.0)
            continue
        if not carry_out(piece, setting):
            return BROKEN
    return 0


def carry_out(piece: Piece, setting: Setting) -> bool:
    """Do a piece and note it. False where the device takes no more calls."""
    begin = time.time()
    (setting.out / "begun.txt").write_text(f"{begin}\n{piece.step}\n{piece.name}", encoding="utf-8")
    ok, said = True, ""
    try:
        said = piece.run(setting)
    except Exception as error:
        ok, said = False, in_one_line(error)
        if piece.step != "correctness":
            traceback.print_exc(limit=-6)
    note(piece, setting, ok, said, time.time() - begin)
    return ok or healthy(setting.device)


def note(piece: Piece, setting: Setting, ok: bool | None, said: str, seconds: float) -> None:
    """Put down how a piece ended; ok is None for one that was left out."""
    line = {"step": piece.step, "piece": piece.name, "ok": ok, "said": said, "seconds": seconds}
    append(setting.out / "pieces.jsonl", line)
    if ok is False or (ok and piece.step != "correctness"):
        print(f"{'' if ok else 'FAILED '}{piece.name}: {said} ({seconds:.1f} s)", flush=True)


def healthy(device: str) -> bool:
    """Whether the device still takes calls."""
    if device != "cuda":
        return True
    try:
        torch.ones(1, device=device).sum().item()
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def await_kernels(piece: Piece, setting: Setting) -> None:
    """Until the pool has compiled what a piece needs, or has ended, or time is up."""
    while piece.compiled is not None and time.time() < setting.deadline(piece.step):
        if (setting.out / "compiled.done").exists() or piece.name in {x["piece"] for x in lines(setting.out / "compiled.jsonl")}:
            return
        time.sleep(0.05)


def run_worker(out: Path) -> int:
    """The worker's process. It ends at once where the device is broken: tearing down would wait for it."""
    code = work(out)
    if code == BROKEN:
        os._exit(code)
    return code
