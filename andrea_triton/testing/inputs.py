"""The tensors of a case, the same for a seed on every device, and in awkward memory."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andrea_triton.problem import accumulator
from andrea_triton.testing.cases import Case, Layout


class Inputs(NamedTuple):
    """One attention call with the gradients that flow into its results.

    Args:
        q: queries.
        k: keys.
        v: values.
        dout: gradient of out, its shape and dtype.
        dlse: gradient of lse, or None when only out is differentiated.
        settings: keywords of make_spec.
        extras: keywords of make_problem: bias, sinks, alibi, mask, key_lengths, seed, cu_seqlens_q ...
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    settings: dict[str, Any]
    extras: dict[str, Any]


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str | None = None, seed: int = 0) -> Inputs:
    """Draw the tensors of a case: random normal, rounded to the dtype, the same for a seed on every device.

    Args:
        case: the case.
        dtype: of q, k, v, bias and sinks.
        device: where the tensors live; None means torch's default device.
        seed: of the random numbers, and of the dropout.

    Returns:
        The Inputs.

    Example:
        >>> inputs = make_inputs(Case("small", M=3, N=5, D=8, causal=True), torch.float32)
        >>> inputs.q.shape, inputs.k.shape, inputs.settings["causal"]
        (torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 5, 8]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    device = torch.get_default_device() if device is None else device

    def normal(shape: tuple[int, ...], gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * gain).to(device, dtype)

    packed = case.lengths_q is not None
    HQ, HKV = case.HQ, case.HQ if case.HKV is None else case.HKV
    M, N = case.M, case.M if case.N is None else case.N
    D, DV = case.D, case.D if case.DV is None else case.DV
    if case.lengths_q is not None:
        M, N = sum(case.lengths_q) + case.slack, sum(case.lengths_k) + case.slack

    def rows(heads: int, length: int, features: int, gain: float = 1.0) -> Tensor:
        shape = (length, heads, features) if packed else (case.B, heads, length, features)
        return _laid_out(normal(shape, gain), "heads" if packed and case.layout == "rows" else case.layout)

    q, k, v = rows(HQ, M, D, case.gain), rows(HKV, N, D, case.gain), rows(HKV, N, DV)
    dlse = normal((HQ, M) if packed else (case.B, HQ, M)).to(accumulator(dtype))
    extras: dict[str, Any] = {}
    if case.bias is not None:
        extras["bias"] = normal(case.bias)
    if case.hidden is not None:
        chance = torch.rand((case.B, 1, M, N), generator=generator, dtype=torch.float64, device="cpu")
        extras["mask"] = (chance >= case.hidden).to(device)
    if case.alibi:
        extras["alibi"] = torch.tensor([2.0 ** (-8 * (h + 1) / HQ) for h in range(HQ)], device=device)
    if case.sinks:
        extras["sinks"] = normal((HQ,))
    if case.key_lengths is not None:
        extras["key_lengths"] = torch.tensor(case.key_lengths, dtype=torch.int32, device=device)
    if case.dropout_p > 0.0:
        extras["seed"] = seed
    if case.lengths_q is not None:
        for letter, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
            starts = [0, *itertools.accumulate(lengths)]
            extras[f"cu_seqlens_{letter}"] = torch.tensor(starts, dtype=torch.int32, device=device)
            extras[f"max_{letter}"] = max(lengths, default=0)
    names = ("causal", "window", "q_start", "scale", "softcap", "dropout_p")
    return Inputs(q, k, v, rows(HQ, M, DV), dlse, {name: getattr(case, name) for name in names}, extras)


def guard_band(tensor: Tensor, width: int = 3) -> Tensor:
    """The same values inside a larger buffer of NaN, so that whatever reads past an edge shows.

    Args:
        tensor: any shape; integers get their largest value around them, bools True.
        width: elements before and after, along every dim.

    Returns:
        A view with the shape, dtype and values of the tensor, without gradient history.

    Example:
        >>> banded = guard_band(torch.zeros(2, 4), width=1)
        >>> banded.stride(), banded.as_strided((1,), (1,), banded.storage_offset() - 1).item()
        ((6, 1), nan)
    """
    if tensor.dtype.is_floating_point:
        poison = float("nan")
    else:
        poison = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
    banded = tensor.new_full([size + 2 * width for size in tensor.shape], poison)
    return banded[tuple(slice(width, width + size) for size in tensor.shape)].copy_(tensor.detach())


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same call with q, k, v, dout, bias and sinks in another dtype, and dlse in that of its lse."""
    extras = dict(inputs.extras)
    for name in ("bias", "sinks"):
        if name in extras:
            extras[name] = extras[name].to(dtype)
    q, k, v, dout = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dlse = None if inputs.dlse is None else inputs.dlse.to(accumulator(dtype))
    return Inputs(q, k, v, dout, dlse, inputs.settings, extras)


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The same values in the memory order of the layout."""
    if layout == "guarded":
        return guard_band(tensor)
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if layout == "rows" else tensor
