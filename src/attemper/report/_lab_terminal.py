"""A lab's record as lines of styled text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ._lab_chart import chart, pad
from ._lab_view import NOT_RUN, OUTCOMES, Record, cell_text, checked, is_estimate, is_number, outcome_of
from ._numbers import clean
from ._terminal import WIDTH, Line, Renderable, columns, plain_text
from ._terminal import _fold as fold
from ._terminal import _paragraph as paragraph

MOST_ROWS = 40
"""Of a table; the others are in the files."""

_STYLES = {"healthy": "bold green", "warning": "bold yellow", "error": "bold red", "unknown": "bold blue", "": "dim"}
_GAP = "  "


def lab_text(record: Record, width: int = WIDTH, clock: Sequence[Record] = ()) -> str:
    """The record as plain text in lines of at most `width` columns; `clock` are the tables of what the clock said."""
    return plain_text(render(record, width, clock))


def lab_rich(record: Record, clock: Sequence[Record] = ()) -> Any:
    """The record as something that rich prints, as wide as the console it meets."""
    checked(record)
    return Renderable(lambda width: render(record, width, clock))


def lab_summary(claims: Mapping[int, str], records: Sequence[Record]) -> Any:
    """Every claim with its outcome, as something that rich prints."""
    return Renderable(lambda width: summary(claims, records, width))


def render(record: Record, width: int, clock: Sequence[Record] = ()) -> list[Line]:
    """Every line, as (text, rich style) spans."""
    width = max(width, 30)
    checked(record)
    blocks = [
        _header(record, width),
        *(_verdict(verdict, width) for verdict in record["verdicts"]),
        *(chart(panel, width) for panel in record["panels"]),
        *(_table(table, width) for table in record["tables"]),
        *(_table(table, width, "What the clock said here; differs from run to run.") for table in clock),
        _again(record, width),
    ]
    lines: list[Line] = []
    for block in filter(None, blocks):
        lines += [[], *block] if lines else block
    return lines


def summary(claims: Mapping[int, str], records: Sequence[Record], width: int) -> list[Line]:
    """One line or two for every claim: its outcome and its words."""
    width = max(width, 30)
    # Two questions that agree about a claim are one answer.
    judged: dict[int, list[str]] = {}
    for record in records:
        for verdict in record["verdicts"]:
            outcomes = judged.setdefault(verdict["claim"], [])
            if verdict["outcome"] not in outcomes:
                outcomes.append(verdict["outcome"])
    room = max(map(len, OUTCOMES)) + 2
    lines: list[Line] = []
    for claim, says in claims.items():
        for outcome in judged.get(claim, [NOT_RUN]):
            known = OUTCOMES.get(outcome)
            mark, style = (known.mark, _STYLES[known.tone]) if known else ("–", "dim")
            folded = fold(says, width - room - 7)
            lines.append(
                [
                    (f"{mark} ", style),
                    (f"{claim:>2}  ", "dim"),
                    (f"{outcome:<{room}}", style),
                    (folded[0], ""),
                ]
            )
            lines += [[(" " * (room + 6) + text, "")] for text in folded[1:]]
    return lines


# Words


def _header(record: Record, width: int) -> list[Line]:
    lead = "attemper lab  "
    lines: list[Line] = []
    for i, text in enumerate(fold(record["title"], width - len(lead))):
        lines.append([(lead if i == 0 else " " * len(lead), "dim"), (text, "bold")])
    lines += paragraph(record["asks"], width, "italic")
    return [*lines, [], *paragraph(record["summary"], width)]


def _verdict(verdict: Record, width: int) -> list[Line]:
    outcome = outcome_of(verdict)
    style = _STYLES[outcome.tone]
    head = f"{outcome.mark} {verdict['outcome']}"
    number_of = "" if verdict["claim"] is None else f"claim {verdict['claim']}"
    lines: list[Line] = [[(head, style), (f"  {number_of}" if number_of else "", "dim")]]
    if verdict.get("says"):
        lines += paragraph(verdict["says"], width, "bold", _GAP)
    for label in ("expected", "measured", "reason"):
        text = str(verdict[label])
        if text:
            folded = fold(text, width - 12)
            heads = [label, *[""] * (len(folded) - 1)]
            lines += [[(f"  {name:<10}", "dim"), (line, "")] for name, line in zip(heads, folded, strict=True)]
    return lines


def _again(record: Record, width: int) -> list[Line]:
    lines: list[Line] = [[("Ask it again", "bold")]]
    lines += [[(f"  {line}", "cyan")] for line in _folded_command(clean(record["command"]), width - 4)]
    lines.append([])
    for code in record["code"].splitlines():
        lines += [[(f"  {line}", "cyan")] for line in _folded_code(clean(code), width - 2)]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [*lines, [], *paragraph(f"seed {record['config'].get('seed', 0)}; {versions}", width, "dim")]


def _folded_command(text: str, width: int) -> list[str]:
    """With the mark at the end of a line that tells a shell to read on."""
    lines = [""]
    for part in re.split(r" (?=--)", text):
        if lines[-1] and columns(lines[-1]) + 1 + columns(part) > width - 2:
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    whole = [piece for line in lines for piece in ([line] if columns(line) <= width - 2 else fold(line, width - 2))]
    return [f"{line} \\" for line in whole[:-1]] + whole[-1:]


def _folded_code(text: str, width: int) -> list[str]:
    """Broken between the knobs, where Python lets a call go on."""
    lines = [""]
    for part in re.split(r"(?<=,) (?=\w+=)", text):
        if lines[-1] and columns(lines[-1]) + 1 + columns(part) > width:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return [piece for line in lines for piece in ([line] if columns(line) <= width else fold(line, width))]


# Tables


def _table(table: Record, width: int, lead: str = "") -> list[Line]:
    lines = paragraph(table["title"], width, "bold")
    if lead:
        lines += paragraph(lead, width, "dim")
    rows = table["rows"][:MOST_ROWS]
    cells = [[row[i] for row in rows] for i in range(len(table["columns"]))]
    parts = [
        _Column(clean(str(head)), _texts(column), all(is_number(cell) or cell is None for cell in column))
        for head, column in zip(table["columns"], cells, strict=True)
    ]
    # What names a row stands before the first measured column.
    keys = next((i for i, column in enumerate(cells) if any(map(is_estimate, column))), 1) or 1
    lines += _grids(parts[:keys], parts[keys:], width) or _stacked(parts, width)
    if len(table["rows"]) > MOST_ROWS:
        lines += paragraph(
            f"… and {len(table['rows']) - MOST_ROWS} rows more, which --json and --html have.", width, "dim"
        )
    if table["note"]:
        lines += paragraph(table["note"], width, "dim")
    return lines


class _Column(NamedTuple):
    head: str
    texts: list[str]
    right: bool


def _texts(cells: Sequence[Any]) -> list[str]:
    """The cells as text; where they have errors, the ± one under the other."""
    texts = [clean(cell_text(cell)) for cell in cells]
    if not any(is_estimate(cell) for cell in cells):
        return texts
    parts = [text.partition(" ± ") for text in texts]
    left, right = max(len(part[0]) for part in parts), max(len(part[2]) for part in parts)
    return [f"{value:>{left}}{mark or (' ' * 3 if right else '')}{error:<{right}}" for value, mark, error in parts]


def _grids(keys: list[_Column], rest: list[_Column], width: int) -> list[Line]:
    """One grid, or several under each other with the row's names in each; nothing where not even that fits."""
    if (widths := _widths([*keys, *rest], width)) is not None:
        return _grid([*keys, *rest], widths)
    lines: list[Line] = []
    while rest:
        fits = next((n for n in range(len(rest), 0, -1) if _widths([*keys, *rest[:n]], width) is not None), 0)
        if not fits:
            return []
        part, rest = [*keys, *rest[:fits]], rest[fits:]
        grid = _grid(part, _widths(part, width) or [])
        lines += [[], *grid] if lines else grid
    return lines


def _widths(parts: Sequence[_Column], width: int) -> list[int] | None:
    """The width of each column, headings folded and words too if need be; None where the grid does not fit."""
    body = [max(map(columns, column.texts), default=0) for column in parts]
    word = [max(map(columns, column.head.split()), default=0) for column in parts]
    room = width - len(_GAP) * (len(parts) - 1)
    widths = [max(pair) for pair in zip(body, word, strict=True)]
    while sum(widths) > room:
        # Only words fold, and none below what a word needs.
        able = [i for i, column in enumerate(parts) if not column.right and widths[i] > max(12, word[i])]
        if not able:
            return None
        widths[max(able, key=lambda i: widths[i])] -= 1
    for i, column in enumerate(parts):
        widths[i] += min(max(0, columns(column.head) - widths[i]), room - sum(widths))
    return widths


def _grid(parts: Sequence[_Column], widths: Sequence[int]) -> list[Line]:
    def row(cells: Sequence[list[str]], style: str, bottom: bool) -> list[Line]:
        tall = max(map(len, cells))
        padded = [[""] * (tall - len(c)) + c if bottom else c + [""] * (tall - len(c)) for c in cells]
        joined = (
            _GAP.join(pad(cell[i], w, part.right) for cell, w, part in zip(padded, widths, parts, strict=True))
            for i in range(tall)
        )
        return [[(text.rstrip(), style)] for text in joined]

    lines = row([fold(part.head, w) for part, w in zip(parts, widths, strict=True)], "dim", True)
    for cells in zip(*(part.texts for part in parts), strict=True):
        folded = [[c] if columns(c) <= w else fold(c, w) for c, w in zip(cells, widths, strict=True)]
        lines += row(folded, "", False)
    return lines


def _stacked(parts: Sequence[_Column], width: int) -> list[Line]:
    """A block per row, where the columns do not fit side by side."""
    label = min(max((columns(part.head) for part in parts), default=0), width // 2 - 2)
    lines: list[Line] = []
    for cells in zip(*(part.texts for part in parts), strict=True):
        if lines:
            lines.append([])
        for part, cell in zip(parts, cells, strict=True):
            names, values = fold(part.head, label), fold(cell.strip(), width - label - 2)
            for j in range(max(len(names), len(values))):
                name, value = (piece[j] if j < len(piece) else "" for piece in (names, values))
                lines.append([(pad(name, label) + _GAP, "dim"), (value, "")])
    return lines
