"""A text cut into words, and the tokens of a model put together to words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import OptionError, brief, explain

VARIANTS = "\ufe0e\ufe0f"
"""After a symbol: as text, or in colour."""

SHORTEST = 2
"""One word has one weight, and that is 1."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """The tokens that attention sees, and the words they make up."""

    text: str
    tokens: tuple[str, ...]
    """A name for each place of the sequence."""
    words: tuple[str, ...]
    word_of: tuple[int, ...]
    """The word that each token is a part of."""

    def find(self, word: str) -> int:
        """The last place where the word stands; whoever wrote `it` may have meant `It`."""
        for given, among in (
            (word, self.words),
            (word.casefold(), [known.casefold() for known in self.words]),
        ):
            places = [i for i, known in enumerate(among) if known == given]
            if places:
                return places[-1]
        distinct = list(dict.fromkeys(self.words))
        shown = ", ".join(distinct[:40]) + (", …" if len(distinct) > 40 else "")
        raise OptionError(explain(f"The word {brief(word)} is not in the text.", f"Choose from: {shown}."))

    def last_token(self, word: int) -> int:
        """The place from which all of a word can be seen, also where no token sees what follows it."""
        return max(i for i, of in enumerate(self.word_of) if of == word)


def split(text: str) -> list[tuple[int, int]]:
    """Where the words of a text begin and end: what stands between spaces, punctuation around it apart.

    >>> text = "Don't stop, dog!"
    >>> [text[start:stop] for start, stop in split(text)]
    ["Don't", 'stop', ',', 'dog', '!']
    """
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        stop = next((i for i in range(start, len(text)) if text[i].isspace()), len(text))
        marks = _marks(text[start:stop])
        first = next((start + i for i, mark in enumerate(marks) if not mark), stop)
        last = next((i for i in range(stop, first, -1) if not marks[i - 1 - start]), first)
        found += [(a, b) for a, b in ((start, first), (first, last), (last, stop)) if a < b]
        start = stop
    return found


def _marks(characters: str) -> list[bool]:
    """Which of them are punctuation and symbols; what joins or varies one, as in 👨‍👩‍👧, goes with what it follows."""
    marks: list[bool] = []
    for one in characters:
        follows = unicodedata.category(one) == "Cf" or one in VARIANTS
        marks.append((bool(marks) and marks[-1]) if follows else unicodedata.category(one)[0] in "PS")
    return marks


def of_words(text: str) -> Sentence:
    """Every word a token."""
    words = tuple(text[start:stop] for start, stop in split(text))
    if not words:
        raise OptionError(explain("The text is empty.", 'Give a few words: attemper trace "love Apple phones".'))
    _require_choice(words)
    return Sentence(text=text, tokens=words, words=words, word_of=tuple(range(len(words))))


def of_tokens(
    text: str, spans: Sequence[tuple[int, int]], before: Sequence[str] = (), after: Sequence[str] = ()
) -> Sentence:
    """A model's tokens, each a part of the word in which its first visible character stands.

    `before` and `after` name what the model wants around a text: [CLS], <s>.

    >>> of_tokens("unlike it", [(0, 2), (2, 6), (6, 9)], before=["<s>"]).word_of
    (0, 1, 1, 2)
    """
    places = split(text)
    words = list(before)
    names, word_of = list(before), list(range(len(before)))
    known: dict[int, int] = {}
    for start, stop in spans:
        first = next((i for i in range(start, stop) if not text[i].isspace()), None)
        place = next((n for n, (a, b) in enumerate(places) if first is not None and a <= first < b), None)
        if place is None:
            # Spaces and line ends can be tokens too.
            name = text[start:stop].replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "␀"
            words.append(name)
            word_of.append(len(words) - 1)
        else:
            name = text[start:stop].strip()
            if place not in known:
                known[place] = len(words)
                words.append(text[slice(*places[place])])
            word_of.append(known[place])
        names.append(name)
    for name in after:
        words.append(name)
        names.append(name)
        word_of.append(len(words) - 1)
    _require_choice(names)
    return Sentence(text=text, tokens=tuple(names), words=tuple(words), word_of=tuple(word_of))


def of_names(names: Sequence[str], text: str = "") -> Sentence:
    """Tokens of which only the names are known: each a word of its own."""
    _require_choice(names)
    return Sentence(text=text, tokens=tuple(names), words=tuple(names), word_of=tuple(range(len(names))))


def _require_choice(tokens: Sequence[str]) -> None:
    if len(tokens) < SHORTEST:
        headline = f"{brief(tokens[0]) if tokens else 'The text'} is alone: it has one weight, and that is 1."
        raise OptionError(explain(headline, "There is nothing to compare. Give a text of two words or more."))
