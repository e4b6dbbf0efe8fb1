"""From the gradient of an output to the launch of kernels, ours or cuDNN's."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from .._operator import Call, Saved, Upstream, empty_gradient, over_shared
from . import _cudnn, _form
from ._backward import (
    Constants,
    marked_to_keys_kernel,
    marked_to_queries_kernel,
    pull_kernel,
    to_keys_kernel,
    to_queries_kernel,
)
from ._flow import dots_kernel, flow_kernel
from ._form import HOPPER_ROWS, SPAN, Tiling
from ._ready import copyable, launch
from ._tile import Masked, matrix_of


def backward_tiling(call: Call, depth: int) -> Tiling:
    """The tiles of a backward pass."""
    if call.q.dtype == torch.float32:
        return Tiling(32, 32 if depth <= 64 else 16, 4, 1)
    return Tiling(64, 64, 4, 2) if depth <= 128 else Tiling(32, 32, 4, 1)


def backward(call: Call, saved: Saved, upstream: Upstream, *, bias_too: bool, flow_too: bool) -> tuple[Tensor, ...]:
    """The gradients of (q, k, v, mask, scale, sinks), and what the backward pass measures."""
    q, k, v = call.q, call.k, call.v
    grad = upstream.output
    if grad is not None and not any(x is not None for x in upstream[1:]) and _cudnn.takes(call):
        # With the flow, ours are faster than cuDNN and then a pass for that, and add in a fixed order.
        with _form.on(q.device):
            ours = flow_too and _hopper_takes(call, grad)
            found = None if ours else _by_cudnn(call, saved, grad, flow_too=flow_too)
        if found is not None:
            return found
    if not saved.max_logit.numel():
        # Kept for cuDNN: the logsumexp will do, if with fewer digits.
        ones = torch.ones_like(saved.logsumexp)
        saved = saved._replace(max_logit=saved.logsumexp, largest_weight=ones)
    like: dict[str, Any] = {"dtype": call.wide, "device": q.device}
    bias = call.mask if bias_too else None
    to_mask = torch.zeros((0,) if bias is None else bias.shape, **like)
    to_q, to_k = empty_gradient(q), empty_gradient(k)
    to_v = q.new_empty(0) if v is None else empty_gradient(v)
    # Where no gradient arrives at an output, there is no pull.
    pull = torch.zeros(q.shape[:-1], **like)
    along, flow = torch.empty_like(pull), torch.empty_like(pull)
    if along.numel() and k.shape[2] and q.shape[3]:
        with _form.on(q.device):
            of_rows, to_bias = (pull, along, flow), None if bias is None else to_mask
            _gradients(call, saved, upstream, *of_rows, to_q, to_k, to_v, to_bias, flow_too=flow_too)
    else:
        for x in (to_q, to_k, to_v, along, flow):
            x.zero_()
    if saved.gradients.numel():
        # Through .data: the version counter must not move, or a second backward through a kept graph would refuse.
        saved.gradients.data[:1].fill_(1)
        of_flow, pressure = saved.gradients.data[1:].view(2, *q.shape[:-1])
        if flow_too:
            of_flow.copy_(flow)
        torch.mul(along, call.scale.to(call.wide)[..., None], out=pressure)
    to_sinks = q.new_empty(0)
    if call.sinks is not None:
        sinks = call.sinks.to(call.wide)[..., None]
        mass = torch.where(sinks == -math.inf, 0, torch.sigmoid(sinks - saved.logsumexp))
        to_sinks = over_shared(-torch.where(mass == 0, 0, mass * pull), call.sinks).to(call.sinks.dtype)
    # To a number nothing flows.
    to_scale = (
        over_shared(along, call.scale).to(call.scale.dtype) if call.number is None else torch.zeros_like(call.scale)
    )
    return to_q, to_k, to_v, to_mask.to(q.dtype if bias is None else bias.dtype), to_scale, to_sinks


def _by_cudnn(call: Call, saved: Saved, grad: Tensor, *, flow_too: bool) -> tuple[Tensor, ...] | None:
    """The same by cuDNN, where torch would take it."""
    found = _cudnn.gradients(call, saved.output, saved.logsumexp, grad)
    if found is None:
        return None
    q = call.q
    if saved.gradients.numel():
        # Through .data, and the kernels behind torch's back: see above.
        saved.gradients.data[:1].fill_(1)
        flow, pressure = saved.gradients.data[1:].view(2, *q.shape[:-1])
        _dots(call, q, found[0], pressure)
        if flow_too:
            pull = torch.empty(q.shape[:-1], dtype=call.wide, device=q.device)
            _dots(call, grad, saved.output, pull)
            _flow(call, saved, grad, pull, flow)
    # The scale is a number here, to which nothing flows.
    return *found, q.new_empty(0), torch.zeros_like(call.scale), q.new_empty(0)


def flow(call: Call, saved: Saved, grad: Tensor) -> Tensor | None:
    """The gradient flow of a call of which nobody wants the gradients; None where only they tell."""
    if not _cudnn.takes(call):
        return None
    pull, found = (torch.empty(call.q.shape[:-1], dtype=call.wide, device=call.q.device) for _ in range(2))
    with _form.on(call.q.device):
        _dots(call, grad, saved.output, pull)
        _flow(call, saved, grad, pull, found)
    return found


def _dots(call: Call, left: Tensor, right: Tensor, found: Tensor) -> None:
    """The products of rows of two matrices, each (batch, heads, queries, x)."""
    batch, heads, queries, depth = left.shape
    blocks = triton.cdiv(queries, HOPPER_ROWS)
    one, other = matrix_of(left, call), matrix_of(right, call)
    arguments = (
        one,
        other,
        found,
        _form.sizes_for(call, blocks, plain=False),
        depth,
        HOPPER_ROWS,
        _form.power_of_2(depth),
    )
    launch(dots_kernel, batch * heads * blocks, arguments)


def _flow(call: Call, saved: Saved, grad: Tensor, pull: Tensor, flow: Tensor) -> None:
    """The gradient flow of a plain call into `flow`; `pull` is ⟨dO, O⟩ of each row."""
    batch, heads, queries, _ = call.q.shape
    max_logit, peak = saved.max_logit.contiguous(), saved.largest_weight.contiguous()
    if _hopper_takes(call, grad):
        hopper = _form.gluon("_hopper_to_queries")
        grad = _copyable(grad)
        counter = torch.zeros(1, dtype=torch.int32, device=grad.device)
        hopper.run(call, grad, hopper.Rows(max_logit, peak, peak, pull, pull), None, flow, counter)
        return
    tile = Tiling(64, 64, 4, 2)
    blocks = triton.cdiv(queries, tile.rows)
    sizes = _form.sizes_for(call, blocks, plain=True)
    kind = _form.kind_of(call, tile, measure=1, values=True)
    matrices = (matrix_of(x, call) for x in (call.q, call.k, call.v, grad))
    arguments = (*matrices, flow, pull, max_logit, peak, *_form.bounds_of(call), call.scale, sizes, kind)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    launch(flow_kernel, batch * heads * blocks, arguments, **options)


def _gradients(
    call: Call,
    saved: Saved,
    upstream: Upstream,
    pull: Tensor,
    along: Tensor,
    flow: Tensor,
    to_q: Tensor,
    to_k: Tensor,
    to_v: Tensor,
    to_mask: Tensor | None,
    *,
    flow_too: bool,
) -> None:
    batch, heads, queries, depth = call.q.shape
    kv_heads, keys = call.k.shape[1:3]
    grad = None if call.v is None or not call.v.shape[3] else upstream.output
    if grad is None:
        to_v.zero_()
    tile = backward_tiling(
        call, max(_form.power_of_2(depth), _form.power_of_2(0 if call.v is None else call.v.shape[3]))
    )
    blocks = triton.cdiv(queries, tile.rows)
    sizes = _form.sizes_for(call, blocks, plain=True)
    fields = (upstream.logsumexp, upstream.entropy, upstream.expected_score, upstream.collision)
    extra = any(x is not None for x in fields)
    kind = _form.kind_of(call, tile, measure=int(saved.gradients.numel() > 0), values=grad is not None)
    kind = kind._replace(extra=extra, to_mask=to_mask is not None)
    bounds = _form.bounds_of(call)
    ranges = torch.empty(batch * blocks * 4, dtype=torch.int32, device=call.q.device)
    arriving, output = matrix_of(grad, call), matrix_of(saved.output if grad is not None else None, call)
    launch(pull_kernel, batch * heads * blocks, (arriving, output, pull, ranges, *bounds, sizes, kind))
    share, pivot = saved.largest_weight, pull
    if call.sinks is not None:
        sinks = call.sinks.to(call.wide)[..., None]
        passing = torch.where(sinks == -math.inf, 1, torch.sigmoid(saved.logsumexp - sinks))
        share = saved.largest_weight * passing
        # Any number will do; the nearer to the mean, the more digits are left.
        pivot = torch.where(passing > 1e-30, pull / passing, 0.0)
    level = slope = bend = pull
    if extra:
        nothing = torch.zeros_like(pull)
        of_lse, of_entropy, of_expected, of_collision = (nothing if x is None else x.to(call.wide) for x in fields)
        expected = saved.expected_score if saved.expected_score.numel() else nothing
        collision = saved.collision if saved.collision.numel() else nothing
        level = of_lse + of_expected * (1 - expected) + of_entropy * expected - 2 * of_collision * collision
        slope, bend = of_expected - of_entropy, 2 * of_collision
    rows = (saved.max_logit, saved.largest_weight, share, pull, pivot, level, slope, bend)
    constants = Constants(*(x.contiguous() for x in rows))
    softcap = 1.0 if call.softcap is None else call.softcap
    shared = (*bounds, call.scale, softcap, constants, _form.masked_of(call), _form.dropped_of(call))
    q, k, v = (matrix_of(x, call) for x in (call.q, call.k, call.v))
    for_mask = Masked(along, 0, 0, 0, 0) if to_mask is None else Masked(to_mask, *_form.strides_along(to_mask))
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    for_queries = (q, k, v, arriving, matrix_of(to_q, call), for_mask, flow, along, *shared)
    for_keys = (q, k, v, arriving, matrix_of(to_k, call), matrix_of(to_v, call), ranges, *shared)
    counts = batch * heads * blocks, batch * kv_heads * triton.cdiv(keys, tile.keys)
    marks = None
    if grad is not None and not extra:
        measured = flow if kind.measure and flow_too else None
        marks = _by_hopper(call, grad, constants, ranges, counts, to_q, to_k, to_v, measured)
    if marks is None:
        launch(to_queries_kernel, counts[0], (*for_queries, sizes, kind), **options)
        launch(to_keys_kernel, counts[1], (*for_keys, sizes, kind), **options)
        return
    if kind.measure or call.number is None:
        _dots(call, call.q, to_q, along)
        # Where the scale is 0, the blocks are marked.
        along /= call.scale.to(call.wide)[..., None]
    sizes = _form.sizes_for(call, blocks, plain=False)
    kernels = marked_to_queries_kernel, marked_to_keys_kernel
    for kernel, given, mark, count in zip(kernels, (for_queries, for_keys), marks, counts, strict=True):
        launch(kernel, triton.cdiv(count, SPAN), (*given, sizes, mark, count, kind, SPAN), **options)


def _hopper_takes(call: Call, grad: Tensor) -> bool:
    """Whether there are kernels for Hopper for the gradients of a call, or the flow alone."""
    hopper = _form.gluon("_hopper_to_queries")
    return hopper is not None and hopper.takes(call, grad.dtype)


def _copyable(grad: Tensor) -> Tensor:
    # A copy even of what is contiguous, for that may lie at any address.
    return grad if copyable(grad) else grad.clone(memory_format=torch.contiguous_format)


def _by_hopper(
    call: Call,
    grad: Tensor,
    constants: Constants,
    ranges: Tensor,
    counts: tuple[int, int],
    to_q: Tensor,
    to_k: Tensor,
    to_v: Tensor,
    flow: Tensor | None,
) -> list[Tensor] | None:
    """The gradients and the flow of a plain call, with marks for blocks of 64 queries or keys that are not right.

    None if the call is not for the kernels for Hopper.
    """
    if not _hopper_takes(call, grad) or not all(copyable(x) for x in (to_q, to_k, to_v)):
        return None
    for_queries, for_keys = _form.gluon("_hopper_to_queries"), _form.gluon("_hopper_to_keys")
    grad = _copyable(grad)
    # Each has a number more, by which the kernel counts.
    marks = [torch.zeros(count + 1, dtype=torch.int32, device=grad.device) for count in counts]
    rows = for_queries.Rows(constants.max_logit, constants.peak, constants.share, constants.pull, constants.pivot)
    for_queries.run(call, grad, rows, to_q, flow, marks[0])
    for_keys.run(call, grad, rows, ranges, to_k, to_v, marks[1])
    return marks
