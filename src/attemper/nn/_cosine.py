"""Attention by direction alone, at a temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._attend import Attended, Stats, attend
from .._errors import unknown
from .._problem import flag
from ._base import Attention, unit, widened
from ._inputs import number

START = 0.1
LOWEST = 0.01


class CosineAttention(Attention):
    """softmax(cos(q, k)/τ)·v: scores that no growth of q and k can move out of [−1/τ, 1/τ].

    A learned τ is exp(`log_temperature`), starts at 0.1 and counts as 0.01 where it is lower, as in Swin Transformer V2
    (arXiv:2111.09883). It starts below 1 because cosines differ by at most 2: at τ = 1 no weight is more than e² = 7.4
    times another, and no head could choose. It ends at 0.01 because a difference of 0.1 between two cosines is then
    already a factor of e¹⁰, and what is sharper passes no gradient on. A parameter below ln 0.01 gets no gradient.

    Args:
        embed_dim: the width of query, key, value and output.
        num_heads: heads, between which embed_dim is divided.
        temperature: "learned", or a number.
        per_head: whether each head learns a temperature of its own.
        head_dim: the width of a head, where it is not embed_dim // num_heads.
        bias: whether the projections add one.
        dropout: the share of weights dropped in training.
        batch_first: whether operands are (batch, length, width) rather than (length, batch, width).
        device: of the parameters.
        dtype: of the parameters.
        stats: the fields of the Reading, as in `attend`.

    Laws: |score| ≤ 1/τ; a head's queries and keys may be multiplied by any positive numbers. A vector of zeros has
    cosine 0 with every other.

    >>> import torch
    >>> layer = CosineAttention(32, 4, temperature=0.25)
    >>> _, reading = layer(100 * torch.randn(2, 10, 32))
    >>> bool(reading.max_logit.max() <= 4.0001)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        temperature: str | float = "learned",
        per_head: bool = True,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: Any = None,
        dtype: Any = None,
        stats: Stats = "all",
    ) -> None:
        if isinstance(temperature, str) and temperature != "learned":
            raise unknown("temperature", temperature, ["learned"])
        super().__init__(
            embed_dim,
            num_heads,
            head_dim=head_dim,
            score_dim=None,
            kdim=None,
            vdim=None,
            dropout=dropout,
            bias=bias,
            batch_first=batch_first,
            stats=stats,
            device=device,
            dtype=dtype,
        )
        heads = num_heads if flag("per_head", per_head) else 1
        if isinstance(temperature, str):
            self.temperature: float | None = None
            start = torch.full((heads,), math.log(START), device=device, dtype=dtype)
            self.log_temperature = nn.Parameter(start)
        else:
            fix = "Pass a positive number (1/τ multiplies the cosine), or 'learned'."
            self.temperature = number("temperature", temperature, fix, lambda t: t > 0)

    def scale_value(self) -> float | Tensor:
        """1/τ: a number, or one per head.

        >>> CosineAttention(8, 2, temperature=0.25).scale_value()
        4.0
        """
        if self.temperature is not None:
            return 1 / self.temperature
        scale = torch.exp(-widened(self.log_temperature).clamp(min=math.log(LOWEST)))
        return scale.expand(self.num_heads)

    def extra_repr(self) -> str:
        """The sizes and the temperature."""
        shown = "'learned'" if self.temperature is None else self.temperature
        return f"{super().extra_repr()}, temperature={shown}"

    def _prepare(self, x: Tensor) -> Tensor:
        return unit(x)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Attended:
        scale: Any = self.scale_value()
        return attend(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, dropout_p=self._dropout_p, stats=self.stats
        )
