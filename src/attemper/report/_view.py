"""What a record shows, worked out once: page, terminal and file take it from here and cannot disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import OptionError, explain
from .._finding import SEQUENCES, SEVERITIES, SIZE_IN_ALL, TELLING, settled
from ._glossary import MAPPED, SITE_TERMS, TERMS, Term
from ._numbers import MISSING, aligned, clean, finite, large, number, plain, plural, real, shown, spread, with_error
from ._where import Group, Place, describe, locate, resolve

SCHEMA = "attemper.checkup/1"

COLUMNS = ("normalized_entropy", "flow", "first_key_weight", "max_logit", "score_std", "gradient_flow")
"""The vitals of the table of sites, over the heads."""

TOLERANCE = 0.01
"""How far, relatively, an effective scale may be from its reference before the scales get a plot."""

_MAXIMA = ("max_logit", "max_qk", "nonfinite")


def view(record: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the renderings show that is not in the record as it stands; plain, fit for JSON."""
    if record.get("schema") != SCHEMA:
        fix = f"Pass what Checkup.to_dict wrote; this version reads {SCHEMA}."
        raise OptionError(explain(f"The record's schema is {record.get('schema')!r}.", fix))
    record = plain(record)
    vitals = record["vitals"]
    sites = [v["site"] for v in vitals]
    places, groups = locate(sites)
    pressure = _pressure(record)
    model = record["model"]
    return {
        "title": clean(str(model.get("name") or model.get("kind") or "model")),
        "subtitle": clean(_subtitle(record)),
        "verdict": _verdict(record, pressure),
        "numbers": _numbers(record, places, pressure),
        "findings": [_finding(f, places, groups) for f in record["findings"]],
        "groups": [{"template": clean(g.template), "sites": list(g.sites)} for g in groups],
        "sites": [_site(place, v, len(groups) > 1) for place, v in zip(places, vitals, strict=True)],
        "vitals": [_map(term, vitals) for term in TERMS if term.name in MAPPED and _measured(term, vitals)],
        "fields": [{"name": t.name, "label": t.label, "form": t.form, "unmeasured": t.unmeasured} for t in TERMS],
        "site_fields": [{"name": name, "label": label} for name, label, _ in SITE_TERMS],
        "table": _table(places, vitals),
        "pressure": pressure,
        "probe": _probe(record["probe"], bool(record["unseen"])),
        "unseen": [{"path": path, "why": why} for path, why in record["unseen"].items()],
        "glossary": [{"label": t.label, "name": t.name, "meaning": t.meaning} for t in TERMS if _measured(t, vitals)],
        "missing": MISSING,
    }


def known(term: Term, value: Any) -> float | None:
    """The number behind one head's value, or None where it was not measured."""
    return None if value == term.unmeasured else real(value)


def _values(term: Term, vital: Mapping[str, Any]) -> list[float | None]:
    return [known(term, value) for value in vital.get(term.name) or ()]


def _measured(term: Term, vitals: Sequence[Mapping[str, Any]]) -> bool:
    values = [v for vital in vitals for v in _values(term, vital) if v is not None]
    return bool(values) and (term.always or any(values))


def _map(term: Term, vitals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [v for vital in vitals for v in _values(term, vital) if v is not None and math.isfinite(v)]
    least, most = (min(values), max(values)) if values else (0.0, 0.0)
    if term.scale == "diverging":
        reach = max(abs(least), abs(most)) or 1.0
        domain = data = [-reach, reach]
    else:
        low, high = term.natural
        domain = [least if low is None else min(low, least), most if high is None else max(high, most)]
        data = [least, most]
    return {
        "name": term.name,
        "label": term.label,
        "form": term.form,
        "scale": term.scale,
        "domain": domain,
        "data": data,
        "meaning": term.meaning,
        "unmeasured": term.unmeasured,
    }


def _site(place: Place, vital: Mapping[str, Any], several: bool = False) -> dict[str, Any]:
    site = vital["site"]
    width = finite(site.get("projected_head_dim")) or finite(site.get("head_dim"))
    expected = 1 / math.sqrt(width) if width else None
    declared = site.get("declared_scale")
    return {
        "path": place.path,
        "short": clean(place.short),
        # Between groups a layer's number does not say which: its path does.
        "label": clean(place.path if several else place.label),
        "title": clean(place.path) if several or not place.layer else place.label.capitalize(),
        "group": place.group,
        "heads": place.heads,
        "expected_scale": expected,
        "effective_text": spread(site.get("effective_scale")),
        "differs": _differs(site.get("effective_scale"), expected) or _differs(site.get("effective_scale"), declared),
        "pressure": _first(vital.get("total_pressure")),
        "pressure_error": _first(vital.get("total_pressure_error")),
        "pressure_text": with_error(_first(vital.get("total_pressure")), _first(vital.get("total_pressure_error"))),
    }


def _differs(effective: Any, reference: Any) -> bool:
    given = [finite(e) for e in (effective if isinstance(effective, list) else [effective])]
    wanted = [finite(r) for r in (reference if isinstance(reference, list) else [reference])]
    if len(wanted) == 1:
        wanted *= len(given)
    return any(
        e is not None and r is not None and abs(e - r) > TOLERANCE * abs(r) for e, r in zip(given, wanted, strict=False)
    )


def _first(values: Any) -> Any:
    return values[0] if values else None


def _over_heads(term: Term, vital: Mapping[str, Any]) -> float | None:
    """A site's number: the largest of a maximum, the sum of a count, otherwise the mean by weight."""
    values = _values(term, vital)
    weights = vital.get("weights", {}).get(term.name) or [1] * len(values)
    pairs = [(v, w) for v, w in zip(values, weights, strict=False) if v is not None]
    if not pairs:
        return None
    if term.name in _MAXIMA:
        return max(v for v, _ in pairs)
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def _table(places: Sequence[Place], vitals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sites row by row: the numbers, and the same as text with a column's decimals lined up."""
    chosen = [term for term in TERMS if term.name in COLUMNS and _measured(term, vitals)]
    labels = {"path": "Site", "heads": "Heads", "head_dim": "Head width"}
    labels |= {"effective_scale": "Effective scale", "expected_scale": "1/√d_k"}
    labels |= {term.name: term.label for term in chosen}
    if any(_first(v.get("total_pressure")) is not None for v in vitals):
        labels["pressure"] = "Pressure"
    rows: list[dict[str, Any]] = []
    for place, vital in zip(places, vitals, strict=True):
        site = _site(place, vital)
        row = {"path": place.path or "attention", "heads": place.heads, "head_dim": vital["site"].get("head_dim")}
        row |= {"effective_scale": vital["site"].get("effective_scale"), "expected_scale": site["expected_scale"]}
        row |= {term.name: plain(_over_heads(term, vital)) for term in chosen}
        if "pressure" in labels:
            row |= {"pressure": site["pressure"], "pressure_error": site["pressure_error"]}
        rows.append(row)
    texts = {name: aligned([row[name] for row in rows]) for name in labels}
    texts |= {term.name: [shown(row[term.name], "share") for row in rows] for term in chosen if term.form == "share"}
    texts["effective_scale"] = [spread(row["effective_scale"]) for row in rows]
    if "pressure" in labels:
        texts["pressure"] = [with_error(row["pressure"], row["pressure_error"]) for row in rows]
    return {
        "columns": [{"name": name, "label": label} for name, label in labels.items()],
        "rows": rows,
        "texts": [[texts[name][i] for name in labels] for i in range(len(rows))],
    }


def _finding(finding: Mapping[str, Any], places: Sequence[Place], groups: Sequence[Group]) -> dict[str, Any]:
    named = resolve(finding["where"], places)
    parts = [clean(part) for part in describe(finding["where"], places, groups)]
    return {
        **{name: str(finding[name]) for name in ("rule", "severity", "headline", "cause", "remedy", "docs")},
        "where": "; ".join(parts),
        "where_parts": parts,
        "heads": [[index, chosen] for index, chosen in named],
        "count": sum(len(chosen) for _, chosen in named),
        "evidence": [
            {"name": name, "label": name.replace("_", " "), "value": value, "text": shown(value)}
            for name, value in finding["evidence"].items()
        ],
    }


def _pressure(record: Mapping[str, Any]) -> dict[str, Any] | None:
    value, error = finite(record["pressure"]), finite(record["pressure_error"])
    if value is None:
        return None
    t = value / error if error else None
    n = len(record["sequence_pressure"])
    few = n < SEQUENCES or error is None
    open_ = not record["model"].get("trained") or any(map(_of_the_temperature, record["findings"]))
    sure = not (few or open_) and settled(value, error or 0.0, n)
    if value == 0 or (t is not None and abs(t) < TELLING):
        reading = "zero" if value == 0 else "zero within its error"
        reading += ", if it holds on more sequences" if few else ", as at the right temperature" if sure else ""
    else:
        reading = "a smaller scale would lower the loss" if value > 0 else "a larger scale would lower the loss"
        reading += ", if it holds on more sequences" if few else ", but hardly" if abs(value) <= SIZE_IN_ALL else ""
    over = f"over {plural(n, 'sequence')}"
    return {
        "value": value,
        "error": error,
        "t": t,
        "text": with_error(value, error),
        "t_text": None if t is None else f"t = {number(t, 3)} {over}",
        "over": over,
        "reading": reading,
        "sure": sure,
    }


def _probe(points: Sequence[Mapping[str, Any]], unread: bool) -> dict[str, Any] | None:
    taken = sorted(points, key=lambda p: float(p["factor"]))
    if not taken:
        return None
    losses = [finite(p["loss"]) for p in taken]
    texts = aligned([p["loss"] for p in taken])
    measured = [loss for loss in losses if loss is not None]
    lowest = [i for i, loss in enumerate(losses) if measured and loss == min(measured)]
    # Neither a loss alone nor one of several alike is the least.
    least = lowest[0] if len(lowest) == 1 and len(measured) > 1 else None
    factors = [number(float(taken[i]["factor"]), 3) for i in lowest]
    if not measured:
        reading = "No loss was finite."
    elif len(measured) == 1:
        reading = "One loss alone does not tell where the least is."
    elif len(lowest) == len(measured):
        reading = "The loss is the same at every scale: it does not tell which is best."
    elif least is None:
        reading = f"The loss is as low with every scale multiplied by {' as by '.join(factors)}."
    elif taken[least]["factor"] == 1:
        reading = "The loss is least at the model's own scale."
    else:
        reading = f"The loss is least with every scale multiplied by {factors[0]}."
    if unread:
        reading += " What could not be read kept the scale it has."
    return {
        "points": [
            {**p, "text": number(float(p["factor"]), 3), "loss_text": text}
            for p, text in zip(taken, texts, strict=True)
        ],
        "least": least,
        "reading": reading,
    }


def _verdict(record: Mapping[str, Any], pressure: Mapping[str, Any] | None) -> dict[str, Any]:
    notes = []
    if record["unseen"]:
        n = len(record["unseen"])
        notes.append(f"{plural(n, 'module')} that {'look' if n > 1 else 'looks'} like attention could not be read.")
    counts = {s: sum(f["severity"] == s for f in record["findings"]) for s in SEVERITIES}
    grave = [plural(counts[s], s) for s in ("error", "warning") if counts[s]]
    if grave:
        worst = "error" if counts["error"] else "warning"
        first = next(f["headline"] for f in record["findings"] if f["severity"] == worst)
        return {"severity": worst, "lead": " and ".join(grave), "sentence": first, "notes": notes}
    if not record["vitals"]:
        return {"severity": "unknown", "lead": "Nothing read", "sentence": "no attention was seen.", "notes": notes}
    unclear = _undecided(record, pressure)
    if unclear is not None:
        sentence, remedy = unclear
        notes.insert(0, f"Otherwise no error and no warning. {remedy}")
        return {"severity": "unknown", "lead": "Not decided", "sentence": sentence, "notes": notes}
    if record["model"].get("trained") is False:
        sentence = "no error and no warning in this untrained model."
    elif pressure is None:
        sentence = "no error and no warning."
        notes.insert(0, "Pressure was not measured: without it the temperature itself is untested.")
    elif pressure["t"] is not None and abs(pressure["t"]) < TELLING:
        sentence = "attention runs at its right temperature."
    else:
        sentence = "no error and no warning."
    return {"severity": "healthy", "lead": "Healthy", "sentence": sentence, "notes": notes}


def _of_the_temperature(finding: Mapping[str, Any]) -> bool:
    return finding["rule"] == "cannot-tell" and not finding["where"]


def _undecided(record: Mapping[str, Any], pressure: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """What keeps a model without fault from being called healthy, and what to do about it."""
    trained = record["model"].get("trained")
    sure = bool(pressure and pressure["sure"])
    paths = {v["site"].get("path") for v in record["vitals"]}
    for finding in record["findings"]:
        # Untrained weights have no right temperature; what can be wrong with them is the scale.
        if _of_the_temperature(finding) and trained is not False:
            return finding["headline"], finding["remedy"]
        if finding["rule"] == "cannot-tell" and paths <= set(finding["where"]) and not sure:
            return finding["headline"], finding["remedy"]
    # The errors of the findings are summed over the sites; the one that is shown may be wider.
    if trained and pressure and not sure:
        return "The pressure does not show that the temperature is right.", "Give longer sequences, or more of them."
    return None


def _numbers(
    record: Mapping[str, Any], places: Sequence[Place], pressure: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    model = record["model"]
    widths = {place.heads for place in places}
    heads = plural(sum(place.heads for place in places), "head")
    sites = plural(len(places), "site")
    if len(widths) == 1:
        attention = {
            "value": f"{sites} × {plural(widths.pop(), 'head')}",
            "note": f"{heads} in all" if len(places) > 1 else "",
        }
    else:
        attention = {"value": sites, "note": heads}
    trained = {True: "yes", False: "no"}.get(model.get("trained"), "cannot be told")
    parameters = model.get("parameters")
    exact = shown(parameters, "count") if finite(parameters) is not None else ""
    return [
        {"label": "Parameters", "value": large(parameters), "note": exact if exact != large(parameters) else ""},
        {"label": "Attention", **attention},
        {"label": "Loss", "value": shown(record["loss"]), "note": ""},
        {
            "label": "Pressure",
            "value": pressure["text"] if pressure else MISSING,
            "note": (pressure["t_text"] or pressure["over"]) if pressure else "",
        },
        {"label": "Trained", "value": trained, "note": ""},
    ]


def _subtitle(record: Mapping[str, Any]) -> str:
    """What was run, as what, on what."""
    model = record["model"]
    place = " on ".join(str(model[name]) for name in ("dtype", "device") if model.get(name))
    inputs = f"read on {record['inputs'] or plural(int(record['sequences']), 'sequence')}"
    kind = str(model.get("kind") or "") if model.get("name") else ""
    return ", ".join(part for part in (kind, place, inputs) if part)
