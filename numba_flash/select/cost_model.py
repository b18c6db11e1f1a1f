"""Cost model: run time by tile_m, in visits of key tiles.

Larger tiles reread K and V less often, but waste masked work and may not fill the GPU. No kernel and no CUDA here.
"""

from ..problem.forward import Problem
from ..problem.ranges import UNBOUNDED, key_tiles, row_keys

SAMPLES = 24  # query tiles of a head that are looked at, about
ENDS = 0.5  # what begins and ends a query tile, in tiles of keys


def wave_cost(problem: Problem, group_size: int, queries: int, tile_n: int, multiprocessors: int) -> float:
    """How many tiles of keys a block walks until all is done: one block a multiprocessor, longest query tiles first.

    queries: of a query tile, which has them of `group_size` heads.
    """
    lengths, tiles = _lengths(problem, queries, tile_n)
    count = problem.batch * (problem.heads // group_size) * tiles
    mean, shortest = sum(lengths) / len(lengths), min(lengths)
    # What all have in common comes in whole rounds; the rest evens out, but for the longest.
    rounds = -(-count // multiprocessors)
    return max(max(lengths), shortest * rounds + (mean - shortest) * count / multiprocessors)


def tile_visits(problem: Problem, queries: int, tile_n: int) -> float:
    """How many tiles of keys are walked for one head, or for those that share a tile: whatever else there is to do."""
    lengths, tiles = _lengths(problem, queries, tile_n)
    return sum(lengths) / len(lengths) * tiles


def same_tile_walk(problem: Problem, queries: int, tile_n: int) -> bool:
    """Whether any part of a tile of so many queries walks the same tiles of keys as the whole, with the same masked.

    That is so where an edge, of causal or of a window, crosses from one tile of keys to the next between query tiles
    only. A part is half of them, or a quarter and so on, of two queries at least. With a mask or a
    mask_mod nobody knows.
    """
    if problem.array("mask") is not None or problem.function("mask_mod") is not None:
        return False
    edges = [problem.q_offset + problem.right] if problem.right is not None else []
    edges += [problem.q_offset - problem.left] if problem.left is not None else []
    known = problem.q_offset_source == "number"
    return not edges or (known and tile_n % queries == 0 and not any(edge % queries for edge in edges))


def _lengths(problem: Problem, queries: int, tile_n: int) -> tuple[list[float], int]:
    """How long some query tiles of a head take, in tiles of keys, and how many query tiles it has."""
    tiles = max(-(-problem.seqlen_q // queries), 1)
    step = tiles // SAMPLES | 1  # odd, so that it does not meet the same tiles whenever patterns repeat
    return [ENDS + _walked(problem, i * queries, queries, tile_n) for i in range(step // 2, tiles, step)], tiles


def _walked(problem: Problem, first_query: int, queries: int, tile_n: int) -> int:
    """How many tiles of keys the query tile from this query on walks; where it sees none, one that reads as zeros.

    Where numbers on the device decide, as if all keys were valid and the last query stood at the last of them.
    """
    known = problem.q_offset_source == "number"
    q_start = problem.q_offset if known else problem.seqlen_k - problem.seqlen_q
    last_query = min(first_query + queries, problem.seqlen_q) - 1
    left = UNBOUNDED if problem.left is None else problem.left
    right = UNBOUNDED if problem.right is None else problem.right
    top_first, top_end = row_keys(q_start + first_query, left, right, problem.seqlen_k)
    bottom_first, bottom_end = row_keys(q_start + last_query, left, right, problem.seqlen_k)
    begin, _, _, end = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
    return max(end - begin, 1)
