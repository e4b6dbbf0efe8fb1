"""The output and the Reading, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields as fields_of
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._state import NO_KEY, PARTS_FOR, State, finish, identity, merge, observe
from .._operator import Call, available, empty, empty_output
from ._tiles import (
    Tile,
    kept,
    key_tiles,
    per_head,
    products,
    query_heads,
    room,
    row_tiles,
    split,
    tile_mask,
    tile_scores,
    tile_shape,
    weigh,
    within,
)

Limits = tuple[Tensor, Tensor] | None

ROWS_AT_ONCE = 2**13
"""Query rows of all heads that are finished together: many, for a row costs little and a call to torch does not."""


def forward(call: Call, stats: frozenset[str], *, apart: bool) -> tuple[Tensor | None, dict[str, Tensor]]:  # noqa: ARG001
    q, v = call.q, call.v
    wanted = available(call, stats)
    parts = frozenset(part for name in wanted for part in PARTS_FOR.get(name, ()))
    output = wide_output = None
    if v is not None:
        parts |= {"weighted"}
        output = empty_output(call, q.dtype)
        if "wide_output" in stats:
            wide_output = empty_output(call, call.wide)
    fields = {name: empty(call, name, q.shape[:-1]) for name in wanted}
    for tile, state in _states(call, parts):
        sinks = None if call.sinks is None else per_head(call.sinks, call, tile).to(call.wide)
        rows_output, rows_fields = finish(torch, state, sinks)
        where = (tile.batch, query_heads(call, tile), tile.rows)
        if output is not None and rows_output is not None:
            rows_output = (rows_output / (1 - call.dropout_p)).flatten(1, 2)
            output[where] = rows_output.to(output.dtype)
            if wide_output is not None:
                wide_output[where] = rows_output
            if call.dropout_p and "output_norm" in rows_fields:
                rows_fields["output_norm"] = rows_fields["output_norm"] / (1 - call.dropout_p)
        for name in wanted:
            fields[name][where] = rows_fields[name].flatten(1, 2)
    if wide_output is not None:
        fields["wide_output"] = wide_output
    return output, fields


def _states(call: Call, parts: frozenset[str]) -> Iterator[tuple[Tile, State]]:
    """The States of all rows, over all their keys; those of several tiles of queries together."""

    def block(item: tuple[Tile, Limits]) -> tuple[int, int, int]:
        tile = item[0]
        heads = math.prod(tile_shape(call, tile)[:3])
        return tile.batch.start, tile.kv_heads.start, tile.rows.start * heads // ROWS_AT_ONCE

    memory = room(call) if call.q.device.type == "cpu" else None
    for _, group in groupby(row_tiles(call), block):
        tiles, states = [], []
        for tile, limits in group:
            state = None
            for keys in key_tiles(call, limits):
                seen = _observe(call, tile, limits, keys, parts, memory)
                state = seen if state is None else merge(torch, state, seen)
            tiles.append(tile)
            states.append(_nothing(call, tile, parts) if state is None else state)
        rows = slice(tiles[0].rows.start, tiles[-1].rows.stop)
        yield tiles[0]._replace(rows=rows), states[0] if len(states) == 1 else _joined(states)


def _nothing(call: Call, tile: Tile, parts: frozenset[str]) -> State:
    value_dim = 0 if call.v is None else call.v.shape[-1]
    like: dict[str, Any] = {"dtype": call.wide, "device": call.q.device}
    return identity(torch, tile_shape(call, tile), parts, value_dim=value_dim, **like)


def _joined(states: list[State]) -> State:
    """One State of the rows of all."""
    columns = {f.name: [getattr(state, f.name) for state in states] for f in fields_of(State)}
    return State(**{
        name: None if column[0] is None else torch.cat(column, dim=3) for name, column in columns.items()
    })  # fmt: skip


def _observe(
    call: Call, tile: Tile, limits: Limits, keys: slice, parts: frozenset[str], memory: Tensor | None
) -> State:
    """The State of some rows over one tile of keys."""
    index = torch.arange(keys.start, keys.stop, device=call.q.device)
    values = None if call.v is None else call.v[tile.batch, tile.kv_heads, keys].to(call.wide)
    if memory is not None:  # elsewhere than on a CPU its question would make the host wait for the device
        state = _observe_finite(call, tile, limits, keys, parts, values, memory)
        if state is not None:
            return state
    scores, qk, visible = tile_scores(call, tile, limits, keys)
    average = None if values is None else partial(weigh, visible, kept(call, tile, index), values)
    return observe(torch, scores, None if qk is scores else qk, visible, index, parts, average)


class _View(NamedTuple):
    """Which keys of a tile its rows see, each part with the axes of the scores, full or 1."""

    counts: Tensor
    firsts: Tensor
    """The first visible key; NO_KEY where there is none."""
    veils: list[tuple[slice, Tensor, Tensor]]
    """Columns of which some are hidden from some rows; 1 where visible, 0 where hidden; 0 and −inf."""


def _bounded(limits: Limits, keys: slice, dtype: torch.dtype) -> _View:
    """What the bounds of the rows show: all, but for the columns at both ends."""
    if limits is None:
        count = torch.tensor(keys.stop - keys.start, dtype=dtype)
        return _View(count, torch.tensor(keys.start), [])
    first, stop = (x.clamp(keys.start, keys.stop)[:, None, None] for x in limits)
    count = (stop - first).clamp(min=0)
    low, high = int(first.max()), int(stop.min())
    ends = [keys] if low >= high else [slice(keys.start, low), slice(high, keys.stop)]
    veils = [_veil(within(limits, end, first.device), end, keys, dtype) for end in ends if end.start < end.stop]
    return _View(count.to(dtype), torch.where(count > 0, first, NO_KEY), veils)


def _masked(shown: Tensor, keys: slice, dtype: torch.dtype) -> _View:
    """What a mask shows, wherever that is."""
    size = keys.stop - keys.start
    columns, keep, hide = _veil(shown.expand(*shown.shape[:-1], size), keys, keys, dtype)
    count = keep.sum(-1)
    first = torch.where(count > 0, keep.argmax(-1) + keys.start, NO_KEY)
    return _View(count, first, [(columns, keep, hide)] if int(count.min()) < size else [])


def _veil(visible: Tensor, columns: slice, keys: slice, dtype: torch.dtype) -> tuple[slice, Tensor, Tensor]:
    keep = visible.to(dtype)
    return slice(columns.start - keys.start, columns.stop - keys.start), keep, keep.log()


def _observe_finite(
    call: Call,
    tile: Tile,
    limits: Limits,
    keys: slice,
    parts: frozenset[str],
    values: Tensor | None,
    memory: Tensor,
) -> State | None:
    """`observe` in fewer passes over the scores, each in place; None unless all of them and the values are finite.

    What is hidden is multiplied by 0 or has −inf added, which is faster than a choice and right for finite numbers; one
    that is not leaves its trace in the sums.
    """
    shape = tile_shape(call, tile)
    full = (*shape, keys.stop - keys.start)
    own, scratch = (part[: math.prod(full)].view(full) for part in memory)
    scores = products(call, tile, keys, own)
    qk = None
    if call.softcap is not None:
        qk, scores = scores, (scores / call.softcap).tanh_().mul_(call.softcap)
    if call.mask is None:
        view = _bounded(limits, keys, call.wide)
    else:
        bias, shown = tile_mask(call.mask, call, tile, keys)
        if bias is not None:
            bias = torch.where(shown, bias, 0).to(call.wide)
            qk, scores = (scores, scores + bias) if qk is None else (qk, scores.add_(bias))
        if limits is not None:
            shown = shown & within(limits, keys, scores.device)
        view = _masked(shown, keys, call.wide)
    for columns, keep, _ in view.veils:
        scores[..., columns].mul_(keep)
    count = view.counts.expand(shape)
    tilt = squares = mean = spread = highest = first = first_score = weighted = None
    checked = []
    if "moments" in parts:
        mean = scores.sum(-1) / count.clamp(min=1)
        checked.append(mean)
        torch.sub(scores, mean[..., None], out=scratch)
        for columns, keep, _ in view.veils:
            scratch[..., columns].mul_(keep)
        spread = torch.linalg.vector_norm(scratch, dim=-1).square_()
    for columns, _, hide in view.veils:
        scores[..., columns].add_(hide)
    maximum = scores.amax(-1)
    if "highest_qk" in parts:
        highest = maximum
        if qk is not None:
            for columns, _, hide in view.veils:
                qk[..., columns].add_(hide)
            highest = qk.amax(-1)
            if math.isnan(highest.sum().item()):
                return None
    if "first" in parts:
        first = view.firsts.expand(shape)
        # Where a row sees none, all of them are at −inf.
        first_score = scores.gather(-1, (first - keys.start).clamp(max=scores.shape[-1] - 1)[..., None])[..., 0]
    lowest = torch.finfo(call.wide).min
    deviation = scores.sub_(maximum.clamp(min=lowest)[..., None])
    # Not exp, which takes twice as long, and fifty times where its results are denormal.
    weights = torch.mul(deviation, 1 / math.log(2), out=scratch).exp2_()
    total = weights.sum(-1)
    checked.append(total)
    if "squares" in parts:
        squares = torch.linalg.vector_norm(weights, dim=-1).square_()
    if values is not None:
        index = torch.arange(keys.start, keys.stop)
        undropped = kept(call, tile, index)
        shares = weights if undropped is None else torch.where(undropped, weights, 0)
        weighted = split(torch.matmul(shares.flatten(2, 3), values), 2, shape[2:4])
        checked.append(weighted)
    if "tilt" in parts:
        for columns, keep, _ in view.veils:
            deviation[..., columns].clamp_(min=lowest).mul_(keep)
        tilt = weights.mul_(deviation).sum(-1)
        checked.append(tilt)
    if not all(math.isfinite(x.sum().item()) for x in checked):
        return None
    return State(
        maximum=maximum,
        total=total,
        count=count,
        weighted=weighted,
        tilt=tilt,
        squares=squares,
        mean=mean,
        spread=spread,
        highest_qk=highest,
        first=first,
        first_score=first_score,
    )
