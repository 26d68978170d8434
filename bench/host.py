"""What a call costs in Python before its kernels run: ``python -m bench.host``.

Without a GPU the kernels are compiled, loaded and started through Triton's own launcher into a driver that runs nothing
(tests/launch/stub_cuda.py), on CPU tensors of no size to speak of, so that what is left is the host's work. PyTorch's attention
on the same tensors, which does compute them, and textbook attention stand beside it, and an autograd Function that does nothing:
no library under it costs less.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from andrea_triton import attention, target
from bench.providers import naive

SHAPE = (1, 2, 16, 16)
STUB = "TRITON_LIBCUDA_PATH"

Inputs = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Nothing(torch.autograd.Function):
    """An output and gradients of the right shapes, at no work."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep the inputs, as attention must."""
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hand the gradient on."""
        return dout, dout, dout


class Cost(NamedTuple):
    """Microseconds of a call, the least and the median of many, and the functions that it calls, Python's and C's."""

    name: str
    what: str
    least: float
    median: float
    calls: int


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This library's kernels."""
    return attention(q, k, v, causal=True)  # type: ignore[return-value]


def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The floor."""
    return Nothing.apply(q, k, v)


PROVIDERS: dict[str, Attend] = {"andrea_triton": fused, "torch SDPA": peer, "naive": naive, "empty Function": nothing}


def tasks(attend: Attend, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """A forward without gradients, one that keeps what a backward needs, and both."""
    q, k, v = (torch.zeros(SHAPE, dtype=dtype, device=device) for _ in range(3))
    learned: Inputs = tuple(t.clone().requires_grad_() for t in (q, k, v))  # type: ignore[assignment]
    dout = torch.zeros_like(q)
    return {
        "forward": lambda: attend(q, k, v),
        "forward, gradients wanted": lambda: attend(*learned),
        "forward + backward": lambda: torch.autograd.grad(attend(*learned), learned, dout),
    }


def cost(name: str, what: str, task: Callable[[], Any], repeats: int) -> Cost:
    """Time a task. One call at a time, so that the least is that of a call nobody interrupted."""
    for _ in range(10):
        task()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
    profile = cProfile.Profile()
    profile.runcall(task)
    calls = sum(entry.callcount for entry in profile.getstats())
    return Cost(name, what, min(times) * 1e6, statistics.median(times) * 1e6, calls)


def pretend(card: str) -> None:
    """CPU tensors count as those of a card that the stub driver shows."""
    from tests.launch import stub_cuda

    stub_cuda.pretend()
    index = stub_cuda.CAPABILITIES.index((int(card[3]), int(card[4])))
    torch.cuda._exchange_device(index)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        setattr(torch.cuda, name, lambda wanted: index)
    torch.cuda.current_device = lambda: index
    target.target_of = lambda device: card
    target.default_backend = lambda device: "triton"
    target.current = lambda device: torch.cuda.device(index)


def measure(repeats: int, card: str = "sm_80") -> list[Cost]:
    """Every provider's costs."""
    torch.set_num_threads(1)
    stub = STUB in os.environ
    if stub:
        pretend(card)
    device, dtype = ("cpu", torch.float32) if stub else ("cuda", torch.float16)
    costs = []
    for name, attend in PROVIDERS.items():
        for what, task in tasks(attend, device, torch.float16 if name == "andrea_triton" else dtype).items():
            costs.append(cost(name, what, task, repeats))
    return costs


def table(costs: Sequence[Cost]) -> list[str]:
    """Lines to print."""
    head = f"{'':16s}{'':28s}{'least µs':>10s}{'median µs':>11s}{'functions':>11s}"
    return [head, *(f"{c.name:16s}{c.what:28s}{c.least:10.1f}{c.median:11.1f}{c.calls:11d}" for c in costs)]


def with_stub(arguments: Sequence[str]) -> int:
    """The same in a process that has the stub driver."""
    from tests.launch import stub_cuda

    if stub_cuda.compiler() is None:
        print("no C compiler with Python's headers, so Triton cannot build its launcher", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        stub_cuda.build(Path(folder))
        found = {**os.environ, **stub_cuda.environment(Path(folder))}
        del found["STUB_CUDA_LOG"]
        return subprocess.run([sys.executable, "-m", "bench.host", *arguments], env=found).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m bench.host", description="Microseconds of Python per attention call.")
    parser.add_argument("--repeats", type=int, default=3000, metavar="N", help="calls that are timed (default: 3000)")
    known = "which card the stub driver shows: sm_90 takes tensor descriptors (default: sm_80)"
    parser.add_argument("--card", default="sm_80", choices=("sm_80", "sm_90"), help=known)
    asked = parser.parse_args(arguments)
    if STUB not in os.environ and not target.has_gpu():
        return with_stub(arguments)
    machine = f"stub driver as {asked.card}" if STUB in os.environ else "GPU"
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {machine}")
    print("\n".join(table(measure(asked.repeats, asked.card))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
