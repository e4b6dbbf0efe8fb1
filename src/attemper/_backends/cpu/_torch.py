"""torch tensors to kernels and back: the two functions that the operator calls."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._operator import Call, Saved, Upstream, empty, empty_output
from .._operator import available as fields_of
from ._sheet import KINDS, Operand, Request, Sheet

_KINDS = {getattr(torch, name): kind for name, kind in KINDS.items()}


def forward(call: Call, stats: frozenset[str]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The output and the fields of the Reading that `stats` names."""
    fields = {name: empty(call, name, call.q.shape[:-1]) for name in fields_of(call, stats)}
    output = wide = None
    if call.v is not None:
        output = empty_output(call, call.q.dtype)
        if "wide_output" in stats:
            wide = empty_output(call, call.wide)
    Sheet(_request(call)).attend(
        None if output is None else operand(output),
        0 if wide is None else wide.data_ptr(),
        {name: x.data_ptr() for name, x in fields.items()},
    )
    if wide is not None:
        fields["wide_output"] = wide
    return output, fields


def _request(call: Call) -> Request:
    return Request(
        q=operand(call.q),
        k=operand(call.k),
        v=None if call.v is None else operand(call.v),
        mask=None if call.mask is None else operand(call.mask),
        first=None if call.first is None else operand(call.first),
        stop=None if call.stop is None else operand(call.stop),
        scale=_numbers(call.scale),
        sinks=None if call.sinks is None else _numbers(call.sinks),
        seed=0 if call.seed is None else int(call.seed),
        softcap=call.softcap or 0.0,
        dropout_p=call.dropout_p,
        period=call.period,
    )


def operand(x: Tensor) -> Operand:
    """Where a tensor is; the caller keeps it alive."""
    return Operand(x.data_ptr(), tuple(x.shape), x.stride(), _KINDS.get(x.dtype, 0))


def _numbers(x: Tensor) -> Any:
    return x.detach().double().numpy()


def backward(call: Call, saved: Saved, upstream: Upstream, *, bias_too: bool) -> tuple[Tensor, ...]:
    """The gradients of (q, k, v, mask, scale, sinks), and what the backward pass measures."""
    q, k, v, wide = call.q, call.k, call.v, call.wide
    like: dict[str, Any] = {"dtype": wide}
    to_q, to_k = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    )
    to_v = q.new_empty(0) if v is None else torch.zeros_like(v, memory_format=torch.contiguous_format)
    bias = call.mask if bias_too else None
    to_mask = torch.zeros((0,) if bias is None else bias.shape, **like)
    rows = q.shape[:-1]
    pull, flow, pressure = (torch.zeros(rows, **like) for _ in range(3))
    grad = None if v is None else upstream.output
    arriving = {
        "grad_logsumexp": upstream.logsumexp,
        "grad_entropy": upstream.entropy,
        "grad_expected": upstream.expected_score,
        "grad_collision": upstream.collision,
    }
    # Kept by name until the kernel has run.
    per_row = {
        name: x.to(wide).contiguous()
        for name, x in {
            "max_logit": saved.max_logit,
            "largest_weight": saved.largest_weight,
            "logsumexp": saved.logsumexp,
            "expected_score": saved.expected_score,
            "collision": saved.collision,
            **arriving,
        }.items()
        if x is not None and x.numel()
    }
    sheet = Sheet(_request(call))
    done = sheet.differentiate(
        None if grad is None else operand(grad),
        operand(saved.output),
        {name: x.data_ptr() for name, x in per_row.items()},
        {"pull_rows": pull.data_ptr(), "flow_rows": flow.data_ptr(), "pressure_rows": pressure.data_ptr()},
        operand(to_q),
        operand(to_k),
        None if v is None else operand(to_v),
        None if bias is None else operand(to_mask),
        extra=any(x is not None for x in arriving.values()),
    )
    if not done:
        # Numbers that are not finite, where 0 · NaN must be 0: exact in plain operations only.
        from .._operator import implementation

        return implementation("torch").backward(call, saved, upstream, bias_too=bias_too)
    if saved.gradients.numel():
        # Through .data: the version counter must not move, or a second backward through a kept graph would refuse.
        saved.gradients.data[0] = 1
        saved.gradients.data[1:] = torch.stack((flow, pressure)).flatten()
    to_scale = _over_shared(pressure, call.scale) / call.scale
    to_sinks = q.new_empty(0)
    if call.sinks is not None:
        sinks = call.sinks.to(wide)[..., None]
        mass = torch.where(sinks == -math.inf, 0, torch.sigmoid(sinks - saved.logsumexp))
        to_sinks = _over_shared(-torch.where(mass > 0, mass * pull, 0), call.sinks)
    return (
        to_q,
        to_k,
        to_v,
        to_mask.to(q.dtype if bias is None else bias.dtype),
        to_scale.to(call.scale.dtype),
        to_sinks.to(q.dtype if call.sinks is None else call.sinks.dtype),
    )


def _over_shared(rows: Tensor, like: Tensor) -> Tensor:
    """Something per row, summed to (batch or 1, heads or 1)."""
    total = rows.sum(-1)
    for axis in (0, 1):
        if like.shape[axis] == 1:
            total = total.sum(axis, keepdim=True)
    return total
