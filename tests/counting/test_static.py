"""Machine code as committed in bench/results/static.jsonl: a change that makes a kernel longer or slower shows here.

Every run counts the home shape again on one target; `-m slow` counts the table, of fp16, whose code is bf16's but for
the names of instructions, and of fp32 head dim 64 alone. `python -m bench static` writes it: say
why, where a change is meant to cost something.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import triton

from andrea_triton.counting import report

TABLE = Path(__file__).parents[2] / "bench" / "results" / "static.jsonl"
TOLERANCE = 1.02  # of counts
SLOWER = 1.05  # by simulated clocks, which turn a change of nothing into some percent
Row = dict[str, Any]


def committed(target: str, D: int, dtype: str, variant: str) -> list[Row]:
    """The table's rows of one call, made with the Triton that runs; skips where there is none."""
    asked = (target, D, dtype, variant, triton.__version__)
    found = [row for row in ROWS if tuple(row[name] for name in ("target", "D", "dtype", "variant", "triton")) == asked]
    if not found:
        pytest.skip(f"the table has no rows made with Triton {triton.__version__}")
    return found


def worse(now: Row, then: Row) -> list[str]:
    """What is worse than the table says, and any new spill: simulated speed, or counts where the card is not simulated."""
    if then.get("simulated") and now.get("simulated"):
        faults = [
            f"simulated: {new} TFLOP/s, was {old}"
            for new, old in zip(now["simulated"], then["simulated"], strict=True)
            if new * SLOWER < old
        ]
    else:
        faults = counts_worse(now, then)
    spills = ("spill_loads", "spill_stores", "spills_in_loops")
    return faults + [f"{name}: {now[name]}, was {then[name]}" for name in spills if now[name] > then[name]]


def counts_worse(now: Row, then: Row) -> list[str]:
    """What counts worse than the table says by more than TOLERANCE."""
    return [
        f"{loop} {figure}: {now[loop][figure]}, was {then[loop][figure]}"
        for loop in ("full", "edge")
        for figure in ("total", "overlap", "serial")
        if now[loop] and then[loop] and then[loop][figure] and (now[loop][figure] or 0) > TOLERANCE * then[loop][figure]
    ]


ROWS = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
CALLS = dict.fromkeys((row["target"], row["D"], row["dtype"], row["variant"]) for row in ROWS)
SAMPLE = [("sm_90", 64, "bf16", "causal")]


@pytest.mark.parametrize(
    ("target", "D", "dtype", "variant"),
    [*SAMPLE, *(pytest.param(*c, marks=pytest.mark.slow) for c in CALLS if c not in SAMPLE and (c[1] == 64 or c[2] == "bf16"))],
)
def test_machine_code_is_no_worse_than_the_table(target: str, D: int, dtype: str, variant: str) -> None:
    then = {row["kernel"]: row for row in committed(target, D, dtype, variant)}
    counted = map(json.loads, map(report.as_json, report.count(target, D, dtype, variant, 1024)))
    now = {row["kernel"]: row for row in counted if row["kernel"] in then}
    assert now.keys() == then.keys() >= {"forward", "dkdv", "dq"}
    assert {name: worse(now[name], then[name]) for name in now} == {name: [] for name in now}


@pytest.mark.parametrize("figure", ["total", "overlap", "serial"])
@pytest.mark.parametrize("loop", ["full", "edge"])
def test_a_slower_loop_is_worse(loop: str, figure: str) -> None:
    then = {name: {"total": 600, "overlap": 1.0, "serial": 2.0} for name in ("full", "edge")}
    then |= {"spill_loads": 1, "spill_stores": 1, "spills_in_loops": 0}
    slower = {**then, loop: {**then[loop], figure: then[loop][figure] * 1.03}}
    within = {**then, loop: {**then[loop], figure: then[loop][figure] * 1.01}}
    assert [fault.split(":")[0] for fault in worse(slower, then)] == [f"{loop} {figure}"]
    assert worse(within, then) == worse(then, then) == []


def test_slower_clocks_are_worse_and_counts_beside_them_are_not() -> None:
    then = {"full": {"total": 600}, "edge": None, "simulated": [100.0, 200.0]}
    then |= dict.fromkeys(("spill_loads", "spill_stores", "spills_in_loops"), 0)
    assert worse({**then, "simulated": [96.0, 199.0], "full": {"total": 900}}, then) == []
    assert worse({**then, "simulated": [94.0, 199.0]}, then) == ["simulated: 94.0 TFLOP/s, was 100.0"]


@pytest.mark.parametrize("name", ["spill_loads", "spill_stores", "spills_in_loops"])
def test_any_new_spill_is_worse(name: str) -> None:
    then = {"full": None, "edge": None, "spill_loads": 1, "spill_stores": 1, "spills_in_loops": 0}
    assert worse({**then, name: 2}, then) == [f"{name}: 2, was {then[name]}"]
