"""Unscaled against √d_k, seed by seed: what is compared, where, and with which interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._result import FAILS, HOLDS, ONLY_IF, OPEN, Estimate, Evidence
from ._runs import Record, Run
from ._statistics import mean_of
from ._study import MOMENTS
from ._study_data import Cell

WITHOUT, WITH = "unscaled", "sqrt_dk"
EARLY = MOMENTS.index(0.1)
"""The moment at which attention is asked whether it has made up its mind: a tenth of the way."""


# What a record says


def loss(record: Record, name: str) -> float:
    """The loss at the end; that of a run which broke down counts as the one it started from: it learned nothing."""
    value = record[name] if record["finite"] else None
    return float(record["start"] if value is None else value)


def gap(record: Record) -> float:
    """Validation loss less training loss at the end."""
    return loss(record, "validation") - loss(record, "training")


def vital(record: Record, name: str, moment: int = -1) -> float:
    """A vital at a moment over the layers: the largest logit, the sum of the pressures, the mean of all else."""
    looks = record["moments"]
    layers = looks[min(moment, len(looks) - 1)]["layers"]
    values = [layer[name] for layer in layers if layer[name] is not None]
    if not values:
        return math.nan
    together: Any = {"max_logit": np.max, "pressure": np.sum}.get(name, np.mean)
    return float(together(values))


def steps_to(record: Record, target: float) -> float:
    """The share of the steps after which the loss is first at the target; 1 where it never is."""
    points = [(point["step"], point["loss"]) for point in record["curve"]]
    last = points[-1][0]
    before = None
    for step, at in points:
        if at is None:
            break
        if at <= target:
            if before is None or before[1] <= at:
                return float(step / last)
            share = (before[1] - target) / (before[1] - at)
            return float((before[0] + share * (step - before[0])) / last)
        before = (step, at)
    return 1.0


def later(without: Record, reference: Record) -> float:
    """How much later, as a share of the steps, the loss is where √d_k has brought it half-way."""
    curve = reference["curve"]
    target = curve[len(curve) // 2 - 1]["loss"]
    if target is None:
        return 0.0
    return steps_to(without, target) - steps_to(reference, target)


def gap_at_equal_loss(without: Record, reference: Record) -> float:
    """The difference of the gaps when both have the training loss at which the one that is behind ended."""
    ends = [one["moments"][-1]["training"] for one in (without, reference)]
    if None in ends:
        return math.nan
    return _gap_at(without, max(ends)) - _gap_at(reference, max(ends))


def _gap_at(record: Record, target: float) -> float:
    before = None
    for look in record["moments"]:
        training, validation = look["training"], look["validation"]
        if training is None or validation is None:
            break
        if training <= target:
            if before is None or before[0] <= training:
                return float(validation - training)
            share = (before[0] - target) / (before[0] - training)
            return float(before[1] + share * (validation - training - before[1]))
        before = (training, validation - training)
    return math.nan


@dataclass(frozen=True)
class Measure:
    """A difference, unscaled less √d_k, that a part of the claim speaks of."""

    part: str
    """What the claim says, in its words."""
    name: str
    unit: str
    """nats, or a share between 0 and 1."""
    of: Callable[[Record, Record], float]
    sign: int = 1
    """1 where the claim wants the difference above 0, −1 where below."""

    def evidence(self, where: str, difference: Estimate, margin: float) -> Evidence:
        """The claim wants more than the smallest difference that matters."""
        name = f"{self.name}, unscaled − √d_k: {where}"
        return Evidence(name, difference, least=margin) if self.sign > 0 else Evidence(name, difference, most=-margin)


def _simple(of: Callable[[Record], float]) -> Callable[[Record, Record], float]:
    return lambda without, reference: of(without) - of(reference)


TRAINING = Measure("ends worse", "training loss", "nats", _simple(lambda one: loss(one, "training")))
VALIDATION = Measure("is worse on new data", "validation loss", "nats", _simple(lambda one: loss(one, "validation")))
LATER = Measure("is slower", "steps to the half-way loss of √d_k, share of all", "share", later)
ENTROPY = Measure(
    "commits too early",
    f"normalised entropy after {MOMENTS[EARLY]:.0%} of the steps",
    "share",
    _simple(lambda one: vital(one, "normalized_entropy", EARLY)),
    -1,
)
GAP = Measure("generalises worse", "validation − training loss", "nats", _simple(gap))
EQUAL = Measure(
    "generalises worse at equal training loss",
    "validation − training loss at equal training loss",
    "nats",
    gap_at_equal_loss,
)
UNSTABLE, DEEPER = "is unstable", "is worse when deeper"
MEASURES = (LATER, TRAINING, VALIDATION, ENTROPY, GAP, EQUAL)

HARM = (LATER.part, TRAINING.part, VALIDATION.part, GAP.part, EQUAL.part, UNSTABLE)
"""The parts of which one at least must hold for training to suffer: attention may be sharp and do no harm."""


# What the records of a study say


class Comparison:
    """The records of a study, paired by seed."""

    def __init__(self, records: Mapping[Run, Record]) -> None:
        self.records = records
        self.seeds = tuple(dict.fromkeys(seed for _, seed in records))

    def of(self, cell: Cell) -> list[Record]:
        """The records of a cell, in the order of the seeds."""
        return [self.records[cell, seed] for seed in self.seeds if (cell, seed) in self.records]

    def mean(self, cell: Cell, of: Callable[[Record], float]) -> Estimate | None:
        """The mean over the seeds."""
        return mean_if_known(map(of, self.of(cell)))

    def paired(self, cell: Cell, measure: Measure) -> list[float]:
        """The differences at a cell, one a seed."""
        without, reference = (self.of(dataclasses.replace(cell, rule=rule)) for rule in (WITHOUT, WITH))
        return [measure.of(one, other) for one, other in zip(without, reference, strict=True)]

    def difference(self, cell: Cell, measure: Measure) -> Estimate | None:
        """Unscaled less √d_k, with the interval over the seeds; None where it could not be measured."""
        return mean_if_known(self.paired(cell, measure))

    def interaction(self, deep: Cell, shallow: Cell, measure: Measure) -> Estimate | None:
        """How much larger the difference is at one cell than at the other."""
        return mean_if_known(
            a - b for a, b in zip(self.paired(deep, measure), self.paired(shallow, measure), strict=True)
        )

    def best(self, cells: Iterable[Cell], rule: str) -> Cell:
        """The cell of the lowest mean validation loss."""

        def mean(cell: Cell) -> float:
            return float(np.mean([loss(one, "validation") for one in self.of(cell)]))

        return min((dataclasses.replace(cell, rule=rule) for cell in cells), key=mean)

    def diverged(self, cells: Iterable[Cell], rule: str) -> tuple[int, int]:
        """How many runs diverged, and how many there were."""
        runs = [one for cell in cells for one in self.of(dataclasses.replace(cell, rule=rule))]
        return sum(one["diverged"] for one in runs), len(runs)


def mean_if_known(values: Iterable[float]) -> Estimate | None:
    """The mean of what is a number; None with fewer than two."""
    known = [value for value in values if math.isfinite(value)]
    return mean_of(known) if len(known) > 1 else None


def share_difference(one: Estimate, other: Estimate) -> Estimate:
    """One share less another, by Newcombe's interval (1998, method 10)."""
    value = one.value - other.value
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(value, value - below, value + above, one.count + other.count)


# What follows


@dataclass(frozen=True)
class Point:
    """A piece of evidence, with the part of the claim that it is of and where it was measured."""

    part: str
    task: str
    axis: str
    """head width, depth, learning rate, initialiser; or the empty word for what is of no one place."""
    at: Any
    evidence: Evidence

    @property
    def outcome(self) -> str:
        """What its interval says."""
        return self.evidence.outcome()


def conclude(points: Iterable[Point]) -> str:
    """The outcome of the claim, which is that every part holds wherever it was measured.

    Unstable or slower: one of the two is enough. Where training was harmed in more places than chance would have it,
    but not everything holds everywhere, the claim holds under conditions. Else it does not hold if a part of it is
    refuted wherever it was measured, and is not decided if none is.
    """
    parts: dict[str, list[str]] = {}
    for point in points:
        parts.setdefault(point.part, []).append(point.outcome)
    wholly = {part: outcomes[0] if len(set(outcomes)) == 1 else OPEN for part, outcomes in parts.items()}
    either = {wholly.pop(part) for part in (LATER.part, UNSTABLE) if part in wholly}
    whole = {*wholly.values(), next((outcome for outcome in (HOLDS, OPEN, FAILS) if outcome in either), OPEN)}
    if whole == {HOLDS}:
        return HOLDS
    if any(outcomes.count(HOLDS) > by_chance(len(outcomes)) for part, outcomes in parts.items() if part in HARM):
        return ONLY_IF
    return FAILS if FAILS in whole else OPEN


def by_chance(count: int, each: float = 0.025, level: float = 0.95) -> int:
    """As many of `count` intervals as may lie beyond their bound by chance alone, at the level.

    >>> [by_chance(count) for count in (1, 4, 36)]
    [0, 1, 3]
    """
    below = 0.0
    for number in range(count + 1):
        below += math.comb(count, number) * each**number * (1 - each) ** (count - number)
        if below >= level:
            return number
    return count
