"""Selects the kernel and its Config for a Problem and a Target, and says why the other kernels do not run.

Nothing here uses CUDA or Numba, so every choice can be tested for GPUs that this machine does not have.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.forward import ITEM_SIZE, Config
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import BY_NAME, changes_by_distance_alone, changes_scores
from ..problem.strides import Strides
from .arguments import parameters_of, tensor_maps
from .cost_model import same_tile_walk, tile_visits, wave_cost
from .rungs import TENSOR, check_request, choose, no_gpu
from .tensor_maps import fits
from .tiles import READING_KEYS, TILE_COST, columns, rows_for, table_of

if TYPE_CHECKING:
    from ..config.wgmma_forward import WgmmaConfig

# The dtypes of the tensor-core rungs. The Config of a rung is imported only for a problem that needs it: creating the
# class takes a millisecond, of the 20 that a process's first call may take.
DTYPES = dict(mma=("float16", "bfloat16", "float32", "float64"), wgmma=("float16", "bfloat16", "float32"))
FLOAT64_CORES = ((8, 0), (9, 0), (10, 0))  # tensor cores with float64 at full speed
LARGE_FLOAT64 = (9, 0)  # m16n8k16 is one instruction on these GPUs; sm_100 splits it, with local memory


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
    first = "mma" if target.cc is not None and _short_rows(problem, target) else ""
    name, refused = choose(kernel, target, refuses, copies=True, first=first)
    config = None if name in ("reference", "cpu") else config_of(name, problem, target)
    copies = config is not None and target.arrays_on_host and not target.simulated
    return Choice(name, config, copies, refused)


def refusal(name: str, problem: Problem, target: Target) -> str | None:
    """Why kernel `name` cannot compute the problem on this machine, or None."""
    if name in ("reference", "cpu"):
        if name == "cpu" and (reason := no_cpu(problem)) is not None:
            return reason
        return None if target.arrays_on_host else "it computes in host memory; copy the arrays there first"
    if target.cc is None:
        return no_gpu(target)
    if name in TENSOR:
        reason = no_tensor_cores(name, problem, target)
        if reason is not None:
            return reason
    if _fitting(name, problem, target) is None:
        smallest = min(config.shared_bytes for config in _candidates(name, problem, target))
        return (
            f"head_dim {problem.head_dim} and {problem.head_dim_v} in {problem.dtype} need {smallest} bytes of "
            f"shared memory in the smallest tile, and {target.name} has {target.shared_bytes}"
        )
    return None


def no_cpu(problem: Problem) -> str | None:
    """Why the CPU's kernels do not take the problem, wherever its arrays are."""
    return next((f"it takes no {option} yet" for option, _ in problem.uses if not BY_NAME[option].on_cpu), None)


def no_tensor_cores(name: str, problem: Problem, target: Target) -> str | None:
    """Why a tensor-core kernel does not take the problem on this GPU, apart from shared memory."""
    cc, gpu = target.cc, target.name
    assert cc is not None
    if name == "wgmma" and cc != (9, 0):
        return f"its instructions exist on compute capability 9.0 only, and {gpu} has {cc[0]}.{cc[1]}"
    if cc < (8, 0):
        return f"its instructions need compute capability 8.0, and {gpu} has {cc[0]}.{cc[1]}"
    if problem.dtype not in DTYPES[name]:
        return f"it takes {', '.join(DTYPES[name])}, not {problem.dtype}"
    if problem.dtype == "float64" and cc not in FLOAT64_CORES:
        return (
            f"it takes float64 where tensor cores have it at full speed, on compute capability 8.0, 9.0 and 10.0, and "
            f"{gpu} has {cc[0]}.{cc[1]}"
        )
    for option, _ in problem.uses:
        if not BY_NAME[option].on_tensor_cores:
            return f"it takes no {option} yet"
    widest = max(row.head_dim for row in rows_for(table_of(name, problem.dtype), target))
    if max(problem.head_dim, problem.head_dim_v) > widest:
        return f"it takes head_dim up to {widest}, not {problem.head_dim} and {problem.head_dim_v}"
    if not problem.aligned:
        return "q, k, v or out begins at an address that is not a multiple of 16 bytes"
    for operand, strides in _strides_that_matter(problem):
        wide = problem.head_dim_v if operand == "v" else problem.head_dim
        reason = no_wide_rows(operand, strides, wide, problem.dtype)
        if reason is not None:
            return reason
    if name == "wgmma" and problem.batch * problem.heads * problem.seqlen_q:
        config = next(_candidates(name, problem, target))
        for index, tensor_map in tensor_maps(config, problem):
            reason = fits(tensor_map)
            if reason is not None:
                return f"{parameters_of(config).arrays[index]} cannot be fetched by TMA: {reason}"
    return None


def no_wide_rows(operand: str, strides: Strides, columns: int, dtype: str = "float16") -> str | None:
    """Why the rows of an array cannot be copied 16 bytes at a time, or None."""
    if strides[3] not in (0, 1) or (strides[3] == 0 and columns > 1):
        return f"{operand} is not contiguous along dim"
    if any(stride * ITEM_SIZE[dtype] % 16 for stride in strides[:3]):
        return f"{operand} has rows, heads or batch entries that do not begin at multiples of 16 bytes"
    return None


def _strides_that_matter(problem: Problem) -> list[tuple[str, Strides]]:
    """The strides of arrays with elements; a library may give an empty array any strides."""
    p = problem
    named = [("q", p.q_strides)] * (p.seqlen_q > 0) + [("k", p.k_strides), ("v", p.v_strides)] * (p.seqlen_k > 0)
    return named * (p.batch * p.heads > 0)


def config_of(name: str, problem: Problem, target: Target) -> Config | None:
    config: Any = _fitting(name, problem, target)
    return _with_fastest_rows(config, problem, target) if config and config.kernel == "wgmma" else config


def _fitting(name: str, problem: Problem, target: Target) -> Config | None:
    return next((c for c in _candidates(name, problem, target) if c.shared_bytes <= target.shared_bytes), None)


def _candidates(name: str, problem: Problem, target: Target) -> Iterator[Config]:
    """Configs to choose from, the best first; the last needs the least shared memory. The first almost always fits."""
    if name == "mma":
        return _mma_candidates(problem, target)
    if name == "wgmma" and problem.dtype == "float32":
        return _wgmma_float32_candidates(problem, target)
    if name == "wgmma":
        return _wgmma_candidates(problem, target)
    return _simt_candidates(name, problem, target)


def _simt_candidates(name: str, problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.simt_forward import SimtConfig

    for row in rows_for(name, target):
        if row.tile_m <= 32 or row.tile_m < 2 * problem.seqlen_q:  # not mostly past the last query
            yield SimtConfig(**_features(name, problem), **columns(row))


def _mma_candidates(problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.mma_forward import MmaConfig

    for row in _short_rows(problem, target):
        group, keys = _group(problem, row.tile_m), halved(row.tile_n, problem.seqlen_k)
        queries = _rows(problem, group, row.tile_m, row.warp_rows)
        more = dict(tile_m=queries, tile_n=keys, blocks_per_sm=row.blocks_per_sm * row.tile_m // queries)
        yield MmaConfig(**_features("mma", problem) | _tensor_features(problem, group) | columns(row) | more)
    large_f64 = problem.dtype == "float64" and target.cc == LARGE_FLOAT64
    for row in _wide_enough(table_of("mma", problem.dtype), problem, target):
        group = _group(problem, row.tile_m)
        features = _features("mma", problem) | _tensor_features(problem, group) | columns(row)
        features |= dict(tile_m=_rows(problem, group, row.tile_m, row.warp_rows), large_f64=large_f64)
        yield MmaConfig(**features)


def _short_rows(problem: Problem, target: Target) -> list[Any]:
    """The rows of mma that have all queries and keys of a head in one tile, for heads of so few tokens. On every GPU
    mma computes them first: a tile of wgmma has 64 rows at least, of which most would be wasted."""
    if ITEM_SIZE[problem.dtype] != 2 or not problem.seqlen_k:
        return []
    rows = _wide_enough("mma_short", problem, target)
    return [row for row in rows if problem.seqlen_q <= row.tile_m and problem.seqlen_k <= row.tile_n]


def halved(rows: int, needed: int) -> int:
    """A tile's rows, halved as long as half of them, at least 16, are enough."""
    while rows >= 32 and needed <= rows // 2:
        rows //= 2
    return rows


def _wgmma_candidates(problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.wgmma_forward import WgmmaConfig

    for row in _wide_enough("wgmma", problem, target):
        group = _group(problem, row.tile_m)
        features = _features("wgmma", problem) | _tensor_features(problem, group) | columns(row)
        features["tile_n"] = min(row.tile_n, _most_keys(problem, WgmmaConfig.MOST_KEYS))
        # A place for O, if no buffer of Q is free for it and there is room; then one for a bias.
        bias = problem.array("bias")
        for bias_stages in (2, 1, 0) if bias is not None and bias.boxes and group == 1 else (0,):
            for o_buffer in (True, False) if row.q_buffers == 1 and features["o_vectorized"] else (False,):
                yield WgmmaConfig(**features, o_buffer=o_buffer, bias_stages=bias_stages)


def _wgmma_float32_candidates(problem: Problem, target: Target) -> Iterator[Config]:
    from ..config.wgmma_float32 import WgmmaFloat32Config

    for row in _wide_enough("wgmma_float32", problem, target):
        group = _group(problem, row.tile_m)
        features = _features("wgmma_float32", problem) | _tensor_features(problem, group) | columns(row)
        yield WgmmaFloat32Config(**features | dict(tile_m=_rows(problem, group, row.tile_m, 64)))


def _wide_enough(table: str, problem: Problem, target: Target) -> list[Any]:
    head_dim = max(problem.head_dim, problem.head_dim_v)
    reads = _reads_scores(problem)
    sloped = changes_by_distance_alone(problem.uses) and problem.scale > 0
    plain = not (reads or changes_scores(problem.uses) or problem.scale <= 0)
    rows = [row for row in rows_for(table, target) if head_dim <= row.head_dim]

    def takes(row: Any) -> bool:
        if getattr(row, "reads", reads) != reads or (reads and getattr(row, "unread", False)):
            return False
        if getattr(row, "masked", False) and not _reads_mask_alone(problem):
            return False
        if getattr(row, "sloped", False) and not sloped:
            return False
        if min(problem.head_dim, problem.head_dim_v) <= getattr(row, "above", 0):
            return False
        return plain or not getattr(row, "plain", False)

    return [row for row in rows if takes(row)]


def _reads_scores(problem: Problem) -> bool:
    """Whether each score needs a load, or a call with its position."""
    read = any(problem.array(option) is not None for option in ("bias", "mask"))
    return read or problem.seeded or bool(problem.functions)


def _reads_mask_alone(problem: Problem) -> bool:
    others = problem.array("bias") is not None or problem.seeded or bool(problem.functions)
    return problem.array("mask") is not None and not others


def _most_keys(problem: Problem, most: int) -> int:
    """The most keys that a wgmma tile may have, limited by registers for what its scores need; otherwise by the width
    of one product."""
    bias, head_dim = problem.array("bias"), max(problem.head_dim, problem.head_dim_v)
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


def _with_fastest_rows(config: "WgmmaConfig", problem: Problem, target: Target) -> "WgmmaConfig":
    """With tiles of fewer query rows, if they finish sooner.

    A row's bits must not depend on the number of heads and batch entries. tile_m changes nothing else, except that a
    tile visits keys that some of its rows do not see. Their weight is 0, but if V is not finite there, the row is
    computed again, in another order. So if larger tiles visit more keys, the work for one head decides.
    """
    group, tile_n = config.group_size, config.tile_n

    def fastest(most: int, time: Callable[[int], float]) -> int:
        fitting = [rows for rows in TILE_COST if rows <= most and rows % group == 0]
        return min(fitting, key=lambda rows: TILE_COST[rows] * time(rows // group))

    rows = config.tile_m
    if not _same_keys(problem):
        rows = fastest(rows, lambda queries: tile_visits(problem, queries, tile_n))
    if same_tile_walk(problem, rows // group, tile_n):
        multiprocessors = max(target.multiprocessors, 1)
        rows = fastest(rows, lambda queries: wave_cost(problem, group, queries, tile_n, multiprocessors))
    return dataclasses.replace(config, tile_m=rows)


def _same_keys(problem: Problem) -> bool:
    """Whether all queries of a batch entry are known to see the same keys."""
    masked = problem.array("mask") is not None or problem.function("mask_mod") is not None
    return problem.left is None and problem.right is None and not masked


def _group(problem: Problem, tile_m: int) -> int:
    """How many query heads share a tile: all of a KV head's if the queries of one head would not fill it."""
    group = max(problem.heads // problem.heads_kv, 1) if problem.heads_kv else 1
    return group if problem.seqlen_q < tile_m and tile_m % group == 0 else 1


def _rows(problem: Problem, group_size: int, tile_m: int, step: int) -> int:
    """tile_m, halved as long as half of it holds all queries."""
    while (
        tile_m > step
        and tile_m // 2 % step == 0
        and tile_m // 2 % group_size == 0
        and problem.seqlen_q * group_size <= tile_m // 2
    ):
        tile_m //= 2
    return tile_m


def _features(name: str, problem: Problem) -> dict[str, Any]:
    """The options that the problem uses, in the fields that every Config has."""
    return dict(
        kernel=name,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        write_lse=problem.return_lse,
        uses=problem.uses,
        q_offset_source=problem.q_offset_source,
        narrow=problem.narrow,
    )


def _tensor_features(problem: Problem, group_size: int) -> dict[str, Any]:
    bias, size = problem.array("bias"), ITEM_SIZE[problem.dtype]
    rows_of_16_bytes = problem.o_strides[3] == 1 and not any(stride * size % 16 for stride in problem.o_strides[:3])
    return dict(
        group_size=group_size,
        scores_finished=changes_scores(problem.uses) or problem.scale <= 0,
        bias_pairs=bias is not None and bias.pairs,
        o_vectorized=problem.head_dim_v * size % 16 == 0 and rows_of_16_bytes,
    )
