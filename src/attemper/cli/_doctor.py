"""`attemper doctor`: what this installation can do, and whether it does it right."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from .._errors import OptionError, explain
from ._shared import FOUND, OK, open_console, room, say, show_progress, warnings_in_words

EXAMPLES = """\
examples:
  attemper doctor                 versions, processor, kernels, self-tests
  attemper doctor --compile       compile every kernel now, so that no later call has to
  attemper doctor --clear-cache   delete the compiled kernels
"""

WIDTH = 12  # of the first column
Span = tuple[str, str]


def add_parser(commands: Any) -> None:
    """Declare the command and its options."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this installation can do, and test it",
        description="Says which libraries, processor, threads and compiled kernels there are, which backend runs on "
        "what, and whether each gives the right answer. Exits with 1 when one does not.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = doctor.add_argument
    add("--compile", action="store_true", help="compile every kernel now, which takes about a minute, once")
    add("--clear-cache", action="store_true", help="delete the compiled kernels, of other versions too")
    add("--json", action="store_true", help="write JSON on standard output")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look at the installation and show what was found; the exit status."""
    from .._doctor import clear_cache, compile_kernels, examine

    if options.json and options.clear_cache and not options.compile:
        fix = "Leave --json out: deleting is told on standard error."
        raise OptionError(explain("--clear-cache has nothing to write as JSON.", fix))
    console = open_console()
    if options.clear_cache:
        files, size = clear_cache()
        say(f"deleted {files} compiled kernel{'' if files == 1 else 's'}, {in_bytes(size)}")
        if not options.compile:
            # A self-test would compile again what was just deleted.
            return OK
    with warnings_in_words(), show_progress(console) as progress:
        if options.compile:
            compile_kernels(progress)
        record = examine(progress)
    if options.json:
        sys.stdout.write(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
    else:
        _show(record)
    return OK if record["ok"] else FOUND


def in_bytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB" if size >= 1000 else f"{size} bytes"


# On the screen


def _show(record: Mapping[str, Any]) -> None:
    from rich.text import Text

    console = open_console(stderr=False)
    last = None
    for title, spans in _lines(record):
        text, end = Text.assemble(*spans), 0
        # A long path stays in one piece.
        for line in textwrap.wrap(text.plain, max(20, room() - WIDTH), break_long_words=False, break_on_hyphens=False):
            start = text.plain.index(line, end)
            end = start + len(line)
            head = Text(f"{'' if title == last else title:<{WIDTH}}", style="bold")
            console.print(Text.assemble(head, text[start:end]), soft_wrap=True)
            last = title


def _lines(record: Mapping[str, Any]) -> Iterator[tuple[str, list[Span]]]:
    versions = record["versions"]
    yield "attemper", [(f"{versions['attemper']}, Python {versions['python']}, NumPy {versions['numpy']}", "")]
    yield "torch", [_version(versions["torch"], "pip install 'attemper[torch]'")]
    numba = versions["numba"] and f"{versions['numba']}, llvmlite {versions['llvmlite']}"
    yield "numba", [_version(numba, "pip install 'attemper[cpu]'")]
    yield "processor", [(_processor(record["processor"]), "")]
    yield from (("gpu", [line]) for gpu in record["gpus"] for line in _gpu(gpu))
    for threads in record["threads"]:
        yield "threads", [(f"{threads['count']}, {threads['whose']}, for {_used_with(threads)}", "")]
    if record["cache"] is not None:
        yield from (("cache", [(line, "")]) for line in _cache(record["cache"]))
    for operands, backend in record["auto"].items():
        yield "auto", [(f"{backend or 'nothing'} for {operands}", "")]
    for test in record["self_tests"]:
        verdict: Span = ("right  ", "green") if test["ok"] else ("wrong  ", "bold red")
        told = f"{test['backend']} on {test['operands']}, {test['dtype']}: {test['what']}"
        yield "self-tests", [verdict, (told + (f": {test['detail']}" if test["detail"] and not test["ok"] else ""), "")]


def _version(found: str | None, fix: str) -> Span:
    return (found, "") if found else (f"not installed: {fix}", "yellow")


def _used_with(threads: Mapping[str, Any]) -> str:
    return "NumPy arrays while torch is not imported" if threads["with"] == "NumPy" else "tensors and arrays"


def _processor(found: Mapping[str, Any]) -> str:
    parts = [found["name"] + (f" ({found['compiled_for']})" if found.get("compiled_for") else "")]
    parts.append(found["instructions"] or "vector instructions not known")
    if found["amx"]:
        parts.append("AMX, which torch uses for bfloat16 and these kernels do not")
    parts.append(f"{found['cores']} core{'' if found['cores'] == 1 else 's'}")
    return ", ".join(parts)


def _gpu(found: Mapping[str, Any]) -> Iterator[Span]:
    yield f"{found['name']}, compute capability {found['capability']}, {found['bytes'] / 1e9:.0f} GB", ""
    if found["triton"] is None:
        yield _version(None, "pip install 'attemper[cuda]'")
        return
    kernels = " and its kernels for Hopper" if found["hopper"] else ""
    gradients = f"; gradients by cuDNN {found['cudnn']}" if found["cudnn"] else ""
    yield f"Triton {found['triton']}{kernels}{gradients}", ""


def _cache(found: Mapping[str, Any]) -> Iterator[str]:
    kernels: Mapping[str, int | None] = found["kernels"]
    compiled = [name for name, size in kernels.items() if size is not None]
    missing = [name for name, size in kernels.items() if size is None]
    yield found["folder"]
    yield f"{len(compiled)} of {len(kernels)} kernels compiled, {in_bytes(found['bytes'])}" + (
        f": {', '.join(compiled)}" if compiled and missing else ""
    )
    if missing:
        yield f"when first used, or with --compile: {', '.join(missing)}"
    if found["other_files"]:
        files = found["other_files"]
        yield f"{files} file{'' if files == 1 else 's'} of other versions, {in_bytes(found['other_bytes'])}"
