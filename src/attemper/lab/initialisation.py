"""Are q and k of variance 1 at the start?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._progress import Progress, silent
from .._scale import scale_for
from ._result import HOLDS, OPEN, Estimate, Panel, Result, Series, Table, Verdict, judge, knob, near
from ._result import Config as Base
from ._statistics import generator, mean_of

INITIALISERS = {
    "N(0, 0.02²)": "GPT-2 and BERT: the same standard deviation at every width",
    "nn.Linear": "torch's default: uniform within ±1/√width, with a bias",
    "nn.MultiheadAttention": "Xavier uniform on W_Q, W_K and W_V as one matrix, three times as high as wide",
    "Xavier": "uniform, variance 2/(inputs + outputs), on each square matrix",
    "LeCun": "normal, variance 1/inputs",
}
WIDEST = 1024
"""Up to here nn.MultiheadAttention is built; its matrices grow with the square of the width."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `initialisation`."""

    width: tuple[int, ...] = knob((64, 768, 4096), "widths of the model", least=1)
    head: int = knob(64, "head width", least=1)
    initialisers: tuple[str, ...] = knob(tuple(INITIALISERS), "initialisers", choices=tuple(INITIALISERS))
    tokens: int = knob(256, "tokens, with components of mean 0 and variance 1", least=2)
    repeats: int = knob(16, "models for each", least=2)
    tolerance: float = knob(0.05, "how near to 1, and to theory, counts", least=1e-3)


QUICK = Config(repeats=6)


def run(config: Config, progress: Progress = silent) -> Result:
    """Draw W_Q and W_K of one head as each initialiser does and project normal tokens with them."""
    cases = [(name, width) for name in config.initialisers for width in config.width if _fits(config, name, width)]
    found: dict[tuple[str, int], list[Estimate]] = {}
    for i, (name, width) in enumerate(cases):
        progress(f"{name} at width {width}", i, len(cases))
        samples = [_measure(config, name, width, repeat) for repeat in range(config.repeats)]
        found[name, width] = [mean_of(column) for column in zip(*samples, strict=True)]
    claim = [
        evidence
        for (name, width), (mean, variance, _) in found.items()
        for evidence in (
            near(f"mean of a component of q, {name}, width {width}", mean, 0, config.tolerance),
            near(f"variance of a component of q, {name}, width {width}", variance, 1, 2 * config.tolerance),
        )
    ]
    theory = [
        near(f"variance over theory, {name}, width {width}", estimates[1].times(1 / component(name, width)), 1, 0.1)
        for (name, width), estimates in found.items()
    ]
    spreads = {at: estimates[2] for at, estimates in found.items()}
    least, most = min(found, key=lambda at: found[at][1].value), max(found, key=lambda at: found[at][1].value)
    ends = [
        (name, [(width, spreads[name, width]) for width in config.width if (name, width) in spreads])
        for name in config.initialisers
    ]
    return Result(
        question="initialisation",
        config=config,
        summary="Whether q and k start with components of variance 1 is up to the initialiser. The standard deviation "
        "of the scaled scores at the start: "
        + "; ".join(f"{name} {', '.join(f'{e.value:.2g} at {w}' for w, e in line)}" for name, line in ends if line)
        + ". The means are 0 everywhere. A fixed standard deviation of the weights makes the scores grow with the "
        "width of the model, which √d_k cannot know of. So a large or small score at the start does not by itself "
        "say that the scale is wrong.",
        verdicts=(
            Verdict(
                claim=22,
                # A variance that theory does not explain would say nothing about the initialisers.
                outcome=judge(claim) if judge(theory) == HOLDS else OPEN,
                expected="mean 0 and variance 1",
                measured=f"variance of a component of q from {found[least][1]} ({least[0]}, width {least[1]}) to "
                f"{found[most][1]} ({most[0]}, width {most[1]})",
                reason="The mean is 0, the variance is width times that of the weights. That is 1 for LeCun's "
                "initialiser and for Xavier's on square matrices, and something else for the ones that GPT-2, BERT "
                "and torch's own modules use.",
                evidence=(*claim, *theory),
            ),
        ),
        tables=(
            Table(
                title=f"q, k and their scores at the start, heads of width {config.head}",
                columns=("initialiser", "width", "mean of q", "variance of q", "theory", "std of q·k/√d_k"),
                rows=tuple(
                    (name, width, mean, variance, component(name, width), spread)
                    for (name, width), (mean, variance, spread) in found.items()
                ),
                note=f"{config.tokens} tokens with normal components, as after LayerNorm; {config.repeats} models "
                "each. "
                + " ".join(f"{name}: {INITIALISERS[name]}." for name in config.initialisers)
                + f" nn.MultiheadAttention is left out where the width is above {WIDEST} or no multiple of the head's.",
            ),
        ),
        panels=(
            Panel(
                title="The initialiser decides how large scaled scores start",
                x_label="width of the model",
                y_label="standard deviation of q·k/√d_k",
                x_scale="log2",
                y_scale="log10",
                series=tuple(
                    Series.of(name, [w for w, _ in line], [e for _, e in line]) for name, line in ends if line
                ),
                references=(("1", 1.0),),
            ),
        ),
    )


def component(name: str, width: int) -> float:
    """The variance of a component of q for tokens with components of variance 1."""
    return {
        "N(0, 0.02²)": width * 0.02**2,
        "nn.Linear": (width + 1) / (3 * width),
        "nn.MultiheadAttention": 0.5,
        "Xavier": 1.0,
        "LeCun": 1.0,
    }[name]


def projections(name: str, width: int, head: int) -> list[tuple[Any, Any]]:
    """W_Q and W_K of one head with their biases, as the initialiser draws them; W is (head, width), as torch has it."""
    import torch
    from torch import nn

    if name == "nn.MultiheadAttention":
        layer = nn.MultiheadAttention(width, width // head)
        weight, bias = layer.in_proj_weight.detach(), layer.in_proj_bias.detach()
        # Queries come first, then keys; the first rows of each are the first head.
        return [(weight[at : at + head], bias[at : at + head]) for at in (0, width)]
    if name == "nn.Linear":
        # What this draws depends on the inputs alone, so that one head's rows stand for all.
        layers = [nn.Linear(width, head) for _ in range(2)]
        return [(layer.weight.detach(), layer.bias.detach()) for layer in layers]
    pair = [torch.empty(head, width) for _ in range(2)]
    for matrix in pair:
        if name == "Xavier":
            # Of a square matrix, although only one head's rows of it are drawn.
            nn.init.uniform_(matrix, -math.sqrt(3 / width), math.sqrt(3 / width))
        elif name == "LeCun":
            nn.init.kaiming_normal_(matrix, nonlinearity="linear")
        else:
            nn.init.normal_(matrix, std=0.02)
    return [(matrix, torch.zeros(head)) for matrix in pair]


def _fits(config: Config, name: str, width: int) -> bool:
    return name != "nn.MultiheadAttention" or (width <= WIDEST and width % config.head == 0)


def _measure(config: Config, name: str, width: int, repeat: int) -> tuple[float, float, float]:
    """Mean and variance of the components of q, and the standard deviation of scaled scores, of one model."""
    import torch

    rng = generator(config.seed, "initialisation", name, width, repeat)
    # Modules draw from torch's global stream, which is the caller's to keep.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        pair = [(np.asarray(w), np.asarray(b)) for w, b in projections(name, width, config.head)]
    tokens = rng.standard_normal((2, config.tokens, width), dtype=np.float32)
    q, k = (x @ w.T + b for x, (w, b) in zip(tokens, pair, strict=True))
    scores = scale_for("sqrt_dk", config.head) * (q @ k.T)
    return float(q.mean(dtype=np.float64)), float(q.var(dtype=np.float64)), float(scores.std(dtype=np.float64))
