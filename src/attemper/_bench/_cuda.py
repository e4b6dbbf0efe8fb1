"""The cases on a CUDA GPU, the clock there, and who else computes attention on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ._attention import Place, Shape, backward, forward
from ._row import Case, Row, Settings

TOKENS = 16384
"""In all entries together."""

LENGTHS = (2048, 8192, 16384)
DECODED = 32768
"""Keys that one query sees."""

AHEAD = 10_000_000
"""Cycles that the device sleeps, so that the host is ahead of it: some 5 ms."""


def events(call: Callable[[], object], calls: int) -> float:
    """Seconds of one call, of so many, by events on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)  # noqa: SLF001
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls / 1000


GPU = Place(
    "cuda",
    events,
    (
        ("torch cuDNN", partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
        ("torch flash", partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
        ("torch memory-efficient", partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)),
    ),
)


def all_cases() -> list[Case]:
    """Every case."""
    return [*_square("forward"), *_square("backward"), _decode()]


def _square(section: str) -> Iterator[Case]:
    for head_dim, heads in ((128, 16), (64, 32)):
        for length in LENGTHS:
            for is_causal in (False, True):
                name = f"{TOKENS // length} × {heads} × {length} × {head_dim}{' causal' if is_causal else ''}"
                selections = {"all"}
                if length < TOKENS and (is_causal or section == "forward"):
                    selections.add("usual")
                if length == LENGTHS[1] and is_causal:
                    selections.add("quick")
                run: Any = partial(_run_square, section, heads, length, head_dim, is_causal)
                yield Case(section, name, "bfloat16", 0, run, frozenset(selections))


def _run_square(
    section: str, heads: int, length: int, head_dim: int, is_causal: bool, case: Case, settings: Settings
) -> Row:
    keywords = {"is_causal": is_causal}
    shape = Shape(
        "bfloat16",
        heads,
        length,
        head_dim,
        ours=keywords,
        theirs=keywords,
        pairs=length * (length + 1) // 2 if is_causal else None,
        batch=TOKENS // length,
        device=GPU.device,
    )
    if section == "backward":
        return backward(case, settings, shape, None, GPU)
    return forward(case, settings, shape, all_ways=True, limits={}, place=GPU)


def _decode() -> Case:
    name = f"one query and {DECODED} keys, 16 × 32 over 8 × 128"
    return Case("decode", name, "bfloat16", 0, _run_decode, frozenset(("all", "usual")))


def _run_decode(case: Case, settings: Settings) -> Row:
    keywords = {"enable_gqa": True}
    shape = Shape(
        "bfloat16", 32, 1, 128, keys=DECODED, kv_heads=8, ours=keywords, theirs=keywords, batch=16, device=GPU.device
    )
    return forward(case, settings, shape, all_ways=False, limits={}, place=GPU)
