"""The gradient of bias: dS of the finished scores, summed over the dimensions in which bias is broadcast.

Source and letters: those of kernels/v2_backward_dkdv.py; bias is added to a score, so its gradient is (3), dS. A
block owns a tile of bias' own elements and walks over all positions that read them: over the batch entries and the
heads where bias has one for all, over the query tiles where it is one row for all queries (rows_summed), and over
the key tiles where it is one column for all keys (keys_summed). So nothing is added up in global memory, and every
sum has one order; a bias that is broadcast over everything keeps few blocks busy.

Launch: grid (bias' batch * heads * query tiles * key tiles), block (tile_m), config.shared_bytes of dynamic shared
memory. One thread per query row.
"""

from numba import cuda

from ..ptx import shared
from .steps import ds_rows, elements, tiles
from .steps.plain import key_tiles, row_keys


def make(config):
    tile_m, tile_n = config.tile_m, config.tile_n
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    q_at, do_at, k_at, v_at, ds_at, _ = config.shared_offsets()
    k_row, v_row = config.k_row, config.v_row
    q_row, do_row, s_row = k_row + config.pad, v_row + config.pad, tile_n + config.pad
    rows_summed, keys_summed = config.rows_summed, config.keys_summed
    width = 1 if keys_summed else tile_n  # columns of bias in a tile
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.bias_dtype)
    load_tile = tiles.loader(load, compute(0))
    head, ds_row = ds_rows.make(config, of_product=False)

    @cuda.jit
    def flash_attention_v2_dbias(
        q, k, v, do, lse, delta, bias, mask, alibi_slopes, seqlens_k, q_offsets, dbias,
        q_strides, k_strides, v_strides, do_strides, bias_strides, mask_strides, alibi_strides, batch_strides,
        dbias_strides, dbias_shape,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale, softcap,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        threads = cuda.blockDim.x  # tile_m, but nothing that the compiler could unroll loops by
        m_tiles = (seqlen_q + tile_m - 1) // tile_m
        n_tiles = (seqlen_k + tile_n - 1) // tile_n
        # bias' own element tile, and the positions that read it
        own_m, own_n = (1 if rows_summed else m_tiles), (1 if keys_summed else n_tiles)
        own_j = cuda.blockIdx.x % own_n
        own_i = cuda.blockIdx.x // own_n % own_m
        own_h = cuda.blockIdx.x // (own_n * own_m) % dbias_shape[1]
        own_b = cuda.blockIdx.x // (own_n * own_m * dbias_shape[1])
        end_b = own_b + 1 if dbias_shape[0] > 1 else batch
        end_h = own_h + 1 if dbias_shape[1] > 1 else heads
        end_i = m_tiles if rows_summed else own_i + 1
        end_j = n_tiles if keys_summed else own_j + 1

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, q_at)  # (tile_m, q_row)
        do_smem = shared.pointer(smem, do_at)  # (tile_m, do_row)
        k_smem = shared.pointer(smem, k_at)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, v_at)  # (tile_n, v_row)
        ds_smem = shared.pointer(smem, ds_at)  # (tile_m, s_row)
        sums = cuda.local.array(width, compute)  # (width,): of this thread's rows, in registers
        q_k, do_k, s_k = thread * q_row, thread * do_row, thread * s_row
        for y in range(width):
            sums[y] = compute(0)

        for b in range(own_b, end_b):
            keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
            for h in range(own_h, end_h):
                h_kv = h // (heads // heads_kv)
                for i in range(own_i, end_i):
                    first_row = i * tile_m
                    top_first, top_end = row_keys(first_row + q_start, left, right, keys)
                    last_row = min(first_row + tile_m, seqlen_q) - 1
                    bottom_first, bottom_end = row_keys(last_row + q_start, left, right, keys)
                    begin, _, _, end = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
                    cuda.syncthreads()  # everyone is done with the tiles before
                    q_base = b * q_strides[0] + h * q_strides[1] + first_row * q_strides[2]
                    do_base = b * do_strides[0] + h * do_strides[1] + first_row * do_strides[2]
                    left_over = seqlen_q - first_row
                    load_tile(
                        q_smem, tile_m, q_row, q, q_base, q_strides[2], q_strides[3], left_over, head_dim, thread,
                        threads,
                    )  # fmt: skip
                    load_tile(
                        do_smem, tile_m, do_row, do, do_base, do_strides[2], do_strides[3], left_over, head_dim_v,
                        thread, threads,
                    )  # fmt: skip
                    q_index = first_row + thread
                    q_pos = q_index + q_start
                    first_key, end_key = row_keys(q_pos, left, right, keys)
                    lse_at = (b * heads + h) * seqlen_q + min(q_index, seqlen_q - 1)
                    row_lse, row_delta = lse[lse_at], delta[lse_at]
                    for j in range(max(begin, own_j), min(end, end_j)):
                        cuda.syncthreads()
                        first_y = j * tile_n
                        k_base = b * k_strides[0] + h_kv * k_strides[1] + first_y * k_strides[2]
                        v_base = b * v_strides[0] + h_kv * v_strides[1] + first_y * v_strides[2]
                        left_over = keys - first_y
                        load_tile(
                            k_smem, tile_n, k_row, k, k_base, k_strides[2], k_strides[3], left_over, head_dim, thread,
                            tile_m,
                        )  # fmt: skip
                        load_tile(
                            v_smem, tile_n, v_row, v, v_base, v_strides[2], v_strides[3], left_over, head_dim_v, thread,
                            tile_m,
                        )  # fmt: skip
                        cuda.syncthreads()
                        if q_index < seqlen_q:
                            ds_row(
                                q_smem, q_k, do_smem, do_k, k_smem, v_smem, ds_smem, s_k, first_y, first_key, end_key,
                                row_lse, row_delta, b, h, q_index, q_pos, bias, mask, alibi_slopes,
                                bias_strides, mask_strides, alibi_strides, scale, softcap,
                            )  # fmt: skip
                            for y in range(width):
                                part = ds_smem[s_k + y]
                                if keys_summed:
                                    for other in range(1, tile_n):
                                        part += ds_smem[s_k + other]
                                sums[y] += part

        first_row, first_y = own_i * tile_m, own_j * tile_n
        base = own_b * dbias_strides[0] + own_h * dbias_strides[1]
        if rows_summed:
            cuda.syncthreads()
            for y in range(width):
                ds_smem[s_k + y] = sums[y]
            cuda.syncthreads()
            for y in range(thread, width, tile_m):
                total = compute(0)
                for row in range(threads):
                    total += ds_smem[row * s_row + y]
                if keys_summed or first_y + y < seqlen_k:
                    store(dbias, base + (first_y + y) * dbias_strides[3], total)
        elif first_row + thread < seqlen_q:
            base += (first_row + thread) * dbias_strides[2]
            for y in range(width):
                if keys_summed or first_y + y < seqlen_k:
                    store(dbias, base + (first_y + y) * dbias_strides[3], sums[y])

    return flash_attention_v2_dbias
