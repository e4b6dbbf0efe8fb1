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
from .._vitals import Site, Vitals

COUNTS = ("rows", "rows_without_keys", "rows_with_one_key", "nonfinite")
GREATEST = ("max_logit", "max_qk")
MEANS = (
    "logsumexp",
    "expected_score",
    "entropy",
    "normalized_entropy",
    "largest_weight",
    "collision",
    "effective_keys",
    "flow",
    "score_mean",
    "score_std",
    "visible_keys",
    "first_key_weight",
    "sink_mass",
    "output_norm",
)
OF_ROWS = len(COUNTS) + len(GREATEST) + 1 + 2 * len(MEANS)
"""Lines in the table of a forward pass."""
OF_FLOW = 2
OF_PRESSURE = 3


def sum_rows(reading: Reading) -> Tensor:
    """(OF_ROWS, heads): counts, extremes, and of each mean the sum and the number of values behind it.

    Over the queries first, column by column: so a compiler makes one kernel of it that reads each number once.
    """
    visible: Any = reading.visible_keys
    wanted = (torch.ones_like(visible), visible == 0, visible == 1, reading.nonfinite)
    counts = [x.sum(-1) for x in wanted]  # type: ignore[union-attr]
    extremes = [getattr(reading, name) for name in GREATEST] + [-reading.normalized_entropy]  # type: ignore[operator]
    greatest = [x.masked_fill(torch.isnan(x), -torch.inf).amax(-1) for x in extremes]
    sums, numbers = zip(*(_sum_finite(getattr(reading, name), visible > 1) for name in MEANS), strict=True)
    return torch.cat(
        [_over_batch(counts), torch.stack(greatest).double().amax(1), _over_batch(sums), _over_batch(numbers)]
    )


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
    values: dict[str, Any] = {name: rows[i].astype(np.int64) for i, name in enumerate(COUNTS)}
    weights: dict[str, Any] = {}
    extremes = rows[len(COUNTS) :]
    values |= {name: extremes[i] for i, name in enumerate(GREATEST)}
    values["least_normalized_entropy"] = -extremes[len(GREATEST)]
    means = dict(zip(MEANS, extremes[len(GREATEST) + 1 :].reshape(2, len(MEANS), -1).swapaxes(0, 1), strict=True))
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
