# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""The gradient flow on Hopper GPUs, where the gradients themselves come from cuDNN: QKᵀ and dO·Vᵀ tile by tile.

A block of threads is a producer and two consumers as in `_hopper`, whose letters and rings these are. What is
returned per query row is Var_p[dP] / Var[dP], from the sums of dP − pull, its square, and both weighed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from . import _hopper
from ._hopper_supply import (
    _BAND,
    _LETTER,
    _LETTERS,
    _LOG2_E,
    _M,
    ROWS,
    Configuration,
    _advance,
    _bounds,
    _open,
    _pass,
    _producer,
    _read,
    _rings,
    _there,
    described,
    processors,
    scale_choices,
    together_in_cache,
)
from ._hopper_tile import _HIDDEN, _added, _halves, _own_sum, _shown
from ._ready import copyable, launch

if TYPE_CHECKING:
    from .._operator import Call

_SCALES = (2.0**-20, 2.0**19)
"""Scales for which q·k of a hidden key is far below every other."""


@gluon.jit
def _push(s, off, c, reference, pull, sums):
    """The sums with those of a tile, some columns at a time as in `_hopper`."""
    if s.shape[1] > 8:
        left, right = _halves(s)
        off_left, off_right = _halves(off)
        sums = _push(left, off_left, c, reference, pull, sums)
        return _push(right, off_right, c, reference, pull, sums)
    else:
        moved, around, weighed, leaning = sums
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        p = gl.exp2(s * c - gl.expand_dims(gl.convert_layout(reference, rows), 1))
        off -= gl.expand_dims(gl.convert_layout(pull, rows), 1)
        pushed = p * off
        return _added(off, moved), _added(off * off, around), _added(pushed * off, weighed), _added(pushed, leaning)


@gluon.jit
def _consumer(
    given,
    who: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr,
):  # fmt: skip
    common, post, rows_in, flow_ptr, g_tiles = given
    _, limits, sizes, shape, choices, buffers, barriers = common
    mail, mail_full, mail_empty = post
    max_ptr, peak_ptr, pull_ptr = rows_in
    queries, keys = sizes
    heads = shape[0]
    items = shape[5]
    q_tiles, k_tiles, v_tiles = buffers
    q_full, q_empty, k_full, v_full, empty = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    R: gl.constexpr = gl.SliceLayout(1, S)
    stage = 0
    phase = 0
    q_phase = 0
    slot = 0
    mail_phase = 0
    mbarrier.wait(mail_full.index(0), mail_phase)
    item = _read(mail, 0)
    while item < items:
        tiles, place, c = _open(mail, slot * _LETTER, who, keys, N, BOUNDED)
        lowest, highest, low, high, free_low, free_high, _stop, _blank = tiles
        batch, head, row = place
        mbarrier.arrive(mail_empty.index(slot))
        slot, mail_phase = _advance(slot, mail_phase, _LETTERS)

        rows = row + gl.arange(0, _M, R)
        there = _there(rows, queries)
        at = (batch * heads + head).to(gl.int64) * queries + rows
        reference = gl.load(max_ptr + at, mask=there, other=0.0) * _LOG2_E
        reference = gl.where(gl.abs(reference) < float("inf"), reference, 0.0)
        pull = gl.load(pull_ptr + at, mask=there, other=0.0)
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
        if highest > lowest:
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
                k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
                s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), phase)
                v = v_tiles.index(stage).reshape([N, D]).permute((1, 0))
                off = warpgroup_mma(g, v, zero, use_acc=False, is_async=True)
                s, off = warpgroup_mma_wait(0, deps=(s, off))
                mbarrier.arrive(empty.index(stage))
                tile = high - 1 - step
                if (tile < free_low) | (tile >= free_high):
                    s = _shown(s, tile * N, first, width)
                    # What a row does not see is at the mean, and counts for nothing.
                    off = gl.where(s > _HIDDEN, off, gl.expand_dims(pull, 1))
                sums = _push(s, off, c, reference, pull, sums)
                stage, phase = _advance(stage, phase, STAGES)
            mbarrier.arrive(q_empty.index(who))
            if BOUNDED:
                stage, phase, _turn = _pass(
                    low - lowest, stage, phase, 0, barriers, q_full, who, CONSUMERS, STAGES, True, False, False
                )

        moved, around, weighed, leaning = sums
        count = gl.maximum(width, 1).to(gl.float32)
        shift = gl.convert_layout(gl.sum(moved, axis=1), R)
        spread = gl.convert_layout(gl.sum(around, axis=1), R) - shift * shift / count
        # The pull follows from an output that was rounded, and is not quite the mean.
        lean = gl.convert_layout(gl.sum(leaning, axis=1), R) * peak
        under = gl.maximum(gl.convert_layout(gl.sum(weighed, axis=1), R) * peak - lean * lean, 0.0)
        # NaN where there was nothing to share.
        flow = gl.where(spread > 0, under * count / spread, float("nan"))
        gl.store(flow_ptr + at, flow, mask=there)

        mbarrier.wait(mail_full.index(slot), mail_phase)
        item = _read(mail, slot * _LETTER)


_NUMBERS = ("queries", "keys", "low", "high", "heads", "ratio", "blocks", "pairs", "together", "items", "choices")
_POINTERS = ("scale_ptr", "max_ptr", "peak_ptr", "pull_ptr", "flow_ptr", "counter")


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    q_desc, k_desc, v_desc, g_desc, scale_ptr, max_ptr, peak_ptr, pull_ptr, flow_ptr, counter,
    queries, keys, low, high, heads, ratio, blocks, pairs, together, items, choices,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    buffers, barriers, post = _rings(q_desc, k_desc, v_desc, ITEMS, CONSUMERS, D, N, STAGES, True, CONSUMERS)
    g_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, _M, D], g_desc.layout)
    sizes = (queries, keys)
    shape = (heads, ratio, blocks, pairs, together, items)
    # Nothing but a band hides keys here.
    limits = (scale_ptr, scale_ptr, low, high)
    common = (scale_ptr, limits, sizes, shape, choices, buffers, barriers)
    inputs = (q_desc, k_desc, v_desc, g_desc, g_tiles, k_desc)
    rows_in = (max_ptr, peak_ptr, pull_ptr)
    given = (common, post, rows_in, flow_ptr, g_tiles)
    supply = (common, post, inputs, counter)
    gl.warp_specialize(
        [
            (_consumer, (given, 0, CONSUMERS, D, N, STAGES, BOUNDED)),
            (_consumer, (given, 1, CONSUMERS, D, N, STAGES, BOUNDED)),
            (_producer, (supply, ITEMS, CONSUMERS, D, N, STAGES, BOUNDED, True, True, False)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def takes(call: Call, grad: Tensor) -> bool:
    """Whether a call and the gradient of its output are for this kernel."""
    inside = call.number is not None and _SCALES[0] < abs(call.number) < _SCALES[1] and call.number > 0
    return inside and call.v is not None and call.first is None and _hopper.takes(call) and copyable(grad)


def flow(call: Call, grad: Tensor, pull: Tensor, max_logit: Tensor, largest_weight: Tensor, found: Tensor) -> None:
    """Fill the gradient flow of each query row; all but q, k, v and grad are (batch, heads, queries)."""
    q, k, v = call.q, call.k, call.v
    assert v is not None
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    choice = Configuration(resident=2, items=1, consumers=2, keys=64, stages=4, registers=104)
    if head_dim == 128:
        choice = Configuration(resident=1, items=1, consumers=2, keys=128, stages=2, registers=240)
    scale = call.scale.contiguous()
    choices = scale_choices(scale)
    low, high = (0, 0) if call.band is None else call.band
    if call.band is not None:
        choices |= _BAND.value
    pairs, blocks = batch * heads, -(-queries // (choice.consumers * ROWS))
    with torch.cuda.device(q.device):
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        bounded = call.band is not None
        arguments = (
            described(q, ROWS), described(k, choice.keys), described(v, choice.keys), described(grad, ROWS),
            scale, max_logit, largest_weight, pull, found, counter,
            queries, keys, low, high, heads, call.group, blocks, pairs, together_in_cache(call), pairs * blocks,
            choices, choice.items, choice.consumers, head_dim, choice.keys, choice.stages, choice.registers, bounded,
        )  # fmt: skip
        form = (q.dtype, head_dim, bounded, scale.dtype, q.device)
        programs = min(pairs * blocks, processors(q.device.index) * choice.resident)
        launch(_kernel, programs, arguments, form=form, num_warps=4, maxnreg=choice.launched)
