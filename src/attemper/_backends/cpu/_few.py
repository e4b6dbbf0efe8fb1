"""Few rows: vectors go along the components of q, k and v, of which there are more.

Chosen by the kind of `mode`, so that neither kernel is compiled with what the other needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, uint8, uint16

from . import _slots as slot
from ._compile import by_kind
from ._elements import as_kind, lowest
from ._simd import (
    at,
    first_lane,
    fma,
    highest_of_lanes,
    lanes,
    load,
    maximum,
    spread,
    spread_as,
    store,
    sum_of_lanes,
    where,
)
from ._simd_functions import exp2
from ._slots import (
    COUNT,
    FACTOR,
    FIRST_SCORE,
    FIRSTS,
    KEEP,
    MAXIMUM,
    MEAN,
    REFERENCE,
    SPREAD,
    SQUARES,
    STOPS,
    TILT,
    TOTAL,
)
from ._tile import scores_of, thin_scores, thin_values, values_of

MANY, FEW = uint16, uint8
"""Kernels for many rows and for few: told apart by a kind, so that neither is compiled with what the other needs."""


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
