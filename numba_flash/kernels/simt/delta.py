"""delta = rowsum(dO * O) - dlse: what is subtracted from every dP of a row, in every backward.

Source: Dao et al., FlashAttention (2022), appendix B; equation 16 and listing 6 of docs/backward.md. For
p = softmax(s), ds_j = p_j (dp_j - sum_k p_k dp_k), and the sum over a row of keys is

    sum_k P_ik dP_ik = sum_k P_ik (dO_i . V_k) = dO_i . (sum_k P_ik V_k) = dO_i . O_i

so it needs only the row itself. With lse an output of its own, d lse_i / d s_j = p_j adds dlse_i to the
bracket. A few lanes share rows (kernels/steps/row_products.py). Where parts of dQ are added up
in turns (kernels/mma/backward_dq_parts.py), their counts and the ticket become 0 here.

Launch: grid (units of 4 queries of all heads / those of a block, rounded up).
"""

from numba import cuda, int32, uint32

from ...ptx import special
from ..steps import lse_delta, row_products
from ..steps.sequence import lse_row, query_row


def make(config):
    lanes, count, turns_of, turns_at = config.lanes, config.rows_of_lanes, config.turns_of, lse_delta.TURNS_AT
    products = row_products.make(config)

    @cuda.jit
    def delta_of_rows(arrays, strides, sizes):
        thread, block = special.thread_index(), special.block_index()
        lane = int32(thread % lanes)
        rows = products.rows_of(thread, block, arrays, strides, sizes)
        sequence, h, q_index = rows.sequence, rows.h, int32(rows.first + (lane & int32(count - 1)))
        total = products.sum_of_row(rows, lane, arrays, strides)  # listing 6, line 1
        if lane < count and q_index < sequence.seqlen_q:
            if config.has_dlse:  # line 2
                total -= arrays.dlse[query_row(strides.dlse, sequence, h, q_index)]
            arrays.delta[lse_row(sequence, h, q_index, sizes)] = total
            if turns_of:
                if q_index % turns_of == 0:
                    m_tiles = (sequence.seqlen_q + turns_of - 1) // turns_of
                    arrays.turns[turns_at + rows.head_of_all * m_tiles + q_index // turns_of] = uint32(0)
                if block == 0 and thread == 0:
                    arrays.turns[0] = uint32(0)

    return delta_of_rows
