"""`attemper lab [QUESTION]`: ask why attention divides by √d_k, one question at a time or all of them."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn

from .._errors import OptionError, explain
from ..lab import QUESTIONS, Config, Question, load
from ..lab._questions import fix_for, missing_for
from ..lab._questions import question as question_of
from ._lab_all import add_options as add_options_of_all
from ._lab_all import run as run_all
from ._shared import OK, open_console, quieten, room, save, say, show_progress, warnings_in_words, writable

EXAMPLES = """\
examples:
  attemper lab                                  the questions, one line each
  attemper lab variance                         the answer, on the terminal
  attemper lab variance --d-k 1 8 64 512 --json
  attemper lab saturation --quick --html collapse.html --figure collapse.svg
  attemper lab all --quick --out answers        every answer on one page
"""

ALL = "all"
_KNOB, _EXTRA = "knob:", "extra:"


def add_parser(commands: Any) -> None:
    """Declare the command; its options depend on the question, and are declared once that is known."""
    about = "ask why attention divides by √d_k, and measure the answer"
    prog = commands.add_parser("lab", help=about).prog
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [QUESTION] [options]",
        description="Every claim about why attention divides by √d_k, as an experiment that you can run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("question", metavar="QUESTION", nargs="?", help="one of those that `attemper lab` lists, or all")
    add("--json", action="store_true", help="without a question: the list as JSON")
    parser.set_defaults(run=show_questions)
    commands.choices["lab"] = parser


class _Parser(argparse.ArgumentParser):
    """Finds the question among the arguments and leaves the rest to that question's own parser."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        names = [word.replace("_", "-") for word in words]
        # Looked for by name, wherever it stands: `--json variance` is a question and not a path.
        known = (i for i, name in enumerate(names) if name in QUESTIONS or name == ALL)
        if "--only" in words:
            words = [word for word in words if word != ALL]
            return _parser_of_all(self.prog).parse_args(words, namespace), []
        try:
            if (at := next(known, None)) is not None:
                words.pop(at)
                parser = _parser_of_all(self.prog) if names[at] == ALL else parser_of(question_of(names[at]), self.prog)
                return parser.parse_args(words, namespace), []
            if strange := [word for word in words if not word.startswith("-")]:
                question_of(strange[0])
        except Exception as error:
            # Told where every error is told, once the command runs.
            return argparse.Namespace(run=_raise(error), traceback="--traceback" in words), []
        options, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"name a QUESTION for {unknown[0]}: one that attemper lab lists, or all")
        return options, []


def _raise(error: Exception) -> Callable[[argparse.Namespace], NoReturn]:
    def run_of(_: argparse.Namespace) -> NoReturn:
        raise error

    return run_of


# The list


def show_questions(options: argparse.Namespace) -> int:
    """The questions, one line each."""
    if options.json:
        listed = [
            {"name": q.name, "title": q.title, "asks": q.asks, "claims": list(q.claims), "missing": missing_for(q.name)}
            for q in QUESTIONS.values()
        ]
        sys.stdout.write(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
        return OK
    wide = max(map(len, QUESTIONS))
    fixes = []
    for one in QUESTIONS.values():
        missing = missing_for(one.name)
        notes = [_claims_of(one)] if one.claims else []
        if missing:
            notes.append(f"needs {', '.join(missing)}")
            fixes.append(fix_for(missing))
        text = one.asks + (f"  ({'; '.join(notes)})" if notes else "")
        lines = textwrap.wrap(text, max(20, room() - wide - 2), break_long_words=False, break_on_hyphens=False)
        sys.stdout.write(f"{one.name:<{wide}}  " + f"\n{'':<{wide}}  ".join(lines) + "\n")
    say("\nattemper lab QUESTION asks one of them, attemper lab all asks them all. Both take --quick and --help.")
    for fix in dict.fromkeys(fixes):
        say(f"For what is missing: {fix}")
    return OK


def _claims_of(one: Question) -> str:
    return f"claim{'s' if len(one.claims) > 1 else ''} {', '.join(map(str, one.claims))}"


# One question


def parser_of(asked: Question, prog: str) -> argparse.ArgumentParser:
    """The parser of a question: what every question has, its knobs, and options of its own that are no knobs."""
    # The module may need what is missing to be imported at all.
    if missing := missing_for(asked.name):
        raise OptionError(explain(f"The question {asked.name!r} needs {', '.join(missing)}.", fix_for(missing)))
    parser = argparse.ArgumentParser(prog=f"{prog} {asked.name}", description=asked.asks)
    add = parser.add_argument
    add("--quick", action="store_true", help="sizes that show the effect in seconds")
    add("--json", metavar="PATH", nargs="?", const="-", help="write JSON; without PATH, on standard output")
    add("--html", metavar="PATH", help="write a page: one file, works offline")
    add("--figure", metavar="PATH", help="write the figure: .svg or .png")
    add("--traceback", action="store_true", help="show where an error came from")
    parser.set_defaults(run=run, question=asked.name)
    module = load(asked.name)
    knobs = parser.add_argument_group("knobs")
    for one in fields(module.Config):
        flag, keywords = option_of(one)
        knobs.add_argument(flag, **keywords)
    own = getattr(module, "OPTIONS", ())
    if own:
        group = parser.add_argument_group("how it is run, which changes no number")
        for flag, keywords in own:
            name = keywords.get("dest") or flag.removeprefix("--").replace("-", "_")
            group.add_argument(flag, **{**keywords, "dest": _EXTRA + name})
    return parser


def option_of(one: Field[Any]) -> tuple[str, dict[str, Any]]:
    """A field of a Config as an option of the command line."""
    default: Any = None if one.default is MISSING else one.default
    several = isinstance(default, tuple)
    sample = default[0] if several else default
    shown = " ".join(map(str, default)) if several else str(default)
    choices = one.metadata.get("choices") or ()
    means = one.metadata.get("means", "")
    told = f"{means}; {', '.join(choices)}" if choices else means
    keywords: dict[str, Any] = {
        "dest": _KNOB + one.name,
        "default": argparse.SUPPRESS,
        "help": f"{told} (default: {'none' if default is None else shown})".replace("%", "%%"),
    }
    flag = f"--{one.name.replace('_', '-')}"
    if isinstance(sample, bool):
        return flag, {**keywords, "action": argparse.BooleanOptionalAction}
    # Where nothing is the default, the annotation tells what else it may be.
    kind = str(one.type) if sample is None else type(sample).__name__
    convert = _whole if "int" in kind else _number if "float" in kind else str
    return flag, {
        **keywords,
        "type": convert,
        "metavar": "N" if convert is _whole else "X" if convert is _number else "TEXT",
        **({"nargs": "+"} if several else {}),
    }


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def run(options: argparse.Namespace) -> int:
    """Ask one question and show its answer; the exit status."""
    # Everything that can be refused is refused before anything is measured.
    for option, suffixes in (("html", (".html",)), ("json", (".json",)), ("figure", (".svg", ".png"))):
        if (path := getattr(options, option)) not in (None, "-"):
            right = Path(path).suffix if Path(path).suffix in suffixes else suffixes[0]
            writable(option, Path(path), right)
    if options.html or options.figure:
        from ..report import require_figures

        require_figures()
    module, config = configured(options.question, options.quick, _prefixed(options, _KNOB))
    if "transformers" in QUESTIONS[options.question].needs:
        quieten("demo")
    console = open_console()
    with warnings_in_words(), show_progress(console) as progress:
        result = module.run(config, progress if console.is_terminal else _quiet, **_prefixed(options, _EXTRA))
    # The files first: a reader that leaves early, as head does, must not cost what took an hour.
    for path in (options.json, options.html, options.figure):
        if path not in (None, "-"):
            say(f"wrote {save(Path(path), result.save)}")
    if options.json == "-":
        sys.stdout.write(result.to_json())
        sys.stdout.flush()
    else:
        open_console(stderr=False).print(result)
    return OK


def configured(name: str, quick: bool, knobs: dict[str, Any]) -> tuple[Any, Config]:
    """The module of a question and the Config it is asked with."""
    module = load(name)
    base: Config = module.QUICK if quick else module.Config()
    return module, module.Config.from_dict({**base.to_dict(), **knobs})


def _prefixed(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}


def _quiet(stage: str, done: int, total: int) -> None:
    """Into a file or a pipe a line per step would be noise."""


# All of them


def _parser_of_all(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{prog} {ALL}",
        description="Asks every question and writes the answers: a JSON file each, and one page of them all.",
    )
    add_options_of_all(parser)
    parser.set_defaults(run=run_all)
    return parser
