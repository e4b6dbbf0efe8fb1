"""Functions of vectors, lane by lane: 2^x, logarithm, hyperbolic tangent, root, magnitude. See `_simd`."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from llvmlite import ir

from ._simd import Vector, _call, _constant, _fma, _suffix, intrinsic
from ._target import target


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
