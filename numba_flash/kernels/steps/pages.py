"""Where a key of a cache lies: which page, and which row of it."""

from numba import int32, int64, uint32

from .basics import inlined


def finder(pages):
    """-> page_of(b, number, arrays, strides): the number of a sequence's page `number`. The first arrays say where
    pages are; strides of each are (shape, strides). -1 if there is none."""

    @inlined
    def of_table(b, number, table, indptr, by, by_indptr):
        return int64(table[b * by[2] + number * by[3]]) if number < by[1] else int64(-1)

    @inlined
    def of_csr(b, number, indices, indptr, by, by_indptr):
        at = int64(indptr[b * by_indptr[1]]) + number
        end = min(int64(indptr[(b + 1) * by_indptr[1]]), by[0])
        return int64(indices[at * by[1]]) if at >= 0 and at < end else int64(-1)

    @inlined
    def of_entries(b, number, entries, indptr, by, by_indptr):
        return int64(entries[b * by[1]])

    @inlined
    def of_own(b, number, table, indptr, by, by_indptr):
        return int64(b)

    return dict(table=of_table, csr=of_csr, entries=of_entries, own=of_own)[pages]


def places_of_pages(config):
    """-> the indices of the two arrays that say where pages are, among arrays and among strides; of none, any."""
    names = config.parameters.arrays, config.parameters.strides
    first = [kind.index("aux0") if config.pages != "own" and "aux0" in kind else 0 for kind in names]
    more = config.pages == "csr"
    return first[0], first[0] + more, first[1], first[1] + more


def key_places(config):
    """-> place_of_key(sequence, key, arrays, strides, sizes): (page, row in it) of a key in 31 bits. There may be no
    such page."""
    page_of, (table, indptr, by_table, by_indptr) = finder(config.pages), places_of_pages(config)
    paged = config.pages in ("table", "csr")

    @inlined
    def place_of_key(sequence, key, arrays, strides, sizes):
        number, row = int32(0), int64(key)
        if paged:
            number = int32(uint32(key) // uint32(sizes.page))
            row = int64(int32(key) - number * int32(sizes.page))
        where = arrays[table], arrays[indptr], strides[by_table], strides[by_indptr]
        return page_of(sequence.b, number, where[0], where[1], where[2], where[3]), row

    return place_of_key
