"""What the kernels share: who the rows of a block are, what they see, and what a mask does to a tile.

A block of rows belongs to one key head. Where one query head does not fill a block, those of its whole group stand in
it, one behind the other: row r is query r % queries of head r // queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .._operator import Call

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NO_KEY: tl.constexpr = tl.constexpr(2**31 - 1)
BAND: tl.constexpr = tl.constexpr(2)
NO_MASK: tl.constexpr = tl.constexpr(0)
BOOL_MASK: tl.constexpr = tl.constexpr(1)
BIAS: tl.constexpr = tl.constexpr(2)


class Kind(NamedTuple):
    """What a kernel is compiled for."""

    rows: int
    """Of a block; likewise the keys of a tile."""
    keys: int
    depth: int
    """head_dim and that of v, as powers of 2."""
    value_depth: int
    valued: bool
    bounded: int
    """By nothing, by two numbers per row, or by a band."""
    mask: int
    softcap: bool
    dropout: bool
    sinks: bool
    measure: int
    wide: bool
    split: bool
    precision: str
    """Of products of float32 numbers."""
    widen: bool
    """Whether to multiply in float32: Triton's interpreter takes bfloat16 for whole numbers."""
    extra: bool = False
    """Of a backward pass: whether gradients arrive for fields of the Reading, and go to the mask."""
    to_mask: bool = False
    peak: bool = True
    """Whether somebody wants the largest score; else a sum that overflows says that it was needed."""
    summed: bool = False
    """Whether the moments of scores, and what first keys weigh, come from another kernel."""
    copied: bool = False
    """Whether the copy engine of a Hopper GPU brings rows of q, k and v, and writes those of the output."""
    stacked: bool = False
    """Whether rows of several heads stand in a block, which may have scales of their own."""
    shared: bool = False
    """Whether all rows of a block that see keys have one of them in common."""
    step: int = 64
    """Columns of a tile that are weighed at a time."""
    across: int = 1
    """Warps that share a row of a tile."""
    opens: bool = False
    """Whether every row that sees a key sees the first."""
    merged: bool = False
    """Whether one loop takes tiles at an end, tiles that all rows see and, where it `opens`, the reference."""
    late: bool = False
    """Whether the values of a tile are multiplied while the next is weighed, and not while nothing else is done."""


class Sizes(NamedTuple):
    """The numbers of a call; a kernel is given some of them `disguised`, and begins with `sizes_of` them."""

    heads: Any
    group: Any
    stack: Any
    """Query heads in a block."""
    queries: Any
    keys: Any
    depth: Any
    value_depth: Any
    blocks: Any
    """Of rows, in one stack of heads."""
    splits: Any
    bound_batch: Any
    scale_batch: Any
    scale_head: Any
    sinks_batch: Any
    sinks_head: Any
    kept: Any
    """The share of weights that dropout keeps."""
    low: Any = 0
    """Of a band: query i sees i + low ≤ key < i + high."""
    high: Any = 0


def disguised(n: int) -> int:
    """A count for a tuple of a kernel: 1 stays 1, and 16 divides none.

    For numbers in a tuple that are 1 or that 16 divides Triton compiles anew, whatever it is told, and lengths change
    from call to call. One query, or one block of them, is worth a kernel of its own.
    """
    return 4 * n - 3


@triton.jit
def undisguised(n):
    # From 2²⁹ on it comes in 64 bits.
    return tl.full([], (n + 3) // 4, tl.int32)


@triton.jit
def sizes_of(given, PLAIN: tl.constexpr):
    """The numbers of a call as they are: what all calls of a model share was never disguised, nor PLAIN lengths."""
    queries, keys, bound_batch, low, high = given.queries, given.keys, given.bound_batch, given.low, given.high
    if not PLAIN:
        queries, keys, bound_batch = undisguised(queries), undisguised(keys), undisguised(bound_batch)
        low, high = undisguised(low), undisguised(high)
    return Sizes(
        given.heads, given.group, given.stack, queries, keys, given.depth, given.value_depth,
        undisguised(given.blocks), undisguised(given.splits), bound_batch, given.scale_batch, given.scale_head,
        given.sinks_batch, given.sinks_head, given.kept, low, high,
    )  # fmt: skip


class Rows(NamedTuple):
    """The rows of a block."""

    batch: Any
    head: Any
    query: Any
    there: Any
    low: Any
    """The first key that a row sees, and the one after its last."""
    high: Any


class Matrix(NamedTuple):
    """An operand or a result of four axes, of which the last lies in one piece."""

    data: Any
    batch: Any
    head: Any
    row: Any


def matrix_of(x: Tensor | None, call: Call) -> Matrix:
    """As a kernel sees it; where there is none, something that it does not look at."""
    if x is None or not x.numel():
        return Matrix(call.q, 0, 0, 0)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return Matrix(x, *x.stride()[:3])


def stride_of(x: Tensor, axis: int) -> int:
    """Of an axis that may be shared."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)


class Masked(NamedTuple):
    """A mask, with strides of 0 along the axes that it shares."""

    mask: Any
    batch: Any
    head: Any
    row: Any
    key: Any


class Dropped(NamedTuple):
    """What dropout follows from."""

    seed: Any
    threshold: Any
    period: Any
    """Disguised."""


@triton.jit
def product(left, right, total, kind: tl.constexpr):
    """Add a product of matrices to a sum of them."""
    if kind.widen:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        return tl.dot(left, right, total, input_precision=kind.precision)


@triton.jit
def across(x, TURNED: tl.constexpr):
    """Something per row, against a tile of (rows, keys) or, turned, (keys, rows)."""
    if TURNED:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def of_rows(factor, STACKED: tl.constexpr):
    """A factor of scores, against a tile: one number unless rows are STACKED."""
    if STACKED:
        return factor[:, None]
    else:
        return factor


@triton.jit
def open_rows(begin, batch, head, first, stop, sizes, BM: tl.constexpr, BOUNDED: tl.constexpr):
    """The rows of a block from the first head on; one that is not there sees no key."""
    row = begin + tl.arange(0, BM)
    query, there = row % sizes.queries, row < sizes.stack * sizes.queries
    low, high = bounds_of_rows(query, there, batch, first, stop, sizes, BOUNDED)
    return Rows(batch, head + row // sizes.queries, query, there, low, high)


@triton.jit
def rows_of_head(begin, batch, head, first, stop, sizes, BM: tl.constexpr, BOUNDED: tl.constexpr):
    """Likewise of one head, which is one number then: divisions in a loop are dear."""
    query = begin + tl.arange(0, BM)
    there = query < sizes.queries
    low, high = bounds_of_rows(query, there, batch, first, stop, sizes, BOUNDED)
    return Rows(batch, head, query, there, low, high)


@triton.jit
def bounds_of_rows(query, there, batch, first, stop, sizes, BOUNDED: tl.constexpr):
    """The first key that each row sees, and the one after its last."""
    low = tl.zeros(query.shape, tl.int32)
    high = tl.where(there, sizes.keys, 0).to(tl.int32)
    if BOUNDED == BAND:
        low = tl.maximum(query + sizes.low, 0)
        high = tl.where(there, tl.minimum(query + sizes.high, sizes.keys), 0)
    elif BOUNDED:
        place = batch.to(tl.int64) * sizes.bound_batch + query
        low = tl.maximum(tl.load(first + place, mask=there, other=0), 0).to(tl.int32)
        high = tl.minimum(tl.load(stop + place, mask=there, other=0), sizes.keys).to(tl.int32)
    return low, high


@triton.jit
def place_of_rows(rows, sizes):
    """Of each row in what there is per (batch, head, query)."""
    return (rows.batch.to(tl.int64) * sizes.heads + rows.head) * sizes.queries + rows.query


@triton.jit
def starts_of_rows(strides, rows):
    """Where each row begins in a Matrix, or in a mask."""
    place = rows.batch.to(tl.int64) * strides.batch + rows.head.to(tl.int64) * strides.head
    return place + rows.query.to(tl.int64) * strides.row


@triton.jit
def load_rows(matrix, rows, depth, D: tl.constexpr):
    """What has one row for each query row."""
    component = tl.arange(0, D)
    place = starts_of_rows(matrix, rows)
    inside = rows.there[:, None] & (component < depth)[None, :]
    return tl.load(matrix.data + place[:, None] + component[None, :], mask=inside, other=0.0)


@triton.jit
def write_rows(matrix, x, rows, depth, D: tl.constexpr):
    component = tl.arange(0, D)
    place = starts_of_rows(matrix, rows)
    inside = rows.there[:, None] & (component < depth)[None, :]
    tl.store(matrix.data + place[:, None] + component[None, :], x.to(matrix.data.dtype.element_ty), mask=inside)


@triton.jit
def load_keys(matrix, batch, head, start, keys, depth, BN: tl.constexpr, D: tl.constexpr):
    """Rows of k or v; 0 beyond the last key and the last component."""
    key, component = start + tl.arange(0, BN), tl.arange(0, D)
    base = matrix.data + batch.to(tl.int64) * matrix.batch + head.to(tl.int64) * matrix.head
    place = key.to(tl.int64) * matrix.row
    inside = (key < keys)[:, None] & (component < depth)[None, :]
    return tl.load(base + place[:, None] + component[None, :], mask=inside, other=0.0)


@triton.jit
def load_tile(matrix, batch, head, start, depth, BN: tl.constexpr, D: tl.constexpr):
    """Likewise where no row is beyond the last, and rows are not `far_apart`."""
    component = tl.arange(0, D)
    base = matrix.data + batch.to(tl.int64) * matrix.batch + head.to(tl.int64) * matrix.head
    # Where the tile begins is one number for all threads, and where they read in it is the same for all tiles.
    place = (tl.arange(0, BN) * matrix.row)[:, None] + component[None, :]
    inside = (component < depth)[None, :]
    return tl.load(base + tl.full([], start, tl.int64) * matrix.row + place, mask=inside, other=0.0)


@triton.jit
def far_apart(one, other, BN: tl.constexpr):
    """Whether a tile of either matrix may span more numbers than 32 bits count."""
    return tl.maximum(one.row, other.row) >= 2**30 // BN


@triton.jit
def write_keys(matrix, x, batch, head, start, keys, depth, BN: tl.constexpr, D: tl.constexpr):
    key, component = start + tl.arange(0, BN), tl.arange(0, D)
    base = matrix.data + batch.to(tl.int64) * matrix.batch + head.to(tl.int64) * matrix.head
    place = key.to(tl.int64) * matrix.row
    inside = (key < keys)[:, None] & (component < depth)[None, :]
    tl.store(base + place[:, None] + component[None, :], x.to(matrix.data.dtype.element_ty), mask=inside)


@triton.jit
def is_over(marks, begin, count, SPAN: tl.constexpr):
    """Whether of some blocks none is marked: mostly so, and then their kernel has to be over at once."""
    mine = begin + tl.arange(0, SPAN)
    return tl.max(tl.load(marks + mine, mask=mine < count, other=0), 0) == 0


@triton.jit
def range_of_block(rows, keys):
    """From where to where any row sees a key, and from where to where all rows see all."""
    some = rows.low < rows.high
    least = tl.min(tl.where(some, rows.low, keys), 0)
    most = tl.max(tl.where(some, rows.high, 0), 0)
    # Rows that are not there go along with the others: what is computed for them is not kept.
    clear = tl.max(tl.where(rows.there, rows.low, 0), 0)
    clear_stop = tl.min(tl.where(rows.there, rows.high, keys), 0)
    return least, most, clear, clear_stop


@triton.jit
def range_of_band(begin, sizes, BM: tl.constexpr, BOUNDED: tl.constexpr):
    """Likewise of rows of one head that see all keys or a band of them: the first row and the last tell it."""
    keys = sizes.keys
    least, most, clear, clear_stop = keys * 0, keys, keys * 0, keys
    if BOUNDED:
        last = tl.minimum(begin + BM, sizes.queries) - 1
        one, other = tl.maximum(begin, 1 - sizes.high), tl.minimum(last, keys - 1 - sizes.low)
        some = (one <= other) & (sizes.low < sizes.high)
        least = tl.where(some, tl.maximum(one + sizes.low, 0), keys)
        most = tl.where(some, tl.minimum(other + sizes.high, keys), 0)
        clear = tl.maximum(last + sizes.low, 0)
        clear_stop = tl.minimum(begin + sizes.high, keys)
    return least, most, clear, clear_stop


@triton.jit
def tanh(x):
    """Near 0 by its series: 1 − 2 / (1 + e^2x) would lose all digits there."""
    square = x * x
    near = x * (1 - square * (0.33333334 - square * (0.13333334 - square * (0.053968254 - square * 0.021869488))))
    far = 1 - 2 / (1 + tl.exp2(tl.minimum(2 * LOG2E * tl.abs(x), 80.0)))
    bent = tl.where(square < 0.04, near, tl.where(x < 0, -far, far))
    return tl.where(x == x, bent, x)


@triton.jit
def splitmix(x):
    """A step of SplitMix64."""
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def draws_of_rows(dropped, rows, sizes):
    """The two words from which each row draws: see `attemper._dropout`."""
    start = splitmix(tl.load(dropped.seed).to(tl.uint64, bitcast=True))
    batch = rows.batch % undisguised(dropped.period)
    row = (batch.to(tl.int64) * sizes.heads + rows.head) * sizes.queries + rows.query
    own = splitmix(start + (row + 1).to(tl.uint64) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64))
    return own.to(tl.uint32), (own >> 32).to(tl.uint32)


@triton.jit
def finalise(x):
    """MurmurHash3's last step."""
    x = (x ^ (x >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def survivors(draw_low, draw_high, key, threshold, TURNED: tl.constexpr = False):
    """Which weights of a tile dropout keeps."""
    drawn = across(key.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32), not TURNED)
    draw = finalise(drawn ^ across(draw_low, TURNED))
    return finalise(draw + across(draw_high, TURNED)).to(tl.int64) >= threshold


@triton.jit
def mask_rows(masked, rows, MASK: tl.constexpr):
    """Where the mask of each row begins."""
    place = tl.zeros(rows.query.shape, tl.int64)
    if MASK != NO_MASK:
        place = starts_of_rows(masked, rows)
    return place


@triton.jit
def mask_of_tile(masked, places, key, seen, MASK: tl.constexpr, TURNED: tl.constexpr = False):
    """What a mask adds to the scores of a tile, and which of them it shows."""
    spots = across(places, TURNED) + across(key.to(tl.int64) * masked.key, not TURNED)
    own = tl.load(masked.mask + spots, mask=seen, other=0)
    if MASK == BOOL_MASK:
        return tl.zeros(seen.shape, tl.float32), own != 0
    else:
        return own.to(tl.float32), own != float("-inf")
