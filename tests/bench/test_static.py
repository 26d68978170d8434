"""Counts of machine code: the committed table, what is asked of it, and its plot."""

import json
from pathlib import Path
from typing import Any

import pytest
import triton

from andrea_triton.counting import report
from andrea_triton.counting.calls import DTYPES
from andrea_triton.launch.configs import Config, candidates
from bench import static
from bench.static import (
    CALLS,
    FILE,
    KERNELS,
    TARGETS,
    VARIANT_TARGETS,
    WIDE_TARGETS,
    call_of,
    count_all,
    draw_static,
    read_rows,
    wanted,
)

ROWS = read_rows(FILE)
MAIN = [row for row in ROWS if row["kernel"] in KERNELS]
ROW = {
    "target": "sm_80", "kernel": "forward", "D": 64, "dtype": "bf16", "variant": "causal", "triton": "3.9.0", "error": "",
    "BLOCK_M": 128, "BLOCK_N": 64,
}  # fmt: skip
# On gfx1100 a wave has 256 registers and no others to spill to, and no tile was found that does without.
SPILLING = {("gfx1100", 128, "dkdv"), ("gfx1100", 128, "dq")}


# Loads and stores of spilled registers in main loops: tiles that are faster by the simulated clock than any without.
SPILLS = {
    "sm_80 64 bf16 dropout dq": 1,
    "sm_80 128 bf16 causal forward": 12,
    "sm_80 128 fp16 causal forward": 12,
    "sm_80 256 bf16 causal forward": 5,
    "sm_90 32 bf16 causal dkdv": 2,
    "sm_90 32 fp16 causal dkdv": 2,
    "sm_90 64 bf16 alibi dkdv": 9,
}


def named(row: static.Row) -> str:
    return " ".join(map(str, (*call_of(row), row["kernel"])))


def test_the_table_is_whole() -> None:
    found = list(dict.fromkeys(map(call_of, ROWS)))
    assert found == [call for call in CALLS if call in found]
    assert {call for call in CALLS if call[0] in ("sm_80", "sm_90")} <= set(found) and {call[0] for call in found} == set(TARGETS)
    for call in found:
        assert {row["kernel"] for row in MAIN if call_of(row) == call} == set(KERNELS), call
    assert not [row for row in ROWS if row["error"]]


def test_the_table_counts_the_tiles_that_the_library_takes() -> None:
    by_dtype = {"fp32": "ieee", "tf32": "tf32"}
    by_variant = {"causal": "causal", "gqa": "grouped", "window": "window", "softcap": "capped", "bias": "matrix"}
    by_variant |= {"alibi": "slopes", "dropout": "dropout"}
    for row in MAIN:
        tile = tuple(row[name] for name in Config._fields)
        itemsize = DTYPES[row["dtype"]].itemsize
        kind = by_dtype.get(row["dtype"]) or by_variant.get(row["variant"], "plain")
        assert tile == candidates(row["kernel"], row["target"], row["D"], itemsize, 1024, 1024, kind)[0], named(row)


def test_no_kernel_spills_in_a_main_loop() -> None:
    found = {named(row): row["spills_in_loops"] for row in MAIN if row["target"] in WIDE_TARGETS and row["spills_in_loops"]}
    assert found == SPILLS


# Useful TFLOP/s at length 1k and 8k, simulated: forward, dkdv, dq of plain causal calls in bf16.
ASKED = {
    ("sm_90", 64): ((360, 470), (490, 630), (525, 700)),
    ("sm_90", 128): ((394, 500), (480, 597), (600, 720)),
    ("sm_80", 64): ((157, 210), (168, 204), (185, 231)),
    ("sm_89", 64): ((139, 151), (141, 154), (146, 156)),
}


@pytest.mark.parametrize(("target", "D"), ASKED)
def test_plain_causal_calls_are_as_fast_as_asked(target: str, D: int) -> None:
    rows = {row["kernel"]: row["simulated"] for row in MAIN if call_of(row) == (target, D, "bf16", "causal")}
    for kernel, asked in zip(("forward", "dkdv", "dq"), ASKED[target, D], strict=True):
        assert all(a <= round(b) for a, b in zip(asked, rows[kernel], strict=True)), (kernel, rows[kernel])


def test_amd_kernels_spill_nowhere_else() -> None:
    found = {(row["target"], row["D"], row["kernel"]) for row in MAIN if row["spill_loads"] and row["target"].startswith("gfx")}
    assert found == SPILLING


def test_16_bit_kernels_multiply_on_the_matrix_units() -> None:
    """All but Turing, for which Triton makes no such instructions."""
    assert all(row["mma_kinds"] for row in MAIN if row["dtype"] in ("bf16", "fp16") and row["target"] != "sm_75")


def test_fp16_is_as_good_as_bf16() -> None:
    by_call = {(*call_of(row), row["kernel"]): row for row in MAIN}
    for row in MAIN:
        if row["dtype"] == "fp16" and row["target"] in WIDE_TARGETS:
            twin = by_call[row["target"], row["D"], "bf16", row["variant"], row["kernel"]]
            assert row["full"]["total"] <= 1.02 * twin["full"]["total"], named(row)


# Simulated speed at 1k beside plain causal's, D = 64: forward, dkdv, dq.
SHARES = {
    "window": (0.87, 0.87, 0.87),
    "gqa": (0.87, 0.87, 0.87),
    "sinks": (0.87, 0.87, 0.87),
    "alibi": (0.8, 0.8, 0.8),
    "softcap": (0.55, 0.7, 0.7),
    "bias": (0.45, 0.45, 0.5),  # read element by element
    "dropout": (0.4, 0.4, 0.4),
}


@pytest.mark.parametrize("target", VARIANT_TARGETS)
@pytest.mark.parametrize("variant", SHARES)
def test_what_a_call_asks_for_costs_no_more_than_its_share(variant: str, target: str) -> None:
    plain, other = (
        {row["kernel"]: row["simulated"][0] for row in MAIN if call_of(row) == (target, 64, "bf16", name)}
        for name in ("causal", variant)
    )
    found = tuple(round(other[kernel] / plain[kernel], 2) for kernel in ("forward", "dkdv", "dq"))
    assert all(a >= b for a, b in zip(found, SHARES[variant], strict=True)), found


def test_calls_are_picked_by_any_of_their_parts() -> None:
    assert wanted([], [], [], []) == list(CALLS)
    assert wanted(["sm_80"], [64], ["bf16"], ["causal", "gqa"]) == [("sm_80", 64, "bf16", v) for v in ("causal", "gqa")]
    with pytest.raises(ValueError, match=r"the table has no call .*counting\.report counts any call"):
        wanted(["sm_75"], [], ["fp32"], [])


def test_counting_replaces_the_lines_of_its_calls_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.jsonl"
    others = [{**ROW, "D": 128}, {**ROW, "target": "sm_75"}]
    static.write_rows([*others, {**ROW, "triton": "old"}], file)
    new = report.Count("sm_80", 64, "bf16", "causal", "forward", error="counted")

    def count(*call: Any) -> list[report.Count]:
        assert call == ("sm_80", 64, "bf16", "causal", 1024)
        return [new]

    monkeypatch.setattr(report, "count", count)
    rows = count_all([("sm_80", 64, "bf16", "causal")], file, processes=1)
    assert [(row["target"], row["D"]) for row in rows] == [("sm_75", 64), ("sm_80", 64), ("sm_80", 128)]
    assert rows[1] == json.loads(report.as_json(new)) and rows[1]["triton"] == triton.__version__


def test_rows_are_drawn(tmp_path: Path) -> None:
    loop = {"total": 600, "overlap_tflops": 300.0, "serial_tflops": 170.0}
    counted = {**ROW, "registers": 200, "spills_in_loops": 2, "shared_memory": 32768, "full": loop}
    assert len(draw_static([counted, {**ROW, "target": "sm_75", "error": "no"}], tmp_path)) == 4
    static.draw_home([counted], tmp_path / "home.png")
    assert (tmp_path / "home.png").exists()


def test_nothing_counted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        draw_static([], tmp_path)
