"""Calls with one tensor beside q, k and v, for tests of what the library does with it."""

from typing import Any

import torch
from torch import Tensor

from andrea_triton import attention, varlen_attention
from tests.backends import here

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")
B, H, T, D = 2, 2, 5, 8
LENGTHS = torch.tensor([3, 4], dtype=torch.int32)
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)
KEEP = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(1)) > 0.3

# name -> a value of its own; each is tried with every stride and every change in place.
DENSE: dict[str, Tensor] = {
    "key_lengths": LENGTHS,
    "alibi": torch.tensor([0.5, 0.25]),
    "sinks": torch.tensor([0.3, -0.2]),
    "mask": KEEP,
    "bias": torch.randn(B, H, T, T, generator=torch.Generator().manual_seed(2)),
    "seed": torch.tensor([7]),
}
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}


def qkv(packed: bool = False, dtype: torch.dtype = F32) -> list[Tensor]:
    shape = (T, H, D) if packed else (B, H, T, D)
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, device="cpu").to(here(), dtype).requires_grad_() for _ in range(3)]


def call(inputs: list[Tensor], backend: str, **arguments: Any) -> Tensor:
    """A causal call with one or more side tensors."""
    if "seed" in arguments:
        arguments["dropout_p"] = 0.4
    if inputs[0].dim() == 3:
        more = {
            **{"cu_seqlens_q": STARTS.to(inputs[0].device), "cu_seqlens_k": STARTS.to(inputs[0].device), "max_q": T, "max_k": T},
            **arguments,
        }
        out: Any = varlen_attention(*inputs, **more, causal=True, backend=backend)
    else:
        out = attention(*inputs, **arguments, causal=True, backend=backend)
    return out


def grads(inputs: list[Tensor], backend: str, **arguments: Any) -> list[Tensor]:
    """out and the gradients of q, k, v."""
    out = call(inputs, backend, **arguments)
    weight = torch.arange(out.numel(), dtype=F32).sin().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]
