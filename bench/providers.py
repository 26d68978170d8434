"""Who is measured: the textbook formula, and this library by backend.

A new provider is a function and one line in PROVIDERS. It gets a time only where it passes the accuracy rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

import andrea_triton
from bench.cases import Case, Mode

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Provider:
    """One way to compute causal attention.

    Args:
        name: word that stands for it in results and on the command line.
        label: how plots and tables call it.
        attend: (q, k, v) -> out; what is timed.
        attend_lse: (q, k, v) -> (out, lse); what is checked.
        squares: T x T matrices alive at the peak, by mode: a guess of the memory that a case needs.
    """

    name: str
    label: str
    attend: Attend
    attend_lse: AttendLse
    squares: dict[Mode, int]

    def needs(self, case: Case, mode: Mode) -> int:
        """Bytes of T x T matrices that this case is expected to take."""
        return self.squares[mode] * case.score_bytes


def naive_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores with the future at -inf: (B, H, T, T), held in full."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, as the textbook writes it; autograd gives the backward."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return naive_scores(q, k).softmax(dim=-1) @ v


def naive_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same output, and the natural log of each row's sum of exponentials, in fp32 (fp64 for fp64)."""
    scores = naive_scores(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    lse = scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(dim=-1)
    return naive(q, k, v), lse


def library(backend: str, label: str) -> Provider:
    """This library with a named backend."""
    attend = cast(Attend, partial(andrea_triton.attention, causal=True, backend=backend))
    attend_lse = cast(AttendLse, partial(andrea_triton.attention, causal=True, backend=backend, return_lse=True))
    return Provider(f"andrea-{backend}", label, attend, attend_lse, {"forward": 0, "both": 0})


NAIVE = Provider("naive", "naive (holds T×T)", naive, naive_lse, {"forward": 2, "both": 3})
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        NAIVE,
        library("torch", "fused (CPU backend)"),
        library("triton", "fused (Triton kernels)"),
        library("interpreter", "fused (Triton kernels, interpreted)"),
    )
}


def checked_on(device: str) -> tuple[str, ...]:
    """Names of the providers whose accuracy is checked on a device."""
    return ("andrea-triton",) if device == "cuda" else ("andrea-interpreter", "andrea-torch")


def timed_on(device: str) -> tuple[str, ...]:
    """Names of the providers that are timed on a device, the baseline first."""
    return ("naive", "andrea-triton") if device == "cuda" else ("naive", "andrea-torch")
