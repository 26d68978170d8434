"""How torch's parallelize_module is to split the library's modules: the heads of attention, the width of an MLP, the tokens."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ..errors import UnsupportedError
from ..nn import Andrea, CrossAttention, SelfAttention
from ..nn.andrea import Block

Plan = dict[str, ParallelStyle]


def tensor_parallel_plan(model: nn.Module) -> Plan:
    """A plan for torch's parallelize_module: every rank computes some heads of each attention, and part of each MLP.

    For `Andrea`, its blocks, `SelfAttention`, `CausalSelfAttention` and `CrossAttention`, and for any model that holds some of
    them; what else it holds is left whole on every rank. Inputs and outputs of the modules are plain tensors, the same on all
    ranks. The ranks must divide the key heads, which the first call checks; sinks, rotary positions, caches (`new_caches`, or
    made with this rank's key heads) and dropout then follow the heads. Embedding and head are split by tokens.

    Args:
        model: the module that parallelize_module is going to get.

    Returns:
        Styles by the names of the submodules. Change or leave out what you want otherwise; W_Q, W_K and W_V go together.

    Raises:
        UnsupportedError: the model holds none of these modules.

    Source:
        arXiv 1909.08053 (Megatron-LM), section 3.

    Example:
        >>> from andrea_triton.nn import CausalSelfAttention
        >>> sorted(tensor_parallel_plan(CausalSelfAttention(32, 4)))
        ['W_K', 'W_O', 'W_Q', 'W_V']
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> parallelize_module(model, mesh, tensor_parallel_plan(model))  # doctest: +SKIP
    """
    plan: Plan = {}
    for name, module in model.named_modules():
        inside = f"{name}." if name else ""
        plan |= {inside + child: style for child, style in styles(module).items()}
    if not plan:
        kinds = "Andrea, SelfAttention, CausalSelfAttention or CrossAttention"
        raise UnsupportedError(
            f"a {type(model).__name__}", "tensor_parallel_plan", f"it holds no {kinds}; write the plan for parallelize_module"
        )
    return plan


def styles(module: nn.Module) -> Plan:
    """Of a module's own children."""
    if isinstance(module, SelfAttention | CrossAttention):
        return {"W_Q": ColwiseParallel(), "W_K": ColwiseParallel(), "W_V": ColwiseParallel(), "W_O": RowwiseParallel()}
    if isinstance(module, Block):
        return {"widen": ColwiseParallel(), "narrow": RowwiseParallel()}
    if isinstance(module, Andrea):
        return {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return {}
