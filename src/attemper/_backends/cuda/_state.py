"""The State of a block of rows, as `attemper._state` has it, and how it takes a tile of keys up.

Of any call, and with care for NaN and infinity if that is asked for; `_weigh` is for simple calls, and quicker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._tile import BIAS, LN2, LOG2E, NO_KEY, NO_MASK, load_keys, mask_of_tile, of_rows, product, survivors, tanh

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
