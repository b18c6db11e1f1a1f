"""Nodes of the tree that gives a row its bits: m, l and O of some chunks of keys, not divided yet.

A chunk's node joins what the key warps found in it. Two neighbouring nodes are joined, then two neighbours of these: a
pair is joined once it is complete, so a stack of nodes is enough, as in counting in binary. A node without keys leaves
the other's bits as they are. So the tree depends on a row's own keys alone, whoever computes which part of it.

m is a whole number, in log2. So factors are powers of 2, products exact, and a join rounds only its sums.

Numbers of a node lie in one array: those of O, then m of each row, then l of each row.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint32

from ...ptx import ld_st, local
from ..steps import numbers
from ..steps.basics import first_column_of, first_row_of, inlined, named
from ..steps.repeated import repeated
from ..steps.units import LOG2_E, exponent_unit


class Stack(NamedTuple):
    """Where a thread's numbers of nodes wait: those of level 0 may do so in registers, the next levels in shared memory
    from `first` on, the others in arrays.partials from `rest` on, level_step from one level to the next, and `step`
    from number to number."""

    registers: Any
    first: int
    rest: int
    level_step: int
    step: int


def joins(dtype, o_count, rows, shared=(0, 0, 0), in_registers=True):
    """-> (join, carry), device functions for nodes of so many numbers of O and rows. The numbers of O are those of one
    row, or in the order of fragments: four of a block, two for each of two rows, and blocks of a strip of 16 rows.

    in_registers: whether nodes of level 0 wait in registers. shared: how many levels wait in shared memory, where rows
    that are 8 apart are 128 bytes apart; the bytes of a level; and those from number to number. None in float64.
    """
    real, ex2, maximum = (of := numbers.of(dtype)).real, of.exp2, of.maximum
    of_row, in_strip = o_count // rows, o_count // max(rows // 2, 1) // 4
    count, outside = o_count + 2 * rows, 1 if in_registers else 0  # outside: the first level that is not in registers
    shared_levels, level_bytes, number_bytes = shared

    @inlined
    def number(r, n):
        """The index of the n-th number of O in row r."""
        return ((r // 2) * in_strip + n // 2) * 4 + (r % 2) * 2 + n % 2 if rows > 1 else n

    @inlined
    def factors_of(left_m, left_l, node, at, r):
        """Joins m and l of row r of node[at :] with those to the left. -> (the factors of the left and the right O,
        whether the node is the left one, whether it is both). A node of no keys does not change the other's bits:
        nothing is added to them."""
        m, l = node[at + o_count + r], node[at + o_count + rows + r]
        top = maximum(left_m, m)
        left_factor, factor = ex2(left_m - top), ex2(m - top)
        of_left, of_both = l == real(0), left_l != real(0) and l != real(0)
        sums = cuda.fma(left_l, left_factor, l * factor)
        node[at + o_count + r] = top if of_both else left_m if of_left else m
        node[at + o_count + rows + r] = sums if of_both else left_l if of_left else l
        return left_factor, factor, of_left, of_both

    @inlined
    def join(left, left_at, node, at):
        """node[at :] <- left[left_at :] joined with node[at :], which has the keys behind."""
        for r in range(rows):
            left_m, left_l = left[left_at + o_count + r], left[left_at + o_count + rows + r]
            left_factor, factor, of_left, of_both = factors_of(left_m, left_l, node, at, r)
            for n in range(of_row):
                e = number(r, n)
                both = cuda.fma(left[left_at + e], left_factor, node[at + e] * factor)
                node[at + e] = both if of_both else left[left_at + e] if of_left else node[at + e]

    @inlined
    def index_of(r, n):
        return number(r, n) if n < of_row else o_count + r + (n - of_row) * rows

    @inlined
    def shared_place(stack, level, r):
        return int32(stack.first + (level - outside) * level_bytes + r * 128)

    @inlined
    def put(node, stack, level, there, arrays):
        """Stores the existing rows of a node, which then waits on a level."""
        place = stack.rest + int64(level) * stack.level_step
        for r in range(rows):
            if (there >> r) & 1 != 0:
                if shared_levels > 0 and level < outside + shared_levels:
                    at = shared_place(stack, level, r)
                    for n in range(of_row + 2):
                        ld_st.store_b32(int32(at + n * number_bytes), node[index_of(r, n)].view(np.uint32))
                else:
                    for n in range(of_row + 2):
                        e = index_of(r, n)
                        arrays.partials[place + e * stack.step] = node[e]

    def joiner(reads):
        """reads(stack, level, arrays, r, n): the n-th number of row r of the node that waits on a level."""

        @inlined
        def join_row(r, node, stack, level, arrays):
            left_m, left_l = reads(stack, level, arrays, r, of_row), reads(stack, level, arrays, r, of_row + 1)
            left_factor, factor, of_left, of_both = factors_of(left_m, left_l, node, 0, r)
            for n in range(of_row):
                e, left = number(r, n), reads(stack, level, arrays, r, n)
                both = cuda.fma(left, left_factor, node[e] * factor)
                node[e] = both if of_both else left if of_left else node[e]

        return join_row

    @inlined
    def in_shared_memory(stack, level, arrays, r, n):
        return ld_st.load_b32(int32(shared_place(stack, level, r) + n * number_bytes)).view(np.float32)

    @inlined
    def in_global_memory(stack, level, arrays, r, n):
        return arrays.partials[stack.rest + int64(level) * stack.level_step + index_of(r, n) * stack.step]

    join_from_shared, join_from_global = joiner(in_shared_memory), joiner(in_global_memory)

    @inlined
    def join_waiting(node, stack, level, there, arrays):
        """Joins the existing rows of a node with those that wait on a level."""
        for r in range(rows):
            if (there >> r) & 1 != 0:
                if shared_levels > 0 and level < outside + shared_levels:
                    join_from_shared(r, node, stack, level, arrays)
                else:
                    join_from_global(r, node, stack, level, arrays)

    @inlined
    def carry(node, index, last, waiting, there, stack, arrays):
        """Joins the index-th node with those to its left that wait for it. If it is the last one, with all that wait;
        otherwise the result waits. -> the levels on which one waits, as bits. there: the rows that exist, as bits."""
        level, rest = int32(0), int32(index)
        if in_registers and waiting & int32(1) != 0:
            join(stack.registers, 0, node, 0)
        while rest & int32(1) != 0 or (last and waiting >> level != 0):
            if level >= outside and (waiting >> level) & int32(1) != 0:
                join_waiting(node, stack, level, there, arrays)
            waiting = int32(waiting & ~(int32(1) << level))
            level, rest = int32(level + 1), int32(rest >> int32(1))
        if not last:
            if level >= outside:
                put(node, stack, level, there, arrays)
            elif in_registers:
                for e in range(count):
                    stack.registers[e] = node[e]
            waiting = int32(waiting | (int32(1) << level))
        return waiting

    return join, carry


def of_chunks(config):
    """-> device functions: join_warps, put."""
    rows, key_warps = config.lane_rows, config.key_warps
    columns, o_blocks = config.head_dim_v_padded, config.head_dim_v_padded // 8
    blocks, row_warps, at_once = o_blocks // key_warps, config.tile_m // config.warp_rows, config.parts_at_once
    of, double, size = numbers.of(config.compute_dtype), config.compute_dtype == "float64", config.number_size
    real, ex2, maximum, bfly, ceil = of.real, of.exp2, of.maximum, of.bfly, of.ceil
    count, to_log2 = rows * blocks * 2, real(LOG2_E / exponent_unit(config))
    natural, pair, chunk = exponent_unit(config) == 1.0, 2 * size, 4 if config.item_size == 4 else 1

    @inlined
    def store_pair(at, first, second):
        if double:
            two = local.array(2, real)
            two[0], two[1] = first, second
            ld_st.store_v2_f64(int32(at), two, 0)
        else:
            ld_st.store_b32(int32(at), first.view(np.uint32))
            ld_st.store_b32(int32(at + 4), second.view(np.uint32))

    @inlined
    def load_pair(at):
        if double:
            two = local.array(2, real)
            ld_st.load_v2_f64(two, 0, int32(at))
            return two[0], two[1]
        return ld_st.load_b32(int32(at)).view(np.float32), ld_st.load_b32(int32(at + 4)).view(np.float32)

    @inlined
    def store_four(at, four):
        if double:
            ld_st.store_v2_f64(int32(at), four, 0)
            ld_st.store_v2_f64(int32(at + 16), four, 2)
        else:
            words = local.array(4, uint32)
            for i in range(4):
                words[i] = four[i].view(np.uint32)
            ld_st.store_v4(int32(at), words, 0)

    @inlined
    def load_four(four, at):
        if double:
            ld_st.load_v2_f64(four, 0, int32(at))
            ld_st.load_v2_f64(four, 2, int32(at + 16))
        else:
            words = local.array(4, uint32)
            ld_st.load_v4(words, 0, int32(at))
            for i in range(4):
                four[i] = words[i].view(np.float32)

    @inlined
    def exchange_place(exchange, part, key_warp, row_warp, lane):
        warp = (part * key_warps + key_warp) * row_warps + row_warp
        return int32(exchange + warp * (count * 32 * size) + lane * (4 * size))

    @inlined
    def join_states(m, l, node, factor, states, lane, key_warp, row_warp):
        """node <- its m and l; factor (rows,) <- that of the warp's own part of O."""
        for r in range(rows):
            l[r] += bfly(l[r], 1)
        for r in range(rows):
            l[r] += bfly(l[r], 2)
            if natural:
                m[r] = maximum(m[r] * to_log2, of.lowest)
        own = states + (key_warp * config.tile_m + row_warp * config.warp_rows + int32(first_row_of(lane))) * pair
        if lane & 3 == 0:
            for r in range(rows):
                store_pair(own + r * 8 * pair, m[r], l[r])
        cuda.syncthreads()  # everyone is done with the tile, too
        first = states + (row_warp * config.warp_rows + int32(first_row_of(lane))) * pair
        for r in range(rows):
            top = m[r]
            for w in range(key_warps):
                other, _ = load_pair(first + (w * config.tile_m + r * 8) * pair)
                top = maximum(top, other)
            top, total = ceil(top), real(0)
            for w in range(key_warps):
                other_m, other_l = load_pair(first + (w * config.tile_m + r * 8) * pair)
                total = cuda.fma(other_l, ex2(other_m - top), total)
            node[count + r], node[count + rows + r] = top, total
            factor[r] = ex2(m[r] - top)

    @inlined
    def place_of(block, i):
        """-> (strip, block of columns, element of the block, row) of number 4 * block + i of a node."""
        if rows == 1:
            return 0, 2 * block + i // 2, i % 2, 0
        return block // blocks, block % blocks, i, block // blocks * 2 + i // 2

    @inlined
    def give(first, acc_o, factor, exchange, lane, key_warp, row_warp):
        four = local.array(4, real)
        for part in range(at_once):
            to = exchange_place(exchange, part, key_warp, row_warp, lane)
            for block in range(count // 4):
                for i in range(4):
                    strip, u, of_block, r = place_of(block, i)
                    four[i] = acc_o[(strip * o_blocks + (first + part) * blocks + u) * 4 + of_block] * factor[r]
                store_four(to + block * (128 * size), four)

    @inlined
    def take(first, node, exchange, lane, key_warp, row_warp):
        part, four = int32(key_warp - first), local.array(4, real)
        if part >= 0 and part < at_once:
            for block in range(count // 4):
                for i in range(4):
                    node[block * 4 + i] = real(0)
                for w in range(key_warps):
                    at = exchange_place(exchange, part, w, row_warp, lane)
                    load_four(four, at + block * (128 * size))
                    for i in range(4):
                        node[block * 4 + i] += four[i]

    @inlined
    def join_part(number, acc_o, node, factor, exchange, lane, key_warp, row_warp):
        """Joins the columns of at_once key warps. The next ones take their place in shared memory."""
        first = int32(number * at_once)
        if number > 0:
            cuda.syncthreads()
        give(first, acc_o, factor, exchange, lane, key_warp, row_warp)
        cuda.syncthreads()
        take(first, node, exchange, lane, key_warp, row_warp)

    join_every_part = repeated(join_part, key_warps // at_once)

    @inlined
    def join_warps(acc_o, m, l, node, factor, states, exchange, lane, key_warp, row_warp):
        """node <- what the key warps found in a chunk: the warp's part of the columns. exchange: the place of a tile
        that all are done with behind a barrier here. The caller owes one before its next use."""
        join_states(m, l, node, factor, states, lane, key_warp, row_warp)
        join_every_part(acc_o, node, factor, exchange, lane, key_warp, row_warp)

    @inlined
    def put(node, slot, rows_left, lane, key_warp, row_warp, arrays):
        """Hands a node over: O of each row, then m and l of each row."""
        base = int64(slot) * config.slot_numbers
        first_row = int32(row_warp * config.warp_rows + int32(first_row_of(lane)))
        in_panel = int32(first_column_of(lane)) * chunk
        for r in range(rows):
            row = first_row + r * 8
            if row < rows_left:
                at = base + row * columns + in_panel
                for u in range(blocks):
                    e = 2 * u if rows == 1 else ((r // 2) * blocks + u) * 4 + (r % 2) * 2
                    block = key_warp * blocks + u
                    # A panel of products_float32.py has 8 * chunk columns, as many blocks as a chunk.
                    column = int32(block // chunk * (8 * chunk) + block % chunk)
                    arrays.partials[at + column] = node[e]
                    arrays.partials[at + column + chunk] = node[e + 1]
                if key_warp == 0 and lane & 3 == 0:
                    state = base + config.tile_m * columns + row * 2
                    arrays.partials[state] = node[count + r]
                    arrays.partials[state + 1] = node[count + rows + r]

    return named(join_warps, put, count=count)
