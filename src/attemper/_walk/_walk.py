"""The walk of a sentence through one head: every matrix from X to the output, at its scale and without one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._errors import OptionError, explain
from .._reading import Reading, to_plain
from .._scale import scale_for
from ._call import Call, take
from ._text import Sentence, of_words

SCHEMA = "attemper.walk/1"

MOST_WORDS = 256
MOST_NUMBERS = 4_000_000
"""In X and the three matrices of weights together."""

ROWS = ("largest_weight", "entropy", "normalized_entropy", "flow")
"""What is told of every row of weights."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Walk:
    """Every step of attention for one sentence and one head."""

    sentence: Sentence
    origin: Mapping[str, Any]
    """Where the numbers are from: {"kind": "seeded", "seed": …}, or the model, its layer and head."""
    scale: float
    steps: Mapping[str, NDArray[Any]]
    """In the order in which they are computed."""
    visible: NDArray[np.bool_]
    """(queries, keys): False where the mask hides a key."""
    scaled: Reading
    unscaled: Reading
    row: int | None = None
    """The token that was asked about."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON."""
        steps = self.steps
        return {
            "schema": SCHEMA,
            "text": self.sentence.text,
            "tokens": list(self.sentence.tokens),
            "row": self.row,
            "origin": dict(self.origin),
            "d_model": int(steps["X"].shape[1]) if "X" in steps else None,
            "d_k": int(steps["Q"].shape[1]),
            "scale": self.scale,
            "shapes": {name: list(array.shape) for name, array in steps.items()},
            "visible": self.visible.tolist(),
            "readings": {
                name: {field: to_plain(np.asarray(getattr(reading, field))) for field in ROWS}
                for name, reading in (("scaled", self.scaled), ("unscaled", self.unscaled))
            },
            "steps": {name: to_plain(array) for name, array in steps.items()},
        }


def seeded(text: str, *, d_model: int = 512, d_k: int = 64, seed: int = 0, word: str | None = None) -> Walk:
    """The walk of a text through one head of random weights.

    A word's embedding is drawn from the seed and the word alone: the same in every sentence. Embeddings are N(0, 1),
    weights N(0, 1/d_model), so that the entries of Q and K have variance 1.

    >>> walk = seeded("love Apple phones")
    >>> walk.steps["scores"].shape, walk.steps["output"].shape
    ((3, 3), (3, 64))
    >>> bool((seeded("phones, love!").steps["X"][0] == walk.steps["X"][2]).all())
    True
    """
    sentence = of_words(text)
    count = len(sentence.words)
    if count > MOST_WORDS:
        fix = f"A walk shows at most {MOST_WORDS}: give a shorter text."
        raise OptionError(explain(f"The text has {count:,} words.", fix))
    numbers = count * d_model + 3 * d_model * d_k
    if numbers > MOST_NUMBERS:
        headline = f"{count} words, d_model {d_model:,} and d_k {d_k:,} make {numbers:,} numbers to draw."
        raise OptionError(
            explain(headline, f"A walk draws at most {MOST_NUMBERS:,}: give a smaller --d-model or --d-k.")
        )
    drawn = {name: _normal(seed, f"word {name}", (d_model,)) for name in dict.fromkeys(sentence.words)}
    x = np.stack([drawn[name] for name in sentence.words])
    weights = {name: _normal(seed, name, (d_model, d_k)) / math.sqrt(d_model) for name in ("W_Q", "W_K", "W_V")}
    q, k, v = (x @ matrix for matrix in weights.values())
    row = None if word is None else sentence.find(word)
    origin = {"kind": "seeded", "seed": seed}
    return _walk({"q": q, "k": k, "v": v}, scale_for("sqrt_dk", d_k), sentence, origin, {"X": x, **weights}, row=row)


def walk_through(call: Call, head: int, sentence: Sentence, origin: Mapping[str, Any]) -> Walk:
    """The walk of a sentence through one head of a model, from the operands of its own call."""
    first = {} if call.x is None else {"X": call.x}
    return _walk(call.one_head(head), call.scale[head], sentence, origin, first, values=call.v is not None)


def _walk(
    given: Mapping[str, Any],
    scale: float,
    sentence: Sentence,
    origin: Mapping[str, Any],
    first: Mapping[str, NDArray[Any]],
    *,
    values: bool = True,
    row: int | None = None,
) -> Walk:
    steps, scaled = take(given, scale)
    plain, unscaled = take(given, 1.0)
    visible = steps.masked != -math.inf
    found = {**first, "Q": given["q"], "K": given["k"], "V": given["v"], "scores": steps.scores, "scaled": steps.scaled}
    if given.get("softcap") is not None:
        found["capped"] = steps.capped
    if not visible.all() or given.get("attn_mask") is not None:
        found["masked"] = steps.masked
    found |= {"weights": steps.weights, "output": steps.output}
    found |= {"unscaled_weights": plain.weights, "unscaled_output": plain.output}
    if not values:
        for name in ("V", "output", "unscaled_output"):
            del found[name]
    return Walk(
        sentence=sentence,
        origin=origin,
        scale=scale,
        steps=found,
        visible=visible,
        scaled=scaled,
        unscaled=unscaled,
        row=row,
    )


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Standard normal numbers that belong to a seed and a name, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(shape)
