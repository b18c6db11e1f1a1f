"""dQ in float32 and float64 on tensor cores; since Ampere (sm_80).

Read backward_dkdv_wide.py first. A block owns a query tile of one head. It loops over the key tiles that the queries
see, from the last to the first. A warp owns `warp_rows` queries, and computes (listing 8 of docs/algorithm.md, lines 6
to 9)

    dP = dO V^T     S = Q K^T     P = e^(S - lse)     dS = P * (dP - delta)     dQ += dS K

V of a tile is loaded while dQ is summed up from the previous tile, and K while dP is computed.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dq is contiguous.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, uint8, uint32

from ...ptx import cp_async, local, memory, shared, special
from ..recompute import queries as recompute
from ..score import fragments, gradient_functions, kept_weights
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.stage import FragmentAt
from ..steps import async_tiles, lse_delta, numbers
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, row_keys
from ..steps.query_tile import QueryTile
from ..steps.sequence import key_range, key_row, query_row
from . import backward_wide, work_tile


class Registers(NamedTuple):
    """A warp's parts of S, dP and dQ, of operands, and of its queries. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    acc_dq: Any
    weights: Any  # dS of all warps that own the same rows
    own_frag: Any
    other_frag: Any
    ds_frag: Any
    first_key: Any  # first key that a query sees
    end_key: Any
    lse: Any
    delta: Any
    kept: Any  # which weights count (kernels/score/kept_weights.py)
    loaded: Any  # bias (kernels/score/reads.py)
    shown_bits: Any  # by the caller's mask, and by functions


class Lanes(NamedTuple):
    """The shared addresses of the lane's rows, and what it exchanges."""

    q: int
    k: int
    k_transposed: int
    do: int
    v: int
    exchanged: int


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, size = config.head_dim, config.head_dim_v, config.item_size
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    plan = config.shared_layout()
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    strips, rows = warp_rows // 16, warp_rows // 8
    columns = tile_n // groups  # columns of scores that a warp computes
    blocks = columns // 8
    dq_columns = head_dim_padded // groups
    s_count, dq_count = strips * blocks * 4, strips * dq_columns // 2
    weight_count = strips * 8 if groups > 1 else 1  # of 16 keys
    steps_16 = tile_n // 16

    real = numbers.of(config.compute_dtype).real
    load_q, load_k = (async_tiles.loader(tile, head_dim_padded, threads, 1, size) for tile in (tile_m, tile_n))
    load_do, load_v = (async_tiles.loader(tile, head_dim_v_padded, threads, 1, size) for tile in (tile_m, tile_n))
    s_and_dq = backward_wide.products(config, head_dim_padded, head_dim_padded)
    of_dp = backward_wide.products(config, head_dim_v_padded, head_dim_padded)
    (_, put, meet, _, get_16, step_16, *_), _ = backward_wide.exchange(config)
    store_dq = backward_wide.storer(config, head_dim, head_dim_padded)
    operand_count = s_and_dq.p_count if groups == 1 else strips * 8
    work_of, row_term = work_tile.of_queries(config, tile_m), fragments.chain(config).row_term
    weight, _ = fragments.weights_at(config)
    of_query = lse_delta.of_query(config)
    drops, kept_words, kept_of, _, _, _ = kept_weights.on_fragments(config, strips, columns)
    words_a_row = kept_words // rows if drops else 1
    read, has_mask = score_reads.make(config, strips, columns), config.has("mask")
    bias_words, bias_type, has_functions = read.bias_words, read.bias_type, gradient_functions.present(config)
    has_bits = has_mask or has_functions  # one bit for each score says whether it is seen
    apply_functions = gradient_functions.on_fragments(config, strips, columns, of_keys=False)
    recompute_queries = recompute.make(config)
    wait_all = cp_async.wait_group(0)

    @inlined
    def aligned(address):
        return int32((address + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))

    @inlined
    def load_values(j, v_smem, tile, arrays, strides):
        """Start the copies of V of key tile j."""
        source = memory.address(arrays.v, key_row(strides.v, tile.sequence, tile.h_kv, j * tile_n))
        rows_left = int32(int32(tile.sequence.keys) - j * tile_n)
        load_v(v_smem, source, size * strides.v[2], 0, rows_left, head_dim_v, special.thread_index())

    @inlined
    def load_keys(j, k_smem, tile, arrays, strides):
        source = memory.address(arrays.k, key_row(strides.k, tile.sequence, tile.h_kv, j * tile_n))
        rows_left = int32(int32(tile.sequence.keys) - j * tile_n)
        load_k(k_smem, source, size * strides.k[2], 0, rows_left, head_dim, special.thread_index())

    @inlined
    def own_column():
        """The lane's first column of the scores that its warp computes."""
        thread = special.thread_index()
        return int32(((thread >> int32(5)) & (groups - 1)) * columns + int32(first_column_of(thread & int32(31))))

    @inlined
    def finish_dp(registers, score):
        """acc_dp <- dP times how often its weight counts, minus delta."""
        for r in range(rows):
            for n in range(blocks):
                for x in range(2):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    dp = registers.acc_dp[at]
                    if drops:
                        word = registers.kept[r * words_a_row + n // 16]
                        counts = (word >> uint32(2 * (n % 16) + x)) & uint32(1) != 0
                        dp = dp * score.kept_count if counts else real(0)
                    registers.acc_dp[at] = dp - registers.delta[r]

    @inlined
    def ask(j, registers, tile, arrays, strides, sizes, score):
        """shown_bits <- which keys a query sees, by every option that hides some; acc_s, acc_dp <- with score_mod and
        its derivative; loaded <- bias."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        first_row, first_key = (warp >> shift) * warp_rows, int32(j * tile_n + own_column())
        if read.reads:
            origin = read.origin(tile.sequence.b, tile.h, tile.first_query, arrays, strides)
            part = int32(j * groups + (warp & (groups - 1)))
            read.load(
                registers.loaded, registers.shown_bits, part, origin, first_row, lane, arrays, strides, sizes, FALSE
            )
        for r in range(rows if has_bits else 0):
            first, end = int32(registers.first_key[r] - first_key), int32(registers.end_key[r] - first_key)
            seen = columns_within(first, end, 0)
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        if has_functions:
            query = int32(tile.first_query + first_row + int32(first_row_of(lane)))
            apply_functions(
                registers.acc_s,
                registers.acc_dp,
                registers.shown_bits,
                tile.sequence.b,
                tile.h,
                query,
                tile.sequence.q_start,
                first_key,
                TRUE,
                arrays,
                strides,
                score,
            )

    @inlined
    def weigh(j, registers, tile, term, score):
        """acc_dp <- dS, from dP as finish_dp leaves it."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        row = (warp >> shift) * warp_rows + int32(first_row_of(lane))
        first_column = own_column()
        for n in range(blocks):
            for x in range(2):
                key = int32(j * tile_n + first_column + n * 8 + x)
                for r in range(rows):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    distance = real(tile.sequence.q_start + tile.first_query + (row + r * 8) - key)
                    here = FragmentAt(term, distance, read.added(registers.loaded, r, n, x))
                    p, derivative = weight(registers.acc_s[at], here, score, registers.lse[r])
                    if has_bits:
                        seen = (registers.shown_bits[r] >> uint32(2 * n + x)) & uint32(1) != 0
                    else:
                        seen = key >= registers.first_key[r] and key < registers.end_key[r]
                    registers.acc_dp[at] = p * registers.acc_dp[at] * derivative if seen else real(0)

    @inlined
    def find_kept(j, kept, tile, arrays, sizes):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        row = (warp >> shift) * warp_rows + int32(first_row_of(lane))
        kept_of(
            kept,
            int32(j * tile_n + own_column()),
            tile.sequence.b,
            tile.h,
            row,
            tile.sequence.q_start + tile.first_query,
            arrays,
            sizes,
        )

    @inlined
    def step(j, begin, registers, lanes, q_smem, tile, term, arrays, strides, sizes, score):
        """One key tile."""
        wait_all()
        cuda.syncthreads()  # V has arrived, and all threads have finished with K of the last tile
        load_keys(j, q_smem + int32(plan.other_s), tile, arrays, strides)
        cp_async.commit_group()
        of_dp.multiply_part(registers.acc_dp, registers.own_frag, registers.other_frag, lanes.do, lanes.v)
        wait_all()
        cuda.syncthreads()  # K has arrived, and all threads have finished with V
        if j > begin:
            load_values(int32(j - 1), q_smem + int32(plan.other_dp), tile, arrays, strides)
        cp_async.commit_group()
        s_and_dq.multiply_part(registers.acc_s, registers.own_frag, registers.other_frag, lanes.q, lanes.k)
        if drops:
            find_kept(j, registers.kept, tile, arrays, sizes)
        finish_dp(registers, score)
        if read.reads or has_functions:
            ask(j, registers, tile, arrays, strides, sizes, score)
        weigh(j, registers, tile, term, score)
        if groups > 1:
            put(registers.acc_dp, lanes.exchanged)
            meet()
            at, rows_at = lanes.exchanged, lanes.k_transposed
            for _ in range(special.opaque(steps_16)):
                get_16(registers.weights, at)
                s_and_dq.to_16(registers.weights, registers.ds_frag)
                s_and_dq.add_16(registers.acc_dq, registers.ds_frag, registers.other_frag, rows_at)
                at, rows_at = int32(at + step_16), int32(rows_at + 2048)
        else:
            s_and_dq.to_p(registers.acc_dp, registers.ds_frag)
            s_and_dq.multiply_p_v(registers.acc_dq, registers.ds_frag, registers.other_frag, lanes.k_transposed)

    @cuda.jit
    def flash_attention_mma_dq_wide(arrays, strides, sizes, score):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        q_smem = aligned(shared.address(cuda.shared.array(0, uint8)))  # (tile_m, head_dim_padded)
        do_smem = q_smem + int32(plan.own_dp)  # (tile_m, head_dim_v_padded)
        k_smem = q_smem + int32(plan.other_s)  # (tile_n, head_dim_padded)
        v_smem = q_smem + int32(plan.other_dp)  # (tile_n, head_dim_v_padded)
        q_lane, k_lane, k_transposed, exchanged = s_and_dq.lanes(lane, warp, q_smem, k_smem, k_smem)
        do_lane, v_lane, _, _ = of_dp.lanes(lane, warp, do_smem, v_smem, v_smem)
        lanes = Lanes(q_lane, k_lane, k_transposed, do_lane, v_lane, exchanged)

        tile = work_of(special.block_index(), arrays, strides, sizes)
        sequence = tile.sequence
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, tile_m))
        end_query = tile.first_query + queries_left
        begin_, _, _, stop_ = key_range(sequence, tile.first_query, end_query - 1, sizes, tile_n)
        begin, stop = int32(begin_), int32(stop_)
        if has_mask:  # drop the key tiles before the first and after the last in which it leaves a key
            first, end, _, _ = read.ranges(
                tile.sequence.b, tile.h, 1, tile.first_query, end_query, arrays, strides, sizes
            )
            begin = max(begin, divide(first, tile_n))
            stop = min(stop, divide(end + int32(tile_n - 1), tile_n))
        registers = Registers(
            local.array(s_count, real),  # acc_s (strips, tile_n / 8, 4)
            local.array(s_count, real),  # acc_dp (strips, tile_n / 8, 4)
            local.array(dq_count, real),  # acc_dq (strips, dq_columns / 8, 4)
            local.array(weight_count, real),  # weights (strips, 2, 4)
            local.array(s_and_dq.q_count, s_and_dq.register),  # own_frag
            local.array(s_and_dq.kv_count, s_and_dq.register),  # other_frag
            local.array(operand_count, s_and_dq.register),  # ds_frag
            local.array(rows, int32),  # first_key
            local.array(rows, int32),  # end_key
            local.array(rows, real),  # lse
            local.array(rows, real),  # delta
            local.array(kept_words, uint32),  # kept
            local.array(bias_words, bias_type),  # loaded (rows, tile_n / 8, 2)
            local.array(rows, uint32),  # shown_bits
        )
        for x in range(dq_count):
            registers.acc_dq[x] = real(0)
        first_row = int32((warp >> shift) * warp_rows)
        tile_pos = sequence.q_start + tile.first_query
        term = row_term(tile.sequence.b, tile.h, arrays, strides)
        for r in range(rows):
            row = first_row + int32(first_row_of(lane)) + r * 8
            first, end = row_keys(tile_pos + row, sizes.left, sizes.right, sequence.keys)
            if has_functions:  # they are not called for a row that does not exist
                end = end if row < queries_left else first
            registers.first_key[r], registers.end_key[r] = int32(first), int32(end)
            lse, delta = of_query(sequence, tile.h, int32(tile.first_query + row), arrays, sizes)
            registers.lse[r], registers.delta[r] = lse, delta

        j = int32(stop - 1)
        if j >= begin:
            q_global = memory.address(arrays.q, query_row(strides.q, sequence, tile.h, tile.first_query))
            do_global = memory.address(arrays.do, query_row(strides.do, sequence, tile.h, tile.first_query))
            load_q(q_smem, q_global, size * strides.q[2], 0, queries_left, head_dim, thread)
            load_do(do_smem, do_global, size * strides.do[2], 0, queries_left, head_dim_v, thread)
            load_values(j, v_smem, tile, arrays, strides)
        cp_async.commit_group()
        while j >= begin:
            step(j, begin, registers, lanes, q_smem, tile, term, arrays, strides, sizes, score)
            j = int32(j - 1)

        column, rows_left = (warp & (groups - 1)) * dq_columns, int32(queries_left - first_row)
        base = query_row(strides.dq, sequence, tile.h, tile.first_query + first_row) + column
        nonfinite = store_dq(
            registers.acc_dq, score.scale, lane, arrays.dq, base, strides.dq[2], rows_left, rows_left, head_dim - column
        )
        cuda.syncthreads()  # a row that is not finite in some columns is written again as a whole
        if nonfinite != 0:
            own = QueryTile(sequence.b, tile.h, tile.first_query, tile.part)
            recompute_queries(nonfinite, first_row, lane, own, term, arrays, strides, sizes, score)

    return flash_attention_mma_dq_wide
