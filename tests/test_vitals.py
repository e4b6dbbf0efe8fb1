"""Vitals are means, maxima and counts over rows, and merging them is taking them over all rows at once."""

import json
from dataclasses import fields
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attemper import OptionError, Reading, ShapeError, Site, Vitals, attend
from attemper._reading import AFTER_BACKWARD, FIELDS, MEASURED
from attemper._vitals import field_table

MERGES = {name: merge for name, _, merge in field_table()}
MEANS = tuple(name for name, merge in MERGES.items() if merge == "mean over rows")
TOTALS = ("total_pressure", "total_pressure_spread")  # of all heads together: (1,), not (heads,)
SPREADS = ("pressure_spread", "total_pressure_spread")
HEADS = 3
SITE = Site(path="layers.0.attn", heads=HEADS, head_dim=4)


def readings(seed, batch=(5,), queries=6, backward=True):
    """A Reading of whatever numbers: rows that see none, one and several keys, some of them not finite."""
    rng = np.random.default_rng(seed)
    shape = (*batch, HEADS, queries)
    visible = rng.choice([0, 1, 2, 5, 9], size=shape, p=[0.1, 0.2, 0.2, 0.2, 0.3])
    values = {name: rng.normal(1, 2, shape) for name in MEASURED}
    values |= {"visible_keys": visible, "nonfinite": (rng.random(shape) < 0.2).astype(np.int64)}
    values["collision"] = np.where(visible == 0, 0, rng.uniform(0.1, 1, shape))
    values["entropy"] = rng.uniform(0, 1, shape) * np.log(np.maximum(visible, 1))
    for name in ("max_logit", "logsumexp", "max_qk"):
        values[name] = np.where(visible == 0, -np.inf, values[name])
    for name in ("logsumexp", "score_std", "output_norm", "entropy", "gradient_flow"):
        values[name] = np.where(rng.random(shape) < 0.15, rng.choice([np.nan, np.inf], shape), values[name])
    if not backward:
        values |= dict.fromkeys(AFTER_BACKWARD)
    return Reading(backend="numpy", **values)


def part(reading, index):
    """The Reading of some of the rows."""
    taken = {name: getattr(reading, name) for name in MEASURED}
    return Reading(backend="numpy", **{name: None if x is None else x[index] for name, x in taken.items()})


def same(one, two, but=(), rtol=1e-12):
    assert one.site == two.site
    if "calls" not in but:
        assert one.calls == two.calls
    assert one.weights.keys() == two.weights.keys()
    for name in one.weights:
        if name not in but:
            np.testing.assert_array_equal(one.weights[name], two.weights[name], err_msg=f"weight of {name}")
    for name, merge in MERGES.items():
        if name in but:
            continue
        here, there = getattr(one, name), getattr(two, name)
        assert here.shape == there.shape == (1 if name in TOTALS else one.site.heads,), name
        if merge in ("sum", "max", "min"):
            np.testing.assert_array_equal(here, there, err_msg=name)
        else:
            np.testing.assert_allclose(here, there, rtol=rtol, atol=rtol, err_msg=name)


# --- one Reading ----------------------------------------------------------------------------------------------------


def by_rows(reading, rows=None, padding_weight=None):
    """Every field of the Vitals, head by head and row by row."""
    visible = np.asarray(reading.visible_keys)
    taken = np.ones((*visible.shape[:-2], visible.shape[-1]), dtype=bool) if rows is None else rows
    expected = {name: np.full(1 if name in TOTALS else HEADS, np.nan) for name in MERGES}
    weights = {name: np.zeros(HEADS, dtype=int) for name in (*MEANS, "pressure")}
    weights["total_pressure"] = np.zeros(1, dtype=int)
    for h in range(HEADS):
        rows = visible[..., h, :][taken]

        def column(name, h=h):
            source = padding_weight if name == "padding_weight" else getattr(reading, name)
            return np.full(taken.sum(), np.nan) if source is None else np.asarray(source)[..., h, :][taken]

        expected["rows"][h] = len(rows)
        expected["rows_without_keys"][h] = sum(n == 0 for n in rows)
        expected["rows_with_one_key"][h] = sum(n == 1 for n in rows)
        expected["nonfinite"][h] = sum(column("nonfinite"))
        expected["max_logit"][h] = max((x for x in column("max_logit") if x == x), default=-np.inf)
        expected["max_qk"][h] = max((x for x in column("max_qk") if x == x), default=-np.inf)
        least = [x for x in column("normalized_entropy") if x == x]
        expected["least_normalized_entropy"][h] = min(least, default=np.inf)
        for name in MEANS:
            counted = [x for x, n in zip(column(name), rows, strict=True) if n >= 2 and np.isfinite(x)]
            weights[name][h] = len(counted)
            if counted:
                expected[name][h] = sum(counted) / len(counted)
    # By sequence; one of which no row is taken is none.
    flat, whole = np.asarray(reading.pressure).reshape(-1, HEADS, taken.shape[-1]), taken.reshape(-1, taken.shape[-1])
    sums = np.array([one[:, here].sum(axis=-1) for one, here in zip(flat, whole, strict=True) if here.any()])
    sums = sums.reshape(-1, HEADS)
    for name, each in (("pressure", sums), ("total_pressure", sums.sum(axis=-1, keepdims=True))):
        weights[name][:] = len(each)
        expected[f"{name}_spread"][:] = 0
        if len(each):
            expected[name] = each.mean(axis=0)
            expected[f"{name}_spread"] = ((each - each.mean(axis=0)) ** 2).sum(axis=0)
    return expected, weights


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.sampled_from([(), (1,), (5,), (2, 3)]),
    share=st.sampled_from([None, 0.0, 0.2, 0.8, 1.0]),
    padded=st.booleans(),
)
def test_of_a_reading_is_its_definition(seed, batch, share, padded):
    reading = readings(seed, batch)
    rng = np.random.default_rng(seed)
    rows = None if share is None else rng.random((*batch, 6)) < share
    padding = rng.uniform(0, 1, (*batch, HEADS, 6)) if padded else None
    vitals = Vitals.of(reading, SITE, rows=rows, padding_weight=padding)
    expected, weights = by_rows(reading, rows, padding)
    assert vitals.calls == 1
    assert vitals.site is SITE
    assert set(vitals.weights) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(vitals.weights[name], values, err_msg=name)
    for name, values in expected.items():
        assert getattr(vitals, name).shape == values.shape, name
        np.testing.assert_allclose(getattr(vitals, name), values, rtol=1e-12, atol=1e-12, err_msg=name)


@given(seed=st.integers(0, 2**32 - 1), label=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_rows_left_out_are_as_rows_that_never_were(seed, label):
    reading = readings(seed)
    padding = np.random.default_rng(seed).uniform(0, 1, reading.shape)
    taken = np.array(label) > 0
    some = Vitals.of(reading, SITE, rows=np.broadcast_to(taken, (5, 6)), padding_weight=padding)
    same(some, Vitals.of(part(reading, (..., taken)), SITE, padding_weight=padding[..., taken]))
    # Rows differ from sequence to sequence too, and the parts of any partition merge into the whole.
    label = np.random.default_rng(seed).integers(0, 3, (5, 6))
    sets = (Vitals.of(reading, SITE, rows=label == i, padding_weight=padding) for i in range(3))
    whole = Vitals.of(reading, SITE, padding_weight=padding)
    same(reduce(Vitals.merge, sets), whole, but=("calls", "pressure", *TOTALS, *SPREADS))
    same(Vitals.of(reading, SITE, rows=np.ones((5, 6), dtype=bool), padding_weight=padding), whole)


def test_what_a_row_of_padding_holds_reaches_nothing():
    reading = readings(0)
    taken = np.ones((5, 6), dtype=bool)
    taken[:, 4:] = False
    taken[3] = False
    clean = Vitals.of(reading, SITE, rows=taken)
    for name in MEASURED:
        field = getattr(reading, name)
        field[~np.broadcast_to(taken[:, None], field.shape)] = 99 if field.dtype.kind == "i" else np.inf
    same(Vitals.of(reading, SITE, rows=taken), clean)
    assert clean.rows.tolist() == [16] * HEADS
    # The sequence without a row is no sequence.
    assert clean.weights["pressure"].tolist() == [4] * HEADS
    assert clean.weights["total_pressure"].tolist() == [4]


def test_the_weight_on_padding_is_a_mean_over_rows_with_a_choice():
    visible = np.array([[[1, 2, 8, 8, 0]], [[3, 3, 3, 3, 3]]])
    weight = np.array([[[9, 0.25, 0.5, np.nan, 9]], [[0.0, 0, 0, 0, 1]]])
    reading = Reading(backend="numpy", visible_keys=visible)
    vitals = Vitals.of(reading, padding_weight=weight)
    assert vitals.weights["padding_weight"].tolist() == [7]
    np.testing.assert_allclose(vitals.padding_weight, 1.75 / 7)
    rows = np.array([[True, True, False, True, True], [False, False, False, True, True]])
    for some in (rows, torch.from_numpy(rows)):
        vitals = Vitals.of(reading, rows=some, padding_weight=weight)
        assert vitals.weights["padding_weight"].tolist() == [3]
        np.testing.assert_allclose(vitals.padding_weight, 1.25 / 3)
    unread = Vitals.of(reading)
    assert np.isnan(unread.padding_weight).all()
    assert unread.weights["padding_weight"].tolist() == [0]


@pytest.mark.parametrize("shape", [(6,), (5, HEADS, 6), (6, 5), (5, 1)])
def test_rows_are_one_bool_per_sequence_and_query(shape):
    with pytest.raises(ShapeError, match=r"rows are \(5, 6\)"):
        Vitals.of(readings(0), SITE, rows=np.ones(shape, dtype=bool))
    with pytest.raises(ShapeError, match=r"rows are \(\)"):
        Vitals.of(Reading(backend="numpy"), SITE, rows=np.ones(shape, dtype=bool))
    if shape != (5, HEADS, 6):
        with pytest.raises(ShapeError, match="padding_weight"):
            Vitals.of(readings(0), SITE, padding_weight=np.ones(shape))


@pytest.mark.parametrize("queries", [(), (HEADS,)])
def test_rows_of_a_reading_without_a_batch(queries):
    shape = (*queries, 6)
    reading = Reading(backend="numpy", visible_keys=np.full(shape, 4), entropy=np.broadcast_to(np.arange(6.0), shape))
    vitals = Vitals.of(reading, rows=np.arange(6) < 3)
    assert set(vitals.entropy) == {1.0}
    assert set(vitals.rows) == {3}


def test_of_an_attended_reading_leaves_out_rows_without_a_choice():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, HEADS, 6, 4))
    reading = attend(q, k, v, is_causal=True, query_offset=-1).reading
    vitals = Vitals.of(reading)
    assert vitals.site == Site(heads=HEADS)
    np.testing.assert_array_equal(vitals.rows, 12)
    np.testing.assert_array_equal(vitals.rows_without_keys, 2)
    np.testing.assert_array_equal(vitals.rows_with_one_key, 2)
    np.testing.assert_allclose(vitals.entropy, reading.entropy[..., 2:].mean(axis=(0, 2)), rtol=1e-14)
    np.testing.assert_allclose(vitals.visible_keys, 3.5)
    # Means are of rows with a choice; extremes are of all rows.
    np.testing.assert_array_equal(vitals.max_logit, reading.max_logit.max(axis=(0, 2)))
    least = np.nanmin(reading.normalized_entropy, axis=(0, 2))
    np.testing.assert_array_equal(vitals.least_normalized_entropy, least)
    for name in (*AFTER_BACKWARD, "total_pressure", "padding_weight"):
        assert np.isnan(getattr(vitals, name)).all()
        np.testing.assert_array_equal(vitals.weights[name], 0)
    for name in ("pressure", "total_pressure"):
        assert np.isnan(getattr(vitals, f"{name}_error")).all()
        np.testing.assert_array_equal(getattr(vitals, f"{name}_spread"), 0)


def test_a_field_that_was_not_read_is_unknown_and_weighs_nothing():
    q, k, v = np.random.default_rng(0).standard_normal((3, HEADS, 6, 4))
    vitals = Vitals.of(attend(q, k, v, stats=("entropy", "visible_keys")).reading)
    for name, merge in MERGES.items():
        known = name in ("entropy", "normalized_entropy", "least_normalized_entropy", "visible_keys")
        known |= name.startswith("rows")
        values = getattr(vitals, name)
        if known:
            assert np.isfinite(values).all(), name
        elif merge in ("sum", "pairwise"):
            np.testing.assert_array_equal(values, 0, err_msg=name)
        else:
            unknown = {"max": -np.inf, "min": np.inf}.get(merge, np.nan)
            np.testing.assert_array_equal(values, np.full(1 if name in TOTALS else HEADS, unknown), err_msg=name)
        if name in vitals.weights:
            np.testing.assert_array_equal(vitals.weights[name], 6 if known else 0, err_msg=name)
    # Nothing at all was measured: the Site alone says how many heads there are.
    nothing = Vitals.of(Reading(backend="numpy"), SITE)
    assert nothing.rows.tolist() == [0] * HEADS
    same(nothing.merge(vitals_with(SITE)), vitals_with(SITE), but=("calls",))


def vitals_with(site, seed=0, **how):
    return Vitals.of(readings(seed, **how), site)


def test_rows_cannot_be_weighed_without_visible_keys():
    q, k, v = np.random.default_rng(0).standard_normal((3, HEADS, 6, 4))
    with pytest.raises(OptionError, match="visible_keys"):
        Vitals.of(attend(q, k, v, stats=("entropy",)).reading)
    with pytest.raises(ShapeError, match="3 heads"):
        Vitals.of(attend(q, k, v).reading, Site(heads=2))


@pytest.mark.parametrize("shape", [(0, HEADS, 6, 4), (2, HEADS, 0, 4)])
def test_no_rows_are_no_rows(shape):
    empty = Vitals.of(attend(*np.zeros((3, *shape))).reading, SITE)
    assert empty.rows.tolist() == [0] * HEADS
    whole = vitals_with(SITE, backward=False)
    same(whole.merge(empty), whole, but=("calls",))


def test_one_head_needs_no_axis_for_it():
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    flat, deep = Vitals.of(attend(q, k, v).reading), Vitals.of(attend(q[None], k[None], v[None]).reading)
    assert flat.site.heads == 1
    same(flat, deep)
    assert flat.entropy[0] > 0.1


def test_what_is_not_finite_is_left_out_of_means_and_counted():
    visible = np.full((1, 1, 4), 8)
    entropy = np.array([[[1.0, np.nan, 2.0, np.inf]]])
    logits = np.array([[[1.0, np.nan, 3.0, 2.0]]])
    nonfinite = np.array([[[0, 1, 0, 1]]])
    vitals = Vitals.of(
        Reading(backend="numpy", visible_keys=visible, entropy=entropy, max_logit=logits, nonfinite=nonfinite)
    )
    assert vitals.entropy.tolist() == [1.5]
    assert vitals.weights["entropy"].tolist() == [2]
    assert vitals.max_logit.tolist() == [3]
    assert vitals.nonfinite.tolist() == [2]
    assert vitals.rows.tolist() == [4]


# --- pressure -------------------------------------------------------------------------------------------------------


def pressed(pressure):
    return Reading(backend="numpy", visible_keys=np.full(pressure.shape, 4), pressure=pressure)


@given(seed=st.integers(0, 2**32 - 1), sequences=st.integers(2, 9), cut=st.integers(0, 9))
def test_pressure_is_a_mean_over_sequences_with_its_standard_error(seed, sequences, cut):
    pressure = np.random.default_rng(seed).normal(3, 1, (sequences, HEADS, 5))
    # All rows of a sequence add up, also those without a choice: theirs is 0 anyway.
    sums = pressure.sum(axis=-1)
    whole = Vitals.of(pressed(pressure))
    halves = Vitals.of(pressed(pressure[:cut])).merge(Vitals.of(pressed(pressure[cut:])))
    for vitals in (whole, halves):
        np.testing.assert_allclose(vitals.pressure, sums.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(vitals.pressure_error, sums.std(axis=0, ddof=1) / sequences**0.5, rtol=1e-11)
        np.testing.assert_array_equal(vitals.weights["pressure"], sequences)
        # All heads at once, sequence by sequence: their errors do not simply add.
        together = sums.sum(axis=1)
        assert vitals.total_pressure.shape == vitals.total_pressure_error.shape == (1,)
        np.testing.assert_allclose(vitals.total_pressure, together.mean(), rtol=1e-12)
        np.testing.assert_allclose(vitals.total_pressure_error, together.std(ddof=1) / sequences**0.5, rtol=1e-11)
        np.testing.assert_allclose(vitals.total_pressure, vitals.pressure.sum(), rtol=1e-12)
        assert vitals.weights["total_pressure"].tolist() == [sequences]
    one = Vitals.of(pressed(pressure[:1]))
    assert np.isnan(one.pressure_error).all()
    assert np.isnan(one.total_pressure_error).all()


def test_heads_that_pull_against_each_other_have_a_sure_total():
    pressure = np.random.default_rng(0).normal(0, 1, (8, 2, 5))
    pressure[:, 1] = 1 - pressure[:, 0]
    vitals = Vitals.of(pressed(pressure))
    np.testing.assert_allclose(vitals.total_pressure, 5, rtol=1e-12)
    assert vitals.total_pressure_error.item() < 1e-12 < vitals.pressure_error.min()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_sequence_whose_pressure_is_not_finite_is_left_out(poison):
    pressure = np.random.default_rng(0).normal(3, 1, (6, HEADS, 5))
    clean = Vitals.of(pressed(pressure))
    pressure[2, 1, 3] = poison
    vitals = Vitals.of(pressed(pressure))
    left = np.delete(pressure, 2, axis=0).sum(axis=-1)
    assert vitals.weights["pressure"].tolist() == [6, 5, 6]
    np.testing.assert_allclose(vitals.pressure[1], left[:, 1].mean(), rtol=1e-12)
    np.testing.assert_allclose(vitals.pressure_error[1], left[:, 1].std(ddof=1) / 5**0.5, rtol=1e-12)
    np.testing.assert_array_equal(vitals.pressure[[0, 2]], clean.pressure[[0, 2]])
    # The total of that sequence is unknown when one head's is.
    assert vitals.weights["total_pressure"].tolist() == [5]
    np.testing.assert_allclose(vitals.total_pressure, left.sum(axis=1).mean(), rtol=1e-12)
    np.testing.assert_allclose(vitals.total_pressure_error, left.sum(axis=1).std(ddof=1) / 5**0.5, rtol=1e-12)


# --- merging --------------------------------------------------------------------------------------------------------


@given(seeds=st.tuples(*[st.integers(0, 2**32 - 1)] * 3), backward=st.tuples(*[st.booleans()] * 3))
def test_merge_is_associative_and_commutative(seeds, backward):
    a, b, c = (vitals_with(SITE, seed, backward=one) for seed, one in zip(seeds, backward, strict=True))
    same(a.merge(b).merge(c), a.merge(b.merge(c)))
    same(a.merge(b), b.merge(a))
    assert a.merge(b).merge(c).calls == 3


@given(seed=st.integers(0, 2**32 - 1), label=st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_any_partition_of_the_batch_merges_into_the_whole(seed, label):
    reading = readings(seed, batch=(7,))
    sets = [np.flatnonzero(np.array(label) == i) for i in range(4)]
    merged = reduce(Vitals.merge, (Vitals.of(part(reading, index), SITE) for index in sets))
    same(merged, Vitals.of(reading, SITE), but=("calls",))
    assert merged.calls == 4


@given(seed=st.integers(0, 2**32 - 1), label=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_any_partition_of_the_rows_merges_into_the_whole(seed, label):
    reading = readings(seed)
    sets = [np.flatnonzero(np.array(label) == i) for i in range(3)]
    merged = reduce(Vitals.merge, (Vitals.of(part(reading, (..., index)), SITE) for index in sets))
    # A sequence's pressure is the sum over its rows, so sequences must stay whole.
    same(merged, Vitals.of(reading, SITE), but=("calls", "pressure", *TOTALS, *SPREADS))


def test_batches_of_attend_merge_into_the_whole():
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, HEADS, 6, 4))
    whole = Vitals.of(attend(q, k, v, is_causal=True).reading, SITE)
    pieces = [Vitals.of(attend(*(x[i : i + 1] for x in (q, k, v)), is_causal=True).reading, SITE) for i in range(4)]
    same(reduce(Vitals.merge, pieces), whole, but=("calls",))
    assert (whole.entropy > 0.1).all()


def test_merging_leaves_both_as_they_were():
    a, b = vitals_with(SITE, 1), vitals_with(SITE, 2)
    before = json.dumps([a.to_dict(), b.to_dict()])
    a.merge(b)
    assert json.dumps([a.to_dict(), b.to_dict()]) == before


@pytest.mark.parametrize("other", [Site(path="layers.1.attn", heads=HEADS), Site(path="layers.0.attn", heads=2)])
def test_vitals_of_two_sites_do_not_merge(other):
    with pytest.raises(ShapeError, match=r"layers\.0\.attn"):
        vitals_with(SITE).merge(Vitals.of(Reading(backend="numpy"), other))


# --- files, loggers, frameworks -------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), backward=st.booleans())
def test_vitals_go_into_json_and_back(seed, backward):
    vitals = vitals_with(SITE, seed, backward=backward)
    text = json.dumps(vitals.to_dict(), allow_nan=False)
    record = json.loads(text)
    assert record["schema"] == "attemper.vitals/1"
    back = Vitals.from_dict(record)
    same(back, vitals, rtol=0)
    for name in MERGES:
        assert getattr(back, name).dtype == getattr(vitals, name).dtype, name
    assert json.dumps(back.to_dict(), allow_nan=False) == text
    same(back.merge(vitals), vitals.merge(vitals), rtol=0)


def test_nan_and_infinities_survive_json():
    nothing = Vitals.of(Reading(backend="numpy"), SITE)
    record = json.loads(json.dumps(nothing.to_dict(), allow_nan=False))
    assert record["entropy"] == [None] * HEADS
    assert record["max_logit"] == ["-inf"] * HEADS
    assert record["least_normalized_entropy"] == ["inf"] * HEADS
    same(Vitals.from_dict(record), nothing, rtol=0)
    assert np.isneginf(Vitals.from_dict(record).max_logit).all()


@pytest.mark.parametrize("schema", [None, "attemper.vitals/2", "attemper.reading/1"])
def test_a_record_of_another_schema_is_refused(schema):
    record = vitals_with(SITE).to_dict() | {"schema": schema}
    with pytest.raises(OptionError, match=r"attemper\.vitals/1"):
        Vitals.from_dict(record)


@pytest.mark.parametrize(
    "site",
    [
        Site(heads=1),
        SITE,
        Site(
            path="a.b",
            heads=8,
            kv_heads=2,
            head_dim=64,
            model_dim=512,
            scale_argument=0.125,
            effective_scale=(0.1, 0.2),
            declared_scale=0.125,
            declared_by="attention_multiplier",
            projection_factor=2.0,
            projected_head_dim=48,
            qk_norm=True,
            product_scale=(1.0, 0.5),
            softcap=50.0,
            dtype="bfloat16",
            mask="bias",
            causal=True,
            training=False,
            kind="sdpa",
        ),
        Site(heads=2, scale_argument=(0.1, 0.2), declared_scale=(0.1, 0.3), product_scale=1.0),
    ],
)
def test_a_site_goes_into_json_and_back(site):
    record = json.loads(json.dumps(site.to_dict(), allow_nan=False))
    assert set(record) == {f.name for f in fields(Site)}
    assert Site.from_dict(record) == site
    # What a later version may add is not in the way.
    assert Site.from_dict(record | {"added": 1}) == site


def test_scalars_have_the_path_and_the_field_for_a_name():
    reading = readings(3)
    vitals = Vitals.of(reading, SITE, padding_weight=reading.largest_weight)
    scalars = vitals.to_scalars()
    # A head may have a max_logit of NaN rows only; here every field is known in every head. The total of the pressures
    # goes by the name of pressure.
    logged = [name for name in MERGES if name not in (*TOTALS, *SPREADS)]
    assert set(scalars) == {f"layers.0.attn/{name}" for name in logged}
    assert scalars["layers.0.attn/pressure"] == pytest.approx(vitals.total_pressure.item(), rel=1e-13)
    assert all(isinstance(value, float) for value in scalars.values())
    for name, merge in MERGES.items():
        values = getattr(vitals, name)
        if name not in logged:
            continue
        if merge == "sum" or name == "pressure":
            # One factor scales all heads at once, so pressures add.
            expected = values.sum()
        elif merge == "max":
            expected = values.max()
        elif merge == "min":
            expected = values.min()
        else:
            expected = (values * vitals.weights[name]).sum() / vitals.weights[name].sum()
        assert scalars[f"layers.0.attn/{name}"] == pytest.approx(expected, rel=1e-13), name
    with_heads = vitals.to_scalars(per_head=True)
    assert scalars.items() <= with_heads.items()
    for name in logged:
        for head, value in enumerate(getattr(vitals, name)):
            assert with_heads[f"layers.0.attn/head_{head}/{name}"] == value
    assert len(with_heads) == (1 + HEADS) * len(scalars)


def test_scalars_leave_out_what_was_not_measured():
    q, k, v = np.random.default_rng(0).standard_normal((3, HEADS, 6, 4))
    vitals = Vitals.of(attend(q, k, v).reading)
    scalars = vitals.to_scalars(per_head=True)
    assert all(np.isfinite(value) for value in scalars.values())
    assert "entropy" in scalars
    assert "head_2/entropy" in scalars
    assert not any("pressure" in name or "gradient_flow" in name for name in scalars)
    # A head without a number does not spoil the others.
    reading = readings(0)
    reading.entropy[:, 1] = np.nan
    partial = Vitals.of(reading).to_scalars(per_head=True)
    assert "head_0/entropy" in partial
    assert "head_1/entropy" not in partial
    assert np.isfinite(partial["entropy"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_give_the_vitals_of_arrays(dtype):
    source = readings(5)
    numbers = {name: getattr(source, name) for name in MEASURED}
    tensors = {
        name: torch.from_numpy(np.asarray(x)).to(torch.int64 if x.dtype.kind == "i" else dtype)
        for name, x in numbers.items()
    }
    tensors["entropy"].requires_grad_()
    arrays = {
        name: x.detach().to(torch.float64 if x.is_floating_point() else x.dtype).numpy() for name, x in tensors.items()
    }
    ours = Vitals.of(Reading(backend="numpy", **tensors), SITE)
    theirs = Vitals.of(Reading(backend="numpy", **arrays), SITE)
    # The derived fields are worked out in the tensor's own dtype.
    exact = dtype == torch.float64
    derived = () if exact else ("normalized_entropy", "least_normalized_entropy", "effective_keys", "flow")
    same(ours, theirs, but=derived)
    rtol = 4 * torch.finfo(dtype).eps
    for name in derived:
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=rtol, err_msg=name)
    assert all(isinstance(getattr(ours, name), np.ndarray) for name in MERGES)


# --- the table of fields --------------------------------------------------------------------------------------------


def test_the_table_says_how_every_field_merges():
    declared = [f.name for f in fields(Vitals) if f.name not in ("site", "calls", "weights")]
    table = field_table()
    assert [name for name, _, _ in table] == declared
    assert {merge for _, _, merge in table} == {
        *("sum", "max", "min", "mean over rows", "mean over sequences", "pairwise"),
    }
    assert all(meaning for _, meaning, _ in table)
    # Every field of a Reading is summed up under its own name.
    assert set(FIELDS) <= set(declared)
    vitals = vitals_with(SITE)
    assert all(getattr(vitals, name).shape == (1 if name in TOTALS else HEADS,) for name in declared)
    assert set(vitals.weights) == {name for name, _, merge in table if merge.startswith("mean")}


def test_vitals_show_the_site_and_a_line_a_field():
    reading = readings(0)
    lines = repr(Vitals.of(reading, SITE, padding_weight=reading.largest_weight)).splitlines()
    assert lines[0] == "Vitals(layers.0.attn; heads 3, calls 1, rows 90)"
    assert [line.split()[0] for line in lines[1:]] == [name for name in MERGES if name not in SPREADS]
    assert not any("padding_weight" in line for line in repr(Vitals.of(reading, SITE)).splitlines())
    bare = repr(Vitals.of(Reading(backend="numpy"), Site(heads=2))).splitlines()
    assert bare[0] == "Vitals(no path; heads 2, calls 1, rows 0)"
    assert not any("entropy" in line for line in bare)


def test_a_site_is_taken_to_be_plain():
    site = Site(heads=2)
    assert not site.causal
    assert not site.qk_norm
    assert {name for name, value in site.to_dict().items() if value is not None} == {
        "path",
        "heads",
        "causal",
        "qk_norm",
    }
