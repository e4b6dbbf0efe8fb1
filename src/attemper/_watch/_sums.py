"""What the rows of a call sum up to per head, where they are: small tables that a GPU hands over, instead of rows.

The same sums as `Vitals.of`, in operations that a compiler fuses, so that a graph can have them among its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def sum_rows(reading: Reading) -> Tensor:
    """(lines, heads): counts, of each mean the sum, of each the number of values behind it, and extremes.

    Over the queries first, column by column: so a compiler makes one kernel of it that reads each number once.
    """
    visible: Any = reading.visible_keys
    counted: Any = (torch.ones_like(visible), visible == 0, visible == 1, reading.nonfinite)
    extremes: Any = (*(getattr(reading, name) for name in GREATEST), -reading.normalized_entropy)  # type: ignore[operator]
    greatest = [x.masked_fill(torch.isnan(x), -torch.inf).amax(-1) for x in extremes]
    sums, numbers = zip(*(_sum_finite(getattr(reading, name), visible > 1) for name in MEANS), strict=True)
    added = _over_batch([*(x.sum(-1) for x in counted), *sums, *numbers])
    return torch.cat([added, torch.stack(greatest).double().amax(1)])


def sum_flow(flow: Tensor, visible: Tensor) -> Tensor:
    """(OF_FLOW, heads): the sum of the gradient flow of rows with a choice, and how many there are."""
    return _over_batch(_sum_finite(flow, visible > 1))


def _sum_finite(x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    counted = torch.isfinite(x) & choice
    return torch.where(counted, x, 0).sum(-1), counted.sum(-1)


def _over_batch(columns: Sequence[Tensor]) -> Tensor:
    """Each (batch, heads), to (columns, heads)."""
    return torch.stack([x.double() for x in columns]).sum(1)


def sum_pressure(q: Tensor, grad: Tensor, entries: int) -> Tensor:
    """(OF_PRESSURE, heads + 1): mean, spread and number of the sequences' pressure; all heads together come last.

    `entries` of the batch make up a sequence.
    """
    # ⟨q, ∂L/∂q⟩ is the gradient to the log of the scale: q and the scale enter only as their product.
    each = (q.float() * grad.float()).sum((-2, -1)).double()
    each = each.unflatten(0, (-1, entries)).sum(1)
    # Times their number, as the loss is a mean over them.
    each = torch.cat([each, each.sum(1, keepdim=True)], 1) * each.shape[0]
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
