"""The backends that a test is run by on this machine, and where their tensors live.

A test that takes a parameter `backend` makes its tensors without naming a device. With backend triton they are the GPU's, for
conftest.py makes that torch's default device while the test runs, and `pytest -m gpu` selects it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() or torch.xpu.is_available()
GPU = "xpu" if torch.xpu.is_available() else "cuda"
# The kernels in the interpreter, and compiled: both keep the contract bit by bit.
KERNELS = ["interpreter"] * HAS_TRITON + ["triton"] * (HAS_TRITON and HAS_GPU)
BACKENDS = ["torch", *KERNELS]
EVERY = ["reference", *BACKENDS]


def device_of(backend: str) -> str:
    """Where the tensors of a backend live."""
    return GPU if backend == "triton" else "cpu"


def here() -> torch.device:
    """Where a test's tensors live while it runs."""
    return torch.get_default_device()


def there(values: Any) -> Any:
    """What a module made when it was imported, with its tensors where the test's own live: a tensor, or the values of a dict."""
    if isinstance(values, dict):
        return {name: there(value) for name, value in values.items()}
    return values.to(here()) if isinstance(values, Tensor) else values


def with_backends(cases: Iterable[Any], backends: Iterable[str] = BACKENDS, slow: bool = False) -> list[Any]:
    """Parameters (backend, case) of every pair."""
    marks = [pytest.mark.slow] * slow
    return [pytest.param(backend, case, marks=marks) for backend in backends for case in cases]


@contextlib.contextmanager
def room_for(gigabytes: float) -> Iterator[None]:
    """Memory that a CPU reserves without touching it, and a GPU has to have: one test at a time has it, of all processes."""
    if here().type == "cpu":
        yield
        return
    with (Path(tempfile.gettempdir()) / "andrea_triton_tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = torch.get_device_module(here())
        module.empty_cache()
        free, _ = module.mem_get_info()
        if free < 1.1 * gigabytes * 2**30:
            pytest.skip(f"{free / 2**30:.0f} GiB are free on the GPU; wanted {1.1 * gigabytes:.0f}")
        yield
        module.empty_cache()
