"""dQ of a packed sequence whose keys are one tile: the block that owns it writes dQ itself, scaled and in 16 bits.

A part of dQ is all of it there. So it needs no sum in float32, which would be twice as many bytes, written and read
again. The warp that adds the parts of other sequences (backward_dq_sums.py) takes these parts from the same places. The
counter of a query tile then says that its dQ is written, and whether all of it is finite. backward_round.py reads it.
"""

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import bar, cvt, ld_st, local, memory, special, vote
from ..steps.basics import inlined
from ..steps.lse_delta import TURNS_AT
from ..steps.sequence import query_row
from . import block, pipeline
from .backward_work import first_tile, following_tile
from .block import BEGIN, MEMBERS, QUERIES, STEP, STOP, H

WRITTEN = 2  # a counter's value; one more: some element is not finite
CHUNK_BYTES = 128 * 16  # of a part: 8 columns of 64 queries


def present(config):
    """Whether a block writes dQ itself: 16 bytes at a time."""
    return config.packed and config.head_dim % 8 == 0


def make(config, tiles_before):
    """-> write_alone, a device function of a warp. tiles_before: of backward_dq_sums."""
    tile_m, part_bytes, plan = config.tile_m, config.dq_part_bytes, config.shared_layout()
    own_columns, own_queries = (64, 0) if config.dq_panels == 2 else (0, 64)  # how far apart the warpgroups' parts are
    word, ring = block.state_of(config).read_alone, pipeline.of_backward(config).dq
    sequence_of = block.sequence_of_work(config, whole_warp=False, queries=True)
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def write_part(staged, lane, queries, columns, target, at, row, factor):
        """Writes `queries` rows of `columns` columns. at: index of the first; row: from one to the next. Eight lanes
        write a row. A thread's staged numbers are adjacent: two columns of a row and of the row 8 behind it. ->
        whether some element of the lane's is not finite."""
        four = local.array(4, uint32)
        words = local.array(4, uint32)
        column, nonfinite = int32((lane & int32(7)) * 8), float32(0)
        for step in range(special.opaque(int32(8))):  # written out it would take more registers than there are
            query = int32((step >> 1) * 16 + (step & 1) * 4 + (lane >> int32(3)))
            source = staged + (lane & int32(7)) * CHUNK_BYTES + ((query >> 4) * 32 + (query & 7) * 4) * 16
            for r in range(2):
                if column < columns and query + r * 8 < queries:
                    for pair in range(4):
                        ld_st.load_v4(four, 0, source + pair * 16)
                        low = four[2 * r].view(np.float32) * factor
                        high = four[2 * r + 1].view(np.float32) * factor
                        words[pair] = pack(low, high)
                        nonfinite += low * float32(0) + high * float32(0)  # NaN when one of them is NaN or Inf
                    memory.store_v4(memory.address(target, at + (query + r * 8) * row + column), words, 0)
        return nonfinite != 0

    @inlined
    def write_alone(base, own, n, me, arrays, strides, sizes, score):
        """One warp writes a consumer warpgroup's parts of dQ of the block's tile; the first one is the n-th of all."""
        lane = special.thread_index() & int32(31)
        member, i = int32(0), first_tile(word(own, BEGIN), word(own, STOP), word(own, STEP))
        end = int32(n + word(own, MEMBERS) * (word(own, STOP) - word(own, BEGIN)))
        while n < end:
            first_query, columns = int32(i * tile_m + me * own_queries), int32(config.head_dim - me * own_columns)
            sequence = sequence_of(own, arrays, strides, sizes)
            at = query_row(strides.dq, sequence, int32(word(own, H) + member), int64(first_query)) + me * own_columns
            ring.consumer_wait(base + 8 * me, n)
            staged, left = base + plan.dq + (ring.stage(n) * 2 + me) * part_bytes, word(own, QUERIES) - first_query
            bad = write_part(staged, lane, left, columns, arrays.dq, at, strides.dq[2], score.scale)
            bar.warp_sync()  # all lanes have read the part
            ring.consumer_release(base + 8 * me, n, lane == 0)
            bad = vote.any_lane(uint32(1) if bad else uint32(0))
            if lane == 0:
                m_tiles, before_head = tiles_before(own, sizes)
                turn = TURNS_AT + (before_head + member * m_tiles + i) * 2 + me
                arrays.turns[turn] = uint32(WRITTEN + 1) if bad != 0 else uint32(WRITTEN)
            n = int32(n + 1)
            i, member = following_tile(i, member, word(own, STEP), word(own, MEMBERS))

    return write_alone
