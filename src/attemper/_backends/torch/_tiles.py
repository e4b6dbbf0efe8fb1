"""How the operands of a call are cut into tiles, and the scores of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._dropout import kept_signed
from .._operator import Call, bounds_of


class Tile(NamedTuple):
    """A part of the rows: some batch entries and key heads, with the queries of the heads that share them."""

    batch: slice
    kv_heads: slice
    rows: slice


def row_tiles(call: Call) -> Iterator[tuple[Tile, tuple[Tensor, Tensor] | None]]:
    """Cut batch, heads and queries so that a tile of scores stays small; with each, the bounds of its rows."""
    batch, _, queries, _ = call.q.shape
    kv_heads = call.k.shape[1]
    query_tile, key_tile, most = _sizes(call.q)
    scores = call.group * min(queries, query_tile) * min(call.k.shape[2], key_tile)
    heads_at_once = max(1, min(kv_heads, most // max(scores, 1)))
    batch_at_once = max(1, min(batch, most // max(scores * heads_at_once, 1))) if heads_at_once == kv_heads else 1
    # On the host, where the loop runs.
    bounds = bounds_of(call, "cpu")
    for b in steps(0, batch, batch_at_once):
        for h in steps(0, kv_heads, heads_at_once):
            for rows in steps(0, queries, query_tile):
                limits = None
                if bounds is not None:
                    first, stop = (entries(x, b)[:, rows] for x in bounds)
                    limits = (first, stop)
                yield Tile(b, h, rows), limits


def key_tiles(call: Call, limits: tuple[Tensor, Tensor] | None) -> Iterator[slice]:
    low, high = 0, call.k.shape[2]
    if limits is not None:
        first, stop = limits
        seen = first < stop
        if not seen.any():
            return
        low, high = int(first[seen].min()), int(stop[seen].max())
    yield from steps(low, high, _sizes(call.q)[1])


def _sizes(q: Tensor) -> tuple[int, int, int]:
    """Queries and keys of a tile, and the most scores of all heads in it: a cache on a CPU, many cores elsewhere.

    On a CPU a tile is worth the calls to torch that it takes, and of few queries, for the sake of causal masks.
    """
    if q.device.type != "cpu":
        return 1024, 2048, 2**24
    heads = q.shape[0] * q.shape[1]
    return min(max(512 // max(heads, 1), 64), 256), 1024, 2**20


def room(call: Call) -> Tensor:
    """Memory for the scores of any tile of the call, twice.

    Kept from tile to tile: an array that is allocated anew has its pages zeroed by the system, which takes as long as
    all that is then done with it.
    """
    batch, _, queries, _ = call.q.shape
    query_tile, key_tile, most = _sizes(call.q)
    least = call.group * min(queries, query_tile) * min(call.k.shape[2], key_tile)
    size = min(max(least, most), least * batch * call.k.shape[1])
    return torch.empty((2, size), dtype=call.wide, device=call.q.device)


def steps(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, stop)) for i in range(start, stop, step))


def entries(x: Tensor, batch: slice) -> Tensor:
    """Some batch entries of something whose batch axis may be 1."""
    return x if x.shape[0] == 1 else x[batch]


def query_heads(call: Call, tile: Tile) -> slice:
    return slice(tile.kv_heads.start * call.group, tile.kv_heads.stop * call.group)


def tile_shape(call: Call, tile: Tile) -> tuple[int, int, int, int]:
    lengths = [s.stop - s.start for s in tile]
    return lengths[0], lengths[1], call.group, lengths[2]


def split(x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """One axis as several."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def rows_of(call: Call, tile: Tile, x: Tensor) -> Tensor:
    """(batch, kv_heads, group, rows, …) of something per row."""
    part = x[tile.batch, query_heads(call, tile), tile.rows].to(call.wide)
    return split(part, 1, tile_shape(call, tile)[1:3])


def per_head(x: Tensor, call: Call, tile: Tile) -> Tensor:
    """(batch or 1, kv_heads or 1, group or 1, 1) of something per head."""
    x = entries(x, tile.batch)
    if x.shape[1] == 1:
        return x[:, :, None, None]
    return split(x[:, query_heads(call, tile)], 1, (-1, call.group))[..., None]


def add_per_head(total: Tensor, rows: Tensor, call: Call, tile: Tile) -> None:
    """Add a tile's rows to something per head, over the axes along which it is shared."""
    rows = rows.sum(-1).flatten(1, 2)
    if total.shape[0] == 1:
        rows = rows.sum(0, keepdim=True)
    if total.shape[1] == 1:
        rows = rows.sum(1, keepdim=True)
        entries(total, tile.batch).add_(rows)
    else:
        entries(total, tile.batch)[:, query_heads(call, tile)] += rows


def _part_of_mask(mask: Tensor, call: Call, tile: Tile, keys: slice) -> Tensor:
    """(batch or 1, heads or 1, rows or 1, keys or 1): the part of a mask that a tile meets."""
    mask = entries(mask, tile.batch)
    if mask.shape[1] > 1:
        mask = mask[:, query_heads(call, tile)]
    if mask.shape[2] > 1:
        mask = mask[:, :, tile.rows]
    return mask[..., keys] if mask.shape[3] > 1 else mask


def add_bias(total: Tensor, grad_scores: Tensor, call: Call, tile: Tile, keys: slice) -> None:
    part = _part_of_mask(total, call, tile, keys)
    grad = grad_scores.flatten(1, 2)
    shared = [axis for axis in range(4) if part.shape[axis] == 1]
    part += grad.sum(shared, keepdim=True) if shared else grad


def tile_scores(
    call: Call, tile: Tile, limits: tuple[Tensor, Tensor] | None, keys: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores and scaled q·k, (batch, kv_heads, group, rows, keys), and which of them are visible (None for all)."""
    qk = products(call, tile, keys)
    scores = qk
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(qk / call.softcap)
    visible = None
    if limits is not None:
        first, stop = limits
        if int(first.max()) > keys.start or int(stop.min()) < keys.stop:
            visible = within(limits, keys, qk.device).expand(scores.shape)
    if call.mask is not None:
        bias, shown = tile_mask(call.mask, call, tile, keys)
        if bias is not None:
            scores = scores + bias.to(call.wide)
        visible = (shown if visible is None else visible & shown).expand(scores.shape)
    return scores, qk, visible


def products(call: Call, tile: Tile, keys: slice, out: Tensor | None = None) -> Tensor:
    """Scaled q·k of a tile, (batch, kv_heads, group, rows, keys); in the memory of `out`, where that is given."""
    own = call.q[tile.batch, query_heads(call, tile), tile.rows].to(call.wide)
    q = split(own, 1, tile_shape(call, tile)[1:3]) * per_head(call.scale, call, tile).to(call.wide)[..., None]
    k = call.k[tile.batch, tile.kv_heads, keys].to(call.wide)
    if out is None:
        return times(q, k.mT)
    torch.bmm(q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).mT, out=out.flatten(2, 3).flatten(0, 1))
    return out


def within(limits: tuple[Tensor, Tensor], keys: slice, device: torch.device) -> Tensor:
    """(batch or 1, 1, 1, rows, keys): whether a key lies between the bounds of a row."""
    index = torch.arange(keys.start, keys.stop, device=device)
    first, stop = (x.to(device)[:, None, None, :, None] for x in limits)
    return (first <= index) & (index < stop)


def tile_mask(mask: Tensor, call: Call, tile: Tile, keys: slice) -> tuple[Tensor | None, Tensor]:
    """What a mask adds to the scores of a tile, if anything, and which of them it shows; axes may be 1."""
    mask = _part_of_mask(mask, call, tile, keys)
    mask = split(mask, 1, (1, 1) if mask.shape[1] == 1 else tile_shape(call, tile)[1:3])
    if mask.dtype == torch.bool:
        return None, mask
    # Asked of the mask as it came: a finite number may become −inf in the narrower type and hides nothing.
    return mask, mask != -math.inf


def times(rows: Tensor, columns: Tensor) -> Tensor:
    """(batch, kv_heads, group, rows, x) · (batch, kv_heads, x, y), the group sharing the right side uncopied."""
    return split(torch.matmul(rows.flatten(2, 3), columns), 2, rows.shape[2:4])


def transposed(shares: Tensor, visible: Tensor | None, rows: Tensor) -> Tensor:
    """Σ over the rows and the group of shares · rows: (batch, kv_heads, keys, x)."""
    turned = None if visible is None else visible.flatten(2, 3).mT
    return _guarded(shares.flatten(2, 3).mT, turned, rows.flatten(2, 3))


def weigh(visible: Tensor | None, kept: Tensor | None, values: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights_j v_j over the kept keys; a NaN or infinity reaches exactly the rows that see its key."""
    shares = weights if kept is None else torch.where(kept, weights, 0)
    flat = None if visible is None else visible.flatten(2, 3)
    return split(_guarded(shares.flatten(2, 3), flat, values), 2, weights.shape[2:4])


def _guarded(shares: Tensor, visible: Tensor | None, values: Tensor) -> Tensor:
    """Shares · values, where 0·NaN of a hidden key is 0."""
    sound = torch.isfinite(values)
    # Elsewhere than on a CPU the question would make the host wait for the device.
    if values.device.type == "cpu" and bool(sound.all()):
        return torch.matmul(shares, values)
    result = torch.matmul(shares, torch.where(sound, values, 0))
    meets = torch.ones_like(shares) if visible is None else visible.to(shares.dtype)
    for bad, entries in (
        (math.nan, torch.isnan(values)),
        (math.inf, values == math.inf),
        (-math.inf, values == -math.inf),
    ):
        hits = torch.matmul(meets, entries.to(shares.dtype)) > 0
        result = result + torch.where(hits, bad, 0.0)
    return result


def kept(call: Call, tile: Tile, keys: Tensor) -> Tensor | None:
    """Which weights of a tile dropout keeps; None when it is off."""
    if not call.dropout_p or call.seed is None:
        return None
    _, heads, queries, _ = call.q.shape
    b, h, i = (
        torch.arange(s.start, s.stop, device=keys.device) for s in (tile.batch, query_heads(call, tile), tile.rows)
    )
    rows = (b[:, None, None] % call.period * heads + h[:, None]) * queries + i
    rows = split(rows, 1, tile_shape(call, tile)[1:3])[..., None]
    keep: Tensor = kept_signed(rows, keys, call.dropout_p, call.seed.to(keys.device))
    return keep
