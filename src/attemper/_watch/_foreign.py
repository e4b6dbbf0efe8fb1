"""The kernels of others, as torch sees them called: from their arguments to q, k and the options of `read`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Adapter = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor, Tensor, dict[str, Any]]]


def _named(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def _flash(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """flash-attention's forward operator: (batch, length, heads, head_dim), causal at the bottom right."""
    names = "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
    given = _named(names, args, kwargs)
    left, right = given.get("window_size_left", -1), given.get("window_size_right", -1)
    options: dict[str, Any] = {
        "scale": given.get("softmax_scale"),
        "softcap": given.get("softcap") or None,
        "is_causal": bool(given.get("causal", False)),
        "query_offset": "bottom-right",
    }
    if left >= 0 or right >= 0:
        options["window"] = tuple(None if side < 0 else side for side in (left, right))
    return given["q"].transpose(1, 2), given["k"].transpose(1, 2), options


def _efficient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The memory-efficient operator under xformers: (batch, length, heads, head_dim); mask type 1 is causal."""
    names = (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type "
        "compute_log_sumexp"
    )
    given = _named(names, args, kwargs)
    kind = given.get("custom_mask_type", 0)
    options: dict[str, Any] = {"scale": given.get("scale"), "is_causal": kind in (1, 2), "attn_mask": given.get("bias")}
    if kind == 2:
        options["query_offset"] = "bottom-right"
    return given["query"].transpose(1, 2), given["key"].transpose(1, 2), options


FOREIGN: dict[str, Adapter] = {
    "_flash_attn_forward": _flash,
    "_efficient_attention_forward": _efficient,
}
"""By the name of the operator that torch is asked to run."""


def flex_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any = None,  # noqa: ARG001
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:
    """(scores, q·k) of FlexAttention run eagerly, which builds the scores itself."""
    with torch.no_grad():
        q, k = query.detach(), key.detach()
        group = q.shape[1] // k.shape[1]
        keys = k.repeat_interleave(group, 1) if group > 1 else k
        product = torch.matmul(q.float(), keys.float().mT)
        axes = [torch.arange(n, device=q.device) for n in product.shape]
        modify = _over_all(score_mod, len(score_mod_other_buffers), True)
        modified = modify(product * scale, *axes, *score_mod_other_buffers)
        mask_mod = block_mask[-1]
        shown = _over_all(mask_mod, len(mask_mod_other_buffers), False)(*axes, *mask_mod_other_buffers)
        return torch.where(shown, modified, -torch.inf), product


def _over_all(function: Any, buffers: int, score_too: bool) -> Any:
    """A function of one (score and) batch, head, query and key index, over all of them."""
    first = (0,) if score_too else ()
    rest = (None,) * buffers
    for axis in (3, 2, 1, 0):
        places = tuple(0 if i == axis else None for i in range(4))
        function = torch.vmap(function, in_dims=(*first, *places, *rest))
    return function
