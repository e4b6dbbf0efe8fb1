"""Seeing every attention call of one forward pass, however it is written, without changing a bit of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from .._vitals import Site, Vitals
from ._declared import Declared, said_by_caller
from ._lineage import Lineage
from ._mode import Mode
from ._modules import Heads, encoder_heads, is_opaque, is_torchs_own
from ._origin import origin
from ._override import compiled_attribute, override, replace_attribute
from ._record import Record, weight_on
from ._registry import wrap_registry
from ._sites import LOOKS_LIKE_ATTENTION, ROOT, Sites, list_unseen, look_at_inputs
from ._stance import eagerly, stance

Part: TypeAlias = Callable[[Callable[..., Any], Any, Any], Any]
"""Runs a compiled part of a model, with arguments and keywords."""

TURN = threading.RLock()
"""Who has it may hang things into modules: one thread of the process, so that all comes out as it went in."""


class Session:
    """One forward pass that is looked at."""

    def __init__(
        self,
        model: nn.Module,
        *,
        failed: Callable[[str, Exception], None],
        arrived: Callable[[], None] = lambda: None,
        inside: bool = False,
        reading: bool = True,
        factor: float = 1.0,
        declared: Declared = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.model = model
        self.note = failed
        self.arrived = arrived
        self.inside = inside
        self.reading = reading
        self.factor = factor
        """What every scale is multiplied by, to probe."""
        self.declared = declared
        self.progress = progress
        self.records: list[Record] = []
        self.wanted: list[Tensor] | None = None
        """Where to keep the tensors whose gradients are waited for; None keeps none of them alive."""
        self.unseen: dict[str, str] = {}
        self.unprobed: set[str] = set()
        self.sequences = 1
        self.padding: Tensor | None = None
        self.lineage = Lineage()
        self.mode = Mode(self)
        self._local = threading.local()
        self._lock = threading.Lock()
        self.entered: set[str] = set()
        self._heated: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._waiting: list[Any] = []
        self._calls_of_graphs: dict[str, int] = {}
        self._has_encoder = any(name.split(".")[-1] == "encoder" for name, _ in model.named_modules())
        self._sites = Sites(model, declared)

    # -- the forward pass -------------------------------------------------------------------------------------------

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], part: Part | None = None
    ) -> Any:
        """What `forward` of the model returns, looked at; uncompiled, since what a compiler fused cannot be seen.

        With `part`, compiled parts of the model are left to that.
        """
        with TURN, ExitStack() as undo:
            try:
                self._prepare(undo, args, kwargs, part)
            except Exception as error:
                self.note("", error)
                undo.close()
                return forward(*args, **kwargs)
            if is_opaque(self.model):
                result = self._opaque(ROOT, self.model, functools.partial(eagerly, forward), args, kwargs)
            else:
                result = eagerly(forward, *args, **kwargs)
        if part is None:
            self._list_unseen()
        return result

    def interpret(self, graph: fx.GraphModule, place: Callable[[fx.Node], tuple[str, nn.Module]], inputs: Any) -> Any:
        """What a graph returns, run node by node and looked at like a forward pass; `place` is where a node belongs."""
        session = self

        class Nodes(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                session._local.stack[1:] = [place(n)]
                return super().run_node(n)

        before = dict(self._local.__dict__)
        self._local.stack = [(ROOT, self.model)]
        self._local.calls = before.get("calls", self._calls_of_graphs)
        try:
            with self.mode:
                return Nodes(graph).run(*inputs)
        finally:
            self._local.__dict__.clear()
            self._local.__dict__.update(before)

    def _prepare(self, undo: ExitStack, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part | None) -> None:
        """Hang everything in; what takes it out again goes into `undo`."""
        self._look_at_inputs(args, kwargs)
        for path, module in _outside_opaque(self.model, whole=part is None):
            if module is self.model:
                continue  # it is running already
            if part is not None and (name := compiled_attribute(module)) is not None:
                undo.callback(replace_attribute(module, name, self._apart(part, getattr(module, name))))
            elif is_opaque(module):
                undo.callback(override(module, functools.partial(self._opaque, path)))
            elif not isinstance(module, torch.jit.ScriptModule):
                for handle in self._hooks(path, module):
                    undo.callback(handle.remove)
        undo.callback(wrap_registry(self))
        self._local.stack, self._local.calls = [(ROOT, self.model)], {}
        undo.callback(self._local.__dict__.clear)
        undo.callback(self.lineage.clear)
        undo.enter_context(self.mode)

    def _apart(self, part: Part, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled part of the model, run by others; out of our mode, which the compiler would follow."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return compiled(*args, **kwargs)  # another thread's call of the same model
            with self.mode.suspended():
                return part(compiled, args, kwargs)

        return run

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, _: Any) -> None:
            if not self.active:
                if not getattr(module, "_is_replica", False):
                    return  # another thread's call of the same model
                self._local.stack, self._local.owner, self._local.calls = [(ROOT, module)], module, {}
                self._local.leave = ExitStack()
                self._local.leave.enter_context(stance("force_eager"))
                self._local.leave.enter_context(self.mode)
            self._local.stack.append((path, module))
            if LOOKS_LIKE_ATTENTION.search(type(module).__name__):
                self.entered.add(path)

        def after(module: nn.Module, *_: Any) -> None:
            stack = getattr(self._local, "stack", None)
            while stack and len(stack) > 1 and stack.pop()[1] is not module:
                pass
            if getattr(self._local, "owner", None) is module:
                leave = self._local.leave
                self._local.__dict__.clear()
                leave.close()

        return [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, always_call=True),
        ]

    def _look_at_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.sequences, self.padding = look_at_inputs(self.model, args, kwargs)

    def _list_unseen(self) -> None:
        self.unseen |= list_unseen(self.entered, self.paths, self.unseen)

    # -- what was seen ----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether this thread is inside the watched pass."""
        return hasattr(self._local, "stack")

    @property
    def place(self) -> tuple[str, nn.Module]:
        """The path and the module of the innermost module that is more than a function."""
        stack: list[tuple[str, nn.Module]] = self._local.stack
        for path, module in reversed(stack):
            if any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False)):
                return path, module
        return stack[0]

    def add(self, record: Record) -> None:
        with self._lock:
            self.records.append(record)
        if self.progress is not None:
            self.progress(len(self.records))

    def awaits(self, tensor: Tensor, hook: Any) -> None:
        self._waiting.append(hook)
        if self.wanted is not None:
            self.wanted.append(tensor)

    @property
    def paths(self) -> list[str]:
        """Of the calls that were read."""
        return [record.site.path for record in self.records]

    def vitals(self) -> list[Vitals]:
        """Of each call, with as much as the backward pass has given so far."""
        return [record.vitals() for record in self.records]

    def release(self) -> None:
        """Wait no longer: a hook that never fires would keep its tensor alive."""
        for hook in self._waiting:
            hook.remove()
        self._waiting.clear()
        self.wanted = None

    def name_call(self, path: str) -> str:
        """The path for the first call that a module makes, path#2 for its second."""
        calls: dict[str, int] = self._local.calls
        count = calls[path] = calls.get(path, 0) + 1
        return path if count == 1 else f"{path}#{count}"

    def site(self, q: Tensor, k: Tensor, *, traced: Sequence[Tensor] | None = None, **more: Any) -> Site:
        """Where and how: q (batch, heads, queries, head_dim) and k; `traced` are the tensors whose origin is known."""
        path, module = self.place
        of_q, of_k = (origin(self.lineage, x) for x in traced or (q, k))
        return self._sites.site(path, module, q, k, of_q, of_k, named=self.name_call(path), **more)

    def look_at_padding(self, record: Record, q: Tensor, k: Tensor, mask: Tensor | None, options: Any) -> None:
        padding = self.padding_of(record.site, q.shape[0], q.shape[2], k.shape[2])
        if padding is None:
            return
        record.leave_out(padding, weight_on(padding, q, k, mask, options))

    def padding_of(self, site: Site, batch: int, queries: int, keys: int) -> Tensor | None:
        """(batch, keys): which keys are padding, as far as the caller's mask is about them."""
        padding = self.padding
        if padding is None or tuple(padding.shape) != (batch, keys):
            return None
        # An encoder's mask says nothing of the decoder's own keys.
        if "decoder" in site.path and queries == keys and self._has_encoder:
            return None
        return padding

    # -- torch's modules --------------------------------------------------------------------------------------------

    def _opaque(self, path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.active and not getattr(module, "_is_replica", False):
            return forward(*args, **kwargs)
        with self.mode.suspended(), self._probed(module), self._block_seen(path, module) as calls:
            result = forward(*args, **kwargs)
        if self.reading:
            try:
                self._read_opaque(path, module, args, kwargs, result, on_fast_path=not calls)
            except Exception as error:
                self.note(path, error)
        return result

    def _read_opaque(
        self, path: str, module: nn.Module, args: Any, kwargs: Any, result: Any, *, on_fast_path: bool
    ) -> None:
        if not is_torchs_own(module):
            self.unseen[path] = f"{type(module).__name__} has a forward of its own around torch's module"
            return
        if isinstance(module, nn.MultiheadAttention):
            heads, output = Heads(module, *args, **kwargs), result[0]
        elif isinstance(module, nn.TransformerEncoderLayer) and on_fast_path:
            heads, output = encoder_heads(module, *args, **kwargs), result
            path = f"{path}.self_attn" if path != ROOT else "self_attn"
        else:
            return
        self.entered.discard(path)
        said = said_by_caller(self.declared, path)
        by = None if said is None else "the caller"
        record = heads.record(self.name_call(path), declared_scale=said, declared_by=by)
        if heads.padding is None:
            self.look_at_padding(record, heads.q, heads.k, heads.mask, heads.options)
        if isinstance(output, Tensor) and not output.is_nested:
            heads.await_gradients(record, self, output)
        self.add(record)

    @contextmanager
    def _block_seen(self, path: str, module: nn.Module) -> Iterator[list[str]]:
        """Where an encoder layer calls its attention block, look into it as into anybody's module; yields the calls.

        On torch's fast path it calls none, and would not take that if it found us in what it is made of.
        """
        calls: list[str] = []
        if not (isinstance(module, nn.TransformerEncoderLayer) and self.active):
            yield calls
            return
        own, block = vars(module).get("_sa_block"), module._sa_block  # noqa: SLF001

        def seen(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return block(*args, **kwargs)  # another thread's call of the same model
            calls.append(path)
            with ExitStack() as undo:
                try:
                    self._look_into(undo, path, module)
                except Exception as error:
                    self.note(path, error)
                    undo.close()
                return block(*args, **kwargs)

        vars(module)["_sa_block"] = seen
        try:
            yield calls
        finally:
            if own is None:
                vars(module).pop("_sa_block", None)
            else:
                vars(module)["_sa_block"] = own

    def _look_into(self, undo: ExitStack, path: str, layer: nn.TransformerEncoderLayer) -> None:
        """Hang everything into what an encoder layer is made of; what takes it out again goes into `undo`."""
        for name, child in layer.named_children():
            for below, module in _outside_opaque(child, whole=True):
                if not (is_opaque(module) or isinstance(module, torch.jit.ScriptModule)):
                    steps = (step for step in (path, name, below) if step != ROOT)
                    for handle in self._hooks(".".join(steps), module):
                        undo.callback(handle.remove)
        stack: list[tuple[str, nn.Module]] = self._local.stack
        undo.callback(stack.pop)
        stack.append((path, layer))
        undo.enter_context(self._unprobed(layer.self_attn))
        undo.enter_context(self.mode)

    @contextmanager
    def _probed(self, module: nn.Module) -> Iterator[None]:
        """With the scale of torch's module multiplied, by way of the weights that make q."""
        module = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
        if self.factor == 1 or not isinstance(module, nn.MultiheadAttention) or id(module) in self._heated:
            yield
            return
        width = module.embed_dim
        weight = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight[:width]
        parts = [weight] if module.in_proj_bias is None else [weight, module.in_proj_bias[:width]]
        self._heated[id(module)] = kept = [(part, part.detach().clone()) for part in parts]
        with torch.no_grad():
            for part in parts:
                part.mul_(self.factor)
        try:
            yield
        finally:
            del self._heated[id(module)]
            with torch.no_grad():
                for part, was in kept:
                    part.copy_(was)

    @contextmanager
    def _unprobed(self, module: nn.Module) -> Iterator[None]:
        """With those weights as they were: what computes with them now is seen, and multiplied, itself."""
        kept = self._heated.pop(id(module), [])
        with torch.no_grad():
            for part, was in kept:
                part.copy_(was)
        try:
            yield
        finally:
            with torch.no_grad():
                for part, _ in kept:
                    part.mul_(self.factor)
            if kept:
                self._heated[id(module)] = kept


def _outside_opaque(model: nn.Module, *, whole: bool) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, of torch's own attention modules only those whose forward is to be overridden.

    Unless `whole`, nothing inside a compiled part.
    """
    seen: set[int] = set()

    def walk(path: str, module: nn.Module, inside: bool) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if not inside or is_opaque(module):
            yield path or ROOT, module
        if not whole and module is not model and compiled_attribute(module) is not None:
            return
        for name, child in module.named_children():
            prefix = "" if name == "_orig_mod" else name
            below = ".".join(part for part in (path, prefix) if part)
            yield from walk(below, child, inside or is_opaque(module))

    yield from walk("", model, False)
