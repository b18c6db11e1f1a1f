"""Chooses the work of each decode block on the device, from the lengths of all sequences: the host plans nothing.

Keys are cut into chunks of config.CHUNK at absolute positions. An item is a node of 2^level neighbouring chunks, for a
row tile of a KV head of a sequence. If a sequence has one node, one block computes all of it. Otherwise its nodes are
parts: blocks hand them over, and the last block to arrive joins them. Parts come first. level is the lowest that gives
no more than config.blocks of them. Then blocks have about as much to do, however unequal the sequences are.

Nodes of a prefix that sequences share (decode_prefixes.py) are parts of the sequence that leads.

A warp looks at 32 sequences at a time, and all warps find the same.
"""

from typing import NamedTuple

from numba import cuda, int32, int64, uint32

from ...ptx import local, shfl, vote
from ..steps import pages, sequence
from ..steps.basics import inlined, named, row_keys, tiles_of
from ..steps.sequence import Sequence
from . import decode_prefixes

LEVELS = 8
MANY = 1 << 24  # a lane counts no more items than this, so that sums fit into 32 bits


class Cursor(NamedTuple):
    """How far a block has looked for its items. whole: it looks for whole sequences, not for parts. first: the first of
    32 sequences. before: the number of items before that one."""

    whole: int
    first: int
    before: int


class Chunks(NamedTuple):
    """A sequence's row tiles, the first and the last chunk in which they see keys, and its part of a prefix."""

    row_tiles: int
    first: int
    last: int
    leader: int
    shared: int


class Item(NamedTuple):
    """b = -1: there is no item left."""

    b: int
    h_kv: int
    row_tile: int
    node: int  # at absolute positions
    nodes: int  # how many the sequence has, with those of its prefix
    node_slot: int  # where the sequence's first node is handed over; the others follow
    first_node: int  # the sequence's first, without those of its prefix
    shared: int  # nodes of a prefix before it
    counter: int  # which counter counts the nodes that are there
    members: int  # sequences whose rows are in the tile of a prefix; 0: the node is the sequence's own
    prefix_row: int  # the sequence's first row in such a tile


def make(config):
    """-> device functions: sequence_of, level_of, next_item, member_of."""
    group, chunk_bits, most = config.group_size, config.CHUNK.bit_length() - 1, config.blocks
    sequence_of, members, none = _sequence(config), config.members, int32(0)
    part_of, shares, rows_each = decode_prefixes.parts(config, sequence_of), members > 1, config.tile_m // members

    @inlined
    def chunks_of(b, arrays, strides, sizes):
        found = sequence_of(b, arrays, strides, sizes)
        begin, _ = row_keys(found.q_start, sizes.left, sizes.right, found.keys)
        _, end = row_keys(found.q_start + found.seqlen_q - 1, sizes.left, sizes.right, found.keys)
        first, last = int32(begin >> chunk_bits), int32((end - 1) >> chunk_bits)
        if end <= begin:
            first, last = int32(0), int32(0)
        leader, shared = part_of(b, arrays, strides, sizes)
        return Chunks(tiles_of(found.seqlen_q * group, config.tile_m), first, last, leader, shared)

    @inlined
    def own_nodes(chunks, level):
        """-> (the first node of a sequence that is not one of its prefix, how many these are)"""
        last, first = chunks.last >> level, int32(chunks.first >> level)
        if shares:
            first = int32(max(first, chunks.shared >> level))
        return first, int32(last - first + 1)

    @inlined
    def prefix_items(b, chunks, level, whole):
        """The nodes of a prefix whose tile sequence b leads; they are parts."""
        return int32(chunks.shared >> level) if chunks.leader == b and whole == 0 else int32(0)

    @inlined
    def items_of(b, chunks, level, whole):
        """The number of a sequence's items for one KV head: whole ones if `whole`, otherwise parts."""
        _, nodes = own_nodes(chunks, level)
        items = chunks.row_tiles
        if nodes > 1:
            items = int32(min(int64(items) * nodes, int64(MANY)))
        own = items if (nodes == 1) == (whole != 0) else int32(0)
        return int32(own + prefix_items(b, chunks, level, whole)) if shares else own

    @inlined
    def level_of(lane, arrays, strides, sizes):
        """A node has 2^level chunks. LEVELS of them are tried at a time."""
        counts, level = local.array(LEVELS, int32), int32(0)
        while True:
            for n in range(LEVELS):
                counts[n] = int32(0)
            b = int32(lane)
            while b < int32(sizes.batch):
                chunks = chunks_of(b, arrays, strides, sizes)
                for n in range(LEVELS):
                    more = items_of(b, chunks, int32(level + n), int32(0))
                    counts[n] = int32(min(counts[n] + more, MANY))
                b = int32(b + 32)
            above = int32(0)
            for n in range(LEVELS):
                above += int32(1) if int64(shfl.sum_s32(counts[n])) * sizes.heads_kv > most else int32(0)
            level = int32(level + above)
            if above < LEVELS:
                return level

    @inlined
    def inclusive(count, lane):
        """The sum over the lanes up to one's own."""
        total = uint32(count)
        for step in range(5):
            distance = int32(1 << step)
            other = shfl.idx_b32(total, int32(max(lane - distance, 0)))
            if lane >= distance:
                total = uint32(total + other)
        return int32(total)

    @inlined
    def member_of(item, m, level, arrays, strides, sizes):
        """-> the Item of the m-th sequence to which the node of an Item belongs; without nodes if it does not. Its own
        nodes are left out."""
        if item.members == 0:
            return item
        b = int32(item.b + m)
        chunks = chunks_of(b, arrays, strides, sizes)
        shared, last = int32(chunks.shared >> level), int32(chunks.last >> level)
        if chunks.leader != item.b or shared == 0:
            return Item(b, none, none, none, none, none, none, none, none, none, none)
        counter, row = int32(most + b * sizes.heads_kv + item.h_kv), int32((b - chunks.leader) * rows_each)
        return Item(b, item.h_kv, none, none, int32(last + 1), none, shared, shared, counter, none, row)

    @inlined
    def shared_item(b, rest, number, chunks, level, whole, sizes):
        """The Item of a sequence that may have a prefix, and which has one row tile: rest is its number in b."""
        of_prefix, of_head = prefix_items(b, chunks, level, whole), items_of(b, chunks, level, whole)
        h_kv, shared = int32(uint32(rest) // uint32(of_head)), int32(chunks.shared >> level)
        node = int32(rest - h_kv * of_head - of_prefix)
        slot = int32(number - node)
        if node < 0:
            there = int32(min(members, sizes.batch - b))
            slot, node = int32(slot - of_prefix), int32(node + of_prefix)
            return Item(b, h_kv, none, node, none, slot, none, of_prefix, none, there, none)
        counter, row, last = slot, int32((b - chunks.leader) * rows_each), int32(chunks.last >> level)
        if shared > 0:
            counter = int32(most + b * sizes.heads_kv + h_kv)
            if whole != 0:
                slot = int32(counter + config.blocks)  # whoever joins it may be another block
        node = int32(shared + node)
        return Item(b, h_kv, none, node, int32(last + 1), slot, shared, shared, counter, none, row)

    @inlined
    def next_item(cursor, number, level, lane, arrays, strides, sizes):
        """-> (the number-th Item, the Cursor to look for later ones)."""
        whole, first, before = cursor.whole, cursor.first, cursor.before
        heads_kv = int32(sizes.heads_kv)
        b, rest = int32(-1), int32(0)
        while b < 0:
            if first >= int32(sizes.batch):
                if whole != 0:
                    break
                whole, first = int32(1), int32(0)
            count, own = int32(0), int32(first + lane)
            if own < int32(sizes.batch):
                count = items_of(own, chunks_of(own, arrays, strides, sizes), level, whole)
            up_to = inclusive(count, lane)
            here = int32(shfl.idx_b32(uint32(up_to), int32(31)))
            if number < before + here * heads_kv:
                behind = vote.ballot(uint32(1) if number >= before + up_to * heads_kv else uint32(0))
                owner = int32(cuda.popc(behind))
                b = int32(first + owner)
                rest = int32(number - before) - int32(shfl.idx_b32(uint32(up_to - count), owner)) * heads_kv
            else:
                before = int32(before + here * heads_kv)
                first = int32(first + 32)
        cursor = Cursor(whole, first, before)
        if b < 0:
            return Item(b, none, none, none, none, none, none, none, none, none, none), cursor
        chunks = chunks_of(b, arrays, strides, sizes)
        if shares:
            return shared_item(b, rest, number, chunks, level, whole, sizes), cursor
        first_node = int32(chunks.first >> level)
        nodes = int32((chunks.last >> level) - first_node + 1)
        of_head = int32(chunks.row_tiles * nodes)
        h_kv = int32(uint32(rest) // uint32(of_head))
        rest = int32(rest - h_kv * of_head)
        row_tile = int32(uint32(rest) // uint32(nodes))
        node = int32(rest - row_tile * nodes)
        slot = int32(number - node)
        item = Item(b, h_kv, row_tile, int32(first_node + node), nodes, slot, first_node, none, slot, none, none)
        return item, cursor

    return named(sequence_of, level_of, next_item, member_of)


def _sequence(config):
    """-> sequence_of(b, arrays, strides, sizes). Lengths are clamped to the room of a sequence: they are on the
    device."""
    packed, csr, q_start_of = config.packed, config.pages == "csr", sequence.first_position(config)
    keys_of = sequence.valid_keys(config)
    indices, indptr, by_indices, by_indptr = pages.places_of_pages(config)

    @inlined
    def sequence_of(b, arrays, strides, sizes):
        room = sizes.seqlen_k
        if csr:
            total, by = strides[by_indices][0], strides[by_indptr][1]
            first = max(int64(arrays[indptr][b * by]), 0)
            room = min(max(min(int64(arrays[indptr][(b + 1) * by]), total) - first, 0) * sizes.page, room)
        keys = keys_of(b, room, arrays, strides)
        entry, first_query, queries, rows, count = int64(b), int64(0), sizes.seqlen_q, sizes.seqlen_q, int64(0)
        if packed:
            first_query, queries = sequence.span(
                arrays.cu_seqlens_q, b, strides.cu_seqlens_q, sizes.total_q, sizes.seqlen_q, sizes
            )
            entry, rows, count = int64(0), sizes.total_q, sizes.batch
        q_start = q_start_of(b, queries, keys, arrays, strides, sizes)
        return Sequence(int32(b), queries, keys, q_start, entry, first_query, int64(0), rows, count)

    return sequence_of
