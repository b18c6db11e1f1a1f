"""Cost model: run time as a function of tile_m, in visits of key tiles.

Larger tiles read K and V less often, but waste masked work and may not fill the GPU. Nothing here uses CUDA.
"""

from typing import Any, NamedTuple

from ..problem.forward import Problem
from ..problem.ranges import key_tiles

SAMPLES = 24  # about how many query tiles of a head are examined
ENDS = 0.5  # the overhead of a query tile, in key tiles
# In visits of a key tile by 128 queries, about 1 us: joining parts takes JOIN, and one more for each ROWS_JOINED rows.
JOIN, ROWS_JOINED = 3.0, 8192


class Speed(NamedTuple):
    """The speed of a rung's kernels on one multiprocessor of the measured GPU."""

    ends: float  # microseconds for a tile that a block owns, without its products
    products: float  # multiplications in a microsecond
    visit: float  # the least microseconds for a tile that a block walks over: latencies


# In float32; docs/measurements/wgmma_forward_float32.md has the measurements behind them.
FLOAT32 = {"wgmma": Speed(2.5, 0.42e6, 0.0), "mma": Speed(0.4, 0.22e6, 2.0)}


def wave_cost(
    problem: Problem, group_size: int, queries: int, tile_n: int, multiprocessors: int, parts: int = 1
) -> float:
    """How many key tiles a block processes until all is done: one block for each multiprocessor, longest query tiles
    first. queries: in a query tile, for each of its `group_size` heads; parts: how many blocks share its keys."""
    lengths, tiles = _lengths(problem, queries, tile_n, parts=parts)
    count = problem.batch * (problem.heads // group_size) * tiles * parts
    mean, shortest = sum(lengths) / len(lengths), min(lengths)
    # The length that all tiles have takes whole rounds; the rest evens out, except for the longest tile.
    rounds = -(-count // multiprocessors)
    return max(max(lengths), shortest * rounds + (mean - shortest) * count / multiprocessors)


def join_cost(problem: Problem, parts: int) -> float:
    """The cost of joining the parts of all query tiles, in visits of a key tile by 128 queries."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    return JOIN + parts * rows / ROWS_JOINED if parts > 1 else 0.0


def tile_visits(problem: Problem, queries: int, tile_n: int, ends: float = ENDS) -> float:
    """How many key tiles are visited for one head, or for the heads that share a tile."""
    lengths, tiles = _lengths(problem, queries, tile_n, ends)
    return sum(lengths) / len(lengths) * tiles


def microseconds(problem: Problem, config: Any, rung: str) -> float:
    """The time of a tensor-core kernel in float32 for one head of whole tiles, alone on a multiprocessor. Neither the
    number of heads nor the batch size may decide: they would change a row's bits."""
    own, other = config.head_dim_padded, config.head_dim_v_padded
    columns = own + other  # of all products of a tile: S and O; in a backward S, dP and each gradient
    if "o" not in config.takes.arrays:
        columns += own + other * getattr(config, "of_dv", False)
    owned = -(-problem.seqlen_k // config.tile_n) if config.of_keys else -(-problem.seqlen_q // config.queries)
    tiles, speed = tile_visits(problem, config.queries, config.tile_n, 0), FLOAT32[rung]
    visit = max(config.tile_m * config.tile_n * columns / speed.products, speed.visit)
    return (owned * speed.ends + tiles * visit) / config.group_size


def same_tile_walk(problem: Problem, queries: int, tile_n: int) -> bool:
    """Whether every part of a query tile of `queries` queries visits the same key tiles as the whole, with the same
    ones masked.

    It holds if an edge of causal or of a window moves from one key tile to the next only between query tiles. A part is
    half of the queries, a quarter and so on, at least two. With a mask or a mask_mod the answer is unknown, so False.
    """
    if problem.array("mask") is not None or problem.function("mask_mod") is not None:
        return False
    edges = [problem.q_offset + problem.right] if problem.right is not None else []
    edges += [problem.q_offset - problem.left] if problem.left is not None else []
    known = problem.q_offset_source == "number"
    return not edges or (known and tile_n % queries == 0 and not any(edge % queries for edge in edges))


def _lengths(
    problem: Problem, queries: int, tile_n: int, ends: float = ENDS, parts: int = 1
) -> tuple[list[float], int]:
    """The lengths of a part of some query tiles of a head, in key tiles, and the number of its query tiles."""
    tiles = max(-(-problem.seqlen_q // queries), 1)
    step = tiles // SAMPLES | 1  # odd, so that repeated patterns do not always give the same tiles
    lengths = []
    for first in range(step // 2 * queries, tiles * queries, step * queries):
        last = min(first + queries, problem.seqlen_q) - 1
        begin, _, _, end = key_tiles(*problem.keys_seen(first), *problem.keys_seen(last), tile_n)
        lengths.append(ends + -(-max(end - begin, 1) // parts))  # without keys a block reads one tile, of zeros
    return lengths, tiles
