"""Calls of the library that the emulator runs: attention on the inputs of a case, and a decoding step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import andrea_triton
from andrea_triton import PagedKVCache
from andrea_triton.testing import Case, Inputs, assert_accurate, attend_reference, cast, make_inputs


def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernels."""
    extras = dict(inputs.extras)
    packed = [extras.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_q", "max_k")]
    common = {**inputs.settings, **extras, "return_lse": True, "backend": "interpreter"}
    if packed[0] is not None:
        return andrea_triton.varlen_attention(inputs.q, inputs.k, inputs.v, *packed, **common)
    return andrea_triton.attention(inputs.q, inputs.k, inputs.v, **common)


def decode(dtype: torch.dtype, paged: bool) -> Callable[[], None]:
    """Two sequences of different length, four query heads on two, three parts of the keys, sinks and a window.

    Returns:
        A function that raises AssertionError when the results, wherever they come from, are not accurate.
    """
    lengths, settings = (63, 128), {"window": 100}
    inputs = make_inputs(Case("decode", B=2, HQ=4, HKV=2, M=2, N=128, D=40, sinks=True), dtype)
    make: dict[str, Any] = {"page_size": 48} if paged else {}
    cache = (PagedKVCache if paged else andrea_triton.KVCache)(2, 2, 144, 40, dtype=dtype, **make)
    cache.append(inputs.k, inputs.v, rows=lengths)
    sinks = inputs.extras["sinks"]
    sinks[0] = 100.0  # exp(100) is no number of fp32
    out, lse = andrea_triton.decode_attention(
        inputs.q, cache, sinks=sinks, split_size=48, return_lse=True, backend="interpreter", **settings
    )
    wanted = []
    for b, length in enumerate(lengths):
        one = inputs._replace(q=inputs.q[b : b + 1], k=inputs.k[b : b + 1, :, -length:], v=inputs.v[b : b + 1, :, -length:])
        one = one._replace(settings={**one.settings, "causal": True, **settings})
        wanted.append((attend_reference(one), attend_reference(cast(one, torch.float64))))

    def judge() -> None:
        for b, (eager, exact) in enumerate(wanted):
            assert_accurate(out[b : b + 1], eager[0], exact[0], dtype, f"out of sequence {b}")
            assert_accurate(lse[b : b + 1], eager[1], exact[1], torch.float32, f"lse of sequence {b}")

    return judge
