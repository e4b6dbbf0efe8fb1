"""The lab's records as one HTML page that works from a disk, offline, and is read from top to bottom."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._html import page, script, static
from ._lab_figure import to_svg
from ._lab_view import (
    NOT_RUN,
    OUTCOMES,
    Clock,
    Record,
    band_text,
    cell_text,
    checked,
    is_estimate,
    is_number,
    knob_text,
    outcome_of,
)
from ._numbers import clean, plain, plural

MODULES = ("format", "theme", "lab")
"""The script's modules, each after those that it imports."""

LONG = 12
"""Tables of more rows are folded up until one asks for them."""

TITLE = "Why √d_k"

_MARK = (
    '<svg viewBox="0 0 24 24" class="mark" aria-hidden="true">'
    '<path d="M2 20 C8 20 8 4 12 4 C16 4 16 20 22 20" class="mark-curve"/>'
    '<circle cx="12" cy="4" r="2.4" class="mark-dot"/></svg>'
)

_OPENING = """
<p class="opening">Attention lets every word of a text look at all of its words, itself included, and take from them
what it needs. Each word asks with a vector q, its query; each word answers with a vector k, its key. Their dot product
q·k is a score: how well the answer fits the question. Softmax turns a row of scores into weights that sum to 1, and the
weights say how much of each word's value v goes into the result.</p>
<p class="formula" role="math" aria-label="Attention of Q, K and V is the softmax of Q times K transposed,
divided by the square root of d k, times V">Attention(<i>Q</i>, <i>K</i>, <i>V</i>) = softmax<span
class="tall">(</span><span class="fraction"><span><i>Q K</i><sup>T</sup></span><span>√<i>d</i><sub>k</sub></span></span
><span class="tall">)</span> <i>V</i></p>
<p class="opening">This page is about one part of that formula, the division by √d_k, where d_k is the number of
components of q and k. Many reasons are given for it. Here they stand as {count} claims, each put to a measurement that
runs on your own machine: some hold, some hold under a condition, some are wrong.</p>
"""

_READING = """<p class="small">A number after ± is half of a 95 % interval. An outcome is decided only where the whole
interval is on one side; claims about exact arithmetic have no interval.</p>
<details class="fold"><summary><h3>Words</h3></summary><dl class="glossary">
<dt>score</dt><dd>q·k, after whatever it is divided by.</dd>
<dt>entropy</dt><dd>How spread the weights of a row are, in nats; over ln n it is normalised, 1 where all n keys get the
same weight and 0 where one gets all.</dd>
<dt>flow</dt><dd>Σp(1−p) over the weights p of a row: near 1 where many keys share, 0 where one has all. It is the trace
of the derivative of softmax.</dd>
<dt>gradient flow</dt><dd>The share of the gradient's spread that passes softmax in a real backward pass; on average it
is the flow.</dd>
<dt>dS, dP, dq, dW_Q</dt><dd>The gradient of the loss to the scores, the weights, the queries, and the matrix that
makes the queries.</dd>
<dt>starve</dt><dd>Of a key: to get less than a thousandth of the largest gradient of its row.</dd>
<dt>pressure</dt><dd>The gradient of the loss to the logarithm of the scale: 0 where a trained model runs at its right
temperature.</dd>
<dt>rademacher</dt><dd>+1 or −1, each with probability one half.</dd>
<dt>anisotropic</dt><dd>Wider in some directions than in others.</dd>
</dl></details>"""

_CLOCK = "What the clock said on this machine. It differs from run to run, and no verdict rests on it."


def lab_html(
    records: Sequence[Record],
    *,
    clock: Clock | None = None,
    claims: Mapping[int, str] | None = None,
    questions: Sequence[Record] = (),
) -> str:
    """The records as one page that asks nothing of any network.

    Args:
        records: what `Result.to_dict` wrote, in reading order.
        clock: per question the tables of what the clock said, which records leave out.
        claims: every claim by its number; those that no record judges are listed as not run. Without them the page is
            about the records alone.
        questions: name, title and claims of every question, for those that were not run.
    """
    for record in records:
        checked(record)
    whole = claims is not None
    listed = dict(claims) if claims is not None else _judged(records)
    clock = clock or {}
    names = _names(records)
    title = TITLE if whole or len(records) != 1 else clean(records[0]["title"])
    sections = [
        _section(record, name, i, len(records), clock.get(record["question"], ()))
        for i, (record, name) in enumerate(zip(records, names, strict=True))
    ]
    body = [
        f'<header><div class="bar"><span class="brand">{_MARK}attemper</span></div>',
        f'<p class="eyebrow">The lab</p><h1>{words(title)}</h1>',
        words(_OPENING.format(count=len(listed)), escape=False) if whole else "",
        "</header>",
        '<div class="columns">',
        _contents(records, names),
        "<main>",
        _claims(listed, records, names, questions) if listed else "",
        *sections,
        "</main></div>",
        _footer(records),
    ]
    return page(
        f"{title}: attemper",
        style=static("report.css") + static("lab.css"),
        code=script(MODULES, "document"),
        data=plain({"records": records, "clock": [clock.get(record["question"], ()) for record in records]}),
        body="\n".join(("", *filter(None, body), "")),
        kind="lab",
    )


# Words


def words(text: str, *, escape: bool = True) -> str:
    """A text as HTML: `code` between backticks as code, d_k with its index below the line."""
    # An error stays with its number.
    text = html.escape(clean(text)).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}") if escape else text
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        pieces = [text]
    return "".join(f"<code>{piece}</code>" if i % 2 else _indexed(piece) for i, piece in enumerate(pieces))


def _indexed(text: str) -> str:
    return re.sub(r"\b(d|W)_(\w+)", r"\1<sub>\2</sub>", text)


def _attribute(text: str) -> str:
    return html.escape(clean(text), quote=True)


def _badge(verdict: Record) -> str:
    outcome = outcome_of(verdict)
    mark = f'<span aria-hidden="true">{outcome.mark}</span> '
    return f'<span class="severity {outcome.tone}">{mark}{html.escape(clean(verdict["outcome"]))}</span>'


def _names(records: Sequence[Record]) -> list[str]:
    """An id for each section, unique even where a question was asked twice."""
    names: list[str] = []
    for record in records:
        name = re.sub(r"[^a-z0-9-]", "-", str(record["question"]).lower()) or "question"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def _judged(records: Sequence[Record]) -> dict[int, str]:
    found = {v["claim"]: v["says"] for record in records for v in record["verdicts"] if v["claim"] is not None}
    return dict(sorted(found.items()))


# The table of claims


def _claims(
    claims: Mapping[int, str], records: Sequence[Record], names: Sequence[str], questions: Sequence[Record]
) -> str:
    judged: dict[int, list[tuple[Record, Record, str]]] = {claim: [] for claim in claims}
    for record, name in zip(records, names, strict=True):
        for i, verdict in enumerate(record["verdicts"]):
            if verdict["claim"] in judged:
                judged[verdict["claim"]].append((verdict, record, f"{name}-verdict-{i}"))
    rows = "".join(_claim(claim, says, judged[claim], questions) for claim, says in claims.items())
    run = sum(map(bool, judged.values()))
    missing = f'<p class="lead">{run} of the {len(claims)} claims were run.</p>' if run < len(claims) else ""
    return (
        '<section id="claims" aria-labelledby="claims-title">'
        f'<h2 id="claims-title">The claims, and what was measured</h2>{missing}'
        f"{_counts(verdict for found in judged.values() for verdict, _, _ in _distinct(found))}"
        '<table class="claims"><thead><tr><th scope="col"><span class="offscreen">number</span></th>'
        '<th scope="col">claim</th><th scope="col">outcome</th><th scope="col">measured</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{_READING}</section>"
    )


def _distinct(judged: Sequence[tuple[Record, Record, str]]) -> list[tuple[Record, Record, str]]:
    """One of each outcome: two questions that agree about a claim are one answer."""
    return list({verdict["outcome"]: (verdict, record, place) for verdict, record, place in reversed(judged)}.values())


def _counts(verdicts: Iterable[Record]) -> str:
    outcomes = [verdict["outcome"] for verdict in verdicts]
    items = "".join(
        f'<li class="{outcome.tone}"><b>{outcomes.count(name)}</b> <span class="severity">'
        f'<span aria-hidden="true">{outcome.mark}</span> {name}</span> <span class="means">{outcome.means}</span></li>'
        for name, outcome in OUTCOMES.items()
    )
    return f'<ul class="counts" aria-label="How many of which outcome">{items}</ul>'


def _claim(claim: int, says: str, judged: Sequence[tuple[Record, Record, str]], questions: Sequence[Record]) -> str:
    head = f'<th scope="row" id="claim-{claim}">{claim}</th><td class="says">{words(says)}</td>'
    if not judged:
        ways = [question["name"] for question in questions if claim in question["claims"]]
        commands = " or ".join(f"<code>attemper lab {html.escape(clean(name))}</code>" for name in ways)
        badge = f'<span class="severity unknown">{NOT_RUN}</span>'
        return f'<tr class="unrun">{head}<td>{badge}</td><td class="got">{commands}</td></tr>'
    outcomes, got = [], []
    for verdict, _, place in _distinct(judged):
        outcomes.append(f'<a class="go" href="#{place}">{_badge(verdict)}</a>')
    for verdict, record, place in judged:
        source = f'<a href="#{place}" class="source">{words(record["title"])}</a>' if len(judged) > 1 else ""
        got.append(f"<div>{words(verdict['measured'])} {source}</div>")
    return f'<tr>{head}<td class="outcomes">{"".join(outcomes)}</td><td class="got">{"".join(got)}</td></tr>'


def _contents(records: Sequence[Record], names: Sequence[str]) -> str:
    if len(records) < 2:
        return ""
    items = []
    for record, name in zip(records, names, strict=True):
        marks = "".join(f'<span class="{outcome_of(v).tone}">{outcome_of(v).mark}</span>' for v in record["verdicts"])
        items.append(
            f'<li><a href="#{name}"><span>{words(record["title"])}</span>'
            f'<span class="marks" aria-hidden="true">{marks}</span></a></li>'
        )
    first = '<li class="first"><a href="#claims">The claims</a></li>' if _judged(records) else ""
    return f'<nav class="contents" aria-label="Contents"><ol>{first}{"".join(items)}</ol></nav>'


# A question


def _section(record: Record, name: str, i: int, of: int, clock: Sequence[Record]) -> str:
    where = f"Question {i + 1} of {of}" if of > 1 else "Question"
    panels = [_figure(record, name, i, n) for n in range(len(record["panels"]))]
    figures = f'<div class="lab-figures">{"".join(panels)}</div>' if panels else ""
    verdicts = [_verdict(verdict, name, i, n) for n, verdict in enumerate(record["verdicts"])]
    tables = [_table(table, f"{i}.tables.{n}") for n, table in enumerate(record["tables"])]
    if clock:
        tables.append(f'<h3 class="part">Time and memory</h3><p class="lead">{_CLOCK}</p>')
        tables += [_table(table, f"{i}.clock.{n}") for n, table in enumerate(clock)]
    return (
        f'<section id="{name}" class="question" aria-labelledby="{name}-title"><p class="eyebrow">{where}</p>'
        f'<h2 id="{name}-title">{words(record["title"])}</h2><p class="asks">{words(record["asks"])}</p>'
        f'<p class="summary">{words(record["summary"])}</p>{figures}'
        f'<div class="cards">{"".join(verdicts)}</div>{"".join(tables)}{_again(record, i)}{_setup(record)}</section>'
    )


def _figure(record: Record, name: str, i: int, n: int) -> str:
    drawn = to_svg(record, panel=n, prefix=f"{name}-figure-{n}").strip()
    return f'<figure>{drawn}<figcaption class="tools" data-tools="{i}.panels.{n}"></figcaption></figure>'


def _verdict(verdict: Record, name: str, i: int, n: int) -> str:
    tone = outcome_of(verdict).tone
    if verdict["claim"] is None:
        head, says = "", "Beyond the claims"
    else:
        head, says = f'<a class="rule" href="#claim-{verdict["claim"]}">claim {verdict["claim"]}</a>', verdict["says"]
    facts = "".join(
        f"<dt>{label}</dt><dd>{words(str(verdict[key]))}</dd>"
        for label, key in (("Expected", "expected"), ("Measured", "measured"), ("Reason", "reason"))
        if verdict[key]
    )
    return (
        f'<article class="card {tone}" id="{name}-verdict-{n}"><div class="card-head">{_badge(verdict)}{head}</div>'
        f'<h3>{words(says)}</h3><dl class="reasons">{facts}</dl>{_evidence(verdict, f"{i}.verdicts.{n}.evidence")}'
        "</article>"
    )


def _evidence(verdict: Record, path: str) -> str:
    evidence = verdict["evidence"]
    if not evidence:
        return ""
    rows = [[one["name"], one["estimate"], band_text(one), one["outcome"]] for one in evidence]
    grid = _grid(("number", "measured", "wanted", ""), rows, "Evidence")
    told = plural(len(evidence), "number")
    return (
        f'<details class="fold"><summary>The {told} behind it</summary>'
        f'<div class="tools" data-tools="{path}"></div>{grid}</details>'
    )


def _table(table: Record, path: str) -> str:
    rows = table["rows"]
    note = f'<p class="small">{words(table["note"])}</p>' if table["note"] else ""
    grid = _grid(table["columns"], rows, table["title"])
    tools = f'<div class="tools" data-tools="{path}"></div>'
    opened = " open" if len(rows) <= LONG else ""
    count = f' <span class="count">{plural(len(rows), "row")}</span>'
    return (
        f'<details class="fold table"{opened}><summary><h3>{words(table["title"])}</h3>{count}</summary>'
        f"{tools}{grid}{note}</details>"
    )


def _grid(columns: Sequence[Any], rows: Sequence[Sequence[Any]], label: str) -> str:
    right = [all(is_number(row[i]) or row[i] is None for row in rows) for i in range(len(columns))]
    heads = "".join(
        f'<th scope="col"{"" if numeric else _LEFT}>{words(str(head))}</th>'
        for head, numeric in zip(columns, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(_cells(row, right))}</tr>" for row in rows)
    return (
        f'<div class="table-box" tabindex="0" role="region" aria-label="{_attribute(label)}">'
        f'<table class="sites numbers-table"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


_LEFT = ' class="left"'


def _cells(row: Sequence[Any], right: Sequence[bool]) -> Iterator[str]:
    for i, (cell, numeric) in enumerate(zip(row, right, strict=True)):
        text = words(cell_text(cell))
        if is_estimate(cell):
            value, mark, error = text.partition("±")
            text = f'{value}<span class="error-of">{mark}{error}</span>' if mark else text
        tag, scope = ("th", ' scope="row"') if i == 0 else ("td", "")
        yield f"<{tag}{scope}{'' if numeric else _LEFT}>{text}</{tag}>"


def _again(record: Record, i: int) -> str:
    blocks = "".join(
        f'<div class="code"><div class="tools" data-tools="{i}.{key}"></div><pre tabindex="0"><code>{_unbroken(text)}'
        "</code></pre></div>"
        for key, text in (("command", record["command"]), ("code", record["code"]))
    )
    return f'<h3 class="part">Ask it again</h3><div class="again">{blocks}</div>'


def _unbroken(text: str) -> str:
    """A browser breaks a line behind a hyphen too: what holds one stays whole."""
    return re.sub(r"\S*-\S*", lambda word: f'<span class="whole">{word[0]}</span>', html.escape(text))


def _setup(record: Record) -> str:
    knobs = "".join(
        f"<div><dt>{html.escape(clean(name))}</dt><dd>{html.escape(clean(knob_text(value)))}</dd></div>"
        for name, value in record["config"].items()
    )
    versions = ", ".join(html.escape(clean(f"{name} {version}")) for name, version in record["versions"].items())
    return f'<dl class="setup" aria-label="The knobs of this run">{knobs}</dl><p class="small versions">{versions}</p>'


def _footer(records: Sequence[Record]) -> str:
    found = sorted({str(record["versions"].get("attemper", "")) for record in records})
    versions = " ".join(html.escape(clean(version)) for version in found)
    return f'<footer><span>attemper {versions}</span><span class="tools" data-tools="all"></span></footer>'
