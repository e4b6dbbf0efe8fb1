"""How long work tells its caller where it stands."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage in words, the steps done and the steps in all."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress was asked for."""


_listener: Progress = silent


def on_progress(listener: Progress | None) -> Progress:
    """Have the library call `listener(stage, done, total)` when it does something long that nobody asked for.

    Today that is compiling kernels for this processor, once on a machine. None listens no more. Returns the listener
    before this one.

    >>> before = on_progress(lambda stage, done, total: None)
    >>> _ = on_progress(before)
    """
    global _listener
    before, _listener = _listener, silent if listener is None else listener
    return before


def tell(stage: str, done: int, total: int) -> None:
    """Tell whoever listens."""
    _listener(stage, done, total)
