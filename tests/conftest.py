"""What every test runs under: a share of the cores, fixed seeds, and memory that starts as NaN."""

import os

# Before numpy is imported: with more threads its small products in the interpreter are many times slower.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Before torch is: the workers share the cores, for threads that wait for one another's core take five times as long.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import gc
import importlib
import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import settings

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() or torch.xpu.is_available()
BACKENDS = ["reference", "torch"] + ["interpreter"] * HAS_TRITON + ["triton"] * (HAS_TRITON and HAS_GPU)

# Kernels and their launch are Triton's; the rest of the library works, and is tested, without it.
collect_ignore = [] if HAS_TRITON else ["kernels", "launch", "compiled"]

# The same examples every time, and as long as they take: an example in the interpreter is slow.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no accelerator here"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not go through it, two hundred thousand objects, again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it takes all away, or Triton's extension reports leaks."""
    gc.unfreeze()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that works on this machine."""
    return str(request.param)


@pytest.fixture
def device(backend: str) -> str:
    """Where the tensors of `backend` live."""
    if backend != "triton":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "xpu"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def poison(memory: torch.Tensor) -> torch.Tensor:
    """`memory` filled with NaN, or with its type's largest value where there is no NaN."""
    if memory.is_floating_point():
        return memory.fill_(float("nan"))
    return memory.fill_(True if memory.dtype == torch.bool else torch.iinfo(memory.dtype).max)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel should have written and did not is NaN: `launch.run.allocate` returns poisoned memory."""
    try:
        run = importlib.import_module("andrea_triton.launch.run")
    except ModuleNotFoundError:
        return
    allocate = run.allocate

    def poisoned(*arguments: Any) -> torch.Tensor:
        return poison(allocate(*arguments))

    monkeypatch.setattr(run, "allocate", poisoned)
