"""Tiles of plain torch operations, forward and backward, on any device and dtype: the slow road that always works."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import _pytree  # noqa: F401  (registers Reading)
from ..._dropout import as_signed
from ..._problem import Problem
from ..._reading import AFTER_BACKWARD
from ._operators import DIFFERENTIABLE, RETURNS, Transformable, functorch_level, no_forward_mode, tiles
from ._tiles import FIELDS


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    return None if problem.framework == "torch" else "it computes on torch tensors"


def run(
    problem: Problem, stats: frozenset[str], *, differentiable: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The output and the fields of the Reading that `stats` names, with the place for what a backward pass measures."""
    batch = problem.batch
    wide = torch.float64 if problem.q.dtype == torch.float64 else torch.float32
    device = problem.q.device
    bounds = (None, None) if problem.bounds is None else tuple(_fold_rows(x, batch) for x in problem.bounds)
    seed = None
    if problem.dropout_p:
        seed = problem.seed if isinstance(problem.seed, Tensor) else torch.tensor(as_signed(problem.seed))
    # A gradient needs the row constants of its formula, asked for or not.
    needed = {*stats, "logsumexp", "max_logit", "largest_weight"}
    if differentiable:
        needed.update(("expected_score", "collision"))
    if problem.q.dtype.itemsize == 2 and torch.is_grad_enabled() and _any_requires_grad(problem):
        needed.add("wide_output")
    found = _operator(problem)(
        _fold(problem.q, batch),
        _fold(problem.k, batch),
        None if problem.v is None else _fold(problem.v, batch),
        None if problem.mask is None else _fold_mask(problem.mask, batch),
        *bounds,
        _per_head(problem.scale, wide, device),
        None if problem.sinks is None else _per_head(problem.sinks, wide, device),
        seed,
        problem.softcap,
        problem.dropout_p,
        math.prod(batch),
        ",".join(sorted(needed)),
    )
    by_name = dict(zip(RETURNS, found, strict=True))
    fields: dict[str, Any] = {}
    for name in FIELDS:
        if name in stats and (name != "output_norm" or problem.v is not None):
            value = by_name[name].reshape(*batch, *by_name[name].shape[1:])
            fields[name] = value if differentiable and name in DIFFERENTIABLE else value.detach()
    if not stats.isdisjoint(AFTER_BACKWARD):
        fields["gradients"] = by_name["gradients"].detach()
    output = by_name["output"]
    return None if problem.v is None else output.reshape(*batch, *output.shape[1:]), fields


def _operator(problem: Problem) -> Any:
    """The operator, in the form that the transforms around this call can see through."""
    if torch.compiler.is_compiling():
        return tiles
    operands = (problem.q, problem.k, problem.v, problem.mask, problem.scale, problem.sinks)
    if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in operands):  # noqa: SLF001
        raise no_forward_mode()
    return tiles if functorch_level() is None else Transformable.apply


def _any_requires_grad(problem: Problem) -> bool:
    operands = (problem.q, problem.k, problem.v, problem.mask, problem.scale, problem.sinks)
    return any(isinstance(x, Tensor) and x.requires_grad for x in operands)


def _has_tangent(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    functorch = torch._C._functorch  # noqa: SLF001
    while functorch.is_batchedtensor(x):  # vmap's own layer cannot be asked
        x = functorch.get_unwrapped(x)
    return forward_ad.unpack_dual(x).tangent is not None


def _fold(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """One batch axis instead of none or several."""
    return x if len(batch) == 1 else x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _fold_rows(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    return x[None] if len(x.shape) == 1 else _fold(x.expand(*batch, x.shape[-1]), batch)


def _fold_mask(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask shared by all entries stays shared; one that is shared along some of several batch axes is spread out."""
    own = mask.shape[: len(batch)]
    if all(n == 1 for n in own):
        return mask.reshape(1, *mask.shape[len(batch) :])
    return _fold(mask.expand(*batch, *mask.shape[len(batch) :]), batch)


def _per_head(x: Any, wide: torch.dtype, device: torch.device) -> Tensor:
    """(1, heads), or (1, 1) for one number."""
    if not isinstance(x, Tensor):
        # torch.full would have the number baked into a compiled graph, and refuse one that overflows.
        return torch.ones((1, 1), dtype=wide, device=device).mul(x)
    return x.to(wide).reshape(1, -1)
