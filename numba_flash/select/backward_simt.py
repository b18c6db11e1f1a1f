"""Tiles of v2's backward kernels, in which a thread owns a row. The other rungs use two of these kernels, too."""

from ..config.aux_gradients import DauxConfig
from ..config.simt_backward import DbiasConfig, DkdvConfig, DqConfig, SimtBackwardConfig
from ..machine.target import Target
from ..problem.backward import BackwardProblem
from . import backward_tiles as tiles
from .backward_shared import features_of
from .tiles import columns

KERNEL_OF: dict[type[SimtBackwardConfig], str] = {
    DkdvConfig: "v2_dkdv",
    DqConfig: "v2_dq",
    DbiasConfig: "v2_dbias",
    DauxConfig: "v2_daux_sums",
}


def simt_config(
    kind: type[SimtBackwardConfig], own: tuple[str, ...], problem: BackwardProblem, target: Target
) -> SimtBackwardConfig:
    features = features_of(problem) | dict(kernel=KERNEL_OF[kind], wanted=own)
    if kind is DbiasConfig:
        *_, bias_rows, bias_keys = problem.dbias_shape
        features |= dict(rows_summed=bias_rows == 1, keys_summed=bias_keys == 1, split=problem.dbias_splits > 1)
    if kind is DauxConfig:
        features |= dict(wanted_aux=problem.wanted_aux)
    # not mostly past the last row of its own side
    of_keys = kind is DkdvConfig
    length = problem.forward.seqlen_k if of_keys else problem.forward.seqlen_q
    rows = tiles.rows_for("v2_dkdv" if of_keys else "v2_dq", target)
    made = [kind(**features, **columns(row)) for row in rows if row[of_keys] <= 32 or row[of_keys] < 2 * length]
    return next((config for config in made if config.shared_bytes <= target.shared_bytes), made[-1])
