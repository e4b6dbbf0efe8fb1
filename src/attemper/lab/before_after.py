"""Could one mend the weights after softmax instead of scaling the scores before it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._attend import trace
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import HOLDS, Evidence, Panel, Result, Series, Table, Verdict, judge, knob
from ._result import Config as Base
from ._statistics import generator, mean_of

TYPES = ("float16", "float32", "float64")
ROUNDING = 10
"""How many units of rounding of its type an error may have and still be rounding."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `before-after`."""

    d_k: tuple[int, ...] = knob((4, 16, 64, 256, 1024, 4096), "head widths", least=1)
    keys: int = knob(128, "keys, and queries", least=2)
    repeats: int = knob(8, "matrices for each width", least=2)


QUICK = Config()


def run(config: Config, progress: Progress = silent) -> Result:
    """Raise unscaled weights to the power 1/√d_k, renormalise, and compare with scaling before softmax."""
    rows, errors, lost = [], {}, {}
    for done, d_k in enumerate(config.d_k):
        progress(f"before and after, d_k {d_k}", done, len(config.d_k))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in TYPES}
        rng = generator(config.seed, "before-after", d_k)
        for _ in range(config.repeats):
            q, k = rng.standard_normal((2, config.keys, d_k))
            v = np.zeros((config.keys, 1))
            scaled = trace(q, k, v, scale="sqrt_dk").weights
            weights = trace(q, k, v, scale="unscaled").weights
            for name in TYPES:
                found[name].append(_mended(weights, scaled, name, scale_for("sqrt_dk", d_k)))
        for name in TYPES:
            error, vanished = (mean_of(part) for part in zip(*found[name], strict=True))
            errors[name, d_k], lost[name, d_k] = error, vanished
            rows.append((d_k, name, error, vanished))
    exact = [
        Evidence(f"error in float64, d_k {d}", errors["float64", d], 0.0, _rounding("float64")) for d in config.d_k
    ]
    widest = config.d_k[-1]
    fails = Evidence(f"error in float16, d_k {widest}", errors["float16", widest], _rounding("float16"), 1.0)
    equal = [e for e in exact if e.outcome() == HOLDS]
    outcome = judge((fails,))
    return Result(
        question="before-after",
        config=config,
        summary="A weight is e^score over a sum, so a power of the weights, renormalised, is a temperature: p^(1/√d_k) "
        "is softmax of the scores divided by √d_k. In exact arithmetic the order does not matter. A computer's "
        "smallest number makes it matter: a weight that softmax rounded to 0 stays 0 under every power, and unscaled "
        f"scores round {lost['float16', widest]} of the weights to 0 in float16 at d_k {widest}.",
        verdicts=(
            Verdict(
                claim=24,
                outcome=outcome,
                conditional=bool(equal),
                expected="no mending after softmax",
                measured=f"largest error of the mended weights at d_k {widest}: float16 {errors['float16', widest]}, "
                f"float32 {errors['float32', widest]}, float64 {errors['float64', widest]}",
                reason="It holds if weights have underflowed. Before that, a renormalised power after softmax equals a "
                f"temperature before it, to rounding: so in float64 at d_k {', '.join(_good(exact, config))}.",
                evidence=(*equal, fails),
            ),
        ),
        tables=(
            Table(
                title=f"Weights mended after softmax, {config.keys} keys",
                columns=("d_k", "number type", "largest error of a weight", "share of weights rounded to 0"),
                rows=tuple(rows),
                note="Unscaled weights in that type, to the power 1/√d_k in float64 and renormalised, against softmax "
                "of the scaled scores in float64.",
            ),
        ),
        panels=(
            Panel(
                title="A power after softmax equals a temperature before it, until weights round to 0",
                x_label="d_k (components)",
                y_label="largest error of a mended weight",
                x_scale="log2",
                y_scale="log10",
                series=tuple(Series.of(name, config.d_k, [errors[name, d] for d in config.d_k]) for name in TYPES),
            ),
        ),
    )


def _mended(weights: Any, scaled: Any, name: str, power: float) -> tuple[float, float]:
    """The largest error of the mended weights, and the share that the type has rounded to 0."""
    held = weights.astype(name).astype(np.float64)
    mended = held**power
    mended /= mended.sum(axis=-1, keepdims=True)
    return float(np.abs(mended - scaled).max()), float(np.mean(held == 0))


def _rounding(name: str) -> float:
    return float(ROUNDING * np.finfo(name).eps)


def _good(exact: list[Evidence], config: Config) -> list[str]:
    return [str(d) for d, one in zip(config.d_k, exact, strict=True) if one.outcome() == HOLDS]
