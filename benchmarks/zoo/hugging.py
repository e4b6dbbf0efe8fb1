"""Architectures of Hugging Face transformers at random initialisation: tiny, but with heads as wide as real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .specimen import Architecture, Place, Specimen

VOCABULARY = 256
LENGTH = 48


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family is built, run and taken apart."""

    model: str
    """The class of the model, by name, so that nothing is imported before it is wanted."""
    config: str
    settings: dict[str, Any]
    attention: str
    """The class of its attention module."""
    heads: int = 4
    head_dim: int = 32
    model_dim: int = 128
    kv_heads: int | None = None
    inputs: str = "text"
    ways: tuple[str, ...] = ("eager", "sdpa")
    causal: bool = True
    padding: str | None = None
    """"left" or "right" for a padded batch."""
    normalised: bool = False
    declared: bool = False
    mask_4d: bool = True
    """Whether it takes the caller's own (batch, 1, queries, keys) mask."""
    labels: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

LLAMA = Family(
    model="LlamaForCausalLM",
    config="LlamaConfig",
    settings={**TEXT, "num_key_value_heads": 2},
    attention="LlamaAttention",
    kv_heads=2,
)
BERT = Family(
    model="BertForMaskedLM",
    config="BertConfig",
    settings=TEXT,
    attention="BertSelfAttention",
    causal=False,
    padding="right",
)
GPT_2 = Family(model="GPT2LMHeadModel", config="GPT2Config", settings=GPT2, attention="GPT2Attention")

FAMILIES: dict[str, Family] = {
    "gpt2": GPT_2,
    "gpt2-padded": replace(GPT_2, padding="left", labels=False),
    "gpt2-inverse-layer": replace(
        GPT_2, settings={**GPT2, "scale_attn_by_inverse_layer_idx": True}, declared=True, labels=False
    ),
    "gpt2-unscaled": replace(GPT_2, settings={**GPT2, "scale_attn_weights": False}, declared=True),
    "llama": LLAMA,
    "llama-padded": replace(LLAMA, padding="left"),
    "llama-wide": replace(
        LLAMA,
        settings={**TEXT, "num_attention_heads": 2, "num_key_value_heads": 1},
        heads=2,
        kv_heads=1,
        head_dim=64,
        labels=False,
    ),
    "opt": Family(
        model="OPTForCausalLM",
        config="OPTConfig",
        settings={**TEXT, "ffn_dim": 256, "word_embed_proj_dim": 128},
        attention="OPTAttention",
        padding="left",
        # Its positions are counted from the mask, which must have two axes.
        mask_4d=False,
    ),
    "bert": BERT,
    "bert-wide": replace(BERT, settings={**TEXT, "num_attention_heads": 2}, heads=2, head_dim=64, labels=False),
    "t5": Family(
        model="T5ForConditionalGeneration",
        config="T5Config",
        settings={
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        attention="T5Attention",
        inputs="seq2seq",
        padding="right",
        mask_4d=False,
        declared=True,
    ),
    "whisper": Family(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        settings={
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "num_mel_bins": 16,
            "max_source_positions": 50,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        attention="WhisperAttention",
        inputs="audio",
        heads=2,
        head_dim=64,
        mask_4d=False,
    ),
    "vit": Family(
        model="ViTForImageClassification",
        config="ViTConfig",
        settings={
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": 32,
            "patch_size": 4,
            "num_labels": 10,
        },
        attention="ViTAttention",
        inputs="image",
        causal=False,
        mask_4d=False,
    ),
    "gemma": Family(
        model="GemmaForCausalLM",
        config="GemmaConfig",
        settings={**TEXT, "num_key_value_heads": 1, "head_dim": 32},
        attention="GemmaAttention",
        kv_heads=1,
    ),
    "gemma2": Family(
        model="Gemma2ForCausalLM",
        config="Gemma2Config",
        # As in the 27B model, whose scale is of its width over its heads and not of head_dim.
        settings={**TEXT, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 16},
        attention="Gemma2Attention",
        kv_heads=2,
        ways=("eager",),
        declared=True,
    ),
    "gemma3": Family(
        model="Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        settings={**TEXT, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 16},
        attention="Gemma3Attention",
        kv_heads=2,
        normalised=True,
        declared=True,
    ),
    "granite": Family(
        model="GraniteForCausalLM",
        config="GraniteConfig",
        settings={
            **TEXT,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
        },
        attention="GraniteAttention",
        heads=2,
        kv_heads=1,
        head_dim=64,
        declared=True,
    ),
    "gpt-neo": Family(
        model="GPTNeoForCausalLM",
        config="GPTNeoConfig",
        settings={
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
            "intermediate_size": 256,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        attention="GPTNeoSelfAttention",
        ways=("eager",),
        padding="left",
        declared=True,
    ),
    "swinv2": Family(
        model="Swinv2ForImageClassification",
        config="Swinv2Config",
        settings={
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 64,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 10,
            "drop_path_rate": 0.0,
        },
        attention="Swinv2SelfAttention",
        inputs="image",
        ways=("eager",),
        causal=False,
        normalised=True,
        mask_4d=False,
        declared=True,
    ),
    "qwen2": Family(
        model="Qwen2ForCausalLM",
        config="Qwen2Config",
        settings={**TEXT, "num_attention_heads": 2, "num_key_value_heads": 1},
        attention="Qwen2Attention",
        heads=2,
        kv_heads=1,
        head_dim=64,
        padding="left",
    ),
    "qwen3": Family(
        model="Qwen3ForCausalLM",
        config="Qwen3Config",
        settings={**TEXT, "num_key_value_heads": 2, "head_dim": 64},
        attention="Qwen3Attention",
        kv_heads=2,
        head_dim=64,
        normalised=True,
        labels=False,
    ),
}


def build(kind: Any, config: Any, way: str) -> Any:
    """A model at random initialisation; from_pretrained is the only public way to name the attention."""
    return kind._from_config(config, attn_implementation=way)  # noqa: SLF001


def way_of(model: Any) -> str:
    """Which attention a model uses: "eager", "sdpa", or a name that was registered."""
    return model.config._attn_implementation  # noqa: SLF001


def set_way(model: torch.nn.Module, name: str) -> None:
    """Change it under the model's feet, as code that patches models does."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name  # noqa: SLF001


def places(model: torch.nn.Module, family: Family) -> tuple[Place, ...]:
    found = []
    for path, module in model.named_modules():
        if type(module).__name__ != family.attention:
            continue
        heads, head_dim, model_dim = family.heads, family.head_dim, family.model_dim
        if family.attention == "Swinv2SelfAttention":
            # Each stage is wider than the one before.
            heads, head_dim, model_dim = module.num_attention_heads, module.attention_head_size, module.all_head_size
        found.append(Place(path=path, heads=heads, head_dim=head_dim, model_dim=model_dim, kv_heads=family.kv_heads))
    return tuple(found)


def inputs_of(family: Family) -> dict[str, Any]:
    batch = 4
    if family.inputs == "image":
        inputs = {"pixel_values": torch.randn(batch, 3, 32, 32)}
        labels = torch.randint(10, (batch,))
    elif family.inputs == "audio":
        inputs = {
            "input_features": torch.randn(batch, 16, 100),
            "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, 32)),
        }
        labels = torch.randint(3, VOCABULARY, (batch, 32))
    else:
        ids = torch.randint(3, VOCABULARY, (batch, LENGTH))
        inputs, labels = {"input_ids": ids}, ids.clone()
        if family.padding:
            lengths = torch.tensor([LENGTH, 40, 32, 24])[:, None]
            order = torch.arange(LENGTH)[None]
            mask = order < lengths if family.padding == "right" else order >= LENGTH - lengths
            inputs = {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}
            labels = labels.where(mask, -100)
        if family.inputs == "seq2seq":
            inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, 32))
            labels = torch.randint(3, VOCABULARY, (batch, 32))
    return {**inputs, **({"labels": labels} if family.labels else {})}


def strict(specimen: Specimen) -> Specimen:
    """With a mask of the caller's own, in which each row sees only what came before it: the first row sees nothing."""
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1).expand(4, 1, LENGTH, LENGTH)
    if way_of(specimen.model) == "eager":
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    else:
        mask = allowed
    return replace(specimen, kwargs={**specimen.kwargs, "attention_mask": mask})


def make(seed: int, *, family: Family, way: str) -> Specimen:
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, family.config)(**family.settings, **family.extra)
    model = build(getattr(transformers, family.model), config, way)
    return Specimen(
        name="",
        seed=seed,
        model=model,
        kwargs=inputs_of(family),
        has_loss=family.labels,
        places=places(model, family),
        # Padding on the right of a causal model is never seen by a real row.
        padded=family.padding is not None
        and (family.padding == "left" or not family.causal or family.inputs == "seq2seq"),
        normalised=family.normalised,
        declared=family.declared,
        strict_mask=strict if family.mask_4d else None,
    )


def architectures() -> list[Architecture]:
    """Each family in each of its ways."""
    return [
        Architecture(name=f"hf-{name}-{way}", make=maker(family, way), kind="hugging")
        for name, family in FAMILIES.items()
        for way in family.ways
    ]


def maker(family: Family, way: str) -> Callable[[int], Specimen]:
    return partial(make, family=family, way=way)
