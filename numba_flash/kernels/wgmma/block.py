"""The roles of a wgmma block share these: the words that describe its work, and who a thread is.

One thread writes the words of a work tile to shared memory: of a query tile in the forward, of the tile that a block
owns in the backward. Everyone reads them there again and again, because registers are few.
"""

import functools
from typing import NamedTuple

from numba import int32, int64, uint32

from ...ptx import bar, fence, ld_st, local, mbarrier, setmaxnreg, shared, shfl, special
from ..score import fragments
from ..steps.basics import divide, inlined, named
from ..steps.sequence import (
    QueryTile,
    QueryWork,
    make as make_sequence,
    packed_queries,
    packed_sequence,
    queries as make_queries,
)

# The byte offset of each word in its work tile.
B, H, H_KV, FIRST_ROW, KEYS, BEGIN, FREE, CUT, STOP, MEMBERS, POS_LOW, POS_HIGH = (4 * i for i in range(12))
STATES = 48  # where the states of its tiles begin (kernels/score/tile_walk.py)
STEP = 52  # from a query tile to the next, if the block owns keys
PART = 56  # the number of its part among those of all groups (config.members), or of all query tiles (config.parts)
NONFINITE = 60  # whether some row of dQ is not finite (config.key_tiles)
# With a mask: FREE and CUT by positions alone. They replace words that no kernel with a mask uses.
POS_FREE, POS_CUT = STEP, NONFINITE
# In backward_fused with a mask: the query tiles that see the key tile by positions. It takes a turn in the dQ of each.
LINE_BEGIN, LINE_STOP = STATES, NONFINITE
# Packed sequences have neither states nor a mask. For them: the tile's first row in q, the sequence's in k and v.
# In the first work tile, for the scheduler alone: its last tile's sequence, and the number of query tiles before that.
Q_ROW, FIRST_KEY, SEQUENCE, BEFORE = PART, STATES, STEP, NONFINITE
# In the backward: the sequence's first row in q and do, and how many queries it has.
FIRST_QUERY, QUERIES = PART, NONFINITE
NONFINITE_OF_PACKED = 64  # in the place of NONFINITE, behind the others (config.state_bytes)
BYTES = 64


class WorkTile(NamedTuple):
    """A tile of queries, and the tiles of keys that they see; or a tile of keys, and the tiles of queries that see
    them."""

    b: int
    h: int  # the first query head
    h_kv: int
    first_row: int
    keys: int  # how many of the batch entry are valid
    position: int  # of the first row, among the rows of the other side
    members: int  # the number of query heads, h and those after it, or of queries of a packed tile; 0: no tile is left
    begin: int  # [begin, stop): the tiles of the other side of which some row sees something
    free: int  # [free, cut): those of which every row sees all, by positions and lengths
    cut: int
    stop: int


@functools.cache
def words(at=0):
    """-> device functions. work: the address `at` bytes before the words of a work tile.

    `_alone` are for one thread, the others for a whole warp: they broadcast the word from one lane. So ptxas knows that
    it is uniform, and with it what depends on it. Only then does it keep descriptors and counts in uniform registers.
    """

    @inlined
    def read_alone(work, which):
        return int32(ld_st.load_b32(int32(work + at + which)))

    @inlined
    def read(work, which):
        return int32(shfl.idx_b32(ld_st.load_b32(int32(work + at + which)), 0))

    def position_by(read):
        @inlined
        def position(work):
            """It has 64 bits, because an offset may be any number."""
            return int64(read(work, POS_HIGH)) << int64(32) | int64(uint32(read(work, POS_LOW)))

        return position

    @inlined
    def write(work, which, value):
        """One thread writes the word."""
        ld_st.store_b32(work + at + which, uint32(int64(value) & int64(0xFFFFFFFF)))

    @inlined
    def write_tile(work, tile):
        """One thread writes all of a WorkTile."""
        # In another order the scheduler of forward.py spills 8 bytes with three consumers.
        write(work, MEMBERS, tile.members)
        write(work, B, tile.b)
        write(work, H, tile.h)
        write(work, H_KV, tile.h_kv)
        write(work, FIRST_ROW, tile.first_row)
        write(work, KEYS, tile.keys)
        write(work, BEGIN, tile.begin)
        write(work, FREE, tile.free)
        write(work, CUT, tile.cut)
        write(work, STOP, tile.stop)
        write(work, POS_LOW, tile.position)
        write(work, POS_HIGH, int64(tile.position) >> int64(32))

    positions = dict(position=position_by(read), position_alone=position_by(read_alone))
    return named(read, read_alone, write, write_tile, **positions)


def nonfinite_word(config):
    return NONFINITE_OF_PACKED if config.packed else NONFINITE


def state_of(config):
    """The words of a block of a backward."""
    return words(config.shared_layout().state)


# These take the address of a work tile.
word, word_alone, position = words().read, words().read_alone, words().position
write, write_tile = words().write, words().write_tile


@inlined
def tile_of(work_tile):
    """The QueryTile that a work tile describes."""
    return QueryTile(word(work_tile, B), word(work_tile, H), word(work_tile, FIRST_ROW), int32(0))


def query_work(config):
    """-> work_of(tile, work_tile, arrays, strides, sizes), a device function of a forward: the QueryWork of its
    QueryTile, for one that only asks for queries. Of packed sequences it comes from the words of the work tile, and has
    no query behind it."""
    find, packed = make_queries(config), config.packed

    @inlined
    def work_of(tile, work_tile, arrays, strides, sizes):
        if packed:
            first_row = int64(tile.first_query)
            end, first_query = first_row + word(work_tile, MEMBERS), word(work_tile, Q_ROW) - first_row
            sequence = packed_queries(tile.b, first_query, end, sizes)
        else:
            sequence = find(tile.b, arrays, strides, sizes)
        return QueryWork(sequence, tile.h, int32(0), tile.first_query, tile.part)

    return work_of


@inlined
def shown_range(begin, free, cut, stop, ranges, rows):
    """-> (begin, free, cut, stop) without the tiles of `rows` rows before the first and after the last in which a mask
    leaves something. ranges: of rows, as reads.ranges gives them."""
    first, end, whole_first, whole_end = ranges
    begin, stop = max(begin, divide(first, rows)), min(stop, divide(end + int32(rows - 1), rows))
    return begin, max(free, divide(whole_first + int32(rows - 1), rows)), min(cut, divide(whole_end, rows)), stop


@inlined
def clear(array, count):
    """The elements of a local array <- 0."""
    for x in range(count):
        array[x] = 0


@inlined
def aligned(smem, alignment):
    """The first multiple of `alignment` in the block's shared memory."""
    return int32((shared.address(smem) + int32(alignment - 1)) & int32(-alignment))


@inlined
def warpgroup_index():
    """The warpgroup's index, which the compiler knows to be the same in a whole warp."""
    return int32(shfl.idx_b32(uint32(special.thread_index() >> int32(7)), 0))


@inlined
def own_thread():
    """Thread index in its warpgroup."""
    return special.thread_index() & int32(127)


@inlined
def elected():
    """Whether this lane acts for its warp."""
    return special.thread_index() & int32(31) == 0


@inlined
def rows_of_lane():
    """-> (the warp's first row in the tile of all consumers, lane). Computed again on each call, to save registers."""
    thread = special.thread_index() - 128
    return (thread >> int32(5)) * 16, thread & int32(31)


@inlined
def rows_in_warpgroup():
    """-> (the warp's first row in the tile of its warpgroup, lane)."""
    thread = own_thread()
    return (thread >> int32(5)) * 16, thread & int32(31)


@inlined
def hand_over(full):
    """Makes what the warp wrote visible to wgmma, and reports it at the mbarrier `full`."""
    fence.proxy_async()
    bar.warp_sync()
    mbarrier.arrive_if(full, elected())


def visibility(config, columns, state=words(), rows_of=rows_of_lane):
    """-> find_visible(work, i, sizes, mask_bits, distance), a device function: mask_bits <- which of the lane's scores
    of tile i count; distance <- q_pos - k_pos. It takes a while, so it runs during products. columns: of tile i;
    state: the words of the work; rows_of: as rows_of_lane, in the work tile."""
    visible, packed = fragments.tile(config, 1, columns).visible, config.packed

    @inlined
    def find_visible(work, i, sizes, mask_bits, distance):
        first_row, lane = rows_of()
        if config.of_keys:  # seen from the keys, left and right are exchanged
            left, right = sizes.right, sizes.left
            end = int64(state.read(work, QUERIES)) if packed else sizes.seqlen_q
        else:
            left, right, end = sizes.left, sizes.right, int64(state.read(work, KEYS))
        visible(i, first_row, lane, state.position(work), left, right, end, mask_bits, distance)

    return find_visible


def register_moves(config):
    """-> (give, take), device functions: the producer's warpgroup gives registers away, which the consumers take."""
    return setmaxnreg.decrease(config.registers[0]), setmaxnreg.increase(config.registers[1])


def places(config):
    """-> device functions of one thread of a backward: where a tile is in the arrays. work: where the words are."""
    packed, state = config.packed, state_of(config)

    @inlined
    def write_places(work, sequence):
        """Writes the words of packed sequences that the other functions read."""
        if packed:
            state.write(work, FIRST_QUERY, sequence.first_query)
            state.write(work, FIRST_KEY, sequence.first_key)
            state.write(work, QUERIES, sequence.seqlen_q)

    @inlined
    def entry(work):
        return int32(0) if packed else state.read_alone(work, B)

    @inlined
    def query_row(work, row):
        """The row in q and do of a row of the sequence."""
        return int32(row + state.read_alone(work, FIRST_QUERY)) if packed else row

    @inlined
    def key_row(work, row):
        return int32(row + state.read_alone(work, FIRST_KEY)) if packed else row

    return named(entry, query_row, key_row, write=write_places)


def sequence_of_work(config, whole_warp=True, queries=False):
    """-> sequence_of(work, arrays, strides, sizes), a device function of a backward: the Sequence of the tile that a
    block owns. Of packed ones it comes from the words: to look for it again takes long. whole_warp: all lanes of a warp
    call it together; queries: one only asks for its queries."""
    state, of_keys = state_of(config), config.of_keys
    read, position = (state.read, state.position) if whole_warp else (state.read_alone, state.position_alone)
    find = (make_queries if queries else make_sequence)(config)

    @inlined
    def queries_of_packed(work, arrays, strides, sizes):
        b, count = read(work, B), read(work, QUERIES)
        return packed_queries(b, read(work, FIRST_QUERY), count, sizes)

    @inlined
    def of_packed(work, arrays, strides, sizes):
        first_row = int64(read(work, FIRST_ROW))
        q_start = first_row - position(work) if of_keys else position(work) - first_row
        first_query, first_key = int64(read(work, FIRST_QUERY)), int64(read(work, FIRST_KEY))
        count, keys = int64(read(work, QUERIES)), int64(read(work, KEYS))
        return packed_sequence(read(work, B), count, keys, q_start, first_query, first_key, sizes)

    @inlined
    def found(work, arrays, strides, sizes):
        return find(read(work, B), arrays, strides, sizes)

    if config.packed:
        return queries_of_packed if queries else of_packed
    return found


def tail_zeroer(config, columns, barrier, tile_rows=None):
    """-> zero_tail(tile, rows), a device function: all consumers set rows of a tile of tile_n keys to 0, from `rows`
    on. They may hold NaN, and 0 * NaN is NaN. barrier: a named one; tile_rows: if the tile has not tile_n."""
    tile_rows, panels = tile_rows or config.tile_n, -(-columns // 64)
    panel_bytes, consumers = tile_rows * 128, 128 * config.consumers

    @inlined
    def zero_tail(tile, rows):
        zeros = local.array(4, uint32)
        clear(zeros, 4)
        for index in range(rows * 8 + special.thread_index() - 128, tile_rows * 8, consumers):
            for panel in range(panels):
                ld_st.store_v4(tile + panel * panel_bytes + index * 16, zeros, 0)
        fence.proxy_async()
        bar.sync(barrier, consumers)

    return zero_tail
