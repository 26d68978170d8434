"""What every test runs under: a share of the cores, fixed seeds, and memory that starts as NaN."""

import os

# Before numpy is imported: with more threads its small products in the interpreter are many times slower.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Before torch is: the workers share the cores, for threads that wait for one another's core take five times as long.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import gc
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.backends import EVERY, HAS_GPU, HAS_TRITON, device_of

# Kernels and their launch are Triton's; the rest of the library works, and is tested, without it.
collect_ignore = [] if HAS_TRITON else ["kernels", "launch", "compiled"]

# The same examples every time, and as long as they take: an example in the interpreter is slow.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("repeatable")


def backend_of(item: pytest.Item) -> str | None:
    """The backend that a test is given, if it takes one."""
    return item.callspec.params.get("backend") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is given the compiled kernels is a test of the GPU, before -m chooses."""
    for item in items:
        if backend_of(item) == "triton":
            item.add_marker("gpu")
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not go through it, two hundred thousand objects, again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it takes all away, or Triton's extension reports leaks."""
    gc.unfreeze()


@pytest.fixture(params=EVERY)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that works on this machine."""
    return str(request.param)


@pytest.fixture
def device(backend: str) -> str:
    """Where the tensors of `backend` live."""
    return device_of(backend)


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors that name no device are where the test's backend runs."""
    backend = backend_of(request.node)
    if backend == "triton" or request.node.get_closest_marker("gpu"):
        torch.set_default_device(device_of("triton"))
        yield
        torch.set_default_device(None)
    else:
        yield


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
