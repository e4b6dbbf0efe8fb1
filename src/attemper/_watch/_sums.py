"""What the rows of a call sum up to per head, where they are: small tables that a GPU hands over, instead of rows.

The same sums as `Vitals.of`, in operations that a compiler fuses, so that a graph can have them among its outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._reading import Reading
from .._vitals import Site, Vitals, field_table

_MERGED = {merge: tuple(name for name, _, how in field_table() if how == merge) for _, _, merge in field_table()}
COUNTS = _MERGED["sum"]
GREATEST = _MERGED["max"]
MEANS = tuple(name for name in _MERGED["mean over rows"] if name not in ("gradient_flow", "padding_weight"))
OF_FLOW = 2
OF_PRESSURE = 3
"""Lines in what is measured of a backward pass."""


PART = 128
"""Rows that are summed up first: of few heads too they make enough parts for all of a GPU, each within a warp."""


def sum_rows(reading: Reading) -> Tensor:
    """(lines, heads): counts, of each mean the sum, of each the number of values behind it, and extremes.

    For a GPU a compiler makes two kernels of it, over the rows and over their parts. It puts into one what reads
    something in common: so all lines ask which keys are visible, also those that could do without.
    """
    visible: Any = _in_parts(reading.visible_keys)

    def field(name: str) -> Any:
        return _in_parts(getattr(reading, name))

    counted = (visible >= 0, visible == 0, visible == 1, field("nonfinite"))
    extremes = (*(field(name) for name in GREATEST), -field("normalized_entropy"))
    greatest = [x.masked_fill(torch.isnan(x) | (visible == 0), -torch.inf).amax(-1) for x in extremes]
    sums, numbers = zip(*(_sum_finite(field(name), visible > 1) for name in MEANS), strict=True)
    wide = greatest[0].dtype
    added = [*(x.sum(-1, dtype=wide) for x in counted), *(x.to(wide) for x in sums), *(x.to(wide) for x in numbers)]
    lines = torch.stack([*added, *greatest]).double()
    line = torch.arange(len(lines), device=lines.device)[:, None]
    return torch.where(line < len(added), lines.sum((1, 3)), lines.amax((1, 3)))


def sum_flow(flow: Tensor, visible: Tensor) -> Tensor:
    """(OF_FLOW, heads): the sum of the gradient flow of rows with a choice, and how many there are."""
    return torch.stack(_sum_finite(_in_parts(flow), _in_parts(visible) > 1)).double().sum((1, 3))


def _sum_finite(x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    counted = torch.isfinite(x) & choice
    wide = x.dtype if x.is_floating_point() else torch.float32
    return torch.where(counted, x, 0).sum(-1, dtype=wide), counted.sum(-1, dtype=wide)


def _in_parts(x: Any, axis: int = -1) -> Any:
    """With the axis of rows in two, the parts and what is in them; one part, where they do not come out even."""
    rows = x.shape[axis]
    # A number that the compiler does not know is none here, and is not to become one.
    parts = rows // PART if isinstance(rows, int) and rows % PART == 0 else 1
    return x.unflatten(axis, (parts, -1))


def sum_pressure(q: Tensor, grad: Tensor, entries: int) -> Tensor:
    """(OF_PRESSURE, heads + 1): mean, spread and number of the sequences' pressure; all heads together come last.

    `entries` of the batch make up a sequence.
    """
    # ⟨q, ∂L/∂q⟩ is the gradient to the log of the scale: q and the scale enter only as their product.
    parts = _in_parts(q.float() * grad.float(), -2).sum((-2, -1)).double()
    head, line = (torch.arange(n, device=q.device) for n in (q.shape[1], q.shape[1] + 1))
    own = (line[:, None] == head) | (line[:, None] == q.shape[1])
    each = torch.where(own[:, None, :, None], parts.unflatten(0, (-1, 1, entries)), 0).sum((2, 3, 4))
    # Times their number, as the loss is a mean over them.
    each = each * each.shape[0]
    counted = torch.isfinite(each)
    number = counted.sum(0).double()
    mean = torch.where(counted, each, 0).sum(0) / number
    spread = (torch.where(counted, each - mean, 0) ** 2).sum(0)
    return torch.stack([mean, spread, number])


def vitals_of(site: Site, rows: Any, pressure: Any = None, flow: Any = None) -> Vitals:
    """The Vitals of one call, from its tables as NumPy arrays."""
    counts, sums, numbers, greatest = np.split(rows, np.cumsum((len(COUNTS), len(MEANS), len(MEANS))))
    values: dict[str, Any] = dict(zip(COUNTS, counts.astype(np.int64), strict=True))
    weights: dict[str, Any] = {}
    values |= dict(zip((*GREATEST, "least_normalized_entropy"), (*greatest[:-1], -greatest[-1]), strict=True))
    means: dict[str, Any] = dict(zip(MEANS, zip(sums, numbers, strict=True), strict=True))
    if flow is not None:
        means["gradient_flow"] = flow
    for name, (total, count) in means.items():
        weights[name] = count.astype(np.int64)
        values[name] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    if pressure is not None:
        for name, part in (("pressure", pressure[:, :-1]), ("total_pressure", pressure[:, -1:])):
            values[name], values[f"{name}_spread"] = part[0], part[1]
            weights[name] = part[2].astype(np.int64)
    return Vitals.of_sums(site, values, weights)
