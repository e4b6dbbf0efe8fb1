# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""What a consumer of the kernel for Hopper GPUs does without values: measure, and multiply the next tile meanwhile.

There is no product PV under which another consumer's exponentials could go on, and no accumulator of the output. Its
registers hold the scores of a second tile: QKᵀ of the next is under way while the weights of one are added up. See
`_hopper`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ._hopper_scribe import _TURNED, _keep, _leave
from ._hopper_supply import _M, _advance, _begin, _bounds, _next
from ._hopper_tile import _NO_REFERENCE, _look, _opening, _own_sum, _turned, _weigh


@gluon.jit
def _multiply(
    q, s, stage, phase, buffers, barriers, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    MORE: gl.constexpr = False,
):  # fmt: skip
    """Start QKᵀ of the next tile, with MORE on top of what is there, and give the place of the one before it back."""
    _, k_tiles, _ = buffers
    _q_full, _q_empty, k_full, _v_full, empty = barriers
    done = stage
    stage, phase = _advance(stage, phase, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
    s = warpgroup_mma(q, k, s, use_acc=MORE, is_async=True)
    mbarrier.arrive(empty.index(done))
    return s, stage, phase


@gluon.jit
def _reader(
    given,
    who: gl.constexpr, ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, BOUNDED: gl.constexpr, LEVEL: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    common, post, turns, desk, results = given
    mean_ptr = results[4]
    _, limits, sizes, shape, choices, buffers, barriers = common
    pile, pile_full, pile_empty = desk
    keys = sizes[1]
    heads = shape[0]
    ratio = shape[1]
    items = shape[5]
    q_tiles, _k_tiles, _ = buffers
    _q_full, q_empty, _k_full, _v_full, empty = barriers
    DTYPE: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    R: gl.constexpr = gl.SliceLayout(1, S)
    ADD: gl.constexpr = LEVEL >= 3 and not TABLE
    # Tiles above those that all rows see, these, and tiles below; under no bounds there are none below.
    PARTS: gl.constexpr = 2 if BOUNDED else 1
    zero = gl.zeros([_M, N], gl.float32, S)
    nothing = gl.zeros_like(_own_sum(zero))
    slot = 0
    mail_phase = 0
    stage = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    pile_phase = 1
    item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, keys, N, BOUNDED, False)
    s, stage, phase, q_slot, q_phase, _turn_phase = _begin(
        item, tiles, 0, stage, phase, q_slot, q_phase, 0, common, turns,
        who, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, False, False,
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=(s,))
    while item < items:
        lowest, _highest, low, high, free_low, free_high, _stop, _blank = tiles
        batch, head, row = place
        if BOUNDED:
            first, last = _bounds(limits, batch, row + gl.arange(0, _M, R), sizes, choices)
            width = last - first
        else:
            first = gl.zeros([_M], gl.int32, R)
            width = first + keys
        of_item = (q_slot + ITEMS - 1) % ITEMS * CONSUMERS + who
        q = q_tiles.index(of_item).reshape([_M, D])
        # The last two are over the scores themselves, not weighed.
        sums = (nothing, nothing, nothing, nothing.to(gl.int32), nothing, nothing)
        opening = nothing.to(gl.int32)
        reference = gl.full([_M], _NO_REFERENCE, gl.float32, R)
        # Tiles that all rows see go in pairs, so that their scores change places without being moved. The first, from
        # which references come, is not one of them, nor the last, beside which nothing is multiplied.
        clear_low = low + 1
        clear_high = high - 1
        if BOUNDED:
            clear_low = gl.maximum(clear_low, free_low)
            clear_high = gl.minimum(clear_high, free_high)
        pairs = gl.maximum(clear_high - clear_low, 0) // 2
        single = high - low - 1
        above = gl.where(pairs > 0, high - clear_low - 2 * pairs, single)
        below = single - above - 2 * pairs
        tile = high - 1
        for part in range(PARTS):
            # By its number: that a loop sets the bound of another to a constant, Triton 3.6 forgets.
            for _step in range(gl.where(part == 0, above, below)):
                coming, stage, phase = _multiply(q, zero, stage, phase, buffers, barriers, N, D, STAGES)
                s, reference = _look(s, tile * N, (first, width), reference, c)
                _weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, ADD, True)
                s = warpgroup_mma_wait(0, deps=(coming,))
                tile -= 1
            for _step in range(gl.where(part == 0, pairs, 0)):
                coming, stage, phase = _multiply(q, zero, stage, phase, buffers, barriers, N, D, STAGES)
                _weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, ADD, False)
                coming = warpgroup_mma_wait(0, deps=(coming,))
                s, stage, phase = _multiply(q, zero, stage, phase, buffers, barriers, N, D, STAGES)
                _weights, sums = _weigh(coming, reference, c, sums, DTYPE, LEVEL, ADD, False)
                s = warpgroup_mma_wait(0, deps=(s,))
                tile -= 2
        if TABLE:
            # Its two tiles follow those of K, of which there are several. There are bounds for no row.
            x, stage, phase = _multiply(q, zero, stage, phase, buffers, barriers, N, D, STAGES)
            opening = _opening(s)
            _weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, ADD, False)
            x = warpgroup_mma_wait(0, deps=(x,))
            x, stage, phase = _multiply(q, x, stage, phase, buffers, barriers, N, D, STAGES, True)
            x = warpgroup_mma_wait(0, deps=(x,))
            turned, middle = _turned(x, q, mean_ptr + (batch * (heads // ratio) + head // ratio) * D, D, N)
        mbarrier.arrive(empty.index(stage))
        stage, phase = _advance(stage, phase, STAGES)
        if ITEMS == 1:
            mbarrier.arrive(q_empty.index(of_item))
        if not TABLE:
            if LEVEL >= 3:
                opening = _opening(s)
            hidden = single == 0
            if BOUNDED:
                hidden = hidden | (tile < free_low) | (tile >= free_high)
            if hidden:
                s, reference = _look(s, tile * N, (first, width), reference, c)
            _weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, ADD, BOUNDED)
        mbarrier.wait(pile_empty.index(who), pile_phase)
        pile_phase ^= 1
        _leave(pile, who, sums, reference, opening, LEVEL, ADD)
        if TABLE:
            _keep(pile, _TURNED, who, turned)
            _keep(pile, _TURNED + 1, who, middle)
        item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, keys, N, BOUNDED, False)
        s, stage, phase, q_slot, q_phase, _turn_phase = _begin(
            item, tiles, low - lowest, stage, phase, q_slot, q_phase, 0, common, turns,
            who, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, False, False,
        )  # fmt: skip
        mbarrier.arrive(pile_full.index(who))
        s = warpgroup_mma_wait(0, deps=(s,))
