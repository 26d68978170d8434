"""Run the library's plans in the emulator: the same kernels, compiled for a GPU, on CPU tensors.

`emulated` puts the emulator in the place of the interpreter, so that every public function with backend="interpreter" runs
compiled kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

from andrea_triton import target as targets
from andrea_triton.launch import compile as compiler
from andrea_triton.launch import run
from andrea_triton.launch.configs import Config
from andrea_triton.launch.descriptors import without_descriptors
from andrea_triton.launch.plan import Launch, tiled, unit_stride
from andrea_triton.problem import Problem
from tests.compiled.global_memory import GlobalMemory
from tests.compiled.machine import Machine
from tests.compiled.parse import parse

Begun = Callable[[Launch, tuple[torch.Tensor, ...]], None]
"""Told of a launch that is about to run, and of the tensors that its plan writes."""
Rewrite = Callable[[str, str], str]
"""(kernel's name, its PTX) -> the PTX to run instead."""
Tiles = dict[str, Config]
"""Tilings by the kernel's name; a kernel that is not there gets the library's."""


@functools.lru_cache(maxsize=64)
def machine(ptx: str, shared_bytes: int) -> Machine:
    """The machine of a PTX text."""
    return Machine(parse(ptx), shared_bytes)


def assemble_nothing(*_: Any, **__: Any) -> bytes:
    """Stands for the assembler, most of the time that a compilation takes: the emulator does not read what it makes."""
    return b""


@contextmanager
def without_assembler() -> Iterator[None]:
    """Compile to PTX alone, in a cache of its own: what is not assembled must never reach a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_cubin", assemble_nothing)
        patch.setattr(triton.knobs.cache, "dir", str(Path(triton.knobs.cache.dir) / "ptx_only"))
        yield


def start(launch: Launch, target: str, rewrite: Rewrite | None = None) -> None:
    """Compile a launch and run it."""
    with without_assembler():
        kernel = compiler.compiled(launch, compiler.gpu_target(target))
    ptx = kernel.asm["ptx"] if rewrite is None else rewrite(launch.name, kernel.asm["ptx"])
    values = compiler.flatten(launch.args)
    tensors = {f"{launch.name}.{i}": x for i, x in enumerate(values) if isinstance(x, torch.Tensor)}
    arguments = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]
    machine(ptx, kernel.metadata.shared).launch(launch.grid, arguments, GlobalMemory(tensors))


@contextmanager
def emulated(
    target: str = "sm_80", tiles: Tiles | None = None, rewrite: Rewrite | None = None, begun: Begun | None = None,
    precision: str = "ieee",
) -> Iterator[list[str]]:  # fmt: skip
    """Within it backend="interpreter" means compiled kernels in the emulator.

    Args:
        target: sm_80, or sm_90; tiles come by pointers there too, not by descriptors, for bulk copies are not emulated.
        tiles: tilings to use instead of the library's.
        rewrite: changes the PTX that is run.
        begun: called before each launch.
        precision: how fp32 is multiplied: ieee, tf32x3 or tf32.

    Yields:
        Names of the kernels that were run.
    """
    names: list[str] = []

    def execute(work: run.Work, given: run.Tensors, problem: Problem, backend: str, wanted: run.Wanted = ()) -> list[Any]:
        given = tuple(None if t is None else unit_stride(t) for t in given)
        rooms = work.rooms(given, problem, wanted)
        made = run._allocated(rooms, given)
        written = tuple(x for x in made if x is not None)
        for launch in work.plan(given, run._apart(made, rooms), problem, wanted, target, precision):
            if 0 not in launch.grid:
                config = (tiles or {}).get(launch.name)
                launch = replace(launch, described=False, args=without_descriptors(launch.args))
                launch = launch if config is None else tiled(launch, problem, config)
                names.append(launch.name)
                if begun is not None:
                    begun(launch, written)
                start(launch, target, rewrite)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "execute", execute)
        patch.setattr(targets, "target_of", lambda device: target)
        yield names
