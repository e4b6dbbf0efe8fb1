"""A Hugging Face directory, or an id on the hub."""

from __future__ import annotations

import difflib
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._errors import OptionError, explain
from .._gguf import Tokenizer
from .._progress import Progress
from ._inputs import with_inputs
from ._target import Loaded, Wanted, known_targets, need, unknown_target

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Without one of these, transformers would make a tokenizer with an empty vocabulary.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


def from_hugging_face(torch: Any, target: str, wanted: Wanted, place: Any, dtype: str, report: Progress) -> Loaded:
    transformers = need("transformers", "hf")
    directory = Path(target) if Path(target).is_dir() else None
    if directory is not None:
        _look_into(directory)
    stage = f"loading {directory.resolve().name if directory else target}"
    report(stage, 0, 1)
    with _explained(target, directory):
        config = transformers.AutoConfig.from_pretrained(target, trust_remote_code=False)
        builder = _architecture(transformers, config)
        model, info = builder.from_pretrained(
            target,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
        )
    model.to(place)
    report(stage, 1, 1)
    notes = []
    if missing := sorted(info["missing_keys"]):
        and_more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        notes.append(f"The checkpoint lacks {missing[0]}{and_more}: random numbers stand in.")
    tokenizer, why = _tokenizer(transformers, target, directory)
    if why:
        notes.append(why)
    loaded = with_inputs(torch, model.eval(), tokenizer, wanted, tuple(notes))
    return replace(loaded, name=directory.resolve().name if directory else target)


def _look_into(directory: Path) -> None:
    """Say what is missing before transformers says it at length."""
    names = {path.name for path in directory.iterdir()}
    if "config.json" not in names:
        fix = "Give the directory that save_pretrained wrote: config.json, the weights, and the tokenizer's files."
        if "adapter_config.json" in names:
            raise OptionError(
                explain(
                    f"{directory} holds an adapter, not a model.",
                    "Merge it into its base model first: peft's merge_and_unload, then save_pretrained.",
                )
            )
        if nested := sorted(str(path.parent) for path in directory.glob("*/config.json")):
            fix = f"Did you mean {nested[-1]}?"
        raise OptionError(explain(f"{directory} has no config.json.", fix))
    index = next((name for name in _WEIGHTS if name in names), None)
    if index is None:
        fix = "Put model.safetensors (or its shards and their index) beside config.json; save_pretrained writes it."
        raise OptionError(explain(f"{directory} has a config.json, but no weights.", fix))
    if index.endswith(".index.json"):
        try:
            shards = set(json.loads((directory / index).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise OptionError(
                explain(f"{directory / index} is not an index of weights.", "Download it again.")
            ) from error
        if lost := sorted(shards - names):
            fix = f"Put {', '.join(lost)} beside {index}."
            raise OptionError(explain(f"{directory} lacks {len(lost)} of {len(shards)} files of weights.", fix))


class _explained:  # noqa: N801  a context manager that reads as a word
    """Turns what transformers and torch raise while loading into one sentence and a fix."""

    def __init__(self, target: str, directory: Path | None) -> None:
        self.target, self.directory = target, directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, OptionError):
            return
        text = str(error)
        # torch's error tells the reader to set weights_only=False: that is what we do not do.
        if any(isinstance(link, pickle.UnpicklingError) for link in _chain(error)):
            headline = f"The weights of {self.target} are a pickle that holds more than tensors: refused."
            fix = "Loading it could run any code. Have its author save it as safetensors (save_pretrained does)."
        elif "trust_remote_code" in text or "custom code" in text:
            headline = f"{self.target} comes with Python code of its own: refused."
            fix = "attemper runs no code from a checkpoint. Import it yourself and pass package.module:factory."
        elif self.directory is None and isinstance(error, OSError):
            near = difflib.get_close_matches(self.target, known_targets(self.target), n=1, cutoff=0.6)
            headline = f"There is no directory {self.target!r}, and the hub gave no such model ({first_line(text)})."
            raise unknown_target(self.target, near, headline) from error
        elif isinstance(error, ImportError):
            headline = f"{self.target} needs a package that is not installed."
            fix = first_line(text)
        else:
            headline = f"transformers could not load {self.target}."
            fix = f"{type(error).__name__}: {first_line(text)}"
        raise OptionError(explain(headline, fix)) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= 200 else f"{line[:199]}…"


def _architecture(transformers: Any, config: Any) -> Any:
    """The class that the checkpoint names, or else the widest that takes its configuration."""
    for name in config.architectures or ():
        if builder := getattr(transformers, name, None):
            return builder
    causal = transformers.AutoModelForCausalLM
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return causal if known else transformers.AutoModel


def _tokenizer(transformers: Any, target: str, directory: Path | None) -> tuple[Tokenizer | None, str]:
    """The model's tokenizer, or None and why."""
    if directory is not None and not any((directory / name).exists() for name in _TOKENIZERS):
        return None, ""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # whatever it is, ids at random will do, and the reader is told
        return None, f"Its tokenizer could not be loaded ({first_line(str(error))})."

    def encode(text: str, special: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def spans(text: str) -> list[tuple[int, int]]:
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return [(int(start), int(stop)) for start, stop in found["offset_mapping"]]

    # What stands around a text is found by looking: [CLS] x [SEP], <s> x, x </s>.
    bare, dressed = encode("x"), encode("x", special=True)
    starts = range(len(dressed) - len(bare) + 1)
    start = next((i for i in starts if dressed[i : i + len(bare)] == bare), 0)
    return Tokenizer(
        encode=encode,
        spans=spans if getattr(tokenizer, "is_fast", False) else None,
        name=lambda token: str(tokenizer.convert_ids_to_tokens(token)),
        before=tuple(dressed[:start]),
        after=tuple(dressed[start + len(bare) :]),
        mask=tokenizer.mask_token_id,
    ), ""
