"""The calls that are timed: ours, torch's, and what one writes by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .._attend import attend, read
from ._rounds import Clock, Contender, Timing, measure, wall
from ._row import Case, Check, Row, Settings

FUSED, OURS, BARE, READ = "torch fused", "attemper", "attemper, no statistics", "attemper read"
EAGER, NAIVE = "torch eager, same statistics", "NumPy by hand"
LONGEST_EAGER, LONGEST_NAIVE = 2048, 512
"""Tokens up to which what builds the matrix is measured."""
SELDOM = 4
"""Rounds in which a slow contender takes part once."""

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far two outputs may be apart, as a share of the largest number: enough to tell that they are the same thing."""

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 7
"""Matrix products of queries × keys × head_dim in a forward pass, and in one with a backward pass that recomputes."""


PRODUCT_ON_GPU = 8192
"""Rows and columns of a matrix product that fills a GPU."""


class Place(NamedTuple):
    """Where attention is computed: by what clock, and which kernels of torch's there are, each within a context."""

    device: str
    clock: Clock
    peers: tuple[tuple[str, Callable[[], AbstractContextManager[Any]]], ...]


CPU = Place("cpu", wall, ((FUSED, nullcontext),))


class Shape:
    """Operands, and what torch is told in place of our keywords."""

    def __init__(
        self,
        dtype: str,
        heads: int,
        queries: int,
        head_dim: int,
        *,
        keys: int | None = None,
        kv_heads: int | None = None,
        ours: dict[str, Any] | None = None,
        theirs: dict[str, Any] | None = None,
        pairs: int | None = None,
        batch: int = 1,
        device: str = "cpu",
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        keys, kv_heads = keys or queries, kv_heads or heads
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            return torch.randn((batch, heads, length, head_dim), generator=generator, device=device).to(self.dtype)

        self.q, self.k, self.v = normal(heads, queries), normal(kv_heads, keys), normal(kv_heads, keys)
        self.upstream = normal(heads, queries)
        self.ours, self.theirs = ours or {}, theirs or {}
        # What one product of queries × keys × head_dim takes, of the pairs that are seen.
        self.product = 2.0 * batch * heads * head_dim * (queries * keys if pairs is None else pairs)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def causal(dtype: str, heads: int, length: int, head_dim: int, *, is_causal: bool) -> Shape:
    """Full or causal self-attention."""
    keywords = {"is_causal": is_causal}
    pairs = length * (length + 1) // 2 if is_causal else None
    return Shape(dtype, heads, length, head_dim, ours=keywords, theirs=keywords, pairs=pairs)


# Forward


def forward(
    case: Case, settings: Settings, shape: Shape, *, all_ways: bool, limits: dict[str, float], place: Place = CPU
) -> Row:
    """Time a forward pass: ours with and without statistics against torch's, and on request all other ways."""
    q, k, v = shape.operands
    with torch.no_grad():
        peers = _peers(place, partial(F.scaled_dot_product_attention, q, k, v, **shape.theirs))
        contenders = [*peers, Contender(OURS, partial(attend, q, k, v, **shape.ours))]
        if all_ways:
            contenders += [
                Contender(BARE, partial(attend, q, k, v, stats="none", **shape.ours)),
                Contender(READ, partial(read, q, k, **shape.ours)),
                *(_by_hand(shape) if settings.by_hand and place is CPU else ()),
            ]
        theirs: Any = peers[0].call()
        ours: Any = attend(q, k, v, **shape.ours)
        timing = measure(contenders, settings, place.clock)
    checks = _checks(timing, limits)
    return _row(case, timing, shape, [ours.output], [theirs], checks, FORWARD_PRODUCTS, place)


def _peers(place: Place, call: Callable[[], object]) -> list[Contender]:
    """Every kernel of torch's that takes a call."""

    def within(context: Callable[[], AbstractContextManager[Any]]) -> object:
        with context():
            return call()

    if len(place.peers) == 1:
        # Nothing to choose; and a context takes the host longer than a short call does.
        return [Contender(place.peers[0][0], call)]
    found = []
    for name, context in place.peers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why it does not take the call, in several
                within(context)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        found.append(Contender(name, partial(within, context)))
    if not found:
        raise RuntimeError("None of torch's fused kernels takes this call.")
    return found


def _checks(timing: Timing, limits: dict[str, float]) -> list[Check]:
    found = []
    if "speed" in limits:
        found.append(Check("speed", timing.ratio(FUSED, OURS), limits["speed"], True, target=limits.get("target")))
    if "statistics" in limits:
        found.append(Check("statistics", timing.ratio(OURS, BARE) - 1, limits["statistics"], False, "%"))
    if "read" in limits:
        found.append(Check("read", timing.ratio(READ, OURS), limits["read"], False))
    return found


def _row(
    case: Case,
    timing: Timing,
    shape: Shape,
    ours: list[Tensor],
    theirs: list[Tensor],
    checks: list[Check],
    products: int,
    place: Place,
) -> Row:
    seconds = timing.seconds()
    peer = min((name for name, _ in place.peers if name in seconds), key=seconds.__getitem__)
    error = max(_apart(mine, other) for mine, other in zip(ours, theirs, strict=True))
    same = Check("difference", error, CLOSE[shape.dtype], False, "")
    # One query reads the keys once and computes next to nothing: no matrix product is like it.
    products = products if shape.q.shape[-2] > 1 else 0
    return case.row(
        peer=peer,
        ratio=timing.ratio(peer, OURS),
        share=products * shape.product / seconds[OURS] / peak(shape.dtype, case.threads, place) if products else None,
        rounds=len(timing.rounds),
        discarded=timing.discarded,
        seconds=seconds,
        error=error,
        # A fast wrong answer is no answer.
        checks=[*checks, *(check for check in [same] if not check.met)],
    )


def _apart(mine: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    wide = other.float()
    return float((mine.float() - wide).abs().max() / wide.abs().max())


def _by_hand(shape: Shape) -> list[Contender]:
    q, k, v = shape.operands
    is_causal = bool(shape.ours.get("is_causal"))
    length = max(q.shape[-2], k.shape[-2])
    found = []
    if length <= LONGEST_EAGER:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1) if is_causal else None
        found.append(Contender(EAGER, partial(_eager, q, k, v, hidden), SELDOM))
    # NumPy's threads are its own, as many as there are cores, and cannot be told from here.
    if length <= LONGEST_NAIVE and shape.dtype == torch.float32 and torch.get_num_threads() > 1:
        found.append(Contender(NAIVE, partial(_naive, q.numpy(), k.numpy(), v.numpy(), is_causal), SELDOM))
    return found


def _eager(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, ...]:
    """What one writes to know what attend tells: the matrix, softmax, and the statistics from the weights."""
    s = (q @ k.mT).float() * q.shape[-1] ** -0.5
    shown = s
    if hidden is not None:
        shown = s.masked_fill(hidden, 0)
        s = s.masked_fill(hidden, -math.inf)
    n = s.shape[-1] if hidden is None else (~hidden).sum(-1)
    highest = s.amax(-1)
    logsumexp = s.logsumexp(-1)
    p = s.softmax(-1)
    expected = (p * shown).sum(-1)
    mean = shown.sum(-1) / n
    spread = s - mean[..., None]
    if hidden is not None:
        spread = spread.masked_fill(hidden, 0)
    output = p.to(q.dtype) @ v
    return (
        output,
        highest,
        logsumexp,
        expected,
        logsumexp - expected,
        p.amax(-1),
        p.square().sum(-1),
        mean,
        (spread.square().sum(-1) / n).sqrt(),
        p[..., 0],
        output.float().norm(dim=-1),
    )


def _naive(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    s = q @ np.swapaxes(k, -1, -2) * np.float32(q.shape[-1] ** -0.5)
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=np.bool_), s, -np.inf)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v


# Forward and backward


def backward(case: Case, settings: Settings, shape: Shape, limit: float | None, place: Place = CPU) -> Row:
    """Time a forward and a backward pass: ours measures pressure and gradient flow besides."""
    leaves: Any = tuple(x.clone().requires_grad_() for x in shape.operands)

    def step(output: Tensor) -> tuple[Tensor, ...]:
        return (output.detach(), *torch.autograd.grad(output, leaves, shape.upstream))

    peers = _peers(place, lambda: step(F.scaled_dot_product_attention(*leaves, **shape.theirs)))
    contenders = [
        *peers,
        Contender(OURS, lambda: step(attend(*leaves, **shape.ours).output)),
        Contender(BARE, lambda: step(attend(*leaves, stats="none", **shape.ours).output)),
    ]
    theirs: Any = peers[0].call()
    ours: Any = step(attend(*leaves, **shape.ours).output)
    timing = measure(contenders, settings, place.clock)
    checks = _checks(timing, {} if limit is None else {"speed": limit})
    return _row(case, timing, shape, list(ours), list(theirs), checks, BACKWARD_PRODUCTS, place)


# A matrix product


@cache
def peak(dtype: torch.dtype, threads: int, place: Place, calls: int = 10) -> float:
    """Operations in a second of a large matrix product, at its best."""
    if threads and threads != torch.get_num_threads():
        raise AssertionError("measured on other threads than said")
    n = 2048 if place is CPU else PRODUCT_ON_GPU
    a, b = torch.randn(2, n, n, device=place.device).to(dtype)
    return 2.0 * n**3 / min(place.clock(partial(torch.mm, a, b), 1) for _ in range(calls))
