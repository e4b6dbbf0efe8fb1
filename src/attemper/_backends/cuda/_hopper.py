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

from .._operator import COUNTS
from ._gram import PARTS, grams, worthwhile
from ._ready import copyable, launch, strides_of

if TYPE_CHECKING:
    from .._operator import Call

# They were renamed in Triton 3.9.
_copy_in = getattr(tma, "async_load" if hasattr(tma, "async_load") else "async_copy_global_to_shared")
_copy_out = getattr(tma, "async_store" if hasattr(tma, "async_store") else "async_copy_shared_to_global")

ROWS = 64
"""Query rows of a consumer, which are flagged together."""

FIELDS = (
    "logsumexp", "max_logit", "largest_weight", "expected_score", "entropy", "collision", "output_norm", "score_mean",
    "score_std", "max_qk", "first_key_weight", "sink_mass", "visible_keys", "nonfinite",
)  # fmt: skip
"""What this kernel measures, in the order of the lowest bits of its `choices`."""

# Numbers that are not finite are all found from level 2 on.
_LEVELS = dict(zip(FIELDS, (0, 1, 1, 2, 2, 2, 2, 3, 3, 1, 3, 0, 0, 2), strict=True))

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
_HIDDEN = gl.constexpr(-(2.0**100))
"""What stands for q·k of a key the row does not see: after scaling still far below all that pass as a reference."""
_REFERENCE_LIMIT = gl.constexpr(2.0**70)
_SUM_LIMIT = gl.constexpr(2.0**60)
_FAR_MEAN = gl.constexpr(2.0**8)
"""Squared distance of a mean from what its sums were taken about, in variances, up to which enough digits are left."""
_SCALE_LIMIT = gl.constexpr(2.0**20)
"""Within it, and within its inverse, _HIDDEN times the scale is a float32 and beyond _REFERENCE_LIMIT."""

# More bits of `choices`: what is there, and along which axes.
_WIDE = gl.constexpr(1 << 14)
_SINKS = gl.constexpr(1 << 15)
_SCALE_PER_BATCH = gl.constexpr(1 << 16)
_SCALE_PER_HEAD = gl.constexpr(1 << 17)
_SINKS_PER_BATCH = gl.constexpr(1 << 18)
_SINKS_PER_HEAD = gl.constexpr(1 << 19)
_FIRST_PER_BATCH = gl.constexpr(1 << 20)
_STOP_PER_BATCH = gl.constexpr(1 << 21)
_BAND = gl.constexpr(1 << 22)

_PARTS = gl.constexpr(PARTS.value)
_LETTER = gl.constexpr(20)
"""Numbers of a letter, by which the producer tells the consumers all about an item, so that they need not look it up:
the item, its first tile of keys and the one after its last, batch, head, row, scale, four for each consumer, and how
many granules of keys all rows see."""


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
def _bounds(limits, batch, rows, sizes, choices):
    """The keys that some rows see, as int32 within the keys there are; first = stop where a row sees none."""
    first_ptr, stop_ptr, low, high = limits
    queries, keys = sizes
    inside = rows < queries
    first = rows + low
    stop = gl.where(inside, rows + high, 0)
    if (choices & _BAND) == 0:
        first_row = gl.where((choices & _FIRST_PER_BATCH) > 0, batch, 0).to(gl.int64) * queries
        stop_row = gl.where((choices & _STOP_PER_BATCH) > 0, batch, 0).to(gl.int64) * queries
        most = keys.to(gl.int64)
        given = gl.load(first_ptr + first_row + rows, mask=inside, other=0)
        first = gl.minimum(gl.maximum(given, 0), most).to(gl.int32)
        given = gl.load(stop_ptr + stop_row + rows, mask=inside, other=0)
        stop = gl.minimum(gl.maximum(given, 0), most).to(gl.int32)
    first = gl.minimum(gl.maximum(first, 0), keys)
    stop = gl.minimum(gl.maximum(stop, 0), keys)
    return first, gl.maximum(stop, first)


@gluon.jit
def _write(mail, place, number):
    mail.index(place).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)


@gluon.jit
def _read(mail, place):
    return gl.max(mail.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _open(mail, letter, who: gl.constexpr, keys, N: gl.constexpr, BOUNDED: gl.constexpr):
    """What a letter says to a consumer: which tiles, where its rows are, and the scale.

    The tiles of the item are [lowest, highest), of which this one needs [low, high) and its rows see all of [free_low,
    free_high) entirely. There is always one: a consumer whose rows see nothing looks at one in vain.
    """
    lowest = 0
    highest = _read(mail, letter + 2)
    low = lowest
    high = highest
    free_low = 0
    free_high = keys // N
    if BOUNDED:
        lowest = _read(mail, letter + 1)
        low = _read(mail, letter + 7 + 4 * who)
        high = _read(mail, letter + 8 + 4 * who)
        nothing = high <= low
        low = gl.where(nothing, highest - 1, low)
        high = gl.where(nothing, highest, high)
        free_low = _read(mail, letter + 9 + 4 * who)
        free_high = gl.where(nothing, 0, _read(mail, letter + 10 + 4 * who))
    place = (_read(mail, letter + 3), _read(mail, letter + 4), _read(mail, letter + 5) + who * _M)
    c = _read(mail, letter + 6).to(gl.float32, bitcast=True)
    return (lowest, highest, low, high, free_low, free_high), place, c


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _announce(
    item, common, grams, mail, letter, CONSUMERS: gl.constexpr, N: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Write the letter of an item: which tiles of keys it needs, and between which of them nothing is hidden."""
    scale_ptr, limits, sizes, shape, choices, _, _ = common
    heads, _, blocks, pairs, together, items = shape
    # Beyond the last item there is one more letter, which says so.
    pair, block = _place(gl.minimum(item, items - 1), blocks, pairs, together, BOUNDED)
    batch = pair // heads
    head = pair % heads
    row = block * (CONSUMERS * _M)
    c = _of_head(scale_ptr, batch, head, heads, choices, _SCALE_PER_BATCH, _SCALE_PER_HEAD)
    _, _, granule, count = grams
    lowest = 0
    highest = gl.cdiv(sizes[1], N)
    if BOUNDED:
        lowest = _FARTHEST
        highest = 0
        clear = _FARTHEST
        for who in gl.static_range(CONSUMERS):
            rows = row + who * _M + gl.arange(0, _M, gl.BlockedLayout([2], [32], [1], [0]))
            first, stop = _bounds(limits, batch, rows, sizes, choices)
            seen = stop > first
            least_stop = gl.min(gl.where(seen, stop, _FARTHEST), axis=0)
            last_stop = gl.max(gl.where(seen, stop, 0), axis=0)
            low = gl.min(gl.where(seen, first, _FARTHEST), axis=0) // N
            high = gl.cdiv(last_stop, N)
            # A row whose keys end where the tiles that all see begin has no reference until then: one tile more is
            # looked at row by row.
            late = (least_stop % N == 0) & (last_stop > least_stop)
            _write(mail, letter + 7 + 4 * who, low)
            _write(mail, letter + 8 + 4 * who, high)
            _write(mail, letter + 9 + 4 * who, gl.cdiv(gl.max(gl.where(seen, first, 0), axis=0), N))
            free_high = least_stop // N - late.to(gl.int32)
            _write(mail, letter + 10 + 4 * who, free_high)
            clear = gl.minimum(clear, gl.where(high > low, gl.minimum(free_high, high - 1), _FARTHEST))
            lowest = gl.minimum(lowest, low)
            highest = gl.maximum(highest, high)
        highest = gl.maximum(highest, 1)
        lowest = gl.minimum(lowest, highest - 1)
        # Whole granules that all rows see all of, behind the first tile.
        count = gl.minimum(gl.minimum(clear, highest) * N // granule, count)
    _write(mail, letter + 19, count)
    _write(mail, letter, item)
    _write(mail, letter + 1, lowest)
    _write(mail, letter + 2, highest)
    _write(mail, letter + 3, batch)
    _write(mail, letter + 4, head)
    _write(mail, letter + 5, row)
    _write(mail, letter + 6, c.to(gl.int32, bitcast=True))
    return lowest, highest, batch, head, row, count


@gluon.jit
def _sum_before(grams, batch, head, shape, before):
    """Which of the sums over keys is that of a head over some granules."""
    _, _, _, count = grams
    heads, ratio, _, _, _, _ = shape
    return (batch * (heads // ratio) + head // ratio) * (count + 1) + before


@gluon.jit
def _send_grams(
    which, stage, phase, grams, buffers, barriers,
    D: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Copy the parts of a Gram matrix into the ring of K; in that of V they take empty places."""
    grams_desc, _, _, _ = grams
    _, k_tiles, _ = buffers
    _, _, k_full, k_empty, v_full, v_empty = barriers
    for part in gl.static_range(_PARTS):
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), grams_desc.block_type.nbytes)
        _copy_in(grams_desc, [which, part, 0, 0], k_full.index(stage), k_tiles.index(stage).slice(0, D, 2))
        if VALUES:
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.arrive(v_full.index(stage))
        stage, phase = _advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _send(
    key, batch, kv_head, stage, phase, inputs, buffers, barriers, STAGES: gl.constexpr, VALUES: gl.constexpr
):  # fmt: skip
    """Copy a tile of K and one of V into the rings once their places are free."""
    _, k_desc, v_desc, _, _ = inputs
    _, k_tiles, v_tiles = buffers
    _, _, k_full, k_empty, v_full, v_empty = barriers
    mbarrier.wait(k_empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    _copy_in(k_desc, [batch, kv_head, key, 0], k_full.index(stage), k_tiles.index(stage))
    if VALUES:
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        _copy_in(v_desc, [batch, kv_head, key, 0], v_full.index(stage), v_tiles.index(stage))
    return _advance(stage, phase, STAGES)


@gluon.jit
def _send_queries(
    batch, head, row, phase, inputs, q_tiles, q_full, q_empty, CONSUMERS: gl.constexpr, GRADIENT: gl.constexpr
):  # fmt: skip
    """Copy the rows of Q, each consumer's once it is done with those before; with GRADIENT another matrix beside."""
    q_desc, _, _, g_desc, g_tiles = inputs
    for who in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(who), phase)
        place = [batch, head, row + who * _M, 0]
        mbarrier.expect(q_full.index(who), q_desc.block_type.nbytes * (2 if GRADIENT else 1))
        _copy_in(q_desc, place, q_full.index(who), q_tiles.index(who))
        if GRADIENT:
            _copy_in(g_desc, place, q_full.index(who), g_tiles.index(who))
    return phase ^ 1


@gluon.jit
def _producer(
    supply,
    CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr,
    VALUES: gl.constexpr, GRADIENT: gl.constexpr, AHEAD: gl.constexpr, GRAMS: gl.constexpr,
):  # fmt: skip
    """With AHEAD consumers begin one item too many; with GRAMS an item begins with the parts of a Gram matrix."""
    common, post, inputs, grams, counter = supply
    _, _, _, shape, _, buffers, barriers = common
    mail, mail_full, mail_empty = post
    ratio = shape[1]
    items = shape[5]
    q_tiles, _, _ = buffers
    q_full, q_empty, _, _, _, _ = barriers
    stage = 0
    phase = 1
    q_phase = 1
    slot = 0
    mail_phase = 1
    item = gl.program_id(0)
    lowest, highest, batch, head, row, before = _announce(item, common, grams, mail, 0, CONSUMERS, N, BOUNDED)
    mbarrier.arrive(mail_full.index(0))
    while item < items:
        kv_head = head // ratio
        q_phase = _send_queries(batch, head, row, q_phase, inputs, q_tiles, q_full, q_empty, CONSUMERS, GRADIENT)
        if GRAMS:
            stage, phase = _send_grams(
                _sum_before(grams, batch, head, shape, before),
                stage,
                phase,
                grams,
                buffers,
                barriers,
                D,
                STAGES,
                VALUES,
            )
        stage, phase = _send((highest - 1) * N, batch, kv_head, stage, phase, inputs, buffers, barriers, STAGES, VALUES)
        # What comes next is found out while the consumers have tiles to go on with: memory takes its time.
        slot, mail_phase = _advance(slot, mail_phase, 2)
        coming = gl.atomic_add(counter, 1) + gl.num_programs(0)
        mbarrier.wait(mail_empty.index(slot), mail_phase)
        next_lowest, next_highest, next_batch, next_head, next_row, next_before = _announce(
            coming, common, grams, mail, slot * _LETTER, CONSUMERS, N, BOUNDED
        )
        mbarrier.arrive(mail_full.index(slot))
        for step in range(1, highest - lowest):
            stage, phase = _send(
                (highest - 1 - step) * N, batch, kv_head, stage, phase, inputs, buffers, barriers, STAGES, VALUES
            )
        item = coming
        lowest = next_lowest
        highest = next_highest
        batch = next_batch
        head = next_head
        row = next_row
        before = next_before
    if AHEAD:
        # Somebody multiplies a tile of the last item again, and nobody looks at what comes out.
        q_phase = _send_queries(batch, head, row, q_phase, inputs, q_tiles, q_full, q_empty, CONSUMERS, GRADIENT)
        if GRAMS:
            stage, phase = _send_grams(
                _sum_before(grams, batch, head, shape, before),
                stage,
                phase,
                grams,
                buffers,
                barriers,
                D,
                STAGES,
                VALUES,
            )
        stage, phase = _send(
            (highest - 1) * N, batch, head // ratio, stage, phase, inputs, buffers, barriers, STAGES, False
        )


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
def _shown(s, tile, first, width, N: gl.constexpr):
    """The scores of a tile, _HIDDEN for keys that their row does not see."""
    keys = tile * N + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
    distance = gl.expand_dims(keys, 0) - gl.expand_dims(first, 1)
    # One unsigned comparison for both ends. Of a plain one LLVM makes vectors of bits, and takes them apart again.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fF1800000, p; }", "=f,f,r,r",
        [s, distance, gl.expand_dims(width, 1)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _meets(tile, first, width, N: gl.constexpr):
    """Whether a row sees any key of a tile."""
    return gl.minimum(first + width, (tile + 1) * N) > gl.maximum(first, tile * N)


@gluon.jit
def _weigh(s, reference, c, sums, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, LEVEL: gl.constexpr):
    """The weights as the left side of PV, and the sums with theirs."""
    total, tilted, squares, largest = sums
    x = s * c - gl.expand_dims(reference, 1)
    p = gl.exp2(x)
    total += _own_sum(p)
    if LEVEL >= 1:
        # The bits of numbers from 0 on are ordered like integers, of which one instruction compares three.
        largest = gl.maximum(largest, _own_max(p.to(gl.int32, bitcast=True)))
    if LEVEL >= 2:
        tilted += _own_sum(p * x)
        squares += _own_sum(p * p)
    return gl.convert_layout(p.to(DTYPE), LAYOUT), (total, tilted, squares, largest)


@gluon.jit
def _scatter(s, reference, c, near):
    """The sums over the scores of a tile of which a row may not see all, about the reference."""
    moved, spread = near
    x = gl.where(s > _HIDDEN, s * c - gl.expand_dims(reference, 1), 0.0)
    return moved + _own_sum(x), spread + _own_sum(x * x)


@gluon.jit
def _pass(
    tiles, stage, phase, turn_phase, barriers, turns,
    who: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Let tiles go by that other consumers of the item need."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    for _step in range(tiles):
        if TURNS:
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
def _begin(
    slot, mail_phase, stage, phase, q_phase, turn_phase, common, post, turns, grams,
    who: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, GRAMS: gl.constexpr,
):  # fmt: skip
    """Open the next letter, sum up the scores of all keys in granules before, and start QKᵀ of the first tile."""
    _, _, sizes, shape, _, buffers, barriers = common
    mail, mail_full, mail_empty = post
    q_tiles, k_tiles, _ = buffers
    q_full, _, k_full, k_empty, v_full, v_empty = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    mbarrier.wait(mail_full.index(slot), mail_phase)
    item = _read(mail, slot * _LETTER)
    tiles, place, c = _open(mail, slot * _LETTER, who, sizes[1], N, BOUNDED)
    before = _read(mail, slot * _LETTER + 19)
    mbarrier.arrive(mail_empty.index(slot))
    slot, mail_phase = _advance(slot, mail_phase, 2)
    mbarrier.wait(q_full.index(who), q_phase)
    q_phase ^= 1
    q = q_tiles.index(who).reshape([_M, D])
    zero = gl.zeros([_M, N], gl.float32, S)
    far_moved = gl.zeros_like(_own_sum(zero))
    far_spread = far_moved
    if GRAMS:
        A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
        product = gl.zeros([_M, D], gl.float32, A)
        for _part in gl.static_range(_PARTS):
            mbarrier.wait(k_full.index(stage), phase)
            gram = k_tiles.index(stage).reshape([N, D]).slice(0, D, 0).permute((1, 0))
            product = warpgroup_mma(q, gram, product, is_async=True)
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(k_empty.index(stage))
            if VALUES:
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage))
            stage, phase = _advance(stage, phase, STAGES)
        _, sums_ptr, _, _ = grams
        which = _sum_before(grams, place[0], place[1], shape, before).to(gl.int64)
        key_sums = gl.load(sums_ptr + which * D + gl.arange(0, D, gl.SliceLayout(0, A)))
        own = q.load(A).to(gl.float32)
        far_moved = gl.convert_layout(_own_sum(own * gl.expand_dims(key_sums, 0)), far_moved.type.layout)
        far_spread = gl.convert_layout(_own_sum(own * product), far_moved.type.layout)
    if BOUNDED:
        skipped = gl.where(item < shape[5], tiles[1] - tiles[3], 0)
        stage, phase, turn_phase = _pass(
            skipped, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES, VALUES
        )
    mbarrier.wait(k_full.index(stage), phase)
    if VALUES:
        mbarrier.wait(turns.index(who), turn_phase)
        turn_phase ^= 1
    k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if VALUES:
        mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
    # Up to which tile they are in these sums.
    moments = (before * grams[2] // N, far_moved, far_spread)
    return s, item, tiles, place, c, moments, slot, mail_phase, stage, phase, q_phase, turn_phase


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
    who: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr, GRAMS: gl.constexpr,
):  # fmt: skip
    common, post, turns, grams, results = given
    _, limits, sizes, shape, choices, buffers, barriers = common
    o_desc, o_tiles, wide_ptr, field_ptrs, count_ptrs, flags, sinks_ptr = results
    queries, keys = sizes
    heads = shape[0]
    items = shape[5]
    q_tiles, k_tiles, v_tiles = buffers
    _q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    DTYPE: gl.constexpr = q_tiles.dtype
    # Where the scores lie, the accumulator of the output, the weights as its left side, and rows.
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    R: gl.constexpr = gl.SliceLayout(1, S)
    q = q_tiles.index(who).reshape([_M, D])
    zero = gl.zeros([_M, N], gl.float32, S)
    nothing = gl.zeros_like(_own_sum(zero))
    slot = 0
    mail_phase = 0
    stage = 0
    phase = 0
    q_phase = 0
    turn_phase = 1 if who == 0 else 0
    s, item, tiles, place, c, moments, slot, mail_phase, stage, phase, q_phase, turn_phase = _begin(
        slot, mail_phase, stage, phase, q_phase, turn_phase, common, post, turns, grams,
        who, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, GRAMS,
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

        o = gl.zeros([_M, D], gl.float32, A)
        sums = (nothing, nothing, nothing, nothing.to(gl.int32))
        # Sums over the scores themselves, not weighed: of tiles looked at row by row about the reference, so that a row
        # of one key has a variance of 0, and of those of which all rows see all, cheaper, of q·k about 0.
        near = (nothing, nothing)
        summed, far_moved, far_spread = moments
        tile = high - 1
        mbarrier.arrive(k_empty.index(stage))
        opening = nothing.to(gl.int32)
        if LEVEL >= 3:
            opening = _opening(s)
        s = _shown(s, tile, first, width, N)
        reference = gl.max(s, axis=1) * c
        if BOUNDED:
            reference = gl.where(_meets(tile, first, width, N), reference, _NO_REFERENCE)
        if LEVEL >= 3:
            near = _scatter(s, reference, c, near)
        p, sums = _weigh(s, reference, c, sums, DTYPE, P, LEVEL)
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
            elif LEVEL >= 3 and (BOUNDED or not GRAMS):
                if tile >= summed:
                    far_moved += _own_sum(s)
                    far_spread += _own_sum(s * s)
            p, sums = _weigh(s, reference, c, sums, DTYPE, P, LEVEL)
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
        if BOUNDED:
            stage, phase, turn_phase = _pass(
                low - lowest, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES, VALUES
            )
        good = (c < _SCALE_LIMIT) & (c > 1 / _SCALE_LIMIT)
        of_next = _begin(
            slot, mail_phase, stage, phase, q_phase, turn_phase, common, post, turns, grams,
            who, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, GRAMS,
        )  # fmt: skip
        next_s, item, tiles, place, next_c, moments, slot, mail_phase, stage, phase, q_phase, turn_phase = of_next

        # What is not a number fails every comparison. A row that sees nothing has nothing to fail.
        total, tilted, squares, largest = sums
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


@gluon.jit
def _rings(
    q_desc, k_desc, v_desc,
    CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Shared memory for the tiles of Q, K and V, the barriers that say when they are full and empty, and the mail."""
    DTYPE: gl.constexpr = q_desc.dtype
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, _M, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], k_desc.layout)
    # Without values the name stays, and nothing is kept under it.
    v_tiles = k_tiles
    if VALUES:
        v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], ONE)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], ONE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    mail = gl.allocate_shared_memory(gl.int32, [2 * _LETTER, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    for i in gl.static_range(2):
        mbarrier.init(mail_full.index(i), count=1)
        mbarrier.init(mail_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    return (q_tiles, k_tiles, v_tiles), barriers, (mail, mail_full, mail_empty)


_NUMBERS = (
    "queries", "keys", "low", "high", "heads", "ratio", "blocks", "pairs", "together", "items", "choices",
    "granule", "granules",
)  # fmt: skip
_POINTERS = (
    "key_sums_ptr", "scale_ptr", "sinks_ptr", "first_ptr", "stop_ptr", "wide_ptr", "flags", "counter",
    "lse_ptr", "max_ptr", "weight_ptr", "expected_ptr", "entropy_ptr", "collision_ptr", "norm_ptr", "mean_ptr",
    "std_ptr", "qk_ptr", "opening_ptr", "sink_ptr", "visible_ptr", "nonfinite_ptr",
)  # fmt: skip


# One kernel for all numbers and pointers, whatever divides them.
@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    q_desc, k_desc, v_desc, o_desc, grams_desc, key_sums_ptr, scale_ptr, sinks_ptr, first_ptr, stop_ptr, wide_ptr,
    lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
    qk_ptr, opening_ptr, sink_ptr, visible_ptr, nonfinite_ptr, flags, counter,
    queries, keys, low, high, heads, ratio, blocks, pairs, together, items, choices, granule, granules,
    CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr, GRAMS: gl.constexpr,
):  # fmt: skip
    buffers, barriers, post = _rings(q_desc, k_desc, v_desc, CONSUMERS, D, N, STAGES, VALUES)
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
    grams = (grams_desc, key_sums_ptr, granule, granules)
    results = (o_desc, o_tiles, wide_ptr, field_ptrs, count_ptrs, flags, sinks_ptr)
    given = (common, post, turns, grams, results)
    supply = (common, post, inputs, grams, counter)
    # A variable would make tensors of the constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL, GRAMS)),
                (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL, GRAMS)),
                (_producer, (supply, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, False, True, GRAMS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL, GRAMS)),
                (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL, GRAMS)),
                (_consumer, (given, 2, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, LEVEL, GRAMS)),
                (_producer, (supply, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, False, True, GRAMS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )


def configuration(head_dim: int, level: int, *, bounded: bool, values: bool, summed: bool) -> dict[str, int]:
    """Consumers, keys of a tile, tiles of the rings and registers of a consumer."""
    if not values:
        return {"CONSUMERS": 3, "N": 128, "STAGES": 4, "REGISTERS": 160}
    if head_dim == 128:
        return {"CONSUMERS": 2, "N": 128, "STAGES": 2, "REGISTERS": 240}
    if level == 3 and bounded and not summed:
        # Three consumers have too few registers for all that.
        return {"CONSUMERS": 2, "N": 128, "STAGES": 5, "REGISTERS": 240}
    return {"CONSUMERS": 3, "N": 128, "STAGES": 5, "REGISTERS": 160}


@functools.cache
def processors(device: int) -> int:
    """How many there are of a Hopper GPU; none of another."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if (properties.major, properties.minor) == (9, 0) else 0


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


@functools.cache
def _layout(rows: int, depth: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, depth], _DTYPES[dtype])


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """A tensor as the copy engine knows it, in blocks of some rows of one head."""
    block = [1, 1, rows, x.shape[-1]]
    layout = _layout(rows, x.shape[-1], x.dtype)
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


def together_in_cache(call: Call) -> int:
    """How many (batch, head) are worked on together."""
    batch, heads, _, head_dim = call.q.shape
    share = 2 * call.k.shape[2] * head_dim * call.q.element_size() // call.group or 1
    return max(1, min(batch * heads, _CACHED_BYTES // share))


def scale_choices(scale: Tensor) -> int:
    """The bits of `choices` about the scale."""
    bits = (scale.shape[0] > 1, _SCALE_PER_BATCH), (scale.shape[1] > 1, _SCALE_PER_HEAD)
    return sum(bit.value for there, bit in bits if there)


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
    summed = level == 3 and worthwhile(call)
    choice = configuration(head_dim, level, bounded=bounded, values=v is not None, summed=summed)
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
    blocks = -(-queries // (ROWS * choice["CONSUMERS"]))
    k_desc = described(k, choice["N"])
    q_desc = described(q, ROWS)
    sums = None
    if summed:
        # All keys but those of the tile at which every item begins.
        sums = grams(call, (-(-keys // choice["N"]) - 1) * choice["N"])
    with torch.cuda.device(q.device):
        arguments = (
            q_desc,
            k_desc,
            k_desc if v is None else described(v, choice["N"]),
            q_desc if output is None else described(output, ROWS),
            q_desc if sums is None else described(sums.parts, head_dim),
            scale if sums is None else sums.sums,
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
            1 if sums is None else sums.granule,
            0 if sums is None else sums.granules,
            choice["CONSUMERS"],
            head_dim,
            choice["N"],
            choice["STAGES"],
            choice["REGISTERS"],
            bounded,
            v is not None,
            level,
            sums is not None,
        )
        # Bounds that are not there are stood in for by something of another type.
        form = (
            q.dtype, head_dim, bounded, v is None, level, sums is None, first.dtype, scale.dtype, sinks.dtype, q.device
        )  # fmt: skip
        launch(_kernel, min(pairs * blocks, processors(q.device.index)), arguments, form=form, num_warps=4)
