"""What does splitting a width into heads do to the scores?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._attend import attend, read
from .._errors import OptionError, explain
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import generator, sample_means

RULES = {"sqrt_dk": "√d_k", "sqrt_dmodel": "√d_model", "unscaled": "unscaled"}
FIELDS = ("variance", "normalised entropy", "largest weight")


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `heads`."""

    width: int = knob(512, "width of the model, shared out among the heads", least=2)
    heads: tuple[int, ...] = knob((1, 2, 4, 8, 16), "numbers of heads, each a divisor of the width", least=1, fewest=2)
    tokens: int = knob(64, "tokens, which are queries and keys", least=2)
    half_width: float = knob(0.005, "wanted half-width of entropies, weights and variances over theory", least=1e-4)
    tolerance: float = knob(0.05, "how near a variance must come to theory, as a share of it", least=1e-3)
    most: int = knob(200, "models at the most", least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for heads in self.heads:
            if self.width % heads:
                fix = f"Pass divisors of width, {self.width}."
                raise OptionError(explain(f"{heads} heads do not divide a width of {self.width}.", fix))


QUICK = Config(half_width=0.02)


def run(config: Config, progress: Progress = silent) -> Result:
    """Split the same projections into few and into many heads and read each head's scores under three divisors."""
    sizes = config.heads
    found = iter(
        sample_means(
            partial(_draw, config, sizes),
            generator(config.seed, "heads"),
            half_width=config.half_width,
            most=config.most,
            progress=progress,
            stage="models",
        )
    )
    measured = {(h, rule): {field: next(found) for field in FIELDS} for h in sizes for rule in RULES}
    variances = {
        (h, rule): estimates["variance"].times(_theory(config, h, rule)) for (h, rule), estimates in measured.items()
    }
    evidence = [
        near(f"variance over theory, {RULES[rule]}, {h} heads", estimates["variance"], 1, config.tolerance)
        for (h, rule), estimates in measured.items()
    ]
    apart = {(h, rule): _apart(config, h, rule) for h in sizes for rule in ("sqrt_dk", "unscaled")}
    evidence += [
        Evidence(f"heads together less heads alone, {RULES[rule]}, {h} heads", Estimate.exact(gap), 0.0, 0.0)
        for (h, rule), (gap, _) in apart.items()
    ]
    outcome = judge(evidence)
    few, many = sizes[0], sizes[-1]
    entropy = {at: measured[at]["normalised entropy"] for at in measured}
    return Result(
        question="heads",
        config=config,
        summary=f"A width of {config.width} in h heads leaves d_k = {config.width}/h components to each. Divided by "
        "√d_k the scores of a head have variance 1 for any h; divided by √d_model, 1/h "
        f"({variances[many, 'sqrt_dmodel']} with {many} heads), which flattens attention the more the more heads "
        f"there are; undivided, {config.width}/h, which keeps a normalised entropy of {entropy[few, 'unscaled']} with "
        f"{few} and {entropy[many, 'unscaled']} with {many} heads. Running heads side by side, concatenating and "
        "projecting them has nothing to do with the scale: it gives the same numbers as each head alone, with and "
        "without it.",
        verdicts=(
            Verdict(
                claim=19,
                outcome=outcome,
                conditional=True,
                expected="variance 1 in each head",
                measured=f"variance of the scores with {few} and with {many} heads: "
                + "; ".join(
                    f"{words} {variances[few, rule]} and {variances[many, rule]}" for rule, words in RULES.items()
                ),
                reason="It holds if the divisor is that of the head, √d_k: then the number of heads does not touch "
                "the temperature. With √d_model or none it does. That heads run in parallel, are concatenated and "
                "projected needs no scale: the batched heads equal each head alone to the last bit, scaled or not.",
                evidence=tuple(evidence),
            ),
        ),
        tables=(
            Table(
                title=f"The scores of one head, total width {config.width}",
                columns=("heads", "d_k", "divisor", *FIELDS),
                rows=tuple(
                    (h, config.width // h, RULES[rule], variances[h, rule], *(e[field] for field in FIELDS[1:]))
                    for (h, rule), e in measured.items()
                ),
                note=f"{config.tokens} normal tokens; W_Q and W_K of variance 1/{config.width}, split as every model "
                "does. Theory for the variance: 1, 1/h and d_k.",
            ),
            Table(
                title=f"Shapes: {config.tokens} tokens, {many} heads",
                columns=("what", "shape"),
                rows=apart[many, "sqrt_dk"][1],
            ),
        ),
        panels=(
            Panel(
                title="Only √d_k gives every head the same variance, however many there are",
                x_label="heads",
                y_label="variance of the scores",
                x_scale="log2",
                y_scale="log10",
                series=tuple(
                    Series.of(words, sizes, [variances[h, rule] for h in sizes]) for rule, words in RULES.items()
                ),
                references=(("1", 1.0),),
            ),
            Panel(
                title="With another divisor the number of heads sets how sharp attention is",
                x_label="heads",
                y_label="normalised entropy (1: all keys alike)",
                x_scale="log2",
                series=tuple(
                    Series.of(words, sizes, [entropy[h, rule] for h in sizes]) for rule, words in RULES.items()
                ),
            ),
        ),
    )


def split(x: Any, heads: int) -> Any:
    """(tokens, width) to (heads, tokens, d_k): neighbouring columns make a head."""
    return np.ascontiguousarray(x.reshape(len(x), heads, -1).swapaxes(0, 1))


def _scale(config: Config, heads: int, rule: str) -> float:
    return scale_for(rule, config.width // heads, model_dim=config.width)


def _theory(config: Config, heads: int, rule: str) -> float:
    """The variance that independent components of variance 1 give."""
    return {"sqrt_dk": 1.0, "sqrt_dmodel": 1 / heads, "unscaled": config.width / heads}[rule]


def _projected(config: Config, rng: np.random.Generator, count: int) -> list[Any]:
    x = rng.standard_normal((config.tokens, config.width), dtype=np.float32)
    w = rng.standard_normal((count, config.width, config.width), dtype=np.float32)
    return [x @ (one / np.float32(math.sqrt(config.width))) for one in w]


def _draw(config: Config, sizes: tuple[int, ...], rng: np.random.Generator) -> list[float]:
    """Variance over theory, normalised entropy and largest weight of one model, for each split and rule."""
    q, k = _projected(config, rng, 2)
    found = []
    for h in sizes:
        for rule in RULES:
            reading: Any = read(split(q, h), split(k, h), scale=_scale(config, h, rule))
            # A row's deviations are from its own mean over n keys, which takes 1/n off their square.
            square = np.square(reading.score_std, dtype=np.float64).mean() * config.tokens / (config.tokens - 1)
            found += [
                square / _theory(config, h, rule),
                reading.normalized_entropy.mean(),
                reading.largest_weight.mean(),
            ]
    return [float(each) for each in found]


def _apart(config: Config, heads: int, rule: str) -> tuple[float, tuple[tuple[str, str], ...]]:
    """How far all heads in one call are from each head alone, concatenated and projected; and the shapes on the way."""
    rng = generator(config.seed, "apart", heads)
    flat = _projected(config, rng, 3)
    q, k, v = (split(x, heads) for x in flat)
    w_o = rng.standard_normal((config.width, config.width), dtype=np.float32)
    together: Any = attend(q, k, v, scale=_scale(config, heads, rule)).output
    alone = [attend(q[h], k[h], v[h], scale=_scale(config, heads, rule)).output for h in range(heads)]
    joined = together.swapaxes(0, 1).reshape(config.tokens, config.width)
    other = np.concatenate(alone, axis=-1)
    steps = {
        "x W_Q": flat[0],
        "q, split": q,
        "scores": np.empty((heads, config.tokens, config.tokens)),
        "output of the heads": together,
        "concatenated": joined,
        "projected by W_O": joined @ w_o,
    }
    gap = max(float(np.abs(joined - other).max()), float(np.abs(joined @ w_o - other @ w_o).max()))
    return gap, tuple((name, " × ".join(map(str, x.shape))) for name, x in steps.items())
