"""The bench of the host's work, and a bound on that work that no busy machine can break: how many functions a call calls."""

import pytest

from bench import host
from tests.launch import stub_cuda

pytest.importorskip("triton", exc_type=ModuleNotFoundError)

# Functions of Python and C per call, about a fifth over what was counted with torch 2.13 and Triton 3.6 to 3.9, on sm_90: 86, 99,
# 247, of which an empty autograd Function takes 86. Planned anew at every call, a forward called 723 and both 2653.
MOST = {"forward": 104, "forward, gradients wanted": 120, "forward + backward": 295}


@pytest.mark.skipif(stub_cuda.compiler() is None, reason="no C compiler with Python's headers")
@pytest.mark.parametrize("card", ["sm_80", "sm_90"])
def test_a_call_made_before_does_little(card: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The table comes from a process that has the stub driver, where there is no GPU. A call of sm_90 takes descriptors."""
    status, printed = host.main(["--repeats", "3", "--card", card]), capfd.readouterr()
    assert status == 0, printed.err
    first, head, *lines = printed.out.splitlines()
    assert f"stub driver as {card}" in first or "GPU" in first
    assert head.split() == ["least", "µs", "median", "µs", "functions"]
    assert [line[:16].strip() for line in lines[::3]] == ["andrea_triton", "torch SDPA", "naive", "empty Function"]
    found = {line[16:44].strip(): line.split()[-3:] for line in lines[:3]}
    assert found.keys() == MOST.keys()
    for what, (least, median, functions) in found.items():
        assert 0 < float(least) <= float(median)
        assert int(functions) <= MOST[what], f"{what} calls {functions} functions"
