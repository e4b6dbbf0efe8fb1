"""Statistics from torch's own fused kernel, called again: what identities of the softmax give without the scores.

With Z(β) = Σ e^(βs): the kernel's logsumexp at once and twice the scale gives Σp² = Z(2)/Z(1)²; attention over v = k
gives E_p[s] = scale·q·Attn(q, k, k); the moments of the scores are Σs = scale·q·Σk and Σs² = scale²·qᵀ(Σkkᵀ)q.

Many times as fast as tiles of torch operations on CUDA, and less exact: attention over v = k comes back rounded to the
operands' dtype, and so do `expected_score` and `entropy`. No identity gives a maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _pytree  # noqa: F401  (registers Reading)
from .._errors import OptionError, explain
from .._problem import Problem

CHUNK = 512
"""Rows of a causal problem whose own scores are computed; what lies before them comes from running sums."""


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    if problem.framework != "torch":
        return "it computes on torch tensors"
    kind = problem.q.device.type
    if kind not in ("cpu", "cuda"):
        return f"torch has no fused attention that returns its logsumexp on {kind}"
    if problem.mask is not None or problem.softcap is not None or problem.sinks is not None or problem.dropout_p:
        return "the identities hold without attn_mask, softcap, sinks and dropout"
    if isinstance(problem.scale, Tensor) or problem.scale == 0:
        return "the fused kernel takes one scale, a number other than 0"
    if problem.bounds is not None and not _is_causal(problem):
        return "the fused kernel knows no mask by position but the causal one"
    if problem.group != 1:
        return "the fused kernel has no grouped heads"
    if problem.v is not None and problem.value_dim != problem.head_dim:
        return "the fused kernel needs v of the head_dim of k"
    if not (problem.q.numel() and problem.k.numel()):
        return "the fused kernel takes no empty operands"
    if kind == "cuda" and (problem.q.dtype not in (torch.float16, torch.bfloat16) or problem.head_dim % 8):
        return "the fused kernel on CUDA takes float16 or bfloat16 and a head_dim that 8 divides"
    return None


def run(
    problem: Problem, stats: frozenset[str], *, differentiable: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The output and those fields of the Reading that `stats` names and an identity gives."""
    if differentiable:
        fix = "Pass backend='torch'."
        raise OptionError(explain("The identities give no derivatives of the statistics.", fix))
    rows = (*problem.batch, problem.heads, problem.queries)
    q, k = _four(problem.q), _four(problem.k)
    v = None if problem.v is None else _four(problem.v)
    scale = float(problem.scale)
    causal = problem.bounds is not None
    output = None
    if v is not None:
        output, logsumexp = _fused(q, k, v, causal, scale)
    with torch.no_grad():
        mixed, over_k = _fused(q, k, k, causal, scale)
        logsumexp = over_k if v is None else logsumexp.detach()
        wide = logsumexp.dtype
        fields: dict[str, Any] = {"logsumexp": logsumexp}
        fields["expected_score"] = scale * (q.to(wide) * mixed.to(wide)).sum(-1)
        fields["entropy"] = (logsumexp - fields["expected_score"]).clamp(min=0)
        if "collision" in stats:
            _, twice = _fused(q, k, k, causal, 2 * scale)
            fields["collision"] = torch.exp(twice - 2 * logsumexp).clamp(max=1)
        if not stats.isdisjoint(("score_mean", "score_std", "nonfinite")):
            fields["score_mean"], fields["score_std"] = _moments(q.to(wide), k.to(wide), causal, scale)
        fields["first_key_weight"] = torch.exp(scale * (q.to(wide) * k[..., :1, :].to(wide)).sum(-1) - logsumexp)
        every = torch.full((q.shape[-2],), k.shape[-2], device=q.device)
        seen = torch.arange(1, q.shape[-2] + 1, device=q.device).clamp(max=k.shape[-2]) if causal else every
        fields["visible_keys"] = seen.expand(logsumexp.shape)
        fields["sink_mass"] = torch.zeros_like(logsumexp)
        sound = torch.isfinite(logsumexp)
        if output is not None:
            fields["output_norm"] = output.detach().to(wide).norm(dim=-1)
            sound = sound & torch.isfinite(fields["output_norm"])
        if "score_mean" in fields:
            fields["nonfinite"] = (~(sound & torch.isfinite(fields["score_mean"]))).to(torch.int64)
    found = {name: value.reshape(rows) for name, value in fields.items() if name in stats}
    return None if output is None else output.reshape(*rows, output.shape[-1]), found


def _fused(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # noqa: SLF001
    else:
        output, logsumexp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)  # noqa: SLF001
    return output, logsumexp


def _four(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:]).contiguous()


def _is_causal(problem: Problem) -> bool:
    assert problem.bounds is not None
    first, stop = problem.bounds
    expected = torch.arange(1, problem.queries + 1, device=stop.device).clamp(max=problem.keys)
    return first.dim() == 1 and not bool(first.any()) and bool((stop == expected).all())


def _moments(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the scores of each row, in O(n·d²)."""
    # Around the mean key, or the squares would cancel.
    centre = k.mean(-2, keepdim=True)
    k = k - centre
    base = scale * (q * centre).sum(-1)
    if not causal:
        mean = scale * (q * k.mean(-2, keepdim=True)).sum(-1)
        square = scale**2 * ((q @ (k.mT @ k)) * q).sum(-1) / k.shape[-2]
        return base + mean, (square - mean.square()).clamp(min=0).sqrt()
    mean, square = torch.empty_like(base), torch.empty_like(base)
    total = torch.zeros_like(centre)
    products = k.new_zeros(*k.shape[:-2], k.shape[-1], k.shape[-1])
    for start in range(0, q.shape[-2], CHUNK):
        rows = slice(start, min(start + CHUNK, q.shape[-2]))
        here, own = q[..., rows, :], k[..., rows, :]
        s = scale * (here @ own.mT)
        index = torch.arange(rows.start, rows.stop, device=q.device)
        s = torch.where(index[: own.shape[-2]] <= index[:, None], s, 0)
        count = (index + 1).clamp(max=k.shape[-2]).to(s.dtype)
        mean[..., rows] = (scale * (here * total).sum(-1) + s.sum(-1)) / count
        square[..., rows] = (scale**2 * ((here @ products) * here).sum(-1) + s.square().sum(-1)) / count
        total = total + own.sum(-2, keepdim=True)
        products = products + own.mT @ own
    return base + mean, (square - mean.square()).clamp(min=0).sqrt()
