"""Problem x Target -> which kernel runs, with which Config; and why the others do not.

Nothing here touches CUDA or Numba, so every choice can be tested for machines that are not there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..config.forward import ITEM_SIZE, Config, MmaConfig, SeedConfig, WgmmaConfig
from ..machine.target import Target
from ..problem.forward import Problem, Strides
from ..problem.options import BY_NAME, changes_scores
from .arguments import tensor_maps
from .cost_model import makespan, parts_walk_alike, work
from .tensor_maps import fits

KERNELS = ("reference", "v1", "v2", "mma", "wgmma", "cpu")
TENSOR = ("mma", "wgmma")  # those on tensor cores

# (tile_m, tile_n): the first that fits into the device's shared memory and is not mostly past the last query.
# H200, v2, seqlen 4096, 16 heads, 2026-11-21, in TFLOP/s: float32, head_dim 64: 256 x 16 11.4, 256 x 32 11.3,
# 128 x 16 11.0, 128 x 32 10.5, 64 x 16 9.6, 256 x 8 9.5, 64 x 32 9.3, 192 x 16 7.7, 160 x 16 5.7 (CuPy's formula 9.1);
# float16, head_dim 64: 11.9, 128 x 16 11.5, 64 x 16 10.1; float32, head_dim 128: 13.6, 128 x 16 12.9, 64 x 16 10.9.
SEED_TILES = ((256, 16), (128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))
# (largest head_dim, tile_m, tile_n, warp_rows, q_registers, blocks_per_sm, lag): the first row whose head_dim is large
# enough and whose shared memory fits. Measured as below, at 1k, 4k and 4k causal. head_dim 64: 128 x 64 273, 328, 293;
# 128 x 128 278, 320, 282. head_dim 128: 128 x 64 317, 363, 306; 128 x 32 298, 340, 294. head_dim 256: 64 x 64 270, 300,
# 267; 128 x 64 274, 312, 265. FlashAttention-2 in that run: 284, 303, 282; 321, 354, 302; 292, 320, 282. lag 8 instead
# of 0, 2026-11-22, to FlashAttention-2: head_dim 64 1.00, 1.08, 1.06 beside 1.07, 1.14, 1.10; 128 1.09, 1.11, 1.12
# beside 1.04, 1.06, 1.05; 256 0.97, 0.99, 1.00 beside 1.01, 1.03, 1.04.
MMA_TILES = (
    (64, 128, 64, 32, True, 2, 0),
    (128, 128, 64, 32, False, 2, 8),
    (128, 64, 64, 16, False, 2, 0),
    (256, 64, 64, 16, False, 2, 0),
    (256, 64, 32, 16, False, 1, 0),
    (512, 64, 32, 16, False, 1, 0),
    (512, 32, 32, 16, False, 1, 0),
)
# The same for float32 and float64, but for column_groups in place of q_registers. Not measured yet.
MMA_FLOAT32_TILES = (
    (64, 128, 32, 32, 1, 1, 8),
    (64, 64, 32, 16, 1, 2, 8),
    (128, 64, 32, 16, 1, 2, 8),
    (128, 32, 32, 16, 1, 2, 8),
    (256, 128, 32, 16, 1, 1, 8),
    (256, 32, 16, 16, 1, 1, 8),
    (512, 32, 16, 16, 1, 1, 8),
    (512, 16, 16, 16, 1, 1, 8),
)
MMA_FLOAT64_TILES = (
    (64, 64, 16, 16, 1, 3, 8),
    (128, 128, 16, 16, 1, 1, 8),
    (128, 64, 16, 16, 1, 1, 8),
    (256, 64, 16, 16, 2, 1, 8),
    (256, 32, 16, 16, 1, 1, 8),
    (512, 16, 16, 16, 1, 1, 8),
)
FLOAT64_CORES = ((8, 0), (9, 0), (10, 0))  # where float64 tensor cores are as fast as a computing centre wants them
LARGE_FLOAT64_SINCE = (9, 0)  # m16n8k16
# (largest head_dim, largest tile_m, tile_n, ping_pong, q_buffers, lag). H200, float16, 2048 / head_dim heads, 16k
# tokens, 2026-11-21, TFLOP/s at seqlen 512, 4k and 4k causal. head_dim 64: 192 x 128 369, 541, 459; 128 x 128 356,
# 472, 433. head_dim 128: 128 x 128 471, 671, 625. head_dim 256: 128 x 64 510, 750, 707; two buffers of Q do not fit
# there. 128 x 80 instead, in turns, 2026-11-22: 512 to 16k, full and causal, 0.990, least 0.967 (2k causal), most
# 1.008 (8k).
# head_dim 192, v 192, 1k to 16k: 128 x 96 1.012 of 128 x 64, with two buffers of Q and 80 1.010; v 128: 128 x 128
# 1.081, 128 x 112 1.044, with two buffers and 96 1.044; head_dim 160: 128 x 96 1.044, 128 x 112 1.045.
# Before Q had two buffers and a thread of its own fetched it: head_dim 64 without ping-pong 316, 484, 413 beside 351,
# 529, 457; head_dim 128: 128 x 176 395, 620, 590 and 128 x 112, three stages, 408, 615 beside 459, 650, 598, without
# ping-pong 401, 614, 559; head_dim 256: 128 x 64 483, 691 beside 467, 706, without ping-pong 429, 691. 1 to 16 MB of K
# and V at a time: within 2 %. lag 8 instead of 0, to cuDNN at 512, 4k and 4k causal, 2026-11-22: head_dim 64 1.07,
# 1.18, 1.16 beside 1.05, 1.13, 1.12; 128 1.05, 1.07, 1.20 beside 1.01, 1.02, 1.15; 256 1.06, 1.06, 1.20 beside 1.01,
# 1.01, 1.15.
WGMMA_TILES = (
    (64, 192, 128, True, 2, 8),
    (128, 128, 128, True, 2, 8),
    (192, 128, 128, True, 1, 8),
    (192, 128, 96, True, 1, 8),
    (256, 128, 64, True, 1, 8),
)
# {tile_m: what a block takes for a tile of keys with so many query rows}; of those up to a table row's tile_m the one
# is taken by which all is done soonest (cost_model.py). H200, float16, head_dim 64, 128 and 256, 51 shapes of 1 to 64
# batch entries, 8 to 32 heads and 128 to 8k tokens, full and causal, 2026-11-22: by these numbers and makespan() it was
# the fastest but for 0.05 % on the average, at most 3 %; with work() where bits would depend on it, 1.9 %, up to 42 %;
# the table's tile_m always, 8 %, up to 42 % (scripts/results/wgmma_rows_h200.json, before work() had a say).
WGMMA_PACES = {64: 0.75, 128: 1.0, 192: 1.3}
# A simulated thread is a Python thread: small blocks, whose barriers are cheap, and few wasted rows.
SIMULATOR_TILES = ((16, 16), (16, 8), (8, 8), (8, 4), (4, 4), (1, 4))


@dataclass(frozen=True)
class Choice:
    """What will run. `config` is None for the rungs that are not compiled for CUDA."""

    kernel: str
    config: Config | None
    copies: bool  # the arrays are copied to the GPU and the result back: only for a GPU kernel asked for by name
    refused: tuple[tuple[str, str], ...]  # (kernel, why it does not run), in the order they were asked


def select(problem: Problem, target: Target, kernel: str, family: str = "numpy", stream: bool = False) -> Choice:
    """The kernel by name, or for "auto" the fastest one that can compute the problem exactly here.

    family: the kind of arrays that came; stream: whether a stream was named, which only a GPU has.
    """
    check_request(kernel, target, family, stream)
    wanted = _by_preference(target) if kernel == "auto" else (kernel,)
    refuses = functools.partial(refusal, problem=problem, target=target)
    not_asked = functools.partial(_not_asked, kernel=kernel, target=target)
    name, refused = first_that_can(kernel, wanted, KERNELS, refuses, not_asked)
    config = None if name in ("reference", "cpu") else _config(name, problem, target)
    copies = config is not None and target.arrays_on_host and not target.simulated
    return Choice(name, config, copies, refused)


def check_request(kernel: str, target: Target, family: str, stream: bool) -> None:
    """What is wrong with a call whatever its problem is."""
    check_name(kernel)
    if stream and target.arrays_on_host:
        raise ValueError("stream was given, but the arrays are in host memory, where there are no streams")
    if target.simulated and family != "numpy" and kernel not in ("cpu", "reference"):
        raise NotImplementedError(
            f"the simulator (NUMBA_ENABLE_CUDASIM) takes NumPy arrays only, and {family} arrays were given; "
            "unset NUMBA_ENABLE_CUDASIM, or pass NumPy arrays"
        )


def check_name(kernel: str) -> None:
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(('auto', *KERNELS))}, not {kernel!r}")


Refused = tuple[tuple[str, str], ...]


def first_that_can(
    kernel: str,
    wanted: tuple[str, ...],
    names: tuple[str, ...],
    refusal: Callable[[str], str | None],
    not_asked: Callable[[str], str],
) -> tuple[str, Refused]:
    """The first of `wanted` without a reason to refuse, and why each other of `names` does not run."""
    refused = [(name, not_asked(name)) for name in names if name not in wanted]
    for index, name in enumerate(wanted):
        reason = refusal(name)
        if reason is None:
            return name, (*refused, *((later, f"{name} comes first") for later in wanted[index + 1 :]))
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused if name in wanted)
    others = [name for name in names if name not in wanted and refusal(name) is None]
    possible = f" What would run: kernel={' or '.join(map(repr, others))}." if others else ""
    raise NotImplementedError(f"kernel={kernel!r} cannot run this problem here. {reasons}.{possible}")


def _by_preference(target: Target) -> tuple[str, ...]:
    if target.simulated:
        return ("v2",)
    return ("cpu",) if target.arrays_on_host else ("wgmma", "mma", "v2", "v1")


def _not_asked(name: str, kernel: str, target: Target) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    if name == "reference":
        return "the oracle holds the whole score matrix; it runs when named"
    if name == "cpu":
        return "in the simulator v2 is what is looked at" if target.simulated else "the arrays are on a GPU"
    if target.simulated:
        return (
            "v2 comes first; in the simulator the tensor-core kernels run when named"
            if name in TENSOR
            else "v2 comes first"
        )
    if target.cc is None:
        return no_gpu(target)
    return "the arrays are in host memory; it runs when named, with copies to the GPU and back"


def no_gpu(target: Target) -> str:
    return (
        f"no GPU is usable ({target.why_no_gpu}); to step through it without one, set NUMBA_ENABLE_CUDASIM=1 before "
        "Python starts"
    )


def refusal(name: str, problem: Problem, target: Target) -> str | None:
    """Why kernel `name` cannot compute the problem on this machine, or None."""
    if name in ("reference", "cpu"):
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


def no_tensor_cores(name: str, problem: Problem, target: Target) -> str | None:
    """Why a tensor-core kernel does not take the problem on this GPU, apart from shared memory."""
    cc, gpu = target.cc, target.name
    assert cc is not None
    if name == "wgmma" and cc != (9, 0):
        return f"its instructions exist on compute capability 9.0 only, and {gpu} has {cc[0]}.{cc[1]}"
    if cc < (8, 0):
        return f"its instructions need compute capability 8.0, and {gpu} has {cc[0]}.{cc[1]}"
    taken = (WgmmaConfig if name == "wgmma" else MmaConfig).DTYPES
    if problem.dtype not in taken:
        return f"it takes {', '.join(taken)}, not {problem.dtype}"
    if problem.dtype == "float64" and cc not in FLOAT64_CORES:
        return (
            f"it takes float64 where tensor cores have it at full speed, on compute capability 8.0, 9.0 and 10.0, and "
            f"{gpu} has {cc[0]}.{cc[1]}"
        )
    for option, _ in problem.uses:
        if not BY_NAME[option].on_tensor_cores:
            return f"it takes no {option} yet"
    widest = (WGMMA_TILES if name == "wgmma" else mma_tiles(problem.dtype))[-1][0]
    if max(problem.head_dim, problem.head_dim_v) > widest:
        return f"it takes head_dim up to {widest}, not {problem.head_dim} and {problem.head_dim_v}"
    if not problem.aligned:
        return "q, k, v or out begins at an address that is not a multiple of 16 bytes"
    for operand, strides in _strides_that_matter(problem):
        columns = problem.head_dim_v if operand == "v" else problem.head_dim
        reason = no_wide_rows(operand, strides, columns, problem.dtype)
        if reason is not None:
            return reason
    if name == "wgmma" and problem.batch * problem.heads * problem.seqlen_q:
        for index, tensor_map in tensor_maps(next(_wgmma_candidates(problem)), problem):
            reason = fits(tensor_map)
            if reason is not None:
                return f"{'qkv'[index]} cannot be fetched by TMA: {reason}"
    return None


def mma_tiles(dtype: str) -> tuple[tuple[Any, ...], ...]:
    """mma's table for a dtype."""
    return dict(float32=MMA_FLOAT32_TILES, float64=MMA_FLOAT64_TILES).get(dtype, MMA_TILES)


def no_wide_rows(operand: str, strides: Strides, columns: int, dtype: str = "float16") -> str | None:
    """Why the rows of an array cannot be copied 16 bytes at a time, or None."""
    if strides[3] not in (0, 1) or (strides[3] == 0 and columns > 1):
        return f"{operand} is not contiguous along dim"
    if any(stride * ITEM_SIZE[dtype] % 16 for stride in strides[:3]):
        return f"{operand} has rows, heads or batch entries that do not begin at multiples of 16 bytes"
    return None


def _strides_that_matter(problem: Problem) -> list[tuple[str, Strides]]:
    """Those of arrays with elements; what strides an empty array has is its library's affair."""
    p = problem
    named = [("q", p.q_strides)] * (p.seqlen_q > 0) + [("k", p.k_strides), ("v", p.v_strides)] * (p.seqlen_k > 0)
    return named * (p.batch * p.heads > 0)


def _config(name: str, problem: Problem, target: Target) -> Config | None:
    config = _fitting(name, problem, target)
    return _with_fastest_rows(config, problem, target) if isinstance(config, WgmmaConfig) else config


def _fitting(name: str, problem: Problem, target: Target) -> Config | None:
    return next((c for c in _candidates(name, problem, target) if c.shared_bytes <= target.shared_bytes), None)


def _candidates(name: str, problem: Problem, target: Target) -> Iterator[Config]:
    """Configs to choose from, the best first; the last needs the least shared memory. Nearly always the first does."""
    if name == "mma":
        return _mma_candidates(problem, target)
    if name == "wgmma":
        return _wgmma_candidates(problem)
    return _seed_candidates(name, problem, target)


def _seed_candidates(name: str, problem: Problem, target: Target) -> Iterator[Config]:
    tiles = SIMULATOR_TILES if target.simulated else SEED_TILES
    for tile_m, tile_n in tiles:
        if tile_m <= 32 or tile_m < 2 * problem.seqlen_q:  # not mostly past the last query
            yield SeedConfig(**_features(name, problem), tile_m=tile_m, tile_n=tile_n)


def _mma_candidates(problem: Problem, target: Target) -> Iterator[Config]:
    head_dim = max(problem.head_dim, problem.head_dim_v)
    large_f64 = problem.dtype == "float64" and (target.cc or (0, 0)) >= LARGE_FLOAT64_SINCE
    for widest, tile_m, tile_n, warp_rows, special, blocks_per_sm, lag in mma_tiles(problem.dtype):
        if head_dim <= widest:
            group = _group(problem, tile_m)
            tile_m = _rows(problem, group, tile_m, warp_rows)
            yield MmaConfig(
                **_features("mma", problem), **_tensor_features(problem, group), tile_m=tile_m, tile_n=tile_n,
                warp_rows=warp_rows, blocks_per_sm=blocks_per_sm, lag=lag, large_f64=large_f64,
                **{"column_groups" if ITEM_SIZE[problem.dtype] > 2 else "q_registers": special},
            )  # fmt: skip


def _wgmma_candidates(problem: Problem) -> Iterator[Config]:
    head_dim = max(problem.head_dim, problem.head_dim_v)
    for widest, tile_m, tile_n, ping_pong, q_buffers, lag in WGMMA_TILES:
        if head_dim <= widest:
            group = _group(problem, tile_m)
            features = _features("wgmma", problem) | _tensor_features(problem, group)
            if tile_m == 192 and features["scaled"] and 128 % group == 0:
                tile_m = 128  # three consumers have no registers left for scores that are finished before the softmax
            # A place for O, where no buffer of Q is free for it and there is room.
            for o_buffer in (True, False) if q_buffers == 1 and features["wide_o"] else (False,):
                yield WgmmaConfig(
                    **features, tile_m=tile_m, tile_n=tile_n, ping_pong=ping_pong, q_buffers=q_buffers, lag=lag,
                    o_buffer=o_buffer,
                )  # fmt: skip


def _with_fastest_rows(config: WgmmaConfig, problem: Problem, target: Target) -> WgmmaConfig:
    """With tiles of fewer query rows, where all is done sooner by them.

    A row's bits must not depend on how many heads and batch entries there are. Nothing else changes with tile_m; but a
    tile walks keys that some of its rows do not see, which are worth nothing, unless V is not finite there: then the
    row is computed anew, in another order. So where larger tiles walk more, it is the work for one head that decides.
    """
    group, tile_n = config.group, config.tile_n

    def fastest(most: int, time: Callable[[int], float]) -> int:
        fitting = [rows for rows in WGMMA_PACES if rows <= most and rows % group == 0]
        return min(fitting, key=lambda rows: WGMMA_PACES[rows] * time(rows // group))

    rows = config.tile_m
    if not _same_keys(problem):
        rows = fastest(rows, lambda queries: work(problem, queries, tile_n))
    if parts_walk_alike(problem, rows // group, tile_n):
        multiprocessors = max(target.multiprocessors, 1)
        rows = fastest(rows, lambda queries: makespan(problem, group, queries, tile_n, multiprocessors))
    paired = max(config.depth, config.width) > 64 and _in_pairs(problem, rows // group)
    return dataclasses.replace(config, tile_m=rows, paired=paired)


def _same_keys(problem: Problem) -> bool:
    """Whether all queries of a batch entry see the same keys."""
    return problem.left is None and problem.right is None


def _in_pairs(problem: Problem, queries: int) -> bool:
    """Whether query tiles, of so many queries, are to be taken two at a time, so that two blocks fetch half of K and V
    each for both: where both see the same keys, and none is left over, beside which a block would compute nothing."""
    # In turns with blocks by themselves, two H200, float16, full, 2026-11-22: head_dim 256, seqlen 1k to 32k, 1.015
    # to 1.027 (once 0.99), at 512 1.007; 128, from 2k on, 1.01 to 1.026 (once 0.98, once 0.99), below 0.995 to 1.007;
    # 64, where tiles are short and blocks wait for each other, 0.76 to 0.98. With one tile left over of 65 it is 0.992
    # and 0.998, of 33 0.945 and 0.889.
    tiles = -(-problem.seqlen_q // queries)
    return _same_keys(problem) and problem.array("seqlens_k") is None and tiles % 2 == 0 and tiles > 0


def _group(problem: Problem, tile_m: int) -> int:
    """How many query heads share a tile: all of a KV head's where one head's queries would not fill it."""
    group = max(problem.heads // problem.heads_kv, 1) if problem.heads_kv else 1
    return group if problem.seqlen_q < tile_m and tile_m % group == 0 else 1


def _rows(problem: Problem, group: int, tile_m: int, step: int) -> int:
    """tile_m, halved while half of it holds all queries."""
    while (
        tile_m > step
        and tile_m // 2 % step == 0
        and tile_m // 2 % group == 0
        and problem.seqlen_q * group <= tile_m // 2
    ):
        tile_m //= 2
    return tile_m


def _features(name: str, problem: Problem) -> dict[str, Any]:
    """What the problem uses, as every Config says it."""
    return dict(
        kernel=name,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        write_lse=problem.return_lse,
        uses=problem.uses,
        q_offset_source=problem.q_offset_source,
    )


def _tensor_features(problem: Problem, group: int) -> dict[str, Any]:
    size = ITEM_SIZE[problem.dtype]
    rows_of_16_bytes = problem.o_strides[3] == 1 and not any(stride * size % 16 for stride in problem.o_strides[:3])
    return dict(
        group=group,
        scaled=changes_scores(problem.uses) or problem.scale <= 0,
        wide_o=problem.head_dim_v * size % 16 == 0 and rows_of_16_bytes,
    )
