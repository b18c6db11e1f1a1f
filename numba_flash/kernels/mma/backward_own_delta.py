"""lse and delta in the block that computes dK, dV and dQ: it does the work of backward_preprocess for its queries.

They go to shared memory, in the order of kernels/steps/lse_delta.py. They also go to global memory: rows that are
computed again read them there, and so do the kernels behind. Used by backward.py with config.delta.
"""

import numpy as np
from numba import int32

from ...ptx import ld_st, special
from ..steps import lse_delta
from ..steps.basics import inlined
from ..steps.row_products import Rows
from . import backward_preprocess


def make(config):
    """-> start(smem, sequence, h, arrays, strides, sizes), a device function, for the only tile of queries of head h.
    The caller owes a barrier."""
    delta, rows_at = config.own_delta, backward_preprocess.of_rows(config.own_delta)
    lanes, count = delta.lanes, delta.rows_of_lanes
    at_a_time = config.threads // lanes * count

    @inlined
    def start(smem, sequence, h, arrays, strides, sizes):
        thread = special.thread_index()
        lane = int32(thread & int32(lanes - 1))
        for step in range(-(-config.tile_m // at_a_time)):
            first = int32(thread // lanes * count + step * at_a_time)
            if first < config.tile_m:
                rows = Rows(sequence, h, int32(0), first)
                known = rows_at.find(rows, lane, arrays, strides, sizes)
                rows_at.put(known, rows, arrays, sizes)
                if known.own:
                    at = int32(smem + 4 * int32(lse_delta.place(known.query)))
                    ld_st.store_b32(at, known.lse.view(np.uint32))
                    ld_st.store_b32(at + 4 * lse_delta.MINUS_DELTA, known.minus_delta.view(np.uint32))

    return start
