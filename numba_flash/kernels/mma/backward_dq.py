"""dQ on tensor cores, all dtypes: mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read mma/forward and mma/backward_dkdv first. It is listing 8 of docs/backward.md. A block owns a query tile of one
head. It loops over the key tiles that the queries see, like the forward, but without an online softmax: lse is known. A
warp owns `warp_rows` queries and computes

    S = Q K^T      P = 2^(scale_log2 S - lse_log2)                   line 6
    dP = dO V^T    dS = P * (dP - delta)                             lines 7 and 8
    dQ += dS K                         and at the end dQ *= scale    lines 9 and 10

The elements of dS that a lane holds are those it needs of the A operand of dS K, so dS never leaves the registers. With
`column_groups` warps share queries and exchange dS, as in mma/backward_dkdv. With one stage K and V take turns as Q and
dO do there: the next V is loaded while dQ is summed up from K, and the next K while dP is computed from V.

Letters as in v2. The products are those of backward_16bit.py or backward_wide.py.

Launch: grid (batch * heads * query tiles). Rows are contiguous along dim, dq as a whole.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, uint8, uint32

from ...ptx import cp_async, local, memory, shared, special
from ..recompute import queries as recompute
from ..score import fragments, tile_walk, user
from ..steps import async_tiles, numbers
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide, tiles_of
from ..steps.sequence import key_range, query_row
from . import backward_16bit, backward_dq_walk, backward_scores, backward_wide, work_tile


class Registers(NamedTuple):
    """A warp's parts of S, dP and dQ, and of operands. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    acc_dq: Any
    ds_frag: Any
    q_frag: Any
    do_frag: Any
    other_frag: Any
    shared_frag: Any
    distance: Any
    loaded: Any  # what its scores need from global memory (kernels/score/reads.py)
    shown_bits: Any  # by the caller's mask, and by functions
    kept: Any  # which weights count (kernels/score/kept_weights.py)


class Smem(NamedTuple):
    """Shared addresses: the block's own Q and dO, the stages of K and V, and the place where warps exchange dS."""

    q: int
    do: int
    k: int
    v: int
    ds: int


def make(config):
    tile_m, tile_n, stages, size = config.tile_m, config.tile_n, config.stages, config.item_size
    plan, groups, shift = config.shared_layout(), config.column_groups, config.column_groups.bit_length() - 1
    k_stage, v_stage = (plan.v - plan.k) // stages, (plan.ds - plan.v) // stages  # bytes
    strips, blocks, rows = config.strips, config.part // 8, config.warp_rows // 8
    s_count, dq_count = strips * blocks * 4, strips * config.summed(config.head_dim_padded) // 2
    real = numbers.of(config.compute_dtype).real
    load_q, load_do, load_k, load_v = async_tiles.of_backward(config)
    products = (backward_16bit if size == 2 else backward_wide).make(config)
    add_dq = products.adder(config.head_dim_padded)
    store_dq = products.storer(config.head_dim, config.head_dim_padded)
    work_of, walk = work_tile.of_queries(config, tile_m), backward_dq_walk.make(config)
    has_functions, has_mask, states = user.present(config), config.has("mask"), tile_walk.make(config)
    chain, scores = fragments.chain(config), backward_scores.make(config)
    read, dropout = scores.read, scores.kept_weight
    recompute_queries, wait_all = recompute.make(config), cp_async.wait_group(0)

    @inlined
    def load_keys(tile, stage, strides, smem):
        """Start the copies of K of a KeyTile to stage `stage`."""
        to = smem.k + stage * k_stage
        load_k(to, tile.k, size * strides.k[2], 0, tile.keys_left, config.head_dim, special.thread_index())

    @inlined
    def load_values(tile, stage, strides, smem):
        """Start the copies of V of a KeyTile to stage `stage`."""
        to = smem.v + stage * v_stage
        load_v(to, tile.v, size * strides.v[2], 0, tile.keys_left, config.head_dim_v, special.thread_index())

    @inlined
    def prefetch(j, stage, begin, smem, arrays, strides):
        """Wait for V of tile j, with two stages also for K, and start the copies for which there is room now."""
        next_j = walk.next_tile(j, begin, smem.q, arrays, strides)
        tile = walk.key_tile(j if stages == 1 else next_j, strides, smem.q)
        wait_all()
        cuda.syncthreads()  # it has arrived, and all threads have finished with the last tile
        if stages == 1:
            load_keys(tile, stage, strides, smem)
        elif next_j >= begin:
            load_keys(tile, int32(stage ^ 1), strides, smem)
            load_values(tile, int32(stage ^ 1), strides, smem)
        cp_async.commit_group()

    @inlined
    def prefetch_second(j, begin, smem, arrays, strides):
        """With one stage: wait for K of tile j and start the copies of V of the next one."""
        next_j = walk.next_tile(j, begin, smem.q, arrays, strides)
        tile = walk.key_tile(next_j, strides, smem.q)
        wait_all()
        cuda.syncthreads()  # K has arrived, and all threads have finished with V
        if next_j >= begin:
            load_values(tile, 0, strides, smem)
        cp_async.commit_group()

    @inlined
    def scores_of_tile(j, stage, begin, registers, smem, arrays, strides):
        """S and dP of the key tile in stage `stage`."""
        k_tile, v_tile = smem.k + stage * k_stage, smem.v + stage * v_stage
        if stages > 1:
            products.multiply_s(registers.acc_s, registers.q_frag, registers.other_frag, smem.q, k_tile)
        if size == 2:
            walk.start_dp(registers.acc_dp, smem.q)
        products.multiply_dp(registers.acc_dp, registers.do_frag, registers.other_frag, smem.do, v_tile)
        if stages == 1:  # K arrives only now
            prefetch_second(j, begin, smem, arrays, strides)
            products.multiply_s(registers.acc_s, registers.q_frag, registers.other_frag, smem.q, k_tile)

    @inlined
    def weigh(j, registers, q_smem, term, score, masked):
        """acc_dp <- dS of key tile j. masked, a constant: some columns are not seen by some rows."""
        for r in range(rows):
            state = walk.row_state(r, q_smem)
            within = uint32(0)
            if masked and not has_functions:
                within = scores.within(scores.first_column(j), state.first, state.end)
            seen = scores.shown(r, within, registers, masked)
            for n in range(blocks):
                for x in range(2):
                    scores.weigh(r, n, x, registers, term, state.lse, seen, score, masked)
            products.round_row(registers.acc_dp, registers.ds_frag, r)

    @inlined
    def step(j, stage, begin, registers, smem, term, arrays, strides, sizes, score, masked):
        """One key tile. masked, a constant: some row does not see some key."""
        if read.before:
            walk.load_for_scores(j, registers, smem.q, arrays, strides, sizes, masked)
        prefetch(j, stage, begin, smem, arrays, strides)
        if chain.has_row_term:
            walk.distances(j, smem.q, registers.distance)
        scores_of_tile(j, stage, begin, registers, smem, arrays, strides)
        if dropout.present:
            walk.find_kept(j, registers.kept, smem.q, arrays, sizes)
        if dropout.present or size > 2:
            walk.finish_dp(registers.acc_dp, registers.kept, smem.q, score)
        if read.behind:
            walk.load_for_scores(j, registers, smem.q, arrays, strides, sizes, masked)
        if has_functions and masked:
            walk.ask_functions(j, registers, smem.q, arrays, strides, score)
        weigh(j, registers, smem.q, term, score, masked)
        products.to_operand(registers.acc_dp, registers.ds_frag, smem.ds)
        products.meet()
        k_tile = smem.k + stage * k_stage
        add_dq(registers.acc_dq, registers.ds_frag, registers.other_frag, registers.shared_frag, k_tile, smem.ds)

    @cuda.jit
    def flash_attention_mma_dq(arrays, strides, sizes, score):
        thread = special.thread_index()
        tile = work_of(special.block_index(), arrays, strides, sizes)
        sequence = tile.sequence
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, tile_m))
        if config.packed:
            if queries_left <= 0:
                return

        q_smem = async_tiles.aligned(shared.address(cuda.shared.array(0, uint8)))
        smem = Smem(
            q_smem,  # (tile_m, head_dim_padded)
            q_smem + int32(plan.do),  # (tile_m, head_dim_v_padded)
            q_smem + int32(plan.k),  # (stages, tile_n, head_dim_padded)
            q_smem + int32(plan.v),  # (stages, tile_n, head_dim_v_padded)
            q_smem + int32(plan.ds),
        )

        end_query = tile.first_query + queries_left
        begin_, free_, cut_, stop_ = key_range(sequence, tile.first_query, end_query - 1, sizes, tile_n)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # drop the key tiles before the first and after the last in which it leaves a key
            first, end, _, _ = read.ranges(sequence.b, tile.h, 1, tile.first_query, end_query, arrays, strides, sizes)
            begin = max(begin, divide(first, tile_n))
            stop = max(min(stop, tiles_of(end, tile_n)), begin)
        if states.present:
            states_row = states.row(sequence.b, tile.h, tile.first_query, arrays, strides)
            begin, stop = states.trim(states_row, begin, stop, arrays, strides)
        walk.set_up_state(tile, free, cut, arrays, strides, sizes, q_smem, thread)
        cuda.syncthreads()

        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, part / 8, 4)
            local.array(s_count, real),  # acc_dp (strips, part / 8, 4)
            local.array(dq_count, real),  # acc_dq (strips, columns / 8, 4)
            local.array(products.weight_count, products.register),  # ds_frag
            local.array(products.s_count, products.register),  # q_frag
            local.array(products.dp_count, products.register),  # do_frag
            local.array(products.other_count, products.register),  # other_frag: K or V
            local.array(products.shared_count, products.shared_type),  # shared_frag: dS from shared memory
            local.array(rows, real),  # distance: q_pos - k_pos of each row at the lane's first column
            local.array(read.bias_words, read.bias_type),  # loaded (2 * strips, part / 8, 2), in 16 bits two in one
            local.array(rows if has_functions else read.bits_words, uint32),  # shown_bits
            local.array(dropout.words, uint32),  # kept
        )
        for x in range(dq_count):
            registers.acc_dq[x] = real(0)

        j, stage = int32(stop - 1), int32(0)  # stage: which stage is in use
        if j >= begin:
            q_global = memory.address(arrays.q, query_row(strides.q, sequence, tile.h, tile.first_query))
            do_global = memory.address(arrays.do, query_row(strides.do, sequence, tile.h, tile.first_query))
            load_q(smem.q, q_global, size * strides.q[2], 0, queries_left, config.head_dim, thread)
            load_do(smem.do, do_global, size * strides.do[2], 0, queries_left, config.head_dim_v, thread)
            first_tile = walk.key_tile(j, strides, q_smem)
            load_values(first_tile, stage, strides, smem)
            if stages > 1:
                load_keys(first_tile, stage, strides, smem)
        cp_async.commit_group()
        term = chain.row_term(sequence.b, tile.h, arrays, strides)
        if config.in_registers:
            wait_all()
            cuda.syncthreads()
            products.load_own(registers.q_frag, registers.do_frag, smem.q, smem.do)

        whole = j >= free and j < cut and not has_functions and size == 2
        if states.present:
            whole = walk.is_unmasked(j, q_smem, arrays, strides)
        while j >= begin:
            # Key tiles that some row sees only in part; then those that every row sees whole; then, with a left window,
            # again some that are seen in part.
            while j >= begin and not whole:
                step(j, stage, begin, registers, smem, term, arrays, strides, sizes, score, TRUE)
                j, stage = walk.next_tile(j, begin, q_smem, arrays, strides), int32(stage ^ (stages - 1))
                whole = walk.is_unmasked(j, q_smem, arrays, strides)
            while j >= begin and whole:
                step(j, stage, begin, registers, smem, term, arrays, strides, sizes, score, FALSE)
                j, stage = walk.next_tile(j, begin, q_smem, arrays, strides), int32(stage ^ (stages - 1))
                whole = walk.is_unmasked(j, q_smem, arrays, strides)

        # Write dQ, in 16 bits by way of the place of the warp's own rows of Q. Where it goes is in the state of the
        # block: kept in registers through the loop, it would take those that S needs.
        wait_all()
        products.sync_owners()  # they have read these rows for the last time
        tile = walk.work_again(q_smem, arrays, strides, sizes)
        queries_left = int32(min(tile.sequence.seqlen_q - tile.first_query, tile_m))
        base, stride = query_row(strides.dq, tile.sequence, tile.h, tile.first_query), strides.dq[2]
        nonfinite = store_dq(registers.acc_dq, score.scale, q_smem, arrays.dq, base, stride, queries_left, queries_left)
        if groups > 1:
            products.sync_owners()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            thread = special.thread_index()
            lane, first_row = thread & int32(31), int32((thread >> int32(5 + shift)) * config.warp_rows)
            own = work_tile.query_tile(tile)
            recompute_queries(nonfinite, first_row, lane, own, arrays, strides, sizes, score)

    return flash_attention_mma_dq
