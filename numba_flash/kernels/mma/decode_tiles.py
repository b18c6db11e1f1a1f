"""The tiles of decode: queries of all heads of a KV head as rows, and keys wherever they lie.

Where a row of K or V lies is looked up by one thread, a tile ahead of the copies, and noted in shared memory as an
address; 0 is no row. A tile of K or V is config.KEY_WARPS tiles of config.tile_n keys, one for each key warp.

Keys before the first one that a row of the block sees and behind the last are not read: the pages of a window's past
may belong to others by now. Numbers of pages that do not exist are zeros.
"""

from numba import int32, int64, uint32

from ...ptx import ld_st, local, memory, special
from ..steps import pages
from ..steps.async_tiles import copier
from ..steps.inlined import inlined
from ..steps.named import named
from ..steps.plain import panel_offset
from ..steps.sequence import query_row


def make(config):
    """-> device functions: load_q, place_of, put_place, load_keys."""
    threads, size, keys, warp_keys = config.threads, config.item_size, config.keys, config.tile_n
    columns, columns_v, group = config.head_dim_padded, config.head_dim_v_padded, config.group_size
    piece, copy = copier(config.copy_bytes)
    in_16, place_of_key = 16 // piece, pages.key_places(config)
    stage_places, v_places = 2 * keys * 8, keys * 8

    @inlined
    def offset_of(row, n, rows):
        """Of the n-th piece of a row, in a tile."""
        chunk = n // in_16
        return panel_offset(row, chunk, rows) + (n - chunk * in_16) * piece

    @inlined
    def load_q(q_smem, sequence, h, first_row, rows_left, thread, arrays, strides):
        """Start to copy the rows from first_row on; the caller commits. h: the first head of the group."""
        pieces = columns * size // piece
        for index in range(thread, config.tile_m * pieces, threads):
            row = int32(uint32(index) // uint32(pieces))
            n = int32(index - row * pieces)
            in_all = uint32(first_row + row)
            query = int32(in_all // uint32(group))
            at = query_row(strides.q, sequence, h + (int32(in_all) - query * group), query)
            count = min(max(size * config.head_dim - piece * n, 0), piece)
            source = memory.address(arrays.q, at) + int64(n * piece)
            copy(q_smem + offset_of(row, n, config.tile_m), source, count if row < rows_left else 0)

    @inlined
    def place_of(j, sequence, h_kv, first_key, end_key, arrays, strides, sizes):
        """The address of the thread's row of tile j, or 0; the first half of the rows are those of K."""
        thread = special.thread_index()
        key, of_v = int32(j * keys + (thread & (keys - 1))), thread & keys
        place = int64(0)
        if thread < 2 * keys and key >= first_key and key < end_key:
            page, row = place_of_key(sequence, key, arrays, strides, sizes)
            if page >= 0 and page < sizes.pages:
                if of_v != 0:
                    at = page * strides.v[0] + h_kv * strides.v[1] + row * strides.v[2]
                    place = memory.address(arrays.v, at)
                else:
                    at = page * strides.k[0] + h_kv * strides.k[1] + row * strides.k[2]
                    place = memory.address(arrays.k, at)
        return place

    @inlined
    def put_place(places, stage, place):
        """Notes it; behind a barrier the others see it."""
        thread = special.thread_index()
        if thread < 2 * keys:
            at, low = int32(places + stage * stage_places + thread * 8), int64(0xFFFFFFFF)
            two = local.array(2, uint32)
            two[0], two[1] = uint32(place & low), uint32((place >> 32) & low)
            ld_st.store_v2(at, two, 0)

    def of_rows(columns, head_dim):
        pieces, tile = columns * size // piece, warp_keys * 128 * -(-columns * size // 128)
        # As in steps/async_tiles.py: if a thread keeps its column, its places are constants apart.
        rows_a_step, steps = threads // pieces, -(-keys * pieces // threads)
        regular = threads % pieces == 0 and keys % rows_a_step == 0  # both powers of 2

        @inlined
        def address(noted):
            return int64(ld_st.load_b32(noted)) | int64(ld_st.load_b32(int32(noted + 4))) << 32

        @inlined
        def place_in(row, n):
            return int32((row // warp_keys) * tile + offset_of(row % warp_keys, n, warp_keys))

        @inlined
        def load(target, places, thread):
            row = int32(uint32(thread) // uint32(pieces))
            n = int32(thread - row * pieces)
            if regular:
                to, noted = int32(target + place_in(row, n)), int32(places + row * 8)
                count = min(max(size * head_dim - piece * n, 0), piece)
                for step in range(steps):
                    first = step * rows_a_step
                    here = (to ^ int32((first & 7) << 4)) + int32(first // warp_keys * tile + first % warp_keys * 128)
                    place = address(int32(noted + first * 8))
                    copy(int32(here), place + int64(n * piece), count if place != 0 else 0)
            else:
                for step in range(steps):
                    index = uint32(thread + step * threads)
                    row = int32(index // uint32(pieces))
                    n = int32(index) - row * pieces
                    if keys * pieces % threads == 0 or row < keys:
                        place = address(int32(places + row * 8))
                        count = min(max(size * head_dim - piece * n, 0), piece)
                        copy(int32(target + place_in(row, n)), place + int64(n * piece), count if place != 0 else 0)

        return load

    load_k, load_v = of_rows(columns, config.head_dim), of_rows(columns_v, config.head_dim_v)
    v_at = keys * 128 * -(-columns * size // 128)

    @inlined
    def load_keys(ring, places, stage):
        """Start to copy the tile whose places are noted; the caller commits. The thread's number is read anew, so that
        its places are not kept in registers."""
        thread = special.thread_index()
        to, noted = int32(ring + stage * config.stage_bytes), int32(places + stage * stage_places)
        load_k(to, noted, thread)
        load_v(int32(to + v_at), int32(noted + v_places), thread)

    return named(load_q, place_of, put_place, load_keys, v_at=v_at)
