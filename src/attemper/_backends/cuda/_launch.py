"""From a call to the launch of kernels: what they are compiled for, what they are told, where their results go."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .._operator import COUNTS, Call, Saved, Upstream, empty, empty_gradient, empty_output, over_shared
from . import _cudnn, _moments
from ._backward import (
    Constants,
    marked_to_keys_kernel,
    marked_to_queries_kernel,
    pull_kernel,
    to_keys_kernel,
    to_queries_kernel,
)
from ._flow import dots_kernel, flow_kernel
from ._forward import PARTS, Fields, careful_kernel, forward_kernel, merge_kernel, opening_kernel
from ._ready import MOST, copyable, form_of, launch, look_at, strides_of
from ._tile import BAND, BIAS, BOOL_MASK, NO_MASK, Dropped, Kind, Masked, Sizes, disguised, matrix_of, stride_of

NEED_NO_SUMS = frozenset(("max_logit", "logsumexp", "largest_weight", "visible_keys", "sink_mass", "output_norm"))
PEAKS = frozenset(("max_logit", "largest_weight", "max_qk"))
NEED_SUMS = frozenset(("expected_score", "entropy", "collision"))
HOPPER_ROWS = 64
"""Query rows that the kernel for Hopper marks together."""

SPAN = 32
"""Blocks of rows that one program looks through for marked ones."""


class Tiling(NamedTuple):
    """How a problem is cut, and for how many threads."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """At most, of a thread: where two blocks on a processor gain more than some spilled numbers cost."""


def tiling(call: Call, depth: int, rows: int) -> Tiling:
    """The tiles of a forward pass for a depth, and the rows that share their keys."""
    few = rows <= 16
    if call.q.dtype == torch.float32:
        return Tiling(16 if few else 32 if depth > 64 else 64, 32 if depth <= 64 else 16, 4, 2 if depth <= 64 else 1)
    if few:
        return Tiling(16, 128 if depth <= 128 else 64, 4, 2)
    if call.mask is not None or call.dropout_p:
        # What a mask holds, and where it lies, takes registers too.
        return Tiling(64, 64 if depth <= 64 else 32, 4, 2)
    if rows <= 64:
        return Tiling(64, 64, 4, 2)
    if depth > 128:
        return Tiling(64, 32, 4, 2)
    room = _shared_memory(call.q.device)
    if depth <= 64:
        # Of 65 KiB: two blocks share a processor.
        return Tiling(128, 64, 8, 3, 128 if room >= 130 * 1024 else None)
    # With fewer registers than these take, the compiler waits for each product.
    return Tiling(128, 64, 8, 3 if room >= 140 * 1024 else 2)


def copied_tiling(tile: Tiling, depth: int, *, moments: bool) -> Tiling:
    """The same where the copy engine brings them: for a depth of 128, two blocks of four warps share a processor."""
    # With moments in the loop four warps have too few registers.
    return tile if depth <= 64 or moments else Tiling(tile.rows, 64, 4, 2)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of it that a block may have."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def backward_tiling(call: Call, depth: int) -> Tiling:
    """The tiles of a backward pass."""
    if call.q.dtype == torch.float32:
        return Tiling(32, 32 if depth <= 64 else 16, 4, 1)
    return Tiling(64, 64, 4, 2) if depth <= 128 else Tiling(32, 32, 4, 1)


def forward(call: Call, stats: frozenset[str], *, apart: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The output and the fields of the Reading that `stats` names."""
    q = call.q
    wanted, measure = _wanted(stats, call.v is None)
    rows = q.shape[:-1]
    found = {name: empty(call, name, rows) for name in wanted} if apart else _together(call, wanted, rows)
    output = wide = None
    if call.v is not None:
        output = empty_output(call, q.dtype)
        if "wide_output" in stats:
            wide = found["wide_output"] = empty_output(call, call.wide)
    if not rows.numel():
        return output, found
    hopper = _gluon("_hopper")
    with _on(q.device):
        if hopper is None or not hopper.takes(call):
            _portable(call, measure, output, wide, found)
            return output, found
        summed = _summed(call, found, _moments.SUMMED_KEYS)
        # If all see all, the kernel takes them from there itself.
        sums = _moments.sums_of(call) if summed and call.v is not None and _moments.all_seen(call) else None
        summed = summed and sums is None
        opening = not summed and "first_key_weight" in found and not _begins_at_first_key(call)
        later = _moments.FIELDS if summed else {"first_key_weight"} if opening else ()
        needed = {name: found[name] for name in hopper.FIELDS if name in found and name not in later}
        if later:
            needed.setdefault("logsumexp", empty(call, "logsumexp", rows))
        blocks = rows[0] * rows[1] * -(-rows[2] // HOPPER_ROWS)
        marks = torch.zeros(blocks + 1, dtype=torch.int32, device=q.device)
        hopper.forward(call, output, wide, needed, marks, sums)
        if summed:
            _moments.fill(call, found | needed, marks, HOPPER_ROWS)
        _after_hopper(call, measure, output, wide, _fields(call, found | needed), marks, opening=opening)
    return output, found


def _summed(call: Call, found: dict[str, Tensor], least: dict[tuple[int, bool], tuple[int, int]]) -> bool:
    """Whether moments of the scores are wanted, and are to come from sums over keys."""
    return not _moments.FIELDS.isdisjoint(found) and _moments.worthwhile(call, least)


def _begins_at_first_key(call: Call) -> bool:
    """Whether every row that sees a key sees the first."""
    return call.first is None if call.band is None else call.band[0] + call.q.shape[2] <= 1


def _share_a_key(call: Call, rows: int) -> bool:
    """Whether of so many rows in sequence all that see keys have one of them in common."""
    return call.first is None if call.band is None else call.band[1] - call.band[0] >= rows


@lru_cache(maxsize=64)
def _wanted(stats: frozenset[str], no_values: bool) -> tuple[tuple[str, ...], int]:
    """The fields to fill, and how much there is to sum for them."""
    wanted = tuple(name for name in Fields._fields if name in stats and not (no_values and name == "output_norm"))
    measure = 0 if NEED_NO_SUMS.issuperset(wanted) else 1 if (NEED_NO_SUMS | NEED_SUMS).issuperset(wanted) else 2
    return wanted, measure


def _together(call: Call, wanted: tuple[str, ...], rows: torch.Size) -> dict[str, Tensor]:
    """Places for fields in two pieces of memory: on a GPU each takes the host longer to get than all views of it."""
    counts = sum(name in COUNTS for name in wanted)
    numbers = _places(len(wanted) - counts, call.wide, call, rows)
    # Counts are the last of the fields.
    return dict(zip(wanted, (*numbers, *_places(counts, torch.int64, call, rows)), strict=True))


def _places(count: int, dtype: torch.dtype, call: Call, rows: torch.Size) -> tuple[Tensor, ...]:
    if not count:
        return ()
    size = rows.numel()
    if size % 4 == 0:
        return torch.empty((count, *rows), dtype=dtype, device=call.q.device).unbind()
    # Each begins at a multiple of 16 bytes: for one that does not a kernel would be compiled anew.
    step = size + -size % 4
    memory = torch.empty(count * step, dtype=dtype, device=call.q.device)
    return memory.as_strided((count, *rows), (step, rows[1] * rows[2], rows[2], 1)).unbind()


def _fields(call: Call, found: dict[str, Tensor]) -> Fields:
    """Where fields go; those that nobody wants share one place."""
    rows, spare = call.q.shape[:-1], {}
    for name in Fields._fields:
        if name not in found and (name in COUNTS) not in spare:
            spare[name in COUNTS] = torch.empty(rows, dtype=_KINDS[name in COUNTS], device=call.q.device)
    return Fields(*[found[name] if name in found else spare[name in COUNTS] for name in Fields._fields])


_KINDS = {False: torch.float32, True: torch.int64}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _gluon(name: str) -> Any:
    """A module of kernels for Hopper; None where Triton has no Gluon, whose interface is not settled."""
    try:
        return import_module(f".{name}", __package__)
    except ImportError:
        return None


def _portable(call: Call, measure: int, output: Tensor | None, wide: Tensor | None, found: dict[str, Tensor]) -> None:
    batch, heads, queries, depth = call.q.shape
    value_dim = 0 if call.v is None else call.v.shape[3]
    deep, value_deep = _power(depth), _power(value_dim)
    stack = call.group if queries < HOPPER_ROWS else 1
    tile = tiling(call, max(deep, value_deep), stack * queries)
    blocks = triton.cdiv(stack * queries, tile.rows)
    programs = batch * heads // stack * blocks
    splits = splits_for(programs, call.k.shape[2], tile.keys, call.q.device)
    copies: tuple[Any, ...] = (call.scale,) * 4
    copied = splits == 1 and stack == 1 and _copies(call, output, tile)
    summed = splits == 1 and _summed(call, found, _moments.PORTABLE_SUMMED_KEYS)
    if copied:
        tile = copied_tiling(tile, max(deep, value_deep), moments=measure >= 2 and not summed)
        of_rows = [_described(call.q if x is None else x, tile.rows) for x in (call.q, output)]
        of_keys = [_described(call.k if x is None else x, tile.keys) for x in (call.k, call.v)]
        copies = of_rows[0], *of_keys, of_rows[1]
    kind = _kind(call, tile, measure=measure, values=call.v is not None)
    kind = kind._replace(wide=wide is not None, stacked=stack > 1)
    if summed:
        found = {"logsumexp": empty(call, "logsumexp", call.q.shape[:-1])} | found
    fields, peak = _fields(call, found), not PEAKS.isdisjoint(found)
    ahead = kind._replace(
        split=splits > 1,
        peak=peak,
        summed=summed,
        copied=copied,
        step=32 if tile.keys > 64 else tile.keys,
        across=max(1, min(16 * tile.warps // tile.rows, tile.keys // 8)),
        shared=splits == 1 and _share_a_key(call, tile.rows),
        opens=splits == 1 and _begins_at_first_key(call),
    )
    sizes = _sizes(call, blocks, stack, splits, plain=not call.bounded)
    q, k = matrix_of(call.q, call), matrix_of(call.k, call)
    v, out, full = (matrix_of(x, call) for x in (call.v, output, wide))
    shared = (*_bounds(call), call.scale, call.scale if call.sinks is None else call.sinks)
    softcap = 1.0 if call.softcap is None else call.softcap
    masked, dropped = _masked(call), _dropped(call)
    partial = call.scale
    if splits > 1:
        size = programs * splits * tile.rows * (PARTS.value + value_deep)
        partial = torch.empty(size, dtype=torch.float32, device=call.q.device)
    marks = torch.empty(programs, dtype=torch.int32, device=call.q.device)
    given, into = (*shared, softcap, masked, dropped), (out, full, fields, marks)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    launch(forward_kernel, programs * splits, (q, k, v, *copies, *given, sizes, *into, partial, ahead), **options)
    if splits > 1:
        launch(merge_kernel, programs, (*shared, masked, dropped, sizes, *into, partial, kind))
    if summed:
        _moments.fill(call, found, marks, tile.rows)
    again = (q, k, v, *given, _sizes(call, blocks, stack, plain=False), *into, programs, kind, SPAN)
    # It holds more than one block of four warps has room for.
    warps = 8 if tile.rows == 128 else tile.warps
    launch(careful_kernel, triton.cdiv(programs, SPAN), again, num_warps=warps, num_stages=1)


def _copies(call: Call, output: Tensor | None, tile: Tiling) -> bool:
    """Whether the copy engine can bring and take all tiles, and these are of a size for which that was faster."""
    plain = call.mask is None and call.softcap is None and not call.dropout_p
    operands = [x for x in (call.q, call.k, call.v, output) if x is not None]
    return (
        plain
        and tile.rows == 128
        and tile.stages > 1
        and _copy_engine(call.q.device)
        and all(x.shape[3] in (64, 128) and x.dtype != torch.float32 and copyable(x) for x in operands)
    )


@cache
def _copy_engine(device: torch.device) -> bool:
    """Later GPUs have one too, on which nobody has tried this."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), strides_of(x), [1, 1, rows, x.shape[3]])


class Plan(NamedTuple):
    """What is the same for all calls of a form."""

    tile: Tiling
    blocks: int
    kind: Kind
    sizes: Sizes
    form: Hashable
    """Of the launches, which calls of other lengths have too."""


_PLANS: dict[Any, Plan] = {}


def _after_hopper(
    call: Call,
    measure: int,
    output: Tensor | None,
    wide: Tensor | None,
    fields: Fields,
    marks: Tensor,
    *,
    opening: bool,
) -> None:
    """What the kernel for Hopper leaves: the weights of first keys that differ, and the blocks that it marked."""
    given = (call.q, call.k, call.v, call.first, call.stop, call.scale, call.sinks, output, wide)
    band = None if call.band is None else tuple(call.band)
    key = (measure, band, call.period, call.q.device, *map(form_of, given))
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= MOST:
            _PLANS.clear()
        plan = _PLANS[key] = _plan(call, measure, output, wide)
    q, k = matrix_of(call.q, call), matrix_of(call.k, call)
    options = {"num_warps": plan.tile.warps, "num_stages": plan.tile.stages}
    if opening:
        arguments = (q, k, *_bounds(call), call.scale, plan.sizes, fields, plan.kind)
        launch(opening_kernel, plan.blocks, arguments, form=plan.form, **options)
    v, out, full = (matrix_of(x, call) for x in (call.v, output, wide))
    sinks = call.scale if call.sinks is None else call.sinks
    again = (
        q, k, v, *_bounds(call), call.scale, sinks, 1.0, _masked(call), _dropped(call), plan.sizes, out, full, fields,
        marks, plan.blocks, plan.kind, SPAN,
    )  # fmt: skip
    launch(careful_kernel, triton.cdiv(plan.blocks, SPAN), again, form=plan.form, **options)


def _plan(call: Call, measure: int, output: Tensor | None, wide: Tensor | None) -> Plan:
    batch, heads, queries, depth = call.q.shape
    tile = Tiling(HOPPER_ROWS, 64 if depth <= 64 else 32, 4, 1)
    blocks = triton.cdiv(queries, tile.rows)
    kind = _kind(call, tile, measure=measure, values=call.v is not None)._replace(wide=wide is not None)
    sizes = _sizes(call, blocks, plain=False)
    matrices = [matrix_of(x, call) for x in (call.q, call.k, call.v, output, wide)]
    form = (kind, look_at((*matrices, *_bounds(call), call.scale, call.sinks, sizes)))
    return Plan(tile, batch * heads * blocks, kind, sizes, form)


def splits_for(programs: int, keys: int, tile: int, device: torch.device) -> int:
    """Parts of the keys, so that few rows keep all of a GPU busy."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    tiles = -(-keys // tile)
    if programs >= processors or tiles < 8:
        return 1
    # Two blocks to a processor, each of some tiles at least.
    return max(1, min(2 * int(processors) // programs, tiles // 4))


def backward(call: Call, saved: Saved, upstream: Upstream, *, bias_too: bool, flow_too: bool) -> tuple[Tensor, ...]:
    """The gradients of (q, k, v, mask, scale, sinks), and what the backward pass measures."""
    q, k, v = call.q, call.k, call.v
    if upstream.output is not None and not any(x is not None for x in upstream[1:]) and _cudnn.takes(call):
        with _on(q.device):
            found = _by_cudnn(call, saved, upstream.output, flow_too=flow_too)
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
    pull, along, flow = (torch.zeros(q.shape[:-1], **like) for _ in range(3))
    if along.numel() and k.shape[2] and q.shape[3]:
        with _on(q.device):
            _gradients(call, saved, upstream, pull, along, flow, to_q, to_k, to_v, None if bias is None else to_mask)
    else:
        for x in (to_q, to_k, to_v):
            x.zero_()
    if saved.gradients.numel():
        # Through .data: the version counter must not move, or a second backward through a kept graph would refuse.
        saved.gradients.data[:1].fill_(1)
        saved.gradients.data[1:] = torch.stack((flow, along * call.scale.to(call.wide)[..., None])).flatten()
    to_sinks = q.new_empty(0)
    if call.sinks is not None:
        sinks = call.sinks.to(call.wide)[..., None]
        mass = torch.where(sinks == -math.inf, 0, torch.sigmoid(sinks - saved.logsumexp))
        to_sinks = over_shared(-torch.where(mass > 0, mass * pull, 0), call.sinks).to(call.sinks.dtype)
    to_scale = over_shared(along, call.scale).to(call.scale.dtype)
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
    with _on(call.q.device):
        _dots(call, grad, saved.output, pull)
        _flow(call, saved, grad, pull, found)
    return found


def _dots(call: Call, left: Tensor, right: Tensor, found: Tensor) -> None:
    """The products of rows of two matrices, each (batch, heads, queries, x)."""
    batch, heads, queries, depth = left.shape
    blocks = triton.cdiv(queries, HOPPER_ROWS)
    one, other = matrix_of(left, call), matrix_of(right, call)
    arguments = (one, other, found, _sizes(call, blocks, plain=False), depth, HOPPER_ROWS, _power(depth))
    launch(dots_kernel, batch * heads * blocks, arguments)


def _flow(call: Call, saved: Saved, grad: Tensor, pull: Tensor, flow: Tensor) -> None:
    """The gradient flow of a plain call into `flow`; `pull` is ⟨dO, O⟩ of each row."""
    batch, heads, queries, _ = call.q.shape
    max_logit, peak = saved.max_logit.contiguous(), saved.largest_weight.contiguous()
    hopper = _gluon("_hopper_to_queries")
    if hopper is not None and hopper.takes(call, grad):
        counter = torch.zeros(1, dtype=torch.int32, device=grad.device)
        hopper.run(call, grad, hopper.Rows(max_logit, peak, peak, pull), None, flow, counter)
        return
    tile = Tiling(64, 64, 4, 2)
    blocks = triton.cdiv(queries, tile.rows)
    sizes = _sizes(call, blocks, plain=True)
    kind = _kind(call, tile, measure=1, values=True)
    matrices = (matrix_of(x, call) for x in (call.q, call.k, call.v, grad))
    arguments = (*matrices, flow, pull, max_logit, peak, *_bounds(call), call.scale, sizes, kind)
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
) -> None:
    batch, heads, queries, depth = call.q.shape
    kv_heads, keys = call.k.shape[1:3]
    grad = None if call.v is None or not call.v.shape[3] else upstream.output
    if grad is None:
        to_v.zero_()
    tile = backward_tiling(call, max(_power(depth), _power(0 if call.v is None else call.v.shape[3])))
    blocks = triton.cdiv(queries, tile.rows)
    sizes = _sizes(call, blocks, plain=True)
    fields = (upstream.logsumexp, upstream.entropy, upstream.expected_score, upstream.collision)
    extra = any(x is not None for x in fields)
    kind = _kind(call, tile, measure=int(saved.gradients.numel() > 0), values=grad is not None)
    kind = kind._replace(extra=extra, to_mask=to_mask is not None)
    bounds = _bounds(call)
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
    shared = (*bounds, call.scale, softcap, constants, _masked(call), _dropped(call))
    q, k, v = (matrix_of(x, call) for x in (call.q, call.k, call.v))
    for_mask = Masked(along, 0, 0, 0, 0) if to_mask is None else Masked(to_mask, *_shared(to_mask))
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    for_queries = (q, k, v, arriving, matrix_of(to_q, call), for_mask, flow, along, *shared)
    for_keys = (q, k, v, arriving, matrix_of(to_k, call), matrix_of(to_v, call), ranges, *shared)
    counts = batch * heads * blocks, batch * kv_heads * triton.cdiv(keys, tile.keys)
    marks = None
    if grad is not None and not extra:
        measured = flow if kind.measure else None
        marks = _by_hopper(call, grad, constants, ranges, counts, to_q, to_k, to_v, measured)
    if marks is None:
        launch(to_queries_kernel, counts[0], (*for_queries, sizes, kind), **options)
        launch(to_keys_kernel, counts[1], (*for_keys, sizes, kind), **options)
        return
    sizes = _sizes(call, blocks, plain=False)
    kernels = marked_to_queries_kernel, marked_to_keys_kernel
    for kernel, given, mark, count in zip(kernels, (for_queries, for_keys), marks, counts, strict=True):
        launch(kernel, triton.cdiv(count, SPAN), (*given, sizes, mark, count, kind, SPAN), **options)
    if kind.measure:
        _dots(call, call.q, to_q, along)
        along /= call.scale.to(call.wide)[..., None]


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
    for_queries, for_keys = _gluon("_hopper_to_queries"), _gluon("_hopper_to_keys")
    if for_queries is None or not all(copyable(x) for x in (to_q, to_k, to_v)):
        return None
    grad = grad if copyable(grad) else grad.contiguous()
    if not for_queries.takes(call, grad):
        return None
    # Each has a number more, by which the kernel counts.
    marks = [torch.zeros(count + 1, dtype=torch.int32, device=grad.device) for count in counts]
    rows = for_queries.Rows(constants.max_logit, constants.peak, constants.share, constants.pull)
    for_queries.run(call, grad, rows, to_q, flow, marks[0])
    for_keys.run(call, grad, rows, ranges, to_k, to_v, marks[1])
    return marks


def _kind(call: Call, tile: Tiling, *, measure: int, values: bool) -> Kind:
    exact = call.q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return Kind(
        rows=tile.rows,
        keys=tile.keys,
        depth=_power(call.q.shape[3]),
        value_depth=_power(0 if call.v is None else call.v.shape[3]),
        valued=values,
        bounded=BAND.value if call.band is not None else int(call.first is not None),
        # Numbers, not Triton's constants: a kind is compared at every launch.
        mask=(NO_MASK if call.mask is None else BOOL_MASK if call.mask.dtype == torch.bool else BIAS).value,
        softcap=call.softcap is not None,
        dropout=call.dropout_p > 0,
        sinks=call.sinks is not None,
        measure=measure,
        wide=False,
        split=False,
        precision="ieee" if exact else "tf32",
        widen=call.q.device.type == "cpu",
    )


def _sizes(call: Call, blocks: int, stack: int = 1, splits: int = 1, *, plain: bool) -> Sizes:
    """The numbers of a call; lengths `plain`, as they are, for kernels that are a tenth smaller where 16 divides them.

    These are the gradients, which read numbers of several rows at once, and the forward pass where all see all.
    """
    low, high = (0, 0) if call.band is None else call.band
    lengths = {
        "queries": call.q.shape[2],
        "keys": call.k.shape[2],
        "bound_batch": 0 if call.first is None else stride_of(call.first, 0),
        "low": low,
        "high": high,
    }
    return Sizes(
        heads=call.q.shape[1],
        group=call.group,
        stack=stack,
        depth=call.q.shape[3],
        value_depth=0 if call.v is None else call.v.shape[3],
        blocks=disguised(blocks),
        splits=disguised(splits),
        scale_batch=stride_of(call.scale, 0),
        scale_head=stride_of(call.scale, 1),
        sinks_batch=0 if call.sinks is None else stride_of(call.sinks, 0),
        sinks_head=0 if call.sinks is None else stride_of(call.sinks, 1),
        kept=1 - call.dropout_p,
        **(lengths if plain else {name: disguised(n) for name, n in lengths.items()}),
    )


def _bounds(call: Call) -> tuple[Tensor, Tensor]:
    if call.first is None or call.stop is None:
        return call.scale, call.scale  # not looked at
    first, stop = call.first.to(call.q.device), call.stop.to(call.q.device)
    return (first, stop) if first.stride() == stop.stride() else (first.contiguous(), stop.contiguous())


def _masked(call: Call) -> Masked:
    if call.mask is None:
        return Masked(call.scale, 0, 0, 0, 0)
    mask = call.mask.view(torch.int8) if call.mask.dtype == torch.bool else call.mask
    return Masked(mask, *_shared(mask))


def _dropped(call: Call) -> Dropped:
    seed = call.scale if call.seed is None else call.seed.to(call.q.device)
    period = max(call.period, 1) if call.dropout_p else 0
    return Dropped(seed, min(round(call.dropout_p * 2**32), 2**32 - 1), disguised(period))


def _shared(x: Tensor) -> tuple[int, ...]:
    """Strides, 0 along axes of size 1."""
    return tuple(stride_of(x, axis) for axis in range(x.dim()))


def _power(n: int) -> int:
    """The power of 2 from n on that a product takes."""
    return max(16, 1 << max(n - 1, 0).bit_length())
