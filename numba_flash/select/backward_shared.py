"""The backward kernels of all rungs use these functions: they find the fields of a Config that follow from the problem,
the rows of a table that fit, and the kernels that run before and after those of the rungs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..arrays.dtypes import ITEM_SIZE
from ..config.backward import PreprocessConfig
from ..config.forward import LaunchFacts
from ..config.simt_backward import HeadSumsConfig
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import HEAD_GRADIENTS
from .backward_tiles import TABLES
from .features import copied, features_of, rows_for
from .forward_kernels import halved
from .tiles import Row

SMALL_BLOCKS = 192  # keys of all blocks of a multiprocessor, if tiles have fewer than 64


def _parts(problem: BackwardProblem, apart: bool) -> list[dict[str, Any]]:
    """Which of dK and dV each kernel computes whose blocks own keys."""
    wanted = [name for name in ("dk", "dv") if name in problem.wanted]
    parts = [[name] for name in wanted] if apart else [wanted] if wanted else []
    return [dict(of_dk="dk" in part, of_dv="dv" in part) for part in parts]


def best(
    kind: type[Any], problem: BackwardProblem, target: Target, rows: Sequence[Row] = (), table: str = "", **more: Any
) -> list[Any]:
    """The kernels of the first row with blocks_per_sm blocks that fit into a multiprocessor, or of the last row: one,
    or one for each of dK and dV. rows, table: instead of those of the kernel. more: further fields."""
    sets, features = [], features_of(kind, problem, target) | more
    for row in rows or rows_for(TABLES, table or kind.kernel, problem, target):
        parts = _parts(problem, row.apart) if hasattr(kind, "of_dk") else [{}]
        sets.append([kind(**features | row.tile | part) for part in parts])
    return next((made for made in sets if all(fits(config, target) for config in made)), sets[-1])


def one_key_tile(problem: BackwardProblem, target: Target, only: bool = False) -> list[Row]:
    """The rows of mma_one_key_tile, shrunk to the lengths, if all keys of a head fit into a tile: one kernel then reads
    a head once. It walks over two tiles of queries at most, because only heads run side by side. only: the rows of
    mma_only_tile, if the queries fit into one tile, too, and no other head reads these keys."""
    forward, table, tiles = problem.forward, "mma_only_tile" if only else "mma_one_key_tile", 1 if only else 2
    all_three = {"dq", "dk", "dv"} <= set(problem.wanted) and target.cc is not None and not (only and forward.group > 1)
    if not all_three or ITEM_SIZE[forward.dtype] != 2 or not forward.seqlen_k or forward.packed is not None:
        return []
    made = []
    for row in rows_for(TABLES, table, problem, target):
        tile_m, tile_n, blocks = (row.tile[name] for name in ("tile_m", "tile_n", "blocks_per_sm"))
        if forward.seqlen_k <= tile_n and forward.seqlen_q <= tiles * tile_n:
            keys = halved(tile_n, forward.seqlen_k)
            if keys < tile_n:  # a warp then has fewer scores
                blocks = max(blocks * tile_n // keys, SMALL_BLOCKS // keys if row.when.head_dim <= 64 else 0)
            sizes = dict(tile_m=halved(tile_m, forward.seqlen_q), tile_n=keys, blocks_per_sm=blocks)
            made.append(row.changed(**sizes))
    return made


def of_bias(problem: BackwardProblem) -> dict[str, Any]:
    """The fields of OfBias: they say which scores an element of dbias sums up."""
    *_, rows, keys = problem.dbias_shape
    return dict(rows_summed=rows == 1, keys_summed=keys == 1, split=problem.dbias_splits > 1)


def fits(config: LaunchFacts, target: Target) -> bool:
    return config.shared_bytes * max(config.blocks_per_sm, 1) <= target.shared_bytes


def first(kind: type[Any], problem: BackwardProblem, target: Target, **more: Any) -> Any:
    """The Config of the kernel of delta, with which a backward begins: PreprocessConfig in 16 bits on tensor cores, or
    DeltaConfig. Lanes share one row at a time if there are fewer blocks than multiprocessors. The order of a row's sum
    stays the same."""
    forward, rows = problem.forward, (problem.do_strides, problem.forward.o_strides)
    size, columns = ITEM_SIZE[forward.dtype], forward.head_dim_v
    joined = copied(forward, *rows, (columns, 0, 0, 0))  # rows also end at multiples of it
    apart = any(strides[3] != 1 and columns > 1 for strides in rows)
    of_terms = any(option.acts_on == "sum" for name, option in HEAD_GRADIENTS.items() if name in problem.wanted)
    facts = dict(of_terms=of_terms, packed=forward.packed is not None, load_bytes=size if apart else max(joined, size))
    facts |= dict(threads=32 if target.simulated else 256)
    if kind is PreprocessConfig:
        facts["natural"] = forward.array("bias") is not None
    config = kind(forward.dtype, forward.head_dim_v, problem.has_dlse, **facts, **more)
    few = not target.simulated and config.grid(problem) < target.multiprocessors
    return dataclasses.replace(config, most_rows=1) if few else config


def head_sums(problem: BackwardProblem, target: Target, of_blocks: bool) -> list[HeadSumsConfig]:
    """The kernels of the wanted gradients of options with one number for each head. of_blocks: as in HeadSumsConfig."""
    made, threads, dtype = [], 16 if target.simulated else 1024, problem.forward.dtype
    for name, option in HEAD_GRADIENTS.items():
        given = problem.forward.array(option.name)
        if name in problem.wanted and given is not None:
            of_all, of_delta = len(problem.shape_of(name)) == 1, option.acts_on == "sum"
            facts = dtype, name, given.dtype, of_all, of_blocks and of_delta, threads
            made.append(HeadSumsConfig(*facts, packed=problem.forward.packed is not None))
    return made
