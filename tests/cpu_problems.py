"""Dense problems for the tests of the torch backend."""

from typing import Any

import torch
from torch import Tensor

from andrea_triton.problem import Problem, make_problem
from andrea_triton.spec import make_spec

F32 = torch.float32
SETTINGS = ("causal", "window", "q_start", "scale", "softcap", "dropout_p")


def problem_of(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Problem:
    spec = make_spec(**{name: keywords.pop(name) for name in SETTINGS if name in keywords})
    return make_problem(q, k, v, spec, **keywords)


def qkv(M: int = 9, N: int = 12, D: int = 16, HKV: int = 2, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 2, M, D).to(dtype), *(torch.randn(2, HKV, N, D).to(dtype) for _ in range(2))


def visible(M: int, N: int, left: int | None, right: int | None, q_start: int) -> Tensor:
    q_pos, k_pos = q_start + torch.arange(M)[:, None], torch.arange(N)
    low = torch.ones(M, N, dtype=torch.bool) if left is None else k_pos >= q_pos - left
    return low if right is None else low & (k_pos <= q_pos + right)
