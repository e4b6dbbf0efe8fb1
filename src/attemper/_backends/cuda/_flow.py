"""What a backward pass measures, where cuDNN gives the gradients: the sums over dP of each row, and no more."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tile import (
    LOG2E,
    load_keys,
    load_rows,
    open_rows,
    place_of_rows,
    product,
    range_of_block,
    rows_of_head,
    sizes_of,
)


@triton.jit
def dots_kernel(left, right, found, sizes, depth, BM: tl.constexpr, D: tl.constexpr):
    """The products of rows of two matrices."""
    sizes = sizes_of(sizes, False)
    program = tl.program_id(0)
    unit = program // sizes.blocks
    batch, head = unit // sizes.heads, unit % sizes.heads
    rows = rows_of_head(program % sizes.blocks * BM, batch, head, found, found, sizes, BM, False)
    one, other = load_rows(left, rows, depth, D), load_rows(right, rows, depth, D)
    total = tl.sum(one.to(tl.float32) * other.to(tl.float32), 1)
    tl.store(found + place_of_rows(rows, sizes), total, mask=rows.there)


@triton.jit
def visit(
    start, moved, around, weighed, leaning, own, arriving, k, v, k_head, rows, factor, reference, pull, sizes,
    kind: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Add the keys of one tile to the sums."""
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    keys = load_keys(k, rows.batch, k_head, start, sizes.keys, sizes.depth, BN, kind.depth)
    values = load_keys(v, rows.batch, k_head, start, sizes.keys, sizes.value_depth, BN, kind.value_depth)
    scores = product(own, keys.T, tl.zeros([BM, BN], tl.float32), kind)
    power = tl.exp2(scores * factor[:, None] - reference[:, None])
    off = product(arriving, values.T, tl.zeros([BM, BN], tl.float32), kind) - pull[:, None]
    if HIDDEN:
        key = (start + tl.arange(0, BN))[None, :]
        seen = (rows.low[:, None] <= key) & (key < rows.high[:, None])
        power, off = tl.where(seen, power, 0.0), tl.where(seen, off, 0.0)
    pushed = power * off
    moved += tl.sum(off, 1)
    around += tl.sum(off * off, 1)
    weighed += tl.sum(pushed * off, 1)
    leaning += tl.sum(pushed, 1)
    return moved, around, weighed, leaning


@triton.jit
def flow_kernel(
    q, k, v, grad, flow, pull, max_logit, peak, first, stop, scale, sizes, kind: tl.constexpr
):  # fmt: skip
    """Var_p[dP] / Var[dP] of a block of query rows; `pull` is about the mean of dP under the weights."""
    sizes = sizes_of(sizes, True)
    BM: tl.constexpr = kind.rows
    BN: tl.constexpr = kind.keys
    program = tl.program_id(0)
    # Late rows first: under a causal mask they see most.
    turn = sizes.blocks - 1 - program % sizes.blocks
    unit = program // sizes.blocks
    batch, head = unit // sizes.heads, unit % sizes.heads
    k_head = head // sizes.group
    rows = open_rows(turn * BM, batch, head, first, stop, sizes, BM, kind.bounded)
    row, there = place_of_rows(rows, sizes), rows.there
    own, arriving = (
        load_rows(q, rows, sizes.depth, kind.depth),
        load_rows(grad, rows, sizes.value_depth, kind.value_depth),
    )
    factor = tl.load(scale + rows.batch * sizes.scale_batch + rows.head * sizes.scale_head, mask=there, other=0.0)
    factor *= LOG2E
    reference = tl.load(max_logit + row, mask=there, other=0.0) * LOG2E
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    middle = tl.load(pull + row, mask=there, other=0.0)
    least, most, clear, clear_stop = range_of_block(rows, sizes.keys)
    least = least // BN * BN
    # Whole tiles that all rows see go without a mask; then the ends, before and behind them.
    inner = tl.minimum(tl.maximum(tl.cdiv(clear, BN) * BN, least), most)
    end = tl.maximum(tl.minimum(clear_stop, most) // BN * BN, inner)
    moved = tl.zeros([BM], tl.float32)
    around, weighed, leaning = moved, moved, moved
    for start in tl.range(inner, end, BN):
        moved, around, weighed, leaning = visit(
            start, moved, around, weighed, leaning, own, arriving, k, v, k_head, rows, factor, reference, middle, sizes,
            kind, False,
        )  # fmt: skip
    before = tl.cdiv(inner - least, BN)
    behind = tl.cdiv(tl.maximum(most - end, 0), BN)
    for i in tl.range(0, before + behind, num_stages=1):
        start = tl.where(i < before, least + i * BN, end + (i - before) * BN)
        moved, around, weighed, leaning = visit(
            start, moved, around, weighed, leaning, own, arriving, k, v, k_head, rows, factor, reference, middle, sizes,
            kind, True,
        )  # fmt: skip
    count = (rows.high - rows.low).to(tl.float32)
    spread = around - moved * moved / tl.maximum(count, 1.0)
    share = tl.load(peak + row, mask=there, other=0.0)
    # The pull follows from an output that was rounded, and is not quite the mean.
    weighed = tl.maximum(weighed * share - (leaning * share) * (leaning * share), 0.0)
    # NaN where there was nothing to share.
    tl.store(flow + row, tl.where(spread > 0, weighed * count / spread, float("nan")), mask=there)
