"""What tests and bench share: inputs, a catalogue of named cases, and the one rule of when a result is accurate.

The rule has no tolerance to tune. The oracle is the reference in fp64 on the inputs as already rounded, the yardstick
the reference in the dtype of the inputs, and a result passes when its error is at most twice the yardstick's, plus the
rounding of the result itself.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from andrea_triton.problem import accumulator, make_problem
from andrea_triton.reference import reference
from andrea_triton.spec import Window, make_spec

Layout = Literal["heads", "rows", "guarded"]


@dataclass(frozen=True)
class Case:
    """A named problem to try; make_inputs draws its tensors.

    Args:
        name: what it is about, with the ids of the known bugs that it covers.
        B: batch.
        HQ: query heads.
        HKV: key heads; None means HQ.
        M: queries.
        N: keys; None means M.
        D: features of q and k.
        DV: features of v; None means D.
        causal: as in make_spec, like window, q_start, scale, softcap and dropout_p.
        bias: shape of an additive bias with gradient, or None.
        hidden: fraction of the (query, key) pairs that a bool mask hides, or None.
        alibi: whether the heads have slopes.
        sinks: whether the heads have sinks.
        key_lengths: keys of each batch entry, or None.
        lengths_q: queries of each packed sequence, or None for a dense case; B, M and N are then unused.
        lengths_k: keys of each packed sequence.
        slack: packed rows after the last sequence.
        gain: factor of q and k; a large one makes peaked rows.
        layout: "heads" (B, H, T, D) in memory, "rows" (B, T, H, D) in memory, "guarded" inside NaN.
    """

    name: str
    B: int = 1
    HQ: int = 2
    HKV: int | None = None
    M: int = 64
    N: int | None = None
    D: int = 32
    DV: int | None = None
    causal: bool = False
    window: Window = None
    q_start: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    bias: tuple[int, ...] | None = None
    hidden: float | None = None
    alibi: bool = False
    sinks: bool = False
    key_lengths: tuple[int, ...] | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] = ()
    slack: int = 0
    gain: float = 1.0
    layout: Layout = "heads"


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


class Results(NamedTuple):
    """What a call gives, and the gradients of sum(out · dout) + sum(lse · dlse); None where there is no such input."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


Attend = Callable[[Inputs], tuple[Tensor, Tensor]]


CASES = (
    Case("C17 one token", HQ=12, M=1, D=64),
    *(Case(f"C11 T={t} full", M=t) for t in (17, 63, 127, 129, 255)),
    *(Case(f"C11 T={t} causal", M=t, causal=True) for t in (17, 63, 127, 129, 255)),
    Case("C05 one query, bottom-right", HQ=1, M=1, N=5, D=8, causal=True),
    Case("C05 one query, top-left", HQ=1, M=1, N=5, D=8, causal=True, q_start=0),
    Case("C06 more queries than keys, bottom-right", HQ=1, M=5, N=2, D=8, causal=True),
    Case("C06 more queries than keys, top-left", HQ=1, M=5, N=2, D=8, causal=True, q_start=0),
    Case("fewer queries than keys", M=33, N=129, causal=True),
    Case("empty rows", M=129, N=33, causal=True),
    Case("C12 4 heads on 2", HQ=4, HKV=2, causal=True),
    Case("6 heads on 1", HQ=6, HKV=1, M=65, causal=True),
    Case("C19 one query of D=128", B=4, M=1, N=20, D=128),
    Case("C20 T=42", M=42, causal=True),
    Case("C21 no batch", B=0, M=4, D=8),
    Case("C21 no heads", HQ=0, M=4, D=8),
    Case("C21 no queries", M=0, N=4, D=8),
    Case("C21 no keys", M=3, N=0, D=8),
    Case("C28 negative scale", scale=-0.35, causal=True),
    Case("C28 zero scale", scale=0.0, causal=True),
    Case("C28 peaked rows", gain=30.0, causal=True),
    Case("C34 D=8 DV=16", D=8, DV=16, causal=True),
    Case("C34 D=64 DV=32", D=64, DV=32, causal=True),
    *(Case(f"C35 D={d}", M=33, D=d, causal=True, layout="guarded") for d in (1, 24, 40, 59, 111)),
    Case("D=256", M=33, D=256, causal=True),
    Case("(B, T, H, D) memory", B=2, HQ=4, HKV=2, M=65, causal=True, layout="rows"),
    Case("C31 window of 4", M=8, causal=True, window=4),
    Case("window to both sides", M=65, N=129, window=(16, 3)),
    Case("window left open", M=65, window=(None, 3)),
    Case("C29 softcap", softcap=1.0, causal=True),
    Case("bool mask", M=33, hidden=0.3, causal=True),
    *(Case(f"C26 bias {s}", B=2, M=9, bias=s) for s in ((1, 1, 9, 9), (2, 1, 1, 9), (1, 2, 9, 9), (9, 9), (2, 1, 1))),
    Case("C27 scale and bias", M=33, scale=0.3, bias=(2, 33, 33), causal=True),
    Case("ALiBi", M=65, alibi=True, causal=True),
    Case("C30 sinks and empty rows", M=65, N=33, sinks=True, causal=True),
    Case("key lengths", B=3, key_lengths=(0, 17, 64)),
    Case("dropout", M=65, dropout_p=0.2, causal=True),
    Case("C22 packed with slack", lengths_q=(5, 0, 6), lengths_k=(5, 0, 6), slack=5, causal=True),
    Case("packed across", HQ=4, HKV=2, lengths_q=(1, 17, 40), lengths_k=(33, 0, 21), causal=True),
    Case("many at once", B=2, HQ=4, HKV=2, M=40, N=65, window=30, softcap=5.0, bias=(65,), sinks=True, dropout_p=0.1),
)  # fmt: skip
AXES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({}, {"causal": True}, {"causal": True, "window": 9}, {"window": (7, 2)}),
    ({}, {"bias": ()}, {"alibi": True}, {"softcap": 2.0}),
    ({}, {"sinks": True}),
    ({}, {"dropout_p": 0.2}),
    ({"HKV": 4}, {"HKV": 2}),
    ({"M": 33}, {"M": 20, "N": 45}, {"M": 45, "N": 20}, {"lengths_q": (20, 0, 7), "lengths_k": (33, 5, 7)}),
    tuple({"dtype": dtype} for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
)


def pairwise_cases() -> Iterator[tuple[Case, torch.dtype]]:
    """Cases that together hold every pair of entries of AXES at least once, but for a bias of packed sequences.

    Returns:
        (case, dtype), in the same order every time.

    Example:
        >>> sum(1 for _ in pairwise_cases()) < 40
        True
    """
    places = list(itertools.combinations(range(len(AXES)), 2))
    choices = [c for c in itertools.product(*(range(len(axis)) for axis in AXES)) if not (c[1] == 1 and c[5] == 3)]
    open_pairs = {(a, b, choice[a], choice[b]) for choice in choices for a, b in places}
    while open_pairs:
        best = max(choices, key=lambda c: sum((a, b, c[a], c[b]) in open_pairs for a, b in places))
        open_pairs -= {(a, b, best[a], best[b]) for a, b in places}
        fields: dict[str, Any] = {}
        for axis, i in zip(AXES, best, strict=True):
            fields |= axis[i]
        if "bias" in fields:
            fields["bias"] = (fields["M"], fields.get("N", fields["M"]))
        dtype = fields.pop("dtype")
        name = " ".join(f"{field}={value}" for field, value in fields.items())
        yield Case(name, B=1, HQ=4, D=16, **fields), dtype


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Draw the tensors of a case: random normal, rounded to the dtype, the same for a seed on every device.

    Args:
        case: the case.
        dtype: of q, k, v, bias and sinks.
        device: where the tensors live.
        seed: of the random numbers, and of the dropout.

    Returns:
        The Inputs.

    Example:
        >>> inputs = make_inputs(Case("small", M=3, N=5, D=8, causal=True), torch.float32)
        >>> inputs.q.shape, inputs.k.shape, inputs.settings["causal"]
        (torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 5, 8]), True)
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...], gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * gain).to(device, dtype)

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
        chance = torch.rand((case.B, 1, M, N), generator=generator, dtype=torch.float64)
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


def attend_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) by the reference, in the dtype of the inputs."""
    problem = make_problem(inputs.q, inputs.k, inputs.v, make_spec(**inputs.settings), **inputs.extras)
    return reference(problem, inputs.q, inputs.k, inputs.v)


def run(inputs: Inputs, attend: Attend) -> Results:
    """Call a function on the inputs, whose tensors stay where they lie in memory, and take every gradient."""
    extras = dict(inputs.extras)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    for name in ("bias", "sinks"):
        if name in extras:
            extras[name] = extras[name].detach().requires_grad_()
    out, lse = attend(inputs._replace(q=q, k=k, v=v, extras=extras))
    results, flowing = ([out], [inputs.dout]) if inputs.dlse is None else ([out, lse], [inputs.dout, inputs.dlse])
    learned = [q, k, v, *(extras[name] for name in ("bias", "sinks") if name in extras)]
    dq, dk, dv, *rest = torch.autograd.grad(results, learned, flowing, allow_unused=True, materialize_grads=True)
    found = iter(rest)
    dbias, dsinks = (next(found) if name in extras else None for name in ("bias", "sinks"))
    return Results(out.detach(), lse.detach(), dq, dk, dv, dbias, dsinks)


def check(inputs: Inputs, attend: Attend, name: str) -> Results:
    """Fail unless a function gives out, lse and every gradient as accurately as the rule asks.

    Args:
        inputs: the call; its dtype is the one that is judged.
        attend: the function that is judged.
        name: of the case, for the message.

    Returns:
        What the function gave.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, or not accurate.

    Example:
        >>> check(make_inputs(Case("small", M=5, D=8), torch.float32), attend_reference, "small").out.shape
        torch.Size([1, 2, 5, 8])
    """
    exact, got = run(cast(inputs, torch.float64), attend_reference), run(inputs, attend)
    assert got.out.dtype == inputs.q.dtype, f"{name}: out is {got.out.dtype}, wanted {inputs.q.dtype}"
    errors = eager_errors(inputs, exact)
    for field, tensor, wanted, eager_error in zip(Results._fields, got, exact, errors, strict=True):
        if tensor is not None and wanted is not None:
            _assert_within(tensor, wanted, eager_error, tensor.dtype, f"{name}: {field}")
    return got


def assert_accurate(got: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype, name: str) -> None:
    """Fail unless err(got) <= 2 err(eager) + rounding of the result, err being max |x - exact| over the tensor.

    Args:
        got: the result to be judged.
        eager: the reference's result in the dtype of the run.
        exact: the reference's result in fp64 on the same rounded inputs.
        dtype: of the result; its rounding is eps(dtype) · max |exact|.
        name: of the result, for the message.

    Raises:
        AssertionError: not accurate, not finite where exact is finite, or not equal where exact is infinite.

    Example:
        >>> one = torch.ones(3)
        >>> assert_accurate(one + 1e-7, one, one, torch.float32, "out")
        >>> assert_accurate(one + 1e-6, one, one, torch.float32, "out")
        Traceback (most recent call last):
        AssertionError: out: error 9.54e-07 is over 1.19e-07 = 2 · 0.00e+00 (eager) + 1.19e-07 (rounding), at (0,)
    """
    _assert_within(got, exact, error_of(eager, exact), dtype, name)


def _assert_within(got: Tensor, exact: Tensor, eager_error: float, dtype: torch.dtype, name: str) -> None:
    """assert_accurate for an eager error that is already known."""
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    assert eager_error < float("inf"), f"{name}: the eager run is not finite here, so it measures nothing"
    exact = exact.double()
    finite = exact.isfinite()
    rounding = torch.finfo(dtype).eps * float(exact[finite].abs().max()) if finite.any() else 0.0
    allowed, found = 2 * eager_error + rounding, error_of(got, exact)
    if found <= allowed:
        return
    worst = tuple(int(i) for i in torch.unravel_index(_distance(got, exact).argmax(), exact.shape))
    raise AssertionError(
        f"{name}: error {found:.2e} is over {allowed:.2e} = 2 · {eager_error:.2e} (eager) + {rounding:.2e} (rounding), at {worst}"
    )


def error_of(x: Tensor, exact: Tensor) -> float:
    """max |x - exact| over the tensor, 0 for a tensor without elements."""
    return float(_distance(x, exact).max()) if exact.numel() else 0.0


def _distance(x: Tensor, exact: Tensor) -> Tensor:
    """|x - exact| in fp64, 0 where both are the same or both NaN, inf where only one of them is finite."""
    x, exact = x.double(), exact.double()
    same = (x == exact) | (x.isnan() & exact.isnan())
    return (x - exact).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))


def eager_errors(inputs: Inputs, exact: Results) -> list[float]:
    """err(eager) of every result. The eager fp64 run is the oracle itself: fp64 is asked to be 2**26 times
    closer than fp32 has to be, which nothing that passes through fp32 is."""
    if inputs.q.dtype == torch.float64:
        narrow = cast(inputs, torch.float32)
        errors = eager_errors(narrow, run(cast(narrow, torch.float64), attend_reference))
        return [error * 2.0**-26 for error in errors]
    eager = run(inputs, attend_reference)
    return [0.0 if x is None or y is None else error_of(x, y) for x, y in zip(eager, exact, strict=True)]


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The same values in the memory order of the layout."""
    if layout == "guarded":
        return guard_band(tensor)
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if layout == "rows" else tensor
