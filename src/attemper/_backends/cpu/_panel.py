"""A panel of query rows: where it lies in the memory of a worker, what its rows see, and how they are laid out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float64, int64, uint64

from . import _slots as slot
from ._compile import kernel
from ._dropout import row_key
from ._elements import find_rows, item_size, pack_turned, padded
from ._mask import pack_mask
from ._simd import (
    address_of,
    as_indices,
    at,
    lanes,
    load,
    per_cell,
    pointer,
    pointer_as,
    spread_as,
    store,
    to_floating,
    where,
)
from ._slots import (
    CLEAR,
    CLEAR_STOP,
    CORNER,
    DRAW_HIGH,
    DRAW_LOW,
    FACTOR,
    FIRST_SCORE,
    FIRSTS,
    HIGHEST_QK,
    INDEX_PARTS,
    KEEP,
    LEAST,
    LIMITS,
    MAXIMUM,
    MOST,
    PARTS,
    REFERENCE,
    STOPS,
    TILE_COUNT,
    TILE_MAX,
    UNIT,
)
from ._target import COLUMNS, KEY_TILE, PANELS, target

LN2 = float(np.log(2))
BYTES = target().bits // 8


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
