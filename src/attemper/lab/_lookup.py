"""Small models that learn to look a vector up, trained side by side under several rules of scaling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .._attend import attend
from .._scale import scale_for
from ._statistics import generator

RATES = {"Adam": 0.01, "SGD": 3.0}
"""Learning rates at which the lookup is learned within the run."""

TOKENS, LABEL, BATCH = 32, 16, 12
"""The lookup: vectors in a sequence, components of what is looked up, sequences in a step."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: how it splits a sum must not depend on how many cores are free."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    """Normal numbers as a tensor."""
    import torch

    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def train(
    rules: Iterable[str], *, seed: int, models: int, steps: int, d_k: int, optimiser: str
) -> dict[str, dict[str, Any]]:
    """Loss, gradient to W_Q and flow of small models that learn to look a vector up, each (models, steps + 1).

    Every model is a head of one call: its scale is its own, its matrices are its own, and the losses add up, so that
    no model sees another.
    """
    import torch

    rng = generator(seed, "lookup", optimiser)
    rules = tuple(rules)

    def matrix(rows: int, columns: int) -> Any:
        one = normal(rng, models, rows, columns) / math.sqrt(rows)
        # All rules start from the same matrices.
        return torch.cat([one] * len(rules)).requires_grad_()

    width = d_k + LABEL
    w_q, w_k, w_v, w_o = matrices = [matrix(width, d_k), matrix(width, d_k), matrix(width, d_k), matrix(d_k, LABEL)]
    scale = torch.tensor([scale_for(rule, d_k) for rule in rules for _ in range(models)])
    make = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[optimiser]
    descent = make(matrices, lr=RATES[optimiser])
    history: dict[str, list[Any]] = {"loss": [], "W_Q": [], "flow": []}
    for _ in range(steps + 1):
        names, labels = normal(rng, BATCH, 1, TOKENS, d_k), normal(rng, BATCH, 1, TOKENS, LABEL)
        asked = names[:, :, : TOKENS // 2]
        asking = torch.cat([asked + 0.3 * normal(rng, *asked.shape), torch.zeros(*asked.shape[:-1], LABEL)], dim=-1)
        told = torch.cat([names, labels], dim=-1)
        output, reading = attend(asking @ w_q, told @ w_k, told @ w_v, scale=scale, stats="flow")
        loss = ((output @ w_o - labels[:, :, : TOKENS // 2]) ** 2).mean(dim=(0, 2, 3))
        descent.zero_grad()
        loss.sum().backward()
        descent.step()
        flow: Any = reading.flow
        for name, each in {"loss": loss, "W_Q": w_q.grad.norm(dim=(1, 2)), "flow": flow.mean(dim=(0, 2))}.items():
            history[name].append(each.detach().double().numpy())
    parts = {name: np.split(np.transpose(lines), len(rules)) for name, lines in history.items()}
    return {rule: {name: halves[at] for name, halves in parts.items()} for at, rule in enumerate(rules)}
