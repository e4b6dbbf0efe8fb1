"""The forward pass in Triton: output and statistics, on any GPU that Triton supports.

Scores are kept as exponents of 2. The State (see `attemper._state`) of a block of rows grows tile by tile. A block of
which a row ends in a number that is not finite is marked, and a second kernel computes marked blocks again, with care:
0 · NaN is NaN, and what a hidden key holds must not reach a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._tile import (
    BAND,
    BIAS,
    LN2,
    LOG2E,
    NO_KEY,
    NO_MASK,
    draws_of_rows,
    far_apart,
    is_over,
    load_keys,
    load_rows,
    load_tile,
    mask_of_tile,
    mask_rows,
    of_rows,
    open_rows,
    place_of_rows,
    product,
    range_of_band,
    range_of_block,
    rows_of_head,
    sizes_of,
    survivors,
    tanh,
    write_rows,
)

SUMS: tl.constexpr = tl.constexpr(1)
"""To measure what needs sums over the weights."""
MOMENTS: tl.constexpr = tl.constexpr(2)
"""To measure what needs sums over the scores too."""


class State(NamedTuple):
    """Of a block of rows over the keys so far; exponents of 2 throughout."""

    maximum: Any
    total: Any
    tilt: Any
    squares: Any
    count: Any
    mean: Any
    spread: Any
    highest: Any
    """The largest scaled q·k; kept apart from the maximum under a bias or a softcap, and where that stays."""
    opening: Any
    """The first visible key, and its score."""
    opening_score: Any
    weighted: Any
    awry: Any
    """Of each output, with care: 1 if ∞ reached it, 2 if −∞ did, 4 if NaN did."""


class Sums(NamedTuple):
    """Over the keys so far, about a reference that stays; of each row some, which are added up at the end."""

    total: Any
    tilt: Any
    squares: Any
    moved: Any
    """Of the distances of scores from the reference, and of their squares."""
    spread: Any
    highest: Any


class Fields(NamedTuple):
    """Where the fields of the Reading go; one that nobody wants may share its place with others."""

    max_logit: Any
    logsumexp: Any
    expected_score: Any
    entropy: Any
    largest_weight: Any
    collision: Any
    score_mean: Any
    score_std: Any
    max_qk: Any
    first_key_weight: Any
    sink_mass: Any
    output_norm: Any
    visible_keys: Any
    nonfinite: Any


class Known(NamedTuple):
    """Of the rows of a block, what their scores need."""

    factor: Any
    """From q·k to exponents of 2."""
    mask: Any
    draw_low: Any
    draw_high: Any


@triton.jit
def fresh(BM: tl.constexpr, DV: tl.constexpr):
    """The State over no keys."""
    zero = tl.zeros([BM], tl.float32)
    lowest = zero - float("inf")
    return State(
        lowest,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        lowest,
        tl.full([BM], NO_KEY, tl.int32),
        lowest,
        tl.zeros([BM, DV], tl.float32),
        tl.zeros([BM, DV], tl.int32),
    )


@triton.jit
def visit(
    state, start, q, k, v, k_head, rows, known, masked, dropped, softcap, sizes, kind: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Take the keys of one tile into the State."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    DV: tl.constexpr = kind.value_depth
    own = load_keys(k, rows.batch, k_head, start, sizes.keys, sizes.depth, BN, D)
    scores = product(q, own.T, tl.zeros([BM, BN], tl.float32), kind)
    scores *= of_rows(known.factor, kind.stacked)
    raw = scores
    key = start + tl.arange(0, BN)
    seen = (rows.low[:, None] <= key[None, :]) & (key[None, :] < rows.high[:, None])
    if kind.softcap:
        scores = softcap * LOG2E * tanh(scores * (LN2 / softcap))
    if kind.mask != NO_MASK:
        added, shown = mask_of_tile(masked, known.mask, key, seen, kind.mask)
        seen = seen & shown
        if kind.mask == BIAS:
            scores = scores + added * LOG2E
    scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(state.maximum, tl.max(scores, 1))
    if CAREFUL:
        # A maximum passes over a NaN.
        broken = tl.max(tl.where(scores != scores, 1, 0), 1) > 0
        best = tl.where(broken | (state.maximum != state.maximum), float("nan"), best)
    reference = tl.where(best == float("-inf"), 0.0, best)
    apart = scores - reference[:, None]
    power = tl.exp2(apart)
    # A row that saw nothing yet is at −inf, and nothing is kept of nothing.
    shift = tl.where(state.total > 0, state.maximum - reference, float("-inf"))
    keep = tl.exp2(shift)
    tilt, squares = state.tilt, state.squares
    if kind.measure >= SUMS:
        leaning = tl.where(power == 0, 0.0, power * apart)
        before = tl.where(state.total > 0, shift, 0.0) * state.total
        tilt = (tilt + before) * keep + tl.sum(leaning, 1)
        squares = squares * (keep * keep) + tl.sum(power * power, 1)
    total = state.total * keep + tl.sum(power, 1)
    if CAREFUL:
        total = tl.where(state.total != state.total, state.total, total)
    count, mean, spread = state.count, state.mean, state.spread
    if kind.mask == NO_MASK:
        span = tl.minimum(rows.high, start + BN) - tl.maximum(rows.low, start)
        here = tl.maximum(span, 0).to(tl.float32)
    else:
        here = tl.sum(tl.where(seen, 1.0, 0.0), 1)
    highest, opening, opening_score = best, state.opening, state.opening_score
    if kind.measure >= MOMENTS:
        # Two passes over the tile: the sum of squares alone would cancel when the mean is large.
        tile_mean = tl.sum(tl.where(seen, scores, 0.0), 1) / tl.maximum(here, 1.0)
        off = tl.where(seen, scores - tile_mean[:, None], 0.0)
        whole = tl.maximum(count + here, 1.0)
        gap = tl.where((count > 0) & (here > 0) & (tile_mean != mean), tile_mean - mean, 0.0)
        spread = spread + tl.sum(off * off, 1) + gap * gap * count * (here / whole)
        mean = mean * (count / whole) + tile_mean * (here / whole)
        if kind.softcap or kind.mask == BIAS:
            highest = tl.maximum(state.highest, tl.max(tl.where(seen, raw, float("-inf")), 1))
            if CAREFUL:
                broken = tl.max(tl.where(seen & (raw != raw), 1, 0), 1) > 0
                highest = tl.where(broken | (state.highest != state.highest), float("nan"), highest)
        if kind.mask != NO_MASK or kind.softcap or kind.dropout or CAREFUL:
            # Elsewhere it is one product more, at the end.
            where = tl.min(tl.where(seen, key[None, :], NO_KEY), 1)
            score = tl.max(tl.where(key[None, :] == where[:, None], scores, float("-inf")), 1)
            opening_score = tl.where(where < opening, score, opening_score)
            opening = tl.minimum(opening, where)
    weighted, awry = state.weighted, state.awry
    if kind.valued:
        values = load_keys(v, rows.batch, k_head, start, sizes.keys, sizes.value_depth, BN, DV)
        if kind.dropout:
            power = tl.where(survivors(known.draw_low, known.draw_high, key, dropped.threshold), power, 0.0)
        if CAREFUL:
            wide = values.to(tl.float32)
            meets = tl.where(seen, 1.0, 0.0).to(values.dtype)
            nothing = tl.zeros([BM, DV], tl.float32)
            above = tl.where(wide == float("inf"), 1.0, 0.0).to(values.dtype)
            below = tl.where(wide == float("-inf"), 1.0, 0.0).to(values.dtype)
            neither = tl.where(wide != wide, 1.0, 0.0).to(values.dtype)
            awry = awry | tl.where(product(meets, above, nothing, kind) > 0, 1, 0)
            awry = awry | tl.where(product(meets, below, nothing, kind) > 0, 2, 0)
            awry = awry | tl.where(product(meets, neither, nothing, kind) > 0, 4, 0)
            values = tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(values.dtype)
        weighted = product(power.to(values.dtype), values, weighted * keep[:, None], kind)
    return State(
        best, total, tilt, squares, count + here, mean, spread, highest, opening, opening_score, weighted, awry,
    )  # fmt: skip


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
def finish(
    state, keep, rows, sizes, sinks, out, out_copy, wide, fields, mark, block, kind: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Write the output, times what is to `keep` of it, and the fields of the Reading.

    The block is marked if one of them is not finite.
    """
    DV: tl.constexpr = kind.value_depth
    seen, there = state.count > 0, rows.there
    row = place_of_rows(rows, sizes)
    # Keys may be visible and yet all score −inf: the softmax is then 0/0, not the 0 of a row that sees nothing.
    total = tl.where(seen, tl.where(state.total == 0, float("nan"), state.total), 1.0)
    log_total = tl.log2(total)
    inverse = 1 / total
    logsumexp = tl.where(seen, (state.maximum + log_total) * LN2, float("-inf"))
    tl.store(fields.max_logit + row, state.maximum * LN2, mask=there)
    tl.store(fields.logsumexp + row, logsumexp, mask=there)
    tl.store(fields.largest_weight + row, tl.where(seen, inverse, 0.0), mask=there)
    visible = state.count.to(tl.int64)
    if kind.mask == NO_MASK:
        # A float32 counts to 2²⁴; where bounds alone hide keys they say it too.
        visible = tl.maximum(rows.high - rows.low, 0).to(tl.int64)
    tl.store(fields.visible_keys + row, visible, mask=there)
    passing = tl.full(total.shape, 1.0, tl.float32)
    mass = tl.zeros(total.shape, tl.float32)
    if kind.sinks:
        place = rows.batch * sizes.sinks_batch + rows.head * sizes.sinks_head
        sink = tl.load(sinks + place + tl.zeros_like(rows.query), mask=there, other=float("-inf"))
        absent = sink == float("-inf")
        # As a logistic of the difference, which neither side can overflow.
        gap = (tl.where(absent, 0.0, sink) - logsumexp) * LOG2E
        passing = tl.where(absent, 1.0, 1 / (1 + tl.exp2(gap)))
        mass = tl.where(absent, 0.0, 1 / (1 + tl.exp2(-gap)))
    tl.store(fields.sink_mass + row, mass, mask=there)
    # 0 times what is not finite is NaN.
    check = state.maximum * 0.0 + total * 0.0
    if kind.measure >= SUMS:
        lean = state.tilt * inverse
        collision = state.squares * inverse * inverse
        check += collision * 0.0 + lean * 0.0
        collision = tl.where(collision > 1, 1.0, collision)
        tl.store(fields.expected_score + row, tl.where(seen, (state.maximum + lean) * LN2, 0.0), mask=there)
        tl.store(fields.entropy + row, tl.where(seen, (log_total - lean) * LN2, 0.0), mask=there)
        tl.store(fields.collision + row, tl.where(seen, collision, 0.0), mask=there)
    lost = tl.zeros_like(total)
    if kind.valued:
        result = state.weighted * (passing * keep * inverse * (1 / sizes.kept))[:, None]
        if CAREFUL:
            result = tl.where((state.awry & 1) != 0, result + float("inf"), result)
            result = tl.where((state.awry & 2) != 0, result - float("inf"), result)
            result = tl.where((state.awry & 4) != 0, float("nan"), result)
            result = tl.where(seen[:, None], result, 0.0)
            # No square may over- or underflow.
            largest = tl.max(tl.abs(result), 1)
            unit = tl.where((largest > 1e-30) & (largest < float("inf")), largest, 1.0)
            share = result * (1 / unit)[:, None]
            norm = unit * tl.sqrt(tl.sum(share * share, 1))
        else:
            square, size = tl.sum(result * result, 1), tl.sum(tl.abs(result), 1)
            norm = tl.sqrt(square)
            # Squares that underflow are left to the kernel that takes care, and so is 0 · NaN where nothing is seen.
            lost = tl.where((square > 1e-30) | (size == 0), square * 0.0, float("nan"))
        if kind.wide:
            write_rows(wide, result, rows, sizes.value_depth, DV)
        if kind.copied:
            own = result.to(out.data.dtype.element_ty).reshape([1, 1, kind.rows, DV])
            out_copy.store([rows.batch, rows.head, block % sizes.blocks * kind.rows, 0], own)
        else:
            write_rows(out, result, rows, sizes.value_depth, DV)
        tl.store(fields.output_norm + row, norm, mask=there)
        if CAREFUL:
            check += norm * 0.0
    if kind.measure >= MOMENTS and not kind.summed:
        deviation = tl.sqrt(state.spread / tl.where(seen, state.count, 1.0))
        first = tl.exp2(state.opening_score - state.maximum) * inverse
        tl.store(fields.score_mean + row, state.mean * LN2, mask=there)
        tl.store(fields.score_std + row, deviation * LN2, mask=there)
        tl.store(fields.first_key_weight + row, tl.where(seen, first, 0.0), mask=there)
    unsound = seen & (check != 0)
    if kind.measure >= MOMENTS:
        tl.store(fields.max_qk + row, state.highest * LN2, mask=there)
        unsound = unsound | (seen & (state.mean * 0.0 != 0))
        nonfinite = unsound | (seen & (lost != 0))
        tl.store(fields.nonfinite + row, tl.where(nonfinite, 1, 0).to(tl.int64), mask=there)
    if not CAREFUL:
        # As a column: of a row of numbers Triton 3.6 makes nothing on GPUs of compute capability 10.0.
        again = tl.where(there & (unsound | (lost != 0)), 1, 0)
        tl.store(mark + block + tl.arange(0, 1), tl.max(again[:, None], 0))


@triton.jit
def open_block(begin, batch, head, first, stop, scale, sizes, masked, dropped, kind: tl.constexpr):
    """The rows of a block, and what their scores need."""
    BM: tl.constexpr = kind.rows
    if kind.stacked:
        rows = open_rows(begin, batch, head, first, stop, sizes, BM, kind.bounded)
        factor = tl.load(scale + batch * sizes.scale_batch + rows.head * sizes.scale_head, mask=rows.there, other=0.0)
    else:
        rows = rows_of_head(begin, batch, head, first, stop, sizes, BM, kind.bounded)
        factor = tl.load(scale + batch * sizes.scale_batch + head * sizes.scale_head)
    draw_low = tl.zeros([BM], tl.uint32)
    draw_high = tl.zeros([BM], tl.uint32)
    if kind.dropout:
        draw_low, draw_high = draws_of_rows(dropped, rows, sizes)
    return rows, Known(factor * LOG2E, mask_rows(masked, rows, kind.mask), draw_low, draw_high)


@triton.jit
def visible(rows, start, stop):
    """How many of some keys a row sees."""
    return tl.maximum(tl.minimum(rows.high, stop) - tl.maximum(rows.low, start), 0).to(tl.float32)


@triton.jit
def place_of_block(block, sizes):
    """The batch entry and the (first) head of a block, and which of their blocks it is."""
    turn = block % sizes.blocks
    unit = block // sizes.blocks
    stacks = sizes.heads // sizes.stack
    return unit // stacks, unit % stacks * sizes.stack, turn


@triton.jit
def forward_kernel(
    q, k, v, q_copy, k_copy, v_copy, out_copy, first, stop, scale, sinks, softcap, masked, dropped, sizes, out, wide,
    fields, mark, partial, kind: tl.constexpr,
):  # fmt: skip
    """A block of rows against all keys that any of them sees, or against one split of them."""
    sizes = sizes_of(sizes, not kind.bounded)
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    program = tl.program_id(0)
    split = 0
    if kind.split:
        split = program % sizes.splits
        program = program // sizes.splits
    # Late rows first: under a causal mask they see most. Neighbours in time share their keys.
    unit = program // sizes.blocks
    turn = (unit + 1) * sizes.blocks - 1 - program
    block = unit * sizes.blocks + turn
    stacks = sizes.heads // sizes.stack
    batch, head = unit // stacks, unit % stacks * sizes.stack
    k_head = head // sizes.group
    rows, known = open_block(turn * kind.rows, batch, head, first, stop, scale, sizes, masked, dropped, kind)
    if kind.copied:
        own = q_copy.load([batch, head, turn * kind.rows, 0]).reshape([kind.rows, D])
    else:
        own = load_rows(q, rows, sizes.depth, D)
    if not kind.stacked and (kind.bounded == 0 or kind.bounded == BAND):
        least, most, clear, clear_stop = range_of_band(turn * kind.rows, sizes, BM, kind.bounded)
    else:
        least, most, clear, clear_stop = range_of_block(rows, sizes.keys)
    if kind.split:
        share = tl.cdiv(tl.cdiv(sizes.keys, sizes.splits), BN) * BN
        least, most = tl.maximum(least, split * share), tl.minimum(most, (split + 1) * share)
    least = least // BN * BN
    state, keep = fresh(kind.rows, kind.value_depth), 1.0
    if kind.softcap or kind.mask != NO_MASK or kind.dropout:
        for start in tl.range(least, most, BN):
            state = visit(
                state, start, own, k, v, k_head, rows, known, masked, dropped, softcap, sizes, kind, False
            )  # fmt: skip
    else:
        # Whole tiles that all rows see go without a mask.
        clear_stop = tl.minimum(clear_stop, most)
        inner = tl.minimum(tl.maximum(tl.cdiv(clear, BN) * BN, least), most)
        end = tl.maximum(clear_stop // BN * BN, inner)
        if far_apart(k, v, BN):
            end = inner
        # Rows are weighed by what they see of one tile, in which each sees a key, or else of all tiles.
        top, total, opening = state.maximum, state.total, state.total
        if kind.merged and kind.opens:
            # Of the first tile, when it is there.
            reference = total
        else:
            if kind.shared:
                # Without a loop: in one the compiler takes more registers, also for the loops that follow.
                at = tl.maximum(tl.minimum(clear, most - 1), 0) // BN * BN
                until = at + BN
                top, total, opening = look(
                    at, top, total, opening, own, k, k_copy, k_head, rows, known.factor, sizes, kind
                )  # fmt: skip
            else:
                clear = tl.maximum(clear, least)
                at = tl.where(clear < clear_stop, clear // BN * BN, least)
                until = tl.where(clear < clear_stop, at + BN, most)
                for start in tl.range(at, until, BN):
                    top, total, opening = look(
                        start, top, total, opening, own, k, k_copy, k_head, rows, known.factor, sizes, kind
                    )  # fmt: skip
            count = visible(rows, tl.maximum(at, least), tl.minimum(until, most))
            reference = reference_of(top, total, count, kind)
        middle = reference
        FINE: tl.constexpr = k.data.dtype.element_ty == tl.float32
        if FINE:
            # How far from it the mean of that tile is: about this less cancels of what the moments are made of, and
            # 32 bits show it.
            middle = total / tl.maximum(count, 1.0) - reference
        zero = tl.zeros([BM, 4 * kind.across], tl.float32)
        sums, weighted = Sums(zero, zero, zero, zero, zero, zero - float("inf")), state.weighted
        if kind.merged:
            for start in tl.range(least, most, BN):
                sums, weighted, reference, opening = add_any_tile(
                    sums, weighted, reference, opening, start, inner, end, own, k, v, k_copy, v_copy, k_head, rows,
                    known.factor, sizes, kind,
                )  # fmt: skip
        else:
            before = tl.cdiv(inner - least, BN)
            ends = before + tl.cdiv(tl.maximum(most - end, 0), BN)
            # In 32 bits as far as the next product, so that pairs of them need not be taken apart and put together.
            power = tl.zeros([BM, BN], tl.float32 if kind.late else k.data.dtype.element_ty)
            for i in tl.range(0, ends):
                sums, weighted, power = add_tile(
                    sums, weighted, power, reference, middle, start_of_end(i, before, least, end, BN),
                    start_of_end(tl.maximum(i - 1, 0), before, least, end, BN),
                    own, k, v, k_copy, v_copy, k_head, rows, known.factor, sizes, kind, True,
                )  # fmt: skip
            # Where nothing is behind the weights are 0.
            behind = tl.where(ends > 0, start_of_end(ends - 1, before, least, end, BN), least)
            for start in tl.range(inner, end, BN):
                sums, weighted, power = add_tile(
                    sums, weighted, power, reference, middle, start, tl.where(start == inner, behind, start - BN),
                    own, k, v, k_copy, v_copy, k_head, rows, known.factor, sizes, kind, False,
                )  # fmt: skip
            if kind.late:
                behind = tl.where(inner < end, end - BN, behind)
                weighted = add_values(weighted, power, behind, v, v_copy, k_head, rows, sizes, kind, True)
        state, keep = close(sums, weighted, reference, middle, opening, visible(rows, least, most), kind, FINE)
        if kind.measure >= MOMENTS and not kind.summed and not kind.opens:
            state = opened(state, own, k, k_head, rows, known.factor, sizes)
    if kind.split:
        leave(state, partial, block, split, sizes, kind)
    else:
        finish(state, keep, rows, sizes, sinks, out, out_copy, wide, fields, mark, block, kind, False)


@triton.jit(do_not_specialize=("blocks",))
def careful_kernel(
    q, k, v, first, stop, scale, sinks, softcap, masked, dropped, sizes, out, wide, fields, mark, blocks,
    kind: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of some blocks those that are marked."""
    sizes = sizes_of(sizes, False)
    begin = tl.program_id(0) * SPAN
    if is_over(mark, begin, blocks, SPAN):
        return
    for block in tl.range(begin, tl.minimum(begin + SPAN, blocks)):
        if tl.load(mark + block) != 0:
            batch, head, turn = place_of_block(block, sizes)
            rows, known = open_block(turn * kind.rows, batch, head, first, stop, scale, sizes, masked, dropped, kind)
            own = load_rows(q, rows, sizes.depth, kind.depth)
            least, most, _clear, _clear_stop = range_of_block(rows, sizes.keys)
            state = fresh(kind.rows, kind.value_depth)
            for start in tl.range(least // kind.keys * kind.keys, most, kind.keys):
                state = visit(
                    state, start, own, k, v, head // sizes.group, rows, known, masked, dropped, softcap, sizes, kind,
                    True,
                )  # fmt: skip
            finish(state, 1.0, rows, sizes, sinks, out, out, wide, fields, mark, block, kind, True)


PARTS: tl.constexpr = tl.constexpr(10)


@triton.jit
def leave(state, partial, block, split, sizes, kind: tl.constexpr):
    """Keep the State over one split of the keys."""
    BM: tl.constexpr = kind.rows
    DV: tl.constexpr = kind.value_depth
    base = partial + (block.to(tl.int64) * sizes.splits + split) * (BM * (PARTS + DV))
    row = tl.arange(0, BM)
    for i in tl.static_range(PARTS):
        part = state[i]
        if i == 8:
            part = part.to(tl.float32, bitcast=True)
        tl.store(base + i * BM + row, part)
    if kind.valued:
        component = tl.arange(0, DV)
        place = PARTS * BM + row[:, None] * DV + component[None, :]
        tl.store(base + place, state.weighted)


@triton.jit
def merge_kernel(
    first, stop, scale, sinks, masked, dropped, sizes, out, wide, fields, mark, partial, kind: tl.constexpr
):  # fmt: skip
    """Merge the States of all splits of a block of rows, and finish it."""
    sizes = sizes_of(sizes, not kind.bounded)
    BM: tl.constexpr = kind.rows
    DV: tl.constexpr = kind.value_depth
    block = tl.program_id(0)
    batch, head, turn = place_of_block(block, sizes)
    rows, _known = open_block(turn * BM, batch, head, first, stop, scale, sizes, masked, dropped, kind)
    row = tl.arange(0, BM)
    component = tl.arange(0, DV)
    state = fresh(BM, DV)
    for split in tl.range(0, sizes.splits):
        base = partial + (block.to(tl.int64) * sizes.splits + split) * (BM * (PARTS + DV))
        maximum = tl.load(base + row)
        total = tl.load(base + BM + row)
        best = tl.maximum(state.maximum, maximum)
        reference = tl.where(best == float("-inf"), 0.0, best)
        ours = tl.where(state.total > 0, state.maximum - reference, float("-inf"))
        theirs = tl.where(total > 0, maximum - reference, float("-inf"))
        keep, take = tl.exp2(ours), tl.exp2(theirs)
        tilt = (state.tilt + tl.where(state.total > 0, ours, 0.0) * state.total) * keep
        tilt += (tl.load(base + 2 * BM + row) + tl.where(total > 0, theirs, 0.0) * total) * take
        squares = state.squares * keep * keep + tl.load(base + 3 * BM + row) * take * take
        here, tile_mean = tl.load(base + 4 * BM + row), tl.load(base + 5 * BM + row)
        whole = tl.maximum(state.count + here, 1.0)
        gap = tl.where((state.count > 0) & (here > 0) & (tile_mean != state.mean), tile_mean - state.mean, 0.0)
        spread = state.spread + tl.load(base + 6 * BM + row) + gap * gap * state.count * (here / whole)
        mean = state.mean * (state.count / whole) + tile_mean * (here / whole)
        highest = tl.maximum(state.highest, tl.load(base + 7 * BM + row))
        where = tl.load(base + 8 * BM + row).to(tl.int32, bitcast=True)
        score = tl.load(base + 9 * BM + row)
        opening_score = tl.where(where < state.opening, score, state.opening_score)
        weighted = state.weighted
        if kind.valued:
            place = PARTS * BM + row[:, None] * DV + component[None, :]
            weighted = weighted * keep[:, None] + tl.load(base + place) * take[:, None]
        state = State(
            best, state.total * keep + total * take, tilt, squares, state.count + here, mean, spread, highest,
            tl.minimum(state.opening, where), opening_score, weighted, state.awry,
        )  # fmt: skip
    finish(state, 1.0, rows, sizes, sinks, out, out, wide, fields, mark, block, kind, False)


@triton.jit
def opening_kernel(q, k, first, stop, scale, sizes, fields, kind: tl.constexpr):
    """The weight of the first key that a row sees, beside a kernel that gives the logsumexp."""
    sizes = sizes_of(sizes, False)
    BM: tl.constexpr = kind.rows
    batch, head, turn = place_of_block(tl.program_id(0), sizes)
    rows = rows_of_head(turn * BM, batch, head, first, stop, sizes, BM, kind.bounded)
    row, there, seen = place_of_rows(rows, sizes), rows.there, rows.low < rows.high
    logsumexp = tl.load(fields.logsumexp + row, mask=there, other=0.0)
    own = load_rows(q, rows, sizes.depth, kind.depth)
    score = opening_of(own, k, head // sizes.group, rows, sizes, kind.depth)
    score *= tl.load(scale + batch * sizes.scale_batch + head * sizes.scale_head)
    tl.store(fields.first_key_weight + row, tl.where(seen, tl.exp2((score - logsumexp) * LOG2E), 0.0), mask=there)
