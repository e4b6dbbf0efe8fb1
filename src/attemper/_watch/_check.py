"""`check`: one pass through a model, and what it says about the temperature of its attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checkup import Checkup
from .._diagnose import diagnose, of_probe
from .._errors import OptionError, brief, explain
from .._finding import SEVERITIES
from .._symptoms import no_pressure
from ._declared import Declared, looks_trained, require_declared
from ._lineage import tensors
from ._monitor import _require_module
from ._session import Session

FACTORS = (0.5, 0.5**0.5, 1.0, 2**0.5, 2.0)
"""What a probe multiplies every scale by."""

Progress = Callable[[str, int, int], object]


def check(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    probe: bool = False,
    trained: bool | None = None,
    declared_scale: Declared = None,
    progress: Progress | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> Checkup:
    """Run a model once and say what is wrong with the scale of its attention, why, and how to mend it.

    The model runs in evaluation mode on its own kernels; its parameters, their gradients and its mode are left as they
    were. With a loss there is one backward pass, which measures the *pressure* on every head's scale: in a trained
    model it tells a wrong temperature, and where.

    Args:
        model: any nn.Module.
        *inputs: passed to the model. Several sequences in the batch give the pressure a standard error.
        loss: from the model's output to a scalar, the mean over the batch. None takes the model's own: its output's
            `loss`, or the output itself where that is one number.
        probe: rerun with every scale ×½, ×1/√2, ×1, ×√2 and ×2; the loss of a trained model is least at ×1.
        trained: whether the weights are trained, so that pressure means something; None looks at the norms' gains.
        declared_scale: as in `watch`.
        progress: called with (stage, done, total) as it goes.
        name: what to call the model.
        **kwargs: passed to the model.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> checkup = check(layer, torch.randn(2, 10, 32), loss=lambda output: output.square().mean())
    >>> checkup.findings[0].headline
    'The weights do not look trained, so the pressure says nothing about the temperature.'
    >>> checkup.vitals[0].site.effective_scale == 8**-0.5
    True
    """
    _require_module(model)
    given: Any = loss
    if given is not None and not callable(given):
        fix = "Pass a function of the model's output that returns one number."
        raise OptionError(explain(f"loss is {brief(given)}.", fix))
    require_declared(declared_scale, model)
    _require_initialised(model)
    run = _Run(model, inputs, kwargs, loss, declared_scale, progress)
    with _at_rest(model):
        session, value = run.read()
        gradients = value is not None and run.differentiate(session, value)
        session.release()
        losses = run.probe(value) if probe else ()
    if trained is None:
        trained = looks_trained(model)
    vitals = tuple(record.vitals() for record in session.records)
    unseen = {**session.unseen, **run.failures}
    pressure = _sequence_pressure(session) if gradients else ()
    findings = diagnose(vitals, trained=trained, unseen=unseen)
    if value is not None and vitals and not any(map(math.isfinite, pressure)):
        findings.append(no_pressure())
    findings.extend(finding for finding in of_probe(losses, trained) if finding.rule not in {f.rule for f in findings})
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Checkup(
        model=_describe(model, name, trained),
        vitals=vitals,
        findings=tuple(findings),
        unseen=unseen,
        inputs=_shapes(inputs, kwargs),
        sequences=_sequences(session),
        loss=None if value is None else float(value.detach()),
        sequence_pressure=pressure,
        probe=losses,
        version=_version(),
    )


def _require_initialised(model: nn.Module) -> None:
    """To run a lazy module is to change it, which a check does not do."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            fix = "Run the model once on these inputs, as its own lazy modules need, and check it then."
            raise OptionError(explain(f"{name} has no shape yet.", fix))


class _Run:
    """The passes of one check."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], Any] | None,
        declared: Declared,
        progress: Progress | None,
    ) -> None:
        self.model, self.inputs, self.kwargs, self.loss = model, inputs, kwargs, loss
        self.declared = declared
        self.progress = progress or (lambda *_: None)
        self.failures: dict[str, str] = {}
        self.sites = 0

    def read(self) -> tuple[Session, Tensor | None]:
        """The session of a pass, and the loss; with a graph where there is a loss to differentiate."""
        able = not any(x.is_inference() for x in (*self.model.parameters(), *tensors(self.inputs, self.kwargs)))
        promising = able and (self.loss is not None or any("label" in name for name in self.kwargs))
        with torch.set_grad_enabled(promising):
            session, output = self._pass()
            value = self._loss(output)
        if value is not None and able and not promising:
            with torch.enable_grad():
                session, output = self._pass()
                value = self._loss(output)
        self.sites = len(session.records)
        return session, value

    def differentiate(self, session: Session, value: Tensor) -> bool:
        """One backward pass, to what was watched and no further: the parameters' gradients stay as they are."""
        wanted, session.wanted = session.wanted or [], None
        if not (wanted and value.requires_grad):
            return False
        done = 0

        def arrived() -> None:
            nonlocal done
            done += 1
            self.progress("backward", min(done, len(wanted)), len(wanted))

        session.arrived = arrived
        torch.autograd.grad(value, wanted, allow_unused=True)
        return True

    def probe(self, value: Tensor | None) -> tuple[tuple[float, float], ...]:
        if value is None:
            fix = "Pass loss=, or labels to a model that returns its loss."
            raise OptionError(explain("A probe compares losses, and there is no loss.", fix))
        if not self.sites:
            fix = "Leave probe=False; then `unseen` lists what looks like attention and could not be read."
            raise OptionError(explain("A probe multiplies the scales of attention, and none was read.", fix))
        found = []
        for done, factor in enumerate(FACTORS):
            self.progress("probe", done, len(FACTORS))
            session = Session(self.model, failed=self._failed, reading=False, factor=factor)
            with torch.no_grad():
                value = self._loss(session.run(self.model, self.inputs, self.kwargs))
            if session.unprobed:
                fix = "Leave probe=False, or run the model on another attention implementation."
                where = ", ".join(sorted(session.unprobed))
                raise OptionError(explain(f"A probe cannot reach the scale inside the kernels of {where}.", fix))
            found.append((factor, math.nan if value is None else float(value)))
        self.progress("probe", len(FACTORS), len(FACTORS))
        return tuple(found)

    def _pass(self) -> tuple[Session, Any]:
        session = Session(
            self.model,
            failed=self._failed,
            declared=self.declared,
            progress=lambda done: self.progress("forward", done, max(done, self.sites)),
        )
        session.wanted = []
        return session, session.run(self.model, self.inputs, self.kwargs)

    def _loss(self, output: Any) -> Tensor | None:
        if self.loss is not None:
            value: Any = self.loss(output)
            if not isinstance(value, Tensor) or value.numel() != 1:
                fix = "Return one number: a tensor with a single element."
                raise OptionError(explain(f"loss returned {brief(value)}.", fix))
            return value.reshape(())
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if value is None and isinstance(output, Tensor):
            value = output
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return value.reshape(())
        return None

    def _failed(self, path: str, error: Exception) -> None:
        self.failures[path] = f"reading it failed: {type(error).__name__}: {error}"


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and with parameters that carry gradients, both as they were afterwards."""
    was = [(module, module.training) for module in model.modules()]
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad and not p.is_inference()]
    model.eval()
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        # By its own method first, which may do more than set the flags.
        model.train(was[0][1])
        for module, training in was:
            module.training = training


def _sequences(session: Session) -> int:
    counts = Counter(record.sequences for record in session.records)
    if session.sequences in counts or not counts:
        return session.sequences
    return counts.most_common(1)[0][0]


def _sequence_pressure(session: Session) -> tuple[float, ...]:
    total = torch.zeros(_sequences(session), dtype=torch.float64)
    measured = False
    for record in session.records:
        rows = record.sequence_pressure
        if rows is not None:
            measured = True
            each = rows.double().sum((1, 2)).cpu()
            # A call with entries of its own, such as a prompt shared by all, counts for every sequence alike.
            total += each if each.shape == total.shape else each.mean()
    return tuple(total.tolist()) if measured else ()


def _describe(model: nn.Module, name: str | None, trained: bool | None) -> dict[str, Any]:
    kind = type(getattr(model, "_orig_mod", model)).__name__
    parameters = list(model.parameters())
    first = parameters[0] if parameters else None
    said = getattr(getattr(model, "config", None), "_name_or_path", "")
    return {
        "name": name or said or kind,
        "kind": kind,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": None if first is None else str(first.dtype).removeprefix("torch."),
        "device": None if first is None else str(first.device),
        "trained": trained,
    }


def _shapes(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = [*((f"input {i}", x) for i, x in enumerate(inputs)), *kwargs.items()]
    shown = [f"{name} {' × '.join(map(str, x.shape))}" for name, x in named if isinstance(x, Tensor) and x.dim()]
    return ", ".join(shown)


def _version() -> str:
    from .. import __version__

    return __version__
