"""Coming between a module and its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

OVERRIDDEN = "_attemper_overrides"


class _Unheard:
    """The first base of a class while it is made, so that no `__init_subclass__` of a model hears of it."""

    def __init_subclass__(cls) -> None:
        pass


def override(module: nn.Module, around: Callable[..., Any], *, own: bool = False) -> Callable[[], None]:
    """Have `around(module, forward, args, kwargs)` called in place of a module's forward; returns what undoes it.

    By a class of its own rather than an attribute: replicas in other threads then call it with themselves, and copies
    and pickles of the module are of the class it had. With `own` it is the forward that is an attribute of the module.
    """
    kind = type(module)
    # What it calls may be compiled.
    between = torch.compiler.disable(around, recursive=False)

    def call(self: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return inner(*args, **kwargs)  # an exporter refuses what is not compiled
        return between(self, inner, args, kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, watched.__bases__[0].forward.__get__(self), args, kwargs)

    def attribute(self: nn.Module) -> Callable[..., Any]:
        inner: Callable[..., Any] = self.__dict__["forward"]
        return inner if torch.compiler.is_exporting() else _instead(inner, functools.partial(call, self, inner))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        plain = next(kind for kind in watched.__mro__ if not is_override(kind))
        return (object.__new__, (plain,), *plain.__reduce_ex__(self, protocol)[2:])

    for function in (forward, call):
        skip_code(function.__code__)
    members = {
        # A property comes before what a module has of its own, which stays where it is.
        "forward": property(attribute, _set_forward, _delete_forward)
        if own
        else functools.wraps(kind.forward)(forward),
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        OVERRIDDEN: True,
    }
    # Past the metaclass too, which may keep a list of its classes.
    watched: Any = type.__new__(type(kind), kind.__name__, (_Unheard, kind), members)
    watched.__bases__ = (kind,)
    module.__class__ = watched

    def undo() -> None:
        (below,) = watched.__bases__
        if type(module) is watched:
            module.__class__ = below
            return
        # Somebody has made a class of this one since, for this module: a parametrization, or another of these.
        for above in type(module).__mro__:
            if watched in above.__bases__:
                above.__bases__ = tuple(below if base is watched else base for base in above.__bases__)

    return undo


def _instead(inner: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    return forward


skip_code(_instead(print, print).__code__)


def _set_forward(self: nn.Module, forward: Callable[..., Any]) -> None:
    self.__dict__["forward"] = forward


def _delete_forward(self: nn.Module) -> None:
    del self.__dict__["forward"]


def replace_attribute(module: nn.Module, name: str, by: Any) -> Callable[[], None]:
    """Set an attribute that is there already; returns what sets it back."""
    was = getattr(module, name)
    setattr(module, name, by)

    def undo() -> None:
        if getattr(module, name, None) is by:
            setattr(module, name, was)

    return undo


def compiled_attribute(module: nn.Module) -> str | None:
    """The attribute of a module that holds what torch.compile made of it; None where it made nothing."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    return "forward" if hasattr(module.__dict__.get("forward"), "get_compiler_config") else None


def is_override(kind: type) -> bool:
    return OVERRIDDEN in vars(kind)
