"""The CPU backend against torch's fused attention: speed, memory, calls; everything, in about a quarter of an hour.

The cases are those of `attemper bench`. Writes benchmarks/results/cpu.json; `make docs` turns it into the tables of
docs/cpu.md. With --only, the rows measured anew take the place of the old ones of the same machine and versions.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from attemper import _bench, on_progress
from attemper.cli._bench import table

RESULTS = Path(__file__).parent / "results" / "cpu.json"
SAME = ("processor", "compiled_for", "instructions", "cores", "versions")


def merged(old: dict, new: dict) -> dict:
    """The rows of both, in the order of all cases; of a case that both have the new one."""
    if any(old.get(name) != new[name] for name in SAME):
        raise SystemExit(f"{RESULTS} is of another machine or other versions: measure everything.")
    rows = {_key(row): row for row in (*old["rows"], *new["rows"])}
    order = {name: place for place, name in enumerate(_bench.names())}
    return {**new, "rows": sorted(rows.values(), key=lambda row: order.get(_key(row), len(order)))}


def _key(row: dict) -> str:
    threads = f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}"
    return f"{row['section']} {row['case']}, {row['dtype']}, {threads}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the cases whose names contain this, or match it with *")
    parser.add_argument("--seconds", type=float, help="of a case, for a trial (default: 4.5)")
    given = parser.parse_args()
    settings = _bench.SETTINGS["all"]
    if given.seconds is not None:
        settings = settings._replace(seconds=given.seconds, least=3)
    start = time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {done:3} of {total}  {stage}", file=sys.stderr, flush=True)

    on_progress(progress)
    rows = []
    try:
        for row in _bench.run("all", only=given.only, settings=settings, progress=progress):
            rows.append(row)
            if not row.met:
                print(
                    f"         {row.skipped or ', '.join(c.missed for c in row.checks if not c.met)}", file=sys.stderr
                )
    except KeyboardInterrupt:
        _show(rows)
        print("interrupted: nothing is written.", file=sys.stderr)
        return 130
    _show(rows)
    record = _bench.record_of(rows)
    if given.only and RESULTS.exists():
        record = merged(json.loads(RESULTS.read_text()), record)
    RESULTS.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"{time.monotonic() - start:.0f} s, wrote {RESULTS}", file=sys.stderr)
    return 0


def _show(rows: list) -> None:
    for line in table(rows) if rows else ():
        print("".join(text for text, _ in line).rstrip())


if __name__ == "__main__":
    sys.exit(main())
