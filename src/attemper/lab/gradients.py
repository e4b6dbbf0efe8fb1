"""Do gradients vanish or explode without scaling?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._attend import attend, read, trace
from .._progress import Progress, silent
from .._scale import scale_for
from ._lookup import BATCH, RATES, TOKENS, normal, one_thread, train
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import generator, mean_of, sample_means

RULES = {"unscaled": "unscaled", "sqrt_dk": "scaled"}
"""The two rules that are compared, and what they are called in words."""

STARVED = 1e-3
"""A key starves when its gradient is below this share of its row's largest."""

BLOCKED = 0.01
"""A row whose flow is below this passes next to nothing."""

NORMS = ("scores", "q", "k", "v", "W_Q", "W_K", "W_V", "mean row of q", "median row of q")
"""What is differentiated to; the scores are those that softmax sees, after the scale."""

HEADS = 2
"""Heads in a batch, each with as many queries as keys."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `gradients`."""

    d_k: tuple[int, ...] = knob((16, 64, 256), "head widths", least=1)
    keys: int = knob(128, "keys of a row", least=2)
    width: int = knob(256, "width of the tokens that W_Q, W_K and W_V project", least=1)
    half_width: float = knob(0.0025, "wanted half-width of flow and of the share of starved keys", least=1e-4)
    most: int = knob(400, "batches at the most for one of them", least=2)
    tolerance: float = knob(0.01, "how near flow must come to what integration gives", least=1e-4)
    repeats: int = knob(24, "layers at initialisation", least=2)
    models: int = knob(10, "models trained for each rule", least=2)
    steps: int = knob(60, "training steps", least=1)
    trained: int = knob(64, "head width of the trained models", least=1)
    optimisers: tuple[str, ...] = knob(tuple(RATES), "optimisers of the training", choices=tuple(RATES))


QUICK = Config(half_width=0.003, tolerance=0.03, repeats=8, models=6)


def run(config: Config, progress: Progress = silent) -> Result:
    """Read the flow through softmax, count the keys that starve, then compare norms at the start and along training."""
    steps = 3 * len(config.d_k) + len(config.optimisers)
    inside: dict[tuple[int, str], list[Estimate]] = {}
    ratios: dict[int, dict[str, Estimate]] = {}
    with one_thread():
        for i, d_k in enumerate(config.d_k):
            for j, rule in enumerate(RULES):
                progress(f"flow at d_k {d_k}, {RULES[rule]}", 3 * i + j, steps)
                stream = generator(config.seed, "gradients", rule, d_k)
                draw = partial(_inside, config.keys, d_k, rule)
                flow, starved = sample_means(draw, stream, half_width=config.half_width, most=config.most)
                # A backward pass costs more and is noisier: twice the width will do.
                draw = partial(_backward, config.keys, d_k, rule)
                passed, *rest = sample_means(draw, stream, half_width=2 * config.half_width, most=config.most)
                inside[d_k, rule] = [flow, passed, starved, *rest]
            progress(f"norms at d_k {d_k}", 3 * i + 2, steps)
            ratios[d_k] = _ratios(config, d_k)
        runs = {}
        for i, optimiser in enumerate(config.optimisers):
            progress(f"training with {optimiser}", steps - len(config.optimisers) + i, steps)
            runs[optimiser] = train(
                RULES,
                seed=config.seed,
                models=config.models,
                steps=config.steps,
                d_k=config.trained,
                optimiser=optimiser,
            )
    training = _training_table(config, runs)
    widest = config.d_k[-1]
    unscaled, scaled, ratio = inside[widest, "unscaled"], inside[widest, "sqrt_dk"], ratios[widest]
    verdicts = (_flow_verdict(config, inside), _which_verdict(config, ratios, inside, runs), _starved(config, inside))
    first = runs[config.optimisers[0]]
    return Result(
        question="gradients",
        config=config,
        summary=f"Without scaling the softmax passes less on: its flow falls to {unscaled[0]} at d_k {widest}, where "
        f"it is {scaled[0]} with √d_k, and {unscaled[2].value:.0%} of the keys get no gradient to speak of. Yet the "
        f"gradient as a whole is not smaller but larger, {ratio['q']} times at q. The gradient to q is scale · dS · "
        f"k: leaving the scale out multiplies it by √d_k = {math.sqrt(widest):g}, and dS itself is {ratio['scores']} "
        "times as large, since one or two keys now carry what a whole row shared and averaged out. A few positions "
        "get too much and the others nothing: “explode” is said of the first, “vanish” of the second.",
        verdicts=verdicts,
        tables=(
            Table(
                title=f"What softmax lets through, {config.keys} keys",
                columns=(
                    "d_k",
                    "rule",
                    "flow Σp(1−p)",
                    "flow by integration",
                    "gradient_flow, backward pass",
                    "keys that starve",
                    "rows with flow below 1 %",
                    "squares of the Jacobian off the diagonal",
                ),
                rows=tuple(
                    (d_k, RULES[rule], e[0], flow_of(d_k, config.keys, scale_for(rule, d_k)), e[1], e[2], e[3], e[4])
                    for (d_k, rule), e in inside.items()
                ),
                note="q, k, v and the gradient that arrives are independent and normal. A key starves when |dS| is "
                "below a thousandth of its row's largest. The diagonal of the Jacobian diag(p) − ppᵀ is p(1−p).",
            ),
            Table(
                title="Norm of the gradient at initialisation, unscaled over scaled",
                columns=("d_k", "√d_k", *NORMS),
                rows=tuple((d_k, math.sqrt(d_k), *(r[name] for name in NORMS)) for d_k, r in ratios.items()),
                note=f"Geometric means over {config.repeats} layers: {config.keys} normal tokens of width "
                f"{config.width}, W of variance 1/{config.width}, the same for both rules.",
            ),
            training,
        ),
        panels=(
            Panel(
                title="Unscaled, the flow through softmax falls as d_k grows",
                x_label="d_k (components)",
                y_label="share that passes",
                x_scale="log2",
                series=tuple(
                    Series.of(f"{name}, {words}", config.d_k, [inside[d_k, rule][at] for d_k in config.d_k])
                    for at, name in enumerate(("flow", "gradient_flow"))
                    for rule, words in RULES.items()
                ),
            ),
            Panel(
                title="Unscaled, most keys get no gradient to speak of",
                x_label="d_k (components)",
                y_label="share of keys with |dS| < 0.001 of the row's largest",
                x_scale="log2",
                series=tuple(
                    Series.of(words, config.d_k, [inside[d_k, rule][2] for d_k in config.d_k])
                    for rule, words in RULES.items()
                ),
            ),
            Panel(
                title="Unscaled, the gradient as a whole is larger",
                x_label="d_k (components)",
                y_label="norm at initialisation, unscaled over scaled",
                x_scale="log2",
                y_scale="log10",
                series=tuple(
                    Series.of(name, config.d_k, [ratios[d_k][name] for d_k in config.d_k])
                    for name in ("scores", "q", "v", "W_Q", "median row of q")
                ),
                references=(("alike", 1.0),),
            ),
            Panel(
                title=f"The gradient to W_Q while a layer learns a lookup with {config.optimisers[0]}",
                x_label="step",
                y_label="norm of the gradient to W_Q",
                y_scale="log10",
                series=tuple(
                    Series.of(words, range(config.steps + 1), map(_geometric, first[rule]["W_Q"].T))
                    for rule, words in RULES.items()
                ),
            ),
        ),
    )


def score_gradient(weights: Any, upstream: Any) -> Any:
    """The gradient dS = p(dP − Σp·dP): what softmax makes of the gradient dP to its weights."""
    return weights * (upstream - (weights * upstream).sum(-1, keepdims=True))


def flow_of(d_k: int, keys: int, scale: float) -> float:
    """E[1 − Σp²] of independent normal q and k by integration, without a random number.

    1/Z² = ∫ t·e^(−tZ) dt takes the sum over keys apart into a product of equal factors.

    >>> round(flow_of(64, 2, 1e-9), 4)
    0.5
    """
    # |q|² is χ² with d_k degrees of freedom; the scores of a row are normal with that variance.
    squares = d_k * np.exp(np.linspace(-6, 6, 13) * math.sqrt(2 / d_k))
    chances = d_k / 2 * np.log(squares) - squares / 2
    chances = np.exp(chances - chances.max())
    collision = 0.0
    for square, chance in zip(squares, chances / chances.sum(), strict=True):
        spread = scale * math.sqrt(square)
        s = np.linspace(-8, 8, 65 + int(32 * spread)) * spread
        density = np.exp(-((s / spread) ** 2) / 2)
        density /= density.sum()
        log_t, step = np.linspace(-8 * spread - 12, 8 * spread + 5, 65 + int(32 * spread), retstep=True)
        powers = np.exp(np.minimum(log_t[:, None] + s, 50))
        decay = np.exp(-powers)
        collision += chance * keys * step * float((powers**2 * decay @ density) @ (decay @ density) ** (keys - 1))
    return float(1 - collision)


def _inside(keys: int, d_k: int, rule: str, rng: np.random.Generator) -> list[float]:
    """Flow and the share of starved keys: means of one batch."""
    q, k, v, upstream = normal(rng, 4, HEADS, keys, d_k)
    scale = scale_for(rule, d_k)
    flow: Any = read(q, k, scale=scale, stats="flow").flow
    ds = score_gradient(trace(q, k, v, scale=scale).weights, upstream @ v.mT).abs()
    return [float(flow.mean()), float((ds < STARVED * ds.amax(-1, keepdim=True)).double().mean())]


def _backward(keys: int, d_k: int, rule: str, rng: np.random.Generator) -> list[float]:
    """Means of gradient_flow in one backward pass, of blocked rows, and of the Jacobian off its diagonal."""
    q, k, v, upstream = normal(rng, 4, HEADS, keys, d_k)
    scale = scale_for(rule, d_k)
    output, reading = attend(q.requires_grad_(), k, v, scale=scale, stats=("flow", "gradient_flow"))
    output.backward(upstream)
    flow: Any = reading.flow
    passed: Any = reading.gradient_flow
    weights = trace(q.detach(), k, v, scale=scale).weights
    off = (weights**2).sum(-1) ** 2 - (weights**4).sum(-1)
    whole = off + (weights**2 * (1 - weights) ** 2).sum(-1)
    return [float(passed.mean()), float((flow < BLOCKED).double().mean()), float(off.sum() / whole.sum())]


def _ratios(config: Config, d_k: int) -> dict[str, Estimate]:
    """The norm of every gradient of one layer, unscaled over scaled, on the same tokens and matrices."""
    logs = []
    for repeat in range(config.repeats):
        rng = generator(config.seed, "layer", d_k, repeat)
        x = normal(rng, config.keys, config.width)
        matrices = normal(rng, 3, config.width, d_k) / math.sqrt(config.width)
        upstream = normal(rng, config.keys, d_k)
        norms = {}
        for rule in RULES:
            leaves = [matrix.clone().requires_grad_() for matrix in matrices]
            q, k, v = projected = [x @ leaf for leaf in leaves]
            for each in projected:
                each.retain_grad()
            attend(q, k, v, scale=scale_for(rule, d_k), stats="none").output.backward(upstream)
            weights = trace(*(each.detach() for each in projected), scale=scale_for(rule, d_k)).weights
            ds = score_gradient(weights, upstream @ v.detach().T)
            rows = q.grad.norm(dim=-1)
            norms[rule] = [
                float(size)
                for size in (
                    ds.norm(),
                    *(each.grad.norm() for each in (*projected, *leaves)),
                    rows.mean(),
                    rows.median(),
                )
            ]
        logs.append(np.log(norms["unscaled"]) - np.log(norms["sqrt_dk"]))
    return {name: _exponential(mean_of(column)) for name, column in zip(NORMS, np.transpose(logs), strict=True)}


def _training_table(config: Config, runs: dict[str, dict[str, dict[str, Any]]]) -> Table:
    moments = sorted({round(config.steps * share) for share in (0, 1 / 6, 1 / 3, 1 / 2, 1)})
    return Table(
        title="Along training: a layer learns to look a vector up",
        columns=(
            "optimiser",
            "step",
            "‖dW_Q‖, unscaled over scaled",
            "loss, unscaled",
            "loss, scaled",
            "flow, unscaled",
            "flow, scaled",
        ),
        rows=tuple(
            (
                optimiser,
                at,
                _quotient(history, at),
                *(mean_of(history[rule][name][:, at]) for name in ("loss", "flow") for rule in RULES),
            )
            for optimiser, history in runs.items()
            for at in moments
        ),
        note=f"{config.models} models of head width {config.trained} for each rule, from the same matrices and on the "
        f"same {BATCH} sequences of {TOKENS} vectors a step; a query is a vector with noise, the answer its label, a "
        f"loss of 1 is that of a guess. Learning rates: "
        f"{', '.join(f'{name} {RATES[name]:g}' for name in config.optimisers)}. One task, one rate for each: whether "
        "models train worse in general is the question `training`.",
    )


def _flow_verdict(config: Config, inside: dict[tuple[int, str], list[Estimate]]) -> Verdict:
    evidence = []
    for (d_k, rule), (flow, passed, *_) in inside.items():
        where = f"d_k {d_k}, {RULES[rule]}"
        theory = flow_of(d_k, config.keys, scale_for(rule, d_k))
        evidence.append(near(f"flow, {where}", flow, theory, config.tolerance))
        half, gap = math.hypot(flow.half_width, passed.half_width), passed.value - flow.value
        evidence.append(near(f"gradient_flow less flow, {where}", Estimate(gap, gap - half, gap + half), 0, 0.05))
    widest = config.d_k[-1]
    unscaled, scaled = inside[widest, "unscaled"], inside[widest, "sqrt_dk"]
    evidence.append(
        Evidence(f"flow unscaled over scaled, d_k {widest}", unscaled[0].times(1 / scaled[0].value), 0.0, 0.5)
    )
    outcome = judge(evidence)
    return Verdict(
        claim=12,
        outcome=outcome,
        conditional=True,
        expected="Σp(1−p) falls towards 0 unscaled and stays near 1 scaled",
        measured="; ".join(
            f"{words}: flow {', '.join(str(inside[d_k, rule][0]) for d_k in config.d_k)}"
            for rule, words in RULES.items()
        )
        + f" at d_k {', '.join(map(str, config.d_k))}",
        reason="It holds if p(1−p) is read as the trace: the Jacobian is diag(p) − ppᵀ, and p(1−p) is its diagonal; "
        f"unscaled at d_k {widest}, {unscaled[4].value:.0%} of its squares lie off it. A real backward pass agrees "
        f"with the trace.{_pace(config, inside)}",
        evidence=tuple(evidence),
    )


def _pace(config: Config, inside: dict[tuple[int, str], list[Estimate]]) -> str:
    if len(config.d_k) < 2:
        return ""
    before, last = config.d_k[-2:]
    fall = math.log(inside[last, "unscaled"][0].value / inside[before, "unscaled"][0].value) / math.log(last / before)
    return (
        f" From d_k {before} to {last} the mean falls like d_k to the power −{abs(fall):.2f}, no faster, since in some "
        "rows two keys are nearly level."
    )


def _which_verdict(
    config: Config,
    ratios: dict[int, dict[str, Estimate]],
    inside: dict[tuple[int, str], list[Estimate]],
    runs: dict[str, dict[str, dict[str, Any]]],
) -> Verdict:
    evidence = [
        Evidence(f"‖d{name}‖ unscaled over scaled, d_k {d_k}", ratio[name], 2.0)
        for d_k, ratio in ratios.items()
        for name in ("q", "k", "W_Q", "W_K")
    ]
    evidence += [
        Evidence(f"keys that starve, unscaled, d_k {d_k}", inside[d_k, "unscaled"][2], 0.5) for d_k in config.d_k
    ]
    evidence += [
        Evidence(f"‖dW_Q‖ unscaled over scaled, {name}, first step", _quotient(history, 0), 2.0)
        for name, history in runs.items()
    ]
    widest, optimiser = config.d_k[-1], config.optimisers[0]
    history = runs[optimiser]
    most = float((history["unscaled"]["W_Q"] / history["unscaled"]["W_Q"][:, :1]).max())
    evidence.append(Evidence(f"‖dW_Q‖ unscaled, largest over first, {optimiser}", Estimate.exact(most), most=5.0))
    outcome = judge(evidence)
    ratio = [_quotient(history, at).value for at in range(config.steps + 1)]
    first, least, last = ratio[0], min(ratio), ratio[-1]
    return Verdict(
        claim=13,
        outcome=outcome,
        conditional=True,
        expected="one of the two",
        measured=f"at d_k {widest}, unscaled: ‖dq‖ {ratios[widest]['q']} times that of √d_k, its median row "
        f"{ratios[widest]['median row of q']} times, and {inside[widest, 'unscaled'][2].value:.0%} of the keys starve",
        reason="Both hold, if “explode” is said of the norm of the gradient to q, k and their matrices at the start, "
        "and “vanish” of most single positions: few rows and keys carry the large norm. It does not go on growing: "
        f"in training with {optimiser}, ‖dW_Q‖ is at most {most:.3g} times what it is at the first step. Its ratio to "
        f"the scaled one falls from {first:.2g} to {least:.2g} and is {last:.2g} at the end, when the scaled layer has "
        "learned more and its own gradient is smaller.",
        evidence=tuple(evidence),
    )


def _starved(config: Config, inside: dict[tuple[int, str], list[Estimate]]) -> Verdict:
    bands = {"unscaled": (0.5, 1.0), "sqrt_dk": (0.0, 0.05)}
    evidence = tuple(
        Evidence(f"share of keys that starve, d_k {d_k}, {RULES[rule]}", estimates[2], *bands[rule])
        for (d_k, rule), estimates in inside.items()
    )
    shares = {
        words: ", ".join(str(inside[d_k, rule][2].times(100)) for d_k in config.d_k) for rule, words in RULES.items()
    }
    return Verdict(
        claim=14,
        outcome=judge(evidence),
        expected="most keys unscaled, few scaled",
        measured="keys with less than a thousandth of the row's largest gradient, "
        + "; ".join(f"{words}: {share} %" for words, share in shares.items())
        + f" at d_k {', '.join(map(str, config.d_k))}",
        reason="The gradient to a score is p(dP − Σp·dP): a key without weight gets none. With √d_k nearly every key "
        "keeps enough weight to learn from.",
        evidence=evidence,
    )


def _quotient(history: dict[str, dict[str, Any]], at: int) -> Estimate:
    return _geometric(history["unscaled"]["W_Q"][:, at] / history["sqrt_dk"]["W_Q"][:, at])


def _geometric(samples: Any) -> Estimate:
    return _exponential(mean_of(np.log(samples)))


def _exponential(logarithm: Estimate) -> Estimate:
    value, low, high = (math.exp(at) for at in (logarithm.value, logarithm.low, logarithm.high))
    return Estimate(value, low, high, logarithm.count)
