"""`python -m andrea_triton.doctor`: what is installed, which backend calls take here, with which tiles, and known trouble."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import torch

from . import target
from .errors import AndreaError

TESTED_TRITON = ((3, 6), (3, 9))


def version(package: str) -> str:
    """The installed version of a package, or that it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:2])


def trouble(triton: str, numpy: str, has_gpu: bool) -> list[str]:
    """Known trouble with these versions, each with the way out."""
    found = []
    if triton == "not installed":
        found.append("Triton is missing: only the torch and reference backends work. Way out: pip install triton (Linux).")
        return found
    if numbers(triton) < TESTED_TRITON[0]:
        found.append(f"Triton {triton} is too old. Way out: pip install 'triton>=3.6'.")
    if numbers(triton) > TESTED_TRITON[1]:
        found.append(
            f"Triton {triton} is newer than what is tested (3.6 to 3.9). Way out, if a kernel fails: pip install triton==3.9.0."
        )
    if numbers(triton) < (3, 9) and numpy != "not installed" and numbers(numpy) >= (2, 4):
        found.append(f"numpy {numpy} breaks the interpreter of Triton {triton}. Way out: pip install 'numpy<2.4'.")
    if not has_gpu:
        found.append(
            "No GPU is seen: calls take PyTorch's own attention on the CPU; backend='interpreter' runs the kernels, slowly."
        )
    return found


def tiles(name: str) -> list[str]:
    """The tiles of the home shape on a target, a line for each kernel."""
    from .launch.configs import candidates

    lines = []
    for kernel in ("forward", "dkdv", "dq"):
        config = candidates(kernel, name, 64, 2, 1024, 1024)[0]
        tile = f"{config.BLOCK_M}x{config.BLOCK_N}, {config.num_warps} warps, {config.num_stages} stages"
        lines.append(f"  {kernel:8} {tile}")
    return lines


def try_kernels(device: torch.device) -> str:
    """Run one small call forward and backward by the kernels; what came of it."""
    from .functional import causal_attention

    q = torch.randn(1, 2, 33, 16, device=device, requires_grad=True)
    try:
        out = causal_attention(q, q, q, backend="interpreter" if device.type == "cpu" else "triton")
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
    except AndreaError as error:
        return f"failed: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}. Way out: backend='torch', and please report this."
    return "ran forward and backward"


def main() -> int:
    """Print the report. Returns 0 when the kernels ran, or cannot run here for a known reason, else 1."""
    has_gpu, has_triton = target.has_gpu(), target.has_triton()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    rows: list[tuple[str, Any]] = [
        ("andrea-triton", version("andrea-triton")),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("triton", version("triton")),
        ("numpy", version("numpy")),
        ("device", target.device_name(device)),
        ("target", target.target_of(device)),
        ("backend", f"{target.default_backend(device)} ({target.reason(device)})"),
        ("fp32 products", target.float32_precision()),
    ]
    for name, value in rows:
        print(f"{name:14} {value}")
    if has_triton:
        print("tiles at T = 1024, 64 features, fp16 or bf16")
        print("\n".join(tiles(target.target_of(device))))
    result = try_kernels(device) if has_triton else "not tried: Triton is missing"
    print(f"{'kernels':14} {result}")
    for line in trouble(version("triton"), version("numpy"), has_gpu):
        print(f"note: {line}")
    return 1 if result.startswith("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
