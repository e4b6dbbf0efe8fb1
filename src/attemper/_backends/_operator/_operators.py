"""The torch operators: one node in a graph each way, with shapes for the compiler, autograd and vmap.

    attemper::tiles           the output and every field of the Reading
    attemper::tiles_backward  the gradients of all floating operands
    attemper::flow            the gradient flow of a call that somebody else computes and differentiates

Operands have one batch axis: q (batch, heads, queries, head_dim); k and v with the key heads; the mask with every axis
full or 1; bounds (batch or 1, queries), or a band in two numbers; scale and sinks (batch or 1, heads or 1). The last
argument is the road: the name of the backend that computes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from ..._errors import BackendError, OptionError, explain
from ._call import (
    CONSTANTS,
    COUNTS,
    FIELDS,
    Call,
    Road,
    Saved,
    Upstream,
    available,
    empty,
    empty_gradient,
    empty_output,
    gradient_size,
    plainly,
)

DIFFERENTIABLE = ("logsumexp", "entropy", "expected_score", "collision")
"""The fields through which gradients may flow."""

RETURNS = ("output", *FIELDS, "wide_output", "gradients")
"""`wide_output` is the output before it is rounded to 16 bits: the gradient needs ⟨dO, O⟩ to more digits than those."""


_OPERANDS = (
    "Tensor q, Tensor k, Tensor? v, Tensor? mask, Tensor? first, Tensor? stop, Tensor scale, Tensor? sinks, "
    "Tensor? seed, float? softcap, float dropout_p, SymInt period, SymInt[]? band, float? number"
)
TENSORS = 9  # of the operands; the rest are numbers
SEED = Call._fields.index("seed")
OPERANDS = len(Call._fields)
INPUTS = OPERANDS + 2  # of the forward operator, with stats and road
WAITING = OPERANDS + Saved._fields.index("gradients")
DIFFERENTIATED = [Call._fields.index(name) for name in ("q", "k", "v", "mask", "scale", "sinks")]


@cache
def implementation(road: str) -> Road:
    """The backend of that name, which imports this module and so cannot be imported by it before it is used."""
    return cast(Road, import_module(f"..{road}", __package__))


def computed(call: Call, stats: frozenset[str], road: str, *, apart: bool) -> dict[str, Tensor]:
    """The output and what `stats` names: those of RETURNS."""
    with plainly(call.q):
        output, found = implementation(road).forward(call, stats, apart=apart)
    if output is not None:
        found["output"] = output
    return found


def _parts(arguments: tuple[Any, ...]) -> tuple[Call, frozenset[str], str]:
    *operands, names, road = arguments
    call, stats = Call(*operands), frozenset(names.split(","))
    if "gradient" in stats:
        # Asked here, not by a caller that may be traced: what a road needs depends on the machine too.
        needs = getattr(implementation(road), "needs", None)
        stats = stats.union(CONSTANTS) if needs is None else needs(call, stats)
    return call, stats, road


@torch.library.custom_op(
    "attemper::tiles",
    mutates_args=(),
    schema=f"({_OPERANDS}, str stats, str road) -> ({', '.join(['Tensor'] * len(RETURNS))})",
)
def tiles(*arguments: Any) -> tuple[Tensor, ...]:
    """(output, *FIELDS, wide_output, gradients); what `stats` does not name is empty.

    `stats` may also say "gradient", for whatever of these the road's backward pass needs, and "differentiable": then
    gradients may arrive at fields too.

    `gradients` is where the backward pass leaves gradient_flow and pressure: a flag, then two numbers per row. It is an
    output that the backward operator fills in place behind autograd's back, so that the numbers reach the Reading
    without a hook, a global or a graph that is kept alive, compiled or not.
    """
    call, stats, road = _parts(arguments)
    found = computed(call, stats, road, apart=True)
    if call.v is None:
        found["output"] = call.q.new_empty(0)
    wide, device = call.wide, call.q.device
    waiting = gradient_size(call.q, stats)
    if waiting:
        found["gradients"] = torch.zeros(waiting, dtype=wide, device=device)
    # Not by `empty`: for a small call the dozen that are missing take as long as the kernel.
    return tuple([
        found[name]
        if name in found
        else torch.empty(0, dtype=torch.int64 if name in COUNTS else wide, device=device)
        for name in RETURNS
    ])  # fmt: skip


@tiles.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, stats, _ = _parts(arguments)
    wanted = available(call, stats)
    rows = call.q.shape[:-1]
    output = call.q.new_empty(0) if call.v is None else empty_output(call, call.q.dtype)
    found = [empty(call, name, rows if name in wanted else (0,)) for name in FIELDS]
    keep = call.v is not None and "wide_output" in stats
    found.append(empty_output(call, call.wide) if keep else empty(call, "wide_output"))
    return output, *found, torch.empty(gradient_size(call.q, stats), dtype=call.wide, device=call.q.device)


@torch.library.custom_op(
    "attemper::tiles_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, {', '.join(f'Tensor {name}' for name in Saved._fields)}, "
    f"{', '.join(f'Tensor? grad_{name}' for name in Upstream._fields)}, bool bias_too, bool flow_too, str road) "
    f"-> ({', '.join(['Tensor'] * len(DIFFERENTIATED))})",
)
def tiles_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of (q, k, v, mask, scale, sinks), empty where there is nothing to differentiate."""
    *rest, bias_too, flow_too, road = arguments[OPERANDS:]
    call = Call(*arguments[:OPERANDS])
    saved, upstream = Saved(*rest[: len(Saved._fields)]), Upstream(*rest[len(Saved._fields) :])
    with plainly(call.q):
        return implementation(road).backward(call, saved, upstream, bias_too=bias_too, flow_too=flow_too)


@tiles_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, (bias_too, _, road) = Call(*arguments[:OPERANDS]), arguments[-3:]

    def like(x: Tensor | None) -> Tensor:
        return call.q.new_empty(0) if x is None else x.new_empty(x.shape)

    def laid_out(x: Tensor | None) -> Tensor:
        return like(x) if x is None or road != "cuda" else empty_gradient(x)

    mask = call.mask if bias_too else None
    operands = (laid_out(x) for x in (call.q, call.k, call.v))
    return *operands, like(mask), like(call.scale), like(call.sinks)


@torch.library.custom_op(
    "attemper::flow",
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? output, Tensor max_logit, Tensor largest_weight, Tensor logsumexp, Tensor grad, "
    "str road) -> Tensor",
)
def flow(*arguments: Any) -> Tensor:
    """The gradient flow of each row, (batch, heads, queries), when `grad` arrives at the output.

    Without an output, as where the call that was made drops weights, it is computed too.
    """
    output, max_logit, largest_weight, logsumexp, grad, road = arguments[OPERANDS:]
    call = Call(*arguments[:OPERANDS])
    module = implementation(road)
    with plainly(call.q):
        if output is None:
            output, found = module.forward(call, frozenset(("wide_output",)), apart=True)
            output = found.get("wide_output", output)
        nothing = torch.empty(0, dtype=call.wide, device=call.q.device)
        saved = Saved(output, max_logit, largest_weight, logsumexp, nothing, nothing, nothing)
        alone = getattr(module, "flow", None)
        measured = None if alone is None else alone(call, saved, grad)
        if measured is not None:
            return cast(Tensor, measured)
        waiting = nothing.new_zeros(1 + 2 * logsumexp.numel())
        saved = saved._replace(gradients=waiting)
        module.backward(call, saved, Upstream(grad, None, None, None, None), bias_too=False, flow_too=True)
        return waiting[1:].reshape(2, *logsumexp.shape)[0].clone()


@flow.register_fake
def _(*arguments: Any) -> Tensor:
    call = Call(*arguments[:OPERANDS])
    return torch.empty(call.q.shape[:-1], dtype=call.wide, device=call.q.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    by_name = dict(zip(RETURNS, output, strict=True))
    *_, stats, ctx.road = inputs
    ctx.flow_too = "gradient_flow" in stats.split(",")
    ctx.numbers = inputs[TENSORS:OPERANDS]
    ctx.set_materialize_grads(False)
    if by_name["wide_output"].dim() > 1:
        by_name["output"] = by_name["wide_output"]
    # Not among the saved tensors, of which checkpointing and offloading hand back copies.
    plain = functorch_level() is None and not torch.compiler.is_compiling()
    ctx.waiting = by_name["gradients"].detach() if plain else None
    ctx.save_for_backward(*inputs[:TENSORS], *(by_name[name] for name in Saved._fields))


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    upstream = dict(zip(RETURNS, grads, strict=True))
    arriving = [upstream[name] for name in Upstream._fields]
    if all(grad is None for grad in arriving):
        return (None,) * INPUTS
    needs = ctx.needs_input_grad
    saved = list(ctx.saved_tensors)
    if ctx.waiting is not None:
        saved[TENSORS + Saved._fields.index("gradients")] = ctx.waiting
    operator: Any = tiles_backward if functorch_level() is None else TransformableBackward.apply
    rest = (bool(needs[3]), ctx.flow_too, ctx.road)
    found = operator(*saved[:TENSORS], *ctx.numbers, *saved[TENSORS:], *arriving, *rest)
    places = dict(zip(DIFFERENTIATED, found, strict=True))
    return tuple(places[i] if i in places and needs[i] else None for i in range(INPUTS))


TAKES_ANY = "Pass backend='reference', which builds the queries × keys matrices and takes any derivative."


def no_forward_mode() -> BackendError:
    """The error for a tangent, of which the operator would make zeros without a word."""
    return BackendError(explain("Forward-mode derivatives do not pass through the tiled operator.", TAKES_ANY))


def _refuse(_ctx: Any, *_grads: Tensor | None) -> Any:
    raise BackendError(explain("Second derivatives do not pass through the tiled operator.", TAKES_ANY))


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """There is nothing to keep for a derivative that does not exist."""


tiles.register_autograd(_differentiate, setup_context=_setup)
tiles_backward.register_autograd(_refuse, setup_context=_nothing)


def functorch_level() -> Any:
    """The transform of torch.func that is running, or None."""
    return torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001


class Transformable(torch.autograd.Function):
    """The same operator for torch.func, whose transforms do not reach an operator's registered autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tiles(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _setup(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _differentiate(ctx, *grads)

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        raise no_forward_mode()


class TransformableBackward(torch.autograd.Function):
    """Likewise for the backward operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tiles_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _nothing(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _refuse(ctx, *grads)

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        raise no_forward_mode()


@tiles.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    folded, _ = _fold_arguments(info, in_dims, arguments)
    *found, gradients = tiles(*folded)
    size = info.batch_size
    return (*(_unfold(x, size) for x in found), _apart(gradients, size)), (0,) * len(RETURNS)


@tiles_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    size = info.batch_size
    folded, batch = _fold_arguments(info, in_dims, arguments)
    waiting = arguments[WAITING] if in_dims[WAITING] is None else arguments[WAITING].movedim(in_dims[WAITING], 0)
    # One tensor for all entries, from which each gets its part.
    together = waiting.new_zeros(1 + 2 * folded[0].shape[:3].numel() if waiting.numel() else 0)
    folded[WAITING] = together
    found = tiles_backward(*folded)
    if waiting.numel() and in_dims[WAITING] is not None:
        waiting.data.copy_(_apart(together, size))
    parts = []
    for x, place in zip(found, DIFFERENTIATED, strict=True):
        part, own = _unfold(x, size), arguments[place]
        # What an entry shares along its batch axis (a bias, a scale) was spread over it. That is the first of its own.
        shared = own is not None and x.numel() and batch != 1 and own.shape[1 if in_dims[place] == 0 else 0] == 1
        parts.append(part.sum(1, keepdim=True) if shared else part)
    return tuple(parts), (0,) * len(parts)


def _fold_arguments(info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> tuple[list[Any], int]:
    """The vmapped axis as a part of the batch axis."""
    if in_dims[SEED] is not None:
        raise OptionError(explain("dropout drew a seed for each entry of vmap.", "Pass one seed for all of them."))
    moved = [
        x if dim is None or not isinstance(x, Tensor) else x.movedim(dim, 0)
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    batch = moved[0].shape[0 if in_dims[0] is None else 1]

    def fold(x: Any, dim: int | None) -> Any:
        x = x[None].expand(info.batch_size, *x.shape) if dim is None else x
        return x.expand(info.batch_size, batch, *x.shape[2:]).reshape(info.batch_size * batch, *x.shape[2:])

    return [
        fold(x, dim) if isinstance(x, Tensor) and i not in (SEED, WAITING) and x.numel() else x
        for i, (x, dim) in enumerate(zip(moved, in_dims, strict=True))
    ], batch


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.reshape(size, -1, *x.shape[1:]) if x.numel() else x.new_empty(size, *x.shape)


def _apart(gradients: Tensor, size: int) -> Tensor:
    """What waits for the backward pass, apart for each entry of vmap."""
    if not gradients.numel():
        return gradients.new_empty(size, 0)
    numbers = gradients[1:].reshape(2, size, -1).movedim(1, 0).reshape(size, -1)
    return torch.cat([gradients[:1].expand(size, 1), numbers], 1)
