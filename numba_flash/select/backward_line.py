"""Estimates how long wgmma's backward takes if every query sees every key: as one kernel, whose key tiles add to dQ in
a line, or as two; each with blocks that take all heads of a group or a part of them. Times are microseconds on an H200;
docs/measurements/wgmma_backward_fused.md compares them with measured ones.

Key tiles of a head add their parts to a query tile one after the other, each one turn after the one before. All blocks
that run at a time begin with the same query tiles, so the last block begins many turns late. Later blocks begin in
the order in which these end, and wait no more, unless a block finishes its queries before its turn comes. With
several sums a query tile has several lines, and each is shorter.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

from ..config.blocks import AT_A_TIME, heads_in_flight
from ..config.wgmma_backward import WgmmaFusedConfig
from ..problem.forward import Problem
from ..problem.groups import parts_of

SUMS, MEMBERS = (1, 2, 4, 8), (1, 2, 4)
# The batch size may not decide, because bits must not depend on it. So a form is averaged over {batch: weight}: large
# ones count twice, as they take longest, but not above MOST_TOKENS. Two kernels must be GAIN times as fast as one.
BATCHES, MOST_TOKENS, GAIN = {1: 1, 8: 2, 64: 2}, 1 << 18, 1.03
WIDE = 64  # above this head_dim tiles have 64 queries
# CALL: the call and its other kernels. OF_KEYS, OF_QUERIES: until a block has its own tile, of keys or of queries.
# TURN: until the next key tile can add to the same sum.
CALL, OF_KEYS, OF_QUERIES, TURN = 7.3, 4.7, 2.5, 1.65
# A tile of 128 queries by 128 keys (up to WIDE, above) in the ONE kernel, in that of dK and dV, in that of dQ. A block
# that owns 64 rows takes HALF of it.
ONE, DKDV, DQ, HALF = (2.3, 4.1), (1.85, 3.2), (1.1, 2.0), 0.63
# In a microsecond delta reads ROWS bytes, and a kernel that finishes gradients reads SUMMED bytes of sums. It takes
# PARTS more for parts of a group, and SUM more for each sum of a query tile.
ROWS, SUMMED, PARTS, SUM = 2.1e6, 3.0e6, 3.8, 1.1


class Form(NamedTuple):
    """one: one kernel or two; members: how many query heads of a group a block takes, 0: all; sums: how many sums of dQ
    a query tile has."""

    one: bool
    members: int = 0
    sums: int = 1

    def time(self, p: Problem) -> float:
        return one_kernel(p, self.sums, self.members) if self.one else two_kernels(p, self.members)


@functools.lru_cache(maxsize=4096)
def fastest(p: Problem, one: bool = True) -> Form:
    """The form that is the fastest on average over BATCHES. one: whether it may be one kernel."""
    members = (0, *(n for n in MEMBERS if n < p.group))
    forms = [Form(False, n) for n in members]
    if one and dq_stays(p):  # the order of sums is the same, whether or not a block has all key tiles
        forms.append(Form(True))
    elif one:
        forms += [*(Form(True, n) for n in members), *(Form(True, 0, n) for n in SUMS[1:] if n <= _key_tiles(p))]
    counted = [batch for batch in BATCHES if batch == 1 or batch * max(p.seqlen_q, p.seqlen_k) <= MOST_TOKENS]
    batches = [(dataclasses.replace(p, batch=batch), BATCHES[batch]) for batch in counted]

    def average(form: Form) -> float:
        return math.prod((form.time(of) * (1 if form.one else GAIN)) ** weight for of, weight in batches)

    return min(forms, key=average)


def loses_nowhere(p: Problem, sums: int) -> bool:
    """Whether one kernel takes no longer than two for a chunk after other chunks' keys, whatever the batch: for two
    measured chunks it took 4 to 10 % less than the model says."""
    batches = [dataclasses.replace(p, batch=batch) for batch in BATCHES]
    return max(one_kernel(of, sums) / two_kernels(of) for of in batches) < 1.1


def dq_stays(p: Problem) -> bool:
    """Whether dQ of a head with several key tiles can stay in the shared memory of a block that has all of them."""
    few = p.widest <= WIDE and -(-p.seqlen_q // 128) * p.group <= WgmmaFusedConfig.KEPT
    few = few and None in (p.array("bias"), p.array("mask"))  # both take too many registers
    return few and 1 < _key_tiles(p) <= WgmmaFusedConfig.MOST_KEY_TILES


def one_kernel(p: Problem, sums: int = 1, members: int = 0) -> float:
    heads, key_tiles, wide = p.batch * p.heads_kv * parts_of(p.group, members), _key_tiles(p), p.widest > WIDE
    of_tile = _query_tiles(p, 64 if wide else 128, members) * ONE[wide] / (2 if wide else 1)
    around = _delta(p) + _add_parts(p, members)
    if key_tiles == 1 or (dq_stays(p) and heads * key_tiles > AT_A_TIME):  # a block writes dQ itself
        return around + -(-heads // AT_A_TIME) * (OF_KEYS + key_tiles * of_tile)
    walk, rounds = OF_KEYS + of_tile, -(-heads * key_tiles // AT_A_TIME)
    together = min(max(heads_in_flight(p, WgmmaFusedConfig.KEYS, sums), AT_A_TIME // key_tiles), heads)
    at_a_time = min(AT_A_TIME / together, key_tiles)  # blocks of a head
    last = key_tiles - (rounds - 1) * at_a_time - 1 if heads == together else at_a_time
    late = min(max(last, 0), at_a_time) * TURN / sums
    line = key_tiles * heads / together * TURN / sums
    rows = p.batch * p.heads * -(-p.seqlen_q // 64) * 64 * sums
    behind = 4 * rows * (128 if wide else 64) / SUMMED + sums * SUM
    return around + max(rounds * walk + late, line + walk) + behind


def two_kernels(p: Problem, members: int = 0) -> float:
    """A kernel of dK and dV and one of dQ, each with tiles of 128 rows of its own, or of 64 if blocks are few."""

    def of(blocks: int, begin: float, walk: int, tile: float) -> float:
        return -(-blocks // AT_A_TIME) * (begin + walk * tile * (HALF if 2 * blocks <= AT_A_TIME else 1))

    key_tiles, wide = _key_tiles(p), p.widest > WIDE
    parts = p.batch * p.heads_kv * parts_of(p.group, members)
    of_keys = of(parts * key_tiles, OF_KEYS, _query_tiles(p, 128, members), DKDV[wide])
    of_queries = of(p.batch * p.heads_kv * _query_tiles(p, 128), OF_QUERIES, key_tiles, DQ[wide])
    return _delta(p) + of_keys + _add_parts(p, members) + of_queries


def _delta(p: Problem) -> float:
    """The time that all forms share: the call, and the kernel of delta, which reads dO and O."""
    return CALL + 4 * p.batch * p.heads * p.seqlen_q * p.head_dim_v / ROWS


def _add_parts(p: Problem, members: int) -> float:
    """The time of the kernel that adds up parts of dK and dV."""
    if not members:
        return 0.0
    rows = p.batch * p.heads_kv * parts_of(p.group, members) * _key_tiles(p) * WgmmaFusedConfig.KEYS
    return PARTS + 4 * rows * (p.head_dim + p.head_dim_v) / SUMMED


def _key_tiles(p: Problem) -> int:
    return max(-(-p.seqlen_k // WgmmaFusedConfig.KEYS), 1)


def _query_tiles(p: Problem, rows: int, members: int = 0) -> int:
    """Query tiles of all heads of a group that a block takes."""
    return -(-p.seqlen_q // rows) * (min(members, p.group) or p.group)
