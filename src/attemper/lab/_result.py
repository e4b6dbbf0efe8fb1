"""What a question of the lab is asked with and answers with: Config, Result and the parts of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .._errors import OptionError, brief, explain, unknown
from ._claims import CLAIMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "attemper.lab/1"
DIGITS = 6
"""Significant digits kept of a measured number: more is noise, and would differ between builds of a library."""

HOLDS, FAILS, ONLY_IF, OPEN = "holds", "does not hold", "holds only if", "not decided"
OUTCOMES = (HOLDS, FAILS, ONLY_IF, OPEN)
UNDECIDED = "At these sizes not everything is decided."


def rounded(x: float) -> float:
    """The number to DIGITS significant digits."""
    x = float(x)
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else x


# What is asked


def knob(
    default: Any,
    means: str,
    *,
    least: float | None = None,
    largest: float | None = None,
    choices: tuple[str, ...] = (),
    fewest: int = 1,
) -> Any:
    """A field of a Config: its default, what it means, what it may be, and of several how many there must be."""
    limits = {"least": least, "largest": largest, "choices": choices, "fewest": fewest}
    return field(default=default, metadata={"means": means, **limits})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every knob of a question; each question has its own, all have a seed."""

    seed: int = knob(0, "where the random numbers start", least=0)

    def __post_init__(self) -> None:
        for knob_of in dataclasses.fields(self):
            self._validate(knob_of)

    def _validate(self, knob_of: dataclasses.Field[Any]) -> None:
        name, value, default = knob_of.name, getattr(self, knob_of.name), knob_of.default
        if isinstance(default, tuple):
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise OptionError(explain(f"{name} is {brief(value)}.", f"Pass several, as {name}={default!r}."))
            object.__setattr__(self, name, value := tuple(value))
            fewest = knob_of.metadata["fewest"]
            if len(set(value)) < fewest:
                headline = f"{name} has one value, {brief(value[0])}." if value else f"{name} is empty."
                raise OptionError(explain(headline, f"Pass at least {fewest}, as {name}={default!r}."))
            sample = default[0]
        else:
            sample = default
        for one in value if isinstance(default, tuple) else (value,):
            if default is None and one is None:
                continue
            self._validate_one(name, one, sample, knob_of.metadata)
        if isinstance(default, tuple) and not isinstance(sample, str):
            # Questions follow a quantity as it grows: in whatever order it was given, and once each.
            object.__setattr__(self, name, tuple(sorted(set(value))))

    def _validate_one(self, name: str, one: Any, sample: Any, metadata: Mapping[str, Any]) -> None:
        if metadata["choices"] and one not in metadata["choices"]:
            raise unknown(name, one, metadata["choices"])
        if isinstance(sample, bool) or not isinstance(sample, int | float):
            return
        whole = isinstance(sample, int)
        right = isinstance(one, int if whole else (int, float)) and not isinstance(one, bool) and math.isfinite(one)
        least, largest = metadata["least"], metadata["largest"]
        if not right or (least is not None and one < least) or (largest is not None and one > largest):
            kind = "whole number" if whole else "number"
            bound = "" if least is None else f" of at least {least:g}"
            bound = bound if largest is None else f" from {least:g} to {largest:g}"
            raise OptionError(explain(f"{name} is {brief(one)}.", f"Pass a {kind}{bound}."))

    def to_dict(self) -> dict[str, Any]:
        """The knobs as JSON has them."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, knobs: Mapping[str, Any]) -> Self:
        """The Config that `to_dict` wrote."""
        known = [field_of.name for field_of in dataclasses.fields(cls)]
        for name in knobs:
            if name not in known:
                raise unknown("knob", name, known)
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in knobs.items()}
        return cls(**values)

    def turned(self) -> dict[str, Any]:
        """The knobs that do not stand where they stand by default."""
        return {
            knob_of.name: getattr(self, knob_of.name)
            for knob_of in dataclasses.fields(self)
            if getattr(self, knob_of.name) != knob_of.default
        }


# What is answered


@dataclass(frozen=True)
class Estimate:
    """A measured number with its 95 % interval; `count` is how many independent samples it rests on.

    >>> print(Estimate(0.33812, 0.3360, 0.3402, 400))
    0.3381 ± 0.0021
    """

    value: float
    low: float
    high: float
    count: int = 0

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            object.__setattr__(self, name, rounded(getattr(self, name)))

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """A number that was computed and not sampled."""
        return cls(value, value, value)

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    def times(self, factor: float) -> Estimate:
        """The estimate of a multiple."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, low, high, self.count)

    def less(self, other: Estimate) -> Estimate:
        """The difference of two means from separate samples, by the ends: wider than it need be."""
        ends = (self.value - other.value, self.low - other.high, self.high - other.low)
        return Estimate(*ends, min(self.count, other.count))

    def over(self, other: Estimate) -> Estimate:
        """The quotient of two positive means from separate samples, by the ends: wider than it need be."""
        ends = (self.value / other.value, max(self.low, 0.0) / other.high, self.high / other.low)
        return Estimate(*ends, min(self.count, other.count))

    def __str__(self) -> str:
        from ..report._lab_view import estimate_text

        return estimate_text(dataclasses.asdict(self))


@dataclass(frozen=True)
class Evidence:
    """A number that a verdict rests on, and the band in which the claim wants it."""

    name: str
    estimate: Estimate
    least: float = -math.inf
    most: float = math.inf

    def __post_init__(self) -> None:
        for name in ("least", "most"):
            object.__setattr__(self, name, rounded(getattr(self, name)))

    def outcome(self) -> str:
        """What the whole interval says: in the band, out of it, or neither."""
        if self.least <= self.estimate.low and self.estimate.high <= self.most:
            return HOLDS
        if self.estimate.high < self.least or self.estimate.low > self.most:
            return FAILS
        return OPEN


def near(name: str, estimate: Estimate, target: float, tolerance: float) -> Evidence:
    """Evidence wanted within ± tolerance of a target."""
    return Evidence(name, estimate, target - tolerance, target + tolerance)


def judge(evidence: Iterable[Evidence]) -> str:
    """Holds where every interval lies in its band, does not hold where one lies outside, else is not decided."""
    outcomes = {one.outcome() for one in evidence}
    return next((outcome for outcome in (FAILS, OPEN) if outcome in outcomes), HOLDS)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run says of one claim; claim None is a question that no claim raises."""

    claim: int | None
    outcome: str
    expected: str
    measured: str
    reason: str
    """One or two sentences: why, and for `holds only if` the condition."""
    evidence: tuple[Evidence, ...] = ()
    conditional: InitVar[bool] = False
    """Whether the reason names a condition: what the numbers bear out then holds only if, and a run in which they do
    not says what it missed."""

    def __post_init__(self, conditional: bool) -> None:
        if self.outcome not in OUTCOMES:
            raise unknown("outcome", self.outcome, OUTCOMES)
        if self.claim is not None and self.claim not in CLAIMS:
            raise unknown("claim", str(self.claim), map(str, CLAIMS))
        if conditional and self.outcome == HOLDS:
            object.__setattr__(self, "outcome", ONLY_IF)
        elif conditional:
            object.__setattr__(self, "reason", missed(self.evidence) or self.reason)


def missed(evidence: Iterable[Evidence]) -> str:
    """Which numbers are not where the claim wants them."""
    astray = [one for one in evidence if one.outcome() != HOLDS]
    told = "; ".join(f"{one.name}: {one.estimate} ({one.outcome()})" for one in astray[:3])
    more = f"; and {len(astray) - 3} more" if len(astray) > 3 else ""
    return f"Not every number lies where the claim wants it: {told}{more}." if astray else ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers under headings; a cell is text, a number, an Estimate or None."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        rows = tuple(tuple(_plain_cell(cell) for cell in row) for row in self.rows)
        object.__setattr__(self, "rows", rows)
        assert all(len(row) == len(self.columns) for row in rows), self.title


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of bars: y over x, with an interval where there is one."""

    name: str
    x: tuple[Any, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        x = tuple(at if isinstance(at, str) else rounded(at) for at in self.x)
        object.__setattr__(self, "x", x)
        for name in ("y", "low", "high"):
            object.__setattr__(self, name, tuple(rounded(at) for at in getattr(self, name)))

    @classmethod
    def of(cls, name: str, x: Iterable[Any], estimates: Iterable[Estimate]) -> Series:
        """The series of estimates, with their intervals."""
        those = tuple(estimates)
        return cls(
            name=name,
            x=tuple(x),
            y=tuple(e.value for e in those),
            low=tuple(e.low for e in those),
            high=tuple(e.high for e in those),
        )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes; the title is its message."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "line"
    """line, points or bar; the x of bars are words."""
    x_scale: str = "linear"
    y_scale: str = "linear"
    """linear, log2, log10 or symlog."""
    references: tuple[tuple[str, float], ...] = ()
    """Horizontal lines, each with a label: what a claim or a theory says."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to one question: verdicts, tables and series, from one Config."""

    question: str
    config: Config
    summary: str
    """What was found, in a few plain sentences."""
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...]
    clock: tuple[Table, ...] = field(default=(), compare=False)
    """What the clock said. No two runs agree on it: it is shown, and is in neither the JSON nor a verdict's words."""
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    def __post_init__(self) -> None:
        # A summary is worded for the case that the numbers decide; where they do not, that comes first.
        if any(one.outcome == OPEN for one in self.verdicts) and not self.summary.startswith(UNDECIDED):
            object.__setattr__(self, "summary", f"{UNDECIDED} {self.summary}")

    @property
    def series(self) -> tuple[Series, ...]:
        """The series of all panels."""
        return tuple(series for panel in self.panels for series in panel.series)

    def verdict(self, claim: int) -> Verdict:
        """What this run says of the claim."""
        for one in self.verdicts:
            if one.claim == claim:
                return one
        judged = ", ".join(str(one.claim) for one in self.verdicts if one.claim is not None) or "none"
        fix = f"It judges {judged}; pass the number of one."
        raise OptionError(explain(f"The question {self.question!r} does not judge claim {brief(claim)}.", fix))

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it: the same seed gives the same bytes on the same machine."""
        from ._questions import code, command, question

        known = question(self.question)
        return {
            "schema": SCHEMA,
            "question": self.question,
            "title": known.title,
            "asks": known.asks,
            "config": self.config.to_dict(),
            "command": command(self.question, self.config),
            "code": code(self.question, self.config),
            "summary": self.summary,
            "verdicts": [
                {
                    **{name: getattr(one, name) for name in ("claim", "outcome", "expected", "measured", "reason")},
                    "says": None if one.claim is None else CLAIMS[one.claim],
                    "evidence": [_evidence(each) for each in one.evidence],
                }
                for one in self.verdicts
            ],
            "tables": [_table(table) for table in self.tables],
            "panels": [_plain(dataclasses.asdict(panel)) for panel in self.panels],
            "versions": dict(self.versions),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Result:
        """The result that `to_dict` wrote, without what the clock said."""
        from ._questions import load

        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            fix = f"Pass what Result.to_dict wrote: its schema is {SCHEMA!r}."
            raise OptionError(explain(f"schema is {brief(schema)}.", fix))
        return cls(
            question=record["question"],
            config=load(record["question"]).Config.from_dict(record["config"]),
            summary=record["summary"],
            verdicts=tuple(_verdict_from(one) for one in record["verdicts"]),
            tables=tuple(_table_from(table) for table in record["tables"]),
            panels=tuple(_panel_from(panel) for panel in record["panels"]),
            versions=record["versions"],
        )

    @classmethod
    def from_json(cls, text: str) -> Result:
        """The result that `to_json` wrote."""
        try:
            record = json.loads(text)
        except (TypeError, json.JSONDecodeError) as error:
            fix = "Pass the text that Result.to_json wrote: Result.from_json(path.read_text())."
            raise OptionError(explain(f"This is not JSON: {brief(text)}.", fix)) from error
        return cls.from_dict(record)

    def clock_tables(self) -> list[dict[str, Any]]:
        """What the clock said, as `to_dict` has tables."""
        return [_table(table) for table in self.clock]

    def figure(self) -> Figure:
        """The panels as a matplotlib figure."""
        from ..report import lab_figure

        return lab_figure(self.to_dict())

    def save(self, path: str | Path) -> Path:
        """Write the result as .json, .html (one file, works offline), .md, .svg or .png; returns the path."""
        path = Path(path)
        if path.suffix not in RENDERERS:
            raise OptionError(
                explain(f"Cannot save a Result as {path.name!r}.", f"End the path in {', '.join(RENDERERS)}.")
            )
        # Rendered before the file is opened: a failure leaves the old file as it was.
        written = RENDERERS[path.suffix](self)
        path.write_bytes(written if isinstance(written, bytes) else written.encode())
        return path

    def __str__(self) -> str:
        from ..report import lab_text

        return lab_text(self.to_dict(), clock=self.clock_tables())

    def __rich__(self) -> Any:
        from ..report import lab_rich

        return lab_rich(self.to_dict(), self.clock_tables())


def versions() -> dict[str, str]:
    """The versions that a number may depend on."""
    from .. import __version__

    found = {"attemper": __version__, "python": platform.python_version(), "numpy": np.__version__}
    # Asked of the installer and not of torch: a question without it must not import it.
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    return found


# JSON: no NaN and no infinity, which it has no words for


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return _number(value) if isinstance(value, float) else value


def _plain_cell(cell: Any) -> Any:
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, float):
        return rounded(cell) if math.isfinite(cell) else None
    return cell


def _table(table: Table) -> dict[str, Any]:
    rows = [
        [_plain(dataclasses.asdict(c)) if isinstance(c, Estimate) else _plain(c) for c in row] for row in table.rows
    ]
    return {"title": table.title, "columns": list(table.columns), "rows": rows, "note": table.note}


def _evidence(one: Evidence) -> dict[str, Any]:
    return {
        "name": one.name,
        "estimate": _plain(dataclasses.asdict(one.estimate)),
        "least": _number(one.least),
        "most": _number(one.most),
        "outcome": one.outcome(),
    }


def _estimate_from(record: Mapping[str, Any]) -> Estimate:
    return Estimate(float(record["value"]), float(record["low"]), float(record["high"]), record["count"])


def _table_from(record: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(_estimate_from(c) if isinstance(c, Mapping) else c for c in row) for row in record["rows"])
    return Table(title=record["title"], columns=tuple(record["columns"]), rows=rows, note=record["note"])


def _verdict_from(record: Mapping[str, Any]) -> Verdict:
    evidence = tuple(
        Evidence(one["name"], _estimate_from(one["estimate"]), float(one["least"]), float(one["most"]))
        for one in record["evidence"]
    )
    names = ("claim", "outcome", "expected", "measured", "reason")
    return Verdict(**{name: record[name] for name in names}, evidence=evidence)


def _panel_from(record: Mapping[str, Any]) -> Panel:
    series = tuple(
        Series(
            name=one["name"],
            x=tuple(one["x"]),
            **{name: tuple(float(at) for at in one[name]) for name in ("y", "low", "high")},
        )
        for one in record["series"]
    )
    references = tuple((label, float(at)) for label, at in record["references"])
    rest = {name: record[name] for name in ("title", "x_label", "y_label", "kind", "x_scale", "y_scale")}
    return Panel(**rest, series=series, references=references)


# Files


def _html(result: Result) -> str:
    from ..report import lab_html

    return lab_html([result.to_dict()], clock={result.question: result.clock_tables()})


def _markdown(result: Result) -> str:
    from ..report import lab_markdown

    return lab_markdown(result.to_dict(), result.clock_tables())


def _svg(result: Result) -> str:
    from ..report import lab_svg

    return lab_svg(result.to_dict(), ground=True)


def _png(result: Result) -> bytes:
    from ..report import lab_png

    return lab_png(result.to_dict())


RENDERERS: dict[str, Callable[[Result], str | bytes]] = {
    ".json": Result.to_json,
    ".html": _html,
    ".md": _markdown,
    ".svg": _svg,
    ".png": _png,
}
