"""The gradient of aux with products on tensor cores: of the numbers that a score_mod reads.

It computes what v2_backward_daux.py computes, in 16 bits; kernels/score/aux_gradient.py explains the sums. A block owns
a query tile and loops over the key tiles that it sees (score_tiles.py). Warps store the products of a tile in shared
memory, and then every thread takes its own scores from there, one after the other. A function may be any code, so the
kernel contains it once and not once for each score of a fragment.

A thread follows a diagonal: the next score is that of the next query and the next key. On a diagonal a table of
relative positions has one element, and so has a number of a head. So most terms are added up before they are added to
the sums in global memory. The lanes of a warp have neighbouring keys, whose elements are mostly neighbours, too.

Launch: grid (batch * heads * query tiles). Rows are contiguous along dim.
"""

import math
from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import ld_st, local, shared, special
from ..score import at_position, aux_gradient, fragments, kept_weights, reads as score_reads, user
from ..score.aux_gradient import Run
from ..score.stage import FragmentAt
from ..steps import block_state, lse_delta, sequence
from ..steps.basics import divide, first_column_of, first_row_of, inlined, nothing, row_keys, tiles_of
from ..steps.score_ranges import Range
from . import score_tiles, work_tile

AT_ONCE = 4  # scores of a thread


# A warp's part of the products. Shapes are in the kernel.
Registers = namedtuple("Registers", "acc_s acc_dp q_frag do_frag b_frag run")


def make(config):
    plan, tiles = config.shared_layout(), score_tiles.make(config)
    score_row, tile_n, rows, inf = config.score_row, config.tile_n, 2, float32(math.inf)
    blocks, count, thread_rows = tile_n // 8, tile_n // 2, config.tile_m * tile_n // config.threads
    chain, (_, weight), sequence_of = fragments.chain(config), fragments.weights_at(config), sequence.make(config)
    (added, visible), has_mask_mod = score_reads.one_by_one(config), config.has("mask_mod")
    leaves = user.make(config, "mask_mod") if has_mask_mod else None
    row_term, count_of, of_query = chain.row_term, kept_weights.make(config), lse_delta.of_query(config)
    work_of = work_tile.of_queries(config, config.tile_m)
    ask, aux, wanted = user.recorded(config), aux_gradient.make(config), len(config.wanted_aux)

    @inlined
    def note_rows(own, q_smem, thread, arrays, strides, sizes):
        """Stores in shared memory, for each query of the block, the keys that it sees, lse and delta."""
        if thread < config.tile_m:
            entry, query = sequence_of(own.b, arrays, strides, sizes), int32(own.i * config.tile_m + thread)
            first, end = row_keys(entry.q_start + query, sizes.left, sizes.right, entry.keys)
            lse, delta = inf, float32(0)
            if query < entry.seqlen_q:
                lse, delta = of_query(entry, own.h, query, arrays, sizes)
            if lse == inf:  # it sees no key
                end = first
            at = q_smem + int32(plan.rows) + 16 * thread
            block_state.put_range(at, int32(first), int32(end))
            ld_st.store_b32(at + 8, float32(lse).view(np.uint32))
            ld_st.store_b32(at + 12, float32(delta).view(np.uint32))

    @inlined
    def put_products(place, registers, smem, thread, score):
        for x in range(count):
            registers.acc_dp[x] = float32(0)
        tiles.multiply(registers, smem, thread)
        q_smem, lane, warp = smem.begin, thread & int32(31), thread >> int32(5)
        for r in range(rows):
            row = int32(warp * 16 + int32(first_row_of(lane)) + r * 8)
            at = q_smem + row * score_row + 4 * int32(first_column_of(lane))
            for n in range(blocks):
                for x in range(2):
                    here = at + 4 * (n * 8 + x)
                    ld_st.store_b32(here + int32(plan.s), registers.acc_s[n * 4 + r * 2 + x].view(np.uint32))
                    ld_st.store_b32(here + int32(plan.dp), registers.acc_dp[n * 4 + r * 2 + x].view(np.uint32))

    @inlined
    def nth(number, row, column, place):
        """The `number`-th score from (row, column) on, on the diagonal -> (its row, its column, At)."""
        row, column = int32(row + number), int32(column + number)
        column = int32(column - tile_n if column >= tile_n else column)
        key, query = int32(place.j * tile_n + column), int32(place.i * config.tile_m + row)
        q_pos = place.sequence.q_start + query
        return row, column, at_position(int64(place.sequence.b), int64(place.h), int64(query), int64(key), q_pos)

    @inlined
    def counts(row, at, q_smem, arrays, strides):
        """Whether the query sees the key."""
        four = local.array(4, uint32)
        ld_st.load_v4(four, 0, q_smem + int32(plan.rows) + 16 * row)
        found = int32(four[0]) <= at.k_index and at.k_index < int32(four[1])  # no key, for a query that is none
        if found:
            found = visible(at.b, at.h, at.q_index, at.k_index, arrays, strides)
        if has_mask_mod:
            if found:
                found = leaves(at, arrays, strides)
        return found

    @inlined
    def term_of(row, column, at, term, q_smem, arrays, strides, sizes, score):
        """-> (s, dS of score_mod's result, and what user.recorded returns behind that) of a score that counts."""
        four = local.array(4, uint32)
        ld_st.load_v4(four, 0, q_smem + int32(plan.rows) + 16 * row)
        lse, delta = four[2].view(np.float32), four[3].view(np.float32)
        here = q_smem + row * score_row + 4 * column
        s = ld_st.load_b32(here + int32(plan.s)).view(np.float32) * score.scale
        dp = ld_st.load_b32(here + int32(plan.dp)).view(np.float32)
        y, slope, element, reads = ask(s, at, int64(0), arrays, strides, sizes)
        bias = added(at.b, at.h, at.q_index, at.k_index, arrays, strides)
        p, through = weight(y, FragmentAt(term * float32(at.q_pos - at.k_index), bias), score, lse)
        counted = count_of(at, arrays, sizes, score)
        dp = dp * counted if counted != 0 else float32(0)  # no NaN if the weight does not count
        return s, p * (dp - delta) * through if p != 0 else float32(0), slope, element, reads

    @inlined
    def owe_scores(place, registers, smem, thread, arrays, strides, sizes, score):
        """Adds the terms of the thread's scores of a tile, AT_ONCE of them at a time if all of them count: then the
        loads of one need not wait for those of another."""
        run, q_smem = registers.run, smem.begin
        part = divide(thread, tile_n)
        column, row = int32(thread - part * tile_n), int32(part * thread_rows)
        term = row_term(place.sequence.b, place.h, arrays, strides)
        end_row = int32(row + thread_rows)
        s, ds, slope = local.array(AT_ONCE, float32), local.array(AT_ONCE, float32), local.array(AT_ONCE, float32)
        element, reads = local.array(AT_ONCE, int64), local.array(AT_ONCE, int64)
        while row < end_row:
            every = True
            for n in range(AT_ONCE):
                own_row, _, at = nth(n, row, column, place)
                every &= counts(own_row, at, q_smem, arrays, strides)
            same = every
            if every:
                for n in range(AT_ONCE):
                    own_row, own_column, at = nth(n, row, column, place)
                    found = term_of(own_row, own_column, at, term, q_smem, arrays, strides, sizes, score)
                    s[n], ds[n], slope[n], element[n], reads[n] = found
                    same &= aux.is_same(run, element[n], reads[n])
                for n in range(AT_ONCE):
                    if same:
                        aux.add_same(run, ds[n], slope[n])
                    elif ds[n] != 0:
                        _, _, at = nth(n, row, column, place)
                        aux.add(run, ds[n], s[n], slope[n], element[n], reads[n], at, arrays, strides, sizes)
            else:
                n = int32(0)
                while n < AT_ONCE:
                    own_row, own_column, at = nth(n, row, column, place)
                    if counts(own_row, at, q_smem, arrays, strides):
                        found = term_of(own_row, own_column, at, term, q_smem, arrays, strides, sizes, score)
                        if found[1] != 0:
                            aux.add(run, found[1], found[0], found[2], found[3], found[4], at, arrays, strides, sizes)
                    n = int32(n + 1)
            row, column = int32(row + AT_ONCE), int32(column + AT_ONCE)
            column = int32(column - tile_n if column >= tile_n else column)

    @inlined
    def tile_of(block, arrays, strides, sizes):
        """-> (b, h, query tile); of packed sequences no tile is -1."""
        if config.packed:
            work = work_of(block, arrays, strides, sizes)
            there = work.first_query < work.sequence.seqlen_q
            return work.sequence.b, work.h, divide(work.first_query, config.tile_m) if there else int32(-1)
        m_tiles = tiles_of(sizes.seqlen_q, config.tile_m)
        head_of_all = divide(block, m_tiles)
        b = divide(head_of_all, sizes.heads)
        return b, int32(head_of_all - b * int32(sizes.heads)), int32(block - head_of_all * m_tiles)

    over_tiles = tiles.loop(nothing, nothing, put_products, owe_scores)

    @cuda.jit
    def flash_attention_mma_daux(arrays, strides, sizes, score):
        thread, block = special.thread_index(), special.block_index()
        n_tiles = tiles_of(sizes.seqlen_k, config.tile_n)
        b, h, i = tile_of(block, arrays, strides, sizes)
        if config.packed:
            if i < 0:
                return
        own = Range(b, h, i, int32(1), int32(1), int32(0), int32(1), int32(0), n_tiles)
        smem = tiles.places(shared.address(cuda.shared.array(0, uint8)))
        registers = Registers(
            local.array(count, float32),  # acc_s (tile_n / 8, 4)
            local.array(count, float32),  # acc_dp (tile_n / 8, 4)
            local.array(tiles.q_words, uint32),  # q_frag (head_dim_padded / 16, 4)
            local.array(tiles.do_words, uint32),  # do_frag (head_dim_v_padded / 16, 4)
            local.array(4, uint32),  # b_frag (16, 16): K or V
            Run(local.array(wanted, int64), local.array(wanted, float32)),
        )
        aux.start(registers.run)
        note_rows(own, smem.begin, thread, arrays, strides, sizes)
        over_tiles(own, registers, smem, thread, arrays, strides, sizes, score)
        aux.finish(registers.run, arrays, sizes)

    return flash_attention_mma_daux
