"""Whether decode takes a cache, and its Config: attention_kvcache on tensor cores (kernels/mma/decode.py)."""

import dataclasses
from typing import TYPE_CHECKING

from ..arrays.dtypes import ITEM_SIZE
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME
from .features import features_of
from .refusals import no_copies, no_room, no_tensor_cores, too_wide
from .rungs import RUNGS

if TYPE_CHECKING:
    from ..config.decode import DecodeConfig

# Rows of a KV head: with more, the kernels of `attention` read a contiguous cache. In float32 and float64 the limits
# are those of one product: above them products take longer than memory, and `attention` is faster for large batches.
FEW_ROWS, FEW_WIDE_ROWS, WIDE_COLUMNS = 64, 16, 128
WIDEST = dict(float64=128)  # the largest head_dim, if it is not 256
SIMULATED_BLOCKS = 4
LEAST_SHARED = 16384  # keys of the cache: with fewer, each sequence reads its own prefix (measurements/mma_decode.md)
MOST_THREADS = 256  # threads of a multiprocessor: each takes up to 255 registers
LEAST_LEVELS, MOST_LEVELS = 1, 7  # levels of nodes in shared memory, if none waits in registers


def refusal(problem: Problem, target: Target, contiguous: bool) -> str | None:
    """Why decode does not take the problem of a cache, or None."""
    p, rung = problem, RUNGS["mma"]
    reason = no_tensor_cores(rung, p, target)
    if reason is not None:
        return reason
    wide, most = ITEM_SIZE[p.dtype] > 2, WIDEST.get(p.dtype, 256)
    few = FEW_WIDE_ROWS if wide else FEW_ROWS
    if contiguous and rows_of(p) > few:
        return f"it is for up to {few} queries of the heads of a KV head, not {rows_of(p)}"
    reason = too_wide(p, WIDE_COLUMNS if wide and contiguous else most) or no_copies(p, 1, "q or a cache")
    if reason is None and _fitting(p, "own", target) is None:
        return no_room(p, target, _config(p, "own", target, 16, 2, 1).shared_bytes)
    return reason


def config_of(problem: Problem, pages: str, target: Target, shares: bool = False) -> "DecodeConfig":
    """shares: sequences have common prefixes, and not_shared() is None."""
    found = _fitting(problem, pages, target, shares)
    assert found is not None
    return found


def not_shared(problem: Problem, target: Target) -> str | None:
    """Why decode reads a shared prefix once for each sequence, or None. Nodes of a prefix are computed without knowing
    to which sequence a row belongs."""
    p = problem
    if ITEM_SIZE[p.dtype] > 2:
        return f"prefixes are shared in float16 and bfloat16, not in {p.dtype}"
    of_rows = [name for name, _ in p.uses if BY_NAME[name].per_row] + ["window"] * (p.left is not None)
    if of_rows:
        return f"{', '.join(of_rows)}: scores of a prefix depend on the sequence or the query"
    if p.seqlen_k < LEAST_SHARED and not target.simulated:
        return f"sequences of up to {p.seqlen_k} keys are shorter than {LEAST_SHARED}"
    found = _fitting(p, "own", target, True)
    if found is None or found.members < 2:
        return f"rows of two sequences with {rows_of(p)} queries of the heads of a KV head do not fit into a tile"
    return None


def rows_of(problem: Problem) -> int:
    """The number of rows of a KV head, or a bound of it."""
    return problem.seqlen_q * max(problem.group, 1)


def _fitting(problem: Problem, pages: str, target: Target, shares: bool = False) -> "DecodeConfig | None":
    """The largest tile_m that the rows fill and that fits, with as many stages as fit: two blocks a multiprocessor with
    three or more each, or else one block. shares: a tile has rows of all sequences, each padded to a power of 2."""
    p, wide = problem, problem.widest > 128 or ITEM_SIZE[problem.dtype] > 2
    one_panel = -(-p.head_dim // 64) >= -(-p.head_dim_v // 64)  # rows of O fit into a tile of K and V
    most = 64 if one_panel and not wide else 32
    own = 1 << (max(rows_of(p), 1) - 1).bit_length()
    wanted = min(max(16, own * (1 << (max(p.batch, 1) - 1).bit_length() if shares else 1)), most)
    for tile_m in (n for n in (64, 32, 16) if n <= wanted):
        for per_sm, least_stages in ((2, 3), (1, 3), (1, 2)):
            for stages in range(6, least_stages - 1, -1):
                made = _config(p, pages, target, tile_m, stages, per_sm, max(tile_m // own, 1) if shares else 1)
                room = (target.shared_bytes + 1024) // per_sm - 1024 - made.shared_bytes
                levels = 0 if p.dtype == "float64" else min(room // made.shared_stack[1], MOST_LEVELS)
                least = 0 if made.pair_registers or least_stages == 2 or p.dtype == "float64" else LEAST_LEVELS
                if room >= 0 and levels >= least and per_sm * made.threads <= MOST_THREADS:
                    return dataclasses.replace(made, stack_levels=levels)
    return None


def _config(
    problem: Problem, pages: str, target: Target, tile_m: int, stages: int, per_sm: int, members: int = 1
) -> "DecodeConfig":
    from ..config.decode import DecodeConfig

    p = problem
    return DecodeConfig(
        **features_of(DecodeConfig, p, target) | dict(o_vectorized=True),
        group_size=max(p.group, 1),
        tile_m=tile_m,
        tile_n=16,
        warp_rows=16 if p.widest > 128 or ITEM_SIZE[p.dtype] > 2 else min(tile_m, 32),
        stages=stages,
        blocks_per_sm=per_sm,
        blocks=SIMULATED_BLOCKS if target.simulated else max(target.multiprocessors, 1) * per_sm,
        pages=pages,
        stack_rows=max(min(1 << (max(rows_of(p) * members, 1) - 1).bit_length(), tile_m), 4),
        members=members,
    )
