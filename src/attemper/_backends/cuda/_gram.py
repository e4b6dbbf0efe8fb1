"""Sums over keys from which sums over scores follow: Σs = q·Σk and Σs² = qᵀ(Σkkᵀ)q, where every query sees all keys.

For many queries this is far less work than to add up scores. A Gram matrix comes as three bfloat16 matrices that add up
to it as a float32.
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
SUMMED_KEYS = 4096
"""From as many queries and keys on, moments of scores follow from sums over keys."""
MOST_CHUNKS = 16
LEAST_KEYS = 1024
"""Of a chunk, which one program adds up."""


class Grams(NamedTuple):
    """Sums over keys, for each (batch, head) of them."""

    parts: Tensor
    """(batch · kv_heads, 3, head_dim, head_dim)."""
    sums: Tensor
    """(batch · kv_heads, head_dim)."""


@triton.jit
def chunk_kernel(k, grams, sums, heads, keys, chunk, chunks, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr):
    """Σkkᵀ and Σk of one chunk."""
    program = tl.program_id(0)
    unit = program // chunks
    batch, head = unit // heads, unit % heads
    begin = program % chunks * chunk
    gram = tl.zeros([D, D], tl.float32)
    # Added up in place: rows lie with several warps, and to add them to each other takes a barrier.
    total = tl.zeros([BN, D], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + chunk, keys), BN):
        tile = load_keys(k, batch, head, start, keys, D, BN, D)
        wide = tile.to(tl.float32)
        gram = tl.dot(wide.T, wide, gram) if WIDEN else tl.dot(tile.T, tile, gram)
        total += wide
    component = tl.arange(0, D)
    place = program.to(tl.int64) * (D * D) + component[:, None] * D + component[None, :]
    tl.store(grams + place, gram)
    tl.store(sums + program.to(tl.int64) * D + component, tl.sum(total, 0))


@triton.jit
def total_kernel(
    chunk_grams, chunk_sums, parts, sums, chunks, BM: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Some rows of the sums over all chunks, in parts."""
    unit = (tl.program_id(0) // (D // BM)).to(tl.int64)
    row = tl.program_id(0) % (D // BM) * BM + tl.arange(0, BM)
    component = tl.arange(0, D)
    here = row[:, None] * D + component[None, :]
    rest = tl.zeros([BM, D], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for i in tl.range(0, chunks):
        rest += tl.load(chunk_grams + (unit * chunks + i) * (D * D) + here)
        total += tl.load(chunk_sums + (unit * chunks + i) * D + row)
    for part in tl.static_range(PARTS):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts + (unit * PARTS + part) * (D * D) + here, rounded)
        rest -= rounded.to(tl.float32)
    tl.store(sums + unit * D + row, total)


def worthwhile(call: Call) -> bool:
    """Whether sums over scores are to follow from sums over keys: with few of either that costs more than it saves.

    So it does under a causal mask, where each query needs the sums over other keys.
    """
    plain = call.mask is None and call.softcap is None and not call.dropout_p and call.q.shape[3] in (64, 128)
    all_seen = call.band is None and call.first is None and call.stop is None
    enough = min(call.q.shape[2], call.k.shape[2]) >= SUMMED_KEYS
    return plain and all_seen and enough and call.q.dtype == torch.bfloat16


def grams(call: Call, keys: int) -> Grams:
    """The sums over the first keys of a call."""
    k = call.k
    batch, heads, _, depth = k.shape
    chunk = max(LEAST_KEYS, triton.cdiv(triton.cdiv(keys, MOST_CHUNKS), 128) * 128)
    chunks = triton.cdiv(keys, chunk)
    units = batch * heads
    like: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    of_chunks = torch.empty((units * chunks, depth, depth), **like), torch.empty((units * chunks, depth), **like)
    parts = torch.empty((units, 3, depth, depth), dtype=torch.bfloat16, device=k.device)
    sums = torch.empty((units, depth), **like)
    matrix = Matrix(k, *k.stride()[:3])
    widen = k.device.type == "cpu"
    each = (matrix, *of_chunks, heads, keys, chunk, chunks, 64, depth, widen)
    launch(chunk_kernel, units * chunks, each, num_warps=8, num_stages=3)
    rows = 16
    together = (*of_chunks, parts, sums, chunks, rows, depth, PARTS.value)
    launch(total_kernel, units * (depth // rows), together, num_warps=4)
    return Grams(parts, sums)
