"""The runs of a study: which there are, several at a time, and a file from which an interrupted study goes on."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._errors import OptionError, brief, explain
from .._progress import Progress
from ._study import train
from ._study_data import Cell, Data, Settings, load, opening

Record = dict[str, Any]
Run = tuple[Cell, int]


def conduct(
    runs: Sequence[Run], settings: Settings, progress: Progress, *, jobs: int = 1, records: str | Path | None = None
) -> tuple[dict[Run, Record], dict[str, Data]]:
    """The record of every run, of which those in the file `records` are not made again; and the data by task."""
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise OptionError(explain(f"jobs is {brief(jobs)}.", "Pass how many runs to make at a time, at least 1."))
    first = min(seed for _, seed in runs)
    data = {task: load(task, settings, first) for task in dict.fromkeys(cell.task for cell, _ in runs)}
    wanted = {_key(cell, seed, settings, data[cell.task].digest): (cell, seed) for cell, seed in runs}
    found: dict[Run, Record] = {}
    path = None if records is None else Path(records)
    for record in _read(path):
        run = wanted.get(record.get("key", ""))
        if run is not None:
            found[run] = record
    keys = {run: key for key, run in wanted.items()}
    # The longest first, so that none of them is left over when the others are done.
    missing = sorted((run for run in runs if run not in found), key=_cost, reverse=True)
    if path is not None and missing:
        with opening("records", path, "Pass a file in a folder that is there.", "written"):
            path.open("ab").close()
    total, done = len(runs), len(runs) - len(missing)
    progress("training runs", done, total)
    made = _together(missing, settings, min(jobs, len(missing))) if jobs > 1 else _in_turn(missing, settings)
    # Closed here and now, and not when an interrupt's traceback is forgotten: processes wait for it.
    with contextlib.closing(made):
        for run, record in made:
            found[run] = {"key": keys[run], **record}
            if path is not None:
                _append(path, found[run])
            done += 1
            progress(str(run[0]), done, total)
    # In the order of the design, whatever the order in which they ended.
    return {run: found[run] for run in runs}, data


def _in_turn(runs: Iterable[Run], settings: Settings) -> Generator[tuple[Run, Record]]:
    import torch

    threads = torch.get_num_threads()
    try:
        for cell, seed in runs:
            torch.set_num_threads(1)
            yield (cell, seed), _timed(cell, seed, settings)
    finally:
        torch.set_num_threads(threads)


def _together(runs: Sequence[Run], settings: Settings, jobs: int) -> Generator[tuple[Run, Record]]:
    if not runs:
        return
    before = set(multiprocessing.active_children())
    # spawn: a fork would inherit the threads of torch without what they hold.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_start)
    waiting = {pool.submit(_timed, cell, seed, settings): (cell, seed) for cell, seed in runs}
    try:
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:
        # Interrupted or failed: what was yielded is safe with the caller, and the rest is given up. The pool notices
        # that its processes are gone; told to cancel as well, it trips over what it cancelled (seen in 3.11).
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown()


def _timed(cell: Cell, seed: int, settings: Settings) -> Record:
    """The record of a run, and the seconds of one processor that it took."""
    before = time.process_time()
    record = train(cell, seed, settings)
    return {**record, "seconds": round(time.process_time() - before, 2)}


def _start() -> None:
    """In a new process: one thread, which makes a run the same everywhere; interrupts are for the parent to handle."""
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _cost(run: Run) -> float:
    cell = run[0]
    return cell.depth * (cell.head_dim + 100) * (6 if cell.rule == "additive" and cell.task == "text" else 1)


# The file


def _key(cell: Cell, seed: int, settings: Settings, digest: str) -> str:
    """What makes a run the same run, whatever files its data came from."""
    shared = {name: value for name, value in asdict(settings).items() if name not in ("text", "digits")}
    return json.dumps({**asdict(cell), "seed": seed, **shared, "data": digest[:16]}, sort_keys=True)


def _read(path: Path | None) -> Iterator[Record]:
    """The records of a file; a line that a kill has cut off is passed over, and its run made again."""
    if path is None or not path.exists():
        return
    with opening("records", path, "Pass the file of an interrupted study, or one that is not there yet."):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record


def _append(path: Path, record: Record) -> None:
    line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with path.open("ab+") as file:
        # Behind a line that was cut off, ours begins on a line of its own.
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
