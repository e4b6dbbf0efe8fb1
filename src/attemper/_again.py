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

Repeat = Callable[[Array, Array, Array], Any]
"""From q, k and v to what `attend` returns, or to None where they turn out to need the long way."""

MOST = 128
"""Calls to remember: more than a model has kinds of layers."""

_repeats: dict[Any, Repeat] = {}


def key_of(q: Array, k: Array, v: Array, options: tuple[Any, ...]) -> Any:
    """All that such a call follows from but the numbers in q, k and v; None where there may be more to it."""
    # As keys 1, 1.0 and True are the same, but not equally right; and what is no plain value may change.
    kinds = tuple(map(type, options))
    if not _PLAIN.issuperset(kinds):
        return None
    kind = type(q)
    if kind is not type(k) or kind is not type(v):
        return None
    torch = sys.modules.get("torch")
    if kind is np.ndarray:
        threads = 0 if torch is None else torch.get_num_threads()
        layouts = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
        return (layouts, options, kinds, threads)
    # Not isinstance: a subclass may do anything.
    if torch is None or kind is not torch.Tensor or not torch_is_plain(torch):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg() or torch._C._autograd._profiler_enabled():  # noqa: SLF001
        return None  # what is negative only when read, and whoever counts operators
    if not (q.layout is k.layout is v.layout is torch.strided) or q.is_nested or k.is_nested or v.is_nested:
        return None
    layouts = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype)
    return (layouts, options, kinds, torch.get_num_threads())


_PLAIN = frozenset((bool, int, float, str, type(None)))


def remembered(key: Any) -> Repeat | None:
    """How to repeat the call of a key."""
    return _repeats.get(key)


def remember(key: Any, repeat: Repeat) -> None:
    if len(_repeats) >= MOST:
        _repeats.clear()
    _repeats[key] = repeat
