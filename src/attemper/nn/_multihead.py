"""Multi-head attention with torch's parameters and a choice of scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._attend import Attended, Stats, attend
from .._errors import OptionError, brief, explain, unknown
from .._problem import flag
from .._scale import scale_for
from ._base import Attention, unit, widened
from ._inputs import number

RULES = ("sqrt_dk", "dk", "sqrt_dmodel", "unscaled", "log_n", "learned")

NORMS = ("rms", "layer", "l2")


class MultiheadAttention(Attention):
    """torch.nn.MultiheadAttention, its parameters and results, with a choice of scale and a Reading.

    Positional arguments, defaults, initial values and state are torch's: either loads what the other saved.

    Args:
        embed_dim: the width of query and output.
        num_heads: heads, between which embed_dim is divided.
        dropout: the share of weights dropped in training.
        bias: whether the projections add one.
        add_bias_kv: refused when True.
        add_zero_attn: refused when True.
        kdim: the width of key, where it is not embed_dim.
        vdim: the width of value, where it is not embed_dim.
        batch_first: whether operands are (batch, length, width) rather than (length, batch, width).
        device: of the parameters.
        dtype: of the parameters.
        scale: a rule of `scale_for` ("log_n" takes the number of keys from each call), a number, one number per head,
            or "learned": a parameter `log_scale` per head, which starts at ln(1/√head_dim).
        head_dim: the width of a head, where it is not embed_dim // num_heads. The state is then no longer torch's.
        qk_norm: what is done to each head's queries and keys, without parameters: "rms" and "layer" make the mean
            square of the components 1, "l2" their sum, "layer" after taking their mean away.
        stats: the fields of the Reading, as in `attend`.

    Laws: with the defaults the output is torch's. scale=s and scale=1 with queries multiplied by s are the same.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(32, 4)
    >>> ours = MultiheadAttention(32, 4)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(10, 2, 32)
    >>> output, reading = ours(x, x, x)
    >>> torch.allclose(output, theirs(x, x, x, need_weights=False)[0], atol=1e-6), reading.entropy.shape
    (True, torch.Size([2, 4, 10]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        scale: str | float | Sequence[float] | Tensor = "sqrt_dk",
        head_dim: int | None = None,
        qk_norm: str | None = None,
        stats: Stats = "all",
    ) -> None:
        for name, given in {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}.items():
            if flag(name, given):
                fix = "For somewhere to put weight that should go nowhere, call attemper.attend with sinks."
                raise OptionError(explain(f"{name}=True, but this module adds no key of its own.", fix))
        if qk_norm is not None and qk_norm not in NORMS:
            raise unknown("qk_norm", qk_norm, NORMS)
        super().__init__(
            embed_dim,
            num_heads,
            head_dim=head_dim,
            score_dim=None,
            kdim=kdim,
            vdim=vdim,
            dropout=dropout,
            bias=bias,
            batch_first=batch_first,
            stats=stats,
            device=device,
            dtype=dtype,
        )
        self.qk_norm = qk_norm
        self.scale = _checked(scale, num_heads)
        if self.scale == "learned":
            start = -math.log(self.head_dim) / 2
            self.log_scale = nn.Parameter(torch.full((num_heads,), start, device=device, dtype=dtype))

    def scale_value(self, keys: int | None = None) -> float | tuple[float, ...] | Tensor:
        """What multiplies q·k: a number, or one per head; `keys` is for scale="log_n".

        >>> MultiheadAttention(64, 4, scale="sqrt_dmodel").scale_value()
        0.125
        """
        if self.scale == "learned":
            return widened(self.log_scale).exp()
        if isinstance(self.scale, str):
            # Over no keys there are no scores, and over one the weight is 1 whatever the scale.
            keys = None if keys is None else max(keys, 1)
            return scale_for(self.scale, self.head_dim, model_dim=self.embed_dim, keys=keys)
        return self.scale

    def extra_repr(self) -> str:
        """The sizes and the scale."""
        norm = "" if self.qk_norm is None else f", qk_norm={self.qk_norm!r}"
        return f"{super().extra_repr()}, scale={self.scale!r}{norm}"

    def _prepare(self, x: Tensor) -> Tensor:
        # In float32 at least: torch's own epsilon for 16 bits would shrink what is merely small.
        if self.qk_norm == "rms":
            return functional.rms_norm(widened(x), x.shape[-1:], eps=1e-6).to(x.dtype)
        if self.qk_norm == "layer":
            return functional.layer_norm(widened(x), x.shape[-1:], eps=1e-6).to(x.dtype)
        return unit(x) if self.qk_norm == "l2" else x

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Attended:
        scale: Any = self.scale_value(k.shape[-2])
        return attend(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, dropout_p=self._dropout_p, stats=self.stats
        )


def _checked(scale: Any, heads: int) -> str | float | tuple[float, ...]:
    """A rule, a number, or a tuple of one per head: numbers of Python, which a module in 16 bits does not round."""
    if isinstance(scale, str):
        if scale not in RULES:
            raise unknown("scale", scale, RULES)
        return scale
    if isinstance(scale, Tensor) and scale.requires_grad:
        fix = "Pass scale='learned', and set log_scale of the module, or scale.detach()."
        raise OptionError(explain("scale is a tensor that requires a gradient, which would not reach it.", fix))
    plain = scale.tolist() if hasattr(scale, "tolist") else scale
    fix = f"Pass a finite number, {heads} of them (one per head), or one of {', '.join(map(repr, RULES))}."
    if isinstance(plain, (list, tuple)):
        if len(plain) != heads:
            raise OptionError(explain(f"scale is {brief(scale)}.", fix))
        return tuple(number("scale", each, fix, lambda _: True) for each in plain)
    return number("scale", plain, fix, lambda _: True)
