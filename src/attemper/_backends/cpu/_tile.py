"""The parts of a tile of scores: how operands are packed, multiplied, masked and turned into weights.

A tile is a panel of query rows against a run of keys, held as scores[key][row]: the lanes of a vector are query rows,
so all that a row needs (its maximum, its sums, its bounds) happens lane by lane, and k and v are read as they lie in
memory, one number at a time for all rows. Only q is turned round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, types, uint8, uint16, uint32, uint64

from . import _slots as slot
from ._compile import by_kind, kernel
from ._simd import (
    added_blocks,
    address_of,
    at,
    bits_of,
    dot_rows,
    fetch,
    lanes,
    load,
    load_apart,
    load_block,
    load_rows,
    load_some,
    load_square,
    maximum,
    narrow,
    outer,
    per_cell,
    pick,
    pointer,
    row_offsets,
    rows_maximum,
    rows_sum,
    scaled_block,
    spread,
    spread_as,
    store,
    store_apart,
    store_block,
    store_rows,
    store_some,
    store_square,
    tanh,
    times_all,
    transpose,
    where,
    widen,
    zeros,
)
from ._slots import (
    BF16,
    BOOL,
    COUNT,
    DRAW_HIGH,
    DRAW_LOW,
    F32,
    F64,
    FIRST_SCORE,
    FIRSTS,
    HIGHEST_QK,
    STOPS,
    TILE_COUNT,
    TILE_MAX,
    TILE_SUM,
    UNIT,
)
from ._target import KEY_TILE, target

KEYS_AT_ONCE = target().keys_at_once

LONGEST_SUM = 128
"""Products that are added in one chain: a longer one would lose digits."""

LOWEST = {32: -200.0, 64: -2000.0}
"""Exponents of 2 from which a weight is 0."""


padded = kernel(slot.padded)


@kernel
def item_size(kind: int) -> int:
    """Bytes of an element."""
    if kind == F32:
        return 4
    if kind == F64:
        return 8
    return 1 if kind == BOOL else 2


# Reading and writing elements of any kind.


@kernel
def from_half(bits: Any) -> Any:
    """float16 as float32: shifted into place and scaled, which also mends the denormal ones."""
    word = widen(bits)
    magnitude = (word & spread(uint32(0x7FFF))) << spread(uint32(13))
    scaled = bits_of(magnitude) * spread(float32(2.0**112))
    special = spread(uint32(0x0F7FFFFF)) < magnitude
    scaled = bits_of(where(special, magnitude | spread(uint32(0x7F800000)), bits_of(scaled)))
    return bits_of(bits_of(scaled) | (word & spread(uint32(0x8000))) << spread(uint32(16)))


@kernel
def to_half(x: Any) -> Any:
    """float32 as float16, rounded to nearest, ties to even."""
    word = bits_of(x)
    sign = word & spread(uint32(0x80000000))
    word = word ^ sign
    # Small ones: the addition of a large number leaves the right bits, rounded, at its end.
    magic = spread(uint32(((127 - 15) + (23 - 10) + 1) << 23))
    small = bits_of(bits_of(word) + bits_of(magic)) - magic
    odd = (word >> spread(uint32(13))) & spread(uint32(1))
    normal = (word + spread(uint32(((15 - 127) << 23) % 2**32 + 0xFFF)) + odd) >> spread(uint32(13))
    half = where(word < spread(uint32(113 << 23)), small, normal)
    infinite = where(spread(uint32(0x7F800000)) < word, spread(uint32(0x7E00)), spread(uint32(0x7C00)))
    half = where(spread(uint32(0x477FEFFF)) < word, infinite, half)
    return narrow(half | (sign >> spread(uint32(16))))


@kernel
def to_bfloat(x: Any) -> Any:
    """float32 as bfloat16, rounded to nearest, ties to even."""
    word = bits_of(x)
    odd = (word >> spread(uint32(16))) & spread(uint32(1))
    rounded = (word + spread(uint32(0x7FFF)) + odd) >> spread(uint32(16))
    is_nan = spread(uint32(0x7F800000)) < (word & spread(uint32(0x7FFFFFFF)))
    return narrow(where(is_nan, (word >> spread(uint32(16))) | spread(uint32(0x40)), rounded))


def read_some(like: Any, address: int, kind: int, i: int, n: int) -> Any:
    """The first n elements from i on of an array of some kind, as a vector of the kind that `like` points to."""


@by_kind(read_some)
def _read_some(like: Any, address: Any, kind: Any, i: Any, n: Any) -> Any:
    if like.dtype == types.float64:
        return lambda like, address, kind, i, n: load_some(pointer(address, float64), i, n)
    if like.dtype == types.uint32:
        return lambda like, address, kind, i, n: load_some(pointer(address, uint32), i, n)

    def narrow_kinds(like: Any, address: int, kind: int, i: int, n: int) -> Any:
        # Whole vectors without a mask, which costs more than the question.
        if kind == F32:
            numbers = pointer(address, float32)
            return load(numbers, i) if n == lanes(numbers) else load_some(numbers, i, n)
        halves = pointer(address, uint16)
        bits = load(halves, i) if n == lanes(halves) else load_some(halves, i, n)
        if kind == BF16:
            return bits_of(widen(bits) << spread(uint32(16)))
        return from_half(bits)

    return narrow_kinds


def write_some(address: int, kind: int, i: int, x: Any, n: int) -> Any:
    """The first n lanes as elements of some kind."""


@by_kind(write_some)
def _write_some(address: Any, kind: Any, i: Any, x: Any, n: Any) -> Any:
    if x.element == types.float64:
        return lambda address, kind, i, x, n: store_some(pointer(address, float64), i, x, n)

    def narrow_kinds(address: int, kind: int, i: int, x: Any, n: int) -> None:
        if kind == F32:
            if n == lanes(pointer(address, float32)):
                store(pointer(address, float32), i, x)
            else:
                store_some(pointer(address, float32), i, x, n)
        elif kind == BF16:
            store_some(pointer(address, uint16), i, to_bfloat(x), n)
        else:
            store_some(pointer(address, uint16), i, to_half(x), n)

    return narrow_kinds


# One element at a time, where no vector fits.


@kernel
def half_number(bits: int) -> float:
    """A float16 as a number."""
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    sign = -1.0 if bits >> 15 else 1.0
    if exponent == 31:
        return sign * np.inf if fraction == 0 else np.nan
    return sign * (fraction * 2.0**-24 if exponent == 0 else (1024 + fraction) * 2.0 ** (exponent - 25.0))


@kernel
def bfloat_number(bits: int) -> float:
    """A bfloat16 as a number."""
    exponent, fraction = (bits >> 7) & 255, bits & 127
    sign = -1.0 if bits >> 15 else 1.0
    if exponent == 255:
        return sign * np.inf if fraction == 0 else np.nan
    return sign * (fraction * 2.0**-133 if exponent == 0 else (128 + fraction) * 2.0 ** (exponent - 134.0))


@kernel
def number_at(address: int, kind: int) -> Any:
    """One element, with all its digits."""
    if kind == F32:
        return float64(pointer(address, float32)[0])
    if kind == F64:
        return pointer(address, float64)[0]
    bits = int64(pointer(address, uint16)[0])
    return bfloat_number(bits) if kind == BF16 else half_number(bits)


def as_kind(out: Any, value: float) -> Any:
    """A number as the kind that out holds."""


@by_kind(as_kind)
def _as_kind(out: Any, value: Any) -> Any:
    kind = out.dtype
    return lambda out, value: kind(value)


# Packing.


@kernel
def find_rows(
    rows: Any, base: int, begin: int, n: int, width: int, queries: int, head_stride: int, row_stride: int, item: int
) -> None:
    """Where the rows of a panel begin; lanes past the last row repeat it."""
    head, query = begin // queries, begin % queries
    for i in range(width):
        rows[i] = base + (head * head_stride + query * row_stride) * item
        if i < n - 1:
            # Counted on: a division for each row would take as long as all else here.
            query += 1
            if query == queries:
                head, query = head + 1, 0


@kernel
def pack_turned(out: Any, width: int, corner: Any, rows: Any, n: int, depth: int, kind: int, inner: int) -> None:
    """out[i][row] for i up to a multiple of the lanes above depth: rows side by side, 0 where there are none."""
    step = lanes(out)
    size = item_size(kind)
    cells = depth // per_cell(out)
    for left in range(0, width, step):
        for top in range(0, cells, step):
            some = min(step, cells - top)
            for r in range(step):
                if left + r >= n:
                    store(corner, r * step, spread_as(out, 0))
                elif inner == 1:
                    store(corner, r * step, read_some(out, rows[left + r], kind, top, some))
                else:
                    store(corner, r * step, spread_as(out, 0))
                    for i in range(some):
                        corner[r * step + i] = as_kind(out, number_at(rows[left + r] + (top + i) * inner * size, kind))
            turned = transpose(load_square(corner))
            store_apart(out, top * width + left, width, turned)


@kernel
def pack_rows(
    out: Any, out_stride: int, address: int, stride: int, inner: int, kind: int, n: int, depth: int, padded: int
) -> None:
    """Rows as the kernel's own kind of number, 0 between depth and padded."""
    step = lanes(out)
    size = item_size(kind)
    for r in range(n):
        own = address + r * stride * size
        for i in range(0, padded, step):
            some = max(min(step, depth - i), 0)
            if inner == 1:
                x = read_some(out, own, kind, i, some)
                store_some(out, r * out_stride + i, x, min(step, padded - i))
            else:
                for j in range(min(step, padded - i)):
                    out[r * out_stride + i + j] = as_kind(out, 0.0)
                    if j < some:
                        out[r * out_stride + i + j] = as_kind(out, number_at(own + (i + j) * inner * size, kind))


@kernel
def pack_pairs(out: Any, out_stride: int, address: int, stride: int, n: int, depth: int) -> None:
    """out[j][i] = (v[2j][i], v[2j + 1][i]) as a pair of bfloat16; a last row without a partner gets 0."""
    step = lanes(out)
    for j in range(0, n, 2):
        one = address + j * stride * 2
        for i in range(0, out_stride, step):
            some = max(min(step, depth - i), 0)
            low = widen(load_some(pointer(one, uint16), i, some))
            high = widen(load_some(pointer(one + stride * 2, uint16), i, some if j + 1 < n else 0))
            store_some(out, j // 2 * out_stride + i, low | (high << spread(uint32(16))), min(step, out_stride - i))


@kernel
def write_turned(
    turned: Any, width: int, left: int, n: int, depth: int, factor: Any, corner: Any, rows: Any, kind: int
) -> None:
    """The rows of turned[i][row] from `left` on, each times its factor, to where they belong, rounded to their kind."""
    step = lanes(turned)
    for i in range(0, depth, step):
        store_square(corner, transpose(times_all(load_apart(turned, i * width + left, width), factor)))
        for r in range(n):
            write_some(rows[left + r], kind, i, load(corner, r * step), min(step, depth - i))


# Products.


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


# What is added to the scores of a tile, and which of them are visible.


@kernel
def pack_mask(
    out: Any, width: int, corner: Any, rows: Any, n: int, kind: int, key_stride: int, first: int, keys: int
) -> None:
    """out[key][row]: what a mask adds, −inf where it hides.

    A number that is finite in the mask but not here would hide what the mask does not; it becomes NaN, and the row is
    looked at again with more digits.
    """
    step = lanes(out)
    size = item_size(kind)
    for left in range(0, width, step):
        for top in range(0, keys, step):
            some = min(step, keys - top)
            for r in range(step):
                if left + r >= n:
                    store(corner, r * step, spread_as(out, 0))
                    continue
                place = rows[left + r] + (first + top) * key_stride * size
                if key_stride == 1 and contiguous_mask(out, kind):
                    store(corner, r * step, mask_vector(out, place, kind, some))
                else:
                    for i in range(some):
                        corner[r * step + i] = mask_number(out, place + i * key_stride * size, kind)
            store_apart(out, top * width + left, width, transpose(load_square(corner)))


def contiguous_mask(out: Any, kind: int) -> Any:
    """Whether `mask_vector` reads masks of this kind."""


@by_kind(contiguous_mask)
def _contiguous_mask(out: Any, kind: Any) -> Any:
    if out.dtype == types.float64:
        return lambda out, kind: kind == F64
    return lambda out, kind: kind != F64


def mask_vector(out: Any, address: int, kind: int, some: int) -> Any:
    """What a run of a mask adds."""


@by_kind(mask_vector)
def _mask_vector(out: Any, address: Any, kind: Any, some: Any) -> Any:
    if out.dtype == types.float64:
        return lambda out, address, kind, some: load_some(pointer(address, float64), 0, some)

    def narrow_kinds(out: Any, address: int, kind: int, some: int) -> Any:
        if kind == BOOL:
            own = pointer(address, uint8)
            shown = widen(load(own, 0) if some == lanes(own) else load_some(own, 0, some))
            return where(spread(uint32(0)) < shown, spread(float32(0)), spread(float32(-np.inf)))
        return read_some(out, address, kind, 0, some)

    return narrow_kinds


@kernel
def bool_number(address: int) -> float:
    """What one bool adds."""
    return 0.0 if pointer(address, uint8)[0] else -np.inf


@kernel
def mask_number(out: Any, address: int, kind: int) -> Any:
    """What one element of a mask adds, in the kind of number that out holds."""
    value = bool_number(address) if kind == BOOL else number_at(address, kind)
    held = as_kind(out, value)
    return as_kind(out, np.nan) if held == -np.inf and value != -np.inf else held


@kernel
def hide(scores: Any, width: int, first: int, present: int, state: Any, index: Any) -> None:
    """Put −inf where the bounds of the rows hide one of the keys from `first` on, and take up the maximum and sum."""
    step = lanes(scores)
    nothing = spread_as(scores, -np.inf)
    for left in range(0, width, step):
        low, high = load(index, FIRSTS * width + left), load(index, STOPS * width + left)
        best, total = load(state, TILE_MAX * width + left), load(state, TILE_SUM * width + left)
        for r in range(KEYS_AT_ONCE):
            x = nothing
            if r < present:
                key = spread_as(index, first + r)
                seen = (low <= key) & (key < high)
                raw = load(scores, r * width + left)
                x = where(seen, raw, nothing)
                total = total + where(seen, raw, spread_as(scores, 0))
                best = maximum(x, best)
            store(scores, r * width + left, x)
        store(state, TILE_MAX * width + left, best)
        store(state, TILE_SUM * width + left, total)


@kernel
def dress(
    scores: Any,
    width: int,
    first: int,
    present: int,
    state: Any,
    index: Any,
    softcap: float,
    bias: Any,
    masked: bool,
    slopes: Any,
    sloping: bool,
) -> None:
    """Scale, softcap, bias and masks for the keys from `first` on, and the sums of what is visible of them.

    For a gradient, how steep the softcap is at each score.
    """
    step = lanes(scores)
    nothing, zero, one = spread_as(scores, -np.inf), spread_as(scores, 0), spread_as(scores, 1)
    cap = spread_as(scores, softcap)
    per_cap = spread_as(scores, 1 / softcap if softcap > 0 else 0.0)
    for left in range(0, width, step):
        low, high = load(index, FIRSTS * width + left), load(index, STOPS * width + left)
        best, total = load(state, TILE_MAX * width + left), load(state, TILE_SUM * width + left)
        count, before = load(state, TILE_COUNT * width + left), load(state, COUNT * width + left)
        highest, opening = load(state, HIGHEST_QK * width + left), load(state, FIRST_SCORE * width + left)
        unit = load(state, UNIT * width + left)
        for r in range(KEYS_AT_ONCE):
            x = nothing
            if r < present:
                key = spread_as(index, first + r)
                shown = where((low <= key) & (key < high), one, zero)
                qk = load(scores, r * width + left) * unit
                x = qk
                if softcap > 0:
                    bent = tanh(qk * per_cap)
                    x = cap * bent
                    if sloping:
                        store(slopes, r * width + left, one - bent * bent)
                if masked:
                    added = load(bias, r * width + left)
                    x = x + added
                    shown = where(added == nothing, zero, shown)
                seen = shown > zero
                opening = where(seen & ((before + count) == zero), x, opening)
                highest = maximum(where(seen, qk, nothing), highest)
                total = total + where(seen, x, zero)
                x = where(seen, x, nothing)
                best = maximum(x, best)
                count = count + shown
            store(scores, r * width + left, x)
        store(state, TILE_MAX * width + left, best)
        store(state, TILE_SUM * width + left, total)
        store(state, TILE_COUNT * width + left, count)
        store(state, HIGHEST_QK * width + left, highest)
        store(state, FIRST_SCORE * width + left, opening)


# Dropout: the function of `attemper._dropout`, for a vector of rows.


@kernel
def splitmix(x: Any) -> Any:
    """A step of SplitMix64."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@kernel
def row_key(seed: int, row: int) -> Any:
    """The 64 bits from which a row draws."""
    return splitmix(splitmix(uint64(seed)) + uint64(0x9E3779B97F4A7C15) * (uint64(row) + uint64(1)))


@kernel
def finalise(x: Any) -> Any:
    """MurmurHash3's last step."""
    x = (x ^ (x >> spread(uint32(16)))) * spread(uint32(0x85EBCA6B))
    x = (x ^ (x >> spread(uint32(13)))) * spread(uint32(0xC2B2AE35))
    return x ^ (x >> spread(uint32(16)))


@kernel
def survives(low: Any, high: Any, key: int, threshold: int) -> Any:
    """Whether dropout keeps the weight of a key, for a vector of rows."""
    draw = finalise((spread(uint32(uint32(key) * uint32(0x9E3779B1)))) ^ low)
    return spread(uint32(threshold)) <= finalise(draw + high)


def drop(weights: Any, width: int, first: int, stop: int, index: Any, threshold: int) -> None:
    """Put 0 for the weights that dropout drops."""


@by_kind(drop)
def _drop(weights: Any, width: Any, first: Any, stop: Any, index: Any, threshold: Any) -> Any:
    if weights.dtype == types.float64:

        def one_by_one(weights: Any, width: int, first: int, stop: int, index: Any, threshold: int) -> None:
            for key in range(first, stop):
                for i in range(width):
                    low, high = uint32(index[DRAW_LOW * width + i]), uint32(index[DRAW_HIGH * width + i])
                    draw = finalise_one(uint32(uint32(key) * uint32(0x9E3779B1)) ^ low)
                    if finalise_one(uint32(draw + high)) < uint32(threshold):
                        weights[(key - first) * width + i] = 0.0

        return one_by_one

    pairs = weights.dtype == types.uint32

    def by_vectors(weights: Any, width: int, first: int, stop: int, index: Any, threshold: int) -> None:
        words = pointer(address_of(weights), uint32)
        draws = pointer(address_of(index), uint32)
        none, low_half = spread(uint32(0)), spread(uint32(0xFFFF))
        for left in range(0, width, lanes(words)):
            low, high = load(draws, DRAW_LOW * width + left), load(draws, DRAW_HIGH * width + left)
            for key in range(first, stop, 2 if pairs else 1):
                place = (key - first) // (2 if pairs else 1) * width + left
                own = load(words, place)
                if pairs:
                    one = where(survives(low, high, key, threshold), own & low_half, none)
                    two = where(survives(low, high, key + 1, threshold), own, none)
                    store(words, place, one | (two ^ (two & low_half)))
                else:
                    store(words, place, where(survives(low, high, key, threshold), own, none))

    return by_vectors


@kernel
def finalise_one(x: Any) -> Any:
    """The same for one row."""
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x85EBCA6B))
    x = uint32(uint32(x ^ (x >> uint32(13))) * uint32(0xC2B2AE35))
    return uint32(x ^ (x >> uint32(16)))


def lowest(p: Any) -> Any:
    """The exponent of 2 from which a weight is 0, in every lane."""


@by_kind(lowest)
def _lowest(p: Any) -> Any:
    value = LOWEST[p.dtype.bitwidth]
    return lambda p: spread_as(p, value)
