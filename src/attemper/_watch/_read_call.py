"""A fused call in a compiled graph, read beside it; what the backward pass adds leaves as the gradient of a probe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._attend import gradient_flow_beside, read
from .._reading import AFTER_BACKWARD, MEASURED, Reading
from ._record import HIDING, unwatched
from ._shapes import Four, four_axes
from ._sums import sum_flow, sum_pressure, sum_rows

MANY_ENTRIES = 16
FLOW_ENTRIES = 4
"""Of a batch that has many, so many at even distances give the gradient flow, or one more."""
STATS = tuple(name for name in MEASURED if name not in (*AFTER_BACKWARD, "output_norm"))


class ReadCall(nn.Module):
    """A fused call, left as it is, and what its rows sum up to."""

    def __init__(self, heads: int | None, entries: int) -> None:
        super().__init__()
        self.heads = heads
        self.entries = entries

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        pressure_probe: Tensor | None = None,
        flow_probe: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the table of `sum_rows`; the gradients of the probes are those of the backward pass."""
        q = query
        if pressure_probe is not None:
            q = _Pressure.apply(query, pressure_probe, self)  # type: ignore[no-untyped-call]
        output = functional.scaled_dot_product_attention(q, key, value, attn_mask, dropout_p, is_causal, **options)
        with torch.no_grad(), unwatched():
            # In the type in which it was computed, which autocast may have chosen.
            q, k, v = (x.detach().to(output.dtype) for x in (query, key, value))
            call = Four(q, k, v, output.detach(), _hidden(attn_mask), self.heads)
            enable_gqa = call.q.shape[1] != call.k.shape[1]
            options = {"is_causal": is_causal, "scale": options.get("scale"), "enable_gqa": enable_gqa}
            reading = read(call.q, call.k, attn_mask=call.mask, stats=STATS, **options)
            # In the order of the fields, not of the output: else a compiler sums up the norms in kernels of their own.
            norm = torch.linalg.vector_norm(call.output.flatten(0, 2).float(), dim=-1).view(call.output.shape[:-1])
            odd: Any = reading.nonfinite
            table = sum_rows(replace(reading, output_norm=norm, nonfinite=odd | ~torch.isfinite(norm)))
        if flow_probe is not None:
            # Entries that make up a sequence are not alike.
            batch = call.q.shape[0]
            step = batch // FLOW_ENTRIES if batch >= MANY_ENTRIES and self.entries == 1 else 1
            output = _Flow.apply(output, flow_probe, call, reading, options, step, bool(dropout_p))  # type: ignore[no-untyped-call]
        return output, table


def _hidden(mask: Tensor | None) -> Tensor | None:
    """As `hide_minima`, but without asking whether there are any, at which a graph would break."""
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.detach().masked_fill(mask.detach() <= HIDING, -torch.inf)


class _Pressure(torch.autograd.Function):
    """q as it is; of its gradient the pressure becomes the gradient of the probe."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, probe: Tensor, call: ReadCall) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(query)
        ctx.call = call
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (query,) = ctx.saved_tensors
        shape = four_axes(tuple(query.shape), ctx.call.heads)
        return grad, sum_pressure(query.reshape(shape), grad.reshape(shape), ctx.call.entries), None


class _Flow(torch.autograd.Function):
    """The output as it is; from what arrives at it the gradient flow becomes the gradient of the probe.

    It is a mean over rows and takes as long as the call itself: some entries of a large batch are enough.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        probe: Tensor,  # noqa: ARG004
        call: Four,
        reading: Reading,
        options: dict[str, Any],
        step: int,
        dropped: bool,
    ) -> Tensor:
        own = None if dropped else call.output
        visible: Any = reading.visible_keys
        rows: Any = (reading.max_logit, reading.largest_weight, reading.logsumexp)
        # Copied by one kernel: as they are, each would have to be copied by itself, for they are needed in one piece.
        together = torch.stack([x[::step] for x in rows])
        mask = call.mask
        if mask is not None and mask.ndim >= 4 and mask.shape[0] > 1:
            mask = mask[::step]
        some = (x if x is None else x[::step] for x in (call.q, call.k, call.v, own))
        ctx.save_for_backward(*some, mask, visible[::step], together)
        ctx.rows, ctx.step, ctx.options = call.q.shape[:3], step, options
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, output, mask, visible, together = ctx.saved_tensors
        max_logit, largest_weight, logsumexp = together
        reading = Reading(backend="beside", max_logit=max_logit, largest_weight=largest_weight, logsumexp=logsumexp)
        arriving = grad.reshape(*ctx.rows, grad.shape[-1])[:: ctx.step]
        flow = gradient_flow_beside(q, k, v, output, arriving, reading, attn_mask=mask, **ctx.options)
        return grad, sum_flow(flow, visible), *[None] * 5
