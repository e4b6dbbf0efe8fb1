"""The output and the Reading: tiles of keys merged into the State of each query row, as `attemper._state` has it."""

from __future__ import annotations

from typing import Any

from numba import float32, float64, int64, uint32

from . import _slots as slot
from ._compile import kernel
from ._dropout import drop
from ._elements import item_size, pack_pairs, pack_rows
from ._few import FEW, MANY, scores_of_many, thin_rows_of, thin_values_of, values_of_many, visit_thin
from ._finish import finish, leave, partial_at, take_up
from ._mask import dress, hide
from ._panel import BYTES, clear_rows, lay_mask, open_panel, panel_at, room_at, seen_of, tile_counts
from ._simd import as_indices, at, count_up, lanes, load, per_cell, pointer, pointer_as, spread_as, store
from ._slots import CLEAR, KEEP, LEFT, LIMITS, MAXIMUM, PARTS, TILE_COUNT, TILE_MAX, TILE_SUM
from ._target import COLUMNS, KEY_TILE, PANELS
from ._tile import KEYS_AT_ONCE
from ._weights import first_scores, merge_moments, renew, weigh_all, weigh_only, weigh_visible


@kernel
def visit(
    d: Any, f: Any, room: Any, panel: Any, batch: int, head: int, tile: int, stop: int, k: Any, k_stride: int, v: Any,
    v_stride: int,
    mode: Any,
) -> None:  # fmt: skip
    """Take the keys of one tile up into the State of a panel."""
    width, state, index, scores = panel.width, panel.state, panel.bounds, room.scores
    cell = per_cell(k)
    first, last, clear, clear_stop = seen_of(panel, tile, stop)
    if first >= last:
        return
    if d[slot.THIN] and not d[slot.GENERAL] and d[slot.THRESHOLD] == 0:
        visit_thin(d, room, panel, tile, stop, k, k_stride, v, v_stride, mode)
        return
    first -= (first - tile) % cell
    for left in range(0, width, lanes(state)):
        store(state, TILE_MAX * width + left, load(state, MAXIMUM * width + left))
        store(state, TILE_SUM * width + left, spread_as(state, 0))
        store(state, TILE_COUNT * width + left, spread_as(state, 0))
    general, masked = d[slot.GENERAL] != 0, d[slot.MASK] != 0
    if masked:
        lay_mask(d, room, panel, batch, head, first, last)
    hidden = general
    thin = d[slot.THIN] != 0
    if thin:
        thin_rows_of(d, room, panel, k, k_stride, first, last, tile, mode)
    for j in range(first, last, KEYS_AT_ONCE):
        present = min(KEYS_AT_ONCE, last - j)
        here = at(scores, (j - first) * width)
        plain = not general and not thin and clear <= j and j + KEYS_AT_ONCE <= clear_stop
        if not thin:
            # Where something is hidden, maximum and sum are of what is left, and those of the product are not used.
            sums = at(state, TILE_MAX * width) if plain else at(room.corner, 0)
            own = at(k, (j - tile) * k_stride)
            scores_of_many(panel.columns, panel.turned, own, k_stride, d[slot.DEPTH] // cell, present, here, sums, mode)
        if general:
            bias = at(room.bias, (j - first) * width)
            dress(here, width, j, present, state, index, f[slot.SOFTCAP], bias, masked, here, False)
        elif not plain:
            hide(here, width, j, present, state, index)
            hidden = True
    if not general:
        tile_counts(state, index, width, first, last)
        if int64(index[LIMITS * width + CLEAR]) >= first:
            first_scores(scores, width, panel.n, first, last, state, index)
    renew(state, width)
    rows = (last - first + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
    if not d[slot.MEASURE]:
        weigh_only(scores, room.weights, width, rows, state)
    elif hidden:
        weigh_visible(scores, room.weights, width, rows, state)
    else:
        weigh_all(scores, room.weights, width, rows, state)
    merge_moments(state, width)
    if d[slot.VALUE_DEPTH] >= 0:
        if d[slot.THRESHOLD] != 0:
            drop(room.weights, width, first, last, index, d[slot.THRESHOLD])
        if thin:
            thin_values_of(d, room, panel, v, v_stride, first, last, tile, mode)
            return
        some = (last - first + cell - 1) // cell
        keep = at(state, KEEP * width)
        for i in range(0, d[slot.VALUE_DEPTH], KEYS_AT_ONCE):
            here = at(v, (first - tile) // cell * v_stride + i)
            values_of_many(panel.columns, room.weights, here, v_stride, some, at(panel.out, i * width), keep, mode)


@kernel
def forward_task(d: Any, f: Any, task: int, scratch: int, like: Any, cells: Any, mode: Any) -> None:
    """All keys, or one split of them, for one block of rows.

    The rows of a stack of heads are numbered through; a block is some panels of them.
    """
    split, task = task % d[slot.SPLITS], task // d[slot.SPLITS]
    # The last rows see most when a mask is causal: they come first, so that no thread is left alone with a long one.
    block, unit = d[slot.BLOCKS] - 1 - task % d[slot.BLOCKS], task // d[slot.BLOCKS]
    stacks = d[slot.HEADS] // d[slot.STACK]
    batch, head = unit // stacks, unit % stacks * d[slot.STACK]
    whole = lanes(like) * COLUMNS
    begin = block * PANELS * whole
    rows = min(PANELS * whole, d[slot.STACK] * d[slot.QUERIES] - begin)
    panels = (rows + whole - 1) // whole
    depth, value_depth = d[slot.DEPTH], max(d[slot.VALUE_DEPTH], 0)
    room = room_at(scratch, depth, value_depth, like, cells)
    low, high = d[slot.KEYS], 0
    for p in range(panels):
        panel = panel_at(room, begin, rows, p, depth, value_depth, like, cells)
        own_low, own_high = open_panel(d, room, panel, batch, head, like)
        low, high = min(low, own_low), max(high, own_high)
        clear_rows(panel.out, value_depth, panel.width)
        if d[slot.THIN]:
            # The rows as they were, for vectors along them.
            deep = (depth + lanes(like) - 1) // lanes(like) * lanes(like)
            for r in range(panel.n):
                for i in range(deep):
                    room.thin[r * deep + i] = panel.turned[i * panel.width + r]
    share = (high - low + d[slot.SPLITS] - 1) // d[slot.SPLITS]
    low = low + split * share
    high = min(high, low + share)

    kind, item = d[slot.KIND], item_size(d[slot.KIND])
    kv_head = head // d[slot.GROUP]
    k_base = d[slot.K] + (batch * d[slot.K_BATCH] + kv_head * d[slot.K_HEAD]) * item
    v_base = d[slot.V] + (batch * d[slot.V_BATCH] + kv_head * d[slot.V_HEAD]) * item
    cell = per_cell(cells)
    own_kind = item == BYTES // lanes(like)
    # In whole vectors where they go along the components, else in as many as are taken at once.
    unit = lanes(like) if d[slot.THIN] else KEYS_AT_ONCE
    k_wide = (depth + unit - 1) // unit * unit if d[slot.THIN] else depth
    v_wide = (value_depth + unit - 1) // unit * unit
    # Once where nobody sees a key too: what such rows have to say is written all the same.
    for tile in range(low, max(high, low + 1), KEY_TILE):
        stop = min(tile + KEY_TILE, high)
        k_place, v_place = k_base + tile * d[slot.K_ROW] * item, v_base + tile * d[slot.V_ROW] * item
        k, k_stride = pointer_as(cells, k_place), d[slot.K_ROW] // cell
        if cell == 1 and not (own_kind and d[slot.K_INNER] == 1 and k_wide == depth):
            k, k_stride = room.keys, k_wide
            pack_rows(k, k_wide, k_place, d[slot.K_ROW], d[slot.K_INNER], kind, stop - tile, depth, k_wide)
        v, v_stride = pointer_as(cells, v_place), d[slot.V_ROW]
        if value_depth > 0 and cell == 2:
            v, v_stride = room.values, v_wide
            pack_pairs(v, v_wide, v_place, d[slot.V_ROW], stop - tile, value_depth)
        elif value_depth > 0 and not (own_kind and d[slot.V_INNER] == 1 and v_wide == value_depth):
            v, v_stride = room.values, v_wide
            pack_rows(v, v_wide, v_place, d[slot.V_ROW], d[slot.V_INNER], kind, stop - tile, value_depth, v_wide)
        for p in range(panels):
            panel = panel_at(room, begin, rows, p, depth, value_depth, like, cells)
            visit(d, f, room, panel, batch, head, tile, stop, k, k_stride, v, v_stride, mode)
            # Not all panels in a row at the end: so much to be written at a time would have to wait.
            if stop == high and d[slot.SPLITS] == 1:
                finish(d, f, room, panel, batch, head)
            elif stop == high:
                leave(d, panel, task, p, split)


@kernel
def merge_task(d: Any, f: Any, task: int, scratch: int, like: Any, cells: Any, mode: Any) -> None:
    """Merge the splits of a block of rows, and finish it."""
    block, unit = d[slot.BLOCKS] - 1 - task % d[slot.BLOCKS], task // d[slot.BLOCKS]
    stacks = d[slot.HEADS] // d[slot.STACK]
    batch, head = unit // stacks, unit % stacks * d[slot.STACK]
    step = lanes(like)
    whole = step * COLUMNS
    begin = block * PANELS * whole
    rows = min(PANELS * whole, d[slot.STACK] * d[slot.QUERIES] - begin)
    depth, value_depth = d[slot.DEPTH], max(d[slot.VALUE_DEPTH], 0)
    room = room_at(scratch, depth, value_depth, like, cells)
    for p in range((rows + whole - 1) // whole):
        panel = panel_at(room, begin, rows, p, depth, value_depth, like, cells)
        width = panel.width
        for split in range(d[slot.SPLITS]):
            other = partial_at(d, like, task, p, split)
            if split == 0:
                bounds = as_indices(at(other, PARTS * width))
                for i in range(0, PARTS * width, step):
                    store(panel.state, i, load(other, i))
                for i in range(0, (LEFT - PARTS) * width, step):
                    store(panel.bounds, i, load(bounds, i))
                for i in range(0, value_depth * width, step):
                    store(panel.out, i, load(other, LEFT * width + i))
            else:
                take_up(panel.state, panel.out, other, width, value_depth)
        finish(d, f, room, panel, batch, head)


# Entries. A worker takes tasks until there are none left.


def _entry(task: Any, kind: Any, cell: Any, mode: Any = MANY) -> Any:
    @kernel
    def work(address: int) -> None:
        d, f = pointer(address, int64), pointer(address, float64)
        worker = count_up(d, slot.WORKER)
        if worker >= d[slot.ROOMS]:
            return
        scratch = d[slot.SCRATCH] + worker * d[slot.SCRATCH_BYTES]
        number = count_up(d, slot.TASK)
        while number < d[slot.TASKS]:
            task(d, f, number, scratch, pointer(0, kind), pointer(0, cell), pointer(0, mode))
            number = count_up(d, slot.TASK)

    return work


forward_f32, forward_f64 = _entry(forward_task, float32, float32), _entry(forward_task, float64, float64)
forward_bf16 = _entry(forward_task, float32, uint32)
thin_f32, thin_f64 = _entry(forward_task, float32, float32, FEW), _entry(forward_task, float64, float64, FEW)
merge_f32, merge_f64 = _entry(merge_task, float32, float32), _entry(merge_task, float64, float64)
