"""Rows of O from the nodes of their keys: the upper tree, a sink, the one division.

A thread has four columns of a row. It reads eight nodes at a time, while it joins the eight before. Of these it joins
pairs, then pairs of pairs, as the tree has it; groups of eight are joined as decode_nodes.py does.
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import approx, ld_st, local, memory, minmax, special
from ..score import sum_terms
from ..steps import elements
from ..steps.inlined import inlined
from ..steps.sequence import lse_row, query_row
from ..steps.units import LN_2, LOG2_E
from .decode_nodes import Stack, joins

AT_ONCE, NUMBERS = 8, 6  # nodes; numbers of a node that a thread has: of O, m and l
ALL = AT_ONCE * NUMBERS


def make(config):
    """-> write_rows, a device function."""
    columns, threads, group = config.head_dim_v_padded, config.threads, config.group_size
    quads, slot_numbers = columns // 4, config.slot_numbers
    join, carry = joins(4, 1)
    term, store = sum_terms.make(config.scores), elements.storer(config.dtype)
    has_term, minus_inf, seeded, write_lse = term is not None, float32(-math.inf), config.seeded, config.write_lse
    log2_e, ln_2, shares = float32(LOG2_E), float32(LN_2), config.members > 1

    @inlined
    def read(n, exists, nodes, words, slot, row, quad, arrays):
        """nodes[6 * n :] <- the thread's numbers of a node, or of none."""
        there, base = uint32(1) if exists else uint32(0), int64(slot) * slot_numbers
        memory.load_v4_if(words, 0, memory.address(arrays.partials, base + row * columns + quad * 4), there)
        memory.load_v2_if(words, 4, memory.address(arrays.partials, base + config.tile_m * columns + row * 2), there)
        for e in range(NUMBERS):
            nodes[n * NUMBERS + e] = words[e].view(np.float32)

    @inlined
    def join_eight(nodes):
        """The last of them <- all."""
        join(nodes, 0, nodes, 6)
        join(nodes, 12, nodes, 18)
        join(nodes, 24, nodes, 30)
        join(nodes, 36, nodes, 42)
        join(nodes, 6, nodes, 18)
        join(nodes, 30, nodes, 42)
        join(nodes, 18, nodes, 42)

    @inlined
    def first_of(item):
        """The first of all nodes of an Item."""
        return int32(item.first_node - item.shared) if shares else item.first_node

    @inlined
    def read_eight(nodes, index, words, row, quad, item, slot, of_prefix, arrays):
        """nodes <- the index-th eight of the tree's nodes, of which those of the item exist."""
        for n in range(AT_ONCE):
            number, from_row = int32(index * AT_ONCE + n), row
            first = first_of(item)
            exists = number >= first and number < first + item.nodes
            here = int32(slot + (number - item.first_node) * item.row_tiles) if exists else int32(slot)
            if shares:
                if exists and number < item.first_node:
                    here, from_row = int32(of_prefix + number), int32(item.prefix_row + row)
            read(n, exists, nodes, words, here, from_row, quad, arrays)

    @inlined
    def root(node, row, quad, item, slot, of_prefix, stack, arrays):
        """node <- that of all keys, of an Item. slot, of_prefix: of the first node of its own and of its prefix."""
        eight, ahead, words = local.array(ALL, float32), local.array(ALL, float32), local.array(NUMBERS, uint32)
        first = first_of(item)
        waiting, index = int32(0), int32(first >> 3)
        last = int32((first + item.nodes - 1) >> 3)
        read_eight(ahead, index, words, row, quad, item, slot, of_prefix, arrays)
        while index <= last:
            for e in range(ALL):
                eight[e] = ahead[e]
            read_eight(ahead, int32(index + 1), words, row, quad, item, slot, of_prefix, arrays)
            join_eight(eight)
            for e in range(NUMBERS):
                node[e] = eight[(AT_ONCE - 1) * NUMBERS + e]
            waiting = carry(node, index, index == last, waiting, int32(1), stack, arrays)
            index = special.opaque(int32(index + 1))  # written out, the loop would take too many registers

    @inlined
    def write_row(node, row, quad, tile, flags, arrays, strides, sizes, score):
        sequence, in_all = tile.sequence, int32(tile.first_row + row)
        query = int32(uint32(in_all) // uint32(group))
        head = int32(tile.h + in_all - query * group)
        m, l, factor = node[4], node[5], float32(1)
        if has_term:
            x = term(sequence.b, head, arrays, strides) * log2_e
            if l == float32(0):
                m = minus_inf
            top = minmax.maximum(m, x)
            if l != float32(0):
                factor = approx.ex2(m - top)
            l = cuda.fma(l, factor, float32(0) if x == minus_inf else approx.ex2(x - top))
            m = top
        inverse = float32(0) if l == float32(0) else factor * approx.rcp(l)
        if seeded:
            inverse *= score.kept_count
        at, nonfinite = query_row(strides.o, sequence, head, query), float32(0)
        for i in range(4):
            column = int32(quad * 4 + i)
            value = node[i] * inverse
            nonfinite += value * float32(0)
            if column < config.head_dim_v:
                store(arrays.o, at + column * strides.o[3], value)
        if nonfinite != float32(0):
            ld_st.store_b32(int32(flags + row * config.ROW_STATE_BYTES), uint32(1))
        if write_lse:
            if quad == 0:
                row_lse = minus_inf if l == float32(0) else (m + approx.lg2(l)) * ln_2
                arrays.lse[lse_row(sequence, head, query, sizes)] = row_lse

    @inlined
    def write_rows(item, slot, of_prefix, tile, flags, place, thread, arrays, strides, sizes, score):
        """Writes O and lse of a Tile (decode.py), whose nodes are in memory. flags: a word of each row, which becomes 1
        if the row is not finite. place: where nodes of the thread may wait in arrays.partials."""
        node, waits = local.array(NUMBERS, float32), local.array(NUMBERS, float32)
        stack = Stack(waits, int32(0), place, int64(config.node_numbers * threads), int64(threads))
        for index in range(thread, tile.rows_left * quads, threads):
            row = int32(uint32(index) // uint32(quads))
            quad = int32(index - row * quads)
            root(node, row, quad, item, slot, of_prefix, stack, arrays)
            write_row(node, row, quad, tile, flags, arrays, strides, sizes, score)

    return write_rows
