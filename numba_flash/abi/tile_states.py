"""The states of tiles under a mask_mod: their number, their places, and the batch entries and heads that have them.

A query tile has a row of words with the states of STATES_IN_WORD key tiles each. For kernels that own keys, rows are of
key tiles. If neither the function nor anything else that removes keys differs between batch entries, one entry has the
states for all entries; likewise for heads. So a tile has no more than a bit or two.
"""

import math

from ..functions.arguments import reads_argument
from ..problem.forward import Problem
from .parameters import STATES_IN_WORD, StatesTile

B, H = 0, 1  # the indices of these arguments of a mask_mod


def counts(problem: Problem, tile: StatesTile) -> tuple[int, int, int, int]:
    """-> (batch entries, groups of heads, tiles of the side that words belong to, words of such a tile) that have
    states of their own."""
    by_batch, by_head = _differ(problem)
    # One tile more than exist, and so at least one word: wgmma visits a tile past the last if none is seen.
    own, other = problem.seqlen_q, problem.seqlen_k
    if tile.of_keys:
        own, other = other, own
    words = -(-(other // tile.other + 2) // STATES_IN_WORD)
    batch, groups = problem.batch if by_batch else 1, problem.heads // tile.heads if by_head else 1
    return batch, groups, -(-own // tile.own), words


def words(problem: Problem, tile: StatesTile) -> int:
    """Number of words, and of blocks of tile_states, each of which writes one."""
    return math.prod(counts(problem, tile))


def strides(problem: Problem, tile: StatesTile) -> tuple[int, int, int]:
    """(batch entry, group of heads, own tile), in words; 0 if all share the same states."""
    (by_batch, by_head), (_, groups, tiles, row) = _differ(problem), counts(problem, tile)
    return groups * tiles * row * by_batch, tiles * row * by_head, row


def _differ(problem: Problem) -> tuple[bool, bool]:
    """Whether what is seen differs between batch entries, and between heads."""
    function, mask = problem.function("mask_mod"), problem.array("mask")
    assert function is not None
    of_batch, of_head, *_ = mask.strides if mask is not None else (0, 0)
    lengths = problem.array("seqlens_k") is not None or problem.array("q_offset") is not None
    return lengths or of_batch != 0 or reads_argument(function, B), of_head != 0 or reads_argument(function, H)
