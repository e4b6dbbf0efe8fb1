"""From operands to the words that a kernel reads, and to the memory that it works in."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _code, _threads
from . import _slots as slot
from ._target import KEY_TILE, PANELS, THIN_ROWS, target

KINDS = {"float32": slot.F32, "float64": slot.F64, "bfloat16": slot.BF16, "float16": slot.F16, "bool": slot.BOOL}

SMALL = 2**20
"""Products of two numbers up to which one thread is faster than two: others take some microseconds to start."""

SPLIT_KEYS = 4 * KEY_TILE
"""Keys that a split has at least."""

NEED_NO_SUMS = frozenset(("max_logit", "logsumexp", "largest_weight", "visible_keys", "sink_mass", "output_norm"))
"""The fields that cost nothing beside the output."""

MOST_KEPT = 2**23
"""Bytes of scratch memory that a thread keeps from call to call."""


class Layout(NamedTuple):
    """How an array lies in memory: strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: int


class Operand(NamedTuple):
    """An array: where it is, and how it lies there. Whoever makes one keeps the array alive."""

    address: int
    layout: Layout


class Request(NamedTuple):
    """One call with one batch axis: q (batch, heads, queries, head_dim), k and v with the key heads."""

    q: Operand
    k: Operand
    v: Operand | None
    mask: Operand | None  # every axis full or 1
    first: Operand | None  # int64, (batch or 1, queries)
    stop: Operand | None
    scale: float | NDArray[np.float64]  # one number, or (batch or 1, heads or 1)
    sinks: NDArray[np.float64] | None  # (batch or 1, heads or 1)
    seed: int
    softcap: float
    dropout_p: float
    period: int


class Plan(NamedTuple):
    """What a forward pass will do, as far as that follows from shapes and options."""

    words: NDArray[np.int64]
    kernel: str
    item: int
    """Bytes of the numbers that the kernel computes with."""
    rows: int
    tasks: int
    splits: int
    scratch: int
    """Bytes for one worker."""
    products: int
    pairs: bool


@lru_cache(maxsize=256)
def plan(
    q: Layout,
    k: Layout,
    v: Layout | None,
    out: Layout | None,
    mask: Layout | None,
    bounds: Layout | None,
    options: tuple[float, float, int, bool, bool],
    threads: int,
) -> Plan:
    """Once for each kind of call: a small one takes less time than this."""
    softcap, dropout_p, period, measure, positive = options
    batch, heads, queries, depth = q.shape
    keys, value_depth = k.shape[2], -1 if v is None else v.shape[3]
    words = np.zeros(slot.WORDS, dtype=np.int64)
    floats = words.view(np.float64)
    words[slot.KIND] = q.kind
    group = heads // max(k.shape[1], 1)
    words[slot.BATCH : slot.VALUE_DEPTH + 1] = (batch, heads, group, queries, keys, depth, value_depth)
    words[slot.Q_BATCH : slot.Q_INNER + 1] = q.strides
    words[slot.K_BATCH : slot.K_INNER + 1] = k.strides
    if v is not None and out is not None:
        words[slot.V_BATCH : slot.V_INNER + 1] = v.strides
        words[slot.OUT_BATCH : slot.OUT_ROW + 1] = out.strides[:3]
    if mask is not None:
        words[slot.MASK_KIND : slot.MASK_KEY + 1] = (mask.kind, *_shared(mask))
    if bounds is not None:
        words[slot.BOUND_BATCH] = _shared(bounds)[0]
    if dropout_p:
        words[slot.PERIOD] = max(period, 1)
        words[slot.THRESHOLD] = min(round(dropout_p * 2**32), 2**32 - 1)
    floats[slot.SHARE_KEPT], floats[slot.SOFTCAP] = 1 - dropout_p, softcap
    words[slot.GENERAL] = mask is not None or softcap > 0
    words[slot.MEASURE] = measure
    item = 8 if q.kind == slot.F64 else 4
    panel_rows = target().panel_rows(item)
    # Rows of heads that share a key head stand in one panel when a head alone would not fill it.
    stack = group if queries < panel_rows else 1
    blocks = -(-stack * queries // (PANELS * panel_rows))
    words[slot.STACK], words[slot.BLOCKS] = stack, blocks
    thin = stack * queries <= THIN_ROWS
    words[slot.THIN] = thin
    rows = batch * heads * queries
    tasks = batch * heads // max(stack, 1) * blocks
    products = rows * keys * (depth + max(value_depth, 0))
    splits = 1
    if products >= SMALL and 0 < tasks < threads:
        splits = max(1, min(-(-2 * threads // tasks), keys // SPLIT_KEYS))
    words[slot.SPLITS] = splits
    # What is a pair of bfloat16 must lie side by side, and its scale cannot be taken up by q.
    pairs = q.kind == slot.BF16 and target().bfloat16 and depth % 2 == 0 and positive and not thin
    pairs = pairs and q.strides[3] == k.strides[3] == 1 and k.strides[2] % 2 == 0 and (v is None or v.strides[3] == 1)
    suffix = "bf16" if pairs else "f64" if item == 8 else "f32"
    kernel = f"thin_{suffix}" if thin else f"forward_{suffix}"
    scratch = slot.room_bytes(target().lanes(item), item, depth, max(value_depth, 0))
    return Plan(words, kernel, item, rows, tasks, splits, scratch, products, pairs)


def attend(request: Request, out: Operand | None, wide: int, fields: Sequence[int], *, measure: bool) -> None:
    """Compute the output, also unrounded if there is a place for that, and the fields that have an address."""
    q, k, v, mask, first = request.q, request.k, request.v, request.mask, request.first
    scale = request.scale
    positive = scale > 0 if isinstance(scale, float) else bool((scale > 0).all())
    planned = plan(
        q.layout,
        k.layout,
        None if v is None else v.layout,
        None if out is None else out.layout,
        None if mask is None else mask.layout,
        None if first is None else first.layout,
        (request.softcap, request.dropout_p, request.period, measure, positive),
        _threads.threads(),
    )
    if not planned.rows:
        return
    workers = workers_for(planned.tasks * planned.splits, planned.products)
    room = planned.scratch * workers
    desk = desk_with(room + 8 * planned.rows)
    words = desk.words
    words[:] = planned.words
    if isinstance(scale, float):
        scale_place, power_place = put_scale(desk, scale, pairs=planned.pairs)
    else:
        parts, powers = parts_of(scale, whole=planned.pairs)
        scale_place, power_place = put_per_head(words, slot.SCALE_BATCH, parts), address_in_memory(powers)
    sinks_place = 0
    if request.sinks is not None:
        sinks = np.ascontiguousarray(request.sinks)
        sinks_place = put_per_head(words, slot.SINKS_BATCH, sinks)
    partial_place = 0
    if planned.splits > 1:
        size = slot.partial_numbers(target().lanes(planned.item), 0 if v is None else v.layout.shape[3])
        partial = np.empty(size * planned.tasks * planned.splits * planned.item, dtype=np.uint8)
        partial_place = address_in_memory(partial)
    words[slot.SCRATCH : slot.NONFINITE + 1] = (
        desk.scratch,
        desk.scratch + room,
        partial_place,
        scale_place,
        power_place,
        sinks_place,
        q.address,
        k.address,
        0 if v is None else v.address,
        0 if mask is None else mask.address,
        0 if first is None else first.address,
        0 if request.stop is None else request.stop.address,
        0 if out is None else out.address,
        wide,
        *fields,
    )
    words[slot.SEED] = request.seed
    words[slot.SCRATCH_BYTES] = planned.scratch
    desk.start(planned.kernel, planned.tasks * planned.splits, workers)
    if planned.splits > 1:
        desk.start("merge_f64" if planned.item == 8 else "merge_f32", planned.tasks, min(workers, planned.tasks))
    suspects = int(words[slot.SUSPECTS])
    if suspects:
        # The list of them is behind the scratch memory, which is too small for what these rows need.
        listed = np.frombuffer(desk.memory, dtype=np.int64, offset=desk.scratch + room - address_in_memory(desk.memory))
        rows = listed[:suspects].copy()
        need = -(-(16 * k.layout.shape[2] + 8 * (0 if v is None else v.layout.shape[3])) // 64) * 64
        workers = workers_for(suspects, planned.products)
        memory = np.empty(need * workers, dtype=np.uint8)
        words[slot.SUSPECT], words[slot.SCRATCH], words[slot.SCRATCH_BYTES] = (
            address_in_memory(rows),
            address_in_memory(memory),
            need,
        )
        desk.start("careful", suspects, workers)


def differentiate(
    request: Request,
    grad: Operand | None,
    output: Operand,
    rows: Mapping[str, int],
    to: Sequence[Operand | None],
    *,
    extra: bool,
) -> bool:
    """Compute the gradients of q, k, v and the mask into `to`; False when one is not finite and they are of no use.

    `rows` are the addresses of what there is per row, by the names of slots.
    """
    q, k, v, mask, first = request.q, request.k, request.v, request.mask, request.first
    to_q, to_k, to_v, to_mask = to
    threads = _threads.threads()
    planned = plan(
        q.layout,
        k.layout,
        None if v is None else v.layout,
        None if v is None else output.layout,
        None if mask is None else mask.layout,
        None if first is None else first.layout,
        (request.softcap, request.dropout_p, request.period, True, False),
        threads,
    )
    words = planned.words.copy()
    batch, heads, _, depth = q.layout.shape
    keys, value_depth = k.layout.shape[2], 0 if v is None else v.layout.shape[3]
    parts, powers = parts_of(
        np.reshape(request.scale, (-1, np.shape(request.scale)[-1] if np.ndim(request.scale) else 1)), whole=False
    )
    words[slot.SCALE], words[slot.POWER] = put_per_head(words, slot.SCALE_BATCH, parts), address_in_memory(powers)
    if request.sinks is not None:
        sinks = np.ascontiguousarray(request.sinks)
        words[slot.SINKS] = put_per_head(words, slot.SINKS_BATCH, sinks)
    for place, x in (
        (slot.Q, q),
        (slot.K, k),
        (slot.V, v),
        (slot.MASK, mask),
        (slot.FIRST, first),
        (slot.STOP, request.stop),
    ):
        words[place] = 0 if x is None else x.address
    words[slot.SEED] = request.seed
    words[slot.EXTRA] = extra
    for name, place in rows.items():
        words[getattr(slot, name.upper())] = place
    if grad is not None:
        words[slot.GRAD : slot.GRAD_INNER + 1] = (grad.address, *grad.layout.strides)
        words[slot.OUT], words[slot.OUT_KIND] = output.address, output.layout.kind
    for place, x in ((slot.TO_Q, to_q), (slot.TO_K, to_k), (slot.TO_V, to_v)):
        if x is not None:
            words[place : place + 4] = (x.address, *x.layout.strides[:3])

    # Heads are independent. Where there is not the same number of them for each thread, keys are split too.
    units = batch * k.layout.shape[1]
    together, splits = 1, 1 if units % threads == 0 or units >= 4 * threads else threads
    if to_mask is not None:
        words[slot.TO_MASK : slot.TO_MASK_KEY + 1] = (to_mask.address, *_shared(to_mask.layout))
        shape = to_mask.layout.shape
        if shape[3] < keys:
            together, splits = units, 1
        elif shape[0] < batch or shape[1] < heads:
            # Heads that add to the same numbers must not do so at once; different keys add to different ones.
            together, splits = units, threads
    products = planned.rows * keys * (3 * depth + 2 * value_depth)
    splits = max(1, min(splits, keys // SPLIT_KEYS)) if products >= SMALL else 1
    words[slot.UNITS], words[slot.SPLITS] = together, splits
    tasks = units // max(together, 1) * splits
    lanes = target().lanes(planned.item)
    scratch = slot.backward_room_bytes(lanes, planned.item, depth, value_depth, -(-keys // splits))
    workers = workers_for(tasks, products)
    desk = desk_with(scratch * workers)
    if splits > 1:
        # Read in whole vectors: a little room behind the last row.
        partial = np.empty((splits * planned.rows * (depth + 6) + lanes) * planned.item, dtype=np.uint8)
        words[slot.PARTIAL] = address_in_memory(partial)
    words[slot.SCRATCH], words[slot.SCRATCH_BYTES] = desk.scratch, scratch
    desk.words[:] = words
    suffix = "f64" if planned.item == 8 else "f32"
    desk.start(f"backward_{suffix}", tasks, workers)
    if splits > 1:
        runs = -(-planned.rows // slot.ROWS_AT_ONCE)
        desk.start(f"gather_{suffix}", runs, workers_for(runs, products))
    return not desk.words[slot.SUSPECTS]


def workers_for(tasks: int, products: float) -> int:
    """Threads for some tasks with some products of numbers in all."""
    return 1 if products < SMALL else max(1, min(_threads.threads(), tasks))


def put_scale(desk: _Desk, scale: float, *, pairs: bool) -> tuple[int, int]:
    """One scale for all heads, among the words themselves; the addresses of its parts."""
    part, exponent = (scale / 2, 1) if pairs else math.frexp(abs(scale))
    desk.floats[slot.ONE_SCALE] = 2 * part or 1.0
    desk.floats[slot.ONE_POWER] = math.copysign(math.ldexp(1.0, exponent - 1), scale) if scale else 0.0
    places = desk.address + 8 * slot.ONE_SCALE, desk.address + 8 * slot.ONE_POWER
    desk.words[slot.SCALE], desk.words[slot.POWER] = places
    return places


def parts_of(scale: NDArray[np.float64], *, whole: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scales as numbers between 1 and 2 and powers of 2 with a sign, or as themselves and 1."""
    scale = np.ascontiguousarray(scale)
    if whole:
        return scale, np.ones_like(scale)
    part, exponent = np.frexp(np.abs(scale))
    return np.where(part == 0, 1.0, 2 * part), np.ldexp(np.sign(scale), exponent - 1)


def put_per_head(words: NDArray[np.int64], place: int, x: NDArray[np.float64]) -> int:
    """The strides of (batch or 1, heads or 1) into their slots; its address."""
    words[place], words[place + 1] = 0 if x.shape[0] == 1 else x.shape[1], 0 if x.shape[1] == 1 else 1
    return address_in_memory(x)


def address_in_memory(x: NDArray[Any]) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _shared(x: Layout) -> list[int]:
    """Strides, 0 along axes of size 1."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True)]


class _Desk(threading.local):
    """The words and the scratch memory of one thread, kept from call to call.

    Fresh pages cost more than what is done with them, and a large array is made of fresh pages.
    """

    def __init__(self) -> None:
        self.words = np.zeros(slot.WORDS, dtype=np.int64)
        self.floats = self.words.view(np.float64)
        self.view = memoryview(self.words)  # type: ignore[arg-type]
        self.address = address_in_memory(self.words)
        self.memory = np.empty(0, dtype=np.uint8)
        self.scratch = 0

    def start(self, kernel: str, tasks: int, workers: int) -> None:
        """Run a kernel to its end."""
        words = self.words
        words[slot.TASK], words[slot.WORKER], words[slot.TASKS], words[slot.ROOMS] = 0, 0, tasks, workers
        _threads.run(_code.address(kernel), self.address, workers)


_DESK = _Desk()


def desk_with(size: int) -> _Desk:
    """This thread's desk with some bytes of scratch memory."""
    desk = _DESK
    if desk.memory.size < size + 64 or desk.memory.size > max(MOST_KEPT, size + 64):
        desk.memory = np.empty(size + 64, dtype=np.uint8)
        desk.scratch = -(-address_in_memory(desk.memory) // 64) * 64
    return desk
