"""The two products of a forward tile, Q . K^T and P . V, for one warp: one implementation for each size of elements.

All implementations have the same functions. Tiles of Q, K and V lie in panels in shared memory (ptx/fragments.py).
acc_s (strips, tile_n / 8, 4) and acc_o (strips, head_dim_v_padded / 8, 4) are accumulators in strips of 16 rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..steps.basics import inlined


class Products(NamedTuple):
    """Device functions, and the number and type of registers that a lane needs for their operands."""

    register: Any  # the type of the fragments
    q_count: int
    kv_count: int
    p_count: int
    lanes: Callable[..., Any]  # (lane, warp, q_smem, k_smem, v_smem) -> where a lane's rows begin in these tiles, and
    # where it stores scores for the other warps that own its rows
    load_q: Callable[..., Any]  # (q_frag, q_lane): all of Q, if it stays in registers
    multiply_q_k: Callable[..., Any]  # (acc_s, q_frag, k_frag, q_lane, k_lane, s_lane): acc_s = Q . K^T
    to_p: Callable[..., Any]  # (acc_s, p_frag): the weights as an operand
    multiply_p_v: Callable[..., Any]  # (acc_o, p_frag, v_frag, v_lane): acc_o += P . V
    multiply_part: Callable[..., Any] = None  # (own, q_frag, k_frag, q_lane, k_lane): the warp's part of acc_s alone
    to_16: Callable[..., Any] = None  # (weights, p_frag): those of 16 keys as an operand
    add_16: Callable[..., Any] = None  # (acc_o, p_frag, v_frag, v_lane): acc_o += P . V over 16 keys, from v_lane on


def in_operand_order(blocks, as_bits=False):
    """-> to_p, a device function of float32 and float64: p_frag (blocks, 4) <- acc_s in the order of an operand."""

    @inlined
    def to_p(acc_s, p_frag):
        for block in range(blocks):
            for i in range(4):
                p = acc_s[4 * block + (i % 2) * 2 + i // 2]
                p_frag[4 * block + i] = p.view(np.uint32) if as_bits else p

    return to_p
