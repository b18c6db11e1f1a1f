"""The gradient of bias on tensor cores: dS of the finished scores, summed over the dimensions in which bias is
broadcast.

It computes what v2_backward_dbias.py computes, in 16 bits. A block owns a tile of bias' own elements and loops over the
tiles of scores that read them (score_tiles.py): over batch entries and heads that share a bias, over query tiles if all
queries share a row (rows_summed), and over key tiles if all keys share a column (keys_summed). A lane adds up its
elements of dS in registers, in that order; at the end the block adds up lanes and warps. So every sum has one owner and
one order. If few tiles would keep most of the GPU idle, `dbias_splits` blocks share a tile: each loops over its part of
the batch entries, heads and query tiles, and dbias_sum.py adds up what they store (config.split).

Launch: grid (splits * bias' batch * heads * query tiles * key tiles), block (config.threads), config.shared_bytes of
dynamic shared memory. Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dbias is
contiguous.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import cp_async, cvt, ld_st, local, memory, shared, shfl, special
from ..score import fragments, gradient_functions, kept_weights, user
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.gradient_functions import LanePlace
from ..score.stage import FragmentAt
from ..steps import elements, lse_delta
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, row_keys
from . import score_tiles
from .score_tiles import Range, Smem


class Registers(NamedTuple):
    """A warp's registers. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    sums: Any
    q_frag: Any
    do_frag: Any
    b_frag: Any
    loaded: Any
    shown_bits: Any
    kept: Any


def make(config):
    tile_m, tile_n, alignment, warps = config.tile_m, config.tile_n, config.ALIGNMENT, config.threads // 32
    plan = config.shared_layout()
    blocks, rows, inf = tile_n // 8, 2, float32(math.inf)
    count = blocks * 4
    tiles = score_tiles.make(config)
    q_words, do_words = tiles.frag_words
    chain, (_, weight) = fragments.chain(config), fragments.weights_at(config)
    read, has_mask = score_reads.make(config, 1, tile_n), config.has("mask")
    has_functions = user.present(config)
    apply_functions = gradient_functions.on_fragments(config, 1, tile_n, of_keys=False, derivative=False)
    drops, kept_words, kept_of, *_ = kept_weights.on_fragments(config, 1, tile_n)
    of_query, bfly = lse_delta.of_query(config), shfl.bfly_f32
    dtype = "float32" if config.split else config.dtype_of("bias")
    store = elements.storer(dtype)
    pack = cvt.pack_f16x2 if dtype == "float16" else cvt.pack_bf16x2
    wait_all = cp_async.wait_group(0)

    @inlined
    def read_scores(place, registers, thread, arrays, strides, sizes):
        """Loads what the scores need from global memory, before their products are ready."""
        first_query = int32(place.i * tile_m)
        origin = read.origin(place.sequence.b, place.h, first_query, arrays, strides)
        lane, first_row = thread & int32(31), (thread >> int32(5)) * 16
        bits = registers.shown_bits
        read.load(registers.loaded, bits, place.j, origin, first_row, lane, arrays, strides, sizes, FALSE)

    @inlined
    def add_scores(place, registers, thread, arrays, strides, sizes, score):
        """sums += dS of a tile whose products are ready."""
        acc_s, acc_dp, sums, shown_bits = registers.acc_s, registers.acc_dp, registers.sums, registers.shown_bits
        lane, warp = thread & int32(31), thread >> int32(5)
        first_row = int32(warp * 16 + int32(first_row_of(lane)))
        first_key = int32(place.j * tile_n + int32(first_column_of(lane)))
        first_query = int32(place.i * tile_m + first_row)
        for r in range(rows):
            query = int32(first_query + r * 8)
            first, end = row_keys(place.sequence.q_start + query, sizes.left, sizes.right, place.sequence.keys)
            if query >= place.sequence.seqlen_q:
                end = first
            seen = columns_within(int32(first - first_key), int32(end - first_key), 0)
            shown_bits[r] = shown_bits[r] & seen if has_mask else seen
        if has_functions:
            b, h, q_start = int64(place.sequence.b), int64(place.h), place.sequence.q_start
            of_lane = LanePlace(b, h, first_query, q_start, first_key)
            apply_functions(acc_s, acc_dp, shown_bits, of_lane, TRUE, arrays, strides, score)
        if drops:
            first_pos = place.sequence.q_start + int64(place.i) * tile_m
            kept_of(registers.kept, first_key, place.sequence.b, place.h, first_row, first_pos, arrays, sizes)
        term = chain.row_term(place.sequence.b, place.h, arrays, strides)
        for r in range(rows):
            query = int32(first_query + r * 8)
            lse, delta = inf, float32(0)
            if query < place.sequence.seqlen_q:
                lse, delta = of_query(place.sequence, place.h, query, arrays, sizes)
            distance = float32(place.sequence.q_start + query - first_key)
            for n in range(blocks):
                for x in range(2):
                    at, column = n * 4 + r * 2 + x, n * 8 + x
                    here = FragmentAt(term, distance - float32(column), read.added(registers.loaded, r, n, x))
                    p, _ = weight(acc_s[at], here, score, lse)
                    dp = acc_dp[at]
                    if drops:
                        counts = (registers.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0
                        dp = dp * score.kept_count if counts else float32(0)
                    if p != 0 and (shown_bits[r] >> uint32(2 * n + x)) & uint32(1) != 0:
                        sums[at] += p * (dp - delta)

    @inlined
    def over_keys(registers):
        """sums[0], sums[2] <- for the lane's two rows the sum over all columns, in every lane of the row."""
        for r in range(rows):
            total = float32(0)
            for n in range(blocks):
                total += registers.sums[n * 4 + r * 2] + registers.sums[n * 4 + r * 2 + 1]
            total += bfly(total, 1)
            registers.sums[r * 2] = total + bfly(total, 2)

    @inlined
    def over_rows(registers, sums_smem, thread, columns):
        """Stores in shared memory the sums over a warp's rows of `columns` blocks of 8 columns."""
        lane, warp = thread & int32(31), thread >> int32(5)
        for n in range(columns):
            for x in range(2):
                total = registers.sums[n * 4 + x] + registers.sums[n * 4 + 2 + x]
                for distance in (4, 8, 16):
                    total += bfly(total, distance)
                if lane < 4:
                    at = sums_smem + 4 * int32(warp * tile_n + n * 8 + int32(first_column_of(lane)) + x)
                    ld_st.store_b32(at, float32(total).view(np.uint32))

    @inlined
    def store_tile(registers, target, by, base, first_query, first_key, thread, sizes):
        """Stores a tile of dbias in which no rows or keys are summed. by: the strides of target."""
        lane, warp = thread & int32(31), thread >> int32(5)
        for r in range(rows):
            query = first_query + int64(warp * 16 + int32(first_row_of(lane)) + r * 8)
            if query < sizes.seqlen_q:
                of_row = base + query * by[2]
                for n in range(blocks):
                    key = first_key + int64(n * 8 + int32(first_column_of(lane)))
                    low, high = registers.sums[n * 4 + r * 2], registers.sums[n * 4 + r * 2 + 1]
                    if config.pairs:
                        if key < sizes.seqlen_k:
                            memory.store_b32(memory.address(target, of_row + key), pack(low, high))
                    else:
                        if key < sizes.seqlen_k:
                            store(target, of_row + key, low)
                        if key + 1 < sizes.seqlen_k:
                            store(target, of_row + key + 1, high)

    @inlined
    def store_sums(registers, target, by, base, first_query, first_key, sums_smem, thread, sizes):
        """Likewise if rows or keys are summed."""
        lane, warp = thread & int32(31), thread >> int32(5)
        if config.keys_summed:
            over_keys(registers)
        if config.rows_summed:
            over_rows(registers, sums_smem, thread, 1 if config.keys_summed else blocks)
            cuda.syncthreads()
            key = first_key + int64(thread)
            if thread < (1 if config.keys_summed else tile_n) and key < sizes.seqlen_k:
                total = float32(0)
                for other in range(warps):
                    total += ld_st.load_b32(sums_smem + 4 * int32(other * tile_n + thread)).view(np.float32)
                store(target, base + key * by[3], total)
        elif lane & 3 == 0:
            for r in range(rows):
                query = first_query + int64(warp * 16 + int32(first_row_of(lane)) + r * 8)
                if query < sizes.seqlen_q:
                    store(target, base + query * by[2], registers.sums[r * 2])

    @cuda.jit
    def flash_attention_mma_dbias(arrays, strides, sizes, score):
        thread, block = special.thread_index(), special.block_index()
        shape = sizes.dbias_shape
        m_tiles = int32(divide(int32(sizes.seqlen_q) + int32(tile_m - 1), tile_m))
        n_tiles = int32(divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n))
        # the block's own tile of bias, and the tiles of scores that read it
        own_m, own_n = (int32(1) if config.rows_summed else m_tiles), (int32(1) if config.keys_summed else n_tiles)
        above = divide(block, own_n)
        own_j, own_i = int32(block - above * own_n), int32(above - divide(above, own_m) * own_m)
        above = divide(above, own_m)
        split = divide(above, int32(shape[0] * shape[1])) if config.split else int32(0)
        above = int32(above - split * int32(shape[0] * shape[1]))
        own_b = divide(above, shape[1])
        own_h = int32(above - own_b * int32(shape[1]))
        # The block's part of the units (score_tiles.Range).
        entries, heads = (int64(1) if shape[0] > 1 else sizes.batch), (int64(1) if shape[1] > 1 else sizes.heads)
        row_tiles = m_tiles if config.rows_summed else int32(1)
        units, splits = entries * heads * row_tiles, sizes.dbias_splits if config.split else int64(1)
        walk = Range(
            own_b, own_h, own_i, int32(heads), row_tiles,
            int32(split * units // splits), int32((split + 1) * units // splits),
            own_j, n_tiles if config.keys_summed else int32(own_j + 1),
        )  # fmt: skip

        address = shared.address(cuda.shared.array(0, uint8))
        q_smem = int32((address + int32(alignment - 1)) & int32(-alignment))
        smem = Smem(
            q_smem,  # (tile_m, head_dim_padded)
            q_smem + int32(plan.do),  # (tile_m, head_dim_v_padded)
            q_smem + int32(plan.k),  # (tile_n, head_dim_padded)
            q_smem + int32(plan.v),  # (tile_n, head_dim_v_padded)
        )
        registers = Registers(
            local.array(count, float32),  # acc_s (tile_n / 8, 4)
            local.array(count, float32),  # acc_dp (tile_n / 8, 4)
            local.array(count, float32),  # sums (tile_n / 8, 4)
            local.array(q_words, uint32),  # q_frag (head_dim_padded / 16, 4)
            local.array(do_words, uint32),  # do_frag (head_dim_v_padded / 16, 4)
            local.array(4, uint32),  # b_frag (16, 16): K or V
            local.array(read.bias_words, uint32),  # loaded
            local.array(rows, uint32),  # shown_bits
            local.array(kept_words, uint32),  # kept
        )
        for x in range(count):
            registers.sums[x] = float32(0)

        place = tiles.first(walk, arrays, strides, sizes)
        if place.unit < walk.end_unit:
            tiles.load_first(place, smem, arrays, strides, sizes, thread)
        cp_async.commit_group()
        while place.unit < walk.end_unit:
            if read.reads:
                read_scores(place, registers, thread, arrays, strides, sizes)
            for x in range(count):
                registers.acc_s[x] = float32(0)
                registers.acc_dp[x] = float32(0)
            wait_all()
            cuda.syncthreads()  # the tile has arrived
            tiles.multiply(registers, smem, thread)
            following_place = tiles.following(place, walk, arrays, strides, sizes)
            cuda.syncthreads()  # all threads have finished with it
            if following_place.unit < walk.end_unit:
                tiles.load_next(following_place, place, smem, arrays, strides, sizes, thread)
            cp_async.commit_group()
            add_scores(place, registers, thread, arrays, strides, sizes, score)
            place = following_place

        target, by, base = arrays.dbias, strides.dbias, int64(0)
        if config.split:
            of_head = shape[2] * shape[3]
            target, by = arrays.dbias_sums, (shape[1] * of_head, of_head, shape[3], int64(1))
            base = split * shape[0] * by[0]
        base += own_b * by[0] + own_h * by[1]
        first_query, first_key = int64(own_i) * tile_m, int64(own_j) * tile_n
        if config.rows_summed or config.keys_summed:
            at = q_smem + int32(plan.sums)
            store_sums(registers, target, by, base, first_query, first_key, at, thread, sizes)
        else:
            store_tile(registers, target, by, base, first_query, first_key, thread, sizes)

    return flash_attention_mma_dbias
