"""How long work tells its caller where it stands."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage in words, the steps done and the steps in all."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress was asked for."""
