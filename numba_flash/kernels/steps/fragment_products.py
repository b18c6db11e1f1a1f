"""The products of a backward tile, for one warp: scores from two tiles, gradients from scores and a tile.

A warp owns `warp_rows` rows of the block's own tile, in strips of 16. It multiplies them by all rows of the other tile,
the one that the block loops over. With several `column_groups`, that many warps own the same rows and each multiplies
them by its part of the other tile. All tiles lie in panels in shared memory (ptx/fragments.py).
"""

import functools

from numba import int32

from ...ptx import ld_st, ldmatrix, mma
from .basics import chunk_pair, first_column_of, first_row_of, inlined, named, panel_offset


def make(config):
    """-> device functions; load_own, scores_product and gradient_product take the `columns` of their tile and return
    one for it. `put` and what is below it: for warps that share rows."""
    strips, part, blocks = config.strips, config.part, config.part // 8  # blocks of 8 columns of scores
    own_panel, other_panel = config.own_rows * 128, config.other_rows * 128  # bytes
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    # whether every warp of a group has all of its columns
    whole = groups == 1 or config.head_dim_padded == config.head_dim_v_padded == config.group_columns * groups
    product = mma.m16n8k16_f16 if config.dtype == "float16" else mma.m16n8k16_bf16

    @inlined
    def lanes(thread):
        """-> (own, other, other transposed): the addresses of this lane's matrix rows, from the beginning of a tile."""
        lane, warp = thread & int32(31), thread >> int32(5)
        own = panel_offset((warp >> shift) * config.warp_rows + (lane & 15), lane >> 4, config.own_rows)
        other = panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, config.other_rows)
        other += (warp & (groups - 1)) * (part * 128)
        transposed = panel_offset(lane & 15, lane >> 4, config.other_rows)
        return own, other, transposed

    @functools.cache
    def load_own(columns):
        steps = columns // 16

        @inlined
        def load(a_frag, own_lane):
            """a_frag (strips, columns / 16, 4) <- the warp's rows."""
            for strip in range(strips):
                for x in range(steps):
                    ldmatrix.x4(a_frag, (strip * steps + x) * 4, chunk_pair(own_lane, x, own_panel) + strip * 2048)

        return load

    @functools.cache
    def scores_product(columns):
        steps = columns // 16
        # Without in_registers the slots have no meaning: they make the compiler unroll eight steps, not sixteen.
        at_once = min(steps, 8)
        slots = steps if config.in_registers else at_once

        @inlined
        def step(x, acc, a_frag, b_frag, own_lane, other_lane):
            if not config.in_registers:
                for strip in range(strips):
                    rows = chunk_pair(own_lane, x, own_panel) + strip * 2048
                    ldmatrix.x4(a_frag, (strip * slots + x % slots) * 4, rows)
            for n in range(part // 16):
                ldmatrix.x4(b_frag, 0, chunk_pair(other_lane, x, other_panel) + n * 2048)  # (16 rows, 16)
                for strip in range(strips):
                    a = (strip * slots + x % slots) * 4
                    product(acc, (strip * blocks + 2 * n) * 4, a_frag, a, b_frag, 0)
                    product(acc, (strip * blocks + 2 * n + 1) * 4, a_frag, a, b_frag, 2)

        @inlined
        def multiply(acc, a_frag, b_frag, own_lane, other_lane):
            """acc (strips, part / 8, 4) += own . other^T over `columns`.

            a_frag (strips, columns / 16, 4): from load_own; without in_registers it is loaded here.
            """
            for x in range(at_once):
                step(x, acc, a_frag, b_frag, own_lane, other_lane)
            for x in range(8, steps):
                step(x, acc, a_frag, b_frag, own_lane, other_lane)

        return multiply

    @functools.cache
    def rows_adder(columns):
        @inlined
        def add_rows(y, acc, a_frag, a, step, b_frag, rows, columns_left):
            """acc (strips, columns / 8, 4) += a . the y-th 16 rows of a tile, transposed, of which columns_left columns
            exist; the first of them are at `rows`. a: 16 columns of scores of a strip, `step` registers before those of
            the next."""
            for n in range(columns // 16):
                if whole or n * 16 < columns_left:
                    ldmatrix.x4_trans(b_frag, 0, chunk_pair(rows, n, other_panel) + y * 2048)  # (16 rows, 16)
                    for strip in range(strips):
                        at = (strip * (columns // 8) + 2 * n) * 4
                        product(acc, at, a_frag, a + strip * step, b_frag, 0)
                        product(acc, at + 4, a_frag, a + strip * step, b_frag, 2)

        return add_rows

    @functools.cache
    def gradient_product(columns):
        add_rows = rows_adder(columns)

        @inlined
        def multiply(acc, a_frag, b_frag, other_transposed):
            """acc (strips, columns / 8, 4) += a . other; a_frag (strips, other_rows / 8, 2) comes from the scores."""
            for y in range(config.other_rows // 16):
                add_rows(y, acc, a_frag, 4 * y, 2 * blocks, b_frag, other_transposed, columns)

        return multiply

    add_own_columns = rows_adder(config.group_columns)

    @inlined
    def put(frag, tile, thread):
        """Stores the warp's part of the 16-bit scores (own_rows, other_rows) in shared memory, for its group."""
        lane, warp = thread & int32(31), thread >> int32(5)
        for r in range(2 * strips):
            row = (warp >> shift) * config.warp_rows + int32(first_row_of(lane)) + r * 8
            for n in range(blocks):
                at = tile + panel_offset(row, (warp & (groups - 1)) * blocks + n, config.own_rows)
                ld_st.store_b32(at + 2 * int32(first_column_of(lane)), frag[((r // 2) * blocks + n) * 2 + r % 2])

    @inlined
    def own_product(acc, frag, b_frag, other_transposed, columns_left, thread):
        """acc (strips, columns / 8, 4) += the warp's part of the scores, from its registers, . its rows of the other
        tile.

        Of the warp's columns of the other tile, columns_left exist.
        """
        own_part = other_transposed + ((thread >> int32(5)) & (groups - 1)) * (part * 128)
        for y in range(part // 16):
            add_own_columns(y, acc, frag, 4 * y, 2 * blocks, b_frag, own_part, columns_left)

    @inlined
    def others_product(acc, a_frag, b_frag, own_lane, other_transposed, columns_left, thread):
        """acc += the parts of the group's other warps, which `put` has stored, . their rows.

        own_lane: that of `lanes` in a tile (own_rows, other_rows) of scores. a_frag (strips, 4).
        """
        for beside in range(1, groups):
            member = ((thread >> int32(5)) + beside) & (groups - 1)
            its_part = other_transposed + member * (part * 128)
            for y in range(part // 16):
                for strip in range(strips):
                    weights = chunk_pair(own_lane, member * (part // 16) + y, own_panel) + strip * 2048
                    ldmatrix.x4(a_frag, strip * 4, weights)
                add_own_columns(y, acc, a_frag, 0, 4, b_frag, its_part, columns_left)

    return named(lanes, load_own, scores_product, gradient_product, put, own_product, others_product)
