"""Say what the machine code of calls will cost, for any target, without that GPU.

`python -m andrea_triton.counting.report` counts and simulates them over head dims, dtypes and targets, prints a table, and writes
JSON lines with --json; --help says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import triton

from andrea_triton.counting.calls import DTYPES, VARIANTS, call, machine_code
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.clocks import CLOCKS
from andrea_triton.counting.launches import CompiledLaunch
from andrea_triton.counting.machine_code import Loop, MachineCode
from andrea_triton.counting.simulate import FLOPS, Setting, speeds
from andrea_triton.errors import CompileError
from andrea_triton.launch.configs import Config


class Count(NamedTuple):
    """One launch of a counted call: what was asked, and its machine code, or why there is none."""

    target: str
    D: int
    dtype: str
    variant: str
    kernel: str
    config: Config | None = None
    code: MachineCode | None = None
    error: str = ""
    simulated: tuple[float, ...] = ()  # useful TFLOP/s at the lengths of simulate.SHAPES, where the card is simulated

    def loops(self) -> tuple[Loop | None, Loop | None]:
        """The loops over full blocks and over edges: of the main loops, the shortest and the longest."""
        found = sorted(self.code.loops, key=lambda loop: loop.total) if self.code else []
        return (found[0], found[-1]) if found else (None, None)


def count(target: str, D: int, dtype: str, variant: str, length: int) -> list[Count]:
    """Compile the launches of one call, forward and backward, with HEADS heads and as many queries as keys, and read them.

    Args:
        target: a name in CARDS.
        D: head dim of q, k and v.
        dtype: a name in DTYPES; fp32 is multiplied by IEEE's rules, tf32 is fp32 multiplied in TF32.
        variant: a name in VARIANTS.
        length: queries and keys.

    Returns:
        A Count for each launch; a single one with an error where Triton cannot compile.
    """
    try:
        launches = call(target, D, dtype, variant, length)
        return [
            Count(target, D, dtype, variant, x.name, x.config, machine_code(x, target), "", simulated(x, target, variant))
            for x in launches
        ]
    except CompileError as error:
        return [Count(target, D, dtype, variant, "-", error=str(error).splitlines()[0])]


def simulated(launch: CompiledLaunch, target: str, variant: str) -> tuple[float, ...]:
    """Useful TFLOP/s at the lengths of simulate.SHAPES; none for a card or a kernel that is not simulated."""
    if target not in CLOCKS or launch.name not in FLOPS:
        return ()
    return tuple(speeds(launch, target, Setting(CLOCKS[target], VARIANTS[variant].causal)) or ())


def as_json(row: Count) -> str:
    """One JSON line: everything in a Count, with its loops as `full` and `edge`, and Triton's version. A nan is null."""
    full, edge = row.loops()
    record: dict[str, Any] = {
        "kernel": row.kernel, "target": row.target, "D": row.D, "dtype": row.dtype, "variant": row.variant,
        "triton": triton.__version__, "error": row.error,
    }  # fmt: skip
    if row.config and row.code:
        resources = dataclasses.asdict(row.code)
        del resources["loops"], resources["target"]
        record |= {"card": CARDS[row.target].name, **row.config._asdict(), **resources}
        record |= {"full": _plain(full), "edge": _plain(edge), "simulated": [round(x, 1) for x in row.simulated]}
    return json.dumps(record)


def _plain(loop: Loop | None) -> dict[str, Any] | None:
    if loop is None:
        return None
    return {name: None if value != value else value for name, value in dataclasses.asdict(loop).items() if name != "head"}


HEADER = (
    f"{'target':8}{'D':>4} {'dtype':6}{'variant':9}{'kernel':9}{'tile':>33}{'regs':>6}{'spills (in loops)':>19}"
    f"{'shared KB':>12}{'CTAs':>6}{'instructions':>14}{'TFLOP/s':>12}{'simulated':>11}  matrix products"
)


def as_text(row: Count) -> str:
    """One line of the table."""
    start = f"{row.target:8}{row.D:4} {row.dtype:6}{row.variant:9}{row.kernel:9}"
    if not (row.config and row.code):
        return f"{start} {row.error}"
    code, (full, edge) = row.code, row.loops()
    spills = f"{code.spill_loads}/{code.spill_stores} ({code.spills_in_loops})"
    shared = f"{code.shared_memory / 1024:.0f}/{code.shared_limit // 1024}"
    instructions = f"{full.total}/{edge.total}" if full and edge else "-"
    speed = "-" if full is None else _speeds(full.overlap_tflops, full.serial_tflops)
    played = "/".join(f"{x:.0f}" for x in row.simulated) or "-"
    kinds = " ".join(code.mma_kinds) or "none"
    resources = f"{row.config!s:>33}{code.registers:6}{spills:>19}{shared:>12}{code.ctas_per_sm:6}"
    return f"{start}{resources}{instructions:>14}{speed:>12}{played:>11}  {kinds}"


def _speeds(overlap: float, serial: float) -> str:
    return "-" if overlap != overlap else f"{overlap:.0f}/{serial:.0f}"


def nominal_backward(rows: Sequence[Count]) -> tuple[float, float] | None:
    """(overlap, serial) TFLOP/s of dkdv and dq together in full blocks, counting the five products of the maths, 10 D FLOP per
    score element, and not the two that dq makes again. None where either has no matrix product."""
    found = {row.kernel: row.loops()[0] for row in rows}
    dkdv, dq = found.get("dkdv"), found.get("dq")
    if dkdv is None or dq is None or dkdv.overlap != dkdv.overlap or dq.overlap != dq.overlap:
        return None
    card = CARDS[rows[0].target]
    per_second = 10 * rows[0].D * card.sms * card.ghz / 1e3
    return per_second / (dkdv.overlap + dq.overlap), per_second / (dkdv.serial + dq.serial)


def _print_call(rows: Sequence[Count]) -> None:
    for row in rows:
        print(as_text(row))
    if nominal := nominal_backward(rows):
        print(f"{'':27}{'dkdv + dq, nominal':99}{_speeds(*nominal):>12}")


def _with_progress(calls: Iterable[Any], total: int) -> Iterable[Any]:
    """The calls, under a progress bar where tqdm is installed."""
    if find_spec("tqdm") is None:
        return calls
    from tqdm import tqdm

    return tqdm(calls, total=total, desc="compiling", unit="call", file=sys.stderr)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m andrea_triton.counting.report",
        description="Count the machine code of attention, forward and backward, for any target, without that GPU.",
        epilog="instructions: of one warp for one tile, in the loops over full blocks and over edges. TFLOP/s: of the card in "
        "full blocks, modelled: all pipes overlap / matrix products overlap with nothing. simulated: useful TFLOP/s of the whole "
        "call at length 1k / 8k, played clock by clock (simulate.py), which is what tiles are chosen by.",
    )
    for name, known, default in (
        ("target", CARDS, list(CARDS)),
        ("dtype", DTYPES, ["fp16", "bf16"]),
        ("variant", VARIANTS, ["causal"]),
    ):
        text = f"any of {', '.join(known)}; default: {' '.join(default)}"
        parser.add_argument(f"--{name}", nargs="+", default=default, choices=list(known), metavar="NAME", help=text)
    parser.add_argument("--d", nargs="+", type=int, default=[32, 64, 128], metavar="D", help="head dims; default: 32 64 128")
    parser.add_argument("--length", type=int, default=1024, help="queries and keys (1024)")
    parser.add_argument("--json", metavar="FILE", help="also write one JSON line per kernel to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 when something did not compile, else 0."""
    asked = _arguments(argv)
    calls = list(itertools.product(asked.target, asked.d, asked.dtype, asked.variant))
    counted: list[list[Count]] = []
    with open(asked.json, "w", encoding="utf-8") if asked.json else nullcontext() as file:
        for target, D, dtype, variant in _with_progress(calls, len(calls)):
            counted.append(count(target, D, dtype, variant, asked.length))
            for row in counted[-1]:
                if file is not None:
                    print(as_json(row), file=file, flush=True)
    print(HEADER)
    for rows in counted:
        _print_call(rows)
    return int(any(row.error for rows in counted for row in rows))


if __name__ == "__main__":
    sys.exit(main())
