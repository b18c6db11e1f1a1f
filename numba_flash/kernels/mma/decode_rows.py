"""Rows of O from the nodes of their keys: the upper tree, a sink, the one division.

A thread has 16 bytes of a row's columns. It reads 32 nodes at a time, or eight in float64: memory takes longer than all
joins. Of these it joins pairs, then pairs of pairs, as the tree has it; groups are joined as decode_nodes.py does.
"""

import numpy as np
from numba import cuda, int32, int64, uint32

from ...ptx import ld_st, local, memory, special
from ..score import sum_term
from ..steps import elements, numbers
from ..steps.basics import inlined, nothing
from ..steps.sequence import lse_row, query_row
from ..steps.units import LN_2, LOG2_E
from .decode_nodes import Stack, joins


def make(config):
    """-> write_rows, a device function."""
    columns, threads, group = config.head_dim_v_padded, config.threads, config.group_size
    of, double, own = numbers.of(config.compute_dtype), config.compute_dtype == "float64", 16 // config.number_size
    quads, slot_numbers, count = columns // own, config.slot_numbers, own + 2  # a thread's numbers of a node
    at_once, group_bits = (8, 3) if double else (32, 5)  # nodes
    real, everything, (join, carry) = of.real, at_once * count, joins(config.compute_dtype, own, 1)
    term, store = sum_term.make(config.scores), elements.storer(config.dtype)
    has_term, minus_inf, seeded, write_lse = term is not None, of.minus_inf, config.seeded, config.write_lse
    log2_e, ln_2, shares = real(LOG2_E), real(LN_2), config.members > 1

    @inlined
    def read(n, exists, nodes, words, slot, row, quad, arrays):
        """nodes[count * n :] <- the thread's numbers of a node, or of none."""
        there, base = uint32(1) if exists else uint32(0), int64(slot) * slot_numbers
        of_o = memory.address(arrays.partials, base + row * columns + quad * own)
        of_sums = memory.address(arrays.partials, base + config.tile_m * columns + row * 2)
        if double:
            for e in range(2):
                nodes[n * count + e] = memory.load_f64_if(of_o + e * 8, there)
                nodes[n * count + own + e] = memory.load_f64_if(of_sums + e * 8, there)
        else:
            memory.load_v4_if(words, 0, of_o, there)
            memory.load_v2_if(words, 4, of_sums, there)
            for e in range(count):
                nodes[n * count + e] = words[e].view(np.float32)

    def joiner(number):
        """-> join_all(nodes, at), a device function. It joins so many nodes from `at` on into the last one."""
        step = number // 2 * count
        join_half = joiner(number // 2) if number > 2 else nothing

        @inlined
        def join_all(nodes, at):
            join_half(nodes, at)
            join_half(nodes, int32(at + step))
            join(nodes, int32(at + step - count), nodes, int32(at + 2 * step - count))

        return join_all

    half = at_once // 2
    join_half, step = joiner(half), half * count

    @inlined
    def join_group(nodes, node, more):
        """node <- all of them joined. more: whether there are any in the second half."""
        join_half(nodes, int32(0))
        if more:
            join_half(nodes, int32(step))
            join(nodes, int32(step - count), nodes, int32(2 * step - count))
        for e in range(count):
            node[e] = nodes[2 * step - count + e] if more else nodes[step - count + e]

    @inlined
    def read_group(nodes, index, first, words, row, quad, item, slot, of_prefix, arrays):
        """nodes <- the index-th group of the tree's nodes, of which those of the item exist."""
        for n in range(at_once):
            number, from_row = int32(index * at_once + n), row
            exists = number >= first and number < first + item.nodes
            here = int32(slot + (number - item.first_node) * item.row_tiles) if exists else int32(slot)
            if shares:
                if exists and number < item.first_node:
                    here, from_row = int32(of_prefix + number), int32(item.prefix_row + row)
            read(n, exists, nodes, words, here, from_row, quad, arrays)

    @inlined
    def root(node, row, quad, item, slot, of_prefix, stack, arrays):
        """node <- that of all keys of an Item. slot, of_prefix: the slots of its own first node and of its prefix's."""
        nodes, words = local.array(everything, real), local.array(6, uint32)
        first = int32(item.first_node - item.shared) if shares else item.first_node  # of all nodes
        waiting, index = int32(0), int32(first >> group_bits)
        last = int32((first + item.nodes - 1) >> group_bits)
        while index <= last:
            read_group(nodes, index, first, words, row, quad, item, slot, of_prefix, arrays)
            join_group(nodes, node, first + item.nodes > index * at_once + half)
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
        for index in range(thread, tile.rows_left * quads, threads):
            row = int32(uint32(index) // uint32(quads))
            quad = int32(index - row * quads)
            root(node, row, quad, item, slot, of_prefix, stack, arrays)
            write_row(node, row, quad, tile, flags, arrays, strides, sizes, score)

    return write_rows
