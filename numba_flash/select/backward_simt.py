"""Tiles of v2's backward kernels, in which a thread owns a row. The other rungs use two of these kernels, too."""

from typing import Any

from ..config.simt_backward import DbiasConfig, SimtBackwardConfig
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from .backward_shared import features_of
from .backward_tiles import TABLES
from .tiles import rows_of


def dbias(problem: BackwardProblem, target: Target) -> SimtBackwardConfig:
    *_, rows, keys = problem.dbias_shape
    own: dict[str, Any] = dict(wanted=("dbias",), rows_summed=rows == 1, keys_summed=keys == 1)
    own |= dict(split=problem.dbias_splits > 1)
    return best(DbiasConfig, "v2_dq", problem, target, **own)


def best(
    kind: type[SimtBackwardConfig], table: str, problem: BackwardProblem, target: Target, **own: Any
) -> SimtBackwardConfig:
    """With the first tile that is not mostly past the last row of its own side and fits, or the last."""
    side, length = "tile_m", problem.forward.seqlen_q
    if kind.of_keys:
        side, length = "tile_n", problem.forward.seqlen_k
    tiles = [row.tile for row in rows_of(TABLES, table, problem.forward.dtype, target)]
    features = features_of(problem) | own
    every = problem.forward.packed is not None  # its longest sequence decides nothing
    made = [kind(**features, **tile) for tile in tiles if every or tile[side] <= 32 or tile[side] < 2 * length]
    return next((config for config in made if config.shared_bytes <= target.shared_bytes), made[-1])
