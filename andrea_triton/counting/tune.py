"""Search for tilings, offline and on request, and take what was found: nothing here runs by itself.

`python -m andrea_triton.counting.tune --out tiles.json` compiles many tilings of each kernel, ranks them by time on this GPU, or
by simulated clocks where there is none (by the counts of machine_code.py for cards that are not simulated), and writes the best
as a table. `tune.use("tiles.json")` makes later calls take them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import triton
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

from andrea_triton import target as targets
from andrea_triton.counting import calls, launches, report, simulate
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.clocks import CLOCKS
from andrea_triton.counting.machine_code import Loop
from andrea_triton.errors import CompileError, FitError, ShapeError
from andrea_triton.launch import configs, run
from andrea_triton.launch.compile import flatten
from andrea_triton.launch.configs import Config
from andrea_triton.launch.plan import Launch
from andrea_triton.launch.start import go, ready
from andrea_triton.problem import Problem, make_problem
from andrea_triton.spec import make_spec

FORMAT = 1
KERNELS = ("forward", "dkdv", "dq")
SIDES, WARPS, STAGES = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3)
HELD = {"no": False, "yes": True}
FEW_WARPS = 8  # fewer than two for each scheduler hide no latency
UNITS = {"model": "cycles of an SM per visible score element", "time": "microseconds"}


class Setting(NamedTuple):
    """The call whose kernels are searched: plain causal, as many queries as keys."""

    target: str
    D: int
    dtype: str  # a name in calls.DTYPES
    batch: int = 1
    heads: int = 12
    length: int = 1024


class Trial(NamedTuple):
    """One tiling of one kernel, and what it costs; why it was skipped where it has no cost."""

    config: Config
    cost: float | None
    good: bool = True  # no spill in a loop; where the card is not simulated, warps enough to hide latency
    skipped: str = ""


def visited(length: int, config: Config) -> tuple[int, int]:
    """(full, edge): tiles of one head of a causal call in which all pairs are visible, and in which some are.

    Example:
        >>> visited(1024, Config(128, 64))
        (56, 16)
    """
    full = edge = 0
    for q, k in itertools.product(range(0, length, config.BLOCK_M), range(0, length, config.BLOCK_N)):
        whole = q >= k + config.BLOCK_N - 1
        full += whole
        edge += q + config.BLOCK_M - 1 >= k and not whole
    return full, edge


def cycles(loop: Loop, config: Config) -> float:
    """Modelled cycles of one tile: of products and the slowest other pipe, one after the other; of the slowest pipe where the
    products are plain arithmetic, which the model cannot tell from the rest."""
    return loop.serial * config.BLOCK_M * config.BLOCK_N if loop.serial == loop.serial else max(loop.cycles.values())


def modelled(planned: launches.Planned, problem: Problem, setting: Setting, config: Config) -> Trial:
    """A tiling, ranked by its machine code: by simulated clocks where the card is simulated, else by counts."""
    launch, outputs = planned
    made = launches.compile_launch(replace(launch, configs=(config,)), problem, setting.target, outputs)
    code = calls.machine_code(made, setting.target)
    if played := report.simulated(made, setting.target, "causal"):
        card = CLOCKS[setting.target]
        per_second = simulate.FLOPS[launch.name] * setting.D * card.sms * card.ghz / 1e3
        return Trial(config, fmean(per_second / x for x in played), code.spills_in_loops == 0)
    count = report.Count(setting.target, setting.D, setting.dtype, "causal", launch.name, config, code)
    full, edge = count.loops()
    if full is None or edge is None:
        return Trial(config, None, skipped="no loop found")
    tiles = visited(setting.length, config)
    work = tiles[0] * cycles(full, config) + tiles[1] * cycles(edge, config)
    warps = code.ctas_per_sm * config.num_warps
    return Trial(config, work / (setting.length * (setting.length + 1) / 2), code.spills_in_loops == 0 and warps >= FEW_WARPS)


def timed(launch: Launch, problem: Problem, config: Config) -> Trial:
    """A tiling, ranked by its time on the tensors' device, started as every call starts it."""
    values = [x.base if isinstance(x, TensorDescriptor) else x for x in flatten(launch.args)]
    tensors = list({id(x): x for x in values if isinstance(x, torch.Tensor)}.values())
    places, addresses = {id(t): i for i, t in enumerate(tensors)}, tuple(t.data_ptr() for t in tensors)
    with targets.current(problem.device):
        start = ready(replace(launch, configs=(config,)), problem, places)
        milliseconds: Any = do_bench(lambda: go([start], addresses, problem), return_mode="median")
    return Trial(config, 1e3 * milliseconds)


def search(
    setting: Setting, kernels: Sequence[str], space: Sequence[Config], rank: str, bar: Any = None
) -> dict[str, list[Trial]]:
    """Try tilings of some kernels of a call.

    Args:
        setting: the call.
        kernels: some of KERNELS.
        space: tilings; the library's own is tried too.
        rank: model or time.
        bar: told, by update(), of every tiling that was tried; None for nobody.

    Returns:
        For each kernel its trials, best first, those that were skipped last.
    """
    device = torch.device("cuda" if rank == "time" else "cpu")
    dtype = calls.DTYPES[setting.dtype]
    shape = (setting.batch, setting.heads, setting.length, setting.D)
    q, k, v, dout = (run.allocate(shape, dtype, device).normal_() for _ in range(4))
    problem = make_problem(q, k, v, make_spec(causal=True))
    precision = "tf32" if setting.dtype == "tf32" else "ieee"
    plan = launches.planned(q, k, v, dout, None, problem, setting.target, precision)
    found: dict[str, list[Trial]] = {}
    for planned in plan:
        launch = planned[0]
        if rank == "time":  # so that later launches read numbers
            timed(launch, problem, launch.config)
        if launch.name in kernels:
            trials: list[Trial] = []
            for config in (own_tile(launch.name, setting), *space):
                if config not in [trial.config for trial in trials]:
                    trials.append(_tried(planned, problem, setting, config, rank))
                if bar is not None:
                    bar.update()
            found[launch.name] = sorted(trials, key=rank_of)
    return found


def rank_of(trial: Trial) -> tuple[bool, bool, float]:
    """Sorts trials: what the model finds good first, then by cost; the skipped last."""
    return trial.cost is None, not trial.good, trial.cost or 0.0


def _tried(planned: launches.Planned, problem: Problem, setting: Setting, config: Config, rank: str) -> Trial:
    try:
        return timed(planned[0], problem, config) if rank == "time" else modelled(planned, problem, setting, config)
    except FitError:
        return Trial(config, None, skipped="does not fit the card")
    except CompileError:
        return Trial(config, None, skipped="does not compile")


def provenance(rank: str) -> dict[str, Any]:
    """Where a table comes from: versions, revision of the source, date, device, and how tilings were ranked."""
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        revision = subprocess.run(git, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        revision = None
    device = targets.device_name(torch.device("cuda")) if rank == "time" else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "revision": revision, "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(), "device": device, "ranked": rank, "cost": UNITS[rank],
    }  # fmt: skip


def own_tile(kernel: str, setting: Setting) -> Config:
    """What the library takes."""
    kind = {"fp32": "ieee", "tf32": "tf32", "fp64": "plain"}.get(setting.dtype, "causal")
    itemsize = calls.DTYPES[setting.dtype].itemsize
    return configs.candidates(kernel, setting.target, setting.D, itemsize, setting.length, setting.length, kind)[0]


def entries(setting: Setting, found: dict[str, list[Trial]], own: dict[str, Config]) -> list[dict[str, Any]]:
    """The lines of a table: of each kernel the best tiling, the library's own, what both cost, and what was skipped."""
    lines = []
    for kernel, trials in found.items():
        best = trials[0]
        if best.cost is None:
            continue
        reasons = [t.skipped for t in trials if t.skipped]
        lines.append(
            {"kernel": kernel, **setting._asdict(), "bytes": calls.DTYPES[setting.dtype].itemsize, "tile": list(best.config),
             "cost": best.cost, "own": list(own[kernel]), "own_cost": next(t.cost for t in trials if t.config == own[kernel]),
             "tried": len(trials), "skipped": {reason: reasons.count(reason) for reason in sorted(set(reasons))}}
        )  # fmt: skip
    return lines


def use(file: str | os.PathLike[str] | None) -> None:
    """Take the tiles of a table, in every later call of this process whose kernel, target, head dim and element size it names.
    Calls with a window, a softcap, dropout, a bias, a mask or a score keep the library's tiles, for plain calls were searched.
    Kernels already captured in a CUDA graph stay as they are.

    Args:
        file: what `python -m andrea_triton.counting.tune --out FILE` wrote; None goes back to the library's own tiles.

    Raises:
        ShapeError: the file is no such table.
        OSError: it cannot be read.

    Example:
        >>> use(None)
    """
    table: dict[configs.Entry, Config] = {}
    try:
        record: Any = {"format": FORMAT, "entries": []} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r}, wanted {FORMAT}")
        for x in record["entries"]:
            table[x["kernel"], x["target"], configs.bucket(x["D"]), x["bytes"]] = _checked(x["kernel"], x["tile"])
    except (ValueError, KeyError, TypeError) as error:
        raise ShapeError(
            f"{file} is no table of tiles ({error}); write one with python -m andrea_triton.counting.tune --out FILE"
        ) from error
    configs.TUNED.clear()
    configs.TUNED.update(table)
    run.forget()


def _checked(kernel: str, tile: Sequence[Any]) -> Config:
    config = Config(*tile)
    rows, cols, warps, stages, held, one_loop, programs, lean = config
    known = kernel in KERNELS and rows in SIDES and cols in SIDES and {held, one_loop, lean} <= {False, True}
    if not known or warps not in (1, 2, 4, 8, 16) or not 1 <= stages <= 8 or not 0 <= programs <= 16:
        raise ValueError(f"no tile {list(tile)} for {kernel}")
    return config


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m andrea_triton.counting.tune",
        description="Search for the best tiles of the kernels of causal attention and write them to a table. On the GPU that is "
        "searched for they are ranked by time; without it by a model of the compiled code, which needs no GPU.",
        epilog="The library takes a table when told: andrea_triton.counting.tune.use('tiles.json'). A tiling that does not "
        "compile or does not fit the card is skipped and counted. About 8 s a tiling on one core, most of it compiling; a short "
        "first search: --kernel forward --rows 64 128 --cols 32 64 --stages 2",
    )
    here = targets.target_of(torch.device("cuda")) if targets.has_gpu() else None
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("tiles.json"), help="the table (tiles.json)")
    parser.add_argument("--target", metavar="NAME", default=here, choices=list(CARDS),
                        help=f"any of {', '.join(CARDS)}; default: this machine's GPU, which is {here or 'none'}")  # fmt: skip
    parser.add_argument("--kernel", metavar="NAME", nargs="+", default=list(KERNELS), choices=KERNELS,
                        help=f"any of {', '.join(KERNELS)}; default: all")  # fmt: skip
    parser.add_argument("--d", metavar="D", nargs="+", type=int, default=[64], help="head dims; default: 64")
    parser.add_argument("--dtype", metavar="NAME", nargs="+", default=["bf16"], choices=list(calls.DTYPES),
                        help=f"any of {', '.join(calls.DTYPES)}, one of each size; default: bf16")  # fmt: skip
    for name, sizes, text in (("rows", SIDES[1:], "query rows of a tile"), ("cols", SIDES[1:], "key rows of a tile"),
                              ("warps", WARPS, "warps"), ("stages", STAGES, "pipeline stages")):  # fmt: skip
        known = SIDES if name in ("rows", "cols") else sizes
        parser.add_argument(f"--{name}", metavar="N", nargs="+", type=int, default=list(sizes), choices=known,
                            help=f"{text}, any of {' '.join(map(str, known))}; default: {' '.join(map(str, sizes))}")  # fmt: skip
    parser.add_argument("--held", metavar="no yes", nargs="+", default=list(HELD), choices=list(HELD),
                        help="tiles that a program keeps held in registers, any of no yes; default: both")  # fmt: skip
    parser.add_argument("--batch", metavar="B", type=int, default=8, help="batch size that is timed (8)")
    parser.add_argument("--heads", metavar="H", type=int, default=12, help="heads that are timed (12)")
    parser.add_argument("--length", metavar="T", type=int, default=1024, help="queries and keys (1024)")
    asked = parser.parse_args(argv)
    if asked.target is None:
        parser.error(f"there is no GPU here: name a --target, any of {', '.join(CARDS)}")
    if len({calls.DTYPES[name].itemsize for name in asked.dtype}) < len(asked.dtype):
        parser.error(f"--dtype {' '.join(asked.dtype)} are of one size, and tiles depend on the size: name one of them")
    asked.rank = "time" if asked.target == here else "model"
    return asked


def _print(setting: Setting, found: dict[str, list[Trial]], own: dict[str, Config], rank: str) -> None:
    for kernel, trials in found.items():
        skipped = sum(t.cost is None for t in trials)
        print(f"\n{kernel}, {setting.target}, D = {setting.D}, {setting.dtype}; {UNITS[rank]}")
        shown = [t for t in trials[:5] if t.cost is not None]
        shown += [t for t in trials[5:] if t.config == own[kernel] and t.cost is not None]
        for t in shown:
            marks = " (the library's own)" * (t.config == own[kernel]) + " (spills, or few warps)" * (not t.good)
            print(f"  {t.config!s:36}{t.cost:10.4g}{marks}")
        print(f"  {len(trials)} tilings tried, {skipped} of them skipped")


def _progress(total: int) -> Any:
    if find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    return tqdm(total=total, desc="tilings", unit="", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 where no tiling works for some kernel, else 0."""
    asked = _arguments(argv)
    held = [HELD[answer] for answer in asked.held]
    space = [Config(*c) for c in itertools.product(asked.rows, asked.cols, asked.warps, asked.stages, held)]
    calls = list(itertools.product(asked.d, asked.dtype))
    bar = _progress(len(calls) * len(asked.kernel) * (len(space) + 1))
    lines: list[dict[str, Any]] = []
    complete = True
    for D, dtype in calls:
        setting = Setting(asked.target, D, dtype, asked.batch, asked.heads, asked.length)
        own = {kernel: own_tile(kernel, setting) for kernel in asked.kernel}
        found = search(setting, asked.kernel, space, asked.rank, bar)
        _print(setting, found, own, asked.rank)
        lines += entries(setting, found, own)
        complete = complete and all(trials[0].cost is not None for trials in found.values())
        record = {"format": FORMAT, "made": provenance(asked.rank), "entries": lines}
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nTable: {asked.out}\nTo take it: andrea_triton.counting.tune.use({str(asked.out)!r})")
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main())
