"""The comparison of unscaled with √d_k in sentences, all composed from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import _comparison as by
from ._comparison import WITH, WITHOUT, Comparison, Point
from ._comparison_views import sized
from ._result import FAILS, HOLDS, OPEN

if TYPE_CHECKING:
    from .training import Config


FEW = 4


def measured(config: Config, points: Sequence[Point]) -> str:
    """The difference of the losses at the base, by task."""
    found = []
    for task in config.tasks:
        for measure in (by.TRAINING, by.VALIDATION):
            at = [p for p in points if p.part == measure.part and p.task == task and p.axis == "head width"]
            found += [f"{measure.name} {sized(p.evidence.estimate)}" for p in at if p.at == config.at_head_dim]
        if found and not found[-1].endswith(")"):
            found[-1] += f" ({task})"
    return f"unscaled − √d_k at head width {config.at_head_dim}: " + ", ".join(found)


def reason(config: Config, comparison: Comparison, points: Sequence[Point]) -> str:
    """Where training ends worse, and which other parts of the claim hold where."""
    ends = "; ".join(f"on {task} {_conditions(config, points, task)}" for task in config.tasks)
    everywhere, others = [], []
    for part in dict.fromkeys(point.part for point in points if point.part != by.TRAINING.part):
        those = [point for point in points if point.part == part]
        held = [point for point in those if point.outcome == HOLDS]
        refuted = sum(point.outcome == FAILS for point in those)
        if len(held) == len(those):
            everywhere.append(f"“{part}”")
            continue
        # A few places can be named; many are counted, and listed in the tables.
        places = f" ({_within(held, those)})" if 0 < len(held) <= FEW else ""
        others.append(f"“{part}” holds in {len(held)} of {len(those)} comparisons{places} and is refuted in {refuted}")
    if everywhere:
        others.insert(0, f"{_and(everywhere)} {'hold' if len(everywhere) > 1 else 'holds'} wherever measured")
    said = [f"Without √d_k training ends worse {ends}."]
    if others:
        said.append(f"Of the other parts of the claim, {'; '.join(others)}.")
    said += [_stability_in_words(config, comparison), _not_tried(config, points)]
    return " ".join(one for one in said if one)


def _conditions(config: Config, points: Sequence[Point], task: str) -> str:
    """Where along each axis the training loss is higher."""
    from .training import AXES

    found: dict[str, dict[Any, str]] = {axis: {} for axis in AXES}
    for p in points:
        if p.part == by.TRAINING.part and p.task == task and p.at != "its best":
            found[p.axis][p.at] = p.outcome
    base = config.base(task)
    everywhere, others = [], []
    for axis, name in AXES.items():
        values = [getattr(cell, name) for cell in config.along(axis, task)]
        if len(values) < 2 and axis != "head width":
            continue
        # The base was judged among the head widths.
        at_base = found["head width"].get(base.head_dim)
        held = [at for at in values if (at_base if at == getattr(base, name) else found[axis].get(at)) == HOLDS]
        if len(held) == len(values):
            everywhere.append(axis)
        else:
            others.append(_at(axis, held) if held else f"at no {axis}".replace("at no init", "with no init"))
    if everywhere:
        others.insert(0, f"at every {_and(everywhere)}")
    return ", ".join(others)


def _within(points: Sequence[Point], judged: Sequence[Point]) -> str:
    """Where the points are, by task; `judged` are all places that were looked at."""
    if points[0].part == by.DEEPER:
        found: dict[str, list[str]] = {}
        for p in points:
            found.setdefault(p.task, []).append(p.evidence.name.partition(",")[0])
        return " and ".join(f"on {task} in the {_and(values)}" for task, values in found.items())
    told = []
    for task in dict.fromkeys(p.task for p in points):
        mine = [p for p in points if p.task == task]
        if len(mine) == sum(p.task == task for p in judged):
            told.append(f"everywhere on {task}")
            continue
        axes: dict[str, list[Any]] = {}
        for p in mine:
            axes.setdefault(p.axis, []).append(p.at)
        told.append(f"on {task} {', '.join(_at(axis, values) for axis, values in axes.items())}")
    return " and ".join(told)


def _at(axis: str, values: Sequence[Any]) -> str:
    return f"with the initialiser {_list(values)}" if axis == "initialiser" else f"at {axis} {_list(values)}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _list(values: Iterable[Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _stability_in_words(config: Config, comparison: Comparison) -> str:
    cells = config.higher_rates()
    if not cells:
        return ""
    (bad, runs), (as_bad, as_many) = (comparison.diverged(cells, rule) for rule in (WITHOUT, WITH))
    return (
        f"At learning rates above {config.at_learning_rate:g}, {bad} of {runs} runs without √d_k and {as_bad} of "
        f"{as_many} with it diverged."
    )


def _not_tried(config: Config, points: Sequence[Point]) -> str:
    """The parts of the claim of which this design can say nothing."""
    parts = {point.part for point in points}
    said = []
    if by.DEEPER not in parts:
        layers = f"{config.at_depth} layer{'' if config.at_depth == 1 else 's'}"
        said.append(f"Depth was not varied: all models have {layers}, and nothing is said of deeper ones.")
    if by.UNSTABLE not in parts:
        said.append(f"No learning rate above {config.at_learning_rate:g} was tried, where instability would show.")
    return " ".join(said)


def summary(config: Config, comparison: Comparison, points: Sequence[Point]) -> str:
    """What was found and where no harm was, in a few sentences."""
    losses = [p for p in points if p.part == by.TRAINING.part and p.at != "its best"]
    worse = [p for p in losses if p.outcome == HOLDS]
    opening = (
        f"{len(comparison.records)} models were trained, {config.seeds} seeds for each condition, and compared seed by "
        f"seed. Without √d_k the training loss ended more than {config.nats:g} nats higher in {len(worse)} of "
        f"{len(losses)} conditions."
    )
    sentences = [opening]
    harmless = [p for p in losses if p.outcome == FAILS]
    if harmless:
        sentences.append(f"No such harm was done with {_places(harmless)}.")
    undecided = [p for p in losses if p.outcome == OPEN]
    if undecided:
        sentences.append(f"It cannot be told with {_places(undecided)}.")
    best = [p for p in points if p.part == by.TRAINING.part and p.at == "its best"]
    if best:
        sizes = " and ".join(f"{sized(p.evidence.estimate)} on {p.task}" for p in best)
        sentences.append(f"Each at the learning rate that suits it best, the difference is {sizes}.")
    return " ".join(sentences)


def _places(points: Sequence[Point]) -> str:
    return "; ".join(f"{p.axis} {_list([p.at])} on {p.task} ({sized(p.evidence.estimate)})" for p in points)
