"""Every case, by section."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from .._attend import attend
from . import _fresh
from ._attention import FUSED, OURS, Shape, backward, causal, forward
from ._model import between_products, training_step, watching
from ._rounds import Contender, measure
from ._row import Case, Check, Row, Settings

HEADS = {512: 8, 2048: 4, 8192: 2}
"""Of a length, so that a call takes long enough and not too long."""

FORWARD = {"float32": 1.10, "bfloat16": 1.30}
TARGETS = {("float32", False): 1.25, ("float32", True): 1.4, ("bfloat16", False): 2.0, ("bfloat16", True): 2.0}
BACKWARD = {"float32": 1.10, "bfloat16": 1.0}
READ = 0.65
STATISTICS, STATISTICS_OF_FEW = 0.05, 0.10
"""What statistics may cost; the latter of a causal call of up to 512 tokens."""

QUICK = frozenset(("all", "usual", "quick"))
USUAL = frozenset(("all", "usual"))
ALL = frozenset(("all",))


def all_cases(threads: int | None = None) -> list[Case]:
    """Every case, with one thread and with all of them where that makes a difference, or with so many threads."""
    most = threads or torch.get_num_threads()
    levels = [most] if threads or most == 1 else [1, most]
    return [
        *_forward(levels, most),
        *_backward(levels, most),
        *_shapes(most),
        *_models(most),
        *_memory(most),
        *_watch(most),
        *_calls(most),
    ]


def _forward(levels: list[int], most: int) -> Iterator[Case]:
    for dtype, is_causal, head_dim, length, threads in _grid(levels):
        few = is_causal and length <= 512
        limits = {
            "speed": FORWARD[dtype],
            "target": TARGETS[dtype, is_causal],
            "statistics": STATISTICS_OF_FEW if few else STATISTICS,
            "read": READ,
        }
        run = partial(_run_forward, dtype, HEADS[length], length, head_dim, is_causal, limits)
        chosen = ALL
        if threads == most and head_dim == 64:
            if length == 2048:
                chosen = QUICK
            elif length == 512:
                chosen = QUICK if dtype == "float32" and is_causal else USUAL
            elif dtype == "float32" and is_causal:
                chosen = USUAL
        yield Case("forward", _name(HEADS[length], length, head_dim, is_causal), dtype, threads, run, chosen)


def _run_forward(
    dtype: str,
    heads: int,
    length: int,
    head_dim: int,
    is_causal: bool,
    limits: dict[str, float],
    case: Case,
    settings: Settings,
) -> Row:
    shape = causal(dtype, heads, length, head_dim, is_causal=is_causal)
    return forward(case, settings, shape, all_ways=True, limits=limits)


def _backward(levels: list[int], most: int) -> Iterator[Case]:
    for dtype, is_causal, head_dim, length, threads in _grid(levels):
        if (length, head_dim) == (8192, 128):
            continue  # takes long and says nothing new
        run = partial(_run_backward, dtype, HEADS[length], length, head_dim, is_causal)
        chosen = ALL
        if threads == most and head_dim == 64 and is_causal and length <= 2048:
            chosen = QUICK if (dtype, length) == ("float32", 512) else USUAL
        yield Case("backward", _name(HEADS[length], length, head_dim, is_causal), dtype, threads, run, chosen)


def _run_backward(
    dtype: str, heads: int, length: int, head_dim: int, is_causal: bool, case: Case, settings: Settings
) -> Row:
    return backward(case, settings, causal(dtype, heads, length, head_dim, is_causal=is_causal), BACKWARD[dtype])


def _grid(levels: list[int]) -> Iterator[tuple[str, bool, int, int, int]]:
    for dtype in FORWARD:
        for is_causal in (False, True):
            for head_dim in (64, 128):
                for length in HEADS:
                    for threads in levels:
                        yield dtype, is_causal, head_dim, length, threads


def _name(heads: int, length: int, head_dim: int, is_causal: bool) -> str:
    return f"{heads} × {length} × {head_dim}{' causal' if is_causal else ''}"


def _shapes(most: int) -> Iterator[Case]:
    def case(name: str, chosen: frozenset[str], speed: float = 1.0, **shape: Any) -> Case:
        return Case("shapes", name, "float32", most, partial(_run_shape, shape, speed), chosen)

    for heads, keys, chosen in ((8, 4096, QUICK), (8, 32768, ALL), (1, 32768, ALL)):
        yield case(f"decode {heads} × 1 over {keys}", chosen, heads=heads, queries=1, keys=keys)
    for length in (16, 32, 64, 128):
        for is_causal in (False, True):
            chosen = USUAL if length == 64 else ALL
            yield case(_name(8, length, 64, is_causal), chosen, heads=8, queries=length, is_causal=is_causal)
    for head_dim in (80, 96):
        for is_causal in (False, True):
            name = _name(8, 1024, head_dim, is_causal)
            yield case(name, ALL, heads=8, queries=1024, head_dim=head_dim, is_causal=is_causal)
    for length in (1000, 1537):
        for is_causal in (False, True):
            yield case(_name(8, length, 64, is_causal), ALL, heads=8, queries=length, is_causal=is_causal)
    for is_causal in (False, True):
        name = f"32 heads over 8, {_name(32, 512, 64, is_causal)}"
        yield case(name, USUAL if is_causal else ALL, heads=32, kv_heads=8, queries=512, is_causal=is_causal)
    yield case("8 × 1024 × 64 bool mask", USUAL, heads=8, queries=1024, masked=True)
    yield case("2 × 8192 × 64 window 256", USUAL, 3.0, heads=2, queries=8192, window=256)


def _run_shape(shape: dict[str, Any], speed: float, case: Case, settings: Settings) -> Row:
    return forward(case, settings, _shape(**shape), all_ways=False, limits={"speed": speed})


def _shape(
    heads: int,
    queries: int,
    *,
    head_dim: int = 64,
    keys: int | None = None,
    kv_heads: int | None = None,
    is_causal: bool = False,
    masked: bool = False,
    window: int = 0,
) -> Shape:
    ours: dict[str, Any] = {"is_causal": is_causal} if is_causal else {}
    theirs: dict[str, Any] = dict(ours)
    pairs = queries * (queries + 1) // 2 if is_causal else None
    if kv_heads:
        ours["enable_gqa"] = theirs["enable_gqa"] = True
    if masked:
        mask = torch.rand((1, heads, queries, keys or queries), generator=torch.Generator().manual_seed(1)) < 0.8
        mask[..., 0] = True
        ours["attn_mask"] = theirs["attn_mask"] = mask
    if window:
        # torch has no window: it is told by a mask.
        ours |= {"is_causal": True, "window": (window - 1, 0)}
        apart = torch.arange(queries)[:, None] - torch.arange(queries)
        theirs["attn_mask"] = (apart >= 0) & (apart < window)
        pairs = int(theirs["attn_mask"].sum())
    return Shape(
        "float32", heads, queries, head_dim, keys=keys, kv_heads=kv_heads, ours=ours, theirs=theirs, pairs=pairs
    )


def _models(most: int) -> Iterator[Case]:
    run: Any = partial(training_step, layers=4, width=512, heads=8, length=1024, vocabulary=4096)
    yield Case("model", "a training step of a small GPT, 1024 tokens", "float32", most, run, USUAL)
    for length, times, chosen in ((512, 4, USUAL), (2048, 2, ALL)):
        run = partial(between_products, heads=8, length=length, width=512, times=times)
        yield Case("inside", f"between matrix products, 8 × {length} × 64 causal", "float32", most, run, chosen)


def _memory(most: int) -> Iterator[Case]:
    size = f"{_fresh.HEADS} × {_fresh.LENGTH} × {_fresh.HEAD_DIM}"
    for what, told in (("forward", "forward"), ("backward", "forward and backward")):
        yield Case("memory", f"{told}, {size}", "float32", most, partial(_run_memory, what))


def _run_memory(what: str, case: Case, _: Settings) -> Row:
    found = {OURS: _fresh.ask("memory", "attemper", what), FUSED: _fresh.ask("memory", "torch", what)}
    check = Check("memory", found[OURS] / found[FUSED], 1.5, False)
    return case.row(megabytes=found, checks=[check], rounds=1)


def _watch(most: int) -> Iterator[Case]:
    run: Any = partial(watching, tokens=1024, limit=1.15)
    yield Case("watch", "SmolLM2 forward, 1024 tokens, every call read beside", "float32", most, run)


def _calls(most: int) -> Iterator[Case]:
    for framework in ("NumPy", "torch"):
        yield Case(
            "calls", f"one call, 8 × 16 × 64, {framework}", "float32", most, partial(_run_call, framework), QUICK
        )
    for framework in ("NumPy", "torch"):
        name = f"the first call of a process, {framework}, kernels compiled before"
        yield Case("calls", name, "float32", most, partial(_run_first, framework, False), USUAL)
    name = "the first call of all, NumPy, with its compilation"
    yield Case("calls", name, "float32", most, partial(_run_first, "NumPy", True))


def _run_call(framework: str, case: Case, settings: Settings) -> Row:
    x: Any = np.random.default_rng(0).standard_normal((3, 8, 16, 64), dtype=np.float32)
    contenders = [Contender(OURS, lambda: attend(*x))]
    if framework == "torch":
        x = torch.from_numpy(x)
        contenders.append(Contender(FUSED, lambda: F.scaled_dot_product_attention(*x)))
    with torch.no_grad():
        attend(*x)  # compiles, where nothing has before
        timing = measure(contenders, settings)
    seconds = timing.seconds()
    return case.row(
        ratio=timing.ratio(FUSED, OURS) if FUSED in seconds else None,
        rounds=len(timing.rounds),
        discarded=timing.discarded,
        seconds=seconds,
        checks=[Check("time", seconds[OURS], 100e-6, False, "µs")],
    )


def _run_first(framework: str, cold: bool, case: Case, _: Settings) -> Row:
    if cold:
        with tempfile.TemporaryDirectory() as folder:
            found = [_fresh.ask("first", framework.lower(), cache=folder)]
    else:
        # The first of them may be the one that compiles.
        _fresh.ask("first", framework.lower())
        found = [_fresh.ask("first", framework.lower()) for _ in range(3)]
    middle = sorted(found)[len(found) // 2]
    check = Check("time", middle, 10.0 if cold else 0.5, False, "s")
    return case.row(seconds={OURS: middle}, checks=[check], rounds=len(found))
