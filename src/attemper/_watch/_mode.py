"""Every torch operation of a watched pass goes through here: fused calls, softmaxes, and what leads up to them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from .._attend import attend
from .._reading import Reading
from . import _own
from ._foreign import FOREIGN, flex_scores
from ._lineage import Scores, Weights, tensors, version
from ._operations import is_softmax, softmax_axis
from ._record import (
    Record,
    Written,
    await_gradients,
    hide_minima,
    pressure_of,
    read_beside,
    when_differentiated,
    when_handed_back,
)
from ._shapes import Four, four_axes, heads_folded, kind_of, shaped

if TYPE_CHECKING:
    from ._session import Session


class Mode(TorchFunctionMode):
    """Sees every torch operation of the thread it is entered in."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self.session
        name = getattr(func, "__name__", "").split(".")[0].removeprefix("special_")
        if name == "scaled_dot_product_attention":
            return self._fused(func, args, kwargs)
        if session.factor != 1 and name == "flex_attention":
            args = (*args[:5], args[5] * session.factor, *args[6:])
        elif session.factor != 1 and name == _own.NAME:
            args = _own.reheated(args, session.factor)
        elif session.factor != 1 and name in FOREIGN:
            session.unprobed.add(session.place[0])
        softmax = self._written(args, kwargs) if name in ("softmax", "_softmax", "softmax_") else None
        if softmax is not None and session.factor != 1:
            args, kwargs = self._reheated(softmax, args, kwargs)
        result = func(*args, **kwargs)
        if name == "__get__" and not isinstance(result, Tensor):
            return result  # a shape or a type, which models ask for again and again
        try:
            if softmax is not None:
                self._after_softmax(softmax, result)
            elif is_softmax(name):
                # Its scores were not seen being made.
                session.lineage.weigh(tensors(args, kwargs)[0], softmax_axis(name, args, kwargs), result)
            elif name == "multi_head_attention_forward":
                reason = "torch's multi_head_attention_forward is called by itself, not by torch's module"
                session.unseen.setdefault(session.place[0], reason)
            elif session.reading and name == _own.NAME:
                session.add(_own.record_own(session, args, result))
            elif session.reading and name in FOREIGN:
                self._foreign(name, args, kwargs)
            elif session.reading and name == "flex_attention":
                self._flex(args, kwargs, result)
            else:
                self._follow(name, args, kwargs, result)
        except Exception as error:
            session.note(session.place[0], error)
        return result

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        lineage = self.session.lineage
        if name in ("matmul", "__matmul__", "bmm", "einsum"):
            for x in tensors(args, kwargs):
                tag = lineage.get(x)
                if not isinstance(tag, Weights):
                    continue
                if tag.record is not None:
                    tag.record.look_at_output(result)
                elif tag.unseen:
                    reason = "it weighs values by a softmax, but what its scores are made of was not seen"
                    self.session.unseen.setdefault(self.session.place[0], reason)
        lineage.follow(name, args, kwargs, result)

    def _heads(self, x: Tensor) -> int | None:
        return heads_folded(self.session.place[1], tuple(x.shape), self.session.sequences)

    # -- fused ------------------------------------------------------------------------------------------------------

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        session = self.session
        if session.factor != 1:
            scale = kwargs.get("scale")
            query = args[0] if args else kwargs["query"]
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            return func(*args, **{**kwargs, "scale": scale * session.factor})
        if not session.reading:
            return func(*args, **kwargs)
        if session.inside:
            try:
                return self._inside(args, kwargs)
            except Exception as error:
                session.note(session.place[0], error)
        result = func(*args, **kwargs)
        try:
            self._beside(result, *args, **kwargs)
        except Exception as error:
            session.note(session.place[0], error)
        return result

    def _beside(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        session = self.session
        # In the type in which it was computed, which autocast may have chosen.
        q, k, v = (x.detach().to(output.dtype) for x in (query, key, value))
        call = Four(q, k, v, output, attn_mask, self._heads(query))
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        record = self.of_operands(call.q, call.k, kind="sdpa", mask=call.mask, options=options, traced=(query, key))
        record.look_at_output(call.output)
        if torch.is_grad_enabled():
            fit = functools.partial(shaped, call.q)
            others = tensors((key, value, attn_mask), {})
            await_gradients(record, session, query, others, output, fit, call, options)
        session.add(record)

    def _inside(self, args: Any, kwargs: Any) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given.pop(name) for name in names[:3])
        session = self.session
        mask = given.get("attn_mask")
        hidden = hide_minima(mask)
        if hidden is not None and hidden is not mask and bool(torch.isneginf(hidden).all(-1).any()):
            # A row of nothing but finite minima is a mean over all values, which hiding them would turn into zeros.
            message = "a row of the mask hides every key by a finite minimum; such a call is read beside"
            raise ValueError(message)
        four = Four(query, key, value, query, hidden, self._heads(query))
        output, reading = attend(four.q, four.k, four.v, **{**given, "attn_mask": four.mask})
        options = {name: given[name] for name in ("is_causal", "scale", "enable_gqa") if name in given}
        traced = (query, key)
        session.add(
            self.of_operands(
                four.q, four.k, kind="sdpa", mask=four.mask, options=options, traced=traced, reading=reading
            )
        )
        result: Tensor = output.reshape(*query.shape[:-1], output.shape[-1])
        return result

    # -- written out ------------------------------------------------------------------------------------------------

    def _written(self, args: Any, kwargs: Any) -> tuple[Scores, Tensor] | None:
        """The scores that a softmax over the last axis takes, where they were seen being made."""
        scores = args[0] if args else kwargs.get("input")
        tag = self.session.lineage.scores(scores)
        if tag is None or not isinstance(scores, Tensor) or scores.dim() < 2:
            return None
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return (tag, scores) if axis in (-1, scores.dim() - 1) else None

    def operands(self, tag: Scores, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The q and k of scores of a shape (batch, heads, queries, keys), each with all their axes."""
        batch, heads, queries, keys = shape
        each = torch.broadcast_shapes(tag.q.shape[:-2], tag.k.shape[:-2])
        q, k = (x.detach().expand(*each, *x.shape[-2:]) for x in (tag.q, tag.k))
        width = tag.q.shape[-1]
        return q.reshape(batch, heads, queries, width), k.reshape(batch, heads, keys, width)

    def _explicit(self, tag: Scores, scores: Tensor) -> tuple[Written, tuple[int, ...]]:
        heads = self._heads(scores)
        if tag.shift is not None:
            scores = scores + tag.shift.reshape(*scores.shape[:-1], 1)
        scores = tag.of_keys(scores)
        shape = four_axes(tuple(scores.shape), heads)
        product = tag.product
        if product is not None and version(product) != tag.version:
            product = None
        sinks = None if tag.sinks is None else tag.sinks.detach().float().reshape(shape[:3])
        written = Written(scores.detach().reshape(shape), tag.q, tag.k, product, tag.factor, tag.softcap, sinks)
        return written, shape

    def _reheated(self, softmax: tuple[Scores, Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the softmax with the scale multiplied and all else in the scores left alone."""
        tag, scores = softmax
        written, shape = self._explicit(tag, scores)
        scaled = written.scaled()
        moved = written.capped(scaled * self.session.factor) - written.capped(scaled)
        moved = moved.reshape(*scores.shape[:-1], shape[-1])
        if tag.sinks is not None:
            moved = functional.pad(moved, (1, 0) if tag.sinks_first else (0, 1))
        heated = (scores.detach().float() + moved).to(scores.dtype)
        return ((heated, *args[1:]), kwargs) if args else (args, {**kwargs, "input": heated})

    def _after_softmax(self, softmax: tuple[Scores, Tensor], weights: Tensor) -> None:
        session = self.session
        tag, scores = softmax
        session.lineage.set(weights, Weights(None))
        if not session.reading:
            return
        written, shape = self._explicit(tag, scores)
        batch, _, queries, keys = shape
        q, k = self.operands(tag, shape)
        scale: Any = tag.factor
        if isinstance(scale, Tensor):
            scale = tuple(float(x) for x in scale.flatten())
        site = session.site(
            q,
            k,
            kind="softmax",
            scale=scale,
            scale_argument=scale,
            product_scale=scale,
            traced=(tag.q, tag.k),
            softcap=tag.softcap,
            mask=None,
            causal=False,
        )
        record = Record(site, written.read(), of_model=session.sequences)
        padding = session.padding_of(site, batch, queries, keys)
        if padding is not None:
            own = tag.of_keys(weights.detach()).float().reshape(shape)
            record.leave_out(padding, (own * padding[:, None, None].to(own.dtype)).sum(-1))

        def of_weights(grad: Tensor) -> None:
            record.pressure, record.gradient_flow = written.gradients(tag.of_keys(weights), tag.of_keys(grad))

        when_differentiated(record, weights, session, of_weights)
        session.lineage.set(weights, Weights(record))
        session.add(record)

    # -- other people's kernels -------------------------------------------------------------------------------------

    def _foreign(self, name: str, args: Any, kwargs: Any) -> None:
        q, k, options = FOREIGN[name](args, kwargs)
        kind = name.lstrip("_")
        self.session.add(
            self.of_operands(q, k, kind=kind, mask=None, options=options, traced=tensors(args, kwargs)[:2])
        )

    def _flex(self, args: Any, kwargs: Any, result: Any) -> None:
        session = self.session
        query, key, scale = args[0], args[1], args[5]
        site = session.site(
            query, key, kind="flex_attention", scale=scale, scale_argument=scale, product_scale=1.0, traced=args[:2]
        )
        scores, product = flex_scores(*args, **kwargs)
        record = Record(site, Written(scores, query, key, product, scale, None).read(), of_model=session.sequences)
        output = result[0] if isinstance(result, tuple) else result
        record.look_at_output(output)

        def of_q(grad: Tensor) -> None:
            record.pressure = pressure_of(query, grad)

        when_handed_back(record, query, tensors(args[1:], kwargs), output, session, of_q)
        session.add(record)

    def of_operands(
        self,
        q: Tensor,
        k: Tensor,
        *,
        kind: str,
        mask: Tensor | None,
        options: dict[str, Any],
        traced: Sequence[Tensor] | None = None,
        reading: Reading | None = None,
    ) -> Record:
        """The Record of a kernel of which the operands are known, read beside it unless that was done inside."""
        session = self.session
        scale = None if options.get("scale") is None else float(options["scale"])
        site = session.site(
            q,
            k,
            kind=kind,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            scale_argument=scale,
            product_scale=1.0,
            traced=traced,
            softcap=options.get("softcap"),
            mask=kind_of(mask),
            causal=bool(options.get("is_causal", False)),
        )
        options = {**options, "enable_gqa": q.shape[1] != k.shape[1]}
        reading = reading or read_beside(q, k, mask, options)
        record = Record(site, reading, of_model=session.sequences)
        session.look_at_padding(record, q, k, mask, options)
        return record

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Out of the stack of modes, whose mere presence turns off the fast paths of torch's modules."""
        if self not in _get_current_function_mode_stack():
            yield  # inside one of them already
            return
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in above:
                _pop_mode()
            for mode in (self, *reversed(above)):
                _push_mode(mode)
