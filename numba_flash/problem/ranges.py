"""Which keys a query sees and which tiles contain them: integers only, shared by every rung.

Causal, window, lengths and offsets reduce to one half-open interval of keys for each query, `row_keys`. Both of its
ends grow with the query's position. So a query tile needs only the intervals of its first and last row: their union
gives the key tiles to visit, and their intersection gives those that need no mask. So a loop over tiles is three loops:

    left     tiles that the lower edge cuts (a window), or that a short union never leaves
    free     tiles that every row sees whole: no mask in the loop
    right    tiles that the upper edge cuts (the causal diagonal, the last, ragged tile)

These are plain Python functions of ints. They are compiled into the GPU kernels and the CPU rung, and tests call them
as they are.
"""

# Means "no bound on this side". Larger than any position, and far from overflowing an int64 sum.
UNBOUNDED = 1 << 40


def row_keys(q_pos, left, right, seqlen_k):
    """The keys [first, end) that a query at absolute position q_pos sees, clipped to [0, seqlen_k].

    Key j is visible if q_pos - left <= j <= q_pos + right. The interval is empty if end <= first.
    """
    first = min(max(q_pos - left, 0), seqlen_k)
    end = min(max(q_pos + right + 1, 0), seqlen_k)
    return first, end


def key_queries(k_pos, q_offset, left, right, seqlen_q):
    """The queries [first, end) that see key k_pos, clipped to [0, seqlen_q]: `row_keys` from the key's side.

    q_offset is the position of query 0. Both ends grow with k_pos, so `key_tiles` also finds the query tiles of a
    key tile: from the queries of its first and of its last key.
    """
    first = min(max(k_pos - right - q_offset, 0), seqlen_q)
    end = min(max(k_pos + left - q_offset + 1, 0), seqlen_q)
    return first, end


def key_tiles(first_row_first, first_row_end, last_row_first, last_row_end, tile_n):
    """The key tiles of a query tile: [begin, free) is left, [free, cut) is free, [cut, end) is right.

    The arguments are `row_keys` of the query tile's first and of its last row. Always begin <= free <= cut <= end, and
    begin == end if no row sees a key.
    """
    begin = first_row_first // tile_n
    end = (last_row_end + tile_n - 1) // tile_n
    if last_row_end <= first_row_first:
        end = begin
    free = min(max((last_row_first + tile_n - 1) // tile_n, begin), end)
    cut = min(max(first_row_end // tile_n, free), end)
    return begin, free, cut, end
