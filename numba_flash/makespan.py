"""How long a launch takes by how many query rows a block takes at a time: arithmetic, for select.py.

Large tiles read K and V less often, but have more rows and keys that count for nothing, and keep a whole GPU busy only
where there are enough of them. No kernel and no CUDA here.
"""

from .problem import Problem
from .ranges import UNBOUNDED, key_tiles, row_keys

SAMPLES = 24  # query tiles of a head that are looked at, about
ENDS = 0.5  # what begins and ends a query tile, in tiles of keys


def makespan(problem: Problem, group: int, queries: int, tile_n: int, multiprocessors: int) -> float:
    """How many tiles of keys a block walks until all is done: one block a multiprocessor, longest query tiles first.

    queries: of a query tile, which has them of `group` heads.
    """
    tiles = -(-problem.seqlen_q // queries)
    step = tiles // SAMPLES | 1  # odd, so that it does not meet the same tiles whenever patterns repeat
    lengths = [ENDS + _walked(problem, i * queries, queries, tile_n) for i in range(step // 2, tiles, step)]
    if not lengths:
        return 0.0
    count = problem.batch * (problem.heads // group) * tiles
    mean, shortest = sum(lengths) / len(lengths), min(lengths)
    # What all have in common comes in whole rounds; the rest evens out, but for the longest.
    rounds = -(-count // multiprocessors)
    return max(max(lengths), shortest * rounds + (mean - shortest) * count / multiprocessors)


def _walked(problem: Problem, first_query: int, queries: int, tile_n: int) -> int:
    """How many tiles of keys the query tile from this query on walks.

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
    return end - begin
