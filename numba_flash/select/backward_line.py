"""How long wgmma's backward takes if every query sees every key: as one kernel, whose key tiles add to dQ in a line, or
as two. Microseconds on an H200; docs/measurements/wgmma_backward_fused.md has them beside what was measured.

The key tiles of a head are added to a query tile one after the other, each one turn after the one before. All blocks
that run at a time begin with the same query tiles, so the last of them begins many turns late. The next ones begin in
the order in which these end, and wait no more, unless a block is done with its queries sooner than its turn comes. With
several sums a query tile has as many lines, each of which is shorter.
"""

import dataclasses
import math

from ..config.blocks import AT_A_TIME, heads_in_flight
from ..config.wgmma_backward import WgmmaFusedConfig
from ..problem.forward import Problem

SUMS = (1, 2, 4, 8)
# The batch size may not decide, because bits must not depend on it. So these batches count alike, or of long sequences
# one of so many tokens.
BATCHES, TOKENS = (1, 8, 64), 16384
WIDE = 64  # from the next head_dim on tiles have 64 queries
# A call's kernels beside these; until a block has its own tile; until the next key tile can add to the same sum.
CALL, BEGIN, TURN = 8.0, 3.0, 2.0
# A tile of 128 queries by 128 keys, up to WIDE and above: in the one kernel, in that of dK and dV, in that of dQ. A
# block of 64 of its own rows takes HALF of it.
ONE, DKDV, DQ, HALF = (2.55, 4.6), (1.75, 3.2), (1.15, 2.05), 0.75
MANY_KEYS = (8192, 16384)  # of all heads, up to WIDE and above
# The kernel behind reads so many bytes of sums in one; and begins with one sum of a query tile after the other.
ROUNDED, SUM = 2.7e6, 0.7


def one_kernel(p: Problem, sums: int) -> float:
    """With so many sums of dQ for each query tile."""
    heads, key_tiles, query_tiles = p.batch * p.heads_kv, _key_tiles(p), _query_tiles(p, 64 if _wide(p) else 128)
    walk = BEGIN + query_tiles * ONE[_wide(p)] / (2 if _wide(p) else 1)
    together = min(heads_in_flight(p, WgmmaFusedConfig.KEYS, sums), heads)
    at_a_time = min(AT_A_TIME / together, key_tiles)  # of a head
    rounds = -(-heads * key_tiles // AT_A_TIME)
    last = key_tiles - (rounds - 1) * at_a_time - 1 if heads == together else at_a_time
    late = min(max(last, 0), at_a_time) * TURN / sums
    line = key_tiles * heads / together * TURN / sums
    bytes_of_sums = 4 * p.batch * p.heads * p.seqlen_q * (128 if _wide(p) else 64) * sums
    return CALL + max(rounds * walk + late, line + walk) + bytes_of_sums / ROUNDED + sums * SUM


def two_kernels(p: Problem) -> float:
    """A kernel of dK and dV and one of dQ, each with tiles of 128 rows of its own, or of 64 if blocks are few."""

    def of(blocks: int, walk: int, tile: float) -> float:
        return -(-blocks // AT_A_TIME) * (BEGIN + walk * tile * (HALF if 2 * blocks <= AT_A_TIME else 1))

    key_tiles, query_tiles, wide = _key_tiles(p), _query_tiles(p, 128), _wide(p)
    of_dkdv = of(p.batch * p.heads_kv * key_tiles, query_tiles, DKDV[wide])
    return CALL + of_dkdv + of(p.batch * p.heads_kv * query_tiles, key_tiles, DQ[wide])


def fewest_sums(p: Problem) -> int:
    """The fewest sums of dQ by which a single batch entry loses 2 % at most, if a batch of TOKENS loses no more than
    2.5 %."""
    if max(p.seqlen_q, p.seqlen_k) <= 512:
        return 1
    batches = 1, max(TOKENS // max(p.seqlen_q, p.seqlen_k), 1)
    alone, many = ({n: one_kernel(dataclasses.replace(p, batch=batch), n) for n in SUMS} for batch in batches)
    possible = {n: time for n, time in alone.items() if many[n] <= 1.025 * many[1]}
    return next(n for n, time in possible.items() if time <= 1.02 * min(possible.values()))


def one_kernel_gains(p: Problem, sums: int) -> bool:
    """Whether one kernel with so many sums is faster, on the average of all BATCHES, or within 5 % of two, of which
    less is known. With few keys a small batch can lose more by it than a large one gains: then none of BATCHES may
    lose."""
    ratios = [
        one_kernel(of, sums) / two_kernels(of) for of in (dataclasses.replace(p, batch=batch) for batch in BATCHES)
    ]
    if not p.every_key:  # of two chunks that were measured, one kernel was 4 to 10 % faster than this says
        return max(ratios) < 1.1
    many = p.heads_kv * p.seqlen_k >= MANY_KEYS[_wide(p)]
    return math.prod(ratios) < 1.15 if many else max(ratios) < 1.05 and math.prod(ratios) < 0.7


def _wide(p: Problem) -> bool:
    return p.widest > WIDE


def _key_tiles(p: Problem) -> int:
    return -(-p.seqlen_k // WgmmaFusedConfig.KEYS)


def _query_tiles(p: Problem, rows: int) -> int:
    """Of all heads of a group."""
    return -(-p.seqlen_q // rows) * p.group
