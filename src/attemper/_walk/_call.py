"""One attention call: its operands, its own scale, and what it gives under another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._attend import Trace, attend, trace
from .._reading import Reading


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """The operands of one attention call as NumPy arrays, one sequence, masks and all."""

    path: str
    x: NDArray[Any] | None
    """(tokens, model_dim): what the module that makes the call was given; None where that was not seen."""
    q: NDArray[Any]
    """(heads, queries, head_dim), before any scale"""
    k: NDArray[Any]
    """(kv_heads, keys, head_dim)"""
    v: NDArray[Any] | None
    """(kv_heads, keys, value_dim); None where they were not seen"""
    scale: tuple[float, ...]
    """What multiplies q·kᵀ in all, one per head."""
    model_dim: int | None = None
    mask: NDArray[Any] | None = None
    """(heads or 1, queries, keys): bool, True = attend, or added to the scores."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """is_causal and softcap, as `attend` takes them."""
    sinks: NDArray[Any] | None = None
    """A logit per head that joins the denominator only."""
    kind: str = "sdpa"

    @property
    def heads(self) -> int:
        return int(self.q.shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[-1])

    def one_head(self, head: int) -> dict[str, Any]:
        """What `attend` takes for one head, rank 2."""
        group = self.heads // self.k.shape[0]
        given = {
            "q": self.q[head],
            "k": self.k[head // group],
            "v": self.k[head // group] if self.v is None else self.v[head // group],
            **self.options,
        }
        if self.mask is not None:
            given["attn_mask"] = self.mask[head if len(self.mask) > 1 else 0]
        if self.sinks is not None:
            given["sinks"] = self.sinks[head : head + 1]
        return given

    def row(self, query: int, scale: tuple[float, ...]) -> NDArray[Any]:
        """(heads, keys): the weights of one query under this scale, one per head."""
        weights: NDArray[Any] = self._steps(query, scale).weights[:, 0]
        return weights

    def sees(self, query: int) -> NDArray[np.bool_]:
        """(keys,): what any head of one query sees."""
        seen: NDArray[np.bool_] = (self._steps(query, self.scale).masked[:, 0] != -np.inf).any(axis=0)
        return seen

    def _steps(self, query: int, scale: tuple[float, ...]) -> Trace:
        given: dict[str, Any] = {"k": self.k, "v": self.k if self.v is None else self.v, **self.options}
        if self.mask is not None:
            given["attn_mask"] = self.mask[:, query : query + 1]
        if self.sinks is not None:
            given["sinks"] = self.sinks
        if self.options.get("is_causal"):
            given["query_offset"] = query
        shared = self.heads != self.k.shape[0]
        return trace(self.q[:, query : query + 1], **given, scale=np.asarray(scale), enable_gqa=shared)


def take(given: Mapping[str, Any], scale: float) -> tuple[Trace, Reading]:
    """Every step of a call as a matrix, and its Reading: both from the operator."""
    operands = dict(given)
    return trace(**operands, scale=scale), attend(**operands, scale=scale).reading
