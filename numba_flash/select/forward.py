"""Selects the kernel and its Config for a Problem and a Target, and says why the other kernels do not run.

Nothing here uses CUDA or Numba, so every choice can be tested for GPUs that this machine does not have.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..abi.parameters import AS_BITS
from ..abi.tensor_maps import fits
from ..arrays.dtypes import ITEM_SIZE
from ..config.forward import Config, LaunchFacts, tiles_by_bound, tiles_of_all
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME, Uses, changes_by_distance_alone, changes_scores, of_scores
from ..problem.strides import Strides
from .cost_model import FLOAT32, join_cost, microseconds, same_tile_walk, tile_visits, wave_cost
from .rungs import LARGE_FLOAT64, RUNGS, Rung, check_request, choose, no_room, no_tensor_cores, not_here
from .tiles import READING_KEYS, TABLES, TILE_COST, Facts, Row, facts_of, rows_of

if TYPE_CHECKING:
    from ..config.wgmma_forward import WgmmaConfig
    from ..problem.backward import BackwardProblem


LEAST_TILES = 8  # of keys, in each of several parts of them
LEAST_WIDE = 32  # keys of a tile of wgmma
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
    reason = no_tensor_cores(rung, problem, target) or rung.not_taken(problem)
    if reason is not None:
        return reason
    widest = max(row.when.head_dim for row in rows_of(TABLES, rung.table, problem.dtype, target))
    reason = too_wide(problem, widest) or no_copies(problem, rung.least_copy, "q, k, v or out")
    if reason is None and problem.batch * problem.heads * problem.seqlen_q:
        return no_tma(next(rung.candidates(problem, target)), problem)
    return reason


def too_wide(problem: Problem, widest: int) -> str | None:
    """Why a head_dim is too large, or None."""
    if problem.widest <= widest:
        return None
    return f"it takes head_dim up to {widest}, not {problem.head_dim} and {problem.head_dim_v}"


def no_copies(problem: Problem, least: int, arrays: str) -> str | None:
    """Why rows of q, k and v cannot be copied an element, or `least` bytes, at a time, or None. arrays: those whose
    addresses count."""
    least = max(least, ITEM_SIZE[problem.dtype])
    if problem.alignment < least:
        return f"{arrays} begins at an address that is not a multiple of {least} bytes"
    columns = dict(q=problem.head_dim, k=problem.head_dim, v=problem.head_dim_v)
    given = strides_that_matter(problem)
    found = (no_wide_rows(name, strides, columns[name], problem.dtype, least) for name, strides in given)
    return next((reason for reason in found if reason is not None), None)


def no_tma(config: Config, problem: "Problem | BackwardProblem") -> str | None:
    """Why TMA cannot load an operand, or None. Only the strides decide, and they are the same for every tile."""
    for operand, tensor_map in config.operand_maps(problem):
        if (reason := fits(tensor_map)) is not None:
            return f"{config.parameters.arrays[operand]} cannot be fetched by TMA: {reason}"
    return None


def no_wide_rows(operand: str, strides: Strides, columns: int, dtype: str, least: int = 16) -> str | None:
    """Why the rows of an array cannot be copied `least` bytes at a time, or None."""
    if strides[3] not in (0, 1) or (strides[3] == 0 and columns > 1):
        return f"{operand} is not contiguous along dim"
    if any(stride * ITEM_SIZE[dtype] % least for stride in strides[:3]):
        return f"{operand} has rows, heads or batch entries that do not begin at multiples of {least} bytes"
    return None


def strides_that_matter(problem: Problem) -> list[tuple[str, Strides]]:
    """The strides of arrays with elements; a library may give an empty array any strides."""
    p = problem
    named = [("q", p.q_strides)] * (p.seqlen_q > 0) + [("k", p.k_strides), ("v", p.v_strides)] * (p.seqlen_k > 0)
    return named * (p.batch * p.heads > 0)


def config_of(name: str, problem: Problem, target: Target) -> Config | None:
    rung = RUNGS[name]
    return rung.refine(_fitting(rung, problem, target), problem, target)


def prologue(config: Config, problem: Problem, target: Target, overlaps: bool = False) -> list[LaunchFacts]:
    """The kernels that make what the kernel of `config` reads: a mask's bits, the states of tiles under a mask_mod,
    their order, and its bits. Most calls have none, and load nothing for them. overlaps: they may run beside kernels in
    front of them, as far as they can."""
    threads, made = 32 if target.simulated else 512, list[LaunchFacts]()
    if config.packed and "o" in config.takes.arrays:
        from ..config.outside import OutsideConfig

        written = ("o", "lse") if config.write_lse else ("o",)
        made.append(OutsideConfig.of(config, written, target, early=config.waits, in_order=config.in_order))
    if config.reads_bits and config.has("mask"):
        from ..config.mask_bits import MaskBitsConfig

        made.append(MaskBitsConfig(config.of_keys, threads, overlaps))
    if config.tile_states:
        from ..config.tile_states import MaskModBitsConfig, TileOrderConfig, TileStatesConfig

        states = TileStatesConfig.before(config, problem, threads)
        made += [states, TileOrderConfig.behind(states)] if config.reads_order else [states]
        if config.mask_mod_as_bits:
            made.append(MaskModBitsConfig.before(config, problem, threads))
    return made


def epilogue(config: Config) -> list[LaunchFacts]:
    """The kernel that joins parts, if the one of `config` leaves parts."""
    return [config.joined] if getattr(config, "parts", 1) > 1 else []  # type: ignore[attr-defined]


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
    in_one_tile = _rows("mma_short", problem, target) if short(problem, target) else []
    for row in (*in_one_tile, *_rows(rung.table, problem, target)):
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
    for row in _rows(rung.table, problem, target):
        tile = row.tile
        tile["tile_n"] = min(tile["tile_n"], _most_keys(problem, WgmmaConfig.MOST_KEYS))
        keys = max(-(-problem.seqlen_k // 16) * 16, LEAST_WIDE)
        # What is read takes another path, and the longest packed sequence decides nothing.
        if keys < tile["tile_n"] and "unread" in _facts_of(problem).words and problem.packed is None:
            tile |= dict(tile_n=keys, tile_m=min(tile["tile_m"], 128))  # 192 rows spill
        features["group_size"] = group = _group(problem, tile["tile_m"])
        # A place for O, if no buffer of Q is free for it and there is room; then one for a bias.
        bias = problem.array("bias")
        for bias_stages in (2, 1, 0) if bias is not None and bias.boxes and group == 1 else (0,):
            for o_buffer in (True, False) if tile["q_buffers"] == 1 and features["o_vectorized"] else (False,):
                yield WgmmaConfig(**features, **tile, o_buffer=o_buffer, bias_stages=bias_stages)


def _wgmma_float32(rung: Rung, problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.wgmma_float32 import WgmmaFloat32Config

    features = features_of(WgmmaFloat32Config, problem, target)
    for row in _rows(rung.table, problem, target):
        yield WgmmaFloat32Config(**features, **_in_few_rows(problem, row.tile, 64))


def _in_few_rows(problem: Problem, tile: dict[str, Any], step: int) -> dict[str, Any]:
    """A tile's fields, its rows halved as long as half of them hold all queries, and its group_size."""
    group, tile_m = _group(problem, tile["tile_m"]), tile["tile_m"]
    while tile_m > step and tile_m % (2 * step) == 0 and tile_m // 2 % group == 0:
        if problem.seqlen_q * group > tile_m // 2:
            break
        tile_m //= 2
    return tile | dict(tile_m=tile_m, group_size=group)


def _rows(table: str, problem: Problem, target: Target) -> list[Row]:
    """Those that are for the problem."""
    facts = _facts_of(problem)
    return [row for row in rows_of(TABLES, table, problem.dtype, target) if row.when.holds(facts)]


def _facts_of(problem: Problem) -> Facts:
    bias, mask = problem.array("bias") is not None, problem.array("mask") is not None
    called = problem.seeded or bool(problem.functions)
    unread, rising = not (bias or mask or called), problem.scale > 0
    return facts_of(
        problem,
        unread=unread,
        plain=unread and not changes_scores(problem.uses) and rising,
        masked=mask and not bias and not called,
        # With lengths of keys the row for ALiBi alone spills.
        sloped=changes_by_distance_alone(problem.uses) and rising and problem.packed is None,
    )


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


def features_of(kind: Any, problem: "Problem | BackwardProblem", target: Target) -> dict[str, Any]:
    """What the problem says of a Config of this kind, whatever the tile: those of these fields that it has."""
    p, of_gradients = problem.forward, problem.wanted is not None
    bias, size, uses = p.array("bias"), ITEM_SIZE[p.dtype], _uses_of(kind, p)
    read = [strides for _, strides in strides_that_matter(p)] + ([problem.do_strides] if of_gradients else [])  # type: ignore[union-attr]
    given = dict(
        dtype=p.dtype,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        write_lse=p.return_lse,
        uses=of_scores(uses) if of_gradients else uses,
        q_offset_source=p.q_offset_source,
        narrow=p.narrow and any(BY_NAME[name].function and used != AS_BITS for name, used in uses),
        scores_finished=changes_scores(p.uses) or p.scale <= 0,
        bias_pairs=bias is not None and bias.pairs,
        bias_boxes=bias is not None and bias.boxes,
        o_vectorized=p.o_strides[3] == 1 and _copied(p, p.o_strides) == 16 and p.head_dim_v * size % 16 == 0,
        copy_bytes=_copied(p, *read),
        in_order=loosely_bound(p),
        large_f64=p.dtype == "float64" and target.cc == LARGE_FLOAT64,
    )
    return {name: value for name, value in given.items() if name in _fields(kind)}


def _uses_of(kind: Any, p: Problem) -> Uses:
    """What a kernel of this kind is compiled for: the same for every mask_mod that it reads as bits."""
    if not kind.reads_mask_mod or p.function("mask_mod") is None:
        return p.uses
    from ..abi.mask_bits import is_read_as_bits  # a plain call does without

    if not is_read_as_bits(p):
        return p.uses
    used = dict(p.uses) | dict(mask_mod=AS_BITS)
    return tuple((name, given) for name, given in used.items() if name != "aux")


LOOSE = 8


def loosely_bound(problem: Problem) -> bool:
    """Whether tiles of packed sequences have far fewer numbers than bounds of the lengths allow tiles. To look for a
    number's tile takes longer than to find none: 5 times as many blocks cost nothing (H200)."""
    sides = ((tiles_of_all(problem, 64, side), tiles_by_bound(problem, 64, side)) for side in (False, True))
    return problem.packed is not None and any(LOOSE * numbers < by_bound for numbers, by_bound in sides)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _copied(problem: Problem, *arrays: Strides) -> int:
    """How many bytes of a row a copy can have, at most 16: rows of arrays with these strides begin at multiples of
    them."""
    steps = [stride * ITEM_SIZE[problem.dtype] for strides in arrays for stride in strides[:3]]
    joined = functools.reduce(operator.or_, steps, problem.alignment)
    return min(joined & -joined, 16)
