"""One attention call that was seen: its Reading, what the backward pass adds to it, and the Vitals they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from .._attend import attend, read
from .._reading import Reading, changed
from .._state import finish, observe
from .._vitals import Site, Vitals
from ._origin import row_norms

HIDING = -9900.0
"""A bias this low hides a key from the Reading: models write finite minima where they mean −inf, from −10⁴ on.

bfloat16 holds that as −9984, and rounds the score that it is added to by up to 32.
"""


class Listener(Protocol):
    """Whoever wants to know how a watched pass goes."""

    def note(self, path: str, error: Exception) -> None:
        """Something of ours failed at a path."""

    def arrived(self) -> None:
        """A backward pass has reached something that was watched."""

    def awaits(self, tensor: Tensor, hook: Any) -> None:
        """The gradient of this tensor is waited for, by a hook that can be removed."""


PARTS = frozenset(("tilt", "squares", "moments", "highest_qk", "first"))
ROWS_AT_ONCE = 2**20
"""Scores looked at together where a model wrote all of them out."""


@dataclass(eq=False)
class Record:
    """A call in progress: the forward pass fills the Reading, the backward pass `pressure` and `gradient_flow`."""

    site: Site
    reading: Reading
    rows: Tensor | None = None
    """(batch, queries): False for rows of padding."""
    padding_weight: Tensor | None = None
    of_model: int = 1
    """Entries of the model's batch, so far as its inputs tell; a window of a picture is a part of one."""
    pressure: Tensor | None = None
    gradient_flow: Tensor | None = None

    @property
    def sequences(self) -> int:
        """The model's, where they divide this call's entries; else those."""
        batch = self.reading.shape[0]
        return self.of_model if self.of_model and batch % self.of_model == 0 else batch

    @property
    def sequence_pressure(self) -> Tensor | None:
        """(sequences, heads, 1): the pressure of each, times their number, as the loss is a mean over them.

        Rows of padding are in it: what they add to the gradient, they add.
        """
        pressure = self.pressure if self.pressure is not None else self.reading.pressure
        if pressure is None:
            return None
        rows = pressure.sum(-1, keepdim=True)
        return rows.reshape(self.sequences, -1, *rows.shape[1:]).sum(1) * self.sequences

    def look_at_output(self, output: Tensor) -> None:
        """Take its norms, and note the rows in which it is not finite: values can be broken where scores are sound."""
        batch, heads, queries = self.reading.shape
        shape = tuple(output.shape[:-1])
        if shape == (batch, queries, heads) and heads != queries:
            output = output.transpose(1, 2)
        elif shape not in ((batch, heads, queries), (batch * heads, queries)):
            return
        with torch.no_grad():
            norm = row_norms(output).reshape(batch, heads, queries).contiguous()
            nonfinite = self.reading.nonfinite
            if nonfinite is not None:
                nonfinite = nonfinite | ~torch.isfinite(norm)
            self.reading = changed(self.reading, output_norm=norm, nonfinite=nonfinite)

    def leave_out(self, padding: Tensor, weight: Tensor) -> None:
        """Note the weight on padding, (batch, keys), and leave its rows out where they are the keys'."""
        self.padding_weight = weight
        if padding.shape[1] == self.reading.shape[2]:
            self.rows = padding.logical_not()

    def vitals(self) -> Vitals:
        flow = self.gradient_flow if self.gradient_flow is not None else self.reading.gradient_flow
        reading = changed(self.reading, pressure=self.sequence_pressure, gradient_flow=flow, gradients=None, awaited=())
        return Vitals.of(reading, self.site, rows=self.rows, padding_weight=self.padding_weight)


def hide_minima(mask: Tensor | None) -> Tensor | None:
    """A mask in which what a model means to hide is hidden."""
    if mask is None or not mask.is_floating_point():
        return mask
    low = mask <= HIDING
    return mask.masked_fill(low, -math.inf) if bool(low.any()) else mask


def unwatched() -> Any:
    """A context in which what we compute ourselves is not taken for the model's own."""
    return torch._C.DisableTorchFunction()  # noqa: SLF001


def read_beside(q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Reading:
    """The Reading of a call that a kernel of the model's own computes."""
    with torch.no_grad(), unwatched():
        return read(q.detach(), k.detach(), attn_mask=None if mask is None else hide_minima(mask.detach()), **options)


def weight_on(padding: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """(batch, heads, queries): the weight on the keys where `padding`, (batch, keys), is True."""
    indicator = padding[:, None, :, None].expand(-1, k.shape[1], -1, 1).to(q.dtype)
    with torch.no_grad(), unwatched():
        shares: Tensor = attend(q.detach(), k.detach(), indicator, attn_mask=mask, stats="none", **options).output
        return shares[..., 0].float()


def await_gradients(
    record: Record,
    listener: Listener,
    query: Tensor,
    others: Sequence[Tensor],
    output: Tensor,
    shaped: Callable[[Tensor], Tensor],
    call: Any,
    options: dict[str, Any],
) -> None:
    """Wait for what the call hands back to q, which gives the pressure, and for the gradient of its output.

    That gives the gradient flow, and the pressure where the other is not to be had: as it is without dropout. `others`
    are the operands beside q; `shaped` brings what has the model's shape into that of `call`, whose q, k, v and mask
    have four axes.
    """

    def of_q(grad: Tensor) -> None:
        record.pressure = pressure_of(call.q, shaped(grad.detach()))

    def of_output(grad: Tensor) -> None:
        reading = replay(call.q, call.k, call.v, shaped(grad.detach()), call.mask, options)
        record.pressure, record.gradient_flow = reading.pressure, reading.gradient_flow

    when_differentiated(record, output, listener, of_output)
    when_handed_back(record, query, others, output, listener, of_q)


def pressure_of(q: Tensor, grad: Tensor) -> Tensor:
    """⟨q, ∂L/∂q⟩ is the gradient to the log of the scale: q and the scale enter only as their product."""
    return (q.detach().float() * grad.detach().float()).sum(-1)


def replay(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Reading:
    """The Reading, gradients included, of the same call computed by ourselves with this gradient arriving."""
    with torch.enable_grad(), unwatched():
        mine = [x.detach().requires_grad_() for x in (q, k, v)]
        hidden = None if mask is None else hide_minima(mask.detach())
        output, reading = attend(*mine, attn_mask=hidden, stats=("gradient_flow", "pressure"), **options)
        torch.autograd.grad(output, mine[0], grad.detach().to(output.dtype))
    return reading


def when_differentiated(
    record: Record,
    tensor: Tensor,
    listener: Listener,
    hook: Callable[[Tensor], None],
    handed: tuple[Node, int] | None = None,
) -> None:
    """Call the hook with the gradient of a tensor, or with what is `handed` back to it at a place of a node.

    Its failure is noted, never raised into the backward pass.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return

    def guarded(grad: Tensor) -> None:
        try:
            hook(grad)
        except Exception as error:
            listener.note(record.site.path, error)
        # What the hook holds on to, of which the tensor is a part, is free with it.
        handle.remove()
        listener.arrived()

    if handed is None:
        handle = tensor.register_hook(guarded)
    else:
        node, place = handed
        handle = node.register_hook(lambda grads, _: guarded(grads[place]))
    listener.awaits(tensor, handle)


def when_handed_back(
    record: Record,
    query: Tensor,
    others: Sequence[Tensor],
    output: Tensor,
    listener: Listener,
    hook: Callable[[Tensor], None],
) -> None:
    """Call the hook with the gradient that flows back to q through one call, where that can be told apart."""
    if torch.is_grad_enabled() and query.requires_grad:
        handed = handed_back(query, others, output)
        if handed is not None:
            when_differentiated(record, query, listener, hook, handed)


def handed_back(query: Tensor, others: Sequence[Tensor], output: Tensor) -> tuple[Node, int] | None:
    """The node of a call that hands q its gradient, and where it is among those that the node hands on.

    The gradient of the tensor is no such thing: it is a sum over all that a model does with it.
    """
    if query.is_leaf and torch.is_autocast_enabled(query.device.type):
        return None  # autocast casts a parameter once, for all the calls it is in
    edge, *ends = (get_gradient_edge(x) for x in (query, *others) if x.requires_grad)
    outside = {edge.node, *(end.node for end in ends)}
    found: list[tuple[Node, int]] = []
    inside: set[Node] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in outside or node in inside:
            continue
        inside.add(node)
        for place, (behind, number) in enumerate(node.next_functions):
            waiting.append(behind)
            if (behind, number) == edge[:2]:
                found.append((node, place))
    # A kernel has q first, should k or v be the same tensor; where a call is made of parts, there is no telling.
    return found[0] if len({node for node, _ in found}) == 1 else None


@contextmanager
def _plainly(x: Tensor) -> Iterator[None]:
    """Without a graph, and without autocast, which would round what we sum."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        yield


@dataclass(frozen=True, eq=False)
class Written:
    """Scores that a model wrote out: (batch, heads, queries, keys), and how q·kᵀ became them."""

    scores: Tensor
    q: Tensor
    k: Tensor
    product: Tensor | None
    factor: float | Tensor
    softcap: float | None
    sinks: Tensor | None = None  # (batch, heads, queries)

    def scaled(self) -> Tensor:
        """The scaled q·k before softcap and bias, in the shape of the scores."""
        product = self.product
        if product is None:
            product = torch.matmul(self.q.detach().float(), self.k.detach().float().mT)
        product = product.detach().reshape(self.scores.shape).float()
        factor = self.factor if not isinstance(self.factor, Tensor) else self.factor.float()
        return product * factor

    def capped(self, scaled: Tensor) -> Tensor:
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def visible(self, scores: Tensor, scaled: Tensor) -> Tensor:
        lowered = scores - self.capped(scaled)
        # Filled in, a minimum takes the place of a score, which may have been low itself.
        filled = (scores <= HIDING) & (lowered <= HIDING / 2)
        # A score that is not finite for a reason other than a mask is visible, and says so.
        return ~((scores == -math.inf) | (lowered <= HIDING) | filled) | torch.isnan(scores)

    def read(self) -> Reading:
        batch, heads, queries, keys = self.scores.shape
        fields: dict[str, Any] = {}
        with _plainly(self.scores):
            scaled = self.scaled()
            index = torch.arange(keys, device=self.scores.device)
            step = max(1, ROWS_AT_ONCE // max(heads * keys, 1))
            parts: list[dict[str, Tensor]] = []
            for b in range(batch):
                for start in range(0, queries, step):
                    rows = slice(start, start + step)
                    scores, qk = self.scores[b, :, rows].detach().float(), scaled[b, :, rows]
                    state = observe(torch, scores, qk, self.visible(scores, qk), index, PARTS, None)
                    sinks = None if self.sinks is None else self.sinks[b, :, rows]
                    parts.append(finish(torch, state, sinks)[1])
            per_entry = -(-queries // step)
            for name in parts[0]:
                columns = [part[name] for part in parts]
                entries = [torch.cat(columns[i : i + per_entry], -1) for i in range(0, len(columns), per_entry)]
                fields[name] = torch.stack(entries)
        return Reading(backend="beside", rows=(batch, heads, queries), **fields)

    def gradients(self, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """(pressure, gradient_flow) per row, from the gradient that arrives at the weights."""
        keys = self.scores.shape[-1]
        with _plainly(self.scores):
            p, dp = (x.detach()[..., :keys].float().reshape(self.scores.shape) for x in (weights, grad))
            scaled = self.scaled()
            visible = self.visible(self.scores.float(), scaled)
            slope = scaled if self.softcap is None else scaled * (1 - torch.tanh(scaled / self.softcap) ** 2)
            moved = p * (dp - (p * dp).sum(-1, keepdim=True))
            pressure = torch.where(visible, moved * slope, 0).sum(-1)
            if self.sinks is not None:
                # What a sink takes is no share of the keys'.
                p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
            passed = (p * (dp - (p * dp).sum(-1, keepdim=True)) ** 2).sum(-1)
            count = visible.sum(-1, keepdim=True).clamp(min=1)
            mean = torch.where(visible, dp, 0).sum(-1, keepdim=True) / count
            spread = (torch.where(visible, dp - mean, 0) ** 2).sum(-1) / count[..., 0]
            return pressure, torch.where(spread > 0, passed / spread, math.nan)
