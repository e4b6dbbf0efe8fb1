"""The output and the Reading, tile by tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._state import PARTS_FOR, finish, identity, merge, observe
from ._tiles import (
    Call,
    available,
    empty,
    empty_output,
    kept,
    key_tiles,
    per_head,
    query_heads,
    row_tiles,
    tile_scores,
    tile_shape,
    weigh,
)


def forward(call: Call, stats: frozenset[str]) -> tuple[Tensor | None, dict[str, Tensor]]:
    q, v = call.q, call.v
    wanted = available(call, stats)
    parts = frozenset(part for name in wanted for part in PARTS_FOR.get(name, ()))
    value_dim = 0
    output = wide_output = None
    if v is not None:
        parts |= {"weighted"}
        value_dim = v.shape[-1]
        output = empty_output(call, q.dtype)
        if "wide_output" in stats:
            wide_output = empty_output(call, call.wide)
    fields = {name: empty(call, name, q.shape[:-1]) for name in wanted}
    like: dict[str, Any] = {"dtype": call.wide, "device": q.device}
    for tile, limits in row_tiles(call):
        shape = tile_shape(call, tile)
        state = identity(torch, shape, parts, value_dim=value_dim, **like)
        for keys in key_tiles(call, limits):
            scores, qk, visible = tile_scores(call, tile, limits, keys)
            index = torch.arange(keys.start, keys.stop, device=q.device)
            average = None
            if v is not None:
                values = v[tile.batch, tile.kv_heads, keys].to(call.wide)
                average = partial(weigh, visible, kept(call, tile, index), values)
            raw = None if qk is scores else qk
            state = merge(torch, state, observe(torch, scores, raw, visible, index, parts, average))
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
