# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""What flows back to keys and values on Hopper GPUs: their gradients, from all query rows that see them.

As in `_hopper`, whose letters and rings these are, with the parts exchanged: a consumer has 64 keys, and tiles of 64
query rows go by, those of Q and of dO together. With scores turned round, a key to a row, P and dS lie where the
products want their left side,

    dV += Pᵀ·dO,    dK += dSᵀ·Q,    dS = P∘(dP − pull),    dPᵀ = V·dOᵀ,

and all that is known of a query row (the logarithm of its sum, its pull, which keys it sees) are numbers per column,
which the producer leaves in shared memory beside the tile. Nothing is added up in an order that changes from run to
run. 64 keys with a gradient that is not finite are flagged, and somebody else has to compute them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ._hopper_supply import (
    _FARTHEST,
    _LETTER,
    _LETTERS,
    _LN_2,
    _LOG2_E,
    _M,
    _SCALE_PER_BATCH,
    _SCALE_PER_HEAD,
    ROWS,
    Configuration,
    _address,
    _advance,
    _bounds,
    _copy_in,
    _flag,
    _give,
    _log2,
    _next,
    _of_head,
    _pass,
    _place,
    _rings,
    _send_queries,
    _write,
    described,
    limits_of,
    processors,
    scale_choices,
    together_in_cache,
)
from ._hopper_tile import _halves, _joined, _within
from ._ready import launch

if TYPE_CHECKING:
    from .._operator import Call
    from ._hopper_to_queries import Rows


_LARGEST = gl.constexpr(2.0**16)
"""Of scores up to it a logsumexp in float32 has digits enough behind the point."""


@gluon.jit
def _announce(
    item, common, ranges, mail, letter, CONSUMERS: gl.constexpr, N: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Write the letter of an item: which tiles of query rows it needs, and which of these see all keys of a consumer.

    `ranges` has four numbers for each tile of an entry of the batch: from which key to which one any of its rows sees,
    and from which to which all do.
    """
    scale_ptr, _, sizes, shape, choices, _, _ = common
    keys, queries = sizes
    heads, _, blocks, pairs, together, items = shape
    # Beyond the last item there is one more letter, which says so. Under a causal mask the first keys are seen most.
    pair, block = _place(gl.minimum(item, items - 1), blocks, pairs, together, BOUNDED, True)
    batch = pair // heads
    head = pair % heads
    key = block * (CONSUMERS * _M)
    c = _of_head(scale_ptr, batch, head, heads, choices, _SCALE_PER_BATCH, _SCALE_PER_HEAD)
    lowest = 0
    highest = gl.cdiv(queries, N)
    if BOUNDED:
        tiles = highest
        lowest = tiles
        highest = 0
        for who in range(CONSUMERS):
            start = key + who * _M
            end = gl.minimum(start + _M, keys)
            low = tiles
            high = 0
            # Of those that see all, from the first to the last, and how many.
            inner = tiles
            outer = 0
            count = 0
            for begin in range(0, tiles, 32):
                tile = begin + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
                there = tile < tiles
                place = ranges + (batch.to(gl.int64) * tiles + tile) * 4
                least = gl.load(place, mask=there, other=_FARTHEST)
                most = gl.load(place + 1, mask=there, other=0)
                clear = gl.load(place + 2, mask=there, other=_FARTHEST)
                clear_stop = gl.load(place + 3, mask=there, other=0)
                meets = (least < end) & (most > start)
                whole = meets & (clear <= start) & (clear_stop >= end)
                low = gl.minimum(low, gl.min(gl.where(meets, tile, _FARTHEST), axis=0))
                high = gl.maximum(high, gl.max(gl.where(meets, tile + 1, 0), axis=0))
                inner = gl.minimum(inner, gl.min(gl.where(whole, tile, _FARTHEST), axis=0))
                outer = gl.maximum(outer, gl.max(gl.where(whole, tile + 1, 0), axis=0))
                count += gl.sum(whole.to(gl.int32), axis=0)
            _write(mail, letter + 7 + 5 * who, low)
            _write(mail, letter + 8 + 5 * who, high * N)
            _write(mail, letter + 9 + 5 * who, inner)
            # All in one run, or none.
            _write(mail, letter + 10 + 5 * who, gl.where(count == outer - inner, outer, 0))
            # Whether there is a key that no row sees makes no difference here.
            _write(mail, letter + 11 + 5 * who, 0)
            lowest = gl.minimum(lowest, low)
            highest = gl.maximum(highest, high)
        highest = gl.maximum(highest, 1)
        lowest = gl.minimum(lowest, highest - 1)
    _address(mail, letter, item, lowest, highest, batch, head, key, c)
    return lowest, highest, batch, head, key


@gluon.jit
def _send_rows(
    batch, head, row, stage, phase, common, rows_in, lines, inputs, STAGES: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Copy a tile of Q and of dO into the rings once there is room, and what is known of their rows beside it."""
    _, limits, sizes, _, choices, buffers, barriers = common
    max_ptr, share_ptr, pull_ptr, heads = rows_in
    of_rows, of_limits, rows_full = lines
    _, q_desc, g_desc, _, _, _ = inputs
    _, q_tiles, g_tiles = buffers
    _, _, q_full, g_full, empty = barriers
    # Two numbers a thread: of one each Triton makes `stmatrix`, and with that gradients of keys were wrong on an H200.
    rows = row + gl.arange(0, _M, gl.BlockedLayout([2], [32], [1], [0]))
    keys, queries = sizes
    there = rows < queries
    at = (batch * heads + head).to(gl.int64) * queries + rows
    largest = gl.load(max_ptr + at, mask=there, other=0.0)
    share = gl.load(share_ptr + at, mask=there, other=0.0)
    pull = gl.load(pull_ptr + at, mask=there, other=0.0)
    first = rows
    stop = rows
    if BOUNDED:
        first, stop = _bounds(limits, batch, rows, (queries, keys), choices)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
    _copy_in(q_desc, [batch, head, row, 0], q_full.index(stage), q_tiles.index(stage))
    mbarrier.expect(g_full.index(stage), g_desc.block_type.nbytes)
    _copy_in(g_desc, [batch, head, row, 0], g_full.index(stage), g_tiles.index(stage))
    # Where there is no row, or one that sees nothing, all weights are 0.
    # Beside a score that is too large the logarithm is lost: NaN, which is flagged.
    logsumexp = gl.where(gl.abs(largest) < _LARGEST, largest * _LOG2_E - _log2(share), float("nan"))
    logsumexp = gl.where(share == 0, float("inf"), logsumexp)
    of_rows.index(2 * stage).store(logsumexp)
    of_rows.index(2 * stage + 1).store(pull)
    if BOUNDED:
        of_limits.index(2 * stage).store(first)
        of_limits.index(2 * stage + 1).store(stop - first)
    mbarrier.arrive(rows_full.index(stage))
    return _advance(stage, phase, STAGES)


@gluon.jit
def _producer(
    supply, CONSUMERS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Announce an item, then send its keys and values, and all tiles of rows of all heads that share them."""
    common, post, inputs, counter, rows_in, lines, ranges = supply
    _, _, _, shape, _, buffers, barriers = common
    mail, mail_full, mail_empty = post
    ratio = shape[1]
    items = shape[5]
    stage = 0
    phase = 1
    k_slot = 0
    k_phase = 1
    slot = 0
    mail_phase = 1
    item = gl.program_id(0)
    last = False
    while not last:
        mbarrier.wait(mail_empty.index(slot), mail_phase)
        lowest, highest, batch, kv_head, key = _announce(
            item, common, ranges, mail, slot * _LETTER, CONSUMERS, N, BOUNDED
        )
        mbarrier.arrive(mail_full.index(slot))
        slot, mail_phase = _advance(slot, mail_phase, _LETTERS)
        last = item >= items
        if item < items:
            k_slot, k_phase = _send_queries(
                batch, kv_head, key, k_slot, k_phase, inputs, buffers, barriers, 1, CONSUMERS, True
            )
            for member in range(ratio):
                for step in range(highest - lowest):
                    stage, phase = _send_rows(
                        batch, kv_head * ratio + member, (highest - 1 - step) * N, stage, phase, common, rows_in, lines,
                        inputs, STAGES, BOUNDED,
                    )  # fmt: skip
            item = gl.atomic_add(counter, 1) + gl.num_programs(0)


@gluon.jit
def _columns(numbers, start: gl.constexpr, like):
    """Numbers for the columns of a part of a tile, which begins at one of them."""
    part = numbers.slice(start, like.shape[1])
    return gl.expand_dims(part.load(gl.SliceLayout(0, like.type.layout)), 0)


@gluon.jit
def _weights(s, c, numbers, start: gl.constexpr):
    """P of a tile. Some columns at a time, and so are their numbers: for all of them there are no registers."""
    if s.shape[1] > 16:
        left, right = _halves(s)
        middle: gl.constexpr = start + s.shape[1] // 2
        return _joined(_weights(left, c, numbers, start), _weights(right, c, numbers, middle))
    else:
        return gl.exp2(s * c - _columns(numbers, start, s))


@gluon.jit
def _pushed(p, off, numbers, start: gl.constexpr):
    """DS of a tile, likewise."""
    if p.shape[1] > 16:
        p_left, p_right = _halves(p)
        left, right = _halves(off)
        middle: gl.constexpr = start + p.shape[1] // 2
        return _joined(_pushed(p_left, left, numbers, start), _pushed(p_right, right, numbers, middle))
    else:
        return p * (off - _columns(numbers, start, p))


@gluon.jit
def _hidden(s, key, limits, stage, start: gl.constexpr):
    """The scores of a tile, likewise, _HIDDEN for keys from one on that the row of their column does not see."""
    if s.shape[1] > 16:
        left, right = _halves(s)
        middle: gl.constexpr = start + s.shape[1] // 2
        return _joined(_hidden(left, key, limits, stage, start), _hidden(right, key, limits, stage, middle))
    else:
        keys = key + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        distance = gl.expand_dims(keys, 1) - _columns(limits.index(2 * stage), start, s)
        return _within(s, distance, _columns(limits.index(2 * stage + 1), start, s))


@gluon.jit
def _consumer(
    given,
    who: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr,
):  # fmt: skip
    common, post, lines, results, v_tiles = given
    _, _, sizes, shape, _, buffers, barriers = common
    of_rows, of_limits, rows_full = lines
    to_k_desc, to_v_desc, out_tiles, flags = results
    keys, queries = sizes
    kv_heads = shape[0]
    ratio = shape[1]
    items = shape[5]
    k_tiles, q_tiles, g_tiles = buffers
    k_full, k_empty, q_full, g_full, empty = barriers
    DTYPE: gl.constexpr = k_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    zero = gl.zeros([_M, N], gl.float32, S)
    stage = 0
    phase = 0
    k_phase = 0
    slot = 0
    mail_phase = 0
    item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, queries, N, BOUNDED, True)
    while item < items:
        lowest, highest, low, high, free_low, free_high, _stop, _blank = tiles
        batch, kv_head, key = place

        to_k = gl.zeros([_M, D], gl.float32, A)
        to_v = gl.zeros([_M, D], gl.float32, A)
        mbarrier.wait(k_full.index(who), k_phase)
        k_phase ^= 1
        k = k_tiles.index(who).reshape([_M, D])
        v = v_tiles.index(who).reshape([_M, D])
        for member in range(ratio):
            if BOUNDED:
                stage, phase, _turn = _pass(
                    highest - high, stage, phase, 0, barriers, k_full, who, CONSUMERS, STAGES, True, False, False
                )
            for step in range(high - low):
                mbarrier.wait(q_full.index(stage), phase)
                q = q_tiles.index(stage).reshape([N, D])
                s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(g_full.index(stage), phase)
                g = g_tiles.index(stage).reshape([N, D])
                off = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(rows_full.index(stage), phase)
                s = warpgroup_mma_wait(1, deps=(s,))
                tile = high - 1 - step
                if BOUNDED:
                    if (tile < free_low) | (tile >= free_high):
                        s = gl.convert_layout(_hidden(s, key, of_limits, stage, 0), S)
                p = gl.convert_layout(_weights(s, c, of_rows.index(2 * stage), 0), S)
                to_v = warpgroup_mma(gl.convert_layout(p.to(DTYPE), P), g, to_v, is_async=True)
                off = warpgroup_mma_wait(1, deps=(off,))
                pushed = _pushed(p, off, of_rows.index(2 * stage + 1), 0)
                to_k = warpgroup_mma(gl.convert_layout(pushed.to(DTYPE), P), q, to_k, is_async=True)
                # Left under way, they would need registers that the next products want.
                to_k, to_v = warpgroup_mma_wait(0, deps=(to_k, to_v))
                mbarrier.arrive(empty.index(stage))
                stage, phase = _advance(stage, phase, STAGES)
            if member == ratio - 1:
                mbarrier.arrive(k_empty.index(who))
            if BOUNDED:
                stage, phase, _turn = _pass(
                    low - lowest, stage, phase, 0, barriers, k_full, who, CONSUMERS, STAGES, True, False, False
                )

        mine = flags + (batch * kv_heads + kv_head).to(gl.int64) * gl.cdiv(keys, _M)
        tma.store_wait(0)
        _give(to_v.to(DTYPE), to_v_desc, batch, kv_head, key, out_tiles.index(who))
        to_k *= c * _LN_2
        # What is not finite in dV is not in dK either: there it came from P or dO, and so from dS.
        _flag(mine, to_k, key, keys, c)
        # For a tile of its own there is no room.
        tma.store_wait(0)
        _give(to_k.to(DTYPE), to_k_desc, batch, kv_head, key, out_tiles.index(who))
        item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, queries, N, BOUNDED, True)
    tma.store_wait(0)


_NUMBERS = ("queries", "keys", "low", "high", "kv_heads", "ratio", "blocks", "pairs", "together", "items", "choices")
_POINTERS = (
    "scale_ptr", "first_ptr", "stop_ptr", "ranges", "max_ptr", "share_ptr", "pull_ptr", "flags", "counter",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    q_desc, k_desc, v_desc, g_desc, to_k_desc, to_v_desc, scale_ptr, first_ptr, stop_ptr, ranges, max_ptr, share_ptr,
    pull_ptr, flags, counter,
    queries, keys, low, high, kv_heads, ratio, blocks, pairs, together, items, choices,
    CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, OTHERS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    buffers, barriers, post = _rings(k_desc, q_desc, g_desc, 1, CONSUMERS, D, N, STAGES, True, CONSUMERS)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, 1, 1, _M, D], v_desc.layout)
    out_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, 1, 1, _M, D], to_k_desc.layout)
    of_rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    of_limits = of_rows
    if BOUNDED:
        of_limits = gl.allocate_shared_memory(gl.int32, [2 * STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(rows_full.index(i), count=1)
    # What rows are elsewhere, keys are here.
    sizes = (keys, queries)
    limits = (first_ptr, stop_ptr, low, high)
    shape = (kv_heads, ratio, blocks, pairs, together, items)
    common = (scale_ptr, limits, sizes, shape, choices, buffers, barriers)
    inputs = (k_desc, q_desc, g_desc, v_desc, v_tiles, k_desc)
    lines = (of_rows, of_limits, rows_full)
    results = (to_k_desc, to_v_desc, out_tiles, flags)
    given = (common, post, lines, results, v_tiles)
    supply = (common, post, inputs, counter, (max_ptr, share_ptr, pull_ptr, kv_heads * ratio), lines, ranges)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED)),
                (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED)),
                (_producer, (supply, CONSUMERS, N, STAGES, BOUNDED)),
            ],
            [4, 1],
            [REGISTERS, OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED)),
                (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED)),
                (_consumer, (given, 2, CONSUMERS, D, N, STAGES, BOUNDED)),
                (_producer, (supply, CONSUMERS, N, STAGES, BOUNDED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, OTHERS],
        )


def configuration(head_dim: int) -> Configuration:
    """What fits: by registers three consumers of head_dim 64, two of 128."""
    if head_dim == 128:
        return Configuration(resident=1, items=1, consumers=2, keys=64, stages=3, registers=232, others=40)
    return Configuration(resident=1, items=1, consumers=3, keys=64, stages=4, registers=160, others=32)


def run(call: Call, grad: Tensor, rows: Rows, ranges: Tensor, to_k: Tensor, to_v: Tensor, flags: Tensor) -> None:
    """Fill the gradients of k and v, which the copy engine has to take, of a call that `_hopper_to_queries` takes.

    `ranges` says of each 64 query rows of an entry of the batch which keys any of them sees and which all of them see,
    in four numbers (from, to, from, to).
    Where one of the flags, one per 64 keys of each (batch, head), comes out as 1, both have to be computed again by
    other means. They come as zeros, with one number more at their end, by which the kernel counts.
    """
    q, k, v = call.q, call.k, call.v
    assert v is not None
    batch, kv_heads, keys, head_dim = k.shape
    queries = q.shape[2]
    choice = configuration(head_dim)
    scale = call.scale.contiguous()
    limits = limits_of(call, flags)
    pairs, blocks = batch * kv_heads, -(-keys // (choice.consumers * ROWS))
    with torch.cuda.device(q.device):
        arguments = (
            described(q, choice.keys), described(k, ROWS), described(v, ROWS), described(grad, choice.keys),
            described(to_k, ROWS), described(to_v, ROWS), scale, limits.first, limits.stop, ranges, rows.max_logit,
            rows.share, rows.pull, flags, flags[-1:], queries, keys, limits.low, limits.high, kv_heads, call.group,
            blocks, pairs, together_in_cache(call), pairs * blocks, scale_choices(scale) | limits.choices,
            choice.consumers, head_dim, choice.keys, choice.stages, choice.registers, choice.others, limits.bounded,
        )  # fmt: skip
        form = (q.dtype, choice, head_dim, limits.bounded, limits.first.dtype, scale.dtype, q.device)
        programs = min(pairs * blocks, processors(q.device.index) * choice.resident)
        launch(_kernel, programs, arguments, form=form, num_warps=4)
