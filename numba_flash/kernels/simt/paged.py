"""Where v2 finds keys that lie in the pages of a cache: the Sequence of a batch entry, and loads of its tiles.

Numbers of pages are clamped, because the host cannot look at them without waiting; rows behind the valid keys are not
read at all. Addresses are int64 from the page on: a pool may have more than 2^31 elements.
"""

import collections

from numba import cuda, int64

from ..steps import elements, pages, sequence
from ..steps.sequence import Sequence, span

# A Sequence and its pages: two arrays with their strides (pages.py), keys of a page, pages of the pool.
_FIELDS = (*Sequence._fields, "table", "indptr", "by_table", "by_indptr", "page", "pages")
PagedSequence = collections.namedtuple("PagedSequence", _FIELDS)  # type: ignore[misc]


def make(config):
    """-> sequence_of(b, arrays, strides, sizes). Lengths are clamped already (append.py), in seqlens_k."""
    contiguous, q_start_of = sequence.make(config.scores), sequence.first_position(config)
    table, indptr, by_table, by_indptr = pages.places_of_pages(config)

    @cuda.jit(device=True)
    def own_of(b, arrays, strides, sizes):
        """The Sequence of entry b of packed queries; seqlens_k has the number of its keys."""
        first_query, queries = span(arrays.cu_seqlens_q, b, strides.cu_seqlens_q, sizes.total_q, sizes.seqlen_q, sizes)
        keys = int64(arrays.seqlens_k[b * strides.seqlens_k])
        q_start = q_start_of(b, queries, keys, arrays, strides, sizes)
        return sequence.packed_sequence(b, queries, keys, q_start, first_query, int64(0), sizes)

    found_of = own_of if config.packed else contiguous

    @cuda.jit(device=True)
    def sequence_of(b, arrays, strides, sizes):
        own = found_of(b, arrays, strides, sizes)
        return PagedSequence(
            own.b, own.seqlen_q, own.keys, own.q_start, own.entry, own.first_query, own.first_key, own.rows, own.count,
            arrays[table], arrays[indptr], strides[by_table], strides[by_indptr], sizes.page, sizes.pages,
        )  # fmt: skip

    return sequence_of


def key_loader(config, tile_row, columns):
    """-> load(tile, source, strides, sequence, h_kv, first_row, thread), as that of kernels/steps/tiles.py."""
    compute, tile_rows, threads = elements.COMPUTE_TYPES[config.dtype], config.tile_n, config.threads
    load_element, zero, page_of = elements.loader(config.dtype, compute), compute(0), pages.finder(config.pages)

    @cuda.jit(device=True)
    def load(tile, source, strides, sequence, h_kv, first_row, thread):
        for index in range(thread, tile_rows * tile_row, threads):
            row, column = index // tile_row, index % tile_row
            value, key = zero, int64(first_row + row)
            if key < sequence.keys and column < columns:
                number, at = key // sequence.page, key % sequence.page
                where = sequence.table, sequence.indptr, sequence.by_table, sequence.by_indptr
                page = page_of(sequence.b, number, *where)
                page = min(max(page, int64(0)), sequence.pages - 1)
                place = page * strides[0] + h_kv * strides[1] + at * strides[2] + column * strides[3]
                value = load_element(source, place)
            tile[index] = value

    return load
