"""A record as lines of styled text: plain for files and str(), coloured by rich where rich is there."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .._finding import SEVERITIES
from ._glossary import TERMS
from ._numbers import clean, plain
from ._view import known, view
from ._where import ranges

Span = tuple[str, str]
Line = list[Span]

WIDTH = 80
MOST_ROWS = 40
"""Longer maps put several layers in one row."""

_INDENT = "  "
_STYLES = {"error": "bold red", "warning": "bold yellow", "information": "bold blue", "healthy": "bold green"}
_MARKS = {"error": "x", "warning": "!"}
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))

_ENTROPY = next(term for term in TERMS if term.name == "normalized_entropy")


def to_text(record: Mapping[str, Any], width: int = WIDTH) -> str:
    """The record as plain text, no colour codes, in lines of at most `width` columns."""
    return plain_text(render(record, width))


def to_rich(record: Mapping[str, Any]) -> Any:
    """The record as something that rich prints, as wide as the console it meets."""
    # A record that cannot be shown says so here, not in the middle of a print.
    view(record)
    return Renderable(lambda width: render(record, width))


def plain_text(lines: Sequence[Line]) -> str:
    """The lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


class Renderable:
    """Waits for the console, whose width the lines have to fit."""

    def __init__(self, lines: Callable[[int], Sequence[Line]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line in self._lines(options.max_width):
            text = Text(no_wrap=True, end="\n")
            for part, style in line:
                text.append(part, style=style or None)
            yield text

    def __str__(self) -> str:
        return plain_text(self._lines(WIDTH))


def render(record: Mapping[str, Any], width: int) -> list[Line]:
    """Every line, as (text, rich style) spans."""
    width = max(width, 30)
    shown = view(record)
    record = plain(record)
    blocks = [
        _header(shown, width),
        _map(record, shown, width),
        *(_finding(finding, width) for finding in shown["findings"]),
        _probe(shown, width),
        _unseen(shown, width),
    ]
    lines: list[Line] = []
    for block in filter(None, blocks):
        if lines:
            lines.append([])
        lines += block
    return lines


def columns(text: str) -> int:
    """How many columns a terminal gives the text."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; a word that is longer is cut."""
    lines = [""]
    for word in clean(text).split(" "):
        while columns(word) > width:
            cut = max(1, width - (1 if columns(word) > len(word) else 0))
            while columns(word[:cut]) > width:
                cut -= 1
            if lines[-1]:
                lines.append("")
            lines[-1], word = word[:cut], word[cut:]
            lines.append("")
        if lines[-1] and columns(lines[-1]) + 1 + columns(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [line for line in lines if line] or [""]


def _paragraph(text: str, width: int, style: str = "", indent: str = "") -> list[Line]:
    return [[(indent, ""), (line, style)] for line in _fold(text, width - len(indent))]


def _labelled(label: str, text: str, width: int) -> list[Line]:
    """`label` in a column of its own, the text beside it."""
    column = 10
    folded = _fold(text, width - len(_INDENT) - column)
    heads = [label, *[""] * (len(folded) - 1)]
    return [[(_INDENT, ""), (f"{head:<{column}}", "dim"), (line, "")] for head, line in zip(heads, folded, strict=True)]


def _header(shown: Mapping[str, Any], width: int) -> list[Line]:
    verdict = shown["verdict"]
    lines: list[Line] = []
    lead = "attemper checkup  "
    for i, text in enumerate(_fold(shown["title"], width - len(lead))):
        lines.append([(lead if i == 0 else " " * len(lead), "dim"), (text, "bold")])
    lines += _paragraph(shown["subtitle"], width, "dim")
    lines.append([])
    style = _STYLES.get(verdict["severity"], "bold")
    folded = _fold(f"{verdict['lead']}: {verdict['sentence']}", width)
    cut = len(verdict["lead"]) + 1
    lines.append([(folded[0][:cut], style), (folded[0][cut:], "")])
    lines += [[(text, "")] for text in folded[1:]]
    for note in verdict["notes"]:
        lines += _paragraph(note, width, "dim")
    lines.append([])
    for fact in shown["numbers"]:
        note = f" ({fact['note']})" if fact["note"] else ""
        lines += _facts(fact["label"].lower(), fact["value"] + note, width)
        if fact["label"] == "Pressure" and shown["pressure"]:
            lines += _facts("", shown["pressure"]["reading"], width)
    return lines


def _facts(label: str, text: str, width: int) -> list[Line]:
    folded = _fold(text, width - 12)
    heads = [label, *[""] * (len(folded) - 1)]
    return [[(f"{head:<12}", "dim"), (line, "")] for head, line in zip(heads, folded, strict=True)]


def _colour(value: float) -> tuple[int, int, int]:
    at = min(max(value, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return red, green, blue


def _cell(value: float | None, mark: str, wide: bool) -> Span:
    if value is None:
        return (f"·{mark or ' '}" if wide else mark or "·"), "dim"
    digit = str(min(max(int(value * 10), 0), 9))
    red, green, blue = _colour(value)
    ink = "#000000" if value > 0.5 else "#ffffff"
    text = f"{digit}{mark or ' '}" if wide else mark or digit
    return text, f"{ink} on #{red:02x}{green:02x}{blue:02x}"


def _map(record: Mapping[str, Any], shown: Mapping[str, Any], width: int) -> list[Line]:
    if not any(vital["name"] == _ENTROPY.name for vital in shown["vitals"]):
        return []
    marks = _marks(shown)
    lines: list[Line] = [[("Normalised entropy", "bold"), (", a cell per head", "dim")]]
    seen: set[str] = set()
    for group in shown["groups"]:
        lines += _group(record, shown, group, marks, seen, width)
    ramp = [_cell(i / 10 + 0.05, "", True) for i in range(10)]
    lines.append([("one key ", "dim"), *ramp, (" all keys", "dim")])
    legend = {"x": "x error", "!": "! warning", "s": "s sink", "·": "· not measured"}
    if seen:
        lines += _paragraph(", ".join(text for mark, text in legend.items() if mark in seen), width, "dim")
    return lines


def _marks(shown: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """The mark of each head that a finding names; the gravest wins."""
    marks: dict[tuple[int, int], str] = {}
    for severity in SEVERITIES:
        for finding in shown["findings"]:
            mark = _MARKS.get(severity, "s" if finding["rule"] == "sink" else "")
            if finding["severity"] == severity and mark:
                for site, heads in finding["heads"]:
                    for head in heads:
                        marks.setdefault((site, head), "s" if finding["rule"] == "sink" else mark)
    return marks


def _group(
    record: Mapping[str, Any],
    shown: Mapping[str, Any],
    group: Mapping[str, Any],
    marks: Mapping[tuple[int, int], str],
    seen: set[str],
    width: int,
) -> list[Line]:
    sites = group["sites"]
    per_row = -(-len(sites) // MOST_ROWS)
    rows = [sites[i : i + per_row] for i in range(0, len(sites), per_row)]
    names = [_row_name([shown["sites"][i] for i in row]) for row in rows]
    word = "layer" if group["template"] else "site"
    label = min(max(map(columns, (*names, word))), width // 3)
    heads = max(shown["sites"][i]["heads"] for i in sites)
    room = width - label - 2
    wide = 2 * heads <= room
    per_cell = 1 if wide else -(-heads // room)
    lines: list[Line] = []
    if len(shown["groups"]) > 1 and group["template"]:
        lines += _paragraph(group["template"], width)
    cells = -(-heads // per_cell)
    lines.append([(f"{word:<{label}}  ", "dim"), (_scale(cells, per_cell, wide), "dim")])
    for name, row in zip(names, rows, strict=True):
        text = name if columns(name) <= label else f"…{name[1 - label :]}"
        line: Line = [(f"{text:<{label}}  ", "dim")]
        for cell in range(cells):
            among = [(i, h) for i in row for h in range(cell * per_cell, (cell + 1) * per_cell)]
            held = [(i, h) for i, h in among if h < shown["sites"][i]["heads"]]
            if not held:
                continue
            every = [_value(record["vitals"][i], h) for i, h in held]
            values = [v for v in every if v is not None]
            mean = sum(values) / len(values) if values else None
            mark = _gravest([marks.get(at, "") for at in held])
            seen.update({mark} - {""}, set() if values else {"·"})
            line.append(_cell(mean, mark, wide))
        lines.append(line)
    if per_row > 1 or per_cell > 1:
        parts = [
            f"{n} {what} to a {unit}" for n, what, unit in ((per_row, "layers", "row"), (per_cell, "heads", "cell"))
        ]
        text = " and ".join(part for part, n in zip(parts, (per_row, per_cell), strict=True) if n > 1)
        lines += _paragraph(f"Condensed, {text}: means of the heads; s where half of them are sinks.", width, "dim")
    return lines


def _gravest(found: Sequence[str]) -> str:
    """The mark of a cell: a fault shows wherever it is, a sink only in half of the heads or more."""
    if 2 * found.count("s") < len(found):
        found = [mark for mark in found if mark != "s"]
    return next((mark for mark in ("x", "!", "s") if mark in found), "")


def _value(vital: Mapping[str, Any], head: int) -> float | None:
    values = vital.get(_ENTROPY.name) or ()
    return known(_ENTROPY, values[head]) if head < len(values) else None


def _row_name(row: Sequence[Mapping[str, Any]]) -> str:
    shorts = [clean(site["short"]) for site in row]
    if len(row) > 1 and all(short.isdigit() for short in shorts):
        return ranges(int(short) for short in shorts).replace(", ", "–")
    return shorts[0] if len(row) == 1 else f"{shorts[0]}–{shorts[-1]}"


def _scale(cells: int, per_cell: int, wide: bool) -> str:
    """Head numbers over the columns, as many as fit without touching."""
    step = 2 if wide else 1
    line = [" "] * (cells * step + 4)
    free = 0
    every = 1 if wide and cells <= 10 else 5 if wide else 8
    for cell in range(0, cells, every):
        text = str(cell * per_cell)
        at = cell * step
        if at >= free:
            line[at : at + len(text)] = text
            free = at + len(text) + 1
    return "".join(line).rstrip()


def _finding(finding: Mapping[str, Any], width: int) -> list[Line]:
    severity = finding["severity"]
    lines: list[Line] = []
    lead = f"{severity.upper()}  "
    for i, text in enumerate(_fold(finding["rule"], width - len(lead))):
        lines.append([(lead if i == 0 else " " * len(lead), _STYLES.get(severity, "bold")), (text, "bold")])
    lines += _paragraph(finding["headline"], width, "", _INDENT)
    evidence = ", ".join(f"{item['label']} {item['text']}" for item in finding["evidence"])
    for label, text in (
        ("where", finding["where"]),
        ("evidence", evidence),
        ("cause", finding["cause"]),
        ("remedy", finding["remedy"]),
        ("docs", finding["docs"]),
    ):
        if text:
            lines += _labelled(label, text, width)
    return lines


def _probe(shown: Mapping[str, Any], width: int) -> list[Line]:
    probe = shown["probe"]
    if not probe:
        return []
    lines: list[Line] = [[("Loss with every scale multiplied", "bold")]]
    points = probe["points"]
    factors = [f"×{point['text']}" for point in points]
    losses = [point["loss_text"] for point in points]
    first, second = max(map(len, factors)), max(map(len, losses))
    measured = [p["loss"] for p in points if isinstance(p["loss"], (int, float))]
    low, high = (min(measured), max(measured)) if measured else (0.0, 0.0)
    room = max(4, min(40, width - first - second - 16))
    for i, point in enumerate(points):
        line: Line = [(f"{_INDENT}{factors[i]:<{first}}  {losses[i]:>{second}}  ", "")]
        if isinstance(point["loss"], (int, float)):
            share = (point["loss"] - low) / (high - low) if high > low else 0.0
            line.append(("█" * round(share * room) or "▏", "cyan"))
        if i == probe["least"]:
            line.append((" least", "bold green"))
        lines.append(line)
    return lines + _paragraph(probe["reading"], width, "", _INDENT)


def _unseen(shown: Mapping[str, Any], width: int) -> list[Line]:
    if not shown["unseen"]:
        return []
    lines: list[Line] = [[("Not read", "bold")]]
    for item in shown["unseen"]:
        lines += _paragraph(f"{item['path']}: {item['why']}", width, "", _INDENT)
    return lines
