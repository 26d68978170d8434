"""Results as JSON lines: one line per measurement, each complete on its own. Plots and tables read nothing else."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from bench.cases import MODES, Case, Mode, Sweep

Kind = Literal["accuracy", "time", "memory", "rate", "left out"]
SCHEMA = 2
UNITS = {"time": "s", "memory": "bytes", "rate": "FLOP/s"}
PACKAGES = ("torch", "triton", "numpy", "andrea-triton")
FIT_FROM = 512


@dataclass(frozen=True)
class Record:
    """One measurement.

    Args:
        kind: what it says: "accuracy", "time" (samples in seconds per call), "memory" (samples in bytes), "rate" (of a
            large matrix product, samples in FLOP/s), or "left out", where the reason stands in place of a figure.
        case: the problem.
        provider: name of the provider.
        label: how plots and tables call the provider.
        mode: "forward", "backward", or "both".
        samples: every sample taken, in the order taken.
        errors: accuracy only: {tensor: {"error", "naive"}}, each max |x - fp64|.
        reason: why it failed or was left out; None when all is well.
        environment: versions, machine, revision and date.
        sweep: what the run varies.
    """

    kind: Kind
    case: Case
    provider: str
    label: str
    mode: Mode
    samples: tuple[float, ...] = ()
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    reason: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    sweep: Sweep = "T"

    @property
    def flops_per_second(self) -> float:
        """Operations that the maths asks for, per second of the median time."""
        return self.case.flops(self.mode) / self.median

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the samples."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def to_json(self) -> str:
        """The record as one line; figures that follow from the samples are written out for other readers."""
        line: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        if self.samples:
            line["unit"] = UNITS[self.kind]
            line["median"], line["quartiles"] = self.median, self.quartiles
        if self.samples and self.kind == "time":
            line["tflops"] = self.flops_per_second / 1e12
        return json.dumps(line, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record that a line holds.

        Raises:
            ValueError: the line is no record of this schema.
        """
        data = json.loads(line)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a result of schema {SCHEMA}: {line[:80]!r}")
        for derived in ("unit", "median", "quartiles", "tflops"):
            data.pop(derived, None)
        data["case"] = Case(**data["case"])
        data["samples"] = tuple(data["samples"])
        return cls(**data)


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records, one a line, making the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")


def read(path: Path) -> list[Record]:
    """Read the records of a file; blank lines are skipped."""
    return [Record.from_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def version(package: str) -> str | None:
    """Installed version of a distribution; None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def revision() -> str | None:
    """Git revision of this checkout, with "-dirty" after it when files differ; None outside of git."""
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    """Name of the processor, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(device: str) -> dict[str, Any]:
    """What a figure depends on besides the code: versions, machine, revision, date."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": cores,
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "cuda": torch.version.cuda if device == "cuda" else None,
        },
        "revision": revision(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def machine_title(environment: dict[str, Any]) -> str:
    """Machine and versions in one line."""
    machine, versions = environment["machine"], environment["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{where}, torch {versions['torch']}, triton {versions['triton'] or 'none'}"


def series(records: Iterable[Record], kind: Kind, provider: str, mode: Mode) -> dict[int | str, Record]:
    """Records of one line of a plot, by what the run varies: numbers rising, then words in the order of the file."""
    found = {r.case.at(r.sweep): r for r in records if (r.kind, r.provider, r.mode) == (kind, provider, mode)}
    return dict(sorted(found.items(), key=lambda item: (isinstance(item[0], str), item[0] if isinstance(item[0], int) else 0)))


def modes_of(records: Iterable[Record]) -> tuple[Mode, ...]:
    """Modes with a time or a memory figure."""
    found = {r.mode for r in records if r.kind in ("time", "memory")}
    return tuple(mode for mode in MODES if mode in found)


def matmul_rate(records: Iterable[Record], dtype: str) -> float | None:
    """The best measured rate of a large matrix product in a dtype, FLOP/s, for it is a roofline; None where none was measured."""
    samples = [sample for r in records if r.kind == "rate" and r.case.dtype == dtype for sample in r.samples]
    return max(samples, default=None)


def timed_providers(records: Sequence[Record]) -> dict[str, str]:
    """Label of each provider with a time or a memory figure, by name, in the order of the file."""
    return {r.provider: r.label for r in records if r.kind in ("time", "memory")}


@dataclass(frozen=True)
class Growth:
    """A power law fitted to medians: figure ~ length ** exponent, over lengths first to last."""

    exponent: float
    first: int
    last: int


def growth(line: Mapping[int | str, Record]) -> Growth | None:
    """Exponent of a series, by least squares in logarithms.

    Args:
        line: records by length. Lengths under FIT_FROM, where fixed costs rule, are left out when three or more remain.

    Returns:
        The fit; None with fewer than two positive figures.
    """
    points = [(record.case.length, record.median) for record in line.values() if record.median > 0]
    late = [point for point in points if point[0] >= FIT_FROM]
    points = late if len(late) >= 3 else points
    if len(points) < 2:
        return None
    fit = statistics.linear_regression([math.log(length) for length, _ in points], [math.log(y) for _, y in points])
    return Growth(fit.slope, points[0][0], points[-1][0])
