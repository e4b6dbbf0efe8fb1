# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""What flows back to query rows on Hopper GPUs: their gradient and their gradient flow, either or both.

A block of threads is a producer and two or three consumers as in `_hopper`, whose letters and rings these are. For each
tile of keys a consumer has QKᵀ and dP = dO·Vᵀ, of these dS = P∘(dP − pull), and adds dS·K to the gradient of its 64
rows. The flow of a row is Var_p[dP] / Var[dP], from the sums of dP − pull, its square, and both weighed. Where the
gradients come from cuDNN, the flow is all that is left to do.

The weights are powers of two of what lies between a score and the row's largest; by the largest weight, less what a
sink takes of it, the row is multiplied at its end. 64 rows with a gradient that is not finite, or with a scale that is
not far enough from 0, are flagged, and somebody else has to compute them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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

from . import _hopper
from ._hopper_supply import (
    _LN_2,
    _LOG2_E,
    _M,
    _REFERENCE_LIMIT,
    ROWS,
    Configuration,
    _advance,
    _bounds,
    _flag,
    _give,
    _next,
    _pass,
    _producer,
    _rings,
    _there,
    described,
    limits_of,
    processors,
    scale_choices,
    together_in_cache,
)
from ._hopper_tile import _HIDDEN, _added, _column, _halves, _joined, _own_sum, _shown
from ._ready import launch

if TYPE_CHECKING:
    from .._operator import Call

_SCALES = (2.0**-20, 2.0**19)
"""Between them a scale is bearable in any case."""


@gluon.jit
def _push(s, off, c, reference, pivot, gap, sums, DTYPE: gl.constexpr, MEASURED: gl.constexpr, SINKS: gl.constexpr):
    """DS of a tile, but for a number per row, and the sums with those of the tile; in columns as in `_hopper`.

    The sums are about a pivot near the mean of dP. Under a sink the pull is another number, by a gap.
    """
    if s.shape[1] > 8:
        left, right = _halves(s)
        off_left, off_right = _halves(off)
        left, sums = _push(left, off_left, c, reference, pivot, gap, sums, DTYPE, MEASURED, SINKS)
        right, sums = _push(right, off_right, c, reference, pivot, gap, sums, DTYPE, MEASURED, SINKS)
        return _joined(left, right), sums
    else:
        moved, around, weighed, leaning = sums
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        p = gl.exp2(s * c - gl.expand_dims(gl.convert_layout(reference, rows), 1))
        off -= gl.expand_dims(gl.convert_layout(pivot, rows), 1)
        pushed = p * off
        if MEASURED:
            moved = _added(off, moved)
            around = _added(off * off, around)
            weighed = _added(pushed * off, weighed)
            leaning = _added(pushed, leaning)
        if SINKS:
            pushed += p * gl.expand_dims(gl.convert_layout(gap, rows), 1)
        return pushed.to(DTYPE), (moved, around, weighed, leaning)


@gluon.jit
def _consumer(
    given,
    who: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr, GRADIENT: gl.constexpr, MEASURED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    common, post, rows_in, results, g_tiles = given
    _, limits, sizes, shape, choices, buffers, barriers = common
    max_ptr, peak_ptr, share_ptr, pull_ptr, pivot_ptr = rows_in
    o_desc, o_tiles, flow_ptr, flags = results
    queries, keys = sizes
    heads = shape[0]
    items = shape[5]
    q_tiles, k_tiles, v_tiles = buffers
    q_full, q_empty, k_full, v_full, empty = barriers
    DTYPE: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    R: gl.constexpr = gl.SliceLayout(1, S)
    stage = 0
    phase = 0
    q_phase = 0
    slot = 0
    mail_phase = 0
    item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, keys, N, BOUNDED, True)
    while item < items:
        lowest, highest, low, high, free_low, free_high, _stop, _blank = tiles
        batch, head, row = place

        rows = row + gl.arange(0, _M, R)
        there = _there(rows, queries)
        pair = (batch * heads + head).to(gl.int64)
        at = pair * queries + rows
        reference = gl.load(max_ptr + at, mask=there, other=0.0) * _LOG2_E
        reference = gl.where(gl.abs(reference) < float("inf"), reference, 0.0)
        pivot = gl.load(pivot_ptr + at, mask=there, other=0.0)
        gap = pivot
        if SINKS:
            gap = pivot - gl.load(pull_ptr + at, mask=there, other=0.0)
        peak = gl.load(peak_ptr + at, mask=there, other=0.0)
        if BOUNDED:
            first, stop = _bounds(limits, batch, rows, sizes, choices)
            width = stop - first
        else:
            first = gl.zeros([_M], gl.int32, R)
            width = first + keys
        zero = gl.zeros([_M, N], gl.float32, S)
        nothing = gl.zeros_like(_own_sum(zero))
        sums = (nothing, nothing, nothing, nothing)
        found = gl.zeros([_M, D], gl.float32, A)
        mbarrier.wait(q_full.index(who), q_phase)
        q_phase ^= 1
        q = q_tiles.index(who).reshape([_M, D])
        g = g_tiles.index(who).reshape([_M, D])
        if BOUNDED:
            stage, phase, _turn = _pass(
                highest - high, stage, phase, 0, barriers, q_full, who, CONSUMERS, STAGES, True, False, False
            )
        for step in range(high - low):
            mbarrier.wait(k_full.index(stage), phase)
            k = k_tiles.index(stage).reshape([N, D])
            s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            v = v_tiles.index(stage).reshape([N, D]).permute((1, 0))
            off = warpgroup_mma(g, v, zero, use_acc=False, is_async=True)
            s, off = warpgroup_mma_wait(0, deps=(s, off))
            if not GRADIENT:
                mbarrier.arrive(empty.index(stage))
            tile = high - 1 - step
            if (tile < free_low) | (tile >= free_high):
                s = _shown(s, tile * N, first, width)
                # What a row does not see is at the mean, and counts for nothing.
                off = gl.where(s > _HIDDEN, off, gl.expand_dims(pivot, 1))
            pushed, sums = _push(s, off, c, reference, pivot, gap, sums, DTYPE, MEASURED, SINKS)
            if GRADIENT:
                # Left under way, it would need registers that the next products want.
                found = warpgroup_mma(gl.convert_layout(pushed, P), k, found)
                mbarrier.arrive(empty.index(stage))
            stage, phase = _advance(stage, phase, STAGES)
        mbarrier.arrive(q_empty.index(who))
        if BOUNDED:
            stage, phase, _turn = _pass(
                low - lowest, stage, phase, 0, barriers, q_full, who, CONSUMERS, STAGES, True, False, False
            )

        if GRADIENT:
            share = gl.load(share_ptr + at, mask=there, other=0.0)
            # Beyond that a hidden score is not below all others.
            share = gl.where(gl.abs(reference) < _REFERENCE_LIMIT, share, float("nan"))
            found *= _column(share * c * _LN_2, found)
            _flag(flags + pair * gl.cdiv(queries, _M), found, row, queries, c)
            tma.store_wait(0)
            _give(found.to(DTYPE), o_desc, batch, head, gl.where(row < 0, queries, row), o_tiles.index(who))
        if MEASURED:
            moved, around, weighed, leaning = sums
            count = gl.maximum(width, 1).to(gl.float32)
            shift = gl.convert_layout(gl.sum(moved, axis=1), R)
            spread = gl.convert_layout(gl.sum(around, axis=1), R) - shift * shift / count
            # The pivot follows from an output that was rounded, and is not quite the mean.
            lean = gl.convert_layout(gl.sum(leaning, axis=1), R) * peak
            under = gl.maximum(gl.convert_layout(gl.sum(weighed, axis=1), R) * peak - lean * lean, 0.0)
            # NaN where there was nothing to share.
            flow = gl.where((spread > 0) & (width > 0), under * count / spread, float("nan"))
            gl.store(flow_ptr + at, flow, mask=there)

        item, tiles, place, c, slot, mail_phase = _next(slot, mail_phase, post, who, keys, N, BOUNDED, True)
    if GRADIENT:
        tma.store_wait(0)


_NUMBERS = ("queries", "keys", "low", "high", "heads", "ratio", "blocks", "pairs", "together", "items", "choices")
_POINTERS = (
    "scale_ptr", "first_ptr", "stop_ptr", "max_ptr", "peak_ptr", "share_ptr", "pull_ptr", "pivot_ptr",
    "flow_ptr", "flags", "counter",
)  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    q_desc, k_desc, v_desc, g_desc, o_desc, scale_ptr, first_ptr, stop_ptr, max_ptr, peak_ptr, share_ptr, pull_ptr,
    pivot_ptr, flow_ptr, flags, counter,
    queries, keys, low, high, heads, ratio, blocks, pairs, together, items, choices,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, OTHERS: gl.constexpr, BOUNDED: gl.constexpr, GRADIENT: gl.constexpr,
    MEASURED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    buffers, barriers, post = _rings(q_desc, k_desc, v_desc, ITEMS, CONSUMERS, D, N, STAGES, True, CONSUMERS)
    g_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, _M, D], g_desc.layout)
    o_tiles = g_tiles
    if GRADIENT:
        o_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, _M, D], o_desc.layout)
    sizes = (queries, keys)
    shape = (heads, ratio, blocks, pairs, together, items)
    limits = (first_ptr, stop_ptr, low, high)
    common = (scale_ptr, limits, sizes, shape, choices, buffers, barriers)
    inputs = (q_desc, k_desc, v_desc, g_desc, g_tiles, k_desc)
    rows_in = (max_ptr, peak_ptr, share_ptr, pull_ptr, pivot_ptr)
    results = (o_desc, o_tiles, flow_ptr, flags)
    given = (common, post, rows_in, results, g_tiles)
    supply = (common, post, inputs, counter)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED, GRADIENT, MEASURED, SINKS)),
                (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED, GRADIENT, MEASURED, SINKS)),
                (_producer, (supply, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, True, True, False)),
            ],
            [4, 1],
            [REGISTERS, OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED, GRADIENT, MEASURED, SINKS)),
                (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED, GRADIENT, MEASURED, SINKS)),
                (_consumer, (given, 2, CONSUMERS, D, N, STAGES, BOUNDED, GRADIENT, MEASURED, SINKS)),
                (_producer, (supply, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, True, True, False)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, OTHERS],
        )


def configuration(head_dim: int, *, gradient: bool) -> Configuration:
    """For the flow alone, what measured best."""
    if gradient:
        if head_dim == 128:
            return Configuration(resident=1, items=1, consumers=3, keys=64, stages=2, registers=160, others=32)
        return Configuration(resident=1, items=1, consumers=3, keys=64, stages=4, registers=160, others=32)
    if head_dim == 128:
        return Configuration(resident=1, items=1, consumers=2, keys=128, stages=2, registers=240)
    return Configuration(resident=2, items=1, consumers=2, keys=64, stages=4, registers=104, others=32)


def takes(call: Call, grad: torch.dtype) -> bool:
    """Whether a call and the gradient of its output, which has to lie as the copy engine reads it, are for this one."""
    # One that is not known here is looked at there.
    bearable = call.number is None or _SCALES[0] < call.number < _SCALES[1]
    # Of query heads that share keys, the products are added up before they are scaled.
    one_for_keys = call.scale.shape[1] == 1 or call.group == 1
    plain = call.v is not None and bearable and one_for_keys
    return plain and _hopper.takes(call) and grad == call.q.dtype


class Rows(NamedTuple):
    """What is known per query row, (batch, heads, queries)."""

    max_logit: Tensor
    largest_weight: Tensor
    share: Tensor
    """The same, less what a sink takes."""
    pull: Tensor
    """⟨dO, O⟩"""
    pivot: Tensor
    """Any number, near the mean of dP under the weights; without sinks the pull."""


def run(call: Call, grad: Tensor, rows: Rows, to_q: Tensor | None, flow: Tensor | None, flags: Tensor) -> None:
    """Fill the gradient of q, which the copy engine has to take, the gradient flow, or both.

    Where one of the flags, one per 64 query rows of each (batch, head), comes out as 1, the gradient has to be computed
    again by other means. They come as zeros, with one number more at their end, by which the kernel counts.
    """
    q, k, v = call.q, call.k, call.v
    assert v is not None
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    choice = configuration(head_dim, gradient=to_q is not None)
    scale = call.scale.contiguous()
    limits = limits_of(call, flags)
    pairs, blocks = batch * heads, -(-queries // (choice.consumers * ROWS))
    with torch.cuda.device(q.device):
        q_desc = described(q, ROWS)
        arguments = (
            q_desc, described(k, choice.keys), described(v, choice.keys), described(grad, ROWS),
            q_desc if to_q is None else described(to_q, ROWS), scale, limits.first, limits.stop, *rows,
            rows.pull if flow is None else flow, flags, flags[-1:], queries, keys, limits.low, limits.high, heads,
            call.group, blocks, pairs, together_in_cache(call), pairs * blocks, scale_choices(scale) | limits.choices,
            choice.items, choice.consumers, head_dim, choice.keys, choice.stages, choice.registers, choice.others,
            limits.bounded, to_q is not None, flow is not None, call.sinks is not None,
        )  # fmt: skip
        kind = (limits.bounded, limits.first.dtype, to_q is None, flow is None, call.sinks is None)
        form = (q.dtype, choice, head_dim, *kind, scale.dtype, q.device)
        programs = min(pairs * blocks, processors(q.device.index) * choice.resident)
        launch(_kernel, programs, arguments, form=form, num_warps=4, maxnreg=choice.launched)
