"""What a caller passed to a module: whether it fits, and its masks as `attend` takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._arrays import FLOATING, device_name, dtype_name
from .._errors import DtypeError, FrameworkError, Operand, OptionError, ShapeError, brief, explain


class Sizes(NamedTuple):
    """Of one call; the batch is None for operands without that axis."""

    batch: int | None
    queries: int
    keys: int


def count(name: str, value: object) -> int:
    """A whole number of at least 1, or an error."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(explain(f"{name} is {brief(value)}.", "Pass a whole number of at least 1."))
    return value


def number(name: str, value: object, fix: str, allowed: Callable[[float], bool]) -> float:
    """A finite number of those allowed, or an error."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not allowed(value):
        raise OptionError(explain(f"{name} is {brief(value)}.", fix))
    return float(value)


def refuse_unlike(query: Tensor, key: Tensor, value: Tensor, widths: Sequence[int], *, batch_first: bool) -> Sizes:
    """The sizes of a call whose operands fit each other and the module, or an error.

    `widths` are those that query, key and value must have.
    """
    operands = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise FrameworkError(explain(f"{name} is {brief(x)}, not a torch tensor.", "Pass a torch tensor."))
        if x.is_nested:
            fix = (
                "Pass a padded tensor and key_padding_mask; torch.nn.TransformerEncoder makes nested ones unless it is "
                "built with enable_nested_tensor=False."
            )
            raise FrameworkError(explain(f"{name} is a nested tensor, whose rows have no common length.", fix))
    rank = query.dim()
    axes = ("length", "width") if rank == 2 else ("batch", "length", "width")
    if rank == 3 and not batch_first:
        axes = ("length", "batch", "width")
    shown = [
        Operand(name, axes if x.dim() == rank == len(axes) else ("size",) * x.dim(), x.shape, _kind(x))
        for name, x in operands.items()
    ]
    form = "(batch, length, width)" if batch_first else "(length, batch, width)"
    for name, x in operands.items():
        if x.dim() not in (2, 3) or x.dim() != rank:
            headline = f"{name} has rank {x.dim()}" + ("." if x is query else f", but query has rank {rank}.")
            fix = f"Pass all three as {form}, as batch_first={batch_first} says, or as (length, width)."
            raise ShapeError(explain(headline, fix, shown))
    for (name, x), width in zip(operands.items(), widths, strict=True):
        if x.shape[-1] != width:
            headline = f"{name} has width {x.shape[-1]}, but the module was built for {width}."
            argument = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[name]
            fix = f"Pass {name} as {form} with width {width}, or build the module with {argument}={x.shape[-1]}."
            raise ShapeError(explain(headline, fix, shown))
    lengths = {name: x.shape[-2 if batch_first or rank == 2 else 0] for name, x in operands.items()}
    if lengths["key"] != lengths["value"]:
        headline = f"value has length {lengths['value']}, but key has length {lengths['key']}."
        raise ShapeError(explain(headline, "Each key needs one value.", shown))
    batches = {name: x.shape[0 if batch_first else 1] for name, x in operands.items()} if rank == 3 else {}
    for name, batch in batches.items():
        if batch != batches["query"]:
            headline = f"{name} has batch {batch}, but query has batch {batches['query']}."
            fix = f"Pass all three as {form}, as batch_first={batch_first} says."
            raise ShapeError(explain(headline, fix, shown))
    return Sizes(batches.get("query"), lengths["query"], lengths["key"])


def refuse_foreign(operands: dict[str, Tensor], weight: Tensor) -> None:
    """Raise where an operand is not of the dtype and device of the weights that it meets."""
    for name, x in operands.items():
        if x.device != weight.device:
            headline = f"{name} is on {x.device}, but the module is on {weight.device}."
            raise FrameworkError(explain(headline, f"Move one of them: {name}.to({str(weight.device)!r})."))
        # Autocast casts both; what it does not reach it leaves to us to refuse.
        if x.dtype != weight.dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            headline = f"{name} is {dtype_name(x)}, but the module is {dtype_name(weight)}."
            raise DtypeError(explain(headline, "Cast one of them, or call the module under torch.autocast."))


def merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: Sizes, heads: int) -> Tensor | None:
    """Both masks as the one of `attend`, in which True shows and axes may be 1 or missing.

    A bool mask comes as torch's modules have it, where True hides; a floating one is added.
    """
    batch, queries, keys = sizes
    hidden: Tensor | None = None
    bias: Tensor | None = None
    parts = []
    if attn_mask is not None:
        stacked = (heads if batch is None else batch * heads, queries, keys)
        rows = "heads" if batch is None else "batch · heads"
        _fits("attn_mask", attn_mask, [(queries, keys), stacked], ["(queries, keys)", f"({rows}, queries, keys)"])
        if batch is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(batch, heads, queries, keys)
        parts.append(attn_mask)
    if key_padding_mask is not None:
        own = (keys,) if batch is None else (batch, keys)
        _fits("key_padding_mask", key_padding_mask, [own], ["(keys,)" if batch is None else "(batch, keys)"])
        parts.append(key_padding_mask if batch is None else key_padding_mask[:, None, None, :])
    for part in parts:
        if part.dtype == torch.bool:
            hidden = part if hidden is None else hidden | part
        else:
            bias = part if bias is None else bias + part
    if hidden is None:
        return bias
    return ~hidden if bias is None else torch.where(hidden, -math.inf, bias)


def _fits(name: str, mask: Tensor, shapes: Sequence[tuple[int, ...]], forms: Sequence[str]) -> None:
    if not isinstance(mask, Tensor):
        raise FrameworkError(explain(f"{name} is {brief(mask)}, not a torch tensor.", "Pass a torch tensor."))
    if mask.dtype != torch.bool and dtype_name(mask) not in FLOATING:
        fix = f"Pass bool (True hides, as in torch's modules: {name}.bool()), or floating values to add to the scores."
        raise DtypeError(explain(f"{name} has dtype {dtype_name(mask)}.", fix))
    if tuple(mask.shape) not in shapes:
        meant = " or ".join(f"{form} = {shape}" for form, shape in zip(forms, shapes, strict=True))
        raise ShapeError(explain(f"{name} has shape {tuple(mask.shape)}.", f"Pass {meant}."))


def _kind(x: Tensor) -> str:
    return f"{dtype_name(x)} {device_name(x)}"
