"""The products of a tile of scores.

A tile is a panel of query rows against a run of keys, held as scores[key][row]: the lanes of a vector are query rows,
so all that a row needs (its maximum, its sums, its bounds) happens lane by lane, and k and v are read as they lie in
memory, one number at a time for all rows. Only q is turned round.
"""

from __future__ import annotations

from typing import Any

from ._compile import kernel
from ._simd import at, lanes, load
from ._simd_blocks import (
    added_blocks,
    dot_rows,
    fetch,
    load_block,
    load_rows,
    load_square,
    outer,
    pick,
    row_offsets,
    rows_maximum,
    rows_sum,
    scaled_block,
    store_block,
    store_rows,
    transpose,
    zeros,
)
from ._target import KEY_TILE, target

KEYS_AT_ONCE = target().keys_at_once

LONGEST_SUM = 128
"""Products that are added in one chain: a longer one would lose digits."""


def _make_scores(columns: int) -> Any:
    keys = KEYS_AT_ONCE
    many = columns * keys

    @kernel
    def scores_of(q: Any, k: Any, stride: int, cells: int, present: int, scores: Any, sums: Any) -> None:
        """q·k of a panel and some keys, of which the last present ones count; sums: their maximum and sum so far."""
        offsets = row_offsets(stride, keys, present)
        width = columns * lanes(scores)
        acc = zeros(scores, many)
        for i in range(min(cells, LONGEST_SUM)):
            acc = outer(acc, load_block(q, i * width, columns), pick(k, offsets, i))
        store_block(scores, 0, acc)
        for begin in range(LONGEST_SUM, cells, LONGEST_SUM):
            acc = zeros(scores, many)
            for i in range(begin, min(begin + LONGEST_SUM, cells)):
                acc = outer(acc, load_block(q, i * width, columns), pick(k, offsets, i))
            acc = added_blocks(acc, load_block(scores, 0, many))
            store_block(scores, 0, acc)
        store_block(sums, 0, rows_maximum(load_block(sums, 0, columns), acc))
        store_block(sums, width, rows_sum(load_block(sums, width, columns), acc))

    return scores_of


def _make_values(columns: int) -> Any:
    dims = KEYS_AT_ONCE
    many = columns * dims

    @kernel
    def values_of(weights: Any, v: Any, stride: int, cells: int, out: Any, keep: Any) -> None:
        """Out · keep + weights·v for some components of v."""
        offsets = row_offsets(1, dims, dims)
        width = columns * lanes(out)
        acc = scaled_block(load_block(out, 0, many), load_block(keep, 0, columns))
        for j in range(cells):
            acc = outer(acc, load_block(weights, j * width, columns), pick(v, offsets, j * stride))
        store_block(out, 0, acc)

    return values_of


RETURN_KEYS = 6
RETURN_COLUMNS = 4 if target().registers == 32 else 2
"""Keys and vectors of components whose gradients are in registers at once: they and their operands fill them."""


def _make_returns(columns: int) -> Any:
    keys = RETURN_KEYS
    many = columns * keys

    @kernel
    def returned(
        tile: Any, width: int, n: int, rows: Any, stride: int, present: int, out: Any, out_stride: int
    ) -> None:
        """out[key] + tile[key]·rows for some keys and components: what goes back from query rows to keys."""
        offsets = row_offsets(out_stride, keys, present)
        own = row_offsets(width, keys, keys)
        acc = zeros(out, many)
        for i in range(n):
            acc = outer(acc, load_block(rows, i * stride, columns), pick(tile, own, i))
        # A panel's own sum first: one long chain of additions would lose digits.
        store_rows(out, offsets, added_blocks(load_rows(out, offsets, columns), acc))

    return returned


returned_one, returned_wide = _make_returns(1), _make_returns(RETURN_COLUMNS)
scores_1, scores_2, scores_3 = (_make_scores(columns) for columns in (1, 2, 3))
values_1, values_2, values_3 = (_make_values(columns) for columns in (1, 2, 3))


@kernel
def scores_of(columns: int, q: Any, k: Any, stride: int, cells: int, present: int, scores: Any, sums: Any) -> None:
    """The version for a panel's width."""
    if columns == 3:
        scores_3(q, k, stride, cells, present, scores, sums)
    elif columns == 2:
        scores_2(q, k, stride, cells, present, scores, sums)
    else:
        scores_1(q, k, stride, cells, present, scores, sums)


@kernel
def values_of(columns: int, weights: Any, v: Any, stride: int, cells: int, out: Any, keep: Any) -> None:
    """The version for a panel's width."""
    if columns == 3:
        values_3(weights, v, stride, cells, out, keep)
    elif columns == 2:
        values_2(weights, v, stride, cells, out, keep)
    else:
        values_1(weights, v, stride, cells, out, keep)


# The same for few rows: vectors go along the components, of which there are more.


@kernel
def thin_scores(q: Any, k: Any, stride: int, depth: int, present: int, out: Any, corner: Any) -> None:
    """q·k of one row and as many keys as a vector has lanes, one behind the other; depth in whole vectors."""
    step = lanes(k)
    for first in range(0, step, KEYS_AT_ONCE):
        # The products of each key side by side, to be added up below.
        own = at(k, min(first, present - 1) * stride)
        offsets = row_offsets(stride, KEYS_AT_ONCE, max(present - first, 1))
        acc = zeros(k, KEYS_AT_ONCE)
        for i in range(0, depth, step):
            acc = dot_rows(acc, load(q, i), own, offsets, i)
            for r in range(KEYS_AT_ONCE):
                fetch(own, (KEY_TILE + r) * stride + i)
        store_block(corner, first * step, acc)
    store_block(out, 0, rows_sum(zeros(k, 1), transpose(load_square(corner))))


def _make_thin_values(columns: int) -> Any:
    @kernel
    def thin_values(
        weights: Any, width: int, v: Any, stride: int, n: int, out: Any, out_width: int, corner: Any
    ) -> None:
        """Out + weights·v of one row and some vectors of v, in one lane of the weights and of out."""
        step = lanes(v)
        even, odd = zeros(v, columns), zeros(v, columns)
        for j in range(0, n - 1, 2):
            even = outer(even, load_block(v, j * stride, columns), (weights[j * width],))
            odd = outer(odd, load_block(v, (j + 1) * stride, columns), (weights[(j + 1) * width],))
            for c in range(columns):
                fetch(v, (j + KEY_TILE) * stride + c * step)
                fetch(v, (j + KEY_TILE + 1) * stride + c * step)
        if n % 2:
            even = outer(even, load_block(v, (n - 1) * stride, columns), (weights[(n - 1) * width],))
        store_block(corner, 0, added_blocks(even, odd))
        for i in range(columns * step):
            out[i * out_width] += corner[i]

    return thin_values


thin_values_1, thin_values_4 = _make_thin_values(1), _make_thin_values(4)


@kernel
def thin_values(
    weights: Any, width: int, v: Any, stride: int, n: int, depth: int, out: Any, out_width: int, keep: Any, corner: Any
) -> None:
    """Out · keep + weights·v of one row, in one lane of each; depth in whole vectors."""
    step = lanes(v)
    for i in range(depth):
        out[i * out_width] = out[i * out_width] * keep
    i = 0
    while i < depth:
        if depth - i >= 4 * step:
            thin_values_4(weights, width, at(v, i), stride, n, at(out, i * out_width), out_width, corner)
            i += 4 * step
        else:
            thin_values_1(weights, width, at(v, i), stride, n, at(out, i * out_width), out_width, corner)
            i += step
