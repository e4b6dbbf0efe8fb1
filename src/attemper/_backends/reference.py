"""The specification: explicit matrices in float64 (or wider), one line of mathematics a line.

Nothing here is tiled, merged or shared with the other backends, so that it can judge them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .._arrays import Array
from .._dropout import kept
from .._memory import refuse_what_does_not_fit
from .._problem import Problem


@dataclass(frozen=True, eq=False)
class Explicit:
    """Every matrix of one call, each (*batch, heads, queries, keys), and the output."""

    scores: Array  # q·k
    scaled: Array  # scale · q·k
    capped: Array  # after softcap
    masked: Array  # after bias; −inf where a key is hidden
    visible: Array
    weights: Array  # with a sink in the denominator; rows that see nothing are 0
    output: Array | None


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    return None if problem.framework == "numpy" else "it computes on NumPy arrays"


def run(problem: Problem, stats: frozenset[str]) -> tuple[Array | None, dict[str, Array]]:
    """The output and the fields of the Reading that `stats` names."""
    explicit = matrices(problem)
    fields = readings(problem, explicit)
    output = explicit.output
    if output is not None:
        with np.errstate(over="ignore"):
            output = output.astype(problem.q.dtype)
    return output, {name: fields[name] for name in stats & fields.keys()}


def matrices(problem: Problem, precision: type = np.float64) -> Explicit:
    """All matrices of the call, with heads repeated and masks spelled out."""
    refuse_what_does_not_fit(problem, np.dtype(precision).itemsize)
    q = problem.q.astype(precision)
    k = np.repeat(problem.k.astype(precision), problem.group, axis=-3)
    with np.errstate(all="ignore"):
        scores = np.matmul(q, np.swapaxes(k, -1, -2))
        scale = problem.scale
        if not isinstance(scale, float):
            scale = scale.astype(precision)[:, None, None]
        scaled = scores * scale
        capped = scaled
        if problem.softcap is not None:
            capped = problem.softcap * np.tanh(scaled / problem.softcap)
        visible = np.ones(scores.shape, dtype=bool)
        if problem.bounds is not None:
            index = np.arange(problem.keys)
            first = problem.bounds.first[..., None, :, None]
            stop = problem.bounds.stop[..., None, :, None]
            visible &= (first <= index) & (index < stop)
        masked = capped
        if problem.mask is not None and problem.mask.dtype == np.bool_:
            visible &= problem.mask
        elif problem.mask is not None:
            bias = problem.mask.astype(precision)
            visible &= bias != -np.inf
            masked = capped + bias
        masked = np.where(visible, masked, -np.inf)
        weights = _softmax(masked, visible, problem.sinks)
        output = None
        if problem.v is not None:
            v = np.repeat(problem.v.astype(precision), problem.group, axis=-3)
            kept_weights = weights
            if problem.dropout_p:
                rows = np.arange(math.prod(visible.shape[:-1])).reshape(*visible.shape[:-1], 1)
                keep = kept(rows, np.arange(problem.keys), problem.dropout_p, problem.seed)
                kept_weights = np.where(keep, weights, 0) / (1 - problem.dropout_p)
            output = _mix(kept_weights, visible, v)
    return Explicit(scores, scaled, capped, masked, visible, weights, output)


def readings(problem: Problem, explicit: Explicit) -> dict[str, Array]:
    """Every primitive field of the Reading, by its definition."""
    s, visible = explicit.masked, explicit.visible
    n = visible.sum(axis=-1)
    with np.errstate(all="ignore"):
        p = _softmax(s, visible, None)
        highest = s.max(axis=-1, initial=-np.inf)
        total = np.where(visible, np.exp(s - highest[..., None]), 0).sum(axis=-1)
        logsumexp = np.where(n > 0, highest + np.log(total), -np.inf)
        # The limit of p ln p at 0 is 0, also where a visible score is −inf.
        surprise = np.where(p == 0, 0, -p * (s - logsumexp[..., None]))
        expected = np.where(p == 0, 0, p * s)
        shown = np.where(visible, s, 0)
        mean = shown.sum(axis=-1) / np.maximum(n, 1)
        variance = np.where(visible, (s - mean[..., None]) ** 2, 0).sum(axis=-1) / np.maximum(n, 1)
        sink_mass = np.zeros(n.shape)
        if problem.sinks is not None:
            z = problem.sinks.astype(s.dtype)[:, None]
            sink_mass = np.where(z == -np.inf, 0, 1 / (1 + np.exp(logsumexp - z)))
        fields = {
            "max_logit": highest,
            "logsumexp": logsumexp,
            "expected_score": expected.sum(axis=-1),
            "entropy": surprise.sum(axis=-1),
            "largest_weight": p.max(axis=-1, initial=0),
            "collision": (p * p).sum(axis=-1),
            "score_mean": mean,
            "score_std": np.sqrt(variance),
            "visible_keys": n,
            "max_qk": np.where(visible, explicit.scaled, -np.inf).max(axis=-1, initial=-np.inf),
            "first_key_weight": _first(p, visible),
            "sink_mass": sink_mass,
        }
        bad = (visible & ~np.isfinite(s)).any(axis=-1)
        if explicit.output is not None:
            fields["output_norm"] = np.sqrt((explicit.output**2).sum(axis=-1))
            bad |= ~np.isfinite(fields["output_norm"])
        fields["nonfinite"] = bad.astype(np.int64)
    return fields


def _softmax(s: Array, visible: Array, sinks: Array | None) -> Array:
    highest = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        z = sinks.astype(s.dtype)[:, None, None]
        # A sink far above every score must not overflow: measure from the larger one.
        highest = np.where(visible.any(axis=-1, keepdims=True), np.maximum(highest, z), highest)
    e = np.where(visible, np.exp(s - highest), 0)
    total = e.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.where(z == -np.inf, 0, np.exp(z - highest))
    return np.where(visible, e / total, 0)


def _mix(weights: Array, visible: Array, v: Array) -> Array:
    """weights·v, in which a NaN or infinite value reaches the rows that see its key and no other."""
    if np.isfinite(v).all():
        return np.matmul(weights, v)
    terms = np.where(visible[..., None], weights[..., None] * v[..., None, :, :], 0)
    return terms.sum(axis=-2)


def _first(p: Array, visible: Array) -> Array:
    if p.shape[-1] == 0:
        return np.zeros(p.shape[:-1], dtype=p.dtype)
    return np.take_along_axis(p, visible.argmax(axis=-1)[..., None], axis=-1)[..., 0]
