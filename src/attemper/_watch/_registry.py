"""Hugging Face's registry of attention functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ._record import Record

if TYPE_CHECKING:
    from ._session import Session


SEEN = ("sdpa", "flex_attention")
"""Those that call torch's functions, which are seen by themselves; they stay as they are for other threads."""


def wrap_registry(session: Session) -> Callable[[], None]:
    """Come around each attention of the registry, under its own name; a kernel that stayed unseen is read here."""
    modeling = sys.modules.get("transformers.modeling_utils")
    registry = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    if registry is None:
        return lambda: None

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            before = len(session.records)
            result = function(module, query, key, value, *args, **kwargs)
            if session.reading and session.active and len(session.records) == before:
                try:
                    mask = args[0] if args else kwargs.get("attention_mask")
                    session.add(_of_registry(session, name, module, query, key, mask, kwargs))
                except Exception as error:
                    session.note(session.place[0], error)
            return result

        # Another thread's compiler takes the function itself.
        wrapped._torchdynamo_inline = function  # type: ignore[attr-defined]  # noqa: SLF001
        return wrapped

    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
    for name in registry:
        if name not in SEEN:
            # In its own place: a key that came and went would be missing to another thread that has just found it.
            mapping = registry._local_mapping if name in registry._local_mapping else registry._global_mapping  # noqa: SLF001
            own = mapping[name]
            mapping[name] = wrapped = wrap(name, own)
            replaced.append((mapping, name, wrapped, own))

    def undo() -> None:
        for mapping, name, wrapped, own in replaced:
            if mapping.get(name) is wrapped:
                mapping[name] = own

    return undo


def _of_registry(
    session: Session, name: str, module: nn.Module, q: Tensor, k: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Record:
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if causal is None else causal) and q.shape[2] > 1
    options: dict[str, Any] = {"scale": kwargs.get("scaling"), "softcap": kwargs.get("softcap")}
    window = kwargs.get("sliding_window")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        shown: Tensor | None = mask
    else:
        shown = mask.bool()[:, None, None] if isinstance(mask, Tensor) and mask.dim() == 2 else None
        options |= {"is_causal": causal, "query_offset": k.shape[2] - q.shape[2]}
        if window:
            options["window"] = (int(window) - 1, None)
    return session.mode.of_operands(q, k, kind=name, mask=shown, options=options)
