"""One training run: a small transformer on bytes of text or on images of digits, under one rule of scaling."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from .._scale import scale_for
from .._vitals import Vitals
from ._result import rounded
from ._statistics import generator
from ._study_data import BYTES, CLASSES, PATCH, SIDE, Cell, Settings, batches, held, load

VITALS = ("normalized_entropy", "flow", "gradient_flow", "pressure", "max_logit", "score_std")
"""What is kept of each layer's Vitals."""
MOMENTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""When the layers are looked at, as shares of the steps."""
POINTS = 20
"""Points of the curve of the training loss, each the mean of the steps since the last."""

# What learns


def _attention(cell: Cell, settings: Settings) -> Any:
    from .. import nn

    shape: dict[str, Any] = {"head_dim": cell.head_dim, "bias": False, "batch_first": True, "stats": "none"}
    if cell.rule == "cosine":
        return nn.CosineAttention(settings.width, settings.heads, **shape)
    if cell.rule == "additive":
        return nn.AdditiveAttention(settings.width, settings.heads, **shape)
    scale: Any = "sqrt_dk" if cell.rule == "qk_norm" else cell.rule
    if cell.rule == "sqrt_dmodel":
        # The head width is free of the model's here: what the rule would divide by is the width of all heads together.
        scale = scale_for("sqrt_dmodel", cell.head_dim, model_dim=settings.heads * cell.head_dim)
    norm = "rms" if cell.rule == "qk_norm" else None
    return nn.MultiheadAttention(settings.width, settings.heads, **shape, scale=scale, qk_norm=norm)


def build(cell: Cell, settings: Settings, seed: int) -> Any:
    """A transformer with the LayerNorm before each part; equal names and shapes start from equal weights."""
    import torch
    from torch import nn

    width, inner = settings.width, settings.width * settings.widening
    text = cell.task == "text"
    tokens = settings.context if text else (SIDE // PATCH) ** 2 + 1
    blocks = [
        nn.ModuleDict(
            {
                "before_attention": nn.LayerNorm(width),
                "attention": _attention(cell, settings),
                "before_mlp": nn.LayerNorm(width),
                "mlp": nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)),
            }
        )
        for _ in range(cell.depth)
    ]
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(BYTES, width) if text else nn.Linear(PATCH**2, width),
            # The vector of the class token is that of its position: it has no content of its own.
            "position": nn.Embedding(tokens, width),
            "blocks": nn.ModuleList(blocks),
            "last": nn.LayerNorm(width),
            "head": nn.Linear(width, BYTES if text else CLASSES),
        }
    )
    tables = ("embed.weight", "position.weight") if text else ("position.weight",)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    parameter.zero_()
                continue
            fan_in = 1 if name in tables else parameter.shape[-1]
            spread = 0.02 if cell.initialiser == "gpt" else fan_in**-0.5
            drawn = generator(seed, "weights", name).standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.copy_(torch.from_numpy(drawn * np.float32(spread)))
    return model


def _forward(model: Any, inputs: Any, *, causal: bool) -> tuple[Any, list[Any]]:
    """Logits for every position (causal) or for the class token, and the Reading of each layer."""
    import torch

    x = model["embed"](inputs)
    if not causal:
        x = torch.cat((torch.zeros_like(x[:, :1]), x), dim=1)
    x = x + model["position"].weight
    readings = []
    for block in model["blocks"]:
        attended = block["attention"](block["before_attention"](x), is_causal=causal)
        x = x + attended.output
        x = x + block["mlp"](block["before_mlp"](x))
        readings.append(attended.reading)
    return model["head"](model["last"](x if causal else x[:, 0])), readings


def _loss(model: Any, batch: tuple[Any, Any], *, causal: bool) -> tuple[Any, Any, list[Any]]:
    import torch

    inputs, labels = map(torch.from_numpy, batch)
    logits, readings = _forward(model, inputs, causal=causal)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return loss, logits, readings


def _measure(model: Any, batch: tuple[Any, Any], *, causal: bool) -> tuple[float, list[dict[str, Any]]]:
    """The loss on a batch and the vitals of every layer, from a backward pass of which nothing remains."""
    attentions = [block["attention"] for block in model["blocks"]]
    for attention in attentions:
        attention.stats = "all"
    loss, _, readings = _loss(model, batch, causal=causal)
    loss.backward()
    model.zero_grad(set_to_none=True)
    for attention in attentions:
        attention.stats = "none"
    layers = []
    for reading in readings:
        scalars = Vitals.of(reading).to_scalars()
        # The loss is a mean over the batch, of which Vitals take the mean once more.
        scalars["pressure"] = scalars.get("pressure", math.nan) * len(batch[0])
        layers.append({name: plain(scalars.get(name, math.nan)) for name in VITALS})
    return float(loss.detach()), layers


def _evaluate(model: Any, measured: tuple[Any, Any], *, causal: bool, at_once: int) -> tuple[float, float]:
    """The loss, and the share of answers that are right."""
    import torch

    inputs, labels = measured
    losses, right = 0.0, 0.0
    with torch.no_grad():
        for start in range(0, len(inputs), at_once):
            part = inputs[start : start + at_once], labels[start : start + at_once]
            loss, logits, _ = _loss(model, part, causal=causal)
            share = len(part[0]) / len(inputs)
            losses += float(loss) * share
            right += float((logits.argmax(-1) == torch.from_numpy(part[1])).double().mean()) * share
    return losses, right


# The run


def train(cell: Cell, seed: int, settings: Settings) -> dict[str, Any]:
    """Train one model and say how it went, in plain JSON; the caller sees to it that torch has one thread."""
    import torch

    data = load(cell.task, settings, seed)
    causal = cell.task == "text"
    measured = held(data, cell, settings, seed)
    at_once = settings.batch if causal else settings.images
    # Along the way a quarter will do.
    fewer = {name: (x[: -(-len(x) // 4)], y[: -(-len(x) // 4)]) for name, (x, y) in measured.items()}
    probe = (measured["training"][0][:at_once], measured["training"][1][:at_once])
    model = build(cell, settings, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=cell.learning_rate, betas=(0.9, 0.95), fused=True)
    order = batches(data, cell, settings, generator(seed, "order", cell.task))
    moments = [round(share * settings.steps) for share in MOMENTS]
    losses: list[float] = []
    looks: list[dict[str, Any]] = []
    finite = True
    for step in range(settings.steps + 1):
        if step in moments:
            _, layers = _measure(model, probe, causal=causal)
            both = {
                name: plain(_evaluate(model, part, causal=causal, at_once=at_once)[0]) for name, part in fewer.items()
            }
            looks.append({"step": step, **both, "layers": layers})
        if step == settings.steps:
            break
        for group in optimiser.param_groups:
            group["lr"] = cell.learning_rate * _pace(step, settings.steps)
        loss, _, _ = _loss(model, next(order), causal=causal)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            finite = False
            break
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    final = {name: _evaluate(model, part, causal=causal, at_once=at_once) for name, part in measured.items()}
    start = losses[0]
    finite = finite and all(math.isfinite(loss) for loss, _ in final.values())
    return {
        "cell": asdict(cell),
        "seed": seed,
        "data": {"sha256": data.digest, "size": data.size},
        "torch": torch.__version__,
        "start": plain(start),
        "finite": finite,
        "diverged": not finite or final["training"][0] > start,
        "curve": _curve(losses, settings.steps),
        "rise": plain(_rise(losses)),
        "training": plain(final["training"][0]),
        "validation": plain(final["validation"][0]),
        "training_accuracy": plain(final["training"][1]),
        "validation_accuracy": plain(final["validation"][1]),
        "moments": looks,
    }


def _pace(step: int, steps: int) -> float:
    """The share of the learning rate: a short rise, then half a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _curve(losses: list[float], steps: int) -> list[dict[str, Any]]:
    ends = np.unique(np.linspace(0, steps, POINTS + 1).round().astype(int))
    return [
        {"step": int(end), "loss": plain(float(np.mean(losses[start:end]))) if end <= len(losses) else None}
        for start, end in pairwise(ends)
    ]


def _rise(losses: list[float]) -> float:
    """How far the loss, as a mean over ten steps, ever rose above its lowest until then."""
    if len(losses) < 10:
        return 0.0
    smooth = np.convolve(losses, np.full(10, 0.1), "valid")
    return float(np.max(smooth - np.minimum.accumulate(smooth)))


def plain(x: float) -> float | None:
    """The number as JSON has it; what is none is None."""
    return rounded(x) if math.isfinite(x) else None
