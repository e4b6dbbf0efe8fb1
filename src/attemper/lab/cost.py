"""What do scaling and length cost, and is it scaling that makes attention parallel?"""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._attend import attend
from .._progress import Progress, silent
from .._scale import scale_for
from ._result import (
    FAILS,
    HOLDS,
    OPEN,
    Estimate,
    Evidence,
    Panel,
    Result,
    Series,
    Table,
    Verdict,
    judge,
    knob,
    missed,
    near,
)
from ._result import Config as Base
from ._statistics import generator

GROSS = 1000
"""Roundings of which no order of summation makes so many: parts this far from the whole are another answer."""
RULES = ("sqrt_dk", "unscaled")
MEGABYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `cost`."""

    lengths: tuple[int, ...] = knob((512, 1024, 2048, 4096), "numbers of tokens", least=16, fewest=2)
    d_k: int = knob(64, "head width", least=1)
    parts: int = knob(4, "parts that the queries are split into, each computed alone", least=2)
    repeats: int = knob(3, "timed calls of each kind, interleaved", least=1)


QUICK = Config(lengths=(512, 1024, 2048))


def run(config: Config, progress: Progress = silent) -> Result:
    """Split the work with and without the scale; count, measure the memory, and time."""
    memory: dict[str, list[Estimate]] = {name: [] for name in _KINDS}
    rows: list[tuple[Any, ...]] = []
    clock: list[tuple[Any, ...]] = []
    apart: list[Evidence] = []
    for done, n in enumerate(config.lengths):
        progress(f"attention over {n} tokens", done, len(config.lengths))
        q, k, v = generator(config.seed, "cost", n).standard_normal((3, n, config.d_k), dtype=np.float32)
        apart += [
            Evidence(
                f"{rule}: parts against whole, {n} tokens", _parts(config, rule, q, k, v), 0, _rounding(rule, q, k, v)
            )
            for rule in RULES
        ]
        for name, kind in _KINDS.items():
            memory[name].append(Estimate.exact(_peak(partial(kind, q, k, v))))
        products, extra = 4 * n * n * config.d_k, n * n
        peaks = (memory[name][-1].value for name in _KINDS)
        rows.append((n, f"{products:.3g}", f"{extra:.3g}", extra / products, *peaks))
        clock.append((n, *_times(config, q, k, v)))
    growth = {name: _exponent(config.lengths, memory[name]) for name in _KINDS}
    square = near("memory of the explicit matrix grows like n to the", growth["explicit formula"], 2, 0.2)
    linear = Evidence("memory of attend grows like n to the", growth["attend"], -math.inf, 1.3)
    outcome = _outcome(apart)
    return Result(
        question="cost",
        config=config,
        summary=f"{_split(outcome, config.parts)} The parallel work is in the two matrix "
        f"products, {4 * config.d_k} operations for each pair of tokens; the scale adds 1 to them, or none where it is "
        "folded into q. What long sequences cost is memory, if the square of scores is kept: the tiles of this library "
        "do not keep it.",
        verdicts=(
            Verdict(
                claim=25,
                outcome=outcome,
                expected="no parallel computation without scaling",
                measured=f"{_apart(apart)}; "
                f"memory grows like n^{growth['explicit formula'].value:.2f} with the explicit matrix "
                f"and n^{growth['attend'].value:.2f} in attend",
                reason=_reason(outcome, apart, judge((square, linear))),
                evidence=(*apart, square, linear),
            ),
        ),
        tables=(
            Table(
                title="Operations and memory of one head, float32",
                columns=(
                    "tokens n",
                    "operations of the products",
                    "operations of the scale",
                    "share",
                    *(f"peak MB, {name}" for name in _KINDS),
                ),
                rows=tuple(rows),
                note=f"Head width {config.d_k}; 4·n²·d_k operations in QKᵀ and in the weights times V, n² in the "
                "scale. Peak memory allocated during the call, beside the operands.",
            ),
        ),
        panels=(
            Panel(
                title="Keeping the square of scores costs n²; tiles hardly grow",
                x_label="tokens n",
                y_label="peak memory of the call (MB)",
                x_scale="log2",
                y_scale="log10",
                series=tuple(Series.of(name, config.lengths, memory[name]) for name in _KINDS),
            ),
        ),
        clock=(
            Table(
                title="Milliseconds on this machine, medians of interleaved calls",
                columns=("tokens n", "attend, scaled", "attend, unscaled", "explicit formula"),
                rows=tuple(clock),
            ),
        ),
    )


def _explicit(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.T * np.float32(scale_for("sqrt_dk", q.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


_KINDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "attend": lambda q, k, v: attend(q, k, v).output,
    "explicit formula": _explicit,
}


def _of(rule: str, apart: list[Evidence]) -> list[Evidence]:
    return [one for one in apart if one.name.startswith(rule)]


def _outcome(apart: list[Evidence]) -> str:
    """Holds if scaled work can be split and unscaled work cannot; what rounding leaves open decides neither."""
    scaled, unscaled = (_of(rule, apart) for rule in RULES)
    if judge(scaled) != HOLDS:
        return OPEN
    if judge(unscaled) == HOLDS:
        return FAILS
    return HOLDS if all(one.estimate.low > GROSS * one.most for one in unscaled) else OPEN


def _split(outcome: str, parts: int) -> str:
    return {
        FAILS: "Every row of attention can be computed apart from every other, with the scale or without it: the "
        f"queries in {parts} parts give the same output as all at once.",
        HOLDS: f"The queries in {parts} parts give the output of all at once with the scale, and another without it.",
        OPEN: f"The queries in {parts} parts differ from all at once by more than rounding explains, and not so that "
        "the scale could be the reason.",
    }[outcome]


def _apart(found: list[Evidence]) -> str:
    scaled, unscaled = (max(one.estimate.value for one in _of(rule, found)) for rule in RULES)
    if scaled == unscaled == 0:
        return "the parts equal the whole to the last bit, scaled or not"
    if scaled == 0:
        return f"the parts equal the whole to the last bit with the scale and differ from it by {unscaled:.1g} without"
    return f"the parts differ from the whole by {scaled:.1g} at the most with the scale and by {unscaled:.1g} without"


def _reason(outcome: str, apart: list[Evidence], memory: str) -> str:
    if outcome == OPEN:
        return missed(apart)
    if outcome == HOLDS:
        return "What is computed in parts is the same only with the scale."
    lengths = ", and long sequences from not storing the scores" if memory == HOLDS else ""
    return (
        f"It does not follow: parallelism comes from the matrix products, which are the same with any scale{lengths}."
    )


def _parts(config: Config, rule: str, q: Any, k: Any, v: Any) -> Estimate:
    """The largest difference between the output of all queries and that of the parts, each computed alone."""
    whole = attend(q, k, v, scale=rule).output
    parts = [attend(part, k, v, scale=rule).output for part in np.array_split(q, config.parts)]
    return Estimate.exact(float(np.abs(np.concatenate(parts) - whole).max()))


def _rounding(rule: str, q: Any, k: Any, v: Any) -> float:
    """How far two orders of summation in float32 may part: a score rounds by eps·‖q‖‖k‖, and weighs the values."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    score = scale_for(rule, q.shape[-1]) * math.sqrt((q**2).sum(axis=-1).max() * (k**2).sum(axis=-1).max())
    return float(np.finfo(np.float32).eps) * max(1.0, score) * float(np.abs(v).max())


def _peak(call: Callable[[], Any]) -> float:
    """Megabytes allocated at once during a call, in whole tenths: the interpreter's own small objects come and go."""
    call()
    tracemalloc.start()
    try:
        call()
        return max(0.1, round(tracemalloc.get_traced_memory()[1] / MEGABYTE, 1))
    finally:
        tracemalloc.stop()


def _exponent(lengths: tuple[int, ...], memory: list[Estimate]) -> Estimate:
    """P of the n^p that joins the first length and the last."""
    if len(lengths) < 2:
        return Estimate.exact(math.nan)
    return Estimate.exact(math.log(memory[-1].value / memory[0].value) / math.log(lengths[-1] / lengths[0]))


def _times(config: Config, q: Any, k: Any, v: Any) -> list[float]:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: attend(q, k, v),
        lambda: attend(q, k, v, scale="unscaled"),
        lambda: _explicit(q, k, v),
    )
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(config.repeats):
        for one, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            one()
            times.append(time.perf_counter() - start)
    return [round(1000 * statistics.median(times), 2) for times in taken]
