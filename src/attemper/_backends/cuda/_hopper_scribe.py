# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""The scribe of the kernel for Hopper GPUs: two warps that make fields of the Reading of what the consumers leave.

So that a consumer need not stop for it: at the end of an item it puts its sums down and goes on. See `_hopper`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._hopper_supply import (
    _LETTER,
    _LETTERS,
    _LN_2,
    _M,
    _REFERENCE_LIMIT,
    _advance,
    _bearable,
    _bounds,
    _log2,
    _of_head,
    _open,
    _read,
    _there,
)

_SUM_LIMIT = gl.constexpr(2.0**60)
_FAR_MEAN = gl.constexpr(2.0**10)
"""Squared distance of a mean from what its sums were taken about, in variances, up to which enough digits are left."""
_SCRIBES = gl.constexpr(2)
"""Warps of the scribe, so that each thread has a row."""
_DESK = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [2, 1], [1, 0]))
# What consumers leave to the scribe, in this order; for each row four numbers, of the four threads that share it.
_TOTAL = gl.constexpr(0)
_REFERENCE = gl.constexpr(1)
_NORM = gl.constexpr(2)
_LARGEST = gl.constexpr(3)
_TILTED = gl.constexpr(4)
_SQUARES = gl.constexpr(5)
_OPENING = gl.constexpr(6)
_MOVED = gl.constexpr(7)
_TURNED = gl.constexpr(9)

# More bits of `choices`: what is there, and along which axes; the rest are in `_hopper_supply`.
_SINKS = gl.constexpr(1 << 15)
_SINKS_PER_BATCH = gl.constexpr(1 << 18)
_SINKS_PER_HEAD = gl.constexpr(1 << 19)


@gluon.jit
def _sheet(COUNT: gl.constexpr):
    # Each by itself: between two stores into one piece of memory the compiler has all threads wait for each other.
    return gl.allocate_shared_memory(gl.float32, [COUNT, _M, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _desk(CONSUMERS: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr, TABLE: gl.constexpr):
    """Shared memory for what consumers leave to the scribe; what they do not shares the place of the first."""
    total = _sheet(CONSUMERS)
    reference = _sheet(CONSUMERS)
    norm = total
    largest = total
    tilted = total
    squares = total
    opening = total
    moved = total
    spread = total
    turned = total
    middle = total
    if VALUES:
        norm = _sheet(CONSUMERS)
    if LEVEL >= 1:
        largest = _sheet(CONSUMERS)
    if LEVEL >= 2:
        tilted = _sheet(CONSUMERS)
        squares = _sheet(CONSUMERS)
    if LEVEL >= 3:
        opening = _sheet(CONSUMERS)
    if LEVEL >= 3 and not TABLE:
        moved = _sheet(CONSUMERS)
        spread = _sheet(CONSUMERS)
    if TABLE:
        turned = _sheet(CONSUMERS)
        middle = _sheet(CONSUMERS)
    pile = (
        total, reference, norm, largest, tilted, squares, opening, moved, spread, turned, middle,
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return pile, full, empty


@gluon.jit
def _keep(pile, part: gl.constexpr, who, x):
    """Leave something to the scribe."""
    pile[part].index(who).store(x)


@gluon.jit
def _leave(pile, who, sums, reference, opening, LEVEL: gl.constexpr, ADD: gl.constexpr):
    """Leave the sums of an item's rows, their references and the scores of their first keys."""
    total, tilted, squares, largest, moved, spread = sums
    L: gl.constexpr = total.type.layout
    of_rows = gl.expand_dims(gl.convert_layout(reference, gl.SliceLayout(1, L)), 1)
    _keep(pile, _TOTAL, who, total)
    _keep(pile, _REFERENCE, who, gl.zeros_like(total) + of_rows)
    if LEVEL >= 1:
        _keep(pile, _LARGEST, who, largest.to(gl.float32, bitcast=True))
    if LEVEL >= 2:
        _keep(pile, _TILTED, who, tilted)
        _keep(pile, _SQUARES, who, squares)
    if LEVEL >= 3:
        _keep(pile, _OPENING, who, opening.to(gl.float32, bitcast=True))
    if ADD:
        _keep(pile, _MOVED, who, moved)
        _keep(pile, _MOVED + 1, who, spread)


@gluon.jit
def _part(pile, part: gl.constexpr, who):
    """What a consumer left of each row, added up."""
    return gl.sum(pile[part].index(who).load(_DESK), axis=1)


@gluon.jit
def _scribe(
    given, ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Make fields of what the consumers leave, and tell the producer that they are done with an item.

    So that they need not stop for it; where there is room for the rows of one item alone, they say so themselves.
    """
    common, post, desk, fields, counts, flags, sinks_ptr = given
    _, limits, sizes, shape, choices, buffers, barriers = common
    mail, mail_full, mail_empty = post
    pile, pile_full, pile_empty = desk
    (
        lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
        qk_ptr, opening_ptr, sink_ptr,
    ) = fields  # fmt: skip
    visible_ptr, nonfinite_ptr = counts
    queries, keys = sizes
    heads = shape[0]
    items = shape[5]
    q_empty = barriers[1]
    DTYPE: gl.constexpr = buffers[0].dtype
    R: gl.constexpr = gl.SliceLayout(1, _DESK)
    nothing = gl.zeros([_M], gl.float32, R)
    infinity = float("inf")
    slot = 0
    mail_phase = 0
    q_slot = 0
    phase = 0
    mbarrier.wait(mail_full.index(0), 0)
    item = _read(mail, 0, _SCRIBES)
    while item < items:
        for who in range(CONSUMERS):
            _tiles, place, c = _open(mail, slot * _LETTER, who, keys, N, BOUNDED, _SCRIBES)
            batch, head, row = place
            rows = row + gl.arange(0, _M, R)
            there = _there(rows, queries)
            if BOUNDED:
                first, stop = _bounds(limits, batch, rows, sizes, choices)
                width = stop - first
                sees = width > 0
            else:
                width = gl.zeros([_M], gl.int32, R) + keys
                sees = there
            # One that sees a key alone has nothing to decide, and that exactly, whatever the logarithm is off by.
            decides = width > 1
            pair = batch * heads + head
            at = pair.to(gl.int64) * queries + rows
            # All at once, so that the consumer need not wait for the rest.
            mbarrier.wait(pile_full.index(who), phase)
            total = _part(pile, _TOTAL, who)
            reference = _part(pile, _REFERENCE, who) * 0.25
            if VALUES:
                norm = _part(pile, _NORM, who)
            if LEVEL >= 1:
                bits = pile[_LARGEST].index(who).load(_DESK).to(gl.int32, bitcast=True)
                weight = gl.max(bits, axis=1).to(gl.float32, bitcast=True)
            if LEVEL >= 2:
                tilted = _part(pile, _TILTED, who)
                squares = _part(pile, _SQUARES, who)
            if LEVEL >= 3:
                opening = _part(pile, _OPENING, who)
            if LEVEL >= 3 and not TABLE:
                moved = _part(pile, _MOVED, who)
                spread = _part(pile, _MOVED + 1, who)
            if TABLE:
                turned = _part(pile, _TURNED, who)
                middle = _part(pile, _TURNED + 1, who)
            mbarrier.arrive(pile_empty.index(who))
            if ITEMS > 1:
                mbarrier.arrive(q_empty.index(q_slot * CONSUMERS + who))

            # What is not a number fails every comparison. A row that sees nothing has nothing to fail.
            good = _bearable(c)
            good = good & (total < _SUM_LIMIT) & (total > 1 / _SUM_LIMIT) & (gl.abs(reference) < _REFERENCE_LIMIT)
            inverse = 1.0 / total
            log_total = _log2(total)
            logsumexp = reference + log_total
            lse = gl.where(sees, logsumexp * _LN_2, -infinity)
            gl.store(lse_ptr + at, lse, mask=there & ((choices & 1) > 0))
            gl.store(visible_ptr + at, width.to(gl.int64), mask=there & ((choices & 4096) > 0))
            # Rows that are not sound are computed again, and counted then.
            gl.store(nonfinite_ptr + at, gl.zeros([_M], gl.int64, R), mask=there & ((choices & 8192) > 0))
            mass = nothing
            if (choices & _SINKS) > 0:
                sink = _of_head(sinks_ptr, batch, head, heads, choices, _SINKS_PER_BATCH, _SINKS_PER_HEAD)
                # A logistic of the difference, which neither side can overflow.
                gap = sink - gl.where(sees, logsumexp, -infinity)
                mass = gl.where(gap > -infinity, 1.0 / (1.0 + gl.exp2(-gap)), 0.0)
            gl.store(sink_ptr + at, mass, mask=there & ((choices & 2048) > 0))
            if LEVEL >= 1:
                highest_score = gl.where(sees, (reference + _log2(weight)) * _LN_2, -infinity)
                gl.store(max_ptr + at, highest_score, mask=there & ((choices & 2) > 0))
                share = gl.where(decides, weight * inverse, gl.where(sees, 1.0, 0.0))
                gl.store(weight_ptr + at, share, mask=there & ((choices & 4) > 0))
                gl.store(qk_ptr + at, highest_score, mask=there & ((choices & 512) > 0))
            if LEVEL >= 2:
                tilt = tilted * inverse
                # A score at −inf has weight 0 and makes this NaN. (Below this level it goes by unseen: what is measured
                # there is right all the same.)
                good &= gl.abs(tilt) < _REFERENCE_LIMIT
                mean = gl.where(sees, (reference + tilt) * _LN_2, 0.0)
                gl.store(expected_ptr + at, mean, mask=there & ((choices & 8) > 0))
                entropy = gl.where(decides, gl.maximum(log_total - tilt, 0.0) * _LN_2, 0.0)
                gl.store(entropy_ptr + at, entropy, mask=there & ((choices & 16) > 0))
                collision = gl.where(decides, squares * inverse * inverse, gl.where(sees, 1.0, 0.0))
                gl.store(collision_ptr + at, collision, mask=there & ((choices & 32) > 0))
            if LEVEL >= 3:
                first_weight = gl.exp2(opening * c - logsumexp)
                gl.store(opening_ptr + at, gl.where(sees, first_weight, 0.0), mask=there & ((choices & 1024) > 0))
                count = gl.maximum(width, 1).to(gl.float32)
                if TABLE:
                    distance = middle * c
                    score_mean = distance
                    spread = turned * (c * c)
                else:
                    distance = moved / count
                    score_mean = reference + distance
                    spread -= moved * distance
                variance = gl.maximum(spread, 0.0) / count
                # Where the mean is too far from what the sums were taken about, digits are lost.
                good &= (distance * distance <= variance * _FAR_MEAN + 2.0**-12) & (variance < infinity)
                gl.store(mean_ptr + at, gl.where(sees, score_mean * _LN_2, 0.0), mask=there & ((choices & 128) > 0))
                score_std = gl.where(decides, gl.sqrt(variance) * _LN_2, 0.0)
                gl.store(std_ptr + at, score_std, mask=there & ((choices & 256) > 0))
            if VALUES:
                # float16 ends at 65504, and a norm below that says that no entry was rounded beyond.
                good &= norm < (2.0**31 if gl.float16 == DTYPE else 2.0**120)
                if LEVEL >= 2:
                    gl.store(norm_ptr + at, gl.sqrt(norm), mask=there & ((choices & 64) > 0))
            flag = flags + pair.to(gl.int64) * gl.cdiv(queries, _M) + row // _M
            gl.store(flag + gl.zeros_like(rows), gl.full_like(rows, 1), mask=sees & there & (good ^ True))
        phase ^= 1
        q_slot = (q_slot + 1) % ITEMS
        mbarrier.arrive(mail_empty.index(slot))
        slot, mail_phase = _advance(slot, mail_phase, _LETTERS)
        mbarrier.wait(mail_full.index(slot), mail_phase)
        item = _read(mail, slot * _LETTER, _SCRIBES)
