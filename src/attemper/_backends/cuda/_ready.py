"""Launches of kernels that were launched before in the same form, without asking Triton which version of them to take.

To find that out takes the host longer than all else that it does for a launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 1024
"""Forms of launches to remember."""

_COMPILED: dict[Hashable, CompiledKernel] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], *, form: Hashable = None, **options: Any) -> None:
    """Run a kernel with all its arguments in order, constants included.

    `form`, for who knows it without looking at every argument, has to differ wherever arguments differ in a type, a
    constant, what Triton looks at in a number, the alignment of a pointer or the device.
    """
    key = (kernel, form_of_all(kernel, arguments) if form is None else form, *options.values())
    compiled = _COMPILED.get(key)
    if compiled is not None and not kernel.pre_run_hooks:
        compiled[(programs, 1, 1)](*arguments)
        return
    # Until Triton 3.9 products and sums were fused unless somebody said no, and the kernels were measured so.
    compiled = kernel[(programs,)](*arguments, enable_fp_fusion=True, **options)
    if isinstance(compiled, CompiledKernel):  # not of the interpreter
        if len(_COMPILED) >= MOST:
            _COMPILED.clear()
        _COMPILED[key] = compiled


def form_of(x: Tensor | None) -> Hashable:
    """All of a tensor that Triton would look at, and its shape."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def form_of_all(kernel: Any, arguments: Iterable[Any]) -> Hashable:
    """All that Triton would look at."""
    form: list[Hashable] = []
    # The interpreter's kernels know no parameters, and are not remembered.
    for parameter, x in zip(getattr(kernel, "params", ()), arguments, strict=False):
        if parameter.is_constexpr:
            form.append(x)
        else:
            form.append(-(2**31) <= x < 2**31 if parameter.do_not_specialize else look_at(x))
    return tuple(form)


def look_at(x: Any) -> Hashable:
    """What Triton would, of an argument that is not a constant."""
    if type(x) is int:
        return (x == 1) + 2 * (x % 16 == 0) + 4 * (-(2**31) <= x < 2**31)
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(map(look_at, x))
    if isinstance(x, TensorDescriptor):
        return TensorDescriptor, x.base.dtype, x.base.device, *x.block_shape
    # A compiled kernel takes any number that has a fraction.
    return (type(x),)


def copyable(x: Tensor) -> bool:
    """Whether the copy engine takes a tensor of four axes as it is."""
    *outer, inner = zip(x.shape, x.stride(), strict=True)
    return (
        inner[1] == 1
        and x.data_ptr() % 16 == 0
        and all(size == 1 or (0 < step < 2**38 and step % 8 == 0) for size, step in outer)
    )


def strides_of(x: Tensor) -> list[int]:
    """Of a tensor for the copy engine: an axis of one entry may have any, also one that the engine refuses."""
    return [*(step if size > 1 else 64 for size, step in zip(x.shape[:-1], x.stride(), strict=False)), 1]
