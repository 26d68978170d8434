"""`python -m andrea_triton.check`: is attention right on this machine? Every kernel against fp64, beside eager PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from typing import NamedTuple

import torch

from . import functional, target
from .errors import AndreaError, UnsupportedError
from .testing import CASES, Case, Inputs, Results, attend_reference, cast, eager_errors, error_of, make_inputs, run

HOME = Case("home: 12 heads x 64, T = 1024, causal", HQ=12, M=1024, D=64, causal=True)
QUICK = Case("12 heads x 64, T = 129, causal", HQ=12, M=129, D=64, causal=True)
LEAN = 2.0**-10  # a quarter of the step of bf16 below 1: weights that are cut off, not rounded, lean by half a step
CATALOGUE_ID = re.compile(r"^C\d+ ")  # of the known bug that a case covers: nothing to who reads the table
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Row(NamedTuple):
    """One result of one case: its error and eager's against fp64, and what the rule allows."""

    case: str
    dtype: str
    field: str
    error: float
    eager: float
    allowed: float

    @property
    def good(self) -> bool:
        """Whether the error is within 2 x eager's plus the rounding of the result."""
        return self.error <= self.allowed


def attend(inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a case by the public functions."""
    call = functional.varlen_attention if "cu_seqlens_q" in inputs.extras else functional.attention
    results = call(inputs.q, inputs.k, inputs.v, **inputs.settings, **inputs.extras, return_lse=True, backend=backend)
    return results[0], results[1]


def judge(case: Case, dtype: str, device: str, backend: str) -> list[Row]:
    """The rows of a case: out, lse and every gradient."""
    inputs = make_inputs(case, DTYPES[dtype], device)
    exact, got = run(cast(inputs, torch.float64), attend_reference), run(inputs, lambda x: attend(x, backend))
    rows = []
    for field, found, wanted, eager in zip(Results._fields, got, exact, eager_errors(inputs, exact), strict=True):
        if found is None or wanted is None:
            continue
        finite = wanted[wanted.isfinite()].abs()
        rounding = torch.finfo(found.dtype).eps * float(finite.max()) if finite.numel() else 0.0
        rows.append(Row(case.name, dtype, field, error_of(found, wanted), eager, 2 * eager + rounding))
    return rows


def repeats(device: str, backend: str, times: int = 3) -> bool:
    """Whether the same inputs give the same bits, gradients included, every time."""
    inputs = make_inputs(QUICK, torch.bfloat16, device)
    first, *rest = (run(inputs, lambda x: attend(x, backend)) for _ in range(times))
    return all(torch.equal(a, b) for again in rest for a, b in zip(first, again, strict=True) if a is not None and b is not None)


def bias_of_peaked_rows(device: str, backend: str, precise: bool) -> float:
    """Mean of (out - 1) in bf16 where v = 1 and every row has two equal maxima: 0 when rounding does not lean to one side."""
    inputs = make_inputs(Case("peaked", HQ=2, M=256, D=64, causal=True, gain=4.0), torch.bfloat16, device)
    k = torch.cat([inputs.k[:, :, ::2], inputs.k[:, :, ::2]], 2)
    out = functional.attention(inputs.q, k, torch.ones_like(inputs.v), precise=precise, backend=backend)
    assert isinstance(out, torch.Tensor)
    return float((out.double() - 1).mean())


def table(rows: list[Row]) -> str:
    """The worst result of each case as lines of text, under the words that explain them."""
    lines = [
        "Each line is one call, forward and backward, and shows the result that comes nearest to what is allowed.",
        "error, eager: largest |result - fp64| of andrea_triton, and of eager PyTorch in the same dtype, the worst of four",
        "orders in which it can compute the same (scale first or last, sums forwards, backwards ...); smaller is better.",
        "allowed: 2 x eager + the rounding of the result. ok: every result of the call is within it.",
        "",
        f"{'case':44} {'dtype':5} {'result':6} {'error':>9} {'eager':>9} {'allowed':>9}",
    ]
    for case, dtype in dict.fromkeys((row.case, row.dtype) for row in rows):
        own = [row for row in rows if (row.case, row.dtype) == (case, dtype)]
        worst = max(own, key=lambda row: row.error / row.allowed if row.allowed else float(row.error > 0) * 1e9)
        verdict = "ok" if all(row.good for row in own) else "WRONG"
        numbers = f"{worst.error:9.1e} {worst.eager:9.1e} {worst.allowed:9.1e}"
        lines.append(f"{CATALOGUE_ID.sub('', case)[:44]:44} {dtype:5} {worst.field:6} {numbers}  {verdict}")
    return "\n".join(lines)


def plot(rows: list[Row], path: str) -> None:
    """A picture of every row: its error over eager's, on a log axis."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 6))
    for dtype, marker in zip(DTYPES, "osD", strict=True):
        own = [row for row in rows if row.dtype == dtype and row.eager > 0 and row.error > 0]
        axes.loglog([row.eager for row in own], [row.error for row in own], marker, alpha=0.6, label=dtype)
    low, high = axes.get_xlim()
    axes.plot([low, high], [2 * low, 2 * high], color="gray", linewidth=1, label="twice eager's error")
    axes.set_xlabel("largest error of eager PyTorch in the same dtype")
    axes.set_ylabel("largest error of andrea_triton")
    axes.set_title("Errors against fp64: out, lse and gradients of every case")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def summary(rows: list[Row], same: bool, leans: list[float]) -> tuple[str, bool]:
    """What was found, in words, and whether all of it is as the contract says."""
    calls = {(row.case, row.dtype) for row in rows}
    wrong = {(row.case, row.dtype) for row in rows if not row.good}
    straight = abs(leans[0]) <= LEAN and leans[1] == 0
    good = same and straight and not wrong
    repeated = "the same bits every time" if same else "DIFFERENT BITS, though the contract says the same"
    lines = [
        "",
        f"accuracy: {len(calls) - len(wrong)} of {len(calls)} calls within what is allowed",
        f"repeated: one call three times gave {repeated}",
        f"rounding: for v = 1 in bf16 the mean of out - 1 is {leans[0]:.1e} (at most {LEAN:.1e}, else weights are rounded to one",
        f"          side), and with precise=True {leans[1]:.1e} (exactly 0){'' if straight else '  WRONG'}",
        "",
    ]
    if good:
        lines.append("All right: attention on this machine keeps its contract.")
    else:
        lines.append("WRONG: attention on this machine breaks its contract. Please report this output with that of")
        lines.append("`python -m andrea_triton.doctor`. Until then, backend='torch' is the way out; --backend torch checks it.")
    return "\n".join(lines), good


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command's options, with the backend chosen; it ends the process where the machine lacks what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m andrea_triton.check", description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if target.has_gpu() else "cpu", help="where the tensors lie (default: %(default)s)"
    )
    parser.add_argument("--backend", help="triton, interpreter, torch or reference (default: the kernels on that device)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--plot", metavar="FILE", help="draw the errors into FILE (needs matplotlib)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not target.has_gpu():
        parser.error("torch sees no GPU here: --device cpu runs the kernels in the interpreter")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    kernels = "interpreter" if device.type == "cpu" and target.has_triton() else target.default_backend(device)
    options.backend = options.backend or kernels
    try:
        target.check_backend(options.backend, device)
    except UnsupportedError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print what was found. Returns 0 when all is right, else 1."""
    options = parsed(arguments)
    device, backend = options.device, options.backend
    print(f"andrea_triton.check: backend {backend} on {device}, against fp64", flush=True)
    cases = [(QUICK if options.quick else HOME, dtype) for dtype in DTYPES]
    cases += [(case, "fp32") for case in (CASES[::4] if options.quick else CASES)]
    rows: list[Row] = []
    try:
        for number, (case, dtype) in enumerate(cases, 1):
            if sys.stderr.isatty():
                print(f"\r{number}/{len(cases)} {case.name[:60]:60}", end="", file=sys.stderr, flush=True)
            rows += judge(case, dtype, device, backend)
        same = repeats(device, backend)
        leans = [bias_of_peaked_rows(device, backend, precise) for precise in (False, True)]
    except AndreaError as error:
        print(f"\nNothing can be said, for a call failed: {error}\n`python -m andrea_triton.doctor` shows what is installed.")
        return 1
    if sys.stderr.isatty():
        print("\r" + " " * 72 + "\r", end="", file=sys.stderr)
    text, good = summary(rows, same, leans)
    print(table(rows), text, sep="\n")
    if options.plot:
        plot(rows, options.plot)
        print(f"Plot, one point for every result: {options.plot}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
