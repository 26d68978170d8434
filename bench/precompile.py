"""Kernels compiled into Triton's cache by processes that need no GPU, so that the one which has it does not wait."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from andrea_triton import testing
from bench.pieces import Piece, Setting, append


def compile_case(case: testing.Case, dtype: torch.dtype, target: str) -> int:
    """Compile what a case launches, forward and backward, for a target. How many kernels there are."""
    launches = planned(case, dtype, target)
    from andrea_triton.counting.launches import compile_launch

    for launch, outputs, problem in launches:
        compile_launch(launch, problem, target, outputs)
    return len(launches)


def planned(case: testing.Case, dtype: torch.dtype, target: str) -> list[tuple[Any, Any, Any]]:
    """(launch, outputs, problem) of what a case launches on a target, of tensors on the CPU."""
    from andrea_triton import target as targets
    from andrea_triton.counting import launches
    from andrea_triton.problem import make_problem
    from andrea_triton.spec import make_spec

    inputs = testing.make_inputs(case, dtype, "cpu")
    extras = {("keep" if name == "mask" else name): x for name, x in inputs.extras.items()}
    for name in ("bias", "sinks"):
        if name in extras:
            extras[name] = extras[name].requires_grad_()
    problem = make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings), **extras)
    precision = targets.float32_precision()
    plan = launches.planned(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, problem, target, precision)
    return [(launch, outputs, problem) for launch, outputs in plan]


class Pool:
    """Compiles the kernels of pieces, in their order, and notes in compiled.jsonl which are there.

    Args:
        setting: of the run.
        todo: the pieces.
        target: of the card, such as sm_90.
    """

    def __init__(self, setting: Setting, todo: Sequence[Piece], target: str) -> None:
        self.setting, self.left = setting, len(todo)
        self.pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1), get_context("spawn"))
        for piece in todo:
            assert piece.compiled is not None
            future = self.pool.submit(compile_case, *piece.compiled, target)
            future.add_done_callback(lambda done, piece=piece: self._note(piece, done))  # type: ignore[misc]

    def _note(self, piece: Piece, done: Future[int]) -> None:
        """A piece whose kernels do not compile is told by the piece itself, when it runs."""
        self.left -= 1
        if not done.cancelled():
            kernels = None if done.exception() else done.result()
            line = {"piece": piece.name, "kernels": kernels, "at": time.time() - self.setting.start}
            append(self.setting.out / "compiled.jsonl", line)
        if self.left == 0:
            finished(self.setting)

    def close(self) -> None:
        """Stop what has not begun."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def finished(setting: Setting) -> None:
    """Say that nothing more is compiled ahead."""
    (setting.out / "compiled.done").touch()
