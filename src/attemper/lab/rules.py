"""√d_k, d_k or √d_model: what does each divisor leave of the scores?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._scores import sample_readings

NAMES = {"unscaled": "none", "sqrt_dk": "√d_k", "sqrt_dmodel": "√d_model", "dk": "d_k"}
FIELDS = ("score_variance", "normalized_entropy", "largest_weight")
GPT3 = (12288, 96)
"""Width and heads of the example in claim 4."""
FLAT = 0.99
"""Of the largest entropy: a head that looks at everything alike."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `rules`."""

    d_k: tuple[int, ...] = knob((16, 64, 128, 256), "head widths", least=2)
    heads: int = knob(12, "heads of the model: d_model = heads · d_k", least=2)
    keys: int = knob(128, "keys, and queries", least=2)
    half_width: float = knob(0.003, "wanted half-width of every mean", least=1e-5)
    most: int = knob(1000, "batches at the most", least=2)


QUICK = Config(half_width=0.005, d_k=(16, 64, 128))


def run(config: Config, progress: Progress = silent) -> Result:
    """Sample attention under each divisor."""
    found: dict[str, list[dict[str, Estimate]]] = {rule: [] for rule in NAMES}
    for done, d_k in enumerate(config.d_k):
        progress(f"rules at d_k {d_k}", done, len(config.d_k))
        scales = [scale_for(rule, d_k, model_dim=config.heads * d_k) for rule in NAMES]
        # The variance of unscaled scores is d_k, and the wanted width a share of it.
        readings = sample_readings(
            FIELDS,
            scales,
            seed=config.seed,
            d_k=d_k,
            keys=config.keys,
            half_width=config.half_width * d_k,
            most=config.most,
        )
        for rule, reading in zip(NAMES, readings, strict=True):
            found[rule].append(reading)
    return Result(
        question="rules",
        config=config,
        summary=f"√d_k leaves scores of variance 1. In a model of {config.heads} heads √d_model shrinks them "
        f"√{config.heads} times too much, and d_k shrinks them √d_k times too much: attention over {config.keys} keys "
        f"is then flat ({found['dk'][-1]['normalized_entropy']} of the largest entropy at d_k {config.d_k[-1]}). "
        "All this is of independent q and k; the question `correlation` shows the case for d_k.",
        verdicts=(_crushed(config, found), _wrong_dimension(config, found)),
        tables=(
            Table(
                title="What each divisor leaves",
                columns=("d_k", "divisor", "scale", "variance of the scores", "entropy / ln n", "largest weight"),
                rows=tuple(
                    (
                        d_k,
                        NAMES[rule],
                        scale_for(rule, d_k, model_dim=config.heads * d_k),
                        *(found[rule][i][name] for name in FIELDS),
                    )
                    for i, d_k in enumerate(config.d_k)
                    for rule in NAMES
                ),
                note=f"d_model = {config.heads} · d_k; {config.keys} keys.",
            ),
        ),
        panels=(
            Panel(
                title="Only √d_k keeps the variance of the scores at 1",
                x_label="d_k (components)",
                y_label="variance of the scores",
                x_scale="log2",
                y_scale="log10",
                series=tuple(
                    Series.of(f"divisor {NAMES[rule]}", config.d_k, [one["score_variance"] for one in found[rule]])
                    for rule in NAMES
                ),
                references=(("1", 1.0),),
            ),
            Panel(
                title="d_k and √d_model leave attention flat",
                x_label="d_k (components)",
                y_label="entropy / ln n (1: all keys alike)",
                x_scale="log2",
                series=tuple(
                    Series.of(f"divisor {NAMES[rule]}", config.d_k, [one["normalized_entropy"] for one in found[rule]])
                    for rule in NAMES
                ),
            ),
        ),
    )


def _crushed(config: Config, found: dict[str, list[dict[str, Estimate]]]) -> Verdict:
    evidence = tuple(
        near(f"variance times d_k, d_k {d}", one["score_variance"].times(d), 1, 0.05)
        for d, one in zip(config.d_k, found["dk"], strict=True)
    ) + tuple(
        Evidence(f"entropy / ln n, d_k {d}", one["normalized_entropy"], FLAT, 1.0)
        for d, one in zip(config.d_k, found["dk"], strict=True)
    )
    outcome = judge(evidence)
    last = found["dk"][-1]
    return Verdict(
        claim=3,
        outcome=outcome,
        conditional=True,
        expected="variance 1/d_k, flat attention",
        measured=f"variance times d_k {last['score_variance'].times(config.d_k[-1])}, entropy "
        f"{last['normalized_entropy']} of its largest, largest weight {last['largest_weight']} at d_k {config.d_k[-1]}",
        reason="It holds if q and k are independent, as at the start of training. Once training has made them alike, "
        "q·k grows like d_k and not like √d_k, and 1/d_k is what keeps it (the question `correlation`).",
        evidence=evidence,
    )


def _wrong_dimension(config: Config, found: dict[str, list[dict[str, Estimate]]]) -> Verdict:
    width, heads = GPT3
    d_k = width // heads
    ratio = scale_for("sqrt_dk", d_k) / scale_for("sqrt_dmodel", d_k, model_dim=width)
    evidence = (
        Evidence(f"head width of {width} in {heads} heads", Estimate.exact(d_k), 128, 128),
        near(f"√{width} over √{d_k}", Estimate.exact(ratio), math.sqrt(heads), 1e-9),
        *(
            near(f"variance times {config.heads} heads, d_k {d}", one["score_variance"].times(config.heads), 1, 0.05)
            for d, one in zip(config.d_k, found["sqrt_dmodel"], strict=True)
        ),
    )
    outcome = judge(evidence)
    return Verdict(
        claim=4,
        outcome=outcome,
        conditional=True,
        expected="variance other than 1, too much or too little",
        measured=f"GPT-3: {width}/{heads} = {d_k}, scores {ratio:.2f} times too small; with {config.heads} heads the "
        f"variance is {found['sqrt_dmodel'][-1]['score_variance']}, where 1/{config.heads} is {1 / config.heads:.4f}",
        reason="It holds if “under-” is struck out: d_model is h times d_k, so √d_model only ever over-corrects, "
        "by √h, and is right with one head.",
        evidence=evidence,
    )
