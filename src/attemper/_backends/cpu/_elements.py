"""Operands as they lie in memory, of any kind: read, rounded, written, and packed for the products of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, types, uint16, uint32

from . import _slots as slot
from ._compile import by_kind, kernel
from ._simd import (
    bits_of,
    lanes,
    load,
    load_some,
    narrow,
    per_cell,
    pointer,
    spread,
    spread_as,
    store,
    store_some,
    where,
    widen,
)
from ._simd_blocks import load_apart, load_square, store_apart, store_square, times_all, transpose
from ._slots import BF16, BOOL, F32, F64

padded = kernel(slot.padded)


@kernel
def item_size(kind: int) -> int:
    """Bytes of an element."""
    if kind == F32:
        return 4
    if kind == F64:
        return 8
    return 1 if kind == BOOL else 2


# Reading and writing elements of any kind.


@kernel
def from_half(bits: Any) -> Any:
    """float16 as float32: shifted into place and scaled, which also mends the denormal ones."""
    word = widen(bits)
    magnitude = (word & spread(uint32(0x7FFF))) << spread(uint32(13))
    scaled = bits_of(magnitude) * spread(float32(2.0**112))
    special = spread(uint32(0x0F7FFFFF)) < magnitude
    scaled = bits_of(where(special, magnitude | spread(uint32(0x7F800000)), bits_of(scaled)))
    return bits_of(bits_of(scaled) | (word & spread(uint32(0x8000))) << spread(uint32(16)))


@kernel
def to_half(x: Any) -> Any:
    """float32 as float16, rounded to nearest, ties to even."""
    word = bits_of(x)
    sign = word & spread(uint32(0x80000000))
    word = word ^ sign
    # Small ones: the addition of a large number leaves the right bits, rounded, at its end.
    magic = spread(uint32(((127 - 15) + (23 - 10) + 1) << 23))
    small = bits_of(bits_of(word) + bits_of(magic)) - magic
    odd = (word >> spread(uint32(13))) & spread(uint32(1))
    normal = (word + spread(uint32(((15 - 127) << 23) % 2**32 + 0xFFF)) + odd) >> spread(uint32(13))
    half = where(word < spread(uint32(113 << 23)), small, normal)
    infinite = where(spread(uint32(0x7F800000)) < word, spread(uint32(0x7E00)), spread(uint32(0x7C00)))
    half = where(spread(uint32(0x477FEFFF)) < word, infinite, half)
    return narrow(half | (sign >> spread(uint32(16))))


@kernel
def to_bfloat(x: Any) -> Any:
    """float32 as bfloat16, rounded to nearest, ties to even."""
    word = bits_of(x)
    odd = (word >> spread(uint32(16))) & spread(uint32(1))
    rounded = (word + spread(uint32(0x7FFF)) + odd) >> spread(uint32(16))
    is_nan = spread(uint32(0x7F800000)) < (word & spread(uint32(0x7FFFFFFF)))
    return narrow(where(is_nan, (word >> spread(uint32(16))) | spread(uint32(0x40)), rounded))


def read_some(like: Any, address: int, kind: int, i: int, n: int) -> Any:
    """The first n elements from i on of an array of some kind, as a vector of the kind that `like` points to."""


@by_kind(read_some)
def _read_some(like: Any, address: Any, kind: Any, i: Any, n: Any) -> Any:
    if like.dtype == types.float64:
        return lambda like, address, kind, i, n: load_some(pointer(address, float64), i, n)
    if like.dtype == types.uint32:
        return lambda like, address, kind, i, n: load_some(pointer(address, uint32), i, n)

    def narrow_kinds(like: Any, address: int, kind: int, i: int, n: int) -> Any:
        # Whole vectors without a mask, which costs more than the question.
        if kind == F32:
            numbers = pointer(address, float32)
            return load(numbers, i) if n == lanes(numbers) else load_some(numbers, i, n)
        halves = pointer(address, uint16)
        bits = load(halves, i) if n == lanes(halves) else load_some(halves, i, n)
        if kind == BF16:
            return bits_of(widen(bits) << spread(uint32(16)))
        return from_half(bits)

    return narrow_kinds


def write_some(address: int, kind: int, i: int, x: Any, n: int) -> Any:
    """The first n lanes as elements of some kind."""


@by_kind(write_some)
def _write_some(address: Any, kind: Any, i: Any, x: Any, n: Any) -> Any:
    if x.element == types.float64:
        return lambda address, kind, i, x, n: store_some(pointer(address, float64), i, x, n)

    def narrow_kinds(address: int, kind: int, i: int, x: Any, n: int) -> None:
        if kind == F32:
            if n == lanes(pointer(address, float32)):
                store(pointer(address, float32), i, x)
            else:
                store_some(pointer(address, float32), i, x, n)
        elif kind == BF16:
            store_some(pointer(address, uint16), i, to_bfloat(x), n)
        else:
            store_some(pointer(address, uint16), i, to_half(x), n)

    return narrow_kinds


# One element at a time, where no vector fits.


@kernel
def half_number(bits: int) -> float:
    """A float16 as a number."""
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    sign = -1.0 if bits >> 15 else 1.0
    if exponent == 31:
        return sign * np.inf if fraction == 0 else np.nan
    return sign * (fraction * 2.0**-24 if exponent == 0 else (1024 + fraction) * 2.0 ** (exponent - 25.0))


@kernel
def bfloat_number(bits: int) -> float:
    """A bfloat16 as a number."""
    exponent, fraction = (bits >> 7) & 255, bits & 127
    sign = -1.0 if bits >> 15 else 1.0
    if exponent == 255:
        return sign * np.inf if fraction == 0 else np.nan
    return sign * (fraction * 2.0**-133 if exponent == 0 else (128 + fraction) * 2.0 ** (exponent - 134.0))


@kernel
def number_at(address: int, kind: int) -> Any:
    """One element, with all its digits."""
    if kind == F32:
        return float64(pointer(address, float32)[0])
    if kind == F64:
        return pointer(address, float64)[0]
    bits = int64(pointer(address, uint16)[0])
    return bfloat_number(bits) if kind == BF16 else half_number(bits)


def as_kind(out: Any, value: float) -> Any:
    """A number as the kind that out holds."""


@by_kind(as_kind)
def _as_kind(out: Any, value: Any) -> Any:
    kind = out.dtype
    return lambda out, value: kind(value)


# Packing.


@kernel
def find_rows(
    rows: Any, base: int, begin: int, n: int, width: int, queries: int, head_stride: int, row_stride: int, item: int
) -> None:
    """Where the rows of a panel begin; lanes past the last row repeat it."""
    head, query = begin // queries, begin % queries
    for i in range(width):
        rows[i] = base + (head * head_stride + query * row_stride) * item
        if i < n - 1:
            # Counted on: a division for each row would take as long as all else here.
            query += 1
            if query == queries:
                head, query = head + 1, 0


@kernel
def pack_turned(out: Any, width: int, corner: Any, rows: Any, n: int, depth: int, kind: int, inner: int) -> None:
    """out[i][row] for i up to a multiple of the lanes above depth: rows side by side, 0 where there are none."""
    step = lanes(out)
    size = item_size(kind)
    cells = depth // per_cell(out)
    for left in range(0, width, step):
        for top in range(0, cells, step):
            some = min(step, cells - top)
            for r in range(step):
                if left + r >= n:
                    store(corner, r * step, spread_as(out, 0))
                elif inner == 1:
                    store(corner, r * step, read_some(out, rows[left + r], kind, top, some))
                else:
                    store(corner, r * step, spread_as(out, 0))
                    for i in range(some):
                        corner[r * step + i] = as_kind(out, number_at(rows[left + r] + (top + i) * inner * size, kind))
            turned = transpose(load_square(corner))
            store_apart(out, top * width + left, width, turned)


@kernel
def pack_rows(
    out: Any, out_stride: int, address: int, stride: int, inner: int, kind: int, n: int, depth: int, padded: int
) -> None:
    """Rows as the kernel's own kind of number, 0 between depth and padded."""
    step = lanes(out)
    size = item_size(kind)
    for r in range(n):
        own = address + r * stride * size
        for i in range(0, padded, step):
            some = max(min(step, depth - i), 0)
            if inner == 1:
                x = read_some(out, own, kind, i, some)
                store_some(out, r * out_stride + i, x, min(step, padded - i))
            else:
                for j in range(min(step, padded - i)):
                    out[r * out_stride + i + j] = as_kind(out, 0.0)
                    if j < some:
                        out[r * out_stride + i + j] = as_kind(out, number_at(own + (i + j) * inner * size, kind))


@kernel
def pack_pairs(out: Any, out_stride: int, address: int, stride: int, n: int, depth: int) -> None:
    """out[j][i] = (v[2j][i], v[2j + 1][i]) as a pair of bfloat16; a last row without a partner gets 0."""
    step = lanes(out)
    for j in range(0, n, 2):
        one = address + j * stride * 2
        for i in range(0, out_stride, step):
            some = max(min(step, depth - i), 0)
            low = widen(load_some(pointer(one, uint16), i, some))
            high = widen(load_some(pointer(one + stride * 2, uint16), i, some if j + 1 < n else 0))
            store_some(out, j // 2 * out_stride + i, low | (high << spread(uint32(16))), min(step, out_stride - i))


@kernel
def write_turned(
    turned: Any, width: int, left: int, n: int, depth: int, factor: Any, corner: Any, rows: Any, kind: int
) -> None:
    """The rows of turned[i][row] from `left` on, each times its factor, to where they belong, rounded to their kind."""
    step = lanes(turned)
    for i in range(0, depth, step):
        store_square(corner, transpose(times_all(load_apart(turned, i * width + left, width), factor)))
        for r in range(n):
            write_some(rows[left + r], kind, i, load(corner, r * step), min(step, depth - i))


LOWEST = {32: -200.0, 64: -2000.0}
"""Exponents of 2 from which a weight is 0."""


def lowest(p: Any) -> Any:
    """The exponent of 2 from which a weight is 0, in every lane."""


@by_kind(lowest)
def _lowest(p: Any) -> Any:
    value = LOWEST[p.dtype.bitwidth]
    return lambda p: spread_as(p, value)
