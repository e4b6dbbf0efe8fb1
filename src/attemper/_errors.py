"""Every exception that attemper raises on purpose, and the form of its message.

    AttemperError
    ├── ShapeError      ValueError   operands that do not fit each other
    ├── DtypeError      TypeError    an element type that attention cannot use
    ├── FrameworkError  TypeError    not an array, or arrays of two frameworks or devices
    ├── OptionError     ValueError   an argument outside its meaning
    ├── BackendError    ValueError   a backend that cannot take this call
    └── SizeError       ValueError   an explicit matrix that would not fit in memory

A message is one sentence that names the operand, a line for every operand involved, and the fix:

    k has head_dim 32, but q has head_dim 64.
      q  (batch 2, heads 8, queries 128, head_dim 64)  float16 cuda:0
      k  (batch 2, heads 8, keys 128,    head_dim 32)  float16 cuda:0
      q·k needs one head_dim.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class AttemperError(Exception):
    """The root of everything attemper raises on purpose."""


class ShapeError(AttemperError, ValueError):
    """Operands that do not fit each other."""


class DtypeError(AttemperError, TypeError):
    """An element type that attention cannot use."""


class FrameworkError(AttemperError, TypeError):
    """Not an array, or arrays of two frameworks or devices."""


class OptionError(AttemperError, ValueError):
    """An argument outside its meaning."""


class BackendError(AttemperError, ValueError):
    """A backend that cannot take this call."""


class SizeError(AttemperError, ValueError):
    """An explicit matrix that would not fit in memory."""


class Operand(NamedTuple):
    """What a message shows of one operand."""

    name: str
    axes: Sequence[str]
    shape: Sequence[int]
    kind: str  # the element type and where it lives


def explain(headline: str, fix: str, operands: Iterable[Operand] = ()) -> str:
    """The text of an error: headline, one aligned line per operand, fix."""
    rows = [(o.name, [f"{axis} {n}" for axis, n in zip(o.axes, o.shape, strict=True)], o.kind) for o in operands]
    # Axes are aligned from the right, where q, k, v and a mask correspond.
    depth = max([0, *(len(axes) for _, axes, _ in rows)])
    names = max([0, *(len(name) for name, _, _ in rows)])
    columns = [max([0, *(len(axes[-i]) for _, axes, _ in rows if len(axes) >= i)]) for i in range(depth, 0, -1)]
    shapes = []
    for _, axes, _ in rows:
        missing = depth - len(axes)
        cells = [
            axis + ("," if i < len(axes) - 1 else "") + " " * (width - len(axis))
            for i, (axis, width) in enumerate(zip(axes, columns[missing:], strict=True))
        ]
        indent = sum(width + len(", ") for width in columns[:missing])
        shapes.append(f"{' ' * indent}({' '.join(cells).rstrip()})")
    widest = max([0, *map(len, shapes)])
    lines = [headline]
    for (name, _, kind), shape in zip(rows, shapes, strict=True):
        lines.append(f"  {name:<{names}}  {shape:<{widest}}  {kind}".rstrip())
    lines.append(f"  {fix}")
    return "\n".join(lines)


def brief(value: object) -> str:
    """A value as a message quotes it: on one line, and not at length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the repr of a stranger, or of an int with thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:79]}…"


def unknown(kind: str, given: object, known: Iterable[str]) -> OptionError:
    """The error for a name that is not on the list, with the nearest one that is."""
    names = list(known)
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.5) if isinstance(given, str) else []
    guess = f"Did you mean {near[0]!r}? " if near else ""
    choices = ", ".join(repr(name) for name in names)
    return OptionError(explain(f"{kind} {brief(given)} is not known.", f"{guess}Choose from {choices}."))
