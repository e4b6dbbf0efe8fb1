# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator,annotation-unchecked"
"""A tile of scores in the kernels for Hopper GPUs: what is hidden in it, its weights, and what they add up to.

Four threads share a row. Sums over its columns stay with each of them until all tiles are through. See `_hopper`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_HIDDEN = gl.constexpr(-(2.0**100))
"""What stands for q·k of a key the row does not see: after scaling still far below all that pass as a reference."""
_NO_REFERENCE = gl.constexpr(2.0**120)
"""Of a row that saw no key yet. Against it every score weighs 0, and so does Σp·x, which an infinity would spoil."""


@gluon.jit
def _own_sum(x):
    """Per row, one sum for each of the four threads that share it: what they have to add to each other waits."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), axis=1), axis=2)


@gluon.jit
def _halves(x):
    """The left and the right columns of a tile; of the last eight, those with even and with odd numbers."""
    if x.shape[1] == 8:
        return x.reshape([x.shape[0], 4, 2]).split()
    else:
        return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _added(x, sums):
    """The columns of a tile, one after the other, added to the sums of each of the four threads that share a row."""
    if x.shape[1] > 4:
        left, right = _halves(x)
        sums = _added(right, _added(left, sums))
    else:
        sums += gl.convert_layout(x, sums.type.layout)
    return sums


@gluon.jit
def _within(s, distance, width):
    """The scores of keys, which are so far from the first that is seen; _HIDDEN beyond a width."""
    # One unsigned comparison for both ends. Of a plain one LLVM makes vectors of bits, and takes them apart again.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fF1800000, p; }", "=f,f,r,r",
        [s, distance, width], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _shown(s, start, first, width):
    """The scores of keys from a start on, _HIDDEN for those that their row does not see."""
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    keys = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    distance = gl.expand_dims(keys, 0) - gl.expand_dims(gl.convert_layout(first, rows), 1)
    return _within(s, distance, gl.expand_dims(gl.convert_layout(width, rows), 1))


@gluon.jit
def _own_bits(x):
    """Which bits are set anywhere in the columns of each of the four threads that share a row."""
    if x.shape[1] > 4:
        left, right = _halves(x)
        return _own_bits(left | right)
    else:
        return x


@gluon.jit
def _column(x, like):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _meets(start, first, width, N: gl.constexpr):
    """Whether a row sees any of N keys."""
    return gl.minimum(first + width, start + N) > gl.maximum(first, start)


@gluon.jit
def _joined(left, right):
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _weigh(s, reference, c, sums, DTYPE: gl.constexpr, LEVEL: gl.constexpr, ADD: gl.constexpr, MASKED: gl.constexpr):
    """Some columns at a time: the compiler keeps to the order, and fills the time that exponentials take with sums."""
    if s.shape[1] > 8:
        left, right = _halves(s)
        left, sums = _weigh(left, reference, c, sums, DTYPE, LEVEL, ADD, MASKED)
        right, sums = _weigh(right, reference, c, sums, DTYPE, LEVEL, ADD, MASKED)
        return _joined(left, right), sums
    else:
        total, tilted, squares, largest, moved, spread = sums
        x = s * c - gl.expand_dims(gl.convert_layout(reference, gl.SliceLayout(1, s.type.layout)), 1)
        p = gl.exp2(x)
        if ADD:
            seen = x
            if MASKED:
                seen = gl.where(s > _HIDDEN, x, 0.0)
            moved = _added(seen, moved)
            spread = _added(seen * seen, spread)
        total = _added(p, total)
        if LEVEL >= 1:
            # The bits of numbers from 0 on are ordered like integers, of which one instruction compares three.
            left, right = _halves(p.to(gl.int32, bitcast=True))
            of_both = gl.convert_layout(gl.maximum(left, right), largest.type.layout)
            largest = gl.maximum(largest, of_both)
        if LEVEL >= 2:
            tilted = _added(p * x, tilted)
            squares = _added(p * p, squares)
        return p.to(DTYPE), (total, tilted, squares, largest, moved, spread)


@gluon.jit
def _opening(s):
    """The scores of a tile's first key, as bits: each with one of the four threads that share a row."""
    first = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)) == 0
    return _own_sum(gl.where(gl.expand_dims(first, 0), s.to(gl.int32, bitcast=True), 0))


@gluon.jit
def _turned(x, q, mean_ptr, D: gl.constexpr, N: gl.constexpr):
    """From the product of q and a table its product with q again, and q times the mean of the keys."""
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    if N > D:
        # The upper bits of the table, and beside them the lower.
        upper, lower = _halves(x)
        x = gl.convert_layout(upper + lower, A)
    own = q.load(A).to(gl.float32)
    mean = gl.load(mean_ptr + gl.arange(0, D, gl.SliceLayout(0, A)))
    return _own_sum(x * own), _own_sum(own * gl.expand_dims(mean, 0))


@gluon.jit
def _look(s, start, bounds, reference, c):
    """Scores of keys of which rows may not see all, and references of rows that had none."""
    first, width = bounds
    s = _shown(s, start, first, width)
    new = (reference == _NO_REFERENCE) & _meets(start, first, width, s.shape[1])
    return s, gl.where(new, gl.convert_layout(gl.max(s, axis=1), reference.type.layout) * c, reference)


@gluon.jit
def _first(
    s, start, stop, bounds, reference, c, sums, P: gl.constexpr,
    DTYPE: gl.constexpr, LEVEL: gl.constexpr, ADD: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Weights, references and sums of an item's first tile."""
    if s.shape[1] <= s.shape[0]:
        s, reference = _look(s, start, bounds, reference, c)
        weights, sums = _weigh(s, reference, c, sums, DTYPE, LEVEL, ADD, True)
        return gl.convert_layout(weights, P), reference, sums
    # Under a causal mask half of it is often hidden.
    left, right = _halves(s)
    left, reference = _look(left, start, bounds, reference, c)
    # Rounded after the branch: what products read must not come out of it.
    p_left, sums = _weigh(left, reference, c, sums, gl.float32, LEVEL, ADD, True)
    p_right = gl.zeros_like(p_left)
    middle = start + s.shape[1] // 2
    if not BOUNDED or stop > middle:
        right, reference = _look(right, middle, bounds, reference, c)
        p_right, sums = _weigh(right, reference, c, sums, gl.float32, LEVEL, ADD, True)
    return gl.convert_layout(_joined(p_left, p_right).to(DTYPE), P), reference, sums
