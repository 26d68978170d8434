"""The bench of the host's work, and a bound on that work that no busy machine can break: how many functions a call calls."""

import pytest

from bench import host
from tests.launch import stub_cuda

pytest.importorskip("triton", exc_type=ModuleNotFoundError)

# Functions of Python and C per call, about a fifth over what was counted with torch 2.13 and Triton 3.9: 113, 135, 330.
# Planned anew at every call, a forward called 723 and both 2653.
MOST = {"forward": 140, "forward, gradients wanted": 165, "forward + backward": 410}


@pytest.mark.skipif(stub_cuda.compiler() is None, reason="no C compiler with Python's headers")
def test_a_call_made_before_does_little(capfd: pytest.CaptureFixture[str]) -> None:
    """The table comes from a process that has the stub driver, where there is no GPU."""
    status, printed = host.main(["--repeats", "3"]), capfd.readouterr()
    assert status == 0, printed.err
    first, head, *lines = printed.out.splitlines()
    assert "stub driver" in first or "GPU" in first
    assert head.split() == ["least", "µs", "median", "µs", "functions"]
    assert [line[:16].strip() for line in lines[::3]] == ["andrea_triton", "torch SDPA", "naive", "empty Function"]
    found = {line[16:44].strip(): line.split()[-3:] for line in lines[:3]}
    assert found.keys() == MOST.keys()
    for what, (least, median, functions) in found.items():
        assert 0 < float(least) <= float(median)
        assert int(functions) <= MOST[what], f"{what} calls {functions} functions"
