"""From operands to the words that a kernel reads, and to the memory that it works in."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _code, _slots as slot, _threads
from ._target import COLUMNS, KEY_TILE, PANELS, target

KINDS = {"float32": slot.F32, "float64": slot.F64, "bfloat16": slot.BF16, "float16": slot.F16, "bool": slot.BOOL}

COUNTS = ("visible_keys", "nonfinite")
FIELDS = (
    "max_logit",
    "logsumexp",
    "expected_score",
    "entropy",
    "largest_weight",
    "collision",
    "score_mean",
    "score_std",
    "max_qk",
    "first_key_weight",
    "sink_mass",
    "output_norm",
    *COUNTS,
)
"""The fields of the Reading that a forward pass gives, whole numbers last."""

SMALL = 2**20
"""Products of two numbers up to which one thread is faster than two: others take a few microseconds to start."""

SPLIT_KEYS = 4 * KEY_TILE
"""Keys that a split has at least."""


NEEDS_NO_SUMS = frozenset(("max_logit", "logsumexp", "largest_weight", "visible_keys", "sink_mass", "output_norm"))
"""The fields that cost nothing beside the output."""


class Operand(NamedTuple):
    """Where an array is: address, shape and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: int


class Request(NamedTuple):
    """One call with one batch axis: q (batch, heads, queries, head_dim), k and v with the key heads."""

    q: Operand
    k: Operand
    v: Operand | None
    mask: Operand | None  # every axis full or 1
    first: Operand | None  # int64, (batch or 1, queries)
    stop: Operand | None
    scale: NDArray[np.float64]  # (batch or 1, heads or 1)
    sinks: NDArray[np.float64] | None
    seed: int
    softcap: float
    dropout_p: float
    period: int


class Sheet:
    """The words of one call, and what must live as long as it runs."""

    def __init__(self, request: Request) -> None:
        words = np.zeros(slot.WORDS, dtype=np.int64)
        floats = words.view(np.float64)
        q, k, v = request.q, request.k, request.v
        batch, heads, queries, depth = q.shape
        self.words, self.floats, self.request = words, floats, request
        self.rows = batch * heads * queries
        self.item = 8 if q.kind == slot.F64 else 4
        words[slot.KIND] = q.kind
        words[slot.BATCH : slot.VALUE_DEPTH + 1] = (
            batch, heads, heads // max(k.shape[1], 1), queries, k.shape[2], depth, -1 if v is None else v.shape[3],
        )  # fmt: skip
        words[slot.Q : slot.Q_INNER + 1] = (q.address, *q.strides)
        words[slot.K : slot.K_INNER + 1] = (k.address, *k.strides)
        if v is not None:
            words[slot.V : slot.V_INNER + 1] = (v.address, *v.strides)
        mask = request.mask
        if mask is not None:
            words[slot.MASK : slot.MASK_KEY + 1] = (mask.address, mask.kind, *_shared(mask))
        if request.first is not None and request.stop is not None:
            words[slot.FIRST], words[slot.STOP] = request.first.address, request.stop.address
            words[slot.BOUND_BATCH] = _shared(request.first)[0]
        self._put_scale(whole=False)
        self.sinks = None if request.sinks is None else np.ascontiguousarray(request.sinks)
        if self.sinks is not None:
            words[slot.SINKS : slot.SINKS_HEAD + 1] = _per_head(self.sinks)
        if request.dropout_p:
            words[slot.SEED], words[slot.PERIOD] = request.seed, max(request.period, 1)
            words[slot.THRESHOLD] = min(round(request.dropout_p * 2**32), 2**32 - 1)
        floats[slot.SHARE_KEPT] = 1 - request.dropout_p
        floats[slot.SOFTCAP] = request.softcap
        words[slot.GENERAL] = mask is not None or request.softcap > 0
        # Rows of heads that share a key head stand in one panel when a head alone would not fill it.
        words[slot.STACK] = words[slot.GROUP] if queries < self.panel_rows else 1
        words[slot.BLOCKS] = -(-int(words[slot.STACK]) * queries // (PANELS * self.panel_rows))

    @property
    def panel_rows(self) -> int:
        return target().panel_rows(self.item)

    @property
    def suffix(self) -> str:
        return "f64" if self.item == 8 else "f32"

    def put_fields(self, fields: Mapping[str, int]) -> None:
        """The addresses of the fields of the Reading, by name."""
        for name, address in fields.items():
            self.words[getattr(slot, name.upper())] = address

    def start(self, kernel: str, tasks: int, scratch: int, products: float) -> None:
        """Run a kernel to its end."""
        words = self.words
        words[slot.TASK] = words[slot.WORKER] = 0
        words[slot.TASKS] = tasks
        workers = workers_for(tasks, products)
        words[slot.SCRATCH_BYTES] = scratch
        words[slot.SCRATCH] = _scratch(scratch * workers)
        _threads.run(_code.address(kernel), words.ctypes.data, workers)

    def attend(self, out: Operand | None, wide: int, fields: Mapping[str, int]) -> None:
        """Compute the output, also unrounded if there is a place for that, and some fields of the Reading."""
        words, request = self.words, self.request
        if not self.rows:
            return
        self.put_fields(fields)
        if out is not None:
            words[slot.OUT : slot.OUT_ROW + 1] = (out.address, *out.strides[:3])
            words[slot.WIDE] = wide
        words[slot.MEASURE] = not NEEDS_NO_SUMS.issuperset(fields)
        suspects = np.empty(self.rows, dtype=np.int64)
        words[slot.SUSPECT] = suspects.ctypes.data
        depth, value_depth = int(words[slot.DEPTH]), max(int(words[slot.VALUE_DEPTH]), 0)
        keys = int(words[slot.KEYS])
        stacks = int(words[slot.BATCH] * words[slot.HEADS] // words[slot.STACK])
        tasks = stacks * int(words[slot.BLOCKS])
        products = self.rows * keys * (depth + value_depth)
        splits = 1
        if products >= SMALL and tasks < _threads.threads():
            splits = max(1, min(-(-2 * _threads.threads() // tasks), keys // SPLIT_KEYS))
        words[slot.SPLITS] = splits
        lanes = target().lanes(self.item)
        scratch = slot.room_bytes(lanes, self.item, depth, value_depth)
        partial = None
        if splits > 1:
            size = slot.partial_numbers(lanes, value_depth) * tasks * splits
            partial = np.empty(size * self.item, dtype=np.uint8)
            words[slot.PARTIAL] = partial.ctypes.data
        kernel = f"forward_{self.suffix}"
        if self._in_pairs():
            kernel = "forward_bf16"
            self._put_scale(whole=True)
        self.start(kernel, tasks * splits, scratch, products)
        if partial is not None:
            self.start(f"merge_{self.suffix}", tasks, scratch, products)
        found = int(words[slot.SUSPECTS])
        if found:
            self.start("careful", found, -(-(16 * keys + 8 * value_depth) // 64) * 64, products)

    def differentiate(
        self,
        grad: Operand | None,
        output: Operand,
        rows: Mapping[str, int],
        measured: Mapping[str, int],
        to_q: Operand,
        to_k: Operand,
        to_v: Operand | None,
        to_mask: Operand | None,
        *,
        extra: bool,
    ) -> bool:
        """Compute the gradients; False when something was not finite and they are not to be used."""
        words = self.words
        keys, depth = int(words[slot.KEYS]), int(words[slot.DEPTH])
        value_depth = max(int(words[slot.VALUE_DEPTH]), 0)
        kv_heads = int(words[slot.HEADS] // words[slot.GROUP])
        units = int(words[slot.BATCH]) * kv_heads
        self.put_fields(rows)
        self.put_fields(measured)
        words[slot.MEASURE], words[slot.EXTRA] = True, extra
        if grad is not None:
            words[slot.GRAD : slot.GRAD_INNER + 1] = (grad.address, *grad.strides)
            words[slot.OUT : slot.OUT_ROW + 1] = (output.address, *output.strides[:3])
            words[slot.OUT_KIND] = output.kind
        words[slot.TO_Q : slot.TO_Q_ROW + 1] = (to_q.address, *to_q.strides[:3])
        words[slot.TO_K : slot.TO_K_ROW + 1] = (to_k.address, *to_k.strides[:3])
        if to_v is not None:
            words[slot.TO_V : slot.TO_V_ROW + 1] = (to_v.address, *to_v.strides[:3])
        threads = _threads.threads()
        products = self.rows * keys * (3 * depth + 2 * value_depth)
        # Heads are independent; where there are fewer than threads, or not a whole number for each, keys are split too.
        words[slot.UNITS] = 1
        splits = 1 if units % threads == 0 or units >= 4 * threads else threads
        if to_mask is not None:
            words[slot.TO_MASK : slot.TO_MASK_KEY + 1] = (to_mask.address, *_shared(to_mask))
            if to_mask.shape[0] < int(words[slot.BATCH]) or to_mask.shape[1] < int(words[slot.HEADS]):
                # Heads that add to the same numbers must not do so at once; different keys add to different ones.
                words[slot.UNITS] = units
                splits = threads
            if to_mask.shape[3] < keys:
                words[slot.UNITS] = units
                splits = 1
        splits = max(1, min(splits, keys // SPLIT_KEYS)) if products >= SMALL else 1
        words[slot.SPLITS] = splits
        tasks = units // max(int(words[slot.UNITS]), 1) * splits
        lanes = target().lanes(self.item)
        share = -(-keys // splits)
        scratch = slot.backward_room_bytes(lanes, self.item, depth, value_depth, share)
        partial = None
        if splits > 1:
            # Read in whole vectors: a little room behind the last row.
            partial = np.empty((splits * self.rows * (depth + 6) + lanes) * self.item, dtype=np.uint8)
            words[slot.PARTIAL] = partial.ctypes.data
        self.start(f"backward_{self.suffix}", tasks, scratch, products)
        if partial is not None:
            self.start(f"gather_{self.suffix}", -(-self.rows // slot.ROWS_AT_ONCE), 0, products)
        return not words[slot.SUSPECTS]

    def _put_scale(self, *, whole: bool) -> None:
        self.scale, self.power = _parts_of(self.request.scale, whole=whole)
        self.words[slot.SCALE : slot.SCALE_HEAD + 1] = _per_head(self.scale)
        self.words[slot.POWER] = self.power.ctypes.data

    def _in_pairs(self) -> bool:
        """Whether the products of pairs of bfloat16 can be used: what is a pair must lie side by side."""
        q, k, v = self.request.q, self.request.k, self.request.v
        if q.kind != slot.BF16 or not target().bfloat16 or q.shape[3] % 2 or (self.request.scale <= 0).any():
            return False
        return q.strides[3] == k.strides[3] == 1 and k.strides[2] % 2 == 0 and (v is None or v.strides[3] == 1)


def workers_for(tasks: int, products: float) -> int:
    """Threads for some tasks with some products of numbers in all."""
    return 1 if products < SMALL else max(1, min(_threads.threads(), tasks))


def _parts_of(scale: NDArray[np.float64], *, whole: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A scale as a number between ½ and 1 and a power of 2 with its sign, or as itself and 1."""
    if whole:
        return np.ascontiguousarray(scale), np.ones_like(scale)
    part, exponent = np.frexp(np.abs(scale))
    return np.where(part == 0, 0.5, part), np.ldexp(np.sign(scale), exponent)


def _shared(x: Operand) -> list[int]:
    """Strides, 0 along axes of size 1."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True)]


def _per_head(x: NDArray[np.float64]) -> tuple[int, int, int]:
    return x.ctypes.data, 0 if x.shape[0] == 1 else x.shape[1], 0 if x.shape[1] == 1 else 1


_own = threading.local()


def _scratch(size: int) -> int:
    """Memory that a thread keeps from call to call: fresh pages cost more than what is done with them."""
    memory: NDArray[np.uint8] | None = getattr(_own, "memory", None)
    if memory is None or memory.size < size + 64:
        memory = _own.memory = np.empty(size + 64, dtype=np.uint8)
    return -(-memory.ctypes.data // 64) * 64
