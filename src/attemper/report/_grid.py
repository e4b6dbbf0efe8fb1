"""Matrices as lines of styled text: numbers aligned, words as headings, folded to the width there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ._numbers import clean, finite, number
from ._terminal import Line, Span, _colour, columns

GAP = 2
LABEL = 12
"""The widest that the name of a row may be."""
NARROWEST = 5
"""A heading is cut this short before a column is left out."""

Matrix = Sequence[Sequence[Any]]


def clip(text: str, width: int) -> str:
    """At most `width` columns of a name, … where more were."""
    text = clean(text)
    if columns(text) <= width:
        return text
    cut = len(text)
    while columns(text[:cut]) > width - 1:
        cut -= 1
    return f"{text[:cut]}…"


def left(text: str, width: int) -> str:
    """The text and spaces behind it, in columns of a terminal."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Spaces and the text behind them, in columns of a terminal."""
    return " " * (width - columns(text)) + text


def signed(text: str) -> str:
    """With the minus of typography, and none before a zero."""
    return text.replace("-", "−" if any(digit in text for digit in "123456789") else "")


def decimals(values: Matrix) -> int | None:
    """As many as the largest number needs to be told from its neighbours; None where only a power of ten would do."""
    found = [abs(x) for row in values for value in row if (x := finite(value)) is not None]
    most = max(found, default=0.0)
    if most >= 1e6 or 0 < most < 1e-3:
        return None
    return 1 if most >= 100 else 2 if most >= 1 or most == 0 else min(2 - math.floor(math.log10(most)), 4)


def cell(value: Any, places: int | None) -> str:
    """One number of a matrix; a hidden score is a point."""
    x = finite(value)
    if x is None:
        return "·" if value == "-inf" else "∞" if value == "inf" else "?"
    return number(x, 3) if places is None else signed(f"{x:.{places}f}")


def cells(values: Matrix, visible: Matrix | None = None, rows: Sequence[int] | None = None) -> list[list[Span]]:
    """A matrix of numbers with one number of decimals, that of the rows which are shown; what is hidden is a point."""
    places = decimals(values if rows is None else [values[i] for i in rows])
    return [
        [("·", "dim") if visible and not visible[i][j] else (cell(x, places), "") for j, x in enumerate(row)]
        for i, row in enumerate(values)
    ]


def weights(values: Matrix, visible: Matrix) -> list[list[Span]]:
    """A matrix of weights, on the colour of their size."""
    return [
        [(f"{x:.3f}", shade(x)) if visible[i][j] else ("·", "dim") for j, x in enumerate(row)]
        for i, row in enumerate(values)
    ]


def shade(weight: float) -> str:
    """The style of a weight: dark for 0, light for 1."""
    red, green, blue = _colour(weight)
    ink = "#000000" if weight > 0.5 else "#ffffff"
    return f"{ink} on #{red:02x}{green:02x}{blue:02x}"


def label_width(names: Sequence[str]) -> int:
    """What the longest name of a row takes, within reason."""
    return min(max(columns(clean(name)) for name in names), LABEL)


def widths(headings: Sequence[str], matrices: Sequence[Sequence[Sequence[Span]]], room: int) -> list[int]:
    """The widths of as many columns as fit, each for all of the matrices; headings are cut before columns are."""
    needs = [max(columns(row[i][0]) for matrix in matrices for row in matrix) for i in range(len(headings))]
    for longest in range(LABEL, NARROWEST - 1, -1):
        found = [
            max(need, min(columns(clean(name)), longest)) + GAP for need, name in zip(needs, headings, strict=True)
        ]
        if sum(found) <= room:
            return found
    fitting: list[int] = []
    for width in found:
        if sum(fitting) + width > room and fitting:
            break
        fitting.append(width)
    return fitting


def heading(names: Sequence[str], sizes: Sequence[int]) -> Line:
    """Words over columns."""
    return [(right(clip(name, size - GAP), size), "bold") for name, size in zip(names, sizes, strict=False)]


def row(spans: Sequence[Span], sizes: Sequence[int]) -> Line:
    """Numbers under them; a colour covers the number and not the gap."""
    line: Line = []
    for (text, style), size in zip(spans, sizes, strict=False):
        line += [(" " * (size - columns(text)), ""), (text, style)]
    return line


def trimmed(line: Line) -> Line:
    """Without the spaces at its end."""
    spans = list(line)
    while spans and not spans[-1][0].strip():
        spans.pop()
    return [*spans[:-1], (spans[-1][0].rstrip(), spans[-1][1])] if spans else []


def bar(share: float, room: int) -> str:
    """A bar for a share of 1, to an eighth of a column."""
    eighths = round(min(max(share, 0.0), 1.0) * room * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
