"""The questions of the lab about gradients, number types and what might stand in for √d_k."""

import math
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from attemper import lab
from attemper._scale import scale_for
from attemper.lab import additive, cosine, gradients, heads, initialisation, norms, overflow
from attemper.lab._result import FAILS, HOLDS, ONLY_IF, OPEN
from attemper.lab._statistics import generator, sample_means

torch = pytest.importorskip("torch")

# Small enough for seconds, large enough that every verdict is decided.
SMALL = {
    "gradients": gradients.Config(
        d_k=(16, 64), half_width=0.02, tolerance=0.05, repeats=4, models=4, steps=20, optimisers=("Adam",)
    ),
    "overflow": overflow.Config(keys=(1, 128), d_k=(16, 64), repeats=3),
    "heads": heads.Config(width=128, heads=(1, 4), tokens=32, half_width=0.03, tolerance=0.1),
    "norms": norms.Config(d_k=(16, 64), half_width=0.05, tolerance=0.15),
    "initialisation": initialisation.Config(width=(64, 128), repeats=4, tokens=128),
    "additive": additive.Config(d_k=(16, 64), half_width=0.1, tolerance=0.3, repeats=4, lengths=(256,), rounds=3),
    "cosine": cosine.Config(d_k=(16, 64), half_width=0.02, repeats=4, steps=40),
}
OUTCOMES = {
    "gradients": {12: ONLY_IF, 13: ONLY_IF, 14: HOLDS},
    "overflow": {15: ONLY_IF},
    "heads": {19: ONLY_IF},
    "norms": {18: HOLDS},
    "initialisation": {22: FAILS},
    "additive": {16: ONLY_IF},
    "cosine": {17: FAILS},
}


@pytest.fixture(scope="module")
def small():
    return {name: lab.ask(name, config) for name, config in SMALL.items()}


def covers(estimate, value, slack=0.0):
    return estimate.low - slack <= value <= estimate.high + slack


def table(result, part):
    return next(t for t in result.tables if part in t.title)


@pytest.mark.parametrize("name", SMALL)
def test_verdicts_follow_from_the_run(small, name):
    result = small[name]
    assert {one.claim: one.outcome for one in result.verdicts} == OUTCOMES[name]
    assert set(OUTCOMES[name]) == set(lab.QUESTIONS[name].claims)
    assert all(one.evidence and one.reason and one.measured for one in result.verdicts)
    assert all(any(math.isfinite(e.least) or math.isfinite(e.most) for e in one.evidence) for one in result.verdicts)


@pytest.mark.parametrize("name", SMALL)
def test_json_round_trip(small, name):
    text = small[name].to_json()
    assert lab.Result.from_json(text).to_json() == text


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_bytes(small, name):
    torch.manual_seed(12345)  # what the caller does to torch's own stream changes nothing
    assert lab.ask(name, SMALL[name]).to_json() == small[name].to_json()


@pytest.mark.parametrize("name", ["gradients", "initialisation", "additive"])
def test_torch_is_left_as_it_was(name):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    quick = {"gradients": {"steps": 1, "repeats": 2, "models": 2, "most": 2, "d_k": (4,), "trained": 4}}
    lab.run(name, quick=True, **quick.get(name, {"repeats": 2}), **({"most": 2} if name == "additive" else {}))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", SMALL)
def test_panels_can_be_drawn(small, name):
    assert small[name].panels
    for panel in small[name].panels:
        assert 1 <= len(panel.series) <= 6
        assert len({one.name for one in panel.series}) == len(panel.series)
        for one in panel.series:
            assert len(one.x) == len(one.y)
            assert np.isfinite(one.y).all()
            assert all(low <= y <= high for low, y, high in zip(one.low, one.y, one.high, strict=False))
            assert panel.y_scale in ("linear", "symlog") or min(one.y) > 0


@pytest.mark.parametrize("name", SMALL)
def test_no_time_is_saved(small, name):
    assert "(ms)" not in small[name].to_json()
    assert bool(small[name].clock) == (name == "additive")


# gradients


def test_flow_is_what_was_found_elsewhere():
    """Σp(1−p) for 128 keys: 0.612, 0.323 and 0.164 unscaled, 0.98 scaled; integration has no noise."""
    for d_k, known in {16: 0.612, 64: 0.323, 256: 0.164}.items():
        assert gradients.flow_of(d_k, 128, 1.0) == pytest.approx(known, abs=0.003)
        assert gradients.flow_of(d_k, 128, scale_for("sqrt_dk", d_k)) == pytest.approx(0.98, abs=0.003)


@pytest.mark.parametrize(
    ("d_k", "rule", "flow", "starved"),
    [
        (16, "unscaled", 0.612, 0.70),
        (64, "unscaled", 0.323, 0.91),
        (256, "unscaled", 0.164, 0.96),
        (64, "sqrt_dk", 0.98, 0.02),
    ],
)
def test_flow_and_starved_keys_are_what_was_found_elsewhere(d_k, rule, flow, starved):
    draw = partial(gradients._inside, 128, d_k, rule)
    with gradients.one_thread():
        found = sample_means(draw, generator(0, "elsewhere", d_k, rule), half_width=0.003, most=400)
    assert all(one.half_width <= 0.00301 for one in found)  # the ends are rounded
    assert covers(found[0], gradients.flow_of(d_k, 128, scale_for(rule, d_k)), 0.001)
    assert covers(found[0], flow, 0.002)
    assert covers(found[1], starved, 0.01)  # known to a percent


def test_flow_sampled_is_flow_integrated(small):
    for row in table(small["gradients"], "What softmax").rows:
        d_k, _, flow, theory, passed, starved, *_ = row
        assert flow.half_width <= 0.02
        assert covers(flow, theory, 0.01)
        assert passed.value == pytest.approx(theory, abs=0.06)
        known = {(16, "unscaled"): 0.70, (64, "unscaled"): 0.91}.get((d_k, row[1]), 0.02)
        assert covers(starved, known, 0.01)  # known to a percent


def test_the_gradient_of_scores_is_that_of_autograd():
    scores, upstream = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores.requires_grad_()
    weights = scores.softmax(-1)
    weights.backward(upstream)
    found = gradients.score_gradient(weights.detach(), upstream)
    assert torch.allclose(found, scores.grad, atol=1e-12)


def test_both_notes_about_gradients_hold_of_different_things(small):
    rows = {row[0]: dict(zip(gradients.NORMS, row[2:], strict=True)) for row in table(small["gradients"], "Norm").rows}
    for d_k, ratios in rows.items():
        # dq = scale · dS · k, so the ratios of q and of the scores differ by about √d_k.
        assert ratios["q"].value / ratios["scores"].value == pytest.approx(math.sqrt(d_k), rel=0.25)
        assert ratios["median row of q"].value < ratios["q"].value
    assert 6 < rows[64]["mean row of q"].value < 14


def test_without_a_difference_between_the_rules_nothing_holds(monkeypatch):
    monkeypatch.setattr(gradients, "scale_for", lambda rule, d_k: 1 / math.sqrt(d_k))
    config = gradients.Config(
        d_k=(64,), half_width=0.05, tolerance=0.1, repeats=2, models=2, steps=1, optimisers=("Adam",), most=8
    )
    result = lab.ask("gradients", config)
    assert {one.claim: one.outcome for one in result.verdicts} == {12: FAILS, 13: FAILS, 14: FAILS}


# overflow


def test_the_largest_scores_are_those_of_the_types(small):
    rows = table(small["overflow"], "Largest score").rows
    found = {row[0]: row[3] for row in rows if row[2] == 1}
    assert found["float16"] == pytest.approx(11.09, abs=0.01)
    assert found["float32"] == pytest.approx(88.7, abs=0.05)
    assert found["float64"] == pytest.approx(709.8, abs=0.05)
    if "bfloat16" in found:
        assert found["bfloat16"] == 88.5  # the next that bfloat16 can write is 89, which overflows
    for name, _, keys, limit, *_ in rows:
        assert limit == pytest.approx(found[name] - math.log(keys), abs=0.6 if name == "bfloat16" else 0.02)


def test_numpy_agrees_on_where_the_naive_formula_ends():
    for name, limit in {"float16": 11.0859375, "float32": 88.72283, "float64": 709.782712893384}.items():
        for keys, finite in ((1, True), (8, False)):
            weights = overflow.naive_weights(np.full(keys, limit, dtype=name))
            assert bool((weights > 0).all()) == finite
            assert np.isfinite(weights).all()


def test_attend_is_right_where_float16_scores_are_infinite(small):
    rows = [row for row in table(small["overflow"], "three ways").rows if row[0] == "float16"]
    assert [row[2] for row in rows] == ["right", "not a number", "not a number", "not a number"]
    assert [row[3] for row in rows] == ["right", "wrong", "not a number", "not a number"]
    assert all(row[4] <= row[5] for row in rows)
    aligned = {row[0]: row[1] for row in table(small["overflow"], "itself").rows}
    assert aligned[64] == pytest.approx(math.sqrt(65520 / 64), rel=1e-6)


def test_the_extra_of_the_lab_brings_every_type():
    """What `make lab` installs answers for bfloat16 too, as the documentation shows it."""
    path = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    assert any("bfloat16" in one for one in extras["lab"])


def test_an_attention_that_does_not_subtract_the_largest_fails(monkeypatch):
    class Attended:
        def __init__(self, output):
            self.output = output

    def plain(q, k, v, scale):
        with np.errstate(over="ignore", invalid="ignore"):
            return Attended(overflow.naive_weights(q @ k.T) @ v)

    monkeypatch.setattr(overflow, "attend", plain)
    with np.errstate(over="ignore", invalid="ignore"):
        assert lab.ask("overflow", SMALL["overflow"]).verdict(15).outcome in (FAILS, OPEN)


# heads, norms


def test_the_variance_of_a_head(small):
    theory = {"√d_k": lambda d, h: 1, "√d_model": lambda d, h: 1 / h, "unscaled": lambda d, h: d}
    entropies = {}
    for h, d_k, rule, variance, entropy, _ in table(small["heads"], "one head").rows:
        assert variance.value == pytest.approx(theory[rule](d_k, h), rel=0.1)
        entropies[h, rule] = entropy.value
    assert entropies[4, "√d_model"] > entropies[4, "√d_k"] > entropies[4, "unscaled"]
    assert dict(table(small["heads"], "Shapes").rows)["scores"] == "4 × 32 × 32"


def test_heads_that_mix_are_noticed(monkeypatch):
    # Split across heads instead of within them: what each head gets alone no longer adds up to the whole.
    whole = heads.attend

    def mixed(q, k, v, scale):
        output, reading = whole(q, k, v, scale=scale)
        return type(whole(q, k, v, scale=scale))(output[::-1] if output.ndim == 3 else output, reading)

    monkeypatch.setattr(heads, "attend", mixed)
    assert lab.ask("heads", SMALL["heads"]).verdict(19).outcome == FAILS


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="3 heads do not divide a width of 512"):
        heads.Config(heads=(1, 3))


def test_what_norms_leave(small):
    for d_k, nothing, layer, rms, qk_layer, l2 in table(small["norms"], "Variance").rows:
        assert nothing.value > 1.3 * d_k  # tokens of unequal size
        assert layer.value == pytest.approx(d_k, rel=0.1)
        assert rms.value == pytest.approx(d_k, rel=0.1)
        assert qk_layer.value == pytest.approx(d_k**2 / (d_k - 1), rel=0.1)
        assert l2.value == pytest.approx(1 / d_k, rel=0.1)
    for row in table(small["norms"], "Largest").rows:
        assert row[1] == pytest.approx(row[0])
        assert row[4] <= row[0]


def test_a_norm_that_did_replace_the_divisor_would_be_noticed(monkeypatch):
    monkeypatch.setattr(norms, "layer_norm", lambda x: norms.l2_norm(x))
    assert lab.ask("norms", SMALL["norms"]).verdict(18).outcome == FAILS


# initialisation


def test_scores_at_the_start():
    """Found elsewhere: 0.025, 0.31 and 1.64 at width 64, 768 and 4096; nn.MultiheadAttention 0.50 at 768."""
    config = initialisation.Config(repeats=4, initialisers=("N(0, 0.02²)", "nn.MultiheadAttention"))
    result = lab.ask("initialisation", config)
    spread = {(row[0], row[1]): row[-1] for row in result.tables[0].rows}
    known = {64: (0.025, 0.001), 768: (0.31, 0.005), 4096: (1.64, 0.005)}
    for width, (value, rounding) in known.items():
        assert covers(spread["N(0, 0.02²)", width], value, rounding)
    assert covers(spread["nn.MultiheadAttention", 768], 0.50, 0.005)
    assert ("nn.MultiheadAttention", 4096) not in spread


def test_initialisers_with_variance_one_hold():
    config = initialisation.Config(width=(64, 256), repeats=6, initialisers=("Xavier", "LeCun"))
    assert lab.ask("initialisation", config).verdict(22).outcome == HOLDS


def test_weights_that_theory_does_not_explain_decide_nothing(monkeypatch):
    monkeypatch.setattr(initialisation, "component", lambda name, width: 7.0)
    assert lab.ask("initialisation", SMALL["initialisation"]).verdict(22).outcome == OPEN


# additive, cosine


def test_additive_scores_are_bounded_by_the_sum_of_v(small):
    for d_k, name, bound, share, variance, theory, beyond in table(small["additive"], "Scores").rows:
        assert 0.99 < share.value <= 1
        assert bound.low > 1
        assert covers(variance, theory, 0.15 * theory)
        assert beyond.value > (0.5 if name == "normal" else 0.005)
        if name == "normal":
            assert bound.value == pytest.approx(d_k * math.sqrt(2 / math.pi), rel=0.35)


def test_the_variance_of_tanh_by_integration():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2000, 1)), rng.standard_normal((2000, 400))
    assert additive.expected("length 1", 64) == pytest.approx(np.tanh(a + b).var(axis=1, ddof=1).mean(), rel=0.02)


def test_scores_without_tanh_are_noticed(monkeypatch):
    monkeypatch.setattr(additive, "scores", lambda q, k, w_q, w_k, v: ((q @ w_q)[:, None] + (k @ w_k)[None]) @ v)
    config = additive.Config(d_k=(64,), most=8, repeats=2, lengths=(256,), rounds=3)
    assert lab.ask("additive", config).verdict(16).outcome == FAILS


def test_the_counts_of_operations(small):
    (row,) = table(small["additive"], "cost").rows
    assert row == (256, *[256 * 256 * 64] * 4, 256 * 256 * 64 * 4, 256 * 256 * 4)
    ((length, ours, dot, ratio),) = small["additive"].clock[0].rows
    assert length == 256
    assert ratio == pytest.approx(ours / dot, rel=1e-4)


@pytest.mark.parametrize("seconds", [(1.0, 2.0), (2.0, 1.0)])
def test_the_clock_decides_nothing(small, monkeypatch, seconds):
    monkeypatch.setattr(additive, "_time", lambda config, length: seconds)
    assert lab.ask("additive", SMALL["additive"]).to_json() == small["additive"].to_json()


def test_slower_rests_on_what_is_counted(monkeypatch):
    count = additive._count
    monkeypatch.setattr(additive, "_count", lambda length, width: count(length, width) | {"ratio": 0.5})
    assert lab.ask("additive", SMALL["additive"]).verdict(16).outcome == FAILS


def test_cosines_want_a_temperature(small):
    weight = {(row[0], row[1]): row[3] for row in table(small["cosine"], "seeks").rows}
    bound = math.e**2 / (math.e**2 + 127)
    for d_k in (16, 64):
        assert weight[d_k, "cosine"].high < bound
        assert weight[d_k, "cosine, τ learned"].low > 0.8
    for d_k, rule, spread, entropy, _, _ in table(small["cosine"], "Random").rows:
        if rule == "cosine":
            assert spread.value == pytest.approx(1 / math.sqrt(d_k), rel=0.05)
            assert entropy.value > 0.99
        if rule in ("q·k/√d_k", "cosine, τ = 1/√d_k"):
            assert entropy.value == pytest.approx(0.90, abs=0.02)


def test_vectors_of_any_length_are_not_cosines(monkeypatch):
    monkeypatch.setattr(cosine, "unit", lambda x: x / math.sqrt(math.sqrt(x.shape[-1])))
    # Now the dot products have variance 1 and the claim's own demand is met; the support for the verdict is gone.
    config = cosine.Config(d_k=(64,), most=8, repeats=2, steps=2)
    assert lab.ask("cosine", config).verdict(17).outcome == OPEN
