"""FlashAttention-1, one thread per query row: listing 4 of docs/algorithm.md.

Source: Dao et al., FlashAttention (2022), algorithm 1; equations 7 and 8 of docs/algorithm.md. Letters: l and m are
the running row sum and row maximum in global memory (sum_prev and max_prev when read, sum_new and max_new when
written). S holds the scores of a row and then e^(S - max_tmp). q_index is the listing's n.

The outer loop runs over K and V tiles, the inner loop over Q tiles. A block owns one head. It keeps K_j and V_j during
the inner loop. O, l and m are read, rescaled and written back in each outer step.

Between the outer steps O stays in the computing precision (acc_o). In float16, each rescaling would lose a bit. For
float32 and float64 acc_o has the precision of O itself. The division is by sum_new alone: the factors e^max of
numerator and denominator are first subtracted as exponents, so that large scores do not overflow.

Launch: grid (batch * heads), block (tile_m), config.shared_bytes of dynamic shared memory.
"""

import math

from numba import cuda

from ...ptx import shared
from .. import score
from ..score import At, positions, sum_terms, tile_walk
from ..steps import elements, tiles
from ..steps.plain import row_keys
from ..steps.sequence import key_range, lse_row
from ..steps.tiles import row_base


def make(config):
    plan = config.shared_layout()
    q_row, s_row = config.k_row + config.pad, config.tile_n + config.pad
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    load_q = tiles.loader(load, compute(0), config.tile_m, q_row, config.head_dim)
    load_k = tiles.loader(load, compute(0), config.tile_n, config.k_row, config.head_dim)
    load_v = tiles.loader(load, compute(0), config.tile_n, config.v_row, config.head_dim_v)
    keys_and_start = positions.make(config)
    made = score.make(config)
    score_value, visible, count = made.value, made.visible_in, made.count
    walk = tile_walk.make(config)
    row_start = sum_terms.start(config)
    minus_inf = compute(-math.inf)

    @cuda.jit
    def flash_attention_v1(arrays, strides, sizes, score):
        heads, seqlen_q, left, right = sizes.heads, sizes.seqlen_q, sizes.left, sizes.right
        acc_o, row_sum, row_max = arrays.acc_o, arrays.row_sum, arrays.row_max
        thread = cuda.threadIdx.x
        b = cuda.blockIdx.x // heads
        h = cuda.blockIdx.x % heads
        h_kv = h // (heads // sizes.heads_kv)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        m_tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
        lm_base = lse_row(b, h, 0, sizes)  # of l, m, lse, and times head_dim_v of acc_o

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        s_smem = shared.pointer(smem, plan.s)  # (tile_m, s_row)
        q_k, s_k = thread * q_row, thread * s_row  # where row k begins in Q_i and S

        # listing 4, line 1: l = 0, m = -inf, O = 0; a term of l that is no key's comes first
        for q_index in range(thread, seqlen_q, config.tile_m):
            row_max[lm_base + q_index], row_sum[lm_base + q_index] = row_start(b, h, arrays, strides)
            for x in range(config.head_dim_v):
                acc_o[(lm_base + q_index) * config.head_dim_v + x] = compute(0)

        # line 2: the tiles that some query sees
        begin, _, _, end = key_range(q_start, seqlen_q - 1 + q_start, keys, sizes, config.tile_n)
        for j in range(begin, end):
            cuda.syncthreads()  # everyone is done with the tiles before
            # line 3: load K_j, V_j
            first_y = j * config.tile_n
            k_base, v_base = row_base(strides.k, b, h_kv, first_y), row_base(strides.v, b, h_kv, first_y)
            load_k(k_smem, arrays.k, k_base, strides.k, keys - first_y, thread, config.tile_m)
            load_v(v_smem, arrays.v, v_base, strides.v, keys - first_y, thread, config.tile_m)
            for i in range(m_tiles):  # line 4
                first_row = i * config.tile_m
                states = walk.row(b, h, first_row, arrays, strides)
                if not walk.shows(states, j, arrays, strides):  # a mask_mod shows nothing of K_j to Q_i
                    continue
                asks = walk.asks(states, j, arrays, strides)  # whether mask_mod hides some of it
                cuda.syncthreads()  # everyone is done with the Q tile before; K_j and V_j are there
                # line 5: load Q_i
                load_q(
                    q_smem,
                    arrays.q,
                    row_base(strides.q, b, h, first_row),
                    strides.q,
                    seqlen_q - first_row,
                    thread,
                    config.tile_m,
                )
                cuda.syncthreads()
                q_index = first_row + thread  # line 6: thread k has row k, query n
                q_pos = q_index + q_start
                first_key, end_key = row_keys(q_pos, left, right, keys)
                if q_index < seqlen_q and first_key < first_y + config.tile_n and first_y < end_key:
                    max_tmp = minus_inf
                    sees = False
                    for y in range(config.tile_n):  # lines 7 to 11
                        total = compute(0)
                        for x in range(config.k_row):
                            total += q_smem[q_k + x] * k_smem[y * config.k_row + x]
                        k_index = first_y + y
                        at = At(b, h, q_index, k_index, q_pos)
                        s = minus_inf
                        if first_key <= k_index and k_index < end_key and visible(at, asks, arrays, strides):
                            s = score_value(total, at, arrays, strides, score)
                        max_tmp = max(max_tmp, s)
                        sees = sees or s != minus_inf
                        s_smem[s_k + y] = s
                    if sees:  # line 12: else max_tmp is -inf, and -inf - -inf is NaN
                        sum_tmp = compute(0)
                        for y in range(config.tile_n):  # lines 13 and 14
                            p = math.exp(s_smem[s_k + y] - max_tmp)
                            s_smem[s_k + y] = p * count(At(b, h, q_index, first_y + y, q_pos), arrays, sizes, score)
                            sum_tmp += p
                        sum_prev = row_sum[lm_base + q_index]  # line 15
                        max_prev = row_max[lm_base + q_index]
                        max_new = max(max_tmp, max_prev)  # line 16
                        old = sum_prev * math.exp(max_prev - max_new)  # line 17
                        new = math.exp(max_tmp - max_new)
                        sum_new = sum_tmp * new + old  # line 18
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
        for q_index in range(thread, seqlen_q, config.tile_m):
            o_base = row_base(strides.o, b, h, q_index)
            for x in range(config.head_dim_v):
                store(arrays.o, o_base + x * strides.o[3], acc_o[(lm_base + q_index) * config.head_dim_v + x])
            if config.write_lse:
                row_lse = minus_inf
                if row_sum[lm_base + q_index] != 0:
                    row_lse = row_max[lm_base + q_index] + math.log(row_sum[lm_base + q_index])
                arrays.lse[lm_base + q_index] = row_lse

    return flash_attention_v1
