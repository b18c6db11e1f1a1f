"""The products of a forward tile in float16 and bfloat16: m16n8k16, and ldmatrix for every operand.

The elements of S that a lane holds are, rounded to 16 bits, those of P that it needs for P . V (ptx/fragments.py).
"""

from numba import float32, uint32

from ...ptx import ldmatrix, mma
from ..score import fragment_softmax
from ..steps.basics import chunk_pair, inlined, panel_offset
from .products import Products


def make(config):
    strips, s_blocks, o_blocks = config.warp_rows // 16, config.tile_n // 8, config.head_dim_v_padded // 8
    s_count = strips * s_blocks * 4
    q_panel, kv_panel = config.tile_m * 128, config.tile_n * 128  # bytes
    # Unrolled steps of 16 of head_dim: all of them up to 128 and if Q stays in registers; otherwise some at a time,
    # because the 16 steps of head_dim 256 spill registers. Each step has its own slot of Q's fragments, even if slots
    # share registers: that makes the compiler unroll the loop over them.
    q_registers, steps = config.q_registers, config.head_dim_padded // 16
    at_once = steps if q_registers or steps <= 8 else max(n for n in range(1, 9) if steps % n == 0)
    product = mma.m16n8k16_f16 if config.dtype == "float16" else mma.m16n8k16_bf16

    @inlined
    def lanes(lane, warp, q_smem, k_smem, v_smem):
        # For Q and V lanes 8 to 15 give the 8 rows below, for K lanes 16 to 31 do.
        return (
            q_smem + panel_offset(warp * config.warp_rows + (lane & 15), lane >> 4, config.tile_m),
            k_smem + panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, config.tile_n),
            v_smem + panel_offset(lane & 15, lane >> 4, config.tile_n),
            q_smem,
        )

    @inlined
    def load_q(q_frag, q_lane):
        """q_frag (strips, head_dim_padded / 16, 4) <- the warp's rows."""
        for strip in range(strips):
            for x in range(steps):
                a = (strip * at_once + x) * 4
                ldmatrix.x4(q_frag, a, chunk_pair(q_lane, x, q_panel) + strip * 2048)

    @inlined
    def multiply_q_k(acc_s, q_frag, k_frag, q_lane, k_lane, s_lane):
        for i in range(s_count):
            acc_s[i] = float32(0)
        for first in range(0, steps, at_once):
            for x in range(at_once):
                if not q_registers:
                    for strip in range(strips):
                        a = (strip * at_once + x) * 4
                        ldmatrix.x4(q_frag, a, chunk_pair(q_lane, first + x, q_panel) + strip * 2048)  # (16, 16)
                for n in range(config.tile_n // 16):
                    ldmatrix.x4(k_frag, 0, chunk_pair(k_lane, first + x, kv_panel) + n * 2048)  # (16 keys, 16)
                    for strip in range(strips):
                        a = (strip * at_once + x) * 4
                        product(acc_s, (strip * s_blocks + 2 * n) * 4, q_frag, a, k_frag, 0)
                        product(acc_s, (strip * s_blocks + 2 * n + 1) * 4, q_frag, a, k_frag, 2)

    @inlined
    def multiply_p_v(acc_o, p_frag, v_frag, v_lane):
        for y in range(config.tile_n // 16):
            for n in range(config.head_dim_v_padded // 16):
                ldmatrix.x4_trans(v_frag, 0, chunk_pair(v_lane, n, kv_panel) + y * 2048)  # (16 keys, 16)
                for strip in range(strips):
                    a = (strip * s_blocks + 2 * y) * 2
                    product(acc_o, (strip * o_blocks + 2 * n) * 4, p_frag, a, v_frag, 0)
                    product(acc_o, (strip * o_blocks + 2 * n + 1) * 4, p_frag, a, v_frag, 2)

    return Products(
        uint32, strips * at_once * 4, 4, strips * s_blocks * 2, lanes, load_q, multiply_q_k,
        fragment_softmax.in_16_bits(config, strips), multiply_p_v,
    )  # fmt: skip
