"""What a word attends to as lines of styled text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ._grid import GAP, LABEL, bar, clip, label_width, left, right
from ._numbers import clean, number, plural
from ._terminal import Line, _paragraph, columns

INDENT = "   "
MOST_WORDS = 40


def render(record: Mapping[str, Any], width: int) -> list[Line]:
    """Every line, as (text, rich style) spans."""
    lines = _title(record, width)
    lines += [[], *_summary(record, width)]
    lines += [[], *_ranks(record, width)]
    if record["head"] is None:
        lines += [[], *_heads(record, width)]
    lines += [[], *_how(record, width)]
    return lines


def _title(record: Mapping[str, Any], width: int) -> list[Line]:
    words, word = record["words"], record["word"]
    name = clean(words[word])
    lead = "attemper trace  "
    text = clean(record["text"]) or f"{len(words)} places"
    lines: list[Line] = [
        [(lead if i == 0 else " " * len(lead), "dim"), *line]
        for i, line in enumerate(_paragraph(text, width - len(lead), "bold"))
    ]
    layers = len(record["layers"])
    where = f"all {record['heads']} heads of {layers} layers"
    if record["layer"] is not None:
        heads = plural(record["heads"], "head") if record["head"] is None else f"head {record['head']}"
        where = f"layer {record['layer']} of 0 to {layers - 1}, {heads}"
    told = f"What “{name}” attends to in {record['origin']['model']}: {where}."
    lines += _paragraph(told, width, "dim")
    count = words.count(words[word])
    if count > 1:
        lines += _paragraph(f"“{name}” stands {count} times in the text: this is the last.", width, "dim")
    if record["word_of"].count(word) > 1:
        parts = [record["tokens"][i] for i, of in enumerate(record["word_of"]) if of == word]
        told = f"It is {len(parts)} tokens, {'|'.join(map(clean, parts))}: the last one asks, having seen the others."
        lines += _paragraph(told, width, "dim")
    hidden = [clean(words[i]) for i in range(len(words)) if i not in record["seen"]]
    if hidden:
        more = f" and {len(hidden) - 5} more" if len(hidden) > 5 else ""
        named = ", ".join(f"“{name}”" for name in hidden[:5])
        told = f"It does not see {named}{more}: the mask hides {'it' if len(hidden) == 1 else 'them'}."
        lines += _paragraph(told, width, "dim")
    return lines


def scale_names(record: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """For every rule what it does, and the number it multiplies by."""
    names = {"own": "as it is", "unscaled": "removed", "dk": "1/d_k", "sqrt_dmodel": "1/√d_model"}
    found = {}
    for rule, scales in record["scales"].items():
        same = max(scales) - min(scales) <= 1e-6 * max(abs(scale) for scale in scales)
        found[rule] = (names[rule], f"× {number(scales[0], 3)}" if same else "× by layer")
    return found


def _summary(record: Mapping[str, Any], width: int) -> list[Line]:
    """The mean weight on every word under every scale, the first word apart."""
    words, rules = record["words"], list(record["mean"])
    one = record["head"] is not None
    title = "Weight on each word" if one else f"Mean weight on each word over {plural(record['heads'], 'head')}"
    lines: list[Line] = [[(title, "bold cyan")]]
    told = "In the order of the scale as it is."
    # A sink of the model's own would take a share that no word has.
    if math.isclose(sum(record["mean"][rules[0]]), 1, abs_tol=1e-3):
        told += " Each column adds up to 1."
    lines += _paragraph(told, width, "dim", INDENT)
    label = max(label_width([words[i] for i in record["seen"]]), min(LABEL, columns("all others")))
    noted = " itself" if record["word"] in record["seen"] else ""
    if record["first"] in record["seen"]:
        noted = max(noted, " first", key=len)
    size = (width - len(INDENT) - label - len(noted)) // len(rules)
    room = max(size - GAP - len("0.000 "), 0)
    names = scale_names(record)
    for i in range(2):
        over = [(left(" " * GAP + names[rule][i], size), "dim" if i else "bold") for rule in rules]
        lines.append([(INDENT + " " * (label + len(noted)), ""), *over])
    own = record["mean"][rules[0]]
    order = sorted((i for i in record["seen"] if i != record["first"]), key=lambda i: -own[i])
    apart = [record["first"]] if record["first"] in record["seen"] else []
    most = {rule: max((record["mean"][rule][i] for i in order), default=1.0) or 1.0 for rule in rules}
    for i in [*apart, *order[:MOST_WORDS]]:
        note = " first" if i == record["first"] else " itself" if i == record["word"] else ""
        line: Line = [(INDENT, ""), (left(clip(words[i], label), label), "bold"), (left(note, len(noted)), "dim")]
        for rule in rules:
            value = record["mean"][rule][i]
            # The first word's bar would dwarf all others: it has only its number.
            drawn = "" if i in apart else bar(value / most[rule], room)
            line += [(f"{GAP * ' '}{value:.3f} ", ""), (left(drawn, room), "cyan")]
        lines.append(line)
    if len(order) > MOST_WORDS:
        lines += _paragraph(f"… {len(order) - MOST_WORDS} more; --json has all.", width, "dim", INDENT)
    if apart:
        told = "The first word is apart, without a bar: many heads park there what they have no use for (the sink)."
        lines += _paragraph(told, width, "dim", INDENT)
    return lines


def _ranks(record: Mapping[str, Any], width: int) -> list[Line]:
    lines: list[Line] = [[("Rank", "bold cyan")]]
    names = scale_names(record)
    label = max(len(name) for name, _ in names.values())
    for rule, ranking in record["ranking"].items():
        shown = [clean(record["words"][i]) for i in ranking[:8]]
        more = ", …" if len(ranking) > 8 else ""
        text = clip(", ".join(shown) + more, width - len(INDENT) - label - GAP)
        lines.append([(INDENT, ""), (left(names[rule][0], label + GAP), "bold"), (text, "")])
    return lines


def _heads(record: Mapping[str, Any], width: int) -> list[Line]:
    """The heads that look most at a candidate, and at what they look under the other scales."""
    tops, rules = record["top_heads"], list(record["mean"])
    whole = record["layer"] is not None
    title = f"Every head of layer {record['layer']}" if whole else f"The {len(tops)} heads that look hardest"
    lines: list[Line] = [[(title, "bold cyan")]]
    told = f"At {_candidates(record)}: the weight, and the word that has it."
    lines += _paragraph(told, width, "dim", INDENT)
    head = len("layer head")
    size = (width - len(INDENT) - head) // len(rules)
    names = scale_names(record)
    over = [(left(" " * GAP + names[rule][0], size), "bold") for rule in rules]
    lines.append([(INDENT, ""), ("layer head", "dim"), *over])
    for top in tops:
        line: Line = [(INDENT, ""), (right(str(top["layer"]), 5), ""), (right(str(top["head"]), 5), "")]
        for rule in rules:
            word, weight = top["top"][rule]
            name = clip(record["words"][word], max(size - GAP - len(" 0.000"), 3))
            style = "" if word == top["top"][rules[0]][0] else "yellow"
            line.append((left(f"{GAP * ' '}{weight:.3f} {name}", size), style))
        lines.append(line)
    return lines


def _candidates(record: Mapping[str, Any]) -> str:
    every = {i for i in record["seen"] if i not in (record["word"], record["first"])}
    if set(record["among"]) == every:
        return "a word other than itself and the first (--among names others)"
    return _either([clean(record["words"][i]) for i in record["among"]])


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _how(record: Mapping[str, Any], width: int) -> list[Line]:
    if record["through"]:
        told = "The whole model ran at each scale: what a layer sees is what the layers below it made at that scale."
    else:
        told = (
            "q and k are those of the model as it is: only each layer's own softmax is taken at the other scales. "
            "--through runs the whole model at them."
        )
    return _paragraph(told, width)
