"""Tiny transformers written here, in each of the ways in which people write attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .tasks import VOCABULARY


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (batch, heads, length, head_dim)."""
    length, width = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = (torch.cat((f, f), -1).to(x.dtype) for f in (angles.cos(), angles.sin()))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


class Attention(nn.Module):
    """Attention in three of the four ways ("sdpa", "matmul", "einsum"), with what varies between real models.

    Args:
        scale: what multiplies q·k; None for 1/√head_dim.
        premultiplied: the scale is put on q, and 1 is passed on.
        hidden: what stands for a hidden key: "bool" (sdpa only), "inf", or "finfo", the dtype's minimum, added.
        pad_to: q, k and v are padded with zeros to this width, and the scale is taken from it.
        strict: a row does not see its own key, so the first sees none.
        heed: whether the caller's attention_mask is used.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        way: str,
        kv_heads: int | None = None,
        scale: float | None = None,
        causal: bool = True,
        rotary: bool = False,
        qk_norm: bool = False,
        premultiplied: bool = False,
        hidden: str = "inf",
        softcap: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.way, self.heads, self.kv_heads, self.head_dim = way, heads, kv_heads or heads, dim // heads
        self.scale, self.causal, self.rotary, self.premultiplied = scale, causal, rotary, premultiplied
        self.hidden, self.softcap, self.window = hidden, softcap, window
        self.pad_to: int | None = None
        self.strict = False
        self.heed = True
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim)
        self.out_proj = nn.Linear(dim, dim)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()

    def visible(self, queries: int, keys: int, attention_mask: Tensor | None) -> Tensor | None:
        """(batch or 1, 1, queries, keys), True where a key is seen; None where nothing is hidden."""
        allowed = None
        if self.causal:
            allowed = torch.ones(queries, keys, dtype=torch.bool).tril(-1 if self.strict else 0)
            if self.window:
                allowed = allowed.triu(-self.window + 1)
            allowed = allowed[None, None]
        if attention_mask is not None and self.heed:
            given = attention_mask.bool()[:, None, None, :]
            allowed = given if allowed is None else allowed & given
        return allowed

    def forward(self, x: Tensor, context: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        batch, queries, dim = x.shape
        q = self.q_proj(x).view(batch, queries, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(context).view(batch, -1, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(context).view(batch, -1, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        scale = self.scale
        if self.pad_to:
            more = self.pad_to - self.head_dim
            q, k, v = (F.pad(t, (0, more)) for t in (q, k, v))
            scale = self.pad_to**-0.5
        if self.premultiplied:
            q = q * (self.head_dim**-0.5 if scale is None else scale)
            scale = 1.0
        out = getattr(self, self.way)(q, k, v, scale, attention_mask)
        out = out[..., : self.head_dim]
        return self.out_proj(out.transpose(1, 2).reshape(batch, queries, dim))

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, attention_mask: Tensor | None) -> Tensor:
        grouped = self.kv_heads != self.heads
        plain = self.causal and not self.window and not self.strict and (attention_mask is None or not self.heed)
        if plain and self.hidden != "finfo":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        mask = self.visible(q.shape[-2], k.shape[-2], attention_mask)
        if mask is not None and self.hidden == "finfo":
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)

    def weights(self, scores: Tensor, keys: int, attention_mask: Tensor | None) -> Tensor:
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        allowed = self.visible(scores.shape[-2], keys, attention_mask)
        if allowed is not None:
            if self.hidden == "finfo":
                least = torch.finfo(scores.dtype).min
                scores = scores + torch.zeros(allowed.shape, dtype=scores.dtype).masked_fill(~allowed, least)
            else:
                scores = scores.masked_fill(~allowed, float("-inf"))
        return scores.softmax(-1)

    def matmul(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, attention_mask: Tensor | None) -> Tensor:
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
        return self.weights(scores, k.shape[-2], attention_mask) @ v

    def einsum(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, attention_mask: Tensor | None) -> Tensor:
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = F.softmax(self.weights_input(scores, k.shape[-2], attention_mask), dim=-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    def weights_input(self, scores: Tensor, keys: int, attention_mask: Tensor | None) -> Tensor:
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        allowed = self.visible(scores.shape[-2], keys, attention_mask)
        if allowed is None:
            return scores
        return torch.where(allowed, scores, torch.finfo(scores.dtype).min)


class Multihead(nn.MultiheadAttention):
    """torch's own module, called as the blocks below call attention."""

    def __init__(self, dim: int, heads: int, *, causal: bool = True, need_weights: bool = False, **_: Any) -> None:
        super().__init__(dim, heads, batch_first=True)
        self.causal, self.need_weights = causal, need_weights
        self.strict = False
        self.heed = True


class TimmAttention(nn.Module):
    """As in timm's vision_transformer: one projection for q, k and v, heads split by reshape, permute and unbind."""

    def __init__(self, dim: int, heads: int, *, fused: bool = True, qk_norm: bool = False, **_: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = fused
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            # timm passes no scale here: the fused kernel's default stands, unless somebody changed self.scale.
            default = self.scale == self.head_dim**-0.5
            x = F.scaled_dot_product_attention(q, k, v, scale=None if default else self.scale)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            x = self.attn_drop(attn) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, length, dim))


class DiffusersAttention(nn.Module):
    """As in diffusers: a module that holds the projections, and a processor, no module, that does the work."""

    def __init__(self, dim: int, heads: int, *, fused: bool = True, **_: Any) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.0)])
        self.processor = processor_fused if fused else processor_plain

    def forward(self, x: Tensor, context: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.processor(self, x, x if context is None else context)


def processor_fused(attention: DiffusersAttention, x: Tensor, context: Tensor) -> Tensor:
    """AttnProcessor2_0."""
    batch, _, dim = x.shape
    width = dim // attention.heads
    q, k, v = (
        projection(source).view(batch, -1, attention.heads, width).transpose(1, 2)
        for projection, source in ((attention.to_q, x), (attention.to_k, context), (attention.to_v, context))
    )
    scale = None if attention.scale == width**-0.5 else attention.scale
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=scale)
    out = out.transpose(1, 2).reshape(batch, -1, dim)
    return attention.to_out[1](attention.to_out[0](out))


def processor_plain(attention: DiffusersAttention, x: Tensor, context: Tensor) -> Tensor:
    """AttnProcessor: heads folded into the batch, the scale given to baddbmm."""
    batch, _, dim = x.shape
    width = dim // attention.heads

    def split(t: Tensor) -> Tensor:
        t = t.reshape(batch, -1, attention.heads, width).permute(0, 2, 1, 3)
        return t.reshape(batch * attention.heads, -1, width)

    q, k, v = split(attention.to_q(x)), split(attention.to_k(context)), split(attention.to_v(context))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=attention.scale)
    out = torch.bmm(scores.softmax(dim=-1), v)
    out = out.reshape(batch, attention.heads, -1, width).permute(0, 2, 1, 3).reshape(batch, -1, dim)
    return attention.to_out[1](attention.to_out[0](out))


def attend(attention: nn.Module, x: Tensor, context: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """Call any of the modules above, torch's own included, in one way."""
    if not isinstance(attention, Multihead):
        return attention(x, context, attention_mask)
    source = x if context is None else context
    mask = None
    if attention.causal:
        # torch's convention here is the other way about: True hides.
        mask = ~torch.ones(x.shape[1], source.shape[1], dtype=torch.bool).tril(-1 if attention.strict else 0)
    padding = None if attention_mask is None or not attention.heed else ~attention_mask.bool()
    return attention(x, source, source, attn_mask=mask, key_padding_mask=padding, need_weights=attention.need_weights)[
        0
    ]


class Block(nn.Module):
    def __init__(self, dim: int, make: Callable[[], nn.Module], make_cross: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = make()
        self.cross_norm = nn.LayerNorm(dim) if make_cross else None
        self.cross = make_cross() if make_cross else None
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        x = x + attend(self.attn, self.norm(x), None, attention_mask)
        if self.cross is not None:
            x = x + attend(self.cross, self.cross_norm(x), context, context_mask)
        return x + self.mlp(self.mlp_norm(x))


def maker(dim: int, heads: int, way: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    classes = {"mha": Multihead, "timm": TimmAttention, "diffusers": DiffusersAttention}
    if way in classes:
        return partial(classes[way], dim, heads, **options)
    return partial(Attention, dim, heads, way=way, **options)


class GPT(nn.Module):
    def __init__(self, dim: int, heads: int, layers: int, length: int, way: str, config: Any = None, **options: Any):
        super().__init__()
        if config is not None:
            self.config = config
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.5)
        self.blocks = nn.ModuleList(Block(dim, maker(dim, heads, way, options), None) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Patches of 4, a class token, ten classes."""

    def __init__(self, dim: int, heads: int, layers: int, way: str, **options: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, kernel_size=4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.5)
        self.positions = nn.Parameter(torch.randn(1, 26, dim) * 0.5)
        if way == "encoder":
            layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, **options)
            # Nested tensors are for padded batches only, and warn when norm_first.
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        else:
            options = {"causal": False, **options}
            self.encoder = nn.Sequential(*(Block(dim, maker(dim, heads, way, options), None) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.encoder(x)[:, 0]))


class Seq2Seq(nn.Module):
    """An encoder, and a decoder with cross attention; the source may be padded."""

    def __init__(self, dim: int, heads: int, layers: int, length: int, way: str, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.5)
        both = {**options, "causal": False}
        self.encoder = nn.ModuleList(Block(dim, maker(dim, heads, way, both), None) for _ in range(layers))
        cross = maker(dim, heads, way, both)
        self.decoder = nn.ModuleList(
            Block(dim, maker(dim, heads, way, {**options, "causal": True}), cross) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: Tensor, decoder_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        source = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.encoder:
            source = block(source, attention_mask)
        x = self.embedding(decoder_ids) + self.positions[: decoder_ids.shape[1]]
        for block in self.decoder:
            x = block(x, None, source, attention_mask)
        return self.head(self.norm(x))
