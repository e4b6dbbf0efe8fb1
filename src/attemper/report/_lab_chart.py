"""A panel of a lab's record as a chart made of blocks: the shape is seen without a display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ._lab_view import Record, cell_text, floats
from ._numbers import clean, number
from ._terminal import Line, columns
from ._terminal import _fold as fold
from ._terminal import _paragraph as paragraph

_SHADES = ("cyan", "magenta", "green", "yellow", "blue", "red", "white", "bright_black")
_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_GAP = "  "


def chart(panel: Record, width: int) -> list[Line]:
    lines = paragraph(panel["title"], width, "bold")
    over = f" over {panel['x_label']}" if panel["x_label"] else ""
    scale = {"linear": "", "symlog": ", logarithmic away from 0"}.get(panel["y_scale"], ", logarithmic")
    lines += paragraph(f"{panel['y_label']}{over}{scale}", width, "dim")
    lines += _bars(panel, width) if panel["kind"] == "bar" else _sparks(panel, width)
    if panel["references"]:
        known = [(label, number(float(at))) for label, at in panel["references"]]
        told = ", ".join(label if label == at else f"{label} = {at}" for label, at in known)
        lines += paragraph(f"for comparison: {told}", width, "dim")
    return lines


def _heights(panel: Record) -> list[list[float]]:
    """Every value's place between the least and the most of the panel, 0 to 1; NaN where it has none."""
    scale = panel["y_scale"]
    raw = [floats(one["y"]) for one in panel["series"]]
    sizes = [abs(y) for one in raw for y in one if y and math.isfinite(y)]
    least = min(sizes, default=1.0)

    def place(y: float) -> float:
        if not math.isfinite(y) or (scale.startswith("log") and y <= 0):
            return math.nan
        if scale.startswith("log"):
            return math.log(y)
        return math.copysign(math.log1p(abs(y) / least), y) if scale == "symlog" else y

    placed = [[place(y) for y in one] for one in raw]
    marked = [place(float(at)) for _, at in panel["references"]]
    known = [y for one in (*placed, marked) for y in one if not math.isnan(y)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    # From zero for bars, and where that does not flatten what is to be seen.
    if not scale.startswith("log") and (panel["kind"] == "bar" or 0 <= low <= high / 2):
        low, high = min(low, 0.0), max(high, 0.0)
    return [[(y - low) / (high - low) if high > low else 0.5 + 0 * y for y in one] for one in placed]


def _sparks(panel: Record, width: int) -> list[Line]:
    """A line of blocks per series, all on one scale, and its least and greatest value."""
    names = [clean(one["name"]) for one in panel["series"]]
    ends = [_ends(floats(one["y"])) for one in panel["series"]]
    label = min(max(map(columns, names), default=0), width * 2 // 5)
    end = max(map(columns, ends), default=0)
    places = list(dict.fromkeys(at for one in panel["series"] for at in one["x"]))
    above = width - label - end - 4 < min(len(places), 12)
    if above:
        label = 0
    indent = "" if above else " " * (label + len(_GAP))
    room = max(1, width - len(indent) - end - len(_GAP))
    marks = [clean(cell_text(at)) for at in places]
    step = max(map(columns, marks), default=1) + 1
    named = 0 < len(places) * step <= room + 1
    lines: list[Line] = []
    for i, (one, there) in enumerate(zip(panel["series"], _heights(panel), strict=True)):
        if named:
            at = dict(zip(one["x"], there, strict=True))
            chart = " ".join(_block(at.get(place, math.nan)) * (step - 1) for place in places)
        else:
            chart = "".join(_block(height) for height in _condensed(there, room))
        folded = fold(names[i], width if above else label) if names[i] else [""]
        shade, tail = _shade(i), (_GAP + ends[i], "dim")
        if above:
            lines += [*([(text, "")] for text in folded), [(chart, shade), tail]]
        else:
            lines.append([(pad(folded[0], label) + _GAP, ""), (chart, shade), tail])
            lines += [[(text, "")] for text in folded[1:]]
    if named:
        lines.append([(indent + " ".join(pad(mark, step - 1) for mark in marks), "dim")])
    elif marks:
        lines += paragraph(f"{panel['x_label']}: {marks[0]} … {marks[-1]}", width, "dim")
    return lines


def _ends(values: Sequence[float]) -> str:
    known = [y for y in values if math.isfinite(y)]
    if not known:
        return "no number"
    low, high = number(min(known), 3), number(max(known), 3)
    return low if low == high else f"{low} … {high}"


def _block(height: float) -> str:
    return "·" if math.isnan(height) else _LEVELS[min(int(height * len(_LEVELS)), len(_LEVELS) - 1)]


def _condensed(heights: Sequence[float], most: int) -> list[float]:
    """At most so many heights: each the mean of its neighbours."""
    if len(heights) <= most:
        return list(heights)
    edges = [round(i * len(heights) / most) for i in range(most + 1)]
    parts = ([y for y in heights[a:b] if not math.isnan(y)] for a, b in pairwise(edges))
    return [sum(part) / len(part) if part else math.nan for part in parts]


class _Bar(NamedTuple):
    word: str
    series: str
    height: float
    text: str
    shade: str


def _bars(panel: Record, width: int) -> list[Line]:
    """A bar per word and series, its value behind it."""
    many, zero = len(panel["series"]), _zero(panel)
    words = list(dict.fromkeys(at for one in panel["series"] for at in one["x"]))
    heights = _heights(panel)
    bars = [
        _Bar(clean(str(word)), clean(one["name"]) * (many > 1), heights[i][k], _measured(one, k), _shade(i))
        for word in words
        for i, one in enumerate(panel["series"])
        for k in [index for index, at in enumerate(one["x"]) if at == word]
    ]  # fmt: skip
    label = min(max((columns(bar.word) for bar in bars), default=0), width // 3)
    second = min(max((columns(bar.series) for bar in bars), default=0), width // 3)
    end = max((columns(bar.text) for bar in bars), default=0)
    beside = label + len(_GAP) + (second + len(_GAP) if second else 0)
    room = width - beside - end - 1
    if room < 8:
        # The words over the bars, where they do not fit beside them.
        room = max(1, min(40, width - end - 1))
        return [
            line
            for bar in bars
            for line in (
                *paragraph(", ".join(filter(None, (bar.word, bar.series))), width),
                [(_bar(bar.height, zero, room), bar.shade), (f" {bar.text}", "dim")],
            )
        ]
    room = min(40, room)
    lines: list[Line] = []
    last = None
    for bar in bars:
        heads = fold(bar.word, label) if bar.word != last else [""]
        series = fold(bar.series, second) if second else [""]
        last = bar.word
        for j in range(max(len(heads), len(series))):
            left, right = (part[j] if j < len(part) else "" for part in (heads, series))
            line: Line = [(pad(left, label) + _GAP + (pad(right, second) + _GAP if second else ""), "")]
            if not j:
                line += [(_bar(bar.height, zero, room), bar.shade), (f" {bar.text}", "dim")]
            lines.append(line)
    return lines


def _measured(one: Record, k: int) -> str:
    if not one["low"]:
        return number(float(one["y"][k]), 3)
    return cell_text({"value": one["y"][k], "low": one["low"][k], "high": one["high"][k]})


def _zero(panel: Record) -> float:
    """Where zero lies along the bars: at their foot, unless some go below it."""
    known = [y for one in panel["series"] for y in floats(one["y"]) if math.isfinite(y)]
    if min(known, default=0.0) >= 0 or panel["y_scale"].startswith("log"):
        return 0.0
    return _heights({**panel, "series": [*panel["series"], {"y": [0.0]}]})[-1][0]


def _bar(height: float, zero: float, room: int) -> str:
    if math.isnan(height):
        return "·"
    low, high = sorted((height, zero))
    start, stop = low * room, high * room
    if zero:
        return pad(" " * round(start) + "█" * max(round(stop) - round(start), 0) or "▏", room)
    whole, part = divmod(round(stop * 8), 8)
    return "█" * whole + (_EIGHTHS[part] if part else "") or "▏"


def _shade(i: int) -> str:
    return _SHADES[i % len(_SHADES)]


def pad(text: str, width: int, right: bool = False) -> str:
    """The text in so many columns."""
    space = " " * max(0, width - columns(text))
    return space + text if right else text + space
