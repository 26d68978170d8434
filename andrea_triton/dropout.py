"""Which weights a dropout keeps, in torch: the twin of kernels/dropout.py, bit for bit."""

import torch
from torch import Tensor

PHILOX_MULTIPLIER = 0xD256D193
PHILOX_KEY_STEP = 0x9E3779B9
PHILOX_ROUNDS = 10
WORD = 0xFFFFFFFF


def dropout_mask(
    seed: int | Tensor,
    p: float,
    batch: int,
    heads: int,
    q_pos: Tensor,
    k_pos: Tensor,
    device: torch.device | str,
    *,
    first_batch: int = 0,
) -> Tensor:
    """Which weights a dropout of probability p keeps: a function of seed, batch, head and the two positions alone.

    Args:
        seed: 64 bits, an int or an int64 tensor of one element.
        p: probability that a weight is dropped, in [0, 1).
        batch: B, the number of batch entries.
        heads: HQ, the number of query heads.
        q_pos: (M,) integer positions of the queries, q_start included.
        k_pos: (N,) integer positions of the keys.
        device: where the mask is made.
        first_batch: index of the first batch entry; a packed sequence is the batch entry of its own index.

    Returns:
        (B, HQ, M, N) bool, True where the weight is kept.

    Raises:
        TypeError: seed is neither an int nor a tensor.

    Source:
        Philox2x32-10 in Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).

    Example:
        >>> mask = dropout_mask(7, 0.25, 1, 2, torch.arange(64), torch.arange(64), "cpu")
        >>> mask.shape, round(mask.double().mean().item(), 2)
        (torch.Size([1, 2, 64, 64]), 0.75)
    """
    row_of_heads = torch.arange(first_batch * heads, (first_batch + batch) * heads, device=device).view(batch, heads, 1, 1)
    q_pos, k_pos = q_pos.to(device, torch.int64).view(-1, 1), k_pos.to(device, torch.int64).view(1, -1)
    return kept_weights(seed, p, row_of_heads, q_pos, k_pos)


def kept_weights(seed: int | Tensor, p: float, row_of_heads: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """dropout_mask for any part of the matrix: batch · HQ + head and the positions, int64, broadcast against each other."""
    if not isinstance(seed, Tensor):
        seed = torch.full((), seed if seed < 2**63 else seed - 2**64, dtype=torch.int64, device=q_pos.device)
    seed = seed.reshape(())
    key = philox(row_of_heads & WORD, (seed >> 32) & WORD, seed & WORD)
    return philox(q_pos & WORD, k_pos & WORD, key) >= int(p * 2**32)


def philox(first: Tensor, second: Tensor, key: Tensor) -> Tensor:
    """The first word of Philox2x32-10.

    Args:
        first: int64, counter word 0, in [0, 2**32).
        second: int64, counter word 1, broadcastable to it.
        key: int64, likewise.

    Returns:
        int64 in [0, 2**32), in the common shape.

    Source:
        Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).

    Example:
        >>> zero = torch.tensor(0)
        >>> hex(philox(zero, zero, zero).item())
        '0xff1dae59'
    """
    for _ in range(PHILOX_ROUNDS):
        product = first * PHILOX_MULTIPLIER
        first, second = ((product >> 32) & WORD) ^ key ^ second, product & WORD
        key = (key + PHILOX_KEY_STEP) & WORD
    return first
