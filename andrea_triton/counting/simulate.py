"""Simulated speed of the compiled kernels of a causal call: `python -m andrea_triton.counting.simulate sm_90 forward:128,64,4,3`.

A tile is written as the fields of launch.configs.Config, in their order, as numbers. What a figure is worth: simulator.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from andrea_triton.counting.calls import DTYPES, VARIANTS, call, machine_code
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.clocks import CLOCKS, Clocks
from andrea_triton.counting.course import course
from andrea_triton.counting.launches import CompiledLaunch
from andrea_triton.counting.machine_code import ctas_per_sm, disassemble
from andrea_triton.counting.simulator import Kernel, play
from andrea_triton.counting.steps import step
from andrea_triton.errors import CompileError, FitError, ShapeError
from andrea_triton.launch.configs import Config

SHAPES = ((1024, 192), (8192, 24))
"""(length, heads of all batches) of the calls that are simulated."""
FLOPS = {"forward": 4, "dkdv": 8, "dq": 6}
"""Of a pair of query and key and a feature, by kernel."""


class Setting(NamedTuple):
    """What a simulation takes for given.

    Args:
        clocks: the card.
        causal: whether a query sees no key behind it; else all of them.
        seed: of the chance by which a program begins a little later.
        shapes: (length, heads) of the calls.
    """

    clocks: Clocks
    causal: bool = True
    seed: int = 1
    shapes: Sequence[tuple[int, int]] = SHAPES


def trips(name: str, length: int, config: Config, causal: bool) -> list[tuple[int, int]]:
    """Trips of the two loops of each program of one head, in the order in which they start: full blocks, then edges; of dkdv
    edges, then full blocks.

    Example:
        >>> trips("forward", 256, Config(128, 64), True)
        [(2, 2), (0, 2)]
        >>> trips("dkdv", 256, Config(64, 128), True)
        [(2, 2), (2, 0)]
    """
    m, n = config.BLOCK_M, config.BLOCK_N
    rows, found = -(-length // (n if name == "dkdv" else m)), []
    for b in range(rows):
        if name == "dkdv":
            low, full = b * n // m * m, -(-min(b * n + n - 1, length) // m) * m
            found.append(((full - low) // m, max(0, length // m - full // m)) if causal else (0, length // m))
        else:
            row = (rows - 1 - b) * m
            seen = (row + 1) // n
            found.append((seen, -(-min(row + m, length) // n) - seen) if causal else (length // n, 0))
    return found


def speeds(launch: CompiledLaunch, target: str, setting: Setting) -> list[float] | None:
    """Useful TFLOP/s of a forward, dkdv or dq on the whole card, one for each of the setting's shapes.

    Args:
        launch: compiled for the target.
        target: a name in CLOCKS.
        setting: the rest.

    Returns:
        TFLOP/s, of the products of the maths over visible pairs; None where its loops are not told apart, as of a kernel that the
        compiler has unrolled.

    Raises:
        CompileError: the binary cannot be read, or there is no C compiler. FitError: the program does not fit the card.
    """
    code = disassemble(launch.kernel.asm["cubin"])
    clocks, metadata, config = setting.clocks, launch.kernel.metadata, launch.config
    warps = metadata.num_warps
    resident = ctas_per_sm(CARDS[target], registers=code.registers, shared=metadata.shared, num_warps=warps)
    if not resident:
        raise FitError(f"{launch.name} with {config} does not fit {target}: take a smaller tile or fewer stages")
    route = course(code.listing, ("first" if launch.name == "dkdv" else "last") if config.ONE_LOOP else "")
    if len(route.segments) != 5:
        return None
    D, size = launch.matmul_dims[0], next(iter(launch.outputs.values())).element_size()
    own, other = (config.BLOCK_N, config.BLOCK_M) if launch.name == "dkdv" else (config.BLOCK_M, config.BLOCK_N)
    steps = [step(i, clocks) for i in code.listing.instructions]
    kernel = Kernel(route, steps, code.controls, warps, resident, other * D * size, own * D * size)
    found = []
    for length, heads in setting.shapes:
        programs = [p for p in trips(launch.name, length, config, setting.causal) for _ in range(heads)]
        seconds = play(kernel, clocks, programs[:: clocks.sms], setting.seed).clocks / clocks.ghz / 1e9
        pairs = heads * length * length / (2 if setting.causal else 1)
        found.append(FLOPS[launch.name] * D * pairs / seconds / 1e12)
    return found


def tile(text: str) -> tuple[str, Config | None]:
    """(kernel, tiling) of `KERNEL:M,N,...`, or of `KERNEL` alone, which is the table's own.

    Raises:
        ShapeError: it is neither.

    Example:
        >>> tile("dq:128,32,4,2,0,1,3")
        ('dq', Config(BLOCK_M=128, BLOCK_N=32, num_warps=4, num_stages=2, HELD=False, ONE_LOOP=True, programs=3, LEAN=False))
    """
    name, _, numbers = text.partition(":")
    fields = numbers.split(",") if numbers else []
    if name not in FLOPS or len(fields) == 1 or len(fields) > len(Config._fields) or not all(x.isdigit() for x in fields):
        names = ",".join(Config._fields)
        raise ShapeError(f"no tile: {text!r}; wanted one of {', '.join(FLOPS)}, alone or with numbers as in KERNEL:{names}")
    if not fields:
        return name, None
    kinds = [type(x) for x in Config(16, 16)]
    return name, Config._make([*(kind(int(x)) for kind, x in zip(kinds, fields, strict=False)), *Config(16, 16)[len(fields) :]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 where a tile cannot be simulated, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m andrea_triton.counting.simulate",
        description="Simulate the kernels of a call clock by clock: useful TFLOP/s at length 1k (192 heads) and 8k (24 heads).",
        epilog="For example: sm_90 forward dq:128,32,4,3,0,1,3 --l2 24. The fields of a tile: " + ", ".join(Config._fields),
    )
    parser.add_argument("target", choices=list(CLOCKS), metavar="TARGET", help=f"any of {', '.join(CLOCKS)}")
    parser.add_argument("tiles", nargs="*", type=tile, metavar="KERNEL[:M,N,...]", default=[(name, None) for name in FLOPS],
                        help="kernels, with a tiling or as the table has them; default: all three")  # fmt: skip
    parser.add_argument("--d", type=int, default=64, metavar="D", help="head dim (64)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", metavar="NAME", help="bf16")
    parser.add_argument("--variant", choices=list(VARIANTS), default="causal", metavar="NAME",
                        help=f"any of {', '.join(VARIANTS)}; default: causal")  # fmt: skip
    parser.add_argument("--l2", type=float, metavar="BYTES", help="bytes a clock from L2, in place of the table's guess")
    parser.add_argument("--seed", type=int, default=1, help="of the chance in the simulation (1)")
    asked = parser.parse_intermixed_args(argv)
    clocks = CLOCKS[asked.target] if asked.l2 is None else CLOCKS[asked.target]._replace(l2=asked.l2)
    setting, failed = Setting(clocks, VARIANTS[asked.variant].causal, asked.seed), False
    for name, config in asked.tiles:
        try:
            (launch,) = call(asked.target, asked.d, asked.dtype, asked.variant, 1024, name, config)
            found = speeds(launch, asked.target, setting)
        except CompileError as error:
            print(f"{asked.target} {name:8} {config}: {error}", file=sys.stderr)
            failed = True
            continue
        code = machine_code(launch, asked.target)
        figures = "loops not told apart" if found is None else " ".join(f"{x:5.0f}" for x in found) + " TFLOP/s"
        resources = f"{code.registers} registers, {code.ctas_per_sm} programs, {code.spills_in_loops} spills in loops"
        print(f"{asked.target} {name:8} {launch.config!s:52} {figures}  {resources}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
