"""The sampled calls of a compiled model, compiled too: by its own backend, from graphs in which attention is read.

dynamo keeps what it compiled apart by backend. So a sampled call runs what the model's calls run, under a backend of
ours that puts the readings into each graph and hands it to the model's own. The calls between go on as if nobody
watched. A graph that cannot be read this way is run node by node, once; after that sampled calls run uncompiled.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._dynamo import eval_frame
from torch._subclasses import FakeTensor

from .._vitals import Site, Vitals
from ._graph import Look, Seen, UnreadableError, Whereabouts, copied, install, place_of
from ._modules import is_opaque
from ._session import Session
from ._shapes import heads_folded
from ._sites import LOOKS_LIKE_ATTENTION, ROOT, Sites, list_unseen
from ._stance import stance
from ._sums import vitals_of


class Fast(NamedTuple):
    """How a model that is compiled runs."""

    call: Callable[..., Any]
    """What torch.compile returned; or the forward that is being compiled around us."""
    backend: Any
    around: bool
    """Whether the compiler is at work already, so that `call` has to be handed to it."""


def compiler_is_off() -> bool:
    """Whether somebody has told the compiler, by its stance, to do something else than compile."""
    return bool(eval_frame._stance.stance != "default")  # noqa: SLF001


def fast_road(forward: Callable[..., Any], callback: Any) -> Fast | None:
    """How `forward` runs compiled, or None; `callback` is what dynamo has in the thread it is called in."""
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if hasattr(forward, "get_compiler_config") and "callback" in names:
        cells: Any = forward.__closure__
        callback = cells[names.index("callback")].cell_contents
        return Fast(forward, _innermost(callback), around=False)
    return Fast(forward, _innermost(callback), around=True) if callable(callback) else None


def _innermost(callback: Any) -> Any:
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend  # noqa: SLF001
    return callback


Known: TypeAlias = dict[tuple[Any, ...], tuple[list[Site], set[str]]]
"""What earlier passes have made out about a graph: the Sites of its calls, and what in it is called attention."""


@dataclass(eq=False)
class Summed:
    """A call that a graph has read: its Site, and its tables."""

    site: Site
    rows: Any
    pressure: Any = None
    flow: Any = None

    def tables(self) -> dict[str, Tensor]:
        """Those that are there."""
        return {name: x for name in ("rows", "pressure", "flow") if (x := getattr(self, name)) is not None}


class Pass:
    """One forward pass that runs compiled; to a Monitor what a Session is."""

    def __init__(
        self,
        graphs: Compiled,
        fast: Fast | None,
        sites: Sites,
        known: Known,
        sequences: int,
        *,
        failed: Callable[[str, Exception], None],
        arrived: Callable[[], None],
    ) -> None:
        self.graphs = graphs
        self.fast = fast
        """How the model runs; None where only parts of it are compiled."""
        self.sites = sites
        self.known = known
        self.sequences = sequences
        self.note = failed
        self.arrived = arrived
        self.unseen: dict[str, str] = {}
        self.entered: set[str] = set()
        self.summed: list[Summed] = []
        self._session: Session | None = None
        self._calls: dict[str, int] = {}
        self._waiting: list[Any] = []
        self._measured_already: set[tuple[Summed, str]] = set()
        self._landed: list[tuple[Any, Tensor, list[tuple[Summed, str, torch.Size]]]] = []

    @property
    def session(self) -> Session:
        """For graphs that are looked at as they run."""
        if self._session is None:
            given = self.sites
            self._session = Session(given.model, failed=self.note, arrived=self.arrived, declared=given.declared)
            self._session.sequences = self.sequences
        return self._session

    @property
    def paths(self) -> list[str]:
        """Of the calls that were read."""
        seen = (*self.summed, *(self._session.records if self._session is not None else ()))
        return [record.site.path for record in seen]

    def run(self, eager: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the model returns, read; `eager` is its forward as it was written."""
        try:
            if self.fast is not None:
                return self.graphs.run(self.fast, self, args, kwargs)
            return self.session.run(eager, args, kwargs, part=self._part)
        finally:
            entered = self.entered
            if self._session is not None:
                self._session.lineage.clear()
                self.unseen = self._session.unseen
                entered = entered | self._session.entered
            self.unseen = self.unseen | list_unseen(entered, self.paths, self.unseen)
            self.send()

    def _part(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        fast = fast_road(compiled, None)
        return compiled(*args, **kwargs) if fast is None else self.graphs.run(fast, self, args, kwargs)

    def vitals(self) -> list[Vitals]:
        """Of each call, with as much as the backward pass has given so far."""
        for event, together, parts in self._landed:
            if event is not None:
                event.synchronize()
            for (summed, name, shape), part in zip(
                parts, together.split([shape.numel() for *_, shape in parts]), strict=True
            ):
                setattr(summed, name, part.reshape(shape))
        self._landed.clear()
        found = [
            vitals_of(summed.site, **{name: x.detach().cpu().numpy() for name, x in summed.tables().items()})
            for summed in self.summed
        ]
        return found + (self._session.vitals() if self._session is not None else [])

    def release(self) -> None:
        """Wait no longer for gradients."""
        for hook in self._waiting:
            hook.remove()
        self._waiting.clear()
        if self._session is not None:
            self._session.release()
        self.send()

    def send(self) -> None:
        """Send the tables that are there on their way to the host, which does not wait for them.

        Soon, since what a graph of CUDA's returned is overwritten when it runs again.
        """
        by_device: dict[torch.device, list[tuple[Summed, str, Tensor]]] = {}
        for summed in self.summed:
            for name, table in summed.tables().items():
                by_device.setdefault(table.device, []).append((summed, name, table))
        for device, tables in by_device.items():
            together = torch.cat([table.detach().flatten() for *_, table in tables]).to("cpu", non_blocking=True)
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            self._landed.append((event, together, [(summed, name, table.shape) for summed, name, table in tables]))
            for summed, name, _ in tables:
                setattr(summed, name, None)

    def add(self, site: Site, table: Tensor, probes: dict[str, Tensor]) -> None:
        """A call that was read, whose probes wait for the backward pass."""
        count = self._calls[site.path] = self._calls.get(site.path, 0) + 1
        summed = Summed(site if count == 1 else replace(site, path=f"{site.path}#{count}"), table.detach())
        self.summed.append(summed)
        for name, probe in probes.items():
            handle = probe.register_hook(functools.partial(self._measured, summed, name))
            self._waiting.append(handle)

    def _measured(self, summed: Summed, name: str, grad: Tensor) -> None:
        # Of several backward passes the first counts.
        if (summed, name) not in self._measured_already:
            self._measured_already.add((summed, name))
            setattr(summed, name, grad.detach())
            self.arrived()


@dataclass(eq=False)
class Graph:
    """A graph that reads the attention in it."""

    calls: list[Seen]
    entered: list[str]
    """What is called attention in it, as dynamo names it."""
    where: Whereabouts
    run: Callable[..., Any]
    plain: fx.GraphModule
    """What it was before."""
    probes: list[tuple[str, Tensor]]
    anchors: tuple[int, ...]
    """The inputs that tell which modules it is computing."""

    @functools.cached_property
    def more(self) -> int:
        """How many outputs are ours."""
        return sum(1 + len(seen.samples) for seen in self.calls)


class Compiled:
    """The graphs of one compiled model in which attention is read, for whoever watches it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._backends: dict[int, _Backend] = {}
        self._current: Pass | None = None
        self._known: dict[int, list[str]] = {}
        self._modules: dict[str, nn.Module] = weakref.WeakValueDictionary()  # type: ignore[assignment]
        # Also where one of them is in the midst of a graph, the compiler does not look into it.
        opaque = any(map(is_opaque, model.modules()))
        self.uncompiled: str | None = "torch's own attention modules are in it" if opaque else None
        """Why its sampled calls cannot run compiled; None while they can."""

    def run(self, fast: Fast, watched: Pass, args: Any, kwargs: Any) -> Any:
        """What the model returns, read in its graphs."""
        backend = self._backends.setdefault(id(fast.backend), _Backend(self, fast.backend))
        self._current = watched
        try:
            if fast.around:
                return torch.compile(fast.call, backend=backend)(*args, **kwargs)
            with stance("default", backend):
                return fast.call(*args, **kwargs)
        finally:
            self._current = None
            if fast is watched.fast and not watched.paths and self.uncompiled is None:
                self.uncompiled = "no attention was seen in its graphs"

    # -- compiling --------------------------------------------------------------------------------------------------

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], backend: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a graph: its backend, with readings inside; or we, looking at it node by node."""
        where = Whereabouts(module.graph)
        try:
            with _unguarded(module):
                # dynamo goes on to use the graph that it gave away.
                changed = copied(module)
                look = Look(changed)
                look.run()
                anchors = [self._look_up(seen, where, inputs) for seen in look.calls()]
                install(changed, look)
            probes = [
                (name, torch.zeros(shape, dtype=torch.float64, device=seen.query.device))
                for seen in look.calls()
                for name, shape in seen.probes().items()
            ]
            run = backend(changed, [*inputs, *(probe.detach().requires_grad_() for _, probe in probes)])
        except torch._dynamo.exc.RestartAnalysis:  # noqa: SLF001
            raise
        except UnreadableError as error:
            self.uncompiled = str(error)
        except Exception as error:
            self.uncompiled = _in_a_line(error)
        else:
            entered = [name for name, kind in look.entered.items() if LOOKS_LIKE_ATTENTION.search(kind)]
            found = Graph(look.calls(), entered, where, run, module, probes, tuple(sorted({*anchors})))
            return functools.partial(self._read, found)
        return functools.partial(self._as_it_runs, module, where)

    def _look_up(self, seen: Seen, where: Whereabouts, inputs: Sequence[Any]) -> int:
        """Fill in what only the module that makes a call knows; returns the input that tells which it is."""
        found = self._find(seen.module, where, inputs)
        if found is None:
            raise UnreadableError("which of its modules a graph computes could not be told")
        anchor, _, module = found
        sequences = 1 if self._current is None else self._current.sequences
        seen.settle(heads_folded(module, tuple(map(int, seen.query.shape)), sequences), sequences)
        return anchor

    # -- running ----------------------------------------------------------------------------------------------------

    def _read(self, graph: Graph, *inputs: Any) -> Any:
        probes = [(name, probe.detach().requires_grad_()) for name, probe in graph.probes]
        watched = self._current
        try:
            found = graph.run(*inputs, *(probe for _, probe in probes))
        except Exception as error:
            # Ours or the model's: if it is the model's it comes again, without us.
            self.uncompiled = _in_a_line(error)
            return graph.plain(*inputs)
        outputs = len(found) - graph.more
        if watched is not None:
            try:
                self._take(graph, watched, inputs, probes, found[outputs:])
            except Exception as error:
                watched.note("", error)
        return found[:outputs]

    def _take(self, graph: Graph, watched: Pass, inputs: Any, probes: list[tuple[str, Tensor]], more: Any) -> None:
        """Hand what a graph has measured to the pass."""
        key = (id(graph), *(id(inputs[place]) for place in graph.anchors))
        known = watched.known.get(key)
        measured, waiting = iter(more), iter(probes)
        sites = []
        for place, seen in enumerate(graph.calls):
            table = next(measured)
            samples = {at: next(measured) for at in seen.samples}
            own = dict([next(waiting) for _ in seen.probes()])
            site = known[0][place] if known else self._site(seen, graph.where, watched.sites, inputs, samples)
            sites.append(site)
            watched.add(site, table, own)
        if known is None:
            places = (self._find(name, graph.where, inputs) for name in graph.entered)
            known = watched.known[key] = sites, {found[1] for found in places if found is not None}
        watched.entered |= known[1]

    def _site(self, seen: Seen, where: Whereabouts, sites: Sites, inputs: Any, samples: dict[int, Tensor]) -> Site:
        _, path, module = self._find(seen.module, where, inputs) or (0, ROOT, sites.model)
        q = torch.empty(seen.shape, dtype=seen.query.dtype, device="meta")
        k = torch.empty(seen.key_shape, dtype=seen.key.dtype, device="meta")
        return sites.site(
            path,
            module,
            q,
            k,
            *seen.origins(samples),
            named=path,
            kind="sdpa",
            scale=seen.shape[-1] ** -0.5 if seen.scale is None else seen.scale,
            scale_argument=seen.scale,
            product_scale=1.0,
            mask=seen.mask,
            causal=seen.causal,
            softcap=None,
        )

    def _as_it_runs(self, graph: fx.GraphModule, where: Whereabouts, *inputs: Any) -> Any:
        """What a graph returns, uncompiled, seen by the means for uncompiled models."""
        watched = self._current
        if watched is None:
            return graph(*inputs)
        session = watched.session

        def place(node: fx.Node) -> tuple[str, nn.Module]:
            found = self._find(place_of(node), where, inputs)
            return (ROOT, session.model) if found is None else found[1:]

        return session.interpret(graph, place, inputs)

    # -- the model --------------------------------------------------------------------------------------------------

    def _find(self, name: str, where: Whereabouts, inputs: Sequence[Any]) -> tuple[int, str, nn.Module] | None:
        """(the input that tells, path, module) of what dynamo names; the innermost that is more than a function."""
        found = where.find(name, inputs, self._known)
        if found is None or found[1] not in self._modules:
            self._look_at_model()
            found = where.find(name, inputs, self._known)
        if found is None:
            return None
        anchor, path = found
        while path:
            module = self._modules.get(path)
            if module is not None and (any(module.children()) or any(True for _ in module.parameters(recurse=False))):
                return anchor, path, module
            path = path.rpartition(".")[0]
        return anchor, ROOT, self._modules[""]

    def _look_at_model(self) -> None:
        model = self._model()
        if model is None:
            return
        self._known = {}
        for name, x in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            self._known.setdefault(id(x), []).append(_plain(name))
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules[_plain(name)] = module


class _Backend:
    """To dynamo a compiler: the model's own, behind our readings."""

    def __init__(self, compiled: Compiled, backend: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.backend = backend

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return self.compiled.compile(module, inputs, self.backend)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


@contextlib.contextmanager
def _unguarded(module: fx.GraphModule) -> Iterator[None]:
    """What is asked of shapes here is no reason to compile for others anew."""
    values = (node.meta.get("example_value") for node in module.graph.nodes)
    modes = (x.fake_mode for x in values if isinstance(x, FakeTensor))
    shapes = getattr(next(modes, None), "shape_env", None)
    with contextlib.nullcontext() if shapes is None else shapes.suppress_guards():
        yield


_COMPILED: weakref.WeakKeyDictionary[nn.Module, Compiled] = weakref.WeakKeyDictionary()


def compiled_graphs(model: nn.Module) -> Compiled:
    """Those of a model, kept as long as it is: watched again, it is not compiled again."""
    found = _COMPILED.get(model)
    if found is None:
        found = _COMPILED[model] = Compiled(model)
    return found
