"""The gradients, tile by tile, with the weights computed again from the logsumexp."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operator import Call, Saved, Upstream
from ._tiles import (
    add_bias,
    add_per_head,
    kept,
    key_tiles,
    per_head,
    query_heads,
    row_tiles,
    rows_of,
    tile_scores,
    tile_shape,
    times,
    transposed,
    weigh,
)


def backward(call: Call, saved: Saved, upstream: Upstream, *, bias_too: bool, flow_too: bool) -> tuple[Tensor, ...]:
    """The gradients of (q, k, v, mask, scale, sinks), with P̃ the weights including a sink and P without.

    dS = P̃∘(dP − D) + P∘(g_lse + g_E (1 + s − E) − g_H (s − E) + 2 g_c (P − Σp²)),  D = ⟨dO, O⟩.
    """
    q, k, v = call.q, call.k, call.v
    like: dict[str, Any] = {"dtype": call.wide, "device": q.device}
    grad_q = torch.zeros(q.shape, **like)
    grad_k = torch.zeros(k.shape, **like)
    grad_v = torch.zeros((0,) if v is None else v.shape, **like)
    grad_mask = torch.zeros(call.mask.shape if bias_too and call.mask is not None else (0,), **like)
    grad_scale = torch.zeros(call.scale.shape, **like)
    grad_sinks = torch.zeros((0,) if call.sinks is None else call.sinks.shape, **like)
    measuring = saved.gradients.numel() > 0 and flow_too
    measured = torch.zeros((2, *q.shape[:-1]), **like)
    for tile, limits in row_tiles(call):
        where = (tile.batch, query_heads(call, tile), tile.rows)
        shape = tile_shape(call, tile)
        rows = partial(rows_of, call, tile)
        logsumexp, highest, peak = rows(saved.logsumexp), rows(saved.max_logit), rows(saved.largest_weight)
        sink_mass, passing = torch.zeros_like(logsumexp), torch.ones_like(logsumexp)
        if call.sinks is not None:
            sinks = per_head(call.sinks, call, tile).to(call.wide)
            sink_mass = torch.where(sinks == -math.inf, 0, torch.sigmoid(sinks - logsumexp))
            # Not 1 − sink_mass, of which no digit is left when the sink takes almost all.
            passing = torch.where(sinks == -math.inf, 1, torch.sigmoid(logsumexp - sinks))
        grad_output = None if upstream.output is None or v is None else rows(upstream.output)
        pull = torch.zeros_like(logsumexp)
        if grad_output is not None:
            pull = (grad_output * rows(saved.output)).sum(-1)
            if call.sinks is not None:
                # The sink's own weight loses what the others gain.
                add_per_head(grad_sinks, -torch.where(sink_mass == 0, 0, sink_mass * pull), call, tile)
        row = _Row(
            passing=passing,
            pull=pull,
            grad_logsumexp=None if upstream.logsumexp is None else rows(upstream.logsumexp),
            grad_entropy=None if upstream.entropy is None else rows(upstream.entropy),
            grad_expected=None if upstream.expected_score is None else rows(upstream.expected_score),
            grad_collision=None if upstream.collision is None else rows(upstream.collision),
            expected=rows(saved.expected_score) if saved.expected_score.numel() else None,
            collision=rows(saved.collision) if saved.collision.numel() else None,
        )
        flow = _GradientFlow(pull)
        towards_q = torch.zeros((*shape, q.shape[-1]), **like)
        own_q = rows(q)
        scale = per_head(call.scale, call, tile).to(call.wide)
        scaled_q = own_q * scale[..., None]
        for keys in key_tiles(call, limits):
            scores, qk, visible = tile_scores(call, tile, limits, keys)
            # Against the maximum, not the logsumexp: that one's rounding would be the weights' relative error.
            weights = torch.exp(scores - highest[..., None]) * peak[..., None]
            if visible is not None:
                weights = torch.where(visible, weights, 0)
            grad_weights = None
            if grad_output is not None and v is not None:
                values = v[tile.batch, tile.kv_heads, keys].to(call.wide)
                grad_weights = times(grad_output, values.mT)
                index = torch.arange(keys.start, keys.stop, device=q.device)
                keep = kept(call, tile, index)
                shares = weights * row.passing[..., None]
                if keep is not None:
                    grad_weights = torch.where(keep, grad_weights / (1 - call.dropout_p), 0)
                    shares = torch.where(keep, shares / (1 - call.dropout_p), 0)
                if visible is not None:
                    grad_weights = torch.where(visible, grad_weights, 0)
                    # What passes a sink is NaN in a row that met a NaN, and 0 times that is not 0.
                    shares = torch.where(visible, shares, 0)
                grad_v[tile.batch, tile.kv_heads, keys] += transposed(shares, visible, grad_output)
                if measuring:
                    flow.add(weights, grad_weights, visible)
            grad_scores = _grad_scores(row, scores, weights, grad_weights)
            if visible is not None:
                grad_scores = torch.where(visible, grad_scores, 0)
            if bias_too and call.mask is not None:
                add_bias(grad_mask, grad_scores, call, tile, keys)
            if call.softcap is not None:
                grad_scores = grad_scores * (1 - torch.tanh(qk / call.softcap).square())
                if visible is not None:
                    grad_scores = torch.where(visible, grad_scores, 0)
            own_k = k[tile.batch, tile.kv_heads, keys].to(call.wide)
            towards_q += weigh(visible, None, own_k, grad_scores)
            grad_k[tile.batch, tile.kv_heads, keys] += transposed(grad_scores, visible, scaled_q)
        grad_q[where] = (towards_q * scale[..., None]).flatten(1, 2)
        along = (own_q * towards_q).sum(-1)
        add_per_head(grad_scale, along, call, tile)
        measured[0][where] = flow.share().flatten(1, 2)
        measured[1][where] = (along * scale).flatten(1, 2)
    if saved.gradients.numel():
        # Through .data: the version counter must not move, or a second backward through a kept graph would refuse.
        saved.gradients.data[:1].fill_(1)
        saved.gradients.data[1:] = measured.flatten()
    return (
        grad_q.to(q.dtype),
        grad_k.to(k.dtype),
        grad_v.to(q.dtype),
        grad_mask.to(call.mask.dtype if bias_too and call.mask is not None else q.dtype),
        grad_scale.to(call.scale.dtype),
        grad_sinks.to(q.dtype if call.sinks is None else call.sinks.dtype),
    )


class _Row(NamedTuple):
    """The constants of the rows of a tile, each (batch, kv_heads, group, rows)."""

    passing: Tensor  # 1 − the sink's share
    pull: Tensor  # D
    grad_logsumexp: Tensor | None
    grad_entropy: Tensor | None
    grad_expected: Tensor | None
    grad_collision: Tensor | None
    expected: Tensor | None
    collision: Tensor | None


def _grad_scores(row: _Row, scores: Tensor, weights: Tensor, grad_weights: Tensor | None) -> Tensor:
    total = torch.zeros_like(weights)
    if grad_weights is not None:
        total = weights * row.passing[..., None] * (grad_weights - row.pull[..., None])
    slope = torch.zeros_like(weights)
    if row.grad_logsumexp is not None:
        slope = slope + row.grad_logsumexp[..., None]
    if row.expected is not None:
        apart = scores - row.expected[..., None]
        if row.grad_expected is not None:
            slope = slope + row.grad_expected[..., None] * (1 + apart)
        if row.grad_entropy is not None:
            slope = slope - row.grad_entropy[..., None] * apart
    if row.grad_collision is not None and row.collision is not None:
        slope = slope + 2 * row.grad_collision[..., None] * (weights - row.collision[..., None])
    # A weight of 0 passes nothing on, even of an infinite score.
    return total + torch.where(weights == 0, 0, weights * slope)


class _GradientFlow:
    """Var_p[dP] / Var[dP] of each row, tile by tile."""

    def __init__(self, pull: Tensor) -> None:
        self.count, self.mean = torch.zeros_like(pull), torch.zeros_like(pull)
        self.spread, self.weighted = torch.zeros_like(pull), torch.zeros_like(pull)
        self.mass, self.centre = torch.zeros_like(pull), torch.zeros_like(pull)

    def add(self, weights: Tensor, grad_weights: Tensor, visible: Tensor | None) -> None:
        mass = weights.sum(-1)
        centre = (weights * grad_weights).sum(-1) / torch.where(mass > 0, mass, 1)
        apart, both = centre - self.centre, self.mass + mass
        part = mass / torch.where(both > 0, both, 1)
        within = (weights * (grad_weights - centre[..., None]).square()).sum(-1)
        self.weighted += within + apart.square() * self.mass * part
        self.centre, self.mass = self.centre + apart * part, both
        shown = torch.ones_like(weights) if visible is None else visible.to(weights.dtype)
        count = shown.sum(-1)
        mean = (shown * grad_weights).sum(-1) / count.clamp(min=1)
        spread = (shown * (grad_weights - mean[..., None]).square()).sum(-1)
        total = self.count + count
        share = count / total.clamp(min=1)
        delta = torch.where((self.count > 0) & (count > 0), mean - self.mean, 0)
        self.spread += spread + delta * delta * self.count * share
        self.mean = self.mean * (1 - share) + mean * share
        self.count = total

    def share(self) -> Tensor:
        """NaN where there was nothing to share: fewer than two keys, or the same gradient on all."""
        return torch.where(self.spread > 0, self.weighted * self.count / self.spread, math.nan)
