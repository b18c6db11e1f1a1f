"""dQ of FlashAttention-2, one thread per query row: listing 8 of docs/backward.md. Also each row's share of head_sums.

Source: Dao, FlashAttention-2 (2023), algorithm 2; equations 14, 15 and 17 of docs/backward.md. Letters as in
v2_backward_dkdv.py. The loops are those of v2.py: a block owns one tile of queries, its dQ stays on
chip, and the keys pass by. S and dP are computed once more than in a kernel that does everything at once, but such a
kernel would have to add up dQ in global memory.

Launch: grid (batch * heads * query tiles), block (tile_m). Any lengths, as in v2.py.
"""

from numba import cuda

from ...ptx import local
from ..steps import elements, rows
from ..steps.basics import inlined
from ..steps.sequence import lse_row, query_row
from . import ds_rows


def make(config):
    compute, store = elements.COMPUTE_TYPES[config.dtype], elements.storer(config.dtype)
    write_dq, write_shares = "dq" in config.wanted, config.wanted != ("dq",)
    add_rows = rows.adder(config.k_row, config.tile_n, config.dtype, compute)

    @inlined
    def add_to_dq(dq_k, query, tiles, first_y, arrays, strides, sizes, score):
        if write_dq:  # line 9: dQ_i[k, :] += dS[k, :] K_j
            add_rows(dq_k, compute(1), tiles.ds, tiles.ds_at, tiles.k, 0)

    ds = ds_rows.make(config, True, add_to_dq)

    @cuda.jit
    def flash_attention_v2_dq(arrays, strides, sizes, score):
        sequence, h, first_row = ds.query_tile(cuda.blockIdx.x, arrays, strides, sizes)
        if config.packed:
            if first_row >= sequence.seqlen_q:
                return
        dq_k = local.array(config.k_row, compute)  # (k_row,): row k of dQ_i, in registers
        for x in range(config.k_row):
            dq_k[x] = compute(0)
        # listing 8, lines 1 to 9
        tiles, n_tiles = ds.row_tiles(cuda.threadIdx.x), (sizes.seqlen_k + config.tile_n - 1) // config.tile_n
        share = ds.over_keys(dq_k, tiles, sequence, h, first_row, 0, n_tiles, arrays, strides, sizes, score)
        q_index = first_row + cuda.threadIdx.x
        if q_index < sequence.seqlen_q:
            if write_dq:  # line 10: scale, by which S has Q K^T, comes in once
                base = query_row(strides.dq, sequence, h, q_index)
                for x in range(config.head_dim):
                    store(arrays.dq, base + x * strides.dq[3], dq_k[x] * compute(score.scale))
            if write_shares:
                arrays.row_shares[lse_row(sequence, h, q_index, sizes)] = share

    return flash_attention_v2_dq
