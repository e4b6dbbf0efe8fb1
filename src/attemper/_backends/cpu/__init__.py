"""Numba kernels for the CPU: NumPy arrays and torch CPU tensors share them.

    _target   the processor and the sizes of tiles that suit it
    _simd     a vocabulary of vector operations for Numba
    _slots    what a kernel is told
    _tile     parts of a tile of scores      _forward, _backward   the kernels
    _careful  rows with numbers that are not finite
    _compile  from Numba to an object file   _code   the cache of them
    _threads  who runs them                  _sheet  from operands to a kernel

Numba and LLVM are imported when a kernel is first compiled.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..._arrays import Array
from ..._problem import Problem


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    if problem.framework == "torch" and problem.q.device.type != "cpu":
        return f"it computes on the CPU, and q is on {problem.q.device}"
    if not available():
        return "it needs Numba: pip install 'attemper[cpu]'"
    return None


_HAS_NUMBA = find_spec("numba") is not None  # asked once, for a compiler does not follow the question


def available() -> bool:
    """Whether Numba is installed."""
    return _HAS_NUMBA


def run(problem: Problem, stats: frozenset[str], **options: Any) -> tuple[Array | None, dict[str, Any]]:
    """The output and the fields of the Reading that `stats` names."""
    if problem.framework == "torch":
        from .._operator import run_on

        return run_on("cpu", problem, stats, **options)
    from ._numpy import run_arrays

    return run_arrays(problem, stats)


def forward(call: Any, stats: frozenset[str], *, apart: bool) -> Any:
    """The same for torch's operator."""
    from ._torch import forward

    return forward(call, stats, apart=apart)


def backward(call: Any, saved: Any, upstream: Any, *, bias_too: bool, flow_too: bool) -> Any:
    """The gradients for torch's operator."""
    from ._torch import backward

    return backward(call, saved, upstream, bias_too=bias_too, flow_too=flow_too)


def again(problem: Problem, stats: frozenset[str]) -> Any:
    """How to repeat a call; None for one that is not so simple."""
    from ._again import again

    return again(problem, stats)


def describe() -> dict[str, Any]:
    """What the kernels run on and where their code is kept; for people."""
    from . import _code, _threads
    from ._target import target

    return {
        "processor": target().name,
        "instructions": target().instructions,
        "vector_bits": target().bits,
        "threads": _threads.threads(),
        "runner": _threads.runner(),
        "cache": str(_code.cache_folder()),
        "kernels": {
            kernel: _code.cache_file(kernel).exists() for kernels in _code.KERNELS.values() for kernel in kernels
        },
    }
