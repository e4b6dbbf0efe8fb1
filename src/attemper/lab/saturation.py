"""How much of its choice does attention keep as d_k grows, with √d_k and without?"""

from __future__ import annotations

from dataclasses import dataclass

from .._progress import Progress, silent
from .._scale import scale_for
from ._result import HOLDS, OPEN, Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob
from ._result import Config as Base
from ._scores import sample_readings

RULES = ("unscaled", "sqrt_dk")
NAMES = {"unscaled": "unscaled", "sqrt_dk": "divided by √d_k"}
FIELDS = ("normalized_entropy", "largest_weight", "flow")
COLLAPSED = 0.1
"""Of the largest entropy that n keys allow: with 128 keys, fewer than two keys' worth of choice."""
STEADY = 0.02


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `saturation`."""

    d_k: tuple[int, ...] = knob((4, 16, 64, 256), "head widths", least=1, fewest=2)
    keys: int = knob(128, "keys, and queries", least=2)
    half_width: float = knob(0.003, "wanted half-width of every mean", least=1e-5)
    most: int = knob(2000, "batches at the most", least=2)


QUICK = Config()


def run(config: Config, progress: Progress = silent) -> Result:
    """Sample attention at each width, and see what softmax leaves of the keys."""
    found: dict[str, list[dict[str, Estimate]]] = {rule: [] for rule in RULES}
    for done, d_k in enumerate(config.d_k):
        stage = f"attention at d_k {d_k}"
        progress(stage, done, len(config.d_k))
        scales = [scale_for(rule, d_k) for rule in RULES]
        readings = sample_readings(
            FIELDS,
            scales,
            seed=config.seed,
            d_k=d_k,
            keys=config.keys,
            half_width=config.half_width,
            most=config.most,
        )
        for rule, reading in zip(RULES, readings, strict=True):
            found[rule].append(reading)
    widest, narrowest = config.d_k[-1], config.d_k[0]
    plain, scaled = ([one["normalized_entropy"] for one in found[rule]] for rule in RULES)
    drops = [
        Evidence(f"entropy at d_k {wide} less that at d_k {narrow}", after.less(before), most=0.0)
        for narrow, wide, before, after in zip(config.d_k, config.d_k[1:], plain, plain[1:], strict=False)
    ]
    collapse = Evidence(f"unscaled entropy at d_k {widest}, over ln n", plain[-1], 0.0, COLLAPSED)
    steady = Evidence(f"scaled, d_k {widest} less d_k {narrowest}", scaled[-1].less(scaled[0]), -STEADY, STEADY)
    evidence = (*drops, collapse, steady)
    outcome = judge((*drops, steady))
    if outcome == HOLDS and collapse.outcome() != HOLDS:
        # It falls as the claim says, and at these widths not so far that one could call it collapsed.
        outcome = OPEN
    lowest, highest = (end(e.value for e in scaled) for end in (min, max))
    return Result(
        question="saturation",
        config=config,
        summary=f"With {config.keys} keys and no scaling, the entropy of attention falls from {plain[0]} of its "
        f"largest at d_k {narrowest} to {plain[-1]} at d_k {widest}, where the largest weight is "
        f"{found['unscaled'][-1]['largest_weight']}. "
        f"Divided by √d_k the entropy lies between {lowest:.3f} and {highest:.3f} at all of these widths.",
        verdicts=(
            Verdict(
                claim=11,
                outcome=outcome,
                expected="entropy falls with d_k, to nearly one token",
                measured="entropy over ln n, unscaled: "
                + ", ".join(f"{e} at d_k {d}" for d, e in zip(config.d_k, plain, strict=True))
                + f"; scaled {scaled[0]} to {scaled[-1]}",
                reason="The scores' spread is √d_k, and softmax is as sharp as the spread. The drift is gradual: "
                "there is no width at which attention breaks, and n matters as well as d_k.",
                evidence=evidence,
            ),
        ),
        tables=(
            Table(
                title=f"Attention over {config.keys} keys, independent normal q and k",
                columns=("d_k", "scores", "entropy / ln n", "largest weight", "flow Σp(1−p)"),
                rows=tuple(
                    (d_k, NAMES[rule], *(found[rule][i][name] for name in FIELDS))
                    for i, d_k in enumerate(config.d_k)
                    for rule in RULES
                ),
            ),
        ),
        panels=(
            Panel(
                title="Unscaled attention collapses as heads get wider; divided by √d_k it does not",
                x_label="d_k (components)",
                y_label="entropy / ln n (1: all keys alike, 0: one key)",
                x_scale="log2",
                series=tuple(
                    Series.of(NAMES[rule], config.d_k, [one["normalized_entropy"] for one in found[rule]])
                    for rule in RULES
                ),
            ),
            Panel(
                title="The largest weight approaches 1",
                x_label="d_k (components)",
                y_label="largest weight (mean over rows)",
                x_scale="log2",
                series=tuple(
                    Series.of(NAMES[rule], config.d_k, [one["largest_weight"] for one in found[rule]]) for rule in RULES
                ),
            ),
        ),
    )
