"""A panel of query rows in the backward pass: what `_panel` has of it, and dO beside q."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float64, int64

from . import _slots as slot
from ._compile import kernel
from ._elements import find_rows, item_size, pack_turned, padded, write_turned
from ._panel import BYTES, clear_rows, open_panel
from ._simd import address_of, as_indices, count_up, fma, lanes, load, pointer, pointer_as, spread_as, store
from ._slots import (
    BACKWARD_PARTS,
    BEND,
    CENTRE,
    CORNER,
    F32,
    F64,
    INDEX_PARTS,
    KEEP,
    LEVEL,
    PEAK,
    PULL,
    REFERENCE,
    SHARE,
    SLOPE,
    STORED,
    UNIT,
    WHOLE,
)
from ._target import COLUMNS, KEY_TILE, PANELS

LEAST_PASSING = 1e-30
"""What a sink may leave of the weights."""


class Room(NamedTuple):
    """The scratch memory of one worker."""

    turned: int
    turned_grad: int
    to_q: int
    rows: int
    grad_rows: int
    scores: Any
    grads: Any
    bias: Any
    slopes: Any
    keys: Any
    values: Any
    state: int
    indices: int
    corner: Any
    addresses: Any
    to_k: Any
    to_v: Any


class Panel(NamedTuple):
    """Some query rows: q and dO both turned round and, padded to whole vectors, as they are."""

    begin: int
    n: int
    columns: int
    width: int
    turned: Any
    turned_grad: Any
    to_q: Any
    rows: Any
    grad_rows: Any
    state: Any
    bounds: Any


@kernel
def room_at(scratch: int, deep: int, value_deep: int, keys: int, like: Any) -> Any:
    step = lanes(like)
    number = BYTES // step
    whole = step * COLUMNS
    turned_grad = scratch + PANELS * whole * deep * number
    to_q = turned_grad + PANELS * whole * value_deep * number
    rows = to_q + PANELS * whole * deep * number
    grad_rows = rows + PANELS * whole * deep * number
    scores = grad_rows + PANELS * whole * value_deep * number
    tile = KEY_TILE * whole * number
    own_keys = scores + 4 * tile
    values = own_keys + KEY_TILE * deep * number
    state = values + KEY_TILE * value_deep * number
    index = state + PANELS * BACKWARD_PARTS * whole * number
    corner = index + PANELS * INDEX_PARTS * whole * number
    to_k = corner + CORNER * step * number
    to_v = to_k + keys * deep * number
    return Room(
        turned=scratch,
        turned_grad=turned_grad,
        to_q=to_q,
        rows=rows,
        grad_rows=grad_rows,
        scores=pointer_as(like, scores),
        grads=pointer_as(like, scores + tile),
        bias=pointer_as(like, scores + 2 * tile),
        slopes=pointer_as(like, scores + 3 * tile),
        keys=pointer_as(like, own_keys),
        values=pointer_as(like, values),
        state=state,
        indices=index,
        corner=pointer_as(like, corner),
        addresses=pointer(to_v + keys * value_deep * number, int64),
        to_k=pointer_as(like, to_k),
        to_v=pointer_as(like, to_v),
    )


@kernel
def panel_at(room: Any, begin: int, rows: int, p: int, deep: int, value_deep: int, like: Any) -> Any:
    step = lanes(like)
    number = BYTES // step
    whole = step * COLUMNS
    n = min(whole, rows - p * whole)
    columns = (n + step - 1) // step
    return Panel(
        begin=begin + p * whole,
        n=n,
        columns=columns,
        width=columns * step,
        turned=pointer_as(like, room.turned + p * whole * deep * number),
        turned_grad=pointer_as(like, room.turned_grad + p * whole * value_deep * number),
        to_q=pointer_as(like, room.to_q + p * whole * deep * number),
        rows=pointer_as(like, room.rows + p * whole * deep * number),
        grad_rows=pointer_as(like, room.grad_rows + p * whole * value_deep * number),
        state=pointer_as(like, room.state + p * BACKWARD_PARTS * whole * number),
        bounds=as_indices(pointer_as(like, room.indices + p * INDEX_PARTS * whole * number)),
    )


@kernel
def field_at(d: Any, field: int, row: int, like: Any) -> Any:
    """A number per row, or 0 where there is none."""
    if d[field] == 0:
        return pointer_as(like, d[slot.LARGEST_WEIGHT])[row] * 0
    return pointer_as(like, d[field])[row]


@kernel
def turn_back(
    turned: Any, out: Any, width: int, n: int, depth: int, deep: int, state: Any, factor: int, room: Any
) -> None:
    """Rows of whole vectors from turned[i][row], each times a part of the state; 0 behind the last component."""
    step, number = lanes(turned), BYTES // lanes(turned)
    for i in range(0, n * deep, step):
        store(out, i, spread_as(out, 0))
    find_rows(room.addresses, address_of(out), 0, n, width, n + 1, 0, deep, number)
    for left in range(0, width, step):
        factors, some, kind = load(state, factor * width + left), min(step, n - left), F64 if number == 8 else F32
        write_turned(turned, width, left, some, depth, factors, room.corner, room.addresses, kind)


@kernel
def open_backward(d: Any, f: Any, room: Any, panel: Any, batch: int, head: int, like: Any) -> tuple[int, int]:
    """Lay out the rows of a panel and their constants. The keys that any of them sees."""
    low, high = open_panel(d, room, panel, batch, head, like)
    state, width, queries, step = panel.state, panel.width, d[slot.QUERIES], lanes(like)
    depth, value_depth = d[slot.DEPTH], d[slot.VALUE_DEPTH]
    for part in range(STORED, BACKWARD_PARTS):
        for left in range(0, width, step):
            store(state, part * width + left, spread_as(like, 0))
    for left in range(0, width, step):
        part, power = load(state, UNIT * width + left), load(state, KEEP * width + left)
        store(state, WHOLE * width + left, part * power)
        store(state, STORED * width + left, spread_as(like, 1) if d[slot.GENERAL] else part)
        store(state, KEEP * width + left, spread_as(like, 1))
        store(state, REFERENCE * width + left, spread_as(like, 0))
    clear_rows(panel.to_q, depth, width)
    deep, value_deep = padded(depth, step), padded(max(value_depth, 0), step)
    # q by rows, with the scale, for the gradient of k.
    turn_back(panel.turned, panel.rows, width, panel.n, depth, deep, state, UNIT, room)
    if value_depth >= 0 and d[slot.GRAD] != 0:
        item, rows = item_size(d[slot.KIND]), room.addresses
        base = d[slot.GRAD] + (batch * d[slot.GRAD_BATCH] + head * d[slot.GRAD_HEAD]) * item
        find_rows(rows, base, panel.begin, panel.n, width, queries, d[slot.GRAD_HEAD], d[slot.GRAD_ROW], item)
        pack_turned(panel.turned_grad, width, room.corner, rows, panel.n, value_depth, d[slot.KIND], d[slot.GRAD_INNER])
        # The output turned round takes the place of a tile for the moment.
        own = room.scores
        item = item_size(d[slot.OUT_KIND])
        base = d[slot.OUT] + (batch * d[slot.OUT_BATCH] + head * d[slot.OUT_HEAD]) * item
        find_rows(rows, base, panel.begin, panel.n, width, queries, d[slot.OUT_HEAD], d[slot.OUT_ROW], item)
        per_kept = spread_as(like, 1 / f[slot.SHARE_KEPT])
        for top in range(0, value_depth, KEY_TILE):
            some = min(KEY_TILE, value_depth - top)
            for r in range(width):
                rows[r] += top * item if top == 0 else KEY_TILE * item
            pack_turned(own, width, room.corner, rows, panel.n, some, d[slot.OUT_KIND], 1)
            for left in range(0, width, step):
                pull = load(state, PULL * width + left)
                for i in range(some):
                    place = (top + i) * width + left
                    pull = fma(load(panel.turned_grad, place), load(own, i * width + left), pull)
                    store(panel.turned_grad, place, load(panel.turned_grad, place) * per_kept)
                store(state, PULL * width + left, pull)
        turn_back(panel.turned_grad, panel.grad_rows, width, panel.n, value_depth, value_deep, state, KEEP, room)
    sinks = pointer(d[slot.SINKS], float64)
    for i in range(panel.n):
        own_head = head + (panel.begin + i) // queries
        row = (batch * d[slot.HEADS] + head) * queries + panel.begin + i
        best, peak = field_at(d, slot.MAX_LOGIT, row, like), field_at(d, slot.LARGEST_WEIGHT, row, like)
        if best > -np.inf:
            state[REFERENCE * width + i] = best
        passing = 1.0
        if d[slot.SINKS] != 0:
            logit = sinks[batch * d[slot.SINKS_BATCH] + own_head * d[slot.SINKS_HEAD]]
            if logit != -np.inf:
                passing = 1 / (1 + np.exp(logit - float64(field_at(d, slot.LOGSUMEXP, row, like))))
            if passing < LEAST_PASSING:
                # The output, from which the mean of dP is taken, is nearly nothing: too few digits.
                count_up(d, slot.SUSPECTS)
        pull = state[PULL * width + i]
        state[PEAK * width + i] = peak
        state[SHARE * width + i] = peak * passing
        state[CENTRE * width + i] = pull / passing if passing > 0 else pull * 0
        if d[slot.EXTRA]:
            expected, collision = field_at(d, slot.EXPECTED_SCORE, row, like), field_at(d, slot.COLLISION, row, like)
            of_expected, of_entropy = (
                field_at(d, slot.GRAD_EXPECTED, row, like),
                field_at(d, slot.GRAD_ENTROPY, row, like),
            )
            of_collision = field_at(d, slot.GRAD_COLLISION, row, like)
            level = field_at(d, slot.GRAD_LOGSUMEXP, row, like) + of_expected * (1 - expected)
            state[LEVEL * width + i] = level + of_entropy * expected - 2 * of_collision * collision
            state[SLOPE * width + i] = of_expected - of_entropy
            state[BEND * width + i] = 2 * of_collision
        if d[slot.PULL_ROWS] != 0:
            pointer_as(like, d[slot.PULL_ROWS])[row] = pull
    return low, high
