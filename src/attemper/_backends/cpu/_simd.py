"""A small vocabulary of vector operations for Numba, so that a kernel reads as Python and runs as SIMD instructions.

A `Vector` is a row of numbers that one instruction works on: as many of them as the processor's registers hold.
Vectors have the operators of numbers (`+ - * /`, comparisons, `& | ^ << >>` and the functions below), all of them lane
by lane. A tuple of vectors is a block of registers: a loop that carries one from turn to turn keeps it out of memory.

    load(p, i), store(p, i, x)          a vector from p[i:], and back
    load_some, store_some               only the first n lanes; the rest is 0, or left alone
    load_block(p, i, n), zeros(p, n)    a tuple of n vectors
    spread(x)                           a number in every lane
    fma, maximum, where, exp2, log, sqrt, magnitude
    outer(acc, a, b)                    acc[r, c] += a[c] · b[r]: the loop body of every matrix product
    transpose(rows)                     of a square block
    pick(p, offsets, i)                 a tuple of numbers p[offset + i]

and a few for memory: `pointer(address, kind)`, `at(p, i)`, `count_up(p, i)`. A pointer `p` is C's: `p[i]` reads,
`p[i] = x` writes, nobody checks. Everything is plain LLVM, which makes the best of it on any processor; the two
instructions for which LLVM has no word (x86's scalef and its product of pairs of bfloat16) are used where the processor
has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import lower_builtin, models, register_model

from ._target import target


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that says itself which LLVM instructions it is made of; it takes the kinds of its arguments."""
    return numba_intrinsic(function)


def counted(function: Callable[..., Any]) -> Any:
    """The same for one of whose arguments the value is known when it is compiled: a count."""
    return numba_intrinsic(prefer_literal=True)(function)


class Vector(types.Type):  # type: ignore[misc]
    """As many numbers of one kind as a register holds."""

    def __init__(self, element: Any, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_element(fe_type), fe_type.lanes))


def _element(vector: Vector) -> Any:
    if vector.element == types.boolean:
        return ir.IntType(1)
    if isinstance(vector.element, types.Integer):
        return ir.IntType(vector.element.bitwidth)
    return ir.FloatType() if vector.element == types.float32 else ir.DoubleType()


def _vector_of(element: Any) -> Vector:
    """The vector of a kind of number; short ones come as many as there are 32-bit ones."""
    return Vector(element, target().bits // max(element.bitwidth, 32))


def _pair(vector: Vector) -> Vector:
    """Integers as wide as the elements of a vector of floating numbers."""
    return Vector(types.int32 if vector.element.bitwidth == 32 else types.int64, vector.lanes)


def _constant(vector: Vector, value: Any) -> Any:
    element = _element(vector)
    if isinstance(element, ir.FloatType):
        value = float(np.float32(value))
    return ir.Constant(ir.VectorType(element, vector.lanes), [ir.Constant(element, value)] * vector.lanes)


def _splat(b: Any, vector: Vector, x: Any) -> Any:
    llvm_type = ir.VectorType(x.type, vector.lanes)
    undefined = ir.Constant(llvm_type, ir.Undefined)
    first = b.insert_element(undefined, x, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), [0] * vector.lanes)
    return b.shuffle_vector(first, undefined, zeros)


def _call(b: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A call of one of LLVM's own functions."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [x.type for x in arguments]), name)
    return b.call(function, arguments)


def _suffix(vector: Vector) -> str:
    return f"v{vector.lanes}{'i' if isinstance(vector.element, types.Integer) else 'f'}{vector.element.bitwidth}"


def _fma(b: Any, vector: Vector, x: Any, y: Any, z: Any) -> Any:
    if target().bits == 128 and target().registers == 16:
        # Without the instruction LLVM would call a function for each lane; two roundings do as well.
        return b.fadd(b.fmul(x, y), z)
    return _call(b, f"llvm.fma.{_suffix(vector)}", x.type, [x, y, z])


# Operators.


def _is_floating(vector: Vector) -> bool:
    return isinstance(vector.element, types.Float)


def _operator(op: Callable[..., Any], emit: Callable[..., Any], result: Callable[[Vector], Any]) -> None:
    class Typed(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(result(args[0]), *args)
            return None

    infer_global(op)(Typed)

    @lower_builtin(op, Vector, Vector)  # type: ignore[untyped-decorator]
    def _(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return emit(b, sig.args[0], *args)


def _same(vector: Vector) -> Vector:
    return vector


def _truth(vector: Vector) -> Vector:
    return Vector(types.boolean, vector.lanes)


for _op, _floating, _whole in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv", "sdiv"),
):
    _operator(_op, lambda b, v, x, y, f=_floating, w=_whole: getattr(b, f if _is_floating(v) else w)(x, y), _same)
for _op, _name in ((operator.and_, "and_"), (operator.or_, "or_"), (operator.xor, "xor"), (operator.lshift, "shl")):
    _operator(_op, lambda b, v, x, y, name=_name: getattr(b, name)(x, y), _same)
_operator(operator.rshift, lambda b, v, x, y: b.lshr(x, y), _same)


def _compare(sign: str) -> Callable[..., Any]:
    def emit(b: Any, v: Vector, x: Any, y: Any) -> Any:
        if _is_floating(v):
            return b.fcmp_ordered(sign, x, y)
        return (b.icmp_signed if v.element.signed else b.icmp_unsigned)(sign, x, y)

    return emit


for _op, _name in (
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.eq, "=="),
):
    _operator(_op, _compare(_name), _truth)


# Memory.


def _address(b: Any, p: Any, i: Any) -> Any:
    return b.gep(p, [i])


def _load(b: Any, p: Any, i: Any, vector: Vector) -> Any:
    place = b.bitcast(_address(b, p, i), ir.VectorType(_element(vector), vector.lanes).as_pointer())
    return b.load(place, align=vector.element.bitwidth // 8)


def _store(b: Any, p: Any, i: Any, x: Any) -> None:
    place = b.bitcast(_address(b, p, i), x.type.as_pointer())
    element = x.type.element
    size = element.width // 8 if isinstance(element, ir.IntType) else 4 if isinstance(element, ir.FloatType) else 8
    b.store(x, place, align=size)


@intrinsic
def pointer(_typing: Any, address: Any, kind: Any) -> Any:
    """A pointer to numbers of a kind, from a whole number."""
    result = types.CPointer(kind.instance_type)

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, kind), emit


@intrinsic
def pointer_as(_typing: Any, p: Any, _address: Any) -> Any:
    """A pointer of the same kind to another place."""
    return p(p, types.int64), lambda context, b, sig, args: b.inttoptr(args[1], context.get_value_type(p))


@intrinsic
def at(_typing: Any, p: Any, _i: Any) -> Any:
    """The pointer to p[i]."""
    return p(p, types.int64), lambda context, b, sig, args: _address(b, *args)


@intrinsic
def address_of(_typing: Any, p: Any) -> Any:
    """The pointer as a whole number."""
    return types.int64(p), lambda context, b, sig, args: b.ptrtoint(args[0], ir.IntType(64))


@intrinsic
def as_indices(_typing: Any, p: Any) -> Any:
    """The same memory as whole numbers as wide as the floating ones there."""
    result = types.CPointer(types.int32 if p.dtype == types.float32 else types.int64)
    return result(p), lambda context, b, sig, args: b.bitcast(args[0], context.get_value_type(result))


@intrinsic
def count_up(_typing: Any, p: Any, _i: Any) -> Any:
    """p[i], which is one more afterwards; no two threads get the same."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _address(b, *args), ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(p, types.int64), emit


@intrinsic
def lanes(_typing: Any, p: Any) -> Any:
    """How many numbers of a pointer's kind are in a vector."""
    number = _vector_of(p.dtype).lanes
    return types.int64(p), lambda context, b, sig, args: ir.Constant(ir.IntType(64), number)


@intrinsic
def per_cell(_typing: Any, p: Any) -> Any:
    """How many numbers one cell of an operand holds: two where cells are pairs of bfloat16."""
    number = 2 if p.dtype == types.uint32 else 1
    return types.int64(p), lambda context, b, sig, args: ir.Constant(ir.IntType(64), number)


@intrinsic
def load(_typing: Any, p: Any, _i: Any) -> Any:
    """The vector at p[i:]."""
    vector = _vector_of(p.dtype)
    return vector(p, types.int64), lambda context, b, sig, args: _load(b, args[0], args[1], vector)


@intrinsic
def store(_typing: Any, p: Any, _i: Any, x: Any) -> Any:
    """Write a vector to p[i:]."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _store(b, *args)
        return context.get_dummy_value()

    return types.void(p, types.int64, x), emit


def _first_lanes(b: Any, vector: Vector, n: Any) -> Any:
    i32 = ir.IntType(32)
    index = ir.Constant(ir.VectorType(i32, vector.lanes), [ir.Constant(i32, i) for i in range(vector.lanes)])
    return b.icmp_signed("<", index, _splat(b, vector, b.trunc(n, i32)))


@intrinsic
def load_some(_typing: Any, p: Any, _i: Any, _n: Any) -> Any:
    """The first n numbers of p[i:] as a vector; nothing beyond them is touched."""
    vector = _vector_of(p.dtype)

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        p, i, n = args
        llvm_type = ir.VectorType(_element(vector), vector.lanes)
        place = b.bitcast(_address(b, p, i), llvm_type.as_pointer())
        size = ir.Constant(ir.IntType(32), vector.element.bitwidth // 8)
        name = f"llvm.masked.load.{_suffix(vector)}.p0"
        if _old_masked_load():
            return _call(b, name, llvm_type, [place, size, _first_lanes(b, vector, n), _constant(vector, 0)])
        return _call(b, name, llvm_type, [place, _first_lanes(b, vector, n), _constant(vector, 0)])

    return vector(p, types.int64, types.int64), emit


@intrinsic
def store_some(_typing: Any, p: Any, _i: Any, x: Any, _n: Any) -> Any:
    """Write the first n lanes of a vector to p[i:]."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        p, i, x, n = args
        vector = sig.args[2]
        place = b.bitcast(_address(b, p, i), x.type.as_pointer())
        size = ir.Constant(ir.IntType(32), vector.element.bitwidth // 8)
        name = f"llvm.masked.store.{_suffix(vector)}.p0"
        shown = _first_lanes(b, vector, n)
        _call(b, name, ir.VoidType(), [x, place, size, shown] if _old_masked_load() else [x, place, shown])
        return context.get_dummy_value()

    return types.void(p, types.int64, x, types.int64), emit


@cache
def _old_masked_load() -> bool:
    """Up to LLVM 21 the alignment was an argument."""
    return bool(llvm.llvm_version_info[0] < 22)


# Numbers to vectors and back.


@intrinsic
def spread(_typing: Any, x: Any) -> Any:
    """A number in every lane."""
    vector = _vector_of(types.unliteral(x))
    return vector(types.unliteral(x)), lambda context, b, sig, args: _splat(b, vector, args[0])


@intrinsic
def spread_as(_typing: Any, p: Any, x: Any) -> Any:
    """A number in every lane, as the kind of number that p points to."""
    vector = _vector_of(p.dtype)
    number = types.unliteral(x)

    def emit(context: Any, b: Any, _sig: Any, args: Any) -> Any:
        return _splat(b, vector, context.cast(b, args[1], number, p.dtype))

    return vector(p, number), emit


@intrinsic
def to_floating(_typing: Any, x: Any) -> Any:
    """Whole numbers as floating ones of the same width."""
    result = Vector(types.float32 if x.element.bitwidth == 32 else types.float64, x.lanes)
    llvm_type = ir.VectorType(_element(result), x.lanes)
    return result(x), lambda context, b, sig, args: b.sitofp(args[0], llvm_type)


@intrinsic
def to_whole(_typing: Any, x: Any) -> Any:
    """Floating numbers as whole ones of the same width."""
    result = _pair(x)
    llvm_type = ir.VectorType(_element(result), x.lanes)
    return result(x), lambda context, b, sig, args: b.fptosi(args[0], llvm_type)


@intrinsic
def as_words(_typing: Any, x: Any) -> Any:
    """Whole numbers as ones of 64 bits, in two registers where they do not fit into one."""
    result = Vector(types.int64, x.lanes)
    llvm_type = ir.VectorType(ir.IntType(64), x.lanes)
    return result(x), lambda context, b, sig, args: args[0] if x == result else b.sext(args[0], llvm_type)


@intrinsic
def bits_of(_typing: Any, x: Any) -> Any:
    """The bits of floating numbers of 32 as whole numbers, unsigned; of whole numbers as floating ones."""
    result = Vector(types.float32 if x.element == types.uint32 else types.uint32, x.lanes)
    llvm_type = ir.VectorType(_element(result), x.lanes)
    return result(x), lambda context, b, sig, args: b.bitcast(args[0], llvm_type)


@intrinsic
def widen(_typing: Any, x: Any) -> Any:
    """Unsigned numbers of 8 or 16 bits as ones of 32."""
    result = Vector(types.uint32, x.lanes)
    llvm_type = ir.VectorType(ir.IntType(32), x.lanes)
    return result(x), lambda context, b, sig, args: b.zext(args[0], llvm_type)


@intrinsic
def narrow(_typing: Any, x: Any) -> Any:
    """The low 16 bits of each lane."""
    result = Vector(types.uint16, x.lanes)
    llvm_type = ir.VectorType(ir.IntType(16), x.lanes)
    return result(x), lambda context, b, sig, args: b.trunc(args[0], llvm_type)


@intrinsic
def first_lane(_typing: Any, x: Any) -> Any:
    """The number in the first lane."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        return b.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return x.element(x), emit


@intrinsic
def any_lane(_typing: Any, x: Any) -> Any:
    """Whether any lane is true."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        whole = b.bitcast(args[0], ir.IntType(x.lanes))
        return b.icmp_unsigned("!=", whole, ir.Constant(ir.IntType(x.lanes), 0))

    return types.boolean(x), emit


def _fold(b: Any, vector: Vector, x: Any, join: Callable[..., Any]) -> Any:
    """One number of all lanes, halves joined with halves."""
    i32, n = ir.IntType(32), vector.lanes
    while n > 1:
        n //= 2
        halves = ([ir.Constant(i32, start + i) for i in range(n)] for start in (0, n))
        x = join(*(b.shuffle_vector(x, x, ir.Constant(ir.VectorType(i32, n), half)) for half in halves))
    return b.extract_element(x, ir.Constant(i32, 0))


@intrinsic
def sum_of_lanes(_typing: Any, x: Any) -> Any:
    """The sum of the numbers of a vector."""
    return x.element(x), lambda context, b, sig, args: _fold(b, x, args[0], b.fadd)


@intrinsic
def highest_of_lanes(_typing: Any, x: Any) -> Any:
    """The largest of them."""

    def larger(b: Any, one: Any, two: Any) -> Any:
        return b.select(b.fcmp_ordered(">", one, two), one, two)

    return x.element(x), lambda context, b, sig, args: _fold(b, x, args[0], lambda *both: larger(b, *both))


# Arithmetic.


@intrinsic
def fma(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """X · y + z, rounded once where the processor can."""
    return x(x, y, z), lambda context, b, sig, args: _fma(b, x, *args)


@intrinsic
def maximum(_typing: Any, x: Any, y: Any) -> Any:
    """The larger lanes; y where either is NaN."""
    return x(x, y), lambda context, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def where(_typing: Any, choice: Any, x: Any, y: Any) -> Any:
    """The lanes of x where the choice is true, else those of y."""
    return x(choice, x, y), lambda context, b, sig, args: b.select(*args)
