"""Triton kernels for CUDA GPUs.

    _tile     who the rows of a block are, what they see, what a mask does to a tile
    _forward  output and statistics: _state takes up a tile of any call, _weigh one of a simple call, _finish writes
    _backward gradients
    _moments  mean and spread of the scores of long calls, beside either kernel
    _hopper   output and statistics of simple calls, for Hopper GPUs: _hopper_supply feeds it, _hopper_tile is what it
              does with a tile of scores, _hopper_scribe writes down what it measured
    _hopper_to_queries, _hopper_to_keys  gradients of simple calls, for Hopper GPUs
    _cudnn    the same by cuDNN               _flow      what is measured beside it
    _launch, _launch_backward  from a call to kernels, with what _form makes of it
    _ready    launches without looking at every argument again

Triton's interpreter runs them on the CPU too (TRITON_INTERPRET=1), for their tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, bfloat16, float16, float32

from ..._problem import Problem
from .._operator import CONSTANTS, Call, run_on
from . import _cudnn

_HAS_TRITON = find_spec("triton") is not None  # asked once, for a compiler does not follow the question
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEEPEST = 256
"""The head_dim up to which a tile fits in a processor's memory."""


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot take the problem, or None."""
    if problem.framework != "torch":
        return "it computes on torch tensors"
    if problem.q.device.type != "cuda" and not _INTERPRETED:
        return f"it computes on a CUDA GPU, and q is on {problem.q.device}"
    if torch.version.hip is not None:
        return "it computes on NVIDIA GPUs, and this torch is for AMD's"
    if not _HAS_TRITON:
        return "it needs Triton: pip install triton"
    if problem.q.dtype not in (float16, bfloat16, float32):
        return f"it computes in 16 or 32 bits, and q is {str(problem.q.dtype).removeprefix('torch.')}"
    if max(problem.head_dim, problem.value_dim or 0) > DEEPEST:
        return f"its tiles have room for a head_dim of {DEEPEST}"
    return None


def describe(index: int) -> dict[str, Any]:
    """What there is for a GPU: Triton, kernels for Hopper, gradients by cuDNN."""
    if not _HAS_TRITON:
        return {"triton": None, "hopper": False, "cudnn": None}
    import triton

    from ._form import gluon

    hopper = gluon("_hopper")
    return {
        "triton": triton.__version__,
        "hopper": hopper is not None and hopper.processors(index) > 0,
        "cudnn": torch.backends.cudnn.version() if _cudnn.usable(torch.device("cuda", index)) else None,
    }


def run(
    problem: Problem, stats: frozenset[str], *, differentiable: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The output and the fields of the Reading that `stats` names."""
    return run_on("cuda", problem, stats, differentiable=differentiable)


def forward(call: Any, stats: frozenset[str], *, apart: bool) -> Any:
    """The same for torch's operator."""
    from ._launch import forward

    return forward(call, stats, apart=apart)


def needs(call: Call, stats: frozenset[str]) -> frozenset[str]:
    """What to compute so that there are gradients: cuDNN does with less."""
    if "differentiable" in stats or not _cudnn.takes(call):
        return stats.union(CONSTANTS)
    return (stats - {"wide_output"}).union(CONSTANTS if "gradient_flow" in stats else ("logsumexp",))


def backward(call: Any, saved: Any, upstream: Any, *, bias_too: bool, flow_too: bool) -> Any:
    """The gradients for torch's operator."""
    from ._launch_backward import backward

    return backward(call, saved, upstream, bias_too=bias_too, flow_too=flow_too)


def flow(call: Any, saved: Any, grad: Any) -> Any:
    """The gradient flow of a plain call without its gradients; None where it needs them."""
    from ._launch_backward import flow

    return flow(call, saved, grad)
