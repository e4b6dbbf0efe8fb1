"""Where the tensors of a forward pass come from, as far as attention cares.

Three things are followed from operation to operation:

    Projected   q or k on its way from a projection to attention: which outputs of projections it is made of, so that
                any factor put on it in between can be measured; whether it was normalised
    Scores      q·kᵀ of attention written by hand, on its way to the softmax: the operands, and what multiplied them
    Weights     what the softmax made of them, on its way to the values

A tag lives as long as its tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operations import (
    ACTIVATING,
    ADDING,
    DIVIDING,
    EXPONENTIAL,
    JOINING,
    MASKING,
    MULTIPLYING,
    NORMALISING,
    PRODUCTS,
    PROJECTING,
    SAME_NUMBERS,
    SUBTRACTING,
    share,
    terms,
)


class Piece:
    """Some of the output of a projection; a slice of it is a piece of its own, with the whole as parent."""

    __slots__ = ("inputs", "outputs", "parent")

    def __init__(self, parent: Piece | None = None, *, inputs: int | None = None, outputs: int | None = None) -> None:
        self.parent = parent
        self.inputs = inputs
        self.outputs = outputs

    @property
    def root(self) -> Piece:
        """What the projection put out, whole."""
        return self if self.parent is None else self.parent.root

    def again(self) -> Piece:
        """As wide a piece that is made of it and of something else."""
        return Piece(inputs=self.inputs, outputs=self.outputs)

    def ancestors(self) -> Iterator[Piece]:
        piece: Piece | None = self
        while piece is not None:
            yield piece
            piece = piece.parent


class Source(NamedTuple):
    """A tensor that is a piece times a factor."""

    piece: Piece
    tensor: Tensor
    factor: float


@dataclass(frozen=True, eq=False)
class Projected:
    """Made of sources by linear maps; while `own` is set it is that piece itself, number for number, times `factor`."""

    own: Piece | None
    factor: float = 1.0
    sources: tuple[Source, ...] = ()
    normalised: bool = False
    fresh: tuple[Tensor, Projected] | None = None
    """Of keys in a cache, those that were seen being made, as they were joined to the others: they tell the factor."""

    @property
    def root(self) -> Piece:
        """What the projection put out that it, or the first of what it is made of, comes from."""
        piece = self.own or (self.sources[0].piece if self.sources else None)
        return Piece() if piece is None else piece.root

    def made_of(self, tensor: Tensor) -> tuple[Source, ...]:
        return (Source(self.own, tensor, self.factor),) if self.own is not None else self.sources


@dataclass(frozen=True, eq=False)
class Scores:
    """q·kᵀ times `factor`, capped, masked and biased."""

    q: Tensor  # (*batch, queries, head_dim)
    k: Tensor  # (*batch, keys, head_dim)
    product: Tensor | None  # q·kᵀ as the model computed it; None once it was overwritten
    version: int
    factor: float | Tensor = 1.0
    softcap: float | None = None
    before_cap: float | Tensor | None = None  # the factor where tanh was applied
    shift: Tensor | None = None  # what was taken from every score of a row, as a softmax does itself
    sinks: Tensor | None = None  # a logit per row, joined on behind the last key
    sinks_first: bool = False  # joined on in front of the first key

    def times(self, number: float | Tensor) -> Scores:
        """The tag of these scores times a number, or one per head."""
        shift = None if self.shift is None else self.shift * number
        of_row = number[..., 0] if isinstance(number, Tensor) else number
        sinks = None if self.sinks is None else self.sinks * of_row
        return replace(self, factor=self.factor * number, shift=shift, sinks=sinks)

    def of_keys(self, x: Tensor) -> Tensor:
        """Without the column of the sinks."""
        if self.sinks is None:
            return x
        return x[..., 1:] if self.sinks_first else x[..., :-1]


@dataclass(frozen=True, eq=False)
class Weights:
    """The output of a softmax, and the Record that was made of it."""

    record: Any
    unseen: bool = False
    """Whether what its scores are made of was not seen."""
    exponents: bool = False
    """Whether they are the exponentials of scores, which become weights when they are divided by their sum."""


class Lineage:
    """The tags of one forward pass."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._learned: Lineage | None = None
        """The Scores of products with a parameter in front: `get` takes that for a weight, but if a softmax over keys
        follows it was a query that is learned."""

    def clear(self) -> None:
        self._tags.clear()
        self._learned = None

    def get(self, tensor: object) -> Any:
        found = self._tags.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def set(self, tensor: Tensor, tag: Any) -> None:
        key = id(tensor)
        self._tags[key] = (weakref.ref(tensor, lambda _: self._tags.pop(key, None)), tag)

    def scores(self, x: object) -> Scores | None:
        """What is known of a tensor as the scores of attention."""
        tag = self.get(x)
        if not isinstance(tag, Scores) and self._learned is not None:
            tag = self._learned.get(x)
        return tag if isinstance(tag, Scores) else None

    def weigh(self, given: Tensor, axis: int, result: Tensor) -> None:
        """Tag a softmax of what are not known to be scores.

        One over the outputs of a projection is a router's or a classifier's.
        """
        tag = self.get(given)
        if result.dim() < 2:
            return
        choosing = isinstance(tag, Projected) and tag.own is not None and tag.root.outputs == given.shape[axis]
        if not choosing:
            self.set(result, Weights(None, unseen=True))

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Tag what an operation made."""
        parts = result if isinstance(result, (tuple, list)) else (result,)
        parts = [x for x in parts if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
        if not parts:
            return
        if name.endswith("_like") or name.startswith("new_"):
            return  # of the same shape, not of the same numbers
        if name in PROJECTING:
            given = tensors(args, kwargs)
            axis = -1 - int(name[4]) if name.startswith("conv") else -1
            x = given[name == "addmm"] if given and name != "embedding" else None
            inputs, outputs = (y.shape[axis] if y is not None and y.dim() >= -axis else None for y in (x, parts[0]))
            self.set(parts[0], Projected(Piece(inputs=inputs, outputs=outputs)))
            return
        if name in PRODUCTS:
            self._product(name, args, kwargs, parts[0])
            return
        given = tensors(args, kwargs)
        if self._learned is not None:
            for x in given:
                tag = self._learned.get(x)
                after = None if tag is None else _after_scores(self, name, args, kwargs, tag, x, parts[0])
                if isinstance(after, Scores):
                    self._learned.set(parts[0], after)
        tags = [(x, tag) for x in given if (tag := self.get(x)) is not None]
        for x, tag in tags:
            if isinstance(tag, Scores):
                after = _after_scores(self, name, args, kwargs, tag, x, parts[0])
                if after is not None:
                    self.set(parts[0], after)
                return
            if isinstance(tag, Weights):
                if name in DIVIDING and all(isinstance(t, Weights) and t.exponents for _, t in tags) and len(tags) == 2:
                    tag = Weights(None, unseen=True)  # by the sum of them
                for part in parts:
                    self.set(part, tag)
                return
        if tags:
            self._projected(name, args, kwargs, tags, parts)

    def _projected(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tags: list[tuple[Tensor, Projected]],
        parts: list[Tensor],
    ) -> None:
        tensor, tag = tags[0]
        given, result = tensors(args, kwargs), parts[0]
        alone = len(tags) == 1
        if name in ACTIVATING or any(t.own is None and not t.sources for _, t in tags):
            # No linear map of a projection any more. To keep what it was made of would hold the widest tensors of a
            # model, those within its MLPs, for longer than the model does, which costs it the memory it would reuse.
            for part in parts:
                self.set(part, Projected(None))
            return
        if name in SAME_NUMBERS and (alone or (args and args[0] is tensor)):
            # Of the others, as in type_as, only the type or the shape is taken.
            for part in parts:
                if part is tensor:
                    continue
                if tag.own is None or part.numel() == tensor.numel():
                    self.set(part, tag)
                else:
                    self.set(part, replace(tag, own=Piece(tag.own)))
            return
        multiplied = name in MULTIPLYING or (name in DIVIDING and terms(args, kwargs)[0] is tensor)
        if alone and multiplied and tag.own is not None:
            number = _factor(next((x for x in (*args, *kwargs.values()) if x is not tensor), None))
            if number:
                # Known exactly, and also where the tensor itself was overwritten.
                self.set(result, replace(tag, factor=tag.factor * (1 / number if name in DIVIDING else number)))
                return
        related = not alone and bool(
            set.intersection(*({source.piece.root for source in t.made_of(x)} for x, t in tags))
        )
        if name in ADDING and not related and all(t.own is not None for _, t in tags):
            # A bias, a low-rank addition, a position: still what the projection, in a wider sense, put out, with the
            # factor that this had; of two projections the one of more inputs, for an addition is of low rank.
            tensor, tag = max(tags, key=lambda pair: pair[1].root.inputs or 0)
            factor = tag.factor * share(name, args, kwargs, tensor)
            self.set(result, replace(tag, own=tag.root.again(), factor=factor))
            return
        if name in JOINING and any(x.numel() and self.get(x) is None for x in given if x.is_floating_point()):
            # A cache: most of these keys were not seen being made, but they were made like those that were.
            if result.shape[-1] == tensor.shape[-1]:  # else it is wider, by something that is no key
                known = tag if tag.own is not None else Projected(None, normalised=tag.normalised, fresh=(tensor, tag))
                self.set(result, replace(known, own=tag.root.again()))
            return
        # What is multiplied by something made of itself is a norm written out.
        normalising = name in NORMALISING or (related and (name in MULTIPLYING or name in DIVIDING))
        if normalising or (tag.normalised and alone and _is_gain(name, args, kwargs, tensor)):
            # From here on counts what is done to the norm's output.
            self.set(result, Projected(Piece(inputs=tag.root.inputs), normalised=True))
            return
        made_of = tag.made_of(tensor) if alone else _outermost([source for x, t in tags for source in t.made_of(x)])
        self.set(result, Projected(None, 1.0, made_of, any(t.normalised for _, t in tags), tag.fresh))

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        operands = tensors(args, kwargs)
        if any(isinstance(self.get(x), Weights) for x in operands):
            return  # the weighted values, which the interceptor looks at itself
        factor = 1.0
        if name == "einsum":
            pair, inputs, axis = _read_einsum(args)
        else:
            one, two = operands[-2:] if name == "baddbmm" else operands[:2]
            factor = float(kwargs.get("alpha", 1))
            pair = _Pair(one, two.mT, one, two) if min(one.dim(), two.dim()) > 1 else None
            inputs, axis = one.shape[-1] if one.dim() else None, -2 if _is_weight(one) else -1
        in_front = pair is not None and _weighs(pair.q, pair.k)
        if pair is None or in_front or _weighs(pair.k, pair.q):
            chosen = result.shape[axis] if any(map(_is_weight, operands)) and result.dim() >= -axis else None
            self.set(result, Projected(Piece(inputs=inputs, outputs=chosen)))
        if pair is None or _weighs(pair.k, pair.q):
            return
        for made, source in ((pair.q, pair.of_q), (pair.k, pair.of_k)):
            tag = self.get(source)
            if made is not source and isinstance(tag, Projected):
                self.set(made, tag)
        # A bias and a factor that came with the product (baddbmm) are in it already.
        scores = Scores(pair.q, pair.k, None if name == "baddbmm" else result, version(result), factor)
        if in_front:
            self._learned = self._learned or Lineage()
            self._learned.set(result, scores)
        else:
            self.set(result, scores)


class _Pair(NamedTuple):
    """The operands of a product as a q (…, queries, head_dim) and a k (…, keys, head_dim), and what these are of."""

    q: Tensor
    k: Tensor
    of_q: Tensor
    of_k: Tensor


def _is_gain(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> bool:
    """Whether an operation is the gain or bias of a norm: one number for each place in a head."""
    others = [x for x in tensors(args, kwargs) if x is not tensor]
    shaped = len(others) == 1 and others[0].dim() == 1 and others[0].shape[0] == tensor.shape[-1]
    return shaped and (name in MULTIPLYING or name in ADDING)


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, torch.nn.Parameter) or isinstance(x._base, torch.nn.Parameter)  # noqa: SLF001


def _weighs(x: Tensor, other: Tensor) -> bool:
    """Whether x is a weight, be it one that was computed: of fewer axes than what it is multiplied with."""
    return _is_weight(x) or x.dim() < min(other.dim(), 3)


def _after_scores(
    lineage: Lineage,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tag: Scores,
    tensor: Tensor,
    result: Tensor,
) -> Scores | Weights | None:
    """The tag of what an operation made of scores, or None where they are scores no more."""
    if tag.product is not None and version(tag.product) != tag.version:
        tag = replace(tag, product=None)
    first, second = terms(args, kwargs)
    if name in SAME_NUMBERS:
        if result.numel() != tensor.numel():
            return None
        turned = result.dim() == tensor.dim() and result.stride()[-2:] == tensor.stride()[-2:][::-1]
        if turned and result.shape[-2:] == tensor.shape[-2:][::-1] and tensor.stride()[-1] != tensor.stride()[-2]:
            of_rows = tag.shift is not None or tag.sinks is not None
            return None if of_rows else replace(tag, q=tag.k, k=tag.q, product=None)
        return tag
    if name in MULTIPLYING or name in DIVIDING:
        if name in DIVIDING and first is not tensor:
            return None
        number = _factor(next((x for x in (*args, *kwargs.values()) if x is not tensor), None), heads=tensor)
        if number is None:
            return None
        number = 1 / number if name in DIVIDING else number
        if tag.before_cap is not None and tag.softcap is None and isinstance(number, float):
            # tanh(x / c) · c: what came before the tanh was divided by c.
            return replace(tag, softcap=number, factor=tag.before_cap * number)
        return tag.times(number)
    if name in ("tanh", "tanh_"):
        return None if tag.shift is not None or tag.sinks is not None else replace(tag, before_cap=tag.factor)
    if name in EXPONENTIAL:
        return Weights(None, exponents=True)
    if name in JOINING:
        return _with_sinks(lineage, tag, tensor, tensors(args, kwargs), result)
    if name in ADDING:
        one, two = (lineage.get(x) if isinstance(x, Tensor) else None for x in (first, second))
        if isinstance(one, Scores) and isinstance(two, Scores) and _same(one.q, two.q) and _same(one.k, two.k):
            return None  # the same product twice
        rows = isinstance(second, Tensor) and second.shape == (*tensor.shape[:-1], 1) != tensor.shape
        if name in SUBTRACTING and first is tensor and rows:
            taken = second.detach() * float(kwargs.get("alpha", 1))
            return replace(tag, shift=taken if tag.shift is None else tag.shift + taken)
        own = share(name, args, kwargs, tensor)
        return tag if own == 1 else tag.times(own)
    return tag if name in MASKING else None


def _with_sinks(lineage: Lineage, tag: Scores, tensor: Tensor, parts: list[Tensor], result: Tensor) -> Scores | None:
    """The tag of scores that a column was joined to, if that was made of no query: it is a sink, else a key."""
    if len(parts) != 2 or tag.sinks is not None or result.shape != (*tensor.shape[:-1], tensor.shape[-1] + 1):
        return None
    first = parts[1] is tensor
    column = parts[0 if first else 1]
    if lineage.get(column) is not None or lineage.scores(column) is not None:
        return None
    sinks = column.detach()[..., 0]
    # What was taken from the scores before, was not taken from this one.
    return replace(tag, sinks=sinks if tag.shift is None else sinks + tag.shift[..., 0], sinks_first=first)


def _same(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.shape == two.shape


def version(x: Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version  # noqa: SLF001


def _factor(value: Any, heads: Tensor | None = None) -> Any:
    """One number; or, for scores, one per head in a shape that broadcasts; None for anything else."""
    if isinstance(value, Real):
        return float(value)
    if not isinstance(value, Tensor):
        return None
    if value.numel() == 1:
        return float(value.detach())
    if heads is None or min(heads.dim(), value.dim()) < 3:
        return None
    return value.detach() if value.numel() == heads.shape[-3] == value.shape[-3] else None


def _read_einsum(args: tuple[Any, ...]) -> tuple[_Pair | None, int | None, int]:
    """The operands of an einsum that makes scores; None for another.

    Also how many numbers it sums over, and which axis its weight puts out, if one of the operands is a weight.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    plain = next((x for x in operands if isinstance(x, Tensor) and x.dim() and not _is_weight(x)), None)
    unknown = None, None if plain is None else plain.shape[-1], -1
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return unknown
    inputs, output = equation.replace(" ", "").split("->")
    one, two = inputs.split(",")
    if "..." in equation:
        if not all(part.startswith("...") for part in (one, two, output)) or operands[0].dim() != operands[1].dim():
            return unknown
        spelled = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: operands[0].dim() - len(one) + 3]
        one, two, output = (part.replace("...", spelled) for part in (one, two, output))
    summed = (set(one) & set(two)) - set(output)
    widths = dict(zip(one + two, (*operands[0].shape, *operands[1].shape), strict=True))
    weight, other = (one, two) if _is_weight(operands[0]) else (two, one)
    own = [place for place, letter in enumerate(output) if letter in weight and letter not in other]
    sizes = math.prod(widths[letter] for letter in summed), own[-1] - len(output) if own else -1
    if len(summed) != 1 or len(output) < 3:
        return None, *sizes
    width = summed.pop()
    row, column = output[-2], output[-1]
    if row in two and column in one:
        one, two, operands = two, one, operands[::-1]
    if row not in one or column not in two or row in two or column in one:
        return None, *sizes
    q = _arrange(one, operands[0], output[:-2] + row + width)
    k = _arrange(two, operands[1], output[:-2] + column + width)
    return None if q is None or k is None else _Pair(q, k, *operands), *sizes


def _arrange(letters: str, x: Tensor, order: str) -> Tensor | None:
    if set(letters) - set(order):
        return None
    for letter in order:
        if letter not in letters:
            x, letters = x.unsqueeze(0), letter + letters
    return x.permute([letters.index(letter) for letter in order])


def _outermost(sources: list[Source]) -> tuple[Source, ...]:
    """Without repetitions, and without slices of what is there whole."""
    distinct = {source.piece: source for source in sources}
    return tuple(
        source
        for piece, source in distinct.items()
        if not any(above in distinct for above in piece.ancestors() if above is not piece)
    )


def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, also those in lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(x for x in value if isinstance(x, Tensor))
    return found
