"""What has which shape, and who attends to whom?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .._attend import trace
from .._progress import Progress, silent
from ._result import HOLDS, ONLY_IF, Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob
from ._result import Config as Base
from ._statistics import generator, mean_of


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `shapes`."""

    tokens: int = knob(3, "tokens of the sentence", least=2)
    d_model: int = knob(512, "width of an embedding", least=1)
    d_k: tuple[int, ...] = knob((1, 8, 64, 512), "head widths", least=1)
    repeats: int = knob(100, "random sentences for each width", least=2)


QUICK = Config(repeats=30)


def run(config: Config, progress: Progress = silent) -> Result:
    """Walk X → Q, K, V → scores → weights → output at every width, and look at the shapes and the diagonal."""
    rows, itself, sizes = [], [], []
    n = config.tokens
    for done, d_k in enumerate(config.d_k):
        progress(f"shapes at d_k {d_k}", done, len(config.d_k))
        rng = generator(config.seed, "shapes", d_k)
        diagonal = []
        for _ in range(config.repeats):
            x = rng.standard_normal((n, config.d_model))
            q, k, v = (x @ rng.standard_normal((config.d_model, d_k)) / math.sqrt(config.d_model) for _ in range(3))
            steps = trace(q, k, v)
            diagonal.append(np.diagonal(steps.weights).mean())
        itself.append(mean_of(diagonal))
        sizes.append((steps.scores.shape, steps.scaled.shape, steps.weights.shape, steps.output.shape))
        shown = (f"{a} × {b}" for a, b in (x.shape, q.shape, *sizes[-1]))
        rows.append((d_k, *shown, itself[-1]))
    evidence = tuple(
        Evidence(f"{which} of {name}, d_k {d}", Estimate.exact(extent), n, n)
        for d, shapes in zip(config.d_k, sizes, strict=True)
        for name, shape in zip(("scores", "scaled scores", "weights"), shapes[:3], strict=True)
        for which, extent in zip(("rows", "columns"), shape, strict=True)
    )
    # “All other tokens” would leave nothing on the diagonal.
    others = tuple(
        Evidence(f"weight of a token on itself, d_k {d}", one, 0.0, 0.0)
        for d, one in zip(config.d_k, itself, strict=True)
    )
    same, excluded = judge(evidence), judge(others)
    return Result(
        question="shapes",
        config=config,
        summary=f"{n} tokens of {config.d_model} numbers become queries and keys of d_k numbers each, and {n} × {n} "
        "scores whatever d_k is: scaling multiplies every score and moves none. The diagonal belongs to it: a token is "
        f"compared with itself as with the others, and gives itself {itself[-1]} of its attention here.",
        verdicts=(
            Verdict(
                claim=20,
                outcome=same if same != HOLDS else (HOLDS if excluded == HOLDS else ONLY_IF),
                expected=f"{n} × {n} scores at every d_k; no token compared with itself",
                measured=f"{n} × {n} at d_k {', '.join(map(str, config.d_k))}, before and after scaling; mean weight "
                f"of a token on itself {itself[-1]}",
                reason="It holds if “all other tokens” is read as “all tokens”: the diagonal of the scores is a query "
                "against its own token's key, and takes its share of the weight.",
                evidence=(*evidence, *others),
            ),
        ),
        tables=(
            Table(
                title=f"The walk of {n} tokens",
                columns=("d_k", "X", "Q, K, V", "QKᵀ", "QKᵀ/√d_k", "weights", "output", "weight on itself"),
                rows=tuple(rows),
                note='`attemper trace "love Apple phones"` shows the same walk with every number.',
            ),
        ),
        panels=(
            Panel(
                title="A token attends to itself too",
                x_label="d_k (components)",
                y_label="mean weight of a token on itself",
                x_scale="log2",
                kind="points",
                series=(Series.of("random embeddings", config.d_k, itself),),
                references=((f"1/{n}, an equal share", 1 / n), ("all other tokens only", 0.0)),
            ),
        ),
    )
