"""dQ of FlashAttention-2, one thread per query row; and of each row its share of the gradient of ALiBi's slope.

Source and letters: those of kernels/v2_backward_dkdv.py, with equation (4), dQ = dS K. The loops are those of
kernels/v2.py: a block owns one tile of queries, its dQ stays on chip, and the keys pass by. S and dP are computed
once more than in a kernel that did it all at once, but that one would have to add up dQ in global memory.

Launch: grid (batch * heads * query tiles), block (tile_m), config.shared_bytes of dynamic shared memory. Any
lengths: threads past the last query take part in loads and barriers and store nothing.
"""

from numba import cuda

from ..ptx import shared
from .steps import ds_rows, elements, rows, tiles
from .steps.plain import key_tiles, row_keys


def make(config):
    tile_m, tile_n = config.tile_m, config.tile_n
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    q_at, do_at, k_at, v_at, ds_at, _ = config.shared_offsets()
    k_row, v_row = config.k_row, config.v_row  # head_dim and head_dim_v, rounded up to whole steps
    q_row, do_row, s_row = k_row + config.pad, v_row + config.pad, tile_n + config.pad
    write_dq, write_slope_rows = "dq" in config.wanted, "dalibi_slopes" in config.wanted
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    load_tile = tiles.loader(load, compute(0))
    head, ds_row = ds_rows.make(config, of_product=True)
    add_k = rows.adder(k_row, tile_n, config.dtype, compute)

    @cuda.jit
    def flash_attention_v2_dq(
        q, k, v, do, lse, delta, bias, mask, alibi_slopes, seqlens_k, q_offsets, dq, slope_rows,
        q_strides, k_strides, v_strides, do_strides, bias_strides, mask_strides, alibi_strides, batch_strides,
        dq_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale, softcap,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        m_tiles = (seqlen_q + tile_m - 1) // tile_m
        b = cuda.blockIdx.x // (heads * m_tiles)
        h = cuda.blockIdx.x // m_tiles % heads
        first_row = cuda.blockIdx.x % m_tiles * tile_m
        h_kv = h // (heads // heads_kv)
        keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, q_at)  # (tile_m, q_row)
        do_smem = shared.pointer(smem, do_at)  # (tile_m, do_row)
        k_smem = shared.pointer(smem, k_at)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, v_at)  # (tile_n, v_row)
        ds_smem = shared.pointer(smem, ds_at)  # (tile_m, s_row)
        dq_k = cuda.local.array(k_row, compute)  # (k_row,): row k of dQ_i, in registers

        q_base = b * q_strides[0] + h * q_strides[1] + first_row * q_strides[2]
        do_base = b * do_strides[0] + h * do_strides[1] + first_row * do_strides[2]
        left_over = seqlen_q - first_row
        load_tile(q_smem, tile_m, q_row, q, q_base, q_strides[2], q_strides[3], left_over, head_dim, thread, tile_m)
        load_tile(
            do_smem, tile_m, do_row, do, do_base, do_strides[2], do_strides[3], left_over, head_dim_v, thread, tile_m
        )

        # this thread's row k, the keys that it sees, and its lse and delta
        q_index = first_row + thread
        q_pos = q_index + q_start
        first_key, end_key = row_keys(q_pos, left, right, keys)
        q_k, do_k, s_k = thread * q_row, thread * do_row, thread * s_row  # where row k begins in Q_i, dO_i and dS
        lse_at = (b * heads + h) * seqlen_q + min(q_index, seqlen_q - 1)
        row_lse, row_delta = lse[lse_at], delta[lse_at]
        of_slope = compute(0)
        for x in range(k_row):
            dq_k[x] = compute(0)

        # the tiles that some row of the block sees
        top_first, top_end = row_keys(first_row + q_start, left, right, keys)
        bottom_first, bottom_end = row_keys(min(first_row + tile_m, seqlen_q) - 1 + q_start, left, right, keys)
        begin, _, _, end = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        for j in range(begin, end):
            cuda.syncthreads()  # everyone is done with the tiles before
            first_y = j * tile_n
            k_base = b * k_strides[0] + h_kv * k_strides[1] + first_y * k_strides[2]
            v_base = b * v_strides[0] + h_kv * v_strides[1] + first_y * v_strides[2]
            left_over = keys - first_y
            load_tile(k_smem, tile_n, k_row, k, k_base, k_strides[2], k_strides[3], left_over, head_dim, thread, tile_m)
            load_tile(
                v_smem, tile_n, v_row, v, v_base, v_strides[2], v_strides[3], left_over, head_dim_v, thread, tile_m
            )
            cuda.syncthreads()
            if q_index < seqlen_q:
                of_slope += ds_row(  # (2) and (3): dS[k, :] = P[k, :] * (dO_i[k, :] V_j^T - delta[k])
                    q_smem, q_k, do_smem, do_k, k_smem, v_smem, ds_smem, s_k, first_y, first_key, end_key,
                    row_lse, row_delta, b, h, q_index, q_pos, bias, mask, alibi_slopes,
                    bias_strides, mask_strides, alibi_strides, scale, softcap,
                )  # fmt: skip
                if write_dq:  # (4): dQ_i[k, :] += dS[k, :] K_j
                    add_k(dq_k, ds_smem, s_k, k_smem, 0)

        if q_index < seqlen_q:
            if write_dq:  # scale, by which S has Q K^T, comes in once
                base = b * dq_strides[0] + h * dq_strides[1] + q_index * dq_strides[2]
                for x in range(head_dim):
                    store(dq, base + x * dq_strides[3], dq_k[x] * compute(scale))
            if write_slope_rows:
                slope_rows[lse_at] = of_slope

    return flash_attention_v2_dq
