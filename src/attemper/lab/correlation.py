"""What if training has made q and k alike? The case for dividing by d_k."""

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
from ._result import Estimate, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import generator, sample_means

RULES = {"sqrt_dk": "divided by √d_k", "dk": "divided by d_k"}


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `correlation`."""

    d_k: tuple[int, ...] = knob((16, 64, 256, 1024), "head widths", least=2, fewest=2)
    correlation: float = knob(0.5, "of a query's components with those of the key it looks for", least=0.01, largest=1)
    keys: int = knob(128, "keys; each query looks for one of them", least=2)
    half_width: float = knob(0.01, "wanted half-width of every mean", least=1e-5)
    most: int = knob(1000, "batches at the most", least=2)


QUICK = Config(half_width=0.03)


def run(config: Config, progress: Progress = silent) -> Result:
    """Give each query one key that resembles it, and follow that key's score and weight over the widths."""
    found: dict[str, list[list[Estimate]]] = {rule: [] for rule in RULES}
    for done, d_k in enumerate(config.d_k):
        progress(f"matching keys at d_k {d_k}", done, len(config.d_k))
        estimates = sample_means(
            partial(_draw, config, d_k),
            generator(config.seed, "correlation", d_k),
            half_width=config.half_width,
            most=config.most,
        )
        for i, rule in enumerate(RULES):
            found[rule].append(estimates[2 * i : 2 * i + 2])
    first, last = config.d_k[0], config.d_k[-1]
    growth = {rule: found[rule][-1][0].over(found[rule][0][0]) for rule in RULES}
    evidence = (
        near(f"matching score over that at d_k {first}, divided by d_k", growth["dk"], 1.0, 0.1),
        near(
            f"matching score over that at d_k {first}, divided by √d_k",
            growth["sqrt_dk"],
            math.sqrt(last / first),
            0.1 * math.sqrt(last / first),
        ),
    )
    outcome = judge(evidence)
    return Result(
        question="correlation",
        config=config,
        summary=f"Let each query resemble one key, with correlation {config.correlation} in every component. Their dot "
        f"product is then {config.correlation}·d_k on average: it grows like d_k and not like √d_k. Divided by √d_k it "
        f"goes from {found['sqrt_dk'][0][0]} at d_k {first} to {found['sqrt_dk'][-1][0]} at d_k {last}, and the weight "
        f"of the key from {found['sqrt_dk'][0][1]} to {found['sqrt_dk'][-1][1]}; divided by d_k it stays at "
        f"{found['dk'][-1][0]}. On this rests the case that μP makes: a multiplier tuned on a narrow model "
        "would fit a wide one under 1/d_k, at the price of a flat start. That is not tried here.",
        verdicts=(
            Verdict(
                claim=3,
                outcome=outcome,
                conditional=True,
                expected="1/d_k shrinks the scores too much",
                measured=f"from d_k {first} to {last} the score of the matching key grows {growth['dk']} times under "
                f"1/d_k and {growth['sqrt_dk']} times under 1/√d_k",
                reason="It holds if q and k are independent, as at the start. Of q and k that training has aligned it "
                "is the reverse: 1/d_k keeps their score the same at every width, and 1/√d_k lets it grow.",
                evidence=evidence,
            ),
        ),
        tables=(
            Table(
                title=f"The key that a query resembles, among {config.keys}",
                columns=("d_k", "scores", "score of that key", "weight of that key"),
                rows=tuple((d, RULES[rule], *found[rule][i]) for i, d in enumerate(config.d_k) for rule in RULES),
            ),
        ),
        panels=tuple(
            Panel(
                title=title,
                x_label="d_k (components)",
                y_label=label,
                x_scale="log2",
                series=tuple(Series.of(RULES[rule], config.d_k, [one[part] for one in found[rule]]) for rule in RULES),
            )
            for part, title, label in (
                (
                    0,
                    "Once q and k agree, only 1/d_k keeps their score the same at every width",
                    "score of the matching key",
                ),
                (1, "Under 1/√d_k wider heads become surer", "weight of the matching key"),
            )
        ),
    )


def _draw(config: Config, d_k: int, rng: np.random.Generator) -> Any:
    """Score and weight of the matching key under each rule, means over the queries of one batch."""
    k, noise = rng.standard_normal((2, config.keys, d_k), dtype=np.float32)
    q = np.float32(config.correlation) * k + np.float32(math.sqrt(max(0.0, 1 - config.correlation**2))) * noise
    product = np.einsum("nd,nd->n", q, k)
    numbers = []
    for rule in RULES:
        scale = scale_for(rule, d_k)
        # Query i looks for key i: the diagonal of the weights, taken as the output for unit values.
        weights = attend(q, k, np.eye(config.keys, dtype=np.float32), scale=scale).output
        numbers += [scale * product.mean(dtype=np.float64), np.diagonal(weights).mean(dtype=np.float64)]
    return numbers
