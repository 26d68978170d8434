"""One decoding step over a cache, against PyTorch's attention over a contiguous one: ``python -m bench.decode``.

A step is one new token of each sequence: its attention to all that the cache holds. All providers take turns within one run, on
the same keys and values, and who differs from PyTorch's attention in fp64 by more than twice what that differs in the dtype gets
no time. Bytes are those of the keys and values that a token has to read once; a provider that copies them first reads and writes
more, and it shows in its time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from andrea_triton import KVCache, PagedKVCache, decode_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Shape(NamedTuple):
    """Sequences, heads of queries and of keys, head dim, rows that each sequence holds."""

    batch: int = 4
    heads: int = 12
    kv_heads: int = 12
    dim: int = 64
    length: int = 1024

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one sequence."""
        return 2 * self.kv_heads * self.length * self.dim * dtype.itemsize


class Speed(NamedTuple):
    """Median seconds of a step; None where the result was not accurate."""

    name: str
    seconds: float | None


def steps(shape: Shape, dtype: torch.dtype, device: str) -> tuple[dict[str, Callable[[], Any]], Tensor]:
    """A step of each provider, and the result in fp64."""
    s = shape
    q = torch.randn(s.batch, s.heads, 1, s.dim, device=device).to(dtype)
    k, v = (torch.randn(s.batch, s.kv_heads, s.length, s.dim, device=device).to(dtype) for _ in range(2))
    sizes: Any = (s.batch, s.kv_heads, s.length, s.dim)
    flat = KVCache(*sizes, dtype=dtype, device=device)
    caches = {"contiguous": flat, "pages of 16": PagedKVCache(*sizes, page_size=16, dtype=dtype, device=device)}
    grouped = s.heads != s.kv_heads

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    made: dict[str, Callable[[], Any]] = {"torch SDPA, contiguous": lambda: peer(q, *flat.keys_values(s.length))}
    for name, cache in caches.items():
        cache.append(k, v)
        made[f"andrea_triton, {name}"] = partial(decode_attention, q, cache)
    if device != "cpu":  # only the kernels have parts
        made["andrea_triton, one part"] = partial(decode_attention, q, flat, split_size=-(-s.length // 16) * 16)
    return made, peer(q.double(), k.double(), v.double())


def measure(shape: Shape, dtype: torch.dtype, device: str, repeats: int) -> list[Speed]:
    """Every provider's step, in turns."""
    made, exact = steps(shape, dtype, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    errors = {name: float((step().double() - exact).abs().max()) for name, step in made.items()}
    allowed = 2 * errors["torch SDPA, contiguous"] + torch.finfo(dtype).eps
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, step in made.items():
            wait()
            start = time.perf_counter()
            step()
            wait()
            times[name].append(time.perf_counter() - start)
    return [Speed(name, statistics.median(t) if errors[name] <= allowed else None) for name, t in times.items()]


def table(shape: Shape, dtype: torch.dtype, speeds: Sequence[Speed]) -> list[str]:
    """Lines to print."""
    lines = [f"{'':30s}{'µs a step':>12s}{'tokens/s':>12s}{'MB a token':>12s}{'GB/s':>8s}{'to SDPA':>9s}"]
    size, first = shape.bytes_per_token(dtype), speeds[0].seconds
    for name, seconds in speeds:
        if seconds is None or first is None:
            lines.append(f"{name:30s}  not accurate")
            continue
        rate = shape.batch / seconds
        figures = f"{seconds * 1e6:12.1f}{rate:12.0f}{size / 1e6:12.2f}{rate * size / 1e9:8.2f}{first / seconds:8.2f}x"
        lines.append(f"{name:30s}{figures}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each length."""
    parser = argparse.ArgumentParser("python -m bench.decode", description="Tokens per second of attention over a cache.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192], metavar="N", help="rows that a sequence holds")
    parser.add_argument("--batch", type=int, default=4, metavar="B")
    parser.add_argument("--kv-heads", type=int, default=12, metavar="H", help="of 12 heads (default: 12)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="steps that are timed (default: 50)")
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", DTYPES[given.dtype]
    print(f"{platform.machine()} {device}, torch {torch.__version__}, {torch.get_num_threads()} threads, {given.dtype}")
    with torch.inference_mode():
        for length in given.lengths:
            shape = Shape(given.batch, kv_heads=given.kv_heads, length=length)
            print(f"\n{shape}")
            print("\n".join(table(shape, dtype, measure(shape, dtype, device, given.repeats))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
