"""Tiled attention in plain NumPy: memory grows with queries + keys, never with their product."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._arrays import Array, dtype_name
from .._dropout import kept
from .._problem import Problem
from .._state import PARTS_FOR, State, finish, identity, merge, observe

# Long enough to hide Python's overhead; sums over longer tiles would lose digits, since einsum adds in long chains.
QUERY_TILE, KEY_TILE = 512, 512
# Tiles of several heads are computed together while their scores (2 MiB of float32) stay near a core's cache.
TILE_SCORES = 2 * QUERY_TILE * KEY_TILE

Index = tuple[slice, ...]


class _Operands(NamedTuple):
    """Arrays of one slab, grouped: (*slab, kv_heads, group, length, …); k and v have group 1."""

    q: Array
    k: Array
    v: Array | None
    mask: Array | None
    first: Array | None  # (*slab, 1, 1, queries)
    stop: Array | None
    scale: Array  # (kv_heads, group, 1, 1)
    sinks: Array | None  # (kv_heads, group, 1)
    rows: Array  # the number of each row in the whole problem, for dropout


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    return None if problem.framework == "numpy" else "it computes on NumPy arrays"


def run(problem: Problem, stats: frozenset[str]) -> tuple[Array | None, dict[str, Array]]:
    """The output and the fields of the Reading that `stats` names."""
    wide = np.dtype(np.float64 if dtype_name(problem.q) == "float64" else np.float32)
    parts = frozenset(part for name in stats for part in PARTS_FOR.get(name, ()))
    if problem.v is not None:
        parts |= {"weighted"}
    rows = (*problem.batch, problem.heads, problem.queries)
    output = None
    if problem.v is not None:
        output = np.zeros((*rows, problem.v.shape[-1]), dtype=problem.v.dtype)
    fields: dict[str, Array] = {}
    # Overflow and NaN are results here, counted in the Reading, not surprises.
    with np.errstate(all="ignore"):
        for slab, operands in _slabs(problem):
            for start in range(0, problem.queries, QUERY_TILE):
                tile = slice(start, min(start + QUERY_TILE, problem.queries))
                state = _rows_state(problem, operands, tile, parts, wide)
                sinks = None if operands.sinks is None else operands.sinks.astype(wide)
                rows_out, rows_fields = finish(np, state, sinks)
                where = (*slab, tile)
                if output is not None:
                    _grouped(output, problem, axis=-3)[where] = rows_out
                for name in stats & rows_fields.keys():
                    if name not in fields:
                        fields[name] = np.zeros(rows, dtype=rows_fields[name].dtype)
                    _grouped(fields[name], problem, axis=-2)[where] = rows_fields[name]
    if not math.prod(rows):
        # No row was computed; the fields still exist, empty.
        empty = identity(np, rows, parts, value_dim=problem.value_dim or 0, dtype=wide)
        _, fields = finish(np, empty, None)
        fields = {name: field for name, field in fields.items() if name in stats}
    return output, fields


def _grouped(array: Array, problem: Problem, axis: int) -> Array:
    """A view with the heads axis split into (kv_heads, group)."""
    at = array.ndim + axis
    shape = (*array.shape[:at], problem.kv_heads, problem.group, *array.shape[at + 1 :])
    step = array.strides[at]
    strides = (*array.strides[:at], step * problem.group, step, *array.strides[at + 1 :])
    # reshape may copy a broadcast mask; strides never do.
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _slabs(problem: Problem) -> Iterator[tuple[Index, _Operands]]:
    """Cut the leading axes (*batch, kv_heads) so that one tile over a slab stays small."""
    leading = (*problem.batch, problem.kv_heads)
    tile = min(problem.queries, QUERY_TILE) * min(problem.keys, KEY_TILE) * problem.group
    cut = len(leading)
    while cut and math.prod(leading[cut - 1 :]) * tile <= TILE_SCORES:
        cut -= 1
    rank = len(problem.batch)
    shape = (*problem.batch, problem.heads, problem.queries)
    rows = np.arange(math.prod(shape)).reshape(shape)
    whole = _Operands(
        q=_grouped(problem.q, problem, -3),
        k=problem.k[..., None, :, :],
        v=None if problem.v is None else problem.v[..., None, :, :],
        mask=None
        if problem.mask is None
        else _grouped(np.broadcast_to(problem.mask, (*shape, problem.keys)), problem, -3),
        first=None if problem.bounds is None else _per_query(problem.bounds.first, problem),
        stop=None if problem.bounds is None else _per_query(problem.bounds.stop, problem),
        scale=_per_group(np.broadcast_to(problem.scale, problem.heads), problem),
        sinks=None if problem.sinks is None else _per_group(problem.sinks, problem)[..., 0],
        rows=_grouped(rows, problem, -2),
    )
    for index in np.ndindex(leading[:cut]):
        # Slices of length one keep the axes, so a slab looks like the whole.
        slab = tuple(slice(i, i + 1) for i in index) + (slice(None),) * (len(leading) - cut + 1)
        head = slab[rank] if cut > rank else slice(None)
        yield (
            slab,
            _Operands(
                q=whole.q[slab],
                k=whole.k[slab],
                v=None if whole.v is None else whole.v[slab],
                mask=None if whole.mask is None else whole.mask[slab],
                first=None if whole.first is None else whole.first[slab[:rank]],
                stop=None if whole.stop is None else whole.stop[slab[:rank]],
                scale=whole.scale[head],
                sinks=None if whole.sinks is None else whole.sinks[head],
                rows=whole.rows[slab],
            ),
        )


def _per_query(bound: Array, problem: Problem) -> Array:
    return np.broadcast_to(bound, (*problem.batch, problem.queries))[..., None, None, :]


def _per_group(value: Array, problem: Problem) -> Array:
    return value.reshape(problem.kv_heads, problem.group, 1, 1)


def _rows_state(
    problem: Problem,
    operands: _Operands,
    tile: slice,
    parts: frozenset[str],
    wide: Any,
) -> State:
    """The State of a tile of query rows over all their keys."""
    q = operands.q[..., tile, :].astype(wide) * operands.scale.astype(wide)
    state = identity(np, q.shape[:-1], parts, value_dim=problem.value_dim or 0, dtype=wide)
    low, high = 0, problem.keys
    if operands.first is not None and operands.stop is not None:
        first, stop = operands.first[..., tile, None], operands.stop[..., tile, None]
        seen = first < stop
        low = int(np.min(first, where=seen, initial=problem.keys))
        high = int(np.max(stop, where=seen, initial=0))
    for begin in range(low, high, KEY_TILE):
        keys = slice(begin, min(begin + KEY_TILE, high))
        index = np.arange(keys.start, keys.stop)
        k = operands.k[..., keys, :].astype(wide)
        qk = np.matmul(q, np.swapaxes(k, -1, -2))
        scores = qk
        if problem.softcap is not None:
            scores = problem.softcap * np.tanh(qk / problem.softcap)
        visible: NDArray[np.bool_] | None = None
        if operands.first is not None and (first.max() > keys.start or stop.min() < keys.stop):
            visible = np.broadcast_to((index >= first) & (index < stop), scores.shape)
        if operands.mask is not None:
            mask = operands.mask[..., tile, keys]
            if mask.dtype == np.bool_:
                shown = mask
            else:
                # Asked of the mask as it came: a finite number may become −inf in the narrower type and hides nothing.
                shown = mask != -np.inf
                scores = scores + mask.astype(wide)
            visible = shown if visible is None else visible & shown
        weigh = None
        if operands.v is not None:
            rows = operands.rows[..., tile, None]
            drop = kept(rows, index, problem.dropout_p, problem.seed) if problem.dropout_p else None
            weigh = partial(_weigh, visible, drop, operands.v[..., keys, :].astype(wide))
        raw = None if qk is scores else qk
        state = merge(np, state, observe(np, scores, raw, visible, index, parts, weigh))
    if problem.dropout_p and state.weighted is not None:
        state = State(**{**vars(state), "weighted": state.weighted / (1 - problem.dropout_p)})
    return state


def _weigh(visible: NDArray[np.bool_] | None, kept: NDArray[np.bool_] | None, values: Array, weights: Array) -> Array:
    """Σ_j weights_j v_j over the kept keys; a NaN or infinity reaches exactly the rows that see its key."""
    shares = weights if kept is None else np.where(kept, weights, 0)
    sound = np.isfinite(values)
    if sound.all():
        return np.matmul(shares, values)
    # In the product 0·NaN would leak into rows that do not see the key, so the bad entries are left out of it
    # and their effect is added where a visible weight meets them.
    result = np.matmul(shares, np.where(sound, values, 0))
    meets = np.ones_like(shares) if visible is None else visible.astype(shares.dtype)
    for bad, entries in (
        (np.nan, np.isnan(values)),
        (np.inf, values == np.inf),
        (-np.inf, values == -np.inf),
    ):
        hits = np.matmul(meets, entries.astype(shares.dtype)) > 0
        result = result + np.where(hits, bad, 0).astype(shares.dtype)
    return result
