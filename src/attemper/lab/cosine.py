"""Does cosine similarity do without a scale?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._attend import read
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import HOLDS, OPEN, Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._result import Config as Base
from ._statistics import generator, mean_of, sample_means

HEADS = 2
RULES = ("q·k/√d_k", "cosine", "cosine, τ = 1/√d_k", "cosine, τ fixed")
LEARNED = "cosine, τ learned"
FIELDS = ("score_std", "normalized_entropy", "largest_weight")


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `cosine`."""

    d_k: tuple[int, ...] = knob((16, 64, 256), "head widths", least=2)
    keys: int = knob(128, "keys of a row", least=2)
    temperature: float = knob(0.1, "the fixed τ; 0.1 is where Swin Transformer V2 starts", least=1e-3)
    noise: float = knob(0.5, "standard deviation of what a query adds to the key that it seeks", least=0)
    repeats: int = knob(16, "sets of keys in which a query seeks one", least=2)
    queries: int = knob(32, "queries that seek in each", least=1)
    steps: int = knob(80, "gradient steps on ln τ", least=1)
    rate: float = knob(0.3, "learning rate of ln τ", least=1e-4)
    half_width: float = knob(0.002, "wanted half-width of entropies, weights and standard deviations", least=1e-4)
    most: int = knob(400, "batches at the most for one width", least=2)


QUICK = Config(half_width=0.01, repeats=8, steps=60)


def run(config: Config, progress: Progress = silent) -> Result:
    """Read random rows under cosine scores with and without a temperature, then seek a key among others."""
    random: dict[tuple[int, str], dict[str, Estimate]] = {}
    sought: dict[tuple[int, str], Estimate] = {}
    learned: dict[int, Estimate] = {}
    for i, d_k in enumerate(config.d_k):
        progress(f"random rows at d_k {d_k}", 2 * i, 2 * len(config.d_k))
        found = iter(
            sample_means(
                partial(_draw, config, d_k),
                generator(config.seed, "cosine", d_k),
                half_width=config.half_width,
                most=config.most,
            )
        )
        random |= {(d_k, rule): {field: next(found) for field in FIELDS} for rule in RULES}
        progress(f"seeking a key at d_k {d_k}", 2 * i + 1, 2 * len(config.d_k))
        weights, temperatures = _seek(config, d_k)
        sought |= {(d_k, rule): mean_of(each) for rule, each in weights.items()}
        learned[d_k] = mean_of(temperatures)
    bound = math.e**2 / (math.e**2 + config.keys - 1)
    support, claim = [], []
    for d_k in config.d_k:
        spread = random[d_k, "cosine"]["score_std"].times(math.sqrt(d_k))
        support.append(near(f"standard deviation times √d_k, d_k {d_k}", spread, 1, 0.05))
        support.append(Evidence(f"weight on the key sought, learned τ, d_k {d_k}", sought[d_k, LEARNED], 0.5))
        support.append(Evidence(f"learned τ, d_k {d_k}", learned[d_k], most=0.5))
        scaled, flat, warm = (random[d_k, rule]["normalized_entropy"] for rule in RULES[:3])
        name = f"normalised entropy at τ = 1/√d_k less that of q·k/√d_k, d_k {d_k}"
        support.append(Evidence(name, _less(warm, scaled), -0.03, 0.03))
        name = f"normalised entropy less that of q·k/√d_k, d_k {d_k}"
        claim.append(Evidence(name, _less(flat, scaled), -0.05, 0.05))
        claim.append(Evidence(f"weight on the key sought, no τ, d_k {d_k}", sought[d_k, "cosine"], 0.5))
    middle = config.d_k[len(config.d_k) // 2]
    return Result(
        question="cosine",
        config=config,
        summary="Cosines lie between −1 and 1 and have variance 1/d_k: they need no divisor, they need a factor. As "
        f"they are, no key among {config.keys} can get more than e²/(e² + {config.keys - 1}) = {bound:.3f} of the "
        f"weight; at d_k {middle} the normalised entropy is "
        f"{random[middle, 'cosine']['normalized_entropy'].value:.3f}, and a key that is sought and nearly met gets "
        f"{sought[middle, 'cosine']}. Divided by a temperature of 1/√d_k they behave nearly as q·k/√d_k does; "
        f"{config.steps} steps of learning bring it to {learned[middle]}, and the key gets {sought[middle, LEARNED]}.",
        verdicts=(
            Verdict(
                claim=17,
                outcome=judge(claim) if judge(support) == HOLDS else OPEN,
                expected="attention that can choose, without a scale",
                measured=f"at d_k {middle}: normalised entropy "
                f"{random[middle, 'cosine']['normalized_entropy'].value:.3f}, weight on the key sought "
                f"{sought[middle, 'cosine']}; with a learned τ {sought[middle, LEARNED]}",
                reason="The divisor √d_k goes, but a temperature has to come: cosines are bounded by 1, so their "
                "softmax over many keys is nearly flat at any width. With a temperature, fixed or learned, cosine "
                "scores do well, and no growth of q and k can saturate them.",
                evidence=(*claim, *support),
            ),
        ),
        tables=(
            Table(
                title=f"Random rows of {config.keys} keys",
                columns=(
                    "d_k",
                    "scores",
                    "standard deviation",
                    "normalised entropy",
                    "largest weight",
                    "bound of |score|",
                ),
                rows=tuple(
                    (d_k, rule, *estimates.values(), None if rule == RULES[0] else 1 / _temperature(config, d_k, rule))
                    for (d_k, rule), estimates in random.items()
                ),
                note=f"Independent normal q and k. τ fixed: {config.temperature:g}.",
            ),
            Table(
                title="A query seeks one key",
                columns=("d_k", "scores", "τ", "weight on it"),
                rows=tuple((d_k, rule, _cell(config, learned, d_k, rule), e) for (d_k, rule), e in sought.items()),
                note=f"The query is a key plus noise of standard deviation {config.noise:g}; {config.keys} keys. "
                f"Learned: {config.steps} gradient steps on ln τ from 1, to make the sought key likely.",
            ),
        ),
        panels=(
            Panel(
                title="Without a temperature cosine attention is flat at every width",
                x_label="d_k (components)",
                y_label="normalised entropy (1: all keys alike)",
                x_scale="log2",
                series=tuple(
                    Series.of(rule, config.d_k, [random[d_k, rule]["normalized_entropy"] for d_k in config.d_k])
                    for rule in RULES
                ),
            ),
            Panel(
                title="With a temperature it finds the key that a query seeks",
                x_label="d_k (components)",
                y_label="weight on the key sought",
                x_scale="log2",
                series=tuple(
                    Series.of(rule, config.d_k, [sought[d_k, rule] for d_k in config.d_k]) for rule in (*RULES, LEARNED)
                ),
                references=(("most without τ", bound),),
            ),
        ),
    )


def unit(x: Any) -> Any:
    """Rows of length 1, whose dot products are cosines."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _temperature(config: Config, d_k: int, rule: str) -> float:
    return {"cosine": 1.0, "cosine, τ = 1/√d_k": 1 / math.sqrt(d_k), "cosine, τ fixed": config.temperature}[rule]


def _scores(config: Config, d_k: int, rule: str, q: Any, k: Any) -> tuple[Any, Any, float]:
    """The q, k and scale that give the scores of a rule."""
    if rule == RULES[0]:
        return q, k, scale_for("sqrt_dk", d_k)
    return unit(q), unit(k), 1 / _temperature(config, d_k, rule)


def _draw(config: Config, d_k: int, rng: np.random.Generator) -> list[float]:
    q, k = rng.standard_normal((2, HEADS, config.keys, d_k), dtype=np.float32)
    found = []
    for rule in RULES:
        one, other, scale = _scores(config, d_k, rule, q, k)
        reading = read(one, other, scale=scale, stats=FIELDS)
        # A row's deviations are from its own mean over n keys, which takes 1/n off their square.
        found.append(float(np.mean(np.asarray(reading.score_std))) * math.sqrt(config.keys / (config.keys - 1)))
        found += [float(np.mean(np.asarray(getattr(reading, field)))) for field in FIELDS[1:]]
    return found


def _seek(config: Config, d_k: int) -> tuple[dict[str, Any], Any]:
    """The weight on the key sought under every rule, and the τ that each set of keys teaches."""
    rng = generator(config.seed, "seek", d_k)
    k = rng.standard_normal((config.repeats, config.keys, d_k), dtype=np.float32)
    right = rng.integers(0, config.keys, (config.repeats, config.queries))
    target = np.take_along_axis(k, right[..., None], axis=1)
    q = target + np.float32(config.noise) * rng.standard_normal(target.shape, dtype=np.float32)

    def weigh(one: Any, other: Any, scale: Any) -> tuple[Any, Any]:
        """The weight on the key sought, and the gradient of −ln of it to the logarithm of the scale."""
        reading: Any = read(one, other, scale=scale, stats=("logsumexp", "expected_score"))
        met = np.einsum("rqd,rqd->rq", one, np.take_along_axis(other, right[..., None], axis=1))
        met = met * np.asarray(scale, dtype=np.float64).reshape(-1, 1)
        return np.exp(met - reading.logsumexp).mean(axis=1), (reading.expected_score - met).mean(axis=1)

    weights = {rule: weigh(*_scores(config, d_k, rule, q, k))[0] for rule in RULES}
    logarithm = np.zeros(config.repeats)
    for _ in range(config.steps):
        # Each set of keys is a head and teaches its own temperature.
        logarithm -= config.rate * weigh(unit(q), unit(k), np.exp(logarithm))[1]
    weights[LEARNED] = weigh(unit(q), unit(k), np.exp(logarithm))[0]
    return weights, np.exp(-logarithm)


def _less(one: Estimate, other: Estimate) -> Estimate:
    half = math.hypot(one.half_width, other.half_width)
    gap = one.value - other.value
    return Estimate(gap, gap - half, gap + half, min(one.count, other.count))


def _cell(config: Config, learned: dict[int, Estimate], d_k: int, rule: str) -> Any:
    if rule == RULES[0]:
        return None
    return learned[d_k] if rule == LEARNED else _temperature(config, d_k, rule)
