"""The products of the backward's two kernels, for one warp: one implementation for each size of elements.

A warp owns `warp_rows` rows of the block's own tiles, and multiplies them by the rows of the tiles that the block walks
over: once for S and once for dP. Then it multiplies P or dS by such a tile and adds the result to a gradient's sums.
All functions take addresses of tiles in shared memory, which lie in panels (ptx/fragments.py). With `column_groups`
warps own the same rows. Each has the scores of a part of the other rows, and sums up its part of a gradient's columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class BackwardProducts(NamedTuple):
    """Device functions, and the number and type of registers that a lane needs for their operands."""

    register: Any  # the type of operands
    s_count: int  # of the own rows' operand of S, and of that of dP
    dp_count: int
    other_count: int
    weight_count: int  # of P or dS as an operand
    shared_type: Any  # of what `add` reads of other warps' weights
    shared_count: int
    load_own: Callable[..., Any]  # (s_frag, dp_frag, own_s, own_dp): with config.in_registers
    multiply_s: Callable[..., Any]  # (acc, s_frag, other_frag, own, other): acc = own . other^T over head_dim
    multiply_dp: Callable[..., Any]  # the same over head_dim_v; with config.delta_first acc +=
    round_row: Callable[..., Any]  # (acc, weights, r): in 16 bits, weights <- row r of the lane's
    # (acc, weights, at): weights <- acc, if they are not rounded; at: where warps exchange them
    to_operand: Callable[..., Any]
    meet: Callable[..., Any]  # (): before the first `add` and behind the last `to_operand`
    # (columns) -> add(sums, weights, other_frag, shared_frag, tile, at): sums += weights . tile
    adder: Callable[..., Any]
    sync_owners: Callable[..., Any]  # (): waits for all warps that own the same rows
    storer: Callable[..., Any]  # (columns, padded) -> store(sums, factor, staged, target, base, row_stride, rows_left,
    # rows_that_count): the warp's rows of a gradient times factor, by way of the own tile at `staged`; base: where row
    # 0 of the block's begins. -> a bit for each row of the warp that is not finite, and is not stored. Rows from
    # rows_that_count on are 0.
