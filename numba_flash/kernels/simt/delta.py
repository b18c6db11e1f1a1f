"""delta = rowsum(dO * O) - dlse: what is subtracted from every dP of a row, in every backward.

Source: Dao et al., FlashAttention (2022), appendix B; equation 16 and listing 6 of docs/backward.md. For
p = softmax(s), ds_j = p_j (dp_j - sum_k p_k dp_k), and the sum over a row of keys is

    sum_k P_ik dP_ik = sum_k P_ik (dO_i . V_k) = dO_i . (sum_k P_ik V_k) = dO_i . O_i

so it needs only the row itself. With lse an output of its own, d lse_i / d s_j = p_j adds dlse_i to the
bracket. A few threads share a row, so that neighbouring ones read neighbouring columns. Where parts of dQ are added up
in turns (kernels/mma/backward_dq_parts.py), their counts and the ticket become 0 here.

Launch: grid (batch * heads * row tiles).
"""

from numba import cuda, uint32

from ...ptx import shared
from ..steps import elements, lse_delta
from ..steps import sequence as sequences
from ..steps.sequence import lse_row, query_row


def make(config):
    product, turns_of, turns_at = lse_delta.product(config), config.turns_of, lse_delta.TURNS_AT
    compute, queries_of = elements.COMPUTE_TYPES[config.dtype], sequences.queries(config)
    load = elements.loader(config.dtype, compute)

    @cuda.jit
    def delta_of_rows(arrays, strides, sizes):
        heads = sizes.heads
        thread = cuda.threadIdx.x
        tiles = (sizes.seqlen_q + config.rows - 1) // config.rows
        b = cuda.blockIdx.x // (heads * tiles)
        h = cuda.blockIdx.x // tiles % heads
        sequence = queries_of(b, arrays, strides, sizes)
        seqlen_q = sequence.seqlen_q
        lane = thread % config.lanes
        q_index = cuda.blockIdx.x % tiles * config.rows + thread // config.lanes
        parts = shared.pointer(cuda.shared.array(0, compute), 0)  # (rows, lanes)

        part = compute(0)  # listing 6, line 1
        if q_index < seqlen_q:
            do_base, o_base = query_row(strides.do, sequence, h, q_index), query_row(strides.o, sequence, h, q_index)
            for x in range(lane, config.head_dim_v, config.lanes):
                part += product(load(arrays.do, do_base + x * strides.do[3]), load(arrays.o, o_base + x * strides.o[3]))
        parts[thread] = part
        cuda.syncthreads()
        if lane == 0 and q_index < seqlen_q:
            total = compute(0)
            for other in range(config.lanes):
                total += parts[thread + other]
            if config.has_dlse:  # line 2
                total -= arrays.dlse[query_row(strides.dlse, sequence, h, q_index)]
            arrays.delta[lse_row(sequence, h, q_index, sizes)] = total
            if turns_of:
                if q_index % turns_of == 0:
                    m_tiles = (seqlen_q + turns_of - 1) // turns_of
                    arrays.turns[turns_at + (b * heads + h) * m_tiles + q_index // turns_of] = uint32(0)
                if cuda.blockIdx.x == 0 and q_index == 0:
                    arrays.turns[0] = uint32(0)

    return delta_of_rows
