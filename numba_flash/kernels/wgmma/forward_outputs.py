"""Writes O and lse of a query tile, beside the first S of the next one (forward.py). Rows that are not finite are
computed again."""

from ..recompute import rows as recompute
from ..steps import output_rows
from ..steps.basics import inlined
from .block import query_work, rows_of_lane, tile_of
from .tile_scores import counting


def make(config, finish):
    """-> write, a device function. finish: of fragment_softmax."""
    kept_weights, work_of, recompute_rows = counting(config), query_work(config), recompute.make(config, 16)
    write_rows = output_rows.make(config, 16)

    @inlined
    def write(work_tile, registers, arrays, strides, sizes, score):
        """A warp writes its rows. registers: ConsumerRegisters; scores.distance has a term of the rows' sums."""
        tile, (first_row, lane) = tile_of(work_tile), rows_of_lane()
        inverse_l, lse = registers.alpha, registers.scores.distance  # the same registers, free by now
        finish(registers.m, registers.l, inverse_l, lse)
        if kept_weights.drops:
            kept_weights.scale(inverse_l, score)
        work = work_of(tile, work_tile, arrays, strides, sizes)
        nonfinite = write_rows(registers.acc_o, inverse_l, lse, first_row, lane, work, arrays, strides, sizes)
        if nonfinite != 0:
            recompute_rows(nonfinite, first_row, lane, tile, arrays, strides, sizes, score)

    return write
