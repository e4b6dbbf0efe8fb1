"""torch's own attention modules, which leave Python on their fast paths: read from their inputs and weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._attend import attend
from .._vitals import Site
from ._override import is_override
from ._record import Listener, Record, hide_minima, read_beside, replay, unwatched, weight_on, when_differentiated

OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Hooks or function modes inside these would make them leave their fast paths, and change the bits they return."""


FORWARDS = {kind.forward for kind in OPAQUE}


def is_opaque(module: nn.Module) -> bool:
    return isinstance(module, OPAQUE)


def is_torchs_own(module: nn.Module) -> bool:
    """Whether it computes what torch's module does: a subclass may do something else around it."""
    kinds = (kind for kind in type(module).__mro__ if "forward" in vars(kind) and not is_override(kind))
    return vars(next(kinds))["forward"] in FORWARDS


class Heads:
    """q, k, v of an nn.MultiheadAttention call, (batch, heads, length, head_dim), and the mask that it applies."""

    def __init__(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: ARG002
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002
        is_causal: bool = False,
    ) -> None:
        self.module = module
        lengths: Tensor | None = None
        if query.is_nested:
            lengths = torch.tensor([x.shape[0] for x in query.unbind()])
            query = key = value = query.to_padded_tensor(0.0)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if module._qkv_same_embed_dim:  # noqa: SLF001
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(x.detach(), w.detach(), None if b is None else b.detach())
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        batch, keys = k.shape[:2]
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.detach().expand(batch, 1, -1)], 1)
            v = torch.cat([v, module.bias_v.detach().expand(batch, 1, -1)], 1)
        if module.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        self.q, self.k, self.v = (
            x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for x in (q, k, v)
        )
        self.mask, self.padding = self._merge(attn_mask, key_padding_mask, lengths, keys)
        self.causal = bool(is_causal) and attn_mask is None
        self.options: dict[str, Any] = {"is_causal": self.causal}
        self.batched = batched

    def _merge(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, lengths: Tensor | None, keys: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """One mask as `attend` takes it (True = attend, or added), and which keys are padding."""
        padding = None
        merged: Tensor | None = None
        if attn_mask is not None:
            merged = attn_mask.logical_not() if attn_mask.dtype == torch.bool else attn_mask
            if merged.dim() == 3:
                merged = merged.unflatten(0, (-1, self.module.num_heads))
        if lengths is not None:
            padding = torch.arange(keys)[None] >= lengths[:, None]
        elif key_padding_mask is not None:
            padding = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == -math.inf
            if key_padding_mask.is_floating_point():
                added = key_padding_mask[:, None, None]
                if merged is not None and merged.dtype == torch.bool:
                    added = added.expand(*torch.broadcast_shapes(added.shape, merged.shape))
                    merged = added.masked_fill(merged.logical_not(), -math.inf)
                else:
                    merged = added if merged is None else merged + added
        if padding is not None:
            shown = padding.logical_not()[:, None, None]
            if merged is None:
                merged = shown
            elif merged.dtype == torch.bool:
                merged = merged & shown
            else:
                merged = merged.masked_fill(shown.logical_not(), -math.inf)
        if merged is not None and self.k.shape[2] > keys:
            shown_too = True if merged.dtype == torch.bool else 0.0
            merged = functional.pad(merged, (0, self.k.shape[2] - keys), value=shown_too)
        return merged, padding

    def record(self, path: str, **site: Any) -> Record:
        module, mask, options = self.module, self.mask, self.options
        record = Record(
            Site(
                path=path,
                heads=module.num_heads,
                kv_heads=module.num_heads,
                head_dim=module.head_dim,
                model_dim=module.embed_dim,
                effective_scale=module.head_dim**-0.5,
                projection_factor=1.0,
                projected_head_dim=module.head_dim,
                product_scale=1.0,
                dtype=str(self.q.dtype).removeprefix("torch."),
                mask=None if mask is None else "bool" if mask.dtype == torch.bool else "bias",
                causal=self.causal,
                training=module.training,
                kind="MultiheadAttention",
                **site,
            ),
            read_beside(self.q, self.k, mask, options),
            of_model=self.q.shape[0],
        )
        if not bool(torch.isfinite(self.v).all()):
            # Broken values do not show in the scores.
            with torch.no_grad(), unwatched():
                record.look_at_output(attend(self.q, self.k, self.v, attn_mask=hide_minima(mask), **options).output)
        if self.padding is not None and self.padding.shape[1] == self.k.shape[2] and bool(self.padding.any()):
            record.leave_out(self.padding, weight_on(self.padding, self.q, self.k, hide_minima(mask), options))
        return record

    def await_gradients(self, record: Record, listener: Listener, output: Tensor) -> None:
        """From the module's output: what arrives at the heads is the gradient turned back by the output projection."""
        module = self.module

        def of_output(grad: Tensor) -> None:
            if not self.batched:
                grad = grad.unsqueeze(0)
            elif not module.batch_first:
                grad = grad.transpose(0, 1)
            weight = module.out_proj.weight.detach()
            arriving = torch.matmul(grad.to(weight.dtype), weight)
            arriving = arriving.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            reading = replay(self.q, self.k, self.v, arriving, self.mask, self.options)
            record.pressure, record.gradient_flow = reading.pressure, reading.gradient_flow

        when_differentiated(record, output, listener, of_output)


def encoder_heads(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Heads:
    """The attention that an encoder layer computed on its fast path."""
    x = layer.norm1(src) if layer.norm_first else src
    return Heads(layer.self_attn, x, x, x, src_key_padding_mask, attn_mask=src_mask, is_causal=is_causal)
