"""What is added to the scores of a tile, and which of them are visible."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, types, uint8, uint32

from ._compile import by_kind, kernel
from ._elements import as_kind, item_size, number_at, read_some
from ._simd import lanes, load, load_some, maximum, pointer, spread, spread_as, store, where, widen
from ._simd_blocks import load_square, store_apart, transpose
from ._simd_functions import tanh
from ._slots import BOOL, COUNT, F64, FIRST_SCORE, FIRSTS, HIGHEST_QK, STOPS, TILE_COUNT, TILE_MAX, TILE_SUM, UNIT
from ._tile import KEYS_AT_ONCE


@kernel
def pack_mask(
    out: Any, width: int, corner: Any, rows: Any, n: int, kind: int, key_stride: int, first: int, keys: int
) -> None:
    """out[key][row]: what a mask adds, −inf where it hides.

    A number that is finite in the mask but not here would hide what the mask does not; it becomes NaN, and the row is
    looked at again with more digits.
    """
    step = lanes(out)
    size = item_size(kind)
    for left in range(0, width, step):
        for top in range(0, keys, step):
            some = min(step, keys - top)
            for r in range(step):
                if left + r >= n:
                    store(corner, r * step, spread_as(out, 0))
                    continue
                place = rows[left + r] + (first + top) * key_stride * size
                if key_stride == 1 and contiguous_mask(out, kind):
                    store(corner, r * step, mask_vector(out, place, kind, some))
                else:
                    for i in range(some):
                        corner[r * step + i] = mask_number(out, place + i * key_stride * size, kind)
            store_apart(out, top * width + left, width, transpose(load_square(corner)))


def contiguous_mask(out: Any, kind: int) -> Any:
    """Whether `mask_vector` reads masks of this kind."""


@by_kind(contiguous_mask)
def _contiguous_mask(out: Any, kind: Any) -> Any:
    if out.dtype == types.float64:
        return lambda out, kind: kind == F64
    return lambda out, kind: kind != F64


def mask_vector(out: Any, address: int, kind: int, some: int) -> Any:
    """What a run of a mask adds."""


@by_kind(mask_vector)
def _mask_vector(out: Any, address: Any, kind: Any, some: Any) -> Any:
    if out.dtype == types.float64:
        return lambda out, address, kind, some: load_some(pointer(address, float64), 0, some)

    def narrow_kinds(out: Any, address: int, kind: int, some: int) -> Any:
        if kind == BOOL:
            own = pointer(address, uint8)
            shown = widen(load(own, 0) if some == lanes(own) else load_some(own, 0, some))
            return where(spread(uint32(0)) < shown, spread(float32(0)), spread(float32(-np.inf)))
        return read_some(out, address, kind, 0, some)

    return narrow_kinds


@kernel
def bool_number(address: int) -> float:
    """What one bool adds."""
    return 0.0 if pointer(address, uint8)[0] else -np.inf


@kernel
def mask_number(out: Any, address: int, kind: int) -> Any:
    """What one element of a mask adds, in the kind of number that out holds."""
    value = bool_number(address) if kind == BOOL else number_at(address, kind)
    held = as_kind(out, value)
    return as_kind(out, np.nan) if held == -np.inf and value != -np.inf else held


@kernel
def hide(scores: Any, width: int, first: int, present: int, state: Any, index: Any) -> None:
    """Put −inf where the bounds of the rows hide one of the keys from `first` on, and take up the maximum and sum."""
    step = lanes(scores)
    nothing = spread_as(scores, -np.inf)
    for left in range(0, width, step):
        low, high = load(index, FIRSTS * width + left), load(index, STOPS * width + left)
        best, total = load(state, TILE_MAX * width + left), load(state, TILE_SUM * width + left)
        for r in range(KEYS_AT_ONCE):
            x = nothing
            if r < present:
                key = spread_as(index, first + r)
                seen = (low <= key) & (key < high)
                raw = load(scores, r * width + left)
                x = where(seen, raw, nothing)
                total = total + where(seen, raw, spread_as(scores, 0))
                best = maximum(x, best)
            store(scores, r * width + left, x)
        store(state, TILE_MAX * width + left, best)
        store(state, TILE_SUM * width + left, total)


@kernel
def dress(
    scores: Any,
    width: int,
    first: int,
    present: int,
    state: Any,
    index: Any,
    softcap: float,
    bias: Any,
    masked: bool,
    slopes: Any,
    sloping: bool,
) -> None:
    """Scale, softcap, bias and masks for the keys from `first` on, and the sums of what is visible of them.

    For a gradient, how steep the softcap is at each score.
    """
    step = lanes(scores)
    nothing, zero, one = spread_as(scores, -np.inf), spread_as(scores, 0), spread_as(scores, 1)
    cap = spread_as(scores, softcap)
    per_cap = spread_as(scores, 1 / softcap if softcap > 0 else 0.0)
    for left in range(0, width, step):
        low, high = load(index, FIRSTS * width + left), load(index, STOPS * width + left)
        best, total = load(state, TILE_MAX * width + left), load(state, TILE_SUM * width + left)
        count, before = load(state, TILE_COUNT * width + left), load(state, COUNT * width + left)
        highest, opening = load(state, HIGHEST_QK * width + left), load(state, FIRST_SCORE * width + left)
        unit = load(state, UNIT * width + left)
        for r in range(KEYS_AT_ONCE):
            x = nothing
            if r < present:
                key = spread_as(index, first + r)
                shown = where((low <= key) & (key < high), one, zero)
                qk = load(scores, r * width + left) * unit
                x = qk
                if softcap > 0:
                    bent = tanh(qk * per_cap)
                    x = cap * bent
                    if sloping:
                        store(slopes, r * width + left, one - bent * bent)
                if masked:
                    added = load(bias, r * width + left)
                    x = x + added
                    shown = where(added == nothing, zero, shown)
                seen = shown > zero
                opening = where(seen & ((before + count) == zero), x, opening)
                highest = maximum(where(seen, qk, nothing), highest)
                total = total + where(seen, x, zero)
                x = where(seen, x, nothing)
                best = maximum(x, best)
                count = count + shown
            store(scores, r * width + left, x)
        store(state, TILE_MAX * width + left, best)
        store(state, TILE_SUM * width + left, total)
        store(state, TILE_COUNT * width + left, count)
        store(state, HIGHEST_QK * width + left, highest)
        store(state, FIRST_SCORE * width + left, opening)
