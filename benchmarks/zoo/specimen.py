"""What a model of the zoo is: the model, what to run it on, and where its attention is."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Place:
    """One attention module: where it is, how wide its heads are, and which part of its weights makes which head."""

    path: str
    heads: int
    head_dim: int
    model_dim: int
    kv_heads: int | None = None
    aliases: tuple[str, ...] = ()
    """Other paths that mean the same attention: the layer, where a fused kernel runs a whole one."""

    def names(self, path: str) -> bool:
        """Whether a reported path means this attention; a module's second call is reported as path#2."""
        path = path.partition("#")[0]
        return path == self.path or path.startswith(f"{self.path}.") or path in self.aliases

    def group(self, head: int) -> tuple[int, ...]:
        """The query heads that share `head`'s keys."""
        size = self.heads // (self.kv_heads or self.heads)
        first = head // size * size
        return tuple(range(first, first + size))


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A model ready to be checked. `trained` is what the zoo knows; it is never told to the check."""

    name: str
    seed: int
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None
    has_loss: bool = False
    """Whether there is a loss at all: `loss`, or the model's own."""
    trained: bool = False
    places: tuple[Place, ...] = ()
    padded: bool = False
    """Whether the caller's mask calls some keys padding that a real row could see."""
    normalised: bool = False
    """QK-norm or cosine attention: growing W_q and W_k changes nothing."""
    declared: bool = False
    """Whether the model says which scale it means, so that any departure from it is a fault."""
    strict_mask: Callable[[Specimen], Specimen] | None = None
    """How to give it a mask in which a row sees no key; None where it takes no mask."""
    heavy: bool = False
    """Large enough that only a few faults are planted."""

    @property
    def label(self) -> str:
        return f"{self.name}/{self.seed}"

    def copy(self) -> Specimen:
        """The same with a model of its own."""
        return replace(self, model=copy.deepcopy(self.model))

    def module(self, place: Place) -> nn.Module:
        return self.model.get_submodule(place.path)

    def run(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def loss_of(self, output: Any) -> Tensor:
        return self.loss(output) if self.loss else output.loss


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A way of building specimens, and the seeds with which it is built."""

    name: str
    make: Callable[[int], Specimen]
    seeds: tuple[int, ...] = (0, 1)
    kind: str = "own"
    """"own", "hugging" or "pretrained"."""

    def build(self, seed: int) -> Specimen:
        """A specimen in evaluation mode; the same seed gives the same weights and inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            specimen = self.make(seed)
        specimen.model.eval()
        return replace(specimen, name=self.name, seed=seed)


def half(name: str, seed: int) -> str:
    """ "tune" or "holdout": fixed by the architecture's name and the seed's parity, so both halves hold every kind."""
    return ("tune", "holdout")[(zlib.crc32(name.encode()) + seed) % 2]
