"""`attemper lab all`: every question in reading order, into a folder that an interrupt leaves whole."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._errors import OptionError, explain
from ..lab import CLAIMS, QUESTIONS, load
from ..lab._questions import fix_for, missing_for
from ..lab._questions import question as question_of
from ..lab._result import SCHEMA, versions
from ._shared import OK, USAGE, count, open_console, quieten, save, say, warnings_in_words, writable

OUT = "attemper-lab"
PAGE = "why-sqrt-dk.html"
CLOCK = "clock.json"

# About how many seconds each takes, for the share that is done; training is most of it.
_SECONDS = {"training": (60, 3600), "word": (20, 60), "gradients": (10, 40), "cost": (10, 40)}
_USUAL = (5, 10)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `all` takes."""
    add = parser.add_argument
    add("--quick", action="store_true", help="sizes that show the effects in minutes")
    add("--out", metavar="DIR", default=OUT, help=f"where the answers go (default: {OUT})")
    add("--only", metavar="QUESTION", nargs="+", help="ask these, in reading order")
    add("--seed", metavar="N", type=int, help="where the random numbers of every question start (default: 0)")
    add("--resume", action="store_true", help="keep the answers in DIR that the same knobs and versions gave")
    add("--jobs", metavar="N", type=count, help="training runs at a time, each in a process (default: 1)")
    add("--json", metavar="PATH", nargs="?", const="-", help="write one JSON list; without PATH, on standard output")
    add("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> int:
    """Ask them all; the exit status."""
    from ..report import lab_summary, require_figures

    require_figures()
    if options.seed is not None and options.seed < 0:
        raise OptionError(explain(f"--seed is {options.seed}.", "Pass a whole number of at least 0."))
    if options.json not in (None, "-"):
        writable("json", Path(options.json), ".json")
    wanted = {question_of(name).name for name in options.only} if options.only else set(QUESTIONS)
    study = Study(_folder(Path(options.out)), options)
    try:
        with warnings_in_words():
            study.ask([name for name in QUESTIONS if name in wanted])
    except KeyboardInterrupt:
        say(f"{len(study.records)} of {len(wanted)} answers are in {options.out}; --resume goes on from them.")
        raise
    finally:
        # After an interrupt too: what is done is on the page.
        study.write_page()
    records = study.in_order()
    asked = {claim for name in wanted for claim in QUESTIONS[name].claims}
    asked |= {verdict["claim"] for record in records for verdict in record["verdicts"]}
    text = json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if options.json not in (None, "-"):
        say(f"wrote {save(Path(options.json), lambda draft: draft.write_text(text, encoding='utf-8'))}")
    if options.json == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        open_console(stderr=False).print(
            lab_summary({claim: says for claim, says in CLAIMS.items() if claim in asked}, records)
        )
    for name, error in study.failures.items():
        say(f"attemper: the question {name!r} failed: {error}")
    return USAGE if study.failures else OK


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise OptionError(explain(f"--out {path} is no folder that could be made.", "Name another.")) from None
    writable("out", path / PAGE, ".html")
    return path


class Study:
    """The answers so far, in memory and in the folder."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.knobs = {} if options.seed is None else {"seed": options.seed}
        self.records: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.clock: dict[str, Any] = _read(folder / CLOCK) or {}

    def ask(self, names: list[str]) -> None:
        """Ask the questions in turn; one that fails does not stop the others."""
        if self.options.resume:
            self._remember([name for name in QUESTIONS if name not in names])
        ready = []
        for name in names:
            if missing := missing_for(name):
                say(f"{name} is left out: it needs {', '.join(missing)}. {fix_for(missing)}")
            else:
                ready.append(name)
        with _show(ready, self.options.quick) as show:
            for name in ready:
                show.begin(name)
                try:
                    told = self._ask_one(name, show)
                except Exception as error:
                    told = self._failed(name, error)
                show.end(name, told)

    def _remember(self, names: list[str]) -> None:
        """What is not asked now and was answered before belongs on the page as well."""
        from ._lab import configured

        for name in names:
            record = _read(self.folder / f"{name}.json")
            if record and not missing_for(name):
                _, config = configured(name, self.options.quick, self.knobs)
                if _same(record, name, config.to_dict()):
                    self.records[name] = record

    def _failed(self, name: str, error: Exception) -> str:
        from . import _chain

        # Some libraries turn an interrupt into an error of their own.
        if any(isinstance(link, KeyboardInterrupt) for link in _chain(error)):
            raise KeyboardInterrupt from error
        if self.options.traceback:
            import traceback

            traceback.print_exception(error)
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        self.failures[name] = f"{type(error).__name__}: {first}"
        return "failed"

    def _ask_one(self, name: str, show: _Show) -> str:
        from ._lab import configured

        module, config = configured(name, self.options.quick, self.knobs)
        path = self.folder / f"{name}.json"
        if self.options.resume and (record := _same(_read(path), name, config.to_dict())):
            self.records[name] = record
            return "kept"
        if "transformers" in QUESTIONS[name].needs:
            quieten("demo")
        result = module.run(config, show.progress, **self._extras(name))
        save(path, lambda draft: draft.write_text(result.to_json(), encoding="utf-8"))
        # Read again from what was written: the page shows what the files say.
        self.records[name] = json.loads(result.to_json())
        self.clock[name] = result.clock_tables()
        clock = json.dumps(self.clock, indent=1, ensure_ascii=False)
        save(self.folder / CLOCK, lambda draft: draft.write_text(clock, encoding="utf-8"))
        return ""

    def _extras(self, name: str) -> dict[str, Any]:
        """What a question takes beside its knobs, where it takes it: jobs, and a file of finished parts."""
        flags = {flag for flag, _ in getattr(load(name), "OPTIONS", ())}
        extras: dict[str, Any] = {}
        if "--jobs" in flags and self.options.jobs:
            extras["jobs"] = self.options.jobs
        if "--records" in flags:
            extras["records"] = parts = self.folder / f"{name}-runs.jsonl"
            if parts.exists() and not self.options.resume:
                parts.replace(parts.with_suffix(".old"))
        return extras

    def in_order(self) -> list[dict[str, Any]]:
        """The answers as a newcomer reads them."""
        return [self.records[name] for name in QUESTIONS if name in self.records]

    def write_page(self) -> None:
        """The page of what there is; where there is nothing, an older page stays."""
        from ..report import lab_html

        if not self.records:
            return
        page = lab_html(
            self.in_order(),
            clock={name: tables for name, tables in self.clock.items() if name in self.records and tables},
            claims=CLAIMS,
            questions=[asdict(one) for one in QUESTIONS.values()],
        )
        say(f"wrote {save(self.folder / PAGE, lambda draft: draft.write_text(page, encoding='utf-8'))}")


def _read(path: Path) -> Any:
    """What a file of ours holds; None where there is none to read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _same(record: Any, name: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The record, if it answers this question under these knobs and by these versions."""
    if not isinstance(record, dict) or (record.get("schema"), record.get("question")) != (SCHEMA, name):
        return None
    known = record.get("versions", {})
    same = record.get("config") == json.loads(json.dumps(config))
    return record if same and all(known.get(package) == it for package, it in versions().items()) else None


# How far it is


class _Show:
    """Elsewhere than on a terminal: a line per question."""

    def __init__(self, names: list[str], quick: bool) -> None:
        self.names, self.started, self.began = names, time.monotonic(), time.monotonic()
        self.weights = {name: _SECONDS.get(name, _USUAL)[0 if quick else 1] for name in names}
        self.done: set[str] = set()
        self.current = ""

    def begin(self, name: str) -> None:
        """A question starts."""
        self.current, self.began = name, time.monotonic()

    def progress(self, stage: str, done: int, total: int) -> None:
        """What a question tells of itself."""

    def end(self, name: str, told: str) -> None:
        """A question is answered, kept from before, or failed."""
        self.done.add(name)
        self.tell(f"{name:<{max(map(len, self.names))}}  {told or f'{time.monotonic() - self.began:.1f} s'}")

    def tell(self, text: str) -> None:
        """A line that stays."""
        say(text)

    def share(self, inside: float) -> float:
        """The share of all the work that is done, with so much of the current question."""
        total = sum(self.weights.values()) or 1
        return (sum(self.weights[name] for name in self.done) + inside * self.weights.get(self.current, 0)) / total

    def left(self, share: float) -> str:
        """How long it will still take, once that can be told."""
        spent = time.monotonic() - self.started
        if share < 0.02 or spent < 2:
            return ""
        seconds = spent * (1 - share) / share
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"


class _Bar(_Show):
    """On a terminal: one bar for all of it, and the line of each question above it."""

    def __init__(self, names: list[str], quick: bool, bars: Any) -> None:
        super().__init__(names, quick)
        self.bars, self.task = bars, bars.add_task("", total=1.0, left="")

    def begin(self, name: str) -> None:
        super().begin(name)
        self._draw(name, 0.0)

    def progress(self, stage: str, done: int, total: int) -> None:
        self._draw(f"{self.current}: {stage}", min(1.0, done / total) if total else 0.0)

    def tell(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False)

    def _draw(self, text: str, inside: float) -> None:
        share = self.share(inside)
        self.bars.update(self.task, description=text[:44], completed=share, left=self.left(share))


@contextmanager
def _show(names: list[str], quick: bool) -> Iterator[_Show]:
    console = open_console()
    if not console.is_terminal:
        yield _Show(names, quick)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    shown = TextColumn("{task.description}", markup=False)
    with Progress(
        SpinnerColumn(), shown, BarColumn(bar_width=20), TaskProgressColumn(), TextColumn("{task.fields[left]}"),
        console=console, transient=True,
    ) as bars:  # fmt: skip
        yield _Bar(names, quick, bars)
