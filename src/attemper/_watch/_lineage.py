"""Where the tensors of a forward pass come from, as far as attention cares.

Three things are followed from operation to operation:

    Projected   q or k on its way from a projection to attention: which outputs of projections it is made of, so that
                any factor put on it in between can be measured; whether it was normalised
    Scores      q·kᵀ of attention written by hand, on its way to the softmax: the operands, and what multiplied them
    Weights     what the softmax made of them, on its way to the values

A tag lives as long as its tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operations import (
    ACTIVATING,
    ADDING,
    DIVIDING,
    MASKING,
    MULTIPLYING,
    NORMALISING,
    PRODUCTS,
    PROJECTING,
    SAME_NUMBERS,
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


@dataclass(frozen=True, eq=False)
class Weights:
    """The output of a softmax, and the Record that was made of it."""

    record: Any
    unseen: bool = False
    """Whether what its scores are made of was not seen."""


class Lineage:
    """The tags of one forward pass."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def clear(self) -> None:
        self._tags.clear()

    def get(self, tensor: object) -> Any:
        found = self._tags.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def set(self, tensor: Tensor, tag: Any) -> None:
        key = id(tensor)
        self._tags[key] = (weakref.ref(tensor, lambda _: self._tags.pop(key, None)), tag)

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
            self.set(parts[0], _fresh(parts[0], given[name == "addmm"] if given else None))
            return
        if name in PRODUCTS:
            self._product(name, args, kwargs, parts[0])
            return
        tags = [(x, tag) for x in tensors(args, kwargs) if (tag := self.get(x)) is not None]
        for x, tag in tags:
            if isinstance(tag, Scores):
                after = _after_scores(self, name, args, kwargs, tag, x, parts[0])
                if after is not None:
                    self.set(parts[0], after)
                return
            if isinstance(tag, Weights):
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
        result = parts[0]
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
        if alone and (name in MULTIPLYING or (name in DIVIDING and args[0] is tensor)) and tag.own is not None:
            number = _factor(next((x for x in (*args, *kwargs.values()) if x is not tensor), None))
            if number:
                # Known exactly, and also where the tensor itself was overwritten.
                self.set(result, replace(tag, factor=tag.factor * (1 / number if name in DIVIDING else number)))
                return
        related = not alone and bool(
            set.intersection(*({source.piece.root for source in t.made_of(x)} for x, t in tags))
        )
        if name in ADDING and not related and all(t.own is not None for _, t in tags):
            # A bias, a low-rank addition, a position: still what the projection, in a wider sense, put out.
            root = tag.own.root if tag.own is not None else Piece()
            self.set(result, Projected(Piece(inputs=root.inputs, outputs=root.outputs)))
            return
        if name == "cat" and any(x.numel() and self.get(x) is None for x in tensors(args, kwargs)):
            # A cache in front of it: most of these numbers were not seen being made.
            return
        # What is multiplied by something made of itself is a norm written out.
        normalising = name in NORMALISING or (related and (name in MULTIPLYING or name in DIVIDING))
        if normalising or (tag.normalised and alone and _is_gain(name, args, kwargs, tensor)):
            # From here on counts what is done to the norm's output.
            root = tag.made_of(tensor)[0].piece.root if tag.made_of(tensor) else Piece()
            self.set(result, Projected(Piece(inputs=root.inputs), normalised=True))
            return
        made_of = tag.made_of(tensor) if alone else _outermost([source for x, t in tags for source in t.made_of(x)])
        self.set(result, Projected(None, 1.0, made_of, any(t.normalised for _, t in tags)))

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        operands = tensors(args, kwargs)
        if any(isinstance(self.get(x), Weights) for x in operands):
            return  # the weighted values, which the interceptor looks at itself
        arranged: tuple[Tensor, Tensor] | None
        factor = 1.0
        if name == "einsum":
            arranged = _einsum_operands(args)
        elif name == "baddbmm":
            factor = float(kwargs.get("alpha", 1))
            arranged = (operands[-2], operands[-1].mT)
        else:
            one, two = operands[:2]
            projecting = one.dim() != two.dim() and min(one.dim(), two.dim()) < 3
            projecting = projecting or one.dim() < 2 or any(_is_weight(x) for x in (one, two))
            arranged = None if projecting else (one, two.mT)
        if arranged is None:
            fresh = _fresh(result, operands[0])
            if fresh.own is not None and not any(_is_weight(x) for x in operands):
                fresh.own.outputs = None  # a product of two things is no choice among outputs
            self.set(result, fresh)
            return
        for made in arranged:
            for source in operands:
                tag = self.get(source)
                same = made is not source and made.data_ptr() == source.data_ptr() and made.numel() == source.numel()
                if same and isinstance(tag, Projected):
                    self.set(made, tag)
        # A bias and a factor that came with the product (baddbmm) are in it already.
        self.set(result, Scores(*arranged, None if name == "baddbmm" else result, version(result), factor))


def _is_gain(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> bool:
    """Whether an operation is the gain or bias of a norm: one number for each place in a head."""
    others = [x for x in tensors(args, kwargs) if x is not tensor]
    shaped = len(others) == 1 and others[0].dim() == 1 and others[0].shape[0] == tensor.shape[-1]
    return shaped and (name in MULTIPLYING or name in ADDING)


def _fresh(result: Tensor, given: Tensor | None) -> Projected:
    """What a projection put out."""
    inputs = given.shape[-1] if given is not None and given.dim() else None
    return Projected(Piece(inputs=inputs, outputs=result.shape[-1] if result.dim() else None))


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, torch.nn.Parameter) or isinstance(x._base, torch.nn.Parameter)  # noqa: SLF001


def _after_scores(
    lineage: Lineage,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tag: Scores,
    tensor: Tensor,
    result: Tensor,
) -> Scores | None:
    """The tag of what an operation made of scores, or None where they are scores no more."""
    if tag.product is not None and version(tag.product) != tag.version:
        tag = replace(tag, product=None)
    if name in SAME_NUMBERS:
        if result.numel() != tensor.numel():
            return None
        turned = result.dim() == tensor.dim() and result.stride()[-2:] == tensor.stride()[-2:][::-1]
        if turned and result.shape[-2:] == tensor.shape[-2:][::-1] and tensor.stride()[-1] != tensor.stride()[-2]:
            return replace(tag, q=tag.k, k=tag.q, product=None)
        return tag
    if name in MULTIPLYING or name in DIVIDING:
        if name in DIVIDING and args[0] is not tensor:
            return None
        number = _factor(next((x for x in (*args, *kwargs.values()) if x is not tensor), None), heads=tensor)
        if number is None:
            return None
        number = 1 / number if name in DIVIDING else number
        if tag.before_cap is not None and tag.softcap is None and isinstance(number, float):
            # tanh(x / c) · c: what came before the tanh was divided by c.
            return replace(tag, softcap=number, factor=tag.before_cap * number)
        return replace(tag, factor=tag.factor * number)
    if name in ("tanh", "tanh_"):
        return replace(tag, before_cap=tag.factor)
    if name == "cat" and result.shape[-1] == tensor.shape[-1] + 1 and result.shape[:-1] == tensor.shape[:-1]:
        return replace(tag, sinks=result[..., -1])
    if name in ("sub", "sub_", "__sub__", "__isub__") and args[0] is tensor and isinstance(args[1], Tensor):
        rows = tuple(args[1].shape) == (*tensor.shape[:-1], 1)
        return replace(tag, shift=args[1]) if rows and tensor.shape[-1] > 1 else tag
    if name in ADDING:
        if isinstance(args[0], Tensor) and isinstance(lineage.get(args[0]), Scores) and len(args) > 1:
            other = lineage.get(args[1])
            if isinstance(other, Scores) and _same(other.q, tag.q) and _same(other.k, tag.k):
                return None  # the same product twice
        second = len(args) > 1 and args[1] is tensor and args[0] is not tensor
        sign = -1.0 if (name.strip("_") in ("sub", "isub") and second) or name == "__rsub__" else 1.0
        sign *= float(kwargs.get("alpha", 1)) if second else 1.0
        return tag if sign == 1 else replace(tag, factor=tag.factor * sign)
    return tag if name in MASKING else None


def _same(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.shape == two.shape


def version(x: Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version  # noqa: SLF001


def _factor(value: Any, heads: Tensor | None = None) -> Any:
    """One number; or, for scores, one per head in a shape that broadcasts; None for anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor):
        return None
    if value.numel() == 1:
        return float(value.detach())
    if heads is None or min(heads.dim(), value.dim()) < 3:
        return None
    return value.detach() if value.numel() == heads.shape[-3] == value.shape[-3] else None


def _einsum_operands(args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """The q (…, queries, head_dim) and k (…, keys, head_dim) of an einsum that makes scores; None for another."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    if any(_is_weight(x) for x in operands):
        return None
    inputs, output = equation.replace(" ", "").split("->")
    one, two = inputs.split(",")
    if "..." in equation:
        if not all(part.startswith("...") for part in (one, two, output)) or operands[0].dim() != operands[1].dim():
            return None
        spelled = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: operands[0].dim() - len(one) + 3]
        one, two, output = (part.replace("...", spelled) for part in (one, two, output))
    summed = (set(one) & set(two)) - set(output)
    if len(summed) != 1 or len(output) < 3:
        return None
    width = summed.pop()
    row, column = output[-2], output[-1]
    if row in two and column in one:
        one, two, operands = two, one, operands[::-1]
    if row not in one or column not in two or row in two or column in one:
        return None
    q = _arrange(one, operands[0], output[:-2] + row + width)
    k = _arrange(two, operands[1], output[:-2] + column + width)
    return None if q is None or k is None else (q, k)


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
