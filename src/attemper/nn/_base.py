"""What the modules share: projections with torch's names, heads, masks; each brings its own scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._attend import Attended, Stats
from .._errors import OptionError, explain
from .._problem import flag
from .._reading import choose
from ._inputs import count, merged, number, refuse_foreign, refuse_unlike


class Attention(nn.Module):
    """Project, attend in heads, project back. A subclass says how heads attend, in `_mix`.

    Parameters have the names, shapes and initial values of torch.nn.MultiheadAttention, drawn in its order.
    """

    # torch.nn.TransformerEncoderLayer asks for this before its fused inference path, which would take the weights and
    # go past our scale and our Reading; False keeps it on the path that calls us.
    _qkv_same_embed_dim = False
    _where_weights_are = "attemper.trace(*module.project(query, key, value), scale=module.scale_value()) builds them."

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None,
        score_dim: int | None,
        kdim: int | None,
        vdim: int | None,
        dropout: float,
        bias: bool,
        batch_first: bool,
        stats: Stats,
        device: Any,
        dtype: Any,
    ) -> None:
        """`score_dim` is the width of a head's queries and keys, `head_dim` that of its values."""
        super().__init__()
        self.embed_dim, self.num_heads = count("embed_dim", embed_dim), count("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            headline = f"embed_dim {embed_dim} cannot be split over {num_heads} heads."
            fix = f"Choose num_heads that divides {embed_dim}, or pass head_dim."
            raise OptionError(explain(headline, fix))
        self.head_dim = embed_dim // num_heads if head_dim is None else count("head_dim", head_dim)
        self.kdim = embed_dim if kdim is None else count("kdim", kdim)
        self.vdim = embed_dim if vdim is None else count("vdim", vdim)
        self.dropout = number(
            "dropout", dropout, "It is the share of weights to drop and lies in [0, 1).", lambda p: 0 <= p < 1
        )
        self.batch_first = flag("batch_first", batch_first)
        choose(stats)
        self.stats = stats
        self._score_dim = self.head_dim if score_dim is None else score_dim
        values = num_heads * self.head_dim
        self._widths = (num_heads * self._score_dim, num_heads * self._score_dim, values)

        like = {"device": device, "dtype": dtype}
        sources = (embed_dim, self.kdim, self.vdim)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        # As in torch: one matrix where all three come from the same width, else three.
        self._packed = sources == (embed_dim,) * 3
        packed = nn.Parameter(torch.empty(sum(self._widths), embed_dim, **like)) if self._packed else None
        self.register_parameter("in_proj_weight", packed)
        for name, width, source in zip(names, self._widths, sources, strict=True):
            own = None if self._packed else nn.Parameter(torch.empty(width, source, **like))
            self.register_parameter(name, own)
        added = nn.Parameter(torch.zeros(sum(self._widths), **like)) if flag("bias", bias) else None
        self.register_parameter("in_proj_bias", added)
        self.out_proj = nn.Linear(values, embed_dim, bias=bias, **like)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        for name in ("in_proj_weight", *names):
            if getattr(self, name) is not None:
                nn.init.xavier_uniform_(getattr(self, name))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002  (torch's callers pass it; it is about weights)
        is_causal: bool = False,
    ) -> Attended:
        """Attend from `query` to `key` and `value`.

        Args:
            query: (queries, batch, embed_dim), with `batch_first` (batch, queries, embed_dim), or (queries, embed_dim).
            key: likewise with keys and kdim; None for self-attention.
            value: likewise with keys and vdim; None for `key`.
            key_padding_mask: (batch, keys), or (keys,) without a batch: bool, True hides a key; or floating, added.
            need_weights: refused when True.
            attn_mask: (queries, keys) or (batch · heads, queries, keys): bool, True hides; or floating, added.
            average_attn_weights: of no effect, since no weights are returned.
            is_causal: query i sees keys j ≤ i, beside what the masks say; no mask is needed for it.

        Returns:
            (output, reading): the output has the shape of `query`; the Reading is per (batch, head, query). Where a
            query sees no key, the heads give 0 and the output is the bias of out_proj.
        """
        if flag("need_weights", need_weights):
            headline = "need_weights=True, but the matrix of weights is never built."
            fix = f"The Reading says what was in it, and {self._where_weights_are}"
            raise OptionError(explain(headline, fix))
        key, value = self._filled(query, key, value)
        sizes = refuse_unlike(query, key, value, (self.embed_dim, self.kdim, self.vdim), batch_first=self.batch_first)
        mask = merged(attn_mask, key_padding_mask, sizes, self.num_heads)
        q, k, v = self.project(query, key, value)
        heads, reading = self._mix(q, k, v, mask, flag("is_causal", is_causal))
        # Back from (…, heads, queries, head_dim) to the axes of the query.
        rows = heads.permute(2, 0, 1, 3) if heads.dim() == 4 and not self.batch_first else heads.transpose(-2, -3)
        return Attended(self.out_proj(rows.flatten(-2)), reading)

    def project(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The q, k and v of the heads, (batch, heads, length, head_dim), without the batch where `query` has none.

        They are what `attemper.trace` and `attemper.read` take to show the same attention.
        """
        key, value = self._filled(query, key, value)
        operands = {"query": query, "key": key, "value": value}
        if self.in_proj_weight is not None:
            refuse_foreign(operands, self.in_proj_weight)
        elif self.q_proj_weight is not None:
            refuse_foreign(operands, self.q_proj_weight)
        if self.in_proj_weight is not None and query is key and key is value:
            together = functional.linear(query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = together.split(self._widths, dim=-1)
        else:
            weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.split(self._widths)
            biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
            q, k, v = map(functional.linear, operands.values(), weights, biases)
        return (
            self._prepare(self._in_heads(q, self._score_dim)),
            self._prepare(self._in_heads(k, self._score_dim)),
            self._in_heads(v, self.head_dim),
        )

    def extra_repr(self) -> str:
        """The sizes, as torch's modules show theirs."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def _filled(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        if key is None and value is not None:
            fix = "Pass key as well, or neither for self-attention."
            raise OptionError(explain("value was given without key.", fix))
        key = query if key is None else key
        return key, key if value is None else value

    def _in_heads(self, x: Tensor, width: int) -> Tensor:
        x = x.unflatten(-1, (self.num_heads, width))
        return x.permute(1, 2, 0, 3) if x.dim() == 4 and not self.batch_first else x.transpose(-2, -3)

    def _prepare(self, x: Tensor) -> Tensor:
        """What is done to queries and keys before their scores."""
        return x

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Attended:
        """The output of the heads, (…, heads, queries, head_dim), and its Reading."""
        raise NotImplementedError

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype.itemsize == 2 else x


def unit(x: Tensor) -> Tensor:
    """Rows of length 1; one shorter than 1e-6 has no direction and stays as it is, so that its gradient is a number."""
    # 16 bits do not hold the squares.
    wide = widened(x)
    lengths: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / torch.where(lengths > 1e-6, lengths, 1)).to(x.dtype)
