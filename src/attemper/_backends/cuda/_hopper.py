# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""Attention for Hopper GPUs: one pass with its statistics, written in Triton's Gluon dialect.

A block of threads is one warp that copies (the producer), two or three warpgroups that compute (the consumers), 64
query rows each, and two warps that write down what was measured (the scribe). The producer takes items, blocks of
query rows of one head, from a counter in memory until none is left, says what they are in a mailbox, and keeps rings
of tiles of K and V full. A consumer starts QKᵀ of a tile and PV of the tile before, then takes the softmax; mostly they
start their products in turn, so that while one exponentiates, another multiplies. At the end of an item a consumer
starts QKᵀ of the next before it writes the output. Its sums it leaves to the scribe, who makes the fields of them
meanwhile.

The exponent has a fixed reference, per row the largest score of the first tile in which the row sees a key, and nothing
is ever rescaled. Where that was a bad choice (a later score more than 60 powers of two above) and wherever a number is
not finite, the 64 rows are flagged, and somebody else has to compute them again.

Without values there is nothing to multiply but QKᵀ, and consumers do something else: see `_hopper_read`.

Scores are counted in powers of two: x = s·scale·log₂e − reference, p = 2ˣ, and the statistics follow from Σp, Σp·x, Σp²
and max p. The moments of the scores themselves follow from Σx and Σx², or from a table of sums over keys (see
`_moments`), which comes as one tile more: qᵀ(Σ(k − k̄)(k − k̄)ᵀ)q begins like QKᵀ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._operator import COUNTS
from ._hopper_read import _reader
from ._hopper_scribe import _NORM, _SINKS, _SINKS_PER_BATCH, _SINKS_PER_HEAD, _TURNED, _desk, _keep, _leave, _scribe
from ._hopper_supply import (
    _DTYPES,
    _M,
    ROWS,
    Configuration,
    _advance,
    _begin,
    _bounds,
    _give,
    _log2,
    _next,
    _of_head,
    _producer,
    _rings,
    _there,
    described,
    limits_of,
    processors,
    scale_choices,
    together_in_cache,
)
from ._hopper_tile import _NO_REFERENCE, _column, _first, _look, _opening, _own_bits, _own_sum, _turned, _weigh
from ._moments import KeySums, all_seen
from ._ready import copyable, launch

if TYPE_CHECKING:
    from .._operator import Call

FIELDS = (
    "logsumexp", "max_logit", "largest_weight", "expected_score", "entropy", "collision", "output_norm", "score_mean",
    "score_std", "max_qk", "first_key_weight", "sink_mass", "visible_keys", "nonfinite",
)  # fmt: skip
"""What this kernel measures, in the order of the lowest bits of its `choices`."""

# Numbers that are not finite are all found from level 2 on.
_LEVELS = dict(zip(FIELDS, (0, 1, 1, 2, 2, 2, 2, 3, 3, 1, 3, 0, 0, 2), strict=True))


@gluon.jit
def _consumer(
    given,
    who: gl.constexpr, ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, BOUNDED: gl.constexpr, LEVEL: gl.constexpr, TABLE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    common, post, turns, desk, results = given
    _, limits, sizes, shape, choices, buffers, barriers = common
    pile, pile_full, pile_empty = desk
    o_desc, o_tiles, wide_ptr, sinks_ptr, mean_ptr = results
    queries, keys = sizes
    heads = shape[0]
    ratio = shape[1]
    items = shape[5]
    q_tiles, k_tiles, v_tiles = buffers
    _q_full, q_empty, k_full, v_full, empty = barriers
    DTYPE: gl.constexpr = q_tiles.dtype
    # Where the scores lie, the accumulator of the output, the weights as its left side, and rows.
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    R: gl.constexpr = gl.SliceLayout(1, S)
    # Whether scores are added up, and are not in a table.
    ADD: gl.constexpr = LEVEL >= 3 and not TABLE
    # In turn, whoever has fewer tiles of an item waits for the others. Where bounds make them differ that costs more
    # than it gains, but for what needs sums over the weights and no more.
    TURNS: gl.constexpr = not (BOUNDED and (LEVEL == 0 or LEVEL >= 3))
    # Whether the next rows of Q come to where these are, and so no later than can be.
    SOON: gl.constexpr = ITEMS == 1 and not TABLE
    zero = gl.zeros([_M, N], gl.float32, S)
    nothing = gl.zeros_like(_own_sum(zero))
    slot = 0
    mail_phase = 0
    stage = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    pile_phase = 1
    turn_phase = 1 if who == 0 else 0
    # It is the scribe who says that a letter was read: he is the last at every item.
    item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, keys, N, BOUNDED, False)
    s, stage, phase, q_slot, q_phase, turn_phase = _begin(
        item, tiles, 0, stage, phase, q_slot, q_phase, turn_phase, common, turns,
        who, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, True, TURNS,
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=(s,))
    while item < items:
        lowest, _highest, low, high, free_low, free_high, stop, blank = tiles
        batch, head, row = place
        rows = row + gl.arange(0, _M, R)
        if BOUNDED:
            first, last = _bounds(limits, batch, rows, sizes, choices)
            width = last - first
        else:
            first = gl.zeros([_M], gl.int32, R)
            width = first + keys

        of_item = (q_slot + ITEMS - 1) % ITEMS * CONSUMERS + who
        q = q_tiles.index(of_item).reshape([_M, D])
        o = gl.zeros([_M, D], gl.float32, A)
        # The last two are over the scores themselves, not weighed.
        sums = (nothing, nothing, nothing, nothing.to(gl.int32), nothing, nothing)
        opening = nothing.to(gl.int32)
        reference = gl.full([_M], _NO_REFERENCE, gl.float32, R)
        # Of this tile of K, and of the tile of V before it.
        mbarrier.arrive(empty.index(stage))
        if SOON and high - low == 1:
            mbarrier.arrive(q_empty.index(of_item))
        if LEVEL >= 3:
            opening = _opening(s)
        p, reference, sums = _first(
            s, (high - 1) * N, stop, (first, width), reference, c, sums, P, DTYPE, LEVEL, ADD, BOUNDED
        )
        v_stage = stage
        v_phase = phase
        stage, phase = _advance(stage, phase, STAGES)
        for step in range(1, high - low):
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                mbarrier.wait(turns.index(who), turn_phase)
                turn_phase ^= 1
            k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
            s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
            s = warpgroup_mma_wait(1, deps=(s,))
            if SOON and step == high - low - 1:
                mbarrier.arrive(q_empty.index(of_item))
            tile = high - 1 - step
            if LEVEL >= 3:
                opening = _opening(s)
            clear = True
            if BOUNDED:
                clear = (tile >= free_low) & (tile < free_high)
            if ADD:
                # Here and there, and not once for both: what fills the time that exponentials take must not lie beyond
                # a branch. The frequent case comes first: code behind a jump has to be waited for.
                if clear:
                    weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, True, False)
                    p = gl.convert_layout(weights, P)
                else:
                    s, reference = _look(s, tile * N, (first, width), reference, c)
                    weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, True, True)
                    p = gl.convert_layout(weights, P)
            else:
                if BOUNDED and not clear:
                    s, reference = _look(s, tile * N, (first, width), reference, c)
                weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, False, False)
                p = gl.convert_layout(weights, P)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(empty.index(stage))
            v_stage = stage
            v_phase = phase
            stage, phase = _advance(stage, phase, STAGES)
        mbarrier.wait(pile_empty.index(who), pile_phase)
        pile_phase ^= 1
        if TABLE:
            # As one tile more.
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.wait(turns.index(who), turn_phase)
            turn_phase ^= 1
            table = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
            x = warpgroup_mma(q, table, zero, use_acc=False, is_async=True)
            if N == D:
                mbarrier.wait(v_full.index(stage), phase)
                x = warpgroup_mma(q, v_tiles.index(stage).reshape([N, D]).permute((1, 0)), x, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
            mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
            x = warpgroup_mma_wait(1, deps=(x,))
            unit = batch * (heads // ratio) + head // ratio
            turned, middle = _turned(x, q, mean_ptr + unit * D, D, N)
            _keep(pile, _TURNED, who, turned)
            _keep(pile, _TURNED + 1, who, middle)
        else:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            o = warpgroup_mma(p, v_tiles.index(v_stage).reshape([N, D]), o, is_async=True)
        # While the last product is under way: what is left to the scribe, and the next letter.
        _leave(pile, who, sums, reference, opening, LEVEL, ADD)
        item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, keys, N, BOUNDED, False)
        if BOUNDED:
            # Before tiles go by: they say that the place of the last V is free.
            o = warpgroup_mma_wait(0, deps=(o,))
        table_stage = stage
        if TABLE:
            stage, phase = _advance(stage, phase, STAGES)
        if TABLE and ITEMS == 1:
            mbarrier.arrive(q_empty.index(of_item))
        next_s, stage, phase, q_slot, q_phase, turn_phase = _begin(
            item, tiles, low - lowest, stage, phase, q_slot, q_phase, turn_phase, common, turns,
            who, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, True, TURNS,
        )  # fmt: skip

        if not BOUNDED:
            o = warpgroup_mma_wait(1, deps=(o,))
        if TABLE:
            mbarrier.arrive(empty.index(table_stage))
        total = gl.convert_layout(gl.sum(sums[0], axis=1), R)
        share = 1.0 / total
        if (choices & _SINKS) > 0:
            sink = _of_head(sinks_ptr, batch, head, heads, choices, _SINKS_PER_BATCH, _SINKS_PER_HEAD)
            share *= 1.0 / (1.0 + gl.exp2(sink - reference - _log2(total)))
        o = o * _column(share, o)
        if BOUNDED and blank > 0:
            o = gl.where(_column(width > 0, o), o, 0.0)
        norm = _own_sum(o * o)
        if LEVEL >= 2:
            # Squares of very small numbers are 0.
            lost = gl.convert_layout(_own_bits(o.to(gl.int32, bitcast=True)) & 0x7FFFFFFF, norm.type.layout) > 0
            norm = gl.where((norm < 2.0**-110) & lost, float("inf"), norm)
        _keep(pile, _NORM, who, norm)
        mbarrier.arrive(pile_full.index(who))
        if WIDE:
            wide_rows = row + gl.arange(0, _M, gl.SliceLayout(1, A))
            start = wide_ptr + batch * o_desc.strides[0] + head * o_desc.strides[1]
            places = gl.expand_dims(wide_rows.to(gl.int64) * o_desc.strides[2], 1)
            places += gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, A)), 0)
            gl.store(start + places, o, mask=gl.expand_dims(_there(wide_rows, queries), 1))
        tma.store_wait(0)
        _give(o.to(DTYPE), o_desc, batch, head, gl.where(row < 0, queries, row), o_tiles.index(who))
        s = warpgroup_mma_wait(0, deps=(next_s,))
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
    q_desc, k_desc, v_desc, o_desc, t_desc, scale_ptr, sinks_ptr, first_ptr, stop_ptr, wide_ptr, key_mean_ptr,
    lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
    qk_ptr, opening_ptr, sink_ptr, visible_ptr, nonfinite_ptr, flags, counter,
    queries, keys, low, high, heads, ratio, blocks, pairs, together, items, choices,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, OTHERS: gl.constexpr, BOUNDED: gl.constexpr, VALUES: gl.constexpr, LEVEL: gl.constexpr,
    TABLE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    buffers, barriers, post = _rings(q_desc, k_desc, v_desc, ITEMS, CONSUMERS, D, N, STAGES, VALUES, 1)
    q_tiles = buffers[0]
    o_tiles = q_tiles
    if VALUES:
        o_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, _M, D], o_desc.layout)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    desk = _desk(CONSUMERS, VALUES, LEVEL, TABLE)
    sizes = (queries, keys)
    shape = (heads, ratio, blocks, pairs, together, items)
    limits = (first_ptr, stop_ptr, low, high)
    fields = (
        lse_ptr, max_ptr, weight_ptr, expected_ptr, entropy_ptr, collision_ptr, norm_ptr, mean_ptr, std_ptr,
        qk_ptr, opening_ptr, sink_ptr,
    )  # fmt: skip
    counts = (visible_ptr, nonfinite_ptr)
    common = (scale_ptr, limits, sizes, shape, choices, buffers, barriers)
    inputs = (q_desc, k_desc, v_desc, q_desc, q_tiles, t_desc)
    results = (o_desc, o_tiles, wide_ptr, sinks_ptr, key_mean_ptr)
    given = (common, post, turns, desk, results)
    supply = (common, post, inputs, counter)
    asked = (common, post, desk, fields, counts, flags, sinks_ptr)
    # A variable would make tensors of the constants.
    if not VALUES:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (_reader, (given, 0, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE)),
                (_reader, (given, 1, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE)),
                (_scribe, (asked, ITEMS, CONSUMERS, N, BOUNDED, VALUES, LEVEL, TABLE)),
                (_producer, (supply, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, False, TABLE)),
            ],
            [4, 2, 1],
            [REGISTERS, OTHERS, OTHERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE, WIDE)),
                (_consumer, (given, 1, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE, WIDE)),
                (_scribe, (asked, ITEMS, CONSUMERS, N, BOUNDED, VALUES, LEVEL, TABLE)),
                (_producer, (supply, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, False, TABLE)),
            ],
            [4, 2, 1],
            [REGISTERS, OTHERS, OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE, WIDE)),
                (_consumer, (given, 1, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE, WIDE)),
                (_consumer, (given, 2, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, LEVEL, TABLE, WIDE)),
                (_scribe, (asked, ITEMS, CONSUMERS, N, BOUNDED, VALUES, LEVEL, TABLE)),
                (_producer, (supply, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, VALUES, False, TABLE)),
            ],
            [4, 4, 2, 1],
            [REGISTERS, REGISTERS, OTHERS, OTHERS],
        )


MANY_KEYS = 3072
"""From so many on, larger tiles gain more than a smaller first one."""


def configuration(head_dim: int, level: int, keys: int, *, bounded: bool, values: bool) -> Configuration:
    """What measured best."""
    if not values:
        # While one block waits, the other goes on.
        stages = 3 if head_dim == 128 else 6
        items = 1 if head_dim == 128 else 2
        return Configuration(resident=2, items=items, consumers=2, keys=64, stages=stages, registers=104, others=32)
    if head_dim == 128:
        if level == 3 and bounded and keys < MANY_KEYS:
            # A first tile, which takes longer than the others, and which few follow.
            return Configuration(resident=1, items=1, consumers=2, keys=64, stages=4, registers=232, others=40)
        return Configuration(resident=1, items=1, consumers=2, keys=128, stages=2, registers=232, others=40)
    if bounded:
        # Less is hidden at the end of what rows see, and moments of 64 keys fit into the registers of three consumers.
        return Configuration(resident=1, items=2, consumers=3, keys=64, stages=6, registers=160, others=32)
    return Configuration(resident=1, items=2, consumers=3, keys=128, stages=3, registers=160, others=32)


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


def takes_sums(call: Call) -> bool:
    """Whether it makes the moments of a call from sums over keys itself."""
    # For deeper heads without values there are too few registers.
    return all_seen(call) and (call.v is not None or call.q.shape[3] == 64)


def forward(
    call: Call,
    output: Tensor | None,
    wide: Tensor | None,
    fields: dict[str, Tensor],
    flags: Tensor,
    sums: KeySums | None = None,
) -> None:
    """Fill the output, the same in float32 (`wide`), the fields and one flag per 64 query rows of each (batch, head).

    Where a flag is 1, all else of these rows has to be computed again by other means. `fields` has names of FIELDS,
    each (batch, heads, queries). `wide` is laid out as the output. Without values there is no output. The flags come as
    zeros, with one number more at their end, by which the kernel counts. "first_key_weight" can be among the fields
    where all rows begin at the first key. Where there are sums over keys, for a call of several tiles that it
    `takes_sums` of, the moments of scores come from them.
    """
    q, k, v = call.q, call.k, call.v
    if output is not None and not (copyable(output) and (wide is None or wide.stride() == output.stride())):
        # Through memory that the copy engine writes; nobody has asked for this yet.
        staged = torch.empty_like(output, memory_format=torch.contiguous_format)
        staged_wide = None if wide is None else torch.empty_like(wide, memory_format=torch.contiguous_format)
        forward(call, staged, staged_wide, fields, flags, sums)
        output.copy_(staged)
        if wide is not None and staged_wide is not None:
            wide.copy_(staged_wide)
        return
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    # Four kernels: what everybody needs, what a gradient needs, sums over the weights, and over the scores too.
    level = max((_LEVELS[name] for name in fields), default=0)
    limits = limits_of(call, flags)
    choice = configuration(head_dim, level, keys, bounded=limits.bounded, values=v is not None)
    scale = call.scale.contiguous()
    sinks = scale if call.sinks is None else call.sinks.contiguous()
    choices = scale_choices(scale) | limits.choices
    choices |= sum(1 << bit for bit, name in enumerate(FIELDS) if name in fields)
    for there, bit in (
        (call.sinks is not None, _SINKS),
        (sinks.shape[0] > 1, _SINKS_PER_BATCH),
        (sinks.shape[1] > 1, _SINKS_PER_HEAD),
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
            k_desc if sums is None else described(sums.tables, choice.keys),
            scale,
            sinks,
            limits.first,
            limits.stop,
            scale if wide is None else wide,
            flags if sums is None else sums.means,
            *(fields.get(name, flags if name in COUNTS else scale) for name in FIELDS),
            flags,
            flags[-1:],
            queries,
            keys,
            limits.low,
            limits.high,
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
            choice.others,
            limits.bounded,
            v is not None,
            level,
            sums is not None,
            wide is not None,
        )
        # Bounds and counts that are not there are stood in for by something of another type.
        form = (
            q.dtype, head_dim, limits.bounded, v is None, level, choice, sums is None, wide is None, limits.first.dtype,
            scale.dtype, sinks.dtype, *(name in fields for name in COUNTS), q.device,
        )  # fmt: skip
        programs = min(pairs * blocks, processors(q.device.index) * choice.resident)
        launch(_kernel, programs, arguments, form=form, num_warps=4, maxnreg=choice.launched)
