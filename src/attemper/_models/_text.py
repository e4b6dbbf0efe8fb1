"""The text a model is run on."""

from __future__ import annotations

import sys
from pathlib import Path

from .._errors import OptionError, explain


def read_text(source: str, wanted: str = "A few thousand words give the surest answer.") -> str:
    """The text of a file, or of standard input for "-"; `wanted` is said where there is none."""
    name = "Standard input" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError:
        raise OptionError(
            explain(f"There is no file {source}.", "Give --text a text file, or - to read it from standard input.")
        ) from None
    except OSError as error:
        raise OptionError(
            explain(f"{source} cannot be read: {error.strerror}.", "Give --text a text file in UTF-8.")
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            explain(f"{name} is not text in UTF-8 (byte {error.start}).", "Give --text a text file in UTF-8.")
        ) from None
    if "\0" in text:
        raise OptionError(explain(f"{name} is binary.", "Give --text a text file in UTF-8."))
    if not text.strip():
        raise OptionError(explain(f"{name} is empty.", wanted))
    return text


def sample_text() -> str:
    """The text that ships with the package: plain English prose, some 3,100 tokens."""
    return Path(__file__).with_name("_sample_text.txt").read_text(encoding="utf-8")
