"""From a call to the launch of kernels, and where their results go."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .._operator import COUNTS, Call, empty, empty_output
from . import _form, _moments
from ._finish import Fields
from ._form import HOPPER_ROWS, SPAN, Tiling
from ._forward import PARTS, careful_kernel, forward_kernel, merge_kernel, opening_kernel
from ._ready import MOST, copyable, form_of, launch, look_at, strides_of
from ._tile import Kind, Sizes, matrix_of

NEED_NO_SUMS = frozenset(("max_logit", "logsumexp", "largest_weight", "visible_keys", "sink_mass", "output_norm"))
PEAKS = frozenset(("max_logit", "largest_weight", "max_qk"))
NEED_SUMS = frozenset(("expected_score", "entropy", "collision"))


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


class Copied(NamedTuple):
    """The same where the copy engine brings tiles."""

    tile: Tiling
    merged: bool = False
    late: bool = False


def copied_tiling(tile: Tiling, depth: int, *, moments: bool, bounded: bool) -> Copied:
    """What measured best."""
    if depth <= 64:
        # Four blocks share a processor, and lose less beside the ends of what rows see.
        return Copied(Tiling(64, 64, 4, 2, 128), merged=True) if moments else Copied(tile)
    if moments:
        # One block has a processor to itself: nobody else multiplies while it weighs.
        return Copied(tile, late=True)
    # Two blocks share a processor.
    return Copied(Tiling(tile.rows, 32, 8, 4, 128), merged=True) if bounded else Copied(Tiling(tile.rows, 64, 4, 2))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of it that a block may have."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


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
    hopper = _form.gluon("_hopper")
    with _form.on(q.device):
        if hopper is None or not hopper.takes(call):
            _portable(call, measure, output, wide, found)
            return output, found
        summed = _summed(call, found, _moments.SUMMED_KEYS)
        # If all see all, the kernel mostly takes them from there itself.
        sums = _moments.sums_of(call) if summed and hopper.takes_sums(call) else None
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


def _portable(call: Call, measure: int, output: Tensor | None, wide: Tensor | None, found: dict[str, Tensor]) -> None:
    batch, heads, queries, depth = call.q.shape
    value_dim = 0 if call.v is None else call.v.shape[3]
    deep, value_deep = _form.power_of_2(depth), _form.power_of_2(value_dim)
    stack = call.group if queries < HOPPER_ROWS else 1
    tile = tiling(call, max(deep, value_deep), stack * queries)
    blocks = triton.cdiv(stack * queries, tile.rows)
    programs = batch * heads // stack * blocks
    splits = splits_for(programs, call.k.shape[2], tile.keys, call.q.device)
    copies: tuple[Any, ...] = (call.scale,) * 4
    copied = splits == 1 and stack == 1 and _copies(call, output, tile)
    summed = splits == 1 and _summed(call, found, _moments.PORTABLE_SUMMED_KEYS)
    merged = late = False
    if copied:
        moments = measure >= 2 and not summed
        tile, merged, late = copied_tiling(tile, max(deep, value_deep), moments=moments, bounded=call.bounded)
        blocks = triton.cdiv(queries, tile.rows)
        programs = batch * heads * blocks
        of_rows = [_described(call.q if x is None else x, tile.rows) for x in (call.q, output)]
        of_keys = [_described(call.k if x is None else x, tile.keys) for x in (call.k, call.v)]
        copies = of_rows[0], *of_keys, of_rows[1]
    kind = _form.kind_of(call, tile, measure=measure, values=call.v is not None)
    kind = kind._replace(wide=wide is not None, stacked=stack > 1)
    if summed:
        found = {"logsumexp": empty(call, "logsumexp", call.q.shape[:-1])} | found
    fields, peak = _fields(call, found), not PEAKS.isdisjoint(found)
    ahead = kind._replace(
        split=splits > 1,
        peak=peak,
        summed=summed,
        copied=copied,
        merged=merged,
        late=late and call.v is not None,
        step=32 if tile.keys > 64 else tile.keys,
        across=max(1, min(16 * tile.warps // tile.rows, tile.keys // 8)),
        shared=splits == 1 and _share_a_key(call, tile.rows),
        opens=splits == 1 and _begins_at_first_key(call),
    )
    sizes = _form.sizes_for(call, blocks, stack, splits, plain=not call.bounded)
    q, k = matrix_of(call.q, call), matrix_of(call.k, call)
    v, out, full = (matrix_of(x, call) for x in (call.v, output, wide))
    shared = (*_form.bounds_of(call), call.scale, call.scale if call.sinks is None else call.sinks)
    softcap = 1.0 if call.softcap is None else call.softcap
    masked, dropped = _form.masked_of(call), _form.dropped_of(call)
    partial = call.scale
    if splits > 1:
        size = programs * splits * tile.rows * (PARTS.value + value_deep)
        partial = torch.empty(size, dtype=torch.float32, device=call.q.device)
    marks = torch.empty(programs, dtype=torch.int32, device=call.q.device)
    given, into = (*shared, softcap, masked, dropped), (out, full, fields, marks)
    # What the kernels share is looked at once, which is most of what a short call takes the host.
    same = look_at((q, k, v, *given, *into))
    form = same, look_at((sizes, partial))
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    arguments: tuple[Any, ...] = (q, k, v, *copies, *given, sizes, *into, partial, ahead)
    launch(forward_kernel, programs * splits, arguments, form=(form, ahead), **options)
    if splits > 1:
        arguments = (*shared, masked, dropped, sizes, *into, partial, kind)
        launch(merge_kernel, programs, arguments, form=(form, kind))
    if summed:
        _moments.fill(call, found, marks, tile.rows)
    sizes = _form.sizes_for(call, blocks, stack, plain=False)
    arguments = (q, k, v, *given, sizes, *into, programs, kind, SPAN)
    # It holds more than one block of four warps has room for.
    options = {"num_warps": 8 if tile.rows == 128 else tile.warps, "num_stages": 1}
    form = same, look_at(sizes)
    launch(careful_kernel, triton.cdiv(programs, SPAN), arguments, form=(form, kind), **options)


def _copies(call: Call, output: Tensor | None, tile: Tiling) -> bool:
    """Whether the copy engine can bring and take all tiles, and these are of a size for which that was faster."""
    plain = call.mask is None and call.softcap is None and not call.dropout_p
    operands = [x for x in (call.q, call.k, call.v, output) if x is not None]
    return (
        plain
        and call.k.shape[2] > 0
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
        arguments = (q, k, *_form.bounds_of(call), call.scale, plan.sizes, fields, plan.kind)
        launch(opening_kernel, plan.blocks, arguments, form=plan.form, **options)
    v, out, full = (matrix_of(x, call) for x in (call.v, output, wide))
    sinks = call.scale if call.sinks is None else call.sinks
    again = (
        q, k, v, *_form.bounds_of(call), call.scale, sinks, 1.0, _form.masked_of(call), _form.dropped_of(call),
        plan.sizes, out, full, fields, marks, plan.blocks, plan.kind, SPAN,
    )  # fmt: skip
    launch(careful_kernel, triton.cdiv(plan.blocks, SPAN), again, form=plan.form, **options)


def _plan(call: Call, measure: int, output: Tensor | None, wide: Tensor | None) -> Plan:
    batch, heads, queries, depth = call.q.shape
    tile = Tiling(HOPPER_ROWS, 64 if depth <= 64 else 32, 4, 1)
    blocks = triton.cdiv(queries, tile.rows)
    kind = _form.kind_of(call, tile, measure=measure, values=call.v is not None)._replace(wide=wide is not None)
    sizes = _form.sizes_for(call, blocks, plain=False)
    matrices = [matrix_of(x, call) for x in (call.q, call.k, call.v, output, wide)]
    form = (kind, look_at((*matrices, *_form.bounds_of(call), call.scale, call.sinks, sizes)))
    return Plan(tile, batch * heads * blocks, kind, sizes, form)


def splits_for(programs: int, keys: int, tile: int, device: torch.device) -> int:
    """Parts of the keys, so that few rows keep all of a GPU busy."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    tiles = -(-keys // tile)
    if programs >= processors or tiles < 8:
        return 1
    # Two blocks to a processor, each of some tiles at least.
    return max(1, min(2 * int(processors) // programs, tiles // 4))
