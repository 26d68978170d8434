"""What is measured: shapes, and inputs made from a real text.

The text is the first canto of Dante's Inferno, read as bytes. Each byte and each position has a random vector; their
sum is normalised and goes through the W_Q, W_K, W_V of an ANDREA-120M-shaped attention block (768 wide, 12 heads of 64,
no biases), which is randomly initialised with a fixed seed. So q, k and v arrive the way a GPT block makes them: as
(B, T, H, D) tensors seen through a transpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Mode = Literal["forward", "backward", "both"]
MODES: tuple[Mode, ...] = ("forward", "backward", "both")
MODE_TITLES: dict[Mode, str] = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
# Matrix products of size pairs x D: q k^T and w v; in the backward the scores again, dw, dq, dk, dv.
PRODUCTS: dict[Mode, int] = {"forward": 2, "backward": 5, "both": 7}

Sweep = Literal["T", "batch", "heads", "dim", "dtype", "window", "gqa", "gain"]
SWEEP_FIELDS: dict[Sweep, str] = {
    "T": "length", "batch": "batch", "heads": "heads", "dim": "head_dim", "dtype": "dtype", "window": "window", "gqa": "kv_heads",
    "gain": "gain",
}  # fmt: skip
SWEEP_AXES: dict[Sweep, str] = {
    "T": "sequence length T (tokens)",
    "batch": "batch (sequences)",
    "heads": "heads",
    "dim": "head dim D (features)",
    "dtype": "dtype",
    "window": "window (keys a query sees)",
    "gqa": "key and value heads",
    "gain": "factor of queries and keys (30: peaked rows)",
}

TEXT = Path(__file__).with_name("inferno_canto_1.txt")
SEED = 1321


@dataclass(frozen=True)
class Case:
    """One causal self-attention problem.

    Args:
        length: queries and keys, T.
        heads: query heads.
        kv_heads: key and value heads; heads is a multiple of it.
        head_dim: width of a head, D.
        batch: sequences; each reads the text from another place.
        window: keys that a query sees, its own included; None means all up to itself.
        gain: factor of queries and of keys: large, each row's weight is on few keys.
        dtype: name of a torch dtype, such as "float32".
        device: "cpu" or "cuda".
    """

    length: int
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    window: int | None = None
    gain: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {self.dtype!r}; wanted the name of a torch dtype, such as 'float32'")
        return dtype

    @property
    def score_bytes(self) -> int:
        """Size in bytes of the T x T scores of all heads, which a fused kernel never holds."""
        return self.batch * self.heads * self.length**2 * self.torch_dtype.itemsize

    @property
    def pairs(self) -> int:
        """Comparisons: (query, key) pairs that the mask leaves, in all heads and sequences."""
        seen = min(self.window or self.length, self.length)
        return self.batch * self.heads * (seen * (seen + 1) // 2 + (self.length - seen) * seen)

    def flops(self, mode: Mode) -> int:
        """Floating-point operations that the maths asks for: the matrix products over the pairs that are seen."""
        return PRODUCTS[mode] * 2 * self.pairs * self.head_dim

    def at(self, sweep: Sweep) -> int | str:
        """Where the case stands on the axis of a sweep."""
        value = getattr(self, SWEEP_FIELDS[sweep])
        return "none" if value is None else value


def title_of(cases: Sequence[Case], sweep: Sweep) -> str:
    """What the cases of a sweep have in common, in words."""
    case, parts = cases[0], []
    tokens = {c.batch * c.length for c in cases}
    if sweep == "T" and len({c.batch for c in cases}) > 1 and len(tokens) == 1:
        parts.append(f"{tokens.pop():,} tokens")
    elif sweep != "batch":
        parts.append(f"batch {case.batch}")
    if sweep != "T":
        parts.append(f"T = {case.length}")
    if sweep not in ("heads", "gqa"):
        parts.append(f"{case.heads} heads" if case.heads == case.kv_heads else f"{case.heads} heads on {case.kv_heads}")
    elif sweep == "gqa":
        parts.append(f"{case.heads} query heads")
    if sweep != "dim":
        parts.append(f"D = {case.head_dim}")
    parts.append("causal" if case.window is None or sweep == "window" else f"causal, window {case.window}")
    if sweep != "gain" and case.gain != 1:
        parts.append(f"q and k × {case.gain}")
    return ", ".join(parts if sweep == "dtype" else [*parts, case.dtype])


class Inputs(NamedTuple):
    """q (B, H, T, D), k and v (B, H_kv, T, D), and dout, the gradient of the output, (B, H, T, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def text_tokens(batch: int, length: int) -> Tensor:
    """Bytes of the canto, (batch, length) int64; the text starts anew where it ends."""
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    start = torch.arange(batch)[:, None] * (len(data) // max(batch, 1))
    return data[(start + torch.arange(length)) % len(data)]


def make_inputs(case: Case) -> Inputs:
    """Embed and project the text; the same case always gives the same values.

    Args:
        case: shapes, dtype and device. Random numbers are drawn on the CPU; values are computed in fp32 and rounded once.

    Returns:
        Inputs of the case's dtype on its device, strided as views of (B, T, H, D) tensors.
    """
    generator = torch.Generator().manual_seed(SEED)
    width = case.heads * case.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.device)

    bytes_table, positions = normal(256, width), normal(case.length, width)
    x = F.layer_norm(bytes_table[text_tokens(case.batch, case.length).to(case.device)] + positions, (width,))

    def heads_of(rows: Tensor, heads: int) -> Tensor:
        split = rows.view(case.batch, case.length, heads, case.head_dim).transpose(1, 2)
        return split.to(case.torch_dtype)

    q, k, v = (
        heads_of(x @ normal(width, heads * case.head_dim) * (gain / math.sqrt(width)), heads)
        for heads, gain in ((case.heads, case.gain), (case.kv_heads, case.gain), (case.kv_heads, 1))
    )
    return Inputs(q, k, v, heads_of(normal(case.batch, case.length, width), case.heads))
