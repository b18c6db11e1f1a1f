"""Attention over caches on tensor cores: few queries, many keys, as memory delivers them. FlashAttention-2 as in
forward.py, with the loops the other way around: the rows of a block stay, and the keys of a sequence are shared out.

The queries of all heads of a KV head are rows of one tile, so K and V are read once. Four warps take 16 keys each of
every 64, with a running m, l and O of their own, and every 256 keys begin anew: what the four have found then is a leaf
of a binary tree over the keys of the sequence (decode_nodes.py), which alone decides about a row's bits. A block takes
the leaves below one node of the tree (decode_work.py), and hands the node over in memory, unless there is no other. The
last block to arrive for a row tile joins its nodes and writes O (decode_rows.py). So one launch is enough.

cp.async fills a ring of tiles ahead of the products. Where rows lie is looked up a tile before that (decode_tiles.py).

Letters as in forward.py. Launch: grid (config.blocks or fewer), block (config.threads). A counter of each row tile that
several blocks share is 0 before a launch and behind it.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint8, uint32

from ...config.forward import tile_bytes
from ...ptx import cp_async, ld_st, local, memory, shared, special
from ..recompute import rows as recompute
from ..score import fragment_functions, fragment_softmax, fragments, kept_weights, reads as score_reads
from ..steps import async_tiles, numbers
from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined, row_keys
from ..steps.units import LOG2_E
from . import decode_nodes, decode_prefixes, decode_rows, decode_tiles, decode_work
from .forward import PRODUCTS, Registers


class Tile(NamedTuple):
    """The rows of a block and the tiles [begin, end) of keys that it takes; first_key to end_key are read."""

    sequence: Any
    h_kv: int
    h: int  # the first head of the group
    first_row: int
    rows_left: int
    first_key: int
    end_key: int
    begin: int
    end: int
    pages: int  # where the sequence's page numbers begin (decode_tiles.py)


class Places(NamedTuple):
    """Shared memory, and the lane's places in the tiles of Q, K and V, the latter in the first stage."""

    ring: int
    rows: int
    states: int
    q_lane: int
    k_lane: int
    v_lane: int


def make(config):
    scores, plan, tile_n, warp_rows = config.scores, config.shared_layout(), config.tile_n, config.warp_rows
    strips, rows, group, key_warps = warp_rows // 16, config.lane_rows, config.group_size, config.key_warps
    tile_rows = 2 * strips  # those of a lane in products; it has `rows` of them
    o_count, s_count = strips * config.head_dim_v_padded // 2, strips * (tile_n // 8) * 4
    stages, stage_bytes, keys, in_chunk = config.stages, config.stage_bytes, config.keys, config.CHUNK // config.keys
    of_warp_k, of_warp_v = (
        tile_bytes(tile_n, columns, config.item_size) for columns in (config.head_dim_padded, config.head_dim_v_padded)
    )
    work, products, shares = decode_work.make(config), PRODUCTS[config.dtype].make(config), config.members > 1
    real = numbers.of(config.compute_dtype).real
    tiles = decode_tiles.make(config, work.sequence_of)
    arrive, slots_of = decode_prefixes.arrivals(config, work.member_of)
    nodes, write_rows = decode_nodes.of_chunks(config), decode_rows.make(config)
    recompute_rows = recompute.of_cache(config)
    node_count, in_registers = config.node_numbers, config.pair_registers
    _, carry = decode_nodes.joins(config.compute_dtype, nodes.count, rows, config.shared_stack, in_registers)
    on_fragments, row_term = fragments.tile(scores, strips), fragments.chain(scores).row_term
    read, has_mask = score_reads.make(scores, strips), config.has("mask")
    functions, kept_weight = fragment_functions.make(scores, strips), kept_weights.on_fragments(scores, strips, tile_n)
    start, softmax, _ = fragment_softmax.make(scores, strips, rows)
    wait_all, wait_oldest = cp_async.wait_group(0), cp_async.wait_group(stages - 2)
    log2_e, first_stack = real(LOG2_E), 2 * config.blocks * config.slot_numbers
    level_step, chunk_bits = config.node_numbers * config.threads, in_chunk.bit_length() - 1

    @inlined
    def tile_of(item, level, arrays, strides, sizes):
        """-> the Tile of an Item."""
        sequence = work.sequence_of(int64(item.b), arrays, strides, sizes)
        first_row, all_rows = int32(item.row_tile * config.tile_m), int32(sequence.seqlen_q) * group
        if shares and item.members > 0:
            all_rows = int32(item.members * (config.tile_m // config.members))
        rows_left = int32(min(all_rows - first_row, config.tile_m))
        first_query = int32(uint32(first_row) // uint32(group))
        last_query = int32(uint32(first_row + rows_left - 1) // uint32(group))
        first_key, _ = row_keys(sequence.q_start + first_query, sizes.left, sizes.right, sequence.keys)
        _, end_key = row_keys(sequence.q_start + last_query, sizes.left, sizes.right, sequence.keys)
        if shares and item.members > 0:
            first_key, end_key = int64(0), (int64(item.shared) << int64(level + chunk_bits)) * keys
        begin = max(int32(item.node << (level + chunk_bits)), int32(first_key // keys))
        end = min(int32((item.node + 1) << (level + chunk_bits)), int32((end_key + keys - 1) // keys))
        if end_key <= first_key:
            end = begin
        return Tile(
            sequence, item.h_kv, int32(item.h_kv * group), first_row, rows_left, int32(first_key), int32(end_key),
            begin, end, tiles.pages_of(sequence, arrays, strides),
        )  # fmt: skip

    rescale = fragment_softmax.rescaler(strips, config.head_dim_v_padded // 8, rows)

    @inlined
    def scores_of(j, registers, tile, row, lane, arrays, strides, sizes, score):
        """S of the warp's keys, the j-th tile_n of them, finished and masked."""
        sequence, mask_bits, distance = tile.sequence, registers.mask_bits, registers.distance
        if read.reads:
            origin = read.origin(sequence.b, tile.h, int32(0), arrays, strides)
            read.load(registers.loaded, registers.shown_bits, j, origin, row, lane, arrays, strides, sizes, FALSE)
        on_fragments.visible(
            j, row, lane, sequence.q_start, sizes.left, sizes.right, int32(sequence.keys), mask_bits, distance
        )
        if has_mask:
            read.hide(mask_bits, registers.shown_bits, TRUE)
        if functions.present:
            place = functions.place_of(
                j, sequence.b, tile.h, row, lane, int32(0), sequence.q_start, int32(sequence.seqlen_q)
            )
            functions.apply(registers.acc_s, mask_bits, place, TRUE, arrays, strides, score)
        if config.scores_finished:
            on_fragments.finish(registers.acc_s, registers.term, distance, registers.loaded, score)
        on_fragments.mask(registers.acc_s, mask_bits)

    @inlined
    def step(j, stage, registers, places, tile, row, lane, key_warp, arrays, strides, sizes, score):
        """The warp's keys of tile j: S, softmax, O."""
        at, own = int32(stage * stage_bytes), int32(j * key_warps + key_warp)
        products.multiply_q_k(
            registers.acc_s, registers.q_frag, registers.kv_frag, places.q_lane, int32(places.k_lane + at), int32(0)
        )
        scores_of(own, registers, tile, row, lane, arrays, strides, sizes, score)
        acc_s, m, l, alpha = registers.acc_s, registers.m, registers.l, registers.alpha
        moved = softmax(acc_s, m, l, alpha, score.scale * log2_e)
        if kept_weight.present:
            first_row, first_key = row + int32(first_row_of(lane)), int32(own * tile_n + first_column_of(lane))
            sequence = tile.sequence
            kept_weight.of_queries(
                registers.kept, first_key, sequence.b, tile.h, first_row, sequence.q_start, arrays, sizes
            )
            kept_weight.drop(registers.acc_s, registers.kept)
        if rows < tile_rows:  # the weights of rows that are none are 0
            for n in range(tile_n // 8):
                acc_s[4 * n + 2], acc_s[4 * n + 3] = real(0), real(0)
        products.to_p(registers.acc_s, registers.p_frag)
        rescale(registers.acc_o, registers.alpha, moved)
        products.multiply_p_v(registers.acc_o, registers.p_frag, registers.kv_frag, int32(places.v_lane + at))

    @inlined
    def begin_chunk(registers):
        start(registers.m, registers.l)
        for i in range(o_count):
            registers.acc_o[i] = real(0)

    @inlined
    def walk(tile, slot, registers, node, places, stack, own, arrays, strides, sizes, score):
        """Hands over the node of all keys of the tile. Their first copies and places are under way."""
        lane, key_warp, row_warp = own
        row = int32(tile.first_row + row_warp * warp_rows)
        j, stage, waiting, there = tile.begin, int32(0), int32(0), int32(0)
        for r in range(rows):
            exists = row_warp * warp_rows + int32(first_row_of(lane)) + r * 8 < tile.rows_left
            there |= int32(1 << r) if exists else int32(0)
        begin_chunk(registers)
        if j >= tile.end:
            for e in range(node_count):
                node[e] = real(0)
            nodes.put(node, slot, tile.rows_left, lane, key_warp, row_warp, arrays)
        while j < tile.end:
            wait_oldest()
            cuda.syncthreads()  # tile j is there, and everyone is done with the one before
            if config.q_registers:
                if j == tile.begin:
                    products.load_q(registers.q_frag, places.q_lane)
            ahead = int32(stage + (stages - 1)) if stage == 0 else int32(stage - 1)
            if j + (stages - 1) < tile.end:
                tiles.load_keys(places.ring, places.rows, ahead)
            cp_async.commit_group()
            entry, page_row = tiles.look_up(j + stages, tile, arrays, strides, sizes)
            if not shares or row_warp * warp_rows < tile.rows_left:  # a sequence's own rows are few, a tile's of all
                step(j, stage, registers, places, tile, row, lane, key_warp, arrays, strides, sizes, score)
            tiles.put_place(places.rows, stage, entry, page_row, tile, arrays, strides, sizes)
            last = j + 1 == tile.end
            if (j & (in_chunk - 1)) == in_chunk - 1 or last:
                exchange = int32(places.ring + stage * stage_bytes)
                nodes.join_warps(
                    registers.acc_o, registers.m, registers.l, node, registers.alpha, places.states,
                    exchange, lane, key_warp, row_warp,
                )  # fmt: skip
                waiting = carry(node, j >> chunk_bits, last, waiting, there, stack, arrays)
                if last:  # here, so that no node is kept in registers through the loop
                    nodes.put(node, slot, tile.rows_left, lane, key_warp, row_warp, arrays)
                begin_chunk(registers)
            j, stage = int32(j + 1), int32(0 if stage == stages - 1 else stage + 1)

    @inlined
    def begin_tile(tile, q_smem, places, thread, arrays, strides, sizes):
        """Starts the copies of the first tiles of keys and of Q: the most bytes first."""
        entries, page_rows = local.array(stages, uint32), local.array(stages, int32)
        for stage in range(stages):
            entries[stage], page_rows[stage] = tiles.look_up(tile.begin + stage, tile, arrays, strides, sizes)
        for stage in range(stages - 1):
            tiles.put_place(places.rows, int32(stage), entries[stage], page_rows[stage], tile, arrays, strides, sizes)
        cuda.syncthreads()
        for stage in range(stages - 1):
            if tile.begin + stage < tile.end:
                tiles.load_keys(places.ring, places.rows, int32(stage))
            if stage == 0:
                tiles.load_q(
                    q_smem, tile.sequence, tile.h, tile.first_row, tile.rows_left, thread, arrays, strides, sizes
                )
            cp_async.commit_group()
        stage = stages - 1
        tiles.put_place(places.rows, int32(stage), entries[stage], page_rows[stage], tile, arrays, strides, sizes)

    @inlined
    def is_last(item, last_smem, thread, arrays):
        """Whether this block handed over the last node of its row tile: all others are there."""
        cuda.syncthreads()
        if thread == 0:
            counter = memory.address(arrays.counters, int64(item.node_slot))
            arrived = memory.add_acq_rel(counter, uint32(1))
            if arrived == uint32(item.nodes - 1):
                memory.exchange(counter, uint32(0))
            ld_st.store_b32(last_smem, arrived)
        cuda.syncthreads()
        return ld_st.load_b32(last_smem) == uint32(item.nodes - 1)

    @inlined
    def finish(item, own, tile, flags, stack_at, thread, warp, lane, arrays, strides, sizes, score):
        """Writes the rows of O of an Item, whose nodes are in memory; own: the slot of its only one."""
        for row in range(thread, config.tile_m, config.threads):
            ld_st.store_b32(int32(flags + row * config.ROW_STATE_BYTES), uint32(0))
        cuda.syncthreads()
        slot, of_prefix = slots_of(item, arrays, sizes)
        slot = slot if item.nodes > 1 else own
        write_rows(item, slot, of_prefix, tile, flags, stack_at, thread, arrays, strides, sizes, score)
        cuda.syncthreads()
        recompute_rows(
            flags, tile.sequence, tile.h_kv, tile.first_row, tile.rows_left, warp, lane, arrays, strides, sizes, score
        )

    @cuda.jit
    def flash_attention_decode(arrays, strides, sizes, score):
        thread, block = special.thread_index(), special.block_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        key_warp, row_warp = warp & int32(key_warps - 1), warp // int32(key_warps)
        smem = cuda.shared.array(0, uint8)
        q_smem = async_tiles.aligned(shared.address(smem))  # (tile_m, head_dim_padded)
        ring = q_smem + int32(plan.ring)  # (stages, key_warps, tile_n, head_dim_padded and head_dim_v_padded)
        flags, last_smem = int32(q_smem + plan.flags), int32(q_smem + plan.last)
        k_smem, v_smem = ring + key_warp * of_warp_k, ring + tiles.v_at + key_warp * of_warp_v
        q_lane, k_lane, v_lane, _ = products.lanes(lane, row_warp, q_smem, k_smem, v_smem)
        places = Places(
            ring, int32(q_smem + plan.places), int32(q_smem + plan.states), int32(q_lane), int32(k_lane), int32(v_lane)
        )
        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, tile_n / 8, 4)
            local.array(o_count, real),  # acc_o (strips, head_dim_v_padded / 8, 4)
            local.array(products.p_count, products.register),
            local.array(products.q_count, products.register),
            local.array(products.kv_count, products.register),
            local.array(read.bias_words, read.bias_type),
            local.array(rows, real),
            local.array(rows, real),
            local.array(rows, real),
            local.array(tile_rows, real),
            local.array(tile_rows, real),
            local.array(on_fragments.mask_words, uint32),
            local.array(read.bits_words, uint32),
            None,  # the query of a row follows from its number
            local.array(kept_weight.words, uint32),
        )
        node = local.array(node_count, real)  # of decode_nodes.py
        stack_at = int64(first_stack) + (int64(block) * sizes.levels) * level_step + thread
        if shares:  # behind a slot of each sequence, and what is noted there
            stack_at += sizes.batch * sizes.heads_kv * (config.slot_numbers + 2)
        pair_registers = local.array(node_count if in_registers else 1, real)
        row = row_warp * warp_rows + int32(first_row_of(lane))
        first = int32(q_smem + plan.stack + (key_warp * config.stack_rows + row) * 16 + (lane & 3) * 4)
        stack = decode_nodes.Stack(pair_registers, first, stack_at, level_step, config.threads)
        level, number = work.level_of(lane, arrays, strides, sizes), int32(block)
        cursor = decode_work.Cursor(int32(0), int32(0), int32(0))
        item, cursor = work.next_item(cursor, number, level, lane, arrays, strides, sizes)
        while item.b >= 0:
            tile = tile_of(item, level, arrays, strides, sizes)
            for r in range(tile_rows):
                row = uint32(tile.first_row + row_warp * warp_rows + int32(first_row_of(lane)) + r * 8)
                registers.term[r] = row_term(tile.sequence.b, int32(tile.h + row % uint32(group)), arrays, strides)
            begin_tile(tile, q_smem, places, thread, arrays, strides, sizes)
            number = int32(number + special.block_count())
            following, cursor = work.next_item(cursor, number, level, lane, arrays, strides, sizes)
            own, joined = int32(config.blocks + block), item.nodes > 1
            if shares:
                joined = joined or item.members > 0
            slot = int32(item.node_slot + item.node - item.first_node) if joined else own
            walk(tile, slot, registers, node, places, stack, (lane, key_warp, row_warp), arrays, strides, sizes, score)
            if shares:
                arrive(item, level, last_smem, thread, arrays, strides, sizes)
                for m in range(max(item.members, int32(1))):
                    if ld_st.load_b32(int32(last_smem + m * 4)) != 0:
                        whose = work.member_of(item, int32(m), level, arrays, strides, sizes)
                        its_tile = tile_of(whose, level, arrays, strides, sizes)
                        finish(whose, own, its_tile, flags, stack_at, thread, warp, lane, arrays, strides, sizes, score)
                        cuda.syncthreads()
            elif not joined or is_last(item, last_smem, thread, arrays):
                finish(item, own, tile, flags, stack_at, thread, warp, lane, arrays, strides, sizes, score)
            wait_all()
            cuda.syncthreads()  # everyone is done with shared memory
            item = following

    return flash_attention_decode
