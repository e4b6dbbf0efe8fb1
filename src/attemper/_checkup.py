"""What a check of a model found: a plain record that renders, saves and loads without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import OptionError, explain
from ._finding import SEVERITIES, Finding
from ._reading import to_plain
from ._vitals import Vitals

SCHEMA = "attemper.checkup/1"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Checkup:
    """The findings and Vitals of a model on one input."""

    model: Mapping[str, Any]
    """name, kind (its class), parameters, dtype, device, trained (True, False, or None where that cannot be told)."""
    vitals: tuple[Vitals, ...]
    """One per Site, in the order in which they were called."""
    findings: tuple[Finding, ...]
    """The gravest first."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Paths of what looks like attention and could not be read, and why not."""
    inputs: str = ""
    """What the model was run on, in words."""
    sequences: int = 1
    loss: float | None = None
    sequence_pressure: tuple[float, ...] = ()
    """The pressure of the whole model, one number per sequence; empty without a backward pass."""
    probe: tuple[tuple[float, float], ...] = ()
    """(factor on every scale, loss), when the model was rerun at other temperatures."""
    version: str = ""

    @property
    def pressure(self) -> float | None:
        """The gradient of the loss to the log of every scale at once; None without a backward pass."""
        return float(np.mean(self.sequence_pressure)) if self.sequence_pressure else None

    @property
    def pressure_error(self) -> float | None:
        """Its standard error over sequences; None with fewer than two."""
        n = len(self.sequence_pressure)
        return float(np.std(self.sequence_pressure, ddof=1) / np.sqrt(n)) if n > 1 else None

    def worst(self) -> str | None:
        """The gravest severity found, or None."""
        found = {finding.severity for finding in self.findings}
        return next((severity for severity in SEVERITIES if severity in found), None)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON."""
        return {
            "schema": SCHEMA,
            "version": self.version,
            "model": dict(self.model),
            "inputs": self.inputs,
            "sequences": self.sequences,
            "loss": _loss(self.loss),
            "pressure": to_plain(self.pressure),
            "pressure_error": to_plain(self.pressure_error),
            "sequence_pressure": to_plain(list(self.sequence_pressure)),
            "probe": [{"factor": factor, "loss": _loss(loss)} for factor, loss in self.probe],
            "findings": [finding.to_dict() for finding in self.findings],
            "unseen": dict(self.unseen),
            "vitals": [
                {
                    **v.to_dict(),
                    "pressure_error": to_plain(v.pressure_error),
                    "total_pressure_error": to_plain(v.total_pressure_error),
                }
                for v in self.vitals
            ],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Checkup:
        """The Checkup that `to_dict` wrote."""
        if record.get("schema") != SCHEMA:
            fix = f"This version reads {SCHEMA}."
            raise OptionError(explain(f"The record's schema is {record.get('schema')!r}.", fix))
        number = _number
        return cls(
            model=dict(record["model"]),
            vitals=tuple(Vitals.from_dict(v) for v in record["vitals"]),
            findings=tuple(Finding.from_dict(f) for f in record["findings"]),
            unseen=dict(record["unseen"]),
            inputs=record["inputs"],
            sequences=record["sequences"],
            loss=None if record["loss"] is None else number(record["loss"]),
            sequence_pressure=tuple(number(p) for p in record["sequence_pressure"]),
            probe=tuple((p["factor"], number(p["loss"])) for p in record["probe"]),
            version=record["version"],
        )

    def save(self, path: str | Path) -> Path:
        """Write the Checkup as .html (one file, works offline), .json or .md; returns the path."""
        path = Path(path)
        if path.suffix not in RENDERERS:
            fix = f"End the path in {', '.join(RENDERERS)}."
            raise OptionError(explain(f"Cannot save a Checkup as {path.name!r}.", fix))
        # Rendered before the file is opened: a failure leaves the old file as it was.
        text = RENDERERS[path.suffix](self.to_dict())
        path.write_text(text, encoding="utf-8")
        return path

    def __str__(self) -> str:
        from .report import to_text

        return to_text(self.to_dict())

    def __repr__(self) -> str:
        counts = ", ".join(f"{sum(f.severity == s for f in self.findings)} {s}" for s in SEVERITIES)
        return f"Checkup({self.model.get('name', 'model')}; {len(self.vitals)} sites, findings: {counts})"

    def __rich__(self) -> Any:
        from .report import to_rich

        return to_rich(self.to_dict())


def _loss(value: float | None) -> Any:
    """Plain, with a word for NaN: None is a loss that was not measured."""
    return "nan" if value is not None and np.isnan(value) else to_plain(value)


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _html(record: Mapping[str, Any]) -> str:
    from .report import to_html

    return to_html(record)


def _markdown(record: Mapping[str, Any]) -> str:
    from .report import to_markdown

    return to_markdown(record)


RENDERERS = {".html": _html, ".json": _json, ".md": _markdown}
