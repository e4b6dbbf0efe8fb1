"""Attention of independent normal q and k, sampled: what the questions about collapse, rules and heads share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._attend import read
from ._result import Estimate
from ._statistics import generator, sample_means

HEADS = 2
"""Heads in one batch: enough to spread the cost of a call, few enough that batches stay many."""


def sample_readings(
    names: Sequence[str],
    scales: Sequence[float],
    *,
    seed: int,
    d_k: int,
    keys: int,
    half_width: float,
    most: int,
) -> list[dict[str, Estimate]]:
    """Means of Reading fields for normal q and k, a dictionary for each scale; all scales see the same q and k.

    `score_variance` is the square of score_std, freed of its bias.
    """

    def draw(rng: np.random.Generator) -> Any:
        q, k = rng.standard_normal((2, HEADS, keys, d_k), dtype=np.float32)
        readings = [read(q, k, scale=scale) for scale in scales]
        return [_mean(reading, name) for reading in readings for name in names]

    estimates = iter(
        sample_means(
            draw,
            generator(seed, "readings", d_k, keys),
            half_width=half_width,
            most=most,
        )
    )
    return [{name: next(estimates) for name in names} for _ in scales]


def _mean(reading: Any, name: str) -> Any:
    if name == "score_variance":
        # A row's deviations are from its own mean over n keys, which takes 1/n off their square.
        n = reading.visible_keys
        return np.mean(np.square(reading.score_std, dtype=np.float64) * n / (n - 1))
    return np.mean(getattr(reading, name), dtype=np.float64)
