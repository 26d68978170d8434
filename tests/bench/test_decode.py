"""The bench of decoding: it runs, checks before it times, and prints what it says."""

import pytest
import torch

from bench import decode
from bench.decode import Shape, Speed, main, measure, table


def test_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lengths", "33", "--batch", "2", "--kv-heads", "4", "--repeats", "2"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("torch SDPA, contiguous", "andrea_triton, contiguous", "andrea_triton, pages of 16"))
    assert "not accurate" not in text and "tokens/s" in text


def test_who_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = decode.decode_attention
    monkeypatch.setattr(decode, "decode_attention", lambda q, cache: 1.01 * ours(q, cache))
    speeds = {speed.name: speed.seconds for speed in measure(Shape(1, length=20), torch.float32, "cpu", 1)}
    assert speeds["torch SDPA, contiguous"] and speeds["andrea_triton, contiguous"] is None


def test_figures() -> None:
    shape = Shape(batch=2, kv_heads=3, dim=8, length=100)
    lines = table(shape, torch.float32, [Speed("a", 1e-3), Speed("b", 5e-4), Speed("c", None)])
    assert lines[1].split() == ["a", "1000.0", "2000", "0.02", "0.04", "1.00x"]
    assert lines[2].split()[2] == "4000" and lines[2].endswith("2.00x") and "not accurate" in lines[3]
