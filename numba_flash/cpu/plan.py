"""The numbers that the compiled CPU kernel reads about a problem: one row of int64, created once for each problem.

The kernel reads it by its address, number by number, so a call passes only a few integers. Numbers that are not
integers are stored as the bits of a float64.
"""

import os

import numpy as np

from ..problem.forward import Problem
from ..problem.options import SEEDED as SEEDED_OPTION, Operands, dropped_steps, kept_count

# Element types, as numbers for the kernel.
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = range(4)
DTYPE_CODES = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32, "float64": FLOAT64}
ITEMSIZES = (2, 2, 4, 8)

# The slot of each number. *_STRIDE is the first of four strides in bytes: batch, head, seqlen, dim.
(
    BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K, HEAD_DIM, HEAD_DIM_V, DTYPE,
    LEFT, RIGHT, Q_OFFSET, Q_OFFSET_SOURCE, HAS_SEQLENS_K, SEQLENS_K_STRIDE, Q_OFFSET_STRIDE,
    SCALE, SOFTCAP, HAS_SOFTCAP, ALIBI_DTYPE, BIAS_DTYPE, HAS_MASK, RETURN_LSE,
    TILE_M, TILE_N, TILES, CHUNKS, LEAF_TILES, BY_ROWS, TASKS, STATE_BYTES, SCRATCH_BYTES, SHARED_BYTES,
) = range(32)  # fmt: skip
Q_STRIDE, K_STRIDE, V_STRIDE, O_STRIDE, BIAS_STRIDE, MASK_STRIDE = range(32, 56, 4)
ALIBI_STRIDE, TERM_STRIDE = 56, 58  # two strides in bytes: batch, head. TERM: sinks, which add e^term to l
TERM_DTYPE = 60
# Addresses of the caller's own functions (functions.py), 0 = none; and the index of the pointer to AUX.
SCORE_MOD, MASK_MOD, AUX_POINTER = 61, 62, 63
OWN = dict(score_mod=SCORE_MOD, mask_mod=MASK_MOD)
# Whether there is a seed, the random bits below which a weight is dropped, the factor of the other weights, and the
# index of the seed's pointer.
SEEDED, DROPPED, KEPT_COUNT, SEED_POINTER = range(64, 68)
OUTSIDE_AT = 68  # the index in AUX of the report of a read outside an array (functions.py)
LSE_BATCH, LSE_HEAD = 69, 70  # lse's strides: batch, head
# For a KV cache (kvcache.py): whether there are lines, and the keys per page; 0 = k and v have no pages.
HAS_LINES, PAGE_SIZE = 71, 72
AS_NODES = 73  # whether each row's state is written in place of lse, and no o and lse
NUMBERS = 74
# A line: a sequence's b, its first row in q, its queries and valid keys, the position of query 0, and the address of
# the number of its first page.
LINE_B, LINE_ROW, LINE_QUERIES, LINE_KEYS, LINE_OFFSET, LINE_PAGES, LINE_NUMBERS = range(7)
OF_PANEL = 8  # numbers of a panel in PLACES, behind those of its rows
# Array options: the slots for whether there is one, its dtype, its strides, and whether these are in bytes.
ARRAY_SLOTS = {
    "alibi_slopes": (None, ALIBI_DTYPE, ALIBI_STRIDE, True),
    "bias": (None, BIAS_DTYPE, BIAS_STRIDE, True),
    "mask": (HAS_MASK, None, MASK_STRIDE, False),
    "seqlens_k": (HAS_SEQLENS_K, None, SEQLENS_K_STRIDE, False),
    "q_offset": (None, None, Q_OFFSET_STRIDE, False),
    "sinks": (None, TERM_DTYPE, TERM_STRIDE, True),
}

# A call's own numbers, also int64: the address of the plan, the caller's pointers, and what the tasks share.
PLAN, POINTERS = 0, 1
AUX = len(Operands._fields)  # slot of the address of AUX (functions.py), after the caller's pointers
FIRST_B = AUX + 2  # the batch index that functions get for entry 0: a packed sequence is entry 0 of its own call
LINES_AT = FIRST_B  # for a KV cache the same slot holds the address of its lines
ALL_POINTERS = AUX + 3  # the caller's pointers, AUX, the seed and FIRST_B
PARTS, COUNTERS, STOP = range(ALL_POINTERS + 1, ALL_POINTERS + 4)  # STOP: the address of machine/interrupt.py's number
FRAME_NUMBERS = -(-(STOP + 1) // 8) * 8  # whole cache lines
# The indices of a call's arrays among the pointers.
Q_AT, K_AT, V_AT, O_AT, LSE_AT = range(5)
BIAS_AT, MASK_AT, ALIBI_AT, SEQLENS_K_AT, Q_OFFSET_AT, TERM_AT = map(
    Operands._fields.index, ("bias", "mask", "alibi_slopes", "seqlens_k", "q_offset", "sinks")
)

ABSENT = -1  # the dtype of an absent array
Q_OFFSET_SOURCES = {"number": 0, "seqlens_k": 1, "array": 2}

# A key tile (K and V in the compute type) should fit into the second-level cache with the scores of a panel, which
# should fit into the first.
TILE_BYTES = 200_000
MAX_TILE_N = 192
# The most query rows of a task, a multiple of every panel's; and the number of tasks below which tasks get fewer rows.
MAX_TILE_M = 128
ENOUGH_TASKS = 8 * (os.cpu_count() or 1)
# With no more rows than this, a panel would be mostly empty: one row at a time.
MAX_ROWS_ALONE = 6
# With no more rows than this for a KV head, a row's result is a binary tree over leaves of so many keys, which begin at
# multiples of that. A task has a node of NODE_LEAVES leaves. All are constants, so that a row's bits depend neither on
# the batch nor on the number of threads.
MAX_ROWS_SPLIT = 64
LEAF_KEYS, NODE_LEAVES = 256, 4
NODE_KEYS = LEAF_KEYS * NODE_LEAVES


def tile_keys(head_dim: int, head_dim_v: int, itemsize: int) -> int:
    """Keys of a tile: whole register tiles (6 or 12 keys), at least two of them."""
    fit = TILE_BYTES // (itemsize * max(head_dim + head_dim_v, 1))
    return max(12, min(fit // 12 * 12, MAX_TILE_N * 4 // itemsize))


def leaf_tile_keys(head_dim: int, head_dim_v: int, itemsize: int, by_rows: bool) -> int:
    """Keys of a tile that is a leaf of the tree, or a part of one: a power of two."""
    fit = TILE_BYTES // (itemsize * max(head_dim + head_dim_v, 1))
    return int(min(1 << max(fit, 8).bit_length() - 1, LEAF_KEYS if by_rows else LEAF_KEYS * 2 // itemsize))


def make_plan(problem: Problem, panel_rows: int) -> np.ndarray:
    """The numbers of a problem; panel_rows: the number of rows of a panel in its compute type."""
    p = problem
    plan = np.zeros(NUMBERS, np.int64)
    real = plan.view(np.float64)
    plan[:DTYPE] = p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v
    plan[DTYPE] = DTYPE_CODES[p.dtype]
    plan[LEFT], plan[RIGHT] = p.sides
    plan[Q_OFFSET] = p.q_offset
    plan[Q_OFFSET_SOURCE] = Q_OFFSET_SOURCES.get(p.q_offset_source, 0)  # "sequence": lines or host numbers have it
    real[SCALE] = p.scale
    plan[HAS_SOFTCAP] = p.number("softcap") is not None
    real[SOFTCAP] = p.number("softcap") or 0.0
    for name, (has, dtype, at, in_bytes) in ARRAY_SLOTS.items():
        array = p.array(name)
        if has is not None:
            plan[has] = array is not None
        if dtype is not None:
            plan[dtype] = ABSENT if array is None else DTYPE_CODES[array.dtype]
        if array is not None:
            size = ITEMSIZES[DTYPE_CODES[array.dtype]] if in_bytes else 1
            plan[at : at + len(array.strides)] = np.multiply(array.strides, size)
    plan[RETURN_LSE] = p.return_lse
    plan[LSE_BATCH], plan[LSE_HEAD] = (p.heads * p.seqlen_q, p.seqlen_q) if p.packed is None else (0, p.packed[0])
    dropped = dropped_steps(p.number(SEEDED_OPTION) or 0.0)
    plan[SEEDED], plan[DROPPED], real[KEPT_COUNT] = p.seeded, dropped, kept_count(dropped)
    plan[AUX_POINTER], plan[SEED_POINTER] = AUX, AUX + 1
    size = ITEMSIZES[plan[DTYPE]]
    of_operands = p.q_strides, p.k_strides, p.v_strides, p.o_strides
    for at, strides in zip((Q_STRIDE, K_STRIDE, V_STRIDE, O_STRIDE), of_operands, strict=True):
        plan[at : at + 4] = np.multiply(strides, size)

    rows = p.seqlen_q * (p.heads // max(p.heads_kv, 1))
    by_rows = rows <= MAX_ROWS_ALONE
    dims = p.head_dim, p.head_dim_v, 8 if p.dtype == "float64" else 4
    tile_n, chunks, leaves, leaf_tiles = tile_keys(*dims), 1, 1, 0
    if rows <= MAX_ROWS_SPLIT:
        tile_n = leaf_tile_keys(*dims, by_rows)
        chunks, leaves, leaf_tiles = max(1, -(-p.seqlen_k // NODE_KEYS)), NODE_LEAVES, LEAF_KEYS // tile_n
    # A tile consists of whole panels, and is no larger than the existing rows: its state is stored for every chunk.
    tile_m = rows if by_rows else min(-(-rows // panel_rows) * panel_rows, MAX_TILE_M)
    while not by_rows and tile_m > panel_rows and -(-rows // tile_m) * p.batch * p.heads_kv * chunks < ENOUGH_TASKS:
        tile_m = -(-tile_m // 2 // panel_rows) * panel_rows
    tiles = -(-rows // max(tile_m, 1))
    plan[TILE_M : LEAF_TILES + 1] = tile_m, tile_n, tiles, chunks, leaf_tiles
    plan[BY_ROWS] = by_rows
    size = max(size, 4)
    # o, m and l; beside them q, scores, the factors that rescale o, ALiBi, places, and a key tile converted and packed.
    state = tile_m * (p.head_dim_v + 2) * size
    work = (tile_m * p.head_dim + (tile_n + 3) * panel_rows + tile_n * (p.head_dim + 2 * p.head_dim_v)) * size
    work += (2 * panel_rows + OF_PANEL) * 8
    plan[STATE_BYTES] = state
    plan[SCRATCH_BYTES] = -(-(leaves * state + work) // 64) * 64
    plan[AS_NODES] = p.as_nodes
    plan[HAS_LINES], plan[PAGE_SIZE] = p.pages is not None, 0 if p.pages is None else p.pages.size
    set_tasks(plan, p.batch, chunks)
    return plan


def set_tasks(plan: np.ndarray, batch: int, chunks: int) -> None:
    """chunks: how many nodes of NODE_LEAVES leaves the longest sequence has."""
    tasks = plan[TILES] * batch * plan[HEADS_KV] * chunks
    plan[BATCH], plan[CHUNKS], plan[TASKS] = batch, chunks, tasks
    # Counters, and what the nodes of a tile store for the last of them.
    plan[SHARED_BYTES] = -(-8 * (1 + tasks) // 64) * 64 + (tasks * plan[STATE_BYTES] if chunks > 1 else 0)
