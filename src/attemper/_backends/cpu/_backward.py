"""The gradients: the weights of each tile computed again, and what flows back through them.

With P̃ the weights including a sink and P without, dP = dO·vᵀ and D = ⟨dO, O⟩,

    dS = P̃∘(dP − D) + P∘(level + slope · s + bend · P),    dq = scale · dS·k,    dk = dSᵀ·(scale · q),    dv = P̃ᵀ·dO,

where level, slope and bend are numbers per row that carry the gradients of the Reading's own fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64

from . import _slots as slot
from ._compile import kernel
from ._dropout import drop
from ._elements import find_rows, item_size, lowest, pack_rows, padded, write_some, write_turned
from ._mask import dress, hide
from ._panel import BYTES, LN2, lay_mask, seen_of, tile_counts
from ._panel_backward import open_backward, panel_at, room_at
from ._simd import at, count_up, fma, lanes, load, maximum, pointer, pointer_as, spread_as, store, where
from ._simd_functions import exp2
from ._slots import (
    BEND,
    CENTRE,
    COUNT,
    F32,
    F64,
    KEEP,
    LEVEL,
    MEAN,
    PEAK,
    PULL,
    REFERENCE,
    ROWS_AT_ONCE,
    SHARE,
    SLOPE,
    SPREAD,
    STORED,
    TILE_COUNT,
    TILE_MAX,
    TILE_MEAN,
    TILE_SPREAD,
    TILE_SUM,
    UNIT,
    WEIGHTED,
    WHOLE,
)
from ._target import COLUMNS, KEY_TILE, PANELS
from ._tile import KEYS_AT_ONCE, RETURN_COLUMNS, RETURN_KEYS, returned_one, returned_wide, scores_of, values_of
from ._weights import merge_moments

# A tile.


@kernel
def settle(scores: Any, grads: Any, width: int, rows: int, state: Any) -> None:
    """0 for the dP of keys that a row does not see, and the sum of the others."""
    nothing, zero = spread_as(scores, -np.inf), spread_as(scores, 0)
    for left in range(0, width, lanes(scores)):
        total = zero
        for j in range(rows):
            place = j * width + left
            grad = where(load(scores, place) > nothing, load(grads, place), zero)
            store(grads, place, grad)
            total = total + grad
        store(state, TILE_SUM * width + left, total)


def _make_grad_scores(measure: bool, hidden: bool, extra: bool) -> Any:
    @kernel
    def grad_scores(scores: Any, grads: Any, width: int, rows: int, state: Any) -> None:
        """Scores to weights and dP to dS, and what the gradient flow is made of."""
        low, nothing, zero = lowest(scores), spread_as(scores, -np.inf), spread_as(scores, 0)
        ln2, factor = spread_as(scores, LN2), spread_as(scores, 1 / LN2)
        for left in range(0, width, lanes(scores)):
            # In the same steps as the forward pass, so that the largest weight comes out as it was.
            unit = load(state, STORED * width + left)
            share, pull = load(state, SHARE * width + left), load(state, PULL * width + left)
            peak, centre = load(state, PEAK * width + left), load(state, CENTRE * width + left)
            level, slope = load(state, LEVEL * width + left), load(state, SLOPE * width + left)
            bend, reference = load(state, BEND * width + left), load(state, REFERENCE * width + left)
            mean = load(state, TILE_MEAN * width + left)
            weighted, spread = zero, zero
            for j in range(rows):
                place = j * width + left
                s, grad = load(scores, place), load(grads, place)
                x = maximum(low, (s * unit - reference) * factor)
                power = exp2(x)
                weight = power * share
                to_score = weight * (grad - pull)
                if extra:
                    own = power * peak
                    bent = fma(bend, own, fma(slope, fma(x, ln2, reference), level))
                    to_score = to_score + where(own > zero, own * bent, zero)
                if measure:
                    apart = grad - centre
                    weighted = fma(weight * apart, apart, weighted)
                    off = grad - mean
                    if hidden:
                        off = where(s > nothing, off, zero)
                    spread = fma(off, off, spread)
                if hidden:
                    to_score = where(s > nothing, to_score, zero)
                store(scores, place, weight)
                store(grads, place, to_score)
            if measure:
                store(state, WEIGHTED * width + left, load(state, WEIGHTED * width + left) + weighted)
                store(state, TILE_SPREAD * width + left, spread)

    return grad_scores


grad_all = _make_grad_scores(measure=True, hidden=False, extra=False)
grad_visible = _make_grad_scores(measure=True, hidden=True, extra=False)
grad_only = _make_grad_scores(measure=False, hidden=True, extra=False)
grad_extra = _make_grad_scores(measure=True, hidden=True, extra=True)


@kernel
def give_back(
    tile: Any, width: int, n: int, rows: Any, deep: int, depth: int, out: Any, stride: int, keys: int
) -> None:
    """Add tileᵀ·rows to the gradients of some keys."""
    step = lanes(tile)
    for j in range(0, keys, RETURN_KEYS):
        present = min(RETURN_KEYS, keys - j)
        here = at(tile, j * width)
        i = 0
        while i < depth:
            there = at(out, j * stride + i)
            if depth - i > (RETURN_COLUMNS - 1) * step:
                returned_wide(here, width, n, at(rows, i), deep, present, there, stride)
                i += RETURN_COLUMNS * step
            else:
                returned_one(here, width, n, at(rows, i), deep, present, there, stride)
                i += step


@kernel
def to_mask(d: Any, panel: Any, batch: int, head: int, grads: Any, first: int, last: int) -> None:
    """Add the gradients of scores to those of a mask, whose axes may be shared."""
    out = pointer_as(grads, d[slot.TO_MASK])
    for i in range(panel.n):
        row = panel.begin + i
        own_head, query = head + row // d[slot.QUERIES], row % d[slot.QUERIES]
        base = batch * d[slot.TO_MASK_BATCH] + own_head * d[slot.TO_MASK_HEAD] + query * d[slot.TO_MASK_ROW]
        for key in range(first, last):
            out[base + key * d[slot.TO_MASK_KEY]] += grads[(key - first) * panel.width + i]


@kernel
def visit_back(
    d: Any, f: Any, room: Any, panel: Any, batch: int, head: int, tile: int, stop: int, k: Any, k_stride: int, v: Any,
    v_stride: int, to_k: Any, to_k_stride: int, to_v: Any, to_v_stride: int,
) -> None:  # fmt: skip
    """What flows back through the keys of one tile."""
    width, state, index, scores, grads = panel.width, panel.state, panel.bounds, room.scores, room.grads
    depth, value_depth = d[slot.DEPTH], d[slot.VALUE_DEPTH]
    first, last, clear, clear_stop = seen_of(panel, tile, stop)
    if first >= last:
        return
    for left in range(0, width, lanes(state)):
        store(state, TILE_COUNT * width + left, spread_as(state, 0))
    general, masked, softcap = d[slot.GENERAL] != 0, d[slot.MASK] != 0, f[slot.SOFTCAP]
    if masked:
        lay_mask(d, room, panel, batch, head, first, last)
    hidden = general
    for j in range(first, last, KEYS_AT_ONCE):
        present = min(KEYS_AT_ONCE, last - j)
        place = (j - first) * width
        here = at(scores, place)
        scores_of(
            panel.columns, panel.turned, at(k, (j - tile) * k_stride), k_stride, depth, present, here, room.corner
        )
        if general:
            dress(
                here,
                width,
                j,
                present,
                state,
                index,
                softcap,
                at(room.bias, place),
                masked,
                at(room.slopes, place),
                True,
            )
        elif not (clear <= j and j + KEYS_AT_ONCE <= clear_stop):
            hide(here, width, j, present, state, index)
            hidden = True
    if not general:
        tile_counts(state, index, width, first, last)
    for left in range(0, width, lanes(state)):
        store(state, TILE_SUM * width + left, spread_as(state, 0))
    rows = (last - first + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
    has_values = value_depth >= 0 and d[slot.GRAD] != 0
    if has_values:
        for j in range(first, last, KEYS_AT_ONCE):
            present = min(KEYS_AT_ONCE, last - j)
            here = at(grads, (j - first) * width)
            sums = at(state, TILE_MAX * width)
            scores_of(
                panel.columns,
                panel.turned_grad,
                at(v, (j - tile) * v_stride),
                v_stride,
                value_depth,
                present,
                here,
                sums,
            )
    else:
        for i in range(0, rows * width, lanes(grads)):
            store(grads, i, spread_as(grads, 0))
    if d[slot.THRESHOLD] != 0:
        drop(grads, width, first, last, index, d[slot.THRESHOLD])
    if hidden or d[slot.THRESHOLD] != 0:
        settle(scores, grads, width, rows, state)
    zero, one = spread_as(state, 0), spread_as(state, 1)
    for left in range(0, width, lanes(state)):
        count = load(state, TILE_COUNT * width + left)
        store(state, TILE_MEAN * width + left, load(state, TILE_SUM * width + left) / where(count > zero, count, one))
    if d[slot.EXTRA]:
        grad_extra(scores, grads, width, rows, state)
    elif not d[slot.MEASURE]:
        grad_only(scores, grads, width, rows, state)
    elif hidden:
        grad_visible(scores, grads, width, rows, state)
    else:
        grad_all(scores, grads, width, rows, state)
    if d[slot.MEASURE]:
        merge_moments(state, width)
    if d[slot.TO_MASK] != 0:
        to_mask(d, panel, batch, head, grads, first, last)
    if softcap > 0:
        for i in range(0, rows * width, lanes(grads)):
            store(grads, i, load(grads, i) * load(room.slopes, i))
    for i in range(0, depth, KEYS_AT_ONCE):
        here = at(k, (first - tile) * k_stride + i)
        values_of(
            panel.columns, grads, here, k_stride, last - first, at(panel.to_q, i * width), at(state, KEEP * width)
        )
    step = lanes(scores)
    deep, value_deep = padded(depth, step), padded(max(value_depth, 0), step)
    give_back(
        grads,
        width,
        panel.n,
        panel.rows,
        deep,
        depth,
        at(to_k, (first - tile) * to_k_stride),
        to_k_stride,
        last - first,
    )
    if has_values:
        if d[slot.THRESHOLD] != 0:
            drop(scores, width, first, last, index, d[slot.THRESHOLD])
        here = at(to_v, (first - tile) * to_v_stride)
        give_back(scores, width, panel.n, panel.grad_rows, value_deep, value_depth, here, to_v_stride, last - first)


# Tasks.


@kernel
def close_backward(d: Any, room: Any, panel: Any, batch: int, head: int, split: int, like: Any) -> None:
    """Write the gradient of q, its pressure and its flow; or, of one split of the keys, leave them for the others."""
    state, width, step, depth = panel.state, panel.width, lanes(like), d[slot.DEPTH]
    queries = d[slot.QUERIES]
    row = (batch * d[slot.HEADS] + head) * queries + panel.begin
    for left in range(0, width, step):
        along = spread_as(like, 0)
        for i in range(depth):
            along = fma(load(panel.turned, i * width + left), load(panel.to_q, i * width + left), along)
        store(state, TILE_SUM * width + left, along * load(state, UNIT * width + left))
    if d[slot.SPLITS] == 1:
        item = item_size(d[slot.KIND])
        base = d[slot.TO_Q] + (batch * d[slot.TO_Q_BATCH] + head * d[slot.TO_Q_HEAD]) * item
        find_rows(room.addresses, base, panel.begin, panel.n, width, queries, d[slot.TO_Q_HEAD], d[slot.TO_Q_ROW], item)
        for left in range(0, width, step):
            n = min(step, panel.n - left)
            scale = load(state, WHOLE * width + left)
            write_turned(panel.to_q, width, left, n, depth, scale, room.corner, room.addresses, d[slot.KIND])
        for i in range(panel.n):
            pressure, passing = state[TILE_SUM * width + i], state[SHARE * width + i] / state[PEAK * width + i]
            finish_row(
                d,
                row + i,
                pressure,
                state[WEIGHTED * width + i] / passing,
                state[COUNT * width + i],
                state[SPREAD * width + i],
                like,
            )
        return
    total = d[slot.BATCH] * d[slot.HEADS] * queries
    number = BYTES // step
    own = depth + 6
    base = d[slot.PARTIAL] + (split * total + row) * own * number
    find_rows(room.addresses, base, 0, panel.n, width, queries + panel.n, 0, own, number)
    for left in range(0, width, step):
        n = min(step, panel.n - left)
        scale = load(state, WHOLE * width + left)
        write_turned(panel.to_q, width, left, n, depth, scale, room.corner, room.addresses, F64 if number == 8 else F32)
    for i in range(panel.n):
        rest = at(pointer_as(like, base), i * own + depth)
        passing = state[SHARE * width + i] / state[PEAK * width + i]
        rest[0], rest[1] = state[TILE_SUM * width + i], state[WEIGHTED * width + i] / passing
        rest[2], rest[3], rest[4] = state[COUNT * width + i], state[MEAN * width + i], state[SPREAD * width + i]


@kernel
def finish_row(d: Any, row: int, pressure: Any, weighted: Any, count: Any, spread: Any, like: Any) -> None:
    """Pressure and gradient flow of one row; NaN where there was nothing to share."""
    if not abs(pressure) < np.inf:
        count_up(d, slot.SUSPECTS)
    if d[slot.PRESSURE_ROWS] != 0:
        pointer_as(like, d[slot.PRESSURE_ROWS])[row] = pressure
    if d[slot.FLOW_ROWS] != 0:
        pointer_as(like, d[slot.FLOW_ROWS])[row] = weighted * count / spread if spread > 0 else np.nan


@kernel
def gather_task(d: Any, f: Any, task: int, scratch: int, like: Any) -> None:
    """Add up what the splits of the keys left for a run of rows."""
    step, depth, queries = lanes(like), d[slot.DEPTH], d[slot.QUERIES]
    total = d[slot.BATCH] * d[slot.HEADS] * queries
    own, item = depth + 6, item_size(d[slot.KIND])
    for row in range(task * ROWS_AT_ONCE, min((task + 1) * ROWS_AT_ONCE, total)):
        head, query = row // queries, row % queries
        place = (
            head // d[slot.HEADS] * d[slot.TO_Q_BATCH]
            + head % d[slot.HEADS] * d[slot.TO_Q_HEAD]
            + query * d[slot.TO_Q_ROW]
        )
        first = at(pointer_as(like, d[slot.PARTIAL]), row * own)
        for i in range(0, depth, step):
            some = min(step, depth - i)
            x = spread_as(like, 0)
            for split in range(d[slot.SPLITS]):
                x = x + load(first, split * total * own + i)
            write_some(d[slot.TO_Q] + place * item, d[slot.KIND], i, x, some)
        pressure, weighted, count, mean, spread = first[0] * 0, first[0] * 0, first[0] * 0, first[0] * 0, first[0] * 0
        for split in range(d[slot.SPLITS]):
            rest = at(first, split * total * own + depth)
            pressure, weighted = pressure + rest[0], weighted + rest[1]
            both = count + rest[2]
            if rest[2] > 0:
                apart, part = rest[3] - mean, rest[2] / both
                spread += rest[4] + apart * apart * count * part
                mean += apart * part
                count = both
        finish_row(d, row, pressure, weighted, count, spread, like)


@kernel
def backward_unit(d: Any, f: Any, scratch: int, batch: int, kv_head: int, split: int, like: Any) -> None:
    """The gradients of one split of the keys of one head, and what its queries get from them."""
    step = lanes(like)
    whole = step * COLUMNS
    depth, value_depth, keys = d[slot.DEPTH], max(d[slot.VALUE_DEPTH], 0), d[slot.KEYS]
    deep, value_deep = padded(depth, step), padded(value_depth, step)
    share = (keys + d[slot.SPLITS] - 1) // d[slot.SPLITS]
    from_, to = split * share, min((split + 1) * share, keys)
    kind, item = d[slot.KIND], item_size(d[slot.KIND])
    number = BYTES // step
    room = room_at(scratch, deep, value_deep, share, like)
    k_base = d[slot.K] + (batch * d[slot.K_BATCH] + kv_head * d[slot.K_HEAD]) * item
    v_base = d[slot.V] + (batch * d[slot.V_BATCH] + kv_head * d[slot.V_HEAD]) * item
    for i in range(0, (to - from_) * deep, step):
        store(room.to_k, i, spread_as(like, 0))
    for i in range(0, (to - from_) * value_deep, step):
        store(room.to_v, i, spread_as(like, 0))
    own_kind = item == number
    stack, group = d[slot.STACK], d[slot.GROUP]
    blocks = d[slot.BLOCKS]
    whole_depth = (depth + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
    for turn in range(group // stack * blocks):
        head = kv_head * group + turn // blocks * stack
        begin = turn % blocks * PANELS * whole
        rows = min(PANELS * whole, stack * d[slot.QUERIES] - begin)
        panels = (rows + whole - 1) // whole
        low, high = keys, 0
        for p in range(panels):
            panel = panel_at(room, begin, rows, p, deep, value_deep, like)
            own_low, own_high = open_backward(d, f, room, panel, batch, head, like)
            low, high = min(low, own_low), max(high, own_high)
        low, high = max(low, from_), min(high, to)
        for tile in range(low, high, KEY_TILE):
            stop = min(tile + KEY_TILE, high)
            k_place, v_place = k_base + tile * d[slot.K_ROW] * item, v_base + tile * d[slot.V_ROW] * item
            k, k_stride = pointer_as(like, k_place), d[slot.K_ROW]
            if not (own_kind and d[slot.K_INNER] == 1 and whole_depth == depth):
                k, k_stride = room.keys, whole_depth
                pack_rows(
                    k, whole_depth, k_place, d[slot.K_ROW], d[slot.K_INNER], kind, stop - tile, depth, whole_depth
                )
            v, v_stride = pointer_as(like, v_place), d[slot.V_ROW]
            if value_depth > 0 and not (own_kind and d[slot.V_INNER] == 1):
                v, v_stride = room.values, value_depth
                pack_rows(
                    v, value_depth, v_place, d[slot.V_ROW], d[slot.V_INNER], kind, stop - tile, value_depth, value_depth
                )
            for p in range(panels):
                panel = panel_at(room, begin, rows, p, deep, value_deep, like)
                to_k, to_v = at(room.to_k, (tile - from_) * deep), at(room.to_v, (tile - from_) * value_deep)
                visit_back(
                    d, f, room, panel, batch, head, tile, stop, k, k_stride, v, v_stride, to_k, deep, to_v, value_deep
                )
        for p in range(panels):
            panel = panel_at(room, begin, rows, p, deep, value_deep, like)
            close_backward(d, room, panel, batch, head, split, like)
    k_base = d[slot.TO_K] + (batch * d[slot.TO_K_BATCH] + kv_head * d[slot.TO_K_HEAD]) * item
    v_base = d[slot.TO_V] + (batch * d[slot.TO_V_BATCH] + kv_head * d[slot.TO_V_HEAD]) * item
    checked, zero = spread_as(like, 0), spread_as(like, 0)
    for key in range(from_, to):
        for i in range(0, depth, step):
            x = load(room.to_k, (key - from_) * deep + i)
            checked = fma(x, zero, checked)
            write_some(k_base + key * d[slot.TO_K_ROW] * item, kind, i, x, min(step, depth - i))
        for i in range(0, value_depth, step):
            x = load(room.to_v, (key - from_) * value_deep + i)
            checked = fma(x, zero, checked)
            write_some(v_base + key * d[slot.TO_V_ROW] * item, kind, i, x, min(step, value_depth - i))
    # 0 · x is 0 unless x is not finite.
    store(room.corner, 0, checked)
    for i in range(step):
        if room.corner[i] != 0:
            count_up(d, slot.SUSPECTS)


@kernel
def backward_task(d: Any, f: Any, task: int, scratch: int, like: Any) -> None:
    """One split of the keys of one head; or of all heads, where a mask's gradient is shared by them."""
    split, task = task % d[slot.SPLITS], task // d[slot.SPLITS]
    kv_heads = d[slot.HEADS] // d[slot.GROUP]
    for unit in range(task * d[slot.UNITS], (task + 1) * d[slot.UNITS]):
        backward_unit(d, f, scratch, unit // kv_heads, unit % kv_heads, split, like)


def _entry(task: Any, kind: Any) -> Any:
    @kernel
    def work(address: int) -> None:
        d, f = pointer(address, int64), pointer(address, float64)
        worker = count_up(d, slot.WORKER)
        if worker >= d[slot.ROOMS]:
            return
        scratch = d[slot.SCRATCH] + worker * d[slot.SCRATCH_BYTES]
        number = count_up(d, slot.TASK)
        while number < d[slot.TASKS]:
            task(d, f, number, scratch, pointer(0, kind))
            number = count_up(d, slot.TASK)

    return work


backward_f32, backward_f64 = _entry(backward_task, float32), _entry(backward_task, float64)
gather_f32, gather_f64 = _entry(gather_task, float32), _entry(gather_task, float64)
