"""The products of backward.py in float16 and bfloat16, for one warp: m16n8k16, and ldmatrix for every operand.

A warp owns `warp_rows` rows of the block's own tiles, in strips of 16, and multiplies them by the rows of the tiles
that the block walks over: once for S and once for dP. Then it multiplies P or dS by such a tile and adds the result to
a gradient's sums. All tiles lie in panels in shared memory (ptx/fragments.py), and functions take their addresses. With
`column_groups` warps own the same rows. Each has the scores of a part of the other rows, and sums up its part of a
gradient's columns.

The elements of S and dP that a lane holds are, rounded to 16 bits, those of P and dS that it needs as an operand. Warps
that own the same rows exchange P, and then dS, in one place in shared memory.
"""

import functools

from numba import float32, int32, uint32

from ...ptx import bar, cvt, ld_st, ldmatrix, mma, special
from ..steps.basics import chunk_pair, first_column_of, first_row_of, inlined, named, nothing, panel_offset


def make(config):
    """-> device functions, and the numbers and types of registers that a lane needs for operands. All but lanes,
    scores_product and put are in backward_fp32_fp64.py, too."""
    groups, shift, strips = config.column_groups, config.column_groups.bit_length() - 1, config.strips
    part, blocks, half = config.part, config.part // 8, config.dtype == "float16"  # blocks of 8 columns of scores
    own_panel, other_panel = config.own_rows * 128, config.other_rows * 128  # bytes
    product, pack = (mma.m16n8k16_f16, cvt.pack_f16x2) if half else (mma.m16n8k16_bf16, cvt.pack_bf16x2)
    # whether every warp of a group has all of its columns
    whole = groups == 1 or config.head_dim_padded == config.head_dim_v_padded == config.group_columns * groups

    @inlined
    def lanes(thread):
        """-> (own, other, other transposed): the addresses of this lane's matrix rows, from the beginning of a tile."""
        lane, warp = thread & int32(31), thread >> int32(5)
        own = panel_offset((warp >> shift) * config.warp_rows + (lane & 15), lane >> 4, config.own_rows)
        other = panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, config.other_rows)
        other += (warp & (groups - 1)) * (part * 128)
        transposed = panel_offset(lane & 15, lane >> 4, config.other_rows)
        return own, other, transposed

    def own_loader(columns):
        steps = columns // 16

        @inlined
        def load(a_frag, own_lane):
            """a_frag (strips, columns / 16, 4) <- the warp's rows."""
            for strip in range(strips):
                for x in range(steps):
                    ldmatrix.x4(a_frag, (strip * steps + x) * 4, chunk_pair(own_lane, x, own_panel) + strip * 2048)

        return load

    load_s, load_dp = own_loader(config.head_dim_padded), own_loader(config.head_dim_v_padded)

    @inlined
    def load_own(s_frag, dp_frag, own_s, own_dp):
        own_lane, _, _ = lanes(special.thread_index())
        load_s(s_frag, own_s + own_lane)
        load_dp(dp_frag, own_dp + own_lane)

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
            """acc (strips, part / 8, 4) += own . other^T over `columns`. a_frag (strips, columns / 16, 4): from
            load_own; without in_registers it is loaded here."""
            for x in range(at_once):
                step(x, acc, a_frag, b_frag, own_lane, other_lane)
            for x in range(8, steps):
                step(x, acc, a_frag, b_frag, own_lane, other_lane)

        return multiply

    def multiplier(columns, adds):
        add_product = scores_product(columns)

        @inlined
        def multiply(acc, own_frag, other_frag, own, other):
            """acc = own . other^T, or if it adds acc += that."""
            if not adds:
                for x in range(strips * blocks * 4):
                    acc[x] = float32(0)
            own_lane, other_lane, _ = lanes(special.thread_index())
            add_product(acc, own_frag, other_frag, own + own_lane, other + other_lane)

        return multiply

    @inlined
    def round_row(acc, weights, r):
        """weights <- row r of the lane's, as an operand."""
        for n in range(blocks):
            block = (r // 2) * blocks + n
            weights[block * 2 + r % 2] = pack(acc[block * 4 + (r % 2) * 2], acc[block * 4 + (r % 2) * 2 + 1])

    @inlined
    def sync_owners():
        """Waits for all warps that own the same rows."""
        bar.sync((special.thread_index() >> int32(5 + shift)) + 1, 32 * groups)

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
    def first_column(thread):
        """The first of the columns of a gradient that a warp sums up."""
        return int32(((thread >> int32(5)) & (groups - 1)) * config.group_columns)

    @inlined
    def own_panels(tile, thread):
        """Where in a tile the lane's rows of those columns begin, for a transposed operand."""
        return tile + int32((first_column(thread) >> 6) * other_panel + lanes(thread)[2])

    @inlined
    def add_own_part(sums, weights, b_frag, tile, columns, thread):
        """sums += the warp's part of the scores, from its registers, . its rows of the tile."""
        columns_left, rows = columns - first_column(thread), own_panels(tile, thread)
        rows = rows + ((thread >> int32(5)) & (groups - 1)) * (part * 128)
        for y in range(part // 16):
            add_own_columns(y, sums, weights, 4 * y, 2 * blocks, b_frag, rows, columns_left)

    @inlined
    def add_other_parts(sums, a_frag, b_frag, tile, at, columns, thread):
        """sums += the parts of the group's other warps, which `put` has stored, . their rows. a_frag (strips, 4)."""
        own_lane, columns_left = at + lanes(thread)[0], columns - first_column(thread)
        rows = own_panels(tile, thread)
        for beside in range(1, groups):
            member = ((thread >> int32(5)) + beside) & (groups - 1)
            its_part = rows + member * (part * 128)
            for y in range(part // 16):
                for strip in range(strips):
                    weights = chunk_pair(own_lane, member * (part // 16) + y, own_panel) + strip * 2048
                    ldmatrix.x4(a_frag, strip * 4, weights)
                add_own_columns(y, sums, a_frag, 0, 4, b_frag, its_part, columns_left)

    def adder(columns):
        add_rows = rows_adder(columns)

        @inlined
        def add(sums, weights, other_frag, shared_frag, tile, at):
            """sums += weights . tile; at: where warps exchange weights."""
            if groups == 1:
                rows = tile + lanes(special.thread_index())[2]
                for y in range(config.other_rows // 16):
                    add_rows(y, sums, weights, 4 * y, 2 * blocks, other_frag, rows, columns)
            else:
                # The thread's number is read again for each product, so that addresses are not kept in registers
                # through the others.
                thread = special.thread_index()
                put(weights, at, thread)
                add_own_part(sums, weights, other_frag, tile, columns, thread)
                bar.sync((thread >> int32(5 + shift)) + 1, 32 * groups)
                add_other_parts(sums, shared_frag, other_frag, tile, at, columns, special.thread_index())

        return add

    return named(
        load_own, round_row, adder, sync_owners, lanes, scores_product, put,
        multiply_s=multiplier(config.head_dim_padded, False),
        multiply_dp=multiplier(config.head_dim_v_padded, config.delta_first),
        to_operand=nothing,
        meet=nothing,
        register=uint32,
        s_count=strips * config.head_dim_padded // 4,
        dp_count=strips * config.head_dim_v_padded // 4,
        other_count=4,
        weight_count=strips * blocks * 2,
        shared_type=uint32,
        shared_count=4 * strips,
    )  # fmt: skip
