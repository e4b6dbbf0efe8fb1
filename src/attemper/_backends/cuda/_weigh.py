"""Sums over keys about a reference that stays: for calls with no mask, softcap or dropout.

Nothing is rescaled from tile to tile. At the end the sums become a State.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._state import MOMENTS, SUMS, State
from ._tile import NO_KEY, load_keys, load_tile, of_rows, product


class Sums(NamedTuple):
    """Over the keys so far, about a reference that stays; of each row some, which are added up at the end."""

    total: Any
    tilt: Any
    squares: Any
    moved: Any
    """Of the distances of scores from the reference, and of their squares."""
    spread: Any
    highest: Any


@triton.jit
def seen_of_tile(start, rows, BN: tl.constexpr, FROM_FIRST: tl.constexpr):
    key = start + tl.arange(0, BN)
    if FROM_FIRST:
        return key[None, :] < rows.high[:, None]
    return (rows.low[:, None] <= key[None, :]) & (key[None, :] < rows.high[:, None])


@triton.jit
def tile_of(
    matrix, copy, start, rows, head, keys, depth, BN: tl.constexpr, D: tl.constexpr, COPIED: tl.constexpr,
    END: tl.constexpr,
):  # fmt: skip
    """Rows of k or v, at an END perhaps beyond the last."""
    if COPIED:
        return copy.load([rows.batch, head, start, 0]).reshape([BN, D])
    elif END:
        return load_keys(matrix, rows.batch, head, start, keys, depth, BN, D)
    else:
        return load_tile(matrix, rows.batch, head, start, depth, BN, D)


@triton.jit
def look(start, top, total, opening, q, k, k_copy, k_head, rows, factor, sizes, kind: tl.constexpr):
    """The largest score and the sum of scores of each row, with those of one tile more, and that of the first key."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    own = tile_of(k, k_copy, start, rows, k_head, sizes.keys, sizes.depth, BN, kind.depth, kind.copied, True)
    scores = product(q, own.T, tl.zeros([BM, BN], tl.float32), kind) * of_rows(factor, kind.stacked)
    return looked(start, top, total, opening, scores, rows, kind)


@triton.jit
def looked(start, top, total, opening, scores, rows, kind: tl.constexpr):
    """Likewise, of a tile of scores."""
    BN: tl.constexpr = kind.keys
    seen = seen_of_tile(start, rows, BN, kind.opens)
    top = tl.maximum(top, tl.max(tl.where(seen, scores, float("-inf")), 1))
    if kind.measure >= MOMENTS and not kind.summed:
        total += tl.sum(tl.where(seen, scores, 0.0), 1)
        if kind.opens:
            opening += tl.sum(tl.where((start + tl.arange(0, BN) == 0)[None, :], scores, 0.0), 1)
    return top, total, opening


@triton.jit
def reference_of(top, total, count, kind: tl.constexpr):
    """What the scores of each row are compared with: from the largest and the sum of so many."""
    reference = tl.where(top == float("-inf"), 0.0, top)
    if kind.measure >= MOMENTS and not kind.summed:
        # Nearer to their mean, where fewer digits of the moments cancel, by a whole number, so that the largest
        # weight stays exact. Not by much: weights of float16 overflow beyond 2¹⁶.
        mean = total / tl.maximum(count, 1.0)
        reference -= tl.minimum(tl.floor(reference - mean), 4.0)
    return reference


HIDDEN: tl.constexpr = tl.constexpr(-1e30)
"""The distance of a score that its row does not see: it weighs 0, and 0 times it is not NaN as with an infinity."""


@triton.jit
def by_thread(x, kind: tl.constexpr):
    """The columns of a tile by the thread that has them: its second and last axis are one thread's."""
    THREADS: tl.constexpr = 4 * kind.across
    return x.reshape([x.shape[0], x.shape[1] // (2 * THREADS), THREADS, 2])


@triton.jit
def added(x, kind: tl.constexpr):
    """Some sums of each row of a tile: those of what one thread has of it, so that none waits for another."""
    return tl.sum(tl.sum(by_thread(x, kind), 1), 2)


@triton.jit
def largest(x, kind: tl.constexpr):
    """Likewise."""
    return tl.max(tl.max(by_thread(x, kind), 1), 2)


@triton.jit
def weigh(apart, middle, sums, dtype: tl.constexpr, kind: tl.constexpr, END: tl.constexpr, FINE: tl.constexpr):
    """The weights of a tile, and the sums with theirs; the moments about the `middle`, which is 0 if not FINE.

    Some columns at a time: the compiler keeps to the order, fills the time that exponentials take with sums, and needs
    fewer registers.
    """
    if apart.shape[1] > kind.step:
        left, right = apart.reshape([apart.shape[0], 2, apart.shape[1] // 2]).permute(0, 2, 1).split()
        left, sums = weigh(left, middle, sums, dtype, kind, END, FINE)
        right, sums = weigh(right, middle, sums, dtype, kind, END, FINE)
        return tl.join(left, right).permute(0, 2, 1).reshape(apart.shape), sums
    else:
        power = tl.exp2(apart)
        total = sums.total + added(power, kind)
        tilt, squares, moved, spread, highest = sums.tilt, sums.squares, sums.moved, sums.spread, sums.highest
        if kind.peak:
            highest = tl.maximum(highest, largest(apart, kind))
        if kind.measure >= SUMS:
            squares += added(power * power, kind)
            tilt += added(power * apart, kind)
        if kind.measure >= MOMENTS and not kind.summed:
            off = apart
            if FINE:
                off = apart - middle[:, None]
            if END:
                off = tl.where(apart == HIDDEN, 0.0, off)
            moved += added(off, kind)
            spread += added(off * off, kind)
        return power.to(dtype), Sums(total, tilt, squares, moved, spread, highest)


@triton.jit
def add_values(
    weighted, power, start, v, v_copy, k_head, rows, sizes, kind: tl.constexpr, END: tl.constexpr
):  # fmt: skip
    """Add the values of a tile, times their weights."""
    values = tile_of(
        v, v_copy, start, rows, k_head, sizes.keys, sizes.value_depth, kind.keys, kind.value_depth, kind.copied, END
    )
    return product(power.to(v.data.dtype.element_ty), values, weighted, kind)


@triton.jit
def add_tile(
    sums, weighted, power, reference, middle, start, behind, q, k, v, k_copy, v_copy, k_head, rows, factor, sizes,
    kind: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """Add the keys of one tile: rows see all of it, or it is an END.

    Its weights come back too; if values go in `late`, it is those of the tile `behind` that are added, whose weights
    are given. A sum that overflows marks the block. Nothing is ever rescaled, also because accumulators that are
    touched between products make the compiler wait for each product.
    """
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    own = tile_of(k, k_copy, start, rows, k_head, sizes.keys, sizes.depth, BN, kind.depth, kind.copied, END)
    scores = product(q, own.T, tl.zeros([BM, BN], tl.float32), kind)
    if kind.late:
        weighted = add_values(weighted, power, behind, v, v_copy, k_head, rows, sizes, kind, END)
    apart = scores * of_rows(factor, kind.stacked) - reference[:, None]
    if END:
        apart = tl.where(seen_of_tile(start, rows, BN, kind.opens), apart, HIDDEN)
    FINE: tl.constexpr = k.data.dtype.element_ty == tl.float32
    power, sums = weigh(apart, middle, sums, power.dtype, kind, END, FINE)
    if kind.valued and not kind.late:
        weighted = add_values(weighted, power, start, v, v_copy, k_head, rows, sizes, kind, END)
    return sums, weighted, power


@triton.jit
def start_of_end(i, before, least, end, BN: tl.constexpr):
    """Of the tiles that not all rows see: so many `before` the others, and those after."""
    return tl.where(i < before, least + i * BN, end + (i - before) * BN)


@triton.jit
def add_any_tile(
    sums, weighted, reference, opening, start, inner, end, q, k, v, k_copy, v_copy, k_head, rows, factor, sizes,
    kind: tl.constexpr,
):  # fmt: skip
    """Likewise, whichever it is: those from `inner` to `end` all rows see.

    If it `opens`, the first tile gives the reference. A branch is where no product is under way, and costs little.
    """
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    own = tile_of(k, k_copy, start, rows, k_head, sizes.keys, sizes.depth, BN, kind.depth, kind.copied, True)
    scores = product(q, own.T, tl.zeros([BM, BN], tl.float32), kind)
    apart = scores * of_rows(factor, kind.stacked) - reference[:, None]
    if kind.merged and kind.opens:
        if start == 0:
            # So far it is 0.
            nothing = tl.zeros_like(opening)
            top, total, opening = looked(start, nothing - float("inf"), nothing, nothing, apart, rows, kind)
            reference = reference_of(top, total, visible(rows, 0, BN), kind)
            apart -= reference[:, None]
    if kind.measure >= MOMENTS and not kind.summed:
        if (start >= inner) & (start < end):
            power, sums = weigh(apart, reference, sums, tl.float32, kind, False, False)
        else:
            apart = tl.where(seen_of_tile(start, rows, BN, kind.opens), apart, HIDDEN)
            power, sums = weigh(apart, reference, sums, tl.float32, kind, True, False)
        power = power.to(own.dtype)
    else:
        if (start < inner) | (start >= end):
            apart = tl.where(seen_of_tile(start, rows, BN, kind.opens), apart, HIDDEN)
        power, sums = weigh(apart, reference, sums, own.dtype, kind, False, False)
    if kind.valued:
        weighted = add_values(weighted, power, start, v, v_copy, k_head, rows, sizes, kind, True)
    return sums, weighted, reference, opening


@triton.jit
def opening_of(own, k, k_head, rows, sizes, D: tl.constexpr):
    """q·k of the first key that a row sees."""
    component = tl.arange(0, D)
    place = rows.batch.to(tl.int64) * k.batch + k_head.to(tl.int64) * k.head + rows.low.to(tl.int64) * k.row
    inside = (rows.there & (rows.low < rows.high))[:, None] & (component < sizes.depth)[None, :]
    key = tl.load(k.data + place[:, None] + component[None, :], mask=inside, other=0.0)
    return tl.sum(own.to(tl.float32) * key.to(tl.float32), 1)


@triton.jit
def opened(state, own, k, k_head, rows, factor, sizes):
    """The State with the first key that a row sees, in whichever split that is."""
    score = opening_of(own, k, k_head, rows, sizes, own.shape[1]) * factor
    here = rows.low < rows.high
    return State(
        state.maximum, state.total, state.tilt, state.squares, state.count, state.mean, state.spread, state.highest,
        tl.where(here, rows.low, NO_KEY), tl.where(here, score, float("-inf")), state.weighted, state.awry,
    )  # fmt: skip


@triton.jit
def close(sums, weighted, reference, middle, opening, count, kind: tl.constexpr, FINE: tl.constexpr):
    """The State of so many keys, of which there were sums about a reference.

    And what its outputs are yet to be scaled by, but if it is of one split.
    """
    seen = count > 0
    shift, total = tl.zeros_like(count), tl.sum(sums.total, 1)
    if kind.peak:
        shift = tl.where(seen, -tl.max(sums.highest, 1), 0.0)
    keep = tl.exp2(shift)
    maximum = tl.where(seen, reference - shift, float("-inf"))
    tilt, squares, mean, spread = shift, shift, shift, shift
    if kind.measure >= SUMS:
        tilt = (tl.sum(sums.tilt, 1) + shift * total) * keep
        squares = tl.sum(sums.squares, 1) * keep * keep
    if kind.measure >= MOMENTS and not kind.summed:
        # The reference is a score of the row, or between one and their mean, and so no further from their mean than √n
        # of their deviations.
        moved = tl.sum(sums.moved, 1)
        move = moved / tl.maximum(count, 1.0)
        mean = reference + move
        if FINE:
            mean += middle
        mean = tl.where(seen, mean, 0.0)
        spread = tl.sum(sums.spread, 1) - moved * move
        spread = tl.where(spread < 0, 0.0, spread)
    if kind.valued and kind.split:
        weighted = weighted * keep[:, None]
    nowhere = tl.full(count.shape, NO_KEY, tl.int32)
    state = State(
        maximum, total * keep, tilt, squares, count, mean, spread, maximum, nowhere, opening, weighted, weighted,
    )  # fmt: skip
    return state, keep


@triton.jit
def visible(rows, start, stop):
    """How many of some keys a row sees."""
    return tl.maximum(tl.minimum(rows.high, stop) - tl.maximum(rows.low, start), 0).to(tl.float32)
