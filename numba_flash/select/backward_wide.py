"""mma's backward kernels in float32 and float64: which form and which tiles."""

import functools
from typing import Any

from ..arrays.dtypes import ITEM_SIZE
from ..config import wide_backward as wide
from ..config.forward import LaunchFacts
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from . import backward_shared as shared
from .forward import features_of, halved
from .rungs import LARGE_FLOAT64
from .tiles import Row


@functools.lru_cache(maxsize=4096)
def wide_configs(problem: BackwardProblem, target: Target) -> tuple[LaunchFacts, ...]:
    """mma's kernels in float32 and float64."""
    fused = _wide_fused(problem, target)
    if fused:
        return (*fused, *shared.head_sums(problem, target, of_blocks=False))
    own: list[Any] = []
    kinds: list[type[wide.WideBackwardConfig]] = [wide.WideDkdvConfig, *[wide.WideDqConfig] * ("dq" in problem.wanted)]
    for kind, table in zip(kinds, ("mma_dkdv", "mma_dq"), strict=False):
        rows = [_shrunk(row, kind.of_keys, problem.forward) for row in shared.usable(table, problem, target)]
        own += shared.best(kind, rows, problem, target)
    made: list[LaunchFacts] = [shared.delta_config(problem, target), *shared.with_what_goes_before(own, target)]
    if "dbias" in problem.wanted:  # mma has no float32 or float64 dbias kernel yet
        made.append(shared.simt_dbias(problem, target))
    return (*made, *shared.head_sums(problem, target, of_blocks=False))


def _shrunk(row: Row, of_keys: bool, problem: Problem) -> Row:
    """With tiles as small as the lengths, of which more blocks then run at a time. The longest of packed sequences
    decides nothing that could change the bits of another."""
    if problem.packed is not None:
        return row
    queries, keys = row.tile["tile_m"], row.tile["tile_n"]
    sizes = halved(queries, problem.seqlen_q), halved(keys, problem.seqlen_k)
    fewer = keys // sizes[1] if of_keys else queries // sizes[0]
    return row.changed(tile_m=sizes[0], tile_n=sizes[1], blocks_per_sm=row.tile["blocks_per_sm"] * fewer)


def _wide_fused(problem: BackwardProblem, target: Target) -> list[LaunchFacts]:
    """One kernel of dK, dV and parts of dQ, with those before and after it, if that is the faster form; otherwise none.
    It computes five products instead of seven. It needs a GPU whose products of float64 are one instruction. It needs a
    query: without one no previous kernel would set its ticket to 0."""
    forward = problem.forward
    taken = forward.dtype == "float64" and target.cc == LARGE_FLOAT64 and {"dq", "dk", "dv"} <= set(problem.wanted)
    rows_of_16_bytes = forward.head_dim * ITEM_SIZE[forward.dtype] % 16 == 0  # of dq, which is contiguous
    every = taken and rows_of_16_bytes and forward.seqlen_q > 0 and forward.packed is None
    if not every or not gains_by_one_wide_kernel(problem):
        return []
    for row in shared.usable("mma_wide_fused", problem, target):
        fused = wide.WideFusedConfig(**features_of(wide.WideFusedConfig, problem, target), **row.tile)
        if shared.fits(fused, target):
            facts = features_of(wide.WideDqFinishConfig, problem, target)
            finish = wide.WideDqFinishConfig(**facts, tile_m=fused.tile_m, tile_n=fused.tile_n)
            return [shared.delta_config(problem, target, turns_of=fused.tile_m), fused, finish]
    return []


def gains_by_one_wide_kernel(problem: BackwardProblem) -> bool:
    """Whether the one kernel is the faster form, where a row is for the problem: its parts of dQ wait in a line, so a
    batch entry needs enough work, as in gains_by_one_kernel. docs/adding_a_tile_row.md has the measurements."""
    return problem.forward.seqlen_k <= problem.forward.seqlen_q and problem.forward.heads_kv >= 8
