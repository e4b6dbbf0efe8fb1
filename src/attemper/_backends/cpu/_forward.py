"""The output and the Reading: tiles of keys merged into the State of each query row, as `attemper._state` has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64, int64, types, uint8, uint16, uint32, uint64

from . import _slots as slot
from ._compile import by_kind, kernel
from ._simd import (
    address_of,
    any_lane,
    as_indices,
    as_words,
    at,
    count_up,
    exp2,
    first_lane,
    fma,
    highest_of_lanes,
    lanes,
    load,
    log,
    magnitude,
    maximum,
    pair_up,
    per_cell,
    pointer,
    pointer_as,
    spread,
    spread_as,
    sqrt,
    store,
    store_some,
    sum_of_lanes,
    to_floating,
    to_whole,
    where,
)
from ._slots import (
    CLEAR,
    CLEAR_STOP,
    CORNER,
    COUNT,
    DRAW_HIGH,
    DRAW_LOW,
    F32,
    F64,
    FACTOR,
    FIRST_SCORE,
    FIRSTS,
    HIGHEST_QK,
    INDEX_PARTS,
    KEEP,
    LEAST,
    LEFT,
    LIMITS,
    MAXIMUM,
    MEAN,
    MOST,
    PARTS,
    REFERENCE,
    SPREAD,
    SQUARES,
    STOPS,
    TILE_COUNT,
    TILE_MAX,
    TILE_MEAN,
    TILE_SPREAD,
    TILE_SUM,
    TILT,
    TOTAL,
    UNIT,
)
from ._target import COLUMNS, KEY_TILE, PANELS, target
from ._tile import (
    KEYS_AT_ONCE,
    as_kind,
    dress,
    drop,
    find_rows,
    hide,
    item_size,
    lowest,
    pack_mask,
    pack_pairs,
    pack_rows,
    pack_turned,
    padded,
    row_key,
    scores_of,
    thin_scores,
    thin_values,
    values_of,
    write_turned,
)

LN2 = float(np.log(2))
BYTES = target().bits // 8

KEYS_A_TURN = 4 if target().registers == 32 else 2
"""Keys that a turn of the loop over weights takes: with less, LLVM reads the constants of exp2 anew in each."""

MANY, FEW = uint16, uint8
"""Kernels for many rows and for few: told apart by a kind, so that neither is compiled with what the other needs."""


# Weights.


def put_weights(weights: Any, place: int, width: int, one: Any, two: Any) -> None:
    """The weights of two keys, as the product with v takes them."""


@by_kind(put_weights)
def _put_weights(weights: Any, place: Any, width: Any, one: Any, two: Any) -> Any:
    if weights.dtype == types.uint32:
        return lambda weights, place, width, one, two: store(weights, place, pair_up(one, two))

    def plain(weights: Any, place: int, width: int, one: Any, two: Any) -> None:
        store(weights, place, one)
        store(weights, place + width, two)

    return plain


def _make_exponentials(measure: bool, hidden: bool) -> Any:
    @kernel
    def exponentials(scores: Any, weights: Any, width: int, rows: int, state: Any) -> None:
        """Scores to weights, two keys at a time, with the sums that the State takes up."""
        step = lanes(scores)
        cell = 2 // per_cell(weights)
        low, nothing, zero = lowest(scores), spread_as(scores, -np.inf), spread_as(scores, 0)
        for left in range(0, width, step):
            factor, reference = load(state, FACTOR * width + left), load(state, REFERENCE * width + left)
            mean = load(state, TILE_MEAN * width + left)
            total_0, total_1 = zero, zero
            tilt_0, tilt_1 = zero, zero
            squares_0, squares_1 = zero, zero
            spread_0, spread_1 = zero, zero
            for top in range(0, rows, KEYS_A_TURN):
                for j in range(top, top + KEYS_A_TURN, 2):
                    s_0, s_1 = load(scores, j * width + left), load(scores, (j + 1) * width + left)
                    # Not one product less another: the largest weight would not be exactly 1.
                    x_0, x_1 = maximum(low, (s_0 - reference) * factor), maximum(low, (s_1 - reference) * factor)
                    p_0, p_1 = exp2(x_0), exp2(x_1)
                    put_weights(weights, j * cell // 2 * width + left, width, p_0, p_1)
                    total_0, total_1 = total_0 + p_0, total_1 + p_1
                    if measure:
                        tilt_0, tilt_1 = fma(p_0, x_0, tilt_0), fma(p_1, x_1, tilt_1)
                        squares_0, squares_1 = fma(p_0, p_0, squares_0), fma(p_1, p_1, squares_1)
                        u_0, u_1 = s_0 - mean, s_1 - mean
                        if hidden:
                            u_0, u_1 = where(s_0 > nothing, u_0, zero), where(s_1 > nothing, u_1, zero)
                        spread_0, spread_1 = fma(u_0, u_0, spread_0), fma(u_1, u_1, spread_1)
            # The tile's own sums first: a long chain of additions to a large number would lose digits.
            store(state, TOTAL * width + left, load(state, TOTAL * width + left) + (total_0 + total_1))
            if measure:
                store(state, TILT * width + left, load(state, TILT * width + left) + (tilt_0 + tilt_1))
                store(state, SQUARES * width + left, load(state, SQUARES * width + left) + (squares_0 + squares_1))
                store(state, TILE_SPREAD * width + left, spread_0 + spread_1)

    return exponentials


weigh_only = _make_exponentials(measure=False, hidden=False)
weigh_all = _make_exponentials(measure=True, hidden=False)
weigh_visible = _make_exponentials(measure=True, hidden=True)


@kernel
def renew(state: Any, width: int) -> None:
    """Move the reference to the new maximum, and the sums so far with it."""
    low, nothing, zero, one = lowest(state), spread_as(state, -np.inf), spread_as(state, 0), spread_as(state, 1)
    for left in range(0, width, lanes(state)):
        best, old = load(state, TILE_MAX * width + left), load(state, REFERENCE * width + left)
        reference = where(best > nothing, best, old)
        shift = maximum(low, (old - reference) * load(state, FACTOR * width + left))
        keep = exp2(shift)
        total = load(state, TOTAL * width + left)
        store(state, TILT * width + left, keep * fma(shift, total, load(state, TILT * width + left)))
        store(state, SQUARES * width + left, keep * keep * load(state, SQUARES * width + left))
        store(state, TOTAL * width + left, keep * total)
        store(state, KEEP * width + left, keep)
        store(state, REFERENCE * width + left, reference)
        store(state, MAXIMUM * width + left, best)
        count = load(state, TILE_COUNT * width + left)
        store(state, TILE_MEAN * width + left, load(state, TILE_SUM * width + left) / where(count > zero, count, one))


@kernel
def merge_moments(state: Any, width: int) -> None:
    """Chan, Golub and LeVeque's pairwise update."""
    zero, one = spread_as(state, 0), spread_as(state, 1)
    for left in range(0, width, lanes(state)):
        before, count = load(state, COUNT * width + left), load(state, TILE_COUNT * width + left)
        both = before + count
        share = count / where(both > zero, both, one)
        mean = load(state, MEAN * width + left)
        apart = load(state, TILE_MEAN * width + left) - mean
        within = load(state, SPREAD * width + left) + load(state, TILE_SPREAD * width + left)
        store(state, SPREAD * width + left, fma(apart * apart, before * share, within))
        store(state, MEAN * width + left, fma(apart, share, mean))
        store(state, COUNT * width + left, both)


@kernel
def first_scores(scores: Any, width: int, n: int, first: int, stop: int, state: Any, index: Any) -> None:
    """Keep the score of each row's first visible key, if this tile has it."""
    limits = at(index, LIMITS * width)
    key = int64(limits[LEAST])
    if key == int64(limits[CLEAR]):
        # That of all rows, as it mostly is.
        if first <= key < stop:
            for left in range(0, width, lanes(state)):
                store(state, FIRST_SCORE * width + left, load(scores, (key - first) * width + left))
        return
    for i in range(n):
        key = int64(index[FIRSTS * width + i])
        if first <= key < stop and key < int64(index[STOPS * width + i]):
            state[FIRST_SCORE * width + i] = scores[(key - first) * width + i]


# A block of rows.


class Room(NamedTuple):
    """The scratch memory of one worker."""

    turned: int
    out: int
    scores: Any
    bias: Any
    weights: Any
    keys: Any
    values: Any
    state: int
    indices: int
    corner: Any
    addresses: Any
    thin: Any


class Panel(NamedTuple):
    """Some rows of a block, as many as a few vectors hold."""

    begin: int
    n: int
    columns: int
    width: int
    turned: Any
    out: Any
    state: Any
    bounds: Any


@kernel
def room_at(scratch: int, depth: int, value_depth: int, like: Any, cells: Any) -> Any:
    step = lanes(like)
    number = BYTES // step
    whole = step * COLUMNS
    deep, value_deep = padded(depth, step), padded(value_depth, step)
    out = scratch + PANELS * whole * deep * number
    scores = out + PANELS * whole * value_deep * number
    bias = scores + KEY_TILE * whole * number
    pairs = bias + KEY_TILE * whole * number
    keys = pairs + KEY_TILE * whole * number
    values = keys + KEY_TILE * deep * number
    state = values + KEY_TILE * value_deep * number
    index = state + PANELS * PARTS * whole * number
    corner = index + PANELS * INDEX_PARTS * whole * number
    addresses = corner + CORNER * step * number
    return Room(
        turned=scratch,
        out=out,
        scores=pointer_as(like, scores),
        bias=pointer_as(like, bias),
        # Weights take the place of scores unless they are pairs.
        weights=pointer_as(cells, scores if per_cell(cells) == 1 else pairs),
        keys=pointer_as(cells, keys),
        values=pointer_as(cells, values),
        state=state,
        indices=index,
        corner=pointer_as(like, corner),
        addresses=pointer(addresses, int64),
        thin=pointer_as(like, addresses + 8 * whole),
    )


@kernel
def panel_at(room: Any, begin: int, rows: int, p: int, depth: int, value_depth: int, like: Any, cells: Any) -> Any:
    step = lanes(like)
    number = BYTES // step
    whole = step * COLUMNS
    n = min(whole, rows - p * whole)
    columns = (n + step - 1) // step
    deep, value_deep = padded(depth, step), padded(value_depth, step)
    return Panel(
        begin=begin + p * whole,
        n=n,
        columns=columns,
        width=columns * step,
        turned=pointer_as(cells, room.turned + p * whole * deep * number),
        out=pointer_as(like, room.out + p * whole * value_deep * number),
        state=pointer_as(like, room.state + p * PARTS * whole * number),
        bounds=as_indices(pointer_as(like, room.indices + p * INDEX_PARTS * whole * number)),
    )


@kernel
def open_panel(d: Any, room: Any, panel: Any, batch: int, head: int, like: Any) -> tuple[int, int]:
    """Lay out the rows of a panel: what they see, how they are scaled, q turned round. The keys that any one sees."""
    step, width, state, index = lanes(like), panel.width, panel.state, panel.bounds
    queries, keys, item = d[slot.QUERIES], d[slot.KEYS], item_size(d[slot.KIND])
    for part in range(PARTS):
        value = 0.0
        if part == MAXIMUM or part == HIGHEST_QK or part == FIRST_SCORE or part == TILE_MAX:
            value = -np.inf
        if part == REFERENCE:
            value = -1e30
        for left in range(0, width, step):
            store(state, part * width + left, spread_as(like, value))
    scales, powers = pointer(d[slot.SCALE], float64), pointer(d[slot.POWER], float64)
    low, high, clear, clear_stop = keys, 0, 0, keys
    own_head, query = head + panel.begin // queries, panel.begin % queries
    alike = d[slot.SCALE_HEAD] == 0 and d[slot.FIRST] == 0 and d[slot.THRESHOLD] == 0
    if alike:
        # All rows are, as they mostly are: at once.
        scale, power = scales[batch * d[slot.SCALE_BATCH]], powers[batch * d[slot.SCALE_BATCH]]
        low, high = (0, keys) if keys > 0 else (keys, 0)
        clear, clear_stop = low, high
        for left in range(0, width, step):
            store(state, FACTOR * width + left, spread_as(like, (1.0 if d[slot.GENERAL] else scale) / LN2))
            store(state, UNIT * width + left, spread_as(like, scale))
            store(state, KEEP * width + left, spread_as(like, power))
            store(index, FIRSTS * width + left, spread_as(index, low))
            store(index, STOPS * width + left, spread_as(index, high))
    for i in range(0 if alike else width):
        place = batch * d[slot.SCALE_BATCH] + own_head * d[slot.SCALE_HEAD]
        scale = scales[place]
        state[FACTOR * width + i] = (1.0 if d[slot.GENERAL] else scale) / LN2
        state[UNIT * width + i] = scale
        state[KEEP * width + i] = powers[place]
        first, stop = 0, keys
        if d[slot.FIRST] != 0:
            place = batch * d[slot.BOUND_BATCH] + query
            first, stop = pointer(d[slot.FIRST], int64)[place], pointer(d[slot.STOP], int64)[place]
        if first >= stop:
            first, stop = keys, 0
        else:
            low, high = min(low, first), max(high, stop)
        clear, clear_stop = max(clear, first), min(clear_stop, stop)
        index[FIRSTS * width + i] = first
        index[STOPS * width + i] = stop
        if d[slot.THRESHOLD] != 0:
            number = (batch % d[slot.PERIOD] * d[slot.HEADS] + own_head) * queries + query
            key = row_key(d[slot.SEED], number)
            index[DRAW_LOW * width + i] = int64(key & uint64(0xFFFFFFFF))
            index[DRAW_HIGH * width + i] = int64(key >> uint64(32))
        if i < panel.n - 1:
            query += 1
            if query == queries:
                own_head, query = own_head + 1, 0
    limits = at(index, LIMITS * width)
    limits[LEAST], limits[MOST], limits[CLEAR], limits[CLEAR_STOP] = low, high, clear, clear_stop
    base = d[slot.Q] + (batch * d[slot.Q_BATCH] + head * d[slot.Q_HEAD]) * item
    find_rows(room.addresses, base, panel.begin, panel.n, width, queries, d[slot.Q_HEAD], d[slot.Q_ROW], item)
    cells = panel.turned
    corner = pointer_as(cells, address_of(room.corner))
    pack_turned(cells, width, corner, room.addresses, panel.n, d[slot.DEPTH], d[slot.KIND], d[slot.Q_INNER])
    if per_cell(cells) == 1:
        # A power of 2 changes no digit of q; pairs of bfloat16 go without.
        turned = pointer_as(like, address_of(cells))
        for left in range(0, width, step):
            power = load(state, KEEP * width + left)
            for i in range(d[slot.DEPTH]):
                store(turned, i * width + left, load(turned, i * width + left) * power)
    return low, high


@kernel
def clear_rows(turned: Any, depth: int, width: int) -> None:
    """Zeros for turned[i][row], up to a multiple of the lanes above depth."""
    step = lanes(turned)
    for i in range(0, (depth + step - 1) // step * step * width, step):
        store(turned, i, spread_as(turned, 0))


@kernel
def tile_counts(state: Any, index: Any, width: int, first: int, stop: int) -> None:
    """How many of the keys between two each row sees, by its bounds."""
    least, most, zero = spread_as(index, first), spread_as(index, stop), spread_as(state, 0)
    for left in range(0, width, lanes(state)):
        low, high = load(index, FIRSTS * width + left), load(index, STOPS * width + left)
        low, high = where(low > least, low, least), where(high < most, high, most)
        count = to_floating(high - low)
        store(state, TILE_COUNT * width + left, where(count > zero, count, zero))


@kernel
def seen_of(panel: Any, tile: int, stop: int) -> tuple[int, int, int, int]:
    """Of the keys of a tile: from where to where any row sees one, and from where to where all rows see all."""
    limits = at(panel.bounds, LIMITS * panel.width)
    first, last = max(int64(limits[LEAST]), tile), min(int64(limits[MOST]), stop)
    return first, last, max(int64(limits[CLEAR]), tile), min(int64(limits[CLEAR_STOP]), stop)


@kernel
def lay_mask(d: Any, room: Any, panel: Any, batch: int, head: int, first: int, last: int) -> None:
    """Pack what the mask adds to the scores of a tile."""
    kind, key_stride = d[slot.MASK_KIND], d[slot.MASK_KEY]
    item, rows, n, width = item_size(kind), room.addresses, panel.n, panel.width
    base = d[slot.MASK] + (batch * d[slot.MASK_BATCH] + head * d[slot.MASK_HEAD]) * item
    find_rows(rows, base, panel.begin, n, width, d[slot.QUERIES], d[slot.MASK_HEAD], d[slot.MASK_ROW], item)
    pack_mask(room.bias, width, room.corner, rows, n, kind, key_stride, first, last - first)


def thin_rows_of(
    d: Any, room: Any, panel: Any, k: Any, k_stride: int, first: int, last: int, tile: int, mode: Any
) -> None:
    """The scores of a panel of few rows."""


@by_kind(thin_rows_of)
def _thin_rows_of(
    d: Any, room: Any, panel: Any, k: Any, k_stride: Any, first: Any, last: Any, tile: Any, mode: Any
) -> Any:
    if mode.dtype != FEW:
        return lambda d, room, panel, k, k_stride, first, last, tile, mode: None

    def rows(d: Any, room: Any, panel: Any, k: Any, k_stride: int, first: int, last: int, tile: int, mode: Any) -> None:
        step = lanes(k)
        deep = (d[slot.DEPTH] + step - 1) // step * step
        for j in range(first, last, step):
            own, present = at(k, (j - tile) * k_stride), min(step, last - j)
            for r in range(panel.n):
                thin_scores(at(room.thin, r * deep), own, k_stride, deep, present, room.corner, room.corner)
                for i in range(step):
                    room.scores[(j - first + i) * panel.width + r] = room.corner[i]

    return rows


def thin_values_of(
    d: Any, room: Any, panel: Any, v: Any, v_stride: int, first: int, last: int, tile: int, mode: Any
) -> None:
    """The output of a panel of few rows."""


@by_kind(thin_values_of)
def _thin_values_of(
    d: Any, room: Any, panel: Any, v: Any, v_stride: Any, first: Any, last: Any, tile: Any, mode: Any
) -> Any:
    if mode.dtype != FEW:
        return lambda d, room, panel, v, v_stride, first, last, tile, mode: None

    def rows(d: Any, room: Any, panel: Any, v: Any, v_stride: int, first: int, last: int, tile: int, mode: Any) -> None:
        step = lanes(v)
        deep = (d[slot.VALUE_DEPTH] + step - 1) // step * step
        own = at(v, (first - tile) * v_stride)
        for r in range(panel.n):
            keep = panel.state[KEEP * panel.width + r]
            thin_values(
                at(room.weights, r),
                panel.width,
                own,
                v_stride,
                last - first,
                deep,
                at(panel.out, r),
                panel.width,
                keep,
                room.corner,
            )

    return rows


def scores_of_many(
    columns: int, q: Any, k: Any, stride: int, cells: int, present: int, scores: Any, sums: Any, mode: Any
) -> None:
    """`scores_of`, where there are many rows."""


@by_kind(scores_of_many)
def _scores_of_many(
    columns: Any, q: Any, k: Any, stride: Any, cells: Any, present: Any, scores: Any, sums: Any, mode: Any
) -> Any:
    if mode.dtype == FEW:
        return lambda columns, q, k, stride, cells, present, scores, sums, mode: None
    return lambda columns, q, k, stride, cells, present, scores, sums, mode: scores_of(
        columns, q, k, stride, cells, present, scores, sums
    )


def values_of_many(columns: int, weights: Any, v: Any, stride: int, cells: int, out: Any, keep: Any, mode: Any) -> None:
    """`values_of`, where there are many rows."""


@by_kind(values_of_many)
def _values_of_many(columns: Any, weights: Any, v: Any, stride: Any, cells: Any, out: Any, keep: Any, mode: Any) -> Any:
    if mode.dtype == FEW:
        return lambda columns, weights, v, stride, cells, out, keep, mode: None
    return lambda columns, weights, v, stride, cells, out, keep, mode: values_of(
        columns, weights, v, stride, cells, out, keep
    )


def visit_thin(
    d: Any, room: Any, panel: Any, tile: int, stop: int, k: Any, k_stride: int, v: Any, v_stride: int, mode: Any
) -> None:
    """`visit` for few rows that only bounds hide keys from: each by itself, with keys in the lanes."""


@by_kind(visit_thin)
def _visit_thin(
    d: Any, room: Any, panel: Any, tile: Any, stop: Any, k: Any, k_stride: Any, v: Any, v_stride: Any, mode: Any
) -> Any:
    if mode.dtype != FEW:
        return lambda d, room, panel, tile, stop, k, k_stride, v, v_stride, mode: None

    def each_row(
        d: Any, room: Any, panel: Any, tile: int, stop: int, k: Any, k_stride: int, v: Any, v_stride: int, mode: Any
    ) -> None:
        state, width, step, scores = panel.state, panel.width, lanes(k), room.scores
        deep = (d[slot.DEPTH] + step - 1) // step * step
        value_deep = (max(d[slot.VALUE_DEPTH], 0) + step - 1) // step * step
        low, nothing, zero = lowest(k), spread_as(k, -np.inf), spread_as(k, 0)
        for r in range(panel.n):
            first = max(int64(panel.bounds[FIRSTS * width + r]), tile)
            n = min(int64(panel.bounds[STOPS * width + r]), stop) - first
            if n <= 0:
                continue
            for j in range(0, n, step):
                own, present = at(k, (first - tile + j) * k_stride), min(step, n - j)
                thin_scores(at(room.thin, r * deep), own, k_stride, deep, present, at(scores, j), room.corner)
            for j in range(n, (n + step - 1) // step * step):
                scores[j] = -np.inf
            best, total = nothing, zero
            for j in range(0, n, step):
                s = load(scores, j)
                best = maximum(s, best)
                if j + step <= n:
                    total = total + s
            if first == int64(panel.bounds[FIRSTS * width + r]):
                state[FIRST_SCORE * width + r] = scores[0]
            old, count, before = state[REFERENCE * width + r], as_kind(k, n), state[COUNT * width + r]
            top = max(highest_of_lanes(best), state[MAXIMUM * width + r])
            tile_sum = sum_of_lanes(total)
            # Not by what they are: a visible score may be at −inf too, and has to show.
            for j in range(n - n % step, n):
                tile_sum += scores[j]
            tile_mean = tile_sum / count
            reference = top if top > -np.inf else old
            factor = state[FACTOR * width + r]
            shift = maximum(low, spread((old - reference) * factor))
            keep, shift_by = first_lane(exp2(shift)), first_lane(shift)
            factors, references, means = spread(factor), spread(reference), spread(tile_mean)
            weight, tilt, squares, spreads = zero, zero, zero, zero
            for j in range(0, n, step):
                s = load(scores, j)
                x = maximum(low, (s - references) * factors)
                p = exp2(x)
                store(scores, j, p)
                weight, tilt, squares = weight + p, fma(p, x, tilt), fma(p, p, squares)
                u = where(s > nothing, s - means, zero)
                spreads = fma(u, u, spreads)
            so_far = state[TOTAL * width + r]
            leant = keep * (state[TILT * width + r] + shift_by * so_far)
            state[TILT * width + r] = leant + sum_of_lanes(tilt)
            state[TOTAL * width + r] = keep * so_far + sum_of_lanes(weight)
            state[SQUARES * width + r] = keep * keep * state[SQUARES * width + r] + sum_of_lanes(squares)
            state[MAXIMUM * width + r], state[REFERENCE * width + r] = top, reference
            share, apart = count / (before + count), tile_mean - state[MEAN * width + r]
            within = state[SPREAD * width + r] + sum_of_lanes(spreads)
            state[SPREAD * width + r] = within + apart * apart * before * share
            state[MEAN * width + r] += apart * share
            state[COUNT * width + r] = before + count
            if value_deep > 0:
                own = at(v, (first - tile) * v_stride)
                thin_values(scores, 1, own, v_stride, n, value_deep, at(panel.out, r), width, keep, room.corner)

    return each_row


@kernel
def visit(
    d: Any, f: Any, room: Any, panel: Any, batch: int, head: int, tile: int, stop: int, k: Any, k_stride: int, v: Any,
    v_stride: int,
    mode: Any,
) -> None:  # fmt: skip
    """Take the keys of one tile up into the State of a panel."""
    width, state, index, scores = panel.width, panel.state, panel.bounds, room.scores
    cell = per_cell(k)
    first, last, clear, clear_stop = seen_of(panel, tile, stop)
    if first >= last:
        return
    if d[slot.THIN] and not d[slot.GENERAL] and d[slot.THRESHOLD] == 0:
        visit_thin(d, room, panel, tile, stop, k, k_stride, v, v_stride, mode)
        return
    first -= (first - tile) % cell
    for left in range(0, width, lanes(state)):
        store(state, TILE_MAX * width + left, load(state, MAXIMUM * width + left))
        store(state, TILE_SUM * width + left, spread_as(state, 0))
        store(state, TILE_COUNT * width + left, spread_as(state, 0))
    general, masked = d[slot.GENERAL] != 0, d[slot.MASK] != 0
    if masked:
        lay_mask(d, room, panel, batch, head, first, last)
    hidden = general
    thin = d[slot.THIN] != 0
    if thin:
        thin_rows_of(d, room, panel, k, k_stride, first, last, tile, mode)
    for j in range(first, last, KEYS_AT_ONCE):
        present = min(KEYS_AT_ONCE, last - j)
        here = at(scores, (j - first) * width)
        plain = not general and not thin and clear <= j and j + KEYS_AT_ONCE <= clear_stop
        if not thin:
            # Where something is hidden, maximum and sum are of what is left, and those of the product are not used.
            sums = at(state, TILE_MAX * width) if plain else at(room.corner, 0)
            own = at(k, (j - tile) * k_stride)
            scores_of_many(panel.columns, panel.turned, own, k_stride, d[slot.DEPTH] // cell, present, here, sums, mode)
        if general:
            bias = at(room.bias, (j - first) * width)
            dress(here, width, j, present, state, index, f[slot.SOFTCAP], bias, masked, here, False)
        elif not plain:
            hide(here, width, j, present, state, index)
            hidden = True
    if not general:
        tile_counts(state, index, width, first, last)
        if int64(index[LIMITS * width + CLEAR]) >= first:
            first_scores(scores, width, panel.n, first, last, state, index)
    renew(state, width)
    rows = (last - first + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
    if not d[slot.MEASURE]:
        weigh_only(scores, room.weights, width, rows, state)
    elif hidden:
        weigh_visible(scores, room.weights, width, rows, state)
    else:
        weigh_all(scores, room.weights, width, rows, state)
    merge_moments(state, width)
    if d[slot.VALUE_DEPTH] >= 0:
        if d[slot.THRESHOLD] != 0:
            drop(room.weights, width, first, last, index, d[slot.THRESHOLD])
        if thin:
            thin_values_of(d, room, panel, v, v_stride, first, last, tile, mode)
            return
        some = (last - first + cell - 1) // cell
        keep = at(state, KEEP * width)
        for i in range(0, d[slot.VALUE_DEPTH], KEYS_AT_ONCE):
            here = at(v, (first - tile) // cell * v_stride + i)
            values_of_many(panel.columns, room.weights, here, v_stride, some, at(panel.out, i * width), keep, mode)


@kernel
def forward_task(d: Any, f: Any, task: int, scratch: int, like: Any, cells: Any, mode: Any) -> None:
    """All keys, or one split of them, for one block of rows.

    The rows of a stack of heads are numbered through; a block is some panels of them.
    """
    split, task = task % d[slot.SPLITS], task // d[slot.SPLITS]
    # The last rows see most when a mask is causal: they come first, so that no thread is left alone with a long one.
    block, unit = d[slot.BLOCKS] - 1 - task % d[slot.BLOCKS], task // d[slot.BLOCKS]
    stacks = d[slot.HEADS] // d[slot.STACK]
    batch, head = unit // stacks, unit % stacks * d[slot.STACK]
    whole = lanes(like) * COLUMNS
    begin = block * PANELS * whole
    rows = min(PANELS * whole, d[slot.STACK] * d[slot.QUERIES] - begin)
    panels = (rows + whole - 1) // whole
    depth, value_depth = d[slot.DEPTH], max(d[slot.VALUE_DEPTH], 0)
    room = room_at(scratch, depth, value_depth, like, cells)
    low, high = d[slot.KEYS], 0
    for p in range(panels):
        panel = panel_at(room, begin, rows, p, depth, value_depth, like, cells)
        own_low, own_high = open_panel(d, room, panel, batch, head, like)
        low, high = min(low, own_low), max(high, own_high)
        clear_rows(panel.out, value_depth, panel.width)
        if d[slot.THIN]:
            # The rows as they were, for vectors along them.
            deep = (depth + lanes(like) - 1) // lanes(like) * lanes(like)
            for r in range(panel.n):
                for i in range(deep):
                    room.thin[r * deep + i] = panel.turned[i * panel.width + r]
    share = (high - low + d[slot.SPLITS] - 1) // d[slot.SPLITS]
    low = low + split * share
    high = min(high, low + share)

    kind, item = d[slot.KIND], item_size(d[slot.KIND])
    kv_head = head // d[slot.GROUP]
    k_base = d[slot.K] + (batch * d[slot.K_BATCH] + kv_head * d[slot.K_HEAD]) * item
    v_base = d[slot.V] + (batch * d[slot.V_BATCH] + kv_head * d[slot.V_HEAD]) * item
    cell = per_cell(cells)
    own_kind = item == BYTES // lanes(like)
    # In whole vectors where they go along the components, else in as many as are taken at once.
    unit = lanes(like) if d[slot.THIN] else KEYS_AT_ONCE
    k_wide = (depth + unit - 1) // unit * unit if d[slot.THIN] else depth
    v_wide = (value_depth + unit - 1) // unit * unit
    # Once where nobody sees a key too: what such rows have to say is written all the same.
    for tile in range(low, max(high, low + 1), KEY_TILE):
        stop = min(tile + KEY_TILE, high)
        k_place, v_place = k_base + tile * d[slot.K_ROW] * item, v_base + tile * d[slot.V_ROW] * item
        k, k_stride = pointer_as(cells, k_place), d[slot.K_ROW] // cell
        if cell == 1 and not (own_kind and d[slot.K_INNER] == 1 and k_wide == depth):
            k, k_stride = room.keys, k_wide
            pack_rows(k, k_wide, k_place, d[slot.K_ROW], d[slot.K_INNER], kind, stop - tile, depth, k_wide)
        v, v_stride = pointer_as(cells, v_place), d[slot.V_ROW]
        if value_depth > 0 and cell == 2:
            v, v_stride = room.values, v_wide
            pack_pairs(v, v_wide, v_place, d[slot.V_ROW], stop - tile, value_depth)
        elif value_depth > 0 and not (own_kind and d[slot.V_INNER] == 1 and v_wide == value_depth):
            v, v_stride = room.values, v_wide
            pack_rows(v, v_wide, v_place, d[slot.V_ROW], d[slot.V_INNER], kind, stop - tile, value_depth, v_wide)
        for p in range(panels):
            panel = panel_at(room, begin, rows, p, depth, value_depth, like, cells)
            visit(d, f, room, panel, batch, head, tile, stop, k, k_stride, v, v_stride, mode)
            # Not all panels in a row at the end: so much to be written at a time would have to wait.
            if stop == high and d[slot.SPLITS] == 1:
                finish(d, f, room, panel, batch, head)
            elif stop == high:
                leave(d, panel, task, p, split)


# What is left when all keys have been seen.


@kernel
def put(d: Any, field: int, row: int, x: Any, n: int, like: Any) -> None:
    """Write a field of the Reading, if anybody wants it."""
    if d[field] != 0:
        own = pointer_as(like, d[field])
        # Whole vectors without a mask, which costs more than the question.
        if n == lanes(like):
            store(own, row, x)
        else:
            store_some(own, row, x, n)


@kernel
def put_words(d: Any, field: int, row: int, x: Any, n: int, like: Any) -> None:
    """The same for whole numbers."""
    if d[field] != 0:
        own = pointer(d[field], int64)
        if n == lanes(like):
            store(own, row, as_words(x))
        else:
            store_some(own, row, as_words(x), n)


@kernel
def squares_of(out: Any, width: int, left: int, depth: int, factor: Any) -> Any:
    """Σ (out · factor)² of each row, in four sums, which lose fewer digits than one."""
    one, two, three, four = spread_as(out, 0), spread_as(out, 0), spread_as(out, 0), spread_as(out, 0)
    for i in range(0, depth - 3, 4):
        x = load(out, i * width + left) * factor
        y = load(out, (i + 1) * width + left) * factor
        z = load(out, (i + 2) * width + left) * factor
        w = load(out, (i + 3) * width + left) * factor
        one, two, three, four = fma(x, x, one), fma(y, y, two), fma(z, z, three), fma(w, w, four)
    for i in range(depth - depth % 4, depth):
        x = load(out, i * width + left) * factor
        one = fma(x, x, one)
    return (one + two) + (three + four)


@kernel
def norm_of(out: Any, width: int, left: int, depth: int, factor: Any) -> Any:
    """The Euclidean norm of each row; the numbers are made comparable first where their squares leave the range."""
    zero = spread_as(out, 0)
    total = squares_of(out, width, left, depth, factor)
    sound = (total > spread_as(out, 1e-30)) & (total < spread_as(out, 1e30))
    if not any_lane(where(sound, zero, spread_as(out, 1)) > zero):
        return sqrt(total)
    largest = zero
    for i in range(depth):
        largest = maximum(largest, magnitude(load(out, i * width + left) * factor))
    unit = where((largest > zero) & (largest < spread_as(out, np.inf)), largest, spread_as(out, 1))
    return unit * sqrt(squares_of(out, width, left, depth, factor / unit))


@kernel
def sink_factors(d: Any, panel: Any, batch: int, head: int, left: int, n: int) -> None:
    """What a sink takes, and by what its presence multiplies the denominator: left in two parts of the state."""
    sinks = pointer(d[slot.SINKS], float64)
    for i in range(left, left + n):
        own_head = head + (panel.begin + i) // d[slot.QUERIES]
        logit = sinks[batch * d[slot.SINKS_BATCH] + own_head * d[slot.SINKS_HEAD]]
        gap = logit - float64(panel.state[TILE_MEAN * panel.width + i])
        absent = logit == -np.inf
        panel.state[TILE_SPREAD * panel.width + i] = 0.0 if absent else 1 / (1 + np.exp(-gap))
        panel.state[TILE_SUM * panel.width + i] = 1.0 if absent else 1 + np.exp(gap)


@kernel
def finish(d: Any, f: Any, room: Any, panel: Any, batch: int, head: int) -> None:
    """The output and the fields of the Reading of a panel."""
    state, index, width, step = panel.state, panel.bounds, panel.width, lanes(panel.state)
    like = state
    zero, one, endless = spread_as(like, 0), spread_as(like, 1), spread_as(like, np.inf)
    ln2, no_keys = spread_as(like, LN2), spread_as(index, 0)
    row = (batch * d[slot.HEADS] + head) * d[slot.QUERIES] + panel.begin
    for left in range(0, width, step):
        n = min(step, panel.n - left)
        count = load(state, COUNT * width + left)
        seen = count > zero
        total = where(seen, load(state, TOTAL * width + left), one)
        reference = load(state, REFERENCE * width + left)
        lean = load(state, TILT * width + left) / total
        log_total = log(total)
        nothing = zero - endless
        unit = one if d[slot.GENERAL] else load(state, UNIT * width + left)
        best = load(state, MAXIMUM * width + left) * unit
        logsumexp = where(seen, best + log_total, nothing)
        put(d, slot.MAX_LOGIT, row + left, best, n, like)
        put(d, slot.LOGSUMEXP, row + left, logsumexp, n, like)
        put(d, slot.LARGEST_WEIGHT, row + left, where(seen, one / total, zero), n, like)
        highest = load(state, HIGHEST_QK * width + left) if d[slot.GENERAL] else best
        put(d, slot.MAX_QK, row + left, highest, n, like)
        mean, deviation = zero, zero
        if d[slot.MEASURE]:
            expected = where(seen, fma(lean, ln2, best), zero)
            put(d, slot.EXPECTED_SCORE, row + left, expected, n, like)
            put(d, slot.ENTROPY, row + left, where(seen, log_total - lean * ln2, zero), n, like)
            collision = load(state, SQUARES * width + left) / (total * total)
            put(d, slot.COLLISION, row + left, where(collision > one, one, collision), n, like)
            mean = load(state, MEAN * width + left) * unit
            put(d, slot.SCORE_MEAN, row + left, mean, n, like)
            deviation = sqrt(load(state, SPREAD * width + left) / where(seen, count, one)) * unit
            put(d, slot.SCORE_STD, row + left, deviation, n, like)
            opening = (load(state, FIRST_SCORE * width + left) - reference) * load(state, FACTOR * width + left)
            opening = exp2(maximum(lowest(like), opening)) / total
            put(d, slot.FIRST_KEY_WEIGHT, row + left, where(seen, opening, zero), n, like)
        store(state, TILE_SUM * width + left, one)
        store(state, TILE_SPREAD * width + left, zero)
        if d[slot.SINKS] != 0:
            store(state, TILE_MEAN * width + left, logsumexp)
            sink_factors(d, panel, batch, head, left, n)
        put(d, slot.SINK_MASS, row + left, load(state, TILE_SPREAD * width + left), n, like)
        norm = zero
        if d[slot.VALUE_DEPTH] >= 0:
            kept = spread_as(like, f[slot.SHARE_KEPT])
            factor = one / (total * load(state, TILE_SUM * width + left) * kept)
            write_output(d, room, panel, batch, head, left, n, factor)
            norm = where(seen, norm_of(panel.out, width, left, d[slot.VALUE_DEPTH], factor), zero)
            put(d, slot.OUTPUT_NORM, row + left, norm, n, like)
        keys = to_whole(count)
        if not d[slot.GENERAL]:
            # A float32 counts to 2²⁴; where bounds alone hide keys they say it too.
            keys = load(index, STOPS * width + left) - load(index, FIRSTS * width + left)
            keys = where(keys > no_keys, keys, no_keys)
        put_words(d, slot.VISIBLE_KEYS, row + left, keys, n, like)
        put_words(d, slot.NONFINITE, row + left, no_keys, n, like)
        checked = magnitude(norm) + magnitude(mean) + deviation + magnitude(lean)
        sound = (total > zero) & (total < endless) & (checked < endless)
        suspect = where(seen, where(sound, zero, one), zero)
        if any_lane(suspect > zero):
            store(state, TILE_SUM * width + left, suspect)
            for i in range(n):
                if state[TILE_SUM * width + left + i] > 0:
                    place = count_up(d, slot.SUSPECTS)
                    pointer(d[slot.SUSPECT], int64)[place] = row + left + i


@kernel
def write_output(d: Any, room: Any, panel: Any, batch: int, head: int, left: int, n: int, factor: Any) -> None:
    """The output of some rows, rounded, and not rounded where that is wanted; 0 for a row that sees nothing."""
    width, depth, rows, out = panel.width, d[slot.VALUE_DEPTH], room.addresses, panel.out
    kind, item, queries = d[slot.KIND], item_size(d[slot.KIND]), d[slot.QUERIES]
    for r in range(left, left + n):
        if not panel.state[COUNT * width + r] > 0:
            for i in range(depth):
                out[i * width + r] = 0
    place = batch * d[slot.OUT_BATCH] + head * d[slot.OUT_HEAD]
    find_rows(
        rows, d[slot.OUT] + place * item, panel.begin, panel.n, width, queries, d[slot.OUT_HEAD], d[slot.OUT_ROW], item
    )
    write_turned(out, width, left, n, depth, factor, room.corner, rows, kind)
    if d[slot.WIDE] != 0:
        item = BYTES // lanes(out)
        place = d[slot.WIDE] + place * item
        find_rows(rows, place, panel.begin, panel.n, width, queries, d[slot.OUT_HEAD], d[slot.OUT_ROW], item)
        write_turned(out, width, left, n, depth, factor, room.corner, rows, F64 if item == 8 else F32)


# Keys in several splits.


@kernel
def partial_at(d: Any, like: Any, task: int, p: int, split: int) -> Any:
    """Where the State of a panel over one split of the keys is left."""
    step = lanes(like)
    whole = step * COLUMNS
    deep = padded(max(d[slot.VALUE_DEPTH], 0), step)
    place = ((task * PANELS + p) * d[slot.SPLITS] + split) * (LEFT + deep) * whole
    return at(pointer_as(like, d[slot.PARTIAL]), place)


@kernel
def leave(d: Any, panel: Any, task: int, p: int, split: int) -> None:
    """Keep the State over one split, and the bounds: who merges may have had other rows before."""
    step, width = lanes(panel.state), panel.width
    own = partial_at(d, panel.state, task, p, split)
    bounds = as_indices(at(own, PARTS * width))
    for i in range(0, PARTS * width, step):
        store(own, i, load(panel.state, i))
    for i in range(0, (LEFT - PARTS) * width, step):
        store(bounds, i, load(panel.bounds, i))
    for i in range(0, max(d[slot.VALUE_DEPTH], 0) * width, step):
        store(own, LEFT * width + i, load(panel.out, i))


@kernel
def take_up(state: Any, out: Any, other: Any, width: int, depth: int) -> None:
    """Merge the State over other keys into a State."""
    low, zero = lowest(state), spread_as(state, 0)
    for left in range(0, width, lanes(state)):
        ours, theirs = load(state, REFERENCE * width + left), load(other, REFERENCE * width + left)
        reference = maximum(ours, theirs)
        factor = load(state, FACTOR * width + left)
        our_shift, their_shift = maximum(low, (ours - reference) * factor), maximum(low, (theirs - reference) * factor)
        ours, theirs = exp2(our_shift), exp2(their_shift)
        our_total, their_total = load(state, TOTAL * width + left), load(other, TOTAL * width + left)
        tilt = ours * fma(our_shift, our_total, load(state, TILT * width + left))
        tilt = fma(theirs, fma(their_shift, their_total, load(other, TILT * width + left)), tilt)
        store(state, TILT * width + left, tilt)
        store(state, TOTAL * width + left, fma(theirs, their_total, ours * our_total))
        squares = ours * ours * load(state, SQUARES * width + left)
        squares = fma(theirs * theirs, load(other, SQUARES * width + left), squares)
        store(state, SQUARES * width + left, squares)
        store(state, REFERENCE * width + left, reference)
        for part in (MAXIMUM, HIGHEST_QK):
            best = maximum(load(other, part * width + left), load(state, part * width + left))
            store(state, part * width + left, best)
        # What `merge_moments` takes up.
        store(state, TILE_COUNT * width + left, load(other, COUNT * width + left))
        store(state, TILE_MEAN * width + left, load(other, MEAN * width + left))
        store(state, TILE_SPREAD * width + left, load(other, SPREAD * width + left))
        opening = load(state, FIRST_SCORE * width + left)
        empty = load(state, COUNT * width + left) == zero
        store(state, FIRST_SCORE * width + left, where(empty, load(other, FIRST_SCORE * width + left), opening))
        for i in range(depth):
            x = load(other, (LEFT + i) * width + left) * theirs
            store(out, i * width + left, fma(load(out, i * width + left), ours, x))
    merge_moments(state, width)


@kernel
def merge_task(d: Any, f: Any, task: int, scratch: int, like: Any, cells: Any, mode: Any) -> None:
    """Merge the splits of a block of rows, and finish it."""
    block, unit = d[slot.BLOCKS] - 1 - task % d[slot.BLOCKS], task // d[slot.BLOCKS]
    stacks = d[slot.HEADS] // d[slot.STACK]
    batch, head = unit // stacks, unit % stacks * d[slot.STACK]
    step = lanes(like)
    whole = step * COLUMNS
    begin = block * PANELS * whole
    rows = min(PANELS * whole, d[slot.STACK] * d[slot.QUERIES] - begin)
    depth, value_depth = d[slot.DEPTH], max(d[slot.VALUE_DEPTH], 0)
    room = room_at(scratch, depth, value_depth, like, cells)
    for p in range((rows + whole - 1) // whole):
        panel = panel_at(room, begin, rows, p, depth, value_depth, like, cells)
        width = panel.width
        for split in range(d[slot.SPLITS]):
            other = partial_at(d, like, task, p, split)
            if split == 0:
                bounds = as_indices(at(other, PARTS * width))
                for i in range(0, PARTS * width, step):
                    store(panel.state, i, load(other, i))
                for i in range(0, (LEFT - PARTS) * width, step):
                    store(panel.bounds, i, load(bounds, i))
                for i in range(0, value_depth * width, step):
                    store(panel.out, i, load(other, LEFT * width + i))
            else:
                take_up(panel.state, panel.out, other, width, value_depth)
        finish(d, f, room, panel, batch, head)


# Entries. A worker takes tasks until there are none left.


def _entry(task: Any, kind: Any, cell: Any, mode: Any = MANY) -> Any:
    @kernel
    def work(address: int) -> None:
        d, f = pointer(address, int64), pointer(address, float64)
        number = count_up(d, slot.TASK)
        if number >= d[slot.TASKS]:
            return
        scratch = d[slot.SCRATCH] + count_up(d, slot.WORKER) * d[slot.SCRATCH_BYTES]
        while number < d[slot.TASKS]:
            task(d, f, number, scratch, pointer(0, kind), pointer(0, cell), pointer(0, mode))
            number = count_up(d, slot.TASK)

    return work


forward_f32, forward_f64 = _entry(forward_task, float32, float32), _entry(forward_task, float64, float64)
forward_bf16 = _entry(forward_task, float32, uint32)
thin_f32, thin_f64 = _entry(forward_task, float32, float32, FEW), _entry(forward_task, float64, float64, FEW)
merge_f32, merge_f64 = _entry(merge_task, float32, float32), _entry(merge_task, float64, float64)
