"""Every mask that follows from positions, as one interval of keys per query.

Causality, a window, key lengths and packed sequences each let a query see an interval of the keys, and
intervals intersect in intervals. So a backend never learns which of them was asked for: it gets two integers
per query row, `first ≤ key < stop`, skips the tiles outside and compares inside. An arbitrary `attn_mask`
comes on top.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ._arrays import Array, dtype_name, framework_of, to_numpy
from ._errors import OptionError, ShapeError, brief, explain

FARTHEST = 2**61
"""The largest position, so that no sum of a position, a window's side and a length leaves int64."""


class Bounds(NamedTuple):
    """The keys that each query may see: `first ≤ key < stop`, shape (queries,) or (*batch, queries)."""

    first: Array
    stop: Array


class Band(NamedTuple):
    """The same in two numbers, where they say it all: query i sees `i + low ≤ key < i + high`.

    As far as there are such keys; both lie between −queries and keys, which are open ends.
    """

    low: int
    high: int


class Segments(NamedTuple):
    """For each query of a packed batch: where its sequence starts and how long it is."""

    query_start: Array | int
    query_length: Array | int
    key_start: Array | int
    key_length: Array | int


def key_bounds(
    xp: Any,
    batch: tuple[int, ...],
    queries: int,
    keys: int,
    *,
    is_causal: bool,
    query_offset: object,
    window: object,
    key_lengths: object,
    cu_seqlens: object,
    device: Any = "cpu",
) -> Bounds | None:
    """Intersect all masks that follow from positions; None when every query sees every key.

    Works in numpy or torch, as `xp` says; the bounds are on `device`, where kernels read them.
    """
    left, right = _sides(window, is_causal=is_causal)
    lengths = _key_lengths(xp, key_lengths, batch, keys)
    packed = _segments(xp, cu_seqlens, queries, keys)
    if lengths is not None and packed is not None:
        fix = "Give each packed sequence its length in cu_seqlens=(query_starts, key_starts)."
        raise OptionError(explain("key_lengths and cu_seqlens were both given.", fix))
    offset = _offset(xp, query_offset, batch)
    if left is None and right is None and lengths is None and packed is None:
        return None

    if packed is None:
        # (*batch, 1), against rows of shape (queries,)
        packed = Segments(0, queries, 0, keys if lengths is None else lengths[..., None])
    start, query_length, key_start, key_length = packed
    if offset is None:
        offset = key_length - query_length
    elif not isinstance(offset, int):
        offset = offset[..., None]
    # Asked of the framework: a length that is being traced is no int.
    here: Any = next((x for x in (key_length, offset, start) if framework_of(x)), None)
    # Said also where nothing says it: the default may be another device.
    place: dict[str, Any] = {} if xp is np else {"device": device if here is None else here.device}
    rows = xp.arange(queries, **place)
    position = rows - start + offset
    first = position * 0 if left is None else xp.clip(position - left, 0, None)
    stop = position * 0 + key_length if right is None else xp.clip(position + right + 1, None, key_length)
    # A query before the first or past the last key sees nothing: an empty interval inside [0, keys].
    first = xp.clip(first, None, key_length) + key_start
    bounds = Bounds(first, xp.maximum(stop + key_start, first))
    if xp is not np:
        return Bounds(*(bound.to(device) for bound in bounds))
    # Several calls may share them.
    for bound in bounds:
        bound.setflags(write=False)
    return bounds


def key_band(
    queries: int,
    keys: int,
    *,
    is_causal: bool,
    query_offset: object,
    window: object,
    key_lengths: object,
    cu_seqlens: object,
) -> Band | None:
    """What `key_bounds` would say; None when every query sees every key, and where it takes an array to say it."""
    left, right = _sides(window, is_causal=is_causal)
    if key_lengths is not None or cu_seqlens is not None or (left is None and right is None):
        return None
    if isinstance(query_offset, str) and query_offset == "bottom-right":
        offset = keys - queries
    elif isinstance(query_offset, int) and not isinstance(query_offset, bool) and -FARTHEST <= query_offset <= FARTHEST:
        offset = query_offset
    else:
        return None
    low = -queries if left is None else offset - left
    high = keys if right is None else offset + right + 1
    return Band(min(max(low, -queries), keys), min(max(high, -queries), keys))


def bounds_of_band(xp: Any, band: Band, queries: int, keys: int, device: Any) -> Bounds:
    """Where kernels or loops want them row by row."""
    rows = xp.arange(queries, device=device)
    first = xp.clip(rows + band.low, 0, keys)
    return Bounds(first, xp.maximum(xp.clip(rows + band.high, None, keys), first))


def _sides(window: object, *, is_causal: bool) -> tuple[int | None, int | None]:
    """Keys that a query sees before and behind its position; None for all of them."""
    left, right = _window(window)
    return left, 0 if is_causal else right


def _window(window: object) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        fix = "Pass window=(left, right), either of them None for an open side."
        raise OptionError(explain(f"window is {brief(window)}, not a pair.", fix))
    sides: list[int | None] = []
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            sides.append(None)
            continue
        if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
            fix = "Pass whole numbers of keys, or None for an open side."
            raise OptionError(explain(f"window has {name} side {brief(side)}.", fix))
        if side < 0:
            fix = "Sides count keys and cannot be negative; None leaves a side open."
            raise OptionError(explain(f"window has {name} side {brief(int(side))}.", fix))
        # Farther than any key from any query: open.
        sides.append(int(side) if side <= 2 * FARTHEST else None)
    return sides[0], sides[1]


def _whole_numbers(xp: Any, name: str, value: object) -> Array:
    """An int64 array of the framework of the operands; values are looked at only where that costs nothing."""
    if xp is not np and isinstance(value, (list, tuple, int)) and xp.compiler.is_compiling():
        # A compiler does not follow what NumPy says of an array; what is no list of whole numbers is refused below.
        value = xp.tensor(value)
    if xp is not np and framework_of(value) == "torch":
        if value.dtype.is_floating_point or value.dtype.is_complex or str(value.dtype) == "torch.bool":  # type: ignore[attr-defined]
            raise OptionError(explain(f"{name} has dtype {dtype_name(value)}.", "Pass whole numbers."))
        return value.to(xp.int64)  # type: ignore[attr-defined]
    array = None
    # Lists of different lengths and tensors that are not in memory make no array; a masked one would lose its mask.
    with suppress(TypeError, ValueError, RuntimeError):
        array = None if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    if array is None or array.dtype.kind not in "iu":
        what = f"is {brief(value)}"
        if array is not None and hasattr(value, "dtype"):
            what = f"has dtype {array.dtype.name}"
        raise OptionError(explain(f"{name} {what}.", "Pass whole numbers."))
    for extreme in (array.min(initial=0), array.max(initial=0)):
        if abs(int(extreme)) > FARTHEST:
            raise OptionError(explain(f"{name} contains {extreme}.", "Pass numbers between −2⁶¹ and 2⁶¹."))
    array = np.asarray(array, dtype=np.int64)
    return array if xp is np else xp.from_numpy(array.copy())


def _per_batch(xp: Any, name: str, value: object, batch: tuple[int, ...]) -> Array:
    array = _whole_numbers(xp, name, value)
    shape = tuple(array.shape)
    if len(shape) > len(batch) or any(n != 1 and n != size for n, size in zip(shape[::-1], batch[::-1], strict=False)):
        wanted = f"shape {tuple(batch)}, or a single number" if batch else "there are no batch axes, so a single number"
        fix = f"It holds one number per batch entry: {wanted}."
        raise ShapeError(explain(f"{name} has shape {shape}.", fix))
    return xp.broadcast_to(array, tuple(batch))


def _can_look(array: Array) -> bool:
    """Values are checked where they are at hand: not on another device, nor in a graph that is being traced."""
    if isinstance(array, np.ndarray):
        return True
    import torch

    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
    return bool(array.device.type == "cpu" and not transformed and not torch.compiler.is_compiling())


def _key_lengths(xp: Any, value: object, batch: tuple[int, ...], keys: int) -> Array | None:
    if value is None:
        return None
    lengths = _per_batch(xp, "key_lengths", value, batch)
    if not _can_look(lengths):
        return xp.clip(lengths, 0, keys)
    if math.prod(lengths.shape) and (lengths.min() < 0 or lengths.max() > keys):
        worst = int(lengths.min() if lengths.min() < 0 else lengths.max())
        fix = f"A length lies between 0 and the number of keys, {keys}."
        raise OptionError(explain(f"key_lengths contains {worst}.", fix))
    return lengths


def _offset(xp: Any, value: object, batch: tuple[int, ...]) -> Array | int | None:
    """Positions of the first query; None stands for bottom-right."""
    if isinstance(value, str):
        if value != "bottom-right":
            fix = "Pass a number, one per batch entry, or 'bottom-right'."
            raise OptionError(explain(f"query_offset {brief(value)} is not known.", fix))
        return None
    if isinstance(value, (bool, float)) or value is None:
        fix = "Pass a whole number, one per batch entry, or 'bottom-right'."
        raise OptionError(explain(f"query_offset is {brief(value)}.", fix))
    if isinstance(value, int) and -FARTHEST <= value <= FARTHEST:
        return value
    return _per_batch(xp, "query_offset", value, batch)


def _segments(xp: Any, value: object, queries: int, keys: int) -> Segments | None:
    if value is None:
        return None
    query_side = key_side = value
    names = ("cu_seqlens", "cu_seqlens")
    # A pair of arrays, rather than one array of two numbers.
    if isinstance(value, (tuple, list)) and len(value) == 2 and _holds_several(value[0]):
        query_side, key_side = value
        names = ("cu_seqlens[0]", "cu_seqlens[1]")
    query_starts = _starts(xp, names[0], query_side, queries, "queries")
    if key_side is query_side and queries != keys:
        fix = "Pass a pair: cu_seqlens=(query_starts, key_starts)."
        raise ShapeError(explain(f"cu_seqlens is one array for {queries} queries and {keys} keys.", fix))
    key_starts = _starts(xp, names[1], key_side, keys, "keys")
    if len(query_starts) != len(key_starts):
        fix = "Both sides describe the same sequences: pass as many starts for the keys as for the queries."
        counts = f"{len(query_starts) - 1} sequences of queries, but {len(key_starts) - 1} of keys"
        raise ShapeError(explain(f"cu_seqlens has {counts}.", fix))
    if xp is np:
        per_query = np.searchsorted(query_starts[1:], np.arange(queries), side="right")
    else:
        rows = xp.arange(queries, device=query_starts.device)
        per_query = xp.searchsorted(query_starts[1:].contiguous(), rows, right=True)
    ends = per_query + 1
    return Segments(
        query_starts[per_query],
        query_starts[ends] - query_starts[per_query],
        key_starts[per_query],
        key_starts[ends] - key_starts[per_query],
    )


def _holds_several(value: object) -> bool:
    return isinstance(value, (tuple, list)) or len(getattr(value, "shape", ())) > 0


def _starts(xp: Any, name: str, value: object, total: int, axis: str) -> Array:
    starts = _whole_numbers(xp, name, value)
    if starts.ndim != 1 or len(starts) < 1:
        fix = "Pass the starts of the packed sequences and the end: [0, 3, 8] packs 3 and 5."
        raise ShapeError(explain(f"{name} has shape {tuple(starts.shape)}.", fix))
    if _can_look(starts) and (starts[0] != 0 or starts[-1] != total or (starts[1:] < starts[:-1]).any()):
        shown = np.array2string(to_numpy(starts), separator=", ", threshold=8)
        fix = f"Starts rise from 0 to the number of {axis}, {total}."
        raise OptionError(explain(f"{name} is {shown}.", fix))
    return starts
