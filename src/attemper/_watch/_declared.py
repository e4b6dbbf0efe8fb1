"""What a model says about itself: the scale it means to use, and whether it has been trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from .._errors import OptionError, brief, explain

Declared: TypeAlias = float | Mapping[str, float] | Callable[[str], float | None] | None

UNSCALED = frozenset(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop", "gpt_neo"))
"""Families whose papers or weights leave the scale out: it is in their initialisation."""

NUMBERS = ("attention_multiplier", "attn_scale", "attention_scale", "softmax_scale", "attention_softmax_scale")
"""Configuration entries that are the scale itself."""

BY_WIDTH = ("mup", "use_mup", "mup_scale_qk_dot_by_d", "scale_qk_dot_by_d")
"""Configuration flags that mean 1/d_k, as maximal update parametrisation has it."""


def declared_scale(
    config: Any, path: str, module: nn.Module, head_dim: int, rotary: float = 1.0
) -> tuple[float, str] | None:
    """(scale, by which entry) that a model's configuration declares for one of its Sites; None where it is silent.

    `rotary` is what the rotary embedding multiplies q and k by, as those stretched to longer texts do.
    """
    found = None if config is None else _by_entry(config, path, module, head_dim)
    if rotary == 1:
        return found
    scale, entry = found or (head_dim**-0.5, "")
    return scale * rotary**2, " and ".join(part for part in (entry, "the rotary embedding's attention_scaling") if part)


def _by_entry(config: Any, path: str, module: nn.Module, head_dim: int) -> tuple[float, str] | None:
    for name in NUMBERS:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value), name
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if isinstance(scalar, (int, float)) and scalar > 0:
        return float(scalar) ** -0.5, "query_pre_attn_scalar"
    for name in BY_WIDTH:
        if getattr(config, name, None) is True:
            return 1 / head_dim, name
    kind = getattr(config, "model_type", None)
    if kind in UNSCALED:
        return 1.0, f"model_type {kind}"
    weights, by_layer = (getattr(config, f"scale_attn_{name}", None) for name in ("weights", "by_inverse_layer_idx"))
    if weights is False or by_layer is True:
        base, said = (1.0, "scale_attn_weights") if weights is False else (head_dim**-0.5, "")
        if by_layer is True:
            base /= layer_index(path, module) + 1
            said = "scale_attn_by_inverse_layer_idx"
        return base, said
    return None


def said_by_caller(declared: Declared, path: str) -> float | None:
    """What the caller declared for a path: a number for all, by path, or a function of the path."""
    if declared is None or isinstance(declared, (int, float)):
        return None if declared is None else float(declared)
    if isinstance(declared, Mapping):
        return declared.get(path)
    return declared(path)


def require_declared(declared: Any) -> None:
    """A number, a dict by path or a function of the path, or an error."""
    number = isinstance(declared, (int, float)) and not isinstance(declared, bool)
    if declared is not None and not number and not isinstance(declared, Mapping) and not callable(declared):
        fix = "Pass a number, a dict of numbers by path, or a function of the path."
        raise OptionError(explain(f"declared_scale is {brief(declared)}.", fix))


def layer_index(path: str, module: nn.Module) -> int:
    """The number of a layer: what the module says, or else the last number in its path."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        return index
    numbers = re.findall(r"\d+", path)
    return int(numbers[-1]) if numbers else 0


def looks_trained(model: nn.Module) -> bool | None:
    """Whether the norms' gains have moved from the constant they start at; None where there are none to ask."""
    asked = False
    for module in model.modules():
        if "norm" not in type(module).__name__.lower():
            continue
        gain = getattr(module, "weight", None)
        if isinstance(gain, torch.Tensor) and gain.dim() == 1 and gain.numel() > 1 and not gain.is_meta:
            asked = True
            if bool((gain != gain[0]).any()):
                return True
    return False if asked else None
