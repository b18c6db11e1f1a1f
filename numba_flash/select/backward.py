"""BackwardProblem x Target -> which kernels compute the gradients, with which Configs; and why others do not."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.backward import BackwardConfig, MmaBackwardConfig, MmaDkdvConfig, MmaDqConfig, MmaRowsConfig
from ..config.forward import Config
from ..config.simt_backward import DalibiConfig, DbiasConfig, DeltaConfig, DkdvConfig, DqConfig, SeedBackwardConfig
from ..config.wgmma_backward import WgmmaBackwardConfig, WgmmaDkdvConfig, WgmmaDqConfig
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.options import changes_scores
from .arguments import backward_tensor_maps
from .forward import KERNELS, TENSOR, Refused, check_request, first_that_can, no_tensor_cores, no_wide_rows
from .tensor_maps import fits

BUILT = ("reference", "v2", "mma", "wgmma", "cpu")  # of KERNELS, those that have a backward

# (tile_m, tile_n): the first that fits into the device's shared memory and is not mostly past the last row. A key has
# two threads in v2_dkdv. Not measured yet.
DKDV_TILES = ((16, 64), (16, 32), (8, 32), (8, 16), (8, 8), (4, 4))
DQ_TILES = ((128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (4, 4))
# A simulated thread is a Python thread: small blocks, whose barriers are cheap, and few wasted rows.
SIMULATOR_TILES = ((16, 16), (8, 8), (4, 4))
# (largest head_dim, for plain scores only, tile_m, tile_n, warp_rows, in_registers, blocks_per_sm, column_groups, or 0
# where dK and dV have a kernel each, stages): the first row whose head_dim is large enough and of whose blocks so many
# fit into shared memory. Scores with softcap or ALiBi are not plain, and need registers of their own.
# H200, float16, 2048 / head_dim heads, 16k tokens, 2026-11-22, us with mma_rows at seqlen 1k, 4k and 4k causal.
# head_dim 64: 32 x 128 843, 3056, 1691; 64 x 128 868, 3166, 1744; rows of 16 keys a warp 1159 to 1427, 3979 to 4674.
# head_dim 128: 64 x 64 in two groups 820, 2968, 1630, in one 931, 3313, 1783; 64 x 128 in two groups 948, 3371, 1858;
# 128 x 64 in two groups and one stage 1281, 4715, 2521.
# head_dim 256, in four groups: 128 x 64 in one stage 961, 3277, 1770; 64 x 64 in one stage 1067, 3878, 2095 (spills on
# sm_80, where it would fit), in two 1013, 3619, 1944; apart 32 x 128 1392, 5095, 2976 and 32 x 64 1454, 5366, 2921.
MMA_DKDV_TILES: tuple[tuple[Any, ...], ...] = (
    (64, True, 32, 128, 32, False, 2, 1, 2),
    (64, False, 64, 128, 16, False, 1, 1, 2),
    (128, True, 64, 64, 32, False, 2, 2, 2),
    (128, True, 64, 64, 16, False, 2, 1, 2),
    (128, True, 32, 64, 16, False, 2, 1, 2),
    (128, False, 32, 64, 16, False, 2, 0, 2),
    (128, False, 32, 64, 16, False, 1, 0, 2),
    (256, True, 128, 64, 32, False, 1, 4, 1),
    (256, True, 32, 128, 16, False, 1, 0, 2),
    (256, False, 32, 64, 16, False, 1, 0, 2),
    (256, False, 16, 32, 16, False, 1, 0, 2),
)
# (largest head_dim, for plain scores only, tile_m, tile_n, warp_rows, in_registers, blocks_per_sm, column_groups,
# stages). Measured likewise. head_dim 64: 128 x 32 616, 2170, 1205; before the rows' facts 723, 2245, and then not in
# registers 759, 2406, rows of 16 queries a warp 788 to 870, 2530 to 2842. head_dim 128: 128 x 32 585, 2090, 1226;
# 64 x 32 632, 2248, 1305; 256 x 32 617, 2138, 1307; in two groups and one stage 128 x 128 652, 2267, 1280 and 64 x 96
# 632, 2187, 1191. head_dim 256, in two groups: 128 x 64 in one stage 646, 2284, 1347; 64 x 64 in one stage 771, 2742,
# 1486, in two 734, 2670, 1446; in one group 64 x 32 893, 3249, 1751.
MMA_DQ_TILES = (
    (64, True, 128, 32, 32, True, 2, 1, 2),
    (64, False, 128, 32, 32, False, 2, 1, 2),
    (128, True, 128, 32, 32, False, 2, 1, 2),
    (128, False, 64, 32, 16, False, 2, 1, 2),
    (128, False, 64, 32, 16, False, 1, 1, 2),
    (256, True, 128, 64, 32, False, 1, 2, 1),
    (256, True, 64, 64, 32, False, 1, 2, 1),
    (256, False, 64, 32, 16, False, 1, 1, 2),
    (256, False, 32, 16, 16, False, 1, 1, 2),
)
# (largest head_dim, for plain scores only, tile_m, tile_n, stages_a, stages_b, apart): as in MMA_DKDV_TILES; apart: dK
# and dV have a kernel each. H200, float16, 2048 / head_dim heads, 16k tokens, 2026-11-23, us at seqlen 1k, 4k, 16k and
# 4k causal. head_dim 64: 112 x 128 601, 1814, 7254, 1049; 96 x 128 582, 1859, 7466, 1076; 64 x 128 603, 2016, 8159,
# 1116; 48 x 192 680, 2095, 8072, 1139. head_dim 128: 64 x 128 in three stages 495, 1702, 6992, 933, in two 501, 1730,
# 7217, 963; 48 x 128 566, 1955, 8131, 1102. head_dim 256, dK and dV together: 64 x 128 692, 2401, 9804, 1362; 48 x 128
# for dK 840, 2945, 12187, 1601.
WGMMA_DKDV_TILES: tuple[tuple[Any, ...], ...] = (
    (64, True, 112, 128, 2, 2, False),
    (64, False, 64, 128, 2, 2, False),
    (96, True, 80, 128, 2, 2, False),
    (128, True, 64, 128, 3, 3, False),
    (128, False, 48, 128, 2, 2, False),
    (192, True, 80, 128, 2, 2, True),
    (256, False, 64, 128, 2, 1, True),
)
# (largest head_dim, for plain scores only, tile_m, tile_n, stages_a, stages_b). Measured likewise. head_dim 64: 128 x
# 128 418, 1312, 5157, 744; 128 x 96 461, 1427, 5590, 812; 192 x 64 476, 1462, 5336, 789. head_dim 128: 128 x 112 360,
# 1133, 4395, 641; 128 x 96 357, 1185, 4611, 663; 128 x 64 351, 1166, 4594, 645. head_dim 256: 128 x 64 321, 1072, 4110,
# 624; 128 x 48 361, 1179, 4506, 670.
WGMMA_DQ_TILES: tuple[tuple[Any, ...], ...] = (
    (64, True, 128, 128, 2, 2),
    (64, False, 128, 64, 2, 2),
    (96, True, 128, 128, 2, 2),
    (128, True, 128, 112, 2, 2),
    (128, False, 128, 64, 2, 2),
    (192, True, 128, 80, 2, 2),
    (256, False, 128, 64, 2, 1),
)
WGMMA_SIMULATOR_DKDV_TILES: tuple[tuple[Any, ...], ...] = (
    (128, False, 32, 64, 2, 2, False),
    (256, False, 32, 64, 2, 1, True),
)
WGMMA_SIMULATOR_DQ_TILES: tuple[tuple[Any, ...], ...] = ((256, False, 64, 32, 2, 2),)
MMA_SIMULATOR_DKDV_TILES: tuple[tuple[Any, ...], ...] = (
    (128, False, 32, 32, 16, False, 0, 1, 2),
    (256, False, 32, 32, 16, False, 0, 0, 2),
)
MMA_SIMULATOR_DQ_TILES = ((256, False, 32, 32, 16, False, 0, 1, 2),)


@dataclass(frozen=True)
class BackwardChoice:
    """What will run. `configs` are those of its kernels in the order of their launches; none of the host's rungs."""

    kernel: str
    configs: tuple[BackwardConfig, ...]
    refused: Refused  # (kernel, why it does not run), in the order they were asked


def select_backward(
    problem: BackwardProblem, target: Target, kernel: str, family: str = "numpy", stream: bool = False
) -> BackwardChoice:
    """The rung by name, or for "auto" the fastest one that can compute the gradients exactly here; as `select`."""
    check_request(kernel, target, family, stream)
    wanted = _by_preference(target) if kernel == "auto" else (kernel,)
    refuses = functools.partial(_refusal, problem=problem, target=target)
    not_asked = functools.partial(_not_asked, kernel=kernel, target=target)
    name, refused = first_that_can(kernel, wanted, KERNELS, refuses, not_asked)
    return BackwardChoice(name, _configs(name, problem, target), refused)


def _by_preference(target: Target) -> tuple[str, ...]:
    if target.simulated:
        return ("v2",)
    return ("cpu",) if target.arrays_on_host else ("wgmma", "mma", "v2", "v1")


def _not_asked(name: str, kernel: str, target: Target) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    if name == "reference":
        return "the oracle holds the whole score matrix; it runs when named"
    if target.simulated:
        return "in the simulator v2 is what is looked at"
    return f"the arrays are {'in host memory' if target.arrays_on_host else 'on a GPU'}"


def _refusal(name: str, problem: BackwardProblem, target: Target) -> str | None:
    """Why rung `name` cannot compute these gradients on this machine, or None."""
    if name not in BUILT:
        return "its backward is not built yet"
    if name in ("reference", "cpu"):
        return None if target.arrays_on_host else "it computes in host memory; copy the arrays there first"
    if target.cc is None:
        return (
            f"no GPU is usable ({target.why_no_gpu}); to step through it without one, set "
            "NUMBA_ENABLE_CUDASIM=1 before Python starts"
        )
    if target.arrays_on_host and not target.simulated:
        return "it takes arrays on a GPU, and these are in host memory; copy them there first"
    if name in TENSOR:
        reason = _no_tensor_cores(name, problem, target)
        if reason is not None:
            return reason
    needed = max((config.shared_bytes for config in _configs(name, problem, target)), default=0)
    if needed > target.shared_bytes:
        forward = problem.forward
        return (
            f"head_dim {forward.head_dim} and {forward.head_dim_v} in {forward.dtype} need {needed} bytes of shared "
            f"memory in the smallest tile, and {target.name} has {target.shared_bytes}"
        )
    return None


def _configs(name: str, problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """Of a rung's kernels, in the order of their launches; none of the host's rungs."""
    if name == "v2":
        return v2_configs(problem, target)
    if name == "wgmma":
        return wgmma_configs(problem, target)
    return mma_configs(problem, target) if name == "mma" else ()


def _no_tensor_cores(name: str, problem: BackwardProblem, target: Target) -> str | None:
    """Why the kernels of "mma" or "wgmma" do not take the problem, apart from shared memory."""
    forward = problem.forward
    if forward.dtype not in ("float16", "bfloat16"):
        return f"its gradients are of float16 and bfloat16, not {forward.dtype}"
    if not forward.aligned:
        return "q, k, v, o or do begins at an address that is not a multiple of 16 bytes"
    if max(forward.head_dim, forward.head_dim_v) > MmaBackwardConfig.WIDEST:
        widest = MmaBackwardConfig.WIDEST
        return f"it takes head_dim up to {widest}, not {forward.head_dim} and {forward.head_dim_v}"
    if "dalibi_slopes" in problem.wanted:
        return "it has no gradient of alibi_slopes yet"
    assert target.cc is not None
    reason = no_tensor_cores(name, forward, target)
    if reason is None and forward.batch * forward.heads * forward.seqlen_q:
        reason = no_wide_rows("do", problem.do_strides, forward.head_dim_v)
        if reason is None and name == "wgmma":
            reason = _no_tma(problem, target)
    return reason


def _no_tma(problem: BackwardProblem, target: Target) -> str | None:
    """Why TMA cannot fetch an operand, or None. The strides alone decide it, which are the same for every kernel."""
    for config in wgmma_configs(problem, target):
        for operand, tensor_map in backward_tensor_maps(config, problem):
            reason = fits(tensor_map)
            if reason is not None:
                return f"{('q', 'k', 'v', 'do')[operand]} cannot be fetched by TMA: {reason}"
    return None


@functools.lru_cache(maxsize=4096)
def v2_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """v2's kernels for what is wanted, each with its best tile that fits, or the smallest one."""
    forward, wanted = problem.forward, problem.wanted
    made: list[BackwardConfig] = [delta_config(problem, target)]
    for kind, gradients in ((DkdvConfig, ("dk", "dv")), (DqConfig, ("dq", "dalibi_slopes")), (DbiasConfig, ("dbias",))):
        own = tuple(name for name in gradients if name in wanted)
        if own:
            made.append(_fitting(kind, own, problem, target))
    if "dalibi_slopes" in wanted:
        of_all = len(problem.shapes[-1]) == 1
        made.append(DalibiConfig(forward.dtype, forward.uses, of_all, 16 if target.simulated else 256))
    return tuple(made)


@functools.lru_cache(maxsize=4096)
def mma_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """mma's kernels for what is wanted, each with its best tile that fits, or the smallest one."""
    forward = problem.forward
    head_dim, plain = max(forward.head_dim, forward.head_dim_v), not changes_scores(forward.uses)

    def made_of(make: Callable[..., list[MmaBackwardConfig]], rows: Sequence[tuple[Any, ...]]) -> Any:
        usable = [row[2:] for row in rows if head_dim <= row[0] and (plain or not row[1])]
        return _first_that_fits([make(problem, *row) for row in usable], target)

    dkdv = MMA_SIMULATOR_DKDV_TILES if target.simulated else MMA_DKDV_TILES
    if not {"dk", "dv"} <= set(problem.wanted):
        dkdv = tuple(row for row in dkdv if row[7] <= 1)  # warps that exchange scores sum up both
    dq = MMA_SIMULATOR_DQ_TILES if target.simulated else MMA_DQ_TILES
    made: list[BackwardConfig] = [_mma_rows(problem, target)]
    made += made_of(_mma_dkdv, dkdv)
    if "dq" in problem.wanted:
        made += made_of(_mma_dq, dq)
    return tuple(made)


@functools.lru_cache(maxsize=4096)
def wgmma_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """wgmma's kernels for what is wanted, each with its best tile that fits, or the smallest one."""
    forward = problem.forward
    head_dim, plain = max(forward.head_dim, forward.head_dim_v), not changes_scores(forward.uses)

    def rows_of(table: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [row[2:] for row in table if head_dim <= row[0] and (plain or not row[1])]

    made: list[BackwardConfig] = [_mma_rows(problem, target)]
    wanted = [name for name in problem.wanted if name in ("dk", "dv")]
    dkdv = WGMMA_SIMULATOR_DKDV_TILES if target.simulated else WGMMA_DKDV_TILES
    made += _first_that_fits([_wgmma_dkdv(problem, wanted, *row) for row in rows_of(dkdv)], target)
    if "dq" in problem.wanted:
        dq = WGMMA_SIMULATOR_DQ_TILES if target.simulated else WGMMA_DQ_TILES
        made += _first_that_fits([_wgmma_dq(problem, *row) for row in rows_of(dq)], target)
    return tuple(made)


def _wgmma_dkdv(
    problem: BackwardProblem, wanted: list[str], tile_m: int, tile_n: int, stages_a: int, stages_b: int, apart: bool
) -> list[WgmmaBackwardConfig]:
    parts = [[name] for name in wanted] if apart else [wanted] if wanted else []
    return [
        WgmmaDkdvConfig(
            **_features(problem), kernel="wgmma_dkdv", tile_m=tile_m, tile_n=tile_n, stages_a=stages_a,
            stages_b=stages_b if "dk" in part else 2, of_dk="dk" in part, of_dv="dv" in part,
        )
        for part in parts
    ]  # fmt: skip


def _wgmma_dq(
    problem: BackwardProblem, tile_m: int, tile_n: int, stages_a: int, stages_b: int
) -> list[WgmmaBackwardConfig]:
    return [
        WgmmaDqConfig(
            **_features(problem), kernel="wgmma_dq", tile_m=tile_m, tile_n=tile_n, stages_a=stages_a, stages_b=stages_b
        )
    ]


def _first_that_fits(candidates: Sequence[Sequence[Any]], target: Target) -> Sequence[Any]:
    """The first set of kernels of whose blocks as many fit into a multiprocessor as they count on, or the last."""

    def fit(config: Config) -> bool:
        return config.shared_bytes * max(config.blocks_per_sm, 1) <= target.shared_bytes

    return next((made for made in candidates if all(map(fit, made))), candidates[-1])


def _mma_rows(problem: BackwardProblem, target: Target) -> MmaRowsConfig:
    forward = problem.forward
    wide = not any(
        no_wide_rows(name, strides, forward.head_dim_v)
        for name, strides in (("do", problem.do_strides), ("o", forward.o_strides))
    )
    threads = 32 if target.simulated else 256
    return MmaRowsConfig(forward.dtype, forward.head_dim_v, problem.has_dlse, wide, threads)


def _mma_dkdv(
    problem: BackwardProblem, tile_m: int, tile_n: int, warp_rows: int, in_registers: bool, blocks_per_sm: int,
    column_groups: int, stages: int,
) -> list[MmaBackwardConfig]:  # fmt: skip
    wanted = [name for name in ("dk", "dv") if name in problem.wanted]
    parts = [wanted] if column_groups and wanted else [[name] for name in wanted]
    return [
        MmaDkdvConfig(
            **_features(problem), kernel="mma_dkdv", tile_m=tile_m, tile_n=tile_n, warp_rows=warp_rows,
            in_registers=in_registers, blocks_per_sm=blocks_per_sm, of_dk="dk" in part, of_dv="dv" in part,
            column_groups=max(column_groups, 1), stages=stages,
        )
        for part in parts
    ]  # fmt: skip


def _mma_dq(
    problem: BackwardProblem, tile_m: int, tile_n: int, warp_rows: int, in_registers: bool, blocks_per_sm: int,
    column_groups: int, stages: int,
) -> list[MmaBackwardConfig]:  # fmt: skip
    return [
        MmaDqConfig(
            **_features(problem), kernel="mma_dq", tile_m=tile_m, tile_n=tile_n, warp_rows=warp_rows,
            in_registers=in_registers, blocks_per_sm=blocks_per_sm, column_groups=column_groups, stages=stages,
        )
    ]  # fmt: skip


def delta_config(problem: BackwardProblem, target: Target) -> DeltaConfig:
    """Of the kernel that v2 begins with."""
    threads, lanes = (16, 4) if target.simulated else (256, 16)
    return DeltaConfig(problem.forward.dtype, problem.forward.head_dim_v, problem.has_dlse, threads, lanes)


def _fitting(
    kind: type[SeedBackwardConfig], own: tuple[str, ...], problem: BackwardProblem, target: Target
) -> SeedBackwardConfig:
    tiles: Sequence[tuple[int, int]]
    tiles = SIMULATOR_TILES if target.simulated else DKDV_TILES if kind is DkdvConfig else DQ_TILES
    features = _features(problem) | dict(kernel=KERNEL_OF[kind], wanted=own)
    if kind is DbiasConfig:
        _, _, rows, keys = problem.dbias_shape
        features |= dict(rows_summed=rows == 1, keys_summed=keys == 1)
    # not mostly past the last row of its own side
    of_keys = kind is DkdvConfig
    length = problem.forward.seqlen_k if of_keys else problem.forward.seqlen_q
    tiles = [tile for tile in tiles if tile[of_keys] <= 32 or tile[of_keys] < 2 * length]
    made = [kind(**features, tile_m=tile_m, tile_n=tile_n) for tile_m, tile_n in tiles]
    return next((config for config in made if config.shared_bytes <= target.shared_bytes), made[-1])


KERNEL_OF: dict[type[SeedBackwardConfig], str] = {
    DkdvConfig: "v2_dkdv",
    DqConfig: "v2_dq",
    DbiasConfig: "v2_dbias",
}


def _features(problem: BackwardProblem) -> dict[str, Any]:
    """What the problem uses, as every Config says it."""
    forward = problem.forward
    return dict(
        dtype=forward.dtype,
        head_dim=forward.head_dim,
        head_dim_v=forward.head_dim_v,
        uses=forward.uses,
        q_offset_source=forward.q_offset_source,
    )
