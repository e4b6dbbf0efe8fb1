"""The scale of the scores: the rules in use, and the number each gives."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

from ._errors import OptionError, brief, explain, unknown

_NEEDS = {"sqrt_dmodel": "model_dim", "log_n": "keys"}

_RULES: dict[str, Callable[[int, int], float]] = {
    # The second number is whatever the rule needs beside head_dim.
    "sqrt_dk": lambda head_dim, _: 1 / math.sqrt(head_dim),
    "dk": lambda head_dim, _: 1 / head_dim,
    "sqrt_dmodel": lambda _, model_dim: 1 / math.sqrt(model_dim),
    "unscaled": lambda _, __: 1.0,
    "log_n": lambda head_dim, keys: math.log(keys) / math.sqrt(head_dim),
}

ATTEND_RULES = tuple(rule for rule in _RULES if rule not in _NEEDS)
"""The rules that head_dim alone decides, which `attend(scale=…)` takes by name."""


def scale_for(rule: str, head_dim: int, *, model_dim: int | None = None, keys: int | None = None) -> float:
    """The number that multiplies q·k under a rule.

    | rule | scale | |
    |---|---|---|
    | `sqrt_dk` | 1/√head_dim | variance 1 for independent q and k: the usual one |
    | `dk` | 1/head_dim | for q and k that training has correlated (μP) |
    | `sqrt_dmodel` | 1/√model_dim | a common mistake: it forgets that heads split the model |
    | `unscaled` | 1 | |
    | `log_n` | ln(keys)/√head_dim | keeps attention from diluting as the sequence grows |

    >>> scale_for("sqrt_dk", 64)
    0.125
    >>> round(scale_for("sqrt_dk", 128) / scale_for("sqrt_dmodel", 128, model_dim=12288), 1)
    9.8
    """
    if not isinstance(rule, str) or rule not in _RULES:
        raise unknown("scale rule", rule, _RULES)
    for name, value in {"head_dim": head_dim, "model_dim": model_dim, "keys": keys}.items():
        if not (_counts(value) or (value is None and name != "head_dim")):
            fix = "Pass a whole number of at least 1."
            raise OptionError(explain(f"{name} is {brief(value)} in scale_for({rule!r}).", fix))
    needed = _NEEDS.get(rule)
    other = {"model_dim": model_dim, "keys": keys}.get(needed or "")
    if needed is not None and other is None:
        fix = f"Pass {needed}: scale_for({rule!r}, {head_dim}, {needed}=…)."
        raise OptionError(explain(f"The rule {rule!r} needs {needed}.", fix))
    return _RULES[rule](head_dim, other or 1)


def _counts(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return number >= 1 and number.is_integer()
