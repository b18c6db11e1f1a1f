"""The products of a forward tile in float64: the tensor cores of GPUs for computing centres take it as it is.

A sum over head_dim may be taken in any order, so a lane chooses which columns it reads. A step of a product has 16 of
them. Register i of an operand is the same column for Q and for K.

A lane reads 8 bytes at a time, each to the register where the product takes it. 16 bytes would come to neighbouring
registers, but neighbouring registers of Q hold two rows: all would be moved, and the assembler keeps two copies.
Register i is column 8 * (lane % 2) + 2 * i + lane / 2 % 2. So the four rows that are read at a time lie in different
banks.

The accumulators of S are P but for the order of keys, as for float32 (products_float32.py). Of V, too, a lane reads 8
bytes. Element i of block j of acc_o is column 8 * j + 2 * (lane % 4) + i % 2.

odd_rows_first: P comes from shared memory (shared_weights.py). Of each two neighbouring rows of V, which belong to two
neighbouring registers, lanes 2 and 3 of each four read the odd one first. unrolled: panels of Q and K are no loop.
"""

import numpy as np
from numba import float64, int32

from ...ptx import ld_st, local, mma, special
from ..steps.basics import inlined, nothing, panel_offset
from ..steps.repeated import repeated
from . import exchanged_scores
from .products import Products, in_operand_order

FIRST, TWO = np.int32(0), np.int32(2)  # not Python's own: see basics.py


def make(config):
    tile_m, tile_n, warp_rows = config.tile_m, config.tile_n, config.warp_rows
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.group_columns
    strips, s_blocks, o_blocks, steps = warp_rows // 16, tile_n // 8, head_dim_v_padded // 8, head_dim_padded // 16
    s_count, a_count = strips * s_blocks * 4, strips * 8  # of a 16 x 16 operand of each strip
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    own_blocks = s_blocks // groups  # of 8 keys, with which a warp computes scores
    own_count = strips * own_blocks * 4
    exchanged = exchanged_scores.make(config)
    by_columns, half_steps = groups > 1 and config.splits_columns, steps // 2
    q_panel, kv_panel = tile_m * 128, tile_n * 128  # bytes of 16 columns

    @inlined
    def group_of(warp):
        return warp & (groups - 1)

    @inlined
    def lanes(lane, warp, q_smem, k_smem, v_smem):
        chunk, half, first = (lane & 1) << 2, (lane & 2) << 2, (lane & 3) << 1
        if config.odd_rows_first:
            first += (lane & 2) >> 1
        q_lane = q_smem + panel_offset((warp >> shift) * warp_rows + (lane >> 2), chunk, tile_m) + half
        k_lane = k_smem + panel_offset(lane >> 2, chunk, tile_n) + half
        if by_columns:
            q_lane += group_of(warp) * (half_steps * q_panel)
            k_lane += group_of(warp) * (half_steps * kv_panel)
        else:
            k_lane += group_of(warp) * (own_blocks * 1024)
        v_lane = v_smem + panel_offset(first, lane >> 3, tile_n) + ((lane & 4) << 1)
        v_lane += group_of(warp) * (o_blocks // 2 * kv_panel)
        return q_lane, k_lane, v_lane, exchanged.place(lane, warp, q_smem)

    @inlined
    def large_product(acc, acc_at, a, a_at, b, b_at):
        mma.m16n8k16_f64(acc, acc_at, a, a_at, b, b_at)

    @inlined
    def small_products(acc, acc_at, a, a_at, b, b_at):
        for i in range(4):
            for half in range(2):
                mma.m8n8k4_f64(acc, acc_at + 2 * half, a, a_at + 2 * i + half, b, b_at + i)

    add_product = large_product if config.large_f64 else small_products

    @inlined
    def add_panel(blocks, acc_s, q_frag, k_frag, q_lane, k_lane, q_ahead, k_ahead):
        """acc_s (strips, blocks, 4) += Q . K^T over a panel and blocks of 8 keys. The panels are so many bytes ahead of
        the lane's places, which is added behind the swizzle: so no place is kept for each panel."""
        for strip in range(strips):
            for i in range(4):
                for half in range(2):
                    at = (q_lane ^ int32(i << 4)) + (q_ahead + strip * 2048 + half * 1024)
                    q_frag[strip * 8 + 2 * i + half] = ld_st.load_f64(int32(at))
        for n in range(blocks):
            for i in range(4):
                k_frag[i] = ld_st.load_f64(int32((k_lane ^ int32(i << 4)) + (k_ahead + n * 1024)))
            for strip in range(strips):
                add_product(acc_s, (strip * blocks + n) * 4, q_frag, strip * 8, k_frag, 0)

    @inlined
    def add_panels(count, blocks, acc_s, q_frag, k_frag, q_lane, k_lane):
        """acc_s (strips, blocks, 4) = Q . K^T over so many panels."""
        for i in range(strips * blocks * 4):
            acc_s[i] = float64(0)
        q_at, k_at = q_lane, k_lane
        for _ in range(special.opaque(count)):  # written out, it would take too many registers
            add_panel(blocks, acc_s, q_frag, k_frag, q_at, k_at, FIRST, FIRST)
            q_at, k_at = int32(q_at + q_panel), int32(k_at + kv_panel)

    @inlined
    def add_own_panel(n, acc_s, q_frag, k_frag, q_lane, k_lane):
        add_panel(own_blocks, acc_s, q_frag, k_frag, q_lane, k_lane, int32(n * q_panel), int32(n * kv_panel))

    # No loop, which LLVM would not write out: where it ends sums would move between registers and so wait for products.
    # Only then the next operands would be read.
    add_every_panel = repeated(add_own_panel, steps)

    @inlined
    def add_scores(acc_s, q_frag, k_frag, q_lane, k_lane):
        """acc_s (strips, own_blocks, 4) = Q . K^T with the warp's part of the keys."""
        if config.unrolled:
            for i in range(own_count):
                acc_s[i] = float64(0)
            add_every_panel(acc_s, q_frag, k_frag, q_lane, k_lane)
        else:
            add_panels(int32(steps), own_blocks, acc_s, q_frag, k_frag, q_lane, k_lane)

    @inlined
    def multiply_q_k(acc_s, q_frag, k_frag, q_lane, k_lane, s_lane):
        if groups == 1:
            add_scores(acc_s, q_frag, k_frag, q_lane, k_lane)
        elif by_columns:
            warp = special.thread_index() >> int32(5)
            count = int32(half_steps + group_of(warp) * (steps - 2 * half_steps))
            add_panels(count, s_blocks, acc_s, q_frag, k_frag, q_lane, k_lane)
            exchanged.put_all(acc_s, s_lane)
            exchanged.meet()
            exchanged.get_sum(acc_s, s_lane)
        else:
            own = local.array(own_count, float64)
            add_scores(own, q_frag, k_frag, q_lane, k_lane)
            exchanged.put(own, s_lane)
            exchanged.meet()
            exchanged.get(acc_s, s_lane)

    @inlined
    def add_rows(y, acc_o, p_frag, p_blocks, v_frag, v_lane):
        """acc_o += 16 keys of P . V, of p_frag (strips, p_blocks, 4) from block 2 * y on."""
        column = local.array(4, float64)
        for n in range(o_blocks // 2):
            for j in range(2):
                for key in range(4):  # 2 * (lane % 4), the next, and both 8 further; if odd_rows_first, the next first
                    at = (v_lane ^ int32((key & 1) * (128 + 16) + j * 64)) + (key >> 1) * 1024
                    column[key] = ld_st.load_f64(int32(at + n * kv_panel))
                for strip in range(strips):
                    at_o = (strip * o_blocks + 2 * n + j) * 4
                    add_product(acc_o, at_o, p_frag, (strip * p_blocks + 2 * y) * 4, column, 0)

    @inlined
    def add_16(acc_o, p_frag, v_frag, v_lane):
        """acc_o += P . V of the 16 keys that begin at v_lane; p_frag (strips, 2, 4)."""
        add_rows(FIRST, acc_o, p_frag, TWO, v_frag, v_lane)

    @inlined
    def add_keys(y, acc_o, p_frag, v_frag, v_lane):
        add_rows(y, acc_o, p_frag, s_blocks, v_frag, v_lane + y * 2048)

    return Products(
        float64, a_count, 4, s_count, lanes, nothing, multiply_q_k, in_operand_order(strips * s_blocks),
        repeated(add_keys, tile_n // 16), add_scores, in_operand_order(2 * strips), add_16,
    )  # fmt: skip
