"""Tiles of plain torch operations, forward and backward, on any device and dtype: the slow road that always works."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._problem import Problem
from .._operator import run_on
from ._backward import backward
from ._forward import forward

__all__ = ["backward", "forward", "run", "unsupported"]


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    return None if problem.framework == "torch" else "it computes on torch tensors"


def run(
    problem: Problem, stats: frozenset[str], *, differentiable: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The output and the fields of the Reading that `stats` names, with the place for what a backward pass measures."""
    return run_on("torch", problem, stats, differentiable=differentiable)
