"""The generator of the dropout: published vectors, the dense definition, and nothing but positions in it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_triton import dropout_mask
from andrea_triton.kernels.dropout import Dropout, kept, philox

Interpreted = Callable[..., None]
# Known answers of Philox2x32-10 published with Random123 (kat_vectors): counter, key, first word.
KNOWN = [
    ((0x00000000, 0x00000000), 0x00000000, 0xFF1DAE59),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, 0x2C3F628B),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, 0xDD7CE038),
]


@triton.jit
def store_philox(words, out):
    c0, c1, key = (tl.load(words + i + tl.arange(0, 1)).to(tl.uint32) for i in range(3))
    tl.store(out + tl.arange(0, 1), philox(c0, c1, key).to(tl.int64))


@triton.jit
def store_kept(out, dropout, heads, q_start, k_start, M: tl.constexpr, N: tl.constexpr):
    h, b = tl.program_id(0) % heads, tl.program_id(0) // heads
    q, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    keep = kept(dropout, b, h, heads, q_start + q, k_start + k)
    tl.store(out + tl.program_id(0) * M * N + q * N + k, keep)


def mask(seed: object, p: float, interpreted: Interpreted, at: tuple[int, int] = (0, 0), M: int = 8, N: int = 16) -> Tensor:
    out = torch.empty(2, 3, M, N, dtype=torch.bool)
    dropout = Dropout(seed, np.int64(int(p * 2**32)), 1 / (1 - p))
    interpreted(store_kept, out, dropout, 3, *at, grid=(6, 1), M=M, N=N)
    return out


@pytest.mark.parametrize(("counter", "key", "word"), KNOWN)
def test_philox_gives_the_published_words(counter: tuple[int, int], key: int, word: int, interpreted: Interpreted) -> None:
    out = torch.empty(1, dtype=torch.int64)
    interpreted(store_philox, torch.tensor([*counter, key]), out)
    assert out.item() == word


@pytest.mark.parametrize("seed", [0, 7, -1, 2**40 + 5, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("at", [(0, 0), (-5, 3), (2**28 - 20, 2**28 - 40)])
def test_kept_is_the_dense_mask(seed: int, at: tuple[int, int], interpreted: Interpreted) -> None:
    q_pos, k_pos = at[0] + torch.arange(8), at[1] + torch.arange(16)
    wanted = dropout_mask(seed, 0.3, 2, 3, q_pos, k_pos, "cpu")
    assert torch.equal(mask(np.int64(seed), 0.3, interpreted, at), wanted)
    assert torch.equal(mask(torch.tensor([seed]), 0.3, interpreted, at), wanted)


def test_a_tile_is_a_part_of_the_whole(interpreted: Interpreted) -> None:
    whole = mask(np.int64(3), 0.5, interpreted, M=16, N=32)
    assert torch.equal(mask(np.int64(3), 0.5, interpreted, (4, 16), 8, 16), whole[:, :, 4:12, 16:32])


def test_share_of_the_dropped(interpreted: Interpreted) -> None:
    """Within five standard deviations of a fair draw of 24,576 weights."""
    for p in (0.0, 0.1, 0.5, 0.9, 0.9999):
        share = mask(np.int64(1), p, interpreted, M=64, N=64).double().mean().item()
        assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / (6 * 64 * 64)) ** 0.5


def test_other_seeds_heads_and_batches_have_other_masks(interpreted: Interpreted) -> None:
    found = torch.cat([mask(np.int64(seed), 0.5, interpreted, M=16, N=16).flatten(0, 1) for seed in (0, 1, 2**32)])
    assert len({tuple(x.flatten().tolist()) for x in found}) == 18
