"""Prefixes that sequences share: rows of several sequences lie in one tile, so that K and V of the prefix are read once
for all of them.

prefix_of[b] is the first of the sequences, side by side, that begin with the same prefix_lens[b] keys. Each
config.members of them are together. The first of these leads: its pages are read. The prefix has as many chunks as each
of its rows sees, but for the last one, and another sequence takes part if each of its rows sees them, too. So what a
sequence has to do with a prefix follows from the leader's numbers and its own, whatever the arrays say of others.

A node of a prefix is handed over once, in a slot that has the rows of all. Each sequence counts these nodes with its
own ones, and whoever completes them joins them, in the order of the tree. Where the nodes of the prefix and its own
begin is noted behind all slots: who has handed over the ones does not know of the others.
"""

from numba import cuda, int32, int64, uint32

from ...config.kvcache import page_arrays
from ...ptx import ld_st, memory
from ..steps.basics import inlined, row_keys


def parts(config, sequence_of):
    """-> part_of(b, arrays, strides, sizes): (the sequence that leads, how many chunks of the prefix both have)."""

    @inlined
    def no_part_of(b, arrays, strides, sizes):
        return int32(-1), int32(0)

    members, chunk_bits, own = config.members, config.CHUNK.bit_length() - 1, len(page_arrays(config.pages))
    if members == 1:
        return no_part_of
    firsts, lens = (config.parameters.arrays.index(f"aux{own + n}") for n in range(2))
    by_firsts, by_lens = (config.parameters.strides.index(f"aux{own + n}") for n in range(2))

    @inlined
    def first_of(b, arrays, strides):
        return int32(arrays[firsts][b * strides[by_firsts][1]])

    @inlined
    def chunks_of(b, arrays, strides, sizes):
        """Whole chunks of what is said to be its prefix that each row of a sequence sees, without the last one."""
        found = sequence_of(b, arrays, strides, sizes)
        _, end = row_keys(found.q_start, sizes.left, sizes.right, found.keys)
        if found.seqlen_q <= 0:
            end = int64(0)
        chunks = int64(arrays[lens][b * strides[by_lens][1]]) >> chunk_bits
        return int32(max(min(chunks, (end - 1) >> chunk_bits), 0))

    @inlined
    def part_of(b, arrays, strides, sizes):
        first, leader, chunks = first_of(b, arrays, strides), int32(-1), int32(0)
        if first >= 0 and first <= b:
            leader = int32(b - (b - first) % members)
            if leader + 1 < sizes.batch and first_of(leader, arrays, strides) == first:
                if first_of(leader + 1, arrays, strides) == first:
                    chunks = chunks_of(leader, arrays, strides, sizes)
                    if chunks_of(b, arrays, strides, sizes) < chunks:
                        chunks = int32(0)
        return leader, chunks

    return part_of


def arrivals(config, member_of):
    """-> (arrive, slots_of), device functions. member_of: of decode_work.py."""

    @inlined
    def note_of(item, arrays, sizes):
        """The address of two words: the slots at which the nodes of the prefix and, behind it, its own begin."""
        parts, sequences = config.blocks, sizes.batch * sizes.heads_kv
        at = (parts + config.blocks + sequences) * config.slot_numbers + int64(item.counter - parts) * 2
        return memory.address(arrays.partials, at)

    shares = config.members > 1

    @inlined
    def slots_of(item, arrays, sizes):
        """-> the slots at which an Item's own nodes and those of its prefix begin, once they are all there."""
        slot, of_prefix = item.node_slot, int32(0)
        if shares and item.shared > 0:
            note = note_of(item, arrays, sizes)
            of_prefix = int32(memory.load_b32_if(note, uint32(1)))
            slot = int32(memory.load_b32_if(note + 4, uint32(1)))
        return slot, of_prefix

    @inlined
    def arrive(item, level, words, thread, arrays, strides, sizes):
        """Reports that this block handed a node over. A word in shared memory for each sequence that has it <- 1 if all
        others of the sequence are there."""
        cuda.threadfence()
        cuda.syncthreads()
        if thread < max(item.members, int32(1)):
            own = member_of(item, int32(thread), level, arrays, strides, sizes)
            complete = uint32(1) if own.nodes == 1 else uint32(0)
            if own.shared > 0:
                note = note_of(own, arrays, sizes) + int64(0 if item.members > 0 else 4)
                memory.exchange(note, uint32(item.node_slot))  # several blocks note the same number
                cuda.threadfence()
            if own.nodes > 1:
                counter = memory.address(arrays.counters, int64(own.counter))
                if memory.add(counter, uint32(1)) == uint32(own.nodes - 1):
                    memory.exchange(counter, uint32(0))
                    complete = uint32(1)
            ld_st.store_b32(int32(words + thread * 4), complete)
        cuda.syncthreads()
        cuda.threadfence()

    return arrive, slots_of
