"""dQ of FlashAttention-2, one thread per query row: listing 8 of docs/algorithm.md. Also each row's share of head_sums.

Source: Dao, FlashAttention-2 (2023), algorithm 2; equations 14, 15 and 17 of docs/algorithm.md. Letters as in
v2_backward_dkdv.py. The loops are those of v2.py: a block owns one tile of queries, its dQ stays on
chip, and the keys pass by. S and dP are computed once more than in a kernel that does everything at once, but such a
kernel would have to add up dQ in global memory.

Launch: grid (batch * heads * query tiles), block (tile_m), config.shared_bytes of dynamic shared memory. Any
lengths: threads past the last query take part in loads and barriers and store nothing.
"""

from numba import cuda

from ...ptx import local, shared
from ..score import positions, tile_walk
from ..steps import ds_rows, elements, rows, tiles
from ..steps.ds_rows import Row, RowTiles
from ..steps.plain import row_keys
from ..steps.sequence import key_range, lse_row
from ..steps.tiles import row_base


def make(config):
    plan = config.shared_layout()
    k_row, v_row = config.k_row, config.v_row  # head_dim and head_dim_v, rounded up to whole steps
    q_row, do_row, s_row = k_row + config.pad, v_row + config.pad, config.tile_n + config.pad
    write_dq, write_shares = "dq" in config.wanted, config.wanted != ("dq",)
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    load_q = tiles.loader(load, compute(0), config.tile_m, q_row, config.head_dim)
    load_do = tiles.loader(load, compute(0), config.tile_m, do_row, config.head_dim_v)
    load_k = tiles.loader(load, compute(0), config.tile_n, k_row, config.head_dim)
    load_v = tiles.loader(load, compute(0), config.tile_n, v_row, config.head_dim_v)
    keys_and_start = positions.make(config)
    ds_row = ds_rows.make(config, of_product=True)
    walk = tile_walk.make(config)
    add_k = rows.adder(k_row, config.tile_n, config.dtype, compute)

    @cuda.jit
    def flash_attention_v2_dq(arrays, strides, sizes, score):
        heads, seqlen_q, left, right = sizes.heads, sizes.seqlen_q, sizes.left, sizes.right
        thread = cuda.threadIdx.x
        m_tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
        b = cuda.blockIdx.x // (heads * m_tiles)
        h = cuda.blockIdx.x // m_tiles % heads
        first_row = cuda.blockIdx.x % m_tiles * config.tile_m
        h_kv = h // (heads // sizes.heads_kv)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        do_smem = shared.pointer(smem, plan.do)  # (tile_m, do_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        ds_smem = shared.pointer(smem, plan.ds)  # (tile_m, s_row)
        dq_k = local.array(k_row, compute)  # (k_row,): row k of dQ_i, in registers

        # listing 8, line 1: load Q_i, dO_i
        q_base, do_base = row_base(strides.q, b, h, first_row), row_base(strides.do, b, h, first_row)
        load_q(q_smem, arrays.q, q_base, strides.q, seqlen_q - first_row, thread, config.tile_m)
        load_do(do_smem, arrays.do, do_base, strides.do, seqlen_q - first_row, thread, config.tile_m)

        # line 2: this thread's row k, the keys that it sees, and its lse and delta
        q_index = first_row + thread
        q_pos = q_index + q_start
        first_key, end_key = row_keys(q_pos, left, right, keys)
        q_k, do_k, s_k = thread * q_row, thread * do_row, thread * s_row  # where row k begins in Q_i, dO_i and dS
        lse_at = lse_row(b, h, min(q_index, seqlen_q - 1), sizes)
        own_row = Row(b, h, q_index, q_pos, first_key, end_key, arrays.lse[lse_at], arrays.delta[lse_at])
        tiles_of_row = RowTiles(q_smem, q_k, do_smem, do_k, ds_smem, s_k, k_smem, v_smem)
        share = compute(0)
        for x in range(k_row):
            dq_k[x] = compute(0)

        # line 3: the tiles that some row of the block sees
        last_row = min(first_row + config.tile_m, seqlen_q) - 1
        begin, _, _, end = key_range(first_row + q_start, last_row + q_start, keys, sizes, config.tile_n)
        states = walk.row(b, h, first_row, arrays, strides)
        for j in range(begin, end):
            if not walk.shows(states, j, arrays, strides):  # a mask_mod shows nothing of it
                continue
            asks = walk.asks(states, j, arrays, strides)
            cuda.syncthreads()  # line 4: everyone is done with the tiles before
            first_y = j * config.tile_n
            k_base, v_base = row_base(strides.k, b, h_kv, first_y), row_base(strides.v, b, h_kv, first_y)
            load_k(k_smem, arrays.k, k_base, strides.k, keys - first_y, thread, config.tile_m)
            load_v(v_smem, arrays.v, v_base, strides.v, keys - first_y, thread, config.tile_m)
            cuda.syncthreads()
            if q_index < seqlen_q:
                # lines 5 to 8: dS[k, :] = P[k, :] * (dO_i[k, :] V_j^T - delta[k])
                share += ds_row(own_row, tiles_of_row, first_y, asks, arrays, strides, sizes, score)
                if write_dq:  # line 9: dQ_i[k, :] += dS[k, :] K_j
                    add_k(dq_k, ds_smem, s_k, k_smem, 0)

        if q_index < seqlen_q:
            if write_dq:  # line 10: scale, by which S has Q K^T, comes in once
                base = row_base(strides.dq, b, h, q_index)
                for x in range(config.head_dim):
                    store(arrays.dq, base + x * strides.dq[3], dq_k[x] * compute(score.scale))
            if write_shares:
                arrays.row_shares[lse_at] = share

    return flash_attention_v2_dq
