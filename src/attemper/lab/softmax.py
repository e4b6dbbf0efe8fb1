"""What does softmax make of a few numbers? The worked examples of the claims, computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._attend import attend
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob

DOTS = (
    ((1, -1), (1, 1), 0),
    ((2, -1), (1, 3), -1),
    ((1, -1, 1, -1), (1, 1, 1, 1), 0),
    ((2, -1, 2, -1), (1, 2, 1, 2), 0),
)
"""Claim 6: q, k, and what q·k is said to be."""

STATED = {
    7: ((25, 2, -3), ("1", "0", "0"), "one weight of nearly 1"),
    8: ((12, 2, -1), ("0.99995", "0.00004", "0.00001"), "0.99995, 0.00004, 0.00001"),
    9: ((1.5, 0.25, -0.125), ("0.59", "0.17", "0.24"), "0.59, 0.17, 0.24"),
    10: ((4, 0), ("1", "0"), "one weight of nearly 1"),
}
"""The scores of a claim, the weights it states as written, and those in words."""

ONE_SIDED = 0.95
"""The largest weight from which a softmax is called one-sided here; a claim that says so gives no number."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `softmax`."""

    d_k: int = knob(64, "the head width whose root divides the scores of claim 8", least=1)


QUICK = Config()


def run(config: Config, progress: Progress = silent) -> Result:
    """Compute what the claims state."""
    progress("softmax by hand", 0, 1)
    dots = [(q, k, stated, float(np.dot(q, k))) for q, k, stated in DOTS]
    weights = {claim: softmax(scores) for claim, (scores, _, _) in STATED.items()}
    scores = STATED[8][0]
    divided = softmax([s * scale_for("sqrt_dk", config.d_k) for s in scores])
    rows = [
        (claim, _listed(scores), said, ", ".join(_signed(float(f"{w:.3g}")) for w in weights[claim]))
        for claim, (scores, _, said) in STATED.items()
    ]
    names = tuple(f"score {_signed(s)}" for s in scores)
    return Result(
        question="softmax",
        config=config,
        summary="Softmax turns differences of scores into ratios of weights: a difference of 1 is a factor e, a "
        f"difference of 10 a factor of {math.exp(10):,.0f}. Of {_listed(scores)} it leaves one key; of the same scores "
        f"divided by √{config.d_k} it leaves {divided[0]:.3f}, {divided[1]:.3f} and {divided[2]:.3f}, in the order of "
        "the scores: a smaller score never gets a larger weight.",
        verdicts=(_dots(dots), *(_verdict(claim, weights[claim]) for claim in STATED)),
        tables=(
            Table(
                title="Dot products, term by term",
                columns=("q", "k", "terms", "q·k", "stated"),
                rows=tuple(
                    (_listed(q), _listed(k), " + ".join(_signed(a * b) for a, b in zip(q, k, strict=True)), dot, stated)
                    for q, k, stated, dot in dots
                ),
            ),
            Table(
                title="Softmax, stated and computed",
                columns=("claim", "scores", "stated", "computed"),
                rows=tuple(rows),
                note="Computed by attemper.attend in float64.",
            ),
        ),
        panels=(
            Panel(
                title=f"Divided by √{config.d_k}, the same scores leave a choice",
                x_label="key",
                y_label="attention weight",
                kind="bar",
                series=(
                    Series(name="as they are", x=names, y=tuple(weights[8])),
                    Series(name=f"divided by √{config.d_k}", x=names, y=tuple(divided)),
                    Series(name="what claim 9 states for them", x=names, y=tuple(map(float, STATED[9][1]))),
                ),
            ),
        ),
    )


def softmax(scores: Any) -> list[float]:
    """The weights that attention gives keys of these scores: one query of 1, keys that are the scores.

    >>> [round(weight, 3) for weight in softmax([1.5, 0.25, -0.125])]
    [0.674, 0.193, 0.133]
    """
    keys = np.asarray(scores, dtype=np.float64)[:, None]
    output = attend(np.ones((1, 1)), keys, np.eye(len(keys)), scale=1.0).output
    return [float(weight) for weight in output[0]]


def _dots(dots: list[tuple[Any, Any, int, float]]) -> Verdict:
    evidence = tuple(Evidence(f"{_listed(q)}·{_listed(k)}", Estimate.exact(dot), s, s) for q, k, s, dot in dots)
    return Verdict(
        claim=6,
        outcome=judge(evidence),
        expected=", ".join(_signed(stated) for _, _, stated, _ in dots),
        measured=", ".join(_signed(dot) for *_, dot in dots),
        reason="Exact arithmetic on whole numbers. That the longer pairs cancel to 0 is chance: it is the spread over "
        "many pairs that grows with the number of terms, not each value.",
        evidence=evidence,
    )


def _verdict(claim: int, weights: list[float]) -> Verdict:
    scores, written, said = STATED[claim]
    if "." in written[0]:
        # A number as written is right if the true one rounds to it.
        places = len(written[0].partition(".")[2])
        half = 0.5 * 10**-places
        evidence = tuple(
            Evidence(f"weight of score {_signed(s)}", Estimate.exact(w), float(text) - half, float(text) + half)
            for s, w, text in zip(scores, weights, written, strict=True)
        )
        right = ", ".join(f"{w:.{max(places + 2, 3)}f}" if places > 2 else f"{w:.3f}" for w in weights)
        wrong = [w for w, e in zip(weights, evidence, strict=True) if e.outcome() != "holds"]
        order = [float(text) for text in written]
        reason = " and ".join(f"{w:.{places + 2}f} rounds to {w:.{places}f}" for w in wrong) + "."
        if sorted(order, reverse=True) != order:
            reason += " The stated weights are not even in the order of the scores."
        if not wrong:
            reason = "Every stated weight is the computed one, rounded."
    else:
        evidence = (Evidence("largest weight", Estimate.exact(max(weights)), ONE_SIDED, 1.0),)
        right = ", ".join(_signed(float(f"{w:.3g}")) for w in weights)
        gap = max(scores) - sorted(scores)[-2]
        reason = f"The next key has e^−{gap:g} = {_signed(float(f'{math.exp(-gap):.2g}'))} of the largest weight."
    return Verdict(
        claim=claim, outcome=judge(evidence), expected=said, measured=right, reason=reason, evidence=evidence
    )


def _signed(number: float) -> str:
    return f"{number:g}".replace("-", "−")


def _listed(numbers: Any) -> str:
    return f"[{', '.join(map(_signed, numbers))}]"
