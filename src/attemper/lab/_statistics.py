"""Means with intervals: moments that merge, Student's t, and sampling until an interval is narrow enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from .._progress import Progress
from ._result import Estimate

LEVEL = 0.95
FEWEST = 32
"""Batches before an interval may stop the sampling: fewer, and their spread is itself too uncertain to stop on."""


def student(degrees: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t, by the Cornish–Fisher expansion; within 0.5 % from 4 degrees on.

    >>> round(student(4), 2), round(student(9), 2), round(student(10**6), 2)
    (2.78, 2.26, 1.96)
    """
    if degrees < 1:
        return math.inf
    z = NormalDist().inv_cdf(0.5 + level / 2)
    v = float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


@dataclass(frozen=True)
class Moments:
    """Count, mean and the sums of the second, third and fourth powers of deviations; two of them merge exactly.

    Central sums never cancel, which sums of raw powers do once the mean outgrows the spread.

    >>> import numpy as np
    >>> both = Moments.of(np.array([1.0, 2.0])).merge(Moments.of(np.array([3.0, 4.0])))
    >>> float(both.mean), round(float(both.variance), 4)
    (2.5, 1.6667)
    """

    count: int
    mean: Any
    m2: Any
    m3: Any
    m4: Any

    @classmethod
    def of(cls, samples: Any) -> Moments:
        """The moments along the first axis."""
        x = np.asarray(samples, dtype=np.float64)
        mean = x.mean(axis=0)
        d = x - mean
        return cls(len(x), mean, (d**2).sum(axis=0), (d**3).sum(axis=0), (d**4).sum(axis=0))

    def merge(self, other: Moments) -> Moments:
        """The moments of both samples together (Pébay 2008, equations 2.1 and 3.1)."""
        a, b = self.count, other.count
        n = a + b
        d = other.mean - self.mean
        m2 = self.m2 + other.m2 + d**2 * (a * b / n)
        m3 = self.m3 + other.m3 + d**3 * (a * b * (a - b) / n**2) + 3 * d * (a * other.m2 - b * self.m2) / n
        m4 = (
            self.m4
            + other.m4
            + d**4 * (a * b * (a**2 - a * b + b**2) / n**3)
            + 6 * d**2 * (a**2 * other.m2 + b**2 * self.m2) / n**2
            + 4 * d * (a * other.m3 - b * self.m3) / n
        )
        return Moments(n, self.mean + d * (b / n), m2, m3, m4)

    @property
    def variance(self) -> Any:
        """The unbiased sample variance."""
        return self.m2 / (self.count - 1)

    def half_width_of_mean(self) -> Any:
        """Half of the interval of the mean, of independent samples."""
        return student(self.count - 1) * np.sqrt(self.variance / self.count)

    def half_width_of_variance(self) -> Any:
        """Half of the interval of the variance, of independent samples of any distribution with four moments."""
        fourth, second = self.m4 / self.count, self.m2 / self.count
        return student(self.count - 1) * np.sqrt(np.maximum(fourth - second**2, 0) / self.count)


def mean_of(samples: Any) -> Estimate:
    """The mean of independent samples, with its interval.

    >>> print(mean_of([1.0, 2.0, 3.0, 4.0, 5.0]))
    3.0 ± 2.0
    """
    moments = Moments.of(np.asarray(samples, dtype=np.float64))
    return _estimate(moments.mean, moments.half_width_of_mean(), moments.count)


def share_of(hits: int, total: int) -> Estimate:
    """A share of independent cases, with Wilson's interval, which does not shrink to nothing at 0 and 1.

    >>> print(share_of(0, 20))
    0.000 (0.000 to 0.161)
    """
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    share = hits / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    # Exactly 0 and 1 at the ends, where rounding would leave a trace.
    return Estimate(share, centre - half if hits else 0.0, centre + half if hits < total else 1.0, total)


def sample_means(
    draw: Callable[[np.random.Generator], Any],
    generator: np.random.Generator,
    *,
    half_width: float,
    most: int,
    fewest: int = FEWEST,
    progress: Progress | None = None,
    stage: str = "",
) -> list[Estimate]:
    """Means of what `draw` returns, drawn until every interval is `half_width` narrow, or `most` draws.

    A draw is one independent batch and returns a vector: a number for each thing measured. Rows inside a batch may
    depend on each other (they share keys); batches do not, and the interval is that of batches.
    """
    moments: Moments | None = None
    for done in range(1, most + 1):
        one = Moments.of(np.asarray(draw(generator), dtype=np.float64)[None])
        moments = one if moments is None else moments.merge(one)
        if progress is not None:
            progress(stage, done, most)
        if done >= fewest and np.all(moments.half_width_of_mean() <= half_width):
            break
    assert moments is not None
    half = moments.half_width_of_mean()
    return [_estimate(value, width, moments.count) for value, width in zip(moments.mean, half, strict=True)]


def sample_variance(
    draw: Callable[[np.random.Generator], Any],
    generator: np.random.Generator,
    *,
    relative: float,
    most: int,
) -> tuple[Estimate, Estimate]:
    """Mean and variance of independent samples, drawn until the variance is known to `relative` of itself."""
    moments: Moments | None = None
    while moments is None or moments.count < most:
        one = Moments.of(draw(generator))
        moments = one if moments is None else moments.merge(one)
        if moments.count >= FEWEST and moments.half_width_of_variance() <= relative * moments.variance:
            break
    return (
        _estimate(moments.mean, moments.half_width_of_mean(), moments.count),
        _estimate(moments.variance, moments.half_width_of_variance(), moments.count),
    )


def generator(seed: int, *names: object) -> np.random.Generator:
    """The stream of random numbers that `seed` and `names` stand for, the same on every machine."""
    return np.random.default_rng([seed, *(byte for name in names for byte in repr(name).encode())])


def _estimate(value: Any, half: Any, count: int) -> Estimate:
    return Estimate(float(value), float(value - half), float(value + half), count)
