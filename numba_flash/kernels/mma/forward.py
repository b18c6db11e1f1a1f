"""FlashAttention-2 on tensor cores: v2 with mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read v2 first. The loops are the same: Q outside, K and V inside, one division at the end. The products differ: a warp
owns `warp_rows` query rows and computes S (warp_rows x tile_n) and O with tensor-core products of 16 x 8 x 16. A lane
holds the same elements of S as it needs of P for P . V (ptx/fragments.py), so P is only rounded to 16 bits and never
leaves the registers. cp.async loads K and V while other products run: V of a tile during S, and K of the next tile
during softmax and P . V.

Letters as in v2; p_frag, q_frag and kv_frag are operands in registers, and acc_s and acc_o are float32 accumulators.
The loop over keys runs from the last tile to the first, so that under a causal mask the tiles that need a mask come
first. This order is Dao's (FlashAttention-2, 2023).

Launch: grid (batch * heads / group * query tiles * v_parts). Rows are contiguous along dim.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint8, uint32

from ...ptx import cp_async, local, memory, shared, special
from ..recompute import rows as recompute
from ..score import (
    fragment_functions,
    fragment_softmax,
    fragments,
    kept_weights,
    reads as score_reads,
    sum_term,
    tile_walk,
)
from ..score.reads import Origin
from ..steps import async_tiles, block_state, numbers, output_rows
from ..steps.basics import FALSE, TRUE, divide, first_column_of, first_row_of, inlined, tiles_of
from ..steps.sequence import QueryWork, key_range, key_row, packed_queries, query_row
from ..steps.units import LOG2_E
from . import products_16bit, products_float32, products_float64, work_tile

PRODUCTS = dict(float16=products_16bit, bfloat16=products_16bit, float32=products_float32, float64=products_float64)


class Registers(NamedTuple):
    """A warp's part of a tile of S, of O, and of operands; m and all below, for each row of which a lane has a part.
    Shapes are in make()."""

    acc_s: Any
    acc_o: Any
    p_frag: Any
    q_frag: Any
    kv_frag: Any
    loaded: Any  # numbers that its scores need from global memory (kernels/score/reads.py)
    m: Any  # the running maximum
    l: Any  # the lane's share of the running sum
    alpha: Any  # e^(m_old - m_new)
    term: Any  # a number that all its scores share (kernels/score/fragments.py)
    distance: Any  # q_pos - k_pos at the lane's first column
    mask_bits: Any
    shown_bits: Any  # which scores the given mask leaves
    query: Any  # the number of the query in the tile
    kept: Any  # which of its weights count (kernels/score/kept_weights.py)


class Places(NamedTuple):
    """Shared memory: the tile of Q, the lane's places in the tiles of Q, K and V, and the place for its scores. And the
    thread's number."""

    q: int
    q_lane: int
    k_lane: int
    v_lane: int
    s_lane: int
    thread: int


def make(config):
    tile_n, warp_rows, plan = config.tile_n, config.warp_rows, config.shared_layout()
    head_dim, columns, columns_v = config.head_dim, config.head_dim_padded, config.head_dim_v_padded
    bases_at, keys_at, origin_at, query_at = (plan.tile_state + n * block_state.SIZE for n in range(4))
    in_order, place_at, rows_at = config.in_order, origin_at, query_at  # packed sequences have no bias and no mask
    strips, rows = warp_rows // 16, warp_rows // 8  # of 16 rows a warp; rows that a lane has a part of
    groups, shift, o_blocks = config.column_groups, config.column_groups.bit_length() - 1, config.group_columns // 8
    s_count, o_count = strips * (tile_n // 8) * 4, strips * o_blocks * 4
    real, loader, only_tile = numbers.of(config.compute_dtype).real, async_tiles.of(config), config.only_tile
    load_q = loader(config.tile_m, columns, config.group_size)
    load_k, load_v = loader(tile_n, columns), loader(tile_n, columns_v)
    if config.splits_columns and tile_n == 32 and config.copy_bytes == 16:
        load_k = async_tiles.panel_loader(tile_n, columns, config.threads, head_dim == columns)
        load_v = async_tiles.panel_loader(tile_n, columns_v, config.threads, config.head_dim_v == columns_v)
    score_tile = fragments.tile(config, strips)
    read, has_mask, wait_all = score_reads.make(config, strips), config.has("mask"), cp_async.wait_group(0)
    functions = fragment_functions.make(config, strips)
    every_tile, walk = TRUE if functions.every_tile else FALSE, tile_walk.make(config, whole_warp=True)
    row_term, work_of = fragments.chain(config).row_term, work_tile.of_queries(config, config.queries, config.v_parts)
    start, softmax, finish = fragment_softmax.make(config, strips)
    rescale = fragment_softmax.rescaler(strips, o_blocks)
    kept_weight = kept_weights.on_fragments(config, strips, tile_n)
    has_term, load_terms = sum_term.make(config) is not None, sum_term.on_fragments(config, rows)
    products, recompute_rows = PRODUCTS[config.dtype].make(config), recompute.make(config, warp_rows)
    write_rows, log2_e = output_rows.make(config, warp_rows), real(LOG2_E)

    @inlined
    def again(places):
        """The thread's number; read anew where its many copies have addresses that would be kept through the loop."""
        return special.thread_index() if max(columns, columns_v) > 128 else places.thread

    @inlined
    def work_again(smem, arrays, strides, sizes):
        """-> the QueryWork of the block. To look for that of numbered tiles takes long."""
        if in_order:
            b, h = block_state.get_range(smem + int32(place_at))
            first_query, _ = block_state.get_range(smem + int32(place_at + 8))
            first, _ = block_state.get_range(smem + int32(rows_at))
            rows, _ = block_state.get_range(smem + int32(rows_at + 8))
            part = work_tile.part_of(special.block_index(), config.v_parts)
            return QueryWork(packed_queries(b, first, rows, sizes), h, h, first_query, part)
        return work_of(special.block_index(), arrays, strides, sizes)

    @inlined
    def lane_and_row():
        """-> (lane, the first row that its warp owns). The thread's number is read anew, so that this is not worked out
        ahead of the loop and kept in registers."""
        thread = special.thread_index()
        return thread & int32(31), (thread >> int32(5 + shift)) * warp_rows

    @inlined
    def load_for_scores(j, registers, places, arrays, strides, sizes, masked):
        """Loads what the scores of tile j need from global memory, while S is computed."""
        lane, row = lane_and_row()
        bias, bits = block_state.get(places.q + int32(origin_at))
        first_query, _ = block_state.get(places.q + int32(query_at))
        origin, inside = Origin(bias, bits, int32(first_query)), FALSE if masked else TRUE
        loaded, shown_bits = registers.loaded, registers.shown_bits
        read.load(loaded, shown_bits, j, origin, row, lane, arrays, strides, sizes, inside)

    @inlined
    def finish_and_mask(j, registers, places, tile, asks, arrays, strides, sizes, score, masked):
        """S as the softmax takes it: finished where it needs more than a scale, -inf where a key is not seen. asks:
        mask_mod removes some of the tile."""
        if masked:
            (lane, row), (position, keys) = lane_and_row(), block_state.get(places.q + int32(keys_at))
            mask_bits, distance = registers.mask_bits, registers.distance
            score_tile.visible(j, row, lane, position, sizes.left, sizes.right, int32(keys), mask_bits, distance)
        elif config.scores_finished:
            position, _ = block_state.get(places.q + int32(keys_at))
            lane_column = int32(first_column_of(special.thread_index() & int32(31)))
            for r in range(rows):
                registers.distance[r] = real(position + registers.query[r] - j * tile_n - lane_column)
        if has_mask:
            read.hide(registers.mask_bits, registers.shown_bits, masked)
        if functions.present:
            if functions.every_tile or asks:
                lane, row = lane_and_row()
                position, _ = block_state.get(places.q + int32(keys_at))
                queries_left = int32(min(tile.sequence.seqlen_q - tile.first_query, config.queries))
                b, h, first_query = tile.sequence.b, tile.h, tile.first_query
                place = functions.place_of(j, b, h, row, lane, first_query, position, queries_left)
                functions.apply(registers.acc_s, registers.mask_bits, place, asks, arrays, strides, score)
        if config.scores_finished:
            score_tile.finish(registers.acc_s, registers.term, registers.distance, registers.loaded, score)
        if masked:
            score_tile.mask(registers.acc_s, registers.mask_bits)
        elif has_mask:
            if read.some_hidden(registers.mask_bits):
                score_tile.mask(registers.acc_s, registers.mask_bits)

    @inlined
    def step(j, begin, states, registers, places, tile, arrays, strides, sizes, score, whole):
        """One key tile: S, softmax, O. -> the tile behind it. whole, a constant: every row sees every key, except for
        those that a function removes."""
        next_j, asks = walk.next_tile(states, j, begin, arrays, strides), walk.needs_mask(states, j, arrays, strides)
        masked = TRUE
        if whole:  # a tile without keys to hide takes a mask where functions are called
            masked = every_tile if functions.every_tile or not walk.present else asks
        if read.before:
            load_for_scores(j, registers, places, arrays, strides, sizes, masked)

        # S, while the tile's V is on the way.
        v_bytes, rows_left = config.item_size * strides.v[2], int32(tile_n)
        if masked:
            _, keys = block_state.get(places.q + int32(keys_at))
            rows_left = int32(int32(keys) - j * tile_n)
        _, v_global = block_state.get(places.q + int32(bases_at))
        source = v_global + j * tile_n * v_bytes
        columns_left = int32(config.head_dim_v - tile.part * columns_v)
        wait_all()
        cuda.syncthreads()  # K_j is there, and everyone is done with V_j+1
        if not only_tile:
            load_v(places.q + int32(plan.v), source, v_bytes, 0, rows_left, columns_left, again(places))
            cp_async.commit_group()
        operands = registers.q_frag, registers.kv_frag
        products.multiply_q_k(registers.acc_s, *operands, places.q_lane, places.k_lane, places.s_lane)
        if read.behind:
            load_for_scores(j, registers, places, arrays, strides, sizes, masked)
        finish_and_mask(j, registers, places, tile, asks, arrays, strides, sizes, score, masked)

        # Softmax and O, while the next tile's K is on the way.
        k_bytes = config.item_size * strides.k[2]
        k_global, _ = block_state.get(places.q + int32(bases_at))
        source = k_global + (next_j if walk.present else j - 1) * tile_n * k_bytes
        if not only_tile:
            wait_all()
            cuda.syncthreads()  # V_j is there, and everyone is done with K_j
            if j > begin:
                load_k(places.q + int32(plan.k), source, k_bytes, 0, int32(tile_n), int32(head_dim), again(places))
                cp_async.commit_group()
        moved = softmax(registers.acc_s, registers.m, registers.l, registers.alpha, score.scale * log2_e)
        if kept_weight.present:
            lane, row = lane_and_row()
            position, _ = block_state.get(places.q + int32(keys_at))
            row, first_key = row + int32(first_row_of(lane)), int32(j * tile_n + first_column_of(lane))
            kept_weight.of_queries(registers.kept, first_key, tile.sequence.b, tile.h, row, position, arrays, sizes)
            kept_weight.drop(registers.acc_s, registers.kept)
        products.to_p(registers.acc_s, registers.p_frag)
        rescale(registers.acc_o, registers.alpha, moved)
        products.multiply_p_v(registers.acc_o, registers.p_frag, registers.kv_frag, places.v_lane)
        return int32(next_j if walk.present else j - 1)

    @cuda.jit
    def flash_attention_mma(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        tile = work_of(special.block_index(), arrays, strides, sizes)
        sequence = tile.sequence
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, config.queries))
        if config.packed:
            if queries_left <= 0:
                return

        smem = cuda.shared.array(0, uint8)
        q_smem = async_tiles.aligned(shared.address(smem))  # (tile_m, head_dim_padded)
        k_smem = q_smem + int32(plan.k)  # (tile_n, head_dim_padded)
        v_smem = q_smem + int32(plan.v)  # (tile_n, head_dim_v_padded)
        q_global = memory.address(arrays.q, query_row(strides.q, sequence, tile.h, tile.first_query))
        k_global = memory.address(arrays.k, key_row(strides.k, sequence, tile.h_kv, 0))
        v_at = key_row(strides.v, sequence, tile.h_kv, 0) + tile.part * columns_v
        v_global = memory.address(arrays.v, v_at)
        q_bytes, head_bytes = config.item_size * strides.q[2], config.item_size * strides.q[1]
        k_bytes = config.item_size * strides.k[2]

        q_lane, k_lane, v_lane, s_lane = products.lanes(lane, warp, q_smem, k_smem, v_smem)
        places = Places(q_smem, q_lane, k_lane, v_lane, s_lane, thread)
        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, tile_n / 8, 4)
            local.array(o_count, real),  # acc_o (strips, head_dim_v_padded / 8, 4)
            local.array(products.p_count, products.register),  # p_frag
            local.array(products.q_count, products.register),  # q_frag
            local.array(products.kv_count, products.register),  # kv_frag
            local.array(read.bias_words, read.bias_type),  # loaded (2 * strips, tile_n / 8, 2), in 16 bits two in one
            local.array(rows, real),
            local.array(rows, real),
            local.array(rows, real),
            local.array(rows, real),
            local.array(rows, real),
            local.array(score_tile.mask_words, uint32),
            local.array(read.bits_words, uint32),
            local.array(rows, int32),
            local.array(kept_weight.words, uint32),
        )
        start(registers.m, registers.l)
        for i in range(o_count):
            registers.acc_o[i] = real(0)
        lane_row = (warp >> shift) * warp_rows + int32(first_row_of(lane))
        for r in range(rows):
            tile_row = uint32(lane_row + r * 8)
            registers.query[r] = int32(tile_row // uint32(config.group_size))
            row_head = min(tile.h + int64(tile_row % uint32(config.group_size)), sizes.heads - 1)
            registers.term[r] = row_term(sequence.b, row_head, arrays, strides)

        end_query = tile.first_query + queries_left
        begin_, free_, cut_, stop = key_range(sequence, tile.first_query, end_query - 1, sizes, tile_n)
        begin, free, cut = int32(begin_), int32(free_), int32(cut_)
        if has_mask:  # tiles in which it leaves nothing, before the first key that it leaves and behind the last
            place = sequence.b, tile.h, config.group_size, tile.first_query, end_query
            first, end, _, _ = read.ranges(*place, arrays, strides, sizes)
            begin = max(begin, divide(first, tile_n))
            free = max(free, begin)
            stop = min(int32(stop), tiles_of(end, tile_n))
        states = walk.row(sequence.b, tile.h, tile.first_query, arrays, strides)
        if walk.present:
            begin, stop = walk.trim(states, begin, int32(stop), arrays, strides)
            free = max(free, begin)

        if thread == 0:
            if read.reads:
                origin = read.origin(sequence.b, tile.h, tile.first_query, arrays, strides)
                block_state.put(q_smem + int32(origin_at), origin.bias, origin.bits)
                block_state.put(q_smem + int32(query_at), int64(tile.first_query), int64(0))
            if in_order:
                block_state.put_range(q_smem + int32(place_at), sequence.b, tile.h)
                block_state.put_range(q_smem + int32(place_at + 8), tile.first_query, 0)
                block_state.put(q_smem + int32(rows_at), sequence.first_query, sequence.seqlen_q)
            block_state.put(q_smem + int32(bases_at), k_global, v_global)
            block_state.put(q_smem + int32(keys_at), sequence.q_start + tile.first_query, int64(sequence.keys))
        cuda.syncthreads()
        j = int32(stop - 1)
        load_q(q_smem, q_global, q_bytes, head_bytes, queries_left, head_dim, thread)
        if j >= begin:
            first_key = j * tile_n
            keys_left = int32(int32(sequence.keys) - first_key)
            load_k(k_smem, k_global + first_key * k_bytes, k_bytes, 0, keys_left, int32(head_dim), thread)
            if only_tile:
                v_bytes = config.item_size * strides.v[2]
                load_v(v_smem, v_global, v_bytes, 0, keys_left, int32(config.head_dim_v), thread)
        cp_async.commit_group()
        if config.q_registers:
            wait_all()
            cuda.syncthreads()
            products.load_q(registers.q_frag, places.q_lane)

        if only_tile:  # it has no code of its own for one that is seen whole
            if j >= begin:
                step(j, begin, states, registers, places, tile, arrays, strides, sizes, score, FALSE)
        else:
            while j >= begin:
                # First the tiles that some row sees in part, then those that every row sees whole. Behind a left window
                # come some of the first kind again.
                while j >= begin and (j >= cut or j < free):
                    j = step(j, begin, states, registers, places, tile, arrays, strides, sizes, score, FALSE)
                while j >= free and j < cut:
                    j = step(j, begin, states, registers, places, tile, arrays, strides, sizes, score, TRUE)

        # The tile's coordinates are computed again: kept through the loop, they would cost registers that S needs.
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        tile = work_again(async_tiles.aligned(shared.address(smem)), arrays, strides, sizes)
        inverse_l, lse = registers.alpha, registers.distance  # the same registers, free by now
        if has_term:
            lane_row = (warp >> shift) * warp_rows + int32(first_row_of(lane))
            load_terms(lse, tile.sequence.b, tile.h, lane_row, arrays, strides)
        finish(registers.m, registers.l, inverse_l, lse)
        if kept_weight.present:
            kept_weight.scale(inverse_l, score)
        wait_all()
        first_row, column_group = (warp >> shift) * warp_rows, warp & (groups - 1)
        own = QueryWork(tile.sequence, tile.h, tile.h_kv, tile.first_query, int32(tile.part * groups + column_group))
        nonfinite = write_rows(registers.acc_o, inverse_l, lse, first_row, lane, own, arrays, strides, sizes)
        if nonfinite != 0:
            recompute_rows(nonfinite, first_row, lane, work_tile.query_tile(own), arrays, strides, sizes, score)

    return flash_attention_mma
