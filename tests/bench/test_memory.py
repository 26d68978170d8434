"""Memory, by child processes on a CPU."""

from dataclasses import replace

import pytest
import torch

from bench.cases import Case
from bench.memory import free_bytes, peak_memory
from bench.providers import NAIVE, PROVIDERS

SMALL = Case(length=40, heads=2, kv_heads=2, head_dim=16)


def test_memory_of_naive_holds_the_scores_and_fused_does_not() -> None:
    case = Case(length=768, heads=4, kv_heads=4)
    naive_peak = peak_memory(case, "forward", NAIVE)
    fused_peak = peak_memory(case, "forward", PROVIDERS["andrea-torch"])
    assert 1.5 * case.score_bytes < naive_peak < 4 * case.score_bytes
    assert 0 < fused_peak < 0.75 * case.score_bytes


def test_what_goes_wrong_in_the_child_comes_back() -> None:
    with pytest.raises(RuntimeError, match="TypeError: dtype is 'nn'"):
        peak_memory(replace(SMALL, dtype="nn"), "forward", NAIVE)


def test_free_memory_is_positive() -> None:
    assert free_bytes("cpu") > 0


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    case = Case(length=1024, dtype="bfloat16", device="cuda")
    assert torch.cuda.is_available()
    assert peak_memory(case, "forward", PROVIDERS["andrea-triton"]) < case.score_bytes
