"""The Configs of each rung's forward for a Problem, the best first, from the rows of its table that are for it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..arrays.dtypes import ITEM_SIZE
from ..config.forward import Config
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME, SEEDED
from .cost_model import join_cost, same_tile_walk, tile_visits, wave_cost
from .features import features_of, rows_for
from .tiles import MOST_KEYS, TABLES, TILE_COST

if TYPE_CHECKING:
    from ..config.wgmma_forward import WgmmaConfig

LEAST_TILES = 8  # key tiles of each part, if several blocks share the keys
LEAST_WIDE = 32  # keys of a tile of wgmma
LEAST_KEYS = 1024  # keys for few_queries: with fewer, blocks have little work to share
GAIN = 0.85  # keys are split if that takes less than this of the time: a large batch gets 6 % slower by it


def simt(kernel: str, problem: Problem, target: Target) -> Iterator[Config]:
    """v1's or v2's."""
    from ..config.simt_forward import V1Config, V2Config

    kind = V1Config if kernel == "v1" else V2Config
    features = features_of(kind, problem, target)
    return (kind(**features, **row.tile) for row in rows_for(TABLES, "simt", problem, target))


def few_queries(problem: Problem, target: Target) -> Any:
    """The Config of decode for a problem of `attention` in float32 or float64 with few queries and many keys, or None.
    So few rows wait for memory alone, as they do with a cache. Neither the batch nor the number of heads decides: bits
    depend on the choice."""
    p = problem
    many_keys = p.batch and p.heads and p.seqlen_q and p.seqlen_k >= LEAST_KEYS and p.packed is None
    if not many_keys or ITEM_SIZE[p.dtype] == 2 or p.function("mask_mod") is not None or target.cc is None:
        return None
    from . import decode

    return None if decode.refusal(p, target, contiguous=True) else decode.config_of(p, "own", target)


def mma(problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.mma_forward import MmaConfig

    if few := few_queries(problem, target):
        yield few
    features = features_of(MmaConfig, problem, target)
    shrinks = ITEM_SIZE[problem.dtype] > 2 and problem.packed is None
    in_one_tile = rows_for(TABLES, "mma_short", problem, target) if short(problem, target) else []
    for row in (*in_one_tile, *rows_for(TABLES, "mma", problem, target)):
        tile = _in_few_rows(problem, row.tile, row.tile["warp_rows"])
        if shrinks or row in in_one_tile:
            blocks = row.tile["blocks_per_sm"] * row.tile["tile_m"] // tile["tile_m"]
            tile |= dict(tile_n=halved(row.tile["tile_n"], problem.seqlen_k), blocks_per_sm=blocks)
        yield MmaConfig(**features, **tile)


def short(problem: Problem, target: Target) -> bool:
    """Whether mma has all queries and keys of a head in one tile. Then "auto" takes mma: a tile of wgmma has
    64 rows at least, so most would be wasted, and fewer blocks run at a time. Heads of 16 tokens take 32 us in
    16 bits instead of 214, of 64 tokens 22 instead of 35 (H200)."""
    few = 0 < problem.seqlen_k <= 64 >= problem.seqlen_q and problem.packed is None
    return target.cc is not None and ITEM_SIZE[problem.dtype] == 2 and few and problem.widest <= 128


def halved(rows: int, needed: int, step: int = 16) -> int:
    """A tile's rows, halved as long as half of them, a multiple of step, are enough."""
    while rows % (2 * step) == 0 and needed <= rows // 2:
        rows //= 2
    return rows


def wgmma(problem: Problem, target: Target) -> Iterator[Config]:
    if problem.dtype == "float32":
        yield from _wgmma_float32(problem, target)
        return
    from ..config.wgmma_forward import WgmmaConfig

    features, asked = features_of(WgmmaConfig, problem, target), _asked_for_each_score(problem)
    most = next(keys for widest, keys in MOST_KEYS[asked] if problem.widest <= widest)
    for row in rows_for(TABLES, "wgmma", problem, target):
        tile = row.tile
        tile["tile_n"] = min(tile["tile_n"], most)
        keys = max(-(-problem.seqlen_k // 16) * 16, LEAST_WIDE)
        # What is read takes another path, and the longest packed sequence decides nothing.
        if keys < tile["tile_n"] and not asked and problem.packed is None:
            tile |= dict(tile_n=keys, tile_m=min(tile["tile_m"], 128))  # 192 rows spill
        features["group_size"] = group = _group(problem, tile["tile_m"])
        bias = problem.array("bias")
        for bias_stages in (2, 1, 0) if bias is not None and bias.boxes and group == 1 else (0,):
            yield WgmmaConfig(**features, **tile, bias_stages=bias_stages)


def _wgmma_float32(problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.wgmma_float32 import WgmmaFloat32Config

    features = features_of(WgmmaFloat32Config, problem, target)
    for row in rows_for(TABLES, "wgmma", problem, target):
        yield WgmmaFloat32Config(**features, **_in_few_rows(problem, row.tile, 64))


def _in_few_rows(problem: Problem, tile: dict[str, Any], step: int) -> dict[str, Any]:
    """A tile's fields, its rows halved as long as half of them hold all queries, and its group_size."""
    group = _group(problem, tile["tile_m"])
    tile_m = halved(tile["tile_m"], problem.seqlen_q * group, math.lcm(step, group))
    return tile | dict(tile_m=tile_m, group_size=group)


def _asked_for_each_score(problem: Problem) -> str:
    """A key of MOST_KEYS."""
    bias, mask = problem.array("bias"), problem.array("mask")
    if problem.functions:
        return "mask_mod" if problem.function("score_mod") is None else "score_mod"
    if bias is None and mask is None:
        return SEEDED if problem.seeded else ""
    read = "mask" if bias is None else "bias"
    alone = all(BY_NAME[name].acts_on in ("keys", "sum") or name == read for name, _ in problem.uses)
    bits = "" if bias is None else f" of {ITEM_SIZE[bias.dtype]} bytes"
    return f"{read}{bits}{' alone' if alone else ''}"


def with_fastest_rows(config: "WgmmaConfig", problem: Problem, target: Target) -> "WgmmaConfig":
    """The Config with fewer query rows in a tile or with keys in parts, if that is faster; not in float32.

    A row's bits must not depend on the number of heads and batch entries. tile_m changes no bits, with one exception: a
    tile visits keys that some of its rows do not see. Their weight is 0, but if V is not finite there, the row is
    computed again, in another order. So if larger tiles visit more keys, the work for one head decides. For packed
    sequences only a bound is known: then tiles are smaller only if each sequence still has one tile.
    """
    if problem.dtype == "float32":
        return config
    group, tile_n = config.group_size, config.tile_n

    def fastest(most: int, time: Callable[[int], float]) -> int:
        fitting = [rows for rows in TILE_COST if rows <= most and rows % group == 0]
        return min(fitting, key=lambda rows: TILE_COST[rows] * time(rows // group))

    rows = config.tile_m
    parts = _parts(config, problem)
    if problem.packed is not None and not _same_keys(problem):
        rows = min((few for few in TILE_COST if problem.seqlen_q <= few <= rows), default=rows)
    elif not _same_keys(problem):
        rows = fastest(rows, lambda queries: tile_visits(problem, queries, tile_n))
    if same_tile_walk(problem, rows // group, tile_n):
        multiprocessors = max(target.multiprocessors, 1)
        rows = fastest(rows, lambda queries: wave_cost(problem, group, queries, tile_n, multiprocessors, parts))
    return dataclasses.replace(config, tile_m=rows, parts=parts)


def _parts(config: "WgmmaConfig", problem: Problem) -> int:
    """How many blocks share the keys of a query tile: more than one if that is faster for a single batch entry.

    It changes the order of sums, and so bits. So neither the batch size nor the number of multiprocessors decides. A
    large batch gains nothing by it, and each part takes time to begin and to be joined. So a part must have many keys,
    and a single entry must gain much.
    """
    group, tile_n = config.group_size, config.tile_n
    most = problem.seqlen_k // (LEAST_TILES * tile_n)
    if most < 2 or problem.packed is not None or problem.function("mask_mod") is not None:
        return 1
    from ..config.blocks import AT_A_TIME

    entry = dataclasses.replace(problem, batch=1)

    rows = [rows for rows in TILE_COST if rows <= config.tile_m and rows % group == 0]

    def time(parts: int) -> float:
        of = (TILE_COST[n] * wave_cost(entry, group, n // group, tile_n, AT_A_TIME, parts) for n in rows)
        return min(of) + join_cost(entry, parts)

    times = {parts: time(parts) for parts in config.PARTS if parts <= most}
    best = min(times, key=times.__getitem__)
    return best if times[best] < GAIN * times[1] else 1


def _same_keys(problem: Problem) -> bool:
    """Whether all queries of a batch entry are known to see the same keys."""
    masked = problem.array("mask") is not None or problem.function("mask_mod") is not None
    return problem.every_key and not masked


def _group(problem: Problem, tile_m: int) -> int:
    """How many query heads share a tile: all of a KV head's if the queries of one head would not fill it."""
    group = max(problem.group, 1) if problem.heads_kv else 1
    # The longest packed sequence must not change the bits of another.
    return group if problem.seqlen_q < tile_m and tile_m % group == 0 and problem.packed is None else 1
