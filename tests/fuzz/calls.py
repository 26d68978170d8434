"""Attention calls drawn at random, over all that the public functions take: hypothesis strategies, and the tensors of a draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from andrea_triton.testing import Case, Inputs, guard_band, make_inputs

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
VALUES = ("normal", "peaked", "constant", "zero", "denormal", "huge", "one token", "steps")
LAYOUTS = (
    "heads", "rows", "guarded", "features first", "every second feature", "one batch entry", "one head", "one row", "gaps",
    "odd strides", "overlapping rows",
)  # fmt: skip
INF = float("inf")


@dataclass(frozen=True)
class Drawn:
    """A call.

    Args:
        case: sizes and features, as in the catalogue.
        dtype: of q, k and v.
        values: of q, k, v and dout: one of VALUES each.
        layouts: in memory, of q, k, v and dout: one of LAYOUTS each.
        bias_values: "normal", "-inf" (some entries), "-inf rows", "lowest rows" (the lowest finite float; of
            fp64 that of fp32, for its yardstick), "large".
        bias_dtype: of a bias, where it is wider than that of q.
        slopes_of_batch: ALiBi slopes (B, HQ) rather than (HQ,).
        precise: as in attention.
        differentiated: what flows into the gradients: "out", "lse" or "both".
        seed: of the numbers.
    """

    case: Case
    dtype: torch.dtype = torch.float32
    values: tuple[str, ...] = ("normal",) * 4
    layouts: tuple[str, ...] = ("heads",) * 4
    bias_values: str = "normal"
    bias_dtype: torch.dtype | None = None
    slopes_of_batch: bool = False
    precise: bool = False
    differentiated: str = "both"
    seed: int = 0


def often(usual: Any, *others: Any) -> SearchStrategy[Any]:
    """One value in three draws of four, else one of the others."""
    return st.sampled_from([usual] * (3 * len(others)) + list(others))


def lengths() -> SearchStrategy[int]:
    """Mostly within a block of 16, sometimes at its edges, seldom of three."""
    return st.integers(0, 12) | often(5, 1, 15, 16, 17, 33, 40)


def head_dims() -> SearchStrategy[int]:
    return st.integers(1, 20) | often(8, 16, 32, 40, 63, 64, 65, 128, 256)


def windows() -> SearchStrategy[Any]:
    distance = st.none() | st.integers(0, 20)
    return st.none() | st.integers(1, 25) | st.tuples(distance, distance) | st.just(2**40)


@st.composite
def sizes(draw: DrawFn, packed: bool) -> dict[str, Any]:
    """Batch, heads, lengths and head dims."""
    HKV, group = draw(often(1, 0, 2)), draw(often(1, 2, 3))
    fields: dict[str, Any] = {"HKV": HKV, "HQ": HKV * group, "D": draw(head_dims())}
    fields["DV"] = draw(st.none() | head_dims())
    if packed:
        count = draw(st.integers(0, 3))
        fields["lengths_q"] = tuple(draw(lengths()) for _ in range(count))
        fields["lengths_k"] = tuple(draw(lengths()) for _ in range(count))
        return {**fields, "slack": draw(often(0, 1, 5))}
    return {**fields, "B": draw(often(1, 0, 2, 3)), "M": draw(lengths()), "N": draw(st.none() | lengths())}


@st.composite
def cases(draw: DrawFn, packed: bool, dropout: bool = True) -> Case:
    """Sizes with features."""
    fields = draw(sizes(packed))
    fields["causal"], fields["window"] = draw(st.booleans()), draw(windows())
    fields["q_start"] = draw(st.none() | st.integers(-25, 45))
    fields["scale"] = draw(often(None, 0.0, 1.0, -0.5, 0.01, 3.0))
    fields["softcap"] = draw(often(None, 1.0, 0.1, 30.0))
    fields["sinks"], fields["alibi"] = draw(often(False, True)), draw(often(False, True))
    fields["dropout_p"] = draw(often(0.0, 0.2, 0.9)) if dropout else 0.0
    if not packed:
        B, HQ, M = fields["B"], fields["HQ"], fields["M"]
        N = M if fields["N"] is None else fields["N"]
        if draw(often(False, True)):
            fields["key_lengths"] = tuple(draw(st.integers(0, N)) for _ in range(B))
        if draw(often(False, True)):
            fields["hidden"] = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        if draw(often(False, True)):
            full = [draw(st.sampled_from([size, 1])) for size in (B, HQ, M, N)]
            fields["bias"] = tuple(full[draw(st.integers(0, 3)) :])
    return Case("drawn", **fields)


@st.composite
def drawn_calls(draw: DrawFn, packed: SearchStrategy[bool] | None = None, dropout: bool = True) -> Drawn:
    """Any call."""
    case = draw(cases(draw(often(False, True) if packed is None else packed), dropout))
    return Drawn(
        case,
        dtype=draw(st.sampled_from(DTYPES)),
        values=tuple(draw(often("normal", *VALUES[1:])) for _ in range(4)),
        layouts=tuple(draw(often("heads", *LAYOUTS[1:])) for _ in range(4)),
        bias_values=draw(st.sampled_from(["normal", "-inf", "-inf rows", "lowest rows", "large"])),
        bias_dtype=draw(st.sampled_from([None, None, torch.float32, torch.float64])),
        slopes_of_batch=draw(st.booleans()),
        precise=draw(often(False, True)),
        differentiated=draw(often("both", "out", "lse")),
        seed=draw(st.integers(0, 2**16)),
    )


def inputs_of(drawn: Drawn, seed: int | None = None) -> Inputs:
    """The tensors of a draw; another seed gives other numbers of the same kind."""
    seed = drawn.seed if seed is None else seed
    inputs = make_inputs(drawn.case, drawn.dtype, seed=seed)
    tensors = [inputs.q, inputs.k, inputs.v, inputs.dout]
    rows = -3 if drawn.case.lengths_q is not None else -2
    room = 4 * max(1, *(t.shape[-1] for t in tensors)) * max(1, *(t.shape[rows] for t in tensors))
    for i, (values, layout) in enumerate(zip(drawn.values, drawn.layouts, strict=True)):
        if values == "huge" and i == 3 and drawn.values[2] == "huge":
            values = "normal"  # their product would not be a number of any dtype
        tensors[i] = _laid_out(_valued(tensors[i], values, rows, room), layout, rows)
    extras = dict(inputs.extras)
    if "bias" in extras:
        extras["bias"] = _bias(extras["bias"], drawn)
    if drawn.slopes_of_batch and "alibi" in extras:
        batch = drawn.case.B if drawn.case.lengths_q is None else len(drawn.case.lengths_q)
        extras["alibi"] = extras["alibi"] * torch.arange(1.0, batch + 1)[:, None]
    dlse = inputs.dlse
    if drawn.differentiated == "out":
        dlse = None
    if drawn.differentiated == "lse":
        tensors[3] = torch.zeros_like(tensors[3])
    settings = {**inputs.settings, "precise": drawn.precise}
    return Inputs(*tensors, dlse, settings, extras)  # type: ignore[misc]


def _valued(t: Tensor, values: str, rows: int, room: int) -> Tensor:
    """Normal numbers made numbers of another kind. The huge ones leave `room` for the sums that are made of them."""
    wide, limits = t.double(), torch.finfo(t.dtype)
    kinds: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: wide,
        "peaked": lambda: wide * 30,
        "constant": lambda: wide.narrow(rows, 0, min(1, t.shape[rows])).expand(t.shape),
        "zero": lambda: wide * 0,
        # Of fp64 those of fp32, for a run in fp32 is its yardstick and must hold them.
        "denormal": lambda: wide * max(limits.tiny, torch.finfo(torch.float32).tiny if t.dtype == torch.float64 else 0.0),
        "huge": lambda: wide.clamp(-2, 2) * min((limits.max / room) ** 0.5, 1e18),
        "one token": lambda: wide * (torch.arange(t.shape[rows]) == t.shape[rows] // 2).view(-1, *[1] * (-rows - 1)),
        "steps": lambda: wide.round(),
    }
    return kinds[values]().to(t.dtype)


def _laid_out(t: Tensor, layout: str, rows: int) -> Tensor:
    """The values in another memory order; the layouts that repeat one entry also change the values."""
    if layout == "guarded":
        return guard_band(t)
    if layout == "rows":
        return t.transpose(0, 1).contiguous().transpose(0, 1) if rows == -3 else t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "features first":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "every second feature":
        return t.repeat_interleave(2, -1)[..., ::2]
    if layout == "gaps":
        return (
            t.repeat_interleave(3, rows).narrow(rows, 0, 3 * t.shape[rows]).unflatten(rows, (-1, 3)).select(rows, 0)
            if (t.numel())
            else t
        )
    if layout == "odd strides":  # of rows, where the features are even: no address but the first is aligned
        return torch.nn.functional.pad(t, (0, 1))[..., :-1]
    if layout == "overlapping rows" and t.numel():  # each starts one element after the one before
        by_rows = t.movedim(rows, -2)
        line = torch.cat([by_rows[..., 0, :], by_rows[..., 1:, -1]], -1)
        return line.unfold(-1, t.shape[-1], 1).movedim(-2, rows)
    heads = -2 if rows == -3 else 1
    if layout == "one head" and t.shape[heads]:
        return t.narrow(heads, 0, 1).expand(t.shape)
    if layout == "one batch entry" and t.shape[0]:
        return t[:1].expand(t.shape)
    if layout == "one row" and t.shape[rows]:
        return t.narrow(rows, 0, 1).expand(t.shape)
    return t


def _bias(bias: Tensor, drawn: Drawn) -> Tensor:
    bias = bias.to(max(drawn.dtype, drawn.bias_dtype or drawn.dtype, key=lambda dtype: dtype.itemsize))
    rows = torch.arange(bias.shape[-2] if bias.dim() > 1 else 1)[:, None] % 2 == 0
    if drawn.bias_values == "-inf":
        return bias.masked_fill(bias > 0.5, -INF)
    if drawn.bias_values == "-inf rows":
        return bias.masked_fill(rows, -INF)
    if drawn.bias_values == "lowest rows":
        return bias.masked_fill(rows, max(torch.finfo(dtype).min for dtype in (drawn.dtype, bias.dtype, torch.float32)))
    return bias * 1000 if drawn.bias_values == "large" else bias


def without(drawn: Drawn, **fields: Any) -> Drawn:
    """The draw with other fields of its case."""
    return replace(drawn, case=replace(drawn.case, **fields))
