"""The gradient of bias: dS of the finished scores, summed over the dimensions in which bias is broadcast.

Source: equation 15 of docs/algorithm.md; letters as in v2_backward_dkdv.py. A bias is added to a score, so its
gradient is dS. A block owns a tile of bias' own elements and walks over all positions that read them: over the batch
entries and the heads where bias has one for all, over the query tiles where it is one row for all queries
(rows_summed), and over the key tiles where it is one column for all keys (keys_summed). So every sum has one order. If
few tiles would keep most of the GPU idle, `dbias_splits` blocks share a tile: each walks over its part of the batch
entries, heads and query tiles, and dbias_sum.py adds up what they store (config.split).

Launch: grid (splits * bias' batch * heads * query tiles * key tiles), block (tile_m), config.shared_bytes of dynamic
shared memory. One thread per query row.
"""

from numba import cuda

from ...ptx import local, shared
from ..steps import ds_rows, elements, tiles
from ..steps.ds_rows import Row, RowTiles
from ..steps.inlined import TRUE
from ..steps.plain import row_keys
from ..steps.sequence import key_range, key_row, lse_row, query_row
from ..steps.sequence import make as make_sequence


def make(config):
    plan = config.shared_layout()
    q_row, do_row, s_row = config.k_row + config.pad, config.v_row + config.pad, config.tile_n + config.pad
    width = 1 if config.keys_summed else config.tile_n  # columns of bias in a tile
    compute = elements.COMPUTE_TYPES[config.dtype]
    load = elements.loader(config.dtype, compute)
    store = elements.storer(config.compute_dtype if config.split else config.dtype_of("bias"))
    load_q = tiles.loader(load, compute(0), config.tile_m, q_row, config.head_dim)
    load_do = tiles.loader(load, compute(0), config.tile_m, do_row, config.head_dim_v)
    load_k = tiles.loader(load, compute(0), config.tile_n, config.k_row, config.head_dim)
    load_v = tiles.loader(load, compute(0), config.tile_n, config.v_row, config.head_dim_v)
    sequence_of = make_sequence(config)
    ds_row = ds_rows.make(config, of_product=False)

    @cuda.jit
    def flash_attention_v2_dbias(arrays, strides, sizes, score):
        heads, seqlen_q, seqlen_k, left, right = sizes.heads, sizes.seqlen_q, sizes.seqlen_k, sizes.left, sizes.right
        shape = sizes.dbias_shape
        thread = cuda.threadIdx.x
        threads = cuda.blockDim.x  # tile_m, but nothing that the compiler could unroll loops by
        m_tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
        n_tiles = (seqlen_k + config.tile_n - 1) // config.tile_n
        # bias' own element tile, and the positions that read it
        own_m, own_n = (1 if config.rows_summed else m_tiles), (1 if config.keys_summed else n_tiles)
        own_j = cuda.blockIdx.x % own_n
        own_i = cuda.blockIdx.x // own_n % own_m
        own_h = cuda.blockIdx.x // (own_n * own_m) % shape[1]
        own_b = cuda.blockIdx.x // (own_n * own_m * shape[1]) % shape[0]
        # the block's part of the query tiles, heads and batch entries
        split, splits = cuda.blockIdx.x // (own_n * own_m * shape[1] * shape[0]), 1
        if config.split:
            splits = sizes.dbias_splits
        row_tiles = m_tiles if config.rows_summed else 1
        heads_summed, entries = (1 if shape[1] > 1 else heads), (1 if shape[0] > 1 else sizes.batch)
        units = row_tiles * heads_summed * entries
        end_j = n_tiles if config.keys_summed else own_j + 1

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        do_smem = shared.pointer(smem, plan.do)  # (tile_m, do_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        ds_smem = shared.pointer(smem, plan.ds)  # (tile_m, s_row)
        sums = local.array(width, compute)  # (width,): of this thread's rows, in registers
        q_k, do_k, s_k = thread * q_row, thread * do_row, thread * s_row
        tiles_of_row = RowTiles(q_smem, q_k, do_smem, do_k, ds_smem, s_k, k_smem, v_smem)
        for y in range(width):
            sums[y] = compute(0)

        for unit in range(split * units // splits, (split + 1) * units // splits):
            first_row = (own_i + unit % row_tiles) * config.tile_m
            h = own_h + unit // row_tiles % heads_summed
            b = own_b + unit // (row_tiles * heads_summed)
            h_kv = h // (heads // sizes.heads_kv)
            sequence = sequence_of(b, arrays, strides, sizes)
            last_row = min(first_row + config.tile_m, seqlen_q) - 1
            begin, _, _, end = key_range(sequence, first_row, last_row, sizes, config.tile_n)
            cuda.syncthreads()  # everyone is done with the tiles before
            q_base, do_base = (
                query_row(strides.q, sequence, h, first_row),
                query_row(strides.do, sequence, h, first_row),
            )
            load_q(q_smem, arrays.q, q_base, strides.q, seqlen_q - first_row, thread, threads)
            load_do(do_smem, arrays.do, do_base, strides.do, seqlen_q - first_row, thread, threads)
            q_index = first_row + thread
            q_pos = q_index + sequence.q_start
            first_key, end_key = row_keys(q_pos, left, right, sequence.keys)
            lse_at = lse_row(sequence, h, min(q_index, seqlen_q - 1), sizes)
            own_row = Row(b, h, q_index, q_pos, first_key, end_key, arrays.lse[lse_at], arrays.delta[lse_at])
            for j in range(max(begin, own_j), min(end, end_j)):
                cuda.syncthreads()
                first_y = j * config.tile_n
                keys_left = sequence.keys - first_y
                k_base, v_base = (
                    key_row(strides.k, sequence, h_kv, first_y),
                    key_row(strides.v, sequence, h_kv, first_y),
                )
                load_k(k_smem, arrays.k, k_base, strides.k, keys_left, thread, config.tile_m)
                load_v(v_smem, arrays.v, v_base, strides.v, keys_left, thread, config.tile_m)
                cuda.syncthreads()
                if q_index < seqlen_q:
                    ds_row(own_row, tiles_of_row, first_y, TRUE, arrays, strides, sizes, score)
                    for y in range(width):
                        part = ds_smem[s_k + y]
                        if config.keys_summed:
                            for other in range(1, config.tile_n):
                                part += ds_smem[s_k + other]
                        sums[y] += part

        target, by, base = arrays.dbias, strides.dbias, 0
        if config.split:
            of_head = shape[2] * shape[3]
            target, by = arrays.dbias_sums, (shape[1] * of_head, of_head, shape[3], 1)
            base = split * shape[0] * by[0]
        first_row, first_y = own_i * config.tile_m, own_j * config.tile_n
        base += own_b * by[0] + own_h * by[1]
        if config.rows_summed:
            cuda.syncthreads()
            for y in range(width):
                ds_smem[s_k + y] = sums[y]
            cuda.syncthreads()
            for y in range(thread, width, config.tile_m):
                total = compute(0)
                for row in range(threads):
                    total += ds_smem[row * s_row + y]
                if config.keys_summed or first_y + y < seqlen_k:
                    store(target, base + (first_y + y) * by[3], total)
        elif first_row + thread < seqlen_q:
            base += (first_row + thread) * by[2]
            for y in range(width):
                if config.keys_summed or first_y + y < seqlen_k:
                    store(target, base + (first_y + y) * by[3], sums[y])

    return flash_attention_v2_dbias
