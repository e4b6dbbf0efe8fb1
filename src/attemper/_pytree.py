"""Readings as torch pytrees, so that vmap, compile and the like see the tensors in them.

Imported by whatever makes Readings of tensors, and so only where torch is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree

from ._reading import LEAVES, Reading


def _flatten(reading: Reading) -> tuple[list[Any], tuple[Any, ...]]:
    # vmap takes tensors only, so what was not measured is no leaf.
    names = tuple(name for name in LEAVES if getattr(reading, name, None) is not None)
    return [getattr(reading, name) for name in names], (reading.backend, reading.rows, reading.awaited, names)


def _unflatten(leaves: Iterable[Any], context: tuple[Any, ...]) -> Reading:
    backend, rows, awaited, names = context
    named = {name.removeprefix("_"): leaf for name, leaf in zip(names, leaves, strict=True)}
    return Reading(backend=backend, rows=rows, awaited=awaited, **named)


pytree.register_pytree_node(Reading, _flatten, _unflatten, serialized_type_name="attemper.Reading")
