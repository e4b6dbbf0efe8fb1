"""`watch`: the Vitals of a model over a run, from a sample of its calls."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code

from .._diagnose import diagnose
from .._errors import FrameworkError, OptionError, brief, explain, unknown
from .._finding import Finding
from .._vitals import Vitals
from ._compiled import Known, Pass, compiled_graphs, compiler_is_off, fast_road
from ._declared import Declared, looks_trained, require_declared
from ._override import compiled_attribute, override, replace_attribute
from ._session import TURN, Session
from ._sites import Sites, look_at_inputs
from ._stance import eagerly

SCHEMA = "attemper.sample/1"

OBSERVE = ("beside", "inside")

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Sample(NamedTuple):
    """The Vitals of one step, by path."""

    step: int
    vitals: Mapping[str, Vitals]


class Monitor:
    """The Vitals of a model that is being watched; a context manager, or call `stop`.

    Made by `attemper.watch`.
    """

    history: deque[Sample]
    """The samples so far, the newest last; the oldest are dropped after `keep`."""
    unseen: dict[str, str]
    """Paths of what looks like attention and could not be read, and why not."""
    uncompiled: str | None
    """Why the newest sampled call of a compiled model ran uncompiled; None where it did not, or nothing is compiled."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        observe: str,
        log: Any,
        callbacks: Any,
        micro_batches: int,
        declared_scale: Declared,
        keep: int,
    ) -> None:
        _require_module(model)
        if model in _WATCHED:
            raise OptionError(explain("The model is watched already.", "Stop the Monitor that watches it first."))
        if observe not in OBSERVE:
            raise unknown("observe", observe, OBSERVE)
        counts: dict[str, Any] = {"every": every, "micro_batches": micro_batches, "keep": keep}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise OptionError(explain(f"{name} is {brief(value)}.", "Pass a whole number of at least 1."))
        if log is not None and not callable(log) and not isinstance(log, (str, Path)):
            fix = "Pass a function of (scalars, step), or the path of a file to append to."
            raise OptionError(explain(f"log is {brief(log)}.", fix))
        if not isinstance(callbacks, (tuple, list)) or not all(map(callable, callbacks)):
            fix = "Pass a list of functions of the Monitor."
            raise OptionError(explain(f"callbacks is {brief(callbacks)}.", fix))
        require_declared(declared_scale, model)
        if isinstance(log, (str, Path)):
            _require_file(log)
        self.model = model
        self.every = int(every)
        self.micro_batches = int(micro_batches)
        self.history = deque(maxlen=int(keep))
        self.unseen = {}
        self.uncompiled = None
        self._inside = observe == "inside"
        self._log = log
        self._callbacks = tuple(callbacks)
        self._declared = declared_scale
        self._calls = 0
        self._under_way = 0
        self._sampling = False
        """Whether a sampled call is under way."""
        self._hung = False
        """Whether that has things hung into modules that the compiler looks at."""
        self._stopped = False
        self._open: tuple[int, list[Session | Pass]] | None = None
        self._sites = Sites(model, declared_scale)
        self._known: Known = {}
        self._warned = False
        self._lock = threading.RLock()
        self._undo: Callable[[], None] | None = _enter_model(model, self)
        _WATCHED.add(model)

    @property
    def steps(self) -> int:
        """Steps taken so far, sampled or not."""
        return -(-self._calls // self.micro_batches)

    @property
    def vitals(self) -> dict[str, Vitals]:
        """The Vitals of the newest sample, by path, with as much as its backward pass has given so far."""
        with self._lock:
            if self._open is not None:
                return _merged(self._open[1])
            return dict(self.history[-1].vitals) if self.history else {}

    @property
    def findings(self) -> list[Finding]:
        """What `diagnose` says of the newest sample, and of the run so far."""
        vitals = self.vitals
        with self._lock:
            earlier = [sample.vitals.values() for sample in self.history]
        # While it learns, no pressure is expected to be zero.
        training = any(v.site.training for v in vitals.values())
        trained = None if training else looks_trained(self.model)
        return diagnose(vitals.values(), history=earlier, trained=trained, unseen=self.unseen)

    def to_scalars(self, *, per_head: bool = False) -> dict[str, float]:
        """A flat dict of the newest sample for any logger: `path/field`."""
        scalars: dict[str, float] = {}
        for vitals in self.vitals.values():
            scalars |= vitals.to_scalars(per_head=per_head)
        return scalars

    def stop(self) -> None:
        """Let go of the model and hand the last sample on; a second call does nothing."""
        with self._lock:
            self._stopped = True
            self._close()
            if self._undo is not None:
                self._undo()
                self._undo = None
                _WATCHED.discard(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "watching" if self._undo is not None else "stopped"
        return f"Monitor({type(self.model).__name__}; {state}, steps {self.steps}, samples {len(self.history)})"

    def _begin(self) -> int | None:
        """The step that a call belongs to if that is to be sampled; `_end` has to follow."""
        with self._lock:
            step = self._calls // self.micro_batches
            due = None
            # What is called while a sampled call is under way is a part of that, or another thread's.
            if not (self._sampling or self._stopped):
                if self._open is not None and self._open[0] != step:
                    self._close()
                if step % self.every == 0 and TURN.acquire(blocking=False):
                    due, self._sampling = step, True
            self._calls += not self._stopped
            self._under_way += 1
            return due

    def _end(self, step: int | None) -> None:
        """A call is over: what `_begin` took is given back."""
        with self._lock:
            self._under_way -= 1
            if step is not None:
                self._sampling = self._hung = False
                TURN.release()

    def _alone(self) -> bool:
        """Whether no other call of the model is under way; those that begin now run uncompiled."""
        with self._lock:
            self._hung = self._under_way == 1
            return self._hung

    def _sampled(
        self, step: int, forward: Callable[..., Any], eager: Callable[..., Any], callback: Any, args: Any, kwargs: Any
    ) -> Any:
        """What the model returns, looked at; `forward` may be compiled, `eager` is the same as it was written."""
        try:
            watched = self._watched(forward, callback, args, kwargs)
        except Exception as error:
            self._failed("", error)
            return forward(*args, **kwargs)
        if watched is None:
            return forward(*args, **kwargs)
        result = watched.run(eager, args, kwargs)
        if isinstance(watched, Pass):
            self.uncompiled = watched.graphs.uncompiled
        with self._lock:
            if self._open is None:
                self._open = (step, [])
            self._open[1].append(watched)
            for path in watched.paths:
                self.unseen.pop(path, None)
            for path, reason in watched.unseen.items():
                # Why reading it failed says more than that nothing was seen.
                self.unseen.setdefault(path, reason)
            if self._stopped:
                self._close()  # stopped while it was under way
        return result

    def _watched(self, forward: Callable[..., Any], callback: Any, args: Any, kwargs: Any) -> Session | Pass | None:
        """What is to look at a call: at what is compiled in its graphs, where that can be; None to let it go by."""
        arrived = _once_after_backward(self._backward_ended)
        self.uncompiled = None
        fast = fast_road(forward, callback)
        parts = fast is None and any(map(compiled_attribute, self.model.modules()))
        compiled = fast is not None or parts
        if compiled and not compiler_is_off():
            graphs = compiled_graphs(self.model)
            sequences, padding = look_at_inputs(self.model, args, kwargs)
            self.uncompiled = (
                "observe is 'inside'" if self._inside
                else "there is padding in the batch" if padding is not None
                else graphs.uncompiled
            )  # fmt: skip
            if self.uncompiled is None:
                known = self._sites, self._known
                return Pass(graphs, fast, *known, sequences, failed=self._failed, arrived=arrived)
        # The compiler at work in another thread would find what is hung into the modules.
        if compiled and not self._alone():
            return None
        return Session(self.model, failed=self._failed, arrived=arrived, inside=self._inside, declared=self._declared)

    def _backward_ended(self) -> None:
        with self._lock:
            if self._open is None:
                return
            for watched in self._open[1]:
                if isinstance(watched, Pass):
                    watched.send()
            if len(self._open[1]) >= self.micro_batches:
                self._close()

    def _close(self) -> None:
        """Sum the open sample up and hand it on."""
        if self._open is None:
            return
        step, sessions = self._open
        self._open = None
        for session in sessions:
            session.release()
        tasks: list[Callable[[], object]] = [lambda: self.history.append(Sample(step, _summed_up(sessions)))]
        if callable(self._log):
            log = self._log
            tasks.append(lambda: log(self.to_scalars(), step))
        elif self._log is not None:
            path = Path(self._log)
            tasks.append(lambda: _append(path, self.history[-1]))
        tasks.extend(functools.partial(callback, self) for callback in self._callbacks)
        for task in tasks:
            try:
                task()
            except Exception as error:
                self._failed("", error)

    def _failed(self, path: str, error: Exception) -> None:
        """One warning for all failures of ours; the run goes on."""
        if path:
            self.unseen[path] = f"reading it failed: {type(error).__name__}: {error}"
        if self._warned:
            return
        self._warned = True
        where = f" at {path}" if path else ""
        message = f"attemper could not watch{where}: {type(error).__name__}: {error}. The model itself is not affected."
        # Where warnings are errors, ours still must not end the run.
        with contextlib.suppress(RuntimeWarning):
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def watch(
    model: nn.Module,
    *,
    every: int = 50,
    observe: str = "beside",
    log: Callable[[dict[str, float], int], object] | str | Path | None = None,
    callbacks: Sequence[Callable[[Monitor], object]] = (),
    micro_batches: int = 1,
    declared_scale: Declared = None,
    keep: int = 1000,
) -> Monitor:
    """Watch the attention of any PyTorch model while it runs.

    On one call in `every`, the first included, each attention call inside is read: its Vitals per head, named by the
    path of the module. By default the model's own kernels run untouched, bit for bit, and the Reading is taken beside
    them; the calls between cost nothing that can be measured. A failure of ours becomes one warning and the call goes
    through. A compiled model is read inside its compiled graphs; where that cannot be, as with attention written out by
    hand, its sampled calls run uncompiled, and `Monitor.uncompiled` says why.

    Args:
        model: any nn.Module; compiled or not. `torch.compile(model, fullgraph=True)` must come before `watch`.
        every: sample one step in so many.
        observe: "beside" the model's own kernels, or "inside": fused calls run on attemper's operator, in one pass.
        log: called with (scalars, step) after each sample, as wandb.log is; or a file to which each sample is appended
            as a line of JSON.
        callbacks: each called with the Monitor after a sample.
        micro_batches: forward calls that make up one step; their Vitals are merged.
        declared_scale: the scale the model means to use where that is not 1/√d_k and its configuration does not say so:
            a number, a dict by path, or a function of the path.
        keep: samples kept in `history`.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> with watch(layer, every=1) as monitor:
    ...     _ = layer(torch.randn(2, 10, 32))
    >>> monitor.vitals["self_attn"].rows.tolist()
    [20, 20, 20, 20]
    """
    return Monitor(
        model,
        every=every,
        observe=observe,
        log=log,
        callbacks=callbacks,
        micro_batches=micro_batches,
        declared_scale=declared_scale,
        keep=keep,
    )


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        fix = "Pass the torch.nn.Module itself."
        raise FrameworkError(explain(f"model is {brief(model)}, not a torch module.", fix))


skip_code(Monitor._end.__code__)  # noqa: SLF001


def _require_file(path: str | Path) -> None:
    """Said at the start, before a sample is lost."""
    try:
        Path(path).open("a").close()
    except OSError as error:
        fix = "Pass the path of a file to append to, in a directory that exists."
        raise OptionError(explain(f"log is {brief(str(path))}: {error.strerror}.", fix)) from error


def _enter_model(model: nn.Module, monitor: Monitor) -> Callable[[], None]:
    """Have the model's calls go through the Monitor; returns what undoes it."""
    begin: Any = torch.compiler.disable(monitor._begin)  # noqa: SLF001
    sampled: Any = torch.compiler.disable(monitor._sampled)  # noqa: SLF001

    def entry(forward: Callable[..., Any], eager: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        step = begin()
        try:
            if step is not None:
                return sampled(step, forward, eager, get_eval_frame_callback(), args, kwargs)
            if monitor._hung:  # noqa: SLF001
                return eagerly(eager, *args, **kwargs)
            return forward(*args, **kwargs)
        finally:
            monitor._end(step)  # noqa: SLF001

    # Its own frame is never compiled, but what it calls may be.
    entry = torch.compiler.disable(entry, recursive=False)
    compiled = model.__dict__.get("_compiled_call_impl")
    if compiled is not None:
        # Compiled in place: what is hung into its inside would be baked in, or ignored.
        eager = model._call_impl  # noqa: SLF001
        return replace_attribute(model, "_compiled_call_impl", lambda *a, **k: entry(compiled, eager, a, k))
    own = model.__dict__.get("forward")
    if own is not None and (compiled_attribute(model) is not None or isinstance(model, torch.jit.ScriptModule)):
        # Copies make their own of it.
        return replace_attribute(model, "forward", functools.wraps(own)(lambda *a, **k: entry(own, own, a, k)))

    def through(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return entry(forward, forward, args, kwargs) if module is model else forward(*args, **kwargs)

    return override(model, through, own=own is not None)


def _once_after_backward(ended: Callable[[], None]) -> Callable[[], None]:
    queued = False

    def arrived() -> None:
        nonlocal queued
        if not queued:
            queued = True
            torch.autograd.Variable._execution_engine.queue_callback(ended)  # noqa: SLF001

    return arrived


def _merged(sessions: Sequence[Session | Pass]) -> dict[str, Vitals]:
    found: dict[str, Vitals] = {}
    for session in sessions:
        for vitals in session.vitals():
            path, heads = vitals.site.path, vitals.site.heads
            if path in found and found[path].site.heads != heads:
                # Nothing can be said of both together.
                path = f"{path} with {heads} heads"
                vitals = replace(vitals, site=replace(vitals.site, path=path))
            found[path] = found[path].merge(vitals) if path in found else vitals
    return found


def _summed_up(sessions: Sequence[Session | Pass]) -> Mapping[str, Vitals]:
    """The Vitals of a step; those of compiled passes when they are asked for, since they are still on their way."""
    later = all(isinstance(session, Pass) for session in sessions)
    return _Later(sessions) if later else _merged(sessions)


class _Later(Mapping[str, Vitals]):
    """Vitals that are not made before somebody looks at them."""

    def __init__(self, sessions: Sequence[Session | Pass]) -> None:
        self._sessions: Sequence[Session | Pass] | None = sessions
        self._found: dict[str, Vitals] = {}

    def _vitals(self) -> dict[str, Vitals]:
        if self._sessions is not None:
            self._found, self._sessions = _merged(self._sessions), None
        return self._found

    def __getitem__(self, path: str) -> Vitals:
        return self._vitals()[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._vitals())

    def __len__(self) -> int:
        return len(self._vitals())

    def __repr__(self) -> str:
        return repr(self._vitals())


def _append(path: Path, sample: Sample) -> None:
    line = {"schema": SCHEMA, "step": sample.step, "vitals": [v.to_dict() for v in sample.vitals.values()]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
