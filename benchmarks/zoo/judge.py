"""Whether what a check found is what was planted, and whether watching changed anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attemper

from .planting import Planted
from .specimen import Specimen

ORDER = ("information", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    found: bool
    """The right rule, at least the least severity, and every planted place and head among those it names."""
    exact: bool
    """Found, and no place or head beyond (but where the fault spills)."""
    severity: str | None
    """The gravest severity at which it was found."""
    instead: str
    """What was said instead, for a miss."""


def reaches(severity: str, least: str) -> bool:
    return ORDER.index(severity) >= ORDER.index(least)


def judge(planted: Planted, findings: Iterable[Any]) -> Verdict:
    """Compare what was found with what was planted; any one of its rules is enough."""
    findings = list(findings)
    found, exact, severities = False, False, []
    for rule, least in planted.rules.items():
        right = [f for f in findings if f.rule == rule and reaches(f.severity, least)]
        named = [(path, heads) for f in right for path, heads in f.where.items()]
        if covers(planted, named):
            found = True
            exact |= planted.spills or within(planted, named)
            severities += [f.severity for f in right]
    severity = max(severities, key=ORDER.index, default=None)
    return Verdict(found=found, exact=exact, severity=severity, instead="" if found else words(findings))


def covers(planted: Planted, named: list[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether what is named contains what was planted."""
    hits = []
    for place, heads in planted.where.items():
        said = [h for path, h in named if place.names(path)]
        # "All heads" does not locate a fault of one of several.
        alone = place.heads == 1 and () in said
        hits.append(bool(said) if not heads else alone or set(heads) <= {head for h in said for head in h})
    return any(hits) if planted.any_place else all(hits)


def within(planted: Planted, named: list[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether nothing is named that was not planted."""
    for path, heads in named:
        place = next((p for p in planted.where if p.names(path)), None)
        if place is None:
            return False
        if planted.where[place]:
            # Query heads that share the grown keys are touched too.
            touched = {h for head in planted.where[place] for h in place.group(head)}
            if heads == () or not set(heads) <= touched:
                return False
    return True


def words(findings: Iterable[Any]) -> str:
    """Findings in few words."""

    def where(finding: Any) -> str:
        places = [f"{path}{list(heads) if heads else ''}" for path, heads in finding.where.items()]
        return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")

    return "; ".join(f"{f.severity} {f.rule} ({where(f)})" for f in findings) or "nothing"


def alarms(findings: Iterable[Any]) -> list[Any]:
    """What must not be said of a healthy model."""
    return [f for f in findings if f.severity in ("warning", "error")]


def tensors(output: Any) -> list[Tensor]:
    """Every tensor of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [t for part in output for t in tensors(part)]
    return []


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return len(one) == len(two) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        for a, b in zip(one, two, strict=True)
    )


def same(specimen: Specimen) -> dict[str, bool | None]:
    """Whether outputs (evaluation) and gradients (training) are the same bits with and without watching.

    None where there is nothing to compare: no loss, or a model that differs from itself unwatched.
    """

    def output() -> list[Tensor]:
        specimen.model.eval()
        with torch.no_grad():
            return tensors(specimen.run())

    def gradients() -> list[Tensor]:
        specimen.model.train()
        specimen.model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        specimen.loss_of(specimen.run()).backward()
        specimen.model.eval()
        found = [p.grad for p in specimen.model.parameters() if p.grad is not None]
        specimen.model.zero_grad(set_to_none=True)
        return found

    result: dict[str, bool | None] = {}
    for name, take in (("output", output), ("gradients", gradients if specimen.has_loss else None)):
        if take is None:
            result[name] = None
            continue
        before = take()
        with attemper.watch(specimen.model, every=1) as monitor:
            during = take()
            seen = len(monitor.vitals)
        result[name] = equal(before, during)
        if not result[name] and not equal(before, take()):
            result[name] = None
        result[f"{name} watched"] = seen > 0
    return result
