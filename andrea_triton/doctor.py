"""`python -m andrea_triton.doctor`: what is installed, which backend calls take here, with which tiles, and known trouble."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import torch

from . import target
from .errors import AndreaError


def version(package: str) -> str:
    """The installed version of a package, or that it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def pairing(required: str | None) -> str:
    """What torch requires of Triton, in words."""
    if required is None:
        return "this build of torch requires no Triton of its own"
    return f"torch {torch.__version__} requires {required}"


def trouble(triton: str, has_gpu: bool, name: str, required: str | None = None) -> list[str]:
    """Known trouble with these versions and this target, each with the way out.

    Args:
        triton: its version, "not installed", or what is wrong with it.
        has_gpu: whether torch sees a GPU.
        name: of the target, as in launch/configs.py.
        required: what torch requires of Triton, as "triton==3.7.1", if anything.
    """
    low, high = target.TESTED_TRITON
    numbers, found = target.version_numbers, []
    if triton == "not installed":
        found.append(f"Triton is missing, so there are no kernels. Way out (Linux): {target.way_to_triton(required)}.")
    elif not triton[0].isdigit():
        found.append(
            f"Triton is {triton}. Way out: {target.way_to_triton(required).replace('install', 'install --force-reinstall')}."
        )
    elif numbers(triton) < low:
        found.append(f"Triton {triton} is too old. Way out: {target.way_to_triton(required)}.")
    elif numbers(triton) > high:
        tested = target.tested_triton()
        way_out = f"pip install 'triton<{high[0]}.{high[1] + 1}'"
        found.append(f"Triton {triton} is newer than what is tested ({tested}). Way out, if a kernel fails: {way_out}.")
    elif required is not None and numbers(triton) != target.number_of(required):
        found.append(
            f"Triton {triton} runs these kernels, but torch requires {required}, and torch.compile may fail with another."
            f" Way out, if it does: pip install '{required}'."
        )
    if not has_gpu:
        found.append(
            "torch sees no GPU, so calls take PyTorch's own attention on the CPU. If there is a GPU: check its driver, and that"
            " torch is a build for it (pytorch.org). backend='interpreter' runs the kernels here, slowly."
        )
    elif triton[0].isdigit():
        from .launch.configs import FAMILIES

        if name not in FAMILIES:
            found.append(f"No tiles were counted for {name}: it gets small ones that fit anywhere, right but slower.")
    return found


def tiles(name: str) -> list[str]:
    """The tiles of the home shape on a target, a line for each kernel."""
    from .launch.configs import candidates

    lines = []
    for kernel in ("forward", "dkdv", "dq"):
        config = candidates(kernel, name, 64, 2, 1024, 1024, "causal")[0]
        tile = f"{config.BLOCK_M} queries x {config.BLOCK_N} keys"
        how = "" if name == "interpreter" else str(config)[str(config).index(",") :]
        lines.append(f"  {kernel:12} {tile}{how}")
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
    has_gpu, triton = target.has_gpu(), target.triton_version()
    usable, required = triton[0].isdigit(), target.required_triton()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    name = target.target_of(device)
    rows: list[tuple[str, Any]] = [
        ("andrea-triton", version("andrea-triton")),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("triton", f"{triton} ({pairing(required)})"),
        ("numpy", version("numpy")),
        ("device", target.device_name(device)),
        ("target", "none: Triton's interpreter, on the CPU" if name == "interpreter" else name),
        ("backend", f"{target.default_backend(device)} ({target.reason(device)})"),
        ("fp32 products", target.float32_precision()),
    ]
    for label, value in rows:
        print(f"{label:14} {value}")
    if usable:
        print(f"tiles of the {'interpreter' if name == 'interpreter' else 'kernels'} at T = 1024, 64 features, fp16 or bf16")
        print("\n".join(tiles(name)))
    result = try_kernels(device) if usable else f"not tried: Triton is {triton}"
    print(f"{'kernels':14} {result}")
    notes = trouble(triton, has_gpu, name, required)
    print("\n".join(f"note: {line}" for line in notes) if notes else "known trouble  none")
    if not result.startswith("failed"):
        print("next           python -m andrea_triton.check --quick: are the results right?")
    return 1 if result.startswith("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
