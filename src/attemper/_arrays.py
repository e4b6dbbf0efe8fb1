"""Which framework an array belongs to, found without importing any framework but NumPy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ._errors import DtypeError, FrameworkError, Operand, explain

Array: TypeAlias = Any
"""A NumPy array or a torch tensor."""

FLOATING = ("float16", "bfloat16", "float32", "float64")

_AXES = {
    "q": ("batch", "heads", "queries", "head_dim"),
    "k": ("batch", "heads", "keys", "head_dim"),
    "v": ("batch", "heads", "keys", "head_dim"),
    "attn_mask": ("batch", "heads", "queries", "keys"),
}


def framework_of(x: object) -> str | None:
    """`"numpy"`, `"torch"`, or None for anything else."""
    if isinstance(x, np.ndarray):
        # A masked array would silently lose its mask in a matrix product.
        return None if isinstance(x, np.ma.MaskedArray) else "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    return None


def dtype_name(x: Array) -> str:
    """`"float32"`, whatever the framework."""
    return x.dtype.name if isinstance(x, np.ndarray) else str(x.dtype).removeprefix("torch.")


def device_name(x: Array) -> str:
    """Where the array lives, as a message shows it."""
    return "numpy" if isinstance(x, np.ndarray) else str(x.device)


def operand(name: str, x: Array) -> Operand:
    """What an error message shows of an operand."""
    axes: Sequence[str] = _AXES.get(name, ())
    rank = len(x.shape)
    if rank > len(axes):
        axes = ("batch",) * (rank - len(axes)) + tuple(axes) if axes else ("size",) * rank
    else:
        axes = axes[len(axes) - rank :]
    return Operand(name, axes, tuple(x.shape), f"{dtype_name(x)} {device_name(x)}")


def require_array(name: str, x: object) -> str:
    """The framework of an operand, or an error that says how to make an array of it."""
    framework = framework_of(x)
    if framework is not None:
        return framework
    kind = type(x).__name__
    if isinstance(x, np.ma.MaskedArray):
        fix = f"Pass {name}.filled(…) and hide keys with attn_mask."
    elif isinstance(x, (list, tuple, int, float)):
        fix = f"Pass a NumPy array or a torch tensor: np.asarray({name}, dtype=np.float32)."
    else:
        fix = f"attemper takes NumPy arrays and torch tensors: pass np.asarray({name})."
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    raise FrameworkError(explain(f"{name} is {article} {kind}, not an array.", fix))


def require_floating(name: str, x: Array) -> None:
    """Refuse element types that attention cannot use."""
    kind = dtype_name(x)
    if kind not in FLOATING:
        fix = f"Attention needs one of {', '.join(FLOATING)}: cast {name} first."
        raise DtypeError(explain(f"{name} has dtype {kind}.", fix, [operand(name, x)]))


def to_numpy(x: Array) -> Any:
    """A NumPy array of at least float32, or of whole numbers, for summaries and files."""
    if framework_of(x) == "torch":
        x = x.detach().cpu()
        x = (x.float() if dtype_name(x) in ("float16", "bfloat16") else x).numpy()
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x
