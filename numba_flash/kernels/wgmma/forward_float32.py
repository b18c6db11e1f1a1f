"""FlashAttention-2 in float32 on Hopper's tensor cores (sm_90a): each product is a sum of wgmma products of bfloat16
parts.

Read forward.py first, which has the same roles, rows of a lane and work tiles, and parts.py for the products. wgmma has
no float32 operands, so the producer is a whole warpgroup here. It reads K and V from global memory, splits each number,
and writes three parts of 16 bits to shared memory. Consumers split their Q at the beginning of a query tile, and P in
registers.

Tiles in parts are large, so most have only one place in shared memory. While both consumers compute P . V, the producer
fills the place of K; while both compute S, that of V. By then it has read its next tile into registers.

Launch: grid (persistent blocks), block (config.threads), config.shared_bytes of dynamic shared memory. Rows of q, k and
v begin at multiples of 16 bytes and are contiguous along dim.
"""

from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from ...ptx import bar, fence, local, memory, special, wgmma
from ..score import fragment_softmax, reads, tile_walk
from ..steps.basics import FALSE, TRUE, inlined, nothing
from ..steps.sequence import key_row, make as make_sequence, queries as make_queries, query_row
from . import block, forward_outputs, operands, parts, pipeline, producer, tile_scores
from .block import BEGIN, CUT, FREE, H_KV, KEYS, MEMBERS, STATES, STOP, B, tile_of, word, word_alone
from .operands import describe_rows, wait_all, wait_but_one
from .tile_scores import ConsumerRegisters, KeyTile, ScoreRegisters

Q_ROWS = 32  # rows of a consumer's 64 that it splits at a time
FIRST, SECOND, THIRD, FOURTH = (np.int32(i) for i in range(4))  # not Python ints: see basics.py


# The sizes that determine the next query tile; the last two are of packed sequences.
Sizes = namedtuple("Sizes", "batch heads heads_kv seqlen_q seqlen_k left right q_offset total_q total_k")


def make(config):
    plan, group, tile_n = config.shared_layout(), config.group_size, config.tile_n
    q_panel, kv_panel = config.tile_m * 128, tile_n * 128  # bytes of a panel of a part
    k_panels, v_panels, v_columns = -(-config.head_dim_padded // 64), config.v_panels, config.v_columns
    k_part, v_part = kv_panel * k_panels, kv_panel * v_panels
    k_bytes, v_bytes = config.element_parts * k_part, config.element_parts * v_part
    s_count, o_count, p_count = tile_n // 2, config.head_dim_v_padded // 2, config.element_parts * tile_n // 4
    panel_count = v_columns // 2  # registers of a panel of O
    rescale = fragment_softmax.rescaler(1, config.head_dim_v_padded // 8)

    def of_q_k(panel):
        steps = range(min(4, config.head_dim_padded // 16 - 4 * panel))
        return parts.product_of_rows(tile_n, steps, (panel * q_panel, k_panels * q_panel), (panel * kv_panel, k_part))

    multiply_p_v = parts.product_of_registers(v_columns, tile_n, (0, v_part))
    multiply_0, multiply_1, multiply_2, multiply_3 = (of_q_k(min(panel, k_panels - 1)) for panel in range(4))
    describe_v = operands.describe_columns(tile_n)
    pin_s, pin_panel, pin_p = wgmma.pin(s_count), wgmma.pin(panel_count), wgmma.pin(p_count)
    give_registers, take_registers = block.register_moves(config)

    rings, sequence_of, queries_of = pipeline.of_forward(config), make_sequence(config), make_queries(config)
    set_up = pipeline.starter_of_forward(config, 4)  # the producer's warps
    work, packed = producer.query_tiles(config), config.packed
    q_loader = parts.loader(Q_ROWS, config.head_dim, 64, q_panel, q_panel * k_panels, group)
    k_loader = parts.loader(tile_n, config.head_dim, 64, kv_panel, k_part)
    v_loader = parts.loader(tile_n, config.head_dim_v, v_columns, kv_panel, v_part)
    raw_words = max(k_loader.words, v_loader.words)

    options, bias_type = tile_scores.make(config), reads.make(config, 1).bias_type
    mask_words, shown_words, kept_words, bias_words = options.words
    walk, producer_walk = tile_walk.make(config, whole_warp=True), tile_walk.make(config)
    start, softmax, finish = fragment_softmax.make(config, 1)
    to_p = parts.to_operand(tile_n)
    outputs = forward_outputs.make(config, finish)

    # The producer.

    @inlined
    def anew(sizes):
        """The same sizes, but unknown to the compiler. Otherwise it would compute numbers for the next query tile ahead
        of the loops and keep them in registers that the tiles need."""
        zero = int64(special.opaque(int32(0)))
        return Sizes(
            sizes.batch + zero, sizes.heads + zero, sizes.heads_kv + zero, sizes.seqlen_q + zero, sizes.seqlen_k + zero,
            sizes.left + zero, sizes.right + zero, sizes.q_offset + zero,
            (sizes.total_q if packed else zero) + zero, (sizes.total_k if packed else zero) + zero,
        )  # fmt: skip

    def loader(rows, ring, at, tile_bytes):
        @inlined
        def load(base, raw, two, array, of_array, work_tile, j, n, arrays, strides, sizes):
            """Writes the parts of key tile j, the block's n-th, of K or of V; zeros past the valid keys."""
            b, h_kv = word_alone(work_tile, B), word_alone(work_tile, H_KV)
            first = int32(j * tile_n)
            sequence = sequence_of(b, arrays, strides, sizes)
            source = memory.address(array, key_row(of_array, sequence, h_kv, int64(first)))
            rows_left = int32(word_alone(work_tile, KEYS) - first)
            rows.fetch(raw, source, 4 * of_array[2], int64(0), int32(0), rows_left, special.thread_index())
            ring.producer_acquire(base, n)
            rows.store(raw, base + at + ring.stage(n) * tile_bytes, two, special.thread_index())
            block.hand_over(ring.full(base, n))

        return load

    load_k, load_v = loader(k_loader, rings.k, plan.k, k_bytes), loader(v_loader, rings.v, plan.v, v_bytes)

    @inlined
    def produce(base, counter, arrays, strides, sizes):
        """The producer warpgroup: takes query tiles, and writes the parts of K and V in the order in which consumers
        need them."""
        raw = local.array(raw_words, uint32)
        two = local.array(2, uint32)
        n, i, t = int32(0), int32(0), int64(special.block_index())  # number of K and V tiles and query tiles so far
        thread = special.thread_index()
        if thread == 0 or (packed and thread < 32):
            work.publish(base, i, t, arrays, strides, sizes)
        rings.tiles.consumer_wait(base, i)
        work_tile = int32(rings.work_tile(base, i))
        while word_alone(work_tile, MEMBERS) != 0:
            begin, j = word_alone(work_tile, BEGIN), int32(word_alone(work_tile, STOP) - 1)
            states = word_alone(work_tile, STATES) if walk.present else int32(0)
            while j >= begin:
                load_k(base, raw, two, arrays.k, strides.k, work_tile, j, n, arrays, strides, sizes)
                load_v(base, raw, two, arrays.v, strides.v, work_tile, j, n, arrays, strides, sizes)
                n = int32(n + 1)
                j = int32(producer_walk.next_tile(states, j, begin, arrays, strides))
            i = int32(i + 1)
            if thread == 0 or (packed and thread < 32):
                t = work.following(t, counter)
                work.publish(base, i, t, arrays, strides, anew(sizes))
            rings.tiles.consumer_wait(base, i)
            work_tile = int32(rings.work_tile(base, i))
        if thread == 0 or (packed and thread < 32):
            work.reset(counter)

    # The consumers.

    @inlined
    def warpgroup_sync(me):
        bar.sync(me + 3, 128)

    @inlined
    def load_q(base, me, work_tile, arrays, strides, sizes):
        """Splits the warpgroup's 64 rows of Q into parts."""
        raw = local.array(q_loader.words, uint32)
        two = local.array(2, uint32)
        thread, tile = special.thread_index() & int32(127), tile_of(work_tile)
        sequence = queries_of(tile.b, arrays, strides, sizes)
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, config.queries))
        source = memory.address(arrays.q, query_row(strides.q, sequence, tile.h, int64(tile.first_query)))
        warpgroup_sync(me)  # the whole warpgroup has finished with the last ones
        for first_row in range(me * 64, me * 64 + 64, Q_ROWS):
            q_loader.fetch(raw, source, 4 * strides.q[2], 4 * strides.q[1], first_row, queries_left, thread)
            q_loader.store(raw, int32(base + first_row * 128), two, thread)
        fence.proxy_async()
        warpgroup_sync(me)

    @inlined
    def add_part(acc_s, part, present):
        if present:
            pin_s(part)
            for i in range(s_count):
                acc_s[i] += part[i]

    def panel_adder(panel):
        """-> add_panel(acc_o, acc), a device function: waits for that panel of P . V and adds it to acc_o. Only the
        next panel may still be computing."""
        wait = wait_but_one if panel < v_panels - 1 else wait_all
        first = panel * panel_count
        pin_o = wgmma.pin(panel_count, first)

        @inlined
        def add_panel(acc_o, acc):
            wait()
            pin_panel(acc)
            for x in range(panel_count):
                acc_o[first + x] += acc[x]
            pin_o(acc_o)  # the registers of acc are free

        return add_panel if panel < v_panels else nothing

    add_0, add_1, add_2, add_3 = (panel_adder(panel) for panel in range(4))

    @inlined
    def issue_panel(panel, acc, p_frag, v_desc):
        if panel < v_panels:
            multiply_p_v(acc, p_frag, v_desc + uint64(panel * (kv_panel >> 4)))
            wgmma.commit_group()

    @inlined
    def step(base, me, tile, registers, arrays, strides, sizes, score):
        """One KeyTile: S, softmax, O."""
        of_scores, acc_s, acc_o, p_frag = registers.scores, registers.scores.acc_s, registers.acc_o, registers.p_frag
        options.load(tile, of_scores, arrays, strides, sizes)

        # S: a product for each panel of columns, and their sum.
        part_1, part_2 = local.array(s_count, float32), local.array(s_count, float32)
        part_3 = local.array(s_count, float32)
        rings.k.consumer_wait(base, tile.n)
        q_desc = describe_rows(base + special.opaque(me * (64 * 128)))
        k_desc = describe_rows(base + plan.k + rings.k.stage(tile.n) * k_bytes)
        multiply_0(acc_s, q_desc, k_desc)
        if k_panels > 1:
            multiply_1(part_1, q_desc, k_desc)
        if k_panels > 2:
            multiply_2(part_2, q_desc, k_desc)
        if k_panels > 3:
            multiply_3(part_3, q_desc, k_desc)
        wgmma.commit_group()
        wait_all()
        pin_s(acc_s)
        add_part(acc_s, part_1, k_panels > 1)
        add_part(acc_s, part_2, k_panels > 2)
        add_part(acc_s, part_3, k_panels > 3)
        rings.k.consumer_release(base, tile.n, block.elected())

        options.find_bits(tile, of_scores, sizes)
        factor = options.finish(base, tile, of_scores, arrays, strides, sizes, score)
        moved = softmax(acc_s, registers.m, registers.l, registers.alpha, factor)
        options.find_kept(tile, registers.kept, arrays, sizes)
        options.drop(acc_s, registers.kept)
        to_p(acc_s, p_frag)
        rescale(acc_o, registers.alpha, moved)

        # O: one panel of P . V is added while the next is computed.
        even, odd = local.array(panel_count, float32), local.array(panel_count, float32)
        rings.v.consumer_wait(base, tile.n)
        v_desc = describe_v(base + plan.v + rings.v.stage(tile.n) * v_bytes)
        issue_panel(FIRST, even, p_frag, v_desc)
        issue_panel(SECOND, odd, p_frag, v_desc)
        add_0(acc_o, even)
        issue_panel(THIRD, even, p_frag, v_desc)
        add_1(acc_o, odd)
        issue_panel(FOURTH, odd, p_frag, v_desc)
        add_2(acc_o, even)
        add_3(acc_o, odd)
        pin_p(p_frag)  # pins the operands in their registers until here
        rings.v.consumer_release(base, tile.n, block.elected())

    @inlined
    def consume(base, me, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 rows of every query tile that the block takes."""
        acc_s, acc_o = local.array(s_count, float32), local.array(o_count, float32)
        p_frag, kept = local.array(p_count, uint32), local.array(kept_words, uint32)
        m, l, alpha = local.array(2, float32), local.array(2, float32), local.array(2, float32)
        terms, distance = local.array(2, float32), local.array(2, float32)
        loaded, mask_bits = local.array(bias_words, bias_type), local.array(mask_words, uint32)
        scores = ScoreRegisters(acc_s, loaded, mask_bits, local.array(shown_words, uint32), terms, distance)
        registers = ConsumerRegisters(scores, acc_o, p_frag, m, l, alpha, kept)
        n, i = int32(0), int32(0)  # number of key tiles, and of query tiles, so far
        rings.tiles.consumer_wait(base, i)
        work_tile = int32(rings.work_tile(base, i))
        while word(work_tile, MEMBERS) != 0:
            begin, free = word(work_tile, BEGIN), word(work_tile, FREE)
            cut, j = word(work_tile, CUT), int32(word(work_tile, STOP) - 1)
            states = word(work_tile, STATES) if walk.present else int32(0)
            load_q(base, me, work_tile, arrays, strides, sizes)
            start(registers.m, registers.l)
            block.clear(acc_o, o_count)
            options.begin(scores, work_tile, arrays, strides)
            while j >= begin:
                # Key tiles that some row sees only in part; then those that every row sees whole; then, with a left
                # window, again some that are seen in part.
                while j >= begin and (j >= cut or j < free):
                    tile = KeyTile(j, n, work_tile, FALSE, TRUE, walk.needs_mask(states, j, arrays, strides))
                    step(base, me, tile, registers, arrays, strides, sizes, score)
                    n = int32(n + 1)
                    j = int32(walk.next_tile(states, j, begin, arrays, strides))
                while j >= free and j < cut:
                    tile = KeyTile(j, n, work_tile, TRUE, FALSE, walk.needs_mask(states, j, arrays, strides))
                    step(base, me, tile, registers, arrays, strides, sizes, score)
                    n = int32(n + 1)
                    j = int32(walk.next_tile(states, j, begin, arrays, strides))
            outputs.load_sinks(distance, work_tile, arrays, strides)
            outputs.write(work_tile, registers, arrays, strides, sizes, score)
            bar.warp_sync()  # all lanes have read the work tile
            rings.tiles.consumer_release(base, i, block.elected())
            i = int32(i + 1)
            rings.tiles.consumer_wait(base, i)
            work_tile = int32(rings.work_tile(base, i))

    @cuda.jit
    def flash_attention_wgmma_float32(arrays, strides, sizes, score):
        base = block.aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        thread, warpgroup = special.thread_index(), block.warpgroup_index()
        if thread == 0:
            set_up(base)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            produce(base, memory.address(arrays.counters, 0), arrays, strides, sizes)
        else:
            take_registers()
            consume(base, int32(warpgroup - 1), arrays, strides, sizes, score)

    return flash_attention_wgmma_float32
