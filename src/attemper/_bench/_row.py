"""What a case gives, and what is required of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """How long to measure."""

    rounds: int
    """Calm rounds after which a case is done."""
    least: int
    """Rounds that are measured however long they take."""
    seconds: float
    """After which a case is done that has so many."""
    by_hand: bool = True
    """Whether what one writes by hand takes part, which is slow."""


@dataclass(frozen=True)
class Check:
    """One number held against what is required of it."""

    what: str
    found: float
    limit: float
    at_least: bool
    unit: str = "×"
    target: float | None = None
    """What is hoped for, beyond what is required."""

    @property
    def met(self) -> bool:
        """Whether the number is good enough."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    @property
    def missed(self) -> str:
        """What was found and what is required, with as many digits as tell the one from the other."""
        digits = 3
        while digits < 6 and float(number(self.found, "", digits)) == self.limit:
            digits += 1
        return f"{self.what} {number(self.found, self.unit, digits)} ({self._required})"

    @property
    def _required(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.limit, self.unit)}"

    def __str__(self) -> str:
        return f"{self.what} {self._required}"


def number(value: float, unit: str, digits: int = 2) -> str:
    """A number as tables show it; with a digit more where it just misses its limit."""
    if unit == "%":
        return f"{100 * value:.{digits - 2}f} %"
    if unit == "µs":
        return f"{1e6 * value:.{digits - 2}f} µs"
    return f"{value:.{digits}f}{f' {unit}' if unit == 's' else unit}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one case gave."""

    section: str
    case: str
    dtype: str
    threads: int
    """0 on a GPU."""
    checks: Sequence[Check]
    peer: str = "torch fused"
    """Whose time is compared with ours: that of the fastest, where there are several."""
    ratio: float | None = None
    """Its time over ours."""
    share: float | None = None
    """Of the speed of a large matrix product of the same dtype, on the same threads, in the same run."""
    rounds: int = 0
    discarded: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The median time of one call of each contender."""
    megabytes: Mapping[str, float] = field(default_factory=dict)
    error: float | None = None
    """The largest difference between our output and torch's."""
    skipped: str = ""
    """Why it was not run."""

    @property
    def requirement(self) -> str:
        """In words."""
        return ", ".join(map(str, self.checks))

    @property
    def met(self) -> bool:
        """Whether everything required of it is so; what was not run is not."""
        return not self.skipped and all(check.met for check in self.checks)

    def found(self, what: str) -> float | None:
        """The number of one check."""
        return next((check.found for check in self.checks if check.what == what), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, fit for JSON."""
        checks = [{**asdict(check), "found": rounded(check.found), "met": check.met} for check in self.checks]
        return {
            "section": self.section,
            "case": self.case,
            "dtype": self.dtype,
            "threads": self.threads,
            "peer": self.peer,
            "ratio": rounded(self.ratio),
            "share": rounded(self.share),
            "requirement": self.requirement,
            "met": self.met,
            "rounds": self.rounds,
            "discarded": self.discarded,
            "checks": checks,
            "seconds": {name: rounded(value) for name, value in self.seconds.items()},
            "megabytes": {name: rounded(value) for name, value in self.megabytes.items()},
            "error": rounded(self.error),
            "skipped": self.skipped,
        }


def rounded(x: float | None) -> float | None:
    """To the digits that a clock can give."""
    return None if x is None else float(f"{x:.5g}")


@dataclass(frozen=True)
class Case:
    """Something to measure."""

    section: str
    name: str
    dtype: str
    threads: int
    measured: Callable[[Case, Settings], Row]
    selections: frozenset[str] = frozenset(("all",))

    @property
    def label(self) -> str:
        """By which it is chosen."""
        threads = f", {self.threads} thread{'' if self.threads == 1 else 's'}" if self.threads else ""
        return f"{self.section} {self.name}, {self.dtype}{threads}"

    def run(self, settings: Settings) -> Row:
        """Measure it."""
        return self.measured(self, settings)

    def row(self, **found: Any) -> Row:
        """What was found, with the name of the case."""
        return Row(section=self.section, case=self.name, dtype=self.dtype, threads=self.threads, **found)
