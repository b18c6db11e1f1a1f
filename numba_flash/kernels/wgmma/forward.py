"""FlashAttention-2 for Hopper (sm_90a): TMA loads tiles, wgmma multiplies them, and both run asynchronously.

Read mma/forward first. The recurrence is the same, and a lane holds the same rows. Three things are new.

Roles. One thread, the scheduler, takes query tiles and loads their Q into shared memory by TMA. Another thread, the
producer, loads K and V (both are in producer.py). Each consumer warpgroup computes 64 query rows. They synchronise at
mbarriers: `full` when a tile has arrived, `empty` when all consumers have finished with it. setmaxnreg moves
registers from the warpgroup of the first two to the consumers.

Overlap. wgmma is asynchronous. S of the next tile is issued before P . V of this one, and the softmax of the next tile
runs during P . V. After the last P . V of a query tile, the first S of the next query tile is issued, and O is written
while it runs. With ping_pong two consumers also take turns, so that one multiplies while the other computes
exponentials.

The kernel is persistent: one block per multiprocessor stays for the whole launch and takes query tiles by a counter in
global memory. Tiles that see the most keys come first, and blocks work on a few heads at a time, so that K and V of
these heads stay in L2. The last block that finds no tile left resets the counter for the next launch.

The scheme is that of FlashAttention-3 (Shah et al., 2024). Launch: grid (persistent blocks), block
(config.threads), config.shared_bytes of dynamic shared memory; tensor maps of q, k and v.
"""

import numpy as np
from numba import cuda, float32, int32, uint8, uint32

from ...ptx import bar, fence, ld_st, local, memory, setmaxnreg, shared, shfl, special, vote, wgmma
from ..recompute import rows as recompute
from ..score import fragment_softmax, fragments, sum_terms, tile_walk
from ..score import reads as score_reads
from ..steps import output_rows
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of
from ..steps.query_tile import QueryTile
from ..steps.sequence import lse_row, queries_of
from ..steps.units import exponent_unit
from . import barriers, fragment_outputs, one_side, producer, tile_scores
from .barriers import BEGIN, CUT, FREE, KEYS, STATES, STOP, WORK, B, H
from .forward_state import Consumer, Registers, Rows
from .tile_scores import KeyTile, ScoreRegisters
from .work_tile import counting, position, rows_of_lane, tile_of, word


def make(config):
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    plan = config.shared_layout()
    q_panel, kv_panel = config.tile_m * 128, config.tile_n * 128  # bytes of 64 columns
    k_panels, v_panels = -(-head_dim_padded // 64), -(-head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = q_panel * k_panels, kv_panel * k_panels, kv_panel * v_panels
    s_count, o_count, p_count = config.tile_n // 2, head_dim_v_padded // 2, config.tile_n // 4
    o_blocks = head_dim_v_padded // 8
    all_consumers = 128 * config.consumers
    ping_pong, pair = config.ping_pong and config.consumers > 1, 256  # threads of two warpgroups
    write_lse, o_columns, o_staged = config.write_lse, config.o_columns, config.o_place != ""
    o_in_q = config.o_place == "q"
    o_parts, o_bytes = -(-head_dim_v_padded // o_columns), 32 * o_columns  # of a warp's rows that are staged at a time
    padded = config.has("seqlens_k")  # V may hold anything after the valid keys

    kind = "f16" if config.dtype == "float16" else "bf16"
    # 16 columns of Q and K are 32 bytes of a panel's row, 64 a panel; offsets are in units of 16 bytes
    q_steps = tuple(((x % 4) * 32 + (x // 4) * q_panel) >> 4 for x in range(head_dim_padded // 16))
    k_steps = tuple(((x % 4) * 32 + (x // 4) * kv_panel) >> 4 for x in range(head_dim_padded // 16))
    v_steps = tuple((y * 16 * 128) >> 4 for y in range(config.tile_n // 16))
    multiply_q_k = wgmma.product_shared(config.tile_n, kind, q_steps, k_steps, 0)
    multiply_p_v = wgmma.product_registers(head_dim_v_padded, kind, v_steps, 1)
    describe_k = wgmma.descriptor(16, 1024, 128)  # of Q too; the first number is not used
    describe_v = wgmma.descriptor(kv_panel, 1024, 128)
    commit, wait_all, wait_but_one = wgmma.commit_group, wgmma.wait_group(0), wgmma.wait_group(1)
    pin_s, pin_o = wgmma.pin(s_count), wgmma.pin(o_count)
    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    thread_index, address, shared_address = special.thread_index, memory.address, shared.address

    rings = barriers.make(config)
    set_up, schedule, produce, produce_bias = producer.make(config)
    has_row_term, row_term = fragments.chain(config).has_row_term, fragments.chain(config).row_term
    mask_words = fragments.tile(config, 1).mask_words
    read = score_reads.make(config, 1)
    reads, sides = read.reads, one_side.make(config)
    one_sided, inverse_scale_of, linear_ends, _, _ = sides
    load_for_scores, find_bits, side_of, finish_scores = tile_scores.make(config, sides)
    bias_boxes, walk = config.bias_boxes, tile_walk.make(config, whole_warp=True)
    start, softmax, finish = fragment_softmax.make_shifted(config, 1, one_sided)
    drops, kept_words, find_kept, drop_some, count_kept = counting(config)
    has_term, load_terms = sum_terms.make(config) is not None, sum_terms.on_fragments(config, 2)
    to_p = fragment_softmax.in_16_bits(config, 1)
    store_rows = output_rows.make(config, 16, o_columns, config.o_place == "own")
    o_words, stage_rows, write_rows = fragment_outputs.make(config)
    recompute_rows = recompute.make(config, 16)
    to_natural = float32(1 / exponent_unit(config))

    @inlined
    def zero_tail(base, stage, rows, thread):
        """All consumers: V's rows from `rows` on = 0. Behind the valid keys there may be NaN, and 0 * NaN is NaN."""
        zeros = local.array(4, uint32)
        for i in range(4):
            zeros[i] = uint32(0)
        for index in range(rows * 8 + thread, config.tile_n * 8, all_consumers):
            for panel in range(v_panels):
                ld_st.store_v4(base + plan.v + stage * v_bytes + panel * kv_panel + index * 16, zeros, 0)
        fence.proxy_async()
        bar.sync(4, all_consumers)

    @inlined
    def rescale(acc_o, alpha, moved):
        if moved != 0:
            for n in range(o_blocks):
                for i in range(4):
                    acc_o[4 * n + i] *= alpha[i // 2]

    @inlined
    def issue_scores(base, q_desc, acc_s, n):
        """S of the block's n-th tile of keys, which has come."""
        multiply_q_k(acc_s, q_desc, describe_k(base + plan.k + rings.k.stage(n) * k_bytes), 0)
        commit()

    @inlined
    def issue_outputs(base, acc_o, p_frag, n):
        """P . V of the n-th tile of keys."""
        rings.v.consumer_wait(base, n)
        multiply_p_v(acc_o, p_frag, describe_v(base + plan.v + rings.v.stage(n) * v_bytes), 1)
        commit()

    @inlined
    def pingpong_wait(me):
        if ping_pong:
            bar.sync(me + 1, pair)

    @inlined
    def pingpong_arrive(following):
        if ping_pong:
            bar.arrive(following + 1, pair)

    @inlined
    def issue_products(base, consumer, q_desc, registers, n):
        """S of the n-th tile of keys and P . V of the one before."""
        rings.k.consumer_wait(base, n)
        pingpong_wait(consumer.me)
        issue_scores(base, q_desc, registers.scores.acc_s, n)
        issue_outputs(base, registers.acc_o, registers.p_frag, int32(n - 1))
        pingpong_arrive(consumer.following)

    @inlined
    def done_with_scores(base, elected, tile, rows):
        """K of a tile is given back; and Q with the query tile's last, unless O is to lie there."""
        rings.k.consumer_release(base, tile.n, elected)
        if not o_in_q:
            rings.q.consumer_release(base, rows.seen, elected & (tile.j == rows.begin))

    @inlined
    def prepare(tile, rows, registers, arrays, sizes):
        """What the softmax of a tile needs besides S. It runs beside products. -> on which side the tile is"""
        find_bits(tile, registers.scores, sizes)
        side = int32(0)
        if one_sided:
            side = side_of(tile.j, rows.before, rows.behind, registers.scores, registers.shift)
        if drops:
            find_kept(tile.j, rows.work_tile, registers.kept, arrays, sizes)
        return side

    @inlined
    def weigh(base, tile, rows, side, registers, arrays, strides, sizes, score):
        """acc_s <- P of a tile whose S is there. -> whether a maximum moved"""
        scores = registers.scores
        factor = finish_scores(base, tile, scores, side, rows.inverse_scale, arrays, strides, sizes, score)
        moved = softmax(scores.acc_s, registers.m, registers.l, registers.alpha, factor, registers.shift)
        if drops:
            drop_some(scores.acc_s, registers.kept)
        return moved

    @inlined
    def next_tile(j, rows, arrays, strides):
        """-> (the key tile after j, one before `begin` if none is left; whether mask_mod removes something of it)"""
        following = int32(walk.next_tile(rows.states, j, rows.begin, arrays, strides) if walk.present else j - 1)
        return following, walk.needs_mask(rows.states, max(following, rows.begin), arrays, strides)

    @inlined
    def step(base, consumer, tile, rows, registers, arrays, strides, sizes, score):
        """S and P of a tile of keys, and beside them P . V of the tile before. -> next_tile"""
        acc_s, acc_o = registers.scores.acc_s, registers.acc_o
        if reads:
            load_for_scores(tile, registers.scores, arrays, strides, sizes)
        issue_products(base, consumer, rows.q_desc, registers, tile.n)
        side = prepare(tile, rows, registers, arrays, sizes)
        following = next_tile(tile.j, rows, arrays, strides)  # read beside products, too
        wait_but_one()  # for S, with P . V behind it
        pin_s(acc_s)
        done_with_scores(base, consumer.elected, tile, rows)
        moved = weigh(base, tile, rows, side, registers, arrays, strides, sizes, score)
        wait_all()
        pin_o(acc_o)
        rings.v.consumer_release(base, int32(tile.n - 1), consumer.elected)
        to_p(acc_s, registers.p_frag)
        rescale(acc_o, registers.alpha, moved)
        return following

    @inlined
    def write_tile(base, rows, registers, words, arrays, strides, sizes, score):
        """Writes O and lse of the warp's rows."""
        tile, acc_o = tile_of(rows.work_tile), registers.acc_o
        sequence = queries_of(tile.b, arrays, strides, sizes)
        first_row, lane = rows_of_lane()
        lane_row, lane_column = first_row + first_row_of(lane), first_column_of(lane)
        inverse_l, lse = registers.alpha, registers.scores.distance  # the same registers, free by now
        finish(registers.m, registers.l, inverse_l, lse)
        if drops:
            count_kept(inverse_l, score)
        some_nonfinite = uint32(0)
        nonfinite = registers.m  # the same registers: NaN where a number of the row is NaN or Inf
        for r in range(2):
            even, odd = float32(0), float32(0)
            for n in range(o_blocks):
                even += acc_o[4 * n + 2 * r] * float32(0)
                odd += acc_o[4 * n + 2 * r + 1] * float32(0)
            nonfinite[r] = even + odd
        for r in range(2):
            nonfinite[r] += shfl.bfly_f32(nonfinite[r], 1)
        for r in range(2):
            nonfinite[r] += shfl.bfly_f32(nonfinite[r], 2)
        for r in range(2):
            row = lane_row + 8 * r
            query = divide(row, config.group_size)
            flag = uint32(0) if nonfinite[r] == 0 else uint32(1)
            some_nonfinite |= flag
            if lane & 3 == 0:
                ld_st.store_b32(base + plan.row_states + row * config.ROW_STATE_BYTES, flag)
                ld_st.store_b32(base + plan.row_states + row * config.ROW_STATE_BYTES + 4, lse[r].view(np.uint32))
                if write_lse and tile.first_query + query < sequence.seqlen_q:
                    head = tile.h + row - query * config.group_size
                    arrays.lse[lse_row(sequence, head, tile.first_query + query, sizes)] = lse[r] * to_natural
        if o_in_q:
            o_smem = base + rings.q.stage(rows.seen) * q_bytes
        else:
            o_smem = base + plan.o + (first_row >> 4) * o_bytes
        if o_staged:
            # In Q's place a warp writes over 16 rows that only its own quarter of each product has read. So the
            # hardware does it; PTX does not say so.
            stage_rows(o_smem, first_row, lane, acc_o, inverse_l, words, 0)
            if o_in_q:
                fence.proxy_async()  # the next Q comes by TMA, and must not be overtaken by what was written here
            bar.warp_sync()  # the states of a warp's rows, and the rows, are there for all of its lanes
            store_rows(first_row, lane, o_smem, base + plan.row_states, tile, arrays, strides, sizes)
            if o_parts > 1:  # no loop, through which ptxas does not follow wgmma's registers
                bar.warp_sync()  # all lanes have read the first part
                stage_rows(o_smem, first_row, lane, acc_o, inverse_l, words, 1)
                bar.warp_sync()
                second_part = QueryTile(tile.b, tile.h, tile.first_query, int32(1))
                store_rows(first_row, lane, o_smem, base + plan.row_states, second_part, arrays, strides, sizes)
        else:
            bar.warp_sync()  # the states of a warp's rows are there for all of its lanes
            flags = base + plan.row_states
            write_rows(lane_row, lane_column, lane, flags, acc_o, inverse_l, words, tile, arrays, strides, sizes)
        if vote.any_lane(some_nonfinite) != 0:
            recompute_rows(first_row, lane, base + plan.row_states, tile, arrays, strides, sizes, score)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 rows of every query tile that the block takes."""
        acc_s, acc_o = local.array(s_count, float32), local.array(o_count, float32)
        m, l, alpha = local.array(2, float32), local.array(2, float32), local.array(2, float32)
        terms, distance, shift = local.array(2, float32), local.array(2, float32), local.array(2, float32)
        loaded, mask_bits = local.array(read.bias_words, uint32), local.array(mask_words, uint32)
        p_frag, kept = local.array(p_count, uint32), local.array(kept_words, uint32)
        scores = ScoreRegisters(acc_s, loaded, mask_bits, local.array(read.bits_words, uint32), terms, distance)
        registers = Registers(scores, acc_o, p_frag, m, l, alpha, shift, kept)
        words = local.array(o_words, uint32)  # of O, on their way
        me = int32(warpgroup - 1)
        elected = thread_index() & int32(31) == 0
        consumer = Consumer(me, int32(0) if me == config.consumers - 1 else int32(me + 1), elected)
        q_desc = describe_k(base + me * (64 * 128))  # of the query tile at work
        taken = int32(0)  # tiles of K and V so far
        seen = int32(0)  # query tiles so far
        for i in range(s_count):
            acc_s[i] = float32(0)
        if ping_pong and me == config.consumers - 1:
            bar.arrive(1, pair)  # the first turn is the first consumer's, as if the last had given it on
        # The block's first S is the only one that stands alone.
        rings.tiles.consumer_wait(base, seen)
        rings.q.consumer_wait(base, seen)
        rings.k.consumer_wait(base, taken)
        pingpong_wait(me)
        issue_scores(base, q_desc, acc_s, taken)
        pingpong_arrive(consumer.following)
        while word(rings.work_tile(base, seen) + WORK) != 0:
            work_tile = rings.work_tile(base, seen)
            begin, free = word(work_tile + BEGIN), word(work_tile + FREE)
            cut, j = word(work_tile + CUT), int32(word(work_tile + STOP) - 1)
            states = word(work_tile + STATES) if walk.present else int32(0)
            # All that needs no score comes before they do.
            start(m, l)
            for i in range(o_count):
                acc_o[i] = float32(0)
            for r in range(2):
                terms[r] = float32(0)
                if has_row_term:
                    first_row, lane = rows_of_lane()
                    row_head = word(work_tile + H) + (first_row + first_row_of(lane) + 8 * r) % config.group_size
                    terms[r] = row_term(word(work_tile + B), row_head, arrays, strides)
            inverse_scale, before, behind = float32(0), int32(0), int32(0)
            if one_sided:
                inverse_scale = inverse_scale_of(terms, score)
                before, behind = linear_ends(position(work_tile), rows_of_lane()[0], inverse_scale)
            for i in range(mask_words):
                mask_bits[i] = uint32(0)
            rows = Rows(work_tile, seen, q_desc, begin, states, before, behind, inverse_scale)

            # P of the first tile, whose S is issued already.
            masked, asks = j >= cut or j < free, walk.needs_mask(states, j, arrays, strides)
            tile = KeyTile(j, taken, work_tile, FALSE, masked, asks)
            if reads:
                load_for_scores(tile, scores, arrays, strides, sizes)
            side = prepare(tile, rows, registers, arrays, sizes)
            following, asks = next_tile(j, rows, arrays, strides)
            wait_all()
            pin_s(acc_s)
            done_with_scores(base, elected, tile, rows)
            weigh(base, tile, rows, side, registers, arrays, strides, sizes, score)
            to_p(acc_s, p_frag)
            if padded:
                rings.v.consumer_wait(base, taken)
                keys = word(work_tile + KEYS)
                if keys < (j + 1) * config.tile_n:
                    zero_tail(base, rings.v.stage(taken), max(keys - j * config.tile_n, 0), thread_index() - 128)
            taken, j = int32(taken + 1), following
            while j >= begin:
                # Tiles that some row sees in part; then those that every row sees whole; then, behind a left
                # window, some of the first kind again.
                while j >= begin and (j >= cut or j < free):
                    tile = KeyTile(j, taken, work_tile, FALSE, TRUE, asks)
                    j, asks = step(base, consumer, tile, rows, registers, arrays, strides, sizes, score)
                    taken = int32(taken + 1)
                while j >= free and j < cut:
                    tile = KeyTile(j, taken, work_tile, TRUE, FALSE, asks)
                    j, asks = step(base, consumer, tile, rows, registers, arrays, strides, sizes, score)
                    taken = int32(taken + 1)

            # The last P . V, and behind it the first S of the next query tile, beside which O is written. When there
            # is no next one, nobody looks at that S.
            seen = int32(seen + 1)
            rings.tiles.consumer_wait(base, seen)
            pingpong_wait(me)
            issue_outputs(base, acc_o, p_frag, int32(taken - 1))
            q_desc = describe_k(base + rings.q.stage(seen) * q_bytes + me * (64 * 128))
            rings.q.consumer_wait(base, seen)
            rings.k.consumer_wait(base, taken)
            issue_scores(base, q_desc, acc_s, taken)
            pingpong_arrive(consumer.following)
            if has_term:  # read beside the products, into registers that are free by now
                first_row, lane = rows_of_lane()
                lane_row = first_row + first_row_of(lane)
                load_terms(distance, word(work_tile + B), word(work_tile + H), lane_row, arrays, strides)
            wait_but_one()
            pin_o(acc_o)
            rings.v.consumer_release(base, int32(taken - 1), elected)

            write_tile(base, rows, registers, words, arrays, strides, sizes, score)
            bar.warp_sync()  # all lanes have read the work tile, the rows' states, and what was staged
            if o_in_q:
                rings.q.consumer_release(base, rows.seen, elected)
            rings.tiles.consumer_release(base, rows.seen, elected)
        wait_all()
        if ping_pong and me == 0:
            bar.sync(1, pair)  # takes the turn that was given on when there was nothing left to do

    @cuda.jit
    def flash_attention_wgmma(tensor_maps, arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = int32((shared_address(smem) + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))
        thread = thread_index()
        warpgroup = int32(shfl.idx_b32(uint32(thread >> int32(7)), 0))  # known to be the same in a whole warp
        if thread == 0:
            set_up(base)
            fence.mbarrier_init()
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                produce(base, arrays, strides)
            if thread == 32:  # of another warp, so that neither waits for the other
                schedule(base, address(arrays.counters, 0), arrays, strides, sizes)
            if bias_boxes:
                if thread == 64:
                    produce_bias(base, arrays, strides)
        else:
            take_registers()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma
