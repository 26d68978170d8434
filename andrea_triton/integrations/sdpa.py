"""Someone else's model, whose calls of torch's scaled_dot_product_attention come here: in a `with`, or by torch's own hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedError
from ..functional import attention
from ..sdpa import scaled_dot_product_attention

NAME = "andrea_triton"
FLASH = "_scaled_dot_product_flash_attention"


class replace_sdpa(TorchFunctionMode):
    """Within `with replace_sdpa():`, every call of torch's scaled_dot_product_attention in this thread is made by this library.

    It does not matter under which name a model imported the function, nothing is patched, and the end of the `with` ends it. It
    works around and inside a compiled function. What the library cannot do (nested tensors, say) raises; nothing goes back to
    torch in silence.

    Not caught, and left as it is: torch.nn.MultiheadAttention and with it TransformerEncoderLayer and TransformerDecoderLayer,
    which reach torch's attention below this level. (Their fused path for inference steps aside while any mode is active, so they
    take the same modules' ordinary path.) Attention that is called in C++ or a compiled graph made outside is not caught either.

    torch runs every backward without modes. A layer under activation checkpointing, which runs again there, has to be told: by
    `checkpoint(layer, x, use_reentrant=False, context_fn=lambda: (replace_sdpa(), replace_sdpa()))`, or by a `with` inside it.
    Every torch function called inside costs about a microsecond more.

    Raises:
        AndreaError: from a call inside, as `andrea_triton.scaled_dot_product_attention`.

    Source:
        torch.overrides.TorchFunctionMode in the documentation of torch.

    Example:
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> x = torch.randn(1, 2, 5, 8)
        >>> outside = scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> with replace_sdpa():
        ...     inside = scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(inside, outside, atol=1e-6)
        True
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The library's attention in place of torch's; everything else as it is."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        if func is Tensor.unflatten:  # a Python method that Dynamo cannot look into below a mode; this one it need not
            return torch.unflatten(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def register_flash(dispatch_key: str = "CUDA") -> None:
    """Offer this library to torch as a flash implementation, under the name "andrea_triton".

    Then `torch.nn.attention.activate_flash_attention_impl("andrea_triton")` puts it in the place of torch's flash kernels for the
    whole process, and `torch.nn.attention.restore_flash_attention_impl()` ends that. torch chooses when its flash kernels serve:
    fp16 and bf16, without a mask. This reaches calls that `replace_sdpa` does not, those in C++ and in graphs already compiled.
    torch's hook has no place for what the library's own backward reads, so here the backward makes the forward once more.

    Args:
        dispatch_key: of the devices that it is for: "CUDA" (HIP too), "XPU".

    Raises:
        UnsupportedError: this torch has no such hook (2.11 has it).

    Source:
        torch.nn.attention.register_flash_attention_impl in the documentation of torch.
    """
    hook = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if hook is None:
        raise UnsupportedError("register_flash", f"torch {torch.__version__}", "use a newer torch, or `with replace_sdpa():`")
    hook(NAME, register_fn=partial(_FlashKernels, dispatch_key))


class _FlashKernels:
    """torch's two flash operators, taken over for as long as this object is not removed."""

    def __init__(self, dispatch_key: str) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        self.library.impl(FLASH, _forward, dispatch_key)
        self.library.impl(f"{FLASH}_backward", _backward, dispatch_key)

    def remove(self) -> None:
        """Give the operators back: a library that nobody holds takes its kernels along."""
        self.library = None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention: out, lse, and what its backward is handed; the seed is the generator's state."""
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask", NAME, "the weights are never made; use andrea_triton.attention_weights")
    seed = torch.zeros(2, dtype=torch.int64, device=query.device)
    if dropout_p > 0.0:
        seed.random_(-(2**63), None)
    out, lse = attention(
        query, key, value, causal=is_causal, q_start=0, scale=scale, dropout_p=dropout_p, seed=seed[:1], return_lse=True
    )
    lengths = (None, None, query.shape[2], key.shape[2])
    return out, lse, *lengths, seed.view(torch.uint64), seed.new_zeros(()).view(torch.uint64), query.new_empty(0)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward, by the gradient of the forward made once more."""
    inputs = [t.detach().requires_grad_() for t in (query, key, value)]
    with torch.enable_grad():
        again = attention(
            *inputs, causal=is_causal, q_start=0, scale=scale, dropout_p=dropout_p, seed=philox_seed.view(torch.int64)[:1]
        )
    assert isinstance(again, Tensor)
    return torch.autograd.grad(again, inputs, grad_out)
