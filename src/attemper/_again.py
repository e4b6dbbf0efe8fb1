"""Calls like one before: all that follows from shapes and options is known, and what is left is done at once.

To check a small problem, to lay it out and to wrap up what comes of it takes longer than to compute it, and a model
makes the same calls over and over. A backend that can repeat a call (`again`) says how when it was first made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ._arrays import Array, torch_is_plain

Repeat = Callable[..., Any]
"""From q, k and perhaps v to what `attend` or `read` returns, or to None where they turn out to need the long way."""

MOST = 128
"""Calls to remember: more than a model has kinds of layers."""

_repeats: dict[Any, Repeat] = {}


def key_of(operands: tuple[Array, ...], options: tuple[Any, ...]) -> Any:
    """All that such a call follows from but the numbers in its operands; None where there may be more to it."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch_is_plain(torch):
        return None
    # As keys 1, 1.0 and True are the same, but not equally right; and what is no plain value may change.
    kinds = tuple(map(type, options))
    if not _PLAIN.issuperset(kinds):
        return None
    kind = type(operands[0])
    if kind is np.ndarray:
        key = [options, kinds, 0 if torch is None else torch.get_num_threads()]
        for x in operands:
            if type(x) is not kind:
                return None
            key += (x.shape, x.strides, x.dtype)
        return tuple(key)
    # Not isinstance: a subclass may do anything.
    if torch is None or kind is not torch.Tensor or torch.is_autocast_enabled("cpu"):
        return None
    if torch._C._autograd._profiler_enabled() or torch.autograd.forward_ad._current_level >= 0:  # noqa: SLF001
        return None  # somebody counts operators, or carries tangents along
    key = [options, kinds, torch.get_num_threads()]
    recorded, strided = torch.is_grad_enabled(), torch.strided
    for x in operands:
        # One that is negative only when it is read, or zero without memory, has to be made so first.
        if (
            type(x) is not kind
            or not x.is_cpu
            or x.is_neg()
            or x._is_zerotensor()  # noqa: SLF001
            or x.is_nested
            or x.layout is not strided
        ):
            return None
        if recorded and x.requires_grad:
            return None
        key += (x.shape, x.stride(), x.dtype)
    return tuple(key)


_PLAIN = frozenset((bool, int, float, str, type(None)))


def remembered(key: Any) -> Repeat | None:
    """How to repeat the call of a key."""
    return _repeats.get(key)


def remember(key: Any, repeat: Repeat) -> None:
    if len(_repeats) >= MOST:
        _repeats.clear()
    _repeats[key] = repeat
