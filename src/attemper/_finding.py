"""One diagnosis, and what every rule makes one with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._reading import to_plain
from ._vitals import Vitals

SEVERITIES = ("error", "warning", "information")
"""The gravest first."""

SINK = 0.3
"""The weight on the first key from which a head counts as resting there."""
COLLAPSED = 0.05
"""The normalised entropy and flow below which a head has committed to one key."""
SEQUENCES = 4
"""The fewest sequences from which a standard error is taken seriously."""
SIZE_IN_ALL = 0.3
"""Nats per e-fold of the scale, of all layers together: the pressure from which a temperature counts as wrong."""
TELLING = 2.0
"""Standard errors from zero below which a pressure is called zero."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One diagnosis."""

    rule: str
    """A stable name: "scale-missing", "sink", …"""
    severity: str
    """One of error, warning and information."""
    where: Mapping[str, tuple[int, ...]]
    """Path of each Site concerned, and which of its heads; () stands for all of them."""
    headline: str
    """One sentence."""
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    """The numbers behind it."""
    cause: str
    remedy: str
    docs: str
    """The page that explains the rule."""

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "where": {path: list(heads) for path, heads in self.where.items()},
            "headline": self.headline,
            "evidence": {name: to_plain(value) for name, value in self.evidence.items()},
            "cause": self.cause,
            "remedy": self.remedy,
            "docs": self.docs,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Finding:
        """The Finding that `to_dict` wrote."""
        return cls(**{**record, "where": {path: tuple(heads) for path, heads in record["where"].items()}})


def found(rule: str, severity: str, where: Mapping[str, tuple[int, ...]], headline: str, **rest: Any) -> Finding:
    evidence = {name: value for name, value in rest.pop("evidence", {}).items() if value is not None}
    return Finding(
        rule=rule,
        severity=severity,
        where=where,
        headline=headline,
        evidence=evidence,
        docs=f"docs/findings.md#{rule}",
        **rest,
    )


def settled(pressure: float, error: float, sequences: int) -> bool:
    """Whether a pressure of all layers is known to be too small to count: then trained weights are at their scale."""
    return sequences >= SEQUENCES and abs(pressure) + TELLING * error <= SIZE_IN_ALL


def working_heads(v: Vitals) -> NDArray[np.bool_]:
    """The heads that had a choice, and do not rest on the first key."""
    return np.asarray((v.weights["flow"] > 0) & ~(v.first_key_weight >= SINK))


def head_numbers(which: NDArray[Any]) -> tuple[int, ...]:
    """Their numbers, or () for all of them."""
    return () if which.all() else tuple(int(head) for head in np.flatnonzero(which))


def head_count(where: Mapping[str, tuple[int, ...]], sites: Iterable[Vitals]) -> int:
    """How many heads a finding is about."""
    heads = {v.site.path: v.site.heads for v in sites}
    return sum(len(numbers) or heads[path] for path, numbers in where.items())


def mean_of(values: NDArray[Any]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def number(value: float, form: str = ".4g") -> str:
    """As a sentence shows it: with the minus of the report. What a reader is to type keeps the hyphen."""
    text = format(value, form)
    return f"−{text[1:]}" if text.startswith("-") else text


def places_of(vitals: Sequence[Vitals]) -> str:
    paths = [v.site.path or "the call" for v in vitals]
    return paths[0] if len(paths) == 1 else f"{len(paths)} layers ({paths[0]}, …)"
