"""Which weights dropout keeps: a function of seed, row and key alone.

A counter-based generator needs no state, so a tile can ask for its own part of the mask in any order, the
backward pass asks again instead of remembering, and every backend drops the same weights for the same seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def kept(rows: NDArray[np.int64], keys: NDArray[np.int64], dropout_p: float, seed: int) -> NDArray[np.bool_]:
    """True where a weight survives; `rows` and `keys` broadcast against each other.

    Rows are numbered through (*batch, heads, queries) of the whole problem, keys from 0. A row's 64-bit key is a
    step of SplitMix64; its two halves then salt a 32-bit finaliser (MurmurHash3) over the key index.
    """
    # The seed is mixed before rows are added to it, or seeds a step apart would shift each other's rows.
    start = _splitmix(np.asarray([seed % 2**64], dtype=np.uint64))[0]
    row_key = _splitmix(start + _GOLDEN * (rows.astype(np.uint64) + np.uint64(1)))
    low, high = row_key.astype(np.uint32), (row_key >> np.uint64(32)).astype(np.uint32)
    draw = _finalise(keys.astype(np.uint32) * np.uint32(0x9E3779B1) ^ low)
    draw = _finalise(draw + high)
    return np.asarray(draw >= np.uint32(min(round(dropout_p * 2**32), 2**32 - 1)))


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _finalise(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
