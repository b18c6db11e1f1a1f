"""mma's backward kernels in float32 and float64: which form and which tiles."""

import dataclasses
import functools
from typing import Any

from ..config.backward import BackwardConfig
from ..config.forward import ITEM_SIZE, Config
from ..config.simt_backward import DbiasConfig
from ..config.wide_backward import (
    WideBackwardConfig,
    WideCarriedConfig,
    WideDkdvConfig,
    WideDqConfig,
    WideDqFinishConfig,
    WideFusedConfig,
)
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from . import backward_tiles as tiles
from .backward_shared import (
    apart_or_together,
    bias_pairs_of,
    delta_config,
    features_of,
    first_that_fits,
    head_sums,
    usable,
    with_what_goes_before,
)
from .backward_simt import simt_config
from .forward import LARGE_FLOAT64
from .tiles import columns


@functools.lru_cache(maxsize=4096)
def wide_configs(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """mma's kernels in float32 and float64."""
    fused = _wide_fused(problem, target)
    if fused:
        return (*fused, *head_sums(problem, target, of_blocks=False))
    made: list[BackwardConfig] = [delta_config(problem, target)]
    own: list[Config] = []
    if {"dk", "dv"} & set(problem.wanted):
        rows = usable("mma_dkdv", problem, target)
        own += first_that_fits([_wide_dkdv(problem, row, target) for row in rows], target)
    if "dq" in problem.wanted:
        own += first_that_fits([_wide_dq(problem, row, target) for row in usable("mma_dq", problem, target)], target)
    made += with_what_goes_before(own, target)
    if "dbias" in problem.wanted:  # mma has no float32 or float64 dbias kernel yet
        made.append(simt_config(DbiasConfig, ("dbias",), problem, target))
    return (*made, *head_sums(problem, target, of_blocks=False))


KERNEL_OF_ALL: dict[type[WideFusedConfig], str] = {
    WideFusedConfig: "mma_wide_fused",
    WideCarriedConfig: "mma_wide_carried",
}


def _wide_fused(problem: BackwardProblem, target: Target) -> list[BackwardConfig]:
    """One kernel of dK, dV and parts of dQ, with those before and after it, if that is the faster form; otherwise none.
    It computes five products instead of seven. It needs a query: without one no previous kernel would set its ticket to
    0."""
    forward = problem.forward
    rows_of_16_bytes = forward.head_dim * ITEM_SIZE[forward.dtype] % 16 == 0  # of dq, which is contiguous
    if not {"dq", "dk", "dv"} <= set(problem.wanted) or not rows_of_16_bytes or not forward.seqlen_q:
        return []
    carries = forward.dtype == "float64" and (target.simulated or target.cc == LARGE_FLOAT64)
    rows: list[tuple[type[WideFusedConfig], Any]] = []
    if carries:
        rows += [(WideCarriedConfig, row) for row in usable("mma_wide_carried", problem, target)]
    rows += [(WideFusedConfig, row) for row in usable("mma_wide_fused", problem, target)]
    for kind, row in rows:
        features = _wide_features(problem, row, target) | dict(tile_m=row.other_rows, tile_n=row.own_rows)
        fused = kind(**features, kernel=KERNEL_OF_ALL[kind])
        fits = fused.shared_bytes * max(fused.blocks_per_sm, 1) <= target.shared_bytes
        if fits and gains_by_one_wide_kernel(problem, row):
            of_finish = features_of(problem) | dict(tile_m=fused.tile_m, tile_n=fused.tile_n)
            finish = WideDqFinishConfig(**of_finish, kernel="mma_dq_finish")
            return [dataclasses.replace(delta_config(problem, target), turns_of=fused.tile_m), fused, finish]
    return []


def gains_by_one_wide_kernel(problem: BackwardProblem, row: tiles.WideFused | tiles.WideCarried) -> bool:
    """Whether the one kernel of float32 and float64 is the faster form.

    Its tiles have columns for row.head_dim. Its parts of dQ wait in a line, so a batch entry needs enough work, as in
    gains_by_one_kernel. docs/adding_a_tile_row.md has the measurements.
    """
    forward = problem.forward
    filled = min(forward.head_dim, forward.head_dim_v) > row.above
    long_line = forward.seqlen_k > forward.seqlen_q or forward.heads_kv < 8
    return filled and not long_line and forward.heads_kv * forward.seqlen_k >= row.least_keys


def _wide_features(problem: BackwardProblem, row: tiles.WideBackward, target: Target) -> dict[str, Any]:
    large = problem.forward.dtype == "float64" and target.cc == LARGE_FLOAT64
    return features_of(problem) | bias_pairs_of(problem) | columns(row) | dict(large_f64=large)


def _wide_dkdv(problem: BackwardProblem, row: tiles.WideBackward, target: Target) -> list[WideBackwardConfig]:
    features = _wide_features(problem, row, target) | dict(tile_m=row.other_rows, tile_n=row.own_rows)
    return [
        WideDkdvConfig(**features, kernel="mma_dkdv_wide", of_dk="dk" in part, of_dv="dv" in part)
        for part in apart_or_together(problem, row.apart)
    ]


def _wide_dq(problem: BackwardProblem, row: tiles.WideBackward, target: Target) -> list[WideBackwardConfig]:
    features = _wide_features(problem, row, target) | dict(tile_m=row.own_rows, tile_n=row.other_rows)
    return [WideDqConfig(**features, kernel="mma_dq_wide")]
