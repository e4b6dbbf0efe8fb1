"""Every rule fires just beyond its threshold and keeps quiet just inside it, and says where and why."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attemper import Finding, Site, Vitals, diagnose, read
from attemper._diagnose import of_probe

PAGE = Path(__file__).parent.parent / "docs" / "findings.md"
SEVERITIES = ("error", "warning", "information")
RULES = [
    "attention-diluted",
    "cannot-tell",
    "cold",
    "entropy-collapse",
    "gradient-starved",
    "hot",
    "logit-growth",
    "mask-empty-rows",
    "mask-leak",
    "nonfinite",
    "outlier-head",
    "overflow-risk",
    "saturated",
    "scale-missing",
    "scale-wrong",
    "sink",
    "softcap-saturated",
    "unseen-attention",
]
HEADS = 4
WIDTH = 16
ROOT = WIDTH**-0.5
MODEL = 96  # not 4 × WIDTH: 1/√d_model would be half of 1/√d_k


@cache
def summed_up(seed, heads, queries, keys, causal):
    """Vitals of random q and k at the usual scale."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((heads, queries, WIDTH)), rng.standard_normal((heads, keys, WIDTH))
    return Vitals.of(read(q, k, is_causal=causal))


def healthy(path="layers.0", *, seed=0, heads=HEADS, queries=24, keys=24, causal=False, **site):
    """Random numbers at a Site where everything is as it should be."""
    known = {
        "head_dim": WIDTH,
        "model_dim": MODEL,
        "projected_head_dim": WIDTH,
        "effective_scale": ROOT,
        "projection_factor": 1.0,
        "product_scale": 1.0,
        "dtype": "float32",
        "kind": "sdpa",
    }
    vitals = summed_up(seed, heads, queries, keys, causal)
    return replace(vitals, site=Site(path=path, heads=heads, **{**known, **site}))


def sites(number, **site):
    return [healthy(f"layers.{n}", seed=n, **site) for n in range(number)]


def with_fields(vitals, **fields):
    """Other numbers per head: one for all of them, or one each."""
    heads = vitals.site.heads
    weights = {**vitals.weights, **{name: np.full(heads, 24) for name in fields if name in vitals.weights}}
    arrays = {name: np.array(np.broadcast_to(value, (heads,))) for name, value in fields.items()}
    return replace(vitals, weights=weights, **arrays)


def pressed(vitals, pressure, t, sequences=8):
    """With this pressure of all heads together, so many standard errors from zero."""
    error = abs(pressure / t)
    return replace(
        vitals,
        total_pressure=np.array([float(pressure)]),
        total_pressure_spread=np.array([error**2 * sequences * (sequences - 1)]),
        weights={**vitals.weights, "total_pressure": np.array([sequences])},
    )


def rules(findings):
    return [finding.rule for finding in findings]


def only(findings, rule):
    """The one finding of a rule."""
    [finding] = [finding for finding in findings if finding.rule == rule]
    return finding


def grave(findings):
    return [(finding.rule, finding.severity) for finding in findings if finding.severity != "information"]


def test_what_is_right_has_no_findings():
    assert diagnose(sites(3)) == []
    assert diagnose([]) == []
    assert diagnose(healthy()) == diagnose([healthy()])  # one need not be in a list


# -- the scale -------------------------------------------------------------------------------------------------------

KINDS = {
    "none": ("scale-missing", 1.0, {}, "no scale at all", "divides their product"),
    "1/d_k": ("scale-wrong", 1 / WIDTH, {}, ", 1/d_k;", "divided by d_k"),
    "twice": ("scale-wrong", 1 / WIDTH, {"projection_factor": ROOT}, "1/√d_k applied twice", "once more"),
    "1/√d_model": ("scale-wrong", MODEL**-0.5, {}, f"1/√d_model with d_model {MODEL}", "width of the model"),
    "padded": ("scale-wrong", 32**-0.5, {"head_dim": 32}, "1/√32, of the padded width", "padded from 16 to 32"),
    "doubled": ("scale-wrong", 2 * ROOT, {}, "2 times as much as it should be", "multiplies the scores by 2 "),
    "halved": ("scale-wrong", ROOT / 2, {}, "0.5 times as much as it should be", "multiplies the scores by 0.5 "),
    "other": ("scale-wrong", 3 * ROOT, {}, "3 times as much as it should be", "multiplies the scores by 3 "),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_wrong_scale_is_named(kind):
    rule, effective, site, what, cause = KINDS[kind]
    [finding] = diagnose(healthy(effective_scale=effective, **site))
    assert finding.rule == rule
    # Nothing contradicts a single site's odd factor; a known mistake is one all the same.
    assert finding.severity == ("information" if kind == "other" else "warning")
    assert finding.where == {"layers.0": ()}
    assert what in finding.headline
    assert "layers.0" in finding.headline
    assert cause in finding.cause
    assert finding.evidence["effective_scale"] == effective
    assert finding.evidence["expected_scale"] == ROOT
    assert finding.evidence["factor"] == pytest.approx(effective / ROOT)
    assert "pressure" not in finding.evidence
    assert "flow" not in finding.evidence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nudge", [1 - 0.0199, 1 + 0.0199])
def test_a_wrong_scale_is_recognised_within_two_per_cent(kind, nudge):
    rule, effective, site, what, _ = KINDS[kind]
    [finding] = diagnose(healthy(effective_scale=effective * nudge, **site))
    assert finding.rule == rule
    if kind not in ("doubled", "halved", "other"):
        assert what in finding.headline
    else:
        assert finding.severity == ("information" if kind == "other" else "warning")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "other"])
@pytest.mark.parametrize("nudge", [1 - 0.0201, 1 + 0.0201])
def test_beyond_two_per_cent_it_is_some_other_factor(kind, nudge):
    _, effective, site, what, _ = KINDS[kind]
    [finding] = diagnose(healthy(effective_scale=effective * nudge, **site))
    assert (finding.rule, finding.severity) == ("scale-wrong", "information")
    assert what not in finding.headline


@pytest.mark.parametrize("nudge", [1 - 0.0199, 1.0, 1 + 0.0199])
def test_a_scale_within_two_per_cent_is_right(nudge):
    assert diagnose(healthy(effective_scale=ROOT * nudge)) == []


def test_a_sign_is_part_of_the_scale():
    [finding] = diagnose(healthy(effective_scale=-ROOT))
    assert (finding.rule, finding.evidence["factor"]) == ("scale-wrong", -1)


def test_the_more_specific_name_wins():
    narrow = {"head_dim": 4, "projected_head_dim": 4, "model_dim": 16}
    # Twice 1/√4 is 1; half of it is 1/4 and 1/√16.
    assert "no scale" in only(diagnose(healthy(effective_scale=1.0, **narrow)), "scale-missing").headline
    assert ", 1/d_k" in only(diagnose(healthy(effective_scale=0.25, **narrow)), "scale-wrong").headline
    wide = {"model_dim": 4 * WIDTH}
    assert "d_model" in only(diagnose(healthy(effective_scale=ROOT / 2, **wide)), "scale-wrong").headline
    # One head as wide as the model: 1/√d_model is right.
    assert diagnose(healthy(heads=1, model_dim=WIDTH)) == []


@pytest.mark.parametrize(
    "site",
    [
        {"effective_scale": None, "scale_argument": 10.0, "qk_norm": True},  # cosines at a temperature of their own
        {"effective_scale": None},
        {"effective_scale": (ROOT,) * HEADS},
        {"effective_scale": (1.0, 2.0, 3.0, 4.0)},  # learnt, one per head
        {"effective_scale": 1.0, "declared_scale": 1.0},  # T5
        {"effective_scale": 1 / WIDTH, "declared_scale": 1 / WIDTH},  # μP
        {"effective_scale": 0.7, "declared_scale": (0.7,) * HEADS},
        {"effective_scale": 32**-0.5, "head_dim": 32, "projected_head_dim": 32},
        {"effective_scale": 1.0, "head_dim": None, "projected_head_dim": None},
    ],
    ids=lambda site: ",".join(f"{k}={v}" for k, v in site.items()),
)
def test_what_is_declared_normalised_or_unknown_is_no_mistake(site):
    assert diagnose(healthy(**site)) == []


def test_one_scale_for_each_head_counts_when_they_agree():
    [finding] = diagnose(healthy(effective_scale=(1.0, 1.0, 1.01, 1.0)))
    assert (finding.rule, finding.evidence["effective_scale"]) == ("scale-missing", 1.0)


def test_a_declared_scale_that_is_not_used_is_a_warning():
    site = {"declared_scale": 0.1, "declared_by": "attention_multiplier"}
    [finding] = diagnose(healthy(effective_scale=0.3, **site))
    assert (finding.rule, finding.severity) == ("scale-wrong", "warning")
    assert "0.1 is declared (attention_multiplier)" in finding.headline
    assert finding.evidence["expected_scale"] == 0.1
    assert diagnose(healthy(effective_scale=0.1, **site)) == []
    # Then 1/√d_k is the mistake, and no kind has a name for it.
    assert "2.5 times" in only(diagnose(healthy(effective_scale=ROOT, **site)), "scale-wrong").headline


@pytest.mark.parametrize(("wrong", "of", "severity"), [(1, 2, "warning"), (2, 4, "warning"), (2, 3, "information")])
def test_a_layer_unlike_its_siblings_is_a_warning(wrong, of, severity):
    layers = [healthy(f"layers.{n}", effective_scale=3 * ROOT if n < wrong else ROOT) for n in range(of)]
    [finding] = diagnose(layers)
    assert (finding.rule, finding.severity) == ("scale-wrong", severity)
    assert finding.where == {f"layers.{n}": () for n in range(wrong)}


def test_siblings_that_were_not_measured_are_no_siblings():
    unmeasured = [healthy(f"layers.{n}", effective_scale=None) for n in range(1, 4)]
    [finding] = diagnose([healthy(effective_scale=3 * ROOT), *unmeasured])
    assert finding.severity == "information"


def test_one_finding_for_one_mistake_and_two_for_two():
    layers = sites(4)
    layers[0] = healthy("layers.0", effective_scale=1.0)
    layers[2] = healthy("layers.2", effective_scale=1.0)
    layers[3] = healthy("layers.3", effective_scale=1 / WIDTH)
    findings = diagnose(layers)
    assert only(findings, "scale-missing").where == {"layers.0": (), "layers.2": ()}
    assert "2 layers (layers.0, …)" in only(findings, "scale-missing").headline
    assert only(findings, "scale-wrong").where == {"layers.3": ()}
    assert "every layer" in diagnose(sites(3, effective_scale=1.0))[0].headline


def test_harm_makes_it_an_error():
    missing = healthy(effective_scale=1.0)

    def severity(**fields):
        return only(diagnose(with_fields(missing, **fields)), "scale-missing").severity

    assert severity(flow=0.099) == "error"
    assert severity(flow=0.101) == "warning"
    assert severity(flow=[0.05, 0.05, 0.5, 0.5]) == "error"  # half of the heads are enough
    assert severity(flow=[0.05, 0.5, 0.5, 0.5]) == "warning"
    # A head that rests on the first key is closed because it has nothing to add.
    sinks = [0.31, 0.31, 0, 0]
    assert severity(flow=[0.05, 0.05, 0.5, 0.5], first_key_weight=sinks) == "warning"
    assert severity(flow=[0.5, 0.5, 0.05, 0.5], first_key_weight=sinks) == "error"
    assert severity(flow=0.01, first_key_weight=0.9) == "warning"
    finding = only(diagnose(with_fields(missing, flow=0.05)), "scale-missing")
    assert finding.evidence["flow"] == pytest.approx(0.05)


def test_harm_is_of_the_layers_with_the_mistake():
    fine = with_fields(healthy("layers.0"), flow=0.01)
    missing = healthy("layers.1", effective_scale=1.0)
    assert only(diagnose([fine, missing]), "scale-missing").severity == "warning"


@pytest.mark.parametrize(
    ("effective", "pressure", "t", "sequences", "trained", "severity"),
    [
        (1.0, 0.2, 5.01, 8, True, "error"),
        (1.0, 0.2, 4.99, 8, True, "warning"),
        (1.0, 0.2, 9, 4, True, "error"),
        (1.0, 0.2, 9, 3, True, "warning"),  # three sequences give no error worth the name
        (1.0, -0.2, 9, 8, True, "warning"),  # the loss would fall if the scale, too large already, grew
        (1.0, 0.2, 9, 8, False, "warning"),
        (1.0, 0.2, 9, 8, None, "warning"),
        (1 / WIDTH, -0.2, 9, 8, True, "error"),
        (1 / WIDTH, 0.2, 9, 8, True, "warning"),
        (3 * ROOT, 0.2, 5.01, 8, True, "error"),
        (3 * ROOT, 0.2, 4.99, 8, True, "information"),
        (-3 * ROOT, 0.2, 9, 8, True, "error"),
    ],
)
def test_a_pressure_that_agrees_makes_it_an_error(effective, pressure, t, sequences, trained, severity):
    vitals = pressed(healthy(effective_scale=effective), pressure, t, sequences)
    findings = diagnose(vitals, trained=trained)
    finding = only(findings, "scale-missing" if effective == 1 else "scale-wrong")
    assert finding.severity == severity
    if sequences >= 4:
        assert finding.evidence["pressure"] == pytest.approx(pressure)
        assert abs(finding.evidence["t"]) == pytest.approx(t)
        assert finding.evidence["pressure_error"] == pytest.approx(abs(pressure) / t)
    else:
        assert "t" not in finding.evidence
    # A pressure that a wrong scale explains is not reported once more as a temperature.
    assert not {"hot", "cold"} & set(rules(findings))


def test_pressures_of_the_layers_with_the_mistake_count_together():
    layers = [pressed(healthy(f"layers.{n}", effective_scale=1.0), 0.02, 3) for n in range(4)]
    finding = only(diagnose(layers, trained=True), "scale-missing")
    assert finding.evidence["pressure"] == pytest.approx(0.08)
    assert finding.evidence["t"] == pytest.approx(6)
    assert finding.severity == "error"


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ({"effective_scale": 1.0}, "Pass scale=0.25 (or multiply q by 0.25 before the product)"),
        ({"effective_scale": 0.0625, "projection_factor": 0.25}, "multiply by 1 there, or leave that and pass scale=1"),
        ({"effective_scale": 0.3, "declared_scale": 0.1}, "Pass scale=0.1"),
    ],
)
def test_the_remedy_is_the_number_to_pass(site, said):
    [finding] = diagnose(healthy(**site))
    assert said in finding.remedy
    assert ("declare it" in finding.remedy) == ("declared_scale" not in site and "projection_factor" not in site)


@pytest.mark.parametrize("projection_factor", [None, 1.0, 0.5])
def test_a_scale_of_zero_is_wrong_and_not_a_crash(projection_factor):
    [finding] = diagnose(healthy(effective_scale=0.0, projection_factor=projection_factor))
    assert finding.rule == "scale-wrong"
    assert finding.evidence["factor"] == 0


# -- the temperature -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sign", "rule"), [(1, "cold"), (-1, "hot")])
def test_pressure_at_one_layer(sign, rule):
    def found(pressure, t, sequences=8, trained=True):
        layers = sites(3)
        layers[1] = pressed(layers[1], sign * pressure, t, sequences)
        return [finding for finding in diagnose(layers, trained=trained) if finding.rule != "cannot-tell"]

    [finding] = found(0.051, 5.01)
    assert (finding.rule, finding.severity, finding.where) == (rule, "warning", {"layers.1": ()})
    assert finding.evidence["pressure"] == pytest.approx(sign * 0.051)
    assert finding.evidence["t"] == pytest.approx(sign * 5.01)
    assert ("smaller" if sign > 0 else "larger") in finding.headline
    assert ("sharp" if sign > 0 else "flat") in finding.cause
    assert found(0.051, 4.99) == []
    assert found(0.049, 50) == []  # small, however sure
    assert found(0.051, 50, sequences=3) == []
    assert found(0.051, 50, trained=False) == found(0.051, 50, trained=None) == []


@pytest.mark.parametrize(("sign", "rule"), [(1, "cold"), (-1, "hot")])
def test_pressure_of_all_layers_together(sign, rule):
    def found(each):
        return diagnose([pressed(v, sign * each, 20) for v in sites(8)], trained=True)

    [finding] = found(0.0376)  # 0.3008 in all, less than 0.05 each
    assert (finding.rule, finding.severity) == (rule, "error")
    assert finding.where == {f"layers.{n}": () for n in range(8)}
    assert finding.evidence["pressure"] == pytest.approx(sign * 0.3008)
    assert finding.evidence["t"] == pytest.approx(sign * 20 * math.sqrt(8))
    assert grave(found(0.0374)) == []
    # Sure of none by itself, and of all together.
    assert grave(diagnose([pressed(v, sign * 0.1, 2) for v in sites(8)], trained=True)) == [(rule, "error")]
    assert grave(diagnose([pressed(v, sign * 0.1, 1.7) for v in sites(8)], trained=True)) == []


def test_one_layer_too_hot_and_another_too_cold():
    layers = sites(3)
    layers[0], layers[2] = pressed(layers[0], -0.1, 9), pressed(layers[2], 0.12, 9)
    findings = diagnose(layers, trained=True)
    assert only(findings, "hot").where == {"layers.0": ()}
    assert only(findings, "cold").where == {"layers.2": ()}
    assert {finding.severity for finding in findings} == {"warning"}


def test_a_layer_without_pressure_is_passed_over():
    layers = [pressed(healthy(), 0.4, 9), healthy("layers.1")]
    assert grave(diagnose(layers, trained=True)) == [("cold", "error")]
    assert diagnose(healthy(), trained=True) == []


# -- harm ------------------------------------------------------------------------------------------------------------

SHUT = {"normalized_entropy": 0.049, "flow": 0.049}


def test_saturated():
    finding = only(diagnose([with_fields(healthy(), **SHUT), healthy("layers.1")]), "saturated")
    assert (finding.severity, finding.where) == ("warning", {"layers.0": ()})
    assert finding.evidence == {"heads": HEADS, "share_of_working_heads": 0.5}
    # What training made sharp may be meant.
    assert only(diagnose(with_fields(healthy(), **SHUT), trained=True), "saturated").severity == "information"
    assert diagnose(with_fields(healthy(), normalized_entropy=0.049, flow=0.051)) == []
    assert diagnose(with_fields(healthy(), normalized_entropy=0.051, flow=0.049)) == []


def test_saturated_needs_two_heads_and_half_of_those_that_work():
    half = with_fields(healthy(), normalized_entropy=[0.01, 0.5, 0.01, 0.5], flow=[0.01, 0.5, 0.01, 0.5])
    assert only(diagnose(half), "saturated").where == {"layers.0": (0, 2)}
    one = with_fields(healthy(), normalized_entropy=[0.01, 0.5, 0.5, 0.5], flow=[0.01, 0.5, 0.5, 0.5])
    assert diagnose(one) == []
    assert diagnose(with_fields(healthy(heads=1), **SHUT)) == []
    five = healthy(heads=5)
    two_of_five = [0.01, 0.01, 0.5, 0.5, 0.5]
    assert diagnose(with_fields(five, normalized_entropy=two_of_five, flow=two_of_five)) == []


def test_heads_that_rest_on_the_first_key_are_not_saturated():
    resting = with_fields(healthy(), **SHUT, first_key_weight=0.3)
    assert rules(diagnose(resting)) == ["sink"]
    assert rules(diagnose(with_fields(healthy(), **SHUT, first_key_weight=0.299))) == ["saturated"]
    # Two that work, and both are shut.
    mixed = with_fields(healthy(), **SHUT, first_key_weight=[0.9, 0.9, 0, 0])
    finding = only(diagnose(mixed), "saturated")
    assert finding.where == {"layers.0": (2, 3)}
    assert finding.evidence == {"heads": 2, "share_of_working_heads": 1.0}


def test_heads_that_had_no_choice_are_not_saturated():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((HEADS, 6, WIDTH)), rng.standard_normal((HEADS, 1, WIDTH))
    assert diagnose(Vitals.of(read(q, k), Site(path="one key", heads=HEADS, head_dim=WIDTH))) == []


def test_really_saturated_scores_are_found():
    q, k = np.random.default_rng(0).standard_normal((2, HEADS, 24, WIDTH)) * 20
    vitals = Vitals.of(read(q, k), Site(path="a", heads=HEADS, head_dim=WIDTH, effective_scale=ROOT))
    assert grave(diagnose(vitals)) == [("saturated", "warning")]


def test_gradient_starved():
    finding = only(diagnose([with_fields(v, gradient_flow=0.0249) for v in sites(2)]), "gradient-starved")
    assert (finding.severity, finding.where) == ("warning", {"layers.0": (), "layers.1": ()})
    assert finding.evidence == {"heads": 2 * HEADS, "share_of_working_heads": 1.0}
    trained = diagnose(with_fields(healthy(), gradient_flow=0.0249), trained=True)
    assert only(trained, "gradient-starved").severity == "information"
    assert diagnose(with_fields(healthy(), gradient_flow=0.0251)) == []
    half = with_fields(healthy(), gradient_flow=[0.01, 0.5, 0.5, 0.01])
    finding = only(diagnose(half), "gradient-starved")
    assert finding.where == {"layers.0": (0, 3)}
    assert finding.evidence["share_of_working_heads"] == 0.5
    assert diagnose(with_fields(healthy(), gradient_flow=[0.01, 0.5, 0.5, 0.5])) == []
    # The share is of all heads with a gradient, in whatever layer.
    starved, *others = sites(3)
    starved = with_fields(starved, gradient_flow=0.01)
    assert rules(diagnose([starved, *others])) == ["gradient-starved"]
    assert diagnose([starved, *(with_fields(v, gradient_flow=0.5) for v in others)]) == []
    resting = with_fields(healthy(), gradient_flow=0.01, first_key_weight=0.5)
    assert rules(diagnose(resting)) == ["sink"]


FLAT = {"normalized_entropy": 0.991, "score_std": 0.199, "visible_keys": 2.01}


@pytest.mark.parametrize("inside", [{"normalized_entropy": 0.989}, {"score_std": 0.201}, {"visible_keys": 2.0}])
def test_attention_diluted(inside):
    finding = only(diagnose([with_fields(v, **FLAT) for v in sites(3)], trained=True), "attention-diluted")
    assert (finding.severity, finding.where) == ("warning", {f"layers.{n}": () for n in range(3)})
    assert finding.evidence["normalized_entropy"] == pytest.approx(0.991)
    assert diagnose([with_fields(v, **{**FLAT, **inside}) for v in sites(3)], trained=True) == []
    # At random weights attention may be as flat as it likes.
    for trained in (False, None):
        assert diagnose([with_fields(v, **FLAT) for v in sites(3)], trained=trained) == []


@pytest.mark.parametrize(("flat", "of", "fires"), [(2, 3, True), (1, 2, False), (1, 3, False)])
def test_dilution_is_of_most_layers(flat, of, fires):
    layers = [with_fields(v, **FLAT) if n < flat else v for n, v in enumerate(sites(of))]
    findings = diagnose(layers, trained=True)
    assert rules(findings) == ["attention-diluted"] * fires
    if fires:
        assert findings[0].where == {f"layers.{n}": () for n in range(flat)}


@pytest.mark.parametrize(("flat", "fires"), [(3, True), (2, False)])
def test_dilution_is_of_most_heads(flat, fires):
    entropy = [0.999] * flat + [0.5] * (HEADS - flat)
    vitals = with_fields(healthy(), **{**FLAT, "normalized_entropy": entropy})
    findings = diagnose(vitals, trained=True)
    assert rules(findings) == ["attention-diluted"] * fires
    if fires:
        assert findings[0].where == {"layers.0": (0, 1, 2)}


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_nonfinite():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, HEADS, 24, WIDTH))
    q[2, 5] = np.nan
    broken = Vitals.of(read(q, k), Site(path="layers.1", heads=HEADS, head_dim=WIDTH, effective_scale=ROOT))
    findings = diagnose([healthy(), broken])
    assert grave(findings) == [("nonfinite", "error")]
    assert findings[0].where == {"layers.1": (2,)}
    assert findings[0].evidence == {"rows": 1}
    assert "layers.1" in findings[0].headline
    after = with_fields(healthy("layers.2"), nonfinite=24)
    finding = only(diagnose([healthy(), broken, after]), "nonfinite")
    assert finding.where == {"layers.1": (2,), "layers.2": ()}
    assert finding.evidence == {"rows": 1 + 24 * HEADS}
    assert "the first are in layers.1" in finding.headline


@pytest.mark.parametrize(
    ("product", "severity"), [(65504 / 4 - 1, None), (65504 / 4 + 1, "warning"), (65504, "warning"), (65505, "error")]
)
@pytest.mark.parametrize("scale", [None, 1.0, 0.25, -0.25])
def test_overflow_risk(product, severity, scale):
    largest = np.full(HEADS, 10.0)
    largest[1] = product * abs(scale or 1)
    findings = diagnose(with_fields(healthy(dtype="float16", product_scale=scale), max_qk=largest))
    assert rules(findings) == ["overflow-risk"] * (severity is not None)
    if severity:
        [finding] = findings
        assert (finding.severity, finding.where) == (severity, {"layers.0": (1,)})
        assert finding.evidence == {"largest_product": pytest.approx(product), "largest_float16": 65504}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_only_float16_overflows_so_soon(dtype):
    assert diagnose(with_fields(healthy(dtype=dtype), max_qk=1e6)) == []


def test_an_overflow_that_has_happened_is_one():
    finding = only(diagnose(with_fields(healthy(dtype="float16"), max_qk=[1.0, np.inf, 1.0, 1.0])), "overflow-risk")
    assert (finding.severity, finding.where) == ("error", {"layers.0": (1,)})


def test_each_head_is_divided_by_its_own_scale():
    site = {"dtype": "float16", "effective_scale": None, "product_scale": (0.01, 1.0, 1.0, 1.0)}
    assert diagnose(with_fields(healthy(**site), max_qk=[1.0, 1000.0, 1.0, 1.0])) == []
    finding = only(diagnose(with_fields(healthy(**site), max_qk=[400.0, 1000.0, 1.0, 1.0])), "overflow-risk")
    assert finding.where == {"layers.0": (0,)}


def test_softcap_saturated():
    finding = only(diagnose(with_fields(healthy(softcap=50.0), max_qk=[1, 100.1, 2, 120.0])), "softcap-saturated")
    assert (finding.severity, finding.where) == ("warning", {"layers.0": (1, 3)})
    assert finding.evidence == {"max_qk": 120.0, "softcap": 50.0}
    assert diagnose(with_fields(healthy(softcap=50.0), max_qk=99.9)) == []
    assert diagnose(with_fields(healthy(softcap=None), max_qk=1e5)) == []


# -- masks -----------------------------------------------------------------------------------------------------------


def test_mask_empty_rows():
    q, k = np.random.default_rng(0).standard_normal((2, HEADS, 24, WIDTH))
    mask = np.ones((HEADS, 24, 24), bool)
    mask[1, 3] = mask[1, 7] = mask[2, 0] = False
    site = Site(path="layers.1", heads=HEADS, head_dim=WIDTH, effective_scale=ROOT)
    findings = diagnose([healthy(), Vitals.of(read(q, k, attn_mask=mask), site)])
    [finding] = findings
    assert (finding.rule, finding.severity) == ("mask-empty-rows", "warning")
    assert finding.where == {"layers.1": (1, 2)}
    assert finding.evidence == {"rows": 2}
    mask[1, 3, 5] = mask[1, 7, 5] = mask[2, 0, 5] = True  # one key is enough
    assert diagnose(Vitals.of(read(q, k, attn_mask=mask), site)) == []


@pytest.mark.parametrize(
    ("weight", "severity"), [(0.99e-4, None), (1.01e-4, "warning"), (0.0099, "warning"), (0.0101, "error")]
)
def test_mask_leak(weight, severity):
    vitals = [healthy(), with_fields(healthy("layers.1"), padding_weight=[0.0, weight, np.nan, 0.0])]
    findings = diagnose(vitals)
    assert rules(findings) == ["mask-leak"] * (severity is not None)
    if severity:
        [finding] = findings
        assert (finding.severity, finding.where) == (severity, {"layers.1": (1,)})
        assert finding.evidence == {"padding_weight": weight}


# -- worth knowing ---------------------------------------------------------------------------------------------------


def test_sink():
    vitals = [with_fields(healthy(), first_key_weight=[0.3, 0.1, 0.9, 0.299]), healthy("layers.1")]
    [finding] = diagnose(vitals)
    assert (finding.rule, finding.severity, finding.where) == ("sink", "information", {"layers.0": (0, 2)})
    assert finding.evidence == {"heads": 2, "share": 0.25}
    # With four keys or fewer a third of the weight is nobody's resting place.
    assert diagnose(with_fields(healthy(), first_key_weight=0.9, visible_keys=4.0)) == []
    assert rules(diagnose(with_fields(healthy(), first_key_weight=0.9, visible_keys=4.1))) == ["sink"]


def test_outlier_head():
    [finding] = diagnose(with_fields(healthy(), score_std=[1.0, 1.0, 5.01, 1.0]))
    assert (finding.rule, finding.severity, finding.where) == ("outlier-head", "information", {"layers.0": (2,)})
    assert finding.evidence == {"largest_ratio": pytest.approx(5.01)}
    assert diagnose(with_fields(healthy(), score_std=[1.0, 1.0, 4.99, 1.0])) == []
    assert diagnose(with_fields(healthy(), score_std=[0.05, 0.05, 0.49, 0.05])) == []  # still close to nothing
    assert diagnose(with_fields(healthy(heads=2), score_std=[1.0, 50.0]))[0].where == {"layers.0": (1,)}
    assert rules(diagnose(with_fields(healthy(heads=3), score_std=[1.0, 1.0, 50.0]))) == ["outlier-head"]


def test_unseen_attention():
    findings = diagnose(healthy(), unseen={"layers.1": "it is a mystery", "layers.2": "so is it"})
    assert [(f.rule, f.severity, f.where) for f in findings] == [
        ("unseen-attention", "information", {"layers.1": ()}),
        ("unseen-attention", "information", {"layers.2": ()}),
    ]
    assert "it is a mystery" in findings[0].headline
    assert rules(diagnose([], unseen={"a": "why"})) == ["unseen-attention"]


@pytest.mark.parametrize(
    ("site", "fires"),
    [
        ({"scale_argument": 1.0}, True),
        ({"scale_argument": ROOT}, False),
        ({"scale_argument": ROOT * 1.0201}, True),
        ({"scale_argument": ROOT * 1.0199}, False),
        ({"scale_argument": None}, False),  # the default is 1/√d_k
        ({"scale_argument": None, "declared_scale": 0.1}, True),
        ({"scale_argument": 0.1, "declared_scale": 0.1}, False),
        ({"scale_argument": 1.0, "qk_norm": True}, False),
        ({"scale_argument": 1.0, "kind": None}, False),  # Vitals of a bare Reading
    ],
)
def test_cannot_tell_the_scale(site, fires):
    layers = [healthy("layers.0"), healthy("layers.1", effective_scale=None, projection_factor=None, **site)]
    findings = diagnose(layers)
    assert rules(findings) == ["cannot-tell"] * fires
    if fires:
        assert (findings[0].severity, findings[0].where) == ("information", {"layers.1": ()})
        assert "layers.1" in findings[0].headline


@pytest.mark.parametrize(("trained", "said"), [(False, "do not look trained"), (None, "cannot be told"), (True, None)])
def test_cannot_tell_the_temperature(trained, said):
    findings = diagnose([pressed(healthy(), 1.0, 50), healthy("layers.1")], trained=trained)
    if said is None:
        assert rules(findings) == ["cold"]
    else:
        [finding] = findings
        assert (finding.rule, finding.severity, finding.where) == ("cannot-tell", "information", {})
        assert said in finding.headline
    assert diagnose(healthy(), trained=trained) == []  # without pressure there is nothing to explain


@pytest.mark.parametrize(
    ("pressure", "t", "sequences", "said"),
    [
        (-2.5, -227, 2, "2 sequences are too few to judge the temperature by."),
        (-0.01, -1, 3, "3 sequences are too few to judge the temperature by."),
        (0.01, 1, 4, None),  # 0.01 ± 0.01
        (0.1, 1.01, 8, None),  # 0.1 ± 0.099
        (0.1, 0.99, 8, "The pressure is not known well enough to judge the temperature by."),  # 0.1 ± 0.101
        (-0.21, -0.5, 8, "The pressure is not known well enough to judge the temperature by."),
        (-0.8, -4.8, 8, "The pressure is not known well enough to judge the temperature by."),
    ],
)
def test_cannot_tell_the_temperature_from_so_little(pressure, t, sequences, said):
    layers = [pressed(healthy(), pressure, t, sequences), healthy("layers.1")]
    findings = diagnose(layers, trained=True)
    assert [f.headline for f in findings] == ([] if said is None else [said])
    for finding in findings:
        assert (finding.rule, finding.severity, finding.where) == ("cannot-tell", "information", {})
        # An error of two or three sequences is none to show.
        shown = {} if sequences < 4 else {"pressure": pressure, "pressure_error": pressure / t}
        assert finding.evidence == pytest.approx({"sequences": sequences, **shown})
        assert "more" in finding.remedy
    # While a model trains the pressure need not be zero.
    moving = [replace(v, site=replace(v.site, training=True)) for v in layers]
    assert diagnose(moving, trained=True) == []


def test_cannot_tell_the_temperature_from_one_sequence():
    one = replace(pressed(healthy(), -2.5, 9, 1), total_pressure_spread=np.zeros(1))
    [finding] = diagnose(one, trained=True)
    assert finding.headline == "1 sequence is too few to judge the temperature by."
    assert finding.evidence == {"sequences": 1}


def test_too_little_is_said_of_odd_scales_too():
    """A factor that all layers share may be meant; a pressure that might have told is then worth asking for."""
    layers = [pressed(v, 0.8, 200, 2) for v in sites(3, effective_scale=3 * ROOT)]
    assert rules(diagnose(layers, trained=True)) == ["scale-wrong", "cannot-tell"]
    assert rules(diagnose([pressed(v, 0.8, 200) for v in sites(3)], trained=True)) == ["cold"]


@pytest.mark.parametrize(("keys", "fires"), [(7.9, True), (8.0, False), (np.nan, True)])
def test_cannot_tell_the_temperature_from_short_sequences(keys, fires):
    short = with_fields(pressed(healthy(), 0.01, 1), visible_keys=keys)
    findings = diagnose(short, trained=True)
    assert [f.headline for f in findings] == ["The sequences are too short to judge the temperature by."] * fires
    # A layer with few keys by design, beside one that has enough.
    assert diagnose([short, pressed(healthy("layers.1"), 0.01, 1)], trained=True) == []
    # What is found all the same is said instead.
    assert rules(diagnose(with_fields(pressed(healthy(), 0.4, 9), visible_keys=keys), trained=True)) == ["cold"]


def test_numbers_in_sentences_have_the_minus_of_the_report():
    [finding] = diagnose(pressed(healthy(), -2.27, 50), trained=True)
    assert "pressure −2.27 ± 0.045." in finding.headline
    [finding] = diagnose(healthy(effective_scale=-ROOT))
    assert "is −0.25, −1 times" in finding.headline
    assert "by −1 beyond" in finding.cause
    assert "q by -1 " in finding.remedy  # which is to be typed


# -- over time -------------------------------------------------------------------------------------------------------


def run(name, values, path="layers.0", **fixed):
    """A history in which a field of the second head, or of the heads given, takes these values one after the other."""
    history = []
    for value in values:
        heads = value if np.ndim(value) else [fixed.get(name, 1.0), value, fixed.get(name, 1.0), fixed.get(name, 1.0)]
        history.append([with_fields(healthy(path), **{**fixed, name: np.array(heads, float)})])
    return history


def over_time(history):
    return diagnose(history[-1], history=history)


def test_logit_growth():
    [finding] = over_time(run("max_logit", [9, 12, 15, 18, 20.1]))
    assert (finding.rule, finding.severity, finding.where) == ("logit-growth", "warning", {"layers.0": (1,)})
    assert finding.evidence == {"max_logit": 20.1, "samples": 5}
    assert over_time(run("max_logit", [9, 12, 15, 19.9, 20.0])) == []  # not beyond 20
    assert over_time(run("max_logit", [12, 15, 18, 20, 23.9])) == []  # not doubled
    assert rules(over_time(run("max_logit", [12, 15, 18, 20, 24.1]))) == ["logit-growth"]
    assert over_time(run("max_logit", [9, 12, 15, 20.1])) == []  # four samples
    assert over_time(run("max_logit", [100, 50, 120, 40, 210])) == []  # up and down: rank correlation 0.5
    assert over_time(run("max_logit", [40.0] * 6)) == []
    # What starts below 1 counts as 1.
    assert rules(over_time(run("max_logit", [-5, 1, 5, 9, 21]))) == ["logit-growth"]


@pytest.mark.parametrize(("order", "fires"), [([0, 1, 2, 3, 4, 5], True), ([2, 0, 1, 3, 4, 5], True)])
def test_logit_growth_by_rank(order, fires):
    # Spearman's ρ: 1 and 0.83.
    values = [2.0 ** (n + 3) for n in order]
    assert (rules(over_time(run("max_logit", values))) == ["logit-growth"]) == fires


def test_logit_growth_below_the_rank_correlation():
    values = [2.0 ** (n + 3) for n in (2, 1, 0, 3, 4, 5)]  # ρ = 0.77
    assert over_time(run("max_logit", values)) == []


def test_over_time_looks_at_samples_of_as_many_heads_as_now():
    history = run("max_logit", [9, 12, 15, 18, 20.1])
    other = [healthy("layers.0", heads=2)]
    assert rules(over_time([other, *history])) == ["logit-growth"]
    assert over_time([*history, other]) == []


def test_entropy_collapse():
    fixed = {"normalized_entropy": 0.5}
    [finding] = over_time(run("normalized_entropy", [0.31, 0.3, 0.2, 0.1, 0.099], **fixed))
    assert (finding.rule, finding.severity, finding.where) == ("entropy-collapse", "warning", {"layers.0": (1,)})
    assert finding.evidence == {"largest_fall": pytest.approx(0.211), "samples": 5}
    assert over_time(run("normalized_entropy", [0.31, 0.3, 0.2, 0.1, 0.101], **fixed)) == []
    assert over_time(run("normalized_entropy", [0.29, 0.3, 0.2, 0.1, 0.099], **fixed)) == []  # not to a third
    assert over_time(run("normalized_entropy", [0.199, 0.2, 0.2, 0.1, 0.01], **fixed)) == []  # was low already
    assert rules(over_time(run("normalized_entropy", [0.201, 0.2, 0.2, 0.1, 0.01], **fixed))) == ["entropy-collapse"]
    assert over_time(run("normalized_entropy", [0.9, 0.3, 0.2, 0.01], **fixed)) == []  # four samples
    # A head that has found its sink has not collapsed.
    resting = {**fixed, "first_key_weight": 0.3}
    assert rules(over_time(run("normalized_entropy", [0.9, 0.5, 0.2, 0.1, 0.01], **resting))) == ["sink"]


def test_first_and_last_are_medians_of_a_fifth():
    calm = {"normalized_entropy": 0.5}
    collapsed = [0.9] * 3 + [0.5] * 9 + [0.05] * 3
    spike = [*collapsed[:-1], 0.8]
    assert rules(over_time(run("normalized_entropy", spike, **calm))) == ["entropy-collapse"]
    recovered = [*collapsed[:-2], 0.8, 0.8]
    assert over_time(run("normalized_entropy", recovered, **calm)) == []


def test_a_site_needs_five_samples_of_its_own():
    history = run("max_logit", [9, 12, 15, 20.1])
    history += [[healthy("layers.1")]] * 4
    assert diagnose(healthy(), history=history) == []


def test_a_site_that_is_not_in_the_last_sample():
    """A layer that only some steps run through, as with layer drop."""
    history = [[with_fields(healthy(), max_logit=2.0 ** (n + 3))] for n in range(6)]
    history.append([healthy("layers.1")])
    assert over_time(history)[0].where == {"layers.0": ()}


def test_all_heads_of_one_layer():
    history = [
        [with_fields(healthy(), max_logit=2.0 ** (n + 3)), with_fields(healthy("layers.1"), max_logit=30.0)]
        for n in range(6)
    ]
    [finding] = over_time(history)
    assert finding.where == {"layers.0": ()}
    assert f"{HEADS} heads" in finding.headline


# -- laws ------------------------------------------------------------------------------------------------------------


def everything():
    """Arguments under which every rule speaks."""
    layers = [
        healthy("missing", effective_scale=1.0),
        healthy("wrong", effective_scale=1 / WIDTH),
        healthy("unclear", effective_scale=None, scale_argument=0.7),
        pressed(healthy("hot"), -0.1, 9),
        pressed(healthy("cold"), 0.1, 9),
        with_fields(healthy("shut"), **SHUT, gradient_flow=0.001),
        *[with_fields(healthy(f"flat.{n}"), **FLAT) for n in range(20)],
        with_fields(healthy("half", dtype="float16"), max_qk=[1, 7e4, 1, np.inf]),
        with_fields(healthy("capped", softcap=5.0), max_qk=50),
        with_fields(healthy("masked"), rows_without_keys=[0, 0, 2, 0]),
        with_fields(healthy("leaking"), padding_weight=0.5),
        with_fields(healthy("broken"), nonfinite=[0, 0, 0, 7]),
        with_fields(healthy("resting"), first_key_weight=[0.5, 0, 0, 0]),
        with_fields(healthy("odd"), score_std=[1, 1, 1, 40]),
    ]
    history = [
        [with_fields(healthy("odd"), max_logit=[1, 1, 1, 2.0 ** (n + 3)], normalized_entropy=[0.9 * 2.0**-n, 1, 1, 1])]
        for n in range(6)
    ]
    return {"vitals": layers, "history": history, "trained": True, "unseen": {"hidden": "nobody looked"}}


def plain(findings):
    """Without the order of the layers, what names the first of them, and the rounding of sums over them."""
    return sorted(
        (f.rule, f.severity, sorted(f.where.items()), sorted((n, f"{x:.9g}") for n, x in f.evidence.items()), f.cause)
        for f in findings
    )


def test_every_rule_speaks():
    assert sorted(set(rules(diagnose(**everything())))) == RULES


def test_rule_names_are_those_in_the_source():
    """So that a new rule cannot be without a test and a page."""
    folder = Path(__file__).parent.parent / "src" / "attemper"
    source = "".join((folder / name).read_text() for name in ("_diagnose.py", "_symptoms.py"))
    named = re.findall(r'(?:found\(\s*|_Mistake\()"([a-z-]+)"', source)
    assert sorted({*named, *re.findall(r'"(cold)" if cold else "(hot)"', source)[0]}) == RULES


def test_severities_are_sorted():
    found = [finding.severity for finding in diagnose(**everything())]
    assert set(found) == set(SEVERITIES)
    assert found == sorted(found, key=SEVERITIES.index)


def test_every_finding_says_why_what_to_do_and_where_to_read_on():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    for finding in diagnose(**everything()):
        assert finding.headline.strip().endswith(".")
        assert finding.cause.strip()
        assert finding.remedy.strip()
        page, _, anchor = finding.docs.partition("#")
        assert (PAGE.parent.parent / page).samefile(PAGE)
        assert anchor == finding.rule
        assert anchor in headings
        assert not any(np.isnan(x) for x in finding.evidence.values() if isinstance(x, float))


def test_the_page_has_a_section_for_every_rule_and_for_nothing_else():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(h for h in headings if re.fullmatch(r"[a-z-]+", h)) == RULES
    assert len(headings) == len(set(headings))


def test_findings_survive_json():
    for finding in diagnose(**everything()):
        record = json.loads(json.dumps(finding.to_dict(), allow_nan=False))
        again = Finding.from_dict(record)
        assert again.to_dict() == finding.to_dict()
        assert all(isinstance(heads, tuple) for heads in again.where.values())
        if all(math.isfinite(x) for x in finding.evidence.values()):
            assert again == finding


def test_the_same_from_a_saved_file():
    given = everything()
    findings = diagnose(**given)

    def reloaded(vitals):
        return [Vitals.from_dict(json.loads(json.dumps(v.to_dict(), allow_nan=False))) for v in vitals]

    saved = {**given, "vitals": reloaded(given["vitals"]), "history": [reloaded(s) for s in given["history"]]}
    assert [f.to_dict() for f in diagnose(**saved)] == [f.to_dict() for f in findings]
    # Nothing is kept from one call to the next, and generators do as well as lists.
    given["vitals"], given["history"] = iter(given["vitals"]), [iter(s) for s in given["history"]]
    assert [f.to_dict() for f in diagnose(**given)] == [f.to_dict() for f in findings]


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_the_sites_does_not_matter(seed):
    given = everything()
    expected = plain(diagnose(**given))
    order = np.random.default_rng(seed).permutation(len(given["vitals"]))
    assert plain(diagnose(**{**given, "vitals": [given["vitals"][n] for n in order]})) == expected


@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 4),
    heads=st.integers(1, 6),
    queries=st.integers(1, 20),
    keys=st.integers(1, 20),
    causal=st.booleans(),
    trained=st.sampled_from([True, False, None]),
    declared=st.sampled_from([None, ROOT, 1.0, 1 / WIDTH]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    noise=st.floats(-4.9, 4.9),
)
def test_healthy_models_are_left_in_peace(seed, layers, heads, queries, keys, causal, trained, declared, dtype, noise):
    """Random q and k at the scale that is declared, and a pressure that does not reject zero."""
    keys = max(queries, keys) if causal else keys
    given = [
        healthy(
            f"layers.{n}",
            seed=seed + n,
            heads=heads,
            queries=queries,
            keys=keys,
            causal=causal,
            dtype=dtype,
            declared_scale=declared,
            effective_scale=declared or ROOT,
        )
        for n in range(layers)
    ]
    if abs(noise) > 0.1:
        # Of one layer, as the errors of several add up.
        given[0] = pressed(given[0], noise / 10, noise)
    assert grave(diagnose(given, history=[given] * 6, trained=trained)) == []


@pytest.mark.parametrize(
    ("losses", "trained", "rule"),
    [
        ({0.5: 4.0, 1.0: 2.7, 2.0: 3.4}, True, None),
        ({0.5: 2.60, 1.0: 2.7, 2.0: 3.4}, True, "cold"),
        ({0.5: 4.0, 1.0: 2.7, 2.0: 2.60}, True, "hot"),
        ({0.5: 2.66, 1.0: 2.7, 2.0: 3.4}, True, None),  # hardly less
        ({0.5: 1.0, 1.0: 2.7, 2.0: 3.4}, False, None),  # random weights have no right temperature
        ({0.5: 1.0, 1.0: 2.7, 2.0: math.nan}, True, None),
        ({}, True, None),
    ],
)
def test_a_probe_that_finds_a_lower_loss(losses, trained, rule):
    findings = list(of_probe(list(losses.items()), trained))
    assert [f.rule for f in findings] == ([] if rule is None else [rule])
    if rule:
        [finding] = findings
        assert finding.severity == "warning"
        assert finding.evidence["loss_as_it_is"] == 2.7


@pytest.mark.parametrize("declared", [0.0, math.nan, math.inf])
def test_a_declared_scale_that_is_none_says_nothing(declared):
    assert diagnose([healthy("attn", declared_scale=declared)]) == []


@pytest.mark.parametrize(
    ("losses", "rule"),
    [
        ({0.5: -2.0, 1.0: -2.7, 2.0: -2.5}, None),  # least as it is
        ({0.5: -2.74, 1.0: -2.7, 2.0: -2.5}, None),  # hardly less
        ({0.5: -2.8, 1.0: -2.7, 2.0: -2.5}, "cold"),
        ({0.5: 0.0, 1.0: 0.0, 2.0: 0.0}, None),
        ({0.5: 0.0, 1.0: 0.0, 2.0: -1.0}, "hot"),
    ],
)
def test_a_probe_of_losses_that_are_negative(losses, rule):
    assert [f.rule for f in of_probe(list(losses.items()), True)] == ([] if rule is None else [rule])


def test_vitals_by_path_are_vitals():
    layers = [healthy(f"layers.{n}", effective_scale=1.0) for n in range(3)]
    by_path = {v.site.path: v for v in layers}
    assert diagnose(by_path, history=[by_path] * 6) == diagnose(layers, history=[layers] * 6) != []
