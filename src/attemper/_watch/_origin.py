"""What happened to q and k between their projections and attention: from their tags, or else from their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._lineage import Lineage, Projected


class Origin(NamedTuple):
    """What happened to q (or k) between its projection and attention."""

    factor: float | None
    """What multiplied it; None where that could not be measured, or was not one number."""
    width: int | None
    """The head_dim it had when it left the projection."""
    normalised: bool
    model_dim: int | None
    """The width of what was projected."""


def origin(lineage: Lineage, x: Tensor) -> Origin | None:
    """Compare x, (*batch, heads, length, head_dim), with the projections it was made of; None where none were seen.

    Rotations keep the norm of a head, so what the norms differ by is the factor.
    """
    return origin_of(lineage.get(x), x)


def origin_of(tag: Any, x: Tensor) -> Origin | None:
    """The same from the tag of x."""
    if not isinstance(tag, Projected):
        return None
    found = _since(tag, x)
    if found is None or tag.fresh is None:
        return found
    tensor, before = tag.fresh
    earlier = origin_of(before, tensor) or Origin(None, None, False, None)
    factor = earlier.factor * found.factor if earlier.factor is not None and found.factor is not None else None
    return found._replace(factor=factor, normalised=found.normalised or earlier.normalised)


def measured(tag: Any, x: Tensor) -> Iterator[Tensor]:
    """The tensors whose numbers `origin_of` looks at, where the tag alone does not tell."""
    if not isinstance(tag, Projected):
        return
    if tag.sources or (tag.own is not None and tag.normalised):
        yield x
    yield from (source.tensor for source in tag.sources)
    if tag.fresh is not None:
        yield from measured(tag.fresh[1], tag.fresh[0])


def with_numbers(tag: Any, known: Mapping[int, Tensor]) -> Any:
    """The tag with other tensors in place of those that `measured` tells, by their ids."""
    if not isinstance(tag, Projected):
        return tag
    sources = tuple(source._replace(tensor=known[id(source.tensor)]) for source in tag.sources)
    fresh = tag.fresh
    if fresh is not None:
        fresh = (known.get(id(fresh[0]), fresh[0]), with_numbers(fresh[1], known))
    return replace(tag, sources=sources, fresh=fresh)


def _since(tag: Projected, x: Tensor) -> Origin | None:
    """What happened since the sources; of keys in a cache, since they were joined to it."""
    width = x.shape[-1]
    sources = tag.made_of(x)
    model_dim = sources[0].piece.root.inputs if sources else None
    if tag.own is not None:
        factor: float | None = tag.factor
        if tag.normalised and tag.fresh is None and _is_cosine(x, tag.factor):
            factor = None
        return Origin(factor, width, tag.normalised, model_dim)
    if not tag.sources:
        return Origin(None, None, tag.normalised, model_dim)
    count = sum(source.tensor.numel() for source in tag.sources)
    if not count or not x.numel():
        return None
    share = x.numel() / count
    narrow = round(width / share)
    if 0 < narrow < width and not bool(x[..., narrow:].any()):
        # Widened by zeros, not repeated for the heads that share it.
        share, width = share * narrow / width, narrow
    if abs(share - round(share)) > 1e-6:
        # Some of it was repeated and some was not.
        return Origin(None, width, tag.normalised, model_dim)
    # What lies beyond the width is 0.
    rows = row_norms(x[..., :width])
    theirs = [_norms_of_source(source.tensor, width) for source in tag.sources]
    energy = share * sum((_norm(norms) / source.factor) ** 2 for norms, source in zip(theirs, tag.sources, strict=True))
    mine = _norm(rows)
    if not (0 < energy < math.inf and 0 < mine < math.inf):
        return Origin(None, width, tag.normalised, model_dim)
    if len(theirs) == 1 and theirs[0] is not tag.sources[0].tensor and not _alike(rows, theirs[0]):
        # A norm in a kernel of its own makes them all as long; anything else is a factor that is not one number.
        return Origin(None, width, tag.normalised or _all_as_long(rows), model_dim)
    factor = mine / math.sqrt(energy)
    if tag.normalised and tag.fresh is None and _is_cosine(x, factor):
        return Origin(None, width, True, model_dim)
    rounding = 1e-3 if x.dtype in (torch.float32, torch.float64) else 1e-2
    return Origin(1.0 if abs(factor - 1) < rounding else factor, width, tag.normalised, model_dim)


def _is_cosine(x: Tensor, factor: float) -> bool:
    """Whether a norm made the heads unit vectors: their temperature is then a number of its own, not 1/√d_k."""
    rows = row_norms(x)
    length = float(rows[rows > 0].mean()) / abs(factor)  # a cache may have room left
    return abs(length - 1) < 0.05


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(x)))


def row_norms(x: Tensor) -> Tensor:
    """Of the last axis, taken in the order in which memory has the rows: of heads by tokens several times as fast."""
    order = sorted(range(x.dim() - 1), key=x.stride, reverse=True)
    norms: Tensor = torch.linalg.vector_norm(_wide(x).permute(*order, -1), dim=-1)
    return norms.permute([order.index(axis) for axis in range(len(order))])


def _wide(x: Tensor) -> Tensor:
    x = x.detach()
    return x if x.dtype == torch.float64 or x.is_complex() else x.float()


def _in_order(x: Tensor) -> Tensor:
    """From the smallest on; on a CPU by NumPy, which is several times as fast."""
    return torch.from_numpy(np.sort(x.numpy())) if x.device.type == "cpu" else x.sort().values


def _norms_of_source(source: Tensor, width: int) -> Tensor:
    """Of its rows of some width; itself where it has none."""
    if source.is_complex() or source.shape[-1] % width:
        return source
    return row_norms(source if source.shape[-1] == width else source.unflatten(-1, (-1, width)))


def _alike(mine: Tensor, theirs: Tensor) -> bool:
    """Whether every head of every token was multiplied by the same number, so far as these norms tell."""
    if mine.numel() % theirs.numel():
        return True
    if mine.shape == theirs.shape and _close(mine, theirs, mine.amax(), theirs.amax()):
        return True  # so they are in order of size, in which the furthest apart are nearest
    mine, theirs = _in_order(mine.flatten()), _in_order(theirs.flatten())
    theirs = theirs.repeat_interleave(mine.numel() // theirs.numel())
    return _close(mine, theirs, mine[-1], theirs[-1])


def _all_as_long(rows: Tensor) -> bool:
    rows = rows[rows > 0]
    return rows.numel() > 0 and bool(rows.std(correction=0) < 0.05 * rows.mean())


def _close(mine: Tensor, theirs: Tensor, my_largest: Tensor, their_largest: Tensor) -> bool:
    return bool((mine / my_largest - theirs / their_largest).abs().max() <= 0.05)
