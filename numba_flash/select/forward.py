"""Selects the kernel and its Config for a Problem and a Target, and says why the other kernels do not run.

Nothing here uses CUDA or Numba, so every choice can be tested for GPUs that this machine does not have.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.dtypes import ITEM_SIZE
from ..config.forward import Config
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME
from .cost_model import FLOAT32, join_cost, microseconds, same_tile_walk, tile_visits, wave_cost
from .features import features_of, rows_for
from .refusals import no_copies, no_room, no_tensor_cores, no_tma, not_here, too_wide
from .rungs import RUNGS, Rung, check_request, choose
from .tiles import READING_KEYS, TABLES, TILE_COST, rows_of

if TYPE_CHECKING:
    from ..config.wgmma_forward import WgmmaConfig


LEAST_TILES = 8  # of keys, in each of several parts of them
LEAST_KEYS = 1024  # of few queries: with fewer, there is little to share out
GAIN = 0.85  # parts are taken where they take less than this of the time: a large batch loses 6 % by them


class Choice(NamedTuple):
    """What will run. `config` is None for the rungs that are not compiled for CUDA."""

    kernel: str
    config: Config | None
    copies: bool  # arrays are copied to the GPU and the result back: only for a GPU kernel asked for by name
    refused: tuple[tuple[str, str], ...]  # (kernel, why it does not run), in the order in which they were asked


def select(problem: Problem, target: Target, kernel: str, family: str = "numpy", stream: bool = False) -> Choice:
    """The kernel by name, or for "auto" the fastest kernel that can compute the problem exactly here.

    family: the kind of the given arrays; stream: whether a stream was named, which only a GPU has.
    """
    check_request(kernel, target, family, stream)
    refuses = functools.partial(refusal, problem=problem, target=target)

    def own(name: str) -> list[Config | None]:
        return [_fitting(RUNGS[name], problem, target)]

    in_small_tiles = short(problem, target) or few_queries(problem, target) is not None
    first = kernel == "auto" and (in_small_tiles or mma_is_sooner(problem, target, refuses, own))
    name, refused = choose(kernel, target, refuses, copies=True, first="mma" if first else "")
    config = None if RUNGS[name].on_host else config_of(name, problem, target)
    copies = config is not None and target.arrays_on_host and not target.simulated
    return Choice(name, config, copies, refused)


def refusal(name: str, problem: Problem, target: Target) -> str | None:
    """Why a rung cannot compute the problem on this machine, or None."""
    rung = RUNGS[name]
    reason = not_here(rung, problem, target)
    if rung.on_host or reason is not None:
        return reason
    if rung.tensor_cores:
        reason = not_on_tensor_cores(rung, problem, target)
    if reason is None and _fitting(rung, problem, target) is None:
        return no_room(problem, target, min(config.shared_bytes for config in rung.candidates(problem, target)))
    return reason


def not_on_tensor_cores(rung: Rung, problem: Problem, target: Target) -> str | None:
    """Why a rung on tensor cores does not take the problem on this GPU, apart from shared memory."""
    reason = no_tensor_cores(rung, problem, target)
    if reason is not None:
        return reason
    widest = max(row.when.head_dim for row in rows_of(TABLES, rung.table, problem.dtype, target))
    reason = too_wide(problem, widest) or no_copies(problem, rung.least_copy, "q, k, v or out")
    if reason is None and problem.batch * problem.heads * problem.seqlen_q:
        return no_tma(next(rung.candidates(problem, target)), problem)
    return reason


def config_of(name: str, problem: Problem, target: Target) -> Config | None:
    rung = RUNGS[name]
    return rung.refine(_fitting(rung, problem, target), problem, target)


def _fitting(rung: Rung, problem: Problem, target: Target) -> Config | None:
    return next((c for c in rung.candidates(problem, target) if c.shared_bytes <= target.shared_bytes), None)


# The Configs of each rung, the best first, from the rows of its table that are for the problem.


def simt(rung: Rung, problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.simt_forward import V1Config, V2Config

    kind = V1Config if rung.name == V1Config.kernel else V2Config
    for row in rows_of(TABLES, rung.table, problem.dtype, target):
        tile_m = row.tile["tile_m"]
        if tile_m <= 32 or tile_m < 2 * problem.seqlen_q or problem.packed:  # not mostly past the last query
            yield kind(**features_of(kind, problem, target), **row.tile)


def few_queries(problem: Problem, target: Target) -> Any:
    """The Config for a problem of `attention` in float32 or float64 that has few queries of many keys, or None. So few
    rows wait for memory alone, as they do with a cache. Neither the batch nor the number of heads decides: bits depend
    on it."""
    p = problem
    many_keys = p.batch and p.heads and p.seqlen_q and p.seqlen_k >= LEAST_KEYS and p.packed is None
    if not many_keys or ITEM_SIZE[p.dtype] == 2 or p.function("mask_mod") is not None or target.cc is None:
        return None
    return RUNGS["mma"].of_few_queries(problem, target)


def mma(rung: Rung, problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.mma_forward import MmaConfig

    if few := few_queries(problem, target):
        yield few
    features = features_of(MmaConfig, problem, target)
    shrinks = ITEM_SIZE[problem.dtype] > 2 and problem.packed is None
    in_one_tile = rows_for(TABLES, "mma_short", problem, target) if short(problem, target) else []
    for row in (*in_one_tile, *rows_for(TABLES, rung.table, problem, target)):
        tile = _in_few_rows(problem, row.tile, row.tile["warp_rows"])
        if shrinks or row in in_one_tile:
            blocks = row.tile["blocks_per_sm"] * row.tile["tile_m"] // tile["tile_m"]
            tile |= dict(tile_n=halved(row.tile["tile_n"], problem.seqlen_k), blocks_per_sm=blocks)
        yield MmaConfig(**features, **tile)


def short(problem: Problem, target: Target) -> bool:
    """Whether mma has all queries and keys of a head in one tile. "auto" takes it then: a tile of wgmma has
    64 rows at least, of which most would be wasted, and fewer blocks run at a time. Heads of 16 tokens take 32 us in
    16 bits instead of 214, of 64 tokens 22 instead of 35 (H200)."""
    few = 0 < problem.seqlen_k <= 64 >= problem.seqlen_q and problem.packed is None
    return target.cc is not None and ITEM_SIZE[problem.dtype] == 2 and few and problem.widest <= 128


def mma_is_sooner(
    problem: Problem, target: Target, refuses: Callable[[str], str | None], configs: Callable[[str], list[Any]]
) -> bool:
    """Whether mma is done sooner than wgmma in float32, because its tiles are smaller and its blocks begin sooner.

    refuses: why a rung does not run; configs: its own kernels. The longest of packed sequences decides nothing.
    """
    both = target.cc == RUNGS["wgmma"].only_cc and not target.simulated
    if not both or problem.dtype != "float32" or problem.packed is not None or any(map(refuses, FLOAT32)):
        return False
    time = {name: sum(microseconds(problem, config, name) for config in configs(name)) for name in FLOAT32}
    return time["mma"] < time["wgmma"]


def halved(rows: int, needed: int) -> int:
    """A tile's rows, halved as long as half of them, at least 16, are enough."""
    while rows >= 32 and needed <= rows // 2:
        rows //= 2
    return rows


def wgmma(rung: Rung, problem: Problem, target: Target) -> Iterator[Config]:
    return (_wgmma_float32 if problem.dtype == "float32" else _wgmma)(rung, problem, target)


def _wgmma(rung: Rung, problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.wgmma_forward import WgmmaConfig

    features = features_of(WgmmaConfig, problem, target)
    for row in rows_for(TABLES, rung.table, problem, target):
        tile = row.tile
        features["group_size"] = group = _group(problem, tile["tile_m"])
        tile["tile_n"] = min(tile["tile_n"], _most_keys(problem, WgmmaConfig.MOST_KEYS))
        # A place for O, if no buffer of Q is free for it and there is room; then one for a bias.
        bias = problem.array("bias")
        for bias_stages in (2, 1, 0) if bias is not None and bias.boxes and group == 1 else (0,):
            for o_buffer in (True, False) if tile["q_buffers"] == 1 and features["o_vectorized"] else (False,):
                yield WgmmaConfig(**features, **tile, o_buffer=o_buffer, bias_stages=bias_stages)


def _wgmma_float32(rung: Rung, problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.wgmma_float32 import WgmmaFloat32Config

    features = features_of(WgmmaFloat32Config, problem, target)
    for row in rows_for(TABLES, rung.table, problem, target):
        yield WgmmaFloat32Config(**features, **_in_few_rows(problem, row.tile, 64))


def _in_few_rows(problem: Problem, tile: dict[str, Any], step: int) -> dict[str, Any]:
    """A tile's fields, its rows halved as long as half of them hold all queries, and its group_size."""
    group, tile_m = _group(problem, tile["tile_m"]), tile["tile_m"]
    while tile_m > step and tile_m % (2 * step) == 0 and tile_m // 2 % group == 0:
        if problem.seqlen_q * group > tile_m // 2:
            break
        tile_m //= 2
    return tile | dict(tile_m=tile_m, group_size=group)


def _most_keys(problem: Problem, most: int) -> int:
    """The most keys that a wgmma tile may have, limited by registers for what its scores need; otherwise by the width
    of one product."""
    bias, head_dim = problem.array("bias"), problem.widest
    if problem.function("score_mod") is not None:
        return 128 if head_dim <= 64 else 80 if head_dim <= 128 else 32
    if problem.functions:  # a mask_mod alone is called for few tiles
        return 128 if head_dim <= 128 else 64
    if bias is None and problem.array("mask") is None:
        if problem.seeded and head_dim > 128:
            return 64 if head_dim <= 192 else 32
        return most
    read = "mask" if bias is None else "bias"
    alone = all(BY_NAME[name].acts_on in ("keys", "sum") or name == read for name, _ in problem.uses)
    rows = READING_KEYS[0 if bias is None else ITEM_SIZE[bias.dtype], alone]
    return next(keys for widest, keys in rows if head_dim <= widest)


def with_fastest_rows(config: "WgmmaConfig", problem: Problem, target: Target) -> "WgmmaConfig":
    """With tiles of fewer query rows and keys in parts, if they finish sooner; in float32 the row says how many rows.

    A row's bits must not depend on the number of heads and batch entries. tile_m changes nothing else, except that a
    tile visits keys that some of its rows do not see. Their weight is 0, but if V is not finite there, the row is
    computed again, in another order. So if larger tiles visit more keys, the work for one head decides. Of packed
    sequences only a bound is known: then tiles are smaller only if each sequence has one tile all the same.
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
    """How many blocks share the keys of a query tile: more than one if a single batch entry is done sooner so.

    It changes the order of sums, and so bits. So neither the batch size decides nor the number of multiprocessors. A
    large batch gains nothing by it, and each part takes a while to begin and to be joined: so a part has many keys, and
    a single entry gains much.
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
    # Of packed sequences the longest one decides nothing that could change the bits of another.
    return group if problem.seqlen_q < tile_m and tile_m % group == 0 and problem.packed is None else 1
