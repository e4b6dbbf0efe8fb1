"""Which weights dropout keeps: a function of seed, row and key alone.

A counter-based generator needs no state, so a tile can ask for its own part of the mask in any order, the
backward pass asks again instead of remembering, and every backend drops the same weights for the same seed.
"""

from __future__ import annotations

from typing import Any

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


def kept_signed(rows: Any, keys: Any, dropout_p: float, seed: Any) -> Any:
    """The same function for torch tensors, whose integers are signed 64-bit ones that wrap; `seed` is one of them."""
    row_key = _splitmix_signed(_splitmix_signed(seed) + as_signed(0x9E3779B97F4A7C15) * (rows + 1))
    low, high = row_key & _LOW, _shifted(row_key, 32)
    draw = _finalise_signed((keys * 0x9E3779B1 & _LOW) ^ low)
    draw = _finalise_signed((draw + high) & _LOW)
    return draw >= min(round(dropout_p * 2**32), 2**32 - 1)


_LOW = 0xFFFFFFFF


def _splitmix_signed(x: Any) -> Any:
    x = (x ^ _shifted(x, 30)) * as_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * as_signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _finalise_signed(x: Any) -> Any:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _LOW
    return x ^ (x >> 16)


def _shifted(x: Any, by: int) -> Any:
    """A right shift of 64 bits that brings in zeros."""
    return (x >> by) & (2 ** (64 - by) - 1)


def as_signed(x: int) -> int:
    """The low 64 bits of a number as a signed one."""
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x
