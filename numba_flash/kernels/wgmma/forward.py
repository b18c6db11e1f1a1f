"""FlashAttention-2 for Hopper (sm_90a): TMA loads tiles, wgmma multiplies them, and both run asynchronously.

Read docs/hopper.md and mma/forward first. The recurrence is the same, and a lane holds the same rows.

Roles. Two threads supply the others (producer.py): the scheduler takes query tiles and loads their Q, the producer
loads K and V. Each consumer warpgroup computes 64 query rows. They synchronise at mbarriers (pipeline.py). setmaxnreg
moves registers from the warpgroup of the first two to the consumers. A block stays for the whole launch.

Overlap. S of the next tile is issued before P . V of this one, and the softmax of the next tile runs during P . V.
After the last P . V of a query tile, the first S of the next query tile is issued, and O is written while it runs.
Consumers also take turns, so that one multiplies while the others compute exponentials.

The scheme is that of FlashAttention-3 (Shah et al., 2024). Launch: grid (persistent blocks), block
(config.threads), config.shared_bytes of dynamic shared memory; tensor maps of q, k and v.

With config.parts several blocks share the keys of a query tile, and forward_join.py, a kernel of its own, writes O.

Six files have the rest, in this order: block.py (the words of a work tile), pipeline.py (rings of tiles and their
mbarriers), producer.py (scheduler and producer), tile_scores.py (what becomes of S before the softmax),
kernels/score/fragment_softmax.py, forward_outputs.py (O to global memory). Other modules of kernels/score add options;
without these they leave no code.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint8, uint32

from ...ptx import bar, griddepcontrol, local, memory, special, wgmma
from ..score import fragment_softmax, fragments, reads, sum_term, tile_walk
from ..steps.basics import FALSE, TRUE, first_row_of, inlined
from . import block, forward_join, forward_outputs, operands, pipeline, producer, tile_scores
from .block import BEGIN, CUT, FREE, KEYS, MEMBERS, PART, STATES, STOP, B, H, rows_of_lane, word
from .operands import describe_rows, wait_all, wait_but_one
from .tile_scores import ConsumerRegisters, KeyTile, ScoreRegisters, counting


class Consumer(NamedTuple):
    """A consumer warpgroup."""

    me: Any  # its number
    following: Any  # the one whose turn comes next
    elected: Any  # whether this lane acts for its warp


class Rows(NamedTuple):
    """A consumer's rows: those of the query tile at work."""

    work_tile: Any  # where it is described
    seen: Any  # how many the consumer has had before
    q_desc: Any  # wgmma's descriptor of the consumer's rows of Q
    begin: Any  # its last key tile, since they come in descending order
    states: Any  # where the states of its key tiles begin (kernels/score/tile_walk.py)


def make(config):
    plan, rings, tile_n = config.shared_layout(), pipeline.of_forward(config), config.tile_n
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    k_panels, v_panels = -(-head_dim_padded // 64), -(-head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = config.tile_m * 128 * k_panels, tile_n * 128 * k_panels, tile_n * 128 * v_panels
    s_count, o_count, p_count = tile_n // 2, head_dim_v_padded // 2, tile_n // 4
    ping_pong, pair = config.consumers > 1, 256  # threads of two warpgroups
    padded, zero_tail = config.packed or config.has("seqlens_k"), block.tail_zeroer(config, head_dim_v_padded, 4)

    multiply_q_k = operands.rows_by_rows(config, config.tile_m, tile_n, head_dim_padded)
    multiply_p_v = wgmma.product_registers(head_dim_v_padded, operands.kind(config), operands.row_steps(tile_n), 1)
    describe_v = wgmma.descriptor(tile_n * 128, 1024, 128)
    pin_s, pin_o = wgmma.pin(s_count), wgmma.pin(o_count)
    give_registers, take_registers = block.register_moves(config)

    roles = producer.make(config)
    mask_words, read = fragments.tile(config, 1).mask_words, reads.make(config, 1)
    options, kept_weights = tile_scores.make(config), counting(config)
    walk, to_p = tile_walk.make(config, whole_warp=True), fragment_softmax.in_16_bits(config, 1)
    start, softmax, finish = fragment_softmax.make(config, 1)
    write, rescale = forward_outputs.make(config, finish), fragment_softmax.rescaler(1, head_dim_v_padded // 8)
    in_parts, (leave_part, _) = config.parts > 1, forward_join.of_parts(config)
    has_term = sum_term.make(config) is not None and not in_parts
    load_terms = sum_term.on_fragments(config, 2)

    @inlined
    def issue_scores(base, q_desc, acc_s, n):
        """Issues S of the block's n-th tile of keys, which has come."""
        multiply_q_k(acc_s, q_desc, describe_rows(base + plan.k + rings.k.stage(n) * k_bytes), 0)
        wgmma.commit_group()

    @inlined
    def issue_outputs(base, acc_o, p_frag, n):
        """Issues P . V of the n-th tile of keys."""
        rings.v.consumer_wait(base, n)
        multiply_p_v(acc_o, p_frag, describe_v(base + plan.v + rings.v.stage(n) * v_bytes), 1)
        wgmma.commit_group()

    @inlined
    def pingpong_wait(me):
        if ping_pong:
            bar.sync(me + 1, pair)

    @inlined
    def pingpong_arrive(following):
        if ping_pong:
            bar.arrive(following + 1, pair)

    @inlined
    def step(first, base, consumer, tile, rows, registers, arrays, strides, sizes, score):
        """Computes S and P of a tile of keys, and beside them P . V of the tile before. first, a constant: it is a
        query tile's first, whose S is issued already, and no tile is before it.

        -> (the key tile after it, one before `begin` if none is left; whether mask_mod removes something of that)
        """
        scores, acc_s, acc_o = registers.scores, registers.scores.acc_s, registers.acc_o
        if first:
            options.load_ahead(tile.j, tile.asks, tile.work_tile, scores, arrays, strides, sizes)
        if read.reads:
            options.load(tile, scores, arrays, strides, sizes)
        if not first:
            rings.k.consumer_wait(base, tile.n)
            pingpong_wait(consumer.me)
            issue_scores(base, rows.q_desc, acc_s, tile.n)
            issue_outputs(base, acc_o, registers.p_frag, int32(tile.n - 1))
            pingpong_arrive(consumer.following)

        # Work that needs no score runs beside these products.
        options.find_bits(tile, scores, sizes)
        if kept_weights.drops:
            kept_weights.find(tile.j, rows.work_tile, registers.kept, arrays, sizes)
        following = int32(walk.next_tile(rows.states, tile.j, rows.begin, arrays, strides))
        there = max(following, rows.begin)
        asks = walk.needs_mask(rows.states, there, arrays, strides)
        options.load_ahead(there, asks, rows.work_tile, scores, arrays, strides, sizes)

        if first:
            wait_all()
        else:
            wait_but_one()  # for S, with P . V behind it
        pin_s(acc_s)
        rings.k.consumer_release(base, tile.n, consumer.elected)
        rings.q.consumer_release(base, rows.seen, consumer.elected & (tile.j == rows.begin))
        factor = options.finish(base, tile, scores, arrays, strides, sizes, score)
        moved = softmax(acc_s, registers.m, registers.l, registers.alpha, factor)
        if kept_weights.drops:
            kept_weights.drop(acc_s, registers.kept)
        if not first:
            wait_all()
            pin_o(acc_o)
            rings.v.consumer_release(base, int32(tile.n - 1), consumer.elected)
        to_p(acc_s, registers.p_frag)
        if not first:
            rescale(acc_o, registers.alpha, moved)
        elif padded:
            keys, first_key = word(tile.work_tile, KEYS), tile.j * tile_n
            if keys < first_key + tile_n:
                rings.v.consumer_wait(base, tile.n)
                zero_tail(base + plan.v + rings.v.stage(tile.n) * v_bytes, max(keys - first_key, 0))
        return following, asks

    @inlined
    def begin_rows(work_tile, seen, q_desc, begin, states, registers, arrays, strides):
        """-> Rows of the next query tile; clears what belongs to them."""
        start(registers.m, registers.l)
        block.clear(registers.acc_o, o_count)
        options.row_terms(registers.scores.terms, work_tile, arrays, strides)
        block.clear(registers.scores.mask_bits, mask_words)
        return Rows(work_tile, seen, q_desc, begin, states)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 rows of every query tile that the block takes."""
        acc_s, acc_o = local.array(s_count, float32), local.array(o_count, float32)
        m, l, alpha = local.array(2, float32), local.array(2, float32), local.array(2, float32)
        terms, distance = local.array(2, float32), local.array(2, float32)
        loaded, mask_bits = local.array(read.bias_words, uint32), local.array(mask_words, uint32)
        p_frag, kept = local.array(p_count, uint32), local.array(kept_weights.words, uint32)
        scores = ScoreRegisters(acc_s, loaded, mask_bits, local.array(read.bits_words, uint32), terms, distance)
        registers = ConsumerRegisters(scores, acc_o, p_frag, m, l, alpha, kept)
        me, elected = int32(warpgroup - 1), block.elected()
        consumer = Consumer(me, int32(0) if me == config.consumers - 1 else int32(me + 1), elected)
        q_desc = describe_rows(base + me * (64 * 128))  # of the query tile at work
        taken = int32(0)  # tiles of K and V so far
        seen = int32(0)  # query tiles so far
        block.clear(acc_s, s_count)
        if ping_pong and me == config.consumers - 1:
            bar.arrive(1, pair)  # the first turn is the first consumer's, as if the last had given it on
        # The block's first S is the only one that stands alone.
        rings.tiles.consumer_wait(base, seen)
        rings.q.consumer_wait(base, seen)
        rings.k.consumer_wait(base, taken)
        pingpong_wait(me)
        issue_scores(base, q_desc, acc_s, taken)
        pingpong_arrive(consumer.following)
        while word(rings.work_tile(base, seen), MEMBERS) != 0:
            work_tile = rings.work_tile(base, seen)
            begin, free = word(work_tile, BEGIN), word(work_tile, FREE)
            cut, j = word(work_tile, CUT), int32(word(work_tile, STOP) - 1)
            states = word(work_tile, STATES) if walk.present else int32(0)
            # All that needs no score comes before they do.
            rows = begin_rows(work_tile, seen, q_desc, begin, states, registers, arrays, strides)
            masked, asks = j >= cut or j < free, walk.needs_mask(states, j, arrays, strides)
            tile = KeyTile(j, taken, work_tile, FALSE, masked, asks)
            following, asks = step(TRUE, base, consumer, tile, rows, registers, arrays, strides, sizes, score)
            taken, j = int32(taken + 1), following
            while j >= begin:
                # Tiles that some row sees in part; then those that every row sees whole; then, behind a left
                # window, some of the first kind again.
                while j >= begin and (j >= cut or j < free):
                    tile = KeyTile(j, taken, work_tile, FALSE, TRUE, asks)
                    j, asks = step(FALSE, base, consumer, tile, rows, registers, arrays, strides, sizes, score)
                    taken = int32(taken + 1)
                while j >= free and j < cut:
                    tile = KeyTile(j, taken, work_tile, TRUE, FALSE, asks)
                    j, asks = step(FALSE, base, consumer, tile, rows, registers, arrays, strides, sizes, score)
                    taken = int32(taken + 1)

            # The last P . V, and behind it the first S of the next query tile, beside which O is written. When there
            # is no next one, nobody looks at that S.
            seen = int32(seen + 1)
            rings.tiles.consumer_wait(base, seen)
            pingpong_wait(me)
            issue_outputs(base, acc_o, p_frag, int32(taken - 1))
            q_desc = describe_rows(base + rings.q.stage(seen) * q_bytes + me * (64 * 128))
            rings.q.consumer_wait(base, seen)
            rings.k.consumer_wait(base, taken)
            issue_scores(base, q_desc, acc_s, taken)
            pingpong_arrive(consumer.following)
            if has_term:  # read beside the products, into registers that are free by now
                first_row, lane = rows_of_lane()
                lane_row = first_row + first_row_of(lane)
                load_terms(distance, word(work_tile, B), word(work_tile, H), lane_row, arrays, strides)
            wait_but_one()
            pin_o(acc_o)
            rings.v.consumer_release(base, int32(taken - 1), elected)

            if in_parts:
                leave_part(word(work_tile, PART), registers, arrays)
            else:
                write(work_tile, registers, arrays, strides, sizes, score)
            bar.warp_sync()  # all lanes have read the work tile
            rings.tiles.consumer_release(base, rows.seen, elected)
        wait_all()
        if ping_pong and me == 0:
            bar.sync(1, pair)  # takes the turn that was given on when there was nothing left to do

    @cuda.jit
    def flash_attention_wgmma(tensor_maps, arrays, strides, sizes, score):
        base = block.aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        thread, warpgroup = special.thread_index(), block.warpgroup_index()
        if thread == 0:
            roles.set_up(base)
        cuda.syncthreads()
        if in_parts:
            griddepcontrol.launch_dependents()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                roles.produce(base, arrays, strides)
            # The scheduler is in another warp, so that neither waits for the other.
            if thread == 32 or (config.packed and thread > 32 and thread < 64):
                roles.schedule(base, memory.address(arrays.counters, 0), arrays, strides, sizes)
            if config.packed:
                if thread == 64:
                    roles.produce_q(base)
                if thread >= 96:
                    roles.clear_outside(arrays, strides, sizes)
            if config.bias_boxes:
                if thread == 64:
                    roles.produce_bias(base, arrays, strides)
        else:
            take_registers()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma
