"""The calls that are counted and simulated: what they ask for, and their launches, compiled."""

from __future__ import annotations

from typing import NamedTuple

import torch

from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.launches import CompiledLaunch, compiled_launches
from andrea_triton.counting.machine_code import MachineCode, read
from andrea_triton.launch import run
from andrea_triton.launch.configs import Config


class Variant(NamedTuple):
    """What a counted call asks for beside q, k and v."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    group: int = 1
    bias: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0


VARIANTS = {
    "causal": Variant(),
    "full": Variant(causal=False),
    "window": Variant(window=256),
    "gqa": Variant(group=4),
    "softcap": Variant(softcap=30.0),
    "bias": Variant(bias=True),
    "alibi": Variant(alibi=True),
    "sinks": Variant(sinks=True),
    "dropout": Variant(dropout_p=0.1),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}
HEADS = 4


def call(
    target: str, D: int, dtype: str, variant: str, length: int, only: str | None = None, config: Config | None = None
) -> list[CompiledLaunch]:
    """The launches of one call, forward and backward, with HEADS heads and as many queries as keys.

    Args:
        target: a name in CARDS.
        D: head dim of q, k and v.
        dtype: a name in DTYPES; fp32 is multiplied by IEEE's rules, tf32 is fp32 multiplied in TF32.
        variant: a name in VARIANTS.
        length: queries and keys.
        only, config: as in compiled_launches.

    Returns:
        Its launches; with `only` that one.

    Raises:
        CompileError: Triton cannot compile it. FitError: no tiling fits the card.
    """
    asked, cpu = VARIANTS[variant], torch.device("cpu")
    q = run.allocate((1, HEADS, length, D), DTYPES[dtype], cpu)
    k, v = (run.allocate((1, HEADS // asked.group, length, D), q.dtype, cpu) for _ in range(2))
    per_head = run.allocate((HEADS,), torch.float32, cpu)
    return compiled_launches(
        q, k, v, q, target=target, causal=asked.causal, window=asked.window, softcap=asked.softcap,
        bias=run.allocate((HEADS, length, length), q.dtype, cpu) if asked.bias else None,
        alibi=per_head if asked.alibi else None, sinks=per_head if asked.sinks else None,
        dropout_p=asked.dropout_p, seed=0, precision="tf32" if dtype == "tf32" else "ieee", only=only, config=config,
    )  # fmt: skip


def machine_code(launch: CompiledLaunch, target: str) -> MachineCode:
    """What the machine code of a compiled launch asks of its card."""
    warps = launch.config.num_warps
    return read(launch.kernel, CARDS[target], num_warps=warps, tile=launch.tile, matmul_dims=launch.matmul_dims)
