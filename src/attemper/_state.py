"""The State of a softmax row over a set of keys, and how two of them merge.

For one query row and a set of visible keys with scores s_j (after scale, softcap and bias):

    maximum      m  = max s_j
    total        l  = Σ e^(s_j − m)
    weighted     a  = Σ e^(s_j − m) v_j            output = a / l
    tilt         t  = Σ e^(s_j − m) (s_j − m)      E_p[s] = m + t/l,  entropy = ln l − t/l
    squares      c  = Σ e^(2(s_j − m))             Σp² = c / l²
    count        n
    mean, spread    mean of s_j and Σ (s_j − mean)²: merged pairwise, so nothing cancels
    highest_qk      max of the scaled q·k before softcap and bias
    first, first_score   the index of the first visible key, and its score

States over disjoint sets of keys merge into the State over their union; the empty set is the identity; merging is
associative and commutative. This is the loop body of every tiled backend, of split-key decoding, and of keys spread
over machines. Works on NumPy arrays and torch tensors; parts that nobody asked for are None and stay None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._arrays import Array

NO_KEY = 2**31 - 1
"""The first key of an empty set: larger than any index, so that the merge is a minimum."""

PARTS_FOR = {
    "expected_score": ("tilt",),
    "entropy": ("tilt",),
    "collision": ("squares",),
    "score_mean": ("moments",),
    "score_std": ("moments",),
    "nonfinite": ("moments",),
    "max_qk": ("highest_qk",),
    "first_key_weight": ("first",),
}
"""The optional parts that a field of the Reading needs; the others come with every State."""


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """Shapes: (*rows) for every part but `weighted`, which is (*rows, value_dim)."""

    maximum: Array
    total: Array
    count: Array
    weighted: Array | None = None
    tilt: Array | None = None
    squares: Array | None = None
    mean: Array | None = None
    spread: Array | None = None
    highest_qk: Array | None = None
    first: Array | None = None
    first_score: Array | None = None


def identity(xp: Any, rows: tuple[int, ...], parts: frozenset[str], *, value_dim: int, **like: Any) -> State:
    """The State over no keys; `like` is the dtype (and device) of its parts."""

    def zeros(part: str, *more: int) -> Array | None:
        return xp.zeros((*rows, *more), **like) if part in parts else None

    lowest = xp.full(rows, -float("inf"), **like)
    index = {**like, "dtype": xp.int64}
    return State(
        maximum=lowest,
        total=xp.zeros(rows, **like),
        count=xp.zeros(rows, **like),
        weighted=zeros("weighted", value_dim),
        tilt=zeros("tilt"),
        squares=zeros("squares"),
        mean=zeros("moments"),
        spread=zeros("moments"),
        highest_qk=lowest if "highest_qk" in parts else None,
        first=xp.full(rows, NO_KEY, **index) if "first" in parts else None,
        first_score=lowest if "first" in parts else None,
    )


def observe(
    xp: Any,
    scores: Array,
    qk: Array | None,
    visible: Array | None,
    keys: Array,
    parts: frozenset[str],
    weigh: Callable[[Array], Array] | None,
) -> State:
    """The State over one tile of at least one key.

    Args:
        xp: numpy or torch.
        scores: (*rows, keys).
        qk: the scaled q·k before softcap and bias; None where it is the scores.
        visible: (*rows, keys), True where a row sees a key; None where all do.
        keys: the index of each key, (keys,).
        parts: the optional parts to fill.
        weigh: from (*rows, keys) unnormalised weights to their sum of values, (*rows, value_dim).
    """
    hidden_low = scores if visible is None else xp.where(visible, scores, -float("inf"))
    maximum = xp.amax(hidden_low, -1)
    deviation = hidden_low - xp.where(maximum == -float("inf"), 0, maximum)[..., None]
    weights = xp.exp(deviation)
    everyone = xp.zeros_like(maximum) + scores.shape[-1]
    count = everyone if visible is None else visible.sum(-1, dtype=scores.dtype)
    tilt = squares = mean = spread = highest = first = first_score = None
    if "tilt" in parts:
        # A finite lower bound keeps 0·(−inf) out.
        tilt = xp.einsum("...k,...k->...", weights, xp.clip(deviation, xp.finfo(scores.dtype).min, None))
    if "squares" in parts:
        squares = xp.einsum("...k,...k->...", weights, weights)
    if "moments" in parts:
        # Two passes over the tile: the sum of squares alone would cancel when the mean is large.
        shown = scores if visible is None else xp.where(visible, scores, 0)
        mean = shown.sum(-1) / xp.where(count > 0, count, 1)
        apart = scores - mean[..., None]
        if visible is not None:
            apart = xp.where(visible, apart, 0)
        spread = xp.einsum("...k,...k->...", apart, apart)
    if "highest_qk" in parts:
        highest = maximum
        if qk is not None:
            highest = xp.amax(qk if visible is None else xp.where(visible, qk, -float("inf")), -1)
    if "first" in parts:
        if visible is None:
            first, first_score = xp.zeros_like(maximum, dtype=xp.int64) + keys[0], scores[..., 0]
        else:
            first = xp.amin(xp.where(visible, keys, NO_KEY), -1)
            first_score = xp.amax(xp.where(keys == first[..., None], hidden_low, -float("inf")), -1)
    return State(
        maximum=maximum,
        total=weights.sum(-1),
        count=count,
        weighted=None if weigh is None else weigh(weights),
        tilt=tilt,
        squares=squares,
        mean=mean,
        spread=spread,
        highest_qk=highest,
        first=first,
        first_score=first_score,
    )


def merge(xp: Any, one: State, two: Any) -> State:
    """The State over the union of two disjoint sets of keys; both States have the same parts."""
    maximum = xp.maximum(one.maximum, two.maximum)
    # −inf − (−inf) is NaN. Where a side is at −inf its sums are 0, and any finite shift carries them over;
    # where both are, so are all scores, and the shift must be 0.
    shift_one = _shift(xp, one.maximum, maximum)
    shift_two = _shift(xp, two.maximum, maximum)
    keep_one, keep_two = xp.exp(shift_one), xp.exp(shift_two)

    weighted = None
    if one.weighted is not None:
        weighted = keep_one[..., None] * one.weighted + keep_two[..., None] * two.weighted
    tilt = None
    if one.tilt is not None:
        # Where the shift overflows to −inf its weight is 0, and so is their product.
        lean_one = xp.where(keep_one == 0, 0, shift_one) * keep_one
        lean_two = xp.where(keep_two == 0, 0, shift_two) * keep_two
        tilt = keep_one * one.tilt + keep_two * two.tilt + lean_one * one.total + lean_two * two.total
    squares = None
    if one.squares is not None:
        squares = keep_one * keep_one * one.squares + keep_two * keep_two * two.squares
    count = one.count + two.count
    mean = spread = None
    if one.mean is not None and one.spread is not None:
        # Chan, Golub and LeVeque's pairwise update; an empty set has mean 0 and share 0.
        whole = xp.where(count > 0, count, 1)
        share = two.count / whole
        # Equal means differ by 0 also where both are infinite.
        apart = (one.count > 0) & (two.count > 0) & (one.mean != two.mean)
        delta = xp.where(apart, two.mean - one.mean, 0)
        mean = one.mean * (one.count / whole) + two.mean * share
        spread = one.spread + two.spread + delta * delta * one.count * share
    first = first_score = None
    if one.first is not None:
        first = xp.minimum(one.first, two.first)
        first_score = xp.where(one.first <= two.first, one.first_score, two.first_score)
    return State(
        maximum=maximum,
        total=keep_one * one.total + keep_two * two.total,
        count=count,
        weighted=weighted,
        tilt=tilt,
        squares=squares,
        mean=mean,
        spread=spread,
        highest_qk=None if one.highest_qk is None else xp.maximum(one.highest_qk, two.highest_qk),
        first=first,
        first_score=first_score,
    )


def _shift(xp: Any, own: Array, maximum: Array) -> Array:
    """The difference, which is 0 where they are equal, infinite ones too."""
    same = own == maximum
    return xp.where(same, 0, own) - xp.where(same, 0, maximum)


def finish(xp: Any, state: State, sinks: Array | None) -> tuple[Array | None, dict[str, Array]]:
    """The output rows, and those fields of the Reading for which the State has the parts.

    `sinks` broadcasts against the rows.
    """
    seen = state.count > 0
    # Keys may be visible and yet all score −inf: the softmax is then 0/0, not the 0 of a row that sees nothing.
    total = xp.where(seen, xp.where(state.total == 0, float("nan"), state.total), 1)
    log_total = xp.log(total)
    logsumexp = xp.where(seen, state.maximum + log_total, state.maximum)
    fields: dict[str, Array] = {
        "visible_keys": xp.asarray(state.count, dtype=xp.int64),
        "max_logit": state.maximum,
        "logsumexp": logsumexp,
        "largest_weight": xp.where(seen, 1 / total, 0),
    }
    denominator = total
    if sinks is None:
        fields["sink_mass"] = xp.zeros_like(logsumexp)
    else:
        # As a logistic of the difference, which neither side can overflow. No keys and no sink take no weight.
        absent = sinks == -float("inf")
        gap = xp.where(absent, 0, sinks) - logsumexp
        fields["sink_mass"] = xp.where(absent, 0, 1 / (1 + xp.exp(-gap)))
        denominator = total * xp.where(absent, 1, 1 + xp.exp(gap))
    if state.tilt is not None:
        lean = state.tilt / total
        fields["expected_score"] = xp.where(seen, state.maximum + lean, 0)
        fields["entropy"] = xp.where(seen, log_total - lean, 0)
    if state.squares is not None:
        # Never above 1, which rounding could otherwise turn into a negative flow.
        collision = state.squares / (total * total)
        fields["collision"] = xp.where(collision > 1, 1, collision)
    if state.highest_qk is not None:
        fields["max_qk"] = state.highest_qk
    if state.first_score is not None:
        share = xp.exp(state.first_score - state.maximum) / total
        fields["first_key_weight"] = xp.where(seen, share, 0)
    output = None
    sound = xp.isfinite(state.maximum) & xp.isfinite(total)
    if state.weighted is not None:
        # A visible NaN must come through, so hidden rows are written as 0 rather than multiplied by it.
        output = xp.where(seen[..., None], state.weighted / denominator[..., None], 0)
        fields["output_norm"] = _norm(xp, output)
        sound = sound & xp.isfinite(fields["output_norm"])
    if state.mean is not None:
        fields["score_mean"] = state.mean
        fields["score_std"] = xp.sqrt(state.spread / xp.where(seen, state.count, 1))
        sound = sound & xp.isfinite(state.mean)
        fields["nonfinite"] = xp.asarray(seen & ~sound, dtype=xp.int64)
    return output, fields


def _norm(xp: Any, rows: Array) -> Array:
    """The Euclidean norm, of which no square over- or underflows."""
    if not rows.shape[-1]:
        return xp.zeros_like(rows.sum(-1))
    largest = xp.amax(xp.abs(rows), -1)
    unit = xp.where((largest > 0) & xp.isfinite(largest), largest, 1)
    return unit * xp.sqrt(((rows / unit[..., None]) ** 2).sum(-1))
