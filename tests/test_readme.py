"""The README's Python examples run as they stand there."""

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8") if README.exists() else "", re.DOTALL)
IMPORT = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)

# Runs a file as torchrun does, in two processes that know their rank and where they meet: forks of one, which has imported
# what takes long, and which keeps the meeting place until both have ended.
AS_TORCHRUN = """
import contextlib, io, os, runpy, sys
import andrea_triton.distributed
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
ranks = []
for rank in "01":
    if (child := os.fork()) == 0:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(sys.argv[1], run_name="__main__")
        os.write(1, printed.getvalue().encode())  # at once, so that the two do not mix
        os._exit(0)  # without taking the copy of the store apart
    ranks.append(child)
sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], key=abs))
"""


def name(block: str) -> str:
    """What the block imports of this library."""
    return "-".join(re.findall(r"from andrea_triton\S* import ([^\n]+)", block)).replace(", ", "-")


def written(block: str, folder: Path) -> Path:
    """The block as a file; without the modules that it imports the test is skipped."""
    for module in IMPORT.findall(block):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    path = folder / "example.py"
    path.write_text(block, encoding="utf-8")
    return path


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 7 and all("andrea_triton" in block for block in BLOCKS)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, marks=[pytest.mark.slow] * ("torch.compile" in b))  # a C++ compiler works for ten seconds
        for b in BLOCKS
        if "torch.distributed" not in b
    ],
    ids=name,
)
def test_example(block: str, tmp_path: Path) -> None:
    runpy.run_path(str(written(block, tmp_path)))


@pytest.mark.parametrize("block", [b for b in BLOCKS if "torch.distributed" in b], ids=name)
def test_example_of_two_processes(block: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", AS_TORCHRUN, written(block, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([1, 12, 128, 64]) torch.Size([1, 12, 256, 64])") == 2
