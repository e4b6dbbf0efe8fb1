"""What a kernel is told of a call: one array of 64-bit words, each in its slot.

One address is all that a kernel takes, so that it costs nothing to call, needs one compiled version for a kind of
number whatever the call asks for, and any runner of threads can start it. Addresses are whole numbers; strides are in
elements. A task counter in it hands out the work.
"""

from __future__ import annotations

from ._target import COLUMNS, KEY_TILE, MOST_AT_ONCE, PANELS, THIN_ROWS

F32, F64, BF16, F16, BOOL = range(5)
"""Kinds of elements."""

ITEM_SIZES = (4, 8, 2, 2, 1)

(
    TASK,  # the next task to be done
    WORKER,  # the next worker's number
    SUSPECTS,  # how many rows met a number that is not finite
    # Addresses, all of them in one run; 0 for what is not there.
    SCRATCH,
    SUSPECT,  # the list of such rows
    PARTIAL,  # where the States of splits are left
    SCALE,  # numbers between 1 and 2; the rest of a scale, a power of 2 and its sign, is in POWER
    POWER,
    SINKS,
    Q, K, V, MASK, FIRST, STOP,
    OUT,
    WIDE,  # the output before rounding, laid out as the output
    MAX_LOGIT, LOGSUMEXP, EXPECTED_SCORE, ENTROPY, LARGEST_WEIGHT, COLLISION, SCORE_MEAN, SCORE_STD, MAX_QK,
    FIRST_KEY_WEIGHT, SINK_MASS, OUTPUT_NORM, VISIBLE_KEYS, NONFINITE,  # the fields of the Reading
    # What follows from shapes and options.
    TASKS,
    ROOMS,  # workers there is scratch memory for: more may turn up
    SCRATCH_BYTES,  # of one worker
    GENERAL,  # whether scores need more than bounds: a mask or a softcap
    MEASURE,  # whether anybody asked for more than the output
    KIND,  # of q, k, v and output
    BATCH,
    HEADS,
    GROUP,  # query heads that share a key head
    QUERIES,
    KEYS,
    DEPTH,  # head_dim
    VALUE_DEPTH,  # of v; -1 when there is none
    STACK,  # query heads whose rows share a panel
    THIN,  # whether there are so few rows that vectors go along the components instead
    BLOCKS,  # of rows, in one stack of heads
    SPLITS,  # parts of the keys, each a task of its own
    Q_BATCH, Q_HEAD, Q_ROW, Q_INNER,
    K_BATCH, K_HEAD, K_ROW, K_INNER,
    V_BATCH, V_HEAD, V_ROW, V_INNER,
    OUT_BATCH, OUT_HEAD, OUT_ROW,
    MASK_KIND, MASK_BATCH, MASK_HEAD, MASK_ROW, MASK_KEY,
    BOUND_BATCH,
    SCALE_BATCH, SCALE_HEAD,
    SINKS_BATCH, SINKS_HEAD,
    SEED, PERIOD, THRESHOLD,  # of dropout; a threshold of 0 drops nothing
    # For the backward pass: OUT is then what the forward pass left, of its own kind.
    OUT_KIND,
    EXTRA,  # whether gradients arrive for the fields of the Reading too
    GRAD, GRAD_BATCH, GRAD_HEAD, GRAD_ROW, GRAD_INNER,  # of the output; 0 for none
    GRAD_LOGSUMEXP, GRAD_ENTROPY, GRAD_EXPECTED, GRAD_COLLISION,
    TO_Q, TO_Q_BATCH, TO_Q_HEAD, TO_Q_ROW,  # where gradients go
    TO_K, TO_K_BATCH, TO_K_HEAD, TO_K_ROW,
    TO_V, TO_V_BATCH, TO_V_HEAD, TO_V_ROW,
    TO_MASK, TO_MASK_BATCH, TO_MASK_HEAD, TO_MASK_ROW, TO_MASK_KEY,  # numbers of the kernel's own kind
    UNITS,  # pairs of a batch entry and a key head that one task goes through
    PULL_ROWS, FLOW_ROWS, PRESSURE_ROWS,
    # Floating numbers.
    SOFTCAP, SHARE_KEPT, ONE_SCALE, ONE_POWER,
    WORDS,
) = range(113)  # fmt: skip

FIELDS = (
    "max_logit", "logsumexp", "expected_score", "entropy", "largest_weight", "collision", "score_mean", "score_std",
    "max_qk", "first_key_weight", "sink_mass", "output_norm", "visible_keys", "nonfinite",
)  # fmt: skip
"""The fields of the Reading in the order of their slots; the last two are whole numbers."""

# The state of a panel: rows of as many numbers as it has query rows. The order matters where two are read as one.
(
    TILE_MAX,
    TILE_SUM,
    TILE_COUNT,
    TILE_MEAN,
    TILE_SPREAD,
    MAXIMUM,
    REFERENCE,  # what is subtracted from scores: the maximum, once there is one
    TOTAL,
    TILT,
    SQUARES,
    COUNT,
    MEAN,
    SPREAD,
    HIGHEST_QK,
    FIRST_SCORE,
    FACTOR,  # from scores as they are stored to exponents of 2
    UNIT,  # from scores as they are stored to scores
    KEEP,  # what of the sums so far remains when the reference moves
    PARTS,
) = range(19)
ROWS_AT_ONCE = 64
"""Rows that a task adds up after a backward pass whose keys were split."""

# More of them for the backward pass.
(
    STORED,  # from scores as they are stored to scores
    WHOLE,  # the scale
    PEAK,  # the largest weight
    SHARE,  # the same, less what a sink takes
    PULL,  # D
    CENTRE,  # the mean of dP under the weights
    WEIGHTED,  # Σ p (dP − centre)²
    LEVEL,
    SLOPE,
    BEND,
    BACKWARD_PARTS,
) = range(PARTS, PARTS + 11)
# And whole numbers, as wide as the others.
FIRSTS, STOPS, DRAW_LOW, DRAW_HIGH, LIMITS, INDEX_PARTS = range(6)
# Of the last, four: the least first key and the greatest stop of rows that see any, then those that all rows keep to.
LEAST, MOST, CLEAR, CLEAR_STOP = range(4)

LEFT = PARTS + STOPS + 1
"""Numbers of a row that a split of the keys leaves beside its output: its State and its bounds."""

CORNER = 2 * MOST_AT_ONCE
"""Vectors in the corner of a room: a square of numbers to turn round, or a maximum and a sum of each column."""


def padded(depth: int, step: int) -> int:
    """Components with room for whole vectors, and for as many as are computed at once."""
    unit = max(step, MOST_AT_ONCE)
    return (depth + unit - 1) // unit * unit


def room_bytes(step: int, number: int, depth: int, value_depth: int) -> int:
    """The scratch memory of a forward worker: what `room_at` lays out, for numbers of some bytes and some lanes."""
    whole = step * COLUMNS
    deep = padded(depth, step) + padded(value_depth, step)
    numbers = PANELS * whole * deep + 3 * KEY_TILE * whole + KEY_TILE * deep + PANELS * (PARTS + INDEX_PARTS) * whole
    numbers += THIN_ROWS * deep + CORNER * step
    return -(-(numbers * number + 8 * whole) // 64) * 64


def backward_room_bytes(step: int, number: int, depth: int, value_depth: int, keys: int) -> int:
    """The same for a backward worker, with the gradients of some keys and values."""
    whole = step * COLUMNS
    deep, value_deep = padded(depth, step), padded(value_depth, step)
    turned = PANELS * whole * (3 * deep + 2 * value_deep)
    tiles = 4 * KEY_TILE * whole + KEY_TILE * (deep + value_deep)
    numbers = turned + tiles + PANELS * (BACKWARD_PARTS + INDEX_PARTS) * whole + CORNER * step
    return -(-((numbers + keys * (deep + value_deep)) * number + 8 * whole) // 64) * 64


def partial_numbers(step: int, value_depth: int) -> int:
    """Of a block of rows over one split of the keys: what `leave` keeps."""
    return PANELS * (LEFT + padded(value_depth, step)) * step * COLUMNS
