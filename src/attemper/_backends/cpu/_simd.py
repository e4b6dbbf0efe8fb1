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

import math
import operator
from collections.abc import Callable
from decimal import Decimal, localcontext
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


def _function(name: str) -> Any:
    @intrinsic
    def function(_typing: Any, x: Any) -> Any:
        return x(x), lambda context, b, sig, args: _call(b, f"llvm.{name}.{_suffix(x)}", args[0].type, list(args))

    return function


sqrt, magnitude = _function("sqrt"), _function("fabs")


@intrinsic
def log(_typing: Any, x: Any) -> Any:
    """The natural logarithm of positive, finite, normal numbers: LLVM's own goes through the lanes one by one."""
    width, mantissa = (32, 23) if x.element.bitwidth == 32 else (64, 52)
    whole = ir.VectorType(ir.IntType(width), x.lanes)

    def every_lane(value: int) -> Any:
        return ir.Constant(whole, [ir.Constant(ir.IntType(width), value)] * x.lanes)

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], whole)
        # x = m · 2^e with m between √½ and √2: the exponent of x · √2, as far as bits can tell.
        half = np.array(np.sqrt(0.5), dtype=f"f{width // 8}").view(f"i{width // 8}").item()
        exponent = b.ashr(b.sub(bits, every_lane(half)), every_lane(mantissa))
        m = b.bitcast(b.sub(bits, b.shl(exponent, every_lane(mantissa))), args[0].type)
        one = _constant(x, 1)
        # ln m = 2 artanh((m − 1)/(m + 1)), an odd series that is short for small arguments.
        s = b.fdiv(b.fsub(m, one), b.fadd(m, one))
        square = b.fmul(s, s)
        terms = 5 if width == 32 else 12
        total = _constant(x, 2 / (2 * terms + 1))
        for k in reversed(range(1, terms)):
            total = _fma(b, x, total, square, _constant(x, 2 / (2 * k + 1)))
        # m − 1 is exact and s is not quite: what is lost in 2s is added to the rest.
        rest = b.fmul(b.fmul(total, square), s)
        doubled = b.fadd(s, s)
        power = b.sitofp(exponent, args[0].type)
        low = b.fadd(doubled, rest)
        return _fma(b, x, power, _constant(x, np.log(2)), low)

    return x(x), emit


def _coefficients(degree: int) -> list[float]:
    """Of the polynomial in f through 2^f − 1 on [−½, ½], without its constant 0, highest first.

    Interpolated at Chebyshev's points, which is within a hair of the best there is; (2^f − 1)/f, so that the sum ends
    in a product with f and small results keep all their digits. Powers of the points are almost alike: solved for in
    float64 the last digits would be those of the machine's BLAS.
    """
    with localcontext(prec=60):
        points = [Decimal(math.cos(math.pi * (i + 0.5) / degree) / 2) for i in range(degree)]
        # Newton's differences, then multiplied out.
        values = [((point * Decimal(2).ln()).exp() - 1) / point for point in points]
        for order in range(1, degree):
            for i in reversed(range(order, degree)):
                values[i] = (values[i] - values[i - 1]) / (points[i] - points[i - order])
        nothing = Decimal(0)
        found = [nothing]
        for point, value in zip(reversed(points), reversed(values), strict=True):
            found = [up - point * own for own, up in zip([*found, nothing], [nothing, *found], strict=True)]
            found[0] += value
    return [float(x) for x in reversed(found[:degree])]


_POLYNOMIALS = {32: _coefficients(6), 64: _coefficients(12)}


def _power(b: Any, vector: Vector, x: Any) -> tuple[Any, Any]:
    """2^f − 1 and n for x = n + f."""
    n = _call(b, f"llvm.rint.{_suffix(vector)}", x.type, [x])
    f = b.fsub(x, n)
    first, *rest = _POLYNOMIALS[vector.element.bitwidth]
    total = _constant(vector, first)
    for coefficient in rest:
        total = _fma(b, vector, total, f, _constant(vector, coefficient))
    return total, (n, f)


def _shifted(b: Any, vector: Vector, x: Any, n: Any) -> Any:
    """X · 2^n for whole n; 0 where that is smaller than any normal number."""
    width, mantissa = (32, 23) if vector.element.bitwidth == 32 else (64, 52)
    if target().scalef:
        name = "llvm.x86.avx512.mask.scalef." + ("ps" if width == 32 else "pd") + ".512"
        every = ir.Constant(ir.IntType(vector.lanes), -1)
        current = ir.Constant(ir.IntType(32), 4)
        return _call(b, name, x.type, [x, n, _constant(vector, 0), every, current])
    whole = ir.VectorType(ir.IntType(width), vector.lanes)

    def every_lane(value: int) -> Any:
        return ir.Constant(whole, [ir.Constant(ir.IntType(width), value)] * vector.lanes)

    exponent = b.shl(b.fptosi(n, whole), every_lane(mantissa))
    moved = b.bitcast(b.add(b.bitcast(x, whole), exponent), x.type)
    lowest = _constant(vector, -126.0 if width == 32 else -1022.0)
    return b.select(b.fcmp_ordered("<", n, lowest), _constant(vector, 0), moved)


@intrinsic
def exp2(_typing: Any, x: Any) -> Any:
    """2^x, exactly 1 at 0 and exactly 0 where it is smaller than any number; x must be finite or NaN."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        slope, (n, f) = _power(b, x, args[0])
        return _shifted(b, x, _fma(b, x, slope, f, _constant(x, 1)), n)

    return x(x), emit


@intrinsic
def tanh(_typing: Any, x: Any) -> Any:
    """The hyperbolic tangent, to all digits also near 0; NaN stays."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        size = _call(b, f"llvm.fabs.{_suffix(x)}", args[0].type, [args[0]])
        doubled = b.fmul(size, _constant(x, 2 / np.log(2)))
        high = _constant(x, 60.0)
        doubled = b.select(b.fcmp_ordered("<", high, doubled), high, doubled)
        slope, (n, f) = _power(b, x, doubled)
        # e^(2x) − 1 = (2^f − 1)·2^n + (2^n − 1), of which no part is small but when all is.
        scale = _shifted(b, x, _constant(x, 1), n)
        grown = _fma(b, x, b.fmul(slope, f), scale, b.fsub(scale, _constant(x, 1)))
        result = b.fdiv(grown, b.fadd(grown, _constant(x, 2)))
        return _call(b, f"llvm.copysign.{_suffix(x)}", result.type, [result, args[0]])

    return x(x), emit


# Blocks of registers.


def _tuple_of(b: Any, values: list[Any]) -> Any:
    block = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        block = b.insert_value(block, value, i)
    return block


def _members(b: Any, block: Any, count: int) -> list[Any]:
    return [b.extract_value(block, i) for i in range(count)]


@counted
def zeros(_typing: Any, p: Any, n: Any) -> Any:
    """A tuple of n vectors of zeros."""
    vector = _vector_of(p.dtype)
    count = n.literal_value
    block = types.UniTuple(vector, count)
    return block(p, n), lambda context, b, sig, args: _tuple_of(b, [_constant(vector, 0)] * count)


@counted
def load_block(_typing: Any, p: Any, i: Any, n: Any) -> Any:
    """A tuple of n vectors from p[i:], one behind the other."""
    vector = _vector_of(p.dtype)

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        p, i, _ = args
        steps = [b.add(i, ir.Constant(i.type, c * vector.lanes)) for c in range(n.literal_value)]
        return _tuple_of(b, [_load(b, p, step, vector) for step in steps])

    return types.UniTuple(vector, n.literal_value)(p, types.int64, n), emit


@intrinsic
def load_square(_typing: Any, p: Any) -> Any:
    """As many vectors as each has lanes."""
    vector = _vector_of(p.dtype)

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        steps = [ir.Constant(ir.IntType(64), r * vector.lanes) for r in range(vector.lanes)]
        return _tuple_of(b, [_load(b, args[0], step, vector) for step in steps])

    return types.UniTuple(vector, vector.lanes)(p), emit


@intrinsic
def store_square(_typing: Any, p: Any, block: Any) -> Any:
    """Write as many vectors as each has lanes."""

    def emit(context: Any, b: Any, _sig: Any, args: Any) -> Any:
        for r, value in enumerate(_members(b, args[1], block.count)):
            _store(b, args[0], ir.Constant(ir.IntType(64), r * block.dtype.lanes), value)
        return context.get_dummy_value()

    return types.void(p, block), emit


@intrinsic
def store_apart(_typing: Any, p: Any, _i: Any, _stride: Any, block: Any) -> Any:
    """Write a tuple of vectors to p[i:], a stride apart."""

    def emit(context: Any, b: Any, _sig: Any, args: Any) -> Any:
        p, i, stride, values = args
        for r, value in enumerate(_members(b, values, block.count)):
            _store(b, p, b.add(i, b.mul(stride, ir.Constant(stride.type, r))), value)
        return context.get_dummy_value()

    return types.void(p, types.int64, types.int64, block), emit


@intrinsic
def load_apart(_typing: Any, p: Any, _i: Any, _stride: Any) -> Any:
    """As many vectors as each has lanes, a stride apart."""
    vector = _vector_of(p.dtype)

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        p, i, stride = args
        steps = [b.add(i, b.mul(stride, ir.Constant(stride.type, r))) for r in range(vector.lanes)]
        return _tuple_of(b, [_load(b, p, step, vector) for step in steps])

    return types.UniTuple(vector, vector.lanes)(p, types.int64, types.int64), emit


@intrinsic
def store_block(_typing: Any, p: Any, _i: Any, block: Any) -> Any:
    """Write a tuple of vectors to p[i:], one behind the other."""

    def emit(context: Any, b: Any, _sig: Any, args: Any) -> Any:
        p, i, values = args
        for c, value in enumerate(_members(b, values, block.count)):
            _store(b, p, b.add(i, ir.Constant(i.type, c * block.dtype.lanes)), value)
        return context.get_dummy_value()

    return types.void(p, types.int64, block), emit


@counted
def row_offsets(_typing: Any, _stride: Any, n: Any, _present: Any) -> Any:
    """The offsets of n rows a stride apart; those that are not present repeat the last that is."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        return _clamped_rows(b, args[0], n.literal_value, args[2])

    return types.UniTuple(types.int64, n.literal_value)(types.int64, n, types.int64), emit


def _clamped_rows(b: Any, stride: Any, count: int, present: Any) -> Any:
    last = b.sub(present, ir.Constant(present.type, 1))
    offsets = []
    for r in range(count):
        own = ir.Constant(last.type, r)
        offsets.append(b.mul(stride, b.select(b.icmp_signed("<", own, last), own, last)))
    return _tuple_of(b, offsets)


@counted
def load_rows(_typing: Any, p: Any, offsets: Any, columns: Any) -> Any:
    """A block of some vectors from each row."""
    vector = _vector_of(p.dtype)
    count = columns.literal_value

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        rows = _members(b, args[1], offsets.count)
        steps = [b.add(row, ir.Constant(row.type, c * vector.lanes)) for row in rows for c in range(count)]
        return _tuple_of(b, [_load(b, args[0], step, vector) for step in steps])

    return types.UniTuple(vector, offsets.count * count)(p, offsets, columns), emit


@intrinsic
def store_rows(_typing: Any, p: Any, offsets: Any, block: Any) -> Any:
    """Write a block to its rows, the last first: where rows are the same, the first of them stays."""
    columns = block.count // offsets.count

    def emit(context: Any, b: Any, _sig: Any, args: Any) -> Any:
        rows, values = _members(b, args[1], offsets.count), _members(b, args[2], block.count)
        for i in reversed(range(block.count)):
            step = ir.Constant(ir.IntType(64), i % columns * block.dtype.lanes)
            _store(b, args[0], b.add(rows[i // columns], step), values[i])
        return context.get_dummy_value()

    return types.void(p, offsets, block), emit


@intrinsic
def pick(_typing: Any, p: Any, offsets: Any, _i: Any) -> Any:
    """The tuple of p[offset + i]."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        p, offsets_, i = args
        start = _address(b, p, i)
        return _tuple_of(b, [b.load(_address(b, start, o)) for o in _members(b, offsets_, offsets.count)])

    return types.UniTuple(p.dtype, offsets.count)(p, offsets, types.int64), emit


@intrinsic
def fetch(_typing: Any, p: Any, _i: Any) -> Any:
    """Have the memory at p[i] brought near, wherever that is: nothing happens if it is nowhere."""

    def emit(context: Any, b: Any, _sig: Any, args: Any) -> Any:
        place = b.bitcast(_address(b, *args), ir.IntType(8).as_pointer())
        _prefetch(b, place)
        return context.get_dummy_value()

    return types.void(p, types.int64), emit


def _prefetch(b: Any, place: Any) -> None:
    # Not into the nearest cache of all: what is being read would have to make room.
    read, near, data = (ir.Constant(ir.IntType(32), value) for value in (0, 2, 1))
    _call(b, "llvm.prefetch.p0", ir.VoidType(), [place, read, near, data])


@intrinsic
def dot_rows(_typing: Any, acc: Any, x: Any, p: Any, offsets: Any, _i: Any) -> Any:
    """acc[r] + x · p[offset of r + i:], lane by lane: the loop body of some dot products."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        total, vector, p_, rows, i = args
        start = _address(b, p_, i)
        loaded = [_load(b, start, row, x) for row in _members(b, rows, offsets.count)]
        added = [_fma(b, x, vector, y, z) for y, z in zip(loaded, _members(b, total, acc.count), strict=True)]
        return _tuple_of(b, added)

    return acc(acc, x, p, offsets, types.int64), emit


@intrinsic
def scaled_block(_typing: Any, block: Any, columns: Any) -> Any:
    """block[r, c] · columns[c]."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        factors = _members(b, args[1], columns.count)
        return _tuple_of(
            b, [b.fmul(x, factors[i % columns.count]) for i, x in enumerate(_members(b, args[0], block.count))]
        )

    return block(block, columns), emit


@intrinsic
def added_blocks(_typing: Any, one: Any, _two: Any) -> Any:
    """The sum of two blocks."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        pairs = zip(*(_members(b, block, one.count) for block in args), strict=True)
        return _tuple_of(b, [b.fadd(x, y) for x, y in pairs])

    return one(one, one), emit


@intrinsic
def times_all(_typing: Any, block: Any, x: Any) -> Any:
    """Every vector of a block times one."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        return _tuple_of(b, [b.fmul(member, args[1]) for member in _members(b, args[0], block.count)])

    return block(block, x), emit


@intrinsic
def rows_maximum(_typing: Any, columns: Any, block: Any) -> Any:
    """columns[c], or the largest block[r, c] where that is larger."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        best = _members(b, args[0], columns.count)
        for i, x in enumerate(_members(b, args[1], block.count)):
            own = best[i % columns.count]
            best[i % columns.count] = b.select(b.fcmp_ordered(">", x, own), x, own)
        return _tuple_of(b, best)

    return columns(columns, block), emit


@intrinsic
def rows_sum(_typing: Any, columns: Any, block: Any) -> Any:
    """columns[c] plus all block[r, c]."""

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        total = _members(b, args[0], columns.count)
        for i, x in enumerate(_members(b, args[1], block.count)):
            total[i % columns.count] = b.fadd(total[i % columns.count], x)
        return _tuple_of(b, total)

    return columns(columns, block), emit


@intrinsic
def outer(_typing: Any, acc: Any, columns: Any, rows: Any) -> Any:
    """acc[r, c] + columns[c] · rows[r], where columns are vectors and rows numbers.

    Of 32-bit whole numbers each is a pair of bfloat16, and both products of a pair are added.
    """

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        total = _members(b, args[0], acc.count)
        left, right = _members(b, args[1], columns.count), _members(b, args[2], rows.count)
        added = []
        for r, number in enumerate(right):
            every = _splat(b, columns.dtype, number)
            for c, vector in enumerate(left):
                x = total[r * columns.count + c]
                if isinstance(columns.dtype.element, types.Integer):
                    added.append(_dot_pairs(b, x, vector, every))
                else:
                    added.append(_fma(b, columns.dtype, vector, every, x))
        return _tuple_of(b, added)

    return acc(acc, columns, rows), emit


class _BFloat16(ir.types.Type):  # type: ignore[misc]
    """llvmlite has no name for it."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 32)


def _dot_pairs(b: Any, total: Any, x: Any, y: Any) -> Any:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return _call(b, name, total.type, [total, b.bitcast(x, _PAIRS), b.bitcast(y, _PAIRS)])


@intrinsic
def pair_up(_typing: Any, x: Any, y: Any) -> Any:
    """Each lane of x and y, rounded to bfloat16, side by side in 32 bits, x in the lower half."""
    result = Vector(types.uint32, x.lanes)

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        both = _call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, [args[1], args[0]])
        words = b.bitcast(both, ir.VectorType(ir.IntType(16), 32))
        order = [lane + side * 16 for lane in range(16) for side in (0, 1)]
        index = ir.Constant(ir.VectorType(ir.IntType(32), 32), order)
        return b.bitcast(b.shuffle_vector(words, words, index), ir.VectorType(ir.IntType(32), 16))

    return result(x, y), emit


@intrinsic
def transpose(_typing: Any, rows: Any) -> Any:
    """The columns of a square block."""
    size = rows.dtype.lanes

    def emit(_context: Any, b: Any, _sig: Any, args: Any) -> Any:
        block, half = _members(b, args[0], size), size // 2
        i32 = ir.VectorType(ir.IntType(32), size)
        low = ir.Constant(i32, [lane // 2 + (lane % 2) * size for lane in range(size)])
        high = ir.Constant(i32, [lane // 2 + half + (lane % 2) * size for lane in range(size)])
        for _ in range(size.bit_length() - 1):
            pairs = list(zip(block[:half], block[half:], strict=True))
            block = [b.shuffle_vector(x, y, order) for x, y in pairs for order in (low, high)]
        return _tuple_of(b, block)

    return rows(rows), emit
