"""cuDNN's backward pass, as torch has it, fed with the output and the logsumexp of the kernels here.

For plain calls it is several times as fast as the kernels of `_backward`. It adds the gradient of q in no fixed order,
and takes the output as it was rounded.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._operator import Call, empty_output

DEPTHS = (64, 128)
"""Of the head_dims that cuDNN takes, those for which its gradients have been compared."""


def is_causal(call: Call) -> bool | None:
    """Whether each query sees the keys up to its own, or all keys; None for what cuDNN has no word for."""
    if call.first is not None or call.mask is not None:
        return None
    if call.band is None:
        return False
    low, high = call.band
    queries, keys = call.q.shape[2], call.k.shape[2]
    if low > 1 - queries:
        return None
    if high == 1 and queries == keys:
        return True
    return False if high >= keys else None


def takes(call: Call) -> bool:
    """Whether the gradients of a call may come from cuDNN, if nothing but that of its output arrives.

    Asked before the forward pass too, which then keeps less for the backward pass.
    """
    q, v = call.q, call.v
    if v is None or call.softcap is not None or call.dropout_p or call.sinks is not None:
        return False
    # Below 0 it gives NaN where the keys do not fill its tiles; at 0 nothing flows to q that would tell the pressure.
    if call.number is None or call.number <= 0 or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    if is_causal(call) is None:
        return False
    if q.shape[3] not in DEPTHS or v.shape[3] != q.shape[3]:
        return False
    # One query alone is a case of its own there, refused for some versions.
    if min(q.shape[0], q.shape[1], call.k.shape[1], call.k.shape[2]) < 1 or q.shape[2] < 2:
        return False
    return not torch.are_deterministic_algorithms_enabled() and usable(q.device)


def usable(device: torch.device) -> bool:
    """Whether torch has cuDNN's attention for a device, and may use it."""
    return device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled() and _there(device.index)


@cache
def _there(index: int | None) -> bool:
    if not torch.cuda.is_available():
        return False  # fake tensors may be on a GPU that is not there
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None or version < 90000 or torch.cuda.get_device_capability(index) < (8, 0):
        return False
    # With this torch would want the logsumexp in another order.
    return os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") == "0"


@cache
def _axes_of_logsumexp() -> int:
    """How many the logsumexp has: torch went from one number to another. What is refused once crashes the next time."""
    x = torch.empty((1, 1, 64, 64), dtype=torch.float16, device="meta")
    return int(torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim())  # noqa: SLF001


def gradients(call: Call, output: Tensor, logsumexp: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of q, k and v, laid out as `empty_gradient` has them; None if torch would not have called cuDNN for this."""
    assert call.v is not None
    q, k, v = (_aligned(x) for x in (call.q, call.k, call.v))
    causal = bool(is_causal(call))
    if q.is_cuda:
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, call.group > 1)
        if not torch.backends.cuda.can_use_cudnn_attention(params):
            return None
    # torch 2.11 finds a kernel again by how q, k and v lie, and takes it for gradients that lie another way too: so for
    # the same of them the others have to lie the same way every time.
    room = call._replace(q=q)
    output, grad = (_laid_out(x, empty_output(room, q.dtype)) for x in (output, grad))
    return _differentiate(q, k, v, output, logsumexp.contiguous(), grad, causal=causal, scale=call.number)


def _differentiate(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, logsumexp: Tensor, grad: Tensor, *, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if _axes_of_logsumexp() == 4:
        logsumexp = logsumexp[..., None]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # there is no dropout; it is not read
    nothing: Any = None  # for a bias, and for packed sequences
    # No dropout: and by its sign no kernel that torch's own attention made for gradients that lie another way.
    dropout_p = -0.0
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # noqa: SLF001
        grad, q, k, v, output, logsumexp, seed, seed, nothing, nothing, nothing, q.shape[2], k.shape[2], dropout_p,
        causal, scale=scale,
    )  # fmt: skip
    return found


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    return x if x.stride() == like.stride() and x.dtype == like.dtype and x.data_ptr() % 16 == 0 else like.copy_(x)


def _aligned(x: Tensor) -> Tensor:
    """A tensor as cuDNN reads it: rows in one piece, none of them twice, in steps of 16 bytes."""
    steps = [step for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    plain = x.stride(-1) == 1 and all(step > 0 and step % 8 == 0 for step in steps) and x.data_ptr() % 16 == 0
    # A copy even of what is contiguous, for that may lie at any address.
    return x if plain else x.clone(memory_format=torch.contiguous_format)
