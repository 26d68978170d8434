"""Counts of machine code, and their plot."""

from pathlib import Path

import pytest

from bench.static import draw_static


def test_rows_are_drawn(tmp_path: Path) -> None:
    loop = {"total": 600, "overlap_tflops": 300.0, "serial_tflops": 170.0}
    row = {"target": "sm_80", "kernel": "forward", "D": 64, "dtype": "bf16", "variant": "causal", "triton": "3.9.0", "error": ""}
    counted = {**row, "registers": 200, "spills_in_loops": 2, "shared_memory": 32768, "full": loop}
    assert len(draw_static([counted, {**row, "target": "sm_75", "error": "no"}], tmp_path)) == 4


def test_nothing_counted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        draw_static([], tmp_path)
