"""Who is measured: the textbook formula, PyTorch's own attention by backend, other libraries, and this one by backend.

A new provider is a function and one line in PROVIDERS. It gets a time only where it passes the accuracy rule; where it
cannot run, `missing` says why in words.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import andrea_triton
from bench.cases import Case, Mode

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
COMPILERS = ("c++", "g++", "clang++", "cl")
NO_SQUARES: dict[Mode, int] = {"forward": 0, "backward": 0, "both": 0}


def nothing(case: Case, mode: Mode) -> str | None:
    """Nothing is missing."""
    return None


@dataclass(frozen=True)
class Provider:
    """One way to compute causal attention.

    Args:
        name: word that stands for it in results and on the command line.
        label: how plots and tables call it.
        make: case -> (q, k, v) -> out; what is timed.
        make_lse: case -> (q, k, v) -> (out, lse); what is checked. None: it gives no lse, and `make` is checked.
        squares: T x T matrices alive at the peak, by mode: a guess of the memory that a case needs.
        missing: why it cannot run a case in a mode, or None.
        compiled: its first call of a shape compiles.
        context: what its calls run in; entered once, around them all, outside the clock.
    """

    name: str
    label: str
    make: Callable[[Case], Attend]
    make_lse: Callable[[Case], AttendLse] | None = None
    squares: dict[Mode, int] | None = None
    missing: Callable[[Case, Mode], str | None] = nothing
    compiled: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def needs(self, case: Case, mode: Mode) -> int:
        """Bytes of T x T matrices that this case is expected to take."""
        return (self.squares or NO_SQUARES)[mode] * case.score_bytes


def naive_scores(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """Scaled scores with the future, and what the window has left behind, at -inf: (B, H, T, T), held in full."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    if window is not None:
        hidden = hidden | torch.ones_like(hidden).tril(-window)
    return scores.masked_fill(hidden, -math.inf)


def naive(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, as the textbook writes it; autograd gives the backward."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return naive_scores(q, k, window).softmax(dim=-1) @ v


def naive_lse(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The same output, and the natural log of each row's sum of exponentials, in fp32 (fp64 for fp64)."""
    scores = naive_scores(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), window)
    lse = scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(dim=-1)
    return naive(q, k, v, window), lse


def allow_compiling() -> None:
    """Let torch.compile keep a program for each shape, and run a backward twice on one graph, as the bench does."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = 256
    torch._functorch.config.donated_buffer = False


def make_compiled_naive(case: Case) -> Attend:
    """torch.compile of the textbook formula, for the case's exact shape."""
    allow_compiling()
    return cast(Attend, torch.compile(partial(naive, window=case.window), dynamic=False))


def no_compiler(case: Case, mode: Mode) -> str | None:
    """Why torch.compile cannot work here, or None."""
    if case.device == "cpu" and not any(map(shutil.which, COMPILERS)):
        return f"torch.compile needs a C++ compiler on a CPU, and there is none of {', '.join(COMPILERS)} on the path"
    return None


def make_flex(case: Case) -> Attend:
    """FlexAttention, compiled, with its block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    allow_compiling()
    window = case.window or case.length

    def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & (row - column < window)

    mask = create_block_mask(seen, None, None, case.length, case.length, device=case.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return cast(Attend, partial(compiled, block_mask=mask, enable_gqa=case.heads != case.kv_heads))


def flex_missing(case: Case, mode: Mode) -> str | None:
    """FlexAttention has no backward on a CPU."""
    if case.device == "cpu" and mode != "forward":
        return "FlexAttention has no backward on a CPU"
    return no_compiler(case, mode)


def make_sdpa(case: Case) -> Attend:
    """PyTorch's attention; its context holds it to one backend."""
    return cast(Attend, partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=case.heads != case.kv_heads))


def sdpa_missing(on_cpu: bool, case: Case, mode: Mode) -> str | None:
    """What PyTorch's attention cannot say."""
    if case.window is not None:
        return "it has no window but through a T×T mask"
    return None if on_cpu or case.device != "cpu" else "this backend is for GPUs"


def sdpa(name: str, backend: SDPBackend, *, on_cpu: bool = False, squares: dict[Mode, int] | None = None) -> Provider:
    """PyTorch's attention by backend."""
    label = f"torch SDPA, {name}"
    missing, context = partial(sdpa_missing, on_cpu), partial(sdpa_kernel, backend)
    return Provider(f"sdpa-{name.lower()}", label, make_sdpa, squares=squares, missing=missing, context=context)


def make_flash_attn(module: str, case: Case) -> Attend:
    """The flash-attn package: (B, T, H, D) tensors, which the inputs are underneath."""
    function = __import__(module).flash_attn_func
    window = (-1, -1) if case.window is None else (case.window - 1, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, window_size=window)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def flash_attn_missing(module: str, case: Case, mode: Mode) -> str | None:
    """Why flash-attn cannot run a case, or None."""
    if case.device == "cpu":
        return "it is for GPUs"
    if case.dtype not in ("float16", "bfloat16"):
        return f"it has no {case.dtype}"
    return None if find_spec(module) else f"the module {module} is not installed"


def flash_attn(name: str, label: str, module: str) -> Provider:
    """A generation of the flash-attn package."""
    return Provider(name, label, partial(make_flash_attn, module), missing=partial(flash_attn_missing, module))


def library(backend: str, label: str) -> Provider:
    """This library with a named backend."""

    def make(case: Case) -> Attend:
        return cast(Attend, partial(andrea_triton.attention, causal=True, window=case.window, backend=backend))

    def make_lse(case: Case) -> AttendLse:
        return cast(
            AttendLse, partial(andrea_triton.attention, causal=True, window=case.window, backend=backend, return_lse=True)
        )

    def missing(case: Case, mode: Mode) -> str | None:
        fits = (backend == "triton") == (case.device != "cpu")
        return None if fits else f"this backend is not for {case.device} tensors"

    return Provider(f"andrea-{backend}", label, make, make_lse, missing=missing)


SQUARES: dict[Mode, int] = {"forward": 2, "backward": 3, "both": 3}
NAIVE = Provider(
    "naive",
    "naive (holds T×T)",
    lambda case: cast(Attend, partial(naive, window=case.window)),
    lambda case: cast(AttendLse, partial(naive_lse, window=case.window)),
    SQUARES,
)
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        NAIVE,
        Provider(
            "naive-compiled", "naive, torch.compile", make_compiled_naive, squares=SQUARES, missing=no_compiler, compiled=True
        ),
        sdpa("math", SDPBackend.MATH, on_cpu=True, squares=SQUARES),
        sdpa("flash", SDPBackend.FLASH_ATTENTION, on_cpu=True),
        sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION),
        sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION),
        Provider("flex", "FlexAttention, compiled", make_flex, missing=flex_missing, compiled=True),
        flash_attn("flash-attn", "flash-attn 2", "flash_attn"),
        flash_attn("flash-attn-3", "flash-attn 3", "flash_attn_interface"),
        library("torch", "andrea_triton (CPU backend)"),
        library("triton", "andrea_triton (Triton kernels)"),
        library("interpreter", "andrea_triton (Triton kernels, interpreted)"),
    )
}
# Timed only when asked for: their code is compiled anew for each shape, or they repeat another line.
ON_REQUEST_ON_CPU = ("naive-compiled", "sdpa-math", "flex")
UNTIMED = ("andrea-interpreter",)


def own(device: str) -> str:
    """Name of this library's provider on a device."""
    return "andrea-torch" if device == "cpu" else "andrea-triton"


def possible(device: str) -> tuple[str, ...]:
    """Names of the providers that could be timed on a device, the baseline first."""
    tiny = Case(length=1, device=device, dtype="bfloat16")
    return tuple(name for name, p in PROVIDERS.items() if name not in UNTIMED and p.missing(tiny, "forward") is None)


def usual(device: str) -> tuple[str, ...]:
    """Names of the providers that are timed where none are asked for."""
    return tuple(name for name in possible(device) if device != "cpu" or name not in ON_REQUEST_ON_CPU)


def chosen(words: str | None, device: str) -> tuple[str, ...]:
    """Providers named on the command line, the baseline always first.

    Args:
        words: names with commas between them, "all", or None for the usual ones.
        device: "cpu" or "cuda".

    Returns:
        Names in PROVIDERS.

    Raises:
        ValueError: there is no such provider.
    """
    if words is None or words == "all":
        return usual(device) if words is None else possible(device)
    names = [word.strip() for word in words.split(",") if word.strip()]
    known = [name for name in PROVIDERS if name not in UNTIMED]
    strange = [name for name in names if name not in known]
    if strange:
        raise ValueError(f"no provider {', '.join(strange)}; wanted some of {', '.join(known)}, or all")
    return tuple(dict.fromkeys((NAIVE.name, *names)))
