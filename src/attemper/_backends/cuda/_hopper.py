# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""Attention for Hopper GPUs: one pass with its statistics, written in Triton's Gluon dialect.

A block of threads is one warp that copies (the producer) and two or three warpgroups that compute (the consumers), 64
query rows each. The producer takes items, blocks of query rows of one head, from a counter in memory until none is
left, says what they are in a mailbox, and keeps rings of tiles of K and V full. A consumer starts QKᵀ of a tile and PV
of the tile before, then takes the softmax; consumers start their products in turn, so that while one exponentiates,
another multiplies.

The exponent has a fixed reference, per row the largest score of the first tile in which the row sees a key, and nothing
is ever rescaled. Where that was a bad choice (a later score more than 60 powers of two above) and wherever a number is
not finite, the 64 rows are flagged, and somebody else has to compute them again.

Scores are counted in powers of two: x = s·scale·log₂e − reference, p = 2ˣ, and the statistics follow from Σp, Σp·x, Σp²
and max p.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from .._operator import Call

ROWS = 64
"""Query rows of a consumer, which are flagged together."""

FIELDS = (
    "logsumexp", "max_logit", "largest_weight", "expected_score", "entropy", "collision", "output_norm", "score_mean",
    "score_std",
)  # fmt: skip
"""What this kernel measures, in the order of the lowest bits of its `choices`."""

_LEVELS = dict(zip(FIELDS, (0, 1, 1, 2, 2, 2, 2, 3, 3), strict=True))

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_CACHED_BYTES = 32 << 20
"""K and V of the heads that are worked on together: what stays in the L2 cache of 50 MiB."""

_M = gl.constexpr(ROWS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_FARTHEST = gl.constexpr(2**30)
"""Beyond all keys: the least of nothing."""
_NO_REFERENCE = gl.constexpr(2.0**120)
"""Of a row that saw no key yet. Against it every score weighs 0, and so does Σp·x, which an infinity would spoil."""
_HIDDEN = gl.constexpr(-(2.0**90))
"""The score, in powers of two, of a key the row does not see: far below all that pass as a reference."""
_REFERENCE_LIMIT = gl.constexpr(2.0**80)
_SUM_LIMIT = gl.constexpr(2.0**60)
_FAR_MEAN = gl.constexpr(2.0**8)
"""Squared distance of the mean score from the reference, in variances, up to which enough digits are left."""
_SCALE_LIMIT = gl.constexpr(2.0**30)
"""Within it, and within its inverse, _HIDDEN divided by the scale is a float32."""

# More bits of `choices`: what is there, and along which axes.
_WIDE = gl.constexpr(1 << 9)
_SINKS = gl.constexpr(1 << 10)
_SCALE_PER_BATCH = gl.constexpr(1 << 11)
_SCALE_PER_HEAD = gl.constexpr(1 << 12)
_SINKS_PER_BATCH = gl.constexpr(1 << 13)
_SINKS_PER_HEAD = gl.constexpr(1 << 14)
_FIRST_PER_BATCH = gl.constexpr(1 << 15)
_STOP_PER_BATCH = gl.constexpr(1 << 16)

_MAIL = gl.constexpr(16)
"""The mailbox: the item, its first tile of keys and the one after its last, and four numbers for each consumer."""


@gluon.jit
def _place(item, blocks, pairs, together, BOUNDED: gl.constexpr):
    """Which (batch, head) and which block of rows an item is."""
    if BOUNDED:
        # Causal rows see the more keys the later they are: those first, so that nobody ends with a long item alone, but
        # only as many heads at a time as the cache holds.
        group = item // (together * blocks)
        size = gl.minimum(together, pairs - group * together)
        rest = item - group * together * blocks
        return group * together + rest % size, blocks - 1 - rest // size
    return item // blocks, item % blocks


@gluon.jit
def _of_head(pointer, batch, head, heads, choices, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr):
    """A number of shape (batch or 1, heads or 1), in powers of two."""
    many = (choices & PER_HEAD) > 0
    place = gl.where((choices & PER_BATCH) > 0, batch, 0) * gl.where(many, heads, 1) + gl.where(many, head, 0)
    return gl.load(pointer + place) * _LOG2_E


@gluon.jit
def _bounds(bound_ptrs, batch, rows, sizes, choices):
    """The keys that some rows see, as int32 within the keys there are; first = stop where a row sees none."""
    first_ptr, stop_ptr = bound_ptrs
    queries, keys = sizes
    inside = rows < queries
    first_row = gl.where((choices & _FIRST_PER_BATCH) > 0, batch, 0).to(gl.int64) * queries
    stop_row = gl.where((choices & _STOP_PER_BATCH) > 0, batch, 0).to(gl.int64) * queries
    first = gl.load(first_ptr + first_row + rows, mask=inside, other=0)
    stop = gl.load(stop_ptr + stop_row + rows, mask=inside, other=0)
    first = gl.minimum(gl.maximum(first, 0), keys).to(gl.int32)
    stop = gl.minimum(gl.maximum(stop, 0), keys).to(gl.int32)
    return first, gl.maximum(stop, first)


@gluon.jit
def _write(mail, place: gl.constexpr, number):
    mail.index(place).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)


@gluon.jit
def _read(mail, place: gl.constexpr):
    return gl.max(mail.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _announce(
    item, batch, row, good, sizes, bound_ptrs, choices, mail,
    CONSUMERS: gl.constexpr, N: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Write the mailbox of an item: which tiles of keys it needs, and between which of them nothing is hidden."""
    lowest = 0
    highest = 0
    if BOUNDED:
        lowest = _FARTHEST
        for who in gl.static_range(CONSUMERS):
            rows = row + who * _M + gl.arange(0, _M, gl.BlockedLayout([2], [32], [1], [0]))
            first, stop = _bounds(bound_ptrs, batch, rows, sizes, choices)
            seen = (stop > first) & good
            least_stop = gl.min(gl.where(seen, stop, _FARTHEST), axis=0)
            last_stop = gl.max(gl.where(seen, stop, 0), axis=0)
            low = gl.min(gl.where(seen, first, _FARTHEST), axis=0) // N
            high = gl.cdiv(last_stop, N)
            # A row whose keys end where the tiles that all see begin has no reference until then: one tile more is
            # looked at row by row.
            late = (least_stop % N == 0) & (last_stop > least_stop)
            _write(mail, 3 + 4 * who, low)
            _write(mail, 4 + 4 * who, high)
            _write(mail, 5 + 4 * who, gl.cdiv(gl.max(gl.where(seen, first, 0), axis=0), N))
            _write(mail, 6 + 4 * who, least_stop // N - late.to(gl.int32))
            lowest = gl.minimum(lowest, low)
            highest = gl.maximum(highest, high)
        lowest = gl.minimum(lowest, highest)
    elif good:
        highest = gl.cdiv(sizes[1], N)
    _write(mail, 0, item)
    _write(mail, 1, lowest)
    _write(mail, 2, highest)
    return lowest, highest


@gluon.jit
def _producer(
    common, post, inputs, counter,
    CONSUMERS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    scale_ptr, bound_ptrs, sizes, shape, choices, buffers, barriers = common
    mail, mail_full, mail_empty = post
    q_desc, k_desc, v_desc = inputs
    heads, ratio, blocks, pairs, together, items = shape
    q_tiles, k_tiles, v_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    stage = 0
    phase = 1
    q_phase = 1
    mail_phase = 1
    item = gl.program_id(0)
    while item < items:
        pair, block = _place(item, blocks, pairs, together, BOUNDED)
        batch = pair // heads
        head = pair % heads
        row = block * (CONSUMERS * _M)
        c = _of_head(scale_ptr, batch, head, heads, choices, _SCALE_PER_BATCH, _SCALE_PER_HEAD)
        good = (c < _SCALE_LIMIT) & (c > 1 / _SCALE_LIMIT)
        mbarrier.wait(mail_empty, mail_phase)
        mail_phase ^= 1
        lowest, highest = _announce(item, batch, row, good, sizes, bound_ptrs, choices, mail, CONSUMERS, N, BOUNDED)
        mbarrier.arrive(mail_full)
        if highest > lowest:
            for who in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(who), q_phase)
                mbarrier.expect(q_full.index(who), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_desc, [batch, head, row + who * _M, 0], q_full.index(who), q_tiles.index(who)
                )
            q_phase ^= 1
            kv_head = head // ratio
            for step in range(highest - lowest):
                key = (highest - 1 - step) * N
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [batch, kv_head, key, 0], k_full.index(stage), k_tiles.index(stage)
                )
                if VALUES:
                    mbarrier.wait(v_empty.index(stage), phase)
                    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        v_desc, [batch, kv_head, key, 0], v_full.index(stage), v_tiles.index(stage)
                    )
                stage, phase = _advance(stage, phase, STAGES)
        item = gl.atomic_add(counter, 1) + gl.num_programs(0)
    mbarrier.wait(mail_empty, mail_phase)
    _write(mail, 0, item)
    mbarrier.arrive(mail_full)


@gluon.jit
def _own_sum(x):
    """Per row, one sum for each of the four threads that share it: what they have to add to each other waits."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), axis=1), axis=2)


@gluon.jit
def _own_max(x):
    return gl.max(gl.max(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), axis=1), axis=2)


@gluon.jit
def _column(x, like):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _inside(s, tile, first, width, N: gl.constexpr):
    """Which scores of a tile belong to keys that their row sees."""
    keys = tile * N + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
    # One unsigned comparison for both ends.
    distance = gl.expand_dims(keys, 0) - gl.expand_dims(first, 1)
    return distance.to(gl.uint32, bitcast=True) < gl.expand_dims(width, 1).to(gl.uint32, bitcast=True)


@gluon.jit
def _meets(tile, first, width, N: gl.constexpr):
    """Whether a row sees any key of a tile."""
    return gl.minimum(first + width, (tile + 1) * N) > gl.maximum(first, tile * N)


@gluon.jit
def _weigh(s, inside, reference, c, sums, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, LEVEL: gl.constexpr):
    """The weights as the left side of PV, and the sums with theirs; `inside` is None where a row sees all."""
    total, tilted, squares, largest, moved, spread = sums
    x = s * c - gl.expand_dims(reference, 1)
    p = gl.exp2(x)
    total += _own_sum(p)
    if LEVEL >= 1:
        # The bits of numbers from 0 on are ordered like integers, of which one instruction compares three.
        largest = gl.maximum(largest, _own_max(p.to(gl.int32, bitcast=True)))
    if LEVEL >= 2:
        tilted += _own_sum(p * x)
        squares += _own_sum(p * p)
    if LEVEL >= 3:
        if inside is None:
            moved += _own_sum(x)
            spread += _own_sum(x * x)
        else:
            seen = gl.where(inside, x, 0.0)
            moved += _own_sum(seen)
            spread += _own_sum(seen * seen)
    return gl.convert_layout(p.to(DTYPE), LAYOUT), (total, tilted, squares, largest, moved, spread)


@gluon.jit
def _pass(
    tiles, stage, phase, turn_phase, barriers, turns,
    who: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Let tiles go by that other consumers of the item need."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    for _step in range(tiles):
        mbarrier.wait(turns.index(who), turn_phase)
        turn_phase ^= 1
        mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
        # A tile that nobody reads must still have arrived before the next takes its place.
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage))
        if VALUES:
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage))
        stage, phase = _advance(stage, phase, STAGES)
    return stage, phase, turn_phase


@gluon.jit
def _consumer(
    common, post, turns, results,
    who: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr,
):  # fmt: skip
    scale_ptr, bound_ptrs, sizes, shape, choices, buffers, barriers = common
    mail, mail_full, mail_empty = post
    o_desc, o_tiles, wide_ptr, field_ptrs, flags, sinks_ptr = results
    queries, keys = sizes
    heads, _, blocks, pairs, together, items = shape
    q_tiles, k_tiles, v_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    DTYPE: gl.constexpr = q_tiles.dtype
    # Where the scores lie, the accumulator of the output, the weights as its left side, and rows.
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    R: gl.constexpr = gl.SliceLayout(1, S)
    stage = 0
    phase = 0
    q_phase = 0
    turn_phase = 1 if who == 0 else 0
    mail_phase = 0
    mbarrier.wait(mail_full, mail_phase)
    item = _read(mail, 0)
    while item < items:
        # The mailbox, and what of it concerns this consumer: tiles [low, high), of which the rows see all of [free_low,
        # free_high) entirely.
        lowest = 0
        highest = _read(mail, 2)
        low = lowest
        high = highest
        free_low = 0
        free_high = keys // N
        if BOUNDED:
            lowest = _read(mail, 1)
            high = gl.maximum(_read(mail, 4 + 4 * who), lowest)
            low = gl.minimum(_read(mail, 3 + 4 * who), high)
            free_low = _read(mail, 5 + 4 * who)
            free_high = _read(mail, 6 + 4 * who)
        mbarrier.arrive(mail_empty)
        mail_phase ^= 1

        pair, block = _place(item, blocks, pairs, together, BOUNDED)
        batch = pair // heads
        head = pair % heads
        row = block * (CONSUMERS * _M) + who * _M
        rows = row + gl.arange(0, _M, R)
        if BOUNDED:
            first, stop = _bounds(bound_ptrs, batch, rows, sizes, choices)
            width = stop - first
            sees = width > 0
        else:
            first = gl.zeros([_M], gl.int32, R)
            width = first + keys
            sees = rows < queries
        c = _of_head(scale_ptr, batch, head, heads, choices, _SCALE_PER_BATCH, _SCALE_PER_HEAD)
        hidden = _HIDDEN / c

        zero = gl.zeros([_M, N], gl.float32, S)
        o = gl.zeros([_M, D], gl.float32, A)
        reference = gl.full([_M], _NO_REFERENCE, gl.float32, R)
        nothing = gl.zeros_like(_own_sum(zero))
        sums = (nothing, nothing, nothing, nothing.to(gl.int32), nothing, nothing)
        if highest > lowest:
            mbarrier.wait(q_full.index(who), q_phase)
            q_phase ^= 1
            q = q_tiles.index(who).reshape([_M, D])
            if BOUNDED:
                stage, phase, turn_phase = _pass(
                    highest - high, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES
                )
            if high > low:
                tile = high - 1
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.wait(turns.index(who), turn_phase)
                turn_phase ^= 1
                k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
                s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage))
                inside = _inside(s, tile, first, width, N)
                s = gl.where(inside, s, hidden)
                if BOUNDED:
                    reference = gl.where(_meets(tile, first, width, N), gl.max(s, axis=1) * c, reference)
                else:
                    reference = gl.max(s, axis=1) * c
                p, sums = _weigh(s, inside, reference, c, sums, DTYPE, P, LEVEL)
                v_stage = stage
                v_phase = phase
                stage, phase = _advance(stage, phase, STAGES)
                for step in range(1, high - low):
                    mbarrier.wait(k_full.index(stage), phase)
                    mbarrier.wait(turns.index(who), turn_phase)
                    turn_phase ^= 1
                    k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
                    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                    if VALUES:
                        mbarrier.wait(v_full.index(v_stage), v_phase)
                        o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
                    mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
                    s = warpgroup_mma_wait(1 if VALUES else 0, deps=(s,))
                    slow = False
                    tile = high - 1 - step
                    if BOUNDED:
                        slow = (tile < free_low) | (tile >= free_high)
                    if BOUNDED and LEVEL >= 3:
                        # The sums over scores have to know which of them count.
                        if slow:
                            inside = _inside(s, tile, first, width, N)
                            s = gl.where(inside, s, hidden)
                            new = (reference == _NO_REFERENCE) & _meets(tile, first, width, N)
                            reference = gl.where(new, gl.max(s, axis=1) * c, reference)
                            p, sums = _weigh(s, inside, reference, c, sums, DTYPE, P, LEVEL)
                        else:
                            p, sums = _weigh(s, None, reference, c, sums, DTYPE, P, LEVEL)
                    else:
                        if BOUNDED and slow:
                            s = gl.where(_inside(s, tile, first, width, N), s, hidden)
                            new = (reference == _NO_REFERENCE) & _meets(tile, first, width, N)
                            reference = gl.where(new, gl.max(s, axis=1) * c, reference)
                        p, sums = _weigh(s, None, reference, c, sums, DTYPE, P, LEVEL)
                    if VALUES:
                        o = warpgroup_mma_wait(0, deps=(o,))
                        mbarrier.arrive(v_empty.index(v_stage))
                    # Not before: one stop of the warpgroup for both is cheaper than an earlier copy.
                    mbarrier.arrive(k_empty.index(stage))
                    v_stage = stage
                    v_phase = phase
                    stage, phase = _advance(stage, phase, STAGES)
                mbarrier.arrive(q_empty.index(who))
                if VALUES:
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
                    o = warpgroup_mma_wait(0, deps=(o,))
                    mbarrier.arrive(v_empty.index(v_stage))
            else:
                mbarrier.arrive(q_empty.index(who))
            if BOUNDED:
                stage, phase, turn_phase = _pass(
                    low - lowest, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES
                )

        # What is not a number fails every comparison. A row that sees nothing has nothing to fail.
        total, tilted, squares, largest, moved, spread = sums
        total = gl.convert_layout(gl.sum(total, axis=1), R)
        good = (total < _SUM_LIMIT) & (total > 1 / _SUM_LIMIT) & (gl.abs(reference) < _REFERENCE_LIMIT)
        inverse = 1.0 / total
        log_total = gl.log2(total)
        logsumexp = reference + log_total
        there = rows < queries
        at = pair.to(gl.int64) * queries + rows
        lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr = field_ptrs
        infinity = float("inf")
        lse = gl.where(sees, logsumexp * _LN_2, -infinity)
        gl.store(lse_ptr + at, lse, mask=there & ((choices & 1) > 0))
        if LEVEL >= 1:
            weight = gl.convert_layout(gl.max(largest, axis=1).to(gl.float32, bitcast=True), R)
            highest_score = gl.where(sees, (reference + gl.log2(weight)) * _LN_2, -infinity)
            gl.store(max_ptr + at, highest_score, mask=there & ((choices & 2) > 0))
            gl.store(weight_ptr + at, gl.where(sees, weight * inverse, 0.0), mask=there & ((choices & 4) > 0))
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
            # About the reference, not the mean: where the mean is too far from it, digits of the spread are lost.
            count = gl.maximum(width.to(gl.float32), 1.0)
            shift = gl.convert_layout(gl.sum(moved, axis=1), R) / count
            around = gl.convert_layout(gl.sum(spread, axis=1), R) / count
            variance = gl.maximum(around - shift * shift, 0.0)
            good &= shift * shift <= variance * _FAR_MEAN + 2.0**-12
            score_mean = gl.where(sees, (reference + shift) * _LN_2, 0.0)
            gl.store(mean_ptr + at, score_mean, mask=there & ((choices & 128) > 0))
            score_std = gl.where(sees, gl.sqrt(variance) * _LN_2, 0.0)
            gl.store(std_ptr + at, score_std, mask=there & ((choices & 256) > 0))
        if VALUES:
            if (choices & _SINKS) > 0:
                sink = _of_head(sinks_ptr, batch, head, heads, choices, _SINKS_PER_BATCH, _SINKS_PER_HEAD)
                inverse *= 1.0 / (1.0 + gl.exp2(sink - logsumexp))
            o = o * _column(inverse, o)
            if BOUNDED:
                o = gl.where(_column(sees, o), o, 0.0)
            norm = gl.convert_layout(gl.sum(o * o, axis=1), R)
            # float16 ends at 65504, and a norm below that says that no entry was rounded beyond.
            good &= norm < (2.0**31 if gl.float16 == DTYPE else 2.0**120)
            if LEVEL >= 2:
                # Squares of very small numbers are 0.
                tiny = gl.convert_layout(gl.max(gl.abs(o), axis=1), R)
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
            tma.async_copy_shared_to_global(o_desc, [batch, head, row, 0], o_tiles.index(who))
        bad = gl.max((sees & there & (good ^ True)).to(gl.int32), axis=0)
        if row < queries:
            gl.store(flags + pair.to(gl.int64) * gl.cdiv(queries, _M) + row // _M, bad)

        mbarrier.wait(mail_full, mail_phase)
        item = _read(mail, 0)
    if VALUES:
        tma.store_wait(0)


_NUMBERS = ("queries", "keys", "heads", "ratio", "blocks", "pairs", "together", "items", "choices")
_POINTERS = (
    "scale_ptr", "sinks_ptr", "first_ptr", "stop_ptr", "wide_ptr", "flags", "counter",
    "lse_ptr", "max_ptr", "weight_ptr", "expected_ptr", "entropy_ptr", "collision_ptr", "norm_ptr", "mean_ptr",
    "std_ptr",
)  # fmt: skip


# One kernel for all numbers and pointers, whatever divides them.
@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    q_desc, k_desc, v_desc, o_desc, scale_ptr, sinks_ptr, first_ptr, stop_ptr, wide_ptr,
    lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr, flags, counter,
    queries, keys, heads, ratio, blocks, pairs, together, items, choices,
    CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, _M, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], k_desc.layout)
    # Without values the names stay, and nothing is kept under them.
    v_tiles = k_tiles
    o_tiles = q_tiles
    if VALUES:
        v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], v_desc.layout)
        o_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, _M, D], o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], ONE)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], ONE)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], ONE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    mail = gl.allocate_shared_memory(gl.int32, [_MAIL, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail_full = gl.allocate_shared_memory(gl.int64, [1], ONE)
    mail_empty = gl.allocate_shared_memory(gl.int64, [1], ONE)
    mbarrier.init(mail_full, count=1)
    mbarrier.init(mail_empty, count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    buffers = (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (queries, keys)
    shape = (heads, ratio, blocks, pairs, together, items)
    bound_ptrs = (first_ptr, stop_ptr)
    field_ptrs = (
        lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr
    )  # fmt: skip
    common = (scale_ptr, bound_ptrs, sizes, shape, choices, buffers, barriers)
    post = (mail, mail_full, mail_empty)
    inputs = (q_desc, k_desc, v_desc)
    results = (o_desc, o_tiles, wide_ptr, field_ptrs, flags, sinks_ptr)
    # A variable would make tensors of the constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (common, post, turns, results, 0, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_consumer, (common, post, turns, results, 1, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_producer, (common, post, inputs, counter, CONSUMERS, N, STAGES, BOUNDED, VALUES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (common, post, turns, results, 0, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_consumer, (common, post, turns, results, 1, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_consumer, (common, post, turns, results, 2, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL)),
                (_producer, (common, post, inputs, counter, CONSUMERS, N, STAGES, BOUNDED, VALUES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )


def configuration(head_dim: int, level: int) -> dict[str, int]:
    """Consumers, keys of a tile, tiles of the rings and registers of a consumer."""
    if head_dim == 128:
        return {"CONSUMERS": 2, "N": 128, "STAGES": 2, "REGISTERS": 240}
    if level == 3:
        # Three consumers have too few registers for the sums over scores.
        return {"CONSUMERS": 2, "N": 128, "STAGES": 3, "REGISTERS": 240}
    return {"CONSUMERS": 3, "N": 128, "STAGES": 3, "REGISTERS": 160}


@functools.cache
def _processors(device: int) -> int:
    """How many there are of a Hopper GPU; none of another."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if (properties.major, properties.minor) == (9, 0) else 0


def _copyable(x: Tensor) -> bool:
    """Whether the copy engine takes a tensor of four axes as it is."""
    *outer, inner = zip(x.shape, x.stride(), strict=True)
    return (
        inner[1] == 1
        and x.data_ptr() % 16 == 0
        and all(size == 1 or (0 < step < 2**38 and step % 8 == 0) for size, step in outer)
    )


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
        and all(_copyable(x) for x in operands)
        and _processors(q.device.index) > 0
    )


@functools.cache
def _layout(rows: int, depth: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, depth], _DTYPES[dtype])


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """A tensor as the copy engine knows it, in blocks of some rows of one head."""
    block = [1, 1, rows, x.shape[-1]]
    layout = _layout(rows, x.shape[-1], x.dtype)
    # An axis of one entry may have any stride, also one that the engine refuses.
    strides = [step if size > 1 else 64 for size, step in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


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
    each (batch, heads, queries). `wide` is laid out as the output. Without values there is no output.
    """
    q, k, v = call.q, call.k, call.v
    if output is not None and not (_copyable(output) and (wide is None or wide.stride() == output.stride())):
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
    choice = configuration(head_dim, level)
    bounded = call.first is not None or call.stop is not None
    scale = call.scale.contiguous()
    sinks = scale if call.sinks is None else call.sinks.contiguous()
    first = stop = flags
    if bounded:
        first, stop = _rows(call.first, 0, call), _rows(call.stop, keys, call)
    choices = sum(1 << bit for bit, name in enumerate(FIELDS) if name in fields)
    for there, bit in (
        (wide is not None, _WIDE),
        (call.sinks is not None, _SINKS),
        (scale.shape[0] > 1, _SCALE_PER_BATCH),
        (scale.shape[1] > 1, _SCALE_PER_HEAD),
        (sinks.shape[0] > 1, _SINKS_PER_BATCH),
        (sinks.shape[1] > 1, _SINKS_PER_HEAD),
        (bounded and first.shape[0] > 1, _FIRST_PER_BATCH),
        (bounded and stop.shape[0] > 1, _STOP_PER_BATCH),
    ):
        choices |= bit.value if there else 0
    pairs = batch * heads
    blocks = -(-queries // (ROWS * choice["CONSUMERS"]))
    share = 2 * keys * head_dim * q.element_size() // call.group or 1
    together = max(1, min(pairs, _CACHED_BYTES // share))
    k_desc = _described(k, choice["N"])
    q_desc = _described(q, ROWS)
    with torch.cuda.device(q.device):
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        launch: Any = _kernel[(min(pairs * blocks, _processors(q.device.index)),)]
        launch(
            q_desc,
            k_desc,
            k_desc if v is None else _described(v, choice["N"]),
            q_desc if output is None else _described(output, ROWS),
            scale,
            sinks,
            first,
            stop,
            scale if wide is None else wide,
            *(fields.get(name, scale) for name in FIELDS),
            flags,
            counter,
            queries,
            keys,
            heads,
            call.group,
            blocks,
            pairs,
            together,
            pairs * blocks,
            choices,
            D=head_dim,
            BOUNDED=bounded,
            VALUES=v is not None,
            LEVEL=level,
            **choice,
            num_warps=4,
        )
