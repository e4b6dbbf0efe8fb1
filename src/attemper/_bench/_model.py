"""A small GPT whose attention can be exchanged, and attention between matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .._attend import attend
from .._models import load
from .._watch import watch
from ._attention import FUSED, OURS
from ._rounds import Contender, measure
from ._row import Case, Check, Row, Settings

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

UNWATCHED, WATCHED = "not watched", "watched"


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, torch's."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ours, with every statistic, also of the backward pass."""
    output: Tensor = attend(q, k, v, is_causal=True).output
    return output


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """The next state of every token."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        perceived: Tensor = self.narrow(F.gelu(self.wide(self.between(x))))
        return x + perceived


class GPT(nn.Module):
    """A decoder with learned positions and its embedding for a head."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """The logits of the next token."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, attention)
        return F.linear(self.norm(x), self.words.weight)


def training_step(
    case: Case, settings: Settings, *, layers: int, width: int, heads: int, length: int, vocabulary: int
) -> Row:
    """Forward, loss, backward and a step of SGD, with either attention in the same model."""
    torch.manual_seed(0)
    model = GPT(layers, width, heads, length, vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ids = torch.randint(vocabulary, (1, length + 1))

    def step(attention: Attention) -> None:
        logits = model(ids[:, :-1], attention)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    return _against(case, settings, lambda: step(fused), lambda: step(ours))


def between_products(case: Case, settings: Settings, *, heads: int, length: int, width: int, times: int) -> Row:
    """x·w, attention, ·w, again and again: whether the threads of one are in the way of the other's."""
    torch.manual_seed(0)
    x = torch.randn(1, length, width)
    into, out = torch.randn(width, 3 * width) * width**-0.5, torch.randn(width, width) * width**-0.5

    def loop(attention: Attention) -> None:
        state = x
        with torch.no_grad():
            for _ in range(times):
                parts = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (state @ into).chunk(3, -1))
                state = attention(*parts).transpose(1, 2).flatten(2) @ out

    return _against(case, settings, lambda: loop(fused), lambda: loop(ours))


def _against(case: Case, settings: Settings, theirs: Callable[[], None], mine: Callable[[], None]) -> Row:
    timing = measure([Contender(FUSED, theirs), Contender(OURS, mine)], settings)
    ratio = timing.ratio(FUSED, OURS)
    return case.row(
        ratio=ratio,
        rounds=len(timing.rounds),
        discarded=timing.discarded,
        seconds=timing.seconds(),
        checks=[Check("speed", ratio, 1.0, True)],
    )


def watching(case: Case, settings: Settings, *, tokens: int, limit: float) -> Row:
    """A forward pass of SmolLM2, every call of its attention read beside it, against one that nobody watches."""
    try:
        loaded = load("demo", tokens=tokens, sequences=1, device="cpu", dtype="float32")
    except Exception as error:
        # Its weights are a package apart.
        return case.row(checks=[], skipped=str(error).splitlines()[0])
    model, ids = loaded.model, loaded.kwargs["input_ids"]

    def watched() -> None:
        with watch(model, every=1) as monitor:
            unwatched()
        if len(monitor.vitals) != model.config.num_hidden_layers:
            raise AssertionError("not every layer was seen")

    def unwatched() -> Any:
        with torch.no_grad():
            return model(input_ids=ids)

    timing = measure([Contender(UNWATCHED, unwatched), Contender(WATCHED, watched)], settings)
    return case.row(
        rounds=len(timing.rounds),
        discarded=timing.discarded,
        seconds=timing.seconds(),
        checks=[Check("time", timing.ratio(WATCHED, UNWATCHED), limit, False)],
    )
