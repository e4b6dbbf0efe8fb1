"""Are Bahdanau's scores bounded by 1?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from .._progress import Progress, silent
from ._lookup import one_thread
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._statistics import generator, mean_of, sample_means

QUERIES, KEYS = 16, 64
FAR = 6.0
"""Where a constructed pair puts every tanh: 1 − tanh 6 is 1.2e−5."""

VECTORS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "length 1": lambda rng, d: (v := rng.standard_normal(d)) / np.linalg.norm(v),
    "nn.Linear": lambda rng, d: rng.uniform(-1, 1, d) / math.sqrt(d),
}
"""Ways to draw v: components of variance 1; a vector of length 1; and as torch's default does, within ±1/√d_k."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `additive`."""

    d_k: tuple[int, ...] = knob((16, 64, 256), "components of q, k and v", least=2)
    half_width: float = knob(0.03, "wanted half-width of a variance, as a share of what theory says", least=1e-3)
    tolerance: float = knob(0.1, "how near to theory counts as theory, as a share of it", least=1e-3)
    most: int = knob(1500, "layers at the most for one width", least=2)
    repeats: int = knob(20, "pairs constructed to come near the bound", least=2)
    lengths: tuple[int, ...] = knob((64, 128, 256, 512), "tokens, for operations, memory and time", least=2)
    width: int = knob(64, "components, for operations, memory and time", least=1)
    rounds: int = knob(7, "times that each length is timed", least=1)


QUICK = Config(half_width=0.07, tolerance=0.2, repeats=8, lengths=(64, 128, 256), rounds=5)


def run(config: Config, progress: Progress = silent) -> Result:
    """Sample additive scores for three ways to draw v, push a pair to the bound, and count what a score costs."""
    steps = len(config.d_k) + len(config.lengths)
    variances: dict[tuple[int, str], Estimate] = {}
    beyond: dict[tuple[int, str], Estimate] = {}
    reached: dict[tuple[int, str], tuple[Estimate, Estimate]] = {}
    theory, bounds = [], []
    for i, d_k in enumerate(config.d_k):
        progress(f"additive scores at d_k {d_k}", i, steps)
        stream = generator(config.seed, "additive", d_k)
        found = iter(sample_means(partial(_draw, d_k), stream, half_width=config.half_width, most=config.most))
        for name in VECTORS:
            ratio, beyond[d_k, name] = next(found), next(found)
            variances[d_k, name] = ratio.times(expected(name, d_k))
            theory.append(near(f"variance over theory, v {name}, d_k {d_k}", ratio, 1, config.tolerance))
            reached[d_k, name] = _reach(config, name, d_k)
            share = f"constructed score over ‖v‖₁, v {name}, d_k {d_k}"
            bounds.append(Evidence(share, reached[d_k, name][1], 0.99, 1.0))
            bounds.append(Evidence(f"‖v‖₁, v {name}, d_k {d_k}", reached[d_k, name][0], 1.0))
    counts, times = {}, {}
    with one_thread():
        for i, length in enumerate(config.lengths):
            progress(f"cost at {length} tokens", len(config.d_k) + i, steps)
            counts[length] = _count(length, config.width)
            times[length] = _time(config, length)
    longest = config.lengths[-1]
    costs = [
        Evidence(f"{what} over those of q·k, {longest} tokens", Estimate.exact(counts[longest][name]), 1.0)
        for what, name in (("operations", "ratio"), ("numbers at once", "numbers"))
    ]
    evidence = (*theory, *bounds, *costs)
    outcome = judge(evidence)
    narrow, widest = config.d_k[0], config.d_k[-1]
    return Result(
        question="additive",
        config=config,
        summary="tanh lies between −1 and 1, but an additive score adds d_k of them, weighted by v: it is bounded by "
        f"‖v‖₁, the sum of the sizes of v's components. At d_k {widest} that is {reached[widest, 'normal'][0]} for "
        "normal v, and a constructed pair gets there. The variance over the keys of a row grows with d_k if v has "
        f"components of variance 1 ({variances[narrow, 'normal']} at {narrow}, {variances[widest, 'normal']} at "
        f"{widest}), just as that of q·k does, and stays at {variances[widest, 'length 1']} if v has length 1: the "
        f"scale has moved into v. A score costs {counts[longest]['ratio']:g} times the operations of q·k, a third of "
        f"them tanh, and as a plain formula {counts[longest]['numbers']:g} times the memory.",
        verdicts=(
            Verdict(
                claim=16,
                outcome=outcome,
                conditional=True,
                expected="scores in [−1, 1], no scaling, slower",
                measured=f"largest possible score at d_k {widest}: "
                + ", ".join(f"{reached[widest, name][0]} (v {name})" for name in VECTORS)
                + f"; variance {variances[widest, 'normal']} and, for v of length 1, {variances[widest, 'length 1']}",
                reason="Scores lie in [−1, 1] only if ‖v‖₁ ≤ 1, which no usual initialiser gives. They need no "
                "scaling if v keeps a length of order 1, at the start and in training; a v with components of "
                "variance 1 would want √d_k again. That they cost more operations, and as a "
                "plain formula more memory, holds; by how much they are slower depends on the machine, and no verdict "
                "on that.",
                evidence=evidence,
            ),
        ),
        tables=(
            Table(
                title="Scores vᵀtanh(W_q q + W_k k) of random q and k",
                columns=(
                    "d_k",
                    "v",
                    "‖v‖₁, the bound",
                    "constructed pair over it",
                    "variance over a row's keys",
                    "theory",
                    "scores beyond ±1",
                ),
                rows=tuple(
                    (d_k, name, *reached[d_k, name], variance, expected(name, d_k), beyond[d_k, name])
                    for (d_k, name), variance in variances.items()
                ),
                note="Independent normal q and k; W of variance 1/d_k. v: normal, of length 1, or as nn.Linear draws "
                "it, within ±1/√d_k. The constructed pair solves W_q q = 6·sign(v) with k = 0. q·k has variance d_k.",
            ),
            Table(
                title=f"What the scores of a head cost, {config.width} components",
                columns=(
                    "tokens",
                    "additions",
                    "tanh",
                    "multiply-adds",
                    "multiply-adds of q·k",
                    "bytes at once",
                    "bytes at once, q·k",
                ),
                rows=tuple(
                    (length, *(c[name] for name in ("hidden", "hidden", "hidden", "products", "bytes", "bytes of q·k")))
                    for length, c in counts.items()
                ),
                note="Counted from the arrays of the plain formula in float32, projections left out. This library's "
                "AdditiveAttention goes tile by tile and never holds that many at once.",
            ),
        ),
        panels=(
            Panel(
                title="Additive scores grow with d_k too, unless v is kept short",
                x_label="d_k (components)",
                y_label="variance of the scores over the keys of a row",
                x_scale="log2",
                y_scale="log10",
                series=(
                    *(
                        Series.of(f"additive, v {name}", config.d_k, [variances[d_k, name] for d_k in config.d_k])
                        for name in VECTORS
                    ),
                    Series(name="q·k, by theory", x=config.d_k, y=tuple(map(float, config.d_k))),
                ),
                references=(("1", 1.0),),
            ),
            Panel(
                title="The bound of an additive score is ‖v‖₁, not 1",
                x_label="d_k (components)",
                y_label="largest possible score",
                x_scale="log2",
                y_scale="log10",
                series=tuple(
                    Series.of(f"v {name}", config.d_k, [reached[d_k, name][0] for d_k in config.d_k])
                    for name in VECTORS
                ),
                references=(("1", 1.0),),
            ),
        ),
        clock=(
            Table(
                title="Time of one forward pass of a layer, one thread",
                columns=("tokens", "AdditiveAttention (ms)", "MultiheadAttention (ms)", "ratio"),
                rows=tuple((length, 1e3 * a, 1e3 * d, a / d) for length, (a, d) in times.items()),
                note=f"One head of {config.width} components, projections included; medians of {config.rounds}, in "
                "turn.",
            ),
        ),
    )


def scores(q: Any, k: Any, w_q: Any, w_k: Any, v: Any) -> Any:
    """The additive score of every query with every key: vᵀtanh(W_q q + W_k k)."""
    return np.tanh((q @ w_q)[:, None] + (k @ w_k)[None]) @ v


def expected(name: str, d_k: int) -> float:
    """The variance over the keys of a row: E‖v‖² times that of tanh(a + b) over b, for normal a and b."""
    at, weight = np.polynomial.hermite_e.hermegauss(60)
    weight = weight / weight.sum()
    bent = np.tanh(at[:, None] + at)
    spread = float(weight @ (bent**2 @ weight - (bent @ weight) ** 2))
    return spread * {"normal": float(d_k), "length 1": 1.0, "nn.Linear": 1 / 3}[name]


def _draw(d_k: int, rng: np.random.Generator) -> list[float]:
    """For each way to draw v: the variance over a row's keys over theory, and the share of scores beyond ±1."""
    q, k = rng.standard_normal((QUERIES, d_k)), rng.standard_normal((KEYS, d_k))
    w_q, w_k = rng.standard_normal((2, d_k, d_k)) / math.sqrt(d_k)
    v = np.stack([draw(rng, d_k) for draw in VECTORS.values()], axis=-1)
    found = scores(q, k, w_q, w_k, v)
    values = []
    for i, name in enumerate(VECTORS):
        variance = float(found[..., i].var(axis=1, ddof=1).mean())
        values += [variance / expected(name, d_k), float((np.abs(found[..., i]) > 1).mean())]
    return values


def _reach(config: Config, name: str, d_k: int) -> tuple[Estimate, Estimate]:
    """‖v‖₁, and the score of a pair made for v as a share of it."""
    sizes, shares = [], []
    for repeat in range(config.repeats):
        rng = generator(config.seed, "reach", name, d_k, repeat)
        w_q, w_k = rng.standard_normal((2, d_k, d_k)) / math.sqrt(d_k)
        v = VECTORS[name](rng, d_k)
        q = np.linalg.solve(w_q.T, FAR * np.sign(v))
        sizes.append(float(np.abs(v).sum()))
        shares.append(float(scores(q[None], np.zeros((1, d_k)), w_q, w_k, v)[0, 0]) / sizes[-1])
    return mean_of(sizes), Estimate(float(np.mean(shares)), min(shares), max(shares), len(shares))


def _count(length: int, width: int) -> dict[str, Any]:
    """Operations and bytes of all scores of one head, from the arrays of the plain formulas."""
    q = np.zeros((length, width), dtype=np.float32)
    hidden, products = q[:, None] + q[None], q @ q.T
    # Every hidden number is an addition, a tanh and a multiply-add; every product is width multiply-adds.
    return {
        "hidden": hidden.size,
        "products": products.size * width,
        "ratio": 3 * hidden.size / (products.size * width),
        "numbers": hidden.size / products.size,
        "bytes": hidden.nbytes,
        "bytes of q·k": products.nbytes,
    }


def _time(config: Config, length: int) -> tuple[float, float]:
    """Seconds of a forward pass of both layers, the median of rounds in turn."""
    import torch

    from ..nn import AdditiveAttention, MultiheadAttention

    rng = generator(config.seed, "time", length)
    x = torch.from_numpy(rng.standard_normal((1, length, config.width), dtype=np.float32))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layers = (
            AdditiveAttention(config.width, stats="none"),
            MultiheadAttention(config.width, 1, batch_first=True, stats="none"),
        )
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(config.rounds + 1):
            for layer, past in zip(layers, seconds, strict=True):
                begin = perf_counter()
                layer(x)
                # The first turn pays for imports and caches.
                past.extend([perf_counter() - begin] if turn else [])
    return median(seconds[0]), median(seconds[1])
