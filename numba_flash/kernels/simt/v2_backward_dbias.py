"""The gradient of bias: dS of the finished scores, summed over the dimensions in which bias is broadcast.

Source: equation 15 of docs/backward.md; letters as in v2_backward_dkdv.py. A bias is added to a score, so its
gradient is dS. A block owns a tile of bias' own elements and walks over all tiles of scores that read them
(kernels/steps/score_ranges.py). So every sum has one order. If few tiles would keep most of the GPU idle,
`dbias_splits` blocks share a tile.

Launch: grid (splits * bias' batch * heads * query tiles * key tiles), block (tile_m): one thread per query row.
"""

from numba import cuda, int64

from ...ptx import local
from ..steps import elements, score_ranges, sequence
from ..steps.basics import inlined
from . import ds_rows


def make(config):
    s_row = config.tile_n + config.pad
    width = 1 if config.keys_summed else config.tile_n  # columns of bias in a tile
    compute = elements.COMPUTE_TYPES[config.dtype]
    store = elements.storer(config.compute_dtype if config.split else config.dtype_of("bias"))
    sequence_of, tiles_of = sequence.make(config), score_ranges.of_bias(config)

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
        thread = cuda.threadIdx.x
        threads = cuda.blockDim.x  # tile_m, but nothing that the compiler could unroll loops by
        own, split = tiles_of.own_range(cuda.blockIdx.x, sizes)
        sums = local.array(width, compute)  # (width,): of this thread's rows, in registers
        tiles = ds.row_tiles(thread)
        for y in range(width):
            sums[y] = compute(0)
        for unit in range(own.unit, own.end_unit):
            b, h, i = score_ranges.place_of(unit, own)
            sequence, first_row = sequence_of(int64(b), arrays, strides, sizes), int64(i) * config.tile_m
            ds.over_keys(sums, tiles, sequence, int64(h), first_row, own.j, own.end_j, arrays, strides, sizes, score)

        target, by, base = tiles_of.target_of(own, split, arrays, strides, sizes)
        first_row, first_y = int64(own.i) * config.tile_m, int64(own.j) * config.tile_n
        if config.rows_summed:
            cuda.syncthreads()
            for y in range(width):
                tiles.ds[tiles.ds_at + y] = sums[y]
            cuda.syncthreads()
            for y in range(thread, width, config.tile_m):
                total = compute(0)
                for row in range(threads):
                    total += tiles.ds[row * s_row + y]
                if config.keys_summed or first_y + y < sizes.seqlen_k:
                    store(target, base + (first_y + y) * by[3], total)
        elif first_row + thread < sizes.seqlen_q:
            base += (first_row + thread) * by[2]
            for y in range(width):
                if config.keys_summed or first_y + y < sizes.seqlen_k:
                    store(target, base + (first_y + y) * by[3], sums[y])

    return flash_attention_v2_dbias
