"""What the operators are called with, and what a road makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..._bounds import Band, bounds_of_band

FIELDS = (
    "max_logit",
    "logsumexp",
    "expected_score",
    "entropy",
    "largest_weight",
    "collision",
    "score_mean",
    "score_std",
    "visible_keys",
    "max_qk",
    "first_key_weight",
    "sink_mass",
    "output_norm",
    "nonfinite",
)
"""The fields of a Reading in the order in which the operator returns them, after the output."""

COUNTS = ("visible_keys", "nonfinite")


class Call(NamedTuple):
    """The operands of one call, as the operators take them."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    mask: Tensor | None
    first: Tensor | None
    stop: Tensor | None
    scale: Tensor
    sinks: Tensor | None
    seed: Tensor | None
    softcap: float | None
    dropout_p: float
    period: int
    """Batch entries after which dropout repeats: those of one entry of vmap, which all drop alike."""
    band: Sequence[int] | None = None
    """(low, high), in place of first and stop: query i sees i + low ≤ key < i + high, as far as there are keys."""
    number: float | None = None
    """The scale, where it is one number and known: to read it from its tensor would make the host wait for a GPU.

    Then nobody differentiates to it.
    """

    @property
    def bounded(self) -> bool:
        return self.first is not None or self.band is not None

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def group(self) -> int:
        return self.q.shape[1] // max(self.k.shape[1], 1)


CONSTANTS = ("logsumexp", "max_logit", "largest_weight")
"""The fields from which a backward pass computes the weights again."""


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass; empty where the road does without."""

    output: Tensor
    max_logit: Tensor
    largest_weight: Tensor
    logsumexp: Tensor
    expected_score: Tensor
    collision: Tensor
    gradients: Tensor


class Upstream(NamedTuple):
    """The gradients that come in."""

    output: Tensor | None
    logsumexp: Tensor | None
    entropy: Tensor | None
    expected_score: Tensor | None
    collision: Tensor | None


class Road(Protocol):
    """How a call is computed: a module beside this one, known to the operators by its name alone."""

    def forward(self, call: Call, stats: frozenset[str], *, apart: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The output, made by `empty_output`, and the `available` fields, each (batch, heads, queries).

        With values and "wide_output" among the stats, that one too. `apart`: each in memory of its own, as an operator
        has to return them.
        """

    def backward(
        self, call: Call, saved: Saved, upstream: Upstream, *, bias_too: bool, flow_too: bool
    ) -> tuple[Tensor, ...]:
        """The gradients of (q, k, v, mask, scale, sinks), each like its operand; (0,) for one that is not there.

        That of the mask only with `bias_too`. Where `saved.gradients` is not empty, what is measured goes into it; the
        gradient flow need not without `flow_too`.
        """


def bounds_of(call: Call, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    """First and stop of each row, (batch or 1, queries), on a device; None when every query sees every key."""
    if call.first is not None and call.stop is not None:
        return call.first.to(device), call.stop.to(device)
    if call.band is None:
        return None
    first, stop = bounds_of_band(torch, Band(*call.band), call.q.shape[2], call.k.shape[2], device)
    return first[None], stop[None]


def row_by_row(call: Call) -> Call:
    """The same call with first and stop in place of a band."""
    if call.band is None:
        return call
    first, stop = bounds_of(call, call.q.device) or (None, None)
    return call._replace(first=first, stop=stop, band=None)


def available(call: Call, stats: frozenset[str]) -> frozenset[str]:
    """The fields to return: output_norm needs an output."""
    return frozenset(name for name in FIELDS if name in stats and (name != "output_norm" or call.v is not None))


def empty(call: Call, name: str, shape: Sequence[int] = (0,)) -> Tensor:
    dtype = torch.int64 if name in COUNTS else call.wide
    return torch.empty(tuple(shape), dtype=dtype, device=call.q.device)


def empty_output(call: Call, dtype: torch.dtype) -> Tensor:
    """For the output, with heads and queries in memory as q has them: what follows often undoes a transposition."""
    batch, heads, queries, _ = call.q.shape
    value_dim = 0 if call.v is None else call.v.shape[-1]
    if heads > 1 and call.q.stride(1) < call.q.stride(2):
        return call.q.new_empty((batch, queries, heads, value_dim), dtype=dtype).transpose(1, 2)
    return call.q.new_empty((batch, heads, queries, value_dim), dtype=dtype)


def empty_gradient(x: Tensor) -> Tensor:
    """For the gradient of an operand, laid out alike where its rows lie in one piece and none of them twice."""
    alike = x.stride(-1) == 1 and all(step > 0 for step in x.stride())
    return torch.empty_like(x) if alike else torch.empty_like(x, memory_format=torch.contiguous_format)


def gradient_size(q: Tensor, stats: frozenset[str]) -> int:
    """Of the tensor that waits for the backward pass; empty when nobody asked for what that measures."""
    return 1 + 2 * q.shape[0] * q.shape[1] * q.shape[2] if stats & {"gradient_flow", "pressure"} else 0


def over_shared(rows: Tensor, like: Tensor) -> Tensor:
    """Something per row, summed to (batch or 1, heads or 1)."""
    total = rows.sum(-1)
    for axis in (0, 1):
        if like.shape[axis] == 1:
            total = total.sum(axis, keepdim=True)
    return total


_NOTHING = nullcontext()


def plainly(q: Tensor) -> Any:
    """Without autocast, which would round inside the operator."""
    kind = q.device.type
    if kind in ("cpu", "cuda") and not torch.is_autocast_enabled(kind):
        return _NOTHING
    return torch.autocast(kind, enabled=False)
