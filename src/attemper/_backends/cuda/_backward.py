"""The gradients in Triton: the weights of each tile computed again, once along the keys and once along the queries.

With P̃ the weights including a sink and P without, dP = dO·vᵀ and D = ⟨dO, O⟩,

    dS = P̃∘(dP − D) + P∘(level + slope · s + bend · P),    dq = scale · dS·k,    dk = scale · dSᵀ·q,    dv = P̃ᵀ·dO,

where level, slope and bend are numbers per row that carry the gradients of the Reading's own fields. Nothing is added
up in an order that changes from run to run, but for a mask whose axes are shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._tile import (
    BIAS,
    LN2,
    LOG2E,
    NO_MASK,
    across,
    draws_of_rows,
    far_apart,
    is_over,
    load_keys,
    load_rows,
    load_tile,
    mask_of_tile,
    mask_rows,
    place_of_rows,
    product,
    range_of_block,
    rows_of_head,
    sizes_of,
    survivors,
    tanh,
    write_keys,
    write_rows,
)


class Constants(NamedTuple):
    """What there is per query row, (batch, heads, queries)."""

    max_logit: Any
    peak: Any
    """The largest weight."""
    share: Any
    """The same, less what a sink takes."""
    pull: Any
    """D"""
    pivot: Any
    """About the mean of dP under the weights."""
    level: Any
    slope: Any
    bend: Any


class Line(NamedTuple):
    """What is needed of the rows of a block of queries."""

    low: Any
    high: Any
    factor: Any
    """The scale, of all rows."""
    mask: Any
    draw_low: Any
    draw_high: Any
    reference: Any
    peak: Any
    share: Any
    pull: Any
    pivot: Any
    level: Any
    slope: Any
    bend: Any


@triton.jit
def pull_kernel(grad, out, pull, ranges, first, stop, sizes, kind: tl.constexpr):
    """D of a block of rows, and which keys any and all of them see."""
    sizes = sizes_of(sizes, True)
    BM: tl.constexpr = kind.rows
    DV: tl.constexpr = kind.value_depth
    block = tl.program_id(0)
    turn = block % sizes.blocks
    unit = block // sizes.blocks
    batch, head = unit // sizes.heads, unit % sizes.heads
    rows = rows_of_head(turn * BM, batch, head, first, stop, sizes, BM, kind.bounded)
    least, most, clear, clear_stop = range_of_block(rows, sizes.keys)
    if head == 0:
        place = ranges + (batch * sizes.blocks + turn) * 4
        tl.store(place, least)
        tl.store(place + 1, most)
        tl.store(place + 2, clear)
        tl.store(place + 3, clear_stop)
    if kind.valued:
        left, right = load_rows(grad, rows, sizes.value_depth, DV), load_rows(out, rows, sizes.value_depth, DV)
        found = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
        tl.store(pull + place_of_rows(rows, sizes), found, mask=rows.there)


@triton.jit
def open_line(rows, scale, constants, sizes, masked, dropped, kind: tl.constexpr):
    """What the rows of a block of queries need."""
    BM: tl.constexpr = kind.rows
    there, head = rows.there, (rows.batch.to(tl.int64) * sizes.heads + rows.head) * sizes.queries
    factor = tl.load(scale + rows.batch * sizes.scale_batch + rows.head * sizes.scale_head)
    draw_low = tl.zeros([BM], tl.uint32)
    draw_high = tl.zeros([BM], tl.uint32)
    if kind.dropout:
        draw_low, draw_high = draws_of_rows(dropped, rows, sizes)
    reference = tl.load(constants.max_logit + head + rows.query, mask=there, other=0.0) * LOG2E
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    peak = tl.load(constants.peak + head + rows.query, mask=there, other=0.0)
    share = tl.load(constants.share + head + rows.query, mask=there, other=0.0)
    pull = tl.load(constants.pull + head + rows.query, mask=there, other=0.0)
    pivot, level, slope, bend = pull, pull, pull, pull
    if kind.sinks:
        pivot = tl.load(constants.pivot + head + rows.query, mask=there, other=0.0)
    if kind.extra:
        level = tl.load(constants.level + head + rows.query, mask=there, other=0.0)
        slope = tl.load(constants.slope + head + rows.query, mask=there, other=0.0)
        bend = tl.load(constants.bend + head + rows.query, mask=there, other=0.0)
    places = mask_rows(masked, rows, kind.mask)
    return Line(
        rows.low,
        rows.high,
        factor,
        places,
        draw_low,
        draw_high,
        reference,
        peak,
        share,
        pull,
        pivot,
        level,
        slope,
        bend,
    )


@triton.jit
def weights_of_tile(
    qk, key, line, masked, softcap, kind: tl.constexpr, HIDDEN: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """From q·k to powers of 2, scores as exponents, how steep the softcap is, and what is visible."""
    seen = tl.full(qk.shape, True, tl.int1)
    if HIDDEN:
        own = across(key, not TURNED)
        seen = (across(line.low, TURNED) <= own) & (own < across(line.high, TURNED))
    scores = qk * (line.factor * LOG2E)
    steep = scores
    if kind.softcap:
        bent = tanh(scores * (LN2 / softcap))
        scores = softcap * LOG2E * bent
        steep = 1 - bent * bent
    if kind.mask != NO_MASK:
        added, shown = mask_of_tile(masked, line.mask, key, seen, kind.mask, TURNED)
        seen = seen & shown
        if kind.mask == BIAS:
            scores = scores + added * LOG2E
    power = tl.exp2(scores - across(line.reference, TURNED))
    if HIDDEN:
        power = tl.where(seen, power, 0.0)
    return power, scores, steep, seen


@triton.jit
def to_scores(
    power, scores, to_weights, seen, line, times, kind: tl.constexpr, HIDDEN: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """DS of a tile, times a number."""
    found = tl.zeros(power.shape, tl.float32)
    if kind.valued:
        found = power * across(line.share, TURNED) * (to_weights * times - across(line.pull * times, TURNED))
    if kind.extra:
        own = power * across(line.peak, TURNED)
        bent = across(line.level, TURNED) + across(line.slope, TURNED) * (scores * LN2)
        bent = bent + across(line.bend, TURNED) * own
        # A weight of 0 passes nothing on, even of an infinite score.
        found = found + tl.where(own == 0, 0.0, own * bent * times)
    if HIDDEN:
        found = tl.where(seen, found, 0.0)
    return found


@triton.jit
def sound(x):
    """0 for what is not finite: a weight of 0 is to take nothing from it."""
    wide = x.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(x.dtype)


@triton.jit
def visit_keys(
    start, to_q, moved, around, weighed, leaning, counted, q, grad, k, v, k_head, rows, line, masked, dropped, softcap,
    sizes, to_mask, kind: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """What flows from the keys of one tile back to query rows."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    DV: tl.constexpr = kind.value_depth
    key = start + tl.arange(0, BN)
    if HIDDEN:
        own = load_keys(k, rows.batch, k_head, start, sizes.keys, sizes.depth, BN, D)
    else:
        own = load_tile(k, rows.batch, k_head, start, sizes.depth, BN, D)
    qk = product(q, own.T, tl.zeros([BM, BN], tl.float32), kind)
    power, scores, steep, seen = weights_of_tile(qk, key, line, masked, softcap, kind, HIDDEN, False)
    to_weights = qk
    if kind.valued:
        if HIDDEN:
            values = load_keys(v, rows.batch, k_head, start, sizes.keys, sizes.value_depth, BN, DV)
        else:
            values = load_tile(v, rows.batch, k_head, start, sizes.value_depth, BN, DV)
        to_weights = product(grad, values.T, tl.zeros([BM, BN], tl.float32), kind)
        if kind.dropout:
            kept = survivors(line.draw_low, line.draw_high, key, dropped.threshold)
            to_weights = tl.where(kept, to_weights * (1 / sizes.kept), 0.0)
        if kind.measure:
            off = to_weights - line.pivot[:, None]
            if HIDDEN:
                off = tl.where(seen, off, 0.0)
            pushed = power * off
            moved += tl.sum(off, 1)
            around += tl.sum(off * off, 1)
            weighed += tl.sum(pushed * off, 1)
            leaning += tl.sum(pushed, 1)
            if kind.mask != NO_MASK:
                counted += tl.sum(tl.where(seen, 1.0, 0.0), 1)
    found = to_scores(power, scores, to_weights, seen, line, 1.0, kind, HIDDEN, False)
    if kind.to_mask:
        places = mask_rows(to_mask, rows, kind.mask)[:, None] + key.to(tl.int64)[None, :] * to_mask.key
        tl.atomic_add(to_mask.mask + places, found, mask=seen & rows.there[:, None], sem="relaxed")
    if kind.softcap:
        found = found * steep
        if HIDDEN:
            found = tl.where(seen, found, 0.0)
    if HIDDEN:
        own = sound(own)
    to_q = product(found.to(own.dtype), own, to_q, kind)
    return to_q, moved, around, weighed, leaning, counted


@triton.jit
def to_queries_kernel(
    q, k, v, grad, to_q, to_mask, flow, along, first, stop, scale, softcap, constants, masked, dropped, sizes,
    kind: tl.constexpr,
):  # fmt: skip
    sizes = sizes_of(sizes, True)
    program = tl.program_id(0)
    to_queries(
        program // sizes.blocks, sizes.blocks - 1 - program % sizes.blocks, q, k, v, grad, to_q, to_mask, flow, along,
        first, stop, scale, softcap, constants, masked, dropped, sizes, kind,
    )  # fmt: skip


@triton.jit(do_not_specialize=("count",))
def marked_to_queries_kernel(
    q, k, v, grad, to_q, to_mask, flow, along, first, stop, scale, softcap, constants, masked, dropped, sizes, marks,
    count, kind: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of some blocks of rows those that are marked."""
    sizes = sizes_of(sizes, False)
    begin = tl.program_id(0) * SPAN
    if is_over(marks, begin, count, SPAN):
        return
    for block in tl.range(begin, tl.minimum(begin + SPAN, count)):
        if tl.load(marks + block) != 0:
            to_queries(
                block // sizes.blocks, block % sizes.blocks, q, k, v, grad, to_q, to_mask, flow, along, first, stop,
                scale, softcap, constants, masked, dropped, sizes, kind,
            )  # fmt: skip


@triton.jit
def to_queries(
    unit, turn, q, k, v, grad, to_q, to_mask, flow, along, first, stop, scale, softcap, constants, masked, dropped,
    sizes, kind: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of query rows, with what its pressure and gradient flow are made of."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    DV: tl.constexpr = kind.value_depth
    batch, head = unit // sizes.heads, unit % sizes.heads
    k_head = head // sizes.group
    rows = rows_of_head(turn * BM, batch, head, first, stop, sizes, BM, kind.bounded)
    line = open_line(rows, scale, constants, sizes, masked, dropped, kind)
    own = load_rows(q, rows, sizes.depth, D)
    arriving = own
    if kind.valued:
        arriving = load_rows(grad, rows, sizes.value_depth, DV)
    least, most, clear, clear_stop = range_of_block(rows, sizes.keys)
    least = least // BN * BN
    found = tl.zeros([BM, D], tl.float32)
    nothing = tl.zeros([BM], tl.float32)
    moved, around, weighed, leaning, counted = nothing, nothing, nothing, nothing, nothing
    if kind.softcap or kind.mask != NO_MASK or kind.dropout:
        for start in tl.range(least, most, BN):
            found, moved, around, weighed, leaning, counted = visit_keys(
                start, found, moved, around, weighed, leaning, counted, own, arriving, k, v, k_head, rows, line, masked,
                dropped, softcap, sizes, to_mask, kind, True,
            )  # fmt: skip
    else:
        inner = tl.minimum(tl.maximum(tl.cdiv(clear, BN) * BN, least), most)
        end = tl.maximum(tl.minimum(clear_stop, most) // BN * BN, inner)
        if far_apart(k, v, BN):
            end = inner
        for start in tl.range(inner, end, BN):
            found, moved, around, weighed, leaning, counted = visit_keys(
                start, found, moved, around, weighed, leaning, counted, own, arriving, k, v, k_head, rows, line, masked,
                dropped, softcap, sizes, to_mask, kind, False,
            )  # fmt: skip
        before = tl.cdiv(inner - least, BN)
        behind = tl.cdiv(tl.maximum(most - end, 0), BN)
        for i in tl.range(0, before + behind):
            start = tl.where(i < before, least + i * BN, end + (i - before) * BN)
            found, moved, around, weighed, leaning, counted = visit_keys(
                start, found, moved, around, weighed, leaning, counted, own, arriving, k, v, k_head, rows, line, masked,
                dropped, softcap, sizes, to_mask, kind, True,
            )  # fmt: skip
    row = place_of_rows(rows, sizes)
    # With the scale left out, for the gradient of a scale of 0.
    tl.store(along + row, tl.sum(found * own.to(tl.float32), 1), mask=rows.there)
    if kind.measure:
        count = (rows.high - rows.low).to(tl.float32)
        if kind.mask != NO_MASK:
            count = counted
        spread = around - moved * moved / tl.maximum(count, 1.0)
        # The pivot is not quite the mean: it follows from weights that were rounded for their product with v, and it is
        # another's under a sink.
        leaning = leaning * line.peak
        weighed = weighed * line.peak - leaning * leaning
        weighed = tl.where(weighed < 0, 0.0, weighed)
        # NaN where there was nothing to share.
        tl.store(flow + row, tl.where(spread > 0, weighed * count / spread, float("nan")), mask=rows.there)
    write_rows(to_q, found * line.factor, rows, sizes.depth, D)


@triton.jit
def visit_rows(
    begin, to_k, to_v, k, v, q, grad, key, batch, head, first, stop, scale, constants, masked, dropped, softcap, sizes,
    kind: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """What flows from a block of query rows back to the keys of a tile. Keys by rows: so nothing has to be turned."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    DV: tl.constexpr = kind.value_depth
    rows = rows_of_head(begin, batch, head, first, stop, sizes, BM, kind.bounded)
    line = open_line(rows, scale, constants, sizes, masked, dropped, kind)
    if HIDDEN:
        own = load_keys(q, batch, head, begin, sizes.queries, sizes.depth, BM, D)
    else:
        own = load_tile(q, batch, head, begin, sizes.depth, BM, D)
    qk = product(k, own.T, tl.zeros([BN, BM], tl.float32), kind)
    power, scores, steep, seen = weights_of_tile(qk, key, line, masked, softcap, kind, HIDDEN, True)
    to_weights = qk
    if kind.valued:
        if HIDDEN:
            arriving = load_keys(grad, batch, head, begin, sizes.queries, sizes.value_depth, BM, DV)
        else:
            arriving = load_tile(grad, batch, head, begin, sizes.value_depth, BM, DV)
        to_weights = product(v, arriving.T, tl.zeros([BN, BM], tl.float32), kind)
        share = power * line.share[None, :]
        if HIDDEN:
            # What is not finite in dO gets to all that the row sees, and nothing to what it does not.
            broken = tl.max(tl.where(tl.abs(arriving.to(tl.float32)) < float("inf"), 0, 1), 1) > 0
            share = tl.where(seen, tl.where(broken[None, :], float("nan"), share), 0.0)
            arriving = sound(arriving)
        if kind.dropout:
            kept = survivors(line.draw_low, line.draw_high, key, dropped.threshold, True)
            to_weights = tl.where(kept, to_weights * (1 / sizes.kept), 0.0)
            share = tl.where(kept, share * (1 / sizes.kept), 0.0)
        to_v = product(share.to(arriving.dtype), arriving, to_v, kind)
    found = to_scores(power, scores, to_weights, seen, line, line.factor, kind, HIDDEN, True)
    if kind.softcap:
        found = found * steep
        if HIDDEN:
            found = tl.where(seen, found, 0.0)
    if HIDDEN:
        own = sound(own)
    to_k = product(found.to(own.dtype), own, to_k, kind)
    return to_k, to_v


@triton.jit
def to_keys_kernel(
    q, k, v, grad, to_k, to_v, ranges, first, stop, scale, softcap, constants, masked, dropped, sizes,
    kind: tl.constexpr,
):  # fmt: skip
    sizes = sizes_of(sizes, True)
    to_keys(
        tl.program_id(0), q, k, v, grad, to_k, to_v, ranges, first, stop, scale, softcap, constants, masked, dropped,
        sizes, kind,
    )  # fmt: skip


@triton.jit(do_not_specialize=("count",))
def marked_to_keys_kernel(
    q, k, v, grad, to_k, to_v, ranges, first, stop, scale, softcap, constants, masked, dropped, sizes, marks, count,
    kind: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of some tiles of keys those that are marked."""
    sizes = sizes_of(sizes, False)
    begin = tl.program_id(0) * SPAN
    if is_over(marks, begin, count, SPAN):
        return
    for tile in tl.range(begin, tl.minimum(begin + SPAN, count)):
        if tl.load(marks + tile) != 0:
            to_keys(
                tile, q, k, v, grad, to_k, to_v, ranges, first, stop, scale, softcap, constants, masked, dropped,
                sizes, kind,
            )  # fmt: skip


@triton.jit
def to_keys(
    program, q, k, v, grad, to_k, to_v, ranges, first, stop, scale, softcap, constants, masked, dropped, sizes,
    kind: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, from all query rows of the heads that share them."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    DV: tl.constexpr = kind.value_depth
    tiles = tl.cdiv(sizes.keys, BN)
    start = program % tiles * BN
    unit = program // tiles
    kv_heads = sizes.heads // sizes.group
    batch, k_head = unit // kv_heads, unit % kv_heads
    key = start + tl.arange(0, BN)
    own = load_keys(k, batch, k_head, start, sizes.keys, sizes.depth, BN, D)
    values = own
    if kind.valued:
        values = load_keys(v, batch, k_head, start, sizes.keys, sizes.value_depth, BN, DV)
    # From the first block of rows that sees one of these keys to the last, and of those that see all of them.
    begin, end, inner, outer, clear = sizes.blocks, 0, sizes.blocks, 0, 0
    for i in tl.range(0, sizes.blocks):
        place = ranges + (batch * sizes.blocks + i) * 4
        meets = (tl.load(place) < start + BN) & (tl.load(place + 1) > start)
        begin = tl.where(meets, tl.minimum(begin, i), begin)
        end = tl.where(meets, i + 1, end)
        whole = meets & (tl.load(place + 2) <= start) & (tl.load(place + 3) >= start + BN)
        whole = whole & ((i + 1) * BM <= sizes.queries)
        inner = tl.where(whole, tl.minimum(inner, i), inner)
        outer = tl.where(whole, i + 1, outer)
        clear += whole.to(tl.int32)
    end = tl.maximum(begin, end)
    # All of them in one run, or none.
    clear = tl.where(clear == outer - inner, clear, 0)
    if kind.softcap or kind.mask != NO_MASK or kind.dropout or far_apart(q, grad, BM):
        clear = clear * 0
    inner = tl.where(clear > 0, inner, begin)
    outer = tl.where(clear > 0, outer, begin)
    for_k = tl.zeros([BN, D], tl.float32)
    for_v = tl.zeros([BN, DV], tl.float32)
    before = inner - begin
    # A loop for the heads, and not one over all blocks of all heads: Triton 3.6 fails to fetch ahead in a loop that
    # divides its counter.
    for member in tl.range(0, sizes.group):
        head = k_head * sizes.group + member
        if not (kind.softcap or kind.mask != NO_MASK or kind.dropout):
            for i in tl.range(inner, outer):
                for_k, for_v = visit_rows(
                    i * BM, for_k, for_v, own, values, q, grad, key, batch, head, first, stop, scale, constants, masked,
                    dropped, softcap, sizes, kind, False,
                )  # fmt: skip
        for i in tl.range(0, before + end - outer):
            turn = tl.where(i < before, begin + i, outer + i - before)
            for_k, for_v = visit_rows(
                turn * BM, for_k, for_v, own, values, q, grad, key, batch, head, first, stop, scale, constants, masked,
                dropped, softcap, sizes, kind, True,
            )  # fmt: skip
    write_keys(to_k, for_k, batch, k_head, start, sizes.keys, sizes.depth, BN, D)
    if kind.valued:
        write_keys(to_v, for_v, batch, k_head, start, sizes.keys, sizes.value_depth, BN, DV)
