"""The end of a query tile: rows of O from shared to global memory, 16 bytes a lane, and their lse.

A tensor core multiplies every p by every v of a tile, also the p of 0 of a key that the mask removed, and
0 * NaN is NaN. Such values are rare (uninitialised padding, a diverged model), so the loop over tiles does
not look for them: whoever stages O marks the rows that are not finite, and those are computed again
here, key by key, without the removed ones.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ... import ranges
from ...ptx import approx, fragments, ld_st, memory, shfl
from . import elements
from .fragment_softmax import LN_2

row_keys = cuda.jit(device=True)(ranges.row_keys)
panel_offset = cuda.jit(device=True, inline="always")(fragments.panel_offset)


def make(config, warp_rows, notes_at, score):
    """-> store_rows, a device function. score: `one` of steps/fragment_scores.

    O is staged in panels (ptx/fragments.py). At notes_at behind its beginning is for each row a uint32 that
    is not 0 when the row is not finite, and the row's lse as a float32 in units of log2(e).
    """
    head_dim, head_dim_v, width = config.head_dim, config.head_dim_v, config.width
    group, queries, tile_m = config.group, config.queries, config.tile_m
    note_bytes = config.NOTE_BYTES
    write_lse, wide_o, has_alibi = config.write_lse, config.wide_o, config.alibi_dtype is not None
    chunks, columns = width // 8, -(-width // 32)
    load, store = elements.loader(config.dtype, float32), elements.storer(config.dtype)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    bfly, ex2 = shfl.bfly_f32, approx.ex2
    load_b32, load_v4 = ld_st.load_b32, ld_st.load_v4
    address, store_v4, store_b16 = memory.address, memory.store_v4, memory.store_b16
    ln_2 = float32(LN_2)

    @cuda.jit(device=True, inline="always")
    def store_rows(
        warp, lane, o_smem, pointers, strides, lse, b, h, h_kv, heads, first_query, seqlen_q, part,
        tile_pos, left, right, keys, alibi_slopes, alibi_strides, scale, softcap,
    ):  # fmt: skip
        """One warp, its own rows of the tile that begins at first_query and at position tile_pos."""
        q, k, v, o = pointers
        q_strides, k_strides, v_strides, o_strides = strides
        queries_left = int32(min(seqlen_q - first_query, queries))
        columns_left = int32(head_dim_v - part * width)
        o_base = b * o_strides[0] + part * width * o_strides[3]
        four = cuda.local.array(4, uint32)
        row_o = cuda.local.array(columns, float32)
        step = chunks if wide_o else width
        for index in range(lane, warp_rows * step, 32):
            in_warp = int32(uint32(index) // uint32(step))
            row = warp * warp_rows + in_warp
            query, member = row // group, row % group
            column = (index - in_warp * step) * (8 if wide_o else 1)
            note = o_smem + notes_at + row * note_bytes
            if query < queries_left and column < columns_left and load_b32(note) == 0:
                staged = o_smem + panel_offset(row, column >> 3, tile_m)
                at = o_base + (h + member) * o_strides[1] + (first_query + query) * o_strides[2]
                if wide_o:
                    load_v4(four, 0, staged)
                    store_v4(address(o, at + column), four, 0)
                else:
                    pair = load_b32(staged + ((column & 6) << 1))
                    half = uint32(pair >> uint32(16)) if column % 2 else pair
                    store_b16(address(o, at + column * o_strides[3]), half)

        for row in range(warp * warp_rows, warp * warp_rows + warp_rows):
            query, member = row // group, row % group
            note = o_smem + notes_at + row * note_bytes
            lse_log2 = load_b32(note + 4).view(np.float32)
            if query < queries_left:
                index = first_query + query
                if write_lse and part == 0 and lane == 0:
                    lse[(b * heads + h + member) * seqlen_q + index] = lse_log2 * ln_2
                if load_b32(note) != 0:
                    slope = float32(0)
                    if has_alibi:
                        slope = load_slope(alibi_slopes, b * alibi_strides[0] + (h + member) * alibi_strides[1])
                    q_at = b * q_strides[0] + (h + member) * q_strides[1] + index * q_strides[2]
                    k_at = b * k_strides[0] + h_kv * k_strides[1]
                    v_at = b * v_strides[0] + h_kv * v_strides[1] + part * width
                    q_pos = tile_pos + query
                    for c in range(columns):
                        row_o[c] = float32(0)
                    first_key, end_key = row_keys(q_pos, left, right, keys)
                    for key in range(first_key, end_key):
                        product = float32(0)
                        for x in range(lane, head_dim, 32):
                            product += load(q, q_at + x) * load(k, k_at + key * k_strides[2] + x)
                        for distance in (1, 2, 4, 8, 16):
                            product += bfly(product, distance)
                        p = ex2(score(product, slope, float32(q_pos - key), scale, softcap) - lse_log2)
                        if p != 0:
                            for c in range(columns):
                                x = int64(lane + 32 * c)
                                if x < columns_left:
                                    row_o[c] += p * load(v, v_at + key * v_strides[2] + x)
                    at = o_base + (h + member) * o_strides[1] + index * o_strides[2]
                    for c in range(columns):
                        x = int64(lane + 32 * c)
                        if x < columns_left:
                            store(o, at + x * o_strides[3], row_o[c])

    return store_rows
