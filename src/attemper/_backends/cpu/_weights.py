"""From the scores of a tile to weights, and what these add up to in the State of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, types

from ._compile import by_kind, kernel
from ._elements import lowest
from ._simd import at, fma, lanes, load, maximum, per_cell, spread_as, store, where
from ._simd_blocks import pair_up
from ._simd_functions import exp2
from ._slots import (
    CLEAR,
    COUNT,
    FACTOR,
    FIRST_SCORE,
    FIRSTS,
    KEEP,
    LEAST,
    LIMITS,
    MAXIMUM,
    MEAN,
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
)
from ._target import target

KEYS_A_TURN = 4 if target().registers == 32 else 2
"""Keys that a turn of the loop over weights takes: with less, LLVM reads the constants of exp2 anew in each."""


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
