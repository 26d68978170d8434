"""Tiles in and out of memory: every stride, nothing beyond an edge, offsets that need 64 bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_triton.kernels.views import (
    PAD,
    Head,
    Matrix,
    Sizes,
    View,
    load_tile,
    matrix_pointers,
    program,
    row_pointers,
    sequence,
    store_tile,
    tile_pointers,
)
from andrea_triton.launch.plan import matrix, view
from andrea_triton.testing import guard_band

Interpreted = Callable[..., None]
ROWS, COLS = 8, 16


@triton.jit
def copy_tile(x, out, batch, head, first, row, end, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr,
              CHECK: tl.constexpr):  # fmt: skip
    tile = load_tile(Head(x, batch, head, first), row, end, ROWS, COLS, D, CHECK)
    tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], tile)


@triton.jit
def fill_tile(x, tile, batch, head, first, row, end, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    store_tile(Head(x, batch, head, first), row, end, tl.load(tile + at), D)


@triton.jit
def tile_offsets(x, out, batch, head, first, row, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    here = tile_pointers(Head(x, batch, head, first), row, ROWS, COLS).to(tl.int64)
    tl.store(out + at, here - x.ptr.to(tl.int64))


@triton.jit
def matrix_offsets(x, out, batch, head, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(out + r * COLS + c, matrix_pointers(x, batch, head, row + r, col + c).to(tl.int64) - x.ptr.to(tl.int64))


@triton.jit
def row_offsets(ptr, out, head, row, index, sizes, ROWS: tl.constexpr):
    here = row_pointers(ptr, head, row, sizes, sequence(sizes, index), ROWS).to(tl.int64)
    tl.store(out + tl.arange(0, ROWS), here - ptr.to(tl.int64))


@triton.jit
def store_sequence(out, sizes):
    index = tl.program_id(0)
    seq = sequence(sizes, index)
    out += index * 7
    tl.store(out, seq.M)
    tl.store(out + 1, seq.N)
    tl.store(out + 2, seq.q_start)
    tl.store(out + 3, seq.batch)
    tl.store(out + 4, seq.first_q)
    tl.store(out + 5, seq.first_k)
    tl.store(out + 6, seq.first_pad)


@triton.jit
def store_program(out, heads):
    block, head, batch = program(heads)
    at = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 3
    tl.store(out + at, block)
    tl.store(out + at + 1, head)
    tl.store(out + at + 2, batch)


def layouts(shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """Tensors of one shape that lie differently in memory."""
    B, H, T, D = shape
    return {
        "heads": torch.randn(shape),
        "rows": torch.randn(B, T, H, D).transpose(1, 2),
        "guarded": guard_band(torch.randn(shape)),
        "one batch": torch.randn(1, H, T, D).expand(shape),
        "one head": torch.randn(B, 1, T, D).expand(shape),
        "one row": torch.randn(B, H, 1, D).expand(shape),
        "every other row": torch.randn(B, H, 2 * T, D)[:, :, ::2],
        "last rows first in batch": torch.randn(T, H, B, D).permute(2, 1, 0, 3),
    }


@pytest.mark.parametrize("layout", layouts((1, 1, 1, 1)))
@pytest.mark.parametrize("D", [16, 11, 1])
def test_load_tile_honours_strides_and_edges(layout: str, D: int, interpreted: Interpreted) -> None:
    x, out = layouts((2, 3, 13, D))[layout], torch.empty(ROWS, COLS)
    for row, end in ((0, 13), (8, 13), (3, 5), (0, 0), (16, 13)):
        interpreted(copy_tile, view(x, False), out, 1, 2, 0, row, end, ROWS=ROWS, COLS=COLS, D=D, CHECK=True)
        wanted = torch.zeros(ROWS, COLS)
        rows = x[1, 2, row : min(row + ROWS, end)]
        wanted[: len(rows), :D] = rows
        assert torch.equal(out, wanted)
    interpreted(copy_tile, view(x, False), out, 1, 2, 0, 5, 13, ROWS=ROWS, COLS=COLS, D=D, CHECK=False)
    assert torch.equal(out[:, :D], x[1, 2, 5:13]) and (out[:, D:] == 0).all()


def test_load_tile_of_packed_rows(interpreted: Interpreted) -> None:
    x, out = guard_band(torch.randn(20, 3, 5)), torch.empty(ROWS, COLS)
    interpreted(copy_tile, view(x, True), out, 0, 1, 7, 2, 6, ROWS=ROWS, COLS=COLS, D=5, CHECK=True)
    assert torch.equal(out[:4, :5], x[9:13, 1]) and (out[4:] == 0).all() and (out[:, 5:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("row", "end", "D"), [(0, 13, 16), (8, 13, 16), (8, 13, 5), (16, 13, 16), (0, 3, 1)])
def test_store_tile_writes_its_rows_and_dims_only(
    row: int, end: int, D: int, dtype: torch.dtype, interpreted: Interpreted
) -> None:
    buffer, tile = torch.full((4, 5, 20, 24), float("nan"), dtype=dtype), torch.randn(ROWS, COLS)
    room, wanted = (buffer[1:3, 1:4, 2:15, 3 : 3 + D], buffer.clone())
    interpreted(fill_tile, view(room, False), tile, 1, 2, 0, row, end, ROWS=ROWS, COLS=COLS, D=D)
    wanted[2, 3, 2 + row : max(2 + row, 2 + min(row + ROWS, end)), 3 : 3 + D] = tile[: max(0, end - row), :D].to(dtype)
    torch.testing.assert_close(buffer, wanted, rtol=0, atol=0, equal_nan=True)


HUGE = [
    ((2**40, 2**33, 2**32), (3, 5, 0, 100)),
    ((2**31, 2**31 - 1, 2**31 + 1), (7, 3, 0, 2**10)),
    ((0, 0, 2**23), (0, 0, 0, 255)),
    ((64, 64, 64), (2**30, 2**30, 0, 2**28)),
    ((0, 64, 2**22 + 3), (0, 65537, 2**27, 2**27)),
]


@pytest.mark.parametrize(("strides", "at"), HUGE)
def test_c15_offsets_of_a_tile_are_64_bit(
    strides: tuple[int, ...], at: tuple[int, int, int, int], interpreted: Interpreted
) -> None:
    base, out = torch.zeros(1, dtype=torch.int8), torch.empty(128, COLS, dtype=torch.int64)
    wide = [s if s < 2**23 else np.int64(s) for s in strides]
    interpreted(tile_offsets, View(base, *wide), out, *at, ROWS=128, COLS=COLS)
    batch, head, first, row = at
    rows = (first + row + torch.arange(128)) * strides[2]
    wanted = batch * strides[0] + head * strides[1] + rows[:, None] + torch.arange(COLS)[None, :]
    assert torch.equal(out, wanted)


def test_c15_strides_of_a_view_are_wide_where_a_tile_would_overflow() -> None:
    buffer = torch.empty(2**33, dtype=torch.int8)
    widest = 2**31 // PAD.value
    v = view(buffer.as_strided((1, 2, 2, 1), (2**32, widest, widest - 1, 1)), False)
    assert [type(s) for s in v[1:4]] == [np.int64, np.int64, int]
    v = matrix(buffer.as_strided((1, 2, 2, 2), (2**32, widest, widest - 1, 1)))
    assert [type(s) for s in v[1:5]] == [np.int64, np.int64, np.int64, int]


@pytest.mark.parametrize("strides", [(2**40, 2**33, 2**31, 1), (0, 0, 2**22, 1), (1, 1, 1, 0), (0, 5, 2**31 + 7, 3)])
def test_c15_offsets_of_a_matrix_are_64_bit(strides: tuple[int, ...], interpreted: Interpreted) -> None:
    base, out = torch.zeros(1, dtype=torch.int8), torch.empty(ROWS, COLS, dtype=torch.int64)
    wide = [s if s < 2**23 else np.int64(s) for s in strides]
    batch, head, row, col = 3, 70000, 2**20, 2**20
    interpreted(matrix_offsets, Matrix(base, *wide), out, batch, head, row, col, ROWS=ROWS, COLS=COLS)
    rows, cols = row + torch.arange(ROWS)[:, None], col + torch.arange(COLS)[None, :]
    assert torch.equal(out, batch * strides[0] + head * strides[1] + rows * strides[2] + cols * strides[3])


def test_c15_a_matrix_whose_columns_lie_far_apart(interpreted: Interpreted) -> None:
    """What the plan makes of a transposed bias of many queries: column 600 lies beyond 2^31 elements."""
    x = torch.empty(2**33, dtype=torch.int8).as_strided((1, 1, 2, 700), (0, 0, 1, 2**22))
    out = torch.empty(ROWS, COLS, dtype=torch.int64)
    interpreted(matrix_offsets, matrix(x), out, 0, 0, 0, 600, ROWS=ROWS, COLS=COLS)
    assert torch.equal(out, torch.arange(ROWS)[:, None] + (600 + torch.arange(COLS)[None, :]) * 2**22)


def test_offsets_of_rows_are_64_bit(interpreted: Interpreted) -> None:
    base, out = torch.zeros(1, dtype=torch.int8), torch.empty(ROWS, dtype=torch.int64)
    sizes = Sizes(M=2**28, N=1, q_start=0, heads=1000, group=1, batch=70)
    interpreted(row_offsets, base, out, 999, 2**27, 69, sizes, ROWS=ROWS)
    assert torch.equal(out, (69 * 1000 + 999) * 2**28 + 2**27 + torch.arange(ROWS))


def sequences(sizes: Sizes, count: int, interpreted: Interpreted) -> list[list[int]]:
    out = torch.empty(count, 7, dtype=torch.int32)
    interpreted(store_sequence, out, sizes, grid=(count, 1))
    return out.tolist()


def test_sequence_of_a_dense_batch(interpreted: Interpreted) -> None:
    sizes = Sizes(M=5, N=9, q_start=-3, heads=2, group=1, batch=2)
    assert sequences(sizes, 2, interpreted) == [[5, 9, -3, 0, 0, 0, 0], [5, 9, -3, 1, 0, 0, 0]]


def test_sequence_with_key_lengths(interpreted: Interpreted) -> None:
    sizes = Sizes(M=5, N=9, q_start=4, heads=2, group=1, batch=3, key_lengths=torch.tensor([0, 7, 9]).int())
    assert [s[:3] for s in sequences(sizes, 3, interpreted)] == [[5, 0, 4], [5, 7, 4], [5, 9, 4]]


@pytest.mark.parametrize("q_start", [None, 2])
def test_packed_sequences_own_rows_that_do_not_overlap(q_start: int | None, interpreted: Interpreted) -> None:
    starts_q, starts_k = [0, 5, 5, 262, 700], [0, 0, 30, 31, 40]
    cu_q, cu_k = torch.tensor(starts_q).int(), torch.tensor(starts_k).int()
    sizes = Sizes(M=705, N=40, q_start=q_start, heads=2, group=1, batch=4, cu_q=cu_q, cu_k=cu_k)
    found, free = sequences(sizes, 4, interpreted), 0
    for s, (M, N, start, batch, first_q, first_k, first_pad) in enumerate(found):
        assert (first_q, first_k, batch) == (starts_q[s], starts_k[s], 0)
        assert (starts_q[s + 1] - starts_q[s], starts_k[s + 1] - starts_k[s]) == (M, N)
        assert start == (N - M if q_start is None else q_start)
        assert first_pad >= free and first_pad % PAD.value == 0
        free = first_pad + -(-M // PAD.value) * PAD.value
    assert free <= (705 // PAD.value + 4 + 1) * PAD.value


def test_programs_of_one_block_lie_side_by_side(interpreted: Interpreted) -> None:
    out = torch.empty(2, 6, 3, dtype=torch.int32)
    interpreted(store_program, out, 3, grid=(6, 2))
    wanted: Any = [[[block, i % 3, i // 3] for i in range(6)] for block in range(2)]
    assert out.tolist() == wanted
