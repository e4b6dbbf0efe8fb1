"""NumPy arrays to kernels and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..._arrays import Array
from ..._dropout import as_signed
from ..._problem import Problem
from ._sheet import COUNTS, FIELDS, KINDS, Operand, Request, Sheet


def run_arrays(problem: Problem, stats: frozenset[str]) -> tuple[Array | None, dict[str, Array]]:
    """The output and the fields of the Reading that `stats` names."""
    batch, rows = problem.batch, (*problem.batch, problem.heads, problem.queries)
    q, k, v = (None if x is None else _fold(x, batch) for x in (problem.q, problem.k, problem.v))
    mask = None if problem.mask is None else _fold_shared(problem.mask, batch)
    bounds = problem.bounds
    first, stop = (None, None) if bounds is None else (_fold_rows(bounds.first, batch), _fold_rows(bounds.stop, batch))
    request = Request(
        q=operand(q),
        k=operand(k),
        v=None if v is None else operand(v),
        mask=None if mask is None else operand(mask),
        first=None if first is None else operand(first),
        stop=None if stop is None else operand(stop),
        scale=np.asarray(problem.scale, dtype=np.float64).reshape(1, -1),
        sinks=None if problem.sinks is None else np.asarray(problem.sinks, dtype=np.float64).reshape(1, -1),
        seed=as_signed(problem.seed),
        softcap=problem.softcap or 0.0,
        dropout_p=problem.dropout_p,
        period=math.prod(batch),
    )
    wide = np.float64 if q.dtype.itemsize == 8 else np.float32
    names = [name for name in FIELDS if name in stats and (name != "output_norm" or v is not None)]
    fields = {name: np.empty(rows, dtype=np.int64 if name in COUNTS else wide) for name in names}
    output = None if v is None else np.empty((*rows, v.shape[-1]), dtype=v.dtype)
    Sheet(request).attend(
        None if output is None else operand(_fold(output, batch)),
        0,
        {name: _address(x) for name, x in fields.items()},
    )
    return output, fields


def operand(x: Array) -> Operand:
    """Where an array is; the caller keeps it alive."""
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return Operand(_address(x), x.shape, strides, KINDS.get(x.dtype.name, 0))


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _plain(x: Array) -> Array:
    """An array whose strides are whole elements and whose bytes are in this machine's order; others are copied."""
    if x.dtype.isnative and not any(stride % x.itemsize for stride in x.strides):
        return x
    return np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("="))


def _fold(x: Array, batch: tuple[int, ...]) -> Array:
    """One batch axis instead of none or several."""
    return _plain(x if len(batch) == 1 else x.reshape(math.prod(batch), *x.shape[len(batch) :]))


def _fold_shared(x: Array, batch: tuple[int, ...]) -> Array:
    """What all entries share stays shared; what is shared along some of several batch axes is spread out."""
    rest = x.shape[len(batch) :]
    if all(n == 1 for n in x.shape[: len(batch)]):
        return _plain(x.reshape(1, *rest))
    return _fold(np.broadcast_to(x, (*batch, *rest)), batch)


def _fold_rows(x: Array, batch: tuple[int, ...]) -> Array:
    rows = np.ascontiguousarray(x, dtype=np.int64)
    return rows[None] if rows.ndim == 1 else np.ascontiguousarray(_fold_shared(rows, batch))
