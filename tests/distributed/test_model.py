"""A small model that is trained on two ranks, each with its part of every sequence, has the losses of one process."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from andrea_triton import testing
from andrea_triton.distributed import ring_attention, shard
from andrea_triton.functional import attention
from tests.distributed.ranks import Ranks

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS = 23, 32, 4, 48, 2, 6
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Total = Callable[[Iterable[Tensor]], None]


class Block(nn.Module):
    """Attention of 4 heads on 2, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2).split([HEADS, HEADS // 2, HEADS // 2], 1)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(functional.layer_norm(x, (WIDTH,)))))


class Model(nn.Module):
    """Two blocks between an embedding and logits; it has no idea of ranks, for it is told positions and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.logits = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.logits(x)


def train(
    dtype: torch.dtype, part: Callable[[Tensor], Tensor], attend: Attend, total: Callable[[Iterable[Tensor]], None]
) -> Tensor:
    """The loss of every step. part: a rank's share of (B, T); total: sums over the ranks in place."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Model().double().to(dtype)
    learner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions = part(torch.arange(LENGTH)[None])
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        tokens, labels = part(batch[:, :-1]), part(batch[:, 1:])
        logits = model(tokens, positions, attend)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * LENGTH)
        learner.zero_grad()
        loss.backward()
        seen = loss.detach().clone()
        total([seen, *(p.grad for p in model.parameters() if p.grad is not None)])
        learner.step()
        losses.append(seen)
    return torch.stack(losses)


def train_on_ranks(group: Any, dtype: torch.dtype, layout: Any) -> list[float]:
    """The losses of training with the ring."""

    def total(tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            dist.all_reduce(t, group=group)

    return train(
        dtype,
        lambda t: shard(t, group=group, layout=layout),
        lambda q, k, v: ring_attention(q, k, v, group=group, layout=layout, causal=True),
        total,
    ).tolist()


def train_alone(dtype: torch.dtype) -> Tensor:
    """The losses of training in one process."""
    return train(dtype, lambda t: t, lambda q, k, v: attention(q, k, v, causal=True, backend="reference"), lambda tensors: None)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_training_gives_the_losses_of_one_process(ranks: Ranks, layout: str) -> None:
    exact, eager = train_alone(torch.float64), train_alone(torch.float32)
    assert exact[-1] < exact[0]
    for got in ranks.run(train_on_ranks, 2, torch.float32, layout):
        testing.assert_accurate(torch.tensor(got), eager, exact, torch.float32, f"losses, {layout}")
