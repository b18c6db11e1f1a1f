"""FlashAttention-2 on tensor cores: v2 with mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read v2 first. The order is the same: Q outside, K and V inside, one division at the end. What changes is who
computes. A warp owns `warp_rows` query rows and computes S (warp_rows x tile_n) and O with 16 x 8 x 16 products.
What a lane holds of S is, rounded to 16 bits, what it must hold of P for P . V (ptx/fragments.py), so P never leaves
the registers. K and V come by cp.async while the products of the other one run: V of a tile during S, K of the next
tile during softmax and P . V.

Letters as in v2; p_frag, k_frag and v_frag are operands in registers, acc_s and acc_o float32 accumulators. Keys are
walked from the last tile to the first, so the tiles that need a mask come first under a causal mask. The order is
Dao's (FlashAttention-2, 2023).

Launch: grid (batch * heads / group * query tiles * v_parts), block (config.threads), config.shared_bytes of
dynamic shared memory. Rows of q, k and v begin at multiples of 16 bytes and are contiguous along dim.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import cp_async, cvt, ld_st, ldmatrix, memory, mma, shared, shfl, special, vote
from ..score import fragment_functions, fragments, positions
from ..score import reads as score_reads
from ..score.reads import Origin
from ..score.stage import LOG2_E, exponent_unit
from ..steps import async_tiles, fragment_softmax, notes, output_rows
from ..steps import recompute_rows as recompute
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import chunk_pair, first_column_of, first_row_of, key_tiles, panel_offset, row_keys
from ..steps.query_tile import QueryTile, TileKeys
from ..steps.tiles import row_base


class Registers(NamedTuple):
    """What a warp holds of a tile of S, of O, and of operands. Shapes are in make()."""

    acc_s: Any
    acc_o: Any
    p_frag: Any
    q_frag: Any
    kv_frag: Any
    loaded: Any  # what its scores need from global memory (kernels/score/reads.py)


class Rows(NamedTuple):
    """Of each row that a lane has a part of."""

    m: Any  # the running maximum
    l: Any  # the lane's share of the running sum
    alpha: Any  # e^(m_old - m_new)
    term: Any  # what its scores share (kernels/score/fragments.py)
    distance: Any  # q_pos - k_pos at the lane's first column
    mask_bits: Any
    shown_bits: Any  # by the mask that was given
    query: Any  # its query in the tile


class Places(NamedTuple):
    """Shared memory: the tile of Q, and where the lane's matrix rows begin in those of Q, K and V."""

    q: int
    q_lane: int
    k_lane: int
    v_lane: int


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    depth, width, v_parts = config.depth, config.width, config.v_parts
    _, k_at, v_at, notes_at, tile_notes_at, _ = config.shared_offsets()
    bases_at, keys_at, origin_at, query_at = (tile_notes_at + n * notes.SIZE for n in range(4))  # the last two: if read
    alignment, note_bytes = config.ALIGNMENT, config.NOTE_BYTES
    many_copies = max(depth, width) > 128
    q_panel, kv_panel = tile_m * 128, tile_n * 128  # bytes
    group, queries = config.group, config.queries
    strips, rows = warp_rows // 16, warp_rows // 8  # of 16 rows a warp; rows that a lane has a part of
    s_blocks, o_blocks = tile_n // 8, width // 8
    s_count, o_count, p_count = strips * s_blocks * 4, strips * o_blocks * 4, strips * s_blocks * 2
    # Steps of 16 of head_dim that are written out behind each other: all of them up to 128 and where Q stays in
    # registers, else some at a time, because the 16 steps of head_dim 256 spill registers. Q's fragments have a slot
    # for each, in name also where they share registers: that makes the compiler unroll the loop over them.
    steps = depth // 16
    at_once = steps if config.q_registers or steps <= 8 else max(n for n in range(1, 9) if steps % n == 0)
    q_count = strips * at_once * 4
    q_registers, scaled, write_lse = config.q_registers, config.scaled, config.write_lse

    half = config.dtype == "float16"
    product = mma.m16n8k16_f16 if half else mma.m16n8k16_bf16
    pack = cvt.pack_f16x2 if half else cvt.pack_bf16x2
    load_q = async_tiles.loader(tile_m, depth, threads, group)
    load_k = async_tiles.loader(tile_n, depth, threads)
    load_v = async_tiles.loader(tile_n, width, threads)
    wait_all = cp_async.wait_group(0)
    keys_and_start = positions.make(config)
    row_term = fragments.chain(config).row_term
    mask_words, visible, finish_scores, mask_scores = fragments.tile(config, strips)
    read, has_mask = score_reads.make(config, strips), config.has("mask")
    reads, origin_of, load_reads, hide, ends_of = read.reads, read.origin, read.load, read.hide, read.ends
    some_hidden, bias_words, bits_words = read.some_hidden, read.bias_words, read.bits_words
    functions = fragment_functions.make(config, strips)
    has_functions, apply_functions = functions.present, functions.apply
    every_tile = TRUE if has_functions else FALSE  # whether tiles that all rows see whole are masked, too
    start, softmax, to_p, finish = fragment_softmax.make(config, strips)
    store_rows = output_rows.make(config, warp_rows, width)
    recompute_rows = recompute.make(config, warp_rows)
    log2_e, to_natural = float32(LOG2_E), float32(1 / exponent_unit(config))

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def tile_of(block, arrays, strides, sizes):
        """-> QueryTile, TileKeys. The last queries of a head come first: under a causal mask they see the most keys."""
        m_tiles = divide(int32(sizes.seqlen_q) + int32(queries - 1), queries)
        tiles = divide(block, v_parts)
        part = int32(block - tiles * v_parts)
        head_tiles = divide(tiles, m_tiles)
        first_query = int32((m_tiles - 1 - (tiles - head_tiles * m_tiles)) * queries)
        groups = divide(sizes.heads, group)
        b = divide(head_tiles, groups)
        h = int32((head_tiles - b * groups) * group)
        h_kv = divide(h, divide(sizes.heads, sizes.heads_kv))
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        return QueryTile(b, h, first_query, part), TileKeys(h_kv, int32(keys), first_query + q_start)

    @inlined
    def multiply_q_k(acc_s, q_frag, k_frag, q_lane, k_lane):
        """acc_s (strips, tile_n / 8, 4) = Q . K^T."""
        for i in range(s_count):
            acc_s[i] = float32(0)
        for first in range(0, steps, at_once):
            for x in range(at_once):
                if not q_registers:
                    for strip in range(strips):
                        a = (strip * at_once + x) * 4
                        ldmatrix.x4(q_frag, a, chunk_pair(q_lane, first + x, q_panel) + strip * 2048)  # (16, 16)
                for n in range(tile_n // 16):
                    ldmatrix.x4(k_frag, 0, chunk_pair(k_lane, first + x, kv_panel) + n * 2048)  # (16 keys, 16)
                    for strip in range(strips):
                        a = (strip * at_once + x) * 4
                        product(acc_s, (strip * s_blocks + 2 * n) * 4, q_frag, a, k_frag, 0)
                        product(acc_s, (strip * s_blocks + 2 * n + 1) * 4, q_frag, a, k_frag, 2)

    @inlined
    def multiply_p_v(acc_o, p_frag, v_frag, v_lane):
        """acc_o (strips, width / 8, 4) += P . V."""
        for y in range(tile_n // 16):
            for n in range(width // 16):
                ldmatrix.x4_trans(v_frag, 0, chunk_pair(v_lane, n, kv_panel) + y * 2048)  # (16 keys, 16)
                for strip in range(strips):
                    a = (strip * s_blocks + 2 * y) * 2
                    product(acc_o, (strip * o_blocks + 2 * n) * 4, p_frag, a, v_frag, 0)
                    product(acc_o, (strip * o_blocks + 2 * n + 1) * 4, p_frag, a, v_frag, 2)

    @inlined
    def rescale(acc_o, alpha, moved):
        if moved != 0:
            for strip in range(strips):
                for n in range(o_blocks):
                    for i in range(4):
                        acc_o[(strip * o_blocks + n) * 4 + i] *= alpha[strip * 2 + i // 2]

    @inlined
    def again(thread):
        """The thread's number; read anew where its many copies have addresses that would be kept through the loop."""
        return special.thread_index() if many_copies else thread

    @inlined
    def load_for_scores(j, registers, row, places, arrays, strides, sizes, masked):
        """What the scores of tile j need from global memory, while they are computed."""
        now = special.thread_index()
        bias, bits = notes.get(places.q + int32(origin_at))
        first_query, _ = notes.get(places.q + int32(query_at))
        origin = Origin(bias, bits, int32(first_query))
        first_row = (now >> int32(5)) * warp_rows
        inside = FALSE if masked else TRUE
        load_reads(
            registers.loaded, row.shown_bits, j, origin, first_row, now & int32(31), arrays, strides, sizes, inside
        )  # fmt: skip

    @inlined
    def scores_of_tile(j, registers, places, v_bytes, columns_left, thread, masked):
        """S of tile j while its V is on the way."""
        _, v_global = notes.get(places.q + int32(bases_at))
        rows_left = int32(tile_n)
        if masked:
            _, keys = notes.get(places.q + int32(keys_at))
            rows_left = int32(int32(keys) - j * tile_n)
        source = v_global + j * tile_n * v_bytes
        wait_all()
        cuda.syncthreads()  # K_j is there, and everyone is done with V_j+1
        load_v(places.q + int32(v_at), source, v_bytes, 0, rows_left, columns_left, again(thread))
        cp_async.commit_group()
        multiply_q_k(registers.acc_s, registers.q_frag, registers.kv_frag, places.q_lane, places.k_lane)

    @inlined
    def finish_and_mask(j, acc_s, loaded, row, places, tile, arrays, strides, sizes, score, masked):
        """S as the softmax takes it: finished where it needs more than a scale, -inf where a key is not seen."""
        if masked:
            # With the thread's number read anew, this is not worked out ahead of the loop and kept in registers.
            now = special.thread_index()
            position, keys = notes.get(places.q + int32(keys_at))
            first_row = (now >> int32(5)) * warp_rows
            left, right = sizes.left, sizes.right
            visible(
                j, first_row, now & int32(31), position, left, right, int32(keys), row.mask_bits, row.distance
            )  # fmt: skip
        elif scaled:
            position, _ = notes.get(places.q + int32(keys_at))
            lane_column = int32(first_column_of(special.thread_index() & int32(31)))
            for r in range(rows):
                row.distance[r] = float32(position + row.query[r] - j * tile_n - lane_column)
        if has_mask:
            hide(row.mask_bits, row.shown_bits, masked)
        if has_functions:
            now = special.thread_index()
            position, _ = notes.get(places.q + int32(keys_at))
            queries_left = int32(min(sizes.seqlen_q - tile.first_query, queries))
            first_row = (now >> int32(5)) * warp_rows
            apply_functions(
                acc_s, row.mask_bits, j, tile.b, tile.h, first_row, now & int32(31), position, queries_left, arrays,
                strides, score,
            )  # fmt: skip
        if scaled:
            finish_scores(acc_s, row.term, row.distance, loaded, score)
        if masked:
            mask_scores(acc_s, row.mask_bits)
        elif has_mask:
            if some_hidden(row.mask_bits):
                mask_scores(acc_s, row.mask_bits)

    @inlined
    def outputs_of_tile(j, begin, registers, row, places, k_bytes, thread, scale_log2):
        """softmax and O of tile j while the next tile's K is on the way."""
        k_global, _ = notes.get(places.q + int32(bases_at))
        source = k_global + (j - 1) * tile_n * k_bytes
        wait_all()
        cuda.syncthreads()  # V_j is there, and everyone is done with K_j
        if j > begin:
            load_k(places.q + int32(k_at), source, k_bytes, 0, int32(tile_n), int32(head_dim), again(thread))
            cp_async.commit_group()
        moved = softmax(registers.acc_s, row.m, row.l, row.alpha, scale_log2)
        to_p(registers.acc_s, registers.p_frag)
        rescale(registers.acc_o, row.alpha, moved)
        multiply_p_v(registers.acc_o, registers.p_frag, registers.kv_frag, places.v_lane)

    @inlined
    def step(
        j, begin, registers, row, places, tile, bytes_, columns_left, thread, arrays, strides, sizes, score, masked
    ):
        """One key tile: S, softmax, O. masked, a constant: some row does not see some key."""
        k_bytes, v_bytes = bytes_
        if reads:
            load_for_scores(j, registers, row, places, arrays, strides, sizes, masked)
        scores_of_tile(j, registers, places, v_bytes, columns_left, thread, masked)
        finish_and_mask(j, registers.acc_s, registers.loaded, row, places, tile, arrays, strides, sizes, score, masked)
        outputs_of_tile(j, begin, registers, row, places, k_bytes, thread, score.scale * log2_e)

    @inlined
    def note_rows(registers, row, inverse_l, lse, o_smem, tile, lane, warp, arrays, sizes):
        """O, divided, in 16 bits to shared memory, with a flag and the lse of each row. -> whether some row of the lane
        is not finite."""
        lane_row, lane_column = warp * warp_rows + int32(first_row_of(lane)), int32(first_column_of(lane))
        row_notes = o_smem + notes_at
        some = uint32(0)
        for r in range(rows):
            strip, below = r // 2, r % 2
            tile_row = lane_row + r * 8
            nonfinite = float32(0)
            for n in range(o_blocks):
                at = (strip * o_blocks + n) * 4 + below * 2
                low, high = registers.acc_o[at] * inverse_l[r], registers.acc_o[at + 1] * inverse_l[r]
                nonfinite += low * float32(0) + high * float32(0)  # NaN when one of them is NaN or Inf
                ld_st.store_b32(o_smem + panel_offset(tile_row, n, tile_m) + 2 * lane_column, pack(low, high))
            nonfinite += shfl.bfly_f32(nonfinite, 1)
            nonfinite += shfl.bfly_f32(nonfinite, 2)
            flag = uint32(0) if nonfinite == 0 else uint32(1)
            some |= flag
            if lane & 3 == 0:
                ld_st.store_b32(row_notes + tile_row * note_bytes, flag)
                ld_st.store_b32(row_notes + tile_row * note_bytes + 4, lse[r].view(np.uint32))
                query = tile.first_query + tile_row // group
                if write_lse and tile.part == 0 and query < sizes.seqlen_q:
                    head = tile.b * sizes.heads + tile.h + tile_row % group
                    arrays.lse[head * sizes.seqlen_q + query] = lse[r] * to_natural
        return some

    @cuda.jit
    def flash_attention_mma(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        tile, tile_keys = tile_of(special.block_index(), arrays, strides, sizes)
        queries_left = int32(min(sizes.seqlen_q - tile.first_query, queries))
        columns_left = int32(head_dim_v - tile.part * width)

        smem = cuda.shared.array(0, uint8)
        q_smem = aligned(shared.address(smem))  # (tile_m, depth)
        k_smem = q_smem + int32(k_at)  # (tile_n, depth)
        v_smem = q_smem + int32(v_at)  # (tile_n, width)
        q_global = memory.address(arrays.q, row_base(strides.q, tile.b, tile.h, tile.first_query))
        k_global = memory.address(arrays.k, row_base(strides.k, tile.b, tile_keys.h_kv, 0))
        v_global = memory.address(arrays.v, row_base(strides.v, tile.b, tile_keys.h_kv, 0) + tile.part * width)
        q_bytes, head_bytes, k_bytes, v_bytes = 2 * strides.q[2], 2 * strides.q[1], 2 * strides.k[2], 2 * strides.v[2]

        # Rows of this lane's matrices: for Q and V lanes 8 to 15 stand 8 rows below, for K lanes 16 to 31 do.
        places = Places(
            q_smem,
            q_smem + panel_offset(warp * warp_rows + (lane & 15), lane >> 4, tile_m),
            k_smem + panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, tile_n),
            v_smem + panel_offset(lane & 15, lane >> 4, tile_n),
        )
        registers = Registers(
            cuda.local.array(s_count, float32),  # acc_s (strips, tile_n / 8, 4)
            cuda.local.array(o_count, float32),  # acc_o (strips, width / 8, 4)
            cuda.local.array(p_count, uint32),  # p_frag (strips, tile_n / 8, 2)
            cuda.local.array(q_count, uint32),  # q_frag (strips, at_once, 4)
            cuda.local.array(4, uint32),  # kv_frag (16, 16)
            cuda.local.array(bias_words, uint32),  # loaded (2 * strips, tile_n / 8, 2), in 16 bits two in one
        )
        row = Rows(
            cuda.local.array(rows, float32),
            cuda.local.array(rows, float32),
            cuda.local.array(rows, float32),
            cuda.local.array(rows, float32),
            cuda.local.array(rows, float32),
            cuda.local.array(mask_words, uint32),
            cuda.local.array(bits_words, uint32),
            cuda.local.array(rows, int32),
        )
        start(row.m, row.l)
        for i in range(o_count):
            registers.acc_o[i] = float32(0)
        lane_row = warp * warp_rows + int32(first_row_of(lane))
        for r in range(rows):
            tile_row = uint32(lane_row + r * 8)
            row.query[r] = int32(tile_row // uint32(group))
            row_head = min(tile.h + int64(tile_row % uint32(group)), sizes.heads - 1)
            row.term[r] = row_term(tile.b, row_head, arrays, strides)

        top_first, top_end = row_keys(tile_keys.position, sizes.left, sizes.right, tile_keys.keys)
        last_pos = tile_keys.position + queries_left - 1
        bottom_first, bottom_end = row_keys(last_pos, sizes.left, sizes.right, tile_keys.keys)
        begin_, free_, cut_, stop = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        begin, free, cut = int32(begin_), int32(free_), int32(cut_)
        if has_mask:  # tiles in which it shows nothing, before the first key that it shows and behind the last
            first_query, end_query = tile.first_query, tile.first_query + queries_left
            first_shown, end_shown = ends_of(tile.b, tile.h, group, first_query, end_query, arrays, strides, sizes)
            begin = max(begin, divide(first_shown, tile_n))
            free = max(free, begin)
            stop = min(int32(stop), divide(end_shown + int32(tile_n - 1), tile_n))

        if thread == 0:
            if reads:
                origin = origin_of(tile.b, tile.h, tile.first_query, arrays, strides)
                notes.put(q_smem + int32(origin_at), origin.bias, origin.bits)
                notes.put(q_smem + int32(query_at), int64(tile.first_query), int64(0))
            notes.put(q_smem + int32(bases_at), k_global, v_global)
            notes.put(q_smem + int32(keys_at), tile_keys.position, int64(tile_keys.keys))
        cuda.syncthreads()
        j = int32(stop - 1)
        load_q(q_smem, q_global, q_bytes, head_bytes, queries_left, head_dim, thread)
        if j >= begin:
            first_key = j * tile_n
            keys_left = int32(tile_keys.keys - first_key)
            load_k(k_smem, k_global + first_key * k_bytes, k_bytes, 0, keys_left, int32(head_dim), thread)
        cp_async.commit_group()
        if q_registers:
            wait_all()
            cuda.syncthreads()
            for strip in range(strips):
                for x in range(steps):
                    a = (strip * at_once + x) * 4
                    ldmatrix.x4(registers.q_frag, a, chunk_pair(places.q_lane, x, q_panel) + strip * 2048)

        while j >= begin:
            # Tiles that some row sees in part; then those that every row sees whole; then, behind a left window,
            # some of the first kind again.
            while j >= begin and (j >= cut or j < free):
                step(
                    j, begin, registers, row, places, tile, (k_bytes, v_bytes), columns_left, thread, arrays, strides,
                    sizes, score, TRUE,
                )  # fmt: skip
                j = int32(j - 1)
            while j >= free and j < cut:
                step(
                    j, begin, registers, row, places, tile, (k_bytes, v_bytes), columns_left, thread, arrays, strides,
                    sizes, score, every_tile,
                )  # fmt: skip
                j = int32(j - 1)

        # Where all this belongs is worked out again: kept through the loop, it would cost the registers that S needs.
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        tile, tile_keys = tile_of(special.block_index(), arrays, strides, sizes)
        inverse_l, lse = row.alpha, row.distance  # the same registers, free by now
        finish(row.m, row.l, inverse_l, lse)
        wait_all()
        cuda.syncthreads()  # everyone is done with Q and K
        o_smem = aligned(shared.address(smem))  # (tile_m, width)
        nonfinite = note_rows(registers, row, inverse_l, lse, o_smem, tile, lane, warp, arrays, sizes)
        cuda.syncthreads()
        store_rows(warp * warp_rows, lane, o_smem, o_smem + notes_at, tile, arrays, strides, sizes)
        if vote.any_lane(nonfinite) != 0:
            recompute_rows(warp * warp_rows, lane, o_smem + notes_at, tile, tile_keys, arrays, strides, sizes, score)

    return flash_attention_mma
