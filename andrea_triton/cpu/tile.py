"""One tile of scores: some rows of some heads against all the keys that the band lets them see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from andrea_triton.dropout import kept_weights
from andrea_triton.problem import Problem, accumulator
from andrea_triton.reference import Grid, torch_twin

ROWS = 128  # of a tile: query rows times the query heads of a key head
TILE = 2**19  # scores that a tile holds, unless the rows of one key head have more
INF = float("inf")
MARGIN = 2.0**26  # how far above the smallest normal number a weight must lie, for products with it to be normal too


class Block(NamedTuple):
    """The place of a tile: batch entries, key heads, query heads, rows and keys."""

    b: slice
    h: slice
    hq: slice
    i: slice
    j: slice


Pull = Callable[[Tensor], Tensor]


class Scores(NamedTuple):
    """A tile (b · h, group · rows, keys, and a column for a sink), and what brings a gradient of it back to scale · q·k."""

    tile: Tensor
    pull: Pull | None


def spans(problem: Problem) -> list[tuple[slice, slice]]:
    """Blocks of rows and the keys that these see; rows that see none are in no block, unless they have a sink."""
    left, right = problem.band()
    seen = problem.N if left is None or right is None else min(problem.N, left + right + ROWS)
    rows = max(1, ROWS // problem.group)
    while rows > 32 and 2 * rows * problem.group * seen > TILE:  # two heads, for two threads
        rows //= 2
    found = []
    for first in range(0, problem.M, rows):
        end = min(first + rows, problem.M)
        low = 0 if left is None else max(0, problem.q_start + first - left)
        high = problem.N if right is None else min(problem.N, problem.q_start + end + right)
        if low < high or problem.extras.sinks is not None:
            found.append((slice(first, end), slice(low, max(low, high))))
    return found


def width_of(problem: Problem, j: slice) -> int:
    """Columns of a tile: its keys, and a sink."""
    return j.stop - j.start + (problem.extras.sinks is not None)


def shares(problem: Problem, pieces: list[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
    """Batch entries and key heads to be worked on at a time, such that no tile has more than TILE scores if it can be helped."""
    heads = max(1, TILE // (largest(problem, pieces) * problem.group))
    entries = max(1, heads // max(1, problem.HKV))
    for b in range(0, problem.B, entries):
        for h in range(0, problem.HKV, heads):
            yield slice(b, min(b + entries, problem.B)), slice(h, min(h + heads, problem.HKV))


def largest(problem: Problem, pieces: list[tuple[slice, slice]]) -> int:
    """Most scores of a block of rows of one query head."""
    return max(((i.stop - i.start) * width_of(problem, j) for i, j in pieces), default=1)


def room_for(problem: Problem, pieces: list[tuple[slice, slice]], count: int) -> list[Tensor]:
    """Memory for `count` tiles, each large enough for any block of the problem."""
    heads = max(((b.stop - b.start) * (h.stop - h.start) for b, h in shares(problem, pieces)), default=0)
    size = heads * problem.group * largest(problem, pieces)
    return [torch.empty(size, dtype=accumulator(problem.dtype), device=problem.device) for _ in range(count)]


def query_heads(problem: Problem, h: slice) -> slice:
    """The query heads of some key heads."""
    return slice(h.start * problem.group, h.stop * problem.group)


def rows_of(t: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """A block of a tensor (B, HQ, M, any) as (b · h, group · rows, any)."""
    part, heads = t[block.b, block.hq, block.i], block.h.stop - block.h.start
    batch, query_heads, rows, features = part.shape
    return part.reshape(batch * heads, query_heads // heads * rows, features).to(dtype)


def keys_of(t: Tensor, b: slice, h: slice, dtype: torch.dtype) -> Tensor:
    """Some heads of k or v as (b · h, N, any), contiguous."""
    return t[b, h].to(dtype).flatten(0, 1).contiguous()


def four(t: Tensor, block: Block) -> Tensor:
    """A view (b, query heads, rows, any) of a tile."""
    return t.view(block.b.stop - block.b.start, block.hq.stop - block.hq.start, block.i.stop - block.i.start, t.shape[-1])


def grid(problem: Problem, first_batch: int) -> Grid:
    """The four indices of a dense problem; first_batch is the index of batch entry 0."""
    device = problem.device
    return Grid(
        torch.arange(first_batch, first_batch + problem.B, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.HQ, device=device).view(1, -1, 1, 1),
        torch.arange(problem.q_start, problem.q_start + problem.M, device=device).view(1, 1, -1, 1),
        torch.arange(problem.N, device=device).view(1, 1, 1, -1),
    )


def here(whole: Grid, block: Block) -> Grid:
    """The four indices of a block."""
    b, _, hq, i, j = block
    return Grid(whole.batch[b], whole.head[:, hq], whole.q_pos[:, :, i], whole.k_pos[..., j])


def hide(problem: Problem, tile: Tensor, block: Block, places: Grid, value: float) -> None:
    """Write a value over what the queries may not see. tile: (b, query heads, rows, keys)."""
    extras, (left, right), (b, _, hq, i, j) = problem.extras, problem.band(), block
    q_pos, k_pos = places.q_pos, places.k_pos
    if left is not None:  # the last query hides most
        edge = max(0, problem.q_start + i.stop - 1 - left - j.start)
        tile[..., :edge].masked_fill_(k_pos[..., :edge] < q_pos - left, value)
    if right is not None:  # the first does
        edge = max(0, problem.q_start + i.start + right + 1 - j.start)
        tile[..., edge:].masked_fill_(k_pos[..., edge:] > q_pos + right, value)
    if extras.key_lengths is not None:
        tile.masked_fill_(k_pos >= extras.key_lengths[b, None, None, None], value)
    if extras.keep is not None:
        tile.masked_fill_(~extras.keep[b, hq, i, j], value)
    if extras.mask is not None:
        seen = torch_twin("mask", extras.mask.torch_fn)(*places, *extras.mask.args)
        tile.masked_fill_(~seen, value)


def scores(problem: Problem, q: Tensor, k: Tensor, block: Block, room: Tensor, places: Grid, learn: bool) -> Scores:
    """The scores of a block, -inf where hidden, the sinks in one more column.

    A hidden score is 0 before anything curved is made of it, so that a NaN in a hidden key goes nowhere.

    Args:
        problem: a dense problem.
        q: (b · h, group · rows, D), the block's, in the dtype of sums.
        k: (b · h, keys, D), the block's, likewise.
        block: the place.
        room: memory for the tile, one dim.
        places: the indices of the block.
        learn: whether gradients will come.
    """
    extras, cap, (batches, rows, _), keys = problem.extras, problem.spec.softcap, q.shape, k.shape[1]
    width = width_of(problem, block.j)
    whole = room[: batches * rows * width].view(batches, rows, width)
    product, tile = whole[..., :keys], four(whole, block)[..., :keys]
    torch.bmm(q, k.mT, out=product).mul_(scale_of(problem))
    pulls: list[Pull] = []
    if cap is not None or extras.score is not None:
        hide(problem, tile, block, places, 0.0)
    if cap is not None:
        bent = tile.div_(cap).tanh_()
        if learn:
            slope = 1 - bent * bent
            pulls.append(lambda grad: grad.mul_(slope))
        bent.mul_(cap)
    if extras.score is not None:
        pulls += user_score(problem, tile, places, learn)
    if extras.slopes is not None:
        distance = (places.q_pos - places.k_pos).abs().to(tile.dtype)
        tile.addcmul_(extras.slopes[block.b, block.hq, None, None].to(tile.dtype), distance, value=-1)
    if extras.bias is not None:
        tile += extras.bias[block.b, block.hq, block.i, block.j]
    hide(problem, tile, block, places, -INF)
    if extras.sinks is not None:
        column = extras.sinks[block.hq].to(tile.dtype)
        four(whole, block)[..., keys] = column.masked_fill(column == INF, -INF)[:, None]

    def pull(grad: Tensor) -> Tensor:
        for step in reversed(pulls):
            grad = step(grad)
        hide(problem, grad, block, places, 0.0)
        return grad

    return Scores(whole, pull if pulls else None)


def user_score(problem: Problem, tile: Tensor, places: Grid, learn: bool) -> list[Pull]:
    """Put the user's score in the place of the tile; autograd of torch_fn brings gradients back."""
    score = problem.extras.score
    assert score is not None
    function = torch_twin("score", score.torch_fn)
    if not learn:
        tile.copy_(function(tile.clone(), *places, *score.args))
        return []
    with torch.enable_grad():
        leaf = tile.clone().requires_grad_()
        changed = function(leaf, *places, *score.args)
    tile.copy_(changed.detach())

    def pull(grad: Tensor) -> Tensor:
        if not changed.requires_grad:
            return torch.zeros_like(grad)
        (found,) = torch.autograd.grad(changed, leaf, grad.to(changed.dtype).expand_as(changed), allow_unused=True)
        return torch.zeros_like(grad) if found is None else grad.copy_(found)

    return [pull]


def floor_of(problem: Problem) -> float:
    """The weight at and below which weights become 0, for a processor takes a hundred times longer over denormal numbers.

    A user's score may have any slope, which no bound of what is lost would hold: there it is 0.
    """
    return 0.0 if problem.extras.score is not None else torch.finfo(accumulator(problem.dtype)).tiny * MARGIN


def reach(t: Tensor | None) -> float:
    """The largest magnitude in a tensor, NaN if one is."""
    if t is None or t.numel() == 0:
        return 0.0
    low, high = (x.item() for x in torch.aminmax(t))
    return float(max(-low, high))


def kept(problem: Problem, places: Grid) -> Tensor | None:
    """Which weights of a block a dropout keeps, (b, query heads, rows, keys); None without one."""
    p, seed = problem.spec.dropout_p, problem.extras.seed
    if p == 0.0 or seed is None:
        return None
    row_of_heads = places.batch * problem.HQ + places.head
    return kept_weights(seed, p, row_of_heads, places.q_pos, places.k_pos)


def closed(problem: Problem, hq: slice) -> Tensor | None:
    """(query heads, 1): the heads whose sink, +inf, takes all the weight; None where there is none."""
    sinks = problem.extras.sinks
    if sinks is None or not bool((sinks[hq] == INF).any()):
        return None
    return (sinks[hq] == INF)[:, None]


def scale_of(problem: Problem) -> float:
    """The factor of q·k; of no features, whose default would be 1 / 0, none."""
    return problem.scale if problem.D > 0 else 0.0
