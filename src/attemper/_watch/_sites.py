"""Where in a model a call was made and what it is measured against, however it was seen."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from .._vitals import Site
from ._declared import ROOT as ROOT
from ._declared import Declared, declared_scale, said_by_caller
from ._lineage import tensors
from ._origin import Origin
from ._record import HIDING

LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
PADDING_MASKS = {
    "attention_mask": True,
    "src_key_padding_mask": False,
    "key_padding_mask": False,
    "padding_mask": False,
}
"""What callers name a (batch, keys) mask, and whether its ones are what to keep."""


class Sites:
    """The Sites of a model's calls."""

    def __init__(self, model: nn.Module, declared: Declared) -> None:
        self.model = model
        self.declared = declared
        rotary = {getattr(m, "attention_scaling", None) for m in model.modules()}
        self._rotary_factor = max((x for x in rotary if isinstance(x, float)), default=1.0)

    def site(
        self,
        path: str,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        of_q: Origin | None,
        of_k: Origin | None,
        *,
        named: str,
        kind: str,
        scale: float | tuple[float, ...],
        scale_argument: float | tuple[float, ...] | None,
        product_scale: float | tuple[float, ...],
        **more: Any,
    ) -> Site:
        """Of a call with q (batch, heads, queries, head_dim) and k by the module at a path, `named` as it is shown."""
        head_dim = q.shape[-1]
        factor: float | None = None
        normalised = any(o is not None and o.normalised for o in (of_q, of_k))
        if of_q is not None and of_q.factor is not None and (of_k is None or of_k.factor is not None):
            # Keys of which nothing was seen come out of a cache, where models keep them as they were projected.
            factor = of_q.factor * (1.0 if of_k is None or of_k.factor is None else of_k.factor)
        effective: Any = None
        if factor is not None:
            effective = tuple(s * factor for s in scale) if isinstance(scale, tuple) else scale * factor
        width = head_dim if of_q is None or of_q.width is None else min(of_q.width, head_dim)
        said = said_by_caller(self.declared, path)
        declared = (said, "the caller") if said is not None else None
        declared = declared or declared_scale(_config(self.model, path), path, module, width, self._rotary_factor)
        model_dim = None if of_q is None else of_q.model_dim
        return Site(
            path=named,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=head_dim,
            model_dim=model_dim,
            scale_argument=scale_argument,
            effective_scale=effective,
            declared_scale=None if declared is None else declared[0],
            declared_by=None if declared is None else declared[1],
            projection_factor=factor,
            projected_head_dim=width,
            qk_norm=normalised,
            product_scale=product_scale,
            dtype=str(q.dtype).removeprefix("torch."),
            training=module.training,
            kind=kind,
            **more,
        )


def _config(model: nn.Module, path: str) -> Any:
    """The configuration of the nearest module around a path that has one."""
    parts = [] if path == ROOT else path.split("#")[0].split(".")
    for stop in range(len(parts), -1, -1):
        try:
            module = model.get_submodule(".".join(parts[:stop]))
        except AttributeError:
            continue
        config = getattr(module, "config", None)
        if config is not None:
            return config
    return None


def look_at_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Tensor | None]:
    """How many sequences a model is called with, and which of their keys, (batch, keys), are padding; None for none."""
    given = [x for x in tensors(args, kwargs) if x.dim() and not x.is_nested]
    sequences = given[0].shape[0] if given else 1
    try:
        named = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        named = {**named, **kwargs}
    except (TypeError, ValueError):
        named = kwargs
    for name, keeps in PADDING_MASKS.items():
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and (keeps or mask.dtype == torch.bool):
            padding = _hidden(mask) if keeps else mask
            return sequences, padding if bool(padding.any()) and _by_sequence(padding) else None
    return sequences, None


def _hidden(mask: Tensor) -> Tensor:
    """What a mask leaves out, be it ones for what to keep or numbers to add."""
    if mask.is_floating_point() and (bool((mask < 0).any()) or not bool(mask.any())):
        return mask <= HIDING
    return mask == 0


def _by_sequence(padding: Tensor) -> bool:
    """Whether a mask is of (batch, keys), though one of (queries, keys) may have its shape."""
    rows, keys = padding.shape
    if rows != keys:
        return True
    kept = ~padding
    lengths = kept.sum(-1)
    place = torch.arange(keys, device=kept.device)
    right, left = (kept == (x < lengths[:, None]) for x in (place, place.flip(0)))
    if not bool((right | left).all(-1).all()):
        return False  # no padding leaves gaps
    # Queries see themselves, and those that come later see more, or less.
    steps = lengths.diff()
    return not (bool(kept.diagonal().all()) and bool((steps >= 0).all() | (steps <= 0).all()))


def list_unseen(entered: Collection[str], seen: Collection[str], unseen: Collection[str]) -> dict[str, str]:
    """Of the modules that are called attention those in which nothing was seen, neither read nor given up on."""
    known = (*seen, *unseen)
    silent = [path for path in sorted(entered) if not any(within(other, path) for other in known)]
    # The innermost says it; a container of it would only say it again.
    inner = [path for path in silent if not any(other != path and within(other, path) for other in silent)]
    return dict.fromkeys(inner, "it is called attention, but nothing was seen that looks like a softmax over scores")


def within(path: str, parent: str) -> bool:
    return parent == ROOT or path.split("#")[0] == parent or path.startswith(f"{parent}.")
