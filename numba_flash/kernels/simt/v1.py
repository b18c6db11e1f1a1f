"""FlashAttention-1, one thread per query row: listing 4 of docs/first_kernels.md.

Source: Dao et al., FlashAttention (2022), algorithm 1; equations 7 and 8 of docs/algorithm.md. Letters: l and m are
the running row sum and row maximum in global memory (sum_prev and max_prev when read, sum_new and max_new when
written). S holds the scores of a row and then e^(S - max_tmp). q_index is the listing's n.

The outer loop runs over K and V tiles, the inner loop over Q tiles. A block owns one head. It keeps K_j and V_j during
the inner loop. O, l and m are read, rescaled and written back in each outer step.

Between the outer steps O stays in the computing precision (acc_o). In float16, each rescaling would lose a bit. For
float32 and float64 acc_o has the precision of O itself. The division is by sum_new alone: the factors e^max of
numerator and denominator are first subtracted as exponents, so that large scores do not overflow.

Launch: grid (batch * heads), block (tile_m).
"""

import math

from numba import cuda

from ...ptx import shared
from ..score import at_key, make as make_score, sum_term, tile_walk
from ..steps import elements, sequence, tiles
from ..steps.sequence import key_range, kv_head, lse_row, query_of, query_row


def make(config):
    plan, compute = config.shared_layout(), elements.COMPUTE_TYPES[config.dtype]
    q_row, s_row = config.k_row + config.pad, config.tile_n + config.pad
    load_q = tiles.query_loader(config, q_row, config.head_dim)
    load_k = tiles.key_loader(config, config.k_row, config.head_dim)
    load_v = tiles.key_loader(config, config.v_row, config.head_dim_v)
    store, minus_inf = elements.storer(config.dtype), compute(-math.inf)
    sequence_of, scores = sequence.make(config), make_score(config)
    first_m_and_l, walk = sum_term.start(config), tile_walk.make(config)

    @cuda.jit
    def flash_attention_v1(arrays, strides, sizes, score):
        acc_o, row_sum, row_max = arrays.acc_o, arrays.row_sum, arrays.row_max
        thread = cuda.threadIdx.x
        h = cuda.blockIdx.x % sizes.heads
        h_kv = kv_head(h, sizes)
        sequence = sequence_of(cuda.blockIdx.x // sizes.heads, arrays, strides, sizes)
        m_tiles = (sequence.seqlen_q + config.tile_m - 1) // config.tile_m
        lm_base = lse_row(sequence, h, 0, sizes)  # of l, m, lse, and times head_dim_v of acc_o

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        s_smem = shared.pointer(smem, plan.s)  # (tile_m, s_row)
        q_k, s_k = thread * q_row, thread * s_row  # where row k begins in Q_i and S

        # listing 4, line 1: l = 0, m = -inf, O = 0; a sink comes first
        for q_index in range(thread, sequence.seqlen_q, config.tile_m):
            row_max[lm_base + q_index], row_sum[lm_base + q_index] = first_m_and_l(sequence.b, h, arrays, strides)
            for x in range(config.head_dim_v):
                acc_o[(lm_base + q_index) * config.head_dim_v + x] = compute(0)

        # line 2: the tiles that some query sees
        begin, _, _, end = key_range(sequence, 0, sequence.seqlen_q - 1, sizes, config.tile_n)
        for j in range(begin, end):
            cuda.syncthreads()  # line 3: everyone is done with the tiles before
            first_y = j * config.tile_n
            load_k(k_smem, arrays.k, strides.k, sequence, h_kv, first_y, thread)
            load_v(v_smem, arrays.v, strides.v, sequence, h_kv, first_y, thread)
            for i in range(m_tiles):  # line 4. trace: ends
                first_row = i * config.tile_m
                mask_row = walk.row(sequence.b, h, first_row, arrays, strides)
                if not walk.is_nonempty(mask_row, j, arrays, strides):  # mask_mod removes all of the tile
                    continue
                needs_mask = walk.needs_mask(mask_row, j, arrays, strides)
                cuda.syncthreads()  # line 5: everyone is done with the Q tile before; K_j and V_j are there
                load_q(q_smem, arrays.q, strides.q, sequence, h, first_row, thread)
                cuda.syncthreads()
                q_index = first_row + thread  # line 6: thread k has row k, query n
                query = query_of(sequence, h, q_index, sizes)
                sees_tile = query.first_key < first_y + config.tile_n and first_y < query.end_key
                if q_index < sequence.seqlen_q and sees_tile:
                    max_tmp = minus_inf  # trace: begins
                    sees = False
                    for y in range(config.tile_n):  # lines 7 to 11
                        total = compute(0)
                        for x in range(config.k_row):
                            total += q_smem[q_k + x] * k_smem[y * config.k_row + x]
                        s = scores.masked(total, query, first_y + y, needs_mask, arrays, strides, score)
                        max_tmp = max(max_tmp, s)
                        sees = sees or s != minus_inf
                        s_smem[s_k + y] = s
                    if sees:  # line 12: else max_tmp is -inf, and -inf - -inf is NaN. trace: scores
                        sum_tmp = compute(0)
                        for y in range(config.tile_n):  # lines 13 and 14
                            p = math.exp(s_smem[s_k + y] - max_tmp)
                            s_smem[s_k + y] = p * scores.weight_factor(at_key(query, first_y + y), arrays, sizes, score)
                            sum_tmp += p
                        sum_prev = row_sum[lm_base + q_index]  # line 15
                        max_prev = row_max[lm_base + q_index]
                        max_new = max(max_tmp, max_prev)  # line 16
                        old = sum_prev * math.exp(max_prev - max_new)  # line 17
                        new = math.exp(max_tmp - max_new)
                        sum_new = sum_tmp * new + old  # line 18. trace: weights
                        row_sum[lm_base + q_index] = sum_new  # line 19
                        row_max[lm_base + q_index] = max_new
                        for x in range(config.head_dim_v):  # lines 20 and 21
                            value = compute(0)
                            for y in range(config.tile_n):
                                p = s_smem[s_k + y]
                                if p != 0:  # a key without weight adds nothing, even where v is NaN or Inf
                                    value += p * v_smem[y * config.v_row + x]
                            o_at = (lm_base + q_index) * config.head_dim_v + x
                            acc_o[o_at] = acc_o[o_at] * (old / sum_new) + (new / sum_new) * value  # line 22

        # line 23: round O, and give lse = m + log(l). A row without keys is zero, and its lse -inf
        for q_index in range(thread, sequence.seqlen_q, config.tile_m):
            o_base = query_row(strides.o, sequence, h, q_index)
            for x in range(config.head_dim_v):
                store(arrays.o, o_base + x * strides.o[3], acc_o[(lm_base + q_index) * config.head_dim_v + x])
            if config.write_lse:
                row_lse = minus_inf
                if row_sum[lm_base + q_index] != 0:
                    row_lse = row_max[lm_base + q_index] + math.log(row_sum[lm_base + q_index])
                arrays.lse[lm_base + q_index] = row_lse

    return flash_attention_v1
