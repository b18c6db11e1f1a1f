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

from ...ptx import local
from ..steps import elements, sequence
from ..steps.inlined import inlined
from . import ds_rows


def make(config):
    s_row = config.tile_n + config.pad
    width = 1 if config.keys_summed else config.tile_n  # columns of bias in a tile
    compute = elements.COMPUTE_TYPES[config.dtype]
    store = elements.storer(config.compute_dtype if config.split else config.dtype_of("bias"))
    sequence_of = sequence.make(config)

    @inlined
    def add_to_sums(sums, query, tiles, first_y, arrays, strides, sizes, score):
        for y in range(width):
            part = tiles.ds[tiles.ds_at + y]
            if config.keys_summed:
                for other in range(1, config.tile_n):
                    part += tiles.ds[tiles.ds_at + other]
            sums[y] += part

    ds = ds_rows.make(config, False, add_to_sums)

    @cuda.jit
    def flash_attention_v2_dbias(arrays, strides, sizes, score):
        heads, seqlen_q, seqlen_k = sizes.heads, sizes.seqlen_q, sizes.seqlen_k
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

        sums = local.array(width, compute)  # (width,): of this thread's rows, in registers
        tiles = ds.row_tiles(thread)
        for y in range(width):
            sums[y] = compute(0)
        for unit in range(split * units // splits, (split + 1) * units // splits):
            first_row = (own_i + unit % row_tiles) * config.tile_m
            h = own_h + unit // row_tiles % heads_summed
            sequence = sequence_of(own_b + unit // (row_tiles * heads_summed), arrays, strides, sizes)
            ds.over_keys(sums, tiles, sequence, h, first_row, own_j, end_j, arrays, strides, sizes, score)

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
                tiles.ds[tiles.ds_at + y] = sums[y]
            cuda.syncthreads()
            for y in range(thread, width, config.tile_m):
                total = compute(0)
                for row in range(threads):
                    total += tiles.ds[row * s_row + y]
                if config.keys_summed or first_y + y < seqlen_k:
                    store(target, base + (first_y + y) * by[3], total)
        elif first_row + thread < seqlen_q:
            base += (first_row + thread) * by[2]
            for y in range(width):
                if config.keys_summed or first_y + y < seqlen_k:
                    store(target, base + (first_y + y) * by[3], sums[y])

    return flash_attention_v2_dbias
