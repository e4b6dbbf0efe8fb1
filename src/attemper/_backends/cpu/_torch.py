"""torch tensors to kernels and back: the two functions that the operator calls."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..._problem import Problem
from .._operator import COUNTS, Call, Saved, Upstream, call_of, empty_output, implementation, over_shared, row_by_row
from ._sheet import KINDS, NEED_NO_SUMS, Layout, Operand, Request, attend, differentiate
from ._slots import FIELDS

_KINDS = {getattr(torch, name): kind for name, kind in KINDS.items()}


def forward(call: Call, stats: frozenset[str], *, apart: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The output and the fields of the Reading that `stats` names."""
    call = row_by_row(_in_memory(call))
    q = call.q
    names, places, measure = _wanted(stats, call.v is None)
    found: dict[str, Tensor] = {}
    addresses = [0] * len(FIELDS)
    rows = q.shape[:-1]
    if apart:
        found = {
            name: torch.empty(rows, dtype=torch.int64 if name in COUNTS else call.wide, device="cpu") for name in names
        }
        for name, place in zip(names, places, strict=True):
            addresses[place] = found[name].data_ptr()
    elif names:
        # One piece of memory for all numbers: a tensor takes longer to make than a small problem to solve.
        numbers = torch.empty((len(FIELDS) - len(COUNTS), *rows), dtype=call.wide, device="cpu")
        counts = torch.empty((len(COUNTS), *rows), dtype=torch.int64, device="cpu")
        parts = (*numbers.unbind(), *counts.unbind())
        step = rows.numel()
        starts = [numbers.data_ptr() + i * step * numbers.element_size() for i in range(len(FIELDS) - len(COUNTS))]
        starts += [counts.data_ptr() + i * step * 8 for i in range(len(COUNTS))]
        for name, place in zip(names, places, strict=True):
            found[name], addresses[place] = parts[place], starts[place]
    output = wide = None
    if call.v is not None:
        output = empty_output(call, q.dtype)
        if "wide_output" in stats:
            wide = empty_output(call, call.wide)
            found["wide_output"] = wide
    attend(
        _request(call),
        None if output is None else operand(output),
        0 if wide is None else wide.data_ptr(),
        addresses,
        measure=measure,
    )
    return output, found


def laid_out(
    problem: Problem,
) -> tuple[Operand, Operand, Operand | None, Layout | None, tuple[Operand, Operand] | None] | None:
    """The operands of a problem as a kernel sees them and the layout of its output; None if any had to be copied."""
    call = call_of(problem, problem.batch)
    given = (problem.q, problem.k, problem.v, *(problem.bounds or (None, None)))
    pairs = zip((call.q, call.k, call.v, call.first, call.stop), given, strict=True)
    if any(x is not None and x.data_ptr() != own.data_ptr() for x, own in pairs):
        return None
    rows = None if call.first is None or call.stop is None else (operand(call.first), operand(call.stop))
    if call.v is None:
        return operand(call.q), operand(call.k), None, None, rows
    out = empty_output(call, call.q.dtype)
    if not out.is_contiguous():
        return None
    return operand(call.q), operand(call.k), operand(call.v), operand(out).layout, rows


@lru_cache(maxsize=64)
def _wanted(stats: frozenset[str], no_values: bool) -> tuple[list[str], list[int], bool]:
    """The fields to fill and their places, and whether they need sums of their own."""
    names = [name for name in FIELDS if name in stats and not (name == "output_norm" and no_values)]
    return names, [FIELDS.index(name) for name in names], not NEED_NO_SUMS.issuperset(names)


def _in_memory(tensors: Any) -> Any:
    """The same with every tensor in memory as it reads: not negative only when read, not zero without memory."""
    odd = [isinstance(x, Tensor) and (x.is_neg() or x._is_zerotensor()) for x in tensors]  # noqa: SLF001
    if not any(odd):
        return tensors
    return type(tensors)(
        *(
            torch.add(x, torch.zeros((), dtype=x.dtype, device="cpu")) if strange else x
            for x, strange in zip(tensors, odd, strict=True)
        )
    )


def _request(call: Call) -> Request:
    scale = call.scale
    return Request(
        q=operand(call.q),
        k=operand(call.k),
        v=None if call.v is None else operand(call.v),
        mask=None if call.mask is None else operand(call.mask),
        first=None if call.first is None else operand(call.first),
        stop=None if call.stop is None else operand(call.stop),
        scale=scale.item() if scale.numel() == 1 else scale.detach().double().numpy(),
        sinks=None if call.sinks is None else call.sinks.detach().double().numpy(),
        seed=0 if call.seed is None else int(call.seed),
        softcap=call.softcap or 0.0,
        dropout_p=call.dropout_p,
        period=call.period,
    )


def operand(x: Tensor) -> Operand:
    """A tensor as a kernel sees it."""
    return Operand(x.data_ptr(), Layout(x.shape, x.stride(), _KINDS.get(x.dtype, 0)))


def backward(
    call: Call,
    saved: Saved,
    upstream: Upstream,
    *,
    bias_too: bool,
    flow_too: bool,
) -> tuple[Tensor, ...]:
    """The gradients of (q, k, v, mask, scale, sinks), and what the backward pass measures."""
    if not call.scale.all():
        # What flows to a scale is what flows to the scores over it: with a scale of 0 the kernel cannot say.
        return implementation("torch").backward(call, saved, upstream, bias_too=bias_too, flow_too=flow_too)
    call, saved, upstream = row_by_row(_in_memory(call)), _in_memory(saved), _in_memory(upstream)
    q, k, v, wide = call.q, call.k, call.v, call.wide
    like: dict[str, Any] = {"dtype": wide, "device": "cpu"}
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
            "pull_rows": pull,
            "flow_rows": flow,
            "pressure_rows": pressure,
        }.items()
        if x is not None and x.numel()
    }
    done = differentiate(
        _request(call),
        None if grad is None else operand(grad),
        operand(saved.output),
        {name: x.data_ptr() for name, x in per_row.items()},
        (
            operand(to_q),
            operand(to_k),
            None if v is None else operand(to_v),
            None if bias is None else operand(to_mask),
        ),
        extra=any(x is not None for x in arriving.values()),
    )
    if not done:
        # Numbers that are not finite, where 0 · NaN must be 0: exact in plain operations only.
        return implementation("torch").backward(call, saved, upstream, bias_too=bias_too, flow_too=flow_too)
    if saved.gradients.numel():
        # Through .data: the version counter must not move, or a second backward through a kept graph would refuse.
        saved.gradients.data[:1].fill_(1)
        saved.gradients.data[1:] = torch.stack((flow, pressure)).flatten()
    to_scale = over_shared(pressure, call.scale) / call.scale
    to_sinks = q.new_empty(0)
    if call.sinks is not None:
        sinks = call.sinks.to(wide)[..., None]
        mass = torch.where(sinks == -math.inf, 0, torch.sigmoid(sinks - saved.logsumexp))
        to_sinks = over_shared(-torch.where(mass == 0, 0, mass * pull), call.sinks)
    return (
        to_q,
        to_k,
        to_v,
        to_mask.to(q.dtype if bias is None else bias.dtype),
        to_scale.to(call.scale.dtype),
        to_sinks.to(q.dtype if call.sinks is None else call.sinks.dtype),
    )
