"""Each vector operation of the CPU kernels, lane by lane, against NumPy."""

import math
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numba import float32, float64, int32, int64, uint8, uint16, uint32

from attemper._backends.cpu import _code, _dropout, _elements, _simd, _simd_blocks, _simd_functions, _threads
from attemper._backends.cpu._compile import kernel, object_code
from attemper._backends.cpu._simd import (
    address_of,
    any_lane,
    as_indices,
    as_words,
    at,
    bits_of,
    count_up,
    first_lane,
    fma,
    highest_of_lanes,
    lanes,
    load,
    load_some,
    maximum,
    narrow,
    per_cell,
    pointer,
    pointer_as,
    spread,
    spread_as,
    store,
    store_some,
    sum_of_lanes,
    to_floating,
    to_whole,
    where,
    widen,
)
from attemper._backends.cpu._simd_blocks import (
    added_blocks,
    dot_rows,
    fetch,
    load_apart,
    load_block,
    load_rows,
    load_square,
    outer,
    pair_up,
    pick,
    row_offsets,
    rows_maximum,
    rows_sum,
    scaled_block,
    store_apart,
    store_block,
    store_rows,
    store_square,
    times_all,
    transpose,
    zeros,
)
from attemper._backends.cpu._simd_functions import exp2, log, magnitude, sqrt, tanh
from attemper._backends.cpu._target import target
from attemper._dropout import kept

FLOATING = {np.float32: float32, np.float64: float64}
KINDS = {**FLOATING, np.uint8: uint8, np.uint16: uint16, np.uint32: uint32, np.int32: int32, np.int64: int64}
floating = pytest.mark.parametrize("dtype", FLOATING, ids=lambda x: x.__name__)
FUSED = target().instructions != "no vector extension"
in_pairs = pytest.mark.skipif(not target().bfloat16, reason="this processor does not multiply pairs of bfloat16")


def width(dtype):
    """Lanes of a vector; short numbers come as many as there are 32-bit ones."""
    return target().lanes(max(np.dtype(dtype).itemsize, 4))


@cache
def machine_code(function):
    return _threads.function_at(_code._load(object_code(function)))


def run(function, *words):
    """Run a kernel on a sheet of addresses and numbers."""
    sheet = np.array([x.ctypes.data if isinstance(x, np.ndarray) else x for x in words], dtype=np.int64)
    machine_code(function)(sheet.ctypes.data)


@cache
def each(function, *kinds):
    """A kernel that puts vectors through a function; kinds: of its arguments, and last of what it returns."""
    out_kind = kinds[-1]
    if len(kinds) == 2:
        (one,) = kinds[:-1]

        @kernel
        def work(address):
            d = pointer(address, int64)
            x, out = pointer(d[0], one), pointer(d[1], out_kind)
            for i in range(0, d[2], lanes(x)):
                store(out, i, function(load(x, i)))

    elif len(kinds) == 3:
        one, two = kinds[:-1]

        @kernel
        def work(address):
            d = pointer(address, int64)
            x, y, out = pointer(d[0], one), pointer(d[1], two), pointer(d[2], out_kind)
            for i in range(0, d[3], lanes(x)):
                store(out, i, function(load(x, i), load(y, i)))

    else:
        one, two, three = kinds[:-1]

        @kernel
        def work(address):
            d = pointer(address, int64)
            x, y, z, out = pointer(d[0], one), pointer(d[1], two), pointer(d[2], three), pointer(d[3], out_kind)
            for i in range(0, d[4], lanes(x)):
                store(out, i, function(load(x, i), load(y, i), load(z, i)))

    return work


def mapped(function, *arrays, result=None):
    """A function of vectors applied to whole arrays."""
    arrays = [np.ascontiguousarray(x).ravel() for x in arrays]
    size = arrays[0].size
    padded = -(-size // 64) * 64
    arrays = [np.concatenate([x, np.full(padded - size, x[0], x.dtype)]) for x in arrays]
    out = np.empty(padded, dtype=result or arrays[0].dtype)
    run(each(function, *(KINDS[x.dtype.type] for x in (*arrays, out))), *arrays, out, padded)
    return out[:size]


def numbers(dtype, size=4000, spread_of=1.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(size) * spread_of).astype(dtype)


def ulps(found, wanted, dtype):
    """The largest error in units of the last place of what is wanted, a wider number."""
    unit = np.spacing(np.abs(wanted).astype(dtype)).astype(np.longdouble)
    return float((np.abs(found.astype(np.longdouble) - wanted) / unit).max())


# --- functions --------------------------------------------------------------------------------------------------------

RANGES = {np.float32: (-126, 100), np.float64: (-1022, 1000)}


@floating
def test_exp2(dtype):
    low, high = RANGES[dtype]
    x = np.concatenate([np.linspace(low, high, 200_000), np.linspace(-1, 1, 50_001), numbers(np.float64)]).astype(dtype)
    found = mapped(exp2, x)
    assert ulps(found, np.exp2(x.astype(np.longdouble)), dtype) < (1 if FUSED else 2)
    whole = np.arange(low, high + 1).astype(dtype)
    np.testing.assert_array_equal(mapped(exp2, whole), np.exp2(whole))
    assert (mapped(exp2, np.array([0.0, -0.0], dtype=dtype)) == 1).all()


def test_what_exp2_is_made_of_is_the_same_on_every_machine():
    """Not solved for by a BLAS: the last of them would be noise."""
    for found in _simd_functions._POLYNOMIALS.values():
        series = [math.log(2) ** n / math.factorial(n) for n in range(len(found), 0, -1)]
        np.testing.assert_allclose(found, series, rtol=1e-2)


@floating
def test_exp2_never_grows_past_one(dtype):
    # The largest weight is 2^0, and all others are not larger.
    x = -np.abs(numbers(dtype, 100_000, 1e-3))
    tiny = np.array([-np.finfo(dtype).smallest_subnormal, -np.finfo(dtype).eps / 8, -np.finfo(dtype).eps], dtype=dtype)
    assert (mapped(exp2, x) <= 1).all()
    assert (mapped(exp2, tiny) <= 1).all()
    assert (mapped(exp2, tiny) > 0.99).all()


@floating
def test_exp2_below_its_range(dtype):
    least = {np.float32: -150.0, np.float64: -1076.0}[dtype]
    lowest = _elements.LOWEST[np.dtype(dtype).itemsize * 8]
    assert lowest < least
    x = np.linspace(lowest, least, 1000).astype(dtype)
    np.testing.assert_array_equal(mapped(exp2, x), np.zeros_like(x))
    # What is less than normal is itself or 0, as the processor has it.
    x = np.linspace(least, RANGES[dtype][0] - 1, 1000).astype(dtype)
    found, wanted = mapped(exp2, x), np.exp2(x.astype(np.longdouble))
    near = np.abs(found - wanted) <= np.finfo(dtype).smallest_subnormal
    assert (near | (found == 0)).all()
    assert near.all() or not target().scalef


@floating
@pytest.mark.parametrize(
    "function", [exp2, tanh, log, sqrt, magnitude], ids=["exp2", "tanh", "log", "sqrt", "magnitude"]
)
def test_nan_stays(function, dtype):
    x = np.full(64, 0.5, dtype=dtype)
    x[::3] = np.nan
    found = mapped(function, x)
    if function is log:
        # Of positive, finite numbers: whoever uses it looks at the others again.
        found[::3] = np.nan
    np.testing.assert_array_equal(np.isnan(found), np.isnan(x))


@floating
def test_tanh(dtype):
    x = np.concatenate([np.linspace(-25, 25, 100_000), numbers(np.float64, 20_000), numbers(np.float64, 20_000, 1e-5)])
    x = np.concatenate([x, 10.0 ** np.linspace(-30, 1, 1000)]).astype(dtype)
    found = mapped(tanh, x)
    assert ulps(found, np.tanh(x.astype(np.longdouble)), dtype) < 5
    np.testing.assert_array_equal(mapped(tanh, -x), -found)
    ends = np.array([0.0, -0.0, 50.0, -50.0, 1e30, -1e30, np.inf, -np.inf], dtype=dtype)
    np.testing.assert_array_equal(mapped(tanh, ends), np.tanh(ends))
    assert np.signbit(mapped(tanh, ends)).tolist() == [False, True] * 4
    assert (np.abs(found) <= 1).all()


@floating
def test_log(dtype):
    info = np.finfo(dtype)
    exponents = np.linspace(np.log2(float(info.tiny)), np.log2(float(info.max)) - 1e-3, 100_000)
    x = np.concatenate([np.exp2(exponents), np.linspace(0.5, 2, 100_001), 1 + np.linspace(-1e-3, 1e-3, 20_001)])
    x = np.concatenate([x, np.arange(1, 5001)]).astype(dtype)
    found, wanted = mapped(log, x), np.log(x.astype(np.longdouble))
    # Near 1 the result is small and all its digits count.
    assert ulps(found, wanted, dtype) < 4
    assert (mapped(log, np.ones(16, dtype=dtype)) == 0).all()


@floating
def test_sqrt_and_magnitude(dtype):
    x = numbers(dtype, spread_of=1e10)
    np.testing.assert_array_equal(mapped(sqrt, np.abs(x)), np.sqrt(np.abs(x)))
    np.testing.assert_array_equal(mapped(magnitude, x), np.abs(x))
    assert not np.signbit(mapped(magnitude, np.array([-0.0], dtype=dtype))).any()


@floating
def test_fma(dtype):
    x, y, z = (numbers(dtype, seed=i) for i in range(3))
    product = x.astype(np.longdouble) * y
    exact = product + z
    # Where little cancels: there even the longer type loses digits of the product.
    clear = np.abs(exact) > 0.1 * np.abs(product)
    rounded_once, rounded_twice = (ulps(r[clear], exact[clear], dtype) for r in (mapped(fma, x, y, z), x * y + z))
    assert rounded_twice > 0.6
    assert rounded_once < 0.51 if FUSED else rounded_once == rounded_twice


# --- choices and operators --------------------------------------------------------------------------------------------


@floating
def test_maximum(dtype):
    x, y = numbers(dtype), numbers(dtype, seed=1)
    np.testing.assert_array_equal(mapped(maximum, x, y), np.maximum(x, y))
    odd = np.array([np.nan, 1.0, np.nan, np.inf, -np.inf, -np.inf], dtype=dtype)
    other = np.array([2.0, np.nan, np.nan, 3.0, 3.0, -np.inf], dtype=dtype)
    # The second where either is NaN.
    np.testing.assert_array_equal(mapped(maximum, odd, other), [2.0, np.nan, np.nan, np.inf, 3.0, -np.inf])


@kernel
def chosen(x, y, z):
    return where(x < y, y, z)


@floating
def test_where(dtype):
    x, y, z = (numbers(dtype, seed=i) for i in range(3))
    x[::7] = np.nan
    np.testing.assert_array_equal(mapped(chosen, x, y, z), np.where(x < y, y, z))


@kernel
def less(x, y):
    return where(x < y, spread_as_one(x, 1), spread_as_one(x, 0))


@_simd.intrinsic
def spread_as_one(_typing, x, number):
    """A number in every lane of a vector like x."""
    vector = x

    def emit(context, b, sig, args):
        return _simd._splat(b, vector, context.cast(b, args[1], sig.args[1], vector.element))

    return vector(x, number), emit


@kernel
def less_or_equal(x, y):
    return where(x <= y, spread_as_one(x, 1), spread_as_one(x, 0))


@kernel
def greater(x, y):
    return where(x > y, spread_as_one(x, 1), spread_as_one(x, 0))


@kernel
def greater_or_equal(x, y):
    return where(x >= y, spread_as_one(x, 1), spread_as_one(x, 0))


@kernel
def equal(x, y):
    return where(x == y, spread_as_one(x, 1), spread_as_one(x, 0))


COMPARISONS = {
    "<": (less, np.less),
    "<=": (less_or_equal, np.less_equal),
    ">": (greater, np.greater),
    ">=": (greater_or_equal, np.greater_equal),
    "==": (equal, np.equal),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint32], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name, dtype):
    function, wanted = COMPARISONS[name]
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        x, y = (rng.integers(-3, 4, 500).astype(dtype) for _ in range(2))
        x[::11] = np.nan
    else:
        # Large ones too: an unsigned number is not a negative one.
        info = np.iinfo(dtype)
        x, y = (rng.choice([info.min, info.max, info.max // 2 + 1, 0, 1, 2], 500).astype(dtype) for _ in range(2))
    np.testing.assert_array_equal(mapped(function, x, y), wanted(x, y).astype(dtype))


@kernel
def added(x, y):
    return x + y


@kernel
def subtracted(x, y):
    return x - y


@kernel
def multiplied(x, y):
    return x * y


@kernel
def divided(x, y):
    return x / y


ARITHMETIC = {"+": (added, np.add), "−": (subtracted, np.subtract), "·": (multiplied, np.multiply)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint32, np.int32, np.int64], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name, dtype):
    function, wanted = ARITHMETIC[name]
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 2**32, 500, dtype=np.uint64).astype(dtype) for _ in range(2))
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(mapped(function, x, y), wanted(x, y))


@floating
def test_division(dtype):
    x, y = numbers(dtype), numbers(dtype, seed=1)
    np.testing.assert_array_equal(mapped(divided, x, y), x / y)


@kernel
def anded(x, y):
    return x & y


@kernel
def ored(x, y):
    return x | y


@kernel
def xored(x, y):
    return x ^ y


@kernel
def shifted_left(x, y):
    return x << y


@kernel
def shifted_right(x, y):
    return x >> y


BITWISE = {
    "&": (anded, np.bitwise_and),
    "|": (ored, np.bitwise_or),
    "^": (xored, np.bitwise_xor),
    "<<": (shifted_left, np.left_shift),
    ">>": (shifted_right, np.right_shift),
}


@pytest.mark.parametrize("name", BITWISE)
def test_bits(name):
    function, wanted = BITWISE[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 500, dtype=np.uint32)
    y = rng.integers(0, 32 if "shift" in wanted.__name__ else 2**32, 500, dtype=np.uint32)
    np.testing.assert_array_equal(mapped(function, x, y), wanted(x, y))


# --- memory -----------------------------------------------------------------------------------------------------------


@cache
def copier(kind):
    @kernel
    def work(address):
        d = pointer(address, int64)
        x, out = pointer(d[0], kind), pointer(d[1], kind)
        store_some(out, d[2], load_some(x, d[3], d[4]), d[5])

    return work


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.uint16, np.uint32], ids=lambda x: x.__name__)
def test_some_lanes(dtype):
    step = width(dtype)
    size = 2 * step + 5
    x = np.arange(1, size + 1).astype(dtype)
    for n in range(step + 1):
        for m in range(step + 1):
            out = np.full(size, 99, dtype=dtype)
            run(copier(KINDS[dtype]), x, out, 5, 3, n, m)
            wanted = np.full(size, 99, dtype=dtype)
            # Those that were not loaded are 0, and those that are not stored stay.
            wanted[5 : 5 + m] = 0
            wanted[5 : 5 + min(n, m)] = x[3 : 3 + min(n, m)]
            np.testing.assert_array_equal(out, wanted, err_msg=f"{n} loaded, {m} stored")


EDGE = """
import ctypes, mmap, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import test_simd
# Two pages, of which the second may not be touched: whoever reads or writes there is killed.
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
start = np.frombuffer(memory, np.uint8).ctypes.data
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
for dtype in (np.float32, np.float64, np.uint8, np.uint16, np.uint32):
    step, item = test_simd.width(dtype), np.dtype(dtype).itemsize
    for n in range(step + 1):
        near = np.frombuffer(memory, dtype, n, page - n * item) if n else np.empty(0, dtype)
        far = np.full(step, 7, dtype)
        own = np.arange(1, step + 1).astype(dtype)
        copy = test_simd.copier(test_simd.KINDS[dtype])
        test_simd.run(copy, own, start + page - n * item, 0, 0, step, n)
        assert (near == own[:n]).all()
        test_simd.run(copy, start + page - n * item, far, 0, 0, n, step)
        assert (far[:n] == near).all() and (far[n:] == 0).all()
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page")
def test_nothing_past_some_lanes_is_touched():
    command = [sys.executable, "-c", EDGE, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


@cache
def mover(kind):
    """Squares, blocks and rows from one place to another, each in its own way."""
    step = width(np.float64 if kind == float64 else np.float32)

    @kernel
    def work(address):
        d = pointer(address, int64)
        x, out = pointer(d[0], kind), pointer(d[1], kind)
        way, stride = d[2], d[3]
        if way == 0:
            store_square(out, transpose(load_square(x)))
        elif way == 1:
            store_apart(out, 3, stride, load_square(x))
        elif way == 2:
            store_square(out, load_apart(x, 3, stride))
        elif way == 3:
            store_block(out, step, load_block(x, 2, 3))
        elif way == 4:
            store_rows(out, row_offsets(stride, 4, 4), load_rows(x, row_offsets(step, 4, 4), 1))
        elif way == 5:
            store_block(out, 0, load_rows(x, row_offsets(stride, 4, d[4]), 2))
        elif way == 6:
            # Rows that are the same: the first of them stays.
            store_rows(out, row_offsets(stride, 4, d[4]), load_rows(x, row_offsets(step, 4, 4), 1))
        elif way == 7:
            numbers = pick(x, row_offsets(stride, 4, d[4]), 2)
            out[0], out[1], out[2], out[3] = numbers[0], numbers[1], numbers[2], numbers[3]
        else:
            store_block(out, 0, zeros(out, 2))
            fetch(x, d[3])

    return work


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint32], ids=lambda x: x.__name__)
def test_transpose(dtype):
    step = width(dtype)
    x = np.arange(step * step).astype(dtype).reshape(step, step)
    out = np.empty_like(x)
    run(mover(KINDS[dtype]), x, out, 0, 0)
    np.testing.assert_array_equal(out, x.T)


@floating
def test_squares_a_stride_apart(dtype):
    step, stride = width(dtype), 40
    x = numbers(dtype, stride * step + 64)
    out = np.full(x.size, 9, dtype=dtype)
    run(mover(KINDS[dtype]), x, out, 1, stride)
    wanted = np.full(x.size, 9, dtype=dtype)
    for r in range(step):
        wanted[3 + r * stride : 3 + r * stride + step] = x[r * step : (r + 1) * step]
    np.testing.assert_array_equal(out, wanted)
    run(mover(KINDS[dtype]), x, out, 2, stride)
    found = out[: step * step].reshape(step, step)
    np.testing.assert_array_equal(found, [x[3 + r * stride : 3 + r * stride + step] for r in range(step)])


@floating
def test_blocks(dtype):
    step = width(dtype)
    x = numbers(dtype, 8 * step)
    out = np.full(6 * step, 9, dtype=dtype)
    run(mover(KINDS[dtype]), x, out, 3, 0)
    wanted = np.full(6 * step, 9, dtype=dtype)
    wanted[step : 4 * step] = x[2 : 2 + 3 * step]
    np.testing.assert_array_equal(out, wanted)
    run(mover(KINDS[dtype]), x, out, 8, 2**40)
    wanted[: 2 * step] = 0
    np.testing.assert_array_equal(out, wanted)


@floating
@pytest.mark.parametrize("present", [1, 2, 3, 4])
def test_rows_that_are_not_present_repeat_the_last(dtype, present):
    step, stride = width(dtype), 37
    x = numbers(dtype, 4 * stride + 2 * step)
    rows = np.minimum(np.arange(4), present - 1)
    out = np.full(8 * step, 9, dtype=dtype)
    run(mover(KINDS[dtype]), x, out, 5, stride, present)
    np.testing.assert_array_equal(out.reshape(4, -1), [x[r * stride : r * stride + 2 * step] for r in rows])
    run(mover(KINDS[dtype]), x, out, 7, stride, present)
    np.testing.assert_array_equal(out[:4], x[rows * stride + 2])
    out = np.full(5 * stride, 9, dtype=dtype)
    run(mover(KINDS[dtype]), x, out, 6, stride, present)
    wanted = np.full(5 * stride, 9, dtype=dtype)
    for r in range(present):
        wanted[r * stride : r * stride + step] = x[r * step : (r + 1) * step]
    np.testing.assert_array_equal(out, wanted)


@kernel
def addresses(address):
    d = pointer(address, int64)
    x = pointer(d[0], float32)
    d[1] = address_of(at(x, 3))
    d[2] = address_of(pointer_as(x, 4096))
    d[3] = lanes(x)
    d[4] = lanes(pointer(d[0], float64))
    d[5] = lanes(pointer(d[0], uint16))
    d[6] = per_cell(x)
    d[7] = per_cell(pointer(d[0], uint32))
    d[8] = as_indices(x)[0]
    d[9] = as_indices(pointer(d[0], float64))[0]


def test_pointers():
    x = np.array([1.5, -2.0], dtype=np.float32)
    sheet = np.zeros(10, dtype=np.int64)
    sheet[0] = x.ctypes.data
    machine_code(addresses)(sheet.ctypes.data)
    assert sheet[1:8].tolist() == [
        x.ctypes.data + 12,
        4096,
        width(np.float32),
        width(np.float64),
        width(np.float32),
        1,
        2,
    ]
    assert sheet[8] == x.view(np.int32)[0]
    assert sheet[9] == x.view(np.int64)[0]


@kernel
def counting(address):
    """Take numbers until there are none left, and note each."""
    d = pointer(address, int64)
    taken = pointer(d[1], int64)
    number = count_up(d, 0)
    while number < d[2]:
        taken[number] += 1
        number = count_up(d, 0)


def test_no_two_threads_count_the_same():
    many = 2_000_000
    taken = np.zeros(many, dtype=np.int64)
    sheet = np.array([0, taken.ctypes.data, many], dtype=np.int64)
    work = machine_code(counting)
    threads = [threading.Thread(target=work, args=(sheet.ctypes.data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (taken == 1).all()
    assert sheet[0] == many + 4


# --- numbers to vectors and back --------------------------------------------------------------------------------------


@kernel
def back_and_forth(address):
    d = pointer(address, int64)
    singles, doubles, words = pointer(d[0], float32), pointer(d[1], float64), pointer(d[2], uint32)
    store(singles, 0, spread(float32(1.25)))
    store(doubles, 0, spread_as(doubles, 3))
    store(words, 0, spread(uint32(7)))
    d[3] = int64(first_lane(load(singles, 0)) * 4)
    d[4] = int64(any_lane(load(singles, 0) > spread_as(singles, 1.25)))
    singles[lanes(singles) - 1] = 9.0
    d[5] = int64(any_lane(load(singles, 0) > spread_as(singles, 1.25)))


def test_spread_and_first_lane_and_any_lane():
    singles, doubles, words = np.zeros(16, np.float32), np.zeros(16, np.float64), np.zeros(16, np.uint32)
    sheet = np.array([x.ctypes.data for x in (singles, doubles, words)] + [0] * 3, dtype=np.int64)
    machine_code(back_and_forth)(sheet.ctypes.data)
    assert sheet[3:].tolist() == [5, 0, 1]
    step = width(np.float32)
    assert (singles[: step - 1] == 1.25).all()
    assert (doubles[: width(np.float64)] == 3).all()
    assert (words[:step] == 7).all()
    assert not singles[step:].any()


@kernel
def fold(address):
    d = pointer(address, int64)
    singles, doubles = pointer(d[0], float32), pointer(d[1], float64)
    singles[lanes(singles)] = sum_of_lanes(load(singles, 0))
    singles[lanes(singles) + 1] = highest_of_lanes(load(singles, 0))
    doubles[lanes(doubles)] = sum_of_lanes(load(doubles, 0))
    doubles[lanes(doubles) + 1] = highest_of_lanes(load(doubles, 0))


def test_one_number_of_all_lanes():
    for place in range(width(np.float32)):
        singles, doubles = (
            np.random.default_rng(place).standard_normal(32).astype(t) for t in (np.float32, np.float64)
        )
        for x in (singles, doubles):
            x[place % width(x.dtype)] = 40.0  # the largest, in each lane once
        sheet = np.array([singles.ctypes.data, doubles.ctypes.data], dtype=np.int64)
        machine_code(fold)(sheet.ctypes.data)
        for x, tolerance in ((singles, 1e-6), (doubles, 1e-14)):
            n = width(x.dtype)
            np.testing.assert_allclose(x[n], x[:n].sum(dtype=np.float64), rtol=tolerance)
            assert x[n + 1] == 40.0


def test_kinds_of_numbers():
    rng = np.random.default_rng(0)
    wholes = rng.integers(-(2**31), 2**31, 500)
    np.testing.assert_array_equal(
        mapped(to_floating, wholes.astype(np.int32), result=np.float32), wholes.astype(np.float32)
    )
    wholes = rng.integers(-(2**62), 2**62, 500)
    np.testing.assert_array_equal(mapped(to_floating, wholes, result=np.float64), wholes.astype(np.float64))
    counts = rng.integers(0, 2**24, 500)
    for floating, whole in ((np.float32, np.int32), (np.float64, np.int64)):
        np.testing.assert_array_equal(mapped(to_whole, counts.astype(floating), result=whole), counts)
        signed = rng.integers(np.iinfo(whole).min, np.iinfo(whole).max, 500, dtype=whole)
        np.testing.assert_array_equal(mapped(as_words, signed, result=np.int64), signed)
    x = numbers(np.float32)
    np.testing.assert_array_equal(mapped(bits_of, x, result=np.uint32), x.view(np.uint32))
    np.testing.assert_array_equal(mapped(bits_of, x.view(np.uint32), result=np.float32), x)
    for dtype in (np.uint8, np.uint16):
        short = rng.integers(0, np.iinfo(dtype).max + 1, 500).astype(dtype)
        np.testing.assert_array_equal(mapped(widen, short, result=np.uint32), short)
    words = rng.integers(0, 2**32, 500, dtype=np.uint32)
    np.testing.assert_array_equal(mapped(narrow, words, result=np.uint16), words.astype(np.uint16))


# --- sixteen bits -----------------------------------------------------------------------------------------------------

EVERY = np.arange(2**16).astype(np.uint16)


def widened(kind):
    """Every number of a kind of 16 bits."""
    with np.errstate(invalid="ignore"):
        return EVERY.view(kind).astype(np.float64)


def awkward():
    """float32 numbers of every size, ties between two of 16 bits and their neighbours."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = []
    for kind in (np.float16, ml_dtypes.bfloat16):
        some = EVERY.view(kind).astype(np.float32)
        some = some[np.isfinite(some)]
        with np.errstate(over="ignore", invalid="ignore"):
            middle = (np.sort(some)[:-1].astype(np.float64) + np.sort(some)[1:]) / 2
        near += [middle.astype(np.float32), np.nextafter(middle.astype(np.float32), np.float32(np.inf))]
        near.append(np.nextafter(middle.astype(np.float32), np.float32(-np.inf)))
    ends = np.array(
        [0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, 65536, 3.4e38, 1e-45, 5.96e-8, 2.98e-8], np.float32
    )
    return np.concatenate([anything, *near, ends, -ends])


def assert_same_narrow(found, wanted):
    """Bit for bit, but for what a NaN carries beside its sign."""
    unsound = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.view(wanted.dtype).astype(np.float32)), unsound)
    np.testing.assert_array_equal(found[~unsound], wanted.view(np.uint16)[~unsound])
    assert unsound.any()


def test_every_float16_is_read():
    found = mapped(_elements.from_half, EVERY, result=np.float32)
    np.testing.assert_array_equal(found, EVERY.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found), EVERY >= 2**15)


def test_every_float16_is_written_as_it_was_read():
    halves = EVERY.view(np.float16)
    assert_same_narrow(mapped(_elements.to_half, halves.astype(np.float32), result=np.uint16), halves)


def test_float16_is_rounded_to_nearest_even():
    x = awkward()
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_narrow(mapped(_elements.to_half, x, result=np.uint16), x.astype(np.float16))


def test_bfloat16_is_rounded_to_nearest_even():
    x = awkward()
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16)
    found = mapped(_elements.to_bfloat, x, result=np.uint16)
    assert_same_narrow(found, wanted)
    np.testing.assert_array_equal(found >> 15, x.view(np.uint32) >> 31)


@kernel
def one_by_one(address):
    d = pointer(address, int64)
    bits, halves, bfloats = pointer(d[0], uint16), pointer(d[1], float64), pointer(d[2], float64)
    for i in range(65536):
        halves[i] = _half_number(int64(bits[i]))
        bfloats[i] = _bfloat_number(int64(bits[i]))


_half_number, _bfloat_number = _elements.half_number, _elements.bfloat_number


def test_every_number_of_sixteen_bits_alone():
    halves, bfloats = np.empty((2, 2**16))
    run(one_by_one, EVERY, halves, bfloats)
    np.testing.assert_array_equal(halves, widened(np.float16))
    np.testing.assert_array_equal(bfloats, widened(ml_dtypes.bfloat16))
    assert (np.signbit(halves) == (EVERY >= 2**15))[~np.isnan(halves)].all()


@in_pairs
def test_pairs_are_rounded_to_nearest_even():
    x = awkward()
    # The instruction takes what is less than normal for 0.
    x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]
    y = np.roll(x, 1)
    found = mapped(pair_up, x, y, result=np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (z.astype(ml_dtypes.bfloat16) for z in (x, y))
    assert not np.isnan(x).all()
    for words, wanted in (((found & 0xFFFF).astype(np.uint16), low), ((found >> 16).astype(np.uint16), high)):
        unsound = np.isnan(wanted.astype(np.float32))
        np.testing.assert_array_equal(words[~unsound], wanted.view(np.uint16)[~unsound])
        assert np.isnan(words[unsound].view(ml_dtypes.bfloat16).astype(np.float32)).all()


# --- blocks of registers ----------------------------------------------------------------------------------------------


@cache
def blocks(kind):
    @kernel
    def work(address):
        """Three rows of two vectors each."""
        d = pointer(address, int64)
        acc, columns, rows, out = (pointer(d[0], kind), pointer(d[1], kind), pointer(d[2], kind), pointer(d[3], kind))
        block, pair = load_block(acc, 0, 6), load_block(columns, 0, 2)
        step = lanes(acc)
        store_block(out, 0, outer(block, pair, pick(rows, row_offsets(1, 3, 3), 0)))
        store_block(out, 6 * step, scaled_block(block, pair))
        store_block(out, 12 * step, added_blocks(block, block))
        store_block(out, 18 * step, times_all(block, load(columns, 0)))
        store_block(out, 24 * step, rows_maximum(pair, block))
        store_block(out, 26 * step, rows_sum(pair, block))
        three = load_block(acc, 0, 3)
        store_block(out, 28 * step, dot_rows(three, load(columns, 0), acc, row_offsets(step, 3, 3), step))

    return work


@floating
def test_blocks_of_registers(dtype):
    step, eps = width(dtype), np.finfo(dtype).eps
    acc, columns, rows = numbers(dtype, 6 * step), numbers(dtype, 2 * step, seed=1), numbers(dtype, 3, seed=2)
    out = np.full(32 * step, 9, dtype=dtype)
    run(blocks(KINDS[dtype]), acc, columns, rows, out)
    found = out.reshape(32, step)
    block, pair = acc.reshape(3, 2, step), columns.reshape(2, step)
    close = {"rtol": 4 * eps, "atol": 4 * eps}
    np.testing.assert_allclose(found[:6].reshape(block.shape), block + pair * rows[:, None, None], **close)
    np.testing.assert_array_equal(found[6:12].reshape(block.shape), block * pair)
    np.testing.assert_array_equal(found[12:18].reshape(block.shape), block + block)
    np.testing.assert_array_equal(found[18:24].reshape(block.shape), block * pair[0])
    np.testing.assert_array_equal(found[24:26], np.maximum(pair, block.max(axis=0)))
    np.testing.assert_allclose(found[26:28], pair + block.sum(axis=0), **close)
    flat = acc.reshape(6, step)
    np.testing.assert_allclose(found[28:31], flat[:3] + pair[0] * flat[1:4], **close)
    assert (found[31] == 9).all()


@kernel
def products_of_pairs(address):
    d = pointer(address, int64)
    acc, columns, rows, out = (
        pointer(d[0], float32),
        pointer(d[1], uint32),
        pointer(d[2], uint32),
        pointer(d[3], float32),
    )
    pairs = pick(rows, row_offsets(1, 2, 2), 0)
    store_block(out, 0, outer(load_block(acc, 0, 2), load_block(columns, 0, 1), pairs))


@in_pairs
def test_products_of_pairs():
    acc = numbers(np.float32, 32)
    columns, rows = (numbers(np.float32, n, seed=i).astype(ml_dtypes.bfloat16) for i, n in enumerate((32, 4)))
    out = np.empty(32, dtype=np.float32)
    run(products_of_pairs, acc, columns.view(np.uint32), rows.view(np.uint32), out)
    wide = columns.astype(np.float64).reshape(16, 2) @ rows.astype(np.float64).reshape(2, 2).T
    np.testing.assert_allclose(out.reshape(2, 16), acc.reshape(2, 16) + wide.T, rtol=1e-6, atol=1e-6)


# --- dropout ----------------------------------------------------------------------------------------------------------


@kernel
def dropping(address):
    d = pointer(address, int64)
    low, high, out = pointer(d[0], uint32), pointer(d[1], uint32), pointer(d[2], uint32)
    keys, threshold, step = d[3], d[4], lanes(low)
    for i in range(step):
        bits = _row_key(d[5], d[6] + i)
        low[i], high[i] = uint32(bits & 0xFFFFFFFF), uint32(bits >> 32)
    for key in range(keys):
        shown = _survives(load(low, 0), load(high, 0), key, threshold)
        store(out, key * step, where(shown, spread(uint32(1)), spread(uint32(0))))


_row_key, _survives = _dropout.row_key, _dropout.survives


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -(2**63), -1])
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_is_that_of_every_backend(seed, p):
    step, keys, row = width(np.uint32), 300, 10**6
    low, high, out = np.zeros(16, np.uint32), np.zeros(16, np.uint32), np.zeros(keys * step, np.uint32)
    run(dropping, low, high, out, keys, round(p * 2**32), seed, row)
    wanted = kept(np.arange(row, row + step)[:, None], np.arange(keys), p, seed % 2**64)
    np.testing.assert_array_equal(out.reshape(keys, step).T, wanted)
    assert 0 < wanted.mean() < 1


# --- other processors -------------------------------------------------------------------------------------------------


def test_on_other_processors(processor):
    processor.test(__file__)


def test_every_operation_is_tested():
    # What is imported here is used, or the linter would say so.
    modules = (_simd, _simd_functions, _simd_blocks)
    own = {name for module in modules for name, x in vars(module).items() if type(x).__name__ == "_Intrinsic"}
    assert len(own) > 40
    assert [name for name in own if name not in globals()] == []
