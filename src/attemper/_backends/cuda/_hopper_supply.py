# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,operator"
"""What the kernels for Hopper GPUs share: the producer, its letters to the consumers, the rings of tiles.

See `_hopper` for how they work together.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._ready import strides_of

if TYPE_CHECKING:
    from .._operator import Call

# They were renamed in Triton 3.9.
_copy_in = getattr(tma, "async_load" if hasattr(tma, "async_load") else "async_copy_global_to_shared")
_copy_out = getattr(tma, "async_store" if hasattr(tma, "async_store") else "async_copy_shared_to_global")

ROWS = 64
"""Query rows of a consumer, which are flagged together."""
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_CACHED_BYTES = 32 << 20
"""K and V of the heads that are worked on together: what stays in the L2 cache of 50 MiB."""
_M = gl.constexpr(ROWS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_FARTHEST = gl.constexpr(2**30)
"""Beyond all keys: the least of nothing."""
_REFERENCE_LIMIT = gl.constexpr(2.0**70)
"""Of references up to it, a hidden score is far below."""
_SCALE_LIMIT = gl.constexpr(2.0**20)
"""Within it, and within its inverse, a hidden score times the scale is a float32, and far below all others."""
# Bits of `choices`; all others up to 19 are those of `_hopper`.
_SCALE_PER_BATCH = gl.constexpr(1 << 16)
_SCALE_PER_HEAD = gl.constexpr(1 << 17)
_FIRST_PER_BATCH = gl.constexpr(1 << 20)
_STOP_PER_BATCH = gl.constexpr(1 << 21)
_BAND = gl.constexpr(1 << 22)
_LETTER = gl.constexpr(22)
"""Numbers of a letter, by which the producer tells the others all about an item, so that they need not look it up: the
item, its first tile of keys and the one after its last, batch, head, row, scale, and five for each consumer."""
_LETTERS = gl.constexpr(4)
"""In the mailbox at once: the scribe still reads that of an item while the producer is at the item after the next."""


@gluon.jit
def _log2(x):
    """Of numbers far from 0 and infinity, to 22 bits behind the point."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _place(item, blocks, pairs, together, BOUNDED: gl.constexpr, UPWARD: gl.constexpr = False):
    """Which (batch, head) and which block of rows an item is; with UPWARD the first blocks come first."""
    if BOUNDED:
        # Causal rows see the more keys the later they are: those first, so that nobody ends with a long item alone, but
        # only as many heads at a time as the cache holds.
        group = item // (together * blocks)
        size = gl.minimum(together, pairs - group * together)
        rest = item - group * together * blocks
        block = rest // size
        if not UPWARD:
            block = blocks - 1 - block
        return group * together + rest % size, block
    return item // blocks, item % blocks


@gluon.jit
def _of_head(pointer, batch, head, heads, choices, PER_BATCH: gl.constexpr, PER_HEAD: gl.constexpr):
    """A number of shape (batch or 1, heads or 1), in powers of two."""
    many = (choices & PER_HEAD) > 0
    place = gl.where((choices & PER_BATCH) > 0, batch, 0) * gl.where(many, heads, 1) + gl.where(many, head, 0)
    return gl.load(pointer + place) * _LOG2_E


@gluon.jit
def _there(rows, queries):
    return (rows >= 0) & (rows < queries)


@gluon.jit
def _bounds(limits, batch, rows, sizes, choices):
    """The keys that some rows see, as int32 within the keys there are; first = stop where a row sees none."""
    first_ptr, stop_ptr, low, high = limits
    queries, keys = sizes
    inside = _there(rows, queries)
    first = rows + low
    stop = gl.where(inside, rows + high, 0)
    if (choices & _BAND) == 0:
        first_row = gl.where((choices & _FIRST_PER_BATCH) > 0, batch, 0).to(gl.int64) * queries
        stop_row = gl.where((choices & _STOP_PER_BATCH) > 0, batch, 0).to(gl.int64) * queries
        most = keys.to(gl.int64)
        given = gl.load(first_ptr + first_row + rows, mask=inside, other=0)
        first = gl.minimum(gl.maximum(given, 0), most).to(gl.int32)
        given = gl.load(stop_ptr + stop_row + rows, mask=inside, other=0)
        stop = gl.minimum(gl.maximum(given, 0), most).to(gl.int32)
    first = gl.minimum(gl.maximum(first, 0), keys)
    stop = gl.minimum(gl.maximum(stop, 0), keys)
    return first, gl.maximum(stop, first)


@gluon.jit
def _write(mail, place, number):
    mail.index(place).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)


@gluon.jit
def _read(mail, place, WARPS: gl.constexpr = 4):
    return gl.max(mail.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@gluon.jit
def _open(mail, letter, who, keys, N: gl.constexpr, BOUNDED: gl.constexpr, WARPS: gl.constexpr = 4):
    """What a letter says of a consumer: which tiles, where its rows are, and the scale.

    The tiles of the item are [lowest, highest), of which this one needs [low, high) and its rows see all of [free_low,
    free_high) entirely, and nothing from the key `stop` on; `blank` says whether a row sees nothing at all. There is
    always one tile: a consumer whose rows see nothing looks at the last in vain.
    """
    lowest = 0
    highest = _read(mail, letter + 2, WARPS)
    low = lowest
    high = highest
    stop = keys
    blank = 0
    free_low = 0
    free_high = keys // N
    if BOUNDED:
        lowest = _read(mail, letter + 1, WARPS)
        low = _read(mail, letter + 7 + 5 * who, WARPS)
        stop = _read(mail, letter + 8 + 5 * who, WARPS)
        high = gl.cdiv(stop, N)
        nothing = high <= low
        low = gl.where(nothing, lowest, low)
        high = gl.where(nothing, lowest + 1, high)
        free_low = _read(mail, letter + 9 + 5 * who, WARPS)
        free_high = gl.where(nothing, 0, _read(mail, letter + 10 + 5 * who, WARPS))
        blank = _read(mail, letter + 11 + 5 * who, WARPS)
    row = _read(mail, letter + 5, WARPS) + who * _M
    place = (_read(mail, letter + 3, WARPS), _read(mail, letter + 4, WARPS), row)
    c = _read(mail, letter + 6, WARPS).to(gl.float32, bitcast=True)
    return (lowest, highest, low, high, free_low, free_high, stop, blank), place, c


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _next(slot, mail_phase, post, who, keys, N: gl.constexpr, BOUNDED: gl.constexpr, LAST: gl.constexpr):
    """What the next letter says; who is the last to read it says that it was read."""
    mail, mail_full, mail_empty = post
    mbarrier.wait(mail_full.index(slot), mail_phase)
    item = _read(mail, slot * _LETTER)
    tiles, place, c = _open(mail, slot * _LETTER, who, keys, N, BOUNDED)
    if LAST:
        mbarrier.arrive(mail_empty.index(slot))
    slot, mail_phase = _advance(slot, mail_phase, _LETTERS)
    return item, tiles, place, c, slot, mail_phase


@gluon.jit
def _address(mail, letter, item, lowest, highest, batch, head, row, c):
    """What a letter says to all."""
    _write(mail, letter, item)
    _write(mail, letter + 1, lowest)
    _write(mail, letter + 2, highest)
    _write(mail, letter + 3, batch)
    _write(mail, letter + 4, head)
    _write(mail, letter + 5, row)
    _write(mail, letter + 6, c.to(gl.int32, bitcast=True))


@gluon.jit
def _announce(
    item, common, mail, letter, CONSUMERS: gl.constexpr, N: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Write the letter of an item: which tiles of keys it needs, and between which of them nothing is hidden."""
    scale_ptr, limits, sizes, shape, choices, _, _ = common
    heads, _, blocks, pairs, together, items = shape
    # Beyond the last item there is one more letter, which says so.
    pair, block = _place(gl.minimum(item, items - 1), blocks, pairs, together, BOUNDED)
    batch = pair // heads
    head = pair % heads
    # A block that is not full is the first, which under a causal mask has least to do; consumers without rows have
    # those before the first row.
    row = block * (CONSUMERS * _M) - (blocks * (CONSUMERS * _M) - sizes[0]) // _M * _M
    c = _of_head(scale_ptr, batch, head, heads, choices, _SCALE_PER_BATCH, _SCALE_PER_HEAD)
    lowest = 0
    highest = gl.cdiv(sizes[1], N)
    if BOUNDED:
        lowest = _FARTHEST
        highest = 0
        for who in range(CONSUMERS):
            rows = row + who * _M + gl.arange(0, _M, gl.BlockedLayout([2], [32], [1], [0]))
            first, stop = _bounds(limits, batch, rows, sizes, choices)
            seen = stop > first
            least_stop = gl.min(gl.where(seen, stop, _FARTHEST), axis=0)
            last_stop = gl.max(gl.where(seen, stop, 0), axis=0)
            low = gl.min(gl.where(seen, first, _FARTHEST), axis=0) // N
            high = gl.cdiv(last_stop, N)
            # A row whose keys end where the tiles that all see begin has no reference until then: one tile more is
            # looked at row by row.
            late = (least_stop % N == 0) & (last_stop > least_stop)
            _write(mail, letter + 7 + 5 * who, low)
            _write(mail, letter + 8 + 5 * who, last_stop)
            _write(mail, letter + 9 + 5 * who, gl.cdiv(gl.max(gl.where(seen, first, 0), axis=0), N))
            _write(mail, letter + 10 + 5 * who, least_stop // N - late.to(gl.int32))
            _write(mail, letter + 11 + 5 * who, gl.max(gl.where(seen | (_there(rows, sizes[0]) ^ True), 0, 1), axis=0))
            lowest = gl.minimum(lowest, low)
            highest = gl.maximum(highest, high)
        highest = gl.maximum(highest, 1)
        lowest = gl.minimum(lowest, highest - 1)
    _address(mail, letter, item, lowest, highest, batch, head, row, c)
    return lowest, highest, batch, head, row


@gluon.jit
def _send(
    key, batch, kv_head, stage, phase, inputs, buffers, barriers,
    STAGES: gl.constexpr, VALUES: gl.constexpr, BEHIND: gl.constexpr, both=True,
):  # fmt: skip
    """Copy a tile of K, and if `both` one of V, into the rings once there is room: with BEHIND for V one later."""
    _, k_desc, v_desc, _, _, _ = inputs
    _, k_tiles, v_tiles = buffers
    _, _, k_full, v_full, empty = barriers
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    _copy_in(k_desc, [batch, kv_head, key, 0], k_full.index(stage), k_tiles.index(stage))
    v_stage = stage
    stage, phase = _advance(stage, phase, STAGES)
    if VALUES:
        if both:
            if BEHIND:
                mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
            _copy_in(v_desc, [batch, kv_head, key, 0], v_full.index(v_stage), v_tiles.index(v_stage))
    return stage, phase


@gluon.jit
def _send_table(
    batch, kv_head, stage, phase, inputs, buffers, barriers,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Copy a table to where a tile of K would be, and what there is no room for to where its V would be.

    Or, where there are no values, to where the next tile of K would be.
    """
    t_desc = inputs[5]
    _, k_tiles, v_tiles = buffers
    _, _, k_full, v_full, empty = barriers
    TILES: gl.constexpr = 1 if VALUES else 2 * D // N
    for tile in gl.static_range(TILES):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), t_desc.block_type.nbytes)
        _copy_in(t_desc, [batch, kv_head, tile * N, 0], k_full.index(stage), k_tiles.index(stage))
        v_stage = stage
        stage, phase = _advance(stage, phase, STAGES)
    if VALUES:
        mbarrier.wait(empty.index(stage), phase)
        if D == N:
            mbarrier.expect(v_full.index(v_stage), t_desc.block_type.nbytes)
            _copy_in(t_desc, [batch, kv_head, N, 0], v_full.index(v_stage), v_tiles.index(v_stage))
        else:
            # Nothing comes, but the phases of both barriers go together.
            mbarrier.arrive(v_full.index(v_stage))
    return stage, phase


@gluon.jit
def _send_queries(
    batch, head, row, slot, phase, inputs, buffers, barriers,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, GRADIENT: gl.constexpr,
):  # fmt: skip
    """Copy the rows of Q, each consumer's once it is done with those before; with GRADIENT another matrix beside."""
    q_desc, _, _, g_desc, g_tiles, _ = inputs
    q_tiles, _, _ = buffers
    q_full, q_empty, _, _, _ = barriers
    for who in range(CONSUMERS):
        at = slot * CONSUMERS + who
        mbarrier.wait(q_empty.index(at), phase)
        place = [batch, head, row + who * _M, 0]
        mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes * (2 if GRADIENT else 1))
        _copy_in(q_desc, place, q_full.index(at), q_tiles.index(at))
        if GRADIENT:
            _copy_in(g_desc, place, q_full.index(at), g_tiles.index(at))
    return _advance(slot, phase, ITEMS)


@gluon.jit
def _producer(
    supply,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    BOUNDED: gl.constexpr, VALUES: gl.constexpr, GRADIENT: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Announce an item, send what is left of the one before it, then what it begins with: its rows, and its last tile.

    In this order the next is looked up while the consumers have tiles to go on with: memory takes its time. All that
    is long stands here once: what has left the cache of instructions has to be waited for too.
    """
    common, post, inputs, counter = supply
    _, _, _, shape, _, buffers, barriers = common
    mail, mail_full, mail_empty = post
    ratio = shape[1]
    items = shape[5]
    # Who has gradients multiplies K and V of a tile at the same time; the others V one tile later, and they begin one
    # item too many.
    BEHIND: gl.constexpr = not GRADIENT
    stage = 0
    phase = 1
    q_slot = 0
    q_phase = 1
    slot = 0
    mail_phase = 1
    # Before the first there is an item without tiles.
    item = -1
    lowest = 0
    highest = 0
    batch = 0
    kv_head = 0
    coming = gl.program_id(0)
    while item < items:
        mbarrier.wait(mail_empty.index(slot), mail_phase)
        next_lowest, next_highest, next_batch, head, row = _announce(
            coming, common, mail, slot * _LETTER, CONSUMERS, N, BOUNDED
        )
        mbarrier.arrive(mail_full.index(slot))
        slot, mail_phase = _advance(slot, mail_phase, _LETTERS)
        for step in range(1, highest - lowest):
            key = (highest - 1 - step) * N
            stage, phase = _send(
                key, batch, kv_head, stage, phase, inputs, buffers, barriers, STAGES, VALUES, BEHIND
            )  # fmt: skip
        if TABLE:
            if item >= 0:
                stage, phase = _send_table(
                    batch, kv_head, stage, phase, inputs, buffers, barriers, D, N, STAGES, VALUES
                )
        item = coming
        lowest = next_lowest
        highest = next_highest
        batch = next_batch
        kv_head = head // ratio
        if BEHIND or item < items:
            q_slot, q_phase = _send_queries(
                batch, head, row, q_slot, q_phase, inputs, buffers, barriers, ITEMS, CONSUMERS, GRADIENT
            )
            # Of the item too many somebody multiplies a tile of K, and nobody looks at what comes out.
            stage, phase = _send(
                (highest - 1) * N, batch, kv_head, stage, phase, inputs, buffers, barriers, STAGES, VALUES, BEHIND,
                item < items,
            )  # fmt: skip
        coming = gl.atomic_add(counter, 1) + gl.num_programs(0)


@gluon.jit
def _pass(
    tiles, stage, phase, turn_phase, barriers, turns,
    who: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr, BEHIND: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Let tiles go by that other consumers of the item need."""
    _, _, k_full, v_full, empty = barriers
    for _step in range(tiles):
        # A tile that nobody reads must still have arrived before the next takes its place.
        mbarrier.wait(k_full.index(stage), phase)
        if TURNS:
            mbarrier.wait(turns.index(who), turn_phase)
            turn_phase ^= 1
            mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
        if VALUES and not BEHIND:
            mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        if VALUES and BEHIND:
            mbarrier.wait(v_full.index(stage), phase)
        stage, phase = _advance(stage, phase, STAGES)
    return stage, phase, turn_phase


@gluon.jit
def _begin(
    item, tiles, left, stage, phase, q_slot, q_phase, turn_phase, common, turns,
    who: gl.constexpr, ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, BOUNDED: gl.constexpr, VALUES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Let tiles go by that are left of the item before, and start QKᵀ of the first of this one."""
    _, _, _, shape, _, buffers, barriers = common
    q_tiles, k_tiles, _ = buffers
    q_full, _, k_full, _v_full, _empty = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    if BOUNDED:
        skipped = left + gl.where(item < shape[5], tiles[1] - tiles[3], 0)
        stage, phase, turn_phase = _pass(
            skipped, stage, phase, turn_phase, barriers, turns, who, CONSUMERS, STAGES, VALUES, True, TURNS
        )
    mbarrier.wait(q_full.index(q_slot * CONSUMERS + who), q_phase)
    q = q_tiles.index(q_slot * CONSUMERS + who).reshape([_M, D])
    q_slot, q_phase = _advance(q_slot, q_phase, ITEMS)
    zero = gl.zeros([_M, N], gl.float32, S)
    mbarrier.wait(k_full.index(stage), phase)
    if TURNS:
        mbarrier.wait(turns.index(who), turn_phase)
        turn_phase ^= 1
    k = k_tiles.index(stage).reshape([N, D]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((who + 1) % CONSUMERS))
    return s, stage, phase, q_slot, q_phase, turn_phase


@gluon.jit
def _give(x, desc, batch, head, row, tile):
    """Have the copy engine write 64 rows, by way of a tile that it has read what was in it before.

    `row` must not lie before the first, which would be an illegal instruction.
    """
    tile.reshape([_M, x.shape[1]]).store(x)
    fence_async_shared()
    _copy_out(desc, [batch, head, row, 0], tile)


@gluon.jit
def _bearable(c):
    """Whether a scale, in powers of two, leaves hidden scores below all others."""
    return (c < _SCALE_LIMIT) & (c > 1 / _SCALE_LIMIT)


@gluon.jit
def _flag(flags, x, row, rows, c):
    """Store 1 for 64 rows, of so many of a head, with a number that is not finite or a scale that was not bearable."""
    worst = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    mine = row + gl.arange(0, _M, worst.type.layout)
    flag = flags + row // _M + gl.zeros_like(worst)
    wrong = (worst >= 0x7F800000) | (_bearable(c) ^ True)
    gl.store(flag, gl.full_like(worst, 1), mask=_there(mine, rows) & wrong)


@gluon.jit
def _rings(
    q_desc, k_desc, v_desc,
    ITEMS: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    VALUES: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """Shared memory for the tiles of Q, K and V, the barriers that say when they are full and empty, and the mail."""
    DTYPE: gl.constexpr = q_desc.dtype
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(DTYPE, [ITEMS * CONSUMERS, 1, 1, _M, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], k_desc.layout)
    # Without values the name stays, and nothing is kept under it.
    v_tiles = k_tiles
    if VALUES:
        v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [ITEMS * CONSUMERS, 1], ONE)
    q_empty = gl.allocate_shared_memory(gl.int64, [ITEMS * CONSUMERS, 1], ONE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    # One for the places of both: every arrival stops the warpgroup.
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    mail = gl.allocate_shared_memory(gl.int32, [_LETTERS * _LETTER, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail_full = gl.allocate_shared_memory(gl.int64, [_LETTERS, 1], ONE)
    mail_empty = gl.allocate_shared_memory(gl.int64, [_LETTERS, 1], ONE)
    for i in gl.static_range(_LETTERS):
        mbarrier.init(mail_full.index(i), count=1)
        mbarrier.init(mail_empty.index(i), count=READERS)
    for i in gl.static_range(ITEMS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    barriers = (q_full, q_empty, k_full, v_full, empty)
    return (q_tiles, k_tiles, v_tiles), barriers, (mail, mail_full, mail_empty)


class Configuration(NamedTuple):
    resident: int
    """Blocks of threads on a processor at once."""
    items: int
    """Of as many the query rows are there at once: the next come while the last tiles of these are worked on."""
    consumers: int
    keys: int
    """Of a tile."""
    stages: int
    """Tiles of a ring."""
    registers: int
    """Of a thread of a consumer."""
    others: int = 24
    """Of a thread of the rest."""

    @property
    def launched(self) -> int | None:
        """Registers of every thread at the start, of which the producer's then go to the consumers."""
        warpgroups = self.resident * (self.consumers + 1)
        return None if self.resident == 1 else 512 // warpgroups // 8 * 8


@functools.cache
def processors(device: int) -> int:
    """How many there are of a Hopper GPU; none of another."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if (properties.major, properties.minor) == (9, 0) else 0


@functools.cache
def _layout(rows: int, depth: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, depth], _DTYPES[dtype])


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """A tensor as the copy engine knows it, in blocks of some rows of one head."""
    block = [1, 1, rows, x.shape[-1]]
    layout = _layout(rows, x.shape[-1], x.dtype)
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


def together_in_cache(call: Call) -> int:
    """How many (batch, head) are worked on together."""
    batch, heads, _, head_dim = call.q.shape
    share = 2 * call.k.shape[2] * head_dim * call.q.element_size() // call.group or 1
    return max(1, min(batch * heads, _CACHED_BYTES // share))


def scale_choices(scale: Tensor) -> int:
    """The bits of `choices` about the scale."""
    bits = (scale.shape[0] > 1, _SCALE_PER_BATCH), (scale.shape[1] > 1, _SCALE_PER_HEAD)
    return sum(bit.value for there, bit in bits if there)


class Limits(NamedTuple):
    """Which keys the rows of a call see, as the kernels are told."""

    first: Tensor
    """From which key on, (batch or 1, queries); anything where there is a band, or nothing is hidden."""
    stop: Tensor
    low: int
    high: int
    choices: int
    """The bits of `choices` about this."""
    bounded: bool


def limits_of(call: Call, anything: Tensor) -> Limits:
    """Of a call."""
    if call.band is not None:
        low, high = call.band
        return Limits(anything, anything, low, high, _BAND.value, bounded=True)
    if call.first is None and call.stop is None:
        return Limits(anything, anything, 0, 0, 0, bounded=False)
    first, stop = _rows(call.first, 0, call), _rows(call.stop, call.k.shape[2], call)
    bits = (first.shape[0] > 1, _FIRST_PER_BATCH), (stop.shape[0] > 1, _STOP_PER_BATCH)
    return Limits(first, stop, 0, 0, sum(bit.value for many, bit in bits if many), bounded=True)


def _rows(x: Tensor | None, default: int, call: Call) -> Tensor:
    """Bounds as the kernels read them: (batch or 1, queries), one after the other."""
    queries = call.q.shape[2]
    if x is None:
        return torch.full((1, queries), default, dtype=torch.int64, device=call.q.device)
    if x.shape[0] > 1 and x.stride(0) == 0:
        x = x[:1]
    return x.to(call.q.device).expand(x.shape[0], queries).contiguous()
