"""How faults are planted: each by the means that a real bug would have."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .hugging import set_way, way_of
from .modules import Attention, DiffusersAttention, Multihead, TimmAttention
from .specimen import Place, Specimen


class NotApplicable(Exception):  # noqa: N818
    """The fault has no meaning in this specimen, or would change nothing."""


class NotIdentifiable(Exception):  # noqa: N818
    """The fault is there, but nothing tells the model from a healthy one, or it does no harm."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A specimen with a fault in it, and where."""

    specimen: Specimen
    where: Mapping[Place, tuple[int, ...]]
    """The heads of each attention concerned; () for all."""
    rules: Mapping[str, str]
    """Rule → least severity: any one of them counts as found."""
    any_place: bool = False
    """Whether naming one of the places is enough."""
    spills: bool = False
    """Whether the fault shows in later layers too, so that naming those is no mistake."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """What was planted, in numbers."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    meaning: str
    rules: Mapping[str, str]
    where: str
    plant: Callable[[Specimen, Fault], Planted]
    light: bool = True
    """Whether it is planted in the heaviest specimens too."""


def chosen(specimen: Specimen, one: bool) -> tuple[Place, ...]:
    """All places, or one in the middle."""
    if not one:
        return specimen.places
    if len(specimen.places) == 1:
        raise NotApplicable("it has one attention module only, so one layer is all layers")
    return (specimen.places[(len(specimen.places) // 2 + specimen.seed) % len(specimen.places)],)


def scale_of(module: nn.Module, place: Place) -> float:
    """What the module multiplies q·k by now."""
    if isinstance(module, Attention):
        return place.head_dim**-0.5 if module.scale is None else module.scale
    if isinstance(module, (TimmAttention, DiffusersAttention)):
        return module.scale
    if hasattr(module, "scaling"):
        return float(module.scaling)
    if isinstance(module, nn.MultiheadAttention):
        raise NotApplicable("torch's module takes no scale: a wrong one can only be folded into its weights")
    raise NotApplicable(f"{type(module).__name__} has no scale to set: a wrong one can only be folded into its weights")


def set_scale(module: nn.Module, value: float) -> None:
    if isinstance(module, (Attention, TimmAttention, DiffusersAttention)):
        module.scale = value
    else:
        module.scaling = value


def wrong_scale(value: Callable[[Place, float], float], *, one: bool) -> Callable[[Specimen, Fault], Planted]:
    """Plant `value(place, right scale)`."""

    def plant(specimen: Specimen, fault: Fault) -> Planted:
        where = chosen(specimen, one)
        for place in specimen.places:
            scale_of(specimen.module(place), place)
        planted = specimen.copy()
        note = {}
        for place in where:
            module = planted.module(place)
            right = scale_of(module, place)
            wrong = value(place, right)
            if abs(wrong / right - 1) < 1e-6:
                raise NotApplicable(f"that is its right scale, {right:.4g}")
            set_scale(module, wrong)
            note = {"right": right, "wrong": wrong}
        rules = dict(fault.rules)
        contradicted = specimen.declared or (specimen.trained and specimen.has_loss)
        if fault.name == "scale doubled, all layers" and not contradicted:
            # No rule that the model states, no layer that differs, no training that it contradicts: somebody's choice.
            rules = dict.fromkeys(rules, "information")
        return Planted(specimen=planted, where=dict.fromkeys(where, ()), rules=rules, note=note)

    return plant


def folded(factor: float, *, one: bool) -> Callable[[Specimen, Fault], Planted]:
    """W_q × factor: only training can contradict it, and only where it makes the loss 2% worse or more."""

    def plant(specimen: Specimen, fault: Fault) -> Planted:
        where = chosen(specimen, one)
        if specimen.normalised:
            raise NotApplicable("QK-norm undoes it")
        if not specimen.trained:
            raise NotIdentifiable("a factor in random weights is another initialisation")
        if not specimen.has_loss:
            raise NotIdentifiable("without a loss there is no pressure, and weights may be of any size")
        planted = specimen.copy()
        for place in where:
            for head in range(place.heads):
                grow(planted.module(place), place, "q", head, factor)
        before, after = loss_value(specimen), loss_value(planted)
        if after < 1.02 * before:
            raise NotIdentifiable(f"it does no harm: the loss goes from {before:.4f} to {after:.4f}")
        return Planted(
            specimen=planted,
            where=dict.fromkeys(where, ()),
            rules=fault.rules,
            any_place=not one,
            note={"factor": factor, "loss before": before, "loss": after},
        )

    return plant


def loss_value(specimen: Specimen) -> float:
    with torch.no_grad():
        return float(specimen.loss_of(specimen.run()))


def views(module: nn.Module, place: Place, which: str, head: int) -> list[Tensor]:
    """The parts of the parameters that make q (or k) of one head, as views to write to."""
    kv_heads = place.kv_heads or place.heads
    offset = {"q": 0, "k": place.heads * place.head_dim}[which]
    if which == "k":
        head = head * kv_heads // place.heads
    start = head * place.head_dim
    here, joint = slice(start, start + place.head_dim), slice(offset + start, offset + start + place.head_dim)
    for q_name, k_name in (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("to_q", "to_k")):
        if hasattr(module, q_name):
            linear = getattr(module, q_name if which == "q" else k_name)
            return [t.data[here] for t in (linear.weight, linear.bias) if t is not None]
    if hasattr(module, "qkv"):
        return [t.data[joint] for t in (module.qkv.weight, module.qkv.bias) if t is not None]
    if hasattr(module, "c_attn"):
        # Transposed, as GPT-2 has it.
        return [module.c_attn.weight.data[:, joint], module.c_attn.bias.data[joint]]
    if getattr(module, "in_proj_weight", None) is not None:
        return [module.in_proj_weight.data[joint], module.in_proj_bias.data[joint]]
    raise NotApplicable(f"where {type(module).__name__} keeps its projections is not known")


def grow(module: nn.Module, place: Place, which: str, head: int, factor: float) -> None:
    for view in views(module, place, which, head):
        view.mul_(factor)


def padded_width(specimen: Specimen, fault: Fault) -> Planted:
    """Zeros up to the next power of two and the scale of the padded width, as a kernel that wants such widths would."""
    planted = specimen.copy()
    width = 2 * specimen.places[0].head_dim
    first = planted.module(specimen.places[0])
    if specimen.declared:
        # Such models pass their scale on: padding does not touch it.
        raise NotApplicable("its scale is a number that it passes on, not one of the width")
    if isinstance(first, Attention):
        for place in specimen.places:
            planted.module(place).pad_to = width
    elif hasattr(planted.model, "config") and hasattr(first, "scaling"):
        if type(first).__name__ in ("OPTAttention", "WhisperAttention"):
            raise NotApplicable("it scales q before it is padded")
        if way_of(planted.model) != "sdpa":
            raise NotApplicable("padding is for fused kernels")
        set_way(planted.model, padded_attention(width))
    else:
        raise NotApplicable("written so that its heads cannot be padded from outside")
    note = {"right": specimen.places[0].head_dim ** -0.5, "wrong": width**-0.5}
    return Planted(specimen=planted, where=dict.fromkeys(specimen.places, ()), rules=fault.rules, note=note)


def padded_attention(width: int) -> str:
    """Register it, and its mask; returns the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attention(module, q, k, v, mask, **_):
        head_dim = q.shape[-1]
        q, k, v = (F.pad(t, (0, width - head_dim)) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        causal = mask is None and getattr(module, "is_causal", False)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return out[..., :head_dim].transpose(1, 2).contiguous(), None

    name = f"zoo_padded_{width}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def finite(specimen: Specimen) -> bool:
    with torch.no_grad():
        output = specimen.run()
    return bool(torch.isfinite(getattr(output, "logits", getattr(output, "last_hidden_state", output))).all())


def half_precision(steps_back: int) -> Callable[[Specimen, Fault], Planted]:
    """In float16, W_q and W_k of one layer grown until q·k passes 65,504, then so many doublings of q·k back."""

    def plant(specimen: Specimen, fault: Fault) -> Planted:
        place = specimen.places[len(specimen.places) // 2]
        module = specimen.module(place)
        if specimen.normalised:
            raise NotApplicable("QK-norm undoes it")
        by_hand = isinstance(module, Attention) and module.way != "sdpa"
        unfused = isinstance(module, (TimmAttention, DiffusersAttention)) and "unfused" in specimen.name
        eager = specimen.name.endswith("-eager") and type(module).__name__ != "GPTNeoSelfAttention"
        if not (by_hand or unfused or eager):
            raise NotApplicable("q·k is never held in float16")
        planted = specimen.copy()

        def halved(x: Any) -> Any:
            return x.half() if isinstance(x, Tensor) and x.is_floating_point() else x

        planted.model.half()
        # Without padding: in float16 a minimum added to a score can be −inf, and a row of padding fails of that first.
        kwargs = {name: halved(value) for name, value in planted.kwargs.items() if name != "attention_mask"}
        planted = replace(planted, args=tuple(map(halved, planted.args)), kwargs=kwargs, padded=False)
        if not finite(planted):
            raise NotApplicable("not finite in float16 as it is")
        weights = copy.deepcopy(planted.module(place).state_dict())

        def grown(doublings: int) -> bool:
            planted.module(place).load_state_dict(weights)
            for which, heads in (("q", place.heads), ("k", place.kv_heads or place.heads)):
                for head in range(heads):
                    # Grouped keys are named by the first query head that shares them.
                    grow(planted.module(place), place, which, head * place.heads // heads, 2 ** (doublings / 2))
            return finite(planted)

        doublings = next((n for n in range(1, 40) if not grown(n)), None)
        if doublings is None:
            raise NotApplicable("its scores stay finite")
        grown(doublings - steps_back)
        return Planted(
            specimen=planted,
            where={place: ()},
            rules=fault.rules,
            spills=True,
            note={"doublings of q·k": doublings - steps_back},
        )

    return plant


def softcap(specimen: Specimen, fault: Fault) -> Planted:
    """A cap a quarter of the scores' standard deviation."""
    planted = specimen.copy()
    names = ("softcap", "attn_logit_softcapping")
    caps = {}
    for place in specimen.places:
        module = planted.module(place)
        name = next((n for n in names if getattr(module, n, None) is not None), None)
        if name is None:
            raise NotApplicable("no softcap")
        caps[place] = name
    seen = []
    original = torch.tanh

    def spy(x: Tensor) -> Tensor:
        seen.append(float(x.std()))
        return original(x)

    torch.tanh = spy
    try:
        with torch.no_grad():
            planted.run()
    finally:
        torch.tanh = original
    ratio = sum(seen[: len(caps)]) / len(caps)
    for place, name in caps.items():
        module = planted.module(place)
        setattr(module, name, getattr(module, name) * ratio / 4)
    note = {"cap": getattr(planted.module(place), name), "scores' std over the cap": 4}
    return Planted(specimen=planted, where=dict.fromkeys(caps, ()), rules=fault.rules, note=note)


def leak(specimen: Specimen, fault: Fault) -> Planted:
    """The caller says what is padding; attention does not heed it."""
    if not specimen.padded:
        raise NotApplicable("no padding that a row could see")
    planted = specimen.copy()
    first = planted.module(specimen.places[0])
    where = specimen.places
    if isinstance(first, (Attention, Multihead)):
        for place in specimen.places:
            planted.module(place).heed = False
        # The decoder's own attention has no padding to see.
        where = tuple(p for p in where if not (specimen.name.startswith("seq2seq") and p.path.endswith("attn")))
        where += tuple(p for p in specimen.places if p.path.startswith("encoder.") and p not in where)
    else:
        # As when an attention function is registered under a new name and its mask is not.
        set_way(planted.model, maskless(first, way_of(planted.model)))
        if type(first).__name__ == "T5Attention":
            where = tuple(p for p in where if p.path.startswith("encoder.") or p.path.endswith("EncDecAttention"))
    return Planted(specimen=planted, where=dict.fromkeys(where, ()), rules=fault.rules)


def maskless(module: nn.Module, way: str) -> str:
    """Register the attention that the model has now under a new name, and no mask with it; returns the name."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    source = sys.modules[type(module).__module__]
    function = sdpa_attention_forward if way == "sdpa" else getattr(source, "eager_attention_forward", None)
    name = f"zoo_{way}_{type(module).__name__}"
    if function is not None:
        AttentionInterface.register(name, function)
    return name


def empty_rows(specimen: Specimen, fault: Fault) -> Planted:
    """A causal mask that hides a row's own key too, so that the first row sees none."""
    if specimen.strict_mask is None:
        raise NotApplicable("it takes no mask")
    planted = specimen.strict_mask(specimen.copy())
    where = specimen.places
    if isinstance(planted.module(where[0]), (Attention, Multihead)):
        where = tuple(p for p in where if getattr(planted.module(p), "strict", False))
    if not finite(planted):
        # Everything after the first is not a number.
        where = where[:1]
    return Planted(specimen=planted, where=dict.fromkeys(where, ()), rules=fault.rules, spills=True)


def corrupt_head(specimen: Specimen, fault: Fault) -> Planted:
    """One query weight of one head is NaN."""
    planted = specimen.copy()
    place = specimen.places[(len(specimen.places) // 2 + specimen.seed) % len(specimen.places)]
    head = place.heads - 1
    view = views(planted.module(place), place, "q", head)[0]
    view[(0,) * view.dim()] = float("nan")
    return Planted(specimen=planted, where={place: (head,)}, rules=fault.rules, spills=True)


def grown_head(specimen: Specimen, fault: Fault) -> Planted:
    """W_q and W_k of one head × 10."""
    if specimen.normalised:
        raise NotApplicable("QK-norm undoes it")
    planted = specimen.copy()
    place = specimen.places[(len(specimen.places) // 2 + specimen.seed) % len(specimen.places)]
    head = place.heads - 1
    for which in "qk":
        grow(planted.module(place), place, which, head, 10.0)
    return Planted(specimen=planted, where={place: (head,)}, rules=fault.rules)
