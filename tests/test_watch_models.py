"""Watching Hugging Face models: sites, bits, caches, padding and the registry of attention functions."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.nn import functional  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from attemper import check, watch  # noqa: E402
from attemper._watch._declared import UNSCALED  # noqa: E402

# Importing the models meets a decorator that torch itself has outlived.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

BATCH, LENGTH = 3, 9
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
IDS = torch.randint(5, 60, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def gpt2(**more):
    config = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32, "bos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, eos_token_id=2, **more))


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **more))


def bert(**more):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **more))


def t5(**more):
    config = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    more = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, **more}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, **more))


def opt(**more):
    config = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    return transformers.OPTForCausalLM(transformers.OPTConfig(ffn_dim=32, word_embed_proj_dim=32, **config, **more))


def whisper(**more):
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = {"d_model": 32, "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 12}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**config, **sides, **tokens, **more))


SIZES = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}


def gemma2(**more):
    config = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 25, "sliding_window": 4}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config, **more))


def qwen3(**more):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8, **more))


def vit(**more):
    config = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **config, **more))


def swinv2(**more):
    config = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "image_size": 16, "patch_size": 2}
    return transformers.Swinv2ForImageClassification(transformers.Swinv2Config(**config, window_size=4, **more))


def gptoss(**more):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 4}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**GROUPED, **experts, **more))


def layers(pattern, n=2):
    return [pattern.format(i) for i in range(n)]


YARN = 0.1 * math.log(32) + 1
"""What gpt-oss's rotary embedding, stretched 32 times, multiplies q and k by."""

TEXT = {"input_ids": IDS, "labels": IDS}
ROOT8 = 8**-0.5

# model: (inputs, paths, effective scale, declared scale, heads)
ZOO = {
    gpt2: (TEXT, layers("transformer.h.{}.attn"), ROOT8, None, 4),
    llama: (TEXT, layers("model.layers.{}.self_attn"), ROOT8, None, 4),
    bert: (TEXT, layers("bert.encoder.layer.{}.attention.self"), ROOT8, None, 4),
    t5: (
        {"input_ids": IDS, "labels": IDS[:, :4].contiguous()},
        layers("encoder.block.{}.layer.0.SelfAttention")
        + [f"decoder.block.{i}.layer.{j}" for i in range(2) for j in ("0.SelfAttention", "1.EncDecAttention")],
        1.0,
        1.0,
        4,
    ),
    opt: (TEXT, layers("model.decoder.layers.{}.self_attn"), ROOT8, None, 4),
    whisper: (
        {"input_features": torch.randn(BATCH, 8, 24), "labels": IDS},
        [
            "model.encoder.layers.0.self_attn",
            "model.decoder.layers.0.self_attn",
            "model.decoder.layers.0.encoder_attn",
        ],
        ROOT8,
        None,
        4,
    ),
    gemma2: (TEXT, layers("model.layers.{}.self_attn"), 0.2, 0.2, 4),
    qwen3: (TEXT, layers("model.layers.{}.self_attn"), None, None, 4),
    vit: ({"pixel_values": PIXELS, "labels": torch.tensor([0, 1, 1])}, None, ROOT8, None, 4),
    swinv2: ({"pixel_values": PIXELS, "labels": torch.tensor([0, 1, 1])}, None, None, None, None),
    gptoss: (TEXT, layers("model.layers.{}.self_attn"), ROOT8 * YARN**2, ROOT8 * YARN**2, 4),
}
ONLY_EAGER = (t5, gemma2, swinv2, gptoss)


def tensors_of(output):
    return [x for x in output.to_tuple() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    ("make", "attention"),
    [(make, how) for make in ZOO for how in ("sdpa", "eager") if how == "eager" or make not in ONLY_EAGER],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_zoo(make, attention):
    given, paths, scale, declared, heads = ZOO[make]
    model = make(attn_implementation=attention).eval()
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    with torch.no_grad():
        plain = model(**given)
        with watch(model, every=1) as monitor:
            output = model(**given)
    assert (dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)) == before
    for mine, theirs in zip(tensors_of(output), tensors_of(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert not monitor.unseen
    if paths is not None:
        assert list(monitor.vitals) == paths
    assert len(monitor.vitals) == len(paths or "12")
    for vitals in monitor.vitals.values():
        site = vitals.site
        assert np.isfinite(vitals.entropy).all()
        assert site.declared_scale == pytest.approx(declared)
        assert site.qk_norm == (make in (qwen3, swinv2))
        if scale is not None:
            assert site.effective_scale == pytest.approx(scale, rel=1e-3)
            assert site.heads == heads
    if make is swinv2:
        assert [v.site.heads for v in monitor.vitals.values()] == [2, 4]
    if make in (gpt2, llama, qwen3, opt):
        # Causal: rows that see 2 to LENGTH keys.
        assert vitals.visible_keys == pytest.approx([(LENGTH + 2) / 2] * 4)
    if make is gemma2:
        windowed = [min(i, 4) for i in range(2, LENGTH + 1)]
        assert monitor.vitals[paths[0]].visible_keys == pytest.approx([np.mean(windowed)] * 4)
        assert monitor.vitals[paths[0]].site.softcap == 50.0
    if make is gptoss:
        assert (vitals.sink_mass > 0.01).all()


@pytest.mark.parametrize(
    ("make", "attention"),
    [(make, how) for make in (gpt2, llama, bert, whisper) for how in ("sdpa", "eager")] + [(t5, "eager")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_pressure_is_what_the_loss_does_when_every_scale_moves(make, attention):
    """By a finite difference of the whole model, through the weights and biases that make q."""
    given = ZOO[make][0]
    model = make(attn_implementation=attention).eval()
    with watch(model, every=1) as monitor:
        model(**given).loss.backward()
    measured = sum(float(vitals.total_pressure[0]) for vitals in monitor.vitals.values())
    model.double()
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    weights = [
        parameter
        for name, parameter in model.named_parameters()
        if name.split(".")[-2] in ("q_proj", "query", "q", "c_attn")
    ]
    assert weights
    losses = []
    # The norms of Llama round to float32 whatever they are given, which a smaller step would drown in.
    step = 0.02 if make is llama else 1e-3
    for factor in (math.exp(step), math.exp(-step)):
        kept = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w in weights:
                if w.shape[-1] == 96:
                    w[..., :32] *= factor  # gpt2's one projection for all three
                else:
                    w *= factor
            output = model(**given)
            if make in (gpt2, llama):
                # Their own loss is rounded to float32.
                logits, labels = output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
                losses.append(float(functional.cross_entropy(logits, labels)))
            else:
                losses.append(float(output.loss))
            for w, was in zip(weights, kept, strict=True):
                w.copy_(was)
    slope = (losses[0] - losses[1]) / (2 * step)
    assert abs(slope) > 1e-7
    assert measured == pytest.approx(slope, rel=0.02, abs=1e-9)


@pytest.mark.parametrize("make", [llama, t5], ids=lambda make: make.__name__)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generation_with_a_cache_gives_the_same_tokens(make, attention):
    model = make(attn_implementation=attention).eval()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    with watch(model, every=1) as monitor:
        again = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert torch.equal(again, plain)
    assert not monitor.unseen
    path = "model.layers.1.self_attn" if make is llama else "decoder.block.1.layer.0.SelfAttention"
    samples = [sample.vitals[path] for sample in monitor.history]
    assert len(samples) == 5
    first = LENGTH if make is llama else 1
    for step, vitals in enumerate(samples[1:], 1):
        assert vitals.rows.tolist() == [BATCH] * 4
        assert vitals.visible_keys.tolist() == [first + step] * 4
    if make is t5:
        cross = [sample.vitals["decoder.block.1.layer.1.EncDecAttention"] for sample in monitor.history]
        assert all(vitals.visible_keys.tolist() == [LENGTH] * 4 for vitals in cross)


# -- the registry ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("attemper_tests::hidden_attention", mutates_args=())
def hidden_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def through_an_operator(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    causal = attention_mask is None and query.shape[2] > 1
    y = torch.ops.attemper_tests.hidden_attention(query, key, value, attention_mask, causal, scaling)
    return y.transpose(1, 2).contiguous(), None


@pytest.fixture
def registered():
    name = "attemper_tests"
    transformers.AttentionInterface.register(name, through_an_operator)
    transformers.AttentionMaskInterface.register(name, transformers.masking_utils.sdpa_mask)
    yield name
    del ALL_ATTENTION_FUNCTIONS._global_mapping[name]
    del transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]


def test_an_attention_of_the_users_own_is_read_through_the_registry(registered):
    model = llama(attn_implementation="sdpa").eval()
    with torch.no_grad(), watch(model, every=1) as wanted:
        model(**TEXT)
    model.set_attn_implementation(registered)
    with torch.no_grad():
        plain = model(**TEXT)
        with watch(model, every=1) as monitor:
            output = model(**TEXT)
    assert torch.equal(output.logits, plain.logits)
    assert not monitor.unseen
    assert list(monitor.vitals) == list(wanted.vitals)
    for path, vitals in monitor.vitals.items():
        assert vitals.site.kind == registered
        assert (vitals.site.heads, vitals.site.kv_heads) == (4, 2)
        for name in ("rows", "entropy", "max_logit", "visible_keys"):
            np.testing.assert_allclose(getattr(vitals, name), getattr(wanted.vitals[path], name), rtol=1e-4)
        assert vitals.site.effective_scale == pytest.approx(ROOT8, rel=1e-3)
    assert ALL_ATTENTION_FUNCTIONS[registered] is through_an_operator


def test_the_registry_is_as_before_after_an_error():
    model = llama().eval()
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    with watch(model, every=1), pytest.raises(IndexError):
        model(torch.full((1, 3), 1000))
    assert (dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)) == before


# -- padding -----------------------------------------------------------------------------------------------------------

LEFT, RIGHT = torch.ones(2, BATCH, LENGTH, dtype=torch.long)
LEFT[1, :3] = 0
RIGHT[1, -3:] = 0
PADDED = 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [llama, bert, gpt2], ids=lambda make: make.__name__)
def test_rows_of_padding_are_left_out(make, side, attention):
    model = make(attn_implementation=attention).eval()
    mask = LEFT if side == "left" else RIGHT
    with torch.no_grad():
        plain = model(IDS, attention_mask=mask).logits
        with watch(model, every=1) as monitor:
            assert torch.equal(model(IDS, attention_mask=mask).logits, plain)
    assert not monitor.unseen
    for vitals in monitor.vitals.values():
        assert vitals.rows.tolist() == [BATCH * LENGTH - PADDED] * 4
        assert vitals.rows_without_keys.tolist() == [0] * 4
        assert (vitals.padding_weight < 1e-6).all()
        # What each row sees is what the unpadded sequence would show it.
        full = LENGTH - PADDED
        if make is bert:
            seen = [LENGTH] * (2 * LENGTH) + [full] * full
        else:
            seen = [*range(2, LENGTH + 1)] * 2 + [*range(2, full + 1)]
        assert vitals.visible_keys == pytest.approx([np.mean(seen)] * 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_ignores_its_mask_is_found_out(attention, monkeypatch):
    model = bert(attn_implementation=attention).eval()
    inner = model.bert.forward
    monkeypatch.setattr(model.bert, "forward", lambda *args, attention_mask=None, **kwargs: inner(*args, **kwargs))
    with torch.no_grad(), watch(model, every=1) as monitor:
        model(input_ids=IDS, attention_mask=RIGHT)
    for vitals in monitor.vitals.values():
        # Nearly uniform weights: a third of the keys of one sequence in three.
        rows = BATCH * LENGTH - PADDED
        share = PADDED / LENGTH * (LENGTH - PADDED) / rows
        assert vitals.padding_weight == pytest.approx([share] * 4, rel=0.5)
        assert vitals.rows.tolist() == [rows] * 4
    assert any(finding.rule == "mask-leak" for finding in monitor.findings)


def test_padding_of_an_encoder_does_not_leave_out_rows_of_the_decoder():
    model = t5().eval()
    with torch.no_grad(), watch(model, every=1) as monitor:
        model(input_ids=IDS, attention_mask=RIGHT, decoder_input_ids=IDS)
    rows = {path: vitals.rows[0] for path, vitals in monitor.vitals.items()}
    assert rows["encoder.block.0.layer.0.SelfAttention"] == BATCH * LENGTH - PADDED
    assert rows["decoder.block.0.layer.0.SelfAttention"] == BATCH * LENGTH
    cross = monitor.vitals["decoder.block.0.layer.1.EncDecAttention"]
    assert cross.rows[0] == BATCH * LENGTH
    # As long as the decoder, the encoder's keys cannot be told from the decoder's own, and nothing is said of them.
    assert np.isnan(cross.padding_weight).all()


# -- scales that are not 1/√d_k by design ------------------------------------------------------------------------------


def made(kind, config, **settings):
    """A model of a class that this version of transformers may not have yet."""
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


LATER = {**GROUPED, "head_dim": 8, "pad_token_id": 0}
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def llama4():
    return made("Llama4ForCausalLM", "Llama4TextConfig", **LATER, intermediate_size_mlp=32, num_local_experts=2), TEXT


def gemma3n():
    some = {**LATER, **PER_LAYER, **BOTH, "intermediate_size": [32, 32], "activation_sparsity_pattern": [0.0, 0.0]}
    return made("Gemma3nForCausalLM", "Gemma3nTextConfig", **some, laurel_rank=4, altup_num_inputs=2), TEXT


def gemma4():
    return made("Gemma4ForCausalLM", "Gemma4TextConfig", **LATER, **PER_LAYER, **BOTH, global_head_dim=8), TEXT


def pix2struct():
    side = {"hidden_size": 32, "d_ff": 32, "d_kv": 8}
    text = {**side, "vocab_size": 64, "num_layers": 1, "num_heads": 4}
    vision = {**side, "patch_embed_hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = made("Pix2StructForConditionalGeneration", "Pix2StructConfig", text_config=text, vision_config=vision)
    places = torch.arange(1.0, 5.0).repeat(2, BATCH, 1).permute(1, 2, 0)
    patches = torch.cat([places, torch.randn(BATCH, 4, 12)], -1)
    return model, {"flattened_patches": patches, "decoder_input_ids": IDS}


def dia():
    own = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    side = {**own, "hidden_size": 32, "intermediate_size": 32}
    cross = {"cross_hidden_size": 32, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4}
    encoder = {**side, "vocab_size": 64}
    model = made("DiaModel", "DiaConfig", encoder_config=encoder, decoder_config={**side, **cross, "cross_head_dim": 8})
    return model, {"input_ids": IDS, "decoder_input_ids": torch.randint(0, 60, (BATCH, 5, 9))}


def deberta():
    relative = {"relative_attention": True, "pos_att_type": "c2p|p2c", "max_relative_positions": 16}
    return made("DebertaV2Model", "DebertaV2Config", **SMALL, **relative), {"input_ids": IDS}


def deepseek():
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    yarn = {"rope_type": "yarn", "factor": 40.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rotary = {"rope_parameters": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}}
    some = {**SMALL, **ranks, **experts, **rotary, "num_key_value_heads": 4, "moe_intermediate_size": 32}
    return made("DeepseekV3ForCausalLM", "DeepseekV3Config", **some), TEXT


def cvt():
    model = made("CvtModel", "CvtConfig", embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3])
    return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def scale_findings(model, given):
    return [finding for finding in check(model, **given) if finding.rule in ("scale-missing", "scale-wrong")]


def spoil(model):
    """What attention modules hold as their scale, doubled: it may be the fault, and is no witness."""
    attention = [module for module in model.modules() if "Attention" in type(module).__name__]
    held = [
        (m, name) for m in attention for name in ("scaling", "scale") if isinstance(vars(m).get(name), (int, float))
    ]
    for module, name in held:
        setattr(module, name, 2 * getattr(module, name))
    return bool(held)


@pytest.mark.parametrize(
    "make", [llama4, gemma3n, gemma4, pix2struct, dia, deberta, deepseek, cvt], ids=lambda make: make.__name__
)
def test_a_scale_of_their_own_is_right_and_any_other_is_found(make):
    model, given = make()
    model.eval()
    assert not scale_findings(model, given)
    assert spoil(model) == (make is not deberta)
    severities = {finding.severity for finding in scale_findings(model, given)}
    assert severities == (set() if make is deberta else {"warning"})


def families_without_a_scale():
    """Of every family of transformers with a module that sets `self.scaling = 1.0`, the model_types of its parts."""
    for code in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        ones = re.search(r"^\s+self\.scal(?:ing|e) = 1(?:\.0)?$", code.read_text(encoding="utf-8"), re.MULTILINE)
        if ones is None:
            continue
        said = "".join(file.read_text(encoding="utf-8") for file in code.parent.glob("configuration_*.py"))
        yield code.parent.name, set(re.findall(r'^    model_type(?:: str)? = "([^"]+)"', said, re.MULTILINE))


SCALED_ELSEWHERE = {"gpt2", "decision_transformer", "esm", "evolla", "sew_d"}
"""By flags of the configuration, on q before the rotary embedding, and a dropout's."""


def test_every_family_that_leaves_the_scale_out_is_known():
    unknown = {
        family
        for family, kinds in families_without_a_scale()
        if family not in SCALED_ELSEWHERE and not kinds & UNSCALED
    }
    assert not unknown
