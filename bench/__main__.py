"""Command line of the bench: ``python -m bench --help``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

DESCRIPTION = """\
Measure andrea_triton against naive attention, which holds the T x T matrix, and against PyTorch's own and others, on
the bytes of Dante's Inferno, canto I.

Accuracy comes first: output, log-sum-exp and gradients against fp64; who fails it gets no time. Then time, peak memory
and their growth with the sequence length T, forward and backward, as tables and as plots."""

EPILOG = """\
examples:
  python -m bench                          the whole job, under 3 minutes on 2 quiet cores (the same as: run)
  python -m bench run --quick              T = 512 to 4096 with fewer samples
  python -m bench run --sweep window       vary the window instead; also batch, heads, dim, dtype, gqa
  python -m bench run --providers all      whoever can run here, torch.compile and FlexAttention included
  python -m bench run --compare OLD.jsonl  say what changed since
  python -m bench smoke                    tiny shapes: does everything run?
  python -m bench plot FILE.jsonl          draw the plots of earlier results again
  python -m bench gpu --out DIR            all that is worth doing with ten minutes of one GPU
  python -m bench static                   count the kernels' machine code for every card; needs no GPU

elsewhere:
  python -m bench.host                     Python's own cost of a call, in microseconds
  python -m bench.decode                   tokens per second of attention over a cache

Results are JSON lines and go, with their plots, to bench/results/local/, which git ignores."""

SWEEPS = ("T", "batch", "heads", "dim", "dtype", "window", "gqa", "gain")
MODES = ("forward", "backward", "both")
STATIC = """Count the calls of the committed table, all or some: about half a minute each on one core, most of it compiling, which
Triton keeps for the next time. `python -m andrea_triton.counting.report` counts any other call."""


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench", description=DESCRIPTION, epilog=EPILOG, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="check accuracy, measure time and memory, print tables, draw plots")
    run.add_argument("--quick", action="store_true", help="T = 512 to 4096 only, with fewer samples")
    smoke = commands.add_parser("smoke", help="the same on tiny shapes in under a minute, for continuous integration")
    for command in (run, smoke):
        add_run_options(command)
    plot = commands.add_parser("plot", help="draw the plots of a results file")
    plot.add_argument("file", type=Path, metavar="FILE", help="results, JSON lines, of run, gpu or static")
    plot.add_argument("--out", type=Path, metavar="DIR", help="folder of the plots (default: FILE without its suffix)")
    add_compare(plot)
    gpu = commands.add_parser("gpu", help="correctness, speed, memory, latency and training with ten minutes of one GPU")
    gpu.add_argument("--out", type=Path, metavar="DIR", default=Path("bench/results/gpu"),
                     help="folder of the results, written piece by piece (default: bench/results/gpu)")  # fmt: skip
    gpu.add_argument("--minutes", type=float, default=10.0, metavar="N", help="time budget (default: 10)")
    gpu.add_argument("--smoke", action="store_true", help="the whole path on tiny shapes, on a CPU where there is no GPU")
    gpu.add_argument("--rehearse", action="store_true", help="run nothing: say what would run when, by a model")
    gpu.add_argument("--cores", type=int, default=16, metavar="N", help="cores that a rehearsal takes for given (16)")
    gpu.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    static = commands.add_parser("static", help="compile for every card without a GPU, count the machine code, plot it",
                                 description=STATIC)  # fmt: skip
    for name, kind, example in (("targets", str, "sm_80"), ("d", int, "64"), ("dtype", str, "bf16"), ("variant", str, "causal")):
        static.add_argument(f"--{name}", nargs="+", type=kind, default=[], metavar="X",
                            help=f"only calls of the table with one of these, such as {example}")  # fmt: skip
    static.add_argument("--out", type=Path, metavar="FILE", help="results (default: bench/results/static.jsonl); lines that "
                        "it has of other calls stay")  # fmt: skip
    return parser


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Options of run and smoke."""
    command.add_argument("--sweep", choices=SWEEPS, default="T", help="what is varied (default: T, the sequence length)")
    command.add_argument("--providers", metavar="A,B", help="who is timed beside naive, by name, or all (default: the usual)")
    command.add_argument(
        "--mode", type=modes_named, default=("forward", "both"), metavar="A,B", help="of forward, backward, both (forward,both)"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="where to run (default: a GPU if there is one)")
    command.add_argument("--out", type=Path, metavar="DIR", help="folder of results (default: bench/results/local)")
    add_compare(command)


def add_compare(command: argparse.ArgumentParser) -> None:
    """The option to compare with earlier results."""
    command.add_argument("--compare", type=Path, metavar="OLD", help="earlier results: say what changed, beyond the spread")


def modes_named(words: str) -> tuple[str, ...]:
    """Modes with commas between them, in the order of MODES."""
    named = words.split(",")
    strange = [word for word in named if word not in MODES]
    if strange:
        raise argparse.ArgumentTypeError(f"no mode {', '.join(strange)!r}; wanted some of {', '.join(MODES)}")
    return tuple(mode for mode in MODES if mode in named)


def plot_file(file: Path, out: Path | None, compare: Path | None) -> int:
    """Draw the plots of a results file, and compare it with an earlier one where asked."""
    from bench.plot import draw_all
    from bench.records import read
    from bench.run import plots_message
    from bench.static import draw_static, read_rows
    from bench.table import compared

    first = file.read_text(encoding="utf-8").partition("\n")[0]
    if first and "spills_in_loops" in json.loads(first):
        print(plots_message(draw_static(read_rows(file), out or file.with_suffix(""))))
        return 0
    records = read(file)
    if compare is not None:
        print("\n".join(compared(read(compare), records)))
    print(plots_message(draw_all(records, out or file.with_suffix(""))))
    return 0


def static(options: argparse.Namespace) -> int:
    """Count and draw. Of the committed table only the home shape's plot is committed, beside it."""
    from bench.run import RESULTS, plots_message, shown
    from bench.static import FILE, count_all, draw_home, draw_static, wanted

    file = options.out or FILE
    rows = count_all(wanted(options.targets, options.d, options.dtype, options.variant), file)
    wrong = [row for row in rows if row["error"]]
    for row in wrong:
        print(f"{row['target']}, D = {row['D']}, {row['dtype']}, {row['variant']}: {row['error']}")
    if file == FILE:
        draw_home(rows, file.with_suffix(".png"))
    print(f"Results: {shown(file)}\n{plots_message(draw_static(rows, RESULTS if file == FILE else file.parent))}")
    return int(bool(wrong))


def measure(options: argparse.Namespace) -> int:
    """The commands run and smoke."""
    if platform.machine() in ("x86_64", "AMD64"):
        # The interpreter's small matrix products run ten times slower on numpy's threads; torch has its own here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from bench import run as job

    size: job.Size = "smoke" if options.command == "smoke" else "quick" if options.quick else "full"
    return job.run(
        size,
        device=options.device,
        out=options.out or job.RESULTS,
        providers=options.providers,
        modes=options.mode,
        sweep=options.sweep,
        compare=options.compare,
    )


def gpu(options: argparse.Namespace) -> int:
    """The GPU script."""
    if options.worker:
        from bench.worker import run_worker

        return run_worker(options.out)
    if options.rehearse:
        from bench.rehearsal import rehearse

        return rehearse(options.cores, options.minutes)
    from bench.gpu import run_gpu

    return run_gpu(options.out, minutes=options.minutes, smoke=options.smoke)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": measure,
    "smoke": measure,
    "plot": lambda options: plot_file(options.file, options.out, options.compare),
    "gpu": gpu,
    "static": static,
}


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
    needed = ("torch",) if options.command == "gpu" else ("torch", "matplotlib", "tqdm")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        print(f"python -m bench needs {', '.join(missing)}: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    try:
        return COMMANDS[options.command](options)
    except (OSError, ValueError) as error:
        print(f"python -m bench {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
