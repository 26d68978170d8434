"""`python -m andrea_triton.check`: is attention right on this machine? Every kernel against fp64, beside eager PyTorch."""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import torch

from . import functional, target
from .errors import UnsupportedError
from .testing import CASES, Case, Inputs, Results, attend_reference, cast, eager_errors, error_of, make_inputs, run

HOME = Case("home: 12 heads x 64, T = 1024, causal", HQ=12, M=1024, D=64, causal=True)
QUICK = Case("12 heads x 64, T = 129, causal", HQ=12, M=129, D=64, causal=True)
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
    """The worst result of each case as lines of text."""
    lines = [f"{'case':44} {'dtype':5} {'worst':6} {'error':>9} {'eager':>9} {'allowed':>9}"]
    for case, dtype in dict.fromkeys((row.case, row.dtype) for row in rows):
        own = [row for row in rows if (row.case, row.dtype) == (case, dtype)]
        worst = max(own, key=lambda row: row.error / row.allowed if row.allowed else float(row.error > 0) * 1e9)
        verdict = "ok" if all(row.good for row in own) else "WRONG"
        numbers = f"{worst.error:9.1e} {worst.eager:9.1e} {worst.allowed:9.1e}"
        lines.append(f"{case[:44]:44} {dtype:5} {worst.field:6} {numbers}  {verdict}")
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


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print what was found. Returns 0 when all is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m andrea_triton.check", description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if target.has_gpu() else "cpu", help="where the tensors lie (default: %(default)s)"
    )
    parser.add_argument("--backend", help="triton, interpreter, torch or reference (default: the kernels on that device)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--plot", metavar="FILE", help="draw the errors into FILE (needs matplotlib)")
    options = parser.parse_args(arguments)
    backend = options.backend or ("interpreter" if options.device == "cpu" and target.has_triton() else None)
    backend = backend or target.default_backend(torch.device(options.device))
    try:
        target.check_backend(backend, torch.device(options.device))
    except UnsupportedError as error:
        parser.error(str(error))
    print(f"backend {backend} on {options.device}; rule: error <= 2 x eager's error in the same dtype + rounding of the result")
    cases = [(QUICK if options.quick else HOME, dtype) for dtype in DTYPES]
    cases += [(case, "fp32") for case in (CASES[::4] if options.quick else CASES)]
    rows: list[Row] = []
    for number, (case, dtype) in enumerate(cases, 1):
        print(f"\r{number}/{len(cases)} {case.name[:60]:60}", end="", file=sys.stderr, flush=True)
        rows += judge(case, dtype, options.device, backend)
    print("\r" + " " * 72 + "\r", end="", file=sys.stderr)
    same = repeats(options.device, backend)
    print(table(rows))
    print(f"the same bits on three runs: {'yes' if same else 'NO'}")
    leans = [bias_of_peaked_rows(options.device, backend, precise) for precise in (False, True)]
    print(f"bf16, v = 1, peaked rows: mean of out - 1 is {leans[0]:.1e}, with precise=True {leans[1]:.1e}")
    if options.plot:
        plot(rows, options.plot)
        print(f"plot: {options.plot}")
    good = same and leans[1] == 0 and all(row.good for row in rows)
    print(
        "all right"
        if good
        else "the contract is broken on this machine: please report the table above with `python -m andrea_triton.doctor`"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
