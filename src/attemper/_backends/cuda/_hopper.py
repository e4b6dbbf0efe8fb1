# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""Attention for Hopper GPUs: one pass with its statistics, written in Triton's Gluon dialect.

A block of threads is one warp that copies (the producer) and two or three warpgroups that compute (the consumers), 64
query rows each. The producer takes items, blocks of query rows of one head, from a counter in memory until none is
left, says what they are in a mailbox, and keeps rings of tiles of K and V full. A consumer starts QKᵀ of a tile and PV
of the tile before, then takes the softmax; consumers start their products in turn, so that while one exponentiates,
another multiplies. At the end of an item it starts QKᵀ of the next before it writes what it found.

The exponent has a fixed reference, per row the largest score of the first tile in which the row sees a key, and nothing
is ever rescaled. Where that was a bad choice (a later score more than 60 powers of two above) and wherever a number is
not finite, the 64 rows are flagged, and somebody else has to compute them again.

Scores are counted in powers of two: x = s·scale·log₂e − reference, p = 2ˣ, and the statistics follow from Σp, Σp·x, Σp²
and max p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._operator import COUNTS
from ._hopper_supply import (
    _BAND,
    _DTYPES,
    _FIRST_PER_BATCH,
    _HIDDEN,
    _LETTER,
    _M,
    _STOP_PER_BATCH,
    ROWS,
    Configuration,
    _added,
    _advance,
    _bounds,
    _halves,
    _of_head,
    _open,
    _own_sum,
    _pass,
    _producer,
    _read,
    _rings,
    _shown,
    described,
    processors,
    scale_choices,
    together_in_cache,
)
from ._ready import copyable, launch

if TYPE_CHECKING:
    from .._operator import Call

# Renamed in Triton 3.9.
_copy_out = getattr(tma, "async_store" if hasattr(tma, "async_store") else "async_copy_shared_to_global")

FIELDS = (
    "logsumexp", "max_logit", "largest_weight", "expected_score", "entropy", "collision", "output_norm", "score_mean",
    "score_std", "max_qk", "first_key_weight", "sink_mass", "visible_keys", "nonfinite",
)  # fmt: skip
"""What this kernel measures, in the order of the lowest bits of its `choices`."""

# Numbers that are not finite are all found from level 2 on.
_LEVELS = dict(zip(FIELDS, (0, 1, 1, 2, 2, 2, 2, 3, 3, 1, 3, 0, 0, 2), strict=True))

_LN_2 = gl.constexpr(0.6931471805599453)
_NO_REFERENCE = gl.constexpr(2.0**120)
"""Of a row that saw no key yet. Against it every score weighs 0, and so does Σp·x, which an infinity would spoil."""
_REFERENCE_LIMIT = gl.constexpr(2.0**70)
_SUM_LIMIT = gl.constexpr(2.0**60)
_FAR_MEAN = gl.constexpr(2.0**8)
"""Squared distance of a mean from what its sums were taken about, in variances, up to which enough digits are left."""
_SCALE_LIMIT = gl.constexpr(2.0**20)
"""Within it, and within its inverse, _HIDDEN times the scale is a float32 and beyond _REFERENCE_LIMIT."""

# More bits of `choices`: what is there, and along which axes; the rest are in `_hopper_supply`.
_WIDE = gl.constexpr(1 << 14)
_SINKS = gl.constexpr(1 << 15)
_SINKS_PER_BATCH = gl.constexpr(1 << 18)
_SINKS_PER_HEAD = gl.constexpr(1 << 19)


@gluon.jit
def _own_max(x):
    return gl.max(gl.max(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), axis=1), axis=2)


@gluon.jit
def _column(x, like):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _meets(tile, first, width, N: gl.constexpr):
    """Whether a row sees any key of a tile."""
    return gl.minimum(first + width, (tile + 1) * N) > gl.maximum(first, tile * N)


@gluon.jit
def _joined(left, right):
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _weigh_columns(s, reference, c, sums, DTYPE: gl.constexpr, LEVEL: gl.constexpr, FAR: gl.constexpr):
    """Some columns at a time: the compiler keeps to the order, and fills the time that exponentials take with sums."""
    if s.shape[1] > 8:
        left, right = _halves(s)
        left, sums = _weigh_columns(left, reference, c, sums, DTYPE, LEVEL, FAR)
        right, sums = _weigh_columns(right, reference, c, sums, DTYPE, LEVEL, FAR)
        return _joined(left, right), sums
    else:
        total, tilted, squares, largest, far_moved, far_spread = sums
        x = s * c - gl.expand_dims(gl.convert_layout(reference, gl.SliceLayout(1, s.type.layout)), 1)
        p = gl.exp2(x)
        if FAR:
            far_moved = _added(s, far_moved)
            far_spread = _added(s * s, far_spread)
        total = _added(p, total)
        if LEVEL >= 1:
            # The bits of numbers from 0 on are ordered like integers, of which one instruction compares three.
            left, right = _halves(p.to(gl.int32, bitcast=True))
            of_both = gl.convert_layout(gl.maximum(left, right), largest.type.layout)
            largest = gl.maximum(largest, of_both)
        if LEVEL >= 2:
            tilted = _added(p * x, tilted)
            squares = _added(p * p, squares)
        return p.to(DTYPE), (total, tilted, squares, largest, far_moved, far_spread)


@gluon.jit
def _weigh(s, reference, c, sums, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, LEVEL: gl.constexpr, FAR: gl.constexpr):
    """The weights as the left side of PV, and the sums with theirs; if FAR, also over the scores themselves."""
    p, sums = _weigh_columns(s, reference, c, sums, DTYPE, LEVEL, FAR)
    return gl.convert_layout(p, LAYOUT), sums


@gluon.jit
def _scatter(s, reference, c, near):
    """The sums over the scores of a tile of which a row may not see all, about the reference."""
    moved, spread = near
    x = gl.where(s > _HIDDEN, s * c - gl.expand_dims(reference, 1), 0.0)
    return moved + _own_sum(x), spread + _own_sum(x * x)


@gluon.jit
def _begin(
    slot, mail_phase, stage, phase, q_slot, q_phase, turn_phase, common, post, turns,
    who: gl.constexpr, ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, BOUNDED: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Open the next letter, and start QKᵀ of its first tile."""
    _, _, sizes, shape, _, buffers, barriers = common
    mail, mail_full, mail_empty = post
    q_tiles, k_tiles, _ = buffers
    q_full, _, k_full, _v_full, _empty = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    mbarrier.wait(mail_full.index(slot), mail_phase)
    item = _read(mail, slot * _LETTER)
    tiles, place, c = _open(mail, slot * _LETTER, who, sizes[1], N, BOUNDED)
    mbarrier.arrive(mail_empty.index(slot))
    slot, mail_phase = _advance(slot, mail_phase, 2)
    mbarrier.wait(q_full.index(q_slot * CONSUMERS + who), q_phase)
    q = q_tiles.index(q_slot * CONSUMERS + who).reshape([_M, D])
    q_slot, q_phase = _advance(q_slot, q_phase, ITEMS)
    zero = gl.zeros([_M, N], gl.float32, S)
    if BOUNDED:
        skipped = gl.where(item < shape[5], tiles[1] - tiles[3], 0)
        stage, phase, turn_phase = _pass(
            skipped, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES, True
        )
    mbarrier.wait(k_full.index(stage), phase)
    if VALUES:
        mbarrier.wait(turns.index(who), turn_phase)
        turn_phase ^= 1
    k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if VALUES:
        mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
    return s, item, tiles, place, c, slot, mail_phase, stage, phase, q_slot, q_phase, turn_phase


@gluon.jit
def _log2(x):
    """Of numbers far from 0 and infinity, to 22 bits behind the point."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _opening(s):
    """The scores of a tile's first key, as bits: each with one of the four threads that share a row."""
    first = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)) == 0
    return _own_sum(gl.where(gl.expand_dims(first, 0), s.to(gl.int32, bitcast=True), 0))


@gluon.jit
def _consumer(
    given,
    who: gl.constexpr, ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr,
):  # fmt: skip
    common, post, turns, results = given
    _, limits, sizes, shape, choices, buffers, barriers = common
    o_desc, o_tiles, wide_ptr, field_ptrs, count_ptrs, flags, sinks_ptr = results
    queries, keys = sizes
    heads = shape[0]
    items = shape[5]
    q_tiles, k_tiles, v_tiles = buffers
    _q_full, q_empty, k_full, v_full, empty = barriers
    DTYPE: gl.constexpr = q_tiles.dtype
    # Where the scores lie, the accumulator of the output, the weights as its left side, and rows.
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    R: gl.constexpr = gl.SliceLayout(1, S)
    zero = gl.zeros([_M, N], gl.float32, S)
    nothing = gl.zeros_like(_own_sum(zero))
    slot = 0
    mail_phase = 0
    stage = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    turn_phase = 1 if who == 0 else 0
    s, item, tiles, place, c, slot, mail_phase, stage, phase, q_slot, q_phase, turn_phase = _begin(
        slot, mail_phase, stage, phase, q_slot, q_phase, turn_phase, common, post, turns,
        who, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES,
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=(s,))
    while item < items:
        lowest, _highest, low, high, free_low, free_high = tiles
        batch, head, row = place
        pair = batch * heads + head
        rows = row + gl.arange(0, _M, R)
        if BOUNDED:
            first, stop = _bounds(limits, batch, rows, sizes, choices)
            width = stop - first
            sees = width > 0
        else:
            first = gl.zeros([_M], gl.int32, R)
            width = first + keys
            sees = rows < queries

        of_item = (q_slot + ITEMS - 1) % ITEMS * CONSUMERS + who
        q = q_tiles.index(of_item).reshape([_M, D])
        o = gl.zeros([_M, D], gl.float32, A)
        sums = (nothing, nothing, nothing, nothing.to(gl.int32), nothing, nothing)
        # Sums over the scores themselves, not weighed: of tiles looked at row by row about the reference, so that a row
        # of one key has a variance of 0, and of those of which all rows see all, cheaper, of q·k about 0.
        near = (nothing, nothing)
        tile = high - 1
        # Of this tile of K, and of the tile of V before it.
        mbarrier.arrive(empty.index(stage))
        opening = nothing.to(gl.int32)
        if LEVEL >= 3:
            opening = _opening(s)
        s = _shown(s, tile, first, width, N)
        reference = gl.max(s, axis=1) * c
        if BOUNDED:
            reference = gl.where(_meets(tile, first, width, N), reference, _NO_REFERENCE)
        if LEVEL >= 3:
            near = _scatter(s, reference, c, near)
        p, sums = _weigh(s, reference, c, sums, DTYPE, P, LEVEL, False)
        v_stage = stage
        v_phase = phase
        stage, phase = _advance(stage, phase, STAGES)
        for step in range(1, high - low):
            mbarrier.wait(k_full.index(stage), phase)
            if VALUES:
                mbarrier.wait(turns.index(who), turn_phase)
                turn_phase ^= 1
            k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
            s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            if VALUES:
                mbarrier.wait(v_full.index(v_stage), v_phase)
                o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
                mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
            s = warpgroup_mma_wait(1 if VALUES else 0, deps=(s,))
            tile = high - 1 - step
            slow = False
            if LEVEL >= 3:
                opening = _opening(s)
            if BOUNDED:
                slow = (tile < free_low) | (tile >= free_high)
            if BOUNDED and slow:
                s = _shown(s, tile, first, width, N)
                new = (reference == _NO_REFERENCE) & _meets(tile, first, width, N)
                reference = gl.where(new, gl.max(s, axis=1) * c, reference)
                if LEVEL >= 3:
                    near = _scatter(s, reference, c, near)
                    # Here and there, and not once for both: what fills the time of exponentials must not lie beyond a
                    # branch.
                    p, sums = _weigh(s, reference, c, sums, DTYPE, P, LEVEL, False)
            elif LEVEL >= 3:
                p, sums = _weigh(s, reference, c, sums, DTYPE, P, LEVEL, True)
            if LEVEL < 3:
                p, sums = _weigh(s, reference, c, sums, DTYPE, P, LEVEL, False)
            if VALUES:
                o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(empty.index(stage))
            v_stage = stage
            v_phase = phase
            stage, phase = _advance(stage, phase, STAGES)
        mbarrier.arrive(q_empty.index(of_item))
        if VALUES:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
        if BOUNDED:
            stage, phase, turn_phase = _pass(
                low - lowest, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES, True
            )
        good = (c < _SCALE_LIMIT) & (c > 1 / _SCALE_LIMIT)
        of_next = _begin(
            slot, mail_phase, stage, phase, q_slot, q_phase, turn_phase, common, post, turns,
            who, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES,
        )  # fmt: skip
        next_s, item, tiles, place, next_c, slot, mail_phase, stage, phase, q_slot, q_phase, turn_phase = of_next

        # What is not a number fails every comparison. A row that sees nothing has nothing to fail.
        total, tilted, squares, largest, far_moved, far_spread = sums
        total = gl.convert_layout(gl.sum(total, axis=1), R)
        good = good & (total < _SUM_LIMIT) & (total > 1 / _SUM_LIMIT) & (gl.abs(reference) < _REFERENCE_LIMIT)
        inverse = 1.0 / total
        log_total = _log2(total)
        logsumexp = reference + log_total
        there = rows < queries
        at = pair.to(gl.int64) * queries + rows
        (
            lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
            qk_ptr, opening_ptr, sink_ptr,
        ) = field_ptrs  # fmt: skip
        visible_ptr, nonfinite_ptr = count_ptrs
        infinity = float("inf")
        lse = gl.where(sees, logsumexp * _LN_2, -infinity)
        gl.store(lse_ptr + at, lse, mask=there & ((choices & 1) > 0))
        gl.store(visible_ptr + at, width.to(gl.int64), mask=there & ((choices & 4096) > 0))
        # Rows that are not sound are computed again, and counted then.
        gl.store(nonfinite_ptr + at, gl.zeros([_M], gl.int64, R), mask=there & ((choices & 8192) > 0))
        share = inverse
        mass = gl.zeros([_M], gl.float32, R)
        if (choices & _SINKS) > 0:
            sink = _of_head(sinks_ptr, batch, head, heads, choices, _SINKS_PER_BATCH, _SINKS_PER_HEAD)
            gap = sink - gl.where(sees, logsumexp, -infinity)
            # Two logistics of the difference, which neither side can overflow.
            share *= 1.0 / (1.0 + gl.exp2(gap))
            mass = gl.where(gap > -infinity, 1.0 / (1.0 + gl.exp2(-gap)), 0.0)
        gl.store(sink_ptr + at, mass, mask=there & ((choices & 2048) > 0))
        if LEVEL >= 1:
            weight = gl.convert_layout(gl.max(largest, axis=1).to(gl.float32, bitcast=True), R)
            highest_score = gl.where(sees, (reference + _log2(weight)) * _LN_2, -infinity)
            gl.store(max_ptr + at, highest_score, mask=there & ((choices & 2) > 0))
            gl.store(weight_ptr + at, gl.where(sees, weight * inverse, 0.0), mask=there & ((choices & 4) > 0))
            gl.store(qk_ptr + at, highest_score, mask=there & ((choices & 512) > 0))
        if LEVEL >= 2:
            tilt = gl.convert_layout(gl.sum(tilted, axis=1), R) * inverse
            # A score at −inf has weight 0 and makes this NaN. (Below this level it goes by unseen: what is measured
            # there is right all the same.)
            good &= gl.abs(tilt) < _REFERENCE_LIMIT
            mean = gl.where(sees, (reference + tilt) * _LN_2, 0.0)
            gl.store(expected_ptr + at, mean, mask=there & ((choices & 8) > 0))
            entropy = gl.where(sees, gl.maximum(log_total - tilt, 0.0) * _LN_2, 0.0)
            gl.store(entropy_ptr + at, entropy, mask=there & ((choices & 16) > 0))
            collision = gl.convert_layout(gl.sum(squares, axis=1), R) * inverse * inverse
            gl.store(collision_ptr + at, gl.where(sees, collision, 0.0), mask=there & ((choices & 32) > 0))
        if LEVEL >= 3:
            moved, spread = near
            count = gl.maximum(width, 1).to(gl.float32)
            far_keys = gl.maximum(gl.minimum(free_high, high - 1) - gl.maximum(free_low, low), 0).to(gl.float32) * N
            far_count = gl.maximum(far_keys, 1.0)
            far_share = gl.minimum(far_keys / count, 1.0)
            far_mean = gl.convert_layout(gl.sum(far_moved, axis=1), R) * c / far_count
            around = gl.convert_layout(gl.sum(far_spread, axis=1), R) * (c * c) / far_count
            far_variance = around - far_mean * far_mean
            near_count = gl.maximum(count - far_keys, 1.0)
            shift = gl.convert_layout(gl.sum(moved, axis=1), R) / near_count
            near_variance = gl.convert_layout(gl.sum(spread, axis=1), R) / near_count - shift * shift
            between = reference + shift - far_mean
            variance = near_variance + far_share * (far_variance - near_variance)
            variance = gl.maximum(variance + between * between * (far_share * (1 - far_share)), 0.0)
            # Where a mean is too far from what its sums were taken about, digits are lost.
            off = gl.maximum(shift * shift * (1 - far_share), far_mean * far_mean * far_share)
            good &= off <= variance * _FAR_MEAN + 2.0**-12
            score_mean = gl.where(sees, (reference + shift - between * far_share) * _LN_2, 0.0)
            gl.store(mean_ptr + at, score_mean, mask=there & ((choices & 128) > 0))
            score_std = gl.where(sees, gl.sqrt(variance) * _LN_2, 0.0)
            gl.store(std_ptr + at, score_std, mask=there & ((choices & 256) > 0))
            # Of all rows the first key is the last tile's first.
            bits = gl.convert_layout(gl.sum(opening, axis=1), R)
            first_weight = gl.exp2(bits.to(gl.float32, bitcast=True) * c - logsumexp)
            gl.store(opening_ptr + at, gl.where(sees, first_weight, 0.0), mask=there & ((choices & 1024) > 0))
        if VALUES:
            o = o * _column(share, o)
            if BOUNDED:
                o = gl.where(_column(sees, o), o, 0.0)
            norm = gl.convert_layout(gl.sum(_own_sum(o * o), axis=1), R)
            # float16 ends at 65504, and a norm below that says that no entry was rounded beyond.
            good &= norm < (2.0**31 if gl.float16 == DTYPE else 2.0**120)
            if LEVEL >= 2:
                # Squares of very small numbers are 0.
                tiny = gl.convert_layout(gl.max(_own_max(gl.abs(o)), axis=1), R)
                good &= (tiny > 2.0**-50) | (tiny == 0.0)
                gl.store(norm_ptr + at, gl.sqrt(norm), mask=there & ((choices & 64) > 0))
            if (choices & _WIDE) > 0:
                wide_rows = row + gl.arange(0, _M, gl.SliceLayout(1, A))
                start = wide_ptr + batch * o_desc.strides[0] + head * o_desc.strides[1]
                places = gl.expand_dims(wide_rows.to(gl.int64) * o_desc.strides[2], 1)
                places += gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, A)), 0)
                gl.store(start + places, o, mask=gl.expand_dims(wide_rows < queries, 1))
            tma.store_wait(0)
            o_tiles.index(who).reshape([_M, D]).store(o.to(DTYPE))
            fence_async_shared()
            _copy_out(o_desc, [batch, head, row, 0], o_tiles.index(who))
        flag = flags + pair.to(gl.int64) * gl.cdiv(queries, _M) + row // _M
        gl.store(flag + gl.zeros_like(rows), gl.full_like(rows, 1), mask=sees & there & (good ^ True))
        c = next_c
        s = warpgroup_mma_wait(0, deps=(next_s,))
    if VALUES:
        tma.store_wait(0)


_NUMBERS = (
    "queries", "keys", "low", "high", "heads", "ratio", "blocks", "pairs", "together", "items", "choices",
)  # fmt: skip
_POINTERS = (
    "scale_ptr", "sinks_ptr", "first_ptr", "stop_ptr", "wide_ptr", "flags", "counter",
    "lse_ptr", "max_ptr", "weight_ptr", "expected_ptr", "entropy_ptr", "collision_ptr", "norm_ptr", "mean_ptr",
    "std_ptr", "qk_ptr", "opening_ptr", "sink_ptr", "visible_ptr", "nonfinite_ptr",
)  # fmt: skip


# One kernel for all numbers and pointers, whatever divides them.
@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    q_desc, k_desc, v_desc, o_desc, scale_ptr, sinks_ptr, first_ptr, stop_ptr, wide_ptr,
    lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
    qk_ptr, opening_ptr, sink_ptr, visible_ptr, nonfinite_ptr, flags, counter,
    queries, keys, low, high, heads, ratio, blocks, pairs, together, items, choices,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr,
):  # fmt: skip
    buffers, barriers, post = _rings(q_desc, k_desc, v_desc, ITEMS, CONSUMERS, D, N, STAGES, VALUES)
    q_tiles = buffers[0]
    o_tiles = q_tiles
    if VALUES:
        o_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, _M, D], o_desc.layout)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    sizes = (queries, keys)
    shape = (heads, ratio, blocks, pairs, together, items)
    limits = (first_ptr, stop_ptr, low, high)
    field_ptrs = (
        lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
        qk_ptr, opening_ptr, sink_ptr,
    )  # fmt: skip
    count_ptrs = (visible_ptr, nonfinite_ptr)
    common = (scale_ptr, limits, sizes, shape, choices, buffers, barriers)
    inputs = (q_desc, k_desc, v_desc, q_desc, q_tiles)
    results = (o_desc, o_tiles, wide_ptr, field_ptrs, count_ptrs, flags, sinks_ptr)
    given = (common, post, turns, results)
    supply = (common, post, inputs, counter)
    # A variable would make tensors of the constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_consumer, (given, 1, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_producer, (supply, ITEMS, CONSUMERS, N, STAGES, BOUNDED, VALUES, False)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_consumer, (given, 1, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_consumer, (given, 2, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_producer, (supply, ITEMS, CONSUMERS, N, STAGES, BOUNDED, VALUES, False)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )


def configuration(head_dim: int, level: int, *, bounded: bool, values: bool) -> Configuration:
    """What measured best."""
    if not values:
        # Whose products are short beside the softmax: while one block waits, the other goes on.
        if head_dim == 128:
            return Configuration(resident=2, items=1, consumers=2, keys=64, stages=4, registers=104)
        return Configuration(resident=2, items=2, consumers=2, keys=64, stages=8, registers=104)
    if head_dim == 128:
        return Configuration(resident=1, items=2, consumers=2, keys=128, stages=2, registers=240)
    if level == 3 and bounded:
        # Three consumers have too few registers for all that.
        return Configuration(resident=1, items=2, consumers=2, keys=128, stages=4, registers=240)
    return Configuration(resident=1, items=2, consumers=3, keys=128, stages=4, registers=160)


def takes(call: Call) -> bool:
    """Whether a call is one for this kernel."""
    q, k, v = call.q, call.k, call.v
    operands = [x for x in (q, k, v) if x is not None]
    if call.mask is not None or call.softcap is not None or call.dropout_p or q.dtype not in _DTYPES:
        return False
    if not q.is_cuda or any(x.dtype != q.dtype or x.shape[-1] != q.shape[-1] for x in operands):
        return False
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    return (
        head_dim in (64, 128)
        and min(batch, heads, k.shape[1]) > 0
        and ROWS <= queries < 2**29
        and ROWS <= keys < 2**29
        and batch * heads * (queries // ROWS + 1) < 2**30
        and all(copyable(x) for x in operands)
        and processors(q.device.index) > 0
    )


def _rows(x: Tensor | None, default: int, call: Call) -> Tensor:
    """Bounds as the kernel reads them: (batch or 1, queries), one after the other."""
    queries = call.q.shape[2]
    if x is None:
        return torch.full((1, queries), default, dtype=torch.int64, device=call.q.device)
    if x.shape[0] > 1 and x.stride(0) == 0:
        x = x[:1]
    return x.to(call.q.device).expand(x.shape[0], queries).contiguous()


def forward(call: Call, output: Tensor | None, wide: Tensor | None, fields: dict[str, Tensor], flags: Tensor) -> None:
    """Fill the output, the same in float32 (`wide`), the fields and one flag per 64 query rows of each (batch, head).

    Where a flag is 1, all else of these rows has to be computed again by other means. `fields` has names of FIELDS,
    each (batch, heads, queries). `wide` is laid out as the output. Without values there is no output. The flags come as
    zeros, with one number more at their end, by which the kernel counts. "first_key_weight" can be among the fields
    where all rows begin at the first key.
    """
    q, k, v = call.q, call.k, call.v
    if output is not None and not (copyable(output) and (wide is None or wide.stride() == output.stride())):
        # Through memory that the copy engine writes; nobody has asked for this yet.
        staged = torch.empty_like(output, memory_format=torch.contiguous_format)
        staged_wide = None if wide is None else torch.empty_like(wide, memory_format=torch.contiguous_format)
        forward(call, staged, staged_wide, fields, flags)
        output.copy_(staged)
        if wide is not None and staged_wide is not None:
            wide.copy_(staged_wide)
        return
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    # Four kernels: what everybody needs, what a gradient needs, sums over the weights, and over the scores too.
    level = max((_LEVELS[name] for name in fields), default=0)
    band = call.band
    bounded = band is not None or call.first is not None or call.stop is not None
    choice = configuration(head_dim, level, bounded=bounded, values=v is not None)
    low, high = (0, 0) if band is None else band
    scale = call.scale.contiguous()
    sinks = scale if call.sinks is None else call.sinks.contiguous()
    first = stop = flags
    if bounded and band is None:
        first, stop = _rows(call.first, 0, call), _rows(call.stop, keys, call)
    choices = scale_choices(scale) + sum(1 << bit for bit, name in enumerate(FIELDS) if name in fields)
    for there, bit in (
        (wide is not None, _WIDE),
        (call.sinks is not None, _SINKS),
        (sinks.shape[0] > 1, _SINKS_PER_BATCH),
        (sinks.shape[1] > 1, _SINKS_PER_HEAD),
        (band is not None, _BAND),
        (bounded and band is None and first.shape[0] > 1, _FIRST_PER_BATCH),
        (bounded and band is None and stop.shape[0] > 1, _STOP_PER_BATCH),
    ):
        choices |= bit.value if there else 0
    pairs = batch * heads
    blocks = -(-queries // (ROWS * choice.consumers))
    k_desc = described(k, choice.keys)
    q_desc = described(q, ROWS)
    with torch.cuda.device(q.device):
        arguments = (
            q_desc,
            k_desc,
            k_desc if v is None else described(v, choice.keys),
            q_desc if output is None else described(output, ROWS),
            scale,
            sinks,
            first,
            stop,
            scale if wide is None else wide,
            *(fields.get(name, flags if name in COUNTS else scale) for name in FIELDS),
            flags,
            flags[-1:],
            queries,
            keys,
            low,
            high,
            heads,
            call.group,
            blocks,
            pairs,
            together_in_cache(call),
            pairs * blocks,
            choices,
            choice.items,
            choice.consumers,
            head_dim,
            choice.keys,
            choice.stages,
            choice.registers,
            bounded,
            v is not None,
            level,
        )
        # Bounds that are not there are stood in for by something of another type.
        form = (
            q.dtype, head_dim, bounded, v is None, level, first.dtype, scale.dtype, sinks.dtype, q.device
        )  # fmt: skip
        programs = min(pairs * blocks, processors(q.device.index) * choice.resident)
        launch(_kernel, programs, arguments, form=form, num_warps=4, maxnreg=choice.launched)
