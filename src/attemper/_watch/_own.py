"""A model that calls this library's own operator: read again beside it, with the same masks and bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._backends._operator import FIELDS, OPERANDS, RETURNS, Call, tiles
from .._reading import Reading
from ._record import Record, unwatched, when_differentiated
from ._shapes import kind_of

if TYPE_CHECKING:
    from ._session import Session

NAME = "tiles"
"""The operator, as torch names it."""


def reheated(arguments: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    """The same call with its scale multiplied."""
    call = Call(*arguments[:OPERANDS])
    number = None if call.number is None else call.number * factor
    return (*call._replace(scale=call.scale * factor, number=number), *arguments[OPERANDS:])


def record_own(session: Session, arguments: tuple[Any, ...], result: tuple[Tensor, ...]) -> Record:
    """The Record of one call, which waits for the gradient of its output."""
    *operands, _stats, road = arguments
    call = Call(*operands)
    detached: list[Any] = [x.detach() if isinstance(x, Tensor) else x for x in call]
    same = Call(*detached)
    # What was dropped is no part of what attention chose; of what came back it is.
    plain = same._replace(seed=None, dropout_p=0.0)
    scales = plain.scale.flatten().tolist()
    scale: Any = scales[0] if len(set(scales)) == 1 else tuple(scales)
    site = session.site(
        call.q,
        call.k,
        kind="attemper",
        scale=scale,
        scale_argument=scale,
        product_scale=1.0,
        traced=(call.q, call.k),
        softcap=call.softcap,
        mask=kind_of(call.mask),
        # Causality, windows and lengths have become bounds by now; which of them it was is not known.
        causal=call.bounded,
    )
    reading = _read(plain._replace(v=None), FIELDS, road)
    record = Record(site, reading, of_model=session.sequences)
    padding = session.padding_of(site, call.q.shape[0], call.q.shape[2], call.k.shape[2])
    if padding is not None:
        shares = padding[:, None, :, None].expand(-1, call.k.shape[1], -1, 1).to(call.q.dtype)
        with torch.no_grad(), unwatched():
            record.leave_out(padding, tiles(*plain._replace(v=shares), "", road)[0][..., 0].float())
    if call.v is None:
        return record
    record.look_at_output(result[0])

    def of_output(grad: Tensor) -> None:
        # With the seed of the call, and so with what it dropped.
        again = _read(same._replace(q=same.q.requires_grad_()), ("gradient_flow", "pressure"), road, grad)
        record.pressure, record.gradient_flow = again.pressure, again.gradient_flow

    when_differentiated(record, result[0], session, of_output)
    return record


def _read(call: Call, names: tuple[str, ...], road: str, grad: Tensor | None = None) -> Reading:
    """The Reading of a call; with the gradient that arrived at its output, what a backward pass adds."""
    needed = {*names, "logsumexp", "max_logit", "largest_weight"}
    with torch.set_grad_enabled(grad is not None), unwatched():
        found = dict(zip(RETURNS, tiles(*call, ",".join(sorted(needed)), road), strict=True))
        if grad is not None:
            torch.autograd.grad(found["output"], call.q, grad.detach().to(found["output"].dtype))
    rows = tuple(call.q.shape[:3])
    fields = {name: found[name].detach() for name in FIELDS if tuple(found[name].shape) == rows}
    if grad is None:
        return Reading(backend="beside", rows=rows, **fields)
    return Reading(backend="beside", rows=rows, gradients=found["gradients"].detach(), awaited=names, **fields)
