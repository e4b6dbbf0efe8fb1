"""Additive scores tile by tile, forward and backward, as two torch operators.

    attemper::additive           the output and every field of the Reading
    attemper::additive_backward  the gradients of q, k, v, weight and a floating mask

A score is s_ij = Σ_d weight_d tanh(q_id + k_jd), of which a tile holds queries × keys × hidden numbers and forgets them
again. Operands are float32 or float64: q (batch, heads, queries, hidden), k (batch, heads, keys, hidden), v (batch,
heads, keys, head_dim), weight (heads, hidden), mask with every axis of (batch, heads, queries, keys) full or 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._backends._operator import COUNTS, FIELDS, functorch_level, plainly
from .._backends.torch._backward import _GradientFlow as GradientFlow
from .._backends.torch._tiles import steps, transposed, weigh
from .._dropout import kept_signed
from .._errors import BackendError, explain
from .._state import PARTS_FOR, State, finish, identity, merge, observe

RETURNS = ("output", *FIELDS, "gradients")

KEYS_AT_ONCE = 128


class Call(NamedTuple):
    """The operands of one call, as the operators take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    dropout_p: float


class Tile(NamedTuple):
    """A part of the rows."""

    batch: slice
    heads: slice
    rows: slice


class Part(NamedTuple):
    """A tile over some keys; all but `bent` are (batch, heads, rows, keys)."""

    bent: Tensor
    """tanh(q + k), (batch, heads, rows, keys, hidden); 0 where hidden."""
    plain: Tensor
    """The scores before a bias."""
    scores: Tensor
    visible: Tensor | None
    kept: Tensor | None


def additive(call: Call, stats: frozenset[str]) -> dict[str, Tensor]:
    """The output, the fields that `stats` names, and the place for what a backward pass measures."""
    if not torch.compiler.is_compiling() and (functorch_level() is not None or _has_tangent(call)):
        headline = "Additive attention has no rule for torch.func and forward-mode derivatives."
        raise BackendError(explain(headline, "Call it outside of them, and take gradients with backward()."))
    # A gradient needs the first two, asked for or not.
    needed = {"max_logit", "largest_weight", *stats}
    return dict(zip(RETURNS, _additive(*call, ",".join(sorted(needed))), strict=True))


def _has_tangent(call: Call) -> bool:
    if forward_ad._current_level < 0:  # noqa: SLF001
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in call)


# --- tiles ----------------------------------------------------------------------------------------------------------


def _room(x: Tensor) -> int:
    """The most numbers of a tile: a cache on a CPU, many cores elsewhere."""
    return 2**20 if x.device.type == "cpu" else 2**24


def _row_tiles(call: Call) -> Iterator[Tile]:
    batch, heads, queries, hidden = call.q.shape
    width = max(min(call.k.shape[2], KEYS_AT_ONCE) * hidden, 1)
    rows = max(1, min(queries, _room(call.q) // width, 8 * KEYS_AT_ONCE))
    heads_at_once = max(1, min(heads, _room(call.q) // (width * rows)))
    batch_at_once = 1 if heads_at_once < heads else max(1, min(batch, _room(call.q) // (width * rows * heads)))
    for b in steps(0, batch, batch_at_once):
        for h in steps(0, heads, heads_at_once):
            for r in steps(0, queries, rows):
                yield Tile(b, h, r)


def _key_tiles(call: Call, tile: Tile) -> Iterator[slice]:
    keys = call.k.shape[2]
    return steps(0, min(keys, tile.rows.stop) if call.is_causal else keys, KEYS_AT_ONCE)


def _part_of_mask(mask: Tensor, tile: Tile, keys: slice) -> Tensor:
    """What a tile meets of something with axes that are full or 1."""
    for axis, part in enumerate((*tile, keys)):
        if mask.shape[axis] > 1:
            mask = mask.narrow(axis, part.start, part.stop - part.start)
    return mask


def _part(call: Call, tile: Tile, keys: slice) -> Part:
    device = call.q.device
    visible = bias = kept = None
    index = torch.arange(keys.start, keys.stop, device=device)
    rows = torch.arange(tile.rows.start, tile.rows.stop, device=device)
    if call.is_causal and keys.stop - 1 > tile.rows.start:
        visible = index <= rows[:, None]
    if call.mask is not None:
        mask = _part_of_mask(call.mask, tile, keys)
        shown = mask if mask.dtype == torch.bool else mask != -math.inf
        visible = shown if visible is None else visible & shown
        if mask.dtype != torch.bool:
            bias = torch.where(shown, mask, 0).to(call.q.dtype)
    sums = call.q[tile][:, :, :, None] + call.k[tile.batch, tile.heads, keys][:, :, None]
    bent = sums.tanh_()
    if visible is not None:
        visible = visible.expand(bent.shape[:-1])
        # Once for all that follows: NaN in a hidden key must reach nothing, not even times 0.
        bent = torch.where(visible[..., None], bent, 0)
    plain = torch.matmul(bent, call.weight[tile.heads, None, :, None]).squeeze(-1)
    if call.dropout_p and call.seed is not None:
        _, heads, queries, _ = call.q.shape
        b, h = (torch.arange(s.start, s.stop, device=device) for s in tile[:2])
        number = (b[:, None, None] * heads + h[:, None]) * queries + rows
        kept = kept_signed(number[..., None], index, call.dropout_p, call.seed.to(device))
    return Part(bent, plain, plain if bias is None else plain + bias, visible, kept)


def _grouped(x: Tensor | None) -> Tensor | None:
    """With the axis of grouped heads, which the shared helpers expect."""
    return None if x is None else x.unsqueeze(2)


# --- forward --------------------------------------------------------------------------------------------------------


def _forward(call: Call, stats: frozenset[str]) -> dict[str, Tensor]:
    parts = frozenset(part for name in stats for part in PARTS_FOR.get(name, ())) | {"weighted"}
    rows = call.q.shape[:-1]
    found = {name: _empty(call, name, rows) for name in FIELDS if name in stats}
    found["output"] = call.v.new_empty((*rows, call.v.shape[-1]))
    for tile in _row_tiles(call):
        state = _state(call, tile, parts)
        output, fields = finish(torch, state, None)
        if output is not None:
            found["output"][tile] = output / (1 - call.dropout_p)
        fields["output_norm"] = fields["output_norm"] / (1 - call.dropout_p)
        for name in found.keys() - {"output"}:
            found[name][tile] = fields[name]
    return found


def _state(call: Call, tile: Tile, parts: frozenset[str]) -> State:
    shape = tuple(s.stop - s.start for s in tile)
    like: dict[str, Any] = {"dtype": call.q.dtype, "device": call.q.device}
    state = identity(torch, shape, parts, value_dim=call.v.shape[-1], **like)
    for keys in _key_tiles(call, tile):
        part = _part(call, tile, keys)
        values = call.v[tile.batch, tile.heads, keys]

        def average(weights: Tensor, part: Part = part, values: Tensor = values) -> Tensor:
            return weigh(_grouped(part.visible), _grouped(part.kept), values, weights.unsqueeze(2)).squeeze(2)

        qk = None if part.plain is part.scores else part.plain
        index = torch.arange(keys.start, keys.stop, device=call.q.device)
        state = merge(torch, state, observe(torch, part.scores, qk, part.visible, index, parts, average))
    return state


def _empty(call: Call, name: str, shape: Any = (0,)) -> Tensor:
    return call.q.new_empty(tuple(shape), dtype=torch.int64 if name in COUNTS else call.q.dtype)


# --- backward -------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    output: Tensor
    max_logit: Tensor
    largest_weight: Tensor
    gradients: Tensor


def _backward(call: Call, saved: Saved, grad_output: Tensor, *, bias_too: bool) -> tuple[Tensor, ...]:
    """With P from scores computed again: dS = P∘(dP − D), D = ⟨dO, O⟩; ds/d(q + k) = weight∘(1 − tanh²)."""
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in call[:3])
    grad_weight = torch.zeros_like(call.weight)
    grad_mask = call.q.new_zeros(call.mask.shape if bias_too and call.mask is not None else 0)
    measuring = saved.gradients.numel() > 0
    measured = call.q.new_zeros((2, *call.q.shape[:-1]))
    for tile in _row_tiles(call):
        upstream = grad_output[tile]
        pull = (upstream * saved.output[tile]).sum(-1)
        highest, peak = saved.max_logit[tile], saved.largest_weight[tile]
        weight = call.weight[tile.heads, None]
        flow = GradientFlow(pull)
        pressure = torch.zeros_like(pull)
        for keys in _key_tiles(call, tile):
            part = _part(call, tile, keys)
            # Against the maximum, not the logsumexp: that one's rounding would be the weights' relative error.
            weights = torch.exp(part.scores - highest[..., None]) * peak[..., None]
            grad_weights = torch.matmul(upstream, call.v[tile.batch, tile.heads, keys].mT)
            if part.visible is not None:
                weights = torch.where(part.visible, weights, 0)
                grad_weights = torch.where(part.visible, grad_weights, 0)
            shares = weights
            if part.kept is not None:
                shares = torch.where(part.kept, weights / (1 - call.dropout_p), 0)
                grad_weights = torch.where(part.kept, grad_weights / (1 - call.dropout_p), 0)
            towards_v = transposed(shares.unsqueeze(2), _grouped(part.visible), upstream.unsqueeze(2))
            grad_v[tile.batch, tile.heads, keys] += towards_v
            grad_scores = weights * (grad_weights - pull[..., None])
            if part.visible is not None:
                grad_scores = torch.where(part.visible, grad_scores, 0)
            if measuring:
                flow.add(weights, grad_weights, part.visible)
                pressure += (grad_scores * part.plain).sum(-1)
            if bias_too:
                own = _part_of_mask(grad_mask, tile, keys)
                shared = [axis for axis in range(4) if own.shape[axis] == 1]
                own += grad_scores.sum(shared, keepdim=True) if shared else grad_scores
            towards_weight = torch.matmul(grad_scores.unsqueeze(-2), part.bent)
            grad_weight[tile.heads] += towards_weight.sum((0, 2, 3))
            slope = part.bent.square_().neg_().add_(1).mul_(grad_scores[..., None])
            grad_q[tile] += slope.sum(3) * weight
            grad_k[tile.batch, tile.heads, keys] += slope.sum(2) * weight
        measured[0][tile] = flow.share()
        measured[1][tile] = pressure
    if measuring:
        # Through .data: the version counter must not move, or a second backward through a kept graph would refuse.
        saved.gradients.data[:1].fill_(1)
        saved.gradients.data[1:] = measured.flatten()
    if bias_too and call.mask is not None:
        grad_mask = grad_mask.to(call.mask.dtype)
    return grad_q, grad_k, grad_v, grad_weight, grad_mask


# --- operators ------------------------------------------------------------------------------------------------------

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor? mask, Tensor? seed, bool is_causal, float dropout_p"
_TENSORS = 6
_COUNT = len(Call._fields)


def _waiting_size(q: Tensor, stats: frozenset[str]) -> int:
    """Of the tensor in which the backward pass leaves what it measures; see `attemper::tiles`."""
    return 1 + 2 * q.shape[0] * q.shape[1] * q.shape[2] if stats & {"gradient_flow", "pressure"} else 0


@torch.library.custom_op(
    "attemper::additive",
    mutates_args=(),
    schema=f"({_OPERANDS}, str stats) -> ({', '.join(['Tensor'] * len(RETURNS))})",
)
def _additive(*arguments: Any) -> tuple[Tensor, ...]:
    call, stats = Call(*arguments[:_COUNT]), frozenset(arguments[_COUNT].split(","))
    with plainly(call.q):
        found = _forward(call, stats)
    found["gradients"] = call.q.new_zeros(_waiting_size(call.q, stats))
    return tuple(found[name] if name in found else _empty(call, name) for name in RETURNS)


@_additive.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, stats = Call(*arguments[:_COUNT]), frozenset(arguments[_COUNT].split(","))
    rows = call.q.shape[:-1]
    output = call.v.new_empty((*rows, call.v.shape[-1]))
    fields = [_empty(call, name, rows if name in stats else (0,)) for name in FIELDS]
    return output, *fields, call.q.new_empty(_waiting_size(call.q, stats))


@torch.library.custom_op(
    "attemper::additive_backward",
    mutates_args=(),
    schema=f"({_OPERANDS}, {', '.join(f'Tensor {name}' for name in Saved._fields)}, Tensor grad_output, bool bias_too) "
    f"-> ({', '.join(['Tensor'] * 5)})",
)
def _additive_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call, rest = Call(*arguments[:_COUNT]), arguments[_COUNT:]
    with plainly(call.q):
        return _backward(call, Saved(*rest[:-2]), rest[-2], bias_too=rest[-1])


@_additive_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    call, bias_too = Call(*arguments[:_COUNT]), arguments[-1]
    mask = call.mask.new_empty(call.mask.shape) if bias_too and call.mask is not None else call.q.new_empty(0)
    return *(x.new_empty(x.shape) for x in call[:4]), mask


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    by_name = dict(zip(RETURNS, output, strict=True))
    ctx.numbers = inputs[_TENSORS:_COUNT]
    ctx.set_materialize_grads(False)
    # Not among the saved tensors, of which checkpointing and offloading hand back copies.
    ctx.waiting = None if torch.compiler.is_compiling() else by_name["gradients"].detach()
    ctx.save_for_backward(*inputs[:_TENSORS], *(by_name[name] for name in Saved._fields))


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * (_COUNT + 1)
    saved = list(ctx.saved_tensors)
    if ctx.waiting is not None:
        saved[-1] = ctx.waiting
    bias_too = bool(ctx.needs_input_grad[4])
    found = _additive_backward(*saved[:_TENSORS], *ctx.numbers, *saved[_TENSORS:], grads[0], bias_too)
    wanted = [grad if needed else None for grad, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *wanted, *(None,) * (_COUNT + 1 - len(wanted))


def _refuse(_ctx: Any, *_grads: Tensor | None) -> Any:
    fix = "For small problems write the formula in plain torch operations."
    raise BackendError(explain("Second derivatives do not pass through additive attention.", fix))


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """There is nothing to keep for a derivative that does not exist."""


_additive.register_autograd(_differentiate, setup_context=_setup)
_additive_backward.register_autograd(_refuse, setup_context=_nothing)
