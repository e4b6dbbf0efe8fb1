"""Bahdanau's attention in heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import _pytree  # noqa: F401  (registers Reading)
from .._attend import Attended, Stats
from .._reading import AFTER_BACKWARD, Reading, choose
from ._additive_tiles import Call, additive
from ._base import Attention, widened
from ._inputs import count


class AdditiveAttention(Attention):
    """softmax(wᵀtanh(q + k))·v per head (Bahdanau, arXiv:1409.0473), without a queries × keys matrix.

    q and k are projections of `hidden_dim` components per head; w is `score_weight`, (num_heads, hidden_dim), drawn as
    torch.nn.Linear(hidden_dim, 1) draws its own. Memory is linear in the length, forward and backward; time is that of
    queries × keys × hidden_dim hyperbolic tangents, once forward and once more backward.

    Args:
        embed_dim: the width of query, key, value and output.
        num_heads: heads, between which embed_dim is divided.
        hidden_dim: components of a head's q and k, where they are not head_dim.
        head_dim: components of a head's v, where they are not embed_dim // num_heads.
        bias: whether the projections add one.
        dropout: the share of weights dropped in training.
        batch_first: whether operands are (batch, length, width) rather than (length, batch, width).
        device: of the parameters.
        dtype: of the parameters.
        stats: the fields of the Reading, as in `attend`. `max_qk` is the largest score before a bias, and `pressure`
            the gradient to the log of a factor of w.

    Laws: |score| < ‖w‖₁, whatever the inputs; there is no scale to choose, since w has one.

    >>> import torch
    >>> layer = AdditiveAttention(32, 4)
    >>> output, reading = layer(100 * torch.randn(2, 10, 32))
    >>> bool((reading.max_logit <= layer.score_bound()[:, None]).all())
    True
    """

    _where_weights_are = (
        "reading.logsumexp with the scores wᵀtanh(q + k) of module.project(query, key, value) gives them."
    )

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        hidden_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: Any = None,
        dtype: Any = None,
        stats: Stats = "all",
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            head_dim=head_dim,
            score_dim=None if hidden_dim is None else count("hidden_dim", hidden_dim),
            kdim=None,
            vdim=None,
            dropout=dropout,
            bias=bias,
            batch_first=batch_first,
            stats=stats,
            device=device,
            dtype=dtype,
        )
        self.hidden_dim = self._score_dim
        self.score_weight = nn.Parameter(torch.empty(num_heads, self.hidden_dim, device=device, dtype=dtype))
        nn.init.uniform_(self.score_weight, -(self.hidden_dim**-0.5), self.hidden_dim**-0.5)

    def score_bound(self) -> Tensor:
        """‖w‖₁ per head, (num_heads,): no score, before a floating mask, is larger in magnitude."""
        return widened(self.score_weight.detach()).abs().sum(-1)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{super().extra_repr()}, hidden_dim={self.hidden_dim}"

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Attended:
        batched = q.dim() == 4
        q4, k4, v4 = (widened(x if batched else x[None]) for x in (q, k, v))
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        # Drawn here as a tensor: a number would be baked into a compiled graph.
        seed = torch.randint(-(2**63), 2**63 - 1, ()) if self._dropout_p else None
        wanted = choose(self.stats)
        weight = self.score_weight.to(q4.dtype)
        found = additive(Call(q4, k4, v4, weight, mask, seed, is_causal, self._dropout_p), wanted)
        output, gradients = found.pop("output"), found.pop("gradients")
        fields = {name: (x if batched else x[0]).detach() for name, x in found.items() if name in wanted}
        awaited = tuple(name for name in AFTER_BACKWARD if name in wanted)
        reading = Reading(
            backend="torch",
            rows=tuple(q.shape[:-1]),
            awaited=awaited,
            gradients=gradients.detach() if awaited else None,
            **fields,
        )
        return Attended((output if batched else output[0]).to(v.dtype), reading)
