"""Mean and spread of the scores from sums over keys: Σs = q·Σk and Σ(s − mean)² = qᵀ(Σ(k − k̄)(k − k̄)ᵀ)q.

For many queries this is far less work than to add up scores. Where every query sees all keys, one matrix does for all
queries of a head. Under a causal mask each chunk of queries begins with the sums over all keys before it, and takes up
its own keys some at a time; scores are computed only along the diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._operator import Call
from ._ready import launch
from ._tile import LOG2E, Matrix, load_keys

FIELDS = frozenset(("score_mean", "score_std", "first_key_weight"))
"""What is filled in here."""
SUMMED_KEYS = {(64, False): 2048, (64, True): 4096, (128, False): 4096, (128, True): 16384}
"""From as many queries and keys on it is worth while, by head_dim and whether it is causal."""
MOST_CHUNKS = 64
LEAST_KEYS = 1024
"""Of a chunk, which one program adds up."""
FAR_MEAN: tl.constexpr = tl.constexpr(2.0**10)
"""Squared mean, in variances, up to which enough digits are left of the sums, which are taken about 0."""
TINY: tl.constexpr = tl.constexpr(2.0**-12)


@triton.jit
def multiplied(left, right, total, WIDEN: tl.constexpr):
    if WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        return tl.dot(left, right, total)


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
        gram = multiplied(tile.T, tile, gram, WIDEN)
        total += tile.to(tl.float32)
    component = tl.arange(0, D)
    place = program.to(tl.int64) * (D * D) + component[:, None] * D + component[None, :]
    tl.store(grams + place, gram)
    tl.store(sums + program.to(tl.int64) * D + component, tl.sum(total, 0))


@triton.jit
def before_kernel(grams, sums, chunks, BM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr):
    """Some rows of the sums over all chunks, in place of the first; if CAUSAL, over those before each, in its place."""
    unit = (tl.program_id(0) // (D // BM)).to(tl.int64) * chunks
    row = tl.program_id(0) % (D // BM) * BM + tl.arange(0, BM)
    here = row[:, None] * D + tl.arange(0, D)[None, :]
    gram = tl.zeros([BM, D], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for i in tl.range(0, chunks):
        own, own_total = tl.load(grams + (unit + i) * (D * D) + here), tl.load(sums + (unit + i) * D + row)
        if CAUSAL:
            tl.store(grams + (unit + i) * (D * D) + here, gram)
            tl.store(sums + (unit + i) * D + row, total)
        gram += own
        total += own_total
    if not CAUSAL:
        tl.store(grams + unit * (D * D) + here, gram)
        tl.store(sums + unit * D + row, total)


@triton.jit
def about_mean(gram, total, share, like):
    """Sums about the mean of the keys, as a matrix of 8 bits and one of the 8 bits that follow.

    About 0, a spread that is small beside the mean would cancel.
    """
    centred = gram - (total[:, None] * share) * total[None, :]
    rough = centred.to(like.dtype)
    return rough, (centred - rough.to(tl.float32)).to(like.dtype)


@triton.jit
def moments_kernel(
    q, k, grams, sums, scale, logsumexp, mean_of, std_of, first_of, mark,
    heads, group, queries, keys, chunk, parts, chunks, scale_batch, scale_head, marked_rows,
    BM: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The fields of one chunk of the queries of a head; a block is marked where digits were lost."""
    program = tl.program_id(0)
    pair, part = program // parts, program % parts
    batch, head = pair // heads, pair % heads
    k_head = head // group
    unit = ((batch * (heads // group) + k_head) * chunks).to(tl.int64)
    if CAUSAL:
        unit += part
    component = tl.arange(0, D)
    gram = tl.load(grams + unit * (D * D) + component[:, None] * D + component[None, :])
    total = tl.load(sums + unit * D + component)
    first_key = load_keys(k, batch, k_head, 0, keys, D, 1, D)
    factor = tl.load(scale + batch * scale_batch + head * scale_head)
    before = keys * 1.0
    share = 1 / before
    rough, fine = about_mean(gram, total, share, first_key)
    for start in tl.range(part * chunk, tl.minimum((part + 1) * chunk, queries), BM):
        own = load_keys(q, batch, head, start, queries, D, BM, D)
        wide = own.to(tl.float32)
        if CAUSAL:
            before = start * 1.0
            share = 1 / tl.maximum(before, 1.0)
            rough, fine = about_mean(gram, total, share, first_key)
        turned = multiplied(own, fine, multiplied(own, rough, tl.zeros([BM, D], tl.float32), WIDEN), WIDEN)
        mean = tl.sum(wide * (total * share)[None, :], 1)
        spread = tl.sum(wide * turned, 1)
        far, count = mean, before
        if CAUSAL:
            tile = load_keys(k, batch, k_head, start, keys, D, BM, D)
            scores = multiplied(own, tile.T, tl.zeros([BM, BM], tl.float32), WIDEN)
            row = tl.arange(0, BM)
            seen = row[:, None] >= row[None, :]
            here = (row + 1).to(tl.float32)
            near = tl.sum(tl.where(seen, scores, 0.0), 1) / here
            off = tl.where(seen, scores - near[:, None], 0.0)
            count = before + here
            gap = near - mean
            spread += tl.sum(off * off, 1) + gap * gap * before * (here / count)
            mean += gap * (here / count)
            gram = multiplied(tile.T, tile, gram, WIDEN)
            total += tl.sum(tile.to(tl.float32), 0)
        query = start + tl.arange(0, BM)
        there = query < queries
        place = pair.to(tl.int64) * queries + query
        # What is not a number stays so.
        variance = tl.where(spread < 0, 0.0, spread) / count * (factor * factor)
        tl.store(mean_of + place, mean * factor, mask=there)
        tl.store(std_of + place, tl.sqrt(variance), mask=there)
        opening = tl.sum(wide * first_key.to(tl.float32), 1) * factor
        known = tl.load(logsumexp + place, mask=there, other=0.0)
        tl.store(first_of + place, tl.exp2((opening - known) * LOG2E), mask=there)
        sound = far * far * (factor * factor) <= FAR_MEAN * variance + TINY
        marks = tl.full([BM], 1, tl.int32)
        tl.store(mark + pair * tl.cdiv(queries, marked_rows) + query // marked_rows, marks, mask=there & (sound == 0))


def worthwhile(call: Call) -> bool:
    """Whether moments of scores are to follow from sums over keys: with few of either that costs more than it saves."""
    causal = _causal(call)
    plain = call.mask is None and call.softcap is None and not call.dropout_p and (causal or _all_seen(call))
    least = SUMMED_KEYS.get((call.q.shape[3], causal))
    enough = least is not None and min(call.q.shape[2], call.k.shape[2]) >= least
    return plain and enough and call.q.dtype == torch.bfloat16


def _all_seen(call: Call) -> bool:
    return call.band is None and call.first is None and call.stop is None


def _causal(call: Call) -> bool:
    """Whether query i sees keys 0 to i, and there are as many of both."""
    queries = call.q.shape[2]
    return call.band is not None and call.band[1] == 1 and call.band[0] <= 1 - queries and queries == call.k.shape[2]


def fill(call: Call, found: dict[str, Tensor], marks: Tensor, marked_rows: int) -> None:
    """Fill in what `found` has of FIELDS, from its logsumexp, and mark the blocks of rows where digits were lost."""
    q, k = call.q, call.k
    batch, heads, queries, depth = q.shape
    units, keys = batch * k.shape[1], k.shape[2]
    causal = not _all_seen(call)
    chunk = max(LEAST_KEYS, triton.cdiv(triton.cdiv(keys, MOST_CHUNKS), 128) * 128)
    chunks = triton.cdiv(keys, chunk)
    like: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    grams = torch.empty((units * chunks, depth, depth), **like)
    sums = torch.empty((units * chunks, depth), **like)
    matrix = Matrix(k, *k.stride()[:3])
    widen = k.device.type == "cpu"
    each = (matrix, grams, sums, k.shape[1], keys, chunk, chunks, 64, depth, widen)
    launch(chunk_kernel, units * chunks, each, num_warps=4, num_stages=4)
    slab = 16
    launch(before_kernel, units * (depth // slab), (grams, sums, chunks, slab, depth, causal), num_warps=4)
    nowhere = torch.empty(q.shape[:-1], **like) if FIELDS - found.keys() else grams
    places = (found.get(name, nowhere) for name in ("score_mean", "score_std", "first_key_weight"))
    scale = call.scale
    strides = (0 if scale.shape[axis] == 1 else scale.stride(axis) for axis in range(2))
    parts = triton.cdiv(queries, chunk)
    # Measured on an H200.
    block, warps = (128, 8) if depth == 128 else (64, 4) if causal else (128, 4)
    arguments = (
        Matrix(q, *q.stride()[:3]), matrix, grams, sums, scale, found["logsumexp"], *places, marks,
        heads, call.group, queries, keys, chunk, parts, chunks, *strides, marked_rows, block, depth, causal, widen,
    )  # fmt: skip
    launch(moments_kernel, batch * heads * parts, arguments, num_warps=warps, num_stages=2)
