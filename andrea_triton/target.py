"""Which machine and which backend: the only file that asks torch or the environment what there is."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from typing import Any

import torch

from .errors import UnsupportedError

BACKENDS = ("triton", "interpreter", "torch", "reference")
TESTED_TRITON = ((3, 6), (3, 9))  # its launcher and interpreter are used from within, which a version may change
# The first torch whose CUDA builds require each Triton, by their packages' own metadata. Those before require one too old.
TORCH_PAIRS = (("2.10", "3.6"), ("2.12", "3.7"), ("2.14", "3.8"))


def has_triton() -> bool:
    """True where Triton is installed (it is not imported for the question)."""
    return sys.modules.get("triton") is not None or importlib.util.find_spec("triton") is not None


def triton_version() -> str:
    """Of the Triton that would run; what is wrong where it cannot be imported."""
    try:
        import triton
    except Exception as error:
        return f"unusable ({type(error).__name__}: {error})" if has_triton() else "not installed"
    return str(triton.__version__)


def version_numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    Example:
        >>> version_numbers("3.10.0+git1234")
        (3, 10)
    """
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:2])


def tested_triton() -> str:
    """The versions of Triton that are tested, in words."""
    low, high = (".".join(map(str, version)) for version in TESTED_TRITON)
    return f"{low} to {high}"


def required_triton() -> str | None:
    """What the installed torch requires of Triton, as "triton==3.7.1"; None where it requires none, as its CPU builds do."""
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (re.match(r"(?:pytorch-)?triton[\w-]*\s*[=~<>]=?\s*\d[\w.+]*", requirement) for requirement in wanted)
    return next((match[0].replace(" ", "") for match in found if match), None)


def way_to_triton(required: str | None) -> str:
    """How to get a Triton that is new enough, beside a torch that requires one itself.

    Args:
        required: by torch, as required_triton says it.

    Example:
        >>> way_to_triton("triton==3.5.1")
        "pip install 'torch>=2.10' (CUDA builds of torch bring Triton: 2.10 3.6, 2.12 3.7, 2.14 3.8; older ones one too old)"
        >>> way_to_triton("triton==3.7.1"), way_to_triton(None)
        ("pip install 'triton==3.7.1' (as torch requires)", "pip install 'triton>=3.6,<3.10'")
    """
    low, high = TESTED_TRITON
    if required is None:
        return f"pip install 'triton>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}'"
    if number_of(required) >= low:
        return f"pip install '{required}' (as torch requires)"
    pairs = ", ".join(f"{torch} {triton}" for torch, triton in TORCH_PAIRS)
    return f"pip install 'torch>={TORCH_PAIRS[0][0]}' (CUDA builds of torch bring Triton: {pairs}; older ones one too old)"


def number_of(requirement: str) -> tuple[int, ...]:
    """The first two numbers of the version that a requirement names."""
    return version_numbers(re.split(r"[=~<>]+", requirement)[-1])


def blame_triton(error: Exception) -> None:
    """Raise an error that says so where a fault may come from a Triton that is not tested; return where it is.

    Raises:
        UnsupportedError: with the versions that are tested.
    """
    version = triton_version()
    low, high = TESTED_TRITON
    if isinstance(error, (AttributeError, TypeError, ImportError)) and not low <= version_numbers(version) <= high:
        required = None if version_numbers(version) > high else required_triton()
        way_out = f"{way_to_triton(required)}, or backend='torch'"
        reason = f"{tested_triton()} are tested ({type(error).__name__}: {error}). Way out: {way_out}"
        raise UnsupportedError("running kernels", f"Triton {version}", reason) from error


def has_gpu() -> bool:
    """True where torch sees a CUDA or HIP device."""
    return torch.cuda.is_available()


def device_name(device: torch.device) -> str:
    """What the maker calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def default_backend(device: torch.device) -> str:
    """The backend that tensors on a device get when the call names none: triton on CUDA, HIP and XPU, else torch."""
    return "triton" if device.type in ("cuda", "xpu") and has_triton() else "torch"


def reason(device: torch.device) -> str:
    """Why default_backend chooses as it does."""
    if device.type not in ("cuda", "xpu"):
        return f"{device.type} tensors: PyTorch's fused attention where it says what is asked, else blocks of rows in PyTorch"
    if not has_triton():
        return "Triton is not installed: pip install triton to get the kernels"
    return f"{device.type} tensors: the Triton kernels"


def check_backend(name: str, device: torch.device) -> None:
    """Raise when a backend is unknown (ValueError kind) or cannot run on a device.

    Raises:
        UnsupportedError: names the backends that can.
    """
    if name not in BACKENDS:
        raise UnsupportedError("backend", repr(name), f"wanted one of {', '.join(BACKENDS)}, or None to choose by device")
    if name in ("triton", "interpreter") and not has_triton():
        raise UnsupportedError(
            f"backend {name!r}", "this installation", "Triton is missing: pip install triton, or backend='torch'"
        )
    if name == "triton" and device.type not in ("cuda", "xpu"):
        raise UnsupportedError(
            f"{device.type} tensors",
            "triton",
            "it runs on cuda, hip and xpu tensors; backend='interpreter' runs the same kernels on the CPU",
        )
    if name == "interpreter" and device.type != "cpu":
        raise UnsupportedError(f"{device.type} tensors", "interpreter", "it runs on CPU tensors; backend='triton' runs these")


@functools.cache
def _device_target(index: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def target_of(device: torch.device) -> str:
    """The name under which launch/configs.py knows a device: sm_80, gfx942, xpu, or interpreter for the CPU."""
    if device.type in ("cpu", "xpu"):
        return "interpreter" if device.type == "cpu" else "xpu"
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _device_target(index)


def current(device: torch.device) -> Any:
    """A context in which a GPU is the current device, so that kernels start there."""
    return torch.xpu.device(device) if device.type == "xpu" else torch.cuda.device(device)


def ensure_context() -> None:
    """Make the context of the current CUDA device current in this thread, where there is none. PyTorch does so with the first
    call that needs it; a driver wants it before that, from who encodes tensor maps."""
    driver, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context:
        driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        driver.cuCtxSetCurrent(context)


def stream(device: torch.device) -> int:
    """The handle of a GPU's current stream, which kernels start on; the device must be the current one."""
    if device.type != "xpu":  # as Triton asks torch, without the way through Triton
        handle: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)
        return handle
    import triton

    driver = triton.runtime.driver.active
    return int(driver.get_current_stream(driver.get_current_device() if device.index is None else device.index))


def gpu_target() -> Any:
    """Triton's GPUTarget of the current device."""
    import triton

    return triton.runtime.driver.active.get_current_target()


def float32_precision() -> str:
    """How fp32 matrix products are asked to be made: "ieee", "tf32x3" (three TF32 products), "tf32", or "fastest" of two.
    ANDREA_TRITON_FLOAT32 in the environment, ieee or tf32x3, goes before torch's own setting for GPUs. Since torch 2.9 there are
    two ways to say that, and asking by the older fails after one said it by the newer; the older alone has no word for nothing.

    Raises:
        UnsupportedError: the environment says something else.
    """
    own = os.environ.get("ANDREA_TRITON_FLOAT32")
    if own:
        if own not in ("ieee", "tf32x3"):
            raise UnsupportedError(f"ANDREA_TRITON_FLOAT32={own}", "fp32 products", "wanted ieee or tf32x3, or no such variable")
        return own
    found = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if found is None:
        return "fastest" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return found if found in ("ieee", "tf32") else "fastest"


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast gives matrix products on a device, None outside autocast."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = device.type
    if kind in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None
