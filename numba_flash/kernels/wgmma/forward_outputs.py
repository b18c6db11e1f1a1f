"""Writes O and lse of a query tile, beside the first S of the next one (forward.py). Rows that are not finite are
computed again."""

from ..recompute import rows as recompute
from ..score import sum_term
from ..steps import output_rows
from ..steps.basics import first_row_of, inlined, named
from .block import B, H, query_work, rows_of_lane, tile_of, word
from .tile_scores import dropout


def make(config, finish):
    """-> load_sinks and write, device functions. finish: of fragment_softmax."""
    scale_kept, work_of, recompute_rows = dropout(config).scale_kept, query_work(config), recompute.make(config, 16)
    write_rows = output_rows.make(config, 16)
    has_sinks, load = sum_term.make(config) is not None, sum_term.on_fragments(config, 2)

    @inlined
    def load_sinks(distance, work_tile, arrays, strides):
        """distance (2,) <- the sinks of the lane's rows. Free after the last tile; `write` reads them there."""
        if has_sinks:
            first_row, lane = rows_of_lane()
            lane_row = first_row + first_row_of(lane)
            load(distance, word(work_tile, B), word(work_tile, H), lane_row, arrays, strides)

    @inlined
    def write(work_tile, registers, arrays, strides, sizes, score):
        """A warp writes its rows. registers: ConsumerRegisters."""
        tile, (first_row, lane) = tile_of(work_tile), rows_of_lane()
        inverse_l, lse = registers.alpha, registers.scores.distance  # the same registers, free by now
        finish(registers.m, registers.l, inverse_l, lse)
        scale_kept(inverse_l, score)
        work = work_of(tile, work_tile, arrays, strides, sizes)
        nonfinite = write_rows(registers.acc_o, inverse_l, lse, first_row, lane, work, arrays, strides, sizes)
        if nonfinite != 0:
            recompute_rows(nonfinite, first_row, lane, tile, arrays, strides, sizes, score)

    return named(load_sinks, write)
