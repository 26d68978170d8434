"""Who sees whom, and which blocks are visited, against all pairs counted one by one. No block is visited without need, but that
one that sees nothing may look at one block."""

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_triton.kernels.bands import (
    ALL,
    EDGES,
    FULL,
    Band,
    block_at,
    bounds,
    full_blocks,
    key_span,
    query_span,
    round_down,
    round_up,
    visible,
)
from andrea_triton.kernels.views import Seq

Interpreted = Callable[..., None]
OPEN = [(None, None), (None, 1), (1, None), (1, 1)]
BLOCKS = [(4, 4), (8, 4), (4, 8)]


class Shape(NamedTuple):
    """One small problem, and the block whose span is asked."""

    M: int
    N: int
    q_start: int
    left: int
    right: int
    block: int


@triton.jit
def store_visible(out, band, q_start, N, M: tl.constexpr, COLS: tl.constexpr):
    q_pos, k_pos = q_start + tl.arange(0, M)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(out + tl.arange(0, M)[:, None] * COLS + k_pos, visible(band, q_pos, k_pos, N))


@triton.jit
def store_rounded(x, down, up, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(down + at, round_down(tl.load(x + at), BLOCK))
    tl.store(up + at, round_up(tl.load(x + at), BLOCK))


@triton.jit
def shape_at(shapes):
    """(M, N, q_start, left, right, block) of this program."""
    p = shapes + tl.program_id(0) * 6
    return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 5)


@triton.jit
def mark(visits, span, BLOCK: tl.constexpr, SLOTS: tl.constexpr, PART: tl.constexpr, BOTH: tl.constexpr):
    """Count a visit of every block that a loop over a part of the span goes to."""
    first, last = bounds(span, BLOCK, PART, BOTH)
    for i in tl.range(first, last, BLOCK):
        block, edge = block_at(span, i, BLOCK, PART, BOTH)
        at = visits + (tl.program_id(0) * 2 + edge) * SLOTS + block
        tl.store(at, tl.load(at) + 1)


@triton.jit
def mark_all(visits, span, BLOCK: tl.constexpr, SLOTS: tl.constexpr, ONE_LOOP: tl.constexpr, BOTH: tl.constexpr):
    """The visits of one loop, or of two."""
    if ONE_LOOP:
        mark(visits, span, BLOCK, SLOTS, ALL, BOTH)
    else:
        mark(visits, span, BLOCK, SLOTS, FULL, BOTH)
        mark(visits, span, BLOCK, SLOTS, EDGES, BOTH)


@triton.jit
def visit_keys(shapes, visits, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
               ONE_LOOP: tl.constexpr):  # fmt: skip
    _M, N, q_start, own_left, own_right, block = shape_at(shapes)
    band = Band(None if left is None else own_left, None if right is None else own_right)
    span = key_span(band, q_start + block * BLOCK_M, N, BLOCK_M, BLOCK_N)
    mark_all(visits, span, BLOCK_N, SLOTS, ONE_LOOP, left is not None)


@triton.jit
def visit_queries(shapes, visits, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
                  ONE_LOOP: tl.constexpr):  # fmt: skip
    M, N, q_start, own_left, own_right, block = shape_at(shapes)
    band = Band(None if left is None else own_left, None if right is None else own_right)
    span = query_span(band, block * BLOCK_N, Seq(M, N, q_start, 0, 0, 0, 0), BLOCK_M, BLOCK_N)
    mark_all(visits, span, BLOCK_M, SLOTS, ONE_LOOP, True)


@triton.jit
def count_tiles(out, band, M, N, q_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    full, edge = 0, 0
    for row in range(0, M, BLOCK_M):
        span = key_span(band, q_start + row, N, BLOCK_M, BLOCK_N)
        first, end = full_blocks(span, BLOCK_N)
        full += tl.cdiv(end - first, BLOCK_N)
        edge += tl.cdiv(tl.maximum(span.hi - span.lo - (end - first), 0), BLOCK_N)
    tl.store(out, full)
    tl.store(out + 1, edge)


def sees(left: int | None, right: int | None, q_pos: int, k_pos: int) -> bool:
    return (left is None or k_pos >= q_pos - left) and (right is None or k_pos <= q_pos + right)


def shapes_of(rows_of_blocks: str, size: int, count: int) -> list[Shape]:
    """Small problems, drawn the same every time, the plain ones among them."""
    draw = random.Random(size)
    found = [Shape(M, N, N - M, 0, 0, 0) for M, N in itertools.product((1, 3, 4, 9), repeat=2)]
    while len(found) < count:
        M, N = draw.randint(1, 21), draw.randint(0 if rows_of_blocks == "M" else 1, 21)
        q_start = draw.choice((N - M, 0, draw.randint(-12, 12)))
        last = (M if rows_of_blocks == "M" else N) - 1
        left, right = draw.choice((0, 1, 3, draw.randint(0, 24))), draw.choice((0, 0, 2, draw.randint(0, 24)))
        found.append(Shape(M, N, q_start, left, right, draw.randint(0, last // size)))
    return found


def visits_of(
    kernel: object, shapes: list[Shape], opened: tuple[int | None, int | None], blocks: tuple[int, int],
    one_loop: bool, interpreted: Interpreted,
) -> Tensor:  # fmt: skip
    """(shape, full or edge, first element of a block) -> how often it is visited."""
    visits = torch.zeros(len(shapes), 2, 64, dtype=torch.int32)
    table = torch.tensor(shapes, dtype=torch.int32)
    sides = {"BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "SLOTS": 64, "ONE_LOOP": one_loop}
    interpreted(kernel, table, visits, *opened, grid=(len(shapes), 1), **sides)
    return visits


@pytest.mark.parametrize("opened", OPEN)
def test_visible(opened: tuple[int | None, int | None], interpreted: Interpreted) -> None:
    for left, right, q_start, N in itertools.product((0, 3), (0, 2), (-9, 0, 5), (0, 7, 16)):
        out = torch.empty(8, 16, dtype=torch.bool)
        band = Band(None if opened[0] is None else left, None if opened[1] is None else right)
        interpreted(store_visible, out, band, q_start, N, M=8, COLS=16)
        wanted = [[k < N and sees(*band, q_start + q, k) for k in range(16)] for q in range(8)]
        assert out.tolist() == wanted


def test_rounding(interpreted: Interpreted) -> None:
    x = torch.arange(-16, 48, dtype=torch.int32)
    down, up = torch.empty_like(x), torch.empty_like(x)
    interpreted(store_rounded, x, down, up, SIZE=64, BLOCK=8)
    assert torch.equal(down, x.clamp(min=0) // 8 * 8)
    assert torch.equal(up, (x.clamp(min=0) + 7) // 8 * 8)


@pytest.mark.parametrize("opened", OPEN)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("one_loop", [False, True])
def test_key_span_visits_what_is_seen_once(
    one_loop: bool, blocks: tuple[int, int], opened: tuple[int | None, int | None], interpreted: Interpreted
) -> None:
    (rows, cols), shapes = blocks, shapes_of("M", blocks[0], 90)
    visits = visits_of(visit_keys, shapes, opened, blocks, one_loop, interpreted)
    for shape, (full, edge) in zip(shapes, visits.tolist(), strict=True):
        left, right = None if opened[0] is None else shape.left, None if opened[1] is None else shape.right
        first = shape.q_start + shape.block * rows
        needed = []
        for n in range(0, 64, cols):
            pairs = [k < shape.N and sees(left, right, q, k) for q in range(first, first + rows) for k in range(n, n + cols)]
            needed.append(any(pairs))
            assert full[n] + edge[n] >= any(pairs), (shape, n)
            assert not full[n] or all(pairs), (shape, n)
        assert sum(full) + sum(edge) == sum(full[::cols]) + sum(edge[::cols]) <= max(1, sum(needed)), shape


@pytest.mark.parametrize("opened", OPEN)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("one_loop", [False, True])
def test_query_span_visits_what_is_seen_once(
    one_loop: bool, blocks: tuple[int, int], opened: tuple[int | None, int | None], interpreted: Interpreted
) -> None:
    """Rows past the last query are padding that adds nothing; keys past the last one are not stored."""
    (rows, cols), shapes = blocks, shapes_of("N", blocks[1], 90)
    visits = visits_of(visit_queries, shapes, opened, blocks, one_loop, interpreted)
    for shape, (full, edge) in zip(shapes, visits.tolist(), strict=True):
        left, right = None if opened[0] is None else shape.left, None if opened[1] is None else shape.right
        first, needed = shape.block * cols, []
        for m in range(0, 64, rows):
            seen = [
                [sees(left, right, shape.q_start + q, k) for k in range(first, first + cols)]
                for q in range(m, min(m + rows, shape.M))
            ]
            within = [row[: shape.N - first] for row in seen]
            needed.append(any(map(any, seen)))
            assert full[m] + edge[m] >= any(map(any, within)), (shape, m)
            assert not full[m] or all(map(all, within)), (shape, m)
        assert sum(full) + sum(edge) == sum(full[::rows]) + sum(edge[::rows]) <= max(1, sum(needed)), shape


def tiles(band: Band, T: int, interpreted: Interpreted) -> tuple[int, int]:
    out = torch.zeros(2, dtype=torch.int32)
    interpreted(count_tiles, out, band, T, T, 0, BLOCK_M=128, BLOCK_N=64)
    return int(out[0]), int(out[1])


def test_a_window_costs_t_times_w(interpreted: Interpreted) -> None:
    """T = 4096, W = 256: a block of 128 queries sees 383 keys, which lie in at most 6 blocks of 64."""
    T, W = 4096, 256
    band = Band(W - 1, 0)
    full, edge = tiles(band, T, interpreted)
    first_block_of = [max(0, m - W + 1) // 64 for m in range(0, T, 128)]
    assert full + edge == sum((m + 127) // 64 - n + 1 for m, n in zip(range(0, T, 128), first_block_of, strict=True))
    assert full + edge <= T // 128 * 6
    assert sum(tiles(band, 2 * T, interpreted)) - (full + edge) == T // 128 * 6


def test_causal_checks_only_the_diagonal(interpreted: Interpreted) -> None:
    full, edge = tiles(Band(None, 0), 1024, interpreted)
    assert (full, edge) == (sum(2 * i for i in range(8)), 16)


def test_no_band_checks_only_the_last_keys(interpreted: Interpreted) -> None:
    assert tiles(Band(None, None), 1024, interpreted) == (8 * 16, 0)
    assert tiles(Band(None, None), 1000, interpreted) == (8 * 15, 8)
