"""A record as Markdown that renders alike in a README, an issue and a notebook."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ._numbers import clean
from ._view import view


def to_markdown(record: Mapping[str, Any]) -> str:
    """The record as Markdown: verdict, key numbers, findings, sites."""
    seen = view(record)
    verdict = seen["verdict"]
    parts = [
        f"# {_escape(seen['title'])}",
        _escape(seen["subtitle"]),
        f"**{verdict['lead']}:** {_prose(verdict['sentence'])}",
    ]
    parts += [_prose(note) for note in verdict["notes"]]
    facts = [[fact["label"], _escape(fact["value"]), _escape(fact["note"])] for fact in seen["numbers"]]
    parts.append(_table(["", "", ""], facts))
    if seen["pressure"]:
        parts.append(
            f"The pressure is {seen['pressure']['reading']}."
            if "zero" in seen["pressure"]["reading"]
            else f"By the pressure, {seen['pressure']['reading']}."
        )
    parts.append("## Findings")
    if seen["findings"]:
        parts.append(
            _table(
                ["Severity", "Rule", "Headline", "Where"],
                [
                    [f["severity"], _code(f["rule"]), _prose(f["headline"]), _escape(f["where"])]
                    for f in seen["findings"]
                ],
            )
        )
    else:
        parts.append("None.")
    for finding in seen["findings"]:
        evidence = "; ".join(f"{_escape(item['label'])} {_escape(item['text'])}" for item in finding["evidence"])
        parts.append(f"### {_escape(finding['rule'])} ({finding['severity']})")
        parts.append(_prose(finding["headline"]))
        rows = [
            ("Where", _escape(finding["where"])),
            ("Evidence", evidence),
            ("Cause", _prose(finding["cause"])),
            ("Remedy", _prose(finding["remedy"])),
            ("Docs", _escape(finding["docs"])),
        ]
        parts.append("\n".join(f"- **{label}:** {text}" for label, text in rows if text))
    if seen["probe"]:
        points = seen["probe"]["points"]
        rows_ = [
            [f"×{p['text']}", p["loss_text"], "least" if i == seen["probe"]["least"] else ""]
            for i, p in enumerate(points)
        ]
        parts += [
            "## Loss with every scale multiplied",
            _table(["Factor", "Loss", ""], rows_),
            seen["probe"]["reading"],
        ]
    parts.append("## Sites")
    table = seen["table"]
    if table["rows"]:
        body = [[_code(path), *map(_escape, rest)] for path, *rest in table["texts"]]
        parts.append(_table([column["label"] for column in table["columns"]], body, numeric=True))
        parts.append("Vitals are means over the heads; the largest logit is the largest of them.")
    else:
        parts.append("None.")
    if seen["unseen"]:
        parts.append("## Not read")
        parts.append("\n".join(f"- {_code(item['path'])}: {_prose(item['why'])}" for item in seen["unseen"]))
    return "\n\n".join(parts) + "\n"


def _table(header: list[str], rows: list[list[str]], *, numeric: bool = False) -> str:
    rule = ["---", *["---:" if numeric else "---"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _escape(text: str) -> str:
    """Literal text: nothing in a name is markup."""
    escaped = re.sub(r"([\\`*\[\]<>|~]|^[#+-])", r"\\\1", clean(text))
    # An underscore between letters is no emphasis: 1/√d_k stays as it is written.
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", escaped)


def _prose(text: str) -> str:
    """A sentence in which `code` between backticks stays code."""
    pieces = clean(text).split("`")
    if len(pieces) % 2 == 0:
        return _escape(text)
    return "".join(
        f"`{piece.replace('|', chr(92) + '|')}`" if i % 2 else _escape_piece(piece) for i, piece in enumerate(pieces)
    )


def _escape_piece(piece: str) -> str:
    """Literal text that keeps the spaces at its ends."""
    inner = _escape(piece)
    return f"{' ' * piece.startswith(' ')}{inner}{' ' * (piece.endswith(' ') and bool(inner))}"


def _code(text: str) -> str:
    """A code span, fenced by more backticks than the text holds."""
    text = clean(text).replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"
