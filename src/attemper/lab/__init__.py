"""Every claim about why attention divides by √d_k, as an experiment that one can run.

A question is a module with a frozen `Config`, a smaller one called `QUICK`, and `run(config, progress)`, which returns
a `Result` with verdicts, tables and series. Nothing is drawn or printed here.
"""

from __future__ import annotations

from ._claims import CLAIMS
from ._questions import QUESTIONS, Question, ask, load, run
from ._result import Config, Estimate, Evidence, Panel, Result, Series, Table, Verdict

__all__ = [
    "CLAIMS",
    "QUESTIONS",
    "Config",
    "Estimate",
    "Evidence",
    "Panel",
    "Question",
    "Result",
    "Series",
    "Table",
    "Verdict",
    "ask",
    "load",
    "run",
]
