"""Coming between a module and its forward, and running it as it was written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OVERRIDDEN = "_attemper_overrides"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it with every compiled part of it run as it was written."""
    with torch.compiler.set_stance("force_eager"):
        return function(*args, **kwargs)


def override(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Have `around(module, forward, args, kwargs)` called in place of a module's forward; returns what undoes it.

    By a class of its own rather than an attribute: replicas in other threads then call it with themselves, and copies
    and pickles of the module are of the class it had.
    """
    kind = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(self, kind.forward.__get__(self), args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return (object.__new__, (kind,), *kind.__reduce_ex__(self, protocol)[2:])

    members = {
        # Its own frame is never compiled, but what it calls may be.
        "forward": functools.wraps(kind.forward)(torch.compiler.disable(forward, recursive=False)),
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    watched = type(kind.__name__, (kind,), {**members, OVERRIDDEN: True})
    module.__class__ = watched

    def undo() -> None:
        if type(module) is watched:
            module.__class__ = kind

    return undo


def replace_attribute(module: nn.Module, name: str, by: Any) -> Callable[[], None]:
    """Set an attribute that is there already; returns what sets it back."""
    was = getattr(module, name)
    setattr(module, name, by)
    return lambda: setattr(module, name, was)


def compiled_attribute(module: nn.Module) -> str | None:
    """The attribute of a module that holds what torch.compile made of it; None where it made nothing."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    return "forward" if hasattr(module.__dict__.get("forward"), "get_compiler_config") else None


def is_override(kind: type) -> bool:
    return OVERRIDDEN in vars(kind)
