"""From Vitals to Findings: pure rules with stable names, which run as well on a saved file.

A rule says only what is identifiable. An absolute entropy, spread or largest logit proves nothing: healthy heads of
trained models have score deviations from 0.6 to 19 and entropies down to 0, and initialisers differ. What does prove
something is the effective scale, the pressure, a drift, and harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import _symptoms
from ._finding import (
    COLLAPSED,
    SEQUENCES,
    SEVERITIES,
    SIZE_IN_ALL,
    Finding,
    found,
    mean_of,
    number,
    places_of,
    settled,
    working_heads,
)
from ._vitals import Site, Vitals

SAME = 0.02
"""Two scales this close are one: 16-bit factors are rounded."""
REJECTS = 5.0
"""Standard errors from zero at which a pressure counts."""
FEW_KEYS = 8.0
"""Keys a row sees on average, from which a pressure tells: of SmolLM2 with its scale halved it is zero at 4 keys and
at 7, and shows at 13."""
PROBE_GAIN = 0.02
"""The share of the loss that another scale must save."""
SIZE_AT_SITE = 0.05
"""Nats per e-fold of one layer's scale: healthy trained models show up to 0.03, however many errors away."""


def diagnose(
    vitals: Vitals | Iterable[Vitals] | Mapping[str, Vitals],
    *,
    history: Sequence[Iterable[Vitals] | Mapping[str, Vitals]] = (),
    trained: bool | None = None,
    unseen: Mapping[str, str] | None = None,
) -> list[Finding]:
    """What is wrong with the attention that these Vitals describe, why, and how to mend it; the gravest first.

    Args:
        vitals: of one Site or several; a dict by path, as a Monitor has them, will do.
        history: the Vitals of the samples of a run, the oldest first and the newest among them, for what shows over
            time only.
        trained: whether the weights are trained: only then is the pressure zero at the right temperature.
        unseen: paths of attention that could not be read, and why not.

    >>> import numpy as np
    >>> from attemper import Site, Vitals, read
    >>> q, k = np.random.default_rng(0).standard_normal((2, 8, 64, 64))
    >>> site = Site(path="attn", heads=8, head_dim=64, effective_scale=1.0)
    >>> [finding] = diagnose(Vitals.of(read(q, k, scale="unscaled"), site))
    >>> finding.rule, finding.severity
    ('scale-missing', 'warning')
    """
    sites = [vitals] if isinstance(vitals, Vitals) else _listed(vitals)
    findings: list[Finding] = []
    for rule in RULES:
        findings.extend(rule(sites, trained))
    findings.extend(_symptoms.over_time([_listed(sample) for sample in history]))
    for path, reason in (unseen or {}).items():
        findings.append(_symptoms.unseen(path, reason))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _listed(vitals: Iterable[Vitals] | Mapping[str, Vitals]) -> list[Vitals]:
    return list(vitals.values() if isinstance(vitals, Mapping) else vitals)


# -- the scale -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mistake:
    """A scale that is not the expected one, by what it is instead."""

    rule: str
    known: bool
    what: str
    cause: str


def expected_scale(site: Site) -> float | None:
    """What the scale should be: as declared, else 1/√d_k of the width that leaves the projection; None: not known."""
    if isinstance(site.declared_scale, (int, float)):
        scale = float(site.declared_scale)
        return scale if math.isfinite(scale) and scale != 0 else None
    width = site.projected_head_dim or site.head_dim
    return None if site.declared_scale is not None or not width else width**-0.5


def _close(one: float, two: float) -> bool:
    return abs(one - two) <= SAME * abs(two)


def _one_number(scale: float | tuple[float, ...] | None) -> float | None:
    if isinstance(scale, tuple):
        return scale[0] if scale and all(_close(s, scale[0]) for s in scale) else None
    return scale


def _mistake(site: Site) -> _Mistake | None:
    """What is wrong with the effective scale of a Site; None where it is right, or could not be measured."""
    effective, expected = _one_number(site.effective_scale), expected_scale(site)
    if effective is None or expected is None or _close(effective, expected):
        return None
    if effective == 0 or not math.isfinite(effective):
        cause = "A scale that is computed or learnt has come to nothing, or to no number."
        return _Mistake("scale-wrong", True, "at which the scores say nothing", cause)
    width = site.projected_head_dim or site.head_dim or 1
    root = width**-0.5
    factor = effective / expected
    if _close(effective, 1.0):
        cause = "Nothing between the projections of q and k and the softmax divides their product."
        return _Mistake("scale-missing", True, "no scale at all", cause)
    if site.head_dim and site.head_dim != width and _close(effective, site.head_dim**-0.5):
        cause = f"q and k were padded from {width} to {site.head_dim} before the default scale was taken of the width."
        return _Mistake("scale-wrong", True, f"1/√{site.head_dim}, of the padded width", cause)
    if _close(effective, 1 / width):
        twice = site.projection_factor is not None and _close(site.projection_factor, root)
        cause = (
            "q is divided by √d_k after its projection, and the scores are once more."
            if twice
            else "The scores are divided by d_k; or by √d_k twice, which is the same number."
        )
        return _Mistake("scale-wrong", True, "1/√d_k applied twice" if twice else "1/d_k", cause)
    if site.model_dim and site.model_dim != width and _close(effective, site.model_dim**-0.5):
        cause = "The width of the model was taken for that of a head; a dot product sums over a head only."
        return _Mistake("scale-wrong", True, f"1/√d_model with d_model {site.model_dim}", cause)
    known = any(_close(factor, round_factor) for round_factor in (2.0, 0.5))
    cause = f"Something multiplies the scores by {number(factor)} beyond that."
    return _Mistake("scale-wrong", known, f"{number(factor)} times as much as it should be", cause)


def _scale(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:
    """scale-missing and scale-wrong, one finding for all Sites with one mistake."""
    wrong = [(v, mistake) for v in sites if (mistake := _mistake(v.site)) is not None]
    judged = sum(1 for v in sites if _one_number(v.site.effective_scale) is not None)
    groups: dict[tuple[str, str], list[tuple[Vitals, _Mistake]]] = {}
    for v, mistake in wrong:
        groups.setdefault((mistake.rule, mistake.what), []).append((v, mistake))
    for (rule, what), members in groups.items():
        vitals = [v for v, _ in members]
        mistake, site = members[0][1], vitals[0].site
        effective, expected = _one_number(site.effective_scale), expected_scale(site)
        assert effective is not None  # as _mistake has established
        assert expected is not None
        pressure, error, t = _together(vitals)
        # At too large a scale the loss falls when it shrinks: the pressure is positive.
        pushes = t is not None and abs(t) > REJECTS and (pressure > 0) == (abs(effective) > abs(expected))
        harmed = _harmed(vitals)
        unlike_the_rest = len(wrong) <= judged / 2
        declared = site.declared_scale is not None
        if harmed or (trained and pushes):
            severity = "error"
        else:
            severity = "warning" if mistake.known or declared or unlike_the_rest else "information"
        places = "every layer" if len(members) == len(sites) and len(sites) > 1 else places_of(vitals)
        yield found(
            rule,
            severity,
            {v.site.path: () for v in vitals},
            f"The effective scale of {places} is {number(effective)}, {what}; {_wanted(site, expected)}.",
            evidence={
                "effective_scale": effective,
                "expected_scale": expected,
                "factor": effective / expected,
                "scale_argument": _one_number(site.scale_argument),
                "projection_factor": site.projection_factor,
                "pressure": pressure if t is not None else None,
                "pressure_error": error if t is not None else None,
                "t": t,
                "flow": float(np.mean([mean_of(v.flow) for v in vitals])) if harmed else None,
            },
            cause=mistake.cause,
            remedy=_scale_remedy(site, effective, expected),
        )
    unclear = [v for v in sites if _unclear(v.site)]
    if unclear:
        yield found(
            "cannot-tell",
            "information",
            {v.site.path: () for v in unclear},
            f"What multiplies q·k in {places_of(unclear)} could not be measured.",
            cause=(
                "The projections that made q and k were not seen, or what multiplies q or k behind them is not one "
                "number; and the scale argument is not the expected one."
            ),
            remedy="Declare the scale (declared_scale=), or check it by a probe with a loss.",
        )


def _wanted(site: Site, expected: float) -> str:
    if site.declared_scale is None:
        return f"1/√d_k is {expected:.4g}"
    return f"{number(expected)} is declared ({site.declared_by})"


def _unclear(site: Site) -> bool:
    expected = expected_scale(site)
    if site.qk_norm or site.effective_scale is not None or expected is None or site.kind is None:
        return False
    argument = _one_number(site.scale_argument)
    default = None if site.head_dim is None else site.head_dim**-0.5
    given = default if argument is None else argument
    return given is not None and not _close(given, expected)


def _scale_remedy(site: Site, effective: float, expected: float) -> str:
    if effective == 0 or not math.isfinite(effective):
        return f"Find out how it came about; it should be {expected:.6g}."
    if site.projection_factor is not None and not _close(site.projection_factor, 1.0):
        return (
            f"q and k are multiplied by {site.projection_factor:.4g} between projection and attention: multiply by "
            f"{site.projection_factor * expected / effective:.4g} there, or leave that and pass "
            f"scale={expected / site.projection_factor:.4g}."
        )
    note = "" if site.declared_scale is not None else " If it is meant, declare it: declared_scale=."
    return f"Pass scale={expected:.6g} (or multiply q by {expected / effective:.4g} before the product).{note}"


def _harmed(vitals: list[Vitals]) -> bool:
    """Whether most of the heads that do not rest on a sink let nearly nothing through."""
    working, closed = 0, 0
    for v in vitals:
        free = working_heads(v)
        working += int(free.sum())
        closed += int((free & (v.flow < 2 * COLLAPSED)).sum())
    return working > 0 and closed >= working / 2


def of_probe(losses: Sequence[tuple[float, float]], trained: bool | None) -> Iterator[Finding]:
    """The findings hot and cold, where the loss of a trained model is less at another scale than at its own."""
    at = dict(losses)
    if not trained or 1.0 not in at or not all(map(math.isfinite, at.values())):
        return
    best = min(at, key=lambda factor: at[factor])
    if at[1.0] - at[best] <= PROBE_GAIN * abs(at[1.0]):
        return
    cold = best < 1
    yield found(
        "cold" if cold else "hot",
        "warning",
        {},
        f"The loss is {at[best]:.4g} with every scale × {best:.3g}, and {at[1.0]:.4g} as it is.",
        evidence={"factor": best, "loss": at[best], "loss_as_it_is": at[1.0]},
        cause=f"Attention is too {'sharp' if cold else 'flat'} for these weights and this input.",
        remedy="Compare q, k and the scale with the original weights and configuration.",
    )


# -- the temperature -------------------------------------------------------------------------------------------------


def _together(vitals: Iterable[Vitals]) -> tuple[float, float, float | None]:
    """(pressure, error, t) of Sites together; t is None where there were too few sequences."""
    total, variance, enough = 0.0, 0.0, False
    for v in vitals:
        if v.weights["total_pressure"][0] >= SEQUENCES:
            enough = True
            total += float(v.total_pressure[0])
            variance += float(v.total_pressure_error[0]) ** 2
    error = math.sqrt(variance)
    return total, error, total / error if enough and error > 0 else None


def _temperature(sites: list[Vitals], trained: bool | None) -> Iterator[Finding]:
    """The findings hot and cold: the pressure rejects zero though the scale is as declared; or that it cannot tell."""
    if not trained:
        return
    right = [v for v in sites if _mistake(v.site) is None]
    pressed = []
    for v in right:
        pressure, _, t = _together([v])
        if t is not None and abs(t) > REJECTS and abs(pressure) > SIZE_AT_SITE:
            pressed.append(v)
    total, error, t = _together(right)
    in_all = t is not None and abs(t) > REJECTS and abs(total) > SIZE_IN_ALL
    if in_all:
        groups = [(right, total, error, t)]
    else:
        groups = [
            (group, *_together(group))
            for sign in (-1, 1)
            if (group := [v for v in pressed if v.total_pressure[0] * sign > 0])
        ]
    for group, pressure, error, t in groups:
        cold = pressure > 0
        yield found(
            "cold" if cold else "hot",
            "error" if in_all else "warning",
            {v.site.path: () for v in group},
            f"The loss would fall if the scale of {places_of(group)} were {'smaller' if cold else 'larger'}: "
            f"pressure {number(pressure, '+.3g')} ± {error:.2g}.",
            evidence={"pressure": pressure, "pressure_error": error, "t": t},
            cause=(
                f"Attention is too {'sharp' if cold else 'flat'} for these weights though the scale is as it should "
                "be: q or k were rescaled after training (by merging, quantising or converting weights), or the text "
                "is far from what the model was trained on."
            ),
            remedy="Compare q and k with the original weights; a probe (probe=True) shows where the loss is least.",
        )
    if not groups:
        yield from _too_little(sites)


def _too_little(sites: list[Vitals]) -> Iterator[Finding]:
    """cannot-tell, where the pressure would not have shown a temperature that counts as wrong."""
    measured = [v for v in sites if np.isfinite(v.total_pressure[0]) and not v.site.training]
    if not measured:
        return
    sequences = max(int(v.weights["total_pressure"][0]) for v in measured)
    keys = max((mean for v in measured if math.isfinite(mean := mean_of(v.visible_keys))), default=1.0)
    few = sequences < SEQUENCES
    pressure, error, _ = _together(measured)
    evidence: dict[str, float] = {"sequences": sequences}
    if few:
        headline = f"{sequences} {'sequence is' if sequences == 1 else 'sequences are'} too few"
        cause = f"The standard error of the pressure is taken over sequences, and means little below {SEQUENCES}."
        remedy = f"Give {SEQUENCES} or more: a longer text, or a larger batch."
    elif keys < FEW_KEYS:
        evidence["visible_keys"] = keys
        headline = "The sequences are too short"
        cause = f"A row sees {keys:.2g} keys on average: with so few to choose from, any temperature is much the same."
        remedy = "Give longer sequences."
    elif not settled(pressure, error, sequences) and abs(pressure) <= max(SIZE_IN_ALL, REJECTS * error):
        evidence |= {"pressure": pressure, "pressure_error": error}
        headline = "The pressure is not known well enough"
        cause = (
            f"Within two standard errors it may be beyond {SIZE_IN_ALL}, where a fault begins; to show one takes "
            f"{REJECTS:.0f} errors from zero as well."
        )
        remedy = "Give longer sequences, or more of them."
    else:
        # Known: too small to count, or so large that what explains it is a finding of its own.
        return
    yield found(
        "cannot-tell",
        "information",
        {},
        f"{headline} to judge the temperature by.",
        evidence=evidence,
        cause=cause,
        remedy=remedy,
    )


RULES: tuple[Callable[[list[Vitals], bool | None], Iterator[Finding]], ...] = (
    _symptoms.numbers,
    _scale,
    _temperature,
    _symptoms.saturation,
    _symptoms.dilution,
    _symptoms.softcap,
    _symptoms.masks,
    _symptoms.notable,
)
