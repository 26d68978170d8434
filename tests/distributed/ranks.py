"""A few processes with gloo groups between them, kept for as long as a test file runs."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# One server imports torch, and every rank is a fork of it.
CONTEXT = get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "andrea_triton.distributed"])
PATIENCE = 60.0  # seconds until a rank that does not answer is a failure


class Failed(Exception):
    """A rank raised; its traceback is the message."""


class Ranks:
    """`size` processes; the first one, two and four have a group of their own."""

    def __init__(self, size: int, folder: Path, timeout: float = 60.0) -> None:
        self.size = size
        ends = [CONTEXT.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in ends]
        self.processes = [
            CONTEXT.Process(target=serve, args=(theirs, rank, size, str(folder / "store"), timeout), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self.processes, ends, strict=True):
            process.start()
            theirs.close()

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        """What function(group, *args) returns on each of the first `ranks`; raises Failed when it fails on one."""
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, args))
        answers = [self.answer(rank) for rank in range(ranks)]
        for failed, answer in answers:
            if failed:
                raise Failed(answer)
        return [answer for _, answer in answers]

    def answer(self, rank: int) -> tuple[bool, Any]:
        """(whether it failed, what it returned or its traceback) of a rank."""
        if not self.pipes[rank].poll(PATIENCE):
            return True, f"rank {rank} gave no answer in {PATIENCE} s"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return True, f"rank {rank} is gone"

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(5.0)
            if process.is_alive():
                process.kill()


def serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    """A rank: do what comes through the pipe until None comes."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init, patience = f"file://{store}", timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=patience)
    groups = {n: dist.new_group(list(range(n)), timeout=patience) for n in (1, 2, 4) if n <= size}
    while (task := pipe.recv()) is not None:
        function, ranks, args = task
        try:
            answer = False, function(groups[ranks], *args)
        except BaseException:
            answer = True, traceback.format_exc()
        pipe.send(answer)
    dist.destroy_process_group()


@contextlib.contextmanager
def ranks_of(size: int, folder: Path, timeout: float = 60.0) -> Iterator[Ranks]:
    """`size` ranks for the length of a with block."""
    ranks = Ranks(size, folder, timeout)
    try:
        yield ranks
    finally:
        ranks.close()
