"""What a rank needs beyond its inputs, measured on the resident set of the process."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_triton.distributed import ring_attention
from tests.distributed.ranks import Ranks

T, HEADS, D = 8192, 8, 64
MMAP_THRESHOLD = -3  # of glibc's mallopt: larger blocks are mapped on their own, and leave the resident set when freed


def peak(group: Any) -> float:
    """Peak of one forward and backward in MiB, this rank's share of T rows of q, k, v included."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    call(group, 64)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    call(group, T // torch.distributed.get_world_size(group))
    return resident() - before


def call(group: Any, rows: int) -> None:
    """One forward and backward of a rank that holds `rows` rows."""
    q, k, v = (torch.randn(1, HEADS, rows, D, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v, group=group, causal=True).sum().backward()


def resident() -> float:
    """Peak of the resident set since it was restarted, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the resident set is read from Linux's /proc")
def test_memory_of_a_rank_falls_with_the_ranks(ranks: Ranks) -> None:
    """As one over the ranks from two on; one rank alone has no visitors, nor their gradients, to make room for."""
    peaks = {size: max(ranks.run(peak, size)) for size in (1, 2, 4)}
    print({size: round(mib, 1) for size, mib in peaks.items()})
    assert peaks[2] < peaks[1]
    assert peaks[4] < 0.7 * peaks[2]
