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
        tilt = keep_one * (one.tilt + _product(xp, shift_one, one.total)) + keep_two * (
            two.tilt + _product(xp, shift_two, two.total)
        )
    squares = None
    if one.squares is not None:
        squares = keep_one * keep_one * one.squares + keep_two * keep_two * two.squares
    count = one.count + two.count
    mean = spread = None
    if one.mean is not None and one.spread is not None:
        # Chan, Golub and LeVeque's pairwise update; the share is 0 where both sets are empty.
        share = two.count / xp.where(count > 0, count, 1)
        delta = xp.where((one.count > 0) & (two.count > 0), two.mean - one.mean, 0)
        mean = xp.where(one.count > 0, one.mean, two.mean) + delta * share
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
    return xp.where(own == maximum, 0, own - maximum)


def _product(xp: Any, shift: Array, total: Array) -> Array:
    """shift·total, where −inf·0 is 0."""
    return xp.where(total == 0, 0, shift * total)


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
        fields["output_norm"] = xp.sqrt((output * output).sum(-1))
        sound = sound & xp.isfinite(fields["output_norm"])
    if state.mean is not None:
        fields["score_mean"] = state.mean
        fields["score_std"] = xp.sqrt(state.spread / xp.where(seen, state.count, 1))
        sound = sound & xp.isfinite(state.mean)
        fields["nonfinite"] = xp.asarray(seen & ~sound, dtype=xp.int64)
    return output, fields
