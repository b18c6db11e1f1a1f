"""dQ in the block that computes dK and dV, where its tile has every key: then dS of a query is complete in it.

dQ = scale * dS K. dS^T, whose rows are the warps' keys, goes through shared memory; there each warp reads strips of 16
queries of it, transposed by ldmatrix, and multiplies them by all keys. Used by backward.py with config.with_dq. With
config.with_dbias these operands are also dbias: in 16 bits, and of one score each.
"""

from numba import float32, int32, int64, uint32

from ...ptx import ldmatrix, local, memory, mma, special
from ..recompute import queries as recompute_queries
from ..steps import row_writers
from ..steps.basics import chunk_pair, first_column_of, first_row_of, inlined, named, panel_offset
from ..steps.sequence import QueryTile, query_row
from . import backward_16bit


def make(config):
    """-> `put`, which stores the warps' rows of dS^T, and `write`."""
    plan, warps, strips = config.shared_layout(), config.threads // 32, config.tile_m // 16
    columns, panel = config.head_dim_padded, config.tile_n * 128  # K and dS^T have panels of the same rows
    count = columns // 2
    multiply = mma.m16n8k16_f16 if config.dtype == "float16" else mma.m16n8k16_bf16
    store = row_writers.of_gradient(config.dtype, 16, columns // 8, config.head_dim % 8 == 0)
    recompute = recompute_queries.make(config, of_keys=True, of_dbias=config.with_dbias)

    @inlined
    def store_dbias(ds, y, first_query, at, lane, arrays, strides, sizes):
        """Stores the lane's part of dS of 16 queries and the y-th 16 keys in dbias; at: the head's first element."""
        for x in range(4):  # rows of the first 8 queries and of the last; then those of the last 8 keys
            query = int32(first_query + int32(first_row_of(lane)) + 8 * (x % 2))
            key = int32(16 * y + 8 * (x // 2) + int32(first_column_of(lane)))
            to = memory.address(arrays.dbias, at + query * strides.dbias[2] + key)
            first, second = query < sizes.seqlen_q and key < sizes.seqlen_k, key + 1 < sizes.seqlen_k
            if config.pairs:
                if first:
                    memory.store_b32(to, ds[x])
            else:
                if first:
                    memory.store_b16(to, ds[x])
                if first and second:
                    memory.store_b16(to + 2, ds[x] >> uint32(16))

    @inlined
    def multiply_strip(acc, k_smem, strip, lane, first_query, at, arrays, strides, sizes):
        """acc (columns / 8, 4) <- dS of 16 queries . K."""
        a_frag, b_frag = local.array(4, uint32), local.array(4, uint32)
        across = panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, config.tile_n)
        ds_lane = chunk_pair(k_smem + int32(plan.ds) + across, strip, panel)
        k_lane = k_smem + panel_offset(lane & 15, lane >> 4, config.tile_n)
        for x in range(count):
            acc[x] = float32(0)
        for y in range(config.tile_n // 16):
            ldmatrix.x4_trans(a_frag, 0, ds_lane + y * 2048)  # (16 queries, 16 keys)
            if config.with_dbias:
                store_dbias(a_frag, y, first_query, at, lane, arrays, strides, sizes)
            for n in range(columns // 16):
                ldmatrix.x4_trans(b_frag, 0, chunk_pair(k_lane, n, panel) + y * 2048)  # (16 keys, 16)
                multiply(acc, 8 * n, a_frag, 0, b_frag, 0)
                multiply(acc, 8 * n + 4, a_frag, 0, b_frag, 2)

    @inlined
    def write(i, sequence, h, k_smem, arrays, strides, sizes, score):
        """Writes dQ of query tile i of head h, whose dS^T all warps have stored."""
        lane, strip = special.thread_index() & int32(31), special.thread_index() >> int32(5)
        acc = local.array(count, float32)
        first_query = int32(i * config.tile_m)
        rows_left = int32(min(sequence.seqlen_q - first_query, config.tile_m))
        to, of_head = query_row(strides.dq, sequence, h, first_query), int64(0)
        if config.with_dbias:
            of_head = sequence.b * strides.dbias[0] + h * strides.dbias[1]
        while strip < strips:
            first_row, left = int32(16 * strip), int32(rows_left - 16 * strip)
            multiply_strip(acc, k_smem, strip, lane, int32(first_query + first_row), of_head, arrays, strides, sizes)
            first, by = to + first_row * strides.dq[2], strides.dq[2]
            nonfinite = store(acc, score.scale, lane, arrays.dq, first, by, left, left, int32(config.head_dim))
            if nonfinite != 0:
                tile = QueryTile(sequence.b, h, first_query, int32(0))
                recompute(nonfinite, first_row, lane, tile, arrays, strides, sizes, score)
            strip = int32(strip + warps)

    return named(backward_16bit.make(config).put, write)
