"""dQ, dK and dV in one kernel for Hopper (sm_90a): five products instead of the seven that two kernels compute.

Read wgmma/backward first. A block owns a tile of keys of one KV head, loops over the tiles of queries that see it,
and holds the sums of dK and dV in registers. Here it uses dS for dQ, too:

    dQ += dS K     where dS^T goes through shared memory and is transposed on its way

Each key tile contributes a part to dQ. Bulk copies add up the parts in float32 in global memory, in a fixed order
(kernels/steps/dq_order.py): a counter for each query tile holds the number of parts added so far, and a block waits for
its turn. The first part is stored instead of added, so no memory has to be set to zero. A query tile has
config.dq_partials sums, to which its parts go in rotation; wgmma/backward_round adds them up, scales and rounds. With
config.key_tiles a block has all keys of a head, and its consumers add up the parts themselves (backward_dq_sums).

Roles. Two threads load tiles, as in wgmma/backward. Two more threads, one for each consumer warpgroup, add the
parts of dQ: they wait for the turn, so that no consumer has to. If all keys of a packed sequence are one tile, their
warps write dQ (backward_dq_alone). A consumer warpgroup owns 64 keys for S, dP, dV and dK.
It computes half of the columns of dQ, or half of the rows of a tile of 128 queries, from the dS of both warpgroups. S
of the next tile and dQ of this one are issued after dV and dK, and dP when half of the next exponentials are done:

    S(0)   P(n) dP(n) P(n)   dS(n)   dV(n) dK(n) S(n+1) dQ(n)   P(n+1) ...

Where weights are dropped, those of the next tile are found during its S and this tile's dQ, and so are the bits of a
mask. The single kernel and the adding role are those of FlashAttention-3 (Shah et al., 2024).

With config.stays a block processes one tile of keys after another (backward_block_tiles). The first Q, K and V of the
next tile arrive while consumers write dK and dV of this one.

The previous kernel may still run when a block starts (ptx/griddepcontrol.py). It writes lse, delta and the ticket, so
all threads wait for it before the block takes its ticket. With config.key_tiles no block takes one: K, V, dO and the
first Q are already being loaded when the producer waits. Consumers wait before they do anything else.

Launch: grid (batch * heads_kv * parts of a group * key tiles); with config.key_tiles without the last factor, and with
config.stays any smaller grid; block (config.threads), config.shared_bytes of dynamic shared memory; tensor maps of q,
k, v and do; turns (zeros): the ticket, and from TURNS_AT on the counters, (batch * heads, query tiles, lines, 2);
dq_sums (batch * heads, query tiles, lines, 2, chunks of 8 columns, 128, 4); dk, dv, dk_sums and dv_sums as in
wgmma/backward. With config.key_tiles there are no turns and dq_sums, but dq, which is contiguous.

Six files have the rest besides forward.py's block.py and pipeline.py, in this order: backward_block_tiles.py (which key
tiles a block processes), backward_work.py (which query tiles it loops over), backward_producer.py (loads),
backward_products.py, backward_scores.py (P and dS), backward_dq_sums.py (parts of dQ).
"""

from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import bar, fence, griddepcontrol, ld_st, local, special, stmatrix, wgmma
from ..score import fragments, kept_weights, reads
from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined
from ..steps.units import LOG2_E
from . import (
    backward_block_tiles,
    backward_dq_alone,
    backward_dq_sums,
    backward_outputs,
    backward_producer,
    backward_products,
    backward_scores,
    backward_work,
    block,
    operands,
    pipeline,
)
from .backward_scores import TileFragments
from .block import CUT, FIRST_ROW, FREE, KEYS, aligned, rows_of_lane, warpgroup_index
from .operands import describe_rows, wait_all, wait_but_one, wait_but_two


class Consumer(NamedTuple):
    """A consumer warpgroup."""

    me: int
    elected: bool  # whether this lane acts for its warp
    k_desc: int  # wgmma's descriptors of its rows of K and V
    v_desc: int


class QueryStep(NamedTuple):
    """A query tile in the loop of a consumer."""

    n: int  # its number among all that the block loads
    before: int  # that of the first one of this key tile
    i: int
    member: int  # index of the head in its group
    masked: bool  # whether some key is not seen by some query


def make(config):
    tile_m, tile_n = config.tile_m, config.tile_n
    head_dim_padded, plan = config.head_dim_padded, config.shared_layout()
    s_count, frag_count = tile_m // 2, tile_m // 4
    dk_count, dv_count, dq_columns = head_dim_padded // 2, config.head_dim_v_padded // 2, 64
    dq_count, part_bytes, ds_bytes = dq_columns // 2, config.dq_part_bytes, config.ds_bytes
    second_chunks = backward_dq_sums.second_part(config) // (64 * 8 * 4)  # of 8 columns
    all_keys, stays, one_panel = config.key_tiles > 0, config.stays, config.dq_panels == 1
    packed = config.packed
    # tiles that no query sees; a block with one tile loads a Q past the end
    some_lack_q = stays and (packed or not all_keys)
    dq_alone, all_consumers = backward_dq_alone.present(config), 128 * config.consumers
    padded = packed or config.has("seqlens_k")
    zero_tail = block.tail_zeroer(config, head_dim_padded, 3)
    zero_tail_of_v = block.tail_zeroer(config, config.head_dim_v_padded, 3)

    # dQ = dS K: dS lies in a panel of 64 keys for each warpgroup that wrote it, K as it came.
    ds_panel, k_panel = tile_m * 128, tile_n * 128
    ds_steps, k_steps = operands.column_steps(tile_m, tile_n), operands.row_steps(tile_n)
    multiply_ds_k = wgmma.product_shared(dq_columns, operands.kind(config), ds_steps, k_steps, 1)
    # How far apart the warpgroups' parts are: by columns of K, or by rows of dS.
    own_columns, own_queries = (k_panel, 0) if config.dq_panels == 2 else (0, 64 * 128)
    describe_columns = operands.describe_columns(tile_n)
    pin_s, pin_dk, pin_dv, pin_dq = wgmma.pin(s_count), wgmma.pin(dk_count), wgmma.pin(dv_count), wgmma.pin(dq_count)

    give_registers, take_registers = block.register_moves(config)

    products, write_gradients = backward_products.make(config), backward_outputs.of_keys(config)
    count, mask_words = kept_weights.on_fragments(config, 1, tile_m), fragments.tile(config, 1, tile_m).mask_words
    tiles = backward_block_tiles.make(config)
    scores, producer = backward_scores.make(config), backward_producer.of_keys(config)
    to_some_weights, to_other_weights = (
        scores.weights_of(0, tile_m // 32),
        scores.weights_of(tile_m // 32, tile_m // 16),
    )
    find_visible = block.visibility(config, config.other_rows, block.state_of(config))
    read = reads.make(config, 1, tile_m, of_keys=True)
    walk = backward_work.query_walk(config, whole_warp=True)
    state, set_up = block.state_of(config), pipeline.starter_of_backward(config)
    word, add_dq = state.read, backward_dq_sums.to_sums(config, tiles)
    leave_own_dq, repair_dq = backward_dq_sums.of_all_keys(config) if all_keys else (None, None)
    rings = pipeline.of_backward(config)
    zero_behind, boxed = backward_products.zero_behind(config), config.bias_in_ds

    @inlined
    def find_bits(own, i, member, tile, arrays, strides, sizes):
        """tile <- which of the lane's weights of query tile i count, and which scores the mask leaves."""
        first_row, lane = rows_of_lane()
        first_key, h = word(own, FIRST_ROW), int32(word(own, block.H) + member)
        if count.present:
            first_q_pos = int64(i) * tile_m + first_column_of(lane) + first_key - state.position(own)
            key = int32(first_key + first_row + first_row_of(lane))
            count.of_keys(tile.kept, first_q_pos, word(own, block.B), h, key, arrays, sizes)
        if read.reads:
            origin = read.origin(word(own, block.B), h, first_key, arrays, strides)
            read.load_bits(tile.shown_bits, i, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def fetch(base, arrays, strides, sizes):
        """One thread loads K, V and Q of one tile after the other."""
        w, n = int32(0), int32(0)
        while tiles.next_tile(base, w, arrays, strides, sizes):
            n = producer.load_q(base, tiles.state_of(base, w), n, w, arrays, strides, sizes)
            w = int32(w + 1)
        if not stays:
            producer.load_no_q(base, n, sizes)

    @inlined
    def fetch_do(base, arrays, strides):
        """Another thread loads dO."""
        w, n = int32(0), int32(0)
        while tiles.has_tile(base, w):
            n = producer.load_do(base, tiles.state_of(base, w), n, arrays, strides)
            tiles.leave(base, w)
            w = int32(w + 1)

    @inlined
    def store_ds(base, ds_frag, n):
        """Stores the warpgroup's dS^T (64, m) in its panel of dS (m, n): rows of it become columns."""
        first_row, lane = rows_of_lane()
        row, chunk = lane & 7, (first_row >> 3) + ((lane >> 3) & 1)  # of 8 keys
        own = base + plan.ds + (n & 1) * ds_bytes + (chunk >> 3) * ds_panel
        place = own + (row + ((lane >> 4) << 3)) * 128 + (((chunk & 7) ^ row) << 4)
        for pair in range(tile_m // 16):
            stmatrix.x4_trans(place + pair * (16 * 128), ds_frag, 4 * pair)
        fence.proxy_async()
        rings.ds.producer_commit(base, n, True)

    @inlined
    def issue_dq(base, acc_dq, me, n):
        """Issues the warpgroup's part of dQ of the n-th query tile, once both warpgroups have stored their dS."""
        rings.ds.consumer_wait(base, n)
        ds_desc = describe_rows(base + plan.ds + (n & 1) * ds_bytes + me * own_queries)
        multiply_ds_k(acc_dq, ds_desc, describe_columns(base + plan.own_a + me * own_columns), 0)
        wgmma.commit_group()

    @inlined
    def store_dq(base, own, acc_dq, me, n, before, arrays, strides, sizes, score):
        """Stores dQ where add_dq takes it from, as it lies in registers."""
        four = local.array(4, uint32)
        rings.dq.producer_acquire(base + 8 * me, n)
        place = base + plan.dq + (rings.dq.stage(n) * 2 + me) * part_bytes + (special.thread_index() & int32(127)) * 16
        for chunk in range(dq_columns // 8):
            for x in range(4):
                four[x] = acc_dq[4 * chunk + x].view(np.uint32)
            if chunk < second_chunks or me == 0:
                ld_st.store_v4(place + chunk * (128 * 16), four, 0)
        fence.proxy_async()
        rings.dq.producer_commit(base + 8 * me, n, True)

    # Takes the warpgroup's part of dQ of query tile n. The first `before` belong to the block's other key tiles.
    leave_dq = leave_own_dq if all_keys else store_dq

    @inlined
    def to_ds(base, own, consumer, step, tile, arrays, strides, sizes, score):
        """Computes P and dS of a query tile, whose S is there. dP runs beside P, once dQ of the tile before has left
        its registers."""
        n, lse_and_delta, every = step.n, products.lse_and_delta_at(base, step.n), not step.masked
        if config.seeded:
            for x in range(mask_words):  # otherwise the last tile's bits would stay in registers
                tile.mask_bits[x] = uint32(0)
        if step.masked:
            find_visible(own, step.i, sizes, tile.mask_bits, tile.distance)
            read.hide(tile.mask_bits, tile.shown_bits, TRUE)
        bias = base + plan.ds + (n & 1) * ds_bytes
        if boxed:  # it comes with dO, to where this tile's dS will be; each warp reads and writes the same places
            rings.b.consumer_wait(base, n)
        place = lse_and_delta, bias, float32(0), every
        to_some_weights(own, step, tile, *place, arrays, strides, sizes, score)
        wait_all()
        pin_dq(tile.acc_dp)
        if boxed and n > step.before:
            rings.b.consumer_release(base, int32(n - 1), consumer.elected)
        if n > step.before:
            leave_dq(base, own, tile.acc_dp, consumer.me, int32(n - 1), step.before, arrays, strides, sizes, score)
        products.preload_dp(base, tile.acc_dp, n)
        rings.b.consumer_wait(base, n)
        if packed and step.masked:  # so is a tile with rows behind the last query
            zero_behind(base, own, step)
        products.issue_dp(base, tile.acc_dp, consumer.v_desc, n)
        to_other_weights(own, step, tile, *place, arrays, strides, sizes, score)
        wait_all()
        pin_s(tile.acc_dp)
        scores.to_gradients(tile, lse_and_delta, score, every)
        store_ds(base, tile.ds_frag, n)

    @inlined
    def add_products(base, consumer, n, last, tile, acc_dk, acc_dv, lse_factor):
        """Issues dV and dK of the n-th query tile, behind them S of the next one, and then dQ of this one."""
        ahead = n if last else int32(n + 1)
        products.preload_s(base, tile.acc_s, ahead, lse_factor)
        products.issue_b(base, acc_dv, tile.p_frag, n)
        products.issue_a(base, acc_dk, tile.ds_frag, n)
        products.issue_s(base, tile.acc_s, consumer.k_desc, ahead, last)
        wait_but_two()
        pin_dv(acc_dv)
        if not boxed:
            rings.b.consumer_release(base, n, consumer.elected)
        wait_but_one()
        pin_dk(acc_dk)
        products.release_a(base, n, consumer.elected)
        issue_dq(base, tile.acc_dp, consumer.me, n)  # not before, since its sums take the registers of P and dS

    @inlined
    def finish_keys(own, steps, acc_dk, acc_dv, arrays, strides, sizes, score):
        """Writes dK and dV of the key tile; steps: how many query tiles it has met."""
        write_gradients(own, acc_dk, acc_dv, arrays, strides, sizes, score)
        if all_keys and word(own, FIRST_ROW) == 0:  # this is the last key tile
            bar.sync(3, all_consumers)  # all of dQ is written
            repair_dq(own, steps, arrays, strides, sizes, score)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 of the block's keys."""
        acc_s, acc_dp = local.array(s_count, float32), local.array(s_count, float32)
        acc_dk = local.array(dk_count, float32)  # (head_dim_padded / 8, 4)
        acc_dv = local.array(dv_count, float32)  # (head_dim_v_padded / 8, 4)
        acc_dq = acc_dp  # (dq_columns / 8, 4): dP is no longer needed where dQ begins; ptxas does not notice
        p_frag, ds_frag = local.array(frag_count, uint32), local.array(frag_count, uint32)
        mask_bits = local.array(mask_words, uint32)
        kept, distance = local.array(count.words, uint32), local.array(2, float32)
        shown = local.array(read.bits_words, uint32)
        tile = TileFragments(acc_s, acc_dp, p_frag, ds_frag, mask_bits, shown, kept, mask_bits, distance)
        me, elected = int32(warpgroup - 1), block.elected()  # me: which of the consumers
        k_desc = describe_rows(base + plan.own_a + me * (64 * 128))
        consumer = Consumer(me, elected, k_desc, describe_rows(base + plan.own_b + me * (64 * 128)))
        # With two panels they are zeroed for each tile, so that they do not live while dK and dV are written. Otherwise
        # ptxas spills 32 bytes. With one panel it would spill 212 bytes if they were zeroed for each tile.
        if one_panel:
            block.clear(acc_s, s_count)
            block.clear(acc_dp, s_count)
        block.clear(mask_bits, mask_words)
        block.clear(distance, 2)
        lse_factor = float32(-1) / (score.scale * float32(LOG2_E)) if config.lse_first else float32(0)

        w, n = int32(0), int32(0)
        while tiles.warp_has_tile(base, w):
            own = tiles.state_of(base, w)
            before = n  # tiles of queries that other key tiles have met
            end = int32(n + walk.steps(own))
            if not one_panel:
                block.clear(acc_s, s_count)
                block.clear(acc_dp, s_count)
            block.clear(acc_dk, dk_count)
            block.clear(acc_dv, dv_count)
            i, member = walk.first(own, arrays, strides)
            rings.own.consumer_wait(base, w)
            if padded:
                keys_left = max(int32(word(own, KEYS) - word(own, FIRST_ROW)), int32(0))
                if n < end and keys_left < tile_n:
                    zero_tail(base + plan.own_a, keys_left)
                    if packed:  # V may not be finite there. It would reach dQ, which is then computed again
                        zero_tail_of_v(base + plan.own_b, keys_left)
            # Otherwise ptxas copies these zeros from the accumulators of S while S is computed.
            pin_s(acc_s)
            pin_s(acc_dp)
            pin_dk(acc_dk)
            pin_dv(acc_dv)
            masked = False
            if n < end or not some_lack_q:
                products.preload_s(base, acc_s, n, lse_factor)
                products.issue_s(base, acc_s, k_desc, n, FALSE)
                find_bits(own, i, member, tile, arrays, strides, sizes)
                masked = i >= word(own, CUT) or i < word(own, FREE)
                wait_all()
                pin_s(acc_s)
            while n < end:
                step = QueryStep(n, before, i, member, masked)
                to_ds(base, own, consumer, step, tile, arrays, strides, sizes, score)
                last = stays and n + 1 == end  # the next Q may be of a tile that comes much later
                add_products(base, consumer, n, last, tile, acc_dk, acc_dv, lse_factor)
                n = int32(n + 1)
                i, member = walk.next(own, i, member, arrays, strides)
                find_bits(own, i, member, tile, arrays, strides, sizes)
                masked = i >= word(own, CUT) or i < word(own, FREE)
                wait_but_one()
                pin_s(acc_s)
            wait_all()
            pin_dq(acc_dq)
            if stays:
                rings.own.consumer_release(base, w, elected)
                if boxed:
                    rings.b.consumer_release(base, int32(n - 1), elected)  # its bias lay in the place of the last dS
            if n > before:
                leave_dq(base, own, acc_dq, me, int32(n - 1), before, arrays, strides, sizes, score)
            finish_keys(own, int32(end - before), acc_dk, acc_dv, arrays, strides, sizes, score)
            tiles.leave(base, w)
            w = int32(w + 1)

    @cuda.jit
    def flash_attention_wgmma_fused(tensor_maps, arrays, strides, sizes, score):
        base = aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        thread, warpgroup = special.thread_index(), warpgroup_index()
        if not all_keys or read.reads:  # the ticket, or a mask's bits
            griddepcontrol.wait()
        if thread == 0:
            set_up(base)
            if config.keys_first:
                row, h_kv, entry = tiles.own_keys(arrays, strides, sizes)
                producer.load_own(base, row, h_kv, entry)
            elif not stays:
                tiles.take(base, int32(0), arrays, strides, sizes)
        if config.keys_first and thread == 32:  # of another warp, beside these loads
            tiles.take(base, int32(0), arrays, strides, sizes)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                fetch(base, arrays, strides, sizes)
            if thread == 32:
                fetch_do(base, arrays, strides)
            if not all_keys and (thread == 64 or thread == 96 or (dq_alone and thread > 64)):
                add_dq(base, int32((thread >> int32(5)) - 2), arrays, strides, sizes, score)
        else:
            take_registers()
            griddepcontrol.wait()
            griddepcontrol.launch_dependents()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma_fused
