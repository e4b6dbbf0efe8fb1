"""What every rendering of a lab's record shares: the words of its outcomes and of its cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._errors import OptionError, brief, explain
from ._numbers import number, shown

SCHEMA = "attemper.lab/1"

Record = Mapping[str, Any]
Clock = Mapping[str, Sequence[Record]]
"""Per question the tables of what the clock said, which a record leaves out."""


class Outcome(NamedTuple):
    """How an outcome is marked, coloured and explained."""

    mark: str
    tone: str
    means: str


OUTCOMES = {
    "holds": Outcome("✓", "healthy", "the measurement bears it out"),
    "holds only if": Outcome("◐", "warning", "true under a condition that the reason names"),
    "does not hold": Outcome("✗", "error", "the measurement contradicts it"),
    "not decided": Outcome("?", "unknown", "the interval is too wide to say"),
}
NOT_RUN = "not run"


def checked(record: Record) -> Record:
    """The record, if it is one of the lab's."""
    if record.get("schema") != SCHEMA:
        raise OptionError(explain(f"The record's schema is {brief(record.get('schema'))}.", f"Pass one of {SCHEMA}."))
    return record


def outcome_of(verdict: Record) -> Outcome:
    """How to show a verdict's outcome."""
    return OUTCOMES.get(verdict["outcome"], OUTCOMES["not decided"])


def is_estimate(cell: Any) -> bool:
    """Whether a cell is a measured number with its interval."""
    return isinstance(cell, Mapping)


def is_number(cell: Any) -> bool:
    """Whether a cell belongs to the right of its column."""
    return is_estimate(cell) or (isinstance(cell, int | float) and not isinstance(cell, bool)) or cell in _SPECIAL


_SPECIAL = ("inf", "-inf", "nan")


def cell_text(cell: Any) -> str:
    """A cell as text; nothing for None."""
    if cell is None:
        return ""
    return estimate_text(cell) if is_estimate(cell) else shown(cell)


def estimate_text(estimate: Record) -> str:
    """`value ± half-width`, or the value alone where it was computed and not sampled."""
    value, low, high = (float(estimate[name]) for name in ("value", "low", "high"))
    if low == high or not math.isfinite(value):
        return number(value)
    half = (high - low) / 2
    if not math.isfinite(half):
        return f"{number(value, 3)} (one sample)"
    # Two digits of the half-width, and as many places of the value.
    places = max(0, 1 - math.floor(math.log10(half)))
    # A share near 0 or 1 does not lie in the middle of its interval.
    if abs((low + high) / 2 - value) > 0.1 * half:
        middle, least, most = (f"{at:.{min(places, _PLACES)}f}" for at in (value, low, high))
        return f"{middle} ({least} to {most})".replace("-", "−")
    if places > _PLACES:
        digits = max(1, math.floor(math.log10(abs(value) or half)) - math.floor(math.log10(half)) + 1)
        return f"{value:.{digits}g} ± {half:.1g}".replace("-", "−")
    return f"{value:.{places}f} ± {half:.{places}f}".replace("-", "−")


_PLACES = 6
"""Behind the point, at the most: a result has no more digits than that."""


def band_text(evidence: Record) -> str:
    """Where a claim wants a number, in words."""
    least, most = float(evidence["least"]), float(evidence["most"])
    if math.isinf(least) and math.isinf(most):
        return "anything"
    if math.isinf(least):
        return f"at most {number(most)}"
    if math.isinf(most):
        return f"at least {number(least)}"
    return number(least) if least == most else f"{number(least)} to {number(most)}"


def knob_text(value: Any) -> str:
    """A knob as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def floats(values: Sequence[Any]) -> list[float]:
    """The numbers of a series; JSON has infinities and NaN as words."""
    return [float(value) for value in values]
