"""Rows of O from the nodes of their keys: the upper tree, a sink, the one division.

A warp has a row, and a lane 16 bytes of its columns. It reads 32 nodes at a time: memory takes longer than all joins.
Of these it joins pairs, then pairs of pairs, as the tree has it; groups are joined as decode_nodes.py does.

m and l are those of all columns. So each lane has them of one node, and lanes join them while O is on its way: what O
of a node is multiplied by is known when it arrives.
"""

import numpy as np
from numba import cuda, int32, int64, uint32

from ...ptx import ld_st, local, memory, shfl, special, vote
from ..score import sum_term
from ..steps import elements, numbers
from ..steps.basics import inlined, nothing
from ..steps.sequence import lse_row, query_row
from ..steps.units import LN_2, LOG2_E
from .decode_nodes import Stack, joins

AT_ONCE, LEVELS = 32, 5  # nodes, and levels of their tree


def make(config):
    """-> write_rows, a device function."""
    columns, threads, group, size = config.head_dim_v_padded, config.threads, config.group_size, config.number_size
    of, double, own = numbers.of(config.compute_dtype), config.compute_dtype == "float64", 16 // size
    quads, slot_numbers, half = columns // own, config.slot_numbers, AT_ONCE // 2
    passes, real, (_, carry) = -(-quads // 32), of.real, joins(config.compute_dtype, own, 1)
    everything, factor_count, count = AT_ONCE * own, 2 * LEVELS, own + 2  # numbers of a lane
    term, store = sum_term.make(config.scores), elements.storer(config.dtype)
    has_term, minus_inf, seeded, write_lse = term is not None, of.minus_inf, config.seeded, config.write_lse
    log2_e, ln_2, shares = real(LOG2_E), real(LN_2), config.members > 1

    def reader(number):
        """-> read(values, at, place, there, words), a device function. values[at :] <- so many numbers, 0 without
        `there`."""
        load = memory.load_v4_if if number == 4 else memory.load_v2_if

        @inlined
        def read(values, at, place, there, words):
            if double:
                for e in range(number):
                    values[at + e] = memory.load_f64_if(place + e * 8, there)
            else:
                load(words, 0, place, there)
                for e in range(number):
                    values[at + e] = words[e].view(np.float32)

        return read

    read_columns, read_sums = reader(own), reader(2)

    @inlined
    def read_half(nodes, at, of_o, o_of_prefix, behind, there, words):
        """Reads half of a group, from node `at` on. behind: the first one that is not of a prefix."""
        for i in range(half):
            n = at + i
            place = o_of_prefix if shares and n < behind else of_o
            read_columns(
                nodes, n * own, place + int64(n * slot_numbers * size), (there >> uint32(n)) & uint32(1), words
            )

    @inlined
    def join_sums(m, l, factors, lane):
        """-> m and l of all lanes' nodes joined. factors <- of each level those of the left and the right O, where the
        lane is in one of the two."""
        for level in range(LEVELS):
            distance = 1 << level
            other_m, other_l, is_right = of.bfly(m, distance), of.bfly(l, distance), lane & distance != 0
            left_m, left_l = other_m if is_right else m, other_l if is_right else l
            m, l = m if is_right else other_m, l if is_right else other_l
            top = of.maximum(left_m, m)
            left_factor, factor = of.exp2(left_m - top), of.exp2(m - top)
            m, l = top, cuda.fma(left_l, left_factor, l * factor)
            factors[2 * level], factors[2 * level + 1] = left_factor, factor
        return m, l

    @inlined
    def join(level, nodes, at, factors):
        """Joins O of two nodes of 2^level others each. The last of these has it then."""
        left, right = (at + (1 << level) - 1) * own, (at + (2 << level) - 1) * own
        left_factor, factor = of.idx(factors[2 * level], at), of.idx(factors[2 * level + 1], at)
        for e in range(own):
            nodes[right + e] = cuda.fma(nodes[left + e], left_factor, nodes[right + e] * factor)

    def joiner(level):
        """-> join_all(nodes, at, factors), a device function. It joins 2^level nodes from `at` on into the last one."""
        join_half = joiner(level - 1) if level > 1 else nothing

        @inlined
        def join_all(nodes, at, factors):
            join_half(nodes, at, factors)
            join_half(nodes, int32(at + (1 << level - 1)), factors)
            join(level - 1, nodes, at, factors)

        return join_all

    join_all = joiner(LEVELS - 1)

    @inlined
    def join_half(nodes, at, empty, factors):
        """Joins half of a group, from `at` on. empty: the nodes of no keys, as bits: adding -0 leaves others' bits."""
        if (empty >> uint32(at)) & uint32((1 << half) - 1) != 0:
            for n in range(half):
                gone = (empty >> uint32(at + n)) & uint32(1) != 0
                for e in range(own):
                    place = (at + n) * own + e
                    nodes[place] = real(-0.0) if gone else nodes[place]
        join_all(nodes, at, factors)

    @inlined
    def join_group(node, index, first, row, quad, lane, item, slot, of_prefix, arrays):
        """node <- the index-th group of the tree's nodes joined, of which those of the item exist."""
        nodes, factors = local.array(everything, real), local.array(factor_count, real)
        words, begin = local.array(4, uint32), int32(index * AT_ONCE)
        at, in_group, of_sums = int64(slot) + begin - item.first_node, begin + lane, config.tile_m * columns + row * 2
        exists = uint32(1) if in_group >= first and in_group < first + item.nodes else uint32(0)
        sums = memory.address(arrays.partials, (at + lane) * slot_numbers + of_sums)
        of_o = memory.address(arrays.partials, at * slot_numbers + row * columns + quad * own)
        o_of_prefix, behind = of_o, int32(0)
        if shares:
            at, behind = int64(of_prefix) + begin, int32(item.first_node - begin)
            o_of_prefix = memory.address(
                arrays.partials, at * slot_numbers + (item.prefix_row + row) * columns + quad * own
            )
            if lane < behind:
                sums = memory.address(arrays.partials, (at + lane) * slot_numbers + of_sums + item.prefix_row * 2)
        read_sums(node, own, sums, exists, words)
        there, more = vote.ballot(exists), first + item.nodes > begin + half
        read_half(nodes, int32(0), of_o, o_of_prefix, behind, there, words)
        if more:  # a branch, too, behind which the compiler waits for m and l
            read_half(nodes, int32(half), of_o, o_of_prefix, behind, there, words)
        l = node[own + 1]
        m = of.lowest if l == real(0) else node[own]
        empty = vote.ballot(uint32(1) if l == real(0) else uint32(0))
        m, l = join_sums(m, l, factors, lane)
        join_half(nodes, int32(0), empty, factors)
        if more:
            join_half(nodes, int32(half), empty, factors)
            join(LEVELS - 1, nodes, int32(0), factors)
        for e in range(own):
            found = nodes[(AT_ONCE - 1) * own + e] if more else nodes[(half - 1) * own + e]
            node[e] = real(0) if l == real(0) else found
        node[own], node[own + 1] = m, l

    @inlined
    def root(node, row, quad, lane, item, slot, of_prefix, stack, arrays):
        """node <- that of all keys of an Item. slot, of_prefix: the slots of its own first node and of its prefix's."""
        first = int32(item.first_node - item.shared) if shares else item.first_node  # of all nodes
        waiting, index = int32(0), int32(first // AT_ONCE)
        last = int32((first + item.nodes - 1) // AT_ONCE)
        while index <= last:
            join_group(node, index, first, row, quad, lane, item, slot, of_prefix, arrays)
            waiting = carry(node, index, index == last, waiting, int32(1), stack, arrays)
            index = special.opaque(int32(index + 1))  # written out, the loop would take too many registers

    @inlined
    def write_row(node, row, quad, tile, flags, arrays, strides, sizes, score):
        sequence, in_all = tile.sequence, int32(tile.first_row + row)
        query = int32(uint32(in_all) // uint32(group))
        head = int32(tile.h + in_all - query * group)
        m, l, factor = node[own], node[own + 1], real(1)
        if has_term:
            x = term(sequence.b, head, arrays, strides) * log2_e
            if l == real(0):
                m = minus_inf
            top = of.maximum(m, x)
            if l != real(0):
                factor = of.exp2(m - top)
            l = cuda.fma(l, factor, real(0) if x == minus_inf else of.exp2(x - top))
            m = top
        inverse = real(0) if l == real(0) else factor * of.reciprocal(l)
        if seeded:
            inverse *= score.kept_count
        at, nonfinite = query_row(strides.o, sequence, head, query), real(0)
        for i in range(own):
            column = int32(quad * own + i)
            value = node[i] * inverse
            nonfinite += value * real(0)
            if column < config.head_dim_v:
                store(arrays.o, at + column * strides.o[3], value)
        if nonfinite != real(0):
            ld_st.store_b32(int32(flags + row * config.ROW_STATE_BYTES), uint32(1))
        if write_lse:
            if quad == 0:
                row_lse = minus_inf if l == real(0) else (m + of.log2(l)) * ln_2
                arrays.lse[lse_row(sequence, head, query, sizes)] = row_lse

    @inlined
    def write_rows(item, slot, of_prefix, tile, flags, place, thread, arrays, strides, sizes, score):
        """Writes O and lse of a Tile (decode.py), whose nodes are in memory. flags: a word of each row, which becomes 1
        if the row is not finite. place: where nodes of the thread may wait in arrays.partials."""
        node, waits = local.array(count, real), local.array(count, real)
        stack = Stack(waits, int32(0), place, int64(config.node_numbers * threads), int64(threads))
        lane, warp = thread & int32(31), int32(shfl.idx_b32(uint32(thread >> int32(5)), 0))
        for index in range(warp, tile.rows_left * passes, threads // 32):
            row = int32(uint32(index) // uint32(passes))
            quad = int32((index - row * passes) * 32 + lane)
            root(node, row, min(quad, int32(quads - 1)), lane, item, slot, of_prefix, stack, arrays)
            if quad < quads:
                write_row(node, row, quad, tile, flags, arrays, strides, sizes, score)

    return write_rows
