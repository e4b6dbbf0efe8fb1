"""Whether explicit matrices would fit in memory."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from ._errors import SizeError, explain
from ._problem import Problem


def refuse_what_does_not_fit(problem: Problem, itemsize: int) -> None:
    """Raise before a machine starts to swap."""
    shape = (*problem.batch, problem.heads, problem.queries, problem.keys)
    # Scores, scaled, capped, masked and weights are returned; about as much again is needed on the way.
    need = 10 * itemsize * math.prod(shape)
    room = _available_memory(problem.q)
    if need > room:
        size = " × ".join(str(n) for n in shape)
        headline = f"Matrices of {size} scores would take {need / 2**30:.1f} GiB; {room / 2**30:.1f} GiB are free."
        fix = "Explicit matrices are for small problems: slice the operands, or use attend, which never builds them."
        raise SizeError(explain(headline, fix))


def _available_memory(q: Any) -> int:
    if getattr(getattr(q, "device", None), "type", "cpu") == "cuda":
        return int(sys.modules["torch"].cuda.mem_get_info(q.device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 4 * 2**30
