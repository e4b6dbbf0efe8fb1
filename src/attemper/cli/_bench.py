"""`attemper bench`: how fast attention is on this machine, against torch's own."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ._shared import OK, count, open_console, quieten, room, say, show_progress, warnings_in_words

if TYPE_CHECKING:
    from .._bench import Row

EXAMPLES = """\
examples:
  attemper bench                        a selection, in about a minute
  attemper bench --quick                a smaller one
  attemper bench --all                  everything, in a quarter of an hour
  attemper bench --only forward         the cases with that in their names, of all there are
  attemper bench --only "*window*" --threads 1 --json
  attemper bench --device cuda          the same on a GPU, against the fastest of torch's kernels there

Close what else is running: a benchmark on a busy machine measures the others.
"""

Span = tuple[str, str]
HEAD = (
    "", "dtype", "threads", "attemper", "torch", "kernel",
    "speed", "of product", "statistics", "read", "met",
)  # fmt: skip
LEFT = (0, 1, 5, 10)  # columns that are words
NAMES = 3  # columns that say which case it is


def add_parser(commands: Any) -> None:
    """Declare the command and its options."""
    bench = commands.add_parser(
        "bench",
        help="measure the speed on this machine against torch's fused attention",
        description="Measures attention on the CPU or a GPU, with and without statistics, against torch's fused "
        "attention: interleaved, on the same threads, compilation excluded.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = bench.add_argument
    size = bench.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less than a minute's worth: about 15 seconds")
    size.add_argument("--all", action="store_true", help="every case, about 15 minutes")
    add("--only", metavar="PATTERN", help="the cases, of all, whose names contain this, or match it with *")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: cpu)")
    add("--threads", metavar="N", type=count, help="threads for both sides (default: as many as torch takes)")
    add("--list", action="store_true", help="the names of the cases, and measure nothing")
    add("--json", action="store_true", help="write JSON on standard output")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and show; after an interrupt what there is. The exit status."""
    from .. import _bench
    from .._machine import cores
    from .._progress import on_progress

    selection = "quick" if options.quick else "all" if options.all else "usual"
    chosen = {"device": options.device, "threads": options.threads, "only": options.only}
    # Everything that can be refused is refused before anything is measured.
    names = _bench.names(selection, **chosen)
    if options.list:
        sys.stdout.write("".join(f"{name}\n" for name in names))
        return OK
    _bench.require(options.device)
    console = open_console()
    quieten("demo")
    if (load := _bench.busy()) is not None and load > cores() / 2:
        say(f"warning: the machine has had {load:.1f} cores' worth to do of late; what else runs is measured too.")
    rows: list[Row] = []
    try:
        with warnings_in_words(), show_progress(console) as progress:
            before = on_progress(progress)
            try:
                rows.extend(_bench.run(selection, **chosen, progress=progress))
            finally:
                on_progress(before)
    finally:
        # After an interrupt too: what is done is done.
        if rows:
            _show(rows, options.json, len(names), options.device)
    return OK


def _show(rows: list[Row], as_json: bool, in_all: int, device: str) -> None:
    from .. import _bench

    record = _bench.record_of(rows, device=device)
    if as_json:
        sys.stdout.write(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    from rich.text import Text

    console = open_console(stderr=False)
    for line in table(rows, room()):
        text = Text()
        for part, style in line:
            text.append(part, style=style or None)
        text.rstrip()
        console.print(text, soft_wrap=True)
    versions = record["versions"]
    if device == "cuda":
        say(
            f"\n{record['device']}, torch {versions['torch']}, Triton {versions['triton']}, cuDNN {versions['cudnn']}; "
            "batch × heads × length × head_dim"
        )
    else:
        say(
            f"\n{record['processor']} ({record['compiled_for']}), {record['instructions']}, {record['cores']} cores, "
            f"torch {versions['torch']}, Numba {versions['numba']}, {record['runner']}"
        )
    for note in record["notes"]:
        say(note)
    discarded = sum(row.discarded for row in rows)
    say(f"{discarded} of {discarded + sum(row.rounds for row in rows)} rounds were disturbed and left out.")
    if len(rows) < in_all:
        say(f"{len(rows)} of {in_all} cases were measured.")
    if missed := sum(not row.met and not row.skipped for row in rows):
        say(f"{missed} of {len(rows)} cases miss what is required of the machine that this was written on.")


# The table


def table(rows: Sequence[Row], width: int = 10_000) -> Iterator[list[Span]]:
    """Lines of styled text, the columns as wide as they need to be; where that is too much, two lines a case."""
    cells: list[tuple[str, ...]] = [tuple(map(str, _cells(row))) for row in rows]
    wide = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    # Columns that nobody fills are left out.
    used = [i for i in range(len(HEAD)) if i == 0 or any(row[i] for row in cells)]
    gap, indent = "  ", ""
    if stacked := sum(wide[i] for i in used) + len(gap) * (len(used) - 1) > width:
        used, indent = [i for i in used if i >= NAMES], "    "
        if len(indent) + sum(wide[i] for i in used) + len(gap) * (len(used) - 1) > width:
            gap = " "

    def line(row: Sequence[str], style: str = "") -> list[Span]:
        parts: list[Span] = [(indent, "")]
        for i in used:
            text = f"{row[i]:<{wide[i]}}" if i in LEFT else f"{row[i]:>{wide[i]}}"
            colour = style
            if HEAD[i] == "met" and not style:
                colour = "green" if row[i] == "yes" else "yellow"
            parts += [(text, colour), (gap, "")]
        return parts[:-1]

    yield line(HEAD, "bold")
    section = ""
    for row, shown in zip(rows, cells, strict=True):
        if row.section != section:
            section = row.section
            yield [(section, "bold")]
        if stacked:
            threads = f"{shown[2]} thread{'' if row.threads == 1 else 's'}" if shown[2] else ""
            yield from _folded(", ".join(filter(None, (shown[0].strip(), shown[1], threads))), 2, width)
        yield line(shown)
        if row.skipped:
            yield from _folded(f"skipped: {row.skipped}", 4, width)
        elif missed := [check.missed for check in row.checks if not check.met]:
            yield from _folded(f"misses: {', '.join(missed)}", 4, width)


def _folded(text: str, indent: int, width: int) -> Iterator[list[Span]]:
    for part in textwrap.wrap(text, max(20, width - indent), break_long_words=False, break_on_hyphens=False):
        yield [(" " * indent + part, "")]


def _cells(row: Row) -> Iterator[str]:
    from .._bench._row import number

    def found(what: str) -> str:
        return next((number(check.found, check.unit) for check in row.checks if check.what == what), "")

    def beside(name: str, other: str) -> float | None:
        """Of a GPU nothing is required, and everything is shown."""
        times = (row.seconds.get(name), row.seconds.get(other))
        return None if row.threads or None in times else times[0] / times[1]  # type: ignore[operator]

    cost, share = beside("attemper", "attemper, no statistics"), beside("attemper read", "attemper")

    yield f"  {row.case}"
    yield row.dtype
    yield str(row.threads or "")
    yield _time(row.seconds.get("attemper", row.seconds.get("watched"))) or _megabytes(row.megabytes.get("attemper"))
    theirs = row.seconds.get(row.peer, row.seconds.get("not watched"))
    yield _time(theirs) or _megabytes(row.megabytes.get("torch fused"))
    yield "" if row.threads else row.peer.removeprefix("torch ")
    yield "" if row.ratio is None else f"{row.ratio:.2f}×"
    yield "" if row.share is None else f"{100 * row.share:.0f} %"
    yield found("statistics") if cost is None else number(cost - 1, "%")
    yield found("read") if share is None else number(share, "×")
    yield "" if not row.checks or row.skipped else "yes" if row.met else "no"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _megabytes(size: float | None) -> str:
    return "" if size is None else f"{size:.0f} MB"
