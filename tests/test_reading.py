"""Every field of a Reading against its definition, written out here in plain Python floats."""

import copy
import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest

from attemper import Reading, attend, read
from attemper._reading import AFTER_BACKWARD, FIELDS, MEASURED, from_plain, reading_of

FORWARD = tuple(name for name in FIELDS if name not in AFTER_BACKWARD)
WHOLE = ("visible_keys", "nonfinite")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
TILED = ("numpy", "cpu")
tiles, backends = (pytest.mark.parametrize("backend", names) for names in (TILED, (*TILED, "reference")))
HEADS, QUERIES, KEYS, DIM = 2, 5, 9, 8


def wide(dtype):
    return np.float64 if dtype == np.float64 else np.float32


# --- the definition -------------------------------------------------------------------------------------------------


def explicit(q, k, v, *, eps, tiny, seen=None, bias=None, scale=None, softcap=None, sinks=None):
    """Every field and the output of (heads, length, dim) operands, each with the error it may have.

    An error δ in the scores, from a few roundings of numbers as large as Σ|q·k|, moves E_p[s] by δ(1 + A) and the
    entropy by δA, where A = Σ p|s − E|, and every weight by 2δ of itself.
    """
    q, k, v = (np.asarray(x, dtype=np.float64).tolist() for x in (q, k, v))
    heads, queries, keys = len(q), len(q[0]), len(k[0])
    value_dim = len(v[0][0])
    fields = {name: np.zeros((heads, queries, 2)) for name in FORWARD}
    output = np.zeros((heads, queries, value_dim, 2))
    for h in range(heads):
        factor = len(q[0][0]) ** -0.5 if scale is None else float(scale[h])
        for i in range(queries):
            scores, qks, sizes, values = [], [], [], []
            for j in range(keys):
                shift = 0.0 if bias is None else float(bias[h, i, j])
                if shift == -math.inf or (seen is not None and not seen[h, i, j]):
                    continue
                products = [a * b for a, b in zip(q[h][i], k[h][j], strict=True)]
                qk = factor * math.fsum(products)
                capped = qk if softcap is None else softcap * math.tanh(qk / softcap)
                scores.append(capped + shift)
                qks.append(qk)
                sizes.append(abs(factor) * sum(map(abs, products)) + abs(shift))
                values.append(v[h][j])
            n = len(scores)
            row = dict.fromkeys(FORWARD, (0.0, 0.0))
            if n == 0:
                row |= dict.fromkeys(("max_logit", "logsumexp", "max_qk"), (-math.inf, 0.0))
                row["normalized_entropy"] = (math.nan, 0.0)
                row["sink_mass"] = (0.0 if sinks is None or sinks[h] == -math.inf else 1.0, 0.0)
            else:
                top, size = max(scores), max(sizes)
                delta = 6 * eps * size + 64 * eps * tiny
                z = math.fsum(math.exp(s - top) for s in scores)
                lse = top + math.log(z)
                p = [math.exp(s - top) / z for s in scores]
                mean = math.fsum(scores) / n
                std = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / n)
                expected = math.fsum(a * s for a, s in zip(p, scores, strict=True))
                entropy = math.fsum(-a * math.log(a) for a in p if a > 0)
                collision = math.fsum(a * a for a in p)
                around = math.fsum(a * abs(s - expected) for a, s in zip(p, scores, strict=True))
                weight_error = 2 * delta + 16 * eps
                entropy_error = delta * around + 16 * eps * (1 + entropy)
                mass = 0.0
                if sinks is not None and sinks[h] != -math.inf:
                    mass = 1 / (1 + math.exp(lse - float(sinks[h])))
                mass_error = mass * (1 - mass) * (weight_error + 8 * eps * (abs(lse) + size)) + 4 * eps * mass
                row["visible_keys"] = (n, 0.0)
                row["max_logit"] = (top, delta)
                row["max_qk"] = (max(qks), delta)
                row["logsumexp"] = (lse, delta + 4 * eps * (abs(lse) + math.log(z)))
                row["expected_score"] = (expected, delta * (1 + around) + 8 * eps * (abs(top) + around))
                row["entropy"] = (entropy, entropy_error)
                log_n = math.log(n)
                row["normalized_entropy"] = (entropy / log_n, 2 * entropy_error / log_n) if n > 1 else (math.nan, 0.0)
                row["largest_weight"] = (max(p), max(p) * weight_error)
                row["first_key_weight"] = (p[0], p[0] * weight_error + tiny)
                row["collision"] = (collision, 2 * collision * weight_error)
                row["effective_keys"] = (1 / collision, 2 * weight_error / collision)
                row["flow"] = (1 - collision, 2 * collision * weight_error + eps)
                row["score_mean"] = (mean, delta)
                # Deviations this small square to nothing; next to exp(s) they are nothing too.
                row["score_std"] = (std, delta + 16 * eps * std + math.sqrt(tiny))
                row["sink_mass"] = (mass, mass_error + tiny)
                norm_error = 0.0
                for d in range(value_dim):
                    terms = [a * (1 - mass) * x[d] for a, x in zip(p, values, strict=True)]
                    error = weight_error * (1 + mass) * sum(map(abs, terms)) + mass_error * max(
                        abs(x[d]) for x in values
                    )
                    output[h, i, d] = math.fsum(terms), error + 64 * eps * tiny
                    norm_error += error
                row["output_norm"] = (math.hypot(*output[h, i, :, 0]), norm_error + 64 * eps * tiny)
            for name, pair in row.items():
                fields[name][h, i] = pair
    return output, fields


def within(actual, expected, what):
    """The expected value comes with its error; NaN and infinities must match."""
    value, error = expected[..., 0], expected[..., 1]
    actual = actual.astype(np.float64)
    odd = ~np.isfinite(value)
    np.testing.assert_array_equal(actual[odd], value[odd], err_msg=what)
    off = np.abs(actual[~odd] - value[~odd])
    # Not `off > error`: a NaN must count as wrong.
    bad = ~(off <= error[~odd])
    assert not bad.any(), f"{what}: off by {off[bad]}, may be {error[~odd][bad]}, at {value[~odd][bad]}"


def check(q, k, v, options, backend="numpy", **plain):
    """attend(**options) against the definition given `plain`; returns what attend did."""
    dtype = q.dtype
    info = np.finfo(wide(dtype))
    # The reference works out p ln p from s − logsumexp, which rounds at the size of the scores.
    eps = float(info.eps) * (4 if backend == "reference" else 1)
    in_pairs = backend == "cpu" and dtype == ml_dtypes.bfloat16
    # Where the processor multiplies pairs of bfloat16, it takes what is less than normal for 0.
    tiny = float(info.tiny) / (eps if in_pairs else 1)
    expected_output, expected = explicit(q, k, v, eps=eps, tiny=tiny, **plain)
    output, reading = attend(q, k, v, **options, backend=backend)
    assert reading.backend == backend
    assert output.dtype == dtype
    if dtype != wide(dtype):
        own = ml_dtypes.finfo(dtype)
        rounding = float(own.eps) * np.abs(expected_output[..., 0]) + float(own.smallest_subnormal)
        expected_output[..., 1] += rounding
    if in_pairs:
        # And weights are rounded to them: half a unit of Σ p|v|.
        sizes, _ = explicit(q, k, np.abs(v), eps=eps, tiny=0.0, **plain)
        rounding = 2**-8 * sizes[..., 0]
        expected_output[..., 1] += rounding
        expected["output_norm"][..., 1] += np.linalg.norm(rounding, axis=-1)
    within(output, expected_output, "output")
    for name in FORWARD:
        field = getattr(reading, name)
        assert field.dtype == (np.int64 if name in WHOLE else wide(dtype)), name
        within(field, expected[name], name)
    return output, reading


# --- inputs ---------------------------------------------------------------------------------------------------------


def operands(kind, dtype, keys=KEYS):
    rng = np.random.default_rng(sum(map(ord, kind)))
    q = rng.standard_normal((HEADS, QUERIES, DIM))
    k, v = rng.standard_normal((2, HEADS, keys, DIM))
    if kind == "hot":
        q *= 30
    elif kind == "almost equal":
        k = k[:, :1] + 1e-3 * k
    elif kind == "one huge score":
        k[:, 2] = 40 * q[:, 1]
        k[0, 4] = -40 * q[0, 3]
    elif kind == "denormal":
        q *= {"float16": 3e-7, "bfloat16": 1e-39, "float32": 1e-40, "float64": 1e-310}[np.dtype(dtype).name]
    elif kind == "mean far from zero":
        q[..., 0], k[..., 0] = 16, 16
        q[..., 1:] /= 8
    elif kind == "negative zero":
        q[:, :3] = -0.0
        k[:, 1] = -0.0
        v[:, :, 0] = -0.0
    elif kind == "duplicated keys":
        k[:, 5:] = k[:, :1]
        k[:, 1] = 3 * q[:, 0]
        k[:, 3] = k[:, 1]
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


KINDS = (
    "normal",
    "hot",
    "almost equal",
    "one huge score",
    "denormal",
    "mean far from zero",
    "negative zero",
    "duplicated keys",
)


def ways(name, keys=KEYS):
    """(keywords for attend, the same for the definition)."""
    rng = np.random.default_rng(7)
    shape = (HEADS, QUERIES, keys)
    seen = rng.random(shape) < 0.6
    seen[0, 1], seen[1, 2] = False, np.arange(keys) == 4
    bias = np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)
    scale, sinks = np.array([0.7, -0.2]), np.array([0.4, -np.inf])
    causal = np.broadcast_to(np.arange(keys) <= np.arange(QUERIES)[:, None] + 2, shape)
    return {
        "plain": ({}, {}),
        "bool": ({"attn_mask": seen}, {"seen": seen}),
        "bias": ({"attn_mask": bias}, {"bias": bias}),
        "softcap": ({"softcap": 2.5}, {"softcap": 2.5}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks}),
        "scale": ({"scale": scale}, {"scale": scale}),
        "all": (
            {"attn_mask": bias, "is_causal": True, "query_offset": 2, "softcap": 5.0, "sinks": sinks, "scale": scale},
            {"bias": bias, "seen": causal, "softcap": 5.0, "sinks": sinks, "scale": scale},
        ),
    }[name]


WAYS = ("plain", "bool", "bias", "softcap", "sinks", "scale", "all")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@dtypes
@tiles
def test_every_field_is_its_definition(backend, dtype, kind, way):
    options, plain = ways(way)
    _, reading = check(*operands(kind, dtype), options, backend, **plain)
    assert not reading.nonfinite.any()


@pytest.mark.parametrize("way", ["plain", "all"])
@pytest.mark.parametrize("kind", ["hot", "mean far from zero", "duplicated keys"])
@dtypes
@tiles
def test_every_field_is_its_definition_over_several_tiles(backend, dtype, kind, way):
    options, plain = ways(way, keys=1030)
    # Let the later queries see past the first tiles.
    if "query_offset" in options:
        options |= {"query_offset": 1020}
        plain |= {
            "seen": np.broadcast_to(np.arange(1030) <= np.arange(QUERIES)[:, None] + 1020, (HEADS, QUERIES, 1030))
        }
    check(*operands(kind, dtype, keys=1030), options, backend, **plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_definition_too(kind, way):
    options, plain = ways(way)
    check(*operands(kind, np.float64), options, backend="reference", **plain)


def test_the_comparison_can_fail():
    q, k, v = operands("normal", np.float32)
    check(q, k, v, {})
    for wrong in ({"scale": np.full(HEADS, 0.3536)}, {"softcap": 1e3}, {"sinks": np.full(HEADS, -12.0)}):
        with pytest.raises(AssertionError):
            check(q, k, v, {}, **wrong)
    output, fields = explicit(q, k, v, eps=1e-7, tiny=1e-38)
    for name, field in {"output": output, **fields}.items():
        if name not in ("sink_mass", "nonfinite"):
            with pytest.raises(AssertionError):
                within(np.zeros_like(field[..., 0]), field, name)


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [40, 500, 2000])
@pytest.mark.parametrize("sign", [1, -1])
@tiles
def test_a_mean_a_thousand_times_the_spread_costs_the_spread_no_digits(backend, keys, sign):
    rng = np.random.default_rng(keys)
    q = np.stack([np.full(7, sign * 1e3**0.5), rng.uniform(0.5, 1.5, 7)], axis=-1).astype(np.float32)
    k = np.stack([np.full(keys, 1e3**0.5), rng.standard_normal(keys)], axis=-1).astype(np.float32)
    reading = read(q, k, scale=1.0, backend=backend)
    scores = q.astype(np.float64) @ k.astype(np.float64).T
    assert (np.abs(scores.mean(axis=-1)) > 500 * scores.std(axis=-1)).all()
    assert reading.score_std.dtype == np.float32
    np.testing.assert_allclose(reading.score_std, scores.std(axis=-1), rtol=1e-4)
    np.testing.assert_allclose(reading.score_mean, scores.mean(axis=-1), rtol=1e-6)


@dtypes
@pytest.mark.parametrize("end", ["small", "large"])
@tiles
def test_the_norm_of_a_finite_output_neither_overflows_nor_vanishes(backend, dtype, end):
    info = ml_dtypes.finfo(dtype)
    # The processor's product of pairs of bfloat16 takes what is less than normal for 0.
    smallest = info.smallest_normal if backend == "cpu" and dtype == ml_dtypes.bfloat16 else info.smallest_subnormal
    # Powers of two, whose average is exact.
    unit = 2.0 ** (math.floor(math.log2(float(info.max))) - 2) if end == "large" else float(smallest)
    q, k = np.zeros((2, 1, 2, 4))
    v = np.full((1, 2, 4), unit)
    output, reading = attend(q.astype(dtype), k.astype(dtype), v.astype(dtype), backend=backend)
    np.testing.assert_array_equal(output.astype(np.float64), v)
    np.testing.assert_allclose(reading.output_norm.astype(np.float64), 2 * unit, rtol=1e-6)
    np.testing.assert_array_equal(reading.nonfinite, 0)


@dtypes
@tiles
def test_equal_scores_share_alike_and_have_no_spread(backend, dtype):
    # Any number of equal keys, also over tiles: the spread of equal scores is 0, not the rounding of their mean.
    for keys in (2, 3, 7, 513, 1100):
        q, k, v = np.full((1, 1, 1), 1.1, dtype), np.full((1, keys, 1), 0.3, dtype), np.ones((1, keys, 1), dtype)
        reading = attend(q, k, v, backend=backend).reading
        eps = float(np.finfo(wide(dtype)).eps)
        np.testing.assert_allclose(reading.entropy, math.log(keys), rtol=4 * eps)
        np.testing.assert_allclose(reading.collision, 1 / keys, rtol=4 * eps)
        np.testing.assert_allclose(reading.normalized_entropy, 1, rtol=4 * eps)
        # A sum of up to 128 scores in a row, where NumPy adds in pairs.
        assert reading.score_std[0, 0] <= (8 if backend == "cpu" else 4) * eps


# --- what is not finite ---------------------------------------------------------------------------------------------

POISONS = (np.nan, np.inf, -np.inf)
SPAN = 6  # queries in these problems
LAST = 4  # the poisoned key, unless the problem is long


def hiding(way, keys, bad):
    """(keywords, which query sees which key); never does every query see the bad key."""
    seen = np.ones((SPAN, keys), dtype=bool)
    if way in ("bool", "bias"):
        seen[[0, 2], bad] = False
        return {"attn_mask": seen if way == "bool" else np.where(seen, 0.0, -np.inf)}, seen
    position = np.arange(SPAN)[:, None]
    index = np.arange(keys)
    if way == "causal":
        offset = bad - 3
        return {"is_causal": True, "query_offset": offset}, index <= position + offset
    if way == "window":
        return {"window": (2, 1), "query_offset": bad - 4}, np.abs(index - position - bad + 4.5) < 2
    if way == "lengths":
        return {"key_lengths": bad}, np.broadcast_to(index < bad, (SPAN, keys))
    starts = ([0, 3, SPAN], [0, bad, keys])
    return {"cu_seqlens": starts}, (position < 3) == (index < bad)


HIDING = ("bool", "bias", "causal", "window", "lengths", "packed")


@pytest.mark.parametrize("keys", [7, 1030])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("way", HIDING)
@backends
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(backend, way, dtype, keys):
    bad = LAST if keys < 100 else 1000
    options, seen = hiding(way, keys, bad)
    sees = seen[:, bad]
    assert not sees.all()
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, SPAN, 3)).astype(dtype)
    k, v = rng.standard_normal((2, 2, keys, 3)).astype(dtype)
    clean = attend(q, k, v, **options, backend=backend)
    np.testing.assert_array_equal(clean.reading.visible_keys, np.broadcast_to(seen.sum(axis=-1), (2, SPAN)))
    tight = 4 * float(np.finfo(dtype).eps)
    for poison in POISONS:
        for target in ("key", "value"):
            dirty_k, dirty_v = k.copy(), v.copy()
            (dirty_k if target == "key" else dirty_v)[1, bad, 2] = poison
            output, reading = attend(q, dirty_k, dirty_v, **options, backend=backend)
            # Head 0 has other keys and values; in head 1 only the rows that see the key may know of it.
            np.testing.assert_array_equal(reading.nonfinite, [np.zeros(SPAN), sees])
            spared = np.array([np.ones(SPAN, dtype=bool), ~sees])
            np.testing.assert_allclose(output[spared], clean.output[spared], tight, tight)
            for name in FORWARD:
                here, there = getattr(reading, name), getattr(clean.reading, name)
                # A value is in no score: only the output and its norm can tell.
                whole = target == "value" and name not in ("output_norm", "nonfinite")
                rows = np.ones_like(spared) if whole else spared
                np.testing.assert_allclose(here[rows], there[rows], 1e-6, 1e-6, err_msg=name)
            if target == "value":
                np.testing.assert_allclose(output[..., :2], clean.output[..., :2], tight, tight)
                np.testing.assert_array_equal(output[1, sees, 2], np.full(sees.sum(), poison, dtype))
                assert not np.isfinite(reading.output_norm[1, sees]).any()
            elif np.isnan(poison):
                assert np.isnan(output[1, sees]).all()
                for name in set(FORWARD) - {"visible_keys", "nonfinite", "sink_mass"}:
                    assert np.isnan(getattr(reading, name)[1, sees]).all(), name


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@backends
def test_a_bias_that_is_not_finite_reaches_the_row_it_is_added_to(backend, poison):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 3))
    bias = rng.standard_normal((2, 5, 5))
    clean = attend(q, k, v, attn_mask=bias, is_causal=True, backend=backend)
    for i, j in np.ndindex(5, 5):
        dirty = bias.copy()
        dirty[1, i, j] = poison
        output, reading = attend(q, k, v, attn_mask=dirty, is_causal=True, backend=backend)
        hit = np.zeros((2, 5), dtype=bool)
        hit[1, i] = j <= i
        np.testing.assert_array_equal(reading.nonfinite, hit)
        np.testing.assert_array_equal(output[~hit], clean.output[~hit])
        assert not np.isfinite(output[hit]).any()
        for name in FORWARD:
            here, there = getattr(reading, name), getattr(clean.reading, name)
            np.testing.assert_array_equal(here[~hit], there[~hit], err_msg=name)
        # Before the bias nothing was wrong.
        np.testing.assert_allclose(reading.max_qk, clean.reading.max_qk, rtol=1e-15)


@backends
def test_a_query_that_is_not_finite_spoils_its_own_row(backend):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 3))
    clean = attend(q, k, v, backend=backend)
    q[1, 3, 0] = np.nan
    output, reading = attend(q, k, v, backend=backend)
    hit = np.zeros((2, 5), dtype=bool)
    hit[1, 3] = True
    np.testing.assert_array_equal(reading.nonfinite, hit)
    np.testing.assert_allclose(output[~hit], clean.output[~hit], rtol=1e-14)
    assert np.isnan(output[hit]).all()
    # Unless it sees nothing: then there is no score.
    seen = ~hit[:, :, None] & np.ones(5, dtype=bool)
    output, reading = attend(q, k, v, attn_mask=seen, backend=backend)
    np.testing.assert_array_equal(reading.nonfinite, 0)
    np.testing.assert_array_equal(output[hit], 0)


@backends
def test_a_visible_value_counts_even_where_its_weight_is_nothing(backend):
    q, k = np.ones((1, 1, 1)), np.array([[[0.0], [-2000.0]]])
    for poison in POISONS:
        output, reading = attend(q, k, np.array([[[1.0], [poison]]]), backend=backend)
        assert not np.isfinite(output).any()
        assert reading.nonfinite.all()
        assert reading.first_key_weight == 1
    both = attend(q, 0 * k, np.array([[[np.inf], [-np.inf]]]), backend=backend)
    assert np.isnan(both.output).all()


@backends
def test_a_score_that_overflowed_downwards_is_counted_though_no_weight_shows_it(backend):
    q, k = np.full((1, 1, 1), 1e200), np.array([[[0.0], [-1e200], [1e-200]]])
    output, reading = attend(q, k, np.array([[[1.0], [2.0], [3.0]]]), scale=1.0, backend=backend)
    assert reading.nonfinite.all()
    assert (reading.visible_keys == 3).all()
    assert (reading.score_mean == -np.inf).all()
    expected = (1 + 3 * math.e) / (1 + math.e)
    np.testing.assert_allclose(output, expected, rtol=1e-14)


# --- as text and as a file ------------------------------------------------------------------------------------------

SMALL = """\
Reading(heads 1, queries 3; backend numpy)
  max_logit                    0 … 2          mean 1  (1 of 3 not finite)
  entropy                      0 … 0.5        mean 0.1667
  collision                    0 … 1          mean 0.6
  visible_keys                 0 … 4          mean 1.667
  normalized_entropy      0.3607 … 0.3607     mean 0.3607  (2 of 3 not finite)
  effective_keys               0 … 1.25       mean 0.75
  flow                         0 … 0.2        mean 0.06667"""


def small():
    return Reading(
        backend="numpy",
        max_logit=np.array([[-np.inf, 0.0, 2.0]]),
        entropy=np.array([[0.0, 0.0, 0.5]]),
        collision=np.array([[0.0, 1.0, 0.8]]),
        visible_keys=np.array([[0, 1, 4]]),
    )


def test_a_reading_shows_its_shape_its_backend_and_a_line_a_field():
    assert repr(small()) == SMALL
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 4, 5))
    lines = repr(attend(q, k, v, backend="numpy").reading).splitlines()
    assert lines[0] == "Reading(batch 2, heads 3, queries 4; backend numpy)"
    assert [line.split()[0] for line in lines[1:]] == list(FORWARD)
    assert max(map(len, lines)) <= 100
    assert repr(attend(q, k, v, stats="none", backend="cpu").reading) == "Reading(nothing measured; backend cpu)"
    assert repr(attend(q[0, 0], k[0, 0], v[0, 0]).reading).startswith("Reading(queries 4; ")
    assert "empty" in repr(attend(q[:0], k[:0], v[:0]).reading)


@dtypes
@tiles
def test_a_reading_goes_into_json_and_back(backend, dtype):
    q, k, v = operands("normal", dtype)
    # A row that sees nothing brings −inf and NaN, for which JSON has no word.
    how = {"is_causal": True, "query_offset": -1, "sinks": np.zeros(HEADS), "backend": backend}
    reading = attend(q, k, v, **how).reading
    record = json.loads(json.dumps(reading.to_dict(), allow_nan=False))
    assert record["schema"] == "attemper.reading/1"
    assert record["backend"] == backend
    assert record["shape"] == [HEADS, QUERIES]
    assert set(record) == {"schema", "backend", "shape", *FORWARD}
    for name in FORWARD:
        field = getattr(reading, name)
        np.testing.assert_array_equal(from_plain(record[name], field.dtype), field, err_msg=name)
    assert record["max_logit"][0][0] == "-inf"
    assert record["normalized_entropy"][0][0] is None


def test_fields_that_were_not_measured_are_left_out_of_the_record():
    record = small().to_dict()
    assert list(record) == [
        *("schema", "backend", "shape", "max_logit", "entropy", "collision", "visible_keys"),
        *("normalized_entropy", "effective_keys", "flow"),
    ]
    assert json.loads(json.dumps(record, allow_nan=False))["max_logit"] == [["-inf", 0.0, 2.0]]
    assert Reading(backend="numpy").to_dict() == {"schema": "attemper.reading/1", "backend": "numpy", "shape": []}
    assert {*MEASURED, "normalized_entropy", "effective_keys", "flow"} == set(FIELDS)


def test_a_reading_made_in_haste_is_the_one_of_the_constructor():
    around = {"backend": "numpy", "rows": (2, 3), "awaited": AFTER_BACKWARD}
    for names in ((), ("entropy",), [name for name in MEASURED if name not in AFTER_BACKWARD]):
        measured = {name: np.full((2, 3), i) for i, name in enumerate(names)}
        quick, slow = reading_of(measured, **around), Reading(**measured, **around)
        assert vars(quick) == vars(slow)
        assert vars(dataclasses.replace(quick, backend="torch")) == vars(dataclasses.replace(slow, backend="torch"))
        assert vars(copy.deepcopy(quick)).keys() == vars(slow).keys()
        with pytest.raises(dataclasses.FrozenInstanceError):
            quick.entropy = None
