"""dK, dV and dQ in one kernel, float64 on tensor cores; Hopper (sm_90).

Read backward.py first. Compiled for keys and for queries, that kernel computes S and dP twice, seven products in all;
here there are five. A block owns a key tile of one KV head, loops over the query tiles that see it, and computes

    S^T = K Q^T     dP^T = V dO^T     P^T = e^(S^T - lse)     dS^T = P^T * (dP^T - delta)
    dV += P^T dO      dK += dS^T Q      and its part of dQ, dS K (backward_dq_parts.py)

Two warps own the same `warp_rows` keys. One computes S, the other dP. Then the two exchange one half: one computes P
and dS of the first 8 keys of every 16, the other of the last 8. They store P and dS in shared memory, from which every
warp loads the operands of its products. A further warpgroup does all but compute: two of its warps load Q and dO with
cp.async, whose bytes an mbarrier says to be there, and another, the carrier, adds parts of dQ. That warpgroup has few
registers, and those that compute have the others. docs/mma_notes.md says why.

Above head_dim 128 a cluster of two blocks then owns the same keys, and each has half of the columns of every tile and
gradient. Both add up their halves of S and dP (shared_scores.py), and both make P and dS of it.

Launch: a block, or with `blocks` a cluster, for each key tile: grid (blocks * batch * heads_kv * key tiles). Rows of q,
k, v, do and dq begin at multiples of 16 bytes and are contiguous along dim; dq, dk and dv are contiguous.
"""

from numba import cuda, float64, int32, uint8, uint32

from ...ptx import bar, cluster, cp_async, fence, ld_st, local, mbarrier, memory, setmaxnreg, shared, special
from ..recompute import keys as recompute
from ..steps import async_tiles, block_state, lse_delta, sequence as sequences
from ..steps.basics import divide, inlined
from ..steps.sequence import key_row, lse_row, query_range, query_row
from . import backward_dq_parts, backward_fused_tile, gradient_rows, shared_scores
from .backward_dq_parts import WORKERS, Walk
from .backward_fused_tile import Registers

FEW = 56  # registers of a thread of the further warpgroup, which leaves the others to those that compute


def make(config):
    tile_m, tile_n, padded = config.tile_m, config.tile_n, config.head_dim_padded
    plan, loaders, paired, workers = config.shared_layout(), config.LOADERS, config.blocks > 1, config.workers
    s_count, sum_count = config.strips * tile_m // 2, config.strips * padded // 4
    load_own = async_tiles.loader(tile_n, padded, workers, 1, 8, config.copy_bytes)
    load_other = async_tiles.loader(tile_m, padded, loaders, 1, 8, config.copy_bytes)
    staged, scores = lse_delta.staged(config, tile_m, loaders), shared_scores.make(config, s_count)
    tile, parts = backward_fused_tile.make(config), backward_dq_parts.make(config)
    sequence_of, recompute_keys = sequences.make(config), recompute.make(config, True, True)
    end_at, wait_all = plan.state + 3 * block_state.SIZE, cp_async.wait_group(0)
    # full: Q and dO are there. The others: a place is free.
    full, q_empty, do_empty, staging_empty = (plan.barriers + 8 * n for n in range(4))
    launched = 65536 // max(config.blocks_per_sm, 1) // config.threads // 8 * 8  # registers of a thread
    many = min((launched * config.threads - 128 * FEW) // workers // 8 * 8, 240)
    give_registers, take_registers = setmaxnreg.decrease(FEW), setmaxnreg.increase(many)

    @inlined
    def own_column():
        """The first column of the block."""
        return int32(cluster.rank() * padded) if paired else int32(0)

    dims = config.head_dim, config.head_dim_v
    store_dk, store_dv = (gradient_rows.storer(config, columns, padded, own_column) for columns in dims)

    @inlined
    def meet_all():
        """Waits for all warps that compute."""
        bar.sync(WORKERS, workers)

    @inlined
    def end_of(k_smem):
        """How many query tiles all heads have; kept through the loop, it would cost a register."""
        return int32(ld_st.load_b32(k_smem + int32(end_at)))

    @inlined
    def load_tile(rows, by, columns, to, t, k_smem, thread, sizes):
        """Starts to copy the t-th query tile of q or do, which has so many columns, to its place."""
        i, h, walk = parts.tile_at(t, k_smem + int32(plan.state), sizes)
        first, rows_left = own_column(), int32(sizes.seqlen_q - i * tile_m)
        source = memory.address(rows, query_row(by, walk.sequence, h, i * tile_m) + first)
        load_other(k_smem + int32(to), source, 8 * by[2], 0, rows_left, columns - first, thread)

    @inlined
    def load_numbers(t, k_smem, thread, arrays, sizes):
        """Starts the copies of lse and delta of the t-th query tile."""
        i, h, walk = parts.tile_at(t, k_smem + int32(plan.state), sizes)
        head = lse_row(walk.sequence, h, 0, sizes)
        staged.start_rows(k_smem + int32(plan.rows), head, i * tile_m, sizes.seqlen_q, arrays, thread)

    @inlined
    def fetch(k_smem, thread, arrays, strides, sizes):
        """The loaders copy all tiles of Q and dO in order, each as soon as its place is free."""
        t = int32(0)
        while t < end_of(k_smem):
            mbarrier.wait(k_smem + int32(do_empty), (t & 1) ^ 1)
            load_tile(arrays.do, strides.do, config.head_dim_v, plan.do, t, k_smem, thread, sizes)
            mbarrier.wait(k_smem + int32(q_empty), (t & 1) ^ 1)
            load_tile(arrays.q, strides.q, config.head_dim, plan.q, t, k_smem, thread, sizes)
            load_numbers(t, k_smem, thread, arrays, sizes)
            cp_async.commit_group()
            wait_all()
            mbarrier.arrive(k_smem + int32(full))
            t = int32(t + 1)

    @inlined
    def carry(k_smem, strides, sizes):
        """The carrier writes all of the block's parts of dQ in order."""
        state, t = k_smem + int32(plan.state), int32(0)
        while t < end_of(k_smem):
            i, h, _ = parts.tile_at(t, state, sizes)
            last, free = t + 1 == end_of(k_smem), k_smem + int32(staging_empty)
            parts.carry(i, h, last, k_smem + int32(plan.dq), state, free, strides, sizes)
            t = int32(t + 1)

    @inlined
    def place_of_incoming_scores(k_smem):
        """Where the warp receives the other block's scores. Later it puts the half that it gives there."""
        warp = special.thread_index() >> int32(5)
        group, role = warp >> int32(1), warp & int32(1)
        return k_smem + int32(plan.p) + role * int32(plan.ds - plan.p) + group * int32(s_count * 256)

    @inlined
    def scores_of_tile(t, registers, k_smem, sizes, score):
        """Stores P and dS of the t-th query tile in shared memory."""
        tile.find_scores(registers, k_smem)
        i, _, walk = parts.tile_at(t, k_smem + int32(plan.state), sizes)  # while the last products end
        mbarrier.wait(k_smem + int32(staging_empty), (t & 1) ^ 1)
        if paired:
            bars = k_smem + int32(plan.scores_barriers)
            scores.add_other(registers.acc, t, place_of_incoming_scores(k_smem), bars)
        tile.give_half(registers, k_smem)
        tile.meet()
        tile.weigh(i, registers, k_smem, walk, sizes, score)
        tile.meet()

    @inlined
    def step(t, registers, k_smem, sizes, score):
        """Computes one query tile of one head. Each lane arrives for itself: racecheck does not follow one arrival for
        a whole warp."""
        mbarrier.wait(k_smem + int32(full), t & 1)
        scores_of_tile(t, registers, k_smem, sizes, score)
        tile.add_rows(registers.acc_dv, registers, k_smem + int32(plan.p), k_smem + int32(plan.do))
        mbarrier.arrive(k_smem + int32(do_empty))
        tile.add_rows(registers.acc_dk, registers, k_smem + int32(plan.ds), k_smem + int32(plan.q))
        mbarrier.arrive(k_smem + int32(q_empty))
        meet_all()  # all of dS is there
        parts.leave(k_smem, k_smem + int32(plan.ds), k_smem + int32(plan.dq), score)

    @inlined
    def take_ticket(k_smem, state, arrays):
        """Stores the work of the block, or of the cluster, at `state`; sets up mbarriers."""
        if special.thread_index() == 0:
            mbarrier.init(k_smem + int32(full), loaders)
            mbarrier.init(k_smem + int32(q_empty), workers)
            mbarrier.init(k_smem + int32(do_empty), workers)
            mbarrier.init(k_smem + int32(staging_empty), 1)
            if paired:
                scores.begin(k_smem + int32(plan.scores_barriers))
                fence.mbarrier_init()
            if not paired or cluster.rank() == 0:
                ticket = memory.add(memory.address(arrays.turns, 0), uint32(1))
                if paired:
                    for rank in range(2):
                        cluster.store_b32(cluster.place_in(state, rank), ticket)
                else:
                    ld_st.store_b32(state, ticket)
        if paired:
            cluster.sync()
        else:
            cuda.syncthreads()

    @cuda.jit
    def flash_attention_mma_fused(arrays, strides, sizes, score):
        thread = special.thread_index()
        k_smem = shared.address(cuda.shared.array(0, uint8))  # (tile_n, head_dim_padded)
        state = k_smem + int32(plan.state)
        take_ticket(k_smem, state, arrays)
        b, h_kv, first_key = parts.work_of(int32(ld_st.load_b32(state)), sizes)
        sequence = sequence_of(b, arrays, strides, sizes)
        keys_left = int32(min(sequence.keys - first_key, tile_n))  # may be below 0
        begin, _, _, stop = query_range(sequence, first_key, first_key + keys_left - 1, sizes, tile_m)
        tiles = int32(stop - begin) if keys_left > 0 else int32(0)
        cuda.syncthreads()  # the ticket has been read
        if thread == 0:
            parts.keep(Walk(sequence, h_kv, first_key, int32(begin), tiles), state, arrays, strides, sizes)
            end = int32(tiles * divide(sizes.heads, sizes.heads_kv))
            ld_st.store_b32(k_smem + int32(end_at), uint32(end))
        cuda.syncthreads()  # the stored state is visible
        if thread >= workers:
            give_registers()
            if thread < workers + loaders:
                fetch(k_smem, thread - workers, arrays, strides, sizes)
            elif thread < workers + loaders + 32:
                carry(k_smem, strides, sizes)
            return
        take_registers()
        registers = Registers(
            local.array(s_count, float64),  # acc (strips, tile_m / 8, 4)
            local.array(sum_count, float64),  # acc_dk (strips, head_dim_padded / 16, 4)
            local.array(sum_count, float64),  # acc_dv (strips, head_dim_padded / 16, 4)
            local.array(tile.own_count, float64),  # own_frag
            local.array(tile.other_count, float64),  # other_frag
            local.array(tile.own_count, float64),  # p_frag (strips, 2, 4)
        )
        for x in range(sum_count):
            registers.acc_dk[x] = float64(0)
            registers.acc_dv[x] = float64(0)
        if tiles > 0:
            first = own_column()
            k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key) + first)
            load_own(k_smem, k_global, 8 * strides.k[2], 0, keys_left, config.head_dim - first, thread)
            v_smem = k_smem + int32(plan.v)
            v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key) + first)
            load_own(v_smem, v_global, 8 * strides.v[2], 0, keys_left, config.head_dim_v - first, thread)
        cp_async.commit_group()
        wait_all()
        meet_all()  # K and V are there
        t = int32(0)
        while t < end_of(k_smem):
            step(t, registers, k_smem, sizes, score)
            t = int32(t + 1)

        walk = parts.walk_of(state, sizes)  # read again: not kept in registers while products need them
        sequence, h_kv, first_key = walk.sequence, walk.h_kv, walk.first_key
        first_row, lane = tile.first_row_of_warp(), special.thread_index() & int32(31)
        rows_left = int32(min(sizes.seqlen_k - first_key, tile_n))
        keys_left = int32(min(sequence.keys - first_key, tile_n))
        base, stride = key_row(strides.dk, sequence, h_kv, first_key), strides.dk[2]
        nonfinite = store_dk(registers.acc_dk, score.scale, arrays.dk, base, stride, rows_left, keys_left)
        base, stride = key_row(strides.dv, sequence, h_kv, first_key), strides.dv[2]
        nonfinite |= store_dv(registers.acc_dv, float64(1), arrays.dv, base, stride, rows_left, keys_left)
        if paired:
            cluster.sync()
        else:
            meet_all()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return flash_attention_mma_fused
