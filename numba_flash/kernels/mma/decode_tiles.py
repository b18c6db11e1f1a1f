"""The tiles of decode: queries of all heads of a KV head as rows, and keys wherever they lie.

Where a row of K or V lies is looked up by one thread, a tile ahead of the copies, and noted in shared memory as an
address; 0 is no row. Those that a thread copies lie side by side, and are loaded two at a time. A tile of K or V is
config.key_warps tiles of config.tile_n keys, one for each key warp.

Keys before the first one that a row of the block sees and behind the last are not read: the pages of a window's past
may belong to others by now. Numbers of pages that do not exist are zeros.
"""

from numba import int32, int64, uint32

from ...config.forward import tile_bytes
from ...ptx import ld_st, local, memory, special
from ..steps import pages
from ..steps.async_tiles import copier
from ..steps.basics import inlined, named, panel_offset
from ..steps.sequence import query_row


def make(config, sequence_of):
    """-> device functions: load_q, pages_of, look_up, put_place, load_keys."""
    threads, size, keys, warp_keys = config.threads, config.item_size, config.keys, config.tile_n
    columns, columns_v, group = config.head_dim_padded, config.head_dim_v_padded, config.group_size
    piece, copy = copier(config.copy_bytes)
    in_16, paged = 16 // piece, config.pages in ("table", "csr")
    pages_of, entry_of, page_of = _entries(config)
    stage_places, v_places = 2 * keys * 8, keys * 8

    @inlined
    def offset_of(row, n, rows):
        """The offset of the n-th piece of a row in a tile."""
        chunk = n // in_16
        return panel_offset(row, chunk, rows) + (n - chunk * in_16) * piece

    shares, rows_each = config.members > 1, config.tile_m // config.members

    @inlined
    def load_q(q_smem, sequence, h, first_row, rows_left, thread, arrays, strides, sizes):
        """Start to copy the rows from first_row on; the caller commits. h: the first head of the group."""
        pieces = columns * size // piece
        for index in range(thread, config.tile_m * pieces, threads):
            row = int32(uint32(index) // uint32(pieces))
            n = int32(index - row * pieces)
            in_all, of = uint32(first_row + row), sequence
            if shares:  # the tile of a prefix has rows of several sequences
                in_all, number = uint32(row % rows_each), row // rows_each if row < rows_left else 0
                of = sequence_of(int64(sequence.b + number), arrays, strides, sizes)
            query = int32(in_all // uint32(group))
            at = query_row(strides.q, of, h + (int32(in_all) - query * group), query)
            count = min(max(size * config.head_dim - piece * n, 0), piece)
            if shares:
                count = count if query < of.seqlen_q else 0
            source = memory.address(arrays.q, at) + int64(n * piece)
            copy(q_smem + offset_of(row, n, config.tile_m), source, count if row < rows_left else 0)

    @inlined
    def look_up(j, tile, arrays, strides, sizes):
        """-> (the entry of the page with the thread's row of tile j, the row in it, or -1 without one). Nothing here
        waits for the entry."""
        thread = special.thread_index()
        key, there = int32(j * keys + (thread & (keys - 1))), uint32(0)
        if thread < 2 * keys and key >= tile.first_key and key < tile.end_key:
            there = uint32(1)
        number, row = int32(0), key
        if paged:
            number = int32(uint32(key) // uint32(sizes.page))
            row = int32(key - number * int32(sizes.page))
        return entry_of(tile.pages, number, there, arrays, strides), row if there != 0 else int32(-1)

    @inlined
    def put_place(places, stage, entry, row, tile, arrays, strides, sizes):
        """Notes the address of the thread's row, the first half of which are those of K; behind a barrier the others
        see it."""
        thread = special.thread_index()
        if thread < 2 * keys:
            page, place = page_of(tile.pages, entry), int64(0)
            if row >= 0 and page >= 0 and page < sizes.pages:
                if thread & keys != 0:
                    at = page * strides.v[0] + tile.h_kv * strides.v[1] + row * strides.v[2]
                    place = memory.address(arrays.v, at)
                else:
                    at = page * strides.k[0] + tile.h_kv * strides.k[1] + row * strides.k[2]
                    place = memory.address(arrays.k, at)
            two, low, own = local.array(2, uint32), int64(0xFFFFFFFF), int32(thread & (keys - 1))
            two[0], two[1] = uint32(place & low), uint32((place >> 32) & low)
            at = keys + v_note(own) if thread & keys != 0 else k_note(own)
            ld_st.store_v2(int32(places + stage * stage_places + at * 8), two, 0)

    def of_rows(columns, head_dim):
        pieces, tile = columns * size // piece, tile_bytes(warp_keys, columns, size)
        # As in steps/async_tiles.py: if a thread keeps its column, its places are constants apart.
        rows_a_step, steps = threads // pieces, -(-keys * pieces // threads)
        regular = threads % pieces == 0 and keys % (2 * rows_a_step) == 0  # powers of 2
        words_of_all = 2 * steps + 2

        @inlined
        def note(row):
            """Where a row's address is noted: those of a thread are neighbours."""
            return (row % rows_a_step) * steps + row // rows_a_step if regular else row

        @inlined
        def address(words, at):
            return int64(words[at]) | int64(words[at + 1]) << 32

        @inlined
        def place_in(row, n):
            return int32((row // warp_keys) * tile + offset_of(row % warp_keys, n, warp_keys))

        @inlined
        def load(target, places, thread):
            row, words = int32(uint32(thread) // uint32(pieces)), local.array(words_of_all, uint32)
            n = int32(thread - row * pieces)
            if regular:
                for step in range(0, steps, 2):  # all of them first: shared memory takes longer than an instruction
                    ld_st.load_v4(words, 2 * step, int32(places + row * (steps * 8) + step * 8))
                to = int32(target + place_in(row, n))
                count = min(max(size * head_dim - piece * n, 0), piece)
                for step in range(steps):
                    first = step * rows_a_step
                    here = (to ^ int32((first & 7) << 4)) + int32(first // warp_keys * tile + first % warp_keys * 128)
                    place = address(words, 2 * step)
                    copy(int32(here), place + int64(n * piece), count if place != 0 else 0)
            else:
                for step in range(steps):
                    index = uint32(thread + step * threads)
                    row = int32(index // uint32(pieces))
                    n = int32(index) - row * pieces
                    if keys * pieces % threads == 0 or row < keys:
                        words[0] = ld_st.load_b32(int32(places + row * 8))
                        words[1] = ld_st.load_b32(int32(places + row * 8 + 4))
                        place = address(words, 0)
                        count = min(max(size * head_dim - piece * n, 0), piece)
                        copy(int32(target + place_in(row, n)), place + int64(n * piece), count if place != 0 else 0)

        return load, note

    (load_k, k_note), (load_v, v_note) = of_rows(columns, config.head_dim), of_rows(columns_v, config.head_dim_v)
    v_at = tile_bytes(keys, columns, size)

    @inlined
    def load_keys(ring, places, stage):
        """Start to copy the tile whose places are noted; the caller commits. The thread's number is read anew, so that
        its places are not kept in registers."""
        thread = special.thread_index()
        to, noted = int32(ring + stage * config.stage_bytes), int32(places + stage * stage_places)
        load_k(to, noted, thread)
        load_v(int32(to + v_at), int32(noted + v_places), thread)

    return named(load_q, look_up, put_place, load_keys, pages_of=pages_of, v_at=v_at)


def _entries(config):
    """-> (first_of, entry_of, page_of). first_of finds where a sequence's page numbers begin, or its only page. The
    others find a page in two steps: the first does not wait for what it loads."""
    table, indptr, by_table, by_indptr = pages.places_of_pages(config)
    page_in, load_if = pages.finder(config.pages), memory.load_b32_if
    in_table, in_list = config.pages == "table", config.pages == "csr"
    is_paged = in_table or in_list

    @inlined
    def first_of(sequence, arrays, strides):
        if in_table:
            return int64(sequence.b) * strides[by_table][2]
        if in_list:
            return int64(arrays[indptr][sequence.b * strides[by_indptr][1]])
        return page_in(sequence.b, 0, arrays[table], arrays[indptr], strides[by_table], strides[by_indptr])

    @inlined
    def entry_of(first, number, there, arrays, strides):
        if in_table:
            by = strides[by_table]
            entry = memory.address(arrays[table], first + number * by[3])
            return load_if(entry, there if number < by[1] else uint32(0))
        if in_list:  # a sequence has no more keys than pages for them (decode_work.py)
            at = max(first, 0) + number
            return load_if(memory.address(arrays[table], at * strides[by_table][1]), there)
        return uint32(0)

    @inlined
    def page_of(first, entry):
        return int64(int32(entry)) if is_paged else first

    return first_of, entry_of, page_of
