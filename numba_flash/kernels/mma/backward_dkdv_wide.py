"""dK and dV in float32 and float64 on tensor cores; since Ampere (sm_80).

Read mma/backward_dkdv first, whose loop this is, with one query tile at a time. A block owns a key tile of one KV head.
It loops over the query tiles that see it, for each query head of the group. A warp owns `warp_rows` keys, and computes
(listing 7 of docs/algorithm.md, lines 6 to 12)

    dP^T = V dO^T     S^T = K Q^T     P^T = e^(S^T - lse)     dS^T = P^T * (dP^T - delta)
    dV += P^T dO      dK += dS^T Q    and at the end dK *= scale

with the products of the forward in these dtypes (backward_wide.py). dO of a tile is loaded while dK is summed up from
the previous tile, and Q with lse and delta while dP is computed.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dk and dv are contiguous.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint8, uint32

from ...ptx import cp_async, local, memory, shared, special
from ..recompute import keys as recompute
from ..score import fragments, gradient_functions, kept_weights
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.stage import FragmentAt
from ..steps import async_tiles, lse_delta, numbers
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, key_queries
from ..steps.sequence import key_row, query_range, query_row
from . import backward_wide, work_tile


class Registers(NamedTuple):
    """A warp's parts of S^T, dP^T, dK and dV, of operands, and of its keys. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    acc_dk: Any
    acc_dv: Any
    weights: Any  # P, then dS, of all warps that own the same rows
    own_frag: Any
    other_frag: Any
    p_frag: Any
    first_query: Any  # first query that sees a key
    end_query: Any
    kept: Any  # which weights count (kernels/score/kept_weights.py)
    loaded: Any  # bias (kernels/score/reads.py)
    shown_bits: Any  # by the caller's mask, and by functions


class Lanes(NamedTuple):
    """The shared addresses of the lane's rows, and what it exchanges."""

    k: int
    q: int
    do_transposed: int
    v: int
    do: int
    q_transposed: int
    exchanged: int


class Walk(NamedTuple):
    """The query tiles of each head, one head after the other."""

    sequence: Any
    h_kv: int
    first_key: int
    begin: int  # the first tile of a head
    tiles: int  # of a head


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, size = config.head_dim, config.head_dim_v, config.item_size
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    of_dk, of_dv, alignment = config.of_dk, config.of_dv, config.ALIGNMENT
    plan = config.shared_layout()
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    strips, rows = warp_rows // 16, warp_rows // 8
    columns = tile_m // groups  # columns of scores that a warp computes
    blocks = columns // 8
    dk_columns, dv_columns = head_dim_padded // groups, head_dim_v_padded // groups
    s_count = strips * blocks * 4
    weight_count = strips * 8 if groups > 1 else 1  # of 16 queries
    steps_16 = tile_m // 16
    dk_count, dv_count = (strips * n // 2 if wanted else 1 for n, wanted in ((dk_columns, of_dk), (dv_columns, of_dv)))

    real = numbers.of(config.compute_dtype).real
    load_k, load_q = (async_tiles.loader(tile, head_dim_padded, threads, 1, size) for tile in (tile_n, tile_m))
    load_v, load_do = (async_tiles.loader(tile, head_dim_v_padded, threads, 1, size) for tile in (tile_n, tile_m))
    s_and_dv = backward_wide.products(config, head_dim_padded, head_dim_v_padded)
    dp_and_dk = backward_wide.products(config, head_dim_v_padded, head_dim_padded)
    (_, put, meet, _, get_16, step_16, *_), exchanged_bytes = backward_wide.exchange(config)
    store_dk = backward_wide.storer(config, head_dim, head_dim_padded)
    store_dv = backward_wide.storer(config, head_dim_v, head_dim_v_padded)
    operand_count = s_and_dv.p_count if groups == 1 else strips * 8
    work_of, row_term = work_tile.of_keys(config), fragments.chain(config).row_term
    weight, _ = fragments.weights_at(config)
    start_rows, of_pair = lse_delta.staged(config, tile_m, threads)
    drops, kept_words, _, kept_of, _, _ = kept_weights.on_fragments(config, strips, columns)
    read, has_mask = score_reads.make(config, strips, columns, of_keys=True), config.has("mask")
    bias_words, bias_type, has_functions = read.bias_words, read.bias_type, gradient_functions.present(config)
    has_bits = has_mask or has_functions  # one bit for each score says whether it is seen
    apply_functions = gradient_functions.on_fragments(config, strips, columns, of_keys=True, derivative=of_dk)
    recompute_keys = recompute.make(config, of_dk, of_dv)
    wait_all = cp_async.wait_group(0)

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def turn(t, walk, sizes):
        """-> (i, h) of the t-th query tile."""
        member = divide(t, walk.tiles)
        h = walk.h_kv * divide(sizes.heads, sizes.heads_kv) + member
        return int32(walk.begin + t - member * walk.tiles), int32(h)

    @inlined
    def load_others(t, do_smem, walk, arrays, strides, sizes):
        """Start the copies of dO of the t-th query tile."""
        i, h = turn(t, walk, sizes)
        rows_left = int32(sizes.seqlen_q - i * tile_m)
        source = memory.address(arrays.do, query_row(strides.do, walk.sequence, h, i * tile_m))
        load_do(do_smem, source, size * strides.do[2], 0, rows_left, head_dim_v, special.thread_index())

    @inlined
    def load_queries(i, h, k_smem, walk, arrays, strides, sizes):
        """Start the copies of Q of query tile i of a head, with lse and delta."""
        rows_left = int32(sizes.seqlen_q - i * tile_m)
        source = memory.address(arrays.q, query_row(strides.q, walk.sequence, h, i * tile_m))
        load_q(
            k_smem + int32(plan.other_s), source, size * strides.q[2], 0, rows_left, head_dim, special.thread_index()
        )
        start_rows(k_smem + int32(plan.rows), walk.sequence, h, i * tile_m, arrays, sizes, special.thread_index())

    @inlined
    def own_column():
        """The lane's first column of the scores that its warp computes."""
        thread = special.thread_index()
        return int32(((thread >> int32(5)) & (groups - 1)) * columns + int32(first_column_of(thread & int32(31))))

    @inlined
    def finished(registers, at, r, n, x, delta, score):
        """dP^T times how often its weight counts, minus delta."""
        dp = registers.acc_dp[at]
        if drops:
            counts = (registers.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0
            dp = dp * score.kept_count if counts else real(0)
        return dp - delta

    @inlined
    def finish_dp(registers, rows_smem, score):
        """Finishes all of acc_dp, before it is multiplied by a score_mod's derivative."""
        first_column = own_column()
        lse, delta = local.array(2, real), local.array(2, real)
        for n in range(blocks):
            of_pair(lse, delta, rows_smem, first_column + n * 8)
            for x in range(2):
                for r in range(rows):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    registers.acc_dp[at] = finished(registers, at, r, n, x, delta[x], score)

    @inlined
    def ask(i, h, registers, walk, arrays, strides, sizes, score):
        """shown_bits <- which queries see a key, by every option that hides some; acc_s, acc_dp <- with score_mod and
        its derivative; loaded <- bias."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        first_row, first_query = (warp >> shift) * warp_rows, int32(i * tile_m + own_column())
        if read.reads:
            origin = read.origin(walk.sequence.b, h, walk.first_key, arrays, strides)
            part = int32(i * groups + (warp & (groups - 1)))
            read.load(
                registers.loaded, registers.shown_bits, part, origin, first_row, lane, arrays, strides, sizes, FALSE
            )
        for r in range(rows if has_bits else 0):
            first, end = int32(registers.first_query[r] - first_query), int32(registers.end_query[r] - first_query)
            seen = columns_within(first, end, 0)
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        if has_functions:
            key = int32(walk.first_key + first_row + int32(first_row_of(lane)))
            apply_functions(
                registers.acc_s,
                registers.acc_dp,
                registers.shown_bits,
                walk.sequence.b,
                h,
                first_query,
                walk.sequence.q_start,
                key,
                TRUE,
                arrays,
                strides,
                score,
            )

    @inlined
    def weigh(i, registers, rows_smem, walk, term, score):
        """acc_s, acc_dp <- P^T times how often it counts, and dS^T."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        key = (warp >> shift) * warp_rows + int32(first_row_of(lane))
        first_column = own_column()
        lse, delta = local.array(2, real), local.array(2, real)
        for n in range(blocks):
            of_pair(lse, delta, rows_smem, first_column + n * 8)
            for x in range(2):
                query = int32(i * tile_m + first_column + n * 8 + x)
                for r in range(rows):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    distance = real(int64(query) + walk.sequence.q_start - walk.first_key - (key + r * 8))
                    here = FragmentAt(term, distance, read.added(registers.loaded, r, n, x))
                    p, derivative = weight(registers.acc_s[at], here, score, lse[x])
                    if has_bits:
                        seen = (registers.shown_bits[r] >> uint32(2 * n + x)) & uint32(1) != 0
                    else:
                        seen = query >= registers.first_query[r] and query < registers.end_query[r]
                    weighed = p
                    if drops:
                        counts = (registers.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0
                        weighed = p * score.kept_count if counts else real(0)
                    registers.acc_s[at] = weighed if seen else real(0)
                    if of_dk:
                        if has_functions:
                            dp = registers.acc_dp[at]
                        else:
                            dp = finished(registers, at, r, n, x, delta[x], score)
                        registers.acc_dp[at] = p * dp * derivative if seen else real(0)

    @inlined
    def find_kept(i, h, kept, walk, arrays, sizes):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        first_q_pos = int64(i) * tile_m + own_column() + walk.sequence.q_start
        key = int64(walk.first_key) + (warp >> shift) * warp_rows + int32(first_row_of(lane))
        kept_of(kept, first_q_pos, walk.sequence.b, h, key, arrays, sizes)

    @inlined
    def step(t, registers, lanes, k_smem, walk, arrays, strides, sizes, score):
        """One query tile of one head."""
        i, h = turn(t, walk, sizes)
        wait_all()
        cuda.syncthreads()  # dO has arrived, and all threads have finished with Q and lse of the last tile
        load_queries(i, h, k_smem, walk, arrays, strides, sizes)
        cp_async.commit_group()
        if of_dk:
            dp_and_dk.multiply_part(registers.acc_dp, registers.own_frag, registers.other_frag, lanes.v, lanes.do)
        wait_all()
        cuda.syncthreads()  # Q, lse and delta have arrived
        s_and_dv.multiply_part(registers.acc_s, registers.own_frag, registers.other_frag, lanes.k, lanes.q)
        if drops:
            find_kept(i, h, registers.kept, walk, arrays, sizes)
        if of_dk and has_functions:
            finish_dp(registers, k_smem + int32(plan.rows), score)
        if read.reads or has_functions:
            ask(i, h, registers, walk, arrays, strides, sizes, score)
        term = row_term(walk.sequence.b, h, arrays, strides)
        weigh(i, registers, k_smem + int32(plan.rows), walk, term, score)
        if groups > 1:
            if of_dv:
                put(registers.acc_s, lanes.exchanged)
            if of_dk:
                put(registers.acc_dp, lanes.exchanged + of_dv * exchanged_bytes)
            meet()
        if of_dv:
            if groups == 1:
                s_and_dv.to_p(registers.acc_s, registers.p_frag)
                s_and_dv.multiply_p_v(registers.acc_dv, registers.p_frag, registers.other_frag, lanes.do_transposed)
            else:
                at, rows_at_16 = lanes.exchanged, lanes.do_transposed
                for _ in range(special.opaque(steps_16)):
                    get_16(registers.weights, at)
                    s_and_dv.to_16(registers.weights, registers.p_frag)
                    s_and_dv.add_16(registers.acc_dv, registers.p_frag, registers.other_frag, rows_at_16)
                    at, rows_at_16 = int32(at + step_16), int32(rows_at_16 + 2048)
        cuda.syncthreads()  # all threads have finished with dO
        if t + 1 < walk.tiles * divide(sizes.heads, sizes.heads_kv):
            load_others(int32(t + 1), k_smem + int32(plan.other_dp), walk, arrays, strides, sizes)
        cp_async.commit_group()
        if of_dk:
            if groups == 1:
                s_and_dv.to_p(registers.acc_dp, registers.p_frag)
                dp_and_dk.multiply_p_v(registers.acc_dk, registers.p_frag, registers.other_frag, lanes.q_transposed)
            else:
                at, rows_at_16 = lanes.exchanged + of_dv * exchanged_bytes, lanes.q_transposed
                for _ in range(special.opaque(steps_16)):
                    get_16(registers.weights, at)
                    s_and_dv.to_16(registers.weights, registers.p_frag)
                    dp_and_dk.add_16(registers.acc_dk, registers.p_frag, registers.other_frag, rows_at_16)
                    at, rows_at_16 = int32(at + step_16), int32(rows_at_16 + 2048)

    @cuda.jit
    def flash_attention_mma_dkdv_wide(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        k_smem = aligned(shared.address(cuda.shared.array(0, uint8)))  # (tile_n, head_dim_padded)
        v_smem = k_smem + int32(plan.own_dp)  # (tile_n, head_dim_v_padded)
        q_smem = k_smem + int32(plan.other_s)  # (tile_m, head_dim_padded)
        do_smem = k_smem + int32(plan.other_dp)  # (tile_m, head_dim_v_padded)
        k_lane, q_lane, do_transposed, exchanged = s_and_dv.lanes(lane, warp, k_smem, q_smem, do_smem)
        v_lane, do_lane, q_transposed, _ = dp_and_dk.lanes(lane, warp, v_smem, do_smem, q_smem)
        lanes = Lanes(k_lane, q_lane, do_transposed, v_lane, do_lane, q_transposed, exchanged)

        sequence, h_kv, first_key = work_of(special.block_index(), arrays, strides, sizes)
        keys_left = int32(min(sequence.keys - first_key, tile_n))  # may be below 0
        begin, _, _, stop = query_range(sequence, first_key, first_key + keys_left - 1, sizes, tile_m)
        if has_mask:  # drop the tiles before the first and after the last query to which it leaves a key
            group, end_key = divide(sizes.heads, sizes.heads_kv), first_key + max(keys_left, int32(1))
            first, end, _, _ = read.ranges(sequence.b, h_kv * group, group, first_key, end_key, arrays, strides, sizes)
            begin = max(int32(begin), divide(first, tile_m))
            stop = max(min(int32(stop), divide(end + int32(tile_m - 1), tile_m)), begin)
        tiles = int32(stop - begin) if keys_left > 0 else int32(0)
        walk = Walk(sequence, h_kv, first_key, int32(begin), tiles)
        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, columns / 8, 4)
            local.array(s_count, real),  # acc_dp (strips, columns / 8, 4)
            local.array(dk_count, real),  # acc_dk (strips, dk_columns / 8, 4)
            local.array(dv_count, real),  # acc_dv (strips, dv_columns / 8, 4)
            local.array(weight_count, real),  # weights (strips, 2, 4)
            local.array(s_and_dv.q_count, s_and_dv.register),  # own_frag
            local.array(s_and_dv.kv_count, s_and_dv.register),  # other_frag
            local.array(operand_count, s_and_dv.register),  # p_frag
            local.array(rows, int32),  # first_query
            local.array(rows, int32),  # end_query
            local.array(kept_words, uint32),  # kept
            local.array(bias_words, bias_type),  # loaded (rows, tile_m / 8, 2)
            local.array(rows, uint32),  # shown_bits
        )
        for x in range(dk_count):
            registers.acc_dk[x] = real(0)
        for x in range(dv_count):
            registers.acc_dv[x] = real(0)
        first_row = int32((warp >> shift) * warp_rows)
        for r in range(rows):
            key = int32(first_key + first_row + int32(first_row_of(lane)) + r * 8)
            first, end = key_queries(key, sequence.q_start, sizes.left, sizes.right, sequence.seqlen_q)
            registers.first_query[r] = int32(first)
            registers.end_query[r] = int32(end) if key < sequence.keys else int32(0)

        if tiles > 0:
            k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key))
            load_k(k_smem, k_global, size * strides.k[2], 0, keys_left, head_dim, thread)
            if of_dk:
                v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key))
                load_v(v_smem, v_global, size * strides.v[2], 0, keys_left, head_dim_v, thread)
            load_others(int32(0), do_smem, walk, arrays, strides, sizes)
        cp_async.commit_group()
        t, end = int32(0), int32(tiles * divide(sizes.heads, sizes.heads_kv))
        while t < end:
            step(t, registers, lanes, k_smem, walk, arrays, strides, sizes, score)
            t = int32(t + 1)

        rows_left = int32(min(sizes.seqlen_k - first_key, tile_n) - first_row)
        valid, column_group = int32(keys_left - first_row), warp & (groups - 1)
        nonfinite = uint32(0)
        if of_dk:
            column = column_group * dk_columns
            base = key_row(strides.dk, sequence, h_kv, first_key + first_row) + column
            nonfinite |= store_dk(
                registers.acc_dk, score.scale, lane, arrays.dk, base, strides.dk[2], rows_left, valid, head_dim - column
            )
        if of_dv:
            column = column_group * dv_columns
            base = key_row(strides.dv, sequence, h_kv, first_key + first_row) + column
            nonfinite |= store_dv(
                registers.acc_dv, real(1), lane, arrays.dv, base, strides.dv[2], rows_left, valid, head_dim_v - column
            )
        cuda.syncthreads()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return flash_attention_mma_dkdv_wide
