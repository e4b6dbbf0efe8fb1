"""What every command shares: where it talks, how it shows progress, how it writes a file."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import OptionError, explain

if TYPE_CHECKING:
    from rich.console import Console

    from .._progress import Progress

OK, FOUND, USAGE, INTERRUPTED = 0, 1, 2, 130


def say(text: str) -> None:
    """One line on standard error, plain: it may hold brackets that rich would take for markup."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def room() -> int:
    """The columns of the terminal, or what COLUMNS says; into a pipe a line may be as long as it is."""
    return shutil.get_terminal_size((10_000, 24)).columns


def count(text: str) -> int:
    """An option's value that counts something."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def writable(option: str, path: Path, suffix: str) -> None:
    """Refuse now what could not be written later."""
    if path.suffix != suffix:
        raise OptionError(
            explain(f"--{option} {path} does not end in {suffix}.", f"Write --{option} {path.stem}{suffix}.")
        )
    if not path.parent.is_dir():
        raise OptionError(explain(f"There is no directory {path.parent}.", "Make it first, or write elsewhere."))
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise OptionError(explain(f"{path} cannot be written.", "Write elsewhere."))
    draft = _draft(path)
    try:
        # Tried and not asked: a folder may say yes and take no file.
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise OptionError(explain(f"{path} cannot be written: {error.strerror}.", "Write elsewhere.")) from None


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")


def save(path: Path, write: Callable[[Path], object]) -> Path:
    """Written beside its place and moved there whole: an interrupt leaves the old file or the new one."""
    draft = _draft(path)
    try:
        write(draft)
        draft.replace(path)
    except OSError as error:
        why = error.strerror or error
        raise OptionError(explain(f"{path} could not be written: {why}.", "Make room, or write elsewhere.")) from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def quieten(target: str) -> None:
    """Before the libraries are imported: no bars of theirs over ours, and no network where none is needed."""
    from .._models import needs_no_network

    quiet = {
        "TQDM_DISABLE": "1",
        "HF_HUB_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        # Loading a .bin from the hub would otherwise start a thread that asks for a conversion.
        "DISABLE_SAFETENSORS_CONVERSION": "1",
    }
    if needs_no_network(target):
        quiet["HF_HUB_OFFLINE"] = "1"
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """A warning as one line, without the source line that raised it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        first = next((line.strip() for line in str(message).splitlines() if line.strip()), "")
        say(f"warning: {first}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def open_console(stderr: bool = True) -> Console:
    """A rich console, or how to get one."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise OptionError(explain("The command line needs rich, which is not installed.", "pip install rich")) from None
    return Console(stderr=stderr)


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A spinner and a bar on a terminal; elsewhere one line per stage."""
    if not console.is_terminal:
        last = ""

        def tell(stage: str, done: int, total: int) -> None:  # noqa: ARG001
            nonlocal last
            if stage != last:
                say(f"{stage} …")
                last = stage

        yield tell
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def draw(stage: str, done: int, total: int) -> None:
            # Where the end is not known the bar swings.
            bars.update(task, description=stage, completed=done, total=total if done < total and total > 1 else None)

        yield draw
