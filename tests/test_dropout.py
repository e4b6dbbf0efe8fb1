"""Dropout keeps a share of the weights that depends on seed, row and key alone, and leaves the Reading alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attemper import attend, read, trace
from attemper._dropout import as_signed, kept, kept_signed
from attemper._reading import AFTER_BACKWARD, FIELDS

GOLDEN = ["0001000100010110", "0000000111011001", "0111101011010111", "0001000001111001"]

RATES = (0.1, 0.5, 0.9)
rates = pytest.mark.parametrize("p", RATES)
TILED = ("numpy", "cpu")
tiles, backends = (pytest.mark.parametrize("backend", names) for names in (TILED, (*TILED, "reference")))
ROWS, KEYS = 300, 400


def mask(p, seed, rows=ROWS, keys=KEYS):
    return kept(np.arange(rows)[:, None], np.arange(keys), p, seed)


def operands(queries=6, keys=9, batch=(2,), heads=3):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((*batch, heads, queries, 4))
    k, v = rng.standard_normal((2, *batch, heads, keys, 4))
    return q, k, v


# --- which weights --------------------------------------------------------------------------------------------------


@rates
@given(seed=st.integers(0, 2**64 - 1))
def test_the_same_seed_gives_the_same_mask_and_another_another(p, seed):
    one = mask(p, seed, 20, 30)
    np.testing.assert_array_equal(one, mask(p, seed, 20, 30))
    assert (one != mask(p, (seed + 1) % 2**64, 20, 30)).any()
    assert (one != mask(p, seed ^ 2**63, 20, 30)).any()


@given(
    seed=st.integers(0, 2**63),
    p=st.floats(0.05, 0.95),
    row=st.integers(0, 40),
    key=st.integers(0, 40),
    size=st.integers(1, 9),
)
def test_a_tile_of_the_mask_is_the_mask_of_the_tile(seed, p, row, key, size):
    rows, keys = np.arange(row, row + size), np.arange(key, key + size)
    tile = kept(rows[:, None], keys, p, seed)
    np.testing.assert_array_equal(tile, mask(p, seed, 50, 50)[row : row + size, key : key + size])
    # In any order, and of any integer type.
    np.testing.assert_array_equal(kept(rows[::-1, None], keys[::-1], p, seed), tile[::-1, ::-1])
    np.testing.assert_array_equal(kept(rows[:, None].astype(np.int32), keys.astype(np.int32), p, seed), tile)


@given(seed=st.integers(0, 2**63))
def test_a_higher_rate_drops_what_a_lower_one_drops_and_more(seed):
    low, high = mask(0.3, seed, 20, 30), mask(0.6, seed, 20, 30)
    assert not (high & ~low).any()
    assert (low & ~high).any()
    assert mask(0.0, seed, 20, 30).all()
    assert not mask(1 - 2**-53, seed, 20, 30).any()


def deviation(counts, of, p):
    """How many standard deviations the kept counts, each out of `of`, lie from their expectation."""
    return (counts - of * (1 - p)) / np.sqrt(of * p * (1 - p))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
@rates
def test_the_rate_is_the_rate(p, seed):
    keep = mask(p, seed)
    assert keep.dtype == bool
    assert keep.shape == (ROWS, KEYS)
    assert abs(deviation(keep.sum(), keep.size, p)) < 4
    # In every row and column, not only overall: 700 draws of a normal stay within 4.5, and spread like one.
    for axis, of in ((0, ROWS), (1, KEYS)):
        each = deviation(keep.sum(axis=axis), of, p)
        assert np.abs(each).max() < 4.5
        assert 0.8 < each.std() < 1.2


def correlations(x, y):
    """Of rows of x with the same rows of y, in standard deviations of independent ones."""
    x, y = (a - a.mean(axis=-1, keepdims=True) for a in (x.astype(float), y.astype(float)))
    return (x * y).sum(axis=-1) / np.sqrt((x**2).sum(axis=-1) * (y**2).sum(axis=-1)) * np.sqrt(x.shape[-1])


@rates
def test_rows_columns_and_seeds_are_uncorrelated(p):
    keep = mask(p, 7)
    pairs = {
        "neighbouring rows": (keep[:-1], keep[1:]),
        "rows a power of two apart": (keep[:-128], keep[128:]),
        "neighbouring columns": (keep.T[:-1], keep.T[1:]),
        "columns a power of two apart": (keep.T[:-256], keep.T[256:]),
        "shifted rows": (keep[:-1, :-1], keep[1:, 1:]),
        "rows and columns": (keep[:, :ROWS], keep[:, :ROWS].T),
        "neighbouring seeds": (keep, mask(p, 8)),
        "seeds that differ in the high half": (keep, mask(p, 7 + 2**40)),
        "seeds that differ in the top bit": (keep, mask(p, 2**63 + 7)),
    }
    for what, (x, y) in pairs.items():
        each = correlations(x, y)
        assert np.abs(each).max() < 4.8, what
        assert abs(each.mean()) * np.sqrt(len(each)) < 4, what
        assert 0.8 < each.std() < 1.2, what


def test_masks_do_not_repeat_along_long_rows_or_many_rows():
    keep = kept(np.array([[0], [2**20], [2**33], [2**40 + 1]]), np.arange(4096) + 2**20, 0.5, 3)
    for i in range(4):
        for j in range(i):
            assert abs(correlations(keep[i], keep[j])) < 4
    spectrum = np.abs(np.fft.rfft(keep - 0.5, axis=-1))[:, 1:] / np.sqrt(4096 / 4)
    # A period would stand out; of 8192 exponential powers the largest is about ln 8192 = 9.
    assert (spectrum**2).max() < 18


def test_no_two_of_many_rows_share_a_mask():
    # 32 bits a row would not do: among 200 000 rows some five pairs would then drop the same weights throughout.
    keep = kept(np.arange(200_000)[:, None], np.arange(64), 0.5, 1)
    assert len(np.unique(np.packbits(keep, axis=-1).view(np.uint64))) == 200_000


# --- what attend does with them -------------------------------------------------------------------------------------


@tiles
@rates
def test_kept_weights_grow_by_what_was_dropped(p, backend):
    # Values that spell out the weights: the output is the matrix itself.
    q, k, _ = operands()
    v = np.broadcast_to(np.eye(9), (2, 3, 9, 9))
    plain = attend(q, k, v, backend=backend).output
    dropped = attend(q, k, v, dropout_p=p, seed=5, backend=backend).output
    rows = np.arange(2 * 3 * 6).reshape(2, 3, 6, 1)
    keep = kept(rows, np.arange(9), p, 5)
    assert 0 < keep.mean() < 1
    np.testing.assert_array_equal(dropped != 0, keep)
    np.testing.assert_allclose(dropped, np.where(keep, plain / (1 - p), 0), rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (40, 3)}, {"sinks": np.array([0.5, -0.5])}])
@rates
@tiles
def test_backends_drop_the_same_weights(backend, p, options, dtype):
    # Several tiles, slabs and groups: a weight's number must not depend on how the problem is cut.
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 131, 4)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 1, 515, 4)).astype(dtype)
    how = {"dropout_p": p, "seed": 11, "enable_gqa": True, **options}
    ours, theirs = (attend(q, k, v, **how, backend=name) for name in (backend, "reference"))
    assert (ours.reading.backend, theirs.reading.backend) == (backend, "reference")
    tight = (1e-12 if dtype == np.float64 else 1e-5) / (1 - p)
    np.testing.assert_allclose(ours.output, theirs.output, rtol=tight, atol=tight)
    other = attend(q, k, v, **{**how, "seed": 12}, backend=backend).output
    assert np.abs(other - ours.output).max() > 0.1


@backends
def test_batch_entries_and_heads_drop_different_weights(backend):
    q = np.zeros((3, 2, 4, 1))
    k, v = np.zeros((3, 2, 32, 1)), np.broadcast_to(np.eye(32), (3, 2, 32, 32))
    dropped = attend(q, k, v, dropout_p=0.5, seed=1, backend=backend).output != 0
    assert len(np.unique(dropped.reshape(-1, 32), axis=0)) == 3 * 2 * 4


@tiles
@rates
def test_the_expectation_over_seeds_is_the_output_without_dropout(p, backend):
    q, k, v = operands(queries=3, keys=8, batch=(), heads=2)
    plain = attend(q, k, v, stats="none", backend=backend).output
    # Copies in the batch have rows of their own, so one call gives many masks.
    copies = [np.broadcast_to(x, (64, *x.shape)) for x in (q, k, v)]
    how = {"dropout_p": p, "stats": "none", "backend": backend}
    draws = np.concatenate([attend(*copies, seed=s, **how).output for s in range(60)])
    error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - plain) < 4 * error).all()
    # Tight enough to tell the missing factor 1/(1−p).
    assert (np.abs(plain) * p > 4 * error).mean() > 0.5


@backends
def test_the_global_generator_chooses_a_seed_that_was_not_given(backend):
    q, k, v = operands()

    def draw(**how):
        return attend(q, k, v, dropout_p=0.5, **how, backend=backend).output

    np.random.seed(3)  # noqa: NPY002
    first, second = draw(), draw()
    np.random.seed(3)  # noqa: NPY002
    np.testing.assert_array_equal(draw(), first)
    np.testing.assert_array_equal(draw(), second)
    assert (first != second).any()
    # A seed that was given takes nothing from the generator, and neither does a call without dropout.
    np.random.seed(3)  # noqa: NPY002
    draw(seed=9)
    attend(q, k, v, backend=backend)
    np.testing.assert_array_equal(draw(), first)


@backends
@rates
def test_the_reading_is_of_the_weights_before_dropout(p, backend):
    q, k, v = operands()
    plain = attend(q, k, v, is_causal=True, backend=backend)
    dropped = attend(q, k, v, is_causal=True, dropout_p=p, seed=2, backend=backend)
    alone = read(q, k, is_causal=True, dropout_p=p, seed=2, backend=backend)
    assert np.abs(dropped.output - plain.output).max() > 0.1
    for name in FIELDS:
        expected = getattr(plain.reading, name)
        if name in AFTER_BACKWARD:
            assert getattr(dropped.reading, name) is getattr(alone, name) is expected is None
            continue
        if name == "output_norm":
            # The one field of the output, which dropout did change.
            np.testing.assert_allclose(dropped.reading.output_norm, np.linalg.norm(dropped.output, axis=-1), rtol=1e-13)
            continue
        # Few rows may be added up in another order where there is no dropout.
        np.testing.assert_allclose(getattr(dropped.reading, name), expected, rtol=1e-14, atol=1e-15, err_msg=name)
        np.testing.assert_allclose(getattr(alone, name), expected, rtol=1e-14, atol=1e-15, err_msg=name)


@backends
def test_no_dropout_is_no_dropout(backend):
    q, k, v = operands()
    plain = attend(q, k, v, backend=backend).output
    np.testing.assert_array_equal(attend(q, k, v, dropout_p=0.0, seed=4, backend=backend).output, plain)
    assert np.abs(plain).max() > 0.1


def test_seeds_a_step_apart_do_not_shift_each_other():
    rows, keys = np.arange(64)[:, None], np.arange(256)
    golden = 0x9E3779B97F4A7C15
    one, two = (kept(rows, keys, 0.5, seed) for seed in (7, (7 + golden) % 2**64))
    assert not (one[1:] == two[:-1]).all(axis=-1).any()


def test_the_mask_of_a_seed_never_changes():
    # Written down once: a run that is repeated with a later version, or on another backend, drops the same weights.
    drawn = kept(np.arange(4)[:, None], np.arange(16), 0.5, 2026)
    assert ["".join(map(str, row.astype(int))) for row in drawn] == GOLDEN
    tensors = kept_signed(torch.arange(4)[:, None], torch.arange(16), 0.5, torch.tensor(2026))
    assert (tensors.numpy() == drawn).all()


def test_torch_and_numpy_keep_the_same_weights():
    rows, keys = np.arange(10**6, 10**6 + 50)[:, None], np.arange(300)
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        tensors = kept_signed(torch.from_numpy(rows), torch.from_numpy(keys), 0.3, torch.tensor(as_signed(seed)))
        assert (tensors.numpy() == kept(rows, keys, 0.3, seed)).all()


@backends
def test_seeds_that_are_drawn_are_many(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 4))
    drawn = {attend(q, k, v, dropout_p=0.5, backend=backend).output.tobytes() for _ in range(200)}
    assert len(drawn) == 200


@backends
def test_one_key_is_kept_or_dropped_whole(backend):
    q, v = np.ones((1, 64, 2)), np.ones((1, 1, 2))
    output = attend(q, q[:, :1], v, dropout_p=0.5, seed=3, backend=backend).output
    assert set(np.unique(output)) == {0.0, 2.0}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_nothing_to_drop(framework):
    q, nothing = np.ones((2, 3, 4)), np.ones((2, 0, 4))
    if framework == "torch":
        q, nothing = torch.from_numpy(q), torch.from_numpy(nothing)
    for backend in ("reference", "auto"):
        output = attend(q, nothing, nothing, dropout_p=0.5, seed=1, backend=backend).output
        assert output.shape == (2, 3, 4)
        assert (output == 0).all()
    assert trace(q, nothing, nothing, dropout_p=0.5, seed=1).weights.shape == (2, 3, 0)
