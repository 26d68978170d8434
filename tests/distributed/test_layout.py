"""Which rows lie where, and which of them meet: pure arithmetic, no processes."""

import itertools
from typing import get_args

import pytest
import torch

from andrea_triton import ShapeError, UnsupportedError
from andrea_triton.distributed import shard
from andrea_triton.distributed.layout import Call, Layout, calls, check_rows, chunks, runs, schedule

LAYOUTS = get_args(Layout)
BANDS = [(None, None), (None, 0), (5, 0), (0, 0), (3, 4), (None, 2), (2, None)]


def positions(rank: int, ranks: int, rows: int, layout: Layout) -> list[int]:
    """The position of each row of a rank."""
    size = rows // len(chunks(rank, ranks, layout))
    return [chunk * size + i for chunk in chunks(rank, ranks, layout) for i in range(size)]


def pairs(call: Call) -> list[tuple[int, int]]:
    """The (query row, key row) that see each other in a call."""
    left = call.keys + call.q_start + call.queries if call.left is None else call.left
    right = call.keys + abs(call.q_start) + call.queries if call.right is None else call.right
    return [
        (call.q_row + i, call.k_row + j)
        for i in range(call.queries)
        for j in range(call.keys)
        if call.q_start + i - left <= j <= call.q_start + i + right or call.whole
    ]


def work(rank: int, ranks: int, rows: int, layout: Layout, band: tuple[int | None, int | None]) -> int:
    """How many (query, key) pairs a rank computes."""
    return sum(len(pairs(call)) for step in schedule(rank, ranks, (rows, rows), layout, band) for call in step)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_row_lies_on_one_rank(layout: Layout, ranks: int) -> None:
    rows = [p for rank in range(ranks) for p in positions(rank, ranks, 6, layout)]
    assert sorted(rows) == list(range(6 * ranks))
    for rank in range(ranks):
        here = positions(rank, ranks, 6, layout)
        assert [run.position + i for run in runs(rank, ranks, 6, layout) for i in range(run.length)] == here


@pytest.mark.parametrize("starts", [None, (0, 3, 3, 13, 22)], ids=["one sequence", "packed"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_calls_are_all_the_pairs_that_see_each_other(
    ranks: int, layout: Layout, band: tuple[int | None, int | None], starts: tuple[int, ...] | None
) -> None:
    rows, (left, right) = 6, band
    found = []
    for rank in range(ranks):
        for step, of_step in enumerate(schedule(rank, ranks, (rows, rows), layout, band, starts)):
            q_pos = positions(rank, ranks, rows, layout)
            k_pos = positions((rank - step) % ranks, ranks, rows, layout)
            found += [(q_pos[i], k_pos[j]) for call in of_step for i, j in pairs(call)]
    ends = (0, rows * ranks) if starts is None else starts
    sequence = {p: s for s, (a, b) in enumerate(itertools.pairwise(ends)) for p in range(a, b)}
    wanted = [
        (i, j)
        for i, j in itertools.product(range(rows * ranks), repeat=2)
        if sequence.get(i, -1) == sequence.get(j, -2) and (left is None or j >= i - left) and (right is None or j <= i + right)
    ]
    assert sorted(found) == wanted


@pytest.mark.parametrize(("queries", "keys"), [(4, 8), (8, 4)])
def test_queries_and_keys_of_different_lengths_end_together(queries: int, keys: int) -> None:
    found = set()
    for rank, step in itertools.product(range(2), repeat=2):
        q_pos = positions(rank, 2, queries, "zigzag")
        k_pos = positions((rank - step) % 2, 2, keys, "zigzag")
        made = schedule(rank, 2, (queries, keys), "zigzag", (None, 0))[step]
        found |= {(q_pos[i], k_pos[j]) for call in made for i, j in pairs(call)}
    offset = 2 * (keys - queries)
    assert found == {(i, j) for i in range(2 * queries) for j in range(2 * keys) if j <= i + offset}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_shares_causal_work_within_one_tile(ranks: int) -> None:
    """A tile is as small as 16 by 16 rows; the chunks here have 37."""
    amounts = [work(rank, ranks, 2 * 37, "zigzag", (None, 0)) for rank in range(ranks)]
    assert max(amounts) - min(amounts) <= 16 * 16
    uneven = [work(rank, ranks, 2 * 37, "contiguous", (None, 0)) for rank in range(ranks)]
    assert max(uneven) > 1.4 * max(amounts)


def test_what_nobody_sees_is_no_call_and_no_step() -> None:
    assert [len(step) for step in schedule(0, 8, (16, 16), "contiguous", (15, 0))] == [1, 0]
    assert [len(step) for step in schedule(3, 8, (16, 16), "contiguous", (15, 0))] == [1, 1]
    assert len(schedule(0, 8, (16, 16), "contiguous", (None, 0))) == 8
    assert len(schedule(0, 4, (4, 4), "contiguous", (None, None), (0, 4, 8, 12, 16))) == 1


def test_full_neighbours_are_one_call() -> None:
    for step in schedule(1, 4, (8, 8), "zigzag", (None, None)):
        assert [(call.queries, call.keys) for call in step] == [(8, 8)]
    assert [len(step) for step in schedule(1, 4, (8, 8), "zigzag", (None, 0))] == [3, 1, 1, 1]
    assert calls(runs(3, 4, 8, "zigzag"), runs(3, 4, 8, "zigzag"), None, 0) == [Call(0, 8, 0, 8, 0, None, 0)]


def test_a_length_that_does_not_divide_says_how_to_pad() -> None:
    with pytest.raises(ShapeError, match="T is 10 over 4 ranks; wanted a multiple of 8 for zigzag chunks; pad 6 rows at the end"):
        check_rows(10, 4, "zigzag")
    with pytest.raises(ShapeError, match="multiple of 4 for contiguous chunks; pad 2 rows"):
        check_rows(10, 4, "contiguous")
    with pytest.raises(ShapeError, match="layout is 'spiral'; wanted one of zigzag, contiguous"):
        chunks(0, 2, "spiral")  # type: ignore[arg-type]


def test_without_a_process_group_the_error_says_so() -> None:
    with pytest.raises(UnsupportedError, match="init_process_group"):
        shard(torch.arange(8), dim=0)
