"""The command `attemper`: data on standard output, everything said about it on standard error.

Exit status 0, or 1 when a finding reaches --fail-on or a self-test fails, or 2 for usage and errors, or 130 when
interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Sequence

from .._errors import AttemperError
from ._shared import INTERRUPTED, OK, USAGE, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = sys.argv[1:] if argv is None else argv
    options = None
    try:
        options = _parse(words)
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show × or √ shows a ?, and no traceback.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        status: int = options.run(options)
        # Here, where what goes wrong is told: Python would flush once all is over.
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of our output has left, as head does
        _give_up_output()
        return OK
    except Exception as error:
        # Some libraries turn an interrupt that meets them in the middle of an import into an error of their own.
        if any(isinstance(link, KeyboardInterrupt) for link in _chain(error)):
            return _interrupted()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _give_up_output()
        if options is not None and options.traceback:
            import traceback

            traceback.print_exception(error)
        else:
            say(_in_words(error))
        return USAGE


def _give_up_output() -> None:
    """What is left of it goes nowhere: Python would try once more at the end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted() -> int:
    say("attemper: interrupted.")
    return INTERRUPTED


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _in_words(error: Exception) -> str:
    if isinstance(error, AttemperError):
        return f"attemper: {error}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "attemper: out of memory.\n  Ask for less: fewer tokens or sequences, a smaller type, smaller sizes."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"attemper: {error.strerror}.\n  Make room, or write elsewhere."
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"attemper: {type(error).__name__}: {first}\n  Run again with --traceback to see where."


# The command line


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    # Imported here, where an interrupt finds somebody who says so.
    from .. import __version__
    from . import _bench, _check, _doctor, _lab, _trace

    parser = argparse.ArgumentParser(
        prog="attemper", description="Says whether a model's attention is at the right temperature."
    )
    parser.add_argument("--version", action="version", version=f"attemper {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in (_check, _lab, _trace, _doctor, _bench):
        command.add_parser(commands)
    for parser_of_command in commands.choices.values():
        parser_of_command.add_argument("--traceback", action="store_true", help="show where an error came from")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # With the usage of the command that was meant.
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
