"""BackwardProblem x Target -> which kernels compute the gradients, with which Configs; and why others do not."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .backward_problem import BackwardProblem
from .config_seed_backward import (
    BackwardConfig,
    DalibiConfig,
    DbiasConfig,
    DeltaConfig,
    DkdvConfig,
    DqConfig,
    SeedBackwardConfig,
)
from .select import KERNELS, Refused, check_request, first_that_can
from .target import Target

BUILT = ("reference", "v2", "cpu")  # of KERNELS, those that have a backward

# (tile_m, tile_n): the first that fits into the device's shared memory. A key has two threads in v2_dkdv.
DKDV_TILES = ((16, 64), (16, 32), (8, 32), (8, 16), (8, 8), (4, 4))
DQ_TILES = ((128, 16), (64, 16), (32, 16), (32, 8), (16, 8), (8, 8), (4, 4))
# A simulated thread is a Python thread: small blocks, whose barriers are cheap, and few wasted rows.
SIMULATOR_TILES = ((16, 16), (8, 8), (4, 4))


@dataclass(frozen=True)
class BackwardChoice:
    """What will run. `configs` are those of its kernels in the order of their launches; none of the host's rungs."""

    kernel: str
    configs: tuple[BackwardConfig, ...]
    refused: Refused  # (kernel, why it does not run), in the order they were asked


NoCpu = Callable[[BackwardProblem], str | None]


def select_backward(
    problem: BackwardProblem, target: Target, kernel: str, family: str, stream: bool, no_cpu: NoCpu
) -> BackwardChoice:
    """The rung by name, or for "auto" the fastest one that can compute the gradients exactly here.

    family and stream as in `select`; no_cpu: why the CPU rung cannot, or None, asked only where that matters.
    """
    check_request(kernel, target, family, stream)
    wanted = _by_preference(target) if kernel == "auto" else (kernel,)
    refuses = functools.partial(_refusal, problem=problem, target=target, no_cpu=no_cpu)
    not_asked = functools.partial(_not_asked, kernel=kernel, target=target)
    name, refused = first_that_can(kernel, wanted, KERNELS, refuses, not_asked)
    return BackwardChoice(name, v2_configs(problem, target) if name == "v2" else (), refused)


def _by_preference(target: Target) -> tuple[str, ...]:
    if target.simulated:
        return ("v2",)
    return ("cpu", "reference") if target.arrays_on_host else ("wgmma", "mma", "v2", "v1")


def _not_asked(name: str, kernel: str, target: Target) -> str:
    if kernel != "auto":
        return f"kernel={kernel!r} was asked for"
    if target.simulated:
        return "in the simulator v2 is what is looked at"
    return f"the arrays are {'in host memory' if target.arrays_on_host else 'on a GPU'}"


def _refusal(name: str, problem: BackwardProblem, target: Target, no_cpu: NoCpu) -> str | None:
    """Why rung `name` cannot compute these gradients on this machine, or None."""
    if name not in BUILT:
        return "its backward is not built yet"
    if name in ("reference", "cpu"):
        if not target.arrays_on_host:
            return "it computes in host memory; copy the arrays there first"
        return no_cpu(problem) if name == "cpu" else None
    if target.cc is None:
        return (
            f"no GPU is usable ({target.why_no_gpu}); to step through it without one, set "
            "NUMBA_ENABLE_CUDASIM=1 before Python starts"
        )
    if target.arrays_on_host and not target.simulated:
        return "it takes arrays on a GPU, and these are in host memory; copy them there first"
    needed = max((config.shared_bytes for config in v2_configs(problem, target)), default=0)
    if needed > target.shared_bytes:
        forward = problem.forward
        return (
            f"head_dim {forward.head_dim} and {forward.head_dim_v} in {forward.dtype} need {needed} bytes of shared "
            f"memory in the smallest tile, and {target.name} has {target.shared_bytes}"
        )
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
        made.append(DalibiConfig(forward.dtype, str(forward.alibi_dtype), of_all, 16 if target.simulated else 256))
    return tuple(made)


def delta_config(problem: BackwardProblem, target: Target) -> DeltaConfig:
    """Of the kernel that every GPU rung begins with."""
    threads, lanes = (16, 4) if target.simulated else (256, 16)
    return DeltaConfig(problem.forward.dtype, problem.forward.head_dim_v, problem.has_dlse, threads, lanes)


def _fitting(
    kind: type[SeedBackwardConfig], own: tuple[str, ...], problem: BackwardProblem, target: Target
) -> SeedBackwardConfig:
    tiles = SIMULATOR_TILES if target.simulated else DKDV_TILES if kind is DkdvConfig else DQ_TILES
    features = _features(problem) | dict(kernel=KERNEL_OF[kind], wanted=own)
    if kind is DbiasConfig:
        _, _, rows, keys = problem.dbias_shape
        features |= dict(rows_summed=rows == 1, keys_summed=keys == 1)
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
        softcap=forward.softcap is not None,
        alibi_dtype=forward.alibi_dtype,
        bias_dtype=forward.bias_dtype,
        mask=forward.has_mask,
        seqlens_k=forward.has_seqlens_k,
        q_offset_source=forward.q_offset_source,
    )
