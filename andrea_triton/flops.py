"""What torch.utils.flop_counter.FlopCounterMode counts for the library's operators: the work on pairs that the band lets through.

A query and a key that it may see cost 2 · (D + DV) operations, and 2 · (3 D + 2 DV) more in the backward, as torch counts its own
attention (for DV = D, 2.5 times the forward). Causal, windows, q_start, key_lengths and packed sequences are counted exactly;
lengths that a fake tensor hides count as the longest they may be. Grouped heads count as query heads. Masks, biases and dropout
take nothing off: their pairs are computed all the same. Your own Score or Mask, backend="reference" and decode_attention do not
go through the operators: for them torch counts what it sees, its own matrix products.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LEFT, MAX_Q = 11, 18  # of the operators' arguments, counted from q
COUNTER = "torch.utils.flop_counter"


def announce() -> None:
    """Tell torch's counter the formulas, if there is one; importing it takes longer than this library does. A counter copies the
    formulas when it is made: those that are counting now are told too."""
    counter = sys.modules.get(COUNTER)
    if counter is None:
        return
    formulas = {
        torch.ops.andrea_triton.forward: forward_count,
        torch.ops.andrea_triton.backward: backward_count,
        torch.ops.andrea_triton.statistics: statistics_count,
    }
    if hasattr(torch.ops.andrea_triton, "decode"):  # once decode.py is imported
        formulas[torch.ops.andrea_triton.decode] = decode_count
    registries = [counter.flop_registry]
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            registries.append(mode.counter.flop_registry)
    for registry in registries:
        for operator, formula in formulas.items():
            registry.setdefault(operator, formula)


def forward_count(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    """Operations of a forward: scores, and their product with the values.

    Args:
        q, k, v, rest: the operator's arguments.
        out_val: its result.

    Returns:
        A multiply-add counts as two.

    Example:
        >>> q = torch.empty(1, 2, 4, 8)
        >>> forward_count(q, q, q, *[None] * 8, None, 0, None, None, None, 0.0, False, 0, 0, "torch")  # 2 heads of 10 pairs
        640
    """
    return 2 * pairs(q, k, v, *rest) * (q.shape[-1] + v.shape[-1])


def backward_count(
    dout: Any, dlse: Any, out: Any, lse: Any, row_max: Any, row_sum: Any, needs: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any,
    out_val: Any = None,
) -> int:  # fmt: skip
    """Operations of a backward: the scores once more, then the five products, whichever gradients are asked for."""
    return 2 * pairs(q, k, v, *rest) * (3 * q.shape[-1] + 2 * v.shape[-1])


def statistics_count(lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    """Operations of the row statistics: the scores once more."""
    return 2 * pairs(q, k, v, *rest) * q.shape[-1]


def decode_count(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Any, capacity: int, alibi: Any, sinks: Any, bias: Any,
                 keep: Any, tree: Any, left: int | None, right: int | None, *_: Any, out_val: Any = None) -> int:  # fmt: skip
    """Operations of a decoding step: of each sequence the keys that it holds, all that fit where nobody knows how many."""
    M, total = q.shape[2], 0
    for n in lengths.tolist() if readable(lengths) else [capacity] * q.shape[0]:
        seen = M * n if right is None else below(M, n, n - M + right + 1)
        total += seen if left is None else seen - below(M, n, n - M - left)
    return 2 * total * q.shape[1] * (q.shape[3] + v.shape[3])


def pairs(*args: Any) -> int:
    """Pairs of a query, of every head and batch entry, and a key that it may see."""
    q, (left, right, q_start) = args[0], args[LEFT : LEFT + 3]
    total = 0
    for M, N, keys, times in sequences(args):
        start = N - M if q_start is None else q_start
        seen = M * keys if right is None else below(M, keys, start + right + 1)
        total += times * (seen if left is None else seen - below(M, keys, start - left))
    return total * q.shape[1]


def sequences(args: tuple[Any, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(queries, keys, keys that are not hidden, how often) of every sequence."""
    q, k, lengths, cu_q, cu_k = args[0], args[1], *args[7:10]
    if cu_q is not None:
        for M, N in zip(differences(cu_q, args[MAX_Q]), differences(cu_k, args[MAX_Q + 1]), strict=True):
            yield M, N, N, 1
    elif lengths is not None and readable(lengths):
        yield from ((q.shape[2], k.shape[2], length, 1) for length in lengths.tolist())
    else:
        yield q.shape[2], k.shape[2], k.shape[2], q.shape[0]


def below(M: int, N: int, first: int) -> int:
    """The sum of min(max(first + i, 0), N) over i = 0 .. M - 1: pairs of a query i and one of N keys j with j < first + i."""
    start = min(max(-first, 0), M)
    end = min(max(N - first, start), M)  # from there on all N
    return (end - start) * first + (end * (end - 1) - start * (start - 1)) // 2 + (M - end) * N


def differences(starts: Tensor, longest: int) -> list[int]:
    """Lengths of packed sequences, at most `longest`, which stands where nobody knows them."""
    return starts.diff().tolist() if readable(starts) else [longest] * (starts.shape[0] - 1)


def readable(t: Tensor) -> bool:
    """Whether a tensor has contents."""
    return not t.is_meta and not isinstance(t, torch._subclasses.FakeTensor)
