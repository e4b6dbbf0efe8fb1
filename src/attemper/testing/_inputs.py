"""Operands for tests: ordinary ones, and those on which attention goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arrays import FLOATING
from .._errors import DtypeError, explain, unknown

Float64 = NDArray[np.float64]
Operands = tuple[Float64, Float64, Float64]


def _hot(q: Float64, k: Float64, v: Float64) -> Operands:
    """Logits of standard deviation 30 under 1/√head_dim: almost one-hot weights."""
    return 30 * q, k, v


def _almost_equal(q: Float64, k: Float64, v: Float64) -> Operands:
    """Scores that differ in their last digits: entropy within a hair of ln n."""
    return 1e-3 * q, k, v


def _one_huge(q: Float64, k: Float64, v: Float64) -> Operands:
    """One key whose scores stand hundreds above the rest, or below it."""
    k = k.copy()
    if k.shape[-2]:
        k[..., k.shape[-2] // 2, :] *= 300
    return q, k, v


def _denormal(q: Float64, k: Float64, v: Float64) -> Operands:
    """Components at the bottom of float16's (and, in products, of float32's) range."""
    return 6e-8 * q, 6e-8 * k, v


def _far_mean(q: Float64, k: Float64, v: Float64) -> Operands:
    """Scores whose mean is about a thousand times their spread: sums of squares would cancel."""
    q, k = 0.1 * q, 0.1 * k
    if q.shape[-1]:
        # One shared component, spread over all so that 16-bit types can hold it.
        q, k = q + 12, k + 12
    return q, k, v


def _negative_zero(q: Float64, k: Float64, v: Float64) -> Operands:
    """Every third component −0, values too."""

    def zeroed(x: Float64) -> Float64:
        x = x.copy()
        x[..., ::3] = -0.0
        return x

    return zeroed(q), zeroed(k), zeroed(v)


def _duplicated_keys(q: Float64, k: Float64, v: Float64) -> Operands:
    """Keys in equal pairs: the maximum is never alone."""
    k = k.copy()
    half = k.shape[-2] // 2
    k[..., half : 2 * half, :] = k[..., :half, :]
    return q, k, v


KINDS: dict[str, Callable[[Float64, Float64, Float64], Operands]] = {
    "normal": lambda q, k, v: (q, k, v),
    "hot": _hot,
    "almost_equal": _almost_equal,
    "one_huge": _one_huge,
    "denormal": _denormal,
    "far_mean": _far_mean,
    "negative_zero": _negative_zero,
    "duplicated_keys": _duplicated_keys,
}
"""Each way of making operands, from independent standard normal ones."""


def make_inputs(
    kind: str = "normal",
    *,
    batch: tuple[int, ...] = (2,),
    heads: int = 3,
    kv_heads: int | None = None,
    queries: int = 17,
    keys: int = 29,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    """(q, k, v) as NumPy arrays of a dtype, the same for the same arguments.

    >>> q, k, v = make_inputs("hot", heads=4, kv_heads=2, keys=8)
    >>> q.shape, k.shape, v.dtype.name
    ((2, 4, 17, 16), (2, 2, 8, 16), 'float32')
    """
    if kind not in KINDS:
        raise unknown("kind of inputs", kind, KINDS)
    rng = np.random.default_rng(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    q = rng.standard_normal((*batch, heads, queries, head_dim))
    k = rng.standard_normal((*batch, kv_heads, keys, head_dim))
    v = rng.standard_normal((*batch, kv_heads, keys, value_dim))
    q, k, v = KINDS[kind](q, k, v)
    target = dtype_for(dtype)
    return q.astype(target), k.astype(target), v.astype(target)


def dtype_for(name: str) -> Any:
    """The NumPy dtype of a name; bfloat16 comes from ml_dtypes."""
    if name not in FLOATING:
        raise unknown("dtype", name, FLOATING)
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            headline = "bfloat16 is not a type of NumPy's own."
            raise DtypeError(explain(headline, "Install ml_dtypes: pip install 'attemper[bfloat16]'.")) from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
