"""NumPy arrays to kernels and back."""

from __future__ import annotations

import math

import numpy as np

from ..._arrays import Array
from ..._dropout import as_signed
from ..._problem import Problem
from ._sheet import KINDS, NEED_NO_SUMS, Layout, Operand, Request, address_in_memory, attend
from ._slots import FIELDS


def run_arrays(problem: Problem, stats: frozenset[str]) -> tuple[Array | None, dict[str, Array]]:
    """The output and the fields of the Reading that `stats` names."""
    batch, rows = problem.batch, (*problem.batch, problem.heads, problem.queries)
    q, k, v = (None if x is None else _fold(x, batch) for x in (problem.q, problem.k, problem.v))
    mask = None if problem.mask is None else _fold_shared(problem.mask, batch)
    bounds = problem.bounds
    first, stop = (None, None) if bounds is None else (_fold_rows(bounds.first, batch), _fold_rows(bounds.stop, batch))
    scale = problem.scale
    request = Request(
        q=operand(q),
        k=operand(k),
        v=None if v is None else operand(v),
        mask=None if mask is None else operand(mask),
        first=None if first is None else operand(first),
        stop=None if stop is None else operand(stop),
        scale=scale if isinstance(scale, float) else np.asarray(scale, dtype=np.float64).reshape(1, -1),
        sinks=None if problem.sinks is None else np.asarray(problem.sinks, dtype=np.float64).reshape(1, -1),
        seed=as_signed(problem.seed),
        softcap=problem.softcap or 0.0,
        dropout_p=problem.dropout_p,
        period=math.prod(batch),
    )
    names = [name for name in FIELDS if name in stats and (name != "output_norm" or v is not None)]
    numbers = np.empty((12, *rows), dtype=np.float64 if problem.q.dtype.itemsize == 8 else np.float32)
    counts = np.empty((2, *rows), dtype=np.int64)
    found = dict(zip(FIELDS, (*numbers, *counts), strict=True))
    output = None if v is None else np.empty((*rows, v.shape[-1]), dtype=v.dtype)
    places = [address_in_memory(found[name]) if name in names else 0 for name in FIELDS]
    out = None if output is None else operand(_fold(output, batch))
    attend(request, out, 0, places, measure=not NEED_NO_SUMS.issuperset(names))
    return output, {name: found[name] for name in names}


def laid_out(
    problem: Problem,
) -> tuple[Operand, Operand, Operand | None, Layout | None, tuple[Operand, Operand] | None] | None:
    """The operands of a problem as a kernel sees them and the layout of its output; None if any had to be copied."""
    batch = problem.batch
    given = [x for x in (problem.q, problem.k, problem.v) if x is not None]
    folded = [_fold(x, batch) for x in given]
    if any(address_in_memory(x) != address_in_memory(own) for x, own in zip(folded, given, strict=True)):
        return None
    rows = None
    if problem.bounds is not None:
        own = [_fold_rows(x, batch) for x in problem.bounds]
        if any(address_in_memory(x) != address_in_memory(y) for x, y in zip(own, problem.bounds, strict=True)):
            return None
        rows = (operand(own[0]), operand(own[1]))
    q, k, *values = map(operand, folded)
    if not values:
        return q, k, None, None, rows
    out = np.empty((*folded[0].shape[:3], folded[2].shape[3]), dtype=folded[0].dtype)
    return q, k, values[0], operand(out).layout, rows


def operand(x: Array) -> Operand:
    """An array as a kernel sees it."""
    item = x.itemsize
    strides = tuple([stride // item for stride in x.strides])
    return Operand(address_in_memory(x), Layout(x.shape, strides, KINDS.get(x.dtype.name, 0)))


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
