"""Does LayerNorm or QK-norm replace √d_k?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import generator, sample_means

PAIRS = 256
"""Pairs of tokens that share one pair of matrices."""


def layer_norm(x: Any) -> Any:
    """Mean 0 and mean square 1 in every row, without gain and bias."""
    x = x - x.mean(-1, keepdims=True)
    return rms_norm(x)


def rms_norm(x: Any) -> Any:
    """Mean square 1 in every row, so length √d."""
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True))


def l2_norm(x: Any) -> Any:
    """Length 1 in every row."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


CASES = ("nothing", "LayerNorm of x", "RMS norm of q and k", "LayerNorm of q and k", "L2 norm of q and k")
"""What is normalised; the last three act after the projections."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `norms`."""

    d_k: tuple[int, ...] = knob((16, 32, 64, 128, 256, 512), "head widths", least=2, fewest=2)
    width: int = knob(256, "width of the tokens x", least=2)
    size: float = knob(1.0, "typical size of the components of x; tokens differ by a factor of e^±spread", least=1e-3)
    spread: float = knob(0.25, "standard deviation of the logarithm of a token's size", least=0)
    half_width: float = knob(0.02, "wanted half-width of a variance, as a share of what theory says", least=1e-3)
    tolerance: float = knob(0.07, "how near to theory counts as theory, as a share of it", least=1e-3)
    most: int = knob(2000, "pairs of matrices at the most for one width", least=2)


QUICK = Config(half_width=0.04, tolerance=0.15)


def run(config: Config, progress: Progress = silent) -> Result:
    """Project tokens with random matrices, normalise here or there, and take the variance of q·k."""
    variances: dict[str, list[Estimate]] = {case: [] for case in CASES}
    tops: dict[str, list[Estimate]] = {case: [] for case in CASES}
    evidence = []
    for i, d_k in enumerate(config.d_k):
        progress(f"q·k at d_k {d_k}", i, len(config.d_k))
        largest: dict[str, float] = dict.fromkeys(CASES, 0.0)
        ratios = sample_means(
            partial(_draw, config, d_k, largest),
            generator(config.seed, "norms", d_k),
            half_width=config.half_width,
            most=config.most,
        )
        for case, ratio in zip(CASES, ratios, strict=True):
            variances[case].append(ratio.times(expected(config, case, d_k)))
            tops[case].append(Estimate.exact(largest[case]))
            evidence.append(near(f"variance over theory, {case}, d_k {d_k}", ratio, 1, config.tolerance))
        for case in ("RMS norm of q and k", "LayerNorm of q and k"):
            top = Estimate.exact(largest[case] / d_k)
            evidence.append(Evidence(f"largest |q·k| over d_k, {case}, d_k {d_k}", top, 0.0, 1.0))
    slopes = {case: _slope(config.d_k, variances[case]) for case in CASES}
    if len(config.d_k) > 1:
        # The claim itself: a norm of x leaves the growth with d_k as it was.
        evidence.append(near("exponent of d_k, LayerNorm of x", slopes["LayerNorm of x"], 1, 0.1))
    aligned = [float(np.square(rms_norm(np.linspace(1, 2, d_k))).sum()) for d_k in config.d_k]
    scaled = [
        e.times(scale_for("sqrt_dk", d) ** 2) for d, e in zip(config.d_k, variances["LayerNorm of x"], strict=True)
    ]
    return Result(
        question="norms",
        config=config,
        summary="LayerNorm fixes the size of x, and with it that of the components of q and k, but not how many "
        f"there are: q·k has variance {variances['LayerNorm of x'][0]} at d_k {config.d_k[0]} and "
        f"{variances['LayerNorm of x'][-1]} at {config.d_k[-1]}. RMS norm or LayerNorm of q and k themselves leaves "
        "this growth, too, and adds a bound, |q·k| ≤ d_k. Both still want √d_k. Only vectors of length 1 shrink the "
        f"variance, to 1/d_k ({variances['L2 norm of q and k'][-1]} at {config.d_k[-1]}), and those want a factor "
        "that makes the scores larger.",
        verdicts=(
            Verdict(
                claim=18,
                outcome=judge(evidence),
                expected="variance d_k in spite of LayerNorm",
                measured=f"with LayerNorm of x the variance of q·k is {variances['LayerNorm of x'][0]} at d_k "
                f"{config.d_k[0]} and {variances['LayerNorm of x'][-1]} at {config.d_k[-1]}; divided by √d_k "
                f"{scaled[0]} and {scaled[-1]}",
                reason="A norm sets the size of components; q·k is a sum of d_k products of them, and the number of "
                "terms is what √d_k answers. QK-norm with unit gain bounds the sum by d_k and leaves its variance.",
                evidence=tuple(evidence),
            ),
        ),
        tables=(
            Table(
                title="Variance of q·k, by what is normalised",
                columns=("d_k", *CASES),
                rows=tuple((d_k, *(variances[case][i] for case in CASES)) for i, d_k in enumerate(config.d_k)),
                note=f"Tokens of width {config.width}, components normal with standard deviation {config.size:g} "
                f"times a factor of each token's own, e^N(0, {config.spread:g}²). W of variance 1/{config.width}.",
            ),
            Table(
                title="What theory says, and the exponent with which the variance grows",
                columns=("normalised", "variance", "exponent of d_k", "bound of |q·k|"),
                rows=(
                    ("nothing", "d_k · (mean square of x)²", slopes["nothing"], "none"),
                    ("LayerNorm of x", "d_k", slopes["LayerNorm of x"], "none but that of W"),
                    ("RMS norm of q and k", "d_k", slopes["RMS norm of q and k"], "d_k"),
                    ("LayerNorm of q and k", "d_k · d_k/(d_k − 1)", slopes["LayerNorm of q and k"], "d_k"),
                    ("L2 norm of q and k", "1/d_k", slopes["L2 norm of q and k"], "1"),
                ),
                note="LayerNorm takes one direction away, so that √d_k long vectors share d_k − 1 of them.",
            ),
            Table(
                title="Largest |q·k|",
                columns=("d_k", "two equal vectors, RMS norm", *(f"seen, {case}" for case in CASES)),
                rows=tuple((d, aligned[i], *(tops[case][i].value for case in CASES)) for i, d in enumerate(config.d_k)),
                note="Seen: among all random pairs of this run.",
            ),
        ),
        panels=(
            Panel(
                title="Only L2 normalisation stops the variance of q·k from growing with d_k",
                x_label="d_k (components)",
                y_label="variance of q·k",
                x_scale="log2",
                y_scale="log10",
                series=tuple(Series.of(case, config.d_k, variances[case]) for case in CASES),
                references=(("1", 1.0),),
            ),
        ),
    )


def expected(config: Config, case: str, d_k: int) -> float:
    """The variance of q·k that theory gives."""
    # The squares of a token's size are lognormal: E[e^(2N)] is e^(2·spread²), and q and k each bring one.
    square = (config.size**2 * math.exp(2 * config.spread**2)) ** 2
    return {
        "nothing": d_k * square,
        "LayerNorm of x": float(d_k),
        "RMS norm of q and k": float(d_k),
        "LayerNorm of q and k": d_k**2 / (d_k - 1),
        "L2 norm of q and k": 1 / d_k,
    }[case]


def _draw(config: Config, d_k: int, largest: dict[str, float], rng: np.random.Generator) -> list[float]:
    """The mean square of q·k over theory, in each case, of one pair of matrices."""
    x = rng.standard_normal((2, PAIRS, config.width), dtype=np.float32) * np.float32(config.size)
    x *= np.exp(config.spread * rng.standard_normal((2, PAIRS, 1), dtype=np.float32))
    w = rng.standard_normal((2, config.width, d_k), dtype=np.float32) / np.float32(math.sqrt(config.width))
    plain = x @ w
    vectors = {
        "nothing": plain,
        "LayerNorm of x": layer_norm(x) @ w,
        "RMS norm of q and k": rms_norm(plain),
        "LayerNorm of q and k": layer_norm(plain),
        "L2 norm of q and k": l2_norm(plain),
    }
    means = []
    for case in CASES:
        scores = np.einsum("nd,nd->n", *vectors[case], dtype=np.float64)
        largest[case] = max(largest[case], float(np.abs(scores).max()))
        means.append(float(np.square(scores).mean()) / expected(config, case, d_k))
    return means


def _slope(widths: tuple[int, ...], variances: list[Estimate]) -> Estimate:
    """The exponent of d_k between the ends, with the intervals of both."""
    if len(widths) < 2:
        return Estimate.exact(math.nan)
    first, last, octave = variances[0], variances[-1], math.log(widths[-1] / widths[0])
    half = (first.half_width / first.value + last.half_width / last.value) / abs(octave)
    slope = math.log(last.value / first.value) / octave
    return Estimate(slope, slope - half, slope + half, min(first.count, last.count))
