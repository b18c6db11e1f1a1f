"""Where a key of a cache lies: which page, and which row of it."""

from numba import int64

from .inlined import inlined


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
