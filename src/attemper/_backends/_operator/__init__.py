"""From a Problem to the torch operators, whatever backend computes in them, and back to an output and fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import _pytree  # noqa: F401  (registers Reading)
from ..._arrays import torch_is_plain
from ..._dropout import as_signed
from ..._problem import Problem
from ..._reading import AFTER_BACKWARD
from ._call import (
    CONSTANTS,
    COUNTS,
    FIELDS,
    Call,
    Road,
    Saved,
    Upstream,
    available,
    bounds_of,
    empty,
    empty_gradient,
    empty_output,
    gradient_size,
    over_shared,
    plainly,
    row_by_row,
)
from ._operators import (
    DIFFERENTIABLE,
    OPERANDS,
    RETURNS,
    TENSORS,
    Transformable,
    computed,
    flow,
    functorch_level,
    implementation,
    no_forward_mode,
    tiles,
    tiles_backward,
)

__all__ = [
    "CONSTANTS",
    "COUNTS",
    "FIELDS",
    "OPERANDS",
    "RETURNS",
    "Call",
    "Road",
    "Saved",
    "Upstream",
    "available",
    "bounds_of",
    "call_of",
    "empty",
    "empty_gradient",
    "empty_output",
    "flow",
    "functorch_level",
    "gradient_size",
    "implementation",
    "over_shared",
    "plainly",
    "row_by_row",
    "run_on",
    "tiles",
    "tiles_backward",
]


def run_on(
    road: str, problem: Problem, stats: frozenset[str], *, differentiable: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The output and the fields of the Reading that `stats` names, with the place for what a backward pass measures.

    `road` is the name of a module beside this one that has the functions of `Road`.
    """
    batch = problem.batch
    call = call_of(problem, batch, banded=road == "cuda")
    alone = _is_alone(call)
    if alone:
        found = computed(call, stats, road, apart=False)
    else:
        # What a gradient needs is kept, asked for or not.
        needed = {*stats, "gradient"}
        if differentiable:
            needed.update(("differentiable", "expected_score", "collision"))
        if problem.q.dtype.itemsize == 2 and torch.is_grad_enabled() and _any_requires_grad(problem):
            needed.add("wide_output")
        found = dict(zip(RETURNS, _operator(problem)(*call, ",".join(sorted(needed)), road), strict=True))
    fields: dict[str, Any] = {}
    for name in FIELDS:
        if name in stats and (name != "output_norm" or problem.v is not None):
            value = _unfold(found[name], batch)
            fields[name] = value if alone or (differentiable and name in DIFFERENTIABLE) else value.detach()
    if not stats.isdisjoint(AFTER_BACKWARD):
        if alone:
            # No backward pass can come: zeros like those that would wait for one, of which only one is written.
            zero = _number(0.0, call.wide, call.q.device)
            found["gradients"] = zero.view(1).expand(gradient_size(call.q, stats))
        fields["gradients"] = found["gradients"].detach()
    return None if problem.v is None else _unfold(found["output"], batch), fields


def call_of(problem: Problem, batch: tuple[int, ...], *, banded: bool = False) -> Call:
    """A Problem as the operators take it; `banded`: with a band where there is one, also on a CPU."""
    wide = torch.float64 if problem.q.dtype == torch.float64 else torch.float32
    device = problem.q.device
    band, bounds = problem.band, problem.rows
    if band is not None and (banded or bounds is None):
        bounds = None
    else:
        band = None
    seed = None
    if problem.dropout_p:
        seed = problem.seed if isinstance(problem.seed, Tensor) else torch.tensor(as_signed(problem.seed))
    return Call(
        _fold(problem.q, batch),
        _fold(problem.k, batch),
        None if problem.v is None else _fold(problem.v, batch),
        None if problem.mask is None else _fold_mask(problem.mask, batch),
        None if bounds is None else _fold_rows(bounds.first, batch),
        None if bounds is None else _fold_rows(bounds.stop, batch),
        _per_head(problem.scale, wide, device),
        None if problem.sinks is None else _per_head(problem.sinks, wide, device),
        seed,
        problem.softcap,
        problem.dropout_p,
        math.prod(batch),
        band,
        problem.number,
    )


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _is_alone(call: Call) -> bool:
    """Whether nobody but its caller would notice the operator: no autograd, compiler, transform, mode or profiler.

    Then there is no need of one, and torch takes longer to call it than a small problem takes.
    """
    if not torch_is_plain(torch):
        return False
    if forward_ad._current_level >= 0 or torch._C._autograd._profiler_enabled():  # noqa: SLF001
        return False
    tensors: list[Any] = [x for x in call[:TENSORS] if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    # The operator's caller would see to signs that are still to be turned, and knows what has no numbers.
    return not call.q.is_meta and _PLAIN.issuperset(map(type, tensors)) and not any(x.is_neg() for x in tensors)


def _operator(problem: Problem) -> Any:
    """The operator, in the form that the transforms around this call can see through."""
    if torch.compiler.is_compiling():
        # A compiler cannot ask for tangents, and would lose them: without it, whoever has none is computed.
        if forward_ad._current_level >= 0:  # noqa: SLF001
            raise no_forward_mode()
        return tiles
    operands = (problem.q, problem.k, problem.v, problem.mask, problem.scale, problem.sinks)
    if forward_ad._current_level >= 0:  # noqa: SLF001
        # Compiled by itself it would see none. Not as its decorator: that imports the compiler.
        has_tangent = torch.compiler.disable(_has_tangent)
        if any(map(has_tangent, operands)):
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


def _unfold(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    return x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:])


def _fold_rows(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else _fold(x.expand(*batch, x.shape[-1]), batch)


def _fold_mask(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask shared by all entries stays shared; one that is shared along some of several batch axes is spread out."""
    own = mask.shape[: len(batch)]
    if all(n == 1 for n in own):
        return mask.reshape(1, *mask.shape[len(batch) :])
    return _fold(mask.expand(*batch, *mask.shape[len(batch) :]), batch)


def _per_head(x: Any, wide: torch.dtype, device: torch.device) -> Tensor:
    """(1, heads), or (1, 1) for one number."""
    # One number may come from another device, as in torch's own arithmetic.
    return x.to(device, wide).reshape(1, -1) if isinstance(x, Tensor) else _number(x, wide, device)


def _number(x: float, wide: torch.dtype, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling() or not -1e38 < x < 1e38:
        # torch.full would have the number baked into a compiled graph, and refuse one that overflows.
        return torch.ones((1, 1), dtype=wide, device=device).mul(x)
    if device.type == "cuda" and torch_is_plain(torch):
        return _on_gpu(x, wide, device)
    return torch.full((1, 1), x, dtype=wide, device=device)


_ON_GPU: dict[tuple[float, torch.dtype, torch.device], tuple[Tensor, Any]] = {}
"""Numbers, and events that say when they were written; None once that is known."""
MOST_NUMBERS = 256


def _on_gpu(x: float, wide: torch.dtype, device: torch.device) -> Tensor:
    """A number that stays on the GPU: to write it anew takes a kernel, and short calls notice that."""
    key = x, wide, device
    capturing = torch.cuda.is_current_stream_capturing
    if key not in _ON_GPU:
        with torch.inference_mode(False):
            number = torch.full((1, 1), x, dtype=wide, device=device)
        # What a graph writes is there only once it is replayed. None is ever let go: another stream may still read it.
        if len(_ON_GPU) < MOST_NUMBERS and not capturing():
            _ON_GPU[key] = number, torch.cuda.current_stream(device).record_event()
        return number
    number, written = _ON_GPU[key]
    if written is not None:
        if capturing() or not written.query():
            # Not there yet for every stream, as far as one may know.
            return torch.full((1, 1), x, dtype=wide, device=device)
        _ON_GPU[key] = number, None
    return number
