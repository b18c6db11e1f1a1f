"""dK and dV on tensor cores, all dtypes: mma.sync, ldmatrix, cp.async; since Ampere (sm_80).

Read mma/forward first. It is listing 7 of docs/backward.md. A block owns a key tile of one KV head. It loops over the
query tiles that see it, for each query head of the group, and holds the sums dK and dV in registers: no atomics, the
same bits in every run. A warp owns `warp_rows` keys. Scores are computed transposed:

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)               line 6
    dP^T = V dO^T   dS^T = P^T * (dP^T - delta)                       lines 7 and 9
    dV += P^T dO    dK += dS^T Q        and at the end dK *= scale    lines 10 to 12

The elements of P^T and dS^T that a lane holds are those it needs of the A operand of dV and dK. So neither leaves the
registers. If the sums of whole rows do not fit in registers, `column_groups` warps own the same keys. Each computes P^T
and dS^T for its part of the queries, they exchange them in shared memory, and each sums up some panels of columns of dK
and of dV. The products are those of backward_16bit.py or backward_wide.py.

A query tile has two halves: Q, and dO with lse and delta of its rows. With two stages both are loaded during the
products of the previous tile. One stage has room for twice as many queries, so each element of K and V that a warp
reads from shared memory is used twice as often. Then the halves take turns: the next dO is loaded while dK is summed up
from Q, and the next Q while dP is computed from dO. So dP is the first product of a tile then, and S the second.

FlashAttention (Dao et al., 2022, section 3 and appendix B) introduced the recomputation of P from lse, and delta =
rowsum(dO * O) in the derivative of the softmax.

Letters as in v2; acc_s, acc_dp, acc_dk and acc_dv are float32 accumulators; lse and delta of a tile
are in shared memory (query_columns.py).

Launch: grid (batch * heads_kv * key tiles). Rows are contiguous along dim, dk and dv as a whole.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, uint8, uint32

from ...ptx import cp_async, local, memory, shared, special
from ..recompute import keys as recompute
from ..score import fragments, user
from ..steps import async_tiles, numbers
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide, tiles_of
from ..steps.sequence import key_row, query_range
from . import backward_16bit, backward_own_dq, backward_scores, backward_walk, backward_wide, query_columns, work_tile


class Registers(NamedTuple):
    """A warp's parts of S^T, dP^T, dK and dV, and of operands. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    acc_dk: Any
    acc_dv: Any
    p_frag: Any
    ds_frag: Any
    k_frag: Any
    v_frag: Any
    other_frag: Any
    shared_frag: Any
    distance: Any
    loaded: Any  # what its scores need from global memory (kernels/score/reads.py)
    shown_bits: Any  # by the caller's mask, and by functions
    kept: Any  # which weights count (kernels/score/kept_weights.py)


class Smem(NamedTuple):
    """Shared addresses: the block's own K and V, and the stages of Q, of dO, and of lse with delta."""

    k: int
    v: int
    q: int
    do: int
    rows: int


def make(config):
    stages, size, plan, groups = config.stages, config.item_size, config.shared_layout(), config.column_groups
    shift, dv_at = groups.bit_length() - 1, plan.v if config.of_dk else 0  # where dV is staged
    q_stage, do_stage = (plan.do - plan.q) // stages, (plan.rows - plan.do) // stages
    rows_stage = 2 * max(size, 4) * config.tile_m
    strips, blocks, rows = config.strips, config.part // 8, config.warp_rows // 8
    s_count, real = strips * blocks * 4, numbers.of(config.compute_dtype).real
    dk_count = strips * config.summed(config.head_dim_padded) // 2 if config.of_dk else 1
    dv_count = strips * config.summed(config.head_dim_v_padded) // 2 if config.of_dv else 1
    load_q, load_do, load_k, load_v = async_tiles.of_backward(config)
    products = (backward_16bit if size == 2 else backward_wide).make(config)
    add_dk, add_dv = products.adder(config.head_dim_padded), products.adder(config.head_dim_v_padded)
    store_dk = products.storer(config.head_dim, config.head_dim_padded)
    store_dv = products.storer(config.head_dim_v, config.head_dim_v_padded)
    work_of, walk, columns = work_tile.of_keys(config), backward_walk.make(config), query_columns.make(config)
    has_functions, has_states, has_mask = user.present(config), bool(config.tile_states), config.has("mask")
    has_row_term, scores = fragments.chain(config).has_row_term, backward_scores.make(config)
    read, kept_weight = scores.read, scores.kept_weight
    recompute_keys, wait_all = recompute.make(config, config.of_dk, config.of_dv), cp_async.wait_group(0)
    own_dq = backward_own_dq.make(config) if config.of_dq else None

    @inlined
    def start_dp(acc_dp, rows_smem):
        """acc_dp <- -delta of each column: then the product gives dP - delta. Where weights drop, finish_dp subtracts
        it."""
        minus_delta = local.array(4, real)
        rows_at = columns.lane_at(rows_smem)
        for n in range(blocks):
            if not kept_weight.present:
                columns.minus_delta(minus_delta, n, rows_at)
            for r in range(rows):
                for x in range(2):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    acc_dp[at] = real(0) if kept_weight.present else minus_delta[(n % 2) * 2 + x]

    @inlined
    def finish_dp(acc_dp, kept, rows_smem, score):
        """acc_dp <- dP times how often its weight counts, minus delta."""
        minus_delta = local.array(4, real)
        rows_at = columns.lane_at(rows_smem)
        for n in range(blocks):
            columns.minus_delta(minus_delta, n, rows_at)
            for r in range(rows):
                for x in range(2):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    dp = acc_dp[at]
                    if kept_weight.present:
                        dp = dp * score.kept_count if (kept[r] >> uint32(2 * n + x)) & uint32(1) != 0 else real(0)
                    acc_dp[at] = dp + minus_delta[(n % 2) * 2 + x]

    @inlined
    def weigh(i, registers, k_smem, rows_smem, term, score, masked):
        """acc_s <- P^T times how often it counts, acc_dp <- dS^T, of query tile i. masked, a constant: some key is not
        seen."""
        lse = local.array(4, real)
        rows_at = columns.lane_at(rows_smem)
        for r in range(rows):
            within = walk.seen_columns(i, r, k_smem) if masked and not has_functions else uint32(0)
            seen = scores.shown(r, within, registers, masked)
            for n in range(blocks):
                columns.lse(lse, n, rows_at)
                for x in range(2):
                    scores.weigh(r, n, x, registers, term, lse[(n % 2) * 2 + x], seen, score, masked)
            if config.of_dv:
                products.round_row(registers.acc_s, registers.p_frag, r)
            if config.of_dk:
                products.round_row(registers.acc_dp, registers.ds_frag, r)

    @inlined
    def load_queries(i, stage, source, smem, strides, sizes):
        """Start the copies of Q of query tile i, at address `source`, to stage `stage`."""
        rows_left = int32(int32(walk.seqlen_q(smem.k, sizes)) - i * int32(config.tile_m))
        to = smem.q + stage * q_stage
        load_q(to, source, size * strides.q[2], 0, rows_left, config.head_dim, special.thread_index())

    @inlined
    def load_others(i, stage, others, smem, arrays, strides, sizes):
        """Start the copies of dO, lse and delta of query tile i to stage `stage`."""
        do_source, head_at = others
        queries, to = walk.seqlen_q(smem.k, sizes), smem.do + stage * do_stage
        rows_left = int32(int32(queries) - i * int32(config.tile_m))
        load_do(to, do_source, size * strides.do[2], 0, rows_left, config.head_dim_v, special.thread_index())
        # This order of additions leaves nothing to be kept in a register between tiles.
        to = smem.rows + stage * rows_stage if stages > 1 else smem.k + int32(plan.rows)
        columns.start(i, head_at, to, queries, arrays)

    @inlined
    def prefetch(i, heads_left, stage, smem, arrays, strides, sizes):
        """Wait for dO of tile i, with two stages also for Q, and start the copies for which there is room now."""
        next_i, next_heads_left, next_stage = i, heads_left, stage
        if stages > 1:
            next_i, next_heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
            next_stage = int32(stage ^ 1)
            others = walk.others_at(next_i, next_heads_left, strides, sizes, smem.k)
        queries = walk.queries_at(next_i, next_heads_left, strides, smem.k)
        wait_all()
        cuda.syncthreads()  # it has arrived, and all threads have finished with the last tile
        if next_heads_left > 0 and not config.of_dq:  # then Q comes before
            load_queries(next_i, next_stage, queries, smem, strides, sizes)
            if stages > 1:
                load_others(next_i, next_stage, others, smem, arrays, strides, sizes)
        cp_async.commit_group()

    @inlined
    def prefetch_second(i, heads_left, smem, arrays, strides, sizes):
        """With one stage, after all threads have finished with dO of tile i: start the copies of the next dO."""
        next_i, next_heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
        others = walk.others_at(next_i, next_heads_left, strides, sizes, smem.k)
        cuda.syncthreads()
        if next_heads_left > 0:
            load_others(next_i, 0, others, smem, arrays, strides, sizes)
        cp_async.commit_group()

    @inlined
    def scores_of_tile(stage, registers, smem):
        """S^T and dP^T of the query tile in stage `stage`."""
        q_tile, do_tile = smem.q + stage * q_stage, smem.do + stage * do_stage
        if stages > 1:
            products.multiply_s(registers.acc_s, registers.k_frag, registers.other_frag, smem.k, q_tile)
        if config.of_dk:
            if size == 2:
                start_dp(registers.acc_dp, smem.rows + stage * rows_stage)
            products.multiply_dp(registers.acc_dp, registers.v_frag, registers.other_frag, smem.v, do_tile)
        if stages == 1:  # Q arrives only now
            wait_all()
            cuda.syncthreads()
            products.multiply_s(registers.acc_s, registers.k_frag, registers.other_frag, smem.k, q_tile)

    @inlined
    def gradients_of_tile(i, heads_left, stage, registers, smem, arrays, strides, sizes, score):
        """dK and dV += the contribution of the query tile in stage `stage`, and dQ of it with config.of_dq."""
        p_frag, ds_frag = registers.p_frag, registers.ds_frag
        other_frag, shared_frag = registers.other_frag, registers.shared_frag
        p_at, ds_at = smem.k + int32(plan.p), smem.k + int32(plan.ds)
        if config.of_dv:
            products.to_operand(registers.acc_s, p_frag, p_at)
        if config.of_dk:
            products.to_operand(registers.acc_dp, ds_frag, ds_at)
        products.meet()
        if config.of_dv:
            add_dv(registers.acc_dv, p_frag, other_frag, shared_frag, smem.do + stage * do_stage, p_at)
        if stages == 1:
            prefetch_second(i, heads_left, smem, arrays, strides, sizes)
        elif groups > 1:
            products.sync_owners()  # they have finished with P
        if config.of_dk:
            add_dk(registers.acc_dk, ds_frag, other_frag, shared_frag, smem.q + stage * q_stage, ds_at)
        if config.of_dq:
            own_dq.put(ds_frag, ds_at, special.thread_index())
            cuda.syncthreads()  # dS^T is there, and all threads have finished with Q
            next_i, next_heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
            if next_heads_left > 0:
                load_queries(next_i, 0, walk.queries_at(next_i, next_heads_left, strides, smem.k), smem, strides, sizes)
            work = walk.work_again(smem.k, arrays, strides, sizes)
            h = int32((work.h_kv + 1) * divide(sizes.heads, sizes.heads_kv) - heads_left)
            own_dq.write(i, work.sequence, h, smem.k, arrays, strides, sizes, score)

    @inlined
    def step(i, heads_left, stage, registers, smem, arrays, strides, sizes, score, masked):
        """One query tile of one head. masked, a constant: some query does not see some key."""
        if read.before:
            walk.load_for_scores(i, heads_left, registers, smem.k, arrays, strides, sizes, masked)
        prefetch(i, heads_left, stage, smem, arrays, strides, sizes)
        scores_of_tile(stage, registers, smem)
        if kept_weight.present:
            walk.find_kept(i, heads_left, registers.kept, smem.k, arrays, sizes)
        rows_smem = smem.rows + stage * rows_stage
        if config.of_dk and (kept_weight.present or size > 2):
            finish_dp(registers.acc_dp, registers.kept, rows_smem, score)
        if read.behind:
            walk.load_for_scores(i, heads_left, registers, smem.k, arrays, strides, sizes, masked)
        if has_functions and masked:
            walk.ask_functions(i, heads_left, registers, smem.k, arrays, strides, score)
        term = real(0)
        if has_row_term:
            term = walk.term_of(heads_left, smem.k, arrays, strides)
            walk.distances(i, smem.k, registers.distance)
        weigh(i, registers, smem.k, rows_smem, term, score, masked)
        gradients_of_tile(i, heads_left, stage, registers, smem, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_mma_dkdv(arrays, strides, sizes, score):
        thread = special.thread_index()
        k_smem = async_tiles.aligned(shared.address(cuda.shared.array(0, uint8)))
        smem = Smem(
            k_smem,  # (tile_n, head_dim_padded)
            k_smem + int32(plan.v),  # (tile_n, head_dim_v_padded)
            k_smem + int32(plan.q),  # (stages, tile_m, head_dim_padded)
            k_smem + int32(plan.do),  # (stages, tile_m, head_dim_v_padded)
            k_smem + int32(plan.rows),  # (stages, tile_m)
        )
        work = work_of(special.block_index(), arrays, strides, sizes)
        sequence, h_kv, first_key = work.sequence, work.h_kv, work.first_key
        keys_left = int32(min(sequence.keys - first_key, config.tile_n))  # may be below 0
        if config.packed:
            if keys_left <= 0:  # simt/outside.py writes what is behind the valid keys
                return
        group = divide(sizes.heads, sizes.heads_kv)
        begin_, free_, cut_, stop_ = query_range(sequence, first_key, first_key + keys_left - 1, sizes, config.tile_m)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # drop the tiles before the first and after the last query to which it leaves a key
            h = h_kv * group
            end_key = first_key + max(keys_left, int32(1))
            first, end, _, _ = read.ranges(sequence.b, h, group, first_key, end_key, arrays, strides, sizes)
            begin = max(begin, divide(first, config.tile_m))
            stop = min(stop, tiles_of(end, config.tile_m))
        if config.of_dq:  # a query that sees no key has a dQ, too
            begin, stop = int32(0), tiles_of(sequence.seqlen_q, config.tile_m)
            if keys_left < config.tile_n:  # what does not exist is hidden: its K is 0, but its dS might be Inf
                free, cut = int32(0), int32(0)
        walk.set_up_state(work, begin, stop, free, cut, arrays, strides, sizes, k_smem, thread)
        cuda.syncthreads()

        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, part / 8, 4)
            local.array(s_count, real),  # acc_dp (strips, part / 8, 4)
            local.array(dk_count, real),  # acc_dk (strips, columns / 8, 4)
            local.array(dv_count, real),  # acc_dv (strips, columns / 8, 4)
            local.array(products.weight_count, products.register),  # p_frag
            local.array(products.weight_count, products.register),  # ds_frag
            local.array(products.s_count, products.register),  # k_frag
            local.array(products.dp_count, products.register),  # v_frag
            local.array(products.other_count, products.register),  # other_frag: Q or dO
            local.array(products.shared_count, products.shared_type),  # shared_frag: P^T or dS^T from shared memory
            local.array(rows, real),  # distance: q_pos - k_pos of each row at the lane's first column
            local.array(read.bias_words, read.bias_type),  # loaded (2 * strips, part / 8, 2), in 16 bits two in one
            local.array(rows if has_functions else read.bits_words, uint32),  # shown_bits
            local.array(kept_weight.words, uint32),  # kept
        )
        for x in range(dk_count):
            registers.acc_dk[x] = real(0)
        for x in range(dv_count):
            registers.acc_dv[x] = real(0)

        # stage: which stage is in use; heads_left: heads of the group that are left.
        i, stage, heads_left = begin, int32(0), int32(0)
        whole = begin >= free and begin < cut and not has_functions and size == 2
        if begin < stop and (config.of_dq or keys_left > 0):
            heads_left = group
            if has_states:
                i, heads_left = walk.from_tile(i, heads_left, smem.k, arrays, strides)
                whole = walk.is_unmasked(i, heads_left, smem.k, arrays, strides)
        if heads_left > 0:
            k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key))
            load_k(smem.k, k_global, size * strides.k[2], 0, keys_left, config.head_dim, thread)
            if config.of_dk:
                v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key))
                load_v(smem.v, v_global, size * strides.v[2], 0, keys_left, config.head_dim_v, thread)
            others = walk.others_at(i, heads_left, strides, sizes, smem.k)
            load_others(i, stage, others, smem, arrays, strides, sizes)
            if stages > 1 or config.of_dq:
                queries = walk.queries_at(i, heads_left, strides, smem.k)
                load_queries(i, stage, queries, smem, strides, sizes)
        cp_async.commit_group()
        if config.in_registers:
            wait_all()
            cuda.syncthreads()
            products.load_own(registers.k_frag, registers.v_frag, smem.k, smem.v)

        while heads_left > 0:
            # Query tiles of which some query does not see some key; then those that are seen whole; then, with a left
            # window, again some of the first kind; and all this for each head of the group.
            while heads_left > 0 and not whole:
                step(i, heads_left, stage, registers, smem, arrays, strides, sizes, score, TRUE)
                stage = int32(stage ^ (stages - 1))
                i, heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
                whole = walk.is_unmasked(i, heads_left, smem.k, arrays, strides)
            while heads_left > 0 and whole:
                step(i, heads_left, stage, registers, smem, arrays, strides, sizes, score, FALSE)
                stage = int32(stage ^ (stages - 1))
                i, heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
                whole = walk.is_unmasked(i, heads_left, smem.k, arrays, strides)

        # Write dK and dV, in 16 bits by way of the place of the warp's own rows of K and V.
        wait_all()
        if config.of_dq:
            cuda.syncthreads()  # all warps have read K for the last time
        products.sync_owners()  # they have read these rows for the last time
        # From the state of the block: kept in registers through the loop, it would take those that S needs.
        sequence, h_kv, first_key = walk.work_again(k_smem, arrays, strides, sizes)
        keys_left = int32(min(sequence.keys - first_key, config.tile_n))
        rows_left = keys_left if config.packed else int32(min(sizes.seqlen_k - first_key, config.tile_n))
        nonfinite = uint32(0)
        if config.of_dk:
            base, stride = key_row(strides.dk, sequence, h_kv, first_key), strides.dk[2]
            nonfinite |= store_dk(registers.acc_dk, score.scale, k_smem, arrays.dk, base, stride, rows_left, keys_left)
        if config.of_dv:
            base, stride, to = key_row(strides.dv, sequence, h_kv, first_key), strides.dv[2], k_smem + int32(dv_at)
            nonfinite |= store_dv(registers.acc_dv, real(1), to, arrays.dv, base, stride, rows_left, keys_left)
        if groups > 1:
            products.sync_owners()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            thread = special.thread_index()
            lane, first_row = thread & int32(31), int32((thread >> int32(5 + shift)) * config.warp_rows)
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return flash_attention_mma_dkdv
