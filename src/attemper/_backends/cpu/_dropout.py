"""Which weights are dropped: the function of `attemper._dropout`, for a vector of rows."""

from __future__ import annotations

from typing import Any

from numba import types, uint32, uint64

from ._compile import by_kind, kernel
from ._simd import address_of, lanes, load, pointer, spread, store, where
from ._slots import DRAW_HIGH, DRAW_LOW


@kernel
def splitmix(x: Any) -> Any:
    """A step of SplitMix64."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@kernel
def row_key(seed: int, row: int) -> Any:
    """The 64 bits from which a row draws."""
    return splitmix(splitmix(uint64(seed)) + uint64(0x9E3779B97F4A7C15) * (uint64(row) + uint64(1)))


@kernel
def finalise(x: Any) -> Any:
    """MurmurHash3's last step."""
    x = (x ^ (x >> spread(uint32(16)))) * spread(uint32(0x85EBCA6B))
    x = (x ^ (x >> spread(uint32(13)))) * spread(uint32(0xC2B2AE35))
    return x ^ (x >> spread(uint32(16)))


@kernel
def survives(low: Any, high: Any, key: int, threshold: int) -> Any:
    """Whether dropout keeps the weight of a key, for a vector of rows."""
    draw = finalise((spread(uint32(uint32(key) * uint32(0x9E3779B1)))) ^ low)
    return spread(uint32(threshold)) <= finalise(draw + high)


def drop(weights: Any, width: int, first: int, stop: int, index: Any, threshold: int) -> None:
    """Put 0 for the weights that dropout drops."""


@by_kind(drop)
def _drop(weights: Any, width: Any, first: Any, stop: Any, index: Any, threshold: Any) -> Any:
    if weights.dtype == types.float64:

        def one_by_one(weights: Any, width: int, first: int, stop: int, index: Any, threshold: int) -> None:
            for key in range(first, stop):
                for i in range(width):
                    low, high = uint32(index[DRAW_LOW * width + i]), uint32(index[DRAW_HIGH * width + i])
                    draw = finalise_one(uint32(uint32(key) * uint32(0x9E3779B1)) ^ low)
                    if finalise_one(uint32(draw + high)) < uint32(threshold):
                        weights[(key - first) * width + i] = 0.0

        return one_by_one

    pairs = weights.dtype == types.uint32

    def by_vectors(weights: Any, width: int, first: int, stop: int, index: Any, threshold: int) -> None:
        words = pointer(address_of(weights), uint32)
        draws = pointer(address_of(index), uint32)
        none, low_half = spread(uint32(0)), spread(uint32(0xFFFF))
        for left in range(0, width, lanes(words)):
            low, high = load(draws, DRAW_LOW * width + left), load(draws, DRAW_HIGH * width + left)
            for key in range(first, stop, 2 if pairs else 1):
                place = (key - first) // (2 if pairs else 1) * width + left
                own = load(words, place)
                if pairs:
                    one = where(survives(low, high, key, threshold), own & low_half, none)
                    two = where(survives(low, high, key + 1, threshold), own, none)
                    store(words, place, one | (two ^ (two & low_half)))
                else:
                    store(words, place, where(survives(low, high, key, threshold), own, none))

    return by_vectors


@kernel
def finalise_one(x: Any) -> Any:
    """The same for one row."""
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x85EBCA6B))
    x = uint32(uint32(x ^ (x >> uint32(13))) * uint32(0xC2B2AE35))
    return uint32(x ^ (x >> uint32(16)))
