"""Kernels in Triton's Gluon dialect on the CPU, over torch tensors: their logic, not their speed.

    emulator = Emulator(seed=0, processors=3)
    hopper = emulator.load("attemper._backends.cuda._hopper")
    hopper.forward(call, output, wide, fields, flags)  # on CPU tensors

What a GPU would not forgive raises a GluonError.

A copy of the module's source is executed with Gluon's names bound to those of this file. Every program and every
partition of `warp_specialize` is a thread, of which one runs at a time; who is next, and when a copy arrives, is drawn
from the seed, so that a failure can be had again and a deadlock is seen without a clock.

What is read too early or overwritten too soon is found whether or not it happened this time: each partition carries
what it knows of the others' progress (a vector clock), which grows by waiting at barriers alone, and an access to
shared memory demands that all it must follow is known. So a missing wait, a wait for the wrong phase and a place that
is given back too early are errors in every order of events.

Not emulated: how numbers are rounded where a GPU approximates (exp2, log2, division) or fuses a product and a sum, the
order of sums, what layouts mean for threads (they are compared, as Gluon demands), registers and speed. Of a branch
only what is taken is looked at, where the compiler looks at both sides.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import dis
import functools
import importlib.util
import inspect
import linecache
import math
import operator
import random
import threading
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch

# Imported to look for examples too, where there may be no Triton.
pytest.importorskip("triton.experimental.gluon")
from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language._layouts import AutoLayout, DistributedLayout, SharedLayout, SliceLayout
from triton.experimental.gluon.language.nvidia import hopper as _hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED_BYTES = 227 * 1024
"""Of a block on Hopper."""

MOST_STEPS = 2_000_000
"""Barriers and copies of one launch, after which it is taken to go on for ever."""


class GluonError(Exception):
    """What the compiler would refuse or a GPU would punish."""


class RaceError(GluonError):
    """Shared memory is read or written without waiting for who wrote or read it before."""


class DeadlockError(GluonError):
    """Everybody waits."""


class _Abort(BaseException):
    """Ends a partition because another has failed."""


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and blocks of numbers


class _Int(int):
    @property
    def value(self):
        return int(self)


class _Float(float):
    @property
    def value(self):
        return float(self)


def constexpr(x):
    """A number that knows its `value`; else what was given."""
    return _Float(x) if isinstance(x, float) else _Int(x) if isinstance(x, int) else x


_TORCH = {
    _gl.int1: torch.bool, _gl.int8: torch.int8, _gl.int16: torch.int16, _gl.int32: torch.int32, _gl.int64: torch.int64,
    _gl.float16: torch.float16, _gl.bfloat16: torch.bfloat16, _gl.float32: torch.float32, _gl.float64: torch.float64,
    # Of these torch knows little; they are kept as integers from 0 on.
    _gl.uint8: torch.int64, _gl.uint16: torch.int64, _gl.uint32: torch.int64,
}  # fmt: skip


def _unsigned(dtype):
    """Triton counts int1 among these."""
    return dtype.is_int_unsigned() and dtype != _gl.int1


_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TORCH.items() if not _unsigned(dtype)}
_BITS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _torch_dtype(dtype):
    if dtype not in _TORCH:
        raise GluonError(f"{dtype} is not emulated")
    return _TORCH[dtype]


def _wrap(data, dtype):
    return data & (1 << dtype.primitive_bitwidth) - 1 if _unsigned(dtype) else data


@dataclasses.dataclass(frozen=True)
class Derived(DistributedLayout):
    """A layout that the compiler infers; two are the same if they come about in the same way."""

    how: str
    shape: tuple[int, ...]
    parent: DistributedLayout

    @property
    def rank(self):
        return len(self.shape)


class _Base:
    """What blocks and pointers share: a tensor of torch, and a layout unless it is a single one."""

    __slots__ = ("data", "layout")
    __hash__ = None

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def numel(self):
        return self.data.numel()

    @property
    def type(self):
        if self.layout is None:
            return SimpleNamespace(scalar=self.dtype, element_ty=self.dtype, shape=[])
        return SimpleNamespace(layout=self.layout, scalar=self.dtype, element_ty=self.dtype, shape=self.shape)


def _checked_layout(data, layout):
    if data.dim() == 0:
        return None
    if not isinstance(layout, DistributedLayout):
        raise GluonError(f"a block of shape {list(data.shape)} needs a layout of registers, not {layout}")
    if not isinstance(layout, AutoLayout) and layout.rank != data.dim():
        raise GluonError(f"shape {list(data.shape)} has another rank than {layout}")
    if any(size & (size - 1) for size in data.shape):
        raise GluonError(f"the sizes of a block are powers of 2, unlike {list(data.shape)}")
    return layout


class Value(_Base):
    """A number, or a block of them; never changed."""

    __slots__ = ("dtype",)

    def __init__(self, data, dtype, layout=None):
        self.data = data
        self.dtype = dtype
        self.layout = _checked_layout(data, layout)

    def __repr__(self):
        return f"Value({self.data}, {self.dtype}, {self.layout})"

    def _number(self, what):
        if self.layout is not None:
            raise GluonError(f"a block of shape {self.shape} is no {what}")
        return self.data.item()

    def __bool__(self):
        return bool(self._number("condition"))

    def __index__(self):
        if not self.dtype.is_int():
            raise GluonError(f"{self.dtype} is no index")
        return int(self._number("index"))

    __int__ = __index__

    def __iter__(self):
        raise GluonError("a block cannot be iterated over")

    def __getitem__(self, places):
        """None and `:` alone, as in x[:, None]."""
        places = places if isinstance(places, tuple) else (places,)
        x = self
        for axis, place in enumerate(places):
            if place is None:
                x = expand_dims(x, axis)
            elif place != slice(None):
                raise GluonError(f"[{place}] is not emulated")
        return x

    def to(self, dtype, bitcast=False, fp_downcast_rounding=None):
        return cast(self, dtype, bitcast=bitcast)

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
        return reshape(self, shape)

    def permute(self, *order):
        return permute(self, *order)

    def split(self):
        return split(self)

    def sum(self, axis=None, keep_dims=False):
        return sum(self, axis, keep_dims)

    def max(self, axis=None, keep_dims=False):
        return max(self, axis, keep_dims=keep_dims)

    def min(self, axis=None, keep_dims=False):
        return min(self, axis, keep_dims=keep_dims)

    def __neg__(self):
        return Value(_wrap(-self.data, self.dtype), self.dtype, self.layout)

    def __invert__(self):
        if not self.dtype.is_int():
            raise GluonError(f"~ of {self.dtype}")
        return Value(_wrap(~self.data, self.dtype), self.dtype, self.layout)


def _is_number(x):
    return isinstance(x, bool | int | float)


def _of_number(x):
    """A Python number as Triton takes it where nothing else says what it is."""
    if isinstance(x, bool):
        return Value(torch.tensor(x), _gl.int1)
    if isinstance(x, int):
        if not -(2**63) <= x < 2**63:
            raise GluonError(f"{x} has more than 64 bits")
        dtype = _gl.int32 if -(2**31) <= x < 2**31 else _gl.uint32 if 0 <= x < 2**32 else _gl.int64
        return Value(torch.tensor(x, dtype=_TORCH[dtype]), dtype)
    return Value(torch.tensor(x, dtype=torch.float32), _gl.float32)


def _value(x):
    if isinstance(x, Value):
        return x
    if _is_number(x):
        return _of_number(x)
    if isinstance(x, Accumulator):
        raise GluonError(f"{x} is used before warpgroup_mma_wait gave it back")
    raise GluonError(f"{type(x).__name__} is no tensor")


def _convert(data, old, new):
    """Numbers of one kind as those of another."""
    if old is new or old == new:
        return data
    if new == _gl.int1:
        return data != 0
    return _wrap(data.to(_torch_dtype(new)), new)


def _promoted(a, b, *, divides):
    """The dtype in which two tensors meet."""
    if a is b and (a is _gl.float32 or a.is_int()):
        return a
    for dtype in (_gl.float64, _gl.float32):
        if dtype in (a, b):
            return dtype
    if a.is_floating() or b.is_floating():
        narrow = {x for x in (a, b) if x.is_floating()}
        return _gl.float32 if divides or len(narrow) > 1 else narrow.pop()
    if a.is_int_unsigned() == b.is_int_unsigned():
        return a if a.primitive_bitwidth >= b.primitive_bitwidth else b
    unsigned, signed = (a, b) if a.is_int_unsigned() else (b, a)
    return unsigned if unsigned.primitive_bitwidth >= signed.primitive_bitwidth else signed


def _beside(number, dtype):
    """The dtype of a Python number that meets a tensor: the tensor's, if that is of its kind."""
    if isinstance(number, float):
        return dtype if dtype.is_floating() else _gl.float32
    if dtype.is_floating() or isinstance(number, bool):
        return dtype
    if dtype == _gl.int1:
        return _gl.int32
    bits = dtype.primitive_bitwidth
    low, high = (0, 2**bits) if _unsigned(dtype) else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    if not low <= number < high:
        raise GluonError(f"{number} does not fit into {dtype}")
    return dtype


def _meet(a, b, *, divides=False):
    """Two operands as tensors of one dtype, and it."""
    if not (isinstance(a, Value) or isinstance(b, Value)):
        a = _value(a)
    if _is_number(a):
        dtype = _promoted(_beside(a, b.dtype), b.dtype, divides=divides)
        return (
            torch.tensor(a, dtype=torch.float64 if isinstance(a, float) else None).to(_TORCH[dtype]),
            _convert(_value(b).data, b.dtype, dtype),
            dtype,
        )
    if _is_number(b):
        y, x, dtype = _meet(b, a, divides=divides)
        return x, y, dtype
    a, b = _value(a), _value(b)
    dtype = _promoted(a.dtype, b.dtype, divides=divides)
    return _convert(a.data, a.dtype, dtype), _convert(b.data, b.dtype, dtype), dtype


def _common_layout(*operands):
    """The layout of all blocks among the operands, whose shapes must fit each other."""
    found, shape = None, None
    for x in operands:
        if not isinstance(x, _Base) or x.layout is None:
            continue
        if shape is None:
            found, shape = x.layout, x.shape
            continue
        if len(shape) != len(x.shape) or any(m != n and 1 not in (m, n) for m, n in zip(shape, x.shape, strict=True)):
            raise GluonError(f"shapes {shape} and {x.shape} do not fit each other")
        if isinstance(found, AutoLayout):
            found = x.layout
        elif not isinstance(x.layout, AutoLayout) and found != x.layout:
            raise GluonError(f"blocks of two layouts meet, without convert_layout:\n  {found}\n  {x.layout}")
        shape = [builtins.max(m, n) for m, n in zip(shape, x.shape, strict=True)]
    return found


def _arithmetic(of_torch, *, divides=False, kinds=("int", "float")):
    def compute(a, b):
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            return NotImplemented
        if not all(isinstance(x, Value | bool | int | float) for x in (a, b)):
            return NotImplemented
        layout = _common_layout(a, b)
        x, y, dtype = _meet(a, b, divides=divides)
        if divides and dtype.is_int():
            x, y, dtype = x.float(), y.float(), _gl.float32
        kind = "float" if dtype.is_floating() else "int"
        if kind not in kinds:
            raise GluonError(f"{of_torch.__name__} of {dtype}")
        if dtype == _gl.int1 and of_torch not in (operator.and_, operator.or_, operator.xor):
            x, y, dtype = x.int(), y.int(), _gl.int32
        return Value(_wrap(of_torch(x, y), dtype), dtype, layout)

    return compute


def _quotient(x, y):
    if (y == 0).any():
        raise GluonError("an integer is divided by 0")
    return torch.div(x, y, rounding_mode="trunc")


def _remainder(x, y):
    if not x.is_floating_point() and (y == 0).any():
        raise GluonError("an integer is divided by 0")
    return torch.fmod(x, y)


def _comparison(of_torch):
    def compute(a, b):
        if not all(isinstance(x, Value | bool | int | float) for x in (a, b)):
            if isinstance(a, Accumulator) or isinstance(b, Accumulator):
                _value(b if isinstance(b, Accumulator) else a)
            return NotImplemented
        layout = _common_layout(a, b)
        x, y, _ = _meet(a, b)
        return Value(of_torch(x, y), _gl.int1, layout)

    return compute


_OPERATORS = {
    "add": _arithmetic(operator.add),
    "sub": _arithmetic(operator.sub),
    "mul": _arithmetic(operator.mul),
    "truediv": _arithmetic(operator.truediv, divides=True),
    "floordiv": _arithmetic(_quotient, kinds=("int",)),
    "mod": _arithmetic(_remainder),
    "and": _arithmetic(operator.and_, kinds=("int",)),
    "or": _arithmetic(operator.or_, kinds=("int",)),
    "xor": _arithmetic(operator.xor, kinds=("int",)),
    "lshift": _arithmetic(operator.lshift, kinds=("int",)),
    "rshift": _arithmetic(operator.rshift, kinds=("int",)),
}
for _name, _function in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _function)
    setattr(Value, f"__r{_name}__", lambda self, other, function=_function: function(other, self))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _comparison(getattr(operator, _name)))

add, sub, mul = (_OPERATORS[name] for name in ("add", "sub", "mul"))


class Memory:
    """The memory of a tensor that a kernel got a pointer to."""

    def __init__(self, tensor):
        tensor = tensor.detach()
        if tensor.dtype not in _FROM_TORCH:
            raise GluonError(f"pointers to {tensor.dtype} are not emulated")
        self.dtype = _FROM_TORCH[tensor.dtype]
        self.size = 1 + builtins.sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.size = self.size if tensor.numel() else 0
        self.flat = tensor.as_strided((self.size,), (1,))
        self.its_own = torch.zeros(self.size, dtype=torch.bool)
        self.its_own.as_strided(tensor.shape, tensor.stride()).fill_(True)
        self.shape = tuple(tensor.shape)

    def check(self, places, what):
        bad = (places < 0) | (places >= self.size)
        bad |= ~self.its_own[places.clamp(0, builtins.max(self.size - 1, 0))] if self.size else True
        if bad.any():
            where = places[bad]
            raise GluonError(
                f"{what} at {where[:4].tolist()} and so on, {len(where)} places in all, outside the memory of a tensor "
                f"of shape {self.shape}, {self.size} places from its first"
            )


class Pointer(_Base):
    """Places in the memory of a tensor."""

    __slots__ = ("memory",)

    def __init__(self, memory, data=None, layout=None):
        self.memory = memory
        self.data = torch.zeros((), dtype=torch.int64) if data is None else data
        self.layout = _checked_layout(self.data, layout)

    @property
    def dtype(self):
        return _gl.pointer_type(self.memory.dtype)

    def _moved(self, steps, sign):
        steps = _value(steps)
        if not steps.dtype.is_int():
            raise GluonError(f"a pointer moves by integers, not by {steps.dtype}")
        layout = _common_layout(self, steps)
        return Pointer(self.memory, self.data + sign * steps.data.to(torch.int64), layout)

    def __add__(self, steps):
        return self._moved(steps, 1)

    __radd__ = __add__

    def __sub__(self, steps):
        return self._moved(steps, -1)


def _pointed(pointer, mask, *values):
    """The places of a pointer, and which of them to touch."""
    if not isinstance(pointer, Pointer):
        raise GluonError(f"{pointer!r} is no pointer")
    _common_layout(pointer, mask, *values)
    for x in (mask, *values):
        if isinstance(x, Value) and x.data.broadcast_to(_together(x.data, pointer.data)).shape != pointer.data.shape:
            raise GluonError(f"{x.shape} does not fit a pointer of shape {pointer.shape}")
    if mask is None:
        return torch.ones_like(pointer.data, dtype=torch.bool)
    mask = _value(mask)
    if mask.dtype != _gl.int1:
        raise GluonError(f"a mask is made of int1, not of {mask.dtype}")
    return mask.data.broadcast_to(pointer.data.shape)


def _together(*tensors):
    return torch.broadcast_shapes(*(x.shape for x in tensors))


def _whatever(shape, dtype):
    """What stands where nothing was written: as harmful as can be."""
    data = torch.zeros(shape, dtype=_torch_dtype(dtype))
    if dtype.is_floating():
        return data.fill_(math.nan)
    return data if dtype == _gl.int1 else data.fill_(2 ** (builtins.min(dtype.primitive_bitwidth, 32) - 2) + 1)


def load(pointer, mask=None, other=None, **hints):
    touched = _pointed(pointer, mask, other)
    memory, places = pointer.memory, pointer.data
    memory.check(places[touched], "a load")
    if other is None:
        found = _whatever(places.shape, memory.dtype)
    else:
        other = cast(_value(other), memory.dtype)
        found = other.data.broadcast_to(places.shape).clone()
    found[touched] = memory.flat[places[touched]]
    return Value(found, memory.dtype, pointer.layout)


def store(pointer, value, mask=None, **hints):
    touched = _pointed(pointer, mask, value)
    memory, places = pointer.memory, pointer.data[touched]
    memory.check(places, "a store")
    new = cast(_value(value), memory.dtype).data.broadcast_to(pointer.data.shape)[touched]
    memory.flat[places] = new
    if not torch.equal(memory.flat[places].nan_to_num(nan=12345.0), new.nan_to_num(nan=12345.0)):
        raise GluonError("one store writes different numbers to one place")


def _atomic(combine):
    def update(pointer, value, mask=None, sem=None, scope=None):
        _machine().pause()
        if pointer.layout is not None:
            raise GluonError("an atomic operation on a block is not emulated")
        touched = mask is None or bool(_value(mask))
        value = cast(_value(value), pointer.memory.dtype)
        if not touched:
            return Value(_whatever((), pointer.memory.dtype), pointer.memory.dtype)
        place = pointer.data.reshape(1)
        pointer.memory.check(place, "an atomic operation")
        old = pointer.memory.flat[place][0].clone()
        pointer.memory.flat[place] = combine(old, value.data)
        return Value(old, pointer.memory.dtype)

    return update


atomic_add, atomic_max, atomic_min = _atomic(torch.add), _atomic(torch.maximum), _atomic(torch.minimum)
atomic_and, atomic_or, atomic_xor = _atomic(operator.and_), _atomic(operator.or_), _atomic(operator.xor)
atomic_xchg = _atomic(lambda old, new: new)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of numbers


def _unary(of_torch, *, floating=True):
    def compute(x):
        x = _value(x)
        if floating and x.dtype not in (_gl.float32, _gl.float64):
            raise GluonError(f"{of_torch.__name__} of {x.dtype}")
        return Value(of_torch(x.data), x.dtype, x.layout)

    return compute


exp, exp2, log, log2 = map(_unary, (torch.exp, torch.exp2, torch.log, torch.log2))
sqrt, sqrt_rn, rsqrt = map(_unary, (torch.sqrt, torch.sqrt, torch.rsqrt))
sin, cos, erf, floor, ceil = map(_unary, (torch.sin, torch.cos, torch.erf, torch.floor, torch.ceil))
abs = _unary(torch.abs, floating=False)  # noqa: A001


def fdiv(x, y, ieee_rounding=False):
    return _value(x) / y


def div_rn(x, y):
    return _value(x) / y


def fma(x, y, z):
    """Rounded once: the product of two float32 is exact in float64."""
    layout = _common_layout(x, y, z)
    x, y, z = (_value(v) for v in (x, y, z))
    if {v.dtype for v in (x, y, z)} != {_gl.float32}:
        raise GluonError("fma of other numbers than float32 is not emulated")
    return Value((x.data.double() * y.data.double() + z.data.double()).float(), _gl.float32, layout)


def cast(x, dtype, fp_downcast_rounding=None, bitcast=False):
    x = _value(x)
    if x.dtype == dtype:
        return x
    if not bitcast:
        return Value(_convert(x.data, x.dtype, dtype), dtype, x.layout)
    bits = x.dtype.primitive_bitwidth
    if bits != dtype.primitive_bitwidth:
        raise GluonError(f"the bits of {x.dtype} are not those of a {dtype}")
    signed = x.data.to(_BITS[bits]) if x.dtype.is_int() else x.data.view(_BITS[bits])
    data = signed.view(_TORCH[dtype]) if dtype.is_floating() else _wrap(signed.to(_TORCH[dtype]), dtype)
    return Value(data, dtype, x.layout)


def _extreme(of_numbers, of_integers):
    def compute(a, b, propagate_nan=None):
        if propagate_nan is not None and "NONE" not in str(propagate_nan):
            raise GluonError("propagate_nan is not emulated")
        layout = _common_layout(a, b)
        x, y, dtype = _meet(a, b)
        # Of a number and NaN, the number.
        return Value((of_numbers if dtype.is_floating() else of_integers)(x, y), dtype, layout)

    return compute


maximum = _extreme(torch.fmax, torch.maximum)
minimum = _extreme(torch.fmin, torch.minimum)


def clamp(x, low, high):
    return minimum(maximum(x, low), high)


def where(condition, x, y):
    condition = _value(condition)
    layout = _common_layout(condition, x, y)
    if layout is not None and condition.layout is None and len({tuple(_value(v).shape) for v in (x, y)}) > 1:
        raise GluonError("a single condition chooses between blocks of one shape")
    x, y, dtype = _meet(x, y)
    return Value(torch.where(condition.data != 0, x, y), dtype, layout)


def _log2_of(x):
    return torch.log2(x)


def _shown_of(x, distance, width):
    unsigned = [y.long() & 0xFFFFFFFF for y in (distance, width)]
    return torch.where(unsigned[0] < unsigned[1], x, -(2.0**100))


_ASSEMBLY = {
    ("lg2.approx.ftz.f32 $0, $1;", "=f,f"): _log2_of,
    ("{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fF1800000, p; }", "=f,f,r,r"): _shown_of,
}
"""What instructions of the machine do that kernels name."""


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    if (asm, constraints) not in _ASSEMBLY or pack != 1 or not is_pure or dtype != _gl.float32:
        raise GluonError(f"{asm!r} is not emulated (tests/gluon_emulator.py)")
    layout = _common_layout(*args)
    values = torch.broadcast_tensors(*(_value(x).data for x in args))
    return Value(_ASSEMBLY[asm, constraints](*values), dtype, layout)


def full(shape, value, dtype, layout=None):
    shape = _shape(shape)
    value = cast(_value(value), dtype)
    if value.layout is not None:
        raise GluonError("a block cannot fill another")
    return Value(value.data.expand(shape).clone(), dtype, layout or AutoLayout())


def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype, layout)


def full_like(x, value, shape=None, dtype=None, layout=None):
    return full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


def zeros_like(x, shape=None, dtype=None, layout=None):
    return full_like(x, 0, shape, dtype, layout)


def arange(start, end, layout=None):
    for x in (start, end):
        if isinstance(x, Value):
            raise GluonError("the ends of arange are constants")
    return Value(torch.arange(start, end, dtype=torch.int32), _gl.int32, layout or AutoLayout())


def _shape(shape):
    for size in shape:
        if isinstance(size, Value):
            raise GluonError("a shape is made of constants")
    return [int(size) for size in shape]


def reshape(x, *shape):
    shape = _shape(shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape)
    if math.prod(shape) != x.numel:
        raise GluonError(f"{x.shape} has not as many entries as {shape}")
    return Value(x.data.reshape(shape), x.dtype, Derived("reshape", tuple(shape), x.layout))


def permute(x, *order):
    order = order[0] if len(order) == 1 and isinstance(order[0], list | tuple) else order
    data = x.data.permute(*order)
    return Value(data, x.dtype, Derived(f"permute {tuple(order)}", tuple(data.shape), x.layout))


def expand_dims(x, axis):
    if not isinstance(x, Value) or x.layout is None:
        raise GluonError("expand_dims takes a block")
    axis = axis if axis >= 0 else axis + len(x.shape) + 1
    if isinstance(x.layout, AutoLayout):
        return Value(x.data.unsqueeze(axis), x.dtype, AutoLayout())
    if not isinstance(x.layout, SliceLayout) or x.layout.dim != axis:
        raise GluonError(f"expand_dims at axis {axis} takes a SliceLayout of it, not {x.layout}")
    return Value(x.data.unsqueeze(axis), x.dtype, x.layout.parent)


def convert_layout(x, layout, assert_trivial=False):
    if not isinstance(x, Value) or x.layout is None:
        raise GluonError("convert_layout takes a block")
    return Value(x.data, x.dtype, layout)


set_auto_layout = convert_layout


def broadcast(a, b):
    a, b = _value(a), _value(b)
    layout, shape = _common_layout(a, b), _together(a.data, b.data)
    return tuple(Value(x.data.expand(shape), x.dtype, layout) for x in (a, b))


def join(a, b):
    layout = _common_layout(a, b)
    x, y, dtype = _meet(a, b)
    data = torch.stack(torch.broadcast_tensors(x, y), dim=-1)
    return Value(data, dtype, Derived("join", tuple(data.shape), layout))


def split(x):
    if x.shape[-1] != 2:
        raise GluonError(f"split takes a last axis of 2, not {x.shape}")
    return tuple(Value(y, x.dtype, Derived("split", tuple(y.shape), x.layout)) for y in x.data.unbind(-1))


def _reduction(reduce, *, widens):
    def compute(x, axis=None, keep_dims=False, **options):
        if any(v for v in options.values()):
            raise GluonError(f"{', '.join(options)} of a reduction is not emulated")
        x = _value(x)
        if x.layout is None:
            raise GluonError("a single number is not reduced")
        dtype = x.dtype
        if (dtype.is_int() and dtype.primitive_bitwidth < 32) or (widens and dtype == _gl.bfloat16):
            dtype = _gl.int32 if dtype.is_int() else _gl.float32
        data = _convert(x.data, x.dtype, dtype)
        if axis is None:
            return Value(_wrap(reduce(data.flatten(), 0), dtype), dtype)
        axis = axis % data.dim()
        data = _wrap(reduce(data, axis), dtype)
        layout = AutoLayout() if isinstance(x.layout, AutoLayout) else SliceLayout(axis, x.layout)
        found = Value(data, dtype, layout)
        return expand_dims(found, axis) if keep_dims else found

    return compute


def _total(data, axis):
    return data.float().sum(axis).to(data.dtype) if data.dtype.is_floating_point else data.sum(axis, dtype=data.dtype)


def _largest(data, axis):
    """NaN only where there is nothing else."""
    if not data.dtype.is_floating_point:
        return data.amax(axis)
    nan = data.isnan()
    return data.masked_fill(nan, -math.inf).amax(axis).masked_fill(nan.all(axis), math.nan)


def _smallest(data, axis):
    return -_largest(-data, axis) if data.dtype.is_floating_point else data.amin(axis)


sum = _reduction(_total, widens=False)  # noqa: A001
max = _reduction(_largest, widens=True)  # noqa: A001
min = _reduction(_smallest, widens=True)  # noqa: A001


def cdiv(x, y):
    return (x + y - 1) // y


def to_tensor(x):
    return _value(x)


def static_range(*bounds):
    if any(isinstance(x, Value) for x in bounds):
        raise GluonError("static_range takes constants")
    return range(*bounds)


def static_assert(condition, message=""):
    if not condition:
        raise GluonError(f"static_assert: {message}")


def device_assert(condition, message="", mask=None):
    if not _value(condition).data.all():
        raise GluonError(f"device_assert: {message}")


def assume(condition):
    device_assert(condition, "what was assumed is false")


def _hint(x, *values):
    return x


multiple_of = max_contiguous = max_constancy = _hint


def program_id(axis):
    return _value(_task().program.number if axis == 0 else 0)


def num_programs(axis):
    return _value(_machine().programs if axis == 0 else 1)


# ---------------------------------------------------------------------------------------------------------------------
# Who runs, and what each knows of the others


_LOCAL = threading.local()


def _task():
    task = getattr(_LOCAL, "task", None)
    if task is None:
        raise GluonError("this belongs into a kernel")
    return task


def _machine():
    return _task().machine


def _join(clock, other):
    for who, time in other.items():
        if clock.get(who, 0) < time:
            clock[who] = time


class Task:
    """A program, or a partition of one."""

    def __init__(self, machine, program, name, work, clock=()):
        self.machine, self.program, self.name, self.work = machine, program, name, work
        self.clock = {**dict(clock), self: 1}
        self.baton = threading.Semaphore(0)
        self.waits = None
        """Until when, and in words."""
        self.done = False
        self.products = deque()
        self.stores = deque()
        self.unfenced = set()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self):
        return f"program {self.program.number}, {self.name}"

    def ready(self):
        return not self.done and (self.waits is None or self.waits[0]())

    def release(self):
        """What follows is later than what others learn now."""
        self.clock[self] += 1

    def finish(self):
        if self.products:
            raise GluonError(f"{self} ends with a product under way")
        if self.stores:
            raise GluonError(f"{self} ends while a copy still reads its shared memory; tma.store_wait is missing")

    def _run(self):
        self.baton.acquire()
        _LOCAL.task = self
        try:
            if self.machine.failure is None:
                self.work()
                self.finish()
        except _Abort:
            pass
        except BaseException as error:
            error.add_note(f"in {self} (seed {self.machine.seed})")
            self.machine.fail(error)
        finally:
            self.done = True
            self.machine.leave()


class Program:
    """A block of threads: its number, its shared memory, and which phases of barriers say that copies are there."""

    def __init__(self, number):
        self.number = number
        self.bytes = 0
        self.coming = {}


class Machine:
    """One launch."""

    def __init__(self, programs, seed):
        self.programs, self.seed = programs, seed
        self.random = random.Random(seed)
        # Copies that arrive at once, some time, or when nobody can go on without.
        self.haste = self.random.choice((0, 1, 4))
        self.switching = self.random.choice((0.05, 0.3, 0.7))
        self.tasks, self.copies, self.memories = [], [], {}
        self.failure, self.over = None, threading.Event()
        self.steps = 0

    def memory(self, tensor):
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self.memories:
            self.memories[key] = Memory(tensor)
        return self.memories[key]

    def start(self, task):
        self.tasks.append(task)
        task.thread.start()

    def run(self):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self.leave()
            self.over.wait()
            for task in self.tasks:
                task.thread.join()
        finally:
            torch.set_num_threads(threads)
        if self.failure is not None:
            raise self.failure

    def fail(self, error):
        if self.failure is None:
            self.failure = error
        for task in self.tasks:
            task.baton.release()
        self.over.set()

    def _next(self):
        """Who goes on; copies arrive on the way."""
        while True:
            ready = [task for task in self.tasks if task.ready()]
            copies = self.copies if self.haste or not ready else []
            weight = len(copies) * (self.haste or 1)
            if not ready and not copies:
                return None
            if self.random.random() * (len(ready) + weight) < weight or not ready:
                copies.pop(self.random.randrange(len(copies))).arrive()
            else:
                return self.random.choice(ready)

    def pause(self, until=None, reason=""):
        """Let others go on, in any case if there is something to wait for."""
        me = _task()
        self.steps += 1
        if self.failure is not None:
            raise _Abort
        if self.steps > MOST_STEPS:
            raise GluonError(f"after {MOST_STEPS} steps the kernel still runs")
        if until is None or until():
            if self.random.random() > self.switching:
                return
        else:
            me.waits = until, reason
        other = self._next()
        if other is None:
            raise DeadlockError(self._deadlock())
        if other is not me:
            other.baton.release()
            me.baton.acquire()
            if self.failure is not None:
                raise _Abort
        me.waits = None

    def leave(self):
        """The last thing that a task does."""
        if self.failure is not None:
            return
        other = None
        try:
            other = self._next()
            if other is None and not all(task.done for task in self.tasks):
                raise DeadlockError(self._deadlock())
        except BaseException as error:
            self.fail(error)
            return
        if other is None:
            self.over.set()
        else:
            other.baton.release()

    def _deadlock(self):
        lines = [f"{task} waits for {task.waits[1]()}" for task in self.tasks if not task.done and task.waits]
        return f"nobody can go on (seed {self.seed}):\n  " + "\n  ".join(lines)


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    parent, machine = _task(), _machine()
    if parent.name != "before partitions":
        raise GluonError("warp_specialize within warp_specialize")
    workers = len(functions_and_args) - 1
    for what, given in (("worker_num_warps", worker_num_warps), ("worker_num_regs", worker_num_regs)):
        if given is not None and len(given) != workers:
            raise GluonError(f"{what} has {len(given)} entries for {workers} workers")
    if worker_num_regs and any(n % 8 or not 24 <= n <= 256 for n in worker_num_regs):
        raise GluonError(f"registers are multiples of 8 from 24 to 256, not {worker_num_regs}")
    tasks = []
    for i, (function, arguments) in enumerate(functions_and_args[1:], 1):
        name = f"partition {i} ({getattr(function, '__name__', function)})"
        work = lambda function=function, arguments=arguments: function(*arguments)  # noqa: E731
        tasks.append(Task(machine, parent.program, name, work, parent.clock))
    parent.release()
    for task in tasks:
        machine.start(task)
    function, arguments = functions_and_args[0]
    parent.name = f"partition 0 ({getattr(function, '__name__', function)})"
    found = function(*arguments)
    parent.finish()
    machine.pause(lambda: all(task.done for task in tasks), lambda: "the other partitions to end")
    for task in tasks:
        _join(parent.clock, task.clock)
    for barrier, phase in parent.program.coming.items():
        # It would write into what is by then the memory of another program.
        if parent.clock.get(barrier, 0) < phase:
            raise GluonError(f"{parent} ends, and nobody has waited for the last copy of {barrier.name}")
    parent.name = "after partitions"
    return found


def barrier(*, cluster=False):
    """Threads of one partition are one here."""


# ---------------------------------------------------------------------------------------------------------------------
# Shared memory


class Region:
    """A part of an allocation that is read and written as a whole, and who did that last."""

    def __init__(self, name, elements):
        self.name, self.elements = name, elements
        self.meets = [self]
        self.written = None
        """(who, when)"""
        self.reads = {}
        self.incoming = None
        self.outgoing = []

    def may_read(self, task, what):
        for other in self.meets:
            if other.incoming is not None:
                raise RaceError(f"{task}: {what} reads {self.name} while {other.incoming} writes it")
            if other.written is not None and task.clock.get(other.written[0], 0) < other.written[1]:
                raise RaceError(f"{task}: {what} reads {self.name} without waiting until {other.written[0]} wrote it")
        if all(other.written is None for other in self.meets):
            raise RaceError(f"{task}: {what} reads {self.name}, which nobody wrote")

    def may_write(self, task, what):
        for other in self.meets:
            if other.incoming is not None:
                raise RaceError(f"{task}: {what} writes {self.name} while {other.incoming} does")
            if other.outgoing:
                raise RaceError(f"{task}: {what} writes {self.name} while {other.outgoing[0]} reads it")
            for reader, time in other.reads.items():
                if task.clock.get(reader, 0) < time:
                    raise RaceError(f"{task}: {what} writes {self.name} without waiting until {reader} read it")
            if other.written is not None and task.clock.get(other.written[0], 0) < other.written[1]:
                raise RaceError(f"{task}: {what} writes {self.name} without waiting until {other.written[0]} wrote it")

    def async_may_read(self, task, what):
        self.may_read(task, what)
        for other in self.meets:
            if any(other in unfenced for unfenced in (x.unfenced for x in task.machine.tasks)):
                raise RaceError(f"{task}: {what} reads {self.name} without fence_async_shared after it was stored")

    def now_read(self, task):
        self.reads[task] = task.clock[task]

    def now_written(self, who, time):
        self.written = who, time
        self.reads.clear()


class Allocation:
    """A piece of shared memory."""

    def __init__(self, dtype, shape):
        self.name = "unnamed shared memory"
        self.data = _whatever(shape, dtype)
        self.regions, self.by_view, self.barriers = [], {}, {}

    def region(self, view):
        key = view.storage_offset(), tuple(view.shape), view.stride()
        if key not in self.by_view:
            self.by_view[key] = self._region(view)
        return self.by_view[key]

    def _region(self, view):
        elements = torch.zeros(self.data.numel(), dtype=torch.bool)
        elements.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        for region in self.regions:
            if torch.equal(region.elements, elements):
                return region
        places = self.data[0].numel() if self.data.dim() > 1 else 1
        first, last = (int(x) // places for x in elements.nonzero()[[0, -1], 0])
        name = f"{self.name}[{first}]" if first == last else f"{self.name}[{first}:{last + 1}]"
        new = Region(name, elements)
        for region in self.regions:
            if (region.elements & elements).any():
                region.meets.append(new)
                new.meets.append(region)
        self.regions.append(new)
        return new


class Shared:
    """A view of shared memory."""

    def __init__(self, allocation, data, dtype, layout):
        self.allocation, self.data, self.dtype, self.layout = allocation, data, dtype, layout

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def rank(self):
        return self.data.dim()

    @property
    def numel(self):
        return self.data.numel()

    @property
    def nbytes_per_cta(self):
        return self.numel * self.dtype.primitive_bitwidth // 8

    @property
    def type(self):
        return SimpleNamespace(layout=self.layout, element_ty=self.dtype, shape=self.shape)

    @property
    def region(self):
        return self.allocation.region(self.data)

    def _view(self, data, **changes):
        layout = self.layout
        if isinstance(layout, _gl.NVMMASharedLayout) and changes:
            layout = dataclasses.replace(layout, **changes)
        return Shared(self.allocation, data, self.dtype, layout)

    def index(self, index):
        i = operator.index(index)
        if not 0 <= i < self.data.shape[0]:
            raise GluonError(f"{self.allocation.name}.index({i}) of {self.data.shape[0]}")
        return self._view(self.data[i])

    def slice(self, start, length, dim=0):
        if isinstance(length, Value) or isinstance(dim, Value):
            raise GluonError("length and dim of a slice are constants")
        start = operator.index(start)
        if start < 0 or start + length > self.data.shape[dim]:
            raise GluonError(f"{self.allocation.name}.slice({start}, {length}) of {self.data.shape[dim]} in axis {dim}")
        return self._view(self.data.narrow(dim, start, length))

    def reshape(self, shape):
        shape = _shape(shape)
        if math.prod(shape) != self.numel:
            raise GluonError(f"{self.shape} has not as many entries as {shape}")
        return self._view(self.data.view(shape), rank=len(shape))

    def permute(self, order):
        data = self.data.permute(*order)
        turned = getattr(self.layout, "transposed", False) ^ (tuple(order)[-2:] == (1, 0))
        return self._view(data, transposed=turned)

    def load(self, layout):
        task, region = _task(), self.region
        region.may_read(task, "a load")
        region.now_read(task)
        return Value(self.data.clone(), self.dtype, layout)

    def store(self, value):
        if not isinstance(value, Value) or value.shape != self.shape or value.dtype != self.dtype:
            raise GluonError(f"{value!r} does not fit {self.shape} of {self.dtype} in {self.allocation.name}")
        task, region = _task(), self.region
        region.may_write(task, "a store")
        self.data.copy_(value.data)
        region.now_written(task, task.clock[task])
        task.unfenced.add(region)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise GluonError(f".{name} of shared memory is not emulated")


def allocate_shared_memory(element_ty, shape, layout, value=None):
    program, shape = _task().program, _shape(shape)
    if _task().name.startswith("partition"):
        raise GluonError("shared memory is allocated before warp_specialize here")
    if not isinstance(layout, SharedLayout):
        raise GluonError(f"{layout} is no layout of shared memory")
    allocation = Allocation(element_ty, shape)
    program.bytes += math.prod(shape) * element_ty.primitive_bitwidth // 8
    if program.bytes > SHARED_BYTES:
        raise GluonError(f"{program.bytes} bytes of shared memory, of which there are {SHARED_BYTES}")
    shared = Shared(allocation, allocation.data, element_ty, layout)
    if value is not None:
        shared.store(value)
    return shared


def fence_async_shared(cluster=False):
    _task().unfenced.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Barriers


class Barrier:
    """As PTX has it: a phase is over when all have arrived and no bytes are awaited."""

    def __init__(self, name, count):
        self.name, self.count = name, count
        self.left, self.bytes, self.phase = count, 0, 0
        self.coming, self.done = {}, [{}, {}]

    def __repr__(self):
        return self.name

    def describe(self, parity):
        return (
            f"{self.name}, phase {parity}: {self.phase} phases are over, of the next {self.count - self.left} of "
            f"{self.count} arrivals are there and {self.bytes} bytes to come"
        )

    def arrive(self, task, count=1):
        if count > self.left:
            raise GluonError(f"{task} arrives at {self.name} {count} times, where {self.left} are left of {self.count}")
        _join(self.coming, task.clock)
        task.release()
        self.left -= count
        self.settle()

    def settle(self):
        if self.left or self.bytes:
            return
        parity = self.phase % 2
        self.phase += 1
        self.coming[self] = self.phase
        self.done[parity] = dict(self.coming)
        self.left = self.count


def _barrier(shared):
    if not isinstance(shared, Shared) or shared.dtype != _gl.int64 or shared.numel != 1:
        raise GluonError("a barrier is one int64 in shared memory")
    found = shared.allocation.barriers.get(shared.data.storage_offset())
    if found is None:
        raise GluonError(f"{shared.region.name} was never made a barrier by mbarrier.init")
    return found


def _init(mbarrier, count):
    if isinstance(count, Value) or count < 1:
        raise GluonError(f"the count of a barrier is a constant from 1 on, not {count}")
    barriers, place = mbarrier.allocation.barriers, mbarrier.data.storage_offset()
    if place in barriers:
        raise GluonError(f"{mbarrier.region.name} is made a barrier twice")
    barriers[place] = Barrier(mbarrier.region.name, int(count))


def _expect(mbarrier, bytes_per_cta=None, pred=True, *, from_cta=None):
    """Bytes to come, and an arrival."""
    if isinstance(bytes_per_cta, Value) or not 0 < bytes_per_cta < 2**20:
        raise GluonError(f"bytes to expect are a constant below 2^20, not {bytes_per_cta}")
    if not pred:
        return
    found = _barrier(mbarrier)
    found.bytes += int(bytes_per_cta)
    found.arrive(_task())
    _machine().pause()


def _arrive(mbarrier, *, count=1, pred=True, from_cta=None):
    if not pred:
        return
    _barrier(mbarrier).arrive(_task(), int(count))
    _machine().pause()


def _wait(mbarrier, phase, pred=True, deps=()):
    """Until the phase of this parity is over; the one before the first counts as over."""
    if not pred:
        return
    found, parity, task = _barrier(mbarrier), operator.index(phase), _task()
    if parity not in (0, 1):
        raise GluonError(f"{task} waits at {found.name} for phase {parity}, which is neither 0 nor 1")
    if found.phase % 2 == parity:
        target = found.phase
        _machine().pause(lambda: found.phase > target, lambda: found.describe(parity))
        if found.phase != target + 1:
            raise GluonError(f"{task} may miss the phase of {found.name} that it waits for: the next is over too")
    _join(task.clock, found.done[parity])
    _machine().pause()


# ---------------------------------------------------------------------------------------------------------------------
# The copy engine


class Descriptor:
    """A tensor as the copy engine knows it."""

    def __init__(self, host, memory):
        self.host = host
        self.dtype = memory.dtype
        last = builtins.sum((n - 1) * step for n, step in zip(host.shape, host.strides, strict=True))
        if last >= memory.size:
            raise GluonError(f"a descriptor of shape {host.shape}, strides {host.strides} goes beyond its tensor")
        self.data = host.base.detach().as_strided(host.shape, host.strides)
        self.layout = host.layout
        self.block_shape = [int(n) for n in host.block_shape]
        nbytes = math.prod(self.block_shape) * self.dtype.primitive_bitwidth // 8
        self.nbytes_per_cta = nbytes
        self.block_type = SimpleNamespace(
            nbytes=nbytes, shape=self.block_shape, element_ty=self.dtype, numel=math.prod(self.block_shape)
        )
        self.type = SimpleNamespace(block_type=self.block_type, layout=self.layout)
        self.shape = tuple(Value(torch.tensor(n, dtype=torch.int32), _gl.int32) for n in host.shape)
        self.strides = tuple(Value(torch.tensor(n, dtype=torch.int64), _gl.int64) for n in host.strides)

    def places(self, coord):
        """Where a block lies within the tensor, and within the block."""
        if len(coord) != len(self.block_shape):
            raise GluonError(f"{len(coord)} coordinates of a tensor of {len(self.block_shape)} axes")
        outside, inside = [], []
        for start, size, block in zip(map(operator.index, coord), self.data.shape, self.block_shape, strict=True):
            first, last = builtins.max(start, 0), builtins.max(builtins.min(start + block, size), 0)
            last = builtins.max(first, last)
            outside.append(slice(first, last))
            inside.append(slice(first - start, last - start) if last > first else slice(0, 0))
        return tuple(outside), tuple(inside)


def _fits(descriptor, shared):
    if not isinstance(descriptor, Descriptor):
        raise GluonError(f"{descriptor!r} is no descriptor")
    if shared.shape != descriptor.block_shape or shared.dtype != descriptor.dtype:
        raise GluonError(f"a block {descriptor.block_shape} of {descriptor.dtype} and {shared.shape} of {shared.dtype}")
    if shared.layout != descriptor.layout:
        raise GluonError(f"the layout of a descriptor is not that of its memory: {descriptor.layout}, {shared.layout}")


class Copy:
    """On its way into shared memory."""

    def __init__(self, descriptor, coord, barrier, shared, task):
        self.descriptor, self.barrier, self.shared = descriptor, barrier, shared
        self.outside, self.inside = descriptor.places(coord)
        self.region, self.clock = shared.region, dict(task.clock)
        self.region.may_write(task, "a copy")
        self.region.incoming = self
        task.program.coming[barrier] = barrier.phase + 1
        shared.data.copy_(_whatever((), shared.dtype))

    def __repr__(self):
        return f"a copy that {self.barrier.name} waits for"

    def arrive(self):
        self.shared.data.fill_(math.nan if self.descriptor.host.padding == "nan" else 0)
        self.shared.data[self.inside] = self.descriptor.data[self.outside]
        self.region.incoming = None
        self.region.now_written(self.barrier, self.barrier.phase + 1)
        _join(self.barrier.coming, self.clock)
        self.barrier.bytes -= self.descriptor.nbytes_per_cta
        self.barrier.settle()


def _async_load(tensor_desc, coord, barrier, result, pred=True, multicast=False, cache_policy=None):
    if not pred:
        return
    _fits(tensor_desc, result)
    task, machine = _task(), _machine()
    machine.copies.append(Copy(tensor_desc, coord, _barrier(barrier), result, task))
    task.release()
    machine.pause()


class Store:
    """On its way out of shared memory, which it reads no sooner than somebody waits for it."""

    def __init__(self, descriptor, coord, shared, task):
        self.descriptor, self.shared, self.task = descriptor, shared, task
        self.outside, self.inside = descriptor.places(coord)
        self.region = shared.region
        self.region.async_may_read(task, "tma.async_store")
        self.region.outgoing.append(self)

    def __repr__(self):
        return f"a copy by {self.task}, for which tma.store_wait has not waited,"

    def leave(self):
        self.descriptor.data[self.outside] = self.shared.data[self.inside]
        self.region.outgoing.remove(self)
        self.region.now_read(self.task)


def _async_store(tensor_desc, coord, src, cache_policy=None):
    _fits(tensor_desc, src)
    if any(operator.index(start) < 0 for start in coord):
        raise GluonError(f"a copy to {[operator.index(start) for start in coord]}, an illegal instruction on a GPU")
    task = _task()
    task.stores.append(Store(tensor_desc, coord, src, task))
    _machine().pause()


def _store_wait(pendings=0):
    task = _task()
    _machine().pause()
    while len(task.stores) > pendings:
        task.stores.popleft().leave()


# ---------------------------------------------------------------------------------------------------------------------
# Products


class Accumulator:
    """The result of a product that may be under way: nothing but warpgroup_mma and its wait take it."""

    def __init__(self, a, b, acc, use_acc, task):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.layout, self.shape, self.dtype = acc.layout, list(acc.shape), acc.dtype
        self.type = SimpleNamespace(layout=acc.layout)
        self.found = None
        for x in (a, b):
            if isinstance(x, Shared):
                x.region.async_may_read(task, "warpgroup_mma")
                x.region.outgoing.append(self)

    def __repr__(self):
        return f"a product {self.shape}"

    def finish(self, task):
        operands = []
        for x in (self.a, self.b):
            operands.append(x.data.float())
            if isinstance(x, Shared):
                x.region.outgoing.remove(self)
                x.region.now_read(task)
        found = operands[0] @ operands[1]
        if self.use_acc:
            found = (self.acc.found if isinstance(self.acc, Accumulator) else self.acc.data) + found
        self.found = found

    def _use(self, *_):
        raise GluonError(f"{self} is used before warpgroup_mma_wait gave it back")

    __bool__ = __index__ = __neg__ = __iter__ = __len__ = _use

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self._use()


for _name in [*_OPERATORS, *(f"r{name}" for name in _OPERATORS)]:
    setattr(Accumulator, f"__{_name}__", Accumulator._use)


def _warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    task = _task()
    if not isinstance(b, Shared) or not isinstance(b.layout, _gl.NVMMASharedLayout):
        raise GluonError("the right side of a product lies in shared memory, in an NVMMASharedLayout")
    if not isinstance(acc, Value | Accumulator) or not isinstance(acc.layout, _gl.NVMMADistributedLayout):
        raise GluonError("the accumulator of a product has an NVMMADistributedLayout")
    if isinstance(a, Shared):
        if not isinstance(a.layout, _gl.NVMMASharedLayout):
            raise GluonError("the left side of a product in shared memory has an NVMMASharedLayout")
    elif not isinstance(a, Value) or a.layout != _gl.DotOperandLayout(0, acc.layout, 32 // a.dtype.primitive_bitwidth):
        raise GluonError("the left side of a product in registers has the DotOperandLayout 0 of the accumulator")
    if a.dtype != b.dtype or a.dtype not in (_gl.float16, _gl.bfloat16) or acc.dtype != _gl.float32:
        raise GluonError(f"a product of {a.dtype} and {b.dtype} into {acc.dtype} is not emulated")
    if len(a.shape) != 2 or [a.shape[0], b.shape[1]] != list(acc.shape) or a.shape[1] != b.shape[0]:
        raise GluonError(f"shapes of a product: {a.shape}, {b.shape}, {list(acc.shape)}")
    warps, (rows, columns, depth) = acc.layout.warps_per_cta, acc.layout.instr_shape
    if acc.shape[0] % (rows * warps[0]) or acc.shape[1] % (columns * warps[1]) or a.shape[1] % depth:
        raise GluonError(f"{a.shape} times {b.shape} is no multiple of the instruction {acc.layout}")
    product = Accumulator(a, b, acc, bool(use_acc), task)
    task.products.append(product)
    if is_async:
        _machine().pause()
        return product
    return _warpgroup_mma_wait(0, (product,))


def _warpgroup_mma_wait(num_outstanding=0, deps=None):
    if deps is None:
        raise GluonError("warpgroup_mma_wait takes deps")
    task = _task()
    _machine().pause()
    while len(task.products) > num_outstanding:
        task.products.popleft().finish(task)
    # What is still under way stays what it is, and cannot be used.
    found = tuple(
        x if not isinstance(x, Accumulator) or x.found is None else Value(x.found, x.dtype, x.layout) for x in deps
    )
    return found[0] if len(found) == 1 else found


# ---------------------------------------------------------------------------------------------------------------------
# The modules that a kernel imports, and the kernel itself


class Names:
    """What a module offers, and an error for what it would offer elsewhere."""

    def __init__(self, name, **names):
        self.__dict__.update(names)
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise GluonError(f"{self._name}.{name} is not emulated (tests/gluon_emulator.py)")


_OURS = (
    "constexpr", "add", "sub", "mul", "load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_and",
    "atomic_or", "atomic_xor", "atomic_xchg", "exp", "exp2", "log", "log2", "sqrt", "sqrt_rn", "rsqrt", "sin", "cos",
    "erf", "floor", "ceil", "abs", "fdiv", "div_rn", "fma", "cast", "maximum", "minimum", "clamp", "where",
    "inline_asm_elementwise", "full", "zeros", "full_like", "zeros_like", "arange", "reshape", "permute", "expand_dims",
    "convert_layout", "set_auto_layout", "broadcast", "join", "split", "sum", "max", "min", "cdiv", "to_tensor",
    "static_range",
    "static_assert", "device_assert", "assume", "multiple_of", "max_contiguous", "max_constancy", "program_id",
    "num_programs", "warp_specialize", "barrier", "allocate_shared_memory",
)  # fmt: skip
_REAL = {
    name: x
    for name, x in vars(_gl).items()
    if isinstance(x, _gl.dtype) or (inspect.isclass(x) and issubclass(x, DistributedLayout | SharedLayout))
}

gl = Names("gl", **_REAL, **{name: globals()[name] for name in _OURS}, pointer_type=_gl.pointer_type)
mbarrier = Names(
    "mbarrier", MBarrierLayout=_hopper.mbarrier.MBarrierLayout, init=_init, expect=_expect, arrive=_arrive, wait=_wait
)
tma = Names(
    "tma",
    async_load=_async_load,
    async_store=_async_store,
    # As they were called before Triton 3.9.
    async_copy_global_to_shared=_async_load,
    async_copy_shared_to_global=_async_store,
    store_wait=_store_wait,
)
hopper = Names(
    "hopper",
    mbarrier=mbarrier,
    tma=tma,
    warpgroup_mma=_warpgroup_mma,
    warpgroup_mma_wait=_warpgroup_mma_wait,
    fence_async_shared=fence_async_shared,
)


def _assigned(value, name=None):
    """What a variable of a kernel holds: never a Python number, which to the compiler is a constant."""
    if isinstance(value, tuple | list):
        return type(value)(_assigned(x) for x in value)
    if isinstance(value, Shared) and name is not None and value.allocation.name.startswith("unnamed"):
        value.allocation.name = name
    return _value(value) if _is_number(value) else value


def _range(*bounds):
    for i in range(*map(operator.index, bounds)):
        yield _value(i)


class _AsCompiled(ast.NodeTransformer):
    """Assignments and loops of kernels as the compiler takes them."""

    def visit_FunctionDef(self, node):
        if any("jit" in ast.unparse(x) for x in node.decorator_list):
            body = _Body()
            node.body = [body.visit(statement) for statement in node.body]
        return node


def _constant(node):
    """Whether the compiler knows what an expression is."""
    names = (x.id for x in ast.walk(node) if isinstance(x, ast.Name))
    parts = (ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.expr_context)
    return all(isinstance(x, parts) for x in ast.walk(node)) and all(name.strip("_").isupper() for name in names)


class _Body(ast.NodeTransformer):
    def __init__(self):
        self.known = set()
        """Variables so far."""

    @staticmethod
    def _call(name, *arguments):
        return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            self.known.add(node.id)
        return node

    def visit_For(self, node):
        loops = (x for x in ast.walk(node) if isinstance(x, ast.For) and x is not node)
        bounds = {x.id for loop in loops for x in ast.walk(loop.iter) if isinstance(x, ast.Name)} & self.known
        for x in ast.walk(node):
            if isinstance(x, ast.Assign) and _constant(x.value):
                for target in ast.walk(x.targets[0]):
                    if isinstance(target, ast.Name) and target.id in bounds:
                        # It stays what it was before.
                        raise GluonError(
                            f"line {x.lineno}: Triton 3.6 forgets that a loop sets {target.id}, a bound, to a constant"
                        )
        return self.generic_visit(node)

    def visit_Assign(self, node):
        self.generic_visit(node)
        target = node.targets[0]
        name = ast.Constant(target.id if isinstance(target, ast.Name) else None)
        node.value = self._call("__assigned__", node.value, name)
        return ast.fix_missing_locations(node)

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        new = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        new = ast.Assign([node.target], self._call("__assigned__", ast.copy_location(new, node), ast.Constant(None)))
        return ast.fix_missing_locations(ast.copy_location(new, node))

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            node.func = ast.copy_location(ast.Name("__range__", ast.Load()), node.func)
        return node


_CALLABLE_IN_KERNELS = {id(x) for names in (gl, mbarrier, tma, hopper) for x in vars(names).values()}
_CALLABLE_IN_KERNELS |= {id(_assigned), id(_range)}


@functools.lru_cache
def _compiled(source, path):
    return compile(ast.fix_missing_locations(_AsCompiled().visit(ast.parse(source, path))), path, "exec")


class Kernel:
    """A function under @gluon.jit."""

    pre_run_hooks = ()

    def __init__(self, function, emulator):
        self.fn, self.emulator = function, emulator
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.signature = inspect.signature(function)
        self.parameters = list(self.signature.parameters.values())
        self.constants = [i for i, x in enumerate(self.parameters) if "constexpr" in str(x.annotation)]
        self.checked = False

    def __call__(self, *arguments, **named):
        if not self.checked:
            self._check_names()
        if named:
            bound = self.signature.bind(*arguments, **named)
            bound.apply_defaults()
            arguments = bound.args
        for i in self.constants:
            if i < len(arguments) and isinstance(arguments[i], Value | Pointer | Accumulator):
                raise GluonError(f"{self.parameters[i].name} of {self.__name__} is a constexpr, and got a tensor")
        return self.fn(*arguments)

    def _check_names(self):
        """A kernel sees no variable of its module that is not a constexpr."""
        self.checked = True
        for instruction in dis.get_instructions(self.fn):
            if instruction.opname != "LOAD_GLOBAL" or instruction.argval not in self.fn.__globals__:
                continue
            x = self.fn.__globals__[instruction.argval]
            allowed = isinstance(x, Kernel | Names | _Int | _Float | ModuleType | _gl.dtype | DistributedLayout)
            if not allowed and id(x) not in _CALLABLE_IN_KERNELS:
                raise GluonError(f"{self.__name__} uses {instruction.argval}, which is no constexpr of its module")

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.emulator.launch(self, grid, arguments, options)


class Emulator:
    """Modules of kernels, loaded anew so that they run here.

    Each launch draws its order of events from `seed` and the number of launches before. `processors` is how many
    programs run at a time. `edit(name, source)` may change a source before it is executed: to see a fault found.
    """

    def __init__(self, *, seed=0, processors=3, edit=None):
        self.seed, self.processors, self.edit = seed, processors, edit
        self.launches = []
        """(name, programs, steps) of each."""
        self.modules = {}

    def load(self, name):
        """A module by its full name, and those that it imports from beside it and that have kernels."""
        if name not in self.modules:
            path = Path(importlib.util.find_spec(name).origin)
            self.modules[name] = self.execute(path.read_text(encoding="utf-8"), name, str(path))
        return self.modules[name]

    def execute(self, source, name="kernels", path="<kernels>"):
        """The module that a source makes."""
        source = source if self.edit is None else self.edit(name, source)
        module = ModuleType(name)
        module.__package__ = name.rpartition(".")[0]
        module.__file__ = path
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        module.__dict__.update(__assigned__=_assigned, __range__=_range)
        if path.startswith("<"):
            # So that tracebacks show it.
            linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
        exec(_compiled(source, path), module.__dict__)
        self._pretend(module)
        return module

    def _pretend(self, module):
        """That there is a Hopper GPU, and that tensors lie on it: all that a module has to be told."""
        if hasattr(module, "processors"):
            module.processors = lambda device: self.processors
        if "takes" in vars(module):
            takes = module.takes
            module.takes = lambda call, *rest: takes(call._replace(q=_Instead(call.q, is_cuda=True)), *rest)

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002
        if name == "torch" and not fromlist:
            return _TORCH_HERE
        if level == 0 and name.startswith("triton.experimental"):
            known = {
                "triton.experimental": Names("triton.experimental", gluon=Names("gluon", jit=self._jit)),
                "triton.experimental.gluon": Names("gluon", language=gl, jit=self._jit),
                "triton.experimental.gluon.language.nvidia": Names("nvidia", hopper=hopper),
                "triton.experimental.gluon.language.nvidia.hopper": hopper,
                "triton.experimental.gluon.nvidia.hopper": Names("nvidia.hopper", TensorDescriptor=TensorDescriptor),
            }
            if name not in known:
                raise GluonError(f"{name} is not emulated (tests/gluon_emulator.py)")
            return known[name]
        if level == 1:
            package = globals["__package__"]
            if name.startswith("_hopper"):
                return self.load(f"{package}.{name}")
            if not name:
                ours = {x: self.load(f"{package}.{x}") for x in fromlist if x.startswith("_hopper")}
                rest = builtins.__import__(name, globals, locals, fromlist, level)
                return SimpleNamespace(**{x: ours.get(x) or getattr(rest, x) for x in fromlist})
        return builtins.__import__(name, globals, locals, fromlist, level)

    def _jit(self, function=None, **options):
        if function is None:
            return lambda f: self._jit(f, **options)
        if not isinstance(function, FunctionType):
            raise GluonError(f"@gluon.jit of {function!r}")
        kernel = Kernel(function, self)
        for names in (options.get("do_not_specialize", ()), options.get("do_not_specialize_on_alignment", ())):
            for name in names:
                if name not in kernel.signature.parameters:
                    raise GluonError(f"{function.__name__} has no parameter {name}")
        return kernel

    def launch(self, kernel, grid, arguments, options):
        """What kernel[grid](*arguments, **options) does."""
        unknown = set(options) - {"num_warps", "num_stages", "maxnreg", "num_ctas", "enable_fp_fusion"}
        if unknown:
            raise GluonError(f"options {unknown} of a launch are not emulated")
        if len(grid) != 1 or grid[0] < 1:
            raise GluonError(f"a grid of {grid} is not emulated")
        machine = Machine(int(grid[0]), f"{self.seed}.{len(self.launches)}")
        if len(arguments) != len(kernel.parameters):
            raise GluonError(f"{kernel.__name__} takes {len(kernel.parameters)} arguments, not {len(arguments)}")
        given = [x if i in kernel.constants else self._argument(x, machine) for i, x in enumerate(arguments)]
        for number in range(machine.programs):
            task = Task(machine, Program(number), "before partitions", lambda: kernel(*given))
            machine.start(task)
        machine.run()
        self.launches.append((kernel.__name__, machine.programs, machine.steps))
        if machine.copies:
            raise GluonError("a program ended while a copy into its shared memory was under way")

    def _argument(self, x, machine):
        if isinstance(x, torch.Tensor):
            return Pointer(machine.memory(x))
        if isinstance(x, TensorDescriptor):
            return Descriptor(x, machine.memory(x.base))
        if isinstance(x, tuple):
            return tuple(self._argument(y, machine) for y in x)
        return _value(x)


class _Instead:
    """A module, except for some of its names."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


# There is a device to select.
_TORCH_HERE = _Instead(torch, cuda=_Instead(torch.cuda, device=lambda device: nullcontext()))
