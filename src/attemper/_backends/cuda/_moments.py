"""Mean and spread of the scores from sums over keys: Σs = q·Σk and Σ(s − mean)² = qᵀ(Σ(k − k̄)(k − k̄)ᵀ)q.

For many queries this is far less work than to add up scores. Where every query sees all keys, one matrix does for all
queries of a head. Under a causal mask there is one for each chunk of keys, of all keys before it, and of those in the
same chunk scores are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._operator import Call
from ._ready import launch
from ._tile import LOG2E, load_keys, matrix_of, stride_of

FIELDS = frozenset(("score_mean", "score_std", "first_key_weight"))
"""What is filled in here."""
SUMMED_KEYS = {
    (64, False): (2048, 4096),
    (64, True): (4096, 16384),
    (128, False): (4096, 4096),
}
"""From as many queries and keys on it is worth while with values and without, by head_dim and whether it is causal."""
PORTABLE_SUMMED_KEYS = {(128, False): (16384, 4096)}
"""The same beside the portable kernel."""
MOST_CHUNKS = 64
LEAST_KEYS = 512
"""Of a chunk, which one program adds up."""
FAR_MEAN: tl.constexpr = tl.constexpr(2.0**10)
"""Squared mean, in variances, up to which enough digits are left of the sums, which are taken about 0."""
TINY: tl.constexpr = tl.constexpr(2.0**-12)
_COUNTS = ("queries", "keys", "blocks", "chunks")
"""What changes with the lengths, and is to make no other version of a kernel."""


@triton.jit
def multiplied(left, right, total, WIDEN: tl.constexpr):
    """A `product` that has no precision to choose; as an argument of its own Triton 3.6 takes no string."""
    if WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        return tl.dot(left, right, total)


@triton.jit(do_not_specialize=("chunks",))
def chunk_kernel(k, grams, sums, heads, keys, chunk, chunks, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr):
    """Σkkᵀ and Σk of one chunk."""
    program = tl.program_id(0)
    unit = program // chunks
    batch, head = unit // heads, unit % heads
    begin = program % chunks * chunk
    gram = tl.zeros([D, D], tl.float32)
    # By a product too: Triton 3.6 lets a tile that is read otherwise be overwritten while products still read it.
    ones = tl.full([64, BN], 1.0, k.data.dtype.element_ty)
    total = tl.zeros([64, D], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + chunk, keys), BN):
        tile = load_keys(k, batch, head, start, keys, D, BN, D)
        gram = multiplied(tile.T, tile, gram, WIDEN)
        total = multiplied(ones, tile, total, WIDEN)
    component = tl.arange(0, D)
    place = program.to(tl.int64) * (D * D) + component[:, None] * D + component[None, :]
    tl.store(grams + place, gram)
    same = program.to(tl.int64) * D + component[None, :] + tl.zeros([64, 1], tl.int32)
    tl.store(sums + same, total, mask=(tl.arange(0, 64) == 0)[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def before_kernel(
    grams, sums, tables, means, keys, chunk, chunks, BC: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):
    """One row of the sums over all keys before each chunk, about their mean; if not CAUSAL, of those over all keys.

    About 0, a spread that is small beside the mean would cancel. A table is a matrix of 8 bits, and below it one of the
    8 bits that follow; its keys' mean is apart from it.
    """
    unit, row = tl.program_id(0) // D, tl.program_id(0) % D
    component = tl.arange(0, D)
    gram = tl.zeros([D], tl.float32)
    total = tl.zeros([D], tl.float32)
    for start in tl.range(0, chunks + 1, BC):
        i = start + tl.arange(0, BC)
        known = (i > 0) & (i <= chunks)
        of_chunk = (unit * chunks + i - 1).to(tl.int64)[:, None] * D
        own = tl.load(grams + (of_chunk + row) * D + component[None, :], mask=known[:, None], other=0.0)
        own_total = tl.load(sums + of_chunk + component[None, :], mask=known[:, None], other=0.0)
        share = 1 / tl.minimum(tl.maximum(i * chunk, 1), keys).to(tl.float32)
        so_far = total[None, :] + tl.cumsum(own_total, 0)
        of_row = tl.sum(tl.where(component[None, :] == row, so_far, 0.0), 1)
        mean = so_far * share[:, None]
        about = gram[None, :] + tl.cumsum(own, 0) - of_row[:, None] * mean
        rough = about.to(tables.dtype.element_ty)
        fine = (about - rough.to(tl.float32)).to(rough.dtype)
        wanted = (i < chunks) if CAUSAL else (i == chunks)
        slot = unit * chunks + i if CAUSAL else unit + tl.zeros_like(i)
        line = tables + slot.to(tl.int64)[:, None] * (2 * D * D) + row * D + component[None, :]
        tl.store(line, rough, mask=wanted[:, None])
        tl.store(line + D * D, fine, mask=wanted[:, None])
        if row == 0:
            tl.store(means + slot.to(tl.int64)[:, None] * D + component[None, :], mean, mask=wanted[:, None])
        gram += tl.sum(own, 0)
        total += tl.sum(own_total, 0)


@triton.jit(do_not_specialize=_COUNTS)
def moments_kernel(
    q, k, tables, means, scale, logsumexp, mean_of, std_of, first_of, mark,
    heads, group, queries, keys, chunk, blocks, chunks, scale_batch, scale_head, marked_rows,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The fields of one block of rows; it is marked where digits were lost."""
    program = tl.program_id(0)
    pair, start = program // blocks, program % blocks * BM
    batch, head = pair // heads, pair % heads
    k_head = head // group
    slot = batch * (heads // group) + k_head
    begin = keys
    if CAUSAL:
        slot = slot * chunks + start // chunk
        begin = start // chunk * chunk
    component = tl.arange(0, D)
    table = tables + slot.to(tl.int64) * (2 * D * D) + component[None, :]
    # All that is read here comes first, so that what is waited for is waited for once.
    own = load_keys(q, batch, head, start, queries, D, BM, D)
    line = component[:, None] * D
    rough, fine = tl.load(table + line), tl.load(table + D * D + line)
    if CAUSAL:
        tile = load_keys(k, batch, k_head, start, keys, D, BM, D)
    of_keys = tl.load(means + slot.to(tl.int64) * D + component)
    first_key = load_keys(k, batch, k_head, 0, keys, D, 1, D)
    query = start + tl.arange(0, BM)
    there = query < queries
    place = pair.to(tl.int64) * queries + query
    factor = tl.load(scale + batch * scale_batch + head * scale_head)
    known = tl.load(logsumexp + place, mask=there, other=0.0)
    turned = multiplied(own, rough.T, tl.zeros([BM, D], tl.float32), WIDEN)
    turned = multiplied(own, fine.T, turned, WIDEN)
    wide = own.to(tl.float32)
    spread = tl.sum(turned * wide, 1)
    mean = tl.sum(wide * of_keys[None, :], 1)
    opening = tl.sum(wide * first_key.to(tl.float32), 1)
    far, count = mean, begin * 1.0
    if CAUSAL:
        row = tl.arange(0, BM)
        scores = multiplied(own, tile.T, tl.zeros([BM, BM], tl.float32), WIDEN)
        seen = row[:, None] >= row[None, :]
        here = (row + 1).to(tl.float32)
        near = tl.sum(tl.where(seen, scores, 0.0), 1) / here
        off = tl.where(seen, scores - near[:, None], 0.0)
        spread += tl.sum(off * off, 1)
        moved = tl.zeros([BM], tl.float32)
        for key in tl.range(begin, start, BN):
            earlier = load_keys(k, batch, k_head, key, keys, D, BN, D)
            away = multiplied(own, earlier.T, tl.zeros([BM, BN], tl.float32), WIDEN) - near[:, None]
            moved += tl.sum(away, 1)
            spread += tl.sum(away * away, 1)
        here += start - begin
        shift = moved / here
        spread -= shift * moved
        gap = near + shift - mean
        share = here / (count + here)
        spread += gap * gap * (count * share)
        mean += gap * share
        count += here
    # What is not a number stays so.
    variance = tl.where(spread < 0, 0.0, spread) / count * (factor * factor)
    tl.store(mean_of + place, mean * factor, mask=there)
    tl.store(std_of + place, tl.sqrt(variance), mask=there)
    tl.store(first_of + place, tl.exp2((opening * factor - known) * LOG2E), mask=there)
    sound = far * far * (factor * factor) <= FAR_MEAN * variance + TINY
    marks = tl.full([BM], 1, tl.int32)
    tl.store(mark + pair * tl.cdiv(queries, marked_rows) + query // marked_rows, marks, mask=there & (sound == 0))


def worthwhile(call: Call, least: dict[tuple[int, bool], tuple[int, int]]) -> bool:
    """Whether moments of scores are to follow from sums over keys: with few of either that costs more than it saves."""
    causal = _causal(call)
    plain = call.mask is None and call.softcap is None and not call.dropout_p and (causal or all_seen(call))
    if not plain or (call.q.shape[3], causal) not in least or call.q.dtype != torch.bfloat16:
        return False
    return min(call.q.shape[2], call.k.shape[2]) >= least[call.q.shape[3], causal][call.v is None]


def all_seen(call: Call) -> bool:
    return call.band is None and call.first is None and call.stop is None


def _causal(call: Call) -> bool:
    """Whether query i sees keys 0 to i, and there are as many of both."""
    queries = call.q.shape[2]
    return call.band is not None and call.band[1] == 1 and call.band[0] <= 1 - queries and queries == call.k.shape[2]


class KeySums(NamedTuple):
    """Sums over the keys of each (batch, head): over all, or over those before each chunk."""

    tables: Tensor
    """Σ(k − k̄)(k − k̄)ᵀ, rounded, and below it what is left: (batch, heads, 2 · head_dim, head_dim), with an axis more
    for chunks before the last two."""
    means: Tensor
    """For each table k̄, float32."""
    chunk: int


def sums_of(call: Call) -> KeySums:
    k = call.k
    keys, depth = k.shape[2:]
    units = k.shape[0] * k.shape[1]
    causal = not all_seen(call)
    # Full, there is one table, whatever the chunks.
    chunk = max(LEAST_KEYS * (1 if causal else 2), triton.cdiv(triton.cdiv(keys, MOST_CHUNKS), 128) * 128)
    chunks = triton.cdiv(keys, chunk)
    like: dict[str, Any] = {"dtype": torch.float32, "device": k.device}
    grams = torch.empty((units * chunks, depth, depth), **like)
    sums = torch.empty((units * chunks, depth), **like)
    shape = (*k.shape[:2], chunks) if causal else k.shape[:2]
    tables = torch.empty((*shape, 2 * depth, depth), dtype=k.dtype, device=k.device)
    means = torch.empty((*shape, depth), **like)
    matrix = matrix_of(k, call)
    each = (matrix, grams, sums, k.shape[1], keys, chunk, chunks, 64, depth, k.device.type == "cpu")
    launch(chunk_kernel, units * chunks, each, num_warps=4, num_stages=4)
    rows = (grams, sums, tables, means, keys, chunk, chunks, 2, depth, causal)
    launch(before_kernel, units * depth, rows, num_warps=1, maxnreg=64)
    return KeySums(tables, means, chunk)


def fill(call: Call, found: dict[str, Tensor], marks: Tensor, marked_rows: int) -> None:
    """Fill in what `found` has of FIELDS, from its logsumexp, and mark the blocks of rows where digits were lost."""
    q = call.q
    batch, heads, queries, depth = q.shape
    keys = call.k.shape[2]
    causal = not all_seen(call)
    tables, means, chunk = sums_of(call)
    like: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    nowhere = torch.empty(q.shape[:-1], **like) if FIELDS - found.keys() else means
    places = (found.get(name, nowhere) for name in ("score_mean", "score_std", "first_key_weight"))
    scale = call.scale
    tile = (128, 8, 2, 128) if not causal else (64, 4, 2, 168) if depth == 128 else (64, 4, 3, 128)
    block, warps, stages, registers = tile
    blocks = triton.cdiv(queries, block)
    arguments = (
        matrix_of(q, call), matrix_of(call.k, call), tables, means, scale, found["logsumexp"], *places, marks,
        heads, call.group, queries, keys, chunk, blocks, triton.cdiv(keys, chunk), stride_of(scale, 0),
        stride_of(scale, 1), marked_rows, block, 64, depth, causal, q.device.type == "cpu",
    )  # fmt: skip
    launch(moments_kernel, batch * heads * blocks, arguments, num_warps=warps, num_stages=stages, maxnreg=registers)
