"""What one call measured, per query row."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ._arrays import Array, device_name, to_numpy
from ._errors import OptionError, brief, explain, unknown

SCHEMA = "attemper.reading/1"


class _AfterBackward:
    """A field that a backward pass fills: as given, or found in the tensor in which the backward pass leaves it."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, reading: Reading | None, owner: type) -> Array | None:
        if reading is None:
            return None  # the default of the dataclass field
        given = reading.__dict__.get(self.name)
        waiting = reading.gradients
        if (
            given is not None
            or waiting is None
            or self.name[1:] not in reading.awaited
            or waiting.is_meta
            or sys.modules["torch"].compiler.is_compiling()
        ):
            return given
        # The first number says whether the backward pass was here; axes in front are those of vmap.
        if not waiting[..., 0].any():
            return None
        lead = waiting.shape[:-1]
        return waiting[..., 1:].reshape(*lead, 2, *reading.rows).select(len(lead), self.place)

    def __set__(self, reading: Reading, value: Array | None) -> None:
        reading.__dict__[self.name] = value


class _Measured:
    """A field that a backend fills: as given, or cut out, when it is first asked for, of what a backend kept together.

    Not a data descriptor: a value in the instance's __dict__ comes first, and then this costs nothing.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, reading: Reading | None, owner: type) -> Array | None:
        if reading is None:
            return None  # the default of the dataclass field
        together: Together = reading.__dict__["_together"]
        value = reading.__dict__[self.name] = together.part(self.name)
        return value


class Together(NamedTuple):
    """All fields of a Reading in one piece of memory: twelve rows of floating numbers behind two of whole ones."""

    memory: Array
    """Words of 64 bits."""
    shape: tuple[int, ...]
    wide: Any
    """The dtype of the floating numbers."""
    values: bool
    """Whether there were any: without them an output has no norm."""
    gradients: Array | None
    """What no backward pass will fill: the Readings of all calls have the same parts."""

    def part(self, name: str) -> Array | None:
        if name == "output_norm" and not self.values:
            return None
        size = math.prod(self.shape)
        if name in WHOLE:
            start = WHOLE.index(name) * size
            return self.memory[start : start + size].reshape(self.shape)
        start = FLOATING.index(name) * size
        return self.memory[2 * size :].view(self.wide)[start : start + size].reshape(self.shape)


WHOLE = ("visible_keys", "nonfinite")
FLOATING = (
    "max_logit",
    "logsumexp",
    "expected_score",
    "entropy",
    "largest_weight",
    "collision",
    "score_mean",
    "score_std",
    "max_qk",
    "first_key_weight",
    "sink_mass",
    "output_norm",
)
"""In the order in which `Together` has them."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Reading:
    """What happened inside the softmax, per (*batch, head, query).

    Float32 or wider whatever the input type; natural logarithm; after scale, softcap, bias and mask; a sink logit
    excluded. A field that was not asked for, or that needs a backward pass that has not run, is None.

    A row that sees no key has `max_logit`, `logsumexp` and `max_qk` −inf, `normalized_entropy` NaN and 0 elsewhere; a
    row that sees one has entropy 0, flow 0 and `normalized_entropy` NaN.
    """

    backend: str
    """The backend that ran."""
    max_logit: Array | None = _Measured()
    """The largest score."""
    logsumexp: Array | None = _Measured()
    """ln Σ eˢ: the log of the softmax's denominator, in nats."""
    expected_score: Array | None = _Measured()
    """Σ p·s: the score a weight falls on."""
    entropy: Array | None = _Measured()
    """−Σ p ln p, between 0 (one key takes all) and ln visible_keys (all alike)."""
    largest_weight: Array | None = _Measured()
    """max p."""
    collision: Array | None = _Measured()
    """Σ p²: the chance that two draws from the weights meet."""
    score_mean: Array | None = _Measured()
    """The mean of the scores of the visible keys."""
    score_std: Array | None = _Measured()
    """Their standard deviation (over the population: divided by visible_keys)."""
    visible_keys: Array | None = _Measured()
    """How many keys the row sees."""
    max_qk: Array | None = _Measured()
    """The largest scaled q·k, before softcap and bias: what QK-clip needs."""
    first_key_weight: Array | None = _Measured()
    """The weight on the first visible key: the usual attention sink."""
    sink_mass: Array | None = _Measured()
    """The weight that `sinks` took."""
    output_norm: Array | None = _Measured()
    """The Euclidean norm of the output row; None from `read`, which has no values."""
    nonfinite: Array | None = _Measured()
    """1 where a visible score or the output is not finite, else 0."""
    gradient_flow: Array | None = _AfterBackward(0)
    """Var_p[dP] / Var[dP]: the share of the upstream gradient that passes the softmax. After a backward pass."""
    pressure: Array | None = _AfterBackward(1)
    """The gradient of the loss to the log of the scale. After a backward pass."""
    gradients: Array | None = None
    """Where a torch backward pass leaves those two; read them instead."""
    rows: tuple[int, ...] = ()
    """(*batch, heads, queries), for `gradients`."""
    awaited: tuple[str, ...] = ()
    """What was asked for of `gradients`."""

    @property
    def normalized_entropy(self) -> Array | None:
        """Entropy over ln visible_keys, in [0, 1]; NaN for a row that sees fewer than two keys."""
        if self.entropy is None or self.visible_keys is None:
            return None
        xp = _namespace(self.entropy)
        choice = self.visible_keys > 1
        keys = xp.asarray(xp.where(choice, self.visible_keys, 2), dtype=self.entropy.dtype)
        return xp.where(choice, self.entropy / xp.log(keys), float("nan"))

    @property
    def effective_keys(self) -> Array | None:
        """1 / Σp²: the number of keys that, sharing alike, would collide as often; 0 for a row that sees none."""
        if self.collision is None:
            return None
        xp = _namespace(self.collision)
        return xp.where(self.collision == 0, 0, 1 / xp.where(self.collision == 0, 1, self.collision))

    @property
    def flow(self) -> Array | None:
        """1 − Σp² = Σ p(1−p): the trace of the softmax's Jacobian, in [0, 1 − 1/visible_keys]."""
        if self.collision is None:
            return None
        # Only a row that sees nothing has no collisions at all, and nothing flows through it.
        return _namespace(self.collision).where(self.collision == 0, 0, 1 - self.collision)

    @property
    def shape(self) -> tuple[int, ...]:
        """(*batch, heads, queries); () when nothing was measured."""
        for name in MEASURED:
            value = getattr(self, name)
            if value is not None:
                return tuple(value.shape)
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON; fields not measured are left out."""
        record: dict[str, Any] = {"schema": SCHEMA, "backend": self.backend, "shape": list(self.shape)}
        for name in FIELDS:
            value = getattr(self, name)
            if value is not None:
                record[name] = to_plain(to_numpy(value))
        return record

    def __repr__(self) -> str:
        shape = self.shape
        axes = ("batch",) * (len(shape) - 2) + ("heads", "queries")[-len(shape) :] if shape else ()
        where = ", ".join(f"{axis} {n}" for axis, n in zip(axes, shape, strict=True))
        measured = [name for name in FIELDS if getattr(self, name) is not None]
        place = ""
        if measured and device_name(getattr(self, measured[0])) not in ("numpy", "cpu"):
            place = f" on {device_name(getattr(self, measured[0]))}"
        lines = [f"Reading({where or 'nothing measured'}; backend {self.backend}{place})"]
        if place == " on meta":  # where tensors have no numbers
            return "\n".join(lines + [f"  {name}" for name in measured])
        return "\n".join(lines + [f"  {name:<18}  {summary(to_numpy(getattr(self, name)))}" for name in measured])


MEASURED = tuple(
    field.name for field in fields(Reading) if field.name not in ("backend", "gradients", "rows", "awaited")
)
"""The fields a backend fills, in order."""

AFTER_BACKWARD = ("gradient_flow", "pressure")
"""The fields that a backward pass fills."""

LEAVES = (*(f"_{name}" if name in AFTER_BACKWARD else name for name in MEASURED), "gradients")
"""What a Reading keeps of arrays, by the names in its __dict__."""

_BLANK = dict.fromkeys(LEAVES)


def reading_of(measured: dict[str, Array], *, backend: str, rows: tuple[int, ...], awaited: tuple[str, ...]) -> Reading:
    """The Reading of a call, from what its backend measured."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return Reading(backend=backend, rows=rows, awaited=awaited, **measured)
    # Without the constructor, which sets twenty frozen fields one by one: as long as all else around a small call.
    reading = object.__new__(Reading)
    vars(reading).update(_BLANK, **measured, backend=backend, rows=rows, awaited=awaited)
    return reading


_UNFILLED = {name: None for name in _BLANK if name not in (*WHOLE, *FLOATING)}


def reading_together(together: Together, *, backend: str, awaited: tuple[str, ...]) -> Reading:
    """The Reading of a call whose fields are in one piece of memory."""
    reading = object.__new__(Reading)
    vars(reading).update(
        _UNFILLED,
        _together=together,
        gradients=together.gradients,
        backend=backend,
        rows=together.shape,
        awaited=awaited,
    )
    return reading


def changed(reading: Reading, **values: Any) -> Reading:
    """A copy with other values in some fields; unlike dataclasses.replace it leaves together what lies together."""
    copy = object.__new__(Reading)
    own = {f"_{name}" if name in AFTER_BACKWARD else name: value for name, value in values.items()}
    vars(copy).update({**vars(reading), **own})
    return copy


DERIVED = {
    "normalized_entropy": ("entropy", "visible_keys"),
    "effective_keys": ("collision",),
    "flow": ("collision",),
}
"""The fields a Reading works out when asked, and what from."""

FIELDS = (*MEASURED, *DERIVED)


_ALONE = {
    "all": frozenset(MEASURED),
    "none": frozenset[str](),
    **{name: frozenset(DERIVED.get(name, (name,))) for name in FIELDS},
}
"""The measured fields that each word asks for."""


def choose(stats: object) -> frozenset[str]:
    """The measured fields that `stats="all"`, `"none"`, a name or several names ask for."""
    if isinstance(stats, str):
        if stats not in _ALONE:
            raise unknown("statistic", stats, ("all", "none", *FIELDS))
        return _ALONE[stats]
    names: Any = () if stats is None else stats
    if not isinstance(names, (tuple, list, set, frozenset)):
        fix = "Pass 'all', 'none', or names of Reading fields."
        raise OptionError(explain(f"stats is {brief(stats)}.", fix))
    wanted: set[str] = set()
    for name in names:
        # 'all' and 'none' stand alone, never among names.
        if not isinstance(name, str) or name not in FIELDS:
            raise unknown("statistic", name, FIELDS)
        wanted.update(_ALONE[name])
    return frozenset(wanted)


def _namespace(x: Array) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return np
    import torch

    return torch


def to_plain(values: Any) -> Any:
    """Nested lists in which JSON can carry what it has no word for: NaN as None, infinities as strings."""
    if isinstance(values, np.ndarray):
        return [to_plain(v) for v in values.tolist()] if values.ndim else to_plain(values.item())
    if isinstance(values, list):
        return [to_plain(v) for v in values]
    if isinstance(values, float) and not np.isfinite(values):
        return None if np.isnan(values) else str(values)
    return values


def from_plain(values: Any, dtype: Any = np.float64) -> Any:
    """The array that `to_plain` wrote."""

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [number(v) for v in value]
        return float("nan") if value is None else value

    # NumPy reads "inf" and "-inf" itself.
    return np.asarray(number(values), dtype=dtype)


def summary(values: Any) -> str:
    """Least, mean and greatest of the finite values, and how many are not."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    finite = flat[np.isfinite(flat)]
    if not flat.size:
        return "empty"
    odd = f"  ({flat.size - finite.size} of {flat.size} not finite)" if finite.size < flat.size else ""
    if not finite.size:
        return odd.strip(" ()")
    return f"{finite.min():>10.4g} … {finite.max():<10.4g} mean {finite.mean():.4g}{odd}"
