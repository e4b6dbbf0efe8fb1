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
    "scale": ("heads",),
    "sinks": ("heads",),
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


def torch_is_plain(torch: Any) -> bool:
    """Whether torch does what it is told at once: no compiler, tracer, transform or mode stands in between."""
    if torch.compiler.is_compiling():
        return False  # by itself: what follows is nothing that a compiler could follow
    inside = torch._C  # noqa: SLF001
    return not (
        inside._len_torch_dispatch_stack()  # noqa: SLF001
        or inside._len_torch_function_stack()  # noqa: SLF001
        or inside._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
        or inside._is_tracing()  # noqa: SLF001
    )


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
        if framework == "torch":
            _require_dense(name, x)
        return framework
    if isinstance(x, np.ma.MaskedArray):
        fix = f"Pass {name}.filled(…)" + ("." if name == "attn_mask" else ", and hide keys with attn_mask.")
        raise FrameworkError(explain(f"{name} is a masked array, and attention would ignore its mask.", fix))
    fix = "Pass a NumPy array or a torch tensor"
    if isinstance(x, (list, tuple)):
        # A list of booleans must stay a mask that hides, not become a bias that adds.
        cast = "" if name == "attn_mask" else ", dtype=np.float32"
        fix += f": np.asarray({name}{cast})"
    elif hasattr(x, "__array__"):
        fix += f": np.asarray({name})"
    elif x is None and name == "v":
        fix += "; attemper.read needs no v"
    kind = type(x).__name__
    what = "None" if x is None else f"an {kind}" if kind[:1].lower() in "aeiou" else f"a {kind}"
    raise FrameworkError(explain(f"{name} is {what}, not an array.", f"{fix}."))


def _require_dense(name: str, x: Array) -> None:
    if x.is_nested:
        fix = "Pass a padded tensor and key_lengths, or a packed one and cu_seqlens."
        raise FrameworkError(explain(f"{name} is a nested tensor, whose rows have no common length.", fix))
    layout = str(x.layout).removeprefix("torch.")
    if layout != "strided":
        raise FrameworkError(explain(f"{name} is a tensor of layout {layout}.", f"Pass {name}.to_dense()."))


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
        return (x.float() if dtype_name(x) in ("float16", "bfloat16") else x).numpy()
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x
