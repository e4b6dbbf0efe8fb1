"""The laws of State: merging is the union of disjoint sets of keys, and nothing else."""

from dataclasses import fields
from functools import reduce
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attemper._state import NO_KEY, State, finish, identity, merge, observe

PARTS = tuple(f.name for f in fields(State))
GROUPS = {
    "weighted": ("weighted",),
    "tilt": ("tilt",),
    "squares": ("squares",),
    "moments": ("mean", "spread"),
    "highest_qk": ("highest_qk",),
    "first": ("first", "first_score"),
}
ALWAYS = ("maximum", "total", "count")
EVERY = frozenset(GROUPS)
VALUE_DIM = 2

WORLDS = [
    pytest.param(np, np.float64, id="numpy-float64"),
    pytest.param(np, np.float32, id="numpy-float32"),
    pytest.param(torch, torch.float64, id="torch-float64"),
    pytest.param(torch, torch.float32, id="torch-float32"),
]
worlds = pytest.mark.parametrize(("xp", "dtype"), WORLDS)


def eps(dtype):
    return 2.0**-23 if dtype in (np.float32, torch.float32) else 2.0**-52


def tiny(dtype):
    return 2.0**-126 if dtype in (np.float32, torch.float32) else 2.0**-1022


def put(xp, dtype, x):
    """A float64 or integer NumPy array as an array of that world."""
    if x.dtype.kind == "i":
        return xp.asarray(x)
    return xp.asarray(x.astype(np.float32 if eps(dtype) > 1e-10 else np.float64))


def out(x):
    return np.asarray(x.numpy() if isinstance(x, torch.Tensor) else x)


def over(xp, dtype, keys, member, parts=EVERY):
    """The State over the keys marked in `member` (rows, keys), by its definition, in float64."""
    with np.errstate(all="ignore"):
        s = np.where(member, keys.scores, -np.inf)
        m = s.max(axis=-1, initial=-np.inf)
        gap = s - np.where(m == -np.inf, 0, m)[..., None]
        e = np.exp(gap)
        n = member.sum(axis=-1)
        # An empty set has mean 0: the sum below is 0 there.
        mean = np.where(member, keys.scores, 0).sum(axis=-1) / np.maximum(n, 1)
        position = np.where(member, np.arange(s.shape[-1]), NO_KEY)
        first = position.min(axis=-1, initial=NO_KEY)
        everything = {
            "maximum": m,
            "total": e.sum(axis=-1),
            "count": n.astype(np.float64),
            "weighted": np.einsum("rk,kv->rv", e, keys.values),
            "tilt": np.where(e > 0, e * np.where(e > 0, gap, 0), 0).sum(axis=-1),
            "squares": (e * e).sum(axis=-1),
            "mean": mean,
            "spread": np.where(member, (keys.scores - mean[..., None]) ** 2, 0).sum(axis=-1),
            "highest_qk": np.where(member, keys.qk, -np.inf).max(axis=-1, initial=-np.inf),
            "first": first,
            "first_score": np.where(position == first[..., None], s, -np.inf).max(axis=-1, initial=-np.inf),
        }
    wanted = {*ALWAYS, *(part for group in parts for part in GROUPS[group])}
    return State(**{name: put(xp, dtype, everything[name]) for name in wanted})


class Keys:
    """Scores and scaled q·k (rows, keys), values (keys, VALUE_DIM)."""

    def __init__(self, scores, qk, values):
        self.scores, self.qk, self.values = scores, qk, values

    def __repr__(self):
        return f"Keys({self.scores!r}, {self.qk!r}, {self.values!r})"


usual = st.floats(-50, 50, width=32)
hidden_too = st.one_of(usual, st.sampled_from([-np.inf, 0.0, -0.0, 50.0]))


@st.composite
def keys_and_sets(draw, elements=usual, sets=3, least=0):
    """Keys, and for each row which set each key is in: any interleaving, some sets empty, some keys in none."""
    rows, count = draw(st.integers(1, 3)), draw(st.integers(least, 7))
    scores = draw(arrays(np.float64, (rows, count), elements=elements))
    qk = draw(arrays(np.float64, (rows, count), elements=usual))
    values = draw(arrays(np.float64, (count, VALUE_DIM), elements=st.floats(-4, 4, width=32)))
    label = draw(arrays(np.int64, (rows, count), elements=st.integers(-1, sets - 1)))
    return Keys(scores, qk, values), [label == i for i in range(sets)]


def assert_same(one, two, keys, dtype):
    """Equal up to the rounding of a few operations in that dtype, part by part."""
    e, floor = eps(dtype), 1e3 * tiny(dtype)
    finite = keys.scores[np.isfinite(keys.scores)]
    size = np.abs(finite).max(initial=1)
    # An exponent of size x is off by x·eps, so e^x is off by as much relatively.
    relative = 8 * e * (1 + 2 * size)
    n = keys.scores.shape[-1]
    for name in PARTS:
        here, there = getattr(one, name), getattr(two, name)
        assert (here is None) == (there is None), name
        if here is None:
            continue
        assert here.dtype == there.dtype, name
        here, there = out(here).astype(np.float64), out(there).astype(np.float64)
        assert here.shape == there.shape, name
        if name in ("maximum", "count", "highest_qk", "first", "first_score"):
            np.testing.assert_array_equal(here, there, err_msg=name)
            continue
        slack = floor
        if name == "weighted":
            # Terms of both signs cancel; each is at most |v|.
            slack = relative * n * np.abs(keys.values).max(initial=0) + floor
        elif name == "mean":
            slack = 4 * n * e * size
        elif name == "spread":
            slack = 8 * n * e * size * np.sqrt(np.where(np.isfinite(there), there, 0)) + n * (8 * e * size) ** 2
        odd = ~np.isfinite(there)
        np.testing.assert_array_equal(here[odd], there[odd], err_msg=name)
        here, there = np.where(odd, 0, here), np.where(odd, 0, there)
        bad = ~(np.abs(here - there) <= relative * np.abs(there) + slack)
        assert not bad.any(), f"{name}: {here[bad]} against {there[bad]}"


def union(members):
    return reduce(np.logical_or, members)


# --- merge ----------------------------------------------------------------------------------------------------------


@worlds
@given(data=keys_and_sets(hidden_too))
def test_merge_is_the_union(xp, dtype, data):
    keys, (a, b, _) = data
    with np.errstate(all="ignore"):
        merged = merge(xp, over(xp, dtype, keys, a), over(xp, dtype, keys, b))
    assert_same(merged, over(xp, dtype, keys, a | b), keys, dtype)


@worlds
@given(data=keys_and_sets(hidden_too))
def test_merge_is_associative(xp, dtype, data):
    keys, members = data
    a, b, c = (over(xp, dtype, keys, member) for member in members)
    with np.errstate(all="ignore"):
        left = merge(xp, merge(xp, a, b), c)
        right = merge(xp, a, merge(xp, b, c))
    assert_same(left, right, keys, dtype)


@worlds
@given(data=keys_and_sets(hidden_too, sets=2))
def test_merge_is_commutative(xp, dtype, data):
    keys, members = data
    a, b = (over(xp, dtype, keys, member) for member in members)
    with np.errstate(all="ignore"):
        assert_same(merge(xp, a, b), merge(xp, b, a), keys, dtype)


@worlds
@given(data=keys_and_sets(hidden_too, sets=1))
def test_the_empty_set_is_the_identity_on_both_sides(xp, dtype, data):
    keys, (member,) = data
    state = over(xp, dtype, keys, member)
    nothing = identity(xp, (len(member),), EVERY, value_dim=VALUE_DIM, dtype=dtype)
    with np.errstate(all="ignore"):
        both = merge(xp, nothing, state), merge(xp, state, nothing)
    for merged in both:
        for name in PARTS:
            # To the bit: nothing is added.
            np.testing.assert_array_equal(out(getattr(merged, name)), out(getattr(state, name)), err_msg=name)
            assert getattr(merged, name).dtype == getattr(state, name).dtype, name


@worlds
@given(data=keys_and_sets(hidden_too, sets=5), order=st.permutations(range(5)), balanced=st.booleans())
def test_any_split_merged_in_any_order_is_the_whole(xp, dtype, data, order, balanced):
    keys, members = data
    states = [over(xp, dtype, keys, members[i]) for i in order]
    with np.errstate(all="ignore"):
        while len(states) > 1:
            if balanced:
                pairs = [states[i : i + 2] for i in range(0, len(states), 2)]
                states = [merge(xp, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
            else:
                states = [merge(xp, states[0], states[1]), *states[2:]]
    assert_same(states[0], over(xp, dtype, keys, union(members)), keys, dtype)


@worlds
@given(data=keys_and_sets(hidden_too, sets=2))
def test_merge_is_silent_and_never_invents_nan(xp, dtype, data):
    # Without errstate: −inf − (−inf) and −inf·0 are to be avoided, not hidden. Warnings are errors here.
    keys, members = data
    keys.scores[np.isneginf(keys.scores) & union(members)] = -7  # visible scores are finite; empty sets remain
    merged = merge(xp, *(over(xp, dtype, keys, member) for member in members))
    for name in PARTS:
        assert not np.isnan(out(getattr(merged, name)).astype(np.float64)).any(), name


@worlds
def test_merging_nothing_with_nothing_is_nothing(xp, dtype):
    nothing = identity(xp, (2, 3), EVERY, value_dim=VALUE_DIM, dtype=dtype)
    with np.errstate(all="ignore"):
        still = merge(xp, nothing, nothing)
    for state in (nothing, still):
        expected = dict.fromkeys(PARTS, 0.0) | dict.fromkeys(("maximum", "highest_qk", "first_score"), -np.inf)
        for name, value in (expected | {"first": NO_KEY}).items():
            shape = (2, 3, VALUE_DIM) if name == "weighted" else (2, 3)
            np.testing.assert_array_equal(out(getattr(state, name)), np.full(shape, value), err_msg=name)


@worlds
@pytest.mark.parametrize("where", ["one", "two", "both"])
def test_visible_scores_of_minus_infinity_merge_to_the_same_from_both_sides(xp, dtype, where):
    # A q·k that overflowed is visible and −inf: its mean is −inf, however the keys are split.
    scores = np.array([[0.0, 1.0, 2.0, 3.0]])
    if where in ("one", "both"):
        scores[0, 0] = -np.inf
    if where in ("two", "both"):
        scores[0, 3] = -np.inf
    keys = Keys(scores, np.zeros((1, 4)), np.ones((4, VALUE_DIM)))
    early = np.array([[True, True, False, False]])
    a, b = over(xp, dtype, keys, early), over(xp, dtype, keys, ~early)
    with np.errstate(all="ignore"):
        for merged in (merge(xp, a, b), merge(xp, b, a)):
            assert_same(merged, over(xp, dtype, keys, np.ones_like(early)), keys, dtype)
            assert out(merged.mean).tolist() == [-np.inf]


@worlds
def test_finite_scores_at_the_ends_of_the_range_stay_finite(xp, dtype):
    # The shift overflows to −inf while the total it multiplies is not 0; e^shift is 0, and so must the product be.
    top = float(np.finfo(np.float32 if eps(dtype) > 1e-10 else np.float64).max)
    keys = Keys(np.array([[top, -top, -top]]), np.array([[top, -top, -top]]), np.ones((3, VALUE_DIM)))
    parts = frozenset(("weighted", "tilt", "squares", "highest_qk", "first"))
    members = [np.array([[True, False, False]]), np.array([[False, True, True]])]
    a, b = (over(xp, dtype, keys, member, parts) for member in members)
    with np.errstate(all="ignore"):
        for merged in (merge(xp, a, b), merge(xp, b, a)):
            _, read = finish(xp, merged, None)
            assert out(merged.total).tolist() == [1.0]
            assert out(merged.tilt).tolist() == [0.0]
            assert out(read["entropy"]).tolist() == [0.0]
            assert out(read["expected_score"]).tolist() == [top]


@worlds
@pytest.mark.parametrize("size", range(len(GROUPS) + 1))
def test_parts_that_nobody_asked_for_stay_none(xp, dtype, size):
    rng = np.random.default_rng(size)
    keys = Keys(rng.normal(size=(2, 6)), rng.normal(size=(2, 6)), rng.normal(size=(6, VALUE_DIM)))
    early = np.arange(6) < rng.integers(1, 6, size=(2, 1))
    complete = over(xp, dtype, keys, np.ones((2, 6), dtype=bool))
    for chosen in combinations(GROUPS, size):
        wanted = {*ALWAYS, *(part for group in chosen for part in GROUPS[group])}
        nothing = identity(xp, (2,), frozenset(chosen), value_dim=VALUE_DIM, dtype=dtype)
        merged = nothing
        with np.errstate(all="ignore"):
            for member in (early, ~early):
                merged = merge(xp, merged, over(xp, dtype, keys, member, chosen))
        for state in (nothing, merged):
            assert {name for name in PARTS if getattr(state, name) is not None} == wanted
        # And what was asked for does not depend on what was not.
        kept = {name: getattr(complete, name) if name in wanted else None for name in PARTS}
        assert_same(merged, State(**kept), keys, dtype)


@worlds
@pytest.mark.parametrize("rows", [(), (0,), (2, 1, 3), (2, 0)])
def test_rows_have_any_shape(xp, dtype, rows):
    nothing = identity(xp, rows, EVERY, value_dim=VALUE_DIM, dtype=dtype)
    with np.errstate(all="ignore"):
        merged = merge(xp, nothing, nothing)
        output, read = finish(xp, merged, None)
    assert tuple(output.shape) == (*rows, VALUE_DIM)
    assert {tuple(field.shape) for field in read.values()} == {rows}
    assert (out(merged.first) == NO_KEY).all()
    assert out(merged.first).shape == rows


# --- observe --------------------------------------------------------------------------------------------------------


def observed(xp, dtype, keys, member, where=slice(None), parts=EVERY, qk=True):
    """The State over a tile of keys as a backend would see it: hidden scores may be anything."""
    index = np.arange(keys.scores.shape[-1])[where]
    member = member[:, where]
    hidden_nan = [np.where(member, x[:, where], np.nan) for x in (keys.scores, keys.qk)]
    scores, raw = (put(xp, dtype, x) for x in hidden_nan)
    values = put(xp, dtype, keys.values[where])
    visible = None if member.all() else xp.asarray(member)
    weigh = (lambda weights: weights @ values) if "weighted" in parts else None
    with np.errstate(all="ignore"):
        return observe(xp, scores, raw if qk else None, visible, xp.asarray(index), frozenset(parts), weigh)


@worlds
@given(data=keys_and_sets(hidden_too, sets=1, least=1), everyone=st.booleans(), capped=st.booleans())
def test_observe_is_the_definition(xp, dtype, data, everyone, capped):
    keys, (member,) = data
    member = member | everyone
    keys = keys if capped else Keys(keys.scores, keys.scores, keys.values)
    state = observed(xp, dtype, keys, member, qk=capped)
    assert_same(state, over(xp, dtype, keys, member), keys, dtype)


@worlds
@given(data=keys_and_sets(hidden_too, sets=1, least=1), cuts=st.sets(st.integers(1, 6)))
def test_tiles_observed_one_by_one_merge_into_the_whole(xp, dtype, data, cuts):
    keys, (member,) = data
    count = keys.scores.shape[-1]
    edges = [0, *sorted(cut for cut in cuts if cut < count), count]
    state = identity(xp, (len(member),), EVERY, value_dim=VALUE_DIM, dtype=dtype)
    with np.errstate(all="ignore"):
        for start, stop in pairwise(edges):
            state = merge(xp, state, observed(xp, dtype, keys, member, slice(start, stop)))
    assert_same(state, over(xp, dtype, keys, member), keys, dtype)


@worlds
@pytest.mark.parametrize("size", range(len(GROUPS) + 1))
def test_observe_fills_the_parts_asked_for(xp, dtype, size):
    rng = np.random.default_rng(size)
    keys = Keys(rng.normal(size=(2, 6)), rng.normal(size=(2, 6)), rng.normal(size=(6, VALUE_DIM)))
    member = rng.random((2, 6)) < 0.7
    for chosen in combinations(GROUPS, size):
        state = observed(xp, dtype, keys, member, parts=chosen)
        assert_same(state, over(xp, dtype, keys, member, chosen), keys, dtype)


# --- finish ---------------------------------------------------------------------------------------------------------


def by_definition(keys, member, sinks):
    """Every field from the scores themselves, in float64 and without subtracting a maximum."""
    rows = len(member)
    read = {name: np.zeros(rows) for name in ("expected_score", "entropy", "largest_weight", "collision")}
    read |= {name: np.zeros(rows) for name in ("score_mean", "score_std", "first_key_weight", "output_norm")}
    read |= {name: np.full(rows, -np.inf) for name in ("max_logit", "logsumexp", "max_qk")}
    read |= {"visible_keys": member.sum(axis=-1), "sink_mass": np.zeros(rows), "nonfinite": np.zeros(rows)}
    output = np.zeros((rows, VALUE_DIM))
    for i, seen in enumerate(member):
        sink = 0.0 if sinks is None else np.exp(sinks[i])
        if not seen.any():
            read["sink_mass"][i] = float(sink > 0)
            continue
        s = keys.scores[i, seen]
        z = np.exp(s).sum()
        p = np.exp(s) / z
        output[i] = (np.exp(s) / (z + sink)) @ keys.values[seen]
        read["max_logit"][i], read["logsumexp"][i], read["max_qk"][i] = s.max(), np.log(z), keys.qk[i, seen].max()
        read["expected_score"][i], read["entropy"][i] = p @ s, -(p[p > 0] @ np.log(p[p > 0]))
        read["largest_weight"][i], read["collision"][i], read["first_key_weight"][i] = p.max(), p @ p, p[0]
        read["score_mean"][i], read["score_std"][i] = s.mean(), s.std()
        read["sink_mass"][i], read["output_norm"][i] = sink / (z + sink), np.linalg.norm(output[i])
    return output, read


sink_logits = st.one_of(st.none(), st.one_of(st.floats(-40, 40, width=32), st.just(-np.inf)))


@worlds
@given(data=keys_and_sets(st.floats(-30, 30, width=32), sets=2), logit=sink_logits)
def test_finish_is_the_definition(xp, dtype, data, logit):
    keys, members = data
    rows = len(members[0])
    sinks = None if logit is None else np.full(rows, logit)
    with np.errstate(all="ignore"):
        state = merge(xp, *(over(xp, dtype, keys, member) for member in members))
        output, read = finish(xp, state, None if sinks is None else put(xp, dtype, sinks))
    expected_output, expected = by_definition(keys, union(members), sinks)
    assert read.keys() == expected.keys()
    size = np.abs(keys.scores).max(initial=1) + (0 if logit is None or np.isinf(logit) else abs(logit))
    slack = 8 * eps(dtype) * (1 + 2 * size)
    for name, field in read.items():
        whole = name in ("visible_keys", "nonfinite")
        assert str(field.dtype).removeprefix("torch.") == ("int64" if whole else str(state.total.dtype).split(".")[-1])
        scale = size * size if name in ("score_std", "expected_score", "entropy") else 1
        np.testing.assert_allclose(out(field), expected[name], rtol=slack, atol=slack * scale, err_msg=name)
    atol = slack * keys.scores.shape[1] * np.abs(keys.values).max(initial=0)
    np.testing.assert_allclose(out(output), expected_output, rtol=slack, atol=atol)
    assert output.dtype == state.total.dtype


@worlds
@pytest.mark.parametrize("size", range(len(GROUPS) + 1))
def test_finish_gives_the_fields_it_has_parts_for(xp, dtype, size):
    given_by = {
        "weighted": {"output_norm"},
        "tilt": {"expected_score", "entropy"},
        "squares": {"collision"},
        "moments": {"score_mean", "score_std", "nonfinite"},
        "highest_qk": {"max_qk"},
        "first": {"first_key_weight"},
    }
    rng = np.random.default_rng(0)
    keys = Keys(rng.normal(size=(2, 5)), rng.normal(size=(2, 5)), rng.normal(size=(5, VALUE_DIM)))
    everyone = np.ones((2, 5), dtype=bool)
    complete_output, complete = finish(xp, over(xp, dtype, keys, everyone), None)
    for chosen in combinations(GROUPS, size):
        output, read = finish(xp, over(xp, dtype, keys, everyone, chosen), None)
        names = {"visible_keys", "max_logit", "logsumexp", "largest_weight", "sink_mass"}
        assert read.keys() == names.union(*(given_by[group] for group in chosen))
        for name, field in read.items():
            np.testing.assert_array_equal(out(field), out(complete[name]), err_msg=name)
        assert (output is None) == ("weighted" not in chosen)
        if output is not None:
            np.testing.assert_array_equal(out(output), out(complete_output))


@worlds
@pytest.mark.parametrize(
    ("sink", "mass"),
    [(-np.inf, 0.0), (-1e30, 0.0), (np.log(2), 0.5), (np.log(6), 0.75), (1e30, 1.0)],
)
def test_a_sink_takes_its_share_of_the_output_and_of_nothing_else(xp, dtype, sink, mass):
    keys = Keys(np.zeros((1, 2)), np.zeros((1, 2)), np.array([[1.0, 2.0], [3.0, 6.0]]))
    state = over(xp, dtype, keys, np.ones((1, 2), dtype=bool))
    with np.errstate(all="ignore"):
        plain_output, plain = finish(xp, state, None)
        output, read = finish(xp, state, put(xp, dtype, np.array([sink])))
    np.testing.assert_allclose(out(plain_output), [[2, 4]], rtol=4 * eps(dtype))
    np.testing.assert_allclose(out(output), (1 - mass) * out(plain_output), rtol=8 * eps(dtype))
    np.testing.assert_allclose(out(read["sink_mass"]), [mass], rtol=8 * eps(dtype))
    for name in plain.keys() - {"sink_mass", "output_norm"}:
        np.testing.assert_array_equal(out(read[name]), out(plain[name]), err_msg=name)


@worlds
def test_keys_that_are_seen_but_all_score_minus_infinity_are_not_a_row_that_sees_none(xp, dtype):
    keys = Keys(np.full((1, 2), -np.inf), np.zeros((1, 2)), np.ones((2, VALUE_DIM)))
    with np.errstate(all="ignore"):
        output, read = finish(xp, over(xp, dtype, keys, np.ones((1, 2), dtype=bool)), None)
    assert np.isnan(out(output)).all()
    assert out(read["nonfinite"]).tolist() == [1]
    assert out(read["max_logit"]).tolist() == [-np.inf]
    for name in ("entropy", "largest_weight", "collision", "logsumexp"):
        assert np.isnan(out(read[name])).all(), name


@worlds
@pytest.mark.parametrize("tile", [1, 37, 512])
@pytest.mark.parametrize("tree", [False, True])
def test_a_mean_far_from_zero_costs_the_spread_no_digits(xp, dtype, tile, tree):
    # At mean 1e3 and spread 1, E[s²] − E[s]² in float32 has no correct digit left but the first.
    number = np.float32 if eps(dtype) > 1e-10 else np.float64
    scores = np.random.default_rng(0).normal(1e3, 1, size=(1, 1024)).astype(number)
    states = []
    for start in range(0, 1024, tile):
        s = xp.asarray(scores[:, start : start + tile])
        m = xp.amax(s, -1)
        mean = s.mean(-1)
        spread = ((s - mean[..., None]) ** 2).sum(-1)
        count = xp.full((1,), s.shape[-1], dtype=dtype)
        total = xp.exp(s - m[..., None]).sum(-1)
        states.append(State(maximum=m, total=total, count=count, mean=mean, spread=spread))
    while len(states) > 1:
        pairs = [states[i : i + 2] for i in range(0, len(states), 2)] if tree else [states[:2]]
        rest = [] if tree else states[2:]
        states = [merge(xp, *pair) if len(pair) == 2 else pair[0] for pair in pairs] + rest
    _, read = finish(xp, states[0], None)
    expected = scores.astype(np.float64).std()
    assert abs(out(read["score_std"])[0] / expected - 1) < (1e-4 if number is np.float32 else 1e-12)
    assert abs(out(read["score_mean"])[0] / scores.astype(np.float64).mean() - 1) < 1e3 * eps(dtype)
