"""The operands of a call with one batch and one heads axis, whatever axes the model gave them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


class Four:
    """The operands of a call with a batch and a heads axis."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, mask: Tensor | None, heads: int | None) -> None:
        """`heads` of the module, so far as it says."""
        self.mask = mask
        self.q, self.k, self.v, self.output = (
            x if x.dim() == 4 else x.reshape(four_axes(tuple(x.shape), heads)) for x in (q, k, v, output)
        )
        if mask is not None and q.dim() == 3 and mask.dim() == 3:
            shape = four_axes((mask.shape[0], *mask.shape[1:]), heads if mask.shape[0] == q.shape[0] else None)
            self.mask = mask.reshape(shape)


def shaped(like: Tensor, x: Tensor) -> Tensor:
    return x.reshape(*like.shape[:3], x.shape[-1])


def four_axes(shape: tuple[int, ...], heads: int | None) -> tuple[int, ...]:
    """A shape as (batch, heads, rows, columns); of a folded batch × heads axis the module knows the heads."""
    if len(shape) == 2:
        return (1, 1, *shape)
    if len(shape) == 3:
        split = heads if heads and shape[0] % heads == 0 else 1
        return (shape[0] // split, split, *shape[1:])
    *batch, own_heads, rows, columns = shape
    # Heads in groups, on an axis of their own.
    while batch and heads and own_heads < heads and own_heads * batch[-1] <= heads and len(batch) > 1:
        own_heads *= batch.pop()
    return (math.prod(batch), own_heads, rows, columns)


def head_count(module: nn.Module) -> int | None:
    for name in HEAD_COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def heads_folded(module: nn.Module, shape: tuple[int, ...], sequences: int) -> int | None:
    """How many heads are in the first of three axes, as the module says; one where a sequence of the model is in each.

    Then the module calls attention for one head after the other. A model with the length in front, whose sequences look
    like its length, has that in the second axis.
    """
    looping = len(shape) == 3 and shape[0] == sequences != shape[1]
    return 1 if looping else head_count(module)


def kind_of(mask: Tensor | None) -> str | None:
    return None if mask is None else "bool" if mask.dtype == torch.bool else "bias"
