"""Blocks of registers, which are tuples of vectors: read, multiplied, added up, turned round. See `_simd`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ._simd import Vector, _address, _call, _constant, _fma, _load, _splat, _store, _vector_of, counted, intrinsic


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
