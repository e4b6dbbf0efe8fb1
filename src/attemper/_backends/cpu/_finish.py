"""What a panel leaves when all keys have been seen: the output and the Reading; or, of one split of them, the State."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, int64

from . import _slots as slot
from ._compile import kernel
from ._elements import find_rows, item_size, lowest, padded, write_turned
from ._panel import BYTES, LN2
from ._simd import (
    any_lane,
    as_indices,
    as_words,
    at,
    count_up,
    fma,
    lanes,
    load,
    maximum,
    pointer,
    pointer_as,
    spread_as,
    store,
    store_some,
    to_whole,
    where,
)
from ._simd_functions import exp2, log, magnitude, sqrt
from ._slots import (
    COUNT,
    F32,
    F64,
    FACTOR,
    FIRST_SCORE,
    FIRSTS,
    HIGHEST_QK,
    LEFT,
    MAXIMUM,
    MEAN,
    PARTS,
    REFERENCE,
    SPREAD,
    SQUARES,
    STOPS,
    TILE_COUNT,
    TILE_MEAN,
    TILE_SPREAD,
    TILE_SUM,
    TILT,
    TOTAL,
    UNIT,
)
from ._target import COLUMNS, PANELS
from ._weights import merge_moments


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
