"""Readings summed up per head, with where they were taken: what is logged, saved and diagnosed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import Array, to_numpy
from ._errors import OptionError, ShapeError, explain
from ._reading import Reading, from_plain, summary, to_plain

SCHEMA = "attemper.vitals/1"

PerHead = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where and how a call was made."""

    path: str = ""
    """The module's name in the model, as `named_modules` gives it."""
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    model_dim: int | None = None
    scale_argument: float | tuple[float, ...] | None = None
    """What the call passed as scale; None for the default."""
    effective_scale: float | tuple[float, ...] | None = None
    """What multiplies the projections' q·k in all, wherever it is applied; None where it could not be measured."""
    declared_scale: float | tuple[float, ...] | None = None
    """What the model's configuration, or the caller, says it should be; None where nothing is said."""
    declared_by: str | None = None
    """Who said so: "attention_multiplier", "query_pre_attn_scalar", …"""
    projection_factor: float | None = None
    """The factor put on q and k between their projections and the call; None where the projections were not seen."""
    projected_head_dim: int | None = None
    """What a head is wide where it leaves its projection: less than head_dim when it was padded."""
    qk_norm: bool = False
    """Whether q or k was normalised after its projection; the effective scale is then what follows the norm."""
    product_scale: float | tuple[float, ...] | None = None
    """What multiplies q·k after the product was rounded to the dtype: 1 in fused kernels, which scale before."""
    softcap: float | None = None
    dtype: str | None = None
    mask: str | None = None
    """None, "bool" or "bias"."""
    causal: bool = False
    training: bool | None = None
    kind: str | None = None
    """How attention was written: "sdpa", "softmax", "MultiheadAttention", "flex_attention", …"""

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            name: to_plain(list(value) if isinstance(value, tuple) else value) for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Site:
        """The Site that `to_dict` wrote."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in record.items() if name in known}
        for name in ("scale_argument", "effective_scale", "declared_scale", "product_scale"):
            value = values.get(name)
            if isinstance(value, list):
                values[name] = tuple(float(from_plain(v)) for v in value)
            elif isinstance(value, str):
                values[name] = float(value)
        return cls(**values)


def _sum(meaning: str) -> Any:
    return field(metadata={"merge": "sum", "meaning": meaning})


def _max(meaning: str) -> Any:
    return field(metadata={"merge": "max", "meaning": meaning})


def _min(meaning: str) -> Any:
    return field(metadata={"merge": "min", "meaning": meaning})


def _mean(meaning: str, over: str = "rows") -> Any:
    return field(metadata={"merge": f"mean over {over}", "meaning": meaning})


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Vitals:
    """A Site and its Readings summed up per head; every field is of shape (heads,), but `total_pressure` of (1,).

    Means are over the rows that had a choice (two or more visible keys) and leave out what is not finite; the rows with
    none and with one are counted apart. Vitals merge over rows, calls, steps, micro-batches and ranks: sums add,
    maxima and minima compare, and a mean is weighted by `weights`, the number of values behind it. A field that no
    Reading had is NaN with weight 0, or −inf (+inf) for a maximum (minimum).
    """

    site: Site
    calls: int
    rows: PerHead = _sum("query rows")
    rows_without_keys: PerHead = _sum("rows that saw no key")
    rows_with_one_key: PerHead = _sum("rows that saw one key, so had nothing to decide")
    nonfinite: PerHead = _sum("rows with a score or output that is not finite")
    max_logit: PerHead = _max("largest score")
    max_qk: PerHead = _max("largest scaled q·k, before softcap and bias")
    least_normalized_entropy: PerHead = _min("lowest normalised entropy of any row")
    logsumexp: PerHead = _mean("ln Σ eˢ")
    expected_score: PerHead = _mean("Σ p·s")
    entropy: PerHead = _mean("−Σ p ln p")
    normalized_entropy: PerHead = _mean("entropy over ln visible_keys")
    largest_weight: PerHead = _mean("max p")
    collision: PerHead = _mean("Σ p²")
    effective_keys: PerHead = _mean("1 / Σp²")
    flow: PerHead = _mean("1 − Σp²: the trace of the softmax's Jacobian")
    score_mean: PerHead = _mean("mean score")
    score_std: PerHead = _mean("standard deviation of the scores of a row")
    visible_keys: PerHead = _mean("keys a row sees")
    first_key_weight: PerHead = _mean("weight on the first visible key")
    sink_mass: PerHead = _mean("weight taken by sinks")
    output_norm: PerHead = _mean("norm of the output row")
    gradient_flow: PerHead = _mean("share of the upstream gradient that passes the softmax")
    pressure: PerHead = _mean(
        "gradient of the loss to the log of the scale, summed over a sequence's rows", over="sequences"
    )
    pressure_spread: PerHead = field(
        metadata={
            "merge": "pairwise",
            "meaning": "Σ (pressure − mean)² over sequences; gives pressure_error",
        }
    )
    total_pressure: PerHead = _mean("pressure of all heads together", over="sequences")
    total_pressure_spread: PerHead = field(
        metadata={
            "merge": "pairwise",
            "meaning": "Σ (total_pressure − mean)² over sequences; gives total_pressure_error",
        }
    )
    padding_weight: PerHead = _mean("weight on keys that the caller's mask calls padding")
    weights: Mapping[str, PerHead] = field(repr=False)
    """For each mean, the number of rows (sequences) behind it."""

    @classmethod
    def of(
        cls,
        reading: Reading,
        site: Site | None = None,
        *,
        rows: Array | None = None,
        padding_weight: Array | None = None,
    ) -> Vitals:
        """Sum up one Reading.

        Args:
            reading: what one call measured.
            site: where; its head count must be the Reading's.
            rows: bool, (*batch, queries): the rows to count; the rest, of padding, are left out. None counts all.
            padding_weight: the weight that each row put on padding, in the Reading's shape.
        """
        shape = reading.shape
        heads = 1 if len(shape) == 1 else shape[-2] if shape else 0
        if site is None:
            site = Site(heads=heads)
        if shape and site.heads != heads:
            headline = f"The Reading has {heads} heads, but its Site has {site.heads}."
            raise ShapeError(explain(headline, "Pass the Site of the call that was read."))
        if padding_weight is not None and tuple(padding_weight.shape) != shape:
            headline = f"padding_weight has shape {tuple(padding_weight.shape)}, but the Reading's is {shape}."
            raise ShapeError(explain(headline, "Pass one number per row."))

        @cache
        def columns(name: str) -> Any:
            """(sequences, heads, queries), or None."""
            value = padding_weight if name == "padding_weight" else getattr(reading, name)
            if value is None:
                return None
            array = to_numpy(value)
            return array.reshape(math.prod(array.shape[:-2]), heads, array.shape[-1])

        visible = columns("visible_keys")
        if shape and visible is None:
            fix = "Read with stats='all', or name 'visible_keys' among the stats."
            raise OptionError(explain("The Reading has no visible_keys to weigh its rows by.", fix))
        count = site.heads
        if visible is None:
            visible = np.zeros((0, count, 0))
        taken = np.ones(visible.shape, dtype=bool)
        if rows is not None:
            wanted = (*shape[:-2], *shape[-1:])
            if tuple(rows.shape) != wanted:
                headline = f"rows has shape {tuple(rows.shape)}, but the Reading's rows are {wanted}."
                raise ShapeError(explain(headline, "Pass one bool per batch entry and query."))
            taken &= to_numpy(rows).astype(bool).reshape(visible.shape[0], 1, visible.shape[2])
        values: dict[str, Any] = {
            "rows": taken.sum(axis=(0, 2)),
            "rows_without_keys": (taken & (visible == 0)).sum(axis=(0, 2)),
            "rows_with_one_key": (taken & (visible == 1)).sum(axis=(0, 2)),
        }
        weights: dict[str, PerHead] = {}
        deciding = taken & (visible > 1)
        decided = deciding.sum(axis=(0, 2))
        for name, merge in _MERGES.items():
            if name in values or merge == "pairwise":
                continue
            source = {"least_normalized_entropy": "normalized_entropy", "total_pressure": "pressure"}.get(name, name)
            column = columns(source)
            column = np.zeros((0, count, 0)) if column is None else column.astype(np.float64)
            among = taken if column.shape == visible.shape else np.ones(column.shape, dtype=bool)
            if merge == "sum":
                values[name] = np.where(among, column, 0).sum(axis=(0, 2)).astype(np.int64)
            elif merge == "max":
                values[name] = np.fmax.reduce(np.where(among, column, np.nan), axis=(0, 2), initial=-np.inf)
            elif merge == "min":
                values[name] = np.fmin.reduce(np.where(among, column, np.nan), axis=(0, 2), initial=np.inf)
            elif merge == "mean over rows":
                counted = deciding if column.shape == visible.shape else among
                weights[name] = decided if counted is deciding else counted.sum(axis=(0, 2))
                with np.errstate(invalid="ignore"):
                    total = column.sum(axis=(0, 2), where=counted)
                if not np.isfinite(total).all():
                    # Only then is there something to leave out.
                    counted = counted & np.isfinite(column)
                    weights[name], total = counted.sum(axis=(0, 2)), column.sum(axis=(0, 2), where=counted)
                values[name] = _divide(total, weights[name])
            else:
                per_sequence = np.where(among, column, 0).sum(axis=2)
                if name == "total_pressure":
                    per_sequence = per_sequence.sum(axis=1, keepdims=True)
                    among = np.any(among, axis=1, keepdims=True)
                # A sequence of padding alone is none.
                counted = np.isfinite(per_sequence) & np.any(among, axis=2)
                weights[name] = counted.sum(axis=0)
                values[name] = _divide(np.where(counted, per_sequence, 0).sum(axis=0), weights[name])
                apart = np.where(counted, per_sequence, values[name]) - values[name]
                values[f"{name}_spread"] = np.where(weights[name] > 0, (apart**2).sum(axis=0), 0)
        return cls(site=site, calls=1, weights=weights, **values)

    @classmethod
    def of_sums(cls, site: Site, values: Mapping[str, PerHead], weights: Mapping[str, PerHead]) -> Vitals:
        """One call that somebody else summed up: fields, and weights of the means; what is missing is unmeasured."""
        nothing = cls.of(Reading(backend=""), site)
        found = {name: values.get(name, getattr(nothing, name)) for name in _MERGES}
        return cls(site=site, calls=1, weights={**nothing.weights, **weights}, **found)

    def merge(self, other: Vitals) -> Vitals:
        """The Vitals of both together; associative and commutative up to rounding."""
        if (self.site.path, self.site.heads) != (other.site.path, other.site.heads):
            one, two = (f"{s.path or '(no path)'} with {s.heads} heads" for s in (self.site, other.site))
            fix = "Merge Vitals of one Site only."
            raise ShapeError(explain(f"Cannot merge the Vitals of {one} with those of {two}.", fix))
        values: dict[str, Any] = {}
        weights: dict[str, PerHead] = {}
        for name, merge in _MERGES.items():
            one, two = getattr(self, name), getattr(other, name)
            if merge == "sum":
                values[name] = one + two
            elif merge == "max":
                values[name] = np.fmax(one, two)
            elif merge == "min":
                values[name] = np.fmin(one, two)
            elif merge.startswith("mean"):
                here, there = self.weights[name], other.weights[name]
                weights[name] = here + there
                values[name] = _divide(_times(one, here) + _times(two, there), weights[name])
            else:
                mean = name.removesuffix("_spread")
                here, there = self.weights[mean], other.weights[mean]
                both = (here > 0) & (there > 0)
                delta = np.where(both, getattr(other, mean) - getattr(self, mean), 0)
                share = here * there / np.maximum(here + there, 1)
                values[name] = one + two + delta**2 * share
        return Vitals(site=self.site, calls=self.calls + other.calls, weights=weights, **values)

    @property
    def pressure_error(self) -> PerHead:
        """The standard error of `pressure` over sequences; NaN with fewer than two."""
        return self._error("pressure")

    @property
    def total_pressure_error(self) -> PerHead:
        """The standard error of `total_pressure` over sequences; NaN with fewer than two."""
        return self._error("total_pressure")

    def _error(self, name: str) -> PerHead:
        n = self.weights[name]
        variance = _divide(getattr(self, f"{name}_spread"), np.where(n > 1, n * (n - 1), 0))
        return np.asarray(np.sqrt(variance))

    def to_scalars(self, *, per_head: bool = False) -> dict[str, float]:
        """A flat dict for any logger: `path/field` over the heads, and with `per_head` `path/head_3/field`.

        Over the heads sums add, maxima and minima compare, means are weighted; what was not measured is left out.
        """
        prefix = f"{self.site.path}/" if self.site.path else ""
        scalars: dict[str, float] = {}
        for name, merge in _MERGES.items():
            # Over the heads the pressures add, which is their total; that has no heads.
            if merge == "pairwise" or name == "total_pressure":
                continue
            values = getattr(self, name).astype(np.float64)
            known = np.isfinite(values)
            if not known.any():
                continue
            if merge == "sum":
                total = values.sum()
            elif merge == "max":
                total = values[known].max()
            elif merge == "min":
                total = values[known].min()
            elif name == "pressure":
                # Every head's scale moves at once: the pressures add.
                total = values[known].sum()
            else:
                total = np.average(values[known], weights=self.weights[name][known])
            scalars[f"{prefix}{name}"] = float(total)
            if per_head:
                for head in np.flatnonzero(known):
                    scalars[f"{prefix}head_{head}/{name}"] = float(values[head])
        return scalars

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers under a schema name, fit for JSON."""
        return {
            "schema": SCHEMA,
            "site": self.site.to_dict(),
            "calls": self.calls,
            **{name: to_plain(getattr(self, name)) for name in _MERGES},
            "weights": {name: to_plain(value) for name, value in self.weights.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Vitals:
        """The Vitals that `to_dict` wrote."""
        if record.get("schema") != SCHEMA:
            fix = f"This version reads {SCHEMA}."
            raise OptionError(explain(f"The record's schema is {record.get('schema')!r}.", fix))
        missing = [name for name in ("site", "calls", "weights", *_MERGES) if name not in record]
        if missing:
            fix = "Pass what Vitals.to_dict wrote, whole."
            raise OptionError(explain(f"The record lacks {', '.join(missing)}.", fix))
        return cls(
            site=Site.from_dict(record["site"]),
            calls=record["calls"],
            weights={name: from_plain(v, np.int64) for name, v in record["weights"].items()},
            **{
                name: from_plain(record[name], np.int64 if merge == "sum" else np.float64)
                for name, merge in _MERGES.items()
            },
        )

    def __repr__(self) -> str:
        site = self.site
        rows = int(self.rows.sum())
        head = f"Vitals({site.path or 'no path'}; heads {site.heads}, calls {self.calls}, rows {rows})"
        shown = [
            f"  {name:<24}  {summary(getattr(self, name))}"
            for name in _MERGES
            if not name.endswith("_spread") and np.isfinite(getattr(self, name)).any()
        ]
        return "\n".join([head, *shown])


_MERGES = {f.name: str(f.metadata["merge"]) for f in fields(Vitals) if "merge" in f.metadata}


def field_table() -> list[tuple[str, str, str]]:
    """(field, meaning, merge) of each."""
    return [(f.name, f.metadata["meaning"], f.metadata["merge"]) for f in fields(Vitals) if f.name in _MERGES]


def _divide(total: PerHead, count: PerHead) -> PerHead:
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _times(value: PerHead, weight: PerHead) -> PerHead:
    return np.where(weight > 0, value * weight, 0)
