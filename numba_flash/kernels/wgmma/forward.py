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
mbarriers), producer.py (scheduler and producer), tile_scores.py (the options, between S and the softmax),
kernels/score/fragment_softmax.py, forward_outputs.py (O to global memory). Without options the functions of
tile_scores.py and tile_walk.py leave no code.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint8, uint32

from ...ptx import bar, griddepcontrol, local, memory, special, wgmma
from ..score import fragment_softmax, tile_walk
from ..steps.basics import FALSE, TRUE, inlined
from . import block, forward_join, forward_outputs, operands, pipeline, producer, tile_scores
from .block import BEGIN, CUT, FREE, KEYS, MEMBERS, PART, STATES, STOP, word
from .operands import describe_rows, wait_all, wait_but_one
from .tile_scores import ConsumerRegisters, KeyTile, ScoreRegisters


class Consumer(NamedTuple):
    """A consumer warpgroup."""

    me: Any  # its number, from 0
    following: Any  # the number of the one whose turn comes next
    elected: Any  # whether this lane acts for its warp


class Rows(NamedTuple):
    """The 64 rows of a query tile that a consumer computes."""

    work_tile: Any  # the shared address of the tile's words (block.py)
    seen: Any  # the tile's number among those that the block has taken
    q_desc: Any  # wgmma's descriptor of these rows of Q
    begin: Any  # the last key tile, because key tiles come in descending order
    states: Any  # where the states of its key tiles begin, under a mask_mod (kernels/score/tile_walk.py)


def make(config):
    # plan: where each buffer begins, in bytes from `base`; rings: the mbarriers of the buffers.
    plan, rings, tile_n = config.shared_layout(), pipeline.of_forward(config), config.tile_n
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    k_panels, v_panels = -(-head_dim_padded // 64), -(-head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = config.tile_m * 128 * k_panels, tile_n * 128 * k_panels, tile_n * 128 * v_panels
    s_count, o_count, p_count = tile_n // 2, head_dim_v_padded // 2, tile_n // 4  # a lane's registers
    ping_pong, pair = config.consumers > 1, 256  # threads of two warpgroups
    # Past the valid keys V may hold NaN, and 0 * NaN is NaN: consumers set such rows to 0.
    padded, zero_tail = config.packed or config.has("seqlens_k"), block.tail_zeroer(config, head_dim_v_padded, 4)

    multiply_q_k = operands.rows_by_rows(config, config.tile_m, tile_n, head_dim_padded)
    multiply_p_v = operands.fragment_by_tile(config, tile_n, head_dim_v_padded)
    describe_v = operands.describe_columns(tile_n)
    pin_s, pin_o = wgmma.pin(s_count), wgmma.pin(o_count)

    roles = producer.make(config)  # the scheduler and the producer
    give_registers, take_registers = block.register_moves(config)
    options = tile_scores.make(config)  # masks, biases, ALiBi, dropout, the caller's functions
    mask_words, shown_words, kept_words, bias_words = options.words
    walk = tile_walk.make(config, whole_warp=True)  # mask_mod: the next key tile that it leaves; otherwise j - 1
    # 1: a warp has one strip of 16 rows, and a lane two rows of it.
    start, softmax, finish = fragment_softmax.make(config, 1)
    to_p, rescale = fragment_softmax.in_16_bits(config, 1), fragment_softmax.rescaler(1, head_dim_v_padded // 8)
    outputs, leave_part = forward_outputs.make(config, finish), forward_join.of_parts(config).leave

    @inlined
    def issue_scores(base, q_desc, acc_s, n):
        """Issues S of the block's n-th tile of keys, whose K is there."""
        multiply_q_k(acc_s, q_desc, describe_rows(base + plan.k + rings.k.stage(n) * k_bytes), 0)
        wgmma.commit_group()

    @inlined
    def issue_outputs(base, acc_o, p_frag, n):
        """Issues P . V of the n-th tile of keys, once its V is there."""
        rings.v.consumer_wait(base, n)
        multiply_p_v(acc_o, p_frag, describe_v(base + plan.v + rings.v.stage(n) * v_bytes), 1)
        wgmma.commit_group()

    @inlined
    def pingpong_wait(me):
        """Waits for the turn of consumer `me`."""
        if ping_pong:
            bar.sync(me + 1, pair)

    @inlined
    def pingpong_arrive(following):
        """Gives the turn to consumer `following`."""
        if ping_pong:
            bar.arrive(following + 1, pair)

    @inlined
    def step(first, base, consumer, tile, rows, registers, arrays, strides, sizes, score):
        """Computes S and P of a KeyTile, and beside them P . V of the tile before. first, a constant: the tile is its
        query tile's first. Then S is issued already, and there is no tile before.

        -> (j of the next key tile, less than `begin` if none is left; whether mask_mod removes something of that tile)
        """
        scores, acc_s, acc_o = registers.scores, registers.scores.acc_s, registers.acc_o
        if first:
            options.load_ahead(tile.j, tile.asks, tile.work_tile, scores, arrays, strides, sizes)
        options.load(tile, scores, arrays, strides, sizes)
        if not first:
            rings.k.consumer_wait(base, tile.n)
            pingpong_wait(consumer.me)
            issue_scores(base, rows.q_desc, acc_s, tile.n)
            issue_outputs(base, acc_o, registers.p_frag, int32(tile.n - 1))
            pingpong_arrive(consumer.following)

        # Work that needs no score runs beside these products.
        options.find_bits(tile, scores, sizes)
        options.find_kept(tile, registers.kept, arrays, sizes)
        following = int32(walk.next_tile(rows.states, tile.j, rows.begin, arrays, strides))
        there = max(following, rows.begin)  # if none is left, some tile whose bits nobody uses
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
        moved = softmax(acc_s, registers.m, registers.l, registers.alpha, factor)  # acc_s: now P
        options.drop(acc_s, registers.kept)
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
        """-> Rows of the next query tile; m, l, O and the options' registers <- their first values."""
        start(registers.m, registers.l)
        block.clear(registers.acc_o, o_count)
        options.begin(registers.scores, work_tile, arrays, strides)
        return Rows(work_tile, seen, q_desc, begin, states)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 rows of every query tile that the block takes."""
        # Registers: tile_scores.py has their shapes.
        acc_s, acc_o = local.array(s_count, float32), local.array(o_count, float32)
        m, l, alpha = local.array(2, float32), local.array(2, float32), local.array(2, float32)
        terms, distance = local.array(2, float32), local.array(2, float32)
        loaded, mask_bits = local.array(bias_words, uint32), local.array(mask_words, uint32)
        p_frag, kept = local.array(p_count, uint32), local.array(kept_words, uint32)
        scores = ScoreRegisters(acc_s, loaded, mask_bits, local.array(shown_words, uint32), terms, distance)
        registers = ConsumerRegisters(scores, acc_o, p_frag, m, l, alpha, kept)
        me, elected = int32(warpgroup - 1), block.elected()
        consumer = Consumer(me, int32(0) if me == config.consumers - 1 else int32(me + 1), elected)
        q_desc = describe_rows(base + me * (64 * 128))  # of the consumer's rows of Q
        taken = int32(0)  # number of key tiles before this one
        seen = int32(0)  # number of query tiles before this one
        block.clear(acc_s, s_count)
        if ping_pong and me == config.consumers - 1:
            bar.arrive(1, pair)  # the last consumer gives the first turn to the first one
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

            # The last P . V, and behind it the first S of the next query tile. O is written while that S is computed.
            # If there is no next query tile, nobody reads that S.
            seen = int32(seen + 1)
            rings.tiles.consumer_wait(base, seen)
            pingpong_wait(me)
            issue_outputs(base, acc_o, p_frag, int32(taken - 1))
            q_desc = describe_rows(base + rings.q.stage(seen) * q_bytes + me * (64 * 128))
            rings.q.consumer_wait(base, seen)
            rings.k.consumer_wait(base, taken)
            issue_scores(base, q_desc, acc_s, taken)
            pingpong_arrive(consumer.following)
            if config.parts == 1:
                outputs.load_sinks(distance, work_tile, arrays, strides)
            wait_but_one()
            pin_o(acc_o)
            rings.v.consumer_release(base, int32(taken - 1), elected)

            if config.parts > 1:
                leave_part(word(work_tile, PART), registers, arrays)
            else:
                outputs.write(work_tile, registers, arrays, strides, sizes, score)
            bar.warp_sync()  # all lanes have read the work tile
            rings.tiles.consumer_release(base, rows.seen, elected)
        wait_all()
        if ping_pong and me == 0:
            bar.sync(1, pair)  # takes the last turn, which nobody needs

    @cuda.jit
    def flash_attention_wgmma(tensor_maps, arrays, strides, sizes, score):
        base = block.aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        thread, warpgroup = special.thread_index(), block.warpgroup_index()
        if thread == 0:
            roles.set_up(base)
        cuda.syncthreads()
        if config.parts > 1:
            griddepcontrol.launch_dependents()  # forward_join.py
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
