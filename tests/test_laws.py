"""What must hold of attend, read and trace whatever the numbers, on each backend that takes NumPy arrays."""

import math
import sys
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attemper import attend, read, trace
from attemper._backends import numpy as tiled
from attemper._bounds import bounds_of_band, key_band, key_bounds
from attemper._reading import AFTER_BACKWARD, DERIVED, FIELDS, MEASURED

TILED = ("numpy", "cpu")
tiles, backends = (pytest.mark.parametrize("backend", names) for names in (TILED, (*TILED, "reference")))

FORWARD = tuple(name for name in FIELDS if name not in AFTER_BACKWARD)
# A constant added to every score moves these, and nothing else: weights see differences only.
LOGIT_LIKE = ("max_logit", "logsumexp", "expected_score", "score_mean")


# --- comparing ------------------------------------------------------------------------------------------------------


def agree(one, two, what="", size=1.0):
    """Equal up to the rounding of float64, NaN and infinities in the same places."""
    assert one.shape == two.shape, what
    np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12 * size, equal_nan=True, err_msg=what)


def same_reading(one, two, but=(), size=1.0):
    for name in FIELDS:
        here, there = getattr(one, name), getattr(two, name)
        assert (here is None) == (there is None), name
        if here is not None and name not in but:
            agree(here, there, name, size)


def same(one, two, but=(), size=1.0):
    agree(one.output, two.output, "output", size)
    same_reading(one.reading, two.reading, but, size)


def test_the_comparison_can_fail():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 3))
    good = attend(q, k, v, backend="numpy")
    averaged = np.broadcast_to(v.mean(axis=-2, keepdims=True), good.output.shape)
    for wrong in (np.zeros_like(good.output), averaged, good.output * (1 + 1e-10)):
        with pytest.raises(AssertionError):
            same(good._replace(output=wrong), good)
    with pytest.raises(AssertionError):
        same(attend(q, k, v, scale=0.5000001 / math.sqrt(3), backend="numpy"), good)


# --- calls ----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict

    @property
    def operands(self):
        return self.q, self.k, self.v

    @property
    def scores_shape(self):
        return (*self.q.shape[:-1], self.k.shape[-2])

    def attend(self, **more):
        return attend(self.q, self.k, self.v, **{**self.options, **more})


sides = st.one_of(st.none(), st.integers(0, 9), st.sampled_from([2**40, sys.maxsize]))
windows = st.one_of(st.none(), st.tuples(sides, sides))
offsets = st.one_of(st.integers(-12, 12), st.sampled_from([-(2**40), 2**40]))


@st.composite
def positions(draw, batch, keys, kinds=("causal", "window", "lengths", "all", "none")):
    """Keywords for a mask that follows from positions."""
    kind = draw(st.sampled_from(kinds))
    chosen = {}
    if kind in ("causal", "all"):
        chosen["is_causal"] = True
    if kind in ("window", "all"):
        chosen["window"] = draw(st.tuples(sides, sides))
    if kind in ("lengths", "all"):
        chosen["key_lengths"] = np.array(draw(st.lists(st.integers(0, keys), min_size=4, max_size=4)))[
            : math.prod(batch)
        ].reshape(batch)
    if kind != "none":
        each = np.array(draw(st.lists(offsets, min_size=4, max_size=4)))[: math.prod(batch)].reshape(batch)
        chosen["query_offset"] = draw(st.one_of(st.just("bottom-right"), st.just(int(each.flat[0])), st.just(each)))
    return chosen


@st.composite
def calls(draw, having=("scale", "softcap", "sinks", "mask", "position"), least_keys=0):
    """A small call in float64 with grouped heads and some of the options it may have."""
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(least_keys, 8))
    head_dim, value_dim = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    heads = kv_heads * group
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((*batch, heads, queries, head_dim)) * draw(st.sampled_from([0.25, 1, 2]))
    k = rng.standard_normal((*batch, kv_heads, keys, head_dim))
    v = rng.standard_normal((*batch, kv_heads, keys, value_dim))
    options = {"enable_gqa": True}
    if "scale" in having:
        per_head = rng.uniform(-1, 2, heads)
        options["scale"] = draw(st.sampled_from([None, 0.3, "dk", "unscaled"]) | st.just(per_head))
    if "softcap" in having:
        options["softcap"] = draw(st.sampled_from([None, None, 1.5]))
    if "sinks" in having:
        options["sinks"] = draw(st.sampled_from([None, rng.normal(size=heads), np.full(heads, -np.inf)]))
    if "mask" in having:
        shape = (*batch, heads, queries, keys)
        seen = rng.random(shape) < draw(st.sampled_from([0.3, 0.8]))
        bias = np.where(seen, rng.standard_normal(shape), -np.inf)
        options["attn_mask"] = draw(st.sampled_from([None, seen, bias, seen[..., :1, :], bias[..., :1, :, :]]))
    if "position" in having:
        options |= draw(positions(batch, keys))
    return Call(q, k, v, options)


def by_position(batch, queries, keys, *, is_causal=False, query_offset=0, window=None, key_lengths=None):
    """The bool mask that positions stand for, (*batch, 1, queries, keys), key by key from the definition."""
    left, right = window or (None, None)
    seen = np.ones((*batch, 1, queries, keys), dtype=bool)
    for b in np.ndindex(batch):
        length = keys if key_lengths is None else int(np.broadcast_to(key_lengths, batch)[b])
        offset = length - queries if isinstance(query_offset, str) else int(np.broadcast_to(query_offset, batch)[b])
        for i, j in np.ndindex(queries, keys):
            position = i + offset
            seen[(*b, 0, i, j)] = (
                j < length
                and (not is_causal or j <= position)
                and (left is None or position - left <= j)
                and (right is None or j <= position + right)
            )
    return seen


def masks_and(mask, seen):
    """One mask for both."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == bool else np.where(seen, mask, -np.inf)


def repeated(call):
    group = call.q.shape[-3] // call.k.shape[-3]
    return (call.q, *(np.repeat(x, group, axis=-3) for x in (call.k, call.v)))


# --- the range of every field ---------------------------------------------------------------------------------------


@backends
@given(call=calls())
def test_fields_stay_in_their_ranges(backend, call):
    reading = call.attend(backend=backend).reading
    n = reading.visible_keys
    some, choice = n > 0, n > 1
    least = 1 / np.maximum(n, 1)
    slack = 1e-13
    assert (reading.entropy >= 0).all()
    assert (reading.entropy <= np.log(np.maximum(n, 1)) + slack).all()
    assert (reading.flow >= 0).all()
    assert (reading.flow <= 1 - least + slack).all()
    assert (reading.largest_weight[some] >= least[some] - slack).all()
    assert (reading.largest_weight <= 1).all()
    assert (reading.collision[some] >= least[some] - slack).all()
    assert (reading.collision <= 1).all()
    assert (reading.effective_keys[some] >= 1).all()
    assert (reading.effective_keys <= n * (1 + slack)).all()
    assert (reading.normalized_entropy[choice] <= 1 + slack).all()
    assert np.isnan(reading.normalized_entropy[~choice]).all()
    # Two more that tie the fields to each other: Σp² lies between max p² and max p, the mean under the expectation.
    assert (reading.collision <= reading.largest_weight + slack).all()
    assert (reading.collision >= reading.largest_weight**2 - slack).all()
    assert (reading.expected_score[some] >= reading.score_mean[some] - slack * 100).all()
    assert (reading.expected_score[some] <= reading.max_logit[some] + slack * 100).all()
    assert (reading.first_key_weight <= reading.largest_weight).all()
    assert ((reading.sink_mass >= 0) & (reading.sink_mass <= 1)).all()
    assert not reading.nonfinite.any()


@backends
@given(call=calls(least_keys=2), shift=st.sampled_from([-100.0, -3.5, 0.25, 64.0]))
def test_a_constant_added_to_all_scores_moves_the_logits_and_nothing_else(backend, call, shift):
    seen = call.options.get("attn_mask")
    bias = np.zeros(()) if seen is None else np.where(seen, 0.0, -np.inf) if seen.dtype == bool else seen
    bias = np.broadcast_to(bias, call.scores_shape)
    sinks = call.options["sinks"]
    # A sink is a logit too: it moves along, or its share would change.
    before = call.attend(attn_mask=bias, backend=backend)
    after = call.attend(attn_mask=bias + shift, sinks=None if sinks is None else sinks + shift, backend=backend)
    same(after, before, but=LOGIT_LIKE, size=abs(shift) + 1)
    some = before.reading.visible_keys > 0
    for name in LOGIT_LIKE:
        here, there = getattr(after.reading, name), getattr(before.reading, name)
        agree(here[some], there[some] + shift, name, abs(shift) + 1)
        np.testing.assert_array_equal(here[~some], there[~some], err_msg=name)


@backends
def test_a_constant_moves_the_largest_score_by_exactly_that(backend):
    # Whole numbers, so that no score is rounded.
    q, k = np.random.default_rng(0).integers(-3, 4, (2, 2, 5, 4)).astype(np.float64)
    before = read(q, k, scale=1.0, backend=backend)
    after = read(q, k, scale=1.0, attn_mask=np.full((5, 5), 37.0), backend=backend)
    np.testing.assert_array_equal(after.max_logit, before.max_logit + 37)
    np.testing.assert_array_equal(after.max_qk, before.max_qk)
    np.testing.assert_allclose(after.score_mean, before.score_mean + 37, rtol=4e-16)
    np.testing.assert_allclose(after.logsumexp, before.logsumexp + 37, rtol=4e-16)


@backends
@given(call=calls(having=("scale", "softcap", "sinks", "mask")), data=st.data())
def test_permuting_the_keys_changes_only_which_is_first(backend, call, data):
    order = data.draw(st.permutations(range(call.k.shape[-2])))
    mask = call.options["attn_mask"]
    options = {**call.options, "attn_mask": None if mask is None else mask[..., order]}
    moved = attend(call.q, call.k[..., order, :], call.v[..., order, :], **options, backend=backend)
    same(moved, call.attend(backend=backend), but=("first_key_weight",))


@backends
@given(call=calls(), order=st.permutations(range(6)))
def test_permuting_the_queries_permutes_the_rows(backend, call, order):
    order = [i for i in order if i < call.q.shape[-2]]
    mask, options = call.options["attn_mask"], dict(call.options)
    seen = by_position(
        call.q.shape[:-3],
        *call.scores_shape[-2:],
        **{
            name: options.pop(name)
            for name in ("is_causal", "query_offset", "window", "key_lengths")
            if name in options
        },
    )
    full = np.broadcast_to(masks_and(mask, seen), call.scores_shape)
    options["attn_mask"] = full[..., order, :]
    moved = attend(call.q[..., order, :], call.k, call.v, **options, backend=backend)
    whole = call.attend(backend=backend)
    agree(moved.output, whole.output[..., order, :])
    for name in FORWARD:
        agree(getattr(moved.reading, name), getattr(whole.reading, name)[..., order], name)


# --- the scale ------------------------------------------------------------------------------------------------------


@backends
@given(call=calls(having=("softcap", "sinks", "mask", "position")), times=st.sampled_from([-2.7, 0.1, 1.3, 3.0]))
def test_scaling_q_is_scaling_the_scale(backend, call, times):
    scaled = attend(call.q * times, call.k, call.v, scale=0.7, **call.options, backend=backend)
    same(scaled, call.attend(scale=0.7 * times, backend=backend))


@backends
@given(call=calls(having=("softcap", "sinks", "mask", "position")), scale=st.floats(-2, 2))
def test_one_scale_is_that_scale_for_every_head(backend, call, scale):
    heads = call.q.shape[-3]
    one = call.attend(scale=scale, backend=backend)
    for per_head in (np.full(heads, scale), [scale] * heads, (scale,) * heads):
        same(call.attend(scale=per_head, backend=backend), one)


@backends
@pytest.mark.parametrize(("name", "number"), [(None, 0.5), ("sqrt_dk", 0.5), ("dk", 0.25), ("unscaled", 1.0)])
def test_names_of_scales_are_numbers(backend, name, number):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    same(attend(q, k, v, scale=name, backend=backend), attend(q, k, v, scale=number, backend=backend))


# --- identities that need no matrix ---------------------------------------------------------------------------------

without_bias = ("scale", "position")


@backends
@given(call=calls(having=without_bias))
def test_the_expected_score_is_q_times_the_average_key(backend, call):
    q, k, _ = repeated(call)
    average, reading = attend(q, k, k, **call.options, backend=backend)
    scale = call.options["scale"]
    named = {None: call.q.shape[-1] ** -0.5, "dk": 1 / call.q.shape[-1], "unscaled": 1.0}
    if scale is None or isinstance(scale, str):
        scale = named[scale]
    expected = np.broadcast_to(scale, call.q.shape[-3])[:, None] * (q * average).sum(axis=-1)
    agree(reading.expected_score, expected, size=10)


@backends
@given(call=calls(having=("position", "sinks")), beta=st.floats(0.1, 2))
def test_collision_is_z_at_half_the_temperature(backend, call, beta):
    once = call.attend(scale=beta, backend=backend).reading
    twice = call.attend(scale=2 * beta, backend=backend).reading
    some = once.visible_keys > 0
    expected = np.zeros_like(once.collision)
    expected[some] = np.exp(twice.logsumexp[some] - 2 * once.logsumexp[some])
    np.testing.assert_allclose(once.collision, expected, rtol=1e-12)


@backends
@given(call=calls())
def test_entropy_is_log_z_minus_the_expected_score(backend, call):
    reading = call.attend(backend=backend).reading
    some = reading.visible_keys > 0
    agree(reading.entropy[some], (reading.logsumexp - reading.expected_score)[some], size=10)
    agree(reading.largest_weight[some], np.exp(reading.max_logit[some] - reading.logsumexp[some]), size=10)


@backends
def test_the_derivatives_of_log_z_are_the_moments_of_the_scores(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    step = 1e-3
    low, mid, high = (read(q, k, scale=0.5 + d, backend=backend) for d in (-step, 0, step))
    # ∂lnZ/∂β at β is E_p[q·k], and the reading's scores are β times that.
    slope = (high.logsumexp - low.logsumexp) / (2 * step)
    np.testing.assert_allclose(0.5 * slope, mid.expected_score, atol=1e-5)
    p = trace(q, k, v, scale=0.5).weights
    s = trace(q, k, v, scale=0.5).scores
    variance = (p * s**2).sum(axis=-1) - (p * s).sum(axis=-1) ** 2
    bend = (high.logsumexp - 2 * mid.logsumexp + low.logsumexp) / step**2
    np.testing.assert_allclose(bend, variance, rtol=1e-4)
    assert (variance > 0.05).all()


# --- masks ----------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("kind", ["causal", "window", "lengths", "all"])
@given(call=calls(having=("scale", "softcap", "sinks", "mask")), data=st.data())
def test_positions_are_a_bool_mask(backend, kind, call, data):
    batch, keys = call.q.shape[:-3], call.k.shape[-2]
    chosen = data.draw(positions(batch, keys, kinds=(kind,)))
    seen = by_position(batch, call.q.shape[-2], keys, **chosen)
    mask = masks_and(call.options.pop("attn_mask"), seen)
    same(
        attend(*call.operands, attn_mask=mask, **call.options, backend=backend),
        attend(*call.operands, attn_mask=mask, **chosen, **call.options, backend=backend),
    )
    alone = attend(*call.operands, **chosen, **call.options, backend=backend)
    same(alone, attend(*call.operands, attn_mask=seen, **call.options, backend=backend))
    expected = np.broadcast_to(seen.sum(axis=-1), alone.reading.shape)
    np.testing.assert_array_equal(alone.reading.visible_keys, expected)


@given(batch=st.sampled_from([(), (2,), (2, 2)]), queries=st.integers(0, 6), keys=st.integers(0, 8), data=st.data())
def test_bounds_lie_among_the_keys(batch, queries, keys, data):
    # Kernels index by them, so an empty interval must lie inside too.
    chosen = data.draw(positions(batch, keys, kinds=("causal", "window", "lengths", "all")))
    everything = {"is_causal": False, "query_offset": 0, "window": None, "key_lengths": None, "cu_seqlens": None}
    bounds = key_bounds(np, batch, queries, keys, **{**everything, **chosen})
    seen = by_position(batch, queries, keys, **chosen)[..., 0, :, :]
    if bounds is None:
        assert seen.all()
        return
    assert bounds.first.shape == bounds.stop.shape
    assert bounds.first.shape in ((queries,), (*batch, queries))
    assert ((bounds.first >= 0) & (bounds.first <= bounds.stop) & (bounds.stop <= keys)).all()
    index = np.arange(keys)
    between = (bounds.first[..., None] <= index) & (index < bounds.stop[..., None])
    np.testing.assert_array_equal(np.broadcast_to(between, seen.shape), seen)


FAR = st.sampled_from([2**61, -(2**61), 2**40, -(2**40)])


@given(
    queries=st.integers(0, 6),
    keys=st.integers(0, 8),
    is_causal=st.booleans(),
    offset=st.integers(-9, 9) | FAR | st.just("bottom-right"),
    window=st.none() | st.tuples(*[st.none() | st.integers(0, 9) | FAR.map(abs)] * 2),
)
def test_a_band_says_what_bounds_say(queries, keys, is_causal, offset, window):
    torch = pytest.importorskip("torch")
    options = {
        "is_causal": is_causal,
        "query_offset": offset,
        "window": window,
        "key_lengths": None,
        "cu_seqlens": None,
    }
    bounds, band = key_bounds(np, (), queries, keys, **options), key_band(queries, keys, **options)
    assert (band is None) == (bounds is None)
    if band is not None:
        assert -queries <= band.low <= keys
        assert -queries <= band.high <= keys
        for found, expected in zip(bounds_of_band(torch, band, queries, keys, "cpu"), bounds, strict=True):
            np.testing.assert_array_equal(found, expected)


@backends
@given(call=calls(having=("scale", "softcap", "sinks", "position")), rate=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_bool_mask_is_a_bias_of_zero_and_minus_infinity(backend, call, rate, seed):
    seen = np.random.default_rng(seed).random(call.scores_shape) < rate
    bias = np.where(seen, 0.0, -np.inf)
    same(call.attend(attn_mask=seen, backend=backend), call.attend(attn_mask=bias, backend=backend))


@backends
@given(call=calls(having=("scale", "softcap", "sinks", "mask")), data=st.data())
def test_a_key_length_is_a_slice(backend, call, data):
    length = data.draw(st.integers(0, call.k.shape[-2]))
    mask = call.options["attn_mask"]
    options = {**call.options, "attn_mask": None if mask is None else mask[..., :length]}
    sliced = attend(call.q, call.k[..., :length, :], call.v[..., :length, :], **options, backend=backend)
    same(call.attend(key_lengths=length, backend=backend), sliced)


@backends
def test_only_false_and_minus_infinity_hide_a_key(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 4)).astype(np.float32)
    for lowest in (np.finfo(np.float64).min, np.float64(-1e300), np.finfo(np.float32).min, np.float64(-1e4)):
        bias = np.array([[0, lowest], [0, 0]])
        # A float64 bias can be finite and yet −inf in the float32 of the scores: the key stays visible.
        reading = attend(q, k, v, attn_mask=bias, backend=backend).reading
        np.testing.assert_array_equal(reading.visible_keys, [[2, 2]])
    reading = attend(q, k, v, attn_mask=np.array([[0, -np.inf], [0, 0]]), backend=backend).reading
    np.testing.assert_array_equal(reading.visible_keys, [[1, 2]])


@pytest.mark.parametrize("form", ["one", "pair"])
@backends
@given(data=st.data())
def test_a_packed_batch_is_its_sequences_one_by_one(backend, form, data):
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4))
    if form == "one":
        lengths = [(n, n) for n, _ in lengths]
    starts = np.concatenate([[[0, 0]], np.cumsum(lengths, axis=0)])
    queries, keys = (int(n) for n in starts[-1])
    batch = data.draw(st.sampled_from([(), (2,)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((*batch, 2, queries, 3))
    k, v = rng.standard_normal((2, *batch, 2, keys, 3))
    options = {
        "is_causal": data.draw(st.booleans()),
        "window": data.draw(windows),
        "query_offset": data.draw(st.sampled_from(["bottom-right", 0, 0, -1, 2])),
        "softcap": data.draw(st.sampled_from([None, 2.0])),
        "sinks": data.draw(st.sampled_from([None, rng.normal(size=2)])),
        "backend": backend,
    }
    # What stands between two sequences is never looked at.
    bias = np.full((queries, keys), np.nan)
    blocks = [(slice(*starts[i : i + 2, 0]), slice(*starts[i : i + 2, 1])) for i in range(len(lengths))]
    for rows, columns in blocks:
        bias[rows, columns] = rng.standard_normal(bias[rows, columns].shape)
    masked = data.draw(st.booleans())
    packing = starts[:, 0] if form == "one" else tuple(starts.T)
    packed = attend(q, k, v, cu_seqlens=packing, attn_mask=bias if masked else None, **options)
    for rows, columns in blocks:
        mask = bias[rows, columns] if masked else None
        single = attend(q[..., rows, :], k[..., columns, :], v[..., columns, :], attn_mask=mask, **options)
        agree(packed.output[..., rows, :], single.output)
        for name in FORWARD:
            agree(getattr(packed.reading, name)[..., rows], getattr(single.reading, name), name)


# --- axes -----------------------------------------------------------------------------------------------------------


@backends
@given(call=calls())
def test_grouped_heads_are_repeated_keys_and_values(backend, call):
    same(call.attend(backend=backend), attend(*repeated(call), **call.options, backend=backend))


@backends
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_broadcasting_is_repetition(backend, seed, data):
    rng = np.random.default_rng(seed)

    def some(*full):
        """A shape that broadcasts to the full one."""
        shape = [data.draw(st.sampled_from([1, n])) for n in full]
        return tuple(shape[data.draw(st.integers(0, len(full) - 1)) :])

    batch, heads, queries, keys = (2, 3), 2, 4, 5
    q = rng.standard_normal((*some(*batch), heads, queries, 3))
    k = rng.standard_normal((*some(*batch, heads), keys, 3))
    v = rng.standard_normal((*some(*batch), heads, keys, 2))
    mask = rng.standard_normal(some(*batch, heads, queries, keys))
    options = {"query_offset": rng.integers(-1, 4, some(*batch)), "is_causal": True, "backend": backend}
    lengths = rng.integers(0, keys + 1, some(*batch))
    full = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    # Options never widen the batch of the operands.
    for name, value in {"mask": mask, "offset": options["query_offset"], "lengths": lengths}.items():
        axes = value.shape[: max(value.ndim - 3, 0)] if name == "mask" else value.shape
        if np.broadcast_shapes(axes, full) != full:
            q = np.broadcast_to(q, (*batch, *q.shape[-3:]))
            full = batch

    def whole(x, *rest):
        return np.broadcast_to(x, (*full, *rest)).copy()

    explicit = attend(
        whole(q, heads, queries, 3),
        whole(k, heads, keys, 3),
        whole(v, heads, keys, 2),
        attn_mask=whole(mask, heads, queries, keys),
        key_lengths=whole(lengths),
        **{**options, "query_offset": whole(options["query_offset"])},
    )
    same(attend(q, k, v, attn_mask=mask, key_lengths=lengths, **options), explicit)


@backends
@given(call=calls(having=("softcap", "mask", "position")))
def test_batch_entries_and_heads_do_not_mix(backend, call):
    whole = call.attend(backend=backend)
    batch, heads = call.q.shape[:-3], call.q.shape[-3]
    group = heads // call.k.shape[-3]
    options = {name: call.options.get(name) for name in ("softcap", "window")}
    options["is_causal"] = call.options.get("is_causal", False)
    mask = call.options["attn_mask"]
    for b in np.ndindex(batch):
        offset, lengths = call.options.get("query_offset", 0), call.options.get("key_lengths")
        here = {
            "query_offset": offset if isinstance(offset, str) else np.broadcast_to(offset, batch)[b],
            "key_lengths": None if lengths is None else lengths[b],
        }
        for h in range(heads):
            part = None if mask is None else np.broadcast_to(mask, call.scores_shape)[(*b, h)]
            kv = (*b, h // group)
            alone = attend(call.q[(*b, h)], call.k[kv], call.v[kv], attn_mask=part, **here, **options, backend=backend)
            agree(whole.output[(*b, h)], alone.output)
            for name in FORWARD:
                agree(getattr(whole.reading, name)[(*b, h)], getattr(alone.reading, name), name)


@backends
def test_ranks_agree(backend):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((4, 3)), rng.standard_normal((6, 3)), rng.standard_normal((6, 2))
    bias = rng.standard_normal((4, 6))
    flat = attend(q, k, v, attn_mask=bias, is_causal=True, query_offset=1, backend=backend)
    assert flat.output.shape == (4, 2)
    assert flat.reading.shape == (4,)
    for more in (1, 2, 3):
        axes = (None,) * more
        deep = attend(q[axes], k[axes], v[axes], attn_mask=bias, is_causal=True, query_offset=1, backend=backend)
        assert deep.output.shape == (1,) * more + (4, 2)
        assert deep.reading.shape == (1,) * more + (4,)
        agree(deep.output[(0,) * more], flat.output)
        for name in FORWARD:
            agree(getattr(deep.reading, name)[(0,) * more], getattr(flat.reading, name), name)


# --- what was asked for ---------------------------------------------------------------------------------------------


@backends
@given(call=calls())
def test_read_is_the_reading_of_attend(backend, call):
    attended = call.attend(backend=backend).reading
    alone = read(call.q, call.k, **call.options, backend=backend)
    assert alone.output_norm is None
    assert attended.output_norm is not None
    for name in FORWARD:
        if name != "output_norm":
            agree(getattr(alone, name), getattr(attended, name), name)


@backends
@given(call=calls())
def test_a_field_asked_for_alone_is_the_field_from_all(backend, call):
    output, whole = call.attend(stats="all", backend=backend)
    for name in FIELDS:
        alone = call.attend(stats=name, backend=backend)
        np.testing.assert_array_equal(alone.output, output)
        np.testing.assert_array_equal(getattr(alone.reading, name), getattr(whole, name), err_msg=name)
        needed = DERIVED.get(name, (name,))
        assert all(getattr(alone.reading, other) is None for other in MEASURED if other not in needed), name
        assert alone.reading.backend == backend


@backends
def test_nothing_asked_for_is_nothing_measured(backend):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    output, reading = attend(q, k, v, stats="none", backend=backend)
    agree(output, attend(q, k, v, backend=backend).output)
    assert reading.backend == backend
    assert all(getattr(reading, name) is None for name in FIELDS)
    complete = attend(q, k, v, backend=backend).reading
    assert {name for name in FIELDS if getattr(complete, name) is None} == set(AFTER_BACKWARD)
    several = attend(q, k, v, stats=("flow", "max_logit"), backend=backend).reading
    assert {name for name in MEASURED if getattr(several, name) is not None} == {"collision", "max_logit"}


# --- few keys, and empty axes ---------------------------------------------------------------------------------------

SEE_NOTHING = {
    "bool": {"attn_mask": np.array([[False] * 3, [True] * 3])},
    "bias": {"attn_mask": np.array([[-np.inf] * 3, [0.0] * 3])},
    "causal": {"is_causal": True, "query_offset": np.array(-1)},
    "window": {"window": (0, 0), "query_offset": -1},
    "past the end": {"window": (0, None), "query_offset": 3},
    "length": {"key_lengths": 0},
    "packed": {"cu_seqlens": ([0, 1, 2], [0, 0, 3])},
}


@pytest.mark.parametrize("sink", [None, -np.inf, -40.0, 0.0, 700.0])
@pytest.mark.parametrize("options", SEE_NOTHING.values(), ids=SEE_NOTHING)
@backends
def test_a_row_that_sees_no_key(backend, options, sink):
    q = np.random.default_rng(0).standard_normal((1, 2, 4))
    k, v = np.random.default_rng(1).standard_normal((2, 1, 3, 4))
    sinks = None if sink is None else np.array([sink])
    output, reading = attend(q, k, v, sinks=sinks, **options, backend=backend)
    assert reading.visible_keys[0, 0] == 0
    np.testing.assert_array_equal(output[0, 0], np.zeros(4))
    for name in FORWARD:
        expected = 0.0
        if name in ("max_logit", "logsumexp", "max_qk"):
            expected = -np.inf
        elif name == "normalized_entropy":
            expected = np.nan
        elif name == "sink_mass" and sink is not None and sink > -np.inf:
            expected = 1.0
        np.testing.assert_array_equal(getattr(reading, name)[0, 0], expected, err_msg=name)


SEE_ONE = {
    "bool": {"attn_mask": np.array([[False, True, False]])},
    "bias": {"attn_mask": np.array([[-np.inf, 0.0, -np.inf]])},
    "window": {"window": (0, 0), "query_offset": 1},
    "length": {"key_lengths": 2, "window": (0, None), "query_offset": 1},
    "packed": {"cu_seqlens": ([0, 0, 1, 1], [0, 1, 2, 3])},
}


@pytest.mark.parametrize("sink", [None, -np.inf, 0.5])
@pytest.mark.parametrize("options", SEE_ONE.values(), ids=SEE_ONE)
@backends
def test_a_row_that_sees_one_key(backend, options, sink):
    q = np.random.default_rng(0).standard_normal((1, 1, 4))
    k, v = np.random.default_rng(1).standard_normal((2, 1, 3, 4))
    sinks = None if sink is None else np.array([sink])
    output, reading = attend(q, k, v, sinks=sinks, scale=2.0, **options, backend=backend)
    score = 2 * q[0, 0] @ k[0, 1]
    mass = 0.0 if sink is None else 1 / (1 + math.exp(score - sink))
    for name in ("entropy", "flow", "score_std", "nonfinite"):
        np.testing.assert_array_equal(getattr(reading, name), [[0]], err_msg=name)
    for name in ("largest_weight", "collision", "effective_keys", "first_key_weight", "visible_keys"):
        np.testing.assert_array_equal(getattr(reading, name), [[1]], err_msg=name)
    for name in ("max_logit", "logsumexp", "expected_score", "score_mean", "max_qk"):
        agree(getattr(reading, name), np.array([[score]]), name)
    assert np.isnan(reading.normalized_entropy).all()
    agree(reading.sink_mass, np.array([[mass]]))
    agree(output[0], (1 - mass) * v[0, 1:2])
    agree(reading.output_norm, np.linalg.norm((1 - mass) * v[0, 1:2])[None, None])


def some_of(*shape):
    return np.random.default_rng(0).standard_normal(shape)


EMPTY = {
    "queries": (some_of(2, 3, 0, 4), some_of(2, 3, 5, 4), some_of(2, 3, 5, 2)),
    "keys": (some_of(2, 3, 6, 4), some_of(2, 3, 0, 4), some_of(2, 3, 0, 2)),
    "queries and keys": (some_of(2, 3, 0, 4), some_of(2, 3, 0, 4), some_of(2, 3, 0, 2)),
    "batch": (some_of(0, 3, 6, 4), some_of(0, 3, 5, 4), some_of(0, 3, 5, 2)),
    "a batch axis": (some_of(2, 0, 3, 6, 4), some_of(2, 0, 3, 5, 4), some_of(2, 0, 3, 5, 2)),
    "heads": (some_of(2, 0, 6, 4), some_of(2, 0, 5, 4), some_of(2, 0, 5, 2)),
    "head_dim": (some_of(2, 3, 6, 0), some_of(2, 3, 5, 0), some_of(2, 3, 5, 2)),
    "value_dim": (some_of(2, 3, 6, 4), some_of(2, 3, 5, 4), some_of(2, 3, 5, 0)),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("masked", ["nothing", "causal", "bool", "bias", "sinks", "lengths"])
@pytest.mark.parametrize("axis", EMPTY)
@backends
def test_an_empty_axis_is_an_axis(backend, axis, masked, dtype):
    q, k, v = (x.astype(dtype) for x in EMPTY[axis])
    rows = q.shape[:-1]
    options = {
        "nothing": {},
        "causal": {"is_causal": True, "query_offset": "bottom-right"},
        "bool": {"attn_mask": np.ones((q.shape[-2], k.shape[-2]), dtype=bool)},
        "bias": {"attn_mask": np.zeros((q.shape[-2], k.shape[-2]))},
        "sinks": {"sinks": np.zeros(q.shape[-3])},
        "lengths": {"key_lengths": np.full(q.shape[:-3], k.shape[-2])},
    }[masked]
    output, reading = attend(q, k, v, **options, backend=backend)
    assert output.shape == (*rows, v.shape[-1])
    assert output.dtype == dtype
    assert np.isfinite(output).all()
    wide = np.float64 if backend == "reference" or dtype == np.float64 else np.float32
    for name in FORWARD:
        field = getattr(reading, name)
        assert field.shape == rows, name
        assert field.dtype == (np.int64 if name in ("visible_keys", "nonfinite") else wide), name
    if masked == "nothing":
        assert (reading.visible_keys == k.shape[-2]).all()
    if axis == "keys":
        assert (reading.sink_mass == (masked == "sinks")).all()
        assert (reading.max_logit == -np.inf).all()
        assert not output.any()
    if axis == "value_dim":
        assert not reading.output_norm.any()
        assert (reading.entropy[reading.visible_keys > 1] > 0).all()


@backends
def test_without_components_every_visible_key_counts_alike(backend):
    q, k = np.zeros((2, 4, 0)), np.zeros((2, 5, 0))
    v = np.random.default_rng(0).standard_normal((2, 5, 3))
    output, reading = attend(q, k, v, is_causal=True, backend=backend)
    for i in range(4):
        agree(output[:, i], v[:, : i + 1].mean(axis=1))
        agree(reading.entropy[:, i], np.full(2, math.log(i + 1)))
        agree(reading.collision[:, i], np.full(2, 1 / (i + 1)))


# --- trace ----------------------------------------------------------------------------------------------------------


@tiles
@given(call=calls())
def test_every_step_of_a_trace_leads_to_the_next_and_to_attend(backend, call):
    steps = trace(*call.operands, **call.options)
    output, reading = call.attend(backend=backend)
    q, k, v = repeated(call)
    scale = call.options["scale"]
    if scale is None or isinstance(scale, str):
        scale = {None: q.shape[-1] ** -0.5, "dk": 1 / q.shape[-1], "unscaled": 1.0}[scale]
    seen = ~np.isneginf(steps.masked)
    agree(steps.scores, np.einsum("...qd,...kd->...qk", q, k))
    agree(steps.scaled, np.broadcast_to(scale, q.shape[-3])[:, None, None] * steps.scores)
    cap = call.options["softcap"]
    agree(steps.capped, steps.scaled if cap is None else cap * np.tanh(steps.scaled / cap))
    mask = call.options["attn_mask"]
    bias = np.zeros(()) if mask is None or mask.dtype == bool else mask
    agree(steps.masked[seen], (steps.capped + bias)[seen])
    agree(steps.output, steps.weights @ v)
    agree(steps.output, output)

    np.testing.assert_array_equal(seen.sum(axis=-1), reading.visible_keys)
    np.testing.assert_array_equal(steps.weights[~seen], 0)
    agree(steps.masked.max(axis=-1, initial=-np.inf), reading.max_logit)
    agree(np.where(seen, steps.scaled, -np.inf).max(axis=-1, initial=-np.inf), reading.max_qk)
    some = reading.visible_keys > 0
    agree(steps.weights.sum(axis=-1)[some], 1 - reading.sink_mass[some])
    z = np.exp(steps.masked).sum(axis=-1)
    agree(np.log(z[some]), reading.logsumexp[some])
    p = np.exp(steps.masked)[some] / z[some][:, None]
    agree((p * p).sum(axis=-1), reading.collision[some])
    agree(p.max(axis=-1, initial=0), reading.largest_weight[some])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@tiles
def test_a_trace_is_as_wide_as_a_reading(backend, dtype):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype(dtype)
    steps = trace(q, k, v)
    wide = np.float64 if dtype == np.float64 else np.float32
    for name in ("scores", "scaled", "capped", "masked", "weights"):
        assert getattr(steps, name).dtype == wide, name
        assert getattr(steps, name).shape == (2, 5, 5), name
    assert steps.output.dtype == dtype
    tight = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(steps.output, attend(q, k, v, backend=backend).output, rtol=tight, atol=tight)
    assert trace(q[0], k[0], v[0]).weights.shape == (5, 5)


# --- memory ---------------------------------------------------------------------------------------------------------


@backends
@given(call=calls())
def test_inputs_are_never_modified(backend, call):
    given_arrays = {"q": call.q, "k": call.k, "v": call.v} | call.options
    given_arrays = {name: x for name, x in given_arrays.items() if isinstance(x, np.ndarray)}
    before = {name: x.tobytes() for name, x in given_arrays.items()}
    outcome = call.attend(backend=backend)
    trace(*call.operands, **call.options)
    assert {name: x.tobytes() for name, x in given_arrays.items()} == before
    # Nor is the result a window on them.
    results = [outcome.output, *(getattr(outcome.reading, name) for name in FORWARD)]
    assert not any(np.shares_memory(x, y) for x in results for y in given_arrays.values())


def sliced(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan if x.dtype.kind == "f" else True, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def misaligned(x):
    raw = np.empty(x.nbytes + 1, dtype=np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    assert not view.flags.aligned
    return view


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "transposed": lambda x: np.swapaxes(np.swapaxes(x, -1, -2).copy(), -1, -2),
    "heads last": lambda x: np.moveaxis(np.moveaxis(x, 0, -2).copy(), -2, 0),
    "fortran": np.asfortranarray,
    "sliced": sliced,
    "negative strides": lambda x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "misaligned": lambda x: misaligned(x) if x.dtype.itemsize > 1 else x,
    "read-only": frozen,
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("masked", ["bool", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@backends
def test_only_the_numbers_matter_not_where_they_lie(backend, layout, masked, dtype):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 5, 6)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 7, 6)).astype(dtype)
    mask = rng.random((4, 5, 7)) < 0.7
    if masked == "bias":
        mask = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(dtype)
    per_head = rng.uniform(0.2, 1, 4).astype(dtype)
    lay = LAYOUTS[layout]
    row = (lambda x: x.astype(x.dtype.newbyteorder(">"))) if layout == "big-endian" else (lambda x: x)
    expected = attend(q, k, v, attn_mask=mask, scale=per_head, sinks=per_head, enable_gqa=True, backend=backend)
    laid = {"attn_mask": lay(mask), "scale": row(per_head), "sinks": row(per_head)}
    actual = attend(lay(q), lay(k), lay(v), **laid, enable_gqa=True, backend=backend)
    tight = {np.float64: 1e-14, np.float32: 4e-7, np.float16: 1e-3}[dtype]
    np.testing.assert_allclose(actual.output.astype(np.float64), expected.output.astype(np.float64), tight, tight)
    assert actual.output.dtype.name == expected.output.dtype.name
    # A reading of float16 is taken in float32.
    tight = 1e-14 if dtype == np.float64 or backend == "reference" else 1e-6
    for name in FORWARD:
        here, there = getattr(actual.reading, name), getattr(expected.reading, name)
        assert here.dtype.name == there.dtype.name, name
        np.testing.assert_allclose(here, there, rtol=tight, atol=tight, err_msg=name)


# --- tiles ----------------------------------------------------------------------------------------------------------


@given(call=calls(), seed=st.integers(0, 3), p=st.sampled_from([0.0, 0.4]))
def test_tiles_of_any_size_are_the_reference(call, seed, p):
    # Tiny tiles bring every boundary, and every cut of the leading axes, within reach of small problems.
    expected = call.attend(dropout_p=p, seed=seed, backend="reference")
    for rows, columns, room in ((1, 1, 1), (2, 3, 8), (3, 2, 12), (4, 5, 40)):
        with mock.patch.multiple(tiled, QUERY_TILE=rows, KEY_TILE=columns, TILE_SCORES=room):
            same(call.attend(dropout_p=p, seed=seed, backend="numpy"), expected)


LENGTHS = (1, 127, 128, 129, 511, 512, 513, 1025)
SHAPES = [(n, n) for n in LENGTHS] + [(1, 1025), (3, 513), (129, 511), (129, 512), (513, 1), (1025, 129)]


@pytest.mark.parametrize("kind", ["plain", "causal", "bottom-right", "window", "bool", "bias"])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@tiles
def test_lengths_at_the_edges_of_tiles_are_the_reference(backend, queries, keys, kind):
    rng = np.random.default_rng(queries * 2000 + keys)
    q = rng.standard_normal((1, queries, 4)) * 2
    k, v = rng.standard_normal((2, 1, keys, 4))
    seen = rng.random((queries, keys)) < 0.5
    # Whole tiles hidden from whole rows, not only scattered keys.
    seen[: queries // 2, keys // 3 :] = False
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "bottom-right": {"is_causal": True, "query_offset": "bottom-right"},
        "window": {"window": (100, 30), "query_offset": 5},
        "bool": {"attn_mask": seen},
        "bias": {"attn_mask": np.where(seen, rng.standard_normal(seen.shape), -np.inf), "softcap": 5.0},
    }[kind]
    actual = attend(q, k, v, **options, backend=backend)
    assert actual.reading.backend == backend
    same(actual, attend(q, k, v, **options, backend="reference"))


@pytest.mark.parametrize(("batch", "kv_heads", "group"), [((), 1, 5), ((3,), 2, 1), ((2,), 2, 4), ((2, 2), 3, 1)])
@tiles
def test_slabs_of_heads_and_batch_are_the_reference(backend, batch, kv_heads, group):
    # Large enough that the heads, then the batch, are taken one at a time.
    rng = np.random.default_rng(0)
    heads = kv_heads * group
    q = rng.standard_normal((*batch, heads, 130, 3))
    k, v = rng.standard_normal((2, *batch, kv_heads, 515, 3))
    options = {
        "enable_gqa": True,
        "scale": rng.uniform(0.5, 1.5, heads),
        "sinks": rng.normal(size=heads),
        "attn_mask": rng.standard_normal((*batch, heads, 1, 515)),
        "key_lengths": rng.integers(1, 516, batch),
        "window": (300, 200),
        "query_offset": 40,
    }
    same(attend(q, k, v, **options, backend=backend), attend(q, k, v, **options, backend="reference"))


@pytest.mark.parametrize("softcap", [1e29, 1e31, 1e300])
@backends
def test_a_softcap_far_above_the_scores_changes_nothing(backend, softcap):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4)).astype(np.float32)
    plain, capped = (attend(q, k, v, softcap=cap, backend=backend).output for cap in (None, softcap))
    np.testing.assert_allclose(capped, plain, rtol=1e-6)
