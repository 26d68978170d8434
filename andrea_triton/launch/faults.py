"""What can go wrong between a plan and a running kernel, each as one error that names the way out."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import triton
from triton.runtime.errors import OutOfResources

from andrea_triton import target as targets
from andrea_triton.errors import AndreaError, CompileError


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of Triton, its C compiler and its cache become a CompileError; the library's own and OutOfResources pass.

    Args:
        what: begins the message, as in "forward did not compile for sm_80".
    """
    try:
        yield
    except (AndreaError, OutOfResources):
        raise
    except Exception as error:
        targets.blame_triton(error)
        said = f"{what} with Triton {triton.__version__}: {str(error) or type(error).__name__}"
        raise CompileError(f"{said}\nWay out: {way_out(error)}, or backend='torch'.") from error


def way_out(error: Exception) -> str:
    """What to do about an error that Triton raised."""
    missing = isinstance(error, FileNotFoundError) and not _in_cache(error)
    if missing or isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error):
        return "Triton builds its launcher with a C compiler: install gcc and Python's headers (python3-dev), or name one in CC"
    if isinstance(error, OSError):
        folder = triton.knobs.cache.dir
        return f"Triton keeps its kernels in {folder}: make room there, or set TRITON_CACHE_DIR to a folder that can be written"
    if "active drivers" in str(error):
        return "the installed Triton has no driver for this device: install the one that came with your torch"
    return f"another Triton ({targets.tested_triton()} are tested)"


def _in_cache(error: OSError) -> bool:
    return str(error.filename).startswith(triton.knobs.cache.dir)
