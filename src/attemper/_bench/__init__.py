"""How fast attention is here, against torch's fused attention on the same threads in the same process.

    _rounds    contenders in turn, disturbed rounds left out
    _row       what was found, and what is required of it
    _attention the calls that are timed     _model   a small GPT
    _cases     every case, by section       _fresh   what only a process of its own shows

Importing this module imports neither torch nor Numba.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from .._errors import OptionError, explain, unknown
from .._machine import cores, has_amx, instructions, processor, versions
from .._progress import Progress, silent
from ._row import Row as Row
from ._row import Settings as Settings

SCHEMA = "attemper.bench/1"

SELECTIONS = ("all", "usual", "quick")
"""Everything, in a quarter of an hour; the gist of it, in a minute; hardly anything, in a quarter of one."""

SETTINGS = {
    "all": Settings(rounds=60, least=5, seconds=4.5),
    "usual": Settings(rounds=9, least=3, seconds=1.5),
    "quick": Settings(rounds=7, least=3, seconds=0.8, by_hand=False),
}

METHOD = (
    "In one process, each way called in turn for many short rounds; a round in which one took more than 1.5 times its "
    "median is left out; the median over rounds of torch's time over ours. Compilation is excluded."
)


def names(selection: str = "all", *, threads: int | None = None, only: str | None = None) -> list[str]:
    """What would be run."""
    return [case.label for case in _chosen(selection, threads, only)]


def run(
    selection: str = "all",
    *,
    threads: int | None = None,
    only: str | None = None,
    settings: Settings | None = None,
    progress: Progress = silent,
) -> Iterator[Row]:
    """Run a selection of the cases and yield what each gives, as soon as it is there.

    `threads` is a number in place of one and all of them; `only` a part of the name of a case, or a pattern with *.
    """
    cases = _chosen(selection, threads, only)
    import torch

    before = torch.get_num_threads()
    try:
        for done, case in enumerate(cases):
            progress(case.label, done, len(cases))
            torch.set_num_threads(case.threads)
            yield case.run(settings or SETTINGS[selection])
    finally:
        torch.set_num_threads(before)


def busy() -> float | None:
    """What others, or we ourselves a moment ago, have the machine do, in cores; None where it does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def record_of(rows: Iterable[Row], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Rows with all that they depend on, as plain lists and numbers."""
    from .._backends import cpu

    told = cpu.describe()
    notes = [METHOD]
    if has_amx():
        notes.append("This processor has AMX, which torch uses for bfloat16 and attemper's kernels do not.")
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "compiled_for": told["processor"],
        "instructions": told["instructions"] or instructions(),
        "amx": has_amx(),
        "cores": cores(),
        "threads": told["threads"],
        "runner": told["runner"],
        "versions": versions(),
        "notes": [*notes, *left_out],
        "rows": [row.to_dict() for row in rows],
    }


def _chosen(selection: str, threads: int | None, only: str | None) -> list[Any]:
    if selection not in SELECTIONS:
        raise unknown("selection", selection, SELECTIONS)
    for package, extra in (("torch", "torch"), ("numba", "cpu")):
        if find_spec(package) is None:
            headline = f"The benchmark compares kernels of Numba with torch, and {package} is not installed."
            raise OptionError(explain(headline, f"pip install 'attemper[{extra}]'"))
    from ._cases import all_cases

    cases = [case for case in all_cases(threads) if only is not None or selection in case.selections]
    if only is None:
        return cases
    # A pattern is looked for among all cases: who names one wants it.
    pattern = only.casefold() if any(sign in only for sign in "*?[") else f"*{only.casefold()}*"
    chosen = [case for case in cases if fnmatch.fnmatchcase(case.label.casefold(), pattern)]
    if not chosen:
        sections = ", ".join(dict.fromkeys(case.section for case in cases))
        fix = f"A name begins with its section: {sections}. One of them is {cases[0].label!r}."
        raise OptionError(explain(f"No case has {only!r} in its name.", fix))
    return chosen
