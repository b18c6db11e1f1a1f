"""FlashAttention-2, one thread per query row: listing 5 of docs/first_kernels.md.

Source: Dao, FlashAttention-2 (2023), algorithm 1; equations 9 to 11 of docs/algorithm.md. Letters: m is the running
row maximum, l the running sum of e^(s - m), s a score and p = e^(s - m_new) its weight. Scores and then weights are
kept in the tile S. alpha = e^(m_old - m_new). q_index is the listing's n.

Compared with v1, the loops are exchanged. A block owns a tile of queries and loops over the keys, so m, l and O_i stay
in registers and nothing is read back. O is divided by l once, after the last tile (equation 10); v1 divides in every
step. Query tiles are independent, so each is a block of its own. v1 starts only batch x heads blocks, so with one long
sequence most multiprocessors are idle.

Launch: grid (batch * heads * query tiles), block (tile_m). Any lengths: threads past the last query take part in loads
and barriers and store nothing. With config.pages the keys lie in the pages of a cache (paged.py).
"""

import math

from numba import cuda

from ...ptx import local, shared
from ..score import at_key, make as make_score, sum_term, tile_walk
from ..steps import elements, rows, sequence, tiles
from ..steps.sequence import key_range, kv_head, lse_row, query_of, query_row
from . import paged


def make(config):
    plan, compute = config.shared_layout(), elements.COMPUTE_TYPES[config.dtype]
    q_row, s_row = config.k_row + config.pad, config.tile_n + config.pad
    places, keys = (paged, paged) if config.pages else (sequence, tiles)
    load_q = tiles.query_loader(config, q_row, config.head_dim)
    load_k = keys.key_loader(config, config.k_row, config.head_dim)
    load_v = keys.key_loader(config, config.v_row, config.head_dim_v)
    keys_at_once = rows.at_once(config.tile_n)  # scores side by side, so that one read of q serves them all
    dot_rows = rows.dots(config.k_row, keys_at_once, compute(0))
    add_rows = rows.adder(config.v_row, config.tile_n, config.dtype, compute)
    store, minus_inf = elements.storer(config.dtype), compute(-math.inf)
    sequence_of, scores = places.make(config), make_score(config.scores)
    first_m_and_l, walk = sum_term.start(config), tile_walk.make(config)

    @cuda.jit
    def flash_attention_v2(arrays, strides, sizes, score):
        thread = cuda.threadIdx.x
        m_tiles = (sizes.seqlen_q + config.tile_m - 1) // config.tile_m
        i = cuda.blockIdx.x % m_tiles  # listing 5, line 1: one block for each i
        h = cuda.blockIdx.x // m_tiles % sizes.heads
        h_kv = kv_head(h, sizes)
        sequence = sequence_of(cuda.blockIdx.x // (sizes.heads * m_tiles), arrays, strides, sizes)

        smem = cuda.shared.array(0, compute)  # 0: the launch says how much
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        s_smem = shared.pointer(smem, plan.s)  # (tile_m, s_row)
        s_part = local.array(keys_at_once, compute)  # (keys_at_once,)
        o_k = local.array(config.v_row, compute)  # (v_row,): row k of O_i, in registers

        # line 2: load Q_i
        first_row = i * config.tile_m
        if config.packed:
            if first_row >= sequence.seqlen_q:
                return
        load_q(q_smem, arrays.q, strides.q, sequence, h, first_row, thread)

        # lines 3 and 4: this thread's row k, and its m, l and O
        q_index = first_row + thread
        query = query_of(sequence, h, q_index, sizes)
        q_k, s_k = thread * q_row, thread * s_row  # where row k begins in Q_i and S
        m, l = first_m_and_l(sequence.b, h, arrays, strides)  # -inf and 0, or a sink and 1
        for x in range(config.v_row):
            o_k[x] = compute(0)

        # line 5: the tiles that some row of the block sees
        last_row = min(first_row + config.tile_m, sequence.seqlen_q) - 1
        begin, _, _, end = key_range(sequence, first_row, last_row, sizes, config.tile_n)
        mask_row = walk.row(sequence.b, h, first_row, arrays, strides)
        for j in range(begin, end):  # trace: ends
            if not walk.is_nonempty(mask_row, j, arrays, strides):  # mask_mod removes all of the tile
                continue
            needs_mask = walk.needs_mask(mask_row, j, arrays, strides)
            cuda.syncthreads()  # line 6: everyone is done with the tiles before
            first_y = j * config.tile_n
            load_k(k_smem, arrays.k, strides.k, sequence, h_kv, first_y, thread)
            load_v(v_smem, arrays.v, strides.v, sequence, h_kv, first_y, thread)
            cuda.syncthreads()
            if q_index < sequence.seqlen_q:
                # lines 7 to 11: S[k, :] = Q_i[k, :] . K_j^T and its maximum
                max_tmp = minus_inf  # trace: begins
                sees = False
                for y in range(0, config.tile_n, keys_at_once):
                    dot_rows(s_part, q_smem, q_k, k_smem, y * config.k_row)
                    for u in range(keys_at_once):
                        s = scores.masked(s_part[u], query, first_y + y + u, needs_mask, arrays, strides, score)
                        s_smem[s_k + y + u] = s
                        max_tmp = max(max_tmp, s)
                        sees = sees or s != minus_inf
                if sees:  # line 12: else m_new could still be -inf, and -inf - -inf is NaN. trace: scores
                    # lines 13 to 17
                    m_new = max(max_tmp, m)
                    alpha = math.exp(m - m_new)
                    sum_tmp = compute(0)
                    for y in range(config.tile_n):
                        p = math.exp(s_smem[s_k + y] - m_new)
                        s_smem[s_k + y] = p * scores.weight_factor(at_key(query, first_y + y), arrays, sizes, score)
                        sum_tmp += p
                    l = alpha * l + sum_tmp  # trace: weights
                    m = m_new
                    # line 18: O_i[k, :] = alpha * O_i[k, :] + P[k, :] . V_j
                    add_rows(o_k, alpha, s_smem, s_k, v_smem, 0)

        # lines 19 and 20: the one division. A row without keys is zero, and its lse -inf
        if q_index < sequence.seqlen_q:
            inverse = compute(0)
            row_lse = minus_inf
            if l != 0:
                inverse = compute(1) / l
                row_lse = m + math.log(l)
            o_base = query_row(strides.o, sequence, h, q_index)
            for x in range(config.head_dim_v):
                store(arrays.o, o_base + x * strides.o[3], o_k[x] * inverse)
            if config.write_lse:
                arrays.lse[lse_row(sequence, h, q_index, sizes)] = row_lse

    return flash_attention_v2
