"""Files that are replaced whole or not at all."""

from pathlib import Path

import pytest
import torch

from andrea_triton import ShapeError, UnsupportedError
from andrea_triton.nn.weights import load_tensors, needed, replacing, save_tensors


def test_tensors_and_notes_come_back(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    tensors = {"a": torch.randn(3, 4).T, "b": torch.arange(5), "c": torch.randn(2, dtype=torch.bfloat16)}
    save_tensors(tmp_path / "new" / "x.safetensors", tensors, {"note": "text"})
    got, notes = load_tensors(tmp_path / "new" / "x.safetensors")
    assert notes == {"note": "text"} and got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing(path) as new:
        new.write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "old"
    with replacing(path) as new:
        new.write_text("new")
    assert path.read_text() == "new"


def test_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "usual").touch()
    save_tensors(tmp_path / "x", {"a": torch.zeros(1)}, {})
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_pickle_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(ShapeError, match="no safetensors file"):
        load_tensors(tmp_path / "x.pt")


def test_missing_module_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"saving is not supported by this installation: no_such_module is missing"):
        needed("no_such_module.inside", "saving")
