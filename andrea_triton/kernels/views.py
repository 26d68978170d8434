"""How a kernel sees tensors. All int64 arithmetic of the library lives here, on scalars; in-tile offsets stay int32."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Backward's per-query numbers are padded to PAD rows a sequence, so that they are read without masks.
PAD = tl.constexpr(256)


class View(NamedTuple):
    """A (batch, head, row, dim) tensor with unit stride along dim: pointer and strides, or (`desc`) a host tensor descriptor with
    block [1, 1, rows, dims]."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any
    desc: Any = None


class Matrix(NamedTuple):
    """A (batch, head, query, key) tensor; any stride may be 0."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_m: Any
    stride_n: Any


class Head(NamedTuple):
    """Rows `first`, `first` + 1 ... of one (batch, head) of a View; or, with `pages`, rows that lie in pages: row r in row
    r % page_size of batch entry pages[r // page_size] of the View. A tile lies in one page, or, with `last`, each of its rows
    looks up its own, those behind row `last` that of row `last`. Construct it in place: Triton 3.6 cannot return a tuple that
    holds None."""

    view: Any
    batch: Any
    head: Any
    first: Any
    pages: Any = None
    page_size: Any = None
    last: Any = None


class Sizes(NamedTuple):
    """Lengths of a launch. Dense: M queries at positions q_start + i, N keys at positions j. Packed: sequence s owns the rows
    cu_q[s] : cu_q[s + 1] of M packed queries and the rows cu_k[s] : cu_k[s + 1] of the keys. heads: query heads; group: how many
    of them share a key head; batch: batch entries. q_start None: the last query of a sequence sees its last key, key_lengths
    counted."""

    M: Any
    N: Any
    q_start: Any
    heads: Any
    group: Any
    batch: Any
    cu_q: Any = None
    cu_k: Any = None
    key_lengths: Any = None


class Seq(NamedTuple):
    """One sequence: its lengths, the position of its first query, and where its rows lie in the tensors (first_pad: in those
    whose rows are padded)."""

    M: Any
    N: Any
    q_start: Any
    batch: Any
    first_q: Any
    first_k: Any
    first_pad: Any


@triton.jit
def sequence(sizes, index):
    """The sequence `index` (the batch index, where nothing is packed)."""
    M, N, q_start = sizes.M, sizes.N, sizes.q_start
    batch, first_q, first_k, first_pad = index, index * 0, index * 0, index * 0
    if sizes.cu_q is not None:
        batch, first_q, first_k = index * 0, tl.load(sizes.cu_q + index), tl.load(sizes.cu_k + index)
        first_pad = (first_q // PAD + index) * PAD
        M = tl.load(sizes.cu_q + index + 1) - first_q
        N = tl.load(sizes.cu_k + index + 1) - first_k
        if sizes.q_start is None:
            q_start = N - M
    if sizes.key_lengths is not None:
        N = tl.minimum(N, tl.load(sizes.key_lengths + index))
        if sizes.q_start is None:
            q_start = N - M
    return Seq(M, N, q_start, batch, first_q, first_k, first_pad)


@triton.jit
def program(heads):
    """(block, head, batch) of this program in a grid (batch * heads, blocks). Axis 0 may be 2^31 - 1 long and varies fastest:
    block 0 of every head starts before block 1 of any, so a kernel that takes its long blocks first ends on short ones."""
    head = tl.program_id(0)
    return tl.program_id(1), head % heads, head // heads


@triton.jit
def tile_pointers(x, row, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers [ROWS, COLS] from row `row` of a Head on."""
    v, t, d, batch = x.view, tl.arange(0, ROWS), tl.arange(0, COLS), x.batch
    if x.last is not None:
        rows = tl.minimum(row + t, x.last)
        page, place = tl.load(x.pages + rows // x.page_size), rows % x.page_size
        at = tl.cast(page, tl.int64) * v.stride_b + tl.cast(place, tl.int64) * v.stride_t
        return v.ptr + tl.cast(x.head, tl.int64) * v.stride_h + (at[:, None] + d[None, :])
    else:
        if x.pages is not None:
            batch, row = tl.load(x.pages + row // x.page_size), row % x.page_size
        base = v.ptr + tl.cast(batch, tl.int64) * v.stride_b + tl.cast(x.head, tl.int64) * v.stride_h
        return base + tl.cast(x.first + row, tl.int64) * v.stride_t + (t[:, None] * v.stride_t + d[None, :])


@triton.jit
def tile_live(row, end, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr):
    """Mask [ROWS, COLS] of the elements below row `end` and dim D; None where the caller knows that all are."""
    t, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    live = None
    if CHECK and COLS != D:
        live = (t < end - row) & (d < D)
    elif CHECK:
        live = t < end - row
    elif COLS != D:
        live = d < D
    return live


@triton.jit
def load_tile(x, row, end, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, CHECK: tl.constexpr):
    """x[row : row + ROWS, :] as a tile [ROWS, COLS]; zero beyond row `end` and dim D."""
    if x.view.desc is not None:
        return tl.reshape(x.view.desc.load([x.batch, x.head, row, 0]), [ROWS, COLS])
    else:
        live = tile_live(row, end, ROWS, COLS, D, CHECK)
        if live is None:
            return tl.load(tile_pointers(x, row, ROWS, COLS))
        else:
            return tl.load(tile_pointers(x, row, ROWS, COLS), mask=live, other=0.0)


@triton.jit
def store_tile(x, row, end, tile, D: tl.constexpr):
    """x[row : row + ROWS, :] = tile, cast to x's dtype; nothing beyond row `end` and dim D."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    tile = tile.to(x.view.ptr.dtype.element_ty)
    tl.store(tile_pointers(x, row, ROWS, COLS), tile, mask=tile_live(row, end, ROWS, COLS, D, True))


@triton.jit
def matrix_pointers(x, b, h, row, col):
    """Pointers to x[b, h, row, col]; row and col broadcast. A matrix row may lie beyond 2^31 elements, its columns do not."""
    base = x.ptr + tl.cast(b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_h
    return base + tl.cast(row, tl.int64) * x.stride_m + col * x.stride_n


@triton.jit
def row_pointers(ptr, head, row, sizes, seq, ROWS: tl.constexpr):
    """Pointers [ROWS] from row `row` of a sequence on, into a contiguous (batch, head, M) tensor of per-query numbers."""
    base = (tl.cast(seq.batch, tl.int64) * sizes.heads + head) * sizes.M
    return ptr + base + seq.first_q + row + tl.arange(0, ROWS)
