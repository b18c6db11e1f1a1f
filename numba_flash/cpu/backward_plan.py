"""The numbers that the CPU's backward kernels read about a problem: the forward's (plan.py), and more.

Tiles depend only on the shape of one head, so the bits depend neither on the batch nor on the threads.
"""

import math
from typing import NamedTuple

import numpy as np

from ..problem.backward import BackwardProblem
from ..problem.options import GRADIENT_OF, RANKS, GradientOperands
from . import plan as slot

# Slots of the numbers that follow the forward's. *_STRIDE: as in plan.py.
DO_STRIDE, DQ_STRIDE, DK_STRIDE, DV_STRIDE, DLSE_STRIDE = range(slot.NUMBERS, slot.NUMBERS + 20, 4)
HAS_DLSE, WANTS_DQ, WANTS_DK, WANTS_DV, KEY_TILES, COLUMNS, COLUMNS_V = range(slot.NUMBERS + 20, slot.NUMBERS + 27)
# The gradient of an option is a sum. Slots: its strides and type, which dimensions it has, whether dS is multiplied by
# the distance of query and key, the rows of a task, and the index of its pointer.
SUM_STRIDE = slot.NUMBERS + 27
SUM_DTYPE, OWN_BATCH, OWN_HEADS, OWN_QUERIES, OWN_KEYS, BY_DISTANCE, SUM_ROWS, SUM_POINTER = range(
    slot.NUMBERS + 31, slot.NUMBERS + 39
)
# The option itself: the index of its pointer, and its strides (batch, head) in bytes.
TERM_POINTER, TERM_STRIDE = slot.NUMBERS + 39, slot.NUMBERS + 40
NUMBERS = slot.NUMBERS + 42

# The same slots for gradients of aux: the address of the function from functions.make_gradient, the slot of AUX that
# has the address of the sums, and the bytes of a part's sums.
AUX_FUNCTION, AUX_SUMS, AUX_BYTES = SUM_STRIDE, SUM_STRIDE + 1, SUM_STRIDE + 2
PARTS = 16  # the same for any number of threads, so that the bits are, too
STATE_CAP, STATE_BYTES = 3, 64  # compiled.READS, followed by the cap

# A call's own numbers: the plan, the pointers in the order of options.GradientOperands, and what tasks share.
PLAN, POINTERS = 0, 1
AUX = len(GradientOperands._fields)  # slot of the address of what functions read, after the caller's pointers
FIRST_B = AUX + 2  # as in plan.py
ALL_POINTERS = AUX + 3  # the caller's pointers, AUX, the seed and FIRST_B
DO, DLSE, DQ, DK, DV = (GradientOperands._fields.index(name) for name in "do dlse dq dk dv".split())
COUNTER, DONE, SUMS_K, SUMS_V, GIVE_WAY, STOP = range(ALL_POINTERS + 1, ALL_POINTERS + 7)
FRAME_NUMBERS = -(-(STOP + 1) // 8) * 8  # whole cache lines

# The arguments of a launch, also int64: sizes, and then the kernel and plan of each pass. SHARED: the number of int64
# that its tasks share, all 0 at the beginning.
ADDRESS_OF_GIVE_WAY, DONE_BYTES, SUMS_K_BYTES, SCRATCH, SHARED, PASSES, FIRST_PASS = range(7)
PASS_KERNEL, PASS_PLAN, PASS_PHASE, PASS_NUMBERS = range(4)

# Keys of a tile: the scores of a panel and their gradients almost fit into the first-level cache.
TILE_N = 96
# Query rows of a task, and the bytes that their q, do (twice) and dq may take, of a second-level cache of 1 MB.
# Measured from 64 to 256 rows (float32, 2 cores of 2026): head_dim 128 gains a fifth, head_dim 64 a twentieth.
MAX_TILE_M = 256
MAX_ROWS_BYTES = 600_000
ENOUGH_TILES = 8  # query tiles of a head, if it has so many panels: tasks for several threads even with one head


class Plan(NamedTuple):
    numbers: np.ndarray
    units: int  # (batch, KV head) pairs
    key_tiles: int
    tasks: int
    sums_bytes: tuple[int, int]  # bytes of all dk and dv in the computing precision
    scratch_bytes: int  # per thread


def make_plan(problem: BackwardProblem, lanes: int, width: int) -> Plan:
    """The numbers of a problem. lanes: query rows of a panel in its compute type; width: elements of a vector."""
    p = problem.forward
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[: slot.NUMBERS] = slot.make_plan(p, lanes)
    numbers[slot.AUX_POINTER], numbers[slot.SEED_POINTER] = AUX, AUX + 1
    size = slot.ITEMSIZES[numbers[slot.DTYPE]]
    numbers[DO_STRIDE : DO_STRIDE + 4] = np.multiply(problem.do_strides, size)
    for at, name in ((DQ_STRIDE, "dq"), (DK_STRIDE, "dk"), (DV_STRIDE, "dv")):
        numbers[at : at + 4] = np.multiply(problem.strides_of(name), size)
    size = 8 if p.dtype == "float64" else 4
    numbers[DLSE_STRIDE : DLSE_STRIDE + 3] = np.multiply(problem.dlse_strides, size)
    numbers[HAS_DLSE] = problem.has_dlse
    for at, name in ((WANTS_DQ, "dq"), (WANTS_DK, "dk"), (WANTS_DV, "dv")):
        numbers[at] = name in problem.wanted

    rows = p.seqlen_q * (p.heads // max(p.heads_kv, 1))
    panels = -(-rows // lanes)
    rows_fit = min(MAX_TILE_M, MAX_ROWS_BYTES // ((3 * p.head_dim + 2 * p.head_dim_v) * size))
    tile_m = max(1, min(panels // ENOUGH_TILES, rows_fit // lanes)) * lanes
    tiles, key_tiles = -(-rows // tile_m), -(-p.seqlen_k // TILE_N)
    units = p.batch * p.heads_kv
    columns, columns_v = (-(-n // width) * width for n in (p.head_dim, p.head_dim_v))
    numbers[slot.TILE_M], numbers[slot.TILE_N], numbers[slot.TILES] = tile_m, TILE_N, tiles
    numbers[slot.CHUNKS], numbers[slot.TASKS] = 1, tiles * units
    numbers[KEY_TILES], numbers[COLUMNS], numbers[COLUMNS_V] = key_tiles, columns, columns_v

    keys = p.batch * p.heads_kv * p.seqlen_k * size
    wide = (("dk", columns), ("dv", columns_v))
    sums = tuple(keys * n if name in problem.wanted and tiles != 1 else 0 for name, n in wide)
    # Query tile: q, do and dq, and q and do again by rows. Both tiles: p and dS. Key tile: K, V, and K packed.
    blocks = sum(-(-n // lanes) * lanes for n in (p.head_dim, p.head_dim_v))
    of_rows = tile_m * (2 * p.head_dim + p.head_dim_v + blocks + 3)
    of_keys = TILE_N * (2 * tile_m + lanes + 2 * p.head_dim + p.head_dim_v + columns + columns_v)
    scratch = (of_rows + of_keys + 3 * lanes + 2 * max(p.head_dim, p.head_dim_v)) * size
    scratch += (2 * lanes + slot.OF_PANEL + 4 * (tile_m // lanes)) * 8
    return Plan(numbers, units, key_tiles, tiles * units, (sums[0], sums[1]), -(-scratch // 64) * 64)


def make_sums_plan(problem: BackwardProblem, name: str, lanes: int) -> tuple[np.ndarray, int]:
    """The numbers for the gradient `name` of an option of the scores, and the bytes of a thread's scratch memory."""
    p = problem.forward
    numbers = make_plan(problem, lanes, 1).numbers
    option, rank = p.array(GRADIENT_OF[name]), RANKS[name]
    strides = problem.strides_of(name) + (0,) * (4 - rank)
    assert option is not None
    # Sums of packed sequences are added up before they are rounded (dispatch/packed_on_cpu.py).
    code = slot.DTYPE_CODES["float64" if p.packed is not None else option.dtype]
    numbers[SUM_STRIDE : SUM_STRIDE + 4] = np.multiply(strides, slot.ITEMSIZES[code])
    numbers[SUM_DTYPE], numbers[SUM_POINTER] = code, GradientOperands._fields.index(name)
    numbers[BY_DISTANCE] = rank == 2  # one slope for each head
    own = [stride != 0 for stride in strides]
    numbers[OWN_BATCH : OWN_KEYS + 1] = own

    group = max(p.heads // max(p.heads_kv, 1), 1)
    tile_m = max(int(numbers[slot.TILE_M]), -(-group // lanes) * lanes)  # one task has all heads of a query
    rows = tile_m // group * group
    tiles = -(-p.seqlen_q * group // rows)
    numbers[slot.TILE_M], numbers[slot.TILES], numbers[SUM_ROWS] = tile_m, tiles, rows
    extents = (p.batch, p.heads_kv, tiles, int(numbers[KEY_TILES]))
    numbers[slot.TASKS] = math.prod(extent if mine else 1 for extent, mine in zip(extents, own, strict=True))
    size = 8 if p.dtype == "float64" else 4
    of_rows, of_keys = tile_m * (p.head_dim + p.head_dim_v + 3), TILE_N * (2 * lanes + p.head_dim + p.head_dim_v)
    scratch = (of_rows + of_keys + 2 * lanes + 2 * max(p.head_dim, p.head_dim_v)) * size + 8 * (
        1 + tile_m * TILE_N + 2 * lanes + slot.OF_PANEL
    )
    return numbers, -(-scratch // 64) * 64


def make_aux_plan(problem: BackwardProblem, lanes: int) -> tuple[np.ndarray, int]:
    """make_sums_plan for gradients of aux, without AUX_FUNCTION, AUX_SUMS and AUX_BYTES."""
    p = problem.forward
    numbers = make_plan(problem, lanes, 1).numbers
    tile_m, size = int(numbers[slot.TILE_M]), 8 if p.dtype == "float64" else 4
    of_rows, of_keys = tile_m * (p.head_dim + p.head_dim_v + 3), TILE_N * (2 * lanes + p.head_dim + p.head_dim_v)
    scratch = (of_rows + of_keys + 2 * lanes + 2 * max(p.head_dim, p.head_dim_v)) * size + STATE_BYTES
    scratch += (2 * lanes + slot.OF_PANEL) * 8
    return numbers, -(-scratch // 64) * 64


def make_terms_plan(problem: BackwardProblem, name: str, lanes: int) -> tuple[np.ndarray, int]:
    """make_sums_plan for the gradient of a term of every row's sum. A task is one element of it."""
    p, term = problem.forward, problem.forward.array(GRADIENT_OF[name])
    assert term is not None
    numbers = make_plan(problem, lanes, 1).numbers
    code = slot.DTYPE_CODES[term.dtype]
    numbers[SUM_DTYPE], numbers[OWN_BATCH] = code, len(problem.shape_of(name)) == 2
    numbers[SUM_POINTER], numbers[TERM_POINTER] = map(GradientOperands._fields.index, (name, GRADIENT_OF[name]))
    for at, strides in ((SUM_STRIDE, problem.strides_of(name)), (TERM_STRIDE, term.strides)):
        numbers[at : at + 2] = np.multiply(strides, slot.ITEMSIZES[code])
    numbers[slot.TASKS] = math.prod(problem.shape_of(name))
    scratch = 2 * p.head_dim_v * (8 if p.dtype == "float64" else 4)  # a row of o and one of do
    return numbers, -(-scratch // 64) * 64


def make_launch(plan: Plan, passes: list[tuple[int, np.ndarray, int, int]], give_way: int) -> np.ndarray:
    """The numbers of a launch.

    passes: for each the kernel's address, its plan, its phase and the bytes of a thread's work space.
    """
    numbers = np.zeros(FIRST_PASS + PASS_NUMBERS * len(passes), np.int64)
    done, sums_k, sums_v = (-(-n // 64) * 64 for n in (8 * plan.units * plan.key_tiles, *plan.sums_bytes))
    scratch = max((scratch_bytes for *_, scratch_bytes in passes), default=0)
    shared = 64 + FRAME_NUMBERS * 8 + 64 + done + sums_k + sums_v  # the counter has a line of its own
    numbers[:FIRST_PASS] = give_way, done, sums_k, scratch, shared // 8, len(passes)
    for n, (kernel, of_pass, phase, _) in enumerate(passes):
        begin = FIRST_PASS + n * PASS_NUMBERS
        numbers[begin : begin + PASS_NUMBERS] = kernel, of_pass.ctypes.data, phase
    return numbers
