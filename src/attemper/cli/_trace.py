"""`attemper trace TEXT`: attention step by step on one's own sentence, seeded or through a real model."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import OptionError, explain
from .._models import DTYPES, load, read_text
from .._walk import gaze, of_vectors, see, seeded, walk_through
from ._shared import OK, count, open_console, quieten, save, say, show_progress, warnings_in_words, writable

if TYPE_CHECKING:
    from .._walk import Seen

D_MODEL, D_K, SEED = 512, 64, 0

EXAMPLES = """\
examples:
  attemper trace "love Apple phones"
  attemper trace "love Apple phones" --model demo --layer 3 --head 1
  attemper trace "The dog chased the ball because it was fast" --model demo --word it --among "dog ball"
  attemper trace --vectors "12 2 -1" --d-k 64
  attemper trace --vectors "1,-1 · 1,1"
"""

_SEEDED = ("d_model", "d_k", "seed")
_OF_MODEL = ("layer", "head", "among", "through", "device", "dtype")


def add_parser(commands: Any) -> None:
    """Declare the command and its options."""
    trace = commands.add_parser(
        "trace",
        help="show every step of attention on a sentence of yours",
        description="Walks through attention with a sentence: X, Q, K, V, QKᵀ, the scale, softmax, the output.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # argparse takes -1,2 for an option and -1 for a number: to it both are numbers here.
    trace._negative_number_matcher = re.compile(r"^[-−][\d.].*$")  # noqa: SLF001
    add = trace.add_argument
    add("text", metavar="TEXT", nargs="*", help="the sentence, - for standard input")
    add("--model", metavar="TARGET", help="run it through a model: demo, a directory, a hub id, package.module:factory")
    add("--layer", metavar="N", type=_index, help="the layer to show, from 0 (default: 0; all of them with --word)")
    add("--head", metavar="N", type=_index, help="the head to show, from 0 (default: 0; all of them with --word)")
    add("--word", metavar="WORD", help="what this word attends to; in a model in every layer and head")
    add("--among", metavar="WORDS", help="with --word, the words to compare (default: all others)")
    add("--through", action="store_true", help="with --word, run the whole model at the other scales")
    add("--vectors", metavar="NUMBERS", help="scores for a softmax, or two vectors with · between for a dot product")
    add("--d-model", metavar="N", type=count, help=f"numbers in an embedding (default: {D_MODEL})")
    add("--d-k", metavar="N", type=count, help=f"numbers in a query and a key (default: {D_K})")
    add("--seed", metavar="N", type=_index, help=f"of the random numbers (default: {SEED})")
    add("--json", metavar="PATH", nargs="?", const="-", help="write every number as JSON; without PATH, on stdout")
    add("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", metavar="TYPE", choices=DTYPES, help=f"{', '.join(DTYPES)} (default: as stored)")
    trace.set_defaults(run=run, refuse=trace.error)


def _index(text: str) -> int:
    """An option's value that counts from 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Compute the walk and show it; the exit status."""
    # `--json "love Apple phones"`: argparse takes the text for the path.
    # Unquoted words are one sentence.
    options.text = " ".join(options.text) if options.text else None
    if options.text is None and options.json not in (None, "-") and Path(options.json).suffix != ".json":
        options.text, options.json = options.json, "-"
    if options.text == "-":
        options.text = " ".join(read_text("-", "Give a few words.").split())
    if options.json not in (None, "-"):
        writable("json", Path(options.json), ".json")
    _refuse_what_does_not_go_together(options)
    if options.vectors is not None:
        record = of_vectors(options.vectors, options.d_k).to_dict()
    elif options.model is None:
        sizes = {name: getattr(options, name) for name in _SEEDED if getattr(options, name) is not None}
        record = seeded(options.text, word=options.word, **sizes).to_dict()
    else:
        record = _of_model(options)
    _show(record, options.json)
    return OK


def _refuse_what_does_not_go_together(options: argparse.Namespace) -> None:
    def given(names: Sequence[str]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]

    if options.vectors is not None:
        if options.text is not None or (other := given(("model", "word", *_OF_MODEL, "d_model", "seed"))):
            what = "A text" if options.text is not None else " and ".join(other)
            raise OptionError(explain(f"{what} does not go with --vectors.", "Give the one or the other."))
        return
    factory = options.model is not None and ":" in options.model
    if options.text is None and not factory:
        options.refuse('give a TEXT, attemper trace "love Apple phones", or --vectors')
    if options.text is not None and not options.text.strip():
        raise OptionError(explain("The text is empty.", 'Give a few words: attemper trace "love Apple phones".'))
    if options.model is None and (other := given(_OF_MODEL)):
        fix = "Name one: --model demo."
        raise OptionError(explain(f"{' and '.join(other)} goes with a model, and there is none.", fix))
    if options.model is not None and (other := given(_SEEDED)):
        fix = "Leave it out: a model has its own sizes and numbers."
        raise OptionError(explain(f"{' and '.join(other)} does not go with --model.", fix))
    if options.word is None and (other := given(("among", "through"))):
        raise OptionError(explain(f"{' and '.join(other)} goes with --word.", "Name a word: --word it."))
    if options.word is not None and options.head is not None and options.layer is None:
        raise OptionError(explain("--head without --layer.", "Say of which layer: --layer 0."))
    if factory and options.text is not None:
        fix = f"Leave the text out: attemper trace --model {options.model}. Its places are then numbered."
        raise OptionError(explain(f"{options.model} brings its own inputs, and no tokenizer for a text.", fix))


def _of_model(options: argparse.Namespace) -> dict[str, Any]:
    console = open_console()
    quieten(options.model)
    with warnings_in_words():
        with show_progress(console) as progress:
            loaded = load(options.model, device=options.device, dtype=options.dtype or "auto", progress=progress)
            seen = see(loaded, options.text, progress)
            record = _gaze(seen, options) if options.word is not None else _walk(seen, options)
        say(f"{seen.name} on {len(seen.sentence.tokens)} tokens")
    for note in loaded.notes if options.text is None else ():
        say(f"  {note}")
    for path, why in list(seen.unseen.items())[:5]:
        say(f"  not seen: {path}: {why}")
    if len(seen.unseen) > 5:
        say(f"  not seen: {len(seen.unseen) - 5} more")
    return record


def _walk(seen: Seen, options: argparse.Namespace) -> dict[str, Any]:
    layer, head = seen.at(options.layer, options.head)
    call = seen.calls[layer]
    kv_heads = int(call.k.shape[0])
    place = {"path": call.path, "layer": layer, "head": head, "heads": call.heads, "kv_heads": kv_heads}
    return walk_through(call, head, seen.sentence, {**seen.origin(), **place}).to_dict()


def _gaze(seen: Seen, options: argparse.Namespace) -> dict[str, Any]:
    seen.at(options.layer, options.head)
    return gaze(
        seen.calls,
        seen.sentence,
        options.word,
        seen.origin(),
        among=[word for word in re.split(r"[\s,]+", options.among or "") if word],
        layer=options.layer,
        head=options.head,
        again=seen.again if options.through else None,
    ).to_dict()


def _show(record: Mapping[str, Any], target: str | None) -> None:
    text = "" if target is None else json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    from ..report._walk import walk_to_rich

    open_console(stderr=False).print(walk_to_rich(record))
    if target is not None:
        path = save(Path(target), lambda draft: draft.write_text(text, encoding="utf-8"))
        say(f"wrote {path}")
