"""The walk of a sentence through attention as lines of styled text, for rich and for plain files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _gaze, _scores
from ._grid import (
    GAP,
    Matrix,
    cells,
    clip,
    heading,
    label_width,
    left,
    right,
    row,
    signed,
    trimmed,
    weights,
    widths,
)
from ._numbers import clean, number, plural
from ._terminal import WIDTH, Line, Renderable, Span, _paragraph, plain_text

INDENT = "   "
NUMBERED = 1
"""Columns of a wide matrix that are always shown."""
MOST_ROWS = 40

_TITLES = {
    "largest_weight": "largest",
    "entropy": "entropy",
    "normalized_entropy": "share",
    "flow": "flow",
}


def walk_to_text(record: Mapping[str, Any], width: int = WIDTH) -> str:
    """The record of a walk, a gaze or vectors as plain text, in lines of at most `width` columns."""
    return plain_text(render(record, width))


def walk_to_rich(record: Mapping[str, Any]) -> Any:
    """The record of a walk, a gaze or vectors as something that rich prints, as wide as the console it meets."""
    return Renderable(lambda width: render(record, width))


def render(record: Mapping[str, Any], width: int) -> list[Line]:
    """Every line, as (text, rich style) spans."""
    render_one: Callable[[Mapping[str, Any], int], list[Line]] = {
        "attemper.walk/1": _walk,
        "attemper.gaze/1": _gaze.render,
        "attemper.scores/1": _scores.render,
    }[record["schema"]]
    return [trimmed(line) for line in render_one(record, max(width, 50))]


def _walk(record: Mapping[str, Any], width: int) -> list[Line]:
    steps, shapes, origin = record["steps"], record["shapes"], record["origin"]
    d_k, scale, seeded = record["d_k"], record["scale"], record["origin"]["kind"] == "seeded"
    page = _Page(record, width)
    page.title()

    if "X" in steps:
        told = "One row of numbers for each word, its embedding."
        if not seeded:
            told = "One row of numbers for each token: what this layer's attention is given."
        page.step(f"X  {_size(shapes['X'])}", told)
        page.wide(steps["X"], every=True)

    made = ", ".join(name for name in ("Q", "K", "V") if name in steps)
    page.step(f"{made}  {_size(shapes['Q'])} each", _asks(seeded))
    if "X" in steps:
        matrix = shapes.get("W_Q", [record["d_model"], d_k])
        page.say(f"W_Q, W_K and W_V are {_size(matrix)} each{'' if seeded else ', the part of this head'}.")
    if not seeded and origin["kv_heads"] < origin["heads"]:
        page.say(f"{origin['heads']} heads ask, {origin['kv_heads']} answer: heads share their K and V.")
    for name in ("Q", "K", "V"):
        if name in steps:
            page.wide(steps[name], f"{name} = X·W_{name}" if seeded else name, every=name != "Q")
    if "V" not in steps:
        page.say("The values, V, were not seen, so neither is the output.")

    told = f"Each query with each key: {d_k} products, summed. Diagonal: a word with itself."
    if not all(map(all, record["visible"])):
        told += " A · is hidden by the mask: what comes later." if _causal(record) else " A · is hidden by the mask."
    page.step(f"QKᵀ  {_size(shapes['scores'])}", told)
    page.square("scores")

    page.step(f"QKᵀ {_by(scale, d_k)}  {_size(shapes['scaled'])}", _scaling(scale, d_k, seeded))
    page.square("scaled")
    if "capped" in steps:
        page.say("This model then bends large scores down by a tanh (softcap):")
        page.square("capped")
    if "masked" in steps and _biased(record):
        page.say("And adds its own bias to them:")
        page.square("masked")

    told = "e^score over the sum of its row: every row adds up to 1."
    if any(sum(line) < 0.999 for line in steps["weights"]):
        told = (
            "e^score over the sum of its row. What a row lacks of 1 goes to a sink, a logit that the model has learnt."
        )
    page.step(f"softmax  {_size(shapes['weights'])}", told)
    page.pair(
        ("scaled", weights(steps["weights"], record["visible"])),
        ("unscaled", weights(steps["unscaled_weights"], record["visible"])),
    )
    page.rows()

    if "output" in steps:
        told = "Each row of weights mixes the rows of V: one new row for each word."
        page.step(f"softmax·V  {_size(shapes['output'])}", told)
        page.wide(steps["output"], "scaled")
        page.wide(steps["unscaled_output"], "unscaled")
    page.close()
    return page.lines


class _Page:
    """The lines of a walk, as they are put down."""

    def __init__(self, record: Mapping[str, Any], width: int) -> None:
        self.record, self.width = record, width
        self.tokens: list[str] = [clean(token) for token in record["tokens"]]
        self.lines: list[Line] = []
        self.label = label_width(self.tokens)
        self.room = width - len(INDENT) - self.label
        self.number = 0
        # One number of words for the whole page: what fits of the widest square matrix.
        squares = [cells(record["steps"][name], record["visible"]) for name in ("scores", "scaled")]
        self.sizes = widths(self.tokens, squares, self.room)
        asked = record["row"]
        self.every = list(range(min(len(self.sizes if asked is None else self.tokens), MOST_ROWS)))
        self.shown = self.every if asked is None else [asked]

    def say(self, text: str) -> None:
        self.lines += _paragraph(text, self.width, "dim", INDENT)

    def title(self) -> None:
        record, origin = self.record, self.record["origin"]
        lead = "attemper trace  "
        text = clean(record["text"]) or f"{len(self.tokens)} places"
        for i, line in enumerate(_paragraph(text, self.width - len(lead), "bold")):
            self.lines.append([(lead if i == 0 else " " * len(lead), "dim"), *line])
        if origin["kind"] == "seeded":
            told = (
                f"{plural(len(self.tokens), 'word')} through one head with random weights (seed {origin['seed']}); "
                f"d_model {record['d_model']}, d_k {record['d_k']}. A word has the same numbers in every sentence."
            )
        else:
            told = (
                f"{plural(len(self.tokens), 'token')} through {origin['model']}, layer {origin['layer']} of 0 to "
                f"{origin['layers'] - 1}, head {origin['head']} of 0 to {origin['heads'] - 1} ({origin['path']})."
            )
        self.lines += _paragraph(told, self.width, "dim")
        if record["row"] is not None:
            word = self.tokens[record["row"]]
            told = f"Of Q and the scores only the row of “{word}” is shown, word {record['row'] + 1}."
            if self.tokens.count(word) > 1:
                told += f" It stands {self.tokens.count(word)} times in the text: this is the last."
            self.lines += _paragraph(told, self.width, "dim")
        if len(self.every) < len(self.tokens):
            shown = len(self.every)
            why = f"what fits {self.width} columns" if shown == len(self.sizes) else "a page of them"
            noun = "words" if origin["kind"] == "seeded" else "tokens"
            told = f"Of the {len(self.tokens)} {noun} the first {shown} are shown, {why}; --json has all."
            self.lines += _paragraph(told, self.width, "yellow")

    def step(self, name: str, told: str) -> None:
        self.number += 1
        self.lines.append([])
        self.lines.append([(f"{self.number}  ", "dim"), (name, "bold cyan")])
        self.say(told)

    def wide(self, values: Matrix, title: str = "", *, every: bool = False) -> None:
        """The first columns of a matrix with many; of the row that was asked about, or of every word."""
        if title:
            self.lines.append([(INDENT, ""), (title, "bold")])
        rows = self.every if every else self.shown
        count = len(values[0])
        ends = f"  … {count} in all"
        shown = cells([values[i] for i in rows])
        size = max(len(text) for line in shown for text, _ in line) + GAP
        fit = max(NUMBERED, (self.room - len(ends)) // size)
        for i, line in zip(rows, shown, strict=True):
            spans = row(line[:fit], [size] * min(fit, count))
            # Once is enough for the number of columns.
            end = [] if count <= fit else [(ends if i == rows[0] else "  …", "dim")]
            self.lines.append([*self._name(i), *spans, *end])

    def square(self, step: str) -> None:
        """A matrix with the words beside and above it."""
        self._grids([("", cells(self.record["steps"][step], self.record["visible"], self.shown))])

    def pair(self, *grids: tuple[str, Sequence[Sequence[Span]]]) -> None:
        """Two of them, beside each other where there is room."""
        half = widths(self.tokens, [values for _, values in grids], (self.room - GAP) // 2)
        if self.record["row"] is not None or len(half) == len(self.tokens):
            self._grids(list(grids), half)
        else:
            for grid in grids:
                self._grids([grid])

    def _name(self, token: int) -> Line:
        return [(INDENT, ""), (left(clip(self.tokens[token], self.label), self.label), "bold")]

    def _grids(self, grids: list[tuple[str, Sequence[Sequence[Span]]]], sizes: list[int] | None = None) -> None:
        if self.record["row"] is not None:
            self._column(grids)
            return
        sizes = sizes or widths(self.tokens, [grids[0][1]], self.room)[: len(self.sizes)]
        blank: Line = [(INDENT + " " * self.label, "")]
        between = (" " * GAP, "")
        if any(title for title, _ in grids):
            across = sum(sizes) + GAP
            self.lines.append([*blank, *((left(" " * GAP + title, across), "bold") for title, _ in grids)])
        over = list(blank)
        for at, _ in enumerate(grids):
            over += [*([between] if at else []), *heading(self.tokens, sizes)]
        self.lines.append(over)
        for i in self.shown:
            line = self._name(i)
            for at, (_, values) in enumerate(grids):
                line += [*([between] if at else []), *row(values[i], sizes)]
            self.lines.append(line)

    def _column(self, grids: list[tuple[str, Sequence[Sequence[Span]]]]) -> None:
        """One row of a matrix, upright: any number of words fits."""
        asked = self.record["row"]
        sizes = [max(len(title), max(len(text) for text, _ in values[asked])) + GAP for title, values in grids]
        if any(title for title, _ in grids):
            titles = [(right(title, size), "bold") for (title, _), size in zip(grids, sizes, strict=True)]
            self.lines.append([(INDENT + " " * self.label, ""), *titles])
        for i in self.every:
            spans = row([values[asked][i] for _, values in grids], sizes)
            own: Line = [("  itself", "dim")] if i == asked else []
            self.lines.append([*self._name(i), *spans, *own])

    def rows(self) -> None:
        """What is told of each row of weights, scaled and not."""
        readings = self.record["readings"]
        groups = list(readings)
        size = 8
        beside = len(INDENT) + self.label + len(groups) * len(_TITLES) * size + GAP <= self.width
        self.lines.append([])
        for names in [groups] if beside else [[group] for group in groups]:
            over: Line = [(INDENT + " " * self.label, "")]
            titles = list(over)
            for at, name in enumerate(names):
                gap = " " * GAP if at else ""
                over.append((gap + left(" " + name, size * len(_TITLES)), "bold"))
                titles += [(gap, ""), *((right(title, size), "dim") for title in _TITLES.values())]
            self.lines += [over, titles]
            for i in self.shown:
                line = self._name(i)
                for at, name in enumerate(names):
                    line.append((" " * GAP if at else "", ""))
                    line += [(right(_told(readings[name][field][i]), size), "") for field in _TITLES]
                self.lines.append(line)
        count = len(self.tokens)
        most = f", here ln {count} = {number(math.log(count), 4)}" if all(map(all, self.record["visible"])) else ""
        self.say(
            "largest: the largest weight. entropy: in nats, 0 when one word takes all. share: entropy over ln of the "
            f"words seen{most}; 1 when all are alike. flow: Σp(1−p), how much gradient the softmax lets by."
        )

    def close(self) -> None:
        count = len(self.tokens)
        told = (
            f"Scaling changed numbers and no shape: QKᵀ is {count} × {count} for {count} words, whatever d_k is, and "
            "the output is as wide as V. A word is among its own keys, too: the diagonal is the attention that it pays "
            "to itself."
        )
        self.lines += [[], *_paragraph(told, self.width)]


def _told(value: Any) -> str:
    # A row that sees one key has no choice, and so no share.
    return "–" if value is None else signed(f"{value:.3f}")


def _size(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _asks(seeded: bool) -> str:
    told = "X times three matrices: what a word asks (Q), answers to (K), passes on (V)."
    return told if seeded else f"{told} Q and K are as they meet: after rotary positions, if any."


def is_root(scale: float, d_k: int) -> bool:
    """Whether a scale is 1/√d_k."""
    return math.isclose(scale, d_k**-0.5, rel_tol=1e-6)


def _by(scale: float, d_k: int) -> str:
    return "/ √d_k" if is_root(scale, d_k) else f"× {number(scale)}"


def _scaling(scale: float, d_k: int, seeded: bool) -> str:
    if seeded:
        root = math.sqrt(d_k)
        return f"Divided by √{d_k} = {number(root)}, so that the spread of the scores does not grow with d_k."
    if is_root(scale, d_k):
        return f"Times the model's own scale, {number(scale)} = 1/√{d_k}."
    return f"Times the model's own scale, {number(scale)}; 1/√{d_k} would be {number(d_k**-0.5)}."


def _causal(record: Mapping[str, Any]) -> bool:
    return all(shown == (j <= i) for i, line in enumerate(record["visible"]) for j, shown in enumerate(line))


def _biased(record: Mapping[str, Any]) -> bool:
    before = record["steps"].get("capped", record["steps"]["scaled"])
    return any(
        shown and abs(record["steps"]["masked"][i][j] - before[i][j]) > 1e-6
        for i, line in enumerate(record["visible"])
        for j, shown in enumerate(line)
    )
