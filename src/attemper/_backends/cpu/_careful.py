"""Rows that met a number that is not finite, once more: one by one, in float64, as the specification says.

The fast kernels multiply by weights that are 0 where a key is hidden, and 0 · NaN is NaN. They notice, and leave such
rows to this one, which touches nothing that is hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, uint8, uint16, uint32, uint64

from . import _slots as slot
from ._compile import kernel
from ._dropout import finalise_one, row_key
from ._elements import item_size, number_at, to_bfloat, to_half
from ._simd import count_up, first_lane, pointer, spread
from ._slots import BF16, BOOL, F32, F64


@kernel
def score_of(d: Any, q_row: int, k_row: int, scale: float) -> float:
    """The scaled q·k of one pair."""
    item = item_size(d[slot.KIND])
    total = 0.0
    for i in range(d[slot.DEPTH]):
        q = number_at(q_row + i * d[slot.Q_INNER] * item, d[slot.KIND])
        total += q * number_at(k_row + i * d[slot.K_INNER] * item, d[slot.KIND])
    return total * scale


@kernel
def put(d: Any, field: int, row: int, value: float) -> None:
    """Write a field of the Reading, if anybody wants it."""
    if d[field] == 0:
        return
    if d[slot.KIND] == F64:
        pointer(d[field], float64)[row] = value
    else:
        pointer(d[field], float32)[row] = float32(value)


@kernel
def careful_row(d: Any, f: Any, row: int, scratch: int) -> None:
    """All of one row."""
    queries, keys, kind = d[slot.QUERIES], d[slot.KEYS], d[slot.KIND]
    item, value_depth = item_size(kind), d[slot.VALUE_DEPTH]
    query, head, batch = row % queries, row // queries % d[slot.HEADS], row // queries // d[slot.HEADS]
    kv_head = head // d[slot.GROUP]
    q_row = d[slot.Q] + (batch * d[slot.Q_BATCH] + head * d[slot.Q_HEAD] + query * d[slot.Q_ROW]) * item
    k_base = d[slot.K] + (batch * d[slot.K_BATCH] + kv_head * d[slot.K_HEAD]) * item
    v_base = d[slot.V] + (batch * d[slot.V_BATCH] + kv_head * d[slot.V_HEAD]) * item
    mask_item = item_size(d[slot.MASK_KIND])
    mask_row = batch * d[slot.MASK_BATCH] + head * d[slot.MASK_HEAD] + query * d[slot.MASK_ROW]
    place = batch * d[slot.SCALE_BATCH] + head * d[slot.SCALE_HEAD]
    scale = pointer(d[slot.SCALE], float64)[place] * pointer(d[slot.POWER], float64)[place]
    softcap = f[slot.SOFTCAP]
    first, stop = 0, keys
    if d[slot.FIRST] != 0:
        place = batch * d[slot.BOUND_BATCH] + query
        first, stop = pointer(d[slot.FIRST], int64)[place], pointer(d[slot.STOP], int64)[place]
    scores, seen, out = (
        pointer(scratch, float64),
        pointer(scratch + 8 * keys, int64),
        pointer(scratch + 16 * keys, float64),
    )

    count, best, highest, total_score = 0, -np.inf, -np.inf, 0.0
    for key in range(first, stop):
        added = 0.0
        if d[slot.MASK] != 0:
            place = d[slot.MASK] + (mask_row + key * d[slot.MASK_KEY]) * mask_item
            if d[slot.MASK_KIND] == BOOL:
                added = 0.0 if pointer(place, uint8)[0] else -np.inf
            else:
                added = number_at(place, d[slot.MASK_KIND])
            if added == -np.inf:
                continue
        qk = score_of(d, q_row, k_base + key * d[slot.K_ROW] * item, scale)
        score = softcap * np.tanh(qk / softcap) if softcap > 0 else qk
        score += added
        # A comparison with NaN is false: once it is the maximum, it stays.
        best = score if score > best or score != score else best
        highest = qk if qk > highest or qk != qk else highest
        total_score += score
        scores[count], seen[count] = score, key
        count += 1
    put(d, slot.MAX_LOGIT, row, best)
    put(d, slot.MAX_QK, row, highest)
    reference = 0.0 if best == -np.inf else best
    mean = total_score / max(count, 1)
    total, tilt, squares, spread_out = 0.0, 0.0, 0.0, 0.0
    for j in range(count):
        apart = scores[j] - reference
        weight = np.exp(apart)
        total += weight
        squares += weight * weight
        tilt += weight * (-1.7e308 if apart < -1.7e308 else apart)
        spread_out += (scores[j] - mean) ** 2
    total = np.nan if total == 0 else total
    log_total = np.log(total)
    logsumexp = best + log_total
    put(d, slot.LOGSUMEXP, row, logsumexp)
    put(d, slot.LARGEST_WEIGHT, row, 1 / total)
    put(d, slot.EXPECTED_SCORE, row, best + tilt / total)
    put(d, slot.ENTROPY, row, log_total - tilt / total)
    collision = squares / (total * total)
    put(d, slot.COLLISION, row, 1.0 if collision > 1 else collision)
    put(d, slot.SCORE_MEAN, row, mean)
    put(d, slot.SCORE_STD, row, np.sqrt(spread_out / count))
    put(d, slot.FIRST_KEY_WEIGHT, row, np.exp(scores[0] - best) / total)
    denominator = total
    taken = 0.0
    if d[slot.SINKS] != 0:
        logit = pointer(d[slot.SINKS], float64)[batch * d[slot.SINKS_BATCH] + head * d[slot.SINKS_HEAD]]
        if logit != -np.inf:
            taken = 1 / (1 + np.exp(logsumexp - logit))
            denominator = total * (1 + np.exp(logit - logsumexp))
    put(d, slot.SINK_MASS, row, taken)
    norm = 0.0
    if value_depth >= 0:
        for i in range(value_depth):
            out[i] = 0.0
        bits = row_key(d[slot.SEED], (batch % max(d[slot.PERIOD], 1) * d[slot.HEADS] + head) * queries + query)
        low, high = uint32(bits & uint64(0xFFFFFFFF)), uint32(bits >> uint64(32))
        for j in range(count):
            weight = np.exp(scores[j] - reference)
            if d[slot.THRESHOLD] != 0:
                draw = finalise_one(uint32(uint32(seen[j]) * uint32(0x9E3779B1)) ^ low)
                if finalise_one(uint32(draw + high)) < uint32(d[slot.THRESHOLD]):
                    weight = 0.0
            v_row = v_base + seen[j] * d[slot.V_ROW] * item
            for i in range(value_depth):
                v = number_at(v_row + i * d[slot.V_INNER] * item, kind)
                # An infinite value reaches every row that sees it, however small its weight.
                out[i] += v if v - v != 0 else weight * v
        largest = 0.0
        for i in range(value_depth):
            out[i] = out[i] / denominator / f[slot.SHARE_KEPT]
            largest = abs(out[i]) if abs(out[i]) > largest or out[i] != out[i] else largest
        unit = largest if 0 < largest < np.inf else 1.0
        for i in range(value_depth):
            norm += (out[i] / unit) ** 2
        norm = unit * np.sqrt(norm)
        put(d, slot.OUTPUT_NORM, row, norm)
        place = batch * d[slot.OUT_BATCH] + head * d[slot.OUT_HEAD] + query * d[slot.OUT_ROW]
        write_row(d[slot.OUT] + place * item, kind, out, value_depth)
        if d[slot.WIDE] != 0:
            write_row(d[slot.WIDE] + place * 4, F32, out, value_depth)
    if d[slot.NONFINITE] != 0:
        # As they are kept: what is finite here may not be there.
        most = 1.7976931348623157e308 if kind == F64 else 3.4028234663852886e38
        sound = abs(best) <= most and abs(total) <= most and norm <= most and abs(mean) <= most
        pointer(d[slot.NONFINITE], int64)[row] = 0 if sound else 1


@kernel
def write_row(address: int, kind: int, row: Any, n: int) -> None:
    """A row of numbers as elements of some kind."""
    for i in range(n):
        if kind == F64:
            pointer(address, float64)[i] = row[i]
        elif kind == F32:
            pointer(address, float32)[i] = float32(row[i])
        elif kind == BF16:
            pointer(address, uint16)[i] = first_lane(to_bfloat(spread(float32(row[i]))))
        else:
            pointer(address, uint16)[i] = first_lane(to_half(spread(float32(row[i]))))


@kernel
def careful(address: int) -> None:
    """Take rows from the list until there are none left."""
    d, f = pointer(address, int64), pointer(address, float64)
    worker = count_up(d, slot.WORKER)
    if worker >= d[slot.ROOMS]:
        return
    scratch = d[slot.SCRATCH] + worker * d[slot.SCRATCH_BYTES]
    number = count_up(d, slot.TASK)
    while number < d[slot.TASKS]:
        careful_row(d, f, pointer(d[slot.SUSPECT], int64)[number], scratch)
        number = count_up(d, slot.TASK)
