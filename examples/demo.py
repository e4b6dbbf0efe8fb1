"""The demo: a trained language model's attention put on the scales, first as it is, then broken on purpose.

Run it with `make demo`. Both halves are the command `attemper check`; the second checks the factory `broken` below.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `examples.demo:broken` is importable from wherever this runs

from attemper._models import load  # noqa: E402  the loader behind `attemper check demo`
from attemper.cli import main as attemper  # noqa: E402

TOKENS, SEQUENCES = 384, 4
UNSCALED, DOUBLED = 12, 20
"""The layers that `broken` breaks."""


def broken() -> tuple[Any, dict[str, Any]]:
    """SmolLM2 with two slips that raise no error: the scale left out of one layer and doubled in another."""
    loaded = load("demo", tokens=TOKENS, sequences=SEQUENCES)
    layers = loaded.model.model.layers
    layers[UNSCALED].self_attn.scaling = 1.0
    layers[DOUBLED].self_attn.scaling *= 2
    return loaded.model, dict(loaded.kwargs)


def command(*arguments: str) -> int:
    """Show a command and run it."""
    print(f"\n$ attemper {' '.join(arguments)}", flush=True)
    return attemper(arguments)


def main() -> int:
    """Both checks; 0 when the healthy model passes and both slips are found where they are."""
    size = ("--tokens", str(TOKENS), "--sequences", str(SEQUENCES))
    print("1. A trained language model, SmolLM2-135M, as it is.")
    healthy = command("check", "demo", "--probe", *size, "--html", "attemper-report.html")
    if healthy != 0:
        print("\nThe healthy model did not pass.")
        return healthy
    print(f"\n2. The same model with the scale left out of layer {UNSCALED} and doubled in layer {DOUBLED}.")
    record = Path("attemper-report-broken.json")
    reports = ("--html", "attemper-report-broken.html", "--json", str(record))
    status = command("check", "examples.demo:broken", *reports)
    if status != 1:
        print("\nThe broken model was not found out.")
        return 1
    print("exit status 1: a pipeline would stop here")
    findings = json.loads(record.read_text(encoding="utf-8"))["findings"]
    grave = {path for finding in findings if finding["severity"] != "information" for path in finding["where"]}
    planted = {layer: any(f"layers.{layer}." in path for path in grave) for layer in (UNSCALED, DOUBLED)}
    others = sorted(path for path in grave if not any(f"layers.{layer}." in path for layer in planted))
    for layer, found in planted.items():
        print(f"layer {layer}: {'found' if found else 'MISSED'}")
    if others:
        print(f"also named: {', '.join(others)}")
    print("\nOpen attemper-report.html and attemper-report-broken.html in a browser: they work offline.")
    return 0 if all(planted.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
