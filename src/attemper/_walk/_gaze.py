"""What one word attends to in every head of a model, at the model's own scale and at others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._errors import OptionError, brief, explain
from .._reading import to_plain
from .._scale import scale_for
from ._call import Call
from ._text import Sentence

SCHEMA = "attemper.gaze/1"

OWN = "own"
RULES = (OWN, "unscaled", "dk", "sqrt_dmodel")
"""The scale as it is, removed, and wrong in two ways."""

MOST_HEADS = 10

Weights = tuple[NDArray[np.float64], ...]
"""(heads, words) for every layer."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Gaze:
    """The weights of one word on every word, per scale, layer and head."""

    sentence: Sentence
    origin: Mapping[str, Any]
    word: int
    query: int
    """The token that asks: the word's last."""
    layers: tuple[str, ...]
    scales: Mapping[str, tuple[float, ...]]
    """For every rule, the scale of each layer; its first head's, where heads differ."""
    weights: Mapping[str, Weights]
    seen: tuple[int, ...]
    """The words that the mask lets it see."""
    among: tuple[int, ...]
    """The candidates."""
    layer: int | None = None
    head: int | None = None
    through: bool = False
    """Whether the whole model ran at the other scales, and not one softmax at a time."""

    @property
    def first(self) -> int:
        """The word of the first token, on which many heads park what they have no use for."""
        return self.sentence.word_of[0]

    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of all heads that were asked about."""
        return [
            (layer, head)
            for layer, weights in enumerate(self.weights[OWN])
            for head in range(len(weights))
            if self.layer in (None, layer) and self.head in (None, head)
        ]

    def mean(self, rule: str) -> NDArray[np.float64]:
        """(words,): the mean weight over these heads."""
        mean: NDArray[np.float64] = np.mean([self.weights[rule][layer][head] for layer, head in self.heads()], axis=0)
        return mean

    def ranking(self, rule: str) -> list[int]:
        """The candidates, the most looked at first."""
        mean = self.mean(rule)
        return sorted(self.among, key=lambda word: -mean[word])

    def top(self, rule: str, layer: int, head: int) -> tuple[int, float]:
        """The candidate that a head looks at most, and its weight."""
        weights = self.weights[rule][layer][head]
        best = max(self.among, key=lambda word: weights[word])
        return best, float(weights[best])

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON."""
        heads = self.heads()
        if self.layer is None:
            heads = sorted(heads, key=lambda at: -self.top(OWN, *at)[1])[:MOST_HEADS]
        tops = []
        for layer, head in heads:
            found = {rule: self.top(rule, layer, head) for rule in self.weights}
            tops.append({"layer": layer, "head": head, "top": {rule: list(best) for rule, best in found.items()}})
        return {
            "schema": SCHEMA,
            "text": self.sentence.text,
            "tokens": list(self.sentence.tokens),
            "words": list(self.sentence.words),
            "word_of": list(self.sentence.word_of),
            "word": self.word,
            "query": self.query,
            "origin": dict(self.origin),
            "through": self.through,
            "layer": self.layer,
            "head": self.head,
            "heads": len(self.heads()),
            "layers": list(self.layers),
            "scales": {rule: list(scales) for rule, scales in self.scales.items()},
            "first": self.first,
            "seen": list(self.seen),
            "among": list(self.among),
            "mean": {rule: to_plain(self.mean(rule)) for rule in self.weights},
            "ranking": {rule: self.ranking(rule) for rule in self.weights},
            "top_heads": tops,
            "weights": {rule: [to_plain(layer) for layer in layers] for rule, layers in self.weights.items()},
        }


def gaze(
    calls: Sequence[Call],
    sentence: Sentence,
    word: str,
    origin: Mapping[str, Any],
    *,
    among: Sequence[str] = (),
    layer: int | None = None,
    head: int | None = None,
    again: Callable[[float], Sequence[Call]] | None = None,
) -> Gaze:
    """What a word attends to.

    Unless `again` reruns the model with every scale multiplied by a factor, q and k are those of the model as it is,
    and only each layer's own softmax is taken at another scale.
    """
    place = sentence.find(word)
    query = sentence.last_token(place)
    word_of = np.array(sentence.word_of)
    seen = tuple(sorted({int(word_of[key]) for call in calls for key in np.flatnonzero(call.sees(query))}))
    if seen == (place,):
        headline = f"{brief(sentence.words[place])} sees only itself: it has one weight, and that is 1."
        raise OptionError(explain(headline, "There is nothing to compare. Choose a later word."))
    first = sentence.word_of[0]
    chosen = tuple(dict.fromkeys(sentence.find(name) for name in among))
    for other in chosen:
        if other not in seen:
            headline = f"{brief(sentence.words[place])} does not see {brief(sentence.words[other])}."
            shown = ", ".join(sentence.words[i] for i in seen)
            raise OptionError(explain(headline, f"The mask hides it. Choose from: {shown}."))
    candidates = chosen or tuple(i for i in seen if i not in (place, first)) or (first,)
    rules = [rule for rule in RULES if rule != "sqrt_dmodel" or all(call.model_dim for call in calls)]
    wanted = {rule: [_scales(rule, call) for call in calls] for rule in rules}
    weights = {}
    for rule in rules:
        if again is None or rule == OWN:
            rows = [call.row(query, scale) for call, scale in zip(calls, wanted[rule], strict=True)]
        else:
            rerun = again(_factor(rule, calls, wanted[rule]))
            rows = [call.row(query, call.scale) for call in rerun]
        weights[rule] = tuple(_merged(row, word_of, len(sentence.words)) for row in rows)
    return Gaze(
        sentence=sentence,
        origin=origin,
        word=place,
        query=query,
        layers=tuple(call.path for call in calls),
        scales={rule: tuple(scale[0] for scale in wanted[rule]) for rule in rules},
        weights=weights,
        seen=seen,
        among=candidates,
        layer=layer,
        head=head,
        through=again is not None,
    )


def _scales(rule: str, call: Call) -> tuple[float, ...]:
    if rule == OWN:
        return call.scale
    return (scale_for(rule, call.head_dim, model_dim=call.model_dim),) * call.heads


def _factor(rule: str, calls: Sequence[Call], wanted: Sequence[tuple[float, ...]]) -> float:
    """What brings every scale of the model to this rule."""
    ratios = {
        b / a if a else math.inf
        for call, scales in zip(calls, wanted, strict=True)
        for a, b in zip(call.scale, scales, strict=True)
    }
    if not (math.isfinite(max(ratios)) and max(ratios) - min(ratios) <= 1e-6 * abs(max(ratios))):
        fix = "Leave --through out."
        raise OptionError(explain(f"No one factor brings the scales of all heads to the rule {rule!r}.", fix))
    return min(ratios)


def _merged(row: NDArray[Any], word_of: NDArray[Any], words: int) -> NDArray[np.float64]:
    """(heads, words) from (heads, tokens): a word has the weight of all its tokens."""
    return np.stack([row[:, word_of == word].sum(axis=1, dtype=np.float64) for word in range(words)], axis=1)
