"""Why do long sequences ask for ln n?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._attend import attend
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob
from ._statistics import generator, sample_means

RULES = {
    "fixed": "1/√d_k at every length",
    "root": "times √(ln n / ln n₀)",
    "log_n": "times ln n / ln n₀",
}
QUERIES = 8
"""In one batch, each with a key of its own to look for."""
LOST, KEPT = 0.25, 0.6
"""Shares of its weight at the first length below which a key counts as lost, and above which as kept."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `length`."""

    keys: tuple[int, ...] = knob((128, 512, 2048, 8192, 32768), "numbers of keys; the first is n₀", least=8, fewest=2)
    d_k: int = knob(64, "head width", least=2)
    margin: float = knob(5.0, "mean score of the key that the query looks for, divided by √d_k", least=0.1)
    spread: float = knob(0.5, "standard deviation of the other keys' scores, divided by √d_k", least=0.01)
    half_width: float = knob(0.01, "wanted half-width of every mean", least=1e-5)
    most: int = knob(200, "batches at the most", least=2)


QUICK = Config(keys=(128, 512, 2048, 8192), half_width=0.02)


def run(config: Config, progress: Progress = silent) -> Result:
    """Hide one key that the query looks for among ever more that it does not."""
    found: dict[str, list[list[Estimate]]] = {rule: [] for rule in RULES}
    for done, keys in enumerate(config.keys):
        progress(f"one key among {keys}", done, len(config.keys))
        estimates = sample_means(
            partial(_draw, config, keys),
            generator(config.seed, "length", keys),
            half_width=config.half_width,
            most=config.most,
        )
        for i, rule in enumerate(RULES):
            found[rule].append(estimates[2 * i : 2 * i + 2])
    first, last = config.keys[0], config.keys[-1]
    kept = {rule: found[rule][-1][0].over(found[rule][0][0]) for rule in RULES}
    evidence = (
        Evidence(f"weight at {last} over that at {first} keys, scale fixed", kept["fixed"], 0.0, LOST),
        Evidence(f"weight at {last} over that at {first} keys, scale times ln n", kept["log_n"], KEPT, math.inf),
    )
    return Result(
        question="length",
        config=config,
        summary=f"A key whose score stands {config.margin:g} above the rest gets {found['fixed'][0][0]} of the weight "
        f"among {first} keys and {found['fixed'][-1][0]} among {last}: every other key adds a little to the "
        "denominator, so the weight falls, in the end like 1/n. To keep it the margin has to grow like ln n, since "
        f"e^(m·ln n) = n^m. With the scale times ln n / ln {first} it is {found['log_n'][-1][0]}. This is about a key "
        "that stands out; of keys that differ by chance alone the rule is √(ln n), which keeps less of such a key.",
        verdicts=(
            Verdict(
                claim=None,
                outcome=judge(evidence),
                expected="with a fixed scale a long context dilutes attention; a scale that grows like ln n hardly "
                "does",
                measured=f"from {first} to {last} keys the weight goes to {kept['fixed']} of what it was with a fixed "
                f"scale, {kept['root']} with √(ln n) and {kept['log_n']} with ln n",
                reason="None of the claims is about it, and it is a reason to look at n beside d_k: √d_k is made for "
                "the spread of one score and knows nothing of how many there are.",
                evidence=evidence,
            ),
        ),
        tables=(
            Table(
                title="One key that stands out, among n",
                columns=("keys n", "scale", "weight of that key", "effective keys 1/Σp², of n"),
                rows=tuple((n, RULES[rule], *found[rule][i]) for i, n in enumerate(config.keys) for rule in RULES),
                note=f"n₀ = {first}. Scores divided by √d_k: {config.margin:g} for that key, standard deviation "
                f"{config.spread:g} around 0 for the others.",
            ),
        ),
        panels=(
            Panel(
                title="A key that stands out is lost in a long sequence, unless the scale grows like ln n",
                x_label="keys n",
                y_label="weight of the key that stands out",
                x_scale="log2",
                series=tuple(Series.of(RULES[rule], config.keys, [one[0] for one in found[rule]]) for rule in RULES),
            ),
        ),
    )


def _draw(config: Config, keys: int, rng: np.random.Generator) -> Any:
    """Weight of the wanted key and effective keys under each rule, means over a few queries."""
    q = rng.standard_normal((QUERIES, config.d_k), dtype=np.float32)
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    q *= np.float32(math.sqrt(config.d_k))
    k = rng.standard_normal((keys, config.d_k), dtype=np.float32) * np.float32(config.spread)
    # Query i looks for key i; with unit values the output is the weights of those keys.
    k[:QUERIES] += np.float32(config.margin / math.sqrt(config.d_k)) * q
    v = np.eye(keys, QUERIES, dtype=np.float32)
    stretch = math.log(keys) / math.log(config.keys[0])
    numbers = []
    for factor in (1.0, math.sqrt(stretch), stretch):
        output, reading = attend(q, k, v, scale=scale_for("sqrt_dk", config.d_k) * factor)
        numbers += [_mean(np.diagonal(output)), _mean(reading.effective_keys) / keys]
    return numbers


def _mean(values: Any) -> float:
    return float(np.mean(values, dtype=np.float64))
