"""Does a model train worse without √d_k?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._progress import Progress, silent
from . import _comparison as by
from ._comparison import WITH, WITHOUT, Comparison, Point
from ._comparison_views import clock, panels, tables
from ._comparison_words import measured, reason, summary
from ._result import Config as Base
from ._result import Estimate, Evidence, Result, Verdict, knob, versions
from ._runs import Run, conduct
from ._statistics import share_of
from ._study_data import INITIALISERS, RULES, TASKS, Cell, Settings

AXES = {"head width": "head_dim", "depth": "depth", "learning rate": "learning_rate", "initialiser": "initialiser"}
"""What is varied one at a time, and the field of a Cell that holds it."""

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--jobs", {"type": int, "default": 1, "metavar": "N", "help": "training runs at a time, each in a process"}),
    (
        "--records",
        {
            "metavar": "PATH",
            "help": "a file to which every finished training run is added, and from which an interrupted study goes on",
        },
    ),
)
"""What the command line offers beside the knobs: keywords of `run`, on which no number depends."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `training`."""

    seeds: int = knob(5, "training runs of each condition", least=2)
    tasks: tuple[str, ...] = knob(TASKS, "what is learned", choices=TASKS)
    rules: tuple[str, ...] = knob(RULES, "rules of scaling, all compared at one condition", choices=RULES)
    head_dim: tuple[int, ...] = knob((16, 32, 64, 128, 256, 512), "head widths", least=1)
    depth: tuple[int, ...] = knob((1, 2, 4, 8), "layers", least=1)
    learning_rate: tuple[float, ...] = knob((1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "learning rates", least=1e-8)
    initialiser: tuple[str, ...] = knob(
        INITIALISERS, "unit: N(0, 1/fan_in); gpt: N(0, 0.02²); the first goes with all else", choices=INITIALISERS
    )
    at_head_dim: int = knob(64, "the head width at which all else is varied", least=1)
    at_depth: int = knob(2, "the depth at which all else is varied", least=1)
    at_learning_rate: float = knob(3e-3, "the learning rate at which all else is varied", least=1e-8)
    steps: int = knob(300, "steps of a run", least=10)
    batch: int = knob(16, "sequences of text in a step", least=1)
    images: int = knob(64, "images in a step", least=1)
    context: int = knob(64, "bytes in a sequence", least=2)
    width: int = knob(64, "width of the model", least=1)
    heads: int = knob(2, "heads of a layer", least=1)
    widening: int = knob(2, "how many times wider than the model the hidden layer of each MLP is", least=1)
    validation: int = knob(512, "sequences or images on which a loss is measured", least=4)
    length: int = knob(400_000, "bytes of text, of which every eighth block is kept for validation", least=1)
    text: str | None = knob(None, "a file to learn instead of the documentation that Python carries")
    digits: str | None = knob(None, "an .npz file with the images and labels, instead of scikit-learn's")
    nats: float = knob(0.02, "the smallest difference of losses that matters", least=0)
    share: float = knob(0.05, "the smallest difference of shares (of steps, of runs, of entropy) that matters", least=0)

    def base(self, task: str) -> Cell:
        """The condition that all axes go through."""
        return Cell(
            task=task,
            rule=WITH,
            initialiser=self.initialiser[0],
            head_dim=self.at_head_dim,
            depth=self.at_depth,
            learning_rate=self.at_learning_rate,
        )

    def along(self, axis: str, task: str) -> tuple[Cell, ...]:
        """The conditions along one axis, the base among them."""
        name, base = AXES[axis], self.base(task)
        values = (*getattr(self, name), getattr(base, name))
        ordered = dict.fromkeys(values) if name == "initialiser" else sorted(set(values))
        return tuple(dataclasses.replace(base, **{name: value}) for value in ordered)

    def higher_rates(self) -> tuple[Cell, ...]:
        """The conditions with a learning rate above the base, where instability would show."""
        return tuple(
            cell
            for task in self.tasks
            for cell in self.along("learning rate", task)
            if cell.learning_rate > self.at_learning_rate
        )

    def cells(self) -> tuple[Cell, ...]:
        """Every condition once."""
        found = [
            dataclasses.replace(cell, rule=rule)
            for task in dict.fromkeys(self.tasks)
            for axis in AXES
            for cell in self.along(axis, task)
            for rule in (WITHOUT, WITH)
        ]
        found += [dataclasses.replace(self.base(task), rule=rule) for task in self.tasks for rule in self.rules]
        return tuple(dict.fromkeys(found))

    def runs(self) -> tuple[Run, ...]:
        """Every training run."""
        return tuple((cell, self.seed + seed) for cell in self.cells() for seed in range(self.seeds))

    def settings(self) -> Settings:
        """What all runs have alike."""
        return Settings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)})


QUICK = Config(
    rules=(WITHOUT, WITH),
    head_dim=(16, 256),
    depth=(2,),
    learning_rate=(3e-3,),
    initialiser=("unit",),
    at_head_dim=256,
    steps=80,
    width=32,
    batch=8,
    images=32,
    validation=128,
)


def run(config: Config, progress: Progress = silent, *, jobs: int = 1, records: str | Path | None = None) -> Result:
    """Train the models of the design, or take them from the file of records, and compare them seed by seed."""
    made, data = conduct(config.runs(), config.settings(), progress, jobs=jobs, records=records)
    comparison = Comparison(made)
    points = evidence(config, comparison)
    verdict = Verdict(
        claim=23,
        outcome=by.conclude(points),
        expected="slower or unstable, committed too early, worse on new data, and the more so the deeper",
        measured=measured(config, points),
        reason=reason(config, comparison, points),
        evidence=tuple(point.evidence for point in points),
    )
    return Result(
        question="training",
        config=config,
        summary=summary(config, comparison, points),
        verdicts=(verdict,),
        tables=tables(config, comparison, data),
        panels=panels(config, comparison),
        clock=(clock(comparison),),
        versions=_versions(comparison),
    )


def _versions(comparison: Comparison) -> dict[str, str]:
    """The versions here, but of torch those that the runs were made with: they may come from another machine."""
    made = sorted({str(record["torch"]) for record in comparison.records.values() if "torch" in record})
    return {**versions(), **({"torch": ", ".join(made)} if made else {})}


def evidence(config: Config, comparison: Comparison) -> tuple[Point, ...]:
    """What the claim's parts rest on: every measure at every condition."""
    points: list[Point] = []

    def add(measure: by.Measure, cell: Cell, axis: str, at: Any, difference: Estimate | None, part: str = "") -> None:
        if difference is not None:
            margin = config.nats if measure.unit == "nats" else config.share
            where = f"{cell.task}, {axis} {at}"
            points.append(Point(part or measure.part, cell.task, axis, at, measure.evidence(where, difference, margin)))

    for task in config.tasks:
        for axis, name in AXES.items():
            for cell in config.along(axis, task):
                # The base lies on every axis and is judged on the first.
                if axis == "head width" or cell != config.base(task):
                    for measure in by.MEASURES:
                        add(measure, cell, axis, getattr(cell, name), comparison.difference(cell, measure))
        points += _at_best_rate(config, comparison, task)
        depths = config.along("depth", task)
        shallow, deep = depths[0], depths[-1]
        if deep != shallow:
            for measure in (by.TRAINING, by.VALIDATION):
                grown = comparison.interaction(deep, shallow, measure)
                at = f"{deep.depth} against {shallow.depth}"
                add(measure, deep, "depth", at, grown, by.DEEPER)
    return (*points, *_unstable(config, comparison))


def _at_best_rate(config: Config, comparison: Comparison, task: str) -> list[Point]:
    """Each rule at the learning rate that suits it: a rule is not worse because it wants another one."""
    cells = config.along("learning rate", task)
    if len(cells) < 2:
        return []
    best = {rule: comparison.best(cells, rule) for rule in (WITHOUT, WITH)}
    pairs = zip(*(comparison.of(best[rule]) for rule in (WITHOUT, WITH)), strict=True)
    difference = by.mean_if_known(by.TRAINING.of(one, other) for one, other in pairs)
    if difference is None:
        return []
    rates = f"{best[WITHOUT].learning_rate:g} and {best[WITH].learning_rate:g}"
    where = f"{task}, each at its best learning rate ({rates})"
    return [
        Point(
            by.TRAINING.part,
            task,
            "learning rate",
            "its best",
            by.TRAINING.evidence(where, difference, config.nats),
        )
    ]


def _unstable(config: Config, comparison: Comparison) -> list[Point]:
    """Runs that diverged at learning rates above the base, the tasks together."""
    cells = config.higher_rates()
    if not cells:
        return []
    shares = [share_of(*comparison.diverged(cells, rule)) for rule in (WITHOUT, WITH)]
    name = "share of runs that diverged at the higher learning rates, unscaled − √d_k"
    judged = Evidence(name, by.share_difference(*shares), least=config.share)
    return [Point(by.UNSTABLE, "", "learning rate", "higher", judged)]
