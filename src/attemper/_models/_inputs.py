"""Something to run a transformers model on: a text, ids, images, sounds."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

from .._errors import OptionError, explain
from .._gguf import Tokenizer
from ._target import MASKED_SHARE, SAMPLES, SEQUENCES, SHORTEST, TOKENS, Loaded, Wanted
from ._text import sample_text


def with_inputs(torch: Any, model: Any, tokenizer: Tokenizer | None, wanted: Wanted, notes: tuple[str, ...]) -> Loaded:
    """Inputs of the kind that the model takes, and labels where its own loss is what it was trained on."""
    config = model.config
    config.use_cache = False  # nothing is generated: a cache would only hold memory
    takes = inspect.signature(model.forward).parameters
    name = type(model).__name__
    sampled = model.main_input_name in ("pixel_values", "input_features", "input_values")
    if sampled and (wanted.text is not None or wanted.tokens is not None):
        fix = "Leave --text and --tokens out."
        raise OptionError(explain(f"{name} takes no text: its input is {model.main_input_name}.", fix))
    generator = torch.Generator().manual_seed(0)
    if sampled:
        count = wanted.sequences or SAMPLES
        kwargs, words = _samples(torch, model, count, generator)
        notes += (f"{words.capitalize()} stand in for data: no loss, no pressure.",)
        if config.is_encoder_decoder and "decoder_input_ids" in takes:
            few = replace(wanted, text=None, tokens=16, sequences=count)
            ids, _, _ = _ids(torch, model, tokenizer, few, generator)
            kwargs["decoder_input_ids"] = ids
    elif "input_ids" in takes:
        ids, words, more = _ids(torch, model, tokenizer, wanted, generator)
        notes += more
        kwargs = {"input_ids": ids}
        if config.is_encoder_decoder and "decoder_input_ids" in takes:
            start = config.decoder_start_token_id if config.decoder_start_token_id is not None else 0
            kwargs["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
            notes += ("Its decoder reads the text that its encoder reads: no loss, no pressure.",)
        elif "labels" in takes and name.endswith(("ForCausalLM", "LMHeadModel")):
            kwargs["labels"] = ids
        elif "labels" in takes and name.endswith("ForMaskedLM"):
            kwargs |= _masked(torch, ids, tokenizer, generator)
        # Two towers, one for the text and one for the image: CLIP and its kin.
        if "pixel_values" in takes and hasattr(model, "logit_scale"):
            pictures, what = _samples(torch, model, len(ids), generator)
            kwargs |= pictures
            words = f"{words} and {what}"
    else:
        fix = "Write a factory that returns (model, inputs), and pass package.module:factory."
        takes_what = ", ".join(takes)
        raise OptionError(explain(f"No inputs can be made for {name}: its forward takes {takes_what}.", fix))
    place, dtype = model.device, model.dtype
    kwargs = {key: x.to(place, dtype if x.is_floating_point() else None) for key, x in kwargs.items()}
    # No weights were trained on random ids: the loss on them is no evidence of a wrong temperature.
    trained = False if tokenizer is None and "labels" in kwargs else None
    return Loaded(
        name=name,
        model=model,
        kwargs=kwargs,
        inputs=words,
        made=True,
        trained=trained,
        notes=notes,
        tokenizer=tokenizer,
    )


def _ids(
    torch: Any, model: Any, tokenizer: Tokenizer | None, wanted: Wanted, generator: Any
) -> tuple[Any, str, tuple[str, ...]]:
    """Token ids (sequences, tokens), what they are in words, and notes."""
    vocabulary = _text_config(model.config).vocab_size
    limit = longest(model.config)
    if wanted.tokens is not None and limit is not None and wanted.tokens > limit:
        fix = f"Give --tokens {limit} or fewer."
        raise OptionError(explain(f"{type(model).__name__} takes at most {limit} tokens, not {wanted.tokens}.", fix))
    room = min(wanted.tokens or TOKENS, limit or TOKENS if wanted.tokens is None else wanted.tokens)
    if tokenizer is None:
        if wanted.text is not None:
            fix = "Put the tokenizer's files beside the weights, or leave --text out."
            raise OptionError(explain("A text needs a tokenizer, and this model comes without one.", fix))
        count = wanted.sequences or SAMPLES
        ids = torch.randint(vocabulary, (count, room), generator=generator)
        words = f"{_sequences(count)} of {room} random token ids"
        return (
            ids,
            words,
            ("No tokenizer: it ran on random token ids, which show the scale but not the text's effect.",),
        )
    text = sample_text() if wanted.text is None else wanted.text
    source = "the sample text" if wanted.text is None else "the text"
    found = tokenizer.encode(text)
    if not found or max(found) >= vocabulary:
        fix = "Use the tokenizer that the model was trained with."
        most = max(found, default=0)
        headline = f"The tokenizer gives ids up to {most}, but the model's vocabulary has {vocabulary} tokens."
        raise OptionError(explain(headline, fix))
    around = len(tokenizer.before) + len(tokenizer.after)
    cuts = _cut(
        len(found),
        replace(wanted, tokens=None if wanted.tokens is None else wanted.tokens - around),
        room - around,
        around,
    )
    rows = [[*tokenizer.before, *found[start:stop], *tokenizer.after] for start, stop in cuts]
    words = f"{_sequences(len(rows))} of {len(rows[0])} tokens of {source}"
    return torch.tensor(rows), words, ()


def _cut(length: int, wanted: Wanted, room: int, around: int = 0) -> list[tuple[int, int]]:
    """Where to cut `length` tokens into equal sequences of at most `room`, without padding, beside `around` others."""
    if length < 2:
        tokens = f"{length} token{'' if length == 1 else 's'}"
        raise OptionError(explain(f"The text has {tokens}, and attention compares two.", "Give a longer text."))
    if room < 1:
        asked = f"{room + around} token{'' if room + around == 1 else 's'}"
        headline = f"A sequence of {asked} has room for 0 of the text."
        raise OptionError(explain(headline, "Give more --tokens."))
    if wanted.sequences is not None:
        size = min(room, length // wanted.sequences)
        if size < 2 or (wanted.tokens is not None and size < room):
            fits = length // (wanted.tokens or 2)
            fix = f"Give a longer text, or --sequences {max(fits, 1)}."
            asked = f"{_sequences(wanted.sequences)} of {wanted.tokens or 2}"
            raise OptionError(explain(f"The text has {length} tokens, too few for {asked}.", fix))
        count = wanted.sequences
    else:
        size, count = min(room, length), max(1, min(SEQUENCES, length // room))
        if count == 1 and wanted.tokens is None and length // 2 >= SHORTEST:
            size, count = min(room, length // 2), 2
    return [(i * size, (i + 1) * size) for i in range(count)]


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _text_config(config: Any) -> Any:
    """The part of a configuration that describes the reader of tokens."""
    return getattr(config, "text_config", None) or config.get_text_config()


def longest(config: Any) -> int | None:
    """How many tokens a sequence may have, where the configuration says."""
    text = _text_config(config)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    # These count positions from the padding id upwards.
    offset = re.search("roberta|camembert|mpnet|longformer|xlm-|esm|data2vec-text", text.model_type)
    return limit - (text.pad_token_id or 0) - 1 if offset else limit


def _masked(torch: Any, ids: Any, tokenizer: Tokenizer | None, generator: Any) -> dict[str, Any]:
    """The training task: some tokens hidden, and asked for. Without a mask token, every token is asked for."""
    if tokenizer is None or tokenizer.mask is None:
        return {"labels": ids}
    hidden = torch.rand(ids.shape, generator=generator) < MASKED_SHARE
    hidden[:, : len(tokenizer.before)] = False
    hidden[:, ids.shape[1] - len(tokenizer.after) :] = False
    hidden[:, len(tokenizer.before)] = True  # a row with nothing to guess would have no loss
    return {
        "input_ids": torch.where(hidden, tokenizer.mask, ids),
        "labels": torch.where(hidden, ids, -100),
    }


def _samples(torch: Any, model: Any, count: int, generator: Any) -> tuple[dict[str, Any], str]:
    """Images or sounds of a fixed seed: smooth patterns with a little noise, mean 0 and spread 1."""
    config, main = model.config, model.main_input_name
    if main == "input_features":
        frames = 2 * config.max_source_positions  # the first convolutions halve them
        shape: tuple[int, ...] = (count, config.num_mel_bins, frames)
        return {main: _smooth(torch, shape, generator)}, f"{count} synthetic sounds"
    if main == "input_values":
        spectrogram = hasattr(config, "num_mel_bins")
        shape = (count, config.max_length, config.num_mel_bins) if spectrogram else (count, 16_000)
        return {main: _smooth(torch, shape, generator)}, f"{count} synthetic sounds"
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    frames_of = (config.num_frames,) if hasattr(config, "num_frames") else ()
    shape = (count, *frames_of, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": _smooth(torch, shape, generator)}, f"{count} synthetic images"


def _smooth(torch: Any, shape: tuple[int, ...], generator: Any) -> Any:
    """Waves along the last two axes, a little noise."""
    rows = torch.linspace(0, 1, shape[-2] if len(shape) > 2 else 1)[:, None]
    columns = torch.linspace(0, 1, shape[-1])
    field = torch.zeros(shape)
    for _ in range(6):
        down, along, phase, height = (torch.rand((*shape[:-2], 1, 1), generator=generator) for _ in range(4))
        wave = (1 + 5 * down) * rows + (1 + 5 * along) * columns + phase
        field = field + height * torch.sin(2 * torch.pi * wave).reshape(shape if len(shape) > 2 else (-1, shape[-1]))
    field = field + 0.1 * torch.randn(shape, generator=generator)
    return (field - field.mean()) / field.std()
