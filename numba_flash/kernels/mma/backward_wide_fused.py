"""dK, dV and dQ in one kernel, float32 and float64 on tensor cores; since Ampere (sm_80).

Read backward_dkdv_wide.py first. That kernel and backward_dq_wide.py both compute S and dP, seven products in all; here
there are five. A block owns a key tile of one KV head, loops over the query tiles that see it, and computes

    S^T = K Q^T     dP^T = V dO^T     P^T = e^(S^T - lse)     dS^T = P^T * (dP^T - delta)
    dV += P^T dO      dK += dS^T Q      and its part of dQ, dS K (backward_dq_parts.py)

`column_groups` warps own the same `warp_rows` keys. Half of them compute S, the others dP, each for a part of the
queries. So a warp's tile is large, and it reads and splits few operands for each product. Then the two warps with S and
dP of the same queries exchange one half: one computes P and dS of the first 8 keys of every 16, the other of the last
8. They store P and dS in shared memory, from which every warp loads the operands of its products.

dO of a tile is loaded while dK and dQ are computed from the previous tile, and Q with lse and delta while dQ is.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v, do and dq begin at multiples of 16 bytes and are contiguous along dim; dq, dk and dv are contiguous.
"""

from numba import cuda, int32, uint8, uint32

from ...ptx import cp_async, ld_st, local, memory, shared, special
from ..recompute import keys as recompute
from ..score import fragments
from ..steps import async_tiles, lse_delta, numbers
from ..steps import sequence as sequences
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.sequence import key_row, query_range, query_row
from . import backward_dq_parts, backward_fused_tile, backward_wide
from .backward_dq_parts import Walk
from .backward_fused_tile import Registers


def make(config):
    tile_m, tile_n, threads = config.tile_m, config.tile_n, config.threads
    head_dim, head_dim_v, size, padded = config.head_dim, config.head_dim_v, config.item_size, config.head_dim_padded
    plan = config.shared_layout()
    columns = padded // config.column_groups

    real = numbers.of(config.compute_dtype).real
    load_own, load_other = (async_tiles.loader(tile, padded, threads, 1, size) for tile in (tile_n, tile_m))
    tile = backward_fused_tile.make(config)
    find_scores, give_half, meet, weigh, add_rows = (
        tile.find_scores,
        tile.give_half,
        tile.meet,
        tile.weigh,
        tile.add_rows,
    )
    first_row_of_warp, turn, fragment = tile.first_row_of_warp, tile.turn, tile.fragment
    s_count, sum_count, own_count, other_count = tile.counts
    store_dk, store_dv = (backward_wide.storer(config, n, padded) for n in (head_dim, head_dim_v))
    sequence_of, row_term = sequences.make(config), fragments.chain(config).row_term
    start_rows, _ = lse_delta.staged(config, tile_m, threads)
    recompute_keys, wait_all = recompute.make(config, True, True), cp_async.wait_group(0)
    parts = backward_dq_parts.make(config)

    @inlined
    def aligned(address):
        return int32((address + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))

    @inlined
    def load_do(t, k_smem, arrays, strides, sizes):
        """Start the copies of dO of the t-th query tile, if there is one."""
        walk = parts.walk_of(k_smem + int32(plan.state), sizes)
        if t < walk.tiles * divide(sizes.heads, sizes.heads_kv):
            i, h = turn(t, walk, sizes)
            source = memory.address(arrays.do, query_row(strides.do, walk.sequence, h, i * tile_m))
            rows_left = int32(sizes.seqlen_q - i * tile_m)
            stride = size * strides.do[2]
            load_other(k_smem + int32(plan.do), source, stride, 0, rows_left, head_dim_v, special.thread_index())

    @inlined
    def load_queries(t, k_smem, arrays, strides, sizes):
        """Likewise for Q, with lse and delta."""
        walk = parts.walk_of(k_smem + int32(plan.state), sizes)
        if t < walk.tiles * divide(sizes.heads, sizes.heads_kv):
            i, h = turn(t, walk, sizes)
            source = memory.address(arrays.q, query_row(strides.q, walk.sequence, h, i * tile_m))
            rows_left, stride = int32(sizes.seqlen_q - i * tile_m), size * strides.q[2]
            load_other(k_smem + int32(plan.q), source, stride, 0, rows_left, head_dim, special.thread_index())
            start_rows(k_smem + int32(plan.rows), walk.sequence, h, i * tile_m, arrays, sizes, special.thread_index())

    @inlined
    def hand_on_before(t, k_smem, sizes):
        """After a barrier: the block's parts of the query tiles before its t-th one are in dQ; passes on the turn."""
        if special.thread_index() == 0 and t > 0:
            i, h = turn(int32(t - 1), parts.walk_of(k_smem + int32(plan.state), sizes), sizes)
            parts.hand_on(i, h, k_smem + int32(plan.state), sizes)

    @inlined
    def step(t, registers, k_smem, arrays, strides, sizes, score):
        """One query tile of one head."""
        wait_all()
        cuda.syncthreads()  # Q and dO have arrived; dS of the last tile has been used and added to dQ
        hand_on_before(t, k_smem, sizes)
        find_scores(registers, k_smem, int32(plan.q), int32(plan.do))
        give_half(registers, k_smem)
        meet()
        walk = parts.walk_of(k_smem + int32(plan.state), sizes)
        i, h = turn(t, walk, sizes)
        term = row_term(walk.sequence.b, h, arrays, strides)
        weigh(i, registers, k_smem, k_smem + int32(plan.rows), walk, term, sizes, score)
        meet()
        add_rows(registers.acc_dv, registers, k_smem + int32(plan.p), k_smem + int32(plan.do))
        if special.thread_index() == threads - 1:
            i, h = turn(t, parts.walk_of(k_smem + int32(plan.state), sizes), sizes)
            parts.wait_turn(i, h, k_smem + int32(plan.state), sizes)
        cuda.syncthreads()  # all threads have finished with dO, dS is stored, and it is this block's turn
        load_do(int32(t + 1), k_smem, arrays, strides, sizes)
        cp_async.commit_group()
        add_rows(registers.acc_dk, registers, k_smem + int32(plan.ds), k_smem + int32(plan.q))
        cuda.syncthreads()  # all threads have finished with Q
        load_queries(int32(t + 1), k_smem, arrays, strides, sizes)
        cp_async.commit_group()
        i, h = turn(t, parts.walk_of(k_smem + int32(plan.state), sizes), sizes)
        parts.add(i, h, k_smem, k_smem + int32(plan.ds), k_smem + int32(plan.state), strides, sizes, score)

    @cuda.jit
    def flash_attention_mma_wide_fused(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        k_smem = aligned(shared.address(cuda.shared.array(0, uint8)))  # (tile_n, head_dim_padded)
        state = k_smem + int32(plan.state)
        if thread == 0:
            ld_st.store_b32(state, memory.add(memory.address(arrays.turns, 0), uint32(1)))
        cuda.syncthreads()
        b, h_kv, first_key = parts.work_of(int32(ld_st.load_b32(state)), sizes)
        sequence = sequence_of(b, arrays, strides, sizes)
        keys_left = int32(min(sequence.keys - first_key, tile_n))  # may be below 0
        begin, _, _, stop = query_range(sequence, first_key, first_key + keys_left - 1, sizes, tile_m)
        tiles = int32(stop - begin) if keys_left > 0 else int32(0)
        walk = Walk(sequence, h_kv, first_key, int32(begin), tiles)
        cuda.syncthreads()  # the ticket has been read
        if thread == 0:
            parts.keep(walk, state, arrays, strides, sizes)
        registers = Registers(
            local.array(s_count, real),  # acc (strips, own_columns / 8, 4)
            local.array(sum_count, real),  # acc_dk (strips, columns / 8, 4)
            local.array(sum_count, real),  # acc_dv (strips, columns / 8, 4)
            local.array(own_count, fragment),  # own_frag
            local.array(other_count, fragment),  # other_frag
            local.array(own_count, fragment),  # p_frag (strips, 2, 4)
        )
        for x in range(sum_count):
            registers.acc_dk[x] = real(0)
            registers.acc_dv[x] = real(0)
        cuda.syncthreads()  # the stored state is visible
        if tiles > 0:
            k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key))
            load_own(k_smem, k_global, size * strides.k[2], 0, keys_left, head_dim, thread)
            v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key))
            load_own(k_smem + int32(plan.v), v_global, size * strides.v[2], 0, keys_left, head_dim_v, thread)
            load_do(int32(0), k_smem, arrays, strides, sizes)
            load_queries(int32(0), k_smem, arrays, strides, sizes)
        cp_async.commit_group()
        t, end = int32(0), int32(tiles * divide(sizes.heads, sizes.heads_kv))
        while t < end:
            step(t, registers, k_smem, arrays, strides, sizes, score)
            t = int32(t + 1)
        cuda.syncthreads()
        hand_on_before(end, k_smem, sizes)

        walk = parts.walk_of(state, sizes)  # read again: not kept in registers while products need them
        sequence, h_kv, first_key = walk.sequence, walk.h_kv, walk.first_key
        keys_left = int32(min(sequence.keys - first_key, tile_n))
        first_row, column = first_row_of_warp(), (warp & (config.column_groups - 1)) * columns
        rows_left = int32(min(sizes.seqlen_k - first_key, tile_n) - first_row)
        valid = int32(keys_left - first_row)
        base = key_row(strides.dk, sequence, h_kv, first_key + first_row) + column
        nonfinite = store_dk(
            registers.acc_dk, score.scale, lane, arrays.dk, base, strides.dk[2], rows_left, valid, head_dim - column
        )
        base = key_row(strides.dv, sequence, h_kv, first_key + first_row) + column
        nonfinite |= store_dv(
            registers.acc_dv, real(1), lane, arrays.dv, base, strides.dv[2], rows_left, valid, head_dim_v - column
        )
        cuda.syncthreads()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return flash_attention_mma_wide_fused
