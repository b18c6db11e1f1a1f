"""backward_wide_fused.py in float64 for Hopper: warps that compute do nothing else, and wait for little.

Read that file and backward_dq_carried.py first. What dQ has so far, and whose turn it is, takes several thousand clocks
to ask and to say, and products of a tile take five thousand; there both stand in one line. Here a warp of its own, the
carrier, asks and says it beside the products. Two more warps fetch Q and dO: with cp.async, whose bytes an mbarrier
says to be there. The carrier's warpgroup has few registers, and those that compute have the others.

Above head_dim 128 a cluster of two blocks owns the same keys, and each has half of the columns of every tile and
gradient. Both add up their halves of S and dP (shared_scores.py), and both make P and dS of it.

dO of a tile comes while dK and dQ are computed from the tile before, and Q, with lse and delta, while dQ is.

Launch: a block, or with `blocks` a cluster, for each key tile: grid (blocks * batch * heads_kv * key tiles), block
(config.threads), config.shared_bytes of dynamic shared memory. Rows of q, k, v, do and dq begin at multiples of 16
bytes and are contiguous along dim; dq, dk and dv are contiguous.
"""

from numba import cuda, float64, int32, uint8, uint32

from ...ptx import bar, cluster, cp_async, fence, ld_st, local, mbarrier, memory, setmaxnreg, shared, special
from ..recompute import keys as recompute
from ..score import fragments
from ..steps import async_tiles, block_state, lse_delta
from ..steps import sequence as sequences
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.sequence import key_row, query_range, query_row
from . import backward_dq_carried, backward_dq_parts, backward_fused_tile, backward_wide, shared_scores
from .backward_dq_carried import WORKERS
from .backward_dq_parts import Walk
from .backward_fused_tile import Registers

REGISTERS = setmaxnreg.decrease, setmaxnreg.increase


def make(config):
    head_dim, head_dim_v, padded = config.head_dim, config.head_dim_v, config.head_dim_padded
    plan = config.shared_layout()
    paired, groups, loaders = config.blocks > 1, config.column_groups, config.LOADERS
    full, q_empty, do_empty, staging_empty = (plan.barriers + 8 * n for n in range(4))  # full: Q and dO are there
    one_buffer, end_at, columns = config.one_staging_buffer, plan.state + 3 * block_state.SIZE, padded // groups

    load_own = async_tiles.loader(config.tile_n, padded, config.workers, 1, 8)
    load_other = async_tiles.loader(config.tile_m, padded, loaders, 1, 8)
    tile = backward_fused_tile.make(config)
    s_count, sum_count, own_count, other_count = tile.counts
    store_dk, store_dv = (backward_wide.storer(config, n, padded) for n in (head_dim, head_dim_v))
    sequence_of, row_term = sequences.make(config), fragments.chain(config).row_term
    start_rows, _ = lse_delta.staged(config, config.tile_m, loaders)
    recompute_keys, wait_all = recompute.make(config, True, True), cp_async.wait_group(0)
    parts = backward_dq_parts.make(config)
    leave_dq, carry_dq = backward_dq_carried.make(config)
    begin_scores, add_other = shared_scores.make(config, s_count)
    give_registers, take_registers = (of(n) for of, n in zip(REGISTERS, config.registers, strict=True))

    @inlined
    def own_column():
        """The first column of the block."""
        return int32(cluster.rank() * padded) if paired else int32(0)

    @inlined
    def meet_all():
        """All warps that compute."""
        bar.sync(WORKERS, config.workers)

    @inlined
    def meet_others():
        """Likewise of both blocks that share columns."""
        if paired:
            cluster.sync()
        else:
            meet_all()

    @inlined
    def end_of(k_smem):
        """How many tiles of queries all heads have; kept through the loop, it would cost a register."""
        return int32(ld_st.load_b32(k_smem + int32(end_at)))

    @inlined
    def load_queries(t, k_smem, thread, arrays, strides, sizes):
        """Start the copies of Q of the t-th tile of queries, with lse and delta."""
        walk = parts.walk_of(k_smem + int32(plan.state), sizes)
        i, h = tile.turn(t, walk, sizes)
        first, rows_left = own_column(), int32(sizes.seqlen_q - i * config.tile_m)
        source = memory.address(arrays.q, query_row(strides.q, walk.sequence, h, i * config.tile_m) + first)
        load_other(k_smem + int32(plan.q), source, 8 * strides.q[2], 0, rows_left, head_dim - first, thread)
        start_rows(k_smem + int32(plan.rows), walk.sequence, h, i * config.tile_m, arrays, sizes, thread)

    @inlined
    def load_do(t, k_smem, thread, arrays, strides, sizes):
        """Likewise of dO."""
        walk = parts.walk_of(k_smem + int32(plan.state), sizes)
        i, h = tile.turn(t, walk, sizes)
        first, rows_left = own_column(), int32(sizes.seqlen_q - i * config.tile_m)
        source = memory.address(arrays.do, query_row(strides.do, walk.sequence, h, i * config.tile_m) + first)
        load_other(k_smem + int32(plan.do), source, 8 * strides.do[2], 0, rows_left, head_dim_v - first, thread)

    @inlined
    def fetch(k_smem, thread, arrays, strides, sizes):
        """What the loaders do: all tiles of Q and dO, one behind the other, each as soon as its place is free."""
        t = int32(0)
        while t < end_of(k_smem):
            mbarrier.wait(k_smem + int32(do_empty), (t & 1) ^ 1)
            load_do(t, k_smem, thread, arrays, strides, sizes)
            mbarrier.wait(k_smem + int32(q_empty), (t & 1) ^ 1)
            load_queries(t, k_smem, thread, arrays, strides, sizes)
            cp_async.commit_group()
            wait_all()
            mbarrier.arrive(k_smem + int32(full))
            t = int32(t + 1)

    @inlined
    def done_with(place):
        """The lane has read the tile whose `empty` mbarrier is at `place`. Each lane arrives for itself: racecheck does
        not follow one arrival for a whole warp."""
        mbarrier.arrive(place)

    @inlined
    def place_of_incoming_scores(k_smem):
        """Where the other block's scores for the warp come to: there the warp puts the half that it gives, later."""
        warp = special.thread_index() >> int32(5)
        group, role = warp >> int32(1), warp & int32(1)
        return k_smem + int32(plan.p) + role * int32(plan.ds - plan.p) + group * int32(s_count * 256)

    @inlined
    def step(t, registers, k_smem, arrays, strides, sizes, score):
        """One tile of queries of one head."""
        mbarrier.wait(k_smem + int32(full), t & 1)
        tile.find_scores(registers, k_smem, int32(plan.q), int32(plan.do))
        walk = parts.walk_of(k_smem + int32(plan.state), sizes)
        i, h = tile.turn(t, walk, sizes)  # while the last products end
        if one_buffer:
            mbarrier.wait(k_smem + int32(staging_empty), (t & 1) ^ 1)
        if paired:
            add_other(registers.acc, t, place_of_incoming_scores(k_smem), k_smem + int32(plan.scores_barriers))
        tile.give_half(registers, k_smem)
        tile.meet()
        rows_smem, term = k_smem + int32(plan.rows), row_term(walk.sequence.b, h, arrays, strides)
        tile.weigh(i, registers, k_smem, rows_smem, walk, term, sizes, score)
        tile.meet()
        tile.add_rows(registers.acc_dv, registers, k_smem + int32(plan.p), k_smem + int32(plan.do))
        done_with(k_smem + int32(do_empty))
        tile.add_rows(registers.acc_dk, registers, k_smem + int32(plan.ds), k_smem + int32(plan.q))
        done_with(k_smem + int32(q_empty))
        meet_all()  # all of dS is there
        leave_dq(k_smem, k_smem + int32(plan.ds), k_smem + int32(plan.dq), score)

    @inlined
    def carry(k_smem, strides, sizes):
        """What the carrier does: all of the block's parts of dQ, one behind the other."""
        state, t = k_smem + int32(plan.state), int32(0)
        while t < end_of(k_smem):
            i, h = tile.turn(t, parts.walk_of(state, sizes), sizes)
            free = k_smem + int32(staging_empty)
            carry_dq(i, h, t == 0, t + 1 == end_of(k_smem), k_smem + int32(plan.dq), state, free, strides, sizes)
            t = int32(t + 1)

    @inlined
    def begin(k_smem):
        """One thread: mbarriers of the tiles' places."""
        mbarrier.init(k_smem + int32(full), loaders)
        mbarrier.init(k_smem + int32(q_empty), config.workers)
        mbarrier.init(k_smem + int32(do_empty), config.workers)
        if one_buffer:
            mbarrier.init(k_smem + int32(staging_empty), 1)

    @inlined
    def take_ticket(k_smem, state, arrays):
        """Which work the block has, or the cluster: to `state`, where all threads see it behind."""
        if special.thread_index() == 0:
            begin(k_smem)
        if paired:
            if special.thread_index() == 0:
                begin_scores(k_smem + int32(plan.scores_barriers))
                fence.mbarrier_init()
                if cluster.rank() == 0:
                    ticket = memory.add(memory.address(arrays.turns, 0), uint32(1))
                    for rank in range(2):
                        cluster.store_b32(cluster.place_in(state, rank), ticket)
            cluster.sync()
        else:
            if special.thread_index() == 0:
                ld_st.store_b32(state, memory.add(memory.address(arrays.turns, 0), uint32(1)))
            cuda.syncthreads()

    @cuda.jit
    def flash_attention_mma_wide_carried(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        k_smem = shared.address(cuda.shared.array(0, uint8))  # (tile_n, head_dim_padded)
        state = k_smem + int32(plan.state)
        take_ticket(k_smem, state, arrays)
        b, h_kv, first_key = parts.work_of(int32(ld_st.load_b32(state)), sizes)
        sequence = sequence_of(b, arrays, strides, sizes)
        keys_left = int32(min(sequence.keys - first_key, config.tile_n))  # may be below 0
        begin, _, _, stop = query_range(sequence, first_key, first_key + keys_left - 1, sizes, config.tile_m)
        tiles = int32(stop - begin) if keys_left > 0 else int32(0)
        walk = Walk(sequence, h_kv, first_key, int32(begin), tiles)
        cuda.syncthreads()  # the ticket has been read
        if thread == 0:
            parts.keep(walk, state, arrays, strides, sizes)
            end = int32(tiles * divide(sizes.heads, sizes.heads_kv))
            ld_st.store_b32(k_smem + int32(end_at), uint32(end))
        cuda.syncthreads()  # what was kept is there
        if thread >= config.workers:
            give_registers()
            if thread < config.workers + loaders:
                fetch(k_smem, thread - config.workers, arrays, strides, sizes)
            elif thread < config.workers + loaders + 32:
                carry(k_smem, strides, sizes)
            return
        take_registers()
        registers = Registers(
            local.array(s_count, float64),  # acc (strips, own_columns / 8, 4)
            local.array(sum_count, float64),  # acc_dk (strips, columns / 8, 4)
            local.array(sum_count, float64),  # acc_dv (strips, columns / 8, 4)
            local.array(own_count, tile.fragment),  # own_frag
            local.array(other_count, tile.fragment),  # other_frag
            local.array(own_count, tile.fragment),  # p_frag (strips, 2, 4)
        )
        for x in range(sum_count):
            registers.acc_dk[x] = float64(0)
            registers.acc_dv[x] = float64(0)
        if tiles > 0:
            first = own_column()
            k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key) + first)
            load_own(k_smem, k_global, 8 * strides.k[2], 0, keys_left, head_dim - first, thread)
            v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key) + first)
            load_own(k_smem + int32(plan.v), v_global, 8 * strides.v[2], 0, keys_left, head_dim_v - first, thread)
        cp_async.commit_group()
        wait_all()
        meet_all()  # K and V are there
        t = int32(0)
        while t < end_of(k_smem):
            step(t, registers, k_smem, arrays, strides, sizes, score)
            t = int32(t + 1)

        walk = parts.walk_of(state, sizes)  # once more: not kept in registers while products need them
        sequence, h_kv, first_key = walk.sequence, walk.h_kv, walk.first_key
        keys_left = int32(min(sequence.keys - first_key, config.tile_n))
        first_row, column = tile.first_row_of_warp(), own_column() + (warp & (groups - 1)) * columns
        rows_left = int32(min(sizes.seqlen_k - first_key, config.tile_n) - first_row)
        valid = int32(keys_left - first_row)
        base = key_row(strides.dk, sequence, h_kv, first_key + first_row) + column
        nonfinite = store_dk(
            registers.acc_dk, score.scale, lane, arrays.dk, base, strides.dk[2], rows_left, valid, head_dim - column
        )
        base = key_row(strides.dv, sequence, h_kv, first_key + first_row) + column
        nonfinite |= store_dv(
            registers.acc_dv, float64(1), lane, arrays.dv, base, strides.dv[2], rows_left, valid, head_dim_v - column
        )
        meet_others()  # a row that is no number in some columns is written again as a whole
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return flash_attention_mma_wide_carried
