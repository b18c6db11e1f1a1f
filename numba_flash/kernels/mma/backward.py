"""dK and dV, or dQ, on tensor cores, all dtypes: mma.sync, ldmatrix, cp.async; since Ampere (sm_80).

Read mma/forward first. A block owns a tile of rows of one side and loops over the tiles of the other side. A warp owns
`warp_rows` rows. With config.of_keys a block owns keys of one KV head, as in listing 7 of docs/backward.md, and loops
over the query tiles that see them, for each query head of the group. Scores are computed transposed:

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)               line 6
    dP^T = V dO^T   dS^T = P^T * (dP^T - delta)                       lines 7 and 9
    dV += P^T dO    dK += dS^T Q        and at the end dK *= scale    lines 10 to 12

Otherwise it owns queries of one head, as in listing 8, and loops over the key tiles that they see. That is the loop of
the forward without an online softmax: lse is known.

    S = Q K^T      P = 2^(scale_log2 S - lse_log2)                    line 6
    dP = dO V^T    dS = P * (dP - delta)                              lines 7 and 8
    dQ += dS K                          and at the end dQ *= scale    lines 9 and 10

Sums are held in registers: no atomics, the same bits in every run. The elements of P and dS that a lane holds are those
it needs of the A operand of the next product. So neither leaves the registers. If the sums of whole rows do not fit in
registers, `column_groups` warps own the same rows. Each computes P and dS for its part of the columns, they exchange
them in shared memory, and each sums up some panels of columns of the gradients. The products are those of
backward_16bit.py or backward_fp32_fp64.py. What differs between the two sides is in backward_of_keys.py and
backward_of_queries.py.

A tile of the other side has two halves: for S there is Q or K, for dP there is dO, with lse and delta of its rows, or
V. With two stages both are loaded during the products of the previous tile. One stage has room for twice as many rows,
so each element of the own tiles that a warp reads from shared memory is used twice as often. Then the halves take
turns: the next tile for dP is loaded while dK or dQ is summed up, and the next one for S while dP is computed. So dP is
the first product of a tile then, and S the second.

A block whose tile has all keys of a head computes dQ, too (backward_own_dq.py). With config.only_tile the queries are
one tile as well: then there is no loop, and the block computes lse and delta itself (backward_preprocess.py).

FlashAttention (Dao et al., 2022, section 3 and appendix B) introduced the recomputation of P from lse, and delta =
rowsum(dO * O) in the derivative of the softmax.

Letters as in v2; acc_s, acc_dp, acc_ds and acc_dv are accumulators. Launch: grid (batch * heads_kv * key tiles), or
(batch * heads * query tiles). Rows are contiguous along dim, gradients as a whole.
"""

from collections import namedtuple

from numba import cuda, int32, uint8, uint32

from ...ptx import cp_async, local, shared, special
from ..recompute import keys, queries
from ..score import fragments, user
from ..steps import async_tiles, block_state, numbers
from ..steps.basics import FALSE, TRUE, divide, inlined
from ..steps.sequence import key_row, query_row
from . import (
    backward_16bit,
    backward_fp32_fp64,
    backward_of_keys,
    backward_of_queries,
    backward_own_dq,
    backward_scores,
    gradient_rows,
    work_tile,
)  # fmt: skip

# A warp's parts of S, dP and the sums, and of operands. Shapes are in the kernel.
Registers = namedtuple(
    "Registers",
    "acc_s acc_dp acc_ds acc_dv p_frag ds_frag own_s_frag own_dp_frag "
    "other_frag shared_frag distance loaded shown_bits kept",
)


def make(config):
    stages, size, plan, groups = config.stages, config.item_size, config.shared_layout(), config.column_groups
    of_keys, of_ds, of_p, one_stage = config.of_keys, config.of_ds, config.of_p, stages == 1
    only_tile = config.only_tile
    s_stage, dp_stage = (plan.other_dp - plan.other_s) // stages, (plan.p - plan.other_dp) // stages
    strips, blocks, rows = config.strips, config.part // 8, config.warp_rows // 8
    s_count, real = strips * blocks * 4, numbers.of(config.compute_dtype).real
    ds_count = strips * config.summed(config.head_dim_padded) // 2 if of_ds else 1
    dv_count = strips * config.summed(config.head_dim_v_padded) // 2 if of_p else 1
    products = (backward_16bit if size == 2 else backward_fp32_fp64).make(config)
    add_ds, add_dv = products.adder(config.head_dim_padded), products.adder(config.head_dim_v_padded)
    store_ds = gradient_rows.storer(config, config.head_dim, config.head_dim_padded)
    store_dv = gradient_rows.storer(config, config.head_dim_v, config.head_dim_v_padded)
    walk, scores = (backward_of_keys if of_keys else backward_of_queries).make(config), backward_scores.make(config)
    read, kept_weight, delta_first = scores.read, scores.kept_weight, config.delta_first
    has_functions, has_mask_mod, chain = user.present(config), config.has("mask_mod"), fragments.chain(config)
    recompute = keys.make(config, of_ds, of_p) if of_keys else queries.make(config)
    own_dq = backward_own_dq.make(config) if config.with_dq else None
    shift, wait_all = groups.bit_length() - 1, cp_async.wait_group(0)

    @inlined
    def is_unmasked(tile, smem, arrays, strides):
        """Whether every row sees every column of a tile, and the tile has code of its own for that."""
        if scores.always_masked:
            return False
        free, cut = block_state.get_range(smem + int32(plan.state))  # both sides store it first
        whole = tile.t >= free and tile.t < cut
        if has_mask_mod:
            if whole and walk.exists(tile):
                whole = not walk.needs_mask(tile, smem, arrays, strides)
        return whole

    @inlined
    def prefetch(tile, stage, smem, arrays, strides, sizes):
        """Wait for a tile, with one stage only for its half for dP, and start the copies for which there is room now:
        of the next tile, or of the other half."""
        wanted, to = tile, stage
        if not one_stage:
            wanted, to = walk.following(tile, smem, arrays, strides), int32(stage ^ 1)
        source = walk.sources(wanted, TRUE, FALSE if one_stage else TRUE, smem, strides, sizes)
        wait_all()
        cuda.syncthreads()  # it has arrived, and all threads have finished with the last tile
        if (one_stage or walk.exists(wanted)) and not config.with_dq:  # then Q comes before
            walk.load_s(wanted, source, to, smem, strides, sizes)
            if not one_stage:
                walk.load_dp(wanted, source, to, smem, arrays, strides, sizes)
        cp_async.commit_group()

    @inlined
    def prefetch_dp(tile, smem, arrays, strides, sizes):
        """Runs with one stage, after the last product of a tile's half for dP: waits for its other half, and starts
        the copies of the next tile's half."""
        following = walk.following(tile, smem, arrays, strides)
        source = walk.sources(following, FALSE, TRUE, smem, strides, sizes)
        wait_all()
        cuda.syncthreads()
        if walk.exists(following):
            walk.load_dp(following, source, int32(0), smem, arrays, strides, sizes)
        cp_async.commit_group()

    @inlined
    def scores_of_tile(tile, stage, registers, smem, arrays, strides, sizes, score):
        """S and dP of the tile in stage `stage`."""
        for_s, for_dp = smem + int32(plan.other_s) + stage * s_stage, smem + int32(plan.other_dp) + stage * dp_stage
        if not one_stage:
            products.multiply_s(registers.acc_s, registers.own_s_frag, registers.other_frag, smem, for_s)
        if of_ds:
            if delta_first:
                walk.add_deltas(stage, registers, smem, score)
            own = smem + int32(plan.own_dp)
            products.multiply_dp(registers.acc_dp, registers.own_dp_frag, registers.other_frag, own, for_dp)
        if one_stage:  # the half for S arrives only now, but that of an only tile came with the other
            if not of_keys:
                prefetch_dp(tile, smem, arrays, strides, sizes)
            elif not only_tile:  # P needs the other half's lse, and dV its dO
                wait_all()
                cuda.syncthreads()
            products.multiply_s(registers.acc_s, registers.own_s_frag, registers.other_frag, smem, for_s)

    @inlined
    def weigh(tile, stage, registers, smem, term, score, masked):
        """acc_s <- P times how often it counts, acc_dp <- dS. masked, a constant: some row does not see some
        column."""
        lse, columns_at = local.array(4, real), walk.columns_at(stage, smem)
        for r in range(rows):
            row = walk.own_row(r, smem, TRUE if masked and not has_functions else FALSE)
            seen = scores.shown(r, tile.t, row, registers, masked)
            walk.read_bias(registers.loaded, r, smem)
            for n in range(blocks):
                walk.lse(lse, n, row, columns_at)
                for x in range(2):
                    scores.weigh(r, n, x, registers, term, lse[(n % 2) * 2 + x], seen, score, masked)
            if of_p:
                products.round_row(registers.acc_s, registers.p_frag, r)
            if of_ds:
                products.round_row(registers.acc_dp, registers.ds_frag, r)

    @inlined
    def gradients_of_tile(tile, stage, registers, smem, arrays, strides, sizes, score):
        """The sums += the contribution of the tile in stage `stage`; with config.with_dq also dQ of it."""
        p_frag, ds_frag = registers.p_frag, registers.ds_frag
        other_frag, shared_frag = registers.other_frag, registers.shared_frag
        p_at, ds_at = smem + int32(plan.p), smem + int32(plan.ds)
        for_s, for_dp = smem + int32(plan.other_s) + stage * s_stage, smem + int32(plan.other_dp) + stage * dp_stage
        if of_p:
            products.to_operand(registers.acc_s, p_frag, p_at)
        if of_ds:
            products.to_operand(registers.acc_dp, ds_frag, ds_at)
        products.meet()
        if of_p:
            add_dv(registers.acc_dv, p_frag, other_frag, shared_frag, for_dp, p_at)
        if of_keys and one_stage and not only_tile:
            prefetch_dp(tile, smem, arrays, strides, sizes)
        elif of_keys and groups > 1:
            products.sync_owners()  # they have finished with P
        if of_ds and not only_tile:
            add_ds(registers.acc_ds, ds_frag, other_frag, shared_frag, for_s, ds_at)
        if config.with_dq:
            own_dq.put(ds_frag, ds_at, special.thread_index())
            cuda.syncthreads()  # dS^T is there, and all threads have finished with Q, or with an only tile's dO
            if not only_tile:
                following = walk.following(tile, smem, arrays, strides)
                if walk.exists(following):
                    source = walk.sources(following, TRUE, FALSE, smem, strides, sizes)
                    walk.load_s(following, source, int32(0), smem, strides, sizes)
            work = walk.work_again(smem, arrays, strides, sizes)
            h = int32((work.h_kv + 1) * divide(sizes.heads, sizes.heads_kv) - tile.heads_left)
            own_dq.write(tile.t, work.sequence, h, smem, arrays, strides, sizes, score)
        if only_tile:  # behind dQ, whose sums then have the registers of dK's
            add_ds(registers.acc_ds, ds_frag, other_frag, shared_frag, for_s, ds_at)

    @inlined
    def step(tile, stage, registers, smem, arrays, strides, sizes, score, masked):
        """One tile. masked, a constant: some row does not see some column."""
        if read.before:
            scores.load(tile.t, walk.origin_of(tile, smem, strides), registers, arrays, strides, sizes, masked)
        prefetch(tile, stage, smem, arrays, strides, sizes)
        scores_of_tile(tile, stage, registers, smem, arrays, strides, sizes, score)
        if kept_weight.present:
            scores.find_kept(walk.lane_place(tile, smem), registers, arrays, sizes)
        if of_ds and not delta_first:
            walk.add_deltas(stage, registers, smem, score)
        if read.behind:
            scores.load(tile.t, walk.origin_of(tile, smem, strides), registers, arrays, strides, sizes, masked)
        if has_functions and masked:
            asks = walk.needs_mask(tile, smem, arrays, strides)
            for r in range(rows):
                scores.show_seen(r, tile.t, walk.own_row(r, smem, TRUE), registers)
            scores.apply(walk.lane_place(tile, smem), asks, registers, arrays, strides, score)
        term = real(0)
        if chain.has_row_term:
            place = walk.lane_place(tile, smem)
            term = chain.row_term(place.b, place.h, arrays, strides)
            scores.find_distances(place, registers)
        weigh(tile, stage, registers, smem, term, score, masked)
        gradients_of_tile(tile, stage, registers, smem, arrays, strides, sizes, score)

    @inlined
    def write(acc_ds, acc_dv, smem, arrays, strides, sizes, score):
        """Write the sums. Where they go comes from the state of the block: kept in registers through the loop, it would
        take those that S needs."""
        work, nonfinite = walk.work_again(smem, arrays, strides, sizes), uint32(0)
        rows_left = counted = walk.rows_left(work)
        if of_keys:
            if not config.packed:
                rows_left = int32(min(sizes.seqlen_k - work.first_key, config.tile_n))
            if of_ds:
                base, stride = key_row(strides.dk, work.sequence, work.h_kv, work.first_key), strides.dk[2]
                nonfinite |= store_ds(acc_ds, score.scale, arrays.dk, base, stride, rows_left, counted)
            if of_p:
                base, stride = key_row(strides.dv, work.sequence, work.h_kv, work.first_key), strides.dv[2]
                nonfinite |= store_dv(acc_dv, real(1), arrays.dv, base, stride, rows_left, counted)
        else:
            base, stride = query_row(strides.dq, work.sequence, work.h, work.first_query), strides.dq[2]
            nonfinite |= store_ds(acc_ds, score.scale, arrays.dq, base, stride, rows_left, counted)
        if groups > 1:
            products.sync_owners()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            thread = special.thread_index()
            lane, first_row = thread & int32(31), int32((thread >> int32(5 + shift)) * config.warp_rows)
            if of_keys:
                sequence, h_kv, first_key = work
                recompute(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)
            else:
                own = work_tile.query_tile(work)
                recompute(nonfinite, first_row, lane, own, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_mma_backward(arrays, strides, sizes, score):
        thread = special.thread_index()
        smem = async_tiles.aligned(shared.address(cuda.shared.array(0, uint8)))
        work = walk.work_of(special.block_index(), arrays, strides, sizes)
        if config.packed:
            if walk.rows_left(work) <= 0:  # simt/outside.py writes what is behind the valid keys
                return
        tile, stage = walk.set_up(work, smem, thread, arrays, strides, sizes), int32(0)  # stage: which one is in use
        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, part / 8, 4)
            local.array(s_count, real),  # acc_dp (strips, part / 8, 4)
            local.array(ds_count, real),  # acc_ds (strips, columns / 8, 4): dK or dQ
            local.array(dv_count, real),  # acc_dv (strips, columns / 8, 4)
            local.array(products.weight_count, products.register),  # p_frag
            local.array(products.weight_count, products.register),  # ds_frag
            local.array(products.s_count, products.register),  # own_s_frag: K or Q
            local.array(products.dp_count, products.register),  # own_dp_frag: V or dO
            local.array(products.other_count, products.register),  # other_frag, of a tile of the other side
            local.array(products.shared_count, products.shared_type),  # shared_frag: P or dS from shared memory
            local.array(rows, real),  # distance: q_pos - k_pos of each row at the lane's first column
            local.array(read.bias_words, read.bias_type),  # loaded (2 * strips, part / 8, 2), in 16 bits two in one
            local.array(rows if has_functions else read.bits_words, uint32),  # shown_bits: by a mask, and by functions
            local.array(kept_weight.words, uint32),  # kept: which weights count (kernels/score/kept_weights.py)
        )
        for x in range(ds_count):
            registers.acc_ds[x] = real(0)
        for x in range(dv_count):
            registers.acc_dv[x] = real(0)

        if walk.exists(tile):
            walk.load_own(work, smem, thread, arrays, strides)
            source = walk.sources(tile, TRUE, TRUE, smem, strides, sizes)
            if config.with_dq:
                walk.load_s(tile, source, stage, smem, strides, sizes)
            walk.load_dp(tile, source, stage, smem, arrays, strides, sizes)
            if not one_stage:
                walk.load_s(tile, source, stage, smem, strides, sizes)
        cp_async.commit_group()
        if config.in_registers:
            wait_all()
            cuda.syncthreads()
            products.load_own(registers.own_s_frag, registers.own_dp_frag, smem, smem + int32(plan.own_dp))

        if only_tile:  # it has no code of its own for one that is seen whole, which takes registers
            if walk.exists(tile):
                step(tile, stage, registers, smem, arrays, strides, sizes, score, TRUE)
        else:
            whole = is_unmasked(tile, smem, arrays, strides)
            while walk.exists(tile):
                # Tiles of which some row does not see some column; then those that are seen whole; then, with a left
                # window, again some of the first kind; and all this for each head of a group.
                while walk.exists(tile) and not whole:
                    step(tile, stage, registers, smem, arrays, strides, sizes, score, TRUE)
                    tile, stage = walk.following(tile, smem, arrays, strides), int32(stage ^ (stages - 1))
                    whole = is_unmasked(tile, smem, arrays, strides)
                while walk.exists(tile) and whole:
                    step(tile, stage, registers, smem, arrays, strides, sizes, score, FALSE)
                    tile, stage = walk.following(tile, smem, arrays, strides), int32(stage ^ (stages - 1))
                    whole = is_unmasked(tile, smem, arrays, strides)

        wait_all()
        write(registers.acc_ds, registers.acc_dv, smem, arrays, strides, sizes, score)

    return flash_attention_mma_backward
