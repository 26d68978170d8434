"""Command line of the bench: ``python -m bench --help``."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

DESCRIPTION = """\
Measure andrea_triton against naive attention, which holds the T x T matrix, on the bytes of Dante's Inferno, canto I.

Accuracy comes first: output, log-sum-exp and gradients against fp64; who fails it gets no time. Then time, peak memory
and their growth with the sequence length T, forward and backward, as a table and as plots."""

EPILOG = """\
examples:
  python -m bench                     the whole job, under 3 minutes on 2 cores (the same as: python -m bench run)
  python -m bench run --quick         T = 512 to 4096 with fewer samples
  python -m bench smoke               tiny shapes, a few seconds: does everything run?
  python -m bench plot FILE.jsonl     draw the plots of earlier results again

Results are JSON lines and go, with their plots, to bench/results/local/, which git ignores."""


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench", description=DESCRIPTION, epilog=EPILOG, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="check accuracy, measure time and memory, print a table, draw plots")
    run.add_argument("--quick", action="store_true", help="T = 512 to 4096 only, with fewer samples")
    smoke = commands.add_parser("smoke", help="the same on tiny shapes in a few seconds, for continuous integration")
    for command in (run, smoke):
        command.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: a GPU if there is one)")
        command.add_argument("--out", type=Path, metavar="DIR", help="folder of results (default: bench/results/local)")
    plot = commands.add_parser("plot", help="draw the plots of a results file")
    plot.add_argument("file", type=Path, metavar="FILE", help="results, JSON lines")
    plot.add_argument("--out", type=Path, metavar="DIR", help="folder of the plots (default: FILE without its suffix)")
    return parser


def plot_file(file: Path, out: Path | None) -> int:
    """Draw the plots of a results file."""
    from bench.plot import draw_all
    from bench.records import read
    from bench.run import plots_message

    try:
        print(plots_message(draw_all(read(file), out or file.with_suffix(""))))
    except (OSError, ValueError) as error:
        print(f"python -m bench plot: {error}", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: command-line words; None takes the process's own. Without a command, "run" is meant.

    Returns:
        Exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["run", *words]
    options = make_parser().parse_args(words)
    missing = [package for package in ("torch", "matplotlib", "tqdm") if find_spec(package) is None]
    if missing:
        print(f"python -m bench needs {', '.join(missing)}: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    if options.command == "plot":
        return plot_file(options.file, options.out)
    if platform.machine() in ("x86_64", "AMD64"):
        # The interpreter's small matrix products run ten times slower on numpy's threads; torch has its own here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from bench.run import RESULTS, Size, run

    size: Size = "smoke" if options.command == "smoke" else "quick" if options.quick else "full"
    return run(size, device=options.device, out=options.out or RESULTS)


if __name__ == "__main__":
    raise SystemExit(main())
