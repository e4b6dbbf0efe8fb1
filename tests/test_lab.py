"""The lab: its statistics, its types, and the questions that need NumPy alone."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attemper
from attemper import lab
from attemper.lab import _questions
from attemper.lab._result import FAILS, HOLDS, ONLY_IF, OPEN, Estimate, Evidence, judge
from attemper.lab._statistics import Moments, generator, sample_means, sample_variance, student

# Reduced sizes: each question in about a second.
REDUCED = {
    "variance": {"d_k": (1, 8, 64), "relative": 0.02},
    "softmax": {},
    "rules": {"d_k": (16, 64), "half_width": 0.01},
    "saturation": {"d_k": (16, 64, 256)},
    "before-after": {"d_k": (4, 64, 1024), "repeats": 3},
    "shapes": {"d_k": (1, 64), "repeats": 20},
    "correlation": {"d_k": (16, 256), "half_width": 0.05},
    "length": {"keys": (128, 1024, 8192), "half_width": 0.03},
    "cost": {"lengths": (256, 1024, 2048), "repeats": 1},
}
EXPECTED = {
    1: HOLDS,
    2: ONLY_IF,
    3: ONLY_IF,
    4: ONLY_IF,
    5: HOLDS,
    6: HOLDS,
    7: HOLDS,
    8: FAILS,
    9: FAILS,
    10: HOLDS,
    11: HOLDS,
    20: ONLY_IF,
    24: ONLY_IF,
    25: FAILS,
}


@pytest.fixture(scope="module")
def results():
    return {name: lab.run(name, **knobs) for name, knobs in REDUCED.items()}


class TestStatistics:
    @pytest.mark.parametrize(("degrees", "quantile"), [(4, 2.776), (9, 2.262), (31, 2.040), (1000, 1.962)])
    def test_student(self, degrees, quantile):
        assert student(degrees) == pytest.approx(quantile, rel=0.005)

    def test_student_of_one_sample_says_nothing(self):
        assert student(0) == math.inf

    @given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=40), st.integers(1, 39), st.floats(-1e6, 1e6))
    def test_merged_moments_are_those_of_the_whole(self, values, cut, offset):
        x = np.array(values) + offset
        cut = min(cut, len(x) - 1)
        merged, whole = Moments.of(x[:cut]).merge(Moments.of(x[cut:])), Moments.of(x)
        for name, power in (("mean", 1), ("m2", 2), ("m3", 3), ("m4", 4)):
            size = np.abs(x - x.mean()).max() ** power * len(x) + (1e-9 * abs(offset)) ** power + 1e-9
            tolerance = 1e-6 * size if power > 1 else 1e-9 * (abs(offset) + 1e3)
            assert abs(getattr(merged, name) - getattr(whole, name)) <= tolerance

    def test_moments_do_not_cancel(self):
        x = 1e8 + generator(0, "cancel").standard_normal(1000)
        assert Moments.of(x[:500]).merge(Moments.of(x[500:])).variance == pytest.approx(np.var(x, ddof=1), rel=1e-6)

    def test_half_width_of_a_variance(self):
        # Of normal samples the variance of the sample variance is 2σ⁴/n.
        x = generator(0, "normal").standard_normal(200_000) * 3
        assert Moments.of(x).half_width_of_variance() == pytest.approx(1.96 * 9 * math.sqrt(2 / 200_000), rel=0.05)

    def test_intervals_that_stop_themselves_cover(self):
        # Skewed batches and a wish that stops some early: 95 % intervals must cover about 95 % of the time.
        covered = 0
        for trial in range(400):
            estimate = sample_means(
                lambda rng: [rng.exponential(1.0, 4).mean()], generator(trial, "cover"), half_width=0.12, most=500
            )[0]
            assert estimate.half_width <= 0.12
            covered += estimate.low <= 1.0 <= estimate.high
        assert 0.90 <= covered / 400 <= 0.985

    def test_sampling_stops_at_the_most(self):
        estimate = sample_means(lambda rng: [rng.standard_normal()], generator(0), half_width=1e-9, most=40)[0]
        assert estimate.count == 40
        assert estimate.half_width > 0.1

    def test_variance_is_known_as_well_as_asked(self):
        mean, variance = sample_variance(
            lambda rng: rng.standard_normal(500) * 2 + 1, generator(3), relative=0.02, most=10**6
        )
        assert variance.half_width <= 0.02 * variance.value * 1.001
        assert variance.low <= 4 <= variance.high
        assert mean.low <= 1 <= mean.high

    def test_streams_differ_by_name_and_by_seed(self):
        draws = {tuple(generator(*key).standard_normal(3)) for key in ((0, "a"), (0, "b"), (1, "a"), (0, "a", 1))}
        assert len(draws) == 4
        assert generator(0, "a").standard_normal() == generator(0, "a").standard_normal()


class TestTypes:
    @pytest.mark.parametrize(
        ("estimate", "text"),
        [
            (Estimate(0.33812, 0.336, 0.3402), "0.3381 ± 0.0021"),
            (Estimate.exact(128), "128"),
            (Estimate(1234.5, 1200.0, 1269.0), "1234 ± 34"),
            (Estimate(0.99923412, 0.99923, 0.999238), "0.999234 ± 4e−06"),
            (Estimate(3.0, -math.inf, math.inf), "3 (one sample)"),
        ],
    )
    def test_an_estimate_in_words(self, estimate, text):
        assert str(estimate) == text

    def test_an_estimate_keeps_six_digits(self):
        assert Estimate.exact(math.pi).value == 3.14159

    @pytest.mark.parametrize(
        ("low", "high", "outcome"),
        [(0.9, 1.1, HOLDS), (0.5, 0.7, FAILS), (1.3, 1.5, FAILS), (0.7, 0.9, OPEN), (0.5, 1.5, OPEN)],
    )
    def test_the_whole_interval_decides(self, low, high, outcome):
        evidence = Evidence("x", Estimate((low + high) / 2, low, high), 0.8, 1.2)
        assert evidence.outcome() == outcome
        sure = Evidence("y", Estimate.exact(1.0), 0.0, 2.0)
        assert judge([sure, evidence]) == outcome

    def test_one_failure_outweighs_what_is_open(self):
        open_, fails = Evidence("a", Estimate(1, 0, 2), 0.5, 3), Evidence("b", Estimate.exact(9), 0, 1)
        assert judge([open_, fails]) == FAILS

    def test_bad_knobs(self):
        for knobs, words in (
            ({"d_k": (0,)}, "d_k is 0.\n  Pass a whole number of at least 1."),
            ({"d_k": ()}, "d_k is empty."),
            ({"d_k": 8}, "d_k is 8.\n  Pass several"),
            ({"d_k": (2.5,)}, "d_k is 2.5."),
            ({"d_k": (True,)}, "d_k is True."),
            ({"relative": math.nan}, "relative is nan."),
            ({"seed": -1}, "seed is -1."),
            ({"entries": ("gaussian",)}, "entries 'gaussian' is not known."),
            ({"dk": (8,)}, "knob 'dk' is not known.\n  Did you mean 'd_k'?"),
        ):
            with pytest.raises(attemper.OptionError) as error:
                lab.run("variance", **knobs)
            assert words in str(error.value)

    @pytest.mark.parametrize("question", ["variance", "correlation"])
    def test_a_correlation_is_at_most_one(self, question):
        with pytest.raises(ValueError, match=r"^correlation is 2\.\n  Pass a number from 0[.01]* to 1\.$"):
            lab.run(question, correlation=2)

    def test_one_width_is_no_range(self):
        assert "at 4 components the ratio" in lab.run("variance", d_k=(4,), relative=0.3, most=5000).summary

    def test_values_are_sorted_and_once_each(self):
        config = lab.load("saturation").Config(d_k=(64, 4, 64))
        assert config.d_k == (4, 64)

    def test_a_question_that_compares_wants_two(self):
        for name, knobs in (
            ("saturation", {"d_k": (16,)}),
            ("length", {"keys": (128, 128)}),
            ("norms", {"d_k": (16,)}),
        ):
            with pytest.raises(attemper.OptionError, match=r"has one value, .*\n  Pass at least 2"):
                lab.run(name, **knobs)

    def test_a_condition_that_was_not_borne_out_is_no_reason(self):
        missed = Evidence("ratio", Estimate.exact(3.0), 0.9, 1.1)
        words = {"claim": 2, "expected": "", "measured": "", "reason": "It holds if q and k are independent."}
        verdict = lab.Verdict(**words, outcome=FAILS, evidence=(missed,), conditional=True)
        assert verdict.reason == "Not every number lies where the claim wants it: ratio: 3 (does not hold)."
        borne_out = lab.Verdict(**words, outcome=HOLDS, conditional=True)
        assert (borne_out.outcome, borne_out.reason) == (ONLY_IF, words["reason"])

    def test_what_is_no_answer(self):
        for text, words in (("[]", "schema is None"), ("docs/lab/rules.json", "not JSON"), (None, "not JSON")):
            with pytest.raises(attemper.OptionError, match=words):
                lab.Result.from_json(text)

    def test_a_claim_that_is_not_judged(self, results):
        with pytest.raises(attemper.OptionError, match=r"does not judge claim 99\.\n  It judges 6, 7, 8, 9, 10"):
            results["softmax"].verdict(99)

    def test_unknown_question(self):
        with pytest.raises(attemper.OptionError, match="Did you mean 'variance'"):
            lab.run("varience")

    def test_missing_packages_are_named(self, monkeypatch):
        monkeypatch.setitem(
            _questions.QUESTIONS, "softmax", lab.Question("softmax", "t", "a", (), needs=("no_such_package",))
        )
        with pytest.raises(attemper.OptionError, match=r"needs no_such_package.*\n.*attemper\[lab\]"):
            lab.run("softmax")

    def test_underscores_are_hyphens(self):
        assert _questions.question("before_after").name == "before-after"

    def test_a_record_of_something_else(self):
        with pytest.raises(attemper.OptionError, match="schema is None"):
            lab.Result.from_dict({})

    def test_config_is_frozen_and_round_trips(self):
        config = lab.load("variance").Config(d_k=[1, 2])
        assert config.d_k == (1, 2)
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
        with pytest.raises(AttributeError):
            config.seed = 1

    def test_a_verdict_must_be_of_a_claim(self):
        with pytest.raises(attemper.OptionError, match="claim '26'"):
            lab.Verdict(claim=26, outcome=HOLDS, expected="", measured="", reason="")
        with pytest.raises(attemper.OptionError, match="outcome 'maybe'"):
            lab.Verdict(claim=1, outcome="maybe", expected="", measured="", reason="")


class TestQuestions:
    @pytest.mark.parametrize("name", REDUCED)
    def test_verdicts(self, results, name):
        for verdict in results[name].verdicts:
            if verdict.claim is not None:
                assert verdict.outcome == EXPECTED[verdict.claim], verdict
            assert verdict.evidence
            assert verdict.reason.endswith(".")
        assert {v.claim for v in results[name].verdicts} - {None} == set(lab.QUESTIONS[name].claims)

    @pytest.mark.parametrize("name", REDUCED)
    def test_same_seed_same_bytes(self, results, name):
        again = lab.run(name, **REDUCED[name])
        assert again.to_json() == results[name].to_json()

    @pytest.mark.parametrize("name", sorted(set(REDUCED) - {"softmax", "cost", "shapes"}))
    def test_another_seed_other_numbers(self, results, name):
        other = lab.run(name, **REDUCED[name], seed=1)
        assert other.to_dict()["tables"] != results[name].to_dict()["tables"]

    @pytest.mark.parametrize("name", REDUCED)
    def test_round_trip(self, results, name):
        text = results[name].to_json()
        assert lab.Result.from_json(text) == results[name]
        assert lab.Result.from_json(text).to_json() == text

    @pytest.mark.parametrize("name", REDUCED)
    def test_the_code_asks_it_again(self, results, name):
        record = results[name].to_dict()
        assert record["command"].startswith(f"attemper lab {name}")
        names = {}
        exec(record["code"].replace("print(result)", ""), names)
        assert names["result"].config == results[name].config

    @pytest.mark.parametrize("name", REDUCED)
    def test_panels_fit_their_series(self, results, name):
        for panel in results[name].panels:
            for series in panel.series:
                assert len(series.x) == len(series.y)
                assert len(series.low) in (0, len(series.x))
                assert all(math.isfinite(y) for y in series.y)
        assert results[name].series

    def test_progress_is_told(self):
        told = []
        lab.run("saturation", d_k=(4, 16), half_width=0.1, progress=lambda *step: told.append(step))
        assert [(done, total) for _, done, total in told] == [(0, 2), (1, 2)]


class TestIndependentFigures:
    """Numbers computed elsewhere, which the sampled intervals have to cover."""

    def test_entropy(self, results):
        # Rounded to three digits, and themselves sampled.
        rows = {(row[0], row[1]): row for row in results["saturation"].tables[0].rows}
        for d_k, figure in ((16, 0.338), (64, 0.138), (256, 0.062)):
            estimate = rows[d_k, "unscaled"][2]
            assert estimate.half_width <= 0.003
            assert estimate.low - 0.0005 <= figure <= estimate.high + 0.0005
            scaled = rows[d_k, "divided by √d_k"][2]
            assert scaled.half_width <= 0.003
            assert scaled.low - 0.005 <= 0.90 <= scaled.high + 0.005

    def test_flow(self, results):
        rows = {(row[0], row[1]): row for row in results["saturation"].tables[0].rows}
        for d_k, figure in ((16, 0.612), (64, 0.323), (256, 0.164)):
            estimate = rows[d_k, "unscaled"][4]
            assert estimate.half_width <= 0.003
            assert estimate.low - 0.0005 <= figure <= estimate.high + 0.0005

    def test_entropy_by_another_road(self, results):
        # Given q, the scores are normal with variance |q|², which is chi-squared: no dot product at all.
        rng = np.random.default_rng(7)
        for d_k, row in ((d, r) for r in results["saturation"].tables[0].rows for d in [r[0]] if r[1] == "unscaled"):
            scores = rng.standard_normal((40_000, 128)) * np.sqrt(rng.chisquare(d_k, 40_000))[:, None]
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1).mean() / math.log(128)
            assert abs(entropy - row[2].value) <= row[2].half_width + 0.002

    def test_typical_scores(self, results):
        evidence = {e.name: e.estimate for e in results["variance"].verdict(5).evidence}
        assert abs(evidence["P(|q·k| ≥ 12)"].value - 0.13) <= 0.005
        assert evidence["standard deviation"].value == pytest.approx(8, abs=0.1)
        assert evidence["mean |q·k|"].value == pytest.approx(6.38, abs=0.1)

    def test_gpt3(self, results):
        evidence = {e.name: e.estimate.value for e in results["rules"].verdict(4).evidence}
        assert evidence["head width of 12288 in 96 heads"] == 128
        assert evidence["√12288 over √128"] == pytest.approx(math.sqrt(96), rel=1e-5)

    def test_the_right_numbers_of_the_wrong_examples(self, results):
        softmax = results["softmax"]
        assert softmax.verdict(8).measured == "0.9999523, 0.0000454, 0.0000023"
        assert softmax.verdict(9).measured == "0.674, 0.193, 0.133"
        assert softmax.verdict(10).measured == "0.982, 0.018"
        assert softmax.verdict(7).measured == "1, 1.03e−10, 6.91e−13"


class TestVerdictsCanTurn:
    """A world in which a claim is true or false gets the other outcome: no verdict is written in advance."""

    def test_a_scale_that_is_not_there(self, monkeypatch):
        module = lab.load("saturation")
        monkeypatch.setattr(module, "scale_for", lambda rule, d_k: 1.0)
        assert lab.run("saturation", **REDUCED["saturation"]).verdict(11).outcome == FAILS

    def test_components_of_another_variance(self, monkeypatch):
        module = lab.load("variance")
        doubled = {name: (lambda rng, d, draw=draw: draw(rng, d) * 2) for name, draw in module._ENTRIES.items()}
        monkeypatch.setattr(module, "_ENTRIES", doubled)
        result = lab.run("variance", **REDUCED["variance"])
        assert result.verdict(1).outcome == result.verdict(2).outcome == result.verdict(5).outcome == FAILS

    def test_a_claim_stated_rightly(self, monkeypatch):
        module = lab.load("softmax")
        right = {**module.STATED, 9: ((1.5, 0.25, -0.125), ("0.67", "0.19", "0.13"), "")}
        monkeypatch.setattr(module, "STATED", right)
        assert lab.run("softmax").verdict(9).outcome == HOLDS

    def test_a_claim_stated_wrongly(self, monkeypatch):
        module = lab.load("softmax")
        monkeypatch.setattr(module, "DOTS", (((1, -1), (1, 1), 2),))
        monkeypatch.setattr(module, "STATED", {**module.STATED, 10: ((1, 0), ("1", "0"), "")})
        result = lab.run("softmax")
        assert result.verdict(6).outcome == result.verdict(10).outcome == FAILS

    def test_keys_that_resemble_nobody(self):
        result = lab.run("correlation", d_k=(16, 256), correlation=0.01, half_width=0.05)
        assert result.verdict(3).outcome != ONLY_IF

    def test_widths_that_do_not_collapse_decide_nothing(self):
        assert lab.run("saturation", d_k=(4, 16)).verdict(11).outcome == OPEN

    def test_too_few_samples_decide_nothing(self):
        result = lab.run("variance", d_k=(64,), relative=0.5, most=64)
        assert result.verdict(1).outcome == OPEN
        assert result.summary.startswith("At these sizes not everything is decided. A dot product")
        assert lab.Result.from_json(result.to_json()) == result

    def test_a_divisor_that_under_corrects(self, monkeypatch):
        module = lab.load("rules")
        real = module.scale_for

        def wrong(rule, d_k, model_dim=None):
            return 2.0 / d_k if rule == "dk" else real(rule, d_k, model_dim=model_dim)

        monkeypatch.setattr(module, "scale_for", wrong)
        assert lab.run("rules", **REDUCED["rules"]).verdict(3).outcome == FAILS

    def test_work_that_cannot_be_split(self, monkeypatch):
        module = lab.load("cost")
        monkeypatch.setattr(
            module, "_parts", lambda config, rule, *_: Estimate.exact(1.0 if rule == "unscaled" else 0.0)
        )
        verdict = lab.run("cost", **REDUCED["cost"]).verdict(25)
        assert verdict.outcome == HOLDS
        assert verdict.measured.startswith(
            "the parts equal the whole to the last bit with the scale and differ from it"
        )
        assert "does not follow" not in verdict.reason

    @pytest.mark.parametrize(
        ("scaled", "unscaled"), [(0.0, 2e-4), (0.0, 6e-3), (2e-5, 2e-5), (1.0, 1.0), (math.nan, 0.0)]
    )
    def test_arithmetic_that_slips_decides_nothing_about_parallel_work(self, monkeypatch, scaled, unscaled):
        """More than rounding explains is no gross difference, and where scaled parts differ the fault is ours."""
        module = lab.load("cost")
        found = {"sqrt_dk": scaled, "unscaled": unscaled}
        monkeypatch.setattr(module, "_parts", lambda config, rule, *_: Estimate.exact(found[rule]))
        result = lab.run("cost", **REDUCED["cost"])
        verdict = result.verdict(25)
        assert verdict.outcome == OPEN
        assert verdict.reason.startswith("Not every number lies where")
        assert "last bit" not in verdict.measured or scaled == 0
        assert "the same output" not in result.summary

    @pytest.mark.parametrize("rule", ["sqrt_dk", "unscaled"])
    def test_what_rounding_explains_is_no_difference(self, monkeypatch, rule):
        """Another order of summation in float32, as processors and numbers of threads bring: unscaled up to 1e-5."""
        module = lab.load("cost")
        off = {"sqrt_dk": 0.0, "unscaled": 0.0, rule: 1.1e-5 if rule == "unscaled" else 1e-6}
        monkeypatch.setattr(module, "_parts", lambda config, rule, *_: Estimate.exact(off[rule]))
        verdict = lab.run("cost", **REDUCED["cost"]).verdict(25)
        assert verdict.outcome == FAILS
        assert "differ" in verdict.measured

    def test_lengths_at_which_memory_cannot_be_told(self):
        verdict = lab.run("cost", lengths=(16, 32)).verdict(25)
        assert verdict.outcome == FAILS
        assert "storing the scores" not in verdict.reason

    def test_weights_that_do_not_underflow(self):
        assert lab.run("before-after", d_k=(1,), repeats=3).verdict(24).outcome == FAILS


def test_knobs_have_words():
    for name in lab.QUESTIONS:
        import dataclasses

        for field in dataclasses.fields(lab.load(name).Config):
            assert field.metadata["means"], (name, field.name)


def test_every_claim_belongs_to_a_question():
    judged = {claim for question in lab.QUESTIONS.values() for claim in question.claims}
    assert judged == set(lab.CLAIMS) == set(range(1, 26))
