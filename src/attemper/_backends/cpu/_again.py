"""A call that was made before, once more: the words are written, only the addresses are new."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..._arrays import Array
from ..._problem import Problem
from ..._reading import Together
from . import _slots as slot
from ._code import address as address_of
from ._sheet import Operand, Plan, address_in_memory, desk_with, parts_of, plan, put_per_head, workers_for
from ._threads import function_at, run, threads


class Again:
    """Attention with all statistics, or none, for operands of one shape and layout."""

    def __init__(self, problem: Problem, planned: Plan, bounds: tuple[Operand, Operand] | None, *, stats: bool) -> None:
        rows = (*problem.batch, problem.heads, problem.queries)
        self.rows = rows[1:] if problem.one_head else rows
        self.out_shape = None if problem.v is None else (*self.rows, problem.value_dim)
        self.stats = stats
        self.workers = workers_for(planned.tasks, planned.products)
        self.room = planned.scratch * self.workers
        self.kernel = address_of(planned.kernel)
        self.alone = function_at(self.kernel)
        words = self.words = planned.words.copy()
        words[slot.TASKS], words[slot.ROOMS], words[slot.SCRATCH_BYTES] = planned.tasks, self.workers, planned.scratch
        scale = np.array([[problem.scale]])
        parts, powers = parts_of(scale, whole=planned.pairs)
        words[slot.SCALE], words[slot.POWER] = put_per_head(words, slot.SCALE_BATCH, parts), address_in_memory(powers)
        if bounds is not None:
            words[slot.FIRST], words[slot.STOP] = bounds[0].address, bounds[1].address
        self.kept = (problem.bounds, parts, powers)  # what those addresses point to
        size, item = planned.rows, planned.item
        self.gradients: Array | None = None
        self.size = self.room + 8 * size
        offsets = (*(16 * size + i * size * item for i in range(12)), 0, 8 * size)
        self.fields = tuple(enumerate(offsets, slot.MAX_LOGIT))
        self.memory_words = 2 * size + -(-12 * size * item // 8)
        if problem.framework == "numpy":
            self.wide: Any = np.dtype(np.float64 if item == 8 else np.float32)
            self.empty: Any = np.empty
            self.integer: Any = np.dtype(np.int64)
            self.address: Any = address_in_memory
        else:
            import torch

            self.wide = torch.float64 if item == 8 else torch.float32
            self.gradients = torch.zeros(1 + 2 * size, dtype=self.wide)
            self.empty, self.integer, self.address = torch.empty, torch.int64, torch.Tensor.data_ptr
        self.dtype = problem.q.dtype

    def __call__(self, q: Array, k: Array, v: Array | None = None) -> tuple[Array | None, Together | None] | None:
        desk, address = desk_with(self.size), self.address
        desk.words[:] = self.words
        # One by one through this view: through the array each takes three times as long.
        view = desk.view
        view[_SCRATCH], view[_SUSPECT] = desk.scratch, desk.scratch + self.room
        view[_Q], view[_K] = address(q), address(k)
        output = None
        if v is not None:
            output = self.empty(self.out_shape, dtype=self.dtype)
            view[_V], view[_OUT] = address(v), address(output)
        together = None
        if self.stats:
            memory = self.empty(self.memory_words, dtype=self.integer)
            start = address(memory)
            # One by one here too: a kernel has filled the caches since NumPy's addition was in them.
            for field, offset in self.fields:
                view[field] = start + offset
            together = Together(memory, self.rows, self.wide, v is not None, self.gradients)
        if self.workers == 1:
            self.alone(desk.address)
        else:
            run(self.kernel, desk.address, self.workers)
        # Numbers that are not finite go the long way.
        return None if view[_SUSPECTS] else (output, together)


_SCRATCH, _SUSPECT, _SUSPECTS = slot.SCRATCH, slot.SUSPECT, slot.SUSPECTS
_Q, _K, _V, _OUT = slot.Q, slot.K, slot.V, slot.OUT


def again(problem: Problem, stats: frozenset[str]) -> Again | None:
    """How to repeat a call on operands that lie in memory as these do; None for one that is not so simple."""
    simple = problem.mask is None and problem.sinks is None and not problem.dropout_p
    if not simple or not isinstance(problem.scale, float) or not math.prod(problem.q.shape[:-1]):
        return None
    if problem.framework == "numpy":
        from ._numpy import laid_out

        found = laid_out(problem)
    else:
        from ._torch import laid_out as laid_out_tensors

        found = laid_out_tensors(problem)
    if found is None:
        return None
    q, k, v, out, bounds = found
    options = (problem.softcap or 0.0, 0.0, math.prod(problem.batch), bool(stats), problem.scale > 0)
    planned = plan(
        q.layout,
        k.layout,
        None if v is None else v.layout,
        out,
        None,
        None if bounds is None else bounds[0].layout,
        options,
        threads(),
    )
    if planned.splits > 1:
        return None
    return Again(problem, planned, bounds, stats=bool(stats))
