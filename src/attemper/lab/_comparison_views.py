"""The comparison of unscaled with √d_k as tables and panels, all composed from what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from . import _comparison as by
from ._comparison import WITH, WITHOUT, Comparison
from ._result import Estimate, Panel, Series, Table
from ._runs import Record
from ._statistics import share_of
from ._study import MOMENTS
from ._study_data import Cell, Data

if TYPE_CHECKING:
    from .training import Config

NAMES = {
    "unscaled": "unscaled",
    "sqrt_dk": "√d_k",
    "dk": "d_k",
    "sqrt_dmodel": "√d_model",
    "cosine": "cosine, learned temperature",
    "qk_norm": "QK-norm and √d_k",
    "additive": "additive",
}
SCALES = {"head width": "log2", "depth": "log2", "learning rate": "log10"}


# Tables


def tables(config: Config, comparison: Comparison, data: Mapping[str, Data]) -> tuple[Table, ...]:
    """The rules at the base, the differences along each axis, what diverged, and what was read."""
    from .training import AXES

    along = [_along(config, comparison, axis, name) for axis, name in AXES.items()]
    return (
        *(_rules(config, comparison, task) for task in config.tasks),
        *(table for table in along if table is not None),
        _stability(config, comparison),
        Table(
            title="What was learned from",
            columns=("task", "size", "SHA-256"),
            rows=tuple((task, _size(task, one), one.digest) for task, one in data.items()),
            note="Each version of Python brings its own documentation, and with it another text."
            if "text" in data and config.text is None
            else "",
        ),
    )


def clock(comparison: Comparison) -> Table:
    """What the runs took of one processor."""
    rows = []
    for task in dict.fromkeys(cell.task for cell, _ in comparison.records):
        spent = [one["seconds"] for (cell, _), one in comparison.records.items() if cell.task == task]
        rows.append((task, len(spent), round(sum(spent)), round(sum(spent) / len(spent), 1), round(max(spent), 1)))
    return Table(
        title="Time",
        columns=("task", "runs", "seconds of one processor in all", "of a run on average", "of the longest"),
        rows=tuple(rows),
    )


def _size(task: str, data: Data) -> str:
    return f"{data.size} bytes" if task == "text" else f"{data.size} images"


def _rules(config: Config, comparison: Comparison, task: str) -> Table:
    base = config.base(task)
    rows = []
    for rule in dict.fromkeys((*config.rules, WITHOUT, WITH)):
        mean = partial(comparison.mean, dataclasses.replace(base, rule=rule))
        rows.append(
            (
                NAMES[rule],
                mean(lambda one: by.loss(one, "training")),
                mean(lambda one: by.loss(one, "validation")),
                mean(by.gap),
                *(_against(comparison, base, rule, part) for part in ("training", "validation")),
                mean(lambda one: one["validation_accuracy"]),
                mean(lambda one: by.vital(one, "normalized_entropy", 0)),
                mean(lambda one: by.vital(one, "normalized_entropy", by.EARLY)),
                *(mean(partial(by.vital, name=name)) for name in _LAST),
            )
        )
    return Table(
        title=f"The rules on {task}: {_place(base)}",
        columns=(
            "rule",
            "training loss",
            "validation loss",
            "validation − training",
            "training loss − that of √d_k",
            "validation loss − that of √d_k",
            "share of right answers",
            "entropy at the start",
            f"entropy after {MOMENTS[by.EARLY]:.0%}",
            *_LAST.values(),
        ),
        rows=tuple(rows),
        note=f"Means and 95 % intervals over {config.seeds} seeds; losses in nats. Entropy is normalised, over the "
        "layers; pressure is the gradient of the loss to the log of the scale, summed over the layers.",
    )


def _against(comparison: Comparison, base: Cell, rule: str, part: str) -> Estimate | None:
    """The loss of a rule less that of √d_k, seed by seed."""
    if rule == WITH:
        return None
    mine, other = (comparison.of(dataclasses.replace(base, rule=one)) for one in (rule, WITH))
    return by.mean_if_known(by.loss(a, part) - by.loss(b, part) for a, b in zip(mine, other, strict=True))


_LAST = {
    "normalized_entropy": "entropy at the end",
    "flow": "flow",
    "gradient_flow": "gradient flow",
    "pressure": "pressure",
    "max_logit": "largest logit",
    "score_std": "score deviation",
}


def _along(config: Config, comparison: Comparison, axis: str, name: str) -> Table | None:
    if len(config.along(axis, config.tasks[0])) < 2:
        return None
    rows = [
        (
            task,
            getattr(cell, name),
            *(
                comparison.mean(dataclasses.replace(cell, rule=rule), lambda one: by.loss(one, "training"))
                for rule in (WITH, WITHOUT)
            ),
            *(comparison.difference(cell, measure) for measure in by.MEASURES),
        )
        for task in config.tasks
        for cell in config.along(axis, task)
    ]
    return Table(
        title=f"Unscaled − √d_k along the {axis}",
        columns=(
            "task",
            axis,
            "training loss, √d_k",
            "training loss, unscaled",
            *(f"difference: {measure.name}" for measure in by.MEASURES),
        ),
        rows=tuple(rows),
        note=f"Paired by seed, 95 % intervals over {config.seeds} seeds. All else as at the base: "
        f"{_place(config.base(config.tasks[0]))}. A run whose loss is no longer a number counts with the loss that it "
        "started from. One that never gets to the half-way loss of √d_k counts as if it did at "
        "its last step, so that the difference is at least what is shown.",
    )


def _stability(config: Config, comparison: Comparison) -> Table:
    rows = []
    for task in config.tasks:
        for cell in config.along("learning rate", task):
            for rule in (WITH, WITHOUT):
                own = dataclasses.replace(cell, rule=rule)
                rise = comparison.mean(own, lambda one: one["rise"])
                rows.append((task, cell.learning_rate, NAMES[rule], share_of(*comparison.diverged([own], rule)), rise))
    return Table(
        title="Stability",
        columns=("task", "learning rate", "rule", "share of runs that diverged", "largest rise of the loss"),
        rows=tuple(rows),
        note="Diverged: the loss is no number, or ends above its start. The rise is that of the mean over ten steps "
        "above its lowest until then, in nats. Shares with Wilson's interval.",
    )


def _place(cell: Cell) -> str:
    return (
        f"head width {cell.head_dim}, depth {cell.depth}, learning rate {cell.learning_rate:g}, "
        f"initialiser {cell.initialiser}"
    )


# Panels


def panels(config: Config, comparison: Comparison) -> tuple[Panel, ...]:
    """Loss and entropy along the way at the base, and the difference along each axis."""
    from .training import AXES

    found = [_curves(config, comparison, task) for task in config.tasks]
    found.append(_entropies(config, comparison))
    for axis, name in AXES.items():
        if len(config.along(axis, config.tasks[0])) > 1:
            found.append(_differences(config, comparison, axis, name))
    return tuple(found)


def _curves(config: Config, comparison: Comparison, task: str) -> Panel:
    base = config.base(task)
    difference = comparison.difference(base, by.TRAINING)
    series = []
    for rule in (WITHOUT, WITH):
        cell = dataclasses.replace(base, rule=rule)
        points = [
            (at, comparison.mean(cell, partial(_curve_at, index=index)))
            for index, at in enumerate(point["step"] for point in comparison.of(cell)[0]["curve"])
        ]
        series.append(_series(NAMES[rule], points))
    return Panel(
        title=f"On {task} the training loss without √d_k {_ending(difference)}",
        x_label="step",
        y_label="training loss (nats)",
        # A loss that goes from 2 to 0.003 shows nothing of its end on a scale from 0.
        y_scale="log10",
        series=tuple(series),
    )


def _curve_at(record: Record, index: int) -> float:
    value = record["curve"][index]["loss"]
    return float("nan") if value is None else float(value)


def _entropies(config: Config, comparison: Comparison) -> Panel:
    series = []
    for task in config.tasks:
        for rule in (WITHOUT, WITH):
            cell = dataclasses.replace(config.base(task), rule=rule)
            points = [
                (round(share * config.steps), comparison.mean(cell, partial(_entropy_at, moment=moment)))
                for moment, share in enumerate(MOMENTS)
            ]
            series.append(_series(f"{task}, {NAMES[rule]}", points))
    found = {task: comparison.difference(config.base(task), by.ENTROPY) for task in config.tasks}
    sizes = " and ".join(f"{sized(one)} on {task}" for task, one in found.items())
    return Panel(
        title=f"A tenth of the way the entropy without √d_k differs by {sizes}",
        x_label="step",
        y_label="normalised entropy, mean over the layers",
        series=tuple(series),
    )


def _entropy_at(record: Record, moment: int) -> float:
    # A run that broke down has fewer moments; the mean is then over those that got here.
    return by.vital(record, "normalized_entropy", moment) if moment < len(record["moments"]) else float("nan")


def _differences(config: Config, comparison: Comparison, axis: str, name: str) -> Panel:
    series, above, of = [], 0, 0
    for task in config.tasks:
        points = [(getattr(cell, name), comparison.difference(cell, by.TRAINING)) for cell in config.along(axis, task)]
        known = [estimate for _, estimate in points if estimate is not None]
        above, of = above + sum(estimate.low > config.nats for estimate in known), of + len(known)
        series.append(_series(task, points))
    return Panel(
        title=f"By {axis}: without √d_k the training loss is more than {config.nats:g} nats higher at {above} of {of}",
        x_label=axis,
        y_label="training loss, unscaled − √d_k (nats)",
        kind="points" if axis == "initialiser" else "line",
        x_scale=SCALES.get(axis, "linear"),
        series=tuple(series),
        references=(("no difference", 0.0),),
    )


def _ending(difference: Estimate | None) -> str:
    if difference is None or difference.low <= 0 <= difference.high:
        return "cannot be told from that with it"
    size = difference if difference.value > 0 else difference.times(-1)
    return f"ends {size} nats {'higher' if difference.value > 0 else 'lower'} than with it"


def _series(name: str, points: Iterable[tuple[Any, Estimate | None]]) -> Series:
    known = [(at, estimate) for at, estimate in points if estimate is not None]
    return Series.of(name, [at for at, _ in known], [estimate for _, estimate in known])


def sized(estimate: Estimate | None) -> str:
    """A difference with its sign."""
    if estimate is None:
        return "an unmeasured amount"
    return f"{'+' if estimate.value >= 0 else ''}{estimate}"
