"""How large is q·k, and what does √d_k do to it?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import Moments, generator, mean_of, sample_variance

ENTRIES = ("normal", "rademacher", "uniform")
BATCH = 4096
TYPICAL = 64
"""The head width of the claims about typical values."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `variance`."""

    d_k: tuple[int, ...] = knob((1, 2, 8, 64, 128, 512), "head widths", least=1)
    entries: tuple[str, ...] = knob(
        ENTRIES, "distributions of the components, of mean 0 and variance 1", choices=ENTRIES
    )
    relative: float = knob(0.01, "wanted half-width of a variance, as a share of it", least=1e-4)
    tolerance: float = knob(0.05, "how near to d_k counts as d_k, as a share of it", least=1e-4)
    correlation: float = knob(0.3, "correlation of q with k where the claim fails", least=0, largest=1)
    mean: float = knob(0.5, "mean of the components where the claim fails", least=0)
    most: int = knob(400_000, "pairs at the most for one variance", least=1)


QUICK = Config(relative=0.015)


def run(config: Config, progress: Progress = silent) -> Result:
    """Sample q·k for each width and each distribution, then break the assumptions one at a time."""
    steps = len(config.d_k) * (len(config.entries) + len(_BROKEN)) + 1
    done = 0
    rows, evidence, scaled = [], [], []
    lines: dict[str, list[Estimate]] = {entries: [] for entries in config.entries}
    for d_k in config.d_k:
        for entries in config.entries:
            progress(f"q·k at d_k {d_k}, {entries}", done, steps)
            stream = generator(config.seed, "variance", entries, d_k)
            mean, variance = sample_variance(
                partial(_independent, entries, d_k),
                stream,
                relative=config.relative,
                most=config.most,
            )
            shrunk = variance.times(scale_for("sqrt_dk", d_k) ** 2)
            rows.append((d_k, entries, mean, variance, shrunk))
            evidence.append(
                near(f"variance over d_k, {entries}, d_k {d_k}", variance.times(1 / d_k), 1, config.tolerance)
            )
            scaled.append(near(f"scaled variance, {entries}, d_k {d_k}", shrunk, 1, config.tolerance))
            lines[entries].append(variance)
            done += 1
    broken_rows, broken, failing = _broken(config, progress, done, steps)
    progress("typical sizes", steps - 1, steps)
    typical, typical_table = _typical(config)
    outcome = judge(evidence)
    verdicts = (
        Verdict(
            claim=1,
            outcome=outcome,
            expected="variance d_k",
            measured=_range("variance/d_k", evidence),
            reason="The distribution of the components does not matter; the assumptions do. Where q and k are "
            "correlated, where some directions are wider than others, or where the mean is not 0, it fails as the "
            "second table shows.",
            evidence=(*evidence, *failing),
        ),
        Verdict(
            claim=2,
            outcome=judge(scaled),
            conditional=True,
            expected="variance 1 at every d_k",
            measured=_range("variance of q·k/√d_k", scaled),
            reason="It holds if the assumptions of the first claim do: a fixed divisor cancels only the growth "
            "that it was made for.",
            evidence=tuple(scaled),
        ),
        typical,
    )
    return Result(
        question="variance",
        config=config,
        summary=f"A dot product of d_k independent terms has variance d_k, whatever their distribution: "
        f"{_widths(config.d_k)} the ratio stays within {config.tolerance:.0%} of 1. "
        "Divided by √d_k the variance is 1. Correlation, unequal directions and a mean break this in ways that "
        "√d_k does not mend.",
        verdicts=verdicts,
        tables=(
            Table(
                title="The dot product of independent q and k",
                columns=("d_k", "components", "mean of q·k", "variance of q·k", "variance of q·k/√d_k"),
                rows=tuple(rows),
            ),
            Table(
                title="Where the assumptions fail",
                columns=("case", "d_k", "mean of q·k", "variance of q·k", "mean of q·k/√d_k", "variance of q·k/√d_k"),
                rows=tuple(broken_rows),
                note=f"Correlated: each component of k has correlation {config.correlation} with that of q. "
                "Anisotropic: component i has standard deviation ∝ 1/√i, with mean square 1. "
                f"Mean: every component has mean {config.mean} and variance 1.",
            ),
            typical_table,
        ),
        panels=(
            Panel(
                title="The variance of q·k is d_k; divided by √d_k it is 1",
                x_label="d_k (components)",
                y_label="variance of the score",
                x_scale="log2",
                y_scale="log10",
                series=(
                    *(Series.of(f"q·k, {entries}", config.d_k, line) for entries, line in lines.items()),
                    Series.of(
                        f"q·k/√d_k, {config.entries[0]}",
                        config.d_k,
                        [e.times(1 / d) for d, e in zip(config.d_k, lines[config.entries[0]], strict=True)],
                    ),
                    *(
                        Series.of(f"q·k, {case}", config.d_k, line)
                        for case, line in broken.items()
                        if case == "anisotropic"
                    ),
                ),
                references=(("1", 1.0),),
            ),
            Panel(
                title="With correlated q and k the mean of q·k/√d_k grows too, like √d_k",
                x_label="d_k (components)",
                y_label="mean of q·k/√d_k",
                x_scale="log2",
                series=tuple(
                    Series.of(case, config.d_k, [r[4] for r in broken_rows if r[0] == case]) for case in _BROKEN
                ),
                references=(("independent", 0.0),),
            ),
        ),
    )


def _dot(q: Any, k: Any) -> Any:
    return np.einsum("nd,nd->n", q, k)


_ENTRIES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, d: rng.standard_normal((_rows(d), d), dtype=np.float32),
    "rademacher": lambda rng, d: rng.integers(0, 2, (_rows(d), d), dtype=np.int8) * np.float32(2) - np.float32(1),
    "uniform": lambda rng, d: (rng.random((_rows(d), d), dtype=np.float32) * 2 - 1) * np.float32(math.sqrt(3)),
}


def _rows(d_k: int) -> int:
    """Pairs in one batch: what fits in a cache of a few megabytes."""
    return max(256, min(BATCH, 2**19 // d_k))


def _independent(entries: str, d: int, rng: np.random.Generator) -> Any:
    return _dot(_ENTRIES[entries](rng, d), _ENTRIES[entries](rng, d))


def _correlated(config: Config, d: int, rng: np.random.Generator) -> Any:
    q, noise = rng.standard_normal((2, _rows(d), d), dtype=np.float32)
    return _dot(q, config.correlation * q + math.sqrt(max(0.0, 1 - config.correlation**2)) * noise)


def _anisotropic(_: Config, d: int, rng: np.random.Generator) -> Any:
    spread = 1 / np.sqrt(np.arange(1, d + 1))
    spread *= math.sqrt(d / (spread**2).sum())
    q, k = rng.standard_normal((2, _rows(d), d), dtype=np.float32)
    return _dot(q * spread, k * spread)


def _shifted(config: Config, d: int, rng: np.random.Generator) -> Any:
    q, k = rng.standard_normal((2, _rows(d), d), dtype=np.float32)
    return _dot(q + config.mean, k + config.mean)


_BROKEN = {"correlated": _correlated, "anisotropic": _anisotropic, "mean": _shifted}


def _broken(
    config: Config, progress: Progress, done: int, steps: int
) -> tuple[list[tuple[Any, ...]], dict[str, list[Estimate]], list[Evidence]]:
    rows: list[tuple[Any, ...]] = []
    lines: dict[str, list[Estimate]] = {}
    evidence: list[Evidence] = []
    for case, draw in _BROKEN.items():
        lines[case] = []
        for d_k in config.d_k:
            progress(f"q·k at d_k {d_k}, {case}", done, steps)
            mean, variance = sample_variance(
                partial(draw, config, d_k),
                generator(config.seed, "variance", case, d_k),
                relative=config.relative,
                most=config.most,
            )
            scale = scale_for("sqrt_dk", d_k)
            rows.append((case, d_k, mean, variance, mean.times(scale), variance.times(scale**2)))
            lines[case].append(variance)
            done += 1
        # What theory says of the widest: the failure is of the size that it must have, and not an accident.
        d, mean, variance = config.d_k[-1], rows[-1][2], rows[-1][3]
        theory = {
            "correlated": ("mean over ρ·d_k", mean, config.correlation * d),
            "anisotropic": ("variance over Σσ⁴", variance, _fourth(d)),
            "mean": ("mean over μ²·d_k", mean, config.mean**2 * d),
        }[case]
        if theory[2]:
            evidence.append(
                near(f"{case}, d_k {d}: {theory[0]}", theory[1].times(1 / theory[2]), 1, 2 * config.tolerance)
            )
    return rows, lines, evidence


def _fourth(d: int) -> float:
    """Σσ_i⁴ of the anisotropic vectors: the variance of their dot product."""
    square = 1 / np.arange(1, d + 1)
    square *= d / square.sum()
    return float((square**2).sum())


def _typical(config: Config) -> tuple[Verdict, Table]:
    rng = generator(config.seed, "typical")
    scores = np.concatenate([_independent("normal", TYPICAL, rng) for _ in range(64)])
    moments = Moments.of(scores)
    spread, half = math.sqrt(moments.variance), float(moments.half_width_of_variance())
    std = Estimate(spread, spread - half / (2 * spread), spread + half / (2 * spread), moments.count)
    size = mean_of(np.abs(scores))
    beyond = {bound: mean_of(np.abs(scores) >= bound) for bound in (6, 7, 8, 9, 12, 16)}
    evidence = (
        near("standard deviation", std, math.sqrt(TYPICAL), 0.1),
        near("mean |q·k|", size, math.sqrt(2 * TYPICAL / math.pi), 0.1),
        Evidence("P(|q·k| ≥ 12)", beyond[12], 0.1, 1.0),
    )
    verdict = Verdict(
        claim=5,
        outcome=judge(evidence),
        expected="8, and 12 common",
        measured=f"standard deviation {std}, mean absolute {size}, P(|q·k| ≥ 12) {beyond[12]}",
        reason="8 is the standard deviation; the mean size is 8·√(2/π) ≈ 6.4. Two scores in fifteen are 12 or more "
        "away from 0, so in a row of even 20 keys such a score is the rule.",
        evidence=evidence,
    )
    table = Table(
        title=f"How large |q·k| is at d_k = {TYPICAL}, normal components",
        columns=("bound", "share of scores at or beyond it", "of a normal of the same variance"),
        rows=tuple((b, share, math.erfc(b / math.sqrt(2 * TYPICAL))) for b, share in beyond.items()),
    )
    return verdict, table


def _widths(d_k: tuple[int, ...]) -> str:
    return f"from {d_k[0]} to {d_k[-1]} components" if len(d_k) > 1 else f"at {d_k[0]} components"


def _range(name: str, evidence: list[Evidence]) -> str:
    values = [one.estimate.value for one in evidence]
    widest = max(one.estimate.half_width for one in evidence)
    return f"{name} between {min(values):.3f} and {max(values):.3f}, each ± {widest:.3f} or less"
