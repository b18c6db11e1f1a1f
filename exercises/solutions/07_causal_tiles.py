"""Which tiles does a tile of queries need?

Teaches: where half of the work of causal attention goes: tiles that no query sees are skipped, and only those on the
    diagonal are masked.
Minutes: 15
Read: docs/first_kernels.md, line 5 of listing 5
Solution: numba_flash/problem/ranges.py
"""


def key_tiles(first_row, rows, seqlen_q, seqlen_k, tile_n):
    """(unmasked, end): the queries first_row to first_row + rows - 1 need the key tiles 0 to end - 1.

    Of these, all queries see all keys of the tiles 0 to unmasked - 1, so these need no mask.
    Causal: query i sees the keys 0 to i + seqlen_k - seqlen_q, and no key after seqlen_k - 1.
    In the last tile of queries, rows is smaller. Tiles have tile_n keys; the last one may have fewer.
    """
    ahead = seqlen_k - seqlen_q
    seen_by_first = max(0, first_row + ahead + 1)
    seen_by_last = max(0, first_row + rows + ahead)
    unmasked = seen_by_first // tile_n
    end = (seen_by_last + tile_n - 1) // tile_n
    return unmasked, end
