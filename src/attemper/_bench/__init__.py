"""How fast attention is here, against torch's fused attention on the same threads, or GPU, in the same process.

    _rounds    contenders in turn, disturbed rounds left out
    _row       what was found, and what is required of it
    _attention the calls that are timed     _model   a small GPT
    _cases     every case, by section       _fresh   what only a process of its own shows
    _cuda      every case on a GPU

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


METHOD_ON_GPU = (
    "In one process, each way called in turn for many short rounds, with the host ahead of the GPU, whose events tell "
    "the time; a round in which one took more than 1.5 times its median is left out; the median over rounds of the "
    "time of torch's fastest kernel over ours. Compilation is excluded."
)


def names(
    selection: str = "all", *, device: str = "cpu", threads: int | None = None, only: str | None = None
) -> list[str]:
    """What would be run."""
    return [case.label for case in _chosen(selection, device, threads, only)]


def run(
    selection: str = "all",
    *,
    device: str = "cpu",
    threads: int | None = None,
    only: str | None = None,
    settings: Settings | None = None,
    progress: Progress = silent,
) -> Iterator[Row]:
    """Run a selection of the cases and yield what each gives, as soon as it is there.

    `threads` is a number in place of one and all of them; `only` a part of the name of a case, or a pattern with *.
    """
    cases = _chosen(selection, device, threads, only)
    require(device)
    import torch

    before = torch.get_num_threads()
    try:
        for done, case in enumerate(cases):
            progress(case.label, done, len(cases))
            if case.threads:
                torch.set_num_threads(case.threads)
            yield case.run(settings or SETTINGS[selection])
    finally:
        torch.set_num_threads(before)


def busy() -> float | None:
    """What others, or we ourselves a moment ago, have the machine do, in cores; None where it does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def record_of(rows: Iterable[Row], left_out: Sequence[str] = (), *, device: str = "cpu") -> dict[str, Any]:
    """Rows with all that they depend on, as plain lists and numbers."""
    if device == "cuda":
        return _record_on_gpu(rows)
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


def _record_on_gpu(rows: Iterable[Row]) -> dict[str, Any]:
    import torch
    import triton

    found = versions()
    known = {name: found[name] for name in ("attemper", "python", "torch")}
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {**known, "triton": triton.__version__, "cudnn": torch.backends.cudnn.version()},
        "notes": [METHOD_ON_GPU],
        "rows": [row.to_dict() for row in rows],
    }


def require(device: str) -> None:
    """Refuse to measure where there is nothing to measure; to list the cases takes torch alone."""
    package, extra = ("triton", "cuda") if device == "cuda" else ("numba", "cpu")
    _require(device, package, extra)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise OptionError(explain("torch sees no CUDA device here.", "Leave --device out, or give cpu."))


def _require(device: str, package: str, extra: str) -> None:
    if find_spec(package) is None:
        kernels = "Triton" if device == "cuda" else "Numba"
        headline = f"The benchmark compares kernels of {kernels} with torch, and {package} is not installed."
        raise OptionError(explain(headline, f"pip install 'attemper[{extra}]'"))


def _all_cases(device: str, threads: int | None) -> list[Any]:
    _require(device, "torch", "torch")
    if device == "cpu":
        from . import _cases

        return _cases.all_cases(threads)
    if threads is not None:
        raise OptionError(explain("A number of threads is about the CPU.", "Leave --threads out, or --device."))
    from . import _cuda

    return _cuda.all_cases()


def _chosen(selection: str, device: str, threads: int | None, only: str | None) -> list[Any]:
    if selection not in SELECTIONS:
        raise unknown("selection", selection, SELECTIONS)
    cases = [case for case in _all_cases(device, threads) if only is not None or selection in case.selections]
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
