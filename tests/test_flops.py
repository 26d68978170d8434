"""What torch's FlopCounterMode says of a call: two operations for each product of the pairs that the band lets through."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from andrea_triton import attention, varlen_attention
from andrea_triton.cache import KVCache
from andrea_triton.decode import decode_attention
from andrea_triton.flops import below
from andrea_triton.integrations.sdpa import replace_sdpa
from andrea_triton.nn import CausalSelfAttention

B, HQ, HKV, M, N, D, DV = 2, 4, 2, 7, 9, 8, 6
CASES: list[dict[str, Any]] = [
    {}, {"causal": True}, {"causal": True, "q_start": 0}, {"causal": True, "q_start": 20}, {"causal": True, "q_start": -4},
    {"window": (2, 1)}, {"window": 3, "causal": True}, {"window": (None, 2), "q_start": 1}, {"window": (3, None)},
    {"key_lengths": torch.tensor([3, 9])}, {"key_lengths": torch.tensor([0, 5]), "causal": True, "window": 4},
]  # fmt: skip


def tensors(grad: bool = False) -> list[Tensor]:
    shapes = (B, HQ, M, D), (B, HKV, N, D), (B, HKV, N, DV)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def seen(causal: bool = False, window: Any = None, q_start: int | None = None, key_lengths: Tensor | None = None) -> int:
    """Pairs of all heads, one by one."""
    left, right = window if isinstance(window, tuple) else (None if window is None else window - 1,) * 2
    right = 0 if causal else right
    start, lengths = N - M if q_start is None else q_start, [N] * B if key_lengths is None else key_lengths.tolist()
    return HQ * sum(
        (left is None or i + start - j <= left) and (right is None or j - i - start <= right)
        for length in lengths for i in range(M) for j in range(length)
    )  # fmt: skip


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_d47_forward_and_backward_are_counted_exactly(settings: dict[str, Any]) -> None:
    inputs = tensors(grad=True)
    with FlopCounterMode(display=False) as forward:
        out = attention(*inputs, **settings)
    assert isinstance(out, Tensor)
    assert forward.get_total_flops() == 2 * seen(**settings) * (D + DV)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * seen(**settings) * (3 * D + 2 * DV)


def test_full_attention_is_counted_as_torch_counts_its_own() -> None:
    inputs = tensors(grad=True)
    shapes = [tuple(t.shape) for t in inputs]
    out = attention(*inputs)  # outside: only the backward is counted
    assert isinstance(out, Tensor)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == sdpa_backward_flop_count(tuple(out.shape), *shapes)
    with FlopCounterMode(display=False) as forward:
        attention(*inputs)
        attention(*inputs, return_stats=True)
    assert forward.get_total_flops() == 2 * sdpa_flop_count(*shapes) + 2 * seen() * D


def test_gradients_under_the_counter_are_those_without() -> None:
    bias, sinks = torch.randn(HQ, M, N, requires_grad=True), torch.randn(HQ, requires_grad=True)
    inputs = [*tensors(grad=True), bias, sinks]
    out = attention(*inputs[:3], bias=bias, sinks=sinks)
    assert isinstance(out, Tensor)
    wanted = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_packed_sequences() -> None:
    starts, x = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.randn(8, 2, 8)
    with FlopCounterMode(display=False) as counter:
        varlen_attention(x, x, x, starts, starts, 5, 5, causal=True)
    assert counter.get_total_flops() == 2 * 2 * (6 + 15) * 16
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        fake, hidden = mode.from_tensor(x), mode.from_tensor(starts)
        varlen_attention(fake, fake, fake, hidden, hidden, 5, 5, causal=True)
    assert counter.get_total_flops() == 2 * 2 * 3 * 15 * 16  # three sequences, each of 5 for all that is known


def test_a_module_and_a_replaced_call() -> None:
    layer, x = CausalSelfAttention(16, 2), torch.randn(1, 5, 16)
    inside = 2 * 2 * 15 * 16
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 4 * 2 * 5 * 16 * 16 + inside
    assert counter.get_flop_counts()["CausalSelfAttention"][torch.ops.andrea_triton.forward] == inside
    q = torch.randn(1, 2, 5, 8)
    with FlopCounterMode(display=False) as counter, replace_sdpa():
        scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counter.get_total_flops() == inside


def test_below_is_the_sum() -> None:
    for rows in range(5):
        for keys in range(5):
            for first in range(-6, 8):
                assert below(rows, keys, first) == sum(min(max(first + i, 0), keys) for i in range(rows))


@pytest.mark.parametrize("window", [None, 3])
def test_a_decoding_step_counts_the_keys_that_are_there(window: int | None) -> None:
    """D47: by the lengths, not by the capacity."""
    cache, M, D = KVCache(2, 2, 16, 8), 2, 8
    k = torch.randn(2, 2, 6, D)
    cache.append(k, k, rows=[6, 4])
    q = torch.randn(2, 4, M, D)
    with FlopCounterMode(display=False) as counter:
        decode_attention(q, cache, window=window)
    seen = sum(min(n - M + i + 1, window or n) for n in (6, 4) for i in range(M))
    assert counter.get_total_flops() == 2 * seen * 4 * (D + D)
