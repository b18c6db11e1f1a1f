"""Writes new keys and values into a cache, turns queries and new keys by their positions (rotary embedding, Su et al.,
RoFormer, 2021), and counts the valid keys of each sequence.

What has no place is not written: positions behind a sequence's pages, numbers of pages that do not exist, negative
slots, and rows of padding, whose length is negative. Nothing is read on the host.

Launch: grid (rows + batch), block (config.threads). A block has a row, which is query i and new key i of a sequence;
the last `batch` blocks have a sequence each.
"""

from numba import cuda, int32, int64

from ..steps import elements, pages
from ..steps.basics import inlined


def make(config):
    at, compute, threads = config.at, elements.COMPUTE_TYPES[config.dtype], config.threads
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    ragged, has_slots, rotates = "cu_seqlens_q" in at, "slots" in at, "rotary_cos" in at
    has_k, has_v, has_indptr = "k_new" in at, "v_new" in at, config.pages == "csr"
    turns_q, has_offsets, from_lengths = "q" in at, "q_offset" in at, config.from_lengths
    load_cos = elements.loader(
        {name: dtype for name, dtype, _ in config.arrays}.get("rotary_cos", config.dtype), compute
    )
    interleaved, page_of = config.rotary_interleaved, pages.finder(config.pages)
    ends, lengths, totals = at.get("cu_seqlens_q", 0), at["seqlens_k"], at["totals"]
    table, indptr = at.get("pages", 0), at.get("page_indptr", 0)
    cos, sin, slots, offsets = (at.get(name, 0) for name in ("rotary_cos", "rotary_sin", "slots", "q_offset"))
    k_new, v_new, k, v, q, turned = (at.get(name, 0) for name in ("k_new", "v_new", "k", "v", "q", "turned"))

    @inlined
    def room_of(b, arrays, strides, sizes):
        """How many keys a sequence has room for."""
        if has_indptr:
            by, total = strides[indptr], strides[table][0]
            first, end = int64(arrays[indptr][b * by[1]]), int64(arrays[indptr][(b + 1) * by[1]])
            return max(min(end, total) - max(first, 0), 0) * sizes.page
        return sizes.capacity

    @inlined
    def span_of(b, arrays, strides, sizes):
        """-> (first row of a sequence, how many)"""
        if ragged:
            by = strides[ends][1]
            first = min(max(int64(arrays[ends][b * by]), 0), sizes.total_q)
            return first, max(min(int64(arrays[ends][(b + 1) * by]), sizes.total_q) - first, 0)
        return int64(0), sizes.queries

    @inlined
    def sequence_of(row, arrays, strides, sizes):
        """-> (b, index in it); b = -1 of a row of no sequence."""
        if ragged:
            for b in range(sizes.batch):
                first, count = span_of(b, arrays, strides, sizes)
                if first <= row and row < first + count:
                    return int64(b), row - first
            return int64(-1), int64(0)
        return row // sizes.row_step, row % sizes.row_step

    @inlined
    def keys_after(b, arrays, strides, sizes):
        """-> valid keys before the new ones, and with them."""
        before = int64(arrays[lengths][b * strides[lengths][1]])
        _, count = span_of(b, arrays, strides, sizes)
        new = count if ragged and has_k else sizes.new
        total = min(before + new, room_of(b, arrays, strides, sizes)) if before >= 0 else int64(0)
        return before, total

    @inlined
    def write_rows(to, source, to_base, from_base, by_to, by_from, heads, dim, half, position, arrays, strides):
        """to[h] = source[h] of each head; the first 2 * half columns are turned."""
        for index in range(cuda.threadIdx.x, heads * dim, threads):
            h, x = index // dim, index % dim
            value = load(source, from_base + h * by_from[0] + x * by_from[1])
            if rotates:
                if x < 2 * half:
                    pair, is_first, other = x // 2, x % 2 == 0, x + 1 - 2 * (x % 2)
                    if not interleaved:
                        pair, is_first, other = x % half, x < half, (x + half) % (2 * half)
                    by = strides[cos]
                    angle = min(max(position, 0), by[0] - 1)
                    c = load_cos(arrays[cos], angle * by[2] + pair * by[3])
                    s = load_cos(arrays[sin], angle * strides[sin][2] + pair * strides[sin][3])
                    partner = load(source, from_base + h * by_from[0] + other * by_from[1])
                    value = value * c - partner * s if is_first else partner * s + value * c
            store(to, to_base + h * by_to[0] + x * by_to[1], value)

    @inlined
    def place_of(b, i, row, position, arrays, strides, sizes):
        """-> (page, row in it) of a new key; page = -1 if it has no place."""
        if has_slots:
            by = strides[slots]
            slot = int64(arrays[slots][row * by[1]] if ragged else arrays[slots][b * by[2] + i * by[3]])
            page = slot // sizes.page if slot >= 0 else int64(-1)
            return page if page < sizes.pages else int64(-1), slot % sizes.page
        if position >= room_of(b, arrays, strides, sizes):
            return int64(-1), int64(0)
        page = page_of(b, position // sizes.page, arrays[table], arrays[indptr], strides[table], strides[indptr])
        return page if page < sizes.pages else int64(-1), position % sizes.page

    @inlined
    def row_of(by, b, i, row):
        """Where a row of an array of queries or new keys begins, and its strides of heads and columns. The strides come
        after the extents: (batch, head, row, column), or (row, head, column)."""
        if ragged:
            return row * by[3], (by[4], by[5])
        return b * by[4] + i * by[6], (by[5], by[7])

    @cuda.jit
    def append(arrays, strides, sizes):
        block = int64(cuda.blockIdx.x)
        if block >= sizes.rows:
            b = block - sizes.rows
            if cuda.threadIdx.x == 0:
                _, total = keys_after(b, arrays, strides, sizes)
                arrays[totals][b] = int32(total)
            return
        b, i = sequence_of(block, arrays, strides, sizes)
        if b < 0:
            return
        before, total = keys_after(b, arrays, strides, sizes)
        _, queries = span_of(b, arrays, strides, sizes)
        new, half = queries if ragged else sizes.new, strides[cos][1] if rotates else int64(0)
        if has_k:
            if i < new and before >= 0:
                page, at_row = place_of(b, i, block, before + i, arrays, strides, sizes)
                if page >= 0:
                    base, by = row_of(strides[k_new], b, i, block)
                    to = strides[k]
                    to_base = page * to[4] + at_row * to[6]
                    write_rows(
                        arrays[k], arrays[k_new], to_base, base, (to[5], to[7]), by, sizes.heads_kv, sizes.head_dim,
                        half, before + i, arrays, strides,
                    )  # fmt: skip
                    if has_v:
                        base, by = row_of(strides[v_new], b, i, block)
                        to = strides[v]
                        to_base = page * to[4] + at_row * to[6]
                        write_rows(
                            arrays[v], arrays[v_new], to_base, base, (to[5], to[7]), by, sizes.heads_kv,
                            sizes.head_dim_v, int64(0), before + i, arrays, strides,
                        )  # fmt: skip
        if turns_q:
            if i < queries:
                start = sizes.q_offset
                if from_lengths:
                    start = start + total - queries
                if has_offsets:
                    start = start + int64(arrays[offsets][b * strides[offsets][1]])
                base, by = row_of(strides[q], b, i, block)
                to_base, by_to = row_of(strides[turned], b, i, block)
                write_rows(
                    arrays[turned], arrays[q], to_base, base, by_to, by, sizes.heads, sizes.head_dim, half, start + i,
                    arrays, strides,
                )  # fmt: skip

    return append
