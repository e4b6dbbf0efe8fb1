"""What does “it” attend to in a real model, at the right scale and at wrong ones?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._progress import Progress, silent
from .._walk import Gaze, gaze, see
from ._result import Config as Base
from ._result import Estimate, Evidence, Panel, Result, Series, Table, Verdict, judge, knob
from ._statistics import mean_of, share_of

NAMES = {
    "own": "as it is",
    "unscaled": "removed",
    "dk": "1/d_k",
    "sqrt_dmodel": "1/√d_model",
}
DECIDED = 0.9
"""The share of heads that would have to agree before one could say that attention decides."""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The knobs of `word`."""

    text: str = knob("The dog chased the ball because it was fast", "the sentence")
    word: str = knob("it", "the word that looks")
    among: tuple[str, ...] = knob(("dog", "ball"), "the two words between which it is to decide", fewest=2)
    model: str = knob("demo", "the model, as `attemper check` takes it")


QUICK = Config()


def run(config: Config, progress: Progress = silent) -> Result:
    """Run the model on the sentence, take each softmax again at other scales, and then the whole model."""
    from .._models import load

    loaded = load(config.model, tokens=64, sequences=1, progress=progress)
    seen = see(loaded, config.text, progress)
    beside = gaze(seen.calls, seen.sentence, config.word, seen.origin(), among=config.among)
    through = gaze(seen.calls, seen.sentence, config.word, seen.origin(), among=config.among, again=seen.again)
    heads = beside.heads()
    one, other = beside.among[0], beside.among[-1]
    first, second = seen.sentence.words[one], seen.sentence.words[other]
    prefers = {rule: _preferences(beside, rule, one, other) for rule in beside.weights}
    own = prefers["own"]
    leaning = share_of(max(sum(own), len(own) - sum(own)), len(own))
    favourite = first if 2 * sum(own) >= len(own) else second
    kept = _same(own, prefers["unscaled"])
    through_kept = _same(own, _preferences(through, "unscaled", one, other))
    evidence = (
        Evidence(f"share of heads that prefer {favourite}", leaning, DECIDED, 1.0),
        Evidence(
            "share of heads of which removing the scale changes the preference",
            share_of(sum(a != b for a, b in zip(own, prefers["unscaled"], strict=True)), len(own)),
            1 - DECIDED,
            1.0,
        ),
    )
    sink = _mean(beside, "own", beside.first)
    rows = [
        (
            NAMES[rule],
            kind,
            *(_mean(found, rule, word) for word in (one, other, found.first)),
            mean_of([float(np.max(found.weights[rule][layer][head])) for layer, head in heads]),
        )
        for kind, found in (("one softmax", beside), ("whole model", through))
        for rule in found.weights
        if not (found is through and rule == "own")
    ]
    return Result(
        question="word",
        config=config,
        summary=f"In {seen.name}, {leaning} of {len(heads)} heads give “{favourite}” more weight than the other "
        f"candidate when “{config.word}” looks back: a leaning, and no decision. Most of the weight goes elsewhere, "
        f"{sink} to the first word alone. Multiplying the scores of a head by any positive number never changes their "
        "order, so no scale changes which word a head likes best, only by how much; it is through the layers above, "
        f"which then read something else, that a wrong scale changes preferences ({through_kept} of the heads keep "
        "theirs with the scale removed from the whole model).",
        verdicts=(
            Verdict(
                claim=21,
                outcome=judge(evidence),
                expected=f"attention settles on {first} or {second}, thanks to the scale",
                measured=f"{leaning} of the heads prefer “{favourite}”; with the scale removed {_share(kept)} of "
                "the heads prefer the same word as before",
                reason="Heads do many things at once, and weights on words are no verdict on what a pronoun means. "
                "Within a head the scale sets how sharply it chooses, never which word.",
                evidence=evidence,
            ),
        ),
        tables=(
            Table(
                title=f"What “{config.word}” gives each word, mean over {len(heads)} heads",
                columns=(
                    "scale",
                    "changed in",
                    f"weight on {first}",
                    f"weight on {second}",
                    "weight on the first word",
                    "largest weight",
                ),
                rows=tuple(rows),
                note="One softmax: q and k are those of the model as it is. Whole model: every layer ran at that "
                "scale. The interval is the spread over heads, which are all there are and no sample of others.",
            ),
            Table(
                title="The heads that look most at either word",
                columns=("layer", "head", f"weight on {first}", f"weight on {second}", "removed", "1/d_k"),
                rows=tuple(_sharpest(beside, one, other, seen.sentence.words)),
                note="The last two columns: the larger of the two words and its weight at that scale.",
            ),
        ),
        panels=(
            Panel(
                title="A scale changes how sharply a head chooses, and hardly what",
                x_label="scale",
                y_label=f"mean weight over {len(heads)} heads",
                kind="bar",
                series=tuple(
                    Series.of(
                        name,
                        tuple(NAMES[rule] for rule in beside.weights),
                        [_mean(beside, rule, word) for rule in beside.weights],
                    )
                    for name, word in ((first, one), (second, other), ("the first word", beside.first))
                ),
            ),
        ),
    )


def _mean(found: Gaze, rule: str, word: int) -> Estimate:
    return mean_of([found.weights[rule][layer][head][word] for layer, head in found.heads()])


def _share(estimate: Estimate) -> str:
    """All of them, where it is all: that needs no interval."""
    return f"all {estimate.count}" if estimate.value == 1 else str(estimate)


def _same(before: list[bool], after: list[bool]) -> Estimate:
    return share_of(sum(a == b for a, b in zip(before, after, strict=True)), len(before))


def _preferences(found: Gaze, rule: str, one: int, other: int) -> list[bool]:
    """For every head, whether it gives the one word more than the other."""
    return [
        bool(found.weights[rule][layer][head][one] >= found.weights[rule][layer][head][other])
        for layer, head in found.heads()
    ]


def _sharpest(found: Gaze, one: int, other: int, words: tuple[str, ...]) -> list[tuple[object, ...]]:
    def weights(rule: str, layer: int, head: int) -> tuple[float, float]:
        row = found.weights[rule][layer][head]
        return float(row[one]), float(row[other])

    def larger(rule: str, layer: int, head: int) -> str:
        a, b = weights(rule, layer, head)
        return f"{words[one if a >= b else other]} {max(a, b):.3f}"

    heads = sorted(found.heads(), key=lambda at: -max(weights("own", *at)))[:8]
    return [(*at, *weights("own", *at), larger("unscaled", *at), larger("dk", *at)) for at in heads]
