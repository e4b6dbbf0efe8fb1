"""A lab's record as Markdown that renders alike in a README, an issue and a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from ._lab_view import Record, band_text, cell_text, checked, estimate_text, is_number, outcome_of
from ._markdown import _escape as escape
from ._markdown import _prose as prose


def lab_markdown(record: Record, clock: Sequence[Record] = ()) -> str:
    """The record as Markdown: verdicts, tables, how to ask it again."""
    checked(record)
    parts = [f"# {escape(record['title'])}", f"*{escape(record['asks'])}*", prose(record["summary"])]
    parts += [_verdict(verdict) for verdict in record["verdicts"]]
    for table in record["tables"]:
        parts += _table(table)
    for table in clock:
        parts += _table(table, "What the clock said on this machine; it differs from run to run.")
    parts += ["## Ask it again", f"```sh\n{record['command']}\n```", f"```python\n{record['code']}\n```"]
    parts.append(", ".join(f"{escape(name)} {escape(version)}" for name, version in record["versions"].items()))
    return "\n\n".join(filter(None, parts)) + "\n"


def _verdict(verdict: Record) -> str:
    outcome = outcome_of(verdict)
    number = "" if verdict["claim"] is None else f" (claim {verdict['claim']})"
    lines = [f"**{outcome.mark} {escape(verdict['outcome'])}**{number}"]
    if verdict["says"]:
        lines.append(f"> {prose(verdict['says'])}")
    told = [(name, str(verdict[name])) for name in ("expected", "measured", "reason")]
    facts = [f"- **{name}:** {prose(text)}" for name, text in told if text]
    facts += [
        f"- {escape(one['name'])}: {estimate_text(one['estimate'])}, wanted {band_text(one)}: {one['outcome']}"
        for one in verdict["evidence"]
    ]
    return "\n\n".join([*lines, "\n".join(facts)])


def _table(table: Record, lead: str = "") -> list[str]:
    heads = [escape(str(head)) for head in table["columns"]]
    right = [all(is_number(row[i]) or row[i] is None for row in table["rows"]) for i in range(len(heads))]
    rule = ["---:" if numeric else "---" for numeric in right]
    rows = [[escape(cell_text(cell)) for cell in row] for row in table["rows"]]
    grid = "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))
    return [f"## {escape(table['title'])}", lead, grid, prose(table["note"])]
