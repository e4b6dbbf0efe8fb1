"""Explicit matrices in plain torch operations: derivatives of any order and in either mode, for small problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _pytree  # noqa: F401  (registers Reading)
from .._dropout import as_signed, kept_signed
from .._memory import refuse_what_does_not_fit
from .._problem import Problem


@dataclass(frozen=True, eq=False)
class Explicit:
    """Every matrix of one call, each (*batch, heads, queries, keys), and the output."""

    scores: Tensor
    scaled: Tensor
    capped: Tensor
    masked: Tensor
    visible: Tensor
    weights: Tensor
    output: Tensor | None


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    return None if problem.framework == "torch" else "it computes on torch tensors"


def run(
    problem: Problem, stats: frozenset[str], *, differentiable: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The output and the fields of the Reading that `stats` names."""
    explicit = matrices(problem)
    fields = readings(problem, explicit)
    flowing = ("logsumexp", "entropy", "expected_score", "collision") if differentiable else ()
    found = {name: fields[name] if name in flowing else fields[name].detach() for name in fields if name in stats}
    output = explicit.output
    return None if output is None else output.to(problem.q.dtype), found


def matrices(problem: Problem) -> Explicit:
    """All matrices of the call, in float32 or float64.

    Hidden scores are replaced before they are exponentiated, not after: a branch that is not taken still has a
    derivative, and 0 · inf in it would be NaN.
    """
    wide = torch.float64 if problem.q.dtype == torch.float64 else torch.float32
    if not torch.compiler.is_compiling():
        refuse_what_does_not_fit(problem, wide.itemsize)
    q = problem.q.to(wide)
    k = problem.k.to(wide).repeat_interleave(problem.group, -3)
    scores = _scores(q, k)
    scale = problem.scale
    if isinstance(scale, Tensor):
        scale = scale.to(wide) if scale.dim() == 0 else scale.to(wide)[:, None, None]
    scaled = _scaled(scores, scale)
    capped = scaled
    if problem.softcap is not None:
        capped = problem.softcap * torch.tanh(scaled / problem.softcap)
    visible = torch.ones_like(scores, dtype=torch.bool)
    if problem.bounds is not None:
        index = torch.arange(problem.keys, device=q.device)
        first, stop = (x.to(q.device)[..., None, :, None] for x in problem.bounds)
        visible = visible & (first <= index) & (index < stop)
    masked = capped
    if problem.mask is not None and problem.mask.dtype == torch.bool:
        visible = visible & problem.mask
    elif problem.mask is not None:
        shown = problem.mask != -math.inf
        visible = visible & shown
        masked = capped + torch.where(shown, problem.mask, 0).to(wide)
    masked = torch.where(visible, masked, -math.inf)
    weights = _softmax(masked, visible, None if problem.sinks is None else problem.sinks.to(wide)[:, None, None])
    output = None
    if problem.v is not None:
        v = problem.v.to(wide).repeat_interleave(problem.group, -3)
        output = _mix(_drop(problem, weights), visible, v)
    return Explicit(scores, scaled, capped, masked, visible, weights, output)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q·kᵀ, in which what is not finite has no derivative: 0 · NaN of a hidden key would be NaN in the gradients."""
    q_sound, k_sound = torch.isfinite(q), torch.isfinite(k)
    scores = torch.matmul(torch.where(q_sound, q, 0), torch.where(k_sound, k, 0).mT)
    sound = q_sound.all(-1)[..., None] & k_sound.all(-1)[..., None, :]
    return torch.where(sound, scores, torch.matmul(q.detach(), k.detach().mT))


def _scaled(scores: Tensor, scale: Any) -> Tensor:
    """In which a score that is not finite has no derivative either."""
    scaled: Tensor
    if isinstance(scale, Tensor):
        sound = torch.isfinite(scores)
        scaled = torch.where(sound, torch.where(sound, scores, 0) * scale, scores * scale.detach())
    else:
        scaled = scores * scale
    return scaled


def readings(problem: Problem, explicit: Explicit) -> dict[str, Tensor]:
    """Every primitive field of the Reading, by its definition."""
    s, visible = explicit.masked, explicit.visible
    n = visible.sum(-1)
    seen = n > 0
    p = _softmax(s, visible, None)
    shown = torch.where(visible, s, 0)
    highest = _highest(s)
    base = torch.where(seen, highest, 0)
    # Visible keys that all score −inf have no softmax: log 0 − log 0.
    # Hidden scores are replaced before e^ here too: below a maximum of −88 it would overflow for a score of 0.
    total = torch.where(visible, torch.exp(torch.where(visible, s - base[..., None], 0)), 0).sum(-1)
    log_total = torch.log(torch.where(seen, total, 1))
    weighted = torch.where(p == 0, 0, p * torch.where(p == 0, 0, shown))
    surprise = torch.where(p == 0, 0, p * torch.where(p == 0, 0, base[..., None] - shown)).sum(-1)
    mean = shown.sum(-1) / n.clamp(min=1)
    apart = torch.where(visible, shown - mean[..., None], 0)
    logsumexp = torch.where(seen, base + log_total, -math.inf)
    sink_mass = torch.zeros_like(mean)
    if problem.sinks is not None:
        sinks = problem.sinks.to(s.dtype)[:, None]
        sink_mass = torch.where(sinks == -math.inf, 0, torch.sigmoid(sinks - logsumexp))
    scaled = torch.where(visible, explicit.scaled, -math.inf)
    first = (visible & (visible.cumsum(-1) == 1)).to(p.dtype)
    fields = {
        "max_logit": highest,
        "logsumexp": logsumexp,
        "expected_score": weighted.sum(-1),
        "entropy": torch.where(seen, log_total + surprise, 0),
        "largest_weight": torch.where(seen, _highest(p), 0),
        "collision": p.square().sum(-1),
        "score_mean": mean,
        "score_std": (apart.square().sum(-1) / n.clamp(min=1)).sqrt(),
        "visible_keys": n,
        "max_qk": _highest(scaled),
        "first_key_weight": (p * first).sum(-1),
        "sink_mass": sink_mass,
    }
    bad = (visible & ~torch.isfinite(s)).any(-1)
    if explicit.output is not None:
        fields["output_norm"] = explicit.output.norm(dim=-1)
        bad = bad | ~torch.isfinite(fields["output_norm"])
    fields["nonfinite"] = bad.to(torch.int64)
    return fields


def _highest(s: Tensor) -> Tensor:
    return s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)


def _softmax(s: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    # The largest score cancels from the weights, so no derivative goes through it.
    highest = _highest(s.detach())[..., None]
    if sinks is not None:
        highest = torch.maximum(highest, sinks.detach())
    seen = visible.any(-1, keepdim=True)
    base = torch.where(seen & (highest != -math.inf), highest, 0)
    e = torch.where(visible, torch.exp(torch.where(visible, s - base, 0)), 0)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        # An infinite sink takes all.
        total = total + torch.exp(torch.where(base == math.inf, 0, sinks - base))
    return torch.where(visible, e / torch.where(seen, total, 1), 0)


def _drop(problem: Problem, weights: Tensor) -> Tensor:
    if not problem.dropout_p:
        return weights
    rows = torch.arange(weights.shape[:-1].numel(), device=weights.device).reshape(*weights.shape[:-1], 1)
    keys = torch.arange(problem.keys, device=weights.device)
    seed = problem.seed if isinstance(problem.seed, Tensor) else torch.tensor(as_signed(problem.seed))
    keep = kept_signed(rows, keys, problem.dropout_p, seed.to(weights.device))
    return torch.where(keep, weights, 0) / (1 - problem.dropout_p)


def _mix(weights: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    """weights·v, in which a NaN or infinite value reaches the rows that see its key and no other."""
    of_kind = torch.cat((v == math.inf, v == -math.inf, v.isnan()), -1).to(v.dtype)
    met = torch.matmul(visible.to(v.dtype), of_kind) > 0
    # The weights of each kind times a factor rather than a choice, which would hide from the gradients what is met.
    up, down, lost = (torch.matmul(weights, of_kind) * torch.where(met, math.inf, 0)).chunk(3, -1)
    return torch.matmul(weights, torch.where(torch.isfinite(v), v, 0)) + up - down + (lost - lost)
