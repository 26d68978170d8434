"""Training: what it writes, that it learns, and that a killed run goes on as if nothing had happened."""

import csv
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from andrea_triton.nn import Andrea
from andrea_triton.nn.weights import load_tensors
from andrea_triton.train import Log, Options, main, parse, rate_at

for module in ("safetensors", "tqdm", "matplotlib"):
    pytest.importorskip(module)

SMALL = {
    "d-model": 32, "n-head": 2, "n-layer": 1, "context": 16, "batch": 4, "accumulate": 2, "warmup": 5, "dropout": 0.1,
    "evaluate-every": 10, "save-every": 5, "validation-windows": 4, "sample-tokens": 4,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def options(text: Path, out: Path, *more: str) -> list[str]:
    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    return [*small, "--text", str(text), "--out", str(out), *more]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_learns_and_writes_what_it_promises(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(options(text, out, "--steps", "40", "--rate", "0.01")) == 0
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint.safetensors", "log.csv", "loss.png", "model.safetensors"]
    log = rows(out)
    assert [int(row["step"]) for row in log] == list(range(1, 41)) and log[-1]["tokens"] == str(40 * 2 * 4 * 16)
    assert float(log[-1]["validation_bits_per_byte"]) < 4.0 < float(log[0]["bits_per_byte"])
    printed = capsys.readouterr().out
    assert "sample 2" in printed and printed.endswith(f"log, plot and model are in {out}/\n")
    assert Andrea.load(out / "model.safetensors").config.d_model == 32
    assert main(options(text, out, "--steps", "40", "--rate", "0.01")) == 0
    assert rows(out) == log


def test_stopped_run_goes_on_bit_for_bit(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by an error between two checkpoints; the log's rows past the checkpoint are made again."""
    assert main(options(text, tmp_path / "whole", "--steps", "20")) == 0
    add = Log.add

    def fail_at_13(self: Log, row: dict[str, float]) -> None:
        add(self, row)
        if row["step"] == 13:
            raise KeyboardInterrupt

    monkeypatch.setattr(Log, "add", fail_at_13)
    assert main(options(text, tmp_path / "parts", "--steps", "20")) == 130
    monkeypatch.undo()
    assert len(rows(tmp_path / "parts")) == 13
    assert main(options(text, tmp_path / "parts", "--steps", "20")) == 0
    same(tmp_path / "whole", tmp_path / "parts")


def same(a: Path, b: Path) -> None:
    assert rows(a) == rows(b)
    tensors = [load_tensors(folder / "checkpoint.safetensors")[0] for folder in (a, b)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.mark.slow
def test_killed_run_goes_on_bit_for_bit(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "andrea_triton.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--steps", "400", "--save-every", "20"]
    subprocess.run([*command, *options(text, tmp_path / "whole", *arguments)], env=environment, check=True, capture_output=True)
    killed, log = options(text, tmp_path / "parts", *arguments), tmp_path / "parts" / "log.csv"
    for lines in (30, 90):
        process = subprocess.Popen([*command, *killed], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not log.exists() or log.read_bytes().count(b"\n") < lines:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, *killed], env=environment, check=True, capture_output=True)
    same(tmp_path / "whole", tmp_path / "parts")


def test_checkpoint_of_another_run_is_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(options(text, out, "--steps", "5")) == 0
    for arguments, message in (
        (options(text, out, "--steps", "5", "--rate", "0.5"), "was made with --rate 0.003; use the same"),
        (options(text, out, "--steps", "6"), "was made with --steps 5"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    text.write_text("another text entirely, and long enough for this. " * 40)
    assert main(options(text, out, "--steps", "5")) == 2
    assert "was made from another text" in capsys.readouterr().err
    (out / "checkpoint.safetensors").write_bytes(b"half")
    assert main(options(text, out, "--steps", "5")) == 2
    assert "cut off, corrupt or no safetensors file" in capsys.readouterr().err
    assert main(options(text, out, "--steps", "5", "--fresh")) == 0


def test_bad_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    out = tmp_path / "run"
    for arguments, message in (
        (options(tmp_path / "empty.txt", out), "empty.txt is empty"),
        (options(tmp_path / "none.txt", out), "none.txt is no file"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not out.exists()
    for wrong in (["--batch", "0"], ["--dtype", "float16"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_bf16_and_naive_run_too(text: Path, tmp_path: Path) -> None:
    losses = []
    for backend in ("torch", "naive"):
        out = tmp_path / backend
        arguments = ["--steps", "5", "--dtype", "bfloat16", "--backend", backend, "--dropout", "0"]
        assert main(options(text, out, *arguments)) == 0
        losses.append([float(row["loss"]) for row in rows(out)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_rate_rises_and_falls() -> None:
    rates = [rate_at(step, Options(steps=100, warmup=10, rate=1.0)) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_half_a_row_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "step,tokens,rate,loss,bits_per_byte,validation_bits_per_byte\n1,8,0.1,2.0,3.0,\n2,16,0.1,2.0,3.0,2.9\n3,24,0"
    )
    log = Log(tmp_path, 2)
    assert [row["step"] for row in log.rows()] == ["1", "2"]
    log.plot("title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
