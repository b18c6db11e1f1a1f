"""Exchange of scores between the two warps that own the same rows, and of P or dS in a backward. Each warp has computed
one half of a tile's columns.

A lane of one warp needs what the same lane of the other warp holds. So 16 bytes of each lane are adjacent in shared
memory, in no order of rows or columns. Both halves are read back, so that no register index depends on the warp.
"""

import numpy as np
from numba import float64, int32, uint32

from ...ptx import bar, ld_st, local, special
from ..steps.basics import inlined, named

ROW = 512  # 16 bytes of every lane


def make(config):
    strips, blocks, double = config.warp_rows // 16, config.tile_n // 8, config.dtype == "float64"
    half, chunks, chunk = blocks // 2, 2 if double else 1, 2 if double else 4  # 16 bytes of a block, and their elements
    all_bytes = strips * blocks * chunks * ROW
    pair_bytes = all_bytes * (2 if config.splits_columns else 1)

    @inlined
    def place(lane, warp, q_smem):
        """-> s_lane, where the lane's 16 bytes begin in those of its warps."""
        return q_smem + int32(config.exchange_at) + (warp >> 1) * pair_bytes + lane * 16

    @inlined
    def put(own, s_lane):
        """Stores own (strips, blocks / 2, 4) of this warp."""
        warp = special.thread_index() >> int32(5)
        words = local.array(4, uint32)
        for n in range(strips * half):
            row = (n // half) * blocks + n % half
            for c in range(chunks):
                at = s_lane + ((row + (warp & 1) * half) * chunks + c) * ROW
                if double:
                    ld_st.store_v2_f64(at, own, 4 * n + chunk * c)
                else:
                    for i in range(4):
                        words[i] = own[4 * n + i].view(np.uint32)
                    ld_st.store_v4(at, words, 0)

    @inlined
    def meet():
        """Waits until both have stored theirs."""
        bar.sync(1 + (special.thread_index() >> int32(6)), 64)

    def reader(count):
        @inlined
        def get_blocks(values, s_lane):
            """values (strips, count, 4) <- those of both, of `count` blocks of 8 columns from s_lane on."""
            words = local.array(4, uint32)
            for strip in range(strips):
                for n in range(count):
                    for c in range(chunks):
                        at, to = s_lane + ((strip * blocks + n) * chunks + c) * ROW, (strip * count + n) * 4 + chunk * c
                        if double:
                            ld_st.load_v2_f64(values, to, at)
                        else:
                            ld_st.load_v4(words, 0, at)
                            for i in range(4):
                                values[to + i] = words[i].view(np.float32)

        return get_blocks

    @inlined
    def put_all(acc_s, s_lane):
        """Stores acc_s (strips, blocks, 4), of a part of the product's terms."""
        own = s_lane + ((special.thread_index() >> int32(5)) & 1) * all_bytes
        for n in range(strips * blocks * 2):
            ld_st.store_v2_f64(own + n * ROW, acc_s, 2 * n)

    @inlined
    def get_sum(acc_s, s_lane):
        """acc_s += the other warp's."""
        other, two = s_lane + ((~(special.thread_index() >> int32(5))) & 1) * all_bytes, local.array(2, float64)
        for n in range(strips * blocks * 2):
            ld_st.load_v2_f64(two, 0, other + n * ROW)
            acc_s[2 * n] += two[0]
            acc_s[2 * n + 1] += two[1]

    step = 2 * chunks * ROW  # bytes from 16 columns to the next
    return named(place, put, meet, put_all, get_sum, get=reader(blocks), get_16=reader(2), step=step)
