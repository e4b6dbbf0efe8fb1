"""What a call is to the Triton kernels: what they are compiled for, what they are told, and where they run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operator import Call
from ._tile import BAND, BIAS, BOOL_MASK, NO_MASK, Dropped, Kind, Masked, Sizes, disguised, stride_of

HOPPER_ROWS = 64
"""Query rows that the kernel for Hopper marks together."""

SPAN = 32
"""Blocks of rows that one program looks through for marked ones."""


class Tiling(NamedTuple):
    """How a problem is cut, and for how many threads."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """At most, of a thread: where two blocks on a processor gain more than some spilled numbers cost."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def gluon(name: str) -> Any:
    """A module of kernels for Hopper; None where Triton has no Gluon, whose interface is not settled."""
    try:
        return import_module(f".{name}", __package__)
    except ImportError:
        return None


def kind_of(call: Call, tile: Tiling, *, measure: int, values: bool) -> Kind:
    exact = call.q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return Kind(
        rows=tile.rows,
        keys=tile.keys,
        depth=power_of_2(call.q.shape[3]),
        value_depth=power_of_2(0 if call.v is None else call.v.shape[3]),
        valued=values,
        bounded=BAND.value if call.band is not None else int(call.first is not None),
        # Numbers, not Triton's constants: a kind is compared at every launch.
        mask=(NO_MASK if call.mask is None else BOOL_MASK if call.mask.dtype == torch.bool else BIAS).value,
        softcap=call.softcap is not None,
        dropout=call.dropout_p > 0,
        sinks=call.sinks is not None,
        measure=measure,
        wide=False,
        split=False,
        precision="ieee" if exact else "tf32",
        widen=call.q.device.type == "cpu",
    )


def sizes_for(call: Call, blocks: int, stack: int = 1, splits: int = 1, *, plain: bool) -> Sizes:
    """The numbers of a call; lengths `plain`, as they are, for kernels that are a tenth smaller where 16 divides them.

    These are the gradients, which read numbers of several rows at once, and the forward pass where all see all.
    """
    low, high = (0, 0) if call.band is None else call.band
    lengths = {
        "queries": call.q.shape[2],
        "keys": call.k.shape[2],
        "bound_batch": 0 if call.first is None else stride_of(call.first, 0),
        "low": low,
        "high": high,
    }
    return Sizes(
        heads=call.q.shape[1],
        group=call.group,
        stack=stack,
        depth=call.q.shape[3],
        value_depth=0 if call.v is None else call.v.shape[3],
        blocks=disguised(blocks),
        splits=disguised(splits),
        scale_batch=stride_of(call.scale, 0),
        scale_head=stride_of(call.scale, 1),
        sinks_batch=0 if call.sinks is None else stride_of(call.sinks, 0),
        sinks_head=0 if call.sinks is None else stride_of(call.sinks, 1),
        kept=1 - call.dropout_p,
        **(lengths if plain else {name: disguised(n) for name, n in lengths.items()}),
    )


def bounds_of(call: Call) -> tuple[Tensor, Tensor]:
    if call.first is None or call.stop is None:
        return call.scale, call.scale  # not looked at
    first, stop = call.first.to(call.q.device), call.stop.to(call.q.device)
    return (first, stop) if first.stride() == stop.stride() else (first.contiguous(), stop.contiguous())


def masked_of(call: Call) -> Masked:
    if call.mask is None:
        return Masked(call.scale, 0, 0, 0, 0)
    mask = call.mask.view(torch.int8) if call.mask.dtype == torch.bool else call.mask
    return Masked(mask, *strides_along(mask))


def dropped_of(call: Call) -> Dropped:
    seed = call.scale if call.seed is None else call.seed
    if seed.device != call.q.device:
        # Written by a kernel: a copy is waited for, and no graph can capture it.
        seed = torch.full((), int(seed), dtype=seed.dtype, device=call.q.device)
    period = max(call.period, 1) if call.dropout_p else 0
    return Dropped(seed, min(round(call.dropout_p * 2**32), 2**32 - 1), disguised(period))


def strides_along(x: Tensor) -> tuple[int, ...]:
    """Strides, 0 along axes of size 1."""
    return tuple(stride_of(x, axis) for axis in range(x.dim()))


def power_of_2(n: int) -> int:
    """The power of 2 from n on that a product takes."""
    return max(16, 1 << max(n - 1, 0).bit_length())
