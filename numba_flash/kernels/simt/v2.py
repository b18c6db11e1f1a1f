"""FlashAttention-2, one thread per query row: listing 5 of docs/algorithm.md.

Source: Dao, FlashAttention-2 (2023), algorithm 1; equations 9 to 11 of docs/algorithm.md. Letters: m is the running
row maximum, l the running sum of e^(s - m), s a score and p = e^(s - m_new) its weight. Scores and then weights are
kept in the tile S. alpha = e^(m_old - m_new). q_index is the listing's n.

Compared with v1, the loops are exchanged. A block owns a tile of queries and loops over the keys, so m, l and O_i stay
in registers and nothing is read back. O is divided by l once, after the last tile (equation 10); v1 divides in every
step. Query tiles are independent, so each is a block of its own. v1 starts only batch x heads blocks, so with one long
sequence most multiprocessors are idle.

Launch: grid (batch * heads * query tiles), block (tile_m), config.shared_bytes of dynamic shared
memory. Any lengths: threads past the last query take part in loads and barriers and store nothing.
"""

import math

from numba import cuda

from ...ptx import local, shared
from ..score import At, positions, sum_terms, tile_walk
from ..score import make as make_score
from ..steps import elements, tiles
from ..steps.plain import row_keys
from ..steps.sequence import key_range, lse_row
from ..steps.tiles import row_base

# Elements of a product at a time, which in float32 are one 16-byte read of K. Rows of K and V are padded with zeros to
# a multiple of it, so that the loop needs no test for the end of a row.
DEPTH = 4


def make(config):
    plan = config.shared_layout()
    k_row, v_row = config.k_row, config.v_row  # head_dim and head_dim_v, rounded up to a multiple of DEPTH
    q_row, s_row = k_row + config.pad, config.tile_n + config.pad
    wide = (8, 4) if config.dtype == "float64" else (16, 8, 4)
    columns = next(c for c in wide if v_row % c == 0)  # outputs side by side: one read of p serves them all
    keys_at_once = 8 if config.tile_n % 8 == 0 else 4  # scores side by side, so that one read of q serves them all
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    # `load` reads one element as `compute`. Then come the padding value, rows, elements from row to row, and columns.
    load_q = tiles.loader(load, compute(0), config.tile_m, q_row, config.head_dim)
    load_k = tiles.loader(load, compute(0), config.tile_n, k_row, config.head_dim)
    load_v = tiles.loader(load, compute(0), config.tile_n, v_row, config.head_dim_v)
    keys_and_start = positions.make(config)
    made = make_score(config)
    walk = tile_walk.make(config)
    row_start = sum_terms.start(config)
    minus_inf = compute(-math.inf)

    @cuda.jit
    def flash_attention_v2(arrays, strides, sizes, score):
        heads, seqlen_q, left, right = sizes.heads, sizes.seqlen_q, sizes.left, sizes.right
        thread = cuda.threadIdx.x
        m_tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
        b = cuda.blockIdx.x // (heads * m_tiles)
        h = cuda.blockIdx.x // m_tiles % heads
        i = cuda.blockIdx.x % m_tiles  # listing 5, line 1: one block for each i
        h_kv = h // (heads // sizes.heads_kv)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)

        smem = cuda.shared.array(0, compute)  # 0: the launch says how much
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        s_smem = shared.pointer(smem, plan.s)  # (tile_m, s_row)
        s_part = local.array(keys_at_once, compute)  # (keys_at_once,)
        o_part = local.array(columns, compute)  # (columns,)
        o_k = local.array(v_row, compute)  # (v_row,): row k of O_i, in registers

        # line 2: load Q_i; behind the strides: how many rows exist, this thread, and how many threads there are
        first_row = i * config.tile_m
        q_base = row_base(strides.q, b, h, first_row)
        load_q(q_smem, arrays.q, q_base, strides.q, seqlen_q - first_row, thread, config.tile_m)

        # lines 3 and 4: this thread's row k, the keys that it sees, and its m, l and O
        q_index = first_row + thread
        q_pos = q_index + q_start
        first_key, end_key = row_keys(q_pos, left, right, keys)
        q_k, s_k = thread * q_row, thread * s_row  # where row k begins in Q_i and S
        m, l = row_start(b, h, arrays, strides)  # -inf and 0, or a sink and 1
        for x in range(v_row):
            o_k[x] = compute(0)

        # line 5: the tiles that some row of the block sees
        last_row = min(first_row + config.tile_m, seqlen_q) - 1
        begin, _, _, end = key_range(first_row + q_start, last_row + q_start, keys, sizes, config.tile_n)
        states = walk.row(b, h, first_row, arrays, strides)
        for j in range(begin, end):
            if not walk.shows(states, j, arrays, strides):  # a mask_mod shows nothing of it
                continue
            asks = walk.asks(states, j, arrays, strides)  # whether mask_mod hides some of it
            cuda.syncthreads()  # everyone is done with the tiles before
            # line 6: load K_j, V_j
            first_y = j * config.tile_n
            k_base, v_base = row_base(strides.k, b, h_kv, first_y), row_base(strides.v, b, h_kv, first_y)
            load_k(k_smem, arrays.k, k_base, strides.k, keys - first_y, thread, config.tile_m)
            load_v(v_smem, arrays.v, v_base, strides.v, keys - first_y, thread, config.tile_m)
            cuda.syncthreads()
            if q_index < seqlen_q:
                # lines 7 to 11: S[k, :] = Q_i[k, :] . K_j^T and its maximum
                max_tmp = minus_inf
                sees = False
                for y0 in range(0, config.tile_n, keys_at_once):
                    for u in range(keys_at_once):
                        s_part[u] = compute(0)
                    for x0 in range(0, k_row, DEPTH):
                        for u in range(keys_at_once):
                            for x in range(x0, x0 + DEPTH):
                                s_part[u] += q_smem[q_k + x] * k_smem[(y0 + u) * k_row + x]
                    for u in range(keys_at_once):
                        k_index = first_y + y0 + u
                        at = At(b, h, q_index, k_index, q_pos)
                        s = minus_inf
                        if first_key <= k_index and k_index < end_key and made.visible_in(at, asks, arrays, strides):
                            s = made.value(s_part[u], at, arrays, strides, score)
                        s_smem[s_k + y0 + u] = s
                        max_tmp = max(max_tmp, s)
                        sees = sees or s != minus_inf
                if sees:  # line 12: else m_new could still be -inf, and -inf - -inf is NaN
                    # lines 13 to 17
                    m_new = max(max_tmp, m)
                    alpha = math.exp(m - m_new)
                    sum_tmp = compute(0)
                    for y in range(config.tile_n):
                        p = math.exp(s_smem[s_k + y] - m_new)
                        s_smem[s_k + y] = p * made.count(At(b, h, q_index, first_y + y, q_pos), arrays, sizes, score)
                        sum_tmp += p
                    l = alpha * l + sum_tmp
                    m = m_new
                    # line 18: O_i[k, :] = alpha * O_i[k, :] + P[k, :] . V_j
                    for x0 in range(0, v_row, columns):
                        for x in range(columns):
                            o_part[x] = compute(0)  # each tile is summed by itself, which rounds less
                        for y in range(config.tile_n):
                            p = s_smem[s_k + y]
                            if p != 0:  # a key without weight adds nothing, even where v is NaN or Inf
                                for x in range(columns):
                                    o_part[x] += p * v_smem[y * v_row + x0 + x]
                        for x in range(columns):
                            o_k[x0 + x] = alpha * o_k[x0 + x] + o_part[x]

        # lines 19 and 20: the one division. A row without keys is zero, and its lse -inf
        if q_index < seqlen_q:
            inverse = compute(0)
            row_lse = minus_inf
            if l != 0:
                inverse = compute(1) / l
                row_lse = m + math.log(l)
            o_base = row_base(strides.o, b, h, q_index)
            for x in range(config.head_dim_v):
                store(arrays.o, o_base + x * strides.o[3], o_k[x] * inverse)
            if config.write_lse:
                arrays.lse[lse_row(b, h, q_index, sizes)] = row_lse

    return flash_attention_v2
