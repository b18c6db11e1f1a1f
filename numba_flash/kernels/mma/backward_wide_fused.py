"""Gradients of keys, values and queries in one kernel, float32 and float64 on tensor cores; since Ampere (sm_80).

Read backward_dkdv_wide.py first. That and backward_dq_wide.py compute S and dP twice, seven products; here there are
five. A block owns a tile of keys of one KV head, walks over the tiles of queries that see it, and computes

    S^T = K Q^T     dP^T = V dO^T     P^T = e^(S^T - lse)     dS^T = P^T * (dP^T - delta)
    dV += P^T dO      dK += dS^T Q      and its part of dQ, dS K (backward_dq_parts.py)

`column_groups` warps own the same `warp_rows` keys. One half of them computes S, the other dP, each for a part of the
queries; so a warp's tile is large, and it reads and splits few operands for each product. Then the two that have S and
dP of the same queries give each other half of it: one makes P and dS of the first 8 keys of every 16, the other of the
last 8. P and dS go into shared memory, from where every warp takes what its products need.

dO of a tile comes while dK and dQ are computed from the tile before, and Q with lse and delta while dQ is.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v, do and dq begin at multiples of 16 bytes and are contiguous along dim; dq, dk and dv are contiguous.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint8, uint32

from ...ptx import bar, cluster, cp_async, fence, ld_st, memory, setmaxnreg, shared, special
from ..score import fragments, positions
from ..score.stage import FragmentAt
from ..steps import async_tiles, lse_delta, numbers
from ..steps import recompute_keys as recompute
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, key_queries, key_tiles
from ..steps.tiles import row_base
from . import backward_dq_carried, backward_dq_parts, backward_wide, shared_scores, shared_weights
from .backward_dq_parts import Walk


class Registers(NamedTuple):
    """What a warp holds of S^T or dP^T, of dK and dV, of operands, and of its keys. Shapes are in make()."""

    acc: Any
    acc_dk: Any
    acc_dv: Any
    own_frag: Any
    other_frag: Any
    p_frag: Any


def make(config):
    tile_m, tile_n, warp_rows, workers = config.tile_m, config.tile_n, config.warp_rows, config.workers
    carried, paired = config.carried, config.blocks > 1
    head_dim, head_dim_v, size, padded = config.head_dim, config.head_dim_v, config.item_size, config.head_dim_padded
    alignment, pitch, double = config.ALIGNMENT, config.pitch, config.dtype == "float64"
    v_at, q_at, do_at, p_at, ds_at, rows_at, state_at, dq_at, scores_at, _ = config.shared_offsets()
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    parts, part_shift = groups // 2, shift - 1  # of the queries, in which warps compute S or dP
    strips, columns, own_columns = warp_rows // 16, padded // groups, tile_m // parts
    blocks, steps_16 = own_columns // 8, tile_m // 16
    s_count, sum_count = strips * blocks * 4, strips * columns // 2

    real = numbers.of(config.compute_dtype).real
    load_own, load_other = (async_tiles.loader(tile, padded, workers, 1, size) for tile in (tile_n, tile_m))
    of_scores, of_sums = (backward_wide.fused_products(config, n) for n in (parts, groups))
    multiply, score_lanes, fragment = of_scores.multiply_part, of_scores.lanes, of_scores.register
    add_16, sum_lanes = of_sums.add_16, of_sums.lanes
    own_count, other_count = of_sums.q_count, of_sums.kv_count
    place, pair, put, operand_place, operand, _, _ = shared_weights.make(pitch, strips, double)
    store_dk, store_dv = (backward_wide.storer(config, n, padded) for n in (head_dim, head_dim_v))
    keys_and_start, row_term = positions.make(config), fragments.chain(config).row_term
    weight, _ = fragments.weights_at(config)
    start_rows, of_pair = lse_delta.staged(config, tile_m)
    recompute_keys, wait_all = recompute.make(config, True, True), cp_async.wait_group(0)
    work_of, keep, walk_of, _, wait_turn, add_dq, hand_on = backward_dq_parts.make(config)
    begin_scores, add_other = shared_scores.make(config, s_count) if paired else (None, None)
    few, many = config.registers if carried else (24, 24)
    give_registers, take_registers = setmaxnreg.decrease(few), setmaxnreg.increase(many)
    leave_dq, carry_dq = backward_dq_carried.make(config) if carried else (None, None)

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def first_row_of_warp():
        return int32((special.thread_index() >> int32(5 + shift)) * warp_rows)

    @inlined
    def part_and_role():
        """-> which part of the queries the warp computes S or dP of, and 1 where it is dP."""
        within = (special.thread_index() >> int32(5)) & int32(groups - 1)
        return int32(within >> int32(1)), int32(within & int32(1))

    @inlined
    def meet():
        """All warps that own the same keys."""
        bar.sync(1 + (special.thread_index() >> int32(5 + shift)), 32 * groups)

    @inlined
    def own_column():
        """The first column of the block."""
        return int32(cluster.rank() * padded) if paired else int32(0)

    @inlined
    def meet_all():
        """All warps that compute."""
        bar.sync(8, workers)

    @inlined
    def turn(t, walk, sizes):
        """-> (i, h) of the t-th tile of queries."""
        member = divide(t, walk.tiles)
        h = walk.h_kv * divide(sizes.heads, sizes.heads_kv) + member
        return int32(walk.begin + walk.tiles - 1 - (t - member * walk.tiles)), int32(h)

    @inlined
    def load_do(t, k_smem, arrays, strides, sizes):
        """Start the copies of dO of the t-th tile of queries, if there is one."""
        walk = walk_of(k_smem + int32(state_at), sizes)
        if t < walk.tiles * divide(sizes.heads, sizes.heads_kv):
            i, h = turn(t, walk, sizes)
            first = own_column()
            source = memory.address(arrays.do, row_base(strides.do, walk.b, h, i * tile_m) + first)
            rows_left = int32(sizes.seqlen_q - i * tile_m)
            stride = size * strides.do[2]
            load_other(k_smem + int32(do_at), source, stride, 0, rows_left, head_dim_v - first, special.thread_index())

    @inlined
    def load_queries(t, k_smem, arrays, strides, sizes):
        """Likewise of Q, with lse and delta."""
        walk = walk_of(k_smem + int32(state_at), sizes)
        if t < walk.tiles * divide(sizes.heads, sizes.heads_kv):
            i, h = turn(t, walk, sizes)
            first = own_column()
            source = memory.address(arrays.q, row_base(strides.q, walk.b, h, i * tile_m) + first)
            rows_left, stride = int32(sizes.seqlen_q - i * tile_m), size * strides.q[2]
            load_other(k_smem + int32(q_at), source, stride, 0, rows_left, head_dim - first, special.thread_index())
            start_rows(k_smem + int32(rows_at), int64(walk.b) * sizes.heads + h, i * tile_m, arrays, sizes)

    @inlined
    def find_scores(registers, k_smem):
        """acc <- S of the warp's part, or dP."""
        thread = special.thread_index()
        lane, (part, role) = thread & int32(31), part_and_role()
        own = k_smem + role * int32(v_at)
        other = k_smem + int32(q_at) + role * int32(do_at - q_at)
        warp = ((thread >> int32(5 + shift)) << int32(part_shift)) + part
        own_lane, other_lane, _, _ = score_lanes(lane, warp, own, other, other)
        multiply(registers.acc, registers.own_frag, registers.other_frag, own_lane, other_lane)

    @inlined
    def give_half(registers, k_smem):
        """What the other warp makes P and dS of, to where it puts them: S to P, dP to dS."""
        lane, (part, role) = special.thread_index() & int32(31), part_and_role()
        at = place(lane, k_smem + int32(p_at) + role * int32(ds_at - p_at))
        at += ((first_row_of_warp() + 8 - 8 * role) * pitch + part * own_columns) * size
        for strip in range(strips):
            for n in range(blocks):
                of = (strip * blocks + n) * 4
                first, second = registers.acc[of], registers.acc[of + 1]
                third, fourth = registers.acc[of + 2], registers.acc[of + 3]
                x, y = first if role else third, second if role else fourth
                put(x, y, at + (strip * 16 * pitch + 8 * n) * size)

    @inlined
    def weigh(i, registers, k_smem, walk, term, sizes, score):
        """P^T and dS^T of the warp's half to shared memory."""
        lane, (part, role) = special.thread_index() & int32(31), part_and_role()
        row = int32(first_row_of_warp() + 8 * role)
        p_place = place(lane, k_smem + int32(p_at)) + (row * pitch + part * own_columns) * size
        to_ds = int32(ds_at - p_at)
        first_column, key = int32(part * own_columns + int32(first_column_of(lane))), row + int32(first_row_of(lane))
        given, p, ds = (cuda.local.array(2, real), cuda.local.array(2, real), cuda.local.array(2, real))
        lse, delta = cuda.local.array(2, real), cuda.local.array(2, real)
        first_query, end_query = cuda.local.array(strips, int32), cuda.local.array(strips, int32)  # that see a key
        for strip in range(strips):
            at_key = int32(walk.first_key + key + strip * 16)
            first, end = key_queries(at_key, walk.q_start, sizes.left, sizes.right, sizes.seqlen_q)
            first_query[strip], end_query[strip] = int32(first), int32(end) if at_key < walk.keys else int32(0)
        for n in range(blocks):
            of_pair(lse, delta, k_smem + int32(rows_at), first_column + n * 8)
            for strip in range(strips):
                at = p_place + (strip * 16 * pitch + 8 * n) * size
                pair(given, at if role else at + to_ds)
                for x in range(2):
                    of = (strip * blocks + n) * 4 + x
                    upper, lower = registers.acc[of], registers.acc[of + 2]
                    s, dp = given[x] if role else upper, lower if role else given[x]
                    query = int32(i * tile_m + first_column + n * 8 + x)
                    distance = real(int64(query) + walk.q_start - walk.first_key - (key + strip * 16))
                    found, derivative = weight(s, FragmentAt(term, distance, real(0)), score, lse[x])
                    seen = query >= first_query[strip] and query < end_query[strip]
                    p[x] = found if seen else real(0)
                    ds[x] = found * (dp - delta[x]) * derivative if seen else real(0)
                put(p[0], p[1], at)
                put(ds[0], ds[1], at + to_ds)

    @inlined
    def add_rows(acc, registers, weights_smem, rows_smem):
        """acc += P^T dO, or dS^T Q."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        at = operand_place(lane, weights_smem) + first_row_of_warp() * (pitch * size)
        _, _, rows_lane, _ = sum_lanes(lane, warp, rows_smem, rows_smem, rows_smem)
        for _ in range(special.opaque(steps_16)):
            operand(registers.p_frag, at)
            add_16(acc, registers.p_frag, registers.other_frag, rows_lane)
            at, rows_lane = int32(at + 16 * size), int32(rows_lane + 2048)

    @inlined
    def hand_on_before(t, k_smem, sizes):
        """Behind a barrier: what the block has given before its t-th tile of queries is in dQ."""
        if special.thread_index() == 0 and t > 0:
            i, h = turn(int32(t - 1), walk_of(k_smem + int32(state_at), sizes), sizes)
            hand_on(i, h, k_smem + int32(state_at), sizes)

    @inlined
    def step(t, registers, k_smem, arrays, strides, sizes, score):
        """One tile of queries of one head."""
        wait_all()
        meet_all()  # Q and dO are there, and everyone is done with dS of the tile before, and has added to dQ
        if not carried:
            hand_on_before(t, k_smem, sizes)
        find_scores(registers, k_smem)
        if paired:
            add_other(registers.acc, t, k_smem + int32(scores_at))
        give_half(registers, k_smem)
        meet()
        walk = walk_of(k_smem + int32(state_at), sizes)
        i, h = turn(t, walk, sizes)
        weigh(i, registers, k_smem, walk, row_term(walk.b, h, arrays, strides), sizes, score)
        meet()
        add_rows(registers.acc_dv, registers, k_smem + int32(p_at), k_smem + int32(do_at))
        if not carried and special.thread_index() == workers - 1:
            i, h = turn(t, walk_of(k_smem + int32(state_at), sizes), sizes)
            wait_turn(i, h, k_smem + int32(state_at), sizes)
        meet_all()  # everyone is done with dO, all of dS is there, and it is this block's turn
        load_do(int32(t + 1), k_smem, arrays, strides, sizes)
        cp_async.commit_group()
        add_rows(registers.acc_dk, registers, k_smem + int32(ds_at), k_smem + int32(q_at))
        meet_all()  # everyone is done with Q
        load_queries(int32(t + 1), k_smem, arrays, strides, sizes)
        cp_async.commit_group()
        if carried:
            leave_dq(t == 0, k_smem, k_smem + int32(ds_at), k_smem + int32(dq_at), score)
        else:
            i, h = turn(t, walk_of(k_smem + int32(state_at), sizes), sizes)
            add_dq(i, h, k_smem, k_smem + int32(ds_at), k_smem + int32(state_at), strides, sizes, score)

    @inlined
    def carry(end, k_smem, strides, sizes):
        """What the carrier does: all of the block's parts of dQ, one behind the other."""
        state, t = k_smem + int32(state_at), int32(0)
        while t < end:
            i, h = turn(t, walk_of(state, sizes), sizes)
            carry_dq(i, h, t + 1 == end, k_smem + int32(dq_at), state, strides, sizes)
            t = int32(t + 1)


    @cuda.jit
    def flash_attention_mma_wide_fused(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        k_smem = aligned(shared.address(cuda.shared.array(0, uint8)))  # (tile_n, head_dim_padded)
        state = k_smem + int32(state_at)
        if thread == 0:
            if paired:
                begin_scores(k_smem + int32(scores_at))
                fence.mbarrier_init()
                if cluster.rank() == 0:
                    ticket = memory.add(memory.address(arrays.turns, 0), uint32(1))
                    ld_st.store_b32(state, ticket)
                    cluster.store_b32(cluster.place_in(state, 1), ticket)
            else:
                ld_st.store_b32(state, memory.add(memory.address(arrays.turns, 0), uint32(1)))
        if paired:
            cluster.sync()
        else:
            cuda.syncthreads()
        b, h_kv, first_key = work_of(int32(ld_st.load_b32(state)), sizes)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        keys_left = int32(min(keys - first_key, tile_n))  # may be below 0
        left, right, seqlen_q = sizes.left, sizes.right, sizes.seqlen_q
        top_first, top_end = key_queries(first_key, q_start, left, right, seqlen_q)
        bottom_first, bottom_end = key_queries(first_key + keys_left - 1, q_start, left, right, seqlen_q)
        begin, _, _, stop = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_m)
        tiles = int32(stop - begin) if keys_left > 0 else int32(0)
        walk = Walk(b, h_kv, first_key, q_start, int32(keys), int32(begin), tiles)
        cuda.syncthreads()  # the ticket has been read
        if thread == 0:
            keep(walk, state, arrays, strides, sizes)
        cuda.syncthreads()  # what was kept is there
        end = int32(tiles * divide(sizes.heads, sizes.heads_kv))
        if carried:
            if thread >= workers:
                give_registers()
                if thread < workers + 32:
                    carry(end, k_smem, strides, sizes)
                return
            take_registers()
        registers = Registers(
            cuda.local.array(s_count, real),  # acc (strips, own_columns / 8, 4)
            cuda.local.array(sum_count, real),  # acc_dk (strips, columns / 8, 4)
            cuda.local.array(sum_count, real),  # acc_dv (strips, columns / 8, 4)
            cuda.local.array(own_count, fragment),  # own_frag
            cuda.local.array(other_count, fragment),  # other_frag
            cuda.local.array(own_count, fragment),  # p_frag (strips, 2, 4)
        )
        for x in range(sum_count):
            registers.acc_dk[x] = real(0)
            registers.acc_dv[x] = real(0)
        if tiles > 0:
            first = own_column()
            k_global = memory.address(arrays.k, row_base(strides.k, b, h_kv, first_key) + first)
            load_own(k_smem, k_global, size * strides.k[2], 0, keys_left, head_dim - first, thread)
            v_global = memory.address(arrays.v, row_base(strides.v, b, h_kv, first_key) + first)
            load_own(k_smem + int32(v_at), v_global, size * strides.v[2], 0, keys_left, head_dim_v - first, thread)
            load_do(int32(0), k_smem, arrays, strides, sizes)
            load_queries(int32(0), k_smem, arrays, strides, sizes)
        cp_async.commit_group()
        t = int32(0)
        while t < end:
            step(t, registers, k_smem, arrays, strides, sizes, score)
            t = int32(t + 1)
        meet_all()
        if not carried:
            hand_on_before(end, k_smem, sizes)

        walk = walk_of(state, sizes)  # once more: not kept in registers while products need them
        b, h_kv, first_key, q_start = walk.b, walk.h_kv, walk.first_key, walk.q_start
        keys_left = int32(min(walk.keys - first_key, tile_n))
        first_row, column = first_row_of_warp(), own_column() + (warp & (groups - 1)) * columns
        rows_left = int32(min(sizes.seqlen_k - first_key, tile_n) - first_row)
        valid = int32(keys_left - first_row)
        base = row_base(strides.dk, b, h_kv, first_key + first_row) + column
        nonfinite = store_dk(
            registers.acc_dk, score.scale, lane, arrays.dk, base, strides.dk[2], rows_left, valid, head_dim - column
        )
        base = row_base(strides.dv, b, h_kv, first_key + first_row) + column
        nonfinite |= store_dv(
            registers.acc_dv, real(1), lane, arrays.dv, base, strides.dv[2], rows_left, valid, head_dim_v - column
        )
        if paired:
            cluster.sync()
        else:
            meet_all()  # a row that is no number in some columns is written again as a whole
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, b, h_kv, first_key, q_start, arrays, strides, sizes, score)

    return flash_attention_mma_wide_fused
