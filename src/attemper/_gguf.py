"""A GGUF file as a Llama-shaped model of transformers and its tokenizer: what llama.cpp and its kin pack weights in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import OptionError, brief, explain
from ._progress import Progress, silent


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A text as ids, where each stands in it, what its model expects around a sequence, the id that hides a token."""

    encode: Callable[[str], list[int]]
    spans: Callable[[str], list[tuple[int, int]]] | None = None
    """The first character of each id of `encode` and the one behind its last; None where that cannot be told."""
    name: Callable[[int], str] = str
    """What to call an id."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    mask: int | None = None


def read_gguf(path: Path, report: Progress = silent) -> tuple[Any, Tokenizer]:
    """A Llama-shaped model in float32 and its tokenizer, in one pass over a GGUF file."""
    import gguf
    import torch
    import transformers

    stage = f"reading {path.stem}"
    report(stage, 0, 1)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        fix = "Install or download it again."
        raise OptionError(explain(f"{path.name} is not a whole GGUF file ({error}).", fix)) from error
    meta = {name: part.contents() for name, part in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _gguf_config(transformers, path, meta, tensors)
    # On the meta device nothing is initialised that the file then overwrites.
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {}
    for done, (name, tensor) in enumerate(tensors.items()):
        report(stage, done, len(tensors))
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        # llama.cpp turns neighbouring rows of q and k together, transformers row i and row i + head_dim/2.
        if ".attn_q." in name or ".attn_k." in name:
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        # What the file holds in float32 comes as a read-only map of it: that alone is copied.
        state[_gguf_name(path, name)] = torch.from_numpy(np.require(weight, np.float32, ["C", "W"]))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        fix = "Install or download it again."
        raise OptionError(explain(f"{path.name} does not hold the weights its header promises.", fix)) from error
    model.tie_weights()
    # Its frequencies are no weights: made anew, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    report(stage, len(tensors), len(tensors))
    return model.eval(), _gguf_tokenizer(path, meta)


def _gguf_config(transformers: Any, path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    kind = meta.get("general.architecture")
    scaled = meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors
    if kind != "llama" or scaled:
        odd = "a rotary embedding with its own scaling" if kind == "llama" else f"architecture {brief(kind)}"
        fix = "Give the Hugging Face directory of the model instead."
        raise OptionError(explain(f"{path.name} has {odd}, which the GGUF reader does not know.", fix))
    heads = meta["llama.attention.head_count"]
    width = meta["llama.embedding_length"]
    return transformers.LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),  # GGUF writes shapes back to front
        hidden_size=width,
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=meta.get("llama.attention.key_length", width // heads),
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta.get("llama.rope.freq_base", 10_000.0)},
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=meta.get("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings="output.weight" not in tensors,
    )


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_name(path: Path, name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight."""
    *block, part, kind = name.split(".")
    if part not in _GGUF_NAMES:
        fix = "Give the Hugging Face directory of the model instead."
        raise OptionError(explain(f"{path.name} has a tensor {name}, which the GGUF reader does not know.", fix))
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{_GGUF_NAMES[part]}.{kind}"


def _gguf_tokenizer(path: Path, meta: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE that the file describes."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as BytePairs

    model, cut = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or cut not in ("default", "gpt-2", "smollm"):
        fix = "Give the Hugging Face directory of the model instead."
        headline = f"{path.name} has a tokenizer {model}/{cut}, which the GGUF reader does not know."
        raise OptionError(explain(headline, fix))
    words = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    bpe = BytePairs(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytewise])
    bpe.decoder = decoders.ByteLevel()
    control = 3  # the number that GGUF gives to tokens which never stand for text
    kinds = meta.get("tokenizer.ggml.token_type", ())
    specials = (word for word, kind in zip(words, kinds, strict=False) if kind == control)
    bpe.add_special_tokens([AddedToken(word, normalized=False) for word in specials])
    first = meta.get("tokenizer.ggml.bos_token_id") if meta.get("tokenizer.ggml.add_bos_token", False) else None
    return Tokenizer(
        encode=lambda text: list(bpe.encode(text, add_special_tokens=False).ids),
        spans=lambda text: list(bpe.encode(text, add_special_tokens=False).offsets),
        name=lambda token: str(bpe.id_to_token(token)),
        before=() if first is None else (first,),
    )
