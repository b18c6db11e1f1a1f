"""The products of a forward tile in float32, as exact as float32 arithmetic, on tensor cores with tf32 operands.

tf32 has 11 of float32's 24 significant bits. So each number is the sum of two, big = tf32(x) and small = x - big, and

    a . b = small_a . big_b + big_a . small_b + big_a . big_b        (Markidis et al., 2018)

The omitted product small_a * small_b is at most 2^-22 of a * b. big is rounded to nearest, so its sign is positive as
often as negative. The tensor core uses 11 of the at most 12 bits of a small part, which is at most 2^-23 of x.

A tensor core truncates what does not fit its sum, always towards zero, so a long sum in one accumulator drifts (Ootomo
and Yokota, 2022). Here every 16 columns have their own sum, small products first. Ordinary additions, which round to
nearest, add up these sums.

Inf, and what tf32 rounds up to Inf, has no small part: Inf - Inf is NaN. Then O is NaN, and the row is computed again
without tensor cores (kernels/recompute/rows.py).

The accumulators of S are the operand P except for the order of keys (ptx/fragments.py). Of 8 keys a lane holds 2 *
(lane % 4) and the next, and loads just these rows of V. Their numbers are even for one fragment and odd for the other.
The swizzle depends on the row's number, so the rows of a quad are in different banks. A lane reads 16 bytes of a row at
a time, 4 neighbouring columns, which are column lane // 4 of 4 products. So acc_o has 32 columns like this: element i
of block j is column 4 * (2 * (lane % 4) + i % 2) + j.
"""

import numpy as np
from numba import float32, int32, uint32

from ...ptx import ld_st, ldmatrix, local, mma, special
from ..steps.basics import inlined, nothing, panel_offset
from ..steps.repeated import repeated
from . import exchanged_scores
from .products import Products, in_operand_order


@inlined
def rounded_to_tf32(bits):
    """A float32, as 32 bits, with 10 bits after the binary point; ties are rounded away from zero.

    It takes two instructions; cvt.rna.tf32 takes four (seen in the SASS for sm_90a). A NaN may become another number,
    but then the small part is NaN.
    """
    return uint32(uint32(bits + uint32(0x1000)) & uint32(0xFFFFE000))


def make(config):
    tile_m, tile_n, warp_rows = config.tile_m, config.tile_n, config.warp_rows
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.group_columns
    strips, s_blocks, o_blocks, steps = warp_rows // 16, tile_n // 8, head_dim_v_padded // 8, head_dim_padded // 16
    s_count, a_count = strips * s_blocks * 4, strips * 8  # of a 16 x 16 operand of each strip
    panels = head_dim_v_padded // 32
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    own_blocks = s_blocks // groups  # blocks of 8 keys for which a warp computes scores
    own_count = strips * own_blocks * 4
    exchanged = exchanged_scores.make(config)
    q_panel, kv_panel = tile_m * 128, tile_n * 128  # bytes of 32 columns

    @inlined
    def group_of(warp):
        return warp & (groups - 1)

    @inlined
    def lanes(lane, warp, q_smem, k_smem, v_smem):
        return (
            q_smem + panel_offset((warp >> shift) * warp_rows + (lane & 15), lane >> 4, tile_m),
            k_smem + panel_offset(lane & 7, lane >> 3, tile_n) + group_of(warp) * (own_blocks * 1024),
            v_smem + panel_offset((lane & 3) << 1, lane >> 2, tile_n) + group_of(warp) * (panels * kv_panel),
            exchanged.place(lane, warp, q_smem),
        )

    @inlined
    def split(x, at, count, big, small):
        """big, small (count,) <- the parts of x[at : at + count]."""
        for i in range(count):
            big[i] = rounded_to_tf32(x[at + i])
            small[i] = float32(x[at + i].view(np.float32) - big[i].view(np.float32)).view(np.uint32)

    @inlined
    def add_product(acc, acc_at, a_big, a_small, a, b_big, b_small):
        """acc[acc_at : +4] += a . b over 16 columns; the parts of a begin at index a, 8 of each, and there are 4 of
        b."""
        part = local.array(4, float32)
        for i in range(4):
            part[i] = float32(0)
        for k in range(2):
            mma.m16n8k8_tf32(part, 0, a_small, a + 4 * k, b_big, 2 * k)
            mma.m16n8k8_tf32(part, 0, a_big, a + 4 * k, b_small, 2 * k)
        for k in range(2):
            mma.m16n8k8_tf32(part, 0, a_big, a + 4 * k, b_big, 2 * k)
        for i in range(4):
            acc[acc_at + i] += part[i]

    @inlined
    def add_columns(acc_s, q_frag, k_frag, q_at, k_at):
        """acc_s (strips, own_blocks, 4) += Q . K^T over 16 columns, at these addresses of Q and K."""
        q_big, q_small = local.array(a_count, uint32), local.array(a_count, uint32)
        k_big, k_small = local.array(4, uint32), local.array(4, uint32)
        for strip in range(strips):
            for half in range(2):
                ldmatrix.x4(q_frag, strip * 8 + half * 4, (q_at ^ int32(half << 5)) + strip * 2048)  # (16, 8)
        split(q_frag, 0, a_count, q_big, q_small)
        for n in range(own_blocks):
            ldmatrix.x4(k_frag, 0, k_at + n * 1024)  # (8 keys, 16)
            split(k_frag, 0, 4, k_big, k_small)
            for strip in range(strips):
                add_product(acc_s, (strip * own_blocks + n) * 4, q_big, q_small, strip * 8, k_big, k_small)

    @inlined
    def add_scores(acc_s, q_frag, k_frag, q_lane, k_lane):
        """acc_s (strips, own_blocks, 4) = Q . K^T with the warp's part of the keys."""
        for i in range(own_count):
            acc_s[i] = float32(0)
        q_at, k_at = q_lane, k_lane
        for x in range(special.opaque(steps)):  # unrolled, it would take more registers than there are
            add_columns(acc_s, q_frag, k_frag, q_at, k_at)
            # The other half of the panel differs in one bit of the address.
            q_at = int32((q_at ^ int32(64)) + int32(x & 1) * int32(q_panel))
            k_at = int32((k_at ^ int32(64)) + int32(x & 1) * int32(kv_panel))

    @inlined
    def multiply_q_k(acc_s, q_frag, k_frag, q_lane, k_lane, s_lane):
        if groups == 1:
            add_scores(acc_s, q_frag, k_frag, q_lane, k_lane)
        else:
            own = local.array(own_count, float32)
            add_scores(own, q_frag, k_frag, q_lane, k_lane)
            exchanged.put(own, s_lane)
            exchanged.meet()
            exchanged.get(acc_s, s_lane)

    @inlined
    def add_panel(n, acc_o, p_big, p_small, v_frag, v_lane):
        """32 columns of acc_o += P . V of 16 keys."""
        column = local.array(4, uint32)
        v_big, v_small = local.array(4, uint32), local.array(4, uint32)
        for key in range(4):  # 2 * (lane % 4), the next, and both + 8
            at = (v_lane ^ int32((key & 1) << 4)) + (key & 1) * 128 + (key >> 1) * 1024
            ld_st.load_v4(v_frag, 4 * key, at + n * kv_panel)
        for j in range(4):
            for key in range(4):
                column[key] = v_frag[4 * key + j]
            split(column, 0, 4, v_big, v_small)
            for strip in range(strips):
                add_product(acc_o, (strip * o_blocks + 4 * n + j) * 4, p_big, p_small, strip * 8, v_big, v_small)

    @inlined
    def add_two_panels(pair, acc_o, p_big, p_small, v_frag, v_lane):
        """Two panels for each loop, because LLVM does not unroll longer ones; otherwise acc_o would be indexed."""
        for n in range(2 * pair, min(2 * pair + 2, panels)):
            add_panel(n, acc_o, p_big, p_small, v_frag, v_lane)

    add_every_panel = repeated(add_two_panels, -(-panels // 2))

    @inlined
    def add_16(acc_o, p_frag, v_frag, v_lane):
        """acc_o += P . V of the 16 keys that begin at v_lane; p_frag (strips, 2, 4)."""
        p_big, p_small = local.array(a_count, uint32), local.array(a_count, uint32)
        split(p_frag, 0, a_count, p_big, p_small)
        add_every_panel(acc_o, p_big, p_small, v_frag, v_lane)

    @inlined
    def add_keys(y, acc_o, p_frag, v_frag, v_lane):
        """acc_o += P . V of 16 keys."""
        p_strip = local.array(a_count, uint32)
        for strip in range(strips):
            for i in range(8):
                p_strip[strip * 8 + i] = p_frag[(strip * s_blocks + 2 * y) * 4 + i]
        add_16(acc_o, p_strip, v_frag, v_lane + y * 2048)

    return Products(
        uint32, a_count, 16, s_count, lanes, nothing, multiply_q_k, in_operand_order(strips * s_blocks, True),
        repeated(add_keys, tile_n // 16), add_scores, in_operand_order(2 * strips, True), add_16,
    )  # fmt: skip
