"""From the State of a block of rows over all keys to the output and the fields of the Reading."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._state import MOMENTS, SUMS
from ._tile import LN2, LOG2E, NO_MASK, place_of_rows, write_rows


class Fields(NamedTuple):
    """Where the fields of the Reading go; one that nobody wants may share its place with others."""

    max_logit: Any
    logsumexp: Any
    expected_score: Any
    entropy: Any
    largest_weight: Any
    collision: Any
    score_mean: Any
    score_std: Any
    max_qk: Any
    first_key_weight: Any
    sink_mass: Any
    output_norm: Any
    visible_keys: Any
    nonfinite: Any


@triton.jit
def finish(
    state, keep, rows, sizes, sinks, out, out_copy, wide, fields, mark, block, kind: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """Write the output, times what is to `keep` of it, and the fields of the Reading.

    The block is marked if one of them is not finite.
    """
    DV: tl.constexpr = kind.value_depth
    seen, there = state.count > 0, rows.there
    row = place_of_rows(rows, sizes)
    # Keys may be visible and yet all score −inf: the softmax is then 0/0, not the 0 of a row that sees nothing.
    total = tl.where(seen, tl.where(state.total == 0, float("nan"), state.total), 1.0)
    log_total = tl.log2(total)
    inverse = 1 / total
    logsumexp = tl.where(seen, (state.maximum + log_total) * LN2, float("-inf"))
    tl.store(fields.max_logit + row, state.maximum * LN2, mask=there)
    tl.store(fields.logsumexp + row, logsumexp, mask=there)
    tl.store(fields.largest_weight + row, tl.where(seen, inverse, 0.0), mask=there)
    visible = state.count.to(tl.int64)
    if kind.mask == NO_MASK:
        # A float32 counts to 2²⁴; where bounds alone hide keys they say it too.
        visible = tl.maximum(rows.high - rows.low, 0).to(tl.int64)
    tl.store(fields.visible_keys + row, visible, mask=there)
    passing = tl.full(total.shape, 1.0, tl.float32)
    mass = tl.zeros(total.shape, tl.float32)
    if kind.sinks:
        place = rows.batch * sizes.sinks_batch + rows.head * sizes.sinks_head
        sink = tl.load(sinks + place + tl.zeros_like(rows.query), mask=there, other=float("-inf"))
        absent = sink == float("-inf")
        # As a logistic of the difference, which neither side can overflow.
        gap = (tl.where(absent, 0.0, sink) - logsumexp) * LOG2E
        passing = tl.where(absent, 1.0, 1 / (1 + tl.exp2(gap)))
        mass = tl.where(absent, 0.0, 1 / (1 + tl.exp2(-gap)))
    tl.store(fields.sink_mass + row, mass, mask=there)
    # 0 times what is not finite is NaN.
    check = state.maximum * 0.0 + total * 0.0
    if kind.measure >= SUMS:
        lean = state.tilt * inverse
        collision = state.squares * inverse * inverse
        check += collision * 0.0 + lean * 0.0
        collision = tl.where(collision > 1, 1.0, collision)
        tl.store(fields.expected_score + row, tl.where(seen, (state.maximum + lean) * LN2, 0.0), mask=there)
        tl.store(fields.entropy + row, tl.where(seen, (log_total - lean) * LN2, 0.0), mask=there)
        tl.store(fields.collision + row, tl.where(seen, collision, 0.0), mask=there)
    lost = tl.zeros_like(total)
    if kind.valued:
        result = state.weighted * (passing * keep * inverse * (1 / sizes.kept))[:, None]
        if CAREFUL:
            result = tl.where((state.awry & 1) != 0, result + float("inf"), result)
            result = tl.where((state.awry & 2) != 0, result - float("inf"), result)
            result = tl.where((state.awry & 4) != 0, float("nan"), result)
            result = tl.where(seen[:, None], result, 0.0)
            # No square may over- or underflow.
            largest = tl.max(tl.abs(result), 1)
            unit = tl.where((largest > 1e-30) & (largest < float("inf")), largest, 1.0)
            share = result * (1 / unit)[:, None]
            norm = unit * tl.sqrt(tl.sum(share * share, 1))
        else:
            square, size = tl.sum(result * result, 1), tl.sum(tl.abs(result), 1)
            norm = tl.sqrt(square)
            # Squares that underflow are left to the kernel that takes care, and so is 0 · NaN where nothing is seen.
            lost = tl.where((square > 1e-30) | (size == 0), square * 0.0, float("nan"))
        if kind.wide:
            write_rows(wide, result, rows, sizes.value_depth, DV)
        if kind.copied:
            own = result.to(out.data.dtype.element_ty).reshape([1, 1, kind.rows, DV])
            out_copy.store([rows.batch, rows.head, block % sizes.blocks * kind.rows, 0], own)
        else:
            write_rows(out, result, rows, sizes.value_depth, DV)
        tl.store(fields.output_norm + row, norm, mask=there)
        if CAREFUL:
            check += norm * 0.0
    if kind.measure >= MOMENTS and not kind.summed:
        deviation = tl.sqrt(state.spread / tl.where(seen, state.count, 1.0))
        first = tl.exp2(state.opening_score - state.maximum) * inverse
        tl.store(fields.score_mean + row, state.mean * LN2, mask=there)
        tl.store(fields.score_std + row, deviation * LN2, mask=there)
        tl.store(fields.first_key_weight + row, tl.where(seen, first, 0.0), mask=there)
    unsound = seen & (check != 0)
    if kind.measure >= MOMENTS:
        tl.store(fields.max_qk + row, state.highest * LN2, mask=there)
        unsound = unsound | (seen & (state.mean * 0.0 != 0))
        nonfinite = unsound | (seen & (lost != 0))
        tl.store(fields.nonfinite + row, tl.where(nonfinite, 1, 0).to(tl.int64), mask=there)
    if not CAREFUL:
        # As a column: of a row of numbers Triton 3.6 makes nothing on GPUs of compute capability 10.0.
        again = tl.where(there & (unsound | (lost != 0)), 1, 0)
        tl.store(mark + block + tl.arange(0, 1), tl.max(again[:, None], 0))
