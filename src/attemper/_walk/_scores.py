"""Worked examples by hand: a dot product term by term, the softmax of a row of scores step by step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import OptionError, brief, explain
from .._reading import to_plain
from .._scale import scale_for
from ._call import take
from ._walk import ROWS

SCHEMA = "attemper.scores/1"

MOST_ENTRIES = 1000

SYNTAX = (
    "Write one vector of scores, --vectors '12 2 -1', or two with a · (or ;) between them, "
    "--vectors '1,-1 · 1,1'; numbers are separated by spaces or commas."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """What became of the vectors: `dot` of two, or `softmax` of one."""

    vectors: tuple[tuple[float, ...], ...]
    d_k: int | None
    found: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON."""
        kind = "softmax" if len(self.vectors) == 1 else "dot"
        vectors = [list(vector) for vector in self.vectors]
        return {"schema": SCHEMA, "kind": kind, "vectors": vectors, "d_k": self.d_k, **self.found}


def of_vectors(text: str, d_k: int | None = None) -> Scores:
    """One vector: the softmax of its numbers, and of its numbers over √d_k. Two: their dot product, term by term.

    >>> of_vectors("2 -1 · 1 3").found["product"]
    -1.0
    >>> [round(weight, 6) for weight in of_vectors("12, 2, -1").found["unscaled"]["weights"]]
    [0.999952, 4.5e-05, 2e-06]
    """
    vectors = parse(text)
    if len(vectors) == 2:
        if d_k is not None:
            fix = "Leave --d-k out, or give one vector of scores."
            raise OptionError(explain(f"d_k of two vectors is their length, {len(vectors[0])}.", fix))
        return Scores(vectors=vectors, d_k=len(vectors[0]), found=_dot(*vectors))
    if len(vectors[0]) < 2:
        headline = "A single score has one weight, and that is 1."
        raise OptionError(explain(headline, f"There is nothing to compare. {SYNTAX}"))
    found = {"unscaled": _softmax(vectors[0], 1.0)}
    if d_k is not None:
        found["scaled"] = _softmax(vectors[0], scale_for("sqrt_dk", d_k))
    return Scores(vectors=vectors, d_k=d_k, found=found)


def parse(text: str) -> tuple[tuple[float, ...], ...]:
    """The vectors that a text spells.

    >>> parse("[1, −1]·[1, 1]"), parse("1 .5 . 2 3"), parse("-1e3;2")
    (((1.0, -1.0), (1.0, 1.0)), ((1.0, 0.5), (2.0, 3.0)), ((-1000.0,), (2.0,)))
    """
    # A point with space around it multiplies; one in a number does not.
    parts = re.split(r"[·⋅;]|(?<!\S)\.(?!\S)", text.replace("−", "-"))
    vectors = tuple(tuple(_number(word) for word in re.split(r"[\s,()\[\]]+", part) if word) for part in parts)
    if not any(vectors):
        raise OptionError(explain("--vectors is empty.", SYNTAX))
    if len(vectors) > 2:
        raise OptionError(explain(f"There are {len(vectors)} vectors in {brief(text)}.", SYNTAX))
    if len(vectors) == 2 and len(vectors[0]) != len(vectors[1]):
        headline = f"The vectors have {len(vectors[0])} and {len(vectors[1])} numbers."
        raise OptionError(explain(headline, "A dot product needs two of one length."))
    if (entries := max(map(len, vectors))) > MOST_ENTRIES:
        headline = f"There are {entries:,} numbers in a vector."
        raise OptionError(explain(headline, f"At most {MOST_ENTRIES:,} are shown: give fewer."))
    return vectors


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    # Python reads 1_000, which nobody means here.
    if not math.isfinite(value) or "_" in word:
        raise OptionError(explain(f"{brief(word)} is not a finite number.", SYNTAX))
    return value


def _dot(one: Sequence[float], two: Sequence[float]) -> dict[str, Any]:
    q, k = np.array([one]), np.array([two])
    scale = scale_for("sqrt_dk", len(one))
    steps, _ = take({"q": q, "k": k, "v": k}, scale)
    with np.errstate(over="ignore"):
        terms = to_plain((q * k)[0])
    return {"terms": terms, "product": to_plain(steps.scores)[0][0], "scaled_product": to_plain(steps.scaled)[0][0]}


def _softmax(scores: Sequence[float], scale: float) -> dict[str, Any]:
    """A query [1] and keys that are the scores: then q·kᵀ is the scores, and the operator does the rest."""
    keys = np.array(scores)[:, None]
    steps, reading = take({"q": np.ones((1, 1)), "k": keys, "v": keys}, scale)
    scaled = steps.scaled[0]
    largest = float(np.asarray(reading.max_logit)[0])
    with np.errstate(over="ignore"):
        shifted = scaled - largest
    exponentials = np.exp(shifted)
    return {
        "scale": scale,
        "scores": to_plain(scaled),
        "max": largest,
        "shifted": to_plain(shifted),
        "exponentials": to_plain(exponentials),
        "sum": float(exponentials.sum()),
        "weights": to_plain(steps.weights[0]),
        **{field: to_plain(np.asarray(getattr(reading, field))[0]) for field in ROWS},
    }
