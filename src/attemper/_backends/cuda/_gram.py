"""Sums over keys from which sums over scores follow: Σs = q·Σk and Σs² = qᵀ(Σkkᵀ)q, for the keys before some places.

For many queries this is far less work than to add up scores. The keys are cut into granules; sum i is over the first i
of them. A Gram matrix comes as three bfloat16 matrices that add up to it as a float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._operator import Call
from ._ready import launch
from ._tile import Matrix, load_keys

PARTS: tl.constexpr = tl.constexpr(3)
MOST_GRANULES = 16
SUMMED_KEYS = 4096
"""From as many queries and keys on, moments of scores follow from sums over keys."""
LEAST_KEYS = 1024
"""Of a granule: each takes memory, and of its keys' scores half are added up one by one on average."""


class Grams(NamedTuple):
    """Sums over the keys before each granule, and after the last."""

    parts: Tensor
    """(batch · kv_heads · (granules + 1), 3, head_dim, head_dim)."""
    sums: Tensor
    """(batch · kv_heads · (granules + 1), head_dim)."""
    granule: int
    """Keys of each, but that the last may be shorter."""
    granules: int


@triton.jit
def granule_kernel(k, parts, sums, heads, keys, granule, count, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr):
    """Σkkᵀ and Σk of one granule."""
    program = tl.program_id(0)
    unit = program // count
    batch, head = unit // heads, unit % heads
    begin = program % count * granule
    gram = tl.zeros([D, D], tl.float32)
    total = tl.zeros([D], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + granule, keys), BN):
        tile = load_keys(k, batch, head, start, keys, D, BN, D)
        wide = tile.to(tl.float32)
        gram = tl.dot(wide.T, wide, gram) if WIDEN else tl.dot(tile.T, tile, gram)
        total += tl.sum(wide, 0)
    component = tl.arange(0, D)
    place = program.to(tl.int64) * (D * D) + component[:, None] * D + component[None, :]
    tl.store(parts + place, gram)
    tl.store(sums + program.to(tl.int64) * D + component, total)


@triton.jit
def running_kernel(
    granule_grams, granule_sums, parts, sums, count, BM: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Some rows of the sums over the granules so far, in parts."""
    unit = (tl.program_id(0) // (D // BM)).to(tl.int64)
    row = tl.program_id(0) % (D // BM) * BM + tl.arange(0, BM)
    component = tl.arange(0, D)
    here = row[:, None] * D + component[None, :]
    gram = tl.zeros([BM, D], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for i in tl.range(0, count + 1):
        rest = gram
        for part in tl.static_range(PARTS):
            rounded = rest.to(tl.bfloat16)
            tl.store(parts + ((unit * (count + 1) + i) * PARTS + part) * (D * D) + here, rounded)
            rest -= rounded.to(tl.float32)
        tl.store(sums + (unit * (count + 1) + i) * D + row, total)
        # Behind the last there is nothing to add.
        place = unit * count + tl.minimum(i, count - 1)
        gram += tl.load(granule_grams + place * (D * D) + here)
        total += tl.load(granule_sums + place * D + row)


def begins_at_first_key(call: Call) -> bool:
    """Whether every row that sees a key sees the first."""
    if call.band is not None:
        return call.band[0] + call.q.shape[2] <= 1
    return call.first is None


def worthwhile(call: Call) -> bool:
    """Whether sums over scores are to follow from sums over keys: with few of either that costs more than it saves."""
    plain = call.mask is None and call.softcap is None and not call.dropout_p and call.q.shape[3] in (64, 128)
    enough = min(call.q.shape[2], call.k.shape[2]) >= SUMMED_KEYS
    return plain and enough and call.q.dtype == torch.bfloat16 and begins_at_first_key(call)


def grams(call: Call, keys: int) -> Grams:
    """The sums over the first keys of a call."""
    k = call.k
    batch, heads, _, depth = k.shape
    granule = max(LEAST_KEYS, triton.cdiv(triton.cdiv(keys, MOST_GRANULES), 128) * 128)
    count = triton.cdiv(keys, granule)
    units = batch * heads
    like: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    of_granules = torch.empty((units * count, depth, depth), **like), torch.empty((units * count, depth), **like)
    parts = torch.empty((units * (count + 1), 3, depth, depth), dtype=torch.bfloat16, device=k.device)
    sums = torch.empty((units * (count + 1), depth), **like)
    matrix = Matrix(k, *k.stride()[:3])
    widen = k.device.type == "cpu"
    each = (matrix, *of_granules, heads, keys, granule, count, 64, depth, widen)
    launch(granule_kernel, units * count, each, num_warps=8, num_stages=3)
    rows = 16
    running = (*of_granules, parts, sums, count, rows, depth, PARTS.value)
    launch(running_kernel, units * (depth // rows), running, num_warps=4)
    return Grams(parts, sums, granule, count)
