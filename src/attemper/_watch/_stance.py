"""Telling dynamo what to do in one thread: its own stance is one for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import eval_frame


class _OwnStance:
    """What stands in the place of dynamo's stance: to one thread a stance of its own, to the others what was there.

    Once it is over it is what was there before to all of them: somebody who found it may put it back at any time.
    """

    def __init__(self, own: Any, before: Any) -> None:
        self.thread, self.own, self.before, self.over = threading.get_ident(), own, before, False

    def __getattr__(self, name: str) -> Any:
        mine = not self.over and threading.get_ident() == self.thread
        return getattr(self.own if mine else self.before, name)


@contextmanager
def stance(name: str, backend: Callable[..., Any] | None = None) -> Iterator[None]:
    """As torch.compiler.set_stance(name, force_backend=backend), for this thread alone, in whatever order it ends."""
    # The stance is read by name from its module whenever something compiled is called.
    ours = _OwnStance(eval_frame.DynamoStance(name, backend=backend), eval_frame._stance)  # noqa: SLF001
    eval_frame._stance = ours  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield
    finally:
        ours.over = True
        while isinstance(found := eval_frame._stance, _OwnStance) and found.over:  # noqa: SLF001
            eval_frame._stance = found.before  # noqa: SLF001


@torch.compiler.disable  # type: ignore[untyped-decorator]
def eagerly(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call it with every compiled part of it run as it was written."""
    with stance("force_eager"):
        return function(*args, **kwargs)
