"""A sentence run through a model of which the attention is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._errors import OptionError, brief, explain
from .._gguf import Tokenizer
from .._models import Loaded, longest
from .._progress import Progress
from ._call import Call
from ._text import Sentence, of_names, of_tokens

if TYPE_CHECKING:
    from ._capture import Attention

MOST_TOKENS = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Seen:
    """A model's attention calls on a sentence, and how to have them again at other scales."""

    name: str
    sentence: Sentence
    calls: tuple[Call, ...]
    unseen: Mapping[str, str]
    again: Callable[[float], tuple[Call, ...]]

    def at(self, layer: int | None, head: int | None) -> tuple[int, int]:
        """A layer and a head of it, 0 where none was named."""
        at = layer or 0
        if at >= len(self.calls):
            headline = f"{self.name} has no layer {at}."
            ends = f"{self.calls[0].path} to {self.calls[-1].path}"
            raise OptionError(explain(headline, f"Its layers are 0 to {len(self.calls) - 1}: {ends}."))
        if (head or 0) >= self.calls[at].heads:
            headline = f"Layer {at} of {self.name} has no head {head}."
            raise OptionError(explain(headline, f"Its heads are 0 to {self.calls[at].heads - 1}."))
        return at, head or 0

    def origin(self) -> dict[str, Any]:
        """What a record says of the model."""
        return {"kind": "model", "model": self.name, "layers": len(self.calls)}


def see(loaded: Loaded, text: str | None, progress: Progress) -> Seen:
    """Run a model once on a text; without one, on the inputs that it brought."""
    model, args, kwargs = loaded.model, loaded.args, dict(loaded.kwargs)
    sentence: Sentence | None = None
    if text is not None:
        ids, sentence = _read(loaded, text)
        torch_ids = kwargs["input_ids"].new_tensor([ids])
        if model.config.is_encoder_decoder:
            # A decoder would read another text than the words shown; the encoder reads these.
            model = model.get_encoder()
            kwargs = {}
        kwargs["input_ids"] = torch_ids
    kwargs.pop("labels", None)

    def run(factor: float = 1.0) -> Attention:
        from ._capture import capture

        stage = f"running {loaded.name}"
        progress(stage if factor == 1 else f"{stage} with every scale × {factor:.3g}", 0, 1)
        return capture(model, args, kwargs, factor=factor)

    found = run()
    length = len(sentence.tokens) if sentence is not None else next((call.q.shape[1] for call in found.calls), 0)
    calls = _of_length(found.calls, length)
    unseen = {**found.unseen}
    for call in found.calls:
        if call not in calls:
            unseen[call.path] = f"{call.q.shape[1]} queries look at {call.k.shape[1]} keys: not the text at itself"
    if not calls:
        why = "".join(f" {path}: {reason}." for path, reason in list(unseen.items())[:3])
        fix = (
            "It must call torch's attention, or write q·kᵀ and a softmax out. Load it with attn_implementation='eager'."
        )
        raise OptionError(explain(f"No attention of {loaded.name} can be seen.{why}", fix))
    if length > MOST_TOKENS:
        raise OptionError(explain(f"{length} tokens are too many to show.", f"A walk takes at most {MOST_TOKENS}."))

    def again(factor: float) -> tuple[Call, ...]:
        return _of_length(run(factor).calls, length)

    sentence = sentence or of_names([str(i) for i in range(length)])
    return Seen(name=loaded.name, sentence=sentence, calls=calls, unseen=unseen, again=again)


def _of_length(calls: tuple[Call, ...], length: int) -> tuple[Call, ...]:
    return tuple(call for call in calls if call.q.shape[1] == call.k.shape[1] == length)


def _read(loaded: Loaded, text: str) -> tuple[list[int], Sentence]:
    """The ids of a text, with what the model wants around it, and their names."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or "input_ids" not in loaded.kwargs:
        fix = "Leave the text out: its places are then numbered. Or put the tokenizer's files beside the weights."
        raise OptionError(explain(f"{loaded.name} came without a tokenizer, so {brief(text)} cannot be read.", fix))
    found = tokenizer.encode(text)
    ids = [*tokenizer.before, *found, *tokenizer.after]
    most = min(MOST_TOKENS, longest(loaded.model.config) or MOST_TOKENS)
    if len(ids) > most:
        fix = f"A walk through {loaded.name} takes at most {most}: give a shorter text."
        raise OptionError(explain(f"The text has {len(ids):,} tokens.", fix))
    return ids, _sentence(tokenizer, text, found)


def _sentence(tokenizer: Tokenizer, text: str, found: list[int]) -> Sentence:
    before, after = ([tokenizer.name(token) for token in ids] for ids in (tokenizer.before, tokenizer.after))
    spans = None if tokenizer.spans is None else tokenizer.spans(text)
    if spans is None or len(spans) != len(found):
        return of_names([*before, *(tokenizer.name(token) for token in found), *after], text)
    return of_tokens(text, spans, before, after)
