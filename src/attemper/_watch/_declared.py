"""What a model says about itself: the scale it means to use, and whether it has been trained."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn

from .._errors import OptionError, brief, explain

ROOT = "(root)"
"""The path of a call that the watched module itself makes."""

Declared: TypeAlias = float | Mapping[str, float] | Callable[[str], float | None] | None

UNSCALED = frozenset(
    (
        *("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop", "gpt_neo"),
        *("pix2struct", "pix2struct_text_model", "pix2struct_vision_model", "dia_encoder", "dia_decoder"),
        # These normalise q and k first.
        *("gemma3n_text", "gemma4_text", "gemma4_vision", "gemma4_unified_text"),
        *("diffusion_gemma_text", "embedding_gemma2_text"),
    )
)
"""Families whose papers or weights leave the scale out: it is in their initialisation, or in their norms of q and k."""

FAMILIES: Mapping[str, Callable[[Any, int], float]] = {
    **dict.fromkeys(UNSCALED, lambda _, head_dim: 1.0),  # noqa: ARG005
    "inkling_text": lambda _, head_dim: 1 / head_dim,  # of a q and a k that are normalised
    # Heads of two inputs joined, twice as wide as those of either.
    **dict.fromkeys(("zamba", "zamba2"), lambda _, head_dim: (head_dim / 2) ** -0.5),
    # By the width of the model, and by the number of heads: so they were trained.
    "cvt": lambda attention, _: attention.embed_dim**-0.5,
    "evolla": lambda attention, head_dim: (
        (attention.num_attention_heads if "Aligner" in type(attention).__name__ else head_dim) ** -0.5
    ),
}
"""By model_type, the scale of families that have one of their own; of their attention modules and head_dim.

It is never what the module holds as its `scaling`: there a wrong scale would be right by its own word.
"""

NUMBERS = ("attention_multiplier", "attention_scale", "softmax_scale", "attention_softmax_scale")
"""Configuration entries that are the scale itself. Llama 4's attn_scale is not: it is a slope over positions."""

TIMES = ("key_multiplier", "qk_scale_factor")
"""Configuration entries that are put on q or k beside 1/√d_k."""

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
    root = head_dim**-0.5
    for name in NUMBERS:
        for holder in (config, getattr(config, "attn_config", None)):
            if (value := _number(holder, name)) is not None:
                return value, name
    scalar = _number(config, "query_pre_attn_scalar")
    if scalar is not None and scalar > 0:
        return scalar**-0.5, "query_pre_attn_scalar"
    for name in TIMES:
        if (value := _number(config, name)) is not None:
            return value * root, name
    for name in BY_WIDTH:
        if getattr(config, name, None) is True:
            return 1 / head_dim, name
    terms = getattr(config, "pos_att_type", None)
    if terms is not None:
        # DeBERTa's scores are a sum of up to three products, one of the contents and two with positions.
        return root / (1 + sum(term in terms for term in ("c2p", "p2c"))) ** 0.5, "pos_att_type"
    stretch = _yarn(config)
    if stretch != 1:
        return root * stretch**2, "mscale_all_dim"
    kind = str(getattr(config, "model_type", None))
    family = FAMILIES.get(kind)
    if family is not None:
        return family(module, head_dim), f"model_type {kind}"
    weights, by_layer = (getattr(config, f"scale_attn_{name}", None) for name in ("weights", "by_inverse_layer_idx"))
    if weights is False or by_layer is True:
        base, said = (1.0, "scale_attn_weights") if weights is False else (root, "")
        if by_layer is True:
            base /= layer_index(path, module) + 1
            said = "scale_attn_by_inverse_layer_idx"
        return base, said
    return None


def _yarn(config: Any) -> float:
    """What DeepSeek's attention takes for longer texts twice into its scale, in place of the rotary embedding."""
    rotary = getattr(config, "rope_parameters", None)
    if getattr(config, "kv_lora_rank", None) is None or not isinstance(rotary, Mapping):
        return 1.0
    slope, factor = rotary.get("mscale_all_dim"), rotary.get("factor")
    if not slope or not factor or factor <= 1 or rotary.get("rope_type", "default") == "default":
        return 1.0
    return 0.1 * float(slope) * math.log(factor) + 1.0


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if _is_number(value) and _is_scale(value) else None


def _is_number(value: object) -> TypeGuard[Real]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_scale(value: Real) -> bool:
    return math.isfinite(value) and value != 0


def said_by_caller(declared: Declared, path: str) -> float | None:
    """What the caller declared for a path: a number for all, by path, or a function of the path."""
    if callable(declared):
        said = declared(path)
        return None if said is None else _required(f"declared_scale({path!r})", said)
    said = declared.get(path) if isinstance(declared, Mapping) else declared
    return None if said is None else float(said)


def require_declared(declared: Any, model: nn.Module) -> None:
    """A number, a dict by path of the model or a function of the path, or an error."""
    if declared is None or callable(declared):
        return
    if not isinstance(declared, Mapping):
        _required("declared_scale", declared)
        return
    # As Sites are named: without what torch.compile wraps around.
    names = (name for name, _ in model.named_modules(remove_duplicate=False))
    known = {".".join(part for part in name.split(".") if part != "_orig_mod") or ROOT for name in names}
    for path, scale in declared.items():
        if path not in known:
            near = difflib.get_close_matches(str(path), known, n=1)
            fix = f"Did you mean {near[0]!r}?" if near else f"Name a module as named_modules does, or {ROOT!r}."
            raise OptionError(explain(f"declared_scale names {brief(path)}, which is no module of the model.", fix))
        if scale is not None:
            _required(f"declared_scale[{path!r}]", scale)


def _required(said: str, value: Any) -> float:
    if not _is_number(value):
        fix = "Pass a number, a dict of numbers by path, or a function of the path."
        raise OptionError(explain(f"{said} is {brief(value)}.", fix))
    if not _is_scale(value):
        raise OptionError(explain(f"{said} is {brief(value)}.", "Pass a finite number other than 0."))
    return float(value)


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
