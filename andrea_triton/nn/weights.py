"""Tensors in safetensors files: written whole or not at all, read without running anything that they hold."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from .parallel import gathered, is_dtensor


def needed(module: str, feature: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: its name.
        feature: what it is needed for, for the message.

    Returns:
        The module.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UnsupportedError(
            feature, "this installation", f"{package} is missing: pip install 'andrea-triton[models]'"
        ) from error


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end; if anything fails, `path` stays as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.txt") as new:
        ...         _ = new.write_text("whole")
        ...     [file.name for file in Path(folder).iterdir()]
        ['a.txt']
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    try:
        new.touch()
        mode = new.stat().st_mode  # the usual one, which some writers narrow
        yield new
        new.chmod(mode)
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write tensors and notes to a safetensors file.

    Args:
        path: the file; its folder is made.
        tensors: by name, on any device. DTensors are gathered, for which all ranks have to call this; the first one writes.
        notes: texts beside them.

    Raises:
        UnsupportedError: safetensors is not installed.
    """
    safetensors = needed("safetensors.torch", "saving")
    shared = any(is_dtensor(t) for t in tensors.values())
    whole = {name: gathered(t.detach()).cpu().contiguous() for name, t in tensors.items()}
    if shared and torch.distributed.get_rank() != 0:
        return
    with replacing(path) as new:
        safetensors.save_file(whole, new, dict(notes))


def load_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Args:
        path: the file.

    Returns:
        The tensors by name, on the CPU, and the notes.

    Raises:
        FileNotFoundError: there is no such file.
        ShapeError: the file is corrupt, or no safetensors file.
        UnsupportedError: safetensors is not installed.
    """
    safetensors = needed("safetensors", "loading")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file; wanted a safetensors file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except safetensors.SafetensorError as error:
        raise ShapeError(f"{path} is cut off, corrupt or no safetensors file ({error}); save it again") from error
