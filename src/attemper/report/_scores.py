"""A worked example as lines of styled text: a dot product, or the softmax of a row of scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._grid import GAP, bar, right, signed
from ._numbers import finite, number
from ._terminal import Line, Span, _paragraph

INDENT = "   "
MOST = 40


def render(record: Mapping[str, Any], width: int) -> list[Line]:
    """Every line, as (text, rich style) spans."""
    return _dot(record, width) if record["kind"] == "dot" else _softmax(record, width)


def exact(value: Any) -> str:
    """A number to nine digits, without trailing zeros."""
    x = finite(value)
    return "∞" if value == "inf" else "−∞" if value == "-inf" else "?" if x is None else number(x, 9)


def weight(value: float) -> str:
    """Seven decimals, and a power of ten for what they would show as next to nothing."""
    return f"{value:.7f}" if value == 0 or value >= 1e-6 else number(value, 3)


def _vector(values: list[float]) -> str:
    shown = ", ".join(exact(value) for value in values[:MOST])
    return f"[{shown}{', …' if len(values) > MOST else ''}]"


def _dot(record: Mapping[str, Any], width: int) -> list[Line]:
    one, two = record["vectors"]
    lead = "attemper trace  "
    lines: list[Line] = [
        [(lead if i == 0 else " " * len(lead), "dim"), *line]
        for i, line in enumerate(_paragraph(f"{_vector(one)}·{_vector(two)}", width - len(lead), "bold"))
    ]
    table = [[exact(a), "×", exact(b), "=", exact(term)] for a, b, term in zip(one, two, record["terms"], strict=True)]
    shown = table[:MOST]
    sizes = [max(len(line[i]) for line in shown) for i in range(5)]
    lines += [[], [("1  ", "dim"), ("term by term", "bold cyan")]]
    lines += _paragraph("Each place of the one times the same place of the other.", width, "dim", INDENT)
    for line in shown:
        cells = " ".join(right(text, size) for text, size in zip(line, sizes, strict=True))
        lines.append([(INDENT + cells, "")])
    if len(table) > MOST:
        lines += _paragraph(f"… {len(table) - MOST} more; --json has all.", width, "dim", INDENT)
    lines += [[], [("2  ", "dim"), ("q·k, their sum", "bold cyan")]]
    product = exact(record["product"])
    lines.append([(INDENT, ""), (product, "bold")])
    if product == "?":
        lines += _paragraph("∞ − ∞ has no value: these numbers are too large for float64.", width, "dim", INDENT)
    d = record["d_k"]
    lines += [[], [("3  ", "dim"), ("q·k / √d_k", "bold cyan")]]
    lines += _paragraph(f"Both have d_k = {d} numbers: divided by √{d} = {number(d**0.5, 6)}.", width, "dim", INDENT)
    lines.append([(INDENT, ""), (exact(record["scaled_product"]), "bold")])
    return lines


def _softmax(record: Mapping[str, Any], width: int) -> list[Line]:
    scores = record["vectors"][0]
    lead = "attemper trace  softmax of "
    lines: list[Line] = [
        [(lead if i == 0 else " " * len(lead), "dim"), *line]
        for i, line in enumerate(_paragraph(_vector(scores), width - len(lead), "bold"))
    ]
    told = (
        "The largest score is taken from all of them first: the weights stay what they are, and no e^x can overflow. "
        "Then e^x, and each over the sum of all."
    )
    lines += _paragraph(told, width, "dim")
    lines += _one(record["unscaled"], "unscaled", width)
    if "scaled" in record:
        d = record["d_k"]
        lines += _one(record["scaled"], f"divided by √{d} = {number(d**0.5, 6)}", width)
    else:
        lines.append([])
        told = "With --d-k 64 the same scores divided by √64 = 8 stand beneath."
        lines += _paragraph(told, width, "dim")
    return lines


def _one(found: Mapping[str, Any], title: str, width: int) -> list[Line]:
    largest = exact(found["max"])
    # Subtracting a negative number is adding.
    less = f"score − {largest}" if not largest.startswith("−") else f"score + {largest[1:]}"
    headings = ["score", less, "e^x", "weight"]
    table = [
        [exact(score), exact(shifted), weight(power), weight(share)]
        for score, shifted, power, share in zip(
            found["scores"], found["shifted"], found["exponentials"], found["weights"], strict=True
        )
    ]
    total = ["", "sum", signed(f"{found['sum']:.7f}"), weight(sum(found["weights"]))]
    shown = table[:MOST]
    sizes = [max(len(line[i]) for line in (headings, *shown, total)) + GAP for i in range(4)]
    room = min(30, max(width - len(INDENT) - sum(sizes) - GAP, 0))
    lines: list[Line] = [[], [(title, "bold cyan")]]
    lines.append([(INDENT, ""), *((right(text, size), "bold") for text, size in zip(headings, sizes, strict=True))])
    for line, share in zip(shown, found["weights"], strict=False):
        spans: list[Span] = [(right(text, size), "") for text, size in zip(line, sizes, strict=True)]
        lines.append([(INDENT, ""), *spans, (" " * GAP, ""), (bar(share, room), "cyan")])
    if len(table) > MOST:
        lines += _paragraph(f"… {len(table) - MOST} more; --json has all.", width, "dim", INDENT)
    lines.append([(INDENT, ""), *((right(text, size), "dim") for text, size in zip(total, sizes, strict=True))])
    share = (
        "" if found["normalized_entropy"] is None else f" ({number(found['normalized_entropy'], 3)} of ln {len(table)})"
    )
    told = f"entropy {number(found['entropy'])} nats{share}, flow Σp(1−p) {number(found['flow'])}"
    lines += _paragraph(told, width, "dim", INDENT)
    return lines
