"""What is measured: shapes, and inputs made from a real text.

The text is the first canto of Dante's Inferno, read as bytes. Each byte and each position has a random vector; their
sum is normalised and goes through the W_Q, W_K, W_V of an ANDREA-120M-shaped attention block (768 wide, 12 heads of 64,
no biases), which is randomly initialised with a fixed seed. So q, k and v arrive the way a GPT block makes them: as
(B, T, H, D) tensors seen through a transpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Mode = Literal["forward", "both"]
MODES: tuple[Mode, ...] = ("forward", "both")
MODE_TITLES: dict[Mode, str] = {"forward": "forward", "both": "forward + backward"}

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

    def title(self) -> str:
        """Shape and dtype in words."""
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} heads on {self.kv_heads}"
        return f"batch {self.batch}, {heads} × {self.head_dim}, causal, {self.dtype}"


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
        case: shapes, dtype and device. The values are computed in fp32 on the CPU and rounded once.

    Returns:
        Inputs of the case's dtype on its device, strided as views of (B, T, H, D) tensors.
    """
    generator = torch.Generator().manual_seed(SEED)
    width = case.heads * case.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    bytes_table, positions = normal(256, width), normal(case.length, width)
    x = F.layer_norm(bytes_table[text_tokens(case.batch, case.length)] + positions, (width,))

    def heads_of(rows: Tensor, heads: int) -> Tensor:
        split = rows.view(case.batch, case.length, heads, case.head_dim).transpose(1, 2)
        return split.to(device=case.device, dtype=case.torch_dtype)

    q, k, v = (
        heads_of(x @ normal(width, heads * case.head_dim) / math.sqrt(width), heads)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return Inputs(q, k, v, heads_of(normal(case.batch, case.length, width), case.heads))
