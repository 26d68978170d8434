"""The catalogue: named problems, with the ids of the known bugs that they cover, and what fuzzing has found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from andrea_triton.spec import Window

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
    Case("no keys, dropout", M=3, N=0, D=8, dropout_p=0.2, sinks=True),
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
    Case("packed, no sequences", lengths_q=(), lengths_k=(), slack=2, causal=True),
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
