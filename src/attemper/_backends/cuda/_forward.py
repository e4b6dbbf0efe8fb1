"""The forward pass in Triton: output and statistics, on any GPU that Triton supports.

Scores are kept as exponents of 2. The State (see `attemper._state`) of a block of rows grows tile by tile. A block of
which a row ends in a number that is not finite is marked, and a second kernel computes marked blocks again, with care:
0 · NaN is NaN, and what a hidden key holds must not reach a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._finish import finish
from ._state import MOMENTS, Known, State, fresh, visit
from ._tile import (
    BAND,
    LOG2E,
    NO_MASK,
    draws_of_rows,
    far_apart,
    is_over,
    load_rows,
    mask_rows,
    open_rows,
    place_of_rows,
    range_of_band,
    range_of_block,
    rows_of_head,
    sizes_of,
)
from ._weigh import (
    Sums,
    add_any_tile,
    add_tile,
    add_values,
    close,
    look,
    opened,
    opening_of,
    reference_of,
    start_of_end,
    visible,
)


@triton.jit
def open_block(begin, batch, head, first, stop, scale, sizes, masked, dropped, kind: tl.constexpr):
    """The rows of a block, and what their scores need."""
    BM: tl.constexpr = kind.rows
    if kind.stacked:
        rows = open_rows(begin, batch, head, first, stop, sizes, BM, kind.bounded)
        factor = tl.load(scale + batch * sizes.scale_batch + rows.head * sizes.scale_head, mask=rows.there, other=0.0)
    else:
        rows = rows_of_head(begin, batch, head, first, stop, sizes, BM, kind.bounded)
        factor = tl.load(scale + batch * sizes.scale_batch + head * sizes.scale_head)
    draw_low = tl.zeros([BM], tl.uint32)
    draw_high = tl.zeros([BM], tl.uint32)
    if kind.dropout:
        draw_low, draw_high = draws_of_rows(dropped, rows, sizes)
    return rows, Known(factor * LOG2E, mask_rows(masked, rows, kind.mask), draw_low, draw_high)


@triton.jit
def place_of_block(block, sizes):
    """The batch entry and the (first) head of a block, and which of their blocks it is."""
    turn = block % sizes.blocks
    unit = block // sizes.blocks
    stacks = sizes.heads // sizes.stack
    return unit // stacks, unit % stacks * sizes.stack, turn


@triton.jit
def forward_kernel(
    q, k, v, q_copy, k_copy, v_copy, out_copy, first, stop, scale, sinks, softcap, masked, dropped, sizes, out, wide,
    fields, mark, partial, kind: tl.constexpr,
):  # fmt: skip
    """A block of rows against all keys that any of them sees, or against one split of them."""
    sizes = sizes_of(sizes, not kind.bounded)
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    D: tl.constexpr = kind.depth
    program = tl.program_id(0)
    split = 0
    if kind.split:
        split = program % sizes.splits
        program = program // sizes.splits
    # Late rows first: under a causal mask they see most. Neighbours in time share their keys.
    unit = program // sizes.blocks
    turn = (unit + 1) * sizes.blocks - 1 - program
    block = unit * sizes.blocks + turn
    stacks = sizes.heads // sizes.stack
    batch, head = unit // stacks, unit % stacks * sizes.stack
    k_head = head // sizes.group
    rows, known = open_block(turn * kind.rows, batch, head, first, stop, scale, sizes, masked, dropped, kind)
    if kind.copied:
        own = q_copy.load([batch, head, turn * kind.rows, 0]).reshape([kind.rows, D])
    else:
        own = load_rows(q, rows, sizes.depth, D)
    if not kind.stacked and (kind.bounded == 0 or kind.bounded == BAND):
        least, most, clear, clear_stop = range_of_band(turn * kind.rows, sizes, BM, kind.bounded)
    else:
        least, most, clear, clear_stop = range_of_block(rows, sizes.keys)
    if kind.split:
        share = tl.cdiv(tl.cdiv(sizes.keys, sizes.splits), BN) * BN
        least, most = tl.maximum(least, split * share), tl.minimum(most, (split + 1) * share)
    least = least // BN * BN
    state, keep = fresh(kind.rows, kind.value_depth), 1.0
    if kind.softcap or kind.mask != NO_MASK or kind.dropout:
        for start in tl.range(least, most, BN):
            state = visit(
                state, start, own, k, v, k_head, rows, known, masked, dropped, softcap, sizes, kind, False
            )  # fmt: skip
    else:
        # Whole tiles that all rows see go without a mask.
        clear_stop = tl.minimum(clear_stop, most)
        inner = tl.minimum(tl.maximum(tl.cdiv(clear, BN) * BN, least), most)
        end = tl.maximum(clear_stop // BN * BN, inner)
        if far_apart(k, v, BN):
            end = inner
        # Rows are weighed by what they see of one tile, in which each sees a key, or else of all tiles.
        top, total, opening = state.maximum, state.total, state.total
        if kind.merged and kind.opens:
            # Of the first tile, when it is there.
            reference = total
        else:
            if kind.shared:
                # Without a loop: in one the compiler takes more registers, also for the loops that follow.
                at = tl.maximum(tl.minimum(clear, most - 1), 0) // BN * BN
                until = at + BN
                top, total, opening = look(
                    at, top, total, opening, own, k, k_copy, k_head, rows, known.factor, sizes, kind
                )  # fmt: skip
            else:
                clear = tl.maximum(clear, least)
                at = tl.where(clear < clear_stop, clear // BN * BN, least)
                until = tl.where(clear < clear_stop, at + BN, most)
                for start in tl.range(at, until, BN):
                    top, total, opening = look(
                        start, top, total, opening, own, k, k_copy, k_head, rows, known.factor, sizes, kind
                    )  # fmt: skip
            count = visible(rows, tl.maximum(at, least), tl.minimum(until, most))
            reference = reference_of(top, total, count, kind)
        middle = reference
        FINE: tl.constexpr = k.data.dtype.element_ty == tl.float32
        if FINE:
            # How far from it the mean of that tile is: about this less cancels of what the moments are made of, and
            # 32 bits show it.
            middle = total / tl.maximum(count, 1.0) - reference
        zero = tl.zeros([BM, 4 * kind.across], tl.float32)
        sums, weighted = Sums(zero, zero, zero, zero, zero, zero - float("inf")), state.weighted
        if kind.merged:
            for start in tl.range(least, most, BN):
                sums, weighted, reference, opening = add_any_tile(
                    sums, weighted, reference, opening, start, inner, end, own, k, v, k_copy, v_copy, k_head, rows,
                    known.factor, sizes, kind,
                )  # fmt: skip
        else:
            before = tl.cdiv(inner - least, BN)
            ends = before + tl.cdiv(tl.maximum(most - end, 0), BN)
            # In 32 bits as far as the next product, so that pairs of them need not be taken apart and put together.
            power = tl.zeros([BM, BN], tl.float32 if kind.late else k.data.dtype.element_ty)
            for i in tl.range(0, ends):
                sums, weighted, power = add_tile(
                    sums, weighted, power, reference, middle, start_of_end(i, before, least, end, BN),
                    start_of_end(tl.maximum(i - 1, 0), before, least, end, BN),
                    own, k, v, k_copy, v_copy, k_head, rows, known.factor, sizes, kind, True,
                )  # fmt: skip
            # Where nothing is behind the weights are 0.
            behind = tl.where(ends > 0, start_of_end(ends - 1, before, least, end, BN), least)
            for start in tl.range(inner, end, BN):
                sums, weighted, power = add_tile(
                    sums, weighted, power, reference, middle, start, tl.where(start == inner, behind, start - BN),
                    own, k, v, k_copy, v_copy, k_head, rows, known.factor, sizes, kind, False,
                )  # fmt: skip
            if kind.late:
                behind = tl.where(inner < end, end - BN, behind)
                weighted = add_values(weighted, power, behind, v, v_copy, k_head, rows, sizes, kind, True)
        state, keep = close(sums, weighted, reference, middle, opening, visible(rows, least, most), kind, FINE)
        if kind.measure >= MOMENTS and not kind.summed and not kind.opens:
            state = opened(state, own, k, k_head, rows, known.factor, sizes)
    if kind.split:
        leave(state, partial, block, split, sizes, kind)
    else:
        finish(state, keep, rows, sizes, sinks, out, out_copy, wide, fields, mark, block, kind, False)


@triton.jit(do_not_specialize=("blocks",))
def careful_kernel(
    q, k, v, first, stop, scale, sinks, softcap, masked, dropped, sizes, out, wide, fields, mark, blocks,
    kind: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of some blocks those that are marked."""
    sizes = sizes_of(sizes, False)
    begin = tl.program_id(0) * SPAN
    if is_over(mark, begin, blocks, SPAN):
        return
    for block in tl.range(begin, tl.minimum(begin + SPAN, blocks)):
        if tl.load(mark + block) != 0:
            batch, head, turn = place_of_block(block, sizes)
            rows, known = open_block(turn * kind.rows, batch, head, first, stop, scale, sizes, masked, dropped, kind)
            own = load_rows(q, rows, sizes.depth, kind.depth)
            least, most, _clear, _clear_stop = range_of_block(rows, sizes.keys)
            state = fresh(kind.rows, kind.value_depth)
            for start in tl.range(least // kind.keys * kind.keys, most, kind.keys):
                state = visit(
                    state, start, own, k, v, head // sizes.group, rows, known, masked, dropped, softcap, sizes, kind,
                    True,
                )  # fmt: skip
            finish(state, 1.0, rows, sizes, sinks, out, out, wide, fields, mark, block, kind, True)


PARTS: tl.constexpr = tl.constexpr(10)


@triton.jit
def leave(state, partial, block, split, sizes, kind: tl.constexpr):
    """Keep the State over one split of the keys."""
    BM: tl.constexpr = kind.rows
    DV: tl.constexpr = kind.value_depth
    base = partial + (block.to(tl.int64) * sizes.splits + split) * (BM * (PARTS + DV))
    row = tl.arange(0, BM)
    for i in tl.static_range(PARTS):
        part = state[i]
        if i == 8:
            part = part.to(tl.float32, bitcast=True)
        tl.store(base + i * BM + row, part)
    if kind.valued:
        component = tl.arange(0, DV)
        place = PARTS * BM + row[:, None] * DV + component[None, :]
        tl.store(base + place, state.weighted)


@triton.jit
def merge_kernel(
    first, stop, scale, sinks, masked, dropped, sizes, out, wide, fields, mark, partial, kind: tl.constexpr
):  # fmt: skip
    """Merge the States of all splits of a block of rows, and finish it."""
    sizes = sizes_of(sizes, not kind.bounded)
    BM: tl.constexpr = kind.rows
    DV: tl.constexpr = kind.value_depth
    block = tl.program_id(0)
    batch, head, turn = place_of_block(block, sizes)
    rows, _known = open_block(turn * BM, batch, head, first, stop, scale, sizes, masked, dropped, kind)
    row = tl.arange(0, BM)
    component = tl.arange(0, DV)
    state = fresh(BM, DV)
    for split in tl.range(0, sizes.splits):
        base = partial + (block.to(tl.int64) * sizes.splits + split) * (BM * (PARTS + DV))
        maximum = tl.load(base + row)
        total = tl.load(base + BM + row)
        best = tl.maximum(state.maximum, maximum)
        reference = tl.where(best == float("-inf"), 0.0, best)
        ours = tl.where(state.total > 0, state.maximum - reference, float("-inf"))
        theirs = tl.where(total > 0, maximum - reference, float("-inf"))
        keep, take = tl.exp2(ours), tl.exp2(theirs)
        tilt = (state.tilt + tl.where(state.total > 0, ours, 0.0) * state.total) * keep
        tilt += (tl.load(base + 2 * BM + row) + tl.where(total > 0, theirs, 0.0) * total) * take
        squares = state.squares * keep * keep + tl.load(base + 3 * BM + row) * take * take
        here, tile_mean = tl.load(base + 4 * BM + row), tl.load(base + 5 * BM + row)
        whole = tl.maximum(state.count + here, 1.0)
        gap = tl.where((state.count > 0) & (here > 0) & (tile_mean != state.mean), tile_mean - state.mean, 0.0)
        spread = state.spread + tl.load(base + 6 * BM + row) + gap * gap * state.count * (here / whole)
        mean = state.mean * (state.count / whole) + tile_mean * (here / whole)
        highest = tl.maximum(state.highest, tl.load(base + 7 * BM + row))
        where = tl.load(base + 8 * BM + row).to(tl.int32, bitcast=True)
        score = tl.load(base + 9 * BM + row)
        opening_score = tl.where(where < state.opening, score, state.opening_score)
        weighted = state.weighted
        if kind.valued:
            place = PARTS * BM + row[:, None] * DV + component[None, :]
            weighted = weighted * keep[:, None] + tl.load(base + place) * take[:, None]
        state = State(
            best, state.total * keep + total * take, tilt, squares, state.count + here, mean, spread, highest,
            tl.minimum(state.opening, where), opening_score, weighted, state.awry,
        )  # fmt: skip
    finish(state, 1.0, rows, sizes, sinks, out, out, wide, fields, mark, block, kind, False)


@triton.jit
def opening_kernel(q, k, first, stop, scale, sizes, fields, kind: tl.constexpr):
    """The weight of the first key that a row sees, beside a kernel that gives the logsumexp."""
    sizes = sizes_of(sizes, False)
    BM: tl.constexpr = kind.rows
    batch, head, turn = place_of_block(tl.program_id(0), sizes)
    rows = rows_of_head(turn * BM, batch, head, first, stop, sizes, BM, kind.bounded)
    row, there, seen = place_of_rows(rows, sizes), rows.there, rows.low < rows.high
    logsumexp = tl.load(fields.logsumexp + row, mask=there, other=0.0)
    own = load_rows(q, rows, sizes.depth, kind.depth)
    score = opening_of(own, k, head // sizes.group, rows, sizes, kind.depth)
    score *= tl.load(scale + batch * sizes.scale_batch + head * sizes.scale_head)
    tl.store(fields.first_key_weight + row, tl.where(seen, tl.exp2((score - logsumexp) * LOG2E), 0.0), mask=there)
