"""The operands of every attention call of one forward pass, by the machinery that watches models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .._arrays import to_numpy
from .._vitals import Site
from .._watch._lineage import Scores, Weights, tensors
from .._watch._mode import Mode
from .._watch._modules import Heads, encoder_heads, is_torchs_own
from .._watch._record import hide_minima
from .._watch._session import Session
from .._watch._shapes import Four, head_count
from .._watch._sites import within
from ._call import Call


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention:
    """What was seen of a model's attention: its calls in order, and the paths that stayed unseen with the reason."""

    calls: tuple[Call, ...]
    unseen: dict[str, str] = field(default_factory=dict)


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, factor: float = 1.0) -> Attention:
    """Run the model once, in evaluation mode and with every scale multiplied by `factor`; its first sequence only."""
    failures: dict[str, str] = {}

    def failed(path: str, error: Exception) -> None:
        failures[path] = f"{type(error).__name__}: {error}"

    session = _Session(model, failed=failed, reading=False, factor=factor)
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            session.run(model, args, kwargs)
    finally:
        model.train(was[0][1])
        for module, training in was:
            module.training = training
    calls = tuple(pending.call for pending in session.calls)
    silent = {path: why for path, why in session.unseen.items() if not any(within(call.path, path) for call in calls)}
    silent |= dict.fromkeys(session.unprobed, "the scale inside its kernel cannot be reached")
    return Attention(calls=calls, unseen={**silent, **failures})


@dataclass(eq=False)
class _Pending:
    """A call whose values may still be on their way."""

    call: Call
    shape: tuple[int, int, int]  # batch, heads, keys

    def look_at_output(self, output: Tensor) -> None:
        """What a Record does; there is nothing to measure here."""


class _Session(Session):
    """Keeps the operands of every call, and what the modules that make them were given."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.mode = _Mode(self)
        self.calls: list[_Pending] = []
        self._given: dict[str, Tensor] = {}

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = [x for x in tensors(args, kwargs) if x.is_floating_point() and x.dim() == 3]
            if given:
                self._given[path] = given[0]

        return [*super()._hooks(path, module), module.register_forward_pre_hook(note, with_kwargs=True)]

    def _opaque(self, path: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before = len(self.calls)
        result = super()._opaque(path, module, forward, args, kwargs)
        try:
            self._keep_opaque(path, module, args, kwargs, before)
        except Exception as error:
            self.note(path, error)
        return result

    def _keep_opaque(self, path: str, module: nn.Module, args: Any, kwargs: Any, before: int) -> None:
        if not is_torchs_own(module):
            self.unseen[path] = f"{type(module).__name__} has a forward of its own around torch's module"
            return
        if isinstance(module, nn.MultiheadAttention):
            heads = Heads(module, *args, **kwargs)
            given = args[0] if args else kwargs["query"]
            x = given if module.batch_first or given.dim() == 2 else given.transpose(0, 1)
        elif isinstance(module, nn.TransformerEncoderLayer) and len(self.calls) == before:
            heads = encoder_heads(module, *args, **kwargs)
            given = args[0] if args else kwargs["src"]
            x = module.norm1(given) if module.norm_first else given
            path = f"{path}.self_attn"
        else:
            return
        width = heads.module.head_dim
        site = Site(path=self.name_call(path), heads=heads.q.shape[1], model_dim=heads.module.embed_dim)
        scale = width**-0.5 * self.factor
        options = {"is_causal": heads.causal}
        self.keep(site, heads.q, heads.k, heads.v, scale, heads.mask, options, x=x, kind="MultiheadAttention")

    def keep(
        self,
        site: Site,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        scale: float | tuple[float, ...],
        mask: Tensor | None,
        options: dict[str, Any],
        *,
        kind: str,
        x: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Note a call: q, k, v with four axes, and what multiplies q·kᵀ where they meet."""
        given = self._given.get(site.path.partition("#")[0]) if x is None else x
        if given is not None and given.dim() == 3:
            given = given[0]
        if given is not None and (given.dim() != 2 or given.shape[0] != q.shape[2]):
            given = None
        queries, rows = q[0], _per_head(scale, q.shape[1])
        # A factor put on q beforehand is a part of the scale: there q is taken back to what was projected.
        if site.projection_factor not in (None, 0.0, 1.0):
            queries = queries / site.projection_factor
            rows = tuple(number * site.projection_factor for number in rows)
        hidden = hide_minima(mask)
        if hidden is not None:
            hidden = hidden.expand(*([1] * (4 - hidden.dim())), *hidden.shape)[0]
            hidden = hidden.expand(hidden.shape[0], q.shape[2], k.shape[2])
        call = Call(
            path=site.path,
            x=None if given is None else _array(given),
            q=_array(queries),
            k=_array(k[0]),
            v=None if v is None else _array(v[0]),
            scale=rows,
            model_dim=site.model_dim if given is None else int(given.shape[-1]),
            mask=None if hidden is None else _array(hidden),
            options={name: value for name, value in options.items() if value},
            sinks=None if sinks is None else _array(sinks),
            kind=kind,
        )
        self.calls.append(_Pending(call, (q.shape[0], q.shape[1], k.shape[2])))


class _Mode(Mode):
    """Keeps what a fused call or a softmax written out was given, on the way to what the Mode does anyway."""

    session: _Session

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            self._keep_fused(*args, **kwargs)
        except Exception as error:
            self.session.note(self.session.place[0], error)
        return super()._fused(func, args, kwargs)

    def _keep_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002
    ) -> None:
        session = self.session
        call = Four(query, key, value, query, attn_mask, head_count(session.place[1]))
        number = query.shape[-1] ** -0.5 if scale is None else float(scale)
        site = self._site(call.q, call.k, number, (query, key), "sdpa")
        options = {"is_causal": is_causal}
        session.keep(site, call.q, call.k, call.v, number * session.factor, call.mask, options, kind="sdpa")

    def _site(self, q: Tensor, k: Tensor, scale: Any, traced: tuple[Tensor, Tensor], kind: str) -> Site:
        return self.session.site(q, k, kind=kind, scale=scale, scale_argument=scale, product_scale=scale, traced=traced)

    def _after_softmax(self, softmax: tuple[Scores, Tensor], weights: Tensor) -> None:
        super()._after_softmax(softmax, weights)
        session = self.session
        tag, scores = softmax
        written, shape = self._explicit(tag, scores)
        q, k = self.operands(tag, shape)
        factor: Any = tag.factor
        if isinstance(factor, Tensor):
            factor = tuple(float(x) for x in factor.flatten())
        scaled = written.scaled()
        wide = written.scores.float()
        visible = written.visible(wide, scaled)
        bias = (wide - written.capped(scaled)).masked_fill(~visible, 0)
        # What rounding leaves of scores from which their own product is taken is no bias.
        rounding = 8 * torch.finfo(scores.dtype).eps * wide.masked_fill(~visible, 0).abs().amax()
        mask = visible if bool(bias.abs().amax() <= rounding) else bias.masked_fill(~visible, -torch.inf)
        scale = tuple(x * session.factor for x in factor) if isinstance(factor, tuple) else factor * session.factor
        session.keep(
            self._site(q, k, factor, (tag.q, tag.k), "softmax"),
            q,
            k,
            None,
            scale,
            None if bool(visible.all()) and mask is visible else mask,
            {"softcap": tag.softcap},
            kind="softmax",
            sinks=None if written.sinks is None else written.sinks[0, :, 0],
        )
        session.lineage.set(weights, Weights(session.calls[-1]))

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name in ("matmul", "__matmul__", "bmm"):
            one, two = tensors(args, kwargs)[:2]
            tag = self.session.lineage.get(one)
            if isinstance(tag, Weights) and isinstance(tag.record, _Pending) and tag.record.call.v is None:
                batch, heads, keys = tag.record.shape
                values = two.expand(*one.shape[:-2], *two.shape[-2:]).reshape(batch, heads, keys, -1)
                tag.record.call = replace(tag.record.call, v=_array(values[0]))
        super()._follow(name, args, kwargs, result)


def _per_head(scale: float | tuple[float, ...], heads: int) -> tuple[float, ...]:
    return scale if isinstance(scale, tuple) else (float(scale),) * heads


def _array(x: Tensor) -> NDArray[Any]:
    """A copy: what a model does with its tensors afterwards is its own affair."""
    return np.array(to_numpy(x.contiguous()))
